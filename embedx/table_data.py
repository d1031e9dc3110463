"""Pictures that a table lists, with all its columns."""

import os
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedx.columns import Column, shortened, storable, unique_names
from embedx.data import FileReader, Source, file_hashes, limited, name_of
from embedx.errors import ConfigError, DataError, listed, short
from embedx.table_files import Table, label_column, plain_name, read_table, require_column

# Names of columns, in lower case and without what separates words in them.
PATH_NAMES = frozenset(
    f"{first}{second}"
    for first in ("", "file", "image", "img", "picture", "photo")
    for second in ("", "path", "file", "filename", "name")
) - {"", "name"}
_ELSEWHERE = "its path leads out of the folder that paths count from; name one that holds it: root"


def table(
    path: str,
    *,
    column: str | None = None,
    label: str | None = None,
    id: str | None = None,
    root: str | None = None,
    delimiter: str | None = None,
    limit: int | None = None,
) -> Source:
    """The pictures that a table lists, a row each, in its order.

    A row whose file is missing, is no picture, or lies outside ``root`` fails alone. All columns
    but those of the label and the id are kept as metadata: as whole numbers, numbers, booleans or
    texts, the narrowest that says the same.

    Args:
        path: The table: ``.csv`` or ``.tsv``, in UTF-8 with the names of the columns in its first
            line, or ``.parquet``.
        column: The column of the pictures' paths; where not given the one that is called path,
            file, filename, image, image_path or so.
        label: The column of labels, ``none`` for no labels; where not given the one that is called
            label, class or target, if there is one. An empty cell is no label.
        id: The column of ids, each once; the paths where not given, ``PATH#2`` for the second row
            of a path.
        root: The folder that paths count from, and below which all files lie; that of the table
            where not given.
        delimiter: What separates the cells of a text file: ``,`` for ``.csv`` and a tab for
            ``.tsv`` where not given.
        limit: Take the first so many rows.

    Raises:
        ConfigError: There is no such column, or several could be meant.
        DataError: The table cannot be read, an id comes twice, or no row has a file that is there.
        DependencyError: It is a parquet file, and pyarrow is not installed.
    """
    where = Path(path).expanduser()
    limited(0, limit)
    read = read_table(where, limit=limit, delimiter=delimiter)
    by = _path_column(read, column)
    label_by = label_column(read, label, taken=(by, id))
    top = where.parent if root is None else Path(root).expanduser()
    if not top.is_dir():
        raise DataError(f"data.root {root} is no folder; name the one that the paths count from")
    located = _located(read.texts(by), top)
    if len(located.refused) + located.n_missing == read.n:
        raise _none_there(located, read, by, top)
    ids, notes = _ids(read, located.names, id)
    labels = np.full(read.n, -1, np.int32)
    label_names: list[str] = []
    if label_by is not None:
        labels, label_names = read.labels(label_by)
    kept = [name for name in read.names if name not in (label_by, by if id is None else id)]
    metadata: dict[str, Any] = {}
    n_cut: Counter[str] = Counter()
    for name in kept:
        values: Column = read.column(name)
        if isinstance(values, list):
            values, n_cut[name] = shortened(values)
        metadata[name] = values
    fingerprint, hashes = file_hashes(located.files)
    said = f"{path}: {read.n:,} rows, pictures by column {by}"
    if label_by is None:
        said += ", no labels"
    else:
        said += f", labels by column {label_by}: {len(label_names)} classes"
        if unlabelled := int((labels < 0).sum()):
            said += f", {unlabelled:,} unlabelled"
    said += ", the first of more" if read.is_cut else ""
    notes = [said, *notes]
    if kept:
        notes.append(f"columns kept: {listed(kept)}")
    passed_over = [*read.notes, *(f"{name} ({kind})" for name, kind in read.homeless.items())]
    if passed_over:
        notes.append(f"passed over: {listed(passed_over)}")
    notes += [f"{n:,} texts of {name} are cut to 1,024 bytes" for name, n in n_cut.items() if n]
    return Source(
        name=name_of(where.with_suffix("")),
        ids=ids,
        read=FileReader(str(top), tuple(located.paths), hashes, located.refused),
        fingerprint=fingerprint,
        item_hashes=hashes,
        labels=labels if label_names else None,
        label_names=label_names,
        metadata=metadata,
        notes=tuple(notes),
        warnings=tuple(_told(located)),
        root=top,
        reads_files=True,
    )


# --------------------------------------------------------------------------- columns


_PICTURES = ", and paths are texts; where it holds pictures themselves: data=huggingface"


def _path_column(read: Table, column: str | None) -> str:
    if column is not None:
        return require_column(read, column, "column", instead=_PICTURES)
    found = [name for name in read.names if plain_name(name) in PATH_NAMES]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{read.path} has the columns {listed(found)}; say which has the paths of the "
            f"pictures: data.column={found[0]}"
        )
    for name, kind in read.homeless.items():
        if plain_name(name) in PATH_NAMES:
            raise ConfigError(f"the column {name} of {read.path} is {kind}{_PICTURES}")
    raise ConfigError(
        f"{read.path} has no column called path, file or image; its columns are "
        f"{listed([short(repr(name)) for name in read.names])}: name the one of the paths, "
        "data.column=NAME (or add a first line with names, if that is data)"
    )


def _ids(read: Table, paths: Sequence[str], column: str | None) -> tuple[list[str], list[str]]:
    """Unique ids, and what is to be said of them."""
    if column is not None:
        return read.ids(require_column(read, column, "id")), []
    ids, n_again = unique_names([storable(path) or "(no path)" for path in paths])
    said = f"{n_again:,} rows have a path that came before: their ids are PATH#2, PATH#3, ..."
    return ids, [said] if n_again else []


# --------------------------------------------------------------------------- files


class _Located:
    """Where the files of a table are.

    Attributes:
        names: The paths for ids: below the root, or as they stand where they lead out of it.
        paths: The paths to open, ``""`` of rows that are refused.
        files: ``(path, bytes, mtime_ns)`` of each; -1 for those of a file that is not there.
        refused: Why a row is not read, by its number.
        n_missing: How many are not there.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.paths: list[str] = []
        self.files: list[tuple[str, int, int]] = []
        self.refused: dict[int, str] = {}
        self.n_missing = 0


def _located(paths: Sequence[str], top: Path) -> _Located:
    found = _Located()
    base = os.path.abspath(top)
    real = os.path.realpath(top)
    folders: dict[str, bool] = {}

    def is_inside(resolved: str) -> bool:
        return resolved == real or resolved.startswith(real.rstrip(os.sep) + os.sep)

    def look(written: str) -> tuple[str, int, int, str]:
        """Its path below the root, bytes, mtime_ns, and why it is refused."""
        if not written or "\0" in written:
            return written, -1, -1, "its path " + ("has NUL in it" if written else "is missing")
        joined = os.path.normpath(os.path.join(base, written))
        relative = os.path.relpath(joined, base)
        if relative == os.pardir or relative.startswith(os.pardir + os.sep):
            return written, -1, -1, _ELSEWHERE
        name = relative.replace(os.sep, "/")
        folder = os.path.dirname(joined)
        if folder not in folders:
            folders[folder] = is_inside(os.path.realpath(folder))
        try:
            about = os.lstat(joined)
            is_in = folders[folder]
            if stat.S_ISLNK(about.st_mode):
                is_in = is_inside(os.path.realpath(joined))
                about = os.stat(joined) if is_in else about
        except OSError:
            if "\\" in written and os.sep == "/":
                return name, -1, -1, "its file is not there, and its path has \\ where / is meant"
            found.n_missing += 1
            return name, -1, -1, ""
        if not is_in:
            return name, -1, -1, _ELSEWHERE
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
            return name, -1, -1, "its path is that of no plain file"
        return name, about.st_size, about.st_mtime_ns, ""

    for row, written in enumerate(paths):
        name, size_bytes, mtime_ns, why = look(written)
        if why:
            found.refused[row] = why
        found.names.append(name)
        found.paths.append("" if why else name)
        found.files.append((name, size_bytes, mtime_ns))
    return found


def _none_there(found: _Located, read: Table, by: str, top: Path) -> DataError:
    first = short(repr(read.texts(by)[0]))
    why = found.refused.get(0, f"there is no such file below {top.resolve()}")
    return DataError(
        f"none of the {read.n:,} pictures of {read.path} can be read (the first, {first}: {why}); "
        f"name the folder that the paths in column {by} count from: data.root=FOLDER"
    )


def _told(found: _Located) -> list[str]:
    """What rows will fail, as far as it is known before they are read."""
    whys: Counter[str] = Counter(found.refused.values())
    told = [f"{n:,} rows will fail: {why}" for why, n in sorted(whys.items())]
    if found.n_missing:
        told.append(f"{found.n_missing:,} rows will fail: their files are not there")
    return told
