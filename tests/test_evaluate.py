"""The stage ``evaluate``: every figure against one computed without it."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.manifold import trustworthiness
from sklearn.metrics import silhouette_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier

import embedx
from embedx.align import doubt_of_pairs
from embedx.errors import DataError, StoreError
from embedx.evaluate import evaluate
from embedx.project import project
from embedx.scores import cka, embedding_quality, map_quality
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
    assert saved == {**embedx.open(path).parentage, "scores": table}
    assert saved["parent"] == "one"
    assert [row["name"] for row in table] == ["avgpool", "layer1.0", *sorted(maps)]
    for row in table:
        kind, layer = row["kind"], row["layer"]
        source = layers[layer][kept].astype(np.float32)
        rows = source if kind == "embeddings" else maps[row["name"]].coords[kept]
        assert (row["rows"], row["dims"]) == (78, rows.shape[1])
        assert row["knn_accuracy"] == pytest.approx(vote(rows, labels[kept]))
        if kind == "embeddings":
            assert row["trustworthiness"] is None
            assert row["silhouette"] == pytest.approx(silhouette_score(source, labels[kept]))
            expected = embedding_quality(source, labels[kept])
            assert {name: row[name] for name in expected} == expected
        else:
            assert kind == "pca"
            expected = trustworthiness(source, rows, n_neighbors=15)
            assert row["trustworthiness"] == pytest.approx(expected, abs=1e-5)
            expected = trustworthiness(rows, source, n_neighbors=15)
            assert row["continuity"] == pytest.approx(expected, abs=1e-5)
            quality = map_quality(source, rows).scores
            assert {name: row[name] for name in quality} == pytest.approx(quality)
            assert row["knn_recall_50"] is None  # of 78 rows
    assert 0.5 < table[0]["knn_accuracy"] < 1
    assert 0.5 < table[0]["linear_probe"] < 1
    assert table[1]["knn_accuracy"] < 0.5


def test_tables_are_printed_with_their_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    projection = project(path, method="pca")
    caplog.set_level(logging.INFO)
    caplog.clear()
    embedded, mapped = evaluate(tmp_path)
    head, first, map_head, second, last = caplog.messages
    words = "embeddings rows dims 5-NN probe silhouette effective rank anisotropy"
    assert " ".join(head.split()) == words
    figures = [embedded[key] for key in ("knn_accuracy", "linear_probe", "silhouette")]
    assert first.split() == [
        "avgpool",
        "80",
        "6",
        *(f"{figure:.3f}" for figure in figures),
        f"{embedded['effective_rank']:.1f}",
        f"{embedded['anisotropy']:.3f}",
    ]
    words = "maps 5-NN trustworthiness continuity recall @5 @15 @50 distances stress"
    assert " ".join(map_head.split()) == words
    figures = [mapped[key] for key in ("knn_accuracy", "trustworthiness", "continuity")]
    figures += [mapped["knn_recall_5"], mapped["knn_recall_15"]]
    assert second.split() == [
        projection.name,
        *(f"{figure:.3f}" for figure in figures),
        "-",
        f"{mapped['distance_correlation']:.3f}",
        f"{mapped['stress']:.3f}",
    ]
    assert len(head) == len(first)
    assert len(map_head) == len(second) <= 100
    assert last == f"wrote {tmp_path / 'scores.json'}"


def test_maps_stand_below_the_layer_that_they_are_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"layer3": x, "fc": np.tanh(x)}, labels=labels)
    names = [project(path, method="pca", layer=layer).name for layer in ("layer3", "fc")]
    caplog.set_level(logging.INFO)
    caplog.clear()
    evaluate(path)
    words = [message.split()[0] for message in caplog.messages]
    order = sorted(names)
    at = [words.index(name) for name in order]
    titles = {words[i]: caplog.messages[i - 2] for i in at}
    assert titles == {names[0]: "of layer3:", names[1]: "of fc:"}


def test_without_labels_there_is_no_accuracy_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, _ = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=None)
    project(path, method="pca")
    caplog.set_level(logging.INFO)
    table = evaluate(path)
    assert [row["knn_accuracy"] for row in table] == [None, None]
    assert table[0]["linear_probe"] is table[0]["silhouette"] is None
    assert 0.5 < table[1]["trustworthiness"] <= 1
    assert "there are no labels, so no accuracy, probe or silhouette" in caplog.messages
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == table


# --------------------------------------------------------------------------- maps without scores


def graphs(folder: Path) -> list[Path]:
    return sorted(folder.glob("neighbors-*.h5"))


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_a_map_made_without_scores_is_scored_and_nothing_else_is_searched(
    tmp_path: Path, metric: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels, failed=[7])
    kept = np.delete(np.arange(80), 7)
    coords = np.full((80, 2), np.nan)
    coords[kept] = x[kept, :2]
    projection_file(path, "umap-000000", coords, metric=metric, trustworthiness=0.5)
    caplog.set_level(logging.INFO)
    (_, row) = evaluate(path)
    expected = map_quality(x[kept].astype(np.float32), coords[kept], metric=metric).scores
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["quality_metric"] == metric
    assert sum("holds no scores: measuring them" in message for message in caplog.messages) == 1
    assert len(graphs(tmp_path)) == 1
    before = [(file.stat().st_mtime_ns, file.read_bytes()) for file in graphs(tmp_path)]
    monkeypatch.setattr("embedx.neighbors.nearest_neighbors", None)  # kept: not searched again
    assert evaluate(path)[1] == row
    assert [(file.stat().st_mtime_ns, file.read_bytes()) for file in graphs(tmp_path)] == before


def test_stored_scores_are_shown_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    done = project(path, method="pca")
    for file in graphs(tmp_path):
        file.unlink()
    monkeypatch.setattr(sys.modules[evaluate.__module__], "map_quality", None)
    (_, row) = evaluate(path)
    names = ("trustworthiness", "continuity", "knn_recall_15", "stress", "distance_correlation")
    assert [row[name] for name in names] == [done.attrs[name] for name in names]
    assert graphs(tmp_path) == []


def test_a_map_that_lacks_some_rows_is_scored_on_those_that_it_has(tmp_path: Path) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    coords = x[:, :2].copy()
    coords[10:20] = np.nan
    projection_file(path, "own-000000", coords)
    (_, row) = evaluate(path)
    placed = np.delete(np.arange(80), np.arange(10, 20))
    expected = map_quality(x[placed].astype(np.float32), coords[placed]).scores
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["rows"] == 70


# --------------------------------------------------------------------------- CKA


def test_layers_are_compared_on_the_rows_that_are_whole_in_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, labels = overlapping()
    layers = {"a": x, "b": np.tanh(x[:, :4]), "c": x @ np.random.default_rng(0).normal(size=(6, 2))}
    layers["b"][9] = np.nan
    path = embeddings_file(tmp_path, layers, labels=labels, failed=[4])
    caplog.set_level(logging.INFO)
    table = evaluate(path)
    kept = np.delete(np.arange(80), [4, 9])
    for row in table:
        assert row["cka"] == {
            name: pytest.approx(cka(layers[row["name"]][kept], rows[kept]), rel=1e-5)
            for name, rows in layers.items()
            if name != row["name"]
        }
    at = caplog.messages.index("CKA of layers, 78 rows")
    assert caplog.messages[at + 1].split() == ["a", "b", "c"]
    second = caplog.messages[at + 3].split()
    assert second == ["b", f"{table[1]['cka']['a']:.3f}", "1.000", f"{table[1]['cka']['c']:.3f}"]


def test_another_run_is_compared_row_by_row_with_the_same_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, labels = overlapping()
    rng = np.random.default_rng(0)
    ids = [f"picture {i}" for i in range(80)]
    path = embeddings_file(tmp_path / "a", {"fc": x}, ids=ids, labels=labels, failed=[5])
    order = rng.permutation(80)[:60]
    y = {"p": np.maximum(x, 0)[order], "q": rng.normal(size=(60, 3))}
    strangers = [*(ids[i] for i in order), "another", "one more"]
    rows = {name: np.vstack([values, values[:2]]) for name, values in y.items()}
    other = embeddings_file(tmp_path / "b", rows, ids=strangers, id="two")
    caplog.set_level(logging.INFO)
    (row,) = evaluate(path, against=[other.parent])
    usable = order != 5
    assert row["cka_against"] == {
        "../b/embeddings.h5": {
            "rows": int(usable.sum()),
            "layers": {
                name: pytest.approx(cka(x[order][usable], values[usable]), rel=1e-5)
                for name, values in y.items()
            },
        }
    }
    assert row["cka_against"]["../b/embeddings.h5"]["layers"]["p"] > 0.5
    shared = int(usable.sum()), 60
    title = f"CKA with {other.parent}, {shared[0]} rows of the {shared[1]} whose ids both have"
    at = caplog.messages.index(title)
    assert caplog.messages[at + 1].split() == ["p", "q"]
    assert caplog.messages[at + 2].split()[0] == "fc"
    assert json.loads((path.parent / "scores.json").read_text())["scores"] == [row]


@pytest.mark.parametrize("n_shared", [0, 1])
def test_a_run_of_other_samples_is_refused_before_any_work(tmp_path: Path, n_shared: int) -> None:
    x, _ = overlapping()
    path = embeddings_file(tmp_path / "a", {"fc": x})
    ids = [f"row-{i:04d}" for i in range(80 - n_shared, 160 - n_shared)]
    other = embeddings_file(tmp_path / "b", {"fc": x}, ids=ids)
    with pytest.raises(DataError) as caught:
        evaluate(path, against=[str(other)])
    assert str(caught.value) == (
        f"against={other} has {n_shared} ids in common with {path}, and CKA needs the same "
        "samples, 2 or more; name a run over the same data"
    )
    assert not (tmp_path / "a" / "scores.json").exists()


def test_epochs_of_a_recording_are_compared_on_the_samples_of_all_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    epochs = np.repeat(np.arange(12, dtype=np.int32), 30)
    samples = np.concatenate([rng.permutation(30) for _ in range(12)])
    fixed, drift = rng.normal(size=(30, 5)), rng.normal(size=(30, 5))
    x = fixed[samples] + epochs[:, None] * 0.2 * drift[samples]
    names = [f"s{sample}" for sample in samples]
    path = embeddings_file(
        tmp_path,
        {"fc": x},
        ids=[f"{name}#{epoch}" for name, epoch in zip(names, epochs, strict=True)],
        metadata={"epoch": epochs, "sample": names},
        failed=[0],
    )
    caplog.set_level(logging.INFO)
    (row,) = evaluate(path)
    found = row["cka_epochs"]
    assert found["epochs"] == [0, 1, 2, 4, 5, 6, 7, 9, 10, 11]
    assert found["rows"] == 29
    common = np.delete(np.arange(30), samples[0])
    state = {epoch: fixed[common] + epoch * 0.2 * drift[common] for epoch in found["epochs"]}
    expected = [[cka(a, b) for b in state.values()] for a in state.values()]
    assert np.allclose(found["matrix"], expected, atol=1e-5)
    assert found["matrix"][0][-1] < found["matrix"][0][1] < 1
    assert "CKA of epochs, fc, 29 samples" in caplog.messages


def test_long_names_and_many_layers_still_fit_the_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    layers = {f"encoder.layers.{i}.mlp": rng.normal(size=(20, 4)) for i in range(8)}
    caplog.set_level(logging.INFO)
    evaluate(embeddings_file(tmp_path / "some", layers))
    at = caplog.messages.index("CKA of layers, 20 rows")
    assert caplog.messages[at + 1].startswith("columns: 1 encoder.layers.0.mlp, 2 encoder.layers.1")
    assert caplog.messages[at + 2].split() == [str(i) for i in range(1, 9)]
    assert max(map(len, caplog.messages[at + 2 : at + 11])) <= 100
    caplog.clear()
    many = {f"encoder.layers.{i}.mlp": rng.normal(size=(20, 4)) for i in range(20)}
    evaluate(embeddings_file(tmp_path / "many", many))
    assert "20 x 20 figures, too many to show: see scores.json" in caplog.messages


def test_a_probe_that_did_not_converge_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = overlapping()
    path = embeddings_file(tmp_path, {"avgpool": x}, labels=labels)
    caplog.set_level(logging.INFO)
    said = "the probe of avgpool did not converge: it may be better"
    evaluate(path)
    assert said not in caplog.messages
    monkeypatch.setattr("embedx.scores._PROBE_PRODUCTS", 0)
    monkeypatch.setattr("embedx.scores._LEAST_ITERATIONS", 1)
    evaluate(path)
    assert said in caplog.messages


# --------------------------------------------------------------------------- what is not there


@pytest.mark.parametrize("kind", ["all failed", "all equal", "one", "two"])
def test_rows_that_say_nothing_are_a_dash_in_the_table(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    n = {"one": 1, "two": 2}.get(kind, 12)
    x = np.ones((n, 3)) if kind == "all equal" else np.random.default_rng(0).normal(size=(n, 3))
    failed = range(n) if kind == "all failed" else ()
    layers = {"a": x, "b": x[:, :2] * 2}
    path = embeddings_file(tmp_path, layers, labels=[0] * n, failed=failed)
    if kind != "all failed":
        projection_file(path, "own-000000", x[:, :2])
    caplog.set_level(logging.INFO)
    table = evaluate(path)
    json.loads((tmp_path / "scores.json").read_text(), parse_constant=pytest.fail)
    assert table[0]["rows"] == (0 if kind == "all failed" else n)
    assert table[0]["effective_rank"] is None or kind == "two"
    assert (table[0]["cka"]["b"] is None) == (kind != "two")
    row = next(message for message in caplog.messages if message.startswith("a "))
    assert row.split().count("-") == {"all equal": 4, "two": 3}.get(kind, 5)
    if kind != "all failed":
        assert table[2]["stress"] is None
        assert table[2]["trustworthiness"] == (1 if kind == "all equal" else None)


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


def test_rows_without_an_epoch_are_of_no_epoch(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 6))
    epoch = np.repeat([0.0, 1.0], 20)
    epoch[5] = np.nan
    path = embeddings_file(
        tmp_path,
        np.vstack([x[:20], x[:20] * 2]),
        metadata={"epoch": epoch, "sample": [f"s{i % 20:02d}" for i in range(40)]},
    )
    (row,) = evaluate(path)
    assert row["cka_epochs"]["epochs"] == [0.0, 1.0]
    assert row["cka_epochs"]["rows"] == 19
    assert row["cka_epochs"]["matrix"][0][1] == pytest.approx(1.0)


@pytest.mark.parametrize("again", ["s03", "s04"])
def test_a_sample_that_comes_several_times_in_an_epoch_is_left_out_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, again: str
) -> None:
    x = np.random.default_rng(0).normal(size=(20, 6))
    names = [f"s{i:02d}" for i in range(20)]
    path = embeddings_file(
        tmp_path,
        np.vstack([x, x[3:4], x * 2, x[4:5]]),
        metadata={"epoch": np.repeat([0, 1], 21), "sample": [*names, "s03", *names, again]},
    )
    (row,) = evaluate(path)
    assert row["cka_epochs"]["rows"] == 20 - len({"s03", again})
    assert row["cka_epochs"]["matrix"][0][1] == pytest.approx(1.0)
    assert "that an epoch has more than once, as 's03'" in caplog.text


@pytest.mark.parametrize(
    ("mine", "its", "said"),
    [
        ({}, {}, ""),
        ({"items": "other"}, {}, ""),  # resized, say
        (
            {"items": "other", "labels": ["a", "b"] * 20},
            {"labels": ["b", "a"] * 20},
            "labels differ",
        ),
        ({"items": "other", "labels": None}, {}, "their data are not the same"),
        ({"items": "other", "labels": None}, {"items": "other", "labels": None}, ""),
        ({"labels": None}, {"items": None}, "cannot be told"),
        (
            {"items": "other", "labels": ["a"] * 20 + ["b"] * 20},
            {"labels": ["a"] * 20 + ["b"] * 20},
            "their data are not the same",
        ),
        ({"items": "other", "labels": None, "ids": [f"{i}.png" for i in range(40)]}, {}, ""),
    ],
)
def test_rows_that_are_paired_by_number_are_said_to_be_where_the_data_may_be_others(
    mine: dict[str, Any],
    its: dict[str, Any],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def made(folder: str, *, items: Any = "one", labels: Any = ..., ids: Any = None) -> Path:
        return embeddings_file(
            tmp_path / folder,
            np.random.default_rng(len(folder)).normal(size=(40, 3)),
            ids=ids or [str(i) for i in range(40)],
            labels=["a", "b"] * 20 if labels is ... else labels,
            id=folder,
            identity=json.dumps({"items": items} if items else {}),
        )

    ours, theirs = made("ours", **mine), made("theirs", **({"ids": mine.get("ids")} | its))
    maps = project(theirs, method="pca")
    for stage in (
        lambda: evaluate(ours, against=[theirs]),
        lambda: embedx.compare([ours, theirs], out=tmp_path / "compared"),
        lambda: project(ours, method="pca", align_to=maps.path),
    ):
        caplog.clear()
        stage()
        told = [line for line in caplog.messages if "are paired by their numbers" in line]
        assert len(told) == bool(said)
        assert said in "".join(told)


def numbered(folder: Path, ids: Sequence[str], items: str) -> Path:
    rows = np.random.default_rng(len(folder.name)).normal(size=(len(ids), 3))
    about = json.dumps({"items": items})
    return embeddings_file(folder, rows, ids=ids, id=folder.name, identity=about)


def test_runs_that_are_paired_by_number_are_told_of_in_any_place_of_a_comparison(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers, names = [str(i) for i in range(40)], [f"{i}.png" for i in range(40)]
    given = {"a": (names, "a"), "bb": (numbers, "b"), "ccc": (numbers, "c"), "dddd": (numbers, "b")}
    runs = [numbered(tmp_path / name, *of) for name, of in given.items()]
    embedx.compare(runs, out=tmp_path / "compared")
    told = [line for line in caplog.messages if "are paired by their numbers" in line]
    assert [("bb" in line, "ccc" in line) for line in told] == [(True, True), (False, True)]
    caplog.clear()
    other = numbered(tmp_path / "e", [f"row-{i}" for i in range(40)], "e")
    embedx.compare([runs[1], other], out=tmp_path / "of none in common")
    assert "are paired" not in caplog.text


def test_a_map_whose_run_is_elsewhere_is_told_to_be_paired_by_number_unless_it_is_of_these_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = [str(i) for i in range(40)]
    ours, theirs = (numbered(tmp_path / name, numbers, name) for name in ("ours", "others"))
    for run, n_told in ((theirs, 1), (ours, 0)):
        maps = project(run, method="pca").path
        alone = tmp_path / f"of {run.parent.name}.h5"
        alone.write_bytes(maps.read_bytes())
        caplog.clear()
        project(ours, method="pca", align_to=alone)
        told = [line for line in caplog.messages if "are paired by their numbers" in line]
        assert len(told) == n_told
        assert all("cannot be told" in line and alone.name in line for line in told)


@pytest.mark.parametrize(
    ("ids", "are_numbers"),
    [
        ([f"line-{i:06d}" for i in (1, 2, 4, 9)], True),  # of which some are blank
        (["00000/000", "00000/001", "00001/000"], True),
        (["0000.png", "0001.png", "0002.png"], False),
        (["3", "1", "2"], False),
        (["cat/1.png", "cat/2.png"], False),
        (["IMG_1.jpg", "IMG_2.jpg"], False),
        (["a", "b"], False),
    ],
)
def test_numbers_that_rise_tell_a_sample_only_among_the_same_data(
    ids: list[str], are_numbers: bool, tmp_path: Path
) -> None:
    one, other = (embedx.open(numbered(tmp_path / name, ids, name)) for name in "ab")
    assert ("are paired by their numbers" in doubt_of_pairs(one, other)) == are_numbers
    assert doubt_of_pairs(one, one) == ""
