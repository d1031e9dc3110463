"""Arrays in files of others, NumPy's and HDF5's: read where slices of them are asked for."""

import contextlib
import math
import os
import threading
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from embedx import layout
from embedx.columns import is_label_name
from embedx.errors import DataError, StoreError, first_line, short
from embedx.matrix import Array

SUFFIXES = (".npy", ".npz", ".h5", ".hdf5")
ROWS_MOST = 100_000_000
ROW_BYTES_MOST = 2**30
_KINDS = "biufUS"
_MEMBERS_MOST = 10_000
_CHECKED_BYTES = 2**20


class ArrayFile:
    """An array in a file, whose rows are read where slices are asked for.

    Nothing of the file is kept in memory, and none is open in a copy that another process gets.

    Attributes:
        path: The file.
        key: Which of its arrays; empty of a ``.npy``.
        shape: Its shape ``(n, ...)``.
        dtype: Its type.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        reader: "_Reader",
        *,
        n: int | None = None,
        member: str | None = None,
    ) -> None:
        self.path = path
        self.key = key
        self._reader = reader
        self._member = member  # of a zip archive, which has a checksum of it
        self.shape = (reader.shape[0] if n is None else n, *reader.shape[1:])
        self.dtype = reader.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        """A copy of consecutive rows, which may be read-only.

        Raises:
            DataError: The file was changed, or is damaged.
        """
        start, stop, _ = rows.indices(len(self))
        with _reading(self.path):
            read = self._reader.read(start, max(0, stop - start))
        if read.shape != (max(0, stop - start), *self.shape[1:]):
            raise DataError(f"{self.path} was changed while it was read; run again")
        return read

    @property
    def is_shared(self) -> bool:
        """Whether threads may read at once."""
        return not isinstance(self._reader, _Streamed)

    def first(self, n: int) -> "ArrayFile":
        """The same with its first n rows alone."""
        return ArrayFile(self.path, self.key, self._reader, n=n, member=self._member)

    def require_whole(self) -> None:
        """Hold what is in a ``.npz`` to its checksum, for which it is read through once.

        Raises:
            DataError: It does not match.
        """
        if self._member is None:
            return
        with (
            _reading(self.path),
            zipfile.ZipFile(self.path) as archive,
            archive.open(self._member) as file,
        ):
            while file.read(_CHECKED_BYTES):
                pass

    def holes_told(self) -> list[str]:
        """What is to be said of rows that nothing was written to, as where a program was killed
        that had made the file at its full size; of rows that lie one after the other alone.
        """
        if type(self._reader) is not _Plain or not hasattr(os, "SEEK_HOLE"):
            return []
        start = self._reader.offset
        with _reading(self.path), self.path.open("rb") as file:
            hole = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        row = (hole - start) // max(1, self._reader.row_bytes)
        if row >= len(self):
            return []
        return [
            f"{self}: nothing was written to row {row:,} and maybe to others after it (the file "
            "has a hole there), and zeros are read; see whether what made it came to its end"
        ]

    def as_list(self) -> list[Any]:
        """The numbers or texts of an array of one axis.

        Raises:
            DataError: Texts that are not UTF-8, or a checksum that does not match.
        """
        self.require_whole()
        values = self[:]
        self.close()
        if values.dtype.kind != "S":
            return list(values.tolist())
        try:
            return [value.decode() for value in values.tolist()]
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self} holds texts that are not UTF-8 ({short(str(error))}); save them so"
            ) from None

    def __str__(self) -> str:
        return f"{self.key} of {self.path}" if self.key else str(self.path)

    def close(self) -> None:
        """Let go of the file; it is opened again where it is needed."""
        if isinstance(self._reader, _Streamed):
            self._reader.close()


def is_label_key(name: str) -> bool:
    """Whether an array of this key is that of the labels."""
    last = name.rpartition("/")[2]
    return is_label_name(last) or last.lower() == "y"


def arrays_in(path: Path) -> tuple[dict[str, ArrayFile], dict[str, str]]:
    """The arrays in a file by their keys, and why others in it are not read.

    Args:
        path: A ``.npy``, whose only array has the empty key, a ``.npz``, or an HDF5 file.

    Raises:
        DataError: It is not there, of another kind, damaged, or declares more than it holds.
        StoreError: It is no HDF5 file, or damaged.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise DataError(f"{path} {what}; name a file of arrays: {' '.join(SUFFIXES)}")
    suffix = path.suffix.lower()
    with _reading(path):
        if suffix == ".npy":
            with path.open("rb") as file:
                found = _member(path, "", file, base=0, room=path.stat().st_size)
            if isinstance(found, str):
                raise DataError(f"{path} {found}")
            return {"": found}, {}
        if suffix == ".npz":
            return _npz(path)
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is no file of arrays; name one: {' '.join(SUFFIXES)}")
    arrays: dict[str, ArrayFile] = {}
    refused: dict[str, str] = {}
    for key, foreign in layout.foreign_arrays(path).items():
        why = foreign.refused or _refusal(foreign.shape, foreign.dtype)
        if why:
            refused[key] = why
        elif foreign.offset is not None:
            reader: _Reader = _Plain(path, foreign.shape, foreign.dtype, foreign.offset)
            arrays[key] = ArrayFile(path, key, reader)
        else:
            arrays[key] = ArrayFile(path, key, _Chunked(foreign))
    return arrays, refused


def _npz(path: Path) -> tuple[dict[str, ArrayFile], dict[str, str]]:
    arrays: dict[str, ArrayFile] = {}
    refused: dict[str, str] = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as whole:
        members = archive.infolist()
        if len(members) > _MEMBERS_MOST:
            raise DataError(f"{path} has more than {_MEMBERS_MOST:,} arrays; save fewer in a file")
        for info in members:
            key = info.filename.removesuffix(".npy")
            kinds = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if info.compress_type not in kinds or info.flag_bits & 1:
                refused[key] = "is encrypted, or compressed in a way that NumPy does not write"
                continue
            if info.file_size > max(info.compress_size, 2**16) * layout.DEFLATE_MOST:
                refused[key] = f"declares {info.file_size:,} bytes in {info.compress_size:,}"
                continue
            base: int | None = None
            if info.compress_type == zipfile.ZIP_STORED:
                whole.seek(info.header_offset + 26)
                lengths = whole.read(4)  # of the name and of what is added to it
                base = info.header_offset + 30 + sum(np.frombuffer(lengths, "<u2").tolist())
            try:
                with archive.open(info) as file:
                    found = _member(
                        path, key, file, base=base, room=info.file_size, member=info.filename
                    )
            except ValueError as error:  # something else beside the arrays
                found = f"is no array ({short(first_line(error))})"
            if isinstance(found, str):
                refused[key] = found
            else:
                arrays[key] = found
    return arrays, refused


def _member(
    path: Path,
    key: str,
    file: IO[bytes],
    *,
    base: int | None,
    room: int,
    member: str | None = None,
) -> ArrayFile | str:
    """An array in NumPy's format, or why it is not read.

    Args:
        path: The file that it lies in.
        key: Its name there.
        file: At its first byte.
        base: Where that is in ``path``; None where it is compressed.
        room: How many bytes it has.
        member: What it is called in ``path``, where that is a zip archive.

    Raises:
        ValueError: It has no header of an array.

    References:
        NumPy's NEP 1, "A simple file format for NumPy arrays".
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a header that Python 2 wrote
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            return f"is of version {version} of NumPy's format, and has names of fields"
        read = np.lib.format.read_array_header_1_0
        if version == (2, 0):
            read = np.lib.format.read_array_header_2_0
        try:
            shape, is_fortran, dtype = read(file)
        except Exception as error:  # it is parsed as Python, which raises what it stumbles over
            raise ValueError(f"its header is none: {first_line(error)}") from None
    if why := _refusal(shape, dtype):
        return why
    header_bytes = file.tell()
    n_bytes = math.prod(shape) * dtype.itemsize
    if header_bytes + n_bytes > room:
        held = room - header_bytes
        return f"declares {n_bytes:,} bytes and holds {held:,}; it may be cut off: copy it anew"
    is_turned = is_fortran and len(shape) > 1
    if base is None and is_turned:
        return "is compressed and stored column by column; save np.ascontiguousarray of it"
    if base is None:
        assert member is not None
        reader: _Reader = _Inflated(path, member, shape, dtype, header_bytes)
    else:
        kind = _Turned if is_turned else _Plain
        reader = kind(path, shape, dtype, base + header_bytes)
    return ArrayFile(path, key, reader, member=member)


def _refusal(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Why an array is not read; empty where it is."""
    if dtype.hasobject:
        return (
            "holds Python objects, and to unpickle them could run any code; save numbers: "
            "np.stack(list(x)), or texts: x.astype(str)"
        )
    if dtype.kind not in _KINDS or (dtype.kind in "biuf" and dtype.itemsize > 8):
        return f"is of type {dtype}; save numbers of at most 64 bits"
    if not shape or min(shape) < 1 or dtype.itemsize < 1:
        return f"has shape {shape} and type {dtype}; there is nothing in it to read row by row"
    if shape[0] > ROWS_MOST:
        return f"has {shape[0]:,} rows, and at most {ROWS_MOST:,} are read; split it"
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if row_bytes > ROW_BYTES_MOST:
        return f"has rows of {row_bytes:,} bytes, and at most 1 GiB is read; split it"
    return ""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What NumPy, zip and HDF5 stumble over is the file's fault."""
    try:
        yield
    except (DataError, StoreError):
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        why = short(first_line(error))
        raise DataError(f"{path} is damaged or of another kind ({why}); make it anew") from None
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        raise DataError(f"{path} cannot be read ({short(first_line(error))})") from None


# --------------------------------------------------------------------------- how rows are read


_OPENING = threading.Lock()


class _Reader:
    """Reads consecutive rows of one array.

    Attributes:
        shape: Of the whole array.
        dtype: Its type.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def read(self, start: int, n: int) -> Array:
        raise NotImplementedError

    def filled(self, file: IO[bytes], n: int) -> Array:
        """The next n rows of a file that holds them as they are."""
        rows = np.empty((n, *self.shape[1:]), self.dtype)
        view = memoryview(rows.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        while view:
            done = file.readinto(view)  # type: ignore[attr-defined]
            if not done:
                raise EOFError("the file ends too early")
            view = view[done:]
        return rows


class _Plain(_Reader):
    """Rows that lie in a file one after the other.

    It is kept open, for opening takes longer than a row of a small picture; reading at a place of
    its own, it may be shared by threads and forked processes.
    """

    _fd = -1
    _close = staticmethod(os.close)  # at the exit of Python the module is gone before the rows are

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fd": -1}

    def __del__(self) -> None:
        if self._fd >= 0:
            self._close(self._fd)

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int
    ) -> None:
        super().__init__(shape, dtype)
        self._path = path
        self.offset = offset

    def read(self, start: int, n: int) -> Array:
        # Not as a map: what is cut off of a mapped file ends the process that reads it.
        with _OPENING:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY)
        at, size = self.offset + start * self.row_bytes, n * self.row_bytes
        data = os.pread(self._fd, size, at)
        while len(data) < size:  # two gigabytes at most come at once
            more = os.pread(self._fd, size - len(data), at + len(data))
            if not more:
                raise EOFError("the file ends too early")
            data += more
        return np.frombuffer(data, self.dtype).reshape(n, *self.shape[1:])


class _Turned(_Plain):
    """Rows of an array that is stored column by column."""

    def read(self, start: int, n: int) -> Array:
        mapped = np.memmap(self._path, self.dtype, "r", self.offset, self.shape, order="F")
        return np.array(mapped[start : start + n], order="C")


class _Streamed(_Reader):
    """Rows of what is compressed, which is kept open: it is read from front to back."""

    _opened: Any = None
    _process = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def opened(self) -> Any:
        # A process that was forked would share the place in the file.
        if self._opened is None or self._process != os.getpid():
            self._opened, self._process = self.open(), os.getpid()
        return self._opened

    def open(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class _Inflated(_Streamed):
    def __init__(
        self, path: Path, member: str, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int
    ) -> None:
        super().__init__(shape, dtype)
        self._path = path
        self._member = member
        self.offset = offset

    def open(self) -> Any:
        archive = zipfile.ZipFile(self._path)
        return archive, archive.open(self._member)

    def read(self, start: int, n: int) -> Array:
        _, file = self.opened()
        file.seek(self.offset + start * self.row_bytes)
        return self.filled(file, n)

    def close(self) -> None:
        if self._opened is not None:
            archive, file = self._opened
            file.close()
            archive.close()
            self._opened = None


class _Chunked(_Streamed):
    def __init__(self, foreign: layout.ForeignArray) -> None:
        super().__init__(foreign.shape, foreign.dtype)
        self._foreign = foreign

    def open(self) -> Any:
        return self._foreign.opened()

    def read(self, start: int, n: int) -> Array:
        rows: Array = self.opened()[start : start + n]
        return rows

    def close(self) -> None:
        if self._opened is not None:
            self._opened.file.close()
            self._opened = None
