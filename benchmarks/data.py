"""Rows a second of the sources of data, beside reading the same by hand.

Run: python benchmarks/data.py [table|array ...]
Prints the median of the ratios of interleaved pairs, listing included; above 1 embedx is faster.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
from PIL import Image

from embedx.array_data import array
from embedx.table_data import table

PICTURES, WIDTH, HEIGHT = 500, 500, 375
ROWS, SIDE_PX = 20_000, 64


def _read(source: object) -> int:
    return sum(np.asarray(source.read(i)).size for i in range(len(source)))  # type: ignore[attr-defined, arg-type]


def of_table(folder: Path) -> tuple[int, Callable[[], int], Callable[[], int]]:
    """JPEGs of photographs' size by a CSV, beside pandas and Pillow."""
    rng = np.random.default_rng(0)
    for i in range(PICTURES):
        low = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        image = Image.fromarray(low).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        image.save(folder / f"{i}.jpg", quality=90)
    path = folder / "table.csv"
    pandas.DataFrame(
        {"path": [f"{i}.jpg" for i in range(PICTURES)], "label": ["a", "b"] * (PICTURES // 2)}
        | {f"x{j}": rng.normal(size=PICTURES) for j in range(10)}
    ).to_csv(path, index=False)

    def theirs() -> int:
        frame = pandas.read_csv(path)
        n = 0
        for name in frame["path"]:
            with Image.open(folder / name) as opened:
                n += np.asarray(opened.convert("RGB")).size
        return n

    return PICTURES, lambda: _read(table(str(path))), theirs


def of_array(folder: Path) -> tuple[int, Callable[[], int], Callable[[], int]]:
    """Pictures in a .npy, beside its memory map and Pillow."""
    path = folder / "array.npy"
    rng = np.random.default_rng(0)
    np.save(path, rng.integers(0, 255, (ROWS, SIDE_PX, SIDE_PX, 3), dtype=np.uint8))

    def theirs() -> int:
        rows = np.load(path, mmap_mode="r")
        return sum(np.asarray(Image.fromarray(row)).size for row in rows)

    return ROWS, lambda: _read(array(str(path))), theirs


SOURCES = {"table": of_table, "array": of_array}


def _timed(run: Callable[[], int]) -> tuple[float, int]:
    started = time.perf_counter()
    n = run()
    return time.perf_counter() - started, n


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", nargs="*", default=list(SOURCES))
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    for name in options.sources:
        if name not in SOURCES:
            sys.exit(f"there is no source {name!r}; choose from {', '.join(SOURCES)}")
        with tempfile.TemporaryDirectory(dir=".") as folder:
            n, ours, theirs = SOURCES[name](Path(folder))
            pairs = []
            for _ in range(options.pairs):
                (a, size), (b, other) = _timed(ours), _timed(theirs)
                assert size == other
                pairs.append((b / a, n / a, n / b))
        ratio, mine, hand = (statistics.median(values) for values in zip(*pairs, strict=True))
        least, most = min(pairs)[0], max(pairs)[0]
        print(
            f"{name}: {ratio:.2f} times the speed of reading by hand ({least:.2f} to {most:.2f}; "
            f"{mine:,.0f} and {hand:,.0f} rows/s, {options.pairs} pairs)"
        )


if __name__ == "__main__":
    main()
