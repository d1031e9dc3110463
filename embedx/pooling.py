"""From the activation of a layer to one vector a sample."""

from collections.abc import Callable, Sequence

from torch import Tensor

from embedx.errors import ConfigError, ShapeError

POOLING_REVISION = 1  # raised when a result changes; part of every file's id


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
    return activation.flatten(2).mean(2)


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


def mean_token(activation: Tensor) -> Tensor:
    """Average the tokens, class token included.

    Args:
        activation: Tokens, shape ``(n, t, d)``.

    Returns:
        Shape ``(n, d)``.

    Raises:
        ShapeError: ``activation`` is not 3-dimensional.
    """
    _expect(activation, "mean_token", (3,), "(n, t, d)")
    return activation.mean(1)


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": none,
    "flatten": flatten,
    "gap": gap,
    "cls": cls,
    "mean_token": mean_token,
}


def _expect(activation: Tensor, name: str, ndims: tuple[int, ...], form: str) -> None:
    if activation.ndim not in ndims:
        raise ShapeError(
            f"pooling={name} takes {form}, and this layer gives "
            f"{tuple(activation.shape)}; choose {_choices(activation)}"
        )


def _choices(activation: Tensor) -> str:
    fitting = {2: ["none"], 3: ["cls", "mean_token", "flatten"]}.get(
        activation.ndim, ["gap", "flatten"]
    )
    return " or ".join(f"pooling={name}" for name in fitting)


def per_point(pooling: str | Sequence[str], *, n_points: int) -> list[str]:
    """One name for each capture point.

    Args:
        pooling: A name for all points, or a list with one for each.
        n_points: How many there are.

    Raises:
        ConfigError: An unknown name, or a list of another length.
    """
    names = [pooling] * n_points if isinstance(pooling, str) else list(pooling)
    for name in names:
        if name != "auto" and name not in POOLINGS:
            known = ", ".join(["auto", *POOLINGS])
            raise ConfigError(f"pooling {name!r} is not known; choose one of: {known}")
    if len(names) != n_points:
        raise ConfigError(
            f"pooling lists {len(names)} names for {n_points} layers; give one for all or one each"
        )
    return names


def choose(activation: Tensor, *, tokens: str | None = None) -> str:
    """The pooling that ``auto`` means for an activation.

    Args:
        activation: ``(n, d)``, ``(n, t, d)`` or ``(n, c, h, w)``.
        tokens: The pooling of the model's family for tokens, such as ``cls``.

    Raises:
        ShapeError: The shape could mean several things; the message lists the choices.
    """
    shape = tuple(activation.shape)
    if len(shape) == 2:
        return "none"
    if len(shape) == 3 and tokens is not None:
        return tokens
    # (n, 7, 7, 768) is what networks that keep channels last give: averaging its last two axes
    # would be silently wrong.
    channels_last = len(shape) == 4 and shape[1] == shape[2] != shape[3]
    if len(shape) == 4 and not channels_last:
        return "gap"
    raise ShapeError(f"pooling=auto cannot tell what {shape} means; choose {_choices(activation)}")
