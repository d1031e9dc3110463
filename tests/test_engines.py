"""Engines: parts are made by other processes, whatever happens to these; none is left behind."""

import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import embedx
from embedx import engines, layout, parts, store, unfinished, writing
from embedx.errors import ConfigError, DataError, DependencyError
from embedx.parts import Task
from tests.conftest import EXHAUSTIVE, ROOT, Run, sha256
from tests.test_tar_data import extract as extract_shards
from tests.test_tar_data import shards, webdataset

Array = np.ndarray[Any, Any]
Here = Callable[..., tuple[int, list[str], list[str]]]

# What a worker does here: so little that hundreds of starts cost nothing.
LIGHT = """
import logging, os, signal, sys, time
from pathlib import Path
from embedx.errors import ConfigError, DataError

def make(settings, feed):
    Path(f"worker-{os.getpid()}").write_text(os.environ["OMP_NUM_THREADS"])
    assert feed.about == {"rows": 3}
    logging.getLogger("embedx").warning("said before the first part")
    for part in feed:
        print("of my own")
        logging.getLogger("embedx").warning("a warning of every part")
        begun = Path(f"begun-{part}")
        n_before = len(begun.read_text()) if begun.exists() else 0
        begun.write_text("x" * (n_before + 1))
        do = settings.get(str(part), "")
        if do.endswith(" once") and n_before:
            do = ""
        if do.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if do.startswith("exit"):
            os._exit(3)
        if do.startswith("raise"):
            raise DataError(f"no such data {part}")
        if do.startswith("config"):
            raise ConfigError("never")
        if do.startswith("bug"):
            raise KeyError("of my own")
        if do.startswith("wait"):
            signal.signal(signal.SIGTERM, lambda *_: (Path(f"stopped-{part}").touch(), sys.exit(0)))
            time.sleep(100)
        if do.startswith("slow"):
            time.sleep(3)
        with open(f"made-{part}", "a") as file:
            file.write(f"{os.getpid()}\\n")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "light.py").write_text(LIGHT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def made(folder: Path) -> dict[int, list[int]]:
    """The processes that made each part."""
    return {
        int(path.name.partition("-")[2]): list(map(int, path.read_text().split()))
        for path in folder.glob("made-*")
    }


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def none_left(folder: Path, *, within_s: float = 10.0) -> bool:
    pids = [int(path.name.partition("-")[2]) for path in folder.glob("worker-*")]
    ends = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < ends:
        time.sleep(0.05)
    return bool(pids) and not any(map(is_alive, pids))


def run_light(
    n_parts: int,
    settings: dict[str, str] | None = None,
    *,
    tick: Callable[[Mapping[int, str]], None] = lambda _: None,
    **given: Any,
) -> tuple[list[int], dict[int, str]]:
    """Parts in the order in which they ended, and why others failed."""
    pool = engines.processes(**{"workers": 2, **given})
    pool.task = Task("light:make", settings or {}, "cpu")
    ended: list[int] = []
    failed = pool.run(range(n_parts), about={"rows": 3}, ended=ended.append, tick=tick)
    return ended, failed


def test_each_part_is_made_once_by_workers_that_stay(
    home: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "embedx")
    seen: set[int] = set()
    names: set[str] = set()

    def tick(running: Mapping[int, str]) -> None:
        assert len(running) <= 2
        seen.update(running)
        names.update(running.values())

    ended, failed = run_light(20, threads=3, tick=tick)
    assert failed == {}
    assert sorted(ended) == list(range(20))
    pids = {pid for (pid,) in made(home).values()}
    assert len(made(home)) == 20
    assert len(pids) == 2
    assert seen <= set(range(20))
    assert names <= {f"process {pid} on {socket.gethostname()}" for pid in pids}
    assert names
    assert {path.read_text() for path in home.glob("worker-*")} == {"3"}
    assert none_left(home)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["2 workers for 20 parts", "a warning of every part"]
    assert capfd.readouterr().out.count("of my own") == 20


def test_whatever_a_worker_falls_by_its_part_is_tried_again_and_the_others_are_made(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    falls = {
        "1": "kill once",
        "2": "kill",
        "4": "raise",
        "5": "bug once",
        "6": "exit",
        "7": "config",
        "8": "slow",
    }
    ended, failed = run_light(10, falls)
    assert sorted(ended) == [0, 1, 3, 5, 8, 9]
    assert {part: len(pids) for part, pids in made(home).items()} == dict.fromkeys(ended, 1)
    assert failed == {
        2: "its worker was killed by SIGKILL, perhaps for want of memory (tried 3 times)",
        4: "DataError: no such data 4 (tried 3 times)",
        6: "its worker ended with exit status 3 (tried 3 times)",
        7: "ConfigError: never (tried 1 time)",
    }
    begun = {int(path.name[6:]): len(path.read_text()) for path in home.glob("begun-*")}
    assert begun == {0: 1, 1: 2, 2: 3, 3: 1, 4: 3, 5: 2, 6: 3, 7: 1, 8: 1, 9: 1}
    again = [line for line in caplog.messages if "is tried again: " in line]
    assert "part 1 is tried again: its worker was killed by SIGKILL" in " ".join(again)
    assert len(again) == 8
    assert none_left(home)


def test_a_slow_worker_keeps_no_other_waiting(home: Path) -> None:
    ended, _ = run_light(12, {"0": "slow"})
    assert ended[-1] == 0
    assert len({made(home)[part][0] for part in range(1, 12)}) == 1


def test_where_all_that_is_tried_fails_the_rest_is_not_tried(home: Path) -> None:
    ended, failed = run_light(50, dict.fromkeys(map(str, range(50)), "raise"), tries=1)
    assert ended == []
    assert 3 <= len(failed) <= 4
    assert len(list(home.glob("begun-*"))) <= 5


def test_a_mistake_in_what_was_asked_for_is_told_as_without_an_engine(home: Path) -> None:
    with pytest.raises(ConfigError, match="^never$"):
        run_light(50, dict.fromkeys(map(str, range(50)), "config"))
    assert len(list(home.glob("begun-*"))) <= 5


def test_a_run_that_is_stopped_lets_workers_end_after_their_batch(home: Path) -> None:
    def tick(running: Mapping[int, str]) -> None:
        if (home / "begun-0").exists() and (home / "begun-1").exists():
            time.sleep(0.2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_light(4, {"0": "wait", "1": "wait"}, tick=tick)
    assert sorted(path.name for path in home.glob("stopped-*")) == ["stopped-0", "stopped-1"]
    assert made(home) == {}
    assert none_left(home, within_s=0)


DRIVER = """
from tests import test_engines
test_engines.run_light(4, {"0": "wait", "1": "wait"})
"""


def test_workers_end_when_their_driver_is_killed(home: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], cwd=home) as driver:
        ends = time.monotonic() + 60
        while len(list(home.glob("begun-*"))) < 2 and time.monotonic() < ends:
            time.sleep(0.02)
        driver.kill()
    assert none_left(home)
    assert made(home) == {}


def test_threads_and_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def pool(device: str, **given: Any) -> Any:
        made: Any = engines.processes(**given)
        made.task = Task("light:make", {}, device)
        return made

    monkeypatch.setattr(engines, "n_threads", lambda: 6)
    assert pool("cpu").n_workers == 6
    monkeypatch.setattr(engines, "n_threads", lambda: 64)
    assert pool("cpu").n_workers == 16
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(engines, "Process", lambda *_, **given: started.append(given))
    for device, n in (("auto", 2), ("cuda", 2), ("cpu", 16)):
        assert pool(device).n_workers == n
    with pool("auto", workers=4)._started() as start:
        for place in range(4):
            start(place)
    assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in started] == ["0", "1", "0", "1"]
    assert [one["threads"] for one in started] == [16] * 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert pool("auto")._gpus() == ["5", "3"]


# --------------------------------------------------------------------------- extractions

NETWORK = """
import os, resource, signal, time
from pathlib import Path
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        for trap in Path("traps").glob("*"):  # ROW-WHAT
            row, do = trap.name.split("-")
            if (x[:, 0] == int(row)).any():
                if do != "always":
                    trap.unlink()
                if do in ("kill", "always"):
                    time.sleep(2.5)  # what came before it is committed
                    os.kill(os.getpid(), signal.SIGKILL)
                if do == "hang":
                    time.sleep(6)
                if do == "full":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        time.sleep(0.01 if Path("traps").is_dir() else 0)
        return self.layer(x + torch.rand(len(x), 1))

def make():
    torch.manual_seed(0)
    return Net()
"""
N = 120
EXTRACT = (
    "extract", "model=own", "model._target_=network.make", "model.layer=layer",
    "data=array", "data.path=x.npy", "batch_size=2", "name=run",
)  # fmt: skip


@pytest.fixture
def desk(home: Path) -> Path:
    x = np.random.default_rng(0).standard_normal((N, 4)).astype("f4")
    x[:, 0] = np.arange(N)
    np.save(home / "x.npy", x)
    (home / "network.py").write_text(NETWORK)
    (home / "traps").mkdir()
    return home


def files(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.iterdir())}


def of_one_go(run: Run, desk: Path) -> dict[str, str]:
    """The files of a run that nothing disturbs, in one process."""
    traps = [trap.rename(desk / trap.name) for trap in (desk / "traps").iterdir()]
    done = run(*EXTRACT[:-1], "name=run", "out=whole", OMP_NUM_THREADS="1")
    for trap in traps:
        trap.rename(desk / "traps" / trap.name)
    assert done.returncode == 0, done.stderr
    whole = files(desk / "whole")
    whole["config.yaml"] = ""  # it says where
    return whole


@pytest.mark.slow
def test_workers_that_are_killed_or_out_of_disk_and_a_driver_that_is_stopped_lose_nothing(
    desk: Path, run: Run
) -> None:
    whole = of_one_go(run, desk)
    for trap in ("21-kill", "50-full", "101-always"):
        (desk / "traps" / trap).touch()
    engine = ("engine=processes", "engine.workers=2", "engine.threads=1", "engine.tries=2")
    done = run(*EXTRACT, *engine, "n_parts=5")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "DataError: part 4 of 5 failed: its worker was killed by SIGKILL, perhaps for want of "
        "memory (tried 2 times); 4 of 5 are made and kept, run the same command again"
    )
    assert "part 0 is tried again: its worker was killed by SIGKILL" in done.stdout
    assert "StoreError: writing " in done.stdout
    assert "File too large" in done.stdout
    assert "Traceback" not in done.stderr
    final = desk / "outputs" / "run" / "embeddings.h5"
    parts = [unfinished.part_path(final, number) for number in range(5)]
    assert [part.exists() for part in parts] == [True] * 4 + [False]
    kept = [part.stat().st_mtime_ns for part in parts[:4]]
    rows = store.open(unfinished.partial_path(parts[4])).n_rows
    assert 0 < rows < 24
    # The driver is stopped, and goes on with what is missing.
    command = [sys.executable, "-m", "embedx", *EXTRACT, *engine]
    (desk / "traps" / "101-always").unlink()
    (desk / "traps" / "115-kill").touch()  # it sleeps before
    with subprocess.Popen(
        command, cwd=desk, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        ends = time.monotonic() + 60
        while (desk / "traps" / "115-kill").exists() and time.monotonic() < ends:
            time.sleep(0.05)
        driver.send_signal(signal.SIGINT)
        _, err = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert "stopped by SIGINT: 4 of 5 parts and what others have so far are kept" in err
    done = run(*EXTRACT, *engine)  # as many parts as were begun
    assert done.returncode == 0, done.stderr
    assert "4 of 5 parts made before: going on with the rest" in done.stdout
    assert kept
    assert {**files(final.parent), "config.yaml": ""} == whole


def test_a_part_without_a_new_row_is_told_once_and_again_at_doubling_times() -> None:
    now = 0.0
    silent = parts._Silent(10, clock=lambda: now)
    told: list[tuple[float, dict[int, float]]] = []
    for second in range(200):
        now = float(second)
        rows = {0: second, 1: second // 70, **({2: 5} if second >= 100 else {})}
        if said := silent.look(rows):
            told.append((now, said))
    # Part 1 has a row at 70 and 140; part 2 is begun at 100.
    assert told == [
        (10, {1: 10}), (20, {1: 20}), (40, {1: 40}), (80, {1: 10}), (90, {1: 20}),
        (110, {1: 40, 2: 10}), (120, {2: 20}), (140, {2: 40}), (150, {1: 10}), (160, {1: 20}),
        (180, {1: 40, 2: 80}),
    ]  # fmt: skip
    assert silent.look({1: 2}) == {}
    assert silent.look({1: 2, 2: 5}) == {}  # it is begun anew


class Hanging(parts.Engine):
    """Its workers never make a row."""

    silent_after_s = 600
    n_workers = 1

    def __init__(self, who: dict[int, str]) -> None:
        self.who = who

    def run(self, parts: Any, *, about: Any, ended: Any, tick: Any) -> dict[int, str]:
        for _ in range(32):  # half a minute each
            tick(self.who)
        return dict.fromkeys(parts, "it hangs")


@pytest.mark.parametrize("source", ["rows", "shards"])
def test_a_worker_that_hangs_is_told_by_the_driver_and_is_not_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    source: str,
) -> None:
    now = iter(np.arange(0, 1e6, 30.0))
    seconds = [0.0]

    def clock() -> float:
        return seconds[0]

    def look(self: Any, rows: Mapping[int, int]) -> dict[int, float]:
        seconds[0] = float(next(now))
        return plain(self, rows)

    plain = parts._Silent.look
    monkeypatch.setattr(parts, "_LOOK_S", 0)
    monkeypatch.setattr(parts._Silent, "look", look)
    monkeypatch.setattr(parts._Silent.__init__, "__kwdefaults__", {"clock": clock})
    data = webdataset(str(shards(tmp_path / "set", 5, 4)))

    def extract(given: Any) -> None:
        if source == "shards":
            extract_shards(data, **given)
        else:
            x = np.zeros((8, 4), np.float32)
            embedx.extract(
                nn.Sequential(nn.Linear(4, 3)), x, layers="0", n_parts=2, batch_size=2, **given
            )

    for who, message in (
        (
            {0: "process 7 on node3"},
            ("part 0" if source == "rows" else "shard 1") + " of 2 has had no new row for 10 min "
            "(0 so far), in process 7 on node3: it may be slow, and is waited for; if it hangs, "
            "kill -9 that process, and the part is tried again",
        ),
        (
            {},
            "no worker has begun a part for 10 min: they wait for a place, as there is none on "
            "the cluster; Ctrl-C ends this, and what is made is kept",
        ),
    ):
        caplog.clear()
        given: Any = {"out": tmp_path / "run", "engine": Hanging(who)}
        with pytest.raises(DataError, match="it hangs"):
            extract(given)
        said = [line for line in caplog.messages if "for 1" in line]
        assert said == [message]


@pytest.mark.slow
def test_a_worker_that_hangs_for_a_while_is_told_and_loses_nothing(desk: Path, run: Run) -> None:
    whole = of_one_go(run, desk)
    (desk / "traps" / "21-hang").touch()
    engine = ("engine=processes", "engine.workers=2", "engine.threads=1")
    done = run(*EXTRACT, *engine, "n_parts=2", "engine.silent_after_s=1")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "no new row" in line]
    told = [line for line in lines if line.startswith("part 0 of 2 has had no new row for")]
    assert 2 <= len(told) <= 6
    assert all(re.search(r"in process \d+ on .*: it may be slow", line) for line in told)
    assert {**files(desk / "outputs" / "run"), "config.yaml": ""} == whole


@pytest.mark.slow
def test_a_ray_cluster_gives_the_bytes_of_one_process(desk: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    whole = of_one_go(run, desk)
    (desk / "traps" / "21-kill").touch()
    (desk / "traps" / "81-hang").touch()
    where = {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}  # a cluster of one processor
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:  # names of sockets are
        where["RAY_TMPDIR"] = short
        words = ("engine=ray", "engine.workers=2", "engine.silent_after_s=2")
        done = run(*EXTRACT, *words, "n_parts=4", **where)
    assert done.returncode == 0, done.stderr
    assert "the cluster has room for 1 of 2 workers: the others wait" in done.stdout
    assert "2 workers for 4 parts" in done.stdout
    assert "part 0 is tried again: its worker was killed by SIGKILL" in done.stdout
    assert re.search(r"part 2 of 4 has had no new row .*, in process \d+ on .*: it", done.stdout)
    assert {**files(desk / "outputs" / "run"), "config.yaml": ""} == whole


def test_a_cluster_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address, message in (
        (f"127.0.0.1:{port}", rf"engine\.address=127\.0\.0\.1:{port} does not answer \("),
        ("auto", "engine.address=auto, and no Ray cluster runs on this machine; start one with"),
        (
            "ray://head:10001",
            "engine.address must be auto or HOST:PORT, such as 10.0.0.1:6379, not",
        ),
        ("nowhere", "engine.address must be auto or HOST:PORT"),
    ):
        with pytest.raises(ConfigError, match=message):
            engines.ray(address=address).n_workers  # noqa: B018


def test_a_cluster_that_does_not_answer_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setattr(engines, "_ANSWER_S", 0.3)
    silent = threading.Event()
    monkeypatch.setattr(ray, "init", lambda **_: silent.wait(20))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"no Ray cluster answers at engine\.address=127"):
            engines.ray(address=address).n_workers  # noqa: B018
    silent.set()


def test_engines_that_cannot_be_are_one_line(
    embedx_here: Here, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, message in (
        (("engine=processes", "engine.workers=0"), "engine.workers must be at least 1, not 0"),
        (("engine=processes", "engine.tries=0"), "engine.tries must be at least 1, not 0"),
        (
            ("engine=processes", "engine.silent_after_s=0"),
            "engine.silent_after_s must be more than 0 seconds, not 0",
        ),
        (("engine=processes", "engine.workers=two"), "engine.workers must be a whole number or on"),
        (("engine=process",), "there is no engine 'process'; the nearest are processes"),
        (("engine=processes", "part=0", "n_parts=2"), "part=0 is made by this process alone, and"),
        (("engine.workers=2",), "there is no key 'engine.workers'"),
        (
            ("engine=processes", "n_parts=99"),
            "n_parts must be at most 60, not 99: of the 120 rows 2 are",
        ),
    ):
        status, _, err = embedx_here(*EXTRACT, *words)
        assert status == 1
        assert message in err[-1], err
        assert not (desk / "outputs").exists()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        DependencyError, match=r"engine=ray needs the package 'ray', which is not i"
    ):
        engines.ray()
    with pytest.raises(ConfigError, match=r"engine\.gpus must be at least 0, not -1"):
        engines.ray(gpus=-1)


@pytest.mark.slow
@EXHAUSTIVE
def test_jobs_of_a_cluster_of_submitit_are_joined(desk: Path, run: Run) -> None:
    whole = of_one_go(run, desk)
    sweep = ("-m", "hydra/launcher=submitit_local", "n_parts=3", "part=range(3)")
    done = run(*EXTRACT, *sweep, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    done = run(*EXTRACT, "n_parts=3", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert {**files(desk / "outputs" / "run"), "config.yaml": ""} == whole


def test_a_driver_knows_how_far_parts_are_without_opening_them_again(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    reader = store.PartReader(path)
    assert (reader.read().rows_done, reader.is_complete, reader.attrs) == (0, False, {})
    field = layout.embeddings_field("a", n_features=2, dtype=np.dtype("f4"), attrs={"layer": "a"})
    writer = writing.create(path, ids=list("abcd"), fields=[field], attrs={"id": "x"})
    for n in (1, 2):
        rows = {field.name: np.zeros((1, 2), np.float32)}
        writer.append(rows, status=np.ones(1, np.uint8))
        writer.commit()
        assert (reader.read().rows_done, reader.is_complete) == (n, False)
    writer.append({field.name: np.zeros((2, 2), np.float32)}, status=np.ones(2, np.uint8))
    writer.finish()
    assert (reader.read().rows_done, reader.is_complete) == (4, True)
    assert reader.fields == [field]
    assert json.loads(str(reader.attrs["row_fields"])) == [field.name]
