"""What the score of a class hangs on, against formulas written out and against brute force."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from embedx import hooks, saliency
from embedx.errors import ConfigError, LayerError, ModelError, ShapeError
from embedx.points import parse_point
from embedx.saliency import Layer, Maps, Scored

X = torch.randn(3, 3, 12, 8, generator=torch.Generator().manual_seed(0))


def small(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=bias),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1, bias=bias),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 4, bias=bias),
    ).eval()


def made(
    method: Callable[..., Maps],
    module: nn.Module,
    x: Tensor = X,
    targets: Tensor | None = None,
    **options: Any,
) -> Maps:
    with saliency.ready(module):
        return method(Scored(module, "net"), x, targets, **options)


def layer_of(module: nn.Module, name: str, x: Tensor = X) -> Layer:
    network = saliency.look(module, x[:1], title="net")
    point = parse_point(name)
    with hooks.Capture(module, [point]) as got, torch.no_grad():
        module(x[:1].clone())
        return saliency.as_layer(network, point, got[point.name], n=1)


def classes(module: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return module(x.clone()).argmax(1)


# --------------------------------------------------------------------------- gradients


def test_the_input_gradient_is_that_of_autograd() -> None:
    module = small()
    for targets in (None, torch.tensor([3, 0, 1])):
        leaf = X.clone().requires_grad_()
        at = classes(module) if targets is None else targets
        scores = module(leaf.clone())
        (wanted,) = torch.autograd.grad(scores.gather(1, at[:, None]).sum(), leaf)
        got = made(saliency.input_gradient, module, targets=targets)
        assert torch.equal(got.maps, wanted)
        assert wanted.any()
        assert torch.equal(got.targets, at)
        assert torch.allclose(got.scores, scores.detach().gather(1, at[:, None])[:, 0])
        assert torch.allclose(got.shares, scores.detach().softmax(1).gather(1, at[:, None])[:, 0])


def test_of_a_network_that_ends_in_a_softmax_the_share_is_the_score() -> None:
    got = made(saliency.input_gradient, nn.Sequential(small(), nn.Softmax(1)))
    assert torch.equal(got.shares, got.scores)


def test_what_share_a_sample_has_does_not_hang_on_the_samples_beside_it() -> None:
    module = nn.Sequential(small(), nn.Softmax(1))
    beside = X.clone()
    beside[1] = torch.nan
    run = Scored(module, "net")
    for x in (beside, X):
        got = saliency.input_gradient(run, x, None)
        assert torch.equal(got.shares.nan_to_num(), got.scores.nan_to_num())
    wanted = Scored(small(), "net")
    logits = torch.tensor([[2.0, 1.0], [0.25, 0.75]])  # of which one looks like shares
    assert torch.equal(wanted.shares(logits), logits.softmax(1))
    assert torch.equal(wanted.shares(logits[1:]), logits[1:].softmax(1))


def test_guided_backpropagation_of_a_network_worked_by_hand() -> None:
    # Two inputs, hidden h = relu(W x), score = v h. x = (1, 2), so W x = (5, -1, 2), and the
    # gates of h are (1, 0, 1). Back at h comes v = (2, 3, -4), of which 2 alone is positive and
    # passes a gate: the map is 2 W[0] = (2, 4). The plain gradient is 2 W[0] - 4 W[2] = (-6, 4).
    module = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 2.0], [1.0, -1.0], [2.0, 0.0]]))
        module[2].weight.copy_(torch.tensor([[2.0, 3.0, -4.0]]))
    x = torch.tensor([[1.0, 2.0]])
    assert made(saliency.guided_backprop, module, x).maps.tolist() == [[2.0, 4.0]]
    assert made(saliency.input_gradient, module, x).maps.tolist() == [[-6.0, 4.0]]


class Called(nn.Module):
    """One network, in each spelling of its ReLUs."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)
        self.act = nn.ReLU(inplace=spelling == "one module, in place")
        self.spelling = spelling

    def relu(self, x: Tensor) -> Tensor:
        call: dict[str, Callable[[], Tensor]] = {
            **dict.fromkeys(["one module", "one module, in place"], lambda: self.act(x)),
            "F.relu": lambda: functional.relu(x),
            "F.relu in place": lambda: functional.relu(x, inplace=True),
            "F.relu_": lambda: functional.relu_(x),
            "torch.relu": lambda: torch.relu(x),
            "torch.relu_": lambda: torch.relu_(x),
            "Tensor.relu": x.relu,
            "Tensor.relu_": x.relu_,
            "clamp": lambda: x.clamp(min=0),
            "clamp by position": lambda: x.clamp(0),
            "clamp_": lambda: x.clamp_(min=0),
            "torch.clamp_min": lambda: torch.clamp_min(x, 0.0),
            "threshold": lambda: functional.threshold(x, 0, 0),
            "hardtanh": lambda: functional.hardtanh(x, 0.0, 1e9),
            "aten": lambda: torch.ops.aten.relu(x),
        }
        if self.spelling == "in place, unused":
            x.relu_()
            return x
        return call[self.spelling]()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.b(self.relu(self.a(x)))).mean((2, 3))


def guided_by_hooks(module: nn.Module, x: Tensor) -> Tensor:
    """Guided backpropagation by a full backward hook on each nn.ReLU, none of which is re-used."""
    module = copy.deepcopy(module)
    for child in module.modules():
        if isinstance(child, nn.ReLU):
            child.inplace = False
            child.register_full_backward_hook(lambda _, grads, __: (grads[0].clamp(min=0),))
    leaf = x.clone().requires_grad_()
    scores = module(leaf)
    (found,) = torch.autograd.grad(scores.max(1).values.sum(), leaf)
    return found


SPELLINGS = [
    *("one module", "one module, in place", "F.relu", "F.relu in place", "F.relu_", "torch.relu"),
    *("torch.relu_", "Tensor.relu", "Tensor.relu_", "clamp", "clamp by position", "clamp_"),
    *("torch.clamp_min", "threshold", "hardtanh", "aten", "in place, unused"),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_guided_backpropagation_knows_each_spelling_of_a_relu(spelling: str) -> None:
    module = Called(spelling).eval()
    apart = nn.Sequential(module.a, nn.ReLU(), module.b, nn.ReLU(), Mean()).eval()
    got = made(saliency.guided_backprop, module).maps
    assert torch.allclose(got, guided_by_hooks(apart, X), atol=1e-7)
    assert got.any()
    assert not torch.allclose(got, made(saliency.input_gradient, module).maps, atol=1e-4)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def test_guided_backpropagation_of_alexnet_is_that_of_backward_hooks() -> None:
    torch.manual_seed(0)
    module = torchvision.models.alexnet(weights=None).eval()
    x = torch.randn(2, 3, 80, 64)
    got = made(saliency.guided_backprop, module, x).maps
    wanted = guided_by_hooks(module, x)
    assert torch.allclose(got, wanted, atol=1e-6 * wanted.abs().max().item())
    assert got.any()
    assert not torch.allclose(got, made(saliency.input_gradient, module, x).maps)


def test_a_relu6_passes_back_what_lies_between() -> None:
    module = nn.Sequential(nn.Linear(1, 3, bias=False), nn.ReLU6(), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[3.0], [7.0], [-1.0]]))
        module[2].weight.copy_(torch.tensor([[1.0, 1.0, 1.0]]))
    assert made(saliency.guided_backprop, module, torch.ones(1, 1)).maps.item() == 3.0


@pytest.mark.parametrize(
    "kind", ["GELU", "SiLU", "Hardswish", "Sigmoid", "Tanh", "LeakyReLU", "ELU", "Mish", "Softplus"]
)
def test_guided_backpropagation_without_a_relu_is_refused(kind: str) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), getattr(nn, kind)(), Mean())
    with pytest.raises(ModelError, match=r"is made for ReLU, and net has none .* its activations"):
        made(saliency.guided_backprop, module)
    with pytest.raises(ModelError, match="net has none that leads .* would be the plain gradient"):
        made(saliency.guided_backprop, nn.Sequential(nn.Conv2d(3, 4, 3), Mean()))


def test_other_activations_beside_relus_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.SiLU(), Mean())
    run = Scored(module, "net")
    with caplog.at_level(logging.WARNING, "embedx"), saliency.ready(module):
        for _ in range(2):
            saliency.guided_backprop(run, X, None)
    (said,) = caplog.messages
    assert (
        "activations beside its 1 ReLUs, through which gradients go back as they are: silu (1)"
        in said
    )


def test_a_relu_that_does_not_lead_from_the_input_is_none() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3)) * self.gate.relu()

    with pytest.raises(ModelError, match="has none that leads"):
        made(saliency.guided_backprop, Gated())


# --------------------------------------------------------------------------- Grad-CAM


def at_layer(module: nn.Sequential, last: int, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What ``module[last]`` gives, and the gradient of the scores there, by autograd alone."""
    with torch.enable_grad():
        a = X.clone()
        for child in module[: last + 1]:
            a = child(a)
        a = a.detach().clone().requires_grad_()
        b = a.clone()
        for child in module[last + 1 :]:
            b = child(b)
        (g,) = torch.autograd.grad(b.gather(1, targets[:, None]).sum(), a)
    return a.detach(), g


@pytest.mark.parametrize("last", [0, 3, 4])
@pytest.mark.parametrize("targets", [None, torch.tensor([1, 1, 3])])
def test_grad_cam_is_its_formula(last: int, targets: Tensor | None) -> None:
    module = small()
    at = classes(module) if targets is None else targets
    a, g = at_layer(module, last, at)
    layer = layer_of(module, str(last))
    plain = made(saliency.gradcam, module, targets=targets, layer=layer)
    for i in range(3):
        total = torch.zeros(a.shape[2:])
        for k in range(a.shape[1]):
            total += g[i, k].mean() * a[i, k]
        assert torch.allclose(plain.maps[i], total.clamp(min=0), atol=1e-6)
    assert torch.equal(plain.targets, at)
    plus = made(saliency.gradcam, module, targets=targets, layer=layer, plus_plus=True)
    for i in range(3):
        total = torch.zeros(a.shape[2:])
        for k in range(a.shape[1]):
            weight = 0.0
            for g_ij in g[i, k].flatten().tolist():
                below = 2 * g_ij**2 + a[i, k].sum().item() * g_ij**3
                weight += (g_ij**2 / below if below else 0.0) * max(g_ij, 0.0)
            total += weight * a[i, k]
        assert torch.allclose(plus.maps[i], total.clamp(min=0), rtol=1e-3, atol=1e-5)
    assert plain.maps.any()
    assert plus.maps.any()


def test_grad_cam_at_the_tokens_and_at_channels_last_is_that_of_their_maps() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 96)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), num_classes=7).eval()
    a, g = both(vit, vit.blocks[11].norm1, x)
    a, g = (one[:, 1:].reshape(2, 4, 6, 192).permute(0, 3, 1, 2) for one in (a, g))
    layer = layer_of(vit, "blocks.11.norm1", x)
    wanted = (g.mean((2, 3), keepdim=True) * a).sum(1).clamp(min=0)
    got = made(saliency.gradcam, vit, x, layer=layer).maps
    assert got.shape == (2, 4, 6)
    assert torch.allclose(got, wanted, atol=1e-6)
    with saliency.ready(vit):
        network = saliency.look(vit, x[:1], title="vit")
        # After the last attention the class token alone leads to the scores.
        assert saliency.last_layer(Scored(vit, "vit"), network, x[:1]) == "blocks.11.norm1"
    swin = torchvision.models.swin_t(weights=None, num_classes=7).eval()
    a, g = (one.permute(0, 3, 1, 2) for one in both(swin, swin.features[5], x))
    got = made(saliency.gradcam, swin, x, layer=layer_of(swin, "features.5", x)).maps
    assert got.shape == (2, 4, 6)
    assert torch.allclose(got, (g.mean((2, 3), keepdim=True) * a).sum(1).clamp(min=0), atol=1e-6)


def both(module: nn.Module, child: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a child gives and its gradient, by a hook of the test's own."""
    kept: list[Tensor] = []
    handle = child.register_forward_hook(lambda _, __, output: kept.append(output))
    scores = module(x)
    handle.remove()
    (g,) = torch.autograd.grad(scores.max(1).values.sum(), kept[0])
    return kept[0].detach(), g


def test_the_last_layer_of_a_network_is_before_its_pooling() -> None:
    for name, wanted in (
        ("resnet18", "layer4"),
        ("vgg11", "features.19"),
        ("alexnet", "features.11"),
    ):
        torch.manual_seed(0)
        module = torchvision.models.get_model(name, weights=None, num_classes=5).eval()
        x = torch.randn(1, 3, 96, 64)
        with saliency.ready(module):
            network = saliency.look(module, x, title=name)
            assert saliency.last_layer(Scored(module, name), network, x) == wanted


def test_what_is_no_feature_map_or_leads_nowhere_is_refused() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aside, self.main = nn.Conv2d(3, 2, 3), nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.aside(x)
            return self.main(x).mean((2, 3))

    with pytest.raises(
        LayerError, match=r"layer 7 gives \(1, 4\) .* which are no feature maps; some"
    ):
        layer_of(small(), "7")
    module = Aside()
    with pytest.raises(LayerError, match=r"aside.* lead"):
        made(saliency.gradcam, module, layer=layer_of(module, "aside"))
    flat = nn.Sequential(nn.Flatten(), nn.Linear(288, 4))
    network = saliency.look(flat, X[:1], title="net")
    with pytest.raises(LayerError, match="net has no layer that gives feature maps"):
        saliency.last_layer(Scored(flat, "net"), network, X[:1])


# --------------------------------------------------------------------------- captum


def test_integrated_gradients_add_up_to_the_difference_of_the_scores() -> None:
    pytest.importorskip("captum")
    module = small()
    baseline = torch.full((1, 3, 12, 8), 0.2)
    got = made(saliency.integrated_gradients, module, baseline=baseline, steps=200, batch_size=4)
    at = classes(module)[:, None]
    with torch.no_grad():
        gap = (module(X.clone()) - module(baseline.clone())).gather(1, at)[:, 0]
    assert torch.allclose(got.maps.flatten(1).sum(1), gap, rtol=0.02)
    assert (got.columns["completeness_error"] < 0.02).all()
    few = made(saliency.integrated_gradients, module, baseline=baseline, steps=2, batch_size=4)
    missed = (few.maps.flatten(1).sum(1) - gap).abs() / gap.abs()
    assert torch.allclose(few.columns["completeness_error"], missed, rtol=1e-3, atol=1e-6)
    assert missed.max() > 0.02


def test_integrated_gradients_of_what_is_linear_are_weight_times_difference() -> None:
    pytest.importorskip("captum")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(288, 4))
    baseline = torch.randn(1, 3, 12, 8)
    got = made(saliency.integrated_gradients, module, baseline=baseline, steps=5, batch_size=2)
    weight = module[1].weight.detach()[got.targets].reshape(X.shape)
    assert torch.allclose(got.maps, weight * (X - baseline), atol=1e-5)


def test_occlusion_is_brute_force() -> None:
    pytest.importorskip("captum")
    module = small()
    baseline = torch.randn(1, 3, 12, 8)
    got = made(saliency.occlusion, module, baseline=baseline, window=4, stride=3, batch_size=5)
    at = classes(module)
    total, times = torch.zeros(3, 12, 8), torch.zeros(12, 8)
    with torch.no_grad():
        before = module(X.clone()).gather(1, at[:, None])[:, 0]
        for top in range(0, 12, 3):
            for left in range(0, 8, 3):
                if top - 3 + 4 >= 12 or left - 3 + 4 >= 8:  # the one before has reached the end
                    continue
                hidden = X.clone()
                place = (slice(top, top + 4), slice(left, left + 4))
                hidden[:, :, *place] = baseline[:, :, *place]
                fall = before - module(hidden).gather(1, at[:, None])[:, 0]
                total[:, *place] += fall[:, None, None]
                times[place] += 1
    assert (times > 0).all()
    assert torch.allclose(got.maps, total / times, atol=1e-6)
    assert got.maps.any()


# --------------------------------------------------------------------------- sanity


EACH: dict[str, Callable[..., Maps]] = {
    "input_gradient": lambda m: made(saliency.input_gradient, m),
    "guided_backprop": lambda m: made(saliency.guided_backprop, m),
    "gradcam": lambda m: made(saliency.gradcam, m, layer=layer_of(m, "4")),
    "gradcam++": lambda m: made(saliency.gradcam, m, layer=layer_of(m, "4"), plus_plus=True),
    "integrated_gradients": lambda m: made(
        saliency.integrated_gradients,
        m,
        baseline=torch.zeros(1, 3, 12, 8),
        steps=5,
        batch_size=8,
    ),
    "occlusion": lambda m: made(
        saliency.occlusion, m, baseline=torch.zeros(1, 3, 12, 8), window=4, stride=2, batch_size=8
    ),
}


@pytest.mark.parametrize("method", EACH)
def test_a_map_changes_as_weights_are_made_random_layer_by_layer(method: str) -> None:
    """The sanity check of Adebayo et al. 2018, arXiv:1810.03292, from the last layer on."""
    module = small()
    before = EACH[method](module).maps
    assert torch.equal(EACH[method](module).maps, before)  # the same each time
    for layer in ("7", "3", "0"):
        torch.manual_seed(int(layer) + 100)
        module.get_submodule(layer).reset_parameters()  # type: ignore[operator]
        after = EACH[method](module).maps
        scale = before.abs().max()
        assert (after - before).abs().max() > 0.05 * scale, layer
        before = after


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_bit_identical(method: str, fails: bool) -> None:
    module = small()
    module[0].weight.requires_grad_(False)
    module[3].weight.grad = torch.ones_like(module[3].weight)
    module.train()
    module.insert(4, nn.BatchNorm2d(5))
    module[4].eval()
    state = copy.deepcopy(module.state_dict())
    grads = {name: copy.deepcopy(p.grad) for name, p in module.named_parameters()}
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    modes = [child.training for child in module.modules()]

    def hooked() -> int:
        return sum(
            len(c._forward_hooks) + len(c._forward_pre_hooks) + len(c._backward_hooks)
            for c in module.modules()
        )

    if fails:
        n_calls = 0

        def raise_late(*_: Any) -> None:
            nonlocal n_calls
            n_calls += 1
            if n_calls > (2 if method.startswith("gradcam") else 0):
                raise RuntimeError("late")

        module[7].register_forward_hook(raise_late)
        n_hooks = hooked()
        with pytest.raises(ModelError, match="late"):
            EACH[method](module)
    else:
        n_hooks = hooked()
        EACH[method](module)
    assert hooked() == n_hooks
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert {name: p.requires_grad for name, p in module.named_parameters()} == flags
    for name, parameter in module.named_parameters():
        was = grads[name]
        assert (parameter.grad is None) == (was is None)
        assert was is None or torch.equal(parameter.grad, was)  # type: ignore[arg-type]
    assert [child.training for child in module.modules()] == modes


def test_it_works_under_no_grad_and_inference_mode() -> None:
    module = small()
    wanted = made(saliency.input_gradient, module).maps
    with torch.no_grad():
        assert torch.equal(made(saliency.input_gradient, module).maps, wanted)
    with torch.inference_mode():
        assert torch.equal(made(saliency.input_gradient, module).maps, wanted)


def test_a_model_without_scores_or_gradient_and_a_class_that_is_none_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"class scores of shape \(n, classes\), and net gives"):
        made(saliency.input_gradient, nn.Conv2d(3, 2, 3))
    with pytest.raises(ConfigError, match=r"target=4 .* 0 to 3"):
        made(saliency.input_gradient, small(), targets=torch.tensor([0, 4, 1]))

    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().mean((2, 3))

    with pytest.raises(ModelError, match="no gradient comes from the scores of net"):
        made(saliency.input_gradient, Detached())


def test_maps_of_one_sample_alone_are_those_of_it_among_others() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("levit_128s", pretrained=False, num_classes=7).eval()
    for child in model.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 224, 224)
    together = made(saliency.input_gradient, model, x).maps
    alone = made(saliency.input_gradient, model, x[:1]).maps
    assert together.any()
    assert torch.allclose(alone[0], together[0], rtol=1e-3, atol=1e-4 * together.abs().max().item())


@pytest.mark.parametrize(("size", "channels"), [((32, 32), 32), ((24, 24), 24), ((40, 32), 50)])
def test_as_many_channels_as_rows_and_columns_are_told_from_them(
    size: tuple[int, int], channels: int
) -> None:
    class Block(nn.Module):  # whose last layer is none that is known
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, channels, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).clamp(min=0)  # type: ignore[no-any-return]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.head = Block(), nn.Linear(channels, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(x).mean((2, 3)))  # type: ignore[no-any-return]

    net, x = Net().eval(), torch.randn(2, 3, *size)
    for name, child in (("block", net.block), ("block.conv", net.block.conv)):
        a, g = both(net, child, x)
        wanted = (g.mean((2, 3), keepdim=True) * a).sum(1).clamp(min=0)
        got = made(saliency.gradcam, net, x, layer=layer_of(net, name, x)).maps
        assert torch.allclose(got, wanted, atol=1e-6)


def test_channels_that_cannot_be_told_from_rows_are_refused() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh().contiguous()

    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Turned(), nn.Flatten(), nn.Linear(4096, 4))
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(LayerError, match="which axis is that of the channels cannot be told"):
        layer_of(net, "1", x)
