"""The files of embedx: laid out once by HDF5, then filled in place.

An embeddings file is an ordinary HDF5 file whose skeleton (every dataset at its final size,
contiguous, unfiltered) is made by h5py in memory; HDF5 never writes to the disk: rows go in by
``pwrite`` at known offsets, and two alternating commit records, each on a page of its own, say how
many of them count. A crash therefore can tear at most what no record has claimed yet.
All that is not rows is guarded by a checksum behind the end of what HDF5 sees of the file.
``docs/format.md`` specifies the layout; this is the only module that imports h5py.
"""

import bisect
import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import stat
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import h5py
import numpy as np
import numpy.typing as npt

from embedx.checks import checked
from embedx.columns import Column, concatenated, numbers_first
from embedx.disk import (
    DISK,
    DiskIO,
    Lock,
    disk_error,
    is_name_of,
    open_own,
    remove_quietly,
    replace_file,
    temporary,
    waiting_lock,
)
from embedx.errors import InUseError, ShapeError, StoreError, first_line, listed
from embedx.matrix import Stacked

if TYPE_CHECKING:
    import pandas

Array = npt.NDArray[Any]

log = logging.getLogger("embedx")

EMBEDDINGS_FORMAT = "embedx-embeddings"
PROJECTION_FORMAT = "embedx-projection"
FINDINGS_FORMAT = "embedx-findings"
NEIGHBORS_FORMAT = "embedx-neighbors"
MAPS_FORMAT = "embedx-maps"
PART_FORMAT = "embedx-part"  # until all parts are joined
FORMAT_VERSION = 1
EMBEDDINGS_NAME = "embeddings.h5"
MAPS_NAME = "maps.h5"
ID_BYTES_MAX = 1024

PAGE_BYTES = 4096
COMMIT_BYTES = 64 * 2**20
COMMIT_S = 2.0

_RECORD = struct.Struct("<8sQQQI16s")  # magic, sequence, rows done, rows before, state, run
_MAGIC = b"EMBXCMT1"
_RUNNING, _COMPLETE = 1, 2

_REGION = struct.Struct("<QQ")  # offset and length of what changes while rows are written
_FOOTER = struct.Struct("<QI")  # how many regions go before it, CRC-32 of all bytes outside them
_FOOTER_MAGIC = b"EMBXFTR1"
_FOOTER_BYTES = _FOOTER.size + 4 + len(_FOOTER_MAGIC)


class Status(IntEnum):
    """The state of a row, as stored in ``/status``."""

    PENDING = 0
    OK = 1
    FAILED = 2


@dataclasses.dataclass(frozen=True)
class Field:
    """A dataset with one entry a row, streamed while the work runs.

    Attributes:
        name: Its path in the file, such as ``embeddings/avgpool``.
        shape: Shape of one row, ``(d,)`` for embeddings.
        dtype: NumPy type of the stored numbers.
        attrs: What the numbers are, stored as attributes of the dataset.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


# --------------------------------------------------------------------------- text in HDF5


def encode_texts(values: Sequence[str], *, what: str, most_bytes: int = ID_BYTES_MAX) -> Array:
    """Texts as the fixed-length, zero-padded UTF-8 that the files hold.

    Bytes of a file name that are not UTF-8 are written as ``\\xNN``-style escapes.

    Args:
        values: n texts.
        what: What they are, for the message.
        most_bytes: Longest text taken, in bytes.

    Returns:
        Shape ``(n,)``, dtype ``S<longest>``.

    Raises:
        StoreError: One is longer than ``most_bytes`` or holds a NUL character.
    """
    width = 1
    for value in values:
        size = len(value) if value.isascii() else len(value.encode("utf-8", "backslashreplace"))
        if size > most_bytes:
            raise StoreError(
                f"{what} {value[:60]!r}... has {size} bytes, and at most {most_bytes} "
                "are stored; shorten it"
            )
        if "\0" in value:
            raise StoreError(f"{what} {value[:60]!r} holds a NUL character; rename it")
        width = max(width, size)
    # By blocks: as objects, all of them would take twice the room of the texts themselves.
    encoded = np.empty(len(values), dtype=f"S{width}")
    for start in range(0, len(values), _TEXTS):
        block = values[start : start + _TEXTS]
        encoded[start : start + _TEXTS] = [v.encode("utf-8", "backslashreplace") for v in block]
    return encoded


def _are_unique(encoded: Array) -> bool:
    """Whether no two of n texts are the same, told in 16 bytes each.

    Args:
        encoded: As :func:`encode_texts` gives them.
    """
    hashes = np.empty(len(encoded), np.int64)
    for start in range(0, len(encoded), _TEXTS):
        hashes[start : start + _TEXTS] = [hash(v) for v in encoded[start : start + _TEXTS].tolist()]
    ordered = np.sort(hashes)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return True
    alike = encoded[np.isin(hashes, twice)].tolist()  # two texts may have one hash
    return len(set(alike)) == len(alike)


_TEXTS = 8192


def _decode(values: Array) -> list[str]:
    return [bytes(value).decode("utf-8", "replace") for value in values]


def stored_texts(values: Sequence[str]) -> list[str]:
    """Texts as they are read back from a file."""
    return [value.encode("utf-8", "backslashreplace").decode() for value in values]


def _h5_type(array_dtype: np.dtype[Any]) -> Any:
    if array_dtype.kind == "S":
        return h5py.string_dtype("utf-8", array_dtype.itemsize)
    return array_dtype


def _safe_name(name: str) -> str:
    """A capture point as the name of a dataset: ``/`` would make a group, ``%`` is the escape."""
    escaped = name.replace("%", "%25").replace("/", "%2F")
    return {".": "%2E", "..": "%2E%2E"}.get(escaped, escaped)


def _plain_name(name: str) -> str:
    return name.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")


def column_name(name: str) -> str:
    """The path of a column of metadata in the file."""
    return f"metadata/{_safe_name(name)}"


def layer_name(point: str) -> str:
    """The path of a capture point's embeddings in the file."""
    return f"embeddings/{_safe_name(point)}"


def _point_of(name: str) -> str:
    """The capture point whose dataset has this name."""
    return _plain_name(name.removeprefix("embeddings/"))


def embeddings_field(
    point: str, *, n_features: int, dtype: np.dtype[Any], attrs: Mapping[str, Any]
) -> Field:
    """The dataset of one capture point."""
    return Field(layer_name(point), (n_features,), dtype, attrs)


# --------------------------------------------------------------------------- commit records


@dataclasses.dataclass(frozen=True)
class _Record:
    sequence: int
    rows_done: int
    rows_before: int
    state: int
    run: bytes

    @property
    def place(self) -> int:
        """Its offset in ``/commit``: never that of the record before it."""
        return self.sequence % 2 * PAGE_BYTES

    def pack(self) -> bytes:
        body = _RECORD.pack(
            _MAGIC, self.sequence, self.rows_done, self.rows_before, self.state, self.run
        )
        return body + struct.pack("<I", zlib.crc32(body))


def _read_record(page: bytes, *, n_rows: int, run: bytes) -> _Record | None:
    body = page[: _RECORD.size]
    (checksum,) = struct.unpack_from("<I", page, _RECORD.size)
    if zlib.crc32(body) != checksum:
        return None
    magic, sequence, rows_done, rows_before, state, got_run = _RECORD.unpack(body)
    if magic != _MAGIC or got_run != run or not rows_before <= rows_done <= n_rows:
        return None
    return _Record(sequence, rows_done, rows_before, state, got_run)


def _newest_record(pages: Array, *, n_rows: int, run: bytes) -> _Record | None:
    seen = b""
    while seen != (seen := pages.tobytes()):  # a writer may be at work: both of one moment
        pass
    found = (seen[:PAGE_BYTES], seen[PAGE_BYTES:])
    records = [_read_record(page, n_rows=n_rows, run=run) for page in found]
    return max((r for r in records if r), key=lambda r: r.sequence, default=None)


def _run_bytes(file_id: str) -> bytes:
    """Marks the commit records of this file. Derived from its id, so that equal runs make equal
    files, and a recycled disk page of another run is not taken for a record of this one."""
    return hashlib.sha256(file_id.encode()).digest()[:16]


_BEGUN = [zlib.crc32(bytes((state,))) for state in range(256)]


def _row_checksums(status: Array, parts: Sequence[Array]) -> Array:
    """CRC-32 of each row: its status byte, then its bytes in every streamed dataset, in order."""
    checksums = [_BEGUN[state] for state in status.tolist()]
    for part in parts:
        data = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        row_bytes = len(data) // max(1, len(part))
        # One slice and one call a row: with 2 KB of each, what surrounds them would cost as much.
        checksums = [
            zlib.crc32(data[row * row_bytes : (row + 1) * row_bytes], checksum)
            for row, checksum in enumerate(checksums)
        ]
    return np.array(checksums, dtype=np.uint32)


def _bad_rows(row_maps: Sequence[Array], rows: slice) -> list[int]:
    """The rows whose bytes do not match their checksum."""
    status, stored, *maps = row_maps
    bad: list[int] = []
    for start in range(rows.start, rows.stop, 4096):
        block = slice(start, min(start + 4096, rows.stop))
        computed = _row_checksums(status[block], [m[block] for m in maps])
        bad += (start + np.flatnonzero(computed != stored[block])).tolist()
    return bad


def _crc_outside(fd: int, size: int, regions: Sequence[tuple[int, int]]) -> int:
    """CRC-32 of the first ``size`` bytes of a file but for those of regions (offset, length)."""
    checksum, at = 0, 0
    for offset, length in [*regions, (size, 0)]:
        while at < offset:
            data = os.pread(fd, min(2**20, offset - at), at)
            if not data:
                raise OSError(errno.EIO, "the file ends too early")
            checksum = zlib.crc32(data, checksum)
            at += len(data)
        at = offset + length
    return checksum


def _footer(checksum: int, regions: Sequence[tuple[int, int]]) -> bytes:
    body = b"".join(_REGION.pack(*region) for region in regions)
    body += _FOOTER.pack(len(regions), checksum)
    return body + struct.pack("<I", zlib.crc32(body)) + _FOOTER_MAGIC


def _is_as_laid_out(fd: int) -> bool | None:
    """Whether all that is not rows is as it was written; None of a file that has no footer.

    HDF5 trusts what it parses: a changed byte in it can end the process.
    """
    size = os.fstat(fd).st_size
    end = os.pread(fd, _FOOTER_BYTES, max(0, size - _FOOTER_BYTES))
    if end[-len(_FOOTER_MAGIC) :] != _FOOTER_MAGIC or len(end) < _FOOTER_BYTES:
        return None
    n_regions, checksum = _FOOTER.unpack_from(end)
    size -= _FOOTER_BYTES + n_regions * _REGION.size
    if size < 0:
        return False
    body = os.pread(fd, n_regions * _REGION.size, size)
    regions = list(_REGION.iter_unpack(body))
    ends = [0, *(offset + length for offset, length in regions)]
    starts = [*(offset for offset, _ in regions), size]
    if any(start < end for start, end in zip(starts, ends, strict=True)):
        return False
    return _footer(checksum, regions) == body + end and checksum == _crc_outside(fd, size, regions)


# --------------------------------------------------------------------------- writing


class Writer:
    """Streams rows, in order, into one embeddings file.

    Made by :func:`create` or :func:`resume`; ``rows_done`` says how many rows are durable. Waiting
    for the disk is left to a thread, one commit at a time; where no rows follow, a timer commits.
    After any error from the disk, or where another took the lock or the file's name, the writer
    refuses further work: open it again with :func:`resume`.

    Attributes:
        path: The final name; until :meth:`finish` the file is ``<path>.partial``.
        n_rows: Rows the file holds when it is complete.
        rows_done: Rows that are committed, counted from the first.
        n_failed: Committed and uncommitted rows with status FAILED.
    """

    def __init__(
        self,
        path: Path,
        *,
        fields: Sequence[Field],
        offsets: Mapping[str, int],
        n_rows: int,
        run: bytes,
        newest: _Record,
        n_failed: int,
        lock: Lock,
        disk: DiskIO,
    ) -> None:
        self.path = path
        self.fields = tuple(fields)
        self.n_rows = n_rows
        self.rows_done = newest.rows_done
        self.n_failed = n_failed
        self._written = newest.rows_done
        self._sequence = newest.sequence
        self._offsets = dict(offsets)
        self._run = run
        self._lock = lock
        self._disk = disk
        self._reasons: list[dict[str, Any]] = []
        self._uncommitted_bytes = 0
        self._committed_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedx-commit")
        self._committing: tuple[_Record, Future[None]] | None = None
        self._mutex = threading.RLock()  # the timer comes from a thread of its own
        self._timer: threading.Timer | None = None
        self._late: StoreError | None = None  # what failed in the timer, for the next call
        self._fd = open_own(partial_path(path), os.O_RDWR)
        self._about = os.fstat(self._fd)

    def append(
        self,
        rows: Mapping[str, Array],
        *,
        status: Array,
        reasons: Mapping[int, tuple[str, str]] | None = None,
    ) -> None:
        """Write the next rows; commits by itself every 64 MiB or 2 seconds.

        Args:
            rows: For each field, by name, shape ``(b, *field.shape)`` in the field's dtype.
            status: Shape ``(b,)`` of :class:`Status`.
            reasons: For each failed row of the file, its sample id and why it failed.

        Raises:
            StoreError: The disk refused; nothing that was committed is lost.
            InUseError: Another process took over the file.
            ValueError: Shapes or types do not fit the fields, or there are too many rows.
        """
        with self._mutex:
            self._append(rows, status=status, reasons=reasons or {})

    def _append(
        self,
        rows: Mapping[str, Array],
        *,
        status: Array,
        reasons: Mapping[int, tuple[str, str]],
    ) -> None:
        if not len(status):
            return
        start, stop = self._written, self._written + len(status)
        if stop > self.n_rows:
            raise ValueError(f"row {stop - 1} is past the {self.n_rows} rows of {self.path}")
        parts = []
        for field in self.fields:
            part = rows[field.name]
            if part.shape != (len(status), *field.shape) or part.dtype != field.dtype:
                raise ValueError(
                    f"{field.name} takes {(len(status), *field.shape)} {field.dtype}, "
                    f"not {part.shape} {part.dtype}"
                )
            parts.append(part)
        status = status.astype(np.uint8)
        checksums = _row_checksums(status, parts)
        with self._fatal():
            self._require_lock()
            for field, part in zip(self.fields, parts, strict=True):
                self._put(field.name, part, start, field.row_bytes)
            self._put("row_crc32", checksums, start, 4)
            self._put("status", status, start, 1)
        for row, (sample_id, reason) in sorted(reasons.items()):
            self._reasons.append({"row": row, "id": sample_id, "reason": reason})
        self._written = stop
        self.n_failed += int((status == Status.FAILED).sum())
        self._uncommitted_bytes += sum(part.nbytes for part in parts)
        if self._committing and self._committing[1].done():
            self._settle()
        if (
            self._uncommitted_bytes >= COMMIT_BYTES
            or time.monotonic() - self._committed_at >= COMMIT_S
        ):
            self._begin_commit(_RUNNING)
        else:
            self._commit_later(COMMIT_S)

    def commit(self) -> None:
        """Make every appended row durable, then say so in a commit record.

        Raises:
            StoreError: The disk refused; the rows of earlier commits stand.
            InUseError: Another process took over the file.
        """
        with self._mutex:
            self._begin_commit(_RUNNING)
            self._settle()

    def finish(self) -> Path:
        """Commit the last rows, mark the file complete and give it its final name.

        Returns:
            The final path.

        Raises:
            StoreError: The disk refused; run again to go on.
            InUseError: Another process took over the file.
        """
        with self._mutex:
            return self._finish()

    def _finish(self) -> Path:
        if self._written != self.n_rows:
            raise ValueError(f"{self._written} of {self.n_rows} rows were appended")
        self._begin_commit(_COMPLETE)
        self._settle()
        with self._fatal():
            # Both records now become those of a file written in one go, the newest last, so that
            # an interrupted run ends with the same bytes as one that was not.
            for last in (self._sequence + 1, self._sequence):
                number = 2 - last % 2  # as odd or even as the one that it follows in its slot
                self._put_record(_Record(number, self.n_rows, 0, _COMPLETE, self._run))
            self._require_own()
            # The file takes its name last: whatever stops us before, the next run comes by again.
            if not self.n_failed:
                self._disk.remove(errors_path(self.path))
            elif _running_errors_path(self.path).exists():
                self._disk.rename(_running_errors_path(self.path), errors_path(self.path))
            self._disk.rename(partial_path(self.path), self.path)
        self.close()
        return self.path

    def discard(self) -> None:
        """Take the unfinished file away: it holds nothing worth going on with."""
        with self._mutex:
            self._thread.shutdown()
            with self._fatal():
                self._require_own()
                _discard_partial(self.path)
            self.close()

    def close(self) -> None:
        """Let go of the file and its lock. Rows after the last commit are not kept."""
        with self._mutex:
            if self._timer is not None:
                self._timer.cancel()
            self._thread.shutdown()  # it may be at work on the file
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                self._lock.release()

    def require_own(self) -> None:
        """Make sure that nobody took over, before anything else in the folder is written.

        Raises:
            InUseError: The lock or the unfinished file was removed or replaced.
        """
        with self._mutex, self._fatal():
            self._require_own()

    def _require_lock(self) -> None:
        if not self._lock.is_held:
            self._refuse(self._lock.path)

    def _require_own(self) -> None:
        self._require_lock()
        if not is_name_of(partial_path(self.path), self._about):
            self._refuse(partial_path(self.path))

    def _refuse(self, gone: Path) -> None:
        raise InUseError(
            f"{gone} was removed or replaced while {self.path} was being written, so that another "
            "may write it too; this one stopped: the same command goes on with what is there, and "
            "embedx.join(FOLDER) makes a file of a recording"
        )

    def _put(self, name: str, data: Array, row: int, row_bytes: int) -> None:
        self._disk.write_all(self._fd, data, self._offsets[name] + row * row_bytes)

    def _put_record(self, record: _Record) -> None:
        self._disk.write_all(self._fd, record.pack(), self._offsets["commit"] + record.place)
        self._disk.sync(self._fd)

    def _begin_commit(self, state: int) -> None:
        self._settle()
        if self._written == self.rows_done and state == _RUNNING:
            return
        record = _Record(self._sequence + 1, self._written, self.rows_done, state, self._run)
        with self._fatal():
            self._committing = record, self._submitted(record, self._reasons)
        self._reasons = []
        self._uncommitted_bytes = 0
        self._committed_at = time.monotonic()

    def _submitted(self, record: _Record, reasons: list[dict[str, Any]]) -> "Future[None]":
        try:
            return self._thread.submit(self._commit, record, reasons)
        except RuntimeError:  # the interpreter is about to end: its threads take no more work
            self._commit(record, reasons)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _commit(self, record: _Record, reasons: Sequence[Mapping[str, Any]]) -> None:
        self._require_own()
        if reasons:
            _append_reasons(self.path, reasons, self._disk)
        self._disk.sync(self._fd)  # the rows come first: a record must never run ahead of them
        self._require_own()
        self._put_record(record)

    def _commit_later(self, after_s: float) -> None:
        if self._timer is None:
            self._timer = threading.Timer(after_s, self._commit_idle)
            self._timer.daemon = True
            self._timer.start()

    def _commit_idle(self) -> None:
        """Commit the rows that nothing has followed for a while."""
        with self._mutex:
            self._timer = None
            if self._fd < 0:
                return
            left_s = self._committed_at + COMMIT_S - time.monotonic()
            if left_s > 0:  # a commit came between
                self._commit_later(left_s)
                return
            try:
                self._begin_commit(_RUNNING)
            except StoreError as error:
                self._late = error

    def _settle(self) -> None:
        """Wait for the commit that is under way."""
        if self._committing is None:
            return
        record, done = self._committing
        with self._fatal():
            done.result()
        self._committing = None
        self._sequence = record.sequence
        self.rows_done = record.rows_done

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """After a failed write or sync the state of the page cache is unknown: never go on."""
        if self._late is not None:
            late, self._late = self._late, None
            raise late
        if self._fd < 0:
            raise StoreError(f"the writer of {self.path} is closed; open it again to go on")
        try:
            yield
        except StoreError:
            self.close()
            raise
        except OSError as error:
            rows_done = self.rows_done
            self.close()
            raise StoreError(
                f"writing {self.path} failed: {error.strerror or error}; {rows_done:,} of "
                f"{self.n_rows:,} rows are safe; make room and run the same command again"
            ) from error


PICTURE_MARKS = {".png": b"Software\0embedx", ".svg": b"<dc:title>embedx</dc:title>"}
REPORT_MARK = b'<meta name="generator" content="embedx'
EXPORT_CONFIG = "projector_config.pbtxt"
EXPORT_MARK = "# Written by embedx; the next export to this folder replaces all of it.\n"
EXPORT_EVENTS = "events.out.tfevents.0.embedx"  # without one TensorBoard passes over a sub-folder
EXPORT_ROW = "embedx_row"  # the first column of a table: the row of the embeddings file, from 0
EXPORT_PARENT = "embedx_parent"  # what a parquet file calls the id of the embeddings
EXPORT_TABLES = ("atlas.parquet", "table.csv", "table.parquet", "embeddings.npz")


def foreign_in_export(folder: Path) -> set[str]:
    """Names in a folder that are no part of an export of embedx."""
    ours: set[str] = set()
    if (folder / EXPORT_CONFIG).is_file():
        text = (folder / EXPORT_CONFIG).read_text(encoding="utf-8", errors="replace")
        if text.startswith(EXPORT_MARK):
            ours = {EXPORT_CONFIG, EXPORT_EVENTS, *re.findall(r'_path: "([^"]*)"', text)}
    return {path.name for path in folder.iterdir() if path.name not in ours or not path.is_file()}


def require_ours(path: Path, mark: bytes | re.Pattern[bytes]) -> None:
    """Raise StoreError where there is a file that embedx did not write: it is not replaced.

    Args:
        path: The file to be.
        mark: What stands in the first 4 kB of each such file, or how these begin.
    """
    if not os.path.lexists(path):
        return
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as opened:
                head = opened.read(4096)
                if mark.match(head) if isinstance(mark, re.Pattern) else mark in head:
                    return
    raise StoreError(
        f"{path} is there and was not written by embedx; move it, or choose another out=FOLDER"
    )


def require_own_beside(path: Path, *, has_config: bool) -> None:
    """Raise StoreError where what is written beside embeddings would replace a user's own.

    Args:
        path: The file of embeddings.
        has_config: Whether its settings are written, too.
    """
    require_ours(errors_path(path), re.compile(rb'(\{"row": \d+, "id": |$)'))
    if has_config:
        require_ours(path.with_name("config.yaml"), re.compile(rb"id: '?[0-9a-f]{64}'?\s"))


def is_export_table(path: Path) -> bool:
    """Whether a file is a table that an export of embedx wrote, and nobody changed since.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file() or path.is_symlink() or not hash_path(path).is_file():
        return False
    lines = hash_path(path).read_text("ascii", "replace").splitlines()
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() in {s[:64] for s in lines}


def hash_path(path: Path) -> Path:
    """Where the SHA-256 of a table lies as it was exported, and of the one that it replaces."""
    return path.with_name(f".{path.name}.sha256")


def remove_export(folder: Path) -> bool:
    """Remove an export of embedx; a folder that holds anything else stays as it is."""
    is_ours = folder.is_dir() and not folder.is_symlink() and not foreign_in_export(folder)
    if is_ours:
        shutil.rmtree(folder)
    return is_ours


def remove_derived(folder: Path, file_id: str, *, is_replaced: bool = True) -> None:
    """Remove what was made of the embeddings with this id, and nothing that somebody else made.

    What was removed is logged.

    Args:
        folder: Where they lie.
        file_id: Their id.
        is_replaced: Whether the file that lay there goes, and with it what does not say which
            embeddings it is of: pictures, exports.
    """
    removed: list[str] = []

    def remove(path: Path) -> None:
        path.unlink(missing_ok=True)  # another job of an array may do the same
        removed.append(path.name)

    for file in sorted((folder / "projections").glob("*.h5")):
        with contextlib.suppress(StoreError):
            if open_projection(file).attrs["parent"] == file_id:
                remove(file)
    for parts in sorted((folder / "projections").glob("*.parts")):  # of a map that was not ended
        if is_replaced and (parts / _PARTS_MARK).is_file():
            shutil.rmtree(parts, ignore_errors=True)
            removed.append(parts.name)
    for file in sorted(folder.glob("neighbors-*.h5")):
        with contextlib.suppress(StoreError):
            if read_arrays(file, format=NEIGHBORS_FORMAT)[0]["parent"] == file_id:
                remove(file)
    scores = folder / "scores.json"
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        if scores.is_file() and json.loads(scores.read_bytes()).get("parent") == file_id:
            remove(scores)
    marked = [
        (path, mark)
        for kind in ("map-", "maps", "variance-")
        for suffix, mark in PICTURE_MARKS.items()
        for path in sorted(folder.glob(f"{kind}*{suffix}"))
    ]
    unnamed = [*marked, (folder / "report.html", REPORT_MARK)] if is_replaced else []
    for path, mark in unnamed:
        with contextlib.suppress(OSError), path.open("rb") as opened:
            if mark in opened.read(4096):
                remove(path)
    for findings in sorted((folder / "neighbors").glob("*.json")):
        if findings_parent(findings) == file_id:
            for suffix in (".csv", ".png", ".json"):
                if findings.with_suffix(suffix).exists():
                    remove(findings.with_suffix(suffix))
    if is_replaced and remove_export(folder / "projector"):
        removed.append("projector")
    for table in map(folder.joinpath, EXPORT_TABLES if is_replaced else ()):
        with contextlib.suppress(OSError):
            if is_export_table(table):
                remove(table)
                hash_path(table).unlink(missing_ok=True)
    for name in ("projections", "neighbors"):
        with contextlib.suppress(OSError):  # not empty: it holds something of somebody else's
            (folder / name).rmdir()
    if removed:
        log.info("removed what was made of the rows that are replaced: %s", listed(removed))


def findings_parent(path: Path) -> str | None:
    """The id of the embeddings that a table of findings is of; None where it is no such table."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(document, dict) and document.get("format") == FINDINGS_FORMAT
    return str(document.get("parent")) if is_ours else None


_PARTIAL = ".partial"


def partial_path(path: Path) -> Path:
    """The name of ``path`` while it is being written."""
    return path.with_name(path.name + _PARTIAL)


def _discard_partial(path: Path) -> None:
    for file in (partial_path(path), _running_errors_path(path)):
        file.unlink(missing_ok=True)


def discard_partial(path: Path) -> None:
    """Remove what an interrupted run left of ``path``; the lock must be ours.

    Raises:
        StoreError: The disk refused.
    """
    try:
        _discard_partial(path)
    except OSError as error:
        raise disk_error(error, path, 0) from error


_PARTS = ".parts"


def parts_folder(path: Path) -> Path:
    """Where the parts of a recording or of a run lie until they are joined."""
    return path.with_name(path.name + _PARTS)


def remove_parts(path: Path, *, disk: DiskIO = DISK) -> None:
    """Remove the parts of a recording: none of them, or all at once.

    Raises:
        StoreError: The disk refused.
    """
    doomed = _doomed_parts(path)
    _remove_tree(doomed)
    if parts_folder(path).exists():
        # Some of the parts would look like a shorter recording.
        try:
            disk.rename(parts_folder(path), doomed)
        except OSError as error:
            raise disk_error(error, path, 0) from error
        _remove_tree(doomed)


def _remove_tree(folder: Path) -> None:
    """Remove a folder, or what a link leads to that was put in its place, and the link."""
    if folder.is_symlink():
        shutil.rmtree(folder.resolve(), ignore_errors=True)
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _doomed_parts(path: Path) -> Path:
    return path.with_name(f".{path.name}.parts.tmp")


_PARTS_MARK = "of.txt"
_REPLACES = "replaces"
_EMPTY_MARK = "empty.txt"
PartKind = Literal["part", "shard"]


def begin_parts(path: Path, *, of: str, n: int, kind: PartKind, replaces: bool = False) -> None:
    """Make the folder for the parts of an extraction, or go on with it.

    Several processes may begin the parts of one file at once.

    Args:
        path: The file to be.
        of: Its id.
        n: How many parts there are.
        kind: ``part`` where they are ranges of rows that are known, else ``shard``.
        replaces: Whether the file that is there is to be replaced, until all parts are made.

    Raises:
        StoreError: Parts of another run are there, or the disk refused.
    """
    try:
        DISK.make_folder(path.parent)
        with waiting_lock(parts_folder(path), work="begins the parts of the same run"):
            require_no_parts(path, of=of, n=n)
            if parts_id(path) not in (None, of):  # of a run that was killed before its first row
                remove_parts(path)
            replaces = replaces or parts_replace(path)
            if _parts_mark(path)[:3] != [of, str(n), kind] or replaces != parts_replace(path):
                mark = f"{of}\n{n}\n{kind}\n" + f"{_REPLACES}\n" * replaces
                replace_file(parts_folder(path) / _PARTS_MARK, mark.encode())
    except OSError as error:
        raise disk_error(error, path, None) from error


def end_parts(path: Path) -> None:
    """Take the folder for parts away if there is no part in it."""
    if parts_id(path) is not None and not _has_parts(path):
        remove_parts(path)


def _has_parts(path: Path) -> bool:
    return next(parts_folder(path).glob(f"*/{path.name}*"), None) is not None


def parts_id(path: Path) -> str | None:
    """The id of the extraction whose parts lie there; None of none, and of a recording."""
    marked = _parts_mark(path)
    return marked[0] if marked else None


def parts_number(path: Path) -> int | None:
    """How many parts there are to be; None where there are none, or it is not known."""
    marked = _parts_mark(path)
    return int(marked[1]) if len(marked) > 1 and marked[1].isdecimal() else None


def parts_replace(path: Path) -> bool:
    """Whether the parts that lie there are to replace a file that is there."""
    return _REPLACES in _parts_mark(path)[3:]


def _parts_mark(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        mark = parts_folder(path) / _PARTS_MARK
        return mark.read_text(encoding="utf-8", errors="replace").split("\n")
    return []


def part_path(path: Path, number: int) -> Path:
    """Where a part of ``path`` lies until they are joined."""
    return parts_folder(path) / f"{number:06d}" / path.name


def note_empty_part(path: Path, number: int) -> None:
    """Say that a part of ``path`` has no row, and that no file of it is missing.

    Raises:
        StoreError: The disk refused.
    """
    replace_file(part_path(path, number).with_name(_EMPTY_MARK), b"")


def _is_blank(folder: Path) -> bool:
    """Whether nothing is in a folder for parts, as where a process was killed that began them."""
    return not (folder / _PARTS_MARK).exists() and not any(one.is_dir() for one in folder.iterdir())


def require_no_parts(path: Path, *, of: str | None = None, n: int | None = None) -> None:
    """Raise StoreError if what lies where ``path`` is to be was not finished, and is another run.

    Args:
        path: The file to be.
        of: Its id.
        n: How many parts it is to be made of; 0 for none, None for any number.
    """
    if not parts_folder(path).is_dir() or _is_blank(parts_folder(path)):
        return
    is_own = of is not None and parts_id(path) == of
    there = parts_number(path)
    if is_own and (n is None or there in (None, n)):
        return
    folder = str(path.parent)
    if parts_id(path) is not None:
        if not _has_parts(path):
            return
        if is_own:
            how = f"n_parts is {n}" if n else "this command has no n_parts"
            raise StoreError(
                f"{folder} holds parts of this run, of {there} in all, and {how}; go on with "
                f"n_parts={there}, or replace them with overwrite=true"
            )
        raise StoreError(
            f"{folder} holds parts of another run that was not finished; run the command of that "
            "one again, choose another out, or replace it with overwrite=true"
        )
    raise StoreError(
        f"{folder} holds a recording that was not finished; make a file of it with "
        f"embedx.join({folder!r}), choose another out, or replace it with overwrite=true"
    )


def errors_path(path: Path) -> Path:
    """Where the reasons of failed rows of ``path`` are listed, one JSON object a line."""
    return path.with_name("errors.jsonl")


def _append_reasons(path: Path, reasons: Sequence[Mapping[str, Any]], disk: DiskIO) -> None:
    listing = _running_errors_path(path)
    is_new = not listing.exists()
    fd = open_own(listing, os.O_RDWR | os.O_CREAT)
    try:
        disk.write_all(fd, _reason_lines(reasons), os.fstat(fd).st_size)
        disk.sync(fd)
    finally:
        os.close(fd)
    if is_new:
        disk.sync_folder(path.parent)


def _reason_lines(reasons: Sequence[Mapping[str, Any]]) -> bytes:
    """In ASCII: ids hold any character, and a line must end where it seems to."""
    return "".join(json.dumps(reason) + "\n" for reason in reasons).encode("ascii")


def _running_errors_path(path: Path) -> Path:
    """The list while the file is being written: one that is to be replaced keeps its own."""
    return errors_path(path).with_name("errors.jsonl.partial")


def read_reasons(path: Path, *, ids: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """The failed rows of the latest run: dicts of ``row``, ``id`` and ``reason``.

    Args:
        path: The file of embeddings that they are listed beside; of a ``.partial``, those of the
            run that is writing it.
        ids: The rows of the file that failed, with their ids: a line that says otherwise is none
            of ours. None takes every line.
    """
    listing = errors_path(path)
    is_running = path.name.endswith(_PARTIAL)
    if is_running and (running := _running_errors_path(path)).exists():
        listing = running
    if not listing.is_file():
        return []
    reasons: dict[int, dict[str, Any]] = {}
    for line in listing.read_bytes().split(b"\n"):
        # A line torn by a crash is written again by the run that goes on.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            reason = json.loads(line)
            row, name, why = reason["row"], str(reason["id"]), str(reason["reason"])
            is_own = ids is None or stored_texts([name]) == [ids.get(row)]
            if type(row) is int and is_own:
                reasons[row] = {"row": row, "id": name, "reason": why}
    return [reasons[row] for row in sorted(reasons)]


def create(
    path: Path,
    *,
    ids: Sequence[str] | None,
    fields: Sequence[Field],
    attrs: Mapping[str, Any],
    n_rows: int | None = None,
    item_hashes: Array | None = None,
    labels: Array | None = None,
    label_names: Sequence[str] = (),
    metadata: Mapping[str, Array | Sequence[str]] | None = None,
    replace: bool = False,
    disk: DiskIO = DISK,
) -> Writer:
    """Lay out a new embeddings file and return the writer that fills it.

    Args:
        path: Final name; ``<path>.partial`` appears at once, at its full size.
        ids: n unique texts, at most 1,024 bytes each; None where they are known row by row alone,
            and are a field ``ids`` of zero-padded UTF-8.
        fields: The datasets to stream, at least one.
        n_rows: n, where there are no ``ids`` to count.
        attrs: Root attributes; ``id`` must be there and says what decides the rows.
        item_hashes: Shape ``(n,)`` uint64, what each item was, to name those that changed.
        labels: Shape ``(n,)``, indices into ``label_names``, -1 for none. Labels that are known
            row by row alone are a field ``labels`` of int32.
        label_names: Names of the labels; of a field ``labels`` they may be left out.
        metadata: Columns of n numbers, n booleans or n texts.
        replace: Take the place of a file that is there, once this one is complete.
        disk: The calls to the operating system.

    Returns:
        A writer at row 0, holding the lock of ``path``.

    Raises:
        InUseError: Another process writes it, or began to meanwhile.
        StoreError: No disk space (nothing is left behind), an unusable id, a column of another
            length.
    """
    columns: dict[str, Array] = {}
    column_attrs: dict[str, dict[str, Any]] = {}
    if ids is not None:
        columns["ids"] = encode_texts(ids, what="the id")
        if not _are_unique(columns["ids"]):
            twice = Counter(columns["ids"].tolist()).most_common(1)[0][0].decode()
            raise StoreError(f"two ids are written {twice[:60]!r}; make every id unique")
        n_rows = len(ids)
    assert n_rows is not None
    given = {"item_hashes": item_hashes, "labels": labels, **(metadata or {})}
    for name, values in given.items():
        if values is not None and len(values) != n_rows:
            raise StoreError(f"{name} has {len(values)} values for {n_rows} rows; give one a row")
    if item_hashes is not None:
        columns["item_hashes"] = np.asarray(item_hashes, dtype=np.uint64)
    if labels is not None:
        columns["labels"] = np.asarray(labels, dtype=np.int32)
    if labels is not None or label_names:
        columns["label_names"] = encode_texts(label_names, what="the label")
    for name, column in (metadata or {}).items():
        if isinstance(column, list) and all(isinstance(value, str) for value in column):
            # In an array of NumPy's texts each would take four times the room of the longest.
            array = encode_texts(column, what=f"{name}:", most_bytes=65_536)
        else:
            array = np.asarray(column)
        if array.dtype.kind not in "UOSbfiu" or array.ndim != 1:
            raise StoreError(
                f"the column {name} has shape {array.shape} and type {array.dtype}; give numbers "
                "or texts, one a row"
            )
        if array.dtype.kind in "UO":
            array = encode_texts([str(v) for v in column], what=f"{name}:", most_bytes=65_536)
        elif array.dtype.kind == "b":
            array = array.astype(np.uint8)
            column_attrs[column_name(name)] = {"type": _BOOLEAN}
        columns[column_name(name)] = array
    streamed = {f.name: ((n_rows, *f.shape), f.dtype) for f in fields}
    streamed["row_crc32"] = ((n_rows,), np.dtype("<u4"))
    streamed["status"] = ((n_rows,), np.dtype("u1"))
    streamed["commit"] = ((2, PAGE_BYTES), np.dtype("u1"))
    root = {
        "format": EMBEDDINGS_FORMAT,
        "version": FORMAT_VERSION,
        **attrs,
        "n_rows": n_rows,
        "row_fields": json.dumps([f.name for f in fields]),
    }
    layout = {name: (column.shape, column.dtype) for name, column in columns.items()} | streamed
    attrs_of = {**column_attrs, **{f.name: f.attrs for f in fields}}
    skeleton, offsets = _lay_out(layout, root=root, attrs=attrs_of)
    regions = [
        (offsets[name], math.prod(shape) * dtype.itemsize)
        for name, (shape, dtype) in streamed.items()
        if math.prod(shape) * dtype.itemsize
    ]
    regions.sort()

    lock = Lock(path)
    tmp: Path | None = None
    made: list[Path] = []
    try:
        made = disk.make_folder(path.parent)
        lock.acquire()
        if path.exists() and not replace:
            raise StoreError(f"{path} exists already; pass overwrite=true to replace it")
        if partial_path(path).exists() and not replace:
            raise InUseError(f"another process began {path} meanwhile; run again to go on with it")
        if not replace:
            require_no_parts(path)
        _sweep(path)
        run = _run_bytes(str(attrs["id"]))
        first = _Record(1, 0, 0, _RUNNING, run)
        n_bytes = skeleton.size + len(_footer(0, regions))
        fd, tmp = temporary(path)
        try:
            disk.allocate(fd, n_bytes)  # a full disk shows here
            for page, data in sorted(skeleton.pages.items()):
                disk.write_all(fd, bytes(data[: skeleton.size - page]), page)
            for name, column in columns.items():
                disk.write_all(fd, column, offsets[name])
            checksum = _crc_outside(fd, skeleton.size, regions)
            disk.write_all(fd, _footer(checksum, regions), skeleton.size)
            disk.write_all(fd, first.pack(), offsets["commit"] + first.place)
            disk.sync(fd)
        finally:
            os.close(fd)
        disk.rename(tmp, partial_path(path))
        disk.remove(_running_errors_path(path))
        return Writer(
            path,
            fields=fields,
            offsets=offsets,
            n_rows=n_rows,
            run=run,
            newest=first,
            n_failed=0,
            lock=lock,
            disk=disk,
        )
    except BaseException as error:
        lock.release()
        remove_quietly(*([tmp] if tmp else []), *made)  # a refused run leaves nothing behind
        if isinstance(error, OSError):
            raise disk_error(error, path, skeleton.size) from error
        raise


# What a column of uint8 says of itself that holds 0 for false and 1 for true.
_BOOLEAN = "bool"


def _sweep(path: Path) -> None:
    """Remove temporary files of a process that was killed: the lock is ours."""
    for name in (path.name, errors_path(path).name, "errors.jsonl.partial", "config.yaml"):
        remove_quietly(*path.parent.glob(f".{name}.*.tmp"))
    shutil.rmtree(_doomed_parts(path), ignore_errors=True)


class _Image(io.RawIOBase):
    """A file in memory that keeps the pages that were written alone, so that rows cost nothing."""

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}
        self.size = 0
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        for done, page, start, n in self._pieces(len(view)):
            view[done : done + n] = self.pages.get(page, bytes(PAGE_BYTES))[start : start + n]
        return len(view)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for done, page, start, n in self._pieces(len(view)):
            kept = self.pages.setdefault(page, bytearray(PAGE_BYTES))
            kept[start : start + n] = view[done : done + n]
        self.size = max(self.size, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size

    def _pieces(self, n_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """The next bytes page by page: how many went before, the page, where in it, how many."""
        done = 0
        while done < n_bytes:
            start = self._at % PAGE_BYTES
            n = min(n_bytes - done, PAGE_BYTES - start)
            yield done, self._at - start, start, n
            done, self._at = done + n, self._at + n


def _lay_out(
    layout: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    *,
    root: Mapping[str, Any],
    attrs: Mapping[str, Mapping[str, Any]],
) -> tuple[_Image, dict[str, int]]:
    """Let HDF5 make the skeleton: every dataset allocated, every attribute written, closed.

    It does so in memory: on a disk that fills meanwhile HDF5 crashes.

    Returns:
        The file without its rows, and the offset of each dataset.
    """
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # equal runs give equal bytes
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    image, offsets = _Image(), {}
    with h5py.File(
        image, "w", libver="earliest", alignment_threshold=1, alignment_interval=PAGE_BYTES
    ) as file:
        for key, value in root.items():
            file.attrs[key] = value
        for name, (shape, dtype) in layout.items():
            dataset_id = h5py.h5d.create(
                file.id,
                name.encode(),
                h5py.h5t.py_create(np.dtype(_h5_type(dtype)), logical=True),
                h5py.h5s.create_simple(shape),
                dcpl=creation,
                lcpl=links,
            )
            dataset = h5py.Dataset(dataset_id)
            # In the order in which they are read back: a file that is joined of parts, whose fields
            # are those of a part, is then the one that was written in one go.
            for key, value in sorted(attrs.get(name, {}).items()):
                dataset.attrs[key] = value
            # An empty dataset has no place in the file, and nothing is written to it.
            offsets[name] = int(dataset_id.get_offset() or 0)
    return image, offsets


def resume(
    path: Path, *, expected: Mapping[str, Any] | None = None, disk: DiskIO = DISK
) -> Writer | None:
    """Go on with an interrupted file, or return None where there is none.

    Args:
        path: Final name of the file.
        expected: Root attributes that must be the same as in the file.
        disk: The calls to the operating system.

    Returns:
        A writer at the first row that is not committed.

    Raises:
        StoreError: Another process writes it, it was begun with other settings (both values are
            in the message), its last commit does not check, or another program wrote into it.
    """
    partial = partial_path(path)
    if not partial.exists():
        return None
    lock = Lock(path)
    try:
        lock.acquire()
        if not partial.exists():  # its owner finished while we waited for the lock
            lock.release()
            return None
        with _reading(partial), _Skeleton(partial) as skeleton:
            attrs = skeleton.check_embeddings()
            if skeleton.is_as_laid_out is None:
                raise StoreError(
                    f"{partial} has lost the checksum of its ids and layers: another program "
                    "opened it for writing; start anew with overwrite=true"
                )
            for key, value in (expected or {}).items():
                if attrs.get(key) != value:
                    raise StoreError(
                        f"{partial} was begun with {key} {attrs.get(key)!r}, and this run has "
                        f"{value!r}; use the same, or start anew with overwrite=true"
                    )
            fields = skeleton.fields()
            n_rows = int(attrs["n_rows"])
            run = _run_bytes(str(attrs["id"]))
            offsets = skeleton.offsets([*(f.name for f in fields), *_BOOKKEEPING])
            newest = _newest_record(skeleton.map("commit"), n_rows=n_rows, run=run)
            if newest is None:
                raise StoreError(
                    f"{partial} holds no valid commit record; start anew with overwrite=true"
                )
            # All of them: what is read back is quick beside what it took to make it.
            if bad := _bad_rows(skeleton.row_maps(fields), slice(0, newest.rows_done)):
                raise StoreError(
                    f"{partial}: row {bad[0]} does not match its checksum; start anew with "
                    "overwrite=true"
                )
            status = skeleton.map("status")[: newest.rows_done]
            failed = np.flatnonzero(status == Status.FAILED)
            names = _decode(skeleton.map("ids")[failed])
        _sweep(path)
        listing = _running_errors_path(path)
        if listing.exists():
            own = dict(zip(failed.tolist(), names, strict=True))
            if kept := read_reasons(partial, ids=own):
                replace_file(listing, _reason_lines(kept), disk=disk)
            else:
                disk.remove(listing)
        return Writer(
            path,
            fields=fields,
            offsets=offsets,
            n_rows=n_rows,
            run=run,
            newest=newest,
            n_failed=len(failed),
            lock=lock,
            disk=disk,
        )
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise disk_error(error, path, PAGE_BYTES) from error
        raise


# --------------------------------------------------------------------------- reading

_BOOKKEEPING = ("row_crc32", "status", "commit")
_KINDS = "fiuS"


def _has_magic(file: IO[bytes], room: int) -> bool:
    """Whether a file begins as those of HDF5 do, or goes on so after a block of its writer's own.

    References:
        HDF5 File Format Specification 3.0, II.A: it may begin at byte 0, 512, 1024, 2048, ...
    """
    at = 0
    while at <= room:
        file.seek(at)
        if file.read(8) == b"\x89HDF\r\n\x1a\n":
            return True
        at = max(512, 2 * at)
    return False


class _Skeleton:
    """The layout of a file that may come from anywhere: read only, and trusted in nothing.

    Only hard links to contiguous, unfiltered datasets that lie whole within the file are
    followed, so that no other file is read and nothing larger than the file is mapped.
    """

    def __init__(self, path: Path, *, is_of_others: bool = False) -> None:
        self.path = path
        self._checked: dict[str, h5py.Dataset] = {}
        try:
            about = path.stat()
            is_hdf5 = False
            if stat.S_ISREG(about.st_mode):  # opening a pipe would wait for ever
                with path.open("rb") as file:
                    is_hdf5 = _has_magic(file, about.st_size if is_of_others else 0)
        except FileNotFoundError:
            raise StoreError(f"{path} is not there; check the path") from None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}; check its rights") from None
        if stat.S_ISDIR(about.st_mode):
            raise StoreError(f"{path} is a folder; name the file in it")
        if not is_hdf5:
            wanted = "one, or a file of NumPy's" if is_of_others else "a file that embedx wrote"
            raise StoreError(f"{path} is not an HDF5 file; name {wanted}")
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    self._bytes = stack.enter_context(path.open("rb"))
                    self.is_as_laid_out = _is_as_laid_out(self._bytes.fileno())
                    if self.is_as_laid_out is False:
                        raise self._foreign("bytes outside its rows have changed")
                    self._file = stack.enter_context(h5py.File(path, "r"))
                    named, about = path.stat(), os.fstat(self._bytes.fileno())
                except FileNotFoundError:
                    raise StoreError(f"{path} was renamed meanwhile; open it again") from None
                except StoreError:
                    raise
                except OSError as error:
                    raise StoreError(
                        f"{path} does not open as HDF5, it may be truncated ({first_line(error)}); "
                        "make it anew"
                    ) from None
                # Else another file took the name meanwhile, with rows in other places.
                if os.path.samestat(named, about):
                    self.size_bytes = about.st_size
                    self._opened = stack.pop_all()
                    return

    def __enter__(self) -> "_Skeleton":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def check_embeddings(self) -> dict[str, Any]:
        """The root attributes, once every dataset has the shape and kind that is promised."""
        attrs = self.attrs(EMBEDDINGS_FORMAT)
        n_rows = attrs["n_rows"]
        if not isinstance(n_rows, int) or n_rows < 0:
            raise self._foreign(f"n_rows is {n_rows!r}")
        self.expect("ids", (n_rows,), "S")
        self.expect("status", (n_rows,), "u", 1)
        self.expect("row_crc32", (n_rows,), "u", 4)
        self.expect("commit", (2, PAGE_BYTES), "u", 1)
        if self.has("item_hashes"):
            self.expect("item_hashes", (n_rows,), "u", 8)
        if self.has("labels"):
            self.expect("labels", (n_rows,), "i", 4)
            if self.has("label_names") or "labels" not in self._streamed():
                self.expect("label_names", (None,), "S")
        for name in self.names("metadata"):
            self.expect(name, (n_rows,), _KINDS)
        for name in self._streamed():
            if name.startswith("embeddings/"):
                self.expect(name, (n_rows, None), "f")
            elif name == "thumbnails":
                self.expect(name, (n_rows, None, None, 3), "u", 1)
            elif self._dataset(name).shape[:1] != (n_rows,):
                raise self._foreign(f"{name} has not {n_rows} rows")
        return attrs

    def _streamed(self) -> list[str]:
        try:
            names = json.loads(_plain(self._file.attrs["row_fields"]))
        except (ValueError, TypeError, RecursionError):
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._foreign("row_fields is not a JSON list of names")
        return names

    def expect(
        self, name: str, shape: tuple[int | None, ...], kinds: str, n_bytes: int | None = None
    ) -> None:
        """Refuse a dataset of another shape (None is any but 0) or another kind of numbers."""
        dataset = self._dataset(name)
        fits = len(dataset.shape) == len(shape) and all(
            got == want if want is not None else got > 0 or name == "label_names"
            for got, want in zip(dataset.shape, shape, strict=True)
        )
        size = dataset.dtype.itemsize
        if not fits or dataset.dtype.kind not in kinds or n_bytes not in (None, size):
            raise self._foreign(f"{name} has shape {dataset.shape} and type {dataset.dtype}")

    def attrs(self, expected_format: str) -> dict[str, Any]:
        try:
            attrs = {key: _plain(value) for key, value in self._file.attrs.items()}
        except (OSError, RuntimeError, TypeError) as error:
            raise self._foreign(f"its attributes cannot be read: {first_line(error)}") from None
        got = attrs.get("format")
        if got != expected_format:
            raise StoreError(
                f"{self.path} is not an {expected_format} file (its format says {got!r}); "
                "name a file that embedx wrote"
            )
        if attrs.get("version") != FORMAT_VERSION:
            raise StoreError(
                f"{self.path} has format version {attrs.get('version')}, and this embedx reads "
                f"version {FORMAT_VERSION}; read it with the embedx that wrote it"
            )
        needed = {
            EMBEDDINGS_FORMAT: {"id", "n_rows", "row_fields"},
            PROJECTION_FORMAT: {"id", "parent", "method", "layer"},
            NEIGHBORS_FORMAT: {"parent"},
            MAPS_FORMAT: {"id", "method", "model"},
            PART_FORMAT: {"id"},
        }[expected_format]
        if missing := needed - attrs.keys():
            raise self._foreign(f"the attribute {min(missing)!r} is missing")
        return attrs

    def names(self, group: str = "") -> list[str]:
        """Paths of the datasets directly below a group, sorted."""
        if group and self._link(group) is None:
            return []
        parent = self._file[group] if group else self._file
        if not isinstance(parent, h5py.Group):
            raise self._foreign(f"{group} is not a group")
        prefix = f"{group}/" if group else ""
        return [prefix + name for name in sorted(parent)]

    def has(self, name: str) -> bool:
        return self._link(name) is not None

    def offsets(self, names: Sequence[str] | Mapping[str, Any]) -> dict[str, int]:
        # An empty dataset has no place in the file, and nothing is written to it.
        return {name: int(self._dataset(name).id.get_offset() or 0) for name in names}

    def dataset_attrs(self, name: str) -> dict[str, Any]:
        return {key: _plain(value) for key, value in self._dataset(name).attrs.items()}

    def fields(self) -> list[Field]:
        datasets = {name: self._dataset(name) for name in self._streamed()}
        return [Field(name, found.shape[1:], found.dtype) for name, found in datasets.items()]

    def map(self, name: str) -> Array:
        """A dataset as a read-only memory map; the map outlives the open file."""
        dataset = self._dataset(name)
        if dataset.size == 0:
            return np.empty(dataset.shape, dataset.dtype)
        return np.memmap(
            self._bytes,
            mode="r",
            dtype=dataset.dtype,
            shape=dataset.shape,
            offset=dataset.id.get_offset(),
        )

    def row_maps(self, fields: Sequence[Field]) -> list[Array]:
        """What :func:`_bad_rows` takes."""
        return [self.map(name) for name in ("status", "row_crc32", *(f.name for f in fields))]

    def _link(self, name: str) -> h5py.Group | h5py.Dataset | None:
        node: Any = self._file
        for part in name.split("/"):
            if not isinstance(node, h5py.Group):
                return None
            link = node.get(part, getlink=True)
            if link is None:
                return None
            if not isinstance(link, h5py.HardLink):
                raise self._foreign(f"{name} is a link to somewhere else")
            node = node[part]
        return node

    def _dataset(self, name: str) -> h5py.Dataset:
        if name not in self._checked:
            self._checked[name] = self._check(name)
        return self._checked[name]

    def _check(self, name: str) -> h5py.Dataset:
        dataset = self._link(name)
        if not isinstance(dataset, h5py.Dataset):
            raise self._foreign(f"the dataset {name} is missing")
        creation = dataset.id.get_create_plist()
        if creation.get_layout() != h5py.h5d.CONTIGUOUS or creation.get_nfilters():
            raise self._foreign(f"{name} is not stored contiguous and unfiltered")
        if creation.get_external_count():
            raise self._foreign(f"{name} keeps its data in another file")
        if dataset.shape is None:
            raise self._foreign(f"{name} is empty")
        if dataset.dtype.kind not in _KINDS or dataset.dtype.hasobject:
            raise self._foreign(f"{name} has the type {dataset.dtype}")
        if dataset.size:
            offset = dataset.id.get_offset()
            n_bytes = int(dataset.size) * dataset.dtype.itemsize
            if offset is None or offset + n_bytes > self.size_bytes:
                raise self._foreign(f"{name} reaches past the end of the file")
        return dataset

    def foreign_arrays(self) -> "dict[str, ForeignArray]":
        """Every array of numbers or texts, by its path; see :func:`foreign_arrays`."""
        found: dict[str, ForeignArray] = {}
        seen: set[Any] = set()
        groups = [("", self._file)]
        while groups:
            prefix, group = groups.pop()
            for name in sorted(group):
                if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                    continue
                node = group[name]
                address = h5py.h5o.get_info(node.id).addr
                if address in seen:  # a group may hold itself
                    continue
                seen.add(address)
                if len(seen) > _FOREIGN_OBJECTS:
                    raise StoreError(
                        f"{self.path} holds more than {_FOREIGN_OBJECTS:,} objects; name one array "
                        "of a smaller file"
                    )
                if isinstance(node, h5py.Group):
                    groups.append((f"{prefix}{name}/", node))
                elif isinstance(node, h5py.Dataset) and node.shape:
                    found[prefix + name] = self._foreign_array(prefix + name, node)
        return dict(sorted(found.items()))

    def _foreign_array(self, name: str, dataset: h5py.Dataset) -> "ForeignArray":
        creation = dataset.id.get_create_plist()
        layout = creation.get_layout()
        filters = {creation.get_filter(i)[0] for i in range(creation.get_nfilters())}
        n_bytes = int(dataset.size) * dataset.dtype.itemsize
        stored = int(dataset.id.get_storage_size())
        offset: int | None = None
        chunk_bytes = 0
        why = ""
        if dataset.dtype.kind not in _FOREIGN_KINDS or dataset.dtype.hasobject:
            why = f"is of type {dataset.dtype}; numbers and fixed-length texts are read"
        elif layout == h5py.h5d.VIRTUAL or creation.get_external_count():
            why = "keeps its data in another file, which is not followed"
        elif filters - _FOREIGN_FILTERS:
            why = "is compressed by a filter that is not HDF5's own; write it by gzip or lzf"
        elif layout == h5py.h5d.CHUNKED:
            chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
            if chunk_bytes > _FOREIGN_CHUNK_BYTES:
                why = f"has chunks of {chunk_bytes:,} bytes; write it in smaller ones"
        elif layout == h5py.h5d.CONTIGUOUS:
            offset = dataset.id.get_offset()
            kind = dataset.id.get_type()
            declared = int(dataset.size) * kind.get_size()
            if offset is None or offset + declared > self.size_bytes:
                why = f"declares {declared:,} bytes, and the file has {self.size_bytes:,}"
            elif not kind.equal(h5py.h5t.py_create(dataset.dtype)):
                offset = None  # as bfloat16, of which HDF5 makes the numbers of another type
        if not why and min(stored, self.size_bytes) * DEFLATE_MOST < n_bytes:
            why = f"declares {n_bytes:,} bytes and holds {stored:,}"
        shape = tuple(int(size) for size in dataset.shape)
        return ForeignArray(self.path, name, shape, dataset.dtype, offset, chunk_bytes, why)

    def _foreign(self, why: str) -> StoreError:
        return StoreError(f"{self.path} is damaged or not written by embedx: {why}; make it anew")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


DEFLATE_MOST = 1100  # how many bytes one byte of what deflate writes may become, and some more
_FOREIGN_KINDS = "biufS"
_FOREIGN_OBJECTS = 10_000
_FOREIGN_CHUNK_BYTES = 2**28
_FOREIGN_FILTERS = frozenset(
    {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}
    | {h5py.h5z.FILTER_LZF}
)


@dataclasses.dataclass(frozen=True)
class ForeignArray:
    """An array in an HDF5 file that another program wrote.

    Attributes:
        path: The file.
        name: Its path in the file.
        shape: Its shape.
        dtype: Its type.
        offset: Where its numbers begin, if they lie in the file as they are; else None.
        chunk_bytes: How large a piece is that is read as a whole; 0 where there are none.
        refused: Why it is not read; empty where it is.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None
    chunk_bytes: int
    refused: str

    def opened(self) -> Any:
        """It as h5py reads it, for slices; closing ``.file`` ends that.

        Raises:
            StoreError: It is another one by now.
        """
        if foreign_arrays(self.path).get(self.name) != self:
            raise StoreError(f"{self.name} of {self.path} was changed meanwhile; run again")
        # Of a piece that is not kept, each row would cost the whole.
        cache_bytes = max(2**20, 2 * self.chunk_bytes)
        return h5py.File(self.path, "r", rdcc_nbytes=cache_bytes)[self.name]


def foreign_arrays(path: Path) -> dict[str, ForeignArray]:
    """Every array of numbers or texts in an HDF5 file of any program, by its path.

    Hard links alone are followed, and nothing in another file.

    Raises:
        StoreError: It is not there, damaged, or no HDF5 file.
    """
    with _reading(path), _Skeleton(path, is_of_others=True) as skeleton:
        return skeleton.foreign_arrays()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A file may come from anywhere: what HDF5 or NumPy stumble over is its fault, not ours."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise StoreError(
            f"{path} is damaged or not written by embedx ({first_line(error)}); make it anew"
        ) from error


_GRADIENT_POINT = re.compile(r":grad(_input)?(\.|$)")


class Embeddings:
    """An embeddings file, opened for reading; arrays are memory-mapped.

    Attributes:
        path: The file.
        attrs: Its root attributes: ``id``, ``model``, ``weights_sha256``, ``config``, ...
        complete: Whether every row was written; False for a ``.partial`` file.
        size_bytes: Of the file when it was opened.
        n_rows: Committed rows n; equals the number of samples once complete.
        status: Shape ``(n,)`` uint8 of :class:`Status`.
        labels: Shape ``(n,)`` int32, -1 for none, or None where the data has no labels.
        label_names: Names that ``labels`` counts through; empty where each number is its own name.
        metadata: Further columns, each of n numbers, booleans or texts.
        embeddings: For each capture point an array ``(n, d)``.
        outputs: What else was saved row by row, such as ``logits`` ``(n, classes)``.
        thumbnails: ``(n, h, w, 3)`` uint8, or None.
        point_attrs: What is said of each capture point: ``layer``, ``pooling``, ...
        streamed: All that was written row by row, by the name of its dataset.
        fields: The same, as :func:`create` takes them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(path), _Skeleton(path) as skeleton:
            self.attrs = skeleton.check_embeddings()
            fields = skeleton.fields()
            self._row_maps = skeleton.row_maps(fields)
            size = int(self.attrs["n_rows"])
            newest = _newest_record(
                skeleton.map("commit"), n_rows=size, run=_run_bytes(str(self.attrs["id"]))
            )
            if newest is None:
                raise StoreError(f"{path} holds no valid commit record; make it anew")
            self.complete = newest.state == _COMPLETE
            self.size_bytes = skeleton.size_bytes
            self.offsets = skeleton.offsets([field.name for field in fields])
            self.n_rows = newest.rows_done
            if not self.complete and path.suffix != ".partial":
                raise StoreError(
                    f"{path} is not finished, {self.n_rows:,} of {size:,} rows are there; call it "
                    f"{partial_path(path).name} as before, and go on with the same command"
                )
            done = slice(0, self.n_rows)
            self._encoded_ids = skeleton.map("ids")[done]
            self.status = np.array(skeleton.map("status")[done])
            self.labels: Array | None = None
            self.label_names: list[str] = []
            if skeleton.has("labels"):
                self.labels = np.array(skeleton.map("labels")[done])
                names_end = 2**31
                if skeleton.has("label_names"):
                    self.label_names = _decode(skeleton.map("label_names"))
                    names_end = len(self.label_names)
                if len(self.labels) and not (
                    self.labels.min() >= -1 and self.labels.max() < names_end
                ):
                    raise StoreError(f"{path} is damaged: a label has no name; make it anew")
            self.metadata: dict[str, Array | list[str]] = {}
            for name in skeleton.names("metadata"):
                column = np.array(skeleton.map(name)[done])
                if (
                    column.dtype == np.uint8
                    and skeleton.dataset_attrs(name).get("type") == _BOOLEAN
                ):
                    column = column.astype(bool)
                plain = _plain_name(name.removeprefix("metadata/"))
                self.metadata[plain] = _decode(column) if column.dtype.kind == "S" else column
            self._take(
                [
                    dataclasses.replace(f, attrs=skeleton.dataset_attrs(f.name))
                    if f.name.startswith("embeddings/")
                    else f
                    for f in fields
                ],
                {field.name: skeleton.map(field.name)[done] for field in fields},
            )

    def _take(self, fields: list[Field], streamed: dict[str, Array]) -> None:
        """Take what was streamed, by the name of its dataset, once the ids are known."""
        self.fields = fields
        self.streamed = streamed
        points = [field for field in fields if field.name.startswith("embeddings/")]
        self.embeddings = {_point_of(field.name): streamed[field.name] for field in points}
        self.point_attrs = {_point_of(field.name): dict(field.attrs) for field in points}
        self.outputs = {
            name.removeprefix("outputs/"): rows
            for name, rows in streamed.items()
            if name.startswith("outputs/")
        }
        self.thumbnails = streamed.get("thumbnails")
        if not self.embeddings:
            raise StoreError(f"{self.path} holds no embeddings; make it anew")
        if not _are_unique(self._encoded_ids):
            raise StoreError(f"{self.path} is damaged: ids come twice; make it anew")

    @functools.cached_property
    def ids(self) -> list[str]:
        """Those of all rows, n unique texts; made when first asked for."""
        return _decode(self._encoded_ids)

    def __repr__(self) -> str:
        points = ", ".join(f"{name} {rows.shape}" for name, rows in self.embeddings.items())
        return f"<Embeddings {self.path}: {self.n_rows} rows, {points}>"

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the rows, as far as the file says; empty where it does not."""
        try:
            identity = json.loads(str(self.attrs.get("identity", "")))
        except (ValueError, RecursionError):
            identity = None
        return identity if isinstance(identity, dict) else {}

    def remarks(self, layers: Iterable[str] = ()) -> list[str]:
        """What whoever sees the rows of these layers has to know of how they were made.

        Args:
            layers: Capture points; some may be of gradients.
        """
        said = ["RANDOM weights"] if str(self.attrs.get("weights", "")).startswith("random") else []
        if self.identity.get("ablate"):
            said.append("ablated")
        objective = self.identity.get("objective")
        if objective is not None and any(_GRADIENT_POINT.search(layer) for layer in layers):
            of = {"predicted": "the predicted class", "loss": "the loss of the labels"}
            said.append(f"gradients of {of.get(str(objective), f'class {objective}')}")
        return said

    def is_of_labels(self, layer: str) -> bool:
        """Whether the rows of a layer were made with the labels, which they then tell of."""
        return self.identity.get("objective") == "loss" and bool(_GRADIENT_POINT.search(layer))

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Shape ``(n,)``: the rows that hold a result."""
        mask: npt.NDArray[np.bool_] = self.status == Status.OK
        return mask

    def rows(self, point: str | None = None) -> tuple[str, Array]:
        """The embeddings ``(n, d)`` of one point, by default the first, with the point's name.

        Raises:
            StoreError: The file has no such point.
        """
        name = point if point is not None else next(iter(self.embeddings))
        if name not in self.embeddings:
            raise StoreError(
                f"{self.path} has no layer {name!r}; it holds {', '.join(self.embeddings)}"
            )
        return name, self.embeddings[name]

    @property
    def output_columns(self) -> dict[str, Array]:
        """What was saved as one number a row, such as ``predicted``: shape ``(n,)`` by name."""
        return {name: rows for name, rows in self.outputs.items() if rows.ndim == 1}

    def label_texts(self) -> list[str] | None:
        """The label of each row as text, ``""`` for none, or None where there are no labels."""
        if self.labels is None:
            return None
        names = self.label_names or {label: str(label) for label in np.unique(self.labels).tolist()}
        return [names[label] if label >= 0 else "" for label in self.labels.tolist()]

    def to_pandas(self) -> "pandas.DataFrame":
        """A frame with one row a sample, indexed by id: label, status, metadata, embeddings.

        Metadata whose name another column has gets a name with ``_`` behind it, which is said.

        Raises:
            DependencyError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            from embedx.errors import missing_extra

            raise missing_extra("pandas", extra="data", needed_for="to_pandas()") from None
        columns: dict[str, Any] = {}
        if (labels := self.label_texts()) is not None:
            columns["label"] = labels
        columns["status"] = [Status(s).name.lower() for s in self.status]
        features = {
            f"{point}[{i}]": rows[:, i]
            for point, rows in self.embeddings.items()
            for i in range(rows.shape[1])
        }
        for name, values in self.metadata.items():
            free = name
            while free in columns or free in features:
                free += "_"
            if free != name:
                log.info("the column %r is called %r: another one has that name", name, free)
            columns[free] = values
        return pandas.DataFrame(columns | features, index=pandas.Index(self.ids, name="id"))

    def checksums(self) -> Array:
        """Shape ``(n,)`` uint32: CRC-32 of everything that was streamed of each row."""
        checksums: Array = self._row_maps[1][: self.n_rows]
        return checksums

    @functools.cached_property
    def parentage(self) -> dict[str, str]:
        """What is kept by a file that is made of these rows, for :meth:`is_parent_of`.

        The ``id`` alone does not tell rows from those of the same run made again: a picture that
        could not be read may be there now.
        """
        rows = hashlib.sha256(self.checksums().astype("<u4").tobytes()).hexdigest()
        return {"parent": str(self.attrs["id"]), "parent_rows": rows}

    def is_parent_of(self, about: Mapping[str, Any]) -> bool:
        """Whether what says this of itself was made of these rows; others need not say of which."""
        return {**self.parentage, **about}.items() >= self.parentage.items()

    def require_there(self) -> None:
        """See that the file is still the one that was opened, before anything is put beside it.

        Raises:
            StoreError: It was moved, removed, or replaced by other rows.
        """
        is_same = are_there(self.path)
        if is_same and self.complete:  # else there may be more rows by now
            with contextlib.suppress(StoreError):
                is_same = open(self.path).parentage == self.parentage
        if not is_same:
            raise _replaced(self.path)

    def verify(self) -> list[int]:
        """Check the checksum of every committed row; returns the rows that do not match."""
        return _bad_rows(self._row_maps, slice(0, self.n_rows))

    def reasons(self) -> list[dict[str, Any]]:
        """Why rows failed, as far as it is known: dicts of ``row``, ``id`` and ``reason``."""
        return read_reasons(self.path, ids=self._failed_ids())

    def _failed_ids(self) -> dict[int, str]:
        return {int(row): self.ids[row] for row in np.flatnonzero(self.status == Status.FAILED)}

    def row_file(self, row: int) -> Path:
        """The file that a row lies in."""
        return self.path


def read_items(path: Path) -> tuple[list[str], Array | None]:
    """The ids of all n items of a file, written or not yet, and their hashes if it has them.

    Raises:
        StoreError: It is damaged or not a file of embedx.
    """
    with _reading(path), _Skeleton(path) as skeleton:
        skeleton.check_embeddings()
        hashes = np.array(skeleton.map("item_hashes")) if skeleton.has("item_hashes") else None
        return _decode(skeleton.map("ids")), hashes


def find_embeddings(where: str | os.PathLike[str]) -> Path:
    """The embeddings file that a path names: the file itself, or the one in a folder.

    Raises:
        StoreError: There is none; the message says whether one is unfinished.
    """
    path = Path(where)
    if path.is_dir():
        path = path / EMBEDDINGS_NAME
    if not path.exists():
        require_no_parts(path)
        if partial_path(path).exists():
            partial = Embeddings(partial_path(path))
            raise StoreError(
                f"{path} is not finished, {partial.n_rows:,} of {partial.attrs['n_rows']:,} rows "
                f"are there; go on with the same extract command, or read {partial.path}"
            )
        raise StoreError(f"there is no {path}; make it with: python -m embedx extract")
    return path


class PartReader:
    """What a file says of itself, again and again while it is being written, at little cost.

    Args:
        path: The final name of the file.

    Attributes:
        attrs: Its root attributes; empty as long as it is not there.
        fields: What is streamed of each row.
        rows_done: How many rows are committed.
        is_complete: Whether all are, and the file has its final name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attrs: dict[str, Any] = {}
        self.fields: list[Field] = []
        self.rows_done = 0
        self.is_complete = False
        self._commit: Array | None = None  # a map, which sees what is written later

    def read(self) -> "PartReader":
        """Look again.

        Raises:
            StoreError: It is damaged, or not a file of embedx.
        """
        if self._commit is None:
            found = self.path if self.path.exists() else partial_path(self.path)
            if not found.exists():
                return self
            with _reading(found), _Skeleton(found) as skeleton:
                self.attrs = skeleton.check_embeddings()
                self.fields = [
                    dataclasses.replace(field, attrs=skeleton.dataset_attrs(field.name))
                    for field in skeleton.fields()
                ]
                self._commit = skeleton.map("commit")
        newest = _newest_record(
            self._commit, n_rows=int(self.attrs["n_rows"]), run=_run_bytes(str(self.attrs["id"]))
        )
        if newest is None:
            raise StoreError(f"{self.path} holds no valid commit record; make it anew")
        self.rows_done = newest.rows_done
        self.is_complete = newest.state == _COMPLETE and self.path.exists()
        return self


MADE_BY_FIRST = "made_by_first_pass"
ENTERED = "entered"  # "pictures" by the preprocessing, or "tensors" as they are
_MADE_BY = ("batch_size", "device", "environment", ENTERED, MADE_BY_FIRST)


class PartsFound:
    """The parts of a file that are there, each held against the others.

    Args:
        path: The file that they are parts of.
        of: Its id.
        n: How many there are to be.
        kind: ``part`` or ``shard``.

    Attributes:
        sizes: How many rows a part has, by its number.
        fields: What is streamed of each row; None as long as there is no part with a row.
        common: What all parts were made by, as the one with the lowest number says.
    """

    def __init__(self, path: Path, *, of: str, n: int, kind: PartKind) -> None:
        self.path = path
        self.of = of
        self.n = n
        self.kind: PartKind = kind
        self.sizes: dict[int, int] = {}
        self.fields: list[Field] | None = None
        self.common: dict[str, Any] = {}
        self._first = n  # the lowest number of a part with a row
        self._is_said = False

    def title(self, number: int) -> str:
        """What a part is called in messages."""
        return f"{self.kind} {number + (self.kind == 'shard'):,} of {self.n:,}"

    def about(self, number: int) -> dict[str, Any]:
        """The root attributes by which the file of a part says which one it is."""
        return {"part": number, "n_parts": self.n}

    def add(self, number: int) -> bool:
        """Look at the file of a part; whether it is there, or is known to have no row.

        Raises:
            ShapeError: Its rows have another shape than those of others.
            StoreError: It is damaged, of another run, or was made otherwise than the others.
        """
        path = part_path(self.path, number)
        if not path.exists():
            is_empty = path.with_name(_EMPTY_MARK).exists()
            if is_empty:
                self.sizes[number] = 0
            return is_empty
        title = self.title(number)
        anew = f"remove {path.parent} and run again, which makes it anew"
        try:
            found = PartReader(path).read()
        except StoreError as error:
            why = str(error).removesuffix("; make it anew")
            raise StoreError(f"{title} cannot be read: {why}; {anew}") from error
        attrs = found.attrs
        is_own = hashlib.sha256(str(attrs.get("identity")).encode()).hexdigest() == self.of
        if not is_own or any(attrs.get(key) != said for key, said in self.about(number).items()):
            raise StoreError(f"{path} is not {title} of this run, it has other rows; {anew}")
        if not found.is_complete:
            raise StoreError(f"{title} cannot be read: {path} is not complete; {anew}")
        common = {key: attrs[key] for key in _MADE_BY if key in attrs}
        if self.fields is not None:
            self._require_alike(number, common, found.fields)
        if number < self._first:
            self._first, self.common, self.fields = number, common, found.fields
        self.sizes[number] = found.rows_done
        return True

    def _require_alike(self, number: int, made_by: dict[str, Any], fields: list[Field]) -> None:
        """Refuse parts that are not of one model on one kind of device; say what may be."""
        one, other = self.title(self._first), self.title(number)
        where = parts_folder(self.path)
        for key in ("device", "batch_size"):
            if made_by.get(key) != self.common.get(key):
                raise StoreError(
                    f"{where}: {one} was made with {key}={self.common.get(key)} and {other} with "
                    f"{key}={made_by.get(key)}; remove the one and make it again by the same"
                )
        if made_by.get(MADE_BY_FIRST) != self.common.get(MADE_BY_FIRST):
            raise StoreError(
                f"{where}: {one} and {other} are of a model that made itself something else in the "
                "first pass of each (a layer, a centre), so their rows are those of two models; "
                "run it without n_parts, or run the model once on one fixed example before"
            )
        was, now = self.common.get(ENTERED), made_by.get(ENTERED)
        if was != now:
            raise ShapeError(
                f"{where}: the samples of {one} are {was}, and those of {other} are {now}; give "
                "all samples as the same"
            )
        assert self.fields is not None
        for was, now in itertools.zip_longest(self.fields, fields):
            if was is None or now is None or was.name != now.name:
                raise StoreError(
                    f"{where}: {one} holds {', '.join(f.name for f in self.fields)}, and {other} "
                    f"{', '.join(f.name for f in fields)}; remove the one and make it again"
                )
            if (was.shape, was.dtype) != (now.shape, now.dtype):
                raise ShapeError(
                    f"{now.name} has shape {now.shape} in {other} and {was.name} {was.shape} in "
                    f"{one}; choose a pooling that gives one length, such as pooling=gap"
                )
            if was.attrs.get("pooling") != now.attrs.get("pooling"):
                raise ShapeError(
                    f"{now.name} is pooled by {now.attrs.get('pooling')} in {other} and by "
                    f"{was.attrs.get('pooling')} in {one}, as the first rows of each meant "
                    "pooling=auto; name the one that is meant"
                )
        words = other_environment(one, other, self.common, made_by)
        if words and not self._is_said:
            self._is_said = True
            log.warning("%s", words)


def other_environment(
    one: str, other: str, made_by: Mapping[str, Any], now_by: Mapping[str, Any]
) -> str:
    """That two parts were made in environments that differ, in words; empty where they do not.

    Args:
        one: What the first part is called.
        other: What the other is called.
        made_by: Root attributes of the first.
        now_by: Those of the other.
    """
    was, now = _environment(made_by), _environment(now_by)
    if was == now:
        return ""
    keys = [key for key in was | now if was.get(key) != now.get(key)]
    return (
        f"{one} and {other} were made with another {', '.join(keys)} "
        f"({', '.join(str(was.get(key)) for key in keys)} and "
        f"{', '.join(str(now.get(key)) for key in keys)}): the rows agree within rounding, and the "
        "file says the first"
    )


def _environment(attrs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        environment = json.loads(str(attrs.get("environment", "")))
    except (ValueError, RecursionError):
        environment = None
    return environment if isinstance(environment, dict) else {}


class Parts(Embeddings):
    """The parts of a file as the one file that joining them makes, row for row.

    Ids, labels, metadata and what is one number a row are read at once; all other rows are read
    from the parts when they are asked for, and lie in a :class:`~embedx.matrix.Stacked`, which is
    indexed as an array is. ``path`` is that of the file to be, beside which lies what is made of
    its rows: that stays right when the parts are joined.

    Args:
        path: The file that they are parts of.
        found: The parts that make it; all that there are to be where not given.

    Raises:
        ShapeError: The rows of two parts have other shapes.
        StoreError: One is missing, damaged, or of another run; the message says how to make it.
    """

    def __init__(self, path: Path, found: PartsFound | None = None) -> None:
        self.path = path
        found = found or _all_parts(path)
        self.complete = True
        self.n_parts = found.n
        self.size_bytes = 0
        self._files: list[tuple[Path, _Stamp]] = []
        sizes: list[int] = []
        ids: list[Array] = []
        status: list[Array] = []
        labels: list[Array] = []
        texts: list[str] = []
        columns: list[dict[str, Column]] = []
        pieces: dict[str, list[_Rows]] = {}
        numbers: dict[str, list[Array]] = {}  # one a row
        first: Embeddings | None = None
        for number in sorted(number for number, size in found.sizes.items() if size):
            file = part_path(path, number)
            try:
                stamp = _stamp(os.stat(file))
            except FileNotFoundError:
                raise _replaced(file) from None
            part = Embeddings(file)
            first = first or part
            self._files.append((file, stamp))
            self.size_bytes += part.size_bytes
            ids.append(part._encoded_ids)
            sizes.append(part.n_rows)
            status.append(part.status)
            labels += [] if part.labels is None else [part.labels]
            if found.kind == "shard":
                texts += part.label_texts() or [""] * part.n_rows
            columns.append(part.metadata)
            for field in part.fields:
                rows = part.streamed[field.name]
                if field.shape:
                    place = _Rows(file, stamp, rows.shape, rows.dtype, part.offsets[field.name])
                    pieces.setdefault(field.name, []).append(place)
                else:
                    numbers.setdefault(field.name, []).append(np.array(rows))
        assert first is not None  # a part without rows has no file
        own = {key: said for key, said in first.attrs.items() if key not in found.about(0)}
        self.n_rows = sum(sizes)
        self.attrs = {**own, "id": found.of, "n_rows": self.n_rows}
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._encoded_ids = np.concatenate(ids)
        self.status = np.concatenate(status)
        self.labels, self.label_names = None, []
        if found.kind == "shard" and "labels" not in numbers:
            # Each counts through the names that it has seen.
            self.label_names = sorted(set(texts) - {""}, key=numbers_first)
            index = {"": -1, **{name: i for i, name in enumerate(self.label_names)}}
            if self.label_names:
                self.labels = np.array([index[text] for text in texts], np.int32)
        elif labels:
            self.labels, self.label_names = np.concatenate(labels), first.label_names
        named = {name for column in columns for name in column}
        self.metadata = {
            name: concatenated(
                [(n, column.get(name)) for n, column in zip(sizes, columns, strict=True)]
            )
            for name in sorted(named, key=column_name)
        }
        streamed = {}
        for field in first.fields:
            if field.shape:
                stacked = Stacked(pieces[field.name], sizes, shape=field.shape, dtype=field.dtype)
                streamed[field.name] = cast(Array, stacked)
            else:
                streamed[field.name] = np.concatenate(numbers[field.name])
        self._take(first.fields, streamed)

    def _opened(self) -> Iterator[tuple[int, Embeddings]]:
        """The parts one after the other, each with the number of its first row."""
        for start, (file, stamp) in zip(self._starts, self._files, strict=False):
            if not file.exists() or _stamp(os.stat(file)) != stamp:
                raise _replaced(file)
            yield start, Embeddings(file)

    def checksums(self) -> Array:
        return np.concatenate([part.checksums() for _, part in self._opened()])

    def verify(self) -> list[int]:
        return [start + row for start, part in self._opened() for row in part.verify()]

    def reasons(self) -> list[dict[str, Any]]:
        return [
            {**one, "row": start + one["row"]}
            for start, part in self._opened()
            for one in part.reasons()
        ]

    def row_file(self, row: int) -> Path:
        return self._files[bisect.bisect_right(self._starts, row) - 1][0]


_Stamp = tuple[int, int, int, int]


def _stamp(about: os.stat_result) -> _Stamp:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _replaced(path: Path) -> StoreError:
    return StoreError(f"{path} was joined, moved, removed or replaced meanwhile; open it again")


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows in a file that is opened when they are wanted: of all parts the files could not be."""

    path: Path
    stamp: _Stamp
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    def __call__(self) -> Array:
        try:
            with self.path.open("rb") as file:
                if _stamp(os.fstat(file.fileno())) != self.stamp:
                    raise _replaced(self.path)
                return np.memmap(file, self.dtype, "r", self.offset, self.shape)
        except FileNotFoundError:
            raise _replaced(self.path) from None
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror or error}") from error


def _all_parts(path: Path) -> PartsFound:
    """The parts of a file, of which none may be missing.

    Raises:
        ShapeError: The rows of two parts have other shapes.
        StoreError: One is missing, damaged or of another run, or it is not known which there are.
    """
    of, n, kind = (*_parts_mark(path), "", "", "")[:3]
    if kind not in ("part", "shard") or not 0 < len(n) < 8 or not n.isdecimal():
        raise StoreError(
            f"{parts_folder(path) / _PARTS_MARK} does not say which parts of {path} there are to "
            "be; run the command that made them again"
        )
    found = PartsFound(path, of=of, n=int(n), kind=cast(PartKind, kind))
    missing = [number for number in range(found.n) if not found.add(number)]
    if missing or found.fields is None:
        number = (*missing, 0)[0]
        begun = PartReader(part_path(path, number)).read()
        there = f"{begun.rows_done:,} of {begun.attrs['n_rows']:,} rows" if begun.attrs else ""
        state = f"is not finished, it has {there}" if there else "is missing"
        others = f", as {'are' if len(missing) > 2 else 'is'} {len(missing) - 1:,} more"
        raise StoreError(
            f"{path} is not joined yet, {len(found.sizes):,} of {found.n:,} {kind}s are there: "
            f"{found.title(number)} {state}{others if len(missing) > 1 else ''}; the command that "
            f"made them makes it with n_parts={found.n} part={number}, and without part all that "
            "are missing, which it then joins"
        )
    return found


def _unjoined(where: Path) -> Path | None:
    """The file whose parts are what a path names; None where it names something else."""
    if where.name.endswith(_PARTS) and where.is_dir():
        path = where.with_name(where.name.removesuffix(_PARTS))
        return path if parts_id(path) is not None else None
    path = where / EMBEDDINGS_NAME if where.is_dir() else where
    is_begun = not path.exists() and parts_id(path) is not None and _has_parts(path)
    return path if is_begun else None


def are_there(path: Path) -> bool:
    """Whether there are embeddings at ``path``: the file, or parts of it."""
    return path.is_file() or _unjoined(path) is not None


@checked
def open(path: str | os.PathLike[str] | Embeddings) -> Embeddings:
    """Open an embeddings file, or the folder that holds one, for reading.

    The finished parts of a run (``n_parts``) are read as the file that joining them makes, without
    joining: the same ids, labels, metadata and rows. What has more than one number a row is then no
    memory map, but indexed as one: ``rows[5:9]``, ``rows[[3, 1]]``; ``numpy.asarray`` reads all.

    Args:
        path: ``embeddings.h5``, its folder, a ``.partial`` file (its committed rows), or the folder
            of parts ``embeddings.h5.parts``; a run's folder means its parts as long as they are not
            joined. Opened embeddings are given back as they are.

    Returns:
        The embeddings, memory-mapped.

    Raises:
        ConfigError: ``path`` is neither a path nor opened embeddings.
        ShapeError: The rows of two parts have other shapes.
        StoreError: It is not there, unfinished, damaged, or not a file of embedx; of parts, one is
            missing, damaged or of another run.
    """
    if isinstance(path, Embeddings):
        return path
    if (unjoined := _unjoined(Path(path))) is not None:
        try:
            return Parts(unjoined)
        except StoreError:
            if _unjoined(Path(path)) is not None:
                raise
            # They were joined while they were opened.
    found = find_embeddings(path)
    if Path(path).is_dir() and parts_replace(found):
        log.warning(
            "%s is to be replaced by the parts beside it; run the command that makes these again, "
            "without overwrite=true, to have them joined",
            found,
        )
    return Embeddings(found)


# --------------------------------------------------------------------------- files of arrays


def write_arrays(
    path: Path, *, format: str, attrs: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Path:
    """Write a file of arrays, whole or not at all.

    Args:
        path: Where to.
        format: What the file says it is.
        attrs: Root attributes.
        arrays: Datasets by path, of numbers or of :func:`encode_texts`.

    Raises:
        StoreError: The disk refused.
    """
    image = io.BytesIO()
    with h5py.File(image, "w", libver="earliest") as file:
        # A parameter of the user's own may have any name, but not make another format of the file.
        for key, value in {**attrs, "format": format, "version": FORMAT_VERSION}.items():
            file.attrs[key] = value
        for name, array in arrays.items():
            kind = _h5_type(array.dtype)
            file.create_dataset(name, data=array.astype(kind, copy=False), track_times=False)
    image.seek(0, os.SEEK_END)
    image.write(_footer(zlib.crc32(image.getbuffer()), []))
    return replace_file(path, image.getbuffer())


def read_arrays(
    path: Path, *, format: str, names: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The root attributes of a file of :func:`write_arrays`, and some of its arrays by name.

    Raises:
        StoreError: It is not there, damaged, of another format, or has no such array.
    """
    with _reading(path), _Skeleton(path) as skeleton:
        if format == PART_FORMAT and not skeleton.is_as_laid_out:  # its checksum is torn off
            raise skeleton._foreign("its end is missing")
        return skeleton.attrs(format), {name: np.array(skeleton.map(name)) for name in names}


# --------------------------------------------------------------------------- projections


@dataclasses.dataclass(frozen=True)
class Projection:
    """A projection file.

    Attributes:
        path: The file.
        coords: Shape ``(n, m)`` float32, row-aligned with the parent; NaN for failed rows.
        ids: n texts, those of the parent.
        attrs: ``method``, ``layer``, ``parent``, ``seed``, every parameter, every score.
        state: Arrays of the fitted projection, by name.
        row_scores: Scores of each row, shape ``(n,)``, by name; NaN where there is none.
    """

    path: Path
    coords: Array
    ids: list[str]
    attrs: dict[str, Any]
    state: dict[str, Array]
    row_scores: dict[str, Array]

    def __repr__(self) -> str:
        return f"<Projection {self.path}: coords {self.coords.shape}>"

    @property
    def name(self) -> str:
        """Its slug, such as ``umap-1a2b3c``."""
        return self.path.stem


def write_projection(
    path: Path,
    *,
    coords: Array,
    ids: Sequence[str],
    attrs: Mapping[str, Any],
    state: Mapping[str, Array] | None = None,
    row_scores: Mapping[str, Array] | None = None,
) -> Path:
    """Write a projection file, whole or not at all.

    Args:
        path: Where to.
        coords: Shape ``(n, m)``.
        ids: n texts.
        attrs: Root attributes; ``id`` must be there.
        state: Arrays to keep for placing new rows.
        row_scores: Scores of each row, shape ``(n,)``.

    Raises:
        StoreError: The disk refused.
    """
    arrays = {
        "coords": np.asarray(coords, dtype=np.float32),
        "ids": encode_texts(ids, what="the id"),
        **{f"state/{name}": np.asarray(array) for name, array in (state or {}).items()},
        **{f"row_scores/{name}": array for name, array in (row_scores or {}).items()},
    }
    return write_arrays(path, format=PROJECTION_FORMAT, attrs=attrs, arrays=arrays)


def open_projection(path: str | os.PathLike[str]) -> Projection:
    """Open a projection file.

    Raises:
        StoreError: It is not there, damaged, or not a projection of embedx.
    """
    path = Path(path)
    with _reading(path), _Skeleton(path) as skeleton:
        attrs = _projection_attrs(skeleton)
        skeleton.expect("ids", (None,), "S")
        ids = _decode(skeleton.map("ids"))
        skeleton.expect("coords", (len(ids), None), "f", 4)
        coords = np.array(skeleton.map("coords"))
        state = {
            name.removeprefix("state/"): np.array(skeleton.map(name))
            for name in skeleton.names("state")
        }
        row_scores = {}
        for name in skeleton.names("row_scores"):
            skeleton.expect(name, (len(ids),), "f", 4)
            row_scores[name.removeprefix("row_scores/")] = np.array(skeleton.map(name))
    return Projection(
        path=path, coords=coords, ids=ids, attrs=attrs, state=state, row_scores=row_scores
    )


def _projection_attrs(skeleton: _Skeleton) -> dict[str, Any]:
    attrs = skeleton.attrs(PROJECTION_FORMAT)
    texts = all(isinstance(attrs[key], str) for key in ("parent", "method", "layer"))
    score = attrs.get("trustworthiness", 0.0)
    if not texts or not isinstance(score, (int, float)):
        raise StoreError(
            f"{skeleton.path} is damaged: its attributes are of other types; make it anew"
        )
    return attrs


def _projection_files(embeddings: Embeddings) -> dict[str, Path]:
    """What lies in the folder of an embeddings file's projections, by name, sorted."""
    folder = embeddings.path.parent / "projections"
    return {path.stem: path for path in sorted(folder.glob("*.h5"))}


def projections_of(embeddings: Embeddings, chosen: Sequence[str] | None = None) -> list[Projection]:
    """The projections of an embeddings file: those chosen, or all below its folder.

    Args:
        embeddings: The opened file.
        chosen: Paths, or names such as ``umap-1a2b3c`` or ``umap``; None for all.

    Returns:
        Each file once: those chosen in the order of ``chosen``, else all of them sorted by name.

    Raises:
        StoreError: A chosen one is not there or belongs to other embeddings, or one is damaged.
    """
    found = _projection_files(embeddings)
    paths = list(found.values()) if chosen is None else []
    for name in chosen or ():
        matches = [p for stem, p in found.items() if name in (stem, stem.rsplit("-", 1)[0])]
        if not matches and Path(name).exists():
            matches = [Path(name)]
        if not matches:
            raise StoreError(
                f"there is no projection {name!r} of {embeddings.path}; there are: "
                + (", ".join(found) or "none yet, make one with: python -m embedx project")
            )
        paths += matches
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    opened = []
    for path in once.values():
        projection = open_projection(path)
        is_own = embeddings.is_parent_of(projection.attrs)
        if not is_own and chosen is None:
            log.warning("%s was made of other embeddings: passed over", path)
            continue
        if not is_own or projection.ids != embeddings.ids:
            other = "has other rows" if is_own else "belongs to other embeddings"
            raise StoreError(
                f"{path} {other} than {embeddings.path}; project them anew with overwrite=true"
            )
        opened.append(projection)
    return opened


# --------------------------------------------------------------------------- maps


@dataclasses.dataclass(frozen=True)
class Maps:
    """A file of maps of what the score of a class hangs on, for m samples.

    Attributes:
        path: The file.
        attrs: ``method``, ``model``, ``weights_sha256``, what the method was given, ...
        ids: m texts.
        rows: Number of each sample in its data, shape ``(m,)``.
        status: Shape ``(m,)`` uint8 of :class:`Status`.
        targets: The class, shape ``(m,)`` int32; -1 for failed rows.
        maps: Shape ``(m, h, w)`` or ``(m, c, h, w)`` float32, memory-mapped; NaN for failed rows.
        labels: Shape ``(m,)`` int32, -1 for none; None without labels.
        label_names: Names of the labels; empty where each is its own.
        columns: ``scores``, ``shares`` and further figures, shape ``(m,)``, by name.
    """

    path: Path
    attrs: dict[str, Any]
    ids: list[str]
    rows: Array
    status: Array
    targets: Array
    maps: Array
    labels: Array | None
    label_names: list[str]
    columns: dict[str, Array]

    def __repr__(self) -> str:
        return f"<Maps {self.path}: {self.attrs['method']} {self.maps.shape}>"

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Shape ``(m,)``: the rows that hold a map."""
        mask: npt.NDArray[np.bool_] = self.status == Status.OK
        return mask


def write_maps(
    path: Path,
    *,
    method: str,
    maps: Array,
    ids: Sequence[str],
    rows: Array,
    status: Array,
    targets: Array,
    columns: Mapping[str, Array],
    attrs: Mapping[str, Any],
    labels: Array | None = None,
    label_names: Sequence[str] = (),
) -> Path:
    """Write a file of maps, whole or not at all; the arguments are those of :class:`Maps`.

    Raises:
        StoreError: The disk refused.
    """
    arrays = {
        f"maps/{method}": np.asarray(maps, dtype=np.float32),
        "ids": encode_texts(ids, what="the id"),
        "rows": np.asarray(rows, dtype=np.int64),
        "status": np.asarray(status, dtype=np.uint8),
        "targets": np.asarray(targets, dtype=np.int32),
        **{f"columns/{name}": np.asarray(one, np.float32) for name, one in columns.items()},
    }
    if labels is not None:
        arrays["labels"] = np.asarray(labels, dtype=np.int32)
        if label_names:
            arrays["label_names"] = encode_texts(label_names, what="the label")
    return write_arrays(path, format=MAPS_FORMAT, attrs={**attrs, "method": method}, arrays=arrays)


def open_maps(path: str | os.PathLike[str]) -> Maps:
    """Open a file of maps.

    Raises:
        StoreError: It is not there, damaged, or no file of maps of embedx.
    """
    path = Path(path)
    with _reading(path), _Skeleton(path) as skeleton:
        attrs = skeleton.attrs(MAPS_FORMAT)
        name = f"maps/{attrs['method']}"
        skeleton.expect("ids", (None,), "S")
        ids = _decode(skeleton.map("ids"))
        n = len(ids)
        maps = skeleton.map(name)
        skeleton.expect(name, (n, *[None] * (3 if maps.ndim == 4 else 2)), "f", 4)
        skeleton.expect("rows", (n,), "i", 8)
        skeleton.expect("status", (n,), "u", 1)
        skeleton.expect("targets", (n,), "i", 4)
        labels, label_names = None, []
        if skeleton.has("labels"):
            skeleton.expect("labels", (n,), "i", 4)
            labels = np.array(skeleton.map("labels"))
            if skeleton.has("label_names"):
                skeleton.expect("label_names", (None,), "S")
                label_names = _decode(skeleton.map("label_names"))
        columns = {}
        for one in skeleton.names("columns"):
            skeleton.expect(one, (n,), "f", 4)
            columns[one.removeprefix("columns/")] = np.array(skeleton.map(one))
        return Maps(
            path=path,
            attrs=attrs,
            ids=ids,
            rows=np.array(skeleton.map("rows")),
            status=np.array(skeleton.map("status")),
            targets=np.array(skeleton.map("targets")),
            maps=maps,
            labels=labels,
            label_names=label_names,
            columns=columns,
        )


def describe(path: str | os.PathLike[str] | Embeddings, *, verify: bool = False) -> dict[str, Any]:
    """What a file of embedx holds, as plain values in the order to show them.

    Args:
        path: A file of embeddings, of a projection or of maps, a ``.partial`` file, the folder of a
            run or of an explanation, or an opened file, of which nothing is read again.
        verify: Check every row against its checksum; a projection and maps have one of the whole.

    Raises:
        StoreError: It is not a file of embedx, or holds pictures alone, or with ``verify`` rows do
            not match.
    """
    if not isinstance(path, Embeddings) and (unjoined := _unjoined(Path(path))) is not None:
        path = Parts(unjoined)
    if isinstance(path, Embeddings):
        opened, path = path, path.path
    else:
        path = Path(path)
        if path.is_dir() or not path.exists():
            path = _find_described(path)
        with _reading(path), _Skeleton(path) as skeleton:
            kind = _plain(skeleton._file.attrs.get("format"))
            is_whole = skeleton.is_as_laid_out  # else it would not have opened
        words = (
            "the checksum of the file matches"
            if is_whole
            else "no: the file has lost its checksum, another program opened it for writing"
        )
        verified = {"verified": words} if verify else {}
        if kind == PROJECTION_FORMAT:
            projection = open_projection(path)
            shape = list(projection.coords.shape)
            return {"file": str(path), **projection.attrs, "coords": shape} | {
                "file": str(path),
                **verified,
            }
        if kind == MAPS_FORMAT:
            maps = open_maps(path)
            held = {
                "rows": len(maps.ids),
                "failed_rows": int((~maps.ok).sum()),
                f"maps/{maps.attrs['method']}": f"{list(maps.maps.shape)} {maps.maps.dtype}",
            }
            return {"file": str(path), **held, **maps.attrs} | {
                "file": str(path),
                **held,
                **verified,
            }
        opened = Embeddings(path)
    about: dict[str, Any]
    failed = int((opened.status == Status.FAILED).sum())
    about = {
        "file": str(path),
        "complete": opened.complete,
        **({"parts": f"{opened.n_parts:,}, not joined"} if isinstance(opened, Parts) else {}),
        "rows": opened.n_rows,
        "rows_expected": int(opened.attrs["n_rows"]),
        "failed_rows": failed,
        "size_mb": round(opened.size_bytes / 1e6, 1),
    }
    for point, rows in opened.embeddings.items():
        about[f"embeddings/{point}"] = f"{list(rows.shape)} {rows.dtype}"
    for name, output in opened.outputs.items():
        about[f"outputs/{name}"] = f"{list(output.shape)} {output.dtype}"
    if opened.thumbnails is not None:
        about["thumbnails"] = f"{list(opened.thumbnails.shape)} {opened.thumbnails.dtype}"
    if opened.labels is not None:
        n_used = len(set(opened.label_texts() or ()) - {""})
        about["labels"] = f"{len(opened.label_names) or n_used} classes"
    about.update({f"metadata/{name}": len(col) for name, col in opened.metadata.items()})
    hidden = {"n_rows", "row_fields", *about}
    about.update({key: value for key, value in opened.attrs.items() if key not in hidden})
    about.update(_described_projections(opened))
    if verify:
        if bad := opened.verify():
            file = opened.row_file(bad[0])
            within = "" if file == path else f" in {file}"
            anew = "the file" if file == path else "that part"
            raise StoreError(
                f"{path}: {len(bad)} of {opened.n_rows} rows do not match their checksum, "
                f"first row {bad[0]} ({opened.ids[bad[0]]}){within}; make {anew} anew"
            )
        about["verified"] = f"all {opened.n_rows} checksums match"
    return about


def _find_described(path: Path) -> Path:
    """The file that a folder stands for, which may be that of an explanation.

    Raises:
        StoreError: There is none.
    """
    if (path / EMBEDDINGS_NAME).exists() or not path.is_dir():
        return find_embeddings(path)
    if (path / MAPS_NAME).exists():
        return path / MAPS_NAME
    if (path / "config.yaml").is_file() and (n_pictures := len(list(path.glob("*.png")))):
        raise StoreError(
            f"{path} holds {n_pictures} pictures of feature maps and no file of numbers; look at "
            "them, their settings are in its config.yaml"
        )
    if explained := sorted(one.parent for one in path.glob("explain/*/config.yaml")):
        raise StoreError(
            f"{path} holds no {EMBEDDINGS_NAME}, and explanations: "
            f"{listed([str(one) for one in explained])}; name one of them"
        )
    return find_embeddings(path)


def _described_projections(embeddings: Embeddings) -> dict[str, list[str]]:
    """The names of the projections beside an embeddings file, those that are damaged apart."""
    own, damaged = [], []
    for name, path in _projection_files(embeddings).items():
        try:
            with _reading(path), _Skeleton(path) as skeleton:
                attrs = _projection_attrs(skeleton)
        except StoreError as error:
            damaged.append(f"{name} ({error})")
            continue
        if embeddings.is_parent_of(attrs):
            own.append(name)
        else:
            log.warning("%s was made of other embeddings: passed over", path)
    return {"projections": own, **({"damaged projections": damaged} if damaged else {})}
