"""Model and data as they are given, and the batches in which the one enters the other."""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pickle
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import PIL
import torch
import torch.utils.data
from PIL import Image
from torch import Tensor, nn

from embedx import fold, models, sources, text_data
from embedx.checks import require_unmasked
from embedx.data import Looked, collated, copied, folder, in_memory
from embedx.errors import (
    ConfigError,
    DataError,
    EmbedxError,
    ModelError,
    ShapeError,
    first_line,
)
from embedx.matrix import Array
from embedx.models import Model, Preprocess
from embedx.pictures import picture, thumbnail
from embedx.sources import Shards, Source, as_array
from embedx.threads import n_threads

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Inputs = Tensor | dict[str, Tensor]
T = TypeVar("T")
if TYPE_CHECKING:
    Network = Model | nn.Module
else:  # what is given instead of one is told in words of its own, not by the hint
    Network = Any

# --------------------------------------------------------------------------- as they are given


def as_model(model: Any, *, preprocess: Preprocess | None) -> Model:
    """A network, or a Model, as a Model of what it is now.

    Args:
        model: What the user gave.
        preprocess: For pictures, in the place of its own.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(model, Model):
        described = model.as_it_is()
        if preprocess is not None:
            described = dataclasses.replace(described, preprocess=preprocess, assumed="")
        return described
    if isinstance(model, nn.Module):
        return models.live(model, preprocess=preprocess)
    if isinstance(model, str):
        raise ConfigError(
            f"model is the text {model!r}; give a network: "
            f"embedx.models.torchvision({json.dumps(model)})"
        )
    if isinstance(model, type):
        name = model.__name__
        raise ConfigError(f"model is the class {name}; give an instance of it: {name}(...)")
    raise ConfigError(
        f"model is a {type(model).__name__}; give an nn.Module, or a Model of embedx.models"
    )


def as_source(
    data: Any, *, labels: Any, ids: Any, num_workers: int | str | None
) -> Source | Shards:
    """Whatever holds samples, as a source of them.

    Args:
        data: A folder, an array, texts, a Dataset, a DataLoader, or a source.
        labels: For data that has none of its own.
        ids: The same.
        num_workers: How many processes will read.

    Raises:
        ConfigError: ``labels`` or ``ids`` for data that has its own.
        DataError: It cannot be used.
    """
    # What a Dataset opens on first use must not be open here when worker processes are forked:
    # they would read through one file position.
    look = _in_a_worker if isinstance(num_workers, int) and num_workers else None
    source: Source | Shards
    if isinstance(data, (Source, Shards)):
        source = data
    elif isinstance(data, (str, os.PathLike)):
        source = folder(os.fspath(data))
    elif isinstance(data, torch.utils.data.DataLoader):
        own_collate = data.collate_fn is not torch.utils.data.default_collate
        source = in_memory(
            data.dataset,
            labels=labels,
            ids=ids,
            collate=data.collate_fn if own_collate else None,
            look=look,
        )
        return dataclasses.replace(source, warnings=(*source.warnings, *_not_followed(data)))
    elif text_data.are_texts(data):
        return text_data.in_memory(data, labels=labels, ids=ids)
    else:
        _refuse_iterable(data)
        return in_memory(data, labels=labels, ids=ids, look=look)
    if labels is not None or ids is not None:
        raise ConfigError(
            f"{source.name} has ids and labels of its own; leave labels= and ids= out"
        )
    return source


@dataclasses.dataclass(frozen=True)
class _Once(torch.utils.data.Dataset[Looked | EmbedxError]):
    look: Callable[[], Looked]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Looked | EmbedxError:
        try:
            return self.look()
        except EmbedxError as error:  # raised, it would carry a worker's traceback
            return error


def _in_a_worker(look: Callable[[], Looked]) -> Looked:
    loader = torch.utils.data.DataLoader(
        _Once(look), batch_size=None, num_workers=1, worker_init_fn=start_worker
    )
    with workers_said(1), sources.random_put_back():
        (looked,) = started(loader)
    if isinstance(looked, EmbedxError):
        raise looked
    return looked


def _refuse_iterable(data: Any) -> None:
    if isinstance(data, torch.utils.data.IterableDataset):
        raise DataError(
            f"data is a {type(data).__name__}, an IterableDataset, which has no order to come back "
            "to; give a map-style Dataset, with __len__ and __getitem__"
        )


def in_order(loader: "torch.utils.data.DataLoader[Any]") -> torch.utils.data.BatchSampler:
    """How a loader makes its batches, if they hold each sample of its Dataset once.

    Raises:
        DataError: They do not, or not for sure.
    """
    _refuse_iterable(loader.dataset)
    plain = torch.utils.data.DataLoader
    own = type(loader)
    if own.__iter__ is not plain.__iter__ or own._get_iterator is not plain._get_iterator:
        raise DataError(
            f"the DataLoader is a {own.__name__} that makes its batches in an iterator of its own, "
            "which is not followed; give its Dataset, or a plain DataLoader"
        )
    batches: Any = loader.batch_sampler
    if batches is None:
        raise DataError(
            "the DataLoader has batch_size=None, so that an item of its Dataset is a whole batch; "
            "give a Dataset of single samples"
        )
    is_plain = type(batches) is torch.utils.data.BatchSampler
    sampler: Any = batches.sampler if is_plain else batches
    how = type(sampler).__name__
    if type(sampler) is torch.utils.data.RandomSampler:
        is_plain = not sampler.replacement
        how += f" with replacement={sampler.replacement} and num_samples={len(sampler)}"
    elif type(sampler) is not torch.utils.data.SequentialSampler:
        is_plain = False
    if is_plain and hasattr(loader.dataset, "__len__"):
        is_plain = len(sampler) == len(loader.dataset)
    if not is_plain:
        raise DataError(
            f"the DataLoader draws its samples by a {how}, and rows are those of a Dataset, each "
            "once and in order; give the Dataset itself, or torch.utils.data.Subset(dataset, "
            "indices)"
        )
    return batches  # type: ignore[no-any-return]


def _not_followed(loader: "torch.utils.data.DataLoader[Any]") -> list[str]:
    """What a loader asks for and does not get."""
    batches = in_order(loader)
    n_last = len(loader.dataset) % batches.batch_size  # type: ignore[arg-type]
    said = []
    if isinstance(batches.sampler, torch.utils.data.RandomSampler):
        said.append("the DataLoader shuffles; rows are in the order of its Dataset all the same")
    if batches.drop_last and n_last:
        said.append(f"the DataLoader drops the last {n_last} samples; here they are kept")
    if loader.worker_init_fn is not None:
        said.append("the worker_init_fn of the DataLoader is not called")
    if loader.multiprocessing_context is not None:
        said.append("the multiprocessing_context of the DataLoader is not followed")
    return said


def device_of(name: str, model: Model, *, is_live: bool) -> torch.device:
    """The device that a name means; ``auto`` is where a live network lies, else the fastest.

    Raises:
        ConfigError: It is not on this machine.
    """
    if torch.get_default_device().type == "meta":
        raise ConfigError(
            "torch's default device is meta, on which tensors have no values; set another, "
            'torch.set_default_device("cpu"), or leave the block'
        )
    if name == "auto":
        if is_live:  # a live network stays where it lies
            return next((p.device for p in model.module.parameters()), torch.device("cpu"))
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        there.append("mps")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    spelled = f"{device.type}:{device.index or 0}"
    if spelled not in there and not (device.type in there and not device.index):
        raise ConfigError(
            f"device {name!r} is not on this machine; choose auto or one of: {', '.join(there)}"
        )
    return device


# --------------------------------------------------------------------------- batches

# Texts are put in order of length within so many batches of them: the padding costs 1 % where one
# batch of short and long texts has 40 %. What is read and committed together is the whole window.
WINDOW_BATCHES = 32
TOKENS_FIELD = "outputs/n_tokens"
TEXT_CHARACTERS_MOST = 1_000_000


@dataclasses.dataclass(frozen=True)
class Piece:
    """Items of one forward pass.

    Attributes:
        inputs: Shape ``(b, ...)``, or several such by the names of the model's arguments; for bad
            items zeros, or copies of a good one where a ``collate_fn`` makes them.
        rows: Their places in the batch, ascending or not; None where they are all of it.
    """

    inputs: Inputs
    rows: Array | None = None

    @property
    def size(self) -> int:
        """How many items enter, b."""
        return len(tensors_of(self.inputs)[0])

    def pin_memory(self) -> "Piece":
        """The same with its inputs where a GPU can copy them from while it computes."""
        return dataclasses.replace(self, inputs=mapped(self.inputs, torch.Tensor.pin_memory))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Items that are read and written together; one that could not be read keeps its row.

    Attributes:
        start: Row of the first item.
        pieces: What goes through the model, a forward pass each; none if every item is bad.
        reasons: Why an item is bad, by its place in the batch.
        thumbnails: Shape ``(b, side, side, 3)`` uint8, or None.
        labels: Shape ``(b,)`` int32 where the items hold them, -1 for bad items; or None.
        size: b.
        are_pixels: Whether they came out of the preprocessing; tensors enter as they are.
        n_tokens: Shape ``(b,)`` int32 where the items are texts: how long they are before they are
            cut, -1 for bad items; or None.
        fatal: Why the run cannot go on; an exception would carry a worker's traceback.
    """

    start: int
    pieces: tuple[Piece, ...]
    reasons: dict[int, str]
    thumbnails: Array | None
    labels: Array | None
    size: int
    are_pixels: bool = False
    n_tokens: Array | None = None
    fatal: EmbedxError | None = None

    @property
    def kept(self) -> dict[str, Array]:
        """What was read of the items beside the inputs, by the name of its dataset."""
        all_of_it = {
            "thumbnails": self.thumbnails,
            "labels": self.labels,
            TOKENS_FIELD: self.n_tokens,
        }
        return {name: array for name, array in all_of_it.items() if array is not None}

    def pin_memory(self) -> "Batch":
        """The same with its inputs where a GPU can copy them from while it computes."""
        return dataclasses.replace(self, pieces=tuple(one.pin_memory() for one in self.pieces))


@dataclasses.dataclass(frozen=True)
class _Item:
    """A sample as it was read, or the reason why it could not be."""

    prepared: Any
    is_pixels: bool
    label: int | None
    miniature: Array | None
    reason: str | None = None


def rows_together(model: Model, *, batch_size: int) -> int:
    """How many rows are read and committed together: a batch, of texts a whole window."""
    return batch_size * (1 if model.tokenizer is None else WINDOW_BATCHES)


class Batches(torch.utils.data.Dataset[Batch]):
    """Whole batches by number, so that a worker process prepares one at a time.

    Args:
        source: The samples.
        model: What they are prepared for.
        batch_size: Samples in a forward pass.
        num_workers: How many processes will read.
        thumbnails: Side in px of miniatures of pictures; 0 for none.
        only_pictures: Whether tensors are refused, for they would pass by the preprocessing that
            was asked for.
        first_row: Where the first batch begins.
        end_row: Where the last one ends; the end of the source where not given.
    """

    def __init__(
        self,
        source: Source,
        model: Model,
        *,
        batch_size: int,
        num_workers: int = 0,
        thumbnails: int = 0,
        only_pictures: bool = False,
        first_row: int = 0,
        end_row: int | None = None,
    ) -> None:
        self._source = source
        self._preprocess = model.preprocess
        self._tokenizer = model.tokenizer
        self._title = model.name
        self._only_pictures = only_pictures
        self._side_px = thumbnails
        self._pass_size = batch_size
        self._batch_size = rows_together(model, batch_size=batch_size)
        self._first_row = first_row
        self._end_row = len(source) if end_row is None else end_row
        # A random crop, say: drawn from the seed of its row, as what the data themselves draw.
        prepares_alone = self._preprocess is None or not self._preprocess.is_own
        self._is_seeded = source.draws or not prepares_alone
        # Pillow decodes beside other threads. In a process of its own a worker has one processor,
        # and code of the user's own need not stand two readers at once.
        is_shared = num_workers == 0 and source.reads_files and prepares_alone
        self._n_threads = n_threads() if is_shared else 1

    def __len__(self) -> int:
        return math.ceil((self._end_row - self._first_row) / self._batch_size)

    def __getitem__(self, number: int) -> Batch:
        try:
            return self._read(number)
        except EmbedxError as error:
            return Batch(0, (), {}, None, None, 0, fatal=error)

    def _read(self, number: int) -> Batch:
        start = self._first_row + number * self._batch_size
        size = min(self._batch_size, self._end_row - start)
        collate = self._source.collate
        good: dict[int, Any] = {}
        pieces: list[Piece] = []
        n_tokens = None if self._tokenizer is None else np.full(size, -1, np.int32)
        reasons: dict[int, str] = {}
        miniatures: Array | None = None
        labels = np.full(size, -1, np.int32) if self._source.labels_in_items else None
        kinds: dict[bool, int] = {}
        for i, item in enumerate(self._items(range(start, start + size))):
            if item.label is not None and labels is not None:
                labels[i] = item.label
            if item.miniature is not None:
                if miniatures is None:
                    miniatures = np.full((size, *item.miniature.shape), 255, np.uint8)
                miniatures[i] = item.miniature
            if item.reason is not None:
                reasons[i] = item.reason
            else:
                good[i] = item.prepared
                kinds[item.is_pixels] = start + i
        if len(kinds) > 1:
            raise ShapeError(
                f"sample {self._source.ids[kinds[True]]} is a picture and sample "
                f"{self._source.ids[kinds[False]]} is a tensor; give all samples as the same"
            )
        if not good:
            pass
        elif n_tokens is not None:
            pieces = self._tokenized(good, n_tokens, reasons)
        elif collate is None:
            pieces.append(Piece(self._stack(good, size, start)))
        else:
            # A collate_fn takes whole batches: a copy of a good item holds the place of a bad one.
            filler = next(iter(good.values()))
            items = [good[i] if i in good else copied(filler) for i in range(size)]
            if self._source.draws:
                sources.seed_random(start)
            inputs = self._collate(items, start)
            pieces.append(Piece(inputs))
        return Batch(
            start, tuple(pieces), reasons, miniatures, labels, size, True in kinds, n_tokens
        )

    def _tokenized(
        self, texts: Mapping[int, str], n_tokens: Array, reasons: dict[int, str]
    ) -> list[Piece]:
        """Passes of texts of like length, the longest first; their lengths go to ``n_tokens``."""
        assert self._tokenizer is not None
        places = np.array(list(texts))
        ids, n_tokens[places] = self._tokenizer.encode(list(texts.values()))
        for place, one in zip(places.tolist(), ids, strict=True):
            if not len(one):
                reasons[place] = "DataError: the text has no tokens"
        order = np.argsort([-len(one) for one in ids], kind="stable")
        order = order[[len(ids[i]) > 0 for i in order]]
        return [
            Piece(self._tokenizer.pad([ids[i] for i in few]), places[few])
            for few in (
                order[first : first + self._pass_size]
                for first in range(0, len(order), self._pass_size)
            )
        ]

    def _items(self, rows: range) -> Iterable[_Item]:
        if self._n_threads == 1:
            return map(self._item, rows)
        with concurrent.futures.ThreadPoolExecutor(self._n_threads) as threads:
            return list(threads.map(self._item, rows))

    def _item(self, row: int) -> _Item:
        """Read and prepare one sample; whatever is wrong with it is its own fault alone."""
        collate = self._source.collate
        label, miniature = None, None
        try:
            if self._is_seeded:
                sources.seed_random(row)
            item = self._source.read(row)
            if self._source.labels_in_items:
                item, found = item
                label = sources.whole_label(found, n_names=len(self._source.label_names))
            if self._tokenizer is None:
                sources.require_item(item)
            if collate is None and isinstance(item, Image.Image) and item.mode != "RGB":
                item = picture(item)
            shown = item if collate is None else picture(item)
            if self._side_px and isinstance(shown, Image.Image):
                miniature = thumbnail(shown, self._side_px)
            if self._tokenizer is not None:
                return _Item(self._text(item), False, label, None)
            prepared = self._prepare(item) if collate is None else item
            is_pixels = collate is None and isinstance(item, Image.Image)
            return _Item(prepared, is_pixels, label, miniature)
        except (ConfigError, ShapeError):
            raise
        except MemoryError:  # the machine's fault, and another run may read it
            raise DataError(
                f"out of memory at row {row}, {self._source.ids[row]}; what was committed is kept: "
                "run again to go on, with a smaller batch_size or less num_workers"
            ) from None
        except (Exception, SystemExit) as error:
            return _Item(None, False, label, miniature, _reason(error))

    def _text(self, item: Any) -> str:
        if isinstance(item, str):
            if len(item) > TEXT_CHARACTERS_MOST:
                raise DataError(
                    f"a text of {len(item):,} characters, and at most {TEXT_CHARACTERS_MOST:,} are "
                    "taken; split it"
                )
            item.encode()
            return item
        if text_data.is_missing(item):
            raise DataError("the text is missing")
        is_picture = isinstance(item, Image.Image)
        raise ConfigError(
            f"the data are {'pictures' if is_picture else type(item).__name__}, and {self._title} "
            "takes texts; give data=text data.path=FILE or a list of texts, or choose a model of "
            "pictures, such as model=resnet18"
        )

    def _prepare(self, item: Any) -> Inputs:
        if isinstance(item, str):
            raise ConfigError(
                f"the data are texts, and {self._title} has no tokenizer; choose a model of texts: "
                "model=minilm, or model=hf model.name=FOLDER"
            )
        if isinstance(item, Image.Image):
            if self._preprocess is None:
                raise ConfigError(
                    "the data are pictures and the model is live: say how they enter it with "
                    "preprocess=embedx.models.Preprocess(resize_px=256, crop_px=224)"
                )
            return self._preprocess.pixels(item)
        if self._only_pictures:
            raise ConfigError(
                f"preprocess= takes pictures, and the data are {type(item).__name__}; leave it "
                "out, tensors enter as they are"
            )
        if isinstance(item, Mapping):
            return _own_tensors(item)
        return _own_tensor(item)

    def _collate(self, items: list[Any], start: int) -> Inputs:
        assert self._source.collate is not None
        inputs: Inputs
        try:
            made = collated(self._source.collate(items))
            inputs = _own_tensors(made) if isinstance(made, Mapping) else _own_tensor(made)
        except EmbedxError:
            raise
        except Exception as error:
            raise DataError(
                f"the collate_fn of the DataLoader failed on rows {start} to "
                f"{start + len(items) - 1}: {_reason(error)}"
            ) from error
        for tensor in tensors_of(inputs):
            if tensor.ndim == 0 or len(tensor) != len(items):
                raise ShapeError(
                    "the collate_fn of the DataLoader gives inputs of shape "
                    f"{tuple(tensor.shape)} for {len(items)} samples; let it give one entry a "
                    "sample"
                )
        self._require_own_places(inputs, items, start)
        return inputs

    def _require_own_places(self, inputs: Inputs, items: list[Any], start: int) -> None:
        """Refuse a batch in which a sample has the place of another, where that can be seen.

        It can where the ``collate_fn`` stacks what the samples hold, as most do: one that leaves
        samples out, or fills the batch up with others, has done well until then.

        Raises:
            ConfigError: A sample stands in another's place.
        """
        own = [as_array(item[0] if isinstance(item, (tuple, list)) else item) for item in items]
        slots = as_array(inputs)
        if slots is None:
            return

        def is_in(slot: Array, one: Array | None) -> bool:
            return one is not None and one.shape == slot.shape and np.array_equal(one, slot)

        others = [i for i, slot in enumerate(slots) if not is_in(slot, own[i])]
        if len(others) == len(own):  # then the samples are not stacked as they are
            return
        for i in others:
            j = next((j for j, one in enumerate(own) if is_in(slots[i], one)), None)
            if j is not None:
                raise ConfigError(
                    f"the collate_fn of the DataLoader gives row {start + j} in the place of row "
                    f"{start + i}, so that rows could not be told whose they are; let it keep all "
                    "samples in their order, and let __getitem__ raise for one that cannot be read"
                )

    def _stack(self, inputs: Mapping[int, Any], size: int, start: int) -> Inputs:
        first, example = next(iter(inputs.items()))
        if not isinstance(example, dict):
            return self._stack_tensors(inputs, size, start)
        for i, item in inputs.items():
            if not isinstance(item, dict) or item.keys() != example.keys():
                keys = ", ".join(item) if isinstance(item, dict) else "no names"
                raise ShapeError(
                    f"sample {self._source.ids[start + i]} has {keys} and sample "
                    f"{self._source.ids[start + first]} has {', '.join(example)}; give all samples "
                    "the same"
                )
        return {
            name: self._stack_tensors({i: item[name] for i, item in inputs.items()}, size, start)
            for name in example
        }

    def _stack_tensors(self, inputs: Mapping[int, Any], size: int, start: int) -> Tensor:
        first, example = next(iter(inputs.items()))
        stacked = torch.zeros((size, *example.shape), dtype=example.dtype, device="cpu")
        for i, tensor in inputs.items():
            if not isinstance(tensor, Tensor):
                raise ShapeError(
                    f"sample {self._source.ids[start + i]} has names and sample "
                    f"{self._source.ids[start + first]} has none; give all samples the same"
                )
            if tensor.shape != example.shape or tensor.dtype != example.dtype:
                raise ShapeError(
                    f"sample {self._source.ids[start + i]} is {_form(tensor)} and sample "
                    f"{self._source.ids[start + first]} is {_form(example)}; bring all samples to "
                    "one shape and type"
                )
            stacked[i] = tensor
        return stacked


def _own_tensors(values: Mapping[Any, Any]) -> dict[str, Tensor]:
    named = {str(name): _own_tensor(value) for name, value in values.items()}
    if len(named) < len(values):
        raise DataError(
            f"two of its names are one as texts ({', '.join(map(repr, values))}); give the names "
            "of the model's arguments"
        )
    if not named:
        raise DataError(
            "what enters is a mapping that holds nothing; give tensors by the names of the model's "
            "arguments"
        )
    return named


def _own_tensor(value: Any) -> Tensor:
    """A tensor that shares nothing: a Dataset may fill one buffer again and again.

    One that needs a gradient could not be sent from a worker.
    """
    require_unmasked(value)
    if isinstance(value, np.ndarray):
        # A copy of an array that may be read-only, turned round, or of the other byte order.
        value = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(value)
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError):
        if not isinstance(value, (list, tuple)) or not any(isinstance(x, Tensor) for x in value):
            raise
        raise DataError(
            f"it is a {type(value).__name__} of {len(value)}; give one tensor, a tuple that begins "
            "with it, or a dict by the names of the model's arguments"
        ) from None
    for is_so, kind in (
        (tensor.is_meta, "without values (on meta)"),
        (tensor.is_nested, "nested"),
        (tensor.is_quantized, "quantized"),
        (tensor.layout != torch.strided, "sparse"),
    ):
        if is_so:
            raise DataError(f"it is a tensor that is {kind}; give a dense one")
    return tensor.detach().resolve_conj().resolve_neg().clone()


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _reason(error: BaseException) -> str:
    """Why an item failed, in one line and without its path: rows go by their id."""
    text = first_line(error)
    if isinstance(error, PIL.UnidentifiedImageError):
        text = "not a picture in a format that is read"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return f"{type(error).__name__}: {text}".rstrip(": ")


# --------------------------------------------------------------------------- workers


def only(batches: list[Batch]) -> Batch:
    """What a DataLoader collates where an item is a batch already."""
    return batches[0]


def start_worker(_: int) -> None:
    """Ctrl-C reaches every process of the group: the parent decides; without it, end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = "1"  # there is a process for each processor
    parent = os.getppid()

    def end_with_parent() -> None:
        # A worker whose parent was killed can hang for good, on a pipe that nobody reads.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@contextlib.contextmanager
def workers_said(n: int) -> Iterator[None]:
    """A worker process that dies is one line. torch raises it from a signal handler, anywhere.

    Raises:
        DataError: It died, or the system has no more files to open.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if "Too many open files" in str(error) and not isinstance(error, EmbedxError):
            raise DataError(
                "too many open files; what was committed is kept: raise the limit with ulimit -n "
                f"and run again to go on, or with less than num_workers={n}"
            ) from error
        # What it raised is in other words; or its end of a pipe is gone before torch has seen it.
        is_gone = isinstance(error, ConnectionError) and n > 0
        if "DataLoader worker (pid" not in str(error) and not is_gone:
            raise
        raise DataError(
            "a process that reads the data died, killed or out of memory; what was committed is "
            f"kept: run again to go on, with less than num_workers={n}"
        ) from error


def started(loader: "torch.utils.data.DataLoader[T]") -> Iterable[T]:
    """The batches, once the processes that read them are started.

    Raises:
        DataError: They cannot be started here, or the data cannot be sent to them.
    """
    try:
        # A loader draws its seed where torch makes tensors, which may be set to meta.
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.filterwarnings("ignore", message="Got pickle error")  # torch's longer words
            return iter(loader)
    except AssertionError as error:
        if "daemonic" not in str(error):
            raise
        raise DataError(
            "this process is daemonic, one of a pool, and may start no others to read the data; "
            "use num_workers=0"
        ) from None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not loader.num_workers:
            raise
        raise DataError(
            f"the data cannot be sent to worker processes ({first_line(error)}); define its "
            "classes and functions in a module, or use num_workers=0"
        ) from error


# --------------------------------------------------------------------------- passes


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors that enter, one at least."""
    return [inputs] if isinstance(inputs, Tensor) else list(inputs.values())


def mapped(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """What a function gives of each tensor that enters, by the same names."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    return {name: function(tensor) for name, tensor in inputs.items()}


def apart(inputs: Inputs, *, n: int) -> list[int]:
    """Two samples, or one of two, in places that they do not have in the batch of n.

    They come one after the other in the other order, for what goes from earlier samples to later
    ones leaves the first as they are; and they are the least, for the largest number of a batch,
    by which all may be divided, is not to be theirs.
    """
    few = min(2, n - 1)
    first = tensors_of(inputs)[0]
    if first.is_floating_point():
        sizes = first.detach().flatten(1).abs().amax(1)
        # Zeros stand in place of what could not be read.
        sizes = torch.where(sizes > 0, sizes, torch.inf)
        sizes[0] = torch.inf
        return sorted(sizes.argsort(stable=True)[:few].tolist(), reverse=True)
    return list(range(n - 1, n - 1 - few, -1))


def is_alike(values: Tensor, others: Tensor, *, most: float) -> bool:
    """Whether they differ by at most a share of the largest, masked ones aside.

    Scores of classes that are masked are often -1e9 or less, and would hide all others: what is
    10,000 times as large as nearly all is held to its own size alone.
    """
    if values.shape != others.shape:
        return False
    ours, theirs = values.detach().double().flatten(), others.detach().double().flatten()
    sizes = theirs.abs()
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    if not torch.equal(ours.isfinite(), theirs.isfinite()) or not len(sizes):
        return bool(torch.equal(ours.nan_to_num(), theirs.nan_to_num()))
    small = sizes.kthvalue(1 + len(sizes) // 100).values
    scale = sizes[sizes <= 1e4 * small].amax()
    is_near = (ours - theirs).abs() <= most * torch.maximum(scale, theirs.abs())
    # Where one number is nearly zero, rounding is still that of the others.
    usual = sizes[sizes < 1e3]
    if len(usual):
        is_near |= (ours - theirs).abs() <= 1e-6 * usual.amax()
    return bool((is_near | ~theirs.isfinite()).all())


def placed(inputs: Inputs, device: torch.device) -> Inputs:
    """Inputs on a device."""
    return mapped(inputs, lambda tensor: tensor.to(device, non_blocking=True))


def channels_last(inputs: Inputs) -> Inputs:
    """Feature maps in the layout in which convolutions are fastest; the numbers are the same."""
    layout = torch.channels_last
    return mapped(
        inputs, lambda one: one.contiguous(memory_format=layout) if one.ndim == 4 else one
    )


def seed_all(seed: int, device: torch.device) -> None:
    """A model that draws random numbers draws the same ones for a batch in every run."""
    sources.seed_random(seed)
    if device.type != "cpu":
        torch.manual_seed(seed)  # of every GPU in use too; it takes 0.4 ms


def is_by_sample(model: Model) -> bool:
    """Whether no code of a model may draw random numbers, or see the samples of a batch together.

    Of another one ``batch_size`` decides the rows too.
    """
    prepared = model.preprocess
    return fold.is_by_sample(model.module) and not (prepared is not None and prepared.is_own)


def random_states(device: torch.device, *, of_torch_alone: bool = False) -> list[Any]:
    """The states of all generators that code shares, on the processors and on the device.

    Those of torch alone are read in a fortieth of the time.
    """
    of_torch = [torch.get_rng_state().numpy().tobytes()] if of_torch_alone else None
    states: list[Any] = of_torch or sources.random_states()
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


def draws_unseen(model: Model, *, what: str) -> ModelError:
    """What is said of one that is taken to draw no random numbers, and does.

    Args:
        model: The model.
        what: What it makes of a sample.
    """
    return ModelError(
        f"{model.name} draws random numbers in its passes, in eval mode too, so that a {what} "
        "would hang on the batch it is in; make it a part of a module of your own, whose runs are "
        "told apart by batch_size"
    )


def made_by(model: Model, device: torch.device) -> dict[str, Any]:
    """What a file says of the model, and of the machine, that it was made by: root attributes."""
    return {
        "model": model.name,
        "weights": model.weights,
        "weights_sha256": model.weights_sha256,
        "source": model.source,
        "license": model.license,
        "device": device.type,
        "environment": json.dumps(environment()),
    }


def environment() -> dict[str, Any]:
    """The versions, and the number of threads, on which the last bits of what is made hang."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "threads": torch.get_num_threads(),
    }


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The block in which a pass computes in half precision, where that was asked for."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


@contextlib.contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """fp32 means fp32, forward and back: TensorFloat-32 is off unless it was asked for, and so is
    the autocast of a block of the user's that this lies in.
    """
    # Some of these appear only at run time, so a type checker does not know them.
    backends: Any = torch.backends
    places = [
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    ]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda", "mps"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
