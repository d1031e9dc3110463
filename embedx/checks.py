"""The arguments of stages against their type hints, strictly and in one line; exact numbers."""

import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from embedx.errors import ConfigError, DataError, nearest, short

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check every call of a public function as :func:`check_arguments` does."""
    by_position = [
        name
        for name, parameter in signature_of(function).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        values = dict(zip(by_position, args, strict=False))
        if len(args) > len(by_position):
            raise ConfigError(
                f"{function.__name__} takes {', '.join(by_position)} without a name, and it was "
                f"given {len(args)} values so; name the others: KEY=VALUE"
            )
        if twice := sorted(values.keys() & kwargs.keys()):
            raise ConfigError(f"{function.__name__} was given {twice[0]} twice; give it once")
        check_arguments(function, {**values, **kwargs})
        return function(*args, **kwargs)

    return call


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The arguments that a function takes.

    Raises:
        ConfigError: Python cannot tell, as of some that are written in C.
    """
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        raise ConfigError(
            f"{_name(function)} does not say which arguments it takes; wrap it in a function of "
            "your own that does"
        ) from None


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
    signature = signature_of(function)
    parameters = signature.parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = _named(function, positional)
    for key, value in values.items():
        if key in named:
            check_argument(f"{where}{key}", value, parameters[key].annotation)
        elif not takes_any:
            raise unknown_key(f"{where}{key}", [f"{where}{name}" for name in named])
    try:
        signature.bind(*[None] * positional, **values)
    except TypeError as error:
        raise ConfigError(f"{_name(function)}: {error}") from None


def refuse_taken(
    stage: Callable[..., Any],
    *,
    plugin: Callable[..., Any],
    given: Iterable[str],
    positional: int,
    where: str,
    also: Sequence[str] = (),
) -> None:
    """Refuse a plugin's parameter that has the name of one of the stage that calls it.

    A stage takes both side by side, ``project(run, method=f, layer="fc", k=3)``: it would keep such
    a value to itself, and the plugin would get its default.

    Args:
        stage: The function that will call the plugin.
        plugin: A function of the user's own.
        given: Names of what it will be called with.
        positional: How many arguments will come before them.
        where: Prefix of the names, for the message.
        also: More names that the stage has use for.

    Raises:
        ConfigError: Names the first of them.
    """
    own = _named(stage)
    for name in [*_named(plugin, positional), *given]:
        if name in own or name in also:
            raise ConfigError(
                f"{where}{name} cannot be passed on: {stage.__name__} has {name!r} for itself; "
                f"give that parameter of {_name(plugin)} another name"
            )


def _named(function: Callable[..., Any], positional: int = 0) -> list[str]:
    """The parameters after the first ones that can be given by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(signature_of(function).parameters.values())[positional:]
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def unknown_key(key: str, known: Sequence[str]) -> ConfigError:
    """The error for a key that is not there, with the nearest ones."""
    if not known:
        return ConfigError(f"there is no key {key!r}, and none at all can be given here")
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
        shown = repr(value) if isinstance(value, (str, int, float, list, dict)) else kind_of(value)
        if isinstance(value, bool):
            shown = str(value).lower()
        raise ConfigError(
            f"{key} must be {_in_words(hint)}, not {short(shown)}{_suggestion(hint, value)}"
        ) from None


def kind_of(value: Any) -> str:
    """The type of a value in words: ``a dict``, ``an int``, ``null``."""
    return "null" if value is None else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeio' else 'a'} {name}"


WORDS = {
    Any: "a value",
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
        one = without_article(_in_words(parts[0]))
        return f"a list of {one if one.endswith('s') else one + 's'}"
    if origin is Callable:
        return "a function"
    name = getattr(hint, "__name__", str(hint))
    if name == "ndarray":
        return "an array"
    return WORDS.get(origin or hint, _with_article(name))


def without_article(words: str) -> str:
    return words.removeprefix("a ").removeprefix("an ")


def _suggestion(hint: Any, value: Any) -> str:
    literals = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if literals and isinstance(value, str):
        return f"; the nearest is {nearest(value, literals, n=1)[0]}"
    if isinstance(value, str) and "a list of texts" in _in_words(hint):
        return f"; write a list: [{value}]"
    if isinstance(value, Mapping) and "a list of" in _in_words(hint):
        return "; write a list of it: [{...}]"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and "a text" in _in_words(hint):
        return f"; a number that is a text is quoted: '\"{value}\"'"
    return ""


def require_exact(column: Iterable[Any], *, what: str) -> None:
    """Refuse whole numbers that NumPy would round to make floats of all numbers of a list.

    Args:
        column: Numbers of which ``np.asarray`` makes floats.
        what: What they are, for the message.

    Raises:
        DataError: One would be another number.
    """
    for value in column:
        if isinstance(value, numbers.Integral) and int(float(value)) != value:
            raise DataError(
                f"{what} holds {value}, which among the others becomes the float "
                f"{int(float(value))}; give numbers that one column of int64 or of float64 holds"
            )


def require_unmasked(value: Any) -> None:
    """Refuse an array whose values are in part masked, which would count as any others.

    Raises:
        DataError: It is one.
    """
    import numpy as np

    if np.ma.is_masked(value):
        raise DataError("a masked array has values that do not count; give data.filled(VALUE)")
