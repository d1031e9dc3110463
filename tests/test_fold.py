"""Folded networks give what plain ones give, and are whole again afterwards."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision import models

import embedx
from embedx.fold import folded, is_known
from embedx.points import parse_point


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def trained(name: str) -> nn.Module:
    """A network whose normalizations do something, as after a training."""
    torch.manual_seed(0)
    model = models.get_model(name, weights=None).eval()
    for child in model.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.running_mean.normal_()
            child.running_var.uniform_(0.5, 2)
            child.weight.data.uniform_(0.5, 1.5)
            child.bias.data.normal_()
    return model


# In densenet121 half of the normalizations come before their convolution.
PAIRS = {"resnet18": 20, "mobilenet_v3_small": 34, "densenet121": 59, "vgg11_bn": 8, "vit_b_16": 0}


@pytest.mark.parametrize("name", PAIRS)
def test_a_folded_network_gives_what_the_plain_one_gives_and_is_whole_again(name: str) -> None:
    model = trained(name)
    x = torch.randn(2, 3, 224 if name == "vit_b_16" else 64, 224 if name == "vit_b_16" else 64)
    before = dict(model.named_modules())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        plain = model(x)
        with folded(model, []) as n_pairs:
            assert n_pairs == PAIRS[name]
            assert (
                sum(isinstance(c, nn.BatchNorm2d) for c in model.modules())
                == sum(isinstance(c, nn.BatchNorm2d) for c in before.values()) - n_pairs
            )
            assert relative_error(model(x), plain) < 1e-5
        assert torch.equal(model(x), plain)
    after = dict(model.named_modules())
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in before)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("point", "n_pairs"),
    {
        "conv1": 19,
        "conv1:input": 20,
        "bn1": 20,
        "bn1:input": 19,
        "layer1": 20,
        "layer1.0": 20,
        "layer1.0.conv2": 19,
        "layer2.0.downsample": 20,
        "layer2.0.downsample.0": 19,
        "relu": 20,
        "avgpool": 20,
    }.items(),
)
def test_a_pair_that_a_point_lies_between_stays_as_it_is(point: str, n_pairs: int) -> None:
    model = trained("resnet18")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        with embedx.capture(model, point) as got:
            model(x)
            wanted = got[point]
        with folded(model, [parse_point(point)]) as n, embedx.capture(model, point) as got:
            assert n == n_pairs
            model(x)
            assert relative_error(got[point], wanted) < 1e-5


def test_the_edge_of_a_block_is_a_point_between() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem = nn.Sequential(nn.Conv2d(3, 4, 3))
            self.rest = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.stem(x))

    model = Halves().eval()
    model.rest[0].running_mean.normal_()
    for point, n_pairs in {"stem": 0, "rest:input": 0, "rest": 1, "stem:input": 1}.items():
        with folded(model, [parse_point(point)]) as n:
            assert n == n_pairs, point


class Odd(nn.Module):
    """Convolutions and normalizations that must not be folded, each for its own reason."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.pad, self.twice, self.own = (nn.Conv2d(3, 3, 1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(5))
        self.stateless = nn.BatchNorm2d(3, track_running_stats=False)
        self.plain = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(x)
        x = y + self.norms[0](y)  # what the convolution gives goes elsewhere too
        x = self.norms[1](self.pad(x) + 1)
        x = self.norms[2](self.twice(self.twice(x)))
        x = self.stateless(self.own(x))
        return self.norms[3](self.plain(x)) + self.norms[4](x)


def test_networks_of_libraries_are_known_and_those_with_code_or_hooks_of_ones_own_are_not() -> None:
    known = nn.Sequential(nn.Conv2d(3, 3, 1), trained("resnet18"))
    assert is_known(known)
    assert not is_known(Odd())
    assert not is_known(nn.Sequential(Odd()))
    for register in (known[1].fc.register_forward_hook, known[0].register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert not is_known(known)
        handle.remove()
    assert is_known(known)


def replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network of torch's classes in which somebody replaced something."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    model[1].running_mean.normal_()
    if name == "normalization":
        model[1].forward = lambda x: x * 5
    elif name == "convolution":
        model[0].forward = lambda x: nn.functional.conv2d(x, model[0].weight * 2)
    elif name == "method":
        model[0]._conv_forward = lambda x, weight, bias: nn.functional.conv2d(x, weight * 2)
    elif name == "root":
        model.forward = lambda x: model[2](model[1](model[0](x)) + model[0](x))
    elif name == "class":
        monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda self, x: x * 5)
    elif name == "wrapped":
        wrapped = functools.wraps(nn.BatchNorm2d.forward)(lambda self, x: x * 5)
        monkeypatch.setattr(nn.BatchNorm2d, "forward", wrapped)
    elif name == "builtin":
        monkeypatch.setattr(nn.BatchNorm2d, "forward", torch.relu)
    else:
        nn.modules.module.register_module_forward_hook(
            lambda module, _, y: y * 5 if isinstance(module, nn.BatchNorm2d) else None
        )
    return model


@pytest.mark.parametrize(
    "name",
    ["normalization", "convolution", "method", "root", "class", "wrapped", "builtin", "global"],
)
def test_a_network_in_which_something_was_replaced_runs_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        nn.modules.module, "_global_forward_hooks", nn.modules.module._global_forward_hooks.copy()
    )
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    assert is_known(plain)
    model, x = replaced(name, monkeypatch), torch.rand(4, 3, 8, 8)
    assert not is_known(model)
    with torch.no_grad():
        wanted = model(x).mean((2, 3)).numpy()
    run = embedx.extract(model, x, layers="2", out=tmp_path)
    np.testing.assert_allclose(run.embeddings["2"], wanted, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_folded_is_left_alone() -> None:
    model, x = Odd().eval(), torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        plain = model(x)
        with folded(model, []) as n:
            assert n == 1
            assert relative_error(model(x), plain) < 1e-5
        model.train()
        with folded(model, []) as n:
            assert n == 0


def test_a_network_is_whole_again_after_an_error() -> None:
    model = trained("resnet18")
    before = dict(model.named_modules())
    with pytest.raises(RuntimeError, match="in between"), folded(model, []):
        raise RuntimeError("in between")
    assert all(child is before[name] for name, child in model.named_modules())


def test_a_convolution_that_goes_by_two_names_keeps_its_normalization() -> None:
    model, x = trained("resnet18"), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        plain = model(x)
        model.conv1.noted = model.layer1[0].conv1
        with folded(model, []) as n_pairs:
            assert n_pairs == PAIRS["resnet18"] - 1
            assert relative_error(model(x), plain) < 1e-5


def test_attention_that_somebody_registered_is_not_known() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
    )
    model = transformers.BertModel(config)
    assert is_known(model)
    model.config._attn_implementation = "mine"
    assert not is_known(model)


class Cached(nn.Module):
    """Keeps what it made of its input by the device, as attention biases are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.cache: dict[str, Tensor] = {}
        self.names, self.last = ["a"], 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        self.cache[str(y.device)] = y
        self.names.append("b")
        self.last, self.made = 1, y
        return y  # type: ignore[no-any-return]


def test_a_traced_pass_leaves_nothing_in_the_network() -> None:
    module = Cached().eval()
    cache, names = module.cache, module.names
    with folded(module, []) as n:
        assert n == 1
        assert (module.cache, module.names, module.last) == ({}, ["a"], 0)
        assert not hasattr(module, "made")
    assert module.cache is cache
    assert module.names is names


def test_a_network_with_a_cache_is_found_done(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    model, x = timm.create_model("levit_128s", num_classes=3).eval(), torch.randn(2, 3, 224, 224)
    embedx.extract(model, x, out=tmp_path, thumbnails=0)
    assert is_known(model)
    assert embedx.extract(model, x, out=tmp_path, thumbnails=0).n_rows == 2
