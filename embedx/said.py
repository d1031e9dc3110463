"""What is said to the user: lines on a terminal, mistakes, and errors of others in our words."""

import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence

from embedx.checks import unknown_key
from embedx.configs import Configs, override
from embedx.errors import ConfigError, EmbedxError, StoreError, missing_extra, nearest

log = logging.getLogger("embedx")
NOTE_LINES = 12
_LAUNCHERS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}


def quiet() -> None:
    """Our own lines go to stdout; warnings of libraries do not reach the user."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold anything
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions and not os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter("ignore")
    if not log.handlers:
        handler = Lines()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def print_no_more() -> None:
    """The reader of a pipe, such as head, has read enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Lines(logging.Handler):
    """Log lines that leave a progress bar whole."""

    def emit(self, record: logging.LogRecord) -> None:
        line = legible(self.format(record))
        if sys.stderr.isatty() and "tqdm" in sys.modules:
            sys.modules["tqdm"].tqdm.write(line, file=sys.stdout)
        else:
            try:
                # One write: the lines of jobs side by side come whole.
                print(f"{line}\n", end="", flush=True)
            except BrokenPipeError:  # the work goes on
                print_no_more()


def legible(line: str) -> str:
    """One line without what drives a terminal: it may hold text from data."""
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", "?", line)
    return line.encode("utf-8", "backslashreplace").decode()


def print_error(error: BaseException) -> None:
    for note in getattr(error, "__notes__", []):
        lines = note.split("\n")
        for line in lines[:NOTE_LINES]:
            print(legible(line), file=sys.stderr)
        if len(lines) > NOTE_LINES:
            print(f"... and {len(lines) - NOTE_LINES} more", file=sys.stderr)
    print(legible(f"{type(error).__name__}: {error}"), file=sys.stderr)


def in_our_words(error: Exception) -> EmbedxError:
    """A user's mistake as an error of ours; anything else is a bug, and raised as it is."""
    if isinstance(error, EmbedxError):
        return error
    if isinstance(error, OSError):
        return unusable(error)
    raise error


def unusable(error: OSError) -> EmbedxError:
    """A path that the operating system refuses, in our words; any other OSError is a bug."""
    if error.filename is None or isinstance(error, BrokenPipeError):
        raise error
    return StoreError(f"cannot use {error.filename}: {error.strerror}; check path and rights")


def one_line(
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
