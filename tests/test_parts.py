"""Parts of a run: whatever is cut, in whatever order it is made, the file is that of one go."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

import embedx
from embedx import derived, inputs, layout, models, runs, store, unfinished, writing
from embedx.disk import writing_lock
from embedx.errors import ConfigError, DataError, Interrupted, InUseError, ShapeError, StoreError
from embedx.inputs import WINDOW_BATCHES
from embedx.models import Preprocess
from embedx.parts import Feed, part_rows
from embedx.store import Embeddings
from tests.conftest import EXHAUSTIVE, sha256
from tests.test_extract import Crop
from tests.test_tar_data import extract as extract_shards
from tests.test_tar_data import numbers_of, shards, webdataset

Array = np.ndarray[Any, Any]
Here = Callable[..., tuple[int, list[str], list[str]]]


@drawn(n_rows=st.integers(0, 500), block=st.integers(1, 70), n_parts=st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_parts_have_each_row_once_and_begin_at_whole_blocks(
    n_rows: int, block: int, n_parts: int
) -> None:
    parts = [part_rows(i, n_parts=n_parts, n_rows=n_rows, block=block) for i in range(n_parts)]
    assert [row for part in parts for row in part] == list(range(n_rows))
    assert all(part.start % block == 0 or not len(part) for part in parts)
    n_blocks = [-(-len(part) // block) for part in parts]
    assert max(n_blocks) - min(n_blocks) <= 1


class Net(nn.Module):
    """A network that draws random numbers: its rows hang on the seed of their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(len(x), 4)
        return self.last(torch.relu(self.first(x)) + noise)  # type: ignore[no-any-return]


N = 43


def array(bad: tuple[int, ...] = ()) -> Array:
    x = np.random.default_rng(0).standard_normal((N, 6)).astype("f4")
    x[list(bad)] = np.nan
    return x


def extract(out: Path, x: Array | None = None, **given: Any) -> Embeddings:
    torch.manual_seed(0)
    about = {
        "labels": [f"label {i % 3}" for i in range(N)],
        "ids": [f"id {'ä' * (i % 4)}{i}" for i in range(N)],
        **given,
    }
    layers = ["first", "last"]
    x = array() if x is None else x
    return embedx.extract(Net(), x, layers=layers, batch_size=4, out=out, **about)


def files(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("bad", [(), (3, 17), tuple(range(8)), tuple(range(12, 43))], ids=len)
@pytest.mark.parametrize("n_parts", [3, 11])
def test_parts_in_any_order_are_the_file_of_one_go(
    tmp_path: Path, n_parts: int, bad: tuple[int, ...]
) -> None:
    x = array(bad)
    whole = extract(tmp_path / "whole", x, save_outputs=True)
    for part in np.random.default_rng(0).permutation(n_parts)[: n_parts // 2 + 1].tolist():
        try:
            made = extract(tmp_path / "run", x, n_parts=n_parts, part=part, save_outputs=True)
        except DataError:  # it has no good row: the join marks them
            rows = part_rows(part, n_parts=n_parts, n_rows=N, block=4)
            assert set(rows) <= set(bad)
            continue
        rows = part_rows(part, n_parts=n_parts, n_rows=N, block=4)
        assert made.ids == whole.ids[rows.start : rows.stop]
        np.testing.assert_array_equal(
            made.embeddings["last"], whole.embeddings["last"][rows.start : rows.stop]
        )
    run = extract(tmp_path / "run", x, n_parts=n_parts, save_outputs=True)
    assert np.isfinite(run.embeddings["last"]).sum() == (N - len(bad)) * 3
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    listed = unfinished.read_reasons(run.path)
    assert [one["row"] for one in listed] == list(bad)


def test_pictures_that_cannot_be_read_and_augmentations_are_those_of_their_rows(
    photos: Path, tmp_path: Path
) -> None:
    first, *_, last = sorted(photos.rglob("*.jpg"))
    for path in (first, last):
        path.write_bytes(path.read_bytes()[:200])

    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), nn.Linear(3, 2)).eval()
    prepared = Crop(resize_px=16, crop_px=16)
    given: dict[str, Any] = {"layers": "0", "batch_size": 2, "preprocess": prepared}
    embedx.extract(net, photos, out=tmp_path / "whole", **given)
    for part in (2, 0):
        embedx.extract(net, photos, out=tmp_path / "run", n_parts=3, part=part, **given)
    embedx.extract(net, photos, out=tmp_path / "run", n_parts=3, num_workers=1, **given)
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    assert len(unfinished.read_reasons(tmp_path / "run" / "embeddings.h5")) == 2


def test_texts_are_cut_at_whole_windows(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tests.test_text import save_encoder

    model = models.hf(str(save_encoder(tmp_path / "tiny")))
    rng = np.random.default_rng(0)
    texts = [" ".join(["a", "b", "c"][: int(n)]) for n in rng.integers(1, 4, 3 * WINDOW_BATCHES)]
    whole = embedx.extract(model, texts, batch_size=1, out=tmp_path / "whole")
    parts = [
        embedx.extract(model, texts, batch_size=1, out=tmp_path / "run", n_parts=2, part=part)
        for part in (1, 0)
    ]
    assert [part.n_rows for part in parts] == [2 * WINDOW_BATCHES, WINDOW_BATCHES]
    run = embedx.extract(model, texts, batch_size=1, out=tmp_path / "run", n_parts=2)
    assert sha256(run.path) == sha256(whole.path)


def same(parts: Embeddings, whole: Embeddings) -> None:
    """All that can be read of parts is what the file of one go has."""
    assert isinstance(parts, store.Parts)
    assert parts.attrs == whole.attrs
    assert parts.identity == whole.identity
    assert (parts.n_rows, parts.complete) == (whole.n_rows, True)
    assert parts.ids == whole.ids
    np.testing.assert_array_equal(parts.status, whole.status)
    np.testing.assert_array_equal(parts.ok, whole.ok)
    assert (parts.labels is None) == (whole.labels is None)
    if whole.labels is not None:
        np.testing.assert_array_equal(parts.labels, whole.labels)
    assert parts.label_names == whole.label_names
    assert parts.label_texts() == whole.label_texts()
    assert list(parts.metadata) == list(whole.metadata)
    for name, column in whole.metadata.items():
        assert type(parts.metadata[name]) is type(column)
        np.testing.assert_array_equal(parts.metadata[name], column)
    assert parts.fields == whole.fields
    assert parts.point_attrs == whole.point_attrs
    assert list(parts.streamed) == list(whole.streamed)
    for name, rows in whole.streamed.items():
        read = parts.streamed[name]
        assert (read.shape, read.dtype, len(read)) == (rows.shape, rows.dtype, len(rows))
        assert np.asarray(read).tobytes() == np.asarray(rows).tobytes()
    for kind in ("embeddings", "outputs"):
        assert list(getattr(parts, kind)) == list(getattr(whole, kind))
    assert (parts.thumbnails is None) == (whole.thumbnails is None)
    np.testing.assert_array_equal(parts.checksums(), whole.checksums())
    assert parts.verify() == []
    assert parts.reasons() == whole.reasons() == unfinished.read_reasons(whole.path)


@pytest.mark.parametrize("bad", [(), (3, 17, 40)], ids=len)
@pytest.mark.parametrize("n_parts", [1, 3, 11])
def test_finished_parts_open_as_the_file_of_one_go(
    tmp_path: Path, n_parts: int, bad: tuple[int, ...]
) -> None:
    x = array(bad)
    whole = extract(tmp_path / "whole", x, save_outputs=True)
    for part in range(n_parts):
        extract(tmp_path / "run", x, n_parts=n_parts, part=part, save_outputs=True)
    final = tmp_path / "run" / "embeddings.h5"
    for where in (tmp_path / "run", final, unfinished.parts_folder(final)):
        parts = embedx.open(where)
        same(parts, whole)
        assert parts.path == final
    assert embedx.open(parts) is parts
    if not bad:  # a frame with NaN is not equal to itself
        assert parts.to_pandas().equals(whole.to_pandas())
    about, joined = derived.describe(tmp_path / "run", verify=True), derived.describe(whole)
    assert about["parts"] == f"{n_parts}, not joined"
    other = {"file", "parts", "size_mb", "verified"}
    assert {k: v for k, v in about.items() if k not in other} == {
        k: v for k, v in joined.items() if k not in other
    }
    extract(tmp_path / "run", x, n_parts=n_parts, save_outputs=True)
    assert sha256(final) == sha256(whole.path)
    assert not isinstance(embedx.open(tmp_path / "run"), store.Parts)
    if n_parts > 1:
        with pytest.raises(StoreError, match="removed or replaced meanwhile; open it"):
            parts.embeddings["last"][0]
        with pytest.raises(StoreError, match="removed or replaced meanwhile; open it"):
            parts.verify()


def test_pictures_with_metadata_open_from_parts(photos: Path, tmp_path: Path) -> None:
    sorted(photos.rglob("*.jpg"))[1].write_bytes(b"no picture")
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    source = embedx.data.folder(str(photos))
    n = len(source.ids)
    source.metadata.update(
        size=np.arange(n) * 3,
        share=np.linspace(0, 1, n),
        is_old=np.arange(n) % 2 == 0,
        **{"the author/name": [f"é{'x' * i}" for i in range(n)]},
    )
    given: dict[str, Any] = {
        "layers": "0",
        "batch_size": 2,
        "preprocess": Preprocess(resize_px=40, crop_px=32),
    }
    whole = embedx.extract(net, source, out=tmp_path / "whole", **given)
    for part in range(3):
        embedx.extract(net, source, out=tmp_path / "run", n_parts=3, part=part, **given)
    parts = embedx.open(tmp_path / "run")
    same(parts, whole)
    assert parts.thumbnails is not None
    assert whole.thumbnails is not None
    np.testing.assert_array_equal(parts.thumbnails[[0, -1, 2]], whole.thumbnails[[0, -1, 2]])


def test_shards_open_as_the_file_of_one_go(tmp_path: Path) -> None:
    folder = shards(tmp_path / "set", 5, 0, 4, 3)
    data = webdataset(str(folder))
    whole = extract_shards(data, tmp_path / "whole")
    extract_shards(data, tmp_path / "run", n_parts=2, part=1)
    with pytest.raises(
        StoreError, match=r"2 of 4 shards are there: shard 1 of 4 is missing, as is"
    ):
        embedx.open(tmp_path / "run")
    extract_shards(data, tmp_path / "run", n_parts=2, part=0)
    same(embedx.open(tmp_path / "run"), whole)  # the empty one is not missing
    assert sha256(extract_shards(data, tmp_path / "run", n_parts=2).path) == sha256(whole.path)


def test_a_part_that_cannot_be_opened_is_named_with_how_to_make_it(tmp_path: Path) -> None:
    run, final = tmp_path / "run", tmp_path / "run" / "embeddings.h5"
    for part in (0, 2):
        extract(run, n_parts=4, part=part)
    mend = r"; the command that made them makes it with n_parts=4 part=1, and without part all that"
    missing = r"is not joined yet, 2 of 4 parts are there: part 1 of 4 is "
    with pytest.raises(StoreError, match=missing + "missing, as is 1 more" + mend):
        embedx.open(run)
    begun = unfinished.part_path(final, 1)
    begun.parent.mkdir()
    whole = begun.with_name(begun.name + ".partial")
    shutil.copy(unfinished.part_path(final, 0), whole)
    with pytest.raises(StoreError, match=missing + "not finished, it has 8 of 8 rows"):
        derived.describe(run)
    whole.unlink()
    extract(run, n_parts=4, part=1)
    extract(run, n_parts=4, part=3)
    assert embedx.open(run).n_rows == N

    def refused(message: str) -> None:
        for name in (run, unfinished.parts_folder(final)):
            with pytest.raises((StoreError, ShapeError), match=message) as caught:
                embedx.open(name)
            assert "\n" not in str(caught.value)

    data = begun.read_bytes()
    begun.write_bytes(data[: len(data) // 2])
    refused(r"part 1 of 4 cannot be read: .*may be truncated.*; remove .*000001 and run again, wh")
    shutil.copy(unfinished.part_path(final, 2), begun)
    refused(r"000001/embeddings\.h5 is not part 1 of 4 of this run, it has other rows; remove .*01")
    for given in ({"dtype": "float16"}, {"x": array((1,))}):
        extract(tmp_path / "other", n_parts=4, part=1, **given)
        shutil.move(unfinished.part_path(tmp_path / "other" / "embeddings.h5", 1), begun)
        shutil.rmtree(tmp_path / "other")
        refused(r"000001/embeddings\.h5 is not part 1 of 4 of this run")
    begun.write_bytes(data)
    mark = unfinished.parts_folder(final) / "of.txt"
    written = mark.read_text()
    for text in ("", "\n\n\n", written.replace("part", "parts"), written.replace("4", "four", 1)):
        mark.write_text(text)
        refused(
            r"of\.txt does not say which parts of .* there are to be|is not part 0 of 4 of this"
        )
    mark.write_text(written)
    at = data.find(np.asarray(embedx.open(run).embeddings["last"][13]).tobytes())
    begun.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    parts = embedx.open(run)
    assert parts.verify() == [13]
    assert parts.row_file(13) == begun
    message = (
        r"1 of 43 rows .* first row 13 \(.*13\) in .*000001/embeddings\.h5; make that part anew"
    )
    with pytest.raises(StoreError, match=message):
        derived.describe(run, verify=True)


def test_rows_are_read_from_the_parts_that_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in range(11):
        extract(tmp_path, n_parts=11, part=part)
    opened: list[Path] = []
    plain = store._Rows.__call__

    def counted(rows: Any) -> Array:
        opened.append(rows.path)
        return plain(rows)

    monkeypatch.setattr(store._Rows, "__call__", counted)
    rows = embedx.open(tmp_path).embeddings["last"]
    assert rows.shape == (N, 3)
    assert not opened
    for which in (5, slice(4, 8), [6, 4], np.arange(N) == 7):
        rows[which]
    assert opened == [unfinished.part_path(tmp_path / "embeddings.h5", 1)]
    rows[[3, 4]]
    assert len(set(opened)) == 2


@pytest.mark.parametrize("method", ["pca", "umap"])
def test_what_is_made_of_parts_is_what_is_made_of_the_file(
    embedx_here: Here, tmp_path: Path, method: str
) -> None:
    words = ("extract", "model=mobilenet_v3_small", "model.weights=null", "model.input_size=32")
    words = (*words, "data.limit=60", "batch_size=16", "save_outputs=true")
    assert embedx_here(*words, "name=whole")[0] == 0
    assert embedx_here(*words, "-m", "name=run", "n_parts=3", "part=range(3)")[0] == 0
    made = []
    for name in ("whole", "run"):
        for stage in (
            ("project", f"projection={method}"),
            ("evaluate",),
            ("neighbors", "n_neighbors=5"),
            ("export", "exporter=table"),
            ("view", "viewer=report"),
            ("info",),
        ):
            key = "path" if stage == ("info",) else "embeddings"
            status, out, err = embedx_here(*stage, f"{key}=outputs/{name}")
            assert (status, err) == (0, []), (stage, out)
        folder = tmp_path / "outputs" / name
        made.append(
            {
                str(path.relative_to(folder)): sha256(path)
                for path in folder.rglob("*")
                if path.is_file() and ".parts" not in str(path)
            }
        )
    whole, run = made
    own = {"embeddings.h5", "config.yaml", "report.html"}  # the report says how large the file is
    assert {k: v for k, v in whole.items() if k not in own} == {
        k: v for k, v in run.items() if k not in own
    }
    assert "report.html" in run
    # Joined, it is the same run still, and what was made of it is that of its file.
    status, out, err = embedx_here(*words, "name=run", "n_parts=3")
    assert (status, err) == (0, [])
    assert not any("removed" in line for line in out)
    status, out, err = embedx_here("project", f"projection={method}", "embeddings=outputs/run")
    assert any("nothing to do" in line for line in out)
    assert sha256(tmp_path / "outputs/run/embeddings.h5") == whole["embeddings.h5"]


def test_overwriting_parts_takes_away_what_was_made_of_them(tmp_path: Path) -> None:
    for n_parts in (3, None):
        run = tmp_path / str(n_parts)
        for part in range(3):
            extract(run, n_parts=3, part=part)
        made = embedx.project(run)
        assert made.path.exists()
        extract(run, n_parts=n_parts, overwrite=True)
        assert not made.path.exists()


def test_shards_are_shared_out_by_parts(tmp_path: Path) -> None:
    folder = shards(tmp_path / "set", 5, 0, 4, 3)
    whole = extract_shards(webdataset(str(folder)), tmp_path / "whole")
    extract_shards(webdataset(str(folder)), tmp_path / "run", n_parts=2, part=1)
    there = sorted(path.parent.name for path in (tmp_path / "run").glob("*.parts/*/*.h5"))
    assert there == ["000002", "000003"]
    run = extract_shards(webdataset(str(folder)), tmp_path / "run", n_parts=2)
    assert numbers_of(run) == list(range(12))
    assert sha256(run.path) == sha256(whole.path)
    with pytest.raises(ConfigError, match="n_parts must be at most 4, the number of shards, not 5"):
        extract_shards(webdataset(str(folder)), tmp_path / "b", n_parts=5)
    with pytest.raises(ConfigError, match=r"data\.limit=3 counts through the shards in order"):
        extract_shards(webdataset(str(folder), limit=3), tmp_path / "b", n_parts=2)
    assert not (tmp_path / "b").exists()


def test_a_part_that_is_damaged_or_of_another_run_is_named(tmp_path: Path) -> None:
    whole = extract(tmp_path / "whole")
    run, final = tmp_path / "run", tmp_path / "run" / "embeddings.h5"

    def begun(*parts: int, n_parts: int = 3, **given: Any) -> None:
        shutil.rmtree(run, ignore_errors=True)
        for part in parts:
            extract(run, n_parts=n_parts, part=part, **given)

    begun(1)
    part = unfinished.part_path(final, 1)
    data = bytearray(part.read_bytes())
    at = data.find(np.asarray(whole.embeddings["last"][20]).tobytes())
    assert at > 0
    data[at] ^= 1
    part.write_bytes(data)
    with pytest.raises(
        StoreError, match=r"000001/embeddings\.h5: row \d+ \(id .*20\) does not mat"
    ):
        extract(run, n_parts=3)
    part.write_bytes(data[: len(data) // 2])
    with pytest.raises(StoreError, match=r"part 1 of 3 cannot be read: .*000001.*; remove .*01 an"):
        extract(run, n_parts=3)
    shutil.copytree(unfinished.part_path(final, 2).parent, part.parent, dirs_exist_ok=True)
    with pytest.raises(
        StoreError, match=r"000001/embeddings\.h5 is not part 1 of 3 of this run, it"
    ):
        extract(run, n_parts=3)
    shutil.rmtree(part.parent)
    assert sha256(extract(run, n_parts=3).path) == sha256(whole.path)

    begun(0)
    for given, message in (
        ({"normalize": True}, "holds another run: normalize is false there and true here"),
        ({"x": array((1,))}, r"the data has changed since: 1 edited \(id ä1\); choose"),
        ({"n_parts": 2}, r"holds parts of this run, of 3 in all, and n_parts is 2; go on with n_p"),
        ({"n_parts": None}, r"of 3 in all, and this command has no n_parts; go on with n_parts=3"),
    ):
        with pytest.raises(StoreError, match=message):
            extract(run, **{"n_parts": 3, **given})
        part_of = {"part": 1} if given.get("n_parts", 3) else {}
        with pytest.raises(StoreError, match=message):
            extract(run, **{"n_parts": 3, **given, **part_of})
    assert embedx.open(unfinished.part_path(final, 0)).n_rows == 12
    assert sha256(extract(run, overwrite=True).path) == sha256(whole.path)
    assert files(run) == files(tmp_path / "whole")


def test_a_file_that_changed_between_two_parts_is_named(photos: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    given: dict[str, Any] = {"layers": "0", "batch_size": 2, "n_parts": 3, "out": tmp_path / "run"}
    given["preprocess"] = Preprocess(resize_px=40, crop_px=32)
    embedx.extract(net, photos, part=0, **given)
    os.utime(sorted(photos.rglob("*.jpg"))[1], ns=(1, 1))
    with pytest.raises(StoreError, match=r"has changed since: 1 edited \(cat/03\.jpg\); choose"):
        embedx.extract(net, photos, part=1, **given)


def test_wrong_parts_are_refused_in_one_line_and_leave_nothing(tmp_path: Path) -> None:
    for given, message in (
        ({"part": 0}, "part=0 of how many. give n_parts too"),
        ({"part": 3, "n_parts": 3}, "part must be 0 to 2 for n_parts=3, not 3"),
        ({"part": -1, "n_parts": 3}, "part must be 0 to 2 for n_parts=3, not -1"),
        ({"n_parts": 0}, "n_parts must be 1 to 1,000,000, not 0"),
        (
            {"n_parts": 12},
            "n_parts must be at most 11, not 12: of the 43 rows 4 are made at once",
        ),
        ({"n_parts": True}, "n_parts must be a whole number"),
        ({"part": "1", "n_parts": 3}, "part must be a whole number"),
        (
            {"part": 1, "n_parts": 3, "overwrite": True},
            r"just made cannot be told apart; remove .*run before",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            extract(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


class Centred(nn.Module):
    """It keeps the mean of its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.centre = nn.Linear(6, 3), None

    def forward(self, x: Tensor) -> Tensor:
        if self.centre is None:
            self.centre = x.mean(0)
        return self.layer(x - self.centre)  # type: ignore[no-any-return]


def test_parts_of_a_model_that_made_itself_of_its_first_batch_are_not_joined(
    tmp_path: Path,
) -> None:
    for part in (0, 1):
        torch.manual_seed(0)
        given: dict[str, Any] = {"batch_size": 4, "out": tmp_path, "n_parts": 2, "layers": "layer"}
        embedx.extract(Centred(), array(), part=part, **given)
    torch.manual_seed(0)
    with pytest.raises(StoreError, match="part 0 of 2 and part 1 of 2 are of a model that made it"):
        embedx.extract(Centred(), array(), **given)


def test_parts_made_by_others_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extract(tmp_path, n_parts=2, part=0)
    own = inputs.environment()
    monkeypatch.setattr(inputs, "environment", lambda: {**own, "threads": 99, "torch": "0"})
    extract(tmp_path, n_parts=2, part=1)
    run = extract(tmp_path, n_parts=2)
    assert json.loads(run.attrs["environment"]) == own
    assert "part 0 of 2 and part 1 of 2 were made with another torch, threads (" in caplog.text


def test_a_part_that_another_process_makes_is_refused(tmp_path: Path) -> None:
    extract(tmp_path, n_parts=3, part=1)
    with (
        writing_lock(unfinished.part_path(tmp_path / "embeddings.h5", 2)),
        pytest.raises(InUseError, match=r"000002/embeddings\.h5 is being written by"),
    ):
        extract(tmp_path, n_parts=3, part=2)
    extract(tmp_path, n_parts=3, part=0)  # others are not
    with (
        writing_lock(tmp_path / "embeddings.h5"),
        pytest.raises(InUseError, match=r"run|embeddings\.h5 is being written by"),
    ):
        extract(tmp_path, n_parts=3)
    assert extract(tmp_path, n_parts=3).n_rows == N


def test_a_run_killed_while_it_joins_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = extract(tmp_path / "whole")
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    plain = runs._fill
    for place, name in (
        (runs, "append_parts"),
        (runs, "replace_file"),
        (unfinished, "remove_parts"),
    ):
        run = tmp_path / name
        extract(run, n_parts=3, part=0)
        extract(run, n_parts=3, part=1)
        extract(run, n_parts=3, part=2)
        for attempt in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(runs, "_fill", counted)
                if attempt:
                    patch.setattr(place, name, lambda *_, **__: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        extract(run, n_parts=3)
                else:
                    extract(run, n_parts=3)
        assert files(run) == files(tmp_path / "whole")
    assert not calls
    assert whole.n_rows == N


def test_a_join_that_was_killed_amid_a_batch_is_not_gone_on_with_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = extract(tmp_path / "whole")
    for part in range(3):
        extract(tmp_path / "run", n_parts=3, part=part)

    def killed(writer: writing.Writer, parts: Any) -> None:
        first = next(iter(parts))
        rows = {field.name: np.array(first.streamed[field.name][:6]) for field in writer.fields}
        writer.append(rows, status=first.status[:6])
        writer.commit()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "append_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            extract(tmp_path / "run", n_parts=3)
    with pytest.raises(StoreError, match=r"joined of parts, 6 of 43 rows so far; .*n_parts=3"):
        extract(tmp_path / "run")
    assert extract(tmp_path / "run", n_parts=3).path.read_bytes() == whole.path.read_bytes()


def test_a_run_that_goes_on_in_another_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with stopped_after(3), pytest.raises(Interrupted):
        extract(tmp_path)
    own = inputs.environment()
    monkeypatch.setattr(inputs, "environment", lambda: {**own, "pillow": "0"})
    extract(tmp_path)
    assert "the rows before and those that follow were made with another pillow (" in caplog.text


def test_reasons_are_those_of_the_file_also_while_another_takes_its_place(tmp_path: Path) -> None:
    run = extract(tmp_path, array(bad=(3, 5)))
    with stopped_after(3), pytest.raises(Interrupted):
        extract(tmp_path, array(bad=(3,)), overwrite=True)
    assert [one["row"] for one in run.reasons()] == [3, 5]
    begun = embedx.open(unfinished.partial_path(run.path))
    assert [one["row"] for one in begun.reasons()] == [3]


def test_parts_that_are_joined_while_they_are_opened_are_opened_as_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in range(3):
        extract(tmp_path, n_parts=3, part=part)
    plain = store._all_parts

    def joined(path: Path) -> Any:
        found = plain(path)
        monkeypatch.undo()
        extract(tmp_path, n_parts=3)
        return found

    monkeypatch.setattr(store, "_all_parts", joined)
    run = embedx.open(tmp_path)
    assert not isinstance(run, store.Parts)
    assert run.n_rows == N


def test_what_was_made_of_some_rows_is_not_left_for_that_of_all(tmp_path: Path) -> None:
    with stopped_after(6), pytest.raises(Interrupted):
        extract(tmp_path)
    embedx.evaluate(tmp_path / "embeddings.h5.partial")
    embedx.search(tmp_path / "embeddings.h5.partial", sheet=0)
    scores = tmp_path / "scores.json"
    assert json.loads(scores.read_text())["scores"][0]["rows"] == 24
    assert list(tmp_path.glob("neighbors*"))
    extract(tmp_path)
    assert not scores.exists()
    assert not list(tmp_path.glob("neighbors*"))


def test_a_run_begun_in_one_go_is_not_begun_again_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing.Writer, "finish", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extract(tmp_path)
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"partial was begun in one go; go on without n_parts and"):
        extract(tmp_path, n_parts=3)
    assert extract(tmp_path).n_rows == N


def test_a_sweep_over_parts_and_the_command_without_part_give_the_run_of_one_go(
    embedx_here: Here, tmp_path: Path
) -> None:
    words = ("extract", "model=mobilenet_v3_small", "model.weights=null", "model.input_size=32")
    words = (*words, "data.limit=100", "batch_size=16")
    status, out, err = embedx_here(*words, "-m", "n_parts=3", "part=range(3)")
    assert (status, err) == (0, [])
    run = next((tmp_path / "outputs").glob("mobilenet_v3_small-digits-*"))
    again = next(line for line in out if line.startswith("next: "))
    assert again.endswith(
        "extract model=mobilenet_v3_small model.weights=null "
        "model.input_size=32 data.limit=100 batch_size=16 n_parts=3"
    )
    status, out, err = embedx_here(*words, "n_parts=3")
    assert (status, err) == (0, [])
    assert any("3 of 3 parts made before: joining them" in line for line in out)
    assert embedx_here(*words, "out=whole")[0] == 0
    assert files(run) == {**files(tmp_path / "whole"), "config.yaml": files(run)["config.yaml"]}
    assert "part" not in (run / "config.yaml").read_text()
    status, out, err = embedx_here(*words)
    assert any("nothing to do" in line for line in out)


KILLED = """
import sys
from pathlib import Path
from tests import test_parts
test_parts.slow(Path(sys.argv[1]))
"""


class Slow(Net):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


def slow(out: Path, **given: Any) -> Embeddings:
    torch.manual_seed(0)
    about: dict[str, Any] = {"layers": "last", "batch_size": 1, "out": out, **given}
    return embedx.extract(Slow(), array(), **about)


@pytest.mark.slow
@EXHAUSTIVE
def test_parts_killed_in_the_middle_go_on_where_they_were(tmp_path: Path) -> None:
    whole = slow(tmp_path / "whole")
    command = [sys.executable, "-c", KILLED.replace("argv[1])", "argv[1]), n_parts=3, part=1")]
    root = Path(__file__).parents[1]
    for number in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            [*command, str(tmp_path / "run")], cwd=root, stderr=subprocess.PIPE, text=True
        )
        part = unfinished.partial_path(unfinished.part_path(tmp_path / "run" / "embeddings.h5", 1))
        ends = time.monotonic() + 60
        while not part.exists() and process.poll() is None and time.monotonic() < ends:
            time.sleep(0.01)
        time.sleep(0.2)
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode
    assert part.exists()
    slow(tmp_path / "run", n_parts=3, part=1)
    run = slow(tmp_path / "run", n_parts=3)
    assert sha256(run.path) == sha256(whole.path)


class Asking(Feed):
    """It asks for the parts of a run that another machine has other words for."""

    def __init__(self, identity: dict[str, Any]) -> None:
        self.about = {"file_id": "other", "identity": identity}
        self.n_asked = 0

    def next(self) -> int | None:
        self.n_asked += 1
        return 0 if self.n_asked == 1 else None


def test_a_worker_that_would_make_other_rows_says_what_differs(tmp_path: Path) -> None:
    there = {**extract(tmp_path / "whole").identity, "code": "of another version"}
    feed = Asking(there)
    with pytest.raises(
        StoreError, match=r"here code is another than where the command was given \("
    ):
        extract(tmp_path / "run", n_parts=3, engine=feed)
    assert feed.n_asked == 0
    assert not (tmp_path / "run").exists()
    feed.about["file_id"] = store.open(tmp_path / "whole").attrs["id"]
    assert extract(tmp_path / "run", n_parts=3, engine=feed).n_rows == 12
    assert feed.n_asked == 2


class Flaky(Dataset[Any]):
    """Items of which one cannot be read for a while; it is none of those that are looked at."""

    is_away = False

    def __init__(self) -> None:
        self.x = torch.tensor(array())

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Tensor:
        if self.is_away and i == 21:
            raise OSError("away")
        return self.x[i]


@contextlib.contextmanager
def stopped_after(batches: int) -> Iterator[None]:
    """SIGTERM when so many batches are written."""
    append, n = writing.Writer.append, 0

    def stop(self: writing.Writer, *args: Any, **kwargs: Any) -> None:
        nonlocal n
        append(self, *args, **kwargs)
        n += 1
        if n == batches:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing.Writer, "append", stop)
        yield


@pytest.mark.parametrize("old", ["of failed rows", "of other settings"])
def test_a_stopped_run_that_overwrites_goes_on_and_the_old_file_is_not_taken_for_it(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(out: Path, **given: Any) -> Embeddings:
        torch.manual_seed(0)
        return embedx.extract(Net(), Flaky(), layers="last", batch_size=4, out=out, **given)

    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Flaky, "is_away", old == "of failed rows")
        replaced = run(tmp_path / "run", normalize=old == "of other settings")
    assert (replaced.status == layout.Status.FAILED).any() == (old == "of failed rows")
    before = sha256(replaced.path)
    with (
        stopped_after(6),
        pytest.raises(Interrupted, match="are kept; run the same command again, but without over"),
    ):
        run(tmp_path / "run", n_parts=3, overwrite=True)
    assert sha256(replaced.path) == before
    assert embedx.open(tmp_path / "run").attrs["id"] == replaced.attrs["id"]
    assert "is to be replaced by the parts beside it" in caplog.text
    made: list[int] = []
    fill = runs._fill

    def counted(plan: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(plan.rows.start)
        return fill(plan, *args, **kwargs)

    monkeypatch.setattr(runs, "_fill", counted)
    found = run(tmp_path / "run", n_parts=3)
    assert made == [12, 28]  # the first part was kept
    assert found.path.read_bytes() == whole.path.read_bytes()
    assert not unfinished.parts_folder(found.path).exists()


@pytest.mark.parametrize("same", [True, False])
def test_a_stopped_run_in_one_go_that_overwrites_parts_goes_on(same: bool, tmp_path: Path) -> None:
    def run(out: Path, **given: Any) -> Embeddings:
        torch.manual_seed(0)
        return embedx.extract(Net(), Flaky(), layers="last", batch_size=4, out=out, **given)

    whole = run(tmp_path / "whole")
    for part in (0, 1):
        run(tmp_path / "run", n_parts=3, part=part, normalize=not same)
    with (
        stopped_after(6),
        pytest.raises(Interrupted, match="24 of 43 rows are kept; run the same command again, but"),
    ):
        run(tmp_path / "run", overwrite=True)
    found = run(tmp_path / "run")
    assert found.path.read_bytes() == whole.path.read_bytes()
    assert not unfinished.parts_folder(found.path).exists()


@pytest.mark.parametrize("given", [{"part": 1}, {}])
def test_a_part_that_is_made_again_takes_what_was_made_of_it_away(
    given: dict[str, Any], tmp_path: Path
) -> None:
    for part in range(3):
        extract(tmp_path, n_parts=3, part=part)
    made = embedx.project(tmp_path)
    assert made.path.exists()
    extract(tmp_path, n_parts=3, part=1)  # it is there
    assert made.path.exists()
    shutil.rmtree(unfinished.part_path(tmp_path / "embeddings.h5", 1).parent)
    extract(tmp_path, n_parts=3, **given)
    assert not made.path.exists()


@pytest.mark.parametrize("given", [{}, {"n_parts": 3}, {"n_parts": 3, "part": 0}])
def test_a_run_that_was_killed_as_it_began_its_parts_begins_again(
    given: dict[str, Any], tmp_path: Path
) -> None:
    folder = unfinished.parts_folder(tmp_path / "embeddings.h5")
    folder.mkdir(parents=True)
    (folder / ".of.txt.abcd1234.tmp").touch()
    extract(tmp_path, **given)
    assert extract(tmp_path, **{**given, "part": None}).n_rows == N


def test_a_folder_of_parts_that_is_a_link_is_emptied_and_the_next_run_joins(tmp_path: Path) -> None:
    whole = extract(tmp_path / "whole")
    (tmp_path / "run").mkdir()
    for name in ("far", "farther"):
        (tmp_path / name).mkdir()
        unfinished.parts_folder(tmp_path / "run" / "embeddings.h5").symlink_to(tmp_path / name)
        for given in ({"part": 0}, {}):
            if not given or name == "far":
                run = extract(tmp_path / "run", n_parts=3, overwrite=name != "far", **given)
        assert run.path.read_bytes() == whole.path.read_bytes()
        assert not list(tmp_path.glob(f"{name}/*"))
        assert not os.path.lexists(unfinished.parts_folder(run.path))


ANOTHER = """
import sys, torch, embedx
from torch import nn
model = nn.Sequential(nn.Linear(4, 3)).eval()
nn.init.ones_(model[0].weight), nn.init.zeros_(model[0].bias)
embedx.extract(model, torch.ones(12, 4), layers="0", out=sys.argv[1], batch_size=4)
"""


@pytest.mark.parametrize("what", ["folder", "lock"])
def test_a_forgotten_job_does_not_replace_the_run_of_another(what: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = nn.Sequential(nn.Linear(4, 3)).eval()

    def make_another(module: nn.Module, args: object, output: object) -> None:
        """In the first pass the folder goes, and another run is made there."""
        handle.remove()
        if what == "folder":
            shutil.rmtree(out)
        else:
            shutil.rmtree(out / "embeddings.h5.parts")
            (out / "embeddings.h5.lock").unlink()
        subprocess.run([sys.executable, "-c", ANOTHER, str(out)], check=True)

    handle = model[0].register_forward_hook(make_another)
    with pytest.raises((InUseError, StoreError)):
        embedx.extract(model, torch.zeros(12, 4), layers="0", out=out, batch_size=4, n_parts=3)
    assert (embedx.open(out).embeddings["0"] == 4).all()
