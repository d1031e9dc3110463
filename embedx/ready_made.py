"""Embeddings that were made elsewhere, as a file of embedx: copied once, then used as any other."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedx import layout, store, unfinished, writing
from embedx.array_files import ArrayFile, arrays_in, is_label_key
from embedx.columns import (
    indexed,
    is_label_name,
    kept,
    minus_one_told,
    not_ids,
    plain_name,
    require_labels,
    spelled_label,
    storable,
    told_apart,
)
from embedx.disk import waiting_lock
from embedx.errors import DataError, StoreError, listed
from embedx.layout import Field, Status
from embedx.matrix import Array
from embedx.store import Embeddings
from embedx.table_files import parquet_file, read_table, require_bounded

log = logging.getLogger("embedx")

# What a stage takes as embeddings.
Given = str | os.PathLike[str] | Embeddings | Array

MODEL = "ready-made"
SUFFIXES = (".npy", ".npz", ".parquet")
_BLOCK_BYTES = 2**24
_ID_KEYS = frozenset({"id", "ids"})


def is_ready_made(given: Any) -> bool:
    """Whether it is an array, or names a file of vectors that embedx did not write."""
    if isinstance(given, np.ndarray):
        return True
    is_path = isinstance(given, (str, os.PathLike))
    return is_path and Path(given).suffix.lower() in SUFFIXES and not Path(given).is_dir()


def opened(given: Given) -> Embeddings:
    """Open embeddings for reading, also those that were made elsewhere.

    An array, a ``.npy``, a ``.npz`` or a ``.parquet`` file is copied into
    ``outputs/<its name>-<hash of what is in it>/embeddings.h5``, once; a copy that is there is
    taken as it is. Numbers other than float16 become float32; a row with one that is not finite is
    a failed row.

    Args:
        given: ``embeddings.h5``, its folder, opened embeddings, or: rows of numbers ``(n, d)`` as
            an array, a ``.npy``, the only such array of a ``.npz``, or the only column of lists in
            a ``.parquet`` file. In the last two, what is called label or id counts as such, and
            what else has a value a row is metadata.

    Raises:
        DataError: A file of others cannot be read, or is not of such rows.
        DependencyError: It is a parquet file, and pyarrow is not installed.
        StoreError: It is not there, unfinished, damaged, or there is no space for the copy.
    """
    if not is_ready_made(given):
        assert not isinstance(given, np.ndarray)
        return store.open(given)
    if isinstance(given, np.ndarray):
        vectors = _of_array(given)
    else:
        assert not isinstance(given, Embeddings)
        path = Path(given).expanduser()
        mark = _mark(path)
        vectors = _of_parquet(path) if path.suffix.lower() == ".parquet" else _of_file(path)
        vectors = dataclasses.replace(vectors, is_as_it_was=lambda: _mark(path) == mark)
    return _copied(vectors)


@dataclasses.dataclass(frozen=True)
class _Vectors:
    """Rows of numbers with what is known of them.

    Attributes:
        name: Of the file that they are from.
        title: What they are, for messages.
        layer: What the rows are called.
        n: How many.
        d: How many numbers each has.
        dtype: float16 or float32.
        blocks: Makes an iterator of them from the first on: rows ``(b, d)``, and why some of the b
            have no numbers.
        ids: n unique texts; row numbers where None.
        labels: Indices ``(n,)`` and their names, or None.
        metadata: Columns.
        notes: What was found and passed over.
        warnings: What is likely not as it was meant.
        is_as_it_was: Whether the file is still the one of which this is known.
    """

    name: str
    title: str
    layer: str
    n: int
    d: int
    dtype: np.dtype[Any]
    blocks: Callable[[], Iterator[tuple[Array, dict[int, str]]]]
    ids: list[str] | None = None
    labels: tuple[Array, list[str]] | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    is_as_it_was: Callable[[], bool] = lambda: True

    def rows(self, narrowed: "_Narrowed | None" = None) -> Iterator[tuple[Array, dict[int, str]]]:
        """The rows as they are stored, and why some of a block fail."""
        for block, missing in self.blocks():
            with np.errstate(over="ignore", invalid="ignore"):
                rows = np.ascontiguousarray(block.astype(self.dtype, copy=False))
            bad = dict(missing)
            for i in np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist():
                bad.setdefault(i, f"it has numbers that are not finite in {self.dtype}")
            if bad:
                rows = rows.copy()
                rows[list(bad)] = np.nan
            if narrowed is not None and block.dtype.itemsize >= 4 and block.dtype != rows.dtype:
                narrowed.add(
                    np.delete(block, list(bad), axis=0), np.delete(rows, list(bad), axis=0)
                )
            yield rows, bad


class _Narrowed:
    """How much of what tells rows of wider numbers apart is left of it in float32, by column."""

    def __init__(self, d: int) -> None:
        self._low: Array = np.full(d, np.inf, np.longdouble)
        self._high: Array = -self._low
        self._error: Array = np.zeros(d, np.longdouble)

    def add(self, wide: Array, rows: Array) -> None:
        """Note good rows ``(b, d)`` as they were given, and as they are stored."""
        if len(wide):
            if wide.dtype.kind in "iu":  # of 64 bits, which are more than float64 tells apart
                wide = wide.astype(np.longdouble)
            self._low = np.minimum(self._low, wide.min(axis=0))
            self._high = np.maximum(self._high, wide.max(axis=0))
            self._error = np.maximum(self._error, np.abs(wide - rows).max(axis=0))

    def told(self, title: str) -> list[str]:
        """What is to be said: columns whose numbers lie within few steps of float32."""
        differ = self._high > self._low
        lost = np.flatnonzero(differ & (self._error > 1e-3 * (self._high - self._low)))
        if not len(lost):
            return []
        many = f"{len(lost)} of the {len(self._error)} numbers of a row (the first is {lost[0]})"
        return [
            f"{title}: float32 keeps less than three digits of what tells rows apart in {many}, "
            "which differ by little beside their size, or are next to nothing; take their means "
            "away, and scale them, before"
        ]


def _mark(path: Path) -> tuple[int, ...] | None:
    """What changes with a file that is replaced or written."""
    with contextlib.suppress(OSError):  # which is told where it is read
        return store.file_stamp(path.stat())
    return None


# --------------------------------------------------------------------------- the copy


def _copied(vectors: _Vectors) -> Embeddings:
    digest = hashlib.sha256()
    n_failed = 0
    narrowed = _Narrowed(vectors.d)
    for rows, bad in vectors.rows(narrowed):
        digest.update(rows.tobytes())
        n_failed += len(bad)
    if n_failed == vectors.n:
        raise DataError(
            f"every one of the {vectors.n:,} rows of {vectors.title} has numbers that are missing "
            "or not finite; give others"
        )
    of_rows = digest.hexdigest()
    if not vectors.is_as_it_was():
        raise _changed(vectors)
    for warning in narrowed.told(vectors.title):
        log.warning("%s", warning)
    labels = None if vectors.labels is None else [vectors.labels[0].tolist(), vectors.labels[1]]
    columns = {
        name: [str(getattr(column, "dtype", "text")), *map(str, column)]
        for name, column in vectors.metadata.items()
    }
    facts = [vectors.layer, vectors.n, vectors.d, vectors.dtype.name, vectors.ids, labels, columns]
    digest.update(json.dumps(facts).encode())
    file_id = digest.hexdigest()
    name = re.sub(r"[^\w.-]|^[.]", "_", vectors.name)
    folder = Path("outputs") / f"{name}-{file_id[:6]}"
    path = folder / store.EMBEDDINGS_NAME
    if path.exists():
        return _present(path, file_id, vectors)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with waiting_lock(folder / MODEL, work=f"copies {vectors.title} into {folder}"):
            if path.exists():  # by another, meanwhile
                return _present(path, file_id, vectors)
            _write(path, file_id, vectors, n_failed, of_rows=of_rows)
    except OSError as error:
        if is_new:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot write {folder}: {error.strerror}; work elsewhere") from None
    return store.open(path)


def _changed(vectors: _Vectors) -> DataError:
    return DataError(
        f"{vectors.title} was changed while it was read; run again when whoever writes it is done"
    )


def _present(path: Path, file_id: str, vectors: _Vectors) -> Embeddings:
    present = store.open(path)
    if present.attrs["id"] != file_id:
        raise StoreError(
            f"{path} holds other embeddings than {vectors.title} (id {present.attrs['id'][:12]}, "
            f"and here {file_id[:12]}); move it away"
        )
    log.info("%s is copied already, as %s", vectors.title, path)
    return present


def _write(path: Path, file_id: str, vectors: _Vectors, n_failed: int, *, of_rows: str) -> None:
    """Copy the rows, whose SHA-256 the id was made of: they are read again, and held to it.

    Raises:
        DataError: They are others by now; what was copied is taken away.
    """
    for note in vectors.notes:
        log.info("%s", note)
    for warning in vectors.warnings:
        log.warning("%s", warning)
    ids = vectors.ids or [str(i) for i in range(vectors.n)]
    field = layout.embeddings_field(
        vectors.layer,
        n_features=vectors.d,
        dtype=vectors.dtype,
        attrs={"layer": vectors.layer, "what": MODEL},
    )
    attrs = {
        "id": file_id,
        "identity": json.dumps({"model": MODEL, "rows": vectors.n}),
        "model": MODEL,
        "source": vectors.name,
        "data": vectors.name,
    }
    writer = writing.resume(path, expected={"id": file_id}) or _created(
        path, vectors, ids=ids, field=field, attrs=attrs
    )
    with contextlib.closing(writer):
        first_row, start = writer.rows_done, 0
        digest = hashlib.sha256()
        for rows, bad in vectors.rows():
            digest.update(rows.tobytes())
            stop = start + len(rows)
            skip = min(max(0, first_row - start), len(rows))
            status = np.full(len(rows), Status.OK, np.uint8)
            status[list(bad)] = Status.FAILED
            writer.append(
                {field.name: rows[skip:]},
                status=status[skip:],
                reasons={
                    start + i: (ids[start + i], f"DataError: {why}")
                    for i, why in bad.items()
                    if i >= skip
                },
            )
            start = stop
        if digest.hexdigest() != of_rows or not vectors.is_as_it_was():
            writer.discard()
            raise _changed(vectors)
        writer.finish()
    log.info(
        "copied %s into %s: %s rows, %s failed, %s (%s %s)",
        vectors.title,
        path,
        f"{vectors.n:,}",
        f"{n_failed:,}",
        vectors.layer,
        vectors.d,
        vectors.dtype,
    )
    if n_failed:
        for reason in unfinished.read_reasons(path)[:3]:
            log.warning("failed row %s, %s: %s", reason["row"], reason["id"], reason["reason"])


def _created(
    path: Path, vectors: _Vectors, *, ids: Sequence[str], field: Field, attrs: dict[str, Any]
) -> writing.Writer:
    labels, names = vectors.labels or (None, [])
    return writing.create(
        path,
        ids=ids,
        fields=[field],
        attrs=attrs,
        labels=labels,
        label_names=names,
        metadata=vectors.metadata,
    )


# --------------------------------------------------------------------------- arrays


def _of_array(values: Array, *, title: str = "the array") -> _Vectors:
    if np.ma.isMaskedArray(values):
        raise DataError(f"{title} is masked; give filled(np.nan), whose rows are failed ones")
    _require_rows(values.shape, values.dtype, title)
    n, d = values.shape
    blocks = functools.partial(_blocks, values)
    return _Vectors("array", title, "vectors", n, d, _stored(values.dtype), blocks)


def _require_rows(shape: tuple[int, ...], dtype: np.dtype[Any], title: str) -> None:
    if len(shape) != 2 or min(shape) < 1 or dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise DataError(
            f"{title} has shape {shape} and type {dtype}, and embeddings are numbers (n, d), a row "
            "a sample; reshape or save them so"
        )


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float16 if dtype == np.float16 else np.float32)


def _blocks(rows: Array | ArrayFile) -> Iterator[tuple[Array, dict[int, str]]]:
    step = max(1, _BLOCK_BYTES // (rows.shape[1] * rows.dtype.itemsize))
    for start in range(0, len(rows), step):
        yield rows[start : start + step], {}
    if isinstance(rows, ArrayFile):
        rows.close()


def _of_file(path: Path) -> _Vectors:
    arrays, refused = arrays_in(path)
    found = {key: one for key, one in arrays.items() if len(one.shape) == 2 or not key}
    if len(found) != 1:
        shown = listed([f"{key} {one.shape}" for key, one in arrays.items()]) or "none"
        how = f"np.save('embeddings.npy', np.load('{path.name}')[KEY])"
        raise DataError(
            f"{path} has {len(found)} arrays of rows (n, d), and one is taken; it has: {shown}; "
            f"save that one alone: {how}"
        )
    ((key, chosen),) = found.items()
    _require_rows(chosen.shape, chosen.dtype, str(path))
    chosen.require_whole()
    n, d = chosen.shape
    by_label, aloud = _labelling(
        path,
        [key for key, one in arrays.items() if one.shape == (n,) and is_label_key(key)],
        are_named="label_names" in arrays,
    )
    ids, labels, metadata, notes, told = _beside(path, arrays, n, by_label=by_label)
    notes += [f"passed over: {name} {why}" for name, why in refused.items()]
    if _stored(chosen.dtype) != chosen.dtype:
        notes.append(f"{path}: numbers of {chosen.dtype} are kept as float32")
    return _Vectors(
        name=path.stem,
        title=str(path),
        layer=key.rpartition("/")[2] or "vectors",
        n=n,
        d=d,
        dtype=_stored(chosen.dtype),
        blocks=functools.partial(_blocks, chosen),
        ids=ids,
        labels=labels,
        metadata=metadata,
        notes=tuple(notes),
        warnings=(
            *chosen.holes_told(),
            *aloud,
            *told,
            *minus_one_told(labels[1] if labels else (), str(path)),
        ),
    )


def _labelling(
    path: Path, names: Sequence[str], *, are_named: bool = False
) -> tuple[str | None, list[str]]:
    """Which of the arrays or columns that could be it has the labels, and what is to be said of it.

    Args:
        path: The file.
        names: Of those that could be it, in their order; where there are none it is None.
        are_named: Whether the file has names for ``labels``.
    """
    if not names:
        return None, []
    chosen = next((one for one in names if are_named and one.endswith("labels")), names[0])
    if len(names) == 1:
        return chosen, []
    return chosen, [
        f"{path} has {listed(names)}: the labels are {chosen}, and what is left is metadata; to "
        "take another, save the file without the ones that are not meant"
    ]


def _beside(
    path: Path, arrays: dict[str, ArrayFile], n: int, *, by_label: str | None
) -> tuple[list[str] | None, tuple[Array, list[str]] | None, dict[str, Any], list[str], list[str]]:
    """What stands in a ``.npz`` beside the rows: ids, labels, metadata.

    Returns:
        These, what was found and passed over, and what is to be said aloud.
    """
    ids: list[str] | None = None
    labels: tuple[Array, list[str]] | None = None
    metadata: dict[str, Any] = {}
    passed_over, notes, aloud = [], [], []
    no_ids: dict[str, str] = {}
    for key, one in arrays.items():
        if key == "label_names" or len(one.shape) == 2:
            continue
        if one.shape != (n,):
            passed_over.append(f"{key} {one.shape}")
            continue
        values = one.as_list()
        if key == by_label:
            names = arrays.get("label_names")
            texts = None if names is None else list(map(str, names.as_list()))
            labels, told = _named_labels(values, texts, f"{key} of {path}")
            aloud += told
            notes.append(f"{path}: labels by {key}, {len(labels[1])} classes")
        elif key in _ID_KEYS and ids is None and not (why := not_ids(list(map(str, values)))):
            ids = list(map(str, values))
            notes.append(f"{path}: ids by {key}")
        else:
            if key in _ID_KEYS and ids is None:
                no_ids[key] = why
            column = one[:] if one.dtype.kind in "biuf" else values
            name = key.removeprefix("metadata/")
            while name in metadata:
                name += "_"
            if name != key.removeprefix("metadata/"):
                notes.append(f"{path}: {key} is the column {name}, for another one has its name")
            metadata[name], said = kept(column, key)
            notes += said
    aloud += _without_ids(path, no_ids if ids is None else {})
    if "label_names" in arrays and by_label is None:
        aloud.append(f"{path} has label_names and no labels that count through them")
    if metadata:
        notes.append(f"columns kept: {listed(metadata)}")
    if passed_over:
        notes.append(f"passed over, for they have not {n:,} values: {listed(passed_over)}")
    return ids, labels, metadata, notes, aloud


def _without_ids(path: Path, refused: Mapping[str, str]) -> list[str]:
    """That rows have their numbers as ids although something is called so, by what it is."""
    return [
        f"{path}: rows have their numbers as ids, and {name} is metadata: {why}"
        for name, why in refused.items()
    ]


def _named_labels(
    values: list[Any], names: list[str] | None, where: str
) -> tuple[tuple[Array, list[str]], list[str]]:
    """Labels by their names where there are some, else each by itself, and what is to be said."""
    are_whole = all(isinstance(value, int) for value in values)
    if names and are_whole and min(values) >= -1 and max(values) < len(names):
        apart, told = told_apart([storable(name) for name in names])
        return (np.array(values, np.int32), apart), told
    texts = [spelled_label(value) for value in values]
    require_labels(texts, where)
    if not names or set(texts) <= {*names, ""}:
        return indexed(texts), []
    why = f"are not whole numbers from -1 to {len(names) - 1}, and so have no label_names"
    return indexed(texts), [f"{where} {why}"]


# --------------------------------------------------------------------------- parquet


def _of_parquet(path: Path) -> _Vectors:
    table = read_table(path)
    with parquet_file(path) as opened_file:
        lists = {
            field.name: field.type for field in opened_file.schema_arrow if _is_list(field.type)
        }
    if len(lists) != 1:
        raise DataError(
            f"{path} has {len(lists)} columns of lists of numbers, and one is taken; it has: "
            f"{listed([*table.names, *table.homeless])}; keep the one with the embeddings"
        )
    ((name, kind),) = lists.items()
    lengths: Counter[int] = Counter()
    for part in _lists(path, name):
        lengths.update(part.value_lengths().drop_null().to_pylist())
    lengths.pop(0, None)
    if not lengths:
        raise DataError(f"the column {name} of {path} is empty in every row; give others")
    d = lengths.most_common(1)[0][0]
    own = np.dtype(kind.value_type.to_pandas_dtype())
    _require_rows((table.n, d), own, f"the column {name} of {path}")

    notes: list[str] = []
    by_label, aloud = _labelling(path, list(filter(is_label_name, table.names)))
    labels = None if by_label is None else table.labels(by_label)
    if labels is not None:
        notes.append(f"{path}: labels by column {by_label}, {len(labels[1])} classes")
    named = [one for one in table.names if plain_name(one) in _ID_KEYS]
    no_ids = {one: why for one in named if (why := not_ids(table.texts(one)))}
    by_id = next((one for one in named if one not in no_ids), None)
    if by_id is not None:
        notes.append(f"{path}: ids by column {by_id}")
    taken = (by_label, by_id)
    metadata, cut = table.kept(one for one in table.names if one not in taken)
    if metadata:
        notes.append(f"columns kept: {listed(metadata)}")
    notes += [*cut, *table.told(taken=name)]
    if _stored(own) != own:
        notes.append(f"{path}: numbers of {own} are kept as float32")
    return _Vectors(
        name=path.stem,
        title=str(path),
        layer=name,
        n=table.n,
        d=d,
        dtype=_stored(own),
        blocks=lambda: (_block(part, d) for part in _lists(path, name)),
        ids=None if by_id is None else table.texts(by_id),
        labels=labels,
        metadata=metadata,
        notes=tuple(notes),
        warnings=(
            *aloud,
            *_without_ids(path, no_ids if by_id is None else {}),
            *minus_one_told(labels[1] if labels else (), str(path)),
        ),
    )


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(
        is_list and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type))
    )


def _lists(path: Path, name: str) -> Iterator[Any]:
    """The column some rows at a time, as Arrow's lists."""
    import pyarrow as pa

    with parquet_file(path) as opened_file:
        require_bounded(path, opened_file, [name])
        for batch in opened_file.iter_batches(batch_size=4096, columns=[name], use_threads=False):
            part = batch.column(name)
            if pa.types.is_fixed_size_list(part.type):
                part = part.cast(pa.list_(part.type.value_type))
            yield part


def _block(part: Any, d: int) -> tuple[Array, dict[int, str]]:
    """Rows ``(b, d)`` of b lists, NaN for those of another length, and why."""
    lengths = part.value_lengths().to_pylist()
    flat = part.flatten().to_numpy(zero_copy_only=False)
    if all(length == d for length in lengths):
        return flat.reshape(len(part), d), {}
    rows = np.full((len(part), d), np.nan, np.result_type(flat.dtype, np.float32))
    missing: dict[int, str] = {}
    at = 0
    for i, length in enumerate(lengths):
        if length == d:
            rows[i] = flat[at : at + d]
        else:
            many = f"it has {length} numbers, and the other rows have {d}"
            missing[i] = "it has no numbers" if length is None else many
        at += length or 0
    return rows, missing
