"""Weights from files of others: read without unpickling, checked, and put into a network."""

import dataclasses
import json
import os
import re
import shlex
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embedx.errors import ModelError, first_line, listed
from embedx.fingerprints import file_sha256


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The state dict of a file.

    Attributes:
        tensors: Dense, on the CPU, each of no more values than the file stores.
        notes: What else was in the file and is passed over.
        is_lightning: Lightning wrote it: beside the network it may hold metrics and losses.
        path: The file; None where the tensors are of none.
        sha256: Of the file, in hexadecimal.
        written: What tells whether the file was written anew: inode, bytes, mtime in ns.
    """

    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    is_lightning: bool = False
    path: Path | None = None
    sha256: str = ""
    written: tuple[int, int, int] | None = None

    def require_unchanged(self) -> None:
        """Refuse a file that was written while it was read, hashed and copied into a network.

        Tensors are mapped from the file, so that they change with it.

        Raises:
            ModelError: It was, as a training does with its latest.
        """
        if self.path is not None and _written(self.path) != self.written:
            raise ModelError(
                f"{self.path} was written anew while it was read; run again, or give a copy of it"
            )


_WRAPPINGS = ("state_dict", "model", "model_state_dict")
_AVERAGED = ("model_ema", "ema_state_dict", "state_dict_ema", "ema")
# Lightning writes them; older or stripped files of it lack some.
_OF_LIGHTNING = {"pytorch-lightning_version", "hparams_name", "hyper_parameters", "lr_schedulers"}


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the state dict of a ``.pt``, ``.pth``, ``.ckpt`` or ``.safetensors`` file on the CPU.

    What the file is, is told by its first bytes. Nothing is unpickled but tensors and plain
    values. A dict under ``state_dict``, ``model`` or ``model_state_dict`` is taken out of its
    wrapping; what lies beside it is passed over and named.

    Args:
        path: The file; a leading ``~`` is the home folder.

    Raises:
        ModelError: Not there, not a checkpoint, or it holds something other than dense tensors
            or fewer values than it declares.
    """
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise ModelError(f"the checkpoint {path} {what}; check model.checkpoint")
    written = _written(path)
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    loaded: Any = _read_tensors(path)
    beside: list[str] = []
    is_lightning = False
    for _ in range(8):  # a dict may hold itself
        if not isinstance(loaded, Mapping):
            break
        is_lightning = is_lightning or bool(_OF_LIGHTNING & {str(key) for key in loaded})
        inner = next((key for key in _WRAPPINGS if isinstance(loaded.get(key), Mapping)), None)
        if inner is None:
            break
        beside += [str(key) for key in loaded if key != inner]
        loaded = loaded[inner]
    if not isinstance(loaded, Mapping) or not loaded:
        what = "an empty" if isinstance(loaded, Mapping) else "a"
        raise ModelError(f"{path} holds {what} {type(loaded).__name__}, not a state dict")
    for key, value in loaded.items():
        _check_tensor(path, key, value)
    notes: list[str] = []
    if beside:
        notes.append(f"{path.name}: passed over {listed(beside)}, beside the state dict")
    if averaged := next((key for key in beside if key in _AVERAGED), None):
        notes.append(f"{path.name}: to take its averaged weights, save {averaged} alone")
    return Checkpoint(dict(loaded), tuple(notes), is_lightning, path, digest, written)


def _written(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def _read_tensors(path: Path) -> Any:
    """What a file holds, told by its first bytes: safetensors, or torch's zip or older format."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
        if head[8:9] == b"{":  # after the length of the header
            from safetensors.torch import load_file

            return load_file(path)
        is_zip = head.startswith(b"PK\x03\x04")
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                if any(record.compress_type for record in archive.infolist()):
                    raise ModelError(f"{path} is a compressed archive; save it with torch.save")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if path.suffix == ".safetensors":  # torch would go by the name
                with path.open("rb") as file:
                    return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
            # Mapped, no tensor can reach beyond the file, whatever size it declares.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except ModelError:
        raise
    except Exception as error:  # both libraries raise many types for a file that is damaged
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            code = (
                f'import torch; c = torch.load({json.dumps(str(path))}, map_location="cpu", '
                'weights_only=False); torch.save(c["state_dict"], "weights.pt")'
            )
            raise ModelError(
                f"{path} needs {found[1]}, and to unpickle objects can run any code in the file; "
                f"if you trust who made it, save its tensors alone: python -c {shlex.quote(code)} "
                '(or c["model"], or c.state_dict() of a whole model)'
            ) from error
        if isinstance(error, OSError) and error.strerror:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        size = path.stat().st_size
        reason = first_line(error).partition(". ")[0][:160] if size else "it is empty"
        raise ModelError(
            f"{path} ({size:,} bytes) does not load as a checkpoint of tensors alone ({reason}); "
            "save it with torch.save(model.state_dict(), FILE)"
        ) from error


def _check_tensor(path: Path, key: Any, value: Any) -> None:
    if isinstance(value, Mapping) and key in _AVERAGED:
        raise ModelError(
            f"{path} has weights under {key!r} alone; save them as a state dict of their own: "
            f"torch.save(checkpoint[{key!r}], FILE)"
        )
    if (
        not isinstance(key, str)
        or not isinstance(value, Tensor)
        or value.layout != torch.strided
        or value.is_meta
        or value.is_quantized
    ):
        raise ModelError(
            f"{path} holds {key!r}, which is not a named, dense tensor; save "
            "model.state_dict() alone"
        )
    # A file of 1 KB can declare a huge tensor of stride 0: compare with what is really stored.
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ModelError(
            f"{path}: {key} {tuple(value.shape)} declares more values than the file stores"
        )


def without_prefix(
    checkpoint: Checkpoint, own: Mapping[str, Tensor], *, source: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors under the network's own names, and notes about those passed over.

    Training wrappers prefix keys, one inside the other; the prefix is taken off under which most
    keys are the network's.
    """
    fitting: dict[str, int] = {}
    for key in checkpoint.tensors:
        for start in [0, *(i + 1 for i, letter in enumerate(key) if letter == ".")]:
            if key[start:] in own:
                fitting[key[:start]] = fitting.get(key[:start], 0) + 1
    most = max(fitting.values(), default=0)
    best = sorted(prefix for prefix, count in fitting.items() if count == most)
    if len(best) > 1 and most * 2 > len(own):
        raise ModelError(
            f"{source} holds the network {len(best)} times, under "
            f"{' and '.join(repr(prefix) for prefix in best)}; save the one you want alone"
        )
    prefix = best[0] if best else ""
    inside = {k: v for k, v in checkpoint.tensors.items() if k.startswith(prefix)}
    outside = {k: v for k, v in checkpoint.tensors.items() if k not in inside}
    tensors = {key.removeprefix(prefix): value for key, value in inside.items()}
    notes: tuple[str, ...] = ()
    if outside and checkpoint.is_lightning:
        notes = (f"{source}: passed over {listed(outside)}, outside the network's {prefix!r}",)
    else:
        if twice := tensors.keys() & outside.keys():
            raise ModelError(f"{source} holds {min(twice)} twice, bare and with {prefix!r} before")
        tensors |= outside
    if not any(key.endswith("num_batches_tracked") for key in tensors):
        # Files from before torch 0.4.1 lack the counters, torchvision's too; inference reads none.
        tensors |= {k: v for k, v in own.items() if k.endswith("num_batches_tracked")}
    return tensors, notes


def load_weights(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    hint: str = "choose the model that it was saved from",
) -> None:
    """Copy a state dict into a network; every key and shape must fit.

    Args:
        module: The network.
        tensors: By the names of ``module.state_dict()``.
        source: What the user calls them.
        hint: What to do if they do not fit.

    Raises:
        ModelError: Keys are missing or unexpected or shapes differ; its note lists them all.
    """
    own = module.state_dict()
    shapes = {  # a lazy layer takes its shape from what is loaded
        key: None if nn.parameter.is_lazy(value) else tuple(value.shape)
        for key, value in own.items()
    }
    problems = [f"missing {key} {shapes[key]}" for key in own if key not in tensors]
    problems += [
        f"unexpected {key} {tuple(value.shape)}" for key, value in tensors.items() if key not in own
    ]
    for key in [key for key in own if key in tensors]:
        needed, got = own[key], tensors[key]
        if shapes[key] not in (None, tuple(got.shape)):
            problems.append(f"{key} has shape {tuple(got.shape)}, the model needs {shapes[key]}")
        elif got.is_complex() and not needed.is_complex():
            problems.append(f"{key} is complex, the model needs real numbers")
        elif needed.is_floating_point() and not (got.is_floating_point() or got.is_complex()):
            problems.append(f"{key} is {got.dtype}, the model needs {needed.dtype}")
    if problems:
        problems.sort(key=lambda line: "num_batches_tracked" in line)
        error = ModelError(
            f"{source} does not fit {type(module).__name__}: {'; '.join(problems[:3])}"
            + (f" and {len(problems) - 3} more differences" if len(problems) > 3 else "")
            + f"; {hint}"
        )
        error.add_note("\n".join(problems))
        raise error
    try:
        module.load_state_dict(dict(tensors))
    except RuntimeError as error:  # a type that torch has, but cannot convert
        raise ModelError(
            f"{source} does not load: {str(error).splitlines()[-1].strip()}"
        ) from error
