"""Data sets as HuggingFace's ``datasets`` and its Hub keep them: Arrow and Parquet files.

pyarrow alone reads them. The package ``datasets`` would copy Parquet into a cache in the home
folder first, follow whatever file names a data set holds, and take seconds to import.
"""

import contextlib
import dataclasses
import json
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from embedx.columns import Column, from_arrow, shortened
from embedx.data import (
    FileReader,
    RowNumbers,
    Source,
    counted_through,
    decode_bytes,
    file_hashes,
    limited,
    name_of,
)
from embedx.errors import ConfigError, DataError, first_line, listed, missing_extra, nearest
from embedx.matrix import Array

# More bytes than the largest picture that is read has, uncompressed.
ITEM_BYTES_MOST = 2**29
COLUMNS_MOST = 4096
# Fewer bits a row hold no samples: a file of 1 KB can declare 10^9 rows.
_ROWS_A_BYTE_MOST = 8
_JSON_BYTES_MOST = 2**24
_WINDOW_BYTES = 2**24
_WINDOW_ROWS_MOST = 1024
_CUT_BYTES = 4 * 1025  # of a text that is shortened all the same
_TEXT_NAMES = ("text", "sentence", "content", "document", "review", "question", "caption")
_LABEL_NAMES = ("label", "labels", "class", "target")
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}


def huggingface(
    path: str,
    *,
    split: str | None = None,
    column: str | None = None,
    label: str | None = None,
    id: str | None = None,
    limit: int | None = None,
) -> Source:
    """A data set of HuggingFace on this machine: what ``save_to_disk`` wrote, or Parquet files.

    The items are pictures (a column of the feature ``Image``, or of encoded bytes) or texts. All
    other columns that hold one number, truth value, time or text a row become metadata; of texts
    the first 1,024 bytes.

    Args:
        path: A folder that ``save_to_disk`` wrote, a folder with Parquet files, as a checkout of
            the Hub is, or one file, ``.parquet`` or ``.arrow``.
        split: Which part, such as ``test``; needed where there are several.
        column: The column of the items; the one of pictures, or else of texts, where not given.
        label: The column of labels; the only ``ClassLabel``, or else a column called ``label``,
            where not given; ``none`` for no labels.
        id: A column of unique texts or whole numbers; row numbers where not given.
        limit: Take the first so many rows.

    Raises:
        ConfigError: A split or column is not there, or has to be chosen.
        DataError: ``path`` is missing, or holds no such data set, or a damaged one; ids come twice;
            a label has no name.
        DependencyError: pyarrow is not installed.

    References:
        Lhoest et al. 2021, Datasets: A Community Library for NLP, EMNLP (demos).
    """
    try:
        import pyarrow
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise missing_extra("pyarrow", extra="data", needed_for="data=huggingface") from None
    found = _find(path, split)
    opened = [_open(found.top / name, shown=name) for name in found.names]
    first = opened[0]
    for name, other in zip(found.names, opened, strict=True):
        if not other.schema.equals(first.schema, check_metadata=False):
            raise DataError(
                f"{name} has other columns than {found.names[0]} ({_difference(first, other)}); "
                "give one of them as data.path"
            )
    n_all = sum(one.n_rows for one in opened)
    if n_all == 0:
        raise DataError(f"data.path {path} holds no row; give a data set with some")
    n = limited(n_all, limit)
    features = _features(first.schema)
    item = _item_column(first.schema, features, column)
    table = _Rows(opened, n)
    label_column = _label_column(first.schema, features, label, {item.name, id})
    labels, label_names = _labels(table, label_column, features)
    ids = _ids(table, first.schema, id)
    metadata, passed_over, cut = _metadata(table, features, item, {label_column, id})
    used = table.files
    beside, stated = _beside(table.paths(item), found.top) if item.kind == "picture" else (None, [])
    fingerprint, of_files = file_hashes(
        [
            *((f"{item.name} of {one.shown}", one.size_bytes, one.mtime_ns) for one in used),
            *stated,
        ]
    )
    item_hashes = _item_hashes(of_files[: len(used)], [one.n_rows for one in used], n)
    if beside is not None:
        item_hashes[list(beside.rows)] ^= beside.read.hashes
    what = "pictures" if item.kind == "picture" else "texts"
    note = (
        f"{found.shown}: {n:,} {what} of the column {item.name}, {len(label_names) or 'no'} classes"
    )
    note += f" of {label_column}" if label_names else ""
    note += f", the first of {n_all:,}" if n < n_all else ""
    notes = [note + ("; ids are row numbers" if id is None else f"; ids are those of {id}")]
    for said, some in (("passed over", [*found.passed_over, *passed_over]), ("cut", cut)):
        notes += [f"{said}: {listed(some)}"] if some else []
    return Source(
        name=found.name,
        ids=ids,
        read=_Reader(
            str(found.top),
            tuple((one.shown, one.n_rows, one.size_bytes, one.mtime_ns) for one in used),
            item,
            beside,
        ),
        fingerprint=fingerprint,
        item_hashes=item_hashes,
        labels=labels,
        label_names=label_names,
        metadata=metadata,
        notes=tuple(notes),
        root=found.top,
        reads_files=True,
    )


# --------------------------------------------------------------------------- which files


@dataclasses.dataclass(frozen=True)
class _Found:
    top: Path
    names: Sequence[str]
    name: str
    shown: str
    passed_over: Sequence[str] = ()


def _find(path: str, split: str | None) -> _Found:
    """The files of a data set, relative to its folder, in their order."""
    if not path:
        raise DataError("data.path is empty; name a folder of save_to_disk, or Parquet files")
    top = Path(path).expanduser()
    if not top.exists():
        raise DataError(
            f"data.path {path} is not there; give a folder that datasets' save_to_disk wrote, or "
            "Parquet files (nothing is downloaded)"
        )
    if not top.is_dir():
        if top.suffix.lower() not in (".parquet", ".arrow"):
            raise DataError(
                f"data.path {path} is no .parquet or .arrow file; give one, or a folder of "
                "save_to_disk"
            )
        if split is not None:
            raise ConfigError(f"data.split={split} has no use for one file, {path}; leave it out")
        return _Found(top.parent, [top.name], name_of(top), path)
    name = name_of(top) or "data"
    if (top / "dataset_dict.json").is_file():
        splits = _plain_names(_read_json(top / "dataset_dict.json").get("splits"), top)
        chosen = _chosen(splits, split, path)
        return dataclasses.replace(
            _saved(top / chosen, f"{path}, {chosen}"), name=f"{name}-{chosen}"
        )
    if (top / "state.json").is_file():
        if split is not None:
            raise ConfigError(
                f"data.split={split} has no use for {path}, which is one part; leave it out"
            )
        return dataclasses.replace(_saved(top, path), name=name)
    return _loose(top, path, split, name)


def _chosen(splits: Sequence[str], split: str | None, path: str) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split in splits:
        return str(split)
    if split is None:
        raise ConfigError(
            f"data.path {path} has the splits {', '.join(splits)}; choose one: "
            f"data.split={splits[0] if splits else 'NAME'}"
        )
    raise ConfigError(
        f"data.path {path} has no split {split!r}; choose one of: {', '.join(splits) or 'none'}"
    )


def _saved(folder: Path, shown: str) -> _Found:
    """What ``save_to_disk`` of one data set wrote."""
    state = _read_json(folder / "state.json")
    if any(value for key, value in state.items() if key.startswith("_indices")):
        raise DataError(
            f"{shown} keeps its rows in another order (indices), as old versions of datasets did; "
            "load it and save it again by save_to_disk"
        )
    files = state.get("_data_files")
    named = [one.get("filename") if isinstance(one, dict) else None for one in files or ()]
    return _Found(folder, _plain_names(named, folder), folder.name, shown)


def _plain_names(names: Any, folder: Path) -> list[str]:
    """Names that a data set says, each of something right in its folder.

    Raises:
        DataError: There is none, or one leads elsewhere.
    """
    if not isinstance(names, list) or not names:
        raise DataError(f"{folder} names no files or splits; save it again by save_to_disk")
    for name in names:
        is_plain = isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name
        if not is_plain or "/" in name or "\\" in name:
            raise DataError(
                f"{folder} names {name!r}, which is not right in that folder; save it again by "
                "save_to_disk"
            )
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _JSON_BYTES_MOST:
            raise DataError(f"{path} is larger than such a file can be; save the data set again")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; save the data set again") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON ({first_line(error)}); save the data set again"
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no keys and values; save the data set again")
    return found


def _loose(top: Path, path: str, split: str | None, name: str) -> _Found:
    """Parquet (or else Arrow) files below a folder, as a checkout of the Hub has them."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; check its rights")

    by_suffix: dict[str, list[str]] = {".parquet": [], ".arrow": []}
    others: Counter[str] = Counter()
    for base, folders, files in os.walk(top, onerror=unreadable):
        for folder in list(folders):
            if folder.startswith(".") or os.path.islink(os.path.join(base, folder)):
                folders.remove(folder)
        for file in files:
            suffix = os.path.splitext(file)[1].lower()
            if not file.startswith(".") and suffix in by_suffix:
                full = os.path.join(base, file)
                by_suffix[suffix].append(os.path.relpath(full, top).replace(os.sep, "/"))
            else:
                others[suffix or "files without suffix"] += 1
    suffix = ".parquet" if by_suffix[".parquet"] else ".arrow"
    found = sorted(by_suffix[suffix])
    if not found:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in others.most_common(4)) or "it is empty"
        raise DataError(
            f"data.path {path} holds no Parquet file and nothing of save_to_disk ({kinds}); for a "
            "folder of pictures use data=folder"
        )
    if suffix == ".parquet" and by_suffix[".arrow"]:
        others[".arrow"] += len(by_suffix[".arrow"])
    passed_over = [f"{n:,} {kind}" for kind, n in sorted(others.items())]
    of_split: dict[str, list[str]] = {}
    for file in found:
        of_split.setdefault(_split_of(file), []).append(file)
    unnamed = of_split.pop("", [])
    if not of_split:
        if split is not None:
            raise ConfigError(
                f"data.split={split}: the files below {path} name no split; leave it out"
            )
        return _Found(top, unnamed, name, path, passed_over)
    chosen = _chosen(sorted(of_split), split, path)
    if unnamed:
        passed_over.append(f"{len(unnamed):,} {suffix} of no split")
    names = of_split[chosen]
    return _Found(top, names, f"{name}-{chosen}", f"{path}, {chosen}", passed_over)


def _split_of(file: str) -> str:
    """The split that the path of a file names, by the Hub's rules, "" for none."""
    *folders, name = file.split("/")
    if match := re.match(r"(\w[\w.]*?)-\d{5}-of-\d{5}\b", name):
        return _SPLITS.get(match[1], match[1])
    for part in (name, *reversed(folders)):
        words = re.split(r"[^a-zA-Z]+", part.lower())
        if known := [_SPLITS[word] for word in words if word in _SPLITS]:
            return known[0]
    return ""


# --------------------------------------------------------------------------- a file


@contextlib.contextmanager
def _said(shown: str) -> Iterator[None]:
    """What pyarrow cannot read, in one line."""
    import pyarrow as pa

    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(
            f"{shown} cannot be read ({first_line(error)[:160]}); it is damaged or of another kind"
        ) from None


def _open(path: Path, *, shown: str) -> "_ArrowFile | _ParquetFile":
    with _said(shown):
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
            raise DataError(f"{shown} is no plain file; give one")
        is_parquet = path.suffix.lower() == ".parquet"
        kind: type[_ArrowFile | _ParquetFile] = _ParquetFile if is_parquet else _ArrowFile
        opened = kind(str(path), shown, about.st_size, about.st_mtime_ns)
        names = opened.schema.names
    if opened.n_rows > _ROWS_A_BYTE_MOST * about.st_size:
        raise DataError(
            f"{shown} declares {opened.n_rows:,} rows and has {about.st_size:,} bytes, which do "
            "not hold so many; it is damaged, or made to harm"
        )
    if len(opened.schema) > COLUMNS_MOST:
        raise DataError(
            f"{shown} has {len(opened.schema):,} columns, more than {COLUMNS_MOST:,}; write those "
            "that are wanted into a file of their own"
        )
    if len(set(names)) < len(names):
        twice, count = Counter(names).most_common(1)[0]
        raise DataError(f"{shown} has {count} columns called {twice!r}; rename them")
    return opened


class _ArrowFile:
    """Record batches mapped from a file: reading a cell takes its pages, and no others."""

    def __init__(self, path: str, shown: str, size_bytes: int, mtime_ns: int) -> None:
        import pyarrow as pa

        self.shown, self.size_bytes, self.mtime_ns = shown, size_bytes, mtime_ns
        before = pa.total_allocated_bytes()
        mapped = pa.memory_map(path)
        batches = []
        try:
            reader = pa.ipc.open_stream(mapped)
        except pa.ArrowInvalid:
            mapped.seek(0)
            whole = pa.ipc.open_file(mapped)
            reader = (whole.get_batch(i) for i in range(whole.num_record_batches))
            self.schema = whole.schema
        else:
            self.schema = reader.schema
        for batch in reader:
            batches.append(batch)
            # Mapped buffers take no memory; compressed ones become as large as they like.
            if pa.total_allocated_bytes() - before > ITEM_BYTES_MOST:
                raise DataError(f"{shown} is compressed inside; write it as Parquet")
        self._table = pa.Table.from_batches(batches, self.schema)
        self.n_rows = self._table.num_rows
        self._cells: dict[str, Any] = {}

    def column(self, name: str, n: int) -> Iterator[Any]:
        """The first n values in pieces, none of which points outside of the file's buffers."""
        for piece in self._table.column(name).slice(0, n).chunks:
            safe = _as_bytes(piece)
            safe.validate(full=True)
            yield safe

    def may_lack(self, item: "_Item") -> bool:
        del item
        return True  # it costs nothing to look

    def prepare(self, item: "_Item") -> None:
        """Check the items, once a process: a damaged offset would read anywhere."""
        import pyarrow as pa

        chunks = [_item_bytes(piece) for piece in self.column(item.name, self.n_rows)]
        kind = chunks[0].type if chunks else pa.binary()
        self._cells[item.name] = pa.chunked_array(chunks, type=kind)

    def cell(self, item: "_Item", row: int) -> bytes | None:
        if item.name not in self._cells:
            self.prepare(item)
        return _bytes_of(self._cells[item.name][row])


class _ParquetFile:
    """Row groups, of which some rows are decoded at a time: the next ones are those after them."""

    def __init__(self, path: str, shown: str, size_bytes: int, mtime_ns: int) -> None:
        import pyarrow.parquet as pq

        self.shown, self.size_bytes, self.mtime_ns = shown, size_bytes, mtime_ns
        self._path = path
        self._file = pq.ParquetFile(path, memory_map=True)
        about = self._file.metadata
        self.schema = self._file.schema_arrow
        groups = [about.row_group(g) for g in range(about.num_row_groups)]
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self.n_rows = int(self._starts[-1])
        if any(group.num_rows < 0 for group in groups) or self.n_rows != about.num_rows:
            raise DataError(f"{shown} contradicts itself in its number of rows; it is damaged")
        for group in groups:
            for j in range(group.num_columns):
                chunk = group.column(j)
                held = chunk.total_compressed_size
                if held < 0 or held > size_bytes:
                    raise DataError(f"{shown} declares more bytes than it has; it is damaged")
                if chunk.total_uncompressed_size > max(2**28, 100 * held):
                    raise DataError(
                        f"{shown}: {held:,} bytes of {chunk.path_in_schema} become "
                        f"{chunk.total_uncompressed_size:,}; it is made to harm, or write it with "
                        "smaller row groups"
                    )
        self._pieces: Iterator[Any] = iter(())
        self._next = self._end = 0
        self._windows: list[tuple[int, Any]] = []
        self._bad: dict[int, tuple[int, str]] = {}

    def column(self, name: str, n: int) -> Iterator[Any]:
        """The first n values in pieces; each text once that is there more than once."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        kind = self.schema.field(name).type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        file = pq.ParquetFile(self._path, memory_map=True, read_dictionary=[name] * is_text)
        start = 0
        for group in range(len(self._starts) - 1):
            if start >= n:
                return
            for batch in file.iter_batches(
                self._window_rows(group, name),
                row_groups=[group],
                columns=[name],
                use_threads=False,
            ):
                yield _as_bytes(batch.column(0).slice(0, max(0, n - start)))
                start += batch.num_rows

    def prepare(self, item: "_Item") -> None:
        del item  # pyarrow makes each window, and makes it whole

    def cell(self, item: "_Item", row: int) -> bytes | None:
        for start, window in self._windows:
            if start <= row < start + len(window):
                return _bytes_of(window[row - start])
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        bad_from, reason = self._bad.get(group, (self.n_rows, ""))
        if row >= bad_from:
            raise DataError(reason)
        if not self._next <= row < self._end:
            self._restart(group, item)
        while True:
            start = self._next
            try:
                window = _item_bytes(_as_bytes(next(self._pieces).column(0)))
            except Exception as error:
                reason = f"row group {group} of {self.shown} is damaged ({first_line(error)[:120]})"
                self._bad[group] = (start, reason)
                self._next = self._end = 0
                raise DataError(reason) from None
            self._next += len(window)
            if row < self._next:
                # Threads that read side by side cross from one window to the next.
                self._windows = [*self._windows[-1:], (start, window)]
                return _bytes_of(window[row - start])

    def _window_rows(self, group: int, name: str) -> int:
        """How many rows are decoded at a time, so that they take some megabytes."""
        about = self._file.metadata.row_group(group)
        held = sum(
            about.column(j).total_uncompressed_size
            for j in range(about.num_columns)
            if about.column(j).path_in_schema.partition(".")[0] == name
        )
        mean = max(1, held // max(1, about.num_rows))
        return int(min(_WINDOW_ROWS_MOST, max(1, _WINDOW_BYTES // mean)))

    def _restart(self, group: int, item: "_Item") -> None:
        self._next, self._end = int(self._starts[group]), int(self._starts[group + 1])
        self._pieces = self._file.iter_batches(
            self._window_rows(group, item.name),
            row_groups=[group],
            columns=[item.name],
            use_threads=False,
        )

    def may_lack(self, item: "_Item") -> bool:
        """Whether some item may be without bytes; most writers count those that are."""
        about = self._file.metadata
        for group in map(about.row_group, range(about.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                if chunk.path_in_schema == f"{item.name}.bytes":
                    counted = chunk.statistics
                    if counted is None or not counted.has_null_count or counted.null_count:
                        return True
        return False


def _as_bytes(piece: Any) -> Any:
    """An array with its texts as the bytes that they are: one that is no text spoils no other."""
    import pyarrow as pa

    if pa.types.is_string(piece.type):
        return piece.view(pa.binary())
    if pa.types.is_large_string(piece.type):
        return piece.view(pa.large_binary())
    if pa.types.is_dictionary(piece.type):
        values = _as_bytes(piece.dictionary)
        if values.type != piece.dictionary.type:
            return pa.DictionaryArray.from_arrays(piece.indices, values, safe=True)
    return piece


def _item_bytes(piece: Any) -> Any:
    """Of pictures with their names, the pictures."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.struct_field(piece, "bytes") if pa.types.is_struct(piece.type) else piece


def _bytes_of(scalar: Any) -> bytes | None:
    if not scalar.is_valid:
        return None
    held = scalar.as_buffer()
    if held.size > ITEM_BYTES_MOST:
        raise DataError(f"it has {held.size:,} bytes, more than {ITEM_BYTES_MOST:,}; shrink it")
    return bytes(held)


def _difference(first: Any, other: Any) -> str:
    here = {field.name: str(field.type) for field in first.schema}
    there = {field.name: str(field.type) for field in other.schema}
    name = next((k for k in [*here, *there] if here.get(k) != there.get(k)), None)
    if name is None:
        return "another order"
    return f"{name} is {here.get(name, 'not there')} here and {there.get(name, 'not there')} there"


# --------------------------------------------------------------------------- which columns


@dataclasses.dataclass(frozen=True)
class _Item:
    name: str
    kind: Literal["picture", "text"]


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """What ``datasets`` noted of the columns: names of classes, and which are pictures."""
    noted = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(noted)["info"]["features"]
        return {name: one for name, one in features.items() if isinstance(one, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _class_names(feature: Mapping[str, Any] | None) -> list[str] | None:
    if feature is None or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names")
    is_usable = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_usable else None


def _kind(field: Any) -> str:
    """``picture`` for encoded bytes, ``text``, or "" for what is no item."""
    import pyarrow as pa

    def is_bytes(kind: Any) -> bool:
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    if pa.types.is_struct(field.type):
        index = field.type.get_field_index("bytes")
        return "picture" if index >= 0 and is_bytes(field.type.field(index).type) else ""
    if is_bytes(field.type):
        return "picture"
    is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    return "text" if is_text else ""


def _item_column(
    schema: Any, features: Mapping[str, Mapping[str, Any]], column: str | None
) -> _Item:
    kinds = {field.name: _kind(field) for field in schema}
    # Sounds are kept as pictures are.
    odd = {name: str(one.get("_type")) for name, one in features.items() if name in kinds}
    kinds.update({name: "" for name, kind in odd.items() if kind in ("Audio", "Video", "Pdf")})
    if column is not None:
        if column not in kinds:
            raise _no_column("column", column, schema)
        if not kinds[column]:
            kind = odd.get(column, "")
            shown = kind if kind in ("Audio", "Video", "Pdf") else schema.field(column).type
            raise ConfigError(
                f"data.column={column} holds {str(shown)[:60]}, neither pictures nor texts; choose "
                f"one of: {listed([name for name, kind in kinds.items() if kind]) or 'none here'}"
            )
        return _Item(column, "picture" if kinds[column] == "picture" else "text")
    pictures = [name for name, kind in kinds.items() if kind == "picture"]
    texts = [name for name, kind in kinds.items() if kind == "text"]
    if len(pictures) == 1:
        return _Item(pictures[0], "picture")
    if pictures:
        raise ConfigError(
            f"the columns {listed(pictures)} all hold pictures; choose one: "
            f"data.column={pictures[0]}"
        )
    named = [name for name in _TEXT_NAMES if name in texts]
    if len(texts) == 1 or named:
        return _Item((named or texts)[0], "text")
    if texts:
        raise ConfigError(
            f"the columns {listed(texts)} all hold texts; choose one: data.column={texts[0]}"
        )
    raise DataError(
        f"no column holds pictures or texts; there are {listed(schema.names) or 'none at all'}"
    )


def _no_column(key: str, name: str, schema: Any) -> ConfigError:
    return ConfigError(
        f"data.{key}={name}: there is no such column; the nearest are "
        f"{', '.join(nearest(name, schema.names))}"
    )


def _label_column(
    schema: Any,
    features: Mapping[str, Mapping[str, Any]],
    label: str | None,
    taken: set[str | None],
) -> str | None:
    if label == "none":
        return None
    if label is not None:
        if label not in schema.names:
            raise _no_column("label", label, schema)
        return label
    named = [
        name for name in schema.names if name not in taken and _class_names(features.get(name))
    ]
    if len(named) > 1:
        raise ConfigError(
            f"the columns {listed(named)} all hold classes; choose one: data.label={named[0]}, or "
            "data.label=none"
        )
    likely = [
        name
        for name in _LABEL_NAMES
        if name in schema.names and name not in taken and _is_label(schema.field(name).type)
    ]
    return next(iter(named or likely), None)


def _is_label(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    )


# --------------------------------------------------------------------------- columns


class _Rows:
    """The first n rows of several files, column by column."""

    def __init__(self, files: "Sequence[_ArrowFile | _ParquetFile]", n: int) -> None:
        self.n = n
        self.files: list[_ArrowFile | _ParquetFile] = []
        left = n
        for file in files:
            if left > 0 and file.n_rows:
                self.files.append(file)
                left -= file.n_rows

    def _pieces(self, name: str) -> Iterator[Any]:
        left = self.n
        for file in self.files:
            with _said(f"{file.shown}, column {name}"):
                for piece in file.column(name, min(left, file.n_rows)):
                    left -= len(piece)
                    yield piece
        if left:
            raise DataError(f"the column {name} has {left:,} values too few; the file is damaged")

    def paths(self, item: "_Item") -> dict[int, str]:
        """The paths of pictures that are not in the files, by their rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found: dict[int, str] = {}
        start = 0
        for file in self.files:
            kind = file.schema.field(item.name).type
            has_paths = pa.types.is_struct(kind) and kind.get_field_index("path") >= 0
            if not has_paths or not _is_text(kind.field("path").type) or not file.may_lack(item):
                start += file.n_rows
                continue
            with _said(f"{file.shown}, column {item.name}"):
                row = start
                for piece in file.column(item.name, min(self.n - start, file.n_rows)):
                    lacking = pc.is_null(pc.struct_field(piece, "bytes"))
                    for i in np.flatnonzero(lacking.to_numpy(zero_copy_only=False)).tolist():
                        if path := pc.struct_field(piece, "path")[i].as_py():
                            found[row + i] = path
                    row += len(piece)
            start += file.n_rows
        return found

    def texts(self, name: str) -> list[str]:
        """The texts of a column, missing ones empty, long ones cut past what is ever kept."""
        texts: list[str] = []
        for piece in self._pieces(name):
            texts += _texts(piece)
        return texts

    def plain(self, name: str, *, as_column: Callable[[Any], Any]) -> Any:
        """A column of anything but texts."""
        import pyarrow as pa

        pieces = list(self._pieces(name))
        with _said(f"the column {name}"):
            return as_column(pa.chunked_array(pieces))


def _texts(piece: Any) -> list[str]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(piece.type):
        values = _texts(piece.dictionary)
        return ["" if i is None else values[i] for i in piece.indices.to_pylist()]
    cut = pc.binary_slice(piece, 0, _CUT_BYTES).to_pylist()
    return ["" if raw is None else raw.decode("utf-8", "backslashreplace") for raw in cut]


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _values(rows: _Rows, schema: Any, name: str, key: str) -> list[Any]:
    """The whole numbers, truth values or texts of a column, None or "" where one is missing."""
    kind = schema.field(name).type
    if not _is_label(kind):
        raise ConfigError(
            f"data.{key}={name} holds {str(kind)[:60]}; choose a column of texts or whole numbers"
        )
    if _is_text(kind):
        return rows.texts(name)
    return list(rows.plain(name, as_column=lambda column: column.to_pylist()))


def _labels(
    rows: _Rows, name: str | None, features: Mapping[str, Mapping[str, Any]]
) -> tuple[Array | None, list[str]]:
    if name is None:
        return None, []
    schema = rows.files[0].schema
    values = _values(rows, schema, name, "label")
    names = _class_names(features.get(name))
    missing = (None, "", -1) if names is not None else (None, "")
    if names is not None and (odd := _outside(values, len(names))) is not None:
        raise DataError(
            f"row {odd} has the label {values[odd]!r} of {name}, and that has {len(names)} names; "
            "mend it, or choose data.label=none"
        )
    present = {row: value for row, value in enumerate(values) if value not in missing}
    if not present:
        return None, []
    labels = np.full(len(values), -1, np.int32)
    if names is not None and len(set(names)) == len(names):
        labels[list(present)] = list(present.values())
        return labels, names
    found, told = counted_through(list(present.values()), names)
    labels[list(present)] = found
    return labels, told


def _outside(values: Sequence[Any], n_names: int) -> int | None:
    for row, value in enumerate(values):
        is_index = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_index and -1 <= value < n_names):
            return row
    return None


def _ids(rows: _Rows, schema: Any, name: str | None) -> Sequence[str]:
    if name is None:
        return RowNumbers(rows.n)
    if name not in schema.names:
        raise _no_column("id", name, schema)
    ids = ["" if value is None else str(value) for value in _values(rows, schema, name, "id")]
    if "" in ids:
        raise DataError(f"row {ids.index('')} has no id in {name}; leave data.id out: row numbers")
    if len(set(ids)) < len(ids):
        twice, count = Counter(ids).most_common(1)[0]
        raise DataError(
            f"the id {twice[:80]!r} of {name} is there {count} times; leave data.id out: row "
            "numbers"
        )
    return ids


def _metadata(
    rows: _Rows,
    features: Mapping[str, Mapping[str, Any]],
    item: _Item,
    taken: set[str | None],
) -> tuple[dict[str, Array | Sequence[str]], list[str], list[str]]:
    """Columns beside items, labels and ids; what has no place in one; which texts were cut."""
    schema = rows.files[0].schema
    columns: dict[str, Array | Sequence[str]] = {}
    passed_over, cut = [], []
    for field in schema:
        name, key = field.name, field.name
        if name in taken or (name == item.name and item.kind == "picture"):
            continue
        if name == item.name:
            key = "text" if "text" not in schema.names else name
        if not name or "\0" in name:
            passed_over.append(f"the column {name!r}, whose name no file keeps")
            continue
        column: Column | None
        if _is_text(field.type):
            column, n_cut = shortened(rows.texts(name))
            if n_cut:
                cut.append(f"{n_cut:,} texts of {key} to 1,024 bytes")
        elif names := _class_names(features.get(name)):
            indices = _values(rows, schema, name, "column")
            column = [
                names[i] if isinstance(i, int) and 0 <= i < len(names) else "" for i in indices
            ]
        else:
            column = None if _has_parts(field.type) else rows.plain(name, as_column=from_arrow)
        if column is None:
            passed_over.append(f"the column {name} ({str(field.type)[:40]})")
        else:
            columns[key] = column
    return columns, passed_over, cut


def _has_parts(kind: Any) -> bool:
    """Whether it is of no use to read it: it has no place in a column, and may be large."""
    import pyarrow as pa

    return bool(
        pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    )


# --------------------------------------------------------------------------- items


def _item_hashes(of_files: Array, n_rows: Sequence[int], n: int) -> Array:
    """Shape ``(n,)`` uint64: of a file that was changed, all rows are others."""
    step = np.uint64(0x9E3779B97F4A7C15)  # odd, so that rows of a file never meet
    parts = [
        seed + step * np.arange(rows, dtype=np.uint64)
        for seed, rows in zip(of_files, n_rows, strict=True)
    ]
    return np.concatenate(parts)[:n]


@dataclasses.dataclass(frozen=True)
class _Beside:
    """Pictures that are files beside the data set: rows, and what reads the j-th of them."""

    rows: Mapping[int, int]
    read: FileReader


def _beside(
    paths: Mapping[int, str], top: Path
) -> tuple[_Beside | None, list[tuple[str, int, int]]]:
    """What reads pictures of which only paths are kept; none leads out of the folder."""
    if not paths:
        return None, []
    real = os.path.realpath(top)
    refused: dict[int, str] = {}
    stated = []
    for j, path in enumerate(paths.values()):
        full = os.path.realpath(os.path.join(real, path.replace("\0", "?")))
        relative = os.path.relpath(full, real).replace(os.sep, "/")
        size_bytes = mtime_ns = -1
        if relative.startswith("../"):
            refused[j] = f"its path {path[:80]!r} leaves the folder of the data set"
        else:
            with contextlib.suppress(OSError):  # its own row fails
                about = os.stat(full)
                size_bytes, mtime_ns = about.st_size, about.st_mtime_ns
                if not stat.S_ISREG(about.st_mode):
                    refused[j] = f"its path {path[:80]!r} is no plain file"
        stated.append((relative, size_bytes, mtime_ns))
    _, hashes = file_hashes(stated)
    names = tuple(name for name, _, _ in stated)
    rows = {row: j for j, row in enumerate(paths)}
    return _Beside(rows, FileReader(real, names, hashes, refused)), stated


class _Reader:
    """Item i, from files that are opened when the first one of a process is read."""

    def __init__(
        self,
        top: str,
        files: tuple[tuple[str, int, int, int], ...],
        item: _Item,
        beside: _Beside | None,
    ) -> None:
        self._top, self._files, self._item, self._beside = top, files, item, beside
        self._starts = np.cumsum([0, *(n_rows for _, n_rows, _, _ in files)])
        self._forget()

    def _forget(self) -> None:
        self._opened: dict[int, _ArrowFile | _ParquetFile] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __call__(self, i: int) -> Image.Image | str:
        number = int(np.searchsorted(self._starts, i, side="right")) - 1
        self._require_unchanged(number)
        with self._lock:
            raw = self._file(number).cell(self._item, i - int(self._starts[number]))
        self._require_unchanged(number)
        if raw is None and self._beside is not None and i in self._beside.rows:
            return self._beside.read(self._beside.rows[i])
        if raw is None:
            raise DataError(f"it has no {self._item.kind} in the column {self._item.name}")
        return decode_bytes(raw) if self._item.kind == "picture" else raw.decode()

    def _file(self, number: int) -> "_ArrowFile | _ParquetFile":
        if number not in self._opened:
            name, n_rows, _, _ = self._files[number]
            opened = _open(Path(self._top, *name.split("/")), shown=name)
            if opened.n_rows != n_rows:
                raise DataError("it was changed after the run had listed it")
            with _said(name):
                opened.prepare(self._item)
            if len(self._opened) >= _OPEN_MOST:
                del self._opened[next(iter(self._opened))]
            self._opened[number] = opened
        return self._opened[number]

    def _require_unchanged(self, number: int) -> None:
        """A file cut short under its map would end the process: it is looked at before, too."""
        name, _, size_bytes, mtime_ns = self._files[number]
        about = os.stat(os.path.join(self._top, *name.split("/")))
        if (about.st_size, about.st_mtime_ns) != (size_bytes, mtime_ns):
            raise DataError("it was changed after the run had listed it")


_OPEN_MOST = 8
