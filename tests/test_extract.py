"""Extraction: every row equals a plain forward pass, or is said to have failed; nothing is lost."""

import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageFile
from torch import Tensor, nn

import embedx
from embedx import data, inputs, layout, models, plans, store, unfinished, writing
from embedx.errors import ConfigError, DataError, LayerError, ModelError, ShapeError, StoreError
from embedx.models import Model, Preprocess
from embedx.pictures import decode_image, thumbnail
from embedx.sources import Source
from tests.conftest import EXHAUSTIVE, relative_error, sha256


@pytest.fixture(scope="module")
def resnet() -> Model:
    return models.torchvision("resnet18", weights=None, input_size=64)


def plain(model: Model, paths: list[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """layer1 averaged, avgpool, logits: by hand, from the files."""
    module = model.module
    assert model.preprocess is not None
    pixels = [model.preprocess.pixels(Image.open(path).convert("RGB")) for path in paths]
    with torch.inference_mode():
        x = model.preprocess.normalize(torch.stack(pixels))
        x = module.maxpool(module.relu(module.bn1(module.conv1(x))))
        first = module.layer1(x)
        pooled = module.avgpool(module.layer4(module.layer3(module.layer2(first)))).flatten(1)
        return first.mean((2, 3)).numpy(), pooled.numpy(), module.fc(pooled).numpy()


def test_rows_equal_a_plain_forward_pass_and_carry_their_ids_labels_and_pictures(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    got = embedx.extract(
        resnet,
        photos,
        layers=["layer1", "avgpool"],
        batch_size=5,
        save_outputs=True,
        out=tmp_path / "run",
    )
    paths = sorted(photos.rglob("*.jpg"))
    first, pooled, logits = plain(resnet, paths)
    assert got.ids == [path.relative_to(photos).as_posix() for path in paths]
    assert got.label_texts() == [path.parent.name for path in paths]
    assert list(got.embeddings) == ["layer1", "avgpool"]
    assert relative_error(got.embeddings["layer1"], first) < 1e-5
    assert relative_error(got.embeddings["avgpool"], pooled) < 1e-5
    assert relative_error(got.outputs["logits"], logits) < 1e-5
    assert got.outputs["predicted"].tolist() == logits.argmax(1).tolist()
    assert np.abs(pooled[0] - pooled[1]).max() > 1e-3  # the oracle tells rows apart
    assert got.thumbnails is not None
    for i, path in enumerate(paths):
        tile = thumbnail(Image.open(path), 32)
        np.testing.assert_array_equal(got.thumbnails[i], tile)
    assert got.attrs["weights_sha256"] == resnet.weights_sha256
    assert got.point_attrs["layer1"]["pooling"] == "gap"
    assert got.verify() == []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.b(self.a(x).relu_())


def test_several_layers_come_from_the_one_pass_and_a_live_model_is_left_as_it_was(
    tmp_path: Path,
) -> None:
    model = Counting().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    x = np.random.default_rng(0).standard_normal((10, 4)).astype("f4")
    got = embedx.extract(
        model, x, layers=["a", "b", "b:input"], batch_size=5, out=tmp_path, labels=list("ab" * 5)
    )
    assert model.passes == 2
    with torch.inference_mode():
        a = model.a(torch.from_numpy(x))
        np.testing.assert_allclose(got.embeddings["a"], a.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.embeddings["b:input"], a.relu().numpy(), atol=1e-6)
        np.testing.assert_allclose(got.embeddings["b"], model.b(a.relu()).numpy(), atol=1e-6)
    assert (got.embeddings["a"] < 0).any()
    assert got.label_texts() == list("ab" * 5)
    assert model.training
    assert model.a.training
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.a._forward_hooks
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_worker_count_and_name_do_not_change_the_bytes(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    for workers in (0, 2):
        embedx.extract(
            resnet, photos, num_workers=workers, batch_size=5, out=tmp_path / str(workers)
        )
    assert sha256(tmp_path / "0" / "embeddings.h5") == sha256(tmp_path / "2" / "embeddings.h5")
    opened = store.open(tmp_path / "2")
    assert b"/" not in opened.attrs["config"].encode()  # no paths travel with the file
    assert str(tmp_path) not in json.dumps(opened.attrs)


@pytest.mark.parametrize(
    ("bad", "batch_size"),
    [
        ({3}, 5),
        ({0, 1, 2, 3, 4}, 5),
        ({10, 11}, 5),
        ({5, 6, 7, 8, 9}, 5),
        ({0, 11}, 5),
        ({11}, 11),  # a last batch of one
        ({0, 2, 11}, 1),
        (set(range(11)), 4),
    ],
    ids=str,
)
def test_a_bad_picture_fails_its_own_row_and_the_others_stay_exact(
    photos: Path, resnet: Model, tmp_path: Path, bad: set[int], batch_size: int
) -> None:
    paths = sorted(photos.rglob("*.jpg"))
    _, pooled, _ = plain(resnet, paths)
    for i in bad:
        paths[i].write_bytes(paths[i].read_bytes()[:200] if i % 2 else b"")
    got = embedx.extract(
        resnet, photos, batch_size=batch_size, out=tmp_path / "run", save_outputs=True
    )
    assert np.flatnonzero(got.status == layout.Status.FAILED).tolist() == sorted(bad)
    assert np.isnan(got.embeddings["avgpool" if "avgpool" in got.embeddings else "fc:input"])[
        sorted(bad)
    ].all()
    point, rows = got.rows()
    good = sorted(set(range(12)) - bad)
    assert relative_error(rows[good], pooled[good]) < 1e-5
    assert got.outputs["predicted"][sorted(bad)].tolist() == [-1] * len(bad)
    reasons = unfinished.read_reasons(got.path)
    assert [r["id"] for r in reasons] == [got.ids[i] for i in sorted(bad)]
    assert all(r["reason"] and str(photos) not in r["reason"] for r in reasons)
    assert got.verify() == []


def test_every_kind_of_bad_picture_fails_with_its_reason_and_every_good_kind_is_read(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    good = Image.open(sorted(photos.rglob("*.jpg"))[0])
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), "u1"))
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    for name in ("one.bmp", "one.gif", "one.png", "one.tiff", "one.WEBP", "two.ppm"):
        good.save(zoo / name)
    good.convert("CMYK").save(zoo / "cmyk.jpg")
    good.convert("LA").save(zoo / "la.png")
    Image.new("RGB", (1, 1)).save(zoo / "pixel.png")
    bad = {"empty.jpg": b"", "text.png": b"hello", "page.gif": b"<html></html>"}
    for suffix in ("jpg", "png", "gif", "bmp", "tif", "webp", "ppm"):
        noise.save(zoo / f"cut.{suffix}")
        bad[f"cut.{suffix}"] = (zoo / f"cut.{suffix}").read_bytes()[:300]
    for name, content in bad.items():
        (zoo / name).write_bytes(content)
    noise.convert("F").save(zoo / "float.tif")
    (zoo / "huge.pgm").write_bytes(b"P5 20000 20000 255\n")
    (zoo / "gone.png").symlink_to(zoo / "nowhere.png")
    got = embedx.extract(resnet, zoo, batch_size=4, out=tmp_path / "run")
    failed = {reason["id"]: reason["reason"] for reason in unfinished.read_reasons(got.path)}
    assert set(failed) == {*bad, "float.tif", "huge.pgm", "gone.png"}
    assert "does not state its range" in failed["float.tif"]
    assert "shrink it" in failed["huge.pgm"]
    assert failed["gone.png"] == "FileNotFoundError: No such file or directory"
    assert failed["text.png"].startswith("DataError: not a picture of the formats BMP, GIF")
    assert {got.ids[i] for i in np.flatnonzero(~got.ok)} == set(failed)
    assert int(got.ok.sum()) == 9
    rows = dict(zip(got.ids, got.rows()[1], strict=True))
    for name in ("one.png", "one.tiff", "two.ppm"):
        np.testing.assert_allclose(rows[name], rows["one.bmp"], rtol=1e-4, atol=1e-6)


def test_an_output_folder_inside_the_data_changes_nothing_for_later_runs(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    outside = embedx.extract(resnet, photos, out=tmp_path / "outside")
    for inside in (photos / "run", photos / "cat" / "deep" / "run"):
        got = embedx.extract(resnet, photos, out=inside)
        embedx.project(got, method="pca")
        embedx.view(got)
        embedx.export(got)
        assert list(inside.rglob("*.png"))
        stamp = got.path.stat().st_mtime_ns
        assert embedx.extract(resnet, photos, out=inside).path.stat().st_mtime_ns == stamp
        assert sha256(got.path) == sha256(outside.path)


class Aside(list[int]):
    """Numbers that are no part of what a network is, though its code reads them."""

    def __reduce__(self) -> Any:
        return Aside, ()


PASSES_LEFT = Aside([-1])


class Stoppable(nn.Module):
    """Fails in its k-th pass, once; those of one or two samples alone are looks at it."""

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(n_inputs, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        PASSES_LEFT[0] -= len(x) > 2
        if PASSES_LEFT[0] == 0:
            PASSES_LEFT[0] = -1
            raise RuntimeError("stopped")
        return self.head(self.body(x.flatten(1).float()))


def stop_halfway(
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    data_: object,
    *,
    out: Path,
    **options: object,
) -> None:
    """Leave a file with the rows of the first two batches."""
    PASSES_LEFT[0] = 3
    with monkeypatch.context() as patch:
        patch.setattr(writing, "COMMIT_S", 0.0)
        with pytest.raises(ModelError, match="RuntimeError: stopped"):
            embedx.extract(model, data_, out=out, **options)
    assert store.Embeddings(unfinished.partial_path(out / "embeddings.h5")).n_rows > 0


@pytest.mark.parametrize("is_finished", [True, False])
def test_files_that_changed_since_are_counted_and_named(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_finished: bool
) -> None:
    import os
    import shutil

    model = Stoppable(3 * 8 * 8)
    options = {"preprocess": Preprocess(8, 8), "layers": "body", "batch_size": 3}
    out = tmp_path / "run"
    whole = embedx.extract(model, photos, out=tmp_path / "whole", **options)
    if is_finished:
        embedx.extract(model, photos, out=out, **options)
    else:
        stop_halfway(model, monkeypatch, photos, out=out, **options)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    kept = tmp_path / "kept"
    shutil.copytree(photos, kept)  # with the times of the files

    def restore() -> None:
        shutil.rmtree(photos)
        shutil.copytree(kept, photos)

    def replace(path: Path) -> None:
        about = path.stat()
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
        assert path.stat().st_size == about.st_size

    def several() -> None:
        for name in ("a.jpg", "b.jpg"):
            Image.new("RGB", (9, 9)).save(photos / "new\n" / name)
        (photos / "cat" / "03.jpg").unlink()
        replace(photos / "dog" / "04.jpg")

    (photos / "new\n").mkdir()
    for change, difference in (
        (lambda: replace(photos / "cat" / "01.jpg"), "1 edited (cat/01.jpg)"),
        ((photos / "cat" / "01.jpg").touch, "1 edited (cat/01.jpg)"),
        (
            lambda: (photos / "cat" / "01.jpg").rename(photos / "dog" / "x.jpg"),
            "1 added (dog/x.jpg), 1 removed (cat/01.jpg)",
        ),
        (
            lambda: shutil.rmtree(photos / "cat"),
            "6 removed (cat/01.jpg, cat/03.jpg, cat/05.jpg, ...)",
        ),
        (
            several,
            "2 added ('new\\n/a.jpg', 'new\\n/b.jpg'), 1 removed (cat/03.jpg), "
            "1 edited (dog/04.jpg)",
        ),
    ):
        (photos / "new\n").mkdir(exist_ok=True)
        change()
        with pytest.raises(StoreError) as caught:
            embedx.extract(model, photos, out=out, **options)
        message = str(caught.value)
        assert f"holds another run: the data has changed since: {difference}; " in message
        assert message.endswith("or replace it with overwrite=true")
        assert "\n" not in message
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        restore()
    again = embedx.extract(model, photos, out=out, **options)
    assert sha256(again.path) == sha256(whole.path)
    (photos / "new\n").mkdir()
    several()
    anew = embedx.extract(model, photos, out=out, overwrite=True, **options)
    assert anew.n_rows == 13
    assert [anew.ids[i] for i in np.flatnonzero(~anew.ok)] == ["dog/04.jpg"]  # half a file now


def test_labels_in_the_items_come_with_the_rows_in_the_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    x[7] = torch.nan
    numbers = [i % 3 for i in range(20)]
    numbers[5] = -1

    class Labelled(torch.utils.data.Dataset[tuple[Tensor, int]]):
        def __init__(self) -> None:
            self.reads: list[int] = []

        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            self.reads.append(i)
            if i in (3, 19):
                raise OSError("lost")
            return x[i], numbers[i]

    expected = ["" if i in (3, 5, 19) else "abc"[i % 3] for i in range(20)]
    model = Stoppable(4)
    options = {"layers": "body", "batch_size": 3}
    dataset = Labelled()
    source = data.in_memory(dataset)
    dataset.reads.clear()
    whole = embedx.extract(model, source, out=tmp_path / "whole", **options)
    assert dataset.reads == list(range(20))
    assert whole.label_texts() == [t and str("abc".index(t)) for t in expected]
    assert np.flatnonzero(~whole.ok).tolist() == [3, 7, 19]
    assert whole.labels is not None
    assert whole.labels.dtype == np.int32
    assert whole.labels[[3, 5, 7, 19]].tolist() == [-1, -1, 1, -1]
    assert whole.verify() == []
    stop_halfway(model, monkeypatch, dataset, out=tmp_path / "b", **options)
    again = embedx.extract(model, dataset, out=tmp_path / "b", num_workers=2, **options)
    assert sha256(again.path) == sha256(whole.path)
    Labelled.classes = ["a", "b", "c"]  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="the ids or labels are others"):
        embedx.extract(model, dataset, out=tmp_path / "b", **options)
    named = embedx.extract(model, dataset, out=tmp_path / "named", **options)
    assert named.label_texts() == expected
    embedx.project(named, method="pca")
    embedx.view(named)
    embedx.export(named)
    shown = (tmp_path / "named" / "projector" / "metadata.tsv").read_text().splitlines()
    good = [i for i in range(20) if i not in (3, 7, 19)]
    assert shown[1:] == [f"{i}\t{expected[i] or '(none)'}" for i in good]
    scores = [row["knn_accuracy"] for row in embedx.evaluate(named)]
    assert len(scores) == 2
    assert all(0 <= score <= 1 for score in scores)


def loader_of(dataset: object, **options: object) -> torch.utils.data.DataLoader[object]:
    return torch.utils.data.DataLoader(dataset, **options)  # type: ignore[arg-type]


class Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Eleven rows of four numbers; row 6 cannot be read where it is told so."""

    def __init__(self, *, broken: bool = False) -> None:
        self.x = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
        self.broken = broken

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if self.broken and i == 6:
            raise OSError("lost")
        return self.x[i], i % 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        ({"shuffle": True}, ["the DataLoader shuffles; rows are in the order of its Dataset all"]),
        ({"drop_last": True}, ["the DataLoader drops the last 3 samples; here they are kept"]),
        ({"num_workers": 2, "worker_init_fn": print}, ["the worker_init_fn of the DataLoader is"]),
        (
            {"batch_sampler": "plain"},
            ["the DataLoader shuffles", "the DataLoader drops the last 3 samples"],
        ),
    ],
)
def test_a_loader_gives_its_dataset_in_order_and_its_batch_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, object], said: list[str]
) -> None:
    dataset = Pairs()
    if "batch_sampler" in options:
        sampler = torch.utils.data.RandomSampler(dataset)
        loader = loader_of(
            dataset,
            batch_sampler=torch.utils.data.BatchSampler(sampler, 4, drop_last=True),
        )
    else:
        loader = loader_of(dataset, batch_size=4, **options)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).eval()
    with caplog.at_level("WARNING"):
        got = embedx.extract(model, loader, layers="0", out=tmp_path / "a")
    plain_ = embedx.extract(model, dataset, layers="0", batch_size=4, out=tmp_path / "b")
    assert sha256(got.path) == sha256(plain_.path)
    assert got.attrs["batch_size"] == 4
    with torch.no_grad():
        expected = model[0](dataset.x).numpy()
    np.testing.assert_allclose(got.embeddings["0"], expected, rtol=1e-5, atol=1e-6)
    assert got.label_texts() == [str(i % 2) for i in range(11)]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(said)
    assert all(m.startswith(s) for m, s in zip(messages, said, strict=True))
    other = embedx.extract(model, loader, layers="0", batch_size=5, out=tmp_path / "c")
    assert other.attrs["batch_size"] == 5


def take_first(items: list[tuple[Tensor, int]]) -> Tensor:
    return torch.stack([x for x, _ in items]) * 2


def with_more(items: list[tuple[Tensor, int]]) -> tuple[Tensor, list[int]]:
    return take_first(items), [y for _, y in items]


@pytest.mark.parametrize("collate", [take_first, with_more])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_collate_fn_of_a_loader_makes_the_inputs_and_a_bad_item_keeps_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collate: object, workers: int
) -> None:
    dataset = Pairs(broken=True)
    loader = loader_of(dataset, batch_size=3, collate_fn=collate, num_workers=workers)
    model = Stoppable(4)
    got = embedx.extract(model, loader, layers="body", out=tmp_path / "a")
    assert np.flatnonzero(~got.ok).tolist() == [6]
    with torch.no_grad():
        expected = model.body(dataset.x * 2).numpy()
    np.testing.assert_allclose(
        np.delete(got.embeddings["body"], 6, 0), np.delete(expected, 6, 0), rtol=1e-5, atol=1e-6
    )
    assert got.label_texts() == ["" if i == 6 else str(i % 2) for i in range(11)]
    stop_halfway(model, monkeypatch, loader, layers="body", out=tmp_path / "b")
    again = embedx.extract(model, loader, layers="body", out=tmp_path / "b")
    assert sha256(again.path) == sha256(got.path)
    undoubled = loader_of(dataset, batch_size=3)
    with pytest.raises(StoreError, match="the data has changed since"):
        embedx.extract(model, undoubled, layers="body", out=tmp_path / "a")


def test_pictures_that_a_collate_fn_turns_into_inputs_keep_their_miniatures(
    photos: Path, tmp_path: Path
) -> None:
    prepared = Preprocess(8, 8)
    pictures = [(Image.open(path), 0) for path in sorted(photos.rglob("*.jpg"))]

    def collate(items: list[tuple[Image.Image, int]]) -> Tensor:
        return prepared.normalize(torch.stack([prepared.pixels(image) for image, _ in items]))

    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)).eval()
    loader = loader_of(pictures, batch_size=5, collate_fn=collate)
    got = embedx.extract(model, loader, layers="0", out=tmp_path / "a")
    usual = embedx.extract(
        model, pictures, layers="0", batch_size=5, preprocess=prepared, out=tmp_path / "b"
    )
    np.testing.assert_array_equal(got.embeddings["0"], usual.embeddings["0"])
    assert got.thumbnails is not None
    assert len(np.unique(got.thumbnails)) > 20
    np.testing.assert_array_equal(got.thumbnails, usual.thumbnails)


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(3, 4))

    def __len__(self) -> int:
        return 3


class Endless(torch.utils.data.Dataset[Tensor]):
    def __getitem__(self, i: int) -> Tensor:
        return torch.zeros(4)


class Named(nn.Module):
    """Takes tokens and a mask by name, and returns a loss alone, as some training code does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, attention_mask: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.head(self.embed(tokens).mean(1))
        return {"loss": nn.functional.cross_entropy(x, target)}


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Items are dicts by the names of the model's arguments; item 3 cannot be read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randn(7, 5, 3, generator=generator)
        self.lengths = [5, 1, 4, 2, 3, 5, 2]

    def __len__(self) -> int:
        return 7

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if i == 3:
            raise ValueError("torn")
        mask = torch.arange(5) < self.lengths[i]
        return {"tokens": self.tokens[i], "attention_mask": mask, "target": torch.tensor(1)}


def collate_dicts(items: list[object]) -> object:
    return torch.utils.data.default_collate(items)


@pytest.mark.parametrize("with_collate", [False, True])
def test_items_that_are_dicts_enter_by_name_and_padding_is_left_out(
    with_collate: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, model = Sentences(), Named().eval()
    given: object = data
    if with_collate:
        given = loader_of(data, collate_fn=collate_dicts, batch_size=3)
    with caplog.at_level("INFO"):
        run = embedx.extract(model, given, layers=["embed", "head"], batch_size=3, out=tmp_path)
    assert "pooling of embed: mean_token, from (n, 5, 4)" in caplog.text
    assert run.status.tolist() == [1, 1, 1, 2, 1, 1, 1]
    for i in (0, 1, 2, 4, 5, 6):
        wanted = model.embed(data.tokens[i, : data.lengths[i]]).mean(0).detach().numpy()
        np.testing.assert_allclose(run.embeddings["embed"][i], wanted, rtol=1e-5, atol=1e-6)
        wanted = model.head(model.embed(data.tokens[i : i + 1]).mean(1)).detach().numpy()[0]
        np.testing.assert_allclose(run.embeddings["head"][i], wanted, rtol=1e-5, atol=1e-6)
    data.tokens[0, 0, 0] += 1
    with pytest.raises(StoreError, match="the data has changed since"):
        embedx.extract(model, given, layers=["embed", "head"], batch_size=3, out=tmp_path)


def test_dicts_of_other_names_or_shapes_are_one_line(tmp_path: Path) -> None:
    x = torch.zeros(2, 3)
    for items, message in {
        "names": ([{"x": x}, {"y": x}], r"sample 1 has y and sample 0 has x; give all samples"),
        "shapes": ([{"x": x}, {"x": x[0]}], r"sample 1 is \(3,\) float32 and sample 0 is \(2, 3\)"),
        "mixed": ([{"x": x}, x], "sample 1 has no names and sample 0 has x"),
        "late": ([x, {"x": x}], "sample 1 has names and sample 0 has none"),
    }.values():
        with pytest.raises(ShapeError, match=message):
            embedx.extract(nn.Sequential(nn.Linear(3, 2)).eval(), items, out=tmp_path / "o")
    with pytest.raises(ModelError, match=r"failed on a batch of shape x \(1, 2, 3\): TypeError"):
        embedx.extract(nn.Sequential(nn.Linear(3, 2)).eval(), [{"x": x}], out=tmp_path / "o")


@pytest.mark.parametrize(
    ("name", "kept", "left_out"),
    [
        ("attention_mask", 0.0, -torch.inf),
        ("attention_mask", 0.0, -1e9),
        ("attention_mask", 1.0, 0.0),
        ("attention_mask", 2, 0),
        ("src_key_padding_mask", 0.0, -torch.inf),
        ("src_key_padding_mask", False, True),
        ("key_padding_mask", 0, 1),
    ],
)
def test_padding_is_left_out_in_every_spelling(
    name: str, kept: float, left_out: float, tmp_path: Path
) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Identity(), nn.Linear(4, 2)

        def forward(self, x: Tensor, **_: Tensor) -> Tensor:
            return self.head(self.a(x).mean(1))

    x, lengths = torch.randn(4, 6, 4), [6, 3, 1, 6]
    masks = [torch.tensor([kept if i < n else left_out for i in range(6)]) for n in lengths]
    items = [{"x": tokens, name: mask} for tokens, mask in zip(x, masks, strict=True)]
    run = embedx.extract(Masked().eval(), items, layers="a", batch_size=3, out=tmp_path / "a")
    wanted = np.stack([x[i, :n].numpy().mean(0) for i, n in enumerate(lengths)])
    np.testing.assert_allclose(run.embeddings["a"], wanted, rtol=1e-5, atol=1e-6)
    items[1][name] = torch.full((6,), -0.5 if name == "attention_mask" else 0.5)
    items[0][name] = items[2][name] = torch.zeros(6)
    with pytest.raises(ShapeError, match=f"{name} holds .* to .*; give true and false"):
        embedx.extract(Masked().eval(), items, layers="a", batch_size=3, out=tmp_path / "b")


def test_tokens_that_come_first_are_not_taken_for_as_many_samples(tmp_path: Path) -> None:
    class TokensFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.places, self.head = nn.Linear(3, 5), nn.Embedding(8, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x.transpose(0, 1))
            return self.head((x + self.places(torch.arange(len(x)))[:, None]).mean(0))

    model, x = TokensFirst().eval(), torch.randn(16, 8, 3)  # as many tokens as a batch has samples
    options: dict[str, Any] = {"batch_size": 8, "out": tmp_path}
    message = r"a gives \(8, 5\) for 2 samples after pooling, .* though 8 long for 8 of them"
    for pooling in ("mean_token", "cls"):
        with pytest.raises(ShapeError, match=message):
            embedx.extract(model, x, layers="a", pooling=pooling, **options)
    with pytest.raises(ShapeError, match=r"places gives \(8, 5\) for 2 samples"):
        embedx.extract(model, x, layers="places", **options)
    run = embedx.extract(model, x, layers="a", pooling=lambda a: a.mean(0), **options)
    wanted = model.a(x).mean(1).detach().numpy()
    np.testing.assert_allclose(run.embeddings["a"], wanted, rtol=1e-5, atol=1e-6)


def test_a_model_for_one_size_of_batch_alone_is_taken_as_it_is(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.reshape(4, 4))

    model, x = Fixed().eval(), torch.randn(8, 4)
    run = embedx.extract(model, x, layers="a", batch_size=4, out=tmp_path)
    np.testing.assert_allclose(run.embeddings["a"], model.a(x).detach().numpy(), atol=1e-6)


class Stages(nn.Module):
    """Counts how often each of its layers ran; in one pass the first may be left out."""

    def __init__(self, *, skip_on: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.late, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.ran: list[int] = [0, 0, 0]
        self.skip_on = skip_on

    def forward(self, x: Tensor) -> Tensor:
        if self.ran[1] + self.ran[2] != self.skip_on:
            self.ran[0] += 1
            x = self.early(x)
        self.ran[1] += 1
        x = self.late(x)
        self.ran[2] += 1
        return self.head(x)


def test_after_the_first_pass_the_layers_behind_the_last_wanted_one_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_calls = [0]
    linear = nn.functional.linear

    def counted(*arguments: Any) -> Tensor:
        n_calls[0] += 1
        return linear(*arguments)

    monkeypatch.setattr(nn.functional, "linear", counted)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).eval(), torch.randn(20, 4)
    early = embedx.extract(model, x, layers="0", batch_size=5, out=tmp_path / "early")
    # Four passes, of which one counts the calls of a whole one, and one of two samples; none of a
    # sample alone, for these layers are known to look at one at a time.
    assert n_calls == [5 + 3 * 1 + 1]
    n_calls[0] = 0
    both = embedx.extract(model, x, layers=["2", "0"], batch_size=5, out=tmp_path / "both")
    assert n_calls == [5 + 3 * 3 + 3]  # the later one in order of execution ends a pass
    np.testing.assert_array_equal(both.embeddings["0"], early.embeddings["0"])
    wanted = model[:3](x).detach().numpy()
    np.testing.assert_allclose(both.embeddings["2"], wanted, rtol=1e-5, atol=1e-6)
    n_calls[0] = 0
    options = {"layers": "0", "batch_size": 5, "save_outputs": True}
    kept = embedx.extract(model, x, out=tmp_path / "outputs", **options)
    assert n_calls == [4 * 5 + 5]
    wanted = model(x).detach().numpy()
    np.testing.assert_allclose(kept.outputs["logits"], wanted, rtol=1e-5, atol=1e-6)


def test_passes_of_code_of_ones_own_are_whole(tmp_path: Path) -> None:
    """It may run a layer again in another batch, or keep something until its end."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.is_busy = False

        def forward(self, x: Tensor) -> Tensor:
            assert not self.is_busy
            self.is_busy = True
            x = self.a(x)
            if x.shape[0] == 2:  # the last batch
                x = self.a(x)
            x = self.b(x)
            self.is_busy = False
            return x

    model, x = Again().eval(), torch.randn(6, 2)
    run = embedx.extract(model, x, layers="a", batch_size=3, out=tmp_path / "whole")
    assert run.ok.all()
    assert not model.is_busy
    with pytest.raises(LayerError, match="rows 3 to 4: a ran 2 times in one pass"):
        embedx.extract(model, x[:5], layers="a", batch_size=3, out=tmp_path / "again")


class Views(nn.Module):
    """Lays its input and feature maps end to end by view, as many tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36 + 3 * 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        both = [maps.view(len(x), -1), x.view(len(x), -1)]
        return self.fc(torch.cat(both, 1))


def test_a_network_that_looks_at_strides_gets_the_layout_that_it_was_written_for(
    tmp_path: Path,
) -> None:
    model, x = Views().eval(), torch.randn(5, 3, 8, 8)
    run = embedx.extract(model, x, layers="fc", out=tmp_path)
    wanted = model(x).detach().numpy()
    np.testing.assert_allclose(run.embeddings["fc"], wanted, rtol=1e-5, atol=1e-6)


class Reused(torch.utils.data.Dataset[Tensor]):
    """Fills one buffer again and again, and gives what needs a gradient."""

    def __init__(self, *, layer: nn.Module | None = None) -> None:
        self.buffer = torch.zeros(2)
        self.layer = layer

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        self.buffer.fill_(i)
        return self.buffer if self.layer is None else self.layer(self.buffer)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_items_that_share_a_buffer_or_need_a_gradient_are_rows_of_their_own(
    num_workers: int, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2)).eval()
    options = {"layers": "0", "num_workers": num_workers}
    run = embedx.extract(model, Reused(), out=tmp_path / "a", **options)
    assert run.embeddings["0"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    layer = nn.Linear(2, 2)
    run = embedx.extract(model, Reused(layer=layer), out=tmp_path / "b", **options)
    wanted = layer(torch.arange(6.0)[:, None].expand(6, 2)).detach().numpy()
    np.testing.assert_allclose(run.embeddings["0"], wanted, rtol=1e-5, atol=1e-6)


def by_length(items: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(sorted(items, key=len, reverse=True), batch_first=True)


def backwards(items: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(items[::-1], batch_first=True)


def shuffled(items: list[Tensor]) -> dict[str, Tensor]:
    order = torch.randperm(len(items))
    return {"x": torch.nn.utils.rnn.pad_sequence([items[i] for i in order], batch_first=True)}


def noisy(items: list[Tensor]) -> Tensor:
    x = torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_side="left")
    return x + torch.rand(len(x), 1, 1)


class Iterates(torch.utils.data.DataLoader[Any]):
    def __iter__(self) -> Any:
        return (100 * batch for batch in super().__iter__())


def test_loaders_that_would_give_other_rows_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(1, 1)).eval()
    sentences = [torch.ones(n, 1) for n in (1, 3, 2, 5)]
    pictures = [torch.full((2, 1), float(i)) for i in range(9)]
    for items, collate in [
        (sentences, by_length),
        (sentences[::2], by_length),
        (sentences, backwards),
        (pictures, backwards),
        (pictures, shuffled),
    ]:
        with pytest.raises(ConfigError, match="puts the samples of a batch in an order of its own"):
            embedx.extract(model, loader_of(items, collate_fn=collate), out=tmp_path / "o")
    with pytest.raises(DataError, match="one buffer again and again, and the collate_fn takes sev"):
        embedx.extract(model, loader_of(Reused(), collate_fn=torch.stack), out=tmp_path / "o")
    assert not (tmp_path / "o").exists()
    loader = loader_of(pictures, collate_fn=noisy, batch_size=3)
    run = embedx.extract(model, loader, layers="0", pooling="flatten", out=tmp_path / "noisy")
    assert np.floor(run.embeddings["0"][:, 0]).tolist() == list(range(9))
    with pytest.raises(DataError, match="a Iterates that makes its batches in an iterator"):
        embedx.extract(model, Iterates(sentences), out=tmp_path / "o")


class Opens(torch.utils.data.Dataset[Tensor]):
    """Opens its file on first use, as is told to do for worker processes."""

    file: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, i: int) -> Tensor:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(i * 256)
        return torch.frombuffer(bytearray(self.file.read(256)), dtype=torch.float32)


@pytest.mark.parametrize("collate", [None, torch.stack])
def test_what_a_dataset_opens_on_first_use_is_opened_in_the_workers_alone(
    tmp_path: Path, collate: Any
) -> None:
    x = np.random.default_rng(0).standard_normal((4000, 64)).astype("f4")
    x.tofile(tmp_path / "rows")
    model, dataset = nn.Sequential(nn.Identity(), nn.Linear(64, 2)).eval(), Opens(tmp_path / "rows")
    loader = loader_of(dataset, num_workers=2, batch_size=32, collate_fn=collate)
    state = torch.get_rng_state()
    run = embedx.extract(model, loader, layers="0", out=tmp_path / "two")
    assert dataset.file is None
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(run.embeddings["0"], x)
    loader = loader_of(dataset, num_workers=2, collate_fn=turned_stack)
    with pytest.raises(ConfigError, match="order of its own"):
        embedx.extract(model, loader, layers="0", out=tmp_path / "turned")
    loader = loader_of(dataset, batch_size=32, collate_fn=collate)
    alone = embedx.extract(model, loader, layers="0", out=tmp_path / "none")
    assert sha256(alone.path) == sha256(run.path)
    dataset.file.close()


def turned_stack(items: list[Tensor]) -> Tensor:
    return torch.stack(items).flip(0)


class Augmented(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Tensor:
        if i == 21:
            raise OSError("lost")
        return i + torch.rand(3) * np.random.random() * random.random()  # noqa: NPY002


@pytest.mark.parametrize("collate", [None, noisy])
def test_rows_of_a_dataset_that_draws_at_random_are_the_same_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, collate: Any
) -> None:
    model, options = Stoppable(3), {"layers": "body"}
    runs = []
    for seed, workers in ((1, 0), (2, 2), (3, 1)):
        torch.manual_seed(seed)
        random.seed(seed)
        data_: Any = Augmented()
        if collate is not None:
            data_ = loader_of(data_, batch_size=8, collate_fn=lambda x: noisy([i[None] for i in x]))
        before = random.getstate(), torch.get_rng_state().tolist()
        out = tmp_path / str(seed)
        if seed == 3:
            stop_halfway(model, monkeypatch, data_, out=out, batch_size=8, **options)
        runs.append(
            embedx.extract(model, data_, num_workers=workers, batch_size=8, out=out, **options)
        )
        assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert len({sha256(run.path) for run in runs}) == 1
    assert np.flatnonzero(~runs[0].ok).tolist() == [21]
    assert "are drawn at random: row i is drawn from seed i, in every run" in caplog.text
    if collate is None:  # nor do they hang on the batch
        other = embedx.extract(model, Augmented(), batch_size=5, out=tmp_path / "b", **options)
        np.testing.assert_allclose(
            other.embeddings["body"], runs[0].embeddings["body"], rtol=1e-5, atol=1e-6
        )


def test_pictures_and_tensors_in_one_batch_are_refused(tmp_path: Path) -> None:
    picture, tensor = Image.new("RGB", (8, 8)), torch.zeros(3, 8, 8, dtype=torch.uint8)
    model = models.live(Stoppable(192), preprocess=Preprocess(8, 8))
    for items, said in (
        ([picture, tensor], "sample 0 is a picture and sample 1 is a tensor"),
        ([tensor, tensor, picture], "sample 2 is a picture and sample 1 is a tensor"),
    ):
        with pytest.raises(ShapeError, match=said):
            embedx.extract(model, items, layers="body", out=tmp_path)


def test_a_source_whose_read_gives_a_label_without_a_name_or_a_masked_array_fails_the_row(
    tmp_path: Path,
) -> None:
    x = np.ones((4, 3), "f4")
    items = [(x[0], 0), (x[1], 2), (np.ma.masked_equal([1.0, 2.0, 3.0], 2), 1), (x[3], 0.7)]
    source = Source(
        name="s",
        ids=list("abcd"),
        read=items.__getitem__,
        fingerprint="f",
        labels_in_items=True,
        label_names=["x", "y"],
    )
    run = embedx.extract(Stoppable(3), source, layers="body", out=tmp_path)
    assert run.ok.tolist() == [True, False, False, False]
    reasons = [reason["reason"] for reason in unfinished.read_reasons(run.path)]
    for reason, why in zip(
        reasons, ("its label 2 is past the 2", "a masked array", "its label is 0.7"), strict=True
    ):
        assert why in reason


def test_a_layer_of_no_width_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten()).eval()
    with pytest.raises(ShapeError, match="layer 1 gives rows of no numbers; choose another"):
        embedx.extract(
            model, torch.ones(3, 4), layers="1", pooling=lambda a: a[:, :0], out=tmp_path / "o"
        )
    assert not (tmp_path / "o").exists()


def test_half_a_picture_is_a_failed_row_though_another_library_allows_it(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = sorted(photos.rglob("*.jpg"))[4]
    broken.write_bytes(broken.read_bytes()[:900])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for workers in (0, 2):
        run = embedx.extract(
            Stoppable(192),
            photos,
            preprocess=Preprocess(8, 8),
            layers="body",
            num_workers=workers,
            batch_size=4,
            out=tmp_path / str(workers),
        )
        assert np.flatnonzero(~run.ok).tolist() == [4]
        assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_a_picture_that_is_replaced_during_the_run_is_a_failed_row(
    photos: Path, tmp_path: Path
) -> None:
    paths = sorted(photos.rglob("*.jpg"))

    class Replaces(Stoppable):
        def forward(self, x: Tensor) -> Tensor:
            Image.new("RGB", (80, 60)).save(paths[-1])
            return super().forward(x)

    run = embedx.extract(
        Replaces(192), photos, preprocess=Preprocess(8, 8), layers="body", batch_size=4,
        out=tmp_path / "run",
    )  # fmt: skip
    assert np.flatnonzero(~run.ok).tolist() == [11]
    (failed,) = unfinished.read_reasons(run.path)
    assert "it was changed after the run had listed it" in failed["reason"]


MANY = """
import resource, torch
import embedx
from torch import nn

class Many(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, i):
        return {name: torch.ones(4) for name in "abcdefgh"}

class Net(nn.Linear):
    def forward(self, a, **others):
        return super().forward(a)

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
try:
    model = nn.Sequential(Net(4, 2))
    model.forward = lambda **inputs: model[0](**inputs)
    embedx.extract(model, Many(), layers="0", num_workers=2, batch_size=8, out="out")
except embedx.errors.DataError as error:
    print(error)
"""


@pytest.mark.slow
def test_too_many_open_files_are_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.stdout.startswith("too many open files; what was committed is kept: raise the limi")
    assert len(done.stdout.splitlines()) == 1


def test_lists_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 1)).eval()
    embedx.extract(model, [[0.1, 0.2], [0.3, 0.4]], layers="0", out=tmp_path)
    with pytest.raises(StoreError, match="the data has changed since"):
        embedx.extract(model, [[9.0, 9.0], [8.0, 8.0]], layers="0", out=tmp_path)


def test_a_layer_that_is_left_out_of_one_pass_is_an_error_that_names_the_rows(
    tmp_path: Path,
) -> None:
    model = Stages(skip_on=4).eval()
    with pytest.raises(LayerError, match=r"^rows 10 to 14: early did not fire in this pass"):
        embedx.extract(
            model, torch.randn(20, 4), layers=["early", "head"], batch_size=5, out=tmp_path
        )
    assert not (tmp_path / "embeddings.h5").exists()


def test_rows_of_length_one_and_a_pooling_of_ones_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU()).eval()
    x = torch.randn(6, 1, 5, 5)
    x[2] = 0
    model[0].bias.data.zero_()
    plain = model(x).detach()

    def corner(activation: Tensor) -> Tensor:
        return activation[:, :, 0, 0]

    run = embedx.extract(
        model, x, layers=["0", "1"], pooling=[corner, "max"], normalize=True, out=tmp_path
    )
    for point, wanted in {"0": model[0](x).detach()[:, :, 0, 0], "1": plain.amax((2, 3))}.items():
        norm = wanted.norm(dim=1, keepdim=True)
        expected = torch.where(norm > 0, wanted / norm, 0).numpy()
        np.testing.assert_allclose(run.embeddings[point], expected, rtol=1e-5, atol=1e-6)
    assert not run.embeddings["1"][2].any()
    assert run.ok.all()
    import h5py

    with h5py.File(run.path) as file:
        assert file["embeddings/1"].attrs["normalized"]
        assert file["embeddings/0"].attrs["pooling"].endswith("corner")
    with pytest.raises(StoreError, match="holds another run: normalize is true there and false"):
        embedx.extract(model, x, layers=["0", "1"], pooling=[corner, "max"], out=tmp_path)


def test_loaders_whose_rows_would_not_be_those_of_a_dataset_are_refused_in_one_line(
    tmp_path: Path,
) -> None:
    from torch.utils.data import (
        BatchSampler,
        RandomSampler,
        SequentialSampler,
        Subset,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    class Backwards(BatchSampler):
        pass

    pairs = Pairs()
    give = "give the Dataset itself, or torch.utils.data.Subset(dataset, indices)"
    custom = Backwards(SequentialSampler(pairs), 2, drop_last=False)
    short = Subset(pairs, range(5))
    for loader, kind, message in [
        (loader_of(pairs, sampler=SubsetRandomSampler([1, 2])), DataError, "SubsetRandomSampler"),
        (loader_of(pairs, sampler=WeightedRandomSampler([1.0] * 11, 11)), DataError, "WeightedRa"),
        (loader_of(pairs, sampler=RandomSampler(pairs, replacement=True)), DataError, "=True and"),
        (loader_of(pairs, sampler=RandomSampler(pairs, num_samples=5)), DataError, "num_samples=5"),
        (loader_of(pairs, sampler=[3, 2, 1]), DataError, "draws its samples by a list"),
        (loader_of(pairs, sampler=SequentialSampler(short)), DataError, "SequentialSampler"),
        (loader_of(pairs, batch_sampler=custom), DataError, "draws its samples by a Backwards"),
        (loader_of(pairs, batch_size=None), DataError, "has batch_size=None, so that an item"),
        (loader_of(Stream()), DataError, "data is a Stream, an IterableDataset, which has no ord"),
        (Stream(), DataError, "data is a Stream, an IterableDataset, which has no order"),
        (loader_of(Endless()), DataError, "data is a Endless; give a folder"),
        (
            loader_of(pairs, collate_fn=str),
            ConfigError,
            "the collate_fn of the DataLoader gives a str; let it give a tensor, a dict of tensors",
        ),
        (
            loader_of(pairs, collate_fn=lambda items: take_first(items)[:2], batch_size=4),
            ShapeError,
            r"gives inputs of shape (2, 4) for 4 samples; let it give one entry a sample",
        ),
        (
            loader_of(pairs, collate_fn=lambda items: items[0][0], batch_size=3),
            ShapeError,
            "gives inputs of shape (4,)",
        ),
        (
            loader_of(pairs, collate_fn=take_first),
            ConfigError,
            "both make the inputs; leave one out",
        ),
    ]:
        options = {"preprocess": Preprocess(8, 8)} if "both make" in message else {}
        with pytest.raises(kind) as caught:
            embedx.extract(nn.Sequential(nn.Linear(4, 2)), loader, out=tmp_path / "o", **options)
        text = str(caught.value)
        assert message in text
        assert "\n" not in text
        assert ("draws its samples" in text) == text.endswith(give)
        assert not (tmp_path / "o").exists()


def test_a_collate_fn_that_fails_is_said_with_its_rows(tmp_path: Path) -> None:
    def collate(items: list[tuple[Tensor, int]]) -> Tensor:
        if len(items) < 4 and len(items) > 1:
            raise ValueError("too few\nof them")
        return take_first(items)

    loader = loader_of(Pairs(), batch_size=4, collate_fn=collate)
    with pytest.raises(DataError, match="failed on rows 8 to 10: ValueError: too few$"):
        embedx.extract(nn.Sequential(nn.Linear(4, 2)), loader, out=tmp_path)


SPAWNED = """
import logging, multiprocessing, sys
import embedx
from embedx import models

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    logging.getLogger("embedx").setLevel("ERROR")
    model = models.torchvision("resnet18", weights=None, input_size=64)
    embedx.extract(model, sys.argv[1], num_workers=2, batch_size=5, out=sys.argv[2])
    try:
        data = [(lambda: 0, 1)] * 9
        embedx.extract(model, data, num_workers=1, out=sys.argv[2] + "-not")
    except embedx.errors.DataError as error:
        print(error)
"""


@pytest.mark.slow
def test_workers_that_are_spawned_give_the_same_bytes_as_none(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, str(script), str(photos), str(tmp_path / "spawned")],
        capture_output=True,
        text=True,
        timeout=280,
        # Which a library may have set since this process began.
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("the data cannot be sent to worker processes (")
    assert line.endswith("in a module, or use num_workers=0")
    here = embedx.extract(resnet, photos, num_workers=0, batch_size=5, out=tmp_path / "here")
    assert sha256(tmp_path / "spawned" / "embeddings.h5") == sha256(here.path)


def test_all_bad_is_an_error_and_leaves_no_file(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    for path in photos.rglob("*.jpg"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="every one of the 12 rows failed; the first, cat/01.jpg"):
        embedx.extract(resnet, photos, batch_size=5, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_on_error_raise_stops_at_the_first_bad_row(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    paths = sorted(photos.rglob("*.jpg"))
    paths[7].write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"row 7, dog/02.jpg: .*on_error=skip"):
        embedx.extract(resnet, photos, batch_size=5, on_error="raise", out=tmp_path / "run")
    got = embedx.extract(resnet, photos, batch_size=5, out=tmp_path / "run")  # goes on
    assert np.flatnonzero(~got.ok).tolist() == [7]


def test_values_that_are_not_finite_fail_their_row(tmp_path: Path) -> None:
    x = np.ones((6, 4), "f4")
    x[2] = np.nan
    x[4] = 1e30
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2))
    nn.init.ones_(model[0].weight)
    got = embedx.extract(model, x, layers="0", batch_size=4, dtype="float16", out=tmp_path)
    assert np.flatnonzero(~got.ok).tolist() == [2, 4]
    assert got.embeddings["0"].dtype == np.float16
    np.testing.assert_array_equal(got.embeddings["0"][0], 4)
    assert [r["reason"] for r in unfinished.read_reasons(got.path)] == ["NaN or Inf in 0"] * 2


class Tiny(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-200


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_doubles_that_vanish_in_the_file_are_said_and_normalized_ones_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: Any
) -> None:
    model, x = nn.Sequential(Tiny()).eval(), torch.randn(3, 4, dtype=torch.float64)
    embedx.extract(model, x, layers="0", dtype=dtype, out=tmp_path / "plain")
    assert f"so small that {dtype} makes zeros of them" in caplog.text
    assert "use normalize=true" in caplog.text
    caplog.clear()
    one = embedx.extract(model, x, layers="0", dtype=dtype, normalize=True, out=tmp_path / "one")
    assert "so small" not in caplog.text
    wanted = x / x.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(one.embeddings["0"][:], wanted.numpy(), rtol=1e-3)


def test_rows_of_any_length_are_scaled_to_length_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2)).eval()
    x = np.array([[1, 2, 3, 4], [1e20] * 4, [3e38, 0, 0, 0], [1e-25] * 4, [0] * 4], "f4")
    x[1, 0] = np.float32(-2e20)
    run = embedx.extract(model, x, layers="0", normalize=True, out=tmp_path)
    wide = x.astype("f8")
    wanted = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-300)
    np.testing.assert_allclose(run.embeddings["0"], wanted, rtol=1e-6)
    assert run.ok.all()


def test_whole_numbers_that_float32_does_not_hold_are_refused(tmp_path: Path) -> None:
    class Whole(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self[0](x)
            return x

    model = Whole(nn.Identity(), nn.Linear(1, 1)).eval()
    run = embedx.extract(model, torch.tensor([[2**24], [-5]]), layers="0", out=tmp_path / "a")
    assert run.embeddings["0"][:, 0].tolist() == [2**24, -5]
    with pytest.raises(ShapeError, match=r"layer 0 gives whole numbers above 2\*\*24"):
        embedx.extract(model, torch.tensor([[2**24 + 1], [5]]), layers="0", out=tmp_path / "b")


def test_done_is_done_and_other_settings_are_refused_with_the_difference(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = embedx.extract(resnet, photos, out=out)
    stamp = first.path.stat().st_mtime_ns
    assert embedx.extract(resnet, photos, out=out, num_workers=1).path.stat().st_mtime_ns == stamp
    embedx.project(out, method="pca")
    with pytest.raises(StoreError, match="layers is .* there and .* here; .*overwrite=true"):
        embedx.extract(resnet, photos, out=out, layers="layer1")
    other = models.torchvision("resnet18", weights=None, input_size=64, seed=1)
    with pytest.raises(StoreError, match="its weights are random, seed 0, .*, and here "):
        embedx.extract(other, photos, out=out)
    smaller = models.torchvision("resnet18", weights=None, input_size=32)
    with pytest.raises(StoreError, match="preprocess is"):
        embedx.extract(smaller, photos, out=out)
    next(photos.rglob("*.jpg")).touch()
    with pytest.raises(StoreError, match=r"the data has changed since: 1 edited \("):
        embedx.extract(resnet, photos, out=out)
    assert first.path.stat().st_mtime_ns == stamp
    assert list((out / "projections").iterdir())
    again = embedx.extract(resnet, photos, out=out, overwrite=True)
    assert again.path.stat().st_mtime_ns != stamp
    assert not (out / "projections").exists()  # what was made of the old rows is gone with them


def test_wrong_arguments_are_said_in_one_line(photos: Path, resnet: Model, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    lazy = nn.Sequential(nn.LazyLinear(2))
    x = np.zeros((3, 4), "f4")
    linear = nn.Sequential(nn.Linear(4, 2))
    cases = [
        ((resnet, photos), {"batch_size": 0}, ConfigError, "batch_size must be at least 1"),
        ((resnet, photos), {"num_workers": -1}, ConfigError, "num_workers must be at least 0"),
        ((resnet, photos), {"thumbnails": 9999}, ConfigError, "thumbnails must be 0 to 512"),
        ((resnet, photos), {"precision": "fp16"}, ConfigError, "precision=fp16 needs a GPU"),
        (
            (resnet, photos),
            {"device": "cuda:7"},
            ConfigError,
            "is not on this machine; choose auto or one of:",
        ),
        ((resnet, photos), {"layers": "layer9"}, LayerError, "the nearest of its 67 layers"),
        ((resnet, photos), {"layers": []}, LayerError, "layers is empty"),
        ((resnet, photos), {"pooling": "gpa"}, ConfigError, "'gpa' is not known"),
        ((resnet, photos), {"layers": "layer1", "pooling": "none"}, ShapeError, "pooling=none"),
        ((resnet, photos), {"layers": "layer1.0.relu"}, LayerError, "ran 2 times in one pass"),
        ((resnet, tmp_path / "no"), {}, DataError, "is not there"),
        ((resnet, photos), {"out": photos}, ConfigError, "is the folder of the data; choose"),
        ((resnet, []), {}, DataError, "data is empty"),
        ((resnet, 5), {}, DataError, "data is a int; give a folder"),
        ((resnet, photos), {"labels": [1]}, ConfigError, "has ids and labels of its own"),
        ((resnet, (i for i in x)), {}, DataError, "data is a generator, which has no length"),
        ((resnet, pandas.DataFrame(x)), {}, DataError, r"data is a DataFrame; give .*to_numpy\(\)"),
        ((resnet, "flowers"), {}, DataError, "data.root flowers is not there; name a folder"),
        ((nn.Linear, x), {}, ConfigError, r"model is the class Linear; give .*: Linear\(\.\.\.\)"),
        (("resnet18", photos), {}, ConfigError, r'give a network: .*.torchvision\("resnet18"\)'),
        ((len, photos), {}, ConfigError, "model is a builtin_function_or_method; give an nn.Mod"),
        ((tiny, photos), {}, ConfigError, "say how they enter it with preprocess="),
        ((linear, x[:, :3]), {}, ModelError, r"sequential failed on a batch of shape \(3, 3\)"),
        ((lazy, x), {}, ModelError, "has no values for 0.weight yet"),
        ((linear, x), {"labels": [1]}, DataError, "3 samples and 1 labels"),
    ]
    for arguments, options, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            embedx.extract(*arguments, **{"out": tmp_path / "out", **options})
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of float32, float16, not 'int8'; the nearest is"),
        ({"precision": "double"}, "precision must be one of fp32, tf32, bf16, fp16, not 'double'"),
        ({"precision": "tf32"}, "precision=tf32 needs cuda, and the device is cpu"),
        ({"on_error": "Raise"}, "on_error must be one of skip, raise, not 'Raise'"),
        ({"overwrite": "no"}, "overwrite must be true or false, not 'no'"),
        ({"batch_size": "4"}, "batch_size must be a whole number or null, not '4'"),
        ({"batch_size": True}, "batch_size must be a whole number or null, not true"),
        ({"batch_size": 10**20}, "batch_size must be at least 1"),
        ({"layers": 5}, "layers must be a text or a list of texts, not 5"),
        ({"bach_size": 5}, "there is no key 'bach_size'; the nearest are batch_size"),
        ({"ids": [1, 2, 3]}, "the ids are not all texts"),
        ({"labels": 5}, "labels is a int; give a list, one a sample"),
        ({"preprocess": Preprocess(8, 8)}, "preprocess= takes pictures, and the data are ndarray"),
    ],
)
def test_arguments_from_python_are_checked_as_those_of_the_shell_are(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    kinds = (ConfigError, DataError)
    with pytest.raises(kinds, match=message):
        embedx.extract(model, np.zeros((3, 4), "f4"), **{"out": tmp_path / "o", **options})
    assert not (tmp_path / "o").exists()


class Shifty(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.ReLU, *, hidden: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b = nn.Linear(4, 3), kind(), nn.Linear(3, 2)
        self.register_buffer("hidden", torch.tensor(hidden), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)) + self.hidden) * self.factor

    factor: float = 1.0


def _with(model: nn.Module, **attributes: object) -> nn.Module:
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def _doubled(model: nn.Module) -> Any:
    return lambda x: 2 * model(x)


class Grey(Preprocess):
    """Takes the colours out."""

    def pixels(self, image: Image.Image) -> Tensor:
        return super().pixels(image.convert("L").convert("RGB"))


class Inverted(Grey):
    def pixels(self, image: Image.Image) -> Tensor:
        return 255 - super().pixels(image)


def test_a_preprocessing_and_a_pooling_of_ones_own_are_told_by_their_code(
    photos: Path, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    sizes = {"resize_px": 32, "crop_px": 32}
    options: dict[str, Any] = {"layers": "0", "out": tmp_path}

    def scaled(k: int) -> Any:
        return lambda activation: k * activation.mean((2, 3))

    embedx.extract(model, photos, preprocess=Grey(**sizes), pooling=scaled(1), **options)
    embedx.extract(model, photos, preprocess=Grey(**sizes), pooling=scaled(1), **options)
    for kind in (Preprocess, Inverted):
        with pytest.raises(StoreError, match=r"preprocess is .*Grey.* there and"):
            embedx.extract(model, photos, preprocess=kind(**sizes), pooling=scaled(1), **options)
    with pytest.raises(StoreError, match="the code of the pooling, or what it holds, is another"):
        embedx.extract(model, photos, preprocess=Grey(**sizes), pooling=scaled(2), **options)


def make_small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def test_what_nobody_said_of_a_preprocessing_is_told_where_pictures_enter(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(make_small().state_dict(), tmp_path / "w.pt")
    torch.save(torchvision.models.squeezenet1_1().state_dict(), tmp_path / "squeeze.pt")
    size: dict[str, Any] = {"input_size": 32}
    means: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.5] * 3}
    squeeze = models.torchvision("squeezenet1_1", checkpoint=str(tmp_path / "squeeze.pt"), **size)
    ours = Preprocess(resize_px=32, crop_px=32)

    def told(model: models.Model, data: Any = photos, **options: Any) -> list[str]:
        caplog.clear()
        embedx.extract(model, data, out=tmp_path / "run", overwrite=True, batch_size=2, **options)
        words = [one.getMessage() for one in caplog.records]
        return [one.removeprefix("pictures enter ") for one in words if one.startswith("pictures")]

    usual = "ImageNet's mean, ImageNet's deviation, for {}model.mean, model.std did not say what"
    assert told(models.own(make_small, **size)) == [
        f"own by {usual.format('')} it was trained with"
    ]
    (words,) = told(models.own(make_small, name="mine", checkpoint=str(tmp_path / "w.pt")))
    assert words.startswith(f"mine by 224 px, {usual.format('model.input_size, ')}")
    (words,) = told(squeeze)
    assert words.startswith("squeezenet1_1 by 32 px and the mean and deviation of its published")
    assert not told(models.own(make_small, **size, **means))
    assert not told(models.own(make_small), preprocess=ours)
    assert not told(squeeze, preprocess=ours)
    assert not told(models.own(make_small), torch.randn(4, 3, 8, 8))
    assert not told(models.torchvision("squeezenet1_1", weights=None, **size))
    assert not told(squeeze, torch.rand(4, 3, 32, 32) - 0.4)
    embedx.extract(squeeze, torch.rand(4, 3, 32, 32), out=tmp_path / "raw")
    assert "as pixels that were not normalized: tensors enter as they are, and its" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="embedx"):
        embedx.explain(models.own(make_small, **size), photos, out=tmp_path / "maps")
    assert caplog.text.count("pictures enter own by ImageNet's mean") == 1


def make_shifty(k: float) -> nn.Module:
    return Shifty()


def test_the_arguments_and_the_source_of_a_factorys_model_are_part_of_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib
    import sys

    one, two = models.own(make_shifty, k=1.0), models.own(make_shifty, k=2.0)
    assert one.code != two.code
    assert one.code == models.own(make_shifty, k=1.0).code
    monkeypatch.syspath_prepend(str(tmp_path))
    text = (
        "from torch import nn\n"
        "def helper(x): return x * 2\n"
        "class Base(nn.Module):\n"
        "    def forward(self, x): return helper(x)\n"
        "class Net(Base): pass\n"
    )
    (tmp_path / "torchnet.py").write_text(text)
    before = models.code_sha256(importlib.import_module("torchnet").Net())
    assert before == models.code_sha256(sys.modules["torchnet"].Net())
    (tmp_path / "torchnet.py").write_text(text.replace("x * 2", "x * 30"))
    assert before == models.code_sha256(sys.modules["torchnet"].Net())  # what is loaded counts
    importlib.reload(sys.modules["torchnet"])
    assert before != models.code_sha256(sys.modules["torchnet"].Net())


def test_whatever_decides_the_rows_is_noticed(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 4)).astype("f4")
    usual = {"labels": list("aabbcc"), "ids": list("uvwxyz")}
    embedx.extract(Shifty(), x, out=tmp_path, **usual)
    other = np.where(np.arange(24).reshape(6, 4) == 13, x + 1, x)
    for model, data_, options, message in [
        (Shifty(nn.Tanh), x, {}, "the code, the structure or an attribute of the model"),
        (Shifty(hidden=1.0), x, {}, "its weights are live module, "),
        (
            _with(Shifty(), factor=2.0),
            x,
            {},
            "the code, the structure or an attribute of the model",
        ),
        (_with(Shifty(), z=torch.ones(2)), x, {}, "the code, the structure or"),
        (_with(Shifty(), act_=torch.tanh), x, {}, "the code, the structure or"),
        (_with(Shifty(), steps=[1, {"a": nn.Tanh()}]), x, {}, "the code, the structure or"),
        (Shifty(), other, {}, r"the data has changed since: 1 edited \(x\)"),
        (Shifty(), x[:4], {k: v[:4] for k, v in usual.items()}, r"since: 2 removed \(y, z\);"),
        (Shifty(), x[::-1].copy(), {"ids": list("zyxwvu")}, "the samples are in another order"),
        (Shifty(), list(torch.tensor(x)), {}, "some samples are others"),
        (Shifty(), list(torch.tensor(x[:5])), {k: v[:5] for k, v in usual.items()}, "6 samples th"),
        (Shifty(), x, {"labels": list("aaabcc")}, "the ids or labels are others"),
        (Shifty(), x, {"ids": list("uvwxya")}, "the ids or labels are others"),
        (Shifty(), x, {"precision": "bf16"}, "precision is fp32 there and bf16 here"),
        (Shifty(), x, {"pooling": "flatten"}, "pooling is"),
        (_with(Shifty(), forward=_doubled(Shifty())), x, {}, "the code, the structure or"),
    ]:
        with pytest.raises(StoreError, match=message):
            embedx.extract(model, data_, out=tmp_path, **{**usual, **options})
    embedx.extract(Shifty(), x, out=tmp_path, **usual)


def test_overwriting_keeps_the_old_run_until_the_new_one_is_whole_and_what_is_not_ours(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).standard_normal((30, 4)).astype("f4")
    first = embedx.extract(Shifty(), x, out=tmp_path, labels=list("ab" * 15))
    embedx.project(first, method="pca")
    embedx.evaluate(first)
    embedx.view(first)
    embedx.export(first)
    mine = [
        tmp_path / "projections" / "thesis.docx",
        tmp_path / "map-of-paris.png",
        tmp_path / "notes.txt",
    ]
    for path in mine:
        path.write_bytes(b"my own")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ModelError):
        embedx.extract(Shifty(), x[:, :3], out=tmp_path, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    again = embedx.extract(Shifty(nn.Tanh), x, out=tmp_path, overwrite=True)
    assert again.attrs["id"] != first.attrs["id"]
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {
        "embeddings.h5",
        "config.yaml",
        *(path.relative_to(tmp_path).as_posix() for path in mine),
    }


def test_an_overwriting_run_that_fails_leaves_the_lists_of_the_old_run(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    sorted(photos.rglob("*.jpg"))[3].write_bytes(b"nothing")
    out = tmp_path / "run"
    embedx.extract(resnet, photos, out=out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(before) == {"embeddings.h5", "errors.jsonl", "config.yaml"}
    other = {"layers": "layer1", "batch_size": 2, "on_error": "raise", "overwrite": True}
    with pytest.raises(DataError, match="row 3"):
        embedx.extract(resnet, photos, out=out, **other)
    for name, data_ in before.items():
        assert (out / name).read_bytes() == data_
    embedx.extract(resnet, photos, out=out, **{**other, "on_error": "skip"})
    assert {path.name for path in out.iterdir()} == set(before)
    assert b"layer1" in (out / "config.yaml").read_bytes()
    (out / "embeddings.h5").write_bytes(b"damaged")
    embedx.extract(resnet, photos, out=out, overwrite=True)
    assert store.open(out).verify() == []


def test_overwriting_does_not_take_a_running_writers_file(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 4)).astype("f4")
    whole = embedx.extract(Shifty(), x, out=tmp_path / "a")
    writer = writing.create(
        tmp_path / "b" / "embeddings.h5",
        ids=whole.ids,
        fields=[layout.embeddings_field("x", n_features=1, dtype=np.dtype("f4"), attrs={})],
        attrs={"id": "other"},
    )
    with pytest.raises(StoreError, match="is being written by this process"):
        embedx.extract(Shifty(), x, out=tmp_path / "b", overwrite=True)
    writer.append({"embeddings/x": np.ones((6, 1), "f4")}, status=np.ones(6))
    assert store.open(writer.finish()).n_rows == 6


def test_a_run_whose_every_row_is_not_finite_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    x = np.full((3, 4), np.nan, "f4")
    with pytest.raises(DataError, match="every one of the 3 rows failed; the first: NaN or Inf in"):
        embedx.extract(Shifty(), x, out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_model_that_draws_random_numbers_draws_the_same_for_a_batch_when_resumed(
    tmp_path: Path,
) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            PASSES_LEFT[0] -= 1
            if PASSES_LEFT[0] == 0:
                raise RuntimeError("stopped")
            drawn = float(np.random.rand()) + random.random()  # noqa: NPY002
            return self.a(x + torch.rand_like(x) + drawn)

    x = np.zeros((12, 4), "f4")
    model = Noisy()
    whole = embedx.extract(model, x, layers="a", batch_size=3, out=tmp_path / "a")
    PASSES_LEFT[0] = 3
    commit_s, writing.COMMIT_S = writing.COMMIT_S, 0.0
    try:
        with pytest.raises(ModelError, match="RuntimeError: stopped"):
            embedx.extract(model, x, layers="a", batch_size=3, out=tmp_path / "b")
    finally:
        writing.COMMIT_S = commit_s
    again = embedx.extract(model, x, layers="a", batch_size=3, out=tmp_path / "b")
    assert sha256(whole.path) == sha256(again.path)


def test_a_random_generator_of_the_models_own_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _with(Shifty(), noise=torch.Generator())
    embedx.extract(model, np.zeros((2, 4), "f4"), out=tmp_path)
    assert "shifty has a random generator of its own, which goes on from pass to pass: noise;" in (
        caplog.text
    )


def test_mixed_types_in_a_batch_are_refused_not_cast(tmp_path: Path) -> None:
    items = [torch.tensor([1, 0, 0, 0]), torch.full((4,), 0.75)]
    source = Source("mixed", ["a", "b"], items.__getitem__, "x")
    with pytest.raises(ShapeError, match=r"sample b is \(4,\) float32 and sample a is \(4,\) int"):
        embedx.extract(nn.Sequential(nn.Linear(4, 2)), source, out=tmp_path / "o")
    with pytest.raises(ShapeError) as got:
        embedx.extract(nn.Sequential(nn.Linear(4, 2)), source, num_workers=1, out=tmp_path / "o")
    assert "Traceback" not in str(got.value)


def test_a_length_that_changes_between_batches_is_said(tmp_path: Path) -> None:
    items = [torch.zeros(2, 3), torch.zeros(2, 4)]
    source = Source("odd", ["a", "b"], items.__getitem__, "x")
    model = nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2, 1))
    with pytest.raises(ShapeError, match=r"has shape \(8,\) from row 1 on and \(6,\) before"):
        embedx.extract(model, source, layers="0", pooling="flatten", batch_size=1, out=tmp_path)


@pytest.mark.slow
def test_a_killed_worker_is_said_in_one_line(tmp_path: Path) -> None:
    import os

    def read(i: int) -> Tensor:
        if i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4)

    source = Source("deadly", [str(i) for i in range(9)], read, "x")
    with pytest.raises(DataError, match="a process that reads the data died") as caught:
        embedx.extract(
            nn.Sequential(nn.Linear(4, 2)), source, batch_size=2, num_workers=1, out=tmp_path
        )
    assert "\n" not in str(caught.value)


def test_the_precision_settings_of_torch_are_restored(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2))
        got = embedx.extract(model, x, layers="0", out=tmp_path)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.no_grad():
        assert relative_error(got.embeddings["0"], model[0](x).numpy()) < 1e-5


def test_samples_of_different_shapes_are_named(tmp_path: Path) -> None:
    items = [torch.zeros(3), torch.zeros(4)]
    source = Source("odd", ["a", "b"], items.__getitem__, "x")
    with pytest.raises(ShapeError, match=r"sample b is \(4,\) float32 and sample a is \(3,\)"):
        embedx.extract(nn.Sequential(nn.Linear(3, 2)), source, out=tmp_path)


def test_half_precision_is_near_and_is_stored_as_a_fact(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    full = embedx.extract(resnet, photos, out=tmp_path / "a")
    half = embedx.extract(resnet, photos, out=tmp_path / "b", precision="bf16")
    error = relative_error(half.rows()[1], full.rows()[1])
    assert 0 < error < 0.05
    assert json.loads(half.attrs["identity"])["precision"] == "bf16"


SLOW = """
import time
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        time.sleep(0.2)
        return self.head(self.body(x))

def make():
    return Slow()
"""


SLOW_RUN = [
    *(sys.executable, "-m", "embedx", "extract", "model=own", "model._target_=slow.make"),
    *("model.input_size=16", "data.limit=180", "batch_size=10"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "slow.py").write_text(SLOW)
    subprocess.run([*SLOW_RUN, "name=whole"], cwd=folder, check=True, capture_output=True)
    return sha256(folder / "outputs" / "whole" / "embeddings.h5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, 0),
        pytest.param(signal.SIGTERM, 2, marks=EXHAUSTIVE),
        pytest.param(signal.SIGKILL, 0, marks=EXHAUSTIVE),
        (signal.SIGKILL, 2),
    ],
)
def test_a_run_stopped_by_a_signal_ends_with_the_same_bytes_as_one_that_was_not(
    tmp_path: Path, uninterrupted: str, number: signal.Signals, workers: int
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [*SLOW_RUN, f"num_workers={workers}", "name=stopped"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    partial = unfinished.partial_path(tmp_path / "outputs" / "stopped" / "embeddings.h5")
    deadline = time.monotonic() + 60
    kept = 0
    while kept == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        if partial.exists():
            kept = store.Embeddings(partial).n_rows
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number
        *at_once, last = err.strip().splitlines()
        wanted = "stopping after this batch; Ctrl-C again stops at once"
        assert at_once == ([wanted] if number == signal.SIGINT else []), err
        assert last.startswith(f"Interrupted: stopped by {number.name}: ")
        assert last.endswith("run the same command again to go on")
    assert 0 < kept < 180
    assert store.Embeddings(partial).n_rows >= kept

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "going on at row" in again.stdout
    path = tmp_path / "outputs" / "stopped" / "embeddings.h5"
    assert sha256(path) == uninterrupted
    assert store.open(path).n_rows == 180
    assert sorted(p.name for p in path.parent.iterdir()) == ["config.yaml", "embeddings.h5"]


def test_a_live_model_takes_pictures_when_told_how(photos: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)).eval()
    prepared = Preprocess(resize_px=8, crop_px=8)
    got = embedx.extract(
        model, photos, preprocess=prepared, layers="0", pooling="none", out=tmp_path / "o"
    )
    first = Image.open(sorted(photos.rglob("*.jpg"))[0])
    expected = prepared.normalize(prepared.pixels(first)[None]).flatten(1).numpy()
    np.testing.assert_allclose(got.embeddings["0"][:1], expected, rtol=1e-6)


# --------------------------------------------------------------------------- code of one's own


def test_a_source_of_ones_own_is_read_by_one_thread_though_it_names_a_folder(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).standard_normal((60, 4)).astype("f4")
    x.tofile(tmp_path / "x.bin")
    with open(tmp_path / "x.bin", "rb", buffering=0) as file:

        def read(i: int) -> Tensor:
            file.seek(16 * i)
            time.sleep(1e-4)  # another thread would move the place in the file
            return torch.frombuffer(bytearray(file.read(16)), dtype=torch.float32)

        source = Source("one", [str(i) for i in range(60)], read, "x", root=tmp_path)
        model = nn.Sequential(nn.Identity(), nn.Linear(4, 2)).eval()
        run = embedx.extract(model, source, layers="0", batch_size=30, out=tmp_path / "o")
    np.testing.assert_array_equal(run.embeddings["0"], x)


class Crop(Preprocess):
    def pixels(self, image: Image.Image) -> Tensor:
        return super().pixels(image)[:, :: int(torch.randint(1, 9, ()))].float().mean((1, 2))

    def normalize(self, pixels: Tensor) -> Tensor:
        return pixels


@pytest.mark.parametrize("workers", [0, 2])
def test_a_preprocessing_of_ones_own_draws_from_the_seed_of_its_row(
    workers: int, photos: Path, tmp_path: Path
) -> None:
    prepare = Crop(resize_px=16, crop_px=16)
    wanted = []
    for i, path in enumerate(sorted(photos.rglob("*.jpg"))):
        torch.manual_seed(i)
        wanted.append(prepare.pixels(decode_image(path)).numpy())
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 2)).eval()
    drawn = np.random.get_state()[1]  # noqa: NPY002
    run = embedx.extract(
        model, photos, preprocess=prepare, layers="0", batch_size=5, num_workers=workers,
        out=tmp_path / "o",
    )  # fmt: skip
    np.testing.assert_allclose(run.embeddings["0"], np.stack(wanted), rtol=1e-6)
    np.testing.assert_array_equal(drawn, np.random.get_state()[1])  # noqa: NPY002


class Filling:
    """Fills one buffer again and again."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(8, 3)

    def __call__(self, activation: Tensor) -> Tensor:
        return torch.mul(activation, 2, out=self.buffer[: len(activation)])


class Trained(nn.Module):
    """A pooling that in train mode would move its statistics and drop half of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, activation: Tensor) -> Tensor:
        return self.drop(self.norm(activation))


def test_a_pooling_of_ones_own_changes_neither_the_pass_nor_other_rows_nor_itself(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)).eval()
    x = torch.randn(10, 4)
    with torch.no_grad():
        first = model[0](x)
        second, logits = model[1](first), model(x)
    trained, before = Trained(), Trained().state_dict()
    for pooling, wanted in (
        (lambda activation: activation.clamp_(min=0), first.clamp(min=0)),
        (Filling(), first * 2),
        (trained, first / (1 + 1e-5) ** 0.5),
        (trained.forward, first / (1 + 1e-5) ** 0.5),
    ):
        run = embedx.extract(
            model, x, layers=["0", "1"], pooling=pooling, save_outputs=True, batch_size=5,
            overwrite=True, out=tmp_path,
        )  # fmt: skip
        np.testing.assert_allclose(run.embeddings["0"], wanted.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(run.outputs["logits"], logits.numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(run.embeddings["1"] - second.numpy() / (1 + 1e-5) ** 0.5).max() < 1e-5
    assert trained.training
    assert all(torch.equal(before[key], value) for key, value in trained.state_dict().items())


class MeanOf(nn.Module):
    def forward(self, activation: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        mask[:, 0] = mask[:, 0].clone()
        return (activation * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)


class OfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Identity(), nn.Linear(4, 2)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.a(x)
        return self.head(x.mean(1))


def test_the_mask_reaches_a_pooling_that_is_a_module_or_takes_any_name(tmp_path: Path) -> None:
    x, lengths = torch.randn(4, 6, 4), [6, 3, 1, 6]
    masks = [torch.arange(6) < n for n in lengths]
    items = [{"x": one, "attention_mask": mask} for one, mask in zip(x, masks, strict=True)]
    wanted = np.stack([x[i, :n].numpy().mean(0) for i, n in enumerate(lengths)])

    def any_name(activation: Tensor, **options: Tensor) -> Tensor:
        return MeanOf()(activation, **options)

    for i, pooling in enumerate((MeanOf(), MeanOf().forward, any_name)):
        run = embedx.extract(
            OfTokens().eval(), items, layers="a", pooling=pooling, out=tmp_path / str(i)
        )
        np.testing.assert_allclose(run.embeddings["a"], wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="layer a: pooling=.* gives a tuple; let it give a tensor"):
        embedx.extract(
            OfTokens().eval(), items, layers="a", pooling=lambda a: (a,), out=tmp_path / "t"
        )


class Keeping(nn.Module):
    """Keeps something between passes: what it saw last, or a cache that stays."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.a, self.moves, self.kept = nn.Linear(4, 3), moves, torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.kept / 2 + x.mean(0) if self.moves else torch.ones(4)
        return self.a(x + self.kept)


class KeepsMean:
    def __init__(self) -> None:
        self.mean = torch.zeros(4)

    def __call__(self, activation: Tensor) -> Tensor:
        self.mean = self.mean / 2 + activation.mean(0)
        return activation - self.mean


def test_what_a_model_or_a_pooling_keeps_from_pass_to_pass_is_said_and_a_cache_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    for model, layer, pooling, is_said in (
        (Keeping(moves=True), "a", "none", True),
        (Keeping(moves=False), "a", "none", False),
        (plain, "0", KeepsMean(), True),
        (plain, "0", "none", False),
    ):
        caplog.clear()
        embedx.extract(
            model.eval(), torch.randn(9, 4), layers=layer, pooling=pooling, batch_size=3,
            overwrite=True, out=tmp_path,
        )  # fmt: skip
        assert ("or its pooling keeps something from pass to pass" in caplog.text) == is_said


def test_the_size_of_batches_is_part_of_a_run_where_it_may_decide_the_rows(
    tmp_path: Path,
) -> None:
    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x - x.mean(0))

    x, model, known = torch.randn(8, 4), Sees().eval(), nn.Sequential(nn.Linear(4, 2)).eval()
    embedx.extract(model, x, layers="a", batch_size=4, out=tmp_path / "own")
    with pytest.raises(StoreError, match="another run: batch_size is 4 there and 8 here"):
        embedx.extract(model, x, layers="a", batch_size=8, out=tmp_path / "own")
    first = embedx.extract(known, x, layers="0", batch_size=4, out=tmp_path / "known")
    again = embedx.extract(known, x, layers="0", batch_size=8, out=tmp_path / "known")
    assert again.attrs["batch_size"] == first.attrs["batch_size"] == 4


def test_a_parameter_that_a_pass_changes_anywhere_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.a = nn.Parameter(torch.zeros(5, 4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.memory.data[3, 2] += 1
            return self.a(x)

    embedx.extract(Writes().eval(), torch.zeros(2, 4), layers="a", out=tmp_path)
    assert "writes changed its parameters, by eval(), train() or its passes: memory;" in caplog.text


def test_outputs_that_are_the_input_changed_in_place_are_those_of_the_first_pass(
    tmp_path: Path,
) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.a(x)
            return x.mul_(3)

    x = torch.randn(12, 6)  # as many features as samples in a batch: two go through once more
    run = embedx.extract(
        InPlace().eval(), x, layers="a", save_outputs=True, batch_size=6, out=tmp_path
    )
    np.testing.assert_array_equal(run.outputs["logits"], (x * 3).numpy())


def test_tokens_that_come_first_are_told_from_samples_where_all_batches_must_be_of_one_size(
    tmp_path: Path,
) -> None:
    class Fixed(nn.Module):
        def __init__(self, *, is_first: bool) -> None:
            super().__init__()
            self.a, self.is_first = nn.Linear(4, 6), is_first

        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 8:
                raise ValueError("for batches of 8")
            return self.a(x.transpose(0, 1) if self.is_first else x)

    x = torch.randn(16, 8, 4)
    with pytest.raises(
        ShapeError, match=r"layer a gives the same \(8, 6\) for 8 samples in the ot"
    ):
        embedx.extract(
            Fixed(is_first=True).eval(), x, layers="a", pooling="mean_token", batch_size=8,
            out=tmp_path / "a",
        )  # fmt: skip
    model = Fixed(is_first=False).eval()
    run = embedx.extract(
        model, x, layers="a", pooling="mean_token", batch_size=8, out=tmp_path / "b"
    )
    np.testing.assert_allclose(run.embeddings["a"], model.a(x).mean(1).detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_a_sample_of_padding_alone_is_a_failed_row_in_any_batch(
    batch_size: int, tmp_path: Path
) -> None:
    masks = torch.ones(6, 3)
    masks[2], masks[3, 1:] = 0, 0
    items = [{"x": torch.randn(3, 4), "attention_mask": mask} for mask in masks]
    run = embedx.extract(
        OfTokens().eval(), items, layers="a", batch_size=batch_size, out=tmp_path / "a"
    )
    assert np.flatnonzero(~run.ok).tolist() == [2]
    with pytest.raises(ShapeError, match="attention_mask is of floats that are zeros alone"):
        embedx.extract(OfTokens().eval(), items[2:], layers="a", batch_size=1, out=tmp_path / "b")


@pytest.mark.parametrize("workers", [0, 1])
def test_items_that_are_no_dense_tensors_fail_their_rows_and_arrays_of_any_layout_do_not(
    workers: int, tmp_path: Path
) -> None:
    x = torch.arange(24.0).reshape(6, 4)
    items: list[Any] = list(x)
    items[1] = x[1].to_sparse()
    items[2] = x[2].to("meta")
    items[3] = x[3].numpy()[::-1]
    items[4] = x[4].numpy().astype(">f4")
    items[5] = np.broadcast_to(np.float32(5), 4)  # read-only
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2)).eval()
    run = embedx.extract(model, items, layers="0", batch_size=3, num_workers=workers, out=tmp_path)
    kinds = ["sparse", "without values (on meta)"]
    assert [one["reason"] for one in unfinished.read_reasons(run.path)] == [
        f"DataError: it is a tensor that is {kind}; give a dense one" for kind in kinds
    ]
    wanted = x.numpy().copy()
    wanted[1:3], wanted[3], wanted[5] = np.nan, wanted[3, ::-1], 5
    np.testing.assert_array_equal(run.embeddings["0"], wanted)


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_that_is_out_stops_the_run_and_is_no_failed_row(
    workers: int, tmp_path: Path
) -> None:
    def read(i: int) -> Tensor:
        if i == 5:
            raise MemoryError
        return torch.zeros(4)

    source = Source("big", list("abcdefgh"), read, "x")
    with pytest.raises(DataError, match="out of memory at row 5, f; what was committed is kept"):
        embedx.extract(
            nn.Sequential(nn.Linear(4, 2)), source, batch_size=2, num_workers=workers, out=tmp_path
        )


def test_a_layer_that_gives_no_dense_tensor_is_refused_in_one_line(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.to_sparse()).to_dense()

    with pytest.raises(ShapeError, match="layer a gives a quantized, sparse or nested tensor"):
        embedx.extract(Sparse().eval(), torch.ones(4, 3), layers="a", out=tmp_path)


def test_tensors_are_made_on_the_cpu_whatever_the_default_device_is() -> None:
    x = torch.randn(5, 4)
    model = inputs.as_model(nn.Linear(4, 2), preprocess=None)
    for samples in (x, x.tolist(), [{"x": row.numpy()} for row in x]):
        source = inputs.as_source(samples, labels=None, ids=None, num_workers=0)
        assert isinstance(source, Source)
        with torch.device("meta"):  # the one beside the processor that all machines have
            batches = inputs.Batches(source, model, batch_size=2)
            loader = torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=inputs.only)
            given = [piece.inputs for batch in inputs.started(loader) for piece in batch.pieces]
        found = [one["x"] if isinstance(one, dict) else one for one in given]
        assert torch.equal(torch.cat(found), x)


@pytest.mark.parametrize("n", [0, 1, 7])
def test_what_is_kept_of_the_samples_is_hashed_as_one_json_text(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_HASHED_ROWS", 3)
    metadata: dict[str, Any] = {
        "größe": np.arange(n) * 2.5,
        "is_old": np.arange(n) % 2 == 0,
        "texts": [f'"{i}", é' for i in range(n)],
        "numbers": list(range(n)),
    }
    for labels, in_items in ((None, False), (np.arange(n, dtype=np.int32), False), (None, True)):
        for columns in ({}, metadata):
            source = Source(
                "x",
                [f"id {i} ü" for i in range(n)],
                read=lambda _: None,
                fingerprint="",
                labels=labels,
                labels_in_items=in_items,
                label_names=[f"name {i}" for i in range(n)] if labels is not None else [],
                metadata=columns,
            )
            kinds = ["float64", "bool", "texts" if n else "float64", "int64" if n else "float64"]
            whole = [
                source.ids,
                "in the items" if in_items else None if labels is None else labels.tolist(),
                source.label_names,
                {
                    name: [kind, *map(str, column)]
                    for (name, column), kind in zip(columns.items(), kinds, strict=False)
                },
            ]
            expected = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
            assert plans._columns_sha256(source) == expected


@pytest.mark.parametrize("kind", ["two inputs", "a list"])
def test_items_of_several_tensors_fail_in_words(kind: str, tmp_path: Path) -> None:
    class Pairs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> Any:
            x = torch.randn(4)
            return ((x, x), 1) if kind == "two inputs" else [x, 1]

    with pytest.raises(DataError, match=r"it is a (tuple|list) of 2; give one tensor"):
        embedx.extract(nn.Sequential(nn.Linear(4, 3)), Pairs(), layers="0", out=tmp_path)
