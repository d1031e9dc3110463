"""The exceptions of embedx.

Every message is one line: what is wrong, where, and how to mend it, with both values. Lists that
are longer than a line travel as notes (``error.__notes__``)::

    EmbedxError
    ├── ConfigError      (ValueError)    an override, a config key or an argument
    ├── LayerError       (LookupError)   a capture point that is not there or did not fire
    ├── ShapeError       (ValueError)    a tensor of another shape than was asked for
    ├── ModelError       (ValueError)    weights, checkpoints, model factories
    ├── DataError        (ValueError)    a data source, or every row of it
    ├── StoreError       (OSError)       a file that is not ours, damaged, or of another run
    │   └── InUseError                   a file that another process is writing
    ├── DependencyError  (ImportError)   an extra that is not installed
    └── Interrupted      (RuntimeError)  stopped by a signal, with everything finished so far kept
"""

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path


class EmbedxError(Exception):
    """A mistake that a user can mend; shown without a traceback by the command line."""


class ConfigError(EmbedxError, ValueError):
    """An override, a config key or an argument is wrong."""


class LayerError(EmbedxError, LookupError):
    """A capture point names no layer, did not fire, or fired more than once."""


class ShapeError(EmbedxError, ValueError):
    """A tensor has another shape than the operation takes."""


class ModelError(EmbedxError, ValueError):
    """Weights, a checkpoint or a model factory cannot be used."""


class DataError(EmbedxError, ValueError):
    """A data source cannot be used, or every row of it failed."""


class StoreError(EmbedxError, OSError):
    """A file is not ours, is damaged, is in use, or belongs to another run."""


class InUseError(StoreError):
    """Another process is writing the file."""


class DependencyError(EmbedxError, ImportError):
    """A package of an optional extra is not installed."""


class Interrupted(EmbedxError, RuntimeError):
    """A signal stopped the work; everything committed so far is kept.

    Attributes:
        signal_number: The signal, for the exit status (128 + signal_number).
    """

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def missing_extra(package: str, *, extra: str, needed_for: str) -> DependencyError:
    """The error for an optional package that is not installed."""
    is_checkout = (Path(__file__).parents[1] / "pyproject.toml").is_file()
    what = f'-e ".[{extra}]"' if is_checkout else f'"embedx-torch[{extra}]"'
    return DependencyError(
        f"{needed_for} needs the package {package!r}, which is not installed; "
        f"install it with: pip install {what}"
    )


def nearest(word: str, choices: Iterable[str], *, n: int = 3) -> list[str]:
    """The ``n`` choices spelled most like ``word``, best first (all of them if fewer).

    Ranked by the similarity ratio of Ratcliff and Metzener 1988 (Python's difflib).
    """
    lowered = word.lower()
    return sorted(
        dict.fromkeys(choices),
        key=lambda choice: (
            -difflib.SequenceMatcher(None, lowered, choice.lower()).ratio(),
            choice,
        ),
    )[:n]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def short(text: str, *, most: int = 80) -> str:
    """``text`` as one line of at most ``most`` characters, ``...`` for what is cut off."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def number_of(n: int, one: str, many: str) -> str:
    """``1 point``, ``4,992 points``."""
    return f"{n:,} {one if n == 1 else many}"


def listed(names: Collection[str], *, most: int = 8) -> str:
    """The first ``most`` names in one line, and how many more there are."""
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
