"""What is particular to Hugging Face text encoders: their folders, tokenizers and poolings."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embedx import downloads
from embedx.checkpoints import load_checkpoint
from embedx.errors import ConfigError, ModelError, first_line, listed, missing_extra
from embedx.threads import n_threads

# The modes of a sentence-transformers Pooling, by our names for them.
POOLINGS = {"mean": "mean_token", "cls": "cls", "max": "max_token"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_UNBOUNDED = 10**6  # transformers writes 1e30 where a tokenizer knows no length
_PARALLEL = "TOKENIZERS_PARALLELISM"
_PARALLEL_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """From texts to what enters an encoder.

    Attributes:
        backend: A ``tokenizers.Tokenizer`` that cuts at ``max_length`` and does not pad.
        max_length: Tokens of a text that enter, special ones included; the rest is cut off.
        pad_id: The token that fills up a row; masked out.
        n_special: How many special tokens a text gets.
        prompt: What the model was trained to see before each text; often nothing.
        sha256: Of the tokenizer as it is used.
    """

    backend: Any
    max_length: int
    pad_id: int
    n_special: int
    prompt: str
    sha256: str

    def config(self) -> dict[str, Any]:
        """What of it decides the rows."""
        return {"sha256": self.sha256, "max_length": self.max_length, "prompt": self.prompt}

    def encode(self, texts: Sequence[str]) -> tuple[list[list[int]], np.ndarray[Any, Any]]:
        """Token ids of each text, cut to ``max_length``.

        Args:
            texts: n texts that UTF-8 can hold.

        Returns:
            n lists of ids, and the lengths ``(n,)`` int32 that the texts have uncut.
        """
        texts = [self.prompt + text for text in texts] if self.prompt else texts
        n_parts = max(1, min(n_threads(), len(texts) // 256))
        parts = [texts[i::n_parts] for i in range(n_parts)]
        ids: list[list[int]] = [[]] * len(texts)
        lengths = np.zeros(len(texts), np.int32)
        # It lets go of the interpreter. Threads of its own would make a later fork warn or hang.
        with _one_thread(), concurrent.futures.ThreadPoolExecutor(n_parts) as threads:
            for i, encoded in enumerate(threads.map(self.backend.encode_batch_fast, parts)):
                ids[i::n_parts] = [one.ids for one in encoded]
                lengths[i::n_parts] = [self._length(one) for one in encoded]
        return ids, lengths

    def _length(self, encoded: Any) -> int:
        n = len(encoded)
        if n < self.max_length:
            return n
        return n + sum(len(rest) - self.n_special for rest in encoded.overflowing)

    def pad(self, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Token ids of b texts as inputs ``(b, t)`` int64, t the longest of them."""
        lengths = np.array([len(one) for one in ids])
        tokens = np.full((len(ids), lengths.max()), self.pad_id, np.int64)
        is_token = np.arange(tokens.shape[1]) < lengths[:, None]
        tokens[is_token] = np.concatenate([np.asarray(one, np.int64) for one in ids])
        return {
            "input_ids": torch.from_numpy(tokens),
            "attention_mask": torch.from_numpy(is_token.astype(np.int64)),
        }


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    with _PARALLEL_LOCK:
        before = os.environ.get(_PARALLEL)
        os.environ[_PARALLEL] = "false"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_PARALLEL]
            else:
                os.environ[_PARALLEL] = before


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A text encoder out of a folder.

    Attributes:
        module: The network, in eval mode and float32.
        tokenizer: What goes before it.
        tokens: Pooling of its tokens.
        normalizes: Whether its rows are to be scaled to length 1.
        sha256: Of the files of weights; None for random ones.
        files: Names of these files.
        notes: What the user should be told aloud.
    """

    module: nn.Module
    tokenizer: Tokenizer
    tokens: str
    normalizes: bool
    sha256: str | None
    files: tuple[str, ...]
    notes: tuple[str, ...]


def find_folder(name: str) -> Path:
    """The folder of a model: one that is there, or that of a repository of the hub.

    Raises:
        ModelError: It is no folder, and cannot be downloaded.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(
            f"model.name={name} is a file; name the folder that it is in, with its config.json"
        )
    parts = name.partition("@")[0].split("/")
    if len(parts) > 2 or not all(parts) or name.startswith((".", "~")):
        raise ModelError(
            f"model.name={name} is not there; name a folder with a config.json, or owner/name of "
            "the Hugging Face hub"
        )
    return downloads.folder_from_hub(name, name)


def load(
    folder: Path,
    *,
    name: str,
    has_weights: bool,
    tokens: str | None,
    max_length: int | None,
    extra: str = "text",
) -> Encoder:
    """Read a text encoder from a folder of transformers or sentence-transformers.

    Nothing in the folder is run: no code, and no pickle but of plain tensors.

    Args:
        folder: With ``config.json``, the files of a tokenizer, and weights.
        name: What the user calls it, for messages.
        has_weights: Whether its weights are loaded; else they stay random.
        tokens: Pooling of tokens; None for what the folder says, else their mean.
        max_length: Tokens of a text that enter; None for what the folder says.
        extra: What to install where transformers is missing.

    Raises:
        ConfigError: ``max_length`` is not one that the network takes.
        DependencyError: transformers is not installed.
        ModelError: The folder holds no text encoder, or weights that do not fit.
    """
    try:
        import transformers
    except ImportError as error:
        raise missing_extra(
            error.name or "transformers", extra=extra, needed_for=f"the model {name}"
        ) from None

    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json; name a folder that save_pretrained of transformers wrote"
        )
    with _quiet(transformers):
        config = _config(transformers, folder, name)
        tokenizer = _tokenizer(transformers, folder, name)
    sentence = _sentence(folder)
    notes = list(sentence.notes)
    if tokens is None and sentence.pooling not in (None, *POOLINGS):
        raise ModelError(
            f"{name} pools its tokens by {sentence.pooling}, and known here are "
            f"{', '.join(POOLINGS)}; choose one with model.tokens={POOLINGS['mean']}"
        )
    chosen = tokens or POOLINGS[sentence.pooling or "mean"]
    with _quiet(transformers):
        kind = _kind(transformers, config, name)
        module = _in_our_words(name, lambda: kind._from_config(config))
        sha256: str | None = None
        files: tuple[str, ...] = ()
        if has_weights:
            module, sha256, files, told = _with_weights(kind, config, folder, name)
            notes += told
    module = module.float().eval()
    if "attention_mask" not in inspect.signature(module.forward).parameters:
        raise ModelError(
            f"{name} ({type(module).__name__}) takes no attention_mask, so that padding would "
            "change its rows; choose another encoder"
        )
    return Encoder(
        module=module,
        tokenizer=_cutting(tokenizer, _length(tokenizer, config, sentence, max_length), sentence),
        tokens=chosen,
        normalizes=sentence.normalizes,
        sha256=sha256,
        files=files,
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """What matters of a load is said in our words."""
    logging = transformers.utils.logging
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _in_our_words(name: str, call: Any) -> Any:
    try:
        return call()
    except Exception as error:  # transformers raises whatever it stumbles over
        raise ModelError(
            f"{name} cannot be read as a text encoder ({type(error).__name__}: "
            f"{first_line(error)[:200]}); name a folder that transformers {_version()} reads"
        ) from error


def _version() -> str:
    from importlib.metadata import version

    return version("transformers")


_NO_PICTURES = (
    "model=hf takes encoders of texts alone; for pictures use model=timm or model=torchvision"
)


def _config(transformers: Any, folder: Path, name: str) -> Any:
    read = transformers.AutoConfig.from_pretrained
    config = _in_our_words(
        name, lambda: read(str(folder), local_files_only=True, trust_remote_code=False)
    )
    for part in ("vision_config", "audio_config", "image_size", "num_mel_bins"):
        if getattr(config, part, None) is not None:
            raise ModelError(f"{name} is a {config.model_type}; {_NO_PICTURES}")
    config._name_or_path = ""  # the place on this machine is no part of what it computes
    return config


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")


def _tokenizer(transformers: Any, folder: Path, name: str) -> Any:
    there = [file for file in _TOKENIZER_FILES if (folder / file).is_file()]
    if not there and not list(folder.glob("*.model")):
        raise ModelError(f"{name} has no tokenizer ({listed(_TOKENIZER_FILES)}); {_NO_PICTURES}")
    read = transformers.AutoTokenizer.from_pretrained
    tokenizer = _in_our_words(
        name, lambda: read(str(folder), local_files_only=True, trust_remote_code=False)
    )
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"the tokenizer of {name} has no tokenizer.json; save it again with "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
        )
    probe = tokenizer("a")
    if any(probe.get("token_type_ids", [])):
        raise ModelError(
            f"the tokenizer of {name} marks the tokens of a text by other types than 0, which is "
            "not known here; choose another encoder"
        )
    return tokenizer


# --------------------------------------------------------------------------- beside transformers


@dataclasses.dataclass(frozen=True)
class _Sentence:
    """What sentence-transformers keeps of a model in its folder."""

    pooling: str | None = None
    normalizes: bool = False
    max_length: int | None = None
    lowers: bool = False
    prompt: str = ""
    notes: tuple[str, ...] = ()


def _sentence(folder: Path) -> _Sentence:
    if not (folder / "modules.json").is_file():
        return _Sentence()
    modules: Any = _json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(one, Mapping) for one in modules):
        raise ModelError(f"{folder / 'modules.json'} is no list of modules; save the model again")
    pooling: str | None = None
    normalizes, others = False, []
    for place, module in enumerate(modules):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling" and pooling is None:
            pooling = _mode(_json(folder / str(module.get("path")) / "config.json"))
        elif kind == "Normalize" and pooling is not None:
            normalizes = True
        elif kind == "Normalize":
            others.append("Normalize before the pooling")
        elif kind != "Transformer" or place:
            others.append(kind)
    found = (_json(folder / f"sentence_{name}_config.json") for name in _NAMES_OF_CONFIGS)
    about: dict[str, Any] = next(filter(None, found), {})
    prompts = _json(folder / "config_sentence_transformers.json")
    settings = [f"{key} of {value}" for key, value in _that_matter(about, prompts)]
    notes: tuple[str, ...] = ()
    if others or settings:
        notes = (
            f"{folder.name}: {listed([*others, *settings])}, which sentence-transformers has "
            "there, is left out here: rows may be others than those of its encode()",
        )
    named = prompts.get("default_prompt_name")
    length = about.get("max_seq_length")
    return _Sentence(
        pooling=pooling,
        normalizes=normalizes and not others,
        max_length=length if isinstance(length, int) else None,
        lowers=bool(about.get("do_lower_case")),
        prompt=str((prompts.get("prompts") or {}).get(named) or "") if named else "",
        notes=notes,
    )


# As the versions of sentence-transformers have called it, in the order in which it looks.
_NAMES_OF_CONFIGS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_HEEDED = ("max_seq_length", "do_lower_case")
_OF_OTHER_INPUTS = ("modality_config", "module_output_name", "unpad_inputs")


def _that_matter(about: dict[str, Any], prompts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings of sentence-transformers that are not heeded here and change its rows."""
    for key, value in about.items():
        is_usual = key == "transformer_task" and value == "feature-extraction"
        if value and not is_usual and key not in (*_HEEDED, *_OF_OTHER_INPUTS):
            yield key, value
    if prompts.get("truncate_dim"):
        yield "truncate_dim", prompts["truncate_dim"]


def _mode(config: Mapping[str, Any]) -> str:
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or [])
    if mode is None:
        modes = [name for key, name in _OLD_MODES.items() if config.get(key)] or ["mean"]
    mode = " and ".join(map(str, modes))
    return mode if config.get("include_prompt", True) else f"{mode} without the prompt"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read ({first_line(error)}); save the model again"
        ) from None


# --------------------------------------------------------------------------- tokens


def _length(tokenizer: Any, config: Any, sentence: _Sentence, asked: int | None) -> int:
    """How many tokens of a text enter: as asked, or as sentence-transformers would cut."""
    n_special = tokenizer.num_special_tokens_to_add(pair=False)
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) and positions > 0 else _UNBOUNDED
    known = min(int(min(tokenizer.model_max_length, _UNBOUNDED)), positions)
    if asked is not None:
        most = known if known < _UNBOUNDED else None
        if asked <= n_special or (most is not None and asked > most):
            range_ = f"{n_special + 1} to {most}" if most else f"more than {n_special}"
            raise ConfigError(f"model.max_length must be {range_}, not {asked}")
        return asked
    if sentence.max_length is not None:
        return min(sentence.max_length, positions)
    if known >= _UNBOUNDED:
        raise ConfigError(
            "neither the tokenizer nor the network says how long a text may be; give "
            "model.max_length=512"
        )
    return known


def _cutting(tokenizer: Any, length: int, sentence: _Sentence) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import normalizers

    backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
    if sentence.lowers and "Lowercase" not in str(backend.normalizer):
        others = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])
    backend.no_padding()
    backend.enable_truncation(length, direction=tokenizer.truncation_side)
    pad = tokenizer.pad_token_id
    return Tokenizer(
        backend=backend,
        max_length=length,
        pad_id=0 if pad is None else int(pad),
        n_special=tokenizer.num_special_tokens_to_add(pair=False),
        prompt=sentence.prompt,
        sha256=hashlib.sha256(backend.to_str().encode()).hexdigest(),
    )


# --------------------------------------------------------------------------- weights


def _kind(transformers: Any, config: Any, name: str) -> Any:
    """The class of the network; of an encoder and a decoder, that of the encoder."""
    auto = transformers.AutoModel
    # An encoder saved by itself says so by the name of its class alone.
    is_encoder = any(one.endswith("EncoderModel") for one in config.architectures or ())
    if config.is_encoder_decoder or is_encoder:
        auto = transformers.AutoModelForTextEncoding
    try:
        return auto._model_mapping[type(config)]
    except KeyError:
        raise ModelError(
            f"{name} is a {config.model_type}, of which transformers has no encoder of texts "
            "alone; choose another"
        ) from None


def _weight_files(folder: Path, name: str) -> list[Path]:
    """Tensors alone before what torch pickles; all parts where they are several."""
    for file in ("model.safetensors", "pytorch_model.bin"):
        if (folder / file).is_file():
            return [folder / file]
        index = folder / f"{file}.index.json"
        if index.is_file():
            names = sorted(set(map(str, (_json(index).get("weight_map") or {}).values())))
            parts = [folder / Path(part).name for part in names]
            if parts and all(part.is_file() for part in parts):
                return parts
            raise ModelError(f"{index} names parts that are not there; copy the whole folder")
    raise ModelError(
        f"{name} has no weights (model.safetensors or pytorch_model.bin) in {folder}; use "
        "model.weights=null for random ones"
    )


def _with_weights(
    kind: Any, config: Any, folder: Path, name: str
) -> tuple[nn.Module, str, tuple[str, ...], list[str]]:
    paths = _weight_files(folder, name)
    parts = [load_checkpoint(path) for path in paths]
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= {key: value.clone() for key, value in part.tensors.items()}  # they are mapped
    # It knows how published names differ from those of the network.
    module, info = _in_our_words(
        name,
        lambda: kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below
        ),
    )
    for part in parts:
        part.require_unchanged()
    missing = sorted(info["missing_keys"])
    notes = [note for part in parts for note in part.notes]
    # Rows of a pooler that is random would hang on the seed: it is left out, where that can be.
    may_lack_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    if lost := [key for key in missing if not (may_lack_pooler and key.startswith("pooler."))]:
        raise ModelError(
            f"the weights of {name} lack {listed(lost, most=3)} of {kind.__name__}; choose the "
            "folder that they were saved in"
        )
    wrong = sorted(
        f"{key} has shape {tuple(tensors[key].shape)}" if key in tensors else key
        for key in (
            str(one[0] if isinstance(one, tuple) else one) for one in info["mismatched_keys"]
        )
    )
    if wrong:
        raise ModelError(
            f"the weights of {name} have other shapes than its config.json says: "
            f"{listed(wrong, most=3)}; choose the folder that they were saved in"
        )
    if missing:
        module.pooler = None
        notes.append(f"{name} has no weights for its pooler, which is left out")
    own, others = _without_place(module, kind, info["unexpected_keys"])
    if own:
        raise ModelError(
            f"the weights of {name} hold {listed(own, most=3)}, and {kind.__name__} by its "
            "config.json has no place for them; choose the folder that they were saved in"
        )
    if others:
        notes.append(
            f"{name} holds weights of more than the encoder, which are left out: "
            f"{listed(others, most=3)}"
        )
    hashes = [part.sha256 for part in parts]
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return module, sha256, tuple(path.name for path in paths), notes


def _without_place(
    module: nn.Module, kind: Any, unexpected: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Weights that the network does not take: of its own parts, and the names of other parts."""
    buffers = {name for name, _ in module.named_buffers()}  # which older versions have saved
    prefix = f"{kind.base_model_prefix}."
    keys = sorted(key.removeprefix(prefix) for key in unexpected)
    keys = [key for key in keys if key not in buffers]
    parts = {name for name, child in module.named_children() if child is not None}
    own = [key for key in keys if key.partition(".")[0] in parts]
    others = [key.partition(".")[0] for key in keys if key not in own]
    return own, list(dict.fromkeys(others))
