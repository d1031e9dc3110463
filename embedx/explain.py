"""The stage ``explain``: feature maps, and maps of what the score of a class depends on."""

import contextlib
import dataclasses
import fnmatch
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from torch import Tensor

from embedx import figures, fold, grids, hooks, overlays, saliency, sources, store
from embedx.checks import checked
from embedx.configs import public_config, settings_sha256
from embedx.disk import replace_file, replacing_folder, writing_lock
from embedx.errors import (
    ConfigError,
    DataError,
    LayerError,
    ShapeError,
    StoreError,
    listed,
    nearest,
    number_of,
)
from embedx.inputs import (
    Batches,
    Network,
    arithmetic,
    as_model,
    as_source,
    channels_last,
    device_of,
    made_by,
    placed,
    seed_all,
)
from embedx.models import Model, Preprocess
from embedx.objectives import class_of_label, numbered, read_classes
from embedx.parts import AGAIN, ArrayParts, Engine, Feed
from embedx.passes import on_device, run_model, undisturbed
from embedx.pictures import whole_pictures
from embedx.points import Point, parse_point, resolve_points
from embedx.progress import Progress
from embedx.sources import Source
from embedx.store import Array, Status

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
WINDOWS_ACROSS = 7  # of an occlusion, side by side on the shorter side
GREY = 0.5

_ON_CLASSES = tuple(name for name in Method.__args__ if name != "feature_maps")  # type: ignore[attr-defined]
_BY_BASELINE = ("integrated_gradients", "occlusion")
# The methods that have use for a key.
_USES: dict[str, tuple[str, ...]] = {
    "layers": ("feature_maps", *saliency.ON_LAYER),
    "channels": ("feature_maps",),
    "n_channels": ("feature_maps",),
    "target": _ON_CLASSES,
    "classes": _ON_CLASSES,
    "baseline": _BY_BASELINE,
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
    maps: store.Maps | None


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
    if method in _BY_BASELINE:
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
        "batch_size": None if fold.is_by_sample(described.module) else batch_size,
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
    plan = _Plan(
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
    _require_target(plan)
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
            n_failed = _draw_layers(plan, parts, new)
        else:
            n_failed = _write_maps(plan, parts, new, attrs)
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
        "" if found.maps is None else f", {store.MAPS_NAME} with maps {found.maps.maps.shape}",
        seconds,
        n_good / max(seconds, 1e-9),
    )
    return found


# --------------------------------------------------------------------------- settings

_CONFIG_NAME = "config.yaml"


@dataclasses.dataclass(frozen=True)
class _Plan:
    model: Model
    source: Source
    rows: Array
    method: str
    points: list[Point] | None
    of_globs: Sequence[Point]
    target: int | str | Sequence[int] | None
    class_names: list[str] | None
    channels: str | Sequence[int]
    n_channels: int
    baseline: float | None
    steps: int
    window: int | None
    stride: int | None
    batch_size: int
    device: torch.device
    only_pictures: bool

    @property
    def n_parts(self) -> int:
        """How many batches there are, each of which is a part of the work."""
        return -(-len(self.rows) // self.batch_size)

    def part(self, number: int) -> "_Plan":
        """The plan of a batch alone."""
        some = slice(number * self.batch_size, (number + 1) * self.batch_size)
        target = self.target
        if target is not None and not isinstance(target, (int, str)):
            target = target[some]
        return dataclasses.replace(self, rows=self.rows[some], target=target)


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
    store.require_ours(config, re.compile(rb"id: '?[0-9a-f]{64}'?\s"))
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
            store.require_ours(path, store.PICTURE_MARKS[".png"])
            return True
        return False
    return path.name in (_CONFIG_NAME, store.MAPS_NAME) and path.is_file()


def _opened(folder: Path) -> Explanation:
    maps = folder / store.MAPS_NAME
    return Explanation(
        folder,
        sorted(
            (path for path in folder.glob("*.png") if _is_own(path)),
            key=lambda path: figures.natural(path.name),
        ),
        store.open_maps(maps) if maps.exists() else None,
    )


# --------------------------------------------------------------------------- the samples


@dataclasses.dataclass
class _Samples:
    """A batch of m samples.

    Attributes:
        places: Of those that were read.
        inputs: They, on the CPU, as they were read; None where none was.
        pictures: As shown, shape ``(h, w, 3)`` uint8, by place.
        reasons: Why one failed, by place.
        labels: Shape ``(m,)`` int32, -1 for none; None without labels.
        normalize: From what was read to what enters.
    """

    places: list[int]
    inputs: Tensor | None
    pictures: dict[int, Array]
    reasons: dict[int, str]
    labels: Array | None
    normalize: Callable[[Tensor], Tensor]


def _read(plan: _Plan) -> _Samples:
    """Read a batch as extract does; a sample that cannot be read fails alone."""
    source, rows = plan.source, plan.rows
    prepared = plan.model.preprocess
    draws = source.draws or (prepared is not None and prepared.is_own)

    def read(place: int) -> Any:
        row = int(rows[place])
        if draws:  # as of the row in the whole, and not of its place among those chosen
            sources.seed_random(row)
        return source.read(row)

    some = dataclasses.replace(
        source,
        ids=[source.ids[row] for row in rows],
        read=read,
        labels=None if source.labels is None else np.asarray(source.labels)[rows],
        item_hashes=None,
        metadata={},
    )
    batches = Batches(
        some, plan.model, batch_size=plan.batch_size, only_pictures=plan.only_pictures
    )
    with contextlib.ExitStack() as stack:
        if source.reads_files:
            stack.enter_context(whole_pictures())
        if draws:
            stack.enter_context(sources.random_put_back())
        batch = batches[0]
    if batch.fatal is not None:
        raise batch.fatal
    labels = batch.labels if source.labels_in_items else some.labels
    samples = _Samples([], None, {}, dict(batch.reasons), labels, lambda tensor: tensor)
    for piece in batch.pieces:  # one, or none where all have failed
        inputs = piece.inputs
        if not isinstance(inputs, Tensor) or inputs.ndim != 4:
            shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else ", ".join(inputs)
            raise ShapeError(
                f"what is explained are pictures (n, c, h, w), and what enters "
                f"{plan.model.name} is {shape}"
            )
        samples.places = [i for i in range(batch.size) if i not in batch.reasons]
        samples.inputs = kept = inputs[samples.places]
        if not batch.are_pixels and not kept.is_floating_point():
            raise ShapeError(
                f"the inputs are {str(kept.dtype).removeprefix('torch.')}, which have no gradient; "
                "give floats, or pictures"
            )
        if batch.are_pixels and plan.model.preprocess is not None:
            samples.normalize = plan.model.preprocess.normalize
        shown = kept.numpy() if batch.are_pixels else kept.detach().float().numpy()
        for place, one in zip(samples.places, shown, strict=True):
            samples.pictures[place] = overlays.shown(one)
    return samples


Enter = Callable[[Tensor, int], Tensor]


@contextlib.contextmanager
def _running(plan: _Plan) -> Iterator[Enter]:
    """The network on its device, as it will be put back; gives what makes a batch enter, of which
    it is told the number of the first row."""
    module = plan.model.module
    is_known = fold.is_known(module)
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_device(module, plan.device))
        stack.enter_context(undisturbed(module, device=plan.device))
        stack.enter_context(arithmetic("fp32"))
        stack.enter_context(saliency.ready(module))

        def enter(tensor: Tensor, row: int) -> Tensor:
            seed_all(row, plan.device)
            inputs = placed(tensor, plan.device)
            if is_known:
                inputs = channels_last(inputs)
            assert isinstance(inputs, Tensor)
            return inputs

        yield enter


# --------------------------------------------------------------------------- parts


@dataclasses.dataclass
class _Part:
    """What was found of a batch; beside it there is a picture of each sample.

    Attributes:
        reasons: Why samples failed, by their place in the batch.
        arrays: Of the samples.
        facts: Plain values.
    """

    reasons: dict[int, str]
    arrays: dict[str, Array] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class _Explainer:
    """The network at work, batch by batch.

    What all batches have in common, such as the layer, is taken from the first sample that can be
    explained, whoever makes which batches.

    Args:
        plan: Of the whole.
        enter: What makes a batch enter.
        say: Called with what is to be told of the whole.
    """

    def __init__(self, plan: _Plan, enter: Enter, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._enter = enter
        self._say = say
        self._read: tuple[int, _Plan, _Samples] | None = None
        self._is_set_up = False

    def part(self, number: int, folder: Path) -> _Part:
        """Explain a batch, with a picture of each sample in the folder."""
        raise NotImplementedError

    def _samples(self, number: int) -> tuple[_Plan, _Samples]:
        """A batch with its plan; the last one is kept."""
        if self._read is None or self._read[0] != number:
            some = self._plan.part(number)
            self._read = number, some, _read(some)
        return self._read[1:]

    def _set_up(self) -> None:
        """Make sure that what all batches have in common is known; one must have a good sample."""
        number = 0
        while not self._is_set_up:
            self._is_set_up = self._set_up_by(*self._samples(number))
            number += 1

    def _set_up_by(self, some: _Plan, samples: _Samples) -> bool:
        """The same by one batch, if it has a good sample."""
        raise NotImplementedError


def _explainer(plan: _Plan) -> type["_FeatureMaps"] | type["_ClassMaps"]:
    return _FeatureMaps if plan.method == "feature_maps" else _ClassMaps


def _made_here(plan: _Plan, folder: Path) -> Generator[_Part]:
    """The parts in their order, by this process."""
    with (
        _running(plan) as enter,
        Progress(len(plan.rows), what=plan.method) as progress,
    ):
        explainer = _explainer(plan)(plan, enter, log.info)
        if isinstance(explainer, _FeatureMaps) and plan.channels == "active":
            explainer.pick(explainer.activity(number) for number in range(plan.n_parts))
        for number in range(plan.n_parts):
            yield explainer.part(number, folder)
            progress.advance(len(plan.part(number).rows))


def _array_parts(plan: _Plan, folder: Path, asked: Mapping[str, Any], kind: str) -> ArrayParts:
    of = settings_sha256({**asked, "identity": None, "batch_size": plan.batch_size})
    return ArrayParts(_beside(folder, kind), of=of, n=plan.n_parts)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}")


_KINDS = ("activity", "samples")


def _remove_parts(folder: Path) -> None:
    """Take away what was left beside an explanation."""
    for kind in _KINDS:
        if store.parts_id(_beside(folder, kind)) is not None:
            store.remove_parts(_beside(folder, kind))


def _made_elsewhere(
    plan: _Plan,
    engine: Engine,
    folder: Path,
    new: Path,
    asked: dict[str, Any],
    *,
    again: str | None,
) -> Generator[_Part]:
    """The parts in their order, by an engine; they stay beside the folder until it is whole."""
    kinds = _KINDS if plan.channels == "active" and plan.method == "feature_maps" else _KINDS[1:]
    for kind in kinds:
        asked = {**asked, "kind": kind}
        parts = _array_parts(plan, folder, asked, kind)
        parts.begin()
        parts.make(engine, about=asked, what=kind, again=again)
        if kind == "activity":
            found = (parts.read(number)[0] for number in range(parts.n))
            asked["activity"] = {name: total.tolist() for name, total in _summed(found).items()}
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
        yield _Part(reasons, arrays, {**about["facts"], "made_by": about["made_by"]})


def _make_parts(plan: _Plan, feed: Feed, folder: Path) -> None:
    """Make parts, in a worker of an engine."""
    said: list[str] = []
    about = feed.about
    parts = _array_parts(plan, folder, about, about["kind"])
    environment = made_by(plan.model, plan.device)
    with _running(plan) as enter:
        explainer = _explainer(plan)(plan, enter, said.append)
        if "activity" in about and isinstance(explainer, _FeatureMaps):
            explainer.pick([{name: np.array(one) for name, one in about["activity"].items()}])
        for number in feed:
            if about["kind"] == "activity":
                assert isinstance(explainer, _FeatureMaps)
                parts.write(number, explainer.activity(number), {})
                continue
            part = explainer.part(number, parts.folder(number))
            found = {"reasons": part.reasons, "facts": part.facts, "said": said}
            found["made_by"] = {key: environment[key] for key in ("device", "environment")}
            parts.write(number, part.arrays, found)


def _require_some(reasons: Mapping[int, str], plan: _Plan) -> None:
    """Raise DataError if all samples failed."""
    if len(reasons) == len(plan.rows):
        place, reason = min(reasons.items())
        raise DataError(
            f"every one of the {len(plan.rows):,} samples failed; the first, "
            f"{plan.source.ids[plan.rows[place]]}: {reason}"
        )


def _say_failed(reasons: Mapping[int, str], plan: _Plan) -> None:
    for place, reason in sorted(reasons.items())[:3]:
        row = plan.rows[place]
        log.warning("failed row %s, %s: %s", row, plan.source.ids[row], reason)
    if len(reasons) > 3:
        log.warning("and %s more failed", len(reasons) - 3)


# --------------------------------------------------------------------------- feature maps


class _FeatureMaps(_Explainer):
    """Feature maps of layers."""

    def __init__(self, plan: _Plan, enter: Enter, say: Callable[[str], None]) -> None:
        super().__init__(plan, enter, say)
        self._points: list[Point] = []
        self._network: saliency.Network | None = None
        self._picked: dict[str, list[int]] = {}

    def pick(self, activity: Iterable[Mapping[str, Array]]) -> None:
        """Choose the channels that are the most active, by what :meth:`activity` gives in order."""
        for name, total in _summed(activity).items():
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

    def part(self, number: int, folder: Path) -> _Part:
        some, samples = self._samples(number)
        part = _Part(samples.reasons)
        columns: list[overlays.Column] = []
        for name, (layer, maps) in self._maps(some, samples).items():
            picked = self._picked.setdefault(name, _picked(self._plan, layer))
            kept = maps[:, picked].to("cpu", torch.float32).numpy()
            part.arrays[f"maps/{len(columns)}"] = kept
            column = overlays.Column(name, layer.width, layer.grid.words, picked, list(kept))
            columns.append(column)
        if not columns:
            return part
        shown = _shown(some, samples.places, samples.pictures)
        part.arrays["places"] = np.array(samples.places)
        part.arrays["pictures"] = np.stack([sample.picture for sample in shown])
        part.facts["layers"] = [
            [column.layer, column.width, column.words, column.channels] for column in columns
        ]
        for i, sample in enumerate(shown):
            figure = overlays.depth_sheet(sample, columns, i, title=_about(self._plan))
            figures.save(figure, folder / f"row-{sample.row}.png")
        return part

    def _set_up_by(self, some: _Plan, samples: _Samples) -> bool:
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

    def _maps(self, some: _Plan, samples: _Samples) -> dict[str, tuple[saliency.Layer, Tensor]]:
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


def _summed(activity: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    total: dict[str, Array] = {}
    for part in activity:
        for name, one in part.items():
            total[name] = total.get(name, 0) + one
    return total


def _shown(
    plan: _Plan, places: Sequence[int], pictures: Mapping[int, Array]
) -> list[overlays.Sample]:
    rows = [int(plan.rows[place]) for place in places]
    return [
        overlays.Sample(plan.source.ids[row], row, pictures[place])
        for place, row in zip(places, rows, strict=True)
    ]


def _about(plan: _Plan) -> str:
    """What is written above every picture of feature maps."""
    return f"{_random_words(plan.model)}{plan.model.name} over {plan.source.name}"


def _draw_layers(plan: _Plan, parts: Iterable[_Part], folder: Path) -> int:
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
        shown += _shown(plan, places, dict(zip(places, part.arrays["pictures"], strict=True)))
        layers = part.facts["layers"]
        maps = maps or [[] for _ in layers]
        for i, of_layer in enumerate(maps):
            of_layer += list(part.arrays[f"maps/{i}"])
    _require_some(reasons, plan)
    _say_failed(reasons, plan)
    with Progress(len(layers), what="draw", unit="pictures") as progress:
        for number, (name, width, words, channels) in enumerate(layers, start=1):
            column = overlays.Column(name, width, words, channels, maps[number - 1])
            figure = overlays.layer_sheet(shown, column, title=_about(plan))
            place = f"{number:0{max(2, len(str(len(layers))))}d}"
            figures.save(figure, folder / f"layer-{place}-{_safe(column.layer)}.png")
            progress.advance(1)
    return len(reasons)


def _with_maps(
    plan: _Plan,
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


def _picked(plan: _Plan, layer: saliency.Layer) -> list[int]:
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


def _random_words(model: Model) -> str:
    """What a picture must say first, for it travels alone."""
    return "RANDOM weights, " if model.weights.startswith("random") else ""


def _safe(name: str) -> str:
    """The name of a layer within that of a file; the number before it tells them apart."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:60]


# --------------------------------------------------------------------------- maps of a class


class _ClassMaps(_Explainer):
    """Maps of what the score of a class depends on."""

    def __init__(self, plan: _Plan, enter: Enter, say: Callable[[str], None]) -> None:
        super().__init__(plan, enter, say)
        self._run = saliency.Scored(plan.model.module, plan.model.name)
        self._make: Callable[..., saliency.Maps] | None = None
        self._facts: dict[str, Any] = {}
        self._classes: Array | None = None

    def part(self, number: int, folder: Path) -> _Part:
        some, samples = self._samples(number)
        targets = _targets(some, samples)
        part = _Part(samples.reasons)
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
        title = f"{_random_words(some.model)}{_NAMES[some.method]} of {some.model.name}{at}"
        good = [place for place in places if place not in part.reasons]
        for place, sample in zip(good, _shown(some, good, samples.pictures), strict=True):
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

    def _set_up_by(self, some: _Plan, samples: _Samples) -> bool:
        _targets(some, samples)
        places, inputs = _good(samples)
        if inputs is None:
            return False
        entered = self._enter(samples.normalize(inputs), int(some.rows[places[0]]))
        self._make, self._facts = _maker(some, self._run, samples, entered, self._say)
        self._classes = _as_classes(some, self._run, entered, self._say)
        return True


def _good(samples: _Samples) -> tuple[list[int], Tensor | None]:
    """The places that have not failed, and what was read of them; None of none."""
    kept = [i for i, place in enumerate(samples.places) if place not in samples.reasons]
    if samples.inputs is None or not kept:
        return [], None
    return [samples.places[i] for i in kept], samples.inputs[kept]


def _write_maps(plan: _Plan, parts: Iterable[_Part], folder: Path, attrs: Mapping[str, Any]) -> int:
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
    _require_some(reasons, plan)
    _say_failed(reasons, plan)
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
    store.write_maps(
        folder / store.MAPS_NAME,
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


def _require_target(plan: _Plan) -> None:
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


def _targets(plan: _Plan, samples: _Samples) -> Array | None:
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


def _of_labels(samples: _Samples) -> Array:
    """The label of each sample; which class that is takes the scores to say."""
    assert samples.labels is not None
    targets = samples.labels.astype(np.int64)
    for place in np.flatnonzero(targets < 0).tolist():
        samples.reasons.setdefault(place, "DataError: it has no label, which target=label needs")
    return targets


def _as_classes(
    plan: _Plan, run: saliency.Scored, inputs: Tensor, say: Callable[[str], None]
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
    plan: _Plan,
    run: saliency.Scored,
    samples: _Samples,
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
    plan: _Plan, run: saliency.Scored, inputs: Tensor, say: Callable[[str], None]
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
    plan: _Plan, samples: _Samples, inputs: Tensor, say: Callable[[str], None]
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


def _say_incomplete(plan: _Plan, error: Array) -> None:
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
    plan: _Plan, target: int, columns: Mapping[str, Array], place: int, samples: _Samples
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
