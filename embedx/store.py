"""Embeddings files: written row by row, gone on with, read, also part by part."""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

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
from embedx.errors import InUseError, ShapeError, StoreError
from embedx.layout import (
    BOOKKEEPING,
    EMBEDDINGS_FORMAT,
    FORMAT_VERSION,
    PAGE_BYTES,
    Field,
    Record,
    Skeleton,
    Status,
    are_unique,
    bad_rows,
    column_name,
    crc_outside,
    decoded,
    encode_texts,
    footer,
    lay_out,
    newest_record,
    plain_name,
    point_of,
    reading,
    row_checksums,
    run_bytes,
    stored_texts,
)
from embedx.matrix import Array, Stacked

if TYPE_CHECKING:
    import pandas


log = logging.getLogger("embedx")
EMBEDDINGS_NAME = "embeddings.h5"
COMMIT_BYTES = 64 * 2**20
COMMIT_S = 2.0
_RUNNING, _COMPLETE = 1, 2


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
        newest: Record,
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
        self._committing: tuple[Record, Future[None]] | None = None
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
        checksums = row_checksums(status, parts)
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
                self._put_record(Record(number, self.n_rows, 0, _COMPLETE, self._run))
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

    def _put_record(self, record: Record) -> None:
        self._disk.write_all(self._fd, record.pack(), self._offsets["commit"] + record.place)
        self._disk.sync(self._fd)

    def _begin_commit(self, state: int) -> None:
        self._settle()
        if self._written == self.rows_done and state == _RUNNING:
            return
        record = Record(self._sequence + 1, self._written, self.rows_done, state, self._run)
        with self._fatal():
            self._committing = record, self._submitted(record, self._reasons)
        self._reasons = []
        self._uncommitted_bytes = 0
        self._committed_at = time.monotonic()

    def _submitted(self, record: Record, reasons: list[dict[str, Any]]) -> "Future[None]":
        try:
            return self._thread.submit(self._commit, record, reasons)
        except RuntimeError:  # the interpreter is about to end: its threads take no more work
            self._commit(record, reasons)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _commit(self, record: Record, reasons: Sequence[Mapping[str, Any]]) -> None:
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


# --------------------------------------------------------- what lies beside a file while it is made


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


PARTS_MARK = "of.txt"
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
                replace_file(parts_folder(path) / PARTS_MARK, mark.encode())
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
        mark = parts_folder(path) / PARTS_MARK
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
    return not (folder / PARTS_MARK).exists() and not any(one.is_dir() for one in folder.iterdir())


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
        if not are_unique(columns["ids"]):
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
    skeleton, offsets = lay_out(layout, root=root, attrs=attrs_of)
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
        run = run_bytes(str(attrs["id"]))
        first = Record(1, 0, 0, _RUNNING, run)
        n_bytes = skeleton.size + len(footer(0, regions))
        fd, tmp = temporary(path)
        try:
            disk.allocate(fd, n_bytes)  # a full disk shows here
            for page, data in sorted(skeleton.pages.items()):
                disk.write_all(fd, bytes(data[: skeleton.size - page]), page)
            for name, column in columns.items():
                disk.write_all(fd, column, offsets[name])
            checksum = crc_outside(fd, skeleton.size, regions)
            disk.write_all(fd, footer(checksum, regions), skeleton.size)
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
        with reading(partial), Skeleton(partial) as skeleton:
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
            run = run_bytes(str(attrs["id"]))
            offsets = skeleton.offsets([*(f.name for f in fields), *BOOKKEEPING])
            newest = newest_record(skeleton.map("commit"), n_rows=n_rows, run=run)
            if newest is None:
                raise StoreError(
                    f"{partial} holds no valid commit record; start anew with overwrite=true"
                )
            # All of them: what is read back is quick beside what it took to make it.
            if bad := bad_rows(skeleton.row_maps(fields), slice(0, newest.rows_done)):
                raise StoreError(
                    f"{partial}: row {bad[0]} does not match its checksum; start anew with "
                    "overwrite=true"
                )
            status = skeleton.map("status")[: newest.rows_done]
            failed = np.flatnonzero(status == Status.FAILED)
            names = decoded(skeleton.map("ids")[failed])
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
        with reading(path), Skeleton(path) as skeleton:
            self.attrs = skeleton.check_embeddings()
            fields = skeleton.fields()
            self._row_maps = skeleton.row_maps(fields)
            size = int(self.attrs["n_rows"])
            newest = newest_record(
                skeleton.map("commit"), n_rows=size, run=run_bytes(str(self.attrs["id"]))
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
                    self.label_names = decoded(skeleton.map("label_names"))
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
                plain = plain_name(name.removeprefix("metadata/"))
                self.metadata[plain] = decoded(column) if column.dtype.kind == "S" else column
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
        self.embeddings = {point_of(field.name): streamed[field.name] for field in points}
        self.point_attrs = {point_of(field.name): dict(field.attrs) for field in points}
        self.outputs = {
            name.removeprefix("outputs/"): rows
            for name, rows in streamed.items()
            if name.startswith("outputs/")
        }
        self.thumbnails = streamed.get("thumbnails")
        if not self.embeddings:
            raise StoreError(f"{self.path} holds no embeddings; make it anew")
        if not are_unique(self._encoded_ids):
            raise StoreError(f"{self.path} is damaged: ids come twice; make it anew")

    @functools.cached_property
    def ids(self) -> list[str]:
        """Those of all rows, n unique texts; made when first asked for."""
        return decoded(self._encoded_ids)

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

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """See that the file is still the one that was opened while something is put beside it.

        Raises:
            StoreError: It was moved, removed, or replaced by other rows, before or meanwhile.
        """
        self.require_there()
        yield
        try:
            self.require_there()
        except StoreError as error:
            raise StoreError(
                f"{error}, and make again what was just written: it is of the rows that were there"
            ) from None

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
        return bad_rows(self._row_maps, slice(0, self.n_rows))

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
    with reading(path), Skeleton(path) as skeleton:
        skeleton.check_embeddings()
        hashes = np.array(skeleton.map("item_hashes")) if skeleton.has("item_hashes") else None
        return decoded(skeleton.map("ids")), hashes


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


# ----------------------------------------------------------------------- parts that are read as one


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
            with reading(found), Skeleton(found) as skeleton:
                self.attrs = skeleton.check_embeddings()
                self.fields = [
                    dataclasses.replace(field, attrs=skeleton.dataset_attrs(field.name))
                    for field in skeleton.fields()
                ]
                self._commit = skeleton.map("commit")
        newest = newest_record(
            self._commit, n_rows=int(self.attrs["n_rows"]), run=run_bytes(str(self.attrs["id"]))
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
                stamp = file_stamp(os.stat(file))
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
            if not file.exists() or file_stamp(os.stat(file)) != stamp:
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


def file_stamp(about: os.stat_result) -> _Stamp:
    """What changes with a file that is replaced or written."""
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
                if file_stamp(os.fstat(file.fileno())) != self.stamp:
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
            f"{parts_folder(path) / PARTS_MARK} does not say which parts of {path} there are to "
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


def file_of_parts(where: Path) -> Path | None:
    """The file whose parts are what a path names; None where it names something else."""
    if where.name.endswith(_PARTS) and where.is_dir():
        path = where.with_name(where.name.removesuffix(_PARTS))
        return path if parts_id(path) is not None else None
    path = where / EMBEDDINGS_NAME if where.is_dir() else where
    is_begun = not path.exists() and parts_id(path) is not None and _has_parts(path)
    return path if is_begun else None


def are_there(path: Path) -> bool:
    """Whether there are embeddings at ``path``: the file, or parts of it."""
    return path.is_file() or file_of_parts(path) is not None


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
    if (unjoined := file_of_parts(Path(path))) is not None:
        try:
            return Parts(unjoined)
        except StoreError:
            if file_of_parts(Path(path)) is not None:
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
