"""What of a layer to silence or change, said in settings, as functions of its tensor."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from embedx.checks import check_arguments
from embedx.errors import ConfigError, LayerError, ShapeError, listed
from embedx.pooling import channels_axis, mean_token

log = logging.getLogger("embedx")

_AXES = ("channels", "units", "tokens")


@dataclasses.dataclass
class Seen:
    """What is known of the pass at hand.

    Attributes:
        n: How many samples went in.
        mask: Shape ``(n, t)``, which tokens are none of padding; None where all are.
        strangers: What enters beside the mask and may be what a layer's tokens are of, by name.
        picture: Height and width of what entered; None where it is no picture.
        is_plain: Whether nothing is changed, to see what the hooks alone do.
        sizes: Of the axes of ablated layers, less the first.
        told: Of which ablations it was said what they do.
        masked: Where the mask has decided what an average is of.
    """

    n: int = 0
    mask: Tensor | None = None
    strangers: Sequence[str] = ()
    picture: tuple[int, int] | None = None
    is_plain: bool = False
    sizes: set[int] = dataclasses.field(default_factory=set)
    told: list["Ablation"] = dataclasses.field(default_factory=list)
    masked: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Ablation:
    """A part of what a layer gives, and what becomes of it.

    Attributes:
        at: A capture point, ``layer4``, ``fc:input``, ``layer4:grad``; globs too.
        channels: Feature maps of ``(n, c, h, w)``, ``(n, c, l)`` or ``(n, c, t, h, w)``, by number.
        units: Entries along the last axis, of ``(n, d)``, ``(n, t, d)`` or ``(n, h, w, c)``.
        tokens: Tokens of ``(n, t, d)``, by place. Of any of the three ``all`` are the whole layer.
        by: ``zero``; ``mean``, their average over all places of the sample, of tokens that over all
            tokens; ``scale``, times ``factor``; ``patch``, ``value`` in their place.
        factor: For ``scale``.
        value: For ``patch``, in the unit of the layer.

    References:
        Morcos et al. 2018, On the importance of single directions for generalization,
        arXiv:1803.06959 (zero and mean).
    """

    at: str
    channels: int | Sequence[int] | Literal["all"] | None = None
    units: int | Sequence[int] | Literal["all"] | None = None
    tokens: int | Sequence[int] | Literal["all"] | None = None
    by: Literal["zero", "mean", "scale", "patch"] = "zero"
    factor: float | None = None
    value: float | None = None

    def settings(self) -> dict[str, Any]:
        """What was said, as JSON holds it."""
        said = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        axis, numbers = self._chosen
        return {**said, axis: numbers}

    @property
    def _chosen(self) -> tuple[str, list[int] | Literal["all"]]:
        (axis,) = (key for key in _AXES if getattr(self, key) is not None)
        numbers = getattr(self, axis)
        if numbers == "all":
            return axis, "all"
        return axis, [numbers] if isinstance(numbers, int) else list(numbers)

    def changed(
        self, value: Tensor, seen: Seen, *, channels: Literal["first", "last"] | None = None
    ) -> Tensor:
        """The tensor with that part of it changed.

        Args:
            value: What the layer gives, shape ``(n, ...)``.
            seen: What is known of the pass.
            channels: Where those of the layer come, where that is known.

        Raises:
            LayerError: A number is out of the range of the layer.
            ShapeError: The layer has no such axis, or nothing to average over, or its first axis is
                not that of the samples.
        """
        name, asked = self._chosen
        if not value.ndim or len(value) != seen.n:
            raise ShapeError(
                f"ablate: {self.at} gives {tuple(value.shape)} for {seen.n} samples, so its first "
                "axis is not that of the samples; change it from Python, with embedx.intervene"
            )
        seen.sizes |= set(value.shape[1:])
        axis = self._axis(name, value, seen, channels)
        if self not in seen.told:
            seen.told.append(self)
            shape = ", ".join(map(str, value.shape[1:]))
            log.info(
                "ablate: %s gives (n, %s), of which %s %s are along axis %s",
                *(self.at, shape, name),
                *("all" if asked == "all" else listed(list(map(str, asked))), axis),
            )
        size = value.shape[axis]
        numbers = list(range(size)) if asked == "all" else asked
        has_mask = seen.mask is not None and seen.mask.shape == value.shape[:2]
        if name == "tokens" and has_mask:  # of texts that are shorter there is nothing to change
            numbers = [number for number in numbers if not size <= number]
            if not numbers:
                return value
        if strange := [number for number in numbers if not 0 <= number < size]:
            raise LayerError(
                f"ablate: {self.at} has {size:,} {name}, numbered 0 to {size - 1}, and not "
                f"{strange[0]}"
            )
        index = torch.tensor(numbers, device=value.device)
        chosen = value.index_select(axis, index)
        if self.by == "zero":
            chosen = torch.zeros_like(chosen)
        elif self.by == "scale":
            assert self.factor is not None
            chosen = chosen * self.factor
        elif self.by == "patch":
            assert self.value is not None
            chosen = torch.full_like(chosen, self.value)
        elif value.ndim == 3 and name != "channels":
            if has_mask and seen.strangers:
                raise ShapeError(
                    f"ablate: by=mean at {self.at} averages over its tokens, and which of them are "
                    f"padding is not known: {' and '.join(seen.strangers)} enters beside the mask, "
                    "without one; use by=zero, or run that part of the model alone"
                )
            if has_mask:
                seen.masked.add(self.at)
            mean = mean_token(value, mask=seen.mask if has_mask else None)[:, None]
            chosen = (mean if name == "tokens" else mean[..., index]).expand_as(chosen)
        else:
            places = [i for i in range(1, value.ndim) if i != axis]
            if not places:
                raise ShapeError(
                    f"ablate: {self.at} gives {tuple(value.shape)}, whose units have one place "
                    "each, and by=mean averages over places; use by=zero, or by=patch value=NUMBER"
                )
            chosen = chosen.mean(places, keepdim=True).expand_as(chosen)
        return value.index_copy(axis, index, chosen)

    def _axis(
        self, name: str, value: Tensor, seen: Seen, channels: Literal["first", "last"] | None
    ) -> int:
        axis = channels_axis(value, picture=seen.picture)
        is_last, is_first = axis == 3, channels == "first"
        is_unclear = axis is None or (value.ndim == 4 and len(set(value.shape[1:])) == 1)
        if value.ndim == 5:  # of videos: time comes second where channels come last
            is_unclear = value.shape[4] > max(value.shape[1:4])
        if channels is not None:
            is_last, is_unclear = channels == "last", False
        fits = {
            "channels": value.ndim >= 3 and not is_last and not is_unclear,
            "units": value.ndim == 2
            or (value.ndim == 3 and not is_first)
            or (value.ndim == 4 and is_last and not is_unclear),
            "tokens": value.ndim == 3 and not is_first,
        }
        if not fits[name]:
            choices = " or ".join(key for key in _AXES if fits[key])
            raise ShapeError(
                f"ablate: {self.at} gives {tuple(value.shape)}, "
                + (
                    f"which has no {name}; give {choices}"
                    if choices
                    else f"and which axis is that of {name} cannot be told; change it from Python, "
                    "with embedx.intervene"
                )
            )
        return value.ndim - 1 if name == "units" else 1


_EXAMPLE = "'ablate=[{at:LAYER,channels:[3,5],by:zero}]'"


def as_ablations(given: Sequence[Any] | None) -> list[Ablation]:
    """Ablations out of settings.

    Args:
        given: One mapping each, with the keys of :class:`Ablation`.

    Raises:
        ConfigError: A key or a value is not one of its, or two contradict each other.
    """
    for one in given or ():
        if not isinstance(one, (Mapping, Ablation)):
            raise ConfigError(f"ablate holds {one!r}, and takes mappings: {_EXAMPLE}")
    return [_as_ablation(one, where=f"ablate[{i}].") for i, one in enumerate(given or ())]


def _as_ablation(given: Mapping[str, Any] | Ablation, *, where: str) -> Ablation:
    if not isinstance(given, Ablation):
        check_arguments(Ablation, given, where=where)
        given = Ablation(**given)
    axes = [key for key in _AXES if getattr(given, key) is not None]
    if len(axes) != 1:
        raise ConfigError(
            f"{where.removesuffix('.')} names {' and '.join(axes) or 'no part of the layer'}; give "
            f"one of {', '.join(_AXES)}"
        )
    numbers = given.settings()[axes[0]]
    if numbers != "all" and (not numbers or len(set(numbers)) < len(numbers)):
        raise ConfigError(
            f"{where}{axes[0]} must be all, or different numbers, at least one: {numbers}"
        )
    for key, by in (("factor", "scale"), ("value", "patch")):
        if given.by == by and getattr(given, key) is None:
            raise ConfigError(f"{where}by={by} needs {key}: give {key}:NUMBER beside it")
        if given.by != by and getattr(given, key) is not None:
            raise ConfigError(
                f"{where}{key} has no use with by={given.by}; give by:{by}, or leave it out"
            )
    return given
