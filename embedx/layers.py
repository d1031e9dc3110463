"""The stage ``layers``: every module of a model, with its shapes, parameters, cost and time."""

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from embedx import derived, hooks
from embedx.checks import checked, kind_of
from embedx.disk import replace_file
from embedx.errors import ConfigError, LayerError, ModelError, listed, number_of, short
from embedx.models import Model
from embedx.passes import Inputs, run_model, undisturbed
from embedx.points import Point, find_penultimate, resolve_points
from embedx.tables import aligned, as_csv

log = logging.getLogger("embedx")

Format = Literal["tree", "csv", "json"]
FORMATS: dict[str, Format] = {".csv": "csv", ".json": "json"}
PICTURE_PX = 224  # of a model that does not say what enters it
_MOST_SHOWN = 36  # characters of a shape in the tree
_MOST_PASSES, _PASSES_NS = 10, 500_000_000
_MOST_PARTS = 4  # of a tuple, or ways in which a layer was called
if TYPE_CHECKING:
    Network = Model | nn.Module
else:  # what is given instead of one is told in words of its own, not by the hint
    Network = Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """One row of the table. Figures are of the layer with all that is within it.

    Attributes:
        name: Dotted name, as a capture point has it; empty for the model itself.
        type: Class of the module.
        input_shape: Of the tensors that enter it in the example pass, as ``1x3x224x224``; empty
            where it did not run. What differs from call to call is parted by ``|``.
        output_shape: The same of what it gives; a tuple as ``(1x4x8, 1x8)``.
        calls: How often it ran in the pass.
        parameters: How many numbers, each tensor that is shared or tied once, where it comes first.
        trainable_parameters: Those of them that require a gradient.
        size_bytes: Of parameters and buffers.
        multiply_adds: Of the pass.
        flops: Floating-point operations of the pass, two for each multiply-add.
        time_share: Of one warm pass, from 0 to 1.
        own_parameters: Without the layers within it, as all that follow; the sum over all rows is
            the figure of the model. What ``depth`` folds into a layer is its own.
        own_trainable_parameters: See above.
        own_size_bytes: See above.
        own_flops: What its code computes itself, outside of the layers that it calls.
        own_time_share: See above.
        penultimate: The point that ``layers=penultimate`` captures, if it is of this layer, or "".
        other_names: Where else the same module is in the model, parted by blanks.
    """

    name: str
    type: str
    input_shape: str
    output_shape: str
    calls: int
    parameters: int
    trainable_parameters: int
    size_bytes: int
    multiply_adds: int
    flops: int
    time_share: float
    own_parameters: int
    own_trainable_parameters: int
    own_size_bytes: int
    own_flops: int
    own_time_share: float
    penultimate: str
    other_names: str


_COLUMNS = [field.name for field in dataclasses.fields(Layer)]


@dataclasses.dataclass(frozen=True)
class LayerTable:
    """The table of layers of a model.

    Attributes:
        model: Its name.
        layers: A row a module in the order of ``named_modules()``, the model itself first.
        n_layers: How many there are, with those that ``depth`` folds.
        pass_s: Seconds of the pass that the shares of time are of.
        n_passes: Of how many it was the fastest; as many as take half a second, at most ten.
        device: Where it ran.
        not_counted: Operations that ran and that the figures leave out: no formula is known.
    """

    model: str
    layers: list[Layer]
    n_layers: int
    pass_s: float
    n_passes: int
    device: str
    not_counted: tuple[str, ...]

    @property
    def penultimate(self) -> str:
        """The point that ``layers=penultimate`` captures; "" where there is none."""
        return next((layer.penultimate for layer in self.layers if layer.penultimate), "")

    def as_bytes(self, format: Format) -> bytes:
        """The table as a file holds it, in UTF-8.

        Args:
            format: ``csv`` for the rows, with the attributes of :class:`Layer` as heads; ``json``
                for one object, with the rows under ``layers``; ``tree`` as in a terminal.
        """
        if format == "csv":
            return as_csv([dataclasses.asdict(layer) for layer in self.layers], _COLUMNS)
        about = {"penultimate": self.penultimate, **dataclasses.asdict(self)}
        text = json.dumps(about, indent=1) if format == "json" else str(self)
        return f"{text}\n".encode("utf-8", "backslashreplace")

    def lines(self) -> list[str]:
        """The table as a tree for a terminal, and below it what its figures are of."""
        heads = ["layer", "type", "input", "output", "parameters", "size", "multiply-adds", "FLOPs"]
        cells = [[*heads, "time", "calls"]]
        marks = [""]
        for layer in self.layers:
            depth = _depth(layer.name)
            cells.append(
                [
                    "  " * depth + (layer.name or self.model),
                    layer.type,
                    short(layer.input_shape, most=_MOST_SHOWN),
                    short(layer.output_shape, most=_MOST_SHOWN),
                    f"{layer.parameters:,}" if layer.parameters else "-",
                    _magnitude(layer.size_bytes, "B"),
                    _magnitude(layer.multiply_adds),
                    _magnitude(layer.flops),
                    f"{layer.time_share:.1%}" if layer.calls or layer.time_share else "-",
                    str(layer.calls),
                ]
            )
            about = [f"<- penultimate, {layer.penultimate}"] if layer.penultimate else []
            if layer.other_names:
                about.append(f"also {layer.other_names}")
            if layer.parameters and layer.trainable_parameters < layer.parameters:
                about.append("in part frozen" if layer.trainable_parameters else "frozen")
            marks.append(", ".join(about))
        rows = zip(aligned(cells, n_texts=4), marks, strict=True)
        return [f"{row}  {mark}".rstrip() for row, mark in rows] + self.summary()

    def summary(self) -> list[str]:
        """Totals, and what they leave out."""
        whole = self.layers[0]
        cost = "no multiply-adds"
        if whole.flops:
            cost = (
                f"{_magnitude(whole.multiply_adds)} multiply-adds, {_magnitude(whole.flops)} FLOPs"
            )
        lines = [
            f"{self.model}: {number_of(self.n_layers, 'layer', 'layers')}, {whole.parameters:,} "
            f"parameters ({whole.trainable_parameters:,} trainable), "
            f"{_magnitude(whole.size_bytes, 'B') if whole.size_bytes else '0 B'} with buffers",
            f"{cost}, for {whole.input_shape}; time is the share of one warm pass, "
            + ("the only one" if self.n_passes == 1 else f"the fastest of {self.n_passes}")
            + f", {self.pass_s * 1e3:.2f} ms on {self.device}; other runs give others"
            + (", quite others where the machine is busy" if self.n_passes == 1 else ""),
        ]
        if self.not_counted:
            lines.append(
                f"multiply-adds and FLOPs leave out {listed(self.not_counted)}, of which no "
                "formula is known"
            )
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


@checked
def layers(
    model: Network,
    *,
    example: Inputs | None = None,
    depth: int | None = None,
    format: Format | None = None,
    out: str | os.PathLike[str] | None = None,
) -> LayerTable:
    """List the layers of a model: shapes, parameters, multiply-adds, and shares of the time.

    Two passes of one picture or text show them, the first to count and the second to time.
    Matrix products, convolutions, attention and recurrent layers count, wherever in the code of the
    model they stand; norms, activations, poolings, additions and lookups do not. Padding counts,
    and so does what a mask leaves out. The model is left as it was; one with lazily sized layers is
    copied.

    Args:
        model: The model; ``model.input_size`` is the side in px of the example.
        example: What enters a live network: a tensor, several in their order, or a mapping by the
            names of its arguments. A black picture, or a short text, where not given.
        depth: Show names of at most so many parts, the rest folded into them; 0 for the model
            alone, null for all.
        format: ``tree`` for a terminal, ``csv`` or ``json``; null for what the ending of ``out``
            says, else a tree.
        out: A file to write the table to; null to print it.

    Returns:
        The table; as a text it is the tree.

    Raises:
        ConfigError: ``depth`` is negative, or ``model`` is no network.
        LayerError: The penultimate layer that the model names is not there, or a module takes no
            hooks.
        ModelError: The model fails on the example, or its tensors have no values (device meta).
        StoreError: ``out`` is a file that embedx did not write, or there is no space.
    """
    if depth is not None and depth < 0:
        raise ConfigError(f"depth must be 0 or more, not {depth}")
    if not isinstance(model, (Model, nn.Module)):
        raise ConfigError(
            f"model must be an nn.Module or an embedx.models.Model, not {kind_of(model)}"
        )
    path = None if out is None else Path(out)
    if path is not None:
        format = format or FORMATS.get(path.suffix.lower(), "tree")
        derived.require_ours(path, _MARKS[format])
    module, title, named = (
        (model.module, model.name, model.layer)
        if isinstance(model, Model)
        else (model, type(model).__name__.lower(), None)
    )
    if _device(module).type == "meta":
        raise ModelError(
            f"{title} is on the device meta, where tensors have no values to run it with; put it "
            "on one that has: model.to_empty(device='cpu')"
        )
    if example is None:
        example = _example(model)
    marked = None
    if named is not None:
        (marked,) = resolve_points(module, "penultimate", penultimate=named, title=title)
    else:
        with contextlib.suppress(LayerError):
            marked = find_penultimate(module)
    if any(nn.parameter.is_lazy(t) for t in [*module.parameters(), *module.buffers()]):
        log.info("%s has lazily sized layers: a copy of it is sized by the example", title)
        empty: Any = nn.parameter.UninitializedBuffer  # torch cannot copy one
        memo = {
            id(buffer): empty(device=buffer.device, dtype=buffer.dtype)
            for buffer in module.buffers()
            if nn.parameter.is_lazy(buffer)
        }
        module = copy.deepcopy(module, memo)
    seen = _observe(module, example, title=title)
    rows = _rows(module, seen, marked)
    table = LayerTable(
        model=title,
        layers=_folded(rows, depth),
        n_layers=len(rows) - 1,
        pass_s=sum(seen.spent_ns.values()) / 1e9,
        n_passes=seen.n_passes,
        device=str(_device(module)),
        not_counted=tuple(sorted(seen.not_counted)),
    )
    if path is not None:
        assert format is not None
        replace_file(path, table.as_bytes(format))
        log.info("wrote %s: %s", path, number_of(len(table.layers), "row", "rows"))
        for line in table.summary():
            log.info("%s", line)
    return table


_MARKS = {  # how a file begins that may be replaced
    "csv": as_csv([], _COLUMNS).rstrip(),
    "json": b'{\n "penultimate": ',
    "tree": b"layer ",
}


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _magnitude(value: float, unit: str = "") -> str:
    """``1.81 G``, ``46.8 MB``; ``-`` for none."""
    if not value:
        return "-"
    for prefix in ("", "k", "M", "G", "T", "P"):  # noqa: B007
        if value < 999.5:
            break
        value /= 1000
    digits = max(0, 2 - int(math.log10(value))) if prefix else 0
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _example(model: Network) -> Inputs:
    """One black picture, or one text, as the model takes it."""
    preprocess = model.preprocess if isinstance(model, Model) else None
    tokenizer = model.tokenizer if isinstance(model, Model) else None
    module = model.module if isinstance(model, Model) else model
    side = preprocess.crop_px if preprocess else PICTURE_PX
    device = _device(module)
    if tokenizer is not None:
        tokens = tokenizer.pad(tokenizer.encode(["an example"])[0])
        return {name: tensor.to(device) for name, tensor in tokens.items()}
    dtypes = [p.dtype for p in module.parameters() if p.dtype.is_floating_point]
    return torch.zeros(1, 3, side, side, device=device, dtype=dtypes[0] if dtypes else None)


# --------------------------------------------------------------------------- two passes


@dataclasses.dataclass
class _Seen:
    """What the passes show of each module, by its name."""

    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    inputs: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    outputs: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    spent_ns: Counter[str] = dataclasses.field(default_factory=Counter)
    n_passes: int = 0
    not_counted: set[str] = dataclasses.field(default_factory=set)

    def entered(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls[name] += 1
        parts = [*(("", value) for value in args), *kwargs.items()]
        shown = ", ".join(f"{key} {_shape(v)}".strip() for key, v in parts if _has_tensor(v))
        _add(self.inputs.setdefault(name, []), shown)

    def left(self, name: str, output: Any) -> None:
        _add(self.outputs.setdefault(name, []), _shape(output))


def _add(shapes: list[str], shape: str) -> None:
    if shape not in shapes and "..." not in shapes:
        shapes.append(shape if len(shapes) < _MOST_PARTS else "...")


class _Own:
    """How far a counter goes on in each module's own code, outside of the modules that it calls.

    Args:
        read: The counter, which only grows.
        own: Where it is added up, by the name of the module.
    """

    def __init__(self, read: Callable[[], int], own: Counter[str]) -> None:
        self._read = read
        self.own = own
        self._running: list[str] = []
        self._since = 0

    def entered(self, name: str, *_: Any) -> None:
        self._book()
        self._running.append(name)
        self._since = self._read()

    def left(self, name: str, *_: Any) -> None:
        self._book()
        # What ends by no Exception, such as a generator that is closed, is not seen to be left.
        while self._running and self._running.pop() != name:
            pass
        self._since = self._read()

    def _book(self) -> None:
        if self._running:
            self.own[self._running[-1]] += self._read() - self._since


def _observe(module: nn.Module, example: Inputs, *, title: str) -> _Seen:
    seen = _Seen()
    device = _device(module)
    with undisturbed(module, device=device), torch.no_grad():
        with _counter(seen.not_counted) as counter:
            flops = _Own(counter.get_total_flops, seen.flops)

            def entered(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen.entered(name, args, kwargs)
                flops.entered(name)

            def left(name: str, output: Any) -> None:
                seen.left(name, output)
                flops.left(name)

            with hooks.watched(module, entered=entered, left=left):
                run_model(module, example, title=title)
        # Other passes: to count slows small operations, and the first one is cold.
        read = _clock(device)
        clock = _Own(read, Counter())
        with hooks.watched(module, entered=clock.entered, left=clock.left):
            begun_ns, last_ns = read(), 0
            while not seen.n_passes or (
                seen.n_passes < _MOST_PASSES and read() - begun_ns + last_ns < _PASSES_NS
            ):
                clock.own = Counter()
                run_model(module, example, title=title)
                last_ns = sum(clock.own.values())
                if not seen.n_passes or last_ns < sum(seen.spent_ns.values()):
                    seen.spent_ns = clock.own
                seen.n_passes += 1
    return seen


def _clock(device: torch.device) -> Callable[[], int]:
    """Nanoseconds after all that was begun on the device is done."""
    wait: Callable[[], None] | None = None
    if device.type == "cuda":
        wait = functools.partial(torch.cuda.synchronize, device)
    elif device.type == "mps":
        wait = torch.mps.synchronize

    def read() -> int:
        if wait is not None:
            wait()
        return time.perf_counter_ns()

    return read


# --------------------------------------------------------------------------- what is counted


class _Foreign(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations that are not torch's own, which the counter passes over.

    Args:
        counted: Those that it has formulas of.
        found: Where the names of the others go.
    """

    def __init__(self, counted: set[Any], found: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace = getattr(func, "namespace", "aten")
        if namespace not in ("aten", "prim", "prims", "profiler"):
            packet = func.overloadpacket
            if packet not in self._counted:
                self._found.add(f"{namespace}::{packet.__name__}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _counter(not_counted: set[str]) -> Iterator[FlopCounterMode]:
    """torch's counter, with formulas of the fused operations that it has none of."""
    formulas = _formulas()
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with warnings.catch_warnings(), _Foreign({*counter.flop_registry}, not_counted), counter:
        # The counter has hooks of its own on all modules, and makes no use of what they see here.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are")
        yield counter


def _formulas() -> dict[Any, Callable[..., int]]:
    """Formulas of operations, by the operations that this torch has."""
    named: dict[Callable[..., int], list[str]] = {
        _attention: [
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_fused_attention_overrideable",
            "aten._scaled_dot_product_attention_math_for_mps",
        ],
        _recurrent: ["aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn"],
        _product: ["aten.mv", "aten.dot", "aten.vdot", "aten._int_mm"],
        _added_product: ["aten.addmv", "aten.addbmm"],
        _bilinear: ["aten._trilinear"],
        _packed: [
            f"quantized.{name}"
            for kind in ("linear", "linear_dynamic", "conv1d", "conv2d", "conv3d", "conv2d_dynamic")
            for name in (kind, f"{kind}_relu")
        ],
    }
    found: dict[Any, Callable[..., int]] = {}
    for formula, names in named.items():
        for name in names:
            space, _, operation = name.partition(".")
            if hasattr(getattr(torch.ops, space), operation):
                found[getattr(getattr(torch.ops, space), operation)] = formula
    return found


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    """A formula that takes the arguments themselves, not their shapes."""
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


@_raw
def _recurrent(x: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Each matrix of weights is applied at each step of each sequence."""
    # In a list, or as four arguments of one layer in one direction, biases among them.
    weights = args[0] if isinstance(args[0], (list, tuple)) else args[:4]
    n_weights: int = sum(weight.numel() for weight in weights if weight.ndim == 2)
    return 2 * x[..., 0].numel() * n_weights


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _product(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)


def _added_product(_: Any, a: Sequence[int], b: Sequence[int], *__: Any, **___: Any) -> int:
    return _product(a, b)


def _bilinear(
    a: Sequence[int],
    b: Sequence[int],
    c: Sequence[int],
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """Three factors over all their axes together: the widest of each."""
    shapes = []
    for shape, added in ((a, expand1), (b, expand2), (c, expand3)):
        whole = list(shape)
        for axis in sorted(added):
            whole.insert(axis, 1)
        shapes.append(whole)
    widest: list[int] = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return 2 * math.prod(widest)


@_raw
def _packed(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Quantized layers, whose weights ``(c_out, c_in, ...)`` are packed in an object."""
    packed: Any = next(value for value in args if isinstance(value, torch.ScriptObject))
    weight: Tensor = packed.unpack()[0]
    n_outputs: int = out_val.numel()
    return 2 * n_outputs * weight[0].numel()


# --------------------------------------------------------------------------- rows


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor)


def _shape(value: Any) -> str:
    """The shape of a tensor, or those of the tensors in a structure."""
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    if value is None:
        return "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        kept = {str(key): inner for key, inner in value.items() if inner is not None}
        return "{" + _several([f"{key} {_shape(inner)}" for key, inner in kept.items()]) + "}"
    if isinstance(value, (list, tuple)):
        return f"({_several([_shape(inner) for inner in value])})"
    return type(value).__name__


def _several(shapes: list[str]) -> str:
    more = [f"... {len(shapes)} in all"] if len(shapes) > _MOST_PARTS else []
    return ", ".join(shapes[:_MOST_PARTS] + more)


def _n_bytes(module: nn.Module, counted: set[int]) -> int:
    """Bytes of a module's own parameters and buffers that are not counted yet.

    A quantized layer keeps its weights packed in an object, which count too.
    """
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for value in vars(module).values():
        if isinstance(value, torch.ScriptObject) and hasattr(value, "unpack"):
            own += [part for part in value.unpack() if isinstance(part, Tensor)]
    n = 0
    for tensor in own:
        if id(tensor) not in counted:
            n += tensor.numel() * tensor.element_size()
            counted.add(id(tensor))
    return n


def _rows(module: nn.Module, seen: _Seen, marked: Point | None) -> list[Layer]:
    """A row a module; the figures of each with those of all whose names go on from its own."""
    modules = dict(module.named_modules())
    names = {id(child): name for name, child in modules.items()}
    others: dict[str, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if names[id(child)] != name:
            others.setdefault(names[id(child)], []).append(name)
    total_ns = sum(seen.spent_ns.values()) or 1
    own: dict[str, tuple[int, int, int, int, int]] = {}
    whole = {name: [0, 0, 0, 0, 0] for name in modules}
    counted: set[int] = set()
    sized: set[int] = set()
    for name, child in modules.items():
        new = {id(p): p for p in child.parameters(recurse=False) if id(p) not in counted}
        counted |= new.keys()
        own[name] = (
            sum(p.numel() for p in new.values()),
            sum(p.numel() for p in new.values() if p.requires_grad),
            _n_bytes(child, sized),
            seen.flops[name],
            seen.spent_ns[name],
        )
        parts = name.split(".") if name else []
        for i in range(len(parts) + 1):
            above = whole[".".join(parts[:i])]
            above[:] = [a + b for a, b in zip(above, own[name], strict=True)]
    return [
        Layer(
            name=name,
            type=type(child).__name__,
            input_shape=" | ".join(seen.inputs.get(name, [])),
            output_shape=" | ".join(seen.outputs.get(name, [])),
            calls=seen.calls[name],
            parameters=whole[name][0],
            trainable_parameters=whole[name][1],
            size_bytes=whole[name][2],
            multiply_adds=whole[name][3] // 2,
            flops=whole[name][3],
            time_share=whole[name][4] / total_ns,
            own_parameters=own[name][0],
            own_trainable_parameters=own[name][1],
            own_size_bytes=own[name][2],
            own_flops=own[name][3],
            own_time_share=own[name][4] / total_ns,
            penultimate=marked.name if marked is not None and name == marked.layer else "",
            other_names=" ".join(others.get(name, [])),
        )
        for name, child in modules.items()
    ]


def _folded(rows: list[Layer], depth: int | None) -> list[Layer]:
    """Rows down to a depth, whose lowest have as their own what is within them."""
    if depth is None:
        return rows
    return [
        dataclasses.replace(
            row,
            own_parameters=row.parameters,
            own_trainable_parameters=row.trainable_parameters,
            own_size_bytes=row.size_bytes,
            own_flops=row.flops,
            own_time_share=row.time_share,
        )
        if _depth(row.name) == depth
        else row
        for row in rows
        if _depth(row.name) <= depth
    ]
