"""Samples in tar shards: each row its own, whatever a shard holds, whenever the run is stopped."""

import contextlib
import gc
import gzip
import io
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import embedx
from embedx import inputs, runs, tar_data, unfinished
from embedx.errors import ConfigError, DataError, StoreError
from embedx.models import Preprocess
from embedx.sources import Shards
from embedx.store import Embeddings
from embedx.tar_data import webdataset
from tests.conftest import EXHAUSTIVE, sha256

Array = np.ndarray[Any, Any]
Members = Sequence[tuple[str, bytes]]


def png(i: int) -> bytes:
    """A picture of a colour of its own."""
    data = io.BytesIO()
    Image.new("RGB", (4, 4), colour(i)).save(data, "PNG")
    return data.getvalue()


def colour(i: int) -> tuple[int, int, int]:
    return i % 256, (7 * i) % 256, 255 - i % 256


def sample(i: int, **json_keys: Any) -> list[tuple[str, bytes]]:
    about = {"number": i, "half": i / 2, "even": i % 2 == 0, **json_keys}
    return [
        (f"s{i:04d}.png", png(i)),
        (f"s{i:04d}.cls", str(i % 3).encode()),
        (f"s{i:04d}.json", json.dumps(about).encode()),
    ]


def shard(path: Path, members: Members) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def shards(folder: Path, *sizes: int) -> Path:
    start = 0
    for number, size in enumerate(sizes):
        members = [member for i in range(start, start + size) for member in sample(i)]
        shard(folder / f"s-{number:03d}.tar", members)
        start += size
    return folder


class Means(nn.Module):
    """The mean of each channel: a row shows whose picture it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mean(x).flatten(1))  # type: ignore[no-any-return]


def extract(data: Shards, out: Path, **given: Any) -> Embeddings:
    torch.manual_seed(0)
    given = {"batch_size": 4, "layers": "mean", "thumbnails": 4, **given}
    unit = Preprocess(4, 4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return embedx.extract(Means(), data, preprocess=unit, out=out, **given)


def numbers_of(run: Embeddings) -> list[int]:
    """Which picture each good row is of, by its own numbers."""
    known = {colour(i): i for i in range(256)}
    rows = np.rint(run.embeddings["mean"][run.ok] * 255).astype(int)
    return [known[tuple(row)] for row in rows.tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_the_samples_in_order_as_a_second_reader_has_them(
    tmp_path: Path, num_workers: int
) -> None:
    wds = pytest.importorskip("webdataset", reason="the dev extra is not installed")
    folder = shards(tmp_path / "set", 10, 7, 1, 5)
    run = extract(webdataset(str(folder)), tmp_path / "run", num_workers=num_workers)
    paths = [str(path) for path in sorted(folder.iterdir())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it leaves its files open
        read = list(wds.WebDataset(paths, shardshuffle=False, empty_check=False))
        gc.collect()
    assert len(read) == run.n_rows == 23
    names = [Path(one["__url__"]).stem + "/" + one["__key__"] for one in read]
    assert run.ids == names
    assert run.label_texts() == [one["cls"].decode() for one in read]
    pictures = [np.asarray(Image.open(io.BytesIO(one["png"]))) for one in read]
    np.testing.assert_array_equal(run.thumbnails, pictures)
    expected = [picture[0, 0] / 255 for picture in pictures]
    np.testing.assert_allclose(run.embeddings["mean"], expected, atol=1e-6)
    about = [json.loads(one["json"]) for one in read]
    for key in ("number", "half", "even"):
        assert np.asarray(run.metadata[key]).tolist() == [one[key] for one in about]
    assert not run.verify()
    assert not unfinished.parts_folder(run.path).exists()


def test_what_is_compressed_or_lies_elsewhere_gives_the_same_rows_and_leaves_no_copy(
    tmp_path: Path,
) -> None:
    folder = shards(tmp_path / "set", 6, 3)
    expected = extract(webdataset(str(folder)), tmp_path / "plain")
    packed = tmp_path / "packed"
    packed.mkdir()
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        memory.pipe(f"/embedx-test/{path.name}", path.read_bytes())
    for number, where in enumerate((str(packed), "memory://embedx-test/s-{000..001}.tar")):
        run = extract(webdataset(where), tmp_path / str(number))
        np.testing.assert_array_equal(run.embeddings["mean"], expected.embeddings["mean"])
        assert (run.ids, run.label_texts()) == (expected.ids, expected.label_texts())
        assert sorted(path.name for path in run.path.parent.iterdir()) == [
            "config.yaml",
            "embeddings.h5",
        ]


def test_broken_samples_fail_alone_and_each_with_its_reason(tmp_path: Path) -> None:
    broken = [
        ("b0.json", b"{}"),
        ("b1.png", png(1)),
        ("b1.json", b"{"),
        ("b2.left.png", png(2)),
        ("b2.right.png", png(2)),
        ("b3.png", png(3)),
        ("b3.png", png(4)),
        ("b4.png", png(5)[:40]),
        ("b5.png", b"not a picture"),
        ("b6.png", png(6)),
        ("b6.json", b"[" * 100_000),
        ("b7.png", png(7)),
        ("b7.cls", b"\xff\xfe\xfd"),
    ]
    members = [*sample(10), *broken, *sample(11)]
    path = shard(tmp_path / "a.tar", members)
    run = extract(webdataset(str(path)), tmp_path / "run")
    assert run.ids == ["a/s0010", *(f"a/b{i}" for i in range(8)), "a/s0011"]
    assert run.status.tolist() == [1, *[2] * 8, 1]
    assert numbers_of(run) == [10, 11]
    listed = {one["id"]: one["reason"] for one in unfinished.read_reasons(run.path)}
    for number, word in enumerate(
        (
            "it has no picture",
            "its .json cannot be read",
            "it has 2 pictures: .left.png, .right.png",
            "it has two members .png",
            "",
            "not a picture",
            "its .json cannot be read",
            "its .cls cannot be read",
        )
    ):
        assert word in listed[f"a/b{number}"]


@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {0, 1}, {1, 2}])
def test_a_shard_of_bad_samples_alone_keeps_its_place(tmp_path: Path, bad: set[int]) -> None:
    folder = tmp_path / "set"
    expected = []
    for number in range(3):
        members: Members = sample(number) + sample(number + 10)
        if number in bad:
            members = [(f"s{i}.png", b"none") for i in (number, number + 10)]
        else:
            expected += [number, number + 10]
        shard(folder / f"{number}.tar", members)
    run = extract(webdataset(str(folder)), tmp_path / "run")
    assert [name.split("/")[0] for name in run.ids] == ["0", "0", "1", "1", "2", "2"]
    assert [i for i in range(6) if run.status[i] == 2] == sorted(
        2 * n + k for n in bad for k in (0, 1)
    )
    assert numbers_of(run) == expected


def test_all_bad_is_an_error_that_names_the_first_and_leaves_nothing(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("x.png", b"none"), ("y.png", b"none")])
    with pytest.raises(DataError, match="every one of the 2 rows of a failed; the first, a/x: "):
        extract(webdataset(str(path)), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.h5*"))
    path = shard(tmp_path / "b.tar", [("x", b"none")])
    with pytest.raises(DataError, match="every one of the 0 rows of b failed; the first, there"):
        extract(webdataset(str(path)), tmp_path / "run")


def test_links_devices_and_names_that_leave_are_passed_over_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(99))
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in sample(1):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"l{kind.decode()}.png")
            info.type, info.linkname = kind, str(secret)
            tar.addfile(info)
        for name in ("../up.png", "/etc/top.png", "a/../../b.png", ".hidden.png", "bare"):
            info = tarfile.TarInfo(name)
            info.size = len(png(2))
            tar.addfile(info, io.BytesIO(png(2)))
    caplog.set_level(logging.INFO, logger="embedx")
    run = extract(webdataset(str(path)), tmp_path / "run")
    assert (run.ids, numbers_of(run)) == (["a/s0001"], [1])
    assert "4 links, devices and sparse files" in caplog.text
    assert "3 names that leave the shard" in caplog.text
    assert "2 hidden files and files without extension" in caplog.text


def spoilt(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        last = [member for member in tar if member.name.endswith(".png")][-1]
    if how == "cut within a picture":
        del data[last.offset_data + 20 :]
    elif how == "cut between samples":
        del data[last.offset :]
    elif how == "hole":
        data[last.offset : last.offset + 512] = bytes(512)
    elif how == "two together":
        data = data + data
    else:
        data[last.offset : last.offset + 512] = b"\x55" * 512
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "said", "rows"),
    [
        ("cut within a picture", "what follows there is lost", 6),
        ("cut between samples", "ends without the mark of its end", 5),
        ("garbage", "no tar header at byte", 5),
        ("hole", "and more comes after, which is lost", 5),
        ("two together", "and more comes after, which is lost", 6),
    ],
)
def test_a_torn_shard_is_said_and_gives_what_is_whole_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, said: str, rows: int
) -> None:
    folder = shards(tmp_path / "set", 6, 3)
    spoilt(folder / "s-000.tar", how)
    run = extract(webdataset(str(folder)), tmp_path / "run")
    assert said in caplog.text
    assert run.n_rows == rows + 3
    whole = [5] if how == "two together" else []
    assert numbers_of(run) == [0, 1, 2, 3, 4, *whole, 6, 7, 8]


def test_odd_names_and_many_keys_stop_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="embedx")
    path = tmp_path / "a.tar"
    keys = [{f"k{i}-{j}": j for j in range(150)} | {"all": i} for i in range(3)]
    with tarfile.open(path, "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        for name, i in (("caf\xe9", 0), ("n" * 2000, 1), ("plain", 2)):
            for extension, data in (("png", png(i)), ("json", json.dumps(keys[i]).encode())):
                info = tarfile.TarInfo(f"{name}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    run = extract(webdataset(str(path)), tmp_path / "run")
    assert run.status.tolist() == [1, 2, 1]
    assert numbers_of(run) == [0, 2]
    assert "its name has more than 800 bytes" in unfinished.read_reasons(run.path)[0]["reason"]
    assert len(run.metadata) == 200
    assert run.metadata["all"].tolist() == [0, 1, 2]
    assert "251 keys in .json that fewer samples have than the first 200" in caplog.text


def test_two_shards_that_would_give_the_same_ids_are_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", sample(1))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=r"a\.tar and .*a\.tar\.gz would give their samples"):
        webdataset(str(tmp_path))


@pytest.mark.parametrize("limit", [1, 4, 6, 7, 9, 100])
def test_a_limit_takes_the_first_so_many(tmp_path: Path, limit: int) -> None:
    folder = shards(tmp_path / "set", 6, 3)
    run = extract(webdataset(str(folder), limit=limit), tmp_path / "run")
    assert numbers_of(run) == list(range(min(limit, 9)))


def test_types_of_columns_that_differ_between_shards_become_one(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shard(folder / "0.tar", sample(0, size=1, tag="a", only=2) + sample(1, size=2, tag="b", only=3))
    shard(folder / "1.tar", sample(2, size=0.5, tag=7, late="x") + sample(3, tag=None, late="y"))
    shard(folder / "2.tar", sample(4, size=None, tag="c", only=None))
    run = extract(webdataset(str(folder)), tmp_path / "run")
    np.testing.assert_array_equal(run.metadata["size"], [1, 2, 0.5, np.nan, np.nan])
    np.testing.assert_array_equal(run.metadata["only"], [2, 3, np.nan, np.nan, np.nan])
    assert run.metadata["tag"] == ["a", "b", "7", "", "c"]
    assert run.metadata["late"] == ["", "", "x", "y", ""]
    assert np.asarray(run.metadata["number"]).dtype == np.int64


def test_labels_are_those_that_are_asked_for(tmp_path: Path) -> None:
    members = [*sample(4, kind="cat"), ("s0004.txt", b"a cat"), *sample(5, kind="dog")]
    path = str(shard(tmp_path / "a.tar", members))
    for label, expected in (
        (None, ["1", "2"]),
        ("none", None),
        ("kind", ["cat", "dog"]),
        ("txt", ["a cat", ""]),
        ("half", ["2", "2.5"]),
    ):
        run = extract(webdataset(path, label=label), tmp_path / f"run-{label}")
        assert run.label_texts() == expected
    assert run.metadata["txt"] == ["a cat", ""]


@pytest.mark.parametrize(("item", "name"), [("picture", "txt"), ("txt", "text")])
def test_a_column_is_of_one_thing_in_all_shards(item: str, name: str, tmp_path: Path) -> None:
    about = {name: "of json", f"{name}_": "of json, too"}
    members = [*sample(1, **about), ("s0001.txt", b"of txt")]
    shard(tmp_path / "set" / "0.tar", members)
    shard(tmp_path / "set" / "1.tar", [*sample(2), ("s0002.txt", b"of txt")])
    shard(tmp_path / "set" / "2.tar", sample(3, **about))
    given = webdataset(str(tmp_path / "set"), item=item)
    found: dict[str, set[Any]] = {}
    for i in range(3):
        with given.read(i, scratch=tmp_path / "x", most=None) as source:
            for key in (name, f"{name}_", f"{name}__"):
                found.setdefault(key, set()).update(source.metadata.get(key, []))
            assert (f"{i}: {name} of .json is the column {name}_" in source.notes) == (i != 1)
    assert [found[key] - {""} for key in found] == [{"of txt"}, {"of json"}, {"of json, too"}]


def test_samples_of_one_name_have_ids_of_their_own_whatever_others_are_called(
    tmp_path: Path,
) -> None:
    keys = [
        "x",
        "x#2",
        "x",
        "z",
        "x",
        "x#2",
        "latin\udce9",
        "latin\\udce9",
        "y" * 900,
        "z",
        "y" * 900,
    ]
    members = [(f"{key}.png", png(i)) for i, key in enumerate(keys)]
    run = extract(webdataset(str(shard(tmp_path / "a.tar", members))), tmp_path / "run")
    ids = [sample_id.removeprefix("a/") for sample_id in run.ids]
    assert ids[:6] == ["x", "x#2", "x#3", "z", "x#4", "x#2#2"]
    assert ids[6:8] == ["latin\\udce9", "latin\\udce9#2"]
    assert ids[10] == f"{ids[8]}#2"


def test_labels_of_json_are_spelled_alike_and_what_is_null_is_none(tmp_path: Path) -> None:
    given = [1, 1.0, True, None, float("nan"), "x", {"a": 1}, "y" * 2000, "z\0"]
    members = []
    for i, value in enumerate(given):
        about = json.dumps({"label": value, "class": "furry"})
        members += [(f"s{i}.png", png(i)), (f"s{i}.json", about.encode())]
    run = extract(webdataset(str(shard(tmp_path / "a.tar", members))), tmp_path / "run")
    assert run.label_texts() == ["1", "1", "true", "", "", "x", "", "", ""]
    assert run.status.tolist() == [1] * 6 + [2] * 3


def test_texts_of_shards_are_items(tmp_path: Path) -> None:
    members = [("a.txt", "später".encode()), ("b.txt", b"two"), ("c.txt", b"\xff")]
    members.append(("d.txt", b" \n"))
    path = shard(tmp_path / "a.tar", members)
    given = webdataset(str(path), item="txt")
    with given.read(0, scratch=tmp_path / "x", most=None) as source:
        assert [source.read(0), source.read(1)] == ["später", "two"]
        with pytest.raises(DataError, match="its .txt cannot be read"):
            source.read(2)
        with pytest.raises(DataError, match="the text is empty"):
            source.read(3)
        assert source.metadata["text"][:2] == ["später", "two"]
        assert pickle.loads(pickle.dumps(source)).read(1) == "two"


def test_no_picture_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shards(tmp_path / "set", 9, 4)
    read: Counter[str] = Counter()
    plain = tar_data._bytes

    def counted(file: Any, member: Any) -> bytes:
        read[member.name] += 1
        return plain(file, member)

    monkeypatch.setattr(tar_data, "_bytes", counted)
    extract(webdataset(str(folder)), tmp_path / "run")
    assert len(read) == 3 * 13
    assert set(read.values()) == {1}


class Stopped(Exception):
    pass


@pytest.mark.parametrize("at", range(0, 13, 3))
def test_a_run_that_was_broken_off_goes_on_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    folder = shards(tmp_path / "set", 5, 4, 3)
    undisturbed = extract(webdataset(str(folder)), tmp_path / "whole")
    plain = tar_data._Reader.__call__
    n_read = 0

    def broken(self: Any, i: int) -> Any:
        nonlocal n_read
        n_read += 1
        if n_read == at + 1:
            raise MemoryError
        return plain(self, i)

    monkeypatch.setattr(tar_data._Reader, "__call__", broken)
    with pytest.raises(DataError, match="out of memory") if at < 12 else contextlib.nullcontext():
        extract(webdataset(str(folder)), tmp_path / "run")
    monkeypatch.undo()
    run = extract(webdataset(str(folder)), tmp_path / "run")
    assert sha256(run.path) == sha256(undisturbed.path)
    assert not unfinished.parts_folder(run.path).exists()


KILLED = """
import sys
from pathlib import Path
from tests.test_tar_data import extract, webdataset
extract(webdataset(sys.argv[1]), Path(sys.argv[2]), num_workers=int(sys.argv[3]), batch_size=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "num_workers"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGKILL, 2, marks=EXHAUSTIVE),
        pytest.param(signal.SIGINT, 0, marks=EXHAUSTIVE),
        pytest.param(signal.SIGINT, 2, marks=EXHAUSTIVE),
    ],
)
def test_a_run_killed_again_and_again_ends_with_the_bytes_of_one_that_was_not(
    tmp_path: Path, number: signal.Signals, num_workers: int
) -> None:
    folder = shards(tmp_path / "set", 60, 40, 60)
    undisturbed = extract(webdataset(str(folder)), tmp_path / "whole", batch_size=2)
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "run"), str(num_workers)]
    final = tmp_path / "run" / "embeddings.h5"
    hit = 0
    for _ in range(3):
        process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE)
        ends = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < ends:
            if unfinished.parts_folder(
                final
            ).exists():  # at some place of the run, each time another
                time.sleep(0.05 * (hit + 1))
                process.send_signal(number)
                break
            time.sleep(0.005)
        process.communicate(timeout=60)
        hit += process.returncode != 0
        if final.exists():
            break
    assert hit
    run = extract(webdataset(str(folder)), tmp_path / "run", batch_size=2)
    assert sha256(run.path) == sha256(undisturbed.path)
    assert numbers_of(run) == list(range(160))


def test_a_shard_that_changes_under_way_fails_its_rows_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "set", 4, 4)
    plain = tar_data._Reader.__call__

    def meddled(self: Any, i: int) -> Any:
        if i == 2:
            os.utime(self.path, ns=(1, 1))
        return plain(self, i)

    monkeypatch.setattr(tar_data._Reader, "__call__", meddled)
    monkeypatch.setattr(inputs, "n_threads", lambda: 1)
    run = extract(webdataset(str(folder)), tmp_path / "run", num_workers=0)
    assert run.status.tolist() == [1, 1, 2, 2] * 2
    reasons = {one["reason"] for one in unfinished.read_reasons(run.path)}
    assert reasons == {"DataError: it was changed after the run had listed it"}


@pytest.mark.parametrize("packed", [False, True])
def test_a_shard_that_was_replaced_before_its_turn_is_refused(packed: bool, tmp_path: Path) -> None:
    folder = shards(tmp_path / "set", 4, 4)
    (tmp_path / "other").mkdir()
    other = shards(tmp_path / "other", 6, 2) / "s-001.tar"
    second = folder / "s-001.tar"
    if packed:
        for place in (second, other):
            place.with_suffix(".tar.gz").write_bytes(gzip.compress(place.read_bytes()))
            place.unlink()
        second, other = second.with_suffix(".tar.gz"), other.with_suffix(".tar.gz")
    listed = webdataset(str(folder))
    shutil.copy2(second, tmp_path / "kept")
    os.replace(other, second)
    with pytest.raises(DataError, match=r"s-001\.tar.* was changed after the run had listed it"):
        extract(listed, tmp_path / "run")
    os.replace(tmp_path / "kept", second)
    run = extract(webdataset(str(folder)), tmp_path / "run")
    assert numbers_of(run) == list(range(8))


def test_other_shards_or_settings_are_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "set", 4, 4)
    run = extract(webdataset(str(folder)), tmp_path / "run")
    before = sha256(run.path)
    assert sha256(extract(webdataset(str(folder)), tmp_path / "run").path) == before
    shard(folder / "s-001.tar", sample(9))
    with pytest.raises(StoreError, match="holds another run: the data has changed since: other sh"):
        extract(webdataset(str(folder)), tmp_path / "run")
    assert sha256(run.path) == before
    run = extract(webdataset(str(folder)), tmp_path / "run", overwrite=True)
    assert numbers_of(run) == [0, 1, 2, 3, 9]
    # Parts of a run that was not finished are not those of another.
    monkeypatch.setattr(runs, "_join", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extract(webdataset(str(folder)), tmp_path / "new")
    monkeypatch.undo()
    with pytest.raises(
        StoreError, match=r"parts/000000/embeddings\.h5 holds another run: .*other sh"
    ):
        extract(webdataset(str(folder), limit=2), tmp_path / "new")
    with pytest.raises(StoreError, match="holds parts of another run that was not finished; run"):
        embedx.join(tmp_path / "new")
    assert numbers_of(extract(webdataset(str(folder)), tmp_path / "new")) == [0, 1, 2, 3, 9]


def test_a_damaged_part_is_named_and_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "set", 4, 4)
    whole = extract(webdataset(str(folder)), tmp_path / "whole")
    monkeypatch.setattr(runs, "_join", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extract(webdataset(str(folder)), tmp_path / "run")
    monkeypatch.undo()
    part = unfinished.parts_folder(tmp_path / "run" / "embeddings.h5") / "000001" / "embeddings.h5"
    data = bytearray(part.read_bytes())
    at = data.find(np.asarray(whole.embeddings["mean"][5]).tobytes())
    assert at > 0
    data[at] ^= 1
    part.write_bytes(data)
    with pytest.raises(StoreError, match=r"000001/embeddings\.h5: row 1 \(s-001/s0005\) does not"):
        extract(webdataset(str(folder)), tmp_path / "run")
    assert not (tmp_path / "run" / "embeddings.h5").exists()
    part.unlink()
    run = extract(webdataset(str(folder)), tmp_path / "run")
    assert sha256(run.path) == sha256(whole.path)


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_data, "_INFLATED_FREE", 2**20)
    bomb = tmp_path / "bomb.tar.gz"
    bomb.write_bytes(gzip.compress(bytes(2**24)))
    with pytest.raises(DataError, match="unpacks to more than 100 times its size"):
        extract(webdataset(str(bomb)), tmp_path / "run")
    assert not list(tmp_path.rglob("shard.tmp"))
    monkeypatch.setattr(tar_data, "_MEMBER_MOST", 1000)
    monkeypatch.setattr(tar_data, "_TEXT_MOST", 100)
    big = [("x.png", bytes(1001)), ("y.png", png(3)), ("y.json", b'{"a": "' + b"a" * 100 + b'"}')]
    path = shard(tmp_path / "a.tar", [*big, *sample(1)])
    run = extract(webdataset(str(path)), tmp_path / "big")
    assert run.status.tolist() == [2, 2, 1]
    reasons = [one["reason"] for one in unfinished.read_reasons(run.path)]
    assert "x.png has 1,001 bytes, more than 1,000" in reasons[0]
    assert "its .json cannot be read: it has 109 bytes, and at most 100 are read" in reasons[1]


def test_a_member_that_claims_terabytes_fails_alone(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [*sample(1), ("z.png", png(2))])
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        header = tar.getmember("z.png").offset
    info = tarfile.TarInfo("z.png")
    info.size = 2**42
    data[header : header + 512] = info.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(data)
    run = extract(webdataset(str(path)), tmp_path / "run")
    assert (run.ids, run.status.tolist()) == (["a/s0001", "a/z"], [1, 2])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s-{000..001}.tar", ["s-000", "s-001"]),
        ("s-*.tar", ["s-000", "s-001", "s-002"]),
        ("s-002.tar::s-000.tar", ["s-002", "s-000"]),
        (".", ["s-000", "s-001", "s-002"]),
    ],
)
def test_a_path_names_its_shards_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: list[str]
) -> None:
    shards(tmp_path, 1, 1, 1)
    (tmp_path / "readme.txt").write_text("no shard")
    monkeypatch.chdir(tmp_path)
    assert list(webdataset(path).names) == expected


def test_shards_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    for part in ("train", "val"):
        shard(tmp_path / part / "0.tar", sample(1))
    given = webdataset(f"{tmp_path}/train/0.tar::{tmp_path}/val/0.tar")
    assert list(given.names) == ["train/0", "val/0"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.tar", "there is no none.tar; name tar files or their folder"),
        ("s-{5..3}.tar", "holds the range 5..3; let it ascend"),
        ("s-000.tar::s-000.tar", "names the shard s-000.tar twice"),
        ("empty", "holds no tar file"),
        ("nowhere://x.tar", "cannot read the shard nowhere://x.tar: Protocol not known: nowhere"),
    ],
)
def test_a_path_without_shards_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    shards(tmp_path, 1)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        webdataset(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"not a tar file at all", bytes(10_000), b"\x1f\x8b\x08"])
def test_what_is_no_tar_file_is_an_error_of_one_line(tmp_path: Path, data: bytes) -> None:
    for name in ("a.tar", "b.tar.gz"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError) as caught:
            extract(webdataset(str(tmp_path / name)), tmp_path / "run")
        assert "\n" not in str(caught.value)
        assert name in str(caught.value) or "every one of the 0 rows" in str(caught.value)
        assert not (tmp_path / "run").exists()


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.limit must be at least 1, not 0"):
        webdataset(str(shards(tmp_path, 1)), limit=0)
