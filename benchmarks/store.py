"""The store alone: 200,000 rows of 512 floats beside one numpy.save, and memory by rows.

Run: python benchmarks/store.py [--pairs 5]
Both are synced to the disk; the store also checks every row and commits every 64 MiB. Memory is
RssAnon, so mapped files do not count, of a process that extracts with a tiny network.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from embedx import store, writing
from embedx.layout import Field

N_ROWS, N_FEATURES, BATCH = 200_000, 512, 64

EXTRACT = """
import sys, torch, embedx
n, out = int(sys.argv[1]), sys.argv[2]
class Rows(torch.utils.data.Dataset):
    def __len__(self): return n
    def __getitem__(self, i): return torch.full((64,), float(i))
net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(64, 8)).eval()
peak = [0]
def look(*_):
    with open("/proc/self/status") as status:
        kb = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    peak[0] = max(peak[0], kb)
net[1].register_forward_hook(look)
embedx.extract(net, Rows(), layers="0", out=out, batch_size=64)
print(peak[0])
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    x = np.random.default_rng(0).normal(size=(N_ROWS, N_FEATURES)).astype(np.float32)
    status = np.ones(BATCH, np.uint8)
    ratios = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        for pair in range(options.pairs + 1):
            started = time.perf_counter()
            with (folder / "x.npy").open("wb") as file:
                np.save(file, x)
                file.flush()
                os.fsync(file.fileno())
            saved = time.perf_counter() - started
            (folder / "x.npy").unlink()
            writer = writing.create(
                folder / str(pair) / "embeddings.h5",
                ids=[str(i) for i in range(N_ROWS)],
                fields=[Field("embeddings/a", (N_FEATURES,), np.dtype(np.float32))],
                attrs={"id": "x"},
            )
            started = time.perf_counter()
            for start in range(0, N_ROWS, BATCH):
                rows = x[start : start + BATCH]
                writer.append({"embeddings/a": rows}, status=status[: len(rows)])
            path = writer.finish()
            streamed = time.perf_counter() - started
            opened = store.open(path)
            assert np.array_equal(opened.embeddings["a"][::997], x[::997])
            path.unlink()
            if pair:  # the first warms caches
                ratios.append(saved / streamed)
        print(
            f"the store writes at {statistics.median(ratios):.2f} of the speed of numpy.save "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
        peaks = {}
        for n in (2_000, 200_000):
            command = [sys.executable, "-c", EXTRACT, str(n), str(folder / f"rows{n}")]
            peaks[n] = int(subprocess.run(command, check=True, capture_output=True).stdout)
        print(
            f"RssAnon of an extraction at its peak: {peaks[2_000] / 1e3:.0f} MB for 2,000 rows, "
            f"{peaks[200_000] / 1e3:.0f} MB for 200,000 rows "
            f"({peaks[200_000] / peaks[2_000] - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
