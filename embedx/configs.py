"""The config files: where they lie, what they hold, and what docstrings say of their keys.

All of it is read without Hydra and without importing a stage, so that help comes at once.
"""

import ast
import hashlib
import inspect
import itertools
import json
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedx.errors import ConfigError, short


def conf_dir() -> Path:
    """The folder of config files: the checkout's, else the one packed into the wheel."""
    package = Path(__file__).resolve().parent
    if (package.parent / "pyproject.toml").is_file():  # an editable install packs a stale copy
        return package.parent / "conf"
    return package / "conf"


# What decides the rows: part of the name of a run and of the config stored in its file.
ROW_SETTINGS = (
    "model",
    "data",
    "layers",
    "pooling",
    "normalize",
    "precision",
    "dtype",
    "save_outputs",
    "thumbnails",
    "objective",
    "classes",
    "ablate",
)
_WHERE = ("name", "out", "overwrite", "embeddings")


def public_config(config: Mapping[str, Any], *, also: Sequence[str] = ()) -> str:
    """The settings that decide the rows, and ``also``, as YAML.

    Of paths there is only the last part: files travel.
    """
    import yaml

    def last_part(value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {name: last_part(inner, name) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [last_part(inner) for inner in value]
        is_path = isinstance(value, str) and (
            key in ("root", "path", "checkpoint", "classes", "--config-dir")
            or (value.startswith(("/", "~")) and key != "labels")  # a regular expression
        )
        return Path(value).name if is_path else value

    # The size of a batch decides the last bits.
    kept = dict.fromkeys((*ROW_SETTINGS, *also, "batch_size", "choices"))
    public = {key: last_part(config[key]) for key in kept if key in config}
    return yaml.safe_dump(public, sort_keys=False, allow_unicode=True)


def settings_sha256(settings: Mapping[str, Any]) -> str:
    """The SHA-256 of settings, in hex: it is the same in whatever order they stand.

    Raises:
        TypeError: They hold what JSON does not.
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_settings(text: Any) -> dict[str, Any] | None:
    """The keys and values that a YAML text of any origin holds; None if it holds none."""
    import yaml

    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    # The parser takes hours over what is long or deep; what embedx writes is neither.
    if not isinstance(text, str) or len(text) > 200_000 or _depth(text) > 50:
        return None
    try:
        # Nested aliases stand for more than any memory holds; what embedx writes has none.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            return None
        settings = yaml.safe_load(text)
    except Exception:  # the constructors of YAML raise whatever they stumble over
        return None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        return None
    return settings


def _depth(text: str) -> int:
    """How many brackets are open at once, at most."""
    steps = ((letter in "[{") - (letter in "]}") for letter in text)
    return max(itertools.accumulate(steps), default=0)


def quoted(value: str) -> str:
    """A text in the quotes that Hydra's grammar takes; ``${`` in it is no interpolation."""
    escaped = re.sub(r"\\+(?=\"|$)", lambda match: match[0] * 2, value).replace('"', '\\"')
    escaped = escaped.replace("${", "\\${")
    return f'"{escaped}"'


def override(key: str, value: Any) -> str:
    """``key=value`` as a user would type it: quoted for Hydra and for the shell, where need be."""
    return shlex.quote(f"{key}={literal(value)}")


def literal(value: Any) -> str:
    """A value as Hydra's grammar has it: ``[{at:layer4,by:zero}]``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(inner)}" for key, inner in value.items()) + "}"
    text = str(value)
    # Others could be a number, or null, to Hydra.
    is_path = "/" in text and re.fullmatch(r"[\w./:@+-]+", text, re.ASCII)
    is_name = re.fullmatch(r"[a-z]\w*", text, re.ASCII | re.IGNORECASE) and text.lower() not in (
        *("null", "true", "false", "yes", "no", "on", "off", "nan", "inf"),
    )
    is_plain = isinstance(value, (int, float)) or is_path or is_name
    return text if is_plain else quoted(text)


class Configs:
    """The config files of embedx, and those of a folder of the user's own beside them.

    Args:
        added: What ``--config-dir`` names, laid out as ``conf/`` is; None for none.

    Raises:
        ConfigError: ``added`` is no folder, or a file in it has a name that embedx has, or is no
            mapping of keys.
    """

    def __init__(self, added: str | None = None) -> None:
        self.folders = [conf_dir()]
        if added is None:
            return
        folder = Path(added).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"--config-dir {added} is not a folder; name one that holds model/NAME.yaml, "
                "data/NAME.yaml or projection/NAME.yaml"
            )
        for file in sorted(folder.rglob("*.yaml")):
            name = file.relative_to(folder)
            if (conf_dir() / name).exists():  # Hydra would take embedx's and say nothing
                raise ConfigError(f"--config-dir {added}: embedx has {name} too; rename yours")
        self.folders.append(folder)
        for file in sorted(folder.rglob("*.yaml")):
            self.document(file.relative_to(folder).with_suffix("").as_posix())

    def document(self, name: str) -> dict[str, Any]:
        """What ``name.yaml`` holds; ``extract`` is a stage, ``model/resnet18`` an option.

        Raises:
            ConfigError: The file is not there, or is not a mapping of keys.
        """
        import yaml

        for folder in self.folders:
            path = folder / f"{name}.yaml"
            if path.is_file():
                try:
                    document = yaml.safe_load(path.read_text(encoding="utf-8"))
                except OSError as error:
                    raise ConfigError(f"cannot read {path}: {error.strerror}") from None
                except Exception as error:  # the constructors of YAML raise what they stumble over
                    raise ConfigError(
                        f"{path} is not YAML: {short(' '.join(str(error).split()), most=160)}"
                    ) from None
                if not isinstance(document, dict):
                    raise ConfigError(f"{path} must hold keys and values, such as _target_: ...")
                return typing.cast(dict[str, Any], document)
        raise ConfigError(f"there is no {name}.yaml in {', '.join(map(str, self.folders))}")

    def options(self, group: str) -> list[str]:
        """The names that ``group=NAME`` takes, sorted."""
        found = {path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")}
        return sorted(found)

    def defaults(self, stage: str) -> dict[str, Any]:
        """``{group: option}`` of a stage's defaults list; ``???`` must be chosen."""
        groups: dict[str, Any] = {}
        for entry in self.document(stage)["defaults"]:
            if isinstance(entry, dict):
                groups.update({k: v for k, v in entry.items() if not k.startswith("override")})
        return groups

    def keys(self, stage: str) -> dict[str, Any]:
        """``{key: default}`` of a stage itself, without those of its groups."""
        own = self.document(stage)
        has_extraction = "_extraction" in own["defaults"]
        extraction = self.document("_extraction") if has_extraction else {}
        return {k: v for k, v in {**extraction, **own}.items() if k != "defaults"}

    def overrides(
        self, stage: str, values: Mapping[str, Any], choices: Mapping[str, str]
    ) -> list[str]:
        """The words that give a stage these values: its choices, and what is not their default.

        Args:
            stage: The stage.
            values: As composed; what they do not name is left to the defaults, and ``name``,
                ``out`` and ``overwrite``, which say where and not what, are left out.
            choices: ``{group: option}``.

        Raises:
            ConfigError: They are not values of that stage.
        """
        words = []
        for group, option in choices.items():
            if group not in self.defaults(stage) or not isinstance(option, str):
                raise ConfigError(f"{stage} has no choice {group}={option}")
            if not isinstance(values.get(group), Mapping):
                raise ConfigError(f"{group} must be keys and values, not {values.get(group)!r}")
            for key in values[group]:
                if not re.fullmatch(r"[A-Za-z_]\w*", str(key), re.ASCII):
                    raise ConfigError(f"{key!r} is no key of {group}")
            words.append(override(group, option))
            is_there = option in self.options(group)
            usual = self.document(f"{group}/{option}") if is_there else {}
            # Of an option that is not here it cannot be known which keys it has.
            new = "+" if is_there else "++"
            words += [
                override(f"{'' if key in usual else new}{group}.{key}", value)
                for key, value in values[group].items()
                if key not in usual or usual[key] != value
            ]
        usual = self.keys(stage)
        words += [
            override(key, values[key])
            for key in usual
            if key in values and values[key] != usual[key] and key not in _WHERE
        ]
        return words

    def explained(self, stage: str) -> dict[str, str]:
        """``{key: what it means}`` of a stage's own keys, from the docstring of its function."""
        keys = self.keys(stage)
        about: dict[str, str] = {}
        if "name" in keys:
            about["name"] = NAME_KEY
        for module, function in _functions(stage, has_extraction="name" in keys):
            found = argument_docs(module, function)
            about.update({k: v for k, v in found.items() if k in keys and k not in about})
        return about

    def explained_option(self, group: str, option: str) -> dict[str, str]:
        """``{key: what it means}`` of ``group=option``; empty for a function of the user's own."""
        node = self.document(f"{group}/{option}")
        # A network of the user's own goes through ours, which has the keys.
        is_own = group == "model" and node.get("_target_") == "???"
        target = "embedx.models.own" if is_own else str(node.get("_target_"))
        if not target.startswith("embedx."):
            return {}
        found = argument_docs(*target.split(".")[1:])
        return {key: about for key, about in found.items() if key in node}


NAME_KEY = (
    "the run is kept in outputs/NAME; <model>-<data> where not given, plus a hash of the "
    "settings that are not the default"
)


def function_of(stage: str) -> tuple[str, str]:
    """The module and the name of the function that a stage calls."""
    if stage == "neighbors":  # its module would be the part that finds them
        return "search", "search"
    return "stages" if stage == "run" else stage, stage


def _functions(stage: str, *, has_extraction: bool) -> list[tuple[str, str]]:
    own = function_of(stage)
    return [own, ("extract", "extract")] if has_extraction and stage != "extract" else [own]


def argument_docs(module: str, function: str) -> dict[str, str]:
    """The arguments of a function of embedx with what its docstring says of them.

    The source is read, not imported: that would take seconds where torch is needed.
    """
    path = Path(__file__).with_name(f"{module}.py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)
    text = inspect.cleandoc(ast.get_docstring(found) or "")
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.S | re.M)
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return {key: " ".join(without_markup(about).split()) for key, about in entries}


ROLE = r":\w+:`~?([^`]+)`"  # of reStructuredText, such as :func:`open`


def without_markup(about: str) -> str:
    """A docstring's text as a terminal shows it."""
    return re.sub(ROLE, r"\1", about).replace("``", "").replace("None", "null")
