"""An export for TensorBoard beside `SummaryWriter.add_embedding` of the same, and memory by rows.

Run: python benchmarks/export.py [--rows 20000] [--many 100000] [--pairs 3]
Rows of 512 floats with thumbnails of 64 px. Both sides are whole processes, timed from when their
arrays are at hand: ours opens the file that `extract` wrote, the other has its arrays in memory.
Memory is RssAnon at its peak, so mapped files do not count. The files of `exporter=atlas` are made
too, whose pictures are PNGs in a parquet file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from embedx import derived, writing
from embedx.layout import Field

N_FEATURES, SIDE_PX, BATCH = 512, 64, 2048

PEAK = """
import json, sys, threading, time
import numpy as np
peak = 0
def look():
    global peak
    with open("/proc/self/status") as status:
        kb = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    peak = max(peak, kb)
def watch():
    while True:
        look()
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
folder = sys.argv[1]
"""
DONE = """
seconds = time.perf_counter() - started
look()
print(json.dumps({"seconds": seconds, "peak_mb": peak / 1e3}))
"""
OURS = """
from embedx.export import export
import tensorboard.plugins.projector.projector_config_pb2
started = time.perf_counter()
export(f"{folder}/embeddings.h5", exporter=sys.argv[2], out=f"{folder}/{sys.argv[2]}")
"""
THEIRS = """
from torch.utils.tensorboard import SummaryWriter
import torch
from embedx import store
run = store.open(f"{folder}/embeddings.h5")
x, labels = torch.from_numpy(run.rows()[1][:]), run.label_texts()
images = torch.from_numpy(run.thumbnails[:]).permute(0, 3, 1, 2).float() / 255
started = time.perf_counter()
with SummaryWriter(f"{folder}/theirs") as writer:
    writer.add_embedding(x, metadata=labels, label_img=images)
"""


def embeddings(folder: Path, n: int) -> Path:
    """A run of ``n`` rows with a map, made without a model; pictures are smooth, as photos are."""
    fields = [
        Field("embeddings/a", (N_FEATURES,), np.dtype(np.float32)),
        Field("thumbnails", (SIDE_PX, SIDE_PX, 3), np.dtype(np.uint8)),
    ]
    ids = [f"{i:07d}" for i in range(n)]
    writer = writing.create(
        folder / "embeddings.h5",
        ids=ids,
        fields=fields,
        attrs={"id": f"benchmark {n}"},
        labels=np.arange(n, dtype=np.int32) % 20,
        label_names=[f"class {i}" for i in range(20)],
    )
    rng = np.random.default_rng(0)
    waves = np.sin(np.linspace(0, 9, SIDE_PX))
    for start in range(0, n, BATCH):
        size = min(BATCH, n - start)
        a, b, c = rng.normal(size=(3, size, 1, 1, 3))
        pixels = 128 + 40 * (a * waves[:, None, None] + b * waves[None, :, None] + c)
        pixels += rng.normal(scale=4, size=pixels.shape)
        rows = {
            "embeddings/a": rng.standard_normal((size, N_FEATURES), dtype=np.float32),
            "thumbnails": pixels.clip(0, 255).astype(np.uint8),
        }
        writer.append(rows, status=np.ones(size, np.uint8))
    path = writer.finish()
    derived.write_projection(
        folder / "projections" / "umap-1.h5",
        coords=rng.normal(size=(n, 2)),
        ids=ids,
        attrs={"id": "map", "parent": f"benchmark {n}", "method": "umap", "layer": "a"},
    )
    return path


def measured(code: str, folder: Path, *words: str) -> dict[str, float]:
    """Seconds and peak of a process; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK + code + DONE, str(folder), *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        few, many = Path(name) / "few", Path(name) / "many"
        embeddings(few, options.rows)
        ratios, ours, theirs = [], [], []
        for _ in range(options.pairs):
            ours.append(measured(OURS, few, "tensorboard"))
            theirs.append(measured(THEIRS, few))
            ratios.append(theirs[-1]["seconds"] / ours[-1]["seconds"])

        def median(of: list[dict[str, float]], key: str) -> float:
            return statistics.median(one[key] for one in of)

        print(
            f"{options.rows:,} x {N_FEATURES} with thumbnails of {SIDE_PX} px for the projector: "
            f"{statistics.median(ratios):.2f} times the speed of add_embedding "
            f"({min(ratios):.2f} to {max(ratios):.2f}; {median(ours, 'seconds'):.1f} and "
            f"{median(theirs, 'seconds'):.1f} s), RssAnon at most {median(ours, 'peak_mb'):.0f} "
            f"and {median(theirs, 'peak_mb'):.0f} MB"
        )
        embeddings(many, options.many)
        for exporter in ("tensorboard", "table", "npz", "atlas"):
            first, last = (measured(OURS, folder, exporter) for folder in (few, many))
            print(
                f"  {exporter}: {first['seconds']:.1f} s and {first['peak_mb']:.0f} MB for "
                f"{options.rows:,} rows, {last['seconds']:.1f} s and {last['peak_mb']:.0f} MB for "
                f"{options.many:,} ({last['peak_mb'] / first['peak_mb'] - 1:+.0%})"
            )


if __name__ == "__main__":
    main()
