"""What tells files, weights and code apart: the same in every process, on every machine."""

import copyreg
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embedx.errors import ModelError


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_sha256(module: nn.Module) -> str:
    """SHA-256 of a network's parameters and buffers, saved or not: names, types, shapes, bytes.

    Raises:
        ModelError: A tensor holds no values yet, or is not stored densely.
    """
    digest = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, nn.parameter.UninitializedParameter) or tensor.is_meta:
            raise ModelError(
                f"{type(module).__name__} has no values for {name} yet; run it once on an example, "
                "or load its weights, first"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ModelError(f"{name} of {type(module).__name__} is not a dense tensor")
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_buffer(tensor))
    return digest.hexdigest()


def _buffer(tensor: Tensor) -> memoryview:
    value = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return value.reshape(-1).view(torch.uint8).numpy().data


def code_sha256(module: nn.Module, *, arguments: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of what a network computes with its weights, as far as it can be read.

    Weights alone do not say it: a ReLU may have become a Tanh. Hashed are the structure, the
    attributes and what they hold, functions among them, hooks, the arguments it was made with, and
    the source files of classes and functions that no package defines (of a script itself, the
    classes and functions alone: it holds much else). Not followed are global variables, and what
    only C code holds.

    Args:
        module: The network.
        arguments: What its factory was called with.
    """
    reader = _Reader({id(child): name for name, child in module.named_modules()})
    parts: list[str | bytes] = [reader.digest(sorted((arguments or {}).items()))]
    for name, child in module.named_modules():
        parts += [name, *reader.module(child)]
    everywhere = nn.modules.module
    for hooks in (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks):
        parts += reader.hooks(hooks)
    for name, source in sorted(reader.sources.items()):
        parts += [name, source]
    return _hash(parts).hex()


def _hash(parts: Iterable[str | bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))  # "a" "bc" is not "ab" "c"
        digest.update(content)
    return digest.digest()


_PLAIN = frozenset([bool, int, float, complex, str, types.NoneType, types.EllipsisType])
_DEEPEST = 100  # of values inside one another; a chain of objects would exhaust Python's stack
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WEIGHTS = ("_parameters", "_buffers", "training")
# Lightning's trainer holds the data and the state of a training, and no pass reads it.
_PASSED_OVER = frozenset([*vars(nn.Module()), "_trainer"])


class _Reader:
    """Digests of values, by content; the sources that they lead to are kept beside.

    Args:
        registered: ``{id: name}`` of modules that are described elsewhere.
    """

    def __init__(self, registered: Mapping[int, str]) -> None:
        self.sources: dict[str, bytes] = {}
        self._registered = registered
        self._open: dict[int, int] = {}
        self._done: dict[int, tuple[Any, bytes]] = {}  # the value too: ids are used again

    def digest(self, value: Any) -> bytes:
        kind = type(value)
        if kind in _PLAIN:
            return _hash([kind.__name__, repr(value)])
        if isinstance(value, (bytes, bytearray)):
            return _hash([kind.__name__, bytes(value)])
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._open:
            return _hash(["around", str(len(self._open) - self._open[id(value)])])
        if len(self._open) > _DEEPEST:
            return _hash(["deep", _name(kind)])
        self._open[id(value)] = len(self._open)
        try:
            found = _hash(self._parts(value))
        finally:
            del self._open[id(value)]
        self._done[id(value)] = (value, found)
        return found

    def module(self, module: nn.Module) -> Iterator[str | bytes]:
        """Its class, children, hooks and attributes; not its weights."""
        yield self.digest(type(module))
        for key, child in module._modules.items():
            yield key
            yield self.digest(child)
        for key in _HOOKS:
            yield key
            yield from self.hooks(vars(module).get(key, {}))
        if isinstance(module, torch.jit.ScriptModule):
            # Numbered in the order in which a process made them.
            yield re.sub(r"___torch_mangle_\d+\.", "", str(getattr(module, "code", "")))
            return
        for key, value in sorted(vars(module).items()):
            if key not in _PASSED_OVER and not key.startswith("_torchdynamo"):
                yield key
                yield self.digest(value)

    def hooks(self, hooks: Mapping[int, Any]) -> list[bytes]:
        """Those of others: ours only look. The keys are left out: they count within a process."""
        owners = {key: getattr(hook, "func", hook) for key, hook in hooks.items()}
        return [
            self.digest(hook)
            for key, hook in hooks.items()
            if not str(getattr(owners[key], "__module__", "")).startswith("embedx.")
        ]

    def _parts(self, value: Any) -> Iterator[str | bytes | memoryview]:
        kind = type(value)
        yield _name(kind)
        if isinstance(value, Tensor):
            yield from self._tensor(value)
        elif id(value) in self._registered:
            yield self._registered[id(value)]
        elif isinstance(value, nn.Module):  # in a list, say: its weights are in no state dict
            yield from self.module(value)
            for key in _WEIGHTS:
                yield self.digest(vars(value).get(key))
        elif kind in (list, tuple):
            if all(type(item) in _PLAIN for item in value):
                yield repr(value)
            else:
                yield from map(self.digest, value)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(map(self.digest, value))
        elif kind is dict:
            # By device: what a pass has kept for the next one.
            for key in [key for key in value if not isinstance(key, torch.device)]:
                yield self.digest(key)
                yield self.digest(value[key])
        elif isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(value, types.CodeType):
            yield value.co_code
            yield self.digest((value.co_names, value.co_varnames, value.co_consts))
        elif isinstance(value, type):
            for base in value.__mro__:
                yield from self._class(base)
        elif isinstance(value, types.MethodType):
            yield self.digest(value.__func__)
            yield self.digest(value.__self__)
        elif isinstance(value, types.BuiltinFunctionType):
            yield value.__qualname__
            yield self.digest(value.__self__)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
            if not _is_packaged(value):  # several of one name, lambdas too, may share a source
                yield self.digest(value.__code__)
        elif isinstance(value, torch.jit.ScriptFunction):
            yield str(value.code)
        elif kind.__module__.startswith("torch._"):  # what compiles and traces, and operators
            yield str(getattr(value, "__name__", ""))
        # The module of a graph has it as a text too. Devices never decide what rows are.
        elif not isinstance(value, (torch.fx.Graph, torch.device)):
            yield from self._object(value)

    def _tensor(self, tensor: Tensor) -> Iterator[str | memoryview]:
        yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            return
        dense = tensor.dequantize() if tensor.is_quantized else tensor
        yield _buffer(dense if dense.layout == torch.strided else dense.to_dense())

    def _object(self, value: Any) -> Iterator[str | bytes]:
        """What pickle would keep of it: what it is made of without caches, locks and addresses."""
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            kept = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # each type that cannot be pickled raises its own
            kept = ()
        yield self.digest(type(value))
        if isinstance(kept, str):  # found by its name, such as a function that caches another
            yield f"{getattr(value, '__module__', None)}.{kept}"
            yield self.digest(getattr(value, "__dict__", {}).get("__wrapped__"))
            return
        for part in kept:  # the items of a list or dict come as an iterator
            yield self.digest(list(part) if isinstance(part, Iterator) else part)

    def _class(self, kind: type) -> Iterator[str | bytes]:
        yield _name(kind)
        if _is_packaged(kind):
            return
        self._read(kind)
        for member in vars(kind).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, types.FunctionType):
                yield from self._function(function)

    def _function(self, function: types.FunctionType) -> Iterator[str | bytes]:
        yield _name(function)
        yield function.__name__
        if str(function.__globals__.get("__name__")).startswith("torch._"):
            # Around what was compiled are guards and caches; functools.wraps keeps what it was.
            yield self.digest(vars(function).get("__wrapped__"))
            return
        if not _is_packaged(function) and not self._read(function):
            yield self.digest(function.__code__)
        yield self.digest((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not set yet
                continue
            yield self.digest(content)

    def _read(self, value: type | types.FunctionType) -> bool:
        """Keep the source of a class or function; False where there is none, as at a prompt."""
        is_script = value.__module__ in (None, "__main__")
        file = getattr(sys.modules.get(value.__module__ or ""), "__file__", None)
        name = _name(value) if is_script or not file else value.__module__
        if name in self.sources:
            return True
        try:
            if name == value.__module__ and file:
                self.sources[name] = Path(file).read_bytes()
            else:
                self.sources[name] = inspect.getsource(value).encode()
        except (OSError, TypeError):
            return False
        return True


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_packaged(value: Any) -> bool:
    top = (value.__module__ or "").split(".")[0]
    if top == "__main__":  # whatever program runs the prompt
        return False
    file = getattr(sys.modules.get(value.__module__ or ""), "__file__", None) or ""
    is_known = top in ("torch", "torchvision", "embedx") or top in sys.stdlib_module_names
    return is_known or "site-packages" in file or "dist-packages" in file
