"""``record``: what layers give in a loop of one's own, streamed while the loop runs."""

import contextlib
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from embedx import hooks, store
from embedx.checks import checked
from embedx.errors import ConfigError, DataError, InUseError, StoreError
from embedx.pooling import Function, per_point
from embedx.rows import Rows, not_finite
from embedx.store import Array, Embeddings, Field, Status

log = logging.getLogger("embedx")

PART_ROWS = 65_536
_EPOCH = "metadata/epoch"
_JOIN_BYTES = 2**24


class Recorder:
    """Hooks on a model in a loop, and the file that they fill.

    Made by :func:`record`. Each forward pass is followed by one call of :meth:`batch`, whether the
    model itself is called or a method of it that calls its layers. Leaving the ``with`` block makes
    ``embeddings.h5`` of all that was recorded; after an exception in the loop the rows of all
    batches are kept, and :func:`join` makes a file of them.

    Attributes:
        path: The file to be.
        n_rows: Rows recorded so far.
    """

    def __init__(
        self,
        model: nn.Module,
        points: Sequence[hooks.Point],
        path: Path,
        *,
        rows: Rows,
        id_bytes: int,
        attrs: dict[str, Any],
        label_names: Sequence[str],
    ) -> None:
        self.path = path
        self.n_rows = 0
        self._rows = rows
        self._id_bytes = id_bytes
        self._attrs = attrs
        self._label_names = list(label_names)
        self._seen: set[int] = set()
        self._columns: list[str] | None = None
        self._writer: store.Writer | None = None
        self._n_parts = 0
        self._done = 0
        self._has_begun = False
        self._first = points[0].name
        self._got = hooks.Capture(
            model, points, reduce=rows.reduce, before_pass=self._begin_pass
        ).set()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
            return
        self.close()
        if self.n_rows:
            log.warning(
                "stopped by %s; %s rows are kept: embedx.join(%r) makes a file of them",
                kind.__name__,
                f"{self.n_rows:,}",
                str(self.path.parent),
            )

    def _begin_pass(self) -> None:
        if self._has_begun or self._got.has_fired:
            raise DataError(
                "two forward passes without recorder.batch() between them: call it after each "
                "pass, or put passes that are not to be recorded into `with recorder.paused():`"
            )
        self._has_begun = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no pass within this block, such as those of a validation."""
        self._got.remove()
        try:
            yield
        finally:
            self._got.set()

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
            labels: A whole number for each sample, -1 for none.
            epoch: Of this pass. Ids are then stored as ``ID#EPOCH``, with columns ``sample`` and
                ``epoch``.
            columns: Further numbers, one a sample, such as its loss.

        Raises:
            DataError: There was no pass, a number of values that is not that of the samples, an id
                that comes again, or other columns than before.
            LayerError: A layer did not fire, or ran twice.
            ShapeError: A layer gives no vector a sample.
            StoreError: The disk refused; the rows of earlier batches are kept.
        """
        if not (self._has_begun or self._got.has_fired):
            raise DataError("recorder.batch() without a forward pass before it: call it after each")
        self._has_begun = False
        first = self._got[self._first]
        n = len(first) if first.ndim else 0
        arrays, attrs = self._rows.arrays(self._got, n=n)
        self._got.reset()
        given: dict[str, Any] = {f"metadata/{name}": column for name, column in columns.items()}
        if epoch is not None:
            given[_EPOCH] = np.full(n, epoch, np.int32)
        if labels is not None:
            given["labels"] = labels
        if self._columns is not None and sorted(given) != self._columns:
            raise DataError(
                f"this batch has {_listed(sorted(given))} and the first had "
                f"{_listed(self._columns)}; give the same with every batch"
            )
        self._columns = sorted(given)
        for name, values in given.items():
            arrays[name] = _numbers(name, values, n)
        arrays["ids"] = self._named(ids, n, epoch)
        bad = not_finite({k: a for k, a in arrays.items() if k.startswith("embeddings/")})
        status = np.full(n, Status.OK, np.uint8)
        status[list(bad)] = Status.FAILED
        for name, array in arrays.items():
            if name.startswith("embeddings/") and bad:
                array[list(bad)] = np.nan
        self._append(arrays, attrs, status, bad)
        self.n_rows += n

    def _named(self, ids: Any, n: int, epoch: int | None) -> Array:
        if ids is None:
            names = [str(self.n_rows + i) for i in range(n)]
        else:
            names = [str(name) for name in (ids.tolist() if hasattr(ids, "tolist") else ids)]
            if len(names) != n:
                raise DataError(f"batch() got {len(names)} ids for {n} samples; give one each")
            if epoch is not None:
                names = [f"{name}#{epoch}" for name in names]
            for name in names:
                if hash(name) in self._seen:
                    again = "twice" if epoch is None else f"twice in epoch {epoch}"
                    raise DataError(
                        f"the sample {name[:60]!r} was recorded {again}; give ids that are "
                        "unique, and epoch= where samples come again"
                    )
                self._seen.add(hash(name))
        return store.encode_texts(names, what="the id", most_bytes=self._id_bytes).astype(
            f"S{self._id_bytes}"
        )

    def _append(
        self, arrays: dict[str, Array], attrs: dict[str, Any], status: Array, bad: dict[int, str]
    ) -> None:
        """Into the part at hand, or the rest of it and the next one."""
        start, n = 0, len(status)
        while start < n:
            if self._writer is None:
                fields = [
                    Field(name, array.shape[1:], array.dtype, attrs.get(name, {}))
                    for name, array in arrays.items()
                ]
                self._writer = store.create(
                    store.parts_folder(self.path) / f"{self._n_parts:05d}" / self.path.name,
                    ids=None,
                    n_rows=PART_ROWS,
                    fields=fields,
                    attrs={
                        **self._attrs,
                        # A disk page of another recording is not taken for one of this.
                        "id": uuid.uuid4().hex,
                        "first_row": self.n_rows + start,
                    },
                    label_names=self._label_names,
                )
                self._n_parts += 1
                self._done = 0
            end = min(n, start + PART_ROWS - self._done)
            for field in self._writer.fields:
                array = arrays[field.name]
                if array.shape[1:] != field.shape:
                    raise DataError(
                        f"{field.name} has shape {array.shape[1:]} and had {field.shape} before; "
                        "choose a pooling that gives one length, such as pooling=gap"
                    )
            names = arrays["ids"].tolist()
            self._writer.append(
                {name: array[start:end] for name, array in arrays.items()},
                status=status[start:end],
                reasons={
                    self._done + i - start: (names[i].decode(), why)
                    for i, why in bad.items()
                    if start <= i < end
                },
            )
            self._done += end - start
            start = end
            if self._done == PART_ROWS:
                self._writer.finish()
                self._writer = None

    def close(self) -> None:
        """Take the hooks off and make what was recorded durable, without making the file."""
        self._got.remove()
        if self._writer is not None:
            with contextlib.closing(self._writer) as writer:
                writer.commit()
            self._writer = None

    def finish(self) -> Embeddings:
        """Take the hooks off and make the file of all that was recorded.

        Raises:
            DataError: Nothing was recorded.
            StoreError: No space; the recorded rows are kept.
        """
        self.close()
        if not self.n_rows:
            raise DataError(
                "nothing was recorded: no forward pass was followed by recorder.batch()"
            )
        return join(self.path.parent)


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
        pooling: As for :func:`embedx.extract`.
        normalize: Scale each row to length 1 (L2).
        dtype: Of the stored numbers.
        label_names: Names that the labels count through.
        id_bytes: Longest id, in bytes of UTF-8.
        overwrite: Replace what lies in ``out``.

    Returns:
        The recorder, for a ``with`` block.

    Raises:
        ConfigError: An argument is out of its range.
        LayerError: A layer is not there.
        StoreError: ``out`` holds a file, or a recording that was not finished.
    """
    if not 1 <= id_bytes <= store.ID_BYTES_MAX:
        raise ConfigError(f"id_bytes must be 1 to {store.ID_BYTES_MAX}, not {id_bytes}")
    resolved = hooks.resolve_points(model, points)
    poolings = per_point(pooling, n_points=len(resolved))
    path = Path(out) / store.EMBEDDINGS_NAME
    if store.parts_folder(path).exists():
        if not overwrite:
            n_rows = sum(part.n_rows for part in _opened_parts(path))
            raise StoreError(
                f"{out} holds a recording of {n_rows:,} rows that was not finished; make a file "
                f"of them with embedx.join({str(out)!r}), or start anew with overwrite=True"
            )
        _remove_parts(path)
    if path.exists() and not overwrite:
        raise StoreError(f"{path} is there already; choose another out, or pass overwrite=True")
    if model.training:
        log.warning(
            "%s is in train mode: what is recorded has its dropout and the statistics of its "
            "batches",
            type(model).__name__.lower(),
        )
    return Recorder(
        model,
        resolved,
        path,
        rows=Rows(resolved, poolings, dtype=np.dtype(dtype), normalize=normalize),
        id_bytes=id_bytes,
        attrs={
            "model": type(model).__name__.lower(),
            "weights": "as they were in the loop",
            "source": f"{type(model).__module__}.{type(model).__qualname__}",
            "data": "a loop",
        },
        label_names=label_names,
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
        StoreError: There is no recording, a part is missing or damaged, or there is no space; the
            parts are kept until the file is whole.
    """
    path = Path(out) / store.EMBEDDINGS_NAME
    _require_idle(path)
    parts = _opened_parts(path) if store.parts_folder(path).is_dir() else []
    if not parts:
        raise StoreError(f"{out} holds no recording; name the folder that was recorded into")
    ids = [name for part in parts for name in part.ids]
    metadata: dict[str, Any] = {
        name: np.concatenate([np.asarray(part.metadata[name]) for part in parts])
        for name in parts[0].metadata
    }
    if "epoch" in metadata:
        metadata = {"sample": [name.rpartition("#")[0] for name in ids], **metadata}
    replaced = None
    if path.exists():
        with contextlib.suppress(StoreError):  # damaged: nothing can be known to be made of it
            replaced = str(store.open(path).attrs["id"])
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.checksums().tobytes())
    known = ("model", "weights", "source", "data")
    points = list(parts[0].embeddings)
    fields = [
        store.embeddings_field(
            point,
            n_features=parts[0].embeddings[point].shape[1],
            dtype=parts[0].embeddings[point].dtype,
            attrs=parts[0].point_attrs[point],
        )
        for point in points
    ]
    labels = None
    if parts[0].labels is not None:
        labels = np.concatenate([np.asarray(part.labels) for part in parts])
    names = parts[0].label_names
    if labels is not None and not names:
        kinds = np.unique(labels[labels >= 0])
        names = [str(kind) for kind in kinds.tolist()]
        labels = np.where(labels < 0, -1, np.searchsorted(kinds, labels)).astype(np.int32)
    with contextlib.closing(
        store.create(
            path,
            ids=ids,
            fields=fields,
            attrs={"id": digest.hexdigest(), **{key: parts[0].attrs[key] for key in known}},
            labels=labels,
            label_names=names,
            metadata=metadata,
            replace=True,
        )
    ) as writer:
        before = 0
        for part in parts:
            if bad := part.verify():
                raise StoreError(
                    f"{part.path}: row {bad[0]} ({part.ids[bad[0]]}) does not match its checksum; "
                    "the recording cannot be joined"
                )
            reasons = {
                r["row"]: r["reason"] for r in store.read_reasons(part.path.with_name(path.name))
            }
            block = max(1, _JOIN_BYTES // sum(field.row_bytes for field in fields))
            for start in range(0, part.n_rows, block):
                rows = slice(start, min(start + block, part.n_rows))
                writer.append(
                    {
                        field.name: np.array(part.embeddings[point][rows])
                        for field, point in zip(fields, points, strict=True)
                    },
                    status=part.status[rows],
                    reasons={
                        before + row: (part.ids[row], why)
                        for row, why in reasons.items()
                        if rows.start <= row < rows.stop
                    },
                )
            before += part.n_rows
        if replaced is not None:
            store.remove_derived(path.parent, replaced)
        writer.finish()
    _remove_parts(path)
    opened = store.open(path)
    failed = int((opened.status == Status.FAILED).sum())
    log.info("wrote %s: %s rows, %s failed", path, f"{opened.n_rows:,}", f"{failed:,}")
    return opened


def _opened_parts(path: Path) -> list[Embeddings]:
    """The parts of a recording in order, each with its committed rows.

    Raises:
        StoreError: One is missing or damaged.
    """
    finals = [folder / path.name for folder in sorted(store.parts_folder(path).iterdir())]
    found = [part if part.exists() else store.partial_path(part) for part in finals]
    parts = [store.open(part) for part in found if part.exists()]
    first_row = 0
    for part in parts:
        if part.attrs.get("first_row") != first_row:
            raise StoreError(
                f"before {part.path} {part.attrs.get('first_row')} rows were recorded, and the "
                f"parts there have {first_row}; a part is missing"
            )
        first_row += part.n_rows
    return parts


def _remove_parts(path: Path) -> None:
    _require_idle(path)
    shutil.rmtree(store.parts_folder(path), ignore_errors=True)


def _require_idle(path: Path) -> None:
    for part in sorted(store.parts_folder(path).glob(f"*/{store.partial_path(path).name}")):
        # The lock of its writer says whether it is still being recorded.
        try:
            writer = store.resume(part.with_name(path.name))
        except InUseError:
            raise
        except StoreError:  # damaged: nobody writes it
            continue
        if writer is not None:
            writer.close()


def _numbers(name: str, values: Any, n: int) -> Array:
    """One number a sample, in the type that is stored."""
    plain = name.removeprefix("metadata/")
    array = values.detach().cpu() if isinstance(values, Tensor) else values
    array = np.asarray(array.float() if isinstance(array, Tensor) and _is_half(array) else array)
    if array.shape != (n,):
        raise DataError(
            f"{plain} has shape {array.shape} for {n} samples; give one number a sample"
        )
    if name == "labels":
        is_whole = array.dtype.kind in "iu"
        if not is_whole or (n and not (array.min() >= -1 and array.max() < 2**31)):
            raise DataError(
                "labels must be whole numbers, -1 for none; give those, and label_names= their "
                "names"
            )
        return array.astype(np.int32)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{plain} must be numbers, one a sample")
    return array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)


def _is_half(tensor: Tensor) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name.removeprefix("metadata/") for name in names) or "no columns"
