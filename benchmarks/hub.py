"""Rows a second of data sets of HuggingFace and torchvision, beside the libraries' own reading.

Run: python benchmarks/hub.py [--pairs 5] [--rows 2000]
Each side gives upright RGB pictures in order, in one thread and this process; what counts is the
median of the ratios of interleaved pairs. ``datasets`` reads Parquet from the copy that it makes.
"""

import argparse
import io
import logging
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image
from torchvision import datasets as of_torchvision

from embedx.data import Source
from embedx.hub_data import huggingface
from embedx.torchvision_data import torchvision

Read = Callable[[], Any]


def jpeg(i: int) -> bytes:
    low = np.random.default_rng(i).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(low).resize((320, 240), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    return buffer.getvalue()


def write(folder: Path, n: int) -> None:
    cells = [{"bytes": jpeg(i), "path": None} for i in range(n)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    whole = datasets.Dataset.from_dict(
        {"image": cells, "label": [i % 10 for i in range(n)]}, features=features
    )
    whole.save_to_disk(folder / "saved")
    whole.to_parquet(folder / "whole.parquet")
    for i, cell in enumerate(cells):
        path = folder / "pets" / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cell["bytes"])
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    n_digits = 10 * n
    pixels = np.random.default_rng(0).integers(0, 255, (n_digits, 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):
        header = struct.pack(">IIII", 2051, n_digits, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = bytes(i % 10 for i in range(n_digits))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, n_digits) + labels)


def read_ours(source: Source) -> int:
    for i in range(len(source)):
        item = source.read(i)
        image = item[0] if isinstance(item, tuple) else item
        image.load()
    return len(source)


def read_theirs(items: Any) -> int:
    for item in items:
        image = item["image"] if isinstance(item, dict) else item[0]
        image.convert("RGB")
    return len(items)


def sides(folder: Path) -> dict[str, tuple[Read, Read]]:
    """By name: our reading from the files on, and theirs."""
    copy = str(folder / "cache")

    def parquet() -> Any:
        return datasets.Dataset.from_parquet(str(folder / "whole.parquet"), cache_dir=copy)

    parquet()
    return {
        "huggingface, saved": (
            lambda: read_ours(huggingface(str(folder / "saved"))),
            lambda: read_theirs(datasets.load_from_disk(str(folder / "saved"))),
        ),
        "huggingface, Parquet": (
            lambda: read_ours(huggingface(str(folder / "whole.parquet"))),
            lambda: read_theirs(parquet()),
        ),
        "torchvision, ImageFolder": (
            lambda: read_ours(torchvision("ImageFolder", root=str(folder / "pets"))),
            lambda: read_theirs(of_torchvision.ImageFolder(str(folder / "pets"))),
        ),
        "torchvision, MNIST": (
            lambda: read_ours(torchvision("MNIST", root=str(folder))),
            lambda: read_theirs(of_torchvision.MNIST(folder)),
        ),
    }


def rate(read: Read) -> float:
    started = time.perf_counter()
    n = read()
    return float(n / (time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2000)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        write(folder, options.rows)
        for what, (ours, theirs) in sides(folder).items():
            pairs = []
            for pair in range(options.pairs + 1):
                both = (ours, theirs) if pair % 2 else (theirs, ours)
                rates = {side: rate(side) for side in both}
                if pair:  # the first one fills the page cache
                    pairs.append((rates[ours], rates[theirs]))
            ratio = statistics.median(mine / other for mine, other in pairs)
            mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(
                f"{what}: {mine:,.0f} rows a second, by the library {other:,.0f}, ratio {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
