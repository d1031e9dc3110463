"""Fingerprints: whatever changes a row changes them, and nothing else does, in any process."""

import collections
import contextvars
import dataclasses
import enum
import functools
import json
import logging
import os
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import embedx
from embedx.fingerprints import code_sha256, state_marks, state_sha256, value_sha256

from .conftest import ROOT


class Net(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        for key, value in attributes.items():
            setattr(self, key, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Mode(enum.Enum):
    A = "a"
    B = "b"


@dataclasses.dataclass
class Settings:
    k: int = 3
    names: set[str] = dataclasses.field(default_factory=lambda: set("abcdef"))


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k: object) -> None:
        self.k = k

    def scale(self, x: Tensor) -> Tensor:
        return x * self.k


def scaled(k: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor) -> Tensor:
        return x * k

    return scale


@functools.lru_cache
def kept(x: float) -> float:
    return x


def twice(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def thrice(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 3


def chain(n: int, *, end: int = 3) -> Settings:
    first = Settings(end)
    for _ in range(n):
        following = Settings()
        following.before = first  # type: ignore[attr-defined]
        first = following
    return first


def make(scale_: object) -> type:
    class Scaled:
        scale = scale_

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.scale

    return Scaled


def read(text: str, **names: Any) -> Callable[[Tensor], Any]:
    """A function of a module of one's own, which reads its global variables."""
    names["__name__"] = "mine"
    exec(text, names)
    return names["f"]


def carrying(k: int) -> nn.Parameter:
    """A weight that carries a scale, as those do that are quantized."""
    weight = nn.Parameter(torch.ones(2))
    weight.scale = k  # type: ignore[attr-defined]
    return weight


class Tripled(nn.Parameter):
    times = 3


def local(k: int) -> threading.local:
    held = threading.local()
    held.k = k
    return held


def variable(k: int) -> contextvars.ContextVar[int]:
    held = contextvars.ContextVar("held", default=0)
    held.set(k)
    return held


def module(text: str) -> types.ModuleType:
    made = types.ModuleType("of_ones_own")
    exec(text, vars(made))
    return made


def with_attribute(function: Callable[[Tensor], Any], **attributes: Any) -> Any:
    vars(function).update(attributes)
    return function


def made_by(k: int) -> Callable[[Tensor], Any]:
    """A function that holds a module, as one does that was imported where it was made."""
    held = module(f"K = {k}")

    def f(x: Tensor) -> Any:
        return x * held.K

    return f


def nested(layout: torch.layout, *, k: int = 1) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 1), torch.ones(3, 1) * k], layout=layout)


def of_kind(k: int) -> type:
    return type("Meta", (type,), {"scale": k})("Made", (), {})


def traced(k: float) -> Any:
    constant = torch.full((2,), k)
    return torch.jit.trace(lambda x: x * constant, torch.ones(2), check_trace=False)


def traced_number(k: int) -> Any:
    return torch.jit.trace(lambda x: x * k, torch.ones(2), check_trace=False)


def scripted(k: float | Tensor, *, is_frozen: bool = False) -> list[Any]:
    linear = nn.Linear(2, 2).eval()
    nn.init.constant_(linear.weight, k)
    nn.init.zeros_(linear.bias)
    if is_frozen:
        return [torch.jit.freeze(torch.jit.script(linear))]
    return [torch.jit.script(nn.Sequential(Times(k)))]


class Times(nn.Module):
    def __init__(self, k: float | Tensor) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return x * self.k


def compiled(k: int) -> Any:
    text = f"def g(x: Tensor):\n    return x * {k}\ndef f(x: Tensor):\n    return g(x) + 1\n"
    return torch.jit.CompilationUnit(text).f


def package(**members: Any) -> types.ModuleType:
    made = module("")
    vars(made).update(members)
    return made


HELD = [Settings(5), Settings(6)]
READS = "def f(x): return [x * k for _ in range(2)]"
NAMED = "def f(x): return getattr(m, 'a' + 'ct')(x)"
CALLS = "def g(x): return x * {}\ndef f(x): return g(x)"
SHARED = "def g(x): return x * m.B\ndef f(x): return g(x) * m.A"
PASSED = "def g(held): return held.K\ndef f(x): return x * g(m.inner)"
INDEXED = "def f(x): return x * m.__dict__['K']"
leaky = functools.partial(functional.leaky_relu, negative_slope=0.1)
# Each attribute beside another one that gives other rows, or may.
DIFFERENT: dict[str, tuple[Callable[[], Any], ...]] = {
    "function": (lambda: functional.relu, lambda: torch.tanh, lambda: functional.gelu),
    "function of one name": (lambda: functional.max_pool2d, lambda: functional.adaptive_max_pool2d),
    "operator": (lambda: torch.ops.aten.relu, lambda: torch.ops.aten.tanh, lambda: np.tanh),
    "lambda": (lambda: lambda x: x + 1, lambda: lambda x: x + 2),
    "closure": (lambda: scaled(1), lambda: scaled(2), lambda: kept),
    "bound": (lambda: Slotted(1).scale, lambda: Slotted(2).scale),
    "partial": (lambda: leaky, lambda: functools.partial(leaky, inplace=True)),
    "class": (lambda: nn.ReLU, lambda: nn.GELU),
    "number": (lambda: 1, lambda: 1.0, lambda: True, lambda: "1", lambda: b"1", lambda: None),
    "list": (lambda: [1, 2], lambda: [2, 1], lambda: (1, 2), lambda: [[1], 2], lambda: [1, [2]]),
    "functions": (lambda: [functional.relu], lambda: [torch.tanh], lambda: (functional.relu,)),
    "dict": (lambda: {"a": [1]}, lambda: {"a": [2]}, lambda: {"b": [1]}),
    "ordered": (
        lambda: collections.OrderedDict(a=functional.relu),
        lambda: collections.OrderedDict(a=functional.gelu),
    ),
    "set": (lambda: set("abcdef"), lambda: set("abcdeg"), lambda: frozenset("abcdef")),
    "dtype": (lambda: torch.float16, lambda: torch.float32),
    "enum": (lambda: Mode.A, lambda: Mode.B),
    "object": (Settings, lambda: Settings(4), lambda: Settings(names=set("ab")), lambda: chain(1)),
    "slots": (lambda: Slotted(1), lambda: Slotted(2), lambda: Slotted(Slotted(1))),
    "array": (lambda: np.arange(10**5), lambda: np.arange(10**5)[::-1], lambda: np.float32(1)),
    "tensor": (
        lambda: torch.ones(2),
        lambda: torch.zeros(2),
        lambda: torch.ones(2, 1),
        lambda: torch.ones(2).half(),
        lambda: torch.ones(2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.full((2,), 1j).conj(),
        lambda: nested(torch.strided),
        lambda: nested(torch.jagged),
        lambda: nested(torch.jagged, k=2),
    ),
    "unregistered": (lambda: [nn.ReLU()], lambda: [nn.Tanh()], lambda: [Net()]),
    "random": (lambda: np.random.default_rng(0), lambda: np.random.default_rng(1)),
    "class attribute": (make(1), make(2), make([1])),
    "variable": (
        lambda: read(READS, k=1),
        lambda: read(READS, k=2),
        lambda: read(READS, k={"a": [1]}),
        lambda: read(READS, k={"a": [2]}),
        lambda: read(READS, k=torch.ones(2)),
        lambda: read(READS, k=torch.zeros(2)),
        lambda: read(READS, k=Settings(k=9)),
    ),
    "helper": (lambda: read(CALLS.format(3)), lambda: read(CALLS.format(4))),
    "pattern": (lambda: re.compile("a"), lambda: re.compile("b")),
    "logger": (lambda: logging.getLogger("a"), lambda: logging.getLogger("b")),
    "lock": (threading.Lock,),
    "deep": (lambda: chain(3000), lambda: chain(3000, end=4)),
    "of a weight": (lambda: carrying(1), lambda: carrying(2), lambda: Tripled(torch.ones(2))),
    "weakly": (lambda: weakref.ref(HELD[0]), lambda: weakref.ref(HELD[1])),
    "proxy": (lambda: types.MappingProxyType({1: 2}), lambda: types.MappingProxyType({1: 3})),
    "local": (lambda: local(1), lambda: local(2)),
    "context": (lambda: variable(1), lambda: variable(2)),
    "memory": (lambda: memoryview(b"12"), lambda: memoryview(b"13")),
    "view": ({1: 2}.values, {1: 3}.values, {1: 2}.keys),
    "module": (
        lambda: module("def f(x): return x * 2"),
        lambda: module("def f(x): return x * 3"),
    ),
    "by name": (
        lambda: read(NAMED, m=module("def act(x): return x * 2")),
        lambda: read(NAMED, m=module("def act(x): return x * 3")),
    ),
    "of a function": (
        lambda: with_attribute(lambda x: x, scale=1),
        lambda: with_attribute(lambda x: x, scale=2),
        lambda: with_attribute(torch.no_grad()(lambda x: x), scale=1),
        lambda: with_attribute(torch.no_grad()(lambda x: x), scale=2),
    ),
    "of a held module": (lambda: made_by(1), lambda: made_by(2)),
    "of a module that two functions read": (
        lambda: read(SHARED, m=module("A = 1\nB = 1")),
        lambda: read(SHARED, m=module("A = 1\nB = 2")),
        lambda: read(SHARED, m=module("A = 2\nB = 1")),
    ),
    "of a module that is passed on": (
        lambda: read(PASSED, m=types.SimpleNamespace(inner=module("K = 1"))),
        lambda: read(PASSED, m=types.SimpleNamespace(inner=module("K = 2"))),
        lambda: read(PASSED, m=package(inner=module("K = 1"))),
        lambda: read(PASSED, m=package(inner=module("K = 2"))),
        lambda: read(INDEXED, m=module("K = 1")),
        lambda: read(INDEXED, m=module("K = 2")),
    ),
    "of a metaclass": (lambda: of_kind(1), lambda: of_kind(2)),
    "of TorchScript": (
        lambda: traced(1.0),
        lambda: traced(2.0),
        lambda: traced_number(2),
        lambda: traced_number(5),
        lambda: scripted(1.0),
        lambda: scripted(2.0),
        lambda: scripted(torch.tensor(1.0)),
        lambda: scripted(torch.tensor(2.0)),
        lambda: scripted(1.0, is_frozen=True),
        lambda: scripted(2.0, is_frozen=True),
        lambda: compiled(2),
        lambda: compiled(3),
    ),
}


def digests() -> dict[str, list[str]]:
    return {
        kind: [code_sha256(Net(attribute=make())) for make in makes]
        for kind, makes in DIFFERENT.items()
    }


TORCHSCRIPT = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:FutureWarning")
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@NESTED
@TORCHSCRIPT
def test_whatever_an_attribute_holds_tells_networks_apart() -> None:
    found = digests()
    for kind, several in found.items():
        assert len(set(several)) == len(DIFFERENT[kind]), kind
    all_ = [digest for several in found.values() for digest in several]
    assert len(set(all_)) == len(all_)
    assert code_sha256(Net()) not in all_


@NESTED
@TORCHSCRIPT
def test_fingerprints_are_the_same_in_another_process() -> None:
    code = "import json; from tests.test_fingerprints import digests; print(json.dumps(digests()))"
    for seed in ("1", "2"):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(ended.stdout) == digests()


def test_hooks_and_structure_tell_networks_apart_and_those_of_a_capture_do_not() -> None:
    def hooked(hook: Any) -> nn.Module:
        net = Net()
        net.linear.register_forward_hook(hook)
        return net

    plain = code_sha256(Net())
    one, two = hooked(twice), hooked(thrice)
    assert len({plain, code_sha256(one), code_sha256(two)}) == 3
    assert code_sha256(one) == code_sha256(hooked(twice))
    assert state_sha256(one) == state_sha256(two)
    with embedx.capture(watched := Net(), "linear"):
        assert code_sha256(watched) == plain
    everywhere = nn.modules.module.register_module_forward_hook(twice)
    try:
        assert code_sha256(Net()) != plain
    finally:
        everywhere.remove()
    assert code_sha256(Net()) == plain
    replaced = Net()
    replaced.linear.forward = functional.relu
    assert code_sha256(replaced) != plain
    relu = nn.ReLU()
    shared = nn.Sequential(relu, nn.Linear(1, 1), relu)
    assert code_sha256(shared) != code_sha256(nn.Sequential(relu, nn.Linear(1, 1)))
    assert code_sha256(shared) == code_sha256(
        nn.Sequential(again := nn.ReLU(), nn.Linear(1, 1), again)
    )
    assert code_sha256(nn.ReLU(), arguments={"act": functional.relu}) != code_sha256(
        nn.ReLU(), arguments={"act": functional.gelu}
    )


@TORCHSCRIPT
@pytest.mark.parametrize("make", [torch.jit.script, torch.fx.symbolic_trace])
def test_what_torch_made_of_a_network_is_told_apart_by_its_code(
    make: Callable[[nn.Module], nn.Module],
) -> None:
    one, again, other = (
        make(nn.Sequential(nn.Linear(2, 2), kind())) for kind in (nn.ReLU, nn.ReLU, nn.Tanh)
    )
    assert code_sha256(one) == code_sha256(again) != code_sha256(other)


@NESTED
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_weight_that_is_nested_is_refused_in_words(layout: torch.layout) -> None:
    net = Net()
    net.register_buffer("rows", nested(layout))
    with pytest.raises(embedx.errors.ModelError, match="rows of Net is not a dense tensor"):
        state_sha256(net)
    assert state_marks(net)["rows"] != state_marks(Net(rows=nn.Buffer(nested(layout, k=2))))["rows"]


def test_what_a_pass_or_a_place_leaves_behind_changes_nothing() -> None:
    net = Net(cache={}, holder=[])
    net.holder.append(net)  # around in a circle
    before = code_sha256(net)
    net.cache[torch.device("cpu")] = torch.ones(2)
    net.train()
    assert code_sha256(net) == before
    assert code_sha256(Net(where=torch.device("cpu"))) == code_sha256(
        Net(where=torch.device("cuda"))
    )


def test_code_that_was_typed_at_a_prompt_is_told_apart_without_a_source() -> None:
    def typed(factor: int) -> nn.Module:
        names: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
        text = f"class Net(nn.Module):\n    def forward(self, x):\n        return x * {factor}"
        exec(text, names)
        made: nn.Module = names["Net"]()
        return made

    assert code_sha256(typed(2)) == code_sha256(typed(2)) != code_sha256(typed(3))


def test_the_code_of_modules_of_ones_own_counts_and_not_their_place_or_their_comments(
    tmp_path: Path,
) -> None:
    """A helper in another file, a package named as one of the standard library, a class patched."""

    def digest(folder: str, *, helper: str, before: str = "") -> str:
        package = tmp_path / folder / "code"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "helper.py").write_text(helper)
        (package / "net.py").write_text(
            "import torch\nfrom torch import nn\nfrom code import helper\n"
            "class Net(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n        self.a = nn.ReLU()\n"
            "    def forward(self, x):\n        return self.a(helper.scaled(x))\n"
        )
        code = (
            f"import sys; sys.path.insert(0, {str(tmp_path / folder)!r}); {before}\n"
            "from code.net import Net; from embedx.fingerprints import code_sha256\n"
            "print(code_sha256(Net()))"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        return ended.stdout

    first = digest("a", helper="K = 2\ndef scaled(x): return x * K\n")
    assert first == digest("b", helper="# moved\n\nK = 2\ndef scaled(x):\n    return x * K\n")
    assert first != digest("c", helper="K = 3\ndef scaled(x): return x * K\n")
    assert first != digest("d", helper="K = 2\ndef scaled(x): return x + K\n")
    patch = "from torch import nn; nn.ReLU.forward = lambda self, x: x * 2"
    assert first != digest("e", helper="K = 2\ndef scaled(x): return x * K\n", before=patch)


def test_what_code_sets_or_hooks_collect_changes_nothing() -> None:
    counts = "n = 0\ndef f(x):\n    global n\n    n += 1\n    return x"
    function = read(counts)
    before = value_sha256(function)
    function(torch.ones(1))
    assert function.__globals__["n"] == 1
    assert value_sha256(function) == before
    collects = "def f(x):\n    seen['a'].append(x)\n    kept.append(x)\n    last['a'] = x"
    function = read(collects, seen=collections.defaultdict(list), kept=[], last={})
    before = value_sha256(function)
    function(torch.ones(1))
    assert value_sha256(function) == before
    function = read("def f(x):\n    f.n += 1\n    f.seen.append(x)\n    return x")
    function.n, function.seen = 0, []  # type: ignore[attr-defined]
    before = value_sha256(function)
    function(torch.ones(1))
    assert value_sha256(function) == before
    around: list[Any] = [1]
    around.append(around)
    assert value_sha256(read(READS, k=around)) != value_sha256(read(READS, k=[1]))


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
def test_a_weight_that_every_pass_computes_anew_changes_nothing() -> None:
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)))
    net.load_state_dict({key: value + 1 for key, value in net.state_dict().items()})
    before, weight = code_sha256(net), net[0].weight
    net(torch.ones(1, 4))
    assert net[0].weight is not weight
    assert code_sha256(net) == before
