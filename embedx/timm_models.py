"""What is particular to timm: its configs, how it builds and loads, what it calls classifier."""

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from embedx.errors import ModelError, listed, missing_extra, nearest
from embedx.preprocess import Preprocess


def find_config(name: str) -> Any:
    """timm's ``PretrainedCfg`` of a name with or without a tag.

    Raises:
        DependencyError: The ``timm`` extra is not installed.
        ModelError: No such network or tag.
    """
    try:
        from timm import models
    except ImportError as error:
        raise missing_extra(
            error.name or "timm", extra="timm", needed_for=f"timm's {name}"
        ) from None
    architecture, _, tag = name.partition(".")
    known = models.list_models()
    if architecture not in known:
        renamed = models.get_deprecated_models().get(architecture)
        closest = [renamed] if renamed else nearest(architecture, known)
        raise ModelError(
            f"timm has no model {architecture!r}; the nearest are {', '.join(closest)}"
        )
    configs = models.get_arch_pretrained_cfgs(architecture)
    if tag and name not in configs:
        tags = [other.partition(".")[2] for other in configs]
        raise ModelError(
            f"timm's {architecture} has no weights tagged {tag!r}; it has "
            + (", ".join(filter(None, tags)) or "none: leave the tag out")
        )
    return models.get_pretrained_cfg(name)


def find_preprocess(
    name: str, pretrained: Any, *, input_size: int | None, resize: int | None
) -> Preprocess:
    """What timm's own transform for evaluation makes of a ``PretrainedCfg``.

    Raises:
        ConfigError: ``input_size`` or ``resize`` is less than 1, or the smaller one is ``resize``.
        ModelError: Pictures are prepared in a way that is not known here.
    """
    from timm.data import resolve_data_config

    config: Mapping[str, Any] = resolve_data_config({}, pretrained.to_dict())
    channels, height, width = config["input_size"]
    if channels != 3:
        raise ModelError(f"timm's {name} takes {channels} channels; pictures here have 3")
    if height != width and input_size is None:
        raise ModelError(
            f"timm's {name} takes {width}x{height} px, and pictures are cut square here; give "
            f"model.input_size={min(height, width)}"
        )
    if config["crop_mode"] not in ("center", "squash"):
        raise ModelError(
            f"timm's {name} prepares pictures by crop_mode={config['crop_mode']}, and known here "
            "are center and squash; choose another model"
        )
    crop = width if input_size is None else input_size
    if resize is None:
        resize = math.floor(crop / config["crop_pct"])
        if config["crop_pct"] > 1:
            raise ModelError(
                f"timm's {name} resizes to {resize} px and pads to {crop}, which is not known "
                f"here; give model.resize={crop} to leave the padding out"
            )
    return Preprocess(
        resize_px=resize,
        crop_px=crop,
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        squash=config["crop_mode"] == "squash",
    )


def find_classifier(name: str, module: nn.Module) -> tuple[str, tuple[str, ...]]:
    """What timm calls the classifier, an Identity where there is no head.

    Returns:
        Its dotted name, and notes about other ones.

    Raises:
        ModelError: timm names none.
    """
    if not hasattr(module, "get_classifier"):
        raise ModelError(
            f"timm's {name} has no classifier, so it has no penultimate layer; name the layer that "
            "is meant: model.layer=NAME, see: python -m embedx layers model=..."
        )
    classifier: Any = module.get_classifier()  # type: ignore[operator]
    several = classifier if isinstance(classifier, (tuple, list)) else [classifier]
    names = {id(child): key for key, child in module.named_modules()}
    # Networks that are distilled list the classifier of labels first; where each stage or branch
    # has one, the deepest is the last.
    heads = []
    for head in several:
        parts = list(head) if isinstance(head, nn.ModuleList) else [head]
        heads.append([names[id(getattr(part, "fc", part))] for part in parts])
    found = heads[0][-1]
    others = [key for head in heads for key in head if key != found]
    note = (
        f"{name} has {len(others) + 1} classifiers: penultimate is {found}:input, the others' are "
    )
    return found, (note + ", ".join(f"{key}:input" for key in others),) if others else ()


@contextlib.contextmanager
def _complete_loading(name: str) -> Iterator[None]:
    """Raise if timm, which for some networks loads loosely, found no weights for a part."""
    missing: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.match(r"Missing keys \((.*?)\)", record.getMessage()):
                keys = found[1].split(", ")
                missing.extend(k for k in keys if not k.endswith("num_batches_tracked"))

    logger = logging.getLogger("timm.models._builder")
    level, propagate, listener = logger.level, logger.propagate, Listener()
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate
    if missing:
        raise ModelError(
            f"the published weights of timm's {name} lack {listed(missing, most=3)}; use "
            "model.checkpoint=FILE, or model.weights=null (random)"
        )


def create(name: str, **options: Any) -> nn.Module:
    """A network as timm builds it.

    Args:
        name: With or without a tag.
        options: Of ``timm.create_model``.

    Raises:
        ModelError: timm raises, or the weights that it loads lack a part.
    """
    from timm import models

    with _complete_loading(name):
        try:
            module: nn.Module = models.create_model(name, **options)
        except Exception as error:  # timm asserts, and each network raises its own
            size = options.get("img_size")
            raise ModelError(
                f"timm cannot build {name}"
                + (f" for {size[0]} px" if size else "")
                + f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            ) from error
    getattr(module, "pretrained_cfg", {}).pop("state_dict", None)
    return module
