"""Which parts of what enters a network its score of a class depends on: maps of each sample."""

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from embedx import grids, hooks
from embedx.errors import (
    EmbedxError,
    LayerError,
    ModelError,
    first_line,
    listed,
    missing_extra,
    number_of,
)
from embedx.grids import Grid
from embedx.objectives import require_class, scores_of
from embedx.passes import RightGradients, frozen, run_model
from embedx.points import Point, parse_point
from embedx.pooling import channels_axis

log = logging.getLogger("embedx")

SALIENCY_REVISION = 1  # raised when a map changes; part of every file's id

ON_LAYER = ("gradcam", "gradcam++")  # these give maps of the size of a layer
SIGNED = ("integrated_gradients", "occlusion")  # of which a value below 0 speaks against the class
INCOMPLETE_FROM = 0.05


@dataclasses.dataclass(frozen=True)
class Maps:
    """The maps of a batch.

    Attributes:
        maps: Shape ``(n, c, h, w)`` of what enters, or ``(n, h, w)``, float32 on the CPU.
        targets: Class of each sample, shape ``(n,)``.
        scores: Score of that class, shape ``(n,)``.
        shares: Its softmax, shape ``(n,)``; the score where scores are shares already, and NaN of a
            single score, whose softmax is always 1.
        columns: Further figures, shape ``(n,)``, by name.
    """

    maps: Tensor
    targets: Tensor
    scores: Tensor
    shares: Tensor
    columns: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


class Scored:
    """A network as a function from what enters to class scores ``(n, classes)``.

    Args:
        module: The network.
        title: What the user calls it.
    """

    def __init__(self, module: nn.Module, title: str) -> None:
        self.module = module
        self.title = title
        self._said: set[str] = set()
        self._gives_shares: bool | None = None

    def say_once(self, message: str) -> None:
        """Warn of what is the same for every batch."""
        if message not in self._said:
            self._said.add(message)
            log.warning("%s", message)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Run it on a copy: its first layer may work in place.

        Raises:
            ModelError: It fails.
            ShapeError: What it gives is no score of each class.
        """
        output = run_model(self.module, inputs.clone(), title=self.title)
        return scores_of(output, n=len(inputs), title=self.title)

    def shares(self, scores: Tensor) -> Tensor:
        """The softmax of scores, or the scores where those of the first samples are shares already.

        It is told once, by the first batch that has finite scores, and holds for all others: what
        a sample gets does not hang on those beside it.

        Args:
            scores: Shape ``(n, classes)``.

        Returns:
            Shape ``(n, classes)``; NaN of a single score, whose softmax is always 1.
        """
        finite = scores[scores.isfinite().all(1)]
        if self._gives_shares is None and len(finite):
            add_up = (finite.sum(1) - 1).abs() < 1e-3
            self._gives_shares = bool(((finite >= 0).all(1) & add_up).all())
        if scores.shape[1] == 1:
            return torch.full_like(scores, torch.nan)
        return scores if self._gives_shares else scores.softmax(1)

    def chosen(self, scores: Tensor, targets: Tensor | None) -> Tensor:
        """The class of each sample: its target, or the one with the highest score.

        Raises:
            ConfigError: There is no such class.
        """
        if _are_equal(scores):
            self.say_once(
                f"all {scores.shape[1]:,} scores of {self.title} are equal, as with a head of "
                "zeros: they do not say which class it is, nor does a map"
            )
        if targets is None:
            return scores.detach().argmax(1)
        for target in set(targets.tolist()):
            require_class(target, n_classes=scores.shape[1], key="target", title=self.title)
        return targets.to(scores.device)


def _are_equal(scores: Tensor) -> bool:
    """Whether no class of any sample has another score than the others."""
    return scores.shape[1] > 1 and bool((scores == scores[:, :1]).all())


def _told(run: Scored, maps: Tensor, scores: Tensor, targets: Tensor, **columns: Tensor) -> Maps:
    scores, targets = scores.detach(), targets.detach()
    shares = run.shares(scores)
    at = targets[:, None]
    return Maps(
        maps.detach().to("cpu", torch.float32),
        targets.cpu(),
        scores.gather(1, at)[:, 0].to("cpu", torch.float32),
        shares.gather(1, at)[:, 0].to("cpu", torch.float32),
        {name: column.detach().to("cpu", torch.float32) for name, column in columns.items()},
    )


@contextlib.contextmanager
def ready(module: nn.Module) -> Iterator[None]:
    """Gradients with respect to what enters, and to nothing else, whatever the caller has set.

    Parameters need no gradient meanwhile, so none is kept in their ``.grad``; convolutions of a GPU
    are the same each time, and so are gradients of one sample alone.
    """
    backend: Any = torch.backends.cudnn
    before = backend.deterministic, backend.benchmark
    try:
        backend.deterministic, backend.benchmark = True, False
        with (
            frozen(module),
            RightGradients(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        backend.deterministic, backend.benchmark = before


# --------------------------------------------------------------------------- gradients


def input_gradient(run: Scored, inputs: Tensor, targets: Tensor | None) -> Maps:
    """The gradient of the score with respect to what enters.

    Args:
        run: The network.
        inputs: Shape ``(n, ...)``, floating point.
        targets: Shape ``(n,)``; None for the class that is predicted.

    Returns:
        Maps of the shape of ``inputs``.

    Raises:
        ModelError: The score has no gradient.

    References:
        Simonyan, Vedaldi, Zisserman 2014, Deep Inside Convolutional Networks, arXiv:1312.6034.
    """
    leaf = inputs.detach().clone().requires_grad_()
    scores = run(leaf)
    classes = run.chosen(scores, targets)
    return _told(run, _gradient(run, scores, classes, leaf), scores, classes)


def _gradient(run: Scored, scores: Tensor, classes: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of the scores of some classes at what entered.

    Raises:
        ModelError: There is none.
    """
    total = scores.gather(1, classes[:, None]).sum()
    gradient: Tensor | None = None
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, [leaf], allow_unused=True)
    if gradient is None:
        raise ModelError(
            f"no gradient comes from the scores of {run.title} to what enters it: it runs without "
            "gradients (torch.no_grad(), .detach()) or through whole numbers; method=occlusion "
            "needs none"
        )
    return gradient


class _GuidedReLU(torch.autograd.Function):
    """A ReLU (cut off at ``top``) through which only positive gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, top: float, in_place: bool) -> Tensor:
        passes = (x > 0) & (x < top)
        ctx.save_for_backward(passes)
        if not in_place:
            return x.clamp(0, top)
        ctx.mark_dirty(x)
        return x.clamp_(0, top)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (passes,) = ctx.saved_tensors
        return gradients[0].clamp(min=0) * passes, None, None


# Other activations, by the functions that compute them; by no means all of these are gates.
_OTHERS = frozenset(
    [
        *("gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "prelu", "rrelu"),
        *("hardswish", "hardtanh", "hardsigmoid", "softplus", "softsign", "logsigmoid"),
        *("tanh", "sigmoid", "glu", "hardshrink", "softshrink", "tanhshrink", "threshold"),
    ]
)


class _Guided(TorchFunctionMode):
    """Whatever a pass calls that is a ReLU becomes a guided one; no module is touched.

    Attributes:
        n_guided: How many calls were.
        others: How often other activations were called, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_guided = 0
        self.others: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", "")).removesuffix(".default")
        found = _as_relu(name, args, kwargs)
        if found is not None:
            self.n_guided += 1
            return _GuidedReLU.apply(*found)
        result = func(*args, **kwargs)
        plain = name.strip("_")
        if plain in _OTHERS and isinstance(result, Tensor) and result.requires_grad:
            self.others[plain] += 1
        return result


def _as_relu(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, float, bool] | None:
    """What a call of that function does, where it is that of a ReLU: to what, up to, in place."""
    plain = name.strip("_")
    if plain not in _RELUS:
        return None
    given = {**dict(zip(_RELUS[plain], args, strict=False)), **kwargs}
    x = given.get("input", given.get("self"))
    if not isinstance(x, Tensor) or not x.requires_grad or not torch.is_grad_enabled():
        return None
    in_place = name.endswith("_") or bool(given.get("inplace", False))
    top = float("inf")
    if plain in ("clamp", "clip", "clamp_min"):
        low, high = given.get("min"), given.get("max")
        if not _is_number(low, 0) or isinstance(high, Tensor):
            return None
        top = float("inf") if high is None else float(high)
    elif plain == "hardtanh":
        if not _is_number(given.get("min_val", -1.0), 0):
            return None
        top = float(given.get("max_val", 1.0))
    elif plain == "threshold":
        if not (_is_number(given.get("threshold"), 0) and _is_number(given.get("value"), 0)):
            return None
    elif plain == "relu6":
        top = 6.0
    return x, top, in_place


_RELUS = {
    "relu": ("input", "inplace"),
    "relu6": ("input", "inplace"),
    "hardtanh": ("input", "min_val", "max_val", "inplace"),
    "threshold": ("input", "threshold", "value", "inplace"),
    "clamp": ("input", "min", "max"),
    "clip": ("input", "min", "max"),
    "clamp_min": ("input", "min"),
}


def _is_number(value: Any, wanted: float) -> bool:
    return isinstance(value, (int, float)) and value == wanted


def guided_backprop(run: Scored, inputs: Tensor, targets: Tensor | None) -> Maps:
    """The gradient at what enters, where each ReLU lets only positive gradients back.

    A ReLU is what computes ``max(x, 0)``, as a module, a function or a method, in place or not, as
    often as it is called; one that is cut off above too, such as ReLU6, passes back what lies
    between. Other activations pass back their own gradient, which is said.

    Args:
        run: The network.
        inputs: Shape ``(n, ...)``, floating point.
        targets: Shape ``(n,)``; None for the class that is predicted.

    Returns:
        Maps of the shape of ``inputs``.

    Raises:
        ModelError: The pass has no ReLU: the map would be the plain gradient.

    References:
        Springenberg, Dosovitskiy, Brox, Riedmiller 2015, Striving for Simplicity, arXiv:1412.6806.
    """
    with _Guided() as guided:
        leaf = inputs.detach().clone().requires_grad_()
        scores = run(leaf)
    others = ", ".join(f"{name} ({n})" for name, n in guided.others.most_common())
    if not guided.n_guided:
        instead = f"; its activations are {others}" if others else ""
        raise ModelError(
            f"guided backpropagation is made for ReLU, and {run.title} has none that leads from "
            f"what enters to the scores{instead}: the map would be the plain gradient, which is "
            "method=input_gradient"
        )
    classes = run.chosen(scores, targets)
    gradient = _gradient(run, scores, classes, leaf)
    if others:
        run.say_once(
            f"{run.title} has activations beside its {guided.n_guided} ReLUs, through which "
            f"gradients go back as they are: {others}"
        )
    return _told(run, gradient, scores, classes)


# --------------------------------------------------------------------------- layers


@dataclasses.dataclass(frozen=True)
class Layer:
    """A capture point whose maps are looked at.

    Attributes:
        point: The point.
        grid: Where its maps are.
        width: How many there are.
    """

    point: Point
    grid: Grid
    width: int


def gradcam(
    run: Scored, inputs: Tensor, targets: Tensor | None, *, layer: Layer, plus_plus: bool = False
) -> Maps:
    """Grad-CAM, or Grad-CAM++, at a layer.

    With the feature maps A and the gradient g of the score at them: Grad-CAM weighs each map by the
    mean of its g. Grad-CAM++ weighs it by the sum of ``alpha * relu(g)`` with
    ``alpha = g^2 / (2 g^2 + sum(A) g^3)``, as of the exponential of the score, whose own factor
    scales a map and is left out. Both are the ReLU of the weighted sum of the maps.

    Args:
        run: The network.
        inputs: Shape ``(n, ...)``.
        targets: Shape ``(n,)``; None for the class that is predicted.
        layer: The layer.
        plus_plus: Whether it is Grad-CAM++.

    Returns:
        Maps ``(n, h, w)`` of the size of the layer's own.

    Raises:
        LayerError: The layer does not lead to the score.

    References:
        Selvaraju et al. 2017, Grad-CAM, arXiv:1610.02391. Chattopadhay et al. 2018, Grad-CAM++,
        arXiv:1710.11063.
    """
    scores, classes, activation, gradient = _at_layer(run, inputs, targets, layer.point)
    maps, g = layer.grid.maps(activation), layer.grid.maps(gradient)
    if plus_plus:
        total = maps.sum((2, 3), keepdim=True)
        below = 2 * g**2 + total * g**3
        alpha = torch.where(below != 0, g**2 / torch.where(below != 0, below, 1), 0)
        weights = (alpha * g.relu()).sum((2, 3))
    else:
        weights = g.mean((2, 3))
    found = torch.einsum("nc,nchw->nhw", weights, maps).relu()
    return _told(run, found, scores, classes)


def _at_layer(
    run: Scored, inputs: Tensor, targets: Tensor | None, point: Point
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, classes, and what a layer gave with its gradient."""
    gradient = dataclasses.replace(point, what=_GRADIENT_OF[point.what])
    with hooks.Capture(run.module, [point, gradient], only_here=True) as got:
        # What enters needs a gradient too, so that it comes by all ways that lead from the layer.
        scores = run(inputs.detach().clone().requires_grad_())
        activation = got[point.name]
        classes = run.chosen(scores, targets)
        total = scores.gather(1, classes[:, None]).sum()
        try:
            if total.requires_grad:
                got.backward(total)
            return scores, classes, activation, got[gradient.name]
        except LayerError:
            raise LayerError(
                f"layer {point.name} does not lead to the scores of {run.title}, so that it has no "
                "gradient; choose one that does, see: python -m embedx layers model=..."
            ) from None


_GRADIENT_OF = {"output": "grad", "input": "grad_input"}


@dataclasses.dataclass(frozen=True)
class Network:
    """What one pass shows of a network's feature maps.

    Attributes:
        seen: Its layers that give feature maps, in order.
        patches: Into which grids it cuts the picture, by the number of channels.
        picture: Height and width of what enters.
        calls: How often each layer ran.
        channels: Where those of a layer come, as far as that is known, by its name.
    """

    seen: Sequence[grids.Seen]
    patches: Mapping[int, tuple[int, int]]
    picture: tuple[int, int]
    calls: Mapping[str, int]
    channels: Mapping[str, grids.Channels]


def look(module: nn.Module, inputs: Tensor, *, title: str) -> Network:
    """One pass of one picture, for the layers that give feature maps.

    Args:
        module: The network.
        inputs: Shape ``(1, c, h, w)``.
        title: What the user calls it.

    Raises:
        ModelError: It fails.
    """
    picture = (inputs.shape[2], inputs.shape[3])
    fired: list[tuple[str, Any]] = []
    note = hooks.watched(module, left=lambda name, output: fired.append((name, output)))
    with note, torch.no_grad():
        try:  # convolutions pass on how a picture lies in memory, which tells their axes
            run_model(module, inputs.clone(memory_format=torch.channels_last), title=title)
        except ModelError:  # its code may want another layout
            fired.clear()
            run_model(module, inputs.clone(), title=title)
    modules = dict(module.named_modules())
    of_layers = ((name, grids.channels_of(modules[name], output)) for name, output in fired)
    return Network(
        grids.seen_in(module, fired, n=1, picture=picture),
        grids.patches_in(module, fired, n=1, picture=picture),
        picture,
        Counter(name for name, _ in fired),
        {name: channels for name, channels in of_layers if channels is not None},
    )


def as_layer(network: Network, point: Point, activation: Tensor, *, n: int) -> Layer:
    """A capture point with its grid.

    Raises:
        LayerError: What it gives is no set of feature maps.
    """
    grid = grids.grid_of(
        activation,
        n=n,
        picture=network.picture,
        patches=network.patches,
        channels=network.channels.get(point.layer) if point.what == "output" else None,
    )
    if grid is None:
        names = [one.name for one in network.seen if not one.is_pooled]
        others = f"; some that do: {listed(names[::-1], most=4)}" if names else ""
        what = "which are no feature maps"
        if channels_axis(activation, picture=network.picture) is None:
            what = "and which axis is that of the channels cannot be told"
        raise LayerError(
            f"layer {point.name} gives {tuple(activation.shape)} for "
            f"{number_of(n, 'picture', 'pictures')} of {network.picture[0]}x{network.picture[1]} "
            f"px, {what}{others}"
        )
    width = activation.shape[1] if grid.form == "first" else activation.shape[-1]
    return Layer(point, grid, width)


def of_globs(
    run: Scored, network: Network, points: Sequence[Point], inputs: Tensor
) -> dict[Point, list[Point]]:
    """What gives feature maps of each point of a glob: it, or each call of a layer by itself.

    Args:
        run: The network.
        network: What one pass shows of it.
        points: The points.
        inputs: Of one picture.
    """
    each: dict[Point, list[Point]] = {}
    for point in points:
        calls = network.calls.get(point.layer, 0)
        is_each = calls > 1 and point.call is None
        each[point] = [
            dataclasses.replace(point, call=call) if is_each else point
            for call in range(calls if is_each else min(calls, 1))
        ]
    found: dict[Point, list[Point]] = {point: [] for point in points}
    every = [one for several in each.values() for one in several]
    with hooks.Capture(run.module, every, only_here=True) as got, torch.no_grad():
        run_model(run.module, inputs.clone(), title=run.title)
        for point, several in each.items():
            for one in several:
                with contextlib.suppress(LayerError):  # it gives no tensor, or no maps
                    as_layer(network, one, got[one.name], n=1)
                    found[point].append(one)
    return found


def no_layer(title: str) -> LayerError:
    """What to say of a network without feature maps."""
    return LayerError(
        f"{title} has no layer that gives feature maps of the picture, as far as one pass shows; "
        "method=input_gradient needs none"
    )


def last_layer(run: Scored, network: Network, inputs: Tensor) -> str:
    """The last feature maps before pooling, or the last tokens of a picture with a gradient.

    Of what comes after the last attention of a network with a class token, that token alone leads
    to the scores.

    Raises:
        LayerError: There are none, or no gradient comes to any of them.
    """
    seen = [one for one in network.seen if not one.is_pooled]
    if not seen:
        raise no_layer(run.title)
    last = seen[-1]
    if last.grid.form != "tokens" or not last.grid.n_prefix:
        return last.name
    alike = [one for one in seen if one.shape == last.shape]
    points = [dataclasses.replace(parse_point(one.name), what="grad") for one in alike]
    with hooks.Capture(run.module, points, only_here=True) as got:
        scores = run(inputs.detach().clone().requires_grad_())
        got.backward(scores.max(1).values.sum())
        for one, point in zip(reversed(alike), reversed(points), strict=True):
            with contextlib.suppress(LayerError):  # it does not lead to the scores
                if one.grid.maps(got[point.name]).any():
                    return one.name
    if _are_equal(scores):
        raise LayerError(
            f"no gradient comes from the scores of {run.title} to any layer, for all "
            f"{scores.shape[1]:,} are equal, as with a head of zeros: no map would show a thing"
        )
    raise LayerError(
        f"no gradient comes from the scores of {run.title} to the tokens of the picture at any "
        f"layer like {last.name}; name one that has some with layers=NAME"
    )


# --------------------------------------------------------------------------- by captum


def integrated_gradients(
    run: Scored,
    inputs: Tensor,
    targets: Tensor | None,
    *,
    baseline: Tensor,
    steps: int,
    batch_size: int,
) -> Maps:
    """The gradient along the straight way from a baseline, times the difference to it.

    The values of a map add up to the difference of the scores. By how much they miss it, as a share
    of that difference (or of a thousandth of the score, where a picture is nearly the baseline and
    there is hardly any), is the column ``completeness_error``.

    Args:
        run: The network.
        inputs: Shape ``(n, ...)``, floating point.
        targets: Shape ``(n,)``; None for the class that is predicted.
        baseline: Shape ``(1, ...)``.
        steps: Points on the way, by Gauss-Legendre quadrature.
        batch_size: Of them in a pass.

    Returns:
        Maps of the shape of ``inputs``.

    Raises:
        DependencyError: captum is not installed.

    References:
        Sundararajan, Taly, Yan 2017, Axiomatic Attribution for Deep Networks, arXiv:1703.01365.
    """
    attr = require_captum("method=integrated_gradients")
    with torch.no_grad():
        scores = run(inputs)
        classes = run.chosen(scores, targets)
        at = classes[:, None]
        gap = (scores.gather(1, at) - run(baseline.expand_as(inputs)).gather(1, at))[:, 0]
    with _in_our_words(run):
        found = attr.IntegratedGradients(run).attribute(
            inputs,
            baselines=baseline.expand_as(inputs),
            target=classes,
            n_steps=steps,
            method="gausslegendre",
            internal_batch_size=max(batch_size, len(inputs)),
        )
    missed = (found.flatten(1).sum(1) - gap).abs()
    least = 1e-3 * scores.gather(1, at)[:, 0].abs()
    error = missed / torch.maximum(gap.abs(), least).clamp(min=torch.finfo(gap.dtype).tiny)
    return _told(run, found, scores, classes, completeness_error=error)


def occlusion(
    run: Scored,
    inputs: Tensor,
    targets: Tensor | None,
    *,
    baseline: Tensor,
    window: int,
    stride: int,
    batch_size: int,
) -> Maps:
    """How much the score falls where a square is put over a part of the picture.

    A pixel has the mean over the squares that hide it.

    Args:
        run: The network.
        inputs: Shape ``(n, c, h, w)``.
        targets: Shape ``(n,)``; None for the class that is predicted.
        baseline: What is put over, shape ``(1, c, h, w)``.
        window: Side of the square in px.
        stride: From a square to the next, in px.
        batch_size: Hidden pictures in a pass, at least.

    Returns:
        Maps ``(n, h, w)``.

    Raises:
        DependencyError: captum is not installed.

    References:
        Zeiler, Fergus 2014, Visualizing and Understanding Convolutional Networks, arXiv:1311.2901.
    """
    attr = require_captum("method=occlusion")
    with torch.no_grad():
        scores = run(inputs)
        classes = run.chosen(scores, targets)
    channels = inputs.shape[1]
    with _in_our_words(run):
        found = attr.Occlusion(run).attribute(
            inputs,
            sliding_window_shapes=(channels, window, window),
            strides=(channels, stride, stride),
            baselines=baseline.expand_as(inputs),
            target=classes,
            perturbations_per_eval=max(1, batch_size // len(inputs)),
        )
    return _told(run, found[:, 0], scores, classes)


@contextlib.contextmanager
def _in_our_words(run: Scored) -> Iterator[None]:
    """What the model cannot do under captum is one line, as elsewhere."""
    try:
        yield
    except EmbedxError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"captum cannot explain {run.title}: {type(error).__name__}: {first_line(error)}"
        ) from error


def require_captum(needed_for: str) -> Any:
    """captum's methods, or a word on how to install it.

    Raises:
        DependencyError: It is not installed.
    """
    try:
        from captum import attr
    except ImportError:
        raise missing_extra("captum", extra="explain", needed_for=needed_for) from None
    return attr
