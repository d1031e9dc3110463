"""Sweeps by each launcher, run for real: nothing twice, nothing lost, nothing silent."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import joblib
import numpy as np
import pytest
from hydra.errors import MissingConfigException
from PIL import Image

from embedx import derived, said, store
from embedx.configs import Configs
from embedx.threads import n_threads
from tests.conftest import EXHAUSTIVE, Run, embeddings_file

Here = Callable[..., tuple[int, list[str], list[str]]]
METHODS = """
import os, time
from embedx.methods import Result

def method(x, *, do="nothing", start=0):
    if do == "sleep":
        open(f"begun-{start}", "w").close()
        time.sleep(100)
    if do == "die":
        os.kill(os.getpid(), 9)
    if do == "err":
        raise KeyError("of my own")
    return Result(coords=x[:, :2] + start)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a run, and a method of one's own as ``--config-dir conf projection=mine``."""
    x = np.random.default_rng(0).normal(size=(60, 5))
    embeddings_file(tmp_path / "outputs" / "a", x)
    (tmp_path / "my_sweep.py").write_text(METHODS)
    config = tmp_path / "conf" / "projection" / "mine.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("_target_: my_sweep.method\ndo: nothing\nstart: 0\n")
    return tmp_path


def maps(home: Path) -> dict[str, tuple[int, bytes]]:
    """Time and content of every map, by its name."""
    paths = sorted((home / "outputs" / "a" / "projections").glob("*.h5"))
    return {path.stem: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def left_over(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "outputs").iterdir() if path.name != "a")


SWEEP = ("project", "-m", "projection=pca", "embeddings=outputs/a")
MINE = ("project", "-m", "--config-dir", "conf", "projection=mine", "embeddings=outputs/a")


def test_a_job_that_failed_is_named_by_the_command_that_runs_it_alone(
    embedx_here: Here, tmp_path: Path
) -> None:
    words = ("model=mobilenet_v3_small", "model.weights=null", "model.input_size=32")
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    (tmp_path / "one").mkdir()
    Image.fromarray(pixels).save(tmp_path / "one" / "1.png")
    sweep = ("extract", "-m", *words, "data=folder", "data.root=one,two")
    status, out, err = embedx_here(*sweep)
    assert status == 1
    assert out[-1] == "2 jobs: 1 done, 1 failed"
    (line,) = (line for line in err if line.startswith("failed job "))
    assert err[-1].startswith("DataError: ")
    first = tmp_path / "outputs" / "mobilenet_v3_small-one-"
    (done,) = tmp_path.glob("outputs/*/embeddings.h5")
    assert str(done).startswith(str(first))
    stamp = done.stat().st_mtime_ns
    (tmp_path / "two").mkdir()
    Image.fromarray(pixels).save(tmp_path / "two" / "1.png")
    command = shlex.split(line.partition(": ")[2])
    assert command[:3] == ["python", "-m", "embedx"]
    status, out, err = embedx_here(*command[3:])
    assert (status, err) == (0, [])
    assert len(list(tmp_path.glob("outputs/*/embeddings.h5"))) == 2
    status, out, err = embedx_here(*sweep)
    assert (status, err, out[-1]) == (0, [], "2 jobs: 2 done, 0 failed")
    assert sum("nothing to do" in line for line in out) == 2
    assert done.stat().st_mtime_ns == stamp


def test_a_job_that_would_replace_what_another_of_its_sweep_makes_is_refused(
    embedx_here: Here, tmp_path: Path
) -> None:
    words = (
        "model=mobilenet_v3_small",
        "model.weights=null",
        "model.input_size=32",
        "data.limit=4",
    )
    sweep = ("extract", "-m", *words, "model.seed=0,1", "name=same")
    status, out, err = embedx_here(*sweep, "overwrite=true")
    assert (status, out[-1]) == (1, "2 jobs: 1 done, 1 failed")
    assert "job 0 of this sweep writes to name=same too" in err[-1]
    first = store.open(tmp_path / "outputs" / "same")
    assert embedx_here(*sweep[:-1], "name=run-${hydra:job.num}", "overwrite=true")[0] == 0
    second = store.open(tmp_path / "outputs" / "run-1")
    assert first.attrs["id"] == store.open(tmp_path / "outputs" / "run-0").attrs["id"]
    assert second.attrs["id"] != first.attrs["id"]
    export = ("export", "-m", "embeddings=outputs/run-0,outputs/run-1", "exporter=table")
    status, out, err = embedx_here(*export, "out=all.csv")
    assert (status, out[-1]) == (1, "2 jobs: 1 done, 1 failed")
    assert "job 0 of this sweep writes to out=all.csv too" in err[-1]
    view = ("view", "-m", "embeddings=outputs/run-0,outputs/run-1")
    for name in ("run-0", "run-1"):
        assert embedx_here("project", "projection=pca", f"embeddings=outputs/{name}")[0] == 0
    status, out, err = embedx_here(*view, "out=pictures")
    assert (status, out[-1]) == (1, "2 jobs: 1 done, 1 failed")
    assert "job 0 of this sweep writes to out=pictures too" in err[-1]
    assert embedx_here(*view)[0] == 0


def test_a_widened_sweep_does_only_what_is_new(embedx_here: Here, home: Path) -> None:
    assert embedx_here(*SWEEP, "projection.random_state=1,2")[0] == 0
    before = maps(home)
    assert len(before) == 2
    assert (
        embedx_here(*SWEEP, "projection.random_state=1,2,3", "projection.n_components=2,3")[0] == 0
    )
    after = maps(home)
    assert len(after) == 6
    assert {name: after[name] for name in before} == before
    assert left_over(home) == []


def test_a_bug_in_one_job_has_its_traceback_and_the_others_run(
    embedx_here: Here, home: Path
) -> None:
    status, out, err = embedx_here(*MINE, "projection.do=err,nothing")
    assert status == 1
    assert "Traceback (most recent call last):" in err
    assert re.match(r"failed job 0: python -m embedx project --config-dir conf ", err[-2])
    assert err[-1] == "KeyError: 'of my own'"
    assert len(maps(home)) == 1


def test_a_launcher_without_a_sweep_or_not_installed_is_refused(
    embedx_here: Here, home: Path
) -> None:
    for word in ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"):
        status, _, err = embedx_here("project", "projection=pca", word)
        assert (status, len(err)) == (1, 1)
        assert err[0] == f"ConfigError: {word} has no use without -m, which makes a sweep; add -m"
    for name, package in (
        ("joblib", "hydra-joblib-launcher"),
        ("submitit_slurm", "hydra-submitit-launcher"),
    ):
        missing = MissingConfigException("no", f"hydra/launcher/{name}", ["basic"])
        error = said.one_line(missing, "project", (), Configs())
        assert str(error).startswith(
            f"hydra/launcher={name} needs the package '{package}', which is not installed; "
        )
        assert str(error).endswith('[sweep]"')
    status, _, err = embedx_here(*SWEEP, "hydra/launcher=jobli")
    assert status == 1
    assert "jobli" in err[-1]


def test_a_refused_sweep_leaves_no_folder_behind(embedx_here: Here, tmp_path: Path) -> None:
    assert embedx_here("extract", "-m", "model=resnet19,resnet18")[0] == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "expected"), [("1", 1), ("1,4", 1), ("0", None), ("many", None), ("9999", None)]
)
def test_threads_are_those_asked_for_where_there_are_so_many(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: int | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    everything = n_threads()
    assert everything == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert n_threads() == (everything if expected is None else expected)


# --------------------------------------------------------------------------- launchers


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", pytest.param("submitit_local", marks=EXHAUSTIVE)])
def test_a_launcher_gives_what_one_process_gives(launcher: str, run: Run, home: Path) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    sweep = (*SWEEP[:2], "projection=pca,tsne", "projection.random_state=0,1", SWEEP[3])
    alone = run(*sweep, OMP_NUM_THREADS="1")
    assert (alone.returncode, alone.stderr) == (0, "")
    expected = {name: content for name, (_, content) in maps(home).items()}
    assert len(expected) == 4
    for path in (home / "outputs" / "a").rglob("*.h5"):
        if path.name != "embeddings.h5":
            path.unlink()
    sweep = (*sweep[:3], "projection.random_state=0,1,-1", SWEEP[3], f"hydra/launcher={launcher}")
    done = run(*sweep, OMP_NUM_THREADS="1")
    assert done.returncode == 1
    assert "6 jobs: 4 done, 2 failed" in done.stdout.splitlines()
    named = [line for line in done.stderr.splitlines() if line.startswith("failed job ")]
    assert [line[:13] for line in named] == ["failed job 2:", "failed job 5:"]
    assert all("projection.random_state=-1" in line for line in named)
    assert {name: content for name, (_, content) in maps(home).items()} == expected
    (graph,) = (home / "outputs" / "a").glob("neighbors-*.h5")
    if launcher == "joblib":  # the others print into files
        assert len(re.findall(r"^job \d: found the ", done.stdout, re.M)) == 1
        assert left_over(home) == []
    before = maps(home), graph.stat().st_mtime_ns
    wider = (*sweep[:3], "projection.random_state=0,1,2", *sweep[4:])
    done = run(*wider, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(maps(home)) == 6
    assert ({name: maps(home)[name] for name in before[0]}, graph.stat().st_mtime_ns) == before


@pytest.mark.slow
def test_jobs_side_by_side_share_the_processors(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = (*SWEEP, "projection.random_state=0,1", "hydra/launcher=joblib")
    done = run(*words, "hydra.launcher.n_jobs=2")
    assert (done.returncode, done.stderr) == (0, "")
    paths = list((home / "outputs" / "a" / "projections").glob("*.h5"))
    threads = {derived.open_projection(path).attrs["threads"] for path in paths}
    assert len(paths) == 2
    assert threads == {max(1, joblib.cpu_count() // 2)}


def start(home: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "embedx", *words],
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_sweeps_at_once_do_not_collide(home: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = [(*SWEEP, f"projection.random_state={seeds}") for seeds in ("0,1,2", "1,2,3", "9")]
    running = [
        start(home, *words[0], "hydra/launcher=joblib"),
        start(home, *words[1]),
        start(home, *words[2], "hydra/launcher=joblib"),
    ]
    for process in running:
        out, err = process.communicate(timeout=200)
        assert (process.returncode, err) == (0, ""), out
    assert len(maps(home)) == 5
    for path in (home / "outputs" / "a" / "projections").glob("*.h5"):
        assert derived.open_projection(path).coords.shape == (60, 2)
    assert left_over(home) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_jobs(home: Path, number: int) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = (*MINE, "projection.do=sleep", "projection.start=1,2,3", "hydra/launcher=joblib")
    process = start(home, *words, "hydra.launcher.n_jobs=2")
    end = time.monotonic() + 120
    while len(list(home.glob("begun-*"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.2)
    # A terminal sends Ctrl-C to all of them.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert len(err.splitlines()) == 1
    assert "stopped by" in err
    assert maps(home) == {}
    assert left_over(home) == []
    assert len(list(home.glob("begun-*"))) == 2


@pytest.mark.slow
def test_a_job_whose_process_is_killed_is_named(run: Run, home: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = (*MINE, "projection.do=die,nothing", "hydra/launcher=joblib")
    done = run(*words, "hydra.launcher.n_jobs=2")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert re.match(r"failed job 0: .* projection=mine .*projection\.do=die", lines[0])
    assert lines[1].startswith("Interrupted: its process was killed, or ran out of memory")
    assert "Traceback" not in done.stderr
    assert left_over(home) == []
