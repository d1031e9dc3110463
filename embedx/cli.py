"""The command line: a stage and its overrides become one call of the stage's function.

Hydra has no sub-commands: the dispatcher takes the stage off the arguments, mends what Hydra alone
cannot take, and leaves the rest (composition, help, sweeps) to Hydra. The composed config is then
checked against the signatures of the functions it calls. Only this module imports hydra.
"""

import ast
import hashlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embedx import __version__
from embedx.checks import check_argument, check_arguments, unknown_key
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
_FLAGS_WITH_VALUE = frozenset(
    [
        "--cfg",
        "-c",
        "--package",
        "-p",
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
    ]
)
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
    stage = words[0]
    if stage not in STAGES:
        kind = "flag" if stage.startswith("-") else "stage"
        print(
            f"ConfigError: there is no {kind} {stage!r}; the stages are {', '.join(STAGES)}, "
            f"the nearest is {nearest(stage, STAGES, n=1)[0]}",
            file=sys.stderr,
        )
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
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "?", line)
    return line.encode("utf-8", "backslashreplace").decode()


def _print_error(error: BaseException) -> None:
    for note in getattr(error, "__notes__", []):
        for line in note.split("\n"):
            print(_legible(line), file=sys.stderr)
    print(_legible(f"{type(error).__name__}: {error}"), file=sys.stderr)


# --------------------------------------------------------------------------- before Hydra


def conf_dir() -> Path:
    """The folder of config files: the checkout's, else the one packed into the wheel."""
    package = Path(__file__).resolve().parent
    if (package.parent / "pyproject.toml").is_file():  # an editable install packs a stale copy
        return package.parent / "conf"
    return package / "conf"


def _document(name: str) -> dict[str, Any]:
    import yaml

    document = yaml.safe_load((conf_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
    return typing.cast(dict[str, Any], document)


def _keys(stage: str) -> set[str]:
    """The keys of a stage itself, without those of its groups."""
    own = _document(stage)
    extraction = _document("_extraction") if "_extraction" in own["defaults"] else {}
    return {*own, *extraction} - {"defaults"}


def _defaults(stage: str) -> dict[str, Any]:
    """``{group: option}`` of a stage's defaults list."""
    groups: dict[str, Any] = {}
    for entry in _document(stage)["defaults"]:
        if isinstance(entry, dict):
            groups.update({k: v for k, v in entry.items() if not k.startswith("override")})
    return groups


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides and flags; Hydra takes them in that order only."""
    overrides: list[str] = []
    flags: list[str] = []
    takes_value = False
    for word in words:
        about = flags[-1:] in (["--info"], ["-i"]) and not re.search("[=~]", word)
        if takes_value or about or word.startswith("-"):
            flags.append(word)
            takes_value = word in _FLAGS_WITH_VALUE and not takes_value
        else:
            overrides.append(word)
    return overrides, flags


def _quote(value: str) -> str:
    """A value in the quotes that Hydra's grammar takes."""
    escaped = re.sub(r"\\+(?=\"|$)", lambda match: match[0] * 2, value).replace('"', '\\"')
    return f'"{escaped}"'


def _word(key: str, value: Any) -> str:
    """``key=value`` as a user would type it: quoted for Hydra and for the shell, where need be."""
    text = str(value)
    # Without a slash it could be a number, or null, to Hydra.
    is_plain = "/" in text and re.fullmatch(r"[\w./:@+-]+", text, re.ASCII)
    return shlex.quote(f"{key}={text if is_plain else _quote(text)}")


def _quote_layers(value: str) -> str:
    """Names such as 1.10 are numbers to Hydra: quote what is not quoted."""

    def quoted(text: str) -> str:
        text = text.strip()
        return text if not text or text[0] in "'\"" else _quote(text)

    if value.startswith("[") and value.endswith("]"):  # one list, or a sweep over several
        return re.sub(
            r"\[([^\[\]]*)\]",
            lambda match: "[" + ",".join(map(quoted, match[1].split(","))) + "]",
            value,
        )
    if re.fullmatch(r"[\d.,]+", value):
        return ",".join(quoted(part) for part in value.split(","))
    return value


def _prepare(
    stage: str, overrides: Sequence[str], *, shows_only: bool = False, sweeps: bool = False
) -> list[str]:
    """The overrides as Hydra takes them."""
    groups = _defaults(stage)
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
            raise ConfigError(f"{key} must be one of {', '.join(_options(key))}, not {value!r}")
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
        prepared.append(f"{key}={_quote(str(newest))}")
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


def _print_help(stage: str) -> None:
    """What a stage does, its keys out of its function's docstring, its choices.

    The docstring is read, not imported: help comes at once, and without torch.
    """
    print(f"{STAGES[stage]}\n\nusage: python -m embedx {stage} [KEY=VALUE ...] [FLAGS]\n\nkeys")
    groups = _defaults(stage)
    own = _document(stage)
    where = [(Path(__file__).stem if stage in _HERE else stage, stage, set(own))]
    if "_extraction" in own["defaults"]:
        print(f"  name: {_NAME_KEY}")
        where = [
            *where[: stage != "extract"],
            ("extract", "extract", set(_document("_extraction"))),
        ]
    for module, function, keys in where:
        for key, about in _explained(module, function).items():
            if key in keys:
                print(f"  {key}: {about}")
    for group in groups:
        shown: set[str] = set()
        for option in _options(group):
            node = _document(f"{group}/{option}")
            target = "embedx.models.own" if option == "own" else str(node.get("_target_"))
            if target.startswith("embedx."):
                for key, about in _explained(*target.split(".")[1:]).items():
                    if key in node and key not in shown:
                        shown.add(key)
                        print(f"  {group}.{key}: {about}")
    if groups:
        print("\nchoices")
        for group, option in groups.items():
            chosen = "" if option in (None, "???") else f" (default {option})"
            print(f"  {group}={'|'.join(_options(group))}{chosen}")
    print("\nall values, as KEY=VALUE (nested ones as model.input_size=96)\n")


def _explained(module: str, function: str) -> dict[str, str]:
    """The arguments of a function of ours with what its docstring says of them."""
    path = Path(__file__).with_name(f"{module}.py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)
    text = inspect.cleandoc(ast.get_docstring(found) or "")
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.S | re.M)
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return {
        key: " ".join(about.replace("``", "").replace("None", "null").split())
        for key, about in entries
    }


_HERE = frozenset(["layers", "info", "run"])
_NAME_KEY = (
    "the run is kept in outputs/NAME; <model>-<data> where not given, plus a hash of the "
    "settings that are not the default"
)


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
    if {"--help", "-h"} & set(flags):
        _print_help(stage)
    try:
        import hydra
    except ImportError:
        raise DependencyError(
            "what embedx needs is not installed in this Python; use scripts/embedx, or activate "
            "the environment that has it: source .venv/bin/activate"
        ) from None
    from hydra.errors import HydraException
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
    base = {"version_base": None} if hydra.__version__.startswith("1.3.") else {}
    sweeps = bool({"-m", "--multirun"} & set(flags))
    prepared = _prepare(stage, overrides, shows_only=shows_only, sweeps=sweeps)
    sys.argv = ["embedx", *prepared, *flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, and we print them in one line
    try:
        decorate = hydra.main(config_path=str(conf_dir()), config_name=stage, **base)
        decorate(job)()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        # Before the first job a ValueError is Hydra's word on an override or a flag.
        if full_error or (started and isinstance(error, (ValueError, OSError))):
            raise
        raise _one_line(error, stage, prepared) from None
    except _StopAll as stop:
        raise stop.reason from None
    finally:
        if sweeps:
            _tidy_sweeps()
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error:
            os.environ["HYDRA_FULL_ERROR"] = full_error
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


def _one_line(error: Exception, stage: str, overrides: Sequence[str]) -> ConfigError:
    """Hydra's and OmegaConf's errors in our form."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import MissingMandatoryValue

    text = str(error)
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        return ConfigError(
            f"the override {error.override} cannot be read; quote its value: " + _word(key, value)
        )
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = match.groups()
        return ConfigError(
            f"{key}={value} could be a sweep, a list or a text; write -m for a sweep, "
            f"'{key}=[{value}]' for a list, or {_word(key, value)} for a text"
        )
    if match := re.search(r"You must specify '([\w/]+)'", text):
        group = match[1]
        return ConfigError(
            f"{stage} needs a {group}: pass {group}=NAME, one of {', '.join(_options(group))}"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = [str(option) for option in (error.options or _options(group))]
        return ConfigError(
            f"there is no {group or 'config'} {name!r}; the nearest are "
            f"{', '.join(nearest(name, options))}, and all are {', '.join(options)}"
            + (
                "; model=torchvision model.name=NAME takes any of torchvision's"
                * (group == "model")
            )
        )
    if match := re.search(r"Could not override '([^']+)'", text):
        return _no_key(match[1], stage, overrides)
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{stage} needs {error.full_key}: pass {error.full_key}=VALUE")
    return ConfigError("; ".join(line.strip() for line in text.splitlines() if line.strip()))


def _no_key(key: str, stage: str, overrides: Sequence[str]) -> ConfigError:
    error = unknown_key(key, _known_keys(stage, overrides))
    group, _, name = key.partition(".")
    if group in _defaults(stage) and name:
        having = [option for option in _options(group) if name in _document(f"{group}/{option}")]
        if having:
            return ConfigError(f"{error}; {key} belongs to {group}={'|'.join(having)}")
        if group == "model":
            return ConfigError(f"{error}; an argument of a model of your own is new: +{key}=...")
    return error


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def _known_keys(stage: str, overrides: Sequence[str]) -> list[str]:
    """Every key of a stage, with the groups that were chosen."""
    import hydra
    from omegaconf import DictConfig, OmegaConf

    groups = _defaults(stage)
    chosen = [word.split(",")[0] for word in overrides if word.split("=")[0] in groups]
    given = {word.split("=")[0] for word in chosen}
    absent = [] if "experiment" in given else [g for g, o in groups.items() if o == "???"]
    chosen += [f"~{group}" for group in absent if group not in given]
    with hydra.initialize_config_dir(str(conf_dir()), version_base=None):
        config = hydra.compose(stage, chosen)

    def flat(node: DictConfig, prefix: str) -> Iterator[str]:
        for key in map(str, node):
            yield f"{prefix}{key}"
            if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node[key]):
                yield from flat(node[key], f"{prefix}{key}.")

    return [*groups, *flat(config, "")]


# --------------------------------------------------------------------------- config -> call


def _call_stage(stage: str, config: Any) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _one_line(error, stage, ()) from None
    assert isinstance(values, dict)
    values = {str(key): value for key, value in values.items()}
    values.pop("experiment", None)
    known = {*_keys(stage), *_defaults(stage)}
    if strange := [str(key) for key in values if key not in known]:
        raise unknown_key(strange[0], sorted(known))
    for key in ("embeddings", "out", "path"):
        if isinstance(values.get(key), str):
            values[key] = os.path.expanduser(values[key])
    globals()[f"_stage_{stage}"](values)


def _typed() -> list[str]:
    """The overrides of this job, as they went to Hydra."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def _choice(group: str) -> str:
    from hydra.core.hydra_config import HydraConfig

    return str(HydraConfig.get().runtime.choices[group])


def _stage_extract(values: dict[str, Any]) -> None:
    path = _extract(values)
    _next(f"project projection=umap {_word('embeddings', path)}")


def _extract(values: dict[str, Any]) -> Path:
    from embedx.extract import extract

    settings = dict(values)
    model, data = settings.pop("model"), settings.pop("data")
    out, name = settings.pop("out"), settings.pop("name")
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
    return extract(build_model(), source, out=folder, config=values, **settings).path


def _run_name(values: Mapping[str, Any]) -> str:
    """``<model>-<data>``, and a hash where any setting that decides the rows is not the default."""
    import hydra
    from omegaconf import OmegaConf

    from embedx.extract import ROW_SETTINGS

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
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return f"{name}-{digest[:6]}"


def _folder_name(name: str) -> str:
    """A name as one folder: what file systems or TensorBoard refuse is written ``_xNN_``."""

    def escaped(match: re.Match[str]) -> str:
        return f"_x{ord(match[0]):02x}_"

    return re.sub(r"[^\w.-]|^\.", escaped, name)


def _stage_project(values: dict[str, Any]) -> None:
    _project(values)
    _next(f"view {_word('embeddings', values['embeddings'])}")


def _project(values: dict[str, Any]) -> "Projection":
    from embedx.project import project

    settings = dict(values)
    node = settings.pop("projection")
    method = _node(node, "projection", bind=False)
    parameters = {key: value for key, value in node.items() if key != "_target_"}
    return project(method=method, **settings, **parameters)


def _stage_evaluate(values: dict[str, Any]) -> None:
    from embedx.evaluate import evaluate

    evaluate(**values)
    _next(f"view {_word('embeddings', values['embeddings'])}")


def _stage_export(values: dict[str, Any]) -> None:
    from embedx.export import export

    named = [_word(key, values[key]) for key in ("embeddings", "out") if values[key]]
    node = values.pop("exporter")
    exporter = _node(node, "exporter", bind=False)
    options = {key: value for key, value in node.items() if key != "_target_"}
    export(exporter=exporter, **values, **options)
    _next(" ".join(["view viewer=tensorboard", *named]))


def _stage_view(values: dict[str, Any]) -> None:
    from embedx.view import view

    view(**values)
    if values["viewer"] == "map":
        _next(f"export {_word('embeddings', values['embeddings'])}")


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

    known = _options("projection")
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
        word = f"embeddings={_quote(str(path))}"
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
    _next(f"info {_word('path', path)} verify=true")
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
    if "weights" in node and node.get("checkpoint") is None:
        build = _node({**node, "weights": None}, "model")  # names and shapes need no weights
    model = build()
    layers(model, **values)
    typed = [word for word in _typed() if word.lstrip("+").startswith("model")]
    _next(shlex.join(["extract", *typed, f"layers=[{model.layer or 'penultimate'}]"]))


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
    width = max(map(len, about))
    for key, value in about.items():
        first, *rest = str(value).rstrip().split("\n")
        log.info("%-*s  %s", width, key, first)
        for line in rest:
            log.info("%-*s  %s", width, "", line)


def _stage_info(values: dict[str, Any]) -> None:
    check_arguments(info, values)
    info(**values)


def _next(command: str) -> None:
    typed = os.environ.get("EMBEDX_COMMAND", "python -m embedx")  # as scripts/embedx was called
    log.info("next: %s %s", typed, command)


def _node(node: Any, group: str, *, bind: bool = True) -> Callable[..., Any]:
    """The call that a config node with a ``_target_`` stands for, checked but not yet made."""
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        raise ConfigError(f"{group} must be one of: {', '.join(_options(group))}")
    target = _locate(node["_target_"], group)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    first: list[Any] = []
    if group == "model" and not target.__module__.startswith("embedx."):
        from embedx import models

        first, target = [target], models.own  # a factory of the user's own
    before = {"model": len(first), "projection": 1, "exporter": 3}.get(group, 0)
    check_arguments(target, arguments, positional=before, where=f"{group}.")
    return (lambda: target(*first, **arguments)) if bind else target


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
        raise ConfigError(f"{group}._target_={target} is a {type(found).__name__}, not a callable")
    return typing.cast(Callable[..., Any], found)
