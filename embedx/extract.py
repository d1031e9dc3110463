"""The stage ``extract``: data through a model, what its layers give into ``embeddings.h5``."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import pickle
import platform
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import PIL
import torch
import torch.utils.data
import yaml
from PIL import Image
from torch import Tensor, nn

from embedx import data as sources
from embedx import fold, hooks, models, store, text_data
from embedx import pooling as pools
from embedx.ablations import Ablation, as_ablations, changes
from embedx.checks import checked, require_unmasked
from embedx.columns import concatenated
from embedx.configs import public_config, settings_sha256
from embedx.data import Shards, Source
from embedx.errors import (
    ConfigError,
    DataError,
    EmbedxError,
    Interrupted,
    LayerError,
    ModelError,
    ShapeError,
    StoreError,
    first_line,
    listed,
)
from embedx.fingerprints import code_sha256, state_marks, value_sha256
from embedx.models import Model, Preprocess
from embedx.objectives import Backward, Objective
from embedx.parts import append_parts
from embedx.pooling import Function
from embedx.progress import Progress
from embedx.rows import Rows, not_finite, picture_size, require_float32, token_mask
from embedx.store import Array, Embeddings, Field, Status
from embedx.threads import n_threads

log = logging.getLogger("embedx")

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Inputs = Tensor | dict[str, Tensor]
T = TypeVar("T")
if TYPE_CHECKING:
    Network = Model | nn.Module
else:  # what is given instead of one is told in words of its own, not by the hint
    Network = Any


@checked
def extract(
    model: Network,
    data: Any,
    *,
    layers: str | Sequence[str] = "penultimate",
    pooling: str | Function | Sequence[str | Function] = "auto",
    normalize: bool | None = None,
    batch_size: int | None = None,
    num_workers: int | Literal["auto"] | None = None,
    device: str | torch.device = "auto",
    precision: Precision = "fp32",
    dtype: Literal["float32", "float16"] = "float32",
    save_outputs: bool = False,
    thumbnails: int = 32,
    objective: Objective | None = None,
    ablate: Sequence[Mapping[str, Any] | Ablation] | None = None,
    on_error: Literal["skip", "raise"] = "skip",
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    preprocess: Preprocess | None = None,
    labels: Any = None,
    ids: Any = None,
    config: Mapping[str, Any] | None = None,
) -> Embeddings:
    """Run data through a model once and stream what its layers give into one file.

    Done already with the same settings, it does nothing; interrupted, it goes on where the last
    commit was; the file's rows are those of the data, in order, always.

    Args:
        model: A network, or a :class:`~embedx.models.Model` from :mod:`embedx.models`.
        data: A folder of pictures, an array or tensor ``(n, ...)``, a list of texts, a map-style
            ``Dataset``, a ``DataLoader`` of one, a :class:`~embedx.data.Source`, or
            :class:`~embedx.data.Shards`. Of a loader, rows are in the order of its Dataset, and its
            ``collate_fn`` makes the inputs.
        layers: Capture points, ``NAME[@CALL][:WHAT[.PATH]]``, globs, or ``penultimate``.
        pooling: ``auto``, ``none``, ``flatten``, ``gap``, ``gap_last``, ``max``, ``gem``, ``cls``,
            ``mean_token``, ``max_token``, or a function ``(activation) -> (n, d)``; one for all
            points or one each.
        normalize: Scale each row to length 1 (L2); None for what the model was made for, at the
            layer that ``penultimate`` means.
        batch_size: Samples in a forward pass; the loader's, or 64, where not given.
        num_workers: Processes that read and prepare the data, 0 for none; the loader's, or
            ``auto``, where not given: up to eight for files beside a GPU, else none, and files are
            read by threads.
        device: ``auto`` (cuda, mps, cpu; a live network's own), or one of torch's names.
        precision: Of the arithmetic: ``fp32``, or the faster ``tf32``, ``bf16``, ``fp16``.
        dtype: Of the stored numbers.
        save_outputs: Keep the model's outputs too, as ``logits`` and ``predicted``.
        thumbnails: Side in px of the miniatures kept for pictures; 0 for none.
        objective: What the gradients of points such as ``layer4:grad`` are of: ``predicted``, the
            score of the class with the highest one (where not given); ``loss``, the cross-entropy
            of the label; or the number of a class, for its score.
        ablate: Parts of layers to silence or change in the pass, a mapping each with the keys of
            :class:`~embedx.ablations.Ablation`: ``{at: layer4, channels: [3, 5], by: zero}``.
        on_error: ``skip`` marks a sample that cannot be read as failed, ``raise`` stops at it.
        out: Folder for ``embeddings.h5``; one below ``outputs``, named after model and data, where
            not given.
        overwrite: Replace what another run left in ``out``, and all that was derived from it.
        preprocess: For pictures into a live network, or in the place of a Model's own; tensors
            enter unchanged without it.
        labels: For data that has none of its own, n of any kind.
        ids: For data that has none of its own, n unique texts.
        config: The settings to record; those of this call where not given.

    Returns:
        The file, opened for reading.

    Raises:
        ConfigError: An argument is out of its range.
        LayerError: A layer is not there, or does not fire exactly once.
        DataError: The data cannot be used, or every sample failed.
        ModelError: The forward pass failed.
        StoreError: No space, another writer, or ``out`` holds another run.
        Interrupted: SIGINT or SIGTERM; everything finished so far is kept.
    """
    loader = data if isinstance(data, torch.utils.data.DataLoader) else None
    if loader is not None:
        batch_size = _in_order(loader).batch_size if batch_size is None else batch_size
        num_workers = loader.num_workers if num_workers is None else num_workers
    batch_size = 64 if batch_size is None else batch_size
    if not 1 <= batch_size < 2**31:
        raise ConfigError(f"batch_size must be at least 1 (and below 2**31), not {batch_size}")
    if isinstance(num_workers, int) and num_workers < 0:
        raise ConfigError(f"num_workers must be at least 0, not {num_workers}")
    if not 0 <= thumbnails <= 512:
        raise ConfigError(f"thumbnails must be 0 to 512 px, not {thumbnails}")
    described = _as_model(model, preprocess=preprocess)
    source = _as_source(data, labels=labels, ids=ids, num_workers=num_workers)
    collates = isinstance(source, Source) and source.collate is not None
    if collates and (preprocess is not None or described.tokenizer is not None):
        what = f"the tokenizer of {described.name}" if preprocess is None else "preprocess="
        raise ConfigError(
            f"{what} and the collate_fn of the DataLoader both make the inputs; leave one out"
        )
    for note in (*described.notes, *source.warnings):
        log.warning(note)
    for note in source.notes:
        log.info(note)
    torch_device = _device(str(device), described, is_live=not isinstance(model, Model))
    if precision == "fp16" and torch_device.type == "cpu":
        raise ConfigError("precision=fp16 needs a GPU, and the device is cpu; use bf16 or fp32")
    if precision == "tf32" and torch_device.type != "cuda":
        raise ConfigError(f"precision=tf32 needs cuda, and the device is {torch_device}; use fp32")
    points = hooks.resolve_points(
        described.module,
        layers,
        penultimate=described.layer,
        title=described.name if isinstance(model, Model) else None,
    )
    ablations = as_ablations(ablate)
    plan = _Plan(
        model=described,
        source=source if isinstance(source, Source) else _ahead(source),
        points=points,
        poolings=pools.per_point(pooling, n_points=len(points)),
        normalize=_normalized(described, points, normalize),
        device=torch_device,
        precision=precision,
        dtype=np.dtype(dtype),
        batch_size=batch_size,
        num_workers=(
            num_workers
            if isinstance(num_workers, int)
            else _workers_for(
                source,
                torch_device,
                batch_size=batch_size,
                tokenizes=described.tokenizer is not None,
            )
        ),
        save_outputs=save_outputs,
        thumbnails=thumbnails,
        on_error=on_error,
        only_pictures=preprocess is not None,
        objective=_objective(points, objective, source),
        ablations=ablations,
        ablated=[
            point
            for one in ablations
            for point in hooks.resolve_points(described.module, one.at, title=described.name)
        ],
    )
    identity = plan.identity()
    if isinstance(source, Shards):
        identity |= {"rows": source.limit, "items": source.fingerprint, "columns": None}
    file_id = settings_sha256(identity)
    folder = Path(out) if out else Path("outputs") / f"{described.name}-{source.name}-{file_id[:6]}"
    path = folder / store.EMBEDDINGS_NAME
    if source.root is not None and folder.resolve() == source.root.resolve():
        raise ConfigError(f"out={folder} is the folder of the data; choose another out=FOLDER")
    if not overwrite:
        partial = store.partial_path(path)
        if path.exists() and not _is_begun(partial, identity):
            _refuse_another(path, identity, source)
            log.info("%s is complete already with these settings: nothing to do", path)
            _say_failed(path, int((store.open(path).status == Status.FAILED).sum()))
            if store.parts_id(path) == file_id:  # killed when all was done but this
                store.remove_parts(path)
            return store.open(path)
        store.require_no_parts(path, of=file_id if isinstance(source, Shards) else None)
        if partial.exists():
            _refuse_another(partial, identity, source)
    store.require_own_beside(path, has_config=True)
    log.info(
        "extracting %s of %s over %s (%s) on %s into %s",
        ", ".join(point.name for point in points),
        described.name,
        source.name,
        f"{len(source):,} rows" if isinstance(source, Source) else f"{len(source.names):,} shards",
        torch_device,
        path,
    )
    given = {
        "layers": [point.name for point in points],
        "pooling": [one.name for one in plan.poolings],
        "normalize": normalize,
        "precision": precision,
        "dtype": dtype,
        "save_outputs": save_outputs,
        "thumbnails": thumbnails,
        "objective": plan.objective,
        "ablate": [one.settings() for one in ablations] or None,
        "batch_size": batch_size,
    }
    recorded = dict(config) if config is not None else given
    attrs = {
        "id": file_id,
        "identity": json.dumps(identity, sort_keys=True),
        "config": public_config(recorded),
        "model": described.name,
        "weights": described.weights,
        "weights_sha256": described.weights_sha256,
        "source": described.source,
        "license": described.license,
        "data": source.name,
        "batch_size": batch_size,
        "device": torch_device.type,
        "environment": json.dumps(_environment()),
    }
    text = yaml.safe_dump({"id": file_id, **recorded}, sort_keys=False, allow_unicode=True)
    if isinstance(source, Shards):
        _run_shards(plan, source, path, attrs, config=text, overwrite=overwrite)
    else:
        _run(plan, path, attrs, config=text, overwrite=overwrite)
    return store.open(path)


# --------------------------------------------------------------------------- settings


@dataclasses.dataclass(frozen=True)
class _Plan:
    model: Model
    source: Source
    points: list[hooks.Point]
    poolings: list[pools.Pooling]
    normalize: list[bool]
    device: torch.device
    precision: Precision
    dtype: np.dtype[Any]
    batch_size: int
    num_workers: int
    save_outputs: bool
    thumbnails: int
    on_error: str
    only_pictures: bool
    objective: Objective | None
    ablations: list[Ablation]
    ablated: list[hooks.Point]

    @property
    def has_own_pooling(self) -> bool:
        return any(one.code for one in self.poolings)

    @property
    def is_by_sample(self) -> bool:
        """Whether no code may draw random numbers, or see the samples of a batch together."""
        prepared = self.model.preprocess
        return (
            fold.is_by_sample(self.model.module)
            and not self.has_own_pooling
            and not (prepared is not None and prepared.is_own)
        )

    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, for the id of the file and to name a difference."""
        prepared = self.model.preprocess
        makes_batches = self.source.collate is not None
        tokenizer = self.model.tokenizer
        # What only some runs have is left out of the others, whose ids are older than it.
        ablated = [one.settings() for one in self.ablations]
        return {
            **({} if tokenizer is None else {"tokenizer": tokenizer.config()}),
            **({} if self.objective is None else {"objective": self.objective}),
            **({"ablate": ablated} if ablated else {}),
            "model": self.model.source,
            "weights_sha256": self.model.weights_sha256,
            "code": self.model.code,
            "tokens": self.model.tokens,
            "preprocess": prepared.config() if prepared else None,
            "layers": [point.name for point in self.points],
            "pooling": [one.name for one in self.poolings],
            "pooling_code": [one.code for one in self.poolings],
            "normalize": self.normalize if len(set(self.normalize)) > 1 else self.normalize[0],
            "precision": self.precision,
            "dtype": self.dtype.name,
            "save_outputs": self.save_outputs,
            "thumbnails": self.thumbnails,
            "batch_size": self.batch_size if makes_batches or not self.is_by_sample else None,
            "default_dtype": str(torch.get_default_dtype()),
            "rows": len(self.source),
            "items": self.source.fingerprint,
            "columns": _columns_sha256(self.source),
            "revisions": [
                hooks.HOOKS_REVISION,
                pools.POOLING_REVISION,
                models.PREPROCESS_REVISION,
            ],
        }


def _objective(
    points: Sequence[hooks.Point], asked: Objective | None, source: Source | Shards
) -> Objective | None:
    """What gradients are of; None where there are none.

    Raises:
        ConfigError: It has no use, or takes labels that are not there.
    """
    names = ", ".join(point.name for point in points if point.is_gradient)
    if not names:
        if asked is not None:
            raise ConfigError(
                f"objective={asked} has no use without a gradient, such as layers=[NAME:grad]; "
                "leave it out"
            )
        return None
    if asked is None:
        log.info("%s: gradients of the score of the predicted class (objective=predicted)", names)
    if asked != "loss":
        return "predicted" if asked is None else asked
    if isinstance(source, Shards):
        raise ConfigError(
            f"objective=loss takes labels, and how those of {source.name} are numbered is known "
            "when all shards are read; use objective=predicted, or the number of a class"
        )
    if not (source.labels_in_items or source.labels is not None):
        raise ConfigError(
            f"objective=loss takes labels, and {source.name} has none; use objective=predicted, or "
            "the number of a class"
        )
    return asked


def _normalized(model: Model, points: Sequence[hooks.Point], asked: bool | None) -> list[bool]:
    """Whether the rows of each point are scaled to length 1."""
    if asked is not None:
        return [asked] * len(points)
    each = [model.normalizes and point.name == model.layer for point in points]
    if any(each):
        log.info(
            "rows of %s are scaled to length 1, as the model was made for; normalize=false leaves "
            "them as they are",
            model.layer,
        )
    return each


def _columns_sha256(source: Source) -> str:
    """SHA-256 of what the file keeps of the samples beside what the model makes of them."""
    labels: Any = None if source.labels is None else source.labels.tolist()
    if source.labels_in_items:
        labels = "in the items"
    metadata = {
        name: [_kind_of(column), *map(str, column)] for name, column in source.metadata.items()
    }
    columns = [list(source.ids), labels, list(source.label_names), metadata]
    return hashlib.sha256(json.dumps(columns).encode()).hexdigest()


def _kind_of(column: Any) -> str:
    dtype = np.asarray(column).dtype
    return "texts" if dtype.kind in "OU" else str(dtype)


def _as_model(model: Any, *, preprocess: Preprocess | None) -> Model:
    if isinstance(model, Model):
        described = model.as_it_is()
        if preprocess is not None:
            described = dataclasses.replace(described, preprocess=preprocess)
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


def _as_source(
    data: Any, *, labels: Any, ids: Any, num_workers: int | str | None
) -> Source | Shards:
    # What a Dataset opens on first use must not be open here when worker processes are forked:
    # they would read through one file position.
    look = _in_a_worker if isinstance(num_workers, int) and num_workers else None
    source: Source | Shards
    if isinstance(data, (Source, Shards)):
        source = data
    elif isinstance(data, (str, os.PathLike)):
        source = sources.folder(os.fspath(data))
    elif isinstance(data, torch.utils.data.DataLoader):
        own_collate = data.collate_fn is not torch.utils.data.default_collate
        source = sources.in_memory(
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
        return sources.in_memory(data, labels=labels, ids=ids, look=look)
    if labels is not None or ids is not None:
        raise ConfigError(
            f"{source.name} has ids and labels of its own; leave labels= and ids= out"
        )
    return source


@dataclasses.dataclass(frozen=True)
class _Once(torch.utils.data.Dataset[sources.Looked | EmbedxError]):
    look: Callable[[], sources.Looked]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> sources.Looked | EmbedxError:
        try:
            return self.look()
        except EmbedxError as error:  # raised, it would carry a worker's traceback
            return error


def _in_a_worker(look: Callable[[], sources.Looked]) -> sources.Looked:
    loader = torch.utils.data.DataLoader(
        _Once(look), batch_size=None, num_workers=1, worker_init_fn=_start_worker
    )
    with _workers_said(1), sources.random_put_back():
        (looked,) = _started(loader)
    if isinstance(looked, EmbedxError):
        raise looked
    return looked


def _refuse_iterable(data: Any) -> None:
    if isinstance(data, torch.utils.data.IterableDataset):
        raise DataError(
            f"data is a {type(data).__name__}, an IterableDataset, which has no order to come back "
            "to; give a map-style Dataset, with __len__ and __getitem__"
        )


def _in_order(loader: "torch.utils.data.DataLoader[Any]") -> torch.utils.data.BatchSampler:
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
    batches = _in_order(loader)
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


def _workers_for(
    source: Source | Shards, device: torch.device, *, batch_size: int, tokenizes: bool
) -> int:
    """How many processes read, where it is left to us; the rows are the same for any number."""
    # Beside a network on the same processors, a worker only takes turns with it: there the
    # pictures of a batch are read by threads, and then all processors multiply.
    reads = isinstance(source, Shards) or source.reads_files or tokenizes
    is_small = isinstance(source, Source) and len(source) <= batch_size
    if device.type == "cpu" or not reads or is_small:
        return 0
    return max(1, min(n_threads() - 1, 8))


def _device(name: str, model: Model, *, is_live: bool) -> torch.device:
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


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "threads": torch.get_num_threads(),
    }


def _is_begun(partial: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a run that was to overwrite a file with this one was stopped."""
    with contextlib.suppress(StoreError):  # damaged: the file stays as it is
        there = store.Embeddings(partial).identity if partial.exists() else {}
        return all(there.get(key) == value for key, value in identity.items())
    return False


def _refuse_another(present: Path, identity: Mapping[str, Any], source: Source | Shards) -> None:
    """Raise if the file that is there belongs to another run, naming the first difference."""
    there = store.Embeddings(present).identity
    differing = [key for key, value in identity.items() if there.get(key) != value]
    if not differing:
        return
    late = ["rows", "code", "items", "columns", "revisions"]
    key = min(differing, key=late.__contains__)
    was, now = there.get(key), identity[key]
    if isinstance(was, dict) and isinstance(now, dict):
        others = {name for name in was | now if was.get(name) != now.get(name)}
        was, now = ({k: v for k, v in one.items() if k in others} for one in (was, now))
    if key in ("rows", "items"):
        changes = _changes(present, source) if isinstance(source, Source) else "other shards"
        difference = f"the data has changed since: {changes}"
    elif key == "weights_sha256":
        words = store.Embeddings(present).attrs.get("weights")
        difference = f"its weights are {_short(words)}, {str(was)[:8]}, and here {str(now)[:8]}"
    elif key == "columns":
        difference = "the ids or labels are others"
    elif key == "code":
        difference = "the code, the structure or an attribute of the model is another"
        made_by = json.loads(store.Embeddings(present).attrs.get("environment", "{}")).get("python")
        if made_by != (python := platform.python_version()):
            difference += f" (or the same, compiled by Python {made_by} there and {python} here)"
    elif key == "pooling_code":
        difference = "the code of the pooling, or what it holds, is another"
    else:
        difference = f"{key} is {_short(was)} there and {_short(now)} here"
    raise StoreError(
        f"{present} holds another run: {difference}; choose another name or out folder, or replace "
        "it with overwrite=true"
    )


def _changes(present: Path, source: Source) -> str:
    """How the items of a source differ from those that a file was begun with."""
    ids, hashes = store.read_items(present)
    now = store.stored_texts(source.ids)
    if hashes is None or source.item_hashes is None:
        if len(ids) != len(now):
            return f"{len(ids):,} samples there and {len(now):,} here"
        return "some samples are others (which ones is not kept for such data)"
    there = dict(zip(ids, hashes.tolist(), strict=True))
    here = dict(zip(now, source.item_hashes.tolist(), strict=True))
    kinds = {
        "added": [name for name in now if name not in there],
        "removed": [name for name in ids if name not in here],
        "edited": [name for name in now if there.get(name, here[name]) != here[name]],
    }
    counted = [f"{len(names):,} {kind} ({_few(names)})" for kind, names in kinds.items() if names]
    return ", ".join(counted) or "the samples are in another order"


def _few(names: Sequence[str], most: int = 3) -> str:
    shown = [_short(name if name.isprintable() else ascii(name)) for name in names[:most]]
    return ", ".join([*shown, *(["..."] if len(names) > most else [])])


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 80 else text[:77] + "..."


# --------------------------------------------------------------------------- the loop

# Texts are put in order of length within so many batches of them: the padding costs 1 % where one
# batch of short and long texts has 40 %. What is read and committed together is the whole window.
WINDOW_BATCHES = 32
TOKENS_FIELD = "outputs/n_tokens"
TEXT_CHARACTERS_MOST = 1_000_000


@dataclasses.dataclass(frozen=True)
class _Piece:
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
        one = self.inputs if isinstance(self.inputs, Tensor) else next(iter(self.inputs.values()))
        return len(one)

    def pin_memory(self) -> "_Piece":
        if isinstance(self.inputs, Tensor):
            return dataclasses.replace(self, inputs=self.inputs.pin_memory())
        pinned = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        return dataclasses.replace(self, inputs=pinned)


@dataclasses.dataclass(frozen=True)
class _Batch:
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
    pieces: tuple[_Piece, ...]
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

    def pin_memory(self) -> "_Batch":
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


class _Batches(torch.utils.data.Dataset[_Batch]):
    """Whole batches by number, so that a worker process prepares one at a time."""

    def __init__(self, plan: _Plan, *, first_row: int) -> None:
        self._source = plan.source
        self._preprocess = plan.model.preprocess
        self._tokenizer = plan.model.tokenizer
        self._title = plan.model.name
        self._only_pictures = plan.only_pictures
        self._side_px = plan.thumbnails
        self._pass_size = plan.batch_size
        self._batch_size = plan.batch_size * (1 if self._tokenizer is None else WINDOW_BATCHES)
        self._first_row = first_row
        # A random crop, say: drawn from the seed of its row, as what the data themselves draw.
        prepares_alone = self._preprocess is None or not self._preprocess.is_own
        self._is_seeded = plan.source.draws or not prepares_alone
        # Pillow decodes beside other threads. In a process of its own a worker has one processor,
        # and code of the user's own need not stand two readers at once.
        is_shared = plan.num_workers == 0 and plan.source.reads_files and prepares_alone
        self._n_threads = n_threads() if is_shared else 1

    def __len__(self) -> int:
        return math.ceil((len(self._source) - self._first_row) / self._batch_size)

    def __getitem__(self, number: int) -> _Batch:
        try:
            return self._read(number)
        except EmbedxError as error:
            return _Batch(0, (), {}, None, None, 0, fatal=error)

    def _read(self, number: int) -> _Batch:
        start = self._first_row + number * self._batch_size
        size = min(self._batch_size, len(self._source) - start)
        collate = self._source.collate
        good: dict[int, Any] = {}
        pieces: list[_Piece] = []
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
            pieces.append(_Piece(self._stack(good, size, start)))
        else:
            # A collate_fn takes whole batches: a copy of a good item holds the place of a bad one.
            filler = next(iter(good.values()))
            items = [good[i] if i in good else sources.copied(filler) for i in range(size)]
            if self._source.draws:
                sources.seed_random(start)
            inputs = self._collate(items, start)
            pieces.append(_Piece(inputs))
        return _Batch(
            start, tuple(pieces), reasons, miniatures, labels, size, True in kinds, n_tokens
        )

    def _tokenized(
        self, texts: Mapping[int, str], n_tokens: Array, reasons: dict[int, str]
    ) -> list[_Piece]:
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
            _Piece(self._tokenizer.pad([ids[i] for i in few]), places[few])
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
            if collate is None and isinstance(item, Image.Image) and item.mode != "RGB":
                item = sources.picture(item)
            picture = item if collate is None else sources.picture(item)
            if self._side_px and isinstance(picture, Image.Image):
                miniature = sources.thumbnail(picture, self._side_px)
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
            made = sources.collated(self._source.collate(items))
            inputs = _own_tensors(made) if isinstance(made, Mapping) else _own_tensor(made)
        except EmbedxError:
            raise
        except Exception as error:
            raise DataError(
                f"the collate_fn of the DataLoader failed on rows {start} to "
                f"{start + len(items) - 1}: {_reason(error)}"
            ) from error
        for tensor in [inputs] if isinstance(inputs, Tensor) else inputs.values():
            if tensor.ndim == 0 or len(tensor) != len(items):
                raise ShapeError(
                    "the collate_fn of the DataLoader gives inputs of shape "
                    f"{tuple(tensor.shape)} for {len(items)} samples; let it give one entry a "
                    "sample"
                )
        return inputs

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
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
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


def _only(batches: list[_Batch]) -> _Batch:
    return batches[0]


def _start_worker(_: int) -> None:
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


@dataclasses.dataclass
class _Stop:
    number: int = 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """SIGINT and SIGTERM ask the loop to stop after the batch at hand; a second one insists."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: FrameType | None) -> None:
        if stop.number:
            raise KeyboardInterrupt
        stop.number = number
        if number == signal.SIGINT:
            # Written at once: a log line could meet the half of another.
            os.write(2, b"\nstopping after this batch; Ctrl-C again stops at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    plan: _Plan, path: Path, attrs: Mapping[str, Any], *, config: str, overwrite: bool
) -> None:
    """Fill ``path``, from the start or from where it was left."""
    replaced = _id_of(path)
    started = time.monotonic()
    with _stop_on_signal() as stop, _forward(plan) as forward:
        filled = _fill(plan, path, attrs, forward=forward, stop=stop, overwrite=overwrite)
        if isinstance(filled, str):
            raise DataError(
                f"every one of the {len(plan.source):,} rows failed; the first, {filled}"
            )
        with contextlib.closing(filled.writer):
            _put_in_place(filled.writer, config=config, replaced=replaced, overwrite=overwrite)
        if stop.number:  # too late for this file, in time for what would follow
            raise Interrupted(
                f"stopped by {stop.name} when {path} was complete", signal_number=stop.number
            )
    seconds = time.monotonic() - started
    _report(plan, filled.writer, path, seconds=seconds, rate=filled.rate)


def _id_of(path: Path) -> str | None:
    """The id of a file that is to be replaced; None of none, or of one that is damaged."""
    if path.exists():
        with contextlib.suppress(StoreError):  # nothing can be known to be made of it
            return str(store.open(path).attrs["id"])
    return None


def _put_in_place(
    writer: store.Writer, *, config: str, replaced: str | None, overwrite: bool
) -> None:
    """Give a file with all its rows its name, and take away what it replaces.

    Raises:
        DataError: Every row failed; the file is taken away.
    """
    path = writer.path
    if writer.n_failed == writer.n_rows:
        writer.commit()
        reasons = [one["reason"] for one in store.read_reasons(path)]
        writer.discard()
        _remove_if_empty(path.parent)
        raise DataError(
            f"every one of the {writer.n_rows:,} rows failed; the first: {(*reasons, 'unknown')[0]}"
        )
    writer.require_own()
    # Before the file takes its name: whatever stops us here, the next run comes by again.
    store.replace_file(path.with_name("config.yaml"), config.encode())
    if replaced is not None:
        store.remove_derived(path.parent, replaced)
    if overwrite:
        store.remove_parts(path)
    writer.finish()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


@dataclasses.dataclass(frozen=True)
class _Filled:
    """A writer that has all rows, and how many a second it got."""

    writer: store.Writer
    rate: float


def _fill(
    plan: _Plan,
    path: Path,
    attrs: Mapping[str, Any],
    *,
    forward: Callable[[_Batch, _Piece], "_Results"],
    stop: _Stop,
    overwrite: bool = False,
    fields: Sequence[Field] | None = None,
    title: str = "",
) -> _Filled | str:
    """Write all rows that ``path`` does not have yet, and leave it to be finished.

    Args:
        plan: What to do.
        path: The file.
        attrs: Its root attributes.
        forward: The forward pass.
        stop: Whether to stop after the batch at hand.
        overwrite: Whether the file takes the place of another.
        fields: Of the file; those of the first good batch where not given.
        title: Which part of a whole it is, in words.

    Returns:
        The writer, which has the lock; where no row is good and ``fields`` are not given, the id of
        the first and why it failed.
    """
    first_pass = attrs.get(_BY_FIRST, "" if fields is not None else None)
    if overwrite:  # from the start: what is there may be of code that has changed unseen
        store.require_idle(path)
        writer = None
    else:
        if store.partial_path(path).exists():
            begun = store.Embeddings(store.partial_path(path))
            first_pass = begun.attrs.get(_BY_FIRST, "")
        expected = {key: attrs[key] for key in ("id", "batch_size", "device")}
        writer = store.resume(path, expected=expected)
    n_rows = len(plan.source)
    first_row = writer.rows_done if writer else 0
    of = f" of {title}" if title else ""
    if first_row:
        log.info("going on at row %s of %s%s", f"{first_row:,}", f"{n_rows:,}", of)
    if writer is None and fields is not None:
        writer = _create(plan, path, fields, attrs, replace=overwrite)
    loader = torch.utils.data.DataLoader(
        _Batches(plan, first_row=first_row),
        batch_size=1,
        collate_fn=_only,
        num_workers=plan.num_workers,
        worker_init_fn=_start_worker,
        pin_memory=plan.device.type == "cuda",
    )
    waiting: list[_Batch] = []  # bad batches before the first good one: the shapes are not known
    with _workers_said(plan.num_workers), contextlib.ExitStack() as stack:
        failing = stack.enter_context(contextlib.ExitStack())
        failing.callback(lambda: writer.close() if writer else None)
        if plan.source.reads_files:  # before the threads that read: it is one for all
            stack.enter_context(sources.whole_pictures())
        prepared = plan.model.preprocess
        if plan.source.draws or (prepared is not None and prepared.is_own):
            stack.enter_context(sources.random_put_back())
        progress = stack.enter_context(
            Progress(n_rows, what=title or "extract", done=first_row, unit=_unit(plan))
        )
        for batch in _started(loader):
            if batch.fatal is not None:
                raise batch.fatal
            if batch.reasons and plan.on_error == "raise":
                row = batch.start + min(batch.reasons)
                if writer:
                    writer.commit()
                raise DataError(
                    f"row {row}{of}, {plan.source.ids[row]}: {batch.reasons[min(batch.reasons)]}; "
                    "mend or remove it, or go on without such rows: on_error=skip"
                )
            done: list[tuple[_Piece, _Results]] = []
            for piece in batch.pieces:
                if stop.number and done:  # a window of texts may take minutes
                    break
                done.append((piece, forward(batch, piece)))
                progress.advance(piece.size)
            is_whole = len(done) == len(batch.pieces)
            results = _joined(batch, done) if done and is_whole else None
            if results is not None:
                if first_pass is None:
                    first_pass = results.first_pass
                    attrs = {**attrs, _BY_FIRST: first_pass} if first_pass else attrs
                _require_same_first_pass(path, first_pass, results.first_pass)
            if not is_whole:
                pass
            elif writer is None and results is None:
                waiting.append(batch)
            else:
                if writer is None:
                    assert results is not None
                    fields = _fields(batch, results)
                    writer = _create(plan, path, fields, attrs, replace=overwrite)
                    for earlier in waiting:
                        _append(writer, earlier, None, plan.source)
                _append(writer, batch, results, plan.source)
            progress.advance(batch.size - sum(piece.size for piece, _ in done))
            if stop.number and not (is_whole and batch.start + batch.size == n_rows):
                if writer is not None:
                    writer.commit()
                kept = writer.rows_done if writer is not None else 0
                anew = ", but without overwrite=true," if overwrite else ""
                raise Interrupted(
                    f"stopped by {stop.name}: {kept:,} of {n_rows:,} rows{of} "
                    f"are kept; run the same command again{anew} to go on",
                    signal_number=stop.number,
                )
        if writer is None:
            row, reason = min(waiting[0].reasons.items())
            return f"{plan.source.ids[row]}: {reason}"
        failing.pop_all()
        return _Filled(writer, progress.rate)


_BY_FIRST = "made_by_first_pass"


def _require_same_first_pass(path: Path, there: str, here: str) -> None:
    """Refuse to put rows beside those of a network that was another one.

    Raises:
        StoreError: The first pass of this run has made something else of the network, or of its
            pooling, than that of the run which began the file.
    """
    if there != here:
        raise StoreError(
            f"{path} was begun by a model that made itself something else in its first pass (a "
            "layer, a centre), so its further rows would be those of another model; start anew "
            "with overwrite=true, or run the model once on one fixed example before"
        )


# --------------------------------------------------------------------------- shards


def _ahead(shards: Shards) -> Source:
    """What is known of the samples of shards before the first one is read."""
    return Source(shards.name, [], shards.read, shards.fingerprint, root=shards.root)


def _run_shards(
    plan: _Plan,
    shards: Shards,
    path: Path,
    attrs: Mapping[str, Any],
    *,
    config: str,
    overwrite: bool,
) -> None:
    """Fill ``path`` from parts, one a shard, of which those are made that are missing."""
    folder = store.parts_folder(path)
    started = time.monotonic()
    done: dict[int, Embeddings] = {}
    sizes: dict[int, int] = {}
    late: dict[int, str] = {}  # of which no sample is good, before it was known what is stored
    n_new = 0

    def run(number: int, *, most: int | None) -> None:
        nonlocal n_new
        part = folder / f"{number:06d}" / store.EMBEDDINGS_NAME
        if not part.exists():
            with (
                shards.read(number, scratch=folder / "shard.tmp", most=most) as source,
                _stop_on_signal() as stop,
            ):
                sizes[number] = len(source)
                for warning in () if number in late else source.warnings:
                    log.warning(warning)
                for note in () if number in late else source.notes:
                    log.info(note)
                if not len(source):
                    return
                one = dataclasses.replace(plan, source=source)
                own_id = settings_sha256({**one.identity(), "part": number})
                title = f"shard {number + 1:,} of {len(shards.names):,}"
                filled = _fill(
                    one,
                    part,
                    {**_first_pass_of(done), **attrs, "id": own_id},
                    forward=forward,
                    stop=stop,
                    fields=next((other.fields for other in done.values()), None),
                    title=title,
                )
                if isinstance(filled, str):
                    late[number] = filled
                    return
                with contextlib.closing(filled.writer):
                    filled.writer.finish()
                n_new += len(source)
                if stop.number:
                    raise Interrupted(
                        f"stopped by {stop.name} after {title}; run the same command again to go "
                        "on",
                        signal_number=stop.number,
                    )
        done[number] = store.open(part)
        sizes[number] = done[number].n_rows

    with contextlib.ExitStack() as stack:
        stack.callback(_remove_if_empty, path.parent)
        stack.enter_context(store.writing_lock(path))
        if overwrite:
            store.remove_parts(path)
        store.begin_parts(path, of=str(attrs["id"]))
        stack.callback(store.end_parts, path)
        with _forward(plan) as forward:
            for number in range(len(shards.names)):
                left = None if shards.limit is None else shards.limit - sum(sizes.values())
                if left != 0:
                    run(number, most=left)
            if not done:
                first = next(iter(late.values()), "there is none")
                raise DataError(
                    f"every one of the {sum(sizes.values()):,} rows of {shards.name} failed; the "
                    f"first, {first}"
                )
            for number in list(late):
                run(number, most=sizes[number])
    attrs = {**_first_pass_of(done), **attrs}
    writer = _join([done[number] for number in sorted(done)], path, attrs, config=config)
    seconds = time.monotonic() - started
    _report(plan, writer, path, seconds=seconds, rate=n_new / max(seconds, 1e-9))


def _first_pass_of(done: Mapping[int, Embeddings]) -> dict[str, Any]:
    """The root attribute of parts, where they have it."""
    first = next(iter(done.values()), None)
    return {} if first is None else {k: v for k, v in first.attrs.items() if k == _BY_FIRST}


def _join(
    parts: Sequence[Embeddings], path: Path, attrs: Mapping[str, Any], *, config: str
) -> store.Writer:
    """Make ``path`` of its parts, and take them away."""
    texts = [part.label_texts() for part in parts]
    names = {name for labels in texts for name in set(labels or ())} - {""}
    label_names = sorted(names, key=sources.numbers_first)
    index = {"": -1, **{name: i for i, name in enumerate(label_names)}}
    labels = [
        index[text]
        for part, own in zip(parts, texts, strict=True)
        for text in own or [""] * part.n_rows
    ]
    columns = dict.fromkeys(name for part in parts for name in part.metadata)
    replaced = _id_of(path)
    writer = store.create(
        path,
        ids=[name for part in parts for name in part.ids],
        fields=parts[0].fields,
        attrs=attrs,
        labels=np.array(labels, np.int32) if names else None,
        label_names=label_names,
        metadata={
            name: concatenated([(part.n_rows, part.metadata.get(name)) for part in parts])
            for name in columns
        },
        replace=True,
    )
    with contextlib.closing(writer):
        append_parts(writer, parts)
        _put_in_place(writer, config=config, replaced=replaced, overwrite=True)
    return writer


@contextlib.contextmanager
def _workers_said(n: int) -> Iterator[None]:
    """A worker process that dies is one line. torch raises it from a signal handler, anywhere."""
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


def _started(loader: "torch.utils.data.DataLoader[T]") -> Iterable[T]:
    """The batches, once the processes that read them are started."""
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


def _say_cut(path: Path, *, most: int) -> None:
    n_tokens = store.open(path).outputs[TOKENS_FIELD.partition("/")[2]]
    n_cut = int((n_tokens > most).sum())
    if n_cut:
        log.warning(
            "%s of %s texts are longer than %s tokens, up to %s: what comes after is not in their "
            "rows; the column n_tokens has their lengths, and model.max_length may allow more",
            f"{n_cut:,}",
            f"{len(n_tokens):,}",
            most,
            f"{n_tokens.max():,}",
        )


def _unit(plan: _Plan) -> str:
    return "images" if plan.model.tokenizer is None else "texts"


def _report(plan: _Plan, writer: store.Writer, path: Path, *, seconds: float, rate: float) -> None:
    shapes = ", ".join(
        f"{field.name.removeprefix('embeddings/')} ({field.shape[0]} {field.dtype})"
        for field in writer.fields
        if field.name.startswith("embeddings/")
    )
    log.info(
        "wrote %s: %s rows, %s failed, %s, %.1f s, %.1f %s/s",
        path,
        f"{writer.n_rows:,}",
        f"{writer.n_failed:,}",
        shapes,
        seconds,
        rate,
        _unit(plan),
    )
    _say_failed(path, writer.n_failed)
    if plan.model.tokenizer is not None:
        _say_cut(path, most=plan.model.tokenizer.max_length)


def _say_failed(path: Path, n_failed: int) -> None:
    if n_failed:
        for reason in store.read_reasons(path)[:3]:
            log.warning("failed row %s, %s: %s", reason["row"], reason["id"], reason["reason"])
        log.warning(
            "all %s failed rows: %s; overwrite=true tries them again",
            f"{n_failed:,}",
            store.errors_path(path),
        )


@dataclasses.dataclass(frozen=True)
class _Results:
    """What one forward pass gave: arrays by field name, and rows that are not finite.

    And what the first pass of the process made of the network: see :class:`_Memory`.
    """

    arrays: dict[str, Array]
    attrs: dict[str, dict[str, Any]]
    not_finite: dict[int, str]
    first_pass: str


def _joined(batch: _Batch, done: Sequence[tuple[_Piece, _Results]]) -> _Results:
    """What the passes of a batch gave, in the order of its rows."""
    (piece, first), *others = done
    if piece.rows is None and not others:
        return first
    arrays = {
        name: np.full((batch.size, *array.shape[1:]), _unset(array.dtype), array.dtype)
        for name, array in first.arrays.items()
    }
    bad: dict[int, str] = {}
    for piece, results in done:
        assert piece.rows is not None
        bad |= results.not_finite
        for name, array in results.arrays.items():
            if array.shape[1:] != arrays[name].shape[1:]:
                raise ShapeError(
                    f"{name} has shape {array.shape[1:]} for some texts and "
                    f"{arrays[name].shape[1:]} for others; choose a pooling that gives one length, "
                    "such as pooling=mean_token"
                )
            arrays[name][piece.rows] = array
    return _Results(arrays, first.attrs, bad, first.first_pass)


@contextlib.contextmanager
def _forward(plan: _Plan) -> Iterator[Any]:
    """The forward pass with its hooks, as a function from a batch to results."""
    module = plan.model.module
    prepared = plan.model.preprocess
    rows = Rows(
        plan.points,
        plan.poolings,
        dtype=plan.dtype,
        normalize=plan.normalize,
        tokens=plan.model.tokens,
    )
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision)
    with contextlib.ExitStack() as stack:
        lies_on = next((p.device for p in module.parameters()), plan.device)
        if lies_on != plan.device:
            stack.callback(module.to, lies_on)
            module.to(plan.device)
        stack.enter_context(hooks.undisturbed(module, device=plan.device))
        stack.enter_context(_matmul_precision(plan.precision))
        # Code of the user's own may keep something from layer to layer, run a layer again in
        # another batch, or look at strides: only what is known is run otherwise than as written.
        is_known = fold.is_known(module)
        if is_known:
            stack.enter_context(fold.folded(module, [*plan.points, *plan.ablated]))
        elif names := _own_generators(module):
            log.warning(
                "%s has a random generator of its own, which goes on from pass to pass: %s; if it "
                "draws from it, another run gives other rows",
                plan.model.name,
                listed(names),
            )
        memory = _Memory(plan, is_known=is_known)
        backward = None
        if plan.objective is not None:
            stack.enter_context(hooks.frozen(module))
            backward = Backward(
                plan.objective, title=plan.model.name, label_names=plan.source.label_names
            )
        ablated = hooks.intervene(module, changes(plan.ablations))
        stack.callback(ablated.remove)
        got = stack.enter_context(
            hooks.Capture(module, plan.points, reduce=rows.reduce, only_here=True)
        )

        def run(inputs: Inputs, labels: Tensor | None, n: int) -> Any:
            """One pass, and one back where gradients are wanted."""
            with (
                torch.set_grad_enabled(backward is not None),
                torch.autocast(plan.device.type, dtype=half, enabled=half is not None),
            ):
                output = hooks.run_model(module, inputs, title=plan.model.name)
            if backward is not None:
                backward.run(output, labels, n=n)
            return output

        is_checked = False

        def forward(batch: _Batch, piece: _Piece) -> _Results:
            nonlocal is_checked
            first = batch.start + (0 if piece.rows is None else int(piece.rows.min()))
            labels = _labels_of(plan, batch, piece)
            with (
                torch.no_grad()
            ):  # inference tensors in a model's own cache could not be trained on
                memory.before_pass()
                inputs = _placed(piece.inputs, plan.device)
                _seed(first, plan.device)
                if prepared is not None and batch.are_pixels and isinstance(inputs, Tensor):
                    with torch.autocast(plan.device.type, dtype=half, enabled=half is not None):
                        inputs = prepared.normalize(inputs)
                if is_known:
                    inputs = _channels_last(inputs)
                given = {} if isinstance(piece.inputs, Tensor) else piece.inputs
                mask = token_mask(given, spellings=rows.spellings) if rows.mask_takers else None
                rows.mask = None if mask is None else mask.to(plan.device)
                rows.picture = picture_size(
                    [inputs] if isinstance(inputs, Tensor) else inputs.values()
                )
                output = run(inputs, labels, piece.size)
                memory.after_pass()
                try:
                    arrays, attrs = rows.arrays(got, n=piece.size)
                except LayerError as error:
                    last = batch.start + batch.size - 1
                    raise LayerError(f"rows {batch.start} to {last}: {error}") from None
                if plan.save_outputs:
                    logits = _logits(output, plan.model.name, piece.size)
                    arrays["outputs/logits"] = logits
                    arrays["outputs/predicted"] = logits.argmax(1).astype(np.int32)
                ablated.require_fired()
                # The first pass was whole: it has shown that each layer runs once.
                got.stops_early = is_known and not plan.save_outputs and backward is None
                if not is_checked and piece.size > 1:
                    is_checked = True
                    if piece.size in _other_sizes(inputs) | rows.other_sizes:
                        _require_samples_first(plan, got, rows, run, inputs, labels, n=piece.size)
            memory.say_of_zeros(batch)
            places = range(piece.size) if piece.rows is None else piece.rows.tolist()
            odd = {places[i]: why for i, why in not_finite(arrays).items()}
            if plan.objective == "loss" and labels is not None:
                of_none = np.flatnonzero(labels.cpu().numpy() < 0).tolist()
                odd |= {places[i]: "it has no label to have a loss of" for i in of_none}
            bad = {i: why for i, why in odd.items() if i not in batch.reasons}
            return _Results(arrays, attrs, bad, memory.first_pass)

        yield forward


class _Memory:
    """What code of the user's own keeps of a pass for later ones, seen on the first two.

    A layer that is made when the size of the input is known, a centre of the first batch, a
    generator: rows then hang on which batch came first.

    Attributes:
        first_pass: SHA-256 of what was another after the first pass; "" where nothing was. A run
            that goes on, whose first batch is another, has to find the same.
    """

    def __init__(self, plan: _Plan, *, is_known: bool) -> None:
        self.first_pass = ""
        self._plan = plan
        self._is_known = is_known
        self._n_passes = 2 if is_known and not plan.has_own_pooling else 0  # that need no look
        self._before: tuple[str, dict[str, str]] = "", {}
        self._said_of_zeros = plan.is_by_sample

    def before_pass(self) -> None:
        if not self._n_passes:
            self._before = self._kept(), self._marks()

    def after_pass(self) -> None:
        self._n_passes += 1
        if self._n_passes > 2:
            return
        kept, (before, marks) = self._kept(), self._before
        if self._n_passes == 1:
            now = self._marks()
            others = sorted((name, mark) for name, mark in now.items() if marks.get(name) != mark)
            self._before = kept, now
            if kept != before or others:
                self.first_pass = value_sha256([kept, others])
        elif kept != before:
            log.warning(
                "%s or its pooling keeps something from pass to pass; if that enters the rows, a "
                "run that was interrupted and goes on gives others",
                self._plan.model.name,
            )
        elif self.first_pass:
            log.warning(
                "%s or its pooling has made something in its first pass that later ones may use "
                "(a layer, a centre, a cache): if the run is interrupted, it goes on only where "
                "its first pass makes the same",
                self._plan.model.name,
            )

    def _kept(self) -> str:
        """SHA-256 of what the code of the user's own holds, its weights aside."""
        held = [value_sha256(one.function) for one in self._plan.poolings if one.code]
        code = "" if self._is_known else code_sha256(self._plan.model.module)
        return "".join([code, *held])

    def _marks(self) -> dict[str, str]:
        return {} if self._is_known else state_marks(self._plan.model.module)

    def say_of_zeros(self, batch: _Batch) -> None:
        """Say once that something stands in a batch in place of what could not be read."""
        if batch.reasons and not self._said_of_zeros:
            self._said_of_zeros = True
            log.warning(
                "in place of what cannot be read, such as row %s, %s enter beside the others of "
                "its batch; where %s sees the samples of a batch together, their rows hang on it",
                batch.start + min(batch.reasons),
                "copies of other items" if self._plan.source.collate is not None else "zeros",
                self._plan.model.name,
            )


def _placed(inputs: Inputs, device: torch.device) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def _channels_last(inputs: Inputs) -> Inputs:
    """Feature maps in the layout in which convolutions are fastest; the numbers are the same."""
    if not isinstance(inputs, Tensor):
        return {name: _channels_last(tensor) for name, tensor in inputs.items()}  # type: ignore[misc]
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs


def _seed(seed: int, device: torch.device) -> None:
    """A model that draws random numbers draws the same ones for a batch in every run."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.4 ms
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def _own_generators(module: nn.Module) -> list[str]:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return [
        ".".join(filter(None, (name, key)))
        for name, child in module.named_modules()
        for key, value in {**vars(type(child)), **vars(child)}.items()
        if isinstance(value, kinds)
    ]


def _other_sizes(inputs: Inputs) -> set[int]:
    """Sizes of the axes that are not that of the samples."""
    tensors = [inputs] if isinstance(inputs, Tensor) else inputs.values()
    return {size for tensor in tensors for size in tensor.shape[1:]}


def _labels_of(plan: _Plan, batch: _Batch, piece: _Piece) -> Tensor | None:
    """The labels of what goes through the model, where the objective takes them."""
    if plan.objective != "loss":
        return None
    labels = batch.labels
    if labels is None:
        assert plan.source.labels is not None
        labels = plan.source.labels[batch.start : batch.start + batch.size]
    if piece.rows is not None:
        labels = labels[piece.rows]
    return torch.from_numpy(np.asarray(labels, np.int64)).to(plan.device)


def _require_samples_first(
    plan: _Plan,
    got: hooks.Capture,
    rows: Rows,
    run: Callable[[Inputs, Tensor | None, int], Any],
    inputs: Inputs,
    labels: Tensor | None,
    *,
    n: int,
) -> None:
    """Look at two samples where an axis of another kind is as long as the batch by chance.

    Raises:
        ShapeError: The first axis of what a layer gives is not that of the samples.
    """
    before = {point.name: got[point.name] for point in plan.points}

    def run_again(rows_of: slice | list[int]) -> None:
        # A copy: the model may work in place on what enters.
        if isinstance(inputs, Tensor):
            some: Inputs = inputs[rows_of].clone()
        else:
            some = {name: tensor[rows_of].clone() for name, tensor in inputs.items()}
        rows.mask = None if mask is None else mask[rows_of]
        of = None if labels is None else labels[rows_of]
        _seed(0, plan.device)
        run(some, of, len(some if isinstance(some, Tensor) else next(iter(some.values()))))

    few, mask = min(2, n - 1), rows.mask
    try:
        run_again(slice(few))
        for point in plan.points:
            if len(got[point.name]) != few:
                raise ShapeError(
                    f"layer {point.name} gives {tuple(got[point.name].shape)} for {few} samples "
                    f"after pooling, so its first axis is not that of the samples, though {n} long "
                    f"for {n} of them; {_SAMPLES_FIRST}"
                )
        return
    except (ModelError, LayerError):
        pass
    # A model may be written for one size of batch alone: the samples in the other order then show
    # whether the rows go with them.
    backwards = list(range(n))[::-1]
    with contextlib.suppress(ModelError, LayerError):
        run_again(backwards)
        for point in plan.points:
            was, now = before[point.name], got[point.name]
            if _is_near(now, was[backwards]):
                continue
            if not _is_near(now, was):
                log.warning(
                    "%s gives %s for %s samples, and whether its first axis is theirs could not be "
                    "told: the model takes no other number of them",
                    point.name,
                    tuple(now.shape),
                    n,
                )
            else:
                raise ShapeError(
                    f"layer {point.name} gives the same {tuple(now.shape)} for {n} samples in the "
                    f"other order, so its first axis is not that of the samples; {_SAMPLES_FIRST}"
                )


_SAMPLES_FIRST = (
    "choose another layer, or where tokens come first pooling=function, such as lambda a: a.mean(0)"
)


def _is_near(rows: Tensor, others: Tensor) -> bool:
    return rows.shape == others.shape and torch.allclose(
        rows.double(), others.double(), rtol=1e-3, atol=1e-6, equal_nan=True
    )


def _logits(output: Any, model: str, size: int) -> Array:
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != size:
        what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ShapeError(
            f"save_outputs keeps outputs of shape (n, classes), and {model} gives {what}; capture "
            "a layer instead, such as layers=[NAME:output.0]"
        )
    require_float32(output, what=f"save_outputs keeps floats of 32 bits, and {model}")
    # A copy: it may be what entered, or a buffer that the next pass fills.
    logits: Array = output.to("cpu", torch.float32, copy=True).numpy()
    return logits


@contextlib.contextmanager
def _matmul_precision(precision: Precision) -> Iterator[None]:
    """fp32 means fp32: TensorFloat-32 is off unless it was asked for."""
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
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _fields(batch: _Batch, results: _Results) -> list[Field]:
    """The datasets for results of the shapes and types that the first forward pass gave."""
    return [
        Field(name, array.shape[1:], array.dtype, results.attrs.get(name, {}))
        for name, array in {**results.arrays, **batch.kept}.items()
    ]


def _create(
    plan: _Plan,
    path: Path,
    fields: Sequence[Field],
    attrs: Mapping[str, Any],
    *,
    replace: bool,
) -> store.Writer:
    source = plan.source
    return store.create(
        path,
        ids=source.ids,
        fields=fields,
        attrs=attrs,
        item_hashes=source.item_hashes,
        labels=source.labels,
        label_names=source.label_names,
        metadata=source.metadata,
        replace=replace,
    )


def _append(writer: store.Writer, batch: _Batch, results: _Results | None, source: Source) -> None:
    """Write a batch; of rows that failed, what was read (picture and label) is kept."""
    reasons = dict(batch.reasons)
    if results is not None:
        reasons.update(results.not_finite)
    bad = sorted(reasons)
    rows = {}
    arrays = {**(results.arrays if results is not None else {}), **batch.kept}
    for field in writer.fields:
        array = arrays.get(field.name)
        if array is not None and array.shape[1:] != field.shape:
            raise ShapeError(
                f"{field.name} has shape {array.shape[1:]} from row {batch.start} on and "
                f"{field.shape} before; choose a pooling that gives one length, such as pooling=gap"
            )
        if array is None:
            array = np.empty((batch.size, *field.shape), field.dtype)
            array[...] = _unset(field.dtype)
        elif bad and field.name not in ("thumbnails", "labels"):
            array = array.copy()
            array[bad] = _unset(field.dtype)
        rows[field.name] = array
    status = np.full(batch.size, Status.OK, np.uint8)
    status[bad] = Status.FAILED
    listed = {batch.start + i: (source.ids[batch.start + i], reasons[i]) for i in bad}
    writer.append(rows, status=status, reasons=listed)


def _unset(dtype: np.dtype[Any]) -> float | int:
    """What stands where there is no number of a row."""
    return {"f": np.nan, "u": 255, "i": -1}[dtype.kind]
