"""Embeddings files: written row by row, and gone on with."""

import contextlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

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
)
from embedx.errors import InUseError, StoreError
from embedx.layout import (
    BOOKKEEPING,
    BOOLEAN,
    COMPLETE,
    EMBEDDINGS_FORMAT,
    FORMAT_VERSION,
    PAGE_BYTES,
    RUNNING,
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
    reading,
    row_checksums,
    run_bytes,
)
from embedx.matrix import Array
from embedx.unfinished import (
    append_reasons,
    discard_partial,
    errors_path,
    partial_path,
    read_reasons,
    reason_lines,
    require_no_parts,
    running_errors_path,
    sweep,
)

COMMIT_BYTES = 64 * 2**20
COMMIT_S = 2.0


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
            self._begin_commit(RUNNING)
        else:
            self._commit_later(COMMIT_S)

    def commit(self) -> None:
        """Make every appended row durable, then say so in a commit record.

        Raises:
            StoreError: The disk refused; the rows of earlier commits stand.
            InUseError: Another process took over the file.
        """
        with self._mutex:
            self._begin_commit(RUNNING)
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
        self._begin_commit(COMPLETE)
        self._settle()
        with self._fatal():
            # Both records now become those of a file written in one go, the newest last, so that
            # an interrupted run ends with the same bytes as one that was not.
            for last in (self._sequence + 1, self._sequence):
                number = 2 - last % 2  # as odd or even as the one that it follows in its slot
                self._put_record(Record(number, self.n_rows, 0, COMPLETE, self._run))
            self._require_own()
            # The file takes its name last: whatever stops us before, the next run comes by again.
            if not self.n_failed:
                self._disk.remove(errors_path(self.path))
            elif running_errors_path(self.path).exists():
                self._disk.rename(running_errors_path(self.path), errors_path(self.path))
            self._disk.rename(partial_path(self.path), self.path)
        self.close()
        return self.path

    def discard(self) -> None:
        """Take the unfinished file away: it holds nothing worth going on with."""
        with self._mutex:
            self._thread.shutdown()
            with self._fatal():
                self._require_own()
                discard_partial(self.path)
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
        if self._written == self.rows_done and state == RUNNING:
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
            append_reasons(self.path, reasons, self._disk)
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
                self._begin_commit(RUNNING)
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
            column_attrs[column_name(name)] = {"type": BOOLEAN}
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
        sweep(path)
        run = run_bytes(str(attrs["id"]))
        first = Record(1, 0, 0, RUNNING, run)
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
        disk.remove(running_errors_path(path))
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
        sweep(path)
        listing = running_errors_path(path)
        if listing.exists():
            own = dict(zip(failed.tolist(), names, strict=True))
            if kept := read_reasons(partial, ids=own):
                replace_file(listing, reason_lines(kept), disk=disk)
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
