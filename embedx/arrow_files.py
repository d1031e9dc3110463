"""Arrow and Parquet files of others, one or several as one table: read where it is asked for."""

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedx.columns import is_text, require_fit
from embedx.errors import DataError, EmbedxError, first_line, short

# More bytes than the largest picture that is read has, uncompressed.
CELL_BYTES_MOST = 2**29
# Fewer bits a row hold no samples: a file of 1 KB can declare 10^9 rows.
_ROWS_A_BYTE_MOST = 8
_PACKED_BYTES, _PACKED_MOST = 2**26, 200
_WINDOW_BYTES = 2**24
_WINDOW_ROWS_MOST = 1024
_CUT_BYTES = 4 * 1025  # of a text that is shortened all the same


@contextlib.contextmanager
def reading(shown: str) -> Iterator[None]:
    """What Arrow stumbles over is the file's fault, said in one line.

    Args:
        shown: The file, as the user knows it.

    Raises:
        DataError: It is damaged or of another kind.
    """
    import pyarrow as pa

    try:
        yield
    except EmbedxError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        why = short(first_line(error), most=160)
        raise DataError(f"{shown} is damaged or of another kind ({why}); make it anew") from None


def unpacked_bytes(
    shown: str, about: Any, *, size_bytes: int, columns: Collection[str] | None = None
) -> int:
    """How many bytes columns of a Parquet file take, once they are no longer compressed.

    Args:
        shown: The file, as the user knows it.
        about: Its ``FileMetaData``.
        size_bytes: How large it is.
        columns: Names; all where not given.

    Raises:
        DataError: It contradicts itself, or one is packed as no data of a sample are.
    """
    wanted = None if columns is None else set(columns)
    total = 0
    for group in map(about.row_group, range(about.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            path = chunk.path_in_schema
            if wanted is not None and not _heads(path) & wanted:
                continue
            packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
            if not 0 <= packed <= size_bytes or unpacked < 0:
                raise DataError(f"{shown} declares other bytes than it has; it is damaged")
            if unpacked > max(_PACKED_BYTES, _PACKED_MOST * packed):
                raise DataError(
                    f"{shown}: {packed:,} bytes of the column {short(path, most=40)} become "
                    f"{unpacked:,}, as none of a sample do; write it without that column"
                )
            total += unpacked
    return total


def _heads(path: str) -> set[str]:
    """The columns that a path in a schema may lead into: names may have dots in them."""
    parts = path.split(".")
    return {".".join(parts[: i + 1]) for i in range(len(parts))}


class RowFile:
    """A file of rows.

    Attributes:
        shown: What it is called in messages.
        stamp: Its bytes and mtime_ns when it was opened.
        schema: Of Arrow.
        n_rows: How many rows it has.
    """

    schema: Any
    n_rows: int

    def __init__(self, shown: str, stamp: tuple[int, int]) -> None:
        self.shown, self.stamp = shown, stamp

    def column(self, name: str, n: int) -> Iterator[Any]:
        """The first n values of a column in pieces, texts as bytes: an odd one spoils no other."""
        raise NotImplementedError

    def cell(self, name: str, row: int) -> bytes | None:
        """One value of bytes or of text, or the ``bytes`` of a structure; None where missing.

        Raises:
            DataError: It, or the file about it, is damaged.
        """
        raise NotImplementedError

    def may_lack(self, name: str) -> bool:
        """Whether some structure of a column may be without ``bytes``."""
        del name
        return True


def open_rows(path: Path, *, shown: str) -> RowFile:
    """Open an Arrow file or a Parquet file.

    Args:
        path: The file; ``.parquet`` is Parquet, any other Arrow.
        shown: What it is called in messages.

    Raises:
        DataError: It is no plain file, damaged, of another kind, or declares more than it holds.
    """
    with reading(shown):
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
            raise DataError(f"{shown} is no plain file; give one")
        kind = _ParquetFile if path.suffix.lower() == ".parquet" else _ArrowFile
        opened = kind(str(path), shown, (about.st_size, about.st_mtime_ns))
        names = opened.schema.names
    if opened.n_rows > _ROWS_A_BYTE_MOST * about.st_size:
        raise DataError(
            f"{shown} declares {opened.n_rows:,} rows and has {about.st_size:,} bytes, which do "
            "not hold so many; it is damaged, or made to harm"
        )
    require_fit(shown, names)
    return opened


class _ArrowFile(RowFile):
    """Record batches mapped from a file: reading a cell takes its pages, and no others."""

    def __init__(self, path: str, shown: str, stamp: tuple[int, int]) -> None:
        import pyarrow as pa

        super().__init__(shown, stamp)
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
            if pa.total_allocated_bytes() - before > CELL_BYTES_MOST:
                raise DataError(f"{shown} is compressed inside; write it as Parquet")
        self._table = pa.Table.from_batches(batches, self.schema)
        self.n_rows = self._table.num_rows
        self._cells: dict[str, Any] = {}

    def column(self, name: str, n: int) -> Iterator[Any]:
        for piece in self._table.column(name).slice(0, n).chunks:
            safe = _as_bytes(piece)
            safe.validate(full=True)  # a damaged offset would read anywhere
            yield safe

    def cell(self, name: str, row: int) -> bytes | None:
        import pyarrow as pa

        if name not in self._cells:
            with reading(self.shown):
                chunks = list(map(_held, self.column(name, self.n_rows)))
                kind = chunks[0].type if chunks else pa.binary()
                self._cells[name] = pa.chunked_array(chunks, type=kind)
        return _bytes_of(self._cells[name][row])


class _ParquetFile(RowFile):
    """Row groups, of which some rows are decoded at a time: the next ones are those after them."""

    def __init__(self, path: str, shown: str, stamp: tuple[int, int]) -> None:
        import pyarrow.parquet as pq

        super().__init__(shown, stamp)
        self._path = path
        self._file = pq.ParquetFile(path, memory_map=True)
        about = self._file.metadata
        self.schema = self._file.schema_arrow
        n_rows = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
        self._starts = np.cumsum([0, *n_rows])
        self.n_rows = int(self._starts[-1])
        if min(n_rows, default=0) < 0 or self.n_rows != about.num_rows:
            raise DataError(f"{shown} contradicts itself in its number of rows; it is damaged")
        unpacked_bytes(shown, about, size_bytes=stamp[0])
        self._pieces: Iterator[Any] = iter(())
        self._next = self._end = 0
        self._windows: list[tuple[int, Any]] = []
        self._bad: dict[int, tuple[int, str]] = {}

    def column(self, name: str, n: int) -> Iterator[Any]:
        import pyarrow.parquet as pq

        # As dictionaries: a text that stands in the file once is kept once.
        texts = [name] * is_text(self.schema.field(name).type)
        file = pq.ParquetFile(self._path, memory_map=True, read_dictionary=texts)
        start = 0
        for group in range(len(self._starts) - 1):
            if start >= n:
                return
            for batch in self._batches(file, group, name):
                yield _as_bytes(_named(batch, name).slice(0, max(0, n - start)))
                start += batch.num_rows

    def cell(self, name: str, row: int) -> bytes | None:
        for start, window in self._windows:
            if start <= row < start + len(window):
                return _bytes_of(window[row - start])
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        bad_from, reason = self._bad.get(group, (self.n_rows, ""))
        if row >= bad_from:
            raise DataError(reason)
        if not self._next <= row < self._end:
            self._next, self._end = map(int, self._starts[group : group + 2])
            self._pieces = self._batches(self._file, group, name)
        while True:
            start = self._next
            try:
                window = _held(_as_bytes(_named(next(self._pieces), name)))
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

    def _batches(self, file: Any, group: int, name: str) -> Iterator[Any]:
        """A column of a row group, so many rows at a time that they take some megabytes."""
        about = self._file.metadata.row_group(group)
        unpacked = sum(
            chunk.total_uncompressed_size
            for chunk in map(about.column, range(about.num_columns))
            if name in _heads(chunk.path_in_schema)
        )
        mean = max(1, unpacked // max(1, about.num_rows))
        n_rows = int(min(_WINDOW_ROWS_MOST, max(1, _WINDOW_BYTES // mean)))
        batches: Iterator[Any] = file.iter_batches(
            n_rows, row_groups=[group], columns=[name], use_threads=False
        )
        return batches

    def may_lack(self, name: str) -> bool:
        about = self._file.metadata
        for group in map(about.row_group, range(about.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                if chunk.path_in_schema == f"{name}.bytes":
                    counted = chunk.statistics  # most writers count those that are missing
                    if counted is None or not counted.has_null_count or counted.null_count:
                        return True
        return False


def _named(batch: Any, name: str) -> Any:
    """A column by its whole name: ``a.b`` is also what Parquet calls b of a structure a."""
    return batch.column(batch.schema.get_field_index(name))


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


def _held(piece: Any) -> Any:
    """Of pictures with their paths, the pictures."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.struct_field(piece, "bytes") if pa.types.is_struct(piece.type) else piece


def _bytes_of(scalar: Any) -> bytes | None:
    import pyarrow as pa

    if isinstance(scalar, pa.DictionaryScalar) and scalar.is_valid:
        scalar = scalar.value
    if not scalar.is_valid:
        return None
    held = scalar.as_buffer()
    if held.size > CELL_BYTES_MOST:
        raise DataError(f"it has {held.size:,} bytes, more than {CELL_BYTES_MOST:,}; shrink it")
    return bytes(held)


# --------------------------------------------------------------------------- several files


class Rows:
    """The first n rows of several files of the same columns, column by column.

    Attributes:
        n: How many rows count.
        files: Those that some of these rows are in.
        schema: Of Arrow.
    """

    def __init__(self, files: Sequence[RowFile], n: int) -> None:
        self.n = n
        self.schema = files[0].schema
        self.files: list[RowFile] = []
        left = n
        for file in files:
            if left > 0 and file.n_rows:
                self.files.append(file)
                left -= file.n_rows

    def _pieces(self, name: str) -> Iterator[Any]:
        left = self.n
        for file in self.files:
            with reading(f"{file.shown}, column {name},"):
                for piece in file.column(name, min(left, file.n_rows)):
                    left -= len(piece)
                    yield piece
        if left:
            raise DataError(f"the column {name} has {left:,} values too few; the file is damaged")

    def paths(self, name: str) -> dict[int, str]:
        """The ``path`` of each structure of a column that has no ``bytes``, by its row.

        Raises:
            DataError: A file is damaged.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        found: dict[int, str] = {}
        kind = self.schema.field(name).type
        has_paths = pa.types.is_struct(kind) and kind.get_field_index("path") >= 0
        if not has_paths or not is_text(kind.field("path").type):
            return found
        start = 0
        for file in self.files:
            if file.may_lack(name):
                row = start
                with reading(f"{file.shown}, column {name},"):
                    for piece in file.column(name, min(self.n - start, file.n_rows)):
                        lacking = pc.is_null(pc.struct_field(piece, "bytes"))
                        for i in np.flatnonzero(lacking.to_numpy(zero_copy_only=False)).tolist():
                            if path := pc.struct_field(piece, "path")[i].as_py():
                                found[row + i] = path
                        row += len(piece)
            start += file.n_rows
        return found

    def texts(self, name: str) -> list[str]:
        """The texts of a column, missing ones empty, long ones cut past what is ever kept.

        Raises:
            DataError: A file is damaged.
        """
        return [text for piece in self._pieces(name) for text in _texts(piece)]

    def converted(self, name: str, convert: Callable[[Any], Any]) -> Any:
        """What ``convert`` makes of a column of anything but texts, a ``ChunkedArray``.

        Raises:
            DataError: A file is damaged.
        """
        import pyarrow as pa

        pieces = list(self._pieces(name))
        with reading(f"the column {name}"):
            return convert(pa.chunked_array(pieces))


def _texts(piece: Any) -> list[str]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(piece.type):
        values = _texts(piece.dictionary)
        return ["" if i is None else values[i] for i in piece.indices.to_pylist()]
    cut = pc.binary_slice(piece, 0, _CUT_BYTES).to_pylist()
    return ["" if raw is None else raw.decode("utf-8", "backslashreplace") for raw in cut]
