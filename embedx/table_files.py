"""Tables of others, CSV, TSV and parquet: read strictly and in bounded memory."""

import contextlib
import csv
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from embedx.arrow_files import reading, unpacked_bytes
from embedx.columns import (
    COLUMNS_MOST,
    Column,
    from_arrow,
    from_texts,
    has_place,
    indexed,
    is_label_name,
    is_text,
    kept,
    one_number,
    require_fit,
    require_ids,
    require_labels,
)
from embedx.errors import (
    ConfigError,
    DataError,
    first_line,
    listed,
    missing_extra,
    nearest,
    number_of,
    short,
)
from embedx.matrix import Array

SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
ROWS_MOST = 10_000_000
BYTES_MOST = 4 * 2**30
_LINE_BYTES = 2**24
_BATCH_ROWS = 65_536
_OTHER_SEPARATORS = ";\t|,"


@dataclasses.dataclass(frozen=True)
class Table:
    """The columns of a table, typed when they are asked for.

    Attributes:
        path: The file.
        names: Names of its columns that have a place, in their order.
        n: Number of rows.
        is_cut: Whether the file has more rows than were asked for.
        homeless: What the columns are that have no place, such as lists, by their names.
        notes: What was passed over, for the user.
        remarks: How it was read, where it could be meant otherwise.
    """

    path: Path
    names: tuple[str, ...]
    n: int
    is_cut: bool
    homeless: dict[str, str]
    notes: tuple[str, ...]
    _cells: dict[str, Any] = dataclasses.field(repr=False)
    remarks: tuple[str, ...] = ()

    def column(self, name: str) -> Column:
        """A column ``(n,)`` of numbers, booleans or texts: the narrowest that says the same."""
        cells = self._cells[name]
        if isinstance(cells, list):
            return from_texts(cells)
        column = self._converted(name, cells)
        assert column is not None  # those without a place were not read
        return column

    def _converted(self, name: str, cells: Any) -> Column | None:
        try:
            return from_arrow(cells)
        except (ValueError, KeyError) as error:  # of Arrow too
            raise DataError(
                f"the column {short(repr(name))} of {self.path} cannot be read "
                f"({short(first_line(error))}); write it anew, or without that column"
            ) from None

    def texts(self, name: str) -> list[str]:
        """The cells of a column as they are written, ``""`` for one that is missing."""
        cells = self._cells[name]
        if isinstance(cells, list):
            return cells
        column = self._converted(name, cells)
        if isinstance(column, list):
            return column
        texts = cells.cast("string").to_pylist()
        return ["" if text in (None, "nan") else text for text in texts]

    def labels(self, name: str | None) -> tuple[Array, list[str]]:
        """A column as labels: indices ``(n,)`` into their names, -1 for none, and the names.

        Args:
            name: Of the column; None for no labels.

        Raises:
            DataError: One is longer than a file keeps, or has NUL in it.
        """
        if name is None:
            return indexed([""] * self.n)
        texts = self.texts(name)
        require_labels(texts, f"column {name} of {self.path}")
        return indexed(texts)

    def ids(self, name: str) -> list[str]:
        """A column as ids.

        Raises:
            DataError: One is empty, comes twice, is longer than a file keeps, or has NUL in it.
        """
        texts = self.texts(name)
        require_ids(texts, f"column {name} of {self.path}")
        return texts

    def kept(self, names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
        """Columns as a file keeps them, and what is to be said of texts that are cut for that."""
        columns: dict[str, Any] = {}
        notes: list[str] = []
        for name in names:
            columns[name], said = kept(self.column(name), name)
            notes += said
            cells = self._cells[name]
            is_text = isinstance(cells, list) and isinstance(columns[name], list)
            if is_text and (same := one_number(cells)):
                notes.append(f"{name} is kept as texts: {same[0]} and {same[1]} are one number")
        return columns, notes

    def told(self, *, taken: str = "") -> list[str]:
        """How it was read, and what is passed over but for the column ``taken``, for the user."""
        others = [f"{name} ({kind})" for name, kind in self.homeless.items() if name != taken]
        said = [*self.notes, *others]
        return [*self.remarks, *([f"passed over: {listed(said)}"] if said else [])]


def require_column(
    read: Table, name: str, key: str, *, instead: str = "; name one of numbers or texts"
) -> str:
    """A column that a user named.

    Args:
        read: The table.
        name: Of the column.
        key: Of the setting that names it, for the message.
        instead: What to do where it holds lists, structures or bytes.

    Raises:
        ConfigError: There is none of that name, or it has no place in a file of rows.
    """
    if name in read.homeless:
        raise ConfigError(
            f"data.{key}={name}: that column of {read.path} is {read.homeless[name]}{instead}"
        )
    if name not in read.names:
        raise no_column(key, name, read.names, str(read.path))
    return name


def no_column(key: str, name: str, names: Collection[str], where: str) -> ConfigError:
    """The error for a column that is not there.

    Args:
        key: Of the setting that names it.
        name: Of the column.
        names: Of those that are there.
        where: What has them.
    """
    shown = listed([short(one) for one in names]) or "none"
    return ConfigError(
        f"data.{key}={name} is no column of {where}; the nearest are "
        f"{', '.join(map(short, nearest(name, names)))}, and all are {shown}"
    )


def label_column(read: Table, label: str | None, *, taken: Sequence[str | None]) -> str | None:
    """The column of labels: the one named, or the only one that is called so; None for none.

    Raises:
        ConfigError: There is none of that name, or several could be it.
    """
    if label == "none":
        return None
    if label is not None:
        return require_column(read, label, "label")
    found = [name for name in read.names if is_label_name(name) and name not in taken]
    return only_label(found, str(read.path))


def only_label(names: Sequence[str], where: str) -> str | None:
    """The column of labels where it may be only one; None where there is none.

    Args:
        names: Of the columns that could be it.
        where: What has them.

    Raises:
        ConfigError: There are several.
    """
    if len(names) > 1:
        raise ConfigError(
            f"{where} has the columns {listed(names)}; say which has the labels: "
            f"data.label={names[0]}, or none"
        )
    return next(iter(names), None)


Quoting = Literal["rfc4180", "none"]


def read_table(
    path: Path,
    *,
    limit: int | None = None,
    delimiter: str | None = None,
    quoting: Quoting | None = None,
) -> Table:
    """Read a table whole, or its first rows.

    Args:
        path: A ``.csv`` or ``.tsv`` file in UTF-8 whose first line names the columns, or a
            ``.parquet`` file.
        limit: How many rows; all where None.
        delimiter: What separates the cells of a text file; by its suffix where None.
        quoting: Whether quotation marks put line ends and separators into a cell, or stand for
            themselves. As RFC 4180 has it where None; but a cell between tabs that holds either is
            then refused, for tab-separated values know no quotation marks, and two of them that
            belong to two texts would make one of all lines in between.

    Raises:
        DataError: Not there, of another kind, damaged, not rectangular, or too large; the message
            has the line.
        DependencyError: It is a parquet file, and pyarrow is not installed.

    References:
        RFC 4180 for CSV; Python's ``csv`` and Apache Arrow read.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise DataError(f"the table {path} {what}; name a .csv, .tsv or .parquet file")
    suffix = path.suffix.lower()
    if suffix in (".gz", ".bz2", ".xz", ".zst", ".zip"):
        raise DataError(f"the table {path} is compressed; unpack it, and name what comes out")
    if suffix == ".parquet":
        for key, given in (("delimiter", delimiter), ("quoting", quoting)):
            if given is not None:
                raise DataError(f"{path} is a parquet file, which has no {key}; leave it out")
        return _read_parquet(path, limit)
    if suffix not in SEPARATORS:
        raise DataError(f"the table {path} is no .csv, .tsv or .parquet file; name one")
    delimiter = "\t" if delimiter == "\\t" else delimiter  # as a shell hands it on
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '\r\n" '):
        raise DataError(f"delimiter {delimiter!r} is not one character; give one, such as ';'")
    return _read_text(path, limit, delimiter or SEPARATORS[suffix], quoting)


# --------------------------------------------------------------------------- text


def _lines(file: Any, path: Path) -> Iterator[str]:
    """The lines of a file, each of a bounded length and in UTF-8."""
    n_bytes = 0
    for number in itertools.count(1):
        line: bytes = file.readline(_LINE_BYTES + 1)
        if not line:
            return
        n_bytes += len(line)
        if len(line) > _LINE_BYTES or n_bytes > BYTES_MOST:
            too_long = f"more than {_LINE_BYTES / 2**20:.0f} MiB"
            what = f"has {too_long}" if len(line) > _LINE_BYTES else "is past 4 GiB of text"
            raise DataError(f"line {number} of {path} {what}; cut it, or give a parquet file")
        try:
            yield line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode()
        except UnicodeDecodeError as error:
            byte = line[error.start]
            raise DataError(
                f"line {number} of {path} is not UTF-8 (byte 0x{byte:02x}); save it as UTF-8"
            ) from None


def _looked_at(lines: Iterable[str], delimiter: str, marked: list[int]) -> Iterator[str]:
    """Lines as they are, the first with a cell that begins with a mark put down in ``marked``."""
    for number, line in enumerate(lines, 1):
        if not marked and (line.startswith('"') or f'{delimiter}"' in line):
            marked.append(number)
        yield line


def _read_text(path: Path, limit: int | None, delimiter: str, quoting: Quoting | None) -> Table:
    before = csv.field_size_limit(_LINE_BYTES)  # a text may be longer than a cell of a sheet
    try:
        with path.open("rb") as file:
            is_unclear = quoting is None and delimiter == "\t"
            lines, marked = _lines(file, path), list[int]()
            if is_unclear:
                lines = _looked_at(lines, delimiter, marked)
            marks: Any = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
            reader = csv.reader(lines, delimiter=delimiter, quoting=marks, strict=True)
            try:
                table = _table_of(path, reader, limit, delimiter, is_unclear=is_unclear)
            except csv.Error as error:
                why, how = str(error), "mend it, or save the table as parquet"
                # What a mark that belongs to a text leads to, if it does not swallow lines.
                is_of_marks = "expected" in why or "field larger" in why
                if "field larger" in why:
                    why = f"a cell of more than {csv.field_size_limit():,} characters"
                if is_of_marks and quoting is None:
                    how += "; if quotation marks are part of its texts give data.quoting=none"
                raise DataError(
                    f"line {reader.line_num} of {path} is not what a CSV file holds ({why}); {how}"
                ) from None
            if not marked:
                return table
            told = f"quotation marks around cells are taken away, the first in line {marked[0]}"
            told += "; data.quoting=none keeps them"
            return dataclasses.replace(table, remarks=(*table.remarks, told))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its rights") from None
    finally:
        csv.field_size_limit(before)


def _table_of(
    path: Path, reader: Any, limit: int | None, delimiter: str, *, is_unclear: bool
) -> Table:
    line = 0  # that the row before ends with

    def goes_on(row: list[str]) -> int:
        """The line with which a row begins that goes over several, else 0."""
        nonlocal line
        before, line = line, reader.line_num
        is_long = line > before + 1
        if is_unclear and (is_long or any(delimiter in cell for cell in row)):
            where = f"lines {before + 1} to {line}" if is_long else f"line {line}"
            raise DataError(
                f"{where} of {path} hold a cell between quotation marks with a tab or a line end "
                "in it; if the marks are part of the texts give data.quoting=none, and if they are "
                "meant so data.quoting=rfc4180"
            )
        return before + 1 if is_long else 0

    header: list[str] = []
    while not header:
        row = next(reader, None)
        if row is None:
            raise DataError(f"{path} is empty; its first line must name the columns")
        goes_on(row)
        header = row
    if any("\0" in name for name in header):
        raise DataError(f"the first line of {path} has NUL in it, as UTF-16 has; save it as UTF-8")
    if len(header) == 1:
        found = [c for c in _OTHER_SEPARATORS if c in header[0] and c != delimiter]
        if found:
            raise DataError(
                f"the first line of {path} is one cell, {short(header[0])!r}, if {delimiter!r} "
                f"separates them; is it {found[0]!r}? give data.delimiter"
            )
    require_fit(str(path), header)
    rows: list[list[str]] = []
    n_blank = 0
    is_cut = False
    n_long, first_long = 0, 0
    for row in reader:
        if start := goes_on(row):
            n_long, first_long = n_long + 1, first_long or start
        if not row:
            n_blank += 1
        elif len(row) != len(header):
            raise DataError(
                f"line {reader.line_num} of {path} has {len(row)} cells, and its first line names "
                f"{len(header)} columns; mend it (a cell with {delimiter!r} in it needs quotes)"
            )
        elif row == header and len(header) > 1:
            raise DataError(
                f"line {reader.line_num} of {path} is its first line again, as where tables were "
                "put one after the other; take it out"
            )
        elif limit is not None and len(rows) == limit:
            is_cut = True
            break
        else:
            rows.append(row)
            if len(rows) > ROWS_MOST:
                raise _too_many(path)
    if not rows:
        raise DataError(f"{path} has its {len(header)} columns, and no row; add some")
    columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
    notes = [f"{n_blank:,} blank lines"] if n_blank else []
    remarks: tuple[str, ...] = ()
    if n_long:
        rows_words = number_of(n_long, "row that goes", "rows that go")
        remarks = (f"{rows_words} over several lines, the first at line {first_long}",)
    n_nameless = header.count("")
    columns.pop("", None)
    if n_nameless:  # as of the index of a data frame
        notes.append(f"{n_nameless} columns without a name")
    names = tuple(name for name in header if name)
    return Table(path, names, len(rows), is_cut, {}, tuple(notes), columns, remarks)


def _too_many(path: Path) -> DataError:
    return DataError(f"{path} has more than {ROWS_MOST:,} rows; split it into several tables")


# --------------------------------------------------------------------------- parquet


@contextlib.contextmanager
def parquet_file(path: Path, **options: Any) -> Iterator[Any]:
    """A parquet file, opened; what Arrow stumbles over is the file's fault.

    Args:
        path: The file.
        options: Of ``pyarrow.parquet.ParquetFile``.

    Raises:
        DataError: It is damaged, or none.
        DependencyError: pyarrow is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", extra="data", needed_for=f"reading {path}") from None
    with reading(str(path)), parquet.ParquetFile(path, **options) as opened:
        yield opened


def require_bounded(path: Path, opened: Any, columns: Collection[str]) -> None:
    """Refuse a parquet file of more rows, or larger columns, than is sensible.

    A kilobyte can declare a thousand million equal rows.

    Raises:
        DataError: It is one.
    """
    about = opened.metadata
    if about.num_rows > ROWS_MOST:
        raise _too_many(path)
    size_bytes = path.stat().st_size
    if unpacked_bytes(str(path), about, size_bytes=size_bytes, columns=columns) > BYTES_MOST:
        raise DataError(
            f"{path} holds more than 4 GiB in {listed(columns)}; keep fewer columns or rows"
        )


def _read_parquet(path: Path, limit: int | None) -> Table:
    with parquet_file(path) as opened:
        if opened.metadata.num_columns > 2 * COLUMNS_MOST:
            require_fit(str(path), [""] * opened.metadata.num_columns)
        schema = opened.schema_arrow
        require_fit(str(path), schema.names)
        homes = [field for field in schema if field.name and has_place(field.type)]
        texts = [field.name for field in homes if is_text(field.type)]
    homeless = {
        field.name: short(str(field.type), most=40) for field in schema if field not in homes
    }
    names = [field.name for field in homes]
    # As dictionaries: a text that stands in the file once is kept once.
    with parquet_file(path, read_dictionary=texts) as opened:
        require_bounded(path, opened, names)
        cells, n, is_cut = _batches(path, opened, names, limit)
    if not n:
        raise DataError(f"{path} has {len(schema.names)} columns, and no row; add some")
    return Table(path, tuple(names), n, is_cut, homeless, (), cells)


def _batches(
    path: Path, opened: Any, names: list[str], limit: int | None
) -> tuple[dict[str, Any], int, bool]:
    import pyarrow as pa

    n = n_bytes = 0
    parts: dict[str, list[Any]] = {name: [] for name in names}
    if not names:
        return {}, opened.metadata.num_rows, False
    most = min(ROWS_MOST, limit or ROWS_MOST)
    for batch in opened.iter_batches(batch_size=_BATCH_ROWS, columns=names, use_threads=False):
        n += len(batch)
        n_bytes += batch.nbytes
        if n > ROWS_MOST:
            raise _too_many(path)
        if n_bytes > BYTES_MOST:
            raise DataError(f"{path} holds more than 4 GiB in {listed(names)}; keep fewer columns")
        for name in names:
            part = batch.column(name)
            parts[name].append(part[: len(part) - max(0, n - most)])
        if n > most:
            break
    chunked = {name: pa.chunked_array(part) for name, part in parts.items() if part}
    return chunked, min(n, most), n > most or opened.metadata.num_rows > most
