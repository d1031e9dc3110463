"""From an activation to feature maps: which axes of it, or which tokens, are the picture's."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from embedx import fold
from embedx.pooling import channels_axis, is_in_proportion, is_laid_out_first

# Tokens before those of the picture: class, distillation, registers. Networks have up to 5, and
# where it is known into what they cut the picture, others may have more.
PREFIX_TOKENS_USUAL, PREFIX_TOKENS_MOST = 5, 16
Channels = Literal["first", "last"]
FIRST_FROM = 3  # blocks of one grid, of which some are shown


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where the maps of an activation are.

    Attributes:
        form: ``first`` for channels first ``(n, c, h, w)``, ``last`` for channels last
            ``(n, h, w, c)``, ``tokens`` for ``(n, t, c)``.
        h: Height of a map.
        w: Width of a map.
        n_prefix: Tokens before those of the picture, such as a class token.
    """

    form: Literal["first", "last", "tokens"]
    h: int
    w: int
    n_prefix: int = 0

    def maps(self, activation: Tensor) -> Tensor:
        """An activation ``(n, ...)`` of this form as feature maps ``(n, c, h, w)``."""
        if self.form == "first":
            return activation
        if self.form == "last":
            return activation.movedim(-1, 1)
        n, _, c = activation.shape
        tokens = activation[:, self.n_prefix :]
        return tokens.reshape(n, self.h, self.w, c).movedim(-1, 1)

    @property
    def words(self) -> str:
        """What is to be said of it."""
        if self.form == "tokens":
            left_out = f", {self.n_prefix} before them left out" if self.n_prefix else ""
            return f"{self.h}x{self.w} tokens{left_out}"
        return f"{self.h}x{self.w}{', channels last' if self.form == 'last' else ''}"


def grid_of(
    activation: Any,
    *,
    n: int,
    picture: tuple[int, int],
    patches: Mapping[int, tuple[int, int]] | None = None,
    channels: Channels | None = None,
) -> Grid | None:
    """The grid of what a layer gives, or None where that is no set of feature maps.

    Maps of one pixel are none. Tokens are those of the picture where, but for a few that come
    first, they are as many as the patches of some size that the picture has.

    Args:
        activation: What a layer gives.
        n: How many samples entered.
        picture: Height and width of what entered the network.
        patches: Height and width of the grids that the network cut the picture into, as far as
            known, by how many channels these have.
        channels: Where they come, where that is known.
    """
    if not isinstance(activation, Tensor) or not activation.is_floating_point():
        return None
    if activation.ndim not in (3, 4) or len(activation) != n or not activation.numel():
        return None
    if activation.ndim == 3:
        t, width = activation.shape[1:]
        grid, turned = ((patches or {}).get(size) for size in (width, t))
        if grid is None and turned is not None and turned[0] * turned[1] == width:
            return None  # maps that were made flat, and not turned into tokens yet
        return _of_tokens(t, picture, grid)
    axis = channels_axis(activation, picture=picture)
    if channels is not None:
        axis = 1 if channels == "first" else 3
    if axis is None:
        return None
    if axis == 3:
        form, h, w = "last", activation.shape[1], activation.shape[2]
    else:
        form, h, w = "first", activation.shape[2], activation.shape[3]
    if h * w == 1 or h > picture[0] or w > picture[1] or not is_in_proportion((h, w), picture):
        return None
    return Grid(form, h, w)  # type: ignore[arg-type]  # one of the two


def _of_tokens(t: int, picture: tuple[int, int], patches: tuple[int, int] | None) -> Grid | None:
    if patches is not None and 0 <= t - patches[0] * patches[1] <= PREFIX_TOKENS_MOST:
        return Grid("tokens", *patches, n_prefix=t - patches[0] * patches[1])
    found: list[tuple[int, int, int]] = []
    for side in range(1, min(picture) + 1):
        for h, w in (
            (picture[0] // side, picture[1] // side),
            (math.ceil(picture[0] / side), math.ceil(picture[1] / side)),
        ):
            if 0 <= t - h * w <= PREFIX_TOKENS_USUAL and h * w > PREFIX_TOKENS_USUAL:
                found.append((t - h * w, h, w))
    if not found:
        return None
    n_prefix, h, w = min(found)
    return Grid("tokens", h, w, n_prefix=n_prefix)


# --------------------------------------------------------------------------- a network


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a module gave in an example pass, where that is a set of feature maps.

    Attributes:
        name: Of the module, with ``@CALL`` where it runs more than once.
        shape: Of what it gave.
        grid: Where the maps are.
        is_pooled: Whether it is what a pooling layer gave.
        has_parts: Whether the module has modules in it.
    """

    name: str
    shape: tuple[int, ...]
    grid: Grid
    is_pooled: bool
    has_parts: bool

    @property
    def depth(self) -> int:
        """How many modules below the outermost level it lies."""
        return self.name.count(".")


def seen_in(
    module: nn.Module,
    fired: Sequence[tuple[str, Any]],
    *,
    n: int,
    picture: tuple[int, int],
) -> list[Seen]:
    """The feature maps of a pass, in the order in which they came.

    Args:
        module: The network.
        fired: Name and output of each module, in order.
        n: How many samples entered.
        picture: Height and width of what entered.
    """
    modules = dict(module.named_modules())
    calls = Counter(name for name, _ in fired)
    pooled: dict[int, bool] = {}  # by the tensor: whether the layer that made it is a pooling
    for name, output in fired:
        pooled.setdefault(id(output), "Pool" in type(modules[name]).__name__)
    patches = patches_in(module, fired, n=n, picture=picture)
    seen = []
    n_before: Counter[str] = Counter()
    for name, output in fired:
        point = name if calls[name] == 1 else f"{name}@{n_before[name]}"
        n_before[name] += 1
        grid = grid_of(
            output,
            n=n,
            picture=picture,
            patches=patches,
            channels=channels_of(modules[name], output),
        )
        # What these give is given by another layer too, or is attention from token to token.
        is_bare = re.search("Dropout|Identity|Softmax", type(modules[name]).__name__)
        if grid is not None and name and not is_bare:
            has_parts = next(modules[name].children(), None) is not None
            seen.append(Seen(point, tuple(output.shape), grid, pooled[id(output)], has_parts))
    return seen


def channels_of(module: nn.Module, output: Any) -> Channels | None:
    """Where channels come in what a layer gives, by what it is, or by how that lies in memory.

    Args:
        module: The layer.
        output: What it gives.

    Returns:
        None where neither tells.
    """
    if not isinstance(output, Tensor) or output.ndim not in (3, 4):
        return None
    by_memory: Channels | None = "first" if output.ndim == 4 and is_laid_out_first(output) else None
    return _channels_by_kind(module) or by_memory


def _channels_by_kind(module: nn.Module) -> Channels | None:
    if not fold.is_forward_known(module):
        return None
    if isinstance(module, nn.Sequential):
        for child in reversed(module):
            if type(child).__module__ in _AS_THEY_COME and not isinstance(child, _OF_SOME_AXES):
                continue
            return _channels_by_kind(child)
    if type(module).__module__ == "torch.nn.modules.pooling" or isinstance(module, _FIRST):
        return "first"
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
        return None
    return "last" if type(module).forward in _LAST else None


_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
# Others are derived of these that turn what enters, and turn it back.
_LAST = [nn.Linear.forward, nn.LayerNorm.forward, nn.RMSNorm.forward, nn.Embedding.forward]
# Layers that leave the axes as they are.
_AS_THEY_COME = ("torch.nn.modules.activation", "torch.nn.modules.dropout")
_OF_SOME_AXES = nn.MultiheadAttention, nn.GLU


def patches_in(
    module: nn.Module, fired: Sequence[tuple[str, Any]], *, n: int, picture: tuple[int, int]
) -> dict[int, tuple[int, int]]:
    """Into which grids a network cut the picture, by the number of channels."""
    modules = dict(module.named_modules())
    found: dict[int, tuple[int, int]] = {}
    for name, output in fired:
        if isinstance(output, Tensor) and output.ndim == 4:
            layer = modules[name]
            # What is cut into patches that are not square has another proportion than the picture.
            cuts = isinstance(layer, nn.Conv2d) and layer.kernel_size == layer.stride != (1, 1)
            cuts = cuts and fold.is_forward_known(layer)
            grid = grid_of(output, n=n, picture=picture)
            if cuts or (grid is not None and grid.form == "first"):
                found[output.shape[1]] = (output.shape[2], output.shape[3])
    return found


def through_depth(seen: Sequence[Seen]) -> list[str]:
    """Layers that show a network from its beginning to its end: the last one of each size of grid.

    The last of the outermost level, that is: ``layer1``, not a part of it. Of a network that has
    less than four sizes, blocks that follow each other, evenly spaced.
    """
    sizes: dict[tuple[int, int], Seen] = {}
    seen = [one for one in seen if "@" not in one.name]
    for one in seen:
        before = sizes.get((one.grid.h, one.grid.w))
        if not one.is_pooled and (before is None or one.depth <= before.depth):
            sizes[one.grid.h, one.grid.w] = one
    outermost = min((one.depth for one in sizes.values()), default=0)
    # Deep within a block, such as windows of attention, are grids that are no map of the picture.
    names = [one.name for one in sizes.values() if one.depth <= outermost + 2]
    order = [one.name for one in seen]
    if len(names) < 4:
        blocks = list(_blocks(seen))
        spaced = [blocks[round(i * (len(blocks) - 1) / 4)] for i in range(5)] if blocks else []
        names = list({*names, *spaced})
    return sorted(names, key=order.index)


def _blocks(seen: Sequence[Seen]) -> Iterator[str]:
    """The blocks that follow each other, of the outermost level that has some."""
    inner = [one for one in seen if one.has_parts]
    for depth in range(max((one.depth for one in inner), default=-1) + 1):
        level = [one.name for one in inner if one.depth == depth]
        if len(level) >= FIRST_FROM:
            yield from level
            return
