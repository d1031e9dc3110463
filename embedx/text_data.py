"""Texts as samples: lines of a file, a column of a table, or a list."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedx import data, sources
from embedx.columns import TEXT_BYTES_MOST, kept, minus_one_told, whole_numbers
from embedx.errors import ConfigError, DataError
from embedx.pictures import SUFFIXES
from embedx.sources import Array, Source
from embedx.table_files import SEPARATORS, Quoting, label_column, read_table, require_column

_LINES = ".txt"
_TABLES = (*SEPARATORS, ".parquet")


def text(
    path: str,
    *,
    column: str | None = None,
    label: str | None = None,
    id: str | None = None,
    delimiter: str | None = None,
    quoting: Quoting | None = None,
    limit: int | None = None,
) -> Source:
    """Texts of a file: each line of a ``.txt`` file, or a column of a table.

    Blank lines are passed over and counted; the id of a line is its number in the file. A row of a
    table is a sample also where its text is missing or blank: it fails by itself.

    Args:
        path: A ``.txt``, ``.csv``, ``.tsv`` or ``.parquet`` file, of UTF-8.
        column: The column that holds the texts.
        label: The column of labels; where it is empty there is none. The one that is called
            ``label``, ``labels``, ``class``, ``target`` or ``targets`` where not given; ``none``
            for none.
        id: The column of unique ids; None for row numbers.
        delimiter: What separates the cells of a ``.csv`` or ``.tsv``: ``,`` and a tab where not
            given.
        quoting: ``none`` where quotation marks in a ``.csv`` or ``.tsv`` are part of its texts,
            ``rfc4180`` where they put tabs and line ends into a cell; refused where it matters in
            a ``.tsv`` and is not given.
        limit: Take the first so many.

    Raises:
        ConfigError: A column is not there, or is named for lines.
        DataError: The file is missing, of another kind or damaged, holds no text, or two rows have
            one id.
        DependencyError: A ``.parquet`` file, and pyarrow is not installed.
    """
    if not path:
        raise DataError("data.path is empty; name a file of texts")
    file = Path(path).expanduser()
    kinds = ", ".join((_LINES, *_TABLES))
    if not file.is_file():
        what = "is not a file" if file.exists() else "is not there"
        raise DataError(f"data.path {path} {what}; name one of {kinds}")
    if file.suffix.lower() == _LINES:
        for key, value in (
            ("column", column),
            ("label", label),
            ("id", id),
            ("delimiter", delimiter),
            ("quoting", quoting),
        ):
            if value is not None:
                raise ConfigError(
                    f"data.{key}={value} is for a table, and {path} has lines; leave it out, or "
                    "give one"
                )
        return _lines(file, limit=limit)
    if file.suffix.lower() not in _TABLES:
        raise DataError(f"data.path {path} is of no kind that is read; name one of {kinds}")
    return _table(
        file,
        column=column,
        label=label,
        id=id,
        delimiter=delimiter,
        quoting=quoting,
        limit=limit,
    )


# --------------------------------------------------------------------------- lines


@dataclasses.dataclass(frozen=True)
class _LineReader:
    path: str
    starts: Array
    ends: Array
    hashes: Array

    def __call__(self, i: int) -> str:
        with open(self.path, "rb") as file:
            file.seek(self.starts[i])
            line = file.read(int(self.ends[i] - self.starts[i]))
            after = file.read(1)
        is_whole = after in (b"", b"\r", b"\n")
        sources.require_unchanged(is_whole and sources.item_hash(line) == self.hashes[i])
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise DataError("the line is not UTF-8; convert the file") from None


def _lines(file: Path, *, limit: int | None) -> Source:
    sources.limited(1, limit)
    name = sources.name_of(file)
    ids: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    hashes: list[int] = []
    texts: list[str] = []
    digest = hashlib.sha256()
    n_blank, at, more = 0, 0, False
    try:
        with file.open("rb") as opened:
            for number, raw in enumerate(opened, 1):
                begins = at
                at += len(raw)
                if number == 1:
                    _require_utf8(raw, file)
                    begins = len(_MARK) if raw.startswith(_MARK) else 0
                line = raw[begins + len(raw) - at :].rstrip(b"\r\n")
                if not line.strip():
                    n_blank += 1
                    continue
                if limit is not None and len(ids) == limit:
                    more = True
                    break
                ids.append(f"line-{number:06d}")
                starts.append(begins)
                ends.append(begins + len(line))
                hashes.append(sources.item_hash(line))
                digest.update(len(line).to_bytes(8, "little") + line)
                texts.append(line[: TEXT_BYTES_MOST + 4].decode(errors="backslashreplace"))
    except OSError as error:
        raise DataError(f"data.path {file} cannot be read: {error.strerror}") from None
    if not ids:
        what = "only blank lines" if n_blank else "empty"
        raise DataError(f"data.path {file} is {what}; give at least one line of text")
    column, notes = kept(texts, "text", is_item=True)
    note = f"{file}: {len(ids):,} lines"
    note += ", the first of more" if more else ""
    if n_blank:
        notes.insert(0, f"passed over: {n_blank:,} blank lines")
    each = np.array(hashes, np.uint64)
    return Source(
        name=name,
        ids=ids,
        read=_LineReader(str(file), np.array(starts), np.array(ends), each),
        fingerprint=digest.hexdigest(),
        item_hashes=each,
        metadata={"text": column},
        notes=(note, *notes),
    )


_MARK = b"\xef\xbb\xbf"  # Windows begins UTF-8 with it


def _require_utf8(head: bytes, file: Path) -> None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"data.path {file} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {file.name}"
        )


# --------------------------------------------------------------------------- tables and lists


@dataclasses.dataclass(frozen=True)
class _TextReader:
    texts: Sequence[str]

    def __call__(self, i: int) -> str:
        try:
            self.texts[i].encode()
        except UnicodeEncodeError:
            raise DataError("the text is not UTF-8; convert the file") from None
        return sources.require_text(self.texts[i])


def _hashes(texts: Sequence[Any]) -> tuple[str, Array]:
    digest = hashlib.sha256()
    each = np.empty(len(texts), np.uint64)
    for i, one in enumerate(texts):
        form = one.encode("utf-8", "surrogatepass") if isinstance(one, str) else repr(one).encode()
        each[i] = sources.item_hash(form)
        digest.update(len(form).to_bytes(8, "little") + form)
    return digest.hexdigest(), each


def _table(
    file: Path,
    *,
    column: str | None,
    label: str | None,
    id: str | None,
    delimiter: str | None,
    quoting: Quoting | None,
    limit: int | None,
) -> Source:
    sources.limited(1, limit)
    table = read_table(file, limit=limit, delimiter=delimiter, quoting=quoting)
    if column is None:
        raise ConfigError(
            f"{file} is a table; say which column holds the texts: data.column= one of "
            + ", ".join(table.names)
        )
    require_column(table, column, "column")
    if id is not None:
        require_column(table, id, "id")
    label = label_column(table, label, taken=(column, id))
    chosen = [one for one in (column, label, id) if one is not None]
    if len(set(chosen)) < len(chosen):
        raise ConfigError(
            f"data.column={column}, data.label={label} and data.id={id} must be different columns"
        )
    texts = table.texts(column)
    ids = [f"row-{i + 1:06d}" for i in range(table.n)] if id is None else table.ids(id)
    labels, names = table.labels(label)
    column_kept, notes = kept(texts, "text", is_item=True)
    others, cut = table.kept(name for name in table.names if name not in chosen)
    other = "text_"
    while other in others:
        other += "_"
    if "text" in others:
        notes.append(f"the column text is kept as {other}, beside the texts of {column}")
    renamed = {other if name == "text" else name: values for name, values in others.items()}
    fingerprint, hashes = _hashes(texts)
    note = f"{file}: {table.n:,} texts of {column}, {sources.classes_said(names)}"
    note += f" of {label}" if label is not None else ""
    note += ", the first of more" if table.is_cut else ""
    n_empty = sum(not one.strip() for one in texts)
    if n_empty:
        notes.insert(0, f"{n_empty:,} of {table.n:,} texts are empty; their rows fail")
    notes += [*cut, *table.told()]
    return Source(
        name=sources.name_of(file),
        ids=ids,
        read=_TextReader(texts),
        fingerprint=fingerprint,
        item_hashes=hashes,
        labels=labels if names else None,
        label_names=names,
        label_numbers=whole_numbers(names),
        warnings=minus_one_told(names, str(file)),
        metadata={"text": column_kept, **renamed},
        notes=(note, *notes),
    )


@dataclasses.dataclass(frozen=True)
class _ListReader:
    texts: Sequence[Any]

    def __call__(self, i: int) -> Any:
        return self.texts[i]


def are_texts(items: Any) -> bool:
    """Whether data are a list, a tuple or an array of texts, some of which may be missing."""
    if isinstance(items, np.ndarray):
        items = items.tolist() if items.dtype.kind in "OUT" and items.ndim == 1 else None
    return (
        isinstance(items, (list, tuple))
        and any(isinstance(one, str) for one in items)
        and all(isinstance(one, str) or is_missing(one) for one in items)
    )


def is_missing(item: Any) -> bool:
    """Whether it is what tables have for no text: None, or a NaN."""
    return item is None or (isinstance(item, float) and math.isnan(item))


def in_memory(items: Sequence[Any], *, labels: Any = None, ids: Any = None) -> Source:
    """A list of texts as a source.

    Args:
        items: n texts; a missing one, None or NaN, fails by itself. The empty text is a text.
        labels: n labels of any kind that sorts; the empty text is none.
        ids: n unique texts; row numbers where they are not given.

    Raises:
        DataError: Lengths that differ, labels that do not sort, or an id given twice.
    """
    texts = list(items.tolist() if isinstance(items, np.ndarray) else items)
    base = data.in_memory(texts, labels=labels, ids=ids)
    fingerprint, hashes = _hashes(texts)
    own = [one if isinstance(one, str) else "" for one in texts]
    column, notes = kept(own, "text", is_item=True)
    aloud = base.warnings
    some = own[:: max(1, len(own) // 16)]
    if all(os.path.splitext(one)[1].lower() in SUFFIXES and os.path.isfile(one) for one in some):
        aloud += (
            f"the texts are paths of pictures that are there, such as {some[0]}, and are taken as "
            "texts; for the pictures give their folder, a table of them or a Dataset",
        )
    n_classes = len(base.label_names) or "no"
    return dataclasses.replace(
        base,
        name="texts",
        read=_ListReader(texts),
        fingerprint=fingerprint,
        item_hashes=hashes,
        metadata={"text": column},
        warnings=aloud,
        notes=(f"texts: {len(texts):,} texts, {n_classes} classes", *notes),
    )
