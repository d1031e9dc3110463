"""The command line: a stage and its overrides become one call of the stage's function.

Hydra has no sub-commands: the dispatcher takes the stage off the arguments, mends what Hydra alone
cannot take, and leaves the rest (composition, help, sweeps) to Hydra.
"""

import contextlib
import dataclasses
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embedx import __version__, jobs
from embedx.configs import Configs, conf_dir, quoted
from embedx.errors import (
    ConfigError,
    DataError,
    DependencyError,
    EmbedxError,
    Interrupted,
    nearest,
    short,
)
from embedx.said import in_our_words, legible, one_line, print_error, print_no_more, quiet, unusable
from embedx.stages import call_stage

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
    quiet()
    try:
        return _dispatch(stage, words[1:])
    except EmbedxError as error:
        print_error(error)
        return 128 + error.signal_number if isinstance(error, Interrupted) else 1
    except KeyboardInterrupt:
        kept = "; the rows that were written are kept" if stage in ("extract", "run") else ""
        print(f"stopped by Ctrl-C{kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        print_no_more()
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
            call_stage(stage, config)
        except (EmbedxError, OSError) as error:
            failed.append(in_our_words(error))  # raised, it would stand in Hydra's frame

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
        raise one_line(error, stage, prepared, configs) from None
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    for reason in failed:
        if isinstance(reason, Interrupted):
            raise reason
        print_error(reason)
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
            print(legible(line), file=sys.stderr)
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
        call_stage(sweep.stage, config)
    except Interrupted as error:
        if is_apart:
            raise KeyboardInterrupt from None  # what a launcher hands on
        raise _StopAll(error) from None
    except Exception as error:
        try:
            reason: Exception = in_our_words(error)
            print_error(reason)
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

    quiet()
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
            raise unusable(error) from None


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
