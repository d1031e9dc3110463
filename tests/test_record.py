"""Recording in a loop of one's own: what plain hooks copy, whole, under the name it was given."""

import contextlib
import copy
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import embedx
from embedx import layout, store, unfinished, writing
from embedx.errors import ConfigError, DataError, InUseError, LayerError, ShapeError, StoreError
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
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = sys.modules["embedx.record"]
    monkeypatch.setattr(module, "PART_ROWS", 8)
    yield
    for recorder in list(module._OPEN):  # their hooks keep fused attention off
        recorder.close()


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
    assert not unfinished.parts_folder(run.path).exists()
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
from embedx import writing
writing.COMMIT_S = 0
with torch.no_grad(), embedx.record(model, "0", sys.argv[1]) as recorder:
    for rows in torch.arange(1000).split(7):
        model(x[rows])
        recorder.batch(ids=rows)
        print(recorder.n_rows, flush=True)
        time.sleep(0.002)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [3, 30, 90])
def test_a_killed_loop_loses_no_row_that_was_committed(after: int, tmp_path: Path) -> None:
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
    assert run.n_rows >= reported - 7  # the last batch was on its way to the disk
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
    "ids then none": (
        lambda r: (step(r, ids=range(5, 10)), step(r)),
        DataError,
        "this batch has no columns and the first had ids; give the same with every batch",
    ),
    "ids that are stored alike": (
        lambda r: step(r, ids=["\udc80", "\\udc80", "c", "d", "e"]),
        DataError,
        "recorded twice",
    ),
    "a set": (lambda r: step(r, ids=set("abcde")), DataError, "ids is a set, which has no entry"),
    "a dict": (lambda r: step(r, ids=dict.fromkeys("abcde")), DataError, "ids is a dict"),
    "a text": (lambda r: step(r, ids="abcde"), DataError, "ids is a str"),
    "a number": (lambda r: step(r, ids=5), DataError, "ids is a int; give a list"),
    "a matrix": (lambda r: step(r, ids=torch.ones(5, 1)), DataError, r"ids have shape \(5, 1\)"),
    "a label too many": (
        lambda r: step(r, labels=[0, 1, 2, 3, 0]),
        DataError,
        "the label 3 has no name: label_names has 3, for 0 to 2",
    ),
    "half an epoch": (
        lambda r: step(r, epoch=0.5),
        DataError,
        "epoch must be a whole number, not 0.5",
    ),
    "an endless epoch": (lambda r: step(r, epoch=2**70), DataError, "epoch must lie between"),
    "sample": (
        lambda r: step(r, epoch=0, sample=[1] * 5),
        DataError,
        "the column sample is made of ids= and epoch=",
    ),
    "a column without a name": (
        lambda r: step(r, **{"": [1] * 5}),
        DataError,
        "cannot be called ''",
    ),
    "a column with a NUL": (
        lambda r: step(r, **{"a\0": [1] * 5}),
        DataError,
        "cannot be called 'a.x00'",
    ),
    "whole numbers then fractions": (
        lambda r: (step(r, loss=[0] * 5), step(r, loss=[0.5] * 5)),
        DataError,
        "loss has fractions here and had whole numbers in the first batch; give fractions",
    ),
    "fractions then large numbers": (
        lambda r: (step(r, loss=[0.5] * 5), step(r, loss=[2**60 + 1] * 5)),
        DataError,
        "loss has whole numbers here and had fractions",
    ),
    "a number too large": (
        lambda r: step(r, loss=np.full(5, 2**63, np.uint64)),
        DataError,
        r"loss must be less than 2\*\*63, and is 9223372036854775808",
    ),
    "a large number beside a fraction": (
        lambda r: step(r, tweet=[torch.tensor(2**53 + 1), 0.5, 0, 0, 0]),
        DataError,
        "tweet holds 9007199254740993, which among the others becomes the float 9007199254740992",
    ),
    "ids of many numbers": (
        lambda r: step(r, ids=[torch.ones(2)] * 5),
        DataError,
        r"ids holds a tensor of shape \(2,\); give one number a sample",
    ),
    "a ragged column": (
        lambda r: step(r, loss=[[1.0], [1.0, 2.0], [], [], []]),
        DataError,
        "loss cannot be read as numbers",
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
    recorder = embedx.record(network(), "0", tmp_path, label_names=["a", "b", "c"])
    with pytest.raises(error, match=message) as caught:
        make(recorder)
    assert "\n" not in str(caught.value)
    recorder.close()
    kept = recorder.n_rows
    with_a_first = ("a second batch", "twice", "twice in an epoch", "other columns")
    assert kept == (5 if kind in with_a_first or " then " in kind else 0)
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
    assert unfinished.read_reasons(run.path) == [
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
    first = unfinished.parts_folder(tmp_path / "embeddings.h5") / "00000" / "embeddings.h5"
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


def test_parts_of_two_recordings_are_not_joined(tmp_path: Path) -> None:
    parts = []
    for name in ("a", "b"):
        recorder = embedx.record(network(), "0", tmp_path / name)
        recorder._got._module(X)
        recorder.batch()
        recorder.close()
        parts.append(unfinished.parts_folder(tmp_path / name / "embeddings.h5"))
    shutil.rmtree(parts[0] / "00001")
    shutil.copytree(parts[1] / "00001", parts[0] / "00001")
    with pytest.raises(StoreError, match=r"00001/.* is a part of another recording than .*00000/"):
        embedx.join(tmp_path / "a")
    assert embedx.join(tmp_path / "b").n_rows == N


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


# --------------------------------------------------------------------------- ends of all kinds

ENDS = """
import os, sys, time, torch, embedx
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6)).eval()
x = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
from embedx import writing
writing.COMMIT_S = 0.2
recorder = embedx.record(model, "0", sys.argv[1])
with torch.no_grad():
    for rows in torch.arange(23).split(5):
        model(x[rows])
        recorder.batch(ids=rows)
end = sys.argv[2]
if end == "killed":
    until = time.monotonic() + 30
    partial = recorder._writer.path.with_name("embeddings.h5.partial")
    while embedx.store.Embeddings(partial).n_rows < 23 and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(os.getpid(), 9)
if end == "an error":
    raise ValueError
if end == "a child that records":
    if os.fork() == 0:
        model(-x)
        model(-x)
        try:
            recorder.batch(ids=range(100, 123))
        except embedx.errors.DataError as error:
            print(error, flush=True)
        sys.exit()
    os.wait()
    model(x[:1])
    recorder.batch(ids=[99])
"""


@pytest.mark.parametrize("end", ["none", "an error", "killed", "a child that records"])
def test_a_program_that_ends_without_leaving_the_block_keeps_its_rows(
    end: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(out), end], capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1:]
    assert last == (["ValueError"] if end == "an error" else [])
    assert ("this recording is that of process" in done.stdout) == (end == "a child that records")
    run = embedx.join(out)
    assert run.ids == [*map(str, range(N)), *(["99"] if "child" in end else [])]
    wanted = network()[0](X).detach().numpy()
    np.testing.assert_allclose(run.embeddings["0"][:N], wanted, atol=1e-6)
    assert [file.name for file in out.iterdir()] == ["embeddings.h5"]


FORKED = """
import os, sys, torch, embedx
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6)).eval()
x = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))

def recorded(recorder, x):
    with recorder:
        for rows in x.split(5):
            model(rows)
            recorder.batch()

before = embedx.record(model, "0", sys.argv[1] + "/before")
if os.fork() == 0:
    recorded(before, x)
    os._exit(0)
os.wait()
before.close()
reader, writer = os.pipe()
held = embedx.record(model, "0", sys.argv[1] + "/held")
model(x[:3])
held.batch()
if os.fork() == 0:
    os.read(reader, 1)
    recorded(embedx.record(model, "0", sys.argv[1] + "/held", overwrite=True), x)
    os._exit(0)
held.finish()
os.write(writer, b"!")
os.wait()
"""


def test_a_forked_process_records_with_a_recorder_of_before_and_where_its_parent_did(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], check=True)
    wanted = network()[0](X).detach().numpy()
    for name in ("before", "held"):
        run = embedx.open(tmp_path / name)
        np.testing.assert_allclose(run.embeddings["0"], wanted, atol=1e-6)
        assert [file.name for file in run.path.parent.iterdir()] == ["embeddings.h5"]


def test_a_recording_without_rows_is_not_joined_and_not_in_the_way(tmp_path: Path) -> None:
    part = writing.create(
        unfinished.parts_folder(tmp_path / "embeddings.h5") / "00000" / "embeddings.h5",
        ids=None,
        n_rows=8,
        fields=[
            layout.embeddings_field("0", n_features=6, dtype=np.dtype("f4"), attrs={}),
            layout.Field("ids", (), np.dtype("S9")),
        ],
        attrs={"id": "x", "first_row": 0},
    )
    part.close()
    with pytest.raises(StoreError, match=r"a recording of 0 rows: it was stopped before its first"):
        embedx.join(tmp_path)
    assert part.path.parent.exists()
    assert recorded(tmp_path).n_rows == N


class Interrupting:
    """A writer's append that is interrupted, or whose disk is full, at its k-th call."""

    def __init__(self, k: int, error: BaseException, *, late: bool) -> None:
        self.left, self.error, self.late = k, error, late
        self.real = writing.Writer.append

    def __get__(self, writer: writing.Writer, _: object) -> Callable[..., None]:
        def append(*args: object, **given: object) -> None:
            self.left -= 1
            if self.left == 0 and not self.late:
                raise self.error
            self.real(writer, *args, **given)  # type: ignore[arg-type]
            if self.left == 0:
                raise self.error

        return append


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("no room")])
def test_an_error_within_batch_ends_the_recording_whatever_the_loop_makes_of_it(
    error: BaseException, late: bool, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing.Writer, "append", Interrupting(k, error, late=late))
    model, caught = network(), []
    recorder = embedx.record(model, "0", tmp_path)
    with torch.no_grad():
        for rows in batches():
            model(X[rows])
            try:
                recorder.batch(ids=rows)
            except (KeyboardInterrupt, StoreError, DataError) as one:
                caught.append(one)
    assert caught[0] is error
    assert {type(one) for one in caught[1:]} == {DataError}
    assert f"ended with {type(error).__name__}" in str(caught[-1])
    with pytest.raises(DataError, match=r"the recording ended with .* embedx.join\("):
        recorder.finish()
    monkeypatch.undo()
    if recorder.n_rows:
        run = embedx.join(tmp_path)
        assert run.ids == [str(i) for i in range(recorder.n_rows)]
        wanted = model[0](X[: run.n_rows]).detach().numpy()
        np.testing.assert_allclose(run.embeddings["0"], wanted, atol=1e-6)
    else:
        assert (k, late) == (1, False)


def test_a_pass_that_fails_can_be_skipped(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad(), embedx.record(model, "0", tmp_path) as recorder:
        for step, rows in enumerate(batches()):
            try:
                model(X[rows] if step != 2 else X[rows, :3])
                recorder.batch(ids=rows)
            except RuntimeError:
                recorder.skip()
    kept = [i for i in range(N) if not 10 <= i < 15]
    run = embedx.open(tmp_path)
    assert run.ids == [str(i) for i in kept]
    wanted = network()[0](X[kept]).detach().numpy()
    np.testing.assert_allclose(run.embeddings["0"], wanted, atol=1e-6)


def test_a_pass_whose_batch_was_refused_is_over(tmp_path: Path) -> None:
    model = network()
    with embedx.record(model, ["0", "2"], tmp_path) as recorder:
        model[0](X[:5])
        with pytest.raises(LayerError, match="2 did not fire"):
            recorder.batch()
        for ids in ["abcde", list("abcde")]:
            model(X[:5])
            with pytest.raises(DataError) if ids == "abcde" else contextlib.nullcontext():
                recorder.batch(ids=ids)
    assert embedx.open(tmp_path).ids == list("abcde")


def test_a_model_that_is_recorded_is_saved_whole_in_a_pause(tmp_path: Path) -> None:
    model = network()
    with embedx.record(model, ["0", "2:input"], tmp_path / "run") as recorder:
        with pytest.raises(LayerError, match=r"cannot be saved whole; save its state_dict\(\), or"):
            torch.save(model, tmp_path / "model.pt")
        with recorder.paused():
            torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(again(X), model(X))
        recorder.batch()
    assert not again._forward_pre_hooks


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_copy_of_a_model_that_is_recorded_does_not_record(when: str, tmp_path: Path) -> None:
    """As for an average of its weights (EMA, SWA) that is updated and tried out in the loop."""
    model = network()
    with torch.no_grad(), embedx.record(model, ["0", "2"], tmp_path) as recorder:
        average = copy.deepcopy(model)
        for rows in batches():
            average(-X[rows])
            model(X[rows])
            average(-X[rows])
            recorder.batch()
            average(-X[rows])
            if when == "between":
                average = copy.deepcopy(model)
    wanted = network()(X).detach().numpy()
    np.testing.assert_allclose(embedx.open(tmp_path).embeddings["2"], wanted, atol=1e-6)


@pytest.mark.parametrize("first", ["batch", "backward"])
@pytest.mark.parametrize("point", ["a", "a@0"])
@pytest.mark.parametrize("called", ["model", "method"])
def test_layers_that_run_again_in_the_backward_pass_are_recorded_once(
    called: str, point: str, first: str, tmp_path: Path
) -> None:
    """Activation checkpointing, in a loop that calls the model or a method of it."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.fc = network()[0], nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            inner = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False)
            return self.fc(inner)  # type: ignore[no-any-return]

    model = Checkpointed()
    call = model if called == "model" else model.forward
    with embedx.record(model, point, tmp_path) as recorder:
        for rows in batches():
            loss = call(X[rows]).sum()
            if first == "batch":
                recorder.batch()
            loss.backward()
            if first == "backward":
                recorder.batch()
        model.a(X)
        with pytest.raises(DataError, match=r"layers ran after recorder.batch\(\) and outside"):
            model(X)
        recorder.skip()
    wanted = model.a(X).detach().numpy()
    np.testing.assert_allclose(embedx.open(tmp_path).embeddings[point], wanted, atol=1e-6)


def test_pauses_may_lie_within_each_other_and_after_the_end(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad(), embedx.record(model, "0", tmp_path) as recorder:
        model(X[:3])
        recorder.batch()
        with recorder.paused():
            with recorder.paused():
                model(X)
            model(X)
            model(X)
        model(X[3:])
        recorder.batch()
    with recorder.paused():
        pass
    assert all(not child._forward_hooks for child in model.modules())
    assert embedx.open(tmp_path).n_rows == N


def test_columns_have_any_name_and_one_type(tmp_path: Path) -> None:
    model = network()
    columns = {"loss/ce": [0.5, 1], "..": [True, False], "%2E": [2**62, -1], "epoch_": [1, 2.0]}
    with torch.no_grad(), embedx.record(model, "0", tmp_path) as recorder:
        for _ in range(5):
            model(X[:2])
            recorder.batch(**columns)
        model(X[:2])
        recorder.batch(**{**columns, "loss/ce": [1, 2]})  # whole numbers are fractions, too
    got = embedx.open(tmp_path).metadata
    for name, values in columns.items():
        wanted = np.array(values * 5 + (values if name != "loss/ce" else [1, 2]))
        np.testing.assert_array_equal(got[name], wanted)
        assert got[name].dtype.kind == ("f" if wanted.dtype.kind == "f" else "i")


def test_without_ids_samples_are_numbered_as_rows_are(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad(), embedx.record(model, "0", tmp_path) as recorder:
        for epoch in range(2):
            model(X[:2])
            recorder.batch(epoch=epoch)
    run = embedx.open(tmp_path)
    assert run.ids == ["0#0", "1#0", "2#1", "3#1"]
    assert run.metadata["sample"] == ["0", "1", "2", "3"]
    assert run.metadata["epoch"].tolist() == [0, 0, 1, 1]


def test_tensors_in_lists_are_the_numbers_that_they_hold(tmp_path: Path) -> None:
    model = network()
    with embedx.record(model, "0", tmp_path) as recorder:
        out = model(X)
        recorder.batch(ids=list(torch.arange(N)), labels=list(Y), loss=list(out[:, 0]))
    run = embedx.open(tmp_path)
    assert run.ids == [str(i) for i in range(N)]
    assert run.label_texts() == [str(i % 3) for i in range(N)]
    np.testing.assert_allclose(run.metadata["loss"], out[:, 0].detach().numpy())


def test_a_pooling_with_parameters_of_its_own_is_applied(tmp_path: Path) -> None:
    model, pool = network(), nn.Linear(6, 2)
    with embedx.record(model, "0", tmp_path, pooling=pool) as recorder:
        out = model[0](X)
        recorder.batch()
    wanted = pool(out).detach().numpy()
    np.testing.assert_allclose(embedx.open(tmp_path).embeddings["0"], wanted, atol=1e-6)


def test_a_loop_that_goes_elsewhere_records_where_it_was_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with embedx.record(model, "0", "run") as recorder:
        monkeypatch.chdir(tmp_path / "elsewhere")
        model(X)
        recorder.batch()
        monkeypatch.chdir(tmp_path)
        model(X)
        recorder.batch()
    assert embedx.open(tmp_path / "run").n_rows == 2 * N
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_loop_that_goes_on_from_every_error_is_told_what_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    with embedx.record(model, "0", tmp_path) as recorder:
        for i, rows in enumerate(batches()):
            with contextlib.suppress(Exception):
                model(X[rows] if i != 1 else X[rows, :3])
                recorder.batch(ids=rows)
    assert "3 passes or batches were refused with an error that the loop went on" in caplog.text
    assert embedx.open(tmp_path).n_rows == 5


class Tokens(nn.Module):
    """Tokens of samples, those that are padding left out of what is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 5)

    def forward(self, tokens: Tensor | dict[str, Tensor], attention_mask: Any = None) -> Tensor:
        if isinstance(tokens, dict):
            tokens, attention_mask = tokens["tokens"], tokens["attention_mask"]
        inner = self.embed(tokens)
        attention_mask[:] = 0  # a copy of it was taken
        return inner  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("how", "pooling"),
    [
        ("by name", "mean_token"),
        ("by name", "auto"),
        ("by position", "mean_token"),
        ("one dict", "mean_token"),
        ("a method", "mean_token"),
    ],
)
def test_padding_is_left_out_of_the_average_of_tokens(
    how: str, pooling: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tokens().eval()
    tokens = torch.arange(48).reshape(8, 6) % 9
    mask = (torch.arange(6) < torch.tensor([6, 1, 2, 3, 4, 5, 6, 1])[:, None]).long()
    vectors = model.embed.weight.detach().numpy()[tokens.numpy()]
    with torch.no_grad(), embedx.record(model, "embed", tmp_path, pooling=pooling) as recorder:
        for rows in torch.arange(8).split(4):
            given = {"tokens": tokens[rows], "attention_mask": mask[rows]}
            if how == "by name":
                model(**given)
            elif how == "by position":
                model(*given.values())
            elif how == "one dict":
                model(given)
            else:
                model.forward(**given)
            recorder.batch()
    lengths = [6] * 8 if how == "a method" else mask.sum(1).tolist()
    kept = [vectors[i, :length] for i, length in enumerate(lengths)]
    wanted = np.stack([one.mean(0) for one in kept])
    np.testing.assert_allclose(embedx.open(tmp_path).embeddings["embed"], wanted, atol=1e-6)
    assert ("pooling of embed counts padding as tokens" in caplog.text) == (how == "a method")


@dataclasses.dataclass(slots=True)
class Entering:
    tokens: Tensor
    attention_mask: Tensor


class Takes(nn.Module):
    """Takes tokens and their mask as somebody has them."""

    def __init__(self, unpack: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.inner = Tokens()
        self.unpack = unpack

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*self.unpack(*args, **kwargs))  # type: ignore[no-any-return]


class Held:
    """A batch of somebody's own class."""

    def __init__(self, tokens: Tensor, attention_mask: Tensor) -> None:
        self.tokens, self.attention_mask = tokens, attention_mask


MASKS_BY_NAME = ["dict by keyword", "dataclass", "namespace", "object", "dict in a tuple"]
MASKS_SAID = [
    "tuple",
    "dict",
    "positions",
    "with axes",
    "of two axes",
    "lengths",
    "numpy",
    "packed",
]


@pytest.mark.parametrize("how", [*MASKS_BY_NAME, *MASKS_SAID])
def test_a_mask_is_found_where_it_has_its_name_and_said_where_it_has_none(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = torch.arange(48).reshape(8, 6) % 9
    mask = (torch.arange(6) < torch.tensor([6, 1, 2, 3, 4, 5, 6, 1])[:, None]).long()
    given = {"tokens": tokens, "attention_mask": mask.clone()}
    unpack, args, kwargs = {
        "dict by keyword": (lambda batch: tuple(batch.values()), (), {"batch": given}),
        "dataclass": (lambda b: (b.tokens, b.attention_mask), (Entering(**given),), {}),
        "tuple": (lambda batch: batch, (tuple(given.values()),), {}),
        "dict": (lambda b: (b["x"], b["m"]), ({"x": tokens, "m": given["attention_mask"]},), {}),
        "positions": (lambda *args: args, tuple(given.values()), {}),
        "namespace": (
            lambda b: (b.tokens, b.attention_mask),
            (types.SimpleNamespace(**given),),
            {},
        ),
        "object": (lambda b: (b.tokens, b.attention_mask), (Held(**given),), {}),
        "packed": (
            lambda x, packed: (x, mask),
            (tokens,),
            {
                "packed": nn.utils.rnn.pack_padded_sequence(
                    tokens, mask.sum(1), batch_first=True, enforce_sorted=False
                )
            },
        ),
        "dict in a tuple": (lambda batch: tuple(batch[0].values()), ((given, 3),), {}),
        "with axes": (
            lambda x, src_mask: (x, src_mask[:, 0, 0]),
            (tokens,),
            {"src_mask": mask[:, None, None]},
        ),
        "of two axes": (
            lambda x, src_mask: (x, src_mask[:, -1]),
            (tokens,),
            {"src_mask": mask[:, None].repeat(1, 6, 1)},
        ),
        "lengths": (lambda x, lengths: (x, mask), (tokens,), {"lengths": mask.sum(1).tolist()}),
        "numpy": (lambda x, mask: (x, torch.as_tensor(mask)), (tokens, mask.numpy()), {}),
    }[how]  # type: ignore[attr-defined]
    model = Takes(unpack).eval()
    vectors = model.inner.embed.weight.detach()[tokens]
    with (
        torch.no_grad(),
        embedx.record(model, "inner.embed", tmp_path, pooling="mean_token") as recorder,
    ):
        model(*args, **kwargs)
        recorder.batch()
    kept = mask[..., None] if how in MASKS_BY_NAME else torch.ones(8, 6, 1)
    wanted = (vectors * kept).sum(1) / kept.sum(1)
    rows = embedx.open(tmp_path).embeddings["inner.embed"]
    np.testing.assert_allclose(rows, wanted, atol=1e-6)
    assert ("looks like a mask of padding" in caplog.text) == (how in MASKS_SAID)


class Pairs(nn.Module):
    """Two texts through one encoder, or two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tokens()

    def forward(self, *texts: Any, **by_name: Tensor) -> Tensor:
        if by_name:
            names = [name.removesuffix("attention_mask") for name in by_name if "mask" in name]
            pairs = [(by_name[f"{one}ids"], by_name[f"{one}attention_mask"]) for one in names]
            return torch.stack([self.inner(*pair) for pair in pairs])
        (one, other) = texts[0].values() if len(texts) == 1 else texts
        return torch.stack([self.inner(**one), self.inner(**other)])


@pytest.mark.parametrize("how", ["two dicts", "a dict of dicts", "other names"])
def test_of_two_masks_that_differ_none_is_taken_for_the_other(how: str, tmp_path: Path) -> None:
    def text(least: int) -> dict[str, Tensor]:
        mask = (torch.arange(6) < least + torch.arange(4)[:, None]).long()
        return {"tokens": torch.arange(24).reshape(4, 6) % 9, "attention_mask": mask}

    def enter(model: nn.Module, one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
        if how == "two dicts":
            model(one, other)
        elif how == "a dict of dicts":
            model({"query": one, "document": other})
        else:
            named = {"ids": one["tokens"], "attention_mask": one["attention_mask"]}
            more = {"pos_ids": other["tokens"], "pos_attention_mask": other["attention_mask"]}
            model(**named, **more)

    model = Pairs().eval()
    with torch.no_grad():
        with embedx.record(model, "inner.embed@0", tmp_path / "a", pooling="mean_token") as rec:
            enter(model, text(1), text(1))  # they say the same
            rec.batch()
            with pytest.raises(ShapeError, match="attention_mask and (another|pos_)"):
                enter(model, text(1), text(3))
            rec.skip()
        with embedx.record(model, "inner.embed@0", tmp_path / "b", pooling="cls") as rec:
            enter(model, text(1), text(3))
            rec.batch()
    assert embedx.open(tmp_path / "a").n_rows == embedx.open(tmp_path / "b").n_rows == 4


def test_an_axis_that_may_be_that_of_the_tokens_in_every_batch_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 6)).eval()
    for sizes in ([8, 8], [8, 7]):
        caplog.clear()
        with embedx.record(model, "0", tmp_path / str(sizes), pooling="mean_token") as recorder:
            for n in sizes:
                model(torch.zeros(n, 8, 4))
                recorder.batch()
        said = "0 gave (8, 8, 6) in every batch: its first axis was taken for that of the samples"
        assert (said in caplog.text) == (sizes == [8, 8])
        assert embedx.open(tmp_path / str(sizes)).n_rows == sum(sizes)
    caplog.clear()
    with (
        contextlib.suppress(KeyboardInterrupt),
        embedx.record(model, "0", tmp_path / "stopped", pooling="mean_token") as recorder,
    ):
        model(torch.zeros(8, 8, 4))
        recorder.batch()
        raise KeyboardInterrupt
    assert "0 gave (8, 8, 6) in every batch" in caplog.text


def test_what_else_runs_the_layers_of_a_model_that_is_not_called_itself_is_refused_or_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    with torch.no_grad(), embedx.record(model, "0@0", tmp_path / "a") as recorder:
        for rows in batches():
            model[0](X[rows])
            recorder.batch(ids=rows)
        model[0](X)  # a validation
        model[0](-X)
        with pytest.raises(
            DataError, match=r"0 ran 2 time\(s\) for this batch and 1 for the first"
        ):
            recorder.batch(ids=range(N, 2 * N))
    assert embedx.open(tmp_path / "a").n_rows == N
    assert "all are taken for calls of one pass" not in caplog.text
    with torch.no_grad(), embedx.record(model, "0@0", tmp_path / "b") as recorder:
        model[0](X)
        model[0](-X)
        recorder.batch()
    assert "before the first batch ran 0 2 times: all are taken for calls of one" in caplog.text


class Stepping(nn.Module):
    """Trained by a method of its own, as with Lightning, and validated by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(X.shape[1], X.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).relu())  # type: ignore[no-any-return]

    def training_step(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).relu()).sum()  # type: ignore[no-any-return]


def test_a_pass_of_the_model_between_steps_of_a_method_is_refused(tmp_path: Path) -> None:
    model = Stepping().eval()
    with torch.no_grad(), embedx.record(model, "linear@0", tmp_path) as recorder:
        model.training_step(X)
        recorder.batch()
        model(-X)  # a validation
        model.training_step(X)
        with pytest.raises(DataError, match=r"linear ran 4 time\(s\) .* and 2 for the first"):
            recorder.batch()
        with recorder.paused():
            model(-X)
        model.training_step(X)
        recorder.batch()
    rows = embedx.open(tmp_path).embeddings["linear@0"]
    assert np.array_equal(rows[:N], rows[N:])


def remade(out: Path, *, column: str = "loss", **options: Any) -> store.Embeddings:
    """The same loop, recorded under other words."""
    model = network()
    options = {"label_names": ["dog", "cat", "cow"], **options}
    with torch.no_grad(), embedx.record(model, "0", out, overwrite=True, **options) as recorder:
        for rows in batches():
            model(X[rows])
            recorder.batch(labels=Y[rows], **{column: Y[rows]})
    return embedx.open(out)


def test_the_same_loop_under_other_words_is_another_file(tmp_path: Path) -> None:
    ids = {remade(tmp_path).attrs["id"]}
    again = remade(tmp_path, label_names=["cat", "dog", "cow"])
    assert (again.label_texts() or [])[:3] == ["cat", "dog", "cow"]
    ids.add(again.attrs["id"])
    again = remade(tmp_path, column="accuracy")
    assert list(again.metadata) == ["accuracy"]
    ids.add(again.attrs["id"])
    again = remade(tmp_path, pooling="flatten")
    assert again.point_attrs["0"]["pooling"] == "flatten"
    ids.add(again.attrs["id"])
    assert len(ids) == 4


def test_a_damaged_file_is_replaced_by_an_equal_recording(tmp_path: Path) -> None:
    run = remade(tmp_path)
    whole, row = run.path.read_bytes(), run.embeddings["0"][3].tobytes()
    first = embedx.project(run, method="pca").path
    remade(tmp_path)
    assert first.exists()  # it is of equal rows
    assert run.path.read_bytes() == whole
    run.path.write_bytes(whole.replace(row, bytes(len(row))))
    assert embedx.open(tmp_path).verify() == [3]
    remade(tmp_path)
    assert run.path.read_bytes() == whole
    assert not first.exists()  # it may be of the damaged ones


# --------------------------------------------------------------------------- others in the folder


def begun(out: Path, **options: object) -> Recorder:
    """A recording of five rows that was not finished."""
    model = network()
    recorder = embedx.record(model, "0", out, **options)  # type: ignore[arg-type]
    model(X[:5])
    recorder.batch(ids=list("abcde"))
    recorder.close()
    return recorder


def extracted(out: Path, **options: object) -> store.Embeddings:
    return embedx.extract(network(), X, layers="2", out=out, batch_size=4, **options)  # type: ignore[arg-type]


def extraction_stopped(out: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(writing, "COMMIT_S", 0)
        patch.setattr(writing.Writer, "append", Interrupting(4, KeyboardInterrupt(), late=False))
        with pytest.raises(KeyboardInterrupt):
            extracted(out, **options)
    partial = unfinished.partial_path(out / "embeddings.h5")
    assert 0 < store.Embeddings(partial).n_rows < N
    return partial


def test_the_later_of_two_recorders_of_one_folder_is_refused(tmp_path: Path) -> None:
    first, second = network(), network()
    with torch.no_grad(), embedx.record(first, "0", tmp_path) as recorder:
        late = embedx.record(second, "0", tmp_path)
        first(X)
        recorder.batch()
        with pytest.raises(InUseError, match="is being written by this process"):
            embedx.record(second, "0", tmp_path, overwrite=True)
        second(X[:3])
        with pytest.raises(InUseError, match="is being written by this process"):
            late.batch()
    third = embedx.record(second, "0", tmp_path / "b")
    extracted(tmp_path / "b")
    second(X[:3])
    with pytest.raises(StoreError, match="is there already; choose another out"):
        third.batch()
    assert embedx.open(tmp_path).n_rows == embedx.open(tmp_path / "b").n_rows == N


def test_extraction_leaves_a_recording_that_was_not_finished(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(StoreError, match=r"a recording that was not finished; .*embedx.join"):
        extracted(tmp_path)
    assert embedx.join(tmp_path).ids == list("abcde")
    begun(tmp_path, overwrite=True)
    assert extracted(tmp_path, overwrite=True).n_rows == N
    with pytest.raises(StoreError, match="holds no recording"):
        embedx.join(tmp_path)
    recorder = embedx.record(network(), "0", tmp_path, overwrite=True)
    recorder._got._module(X)
    recorder.batch()
    with pytest.raises(InUseError, match="is being written by this process"):
        extracted(tmp_path, overwrite=True)
    recorder.close()


def test_recording_leaves_an_extraction_that_was_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = extraction_stopped(tmp_path, monkeypatch)
    before = partial.read_bytes()
    with pytest.raises(StoreError, match=r"embeddings.h5.partial is there already; choose another"):
        embedx.record(network(), "0", tmp_path)
    assert partial.read_bytes() == before
    begun(tmp_path, overwrite=True)
    assert not partial.exists()


def test_joining_replaces_nothing_that_came_after_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, come in {"whole": extracted, "part": extraction_stopped}.items():
        out = tmp_path / name
        begun(out)
        parts = unfinished.parts_folder(out / "embeddings.h5")
        parts.rename(tmp_path / "aside")
        come(out, *([monkeypatch] if name == "part" else []))  # type: ignore[operator]
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        (tmp_path / "aside").rename(parts)
        with pytest.raises(StoreError, match=r"was not there when the recording began, .*move it"):
            embedx.join(out)
        parts.rename(tmp_path / "aside")
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before
        (tmp_path / "aside").rename(tmp_path / f"{name} parts")


def test_a_recording_that_was_to_overwrite_replaces_that_file_alone(tmp_path: Path) -> None:
    extracted(tmp_path)
    begun(tmp_path, overwrite=True)
    assert embedx.open(tmp_path).n_rows == N  # the old one stays until the new one is whole
    assert embedx.join(tmp_path).n_rows == 5


def test_joining_that_is_killed_while_it_removes_the_parts_leaves_no_shorter_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    recorder = embedx.record(model, "0", tmp_path)
    for rows in batches():
        model(X[rows])
        recorder.batch(ids=rows)
    recorder.close()
    parts = unfinished.parts_folder(tmp_path / "embeddings.h5")
    shutil.copytree(parts, tmp_path / "copy")
    real = shutil.rmtree

    def killed(path: Path, **options: object) -> None:
        if Path(path).exists():
            real(Path(path) / "00002")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            embedx.join(tmp_path)
    whole = (tmp_path / "embeddings.h5").read_bytes()
    assert embedx.open(tmp_path).n_rows == N
    with pytest.raises(StoreError, match="holds no recording"):
        embedx.join(tmp_path)
    (tmp_path / "copy").rename(parts)  # killed before it removed them
    assert embedx.join(tmp_path).n_rows == N
    assert (tmp_path / "embeddings.h5").read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["embeddings.h5"]


def test_an_extraction_that_was_to_overwrite_begins_anew_and_goes_on_where_it_is_not_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extraction_stopped(tmp_path, monkeypatch)
    appended = []
    real = writing.Writer.append

    def note(self: writing.Writer, rows: object, **given: object) -> None:
        appended.append(len(given["status"]))  # type: ignore[arg-type]
        real(self, rows, **given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(writing.Writer, "append", note)
        extracted(tmp_path, overwrite=True)
        assert sum(appended) == N  # none was taken from what was begun before
        whole = (tmp_path / "embeddings.h5").read_bytes()
        appended.clear()
        extraction_stopped(tmp_path, monkeypatch, overwrite=True)
        assert (tmp_path / "embeddings.h5").read_bytes() == whole
        patch.setattr(writing.Writer, "append", note)
        appended.clear()
        extracted(tmp_path)
        assert 0 < sum(appended) < N
    assert (tmp_path / "embeddings.h5").read_bytes() == whole
    assert not unfinished.partial_path(tmp_path / "embeddings.h5").exists()


def test_two_classes_of_one_name_in_a_loop_are_two(tmp_path: Path) -> None:
    model = network()
    names = ["crane", "hen", "crane"]
    with torch.no_grad(), embedx.record(model, "0", tmp_path, label_names=names) as recorder:
        model(X[:3])
        recorder.batch(labels=[0, 1, 2])
    assert embedx.open(tmp_path).label_texts() == ["crane (0)", "hen", "crane (2)"]
