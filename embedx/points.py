"""Capture points: which tensor of which layer is meant, and where it lies in what the layer gives.

A point is written ``NAME[@CALL][:WHAT[.PATH]]``: ``layer4``, ``layer1.0.relu@1`` (its second call
in a pass), ``fc:input``, ``encoder:output.0``, ``layer4:grad`` (the gradient at its output),
``fc:badge`` (that of a loss at its weight).
"""

import copy
import dataclasses
import fnmatch
import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embedx.errors import LayerError, nearest

_POINT = re.compile(r"(?P<layer>[^@:]+)(@(?P<call>\d+))?(:(?P<what>[a-z_]+)(\.(?P<path>.+))?)?")
_GRADIENTS = ("grad", "grad_input")
_WHATS = ("output", "input", *_GRADIENTS, "badge")


@dataclasses.dataclass(frozen=True)
class Point:
    """One capture point.

    Attributes:
        layer: Dotted name in ``named_modules()``.
        call: Which call within a pass, from 0; None for a layer that runs once a pass.
        what: ``output``, ``input``, ``grad`` (the gradient at the output), ``grad_input``, or
            ``badge`` (the gradient of a loss at the weight of the last layer, see
            :func:`~embedx.hooks._badge`).
        path: Way into a structured value: positions, keys or attribute names.
    """

    layer: str
    call: int | None = None
    what: str = "output"
    path: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The shortest text that :func:`parse_point` reads as this point."""
        call = "" if self.call is None else f"@{self.call}"
        path = "".join(f".{part}" for part in self.path)
        what = f":{self.what}{path}" if self.what != "output" or path else ""
        return f"{self.layer}{call}{what}"

    @property
    def is_gradient(self) -> bool:
        """Whether it takes a backward pass."""
        return self.what in _GRADIENTS

    @property
    def is_at_input(self) -> bool:
        """Whether it lies where the layer begins, and not where it ends."""
        return self.what in ("input", "grad_input")


def parse_point(text: str) -> Point:
    """Read a capture point.

    Args:
        text: ``NAME[@CALL][:WHAT[.PATH]]``.

    Raises:
        LayerError: The text is not of that form.
    """
    if not isinstance(text, str):
        raise LayerError(f"layer {text!r} is a number; quote it: layers=\"['{text}']\"")
    match = _POINT.fullmatch(text.strip())
    if match is None:
        raise LayerError(f"layer {text!r} is not of the form NAME[@CALL][:WHAT[.PATH]]")
    what = match["what"] or "output"
    if what not in _WHATS:
        raise LayerError(
            f"layer {text!r}: {what!r} cannot be captured; choose one of {', '.join(_WHATS)}"
        )
    return Point(
        layer=match["layer"],
        call=int(match["call"]) if match["call"] else None,
        what=what,
        path=tuple(match["path"].split(".")) if match["path"] else (),
    )


def find_penultimate(module: nn.Module) -> Point:
    """What enters the head: the input of the last ``Linear`` or 1x1 ``Conv2d``, as registered.

    Raises:
        LayerError: The module has neither.
    """
    head = None
    for name, child in module.named_modules():
        if name and (
            isinstance(child, nn.Linear)
            or (isinstance(child, nn.Conv2d) and child.kernel_size == (1, 1))
        ):
            head = name
    if head is None:
        raise LayerError(
            f"{type(module).__name__} has no Linear or 1x1 Conv2d head, so it has no penultimate "
            "layer; name one with layers=NAME, see: python -m embedx layers model=..."
        )
    return Point(head, what="input")


def resolve_points(
    module: nn.Module,
    layers: str | Sequence[str],
    *,
    penultimate: str | None = None,
    title: str | None = None,
) -> list[Point]:
    """Names, globs and ``penultimate`` as capture points of a module.

    Args:
        module: The model.
        layers: One point or several; ``layer?.*.conv1`` stands for every layer it matches.
        penultimate: The point that ``penultimate`` means; found by :func:`find_penultimate`
            where it is not given.
        title: What the user calls the model, for the message.

    Returns:
        The points in the order asked for, each once.

    Raises:
        LayerError: A layer is not there; the message has the nearest names.
    """
    require_hookable(module)
    names = [name for name, _ in module.named_modules() if name]
    points: dict[Point, None] = {}
    asked = [layers] if isinstance(layers, str) else list(layers)
    if not asked:
        raise LayerError("layers is empty; name at least one, such as layers=penultimate")
    for text in asked:
        if isinstance(text, str) and re.fullmatch(r"penultimate(:grad)?", text.strip()):
            found = parse_point(penultimate) if penultimate else find_penultimate(module)
            if text.strip() != "penultimate":
                what = "grad_input" if found.is_at_input else "grad"
                found = dataclasses.replace(found, what=what)
            matches = [found]
            if found.layer not in names:
                raise _no_such_layer(module, found.layer, names, title)
        else:
            point = parse_point(text)
            _require_one_reading(text.strip(), point, names)
            if point.layer in names:
                matches = [point]
            else:
                matches = [
                    dataclasses.replace(point, layer=name)
                    for name in names
                    if fnmatch.fnmatchcase(name, point.layer)
                ]
            if not matches:
                raise _no_such_layer(module, point.layer, names, title)
        points.update(dict.fromkeys(matches))
    name, count = Counter(point.name for point in points).most_common(1)[0]
    if count > 1:
        raise LayerError(f"{name} is the name of a layer and a call of another; rename the layer")
    return list(points)


def _require_one_reading(text: str, point: Point, names: Sequence[str]) -> None:
    """Refuse a point in which a layer's own name holds an ``@`` or ``:``, as those in a dict may.

    Raises:
        LayerError: There is a layer of the longer name.
    """
    for name in names:
        if len(name) > len(point.layer) and f"{text}:".startswith((f"{name}:", f"{name}@")):
            raise LayerError(
                f"layer {text!r} may be the layer {name!r} or a part of {point.layer!r}; rename "
                f"the one, or reach it by a glob: {re.sub('[@:]', '?', name)}"
            )


def require_hookable(module: nn.Module) -> None:
    """Refuse a model of which a part takes no hooks, or runs several copies at once.

    Raises:
        LayerError: It has such a part.
    """
    for name, child in module.named_modules():
        where = f"{type(module).__name__}.{name}" if name else "the model"
        if isinstance(child, nn.DataParallel):
            raise LayerError(
                f"{where} is a DataParallel, whose copies run at once and in no order; capture on "
                "the network in it: model.module"
            )
        if isinstance(child, torch.jit.ScriptModule):
            raise LayerError(
                f"{where} is TorchScript, whose layers take no hooks; give the nn.Module that it "
                "was made from"
            )


def _no_such_layer(
    module: nn.Module, layer: str, names: Sequence[str], title: str | None
) -> LayerError:
    how = (
        f"python -m embedx layers model={title}"
        if title
        else "[name for name, _ in model.named_modules()]"
    )
    return LayerError(
        f"{type(module).__name__} has no layer {layer!r}; the nearest of its {len(names)} layers "
        f"are {', '.join(nearest(layer, names))}; list them with: {how}"
    )


def argument_at(
    point: Point, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The argument that a point at an input means.

    Args:
        point: The point.
        module: The layer.
        args: What the layer is called with by position.
        kwargs: The same by name.

    Raises:
        LayerError: It has no such argument, or which one is the first is not known.
    """
    key = _input_key(point, module, args, kwargs)
    return args[key] if isinstance(key, int) else kwargs[key]


def _input_key(
    point: Point, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | str:
    key = point.path[0] if point.path else None
    if key is None:
        if args:
            return 0
        # The first as the layer has them, not as they were written at the call.
        named = inspect.signature(module.forward).parameters if len(kwargs) > 1 else kwargs
        first = next((name for name in named if name in kwargs), None)
        if first is not None:
            return first
    elif key in kwargs:
        return key
    elif key.isdigit() and int(key) < len(args):
        return int(key)
    choices = [*map(str, range(len(args))), *kwargs]
    what = f"has no input {key or 'at all'}"
    if kwargs and key is None:
        what = "is called by keywords, and which is the first is not known"
    raise LayerError(
        f"{point.layer} {what}; choose from: "
        + (", ".join(f"{point.layer}:input.{choice}" for choice in choices) or "none")
    )


def tensor_at(point: Point, value: Any) -> Tensor:
    """The tensor that a point means, in what enters (the one argument) or leaves its layer.

    Raises:
        LayerError: The way into it ends, or what is there is no tensor.
    """
    path = point.path[1:] if point.is_at_input else point.path
    for depth, key in enumerate(path):
        value = _step(value, key, point, ".".join(path[:depth]))
    if not isinstance(value, Tensor):
        raise LayerError(
            f"{point.name} is a {type(value).__name__}, not a tensor; choose a part of it: "
            f"{_choices(point, value)}"
        )
    return value


def with_tensor_at(
    point: Point,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensor: Tensor,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What enters a layer, with another tensor at a point of its input: ``(args, kwargs)``."""
    key = _input_key(point, module, args, kwargs)
    if isinstance(key, str):
        return args, {**kwargs, key: with_part(kwargs[key], point.path[1:], tensor)}
    now = with_part(args[key], point.path[1:], tensor)
    return tuple(now if i == key else value for i, value in enumerate(args)), kwargs


def with_part(value: Any, path: Sequence[str], tensor: Tensor) -> Any:
    """A structured value with another tensor at a path into it; the value itself is let be."""
    if not path:
        return tensor
    key, *rest = path
    if isinstance(value, Mapping):
        own = next(one for one in [key, *value] if str(one) == key and one in value)
        changed: Any = copy.copy(value)
        changed[own] = with_part(value[own], rest, tensor)
        return changed
    if hasattr(value, "_fields"):
        name = value._fields[int(key)] if key.isdigit() else key
        return value._replace(**{name: with_part(getattr(value, name), rest, tensor)})
    if isinstance(value, (tuple, list)):
        parts = [
            with_part(part, rest, tensor) if i == int(key) else part for i, part in enumerate(value)
        ]
        return type(value)(parts)
    changed = copy.copy(value)
    object.__setattr__(changed, key, with_part(getattr(value, key), rest, tensor))
    return changed


def _keys(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [str(key) for key in value]
    if hasattr(value, "_fields"):
        return list(value._fields)
    if isinstance(value, (tuple, list)):
        return [str(i) for i in range(len(value))]
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return []


def _choices(point: Point, value: Any) -> str:
    stem = dataclasses.replace(point, path=()).name.removesuffix(f":{point.what}")
    path = "".join(f".{part}" for part in point.path)
    keys = _keys(value)
    return ", ".join(f"{stem}:{point.what}{path}.{key}" for key in keys) or "it has none"


def _step(value: Any, key: str, point: Point, where: str) -> Any:
    if isinstance(value, Mapping):
        for own in [key, *value]:  # a number is offered, and written, as a text
            if str(own) == key and own in value:
                return value[own]
    if isinstance(value, (tuple, list)) and key.isdigit() and int(key) < len(value):
        return value[int(key)]
    if key in _keys(value):
        return getattr(value, key)
    raise LayerError(
        f"{point.name}: the {point.what}{'.' + where if where else ''} of {point.layer} is a "
        f"{type(value).__name__} without {key!r}; it has: {', '.join(_keys(value)) or 'no parts'}"
    )
