"""Pictures that a table lists, with all its columns."""

from collections.abc import Sequence
from pathlib import Path

from embedx.columns import minus_one_told, plain_name, storable, unique_names, whole_numbers
from embedx.errors import ConfigError, DataError, listed, short
from embedx.sources import (
    FileReader,
    Located,
    Source,
    classes_said,
    file_hashes,
    limited,
    located,
    name_of,
)
from embedx.table_files import Quoting, Table, label_column, read_table, require_column

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
    quoting: Quoting | None = None,
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
            label, labels, class, target or targets, if there is one. An empty cell is no label.
        id: The column of ids, each once; the paths where not given, ``PATH#2`` for the second row
            of a path.
        root: The folder that paths count from, and below which all files lie; that of the table
            where not given.
        delimiter: What separates the cells of a text file: ``,`` for ``.csv`` and a tab for
            ``.tsv`` where not given.
        quoting: ``none`` where quotation marks in a text file are part of its texts, ``rfc4180``
            where they put tabs and line ends into a cell; refused where it matters and is not
            given.
        limit: Take the first so many rows.

    Raises:
        ConfigError: There is no such column, or several could be meant.
        DataError: The table cannot be read, an id comes twice, or no row has a file that is there.
        DependencyError: It is a parquet file, and pyarrow is not installed.
    """
    where = Path(path).expanduser()
    limited(0, limit)
    read = read_table(where, limit=limit, delimiter=delimiter, quoting=quoting)
    by = _path_column(read, column)
    label_by = label_column(read, label, taken=(by, id))
    top = where.parent if root is None else Path(root).expanduser()
    if not top.is_dir():
        raise DataError(f"data.root {root} is no folder; name the one that the paths count from")
    found = located(read.texts(by), top, elsewhere=_ELSEWHERE)
    if len(found.refused) + found.n_missing == read.n:
        raise _none_there(found, read, by, top)
    ids, notes = _ids(read, found.names, id)
    labels, label_names = read.labels(label_by)
    taken = (label_by, by if id is None else id)
    metadata, cut = read.kept(name for name in read.names if name not in taken)
    fingerprint, hashes = file_hashes(found.files)
    said = f"{path}: {read.n:,} rows, pictures by column {by}"
    if label_by is None:
        said += ", no labels"
    else:
        said += f", labels by column {label_by}: {classes_said(label_names)}"
        if unlabelled := int((labels < 0).sum()):
            said += f", {unlabelled:,} unlabelled"
    said += ", the first of more" if read.is_cut else ""
    notes = [said, *notes]
    if metadata:
        notes.append(f"columns kept: {listed(metadata)}")
    notes += [*read.told(), *cut]
    return Source(
        name=name_of(where),
        ids=ids,
        read=FileReader(str(top), tuple(found.paths), hashes, found.refused),
        fingerprint=fingerprint,
        item_hashes=hashes,
        labels=labels if label_names else None,
        label_names=label_names,
        label_numbers=whole_numbers(label_names),
        metadata=metadata,
        notes=tuple(notes),
        warnings=(*found.told(), *minus_one_told(label_names, path)),
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


def _none_there(found: Located, read: Table, by: str, top: Path) -> DataError:
    first = short(repr(read.texts(by)[0]))
    why = found.refused.get(0, f"there is no such file below {top.resolve()}")
    return DataError(
        f"none of the {read.n:,} pictures of {read.path} can be read (the first, {first}: {why}); "
        f"name the folder that the paths in column {by} count from: data.root=FOLDER"
    )
