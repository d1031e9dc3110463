"""Files and folders that take their name whole or not at all, and locks on them."""

import contextlib
import errno
import io
import logging
import math
import os
import re
import shutil
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from embedx.errors import InUseError, StoreError

Array = npt.NDArray[Any]

log = logging.getLogger("embedx")


class DiskIO:
    """The calls by which rows reach the disk, in one place so that tests can make each one fail."""

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write at ``offset``; how many bytes the disk took, which may be less than all."""
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Make the data of ``fd`` durable; on macOS only F_FULLFSYNC reaches the medium."""
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl; it reads files only
            os.fsync(fd)
            return
        if hasattr(fcntl, "F_FULLFSYNC"):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        elif hasattr(os, "fdatasync"):
            os.fdatasync(fd)
        else:
            os.fsync(fd)

    def allocate(self, fd: int, n_bytes: int) -> None:
        """Reserve ``n_bytes`` for ``fd``, or raise OSError(ENOSPC) while nothing is lost yet."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, n_bytes)
            return
        size = os.fstat(fd).st_size
        self.fill(fd, size, n_bytes - size)

    def fill(self, fd: int, offset: int, n_bytes: int) -> None:
        """Write zeros, so that the blocks are really there."""
        zeros, end = bytes(2**20), offset + n_bytes
        for start in range(offset, end, len(zeros)):
            self.write_all(fd, zeros[: end - start], start)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name, durably; a file that has it is replaced."""
        os.replace(old, new)
        self.sync_folder(new.parent)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        if os.name == "nt":
            return
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there, for good: it does not come back after a power cut."""
        if os.path.lexists(path):
            path.unlink()
            self.sync_folder(path.parent)

    def make_folder(self, folder: Path) -> list[Path]:
        """Make ``folder`` and those above it that are missing, durably; returns those made."""
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in made:
                self.sync_folder(path.parent)
        except OSError:
            remove_quietly(*made)
            raise
        return made

    def write_all(self, fd: int, data: Array | bytes | memoryview, offset: int) -> None:
        """Write all of ``data``, going on after short writes.

        Raises:
            OSError: The disk takes no more.
        """
        if isinstance(data, np.ndarray):
            view = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        else:
            view = memoryview(data)
        while view:
            done = self.pwrite(fd, view, offset)
            if done <= 0:
                raise OSError(errno.EIO, "the disk took no bytes")
            view, offset = view[done:], offset + done


DISK = DiskIO()


def temporary(path: Path) -> tuple[int, Path]:
    """A new file beside ``path`` that no other process or thread has, opened for writing."""
    sweep(path)
    while True:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        if _mark_alive(fd, Path(name)):
            os.fchmod(fd, 0o666 & ~_umask())
            return fd, Path(name)
        os.close(fd)


def _mark_alive(fd: int, path: Path) -> bool:
    """Lock a temporary file or folder for as long as ``fd`` is open, so that none sweeps it.

    Returns:
        Whether it is there still: another may have swept it before it was locked.
    """
    with contextlib.suppress(ImportError, OSError):  # a file system without: none sweeps there
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX)
    return is_name_of(path, os.fstat(fd))


def sweep(path: Path) -> None:
    """Remove what killed processes left beside a file or folder, and nothing of living ones.

    Where one was killed as it put a new folder in the place of an old one, the old one is put back.
    """
    left = re.compile(re.escape(f".{path.name}.") + r"[a-z0-9_]{8}\.(tmp|old)")
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        for name in os.listdir(path.parent):
            if not left.fullmatch(name):
                continue
            other = path.with_name(name)
            with contextlib.suppress(OSError):
                fd = os.open(other, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if name.endswith(".old") and not os.path.lexists(path):
                        os.rename(other, path)
                    elif other.is_dir():
                        shutil.rmtree(other)
                    else:
                        other.unlink()
                finally:
                    os.close(fd)


def open_own(path: Path, flags: int) -> int:
    """Open a file to write into it in place, and never through a link to a file of another's.

    Raises:
        StoreError: It is a link, has a second name, or is no plain file.
    """
    fd = -1
    refused = (errno.ELOOP, errno.EMLINK, errno.EISDIR)
    try:
        fd = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode) and about.st_nlink <= 1:
            return fd
    except OSError as error:
        if error.errno not in refused:
            raise
    if fd >= 0:
        os.close(fd)
    raise StoreError(
        f"{path} is a link, has a second name (a hard link), or is no plain file, and is not "
        "written to; remove it"
    )


def is_name_of(path: Path, opened: os.stat_result) -> bool:
    """Whether a name is still that of a file that was opened."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), opened)
    except OSError:
        return False


def replace_file(path: Path, data: bytes | memoryview, *, disk: DiskIO = DISK) -> Path:
    """Put ``data`` under ``path`` whole or not at all.

    Raises:
        StoreError: The disk is full or the folder cannot be written; ``path`` is as it was (or,
            where only making its new name durable failed, holds all of ``data``).
    """
    with replacing(path, n_bytes=len(data), disk=disk) as fd:
        disk.write_all(fd, data, 0)
    return path


@contextlib.contextmanager
def replacing(path: Path, *, n_bytes: int | None = None, disk: DiskIO = DISK) -> Iterator[int]:
    """A file to fill that takes the name ``path`` when the block ends, and else leaves no trace.

    Args:
        path: The name; what has it is replaced.
        n_bytes: How many bytes will come, for the message, where that is known.
        disk: The calls that reach the disk.

    Yields:
        The descriptor of an empty file beside ``path``, open for writing.

    Raises:
        StoreError: The disk refused; ``path`` is as it was (or, where only making its new name
            durable failed, is the new file).
    """
    tmp: Path | None = None
    made: list[Path] = []
    try:
        made = disk.make_folder(path.parent)
        fd, tmp = temporary(path)
        try:
            yield fd
            disk.sync(fd)
        finally:
            os.close(fd)
        disk.rename(tmp, path)
    except OSError as error:
        raise disk_error(error, path, n_bytes) from error
    finally:  # folders that the file now lies in are not empty, and stay
        remove_quietly(*([tmp] if tmp else []), *made)


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[io.BufferedRandom]:
    """The same as :func:`replacing`, as a file to write and to read back."""
    with replacing(path) as fd, os.fdopen(fd, "w+b", closefd=False) as file:
        yield file


@contextlib.contextmanager
def replacing_folder(folder: Path, *, foreign: Callable[[Path], set[str]]) -> Iterator[Path]:
    """A folder to fill that takes the place of ``folder`` whole when the block ends.

    Args:
        folder: A folder that is replaced, or nothing; a link stays, and what it leads to is
            replaced.
        foreign: Names in a folder that do not go with it: what somebody put there meanwhile stays.

    Yields:
        An empty folder beside it.

    Raises:
        StoreError: The disk refused; ``folder`` is as it was.
    """
    target = folder.resolve()
    new = old = None
    alive = at_old = -1
    try:
        DISK.make_folder(target.parent)
        sweep(target)
        while True:
            prefix = f".{target.name}."
            new = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=target.parent))
            alive = os.open(new, os.O_RDONLY)
            if _mark_alive(alive, new):
                break
            os.close(alive)
        new.chmod(0o777 & ~_umask())
        yield new
        if target.exists():
            at_old = os.open(target, os.O_RDONLY)
            _mark_alive(at_old, target)
            old = new.with_suffix(".old")
            os.replace(target, old)
        DISK.rename(new, target)
        if old is not None:
            for name in foreign(old):
                os.rename(old / name, target / name)
            shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        if old is not None and old.exists() and not target.exists():
            os.replace(old, target)
        if isinstance(error, StoreError):
            raise StoreError(str(error).replace(str(new), str(folder))) from error
        if isinstance(error, OSError):
            raise StoreError(
                f"cannot write {folder}: {error.strerror or error}; choose another out=FOLDER"
            ) from error
        raise
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        for fd in (alive, at_old):
            if fd >= 0:
                os.close(fd)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def disk_error(error: OSError, path: Path, n_bytes: int | None) -> StoreError:
    """What the disk refused, in one line; a StoreError is that already.

    Args:
        error: As it was raised.
        path: What was to be written.
        n_bytes: How many bytes it takes; None where that is not known.
    """
    if isinstance(error, StoreError):
        return error
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next(p for p in [path.parent, *path.parent.parents] if p.exists())
        free = shutil.disk_usage(folder).free
        needed = "more" if n_bytes is None else f"{math.ceil(n_bytes / 1e3):,} kB"
        return StoreError(
            f"no disk space for {path}: it needs {needed} and {folder} has "
            f"{free // 1000:,} kB free; free some, or work in another place"
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        for above in path.parents:
            if above.exists() and not above.is_dir():
                return StoreError(f"{above} is a file, and a folder is needed; choose another out")
    return StoreError(f"cannot write {path}: {error.strerror or error}; check the path")


_THIS_PROCESS = "this process"
_WAIT_S = 0.1


class Lock:
    """An advisory lock that dies with its process and is not inherited by forked workers.

    On Linux it is that of an open file. Elsewhere it is the process's, does not hold within it,
    which is what ``held`` is for, and ends when the process closes any file of the name, as a copy
    of the folder does.
    """

    held: ClassVar[dict[Path, int]] = {}  # by which process: one forked of it has a copy of this
    _open: ClassVar[set[int]] = set()  # descriptors that hold a lock, in the process that opened it
    _turn: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".lock")
        self._target = target
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            InUseError: Another has it, or this process already.
            OSError: The file of the lock cannot be written.
        """
        if owner := self.take():
            is_ours = owner == _THIS_PROCESS
            mend = "close it first" if is_ours else "wait for it, or choose another name=..."
            raise InUseError(f"{self._target} is being written by {owner}; {mend}")

    def take(self) -> str:
        """Take the lock.

        Returns:
            Who has it; "" where it was free and is ours now.

        Raises:
            OSError: The file of the lock cannot be written; a StoreError where it is a link, or
                on Windows.
        """
        try:
            import fcntl
        except ImportError:
            raise StoreError(
                f"cannot write {self._target}: on Windows embedx reads files only; write them on "
                "Linux or macOS, or under WSL"
            ) from None
        with self._turn:
            return self._take(fcntl)

    def _take(self, fcntl: Any) -> str:
        key = self.path.parent.resolve() / self.path.name
        if self.held.get(key) == os.getpid():
            return _THIS_PROCESS
        while True:
            fd = open_own(self.path, os.O_RDWR | os.O_CREAT)
            try:
                _lock_whole(fd, fcntl)
            except OSError as error:
                owner = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
                os.close(fd)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                return owner or "another process"
            # The owner removes the file when it is done: only a lock on the present file counts.
            about = os.fstat(fd)
            if is_name_of(self.path, about):
                break
            os.close(fd)
        with contextlib.suppress(OSError):  # a full disk: it holds all the same
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._fd = fd
        self._open.add(fd)
        self._about = about
        self._key = key
        self._pid = self.held[key] = os.getpid()
        return ""

    @property
    def is_held(self) -> bool:
        """Whether the lock still keeps others out: one that is removed by hand lets them in, and
        so does that of the process that this one was forked of.
        """
        is_ours = self._fd >= 0 and self._pid == os.getpid()
        return is_ours and is_name_of(self.path, self._about)

    def require_held(self) -> None:
        """Make sure of that, before what others may have written meanwhile is replaced.

        Raises:
            InUseError: The lock was removed.
        """
        if not self.is_held:
            raise InUseError(
                f"{self.path} was removed or replaced while {self._target} was being written, so "
                "that another may have written it; this one stopped"
            )

    def release(self) -> None:
        """Let go of the lock and remove its file; harmless when repeated."""
        with self._turn:
            # That of the process we were forked of is not ours; to close its file here would end a
            # lock of our own on it.
            if self._fd < 0 or self._pid != os.getpid():
                return
            self.held.pop(self._key, None)
            if self.is_held:  # else it is that of another who took it meanwhile
                with contextlib.suppress(OSError):  # a disk gone read-only: it ends all the same
                    self.path.unlink()
            self._open.discard(self._fd)
            os.close(self._fd)
            self._fd = -1

    @classmethod
    def let_go(cls) -> None:
        """In a process that was forked: an open file's lock lasts while any process has it open."""
        while cls._open:
            os.close(cls._open.pop())


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=Lock.let_go)


def _lock_whole(fd: int, fcntl: Any) -> None:
    """Lock a file, which another open file of it cannot be, in this process or in another.

    Raises:
        OSError: It is locked already.
    """
    if sys.platform == "linux":
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(fd, getattr(fcntl, "F_OFD_SETLK", _F_OFD_SETLK), whole)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has none of these
                raise
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


_F_OFD_SETLK = 37  # of Linux; Python has the name where it was built with it


@contextlib.contextmanager
def writing_lock(target: Path) -> Iterator[Lock]:
    """Hold the lock of a file that is to be written; its folder is made where it is missing.

    Raises:
        InUseError: Another has it.
        StoreError: The folder cannot be written.
    """
    lock = Lock(target)
    try:
        DISK.make_folder(target.parent)
        lock.acquire()
    except OSError as error:
        raise disk_error(error, lock.path, None) from error
    try:
        yield lock
    finally:
        lock.release()


def require_idle(target: Path) -> None:
    """Raise InUseError if another writes a file."""
    lock = Lock(target)
    if os.path.lexists(lock.path):
        with writing_lock(target):
            pass


@contextlib.contextmanager
def waiting_lock(target: Path, *, work: str) -> Iterator[None]:
    """Hold the lock of a file that is to be written; whoever has it is waited for.

    Args:
        target: The file.
        work: What the holder does, for the log line.

    Raises:
        OSError: The folder cannot be written.
    """
    lock = Lock(target)
    said = False
    while owner := lock.take():
        if not said:
            log.info("waiting for %s, which %s", owner, work)
        said = True
        time.sleep(_WAIT_S)
    try:
        yield
    finally:
        lock.release()


def remove_quietly(*paths: Path) -> None:
    """Remove files and empty folders, as far as that goes."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()
