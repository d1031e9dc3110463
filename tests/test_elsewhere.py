"""Stages whose parts are made by other processes: the same files, whatever happens to these."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedx
from embedx import derived, engines, matrix, methods, unfinished
from embedx.errors import ConfigError, DataError, InUseError
from embedx.matrix import Matrix
from tests.conftest import ROOT, Run, embeddings_file, sha256
from tests.test_engines import is_alive

Array = np.ndarray[Any, Any]
Here = Callable[..., tuple[int, list[str], list[str]]]
N, D = 600, 6

# Places rows at their first two numbers, and falls where a trap lies: WHAT-ROW.
OWN = """
import os, signal, time
from pathlib import Path
import numpy as np
from embedx.methods import Result, places

def place(x, fitted):
    for trap in Path("traps").glob("*"):
        do, row = trap.name.split("-")
        if (x[:, 0] == int(row)).any() and os.environ.get("DRIVER") != str(os.getpid()):
            if do != "always":
                trap.unlink()
            Path(f"fell-{os.getpid()}").touch()
            if do in ("kill", "always"):
                os.kill(os.getpid(), signal.SIGKILL)
            if do == "wait":
                time.sleep(100)
    with open("placed", "a") as file:
        file.write(f"{int(x[0, 0])} {os.getpid()}\\n")
    return x[:, :2] + fitted.coords.mean(axis=0)

@places(place)
def own(x):
    return Result(np.asarray(x[:, :2], float))
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with embeddings whose first number is their row, two of them failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_map", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "own_map.py").write_text(OWN)
    (tmp_path / "traps").mkdir()
    x = np.random.default_rng(0).standard_normal((N, D)).astype("f4")
    x[:, 0] = np.arange(N)
    embeddings_file(tmp_path / "run", x, failed=[3, 77])
    # Blocks of 50 rows, and moments of 100 and more.
    monkeypatch.setattr(matrix, "BLOCK_ROWS", 50)
    monkeypatch.setattr(methods, "MOMENT_ROWS", 100)
    return tmp_path


def two(**given: Any) -> Any:
    return engines.processes(**{"workers": 2, "threads": 1, **given})


def projections(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "projections").iterdir())


@pytest.mark.parametrize(
    ("method", "options", "n_parts"),
    [
        ("pca", {"n_components": 3}, [6, 12]),
        ("pca", {"whiten": True, "landmarks": 60}, [11]),
        ("tsne", {"landmarks": 60, "n_iter": 20, "pre_pca": 4}, [6, 11]),
    ],
)
def test_a_map_made_elsewhere_has_the_bytes_of_one_made_here(
    desk: Path, caplog: pytest.LogCaptureFixture, method: str, options: Any, n_parts: list[int]
) -> None:
    caplog.set_level(logging.INFO, "embedx")
    here = embedx.project("run", method=method, out="here", **options)
    made = []
    for n_workers in (1, 2, 3):
        there = embedx.project(
            "run", method=method, engine=two(workers=n_workers), out=f"by-{n_workers}", **options
        )
        assert sha256(there.path) == sha256(here.path)
        assert [path.name for path in there.path.parent.iterdir()] == [here.path.name]
        words = "worker" if n_workers == 1 else "workers"
        made += [f"{n_workers} {words} for {n} parts" for n in n_parts]
    assert [line for line in caplog.messages if " for " in line and "worker" in line] == made


def test_rows_are_placed_elsewhere_in_a_map_of_other_embeddings(desk: Path) -> None:
    embedx.project("run", method="tsne", n_iter=20, landmarks=100, pre_pca=4)
    x = np.random.default_rng(1).standard_normal((120, D)).astype("f4")
    embeddings_file(desk / "new", x, id="two")
    here = embedx.project("new", transform_from="run", out="here")
    there = embedx.project("new", transform_from="run", out="there", engine=two())
    assert np.isfinite(here.coords).all()
    assert sha256(there.path) == sha256(here.path)


def test_rows_of_parts_that_are_not_joined_are_placed_elsewhere(desk: Path) -> None:
    x = np.random.default_rng(2).standard_normal((400, 5)).astype("f4")
    for part in (0, 1):
        embedx.extract(
            torch.nn.Sequential(torch.nn.Identity()),
            torch.from_numpy(x),
            layers="0",
            out="parted",
            n_parts=2,
            part=part,
        )
    assert not (desk / "parted" / "embeddings.h5").exists()
    for method, more in (("pca", {}), ("tsne", {"landmarks": 60, "n_iter": 20})):
        here = embedx.project("parted", method=method, out="here", **more)
        there = embedx.project("parted", method=method, out="there", engine=two(), **more)
        assert sha256(there.path) == sha256(here.path)
        assert np.isfinite(there.coords).all()


def test_components_of_merged_moments_are_those_of_all_rows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3000, 7)) * [9, 7, 5, 3, 2, 1, 0.5] + 100).astype("f4")
    monkeypatch.setattr(matrix, "BLOCK_ROWS", 90)
    for n_rows in (10_000, 700, 250):
        monkeypatch.setattr(methods, "MOMENT_ROWS", n_rows)
        mean, axes, variances = methods.principal_components(Matrix(x), 3)
        centred = x.astype(float) - x.astype(float).mean(axis=0)
        _, singular, right = np.linalg.svd(centred, full_matrices=False)
        signs = np.sign(right[range(3), np.abs(right[:3]).argmax(axis=1)])
        assert np.allclose(mean, x.astype(float).mean(axis=0), rtol=1e-12)
        assert np.abs(axes - right[:3] * signs[:, None]).max() < 1e-9
        assert np.allclose(variances, singular**2 / (len(x) - 1), rtol=1e-9)


def test_parts_of_moments_hold_all_rows_once_and_take_an_eighth_of_them_at_most() -> None:
    for n, d in ((1, 1), (70_000, 512), (70_000, 8000), (10**9, 512), (10**7, 2048), (5, 9)):
        rows = Matrix(np.broadcast_to(np.float32(0), (n, d)))
        parts = methods.moment_parts(rows)
        assert parts[0].start == 0
        assert parts[-1].stop == n
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        assert len(parts) == 1 or 8 * d * d * len(parts) <= 4 * n * d / 8
        assert len(parts) <= 256
    assert len(methods.moment_parts(Matrix(np.broadcast_to(np.float32(0), (10**7, 512))))) == 153


def test_the_rest_of_a_matrix_is_told_by_what_was_taken_out() -> None:
    rng = np.random.default_rng(0)
    for n_out in (0, 1, 20, 39):
        out = np.sort(rng.choice(40, n_out, replace=False))
        rest = np.delete(np.arange(40), out)
        rows = Matrix(np.zeros((40, 2), "f4"), rest)
        assert np.array_equal(rows.left_out(), out)
        for which in (range(len(rest)), range(0), range(len(rest) // 2, len(rest))):
            found = matrix.among_the_rest(out, which)
            assert np.array_equal(found, rest[which.start : which.stop])
    assert len(Matrix(np.zeros((4, 2), "f4")).left_out()) == 0


@pytest.fixture
def own(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., derived.Projection]:
    monkeypatch.setenv("DRIVER", str(os.getpid()))
    import own_map  # type: ignore[import-not-found]

    def project(**given: Any) -> derived.Projection:
        return embedx.project("run", method=own_map.own, landmarks=60, **given)

    return project


def placed(folder: Path) -> list[int]:
    return [int(line.split()[0]) for line in (folder / "placed").read_text().splitlines()]


def test_a_worker_that_is_killed_is_named_and_what_others_made_is_kept(
    desk: Path, own: Callable[..., derived.Projection], caplog: pytest.LogCaptureFixture
) -> None:
    here = own(out="here")
    (desk / "placed").unlink()
    (desk / "traps" / "kill-200").touch()
    assert sha256(own(out="there", engine=two()).path) == sha256(here.path)
    again = [line for line in caplog.messages if "is tried again" in line]
    assert len(again) == 1
    assert "its worker was killed by SIGKILL" in again[0]
    assert len(placed(desk)) == 11
    # One that never can be made: the others are, and are not made again.
    (desk / "placed").unlink()
    (desk / "traps" / "always-200").touch()
    with pytest.raises(
        DataError,
        match=r"^part 3 of 11 failed: its worker was killed by SIGKILL, perhaps for want of memory "
        r"\(tried 2 times\); 10 of 11 are made and kept, run the same command again to try 1 again",
    ):
        own(out="third", engine=two(tries=2))
    assert not list((desk / "third").glob("*.h5"))
    (desk / "traps" / "always-200").unlink()
    assert sha256(own(out="third", engine=two()).path) == sha256(here.path)
    assert len(placed(desk)) == 11
    assert [path.name for path in (desk / "third").iterdir()] == [here.path.name]


def test_parts_of_other_rows_or_damaged_or_left_behind_are_not_taken(
    desk: Path, own: Callable[..., derived.Projection], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "embedx")
    here = own(out="here")

    def begin() -> Path:
        """Have all parts but one made, and give their folder."""
        (desk / "traps" / "always-200").touch()
        with pytest.raises(DataError, match=r"^part 3 of 11 failed"):
            own(out="there", engine=two(tries=1))
        (desk / "traps" / "always-200").unlink()
        (desk / "placed").unlink()
        (parts,) = (desk / "there").glob("*.parts")
        return parts

    for n_bytes in (1, 100):  # damaged, and without its end
        (part,) = (begin() / "000002").iterdir()
        torn = part.read_bytes()
        part.write_bytes(torn[:2048] + b"x" + torn[2049:] if n_bytes == 1 else torn[:-n_bytes])
        there = own(out="there", engine=two())
        assert sha256(there.path) == sha256(here.path)
        assert len(placed(desk)) == 2
        there.path.unlink()
    begin()
    own(out="there", engine=two(), overwrite=True)
    assert len(placed(desk)) == 11
    there.path.unlink()
    begin()
    x = np.random.default_rng(5).standard_normal((N, D)).astype("f4")
    x[:, 0] = np.arange(N)
    (desk / "run" / "embeddings.h5").unlink()
    embeddings_file(desk / "run", x, failed=[3, 77], id="other")
    there = own(out="there", engine=two())
    assert "parts that were made of something else are taken away" in caplog.messages
    assert len(placed(desk)) == 11
    assert sha256(there.path) == sha256(own(out="here", overwrite=True).path)
    # It was killed when all was done but this.
    unfinished.begin_parts(
        there.path.with_name(f"{there.path.stem}.places"), of="x", n=3, kind="part"
    )
    own(out="there", engine=two())
    assert [path.name for path in (desk / "there").iterdir()] == [there.path.name]


def test_a_driver_that_is_stopped_leaves_nothing_running_and_goes_on(
    desk: Path, own: Callable[..., derived.Projection]
) -> None:
    here = own(out="here")
    (desk / "placed").unlink()
    (desk / "traps" / "wait-200").touch()
    code = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "import own_map, embedx\n"
        "from embedx import engines, matrix, methods\n"
        "matrix.BLOCK_ROWS, methods.MOMENT_ROWS = 50, 100\n"
        "engine = engines.processes(workers=2, threads=1)\n"
        "embedx.project('run', method=own_map.own, landmarks=60, out='there', engine=engine)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=desk, stderr=subprocess.PIPE, text=True
    ) as driver:
        ends = time.monotonic() + 60
        while len(placed(desk) if (desk / "placed").exists() else []) < 10:
            assert time.monotonic() < ends
            time.sleep(0.05)
        with pytest.raises(InUseError):  # two drivers on one map
            own(out="there", engine=two())
        driver.send_signal(signal.SIGINT)
        err = driver.communicate(timeout=60)[1]
    assert "stopped by SIGINT: 10 of 11 parts and what others have so far are kept" in err
    (pid,) = [int(path.name[5:]) for path in desk.glob("fell-*")]
    assert not is_alive(pid)
    assert not list((desk / "there").glob("*.h5"))
    assert sha256(own(out="there", engine=two()).path) == sha256(here.path)
    assert len(placed(desk)) == 11


def test_an_engine_that_has_nothing_to_do_or_cannot_be_told_what_is_one_line(desk: Path) -> None:
    with pytest.raises(ConfigError, match=r"^engine has no use here: umap is fitted to all rows"):
        embedx.project("run", method="umap", engine=two())

    @methods.places(lambda x, fitted: x[:, :2])
    def mine(x: Array) -> methods.Result:
        return methods.Result(x[:, :2])

    with pytest.raises(ConfigError, match=r"^engine: other processes cannot import .*<lambda>, wh"):
        embedx.project("run", method=mine, landmarks=50, engine=two())
    assert not (desk / "run" / "projections").exists()
    with pytest.raises(ConfigError, match=r"^other processes build model and data by the words of"):
        embedx.explain(torch.nn.Conv2d(3, 2, 3), torch.zeros(2, 3, 8, 8), engine=two())
    assert not (desk / "outputs").exists()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"^other processes build model and data by the words of"):
        embedx.extract(model, torch.zeros(2, 3), layers="0", engine=two())


def test_parts_of_a_map_go_with_the_embeddings_that_they_are_of(desk: Path) -> None:
    parts = desk / "run" / "projections" / "pca-123456.places.parts"
    unfinished.begin_parts(parts.with_suffix(""), of="x", n=2, kind="part")
    mine = parts.with_name("mine.parts")
    mine.mkdir()
    derived.remove_derived(desk / "run", "one")
    assert not parts.exists()
    assert mine.exists()


@pytest.mark.slow
def test_projecting_and_explaining_on_a_ray_cluster_give_the_bytes_of_one_process(
    pictures: Path, run: Run, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    x = np.random.default_rng(0).standard_normal((20_000, 4)).astype("f4")
    x[:, 0] = np.arange(20_000)
    embeddings_file(pictures / "large", x)
    (pictures / "conf" / "projection").mkdir(parents=True)
    (pictures / "conf" / "projection" / "own.yaml").write_text("_target_: own_map.own\n")
    project = (
        "project", "--config-dir", "conf", "projection=own", "landmarks=100", "embeddings=large",
    )  # fmt: skip
    explain = (*EXPLAIN, "method=gradcam", "layers=[maps]")
    for command in (project, explain):
        assert run(*command, f"out=here/{command[0]}").returncode == 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:  # names of sockets are
        where = {"HOME": str(tmp_path), "RAY_TMPDIR": short}  # a cluster of one processor
        for command, trap in ((project, "9000"), (explain, "7")):
            (pictures / "traps" / f"kill-{trap}").touch()
            done = run(*command, f"out=there/{command[0]}", "engine=ray", **where)
            assert done.returncode == 0, done.stderr
            assert "is tried again: its worker was killed by SIGKILL" in done.stdout
    for kind, n_files in (("project", 1), ("explain", 11)):  # one sample has no map
        assert files(pictures / "there" / kind) == files(pictures / "here" / kind)
        assert len(files(pictures / "there" / kind)) == n_files


# --------------------------------------------------------------------------- explain

# It falls where a trap lies: WHAT-ROW; the first number of a sample is its row.
NETWORK = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.Conv2d(3, 6, 3)
        self.more = nn.Conv2d(6, 9, 3, stride=2)
        self.head = nn.Linear(9, 4)

    def forward(self, x):
        for trap in Path("traps").glob("*"):
            do, row = trap.name.split("-")
            if (x[:, 0, 0, 0] == int(row)).any():
                if do == "wait":
                    Path(f"fell-{os.getpid()}").touch()
                    time.sleep(100)
                if do != "always":
                    trap.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        with open("passed", "a") as file:
            file.write(f"{int(x[0, 0, 0, 0].nan_to_num(-1))} {os.getpid()}\\n")
        x = torch.relu(self.more(torch.relu(self.maps(x * 0.1))))
        return self.head(x.mean((2, 3)))

def make():
    torch.manual_seed(0)
    return Net()
"""
EXPLAIN = (
    "explain", "model=own", "model._target_=pictured.make", "model.layer=head", "data=array",
    "data.path=x.npy", "data.layout=tensor", "data.labels=y.npy",
    "limit=11", "batch_size=2", "device=cpu",
)  # fmt: skip
PROCESSES = ("engine=processes", "engine.workers=2")


@pytest.fixture
def pictures(desk: Path) -> Path:
    x = np.random.default_rng(0).standard_normal((12, 3, 14, 12)).astype("f4")
    x[:, 0, 0, 0] = np.arange(12)
    x[4, 1] = np.nan
    np.save(desk / "x.npy", x)
    np.save(desk / "y.npy", np.arange(12) % 4)
    (desk / "pictured.py").write_text(NETWORK)
    return desk


def files(folder: Path) -> dict[str, str]:
    """The files of the only explanation below a folder, but the settings, which say where."""
    return {path.name: sha256(path) for path in folder.glob("*") if path.name != "config.yaml"}


@pytest.mark.parametrize(
    "words",
    [
        ("method=feature_maps", "channels=active", "n_channels=2"),
        ("method=gradcam", "target=label"),
        pytest.param(("method=feature_maps", "layers=[maps]"), marks=pytest.mark.slow),
        pytest.param(
            ("method=input_gradient", "target=[0,1,2,3,0,1,2,3,0,1,2]"), marks=pytest.mark.slow
        ),
    ],
)
def test_an_explanation_made_elsewhere_has_the_bytes_of_one_made_here(
    pictures: Path, embedx_here: Here, words: tuple[str, ...]
) -> None:
    status, here, err = embedx_here(*EXPLAIN, *words, "out=here")
    assert status == 0, err
    threads = f"engine.threads={torch.get_num_threads()}"  # the file says of how many it is
    status, there, err = embedx_here(*EXPLAIN, *words, "out=there", *PROCESSES, threads)
    assert status == 0, err
    assert files(pictures / "there") == files(pictures / "here")
    assert len(files(pictures / "there")) >= 11
    assert {path.name for path in pictures.glob("*") if path.name.startswith("there")} == {"there"}
    told = [line for line in here if line.startswith(("layer", "failed", "target", "wrote here"))]
    assert told
    for line in told:
        assert line.split(" samples,")[0].replace("here", "there") in "\n".join(there)
    assert "2 workers for 6 parts" in there
    config = (pictures / "there" / "config.yaml").read_text()
    assert config.replace("there", "here") == (pictures / "here" / "config.yaml").read_text()


@pytest.mark.slow
def test_explaining_goes_on_where_workers_fell_and_the_driver_was_stopped(
    pictures: Path, embedx_here: Here
) -> None:
    # The file says of how many threads it is.
    processes = (*PROCESSES, f"engine.threads={torch.get_num_threads()}")
    words = (*EXPLAIN, "method=gradcam", "layers=[maps]")
    status, *_, err = embedx_here(*words, "out=here")
    assert status == 0, err
    (pictures / "traps" / "kill-2").touch()
    (pictures / "traps" / "always-7").touch()
    status, out, err = embedx_here(*words, "out=there", *processes, "engine.tries=2")
    assert status == 1
    assert err[-1].startswith(
        "DataError: part 3 of 6 failed: its worker was killed by SIGKILL, perhaps for want of "
        "memory (tried 2 times); 5 of 6 are made and kept, run the same command again"
    )
    assert any(line.startswith("part 1 is tried again: its worker was killed") for line in out)
    assert not (pictures / "there").exists()
    (pictures / "traps" / "always-7").unlink()
    (pictures / "traps" / "wait-7").touch()
    command = [sys.executable, "-m", "embedx", *words, "out=there", *processes]
    with subprocess.Popen(
        command, cwd=pictures, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        ends = time.monotonic() + 60
        while not list(pictures.glob("fell-*")):
            assert time.monotonic() < ends
            time.sleep(0.05)
        driver.send_signal(signal.SIGINT)
        err = driver.communicate(timeout=60)[1]
    assert driver.returncode == 130
    assert "stopped by SIGINT: 5 of 6 parts and what others have so far are kept" in err
    assert not any(is_alive(int(path.name[5:])) for path in pictures.glob("fell-*"))
    assert not (pictures / "there").exists()
    (pictures / "traps" / "wait-7").unlink()
    (pictures / "passed").unlink()
    status, out, err = embedx_here(*words, "out=there", *processes)
    assert status == 0, err
    assert "5 of 6 parts made before: going on with the rest" in out
    assert files(pictures / "there") == files(pictures / "here")
    firsts = {int(line.split()[0]) for line in (pictures / "passed").read_text().splitlines()}
    # What all parts share is of the first sample; the one beside it goes through alone too.
    assert firsts == {0, 1, 6}


def test_what_a_worker_refuses_is_told_and_nothing_is_left(
    pictures: Path, embedx_here: Here
) -> None:
    for words, message in (
        (("target=9",), "ConfigError: target=9 is out of range"),
        (("target=nine",), "ConfigError: target='nine' must be predicted, label, the number"),
        (("target=[1,2]",), "ConfigError: target lists 2 classes for 11 samples; give one for all"),
    ):
        given = (*EXPLAIN, "method=gradcam", "layers=[maps]", *words, "out=there", *PROCESSES)
        status, _, err = embedx_here(*given)
        assert status == 1
        assert message in err[-1], err
        assert not list(pictures.glob("*there*"))


@pytest.mark.slow
def test_parts_made_with_other_software_are_told(pictures: Path, embedx_here: Here) -> None:
    words = (*EXPLAIN, "method=gradcam", "layers=[maps]", "out=there", *PROCESSES)
    (pictures / "traps" / "always-7").touch()
    assert embedx_here(*words, "engine.tries=1")[0] == 1
    (pictures / "traps" / "always-7").unlink()
    status, out, err = embedx_here(*words[:-1], "engine.threads=2")
    assert status == 0, err
    told = [line for line in out + err if "were made with another threads (1 and 2)" in line]
    assert len(told) == 1
    assert told[0].startswith("part 0 of 6 and part 3 of 6 were made with another threads")
