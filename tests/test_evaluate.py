"""The stage ``evaluate``: every figure against one computed without it."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.manifold import trustworthiness
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier

from embedx.errors import StoreError
from embedx.evaluate import evaluate
from embedx.project import project
from tests.conftest import embeddings_file, projection_file

Array = np.ndarray[Any, Any]


def overlapping(n: int = 80, *, n_classes: int = 3) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    labels = np.arange(n, dtype=np.int32) % n_classes
    return rng.normal(size=(n, 6)) + labels[:, None] * 1.2, labels


def vote(x: Array, labels: Array) -> float:
    """Five neighbours over five stratified folds, without the code under test."""
    right = []
    for train, test in StratifiedKFold(5, shuffle=True, random_state=0).split(x, labels):
        model = KNeighborsClassifier(5, algorithm="brute").fit(x[train], labels[train])
        right.append((model.predict(x[test]) == labels[test]).mean())
    return float(np.mean(right))


def test_scores_equal_those_computed_without_embedx(tmp_path: Path) -> None:
    x, labels = overlapping()
    layers = {"avgpool": x, "layer1.0": np.random.default_rng(1).normal(size=(80, 9))}
    failed, kept = (3, 50), np.delete(np.arange(80), [3, 50])
    path = embeddings_file(tmp_path, layers, labels=labels, failed=failed)
    maps = {
        projection.name: projection
        for projection in (
            project(path, method="pca"),
            project(path, method="pca", n_components=3, layer="layer1.0"),
        )
    }
    table = evaluate(path)
    saved = json.loads((tmp_path / "scores.json").read_text())
    assert saved == {"parent": "one", "scores": table}
    assert [row["name"] for row in table] == ["avgpool", "layer1.0", *sorted(maps)]
    for row in table:
        kind, layer = row["kind"], row["layer"]
        source = layers[layer][kept].astype(np.float32)
        rows = source if kind == "embeddings" else maps[row["name"]].coords[kept]
        assert (row["rows"], row["dims"]) == (78, rows.shape[1])
        assert row["knn_accuracy"] == pytest.approx(vote(rows, labels[kept]))
        if kind == "embeddings":
            assert row["trustworthiness"] is None
        else:
            assert kind == "pca"
            expected = trustworthiness(source, rows, n_neighbors=15)
            assert row["trustworthiness"] == pytest.approx(expected, abs=1e-5)
    assert 0.5 < table[0]["knn_accuracy"] < 1
    assert table[1]["knn_accuracy"] < 0.5


def test_table_is_printed_with_its_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    projection = project(path, method="pca")
    caplog.set_level(logging.INFO)
    caplog.clear()
    table = evaluate(tmp_path)
    head, first, second, last = caplog.messages
    assert head.split() == ["layer", "rows", "dims", "5-NN", "accuracy", "trustworthiness"]
    assert first.split() == [
        "avgpool",
        "avgpool",
        "80",
        "6",
        f"{table[0]['knn_accuracy']:.3f}",
        "-",
    ]
    assert second.split() == [
        projection.name,
        "avgpool",
        "80",
        "2",
        f"{table[1]['knn_accuracy']:.3f}",
        f"{table[1]['trustworthiness']:.3f}",
    ]
    assert len({len(line) for line in (head, first, second)}) == 1
    assert last == f"wrote {tmp_path / 'scores.json'}"


def test_without_labels_there_is_no_accuracy_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, _ = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=None)
    project(path, method="pca")
    caplog.set_level(logging.INFO)
    table = evaluate(path)
    assert [row["knn_accuracy"] for row in table] == [None, None]
    assert 0.5 < table[1]["trustworthiness"] <= 1
    assert "there are no labels, so no accuracy" in caplog.messages
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == table


@pytest.mark.parametrize("labels", [[0] * 20, [-1] * 20, [0] * 16 + [1] * 4, list(range(20))])
def test_with_fewer_than_two_classes_to_compare_there_is_no_accuracy(
    tmp_path: Path, labels: list[int]
) -> None:
    x, _ = overlapping(20)
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=np.array(labels, np.int32))
    (row,) = evaluate(path)
    assert row["knn_accuracy"] is None
    assert row["rows"] == 20


def test_unlabelled_rows_count_as_rows_but_not_in_the_vote(tmp_path: Path) -> None:
    x, labels = overlapping()
    some = labels.copy()
    some[::4] = -1
    (row,) = evaluate(embeddings_file(tmp_path, {"avgpool": x}, labels=some))
    kept = some >= 0
    assert row["rows"] == 80
    expected = vote(x[kept].astype(np.float32), labels[kept])
    assert row["knn_accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_rows_are_evaluated(tmp_path: Path, n: int) -> None:
    x, labels = overlapping(n, n_classes=1)
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    project(path, method="pca")
    table = evaluate(path)
    assert [row["rows"] for row in table] == [n, n]
    assert [row["knn_accuracy"] for row in table] == [None, None]
    assert (table[1]["trustworthiness"] is None) == (n < 3)


def test_rows_that_are_not_finite_are_left_out_whatever_their_status(tmp_path: Path) -> None:
    x, labels = overlapping()
    x[5, 0] = np.inf
    (row,) = evaluate(embeddings_file(tmp_path, {"avgpool": x}, labels=labels))
    kept = np.arange(80) != 5
    assert row["rows"] == 79
    assert row["knn_accuracy"] == pytest.approx(vote(x[kept].astype(np.float32), labels[kept]))


def test_only_the_chosen_projections_are_scored(tmp_path: Path) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    two, three = (project(path, method="pca", n_components=m) for m in (2, 3))
    elsewhere = project(path, method="pca", out=tmp_path / "elsewhere", n_components=1)
    assert [row["name"] for row in evaluate(path, projections=[])] == ["avgpool"]
    assert [row["name"] for row in evaluate(path, projections=[three.name])][1:] == [three.name]
    assert {row["name"] for row in evaluate(path, projections=["pca"])[1:]} == {
        two.name,
        three.name,
    }
    (_, row) = evaluate(path, projections=[str(elsewhere.path)])
    assert (row["name"], row["dims"]) == (elsewhere.name, 1)


def test_scoring_again_gives_the_same_bytes(tmp_path: Path) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    evaluate(path)
    before = (tmp_path / "scores.json").read_bytes()
    evaluate(path)
    assert (tmp_path / "scores.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["embeddings.h5", "scores.json"]


def test_missing_stale_or_absent_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="make it with: python -m embedx extract"):
        evaluate(tmp_path)
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    with pytest.raises(StoreError, match="there is no projection 'umap'"):
        evaluate(path, projections=["umap"])
    projection_file(path, "pca-000000", x[:, :2], parent="other")
    with pytest.raises(StoreError, match="belongs to other embeddings") as caught:
        evaluate(path, projections=["pca"])
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "scores.json").exists()
    assert [row["name"] for row in evaluate(path)] == ["avgpool"]  # not asked for: passed over
