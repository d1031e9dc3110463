"""The stage ``compare``: ranks, alignment, colours and names against what was put in."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from embedx import store
from embedx.compare import LOWER_IS_BETTER, Comparison, compare
from embedx.errors import ConfigError, DataError, StoreError
from embedx.evaluate import evaluate
from embedx.figures import PALETTE
from embedx.methods import Result
from embedx.project import project
from embedx.scores import cka, embedding_quality, knn_accuracy
from tests.conftest import by_axes, drawn_classes, embeddings_file, projection_file

pytest.importorskip("matplotlib")
Array = np.ndarray[Any, Any]
LABELS = np.arange(60) % 3


def rows(noise: float, *, seed: int = 0) -> Array:
    """Three classes that the more noise the less are apart."""
    rng = np.random.default_rng(seed)
    return np.eye(3)[LABELS] * 4 + rng.normal(size=(60, 3)) * noise


def make_run(folder: Path, noise: float, **about: Any) -> Path:
    about = {"id": folder.name, "labels": LABELS.tolist(), **about}
    return embeddings_file(folder, rows(noise), **about)


def settings(**values: Any) -> dict[str, str]:
    return {"settings": json.dumps({"method": "umap", "layer": "avgpool", **values})}


def titles(found: Comparison) -> list[str]:
    assert found.figure is not None
    return [axes.get_title().split("\n")[0] for axes in found.figure.axes]


def points(found: Comparison, panel: int) -> Array:
    """All points of a panel, class by class."""
    drawn = drawn_classes(found.figure, panel)
    return np.concatenate([drawn[name][1] for name in sorted(drawn)])


def by_class(coords: Array, labels: Array = LABELS) -> Array:
    return np.concatenate([by_axes(coords[label == labels]) for label in range(3)])


def test_runs_are_ranked_by_scores_that_equal_those_computed_alone(tmp_path: Path) -> None:
    noises = {"worst": 6.0, "best": 0.5, "middle": 2.0}
    made = {name: make_run(tmp_path / name, noise) for name, noise in noises.items()}
    found = compare(list(made.values()), out=tmp_path / "out")
    assert [row["run"] for row in found.table] == ["best", "middle", "worst"]
    for row in found.table:
        x = np.asarray(store.open(made[row["run"]]).embeddings["avgpool"])
        alone = embedding_quality(x, LABELS)
        assert {key: row[key] for key in alone if key in row} == {
            key: value for key, value in alone.items() if key in row
        }
        assert row["knn_accuracy"] == alone["knn_accuracy"]
    assert found.table[0]["knn_accuracy"] > found.table[2]["knn_accuracy"]
    assert found.figure is None


@pytest.mark.parametrize("score", ["anisotropy", "effective_rank"])
def test_any_score_ranks_and_less_of_some_is_better(tmp_path: Path, score: str) -> None:
    made = [make_run(tmp_path / f"{noise}", noise) for noise in (6.0, 0.5, 2.0)]
    values = [row[score] for row in compare(made, sort=score, out=tmp_path / "out").table]
    assert values == sorted(values, reverse=score not in LOWER_IS_BETTER)
    assert len(set(values)) == 3


def test_equals_share_a_rank_and_what_has_no_score_has_none(tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, 1.0) for name in "ab"]
    made += [make_run(tmp_path / "c", 60.0), make_run(tmp_path / "d", 1.0, labels=None)]
    ranks = {row["run"]: row["rank"] for row in compare(made, out=tmp_path / "out").table}
    assert ranks == {"a": 1, "b": 1, "c": 3, "d": None}


def test_scores_that_evaluate_stored_are_taken_and_those_of_another_file_are_not(
    tmp_path: Path,
) -> None:
    path = make_run(tmp_path / "a", 1.0)
    evaluate(path)
    stored = tmp_path / "a" / "scores.json"
    document = json.loads(stored.read_text())
    document["scores"][0]["knn_accuracy"] = 0.125
    stored.write_text(json.dumps(document))
    assert compare([path], out=tmp_path / "out").table[0]["knn_accuracy"] == 0.125
    stored.write_text(json.dumps({**document, "parent": "other"}))
    x = np.asarray(store.open(path).embeddings["avgpool"])
    alone = knn_accuracy(x, LABELS)
    for text in (json.dumps({**document, "parent": "other"}), "{", "[1]", '{"parent": "a"}'):
        stored.write_text(text)
        assert compare([path], out=tmp_path / "out").table[0]["knn_accuracy"] == alone


def test_the_table_is_the_same_in_csv_and_json(tmp_path: Path) -> None:
    path = make_run(tmp_path / "=a", 1.0)
    projection_file(path, "umap-000001", rows(1.0), trustworthiness=0.75, stress=0.5)
    found = compare([path], out=tmp_path / "out")
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document["table"] == found.table
    with (tmp_path / "out" / "compare.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["kind"] for line in lines] == ["embeddings", "umap"]
    assert {line["run"] for line in lines} == {"'=a"}  # no formula to a spreadsheet
    for line, row in zip(lines, found.table, strict=True):
        for key in ("knn_accuracy", "trustworthiness", "stress", "anisotropy"):
            expected = "" if row.get(key) is None else str(row[key])
            assert line[key] == expected
    assert lines[1]["trustworthiness"] == "0.75"


@pytest.mark.parametrize("m", [2, 3])
def test_maps_that_differ_by_a_turn_and_a_shift_lie_on_each_other(tmp_path: Path, m: int) -> None:
    path = make_run(tmp_path / "a", 1.0)
    coords = np.random.default_rng(1).normal(size=(60, m))
    turn = Rotation.from_euler("z", 40, degrees=True).as_matrix()[:m, :m]
    turn[:, 0] *= -1  # and a reflection
    projection_file(path, "umap-000001", coords)
    projection_file(path, "umap-000002", 3.0 * coords @ turn + 7)
    kept = (tmp_path / "a" / "projections" / "umap-000002.h5").read_bytes()
    found = compare([path], out=tmp_path / "out")
    if m == 2:
        first, second = points(found, 0), points(found, 1)
        np.testing.assert_allclose(first, by_class(coords), atol=1e-5)
        center = coords.mean(axis=0)
        np.testing.assert_allclose(second, 3.0 * (first - center) + center, atol=1e-4)
    else:
        assert found.figure is not None
        assert [axes.name for axes in found.figure.axes] == ["3d", "3d"]
    assert (tmp_path / "a" / "projections" / "umap-000002.h5").read_bytes() == kept


def test_runs_that_share_some_samples_are_aligned_by_those(tmp_path: Path) -> None:
    coords = np.random.default_rng(1).normal(size=(60, 2))
    flipped = coords * [1.0, -1.0]
    ids = [f"row-{i:04d}" for i in range(60)]
    order = np.random.default_rng(2).permutation(60)
    one = make_run(tmp_path / "a", 1.0)
    other_ids = [ids[i] if i % 2 else f"new-{i}" for i in order]
    two = make_run(tmp_path / "b", 1.0, ids=other_ids, labels=LABELS[order].tolist())
    projection_file(one, "umap-000001", coords)
    projection_file(two, "umap-000001", flipped[order])
    found = compare([one, two], out=tmp_path / "out")
    wanted = by_class(coords[order], LABELS[order])
    np.testing.assert_allclose(points(found, 1), wanted, atol=1e-5)
    assert titles(found) == ["a", "b"]


def test_a_class_has_one_colour_in_all_runs_also_where_others_are_missing(tmp_path: Path) -> None:
    names = [["ant", "bee"], ["bee", "cat"]]
    made = []
    for folder, words in zip("ab", names, strict=True):
        path = embeddings_file(
            tmp_path / folder, rows(1.0), labels=[words[i % 2] for i in range(60)], id=folder
        )
        projection_file(path, "umap-000001", rows(1.0)[:, :2])
        made.append(path)
    found = compare(made, out=tmp_path / "out")
    assert found.figure is not None
    shades = [
        {name: shade for name, (shade, _) in drawn_classes(found.figure, panel).items()}
        for panel in range(2)
    ]
    assert shades == [
        {"ant": PALETTE[0], "bee": PALETTE[1]},
        {"bee": PALETTE[1], "cat": PALETTE[2]},
    ]


def test_titles_say_what_differs_and_a_sweep_lies_as_a_grid(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", 1.0)
    for number, (k, distance) in enumerate((k, d) for d in (0.3, 0.0) for k in (50, 5, 15)):
        given = settings(min_dist=distance, n_neighbors=k, random_state=0)
        projection_file(path, f"umap-{number:06d}", rows(1.0)[:, :2], **given)
    found = compare([path], out=tmp_path / "out")
    assert titles(found) == [
        f"n_neighbors={k}, min_dist={distance}" for k in (5, 15, 50) for distance in (0.0, 0.3)
    ]
    assert found.figure is not None
    assert found.figure.axes[0].get_gridspec().ncols == 2


def test_a_map_whose_rows_were_placed_in_another_makes_no_settings_of_others_differ(
    tmp_path: Path,
) -> None:
    path = make_run(tmp_path / "a", 1.0)
    for number, k in enumerate((5, 15)):
        given = settings(n_neighbors=k, min_dist=0.1)
        projection_file(path, f"umap-{number:06d}", rows(1.0)[:, :2], **given)
    projection_file(
        path, "umap-000002", rows(1.0)[:, :2], **settings(transform_from="0123456789abcd")
    )
    found = compare([path], out=tmp_path / "out")
    told = {row["settings"] for row in found.table[1:]}
    assert told == {"n_neighbors=5", "n_neighbors=15", "transform_from=0123456789ab"}


def test_titles_name_runs_by_what_differs_between_them(tmp_path: Path) -> None:
    made = []
    for folder, size in (("x-1", 64), ("x-2", 96)):
        config = f"model:\n  name: net\n  input_size: {size}\nbatch_size: 4\n"
        path = make_run(tmp_path / folder, 1.0, config=config)
        projection_file(path, "umap-000001", rows(1.0)[:, :2])
        projection_file(path, "pca-000001", rows(1.0)[:, :2])
        made.append(path)
    found = compare(made, out=tmp_path / "out")
    assert titles(found) == [
        f"input_size={size}, {method}" for size in (64, 96) for method in ("PCA", "UMAP")
    ]


def test_a_title_says_an_ablation_as_a_command_does(tmp_path: Path) -> None:
    made = []
    for folder, ablate in (("x-1", "null"), ("x-2", "\n- {at: fc, units: [3, 5], by: zero}")):
        config = f"model: net\nablate: {ablate}\n"
        made.append(make_run(tmp_path / folder, 1.0, config=config))
        projection_file(made[-1], "pca-000001", rows(1.0)[:, :2])
    found = compare(made, out=tmp_path / "out")
    assert titles(found) == ["ablate=null", "ablate=[{at:fc,units:[3,5],by:zero}]"]


def test_every_epoch_of_a_recording_has_a_panel_of_the_same_frame(tmp_path: Path) -> None:
    epochs = np.repeat(np.arange(3, dtype=np.int32), 20)
    path = make_run(tmp_path / "a", 1.0, metadata={"epoch": epochs})
    coords = rows(1.0)[:, :2] * (1 + epochs)[:, None]
    projection_file(path, "umap-000001", coords)
    found = compare([path], out=tmp_path / "out")
    assert titles(found) == ["epoch 0", "epoch 1", "epoch 2"]
    for epoch in range(3):
        now = coords[epochs == epoch]
        wanted = by_class(now, LABELS[epochs == epoch])
        np.testing.assert_allclose(points(found, epoch), wanted, atol=1e-5)
    assert found.figure is not None
    found.figure.draw_without_rendering()
    assert len({axes.get_xlim() for axes in found.figure.axes}) == 1


def test_of_too_many_maps_the_best_are_drawn_and_the_others_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_run(tmp_path / "a", 1.0)
    for number in range(4):
        score = {"trustworthiness": number / 10, **settings(n_neighbors=number)}
        projection_file(path, f"umap-{number:06d}", rows(1.0)[:, :2], **score)
    caplog.set_level("INFO", "embedx")
    found = compare([path], sort="trustworthiness", panels=2, out=tmp_path / "out")
    assert titles(found) == ["n_neighbors=2", "n_neighbors=3"]
    assert "not drawn, for panels=2: a/umap-000001, a/umap-000000" in caplog.messages
    assert len(found.table) == 5


def test_maps_that_were_made_with_the_labels_are_said_to_be_in_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "embedx")
    path = make_run(tmp_path / "a", 1.0)
    said = (
        "a map with supervised=true was made with the labels: its 5-NN, and a rank by that, say "
        "nothing of the model"
    )
    pca = {"settings": json.dumps({"method": "pca", "layer": "avgpool"})}
    projection_file(path, "pca-000000", rows(1.0)[:, :2], **pca)
    for number, supervised in enumerate([False, True]):
        given = settings(n_neighbors=5, supervised=supervised)
        projection_file(path, f"umap-{number:06d}", rows(1.0)[:, :2], **given)
        found = compare([path], projections=["pca", f"umap-{number:06d}"], out=tmp_path / "out")
        told = {row["map"]: row["settings"] for row in found.table if row["map"]}
        assert told == {"pca-000000": "", f"umap-{number:06d}": "supervised=true" * supervised}
        assert caplog.messages.count(said) == supervised
        assert any("UMAP, supervised=true" in line for line in caplog.messages) == supervised


def test_maps_scored_in_two_metrics_are_not_passed_off_as_comparable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "embedx")
    path = make_run(tmp_path / "a", 1.0, labels=None)
    said = "each map is scored in its own metric, cosine or euclidean: compare within one"
    for number, metric in enumerate(["euclidean", "euclidean", "cosine"]):
        score = {"trustworthiness": 0.9, "quality_metric": metric}
        projection_file(path, f"umap-{number:06d}", rows(1.0)[:, :2], **score)
        found = compare([path], out=tmp_path / "out")
        assert found.table[-1]["quality_metric"] == metric
        assert (said in caplog.messages) == (metric == "cosine")
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document["ranked_by"] == {"embeddings": None, "maps": "trustworthiness"}


def test_cka_is_that_of_the_samples_that_both_have(tmp_path: Path) -> None:
    x, y = rows(1.0), rows(2.0, seed=3)
    ids = [f"row-{i:04d}" for i in range(60)]
    one = embeddings_file(tmp_path / "a", x, id="a", failed=(5,))
    two = embeddings_file(tmp_path / "b", y[10:][::-1], ids=ids[10:][::-1], id="b")
    apart = embeddings_file(tmp_path / "c", x, ids=[f"c{i}" for i in range(60)], id="c")
    found = compare([one, two, apart], out=tmp_path / "out").cka
    assert found is not None
    assert found["names"] == ["a", "b", "c"]
    assert found["rows"][0] == [59, 50, 0]
    assert found["matrix"][0][1] == pytest.approx(
        cka(x[10:].astype(np.float32), y[10:].astype(np.float32))
    )
    assert found["matrix"][1][0] == found["matrix"][0][1]
    assert found["matrix"][0][2] is None
    assert [found["matrix"][i][i] for i in range(3)] == pytest.approx([1, 1, 1])


def test_a_pattern_passes_over_what_is_no_finished_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path / "b", 1.0)
    make_run(tmp_path / "a", 2.0)
    (tmp_path / "other").mkdir()
    (tmp_path / "begun").mkdir()
    damaged = make_run(tmp_path / "damaged", 1.0)
    damaged.write_bytes(b"no")
    found = compare([str(tmp_path / "*")], out=tmp_path / "out")
    assert {row["run"] for row in found.table} == {"a", "b"}
    assert len([line for line in caplog.messages if line.startswith("passed over: ")]) == 1


def test_runs_of_the_same_folder_name_are_told_apart_and_one_given_twice_is_one(
    tmp_path: Path,
) -> None:
    made = [make_run(tmp_path / top / "run", 1.0) for top in "ab"]
    found = compare([*made, made[0], store.open(made[1])], out=tmp_path / "out")
    assert sorted(row["run"] for row in found.table) == ["a/run", "b/run"]


def test_wrong_arguments_are_refused_in_one_line(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", 1.0)
    projection_file(path, "umap-000001", rows(1.0)[:, :2])
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="sort=knn is no score; the nearest are knn_"):
        compare([path], sort="knn", out=out)
    with pytest.raises(ConfigError, match="panels must be at least 1, not 0"):
        compare([path], panels=0, out=out)
    with pytest.raises(ConfigError, match="color='size' is no column of"):
        compare([path], color="size", out=out)
    with pytest.raises(StoreError, match="there is no projection 'tsne' of"):
        compare([path], projections=["tsne"], out=out)
    with pytest.raises(StoreError, match="there is no .*nothing"):
        compare([tmp_path / "nothing"], out=out)
    for nothing in ([], [str(tmp_path / "n*")]):
        with pytest.raises(DataError, match="there is no finished run in"):
            compare(nothing, out=out)


def test_files_of_one_folder_are_told_apart_by_their_names(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 4))
    first = embeddings_file(tmp_path, x, id="a")
    first.rename(tmp_path / "first.h5")
    second = embeddings_file(tmp_path, x + 1, id="b")
    made = compare([tmp_path / "first.h5", second], out=tmp_path / "out")
    assert len({row["run"] for row in made.table}) == 2


@pytest.mark.parametrize("odd", [[1], {}, 10**400, True, "x", float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_none(tmp_path: Path, odd: object) -> None:
    path = embeddings_file(tmp_path, np.random.default_rng(0).normal(size=(30, 4)))
    evaluate(path)
    file = path.parent / "scores.json"
    document = json.loads(file.read_text())
    document["scores"][0]["anisotropy"] = odd
    file.write_text(json.dumps(document))
    (row,) = compare([path], out=tmp_path / "out").table
    assert row["anisotropy"] is None
    assert row["effective_rank"] > 1


def test_a_map_made_again_is_scored_as_it_is_now(tmp_path: Path) -> None:
    labels = np.arange(60) % 2
    x = np.random.default_rng(0).normal(size=(60, 4)) + labels[:, None] * 9
    path = embeddings_file(tmp_path, x, labels=labels.tolist())
    way = tmp_path / "way"  # which the code does not say
    way.write_text("1")

    def mine(x: np.ndarray, *, n_components: int = 2) -> Result:
        noise = np.random.default_rng(1).normal(size=(len(x), 2))
        return Result(coords=float(way.read_text()) * np.asarray(x)[:, :2] + noise)

    project(path, method=mine)
    evaluate(path)
    (good,) = [row for row in compare([path], out=tmp_path / "1").table if row["map"]]
    way.write_text("0")
    project(path, method=mine, overwrite=True)
    (bad,) = [row for row in compare([path], out=tmp_path / "2").table if row["map"]]
    assert good["knn_accuracy"] > 0.95
    assert bad["knn_accuracy"] < 0.75
