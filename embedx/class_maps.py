"""Maps of what the score of a class depends on: a picture a sample, and their file."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedx import derived, figures, hooks, overlays, saliency
from embedx.errors import (
    ConfigError,
    ShapeError,
    nearest,
    number_of,
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
from embedx.inputs import apart, is_alike, is_by_sample, random_states
from embedx.layout import Status
from embedx.matrix import Array
from embedx.objectives import class_of_label, numbered
from embedx.points import parse_point

log = logging.getLogger("embedx")

WINDOWS_ACROSS = 7  # of an occlusion, side by side on the shorter side
GREY = 0.5


class ClassMaps(Explainer):
    """Maps of what the score of a class depends on."""

    def __init__(self, plan: Plan, enter: Enter, say: Callable[[str], None]) -> None:
        super().__init__(plan, enter, say)
        self._run = saliency.Scored(plan.model.module, plan.model.name)
        self._make: Callable[..., saliency.Maps] | None = None
        self._facts: dict[str, Any] = {}
        self._classes: Array | None = None
        self._size = torch.Size()

    def part(self, number: int, folder: Path) -> Part:
        some, samples = self._samples(number)
        targets = _targets(some, samples)
        part = Part(samples.reasons)
        if samples.labels is not None:
            part.arrays["labels"] = samples.labels
        places, inputs = _good(samples)
        if inputs is None:
            return part
        self._set_up()
        assert self._make is not None
        part.facts = self._facts
        if targets is not None and self._classes is not None:
            targets = self._classes[targets]
        entered = self._enter(samples.normalize(inputs), int(some.rows[places[0]]))
        if entered.shape[2:] != self._size:
            raise ShapeError(
                f"{some.model.name} gets pictures of {tuple(entered.shape[2:])} px here and of "
                f"{tuple(self._size)} before, for which its maps were laid out; let all be of one "
                "size, as preprocess= makes them"
            )
        wanted = None if targets is None else torch.from_numpy(targets[places])
        got = self._make(self._run, entered, wanted)
        m, values = len(some.rows), got.maps.numpy()
        maps = np.full((m, *values.shape[1:]), np.nan, np.float32)
        chosen = np.full(m, -1, np.int32)
        columns = {
            name: np.full(m, np.nan, np.float32) for name in ("scores", "shares", *got.columns)
        }
        finite = np.isfinite(values).reshape(len(values), -1).all(1)
        finite &= np.isfinite(got.scores.numpy())
        for i, place in enumerate(places):
            if not finite[i]:
                part.reasons[place] = "ModelError: its score or its map is not finite"
                continue
            maps[place], chosen[place] = values[i], got.targets[i]
            for name, one in {"scores": got.scores, "shares": got.shares, **got.columns}.items():
                columns[name][place] = one[i]
        part.arrays |= {"maps": maps, "targets": chosen}
        part.arrays |= {f"columns/{name}": column for name, column in columns.items()}
        at = f" at {self._facts['layer']}" if "layer" in self._facts else ""
        title = f"{random_words(some.model)}{_NAMES[some.method]} of {some.model.name}{at}"
        good = [place for place in places if place not in part.reasons]
        for place, sample in zip(good, shown_samples(some, good, samples.pictures), strict=True):
            figure = overlays.overlay(
                sample,
                maps[place],
                measured=_MEASURED[some.method],
                is_signed=some.method in saliency.SIGNED,
                title=title,
                caption=_caption(some, int(chosen[place]), columns, place, samples),
            )
            figures.save(figure, folder / f"row-{sample.row}.png")
        return part

    def _set_up_by(self, some: Plan, samples: Samples) -> bool:
        _targets(some, samples)
        places, inputs = _good(samples)
        if inputs is None:
            return False
        entered = self._enter(samples.normalize(inputs), int(some.rows[places[0]]))
        self._size = entered.shape[2:]
        self._make, self._facts = _maker(some, self._run, samples, entered, self._say)
        self._classes = _as_classes(some, self._run, entered, self._say)
        with torch.no_grad():  # whoever makes which batches is to take scores for the same
            states = random_states(some.device)
            scores = self._run(entered)
            self._run.shares(scores)
            if random_states(some.device) == states and not is_by_sample(some.model):
                self._say_of_others(entered, scores)
        return True

    def _say_of_others(self, inputs: Tensor, scores: Tensor) -> None:
        """Say where two samples have other scores alone than in their batch."""
        few = apart(inputs, n=len(inputs)) if len(inputs) > 1 else []
        if few and not is_alike(self._run(inputs[few]), scores[few], most=1e-3):
            log.warning(
                "%s: scores hang on the samples beside them, or on their place in the batch, and "
                "so do the maps (a normalization over the batch?); batch_size=1 gives each its own",
                self._run.title,
            )


def _good(samples: Samples) -> tuple[list[int], Tensor | None]:
    """The places that have not failed, and what was read of them; None of none."""
    kept = [i for i, place in enumerate(samples.places) if place not in samples.reasons]
    if samples.inputs is None or not kept:
        return [], None
    return [samples.places[i] for i in kept], samples.inputs[kept]


def write_maps(plan: Plan, parts: Iterable[Part], folder: Path, attrs: Mapping[str, Any]) -> int:
    """The file of all maps; how many samples failed."""
    m = len(plan.rows)
    reasons: dict[int, str] = {}
    arrays: dict[str, Array] = {}
    facts: dict[str, Any] = {}
    for number, part in enumerate(parts):
        before = number * plan.batch_size
        reasons |= {before + place: reason for place, reason in part.reasons.items()}
        facts = {**part.facts, **facts}
        for name, one in part.arrays.items():
            if name not in arrays:
                empty = np.nan if one.dtype.kind == "f" else -1
                arrays[name] = np.full((m, *one.shape[1:]), empty, one.dtype)
            if one.shape[1:] != arrays[name].shape[1:]:
                first = next(place for place in range(before, m) if place not in reasons)
                raise ShapeError(
                    f"the maps of row {plan.rows[first]} have shape {one.shape[1:]} "
                    f"and {arrays[name].shape[1:]} before; bring all samples to one size"
                )
            arrays[name][before : before + len(one)] = one
    require_some(reasons, plan)
    say_failed(reasons, plan)
    maps = arrays["maps"]
    columns = {
        name.removeprefix("columns/"): one
        for name, one in arrays.items()
        if name.startswith("columns/")
    }
    n_empty = int((~maps.reshape(m, -1).any(1)).sum())
    if n_empty:
        some = "its map is" if m == 1 else f"{n_empty:,} of {m:,} maps are"
        log.warning("%s zero everywhere: nothing there raises the score", some)
    if plan.method == "integrated_gradients":
        _say_incomplete(plan, columns["completeness_error"])
    status = np.full(m, Status.OK, np.uint8)
    status[list(reasons)] = Status.FAILED
    elsewhere = facts.pop("made_by", {})
    derived.write_maps(
        folder / derived.MAPS_NAME,
        method=plan.method,
        maps=maps,
        ids=[plan.source.ids[row] for row in plan.rows],
        rows=plan.rows,
        status=status,
        targets=arrays["targets"],
        labels=arrays.get("labels"),
        label_names=plan.source.label_names,
        columns=columns,
        attrs={**attrs, **facts, **elsewhere},
    )
    return len(reasons)


def require_target(plan: Plan) -> None:
    """Refuse a target that can be seen to be none before any pass.

    Raises:
        ConfigError: It is a list that is not one for each sample, or no name of a class, or there
            are no labels.
    """
    target, m = plan.target, len(plan.rows)
    if target is None or target == "predicted" or isinstance(target, int):
        return
    if not isinstance(target, str):
        if len(target) != m:
            raise ConfigError(
                f"target lists {number_of(len(target), 'class', 'classes')} for "
                f"{number_of(m, 'sample', 'samples')}; give one for all or one each"
            )
        return
    names = plan.class_names or []
    if target in names:
        return
    if target != "label":
        (near,) = nearest(target, ["predicted", "label", *names], n=1)
        many = f", a list of {m} numbers" if m > 1 else ""
        by_name = (
            f"the name of one of the {len(names):,} classes"
            if names
            else "a class by its name with classes=FILE"
        )
        raise ConfigError(
            f"target={target!r} must be predicted, label, the number of a class{many}, or "
            f"{by_name}; the nearest is {near}"
        )
    if plan.source.labels is None and not plan.source.labels_in_items:
        raise ConfigError(
            f"{plan.source.name} has no labels, so target=label says nothing; choose "
            "target=predicted, or the number of a class"
        )


def _targets(plan: Plan, samples: Samples) -> Array | None:
    """The class of each sample, shape ``(m,)``; None for what is predicted."""
    target, m = plan.target, len(plan.rows)
    if target is None or target == "predicted":
        return None
    if isinstance(target, str):
        names = plan.class_names or []
        if target in names:
            return np.full(m, names.index(target), np.int64)
        return _of_labels(samples)
    if isinstance(target, int):
        return np.full(m, target, np.int64)
    return np.array(target, np.int64)


def _of_labels(samples: Samples) -> Array:
    """The label of each sample; which class that is takes the scores to say."""
    assert samples.labels is not None
    targets = samples.labels.astype(np.int64)
    for place in np.flatnonzero(targets < 0).tolist():
        samples.reasons.setdefault(place, "DataError: it has no label, which target=label needs")
    return targets


def _as_classes(
    plan: Plan, run: saliency.Scored, inputs: Tensor, say: Callable[[str], None]
) -> Array | None:
    """The class that each label names, and -1 at the end; None where targets are classes."""
    of_labels = plan.target == "label"
    if plan.class_names is None and not of_labels:
        return None
    with torch.no_grad():
        n_classes = run(inputs[:1]).shape[1]
    known = class_of_label(
        plan.source.label_names if of_labels else (),
        plan.source.label_numbers,
        plan.class_names,
        n_classes=n_classes,
        title=run.title,
    )
    if of_labels and known is None:
        say("target=label: the label is the number of the class")
    elif of_labels and known is not None:
        words = numbered(plan.source.label_names, known)
        say(f"target=label: as classes of {run.title} the labels are: {words}")
    return None if known is None else np.append(known, -1)


def _maker(
    plan: Plan,
    run: saliency.Scored,
    samples: Samples,
    inputs: Tensor,
    say: Callable[[str], None],
) -> tuple[Callable[..., saliency.Maps], dict[str, Any]]:
    """The method as a function of a batch, and what it does, for the file."""
    if plan.method in saliency.ON_LAYER:
        layer = _layer(plan, run, inputs, say)
        is_plus = plan.method == "gradcam++"

        def at_layer(run: saliency.Scored, inputs: Tensor, targets: Tensor | None) -> saliency.Maps:
            return saliency.gradcam(run, inputs, targets, layer=layer, plus_plus=is_plus)

        return at_layer, {"layer": layer.point.name, "grid": layer.grid.words}
    if plan.method in ("guided_backprop", "input_gradient"):
        return getattr(saliency, plan.method), {}
    value, baseline = _baseline(plan, samples, inputs, say)
    if plan.method == "integrated_gradients":

        def along(run: saliency.Scored, inputs: Tensor, targets: Tensor | None) -> saliency.Maps:
            return saliency.integrated_gradients(
                run,
                inputs,
                targets,
                baseline=baseline,
                steps=plan.steps,
                batch_size=plan.batch_size,
            )

        return along, {"baseline": value, "steps": plan.steps}
    side = min(inputs.shape[2:])
    window = max(1, side // WINDOWS_ACROSS) if plan.window is None else plan.window
    if window > side:
        raise ConfigError(f"window={window} px is larger than the pictures, {side} px")
    stride = max(1, window // 2) if plan.stride is None else plan.stride
    if stride > window:
        raise ConfigError(
            f"stride={stride} px leaves pixels between windows of {window} px that nothing hides; "
            f"choose at most stride={window}"
        )
    say(f"occlusion by squares of {window} px, each {stride} px from the next")

    def hidden(run: saliency.Scored, inputs: Tensor, targets: Tensor | None) -> saliency.Maps:
        return saliency.occlusion(
            run,
            inputs,
            targets,
            baseline=baseline,
            window=window,
            stride=stride,
            batch_size=plan.batch_size,
        )

    return hidden, {"baseline": value, "window_px": window, "stride_px": stride}


def _layer(
    plan: Plan, run: saliency.Scored, inputs: Tensor, say: Callable[[str], None]
) -> saliency.Layer:
    """The layer of a CAM, with its grid."""
    one = inputs[:1]
    network = saliency.look(run.module, one, title=run.title)
    if plan.points is None:
        point = parse_point(saliency.last_layer(run, network, one))
    else:
        (point,) = plan.points
    with hooks.Capture(run.module, [point], only_here=True) as got, torch.no_grad():
        run(one)
        layer = saliency.as_layer(network, point, got[point.name], n=1)
    say(f"layer: {point.name}, {layer.width:,} maps of {layer.grid.words}")
    return layer


def _baseline(
    plan: Plan, samples: Samples, inputs: Tensor, say: Callable[[str], None]
) -> tuple[float, Tensor]:
    """What stands for nothing: as it is told, and as it enters."""
    assert samples.inputs is not None
    are_pixels = samples.inputs.dtype == torch.uint8
    usual = GREY if plan.method == "occlusion" and are_pixels else 0.0
    value = usual if plan.baseline is None else plan.baseline
    if are_pixels and not 0 <= value <= 1:
        raise ConfigError(f"baseline is a pixel from 0 (black) to 1 (white), not {value}")
    flat = torch.full((1, *inputs.shape[1:]), value, dtype=torch.float32)
    if are_pixels:
        flat = samples.normalize(flat * 255)
    say(f"baseline: {f'pixels of {value:g}' if are_pixels else f'{value:g} everywhere'}")
    return value, flat.to(inputs.device)


def _say_incomplete(plan: Plan, error: Array) -> None:
    far = np.flatnonzero(error > saliency.INCOMPLETE_FROM)
    if len(far):
        worst = int(far[np.argmax(error[far])])
        log.warning(
            "%s the difference of the scores by more than %.0f %%, %s by %.3g %%; "
            "more steps than %s come nearer",
            "its map misses" if len(error) == 1 else f"{len(far):,} of {len(error):,} maps miss",
            100 * saliency.INCOMPLETE_FROM,
            plan.source.ids[plan.rows[worst]],
            100 * error[worst],
            plan.steps,
        )


_NAMES = {
    "guided_backprop": "Guided backpropagation",
    "input_gradient": "Input gradient",
    "gradcam": "Grad-CAM",
    "gradcam++": "Grad-CAM++",
    "integrated_gradients": "Integrated gradients",
    "occlusion": "Occlusion",
}
_MEASURED = {
    "guided_backprop": "largest guided gradient of the channels, absolute",
    "input_gradient": "largest gradient of the channels, absolute",
    "gradcam": "weighted sum of the maps",
    "gradcam++": "weighted sum of the maps",
    "integrated_gradients": "part in the score, sum over the channels",
    "occlusion": "fall of the score where it is hidden",
}


def _caption(
    plan: Plan, target: int, columns: Mapping[str, Array], place: int, samples: Samples
) -> list[str]:
    name = f" {plan.class_names[target]}" if plan.class_names is not None else ""
    how = " (of the label)" if plan.target == "label" else " (chosen)"
    if plan.target in (None, "predicted"):
        how = ""
    lines = [f"class {target}{name}{how}"]
    score, share = columns["scores"][place], columns["shares"][place]
    if np.isnan(share):
        lines.append(f"score {score:.3g}")
    else:
        lines.append(
            f"score {score:.3g}, softmax {share:.2g}" if score != share else f"score {score:.2f}"
        )
    if samples.labels is not None and samples.labels[place] >= 0:
        label = int(samples.labels[place])
        names = plan.source.label_names
        lines.append(f"label {names[label] if len(names) else label}")
    if "completeness_error" in columns:
        error = 100 * columns["completeness_error"][place]
        shown = "< 0.1" if error < 0.1 else f"{error:.2g}" if error < 100 else f"{error:,.0f}"
        lines.append(f"completeness error {shown} %")
    return lines
