"""Gradients at layers: by hooks, over data, in a loop of one's own."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import embedx
from embedx import models, table_data, writing
from embedx.errors import LayerError, StoreError
from tests.test_hooks import n_hooks, network

NETWORKS = [
    "alexnet",
    "resnet18",
    "densenet121",
    "mobilenet_v3_small",
    "vit_b_16",
    "swin_t",
    "convnext_tiny",
    "timm/tf_efficientnet_lite0",
    "transformer",
]


def moved(model: nn.Module, x: Tensor, objective: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """The gradient at every place of every call, by what a zero that is added there gets.

    Keys are ``NAME@CALL:grad`` and ``NAME@CALL:grad_input``.
    """
    zeros: dict[str, Tensor] = {}
    calls: dict[str, int] = {}

    def added(name: str, value: Tensor) -> Tensor:
        zeros[name] = torch.zeros_like(value, requires_grad=True)
        return value + zeros[name]

    def watch(name: str, child: nn.Module) -> list[Any]:
        def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
            calls[name] = calls.get(name, -1) + 1
            if len(args) and isinstance(args[0], Tensor):
                return (added(f"{name}@{calls[name]}:grad_input", args[0]), *args[1:])
            return None

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            is_one = isinstance(output, Tensor)
            return added(f"{name}@{calls[name]}:grad", output) if is_one else None

        return [child.register_forward_pre_hook(before), child.register_forward_hook(after)]

    handles = [h for name, child in model.named_modules() if name for h in watch(name, child)]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        total = objective(model(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        for handle in handles:
            handle.remove()
    got = torch.autograd.grad(total, list(zeros.values()), allow_unused=True)
    return {name: g for name, g in zip(zeros, got, strict=True) if g is not None}


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * max(b.abs().max().item(), 1e-30) + 1e-12)


def weighted(output: Any) -> Tensor:
    weights = torch.linspace(-1, 1, output.shape[-1])
    return (output * weights).sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_at_every_layer_are_those_of_a_zero_added_there(
    name: str, is_frozen: bool
) -> None:
    model, x = network(name)
    wanted = moved(model, x, weighted)
    assert len(wanted) > 20
    before = copy.deepcopy(model.state_dict())
    model.requires_grad_(not is_frozen)
    with embedx.capture(model, list(wanted)) as got:
        output = model(x)
        weighted(output).backward()
        for point, gradient in wanted.items():
            assert near(got[point], gradient), point
    assert n_hooks(model) == 0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert {p.requires_grad for p in model.parameters()} == {not is_frozen}


class InPlace(nn.Module):
    """What is hard: the first layer, works in place, on a view, twice by one module, beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.view = nn.Unflatten(1, (2, 3))
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.relu(self.first(x))
        b = self.relu(self.view(a * 2))
        return self.last(a + F.relu(b.flatten(1) - 0.3, inplace=True))


def test_views_works_in_place_and_a_module_called_twice() -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(5, 6)
    wanted = moved(model, x, weighted)
    assert {*wanted} == {
        *(
            f"{name}@0:{what}"
            for name in ("first", "view", "last")
            for what in ("grad", "grad_input")
        ),
        *(f"relu@{call}:{what}" for call in (0, 1) for what in ("grad", "grad_input")),
    }
    with embedx.capture(model, [*wanted, "relu:grad"]) as got:
        weighted(model(x)).backward()
        for point, gradient in wanted.items():
            assert near(got[point], gradient), point
        with pytest.raises(LayerError, match="relu ran 2 times in one pass"):
            got["relu:grad"]


class Parts(NamedTuple):
    one: Tensor
    other: Any


class Structured(nn.Module):
    """Layers that give and take tuples, dicts and named tuples, by position and by name."""

    class Give(nn.Module):
        def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Parts:
            return Parts(x * scale["by"], {"a": [x + 1, x * x]})

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.give, self.out = nn.Linear(3, 3), self.Give(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        parts = self.give(x, scale={"by": x.sigmoid()})
        assert isinstance(parts, Parts)
        return self.out(parts.one + parts.other["a"][0] * parts.other["a"][1])


def test_gradients_by_paths_into_what_layers_take_and_give() -> None:
    torch.manual_seed(0)
    model, x = Structured(), torch.randn(4, 3)
    h = model.enter(x).detach().requires_grad_()
    by = h.sigmoid().detach().requires_grad_()
    one, a, b = h * by, h + 1, h * h
    for part in (one, a, b):
        part.retain_grad()
    weighted(model.out(one + a * b)).backward()
    points = {
        "give:grad.one": one.grad,
        "give:grad.0": one.grad,
        "give:grad.other.a.0": a.grad,
        "give:grad.other.a.1": b.grad,
        "give:grad_input": h.grad,  # by this layer alone, not by the sigmoid
        "give:grad_input.scale.by": by.grad,
    }
    for is_frozen in (False, True):
        model.requires_grad_(not is_frozen)
        with embedx.capture(model, list(points)) as got:
            weighted(model(x)).backward()
            for point, gradient in points.items():
                assert gradient is not None
                assert near(got[point], gradient), point


def test_a_gradient_that_cannot_come_is_said() -> None:
    model, x = Structured(), torch.randn(4, 3)
    with embedx.capture(model, "out:grad") as got:
        model(x)
        with pytest.raises(LayerError, match=r"no gradient has reached out; call backward\(\)"):
            got["out:grad"]
        with torch.no_grad():
            model(x)
        with pytest.raises(LayerError, match="the pass ran without gradients"):
            got["out:grad"]
    with (
        embedx.capture(model, "give:grad") as got,
        pytest.raises(LayerError, match="give:grad.one"),
    ):
        model(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask(x > 0)

    with (
        embedx.capture(Whole(), "mask:grad") as got,
        pytest.raises(LayerError, match=r"torch\.bool there, which has no gradient"),
    ):
        got._module(x)


def test_a_gradient_is_of_the_latest_pass_and_read_in_any_thread() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    with embedx.capture(model, "0:grad") as got:
        first, second = model(x), model(2 * x)
        (first * 3).sum().backward()
        with pytest.raises(LayerError, match="no gradient has reached"):
            got["0:grad"]  # of a pass before
        thread = threading.Thread(target=(second * 5).sum().backward)
        thread.start()
        thread.join()
        assert torch.equal(got["0:grad"], torch.full((4, 2), 5.0))


def test_badge_is_the_gradient_of_the_loss_of_the_predicted_class() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    x = torch.randn(6, 5)
    wanted = []
    for one in x:
        model.zero_grad()
        scores = model(one[None])
        F.cross_entropy(scores, scores.argmax(1)).backward()
        assert model[2].weight.grad is not None
        wanted.append(model[2].weight.grad.flatten().clone())
    with embedx.capture(model, "2:badge") as got, torch.no_grad():
        model(x)
        assert near(got["2:badge"], torch.stack(wanted))
    with (
        embedx.capture(model, "0:badge"),
        pytest.raises(LayerError, match="does not give the class"),
    ):
        model(x)
    with embedx.capture(model, "1:badge"), pytest.raises(LayerError, match="1 is a ReLU"):
        model(x)
    assert n_hooks(model) == 0


# --------------------------------------------------------------------------- over data


class Net(nn.Module):
    """A convolution network in which a gradient is hard to get right."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.relu(self.conv2(x))
        return self.head(x.mean((2, 3)))


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.norm.running_mean.uniform_(-0.1, 0.1)  # type: ignore[union-attr]
    model.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model.eval()


X = torch.randn(11, 1, 6, 6, generator=torch.Generator().manual_seed(1))
Y = [0, 1, 2, 2, 1, 0, 1, 1, 0, 2, 2]


def objective_of(scores: Tensor, label: int, objective: str | int) -> Tensor:
    if objective == "loss":
        return F.cross_entropy(scores, torch.tensor([label]))
    return scores[0, scores[0].argmax() if objective == "predicted" else objective]


def one_by_one(model: nn.Module, points: list[str], objective: str | int) -> dict[str, np.ndarray]:
    """Gradients of single samples, at a zero that is added."""
    rows: dict[str, list[np.ndarray]] = {point: [] for point in points}
    for x, label in zip(X, Y, strict=True):
        got = moved(model, x[None], lambda s, y=label: objective_of(s, y, objective))  # type: ignore[misc]
        for point in points:
            name, _, what = point.partition(":")
            name += "" if "@" in name else "@0"
            rows[point].append(got[f"{name}:{what}"].flatten().numpy())
    return {point: np.stack(values) for point, values in rows.items()}


POINTS = [
    "conv:grad",
    "norm:grad_input",
    "relu@0:grad",
    "relu@1:grad_input",
    "conv2:grad",
    "head:grad",
]


@pytest.mark.parametrize("objective", ["loss", "predicted", 2])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_each_sample_of_a_batch_has_its_own_gradient(
    objective: str | int, is_frozen: bool, tmp_path: Path
) -> None:
    model = net()
    if is_frozen:
        model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.head.bias.grad = torch.ones(3)
    wanted = one_by_one(net(), POINTS, objective)
    embeddings = embedx.extract(
        model, X, labels=Y, layers=POINTS, pooling="flatten", objective=objective,
        batch_size=4, out=tmp_path,
    ).embeddings  # fmt: skip
    for point in POINTS:
        assert near(torch.tensor(embeddings[point][:]), torch.tensor(wanted[point])), point
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == (
        {"head.weight", "head.bias"} if is_frozen else {*dict(model.named_parameters())}
    )
    assert torch.equal(model.head.bias.grad, torch.ones(3))
    assert model.head.weight.grad is None
    assert n_hooks(model) == 0


def test_norms_of_gradients_beside_activations(tmp_path: Path) -> None:
    model = net()
    wanted = one_by_one(model, ["conv2:grad"], "loss")["conv2:grad"]
    opened = embedx.extract(
        model, X, labels=Y, layers=["conv2:grad", "conv2", "head:badge"],
        pooling=["norm", "gap", "none"], objective="loss", save_outputs=True, out=tmp_path,
    )  # fmt: skip
    norms = np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.allclose(opened.embeddings["conv2:grad"][:], norms, rtol=1e-5)
    with torch.no_grad():
        h = F.relu(model.conv2(F.relu(model.norm(model.conv(X))))).mean((2, 3))
        scores = model.head(h)
    assert np.allclose(opened.outputs["logits"][:], scores, atol=1e-5)
    p = scores.softmax(1) - F.one_hot(scores.argmax(1), 3)
    badge = torch.einsum("nc,nd->ncd", p, h).flatten(1)
    assert np.allclose(opened.embeddings["head:badge"][:], badge, atol=1e-6)
    assert opened.identity["objective"] == "loss"


def test_a_run_of_gradients_goes_on_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"layers": ["conv2:grad", "conv"], "pooling": "gap", "batch_size": 3}
    whole = embedx.extract(net(), X, out=tmp_path / "whole", **options)
    with cut_after(6, monkeypatch), pytest.raises(KeyboardInterrupt):
        embedx.extract(net(), X, out=tmp_path / "cut", **options)
    again = embedx.extract(net(), X, out=tmp_path / "cut", num_workers=2, **options)
    assert whole.path.read_bytes() == again.path.read_bytes()
    with pytest.raises(embedx.errors.StoreError, match="objective is predicted there and 1 here"):
        embedx.extract(net(), X, out=tmp_path / "cut", objective=1, **options)


def test_a_row_without_a_label_has_no_loss(tmp_path: Path) -> None:
    labels = [-1 if i in (2, 10) else y for i, y in enumerate(Y)]
    source = embedx.sources.Source(
        "some", [str(i) for i in range(11)], X.__getitem__, "", labels=np.array(labels, np.int32),
        label_names=["a", "b", "c"],
    )  # fmt: skip
    opened = embedx.extract(
        net(), source, layers="conv2:grad", pooling="flatten", objective="loss", out=tmp_path
    )
    wanted = one_by_one(net(), ["conv2:grad"], "loss")["conv2:grad"]
    assert np.flatnonzero(opened.status == 2).tolist() == [2, 10]
    good = np.flatnonzero(opened.status == 1)
    assert near(torch.tensor(opened.embeddings["conv2:grad"][good]), torch.tensor(wanted[good]))
    assert "it has no label to have a loss of" in (tmp_path / "errors.jsonl").read_text()


@contextlib.contextmanager
def cut_after(rows: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C when so many rows of an extraction are committed."""
    append = writing.Writer.append

    def cut(self: writing.Writer, *args: Any, **kwargs: Any) -> None:
        append(self, *args, **kwargs)
        self.commit()
        if self.rows_done >= rows:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writing.Writer, "append", cut)
        yield


class NoGradient(Net):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Aside(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.norm(self.conv(x))
        return self.head(x.flatten(1)[:, :6])


class Pictures(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (NoGradient, {}, "no gradient has reached|ran without gradients|under torch.no_grad"),
        (Aside, {}, "no gradient has reached conv; .*choose a layer that leads"),
        (
            Aside,
            {"layers": ["conv:grad", "head:grad"], "pooling": "flatten"},
            "no gradient has reached conv; .*choose",
        ),
        (Pictures, {}, r"needs class scores of shape \(n, classes\), and pictures gives \(11, 4"),
        (Net, {"objective": 3}, "objective=3 is out of range: net has scores of 3 classes"),
        (Net, {"objective": -1}, "objective=-1 is out of range"),
        (Net, {"objective": "loss"}, "objective=loss takes labels, and .* has none"),
        (
            Net,
            {"objective": "loss", "labels": [*range(11)]},
            "are numbers 0 to 10, and net has scores of 3",
        ),
        (Net, {"objective": "lost"}, "objective must be one of predicted, loss or a whole number"),
        (Net, {"objective": 1, "layers": "conv"}, "objective=1 has no use without a gradient"),
        (
            Net,
            {"layers": "conv:gradient"},
            "'gradient' cannot be captured; choose one of .*grad_in",
        ),
    ],
)
def test_what_has_no_gradient_is_said(
    model: type[nn.Module], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(embedx.errors.EmbedxError, match=words) as caught:
        embedx.extract(
            model().eval(), X, **{"layers": "conv:grad", "pooling": "gap", **options},
            out=tmp_path / "o",
        )  # fmt: skip
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "o").exists()


def test_gradients_of_a_text_model_leave_padding_out(tmp_path: Path) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            h = torch.tanh(self.embed(ids))
            mean = (h * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
            return {"logits": self.head(mean)}

    torch.manual_seed(0)
    model = Classifier()
    ids = torch.randint(0, 9, (6, 5))
    mask = (torch.arange(5) < torch.tensor([5, 3, 2, 4, 1, 5])[:, None]).long()
    items = [{"ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]
    rows = embedx.extract(
        model, items, layers="embed:grad", pooling="mean_token", objective=1, out=tmp_path
    ).embeddings["embed:grad"]
    for i in range(6):
        h = model.embed(ids[i]).detach().requires_grad_()
        n = int(mask[i].sum())
        model.head(torch.tanh(h[:n]).mean(0))[1].backward()
        assert h.grad is not None
        assert near(torch.tensor(rows[i]), h.grad[:n].mean(0))


# --------------------------------------------------------------------------- in a loop


def test_record_streams_gradients_of_a_training_loop(tmp_path: Path) -> None:
    model, other = net().train(), net().train()
    wanted = []
    for part in (slice(0, 4), slice(4, 11)):
        h = other.relu(other.norm(other.conv(X[part]))).detach()
        full = other.conv2(other.relu(other.norm(other.conv(X[part]))))
        full.retain_grad()
        loss = F.cross_entropy(other.head(F.relu(full).mean((2, 3))), torch.tensor(Y[part]))
        loss.backward()
        assert h is not None
        assert full.grad is not None
        wanted.append(full.grad.flatten(1))
    with embedx.record(model, "conv2:grad", tmp_path / "o", pooling="flatten") as recorder:
        for part in (slice(0, 4), slice(4, 11)):
            F.cross_entropy(model(X[part]), torch.tensor(Y[part])).backward()
            recorder.batch(labels=Y[part])
            with pytest.raises(embedx.errors.DataError, match="without a forward pass"):
                recorder.batch(labels=Y[part])
    got = embedx.open(tmp_path / "o").embeddings["conv2:grad"][:]
    assert near(torch.tensor(got), torch.cat(wanted))


def test_record_before_backward_says_so(tmp_path: Path) -> None:
    model = net()
    with embedx.record(model, "conv2:grad", tmp_path / "o") as recorder:
        model(X)
        with pytest.raises(LayerError, match=r"no gradient has reached conv2; call backward\(\)"):
            recorder.batch()
        model(X).sum().backward()
        recorder.batch()
    assert embedx.open(tmp_path / "o").n_rows == 11


# --------------------------------------------------------------------------- what an attacker found


class Kept(nn.Module):
    """It keeps what a layer gives by itself: an attribute, and a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout()
        self.head = nn.Linear(4, 3)
        self.kept: list[Tensor] = []
        self.b.register_forward_hook(lambda _, __, output: self.kept.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        h = torch.tanh(self.a(x))
        h = self.drop(self.b(h)) + h
        scores: Tensor = self.head(h.relu()) + self.kept[0].sum(1, keepdim=True)
        self.kept.clear()
        return scores


def test_a_gradient_comes_by_all_ways_and_whatever_else_is_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Kept().eval()
    x = torch.randn(5, 4)
    b = model.b(torch.tanh(model.a(x))).detach().requires_grad_()
    rest = torch.tanh(model.a(x)).detach()
    scores = model.head((b + rest).relu()) + b.sum(1, keepdim=True)
    scores[:, 1].sum().backward()
    assert b.grad is not None
    for points in (["b:grad"], ["a:grad", "b:grad"]):
        for is_frozen in (False, True):
            model.requires_grad_(not is_frozen)
            out = tmp_path / f"{len(points)}{is_frozen}"
            run = embedx.extract(model, x, layers=points, objective=1, out=out)
            assert near(torch.tensor(run.embeddings["b:grad"][:]), b.grad)
    # Of a layer that hands on what enters it: through it alone, and not beside it.
    through = torch.autograd.grad(
        model.head((model.drop(b) + rest).relu())[:, 1].sum(), [b]
    )[0]  # fmt: skip
    for points in (["drop:grad"], ["b:grad", "drop:grad"]):
        out = tmp_path / f"drop{len(points)}"
        run = embedx.extract(model, x, layers=points, objective=1, out=out)
        assert near(torch.tensor(run.embeddings["drop:grad"][:]), through)


def test_a_frozen_model_that_keeps_a_layer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Kept().eval().requires_grad_(False)
    with embedx.capture(model, "b:grad"):
        model(torch.randn(2, 4)).sum().backward()
    assert "the model also keeps what b gives by itself" not in caplog.text  # it was let go
    model.kept = Forever()
    with embedx.capture(model, "b:grad"):
        model(torch.randn(2, 4)).sum().backward()
    assert "b:grad: the model also keeps what b gives by itself" in caplog.text


class Forever(list[Tensor]):
    def clear(self) -> None:
        pass


class Beside(nn.Module):
    """A layer that works in place on what another one takes too."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.act = nn.ReLU(inplace=True) if inplace else Doubled()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        return self.head(h + self.act(h))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_asking_for_a_gradient_changes_nothing_or_is_refused(tmp_path: Path) -> None:
    x = torch.randn(5, 4)
    for inplace in (False, True):
        model = Beside(inplace)
        plain = model(x)
        if inplace:
            with embedx.capture(model, "act:grad_input") as got:
                output = model(x)
                output.sum().backward()
            assert torch.equal(output, plain)
            wanted = 2 * torch.ones(5, 3) @ model.head.weight * (model.a(x) > 0)
            assert near(got["act:grad_input"], wanted)
            continue
        with (
            embedx.capture(model, "act:grad_input"),
            pytest.raises(LayerError, match="act works in place on what enters it"),
        ):
            model(x)
        with pytest.raises(LayerError, match="works in place on what enters it"):
            embedx.extract(model.eval(), x, layers="act:grad_input", out=tmp_path)
        with pytest.raises(LayerError, match="gives something else when act:input is asked for"):
            embedx.extract(
                model.eval(), x, layers="head", ablate=[{"at": "act:input", "units": 0}],
                out=tmp_path,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "classes", "wanted"),
    [
        ([2, 2, 1, 2], None, [2, 2, 1, 2]),  # 0 does not occur
        (["b", "c", "a", "b"], None, [1, 2, 0, 1]),  # said
        (["2", "10", "1", "2"], None, [2, 1, 0, 2]),  # texts, as folders are counted
        (["dog", "cat", "dog", "cat"], ["bird", "cat", "dog"], [2, 1, 2, 1]),
        (["1", "0", "2", "1"], ["2", "1", "0"], [1, 2, 0, 1]),
        (["dog", "cat", "dog", "cat"], None, "which of the 3 classes of net .*cat, dog; name"),
        (["dog", "cat", "dog", "cow"], ["dog", "cat", "owl"], "'cow' is none of the classes"),
        (["dog", "cat", "dog", "cow"], ["dog", "cat"], "classes has 2 names, and net has scores"),
        (
            ["dog", "cat", "dog", "cow"],
            ["dog", "dog", "cow"],
            r"'dog' 2 times; .*dog \(0\), dog \(1\)",
        ),
    ],
)
def test_the_class_of_a_label(labels: Any, classes: Any, wanted: Any, tmp_path: Path) -> None:
    def run(limit: int) -> Any:
        return embedx.extract(
            net(), X[:limit], labels=labels[:limit], layers="conv2:grad", pooling="flatten",
            objective="loss", classes=classes, out=tmp_path / str(limit),
        ).embeddings["conv2:grad"][:]  # fmt: skip

    if isinstance(wanted, str):
        with pytest.raises(embedx.errors.ConfigError, match=wanted):
            run(4)
        return
    rows = run(4)
    for x, label, row in zip(X, wanted, rows, strict=False):
        got = moved(net(), x[None], lambda s, y=label: objective_of(s, y, "loss"))  # type: ignore[misc]
        assert near(torch.tensor(row), got["conv2@0:grad"].flatten())
    if classes or labels[0] == 2:  # fewer rows, and other labels that occur
        assert np.allclose(run(1)[0], rows[0], atol=1e-7)


def test_numbered_classes_of_a_data_set_are_those_of_its_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Folders(torch.utils.data.Dataset[Tensor]):
        classes = ("0", "1", "10")  # as torchvision's ImageFolder counts them
        targets = (2, 0, 2, 1)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> Tensor:
            return X[i]

    for part, targets in (
        (Folders(), Folders.targets),
        (torch.utils.data.Subset(Folders(), [0, 2]), [2, 2]),
    ):
        rows = embedx.extract(
            net(), part, layers="conv2:grad", pooling="flatten", objective="loss",
            out=tmp_path / str(len(targets)),
        ).embeddings["conv2:grad"][:]  # fmt: skip
        x = X[:4] if len(targets) == 4 else X[[0, 2]]
        for one, label, row in zip(x, targets, rows, strict=True):
            got = moved(net(), one[None], lambda s, y=label: objective_of(s, y, "loss"))  # type: ignore[misc]
            assert near(torch.tensor(row), got["conv2@0:grad"].flatten())
    assert "alphabetical" not in caplog.text


def test_a_file_with_more_to_it_is_not_taken_for_one_with_less(tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers": "head", "out": tmp_path}
    embedx.extract(net(), X, ablate=[{"at": "conv2", "channels": 4}], **options)
    with pytest.raises(embedx.errors.StoreError, match="ablate is .* there and null here"):
        embedx.extract(net(), X, **options)


def test_hooks_that_change_numbers_are_part_of_the_id(tmp_path: Path) -> None:
    def run(**given: Any) -> Any:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return embedx.extract(model, X, out=out, layers=["head", "conv2:grad"], objective=1,
                              pooling="flatten", **given)  # fmt: skip

    model = net()
    ids = [run().attrs["id"]]
    for change in (lambda v: v * 2, lambda v: v * 3):
        with embedx.intervene(model, {"conv2": change}):
            ids.append(run().attrs["id"])
    with embedx.capture(model, "conv"):
        assert run().attrs["id"] == ids[0]
    handle = model.head.register_full_backward_hook(lambda _, __, ___: None)
    ids.append(run().attrs["id"])
    handle.remove()
    assert run().attrs["id"] == ids[0]
    assert len({*ids}) == 4


def test_a_layer_that_calls_itself_has_its_calls_by_number() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor, depth: int = 0) -> Tensor:
            return x + depth if depth == 2 else self(x, depth + 1) * 10 + depth

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Nested()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model, x = Model(), torch.ones(2, 3)
    with embedx.capture(model, [f"inner@{i}" for i in range(3)]) as got:
        model(x)
        assert [float(got[f"inner@{i}"][0, 0]) for i in range(3)] == [310.0, 31.0, 3.0]
    with embedx.intervene(model, {"inner@2": lambda v: v * 0}):
        assert float(model(x)[0, 0]) == 10.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_whose_scores_are_not_finite_fails_alone_at_badge_too(
    tmp_path: Path, value: float
) -> None:
    x = X.clone()
    x[1] = value
    rows = embedx.extract(net(), x, layers="head:badge", out=tmp_path / "some")
    assert np.flatnonzero(~rows.ok).tolist() == [1]
    alone = embedx.extract(net(), X, layers="head:badge", out=tmp_path / "all")
    assert np.array_equal(rows.embeddings["head:badge"][0], alone.embeddings["head:badge"][0])


def test_badge_of_what_is_no_plain_linear_layer_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4)), torch.randn(2, 3)
    handle = model[0].register_forward_hook(lambda _, __, output: output / 20)
    with embedx.capture(model, "0:badge"), pytest.raises(LayerError, match="changed by a hook"):
        model(x)
    handle.remove()
    with embedx.capture(model, "0:badge") as got:
        model[0](x)
        with pytest.raises(LayerError, match="is seen where the model itself is called"):
            got["0:badge"]


def test_two_backward_passes_for_a_batch_are_refused(tmp_path: Path) -> None:
    model = net()
    with embedx.record(model, "conv2:grad", tmp_path / "o") as recorder:
        scores = model(X)
        scores[:, 0].sum().backward(retain_graph=True)
        scores[:, 1].sum().backward()
        with pytest.raises(embedx.errors.DataError, match="two backward passes since"):
            recorder.batch()
        model(X)[:, :2].sum().backward()
        recorder.batch()


def test_rows_that_vanish_in_half_precision_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    with torch.no_grad():
        model.head.weight *= 1e-9
    embedx.extract(model, X, layers="conv2:grad", pooling="flatten", dtype="float16", out=tmp_path)
    assert "rows of conv2:grad are so small that float16 makes zeros of them" in caplog.text


def test_the_gradient_at_penultimate(tmp_path: Path) -> None:
    rows = embedx.extract(net(), X, layers="penultimate:grad", objective=2, out=tmp_path)
    wanted = one_by_one(net(), ["head:grad_input"], 2)["head:grad_input"]
    assert near(torch.tensor(rows.embeddings["head:grad_input"][:]), torch.tensor(wanted))


def test_what_was_not_captured_is_said() -> None:
    with embedx.capture(net(), ["conv", "head:grad"]) as got:
        with pytest.raises(
            LayerError, match="'norm' was not captured; what was is conv, head:grad"
        ):
            got["norm"]
        assert "norm" not in got
        assert got.get("norm") is None


class Sliced(nn.Module):
    """A layer that gives a view, which is worked on in place for the sake of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.part, self.head = nn.Linear(4, 4), Half(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        self.part(h).mul_(3)
        return self.head(h)


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


def test_a_view_that_is_worked_on_in_place_is_said_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Sliced(), torch.randn(5, 4)
    with embedx.capture(model, "part:grad"), embedx.capture(model, "a:grad"):
        model(x).sum().backward()
    assert caplog.text.count("part:grad: another layer works in place on what is there") == 1
    assert "a:grad" not in caplog.text
    with pytest.raises(LayerError, match="gives something else when part:grad, a:grad is asked"):
        embedx.extract(model, x, layers=["part:grad", "a:grad"], out=tmp_path)


def test_badge_of_scores_that_are_changed_in_place_afterwards_is_refused() -> None:
    class Cold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.fc(x)
            scores /= 0.1
            return scores

    with (
        torch.no_grad(),
        embedx.capture(model := Cold(), "fc:badge"),
        pytest.raises(LayerError, match="fc does not give the class scores"),
    ):
        model(torch.randn(2, 3))


def test_rows_whose_scores_are_not_finite_fail(tmp_path: Path) -> None:
    x = X.clone()
    x[3] = torch.nan
    run = embedx.extract(net(), x, layers="head:grad", pooling="none", objective=1, out=tmp_path)
    assert np.flatnonzero(run.status == 2).tolist() == [3]
    assert "its scores are not finite" in (tmp_path / "errors.jsonl").read_text()


def test_one_tensor_under_several_keywords() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Product()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            return self.inner(b=h, a=h)

    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return 2 * a + 5 * b

    model, x = Model(), torch.ones(2, 3)
    with embedx.capture(model, ["inner:grad_input", "inner:grad_input.b"]) as got:
        model(x.requires_grad_()).sum().backward()
        assert float(got["inner:grad_input"][0, 0]) == 2.0
        assert float(got["inner:grad_input.b"][0, 0]) == 5.0
    with embedx.intervene(model, {"inner:input": lambda value: value * 0}):
        assert model(x)[0, 0].item() == 5.0


class NamedBackwards(Dataset[Any]):
    """Labels are numbers in the items, and the names of their classes in no alphabetical order."""

    classes = ("zebra", "ant", "mouse")

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], i % 3


def loss_gradients(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    entered = x.clone().requires_grad_()
    nn.functional.cross_entropy(model(entered), labels, reduction="sum").backward()
    assert entered.grad is not None
    return entered.grad


def test_labels_in_items_are_numbers_of_classes_whatever_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 3)).eval(), torch.randn(24, 6)
    run = embedx.extract(
        model, NamedBackwards(x), layers="0:grad_input", objective="loss", out=tmp_path
    )
    wanted = loss_gradients(model, x, torch.arange(24) % 3)
    assert near(torch.tensor(run.embeddings["0:grad_input"][:]), wanted)
    assert run.label_texts()[:3] == ["zebra", "ant", "mouse"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_whole_numbers_in_a_column_are_numbers_of_classes(kind: str, tmp_path: Path) -> None:
    import pandas

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 12)).eval()
    names = [f"{i:02}.png" for i in range(24)]
    rng = np.random.default_rng(0)
    for name in names:
        pixels = rng.integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    table = pandas.DataFrame({"path": names, "label": [i % 12 for i in range(24)]})
    file = tmp_path / f"list.{kind}"
    table.to_csv(file, index=False) if kind == "csv" else table.to_parquet(file)
    described = models.Preprocess(resize_px=4, crop_px=4)
    data = table_data.table(str(file))
    run = embedx.extract(
        model,
        data,
        layers="1:grad_input",
        objective="loss",
        preprocess=described,
        out=tmp_path / "out",
    )
    opened = [Image.open(tmp_path / name).convert("RGB") for name in names]
    entered = described.normalize(torch.stack([described.pixels(one) for one in opened]))
    wanted = loss_gradients(model, entered, torch.arange(24) % 12).flatten(1)
    assert near(torch.tensor(run.embeddings["1:grad_input"][:]), wanted)


def test_the_numbers_of_the_classes_are_part_of_a_run(tmp_path: Path) -> None:
    class Named(Dataset[Any]):
        def __init__(self, classes: list[str]) -> None:
            self.classes = classes
            self.targets = [classes.index("abc"[i % 3]) for i in range(24)]

        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> Any:
            return x[i], self.targets[i]

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4)).eval(), torch.randn(24, 6)
    given: dict[str, Any] = {"layers": "0:grad_input", "objective": "loss"}
    for place, classes in enumerate((["a", "b", "c", "new"], ["a", "b", "new", "c"])):
        data = Named(classes)
        run = embedx.extract(model, data, out=tmp_path / str(place), **given)
        wanted = loss_gradients(model, x, torch.tensor(data.targets))
        assert near(torch.tensor(run.embeddings["0:grad_input"][:]), wanted)
    with pytest.raises(StoreError, match="label_numbers is"):
        embedx.extract(model, data, out=tmp_path / "0", **given)


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_within_checkpointing_that_runs_again_is_told_in_words(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Any:
            return self.head(checkpoint(self.body, x, use_reentrant=True))

    with pytest.raises(LayerError, match=r"body\.0:grad: the pass ran without gradients"):
        embedx.extract(Checkpointed().eval(), torch.randn(8, 6), layers="body.0:grad", out=tmp_path)


class Tokens(nn.Module):
    """Its gradient comes back from tokens, with its axes turned."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), norm

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        weights = torch.linspace(-1, 1, 3 * 49 * 4).reshape(3, 49, 4)
        return torch.stack([(tokens * one).sum((1, 2)) for one in weights], 1)


class ByHand(nn.BatchNorm2d):
    """A function of torch in a forward of one's own, as where it is frozen."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d, ByHand])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_gradient_of_one_sample_alone_is_that_of_it_among_others(
    batch_size: int, norm: Any, tmp_path: Path
) -> None:
    model, x = Tokens(norm(4)).eval(), torch.randn(3, 3, 9, 9)
    for buffer in model.norm.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.2, 3)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(model(leaf).amax(1).sum(), leaf)  # three at once: right
    run = embedx.extract(
        model,
        x,
        layers=["conv:grad_input"],
        objective="predicted",
        pooling="flatten",
        batch_size=batch_size,
        out=tmp_path,
    )
    assert np.allclose(run.embeddings["conv:grad_input"], wanted.flatten(1), atol=1e-6)
    assert not n_hooks(model)
