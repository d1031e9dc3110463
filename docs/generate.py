"""Pages that are made of the code: a page a stage, and the table of models.

What they say stands in signatures, docstrings and ``conf/``, and nowhere else, so that no page can
say something else than the program does.
"""

import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torchvision

import embedx
from embedx import cli, models
from embedx.checks import WORDS, without_article
from embedx.configs import ROLE, Configs, conf_dir, function_of

CONFIGS = Configs()


def write(folder: Path) -> None:
    """Write every generated page into a folder, and leave one that is up to date untouched."""
    folder.mkdir(exist_ok=True)
    pages = {**{stage: stage_page(stage) for stage in cli.STAGES}, "models": models_page()}
    for file in folder.glob("*.md"):
        if file.stem not in pages:
            file.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


# --------------------------------------------------------------------------- a stage


def stage_page(stage: str) -> str:
    """A stage with all its keys."""
    function = stage_function(stage)
    summary, raises = docstring(function)
    parts = [f"# {stage}", summary]
    parts.append(f"```text\npython -m embedx {stage} [KEY=VALUE ...] [FLAGS]\n```")
    parts.append("## Keys")
    parts.append(table(("key", "takes", "default", "meaning"), own_keys(stage)))
    for group, chosen in CONFIGS.defaults(stage).items():
        parts += group_section(group, chosen)
    if raises:
        parts.append("## Errors")
        parts.append("\n".join(f"- `{name}`: {prose(when)}" for name, when in raises))
        parts.append("[What to do about them](../errors.md).")
    if (name := function_of(stage)[1]) in embedx.__all__:
        parts.append(f"From Python: {{py:func}}`embedx.{name}`.")
    return "\n\n".join(parts) + "\n"


def stage_function(stage: str) -> Callable[..., Any]:
    """What the command line calls for a stage."""
    module, name = function_of(stage)
    return locate(f"embedx.{module}.{name}")


def own_keys(stage: str) -> list[tuple[str, ...]]:
    """A row of the table for each key of a stage that is in no group."""
    hints = hints_of(stage_function(stage))
    keys = CONFIGS.keys(stage)
    if "name" in keys:
        hints = {**hints_of(embedx.extract), **hints, "name": str | None}
    about = CONFIGS.explained(stage)
    return [
        (
            code(key),
            taken(hints[key]),
            "the newest run" if cli._WORKS_ON.get(stage) == key else shown(default),
            plain(about[key]),
        )
        for key, default in keys.items()
    ]


def group_section(group: str, chosen: Any) -> list[str]:
    """The choices of a group, and the keys that each has: a table for each function."""
    options = CONFIGS.options(group)
    default = "" if chosen in (None, "???") else f"; by default {code(chosen)}"
    parts = [f"## {code(group + '=')}", f"One of {', '.join(map(code, options))}{default}."]
    if group == "model":
        parts.append("[Which is which](models.md).")
    if group == "experiment":
        parts.append("A set of values for the keys above, which the command line may still change.")
        return parts
    functions: dict[str, list[str]] = {}
    for option in options:
        target = str(CONFIGS.document(f"{group}/{option}")["_target_"])
        functions.setdefault("embedx.models.own" if target == "???" else target, []).append(option)
    for target, having in functions.items():
        about = comment(conf_dir() / group / f"{having[0]}.yaml") if len(having) == 1 else []
        if rows := option_keys(group, target, having):
            parts.append(f"### {', '.join(map(code, having))}")
            parts.append("\\\n".join(map(plain, about)))
            parts.append(table(("key", "takes", "default", "meaning"), rows))
    return [part for part in parts if part]


def option_keys(group: str, target: str, options: list[str]) -> list[tuple[str, ...]]:
    """A row of the table for each key of the options that one function serves."""
    hints = hints_of(locate(target))
    nodes = [CONFIGS.document(f"{group}/{option}") for option in options]
    rows = []
    for key, about in CONFIGS.explained_option(group, options[0]).items():
        defaults = [node[key] for node in nodes]
        same = all(default == defaults[0] for default in defaults)
        default = shown(defaults[0]) if same else "its own"
        rows.append((code(f"{group}.{key}"), taken(hints[key]), default, plain(about)))
    return rows


# --------------------------------------------------------------------------- models


def models_page() -> str:
    """The table of models, from their files."""
    rows = []
    for name in CONFIGS.options("model"):
        node = CONFIGS.document(f"model/{name}")
        layer = node.get("layer")
        takes = "texts" if "max_length" in node else input_px(node)
        rows.append(
            (
                code(name),
                code(layer) if layer else "found",
                "its&nbsp;own"
                if takes is None
                else takes
                if takes == "texts"
                else f"{takes}&nbsp;px",
                "<br>".join(map(plain, comment(conf_dir() / "model" / f"{name}.yaml"))),
            )
        )
    heads = ("model", "penultimate layer", "input", "")
    return "\n\n".join(["# All models", table(heads, rows)]) + "\n"


def input_px(node: Mapping[str, Any]) -> int | None:
    """Side in px of the square that enters, where the file or the weights fix it."""
    if node.get("input_size") is not None or node["name"] in (None, "???"):
        return typing.cast(int | None, node.get("input_size"))
    if node["name"] in models._LITE_SIZES_PX:
        return models._LITE_SIZES_PX[node["name"]]
    recipe = torchvision.models.get_model_weights(node["name"]).DEFAULT.transforms()
    side: int = recipe.crop_size[0]
    return side


def comment(path: Path) -> list[str]:
    """The lines of the comment at the head of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.lstrip("# ") for line in lines if line.startswith("#")]


# --------------------------------------------------------------------------- words


def locate(target: str) -> Callable[..., Any]:
    """The function of a dotted name."""
    module, _, name = target.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function's parameters; some returned types are not imported."""
    return {key: p.annotation for key, p in inspect.signature(function).parameters.items()}


def taken(hint: Any) -> str:
    """A type in a user's words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(map(code, arguments))
    if origin in (typing.Union, types.UnionType):
        words = dict.fromkeys(taken(argument) for argument in arguments)
        words.pop("", None)
        return ", or ".join(words)
    if (origin or hint) is np.ndarray:
        return ""
    if word := WORDS.get(origin or hint):
        return without_article(word)
    if origin is not None:
        inner = [argument for argument in arguments if argument is not ...]
        return f"list of {taken(inner[0])}s"
    return ""  # what can only be handed over from Python


def docstring(function: Callable[..., Any]) -> tuple[str, list[tuple[str, str]]]:
    """The text of a docstring before its sections, and its errors."""
    text = inspect.getdoc(function) or ""
    before = re.split(r"^[A-Z]\w+:\n", text, maxsplit=1, flags=re.M)[0].strip()
    section = re.search(r"^Raises:\n(.*?)(?=^\S|\Z)", text, re.S | re.M)
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return prose(before), [(name, " ".join(about.split())) for name, about in entries]


def prose(text: str) -> str:
    """A docstring's reStructuredText as Markdown."""
    text = re.sub(ROLE, lambda match: code(match[1]), text)
    return text.replace("``", "`")


def plain(text: str) -> str:
    """A text without markup, but for the roles of reStructuredText, as Markdown."""
    text = re.sub(ROLE, r"\1", text)
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", text)


def code(text: Any) -> str:
    return f"`{text}`"


def shown(value: Any) -> str:
    """A default as it would be typed."""
    if value == "???":
        return "must be given"
    word = {None: "null", True: "true", False: "false"}.get(
        value if isinstance(value, (bool, type(None))) else ..., value
    )
    return code(str(word).replace("'", ""))


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *map(list, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
