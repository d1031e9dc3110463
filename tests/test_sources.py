"""One contract for every source of pictures: row i is item i, whatever it lies in."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import embedx
from embedx import unfinished
from embedx.array_data import array
from embedx.data import folder
from embedx.errors import DataError
from embedx.hub_data import huggingface
from embedx.models import Preprocess
from embedx.sources import Shards, Source
from embedx.store import Embeddings
from embedx.table_data import table
from embedx.tar_data import webdataset
from embedx.torchvision_data import torchvision
from tests.conftest import EXHAUSTIVE, sha256
from tests.test_tar_data import Means

N, SIDE = 11, 5
Make = Callable[..., Source | Shards]


def colour(i: int) -> tuple[int, int, int]:
    return (i * 20) % 256, (7 * i) % 256, 255 - i % 256


def picture(i: int, side: int = SIDE) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (side, side), colour(i)).save(data, "BMP")
    return data.getvalue()


def label(i: int) -> str:
    return ("bird", "cat", "dog")[i % 3]


def columns(i: int) -> dict[str, Any]:
    return {"number": i, "half": i / 2, "even": i % 2 == 0, "word": f"w{i}"}


@dataclasses.dataclass
class Kind:
    """How a kind of data is laid out.

    Attributes:
        make: The source of what was laid out, called with a limit or None.
        put: Lay out the pictures of these rows, encoded, in a folder.
        order: The rows in the order in which they come.
        has_columns: Whether there are columns beside the label.
        fails_alone: Whether a broken picture can lie in it.
    """

    put: Callable[[Path, dict[int, bytes]], None]
    make: Callable[[Path, int | None], Source | Shards]
    order: tuple[int, ...] = tuple(range(N))
    has_columns: bool = True
    fails_alone: bool = True


def put_files(top: Path, pictures: dict[int, bytes]) -> None:
    for i, data in pictures.items():
        path = top / label(i) / f"{i:03d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def put_csv(top: Path, pictures: dict[int, bytes]) -> None:
    put_files(top / "pictures", pictures)
    with open(top / "list.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["path", "label", *columns(0)])
        writer.writeheader()
        for i in pictures:
            row = {key: str(value) for key, value in columns(i).items()}
            writer.writerow({"path": f"pictures/{label(i)}/{i:03d}.bmp", "label": label(i), **row})


def arrow_of(pictures: dict[int, bytes], **first: list[Any]) -> Any:
    import pyarrow as pa

    rows = [columns(i) for i in pictures]
    about = {key: [row[key] for row in rows] for key in rows[0]}
    return pa.table({**first, "label": [label(i) for i in pictures], **about})


def put_parquet_list(top: Path, pictures: dict[int, bytes]) -> None:
    import pyarrow.parquet

    put_files(top / "pictures", pictures)
    paths = [f"pictures/{label(i)}/{i:03d}.bmp" for i in pictures]
    pyarrow.parquet.write_table(arrow_of(pictures, path=paths), top / "list.parquet")


def put_parquet(top: Path, pictures: dict[int, bytes]) -> None:
    import pyarrow.parquet

    top.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": data, "path": f"{i}.bmp"} for i, data in pictures.items()]
    # A page holds up to 1,024 values however large, and is read whole: groups bound it.
    table = arrow_of(pictures, image=images)
    pyarrow.parquet.write_table(table, top / "data.parquet", row_group_size=2)


def put_saved(top: Path, pictures: dict[int, bytes]) -> None:
    import datasets

    datasets.disable_progress_bars()
    rows = [columns(i) for i in pictures]
    made = datasets.Dataset.from_dict(
        {
            "image": [{"bytes": data, "path": None} for data in pictures.values()],
            "label": [label(i) for i in pictures],
            **{key: [row[key] for row in rows] for key in rows[0]},
        }
    ).cast_column("image", datasets.Image())
    made.class_encode_column("label").save_to_disk(str(top / "saved"))


def put_array(top: Path, pictures: dict[int, bytes]) -> None:
    top.mkdir(parents=True, exist_ok=True)
    pixels = [np.asarray(Image.open(io.BytesIO(data))) for data in pictures.values()]
    np.save(top / "pixels.npy", np.stack(pixels))
    np.save(top / "labels.npy", np.array([label(i) for i in pictures]))


def put_tar(top: Path, pictures: dict[int, bytes]) -> None:
    top.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        with tarfile.open(top / f"{number}.tar", "w") as tar:
            for i in list(pictures)[number * 6 : number * 6 + 6]:
                for extension, data in (
                    ("bmp", pictures[i]),
                    ("cls", label(i).encode()),
                    ("json", json.dumps(columns(i)).encode()),
                ):
                    info = tarfile.TarInfo(f"{i:03d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


BY_CLASS = tuple(sorted(range(N), key=lambda i: (label(i), i)))
KINDS = {
    "folder": Kind(put_files, lambda top, n: folder(str(top), limit=n), BY_CLASS, False),
    "csv": Kind(put_csv, lambda top, n: table(f"{top}/list.csv", limit=n)),
    "parquet list": Kind(put_parquet_list, lambda top, n: table(f"{top}/list.parquet", limit=n)),
    "array": Kind(
        put_array,
        lambda top, n: array(f"{top}/pixels.npy", labels=f"{top}/labels.npy", limit=n),
        has_columns=False,
        fails_alone=False,
    ),
    "tar": Kind(put_tar, lambda top, n: webdataset(str(top), limit=n)),
    "parquet": Kind(put_parquet, lambda top, n: huggingface(f"{top}/data.parquet", limit=n)),
    "saved": Kind(put_saved, lambda top, n: huggingface(f"{top}/saved", limit=n)),
    "torchvision": Kind(
        put_files,
        lambda top, n: torchvision("ImageFolder", root=str(top), limit=n),
        BY_CLASS,
        False,
    ),
}
ALL = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "data"


def laid_out(kind: Kind, top: Path) -> None:
    kind.put(top, {i: picture(i) for i in range(N)})


def extract(data: Source | Shards, out: Path, **given: Any) -> Embeddings:
    torch.manual_seed(0)
    given = {"batch_size": 4, "layers": "mean", "thumbnails": SIDE, **given}
    unit = Preprocess(SIDE, SIDE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return embedx.extract(Means().eval(), data, preprocess=unit, out=out, **given)


def pictures_of(run: Embeddings) -> list[int]:
    """Which picture each good row is of, by its own numbers."""
    known = {colour(i): i for i in range(12)}
    assert len(known) == 12
    rows = np.rint(run.embeddings["mean"][run.ok] * 255).astype(int)
    return [known[tuple(row)] for row in rows.tolist()]


def opened(data: Source | Shards, scratch: Path) -> list[Source]:
    """The source, or those of the shards."""
    if isinstance(data, Source):
        return [data]
    found = []
    for number in range(len(data.names)):
        with data.read(number, scratch=scratch, most=None) as source:
            found.append(source)
    return found


@ALL
def test_rows_are_the_items_in_order_with_their_labels_and_typed_columns(
    kind: Kind, at: Path, tmp_path: Path
) -> None:
    laid_out(kind, at)
    run = extract(kind.make(at, None), tmp_path / "run")
    order = list(kind.order)
    assert pictures_of(run) == order
    assert run.n_rows == N == len(set(run.ids))
    assert run.label_texts() == [label(i) for i in order]
    assert run.thumbnails is not None
    assert [tuple(tile[0][0]) for tile in run.thumbnails.tolist()] == [colour(i) for i in order]
    if kind.has_columns:
        metadata = {name: list(np.asarray(column)) for name, column in run.metadata.items()}
        for name in columns(0):
            assert metadata[name] == [columns(i)[name] for i in order]
        assert np.asarray(run.metadata["number"]).dtype == np.int64
        assert np.asarray(run.metadata["even"]).dtype == bool
    again = extract(kind.make(at, None), tmp_path / "again")
    assert sha256(again.path) == sha256(run.path)


@ALL
def test_a_broken_picture_fails_alone_and_the_others_stay_what_they_are(
    kind: Kind, at: Path, tmp_path: Path
) -> None:
    if not kind.fails_alone:
        pytest.skip("an array has no broken pictures")
    pictures = {i: picture(i) for i in range(N)}
    pictures[3], pictures[7] = b"no picture", picture(7)[:60]
    kind.put(at, pictures)
    run = extract(kind.make(at, None), tmp_path / "run")
    order = list(kind.order)
    assert [order[row] for row in np.flatnonzero(~run.ok)] == [i for i in order if i in (3, 7)]
    assert pictures_of(run) == [i for i in order if i not in (3, 7)]
    assert len(unfinished.read_reasons(run.path)) == 2
    assert run.label_texts() == [label(i) for i in order]


@ALL
@pytest.mark.parametrize("limit", [1, 7, 100])
def test_a_limit_takes_the_first_so_many(kind: Kind, at: Path, tmp_path: Path, limit: int) -> None:
    laid_out(kind, at)
    run = extract(kind.make(at, limit), tmp_path / "run")
    assert pictures_of(run) == list(kind.order)[:limit]


@ALL
def test_every_item_is_read_once(kind: Kind, at: Path, tmp_path: Path) -> None:
    laid_out(kind, at)
    read: Counter[tuple[str, int]] = Counter()

    def counting(source: Source) -> Source:
        def counted(i: int) -> Any:
            read[source.name, i] += 1
            return source.read(i)

        return dataclasses.replace(source, read=counted)

    extract(changed(kind.make(at, None), counting), tmp_path / "run")
    assert len(read) == N
    assert set(read.values()) == {1}


def changed(data: Source | Shards, change: Callable[[Source], Source]) -> Source | Shards:
    """The same with another ``Source`` in its place, or in that of each shard."""
    if isinstance(data, Source):
        return change(data)
    plain = data.read

    @contextlib.contextmanager
    def read(number: int, **given: Any) -> Iterator[Source]:
        with plain(number, **given) as source:
            yield change(source)

    return dataclasses.replace(data, read=read)


@ALL
@pytest.mark.parametrize("stopped_at", [0, 5, 9])
def test_a_run_that_was_stopped_goes_on_with_the_same_bytes(
    kind: Kind, at: Path, tmp_path: Path, stopped_at: int
) -> None:
    laid_out(kind, at)
    whole = extract(kind.make(at, None), tmp_path / "whole")
    n_read = 0

    def stopping(source: Source) -> Source:
        def read(i: int) -> Any:
            nonlocal n_read
            n_read += 1
            if n_read > stopped_at:
                raise MemoryError
            return source.read(i)

        return dataclasses.replace(source, read=read, reads_files=False)

    with pytest.raises(DataError, match="out of memory"):
        extract(changed(kind.make(at, None), stopping), tmp_path / "run")
    run = extract(kind.make(at, None), tmp_path / "run")
    assert sha256(run.path) == sha256(whole.path)


@ALL
def test_the_fingerprint_is_another_if_and_only_if_an_item_is(
    kind: Kind, at: Path, tmp_path: Path
) -> None:
    laid_out(kind, at)
    before = kind.make(at, None)
    assert kind.make(at, None).fingerprint == before.fingerprint
    pictures = {i: picture(i) for i in range(N)}
    pictures[5] = picture(5, side=SIDE * (1 if kind.put is put_array else 2))
    if kind.put is put_array:
        pictures[5] = picture(11)
    shutil.rmtree(at)
    kind.put(at, pictures)
    assert kind.make(at, None).fingerprint != before.fingerprint


@ALL
def test_an_item_that_changes_after_it_was_listed_fails(
    kind: Kind, at: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedx.array_data._ROWS_BYTES", 1)  # rows of arrays one at a time
    laid_out(kind, at)
    data = kind.make(at, None)
    sources = opened(data, tmp_path / "scratch")
    for source in sources:
        source.read(0)
    kind.put(at, {i: picture(i + 1, side=SIDE) for i in range(N)})
    for path in at.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(1, 1))
    for source in sources:
        with pytest.raises(DataError, match="changed"):
            source.read(1)


@ALL
def test_a_source_can_be_sent_to_another_process(kind: Kind, at: Path, tmp_path: Path) -> None:
    laid_out(kind, at)
    for source in opened(kind.make(at, None), tmp_path / "scratch"):
        copy = pickle.loads(pickle.dumps(source))
        for i in range(len(source)):
            assert np.array_equal(np.asarray(copy.read(i)), np.asarray(source.read(i)))
        assert list(copy.ids) == list(source.ids)


STARTED = """
import sys
from pathlib import Path
import torch.multiprocessing
from tests import test_sources as t

if __name__ == "__main__":
    top, method, n, *kinds = sys.argv[1:]
    torch.multiprocessing.set_start_method(method)
    for kind in kinds:
        data, out = t.KINDS[kind].make(Path(top, kind), None), Path(top, f"{kind}-run")
        t.extract(data, out, num_workers=int(n))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "num_workers", "kinds"),
    [
        ("fork", 2, list(KINDS)),
        ("spawn", 1, ["tar", "parquet"]),  # each start imports torch anew
        pytest.param("spawn", 2, list(KINDS), marks=EXHAUSTIVE),
    ],
)
def test_workers_give_the_same_bytes_however_they_start(
    tmp_path: Path, method: str, num_workers: int, kinds: list[str]
) -> None:
    script = tmp_path / "run.py"
    script.write_text(STARTED)
    expected = []
    for kind in kinds:
        laid_out(KINDS[kind], tmp_path / kind)
        run = extract(KINDS[kind].make(tmp_path / kind, None), tmp_path / f"{kind}-own")
        expected.append(sha256(run.path))
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, str(script), str(tmp_path), method, str(num_workers), *kinds],
        check=True,
        timeout=280,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        },
        stderr=subprocess.DEVNULL,
    )
    found = [sha256(tmp_path / f"{kind}-run" / "embeddings.h5") for kind in kinds]
    assert found == expected


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=[] if name in ("tar", "parquet", "saved") else EXHAUSTIVE)
        for name, kind in KINDS.items()
    ],
)
def test_memory_does_not_grow_with_what_lies_on_disk(kind: Kind, at: Path, tmp_path: Path) -> None:
    side = 1300  # 5 MB a picture
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    pictures = {}
    for i in range(4 * N if kind is KINDS["parquet"] else N):  # windows of some 16 MB there
        data = io.BytesIO()
        Image.fromarray(np.roll(noise, i, axis=0)).save(data, "BMP")
        pictures[i] = data.getvalue()
    kind.put(at, pictures)
    del pictures
    size = sum(path.stat().st_size for path in at.rglob("*") if path.is_file())
    assert size > 50e6
    code = f"""
import sys
from pathlib import Path
from tests.test_sources import KINDS, opened
def anonymous_mb():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) for l in status if l.startswith("RssAnon")) / 1e3
kind = list(KINDS.values())[{list(KINDS.values()).index(kind)}]
first = opened(kind.make(Path({str(at)!r}), None), Path("none"))[0]
first.read(0)
before = anonymous_mb()
sources = opened(kind.make(Path({str(at)!r}), None), Path("none"))
peak = anonymous_mb()
for source in sources:
    for i in range(len(source)):
        source.read(i)
        peak = max(peak, anonymous_mb())
print(peak - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
    )
    assert float(done.stdout.split()[-1]) < size / 1e6 * (0.4 if size > 150e6 else 0.7)
