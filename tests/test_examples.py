"""The notebooks of ``examples/`` run as they are, and what they show is there."""

import base64
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import embedx
import embedx.store
from embedx.scores import knn_accuracy

from .conftest import ROOT, embeddings_file

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def printed(notebook: Any) -> str:
    return "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )


def pictures(notebook: Any) -> list[Image.Image]:
    return [
        Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


def number(pattern: str, text: str) -> float:
    (found,) = re.findall(pattern, text)
    return float(found)


def check_model_to_map(notebook: Any, folder: Path) -> None:
    text = printed(notebook)
    assert number(r"accuracy on digits it has not seen: ([\d.]+)", text) > 0.85
    accuracies = {
        layer: float(accuracy)
        for layer, accuracy in re.findall(r"^(\w+) +1,797 +\d+ +([\d.]+)", text, re.M)
    }
    assert accuracies["hidden"] > 0.95
    assert 0.3 < accuracies["relu1"] < 0.85
    odd = number(r"(\d+) of 1797 digits have a majority", text)
    assert 5 <= odd <= 120
    the_map, odd_ones = pictures(notebook)
    assert the_map.width > 1.5 * the_map.height
    colors = np.unique(np.asarray(the_map.convert("RGB")).reshape(-1, 3), axis=0)
    assert len(colors) > 100
    assert odd_ones.width > 3 * odd_ones.height
    if folder != ROOT:
        import embedx

        run = embedx.open(folder / "outputs" / "digits")
        assert (run.n_rows, int(run.ok.sum())) == (1797, 1797)
        assert {name: rows.shape for name, rows in run.embeddings.items()} == {
            "relu1": (1797, 16),
            "hidden": (1797, 64),
        }


CHECKS = {"model_to_map": check_model_to_map}


def test_every_notebook_has_a_check_of_its_own() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(CHECKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_lies_there_with_its_outputs_and_without_traces_of_a_machine(path: Path) -> None:
    raw = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(raw, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert len(raw) < 400_000
    assert not re.search(r"/(home|root|tmp|work|Users|usr)/", raw)
    assert not re.search(r"Warning|Traceback", printed(notebook))
    CHECKS[path.stem](notebook, ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_shows_what_it_promises(
    path: Path, tmp_path: Path
) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) >= 5
    for cell in cells:
        cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        notebook, timeout=280, coalesce_streams=True, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.get("name") == "stderr" or o.output_type == "error"]
    CHECKS[path.stem](notebook, tmp_path)


@pytest.mark.slow
def test_pacmap_comes_in_by_a_config_file_and_is_a_map_like_the_others(tmp_path: Path) -> None:
    pytest.importorskip("pacmap", reason="the example needs the package pacmap")
    digits = load_digits()
    rows = digits.data[:600].astype(np.float32)
    path = embeddings_file(tmp_path / "run", rows, labels=digits.target[:600])

    def embedx_there(*words: str) -> list[str]:
        command = [sys.executable, "-m", "embedx", *words, f"embeddings={path}"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=280, cwd=ROOT / "examples"
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.splitlines()

    mine = ("project", "--config-dir", "conf", "projection=pacmap")
    lines = embedx_there(*mine, "projection.n_neighbors=12")
    assert [line.split(" ")[0] for line in lines][-2:] == ["wrote", "next:"]
    assert embedx_there(*mine, "projection.n_neighbors=12")[0].endswith("nothing to do")
    (found,) = embedx.derived.projections_of(embedx.open(path))
    kept = {"n_neighbors": 12, "mn_ratio": 0.5, "fp_ratio": 2.0, "method": "pacmap"}
    assert {key: found.attrs[key] for key in kept} == kept
    accuracy = knn_accuracy(found.coords, digits.target[:600])
    assert accuracy is not None
    assert accuracy > 0.9
    assert any("pacmap" in line for line in embedx_there("evaluate"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["watch_training", "lightning_callback"])
def test_a_script_runs_and_records_every_epoch(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = embedx.open(tmp_path / "run")
    epochs = np.asarray(run.metadata["epoch"])
    n_epochs = 4 if name == "watch_training" else 2
    assert [int((epochs == e).sum()) for e in range(n_epochs)] == [1797] * n_epochs
    assert run.n_rows == 1797 * n_epochs
    target = load_digits().target
    assert run.labels.tolist() == [int(target[int(i)]) for i in run.metadata["sample"]]
    (rows,) = run.embeddings.values()
    by_sample = rows.reshape(n_epochs, 1797, -1)
    order = np.argsort(np.asarray(run.metadata["sample"]).reshape(n_epochs, 1797), axis=1)
    by_sample = np.take_along_axis(by_sample, order[:, :, None], axis=1)
    assert not np.allclose(by_sample[0], by_sample[-1], atol=0.1)  # it has learnt
    if name == "watch_training":
        loss = np.asarray(run.metadata["loss"])
        assert loss[epochs == 3].mean() < 0.5 * loss[epochs == 0].mean()
        with Image.open(tmp_path / "run" / "epochs.png") as picture:
            assert picture.width > 3 * picture.height
