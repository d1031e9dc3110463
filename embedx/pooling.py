"""From the activation of a layer to one vector a sample."""

import builtins
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from embedx.errors import ConfigError, ShapeError
from embedx.fingerprints import value_sha256

POOLING_REVISION = 5  # raised when a result changes; part of every file's id

Function = Callable[..., Tensor]


def none(activation: Tensor) -> Tensor:
    """Take an activation that is one vector a sample already.

    Args:
        activation: Shape ``(n, d)``.

    Returns:
        The same tensor.

    Raises:
        ShapeError: ``activation`` is not 2-dimensional.
    """
    _expect(activation, "none", (2,), "(n, d)")
    return activation


def flatten(activation: Tensor) -> Tensor:
    """Lay everything of a sample end to end.

    Args:
        activation: Shape ``(n, ...)``.

    Returns:
        Shape ``(n, d)``, d the product of the other sizes, in C order.
    """
    return activation.flatten(1) if activation.ndim > 1 else activation.unsqueeze(1)


def gap(activation: Tensor) -> Tensor:
    """Average each feature map (global average pooling).

    Args:
        activation: Feature maps, shape ``(n, c, h, w)`` or ``(n, c, t, h, w)``.

    Returns:
        Shape ``(n, c)``.

    Raises:
        ShapeError: ``activation`` is neither.

    References:
        Lin, Chen, Yan 2014, Network In Network, arXiv:1312.4400.
    """
    _expect(activation, "gap", (4, 5), "(n, c, h, w)")
    return _mean(activation.flatten(2), 2)


def gap_last(activation: Tensor) -> Tensor:
    """Average each feature map of a network that keeps channels last, such as Swin.

    Args:
        activation: Feature maps, shape ``(n, h, w, c)``.

    Returns:
        Shape ``(n, c)``.

    Raises:
        ShapeError: ``activation`` is not 4-dimensional.
    """
    _expect(activation, "gap_last", (4,), "(n, h, w, c)")
    return _mean(activation.flatten(1, 2), 1)


def max(activation: Tensor) -> Tensor:
    """Take the largest value of each feature map.

    Args:
        activation: Feature maps, shape ``(n, c, h, w)`` or ``(n, c, t, h, w)``.

    Returns:
        Shape ``(n, c)``.

    Raises:
        ShapeError: ``activation`` is neither.
    """
    _expect(activation, "max", (4, 5), "(n, c, h, w)")
    return activation.flatten(2).amax(2)


def gem(activation: Tensor, *, p: float = 3.0, eps: float = 1e-6) -> Tensor:
    """Pool each feature map to its generalized mean (GeM).

    Args:
        activation: Feature maps, shape ``(n, c, h, w)`` or ``(n, c, t, h, w)``, non-negative
            (smaller values count as ``eps``), so take them after a ReLU.
        p: Exponent, dimensionless, above 0. 1 is average pooling, large is max pooling.
        eps: Smallest value averaged, in the unit of ``activation``, above 0.

    Returns:
        Shape ``(n, c)``, float32 or wider, in the unit of ``activation``.

    Raises:
        ConfigError: ``p`` or ``eps`` is not above 0.
        ShapeError: ``activation`` is of another shape.

    References:
        Radenovic, Tolias, Chum 2019, IEEE TPAMI 41(7), arXiv:1711.02512.
    """
    for key, value in (("p", p), ("eps", eps)):
        if not value > 0:
            raise ConfigError(f"pooling.{key} must be above 0, not {value!r}")
    _expect(activation, "gem", (4, 5), "(n, c, h, w)")
    # Powers of half-precision numbers overflow, and so do those of large ones: the largest is 1.
    values = activation.flatten(2).to(torch.promote_types(activation.dtype, torch.float32))
    values = values.clamp(min=eps)
    largest = values.amax(2, keepdim=True)
    return (values / largest).pow(p).mean(2).pow(1 / p) * largest.squeeze(2)


def cls(activation: Tensor) -> Tensor:
    """Take the first token, the class token of a vision transformer.

    Args:
        activation: Tokens, shape ``(n, t, d)``.

    Returns:
        Shape ``(n, d)``.

    Raises:
        ShapeError: ``activation`` is not 3-dimensional.

    References:
        Dosovitskiy et al. 2021, arXiv:2010.11929.
    """
    _expect(activation, "cls", (3,), "(n, t, d)")
    return activation[:, 0]


def mean_token(activation: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Average the tokens, class token included, padding left out.

    Args:
        activation: Tokens, shape ``(n, t, d)``.
        mask: Shape ``(n, t)``, true or 1 for a token and false or 0 for padding; None where all
            are tokens.

    Returns:
        Shape ``(n, d)``; NaN for a sample of padding alone.

    Raises:
        ShapeError: ``activation`` is not 3-dimensional, or ``mask`` is not of its shape.
    """
    _expect(activation, "mean_token", (3,), "(n, t, d)")
    if mask is None:
        return _mean(activation, 1)
    is_token = _is_token(activation, mask)
    # Padding may hold anything, NaN too, and 0 * NaN is NaN.
    kept = torch.where(is_token, activation, 0)
    # A sum in half precision overflows long before a mean does.
    wide = torch.promote_types(activation.dtype, torch.float32)
    mean = kept.sum(1, dtype=wide) / is_token.sum(1)
    return mean.to(activation.dtype) if activation.is_floating_point() else mean


def max_token(activation: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Take the largest value of each feature over the tokens, padding left out.

    Args:
        activation: Tokens, shape ``(n, t, d)``, floating point.
        mask: Shape ``(n, t)``, true or 1 for a token and false or 0 for padding; None where all
            are tokens.

    Returns:
        Shape ``(n, d)``; -inf for a sample of padding alone.

    Raises:
        ShapeError: ``activation`` is not 3-dimensional, or ``mask`` is not of its shape.
    """
    _expect(activation, "max_token", (3,), "(n, t, d)")
    if mask is None:
        return activation.amax(1)
    return torch.where(_is_token(activation, mask), activation, -torch.inf).amax(1)


def _mean(values: Tensor, axis: int) -> Tensor:
    """The average along an axis, of whole numbers and booleans too."""
    is_counted = not (values.is_floating_point() or values.is_complex())
    return values.mean(axis, dtype=torch.float32 if is_counted else None)


def _is_token(activation: Tensor, mask: Tensor) -> Tensor:
    """A mask as booleans ``(n, t, 1)``."""
    if mask.shape != activation.shape[:2]:
        raise ShapeError(
            f"the mask has shape {tuple(mask.shape)} and the tokens {tuple(activation.shape)}; "
            "give one value a token"
        )
    return mask.bool().unsqueeze(2)


def norm(activation: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Take the length (L2 norm) of everything of a sample, such as of its gradient.

    Args:
        activation: Shape ``(n, ...)``.
        mask: Shape ``(n, t)`` where it is tokens ``(n, t, d)``, true or 1 for a token and false or
            0 for padding, which is left out; None where all are tokens.

    Returns:
        Shape ``(n, 1)``, float32 or wider, in the unit of ``activation``; NaN for a sample of
        padding alone.
    """
    wide = activation.to(torch.promote_types(activation.dtype, torch.float32))
    if mask is not None and activation.ndim == 3:
        is_token = _is_token(activation, mask)
        wide = torch.where(is_token, wide, 0)
        wide = torch.where(is_token.any(1, keepdim=True), wide, torch.nan)
    flat = flatten(wide)
    if not flat.shape[1]:
        return flat.new_zeros(len(flat), 1)
    # Squares of very small numbers vanish, and those of large ones overflow: the largest is 1.
    largest = torch.linalg.vector_norm(flat, ord=math.inf, dim=1, keepdim=True)
    is_far = ((largest < 1e-15) | (largest > 1e15)) & (largest > 0) & largest.isfinite()
    scale = torch.where(is_far, largest, 1)
    length: Tensor = torch.linalg.vector_norm(flat / scale, dim=1, keepdim=True) * scale
    return length


POOLINGS: dict[str, Function] = {
    "none": none,
    "flatten": flatten,
    "gap": gap,
    "gap_last": gap_last,
    "max": max,
    "gem": gem,
    "cls": cls,
    "mean_token": mean_token,
    "max_token": max_token,
    "norm": norm,
}


@dataclasses.dataclass(frozen=True)
class Pooling:
    """How the activation of one capture point becomes vectors.

    Attributes:
        name: As it is stored and told; ``auto`` until the first activation shows the shape.
        function: From an activation to ``(n, d)``; None for ``auto``.
        code: Tells a function of the user's own with what it holds, whose name alone would not;
            empty for ours.
    """

    name: str
    function: Function | None
    code: str = ""

    @property
    def module(self) -> torch.nn.Module | None:
        """The module whose call or method this is."""
        held = getattr(self.function, "func", self.function)  # of a partial
        held = getattr(held, "__self__", held)
        return held if isinstance(held, torch.nn.Module) else None

    @property
    def takes_mask(self) -> bool:
        if "mask" in getattr(self.function, "keywords", ()):  # a partial has one of its own
            return False
        called = getattr(self.function, "func", self.function)
        if isinstance(called, torch.nn.Module):  # whose call takes anything, and its forward not
            called = called.forward
        return called is not None and any(
            one.name == "mask" or one.kind is inspect.Parameter.VAR_KEYWORD
            for one in inspect.signature(called).parameters.values()
        )


def _expect(activation: Tensor, name: str, ndims: tuple[int, ...], form: str) -> None:
    if activation.ndim not in ndims:
        raise ShapeError(
            f"pooling={name} takes {form}, and this layer gives "
            f"{tuple(activation.shape)}; choose {_choices(activation)}"
        )


def _choices(activation: Tensor) -> str:
    fitting = {2: ["none"], 3: ["cls", "mean_token", "max_token", "flatten"]}.get(
        activation.ndim, ["gap", "max", "gem", "flatten"]
    )
    if may_be_channels_last(activation):
        fitting = ["gap_last", "flatten"]
    return " or ".join(f"pooling={name}" for name in fitting)


def per_point(
    pooling: str | Function | Sequence[str | Function], *, n_points: int
) -> list[Pooling]:
    """One pooling for each capture point.

    Args:
        pooling: A name or a function for all points, or a list with one for each.
        n_points: How many there are.

    Raises:
        ConfigError: An unknown name, or a list of another length.
    """
    is_one = isinstance(pooling, str) or callable(pooling)
    given = [pooling] * n_points if is_one else list(pooling)  # type: ignore[arg-type]
    if len(given) != n_points:
        raise ConfigError(
            f"pooling lists {len(given)} names for {n_points} layers; give one for all or one each"
        )
    return [_named(one) for one in given]


def _named(pooling: Any) -> Pooling:
    if isinstance(pooling, str):
        if pooling != "auto" and pooling not in POOLINGS:
            known = ", ".join(["auto", *POOLINGS])
            raise ConfigError(f"pooling {pooling!r} is not known; choose one of: {known}")
        return Pooling(pooling, POOLINGS.get(pooling))
    if not callable(pooling):
        raise ConfigError(f"pooling must be a name or a function, not a {type(pooling).__name__}")
    function, positional, arguments = pooling, (), {}
    if isinstance(pooling, functools.partial):
        function, positional, arguments = pooling.func, pooling.args, pooling.keywords
    name = getattr(function, "__qualname__", type(function).__name__)
    is_ours = (
        POOLINGS.get(name) is function
        and not positional
        and all(type(value) in (int, float, bool, str) for value in arguments.values())
    )
    code = "" if is_ours else value_sha256(pooling)
    shown = ", ".join(
        [
            *map(_shown, positional),
            *(f"{key}={_shown(arguments[key])}" for key in sorted(arguments)),
        ]
    )
    return Pooling(f"{name}({shown})" if shown else name, pooling, code)


def _shown(value: Any) -> str:
    """What is the same in every process; an object may show its address."""
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__


def may_be_channels_last(activation: Tensor, *, picture: tuple[int, int] | None = None) -> bool:
    """Whether it looks like ``(n, 7, 7, 768)``: to average its last two axes would be wrong.

    Args:
        activation: What a layer gives.
        picture: Height and width of what entered the network, in whose proportion maps are.
    """
    if activation.ndim != 4:
        return False
    _, first, second, last = (builtins.max(size, 1) for size in activation.shape)
    if picture is None:
        return first == second != last
    if is_laid_out_first(activation):
        return False
    off_first, off_last = _off_picture(activation, picture)
    if off_last <= off_first:
        return True
    # A size that is no multiple of the stride is rounded: what is nearer may be so by that alone.
    is_exact = picture[0] * last == picture[1] * second and picture[0] % second == 0
    return not is_exact and _is_rounded((first, second), picture)


def is_laid_out_first(activation: Tensor) -> bool:
    """Whether ``(n, c, h, w)`` lies in memory as what convolutions give of pictures that do."""
    return activation.stride(1) == 1 and activation.is_contiguous(memory_format=torch.channels_last)


def is_in_proportion(maps: tuple[int, int], picture: tuple[int, int]) -> bool:
    """Whether maps have the proportion of the picture, but for what borders take off."""
    steps = picture[0] / maps[0], picture[1] / maps[1]
    return builtins.max(steps) / min(steps) <= builtins.max(1 + 2 / min(maps), 1.1)


def channels_axis(activation: Tensor, *, picture: tuple[int, int] | None) -> int | None:
    """Which axis of ``(n, c, h, w)`` or ``(n, h, w, c)`` is that of the channels, 1 or 3.

    Args:
        activation: What a layer gives.
        picture: Height and width of what entered the network.

    Returns:
        None where both may be, as of ``(n, 32, 32, 32)``, or none.
    """
    if not may_be_channels_last(activation, picture=picture):
        is_sure = activation.ndim != 4 or picture is None or is_laid_out_first(activation)
        return 1 if is_sure or _are_maps(activation, picture) else None
    off_first, off_last = (0.0, 1.0) if picture is None else _off_picture(activation, picture)
    return None if abs(off_first - off_last) < 1e-9 else 3


def _are_maps(activation: Tensor, picture: tuple[int, int] | None) -> bool:
    """Whether the last two of four axes may be those of maps: in proportion, and not larger."""
    assert picture is not None
    h, w = (builtins.max(size, 1) for size in activation.shape[2:])
    return is_in_proportion((h, w), picture)


def _off_picture(activation: Tensor, picture: tuple[int, int]) -> tuple[float, float]:
    """How far from the picture's proportion maps are, if channels come first, and if last."""
    _, first, second, last = (builtins.max(size, 1) for size in activation.shape)
    proportion = math.log(picture[0] / picture[1])
    return abs(math.log(second / last) - proportion), abs(math.log(first / second) - proportion)


def _is_rounded(size: tuple[int, int], picture: tuple[int, int]) -> bool:
    """Whether one stride makes a map of this size of the picture, but for one row or column."""
    least = builtins.max(whole / (part + 1) for whole, part in zip(picture, size, strict=True))
    most = builtins.min(
        whole / (part - 1) if part > 1 else math.inf
        for whole, part in zip(picture, size, strict=True)
    )
    return least < most


def choose(
    activation: Tensor,
    *,
    tokens: str | None = None,
    is_masked: bool = False,
    picture: tuple[int, int] | None = None,
    channels: Literal["first", "last"] | None = None,
) -> str:
    """The pooling that ``auto`` means for an activation.

    Args:
        activation: ``(n, d)``, ``(n, t, d)`` or ``(n, c, h, w)``.
        tokens: The pooling of the model's family for tokens, such as ``cls``.
        is_masked: Whether it is known which tokens are padding; the others are then averaged.
        picture: Height and width of what entered the network; None where it is no picture.
        channels: Where they are known to come, of three or four axes.

    Raises:
        ShapeError: The shape could mean several things; the message lists the choices.
    """
    shape = tuple(activation.shape)
    if len(shape) == 2:
        return "none"
    if len(shape) == 4 and channels == "first":
        return "gap"
    if len(shape) == 3 and channels == "first" and (tokens is not None or is_masked):
        raise ShapeError(
            f"pooling=auto averages tokens, and {shape} has channels first; choose a function of "
            "your own, such as lambda a: a.mean(2)"
        )
    if len(shape) == 3 and is_masked and tokens is None and shape[1] == shape[2]:
        raise ShapeError(
            f"pooling=auto cannot tell which axis of {shape} is that of the tokens; choose "
            "pooling=mean_token (of tokens first), or for channels first a function of your own"
        )
    if len(shape) == 3 and (tokens is not None or is_masked):
        return tokens or "mean_token"
    # What entered as no picture may have four axes of any meaning.
    is_told = len(shape) == 4 and (picture is not None or is_laid_out_first(activation))
    if is_told and channels is None and channels_axis(activation, picture=picture) == 1:
        return "gap"
    choices = "pooling=gap_last (of channels last) or pooling=gap (of channels first)"
    if len(shape) == 4 and channels == "last":
        choices = "pooling=gap_last or pooling=flatten"
    elif len(shape) != 4 or may_be_channels_last(activation):
        choices = _choices(activation)
    if len(shape) == 3:
        choices += (
            "; these take tokens first (n, t, d): of channels first (n, c, t), as Conv1d gives "
        )
        choices += "them, a function of your own, such as lambda a: a.mean(2)"
    raise ShapeError(f"pooling=auto cannot tell what {shape} means; choose {choices}")
