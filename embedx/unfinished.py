"""What lies beside an embeddings file while it is made: itself half-made, parts, reasons."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from embedx.disk import (
    DISK,
    DiskIO,
    disk_error,
    open_own,
    remove_quietly,
    replace_file,
    waiting_lock,
)
from embedx.errors import StoreError
from embedx.layout import stored_texts

PARTIAL = ".partial"


def partial_path(path: Path) -> Path:
    """The name of ``path`` while it is being written."""
    return path.with_name(path.name + PARTIAL)


def discard_partial(path: Path) -> None:
    """Remove what an interrupted run left of ``path``; the lock must be ours.

    Raises:
        StoreError: The disk refused.
    """
    try:
        for file in (partial_path(path), running_errors_path(path)):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error, path, 0) from error


PARTS = ".parts"


def parts_folder(path: Path) -> Path:
    """Where the parts of a recording or of a run lie until they are joined."""
    return path.with_name(path.name + PARTS)


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
EMPTY_MARK = "empty.txt"
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
            if parts_mark(path)[:3] != [of, str(n), kind] or replaces != parts_replace(path):
                mark = f"{of}\n{n}\n{kind}\n" + f"{_REPLACES}\n" * replaces
                replace_file(parts_folder(path) / PARTS_MARK, mark.encode())
    except OSError as error:
        raise disk_error(error, path, None) from error


def end_parts(path: Path) -> None:
    """Take the folder for parts away if there is no part in it."""
    if parts_id(path) is not None and not has_parts(path):
        remove_parts(path)


def has_parts(path: Path) -> bool:
    return next(parts_folder(path).glob(f"*/{path.name}*"), None) is not None


def parts_id(path: Path) -> str | None:
    """The id of the extraction whose parts lie there; None of none, and of a recording."""
    marked = parts_mark(path)
    return marked[0] if marked else None


def parts_number(path: Path) -> int | None:
    """How many parts there are to be; None where there are none, or it is not known."""
    marked = parts_mark(path)
    return int(marked[1]) if len(marked) > 1 and marked[1].isdecimal() else None


def parts_replace(path: Path) -> bool:
    """Whether the parts that lie there are to replace a file that is there."""
    return _REPLACES in parts_mark(path)[3:]


def parts_mark(path: Path) -> list[str]:
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
    replace_file(part_path(path, number).with_name(EMPTY_MARK), b"")


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
        if not has_parts(path):
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


def append_reasons(path: Path, reasons: Sequence[Mapping[str, Any]], disk: DiskIO) -> None:
    listing = running_errors_path(path)
    is_new = not listing.exists()
    fd = open_own(listing, os.O_RDWR | os.O_CREAT)
    try:
        disk.write_all(fd, reason_lines(reasons), os.fstat(fd).st_size)
        disk.sync(fd)
    finally:
        os.close(fd)
    if is_new:
        disk.sync_folder(path.parent)


def reason_lines(reasons: Sequence[Mapping[str, Any]]) -> bytes:
    """In ASCII: ids hold any character, and a line must end where it seems to."""
    return "".join(json.dumps(reason) + "\n" for reason in reasons).encode("ascii")


def running_errors_path(path: Path) -> Path:
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
    is_running = path.name.endswith(PARTIAL)
    if is_running and (running := running_errors_path(path)).exists():
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


def sweep(path: Path) -> None:
    """Remove temporary files of a process that was killed: the lock is ours."""
    for name in (path.name, errors_path(path).name, "errors.jsonl.partial", "config.yaml"):
        remove_quietly(*path.parent.glob(f".{name}.*.tmp"))
    shutil.rmtree(_doomed_parts(path), ignore_errors=True)
