"""Rows that would be wrong, or another run's, without a word: refused, said, or made right."""

import contextlib
import contextvars
import copy
import dataclasses
import functools
import io
import itertools
import logging
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import embedx
from embedx import array_data, data, fold, layout, models, pooling, sources, store, unfinished
from embedx.disk import writing_lock
from embedx.errors import (
    ConfigError,
    DataError,
    InUseError,
    LayerError,
    ModelError,
    ShapeError,
    StoreError,
)
from embedx.fingerprints import code_sha256, state_sha256, value_sha256
from embedx.pictures import decode_image, whole_pictures
from embedx.points import resolve_points
from embedx.sources import Source
from tests.test_gradients import cut_after

Array = np.ndarray[Any, Any]


def linear(*sizes: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))).eval()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


AWAY = OSError("away")


class Samples(Dataset[Tensor]):
    """64 samples, of which one cannot be read; it is none of those that are looked at."""

    def __init__(self, bad: int | None = None, *, d: int = 4, error: Any = AWAY) -> None:
        self.x, self.bad, self.error = noise(64, d), bad, error

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Tensor:
        if i == self.bad:
            raise self.error
        return self.x[i]


# --------------------------------------------------------------------------- the first pass


class MakesItself(nn.Module):
    """A network that is ready after its first pass alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.made = how, None
        self.fc, self.out = nn.Linear(4, 3), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.how == "a buffer" and "centre" not in self._buffers:
            self.register_buffer("centre", y.mean(0))
        if self.made is None:
            made: Any = {
                "a layer": lambda: nn.Linear(3, 3),
                "an attribute": lambda: y.mean(0),
                "a cache": lambda: torch.arange(3.0),
                "a buffer": lambda: 0,
                "a parameter": lambda: self.fc.bias.data.copy_(y.mean(0)) * 0,
            }[self.how]()
            self.made = made
        if self.how == "a layer":
            y = self.made(y)  # type: ignore[misc]
        centre = self.centre if self.how == "a buffer" else self.made
        return self.out(y if self.how == "a layer" else y - centre)  # type: ignore[no-any-return]


class Centre:
    """A pooling that is ready after its first call."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, activation: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = activation.mean(0)
        return activation - self.mean


def stopped(model: nn.Module, out: Path, **given: Any) -> None:
    with pytest.raises(DataError, match="row 22, 22: OSError: away"):
        embedx.extract(
            model, Samples(22), layers="out", batch_size=4, on_error="raise", out=out, **given
        )
    assert store.Embeddings(unfinished.partial_path(out / "embeddings.h5")).n_rows == 20


@pytest.mark.parametrize("how", ["a layer", "an attribute", "a buffer", "a parameter"])
def test_a_run_does_not_go_on_with_a_network_that_made_itself_of_another_batch(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(MakesItself(how), tmp_path)
    assert "made something in its first pass" in caplog.text
    with pytest.raises(StoreError, match="made itself something else in its first pass"):
        embedx.extract(MakesItself(how), Samples(), layers="out", batch_size=4, out=tmp_path)
    again = embedx.extract(
        MakesItself(how), Samples(), layers="out", batch_size=4, out=tmp_path, overwrite=True
    )
    model = MakesItself(how).eval()
    torch.manual_seed(0)  # that of the first row
    with torch.no_grad():
        wanted = torch.cat([model(rows) for rows in noise(64, 4).split(4)])
    np.testing.assert_allclose(again.embeddings["out"], wanted, atol=1e-5)


def test_a_run_does_not_go_on_with_a_pooling_that_fitted_itself_to_another_batch(
    tmp_path: Path,
) -> None:
    model = nn.Sequential()
    model.add_module("out", linear(4, 3))
    stopped(model, tmp_path, pooling=Centre())
    with pytest.raises(StoreError, match="made itself something else in its first pass"):
        embedx.extract(model, Samples(), layers="out", batch_size=4, pooling=Centre(), out=tmp_path)


def test_a_run_goes_on_where_the_first_pass_makes_the_same(tmp_path: Path) -> None:
    stopped(MakesItself("a cache"), tmp_path / "a")
    for name in "ab":
        embedx.extract(
            MakesItself("a cache"), Samples(), layers="out", batch_size=4, out=tmp_path / name
        )
    one, other = ((tmp_path / name / "embeddings.h5").read_bytes() for name in "ab")
    assert one == other


def test_a_compiled_network_makes_nothing_of_its_own_in_its_first_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(4, 3), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(self.fc(x)))  # type: ignore[no-any-return]

    model = Plain().eval()
    model.compile(backend="eager")
    run = embedx.extract(model, noise(12, 4), layers="out", batch_size=4, out=tmp_path)
    with torch.no_grad():
        np.testing.assert_allclose(run.embeddings["out"], model(noise(12, 4)), atol=1e-6)
    assert "first pass" not in caplog.text
    assert "made_by_first_pass" not in run.attrs


# --------------------------------------------------------------------------- a Model


def changed_weights(model: models.Model) -> models.Model:
    with torch.no_grad():
        model.module.fc.weight.data.mul_(2)  # type: ignore[union-attr]
    return model


def changed_layer(model: models.Model) -> models.Model:
    model.module.fc = nn.Sequential(model.module.fc, nn.Tanh())
    return model


def changed_network(model: models.Model) -> models.Model:
    return dataclasses.replace(model, module=models.torchvision("resnet18", weights=None).module)


@pytest.mark.parametrize("change", [changed_weights, changed_layer, changed_network])
def test_a_model_whose_network_changed_since_it_was_made_is_another_run(
    change: Callable[[models.Model], models.Model],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = models.torchvision("resnet18", weights=None, seed=5)
    first = embedx.extract(model, x, layers="fc", out=tmp_path / "a")
    assert (
        embedx.extract(model, x, layers="fc", out=tmp_path / "a").attrs["id"] == (first.attrs["id"])
    )
    assert "has changed since" not in caplog.text
    model = change(model)
    with pytest.raises(StoreError, match="holds another run"):
        embedx.extract(model, x, layers="fc", out=tmp_path / "a")
    run = embedx.extract(model, x, layers="fc", out=tmp_path / "b")
    assert "has changed since its Model was made" in caplog.text
    assert run.attrs["weights"] == "random, seed 5, changed since"
    assert run.attrs["weights_sha256"] == state_sha256(model.module)
    with torch.no_grad():
        np.testing.assert_allclose(run.embeddings["fc"], model.module(x), atol=1e-4)


def test_a_preprocessing_given_beside_a_model_is_the_one_that_counts(tmp_path: Path) -> None:
    Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)).save(
        tmp_path / "a.png"
    )
    model = models.torchvision("resnet18", weights=None, input_size=64)
    mine = models.Preprocess(resize_px=32, crop_px=32, mean=(0, 0, 0), std=(1, 1, 1))
    run = embedx.extract(
        model, tmp_path, layers="fc", preprocess=mine, thumbnails=0, out=tmp_path / "out"
    )
    pixels = torch.from_numpy(np.asarray(Image.open(tmp_path / "a.png")).copy()).permute(2, 0, 1)
    with torch.no_grad():
        wanted = model.module(pixels[None] / 255)
    np.testing.assert_allclose(run.embeddings["fc"], wanted, atol=1e-4)


# --------------------------------------------------------------------------- samples by themselves

ALONE = [
    nn.Linear(2, 2),
    nn.BatchNorm2d(2),
    nn.InstanceNorm2d(2),
    nn.Softmax(dim=1),
    nn.Softmax(dim=-1),
    nn.Flatten(),
    nn.GLU(),
    nn.Dropout2d(),
    nn.ConvTranspose1d(2, 2, 1),
    nn.AdaptiveMaxPool3d(1),
    nn.ReLU6(),
    nn.LogSigmoid(),
    nn.PixelShuffle(2),
    nn.ZeroPad2d(1),
]
TOGETHER = [
    nn.BatchNorm2d(2, track_running_stats=False),
    nn.Softmax(dim=0),
    nn.Softmax(dim=-2),
    nn.Softmax2d(),
    nn.Flatten(0),
    nn.FractionalMaxPool2d(2, output_size=1),
    nn.LSTM(2, 2),
    nn.LSTM(2, 2, batch_first=True),
    nn.TransformerEncoderLayer(2, 1, 2),
    nn.MultiheadAttention(2, 1, batch_first=True),
    nn.EmbeddingBag(3, 2),
]


@pytest.mark.parametrize("layer", ALONE, ids=str)
def test_layers_that_look_at_one_sample_at_a_time_are_known_as_such(layer: nn.Module) -> None:
    assert fold.is_by_sample(nn.Sequential(layer).eval())


@pytest.mark.parametrize("layer", TOGETHER, ids=str)
def test_layers_that_may_see_a_batch_together_are_told_by_kind_and_options(
    layer: nn.Module,
) -> None:
    assert fold.is_known(layer.eval())
    assert not fold.is_by_sample(nn.Sequential(nn.ReLU(), layer).eval())


def test_networks_of_the_libraries_look_at_one_sample_at_a_time() -> None:
    from torchvision import models as published

    names = [
        *("resnet18", "resnet50", "alexnet", "vgg16", "densenet121", "mobilenet_v3_small"),
        *("efficientnet_b0", "convnext_tiny", "swin_t", "vit_b_16"),
    ]
    with torch.device("meta"):
        for name in names:
            assert fold.is_by_sample(published.get_model(name, weights=None).eval()), name
        norm = functools.partial(nn.BatchNorm2d, track_running_stats=False)
        assert not fold.is_by_sample(published.resnet18(norm_layer=norm).eval())


def test_the_size_of_batches_is_part_of_a_run_whose_samples_may_see_each_other(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=0)).eval()
    for batch_size in (4, 8):
        given: dict[str, Any] = {"layers": "1", "batch_size": batch_size}
        run = embedx.extract(model, noise(8, 4), out=tmp_path / str(batch_size), **given)
        with torch.no_grad():
            wanted = torch.cat([model(rows) for rows in noise(8, 4).split(batch_size)])
        np.testing.assert_allclose(run.embeddings["1"], wanted, atol=1e-6)
    with pytest.raises(StoreError, match="batch_size is 4 there and 8 here"):
        embedx.extract(model, noise(8, 4), out=tmp_path / "4", layers="1", batch_size=8)
    alone = linear(4, 3)
    runs = [
        embedx.extract(alone, noise(8, 4), layers="0", batch_size=b, out=tmp_path / "alone")
        for b in (4, 8)
    ]
    assert runs[0].attrs["id"] == runs[1].attrs["id"]


class Batchwise(models.Preprocess):
    def normalize(self, pixels: Tensor) -> Tensor:
        scaled = super().normalize(pixels)
        return scaled - scaled.mean((0, 2, 3), keepdim=True)


class Noisy(models.Preprocess):
    def normalize(self, pixels: Tensor) -> Tensor:
        scaled = super().normalize(pixels)
        return scaled + torch.randn_like(scaled)


def pictures(folder: Path, n: int) -> Path:
    folder.mkdir()
    for i in range(n):
        pixels = np.random.default_rng(i).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return folder


def test_a_preprocessing_of_ones_own_may_see_the_batch_and_draws_from_the_seed_of_its_row(
    tmp_path: Path,
) -> None:
    folder = pictures(tmp_path / "pictures", 6)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval()

    def run(kind: type[models.Preprocess], name: str, **given: Any) -> Array:
        prepared = kind(resize_px=8, crop_px=8)
        found = embedx.extract(
            model, folder, layers="1", preprocess=prepared, out=tmp_path / name, **given
        )
        return np.array(found.embeddings["1"])

    run(Batchwise, "a", batch_size=2)
    with pytest.raises(StoreError, match="batch_size is 2 there and 6 here"):
        run(Batchwise, "a", batch_size=6)
    torch.manual_seed(1)
    first = run(Noisy, "b", batch_size=3, num_workers=0)
    torch.manual_seed(2)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, run(Noisy, "c", batch_size=3, num_workers=2))


def test_what_stands_in_a_batch_in_place_of_a_bad_item_is_said_where_it_may_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedx.extract(linear(4, 3), Samples(22), layers="0", out=tmp_path / "a")
    assert "in place of what cannot be read" not in caplog.text
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    run = embedx.extract(model, Samples(22), layers="1", batch_size=64, out=tmp_path / "b")
    assert "such as row 22, zeros enter beside the others of its batch" in caplog.text
    x = noise(64, 4)
    x[22] = 0
    with torch.no_grad():
        wanted = model(x).numpy()
    wanted[22] = np.nan
    np.testing.assert_allclose(run.embeddings["1"], wanted, atol=1e-5)


def doubling(batch: list[Any]) -> Tensor:
    for _, added in batch:
        added.mul_(2)
    return torch.stack([x + added for x, added in batch])


class Pairs(Dataset[Any]):
    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        if i == self.bad:
            raise OSError("bad")
        return torch.full((4,), float(i)), torch.ones(4)


def test_a_collate_fn_that_works_in_place_does_so_once_to_each_item(tmp_path: Path) -> None:
    loader = DataLoader(Pairs(1), batch_size=4, collate_fn=doubling)
    run = embedx.extract(nn.Sequential(nn.Identity()), loader, layers="0", out=tmp_path)
    wanted = np.arange(40.0) + 2
    wanted[1] = np.nan
    np.testing.assert_array_equal(run.embeddings["0"][:, 0], wanted)


class WithLabels(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.full((4,), float(i)), "label": i % 2}


class TakesX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)  # type: ignore[no-any-return]


def without_labels(batch: list[Any]) -> dict[str, Tensor]:
    for item in batch:
        item.pop("label")
    return {"x": torch.stack([item["x"] for item in batch])}


def test_a_collate_fn_may_take_labels_out_of_the_items(tmp_path: Path) -> None:
    loader = DataLoader(WithLabels(), batch_size=4, collate_fn=without_labels)
    run = embedx.extract(TakesX(), loader, layers="out", out=tmp_path)
    assert run.embeddings["out"][:, 0].tolist() == list(range(8))


# --------------------------------------------------------------------------- pictures


def test_a_png_whose_end_is_zeros_fails_its_row(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pictures", 3)
    half = folder / "001.png"
    whole = half.read_bytes()
    half.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    with pytest.raises(OSError, match="image file is damaged .broken PNG file"):
        decode_image(half)
    found = np.asarray(decode_image(folder / "000.png"))
    np.testing.assert_array_equal(found, np.asarray(Image.open(folder / "000.png")))
    run = embedx.extract(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval(),
        folder,
        layers="1",
        preprocess=models.Preprocess(resize_px=8, crop_px=8),
        out=tmp_path / "out",
    )
    assert run.status.tolist() == [1, 2, 1]


def read_by_threads(paths: list[Path], *, n: int, before: Callable[[], None]) -> list[bool]:
    """Whether each picture could be read, by so many threads at once."""
    found: dict[Path, bool] = {}

    def read(mine: list[Path]) -> None:
        for path in mine:
            before()
            try:
                decode_image(path)
                found[path] = True
            except OSError:
                found[path] = False

    threads = [threading.Thread(target=read, args=(paths[i::n],)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[path] for path in paths]


def test_threads_put_back_the_settings_of_pillow_and_of_warnings(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    paths = [tmp_path / f"{i}.jpg" for i in range(80)]
    for i, path in enumerate(paths):
        whole = buffer.getvalue()
        path.write_bytes(whole[: len(whole) // 2] if i % 2 else whole)
    filters = list(warnings.filters)
    assert read_by_threads(paths, n=4, before=lambda: None) == [i % 2 == 0 for i in range(80)]
    assert warnings.filters == filters
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False

    def a_library_sets_it() -> None:
        ImageFile.LOAD_TRUNCATED_IMAGES = True

    try:
        with whole_pictures():
            ImageFile.LOAD_TRUNCATED_IMAGES = True
            read = read_by_threads(paths, n=4, before=lambda: None)
        assert read == [i % 2 == 0 for i in range(80)]
        assert ImageFile.LOAD_TRUNCATED_IMAGES is True  # as whoever set it meanwhile would have it
        decode_image(paths[0])
        assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    assert warnings.filters == filters


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16"])
def test_pictures_of_a_source_come_upright_and_rgb_whatever_their_mode(
    mode: str, tmp_path: Path
) -> None:
    picture = Image.new(mode, (8, 8), 1)
    picture.save(tmp_path / "a.png")
    source = Source(name="s", ids=["a", "b"], read=lambda _: picture, fingerprint="1")
    run = embedx.extract(
        nn.Sequential(nn.Flatten()).eval(),
        source,
        layers="0",
        preprocess=models.Preprocess(resize_px=8, crop_px=8, mean=(0, 0, 0), std=(1, 1, 1)),
        out=tmp_path / "out",
    )
    wanted = np.asarray(decode_image(tmp_path / "a.png")).transpose(2, 0, 1).ravel() / 255
    np.testing.assert_allclose(run.embeddings["0"], [wanted, wanted], atol=1e-6)


def test_the_mean_that_pixels_lose_does_not_hang_on_the_default_type(tmp_path: Path) -> None:
    prepared = models.Preprocess(resize_px=8, crop_px=8)
    pixels = torch.arange(192, dtype=torch.uint8).view(1, 3, 8, 8)
    wanted = prepared.normalize(pixels)
    model = linear(4, 3)
    embedx.extract(model, noise(6, 4), layers="0", out=tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(prepared.normalize(pixels), wanted)
        with pytest.raises(StoreError, match="default_dtype is torch.float32 there and"):
            embedx.extract(model, noise(6, 4), layers="0", out=tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)


# --------------------------------------------------------------------------- masks and poolings


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.decoder = nn.Embedding(20, 6), nn.Linear(6, 7)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        decoder_input_ids: Tensor,
        decoder_attention_mask: Tensor,
    ) -> Tensor:
        entered = self.embed(input_ids) * attention_mask[..., None]
        inner = self.embed(decoder_input_ids) + entered.mean(1, keepdim=True)
        return self.decoder(inner)  # type: ignore[no-any-return]


def test_the_mask_of_an_encoder_does_not_count_for_tokens_of_a_decoder(tmp_path: Path) -> None:
    model = Seq2Seq().eval()
    lengths = {"attention_mask": [5, 4, 5, 3], "decoder_attention_mask": [2, 1, 3, 4]}
    masks = {
        name: (torch.arange(5) < torch.tensor(n)[:, None]).long() for name, n in lengths.items()
    }
    tokens = {
        name: torch.randint(1, 20, (4, 5), generator=torch.Generator().manual_seed(i))
        for i, name in enumerate(["input_ids", "decoder_input_ids"])
    }

    def samples(masks: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        return [{name: rows[i] for name, rows in {**tokens, **masks}.items()} for i in range(4)]

    for how in ("auto", "mean_token"):
        with pytest.raises(ShapeError, match="attention_mask and decoder_attention_mask"):
            embedx.extract(
                model, samples(masks), layers="decoder", pooling=how, out=tmp_path / "refused"
            )
    with torch.no_grad():
        inner = model(**tokens, **masks)
    run = embedx.extract(
        model, samples(masks), layers="decoder", pooling="cls", out=tmp_path / "cls"
    )
    np.testing.assert_allclose(run.embeddings["decoder"], inner[:, 0], atol=1e-6)
    masks["decoder_attention_mask"] = masks["attention_mask"]
    run = embedx.extract(model, samples(masks), layers="decoder", out=tmp_path / "one")
    with torch.no_grad():
        inner = model(**tokens, **masks)
    kept = masks["attention_mask"][..., None]
    wanted = (inner * kept).sum(1) / kept.sum(1)
    np.testing.assert_allclose(run.embeddings["decoder"], wanted, atol=1e-6)


def test_parameters_of_our_poolings_count_by_their_value(tmp_path: Path) -> None:
    kinds: list[Callable[[float], Any]] = [torch.tensor, np.float32, np.float64]
    for kind in kinds:
        one, other = (
            pooling.per_point(functools.partial(pooling.gem, p=kind(p)), n_points=1)[0]
            for p in (3.0, 6.0)
        )
        assert one.code
        assert one.code != other.code
    plain = functools.partial(pooling.gem, p=4.0)
    assert pooling.per_point(plain, n_points=1)[0].code == ""
    x = noise(4, 5, 3)
    first, rest = torch.zeros(4, 5, dtype=torch.bool), torch.ones(4, 5, dtype=torch.bool)
    first[:, 0], rest[:, 0] = True, False
    model = linear(3, 2)
    for mask in (first, rest):
        how = functools.partial(pooling.mean_token, mask=mask)
        run = embedx.extract(model, x, layers="0", pooling=how, out=tmp_path / str(mask[0, 0]))
        with torch.no_grad():
            wanted = (model(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        np.testing.assert_allclose(run.embeddings["0"], wanted, atol=1e-6)
    how = functools.partial(pooling.mean_token, mask=rest)
    with pytest.raises(StoreError, match="the code of the pooling, or what it holds"):
        embedx.extract(model, x, layers="0", pooling=how, out=tmp_path / "tensor(True)")


def test_a_mask_that_a_pooling_has_of_its_own_is_not_replaced() -> None:
    own = pooling.per_point(functools.partial(pooling.mean_token, mask=noise(2, 3)), n_points=1)[0]
    plain = pooling.per_point("mean_token", n_points=1)[0]
    assert (own.takes_mask, plain.takes_mask) == (False, True)


def test_which_axis_of_a_square_is_that_of_the_tokens_is_asked() -> None:
    with pytest.raises(ShapeError, match=r"which axis of \(5, 6, 6\) is that of the tokens"):
        pooling.choose(torch.zeros(5, 6, 6), is_masked=True)
    assert pooling.choose(torch.zeros(5, 6, 7), is_masked=True) == "mean_token"
    assert pooling.choose(torch.zeros(5, 6, 6), is_masked=True, tokens="cls") == "cls"


def test_rows_too_small_for_float32_have_length_one_all_the_same(tmp_path: Path) -> None:
    x = noise(6, 4).double() * 1e-50
    run = embedx.extract(
        nn.Sequential(nn.Identity()).eval(), x, layers="0", normalize=True, out=tmp_path
    )
    wanted = x / torch.linalg.vector_norm(x * 1e50, dim=1, keepdim=True) * 1e50
    np.testing.assert_allclose(run.embeddings["0"], wanted, atol=1e-6)


# --------------------------------------------------------------------------- the identity


def custom_op(factor: int) -> Any:
    @torch.library.custom_op(f"embedx_tests{factor}::act", mutates_args=())
    def act(x: Tensor) -> Tensor:
        return x * factor

    return act


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b * b).sum()


def generator_of(seed: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed)]


class Refuses:
    """An object that cannot be pickled."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("no")


def test_values_that_differ_in_what_they_compute_are_told_apart() -> None:
    act = [custom_op(2), custom_op(3)]
    pairs: dict[str, tuple[Any, Any]] = {
        "custom_op": (act[0], act[1]),
        "operators of one name": (torch.ops.embedx_tests2.act, torch.ops.embedx_tests3.act),
        "overloads": (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar),
        "vmap": (torch.vmap(torch.cumsum, in_dims=0), torch.vmap(torch.cumsum, in_dims=1)),
        "grad": (torch.func.grad(product, argnums=0), torch.func.grad(product, argnums=1)),
        "generators": (generator_of(1), generator_of(2)),
        "unpicklable": (Refuses(1.0), Refuses(2.0)),
    }
    for name, (one, other) in pairs.items():
        assert value_sha256(one) == value_sha256(one), name
        assert value_sha256(one) != value_sha256(other), name
    assert value_sha256(generator_of(1)) == value_sha256(generator_of(1))
    assert value_sha256(Refuses(1.0)) == value_sha256(Refuses(1.0))


def test_the_random_state_that_all_code_shares_is_nobodys_own() -> None:
    shared = [torch.default_generator, random.random, np.random.rand]
    before = value_sha256(shared)
    torch.rand(1)
    random.random()
    np.random.rand()  # noqa: NPY002
    assert value_sha256(shared) == before


settings = types.ModuleType("embedx_tests_settings")


class ReadsByVars(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * vars(settings)["scale"]  # type: ignore[no-any-return]


def test_what_code_reads_by_vars_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    found = []
    for scale in (2.0, 3.0, 2.0):
        monkeypatch.setattr(settings, "scale", scale, raising=False)
        found.append(code_sha256(ReadsByVars()))
    assert found[0] == found[2] != found[1]


def test_to_which_weight_another_is_tied_is_part_of_the_state() -> None:
    def network(tied_to: int | None) -> nn.Module:
        model: Any = linear(4, 4, 4, 4)
        with torch.no_grad():
            model[1].weight.copy_(model[0].weight)
            model[2].weight.copy_(model[0].weight)
        if tied_to is not None:
            model[2].weight = model[tied_to].weight
        return model  # type: ignore[no-any-return]

    hashes = {state_sha256(network(tied_to)) for tied_to in (None, 0, 1)}
    assert len(hashes) == 3
    assert state_sha256(network(0)) == state_sha256(network(0))


class RandomFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(4, 6), persistent=False)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((x @ self.w).cos())  # type: ignore[no-any-return]


def test_buffers_that_no_checkpoint_holds_are_part_of_a_run(tmp_path: Path) -> None:
    torch.save(RandomFeatures().state_dict(), tmp_path / "w.pt")
    made = [
        models.own(RandomFeatures, checkpoint=str(tmp_path / "w.pt"), seed=seed)
        for seed in (0, 1, 0)
    ]
    assert made[0].weights_sha256 == made[1].weights_sha256
    assert made[0].code == made[2].code != made[1].code


class StaysInItsMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout()

    def train(self, mode: bool = True) -> "StaysInItsMode":
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)  # type: ignore[no-any-return]


def test_the_mode_of_a_network_that_eval_does_not_reach_is_part_of_it() -> None:
    model = StaysInItsMode()
    drawing = code_sha256(model)
    model.drop.training = False
    assert code_sha256(model) != drawing
    plain = linear(4, 3)
    assert code_sha256(copy.deepcopy(plain).train()) == code_sha256(plain.eval())


def test_numbers_and_texts_of_one_spelling_are_two_columns(tmp_path: Path) -> None:
    def source(column: Any) -> Source:
        return Source(
            name="s",
            ids=list("abc"),
            read=noise(3, 4).__getitem__,
            fingerprint="1",
            metadata={"c": column},
        )

    embedx.extract(linear(4, 3), source([1, 2, 3]), layers="0", out=tmp_path)
    with pytest.raises(StoreError, match="the ids or labels are others"):
        embedx.extract(linear(4, 3), source(["1", "2", "3"]), layers="0", out=tmp_path)
    again = embedx.extract(linear(4, 3), source(np.array([1, 2, 3])), layers="0", out=tmp_path)
    assert again.metadata["c"].tolist() == [1, 2, 3]


# --------------------------------------------------------------------------- what is stored


class Gives(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.fc, self.output = nn.Linear(4, 3), output

    def forward(self, x: Tensor) -> Tensor:
        self.fc(x)
        return self.output.expand(len(x), -1)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (torch.complex(torch.ones(3), torch.ones(3)), "gives complex numbers"),
        (torch.arange(3) + 2**30, "gives whole numbers above"),
    ],
)
def test_outputs_that_float32_does_not_hold_are_refused(
    output: Tensor, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ShapeError, match=why):
        embedx.extract(Gives(output), noise(4, 4), layers="fc", save_outputs=True, out=tmp_path)


def test_values_that_a_mask_hides_are_refused(tmp_path: Path) -> None:
    masked = np.ma.array([1, 9, 2, 2], mask=[0, 1, 0, 0], dtype=np.int32)
    model = linear(4, 3)
    with pytest.raises(DataError, match="a masked array"):
        Source(name="s", ids=list("abcd"), read=str, fingerprint="", metadata={"age": masked})
    with pytest.raises(DataError, match="a masked array"):
        Source(
            name="s",
            ids=list("abcd"),
            read=str,
            fingerprint="",
            labels=masked,
            label_names=list("0123456789"),
        )
    kinds: list[dict[str, Any]] = [{"ids": masked}, {"labels": masked}, {"loss": masked}]
    for given in kinds:
        with embedx.record(model, "0", tmp_path / next(iter(given))) as recorder:
            model(noise(4, 4))
            with pytest.raises(DataError, match="a masked array"):
                recorder.batch(**given)
            model(noise(4, 4))
            recorder.batch()
        assert embedx.open(recorder.path).n_rows == 4


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"ids": np.array([b"a", b"b", b"c", b"d"])}, "ids holds bytes"),
        ({"loss": np.ones(4, np.longdouble)}, "at most 64 bits"),
    ],
)
def test_values_that_a_recording_would_change_are_refused(
    given: dict[str, Any], why: str, tmp_path: Path
) -> None:
    model = linear(4, 3)
    recorder = embedx.record(model, "0", tmp_path)
    model(noise(4, 4))
    with pytest.raises(DataError, match=why):
        recorder.batch(**given)
    recorder.close()


def test_an_empty_batch_may_have_an_empty_list_of_labels(tmp_path: Path) -> None:
    model = linear(4, 3)
    with embedx.record(model, "0", tmp_path) as recorder:
        model(noise(0, 4))
        recorder.batch(labels=[])
        model(noise(2, 4))
        recorder.batch(labels=[1, 0])
    assert embedx.open(tmp_path).label_texts() == ["1", "0"]


def test_labels_that_are_written_alike_are_refused() -> None:
    with pytest.raises(DataError, match="two labels are both written '0.1'"):
        data.in_memory(noise(3, 4), labels=[np.float32(0.1), 0.1, 1.0])


class TakesAny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()

    def forward(self, **given: Tensor) -> Tensor:
        return self.out(next(iter(given.values())))  # type: ignore[no-any-return]


def test_names_of_an_item_that_are_one_as_texts_fail_its_row(tmp_path: Path) -> None:
    items: list[Any] = [{"1": torch.ones(2)}, {1: torch.ones(2), "1": torch.zeros(2)}]
    run = embedx.extract(TakesAny(), items, layers="out", out=tmp_path)
    assert run.status.tolist() == [1, 2]
    assert "two of its names are one as texts" in (tmp_path / "errors.jsonl").read_text()


def test_an_item_that_holds_nothing_fails_its_row(tmp_path: Path) -> None:
    items: list[Any] = [{"1": torch.ones(2)}, {}]
    run = embedx.extract(TakesAny(), items, layers="out", out=tmp_path)
    assert run.status.tolist() == [1, 2]
    assert "what enters is a mapping that holds nothing" in (tmp_path / "errors.jsonl").read_text()
    loader = DataLoader(items, collate_fn=lambda _: {})
    with pytest.raises(DataError, match="^what enters is a mapping that holds nothing"):
        embedx.extract(TakesAny(), loader, layers="out", out=tmp_path / "collated")


# --------------------------------------------------------------------------- points


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


class ByKeywords(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(scale=torch.ones_like(x), x=x)  # type: ignore[no-any-return]


def test_the_first_argument_is_the_first_of_the_layer_however_it_is_called(tmp_path: Path) -> None:
    run = embedx.extract(
        ByKeywords(Scaled()), noise(5, 4), layers="block:input", out=tmp_path / "a"
    )
    np.testing.assert_array_equal(run.embeddings["block:input"], noise(5, 4))
    with pytest.raises(LayerError, match=r"choose from: block:input.scale, block:input.x"):
        embedx.extract(
            ByKeywords(TakesAny()), noise(5, 4), layers="block:input", out=tmp_path / "b"
        )


class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.ModuleDict({"a": nn.Linear(4, 3), "a@0": nn.Linear(4, 3)})

    def forward(self, x: Tensor) -> Tensor:
        return self.t["a"](x) + self.t["a@0"](x)  # type: ignore[no-any-return]


def test_a_layer_whose_name_reads_as_a_call_of_another_is_asked_for_by_a_glob(
    tmp_path: Path,
) -> None:
    model = OddNames().eval()
    for text in ("t.a@0", "t.a@0:input"):
        with pytest.raises(LayerError, match=r"may be the layer 't.a@0' or a part of 't.a'"):
            resolve_points(model, text)
    with pytest.raises(LayerError, match="is the name of a layer and a call of another"):
        resolve_points(model, ["t.a?0", "t.?@0"])
    run = embedx.extract(model, noise(5, 4), layers="t.a?0", out=tmp_path)
    with torch.no_grad():
        np.testing.assert_allclose(run.embeddings["t.a@0"], model.t["a@0"](noise(5, 4)), atol=1e-6)


def test_a_reduction_that_works_in_place_or_in_one_buffer_changes_nothing_else() -> None:
    model: Any = linear(4, 6, 6)
    x = noise(5, 4)
    with torch.no_grad():
        wanted = model(x)
        with embedx.capture(model, "0", reduce=lambda _, t: t.clamp_(0)) as got:
            assert torch.equal(model(x), wanted)
            assert torch.equal(got["0"], model[0](x).clamp(0))
        buffer = torch.empty(5)
        with embedx.capture(
            model, ["0", "1"], reduce=lambda _, t: torch.mean(t, 1, out=buffer)
        ) as got:
            model(x)
            assert torch.equal(got["0"], model[0](x).mean(1))
            assert torch.equal(got["1"], wanted.mean(1))


# --------------------------------------------------------------------------- files and locks


@pytest.mark.parametrize("name", ["config.yaml", "errors.jsonl"])
def test_files_of_the_users_own_in_the_folder_are_not_replaced(name: str, tmp_path: Path) -> None:
    mine = '{"grid: 3": 1}\n'
    (tmp_path / name).write_text(mine)
    model = linear(4, 3)
    for overwrite in (False, True):
        with pytest.raises(StoreError, match=f"{name} is there and was not written by embedx"):
            embedx.extract(model, noise(4, 4), layers="0", out=tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == mine
    (tmp_path / name).unlink()
    embedx.extract(model, Samples(22), layers="0", out=tmp_path)
    assert (tmp_path / name).stat().st_size
    run = embedx.extract(model, Samples(), layers="0", out=tmp_path, overwrite=True)
    assert run.status.tolist() == [1] * 64


def test_a_recording_leaves_a_config_of_the_users_own_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    model = linear(4, 3)
    with embedx.record(model, "0", tmp_path) as recorder:
        model(noise(4, 4))
        recorder.batch()
    assert (tmp_path / "config.yaml").read_text() == "lr: 1\n"
    (tmp_path / "errors.jsonl").write_text("mine\n")
    with pytest.raises(StoreError, match="errors.jsonl is there and was not written by embedx"):
        embedx.record(model, "0", tmp_path, overwrite=True)


def other_process_takes(target: Path) -> bool:
    code = (
        "import sys, pathlib; from embedx.disk import writing_lock\n"
        "from embedx.errors import InUseError\n"
        "try:\n"
        "    with writing_lock(pathlib.Path(sys.argv[1])): sys.exit(7)\n"
        "except InUseError: sys.exit(3)\n"
    )
    found = subprocess.run([sys.executable, "-c", code, str(target)], check=False).returncode
    assert found in (3, 7)
    return found == 7


@pytest.mark.skipif(sys.platform != "linux", reason="locks of open files are Linux's")
def test_a_copy_of_the_folder_does_not_end_its_lock(tmp_path: Path) -> None:
    target = tmp_path / "out" / "embeddings.h5"
    with writing_lock(target):
        shutil.copytree(target.parent, tmp_path / "backup")
        assert not other_process_takes(target)
        with pytest.raises(InUseError, match="this process"), writing_lock(target):
            pass
    assert other_process_takes(target)


@pytest.mark.skipif(sys.platform != "linux", reason="locks of open files are Linux's")
def test_a_process_that_was_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    target = tmp_path / "embeddings.h5"
    asks, told = os.pipe()
    with writing_lock(target):
        child = os.fork()
        if not child:  # lives on, and holds nothing
            os.close(told)
            os.read(asks, 1)
            os._exit(0)
        os.close(asks)
        assert not other_process_takes(target)
    try:
        assert other_process_takes(target)
    finally:
        os.close(told)
        os.waitpid(child, 0)


def test_a_model_that_is_put_into_train_mode_later_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = linear(4, 3)
    with embedx.record(model, "0", tmp_path) as recorder:
        model(noise(2, 4))
        recorder.batch()
        assert "train mode" not in caplog.text
        model.train()
        for _ in range(2):
            model(noise(2, 4))
            recorder.batch()
    assert caplog.text.count("is in train mode: what is recorded has its dropout") == 1


def test_failed_rows_of_a_file_that_is_complete_are_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedx.extract(linear(4, 3), Samples(22), layers="0", out=tmp_path)
    caplog.clear()
    caplog.set_level(logging.INFO)
    run = embedx.extract(linear(4, 3), Samples(), layers="0", on_error="raise", out=tmp_path)
    assert run.status[22] == 2
    said = caplog.messages[
        caplog.messages.index(next(m for m in caplog.messages if "to do" in m)) :
    ]
    assert said[1:] == [
        "failed row 22, 22: OSError: away",
        f"all 1 failed rows: {tmp_path / 'errors.jsonl'}; overwrite=true tries them again",
    ]


# --------------------------------------------------------------------------- in one line


@pytest.mark.parametrize("row", [22, 0])
def test_an_item_that_ends_the_program_fails_its_row(row: int, tmp_path: Path) -> None:
    samples = Samples(row, error=SystemExit(0))
    run = embedx.extract(linear(4, 3), samples, layers="0", out=tmp_path)
    assert run.status.tolist() == [1 + (i == row) for i in range(64)]


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return iter([noise(64, 4)])


def test_a_loader_with_an_iterator_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a OwnIterator that makes its batches in an iterator"):
        embedx.extract(linear(4, 3), OwnIterator(Samples()), layers="0", out=tmp_path)


def _in_a_pool(out: str, told: Any) -> None:
    try:
        embedx.extract(linear(4, 3), Samples(), layers="0", num_workers=2, out=out)
    except DataError as error:
        told.send(str(error))


def test_workers_that_a_process_of_a_pool_may_not_start_are_refused(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    hears, tells = context.Pipe(duplex=False)
    child = context.Process(target=_in_a_pool, args=(str(tmp_path), tells), daemon=True)
    child.start()
    assert hears.poll(60)
    assert "this process is daemonic" in hears.recv()
    child.join(60)


def test_an_item_that_cannot_be_copied_does_not_hold_the_place_of_a_bad_one(tmp_path: Path) -> None:
    class Holds(Pairs):
        def __getitem__(self, i: int) -> Any:
            x, added = super().__getitem__(i)
            return x, (added.requires_grad_() * 1)

    loader = DataLoader(Holds(1), batch_size=4, collate_fn=lambda b: torch.stack([x for x, _ in b]))
    with pytest.raises((DataError, ConfigError), match="cannot be copied"):
        embedx.extract(nn.Sequential(nn.Identity()), loader, layers="0", out=tmp_path)


# --------------------------------------------------------------------------- shards


@dataclasses.dataclass(frozen=True)
class Halves:
    """Two shards of 32 samples; one sample cannot be read."""

    bad: int | None = None

    def read(self, i: int) -> Tensor:
        return Samples(self.bad)[i]

    @contextlib.contextmanager
    def shard(self, number: int, *, scratch: Path, most: int | None) -> Iterator[Source]:
        rows = range(32 * number, 32 * (number + 1))
        yield Source(
            name="halves",
            ids=[str(row) for row in rows],
            read=lambda i: self.read(rows[i]),
            fingerprint=f"{number}",
        )


def shards(bad: int | None = None) -> sources.Shards:
    return sources.Shards(name="halves", names=["a", "b"], fingerprint="1", read=Halves(bad).shard)


@pytest.mark.parametrize("bad", [40, 34])
def test_parts_of_a_run_are_of_one_network_too(bad: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"layers": "out", "batch_size": 4}
    for how in ("an attribute", "a cache"):
        with pytest.raises(DataError, match=f"{bad}: OSError: away"):
            embedx.extract(
                MakesItself(how), shards(bad), on_error="raise", out=tmp_path / how, **given
            )
    with pytest.raises(StoreError, match="made itself something else in its first pass"):
        embedx.extract(
            MakesItself("an attribute"), shards(), out=tmp_path / "an attribute", **given
        )
    run = embedx.extract(MakesItself("a cache"), shards(), out=tmp_path / "a cache", **given)
    embedx.extract(MakesItself("a cache"), shards(), out=tmp_path / "whole", **given)
    assert run.n_rows == 64
    assert len(run.attrs["made_by_first_pass"]) == 64
    whole = (tmp_path / "whole" / "embeddings.h5").read_bytes()
    assert (tmp_path / "a cache" / "embeddings.h5").read_bytes() == whole


# --------------------------------------------------------------------------- a later hour


class Gaps(Dataset[Any]):
    """Samples of which some cannot be read, and come as ``gap`` in their place."""

    def __init__(self, *bad: int, gap: Callable[[Tensor], Any]) -> None:
        self.x, self.bad, self.gap = noise(48, 6), bad, gap

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        return self.gap(self.x[i]) if i in self.bad else self.x[i]


def filled_up(batch: list[Any]) -> Tensor:
    """Leaves out what is None or NaN, and keeps the size of the batch: an idiom of many loaders."""
    good = [one for one in batch if one is not None and len(one) == 6 and not one.isnan().any()]
    return torch.stack([*good, *[good[-1]] * (len(batch) - len(good))])


@pytest.mark.parametrize("bad", [(10,), (0,), (0, 3, 16), (47,)])
def test_a_none_in_place_of_an_item_fails_its_row_alone(
    bad: tuple[int, ...], tmp_path: Path
) -> None:
    data, model = Gaps(*bad, gap=lambda _: None), linear(6, 5, 3)
    loader = DataLoader(data, batch_size=8, collate_fn=filled_up)
    run = embedx.extract(model, loader, layers="0", out=tmp_path)
    good = [i for i in range(48) if i not in bad]
    assert np.flatnonzero(run.status == layout.Status.FAILED).tolist() == list(bad)
    with torch.no_grad():
        wanted = model[0](data.x).numpy()  # type: ignore[index, operator]
    np.testing.assert_allclose(run.embeddings["0"][good], wanted[good], rtol=1e-5, atol=1e-6)
    reasons = {one["reason"] for one in unfinished.read_reasons(run.path)}
    assert reasons == {"DataError: the Dataset gives None in its place"}


@pytest.mark.parametrize(
    "gap", [(None, 3), [None, 3], {"x": None}, torch.ones(0), (np.ones((0, 6)), 3)], ids=str
)
def test_an_item_that_begins_with_none_is_none(gap: Any, tmp_path: Path) -> None:
    run = embedx.extract(linear(6, 5), Gaps(7, gap=lambda _: gap), layers="0", out=tmp_path)
    assert np.flatnonzero(run.status == layout.Status.FAILED).tolist() == [7]


@pytest.mark.parametrize("gap", [lambda x: x * torch.nan, lambda x: x[:1], lambda x: x[:3]])
def test_a_sample_in_the_place_of_another_is_refused(
    gap: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    data = Gaps(10, gap=gap)  # none of those that are looked at before
    loader = DataLoader(data, batch_size=8, collate_fn=filled_up)
    with pytest.raises(ConfigError, match=r"gives row 11 in the place of row 10"):
        embedx.extract(linear(6, 5, 3), loader, layers="0", out=tmp_path)


class Sizes(Dataset[Tensor]):
    """Pictures of several sizes; the fourth is as wide as the layer has channels."""

    SIZES = ((20, 12), (30, 14), (16, 10), (8, 8), (22, 40), (9, 31))

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        return noise(3, *self.SIZES[i], seed=i)


class OfAnySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize("n_parts", [None, 2])
def test_auto_pooling_is_not_chosen_anew_by_a_run_that_goes_on(
    n_parts: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"layers": "conv", "batch_size": 1, "n_parts": n_parts}
    whole = embedx.extract(OfAnySize().eval(), Sizes(), out=tmp_path / "whole", **given)
    with cut_after(3, monkeypatch), pytest.raises(KeyboardInterrupt):
        embedx.extract(OfAnySize().eval(), Sizes(), out=tmp_path / "cut", **given)
    again = embedx.extract(OfAnySize().eval(), Sizes(), out=tmp_path / "cut", **given)
    assert again.path.read_bytes() == whole.path.read_bytes()
    assert (whole.status == layout.Status.OK).all()


def test_parts_that_were_pooled_in_two_ways_are_told_apart(tmp_path: Path) -> None:
    given: dict[str, Any] = {"layers": "conv", "batch_size": 1, "n_parts": 2, "out": tmp_path}

    class Widths(Sizes):  # of tokens and channels, told by the first sample
        SIZES = ((20, 12), (30, 14), (16, 10), (20, 12), (30, 14), (16, 10))

    embedx.extract(OfAnySize().eval(), Widths(), part=0, **given)
    with monkeypatched_choice("max"):
        embedx.extract(OfAnySize().eval(), Widths(), part=1, **given)
    with pytest.raises(ShapeError, match="pooled by max in part 1 of 2 and by gap in part 0 of 2"):
        embedx.extract(OfAnySize().eval(), Widths(), **given)


@contextlib.contextmanager
def monkeypatched_choice(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "choose", lambda *_, **__: name)
        yield


class ChangesItself(nn.Module):
    """A network whose pass leaves something behind."""

    def __init__(self, how: Callable[["ChangesItself", Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 5)
        self.held = nn.Parameter(torch.arange(8.0).reshape(2, 4))
        self.long = nn.Parameter(torch.arange(400.0).reshape(2, 200))
        self.register_buffer("bank", torch.zeros(2, 5))
        self.register_buffer("centre", None)
        self._how = how

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        self._how(self, y)
        return y


def grow(net: Any, y: Tensor) -> None:
    net.bank.data = torch.cat([net.bank.data, y])


def narrow(net: Any, y: Tensor) -> None:
    net.bank.data = net.bank.data.double()


def broadcast(net: Any, y: Tensor) -> None:
    net.bank.data = torch.zeros(1, 5)


def fill(net: Any, y: Tensor) -> None:
    net.centre = y.mean(0)


def freeze(net: Any, y: Tensor) -> None:
    net.fc.weight.requires_grad_(False)


def leave_a_gradient(net: Any, y: Tensor) -> None:
    net.fc.weight.grad = torch.ones(5, 6)


@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (grow, "changed its buffers while it ran: bank; they are put back"),
        (narrow, "changed its buffers while it ran: bank; they are put back"),
        (broadcast, "changed its buffers while it ran: bank; they are put back"),
        (fill, "changed its buffers while it ran: centre; they are put back"),
        (freeze, "whether: fc.weight; that is put back"),
        (leave_a_gradient, "whether: fc.weight; that is put back"),
    ],
)
def test_what_a_pass_leaves_behind_is_put_back_and_said(
    how: Any, said: str, batch_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ChangesItself(how).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    embedx.extract(model, noise(16, 6), layers="fc", batch_size=batch_size, out=tmp_path)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value)
    assert all(one.requires_grad and one.grad is None for one in model.parameters())
    assert model.centre is None
    assert said in caplog.text


@pytest.mark.parametrize("name", ["held", "long"])
def test_a_parameter_whose_numbers_change_places_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def roll(net: Any, y: Tensor) -> None:
        getattr(net, name).data = getattr(net, name).data.roll(1, dims=1)

    embedx.extract(ChangesItself(roll).eval(), noise(16, 6), layers="fc", out=tmp_path)
    assert f"changed its parameters, by eval(), train() or its passes: {name};" in caplog.text


def test_what_the_only_pass_has_made_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedx.extract(MakesItself("a layer").eval(), noise(8, 4), layers="out", out=tmp_path)
    assert "has made something in its pass that stays" in caplog.text


def test_networks_of_transformers_that_draw_or_keep_are_not_known() -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    masked = transformers.ViTMAEModel(transformers.ViTMAEConfig(**small, image_size=32))
    assert not fold.is_known(masked)
    kept = transformers.LlamaModel(transformers.LlamaConfig(**small, vocab_size=50))
    assert not fold.is_known(kept)
    plain = transformers.BertModel(transformers.BertConfig(**small, vocab_size=50))
    assert fold.is_known(plain)


def of_the_batch(x: Tensor) -> Tensor:
    return x - x.mean()


class Applies:
    def __call__(self, x: Tensor) -> Tensor:
        return of_the_batch(x)


@pytest.mark.parametrize(
    "function",
    [
        of_the_batch,
        lambda x: x - x.mean(),
        functools.partial(torch.utils.checkpoint.checkpoint, of_the_batch),
        torch.no_grad()(of_the_batch),
        Applies(),
        Applies().__call__,
        functools.lru_cache(of_the_batch),
    ],
)
def test_a_network_of_a_library_that_holds_a_function_of_ones_own_is_not_known(
    function: Any,
) -> None:
    from torchvision.transforms import v2

    held = nn.Sequential(v2.Lambda(function), nn.Flatten()).eval()
    assert not fold.is_known(held)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=function)
    assert not fold.is_known(encoder.eval())
    of_torch = nn.Sequential(v2.Lambda(torch.relu)).eval()
    assert fold.is_known(of_torch)
    assert not fold.is_by_sample(of_torch)  # as torch.cumsum may be there


class Rounded(Tensor):
    """A weight that is rounded where it is used."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d:
            args = [
                one.as_subclass(Tensor).round() if isinstance(one, Rounded) else one for one in args
            ]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_that_does_other_things_than_a_tensor_is_not_folded(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).eval()
    net[0].weight = nn.Parameter((net[0].weight * 5).data.as_subclass(Rounded), requires_grad=False)
    assert not fold.is_known(net)
    x = torch.randn(4, 3, 5, 5)
    rows = embedx.extract(net, x, layers="2", out=tmp_path).embeddings["2"][:]
    with torch.no_grad():
        np.testing.assert_array_equal(rows, np.asarray(net(x).as_subclass(Tensor)))


def test_a_network_that_draws_where_none_is_expected_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return self.fc(x) + torch.rand(3)

    monkeypatch.setattr(fold, "is_by_sample", lambda _: True)
    with pytest.raises(ModelError, match="draws random numbers in its passes, in eval mode too"):
        embedx.extract(Draws().eval(), noise(8, 4), layers="fc", out=tmp_path)


def test_gradients_within_a_block_of_autocast_are_those_of_full_precision(tmp_path: Path) -> None:
    given: dict[str, Any] = {"layers": ["0", "0:grad", "1:grad"], "objective": 1}
    plain = embedx.extract(linear(6, 32, 8, 3), noise(16, 6), out=tmp_path / "plain", **given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = embedx.extract(linear(6, 32, 8, 3), noise(16, 6), out=tmp_path / "half", **given)
        assert torch.is_autocast_enabled("cpu")
    assert found.path.read_bytes() == plain.path.read_bytes()


def test_a_default_device_without_values_is_refused(tmp_path: Path) -> None:
    model, data = linear(6, 5), noise(4, 6)
    with torch.device("meta"), pytest.raises(ConfigError, match="torch's default device is meta"):
        embedx.extract(model, data, out=tmp_path)


class BySeed(Dataset[Tensor]):
    """Items with noise from a generator of their own, seeded as torch's documentation has it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Tensor:
        drawn = np.random.default_rng((torch.initial_seed() + i) % 2**32).normal(size=6)
        return torch.full((6,), float(i)) + torch.from_numpy(drawn).float()


def test_items_that_hang_on_the_seed_of_torch_are_seeded_by_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"layers": "0", "batch_size": 8}
    torch.manual_seed(11)
    whole = embedx.extract(linear(6, 5), BySeed(), out=tmp_path / "whole", **given)
    assert "row i is drawn from seed i" in caplog.text
    with cut_after(16, monkeypatch), pytest.raises(KeyboardInterrupt):
        embedx.extract(linear(6, 5), BySeed(), out=tmp_path / "cut", **given)
    torch.manual_seed(12)
    again = embedx.extract(linear(6, 5), BySeed(), out=tmp_path / "cut", num_workers=2, **given)
    assert again.path.read_bytes() == whole.path.read_bytes()


class ByWorkerSeed(BySeed):
    """The same with the seed that torch gives each worker."""

    def __getitem__(self, i: int) -> Tensor:
        worker = torch.utils.data.get_worker_info()
        seed = 0 if worker is None else worker.seed
        drawn = np.random.default_rng((seed + i) % 2**32).normal(size=6)
        return torch.full((6,), float(i)) + torch.from_numpy(drawn).float()


def test_items_that_hang_on_the_seed_of_a_worker_are_seeded_by_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"layers": "0", "batch_size": 8, "num_workers": 2}
    torch.manual_seed(11)
    whole = embedx.extract(linear(6, 5), ByWorkerSeed(), out=tmp_path / "whole", **given)
    with cut_after(16, monkeypatch), pytest.raises(KeyboardInterrupt):
        embedx.extract(linear(6, 5), ByWorkerSeed(), out=tmp_path / "cut", **given)
    torch.manual_seed(12)
    again = embedx.extract(linear(6, 5), ByWorkerSeed(), out=tmp_path / "cut", **given)
    assert again.path.read_bytes() == whole.path.read_bytes()


def test_the_default_of_a_context_variable_is_what_it_holds() -> None:
    one, other = (contextvars.ContextVar("factor", default=value) for value in (1.0, 2.0))
    assert value_sha256(one) != value_sha256(other)
    assert value_sha256(contextvars.ContextVar("factor")) != value_sha256(one)


def test_what_has_no_eval_mode_is_refused_in_words(tmp_path: Path) -> None:
    exported = torch.export.export(linear(6, 5), (noise(4, 6),)).module()
    with pytest.raises(ModelError, match="has no eval mode"):
        embedx.extract(exported, noise(4, 6), layers="0", out=tmp_path)


def test_numbers_that_vanish_in_float16_are_no_error_of_numpy(tmp_path: Path) -> None:
    with np.errstate(all="raise"):
        run = embedx.extract(
            linear(6, 5), noise(4, 6) * 1e-9, layers="0:input", dtype="float16", out=tmp_path
        )
    assert not run.embeddings["0:input"][:].any()


@pytest.mark.parametrize("first", ["pictures", "tensors"])
@pytest.mark.parametrize("thumbnails", [0, 8])
def test_pictures_after_tensors_are_refused(
    first: str, thumbnails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mixed(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> Any:
            is_picture = (i < 4) == (first == "pictures")
            return Image.new("RGB", (8, 8), (i, i, i)) if is_picture else noise(3, 8, 8, seed=i)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    described = models.live(model, preprocess=models.Preprocess(8, 8))
    given: dict[str, Any] = {"layers": "0", "batch_size": 4, "thumbnails": thumbnails}
    refused = pytest.raises(ShapeError, match="the samples from 4 on are (pictures|tensors), and")
    with refused:
        embedx.extract(described, Mixed(), out=tmp_path / "a", **given)
    with cut_after(4, monkeypatch), pytest.raises(KeyboardInterrupt):
        embedx.extract(described, Mixed(), out=tmp_path / "b", **given)
    with refused:
        embedx.extract(described, Mixed(), out=tmp_path / "b", **given)
    for part in range(2):
        embedx.extract(described, Mixed(), out=tmp_path / "c", n_parts=2, part=part, **given)
    with pytest.raises(ShapeError, match="samples of part 0 of 2 are (pictures|tensors), and") as e:
        embedx.extract(described, Mixed(), out=tmp_path / "c", n_parts=2, **given)
    assert first in str(e.value)


def test_a_collate_fn_that_fills_up_by_label_is_refused(tmp_path: Path) -> None:
    class Labelled(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> Any:
            return noise(6, seed=i), -1 if i % 3 == 0 else i % 5

    def known(batch: list[Any]) -> Tensor:
        good = [x for x, label in batch if label >= 0]
        return torch.stack([*good, *[good[0]] * (len(batch) - len(good))]) / 64

    loader = DataLoader(Labelled(), batch_size=8, collate_fn=known)
    with pytest.raises(ConfigError, match="of its own, or leaves some out"):
        embedx.extract(linear(6, 5), loader, layers="0", out=tmp_path)


# --------------------------------------------------------------------------- a fifth hour


def translated(n: int = 6, t: int = 7) -> list[dict[str, Tensor]]:
    """Pairs of sequences of one length, of which the first is padded and has a mask."""
    rng = torch.Generator().manual_seed(0)
    items = []
    for i in range(n):
        mask = (torch.arange(t) < 3 + i % 3).long()
        ids, others = torch.randint(2, 50, (2, t), generator=rng)
        items.append({"input_ids": ids * mask, "attention_mask": mask, "decoder_input_ids": others})
    return items


def two_stacks() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4}
    config = transformers.T5Config(**small, num_layers=1, num_decoder_layers=1)
    return transformers.T5Model(config).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("pool", ["mean_token", "max_token", "auto"])
def test_a_mask_counts_for_the_tokens_that_it_is_of_alone(pool: str, tmp_path: Path) -> None:
    model, items = two_stacks(), translated()
    norm = "{}.final_layer_norm"
    with pytest.raises(ShapeError, match=r"decoder\.final.*for decoder_input_ids enters beside it"):
        embedx.extract(model, items, layers=norm.format("decoder"), pooling=pool, out=tmp_path)
    name = norm.format("encoder")
    run = embedx.extract(model, items, layers=name, pooling=pool, out=tmp_path, batch_size=4)
    for row, item in zip(run.embeddings[name], items, strict=True):
        kept = item["attention_mask"] == 1
        with torch.no_grad():
            alone = model.encoder(input_ids=item["input_ids"][kept][None])[0]  # type: ignore[operator]
        wanted = alone[0].amax(0) if pool == "max_token" else alone[0].mean(0)
        assert np.allclose(row, wanted, atol=1e-5)


def test_a_mask_of_texts_is_none_of_the_pictures_beside_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2}
    text = {**small, "vocab_size": 50, "max_position_embeddings": 10, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**small, "image_size": 12, "patch_size": 4}
    )
    model = transformers.CLIPModel(config).eval()
    items = [
        {**item, "pixel_values": noise(3, 12, 12, seed=i)}
        for i, item in enumerate(translated(t=10))
    ]
    for item in items:
        del item["decoder_input_ids"]
    layers = [f"{kind}_model.encoder.layers.0" for kind in ("text", "vision")]
    with pytest.raises(ShapeError, match=r"vision_model.*for pixel_values enters beside it"):
        embedx.extract(model, items, layers=layers[1], out=tmp_path)
    run = embedx.extract(model, items, layers=layers[0], pooling="mean_token", out=tmp_path)
    whole = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    with torch.no_grad(), embedx.capture(model, layers[0]) as got:
        model(**whole)
    mask = whole["attention_mask"][:, :, None]
    wanted = (got[layers[0]] * mask).sum(1) / mask.sum(1)
    assert np.allclose(run.embeddings[layers[0]], wanted, atol=1e-5)
    ablate = [{"at": layers[1], "units": [1], "by": "mean"}]
    with pytest.raises(ShapeError, match="pixel_values enters beside the mask"):
        embedx.extract(
            model, items, layers="visual_projection", ablate=ablate, out=tmp_path / "ablated"
        )


def test_in_a_loop_a_mask_that_may_be_of_other_tokens_is_refused(tmp_path: Path) -> None:
    model, items = two_stacks(), translated()
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    recorder = embedx.record(model, "decoder.final_layer_norm", out=tmp_path, pooling="mean_token")
    with torch.no_grad():
        with pytest.raises(ShapeError, match="decoder_input_ids enters beside it"):
            model(**batch)
        recorder.skip()
        shorter = {**batch, "decoder_input_ids": batch["decoder_input_ids"][:, :4]}
        with pytest.raises(ShapeError, match="the mask has shape"):
            model(**shorter)
    recorder.close()


class Prototypes(nn.Module):
    """What its layer gives has 16 entries, whatever enters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.key = nn.Linear(10, 6), nn.Linear(6, 6)
        self.prototypes = nn.Parameter(noise(16, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.enter(x) @ self.key(self.prototypes).T  # type: ignore[no-any-return]


@pytest.mark.parametrize("n", [15, 16])
def test_as_many_entries_as_samples_are_no_samples(n: int, tmp_path: Path) -> None:
    model, x = Prototypes().eval(), noise(32, 10)
    given: dict[str, Any] = {"batch_size": n, "out": tmp_path}
    with pytest.raises(ShapeError, match=r"16.*for (2|15) samples"):
        embedx.extract(model, x, layers="key", **given)
    ablate = [{"at": "key", "units": 1}]
    with pytest.raises(ShapeError, match=r"16.*for (2|15) samples"):
        embedx.extract(model, x, layers="enter", ablate=ablate, **given)
    assert embedx.extract(model, x, layers="enter", **given).n_rows == 32


def test_a_layer_that_runs_more_often_for_longer_texts_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.BertConfig(
        **small, vocab_size=50, num_hidden_layers=1, chunk_size_feed_forward=4
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    items = [{"input_ids": torch.arange(2, 6 if i < 4 else 10)} for i in range(8)]
    with pytest.raises(LayerError, match=r"rows 4 to 7: .*ran 2 times in one pass"):
        embedx.extract(
            model,
            items,
            layers="encoder.layer.0.intermediate",
            pooling="mean_token",
            batch_size=4,
            out=tmp_path,
        )


def test_a_mask_of_floats_that_are_zeros_alone_says_nothing(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(tokens)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    tokens = noise(4, 5, 3)
    for token, padding in ((1.0, 0.0), (1.0, 1.0), (0.0, -1e9)):
        mask = torch.tensor([token] * 3 + [padding] * 2)
        items = [{"tokens": one, "attention_mask": mask} for one in tokens]
        if padding == 0.0:
            zeros = [{**one, "attention_mask": torch.zeros(5)} for one in items]
            with pytest.raises(ShapeError, match="floats that are zeros alone"):
                embedx.extract(Masked(), zeros, layers="layer", pooling="mean_token", out=tmp_path)
        run = embedx.extract(
            Masked(), items, layers="layer", pooling="max_token", out=tmp_path / str(padding)
        )
        assert run.ok.all()


class OfBatch(nn.Module):
    """Gives what is of the batch, in one of three ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last, self.kind = nn.Linear(4, 6), nn.Identity(), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "one by one":
            return torch.stack([self.layer(row) for row in x])
        rows = self.layer(x)
        if self.kind == "classes first":
            return rows.T  # type: ignore[no-any-return]
        return self.last(rows @ rows.T)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("one beside another", {"layers": "last"}, r"last gives \(2, 2\).*and \(6, 6\) for 6"),
        ("one beside another", {"layers": "layer:grad"}, r"output of ofbatch gives \(2, 2\)"),
        ("classes first", {"layers": "layer", "save_outputs": True}, r"output .* gives \(6, 2\)"),
        ("one by one", {"layers": "layer@0", "pooling": "flatten"}, r"layer@0 gives \(6, 1\)"),
    ],
)
def test_what_is_as_long_as_the_batch_is_no_row_of_a_sample(
    kind: str, given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ShapeError, match=words):
        embedx.extract(OfBatch(kind).eval(), noise(12, 4), batch_size=6, out=tmp_path, **given)


def test_a_mask_of_frames_is_that_of_their_tokens(tmp_path: Path) -> None:
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(12, 4)

        def forward(self, frames: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(frames.flatten(2))  # type: ignore[no-any-return]

    model, frames = Frames().eval(), noise(6, 5, 3, 4)
    mask = torch.arange(5) < torch.tensor([[5], [3], [2], [4], [1], [5]])
    items = [{"frames": a, "attention_mask": b} for a, b in zip(frames, mask, strict=True)]
    run = embedx.extract(model, items, layers="layer", pooling="mean_token", out=tmp_path)
    with torch.no_grad():
        tokens = model.layer(frames.flatten(2)) * mask[:, :, None]
    wanted = tokens.sum(1) / mask.sum(1, keepdim=True)
    assert np.allclose(run.embeddings["layer"], wanted, atol=1e-6)


class MasksItself(nn.Module):
    """A network of texts that makes its mask of the ids, as most people write it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder: nn.Module = nn.TransformerEncoder(layer, 1) if kind == "encoder" else layer
        if kind == "rnn":
            self.encoder = nn.GRU(16, 16, batch_first=True)
        self.head, self.kind = nn.Linear(16, 3), kind

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.kind == "rnn":
            lengths = (ids != 0).sum(1).cpu()
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            x, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        else:
            x = self.encoder(x, src_key_padding_mask=ids == 0)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "layer", "rnn"])
def test_a_network_that_masks_padding_by_itself_is_said_to(
    kind: str, is_padded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.randint(1, 50, (12, 7), generator=torch.Generator().manual_seed(0))
    if is_padded:
        ids[torch.arange(7) >= torch.arange(1, 13)[:, None].clamp(2, 7)] = 0
    layer = "encoder" if kind != "rnn" else "embed"
    model = MasksItself(kind).eval()
    embedx.extract(model, ids, layers=layer, pooling="mean_token", out=tmp_path / "a")
    assert ("masks padding by itself, at encoder" in caplog.text) == is_padded
    assert ("fused encoder" in caplog.text) == (is_padded and kind == "encoder")
    caplog.clear()
    embedx.extract(model, ids, layers="head", out=tmp_path / "b")
    assert "masks padding by itself" not in caplog.text
    assert ("fused encoder" in caplog.text) == (is_padded and kind == "encoder")


class Mixing(nn.Module):
    """Rows that are not those of the sample alone, in one of several ways people write."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(4, 6), kind
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "norm":
            return self.norm(y)  # type: ignore[no-any-return]
        if self.kind == "drop":
            return nn.functional.dropout(y, 0.5)
        return y - y.mean(0) if self.kind == "centre" else y


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("norm", "the output of mixing|rows hang on the samples beside them"),
        ("centre", "rows hang on the samples beside them"),
        ("drop", "draws random numbers in its passes, in eval mode too: each row is that of one"),
        ("none", ""),
    ],
)
def test_rows_that_are_not_those_of_the_sample_alone_are_said_to_be(
    kind: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(Mixing(kind), nn.Identity()).eval()
    embedx.extract(model, noise(12, 4), layers="1", batch_size=6, out=tmp_path)
    said = [line for line in caplog.messages if re.search("hangs? on", line)]
    assert len(said) == bool(words)
    assert re.search(words, "".join(said))


@pytest.mark.parametrize("gives_mask", [False, True])
def test_a_collate_fn_that_pads_without_a_mask_is_said_to(
    gives_mask: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [torch.arange(1, 3 + i % 5) for i in range(20)]

    def collate(items: list[Tensor]) -> Any:
        ids = nn.utils.rnn.pad_sequence(items, batch_first=True)
        return {"input": ids, "attention_mask": ids != 0} if gives_mask else ids

    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 4)

        def forward(self, input: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.embed(input)  # type: ignore[no-any-return]

    loader = DataLoader(texts, batch_size=5, collate_fn=collate)  # type: ignore[arg-type]
    embedx.extract(Embeds(), loader, layers="embed", pooling="mean_token", out=tmp_path)
    assert ("pads the samples of a batch to one length" in caplog.text) != gives_mask


@pytest.mark.parametrize("name", ["mask", "lengths"])
def test_masks_of_floats_and_lengths_are_said_to_be_none(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, mask: Any = None, lengths: Any = None) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    extra = {"mask": torch.tensor([1.0, 1.0, 0.0, 0.0]), "lengths": torch.tensor(2)}[name]
    items = [{"x": one, name: extra} for one in noise(6, 4, 3)]
    embedx.extract(Takes(), items, layers="layer", pooling="mean_token", out=tmp_path)
    assert f"{name} looks like a mask of padding or lengths" in caplog.text


def test_labels_of_tokens_are_no_second_sequence_of_a_network_without_a_decoder(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, vocab_size=50, num_hidden_layers=1)
    model = transformers.BertForMaskedLM(config).eval()
    items = translated()
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    labels = batch.pop("decoder_input_ids")
    name = "bert.encoder.layer.0"
    recorder = embedx.record(model, name, out=tmp_path, pooling="mean_token")
    with torch.no_grad():
        given = model(**batch, labels=labels, output_hidden_states=True)
    recorder.batch()
    run = recorder.finish()
    mask = batch["attention_mask"][:, :, None]
    wanted = (given.hidden_states[1] * mask).sum(1) / mask.sum(1)
    assert np.allclose(run.embeddings[name], wanted, atol=1e-5)


def test_a_function_of_ones_own_in_a_list_of_a_library_is_code_of_ones_own() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    for inner in (v2.Lambda(lambda x: x - x.mean()), nn.BatchNorm2d(3, track_running_stats=False)):
        assert not fold.is_known(nn.Sequential(v2.Compose([inner]), nn.Conv2d(3, 4, 3)))
    assert fold.is_known(nn.Sequential(v2.Compose([v2.Normalize([0.5], [0.5])]), nn.ReLU()))


@pytest.mark.parametrize(("size", "is_said"), [(1e-7, True), (1e-6, True), (1e-3, False)])
def test_rows_of_which_few_digits_are_kept_are_said_to_be(
    size: float, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = noise(8, 4).clamp(-1, 1) * size
    model = nn.Sequential(nn.Identity())
    embedx.extract(model, x, layers="0", dtype="float16", out=tmp_path)
    assert ("or keeps few of their digits" in caplog.text) == is_said


def test_a_collate_fn_that_mixes_samples_is_refused(tmp_path: Path) -> None:
    def mixed(items: list[Tensor]) -> Tensor:
        x, share = torch.stack(items), torch.rand(1)
        return share * x + (1 - share) * x.roll(1, 0)

    def centred(items: list[Tensor]) -> Tensor:
        x = torch.stack(items)
        return x - x.mean(0)

    def noisy(items: list[Tensor]) -> Tensor:
        return torch.stack(items) + torch.randn(len(items), 4)

    x = list(noise(20, 4))
    for collate in (mixed, centred):
        loader = DataLoader(x, batch_size=5, collate_fn=collate)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="something else of a sample beside another one"):
            embedx.extract(linear(4, 3), loader, layers="0", out=tmp_path / "a")
    loader = DataLoader(x, batch_size=5, collate_fn=noisy)  # type: ignore[arg-type]
    assert embedx.extract(linear(4, 3), loader, layers="0", out=tmp_path / "b").n_rows == 20


SETTINGS: dict[str, Any] = {"net": {"scale": 2.0, "mean": torch.zeros(3)}, "std": np.ones(3)}


class BySettings(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * SETTINGS["net"]["scale"] / torch.from_numpy(SETTINGS["std"]).float()


def test_numbers_and_arrays_in_dicts_that_are_global_count_and_tensors_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = code_sha256(BySettings())
    monkeypatch.setitem(SETTINGS["net"], "mean", torch.ones(3))
    monkeypatch.setitem(SETTINGS["net"], "kept by a hook", torch.ones(3))
    assert code_sha256(BySettings()) == before
    monkeypatch.setitem(SETTINGS["net"], "scale", 3.0)
    scaled = code_sha256(BySettings())
    monkeypatch.setitem(SETTINGS, "std", np.full(3, 2.0))
    assert len({before, scaled, code_sha256(BySettings())}) == 3
    SETTINGS["self"] = SETTINGS
    try:
        assert code_sha256(BySettings())
    finally:
        del SETTINGS["self"]


# --------------------------------------------------------------------------- a sixth hour


def beside(folder: Path) -> set[str]:
    """What lies in the folder of a run, that of its own making aside."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {"embeddings.h5", "config.yaml", "embeddings.h5.lock"}


def made_of(run: store.Embeddings) -> None:
    embedx.project(run, method="pca")
    embedx.view(run)
    embedx.export(run, exporter="table")
    embedx.export(run, exporter="npz")
    embedx.search(run, query=0, sheet=0)


def test_of_a_run_that_was_replaced_nothing_is_put_beside_the_new_one(tmp_path: Path) -> None:
    x, model = noise(12, 4), linear(4, 6)
    run = embedx.extract(model, x, layers="0", out=tmp_path)
    made_of(run)
    with torch.no_grad():
        model[0].weight.mul_(3)  # type: ignore[index,operator,union-attr]
    embedx.extract(model, x, layers="0", out=tmp_path, overwrite=True)
    assert not beside(tmp_path)
    for made in (
        lambda: embedx.export(run, exporter="table"),
        lambda: embedx.export(run, exporter="npz"),
        lambda: embedx.search(run, query=0, sheet=0),
        lambda: embedx.view(run),
        lambda: embedx.project(run, method="pca"),
    ):
        with pytest.raises(StoreError, match="replaced meanwhile; open it again"):
            made()
    assert not beside(tmp_path)


def test_what_is_written_while_a_run_is_replaced_is_said_to_be_of_the_former_rows(
    tmp_path: Path,
) -> None:
    x, model = noise(12, 4), linear(4, 6)
    run = embedx.extract(model, x, layers="0", out=tmp_path)

    def slow(embeddings: Any, projections: Any, out: Path | None) -> Path:
        embedx.extract(linear(4, 6, seed=1), x, layers="0", out=tmp_path, overwrite=True)
        path = tmp_path / "mine.txt"
        path.write_text("rows")
        return path

    with pytest.raises(StoreError, match="make again what was just written: it is of the rows"):
        embedx.export(run, exporter=slow)
    assert embedx.export(embedx.open(tmp_path), exporter="table").is_file()


@pytest.mark.parametrize("how", ["at once", "by parts", "one part", "recorded", "damaged"])
def test_what_was_made_of_a_file_that_was_lost_goes_with_the_next_one(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, model = noise(12, 4), linear(4, 6)
    made_of(embedx.extract(model, x, layers="0", out=tmp_path))
    (tmp_path / "report.html").write_text("the user's own")
    named = {name for name in beside(tmp_path) if name.startswith(("projections", "neighbors-"))}
    assert len(beside(tmp_path)) > len(named) + 3
    if how == "damaged":
        (tmp_path / "embeddings.h5").write_bytes(b"gone")
    else:
        (tmp_path / "embeddings.h5").unlink()
    other = linear(4, 6, seed=1)
    caplog.set_level("INFO")
    if how == "recorded":
        with embedx.record(other, "0", tmp_path) as recorder:
            other(x)
            recorder.batch()
    else:
        settings = {"by parts": {"n_parts": 3}, "one part": {"n_parts": 3, "part": 1}}
        kinds: dict[str, Any] = settings.get(how, {"overwrite": how == "damaged"})
        embedx.extract(other, x, layers="0", out=tmp_path, batch_size=4, **kinds)
    assert "removed what was made of the rows that are replaced: map-pca" in caplog.text
    # These say of which rows they are, and are not taken for the new ones'.
    kept = {name for name in beside(tmp_path) if not name.startswith("embeddings.h5.parts")}
    assert kept == named | {"report.html"}


def test_an_array_that_is_written_by_a_memory_map_is_seen_to_change(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    shared = np.lib.format.open_memmap(path, "w+", np.float32, (10, 4))  # type: ignore[no-untyped-call]
    shared[:] = 1
    before = array_data.array(str(path), layout="tensor").fingerprint
    shared[3] = 2  # on a page that was not written to the disk yet
    assert array_data.array(str(path), layout="tensor").fingerprint != before
