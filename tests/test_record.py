"""Recording in a loop of one's own: what plain hooks copy, whole, under the name it was given."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import embedx
from embedx import store
from embedx.errors import ConfigError, DataError, InUseError, LayerError, StoreError
from embedx.record import Recorder

N = 23


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).eval()


X = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(N) % 3


def batches(size: int = 5, *, seed: int | None = None) -> Iterator[Tensor]:
    """Rows of X in batches, shuffled if a seed is given."""
    generator = torch.Generator().manual_seed(seed or 0)
    order = torch.arange(N) if seed is None else torch.randperm(N, generator=generator)
    yield from order.split(size)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["embedx.record"], "PART_ROWS", 8)


def test_a_training_loop_is_recorded_epoch_by_epoch_as_it_ran(tmp_path: Path) -> None:
    model = network().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted: dict[str, np.ndarray] = {}
    losses: dict[str, float] = {}
    handle = model[0].register_forward_hook(lambda _, __, output: kept.append(output.clone()))
    kept: list[Tensor] = []
    with embedx.record(model, ["0", "2:input"], tmp_path / "run") as recorder:
        for epoch in range(3):
            for step, rows in enumerate(batches(seed=epoch + 1)):
                loss = nn.functional.cross_entropy(model(X[rows]), Y[rows], reduction="none")
                recorder.batch(ids=rows, labels=Y[rows], epoch=epoch, loss=loss)
                for i, value, one in zip(rows.tolist(), kept.pop(), loss, strict=True):
                    wanted[f"{i}#{epoch}"] = value.detach().numpy()
                    losses[f"{i}#{epoch}"] = one.item()
                loss.mean().backward()  # gradients of two batches are accumulated
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            with recorder.paused(), torch.no_grad():
                model(X)
                model(X[:3])
                kept.clear()
    handle.remove()
    run = embedx.open(tmp_path / "run")
    assert run.n_rows == len(wanted) == 3 * N
    assert set(run.ids) == set(wanted)
    np.testing.assert_array_equal(run.embeddings["0"], np.stack([wanted[i] for i in run.ids]))
    relu = np.maximum(run.embeddings["0"], 0)
    np.testing.assert_array_equal(run.embeddings["2:input"], relu)
    assert not np.array_equal(run.embeddings["0"][:5], run.embeddings["0"][N : N + 5])
    assert run.metadata["sample"] == [i.split("#")[0] for i in run.ids]
    assert [int(e) for e in run.metadata["epoch"]] == [int(i.split("#")[1]) for i in run.ids]
    assert run.label_texts() == [str(int(s) % 3) for s in run.metadata["sample"]]
    np.testing.assert_allclose(run.metadata["loss"], [losses[i] for i in run.ids], rtol=1e-6)
    assert run.verify() == []
    assert run.ok.all()
    assert not store.parts_folder(run.path).exists()
    assert all(not child._forward_hooks for child in model.modules())
    # It is a run like any other.
    assert embedx.project(run, method="pca", layer="0").coords.shape == (3 * N, 2)
    assert model.training


def recorded(out: Path, *, size: int = 5) -> store.Embeddings:
    model = network()
    with torch.no_grad(), embedx.record(model, "0", out, label_names=["a", "b", "c"]) as recorder:
        for rows in batches(size):
            model(X[rows])
            recorder.batch(labels=Y[rows])
    return embedx.open(out)


@pytest.mark.parametrize("size", [1, 5, 8, 16, 20, N])
def test_rows_are_those_of_the_loop_however_they_fall_into_parts(size: int, tmp_path: Path) -> None:
    run = recorded(tmp_path, size=size)
    np.testing.assert_allclose(run.embeddings["0"], network()[0](X).detach().numpy(), atol=1e-6)
    assert run.ids == [str(i) for i in range(N)]
    assert run.label_texts() == ["abc"[i % 3] for i in range(N)]
    assert run.metadata == {}


def test_the_same_loop_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = recorded(tmp_path / "a"), recorded(tmp_path / "b")
    assert first.path.read_bytes() == second.path.read_bytes()


def test_train_mode_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with embedx.record(network().train(), "0", tmp_path) as recorder:
        recorder._got._module(X)
        recorder.batch()
    assert "sequential is in train mode: what is recorded has its dropout" in caplog.text


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_in_the_loop_the_rows_are_kept_and_can_be_joined(
    error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()

    def loop() -> None:
        with embedx.record(model, "0", tmp_path / "run") as recorder:
            for step, rows in enumerate(batches()):
                model(X[rows])
                recorder.batch(ids=rows.numpy())
                if step == 2:
                    raise error

    with pytest.raises(error), torch.no_grad():
        loop()
    assert f"stopped by {error.__name__}; 15 rows are kept: embedx.join(" in caplog.text
    assert not (tmp_path / "run" / "embeddings.h5").exists()
    assert all(not child._forward_hooks for child in model.modules())
    with pytest.raises(StoreError, match=r"holds a recording that was not finished; .*join"):
        embedx.open(tmp_path / "run")
    with pytest.raises(StoreError, match=r"of 15 rows that was not finished; .*overwrite=True"):
        embedx.record(model, "0", tmp_path / "run")
    run = embedx.join(tmp_path / "run")
    np.testing.assert_allclose(run.embeddings["0"], model[0](X[:15]).detach().numpy(), atol=1e-6)
    with pytest.raises(StoreError, match="holds no recording"):
        embedx.join(tmp_path / "run")
    with pytest.raises(StoreError, match="is there already; choose another out"):
        embedx.record(model, "0", tmp_path / "run")
    embedx.project(run, method="pca")
    with torch.no_grad(), embedx.record(model, "2", tmp_path / "run", overwrite=True) as recorder:
        model(X[:2])
        recorder.batch()
    assert not (tmp_path / "run" / "projections").exists()  # it was of the old rows
    assert embedx.open(tmp_path / "run").embeddings["2"].shape == (2, 3)


def test_an_unfinished_recording_is_replaced_on_request(tmp_path: Path) -> None:
    model = network()
    recorder = embedx.record(model, "0", tmp_path)
    model(X)
    recorder.batch()
    with pytest.raises(InUseError, match="is being written by this process"):
        embedx.join(tmp_path)
    with pytest.raises(InUseError, match="is being written by this process"):
        embedx.record(model, "0", tmp_path, overwrite=True)
    recorder.close()
    recorder = embedx.record(model, "0", tmp_path, overwrite=True)
    model(X[:3])
    recorder.batch()
    assert recorder.finish().n_rows == 3


LOOP = """
import sys, time, torch, embedx
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6)).eval()
x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(1))
sys.modules[embedx.record.__module__].PART_ROWS = 64
embedx.store.COMMIT_S = 0
with torch.no_grad(), embedx.record(model, "0", sys.argv[1]) as recorder:
    for rows in torch.arange(1000).split(7):
        model(x[rows])
        recorder.batch(ids=rows)
        print(recorder.n_rows, flush=True)
        time.sleep(0.002)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [3, 30, 90])
def test_a_killed_loop_loses_no_row_that_was_reported(after: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(out)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    reported = 0
    for line in process.stdout:
        reported = int(line)
        if reported >= after * 7:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    run = embedx.join(out)
    assert run.n_rows >= reported
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 6))[0]
    x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(1))
    wanted = layer(x[: run.n_rows]).detach().numpy()
    np.testing.assert_allclose(run.embeddings["0"], wanted, atol=1e-6)
    assert run.ids == [str(i) for i in range(run.n_rows)]


# --------------------------------------------------------------------------- wrong loops


def step(recorder: Recorder, **given: object) -> None:
    recorder._got._module(X[:5])
    recorder.batch(**given)  # type: ignore[arg-type]


MISTAKES: dict[str, tuple[Callable[[Recorder], object], type[Exception], str]] = {
    "two passes": (
        lambda r: (r._got._module(X), r._got._module(X)),
        DataError,
        r"two forward passes without recorder.batch\(\) between them",
    ),
    "no pass": (lambda r: r.batch(), DataError, "without a forward pass before it"),
    "a second batch": (lambda r: (step(r), r.batch()), DataError, "without a forward pass before"),
    "ids": (lambda r: step(r, ids=["a"]), DataError, "1 ids for 5 samples; give one each"),
    "labels": (lambda r: step(r, labels=[1, 2]), DataError, r"labels has shape \(2,\) for 5"),
    "kinds": (lambda r: step(r, labels=[0.5] * 5), DataError, "labels must be whole numbers"),
    "names": (lambda r: step(r, labels=["a"] * 5), DataError, "labels must be whole numbers"),
    "loss": (lambda r: step(r, loss=torch.zeros(())), DataError, r"loss has shape \(\) for 5"),
    "twice": (
        lambda r: (step(r, ids=range(5)), step(r, ids=range(4, 9))),
        DataError,
        "the sample '4' was recorded twice; give ids that are unique, and epoch=",
    ),
    "twice in an epoch": (
        lambda r: (step(r, ids=range(5), epoch=2), step(r, ids=range(5), epoch=2)),
        DataError,
        "the sample '0#2' was recorded twice in epoch 2",
    ),
    "other columns": (
        lambda r: (step(r, labels=[1] * 5), step(r, loss=[0.0] * 5)),
        DataError,
        "this batch has loss and the first had labels; give the same with every batch",
    ),
    "long ids": (
        lambda r: step(r, ids=[f"{i:0300d}" for i in range(5)]),
        StoreError,
        "has 300 bytes, and at most",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_wrong_loop_is_said_in_one_line_and_what_was_right_is_kept(
    kind: str, tmp_path: Path
) -> None:
    make, error, message = MISTAKES[kind]
    recorder = embedx.record(network(), "0", tmp_path)
    with pytest.raises(error, match=message) as caught:
        make(recorder)
    assert "\n" not in str(caught.value)
    recorder.close()
    kept = recorder.n_rows
    assert kept == (
        5 if kind in ("a second batch", "twice", "twice in an epoch", "other columns") else 0
    )
    if kept:
        assert embedx.join(tmp_path).n_rows == 5
    else:
        with pytest.raises(DataError, match="nothing was recorded"):
            recorder.finish()


def test_a_layer_that_does_not_fire_and_a_wrong_name_are_errors(tmp_path: Path) -> None:
    with pytest.raises(LayerError, match="no layer 'nope'"):
        embedx.record(network(), "nope", tmp_path)
    with pytest.raises(ConfigError, match="id_bytes must be 1 to 1024, not 0"):
        embedx.record(network(), "0", tmp_path, id_bytes=0)
    model = nn.MultiheadAttention(4, 2).eval()
    recorder = embedx.record(model, "out_proj", tmp_path)
    model(X[None], X[None], X[None])
    with pytest.raises(LayerError, match="out_proj did not fire in this pass"):
        recorder.batch()
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_not_finite_are_failed_rows_with_their_reason(tmp_path: Path) -> None:
    x = X.clone()
    x[3, 0], x[17, 1] = torch.nan, torch.inf
    model = network()
    with torch.no_grad(), embedx.record(model, "0", tmp_path) as recorder:
        for rows in batches():
            model(x[rows])
            recorder.batch(ids=[f"s{i}" for i in rows.tolist()])
    run = embedx.open(tmp_path)
    assert np.flatnonzero(~run.ok).tolist() == [3, 17]
    assert np.isnan(run.embeddings["0"][[3, 17]]).all()
    assert store.read_reasons(run.path) == [
        {"row": 3, "id": "s3", "reason": "NaN or Inf in 0"},
        {"row": 17, "id": "s17", "reason": "NaN or Inf in 0"},
    ]


def test_a_missing_or_damaged_part_is_named(tmp_path: Path) -> None:
    model = network()
    recorder = embedx.record(model, "0", tmp_path)
    for rows in batches():
        model(X[rows])
        recorder.batch()
    recorder.close()
    first = store.parts_folder(tmp_path / "embeddings.h5") / "00000" / "embeddings.h5"
    whole = first.read_bytes()
    first.unlink()
    with pytest.raises(
        StoreError, match=r"before .*00001/embeddings.h5 8 rows were recorded, .* is missing"
    ):
        embedx.join(tmp_path)
    row = embedx.open(first.parents[1] / "00001" / "embeddings.h5").embeddings["0"][0].tobytes()
    first.write_bytes(whole)
    damaged = first.parents[1] / "00001" / "embeddings.h5"
    damaged.write_bytes(damaged.read_bytes().replace(row, b"\1" * len(row)))
    with pytest.raises(
        StoreError, match=r"00001/embeddings.h5: row 0 \(8\) does not match its checksum"
    ):
        embedx.join(tmp_path)
    assert first.exists()
    assert not (tmp_path / "embeddings.h5").exists()


def test_half_precision_and_a_pooling_of_ones_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3)).eval()
    x = torch.randn(4, 1, 6, 6)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        embedx.record(
            model, "0", tmp_path, pooling="max", normalize=True, dtype="float16"
        ) as recorder,
    ):
        out = model(x)
        assert out.dtype == torch.bfloat16
        recorder.batch(score=out.mean((1, 2, 3)))
    run = embedx.open(tmp_path)
    wanted = nn.functional.normalize(out.amax((2, 3)).float(), dim=1).numpy()
    assert run.embeddings["0"].dtype == np.float16
    np.testing.assert_allclose(run.embeddings["0"], wanted, atol=1e-3)
    np.testing.assert_allclose(run.metadata["score"], out.float().mean((1, 2, 3)), atol=1e-2)


def test_a_model_whose_methods_are_called_and_not_itself_is_recorded(tmp_path: Path) -> None:
    model = network()

    def step(x: Tensor) -> Tensor:  # as a training_step does
        return model[2](model[1](model[0](x)))

    with torch.no_grad(), embedx.record(model, ["0", "2"], tmp_path) as recorder:
        for rows in batches():
            step(X[rows])
            recorder.batch()
        step(X)
        step(X)
        with pytest.raises(LayerError, match="0 ran 2 times"):
            recorder.batch()
        recorder._got.reset()
    run = embedx.open(tmp_path)
    np.testing.assert_allclose(run.embeddings["2"], step(X).detach().numpy(), atol=1e-6)


def test_a_call_of_a_layer_that_runs_twice_a_step_can_be_chosen(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad(), embedx.record(model, "0@1", tmp_path) as recorder:
        for rows in batches():
            model[0](X[rows])
            model[0](2 * X[rows])  # the second view of a contrastive step
            recorder.batch()
    run = embedx.open(tmp_path)
    np.testing.assert_allclose(run.embeddings["0@1"], model[0](2 * X).detach().numpy(), atol=1e-6)
