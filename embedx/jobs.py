"""The job at hand as Hydra composed it: its words, its config files, and calls out of its nodes."""

import dataclasses
import functools
import importlib
import logging
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embedx.checks import check_arguments, refuse_taken
from embedx.configs import Configs
from embedx.errors import ConfigError

log = logging.getLogger("embedx")


def configs() -> Configs:
    """The config files of the job at hand, which may run in a process of its own."""
    from hydra.core.hydra_config import HydraConfig

    sources = HydraConfig.get().runtime.config_sources
    added = [source.path for source in sources if source.provider == "command-line"]
    return Configs(added[0] if added else None)


def config_dir() -> dict[str, str]:
    """``--config-dir`` and the folder, as a command has to repeat them, or nothing."""
    added = configs().folders[1:]
    return {"--config-dir": os.path.relpath(added[0])} if added else {}


def config_dir_words() -> list[str]:
    """The same as words."""
    return [word for flag in config_dir().items() for word in flag]


def typed() -> list[str]:
    """The overrides of this job, as they went to Hydra."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def choice(group: str) -> str:
    """Which option of a group of config files this job has."""
    from hydra.core.hydra_config import HydraConfig

    return str(HydraConfig.get().runtime.choices[group])


def command(*words: str) -> str:
    """A command of embedx, as the user calls it."""
    called = os.environ.get("EMBEDX_COMMAND", "python -m embedx")  # by scripts/embedx
    return " ".join([called, *words])


def say_next(words: str) -> None:
    """Say which command a user may want after this one."""
    log.info("next: %s", command(words))


# Group -> how many arguments come before those of the config file.
_GIVEN_BY_STAGE = {"projection": 1, "exporter": 3, "pooling": 1}


def call_of(node: Any, group: str, *, bind: bool = True) -> Callable[..., Any]:
    """The call that a config node with a ``_target_`` stands for, checked but not yet made.

    Args:
        node: The node.
        group: Of config files, for messages.
        bind: Whether its arguments are bound to it; else it is what is named.

    Raises:
        ConfigError: It names nothing that can be called with such arguments.
    """
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        if group == "pooling":
            raise ConfigError(f"pooling={node} has no _target_; name a function of an activation")
        options = ", ".join(configs().options(group))
        raise ConfigError(f"{group} must be one of: {options}")
    target = located(node["_target_"], group)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    if group == "model" and not is_ours(target):
        from embedx import models

        check_arguments(models.own, arguments, positional=1, where="model.")

        def build() -> Any:
            model = models.own(target, **arguments)
            if arguments.get("name") is not None:
                return model
            # Not as an argument: the factory may have a ``name`` too, and nobody gave it one.
            return dataclasses.replace(model, name=choice("model"))

        return build
    before = _GIVEN_BY_STAGE.get(group, 0)
    check_arguments(target, arguments, positional=before, where=f"{group}.")
    return (lambda: target(**arguments)) if bind else target


def is_ours(target: Callable[..., Any]) -> bool:
    """Whether it is code of embedx."""
    return target.__module__.startswith("embedx.")


def plugin_of(
    node: Any, group: str, stage: Callable[..., Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a config node names, and its parameters, to be passed on by a stage."""
    plugin = call_of(node, group, bind=False)
    given = {key: value for key, value in node.items() if key != "_target_"}
    positional = _GIVEN_BY_STAGE[group]
    refuse_taken(stage, plugin=plugin, given=given, positional=positional, where=f"{group}.")
    return plugin, given


def located(target: str, group: str) -> Callable[..., Any]:
    """What a ``_target_`` names, imported from where the user stands, or installed.

    Raises:
        ConfigError: It cannot be imported, or called.
    """
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


def pooling_of(value: Any) -> Any:
    """A name as it is, and a node with a ``_target_`` as the function it stands for."""
    if isinstance(value, list):
        return [pooling_of(one) for one in value]
    if not isinstance(value, dict):
        return value
    function = call_of(value, "pooling", bind=False)
    arguments = {key: argument for key, argument in value.items() if key != "_target_"}
    return functools.partial(function, **arguments) if arguments else function
