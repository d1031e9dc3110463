"""Which networks are known well enough to run otherwise than they are written, and folding them.

Folded is a batch normalization into the convolution before it, while a network only runs forward.
"""

import contextlib
import copy
import functools
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from embedx.fingerprints import is_package, methods
from embedx.points import Point

# Whose networks are functions of their input: they keep nothing between layers or passes, and draw
# nothing. Of transformers that is true of some alone: others mask at random, or keep frequencies.
_ENCODERS = "albert|bert|camembert|distilbert|electra|mpnet|roberta|xlm_roberta"
_KNOWN = (
    *("torch.nn.", "torchvision.", "timm.", "efficientnet_lite_pytorch."),
    *(
        "transformers.activations.",
        *(f"transformers.models.{name}." for name in _ENCODERS.split("|")),
    ),
)
# Where methods of their classes, and what is wrapped around these, come from.
_WRITERS = ("torch.", "transformers.", *_KNOWN, "contextlib.", "functools.", "typing_extensions.")

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_known(module: nn.Module) -> bool:
    """Whether all code of a network is of libraries whose networks keep nothing, and has no hooks.

    Such a network may be traced, stopped in the middle of a pass, and given its input in another
    memory layout. One whose methods were replaced, on an instance or on a class, is not known, nor
    one that holds a function of the user's own, or a weight of a type that does other things.
    """
    everywhere = nn.modules.module
    return (
        not any(getattr(everywhere, f"_global{kind}") for kind in _HOOKS)
        and all(
            f"{type(child).__module__}.".startswith(_KNOWN)
            and not any(getattr(child, kind) for kind in _HOOKS)
            and not _has_own_methods(child)
            and not any(_is_own_code(vars(child)[key]) for key in vars(child).keys() - _USUAL)
            and all(_is_plain(weight) for weight in child._parameters.values())
            and all(_is_plain(buffer) for buffer in child._buffers.values())
            and not _attends_in_its_own_way(child)
            for child in module.modules()
        )
        and not any(_is_patched(kind) for kind in {type(child) for child in module.modules()})
    )


def is_forward_known(module: nn.Module) -> bool:
    """Whether what a layer does is written by a library: a class of one's own may do otherwise."""
    writer = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return "forward" not in vars(module) and f"{writer.__module__}.".startswith(_WRITERS)


def is_by_sample(module: nn.Module) -> bool:
    """Whether a network gives each sample what it would give it alone, as far as can be told.

    Its code is known, and it is made of layers that look at one sample at a time and draw nothing.
    Of torch's own these are listed: some see the whole batch by their options, as a normalization
    without running statistics does, or by the shape of what enters, as recurrent and attention
    layers do.
    """
    modules = dict(module.named_modules())
    return is_known(module) and all(
        _is_layer_by_sample(child, within=modules.get(name.rpartition(".")[0], module))
        for name, child in modules.items()
    )


def _is_layer_by_sample(module: nn.Module, *, within: nn.Module) -> bool:
    where, name = type(module).__module__, type(module).__name__
    if name == "Lambda":  # of torchvision: any function of a library, along any axis
        return False
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        return False
    if isinstance(module, nn.MultiheadAttention):
        # Of (n, d) it takes n for the tokens; the networks of these libraries give it (n, t, d).
        return module.batch_first and not type(within).__module__.startswith("torch.nn.")
    if not f"{where}.".startswith("torch.nn."):
        return not where.startswith("torchvision.models.detection.")  # pads to the largest
    axis = getattr(module, _AXES.get(name, ""), 1)
    is_listed = _BY_SAMPLE.fullmatch(name) is not None
    return is_listed and isinstance(axis, int) and (axis > 0 or axis == -1)


# Which argument says along which axis: 0 is that of the samples, and -2 may be.
_AXES = {
    **dict.fromkeys(["Softmax", "Softmin", "LogSoftmax", "GLU", "Unflatten"], "dim"),
    "Flatten": "start_dim",
}
_BY_SAMPLE = re.compile(
    "Identity|Sequential|(Module|Parameter)(List|Dict)|Fold|Unfold"
    "|Linear|NonDynamicallyQuantizableLinear|Bilinear|Embedding|(Conv|ConvTranspose)[123]d"
    "|(BatchNorm|InstanceNorm)[123]d|SyncBatchNorm|LayerNorm|GroupNorm|RMSNorm|LocalResponseNorm"
    "|(Max|Avg|LP|AdaptiveAvg|AdaptiveMax)Pool[123]d|(Alpha|FeatureAlpha)?Dropout([123]d)?"
    "|ReLU6?|(Leaky|P|R)ReLU|[ECSG]ELU|SiLU|Mish|(Log)?Sigmoid|Tanh|Soft(plus|sign|shrink)"
    "|Hard(shrink|sigmoid|swish|tanh)|Tanhshrink|Threshold|(Log)?Softmax|Softmin|GLU"
    "|Flatten|Unflatten|Pixel(Uns|S)huffle|ChannelShuffle|Upsample|Upsampling(Nearest|Bilinear)2d"
    "|(Constant|Zero|Reflection|Replication|Circular)Pad[123]d"
)


def _attends_in_its_own_way(module: nn.Module) -> bool:
    """Whether a network of transformers takes its attention from a function of the user's own."""
    how = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return how not in (None, "eager", "sdpa")


def _has_own_methods(module: nn.Module) -> bool:
    """Whether an attribute hides a method of the class, or the module was compiled in place."""
    kind = type(module)
    return "_compiled_call_impl" in vars(module) or any(
        callable(getattr(kind, key, None)) for key in vars(module)
    )


_USUAL = frozenset(vars(nn.Module()))


def _is_own_code(value: Any, *, depth: int = 5) -> bool:
    """Whether it is, or holds, a function or a class that none of the libraries defines."""
    held: Iterable[Any] = ()
    if isinstance(value, functools.partial):
        held = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict):
        held = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        held = value
    elif isinstance(value, types.MethodType):
        held = (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        if not f"{value.__globals__.get('__name__')}.".startswith(_WRITERS):
            return True
        held = value.__closure__ or ()  # what it is wrapped around
    elif isinstance(value, types.CellType):
        with contextlib.suppress(ValueError):  # not set yet
            held = (value.cell_contents,)
    elif isinstance(value, torch.jit.ScriptFunction):
        return True
    elif isinstance(value, nn.Module):  # in a list, where it is no layer of the network
        return not (is_known(value) and is_by_sample(value))
    elif isinstance(value, type):
        return not is_package(value.__module__)
    elif callable(value):
        held = (type(value), getattr(value, "__wrapped__", None))
    return depth > 0 and any(_is_own_code(one, depth=depth - 1) for one in held)


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether operations do with it what they do with any tensor."""
    return tensor is None or type(tensor) is Tensor or type(tensor).__module__ == _OF_WEIGHTS


_OF_WEIGHTS = "torch.nn.parameter"


def _is_patched(kind: type) -> bool:
    """Whether a method of a class comes from elsewhere; ``functools.wraps`` does not hide it."""
    return any(
        not isinstance(method, types.FunctionType)
        or not f"{method.__globals__.get('__name__')}.".startswith(_WRITERS)
        for method in methods(kind)
    )


@contextlib.contextmanager
def folded(module: nn.Module, points: Sequence[Point]) -> Iterator[int]:
    """Run a network in eval mode with one layer less for each pair that nobody looks between.

    A convolution whose output goes into a batch normalization and nowhere else takes over its
    scale and shift; the normalization passes on what it gets. What the network gives changes by
    rounding alone. Afterwards every module is back in its place.

    Args:
        module: The network, in eval mode, of which :func:`is_known` is true: tracing runs its code
            on stand-ins for tensors.
        points: What will be captured: no pair is folded that lies across one of them.

    Yields:
        How many pairs were folded.

    References:
        Jacob et al. 2018, arXiv:1712.05877, section 3.2.
    """
    modules = dict(module.named_modules())
    # One that goes by two names would be replaced under one of them, and be called by the other.
    names = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    with contextlib.ExitStack() as stack:
        pairs = [
            pair
            for pair in _pairs(module)
            if not _is_seen(pair, points) and all(names[id(modules[name])] == 1 for name in pair)
        ]
        for conv_name, norm_name in pairs:
            conv, norm = modules[conv_name], modules[norm_name]
            fused = fuse_conv_bn_eval(conv, norm)
            fused.to(memory_format=torch.channels_last)
            for name, replacement in ((conv_name, fused), (norm_name, nn.Identity())):
                parent_name, _, own_name = name.rpartition(".")
                parent = modules[parent_name]
                stack.callback(setattr, parent, own_name, getattr(parent, own_name))
                setattr(parent, own_name, replacement)
        yield len(pairs)


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """Names of convolutions and the normalizations that alone take what they give."""
    if not any(type(child) is nn.BatchNorm2d for child in module.modules()):
        return []
    try:
        with _attributes_put_back(module):
            graph = fx.Tracer().trace(module)
    except Exception:  # what depends on values of tensors cannot be traced, and runs as it is
        return []
    calls = [node for node in graph.nodes if node.op == "call_module"]
    targets = [str(node.target) for node in calls]
    pairs = []
    for node in calls:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        pair = str(before.target), str(node.target)
        if all(targets.count(name) == 1 for name in pair) and _is_foldable(
            module.get_submodule(pair[0]), module.get_submodule(pair[1])
        ):
            pairs.append(pair)
    return pairs


@contextlib.contextmanager
def _attributes_put_back(module: nn.Module) -> Iterator[None]:
    """Stand-ins for tensors that a traced pass leaves in modules, as in a cache, are taken out."""
    kinds = (dict, list, set)
    held = []
    for child in module.modules():
        own = {key: value for key, value in vars(child).items() if key not in _USUAL}
        held.append((child, own, {k: copy.copy(v) for k, v in own.items() if type(v) in kinds}))
    try:
        yield
    finally:
        for child, own, filled in held:
            for key in vars(child).keys() - _USUAL - own.keys():
                del vars(child)[key]
            vars(child).update(own)
            for key, before in filled.items():
                own[key].clear()
                (own[key].extend if isinstance(before, list) else own[key].update)(before)


def _is_foldable(conv: nn.Module, norm: nn.Module) -> bool:
    return (
        type(conv) is nn.Conv2d
        and type(norm) is nn.BatchNorm2d
        and norm.running_mean is not None
        and not conv.training
        and not norm.training
        and conv.weight.dtype == norm.running_mean.dtype
        and not hasattr(conv, "parametrizations")
        and not hasattr(norm, "parametrizations")
    )


def _is_seen(pair: tuple[str, str], points: Sequence[Point]) -> bool:
    """Whether a point shows what lies between the two, itself or as the edge of a block."""
    for point in points:
        conv_inside, norm_inside = (f"{name}.".startswith(f"{point.layer}.") for name in pair)
        if conv_inside not in (norm_inside, point.is_at_input):
            return True
    return False
