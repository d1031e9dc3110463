"""Interventions: what becomes of a model when a part of a layer is changed while it runs."""

import copy
import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import embedx
from embedx import models
from embedx.ablations import Seen, as_ablations
from embedx.errors import ConfigError, EmbedxError, LayerError, ShapeError, StoreError
from embedx.fingerprints import code_sha256
from tests.test_gradients import InPlace, Net, X, Y, cut_after, near, net, weighted
from tests.test_hooks import n_hooks


def without_channel(model: Net, channel: int) -> Net:
    """The same with a channel of ``conv2`` that is always zero, by its weights."""
    edited = copy.deepcopy(model)
    with torch.no_grad():
        edited.conv2.weight[channel] = 0
        assert edited.conv2.bias is not None
        edited.conv2.bias[channel] = 0
    return edited


def zero(channel: int) -> Any:
    def change(value: Tensor) -> Tensor:
        value[:, channel] = 0  # in place: it has a copy
        return value

    return change


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_changed_output_is_that_of_a_model_edited_by_hand(has_gradients: bool) -> None:
    model, edited = net(), without_channel(net(), 4)
    with torch.set_grad_enabled(has_gradients):
        plain = model(X)
        with embedx.intervene(model, {"conv2": zero(4)}):
            changed = model(X)
        assert torch.equal(changed, edited(X))
        assert not torch.equal(changed, plain)
        assert torch.equal(model(X), plain)
    assert n_hooks(model) == 0
    if has_gradients:
        weighted(changed).backward()
        weighted(edited(X)).backward()
        assert near(model.conv.weight.grad, edited.conv.weight.grad)  # type: ignore[arg-type]


def test_several_follow_each_other_and_a_capture_sees_what_they_gave() -> None:
    model = net()
    with torch.no_grad(), embedx.capture(model, ["conv2", "head:input"]) as got:
        model(X)
        was = got["conv2"]
        with (
            embedx.intervene(model, {"conv2": [lambda v: v + 1, lambda v: v * 2]}),
            embedx.intervene(model, {"conv?": lambda v: v - 3, "head:input": lambda v: v * 0 + 7}),
        ):
            output = model(X)
        assert torch.equal(got["conv2"], (was + 1) * 2 - 3)
        assert torch.equal(got["head:input"], torch.full((11, 6), 7.0))
        assert torch.equal(output, model.head(torch.full((11, 6), 7.0)))


def test_calls_inputs_and_gradients() -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(5, 6)

    def by_hand(y: Tensor) -> Tensor:
        a = torch.relu(model.first(y))
        b = torch.relu((a * 2).view(-1, 2, 3)) * 10  # the second call alone
        return model.last(a + torch.relu(b.flatten(1) - 0.3))

    with embedx.intervene(model, {"relu@1": lambda v: v * 10}):
        assert torch.equal(model(x), by_hand(x))
        assert torch.equal(model(x), by_hand(x))  # counted anew in each pass
    seen = []

    def clipped(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient.clamp(-0.1, 0.1)

    for what in ("view:grad_input", "first:grad"):
        model.zero_grad()
        seen.clear()
        with (
            embedx.capture(model, what) as got,
            embedx.intervene(model, {what: clipped}),
        ):
            weighted(model(x)).backward()
        assert torch.equal(got[what], seen[0].clamp(-0.1, 0.1))
        if what == "first:grad":
            assert near(model.first.bias.grad, seen[0].clamp(-0.1, 0.1).sum(0))  # type: ignore[arg-type]


def test_a_layer_that_backward_runs_again_is_changed_again() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda y: torch.tanh(self.conv2(self.conv(y))), x, use_reentrant=False)
            return self.head(x.mean((2, 3)))

    class Plain(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.conv2(self.conv(x))).mean((2, 3)))

    torch.manual_seed(0)
    model = Checkpointed()
    other = Plain()
    other.load_state_dict(model.state_dict())
    for one in (model, other):
        with embedx.intervene(one, {"conv2": zero(2)}):
            weighted(one(X)).backward()
    assert near(model.conv.weight.grad, other.conv.weight.grad)  # type: ignore[arg-type]
    with embedx.intervene(model, {"conv2@0": zero(2)}):
        output = weighted(model(X))
        with pytest.raises(LayerError, match="name the layer without @"):
            output.backward()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nothing": zero(0)}, "has no layer 'nothing'"),
        ({"conv2": lambda v: None}, "gives a NoneType in place of a tensor of shape"),
        ({"conv2": lambda v: v[:, 1:]}, r"gives a tensor of shape \(11, 5, 4, 4\) in place of"),
        ({"conv2@1": zero(0)}, "nothing was changed at conv2@1: it did not fire"),
        ({"head:badge": zero(0)}, "nothing flows through it"),
        ({"conv2": 3}, r"changes\['conv2'\] is 3; give a function of the tensor"),
    ],
)
def test_what_cannot_be_changed_is_said(changes: Any, words: str) -> None:
    model = net()
    plain = model(X)

    def run() -> None:
        with embedx.intervene(model, changes):
            model(X)

    with pytest.raises(EmbedxError, match=words):
        run()
    assert n_hooks(model) == 0
    assert torch.equal(model(X), plain)


# --------------------------------------------------------------------------- ablate=


def test_an_ablated_run_is_that_of_an_edited_model_under_an_id_of_its_own(tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers": ["conv2", "head:input"], "pooling": ["flatten", "none"]}
    plain = embedx.extract(net(), X, out=tmp_path / "plain", **options)
    opened = embedx.extract(
        net(), X, ablate=[{"at": "conv2", "channels": 4}], out=tmp_path / "ablated", **options
    )
    edited = embedx.extract(without_channel(net(), 4), X, out=tmp_path / "edited", **options)
    for layer in options["layers"]:
        assert np.array_equal(opened.embeddings[layer][:], edited.embeddings[layer][:])
        assert not np.array_equal(opened.embeddings[layer][:], plain.embeddings[layer][:])
    assert opened.attrs["id"] != plain.attrs["id"]
    with pytest.raises(embedx.errors.StoreError, match="ablate is null there and"):
        embedx.extract(
            net(), X, ablate=[{"at": "conv2", "channels": 4}], out=tmp_path / "plain", **options
        )


@pytest.mark.parametrize(("at", "axis"), [("conv2", "channels"), ("head", "units")])
def test_all_of_an_axis_is_the_whole_layer(at: str, axis: str, tmp_path: Path) -> None:
    runs = [
        embedx.extract(
            net(), X, layers=at, pooling="flatten", out=tmp_path / f"{i}",
            ablate=[{"at": at, axis: which, "by": "patch", "value": 0.5}],
        )
        for i, which in enumerate(("all", [*range(len(net().get_submodule(at).bias))]))
    ]  # fmt: skip
    assert np.array_equal(runs[0].embeddings[at][:], np.full(runs[1].embeddings[at].shape, 0.5))
    assert np.array_equal(runs[1].embeddings[at][:], runs[0].embeddings[at][:])


def test_an_ablated_network_of_a_library_is_folded_around_it(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18().eval()
    x = torch.randn(3, 3, 64, 64)
    edited = copy.deepcopy(model)
    with torch.no_grad():
        edited.layer3[0].bn1.weight[5:7] = 0  # type: ignore[union-attr,operator]
        edited.layer3[0].bn1.bias[5:7] = 0  # type: ignore[union-attr,operator]
        wanted = edited.avgpool(
            edited.layer4(edited.layer3(edited.layer2(edited.layer1(
                edited.maxpool(edited.relu(edited.bn1(edited.conv1(x))))
            ))))
        ).flatten(1)  # fmt: skip
    opened = embedx.extract(
        model, x, ablate=[{"at": "layer3.0.bn1", "channels": [5, 6]}], out=tmp_path, batch_size=2
    )
    assert near(torch.tensor(opened.embeddings["fc:input"][:]), wanted)


V = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
T = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("said", "value", "wanted"),
    [
        ({"channels": [0, 2]}, V, torch.cat([0 * V[:, :1], V[:, 1:2], 0 * V[:, 2:]], 1)),
        ({"channels": 1, "by": "mean"}, V,
         torch.cat([V[:, :1], V[:, 1:2].mean((2, 3), keepdim=True).expand(2, 1, 4, 5),
                    V[:, 2:]], 1)),
        ({"units": 3, "by": "scale", "factor": 0.5}, T, torch.cat([T[..., :3], T[..., 3:] / 2], 2)),
        ({"units": [0], "by": "patch", "value": -2.0}, T[:, 0],
         torch.cat([torch.full((2, 1), -2.0), T[:, 0, 1:]], 1)),
        ({"tokens": 1}, T, torch.stack([T[:, 0], 0 * T[:, 1], T[:, 2]], 1)),
        ({"tokens": 2, "by": "mean"}, T, torch.stack([T[:, 0], T[:, 1], T.mean(1)], 1)),
        ({"units": 1}, V.new_ones(2, 5, 5, 3), torch.tensor([1.0, 0, 1]).expand(2, 5, 5, 3)),
    ],
)  # fmt: skip
def test_kinds_of_ablation(said: dict[str, Any], value: Tensor, wanted: Tensor) -> None:
    (ablation,) = as_ablations([{"at": "0", **said}])
    before = value.clone()
    assert torch.equal(ablation.changed(value, Seen(n=len(value))), wanted)
    assert torch.equal(value, before)
    with pytest.raises(ShapeError, match="its first axis is not that of the samples"):
        ablation.changed(value, Seen(n=len(value) + 1))


@pytest.mark.parametrize(
    ("ablate", "error", "words"),
    [
        ([{"channels": 1}], ConfigError, "missing a required argument: 'at'"),
        ([{"at": "conv2"}], ConfigError, "names no part of the layer; give one of channels, units"),
        (
            [{"at": "conv2", "channels": 1, "tokens": 2}],
            ConfigError,
            "channels and tokens; give one",
        ),
        ([{"at": "conv2", "chanel": 1}], ConfigError, r"the nearest are ablate\[0\].channels"),
        ([{"at": "conv2", "channels": []}], ConfigError, "must be all, or different numbers"),
        ([{"at": "conv2", "channels": "some"}], ConfigError, r"ablate\[0\].channels must be"),
        ([{"at": "conv2", "channels": [1, 1]}], ConfigError, "or different numbers"),
        ([{"at": "conv2", "channels": 1, "by": "scale"}], ConfigError, "by=scale needs factor"),
        (
            {"at": "conv2", "channels": 1},
            ConfigError,
            "ablate must be a list of values or null, not .*write a list of it",
        ),
        (["conv2"], ConfigError, "ablate holds 'conv2', and takes mappings"),
        (
            [{"at": "conv2", "channels": 1, "value": 2.0}],
            ConfigError,
            "value has no use with by=zero; give by:patch",
        ),
        (
            [{"at": "conv2", "channels": 6}],
            LayerError,
            "has 6 channels, numbered 0 to 5, and not 6",
        ),
        ([{"at": "conv2", "channels": -1}], LayerError, "and not -1"),
        (
            [{"at": "head", "channels": 1}],
            ShapeError,
            r"gives \(11, 3\), which has no channels; give u",
        ),
        ([{"at": "head", "units": 1, "by": "mean"}], ShapeError, "by=mean averages over places"),
        ([{"at": "nothing", "channels": 1}], LayerError, "has no layer 'nothing'"),
        ([{"at": "relu@2", "channels": 1}], LayerError, "nothing was changed at relu@2"),
    ],
)
def test_wrong_ablations(ablate: Any, error: type[EmbedxError], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words) as caught:
        embedx.extract(net(), X, labels=Y, layers="head", ablate=ablate, out=tmp_path / "o")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "o").exists()


class OverTime(nn.Module):
    """Convolves steps of time, then works on (n, t, f, c) of a spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps, self.mix, self.head = nn.Conv1d(6, 6, 3), nn.Linear(4, 4), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x.permute(0, 3, 2, 1))  # (n, 8, 6, 4)
        return self.head(self.steps(x.mean(3).transpose(1, 2)).mean(2).repeat(1, 6)[:, :32])


@pytest.mark.parametrize(
    ("at", "wrong", "words"),
    [
        ("mix", "channels", r"gives \(10, 8, 6, 4\), which has no channels; give units"),
        ("steps", "tokens", r"gives \(10, 6, 6\), which has no tokens; give channels"),
        ("steps", "units", "which has no units; give channels"),
    ],
)
def test_where_channels_are_is_told_by_the_layer(
    at: str, wrong: str, words: str, tmp_path: Path
) -> None:
    model, x = OverTime().eval(), torch.randn(10, 4, 6, 8)
    given: dict[str, Any] = {"layers": "head", "pooling": "none"}
    with pytest.raises(ShapeError, match=words):
        embedx.extract(model, x, ablate=[{"at": at, wrong: 1}], out=tmp_path / "no", **given)
    right = words.rpartition(" ")[2]
    run = embedx.extract(model, x, ablate=[{"at": at, right: 1}], out=tmp_path / "run", **given)
    axis = 3 if right == "units" else 1

    def without(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.index_fill(axis, torch.tensor([1]), 0)

    with torch.no_grad(), model.get_submodule(at).register_forward_hook(without):
        alone = torch.cat([model(one[None]) for one in x])
    np.testing.assert_allclose(run.embeddings["head"], alone, atol=1e-6)


def test_layers_whose_samples_are_not_first_are_refused(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16)  # (t, n, d)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x.transpose(0, 1)).mean(0))

    for n, t in ((4, 5), (5, 5)):
        with pytest.raises(ShapeError, match="its first axis is not that of the samples"):
            embedx.extract(
                Model().eval(), torch.randn(n, t, 8), layers="head",
                ablate=[{"at": "layer", "tokens": 0}], out=tmp_path / "o",
            )  # fmt: skip


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_ablation_without_effect_is_said_whatever_a_sample_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_whole: bool
) -> None:
    x = X.clone()
    x[0] = x[0] if is_whole else torch.nan
    embedx.extract(
        net(), x, layers="conv", pooling="gap", ablate=[{"at": "conv2", "channels": 1}],
        out=tmp_path,
    )  # fmt: skip
    assert "the ablations change none of the rows of the first batch" in caplog.text


def test_what_is_kept_elsewhere_and_collected_by_hooks(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.seen = Skips(), []
            self.a.register_forward_hook(lambda _, __, output: self.seen.append(output))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.clear()
            return self.a(x) * 0 + self.seen[0] + self.a.skip

    class Skips(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.skip = x + 1
            return self.skip

    model, x = Keeps(), torch.ones(2, 3)
    with torch.no_grad(), embedx.intervene(model, {"a": lambda v: v * 0}):
        assert torch.equal(model(x), torch.full((2, 3), 2.0))  # the skip alone is as it was
    assert caplog.text.count("a: the model also keeps what the layer gave before") == 1


def test_penultimate_of_an_ablation_is_that_of_the_model(tmp_path: Path) -> None:
    described = embedx.models.torchvision("resnet18", weights=None)
    x = torch.randn(2, 3, 32, 32)
    run = embedx.extract(described, x, ablate=[{"at": "penultimate", "units": 7}], out=tmp_path)
    (rows,) = run.embeddings.values()
    assert not rows[:, 7].any()
    assert rows[:, :7].all(axis=0).any()


def test_methods_of_a_model_and_points_that_never_fire(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with embedx.intervene(model, {"conv": zero(0)}):
        pass
    assert "nothing was changed: the model was not run" in caplog.text

    def never() -> None:
        with embedx.intervene(model, {"conv:grad": lambda gradient: gradient}):
            model(X)

    with pytest.raises(LayerError, match="nothing was changed at conv:grad: no gradient has"):
        never()
    with embedx.intervene(model, {"conv": zero(0)}):
        changed = model.forward(X)
    with embedx.intervene(model, {"conv": zero(0)}):
        assert torch.equal(changed, model(X))

    def by_method() -> None:
        with embedx.intervene(model, {"conv@0": zero(0)}):
            model.forward(X)

    with pytest.raises(LayerError, match="where a method of the model is called"):
        by_method()


def test_padding_is_no_part_of_a_mean_that_takes_the_place_of_tokens() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    (tokens,) = as_ablations([{"at": "a", "tokens": [1, 2], "by": "mean"}])
    (units,) = as_ablations([{"at": "a", "units": [0], "by": "mean"}])
    seen = Seen(n=2, mask=mask)
    mean = torch.stack([T[0, :2].mean(0), T[1].mean(0)])
    assert torch.equal(tokens.changed(T, seen)[:, 1], mean)
    assert torch.equal(units.changed(T, seen)[:, 0, 0], mean[:, 0])
    (late,) = as_ablations([{"at": "a", "tokens": 5}])
    assert torch.equal(late.changed(T, seen), T)  # of texts so short there is no such token
    with pytest.raises(LayerError, match="has 3 tokens, numbered 0 to 2, and not 5"):
        late.changed(T, Seen(n=2))


def test_what_is_drawn_and_scored_says_how_the_rows_were_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "embedx")
    x = torch.cat([X] * 4)
    run = embedx.extract(
        net(), x, labels=Y * 4, layers=["conv2:grad", "conv2"], pooling="gap", objective="loss",
        ablate=[{"at": "conv", "channels": 1}], out=tmp_path,
    )  # fmt: skip
    embedx.project(run, method="pca", layer="conv2:grad")
    titles = [text.get_text() for text in embedx.view(run).findobj(Text)]
    assert any(
        re.match("ablated, gradients of the loss of the labels\nnet on", title) for title in titles
    )
    embedx.view(run, viewer="report")
    assert (
        "Ablated, gradients of the loss of the labels. " in (tmp_path / "report.html").read_text()
    )
    embedx.evaluate(run)
    said = "conv2:grad: gradients of the loss of the labels have these in them"
    assert said in caplog.text
    assert "\nconv2: gradients" not in caplog.text
    caplog.clear()
    embedx.search(run, layer="conv2:grad", find="labels")
    assert "gradients of the loss of the labels have these in them" in caplog.text
    caplog.clear()
    embedx.search(run, layer="conv2", find="labels")
    assert "gradients of the loss" not in caplog.text


def test_a_gradient_that_is_changed_is_that_of_its_layer_alone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.a = nn.Dropout(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x * 1)
            return h + 3 * self.drop(h)

    model = Model().eval()
    x = torch.ones(2, 3, requires_grad=True)
    with embedx.intervene(model, {"drop:grad": lambda gradient: gradient * 0}):
        model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2, 3))  # the shortcut is as it was


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_ablated_run_goes_on_and_knows_padding_in_every_batch(
    batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            h = torch.tanh(self.embed(ids)) * attention_mask[..., None]
            return self.head(h.sum(1) / attention_mask.sum(1, keepdim=True))

    torch.manual_seed(0)
    model = Classifier()
    ids = torch.randint(0, 9, (8, 5))
    mask = (torch.arange(5) < torch.tensor([5, 5, 5, 2, 3, 1, 4, 2])[:, None]).long()
    items = [{"ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]
    options: dict[str, Any] = {
        "layers": "head", "batch_size": batch_size,
        "ablate": [{"at": "embed", "units": [1], "by": "mean"}],
    }  # fmt: skip
    wanted = []
    for one, m in zip(ids, mask, strict=True):
        h = model.embed(one[: m.sum()]).detach()
        h[:, 1] = h[:, 1].mean()
        wanted.append(model.head(torch.tanh(h).mean(0)).detach())
    whole = embedx.extract(model, items, out=tmp_path / "whole", **options)
    assert near(torch.tensor(whole.embeddings["head"][:]), torch.stack(wanted))
    with cut_after(6, monkeypatch), pytest.raises(KeyboardInterrupt):
        embedx.extract(model, items, out=tmp_path / "cut", **options)
    again = embedx.extract(model, items, out=tmp_path / "cut", **options)
    assert whole.path.read_bytes() == again.path.read_bytes()
    assert "first pass" not in caplog.text


def test_as_many_tokens_as_samples_are_told_apart(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Identity(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.unflatten(1, (4, 8)).transpose(0, 1)  # (t, n, d)
            return self.head(self.layer(tokens).mean(0))

    with pytest.raises(ShapeError, match="its first axis is not that of the samples"):
        embedx.extract(
            Model().eval(), torch.randn(4, 32), layers="head",
            ablate=[{"at": "layer", "tokens": 0}], out=tmp_path,
        )  # fmt: skip


@dataclasses.dataclass
class Output:
    logits: Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    logits: Tensor


class Bare:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Output,
    "slots of a dataclass": Slotted,
    "slots": Bare,
}


class SeenByTwo(nn.Module):
    """A layer passes on what another one works in place on, and a third one takes that too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.a, self.drop, self.act = nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(inplace=True)
        self.c, self.d = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        scores = self.c(self.act(self.drop(h))) + self.d(h)
        if self.kind in OUTPUTS:
            return OUTPUTS[self.kind](scores)
        masked = torch.tensor([False, False, False, True])
        low = {"1e9": -1e9, "min": torch.finfo(torch.float32).min, "inf": -torch.inf}
        return scores.masked_fill(masked, low[self.kind])


@pytest.mark.parametrize("kind", [*OUTPUTS, "1e9", "min", "inf"])
@pytest.mark.parametrize(
    "asked",
    [
        {"layers": ["drop:grad", "d"]},
        {"layers": "d", "ablate": [{"at": "drop", "units": [0], "by": "scale", "factor": 1.0}]},
    ],
)
def test_what_asking_changes_is_seen_whatever_the_model_gives(
    kind: str, asked: dict[str, Any], tmp_path: Path
) -> None:
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    with pytest.raises(LayerError, match="gives something else when drop(:grad)? is asked for"):
        embedx.extract(SeenByTwo(kind).eval(), x, batch_size=8, out=tmp_path, **asked)


def test_a_model_that_differs_from_pass_to_pass_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.n = nn.Linear(6, 4), 0

        def forward(self, x: Tensor) -> Any:
            self.n += 1
            return self.fc(x) + self.n

    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    embedx.extract(Counts().eval(), x, layers="fc:grad", out=tmp_path)
    assert "gives something else in each pass, so that it cannot be seen" in caplog.text


@pytest.mark.parametrize("how", ["capture", "intervene", "record"])
def test_a_copy_that_was_made_meanwhile_is_a_plain_model_afterwards(
    how: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval(), torch.ones(4, 6)
    plain = model(x)
    block: Any = {
        "capture": lambda: embedx.capture(model, ["0", "0:grad"]),
        "intervene": lambda: embedx.intervene(model, {"0": torch.zeros_like}),
        "record": lambda: embedx.record(model, "0", tmp_path),
    }[how]()
    with block:
        model(x)
        if how == "record":
            block.batch(ids=range(4))
        best = copy.deepcopy(model)
        with pytest.raises(LayerError, match="cannot be saved whole"):
            torch.save(best, tmp_path / "best.pt")
    torch.save(best, tmp_path / "best.pt")
    loaded = torch.load(tmp_path / "best.pt", weights_only=False)
    for one in (best, loaded):
        assert torch.equal(one(x), plain)
    assert code_sha256(best) == code_sha256(model)


@pytest.mark.parametrize("grad", [False, True])
def test_a_change_of_nothing_at_what_is_worked_on_in_place_changes_nothing_or_is_said(
    grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    model = SeenByTwo("1e9").eval()
    plain = model(x)
    with torch.set_grad_enabled(grad), embedx.intervene(model, {"act:input": lambda t: t}):
        assert torch.equal(model(x), plain)
    assert not caplog.text
    with torch.set_grad_enabled(grad), embedx.intervene(model, {"drop": lambda t: t}):
        model(x)
    assert "drop: another layer works in place on what is there" in caplog.text


def test_which_layer_an_ablation_at_penultimate_means_is_part_of_the_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(8, 6)
    ablate = [{"at": "penultimate", "units": [1], "by": "zero"}]
    for layer in ("4:input", "2:input"):
        model = dataclasses.replace(models.live(net.eval()), layer=layer)
        run = embedx.extract(model, x, layers="4", ablate=ablate, out=tmp_path / layer[0])
        with embedx.intervene(net, {layer: lambda t: t * torch.tensor([1, 0, 1, 1, 1.0])}):
            wanted = net(x).detach()
        assert near(torch.tensor(run.embeddings["4"][:]), wanted)
    with pytest.raises(StoreError, match="ablate is"):
        embedx.extract(model, x, layers="4", ablate=ablate, out=tmp_path / "4")


def test_what_enters_a_dropout_that_works_in_place_is_changed_for_it_alone() -> None:
    class Beside(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.mlp = nn.Linear(6, 8), nn.Linear(8, 8)
            self.drop = nn.Dropout(0.5, inplace=inplace)

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            return h + self.mlp(self.drop(h))

    found = []
    for inplace in (False, True):
        model = Beside(inplace).eval()
        with torch.no_grad(), embedx.intervene(model, {"drop:input": torch.zeros_like}):
            found.append(model(torch.ones(2, 6)))
    assert torch.equal(*found)


def test_a_tensor_that_a_layer_gives_twice_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x * 2
            return {"last": y, "all": (x, y)}

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Twice()

        def forward(self, x: Tensor) -> Any:
            return self.twice(x)["all"][1]

    model = Around()
    with embedx.intervene(model, {"twice:output.last": torch.zeros_like}):
        model(torch.ones(2, 3))
    assert "twice gives the same tensor in another place too" in caplog.text


class ByView(nn.Module):
    """A view of what one layer gives is worked on in place, and another layer takes all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.part, self.act = (
            nn.Linear(6, 8),
            nn.Unflatten(1, (2, 4)),
            nn.ReLU(inplace=True),
        )
        self.c, self.d = nn.Linear(4, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(self.act(self.part(h))).sum(1) + self.d(h)


class OfOriginal(nn.Module):
    """What passes a layer untouched is worked on in place afterwards, by who holds it itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.drop, self.act = nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(inplace=True)
        self.d, self.e = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        kept = self.drop(h)
        self.act(h)
        return self.d(kept) + self.e(h)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("model", "point"), [(ByView(), "part"), (OfOriginal(), "drop")])
def test_work_in_place_on_a_view_or_on_the_original_is_said(
    model: nn.Module, point: str, grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    plain = model.eval()(x)
    with torch.set_grad_enabled(grad), embedx.intervene(model, {point: lambda t: t}):
        changed = model(x)
    assert not torch.equal(changed, plain)
    assert f"{point}: another layer works in place on what is there" in caplog.text


def test_a_capture_says_work_in_place_on_the_original(caplog: pytest.LogCaptureFixture) -> None:
    model = OfOriginal().eval()
    with embedx.capture(model, ["drop:grad", "d"]):
        model(torch.randn(4, 6)).sum().backward()
    assert "drop:grad: another layer works in place on what is there" in caplog.text


class Program(nn.Module):
    """A random network in which layers pass on, look at or work in place on what others hold."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        kinds: dict[str, Any] = {
            "linear": lambda: nn.Linear(6, 6),
            "relu": lambda: nn.ReLU(inplace=rng.random() < 0.7),
            "drop": lambda: nn.Dropout(0.5, inplace=rng.random() < 0.5),
            "same": nn.Identity,
            "view": lambda: nn.Unflatten(1, (2, 3)),
        }
        self.steps: list[tuple[str, int, int]] = []
        for i in range(rng.randrange(3, 8)):
            kind = rng.choice([*kinds, "add", "add_", "mul"])
            self.steps.append((kind, rng.randrange(i + 1), rng.randrange(i + 1)))
            if kind in kinds:
                self.add_module(f"n{i}", kinds[kind]())

    def forward(self, x: Tensor) -> Any:
        values = [x.clone()]
        for i, (kind, a, b) in enumerate(self.steps):
            one, other = values[a], values[b]
            if kind == "add_":
                values.append(one.add_(other.clone()))
            elif kind in ("add", "mul"):
                values.append(one + other if kind == "add" else one * other)
            else:
                values.append(getattr(self, f"n{i}")(one).reshape(len(x), 6))
        return values[-1] + sum(value.sin() for value in values)


def asked_for(model: nn.Module, name: str, how: str) -> Any:
    if how in ("output", "input"):
        return embedx.intervene(model, {f"{name}:{how}": lambda t: t})
    return embedx.capture(model, name if how == "capture" else f"{name}:{how}")


@pytest.mark.parametrize("how", ["output", "input", "grad", "grad_input", "capture"])
def test_whatever_layers_share_asking_changes_nothing_or_is_said(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(how)
    n_same = n_said = 0
    for seed in range(400):
        torch.manual_seed(seed)
        model = Program(rng).eval()
        names = [name for name, _ in model.named_modules() if name]
        if not names:
            continue
        x, name = torch.randn(3, 6), rng.choice(names)
        with_gradients = torch.set_grad_enabled(how != "capture")
        try:
            with with_gradients:
                plain = model(x).detach()
        except RuntimeError:  # of torch: such a network cannot be differentiated at all
            continue
        caplog.clear()
        with asked_for(model, name, how), torch.set_grad_enabled(how != "capture"):
            given = model(x)
        is_same = torch.allclose(given, plain, rtol=1e-5, atol=1e-6)
        assert is_same or "works in place on what is there" in caplog.text, (seed, model.steps)
        n_same += is_same
        n_said += not is_same
    assert n_same > 200
    assert (n_said > 0) == (how != "capture")


@pytest.mark.parametrize(
    ("shape", "is_clear"), [((2, 16, 4, 7, 7), True), ((2, 2, 7, 7, 96), False)]
)
def test_channels_of_a_video_are_those_before_time_or_are_asked_for(
    shape: tuple[int, ...], is_clear: bool
) -> None:
    (ablation,) = as_ablations([{"at": "layer", "channels": [1], "by": "zero"}])
    value, seen = torch.ones(shape), Seen()
    seen.n = 2
    if is_clear:
        changed = ablation.changed(value, seen)
        assert not changed[:, 1].any()
        assert changed[:, [0, *range(2, 16)]].all()
    else:
        with pytest.raises(ShapeError, match="ablate: layer gives"):
            ablation.changed(value, seen)
