"""The arguments of stages against their type hints, strictly and in one line."""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from embedx.errors import ConfigError, nearest

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check every call of a public function as :func:`check_arguments` does."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{function.__name__}: {error}; see help({function.__name__})"
            ) from None
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name in bound.arguments:
                check_argument(name, bound.arguments[name], parameter.annotation)
        return function(*args, **kwargs)

    return call


def check_arguments(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    *,
    positional: int = 0,
    where: str = "",
) -> None:
    """Refuse keys a function does not have, values that do not fit, and what is missing.

    Strictly: ``true`` is not 1, and a number is not a text.

    Args:
        function: What will be called.
        values: Its keyword arguments.
        positional: How many arguments will come before them.
        where: Prefix of the keys, for the message.

    Raises:
        ConfigError: Names the key, both values, and the nearest key.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = list(parameters)[positional:]
    for key, value in values.items():
        if key in named and parameters[key].kind is not inspect.Parameter.VAR_KEYWORD:
            check_argument(f"{where}{key}", value, parameters[key].annotation)
        elif not takes_any:
            raise unknown_key(f"{where}{key}", [f"{where}{name}" for name in named])
    try:
        inspect.signature(function).bind(*[None] * positional, **values)
    except TypeError as error:
        raise ConfigError(f"{function.__module__}.{function.__name__}: {error}") from None


def unknown_key(key: str, known: Sequence[str]) -> ConfigError:
    """The error for a key that is not there, with the nearest ones."""
    return ConfigError(f"there is no key {key!r}; the nearest are {', '.join(nearest(key, known))}")


def check_argument(key: str, value: Any, hint: Any) -> None:
    """Refuse a value that does not fit a type hint.

    Raises:
        ConfigError: Names the key, what it takes, and what was given.
    """
    if hint is inspect.Parameter.empty or isinstance(hint, str):
        return  # a function of the user's own without hints
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    try:
        strict = ConfigDict(strict=True, arbitrary_types_allowed=True)
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hint, config=strict)
        except PydanticUserError:  # a model class brings a config of its own
            adapter = TypeAdapter(hint)
        adapter.validate_python(value)
    except ValidationError:
        shown = repr(value) if isinstance(value, (str, int, float, list, dict)) else _kind(value)
        if isinstance(value, bool):
            shown = str(value).lower()
        if len(shown) > 80:
            shown = shown[:77] + "..."
        raise ConfigError(
            f"{key} must be {_in_words(hint)}, not {shown}{_suggestion(hint, value)}"
        ) from None


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
    os.PathLike: "a text",
}


def _in_words(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin in (typing.Union, types.UnionType):
        words = [_in_words(part) for part in parts]
        return " or ".join(dict.fromkeys(words))
    if origin in (list, Sequence):
        return f"a list of {_in_words(parts[0]).removeprefix('a ')}s"
    if origin is Callable:
        return "a function"
    name = getattr(hint, "__name__", str(hint))
    return _WORDS.get(origin or hint, f"a {name}")


def _suggestion(hint: Any, value: Any) -> str:
    literals = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if literals and isinstance(value, str):
        return f"; the nearest is {nearest(value, literals, n=1)[0]}"
    if isinstance(value, str) and "a list of texts" in _in_words(hint):
        return f"; write a list: [{value}]"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and "a text" in _in_words(hint):
        return f"; a number that is a text is quoted: '\"{value}\"'"
    return ""
