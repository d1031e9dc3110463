"""What layers take in or give out, copied or changed during the model's own passes.

This is the only module that registers hooks.
"""

import contextlib
import dataclasses
import itertools
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from embedx.checks import checked
from embedx.errors import LayerError, listed, short
from embedx.passes import (
    COMPILED_OFF,
    FAST_PATHS_OFF,
    EndPass,
    class_scores,
    run_model,
    same_values,
    tensors_in,
    undisturbed,
)
from embedx.points import (
    Point,
    argument_at,
    require_hookable,
    resolve_points,
    tensor_at,
    with_part,
    with_tensor_at,
)

log = logging.getLogger("embedx")

HOOKS_REVISION = 3  # raised when what a point captures changes; part of every file's id
CALLS_NAMED = 8  # of a layer that runs several times, in a message

Reduce = Callable[[Point, Tensor], Tensor]


class _NotCaptured(LayerError, KeyError):
    """As a mapping raises it, in words."""

    __str__ = Exception.__str__


@dataclasses.dataclass
class _Entry:
    """A call of a layer that has not ended yet.

    Attributes:
        number: Which one it is in the pass, from 0; a layer that calls itself has several.
        versions: How often what entered had been worked on in place, by where its numbers lie.
        copies: What entered in place of a tensor, to be differentiated at, by the name of a point.
    """

    number: int
    versions: dict[int, int]
    copies: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Entry":
        given: list[Any] = [*args, *kwargs.values()]
        for value in list(given):
            if isinstance(value, (tuple, list)):
                given += value
            elif isinstance(value, Mapping):
                given += value.values()
        tensors = [one for one in given if isinstance(one, Tensor) and not one.is_inference()]
        return cls(number, {_place(one): one._version for one in tensors})

    def passed_on(self, value: Tensor) -> bool:
        """Whether what a layer gave is what entered it, untouched, which others may take too.

        It may be a view, which has the numbers, and the count of changes, of what it is a view of.
        """
        return not value.is_inference() and self.versions.get(_place(value)) == value._version

    def holds(self, value: Tensor) -> bool:
        """Whether what a layer gave lies where what entered lies, touched or not."""
        return not value.is_inference() and _place(value) in self.versions


def _place(tensor: Tensor) -> int:
    """Where the numbers of a tensor lie; of one that has no one storage, which it is."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, nested, or within torch.func
        return id(tensor)


@dataclasses.dataclass
class _Pass:
    """What fired in the latest pass of a thread, whose beginning was seen or not.

    Attributes:
        has_begun: Whether it was.
        calls: How often each layer ran.
        entries: The calls of each layer that have not ended.
        tensors: What was captured; gradients come when they are computed.
        awaited: Where the gradient of a point will come by, in the graph.
        again: Points at which a second gradient came by.
        cut_off: Points whose gradient misses a way.
        copies: What went on in place of a tensor, to be differentiated at, that tensor, and how
            often it had been worked on in place, by the name of a point.
        scores: What layers gave of which a ``badge`` was taken, as the model has to give it too.
    """

    has_begun: bool = False
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    entries: dict[str, list[_Entry]] = dataclasses.field(default_factory=dict)
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    awaited: dict[str, Any] = dataclasses.field(default_factory=dict)
    again: set[str] = dataclasses.field(default_factory=set)
    cut_off: set[str] = dataclasses.field(default_factory=set)
    copies: dict[str, tuple[Tensor, Tensor, int]] = dataclasses.field(default_factory=dict)
    scores: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def _say_once(said: set[str], name: str, words: str, *given: str) -> None:
    """Say something of a point, of which nothing was said before."""
    if name not in said:
        said.add(name)
        log.warning(f"%s: {words}", name, *given)


class Capture(Mapping[str, Tensor]):
    """The tensors of the latest pass, by the name of their point.

    A ``with`` block: hooks are set on entry and removed on exit, whatever happens in between.
    Reading a point that did not fire, or whose layer ran twice, raises LayerError. Where several
    threads run the model, each reads what its own passes gave. What ``backward()`` runs again
    (activation checkpointing) belongs to no pass.

    Gradients are there after ``backward()`` of what the model gave. They are those of the latest
    one, and of what it was called on: of a sum over a batch, each sample has its own. They come
    also where all parameters are frozen, and at a layer that another one works on in place.

    Args:
        module: The model.
        points: What to copy.
        reduce: Applied to each tensor inside the hook.
        before_pass: Called at the beginning of each pass, with what enters the model by position
            and by name.
        only_here: Passes of other threads than the one that makes this are let alone.

    Attributes:
        stops_early: Whether a pass ends once every point has fired; only
            :func:`~embedx.passes.run_model` knows such an end from an error. A layer is then not
            seen to run again later in the pass, so one whole pass should come first.
        is_verified: Whether it was seen that the model gives the same without the capture.
    """

    def __init__(
        self,
        module: nn.Module,
        points: Sequence[Point],
        *,
        reduce: Reduce | None = None,
        before_pass: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
        only_here: bool = False,
    ) -> None:
        self._module = module
        self._points = {point.name: point for point in points}
        self._reduce = reduce
        self._before_pass = before_pass
        self._thread = threading.get_ident() if only_here else None
        self._passes: dict[int, _Pass] = {}  # by the thread that ran them
        self._stack = contextlib.ExitStack()
        self._handles: list[Any] = []
        self._active = False
        self._is_reset = False
        self._watched: dict[str, Any] = {}
        self._gradients: dict[str, Tensor] = {}
        self._said: set[str] = set()
        self.stops_early = False
        self.is_verified = False

    def __enter__(self) -> "Capture":
        return self.set()

    def set(self) -> "Capture":
        """Set the hooks, unless they are set; for use without a ``with`` block."""
        if self._active:
            return self
        modules = dict(self._module.named_modules())

        with contextlib.ExitStack() as stack:
            # Fused attention skips the modules inside it, and with them their hooks.
            stack.enter_context(FAST_PATHS_OFF)
            begin = self._module.register_forward_pre_hook(
                _as_written(self._begin_pass), prepend=True, with_kwargs=True
            )
            stack.callback(_take_off, begin)
            self._handles = []
            for layer in dict.fromkeys(point.layer for point in self._points.values()):
                for handle in self._register(layer, modules[layer]):
                    stack.callback(_take_off, handle)
                    self._handles.append(handle)
            if any(p.is_gradient or p.what == "badge" for p in self._points.values()):
                end = self._module.register_forward_hook(_as_written(self._end_pass))
                stack.callback(_take_off, end)
            self._stack = stack.pop_all()
        self._active = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take every hook off the model and restore its fast paths; harmless when repeated."""
        self._stack.close()
        for handle in self._watched.values():
            handle.remove()
        self._active = False

    def watch(
        self, name: str, tensor: Tensor, *, replace: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Read the gradient of any tensor, an intermediate one too, and replace it if asked.

        After a backward pass it is there under ``name``, a copy, as it came in. Watching another
        tensor under the same name lets go of the former.

        Args:
            name: To read the gradient by; not the name of a point.
            tensor: One that requires a gradient.
            replace: From the gradient to the one that goes on backwards in its place, of the same
                shape.

        Raises:
            LayerError: The name is taken by a point, or no gradient will reach the tensor.
        """
        if name in self._points:
            raise LayerError(
                f"{name} is a capture point already; watch the tensor under another name"
            )
        if not tensor.requires_grad:
            raise LayerError(
                f"no gradient reaches the tensor {name!r}: it needs requires_grad, and a pass with "
                "gradients enabled"
            )
        if name in self._watched:
            self._watched.pop(name).remove()
        self._gradients.pop(name, None)

        def keep(gradient: Tensor) -> Tensor | None:
            self._gradients[name] = gradient.detach().clone()
            return None if replace is None else replace(gradient)

        self._watched[name] = tensor.register_hook(keep)  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._watched:
            if name not in self._gradients:
                raise LayerError(f"no gradient has reached {name!r} yet; call backward() first")
            return self._gradients[name]
        if name not in self._points:
            raise _NotCaptured(f"{name!r} was not captured; what was is {listed(list(self))}")
        point = self._points[name]
        latest = self._latest()
        calls = latest.calls[point.layer]
        # Later calls may be those of later passes, where no pass was seen to begin.
        is_told = latest.has_begun or self._is_reset or calls == (point.call or 0) + 1
        if point.what == "badge" and not latest.has_begun and calls:
            raise LayerError(
                f"{name}: whether {point.layer} gives the class scores is seen where the model "
                "itself is called, not a method of it"
            )
        if name in latest.tensors and (calls == 1 if point.call is None else is_told):
            return latest.tensors[name]
        raise self._explain(point, calls, is_told=is_told)

    def __contains__(self, name: object) -> bool:
        return name in self._points or name in self._watched

    def __iter__(self) -> Iterator[str]:
        return iter([*self._points, *self._watched])

    def __len__(self) -> int:
        return len(self._points) + len(self._watched)

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy of a model (copy.deepcopy, as for an average of its weights) has our hooks too.
        if module is not self._module or not self._is_watched() or _is_inner_call(module):
            return
        for handle in self._handles:
            _is_last(handle)
        if self._before_pass is not None:
            self._before_pass(args, kwargs)
        self._passes[threading.get_ident()] = _Pass(has_begun=True)

    def _is_watched(self) -> bool:
        in_backward = torch._C._current_graph_task_id() != -1
        return not in_backward and self._thread in (None, threading.get_ident())

    def _own(self) -> _Pass:
        return self._passes.setdefault(threading.get_ident(), _Pass())

    def _latest(self) -> _Pass:
        """Of this thread; or of the only one that ran the model, which need not be this one."""
        passes = list(self._passes.values())
        return self._passes.get(threading.get_ident(), passes[0] if len(passes) == 1 else _Pass())

    @property
    def calls(self) -> dict[str, int]:
        """How often each layer ran since the pass began, or since :meth:`reset`; those that did."""
        return dict(self._latest().calls)

    def reset(self) -> None:
        """Forget what fired, as the beginning of a pass does.

        A module whose ``training_step`` or the like is called, and not the module itself, has no
        beginning of a pass that could be seen: call this before each, or calls go on being counted.
        """
        self._is_reset = True
        latest = self._latest()
        for thread, one in self._passes.items():
            if one is latest:  # not emptied: a gradient of it may be on its way
                self._passes[thread] = _Pass(has_begun=latest.has_begun)

    def _register(self, layer: str, module: nn.Module) -> Iterator[Any]:
        points = [p for p in self._points.values() if p.layer == layer]
        inputs = [p for p in points if p.is_at_input]
        outputs = [p for p in points if not p.is_at_input]

        handles: list[Any] = []

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if called is not module or not self._is_watched():
                return None
            # Where a method of the model is called, no pass has begun that would have done this.
            for handle in handles[1:]:
                _is_last(handle)
            if inputs and not _is_last(handles[0]):
                raise LayerError(
                    f"a hook that may change what enters {layer} was set on it after the capture "
                    "began; set it before, or call the model itself, not a method of it"
                )
            latest = self._own()
            entry = _Entry.of(latest.calls[layer], args, kwargs)
            latest.calls[layer] += 1
            if len(handles) > 1:
                latest.entries.setdefault(layer, []).append(entry)
            changed = None
            for point in inputs:
                if point.call not in (None, entry.number):
                    continue
                value = tensor_at(point, argument_at(point, called, args, kwargs))
                if not point.is_gradient:
                    self._keep(point, value)
                    continue
                # Of one that works in place and says so, the tensor itself: what other layers make
                # of it later, they make of what this one has made of it.
                is_copied = getattr(called, "inplace", False) is not True
                carrier = self._await(point, value, is_shared=is_copied)
                if carrier is not value:
                    args, kwargs = with_tensor_at(point, called, args, kwargs, carrier)
                    changed = args, kwargs
                    if is_copied:
                        entry.copies[point.name] = carrier
            self._end_if_all_fired()
            return changed

        def after(called: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if called is not module or not self._is_watched():
                return None
            latest = self._own()
            entries = latest.entries.get(layer)
            entry = entries.pop() if entries else _Entry(latest.calls[layer] - 1, {})
            for name, copied in entry.copies.items():
                if copied._version:
                    raise LayerError(
                        f"{name}: {layer} works in place on what enters it, and for the gradient "
                        "it got a copy, of which others know nothing; take the gradient at the "
                        "layer that gives it, as NAME:grad"
                    )
            changed = None
            for point in outputs:
                if point.call not in (None, entry.number):
                    continue
                if point.what == "badge":
                    latest.scores[point.name] = output.detach().clone()
                    self._keep(point, _badge(point, called, args, output))
                    continue
                value = tensor_at(point, output)
                if point.is_gradient:
                    carrier = self._await(point, value, is_shared=entry.passed_on(value))
                    if carrier is not value:
                        output = changed = with_part(output, point.path, carrier)
                else:
                    self._keep(point, value)
            self._end_if_all_fired()
            return changed

        # Other hooks may change what the layer takes in or gives out: ours sees the final value.
        handles.append(module.register_forward_pre_hook(_as_written(before), with_kwargs=True))
        yield handles[0]
        if outputs or any(point.is_gradient for point in inputs):
            handles.append(module.register_forward_hook(_as_written(after)))
            yield handles[1]

    def _end_if_all_fired(self) -> None:
        if self.stops_early and len(self._own().tensors) == len(self._points):
            raise EndPass

    def _keep(self, point: Point, value: Tensor) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise LayerError(
                f"{point.name} runs within torch.func (vmap, grad or the like), where a tensor has "
                "no values to keep; run the model outside of it"
            )
        self._own().tensors[point.name] = self._copied(point, value)

    def _copied(self, point: Point, value: Tensor) -> Tensor:
        """What is kept of a tensor: reduced where that is wanted, and of numbers of its own."""
        kept = value.detach()
        if self._reduce is not None:
            with torch.no_grad():  # it may have parameters of its own
                kept = self._reduce(point, kept).detach()
        # The next layer may work in place on the original. What is not dense has no one storage.
        is_dense = value.layout == torch.strided and not value.is_nested
        if not is_dense or kept.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
            kept = kept.clone()
        return kept

    def _await(self, point: Point, value: Tensor, *, is_shared: bool) -> Tensor:
        """Keep the gradient that will reach a tensor.

        Returns:
            The tensor, or a copy that has to go on in its place.
        """
        latest = self._own()  # a backward pass may run in another thread
        if not torch.is_grad_enabled():
            return value
        if not (value.is_floating_point() or value.is_complex()):
            raise LayerError(
                f"{point.name}: {point.layer} has {value.dtype} there, which has no gradient; "
                "choose a layer of floats"
            )
        if value.is_inference():
            raise LayerError(
                f"{point.name}: {point.layer} has a tensor of torch.inference_mode() there, which "
                "has no gradient; make the model and what enters it outside of it"
            )
        into = point.layer if point.is_at_input else None
        carrier = _carrier(value, is_shared=is_shared, into=into)
        latest.awaited[point.name] = torch.autograd.graph.get_gradient_edge(carrier)
        latest.tensors.pop(point.name, None)
        # It lives on where somebody keeps it, who does not know of the copy.
        is_cut_off = carrier is not value and not (point.is_at_input or is_shared)
        original = weakref.ref(value) if is_cut_off else None
        if carrier is not value and not self.is_verified:
            # What is done in place to either is seen by one that shares its numbers.
            latest.copies[point.name] = carrier.detach(), value.detach(), value._version

        def keep(gradient: Tensor) -> None:
            if original is not None and original() is not None:
                latest.cut_off.add(point.name)
                _say_once(
                    self._said,
                    point.name,
                    "the model also keeps what %s gives by itself (an attribute, a hook of its "
                    "own), and what comes by that way is no part of this gradient",
                    point.layer,
                )
            kept = self._copied(point, gradient)
            if point.name in latest.tensors:
                latest.again.add(point.name)
            latest.tensors[point.name] = kept

        carrier.register_hook(keep)  # type: ignore[no-untyped-call]
        return carrier

    def backward(self, total: Tensor) -> None:
        """The gradients of a number at the points, and at nothing else: parameters get none.

        Args:
            total: Of the latest pass, a tensor of one number.

        Raises:
            LayerError: No point was met with gradients.
        """
        latest = self._latest()
        if not latest.awaited:
            for point in self._points.values():
                if point.is_gradient:
                    _ = self[point.name]  # which says why it is not there
        for name in latest.awaited:  # of a model that differentiates within its own pass
            latest.tensors.pop(name, None)
        latest.again.clear()
        torch.autograd.grad(total, list(latest.awaited.values()), allow_unused=True)

    @property
    def cut_off(self) -> list[str]:
        """The points whose gradient in the latest pass misses a way, since a copy was taken."""
        return sorted(self._latest().cut_off)

    @property
    def came_again(self) -> list[str]:
        """The points at which more than one gradient came by since the latest pass."""
        return sorted(self._latest().again)

    def _end_pass(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        if module is not self._module or not self._is_watched() or _is_inner_call(module):
            return
        for name, (copied, original, version) in self._own().copies.items():
            if copied._version or original._version != version:
                _say_once(
                    self._said,
                    name,
                    "another layer works in place on what is there, which for the gradient is a "
                    "copy, or on what it is a copy of: who uses the other one misses what it did, "
                    "and the model may compute something else than without the capture; take "
                    "another layer if so",
                )
        self._own().copies.clear()
        for name, scores in self._own().scores.items():
            given = class_scores(output)
            if given is None or not same_values(given.detach(), scores):
                raise LayerError(
                    f"{name}: {self._points[name].layer} does not give the class scores of the "
                    "model; choose the layer that does, most often the last Linear"
                )
        self._own().scores.clear()

    def _explain(self, point: Point, calls: int, *, is_told: bool) -> LayerError:
        is_one = calls == 1 if point.call is None else calls > point.call and is_told
        if point.is_gradient and is_one:
            if point.name in self._latest().awaited:
                return LayerError(
                    f"{point.name}: no gradient has reached {point.layer}; call backward() on what "
                    "the model gives before it is read or recorded, and choose a layer that leads "
                    "to it"
                )
            return LayerError(
                f"{point.name}: the pass ran without gradients (torch.no_grad(), or activation "
                "checkpointing around the layer); run it with them"
            )
        if point.call is not None and calls > point.call and not is_told:
            return LayerError(
                f"{point.name}: {point.layer} ran {calls} times, and which calls are of one pass "
                "is not seen where a method of the model is called; call reset() of the capture "
                "before each pass"
            )
        if point.call is not None and calls:
            return LayerError(
                f"{point.name}: {point.layer} ran {calls} time(s) in this pass, so its calls are "
                f"numbered 0 to {calls - 1}"
            )
        if calls > 1:
            return LayerError(
                f"{point.layer} ran {calls} times in one pass; say which call: "
                + (" or " if calls <= CALLS_NAMED else " to ").join(
                    dataclasses.replace(point, call=i).name
                    for i in (range(calls) if calls <= CALLS_NAMED else (0, calls - 1))
                )
            )
        if len(self._passes) > 1:
            return LayerError(
                f"{point.name} did not fire in this thread, and others ran the model; read it in "
                "the thread of the pass"
            )
        own = self._latest()
        if not own.has_begun and not own.calls:
            return LayerError(f"{point.name}: the model has not run yet")
        return LayerError(
            f"{point.name} did not fire in this pass: the layer was skipped by a branch or a fused "
            "path, or its .forward() was called directly; choose the layer around it"
        )


def _carrier(value: Tensor, *, is_shared: bool, into: str | None) -> Tensor:
    """A tensor whose hooks see the gradient of what a value is now, whatever is done with it later.

    It is the value itself, or a copy that has to go on in its place: the hooks of a view are lost
    when another layer works in place on it, and what needs no gradient has none.

    Args:
        value: Of floats, in a pass with gradients.
        is_shared: Whether other layers may take the same tensor, whose part in the gradient is not
            wanted.
        into: The layer that the copy enters, and no other: for this one it is not shared. None
            where it goes on to any.
    """
    if not value.requires_grad:
        carrier = value.detach().requires_grad_().clone()
    elif value.is_leaf or value._is_view() or (is_shared and not _is_own_copy(value, into)):
        carrier = value.clone()
    else:
        return value
    carrier._embedx_into = into  # type: ignore[attr-defined]
    return carrier


def _is_own_copy(value: Tensor, into: str | None) -> bool:
    return into is not None and getattr(value, "_embedx_into", None) == into


def _works_in_place(module: nn.Module) -> bool:
    """Whether it says so, and does: dropout changes nothing in eval mode."""
    is_idle = isinstance(module, nn.modules.dropout._DropoutNd) and not module.training
    return getattr(module, "inplace", False) is True and not is_idle


def _is_inner_call(module: nn.Module) -> bool:
    """Whether a module that is being called was called by its own forward, as one that averages
    several views of its input does.
    """
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


_CALL = nn.Module._call_impl.__code__


class _Hook:
    """A function that a copy of the model has as well, until it is taken off the model itself.

    No pickle of a model can hold it; what is left of it in copies afterwards does nothing.

    Attributes:
        decides: What of it decides the numbers of a pass; None of one that only looks.
    """

    def __init__(self, function: Callable[..., Any], decides: Any = None) -> None:
        self._function: Callable[..., Any] | None = function
        self.decides = decides

    def __call__(self, *given: Any) -> Any:
        return None if self._function is None else self._function(*given)

    def end(self) -> None:
        self._function = self.decides = None

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return self

    def __reduce__(self) -> Any:
        if self._function is None:  # of Python itself, and does nothing whatever it is called with
            return getattr, (contextlib.nullcontext(), "__exit__")
        raise LayerError(
            "a model that is captured or recorded cannot be saved whole; save its state_dict(), or "
            "do it within `with recorder.paused():` or after the capture"
        )


def _take_off(handle: Any) -> None:
    hook = (handle.hooks_dict_ref() or {}).get(handle.id)
    if isinstance(hook, _Hook):
        hook.end()
    handle.remove()


class _Change(_Hook):
    """One that changes what enters or leaves a layer: a capture looks after it."""


def _as_written(
    function: Callable[..., Any], kind: type[_Hook] = _Hook, decides: Any = None
) -> Callable[..., Any]:
    """A hook that torch does not compile, if it compiles; it would do so anew for every point."""
    if "torch._dynamo" in sys.modules:
        function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kind(function, decides)


def _is_last(handle: Any) -> bool:
    """Whether no hook of another's comes after ours; from the next call on none does."""
    hooks = handle.hooks_dict_ref()
    if hooks is None or handle.id not in hooks:  # the layer is gone, or its hooks are
        return True
    later = itertools.takewhile(lambda number: number != handle.id, reversed(hooks))
    if all(type(hooks[number]) is _Hook for number in later):
        return True
    hooks.move_to_end(handle.id)
    return False


def _badge(point: Point, module: nn.Module, args: tuple[Any, ...], scores: Any) -> Tensor:
    """The gradient of a loss at the weight of the last layer, of each sample.

    The loss is the cross-entropy of the class that the model predicts, so that a row is long where
    the model is unsure. It takes no backward pass: with h ``(n, d)``, which enters the layer, and
    the probabilities p of the classes, it is ``(p - onehot(argmax p))`` times h.

    Returns:
        Shape ``(n, classes * d)``, class by class.

    References:
        Ash et al. 2020, Deep Batch Active Learning by Diverse, Uncertain Gradient Lower Bounds,
        arXiv:1906.03671, section 3.
    """
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if not is_linear or point.path or not args:
        raise LayerError(
            f"{point.name}: badge is of a Linear layer that gives the class scores, written "
            f"NAME:badge; {point.layer} is a {type(module).__name__}"
            + ("" if args else ", called by keyword")
        )
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise LayerError(
            f"{point.name}: badge takes class scores (n, classes), of two classes at least, and "
            f"{point.layer} gives {tuple(scores.shape)}"
        )
    with torch.no_grad():
        plain = nn.functional.linear(args[0], module.weight, module.bias)  # type: ignore[arg-type]
        ours, theirs = plain.float(), scores.float()
        # A sample whose scores are NaN says nothing of hooks, and fails by itself.
        if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise LayerError(
                f"{point.name}: what {point.layer} gives is changed by a hook on it, so that the "
                "gradient is another than that of a Linear layer"
            )
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.detach().to(wide).softmax(1)
        weights = weights - nn.functional.one_hot(scores.argmax(1), scores.shape[1])
        entered = args[0].detach().to(wide)
        outer: Tensor = weights.unsqueeze(2) * entered.unsqueeze(1)
        return outer.flatten(1)


@checked
def capture(
    module: nn.Module, points: str | Sequence[str], *, reduce: Reduce | None = None
) -> Capture:
    """Copy what layers produce, from now until ``remove()`` or the end of a ``with`` block.

    Args:
        module: The model; it is left exactly as it was.
        points: One capture point or several, as in :func:`~embedx.points.resolve_points`.
        reduce: Applied to a copy of each tensor inside the hook, such as a pooling; None keeps it
            whole.

    Returns:
        A mapping from a point's name to its tensor in the latest pass, detached and copied.

    Raises:
        LayerError: A layer is not there (at once), or did not fire once (when it is read).
    """

    def apart(point: Point, activation: Tensor) -> Tensor:
        # It may work in place, or fill one buffer again and again.
        assert reduce is not None
        return reduce(point, activation.clone()).clone()

    points_here = resolve_points(module, points)
    return Capture(module, points_here, reduce=apart if reduce is not None else None).set()


Change = Callable[[Tensor], Tensor]


class Intervention:
    """Changes what layers take in, give out, or pass backwards, until it is removed.

    Made by :func:`intervene`.

    Attributes:
        fired: The points that have changed something so far.
        is_verified: Whether it was seen that the model gives the same where nothing is changed.
    """

    def __init__(
        self, module: nn.Module, changes: Mapping[Point, Sequence[Change]], *, is_told: bool
    ) -> None:
        self._is_told = is_told
        self._has_run = False
        self.fired: set[str] = set()
        self.is_verified = False
        self._module = module
        self._changes = changes
        self._calls: dict[int, Counter[str]] = {}  # of layers in the pass at hand, by thread
        self._kept: list[tuple[str, weakref.ref[Tensor]]] = []
        self._shared: list[tuple[str, Tensor, int]] = []  # with how often it was worked on in place
        self._said: set[str] = set()
        self._stack = contextlib.ExitStack()
        modules = dict(module.named_modules())
        with contextlib.ExitStack() as stack:
            stack.enter_context(FAST_PATHS_OFF)
            stack.enter_context(COMPILED_OFF)
            begin = _as_written(self._begin_pass, _Change)
            stack.callback(_take_off, module.register_forward_pre_hook(begin, prepend=True))
            end = _as_written(self._end_pass, _Change)
            stack.callback(_take_off, module.register_forward_hook(end))
            for layer in dict.fromkeys(point.layer for point in changes):
                for handle in self._register(layer, modules[layer]):
                    stack.callback(_take_off, handle)
            self._stack = stack.pop_all()

    def __enter__(self) -> "Intervention":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
        if kind is None:
            self.require_fired()

    def remove(self) -> None:
        """Take every hook off the model; harmless when repeated."""
        self._stack.close()

    def require_fired(self) -> None:
        """Raise LayerError if a point has changed nothing in any pass; say where there was none."""
        if not self._has_run:
            log.warning("nothing was changed: the model was not run")
            return
        for point in self._changes:
            if point.name not in self.fired:
                what = "no gradient has reached it" if point.is_gradient else "it did not fire"
                raise LayerError(
                    f"nothing was changed at {point.name}: {what}; the model was not run, the "
                    "layer was skipped by a branch, a fused path or a copy that was compiled "
                    "before, runs less often in a pass, or does not lead to what was "
                    "differentiated; choose the layer around it"
                )

    def _begin_pass(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        if module is self._module and not _is_inner_call(module):
            self._has_run = True
            self._calls[threading.get_ident()] = Counter()
            self._kept.clear()
            self._shared.clear()

    def _end_pass(self, module: nn.Module, _: tuple[Any, ...], __: Any) -> None:
        """Say where the model has kept what a layer gave before it was changed, and the like."""
        if module is not self._module or _is_inner_call(module):
            return
        self._calls.pop(threading.get_ident(), None)
        for name in [name for name, copied, version in self._shared if copied._version != version]:
            if not self.is_verified:
                _say_once(
                    self._said,
                    name,
                    "another layer works in place on what is there, or on what it is a copy of "
                    "now: who uses the other one misses what it did, and the model may compute "
                    "something else even where nothing is changed; take another layer if so",
                )
        self._shared.clear()
        if torch.is_grad_enabled():
            return  # a graph keeps what it needs, and the model does not see it
        for name in [name for name, original in self._kept if original() is not None]:
            _say_once(
                self._said,
                name,
                "the model also keeps what the layer gave before it was changed, on an attribute "
                "or in a list; where it uses that, nothing is changed",
            )
        self._kept.clear()

    def _register(self, layer: str, module: nn.Module) -> Iterator[Any]:
        points = [point for point in self._changes if point.layer == layer]

        def fires(point: Point, *, number: int | None) -> bool:
            if point.call is None:
                return True
            if number is None or torch._C._current_graph_task_id() != -1:
                raise LayerError(
                    f"{point.name}: which call it is cannot be told where a method of the model is "
                    "called and not the model itself, or where backward() runs layers again "
                    "(activation checkpointing); name the layer without @"
                )
            return point.call == number

        entries: dict[int, list[_Entry]] = {}  # by thread; a layer may call itself

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if called is not module:  # a copy of the model
                return None
            if torch.compiler.is_compiling():
                raise LayerError(
                    f"{layer} is being compiled while it is changed, and what is compiled would "
                    "keep the change; run the model once before, or do not compile it"
                )
            calls = self._calls.get(threading.get_ident())
            number = None if calls is None else calls[layer]
            if calls is not None:
                calls[layer] += 1
            self._has_run = True
            entry = _Entry.of(-1 if number is None else number, args, kwargs)
            entries.setdefault(threading.get_ident(), []).append(entry)
            for point in points:
                if point.is_at_input and fires(point, number=number):
                    value = tensor_at(point, argument_at(point, called, args, kwargs))
                    in_place = _works_in_place(called) and not point.is_gradient
                    changed = self._changed(point, value, is_shared=not in_place)
                    if in_place:
                        # What it does, all are to see that hold the tensor itself.
                        changed = value.copy_(changed)
                    args, kwargs = with_tensor_at(point, called, args, kwargs, changed)
            return args, kwargs

        def after(called: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
            if called is not module:
                return None
            entry = entries[threading.get_ident()].pop()
            number = None if entry.number < 0 else entry.number
            for point in points:
                if not point.is_at_input and fires(point, number=number):
                    value = tensor_at(point, output)
                    if sum(one is value for one in tensors_in(output)) > 1:
                        _say_once(
                            self._said,
                            point.name,
                            "%s gives the same tensor in another place too; where the model goes "
                            "on with that one, nothing is changed",
                            point.layer,
                        )
                    shares = entry.passed_on if point.is_gradient else entry.holds
                    changed = self._changed(point, value, is_shared=shares(value))
                    output = with_part(output, point.path, changed)
            return output

        told = {point.name: list(self._changes[point]) for point in points}
        ours = told if self._is_told else None
        yield module.register_forward_pre_hook(_as_written(before, _Change, ours), with_kwargs=True)
        handle = module.register_forward_hook(_as_written(after, _Change, ours))
        # Before those of others, such as hooks of the model's own that collect what layers give,
        # and after the changes that were there.
        hooks: Any = handle.hooks_dict_ref()
        for key in [key for key in reversed(hooks) if type(hooks[key]) is _Change]:
            hooks.move_to_end(key, last=False)
        yield handle

    def _changed(self, point: Point, value: Tensor, *, is_shared: bool) -> Tensor:
        if not point.is_gradient:
            self.fired.add(point.name)
            if not point.is_at_input:
                self._kept.append((point.name, weakref.ref(value)))
            # A copy: a change may work in place, and others may hold the same tensor.
            changed = self._apply(point, value.clone())
            if is_shared and not changed.is_inference():
                self._shared.append((point.name, changed, changed._version))
                self._shared.append((point.name, value, value._version))
            return changed
        if not torch.is_grad_enabled():
            return value
        into = point.layer if point.is_at_input else None
        value = _carrier(value, is_shared=is_shared, into=into)

        def change(gradient: Tensor) -> Tensor:
            self.fired.add(point.name)
            return self._apply(point, gradient.clone())

        value.register_hook(change)  # type: ignore[no-untyped-call]
        return value

    def _apply(self, point: Point, value: Tensor) -> Tensor:
        if value.is_nested:
            raise LayerError(f"{point.name} is a nested tensor; change what comes before it")
        shape = value.shape
        for change in self._changes[point]:
            changed = change(value)
            if not isinstance(changed, Tensor) or changed.shape != shape:
                given = (
                    f"a tensor of shape {tuple(changed.shape)}"
                    if isinstance(changed, Tensor)
                    else f"a {type(changed).__name__}"
                )
                raise LayerError(
                    f"{point.name}: the function gives {given} in place of a tensor of shape "
                    f"{tuple(shape)}; let it return one of the same shape"
                )
            value = changed
        return value


@checked
def intervene(
    module: nn.Module, changes: Mapping[str, Any], *, is_told: bool = True
) -> Intervention:
    """Change what layers take in, give out, or pass backwards, from now until the end of a block.

    Args:
        module: The model; it is as it was when the ``with`` block ends, or after ``remove()``.
        changes: From capture points (also globs) to functions that get a copy of the tensor and
            return what takes its place, of the same shape; several at one point follow each other.
            At ``NAME:grad`` and ``NAME:grad_input`` they get the gradient in a backward pass. A
            point without ``@`` of a layer that runs several times means each time. A capture at
            the same point shows what the functions gave.
        is_told: Whether the id of an extraction within the block has the functions in it.

    Returns:
        A handle; as a ``with`` block it raises LayerError at the end if a point never fired.

    Raises:
        LayerError: A layer is not there.
    """
    resolved: dict[Point, list[Change]] = {}
    for name, functions in changes.items():
        for point in resolve_points(module, name):
            if point.what == "badge":
                raise LayerError(f"{point.name} is computed, and nothing flows through it")
            several = [functions] if callable(functions) else functions
            if not isinstance(several, (list, tuple)) or not all(map(callable, several)):
                raise LayerError(
                    f"changes[{name!r}] is {short(repr(functions))}; give a function of the "
                    "tensor, or a list of functions"
                )
            resolved.setdefault(point, []).extend(several)
    return Intervention(module, resolved, is_told=is_told)


@contextlib.contextmanager
def watched(
    module: nn.Module,
    *,
    entered: Callable[[str, tuple[Any, ...], dict[str, Any]], None] | None = None,
    left: Callable[[str, Any], None],
) -> Iterator[None]:
    """Be told of every call of every module, the model itself included, that this thread makes.

    Calls nest, those of a module within itself too: each that was entered is left, also where it
    raised and the model went on from that. Fused attention, which skips modules, is off, and what
    torch compiled runs as it is written.

    Args:
        module: The model; its hooks are as they were after the block.
        entered: Takes the name of the module, and what it is called with by position and by name.
        left: Takes the name, and what the module gave; None where it raised.

    Raises:
        LayerError: A module takes no hooks.
    """
    require_hookable(module)
    thread = threading.get_ident()

    def register(name: str, child: nn.Module) -> Iterator[Any]:
        def is_ours(called: nn.Module) -> bool:  # and not that of a copy, which has our hooks too
            return called is child and threading.get_ident() == thread

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if entered is not None and is_ours(called):
                entered(name, args, kwargs)

        def after(called: nn.Module, _: tuple[Any, ...], output: Any) -> None:
            if is_ours(called):
                left(name, output)

        # The first, so that no other hook raises before it, and the last, which comes in any case.
        yield child.register_forward_pre_hook(_Hook(before), prepend=True, with_kwargs=True)
        yield child.register_forward_hook(_Hook(after), always_call=True)

    with contextlib.ExitStack() as stack:
        stack.enter_context(FAST_PATHS_OFF)
        stack.enter_context(COMPILED_OFF)
        for name, child in module.named_modules():
            for handle in register(name, child):
                stack.callback(_take_off, handle)
        yield


def find_output(
    module: nn.Module, inputs: Mapping[str, Tensor], part: Callable[[Any], Tensor], *, title: str
) -> Point:
    """The layer that gives a part of what a model gives, and is the last that does.

    One that runs once in a pass comes before those that run several times, of which it is a call.

    Args:
        module: The model; its modes, weights and gradients are left as they were.
        inputs: Of an example pass.
        part: From what the model gives to the tensor that is looked for.
        title: What the user calls the model, for the message.

    Raises:
        LayerError: No layer gives that very tensor.
        ModelError: The pass failed.
    """
    given: list[tuple[str, Any]] = []

    def left(name: str, output: Any) -> None:
        if name:
            given.append((name, output))

    with watched(module, left=left), undisturbed(module), torch.no_grad():
        wanted = part(run_model(module, inputs, title=title))
    calls = Counter(name for name, _ in given)
    giving = [at for at, (_, output) in enumerate(given) if output is wanted]
    for at in sorted(giving, key=lambda at: (calls[given[at][0]] == 1, at), reverse=True):
        layer = given[at][0]
        before = sum(name == layer for name, _ in given[:at])
        return Point(layer, call=before if calls[layer] > 1 else None)
    raise LayerError(
        f"no layer of {title} gives what the model gives; name the one that is meant: "
        "model.layer=NAME, see: python -m embedx layers model=..."
    )
