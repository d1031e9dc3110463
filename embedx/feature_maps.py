"""Feature maps of layers: a picture a layer, and for each sample a sheet through the depth."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedx import figures, grids, hooks, overlays, saliency
from embedx.errors import (
    ConfigError,
    LayerError,
    listed,
)
from embedx.explainer import (
    Enter,
    Explainer,
    Part,
    Plan,
    Samples,
    random_words,
    require_some,
    say_failed,
    shown_samples,
)
from embedx.matrix import Array
from embedx.passes import run_model
from embedx.points import Point, parse_point
from embedx.progress import Progress

log = logging.getLogger("embedx")


class FeatureMaps(Explainer):
    """Feature maps of layers."""

    def __init__(self, plan: Plan, enter: Enter, say: Callable[[str], None]) -> None:
        super().__init__(plan, enter, say)
        self._points: list[Point] = []
        self._network: saliency.Network | None = None
        self._picked: dict[str, list[int]] = {}

    def pick(self, activity: Iterable[Mapping[str, Array]]) -> None:
        """Choose the channels that are the most active, by what :meth:`activity` gives in order."""
        for name, total in summed(activity).items():
            self._picked[name] = _most_active(total, self._plan.n_channels)

    def activity(self, number: int) -> dict[str, Array]:
        """Of each layer the mean of each map, negative numbers as 0, summed over a batch: float64.

        Before an activation the largest numbers may be those that it makes zeros of.
        """
        some, samples = self._samples(number)
        return {
            name: maps.double().clamp(min=0).nan_to_num(0).mean((2, 3)).sum(0).cpu().numpy()
            for name, (_, maps) in self._maps(some, samples).items()
        }

    def part(self, number: int, folder: Path) -> Part:
        some, samples = self._samples(number)
        part = Part(samples.reasons)
        columns: list[overlays.Column] = []
        for name, (layer, maps) in self._maps(some, samples).items():
            picked = self._picked.setdefault(name, _picked(self._plan, layer))
            kept = maps[:, picked].to("cpu", torch.float32).numpy()
            part.arrays[f"maps/{len(columns)}"] = kept
            column = overlays.Column(name, layer.width, layer.grid.words, picked, list(kept))
            columns.append(column)
        if not columns:
            return part
        shown = shown_samples(some, samples.places, samples.pictures)
        part.arrays["places"] = np.array(samples.places)
        part.arrays["pictures"] = np.stack([sample.picture for sample in shown])
        part.facts["layers"] = [
            [column.layer, column.width, column.words, column.channels] for column in columns
        ]
        for i, sample in enumerate(shown):
            figure = overlays.depth_sheet(sample, columns, i, title=_about(self._plan))
            figures.save(figure, folder / f"row-{sample.row}.png")
        return part

    def _set_up_by(self, some: Plan, samples: Samples) -> bool:
        if samples.inputs is None:
            return False
        plan = self._plan
        with torch.no_grad():
            row = int(some.rows[samples.places[0]])
            first = self._enter(samples.normalize(samples.inputs[:1]), row)
            network = saliency.look(plan.model.module, first, title=plan.model.name)
            points = plan.points
            if points is None:
                names = grids.through_depth(network.seen)
                if not names:
                    raise saliency.no_layer(plan.model.name)
                points = [parse_point(name) for name in names]
                self._say(f"layers: {', '.join(names)}")
            elif plan.of_globs:
                points = _with_maps(plan, network, points, first, self._say)
        self._network, self._points = network, points
        return True

    def _maps(self, some: Plan, samples: Samples) -> dict[str, tuple[saliency.Layer, Tensor]]:
        """What each layer gives of a batch: nothing where no sample was read."""
        if samples.inputs is None:
            return {}
        self._set_up()
        assert self._network is not None
        module, n = self._plan.model.module, len(samples.places)
        found: dict[str, tuple[saliency.Layer, Tensor]] = {}
        with torch.no_grad():
            row = int(some.rows[samples.places[0]])
            inputs = self._enter(samples.normalize(samples.inputs), row)
            with hooks.Capture(module, self._points, only_here=True) as got:
                run_model(module, inputs, title=self._plan.model.name)
                for point in self._points:
                    layer = saliency.as_layer(self._network, point, got[point.name], n=n)
                    found[point.name] = layer, layer.grid.maps(got[point.name])
        return found


def summed(activity: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    total: dict[str, Array] = {}
    for part in activity:
        for name, one in part.items():
            total[name] = total.get(name, 0) + one
    return total


def _about(plan: Plan) -> str:
    """What is written above every picture of feature maps."""
    return f"{random_words(plan.model)}{plan.model.name} over {plan.source.name}"


def draw_layers(plan: Plan, parts: Iterable[Part], folder: Path) -> int:
    """A picture a layer of all samples; how many failed."""
    reasons: dict[int, str] = {}
    shown: list[overlays.Sample] = []
    layers: list[Any] = []
    maps: list[list[Array]] = []
    for number, part in enumerate(parts):
        before = number * plan.batch_size
        reasons |= {before + place: reason for place, reason in part.reasons.items()}
        if "layers" not in part.facts:
            continue
        places = [before + place for place in part.arrays["places"].tolist()]
        shown += shown_samples(
            plan, places, dict(zip(places, part.arrays["pictures"], strict=True))
        )
        layers = part.facts["layers"]
        maps = maps or [[] for _ in layers]
        for i, of_layer in enumerate(maps):
            of_layer += list(part.arrays[f"maps/{i}"])
    require_some(reasons, plan)
    say_failed(reasons, plan)
    with Progress(len(layers), what="draw", unit="pictures") as progress:
        for number, (name, width, words, channels) in enumerate(layers, start=1):
            column = overlays.Column(name, width, words, channels, maps[number - 1])
            figure = overlays.layer_sheet(shown, column, title=_about(plan))
            place = f"{number:0{max(2, len(str(len(layers))))}d}"
            figures.save(figure, folder / f"layer-{place}-{_safe(column.layer)}.png")
            progress.advance(1)
    return len(reasons)


def _with_maps(
    plan: Plan,
    network: saliency.Network,
    points: list[Point],
    inputs: Tensor,
    say: Callable[[str], None],
) -> list[Point]:
    """The points that are drawn, where some are of globs: of these what gives feature maps."""
    run = saliency.Scored(plan.model.module, plan.model.name)
    kept = saliency.of_globs(run, network, plan.of_globs, inputs)
    found = list(dict.fromkeys(one for point in points for one in kept.get(point, [point])))
    if not found:
        raise LayerError(
            f"none of the layers of {plan.model.name} that match gives feature maps of the "
            f"picture: {listed([point.name for point in kept])}"
        )
    say(f"layers: {listed([point.name for point in found])}")
    if empty := [point.name for point in kept if not kept[point]]:
        say(f"left out, for they give no feature maps: {listed(empty)}")
    return found


def _most_active(total: Array, n_channels: int) -> list[int]:
    order = np.argsort(-total, kind="stable")
    return [int(channel) for channel in order[:n_channels]]


def _picked(plan: Plan, layer: saliency.Layer) -> list[int]:
    """The channels of a layer that are drawn, where they are not the most active.

    Raises:
        ConfigError: It has no such channel.
    """
    if isinstance(plan.channels, str):
        return list(range(min(plan.n_channels, layer.width)))
    for channel in plan.channels:
        if not 0 <= channel < layer.width:
            raise ConfigError(
                f"channels={channel}: layer {layer.point.name} has {layer.width} channels, 0 to "
                f"{layer.width - 1}"
            )
    return list(plan.channels)


def _safe(name: str) -> str:
    """The name of a layer within that of a file; the number before it tells them apart."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:60]
