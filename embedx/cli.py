"""The command line: a stage and its overrides become one call of the stage's function.

Hydra has no sub-commands: the dispatcher takes the stage off the arguments, mends what Hydra alone
cannot take, and leaves the rest (composition, help, sweeps) to Hydra. The composed config is then
checked against the signatures of the functions it calls. Only this module imports hydra.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import json
import logging
import os
import re
import shlex
import sys
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embedx import __version__
from embedx.checks import check_argument, check_arguments, refuse_taken, unknown_key
from embedx.configs import (
    ROW_SETTINGS,
    Configs,
    conf_dir,
    override,
    quoted,
    read_settings,
    settings_sha256,
)
from embedx.errors import (
    ConfigError,
    DataError,
    DependencyError,
    EmbedxError,
    Interrupted,
    StoreError,
    nearest,
)

if TYPE_CHECKING:
    from embedx.models import Model
    from embedx.store import Projection

log = logging.getLogger("embedx")

STAGES = {
    "run": "extract, project, evaluate, export and view in turn; alone: the demo",
    "extract": "run data through a model and store what its layers give",
    "project": "make a map of stored embeddings by PCA, t-SNE or UMAP",
    "evaluate": "score embeddings and maps",
    "export": "write a folder for TensorBoard's projector",
    "view": "draw maps as pictures, or serve the projector",
    "layers": "list the layers of a model",
    "info": "say what is in a file, and check it",
}
NOTE_LINES = 12
PAGE = """embedx turns PyTorch models into embeddings, and embeddings into maps.

usage: python -m embedx STAGE [KEY=VALUE ...] [FLAGS]

{stages}

Three commands to begin with:
  python -m embedx run
  python -m embedx extract model=resnet18 data=folder data.root=PHOTOS
  python -m embedx project projection=umap

python -m embedx STAGE --help shows the keys of a stage; -m sweeps: model=resnet18,resnet50 -m
"""
_OVERRIDE = re.compile(r"(?P<plus>\+{0,2}|~)(?P<key>[A-Za-z_][\w./@]*)(=(?P<value>.*))?", re.S)
# Hydra's flags, and whether a value follows; of an unknown one it would print its whole usage.
FLAGS = {
    **dict.fromkeys(["--help", "-h", "--hydra-help", "--version", "--resolve"], False),
    **dict.fromkeys(["--run", "-r", "--multirun", "-m", "--info", "-i"], False),
    **dict.fromkeys(["--cfg", "-c", "--package", "-p", "--config-path", "-cp"], True),
    **dict.fromkeys(["--config-name", "-cn", "--config-dir", "-cd"], True),
    **dict.fromkeys(["--shell-completion", "-sc"], False),
}
UNSAID = "the file does not say how it was made"
_WORKS_ON = {  # stage -> the key that names its run; the newest where it is not given
    "project": "embeddings",
    "evaluate": "embeddings",
    "export": "embeddings",
    "view": "embeddings",
    "info": "path",
}
_LOADS_NO_JOB = frozenset(["--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: Words after the program's name; those of the process where not given.

    Returns:
        The exit status: 0 done, 1 a user's mistake, 2 an unknown stage or flag, 130 Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("--help", "-h", "help"):
        width = max(map(len, STAGES))
        stages = "\n".join(f"  {name:<{width}}  {does}" for name, does in STAGES.items())
        print(PAGE.format(stages=stages), end="")
        return 0
    if words[0] == "--version":
        print(f"embedx {__version__}")
        return 0
    if words[0] in ("-sc", "--shell-completion"):
        return _complete_shell(words[1:])
    stage = words[0]
    if unknown := _unknown(words):
        print(f"ConfigError: {unknown}", file=sys.stderr)
        return 2
    _quiet()
    try:
        return _dispatch(stage, words[1:])
    except EmbedxError as error:
        _print_error(error)
        return 128 + error.signal_number if isinstance(error, Interrupted) else 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; what was finished before is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _print_no_more()
        return 0


def _unknown(words: Sequence[str]) -> str:
    """What is wrong with the stage or a flag; nothing if both are known."""
    stage, *rest = words
    if stage in FLAGS:
        return f"{stage} comes after the stage: python -m embedx {' '.join([*rest, stage])}"
    if stage.startswith("-"):
        return f"there is no flag {stage!r}; a stage comes first, one of {', '.join(STAGES)}"
    if stage not in STAGES:
        return (
            f"there is no stage {stage!r}; the stages are {', '.join(STAGES)}, the nearest is "
            + nearest(stage, STAGES, n=1)[0]
        )
    for word in _split(rest)[1]:
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag not in FLAGS:
            return (
                f"there is no flag {flag!r}; the nearest is {nearest(flag, FLAGS, n=1)[0]}, and "
                f"the keys of {stage} are shown by: python -m embedx {stage} --help"
            )
    return ""


def _quiet() -> None:
    """Our own lines go to stdout; warnings of libraries do not reach the user."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold anything
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions and not os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter("ignore")
    if not log.handlers:
        handler = _Lines()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def _print_no_more() -> None:
    """The reader of a pipe, such as head, has read enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complete_shell(words: Sequence[str]) -> int:
    """Hydra's completion, which knows no stages: it sees the line without its stage.

    ``install=bash`` prints what a shell evaluates; ``query=bash`` is what it then asks at a Tab.
    """
    stage = "extract"
    flags: list[str] = []
    if words and words[0].startswith("query="):
        line = os.environ.get("COMP_LINE", "")
        match = re.match(r"\s*\S+\s+(\S+)(\s.*)$", line, re.S)
        if match is None:  # the stage itself is being typed
            begun = "".join(line.split()[1:])
            print(" ".join(name for name in STAGES if name.startswith(begun)))
            return 0
        stage, rest = match.groups()
        if stage not in STAGES:
            return 0
        overrides, flags = _split(rest.split())
        added = _flag_value(flags, "--config-dir", "-cd")
        flags = ["--config-dir", added] if added and Path(added).is_dir() else []
        given = {word.lstrip("+").partition("=")[0] for word in overrides}
        configs = Configs()
        # Hydra completes no key while a group that must be chosen is not.
        for group, option in configs.defaults(stage).items():
            if option == "???" and group not in given:
                rest = f" {group}={configs.options(group)[0]}{rest}"
        os.environ["COMP_LINE"] = f"embedx{rest}"
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            _run_hydra(stage, ["-sc", *words, *flags], lambda _: None)
    except Exception:  # a traceback at the prompt helps nobody who pressed Tab
        return 1
    answer = printed.getvalue()
    if words and words[0].startswith("query="):
        # The shell expands what it is offered: a file may be called $(anything).
        offered = re.findall(r"(?<!\S)[\w./=:+@,~-]+(?!\S)", answer)
        answer = " ".join(offered) + "\n"
    print(answer, end="")
    return 0


def _run_hydra(stage: str, words: Sequence[str], job: Callable[[Any], None]) -> None:
    import hydra

    base = {"version_base": None} if hydra.__version__.startswith("1.3.") else {}
    sys.argv = ["embedx", *words]
    hydra.main(config_path=str(conf_dir()), config_name=stage, **base)(job)()


class _Lines(logging.Handler):
    """Log lines that leave a progress bar whole."""

    def emit(self, record: logging.LogRecord) -> None:
        line = _legible(self.format(record))
        if sys.stderr.isatty() and "tqdm" in sys.modules:
            sys.modules["tqdm"].tqdm.write(line, file=sys.stdout)
        else:
            try:
                print(line, flush=True)
            except BrokenPipeError:  # the work goes on
                _print_no_more()


def _legible(line: str) -> str:
    """One line without what drives a terminal: it may hold text from data."""
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", "?", line)
    return line.encode("utf-8", "backslashreplace").decode()


def _print_error(error: BaseException) -> None:
    for note in getattr(error, "__notes__", []):
        lines = note.split("\n")
        for line in lines[:NOTE_LINES]:
            print(_legible(line), file=sys.stderr)
        if len(lines) > NOTE_LINES:
            print(f"... and {len(lines) - NOTE_LINES} more", file=sys.stderr)
    print(_legible(f"{type(error).__name__}: {error}"), file=sys.stderr)


# --------------------------------------------------------------------------- before Hydra


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides and flags; Hydra takes them in that order only."""
    overrides: list[str] = []
    flags: list[str] = []
    takes_value = False
    for word in words:
        about = flags[-1:] in (["--info"], ["-i"]) and not re.search("[=~]", word)
        if takes_value or about or word.startswith("-"):
            flags.append(word)
            takes_value = FLAGS.get(word, False) and not takes_value
        else:
            overrides.append(word)
    return overrides, flags


def _without_config_dir(flags: Sequence[str]) -> tuple[list[str], str | None]:
    """Flags without ``--config-dir``, and the folder that it names.

    Raises:
        ConfigError: It names none, or is there twice.
    """
    added = _flag_value(flags, "--config-dir", "-cd")
    if added is None:
        return list(flags), None
    kept = []
    n_given = 0
    follows = False
    for flag in flags:
        name, equals, _ = flag.partition("=")
        if follows:
            follows = False
        elif name in ("--config-dir", "-cd"):
            n_given += 1
            follows = not equals
        else:
            kept.append(flag)
    if n_given > 1 or not added:
        raise ConfigError("--config-dir takes one folder, once: --config-dir FOLDER")
    return kept, added


def _flag_value(flags: Sequence[str], *names: str) -> str | None:
    """The value of a flag, given as ``--flag value`` or ``--flag=value``."""
    for i, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in names:
            return value if equals else "".join(flags[i + 1 : i + 2])
    return None


def _quote_layers(value: str) -> str:
    """Names such as 1.10 are numbers to Hydra: quote what is not quoted."""

    def as_text(text: str) -> str:
        text = text.strip()
        return text if not text or text[0] in "'\"" else quoted(text)

    if value.startswith("[") and value.endswith("]"):  # one list, or a sweep over several
        return re.sub(
            r"\[([^\[\]]*)\]",
            lambda match: "[" + ",".join(map(as_text, match[1].split(","))) + "]",
            value,
        )
    if re.fullmatch(r"[\d.,]+", value):
        return ",".join(as_text(part) for part in value.split(","))
    return value


def _prepare(
    stage: str,
    overrides: Sequence[str],
    configs: Configs,
    *,
    shows_only: bool = False,
    sweeps: bool = False,
) -> list[str]:
    """The overrides as Hydra takes them."""
    groups = configs.defaults(stage)
    # Before a sweep Hydra composes once without the swept groups, and would miss their keys.
    swept = {g for g in groups for word in overrides if re.match(rf"\+*{g}=.*,", word)}
    swept = swept if sweeps else set()
    prepared: list[str] = []
    given: set[str] = set()
    for word in overrides:
        match = _OVERRIDE.fullmatch(word)
        if match is None or (match["value"] is None and match["plus"] != "~"):
            raise ConfigError(
                f"{word!r} is not KEY=VALUE; the keys are shown by: python -m embedx {stage} --help"
            )
        key, value = match["key"], match["value"]
        given.add(key)
        if match["plus"] == "~" and "." not in key:
            raise ConfigError(f"{word} takes away what {stage} needs; set it instead: {key}=...")
        if key in groups and value in ("null", "") and key != "experiment":
            options = ", ".join(configs.options(key))
            raise ConfigError(f"{key} must be one of {options}, not {value!r}")
        if key == "layers" and value is not None:
            prepared.append(f"{match['plus']}{key}={_quote_layers(value)}")
        elif key in groups and value is not None:
            prepared.append(f"{key}={value}")  # +model=x means model=x
        elif key.partition(".")[0] in swept:
            prepared.append(f"++{key}={value}")
        else:
            prepared.append(word)
    if stage == "run" and not shows_only and not given & {"model", "data", "experiment"}:
        prepared.append("experiment=demo")
    if shows_only:
        # Hydra shows no help while a group that must be chosen is not.
        unchosen = [g for g, option in groups.items() if option == "???" and g not in given]
        prepared += [f"~{group}" for group in unchosen if "experiment" not in given]
    elif (key := _WORKS_ON.get(stage)) is not None and key not in given:
        newest = _newest_embeddings()
        log.info("%s: the newest, %s", key, newest)
        prepared.append(f"{key}={quoted(str(newest))}")
    return prepared


def _newest_embeddings() -> Path:
    from embedx.store import EMBEDDINGS_NAME

    found = list(Path("outputs").glob(f"*/{EMBEDDINGS_NAME}"))
    if not found:
        raise DataError(
            "there are no embeddings below outputs/ yet; make some with: python -m embedx extract "
            "model=resnet18, or name a file: embeddings=PATH"
        )
    return max(found, key=lambda path: (path.stat().st_mtime_ns, str(path)))


def _print_help(stage: str, configs: Configs) -> None:
    """What a stage does, its keys out of docstrings, its choices."""
    print(f"{STAGES[stage]}\n\nusage: python -m embedx {stage} [KEY=VALUE ...] [FLAGS]\n\nkeys")
    for key, about in configs.explained(stage).items():
        print(f"  {key}: {about}")
    groups = configs.defaults(stage)
    for group in groups:
        shown: set[str] = set()
        # What the default says of a key that several have comes first.
        options = sorted(configs.options(group), key=lambda option: option != groups[group])
        for option in options:
            for key, about in configs.explained_option(group, option).items():
                if key not in shown:
                    shown.add(key)
                    print(f"  {group}.{key}: {about}")
    if groups:
        print("\nchoices")
        for group, option in groups.items():
            chosen = "" if option in (None, "???") else f" (default {option})"
            print(f"  {group}={'|'.join(configs.options(group))}{chosen}")
    print("\nall values, as KEY=VALUE (nested ones as model.input_size=96)\n")


# --------------------------------------------------------------------------- Hydra


def _unusable(error: OSError) -> EmbedxError:
    """A path that the operating system refuses, in our words; any other OSError is a bug."""
    if error.filename is None or isinstance(error, BrokenPipeError):
        raise error
    return StoreError(f"cannot use {error.filename}: {error.strerror}; check path and rights")


class _StopAll(BaseException):
    """Ctrl-C ends a whole sweep: Hydra takes an ordinary exception for one job's failure."""

    def __init__(self, reason: Interrupted) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _dispatch(stage: str, words: Sequence[str]) -> int:
    overrides, flags = _split(words)
    shows_only = any(flag.split("=")[0] in _LOADS_NO_JOB for flag in flags)
    if other := {"--config-path", "-cp", "--config-name", "-cn"} & {f.split("=")[0] for f in flags}:
        raise ConfigError(
            f"{other.pop()} would take embedx's own config files away; put yours into a folder "
            "beside them: --config-dir FOLDER"
        )
    flags, added = _without_config_dir(flags)
    configs = Configs(added)
    flags += [word for folder in configs.folders[1:] for word in ("--config-dir", str(folder))]
    if {"--help", "-h"} & set(flags):
        _print_help(stage, configs)
    try:
        from hydra.errors import HydraException
    except ImportError:
        raise DependencyError(
            "what embedx needs is not installed in this Python; use scripts/embedx, or activate "
            "the environment that has it: source .venv/bin/activate"
        ) from None
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    started: list[str] = []
    failed: list[tuple[str, EmbedxError]] = []
    parent = os.getpid()

    def job(config: DictConfig) -> None:
        label = _sweep_label()
        started.append(label)
        if label:
            log.info("%s", label)
        try:
            _call_stage(stage, config)
        except Interrupted as error:
            raise _StopAll(error) from None
        except (EmbedxError, OSError) as error:
            # Raised, it would stand in Hydra's frame; a launcher of processes knows no other way.
            if os.getpid() != parent:
                raise
            reason = error if isinstance(error, EmbedxError) else _unusable(error)
            failed.append((label, reason))
            if label:
                _print_error(reason)

    full_error = os.environ.get("HYDRA_FULL_ERROR")
    sweeps = bool({"-m", "--multirun"} & set(flags))
    prepared = _prepare(stage, overrides, configs, shows_only=shows_only, sweeps=sweeps)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, and we print them in one line
    try:
        _run_hydra(stage, [*prepared, *flags], job)
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        # Before the first job a ValueError is Hydra's word on an override or a flag.
        if full_error or (started and isinstance(error, (ValueError, OSError))):
            raise
        raise _one_line(error, stage, prepared, configs) from None
    except _StopAll as stop:
        raise stop.reason from None
    finally:
        if sweeps:
            _tidy_sweeps()
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    if sweeps and not started and not shows_only:
        raise ConfigError(
            "the sweep has no job: a list or a glob in it is empty; in a sweep name the values, as "
            "in model=resnet18,resnet50"
        )
    for label, reason in failed:
        if label:
            print(f"failed {label}", file=sys.stderr)
        _print_error(reason)
    return 1 if failed else 0


def _tidy_sweeps() -> None:
    """Hydra notes every sweep in a folder of its own, also a refused one."""
    for path in (Path("outputs/.sweeps/multirun.yaml"), Path("outputs/.sweeps"), Path("outputs")):
        try:
            path.rmdir() if path.is_dir() else path.unlink()
        except OSError:  # not there, or not empty
            continue


def _sweep_label() -> str:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return ""
    words = [word.lstrip("+") for word in config.overrides.task]
    return f"job {config.job.num}: {' '.join(words)}"


def _one_line(
    error: Exception, stage: str, overrides: Sequence[str], configs: Configs
) -> ConfigError:
    """Hydra's and OmegaConf's errors in our form."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import MissingMandatoryValue

    text = str(error)
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        return ConfigError(
            f"the override {error.override} cannot be read; quote its value: "
            + override(key, value)
        )
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = match.groups()
        return ConfigError(
            f"{key}={value} could be a sweep, a list or a text; write -m for a sweep, "
            f"'{key}=[{value}]' for a list, or {override(key, value)} for a text"
        )
    if match := re.search(r"You must specify '([\w/]+)'", text):
        group = match[1]
        return ConfigError(
            f"{stage} needs a {group}: pass {group}=NAME, one of "
            + ", ".join(configs.options(group))
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = [str(option) for option in (error.options or configs.options(group))]
        return ConfigError(
            f"there is no {group or 'config'} {name!r}; the nearest are "
            f"{', '.join(nearest(name, options))}, and all are {', '.join(options)}"
            + (
                "; model=torchvision or model=timm with model.name=NAME takes any of theirs"
                * (group == "model")
            )
        )
    if match := re.search(r"Could not override '([^']+)'", text):
        return _no_key(match[1], stage, overrides, configs)
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{stage} needs {error.full_key}: pass {error.full_key}=VALUE")
    return ConfigError("; ".join(line.strip() for line in text.splitlines() if line.strip()))


def _no_key(key: str, stage: str, overrides: Sequence[str], configs: Configs) -> ConfigError:
    error = unknown_key(key, _known_keys(stage, overrides, configs))
    group, _, name = key.partition(".")
    if group in configs.defaults(stage) and name:
        options = configs.options(group)
        having = [option for option in options if name in configs.document(f"{group}/{option}")]
        if having:
            return ConfigError(f"{error}; {key} belongs to {group}={'|'.join(having)}")
        if group == "model":
            return ConfigError(f"{error}; an argument of a model of your own is new: +{key}=...")
    return error


def _known_keys(stage: str, overrides: Sequence[str], configs: Configs) -> list[str]:
    """Every key of a stage, with those of the options that were chosen."""
    groups = configs.defaults(stage)
    chosen = {**groups, **dict(word.partition("=")[::2] for word in overrides)}
    nested = [
        f"{group}.{key}"
        for group in groups
        for option in configs.options(group)
        if option == str(chosen[group]).partition(",")[0] and group != "experiment"
        for key in configs.document(f"{group}/{option}")
    ]
    return [*groups, *configs.keys(stage), *nested]


# --------------------------------------------------------------------------- config -> call


def _call_stage(stage: str, config: Any) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        composed = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _one_line(error, stage, (), _configs()) from None
    assert isinstance(composed, dict)
    values: dict[str, Any] = {str(key): value for key, value in composed.items()}
    values.pop("experiment", None)
    known = {*_configs().keys(stage), *_configs().defaults(stage)}
    if strange := [str(key) for key in values if key not in known]:
        raise unknown_key(strange[0], sorted(known))
    for key in ("embeddings", "out", "path"):
        if isinstance(values.get(key), str):
            values[key] = os.path.expanduser(values[key])
    _CALLS[stage](values)


def _configs() -> Configs:
    """The config files of the job at hand, which may run in a process of its own."""
    from hydra.core.hydra_config import HydraConfig

    sources = HydraConfig.get().runtime.config_sources
    added = [source.path for source in sources if source.provider == "command-line"]
    return Configs(added[0] if added else None)


def _config_dir() -> dict[str, str]:
    """``--config-dir`` and the folder, as a command has to repeat them, or nothing."""
    added = _configs().folders[1:]
    return {"--config-dir": os.path.relpath(added[0])} if added else {}


def _config_dir_words() -> list[str]:
    return [word for flag in _config_dir().items() for word in flag]


def _typed() -> list[str]:
    """The overrides of this job, as they went to Hydra."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def _choice(group: str) -> str:
    from hydra.core.hydra_config import HydraConfig

    return str(HydraConfig.get().runtime.choices[group])


def _stage_extract(values: dict[str, Any]) -> None:
    path = _extract(values)
    _next(f"project projection=umap {override('embeddings', path)}")


def _extract(values: dict[str, Any]) -> Path:
    from embedx.extract import extract

    settings = dict(values)
    model, data = settings.pop("model"), settings.pop("data")
    out, name = settings.pop("out"), settings.pop("name")
    settings["pooling"] = _pooling(settings["pooling"])
    check_arguments(extract, settings, positional=2)  # before the model is built
    for key, value in (("name", name), ("out", out)):
        check_argument(key, value, str | None)
        if value is not None and not value.strip():
            raise ConfigError(f"{key} is empty; give a name, or leave it out")
    build_model, build_data = _node(model, "model"), _node(data, "data")
    folder = Path(out) if out else Path("outputs") / _folder_name(name or _run_name(values))
    if name and folder.name != name:
        log.info("the name %s is written %s", name, folder.name)
    source = build_data()  # the quicker to fail comes first
    choices = {group: _choice(group) for group in ("model", "data")}
    config = {**values, "choices": {**choices, **_config_dir()}}
    return extract(build_model(), source, out=folder, config=config, **settings).path


def _pooling(value: Any) -> Any:
    """A name as it is, and a node with a ``_target_`` as the function it stands for."""
    if isinstance(value, list):
        return [_pooling(one) for one in value]
    if not isinstance(value, dict):
        return value
    function = _node(value, "pooling", bind=False)
    arguments = {key: argument for key, argument in value.items() if key != "_target_"}
    return functools.partial(function, **arguments) if arguments else function


def _run_name(values: Mapping[str, Any]) -> str:
    """``<model>-<data>``, and a hash where any setting that decides the rows is not the default."""
    import hydra
    from omegaconf import OmegaConf

    model, data = _choice("model"), _choice("data")
    name = f"{values['model'].get('name') or model}-{data}"
    rows = {key: values[key] for key in ROW_SETTINGS}
    default = OmegaConf.to_container(hydra.compose("extract", [f"model={model}", f"data={data}"]))
    assert isinstance(default, dict)
    usual = {key: default[key] for key in ROW_SETTINGS}
    if root := values["data"].get("root"):
        # The plain name belongs to the folder of that name right here; any other one is another.
        full = Path(root).expanduser().resolve()
        name = f"{values['model'].get('name') or model}-{full.name or 'root'}"
        rows["data"] = {**rows["data"], "root": str(full)}
        usual["data"] = {**usual["data"], "root": str(Path.cwd().resolve() / full.name)}
    if rows == usual:
        return name
    return f"{name}-{settings_sha256(rows)[:6]}"


def _folder_name(name: str) -> str:
    """A name as one folder: what file systems or TensorBoard refuse is written ``_xNN_``."""

    def escaped(match: re.Match[str]) -> str:
        return f"_x{ord(match[0]):02x}_"

    return re.sub(r"[^\w.-]|^\.", escaped, name)


def _stage_project(values: dict[str, Any]) -> None:
    _project(values)
    _next(f"view {override('embeddings', values['embeddings'])}")


def _project(values: dict[str, Any]) -> "Projection":
    from embedx.project import project

    settings = dict(values)
    method, parameters = _plugin(settings.pop("projection"), "projection", project)
    return project(method=method, **settings, **parameters)


def _stage_evaluate(values: dict[str, Any]) -> None:
    from embedx.evaluate import evaluate

    evaluate(**values)
    _next(f"view {override('embeddings', values['embeddings'])}")


def _stage_export(values: dict[str, Any]) -> None:
    from embedx.export import export

    named = [override(key, values[key]) for key in ("embeddings", "out") if values[key]]
    exporter, options = _plugin(values.pop("exporter"), "exporter", export)
    export(exporter=exporter, **values, **options)
    _next(" ".join(["view viewer=tensorboard", *named]))


def _stage_view(values: dict[str, Any]) -> None:
    from embedx.view import view

    view(**values)
    if values["viewer"] == "map":
        _next(f"export {override('embeddings', values['embeddings'])}")


def run(
    extraction: Mapping[str, Any],
    *,
    projections: list[str],
    n_components: Literal[2, 3],
    random_state: int,
    color: str,
) -> None:
    """Extract, project by each method, evaluate, view and export in turn.

    Args:
        extraction: The values of ``extract``.
        projections: Methods, each an option of ``projection``.
        n_components: Dimensions of the maps.
        random_state: Seed of the maps.
        color: Column to colour the maps by.

    Raises:
        EmbedxError: As the stages; wrong values of its own before the work begins.
    """
    import hydra
    from omegaconf import OmegaConf

    from embedx.evaluate import evaluate
    from embedx.view import view

    known = _configs().options("projection")
    if not projections:
        raise ConfigError(f"projections is empty; choose from {', '.join(known)}")
    for option in projections:
        if option not in known:
            raise ConfigError(
                f"there is no projection {option!r}; the nearest are "
                f"{', '.join(nearest(option, known))}"
            )
    if not 0 <= random_state < 2**32:
        raise ConfigError(f"random_state must be 0 to 2**32 - 1, not {random_state}")
    path = _extract(dict(extraction))

    def compose(stage: str, *overrides: str) -> dict[str, Any]:
        word = f"embeddings={quoted(str(path))}"
        composed = OmegaConf.to_container(hydra.compose(stage, [*overrides, word]), resolve=True)
        assert isinstance(composed, dict)
        return {str(key): value for key, value in composed.items()}

    names = []
    for method in projections:
        settings = compose("project", f"projection={method}")
        settings["projection"].update(n_components=n_components, random_state=random_state)
        names.append(_project({**settings, "overwrite": extraction["overwrite"]}).name)
    evaluate(path)
    view(path, color=color)
    _stage_export(compose("export"))
    _next(f"info {override('path', path)} verify=true")
    picture = "maps.png" if len(set(names)) > 1 else f"map-{names[0]}.png"
    log.info("to look at: %s", path.parent / picture)


def _stage_run(values: dict[str, Any]) -> None:
    own = {key: values.pop(key) for key in list(inspect.signature(run).parameters)[1:]}
    check_arguments(run, own, positional=1)
    run(values, **own)


def layers(model: "Model", *, depth: int | None) -> None:
    """List the layers of a model, what they give for one picture, and their parameters.

    Args:
        model: The model; ``model.input_size`` is the side in px of the example.
        depth: Show names of at most so many parts, the rest folded into them; null for all.

    Raises:
        ConfigError: ``depth`` is less than 1.
        ModelError: The model fails on a picture of that size.
    """
    import torch

    from embedx.hooks import layer_table

    if depth is not None and depth < 1:
        raise ConfigError(f"depth must be at least 1, not {depth}")
    side = model.preprocess.crop_px if model.preprocess else 224
    example = torch.zeros(1, 3, side, side)
    table = layer_table(model.module, example, penultimate=model.layer, title=model.name)
    rows = [("layer", "type", "output shape", "parameters", "calls", "")]
    for layer in table:
        if not layer.name or (depth is not None and layer.name.count(".") >= depth):
            continue
        n = layer.n_parameters
        if depth is not None and layer.name.count(".") == depth - 1:  # what is folded into it
            n += sum(r.n_parameters for r in table if r.name.startswith(f"{layer.name}."))
        mark = f"<- penultimate, {layer.penultimate}" if layer.penultimate else ""
        shown = f"{n:,}" if n else "-"
        rows.append((layer.name, layer.kind, layer.output_shape, shown, str(layer.calls), mark))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        aligned = [
            cell.rjust(width) if i in (3, 4) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row[:5], widths, strict=True))
        ]
        log.info("%s", "  ".join([*aligned, row[5]]).rstrip())
    total = sum(layer.n_parameters for layer in table)
    log.info("%s: %s layers, %s parameters", model.name, len(table) - 1, f"{total:,}")


def _stage_layers(values: dict[str, Any]) -> None:
    node = values.pop("model")
    check_arguments(layers, values, positional=1)
    build = _node(node, "model")
    # Names and shapes need no weights of ours; a key of the user's own may mean anything.
    is_ours = _is_ours(_locate(node["_target_"], "model"))
    if is_ours and "weights" in node and node.get("checkpoint") is None:
        build = _node({**node, "weights": None}, "model")
    model = build()
    layers(model, **values)
    typed = [word for word in _typed() if word.lstrip("+").startswith("model")]
    layer = model.layer or "penultimate"
    _next(shlex.join(["extract", *_config_dir_words(), *typed, f"layers=[{layer}]"]))


def info(*, path: str, verify: bool) -> None:
    """Say what is in a file.

    Args:
        path: An embeddings or projection file, or the folder of a run.
        verify: Check every row against its checksum.

    Raises:
        StoreError: It is not a file of embedx, or rows do not match their checksum.
    """
    from embedx.store import describe

    about = describe(path, verify=verify)
    path = about["file"]
    # The parameters stand there one by one; and a file may not speak in our name.
    others = {k: v for k, v in about.items() if k not in ("file", "again", "settings", "runs code")}
    settings = read_settings(about.get("config")) or {}
    code = ", ".join(dict.fromkeys(_foreign_code(settings)))
    warned = {"runs code": f"{code}, as the command above does; read it first"} if code else {}
    about = {"file": path, "again": _again(Path(path), about), **warned, **others}
    width = max(map(len, about))
    for key, value in about.items():
        first, *rest = str(value).rstrip().split("\n")
        log.info("%-*s  %s", width, key, first)
        for line in rest:
            log.info("%-*s  %s", width, "", line)


def _again(path: Path, attrs: Mapping[str, Any]) -> str:
    """The command that would make a file again: with the same ``out`` it finds it done.

    A file may hold anything: what comes out of it into a command is quoted, word by word.
    """
    from embedx import store

    is_projection = attrs.get("format") == store.PROJECTION_FORMAT
    try:
        words = _project_again(path, attrs) if is_projection else _extract_again(path, attrs)
    except (ConfigError, RecursionError):
        return UNSAID
    if isinstance(words, str):
        return words
    command = _command(*words)
    if not command.isprintable():
        return "made with settings that no terminal shows: characters that steer it"
    return command


def _project_again(path: Path, attrs: Mapping[str, Any]) -> str | list[str]:
    from embedx import store

    try:
        settings = json.loads(attrs["settings"])
    except (KeyError, TypeError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError("the settings are not JSON")
    method, layer = settings.pop("method", None), settings.pop("layer", None)
    function = settings.pop("function", f"embedx.project.{method}")
    if not all(isinstance(name, str) for name in (method, layer, function)):
        raise ConfigError("the settings name no method or layer")
    configs = _configs()
    options = configs.options("projection")
    targets = {str(configs.document(f"projection/{o}").get("_target_")): o for o in options}
    if function not in targets:
        return f"made from Python, by embedx.project with {function}"
    parent = path.parent.parent / store.EMBEDDINGS_NAME
    elsewhere = f"made of embeddings that are not beside it, id {attrs['parent'][:12]}"
    try:
        if not parent.is_file() or store.open(parent).attrs["id"] != attrs["parent"]:
            return elsewhere
    except StoreError:  # another file's damage
        return elsewhere
    words = configs.overrides(
        "project", {"projection": settings, "layer": layer}, {"projection": targets[function]}
    )
    mine = map(shlex.quote, _config_dir_words())
    return ["project", *mine, *words, override("embeddings", parent)]


def _extract_again(path: Path, attrs: Mapping[str, Any]) -> str | list[str]:
    config = read_settings(attrs.get("config"))
    if config is None:
        raise ConfigError("the config is not YAML")
    if "choices" not in config:
        return "made from Python, by embedx.extract"
    beside = path.with_name("config.yaml")  # it has paths whole, and may be of another file
    whole = read_settings(beside.read_bytes()) if beside.is_file() else None
    if whole is not None and whole.get("id") == attrs["id"]:
        config = whole
    choices = config.pop("choices")
    if not isinstance(choices, dict) or not {"model", "data"} <= choices.keys():
        raise ConfigError("the config names no model or data")
    added = choices.pop("--config-dir", None)
    if not isinstance(added, str | None):
        raise ConfigError("--config-dir is no path")
    # A folder that a file names is not looked into: it may be the whole disk.
    words = _configs().overrides("extract", config, choices)
    flags = [] if added is None else ["--config-dir", shlex.quote(added)]
    return ["extract", *flags, *words, override("out", path.parent)]


def _foreign_code(value: Any) -> list[str]:
    """What ``_target_`` names in settings from a file, where it is not embedx's own."""
    if isinstance(value, dict):
        target = value.get("_target_")
        own = [target] if isinstance(target, str) and not target.startswith("embedx.") else []
        return own + [name for inner in value.values() for name in _foreign_code(inner)]
    if isinstance(value, list):
        return [name for inner in value for name in _foreign_code(inner)]
    return []


def _stage_info(values: dict[str, Any]) -> None:
    check_arguments(info, values)
    info(**values)


_CALLS: dict[str, Callable[[dict[str, Any]], None]] = {
    "run": _stage_run,
    "extract": _stage_extract,
    "project": _stage_project,
    "evaluate": _stage_evaluate,
    "export": _stage_export,
    "view": _stage_view,
    "layers": _stage_layers,
    "info": _stage_info,
}


def _next(command: str) -> None:
    log.info("next: %s", _command(command))


def _command(*words: str) -> str:
    typed = os.environ.get("EMBEDX_COMMAND", "python -m embedx")  # as scripts/embedx was called
    return " ".join([typed, *words])


# Group -> how many arguments come before those of the config file.
_GIVEN_BY_STAGE = {"projection": 1, "exporter": 3, "pooling": 1}


def _node(node: Any, group: str, *, bind: bool = True) -> Callable[..., Any]:
    """The call that a config node with a ``_target_`` stands for, checked but not yet made."""
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        if group == "pooling":
            raise ConfigError(f"pooling={node} has no _target_; name a function of an activation")
        options = ", ".join(_configs().options(group))
        raise ConfigError(f"{group} must be one of: {options}")
    target = _locate(node["_target_"], group)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    if group == "model" and not _is_ours(target):
        from embedx import models

        check_arguments(models.own, arguments, positional=1, where="model.")

        def build() -> Any:
            model = models.own(target, **arguments)
            if arguments.get("name") is not None:
                return model
            # Not as an argument: the factory may have a ``name`` too, and nobody gave it one.
            return dataclasses.replace(model, name=_choice("model"))

        return build
    before = _GIVEN_BY_STAGE.get(group, 0)
    check_arguments(target, arguments, positional=before, where=f"{group}.")
    return (lambda: target(**arguments)) if bind else target


def _is_ours(target: Callable[..., Any]) -> bool:
    return target.__module__.startswith("embedx.")


def _plugin(
    node: Any, group: str, stage: Callable[..., Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a config node names, and its parameters, to be passed on by a stage."""
    plugin = _node(node, group, bind=False)
    given = {key: value for key, value in node.items() if key != "_target_"}
    positional = _GIVEN_BY_STAGE[group]
    refuse_taken(stage, plugin=plugin, given=given, positional=positional, where=f"{group}.")
    return plugin, given


def _locate(target: str, group: str) -> Callable[..., Any]:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # a user's own module lies where the user stands
    module_name, _, name = target.rpartition(".")
    try:
        found = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a module of the user's own may raise anything
        raise ConfigError(
            f"{group}._target_={target} cannot be imported ({type(error).__name__}: {error}); name "
            "a callable as package.module.function, from here or installed"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{group}._target_={target} is a {type(found).__name__}, not a callable; name a "
            "function that makes it"
        )
    return typing.cast(Callable[..., Any], found)
