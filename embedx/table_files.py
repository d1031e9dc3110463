"""Tables in files: CSV, TSV and parquet as typed columns."""

import csv
import dataclasses
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from embedx.columns import Column, from_arrow, from_texts
from embedx.errors import ConfigError, DataError, first_line, missing_extra

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*DELIMITERS, ".parquet")
_CELL_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Table:
    """A table out of a file.

    Attributes:
        names: Of its columns, in order.
        columns: By name, n values each; None for what a column of a file of rows cannot hold.
        n: Rows that were read.
        notes: What was passed over, for the user.
    """

    names: list[str]
    columns: dict[str, Column | None]
    n: int
    notes: tuple[str, ...] = ()

    def require(self, name: str, *, key: str, path: Path) -> Column:
        """A column by its name.

        Raises:
            ConfigError: There is none of that name.
            DataError: It holds lists, structures or bytes.
        """
        if name not in self.columns:
            raise ConfigError(
                f"{path} has no column {name!r}; choose {key}= from {', '.join(self.names)}"
            )
        column = self.columns[name]
        if column is None:
            raise DataError(
                f"the column {name!r} of {path} holds no texts or numbers; choose another"
            )
        return column


def read_table(path: Path, *, limit: int | None, texts: Collection[str] = ()) -> Table:
    """Read a table.

    Args:
        path: A ``.csv`` or ``.tsv`` file of UTF-8 whose first line names the columns, or a
            ``.parquet`` file.
        limit: Read the first so many rows; None for all.
        texts: Columns that are texts whatever they look like, such as 007; a missing one is "".

    Raises:
        DataError: It is not there, is of another kind or damaged, has a row of another length, or
            two columns of one name.
        DependencyError: pyarrow is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is no table that is read; give one of {', '.join(SUFFIXES)}")
    try:
        if suffix == ".parquet":
            return _parquet(path, limit=limit, texts=texts)
        return _delimited(path, DELIMITERS[suffix], limit=limit, texts=texts)
    except OSError as error:
        why = error.strerror or first_line(error)
        raise DataError(f"{path} cannot be read: {why}; check path and rights") from None


def _check_names(names: list[str], path: Path) -> None:
    odd = next((name for name in names if not name or names.count(name) > 1), None)
    if not names or odd is not None:
        what = (
            "no columns"
            if not names
            else f"two columns {odd!r}"
            if odd
            else "a column without name"
        )
        raise DataError(
            f"{path} has {what}; name each column in its first line, each by another name"
        )


def _delimited(path: Path, delimiter: str, *, limit: int | None, texts: Collection[str]) -> Table:
    before = csv.field_size_limit(_CELL_MOST)
    try:
        # Undecodable bytes come through as halves of pairs, and are found cell by cell.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            lines = csv.reader(file, delimiter=delimiter, strict=True)
            names = next(lines, [])
            _check_names(names, path)
            rows = list(itertools.islice(_rows(lines, len(names), path), limit))
    except csv.Error as error:
        raise DataError(
            f"{path} is no {path.suffix[1:].upper()}: {first_line(error)} (line {lines.line_num}); "
            "quote cells that hold quotes, delimiters or line ends"
        ) from None
    finally:
        csv.field_size_limit(before)
    cells = zip(*rows, strict=True) if rows else [()] * len(names)
    columns: dict[str, Column | None] = {
        name: list(column) if name in texts else from_texts(column)
        for name, column in zip(names, cells, strict=True)
    }
    return Table(names, columns, len(rows))


def _rows(lines: Any, width: int, path: Path) -> Iterator[list[str]]:
    for row in lines:
        if not row:  # a blank line is no row
            continue
        if len(row) != width:
            raise DataError(
                f"line {lines.line_num} of {path} has {len(row)} cells, and the first line names "
                f"{width} columns; give one cell each"
            )
        yield row


def _parquet(path: Path, *, limit: int | None, texts: Collection[str]) -> Table:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", extra="data", needed_for=f"the table {path}") from None

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_names(names, path)
            parts = []
            left = file.metadata.num_rows if limit is None else limit
            for part in file.iter_batches():
                if left <= 0:
                    break
                parts.append(part.slice(0, left))
                left -= len(parts[-1])
            table = pa.Table.from_batches(parts, schema=file.schema_arrow)
    except (pa.ArrowException, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} is no parquet file that is read: {first_line(error)[:160]}; write it anew"
        ) from None
    columns: dict[str, Column | None] = {}
    for name in names:
        column = table.column(name)
        if name in texts and not (
            pa.types.is_nested(column.type) or pa.types.is_binary(column.type)
        ):
            with_texts = from_arrow(column)
            if with_texts is not None and not isinstance(with_texts, list):
                with_texts = ["" if v is None else str(v) for v in column.to_pylist()]
            columns[name] = with_texts
        else:
            columns[name] = from_arrow(column)
    odd = [name for name, values in columns.items() if values is None and name not in texts]
    note = f"{path}: left out the columns {', '.join(odd)}, which hold no texts or numbers"
    return Table(names, columns, len(table), (note,) if odd else ())
