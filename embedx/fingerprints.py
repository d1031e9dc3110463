"""What tells files, weights and code apart: the same in every process, on every machine."""

import contextvars
import copyreg
import dis
import functools
import hashlib
import os
import random
import re
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embedx.errors import ModelError


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_sha256(module: nn.Module) -> str:
    """SHA-256 of a network's parameters and buffers, saved or not: names, types, shapes, bytes.

    Of one that goes by several names, the others say which it is.

    Raises:
        ModelError: A tensor holds no values yet, or is not stored densely.
    """
    digest = hashlib.sha256()
    for name, tensor, first in _named_tensors(module):
        if first != name:
            digest.update(f"{name}\0is {first}\0".encode())
            continue
        if isinstance(tensor, nn.parameter.UninitializedParameter) or tensor.is_meta:
            raise ModelError(
                f"{type(module).__name__} has no values for {name} yet; run it once on an example, "
                "or load its weights, first"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ModelError(f"{name} of {type(module).__name__} is not a dense tensor")
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_buffer(tensor))
    return digest.hexdigest()


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Each parameter and buffer by each of its names, with the first of them."""
    firsts: dict[int, str] = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        yield name, tensor, firsts.setdefault(id(tensor), name)


def state_marks(module: nn.Module) -> dict[str, str]:
    """What shows that a parameter or buffer has changed, by its name: quicker than a hash.

    It is the same in every process; of tensors without values it is their kind alone.
    """
    return {
        name: f"is {first}" if first != name else _mark(tensor)
        for name, tensor, first in _named_tensors(module)
    }


def _mark(tensor: Tensor) -> str:
    form = f"{type(tensor).__name__} {tensor.dtype}"
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return form
    if tensor.is_nested:
        return " ".join([form, *map(_mark, tensor.detach().unbind())])
    dense = tensor.detach()
    dense = dense.dequantize() if dense.is_quantized else dense
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    return f"{form} {tuple(tensor.shape)} {zlib.crc32(_buffer(dense))}"


def _buffer(tensor: Tensor) -> memoryview:
    value = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return value.reshape(-1).view(torch.uint8).numpy().data


def code_sha256(module: nn.Module, *, arguments: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of what a network computes with its weights, as far as it can be read.

    Weights alone do not say it: a ReLU may have become a Tanh. Hashed are the structure, the
    attributes and what they hold, functions among them, hooks, the arguments it was made with, and
    of classes and functions that no package defines the code that is loaded, with their attributes
    and the global variables that the code reads and does not set. Not followed are what a function
    imports when it is called, tensors in lists and dicts that are global, and what only C code
    holds.

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
    for hooks in (everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks):
        parts += reader.hooks(hooks)  # nothing where there are none, as before they were read
    parts += reader.variables()
    return _hash(parts).hex()


def value_sha256(value: Any) -> str:
    """SHA-256 of a value by its content: a function, an object, a network with its weights.

    It is read as :func:`code_sha256` reads what an attribute holds.
    """
    reader = _Reader({})
    return _hash([reader.digest(value), *reader.variables()]).hex()


def methods(kind: type) -> Iterator[Any]:
    """The functions that a class and its bases define, and whatever else can be called there."""
    for base in kind.__mro__[:-1]:
        for member in vars(base).values():
            yield from _functions(member)


def _functions(member: Any) -> Iterator[Any]:
    """What a member of a class calls: itself, or what a property or a wrapper is made of."""
    if isinstance(member, types.FunctionType):
        yield member
    elif isinstance(member, property):
        yield from filter(None, (member.fget, member.fset, member.fdel))
    elif isinstance(member, (staticmethod, classmethod)):
        yield from _functions(member.__func__)
    elif isinstance(member, (functools.partialmethod, functools.cached_property)):
        yield from _functions(member.func)
    elif callable(member) and not isinstance(member, type):
        yield member


def _hash(parts: Iterable[str | bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))  # "a" "bc" is not "ab" "c"
        digest.update(content)
    return digest.digest()


_PLAIN = frozenset([bool, int, float, complex, str, types.NoneType, types.EllipsisType])
_DEEPEST = 100  # of values inside one another; a longer chain, which would exhaust Python's stack,
_PIECES_MOST = 10_000  # is read in pieces: so many, for one that makes its next link when asked
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_WEIGHTS = ("_parameters", "_buffers", "training")
# Lightning's trainer holds the data and the state of a training, and no pass reads it.
_TENSORS = frozenset([Tensor, nn.Parameter, nn.Buffer])
_PASSED_OVER = frozenset([*vars(nn.Module()), "_trainer"])


class _Reader:
    """Digests of values, by content; the global variables that code reads are kept beside.

    Args:
        registered: ``{id: name}`` of modules that are described elsewhere.
    """

    def __init__(self, registered: Mapping[int, str]) -> None:
        self._read: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._asked: dict[int, set[str]] = {}  # of a module: which of its variables may be read
        self._passed_on: dict[int, types.ModuleType] = {}  # read where they are, by any code
        self._names: set[str] = set()  # of attributes and variables, in all code so far
        self._written: set[tuple[int, str]] = set()
        self._registered = registered
        self._open: dict[int, int] = {}
        self._done: dict[int, tuple[Any, bytes]] = {}  # the value too: ids are used again
        self._deep: list[Any] = []

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
            self._deep.append(value)
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
        for key in _BACKWARD_HOOKS:
            yield from self.hooks(vars(module).get(key, {}))
        if isinstance(module, torch.jit.ScriptModule):
            yield from self._scripted(module)
            return
        computed = {  # of the older weight_norm and spectral_norm, in every pass anew
            getattr(hook, "name", None)
            for hook in module._forward_pre_hooks.values()
            if type(hook).__module__.startswith("torch.nn.utils.")
        }
        kind = type(module)
        if kind.train is not nn.Module.train or kind.eval is not nn.Module.eval:
            yield str([child.training for child in module.modules()])  # they may leave it so
        for key, value in sorted(vars(module).items()):
            if key not in _PASSED_OVER | computed and not key.startswith("_torchdynamo"):
                yield key
                yield self.digest(value)
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and (type(tensor) not in _TENSORS or _attributes(tensor)):
                yield key  # such as the scale of a quantized weight
                yield self.digest(type(tensor))
                yield self.digest(_attributes(tensor))

    def variables(self) -> list[str | bytes]:
        """What is left when all was read: the global variables that the code so far refers to, and
        those that these do; and whatever lies too deep to have been read in its place.
        """
        found: dict[tuple[int, str], list[str | bytes]] = {}
        deep: list[bytes] = []
        while True:
            for module in list(self._passed_on.values()):
                self._read_of(module, self._names)
            waiting = [key for key in self._read if key not in found]
            if not waiting and not self._deep:
                break
            for key in waiting:
                where, value = self._read[key]
                found[key] = [f"{where}.{key[1]}", self._variable(value)]
            pieces, self._deep = self._deep, []
            for value in pieces:
                if id(value) not in self._done and len(deep) < _PIECES_MOST:
                    deep.append(self.digest(value))
        settings = [parts for key, parts in found.items() if key not in self._written]
        return [part for parts in sorted(settings, key=str) for part in parts] + sorted(deep)

    def _variable(self, value: Any) -> bytes:
        if isinstance(value, types.ModuleType):  # its variables that are read count by themselves
            return _hash([value.__name__])
        return self.digest(_without_tensors(value))

    def hooks(self, hooks: Mapping[int, Any]) -> list[bytes]:
        """What they are, of ours what they decide, which is nothing where they only look.

        The keys are left out: they count within a process.
        """
        found = []
        for hook in hooks.values():
            owner = getattr(hook, "func", hook)
            is_ours = str(getattr(owner, "__module__", "")).startswith("embedx.")
            what = getattr(owner, "decides", None) if is_ours else hook
            if what is not None:
                found.append(self.digest(what))
        return found

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
            for key in [key for key in value if not _is_of_device(key, value[key])]:
                yield self.digest(key)
                yield self.digest(value[key])
        elif isinstance(value, types.ModuleType):
            yield value.__name__
            if not is_package(value.__name__):  # what is read of it is not known
                for key, member in sorted(vars(value).items()):
                    if getattr(member, "__module__", None) == value.__name__:
                        yield key
                        yield self.digest(member)
                self._passed_on[id(value)] = value
        elif (content := _content(value)) is not None:
            yield self.digest(content)
        elif isinstance(value, types.CodeType):
            yield from (value.co_code, value.co_exceptiontable)
            yield self.digest((value.co_flags, value.co_argcount, value.co_kwonlyargcount))
            yield self.digest((value.co_names, value.co_varnames, value.co_consts))
            yield self.digest((value.co_freevars, value.co_cellvars))
        elif isinstance(value, type):
            for base in value.__mro__:
                yield from self._class(base)
            if not _is_packaged(kind):  # its attributes are read through the class
                yield self.digest(kind)
        elif isinstance(value, types.MethodType):
            yield self.digest(value.__func__)
            yield self.digest(value.__self__)
        elif isinstance(value, types.BuiltinFunctionType):
            yield value.__qualname__
            yield self.digest(value.__self__)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, torch.jit.ScriptFunction):
            yield from self._scripted(value)
        elif isinstance(value, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):
            yield str(value)  # with its library
        elif any(value is one for one in _shared_generators()):
            yield "shared"
        elif isinstance(value, torch.Generator):
            yield _buffer(value.get_state())
        elif kind.__module__.startswith("torch._"):  # what compiles and traces, and operators
            yield str(getattr(value, "__name__", ""))
            # Of torch.library.custom_op: what it was written as, and for other devices.
            yield self.digest(getattr(value, "_init_fn", None))
            yield self.digest(getattr(value, "_backend_fns", None))
        elif kind.__module__.startswith("triton."):  # a kernel with the caches of its launches
            yield self.digest(getattr(value, "fn", None))
        # The module of a graph has it as a text too. Devices never decide what rows are.
        elif not isinstance(value, (torch.fx.Graph, torch.device)):
            yield from self._object(value)

    def _tensor(self, tensor: Tensor) -> Iterator[str | bytes | memoryview]:
        if tensor.is_nested:  # whose shape torch does not give, or numbers as a process made it
            yield f"{tensor.dtype} nested {tensor.layout}"
            yield from map(self.digest, tensor.detach().unbind())
            return
        yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            return
        dense = tensor.dequantize() if tensor.is_quantized else tensor
        yield _buffer(dense if dense.layout == torch.strided else dense.to_dense())
        if type(tensor) not in _TENSORS or _attributes(tensor):
            yield self.digest(type(tensor))
            yield self.digest(_attributes(tensor))

    def _object(self, value: Any) -> Iterator[str | bytes]:
        """What pickle would keep of it: what it is made of without caches, locks and addresses."""
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            kept = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # each type that cannot be pickled raises its own
            kept = (getattr(value, "__dict__", None),)
        yield self.digest(type(value))
        if isinstance(kept, str):  # found by its name, such as a function that caches another
            yield f"{getattr(value, '__module__', None)}.{kept}"
            yield self.digest(getattr(value, "__dict__", {}).get("__wrapped__"))
            return
        for part in kept:  # the items of a list or dict come as an iterator
            yield self.digest(list(part) if isinstance(part, Iterator) else part)

    def _class(self, kind: type) -> Iterator[str | bytes]:
        yield _name(kind)
        if _is_packaged(kind):  # by its name, unless somebody put a method of his own into it
            for key, member in vars(kind).items():
                for function in _functions(member):
                    if isinstance(function, types.FunctionType) and not _is_packaged(function):
                        yield from (key, self.digest(function))
            return
        for key, member in vars(kind).items():
            if key in _OF_CLASSES:
                continue
            yield key
            functions = list(_functions(member))
            yield from map(self.digest, functions)
            if not functions or isinstance(member, functools.partialmethod):
                yield self.digest(member)

    def _function(self, function: types.FunctionType) -> Iterator[str | bytes]:
        yield _name(function)
        yield function.__name__
        if str(function.__globals__.get("__name__")).startswith("torch._dynamo"):
            # Around what was compiled are guards and caches; functools.wraps keeps what it was.
            yield self.digest(vars(function).get("__wrapped__"))
            return
        if not _is_packaged(function):
            yield self.digest(function.__code__)
            self._follow(function)
        # A wrapper of torch's, such as that of no_grad(), is said to be of what it wraps.
        if not (_is_packaged(function) and is_package(str(function.__module__))):
            yield from self._of_function(function)
        yield self.digest((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not set yet
                continue
            yield self.digest(content)

    def _of_function(self, function: types.FunctionType) -> Iterator[str | bytes]:
        """Its attributes, less those that it sets itself, as of global variables."""
        if not vars(function):
            return
        written = {
            read.argval
            for code in _codes(function.__code__)
            for read in dis.get_instructions(code)
            if read.opname == "STORE_ATTR"
        }
        for key, value in sorted(vars(function).items()):
            if key not in written and not key.startswith("_torchdynamo"):
                yield key
                yield self.digest(_without_tensors(value))

    def _scripted(self, scripted: Any) -> Iterator[str | bytes]:
        """A function or module of TorchScript: its code, and what that names and does not show."""
        yield _without_numbers(str(getattr(scripted, "code", "")))
        graph = getattr(scripted, "inlined_graph", None)
        if graph is None:  # it has no forward
            return
        outer = scripted.graph
        if outer.findAllNodes("prim::CallFunction"):  # whose code stands elsewhere
            yield _without_numbers(re.sub(r" # .*|0x[0-9a-f]+", "", str(graph)))
        constants = [node.output() for node in graph.findAllNodes("prim::Constant")]
        constants = [one for one in constants if "value" in one.node().attributeNames()]
        held = [one.toIValue() for one in constants]
        are_tensors = (one.type().kind() == "TensorType" for one in constants)  # of one number too
        if any(are_tensors) or any(type(value) not in _PLAIN for value in held):
            yield self.digest(held)
        for node in graph.findAllNodes("prim::GetAttr"):
            owner, name = _owner(scripted, node), node.s("name")
            described = (owner._modules, owner._parameters, owner._buffers, ("training",))
            if not any(name in names for names in described):
                yield name
                yield self.digest(getattr(owner, name))

    def _follow(self, function: types.FunctionType) -> None:
        """Keep the global variables that a function reads, also those in modules of one's own."""
        variables = function.__globals__
        for code in _codes(function.__code__):
            self._names.update(code.co_names)
            reads = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
            for at, read in enumerate(reads):
                if read.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    self._keep(variables, read.argval, code.co_names)
                    self._pass_on(variables.get(read.argval), reads, at + 1)
                elif read.opname == "STORE_GLOBAL":  # a counter, or what is made on first use
                    self._written.add((id(variables), read.argval))

    def _keep(self, names: Mapping[str, Any], name: str, attributes: Iterable[str]) -> None:
        if name in names:
            self._read.setdefault((id(names), name), (names.get("__name__"), names[name]))
            if _is_ones_own(names[name]):
                self._read_of(names[name], attributes)

    def _read_of(self, module: types.ModuleType, attributes: Iterable[str]) -> None:
        """Keep the variables of a module that code with these names may read."""
        asked = self._asked.setdefault(id(module), set())
        new = set(attributes) - asked
        asked |= new
        # By these any of them may be read.
        by_name = {"getattr", "vars", "__dict__"} & new
        for name in sorted(vars(module) if by_name else new):
            if not name.startswith("__"):
                self._keep(vars(module), name, attributes)

    def _pass_on(self, value: Any, reads: Sequence[dis.Instruction], at: int) -> None:
        """Keep a module that code goes on with as a value: others may read its attributes."""
        while _is_ones_own(value) and reads[at].opname in _OF_ATTRIBUTES:
            value, at = vars(value).get(reads[at].argval), at + 1
        if _is_ones_own(value):
            self._passed_on[id(value)] = value


_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
# What a class statement leaves beside the members that were written in it.
_OF_CLASSES = frozenset(
    [
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__"),
        *("__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__"),
        *("__static_attributes__", "__abstractmethods__", "_abc_impl"),
        *("__parameters__", "__orig_bases__"),
    ]
)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _without_numbers(code: str) -> str:
    """Code of TorchScript less the numbers of types, by the order in which a process made them."""
    return re.sub(r"___torch_mangle_\d+\.", "", code)


def _owner(scripted: Any, node: Any) -> Any:
    """The module of TorchScript whose attribute a node of its graph reads."""
    before = node.input().node()
    if before.kind() != "prim::GetAttr":
        return scripted
    return getattr(_owner(scripted, before), before.s("name"))


def _attributes(tensor: Tensor) -> dict[str, Any]:
    """What is kept on a tensor, less what compiling notes there in a first pass."""
    return {key: value for key, value in vars(tensor).items() if not key.startswith("_dynamo")}


def _is_of_device(key: Any, value: Any) -> bool:
    is_name = isinstance(key, str) and key.partition(":")[0] in ("cpu", "cuda", "mps")
    return isinstance(key, torch.device) or (is_name and isinstance(value, Tensor))


def _content(value: Any) -> list[Any] | None:
    """What is in a value of Python's own that cannot be pickled; None for any other."""
    if isinstance(value, weakref.ReferenceType):
        return [value()]
    if isinstance(value, types.MappingProxyType):
        return [dict(value)]
    if isinstance(value, threading.local):
        return [vars(value)]
    if isinstance(value, contextvars.ContextVar):
        try:
            return [value.get()]  # its default, if it has one
        except LookupError:
            return []
    if isinstance(value, torch.ScriptObject):  # such as weights that quantization has packed
        return [value.__getstate__()] if hasattr(value, "__getstate__") else []
    if isinstance(value, memoryview):
        return [value.format, value.shape, value.tobytes()]
    if isinstance(value, (type({}.keys()), type({}.values()), type({}.items()))):
        return list(value)
    return None


def _shared_generators() -> list[Any]:
    """The sources of random numbers that all code shares, whose state is nobody's own."""
    of_gpus = torch.cuda.default_generators
    shared = getattr(random.random, "__self__", None), getattr(np.random.rand, "__self__", None)
    return [torch.default_generator, *of_gpus, *shared]


def _without_tensors(value: Any, *, depth: int = 5) -> Any:
    """A list or dict that a variable holds, less what hooks and caches put there in a pass.

    Settings stand in dicts, and dicts within: of these tensors alone are left out, and what beside
    a dict holds some.
    """
    if type(value) is list:
        return [item for item in value if not _holds_tensors(item)]
    if isinstance(value, dict):
        return {
            key: _without_tensors(item, depth=depth - 1) if depth else item
            for key, item in value.items()
            if isinstance(item, (np.ndarray, dict if depth else np.ndarray))
            or not _holds_tensors(item)
        }
    return value


def _holds_tensors(value: Any, *, depth: int = 5) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    items: Iterable[Any] = ()
    if depth and isinstance(value, (dict, list, tuple)):  # which may hold themselves
        items = value.values() if isinstance(value, dict) else value
    return any(_holds_tensors(item, depth=depth - 1) for item in items)


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_packaged(value: type | types.FunctionType) -> bool:
    """Whether a class, or the module whose variables a function reads, is of a package."""
    if isinstance(value, types.FunctionType):  # its __module__ may be that of what it wraps
        return is_package(str(value.__globals__.get("__name__")))
    return is_package(str(value.__module__))


def _is_ones_own(value: Any) -> bool:
    """Whether it is a module that no package defines."""
    return isinstance(value, types.ModuleType) and not is_package(value.__name__)


def is_package(module: str) -> bool:
    top = module.partition(".")[0]
    if top == "__main__":  # whatever program runs the prompt
        return False
    if top in ("torch", "torchvision", "embedx", *sys.builtin_module_names):
        return True
    # A module of one's own may have a name of the standard library's, such as code.
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if not file:
        return top in sys.stdlib_module_names
    parts = Path(file).parts
    return "site-packages" in parts or "dist-packages" in parts or _STDLIB in Path(file).parents


_STDLIB = Path(os.__file__).parent
