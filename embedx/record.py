"""``record``: what layers give in a loop of one's own, streamed while the loop runs."""

import atexit
import contextlib
import dataclasses
import hashlib
import inspect
import json
import logging
import operator
import os
import types
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from embedx import derived, hooks, layout, store, unfinished, writing
from embedx.checks import checked, require_exact, require_unmasked, signature_of
from embedx.columns import told_apart
from embedx.disk import require_idle, writing_lock
from embedx.errors import ConfigError, DataError, EmbedxError, StoreError, first_line
from embedx.layout import Field, Status
from embedx.matrix import Array
from embedx.parts import append_parts
from embedx.points import Point, resolve_points
from embedx.pooling import Function, per_point
from embedx.rows import (
    MASKS,
    Rows,
    masks_unknown,
    not_finite,
    picture_size,
    require_no_other_mask,
    strangers_to,
    token_mask,
)
from embedx.store import Embeddings

log = logging.getLogger("embedx")

PART_ROWS = 65_536
_REPLACES = "replaces"  # the id of the file that a recording was told to replace
_RECORDING = "recording"  # what all parts of one recording have in common
_FACTS = ("model", "weights", "source", "data")


class Recorder:
    """Hooks on a model in a loop, and the file that they fill.

    Made by :func:`record`. Each forward pass is followed by one call of :meth:`batch`, whether the
    model itself is called or a method of it that calls its layers; one that failed, or that is not
    wanted after all, by :meth:`skip`. Leaving the ``with`` block makes ``embeddings.h5`` of all
    that was recorded; after an exception in the loop the rows of all batches are kept, and
    :func:`join` makes a file of them. So it is where the program ends without leaving the block,
    or is killed, but for the batches of the last two seconds before a kill.

    Attributes:
        path: The file to be, from the root on.
        n_rows: Rows recorded so far.
    """

    def __init__(
        self,
        model: nn.Module,
        points: Sequence[Point],
        path: Path,
        *,
        rows: Rows,
        id_bytes: int,
        attrs: dict[str, Any],
        label_names: Sequence[str],
        overwrite: bool,
    ) -> None:
        self.path = path
        self.n_rows = 0
        self._rows = rows
        self._id_bytes = id_bytes
        self._attrs = attrs
        self._label_names = list(label_names)
        self._overwrite = overwrite
        self._seen: set[int] = set()
        self._given: list[str] | None = None  # what came with the first batch
        self._like: dict[str, Array] = {}  # shapes and types of what is stored
        self._held = contextlib.ExitStack()  # the lock, from the first batch on
        self._is_ours = False
        self._writer: writing.Writer | None = None
        self._n_parts = 0
        self._part_start = 0
        self._has_begun = False
        self._calls: dict[str, int] | None = None  # of the layers, in a pass that nobody saw begin
        self._square: dict[str, tuple[int, ...]] = {}  # points whose first two axes were as long
        self._told_apart: set[str] = set()  # points for which they were not, in some batch
        self._n_refused = 0
        self._is_mode_said = False
        self._n_paused = 0
        self._end = ""  # why no more is recorded
        self._failed = False
        self._pid = os.getpid()
        self._first = points[0].name
        self._model = model
        # Whose labels are the tokens of the decoder; of others they reach the loss alone.
        self._has_decoder = "decoder_input_ids" in signature_of(model.forward).parameters
        self._got = hooks.Capture(
            model, points, reduce=self._reduce, before_pass=self._begin_pass
        ).set()
        self._got.reset()
        self._say_mode()
        _OPEN.add(self)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
            return
        self.close()
        if self.n_rows:
            self._say_of_squares()
            log.warning(
                "stopped by %s; %s rows are kept: embedx.join(%r) makes a file of them",
                kind.__name__,
                f"{self.n_rows:,}",
                str(self.path.parent),
            )

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_of_parent:  # which may run the model as it likes, and records nothing here
            return
        with self._counting():
            if self._has_begun:
                raise DataError(
                    "two forward passes without recorder.batch() between them: call it after each "
                    "pass, recorder.skip() after one that failed, or put passes that are not to be "
                    "recorded into `with recorder.paused():`"
                )
            if self._got.calls:
                raise DataError(
                    "layers ran after recorder.batch() and outside of a forward pass of the model; "
                    "put what runs them into `with recorder.paused():`"
                )
            wants_mask = bool(self._rows.mask_takers)
            inputs = _by_name(self._model, args, kwargs, wants_mask=wants_mask)
            self._rows.picture = picture_size(inputs.values())
            if wants_mask:
                self._rows.mask = token_mask(inputs, spellings=self._rows.spellings)
                require_no_other_mask(self._rows.mask, inputs)
                strangers = strangers_to(self._rows.mask, inputs)
                self._rows.strangers = [
                    name for name in strangers if name != "labels" or self._has_decoder
                ]
                self._rows.note_masks(inputs)
        self._has_begun = True

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count what is refused: a loop that goes on from all errors is told of it at its end."""
        try:
            yield
        except EmbedxError:
            self._n_refused += 1
            raise

    def _reduce(self, point: Point, activation: Tensor) -> Tensor:
        self._say_mode()
        shape = tuple(activation.shape)
        if len(shape) == 3 and shape[0] == shape[1]:
            self._square[point.name] = shape
        else:
            self._told_apart.add(point.name)
        return self._rows.reduce(point, activation)

    def _say_mode(self) -> None:
        """Say once that the model is in train mode, into which it may be put at any time."""
        if self._model.training and not self._is_mode_said:
            self._is_mode_said = True
            log.warning(
                "%s is in train mode: what is recorded has its dropout and the statistics of its "
                "batches",
                type(self._model).__name__.lower(),
            )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no pass within this block, such as those of a validation."""
        self._n_paused += 1
        self._got.remove()
        try:
            yield
        finally:
            self._n_paused -= 1
            if not self._n_paused and not self._end:
                self._got.set()

    def skip(self) -> None:
        """Forget the forward pass that has just been, such as one that failed; its rows go."""
        self._has_begun = False
        self._rows.mask = None
        self._got.reset()

    def batch(
        self,
        *,
        ids: Sequence[Any] | Tensor | None = None,
        labels: Sequence[int] | Tensor | Array | None = None,
        epoch: int | None = None,
        **columns: Sequence[float] | Tensor | Array,
    ) -> None:
        """Store the rows of the forward pass that has just been.

        Args:
            ids: A text or number for each sample, once an epoch; the number of the row where not
                given.
            labels: A whole number for each sample, -1 for none; where there are ``label_names``,
                less than there are of them.
            epoch: Of this pass. Ids are then stored as ``ID#EPOCH``, with columns ``sample`` and
                ``epoch``.
            columns: Further numbers, one a sample, such as its loss; a column that begins with
                whole numbers has no others.

        Raises:
            DataError: There was no pass, a number of values that is not that of the samples, an id
                that comes again, a value that cannot be stored, other columns than before, layers
                of a model that is not itself called that ran more or less often than for the first
                batch, the recording has ended, or it is that of the process that this one was
                forked of.
            LayerError: A layer did not fire, or ran twice.
            ShapeError: A layer gives no vector a sample.
            StoreError: The disk refused; the rows of earlier batches are kept.
        """
        if self._end:
            raise DataError(self._end)
        if self._is_of_parent:
            raise DataError(
                f"this recording is that of process {self._pid}, of which this one, {os.getpid()}, "
                "was forked after the first batch; record here with a recorder of its own, into "
                "another folder"
            )
        try:
            with self._counting():
                arrays, attrs = self._arrays(ids, labels, epoch, columns)
        finally:
            self.skip()
        bad = not_finite({k: a for k, a in arrays.items() if k.startswith("embeddings/")})
        status = np.full(len(arrays["ids"]), Status.OK, np.uint8)
        status[list(bad)] = Status.FAILED
        for name, array in arrays.items():
            if name.startswith("embeddings/") and bad:
                array[list(bad)] = np.nan
        try:
            self._append(arrays, attrs, status, bad)
        except BaseException as error:
            # How much of the batch was taken is not known: what came next might be out of step.
            self._failed = True
            why = type(error).__name__ + (f": {first_line(error)}" if str(error) else "")
            self._end = (
                f"the recording ended with {why}; make a file of the rows that are kept with "
                f"embedx.join({str(self.path.parent)!r})"
            )
            with contextlib.suppress(StoreError):
                self.close()
            raise

    def _arrays(
        self, ids: Any, labels: Any, epoch: Any, columns: Mapping[str, Any]
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """What is to be stored of the pass by the name of its dataset, and attributes of those.

        Raises:
            DataError: It does not fit itself, or what was stored before.
        """
        if not (self._has_begun or self._got.calls):
            raise DataError("recorder.batch() without a forward pass before it: call it after each")
        beside = {"ids": ids, "labels": labels, "epoch": epoch}
        given = sorted([*(name for name, value in beside.items() if value is not None), *columns])
        if self._given not in (None, given):
            raise DataError(
                f"this batch has {_listed(given)} and the first had {_listed(self._given or [])}; "
                "give the same with every batch"
            )
        first = self._got[self._first]
        n = len(first) if first.ndim else 0
        names = self._names(ids, n, epoch)
        arrays, attrs = self._rows.arrays(self._got, n=n)
        if again := self._got.came_again:
            raise DataError(
                f"{', '.join(again)}: two backward passes since the last forward pass, and which "
                "of the gradients is meant is not known; call recorder.batch() between them, or "
                "backward() once, on the sum"
            )
        # Where batches come of a method, a pass of the model itself is one too many.
        is_of_method = not self._has_begun or self._calls is not None
        calls = self._require_as_often() if is_of_method else None
        if epoch is not None:
            arrays[layout.column_name("epoch")] = np.full(n, _whole(epoch), np.int64)
        for name, values in columns.items():
            path = _column_path(name, with_epoch=epoch is not None)
            arrays[path] = _numbers(name, values, n, like=self._like.get(path))
        if labels is not None:
            arrays["labels"] = _labels(labels, n, n_names=len(self._label_names))
        arrays["ids"] = layout.encode_texts(names, what="the id", most_bytes=self._id_bytes).astype(
            f"S{self._id_bytes}"
        )
        for name, like in self._like.items():
            if arrays[name].shape[1:] != like.shape[1:]:
                raise DataError(
                    f"{name} has shape {arrays[name].shape[1:]} and had {like.shape[1:]} before; "
                    "choose a pooling that gives one length, such as pooling=gap"
                )
        if ids is not None:
            self._remember(arrays["ids"], epoch)
        self._given = given
        self._calls = self._calls or calls
        self._like = self._like or {name: array[:0].copy() for name, array in arrays.items()}
        return arrays, attrs

    def _require_as_often(self) -> dict[str, int]:
        """How often each layer ran since the last batch, where no pass of the model began.

        Raises:
            DataError: It was another number for the first batch: something else ran, too, and
                which of the calls of a layer is that of the batch is not known.
        """
        calls = self._got.calls
        first = self._calls or calls
        for layer in first | calls:
            if calls.get(layer) != first.get(layer):
                raise DataError(
                    f"{layer} ran {calls.get(layer, 0)} time(s) for this batch and "
                    f"{first.get(layer, 0)} for the first; put what else runs it into `with "
                    "recorder.paused():`, or call recorder.skip() after it"
                )
        if self._calls is None and (often := [f"{k} {n} times" for k, n in calls.items() if n > 1]):
            log.warning(
                "before the first batch ran %s: all are taken for calls of one pass; where another "
                "pass is among them, such as a validation, put it into recorder.paused()",
                ", ".join(often),
            )
        if self._calls is None and (blind := self._rows.mask_takers):
            log.warning(
                "the pooling of %s counts padding as tokens, if there is any: a method of the "
                "model is called, and an attention_mask is seen where the model itself is",
                ", ".join(blind),
            )
        return calls

    def _names(self, ids: Any, n: int, epoch: Any) -> list[str]:
        if ids is None:
            names = [str(self.n_rows + i) for i in range(n)]
        else:
            given = _plain("ids", _in_order(ids))
            if any(isinstance(name, bytes) for name in given):
                raise DataError("ids holds bytes; give texts: [name.decode() for name in ids]")
            names = [str(name) for name in given]
            if len(names) != n:
                raise DataError(
                    f"batch() got {len(names)} ids for {n} samples; give one each, or choose a "
                    "layer that has one entry a sample"
                )
        return names if epoch is None else [f"{name}#{_whole(epoch)}" for name in names]

    def _remember(self, ids: Array, epoch: Any) -> None:
        """Note ids as they are stored.

        Raises:
            DataError: One was there before; then none is noted.
        """
        hashes: set[int] = set()
        for name in ids.tolist():
            if hash(name) in self._seen or hash(name) in hashes:
                again = "twice" if epoch is None else f"twice in epoch {epoch}"
                raise DataError(
                    f"the sample {name.decode()[:60]!r} was recorded {again}; give ids that are "
                    "unique, and epoch= where samples come again"
                )
            hashes.add(hash(name))
        self._seen |= hashes

    def _begin(self) -> None:
        """Take the folder: nobody else records or extracts into it until :meth:`close`."""
        self._held.enter_context(writing_lock(self.path))
        _require_free(self.path, overwrite=self._overwrite)
        if self.path.exists():
            self._attrs[_REPLACES] = _file_id(self.path)
        elif not unfinished.parts_folder(self.path).exists():
            # What is there is of a file that was lost.
            derived.remove_derived(self.path.parent, "")
        unfinished.remove_parts(self.path)
        unfinished.discard_partial(self.path)
        self._attrs[_RECORDING] = uuid.uuid4().hex
        self._pid = os.getpid()
        self._is_ours = True

    @property
    def _is_of_parent(self) -> bool:
        """Whether this is a copy of a recorder at work, in a process forked of its own."""
        return self._is_ours and self._pid != os.getpid()

    def _append(
        self, arrays: dict[str, Array], attrs: dict[str, Any], status: Array, bad: dict[int, str]
    ) -> None:
        """Into the part at hand, or the rest of it and the next one."""
        if not self._is_ours:
            self._begin()
        start, n = 0, len(status)
        names = arrays["ids"].tolist()
        while start < n:
            if self._writer is None:
                fields = [
                    Field(name, array.shape[1:], array.dtype, attrs.get(name, {}))
                    for name, array in arrays.items()
                ]
                self._part_start = self.n_rows
                self._writer = writing.create(
                    unfinished.parts_folder(self.path) / f"{self._n_parts:05d}" / self.path.name,
                    ids=None,
                    n_rows=PART_ROWS,
                    fields=fields,
                    attrs={
                        **self._attrs,
                        # A disk page of another part is not taken for one of this.
                        "id": uuid.uuid4().hex,
                        "first_row": self._part_start,
                    },
                    label_names=self._label_names,
                )
                self._n_parts += 1
            done = self.n_rows - self._part_start
            end = min(n, start + PART_ROWS - done)
            self._writer.append(
                {name: array[start:end] for name, array in arrays.items()},
                status=status[start:end],
                reasons={
                    done + i - start: (names[i].decode(), why)
                    for i, why in bad.items()
                    if start <= i < end
                },
            )
            self.n_rows += end - start
            start = end
            if self.n_rows - self._part_start == PART_ROWS:
                self._writer.finish()
                self._writer = None

    def close(self) -> None:
        """Take the hooks off and make what was recorded durable, without making the file."""
        if self._is_of_parent:
            return
        self._end = self._end or "the recorder is closed; make another with embedx.record"
        self._got.remove()
        writer, self._writer = self._writer, None
        with self._held:
            if writer is None:
                return
            try:
                with contextlib.closing(writer):
                    writer.commit()
            finally:
                self.n_rows = self._part_start + writer.rows_done

    def finish(self) -> Embeddings:
        """Take the hooks off and make the file of all that was recorded.

        Raises:
            DataError: Nothing was recorded, or the recording ended with an error.
            StoreError: No space; the recorded rows are kept.
        """
        self.close()
        if self._failed:
            raise DataError(self._end)
        if not self.n_rows:
            raise DataError(
                "nothing was recorded: no forward pass was followed by recorder.batch()"
            )
        if self._n_refused:
            log.warning(
                "%s passes or batches were refused with an error that the loop went on from; they "
                "are not recorded",
                f"{self._n_refused:,}",
            )
        self._say_of_squares()
        return join(self.path.parent)

    def _say_of_squares(self) -> None:
        for name in self._square.keys() - self._told_apart:
            log.warning(
                "%s gave %s in every batch: its first axis was taken for that of the samples; if "
                "it is that of tokens, record with a pooling such as lambda a: a.mean(0)",
                name,
                self._square[name],
            )


_OPEN: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends without leaving its ``with`` block keeps its rows."""
    for recorder in list(_OPEN):
        try:
            recorder.close()
        except StoreError as error:
            log.error("%s", error)


@checked
def record(
    model: nn.Module,
    points: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    pooling: str | Function | Sequence[str | Function] = "auto",
    normalize: bool = False,
    dtype: Literal["float32", "float16"] = "float32",
    label_names: Sequence[str] = (),
    id_bytes: int = 256,
    overwrite: bool = False,
) -> Recorder:
    """Stream what layers give from a training or test loop, with no pass of its own.

    .. code-block:: python

        with embedx.record(model, "features", "outputs/learning") as recorder:
            for epoch in range(3):
                for images, targets, ids in loader:
                    loss = criterion(model(images), targets)
                    recorder.batch(ids=ids, labels=targets, epoch=epoch)

    The model runs as the loop runs it, in train mode too: then dropout and the statistics of the
    batch are in the rows, which is said.

    Args:
        model: The network; hooks are set at once and removed at the end.
        points: Capture points, as for :func:`embedx.extract`.
        out: Folder for ``embeddings.h5``.
        pooling: As for :func:`embedx.extract`; which tokens are padding is told by what the model
            itself is called with.
        normalize: Scale each row to length 1 (L2).
        dtype: Of the stored numbers.
        label_names: Names that the labels count through; two that are one get their numbers.
        id_bytes: Longest id, in bytes of UTF-8.
        overwrite: Replace what lies in ``out``: what was not finished with the first batch, a
            whole file when the new one is whole.

    Returns:
        The recorder, for a ``with`` block.

    Raises:
        ConfigError: An argument is out of its range.
        LayerError: A layer is not there.
        StoreError: ``out`` holds a file, or a recording or an extraction that was not finished.
        InUseError: Another writes there.
    """
    if not 1 <= id_bytes <= layout.ID_BYTES_MAX:
        raise ConfigError(f"id_bytes must be 1 to {layout.ID_BYTES_MAX}, not {id_bytes}")
    names, told = told_apart(label_names)
    for line in told:
        log.warning("%s", line)
    resolved = resolve_points(model, points)
    poolings = per_point(pooling, n_points=len(resolved))
    path = Path(out).absolute() / store.EMBEDDINGS_NAME  # the loop may go to another folder
    require_idle(path)
    _require_free(path, overwrite=overwrite)
    derived.require_own_beside(path, has_config=False)
    return Recorder(
        model,
        resolved,
        path,
        rows=Rows(
            resolved,
            poolings,
            dtype=np.dtype(dtype),
            normalize=normalize,
            layers=dict(model.named_modules()),
        ),
        id_bytes=id_bytes,
        attrs={
            "model": type(model).__name__.lower(),
            "weights": "as they were in the loop",
            "source": f"{type(model).__module__}.{type(model).__qualname__}",
            "data": "a loop",
        },
        label_names=names,
        overwrite=overwrite,
    )


@checked
def join(out: str | os.PathLike[str]) -> Embeddings:
    """Make ``embeddings.h5`` of a recording, also of one that was interrupted.

    Args:
        out: The folder that was recorded into.

    Returns:
        The file, opened for reading.

    Raises:
        InUseError: It is still being recorded.
        StoreError: There is no recording, it has no rows, a part is missing, damaged or of another
            recording, ``out`` holds a file or an extraction that it is not to replace, or there is
            no space; the parts are kept until the file is whole.
    """
    path = Path(out) / store.EMBEDDINGS_NAME
    require_idle(path)
    parts = _opened_parts(path) if unfinished.parts_folder(path).is_dir() else []
    if not parts:
        raise StoreError(f"{out} holds no recording; name the folder that was recorded into")
    if not any(part.n_rows for part in parts):
        raise StoreError(
            f"{out} holds a recording of 0 rows: it was stopped before its first commit; record "
            f"again, or remove {unfinished.parts_folder(path)}"
        )
    derived.require_own_beside(path, has_config=False)
    file_id = _joined_id(parts)
    replaced = _file_id(path) if path.exists() else None
    _require_replaceable(path, parts[0], file_id=file_id, replaced=replaced)
    ids = [name for part in parts for name in part.ids]
    metadata: dict[str, Any] = {
        name: np.concatenate([np.asarray(part.metadata[name]) for part in parts])
        for name in parts[0].metadata
    }
    if "epoch" in metadata:
        metadata = {"sample": [name.rpartition("#")[0] for name in ids], **metadata}
    fields = [field for field in parts[0].fields if field.name.startswith("embeddings/")]
    labels = None
    if parts[0].labels is not None:
        labels = np.concatenate([np.asarray(part.labels) for part in parts])
    names = parts[0].label_names
    if labels is not None and not names:
        kinds = np.unique(labels[labels >= 0])
        names = [str(kind) for kind in kinds.tolist()]
        labels = np.where(labels < 0, -1, np.searchsorted(kinds, labels)).astype(np.int32)
    with contextlib.closing(
        writing.create(
            path,
            ids=ids,
            fields=fields,
            attrs={"id": file_id, **{key: parts[0].attrs[key] for key in _FACTS}},
            labels=labels,
            label_names=names,
            metadata=metadata,
            replace=True,
        )
    ) as writer:
        append_parts(writer, parts)
        writer.require_own()
        # What was made of an equal file is as good as new, unless that one's rows are damaged.
        if replaced and (replaced != file_id or store.Embeddings(path).verify()):
            derived.remove_derived(path.parent, replaced)
        writer.finish()
    unfinished.remove_parts(path)
    opened = store.open(path)
    failed = int((opened.status == Status.FAILED).sum())
    log.info("wrote %s: %s rows, %s failed", path, f"{opened.n_rows:,}", f"{failed:,}")
    return opened


def _joined_id(parts: Sequence[Embeddings]) -> str:
    """A hash of all that the file of a recording holds."""
    first = parts[0]
    facts = {
        "attrs": {key: first.attrs[key] for key in _FACTS},
        "points": [
            [point, rows.dtype.str, rows.shape[1], first.point_attrs[point]]
            for point, rows in first.embeddings.items()
        ],
        "columns": {name: np.asarray(column).dtype.str for name, column in first.metadata.items()},
        "labels": None if first.labels is None else first.label_names,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for part in parts:
        digest.update(part.checksums().tobytes())
    return digest.hexdigest()


def _opened_parts(path: Path) -> list[Embeddings]:
    """The parts of a recording in order, each with its committed rows.

    Raises:
        StoreError: One is missing, damaged, or of another recording.
    """
    if unfinished.parts_id(path) is not None:
        unfinished.require_no_parts(path)
    finals = [folder / path.name for folder in sorted(unfinished.parts_folder(path).iterdir())]
    found = [part if part.exists() else unfinished.partial_path(part) for part in finals]
    parts = [store.open(part) for part in found if part.exists()]
    first_row = 0
    for part in parts:
        if part.attrs.get(_RECORDING) != parts[0].attrs.get(_RECORDING):
            raise StoreError(
                f"{part.path} is a part of another recording than {parts[0].path}; put those of "
                f"one there, or remove {unfinished.parts_folder(path)}"
            )
        if part.attrs.get("first_row") != first_row:
            raise StoreError(
                f"before {part.path} {part.attrs.get('first_row')} rows were recorded, and the "
                f"parts there have {first_row}; a part is missing"
            )
        first_row += part.n_rows
    return parts


def _file_id(path: Path) -> str:
    """The id of a file; "" of one that is damaged: nothing can be known to be made of it."""
    try:
        return str(store.Embeddings(path).attrs["id"])
    except StoreError:
        return ""


def _require_free(path: Path, *, overwrite: bool) -> None:
    """Raise StoreError if there is what was not asked to be replaced."""
    if overwrite:
        return
    out = str(path.parent)
    if unfinished.parts_folder(path).exists() and (n := sum(p.n_rows for p in _opened_parts(path))):
        raise StoreError(
            f"{out} holds a recording of {n:,} rows that was not finished; make a file of them "
            f"with embedx.join({out!r}), or start anew with overwrite=True"
        )
    for there in (path, unfinished.partial_path(path)):
        if there.exists():
            raise StoreError(
                f"{there} is there already; choose another out, or pass overwrite=True"
            )


def _require_replaceable(
    path: Path, part: Embeddings, *, file_id: str, replaced: str | None
) -> None:
    """Raise StoreError if joining would replace what the recording was not told to replace."""
    for there, other in (
        # An equal one is of this recording: it was killed before it removed the parts.
        (path, replaced not in (None, file_id, part.attrs.get(_REPLACES))),
        (unfinished.partial_path(path), _file_id(unfinished.partial_path(path)) != file_id),
    ):
        if other and there.exists():
            raise StoreError(
                f"{there} was not there when the recording began, and joining would replace it; "
                f"move it elsewhere, or remove {unfinished.parts_folder(path)}"
            )


def _by_name(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, wants_mask: bool
) -> dict[str, Any]:
    """What enters a model, by the names of its arguments, and by those within these: the keys of
    dicts and the fields of tuples and dataclasses; by numbers what has no name.

    Raises:
        ShapeError: Several masks of padding have one name, and differ.
    """
    named: dict[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # the model will say what is wrong with them
        named |= inspect.signature(model.forward).bind(*args, **kwargs).arguments
        named = {name: value for name, value in named.items() if value is not None}
    within: dict[str, Any] = {}

    def look_into(value: Any, *, depth: int = 3) -> None:
        fields: dict[Any, Any] = {}
        if isinstance(value, Mapping):
            fields = dict(value)
        elif isinstance(value, (tuple, list)) and not all(type(one) is int for one in value):
            names = getattr(value, "_fields", map(str, range(len(value))))
            fields = dict(zip(names, value, strict=True))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            fields = dict(vars(value))  # a batch of a class of the user's own
        for name, inner in fields.items():
            add(str(name), inner)
            if depth and not isinstance(inner, (Tensor, str)):
                look_into(inner, depth=depth - 1)

    def add(name: str, value: Any) -> None:
        other = within.setdefault(name, value)
        if not wants_mask or name not in MASKS or value is other:
            return
        both = isinstance(value, Tensor) and isinstance(other, Tensor)
        if both and not torch.equal(value, other):
            raise masks_unknown([name, f"another {name}"])

    for value in (*args, *kwargs.values()):
        look_into(value)
    for name, value in named.items():
        add(name, value)
    known = {id(value) for value in named.values()}
    numbered = {str(i): value for i, value in enumerate(args) if id(value) not in known}
    by_keyword = {name: value for name, value in kwargs.items() if value is not None}
    return numbered | within | named | by_keyword


def _plain(name: str, values: list[Any]) -> list[Any]:
    """Numbers in place of tensors that hold one each.

    Raises:
        DataError: One is a tensor of more than that.
    """
    for value in values:
        if isinstance(value, Tensor) and value.ndim:
            raise DataError(
                f"{name} holds a tensor of shape {tuple(value.shape)}; give one number a sample"
            )
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def _in_order(ids: Any) -> list[Any]:
    require_unmasked(ids)
    if isinstance(ids, (Mapping, Set, str, bytes)):
        raise DataError(
            f"ids is a {type(ids).__name__}, which has no entry a sample in order; give a list, "
            "one a sample"
        )
    if getattr(ids, "ndim", 1) != 1:
        raise DataError(f"ids have shape {tuple(ids.shape)}; give one number or text a sample")
    try:
        return list(ids.tolist() if hasattr(ids, "tolist") else ids)
    except TypeError:
        raise DataError(f"ids is a {type(ids).__name__}; give a list, one a sample") from None


def _whole(epoch: Any) -> int:
    try:
        number = operator.index(epoch)
    except TypeError:
        raise DataError(f"epoch must be a whole number, not {epoch!r}") from None
    if not -(2**63) <= number < 2**63:
        raise DataError(f"epoch must lie between -2**63 and 2**63, and is {number}")
    return number


def _column_path(name: str, *, with_epoch: bool) -> str:
    is_text = name.isprintable() and name.encode("utf-8", "replace").decode() == name
    if not name or not is_text:
        raise DataError(f"a column cannot be called {name!r}; choose another name")
    if name == "sample" and with_epoch:
        raise DataError("the column sample is made of ids= and epoch=; choose another name")
    return layout.column_name(name)


def _array(name: str, values: Any, n: int) -> Array:
    """One number a sample."""
    require_unmasked(values)
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if _is_half(values) else values
    elif isinstance(values, (list, tuple)):
        values = _plain(name, list(values))
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} cannot be read as numbers ({first_line(error)}); give one number a sample"
        ) from None
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        raise DataError(f"{name} is of type {array.dtype}; give numbers of at most 64 bits")
    if array.shape != (n,):
        raise DataError(f"{name} has shape {array.shape} for {n} samples; give one number a sample")
    if isinstance(values, list) and array.dtype.kind == "f":
        require_exact(values, what=name)
    if n and array.dtype.kind == "u" and array.max() >= 2**63:
        raise DataError(f"{name} must be less than 2**63, and is {array.max()}")
    return array


def _labels(values: Any, n: int, *, n_names: int) -> Array:
    array = _array("labels", values, n)
    is_whole = array.dtype.kind in "iu" or not n  # an empty list has no kind
    if not is_whole or (n and not (array.min() >= -1 and array.max() < 2**31)):
        raise DataError(
            "labels must be whole numbers, -1 for none; give those, and label_names= their names"
        )
    if n_names and n and array.max() >= n_names:
        raise DataError(
            f"the label {array.max()} has no name: label_names has {n_names}, for 0 to "
            f"{n_names - 1}"
        )
    return array.astype(np.int32)


def _numbers(name: str, values: Any, n: int, *, like: Array | None) -> Array:
    """A column in the type that is stored: whole numbers or floats, as in the first batch."""
    array = _array(name, values, n)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{name} must be numbers, one a sample")
    dtype = np.dtype(np.float64 if array.dtype.kind == "f" else np.int64)
    if like is not None and dtype != like.dtype:
        stored = array.astype(like.dtype)
        if dtype == np.float64 or not np.array_equal(stored.astype(dtype), array):
            words = {"f": "fractions", "i": "whole numbers"}
            raise DataError(
                f"{name} has {words[dtype.kind]} here and had {words[like.dtype.kind]} in the "
                f"first batch; give {words['f']} with every batch: {name}=[0.0, ...]"
            )
        return stored
    return array.astype(dtype)


def _is_half(tensor: Tensor) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no columns"
