"""Capture points: copies of what plain forward passes give, and a model left as it was."""

import random
import re
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import embedx
from embedx import hooks
from embedx.errors import LayerError, ModelError
from embedx.passes import run_model, undisturbed
from embedx.points import Point, parse_point, resolve_points


def n_hooks(module: nn.Module) -> int:
    return sum(
        len(getattr(child, name))
        for child in module.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ).eval()


@given(
    layer=st.from_regex(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+){0,3}", fullmatch=True),
    call=st.none() | st.integers(0, 20),
    what=st.sampled_from(["output", "input"]),
    path=st.lists(st.from_regex(r"[a-z0-9_]+", fullmatch=True), max_size=3),
)
def test_a_point_is_read_from_its_own_name(
    layer: str, call: int | None, what: str, path: list[str]
) -> None:
    point = Point(layer, call, what, tuple(path))
    assert parse_point(point.name) == point


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a@x", "not of the form"),
        ("", "not of the form"),
        (":input", "not of the form"),
        ("a:outptu", "'outptu' cannot be captured; choose one of output, input"),
        (1.1, r"layer 1.1 is a number; quote it: layers=\"\['1.1'\]\""),
    ],
)
def test_a_malformed_point_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        parse_point(text)


def test_captured_output_equals_the_output_computed_without_hooks() -> None:
    model, x = small(), torch.randn(2, 3, 8, 8)
    with embedx.capture(model, ["0", "2", "4:input"]) as got:
        model(x)
        torch.testing.assert_close(got["0"], model[0](x), rtol=0, atol=0)
        torch.testing.assert_close(got["2"], model[:3](x), rtol=0, atol=0)
        torch.testing.assert_close(got["4:input"], model[:4](x), rtol=0, atol=0)
        assert list(got) == ["0", "2", "4:input"]


def test_a_layer_that_works_in_place_does_not_change_what_was_captured_before_it() -> None:
    model, x = small(), torch.randn(2, 3, 8, 8)
    with embedx.capture(model, ["0", "1:input"]) as got:
        model(x)
        assert (got["0"] < 0).any()
        assert (got["1:input"] < 0).any()


class Reuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.unused = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.a(self.relu(x)))


def test_a_layer_that_runs_twice_needs_its_call_and_gives_each() -> None:
    model, x = Reuses().eval(), torch.randn(2, 3)
    with embedx.capture(model, ["relu", "relu@0", "relu@1", "relu@2", "a"]) as got:
        model(x)
        with pytest.raises(LayerError, match="relu ran 2 times in one pass; .* relu@0 or relu@1"):
            got["relu"]
        torch.testing.assert_close(got["relu@0"], x.relu())
        torch.testing.assert_close(got["relu@1"], model.a(x.relu()).relu())
        with pytest.raises(LayerError, match=r"relu@2: relu ran 2 time\(s\)"):
            got["relu@2"]
        model(x)
        assert got["a"].shape == (2, 3)  # a second pass begins its count anew


def test_a_layer_that_does_not_run_is_an_error_that_names_it() -> None:
    model = Reuses()
    with embedx.capture(model, "unused") as got:
        with pytest.raises(LayerError, match="unused: the model has not run yet"):
            got["unused"]
        model(torch.zeros(1, 3))
        with pytest.raises(LayerError, match="unused did"):
            got["unused"]


def test_what_was_captured_in_an_earlier_pass_is_not_given_again() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor, *, use_a: bool) -> Tensor:
            return self.a(x) if use_a else self.b(x)

    model, x = Branches(), torch.zeros(1, 2)
    with embedx.capture(model, "a") as got:
        model(x, use_a=True)
        assert got["a"].shape == (1, 2)
        model(x, use_a=False)
        with pytest.raises(LayerError, match="a did not fire in this pass"):
            got["a"]


@dataclass
class Answer:
    hidden: Tensor
    extra: None = None


Pair = namedtuple("Pair", "first second")


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = Inner(kind)

    def forward(self, x: Tensor) -> object:
        return self.inner(x, mask=x + 1)


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, *, mask: Tensor) -> object:
        kinds = {
            "tuple": (x * 2, x * 3),
            "dict": {"hidden": x * 2, "deep": [x, x * 5], 3: x * 7},
            "dataclass": Answer(x * 2),
            "namedtuple": Pair(x * 2, x * 3),
            "none": None,
        }
        return kinds[self.kind]


@pytest.mark.parametrize(
    ("kind", "point", "factor"),
    [
        ("tuple", "inner:output.1", 3),
        ("dict", "inner:output.hidden", 2),
        ("dict", "inner:output.deep.1", 5),
        ("dict", "inner:output.3", 7),
        ("dataclass", "inner:output.hidden", 2),
        ("namedtuple", "inner:output.second", 3),
        ("namedtuple", "inner:output.0", 2),
    ],
)
def test_a_path_reaches_into_a_structured_output(kind: str, point: str, factor: int) -> None:
    model, x = Structured(kind), torch.ones(1, 2)
    with embedx.capture(model, point) as got:
        model(x)
        torch.testing.assert_close(got[point], x * factor)


@pytest.mark.parametrize(
    ("kind", "point", "message"),
    [
        ("tuple", "inner", "inner is a tuple, not a tensor; .* inner:output.0, inner:output.1"),
        ("dict", "inner", "is a dict, not a tensor; .*: inner:output.hidden, inner:output.deep"),
        ("dict", "inner:output.deep", "inner:output.deep.0, inner:output.deep.1"),
        ("dataclass", "inner", "is a Answer.*inner:output.hidden, inner:output.extra"),
        ("none", "inner", "is a NoneType, not a tensor"),
        ("tuple", "inner:output.7", "is a tuple without '7'; it has: 0, 1"),
        ("tuple", "inner:input.9", "no input 9; choose from: inner:input.0, inner:input.mask"),
    ],
)
def test_a_wrong_path_names_the_type_and_the_keys(kind: str, point: str, message: str) -> None:
    model = Structured(kind)
    with embedx.capture(model, point), pytest.raises(LayerError, match=message):
        model(torch.ones(1, 2))
    assert n_hooks(model) == 0


def test_inputs_are_seen_by_position_and_by_keyword() -> None:
    model, x = Structured("tuple"), torch.ones(1, 2)
    with embedx.capture(model, ["inner:input", "inner:input.0", "inner:input.mask"]) as got:
        model(x)
        torch.testing.assert_close(got["inner:input"], x)
        torch.testing.assert_close(got["inner:input.0"], x)
        torch.testing.assert_close(got["inner:input.mask"], x + 1)


def test_fused_attention_is_taken_apart_while_capturing_and_restored() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    before = torch.backends.mha.get_fastpath_enabled()
    with torch.inference_mode(), embedx.capture(layer, "linear1") as got:
        layer(x)
        assert got["linear1"].shape == (1, 3, 16)
    assert torch.backends.mha.get_fastpath_enabled() == before is True


def test_the_fast_path_is_off_until_the_last_of_two_captures_ends() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    first, second = embedx.capture(layer, "linear1"), embedx.capture(layer, "linear1")
    first.remove()
    with torch.inference_mode():
        layer(torch.randn(1, 3, 8))
    assert second["linear1"].shape == (1, 3, 16)
    second.remove()
    assert torch.backends.mha.get_fastpath_enabled()


def test_attention_projection_that_never_fires_is_an_error_with_a_hint() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    with embedx.capture(attention, "out_proj") as got:
        attention(x, x, x)
        with pytest.raises(LayerError, match="out_proj did not fire in this pass: .*fused"):
            got["out_proj"]


def test_hooks_are_gone_after_an_error_in_the_pass_and_after_a_wrong_name() -> None:
    model = small()
    with pytest.raises(LayerError, match="no layer 'nope'"):
        embedx.capture(model, ["0", "nope"])
    assert n_hooks(model) == 0
    with embedx.capture(model, "0"):
        assert n_hooks(model) > 0
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 1, 1, 1))
    assert n_hooks(model) == 0


def test_remove_may_be_called_in_place_of_a_with_block_and_again() -> None:
    model = small()
    got = embedx.capture(model, "0")
    model(torch.randn(1, 3, 8, 8))
    with got, got:
        assert "0" in got
        assert "1" not in got
    got.remove()
    assert n_hooks(model) == 0
    assert got["0"].shape == (1, 4, 6, 6)


def test_names_globs_and_lists_resolve_in_order_and_once() -> None:
    model = nn.Sequential()
    model.add_module("1", nn.Sequential())
    model[0].add_module("10", nn.Linear(2, 2))
    model[0].add_module("2", nn.Linear(2, 2))
    assert [p.name for p in resolve_points(model, "1.10")] == ["1.10"]
    assert [p.name for p in resolve_points(model, "1.*")] == ["1.10", "1.2"]
    assert [p.name for p in resolve_points(model, ["1.2", "1.*:input"])] == [
        "1.2",
        "1.10:input",
        "1.2:input",
    ]
    assert [p.name for p in resolve_points(model, ["1.2", "1.2"])] == ["1.2"]
    assert [p.name for p in resolve_points(model, "penultimate")] == ["1.2:input"]
    assert [p.name for p in resolve_points(model, "penultimate", penultimate="1.10")] == ["1.10"]


def test_a_wrong_name_lists_the_nearest() -> None:
    with pytest.raises(
        LayerError,
        match=r"Sequential has no layer '5'; the nearest of its 5 layers are .*; list them with: "
        r"python -m embedx layers model=tiny",
    ):
        resolve_points(small(), "5", title="tiny")


def test_a_model_without_a_head_has_no_penultimate_layer() -> None:
    with pytest.raises(LayerError, match="has no layer 'zz'"):
        resolve_points(small(), "penultimate", penultimate="zz")
    with pytest.raises(LayerError, match="has no Linear or 1x1 Conv2d head"):
        resolve_points(nn.Sequential(nn.ReLU()), "penultimate")


# --------------------------------------------------------------------------- models of the field

NETWORKS = [
    "alexnet",
    "vgg11_bn",
    "resnet18",
    "densenet121",
    "mobilenet_v3_small",
    "vit_b_16",
    "swin_t",
    "convnext_tiny",
    "timm/tf_efficientnet_lite0",
    "timm/vit_tiny_patch16_224",
    "timm/swin_tiny_patch4_window7_224",
    "efficientnet-lite0",
    "transformer",
]


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A network with random weights, in eval mode, and an input for it."""
    torch.manual_seed(0)
    side = 224 if re.search("vit|swin", name) else 64
    x = torch.randn(1, 3, side, side)
    if name.startswith("timm/"):
        timm = pytest.importorskip("timm")
        return timm.create_model(name.removeprefix("timm/"), pretrained=False).eval(), x
    if name == "efficientnet-lite0":
        package = pytest.importorskip("efficientnet_lite_pytorch")
        return package.EfficientNet.from_name(name).eval(), x
    if name == "transformer":
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(
            2, 5, 16
        )
    from torchvision import models

    return models.get_model(name, weights=None).eval(), x


def noted(model: nn.Module, x: Tensor) -> tuple[dict[tuple[str, str, int], Tensor], dict[str, int]]:
    """Every tensor that enters or leaves any call of any module, copied at once, by plain hooks."""
    seen: dict[tuple[str, str, int], Tensor] = {}
    calls: dict[str, int] = {}

    def watch(name: str, child: nn.Module) -> list[object]:
        def before(_: nn.Module, args: tuple[object, ...]) -> None:
            calls[name] = calls.get(name, 0) + 1
            if args and isinstance(args[0], Tensor):
                seen[name, "input", calls[name] - 1] = args[0].clone()

        def after(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor):
                seen[name, "output", calls[name] - 1] = output.clone()

        return [child.register_forward_pre_hook(before), child.register_forward_hook(after)]

    handles = [h for name, child in model.named_modules() if name for h in watch(name, child)]
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        model(x)
    torch.backends.mha.set_fastpath_enabled(True)
    for handle in handles:
        handle.remove()
    return seen, calls


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_point_of_a_network_equals_what_plain_hooks_copy(name: str) -> None:
    model, x = network(name)
    seen, calls = noted(model, x)
    points = {
        Point(layer, call if calls[layer] > 1 else None, what): tensor
        for (layer, what, call), tensor in seen.items()
    }
    assert len(points) > 20
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        plain = model(x)
        with embedx.capture(model, [point.name for point in points]) as got:
            hooked = model(x)
            for point, tensor in points.items():
                assert torch.equal(got[point.name], tensor), point.name
    if name != "transformer":  # its fused path sums in another order
        assert torch.equal(hooked, plain)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert n_hooks(model) == 0
    repeated = [layer for layer, n in calls.items() if n > 1]
    if name == "efficientnet-lite0":
        assert len(repeated) == 16  # the activation of the network and of fifteen blocks
    if repeated:
        with torch.no_grad(), embedx.capture(model, repeated[0]) as got:
            model(x)
            with pytest.raises(LayerError, match=r"ran \d+ times in one pass; say which call: "):
                got[repeated[0]]


def test_names_that_look_like_numbers_are_names() -> None:
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)]) for _ in range(2)])
    x = torch.randn(1, 2)
    with torch.no_grad(), embedx.capture(model, ["1.10", "1.1", "0"]) as got:
        y = model(x)
        assert torch.equal(got["1.10"], y)
        assert torch.equal(got["1.1"], model[1][:2](model[0](x)))


# --------------------------------------------------------------------------- passes that end early


class Counted(nn.Module):
    """Three layers, of which the last may be left out; it counts what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.ran: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        try:
            for name in "abc":
                x = getattr(self, name)(x)
                self.ran.append(name)
        except Exception:  # a model that hides its errors must not hide an early end
            return x
        return x


@pytest.mark.parametrize("points", [["a"], ["b", "a"], ["a", "b:input"], ["c:input"], ["c", "a"]])
def test_a_pass_ends_with_the_last_point_in_order_of_execution(points: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Counted(), torch.randn(3, 2)
    with torch.no_grad(), embedx.capture(model, points) as got:
        run_model(model, x, title="counted")
        whole = {name: got[name] for name in points}
        assert model.ran == ["a", "b", "c"]
        model.ran.clear()
        got.stops_early = True
        given = run_model(model, x, title="counted")
        assert all(torch.equal(got[name], whole[name]) for name in points)
    wanted = max("abc".index(name[0]) + (":" not in name) for name in points)
    # The layer that fires last does not return into the model.
    assert (
        model.ran == list("abc")[: wanted - ("c:input" not in points and "b:input" not in points)]
    )
    assert given is None
    assert n_hooks(model) == 0
    model.ran.clear()
    assert torch.equal(model(x), model.c(model.b(model.a(x))))


# --------------------------------------------------------------------------- gradients of tensors


def test_the_gradient_of_any_tensor_can_be_read_and_replaced() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)
    model, x = nn.Sequential(first, nn.ReLU(), second), torch.randn(5, 3)
    hidden = first(x)
    hidden.retain_grad()
    second(hidden.relu()).sum().backward()
    wanted, weights = hidden.grad, first.weight.grad.clone()
    first.weight.grad = None
    with embedx.capture(model, "0") as got:
        hidden = first(x)
        got.watch("hidden", hidden)
        with pytest.raises(LayerError, match="no gradient has reached 'hidden' yet"):
            got["hidden"]
        second(hidden.relu()).sum().backward()
        assert torch.equal(got["hidden"], wanted)
        assert torch.equal(first.weight.grad, weights)
        first.weight.grad = None
        hidden = first(x)
        got.watch("hidden", hidden, replace=lambda gradient: 2 * gradient)
        second(hidden.relu()).sum().backward()
        assert torch.equal(got["hidden"], wanted)
        torch.testing.assert_close(first.weight.grad, 2 * weights)
        for name, tensor, message in (
            ("0", hidden, "0 is a capture point already"),
            ("x", x, "no gradient reaches the tensor 'x'"),
        ):
            with pytest.raises(LayerError, match=message):
                got.watch(name, tensor)
        kept = first(x)
        got.watch("kept", kept)
    second(kept.relu()).sum().backward()
    with pytest.raises(LayerError, match="no gradient has reached 'kept'"):
        got["kept"]


# --------------------------------------------------------------------------- what takes no hooks


def test_copies_that_run_at_once_and_scripts_are_refused_in_plain_words() -> None:
    with pytest.raises(LayerError, match="is a DataParallel, .*: model.module"):
        embedx.capture(nn.DataParallel(small()), "module.0")
    with pytest.raises(LayerError, match=r"Sequential.1 is a DataParallel"):
        embedx.capture(nn.Sequential(small(), nn.DataParallel(small())), "0")
    with pytest.warns(FutureWarning, match="deprecated"):
        scripted = torch.jit.trace(small(), torch.randn(1, 3, 8, 8))
    with pytest.raises(LayerError, match="is TorchScript"):
        embedx.capture(scripted, "0")


class Restless(nn.Module):
    """Counts its passes in a buffer, replaces another, and goes into train mode by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.train()
        self.passes += 1
        self.latest = x
        return self.norm(self.fc(x))


def test_what_a_model_does_to_itself_is_put_back_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Restless().eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    generator = torch.get_rng_state()
    with undisturbed(model), torch.no_grad():
        torch.manual_seed(7)
        model(torch.randn(3, 2))
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert not any(child.training for child in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert "restless put itself into train mode while it ran" in caplog.text
    assert "changed its buffers while it ran: latest, num_batches_tracked, passes" in caplog.text
    caplog.clear()
    with undisturbed(small()):
        pass
    assert caplog.text == ""


class Merging(nn.Module):
    """Adds its correction to the weights in eval mode, as low-rank adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 4.0]))
        self.correction = nn.Parameter(torch.tensor([0.5, 1.0]))
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += -self.correction if mode else self.correction
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight if self.is_merged else self.weight + self.correction)


class Shrinking(nn.Linear):
    """Cuts its weights to the rows that it needs, in place."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data[:1]
        return nn.functional.linear(x, self.weight)


def test_a_parameter_that_has_another_shape_afterwards_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Shrinking(2, 3, bias=False).eval()
    with undisturbed(model), torch.no_grad():
        model(torch.ones(1, 2))
    assert "shrinking changed its parameters, by eval(), train() or its passes: weight;" in (
        caplog.text
    )


class Stubborn(nn.Sequential):
    """Keeps its dropout on, as Monte Carlo dropout does."""

    def train(self, mode: bool = True) -> "Stubborn":
        return self


def test_weights_merged_by_eval_are_taken_apart_and_changed_ones_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(Merging(), nn.Linear(2, 2))
    with undisturbed(model):
        assert model[0].is_merged
    assert model.training
    assert model[0].training
    assert not model[0].is_merged
    assert model[0].weight.tolist() == [2, 4]
    assert "parameters" not in caplog.text
    caplog.clear()
    with undisturbed(model), torch.no_grad():
        model[1].bias.add_(1)
    assert "sequential changed its parameters, by eval(), train() or its passes: 1.bias;" in (
        caplog.text
    )


def test_a_model_whose_eval_leaves_it_in_train_mode_is_said_to_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Stubborn(nn.Linear(2, 2), nn.Dropout())
    model[0].training = False
    with undisturbed(model):
        pass
    assert "stubborn or a part of it is in train mode, and its own eval() leaves it" in caplog.text
    assert "while it ran" not in caplog.text
    assert [child.training for child in model.modules()] == [True, False, True]


def test_the_random_state_of_numpy_and_python_is_as_it_was() -> None:
    def state() -> object:
        return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = state()
    with undisturbed(small()):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        assert state() != before
    assert state() == before


# --------------------------------------------------------------------------- calls within calls


class Averaging(nn.Module):
    """Averages two views of its input by calling itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, is_view: bool = False) -> Tensor:
        return self.a(x) if is_view else (self(x, is_view=True) + self(-x, is_view=True)) / 2


def test_a_model_that_calls_itself_is_in_one_pass() -> None:
    model, x = Averaging(), torch.randn(5, 4)
    with torch.no_grad(), embedx.capture(model, ["a", "a@0", "a@1"]) as got:
        for _ in range(2):
            model(x)
            with pytest.raises(LayerError, match="a ran 2 times in one pass; say which call: a@0"):
                got["a"]
            assert torch.equal(got["a@0"], nn.functional.linear(x, *model.a.parameters()))
            assert torch.equal(got["a@1"], nn.functional.linear(-x, *model.a.parameters()))


@pytest.mark.parametrize("called", ["model", "method"])
def test_hooks_that_are_set_later_are_seen_too(called: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).eval(), torch.randn(3, 4)
    call = model if called == "model" else model.forward
    wanted = 2 * nn.functional.linear(x, *model[0].parameters())
    with (
        torch.no_grad(),
        embedx.capture(model, ["0", "1:input"]) as got,
        embedx.capture(model, "0"),
    ):
        model[0].register_forward_hook(lambda *given: 2 * given[-1])
        call(x)
        assert torch.equal(got["0"], wanted)
        assert torch.equal(got["1:input"], wanted)
        model[1].register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        got.reset()
        if called == "method":
            with pytest.raises(LayerError, match="enters 1 was set on it after the capture began"):
                call(x)
            got.reset()
        call(x)
        assert torch.equal(got["0"], wanted)
        assert torch.equal(got["1:input"], wanted + 1)


def test_a_call_is_not_taken_from_an_earlier_pass_that_nobody_saw_end() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU()).eval(), torch.randn(3, 4)
    with torch.no_grad(), embedx.capture(model, "0@0") as got:
        model.forward(x)
        assert torch.equal(got["0@0"], model[0].forward(x))
        model.forward(-x)
        with pytest.raises(LayerError, match=r"0@0: 0 ran 2 times, .* call reset\(\) of the"):
            got["0@0"]
        got.reset()
        model.forward(-x)
        assert torch.equal(got["0@0"], model[0].forward(-x))
        model(x)
        assert torch.equal(got["0@0"], model[0].forward(x))


# --------------------------------------------------------------------------- threads


def test_each_thread_reads_what_its_own_passes_gave() -> None:
    model, barrier = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), threading.Barrier(2)
    found: list[list[bool]] = [[], []]

    def run(i: int) -> None:
        x = torch.full((3, 4), float(i))
        with torch.no_grad(), embedx.capture(model, "0") as got:
            for _ in range(50):
                barrier.wait()  # both passes, then both read
                model(x)
                barrier.wait()
                wanted = nn.functional.linear(x, *model[0].parameters())
                found[i].append(torch.equal(got["0"], wanted))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 50] * 2


def test_a_pass_in_another_thread_can_be_read_here_unless_several_ran_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    with torch.no_grad(), embedx.capture(model, "0") as got:
        for _ in range(2):
            thread = threading.Thread(target=model, args=(torch.ones(1, 4),))
            thread.start()
            thread.join()
        if len(got._passes) == 1:  # the number of a thread that ended is given again
            assert torch.equal(got["0"], model[0](torch.ones(1, 4)).detach())
        held = threading.Barrier(3)
        threads = [
            threading.Thread(target=lambda: (model(torch.ones(1, 4)), held.wait()))
            for _ in range(2)
        ]
        got._passes.clear()
        for thread in threads:
            thread.start()
        held.wait()
        for thread in threads:
            thread.join()
        with pytest.raises(LayerError, match="0 did not fire in this thread, and others ran the"):
            got["0"]


def test_a_model_is_not_run_undisturbed_twice_at_once_nor_a_part_of_it() -> None:
    model = small()
    with (
        undisturbed(model),
        pytest.raises(ModelError, match=r"sequential is being run by another .*copy.deepcopy"),
        undisturbed(nn.Sequential(model[0])),
    ):
        raise AssertionError
    with undisturbed(model), undisturbed(small()):
        pass


def test_passes_of_other_threads_are_let_alone_where_only_those_here_are_wanted() -> None:
    model, x = small(), torch.randn(1, 3, 8, 8)
    (point,) = resolve_points(model, "0")
    ended: list[Tensor] = []
    with torch.no_grad(), hooks.Capture(model, [point], only_here=True) as got:
        run_model(model, x, title="small")
        got.stops_early = True
        wanted = got["0"]
        thread = threading.Thread(target=lambda: ended.append(model(-x)))
        thread.start()
        thread.join()
        assert got["0"] is wanted
    assert torch.equal(ended[0], model(-x))


@pytest.mark.slow
def test_what_torch_compiled_is_watched_also_within_what_began_before_torch_could_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(torch.compile(nn.Linear(4, 3), backend="eager"))
    x = torch.randn(5, 4)
    left: list[str] = []
    with torch.no_grad():
        model(x)
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch._dynamo")
            change = embedx.intervene(model, {"0": torch.relu})
        with change, hooks.watched(model, left=lambda name, _: left.append(name)):
            model(x)
    assert left == ["0._orig_mod", "0", ""]


@pytest.mark.slow
def test_torch_does_not_compile_what_captures(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), backend="eager")
    x = torch.randn(5, 4)
    model(x)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for _ in range(12):
            with embedx.capture(model, "_orig_mod.0") as got:
                model(x)
                assert torch.equal(got["_orig_mod.0"], model._orig_mod[0](x))
    assert "embedx" not in str(torch._dynamo.utils.counters)
    assert "recompile_limit" not in caplog.text


class GivesOdd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.fc = kind, nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if self.kind == "nested":
            return torch.nested.nested_tensor(list(y.unbind()), layout=torch.jagged)
        return {"sparse": y.to_sparse, "csr": y.to_sparse_csr}[self.kind]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "csr", "nested"])
def test_what_is_not_dense_is_kept_as_it_is(kind: str) -> None:
    model, x = nn.Sequential(GivesOdd(kind)), torch.ones(3, 6)
    with torch.no_grad(), embedx.capture(model, "0") as got:
        given = model(x)
    assert type(got["0"]) is type(given)
    kept, wanted = (
        torch.stack(list(one.unbind())) if kind == "nested" else one.to_dense()
        for one in (got["0"], given)
    )
    assert torch.equal(kept, wanted)


@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_is_not_changed() -> None:
    model = nn.Sequential(GivesOdd("nested"))
    with (
        pytest.raises(LayerError, match="0 is a nested tensor"),
        torch.no_grad(),
        embedx.intervene(model, {"0": lambda t: t}),
    ):
        model(torch.ones(3, 6))


def test_a_pass_within_vmap_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    with pytest.raises(LayerError, match=r"runs within torch\.func"), embedx.capture(model, "0"):
        torch.func.vmap(model)(torch.ones(3, 6))
