"""The stage ``explain``: feature maps, and maps of what the score of a class depends on."""

import contextlib
import dataclasses
import fnmatch
import logging
import os
import re
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml

from embedx import derived, figures, saliency, store, unfinished
from embedx.checks import checked
from embedx.class_maps import ClassMaps, require_target, write_maps
from embedx.configs import public_config, settings_sha256
from embedx.disk import replace_file, replacing_folder, writing_lock
from embedx.errors import (
    ConfigError,
    DataError,
    LayerError,
    StoreError,
    listed,
    nearest,
    number_of,
)
from embedx.explainer import (
    OF_SEVERAL_PASSES,
    Part,
    Plan,
    running,
)
from embedx.feature_maps import FeatureMaps, draw_layers, summed
from embedx.inputs import (
    Network,
    as_model,
    as_source,
    device_of,
    is_by_sample,
    made_by,
)
from embedx.matrix import Array
from embedx.models import Model, Preprocess
from embedx.objectives import read_classes
from embedx.parts import AGAIN, ArrayParts, Engine, Feed
from embedx.points import Point, parse_point, resolve_points
from embedx.progress import Progress
from embedx.sources import Source

log = logging.getLogger("embedx")

Method = Literal[
    "feature_maps",
    "guided_backprop",
    "gradcam",
    "gradcam++",
    "integrated_gradients",
    "input_gradient",
    "occlusion",
]
LIMIT = 4
STEPS = 50
N_CHANNELS = 4

_ON_CLASSES = tuple(name for name in Method.__args__ if name != "feature_maps")  # type: ignore[attr-defined]
# The methods that have use for a key.
_USES: dict[str, tuple[str, ...]] = {
    "layers": ("feature_maps", *saliency.ON_LAYER),
    "channels": ("feature_maps",),
    "n_channels": ("feature_maps",),
    "target": _ON_CLASSES,
    "classes": _ON_CLASSES,
    "baseline": OF_SEVERAL_PASSES,
    "steps": ("integrated_gradients",),
    "window": ("occlusion",),
    "stride": ("occlusion",),
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What was explained.

    Attributes:
        path: The folder.
        pictures: The files of pictures in it, by the numbers in their names.
        maps: The maps, opened; None of feature maps, which are pictures alone.
    """

    path: Path
    pictures: list[Path]
    maps: derived.Maps | None


@checked
def explain(
    model: Network,
    data: Any,
    *,
    method: Method = "feature_maps",
    layers: str | Sequence[str] | None = None,
    ids: str | Sequence[str] | None = None,
    rows: int | Sequence[int] | None = None,
    limit: int | None = None,
    target: int | str | Sequence[int] | None = None,
    classes: str | Sequence[str] | None = None,
    channels: Literal["first", "active"] | Sequence[int] | None = None,
    n_channels: int | None = None,
    baseline: float | None = None,
    steps: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 16,
    device: str | torch.device = "auto",
    run: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    preprocess: Preprocess | None = None,
    labels: Any = None,
    config: Mapping[str, Any] | None = None,
    engine: Engine | Feed | None = None,
) -> Explanation:
    """Show the feature maps of layers, or where in a picture the score of a class comes from.

    ``feature_maps`` draws a picture a layer, and for each sample a sheet through the depth of the
    network. The other methods draw a picture a sample (what enters, its map, and one on the other)
    and keep the maps as they are in ``maps.h5``. The score is what the model gives for the class,
    most often a logit. What is there already with the same settings is not made again.

    Args:
        model: A network, or a :class:`~embedx.models.Model` from :mod:`embedx.models`.
        data: Pictures, as :func:`embedx.extract` takes data.
        method: ``feature_maps``, ``gradcam``, ``gradcam++``, ``guided_backprop``,
            ``input_gradient``, ``integrated_gradients`` or ``occlusion``.
        layers: Capture points that give feature maps. ``feature_maps`` takes one or several, and of
            a glob those that give some; where not given, one for each size of map. ``gradcam`` and
            ``gradcam++`` take one; where not given, the last before pooling, or in a transformer
            the last whose tokens of the picture have a gradient.
        ids: The samples to explain, by id.
        rows: The samples to explain, by number.
        limit: How many samples from the first on, where neither ``ids`` nor ``rows`` are given; 4
            where not given.
        target: The class: ``predicted`` (where not given), ``label`` (the sample's own), a number,
            a number for each sample, or a name of ``classes``.
        classes: Names of the classes, in the order of the scores: a list, or a text file with a
            name a line. With them the class of a ``label`` is the one of its name; without them
            that of its number, or of its place where there are as many names as scores.
        channels: Which maps of a layer: numbers, ``first`` (where not given), or ``active``, those
            with the largest mean over the samples, what is negative counted as 0.
        n_channels: How many are ``first`` or ``active``; 4 where not given.
        baseline: What stands for nothing, in the place of a pixel from 0 to 1 (of tensors as they
            enter): where not given 0, black, for ``integrated_gradients``, and 0.5, grey, for
            ``occlusion`` (0 of tensors).
        steps: Points on the way from the baseline; 50 where not given.
        window: Side in px of the square that hides a part; a seventh of the shorter side where not
            given.
        stride: From a square to the next, in px; half its side where not given.
        batch_size: Samples, or hidden pictures, or points on the way, in a pass.
        device: ``auto`` (cuda, mps, cpu; a live network's own), or one of torch's names.
        run: Folder of the run; one below ``outputs``, named after model and data, where not given.
        out: Folder to fill; ``explain/<method>-<hash>`` below that of the run where not given.
        overwrite: Replace what another explanation left in ``out``.
        preprocess: For pictures into a live network, or in the place of a Model's own; tensors
            enter unchanged without it.
        labels: For data that has none of its own, n of any kind.
        config: The settings to record; those of this call where not given.
        engine: What has the samples explained, a batch a part, by other processes; given by the
            command line alone.

    Returns:
        The pictures and the maps.

    Raises:
        ConfigError: An argument is out of its range, or of no use with the method.
        LayerError: A layer is not there, gives no feature maps, or does not lead to the scores.
        ShapeError: The model gives no class scores ``(n, classes)``, or takes no pictures.
        DataError: A sample is not there, or every one failed, or parts that an engine could not
            have made.
        Interrupted: A signal came while an engine was at work.
        ModelError: A pass failed, or has no ReLU for ``guided_backprop``.
        DependencyError: The ``viz`` extra is not installed, or captum (``explain``), which
            ``integrated_gradients`` and ``occlusion`` need.
        StoreError: No space, or ``out`` holds something else.
    """
    given = {
        "layers": layers,
        "channels": channels,
        "n_channels": n_channels,
        "target": target,
        "classes": classes,
        "baseline": baseline,
        "steps": steps,
        "window": window,
        "stride": stride,
    }
    for key, value in given.items():
        if value is not None and method not in _USES[key]:
            raise ConfigError(
                f"{key} has no use with method={method}; it is for {', '.join(_USES[key])}"
            )
    _require_numbers(batch_size=batch_size, limit=limit, n_channels=n_channels, steps=steps)
    _require_numbers(window=window, stride=stride)
    are_listed = channels is not None and not isinstance(channels, str)
    if are_listed and (not channels or n_channels is not None):
        raise ConfigError(
            "channels lists which maps are drawn; name at least one, and leave n_channels out"
        )
    figures.require(f"method={method}")
    if method in OF_SEVERAL_PASSES:
        saliency.require_captum(f"method={method}")
    described = as_model(model, preprocess=preprocess)
    if described.tokenizer is not None:
        raise ConfigError(
            f"{described.name} takes texts, and what is explained are pictures; choose a model of "
            "pictures, such as model=resnet18"
        )
    source = as_source(data, labels=labels, ids=None, num_workers=0)
    if not isinstance(source, Source):
        raise ConfigError(
            f"rows of {source.name} come shard by shard and cannot be chosen; unpack some into a "
            "folder: data=folder data.root=FOLDER"
        )
    for note in described.notes:
        log.warning(note)
    source.tell()
    chosen = _chosen_rows(source, ids=ids, rows=rows, limit=limit)
    if isinstance(engine, Engine):  # the network runs elsewhere, where another device may be
        torch_device = torch.device("cpu")
    else:
        torch_device = device_of(str(device), described, is_live=not isinstance(model, Model))
    points = None
    of_globs: list[Point] = []
    if layers is not None:
        title = described.name if isinstance(model, Model) else None
        points = resolve_points(described.module, layers, penultimate=described.layer, title=title)
        _require_forward(points, method)
        of_globs = _of_globs(described.module, layers, points)
    class_names = read_classes(classes)
    settings = {
        "method": method,
        **given,
        "layers": None if points is None else [point.name for point in points],
        "classes": class_names,
        "rows": chosen.tolist(),
    }
    identity = {
        **{key: settings[key] for key in settings if settings[key] is not None},
        "model": described.source,
        "weights_sha256": described.weights_sha256,
        "code": described.code,
        "preprocess": described.preprocess.config() if described.preprocess else None,
        "items": source.fingerprint,
        "ids": [source.ids[row] for row in chosen],
        "labels": None if source.labels is None else source.labels[chosen].tolist(),
        "label_names": list(source.label_names),
        "label_numbers": list(source.label_numbers or ()) if target == "label" else None,
        "default_dtype": str(torch.get_default_dtype()),
        "batch_size": batch_size
        if source.collate is not None or not is_by_sample(described)
        else None,
        "revision": saliency.SALIENCY_REVISION,
    }
    file_id = settings_sha256(identity)
    slug = f"{method}-{file_id[:6]}"
    of_run = Path(run) if run else Path("outputs") / f"{described.name}-{source.name}"
    folder = Path(out) if out else of_run / "explain" / slug
    if isinstance(engine, Feed):
        engine.require_same(file_id, identity)
    elif _is_done(folder, file_id, overwrite=overwrite):
        log.info("%s is complete already with these settings: nothing to do", folder)
        _remove_parts(folder)  # where it was killed when all was done but this
        return _opened(folder)
    log.info(
        "explaining %s of %s by %s on %s into %s",
        number_of(len(chosen), "sample", "samples"),
        f"{described.name} over {source.name}",
        method,
        torch_device,
        folder,
    )
    plan = Plan(
        model=described,
        source=source,
        rows=chosen,
        method=method,
        points=points,
        of_globs=of_globs,
        target=target,
        class_names=class_names,
        channels="first" if channels is None else channels,
        n_channels=N_CHANNELS if n_channels is None else n_channels,
        baseline=baseline,
        steps=STEPS if steps is None else steps,
        window=window,
        stride=stride,
        batch_size=batch_size,
        device=torch_device,
        only_pictures=preprocess is not None,
    )
    require_target(plan)
    if isinstance(engine, Feed):
        _make_parts(plan, engine, folder)
        return Explanation(folder, [], None)
    recorded = dict(config) if config is not None else {"batch_size": batch_size, **settings}
    attrs = {
        "id": file_id,
        "method": method,
        "data": source.name,
        "config": public_config(recorded, also=("method", *_USES, "ids", "rows", "limit")),
        **made_by(described, torch_device),
    }
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_empty_folders(folder))
        if engine is not None:
            stack.enter_context(writing_lock(folder))
            if overwrite:  # from the start: parts may be of code that has changed unseen
                _remove_parts(folder)
        new = stack.enter_context(replacing_folder(folder, foreign=_foreign))
        if engine is None:
            making = _made_here(plan, new)
        else:
            asked = {"file_id": file_id, "identity": identity}
            again = None if overwrite else AGAIN
            making = _made_elsewhere(plan, engine, folder, new, asked, again=again)
        parts = stack.enter_context(contextlib.closing(making))  # the network is put back at once
        if method == "feature_maps":
            n_failed = draw_layers(plan, parts, new)
        else:
            n_failed = write_maps(plan, parts, new, attrs)
        text = yaml.safe_dump({"id": file_id, **recorded}, sort_keys=False, allow_unicode=True)
        replace_file(new / _CONFIG_NAME, text.encode())
    _remove_parts(folder)
    found = _opened(folder)
    n_good = len(chosen) - n_failed
    seconds = time.monotonic() - started
    log.info(
        "wrote %s: %s of %s, %s failed%s, %.1f s, %.1f images/s",
        folder,
        number_of(len(found.pictures), "picture", "pictures"),
        number_of(n_good, "sample", "samples"),
        f"{n_failed:,}",
        "" if found.maps is None else f", {derived.MAPS_NAME} with maps {found.maps.maps.shape}",
        seconds,
        n_good / max(seconds, 1e-9),
    )
    return found


# --------------------------------------------------------------------------- settings

_CONFIG_NAME = "config.yaml"


def _require_numbers(**values: int | None) -> None:
    for key, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{key} must be at least 1, not {value}")


def _chosen_rows(
    source: Source,
    *,
    ids: str | Sequence[str] | None,
    rows: int | Sequence[int] | None,
    limit: int | None,
) -> Array:
    """The numbers of the rows that are asked for, each once, in the order asked for."""
    n = len(source)
    if ids is not None and rows is not None:
        raise ConfigError("ids and rows both choose the samples; leave one out")
    if ids is None and rows is None:
        return np.arange(min(LIMIT if limit is None else limit, n))
    if limit is not None:
        key = "ids" if rows is None else "rows"
        raise ConfigError(f"{key} and limit={limit} both choose the samples; leave one out")
    if rows is not None:
        numbers = [rows] if isinstance(rows, int) else list(rows)
        for row in numbers:
            if not 0 <= row < n:
                raise DataError(f"there is no row {row}: {source.name} has {n:,}, 0 to {n - 1}")
    else:
        asked = [ids] if isinstance(ids, str) else list(ids or ())
        places = {name: row for row, name in enumerate(source.ids)}
        for name in asked:
            if name not in places:
                raise DataError(
                    f"{source.name} has no sample {name!r}; the nearest of its {n:,} ids are "
                    f"{', '.join(nearest(name, places))}"
                )
        numbers = [places[name] for name in asked]
    if not numbers:
        raise ConfigError("no sample is named; name at least one, or leave ids and rows out")
    return np.array(list(dict.fromkeys(numbers)))


def _require_forward(points: Sequence[Point], method: str) -> None:
    for point in points:
        if point.what not in ("output", "input"):
            raise LayerError(
                f"{point.name} is a gradient, and {method} takes what a layer gives; name the "
                f"layer alone: {point.layer}"
            )
    if method in saliency.ON_LAYER and len(points) > 1:
        raise ConfigError(
            f"method={method} takes one layer, and layers names {len(points)}: "
            f"{listed([point.name for point in points], most=4)}; run it once for each"
        )


def _of_globs(
    module: torch.nn.Module, layers: str | Sequence[str], points: Sequence[Point]
) -> list[Point]:
    """The points that only globs stand for."""
    known = {name for name, _ in module.named_modules()}
    asked = [layers] if isinstance(layers, str) else layers
    named = [parse_point(text) for text in asked if text != "penultimate"]
    globs = [point for point in named if point.layer not in known]
    return [
        point
        for point in points
        if point not in named and any(fnmatch.fnmatchcase(point.layer, g.layer) for g in globs)
    ]


# --------------------------------------------------------------------------- the folder


def _is_done(folder: Path, file_id: str, *, overwrite: bool) -> bool:
    """Whether a folder holds this explanation.

    Raises:
        StoreError: It holds another one, or something that is not ours.
    """
    if not folder.exists() and not folder.is_symlink():
        return False
    config = folder / _CONFIG_NAME
    if not folder.is_dir() or (any(folder.iterdir()) and not config.is_file()):
        raise StoreError(
            f"{folder} is there and was not written by embedx; move it, or choose another "
            "out=FOLDER"
        )
    if not config.is_file():
        return False
    derived.require_ours(config, re.compile(rb"id: '?[0-9a-f]{64}'?\s"))
    if overwrite:
        return False
    there = re.match(r"id: '?([0-9a-f]{64})", config.read_text(encoding="utf-8"))
    if there is None or there[1] != file_id:
        raise StoreError(
            f"{folder} holds another explanation; choose another name or out folder, or replace "
            "it with overwrite=true"
        )
    return True


def _foreign(folder: Path) -> set[str]:
    """Names in a folder that are no part of an explanation."""
    return {path.name for path in folder.iterdir() if not _is_own(path)}


@contextlib.contextmanager
def _no_empty_folders(folder: Path) -> Iterator[None]:
    """What is refused or stopped leaves no folder behind that was made for it."""
    made = [above for above in folder.absolute().parents if not above.exists()]
    try:
        yield
    finally:
        for above in made:
            with contextlib.suppress(OSError):  # it holds what was made
                above.rmdir()


def _is_own(path: Path) -> bool:
    if path.suffix == ".png":
        with contextlib.suppress(StoreError):
            derived.require_ours(path, derived.PICTURE_MARKS[".png"])
            return True
        return False
    return path.name in (_CONFIG_NAME, derived.MAPS_NAME) and path.is_file()


def _opened(folder: Path) -> Explanation:
    maps = folder / derived.MAPS_NAME
    return Explanation(
        folder,
        sorted(
            (path for path in folder.glob("*.png") if _is_own(path)),
            key=lambda path: figures.natural(path.name),
        ),
        derived.open_maps(maps) if maps.exists() else None,
    )


# --------------------------------------------------------------------------- parts


def _explainer(plan: Plan) -> type["FeatureMaps"] | type["ClassMaps"]:
    return FeatureMaps if plan.method == "feature_maps" else ClassMaps


def _made_here(plan: Plan, folder: Path) -> Generator[Part]:
    """The parts in their order, by this process."""
    with (
        running(plan) as enter,
        Progress(len(plan.rows), what=plan.method) as progress,
    ):
        explainer = _explainer(plan)(plan, enter, log.info)
        if isinstance(explainer, FeatureMaps) and plan.channels == "active":
            explainer.pick(explainer.activity(number) for number in range(plan.n_parts))
        for number in range(plan.n_parts):
            yield explainer.part(number, folder)
            progress.advance(len(plan.part(number).rows))


def _array_parts(plan: Plan, folder: Path, asked: Mapping[str, Any], kind: str) -> ArrayParts:
    of = settings_sha256({**asked, "identity": None, "batch_size": plan.batch_size})
    return ArrayParts(_beside(folder, kind), of=of, n=plan.n_parts)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}")


_KINDS = ("activity", "samples")


def _remove_parts(folder: Path) -> None:
    """Take away what was left beside an explanation."""
    for kind in _KINDS:
        if unfinished.parts_id(_beside(folder, kind)) is not None:
            unfinished.remove_parts(_beside(folder, kind))


def _made_elsewhere(
    plan: Plan,
    engine: Engine,
    folder: Path,
    new: Path,
    asked: dict[str, Any],
    *,
    again: str | None,
) -> Generator[Part]:
    """The parts in their order, by an engine; they stay beside the folder until it is whole."""
    kinds = _KINDS if plan.channels == "active" and plan.method == "feature_maps" else _KINDS[1:]
    for kind in kinds:
        asked = {**asked, "kind": kind}
        parts = _array_parts(plan, folder, asked, kind)
        parts.begin()
        parts.make(engine, about=asked, what=kind, again=again)
        if kind == "activity":
            found = (parts.read(number)[0] for number in range(parts.n))
            asked["activity"] = {name: total.tolist() for name, total in summed(found).items()}
    first: dict[str, Any] = {}
    said: list[str] = []
    is_said = False
    for number in range(parts.n):
        arrays, about = parts.read(number)
        first = first or about
        for line in () if said else about["said"]:
            log.info("%s", line)
        said = said or about["said"]
        one, other = parts.title(0), parts.title(number)
        was, now = first["made_by"], about["made_by"]
        if was["device"] != now["device"]:
            raise StoreError(
                f"{folder}: {one} was made with device={was['device']} and {other} with "
                f"device={now['device']}; make them by the same: overwrite=true"
            )
        words = store.other_environment(one, other, was, now)
        if words and not is_said:
            is_said = True
            log.warning("%s", words)
        for picture in parts.folder(number).glob("*.png"):
            shutil.copyfile(picture, new / picture.name)
        reasons = {int(place): reason for place, reason in about["reasons"].items()}
        yield Part(reasons, arrays, {**about["facts"], "made_by": about["made_by"]})


def _make_parts(plan: Plan, feed: Feed, folder: Path) -> None:
    """Make parts, in a worker of an engine."""
    said: list[str] = []
    about = feed.about
    parts = _array_parts(plan, folder, about, about["kind"])
    environment = made_by(plan.model, plan.device)
    with running(plan) as enter:
        explainer = _explainer(plan)(plan, enter, said.append)
        if "activity" in about and isinstance(explainer, FeatureMaps):
            explainer.pick([{name: np.array(one) for name, one in about["activity"].items()}])
        for number in feed:
            if about["kind"] == "activity":
                assert isinstance(explainer, FeatureMaps)
                parts.write(number, explainer.activity(number), {})
                continue
            part = explainer.part(number, parts.folder(number))
            found = {"reasons": part.reasons, "facts": part.facts, "said": said}
            found["made_by"] = {key: environment[key] for key in ("device", "environment")}
            parts.write(number, part.arrays, found)
