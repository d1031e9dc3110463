"""Extraction by several processes, beside one: rates, what a part costs, memory of the driver.

Run: python benchmarks/scale.py [--pairs 3] [--rows 4096] [--parts 10000]
Prints medians over interleaved runs, as ratios:

- two processes of one thread each on two processors beside one process of two threads, tuned as it
  is by itself: resnet18, and a network whose work is done by one thread whatever there is. Rates
  are of further rows (two sizes of run, their difference), so that starting counts nowhere;
- what a part costs: the same rows in 4 parts and in 256, in one process;
- the memory of the driver (RssAnon) and its time a part, over parts that hold nothing.

The weights are random: they do not change the work.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from embedx import engines
from embedx.parts import Task

ROOT = Path(__file__).resolve().parent.parent
NETWORKS = """
import numpy, torch
from torch import nn

class Alone(nn.Module):  # a sort of NumPy takes one thread
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, x):
        order = numpy.sort(numpy.tile(x.flatten(1).numpy(), (1, 6)), axis=1)
        return self.layer(x.mean((2, 3)) + torch.from_numpy(order[:, :3]))

def alone():
    torch.manual_seed(0)
    return Alone()

def nothing(settings, feed):
    for _ in feed:
        pass
"""
CONVOLUTION = ("model=resnet18", "model.weights=null", "model.input_size=64")
ALONE = ("model=own", "model._target_=networks.alone", "model.layer=layer")


def seconds(folder: Path, *words: str, threads: int) -> float:
    """How long an extraction takes, from the command to its end."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    command = [sys.executable, "-m", "embedx", "extract", *words, "out=run"]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def rate(folder: Path, n_rows: int, *words: str) -> float:
    """Rows a second, of those that a longer run has more than a shorter one."""
    short, long = (
        seconds(folder, *words, "data=array", f"data.path={name}.npy", threads=2)
        for name in ("short", "long")
    )
    return 3 * n_rows / (long - short)


def rates(folder: Path, *, pairs: int, n_rows: int) -> None:
    two = ("engine=processes", "engine.workers=2", "engine.threads=1")
    for title, model, wanted in (
        ("resnet18 at 64 px", CONVOLUTION, 1.0),
        ("work of one thread", ALONE, 1.7),
    ):
        found = [
            (rate(folder, n_rows, *model, *two), rate(folder, n_rows, *model)) for _ in range(pairs)
        ]
        ratios = [by_two / by_one for by_two, by_one in found]
        by_two, by_one = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"{title}: two processes {statistics.median(ratios):.2f} times as fast as one, "
            f"{min(ratios):.2f} to {max(ratios):.2f} ({by_two:.0f} and {by_one:.0f} rows/s; "
            f"wanted: {wanted})"
        )


def overhead(folder: Path, *, pairs: int) -> None:
    words = (*ALONE, "data=array", "data.path=small.npy", "batch_size=8")
    found = [
        [seconds(folder, *words, f"n_parts={n}", threads=2) for n in (4, 256)] for _ in range(pairs)
    ]
    each = [(many - few) / 252 for few, many in found]
    print(f"a part costs {1e3 * statistics.median(each):.1f} ms beyond its rows")


def anonymous_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) / 1e3


def driver(folder: Path, *, n_parts: int) -> None:
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{ROOT}:{folder}"
    memory = {}
    for n in (n_parts // 100, n_parts):
        pool = engines.processes(workers=2, threads=1)
        pool.task = Task("networks:nothing", {}, "cpu")
        ended: list[int] = []
        started = time.perf_counter()
        failed = pool.run(range(n), about={}, ended=ended.append, tick=lambda _: None)
        took = time.perf_counter() - started
        assert not failed
        assert len(ended) == n
        memory[n] = anonymous_mb()
    few, many = memory.values()
    print(
        f"driver: {n_parts:,} empty parts in {took:.0f} s, {1e3 * took / n_parts:.1f} ms each; "
        f"RssAnon {many:.0f} MB, after {n_parts // 100:,} parts {few:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--parts", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "networks.py").write_text(NETWORKS)
        rng = np.random.default_rng(0)
        for title, n in (("short", given.rows), ("long", 4 * given.rows)):
            np.save(folder / f"{title}.npy", rng.random((n, 3, 64, 64), dtype=np.float32))
        np.save(folder / "small.npy", rng.random((2048, 3, 6, 6), dtype=np.float32))
        driver(folder, n_parts=given.parts)
        rates(folder, pairs=given.pairs, n_rows=given.rows)
        overhead(folder, pairs=given.pairs)


if __name__ == "__main__":
    main()
