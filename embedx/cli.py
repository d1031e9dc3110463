"""The command line: a stage and its overrides become one call of the stage's function.

Hydra has no sub-commands: the dispatcher takes the stage off the arguments, mends what Hydra alone
cannot take, and leaves the rest (composition, help, sweeps) to Hydra. The composed config is then
checked against the signatures of the functions it calls. Only this module imports hydra.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embedx import __version__, jobs
from embedx.checks import check_argument, check_arguments, unknown_key
from embedx.configs import (
    ROW_SETTINGS,
    Configs,
    conf_dir,
    override,
    quoted,
    settings_sha256,
)
from embedx.errors import (
    ConfigError,
    DataError,
    DependencyError,
    EmbedxError,
    Interrupted,
    StoreError,
    missing_extra,
    nearest,
    short,
)
from embedx.info import UNSAID, foreign_code, info, recorded

if TYPE_CHECKING:
    from embedx.derived import Projection
    from embedx.explain import Explanation
    from embedx.parts import Engine, Feed
    from embedx.store import Embeddings

log = logging.getLogger("embedx")

STAGES = {
    "run": "extract, project, evaluate, export and view in turn; alone: the demo",
    "extract": "run data through a model and store what its layers give",
    "project": "make a map of stored embeddings by PCA, t-SNE or UMAP",
    "evaluate": "score embeddings and maps",
    "export": "write files for TensorBoard, Embedding Atlas, spreadsheets or NumPy",
    "view": "draw maps as pictures, or serve the projector",
    "explain": "draw feature maps, and which parts of a picture the score of a class depends on",
    "neighbors": "find the nearest rows, duplicates, outliers and doubtful labels",
    "compare": "rank several runs in one table, and draw their maps side by side",
    "layers": "list the layers of a model: shapes, parameters, FLOPs, time",
    "info": "say what is in a file, and check it",
}
NOTE_LINES = 12
OWNERS_NAMED = 4  # options of a group that have a key, in a help
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
_LOST = (
    "Interrupted: its process was killed, or ran out of memory, and jobs after it may not have "
    "run; the same sweep again goes on with what is missing"
)
_WORKS_ON = {  # stage -> the key that names its run; the newest where it is not given
    "project": "embeddings",
    "evaluate": "embeddings",
    "export": "embeddings",
    "view": "embeddings",
    "neighbors": "embeddings",
    "info": "path",
}
_LAUNCHERS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
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
        kept = "; the rows that were written are kept" if stage in ("extract", "run") else ""
        print(f"stopped by Ctrl-C{kept}", file=sys.stderr)
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
                # One write: the lines of jobs side by side come whole.
                print(f"{line}\n", end="", flush=True)
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
    if re.fullmatch(r"[\d._,]+", value):
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
        if re.match(r"hydra[./]launcher\b", key) and not sweeps and not shows_only:
            raise ConfigError(f"{word} has no use without -m, which makes a sweep; add -m")
        given.add(key)
        if match["plus"] == "~" and "." not in key:
            raise ConfigError(f"{word} takes away what {stage} needs; set it instead: {key}=...")
        if key in groups and value in ("null", "") and key != "experiment":
            options = ", ".join(configs.options(key))
            raise ConfigError(f"{key} must be one of {options}, not {value!r}")
        is_typed_out = key == "ids" and re.search("[\"']", value or "") is not None
        if key in ("layers", "query", "ids") and value is not None and not is_typed_out:
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
        newest = _newest_embeddings(or_partial="follow=true" in prepared)
        log.info("%s: the newest, %s", key, newest)
        prepared.append(f"{key}={quoted(str(newest))}")
    return prepared


def _newest_embeddings(*, or_partial: bool = False) -> Path:
    from embedx.store import EMBEDDINGS_NAME
    from embedx.unfinished import partial_path

    found = list(Path("outputs").glob(f"*/{EMBEDDINGS_NAME}"))
    if or_partial:
        found += Path("outputs").glob(f"*/{partial_path(Path(EMBEDDINGS_NAME)).name}")
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
        shown: dict[str, str] = {}
        owners: dict[str, list[str]] = {}
        # What the default says of a key that several have comes first.
        options = sorted(configs.options(group), key=lambda option: option != groups[group])
        for option in options:
            for key, about in configs.explained_option(group, option).items():
                shown.setdefault(key, about)
                owners.setdefault(key, []).append(option)
        for key, about in shown.items():
            # Of some options alone; a key that many have is told by what it means.
            of = f" ({', '.join(owners[key])})" if len(owners[key]) <= OWNERS_NAMED else ""
            print(f"  {group}.{key}{of}: {about}")
    if groups:
        print("\nchoices")
        for group, option in groups.items():
            chosen = "" if option in (None, "???") else f" (default {option})"
            print(f"  {group}={'|'.join(configs.options(group))}{chosen}")
    print("\nall values, as KEY=VALUE (nested ones as model.input_size=96)\n")


# --------------------------------------------------------------------------- Hydra


def _in_our_words(error: Exception) -> EmbedxError:
    """A user's mistake as an error of ours; anything else is a bug, and raised as it is."""
    if isinstance(error, EmbedxError):
        return error
    if isinstance(error, OSError):
        return _unusable(error)
    raise error


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

    full_error = os.environ.get("HYDRA_FULL_ERROR")
    sweeps = bool({"-m", "--multirun"} & set(flags))
    prepared = _prepare(stage, overrides, configs, shows_only=shows_only, sweeps=sweeps)
    started: list[str] = []
    failed: list[EmbedxError] = []

    def job(config: DictConfig) -> None:
        started.append(stage)
        try:
            _call_stage(stage, config)
        except (EmbedxError, OSError) as error:
            failed.append(_in_our_words(error))  # raised, it would stand in Hydra's frame

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, and we print them in one line
    try:
        if sweeps and not shows_only:
            return _run_sweep(stage, prepared, flags)
        _run_hydra(stage, [*prepared, *flags], job)
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        # Before the first job a ValueError is Hydra's word on an override or a flag.
        is_own = isinstance(error, EmbedxError)
        if is_own or full_error or (started and isinstance(error, (ValueError, OSError))):
            raise
        raise _one_line(error, stage, prepared, configs) from None
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    for reason in failed:
        if isinstance(reason, Interrupted):
            raise reason
        _print_error(reason)
    return 1 if failed else 0


# --------------------------------------------------------------------------- sweeps


@dataclasses.dataclass(frozen=True)
class _Sweep:
    """A sweep as its jobs know it, in whatever process they run.

    Attributes:
        stage: What each job does.
        folder: Of this sweep alone: each job notes there how it ended, for Hydra does not say.
        process: The one that the user started.
    """

    stage: str
    folder: Path
    process: int

    def note(self, number: int, **about: Any) -> None:
        path = self.folder / f"job-{number}.json"
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(about))
        beside.replace(path)

    def notes(self) -> dict[int, dict[str, Any]]:
        """What each job that has begun noted last."""
        paths = {
            int(path.stem.removeprefix("job-")): path for path in self.folder.glob("job-*.json")
        }
        return {number: json.loads(path.read_text()) for number, path in sorted(paths.items())}


def _run_sweep(stage: str, overrides: Sequence[str], flags: Sequence[str]) -> int:
    """Run a sweep by whatever launcher; every job runs, also after one that fails.

    Raises:
        ConfigError: It has no job.
        Interrupted: A signal stopped it.
    """
    from omegaconf import DictConfig

    is_new = not Path("outputs").exists()
    sweep = _Sweep(stage, _sweep_folder(), os.getpid())
    kept = f"hydra.sweep.dir={quoted(os.path.relpath(sweep.folder))}"
    own = [] if any(word.startswith("hydra.sweep.dir=") for word in overrides) else [kept]

    def job(config: DictConfig) -> None:
        _run_job(sweep, config)

    def stop(number: int, _: Any) -> None:
        name = signal.Signals(number).name
        raise _StopAll(
            Interrupted(f"stopped by {name}; what is done is kept", signal_number=number)
        )

    # A launcher's processes would outlive this one.
    before = signal.signal(signal.SIGTERM, stop)
    failed: list[tuple[str, str]] = []
    try:
        try:
            _run_hydra(stage, [*overrides, *own, *flags], job)
        except Exception:
            # The launcher fails where a process was killed under it.
            if all(note["state"] != "begun" for note in sweep.notes().values()):
                raise
        except _StopAll as end:
            raise end.reason from None
        notes = sweep.notes()
        for number, note in notes.items():
            if note["state"] != "done":
                failed.append((f"failed job {number}: {note['command']}", note.get("error", _LOST)))
    finally:
        signal.signal(signal.SIGTERM, before)
        _tidy(sweep.folder, keeps_logs=bool(failed), is_new=is_new)
    if not notes:
        raise ConfigError(
            "the sweep has no job: a list or a glob in it is empty; in a sweep name the values, as "
            "in model=resnet18,resnet50"
        )
    done = len(notes) - len(failed)
    log.info("%s jobs: %s done, %s failed", len(notes), done, len(failed))
    for lines in failed:
        for line in lines:
            print(_legible(line), file=sys.stderr)
    return 1 if failed else 0


def _run_job(sweep: _Sweep, config: Any) -> None:
    """A job, in a process that may have nothing of what the user's has."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    number, words = int(hydra.job.num), list(hydra.overrides.task)
    is_apart = os.getpid() != sweep.process
    if is_apart:
        _set_apart(f"job {number}: ")
    shown = " ".join(word.lstrip("+") for word in words)
    log.info("%s", shown if is_apart else f"job {number}: {shown}")
    alone = jobs.command(sweep.stage, *jobs.config_dir_words(), *map(shlex.quote, words))
    place = _place(sweep.stage, config)
    sweep.note(number, state="begun", command=alone, place=place)
    try:
        _require_own_place(sweep, number)
        _call_stage(sweep.stage, config)
    except Interrupted as error:
        if is_apart:
            raise KeyboardInterrupt from None  # what a launcher hands on
        raise _StopAll(error) from None
    except Exception as error:
        try:
            reason: Exception = _in_our_words(error)
            _print_error(reason)
        except Exception:  # a bug of ours, or of the user's own code
            traceback.print_exc()
            reason = error
        about = short(f"{type(reason).__name__}: {reason}", most=2000)
        sweep.note(number, state="failed", command=alone, place=place, error=about)
    else:
        sweep.note(number, state="done", command=alone, place=place)


def _place(stage: str, config: Any) -> str:
    """Where a job replaces what is there, as it was typed; empty where it replaces nothing."""
    from omegaconf import OmegaConf

    values = {key: OmegaConf.select(config, key) for key in ("overwrite", "out", "name")}
    replaces = stage in _REPLACES_FILES or (stage in _ONE_FOLDER and values["overwrite"])
    key = next((key for key in ("out", "name") if values[key] is not None), None)
    return f"{key}={values[key]}" if replaces and key else ""


_REPLACES_FILES = ("export", "view", "compare", "layers")  # by files of the same names
_ONE_FOLDER = ("extract", "run", "explain")  # of which a job fills a folder of its own


def _require_own_place(sweep: _Sweep, number: int) -> None:
    """Refuse a job that would replace what another of the same sweep makes.

    Raises:
        ConfigError: Another one was told to write where it is.
    """
    notes = sweep.notes()
    place = notes[number].get("place", "")
    others = [other for other, note in notes.items() if place and note.get("place") == place]
    if first := [other for other in others if other != number]:
        how = "" if sweep.stage in _REPLACES_FILES else ", or leave overwrite=true out"
        raise ConfigError(
            f"job {first[0]} of this sweep writes to {place} too, and one would replace what the "
            f"other has made; give each its own, such as {place}-${{hydra:job.num}}{how}"
        )


def _set_apart(prefix: str) -> None:
    """Set up a process of a launcher's: lines that say whose they are, and no bars among them."""
    from embedx import progress

    _quiet()
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    progress.shows_bars = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process


def _sweep_folder() -> Path:
    """A new folder for a sweep, which Hydra makes use of too."""
    top = Path("outputs/.sweeps")
    while True:
        try:
            top.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(dir=top)).absolute()
        except FileNotFoundError:  # another sweep has just tidied up
            continue
        except OSError as error:
            raise _unusable(error) from None


def _tidy(folder: Path, *, keeps_logs: bool, is_new: bool) -> None:
    """Leave nothing behind but the logs of jobs that failed where nobody saw them."""
    logs = folder / ".submitit"
    if keeps_logs and logs.is_dir():
        log.info("what the jobs printed is in %s", os.path.relpath(logs))
        return
    shutil.rmtree(folder, ignore_errors=True)
    for path in (folder.parent, folder.parent.parent)[: 1 + is_new]:
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def _one_line(
    error: Exception, stage: str, overrides: Sequence[str], configs: Configs
) -> EmbedxError:
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
        if group == "hydra/launcher" and name in _LAUNCHERS:
            where = f"hydra/launcher={name}"
            return missing_extra(_LAUNCHERS[name], extra="sweep", needed_for=where)
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
        raise _one_line(error, stage, (), jobs.configs()) from None
    assert isinstance(composed, dict)
    values: dict[str, Any] = {str(key): value for key, value in composed.items()}
    values.pop("experiment", None)
    known = {*jobs.configs().keys(stage), *jobs.configs().defaults(stage)}
    if strange := [str(key) for key in values if key not in known]:
        raise unknown_key(strange[0], sorted(known))
    for key in ("embeddings", "out", "path"):
        if isinstance(values.get(key), str):
            values[key] = os.path.expanduser(values[key])
    _CALLS[stage](values)


def _stage_extract(values: dict[str, Any]) -> None:
    path = _extract(values)
    if values["part"] is None:
        jobs.say_next(f"project projection=umap {override('embeddings', path)}")
    else:  # when all are made: what makes one file of them
        typed = [word for word in jobs.typed() if not re.match(r"\+*part=", word)]
        jobs.say_next(shlex.join(["extract", *jobs.config_dir_words(), *typed]))


def _extract(values: dict[str, Any], *, feed: "Feed | None" = None) -> Path:
    from embedx.extract import extract

    settings = dict(values)
    model, data = settings.pop("model"), settings.pop("data")
    out, name = settings.pop("out"), settings.pop("name")
    settings.pop("engine")
    settings["pooling"] = jobs.pooling_of(settings["pooling"])
    check_arguments(extract, settings, positional=2)  # before the model is built
    for key, value in (("name", name), ("out", out)):
        check_argument(key, value, str | None)
        if value is not None and not value.strip():
            raise ConfigError(f"{key} is empty; give a name, or leave it out")
    build_model, build_data = jobs.call_of(model, "model"), jobs.call_of(data, "data")
    folder = Path(out) if out else Path("outputs") / _folder_name(name or _run_name(values))
    if name and folder.name != name:
        log.info("the name %s is written %s", name, folder.name)
    source = build_data()  # the quicker to fail comes first
    choices = {group: jobs.choice(group) for group in ("model", "data")}
    config = {**values, "choices": {**choices, **jobs.config_dir()}}
    for key in ("engine", "n_parts", "part"):  # how the work is shared out says nothing of the file
        config.pop(key, None)
    engine = feed or _engine("extract", values, folder)
    return extract(build_model(), source, out=folder, config=config, engine=engine, **settings).path


def _engine(stage: str, values: dict[str, Any], folder: Path) -> "Engine | None":
    """What has parts made, by processes that call the stage with the same values; None for none."""
    from embedx.parts import Engine, Task

    engine = jobs.call_of(values["engine"], "engine")()
    if not isinstance(engine, Engine):
        return None
    settings = {
        "stage": stage,
        "hydra": _plain_hydra(),
        "values": values,
        "folder": str(folder.resolve()),
    }
    engine.task = Task("embedx.cli:make_parts", settings, str(values["device"]))
    return engine


def _plain_hydra() -> dict[str, Any]:
    """What a worker has to know of how its config was composed."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra: Any = HydraConfig.get()
    kept = {"runtime": ["choices", "config_sources"], "overrides": ["task"]}
    return {
        key: {name: OmegaConf.to_container(hydra[key][name]) for name in names}
        for key, names in kept.items()
    }


def make_parts(settings: dict[str, Any], feed: "Feed") -> None:
    """Make parts of an extraction or an explanation, in a worker of an engine.

    Args:
        settings: What the driver gave to its task.
        feed: Which parts.

    Raises:
        EmbedxError: As the stage.
    """
    from hydra.conf import HydraConf
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from embedx import progress

    _quiet()
    progress.shows_bars = False
    hydra = OmegaConf.merge(OmegaConf.structured(HydraConf), settings["hydra"])
    HydraConfig.instance().set_config(OmegaConf.create({"hydra": hydra}))
    values = {**settings["values"], "overwrite": False}
    if settings["stage"] == "explain":
        _explain(values, run=Path(settings["folder"]), feed=feed)
    else:
        values |= {"n_parts": feed.about["n_parts"], "part": None, "out": settings["folder"]}
        _extract(values, feed=feed)


def _run_name(values: Mapping[str, Any]) -> str:
    """``<model>-<data>``, and a hash where any setting that decides the rows is not the default."""
    import hydra
    from omegaconf import OmegaConf

    model, data = jobs.choice("model"), jobs.choice("data")
    called = values["model"].get("name") or model
    if Path(called).expanduser().is_dir():  # a folder is called by its last part
        called = Path(called).expanduser().resolve().name
    name = f"{called}-{data}"
    rows = {key: values[key] for key in ROW_SETTINGS}
    default = OmegaConf.to_container(hydra.compose("extract", [f"model={model}", f"data={data}"]))
    assert isinstance(default, dict)
    usual = {key: default[key] for key in ROW_SETTINGS}
    is_usual_size = values["batch_size"] == default["batch_size"]
    if not is_usual_size and foreign_code([values["model"], values["pooling"]]):
        rows["batch_size"] = values["batch_size"]  # such code may see a batch as a whole
    own = values["data"]
    key = next((key for key in ("path", "root") if isinstance(own.get(key), str)), None)
    if key is not None and own[key]:
        # The plain name belongs to what has that name right here; any other one is another.
        full = Path(own[key]).expanduser().resolve()
        name = f"{called}-{own.get('name') or full.name or 'root'}"
        rows["data"] = {**rows["data"], key: str(full)}
        usual["data"] = {**usual["data"], key: str(Path.cwd().resolve() / full.name)}
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
    jobs.say_next(f"view {override('embeddings', values['embeddings'])}")


def _project(values: dict[str, Any]) -> "Projection":
    from embedx.project import project

    settings = dict(values)
    node = settings.pop("projection")
    settings["engine"] = jobs.call_of(settings["engine"], "engine")()
    if settings["transform_from"] is not None:
        named = [word for word in jobs.typed() if re.match(r"\+*projection\b", word)]
        if named:
            raise ConfigError(
                f"{named[0]} has no use beside transform_from: the rows are placed by the method "
                "and the parameters of that map; leave it out"
            )
        return project(**settings)
    method, parameters = jobs.plugin_of(node, "projection", project)
    return project(method=method, **settings, **parameters)


def _stage_evaluate(values: dict[str, Any]) -> None:
    from embedx.evaluate import evaluate

    evaluate(**values)
    jobs.say_next(f"view {override('embeddings', values['embeddings'])}")


def _stage_export(values: dict[str, Any]) -> None:
    from embedx.export import export, tensorboard

    named = [override(key, values[key]) for key in ("embeddings", "out") if values[key]]
    exporter, options = jobs.plugin_of(values.pop("exporter"), "exporter", export)
    export(exporter=exporter, **values, **options)
    if exporter is tensorboard:
        jobs.say_next(" ".join(["view viewer=tensorboard", *named]))


def _stage_view(values: dict[str, Any]) -> None:
    from embedx.view import view

    view(**values)
    named = override("embeddings", values["embeddings"])
    if values["viewer"] == "map" and not values["follow"]:
        jobs.say_next(f"view viewer=report {named}")
    elif values["viewer"] == "report":
        jobs.say_next(f"export {named}")


def _stage_explain(values: dict[str, Any]) -> None:
    found = _explain(values)
    if found.maps is not None:
        jobs.say_next(f"info {override('path', found.maps.path)}")
    else:
        kept = r"\+*(model|data|name|ids|rows|limit|device)\b"
        typed = [word for word in jobs.typed() if re.match(kept, word)]
        jobs.say_next(shlex.join(["explain", *jobs.config_dir_words(), *typed, "method=gradcam"]))


def _explain(
    values: dict[str, Any], *, run: Path | None = None, feed: "Feed | None" = None
) -> "Explanation":
    import hydra
    from omegaconf import OmegaConf

    from embedx.explain import explain

    settings = dict(values)
    model, data = settings.pop("model"), settings.pop("data")
    name = settings.pop("name")
    settings.pop("engine")
    check_arguments(explain, settings, positional=2)  # before the model is built
    check_argument("name", name, str | None)
    if name is not None and not name.strip():
        raise ConfigError("name is empty; give a name, or leave it out")
    build_model, build_data = jobs.call_of(model, "model"), jobs.call_of(data, "data")
    choices = {group: jobs.choice(group) for group in ("model", "data")}
    if run is None:
        if name is None:  # that of an extraction with nothing but this model and these data
            words = [f"{group}={option}" for group, option in choices.items()]
            usual = OmegaConf.to_container(hydra.compose("extract", words))
            assert isinstance(usual, dict)
            of_run = {key: values[key] for key in choices}
            name = _run_name({**{str(key): value for key, value in usual.items()}, **of_run})
        run = Path("outputs") / _folder_name(name)
    source = build_data()  # the quicker to fail comes first
    config = {**values, "choices": {**choices, **jobs.config_dir()}}
    config.pop("engine")
    engine = feed or _engine("explain", values, run)
    return explain(build_model(), source, run=run, config=config, engine=engine, **settings)


def _stage_neighbors(values: dict[str, Any]) -> None:
    from embedx import ready_made
    from embedx.search import is_hdf5, row_of, search

    check_arguments(search, values)
    opened = ready_made.opened(values.pop("embeddings"))
    query = values.pop("query")
    with contextlib.ExitStack() as stack:
        asked = query
        if isinstance(query, str) and row_of(opened, query) is None:
            path = Path(query).expanduser()
            if path.is_file() and not is_hdf5(path):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="embedx-"))
                asked = _embedded(path, opened, layer=values["layer"], folder=Path(folder))
        findings = search(opened, query=asked, **values)
    suspects = [row for table in findings.tables.values() for row in table if row.get("suspect")]
    named = f" {override('query', suspects[0]['id'])}" if query is None and suspects else ""
    if named or query is not None:
        jobs.say_next(f"neighbors {override('embeddings', opened.path)}{named}")


def _stage_compare(values: dict[str, Any]) -> None:
    from embedx.compare import compare

    compare(values.pop("runs"), **values)


def _embedded(path: Path, opened: "Embeddings", *, layer: str | None, folder: Path) -> "Embeddings":
    """A picture through the model that made a file, as the file says it was made.

    A file may say anything: only models and poolings of embedx are built because it says so.

    Raises:
        ConfigError: The file does not say how it was made, or by code that is not embedx's.
        DataError: The picture cannot be read.
        StoreError: The file has no such layer.
    """
    from embedx.extract import extract
    from embedx.pictures import decode_image
    from embedx.pooling import POOLINGS
    from embedx.sources import Source

    point, _ = opened.rows(layer)
    settings = recorded(opened.path, opened.attrs)
    where = f"query={path} is not run through the model of {opened.path}, for"
    way_out = "extract it by your own command with another name, then query=outputs/NAME"
    if settings is None or "choices" not in settings:
        raise ConfigError(f"{where} {UNSAID}; {way_out}")
    model, pool = settings.get("model"), settings.get("pooling", "auto")
    if isinstance(pool, list):
        points = list(opened.embeddings)
        pool = pool[points.index(point)] if len(pool) == len(points) else None
    ours = Configs()
    targets = {ours.document(f"model/{name}")["_target_"] for name in ours.options("model")}
    poolings = {f"embedx.pooling.{name}" for name in POOLINGS}
    named = model.get("_target_") if isinstance(model, dict) else None
    if foreign := foreign_code([model, pool]):
        raise ConfigError(
            f"{where} that takes code that a file names ({', '.join(foreign)}), which is not run; "
            + way_out
        )
    is_known_pool = isinstance(pool, str) or (
        isinstance(pool, dict) and pool.get("_target_") in poolings
    )
    if named not in targets - {"???"} or not is_known_pool:
        raise ConfigError(f"{where} its settings name no model of embedx; {way_out}")
    try:
        image = decode_image(path)
    except (DataError, OSError) as error:
        raise DataError(f"query={path} cannot be read as a picture: {error}") from None
    kept = {key: settings[key] for key in ("normalize", "precision", "dtype") if key in settings}
    log.info("running %s through %s", path, opened.attrs.get("model"))
    before = log.level
    log.setLevel(logging.WARNING)  # where it is put for a moment is no news
    try:
        return extract(
            jobs.call_of(model, "model")(),
            Source(name=path.name, ids=[str(path)], read=lambda _: image, fingerprint=str(path)),
            layers=[point],
            pooling=jobs.pooling_of(pool),
            thumbnails=0 if opened.thumbnails is None else opened.thumbnails.shape[1],
            out=folder,
            num_workers=0,
            **kept,
        )
    finally:
        log.setLevel(before)


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

    known = jobs.configs().options("projection")
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
    path = _extract({**extraction, "part": None})

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
    jobs.say_next(f"view viewer=report {override('embeddings', path)}")
    jobs.say_next(f"info {override('path', path)} verify=true")
    picture = "maps.png" if len(set(names)) > 1 else f"map-{names[0]}.png"
    log.info("to look at: %s", path.parent / picture)


def _stage_run(values: dict[str, Any]) -> None:
    own = {key: values.pop(key) for key in list(inspect.signature(run).parameters)[1:]}
    check_arguments(run, own, positional=1)
    run(values, **own)


def _stage_layers(values: dict[str, Any]) -> None:
    from embedx.layers import layers
    from embedx.models import without_values

    node = values.pop("model")
    check_arguments(layers, values, positional=1)
    build = jobs.call_of(node, "model")
    # Names and shapes need no weights of ours; a key of the user's own may mean anything.
    is_ours = jobs.is_ours(jobs.located(node["_target_"], "model"))
    is_empty = is_ours and "weights" in node and node.get("checkpoint") is None
    if is_empty:
        build = jobs.call_of({**node, "weights": None}, "model")
    data = values["format"] if values["out"] is None and values["format"] != "tree" else None
    # A pipe takes the data alone.
    with contextlib.nullcontext() if data is None else contextlib.redirect_stdout(sys.stderr):
        with without_values() if is_empty else contextlib.nullcontext():
            model = build()
        table = layers(model, **values)
    if data is not None:
        sys.stdout.buffer.write(table.as_bytes(data))
        sys.stdout.flush()
        return
    if values["out"] is None:
        for line in table.lines():
            log.info("%s", line)
    typed = [word for word in jobs.typed() if word.lstrip("+").startswith("model")]
    layer = model.layer or "penultimate"
    jobs.say_next(shlex.join(["extract", *jobs.config_dir_words(), *typed, f"layers=[{layer}]"]))


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
    "explain": _stage_explain,
    "neighbors": _stage_neighbors,
    "compare": _stage_compare,
    "layers": _stage_layers,
    "info": _stage_info,
}
