"""The stage ``project``: each method against an oracle, and the file it leaves."""

import functools
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.manifold import trustworthiness

from embedx import derived, layout, store, writing
from embedx.compare import compare
from embedx.errors import ConfigError, DataError, StoreError
from embedx.evaluate import evaluate
from embedx.methods import METHODS, REVISIONS, Result, pca, tsne, umap
from embedx.neighbors import layer_graph, nearest_neighbors
from embedx.project import project
from embedx.scores import knn_accuracy
from tests.conftest import EXHAUSTIVE, embeddings_file, projection_file

Array = np.ndarray[Any, Any]
NONLINEAR = ["tsne", "umap"]


def clusters(n: int = 150, d: int = 10, *, n_clusters: int = 3) -> tuple[Array, Array]:
    """Gaussian clusters far apart, and which of them each row is of, in turn."""
    rng = np.random.default_rng(0)
    labels = np.arange(n, dtype=np.int32) % n_clusters
    centers = rng.normal(size=(n_clusters, d)) * 20
    return centers[labels] + rng.normal(size=(n, d)), labels


def accuracy(coords: Array, labels: Array) -> float:
    score = knn_accuracy(coords, labels)
    assert score is not None
    return score


# --------------------------------------------------------------------------- t-SNE and UMAP


@pytest.mark.parametrize("method", NONLINEAR)
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("n_components", [2, 3])
def test_clear_clusters_are_apart_in_the_map(
    tmp_path: Path, method: str, metric: str, n_components: int
) -> None:
    x, labels = clusters()
    path = embeddings_file(tmp_path, x)
    done = project(path, method=method, metric=metric, n_components=n_components)
    assert done.coords.shape == (150, n_components)
    assert done.coords.dtype == np.float32
    shuffled = np.random.default_rng(0).permutation(done.coords)
    assert accuracy(shuffled, labels) < 0.5
    assert accuracy(done.coords, labels) > 0.95


@pytest.mark.parametrize("method", list(METHODS))
def test_same_seed_gives_the_same_bytes_and_another_seed_another_map(
    tmp_path: Path, method: str
) -> None:
    path = embeddings_file(tmp_path, clusters(60)[0])
    first, second = (project(path, method=method, out=tmp_path / name) for name in ("a", "b"))
    assert first.path.read_bytes() == second.path.read_bytes()
    other = project(path, method=method, random_state=1)
    assert (other.attrs["seed"], first.attrs["seed"]) == (1, 0)
    assert np.array_equal(other.coords, first.coords) == (method == "pca")


@pytest.mark.parametrize("method", NONLINEAR)
def test_duplicates_land_together(tmp_path: Path, method: str) -> None:
    x, labels = clusters()
    x[:75] = x[0]  # many more than the neighbours of a row
    labels[:75] = 3
    done = project(embeddings_file(tmp_path, x), method=method)
    assert np.isfinite(done.coords).all()
    assert accuracy(done.coords, labels) > 0.95


@pytest.mark.parametrize("method", list(METHODS))
def test_rows_that_are_all_equal_are_placed(tmp_path: Path, method: str) -> None:
    done = project(embeddings_file(tmp_path, np.ones((40, 5))), method=method)
    assert np.isfinite(done.coords).all()
    assert done.attrs["trustworthiness"] == 1.0


@pytest.mark.parametrize("method", NONLINEAR)
@pytest.mark.parametrize("huge", [1e6, 1e18, 1e30, 3e38])
def test_one_huge_row_does_not_spoil_the_others(tmp_path: Path, method: str, huge: float) -> None:
    x, labels = clusters()
    x[7] = huge
    coords = project(embeddings_file(tmp_path, x), method=method).coords
    others = np.arange(150) != 7
    assert np.isfinite(coords[others]).all()
    assert accuracy(coords[others], labels[others]) > 0.95


def test_row_that_cannot_be_placed_is_absent_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x, _ = clusters(60)
    x[7] = 3e38
    done = project(embeddings_file(tmp_path, x), method="pca")
    assert np.isnan(done.coords[7]).all()
    assert np.isfinite(np.delete(done.coords, 7, axis=0)).all()
    assert "1 rows could not be placed and are absent from the map" in caplog.messages


@pytest.mark.parametrize("method", list(METHODS))
def test_constant_features_change_nothing_but_the_last_digits(tmp_path: Path, method: str) -> None:
    x, labels = clusters(90)
    wide = np.hstack([x, np.full((90, 3), 7.0)])
    done = project(embeddings_file(tmp_path, wide), method=method)
    assert accuracy(done.coords, labels) > 0.95
    if method == "pca":
        assert np.allclose(done.coords, pca(x.astype(np.float32)).coords, atol=1e-4)


@pytest.mark.parametrize("method", NONLINEAR)
def test_one_feature_still_gives_a_plane(tmp_path: Path, method: str) -> None:
    x = np.random.default_rng(0).normal(size=(60, 1))
    coords = project(embeddings_file(tmp_path, x), method=method).coords
    assert coords.shape == (60, 2)
    assert (coords.std(axis=0) > 1e-3).all()
    assert trustworthiness(x, coords, n_neighbors=5) > 0.9


@pytest.mark.parametrize("n", [1, 2, 3])
def test_pca_places_even_one_row_and_the_others_say_what_to_use(tmp_path: Path, n: int) -> None:
    path = embeddings_file(tmp_path, clusters(n)[0])
    done = project(path, method="pca")
    assert done.coords.shape == (n, min(n, 2))
    assert np.isfinite(done.coords).all()
    assert ("trustworthiness" in done.attrs) == (n >= 3)
    for method, name in (("tsne", "t-SNE"), ("umap", "UMAP")):
        with pytest.raises(DataError) as caught:
            project(path, method=method)
        assert str(caught.value) == (
            f"{name} needs at least 4 rows, and there are {n}; use projection=pca"
        )


@pytest.mark.parametrize("method", NONLINEAR)
@pytest.mark.parametrize("n", [4, 5, 7, 9])
@pytest.mark.parametrize("n_components", [2, 3])
def test_few_rows_are_placed_with_parameters_clamped_said_and_recorded(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    method: str,
    n: int,
    n_components: int,
) -> None:
    caplog.set_level(logging.INFO, logger="embedx")
    path = embeddings_file(tmp_path, clusters(n)[0])
    done = project(path, method=method, n_components=n_components)
    assert done.coords.shape == (n, n_components)
    assert np.isfinite(done.coords).all()
    said = [message for message in caplog.messages if "too large" in message]
    assert len(said) == 1
    if method == "tsne":
        assert done.attrs["perplexity"] == pytest.approx((n - 1) / 3)
        assert said[0].startswith("perplexity=30.0 is too large for these rows: using ")
    else:
        assert done.attrs["n_neighbors"] == n - 1
        assert said[0] == f"n_neighbors=15 is too large for these rows: using {n - 1}"


@pytest.mark.parametrize("method", NONLINEAR)
def test_parameters_as_large_as_the_data_are_clamped(tmp_path: Path, method: str) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    key = {"tsne": "perplexity", "umap": "n_neighbors"}[method]
    most = {"tsne": 29 / 3, "umap": 29}[method]
    for asked in (30, 31, 1000):
        assert project(path, method=method, **{key: asked}).attrs[key] == pytest.approx(most)


@pytest.mark.parametrize("method", ["pca", "tsne", pytest.param("umap", marks=pytest.mark.slow)])
def test_no_library_prints_or_warns(
    tmp_path: Path, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, where nothing was imported or silenced before."""
    import subprocess
    import sys

    path = embeddings_file(tmp_path, clusters(40)[0])
    code = (
        "import sys, embedx;"
        "embedx.project(sys.argv[1], method=sys.argv[2], n_components=2);"
        "print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), method], capture_output=True, text=True
    )
    ours = {"tsne": "perplexity=30.0 is too large for these rows: using 13\n"}  # it must be said
    assert (done.stdout, done.stderr) == ("done\n", ours.get(method, ""))
    for n_components in (2, 3):
        project(path, method=method, n_components=n_components, random_state=3)
    assert capfd.readouterr() == ("", "")


# --------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("function", "key", "value", "why"),
    [
        (pca, "n_components", 0, "at least 1"),
        (pca, "n_components", 1.5, "a whole number"),
        (pca, "n_components", "2", "a whole number"),
        (tsne, "n_components", 1, "2 to 3"),
        (tsne, "n_components", 4, "2 to 3"),
        (tsne, "perplexity", 0.5, "at least 1"),
        (tsne, "perplexity", float("nan"), "at least 1"),
        (tsne, "perplexity", float("inf"), "at least 1"),
        (tsne, "early_exaggeration", 0.0, "at least 1"),
        (tsne, "n_iter", 0, "at least 1"),
        (tsne, "random_state", -1, "0 to 4294967295"),
        (umap, "n_components", 1, "2 to 3"),
        (umap, "n_neighbors", 1, "at least 2"),
        (umap, "min_dist", 1.1, "0 to 1.0"),
        (umap, "min_dist", -0.1, "0 to 1.0"),
        (umap, "spread", 0.0, "at least 0.001"),
        (umap, "n_epochs", 0, "at least 1"),
        (tsne, "exaggeration", 0.5, "at least 1"),
        (tsne, "early_exaggeration_iter", -1, "at least 0"),
        (umap, "random_state", 2**32, "0 to 4294967295"),
    ],
)
def test_parameter_out_of_range_is_refused_in_one_line(
    tmp_path: Path, function: Callable[..., Result], key: str, value: Any, why: str
) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    with pytest.raises(ConfigError) as caught:
        project(path, method=function.__name__, **{key: value})
    assert str(caught.value) == f"projection.{key} must be {why}, not {value!r}"
    assert not (tmp_path / "projections").exists()


def test_unknown_method_parameter_or_layer_is_refused_in_one_line(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    with pytest.raises(ConfigError, match=r"^projection 'mds' is not known; choose one of: pca, "):
        project(path, method="mds")
    with pytest.raises(ConfigError) as caught:
        project(path, method="umap", n_neighbours=3)
    assert str(caught.value) == (
        "there is no key 'projection.n_neighbours'; the nearest are projection.n_neighbors, "
        "projection.n_epochs, projection.min_dist"
    )
    with pytest.raises(ConfigError) as caught:
        project(path, method="tsne", metric="hamming")
    assert str(caught.value) == (
        "projection.metric must be one of euclidean, cosine, not 'hamming'; the nearest is cosine"
    )
    with pytest.raises(ConfigError) as caught:
        project(path, method="umap", n_neighbors=True)
    assert str(caught.value) == "projection.n_neighbors must be a whole number, not true"
    with pytest.raises(StoreError, match=r"has no layer 'fc'; it holds avgpool$"):
        project(path, method="pca", layer="fc")


# --------------------------------------------------------------------------- the file


def test_a_map_of_a_method_that_has_changed_since_is_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    first = project(path, method="pca")
    monkeypatch.setitem(REVISIONS, "pca", 7)
    second = project(path, method="pca")
    assert second.path != first.path
    assert first.path.exists()
    assert project(path, method="pca").path == second.path


def test_second_time_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = embeddings_file(tmp_path, clusters(30)[0])
    first = project(path, method="pca")
    before = (first.path.stat().st_mtime_ns, first.path.stat().st_ino)

    def fail(*_: Any, **__: Any) -> Result:
        raise AssertionError("computed again")

    with monkeypatch.context() as patch:
        patch.setattr(np.linalg, "svd", fail)
        again = project(path, method="pca")
    assert (again.path.stat().st_mtime_ns, again.path.stat().st_ino) == before
    assert np.array_equal(again.coords, first.coords)
    assert (
        caplog.messages[-1] == f"{first.path} is there already with these settings: nothing to do"
    )
    assert project(path, method="pca", overwrite=True).path.stat().st_ino != before[1]


def test_other_parameter_goes_to_another_file_and_a_default_written_out_does_not(
    tmp_path: Path,
) -> None:
    path = embeddings_file(tmp_path, dict.fromkeys(["avgpool", "fc"], clusters(30)[0]))
    first = project(path, method="umap")
    same = [
        {"n_neighbors": 15},
        {"min_dist": 0.1, "metric": "euclidean", "random_state": 0},
        {"n_neighbors": np.int64(15), "layer": "avgpool"},
    ]
    for parameters in same:
        assert project(path, method="umap", **parameters).path == first.path
    assert project(path, method=umap).path == first.path
    others: list[dict[str, Any]] = [{"n_neighbors": 14}, {"layer": "fc"}, {"random_state": 1}]
    paths = {project(path, method="umap", **parameters).path for parameters in others}
    assert len(paths | {first.path}) == 4
    assert {p.parent for p in paths} == {tmp_path / "projections"}
    assert first.name.startswith("umap-")
    assert len(first.name) == len("umap-123456")


def test_whole_number_where_a_fraction_is_meant_is_the_same_setting(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    paths = {project(path, method="tsne", perplexity=five, n_iter=10).path for five in (5, 5.0)}
    assert len(paths) == 1


def test_failed_rows_are_nan_and_take_no_part(tmp_path: Path) -> None:
    x, labels = clusters(90)
    failed = (0, 44, 89)
    kept = np.delete(np.arange(90), failed)
    whole = embeddings_file(tmp_path / "whole", x, failed=failed)
    rest = embeddings_file(tmp_path / "rest", x[kept])
    for method in METHODS:
        done = project(whole, method=method)
        assert done.coords.shape[0] == 90
        assert np.isnan(done.coords[list(failed)]).all()
        assert np.array_equal(done.coords[kept], project(rest, method=method).coords)
        assert done.ids == [f"row-{i:04d}" for i in range(90)]
        assert accuracy(done.coords[kept], labels[kept]) > 0.95


def test_rows_that_are_not_finite_are_left_out_whatever_their_status(tmp_path: Path) -> None:
    x, _ = clusters(30)
    x[3, 2], x[4, 0] = np.inf, np.nan
    done = project(embeddings_file(tmp_path, x), method="pca")
    assert np.flatnonzero(np.isnan(done.coords).any(axis=1)).tolist() == [3, 4]
    assert np.allclose(
        np.delete(done.coords, [3, 4], axis=0),
        pca(np.delete(x, [3, 4], axis=0).astype(np.float32)).coords,
        atol=1e-4,
    )


def test_file_says_where_it_comes_from_and_how_it_was_made(tmp_path: Path) -> None:
    x, _ = clusters(60)
    done = project(embeddings_file(tmp_path, x, id="f00d"), method="umap", n_neighbors=10)
    expected = {
        "parent": "f00d",
        "model": "net",
        "data": "blobs",
        "method": "umap",
        "layer": "avgpool",
        "seed": 0,
        "n_components": 2,
        "n_neighbors": 10,
        "min_dist": 0.1,
        "metric": "euclidean",
        "trustworthiness_k": 15,
        "scored_rows": 60,
    }
    assert {key: done.attrs[key] for key in expected} == expected
    score = trustworthiness(x.astype(np.float32), done.coords, n_neighbors=15)
    assert done.attrs["trustworthiness"] == pytest.approx(score)
    reread = derived.open_projection(done.path)
    assert np.array_equal(reread.coords, done.coords)
    assert project(tmp_path, method="umap", n_neighbors=10).path == done.path


def test_state_of_a_pca_is_in_the_file_and_places_rows(tmp_path: Path) -> None:
    x, _ = clusters(60)
    state = project(embeddings_file(tmp_path, x), method="pca")
    placed = (x.astype(np.float32) - state.state["mean"]) @ state.state["components"].T
    assert np.allclose(placed, state.coords, atol=1e-3)


def test_projection_of_other_embeddings_is_refused_until_overwritten(tmp_path: Path) -> None:
    x, _ = clusters(30)
    path = embeddings_file(tmp_path, x, id="first")
    stale = project(path, method="pca")
    before = stale.path.read_bytes()
    path.unlink()
    embeddings_file(tmp_path, x + np.arange(10), id="second")
    with pytest.raises(StoreError) as caught:
        project(path, method="pca")
    assert "first" in str(caught.value)
    assert "second" in str(caught.value)
    assert str(caught.value).endswith("replace it with overwrite=true")
    assert stale.path.read_bytes() == before
    assert project(path, method="pca", overwrite=True).attrs["parent"] == "second"


def test_what_was_made_of_rows_that_were_replaced_since_is_taken_for_none_of_the_new(
    tmp_path: Path,
) -> None:
    x, labels = clusters(30)
    path = embeddings_file(tmp_path, x, labels=labels, failed=[3, 7])
    stale = store.open(path)  # in a notebook, or at work elsewhere
    made = project(stale, method="pca")
    evaluate(stale)
    path.unlink()
    embeddings_file(tmp_path, x, labels=labels, failed=[3, 8])  # the same run, made again
    new = store.open(path)
    for stage in (lambda: project(stale, n_neighbors=3), lambda: evaluate(stale)):
        with pytest.raises(StoreError, match="replaced meanwhile; open it again"):
            stage()
    scores = json.loads((tmp_path / "scores.json").read_text())
    scores["scores"][0]["knn_accuracy"] = 0.125
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    assert made.attrs["parent"] == new.attrs["id"]
    with pytest.raises(StoreError, match=r"of rows of .* that have been replaced since"):
        project(path, method="pca")
    assert derived.projections_of(new) == []
    assert derived.describe(path)["projections"] == []
    assert compare([tmp_path], out=tmp_path / "compared").table[0]["knn_accuracy"] == 1.0
    assert np.flatnonzero(np.isnan(project(path, method="pca", overwrite=True).coords[:, 0])) == (
        pytest.approx([3, 8])
    )
    graph = layer_graph(new, "avgpool", x[new.ok], n_neighbors=3, metric="euclidean")
    assert np.array_equal(graph.indices, nearest_neighbors(x[new.ok], n_neighbors=3).indices)


def test_damaged_projection_is_refused_in_one_line_until_overwritten(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    done = project(path, method="pca")
    whole = done.path.read_bytes()
    done.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError) as caught:
        project(path, method="pca")
    assert len(str(caught.value).splitlines()) == 1
    project(path, method="pca", overwrite=True)
    assert done.path.read_bytes() == whole


def test_maps_beside_a_run_are_listed_without_reading_them_and_the_damaged_ones_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    good = [project(path, method="pca", n_components=m) for m in (1, 2)]
    broken = project(path, method="pca", n_components=3)
    broken.path.write_bytes(broken.path.read_bytes()[:3000])
    (tmp_path / "projections" / "note-1.h5").write_text("text")
    projection_file(path, "pca-other", clusters(30)[0], parent="other")

    def fail(*_: Any) -> None:
        raise AssertionError("read a map for its name")

    monkeypatch.setattr(derived, "open_projection", fail)
    about = derived.describe(tmp_path)
    assert about["projections"] == sorted(done.name for done in good)
    first, second = about["damaged projections"]
    assert first.startswith("note-1 (")
    assert first.endswith("note-1.h5 is not an HDF5 file; name a file that embedx wrote)")
    assert second.startswith(f"{broken.name} (")
    assert [m for m in caplog.messages if "passed over" in m] == [
        f"{tmp_path / 'projections' / 'pca-other.h5'} was made of other embeddings: passed over"
    ]


def test_chosen_maps_come_in_the_order_they_were_chosen_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = store.open(embeddings_file(tmp_path, clusters(30)[0]))
    first, second, third = (
        project(opened, method="pca", n_components=m, out=tmp_path / folder)
        for m, folder in ((1, "elsewhere"), (2, "projections"), (3, "projections"))
    )
    monkeypatch.chdir(tmp_path)
    chosen = [third.name, f"elsewhere/{first.path.name}", "pca", str(first.path)]
    found = derived.projections_of(opened, chosen)
    assert [done.name for done in found] == [third.name, first.name, second.name]
    everything = [done.name for done in derived.projections_of(opened)]
    assert everything == sorted([second.name, third.name])


def test_unfinished_or_missing_embeddings_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no .*; make it with: python -m embedx extract"):
        project(tmp_path, method="pca")
    field = layout.embeddings_field("avgpool", n_features=2, dtype=np.dtype("f4"), attrs={})
    writer = writing.create(
        tmp_path / "embeddings.h5", ids=["a", "b"], fields=[field], attrs={"id": "x"}
    )
    writer.close()
    with pytest.raises(StoreError, match="is not finished"):
        project(tmp_path, method="pca")
    partial = tmp_path / "embeddings.h5.partial"
    with pytest.raises(DataError, match="is not finished; finish the extraction first"):
        project(partial, method="pca")


def test_file_without_a_good_row_is_refused(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, np.zeros((3, 2)), failed=(0, 1, 2))
    with pytest.raises(DataError, match="has no row to project: all 3 failed"):
        project(path, method="pca")


# --------------------------------------------------------------------------- one's own method


def halves(x: Array, *, factor: float = 0.5, note: str = "") -> Result:
    return Result(
        x[:, :2] * factor, used={"note": note + "!"}, state={"factor": np.array([factor])}
    )


def test_function_of_ones_own_is_a_method(tmp_path: Path) -> None:
    x, _ = clusters(30)
    path = embeddings_file(tmp_path, x)
    done = project(path, method=halves, note="mine")
    assert done.name.startswith("halves-")
    assert np.array_equal(done.coords, x[:, :2].astype(np.float32) / 2)
    assert (done.attrs["method"], done.attrs["factor"]) == ("halves", 0.5)
    assert done.attrs["note"] == "mine!"
    assert done.state["factor"].tolist() == [0.5]
    assert project(path, method=halves, note="mine", factor=0.5).path == done.path
    assert project(path, method=halves, note="mine", factor=2).path != done.path
    with pytest.raises(ConfigError, match=r"no key 'projection.facto'; .* projection.factor"):
        project(path, method=halves, facto=2)


def test_function_that_takes_anything_gets_what_is_given(tmp_path: Path) -> None:
    def anything(x: Array, **options: Any) -> Result:
        return Result(x[:, options["columns"][0] : options["columns"][1]])

    path = embeddings_file(tmp_path, clusters(30)[0])
    done = project(path, method=anything, columns=[1, 4])
    assert done.coords.shape == (30, 3)
    assert done.attrs["columns"] == "[1, 4]"


def test_functions_of_one_name_do_not_share_a_file(tmp_path: Path) -> None:
    def inner() -> Callable[..., Result]:
        def pca(x: Array, *, n_components: int = 2, random_state: int = 0) -> Result:
            return Result(x[:, :n_components])

        return pca

    x, _ = clusters(30)
    path = embeddings_file(tmp_path, x)
    own, ours = project(path, method=inner()), project(path, method="pca")
    assert own.path != ours.path
    assert np.array_equal(own.coords, x[:, :2].astype(np.float32))
    bare = project(path, method=lambda x: Result(x[:, 3:5]))
    assert bare.path.name.startswith("_lambda_-")


class Columns:
    """A method that has no name of its own."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, x: Array, *, scale: float = 1.0) -> Result:
        return Result(x[:, self.first : self.first + 2] * scale)


def columns_from(first: int) -> Callable[..., Result]:
    return lambda x: Result(x[:, first : first + 2])


def from_first(first: int, x: Array) -> Result:
    return Result(x[:, first : first + 2])


@pytest.mark.parametrize(
    "kind", [Columns, columns_from, lambda first: functools.partial(from_first, first)]
)
def test_functions_are_told_apart_by_what_they_do(kind: Any, tmp_path: Path) -> None:
    x, _ = clusters(30)
    path = embeddings_file(tmp_path, x)
    for first in (0, 3, 0):
        made = project(path, method=kind(first))
        assert np.array_equal(made.coords, x[:, first : first + 2].astype(np.float32))
    assert len(list(path.parent.glob("projections/*.h5"))) == 2


def test_nothing_is_put_where_the_embeddings_were_before_they_were_moved(tmp_path: Path) -> None:
    x, labels = clusters(30)
    path = embeddings_file(tmp_path / "before", x, labels=labels)
    opened = store.open(path)
    (tmp_path / "before").rename(tmp_path / "after")
    for stage in (lambda: project(opened, method="pca"), lambda: evaluate(opened)):
        with pytest.raises(StoreError, match="was joined, moved, removed or replaced meanwhile"):
            stage()
    assert not (tmp_path / "before" / "scores.json").exists()
    assert not list(tmp_path.glob("before/projections/*.h5"))


def test_function_cannot_overwrite_what_the_file_says_of_its_origin(tmp_path: Path) -> None:
    def sly(x: Array, *, parent: str = "nobody") -> Result:
        return Result(x[:, :2], used={"id": "forged", "layer": "none"})

    path = embeddings_file(tmp_path, clusters(30)[0])
    done = project(path, method=sly)
    assert (done.attrs["parent"], done.attrs["layer"]) == ("one", "avgpool")
    assert project(path, method=sly).path == done.path


@pytest.mark.parametrize(
    ("gives", "what"),
    [
        (lambda x: x[:, :2], "a ndarray"),
        (lambda x: None, "a NoneType"),
        (lambda x: Result(x[:-1]), "coords (29, 10)"),
        (lambda x: Result(x[:, 0]), "coords (30,)"),
        (lambda x: Result(x[:, :0]), "coords (30, 0)"),
        (lambda x: Result(x.tolist()), "coords that are a list"),
        (lambda x: Result(x.astype(str)), "coords of type <U32"),
        (lambda x: Result(x + 1j), "coords of type complex64"),
    ],
)
def test_function_that_gives_no_coordinates_is_refused_in_one_line(
    tmp_path: Path, gives: Callable[..., Any], what: str
) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    with pytest.raises(DataError) as caught:
        project(path, method=gives)
    assert str(caught.value) == (
        "projection <lambda> must give a Result with coords, an array of numbers (30, m), and it "
        f"gave {what}"
    ).replace("<lambda>", "_lambda_")
    assert not (tmp_path / "projections").exists()


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (
            {"used": {"weights": np.ones(3)}},
            r"used\['weights'\], a ndarray array\(\[1., 1., 1.\]\), ",
        ),
        (
            {"state": {"names": np.array(["a", "b"])}},
            r"state\['names'\], a ndarray .*no array of nu",
        ),
    ],
)
def test_what_a_file_cannot_hold_of_a_result_is_refused_in_one_line(
    tmp_path: Path, result: dict[str, Any], what: str
) -> None:
    def own(x: Array) -> Result:
        return Result(x[:, :2], **result)

    path = embeddings_file(tmp_path, clusters(30)[0])
    with pytest.raises(DataError, match=rf"^projection own gave {what}") as caught:
        project(path, method=own)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "projections").exists()


class Never(AssertionError):
    pass


def never(x: Array, **parameters: Any) -> Result:
    raise Never


@pytest.mark.parametrize(
    "value",
    [np.ones(5000), [np.ones(2)], {1, 2}, {(1, 2): 3}, {1: 2, "a": 3}, Path("a"), never, 1j, b"a"],
)
def test_a_parameter_that_a_file_cannot_keep_is_refused_before_the_work(
    tmp_path: Path, value: Any
) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    with pytest.raises(ConfigError) as caught:
        project(path, method=never, weights=value)
    assert re.fullmatch(
        r"projection\.weights must be a number, a text, or a list or mapping of them, for the file "
        rf"of the map keeps it, not a {type(value).__name__} .*",
        str(caught.value),
    )


@pytest.mark.parametrize(
    "value", ["a\0b", "\udc80", 2**64, -(2**70), "x" * 200_000, list(range(50_000)), "", None, [[]]]
)
def test_a_parameter_of_any_plain_value_is_kept_and_tells_maps_apart(
    tmp_path: Path, value: Any
) -> None:
    def own(x: Array, *, k: Any) -> Result:
        return Result(x[:, :2])

    path = embeddings_file(tmp_path, clusters(30)[0])
    done = project(path, method=own, k=value)
    assert json.loads(done.attrs["settings"])["k"] == value
    assert project(path, method=own, k=value).path == done.path
    assert project(path, method=own, k=[value, 1]).path != done.path


@pytest.mark.parametrize("name", ["embeddings", "method", "layer", "out", "overwrite", "function"])
def test_a_parameter_by_the_name_of_one_of_project_is_refused_in_one_line(
    tmp_path: Path, name: str
) -> None:
    scope: dict[str, Any] = {}
    exec(f"def own(x, *, {name}=1): raise AssertionError", scope)
    path = embeddings_file(tmp_path, clusters(30)[0])
    with pytest.raises(ConfigError) as caught:
        project(path, method=scope["own"])
    assert re.fullmatch(
        rf"projection\.{name} cannot be passed on: project has '{name}' for itself; give that "
        r"parameter of .*own another name",
        str(caught.value),
    )


def test_a_parameter_may_have_the_name_of_an_attribute_of_the_file(tmp_path: Path) -> None:
    def own(x: Array, *, format: str, version: int, file: str) -> Result:
        return Result(x[:, :2])

    path = embeddings_file(tmp_path, clusters(30)[0])
    done = project(path, method=own, format="f", version=7, file="elsewhere")
    kept = json.loads(derived.open_projection(done.path).attrs["settings"])
    assert (kept["format"], kept["version"]) == ("f", 7)
    assert derived.describe(done.path)["file"] == str(done.path)


def test_a_seed_of_ones_own_method_is_kept_by_whichever_name_and_none_is_one_too(
    tmp_path: Path,
) -> None:
    def sown(x: Array, *, seed: int = 5) -> Result:
        return Result(x[:, :2])

    def drawn(x: Array, *, random_state: int | None = None) -> Result:
        return Result(x[:, :2])

    path = embeddings_file(tmp_path, clusters(30)[0])
    assert project(path, method=sown).attrs["seed"] == 5
    done = project(path, method=drawn)
    assert done.attrs["seed"] == done.attrs["random_state"] == "null"
    assert "trustworthiness" in done.attrs


def test_maps_are_scored_on_the_same_rows_whatever_their_seed(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, np.random.default_rng(0).normal(size=(4000, 5)))
    one, other = (project(path, method="pca", random_state=seed) for seed in (0, 1))
    assert one.attrs["scored_rows"] < 4000
    names = ("trustworthiness", "continuity", "knn_recall_5", "distance_correlation", "stress")
    assert [one.attrs[name] for name in names] == [other.attrs[name] for name in names]


@pytest.mark.parametrize("options", [{"pre_pca": 4}, {"landmarks": 50}])
def test_the_neighbours_that_scores_need_are_found_once_for_all_maps_of_the_rows(
    tmp_path: Path, options: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    path = embeddings_file(tmp_path, clusters(90)[0])
    caplog.set_level("INFO", "embedx")
    for n_iter in (20, 30):
        project(path, method="tsne", n_iter=n_iter, **options)
    searches = [line for line in caplog.messages if line.startswith("found the ")]
    # Of the rows as they are, and of those that the method was given.
    assert len(searches) == len(list(tmp_path.glob("neighbors-*.h5"))) == 2


def test_a_method_that_python_cannot_look_into_is_refused_in_one_line(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    with pytest.raises(ConfigError, match=r"dict does not say which arguments it takes; wrap it"):
        project(path, method=dict)


def test_run_can_be_moved_and_is_still_recognised(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path / "here", clusters(30)[0])
    first = project(path, method="pca").path
    before = first.stat().st_mtime_ns
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = project(tmp_path / "there", method="pca").path
    assert moved == tmp_path / "there" / "projections" / first.name
    assert moved.stat().st_mtime_ns == before


# --------------------------------------------------------------------------- fewer dimensions, rows

MAKING = {
    "model": "net",
    "weights_sha256": "w",
    "code": "c",
    "preprocess": "p",
    "tokens": False,
    "normalize": False,
    "revisions": [1, 1, 1],
    "layers": ["avgpool"],
    "pooling": ["gap"],
    "pooling_code": [""],
}


def digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order].astype(np.float32), y[order].astype(np.int32)


def run_of(folder: Path, x: Array, *, at: slice = slice(None), **about: Any) -> Path:
    """A run of some rows, by a model that the file names, each row with an id of its own."""
    ids = [f"row-{i:04d}" for i in range(len(x))][at]
    made = {"identity": json.dumps(MAKING), "id": f"run {folder.name}"}
    return embeddings_file(folder, x[at], ids=ids, **{**made, **about})


@pytest.mark.parametrize("method", NONLINEAR)
def test_pre_pca_is_the_method_on_the_principal_components_and_is_kept(
    tmp_path: Path, method: str
) -> None:
    x, labels = clusters(120, 30)
    path = embeddings_file(tmp_path / "whole", x)
    done = project(path, method=method, pre_pca=4)
    assert done.attrs["pre_pca"] == 4
    components, mean = done.state["pre_components"], done.state["pre_mean"]
    reduced = (x.astype(np.float32) - mean) @ components.T
    expected = pca(x.astype(np.float32), n_components=4)
    assert np.abs(components - expected.state["components"]).max() < 1e-5
    assert np.abs(reduced - expected.coords).max() < 1e-5 * np.abs(reduced).max()
    alone = project(embeddings_file(tmp_path / "reduced", reduced), method=method)
    assert accuracy(done.coords, labels) > 0.95
    assert np.abs(done.coords - alone.coords).max() < 0.02 * np.ptp(alone.coords) or (
        trustworthiness(reduced, done.coords, n_neighbors=5)
        == pytest.approx(trustworthiness(reduced, alone.coords, n_neighbors=5), abs=0.02)
    )
    score = trustworthiness(x.astype(np.float32), done.coords, n_neighbors=15)
    assert done.attrs["trustworthiness"] == pytest.approx(score)  # of the whole rows
    assert project(path, method=method, pre_pca=4).path == done.path
    assert project(path, method=method).path != done.path


def test_pre_pca_of_what_has_no_more_is_said_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = embeddings_file(tmp_path, clusters(40)[0])
    done = project(path, method="tsne", pre_pca=50, n_iter=20)
    assert "pre_pca=50: 40 x 10 rows have no more; not reduced" in caplog.messages
    assert done.attrs["pre_pca"] == 10
    assert "pre_components" not in done.state
    assert np.array_equal(done.coords, project(path, method="tsne", n_iter=20).coords)


@pytest.mark.parametrize("method", list(METHODS))
def test_landmarks_are_of_every_label_in_proportion_and_the_others_join_them(
    tmp_path: Path, method: str
) -> None:
    x, labels = clusters(300)
    labels[labels == 2] = np.where(np.arange(100) < 40, 2, -1)  # some have none
    path = embeddings_file(tmp_path, x, labels=labels, failed=(0, 7))
    done = project(path, method=method, landmarks=60)
    landmarks = done.state["landmarks"]
    assert done.attrs["landmarks"] == len(set(landmarks.tolist())) == 60
    assert not {0, 7} & set(landmarks.tolist())
    for label, n in ((0, 99), (1, 99), (2, 40), (-1, 60)):
        assert abs((labels[landmarks] == label).sum() - 60 * n / 298) <= 1
    ok = np.setdiff1d(np.arange(300), [0, 7])
    assert np.isnan(done.coords[[0, 7]]).all()
    assert np.isfinite(done.coords[ok]).all()
    assert accuracy(done.coords[ok], (np.arange(300) % 3)[ok]) > 0.95
    rest = embeddings_file(tmp_path / "chosen", x[landmarks], labels=labels[landmarks])
    alone = project(rest, method=method)
    assert np.array_equal(alone.coords, done.coords[landmarks])


def test_landmarks_hold_a_block_of_the_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from embedx import matrix
    from embedx.scores import Quality

    x, _ = clusters(3000, 8)
    path = embeddings_file(tmp_path, x)
    expected = project(path, method="tsne", landmarks=100, n_iter=20).coords
    sizes: list[int] = []
    read = matrix.Matrix.__getitem__

    def watched(self: Any, which: Any) -> Any:
        rows = read(self, which)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(matrix.Matrix, "__getitem__", watched)
    monkeypatch.setattr(matrix, "BLOCK_ROWS", 128)
    unscored = Quality({}, np.full(3000, np.nan, np.float32))
    monkeypatch.setattr(sys.modules["embedx.project"], "map_quality", lambda *_, **__: unscored)
    again = project(path, method="tsne", landmarks=100, n_iter=20, overwrite=True).coords
    assert len(sizes) > 20
    assert max(sizes) <= 128
    assert np.abs(again - expected).max() < 1e-6 * np.abs(expected).max()


def test_landmarks_that_make_no_sense_are_refused_or_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = embeddings_file(tmp_path, clusters(40)[0])
    for landmarks in (40, 1000):
        done = project(path, method="pca", landmarks=landmarks)
        assert f"landmarks={landmarks}: there are 40 rows, all are fitted" in caplog.messages
        assert "landmarks" not in done.state
        assert np.array_equal(done.coords, project(path, method="pca").coords)
    for key in ("landmarks", "pre_pca"):
        with pytest.raises(ConfigError, match=f"^{key} must be at least 1, not 0$"):
            project(path, method="pca", **{key: 0})
    with pytest.raises(ConfigError, match=r"^landmarks=9: projection halves cannot place the othe"):
        project(path, method=halves, landmarks=9)
    with pytest.raises(ConfigError, match=r"^landmarks=20: densMAP cannot place new rows, .*"):
        project(path, method="umap", densmap=True, landmarks=20)
    with pytest.raises(DataError, match="needs at least 4 rows, and there are 3"):
        project(path, method="tsne", landmarks=3)


# --------------------------------------------------------------------------- in a map that is there

PLACE = (
    "import sys, embedx;"
    "embedx.project(sys.argv[1], transform_from=sys.argv[2]);"
    "sys.exit('torch' in sys.modules)"
)


def placed_elsewhere(path: Path, source: Path) -> derived.Projection:
    """Rows placed by another process, which has the files alone."""
    import subprocess
    import sys

    before = source.read_bytes()
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PLACE, str(path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert source.read_bytes() == before
    (found,) = (path.parent / "projections").glob("*.h5")
    return derived.open_projection(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pca", {"n_components": 8, "whiten": True}),
        ("tsne", {"pre_pca": 20, "perplexity": [10, 50]}),
        ("umap", {"metric": "cosine", "landmarks": 600}),
        pytest.param("pca", {"n_components": 8}, marks=EXHAUSTIVE),
        pytest.param("tsne", {}, marks=EXHAUSTIVE),
        pytest.param("tsne", {"n_components": 3}, marks=EXHAUSTIVE),
        pytest.param("umap", {}, marks=EXHAUSTIVE),
        pytest.param("umap", {"n_components": 3, "pre_pca": 30}, marks=EXHAUSTIVE),
    ],
)
def test_held_out_digits_land_in_their_class_by_another_process(
    tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    x, labels = digits()
    old = run_of(tmp_path / "old", x, at=slice(1300), labels=labels[:1300])
    new = run_of(tmp_path / "new", x, at=slice(1300, None))
    the_map = project(old, method=method, **options)
    placed = placed_elsewhere(new, the_map.path)
    assert placed.coords.shape == (497, the_map.coords.shape[1])
    assert (placed.attrs["method"], placed.attrs["transform_from"]) == (
        method,
        "".join([the_map.attrs["id"]]),
    )
    vote = KNeighborsClassifier(5).fit(the_map.coords, labels[:1300])
    score = vote.score(placed.coords, labels[1300:])
    assert score > accuracy(the_map.coords, labels[:1300]) - 0.03


@pytest.mark.parametrize("options", [{}, {"pre_pca": 5}, {"landmarks": 60}, {"whiten": True}])
def test_the_rows_of_a_pca_in_another_file_are_placed_where_they_are(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    x, _ = clusters(200)
    the_map = project(run_of(tmp_path / "old", x), method="pca", **options)
    other = project(run_of(tmp_path / "other", x[:, ::-1]), method="tsne", n_iter=20)
    aligned = project(tmp_path / "old", method="pca", align_to=other, **options)
    for source in (the_map, aligned):
        placed = project(run_of(tmp_path / source.name, x), transform_from=source)
        assert np.abs(placed.coords - source.coords).max() < 1e-5 * np.abs(source.coords).max()
        assert placed.attrs["trustworthiness"] == pytest.approx(source.attrs["trustworthiness"])


@pytest.mark.parametrize("method", NONLINEAR)
def test_rows_placed_in_an_aligned_map_lie_in_its_frame(tmp_path: Path, method: str) -> None:
    x, labels = clusters(150)
    old = run_of(tmp_path / "old", x)
    frame = projection_file(old, "pca-frame", x[:, :2] @ [[0.0, -1.0], [1.0, 0.0]] + [500.0, 90.0])
    the_map = project(old, method=method, align_to="pca-frame", metric="cosine")
    assert frame.is_file()
    fresh = (x + np.random.default_rng(5).normal(size=x.shape) * 0.1).astype(np.float32)
    placed = project(run_of(tmp_path / "new", fresh), transform_from=the_map)
    both = np.vstack([the_map.coords, placed.coords])
    assert np.abs(both.mean(axis=0) - [500, 90]).max() < 100
    assert accuracy(both, np.tile(labels, 2)) > 0.95
    nearest = np.linalg.norm(placed.coords[:, None] - the_map.coords[None], axis=2).argmin(axis=1)
    assert (labels[nearest] == labels).mean() > 0.95


def test_a_map_where_rows_were_placed_is_found_done_and_named_by_its_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, _ = clusters(60)
    the_map = project(run_of(tmp_path / "old", x, at=slice(40)), method="pca")
    new = run_of(tmp_path / "new", x, at=slice(40, None), failed=(3,))
    first = project(new, transform_from=the_map)
    before = first.path.read_bytes()
    caplog.set_level(logging.INFO)
    assert project(new, transform_from=str(the_map.path)).path == first.path
    assert any(message.endswith("nothing to do") for message in caplog.messages)
    assert np.isnan(first.coords[3]).all()
    assert project(new, transform_from=the_map, overwrite=True).path.read_bytes() == before
    assert first.name.startswith("pca-")
    assert first.attrs["parent"] == "run new"
    assert "trustworthiness" in first.attrs
    assert not [message for message in caplog.messages if "cannot be told" in message]


def test_what_cannot_be_placed_is_refused_in_one_line(tmp_path: Path) -> None:
    x, _ = clusters(60)
    old = run_of(tmp_path / "old", x)
    new = run_of(tmp_path / "new", x)
    the_map = project(old, method="pca")
    dense = project(old, method="umap", densmap=True)
    own = project(old, method=halves)
    placed = project(new, transform_from=the_map)
    other = {
        key: run_of(tmp_path / key, x, identity=json.dumps({**MAKING, key: value}))
        for key, value in {
            "weights_sha256": "else",
            "preprocess": 3,
            "revisions": [1, 2, 1],
            "pooling_code": ["mine"],
        }.items()
    }
    another = embeddings_file(tmp_path / "layer", {"fc": x}, identity=json.dumps(MAKING), id="l")
    wide = run_of(tmp_path / "wide", np.hstack([x, x]))
    empty = projection_file(old, "empty-1", np.full((60, 2), np.nan))
    for embeddings, source, what in (
        (old, the_map, "is a map of these very embeddings"),
        (new, own, "rows can be placed in maps of pca, tsne, umap that were fitted, and this"),
        (run_of(tmp_path / "third", x), placed, "rows can be placed in maps of pca, tsne, umap"),
        (new, dense, "densMAP cannot place new rows"),
        (new, derived.open_projection(empty), "rows can be placed in maps of"),
        (other["weights_sha256"], the_map, "is a map of rows with weights_sha256 w, and"),
        (other["preprocess"], the_map, "is a map of rows with preprocess p, and"),
        (other["revisions"], the_map, "is a map of rows with revisions [1, 1, 1], and"),
        (other["pooling_code"], the_map, "is a map of rows with pooling_code , and"),
        (wide, the_map, "is a map of rows of 10 dims, and avgpool of"),
        (another, the_map, "has no layer 'avgpool'"),
        (new, tmp_path / "nowhere.h5", "nowhere.h5"),
        (new, old, "is not an embedx-projection file"),
    ):
        with pytest.raises((ConfigError, DataError, StoreError)) as caught:
            project(embeddings, transform_from=source)
        assert what in str(caught.value)
        assert "\n" not in str(caught.value)
    for key, value in {
        "method": "pca",
        "layer": "avgpool",
        "pre_pca": 5,
        "landmarks": 5,
        "align_to": the_map,
        "n_components": 3,
    }.items():
        with pytest.raises(ConfigError, match=f"^{key} has no use beside transform_from: "):
            project(new, transform_from=the_map, **{key: value})  # type: ignore[arg-type]
    for gone in (
        (tmp_path / "old" / "embeddings.h5").unlink,
        lambda: run_of(tmp_path / "old", x, id="made anew"),
    ):
        gone()
        with pytest.raises(DataError, match=r"the embeddings that it was fitted to \(id run old\)"):
            project(new, transform_from=the_map, overwrite=True)


@pytest.mark.parametrize(
    ("options", "change", "what"),
    [
        ({}, {"mean": np.zeros(3)}, "its state mean is (3,) float64, or not finite, and (10,)"),
        ({}, {"mean": np.full(10, np.nan)}, "its state mean is (10,) float64, or not finite"),
        ({}, {"components": np.zeros((2, 9))}, "its state components is (2, 9)"),
        ({}, {"components": None}, "its state components is missing"),
        ({"whiten": True}, {"scale": np.zeros((2, 2))}, "its state scale is (2, 2)"),
        ({"landmarks": 20}, {"landmarks": np.array([0, 60])}, "its state landmarks are no rows"),
        ({"landmarks": 20}, {"landmarks": np.array([0, -1])}, "its state landmarks are no rows"),
        ({"landmarks": 20}, {"landmarks": np.ones(3)}, "its state landmarks are no rows"),
        ({"landmarks": 20}, {"landmarks": np.zeros((2, 2), int)}, "its state landmarks are no row"),
        ({"landmarks": 20}, {"landmarks": np.zeros(0, int)}, "no row has a place in it"),
        ({"pre_pca": 4}, {"pre_mean": np.zeros(4)}, "its state pre_mean is (4,)"),
        ({"pre_pca": 4}, {"pre_components": np.zeros(())}, "its state pre_components is ()"),
        ({"pre_pca": 4}, {"pre_components": np.zeros((3, 10))}, "its state components is (2, 4)"),
        ({"align_to": "pca-frame"}, {"align_rotation": np.eye(3)}, "its state align_rotation is"),
        ({"align_to": "pca-frame"}, {"align_shift": None}, "its state align_shift is missing"),
    ],
)
def test_a_file_whose_state_cannot_be_is_refused_in_one_line(
    tmp_path: Path, options: dict[str, Any], change: dict[str, Any], what: str
) -> None:
    x, _ = clusters(60)
    old, new = (run_of(tmp_path / name, x) for name in ("old", "new"))
    projection_file(old, "pca-frame", x[:, :2])
    the_map = project(old, method="pca", **options)
    state = {key: array for key, array in {**the_map.state, **change}.items() if array is not None}
    derived.write_projection(
        the_map.path, coords=the_map.coords, ids=the_map.ids, attrs=the_map.attrs, state=state
    )
    with pytest.raises(DataError) as caught:
        project(new, transform_from=the_map.path)
    assert str(caught.value).startswith(f"transform_from={the_map.path} takes no rows: {what}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new" / "projections").exists()


def test_what_a_file_does_not_say_of_its_making_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, _ = clusters(40)
    old, new = (run_of(tmp_path / name, x, identity="{}") for name in ("old", "new"))
    project(new, transform_from=project(old, method="pca"))
    said = [message for message in caplog.messages if "cannot be told" in message]
    assert said == [
        "whether both were made with the same model, weights_sha256, code, tokens, preprocess, "
        "normalize, revisions, pooling, pooling_code, objective, ablate cannot be told"
    ]


# --------------------------------------------------------------------------- aligned


def turned(coords: Array) -> Array:
    """Mirrored, turned by 40 degrees and moved."""
    angle = np.deg2rad(40)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    moved: Array = (coords * [1, -1]) @ turn + [30.0, -7.0]
    return moved


def distances_within(coords: Array) -> Array:
    from scipy.spatial.distance import pdist

    found: Array = pdist(coords)
    return found


def test_a_map_that_was_mirrored_turned_and_moved_comes_back(tmp_path: Path) -> None:
    x, _ = clusters(60)
    path = run_of(tmp_path, x)
    plain = project(path, method="pca")
    projection_file(path, "tsne-turned", turned(plain.coords))
    aligned = project(path, method="pca", align_to="tsne-turned")
    assert aligned.path != plain.path
    assert np.abs(aligned.coords - turned(plain.coords)).max() < 1e-4
    assert aligned.attrs["align_to"] == "tsne-turned"
    assert project(path, method="pca", align_to="tsne-turned").path == aligned.path
    rotation = aligned.state["align_rotation"]
    assert np.allclose(rotation @ rotation.T, np.eye(2), atol=1e-6)


def test_alignment_is_that_of_scipy_over_the_samples_in_common(tmp_path: Path) -> None:
    from scipy.linalg import orthogonal_procrustes

    x, _ = clusters(90)
    ours = run_of(tmp_path / "a", x, at=slice(60), failed=(2,))
    theirs = run_of(tmp_path / "b", x, at=slice(20, 90), failed=(5,))
    aim = np.random.default_rng(0).normal(size=(70, 2)).astype(np.float32)
    aim[5] = np.nan
    target = projection_file(theirs, "umap-aim", aim)
    plain = project(ours, method="pca").coords
    aligned = project(ours, method="pca", align_to=str(target)).coords
    shared = np.setdiff1d(np.arange(20, 60), [25])
    a, b = plain[shared].astype(np.float64), aim[shared - 20].astype(np.float64)
    turn, _ = orthogonal_procrustes(a - a.mean(axis=0), b - b.mean(axis=0))
    ok = np.setdiff1d(np.arange(60), [2])
    expected = (plain[ok] - a.mean(axis=0)) @ turn + b.mean(axis=0)
    assert np.abs(aligned[ok] - expected).max() < 1e-4
    assert np.isnan(aligned[2]).all()
    assert np.allclose(distances_within(aligned[ok]), distances_within(plain[ok]), atol=1e-3)


@pytest.mark.parametrize(
    ("method", "options"),
    [("umap", {}), ("tsne", {"early_exaggeration_iter": 0, "n_iter": 50})],
)
def test_tsne_and_umap_start_from_the_map_that_they_are_aligned_to(
    tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    from scipy.spatial import procrustes

    x, labels = (rows[:500] for rows in digits())
    path = run_of(tmp_path, x)
    target = project(path, method="tsne", random_state=7, initialization="random")
    plain = project(path, method=method, random_state=1, **options)
    given = {"random_state": 1, "align_to": target, **options}
    aligned = project(path, method=method, **given)
    # How far from the target, at the scale and in the frame that suit best.
    off = [float(procrustes(target.coords, done.coords)[2]) for done in (plain, aligned)]
    assert off[1] < 0.7 * off[0]
    assert accuracy(aligned.coords, labels) > 0.9
    assert aligned.attrs["trustworthiness"] > plain.attrs["trustworthiness"] - 0.02
    again = project(path, method=method, out=tmp_path / "again", **given)
    assert again.path.read_bytes() == aligned.path.read_bytes()


@pytest.mark.slow
def test_alignment_draws_umap_to_another_map_and_loses_no_neighbours(tmp_path: Path) -> None:
    x, labels = (rows[:400] for rows in digits())
    path = run_of(tmp_path / "a", x, labels=labels)
    for target_method, options in (("umap", {"random_state": 5}), ("tsne", {})):
        target = project(path, method=target_method, **options)
        maps = [
            project(path, method="umap", align_to=target, alignment=value) for value in (0.0, 0.01)
        ]
        off = [float(np.linalg.norm(done.coords - target.coords, axis=1).mean()) for done in maps]
        assert off[1] < 0.5 * off[0]
        scores = [done.attrs["trustworthiness"] for done in maps]
        assert scores[1] > scores[0] - 0.02
        assert np.abs(maps[1].coords - target.coords).max() > 1e-3  # it is no copy
    again = project(path, method="umap", align_to=target, alignment=0.01, out=tmp_path / "again")
    assert again.path.read_bytes() == maps[1].path.read_bytes()
    # Rows that the other map has not are tied to nothing and land among their kind.
    longer = (rows[:520] for rows in digits())
    more, kinds = longer
    both = project(run_of(tmp_path / "b", more), method="umap", align_to=target, alignment=0.01)
    shared = np.linalg.norm(both.coords[:400] - target.coords, axis=1).mean()
    assert shared < 0.5 * off[0]
    assert accuracy(both.coords, kinds) > 0.9


def test_alignment_that_has_no_use_is_refused_in_one_line(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, clusters(30)[0])
    with pytest.raises(ConfigError) as caught:
        project(path, method="umap", alignment=0.5)
    assert str(caught.value) == ("projection.alignment=0.5 needs a map: name one with align_to")
    with pytest.raises(ConfigError, match=r"^projection.alignment has no use beside projection.de"):
        project(path, method="umap", alignment=0.5, densmap=True)
    with pytest.raises(ConfigError, match=r"^projection.alignment must be at least 0, not -1.0$"):
        project(path, method="umap", alignment=-1.0)


def test_maps_that_cannot_be_aligned_are_refused_in_one_line(tmp_path: Path) -> None:
    x, _ = clusters(40)
    path = run_of(tmp_path / "a", x)
    elsewhere = embeddings_file(tmp_path / "b", x, ids=[f"other-{i}" for i in range(40)])
    few = embeddings_file(
        tmp_path / "c", x, ids=["row-0001", "row-0002", *(f"other-{i}" for i in range(38))]
    )
    line = project(path, method="pca", n_components=1)
    one = embeddings_file(tmp_path / "d", x[:, :1])
    for embeddings, target, what in (
        (path, project(elsewhere, method="pca"), "has 0 samples in common with these embeddings"),
        (path, project(few, method="pca"), "has 2 samples in common with these embeddings, and 3"),
        (path, line, "has 1 dimensions and this map has 2; give both the same projection.n_co"),
        (one, project(path, method="pca"), "has 2 dimensions and this map has 1"),
        (path, "pca-nothing", "pca-nothing"),
    ):
        with pytest.raises((ConfigError, DataError, StoreError)) as caught:
            project(embeddings, method="pca", align_to=target)
        assert what in str(caught.value)
        assert "\n" not in str(caught.value)
    project(path, method="pca")
    with pytest.raises(ConfigError, match=r"^align_to=pca has 2 maps; name one: .*pca-.*, .*pca-"):
        project(path, method="pca", align_to="pca")


def test_tsne_of_few_rows_is_not_spoiled_by_a_huge_one_among_all_their_neighbours(
    tmp_path: Path,
) -> None:
    x, labels = clusters(60)
    x = x.astype(np.float32)
    x[7] = 1e38
    coords = project(embeddings_file(tmp_path, x), method="tsne").coords
    others = np.arange(60) != 7
    assert accuracy(coords[others], labels[others]) > 0.95


def test_a_map_beside_another_that_was_made_anew_is_another_map(tmp_path: Path) -> None:
    x, _ = clusters(40)
    path = embeddings_file(tmp_path, x)
    turn = [0.0]

    def turned(x: Array, *, n_components: int = 2) -> Result:
        flat = np.asarray(x)[:, :2]
        c, s = np.cos(turn[0]), np.sin(turn[0])
        return Result(coords=flat @ np.array([[c, -s], [s, c]]))

    target = project(path, method=turned)
    first = project(path, method="pca", align_to=target)
    assert project(path, method="pca", align_to=target).path == first.path
    turn[0] = 2.0
    target = project(path, method=turned, overwrite=True)
    second = project(path, method="pca", align_to=target)
    assert second.path != first.path
    assert np.abs(second.coords - first.coords).max() > 1


def test_where_a_row_is_placed_does_not_depend_on_the_others_after_a_pre_pca(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 30)).astype(np.float32)
    new = rng.normal(size=(40, 30)).astype(np.float32)
    source = project(embeddings_file(tmp_path / "a", x), method="umap", pre_pca=10)
    whole = project(embeddings_file(tmp_path / "b", new, id="b"), transform_from=source)
    some = project(embeddings_file(tmp_path / "c", new[3:9], id="c"), transform_from=source)
    np.testing.assert_array_equal(whole.coords[3:9], some.coords)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_huge_row_is_placed_after_a_pre_pca_too(tmp_path: Path, method: str) -> None:
    x, labels = clusters(150, 40)
    x = x.astype(np.float32)
    x[7] = 2.5e38
    coords = project(embeddings_file(tmp_path, x), method=method, pre_pca=5).coords
    others = np.arange(150) != 7
    assert np.isfinite(coords[others]).all()
    if method != "pca":
        assert len(np.unique(coords[others], axis=0)) > 100


@pytest.mark.parametrize("method", NONLINEAR)
def test_rows_are_not_placed_in_a_map_of_other_dimensions_than_its_method_makes(
    tmp_path: Path, method: str
) -> None:
    x, _ = clusters(60)
    path = embeddings_file(tmp_path / "a", x)
    source = project(path, method=method)
    wide = np.random.default_rng(0).normal(size=(60, 30)).astype(np.float32)
    derived.write_projection(
        source.path, coords=wide, ids=source.ids, attrs=source.attrs, state=source.state
    )
    new = embeddings_file(tmp_path / "b", x + 1, id="b")
    with pytest.raises(DataError, match="it has 30 dimensions, and maps of its method have 2 or 3"):
        project(new, transform_from=source.path)
