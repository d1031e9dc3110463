"""Extraction: every row equals a plain forward pass, or is said to have failed; nothing is lost."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import embedx
from embedx import data, models, store
from embedx.data import Source
from embedx.errors import ConfigError, DataError, LayerError, ModelError, ShapeError, StoreError
from embedx.models import Model, Preprocess


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.fixture(scope="module")
def resnet() -> Model:
    return models.torchvision("resnet18", weights=None, input_size=64)


def plain(model: Model, paths: list[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """layer1 averaged, avgpool, logits: by hand, from the files."""
    module = model.module
    assert model.preprocess is not None
    pixels = [model.preprocess.pixels(Image.open(path).convert("RGB")) for path in paths]
    with torch.inference_mode():
        x = model.preprocess.normalize(torch.stack(pixels))
        x = module.maxpool(module.relu(module.bn1(module.conv1(x))))
        first = module.layer1(x)
        pooled = module.avgpool(module.layer4(module.layer3(module.layer2(first)))).flatten(1)
        return first.mean((2, 3)).numpy(), pooled.numpy(), module.fc(pooled).numpy()


def test_rows_equal_a_plain_forward_pass_and_carry_their_ids_labels_and_pictures(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    got = embedx.extract(
        resnet,
        photos,
        layers=["layer1", "avgpool"],
        batch_size=5,
        save_outputs=True,
        out=tmp_path / "run",
    )
    paths = sorted(photos.rglob("*.jpg"))
    first, pooled, logits = plain(resnet, paths)
    assert got.ids == [path.relative_to(photos).as_posix() for path in paths]
    assert got.label_texts() == [path.parent.name for path in paths]
    assert list(got.embeddings) == ["layer1", "avgpool"]
    assert relative_error(got.embeddings["layer1"], first) < 1e-5
    assert relative_error(got.embeddings["avgpool"], pooled) < 1e-5
    assert relative_error(got.outputs["logits"], logits) < 1e-5
    assert got.outputs["predicted"].tolist() == logits.argmax(1).tolist()
    assert np.abs(pooled[0] - pooled[1]).max() > 1e-3  # the oracle tells rows apart
    assert got.thumbnails is not None
    for i, path in enumerate(paths):
        tile = data.thumbnail(Image.open(path), 32)
        np.testing.assert_array_equal(got.thumbnails[i], tile)
    assert got.attrs["weights_sha256"] == resnet.weights_sha256
    assert got.point_attrs["layer1"]["pooling"] == "gap"
    assert got.verify() == []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.b(self.a(x).relu_())


def test_several_layers_come_from_the_one_pass_and_a_live_model_is_left_as_it_was(
    tmp_path: Path,
) -> None:
    model = Counting().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    x = np.random.default_rng(0).standard_normal((10, 4)).astype("f4")
    got = embedx.extract(
        model, x, layers=["a", "b", "b:input"], batch_size=4, out=tmp_path, labels=list("ab" * 5)
    )
    assert model.passes == 3
    with torch.inference_mode():
        a = model.a(torch.from_numpy(x))
        np.testing.assert_allclose(got.embeddings["a"], a.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.embeddings["b:input"], a.relu().numpy(), atol=1e-6)
        np.testing.assert_allclose(got.embeddings["b"], model.b(a.relu()).numpy(), atol=1e-6)
    assert (got.embeddings["a"] < 0).any()
    assert got.label_texts() == list("ab" * 5)
    assert model.training
    assert model.a.training
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.a._forward_hooks
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def sha256(path: Path) -> str:
    return models.file_sha256(path)


def test_worker_count_and_name_do_not_change_the_bytes(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    for workers in (0, 2):
        embedx.extract(
            resnet, photos, num_workers=workers, batch_size=5, out=tmp_path / str(workers)
        )
    assert sha256(tmp_path / "0" / "embeddings.h5") == sha256(tmp_path / "2" / "embeddings.h5")
    opened = store.open(tmp_path / "2")
    assert b"/" not in opened.attrs["config"].encode()  # no paths travel with the file
    assert str(tmp_path) not in json.dumps(opened.attrs)


@pytest.mark.parametrize("bad", [{3}, {0, 1, 2, 3, 4}, {10, 11}, {5, 6, 7, 8, 9}, {0, 11}])
def test_a_bad_picture_fails_its_own_row_and_the_others_stay_exact(
    photos: Path, resnet: Model, tmp_path: Path, bad: set[int]
) -> None:
    paths = sorted(photos.rglob("*.jpg"))
    _, pooled, _ = plain(resnet, paths)
    for i in bad:
        paths[i].write_bytes(paths[i].read_bytes()[:200] if i % 2 else b"")
    got = embedx.extract(resnet, photos, batch_size=5, out=tmp_path / "run", save_outputs=True)
    assert np.flatnonzero(got.status == store.Status.FAILED).tolist() == sorted(bad)
    assert np.isnan(got.embeddings["avgpool" if "avgpool" in got.embeddings else "fc:input"])[
        sorted(bad)
    ].all()
    point, rows = got.rows()
    good = sorted(set(range(12)) - bad)
    assert relative_error(rows[good], pooled[good]) < 1e-5
    assert got.outputs["predicted"][sorted(bad)].tolist() == [-1] * len(bad)
    reasons = store.read_reasons(got.path)
    assert [r["id"] for r in reasons] == [got.ids[i] for i in sorted(bad)]
    assert all(r["reason"] and str(photos) not in r["reason"] for r in reasons)
    assert got.verify() == []


def test_all_bad_is_an_error_and_leaves_no_file(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    for path in photos.rglob("*.jpg"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="every one of the 12 rows failed; the first, cat/01.jpg"):
        embedx.extract(resnet, photos, batch_size=5, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_on_error_raise_stops_at_the_first_bad_row(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    paths = sorted(photos.rglob("*.jpg"))
    paths[7].write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"row 7, dog/02.jpg: .*on_error=skip"):
        embedx.extract(resnet, photos, batch_size=5, on_error="raise", out=tmp_path / "run")
    got = embedx.extract(resnet, photos, batch_size=5, out=tmp_path / "run")  # goes on
    assert np.flatnonzero(~got.ok).tolist() == [7]


def test_values_that_are_not_finite_fail_their_row(tmp_path: Path) -> None:
    x = np.ones((6, 4), "f4")
    x[2] = np.nan
    x[4] = 1e30
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2))
    nn.init.ones_(model[0].weight)
    got = embedx.extract(model, x, layers="0", batch_size=4, dtype="float16", out=tmp_path)
    assert np.flatnonzero(~got.ok).tolist() == [2, 4]
    assert got.embeddings["0"].dtype == np.float16
    np.testing.assert_array_equal(got.embeddings["0"][0], 4)
    assert [r["reason"] for r in store.read_reasons(got.path)] == ["NaN or Inf in 0"] * 2


def test_done_is_done_and_other_settings_are_refused_with_the_difference(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = embedx.extract(resnet, photos, out=out)
    stamp = first.path.stat().st_mtime_ns
    assert embedx.extract(resnet, photos, out=out, num_workers=1).path.stat().st_mtime_ns == stamp
    embedx.project(out, method="pca")
    with pytest.raises(StoreError, match="its layers is .* and here it is .*overwrite=true"):
        embedx.extract(resnet, photos, out=out, layers="layer1")
    other = models.torchvision("resnet18", weights=None, input_size=64, seed=1)
    with pytest.raises(StoreError, match="its weights_sha256 is"):
        embedx.extract(other, photos, out=out)
    smaller = models.torchvision("resnet18", weights=None, input_size=32)
    with pytest.raises(StoreError, match="its preprocess is"):
        embedx.extract(smaller, photos, out=out)
    next(photos.rglob("*.jpg")).touch()
    with pytest.raises(StoreError, match="the data has changed since"):
        embedx.extract(resnet, photos, out=out)
    assert first.path.stat().st_mtime_ns == stamp
    assert list((out / "projections").iterdir())
    again = embedx.extract(resnet, photos, out=out, overwrite=True)
    assert again.path.stat().st_mtime_ns != stamp
    assert not (out / "projections").exists()  # what was made of the old rows is gone with them


def test_wrong_arguments_are_said_in_one_line(photos: Path, resnet: Model, tmp_path: Path) -> None:
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    lazy = nn.Sequential(nn.LazyLinear(2))
    x = np.zeros((3, 4), "f4")
    linear = nn.Sequential(nn.Linear(4, 2))
    cases = [
        ((resnet, photos), {"batch_size": 0}, ConfigError, "batch_size must be at least 1"),
        ((resnet, photos), {"num_workers": -1}, ConfigError, "num_workers must be at least 0"),
        ((resnet, photos), {"thumbnails": 9999}, ConfigError, "thumbnails must be 0 to 512"),
        ((resnet, photos), {"precision": "fp16"}, ConfigError, "precision=fp16 needs a GPU"),
        ((resnet, photos), {"device": "cuda:7"}, ConfigError, "is not on this machine; it has:"),
        ((resnet, photos), {"layers": "layer9"}, LayerError, "the nearest of its 67 layers"),
        ((resnet, photos), {"layers": []}, LayerError, "layers is empty"),
        ((resnet, photos), {"pooling": "gpa"}, ConfigError, "'gpa' is not known"),
        ((resnet, photos), {"layers": "layer1", "pooling": "none"}, ShapeError, "pooling=none"),
        ((resnet, photos), {"layers": "layer1.0.relu"}, LayerError, "ran 2 times in one pass"),
        ((resnet, tmp_path / "no"), {}, DataError, "is not there"),
        ((resnet, photos), {"out": photos}, ConfigError, "is the folder of the data; choose"),
        ((resnet, []), {}, DataError, "data is empty"),
        ((resnet, 5), {}, DataError, "data is a int; give a folder"),
        ((resnet, photos), {"labels": [1]}, ConfigError, "has ids and labels of its own"),
        (("resnet18", photos), {}, ConfigError, "model is a str; give an nn.Module"),
        ((tiny, photos), {}, ConfigError, "say how they enter it with preprocess="),
        ((linear, x[:, :3]), {}, ModelError, r"sequential failed on a batch of shape \(3, 3\)"),
        ((lazy, x), {}, ModelError, "has lazy layers that have no shape yet"),
        ((linear, x), {"labels": [1]}, DataError, "3 samples and 1 labels"),
    ]
    for arguments, options, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            embedx.extract(*arguments, **{"out": tmp_path / "out", **options})
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_samples_of_different_shapes_are_named(tmp_path: Path) -> None:
    items = [torch.zeros(3), torch.zeros(4)]
    source = Source("odd", ["a", "b"], items.__getitem__, "x")
    with pytest.raises(ShapeError, match=r"sample b has shape \(4,\) and sample a has \(3,\)"):
        embedx.extract(nn.Sequential(nn.Linear(3, 2)), source, out=tmp_path)


def test_half_precision_is_near_and_is_stored_as_a_fact(
    photos: Path, resnet: Model, tmp_path: Path
) -> None:
    full = embedx.extract(resnet, photos, out=tmp_path / "a")
    half = embedx.extract(resnet, photos, out=tmp_path / "b", precision="bf16")
    error = relative_error(half.rows()[1], full.rows()[1])
    assert 0 < error < 0.05
    assert json.loads(half.attrs["identity"])["precision"] == "bf16"


SLOW = """
import time
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        time.sleep(0.2)
        return self.head(self.body(x))

def make():
    return Slow()
"""


SLOW_RUN = [
    *(sys.executable, "-m", "embedx", "extract", "model=own", "model._target_=slow.make"),
    *("model.input_size=16", "data.limit=180", "batch_size=10"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "slow.py").write_text(SLOW)
    subprocess.run([*SLOW_RUN, "name=whole"], cwd=folder, check=True, capture_output=True)
    return sha256(folder / "outputs" / "whole" / "embeddings.h5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGINT, 0), (signal.SIGTERM, 2), (signal.SIGKILL, 0), (signal.SIGKILL, 2)],
)
def test_a_run_stopped_by_a_signal_ends_with_the_same_bytes_as_one_that_was_not(
    tmp_path: Path, uninterrupted: str, number: signal.Signals, workers: int
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [*SLOW_RUN, f"num_workers={workers}", "name=stopped"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    partial = store.partial_path(tmp_path / "outputs" / "stopped" / "embeddings.h5")
    deadline = time.monotonic() + 60
    kept = 0
    while kept == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        if partial.exists():
            kept = store.Embeddings(partial).n_rows
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number
        last = err.strip().splitlines()
        assert len(last) == 1, err
        assert last[0].startswith(f"Interrupted: stopped by {number.name}: ")
        assert last[0].endswith("run the same command again to go on")
    assert 0 < kept < 180
    assert store.Embeddings(partial).n_rows >= kept

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "going on at row" in again.stdout
    path = tmp_path / "outputs" / "stopped" / "embeddings.h5"
    assert sha256(path) == uninterrupted
    assert store.open(path).n_rows == 180
    assert sorted(p.name for p in path.parent.iterdir()) == ["config.yaml", "embeddings.h5"]


def test_a_live_model_takes_pictures_when_told_how(photos: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)).eval()
    prepared = Preprocess(resize_px=8, crop_px=8)
    got = embedx.extract(
        model, photos, preprocess=prepared, layers="0", pooling="none", out=tmp_path / "o"
    )
    first = Image.open(sorted(photos.rglob("*.jpg"))[0])
    expected = prepared.normalize(prepared.pixels(first)[None]).flatten(1).numpy()
    np.testing.assert_allclose(got.embeddings["0"][:1], expected, rtol=1e-6)
