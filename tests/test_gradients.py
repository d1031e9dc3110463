"""Gradients at layers: by hooks, over data, in a loop of one's own."""

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embedx
from embedx.errors import LayerError
from tests.test_hooks import n_hooks, network

NETWORKS = [
    "alexnet",
    "resnet18",
    "densenet121",
    "mobilenet_v3_small",
    "vit_b_16",
    "swin_t",
    "convnext_tiny",
    "timm/tf_efficientnet_lite0",
    "transformer",
]


def moved(model: nn.Module, x: Tensor, objective: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """The gradient at every place of every call, by what a zero that is added there gets.

    Keys are ``NAME@CALL:grad`` and ``NAME@CALL:grad_input``.
    """
    zeros: dict[str, Tensor] = {}
    calls: dict[str, int] = {}

    def added(name: str, value: Tensor) -> Tensor:
        zeros[name] = torch.zeros_like(value, requires_grad=True)
        return value + zeros[name]

    def watch(name: str, child: nn.Module) -> list[Any]:
        def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
            calls[name] = calls.get(name, -1) + 1
            if len(args) and isinstance(args[0], Tensor):
                return (added(f"{name}@{calls[name]}:grad_input", args[0]), *args[1:])
            return None

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            is_one = isinstance(output, Tensor)
            return added(f"{name}@{calls[name]}:grad", output) if is_one else None

        return [child.register_forward_pre_hook(before), child.register_forward_hook(after)]

    handles = [h for name, child in model.named_modules() if name for h in watch(name, child)]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        total = objective(model(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        for handle in handles:
            handle.remove()
    got = torch.autograd.grad(total, list(zeros.values()), allow_unused=True)
    return {name: g for name, g in zip(zeros, got, strict=True) if g is not None}


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * max(b.abs().max().item(), 1e-30) + 1e-12)


def weighted(output: Any) -> Tensor:
    weights = torch.linspace(-1, 1, output.shape[-1])
    return (output * weights).sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_at_every_layer_are_those_of_a_zero_added_there(
    name: str, is_frozen: bool
) -> None:
    model, x = network(name)
    wanted = moved(model, x, weighted)
    assert len(wanted) > 20
    before = copy.deepcopy(model.state_dict())
    model.requires_grad_(not is_frozen)
    with embedx.capture(model, list(wanted)) as got:
        output = model(x)
        weighted(output).backward()
        for point, gradient in wanted.items():
            assert near(got[point], gradient), point
    assert n_hooks(model) == 0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert {p.requires_grad for p in model.parameters()} == {not is_frozen}


class InPlace(nn.Module):
    """What is hard: the first layer, works in place, on a view, twice by one module, beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.view = nn.Unflatten(1, (2, 3))
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.relu(self.first(x))
        b = self.relu(self.view(a * 2))
        return self.last(a + F.relu(b.flatten(1) - 0.3, inplace=True))


def test_views_works_in_place_and_a_module_called_twice() -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(5, 6)
    wanted = moved(model, x, weighted)
    assert {*wanted} == {
        *(
            f"{name}@0:{what}"
            for name in ("first", "view", "last")
            for what in ("grad", "grad_input")
        ),
        *(f"relu@{call}:{what}" for call in (0, 1) for what in ("grad", "grad_input")),
    }
    with embedx.capture(model, [*wanted, "relu:grad"]) as got:
        weighted(model(x)).backward()
        for point, gradient in wanted.items():
            assert near(got[point], gradient), point
        with pytest.raises(LayerError, match="relu ran 2 times in one pass"):
            got["relu:grad"]


class Parts(NamedTuple):
    one: Tensor
    other: Any


class Structured(nn.Module):
    """Layers that give and take tuples, dicts and named tuples, by position and by name."""

    class Give(nn.Module):
        def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Parts:
            return Parts(x * scale["by"], {"a": [x + 1, x * x]})

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.give, self.out = nn.Linear(3, 3), self.Give(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        parts = self.give(x, scale={"by": x.sigmoid()})
        assert isinstance(parts, Parts)
        return self.out(parts.one + parts.other["a"][0] * parts.other["a"][1])


def test_gradients_by_paths_into_what_layers_take_and_give() -> None:
    torch.manual_seed(0)
    model, x = Structured(), torch.randn(4, 3)
    h = model.enter(x).detach().requires_grad_()
    by = h.sigmoid().detach().requires_grad_()
    one, a, b = h * by, h + 1, h * h
    for part in (one, a, b):
        part.retain_grad()
    weighted(model.out(one + a * b)).backward()
    points = {
        "give:grad.one": one.grad,
        "give:grad.0": one.grad,
        "give:grad.other.a.0": a.grad,
        "give:grad.other.a.1": b.grad,
        "give:grad_input": h.grad,  # by this layer alone, not by the sigmoid
        "give:grad_input.scale.by": by.grad,
    }
    for is_frozen in (False, True):
        model.requires_grad_(not is_frozen)
        with embedx.capture(model, list(points)) as got:
            weighted(model(x)).backward()
            for point, gradient in points.items():
                assert gradient is not None
                assert near(got[point], gradient), point


def test_a_gradient_that_cannot_come_is_said() -> None:
    model, x = Structured(), torch.randn(4, 3)
    with embedx.capture(model, "out:grad") as got:
        model(x)
        with pytest.raises(LayerError, match=r"no gradient has reached out; call backward\(\)"):
            got["out:grad"]
        with torch.no_grad():
            model(x)
        with pytest.raises(LayerError, match="the pass ran without gradients"):
            got["out:grad"]
    with (
        embedx.capture(model, "give:grad") as got,
        pytest.raises(LayerError, match="give:grad.one"),
    ):
        model(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask(x > 0)

    with (
        embedx.capture(Whole(), "mask:grad") as got,
        pytest.raises(LayerError, match=r"torch\.bool there, which has no gradient"),
    ):
        got._module(x)


def test_a_gradient_is_of_the_latest_pass_and_read_in_any_thread() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    with embedx.capture(model, "0:grad") as got:
        first, second = model(x), model(2 * x)
        (first * 3).sum().backward()
        with pytest.raises(LayerError, match="no gradient has reached"):
            got["0:grad"]  # of a pass before
        thread = threading.Thread(target=(second * 5).sum().backward)
        thread.start()
        thread.join()
        assert torch.equal(got["0:grad"], torch.full((4, 2), 5.0))


def test_badge_is_the_gradient_of_the_loss_of_the_predicted_class() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    x = torch.randn(6, 5)
    wanted = []
    for one in x:
        model.zero_grad()
        scores = model(one[None])
        F.cross_entropy(scores, scores.argmax(1)).backward()
        assert model[2].weight.grad is not None
        wanted.append(model[2].weight.grad.flatten().clone())
    with embedx.capture(model, "2:badge") as got, torch.no_grad():
        model(x)
        assert near(got["2:badge"], torch.stack(wanted))
    with (
        embedx.capture(model, "0:badge"),
        pytest.raises(LayerError, match="does not give the class"),
    ):
        model(x)
    with embedx.capture(model, "1:badge"), pytest.raises(LayerError, match="1 is a ReLU"):
        model(x)
    assert n_hooks(model) == 0
