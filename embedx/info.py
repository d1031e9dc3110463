"""What is in a file, and the command that makes it again."""

import contextlib
import json
import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedx import jobs
from embedx.configs import override, read_settings
from embedx.errors import ConfigError, StoreError

log = logging.getLogger("embedx")

UNSAID = "the file does not say how it was made"


def info(*, path: str, verify: bool) -> None:
    """Say what is in a file.

    Args:
        path: A file of embeddings, of a projection or of maps, or the folder of a run or of an
            explanation.
        verify: Check every row against its checksum; projections and maps have one of the whole.

    Raises:
        StoreError: It is not a file of embedx, or rows do not match their checksum.
    """
    from embedx.derived import describe

    about = describe(path, verify=verify)
    path = about["file"]
    # The parameters stand there one by one; and a file may not speak in our name.
    others = {k: v for k, v in about.items() if k not in ("file", "again", "settings", "runs code")}
    settings = read_settings(about.get("config")) or {}
    code = ", ".join(dict.fromkeys(foreign_code(settings)))
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
    from embedx import layout
    from embedx.ready_made import MODEL

    is_projection = attrs.get("format") == layout.PROJECTION_FORMAT
    if not is_projection and attrs.get("model") == MODEL:
        return "copied of embeddings that were made elsewhere"
    stage = "explain" if attrs.get("format") == layout.MAPS_FORMAT else "extract"
    try:
        words = _project_again(path, attrs) if is_projection else _made_again(stage, path, attrs)
    except (ConfigError, RecursionError):
        return UNSAID
    if isinstance(words, str):
        return words
    command = jobs.command(*words)
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
    function = settings.pop("function", f"embedx.methods.{method}")
    if not all(isinstance(name, str) for name in (method, layer, function)):
        raise ConfigError("the settings name no method or layer")
    configs = jobs.configs()
    options = configs.options("projection")
    targets = {str(configs.document(f"projection/{o}").get("_target_")): o for o in options}
    if function not in targets:
        return f"made from Python, by embedx.project with {function}"
    own = {key: settings.pop(key) for key in configs.keys("project") if key in settings}
    parent = path.parent.parent / store.EMBEDDINGS_NAME
    elsewhere = f"made of embeddings that are not beside it, id {attrs['parent'][:12]}"
    try:
        if not (store.are_there(parent) and store.open(parent).is_parent_of(attrs)):
            return elsewhere
    except StoreError:  # another file's damage
        return elsewhere
    for key in ("transform_from", "align_to"):  # the file knows the other map by its id
        if key in own:
            other = _projection_by_id(path.parent, own[key])
            if other is None:
                return f"made with {key}=a map that is not beside it, id {str(own[key])[:12]}"
            own[key] = str(other)
    if "transform_from" in own:
        words = configs.overrides("project", own, {})
    else:
        values = {"projection": settings, "layer": layer, **own}
        words = configs.overrides("project", values, {"projection": targets[function]})
    mine = map(shlex.quote, jobs.config_dir_words())
    return ["project", *mine, *words, override("embeddings", parent)]


def _made_again(stage: str, path: Path, attrs: Mapping[str, Any]) -> str | list[str]:
    config = recorded(path, attrs)
    if config is None:
        raise ConfigError("the config is not YAML")
    if "choices" not in config:
        return f"made from Python, by embedx.{stage}"
    if stage == "explain" and "method" not in config:
        return f"made by {stage}, with the settings of a config.yaml that is not beside it"
    choices = config.pop("choices")
    if not isinstance(choices, dict) or not {"model", "data"} <= choices.keys():
        raise ConfigError("the config names no model or data")
    added = choices.pop("--config-dir", None)
    if not isinstance(added, str | None):
        raise ConfigError("--config-dir is no path")
    # A folder that a file names is not looked into: it may be the whole disk.
    words = jobs.configs().overrides(stage, config, choices)
    flags = [] if added is None else ["--config-dir", shlex.quote(added)]
    return [stage, *flags, *words, override("out", path.parent)]


def _projection_by_id(folder: Path, file_id: Any) -> Path | None:
    """The projection of a run beside ``folder``'s, or in it, that has this id."""
    from embedx import derived

    for path in [*sorted(folder.glob("*.h5")), *sorted(folder.glob("../../*/projections/*.h5"))]:
        with contextlib.suppress(StoreError):
            if derived.open_projection(path).attrs.get("id") == file_id:
                return Path(os.path.normpath(path))
    return None


def recorded(path: Path, attrs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings that a file says it was made with; None if it holds none."""
    config = read_settings(attrs.get("config"))
    beside = path.with_name("config.yaml")  # it has paths whole, and may be of another file
    whole = read_settings(beside.read_bytes()) if beside.is_file() else None
    is_same = config is not None and whole is not None and whole.get("id") == attrs["id"]
    return whole if is_same and "choices" in (config or {}) else config


def foreign_code(value: Any) -> list[str]:
    """What ``_target_`` names in settings from a file, where it is not embedx's own."""
    if isinstance(value, dict):
        target = value.get("_target_")
        own = [target] if isinstance(target, str) and not target.startswith("embedx.") else []
        return own + [name for inner in value.values() for name in foreign_code(inner)]
    if isinstance(value, list):
        return [name for inner in value for name in foreign_code(inner)]
    return []
