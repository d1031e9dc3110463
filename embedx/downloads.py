"""Published weights: files in the caches of their libraries, fetched where they are not there."""

import contextlib
import re
import socket
import urllib.error
from pathlib import Path

import torch

from embedx.errors import ModelError, first_line


def promised_hash(file_name: str) -> str:
    """How the sha256 of a file begins by its name, as published files have it; empty if not."""
    found = re.search(r"-([0-9a-f]{8,64})\.\w+$", file_name)
    return found[1] if found else ""


def from_url(name: str, url: str) -> Path:
    """A file in torch's cache, fetched by torch where it is not there yet.

    Args:
        name: Of the network, for the message.
        url: Of the file.

    Raises:
        ModelError: It cannot be downloaded.
    """
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
            url, str(path), hash_prefix=promised_hash(file_name), progress=False
        )
    except (OSError, urllib.error.URLError, RuntimeError) as error:
        reason = getattr(error, "reason", None) or error
        raise _not_to_be_had(name, reason, f"put {url} into {folder}") from error
    finally:
        socket.setdefaulttimeout(timeout)
    return path


def _not_to_be_had(
    name: str, reason: object, remedy: str, *, installed: str = "efficientnet_lite0"
) -> ModelError:
    own = "model.weights=null (random), model.checkpoint=FILE, or " * (installed != "minilm")
    return ModelError(
        f"the weights of {name} cannot be downloaded ({reason}): {remedy}, or use {own}a model "
        f"whose weights are installed: model={installed}"
    )


def from_hub(name: str, repository: str, file_name: str | None) -> Path:
    """A file of weights of the Hugging Face hub, out of its cache or downloaded into it.

    Args:
        name: Of the network, for the message.
        repository: ``owner/name``, with or without ``@revision``.
        file_name: In the repository; None for what timm calls its weights.

    Raises:
        ModelError: It cannot be downloaded.
    """
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


_TEXT_FILES = ("*.json", "*/config.json", "vocab.txt", "merges.txt", "*.model")
_TEXT_WEIGHTS = (
    ("model.safetensors", "model-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model-*.bin"),
)


def folder_from_hub(name: str, repository: str) -> Path:
    """The files of a text encoder of the Hugging Face hub, out of its cache or downloaded into it.

    Args:
        name: Of the model, for the message.
        repository: ``owner/name``, with or without ``@revision``.

    Raises:
        ModelError: They cannot be downloaded.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download

    repository, _, revision = repository.partition("@")
    version = revision or None

    def there(folder: Path) -> bool:
        return (folder / "config.json").is_file() and any(
            list(folder.glob(pattern)) for patterns in _TEXT_WEIGHTS for pattern in patterns
        )

    with contextlib.suppress(Exception):  # not in the cache, or an odd name, which is told below
        folder = Path(snapshot_download(repository, revision=version, local_files_only=True))
        if there(folder):
            return folder
    try:
        # Asked once beforehand: the download itself would ask for half a minute.
        get_hf_file_metadata(hf_hub_url(repository, "config.json", revision=version), timeout=10)
        for weights in _TEXT_WEIGHTS:
            patterns = [*_TEXT_FILES, *weights]
            folder = Path(snapshot_download(repository, revision=version, allow_patterns=patterns))
            if there(folder):
                break
        return folder
    except Exception as error:  # the client raises those of its library for HTTP
        raise _not_to_be_had(
            name,
            first_line(error),
            f"download huggingface.co/{repository} where there is a network (hf download "
            f"{repository}) and copy the cache to {constants.HF_HUB_CACHE}, or name a folder",
            installed="minilm",
        ) from error
