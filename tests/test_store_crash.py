"""The store under fire: power cuts, kills, disks that fail or fill, readers and rivals meanwhile.

A recording twin of :class:`embedx.store.DiskIO` notes every operation of a real run. Of each
prefix of that log the disks that a power cut could leave are built: what was synced is there, what
was not is old or new page by page, sector by sector, or torn within a sector, and names are durable
only once their folder was synced. On each such disk no reported row may be lost, no row may read
back as anything but what was written, and the run must go on to the bytes of one that was never
stopped. Stores with one thing left out must fail that: the harness proves itself.
"""

import contextlib
import copy
import dataclasses
import errno
import functools
import hashlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from embedx import layout, store, unfinished, writing
from embedx.disk import DiskIO, replace_file
from embedx.errors import InUseError, StoreError
from embedx.layout import Field, Status
from tests.conftest import EXHAUSTIVE, sha256

N_ROWS = 60
BATCH = 7
COMMIT_EVERY = 2  # batches
FAILED = frozenset({0, 13, 14, 40, 59})
NONE: frozenset[int] = frozenset()
NAME = "embeddings.h5"
FOLDER = Path("outputs") / "run"
MAGIC = b"EMBXCMT1"  # of a commit record
DONE = N_ROWS + 1  # what is reported when finish() returned


@functools.cache
def fields() -> tuple[Field, ...]:
    """Rows of 1,200 bytes cross pages, those of 74 sectors, and no row has a page of its own."""
    attrs = {"layer": "x"}
    return (
        layout.embeddings_field("wide", n_features=300, dtype=np.dtype("f4"), attrs=attrs),
        layout.embeddings_field("odd", n_features=37, dtype=np.dtype("f2"), attrs=attrs),
        Field("outputs/predicted", (), np.dtype("i4")),
    )


@functools.cache
def oracle(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f.name: (rng.standard_normal((N_ROWS, *f.shape)) * 1000).astype(f.dtype) for f in fields()
    }


@dataclasses.dataclass(frozen=True)
class Job:
    """A run: which rows it writes, which of them fail, and what of an old run it replaces."""

    seed: int = 1
    bad: frozenset[int] = FAILED
    over: str = ""  # "whole" or "partial"
    why: str = "broken"

    def open(self, path: Path, disk: DiskIO) -> writing.Writer:
        """As extract does: go on with what is there, or begin."""
        try:
            writer = writing.resume(path, expected={"id": f"id {self.seed}"}, disk=disk)
        except StoreError as error:
            if self.over != "partial" or "was begun with id" not in str(error):
                raise
            writer = None
        return writer or writing.create(
            path,
            ids=[f"ïd {i}" for i in range(N_ROWS)],
            fields=fields(),
            attrs={"id": f"id {self.seed}", "config": "c" * 6000},
            labels=np.arange(N_ROWS) % 3 - 1,
            label_names=["a", "b"],
            replace=bool(self.over),
            disk=disk,
        )

    def append(self, writer: writing.Writer, start: int, stop: int) -> None:
        bad = self.bad & set(range(start, stop))
        writer.append(
            {name: array[start:stop] for name, array in oracle(self.seed).items()},
            status=self.status[start:stop],
            reasons={i: (f"ïd {i}", f"{self.why} {self.seed}") for i in bad},
        )

    def fill(self, writer: writing.Writer, say: Callable[[int], object], *, stop: int = 99) -> None:
        """Append in batches with commits between, as far as after ``stop`` commits."""
        for commits, first in enumerate(range(writer.rows_done, N_ROWS, BATCH * COMMIT_EVERY)):
            if commits == stop:
                return
            last = min(first + BATCH * COMMIT_EVERY, N_ROWS)
            for start in range(first, last, BATCH):
                self.append(writer, start, min(start + BATCH, last))
            if last < N_ROWS or stop < 99:  # the last rows are committed by finish()
                writer.commit()
                say(writer.rows_done)

    def run(self, path: Path, disk: DiskIO, say: Callable[[int], object] = lambda _: None) -> None:
        writer = self.open(path, disk)
        try:
            say(writer.rows_done)
            self.fill(writer, say)
            writer.finish()
            say(DONE)
        finally:
            writer.close()

    @property
    def status(self) -> np.ndarray:
        return np.array(
            [Status.FAILED if i in self.bad else Status.OK for i in range(N_ROWS)], dtype="u1"
        )

    def reasons(self, n_rows: int = N_ROWS) -> list[dict[str, Any]]:
        return [
            {"row": i, "id": f"ïd {i}", "reason": f"{self.why} {self.seed}"}
            for i in sorted(self.bad)
            if i < n_rows
        ]

    @functools.cached_property
    def whole(self) -> str:
        """SHA-256 of the file of a run that was never stopped."""
        return _whole(self.seed, self.bad)


@functools.cache
def _whole(seed: int, bad: frozenset[int]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        Job(seed, bad).run(path, DiskIO())
        return sha256(path)


OLD = Job(seed=2, bad=frozenset({3, 8}))


def check_message(error: StoreError, *words: str) -> None:
    """One line, with one of these in it."""
    assert "\n" not in str(error)
    assert any(word in str(error) for word in words), str(error)


class QuietDisk(DiskIO):
    """A disk whose syncs cost nothing, for states that no second power cut will hit."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


# --------------------------------------------------------------------------- recording


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: ``write`` and ``size`` and ``sync`` of a file, ``link``, ``unlink`` and
    ``sync folder`` of names, ``said`` of rows reported."""

    kind: str
    node: int = -1
    offset: int = 0  # of a write; the size; the rows reported
    data: bytes = b""
    name: str = ""
    old_name: str = ""  # of a link that is a rename


class RecordingDisk(QuietDisk):
    """Does what a disk does, and notes it; what went past it (files made, removed) it finds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[Op] = []
        self._names: dict[str, tuple[int, int]] = {}  # name -> node, inode
        self._now: dict[int, bytes] = {}  # node -> content; folders have none
        self._n_nodes = 0
        self._look()
        self.before = Disk.of(self._names, self._now)
        self.ops.clear()

    def said(self, rows: int) -> None:
        self._look()
        self.ops.append(Op("said", offset=rows))

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        node = self._node(fd)
        n = super().pwrite(fd, data, offset)
        self._note(Op("write", node, offset, bytes(data[:n])))
        return n

    def sync(self, fd: int) -> None:
        self.ops.append(Op("sync", self._node(fd)))

    def allocate(self, fd: int, n_bytes: int) -> None:
        node = self._node(fd)
        super().allocate(fd, n_bytes)
        self._note(Op("size", node, os.fstat(fd).st_size))

    def rename(self, old: Path, new: Path) -> None:
        self._look()
        names = [path.relative_to(self.root).as_posix() for path in (old, new)]
        node, inode = self._names.pop(names[0])
        self._names[names[1]] = node, inode
        self.ops.append(Op("link", node, name=names[1], old_name=names[0]))
        super().rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        self._look()
        self.ops.append(Op("sync folder", name=folder.relative_to(self.root).as_posix()))

    def _node(self, fd: int) -> int:
        self._look()
        inode = os.fstat(fd).st_ino
        return next(node for node, known in self._names.values() if known == inode)

    def _note(self, op: Op) -> None:
        self.ops.append(op)
        self._now[op.node] = changed(self._now[op.node], op)

    def _look(self) -> None:
        paths = [p for p in sorted(self.root.rglob("*")) if p.suffix != ".lock"]
        there = {p.relative_to(self.root).as_posix(): p for p in paths}
        for name in self._names.keys() - there.keys():
            del self._names[name]
            self.ops.append(Op("unlink", name=name))
        for name, path in there.items():
            inode = path.stat().st_ino
            if name not in self._names or self._names[name][1] != inode:
                self._n_nodes += 1
                self._names[name] = self._n_nodes, inode
                if path.is_file():
                    self._now[self._n_nodes] = b""
                self.ops.append(Op("link", self._n_nodes, name=name))
            node = self._names[name][0]
            if path.is_file() and (data := path.read_bytes()) != self._now[node]:
                self._note(Op("size", node, len(data)))
                self._note(Op("write", node, 0, data))


def changed(content: bytes, op: Op) -> bytes:
    if op.kind == "size":
        return content[: op.offset].ljust(op.offset, b"\0")
    end = op.offset + len(op.data)
    return content[: op.offset].ljust(op.offset, b"\0") + op.data + content[end:]


# --------------------------------------------------------------------------- power cuts


@dataclasses.dataclass
class Disk:
    """What is durable, and what has happened since and may or may not be."""

    names: dict[str, int]
    versions: dict[int, list[bytes]]  # of each file: durable, then after each write since
    pending: list[Op]  # of names
    said: int = -1  # rows reported; -1 before the file was made

    @classmethod
    def of(cls, names: dict[str, tuple[int, int]], now: dict[int, bytes]) -> "Disk":
        linked = {name: node for name, (node, _) in names.items()}
        return cls(linked, {node: [data] for node, data in now.items()}, [])

    def apply(self, op: Op, *, folders: set[int]) -> None:
        if op.kind == "said":
            self.said = op.offset
        elif op.kind in ("write", "size"):
            versions = self.versions[op.node]
            versions.append(changed(versions[-1], op))
        elif op.kind == "sync":
            del self.versions[op.node][:-1]
        elif op.kind == "sync folder":
            kept = []
            for waiting in self.pending:
                if parent(waiting.name) == op.name:
                    rename(self.names, waiting)
                else:
                    kept.append(waiting)
            self.pending = kept
        else:
            self.pending.append(op)
            if op.kind == "link" and not op.old_name and op.node not in folders:
                self.versions[op.node] = [b""]

    def states(self, draws: int, rng: np.random.Generator) -> Iterator[dict[str, bytes]]:
        """Disks after a power cut now: the two extremes, both mixtures of them, and random ones."""
        for named in (0.0, 1.0):
            for fresh in (0, -1):
                yield self._state(
                    [op for op in self.pending if named],
                    lambda versions, fresh=fresh: versions[fresh],
                )
        for unit, torn in ((4096, False), (512, False), (512, True)) * draws:
            yield self._state(
                [op for op in self.pending if rng.random() < 0.5],
                lambda versions, unit=unit, torn=torn: mixture(versions, unit, torn, rng),
            )

    def _state(self, ops: Sequence[Op], pick: Callable[[list[bytes]], bytes]) -> dict[str, bytes]:
        names = dict(self.names)
        for op in ops:
            rename(names, op)
        contents = {node: pick(v) for node, v in self.versions.items() if node in names.values()}
        return {
            name: contents[node]
            for name, node in names.items()
            if node in contents
            and all(str(up) in names for up in Path(name).parents if str(up) != ".")
        }


def parent(name: str) -> str:
    return Path(name).parent.as_posix()


def rename(names: dict[str, int], op: Op) -> None:
    names.pop(op.name if op.kind == "unlink" else op.old_name, None)
    if op.kind == "link":
        names[op.name] = op.node


def mixture(versions: list[bytes], unit: int, torn: bool, rng: np.random.Generator) -> bytes:
    """Each unit as it was at one moment since the last sync; torn: of two moments."""
    if len(versions) == 1:
        return versions[0]
    size = len(versions[rng.integers(len(versions))])
    n_units = -(-max(map(len, versions)) // unit)
    blocks = np.frombuffer(
        b"".join(v.ljust(n_units * unit, b"\0") for v in versions), "u1"
    ).reshape(len(versions), n_units, unit)
    every = np.arange(n_units)
    result = blocks[rng.integers(len(versions), size=n_units), every]
    if torn:  # half of the cuts fall where a record would be
        other = blocks[rng.integers(len(versions), size=n_units), every]
        most = np.where(rng.random(n_units) < 0.5, unit, 64)
        cut = rng.integers(0, most)
        result = np.where(np.arange(unit) < cut[:, None], result, other)
    return result.tobytes()[:size]


def after_each(recorder: RecordingDisk) -> Iterator[tuple[int, Disk]]:
    """The disk after every prefix of the log."""
    disk = copy.deepcopy(recorder.before)
    folders = {op.node for op in recorder.ops if op.kind == "link"} - recorder._now.keys()
    yield 0, disk
    for i, op in enumerate(recorder.ops, 1):
        disk.apply(op, folders=folders)
        yield i, disk


@contextlib.contextmanager
def disk_with(state: dict[str, bytes], root: Path) -> Iterator[Path]:
    root.mkdir()
    try:
        for name, data in state.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        yield root
    finally:
        shutil.rmtree(root)


def check(root: Path, job: Job, *, said: int, disk: DiskIO | None = None) -> None:
    """What must hold on any disk: nothing reported is lost, nothing is wrong, and it goes on."""
    path = root / FOLDER / NAME
    partial = unfinished.partial_path(path)
    is_new = path.exists() and sha256(path) == job.whole
    assert is_new or said != DONE, "the finished file is lost"
    if path.exists() and not is_new:
        assert job.over == "whole", "a file under the final name is not whole"
        assert sha256(path) == OLD.whole, "a file under the final name is neither old nor new"
    assert path.exists() or job.over != "whole", "the old file went before the new one came"
    if is_new:
        assert store.open(path).verify() == []
    elif partial.exists():
        opened = store.Embeddings(partial)
        if job.over == "partial" and opened.attrs["id"] == f"id {OLD.seed}":
            check_rows(opened, OLD)
            assert said < 0, "the unfinished file is lost"
        else:
            assert opened.n_rows >= said, f"{said} rows were reported, {opened.n_rows} are there"
            check_rows(opened, job)
    else:
        assert said < 0, "the unfinished file is lost"
        assert job.over != "partial", "the old unfinished file went before the new one came"
    if not is_new:
        job.run(path, disk or QuietDisk())
    assert sha256(path) == job.whole, "going on gives other bytes"
    assert unfinished.read_reasons(path) == job.reasons(), "other reasons"
    left = {file.name for file in path.parent.iterdir()}
    assert left == {NAME, *(["errors.jsonl"] if job.bad else [])}, f"left behind: {left}"


def check_rows(opened: store.Embeddings, job: Job) -> None:
    """Every row that the file claims is the one that was written, bit by bit."""
    n_rows = opened.n_rows
    assert opened.verify() == [], "a checksum does not match"
    assert np.array_equal(opened.status, job.status[:n_rows]), "another status"
    got = {**opened.embeddings, **opened.outputs}
    for name, array in oracle(job.seed).items():
        same = got[name.split("/")[1]].tobytes() == array[:n_rows].tobytes()
        assert same, f"{name} holds other rows than were written"
    reasons = [
        r for r in unfinished.read_reasons(opened.path) if r["row"] < n_rows and r["row"] in job.bad
    ]
    assert reasons == job.reasons(n_rows), "a reason is lost"


def violations(
    recorder: RecordingDisk, job: Job, root: Path, *, draws: int = 1, prefixes: Collection[int] = ()
) -> Iterator[str]:
    """What does not hold, over the disks that power cuts during the recorded run can leave."""
    rng = np.random.default_rng(0)
    seen = set()
    for i, disk in after_each(recorder):
        if prefixes and i not in prefixes:
            continue
        for state in disk.states(draws, rng):
            digest = hashlib.sha256(repr(disk.said).encode())
            for name, data in sorted(state.items()):
                digest.update(name.encode() + hashlib.sha256(data).digest())
            if digest.digest() in seen:
                continue
            seen.add(digest.digest())
            with disk_with(state, root / "state"):
                try:
                    check(root / "state", job, said=disk.said)
                except (AssertionError, StoreError) as error:
                    yield f"after {i} of {len(recorder.ops)} operations: {error}"
    recorder.n_states = len(seen)


def check_records(recorder: RecordingDisk) -> None:
    """Whatever becomes of a commit record while it is written, another claims what was said."""
    claims = {
        (node, at): struct.unpack_from("<Q", content, at + 16)[0]
        for node, (content,) in recorder.before.versions.items()
        for at in range(0, len(content), 4096)
        if content[at : at + 8] == MAGIC
        and struct.pack("<I", zlib.crc32(content[at : at + 52])) == content[at + 52 : at + 56]
    }
    said, written = recorder.before.said, 0
    for op in recorder.ops:
        if op.kind == "said":
            said = op.offset
        elif op.data[:8] == MAGIC and len(op.data) < 4096:
            written += 1
            others = [
                n for place, n in claims.items() if place[0] == op.node and place[1] != op.offset
            ]
            assert said <= max(others, default=-1), "a torn record would take reported rows away"
            claims[op.node, op.offset] = struct.unpack_from("<Q", op.data, 16)[0]
    assert written >= 3


def recorded(
    root: Path, job: Job, make: Callable[[Path], RecordingDisk] = RecordingDisk
) -> RecordingDisk:
    """A run under ``root``, written down."""
    root.mkdir(exist_ok=True)
    path = root / FOLDER / NAME
    if job.over == "whole":
        OLD.run(path, QuietDisk())
    elif job.over == "partial":
        with contextlib.closing(OLD.open(path, QuietDisk())) as writer:
            OLD.fill(writer, lambda _: None, stop=1)
    recorder = make(root)
    job.run(path, recorder, recorder.said)
    return recorder


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Path]:
    """Where the disks of the harness lie: in memory, where there is such a place."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


JOBS = {
    "new": Job(),
    "over a whole file": Job(over="whole"),
    "over an unfinished file": Job(over="partial"),
}
MORE_JOBS = {
    "new, no row fails": Job(bad=NONE),
    "over a whole file, no row fails": Job(over="whole", bad=NONE),
    "over an unfinished file, no row fails": Job(over="partial", bad=NONE),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_a_power_cut_at_any_moment_loses_nothing_that_was_reported(ground: Path, job: Job) -> None:
    recorder = recorded(ground / "run", job)
    check_records(recorder)
    assert list(violations(recorder, job, ground)) == []
    assert recorder.n_states > 200


@EXHAUSTIVE
@pytest.mark.parametrize("job", [*JOBS.values(), *MORE_JOBS.values()], ids=[*JOBS, *MORE_JOBS])
def test_a_power_cut_at_any_moment_loses_nothing_in_many_more_draws(ground: Path, job: Job) -> None:
    recorder = recorded(ground / "run", job)
    assert list(violations(recorder, job, ground, draws=8)) == []
    assert recorder.n_states > 1000


def test_a_second_power_cut_in_the_run_that_goes_on_loses_nothing_either(ground: Path) -> None:
    """The first cut falls at random, and in the last operations, where the records are renumbered.

    What the first left is durable: a second cut then finds the resumed run at any moment.
    """
    job, rng = Job(), np.random.default_rng(1)
    first = recorded(ground / "run", job)
    some = {*range(len(first.ops) - 14, len(first.ops) - 3), 20, 45, 70}
    n_cuts = n_states = 0
    for i, disk in after_each(first):
        if i not in some:
            continue
        *_, state = disk.states(1, rng)  # sectors torn
        root = ground / f"again-{i}"
        with disk_with(state, root):
            recorder = RecordingDisk(root)
            recorder.before.said = disk.said
            job.run(root / FOLDER / NAME, recorder, recorder.said)
            check_records(recorder)
            moments = range(0, len(recorder.ops) + 1, 3)
            assert list(violations(recorder, job, ground, prefixes=moments)) == []
            n_cuts += 1
            n_states += recorder.n_states
    assert n_cuts == len(some)
    assert n_states > 10 * n_cuts


# --------------------------------------------------------------------------- mutants


class NoFirstBarrier(RecordingDisk):
    """A record is not held back until the rows that it claims are durable."""

    last = b""

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self.last = bytes(data[:8])
        return super().pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        if self.last == MAGIC:
            super().sync(fd)


class NoSync(RecordingDisk):
    def sync(self, fd: int) -> None:
        pass


class NoFolderSync(RecordingDisk):
    def sync_folder(self, folder: Path) -> None:
        pass


class OneRecord(RecordingDisk):
    """Each commit overwrites the record of the one before."""

    place = -1

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if bytes(data[:8]) == MAGIC and len(data) < 4096:
            self.place = offset if self.place < 0 else self.place
            offset = self.place
        return super().pwrite(fd, data, offset)


class NamedTooEarly(RecordingDisk):
    """The file takes its final name when its last commit begins."""

    named = False

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        path = self.root / FOLDER / NAME
        complete = bytes(data[:8]) == MAGIC and data[32] == 2 and len(data) < 4096
        if complete and not self.named:
            self.named = True
            super().rename(unfinished.partial_path(path), path)
            os.link(path, unfinished.partial_path(path))  # the name that the writer looks for
        return super().pwrite(fd, data, offset)

    def rename(self, old: Path, new: Path) -> None:
        if not (self.named and new.name == NAME):
            super().rename(old, new)


class ReasonsNotSynced(RecordingDisk):
    def sync(self, fd: int) -> None:
        listings = {path.stat().st_ino for path in self.root.rglob("errors.jsonl*")}
        if os.fstat(fd).st_ino not in listings:
            super().sync(fd)


def _unchecked_record(page: bytes, *, n_rows: int, run: bytes) -> Any:
    body = page[:52]
    magic, *values = layout._RECORD.unpack(body)
    return layout.Record(*values) if magic == MAGIC and values[1] <= n_rows else None


MUTANTS = [NoFirstBarrier, NoSync, NoFolderSync, OneRecord, NamedTooEarly, ReasonsNotSynced]


def telling(recorder: RecordingDisk) -> set[int]:
    """The moments at which a store that is wrong shows it: at records, and at the end."""
    records = {i for i, op in enumerate(recorder.ops) if op.data[:8] == MAGIC}
    end = len(recorder.ops)
    return {i + after for i in records for after in (0, 1, 2)} | set(range(end - 12, end + 1))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_store_that_leaves_one_thing_out_is_found(
    ground: Path, mutant: type[RecordingDisk]
) -> None:
    recorder = recorded(ground / "run", Job(), mutant)
    moments = telling(recorder)
    found = next(violations(recorder, Job(), ground, draws=4, prefixes=moments), None)
    assert found is not None
    if mutant is OneRecord:
        with pytest.raises(AssertionError, match="a torn record would take reported rows away"):
            check_records(recorder)


def test_a_store_that_does_not_check_its_records_is_found(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorded(ground / "run", Job())
    monkeypatch.setattr(layout, "_read_record", _unchecked_record)
    written = {i for i, op in enumerate(recorder.ops, 1) if op.data[:8] == MAGIC}
    assert next(violations(recorder, Job(), ground, draws=40, prefixes=written), None) is not None


def test_rows_that_a_lying_disk_lost_are_refused_and_never_gone_on_from(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcomes() -> set[str]:
        rng, found = np.random.default_rng(0), set()
        for i, disk in after_each(recorder):
            for state in disk.states(2, rng) if i in moments else ():
                with disk_with(state, ground / "state") as root:
                    path = root / FOLDER / NAME
                    try:
                        job.run(path, QuietDisk())
                        found.add("right" if sha256(path) == job.whole else "wrong")
                    except StoreError as error:
                        check_message(error, "does not match its checksum")
                        found.add("refused")
        return found

    job = Job()
    recorder = recorded(ground / "run", job, NoFirstBarrier)
    records = [i for i, op in enumerate(recorder.ops, 1) if op.data[:8] == MAGIC]
    moments = {i + after for i in records[1:-2] for after in (0, 1)}
    assert outcomes() == {"right", "refused"}
    monkeypatch.setattr(writing, "bad_rows", lambda row_maps, rows: [])
    assert "wrong" in outcomes()


# --------------------------------------------------------------------------- files put in place


@pytest.mark.parametrize("old", [None, b"old" * 3000])
def test_a_power_cut_leaves_a_file_that_is_replaced_old_or_new_but_never_a_mixture(
    ground: Path, old: bytes | None
) -> None:
    def left_by(make: type[RecordingDisk]) -> set[bytes | None]:
        root = ground / make.__name__
        path = root / "outputs" / "run" / "scores.json"
        root.mkdir()
        if old is not None:
            replace_file(path, old)
        recorder = make(root)
        recorder.said(0)
        replace_file(path, new, disk=recorder)
        recorder.said(DONE)
        left = set()
        for _, disk in after_each(recorder):
            for state in disk.states(20, np.random.default_rng(0)):
                content = state.get("outputs/run/scores.json")
                left.add(content)
                if disk.said == DONE and content != new:
                    left.add(b"lost")
        return left

    new = bytes(range(256)) * 40
    assert left_by(RecordingDisk) == {old, new}
    assert left_by(NoSync) - {old, new}
    assert b"lost" in left_by(NoFolderSync)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EINTR])
def test_a_file_is_replaced_or_stays_whichever_call_fails(tmp_path: Path, code: int) -> None:
    path, old, new = tmp_path / "new" / "config.yaml", b"old", b"new" * 999
    for k in range(1, 99):
        path.unlink(missing_ok=True)
        replace_file(path, old)
        disk = FailingDisk(k, code)
        try:
            replace_file(path, new, disk=disk)
        except StoreError as error:
            check_message(error, str(path))
            assert path.read_bytes() in (old, new)
            assert path.read_bytes() == old or disk.failed == "sync_folder"
        else:
            assert path.read_bytes() == new
            break
        assert [file.name for file in path.parent.iterdir()] == ["config.yaml"]
    assert k == 5  # write, sync, rename, sync of the folder; then none


# --------------------------------------------------------------------------- calls that fail


class FailingDisk(QuietDisk):
    """Fails at its k-th call: with an OSError, or as if Ctrl-C came when it was done."""

    def __init__(self, k: int, code: int) -> None:
        self.left = k
        self.code = code
        self.failed = ""

    def _call(self, name: str, *args: Any) -> Any:
        self.left -= 1
        is_kth = self.left == 0
        if is_kth:
            self.failed = name
            if self.code:
                raise OSError(self.code, os.strerror(self.code))
        result = getattr(QuietDisk, name)(self, *args)
        if is_kth:
            raise KeyboardInterrupt
        return result

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return int(self._call("pwrite", fd, data, offset))

    def sync(self, fd: int) -> None:
        self._call("sync", fd)

    def allocate(self, fd: int, n_bytes: int) -> None:
        self._call("allocate", fd, n_bytes)

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename", old, new)

    def sync_folder(self, folder: Path) -> None:
        self._call("sync_folder", folder)


INTERRUPTED = 0


@pytest.mark.parametrize("over", ["", "whole"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EINTR, INTERRUPTED])
def test_whichever_call_fails_nothing_is_lost_and_the_next_run_ends_with_the_same_bytes(
    ground: Path, code: int, over: str
) -> None:
    """It fails in the first run, and for every third call once more in the one that goes on."""
    job = Job(over=over)
    template = ground / "template"
    (template / FOLDER).mkdir(parents=True)
    if over:
        OLD.run(template / FOLDER / NAME, QuietDisk())
    failed: list[str] = []
    for k in range(1, 300):
        root = ground / "run"
        shutil.copytree(template, root)
        first, said = FailingDisk(k, code), [-1]
        disk = first
        for _ in range(2):
            try:
                job.run(root / FOLDER / NAME, disk, said.append)
                break
            except StoreError as error:
                check_message(error, str(root / FOLDER))
            except KeyboardInterrupt:
                pass
            failed.append(disk.failed)
            is_whole = not over and (root / FOLDER / NAME).exists()
            if k % 3 or said[-1] < 0 or is_whole:
                break
            disk = FailingDisk(1 + k % 17, code)
        # A file that took its name when only the sync of the folder failed is whole and stays.
        check(root, job, said=-1 if said[-1] == DONE else said[-1])
        shutil.rmtree(root)
        if not first.failed:
            break
    kinds = {"pwrite", "sync", "allocate", "rename", "sync_folder"}
    assert set(failed) == kinds
    assert len(failed) > 80


def test_a_call_that_a_signal_interrupts_goes_on(tmp_path: Path) -> None:
    """Python repeats the call (PEP 475); the store sees nothing of it."""
    before = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    hits: list[int] = []
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        Job().run(tmp_path / NAME, DiskIO())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits
    assert sha256(tmp_path / NAME) == Job().whole


class ShortDisk(QuietDisk):
    """Takes at most so many bytes of each write."""

    def __init__(self, most: Callable[[int], int]) -> None:
        self.most = most

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        most = self.most(len(data))
        return super().pwrite(fd, data[:most], offset) if most else 0


@pytest.mark.parametrize("most", [1, 7, 512, 4095, "any"])
def test_writes_that_come_up_short_go_on(ground: Path, most: int | str) -> None:
    rng = np.random.default_rng(0)
    limit = (lambda n: int(rng.integers(1, n + 1))) if most == "any" else (lambda _: int(most))
    Job().run(ground / NAME, ShortDisk(limit))
    assert sha256(ground / NAME) == Job().whole
    assert unfinished.read_reasons(ground / NAME) == Job().reasons()


@pytest.mark.parametrize("k", [1, 20, 40, 60])
def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_loop(ground: Path, k: int) -> None:
    calls = iter(range(10**6))
    disk = ShortDisk(lambda n: 0 if next(calls) >= k else n)
    said = [-1]
    with pytest.raises(StoreError, match="the disk took no bytes") as caught:
        Job().run(ground / FOLDER / NAME, disk, said.append)
    assert "\n" not in str(caught.value)
    (ground / FOLDER).mkdir(parents=True, exist_ok=True)
    check(ground, Job(), said=said[-1])
    with pytest.raises(OSError, match="the disk took no bytes"):
        disk.fill(-1, 0, 5000)


def test_a_disk_that_turns_read_only_under_the_writer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    job, path = Job(), tmp_path / NAME
    writer = job.open(path, DiskIO())
    job.append(writer, 0, 7)
    writer.commit()
    with monkeypatch.context() as patch:
        for name in ("pwrite", "unlink", "open", "mkdir", "fdatasync"):
            patch.setattr(os, name, refuse)
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(StoreError, match="Read-only file system; 7 of 60 rows are safe"):
            job.append(writer, 7, 14)
        with pytest.raises(StoreError, match="cannot write .*: Read-only file system"):
            writing.resume(path)
    job.run(path, DiskIO())
    assert sha256(path) == job.whole


# --------------------------------------------------------------------------- processes

NURSERY = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests import test_store_crash as here

def child(over, pause, orphan, path):
    job = here.Job(over=over)
    def say(rows):
        os.write(1, b"said %d\\n" % rows)
        time.sleep(pause)
    if orphan:  # what a DataLoader forks after the lock was taken
        writer = job.open(path, here.DiskIO())
        job.fill(writer, say, stop=1)
        if os.fork() == 0:
            os.write(1, b"orphan %d\\n" % os.getpid())
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
    job.run(path, here.DiskIO(), say)

for line in sys.stdin:
    over, pause, orphan, path = eval(line)
    pid = os.fork()
    if pid == 0:
        try:
            child(over, pause, orphan, Path(path))
        except BaseException as error:
            os.write(1, b"failed %r\\n" % error)
        os._exit(0)
    os.write(1, b"pid %d\\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"end 0\\n")
"""


class Nursery:
    """A process that forks writers, which is a hundred times as fast as starting each anew."""

    def __init__(self) -> None:
        root = str(Path(__file__).parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY.replace("{root!r}", repr(root))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self, path: Path, *, over: str = "", pause: float = 0.0, orphan: bool = False
    ) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(repr((over, pause, orphan, str(path))) + "\n")
        stdin.flush()
        self.said: list[int] = []
        self.pid = 0
        self.orphan = 0
        while not self.pid:
            self._line()

    def read(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Take what the writer says: until it has ended, or until so far."""
        while not until() and self._line() != "end":
            pass

    def read_until_said(self, least: int) -> None:
        self.read(until=lambda: bool(self.said) and self.said[-1] >= least)

    def _line(self) -> str:
        assert self._process.stdout is not None
        word, value = self._process.stdout.readline().split(maxsplit=1)
        assert word != "failed", value
        if word == "said":
            self.said.append(int(value))
        elif word in ("pid", "orphan"):
            setattr(self, word, int(value))
        return word

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with contextlib.closing(Nursery()) as made:
        yield made


@pytest.mark.parametrize(
    ("over", "n_kills"),
    [
        ("", 25),
        ("whole", 12),
        *(pytest.param(o, 300, marks=EXHAUSTIVE) for o in ("", "whole")),
    ],
)
def test_a_writer_killed_at_random_moments_loses_no_reported_row_and_ends_with_the_same_bytes(
    tmp_path: Path, nursery: Nursery, over: str, n_kills: int
) -> None:
    job, rng = Job(over=over), np.random.default_rng(0)
    for name in ("warm", "timed"):
        started = time.monotonic()
        nursery.start(tmp_path / name / NAME, pause=0.002)
        nursery.read()
        whole_s = time.monotonic() - started
        assert nursery.said[-1] == DONE
    n_midway = 0
    for k in range(n_kills):
        root = tmp_path / str(k)
        path = root / FOLDER / NAME
        (root / FOLDER).mkdir(parents=True)
        if over:
            OLD.run(path, QuietDisk())
        said = -1
        for _ in range(2):  # killed in the run that goes on, too
            nursery.start(path, over=over, pause=0.002)
            if k % 2:
                time.sleep(rng.uniform(0, whole_s))
            else:  # amid its rows, however long the machine takes over them
                nursery.read_until_said(int(rng.integers(1, DONE)))
                time.sleep(rng.uniform(0, 0.004))
            with contextlib.suppress(ProcessLookupError):
                os.kill(nursery.pid, signal.SIGKILL)
            nursery.read()
            said = nursery.said[-1] if nursery.said else said
            n_midway += 0 < said < DONE
            if path.exists() and sha256(path) == job.whole:  # said or not: a next run does nothing
                break
        for stale in (root / FOLDER).glob("*.lock"):
            stale.unlink()  # it holds nothing; the writer that goes on takes it over and away
        check(root, job, said=said, disk=DiskIO())
        shutil.rmtree(root)
    assert n_midway > n_kills // 5


def test_readers_meanwhile_are_never_blocked_and_see_only_whole_rows_that_only_grow(
    tmp_path: Path, nursery: Nursery
) -> None:
    path = tmp_path / NAME
    nursery.start(path, pause=0.05)
    nursery.read(until=lambda: bool(nursery.said))
    with h5py.File(
        unfinished.partial_path(path)
    ) as other:  # another tool has it open all the while
        counts, slowest_s = [], 0.0
        while not path.exists():
            began = time.monotonic()
            try:
                opened = store.Embeddings(unfinished.partial_path(path))
            except StoreError as error:  # it took its final name
                check_message(error, "is not there", "was renamed")
                continue
            counts.append(opened.n_rows)
            check_rows(opened, Job()) if not path.exists() else None
            assert opened.complete <= (opened.n_rows == N_ROWS)
            slowest_s = max(slowest_s, time.monotonic() - began)
        assert other["status"].shape == (N_ROWS,)
    nursery.read()
    assert counts == sorted(counts)
    assert len(set(counts)) >= 3
    assert slowest_s < 5
    assert sha256(path) == Job().whole


def test_a_file_that_goes_while_hdf5_opens_it_is_said_to_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAME
    OLD.run(path, QuietDisk())

    def gone(where: Path, mode: str) -> None:
        where.unlink()
        raise OSError("Unable to synchronously open file (can't retrieve stat info for file)")

    monkeypatch.setattr(layout.h5py, "File", gone)
    with pytest.raises(StoreError, match="was renamed meanwhile; open it again"):
        store.Embeddings(path)


def test_readers_of_a_file_that_is_replaced_see_the_old_one_or_the_new_one(
    tmp_path: Path, nursery: Nursery
) -> None:
    path = tmp_path / NAME
    seen = []
    for _ in range(10):
        path.unlink(missing_ok=True)
        OLD.run(path, QuietDisk())
        nursery.start(path, over="whole")
        while not (seen and seen[-1] == Job.seed):
            opened = store.open(path)
            seed = int(str(opened.attrs["id"]).split()[1])
            got = {**opened.embeddings, **opened.outputs}
            for name, array in oracle(seed).items():
                assert got[name.split("/")[1]].tobytes() == array.tobytes()
            assert opened.verify() == []
            seen.append(seed)
        nursery.read()
        seen.append(0)
    assert set(seen) == {0, OLD.seed, Job.seed}


def test_a_file_replaced_while_it_is_opened_is_not_read_with_the_places_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAME
    OLD.run(path, QuietDisk())
    new = writing.create(
        tmp_path / "new" / NAME,
        ids=["a"],
        fields=[layout.embeddings_field("x", n_features=2, dtype=np.dtype("f4"), attrs={})],
        attrs={"id": "new", "config": "c" * 40_000},
    )
    new.append({"embeddings/x": np.ones((1, 2), "f4")}, status=np.ones(1))
    new.finish()
    real, swaps = h5py.File, [new.path]

    def open_and_replace(*args: Any, **kwargs: Any) -> Any:
        file = real(*args, **kwargs)
        if swaps:
            os.replace(swaps.pop(), path)
        return file

    monkeypatch.setattr(h5py, "File", open_and_replace)
    opened = store.open(path)
    assert swaps == []
    assert opened.attrs["id"] == "new"
    assert opened.embeddings["x"].tolist() == [[1, 1]]
    os.unlink(path)  # what is open stays whole, whatever becomes of the name
    assert opened.verify() == []


def test_a_reader_takes_both_commit_records_of_one_moment(tmp_path: Path) -> None:
    """Between its looks at the one and the other a writer may have rewritten both."""
    path = tmp_path / NAME
    writer = Job().open(path, QuietDisk())
    for start in (0, BATCH):
        Job().append(writer, start, start + BATCH)
        writer.commit()
    file = np.memmap(unfinished.partial_path(path), mode="r+", dtype="u1")
    place = writer._offsets["commit"]
    pages = file[place : place + 8192].reshape(2, 4096)

    class Racing:
        """The first look at the pages finds the newest record half written."""

        looks = 0

        def tobytes(self) -> bytes:
            self.looks += 1
            torn = pages.copy()
            if self.looks == 1:
                torn[writer._sequence % 2, 20:] = 0
            return torn.tobytes()

    record = layout.newest_record(Racing(), n_rows=N_ROWS, run=writer._run)  # type: ignore[arg-type]
    assert record is not None
    assert record.rows_done == writer.rows_done == 2 * BATCH
    writer.close()


def test_a_second_writer_is_refused_and_the_first_is_named(
    tmp_path: Path, nursery: Nursery
) -> None:
    path = tmp_path / NAME
    nursery.start(path, pause=60)
    nursery.read(until=lambda: bool(nursery.said))
    for begin in (writing.resume, lambda path: Job(over="partial").open(path, DiskIO())):
        with pytest.raises(InUseError, match=f"is being written by process {nursery.pid} on "):
            begin(path)
    os.kill(nursery.pid, signal.SIGKILL)
    nursery.read()
    Job().run(path, DiskIO())  # the lock died with its owner
    assert sha256(path) == Job().whole
    writer = Job(over="whole").open(path, DiskIO())
    with pytest.raises(InUseError, match="is being written by this process"):
        writing.resume(path)
    writer.close()


def test_a_worker_that_outlives_the_writer_does_not_hold_its_lock(
    tmp_path: Path, nursery: Nursery
) -> None:
    path = tmp_path / NAME
    nursery.start(path, orphan=True)
    nursery.read(until=lambda: bool(nursery.orphan))
    with pytest.raises(InUseError):
        writing.resume(path)
    os.kill(nursery.pid, signal.SIGKILL)
    nursery.read()
    os.kill(nursery.orphan, 0)  # it lives
    try:
        Job().run(path, DiskIO())
    finally:
        os.kill(nursery.orphan, signal.SIGKILL)
    assert sha256(path) == Job().whole


# --------------------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot mount a small disk: {tried.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def use_up(disk: Path, *, leave: int = 0) -> None:
    """Fill a disk as another process would, but for so many bytes."""
    with (disk / "hog").open("ab", buffering=0) as hog:
        for n in (2**16, 4096):
            with contextlib.suppress(OSError):
                while True:
                    hog.write(b"x" * n)
        hog.truncate(hog.tell() - leave)


def test_a_full_disk_is_said_in_one_line_before_work_starts_and_leaves_nothing(
    small_disk: Path,
) -> None:
    n_refused = 0
    for leave in range(0, 70 * 4096, 3 * 4096):
        (small_disk / "hog").unlink(missing_ok=True)
        use_up(small_disk, leave=leave)
        try:
            writer = Job().open(small_disk / FOLDER / NAME, DiskIO())
        except StoreError as error:
            check_message(error, "no disk space for ")
            assert [file.name for file in small_disk.iterdir()] == ["hog"]
            n_refused += 1
        else:
            assert leave > sum(f.row_bytes for f in fields()) * N_ROWS
            writer.discard()
            shutil.rmtree(small_disk / "outputs")
    assert 15 < n_refused < 24
    (small_disk / "hog").unlink()
    with pytest.raises(StoreError, match=r"it needs 40,\d\d\d kB and \S+ has 16,\d\d\d kB free"):
        writing.create(
            small_disk / NAME,
            ids=["a"],
            fields=[layout.embeddings_field("x", n_features=10**7, dtype=np.dtype("f4"), attrs={})],
            attrs={"id": "0"},
        )
    Job().run(small_disk / NAME, DiskIO())
    assert sha256(small_disk / NAME) == Job().whole


def test_a_disk_that_another_fills_meanwhile_has_room_for_every_row(small_disk: Path) -> None:
    """The room was taken at the start: only the reasons of failed rows still need some."""
    job = Job(bad=NONE)
    writer = job.open(small_disk / NAME, DiskIO())
    use_up(small_disk)
    job.fill(writer, lambda _: None)
    writer.finish()
    assert sha256(small_disk / NAME) == job.whole


def test_a_run_on_a_full_disk_goes_on_after_room_was_made(small_disk: Path) -> None:
    job, said = Job(why="b" * 5000), [-1]  # reasons that need pages of their own
    path = small_disk / FOLDER / NAME
    writer = job.open(path, DiskIO())
    job.fill(writer, said.append, stop=1)
    use_up(small_disk)
    with pytest.raises(StoreError, match=r"No space left on device; 14 of 60 rows are safe; make"):
        job.fill(writer, said.append)
    with pytest.raises(StoreError, match="is closed; open it again"):
        job.append(writer, 0, 1)
    assert not path.exists()
    (small_disk / "hog").unlink()
    check(small_disk, job, said=14)


def test_a_resumed_run_on_a_full_disk_is_refused_in_one_line(small_disk: Path) -> None:
    job = Job()
    path = small_disk / FOLDER / NAME
    with contextlib.closing(job.open(path, DiskIO())) as writer:
        job.fill(writer, lambda _: None, stop=2)
    use_up(small_disk)
    with pytest.raises(StoreError, match=r"no disk space for \S+: it needs 1 kB and \S+ has 0 kB"):
        job.run(path, DiskIO())
    (small_disk / "hog").unlink()
    check(small_disk, job, said=28)


LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests import test_store_crash as here
job, path, steps = here.Job(), Path(sys.argv[1]), int(sys.argv[2])
writer = job.open(path, here.DiskIO()) if steps else None
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    if writer is None:
        job.open(path, here.DiskIO())
    else:
        job.fill(writer, print)
except here.StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("begun", [False, True])
def test_a_limit_on_the_size_of_files_is_said_in_one_line_and_the_run_goes_on_without_it(
    tmp_path: Path, begun: bool
) -> None:
    path = tmp_path / FOLDER / NAME
    code = LIMITED.replace("{root!r}", repr(str(Path(__file__).parent.parent)))
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(int(begun))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    *said, message = done.stdout.splitlines()
    if begun:
        assert "File too large; 0 of 60 rows are safe" in message
        assert said == []
        assert not path.exists()
        check(tmp_path, Job(), said=0)
    else:
        assert f"cannot write {path}: File too large" in message
        assert list(tmp_path.iterdir()) == []
