"""Passes of a model that leave it, and the random state, as they were."""

import contextlib
import dataclasses
import logging
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from embedx.errors import EmbedxError, ModelError, first_line, listed

log = logging.getLogger("embedx")


class EndPass(BaseException):
    """Ends a pass whose rest nobody wants; no ``except Exception`` of a model's own catches it."""


class _FastPathsOff:
    """Fused attention is off while any capture is active, and as it was after the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = torch.backends.mha.get_fastpath_enabled()
            self._users += 1
            torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                torch.backends.mha.set_fastpath_enabled(self._before)


FAST_PATHS_OFF = _FastPathsOff()


class _CompiledOff:
    """What was compiled runs as it is written while anything is changed in it, or is watched.

    It would know nothing of that, or if it was compiled meanwhile, go on with it for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


COMPILED_OFF = _CompiledOff()


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors in what a model or a layer gives: in mappings, tuples, lists and objects."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) or hasattr(output, "logits"):
        yield from tensors_in(_attributes(output))


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds, in slots too."""
    held = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held[name] = getattr(value, name)
    return held


def class_scores(output: Any) -> Tensor | None:
    """The scores ``(n, classes)`` in what a model gives, or None: itself, or its ``logits``."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    is_scores = isinstance(output, Tensor) and output.ndim == 2 and output.is_floating_point()
    return output if is_scores else None


@contextlib.contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Gradients at layers alone: the parameters need none, and get none, within the block."""
    with _requiring(module, False):
        yield


@contextlib.contextmanager
def _requiring(module: nn.Module, wanted: bool) -> Iterator[None]:
    changed = [
        one
        for one in module.parameters()
        if one.requires_grad != wanted
        and not one.is_inference()
        and (one.is_floating_point() or one.is_complex())
    ]
    try:
        for one in changed:
            one.requires_grad_(wanted)
        yield
    finally:
        for one in changed:
            one.requires_grad_(not wanted)


class RightGradients(TorchFunctionMode):
    """Within the block the gradient of one sample alone is right also before a normalization.

    On a processor torch (2.14 and before) takes a gradient of a batch of one that comes back with
    its axes turned, as from tokens, in the order of its memory, so that batch and instance
    normalizations pass on the numbers of other places. In the usual order they are passed on as
    they should be.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _NORMALIZATIONS and output.requires_grad and len(output) == 1:
            output.register_hook(torch.Tensor.contiguous)
        return output


_NORMALIZATIONS = frozenset((torch.batch_norm, torch.instance_norm, F.batch_norm, F.instance_norm))


Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


@contextlib.contextmanager
def differentiable(
    module: nn.Module, inputs: Tensor | dict[str, Tensor]
) -> Iterator[Tensor | dict[str, Tensor]]:
    """What enters a model, so that all that it computes has a gradient, however it is frozen.

    Where it is floats, it needs a gradient, and the parameters need none. Of whole numbers there is
    no gradient: then the parameters need one, within the block.
    """

    def leaf(tensor: Tensor) -> Tensor:  # a copy of one: a first layer may work in place
        is_float = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_().clone() if is_float else tensor

    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
    are_floats = all(one.is_floating_point() or one.is_complex() for one in tensors)
    with _requiring(module, not are_floats), torch.enable_grad(), RightGradients():
        if isinstance(inputs, Tensor):
            yield leaf(inputs)
        else:
            yield {name: leaf(tensor) for name, tensor in inputs.items()}


def run_model(module: nn.Module, inputs: Inputs, *, title: str) -> Any:
    """One forward pass; whatever the model raises becomes one line.

    Args:
        module: The model.
        inputs: What goes in, as the one argument, or several in their order or by their names.
        title: What the user calls the model.

    Returns:
        What the model gives; None where a capture ended the pass early.

    Raises:
        ModelError: The model raised; the cause is attached.
    """
    try:
        if isinstance(inputs, Mapping):
            return module(**inputs)
        return module(inputs) if isinstance(inputs, Tensor) else module(*inputs)
    except EndPass:
        return None
    except EmbedxError:
        raise
    except Exception as error:
        if isinstance(inputs, Mapping):
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
        else:
            several = [inputs] if isinstance(inputs, Tensor) else inputs
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in several)
        raise ModelError(
            f"{title} failed on a batch of shape {shapes}: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def same_values(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values, on one device; NaN is NaN."""
    is_alike = tensor.shape == other.shape and tensor.device == other.device
    return is_alike and bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


_RUNNING: set[int] = set()  # ids of the modules that are run undisturbed at this moment
_RUNNING_LOCK = threading.Lock()


@contextlib.contextmanager
def _alone(module: nn.Module) -> Iterator[None]:
    """Two at once would undo each other's modes, layers and buffers."""
    mine = {id(child) for child in module.modules()}
    with _RUNNING_LOCK:
        if mine & _RUNNING:
            raise ModelError(
                f"{type(module).__name__.lower()} is being run by another extraction in this "
                "process; wait for it, or give this one a copy: copy.deepcopy(model)"
            )
        _RUNNING.update(mine)
    try:
        yield
    finally:
        with _RUNNING_LOCK:
            _RUNNING.difference_update(mine)


@contextlib.contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Have a model on a device, and then again where its first parameter was."""
    lies_on = next((one.device for one in module.parameters()), device)
    try:
        if lies_on != device:
            module.to(device)
        yield
    finally:
        if lies_on != device:
            module.to(lies_on)


@contextlib.contextmanager
def undisturbed(module: nn.Module, *, device: torch.device | None = None) -> Iterator[None]:
    """Run a model in eval mode, and leave its modes, buffers and the random state as they were.

    What a model does to its own modes or buffers while it runs is put back and said; what it does
    to its parameters is said.

    Args:
        module: The model.
        device: Where it runs; ``torch.manual_seed`` reaches every GPU that is in use.

    Raises:
        ModelError: It, or a part of it, is being run so in another thread.
    """
    title = type(module).__name__.lower()
    with _alone(module):
        modes = [(child, child.training) for child in module.modules()]
        buffers = [
            (child, _buffers_of(child))
            for child in module.modules()
            if not isinstance(child, torch.jit.ScriptModule)  # which gives copies of them
        ]
        parameters = [
            _Parameter(name, parameter, _sums(parameter), parameter.requires_grad, parameter.grad)
            for name, parameter in module.named_parameters()
            if not _is_lazy(parameter)
        ]
        started = None
        drawn = random.getstate(), np.random.get_state()  # noqa: NPY002
        on_mps = device is not None and device.type == "mps"
        state = torch.mps.get_rng_state() if on_mps else None
        try:
            gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
            with torch.random.fork_rng(devices=gpus):
                try:
                    module.eval()
                except NotImplementedError as error:  # as of what torch.export gives
                    raise ModelError(
                        f"{title} has no eval mode ({first_line(error)}); give the module that it "
                        "was made from"
                    ) from error
                started = [child.training for child, _ in modes]
                if any(started):
                    log.warning(
                        "%s or a part of it is in train mode, and its own eval() leaves it there: "
                        "rows may have dropout and the statistics of batches",
                        title,
                    )
                elif modes[0][1]:
                    log.warning("%s is in train mode: it runs in eval mode, and is put back", title)
                yield
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])  # noqa: NPY002
            if state is not None:
                torch.mps.set_rng_state(state)
            if started is not None and [child.training for child, _ in modes] != started:
                log.warning("%s put itself into train mode while it ran; it is put back", title)
            for child, training in modes:
                if child.training != training:
                    child.train(training)  # it may do more, such as take merged weights apart
            for child, training in modes:
                child.training = training
            _put_back_buffers(buffers, title=title)
            _put_back_gradients(parameters, title=title)
            now = dict(module.named_parameters())
            changed = [
                one.name
                for one in parameters
                if now.get(one.name) is not one.parameter
                or not same_values(_sums(one.parameter), one.sums)
            ]
            if changed:
                log.warning(
                    "%s changed its parameters, by eval(), train() or its passes: %s; they are not "
                    "put back",
                    title,
                    listed(changed),
                )


class _Parameter(NamedTuple):
    """A parameter, and what it was before a model ran."""

    name: str
    parameter: nn.Parameter
    sums: Tensor
    requires_grad: bool
    grad: Tensor | None


def _put_back_gradients(parameters: Sequence[_Parameter], *, title: str) -> None:
    """Give parameters the gradients that they had, if any, and say which had others."""
    names = []
    for name, parameter, _, requires_grad, grad in parameters:
        if parameter.requires_grad != requires_grad or parameter.grad is not grad:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
            names.append(name)
    if names:
        log.warning(
            "%s changed while it ran what gradients its parameters have, or whether: %s; that is "
            "put back",
            title,
            listed(names),
        )


_Held = Mapping[str, tuple[Tensor | None, Tensor | None]]  # buffers, with copies of their values


def _buffers_of(child: nn.Module) -> _Held:
    """The buffers of a module, each with a copy of its values; None of what has none yet."""
    return {
        name: (buffer, None if buffer is None or _is_lazy(buffer) else buffer.detach().clone())
        for name, buffer in child._buffers.items()
    }


def _is_lazy(tensor: Tensor) -> bool:
    return bool(nn.parameter.is_lazy(tensor))


def _put_back_buffers(buffers: Sequence[tuple[nn.Module, _Held]], *, title: str) -> None:
    """Give modules the buffers that they had, and say which were others."""
    # They stay: whether it has them by now a network may also know by other means.
    if new := {name for child, held in buffers for name in child._buffers if name not in held}:
        log.warning("%s made buffers while it ran: %s; they stay", title, listed(new))
    if names := sorted({name for child, held in buffers for name in _put_back(child, held)}):
        log.warning(
            "%s changed its buffers while it ran: %s; they are put back", title, ", ".join(names)
        )


def _put_back(child: nn.Module, held: _Held) -> list[str]:
    """Give a module the buffers that it had; the names of those that changed."""
    changed = []
    for name, (buffer, value) in held.items():
        is_there = name in child._buffers and child._buffers[name] is buffer
        if is_there and (buffer is None or value is None):  # one that was lazy has its size now
            continue
        child._buffers[name] = buffer
        if buffer is None or value is None:
            changed.append(name)
        elif (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer.data = value
            changed.append(name)
        elif not is_there or not same_values(buffer, value):
            with torch.no_grad():
                buffer.copy_(value)
            changed.append(name)
    return changed


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED = 64  # numbers a sum: whatever moves further than that is seen


def _sums(parameter: Tensor) -> Tensor:
    """Sums over the bits of each few numbers, which show a change; a copy would fill memory."""
    values = parameter.detach()
    if values.layout != torch.strided or values.is_quantized or type(values) is not Tensor:
        return (values[:1] if values.ndim else values).clone()
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.contiguous().view(_BITS[values.element_size()]).flatten()
    n = len(bits) // _SUMMED * _SUMMED
    return torch.cat([bits[:n].view(-1, _SUMMED).sum(1), bits[n:]])
