"""Files that are parts of one, and who makes them.

A stage cuts its work into numbered parts, each of which ends as a file of its own: a whole
embeddings file, or arrays (:class:`ArrayParts`). An :class:`Engine` hands the numbers to other
processes, where a function of the stage makes the files as a :class:`Feed` asks for them; then the
stage joins them in their order, whoever was first.
"""

import abc
import contextlib
import dataclasses
import json
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from embedx import layout, unfinished
from embedx.errors import ConfigError, DataError, Interrupted, StoreError, listed, number_of
from embedx.matrix import Array
from embedx.progress import Progress
from embedx.store import Embeddings
from embedx.writing import Writer

log = logging.getLogger("embedx")

AGAIN = "run the same command again"
_BLOCK_BYTES = 2**24


def part_rows(number: int, *, n_parts: int, n_rows: int, block: int) -> range:
    """The rows of a part; parts are as equal as whole blocks allow.

    Args:
        number: Of the part, from 0.
        n_parts: How many there are.
        n_rows: Of all parts.
        block: Rows that stay together; a part begins at a multiple of it.
    """
    n_blocks = -(-n_rows // block)
    first, end = (at * n_blocks // n_parts * block for at in (number, number + 1))
    return range(min(first, n_rows), min(end, n_rows))


@dataclasses.dataclass(frozen=True)
class Task:
    """What the processes of an engine do.

    Attributes:
        function: ``package.module:name``, called with ``settings`` and a :class:`Feed`; it makes
            the file of each part that it is asked for.
        settings: Plain values, as JSON holds them.
        device: What it computes on, as a user names it.
    """

    function: str
    settings: dict[str, Any]
    device: str


class Feed(abc.ABC):
    """What tells a process which parts to make, one after the other; iterating asks.

    Attributes:
        about: What it has to know beside its task, plain values.
    """

    about: dict[str, Any]

    @abc.abstractmethod
    def next(self) -> int | None:
        """The part to make now; None when there is no more. The one before is made."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.next, None)

    def require_same(self, file_id: str, identity: Mapping[str, Any]) -> None:
        """Refuse to make parts of another whole than was asked for.

        Args:
            file_id: The id of the whole as it is known here; ``about`` has that of the driver.
            identity: What decides the whole, to name a difference.

        Raises:
            StoreError: It is another thing here.
        """
        if self.about["file_id"] != file_id:
            there = self.about["identity"]
            differing = [key for key, value in identity.items() if there.get(key) != value]
            raise StoreError(
                f"here {listed(differing) or 'the run'} is another than where the command was "
                f"given (on {platform.node()}, Python {platform.python_version()}); give all "
                "processes the same data, code and versions"
            )


class Engine(abc.ABC):
    """What has parts made by other processes.

    Attributes:
        task: What they do; given before it is asked for anything.
        silent_after_s: For how long a part may have no new row, or none be begun, before it is
            said.
    """

    task: Task | None = None
    silent_after_s: float = 600.0

    def required_task(self) -> Task:
        """What they do.

        Raises:
            ConfigError: Nobody has said it: they cannot have a network or data of this process.
        """
        if self.task is None:
            raise ConfigError(
                "other processes build model and data by the words of a command, and engine= was "
                "given from Python; use the command line for it: python -m embedx"
            )
        return self.task

    @property
    @abc.abstractmethod
    def n_workers(self) -> int:
        """How many work at once."""

    @abc.abstractmethod
    def run(
        self,
        parts: Sequence[int],
        *,
        about: dict[str, Any],
        ended: Callable[[int], None],
        tick: Callable[[Mapping[int, str]], None],
    ) -> dict[int, str]:
        """Have parts made, and leave no process behind, whatever happens.

        Args:
            parts: Their numbers.
            about: What a process has to know beside its task.
            ended: Called with the number of each part that is made.
            tick: Called now and then with the parts under way, and who makes each; what it raises
                ends the run.

        Returns:
            Why parts failed, by their number.

        Raises:
            EmbedxError: What each that was begun failed by, where none was made and another try
                would end the same way: a mistake in what was asked for.
        """


# --------------------------------------------------------------------------- the driver


@dataclasses.dataclass
class Stop:
    """The signal that asked to stop; 0 for none."""

    number: int = 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """SIGINT and SIGTERM ask the loop to stop after the batch at hand; a second one insists."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: FrameType | None) -> None:
        if stop.number:
            raise KeyboardInterrupt
        stop.number = number
        if number == signal.SIGINT:
            # Written at once: a log line could meet the half of another.
            os.write(2, b"\nstopping after this batch; Ctrl-C again stops at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def have_made(
    engine: Engine,
    missing: Sequence[int],
    *,
    n: int,
    title: Callable[[int], str],
    about: dict[str, Any],
    ended: Callable[[int], bool],
    look: Callable[[Iterable[int]], Mapping[int, int]] = lambda running: dict.fromkeys(running, 0),
    unit: str = "part",
    again: str | None = AGAIN,
) -> None:
    """Have the missing parts of a whole made by an engine, and say which of them stand still.

    Args:
        engine: It.
        missing: Their numbers.
        n: How many parts the whole has.
        title: What a part is called in messages.
        about: What a process has to know beside its task.
        ended: Called with each part whose process is done with it; whether it is there.
        look: Called now and then with the parts under way; how many rows each has so far.
        unit: What a part is.
        again: How to go on, in words; None where that begins anew.

    Raises:
        DataError: Some could not be made; the others are.
        Interrupted: A signal came.
    """
    n_made = n - len(missing)
    looked = time.monotonic()
    silent = _Silent(engine.silent_after_s)
    with stop_on_signal() as stop:

        def tick(running: Mapping[int, str]) -> None:
            nonlocal looked
            if stop.number:
                of = f"{n_made:,} of {number_of(n, unit, unit + 's')}"
                kept = f"{of} and what others have so far are kept; {again} to go on"
                raise Interrupted(
                    f"stopped by {stop.name}"
                    + (f": {kept}" if again else "; the same command begins anew"),
                    signal_number=stop.number,
                )
            if time.monotonic() - looked < _LOOK_S:
                return
            looked = time.monotonic()
            rows = look(running) or {_NOBODY: 0}
            for number, seconds in silent.look(rows).items():
                name = "" if number == _NOBODY else title(number)
                _say_silent(name, seconds, rows=rows[number], who=running.get(number, ""))

        def count(number: int) -> None:
            nonlocal n_made
            n_made += ended(number)

        failed = engine.run(missing, about=about, ended=count, tick=tick)
    if failed:
        number, *others = sorted(failed)
        error = DataError(
            f"{title(number)} failed: {failed[number]}; "
            + (
                f"{n_made:,} of {n:,} are made and kept, {again} to try {len(failed):,} again"
                if again
                else f"{n_made:,} of {n:,} were made, and the same command begins anew"
            )
        )
        if others:
            error.add_note("\n".join(f"{title(one)}: {failed[one]}" for one in others))
        raise error


_LOOK_S = 0.5
_NOBODY = -1  # in the place of a part's number, where none is under way


class _Silent:
    """Which parts have had no new row for long: each is told once, and again at doubling times.

    Args:
        after_s: How long the first time is.
        clock: Seconds.
    """

    def __init__(self, after_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._seen: dict[int, tuple[int, float, float]] = {}  # rows, since when, told after

    def look(self, rows: Mapping[int, int]) -> dict[int, float]:
        """For how many seconds parts have had none, of which it is to be told now.

        Args:
            rows: How many each of the parts under way has.
        """
        now = self._clock()
        told: dict[int, float] = {}
        seen = self._seen
        self._seen = {}
        for number, n in rows.items():
            before, since, after = seen.get(number, (-1, now, self._after_s))
            if n != before:
                since, after = now, self._after_s
            elif now - since >= after:
                told[number] = now - since
                after = 2 * told[number]
            self._seen[number] = n, since, after
        return told


def _say_silent(title: str, seconds: float, *, rows: int, who: str) -> None:
    """Say it of a part, or of none by an empty title."""
    long = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    if not title:
        log.warning(
            "no worker has begun a part for %s: they wait for a place, as there is none on the "
            "cluster; Ctrl-C ends this, and what is made is kept",
            long,
        )
        return
    log.warning(
        "%s has had no new row for %s (%s so far), in %s: it may be slow, and is waited for; if it "
        "hangs, kill -9 that process, and the part is tried again",
        title,
        long,
        f"{rows:,}",
        who,
    )


# --------------------------------------------------------------------------- parts that are arrays


class ArrayParts:
    """The parts of a whole that are arrays: files in a folder beside it until all are there.

    Args:
        path: The file or the folder that is made of them.
        of: What decides them, as one text: parts of anything else are not taken for these.
        n: How many there are.
    """

    def __init__(self, path: Path, *, of: str, n: int) -> None:
        self.n = n
        self._path = path
        self._of = of

    def title(self, number: int) -> str:
        """What a part is called in messages."""
        return f"part {number:,} of {self.n:,}"

    def folder(self, number: int) -> Path:
        """Where a part may have further files, which are written before the part is."""
        return unfinished.part_path(self._path, number).parent

    def begin(self, shared: Mapping[str, Array] | None = None) -> None:
        """Make the place for them, or go on with those that are there.

        Args:
            shared: What all parts need, to be had by :meth:`shared`.

        Raises:
            StoreError: Something else lies there, or the disk refused.
        """
        if unfinished.parts_id(self._path) not in (None, self._of):
            log.info("parts that were made of something else are taken away")
            unfinished.remove_parts(self._path)
        unfinished.begin_parts(self._path, of=self._of, n=self.n, kind="part")
        if shared is not None:
            self._write(self._shared, shared, {})

    def shared(self) -> dict[str, Array]:
        """What :meth:`begin` was given."""
        return self._read(self._shared)[0]

    def write(self, number: int, arrays: Mapping[str, Array], about: Mapping[str, Any]) -> None:
        """Write a part, whole or not at all.

        Args:
            number: Of the part.
            arrays: By name.
            about: Plain values, as JSON holds them.

        Raises:
            StoreError: The disk refused.
        """
        self._write(unfinished.part_path(self._path, number), arrays, about)

    def read(self, number: int) -> tuple[dict[str, Array], dict[str, Any]]:
        """What :meth:`write` was given.

        Raises:
            StoreError: It is not there, or damaged.
        """
        try:
            return self._read(unfinished.part_path(self._path, number))
        except StoreError as error:
            raise StoreError(
                f"{self.title(number)} cannot be joined: {error}; all processes must see it by "
                "this path, and running again makes it anew"
            ) from error

    def make(
        self, engine: Engine, *, about: dict[str, Any], what: str, again: str | None = AGAIN
    ) -> None:
        """Have those made that are missing.

        Args:
            engine: By whom.
            about: What a process has to know beside its task.
            what: What is being done, one word.
            again: How to go on, in words; None where that begins anew.

        Raises:
            DataError: Some could not be made; the others are.
            Interrupted: A signal came.
        """
        missing = [number for number in range(self.n) if not self._has(number)]
        n_before = self.n - len(missing)
        if n_before:
            of = f"{n_before:,} of {number_of(self.n, 'part', 'parts')}"
            then = "going on with the rest" if missing else "joining them"
            log.info("%s made before: %s", of, then)
        if not missing:
            return
        with Progress(self.n, what=what, done=n_before, unit="parts") as progress:

            def ended(_: int) -> bool:
                progress.advance(1)
                return True

            try:
                have_made(
                    engine,
                    missing,
                    n=self.n,
                    title=self.title,
                    about=about,
                    ended=ended,
                    again=again,
                )
            finally:
                unfinished.end_parts(self._path)

    def remove(self) -> None:
        """Take all of them away.

        Raises:
            StoreError: The disk refused.
        """
        unfinished.remove_parts(self._path)

    @property
    def _shared(self) -> Path:
        return unfinished.parts_folder(self._path) / "shared.h5"

    def _has(self, number: int) -> bool:
        with contextlib.suppress(StoreError):  # damaged: it is made anew
            path = unfinished.part_path(self._path, number)
            return path.exists() and self._is_own(path)
        return False

    def _is_own(self, path: Path) -> bool:
        return bool(layout.read_arrays(path, format=layout.PART_FORMAT)[0]["id"] == self._of)

    def _write(self, path: Path, arrays: Mapping[str, Array], about: Mapping[str, Any]) -> None:
        # As an array: an attribute has at most 64 KiB.
        text = json.dumps({"names": list(arrays), "about": about}).encode()
        layout.write_arrays(
            path,
            format=layout.PART_FORMAT,
            attrs={"id": self._of},
            arrays={**arrays, _ABOUT: np.frombuffer(text, np.uint8)},
        )

    def _read(self, path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
        attrs, found = layout.read_arrays(path, format=layout.PART_FORMAT, names=[_ABOUT])
        if attrs["id"] != self._of:  # by a process whose driver was replaced meanwhile
            raise StoreError(f"{path} is of something else")
        said = json.loads(found[_ABOUT].tobytes())
        _, arrays = layout.read_arrays(path, format=layout.PART_FORMAT, names=said["names"])
        return arrays, said["about"]


_ABOUT = "about"


# --------------------------------------------------------------------------- parts that are rows


def append_parts(writer: Writer, parts: Iterable[Embeddings]) -> None:
    """Copy what is streamed of each row, part by part, and why rows failed.

    Args:
        writer: Of the file that has all rows, at row 0; its fields are among those of each part.
        parts: In order, one at a time; each row is held to its checksum first.

    Raises:
        StoreError: A row of a part does not match its checksum, or the disk refused.
    """
    before = 0
    block = max(1, _BLOCK_BYTES // sum(field.row_bytes for field in writer.fields))
    for part in parts:
        if bad := part.verify():
            raise StoreError(
                f"{part.path}: row {bad[0]} ({part.ids[bad[0]]}) does not match its checksum, and "
                "the parts cannot be joined; remove it to have it made anew, if it is of extract"
            )
        listed = unfinished.read_reasons(part.path)
        reasons = {one["row"]: one["reason"] for one in listed}
        for start in range(0, part.n_rows, block):
            rows = slice(start, min(start + block, part.n_rows))
            writer.append(
                {field.name: np.array(part.streamed[field.name][rows]) for field in writer.fields},
                status=part.status[rows],
                reasons={
                    before + row: (part.ids[row], why)
                    for row, why in reasons.items()
                    if rows.start <= row < rows.stop
                },
            )
        before += part.n_rows
