"""The stage ``project``: each method against an oracle, and the file it leaves."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedx import store
from embedx.errors import ConfigError, DataError, StoreError
from embedx.neighbors import knn_accuracy, nearest_neighbors, trustworthiness
from embedx.project import METHODS, Result, pca, project, tsne, umap
from tests.conftest import embeddings_file, projection_file

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


# --------------------------------------------------------------------------- PCA


def test_pca_equals_the_full_decomposition_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    rng = np.random.default_rng(0)
    x = (rng.normal(size=(80, 12)) * np.linspace(1, 4, 12) + 50).astype(np.float32)
    oracle = PCA(n_components=3, svd_solver="full")
    expected = oracle.fit_transform(x.astype(np.float64))
    result = pca(x, n_components=3)
    signs = np.sign((result.coords * expected).sum(axis=0))
    assert set(np.abs(signs)) == {1.0}
    assert np.abs(result.coords * signs - expected).max() < 1e-5
    assert np.abs(result.state["components"] * signs[:, None] - oracle.components_).max() < 1e-5
    assert np.allclose(result.state["mean"], oracle.mean_)
    ratio = result.used["explained_variance_ratio"]
    assert np.allclose(ratio, oracle.explained_variance_ratio_)
    placed = (x - result.state["mean"]) @ result.state["components"].T
    assert np.allclose(placed, result.coords)


def test_sign_of_a_principal_component_makes_its_largest_loading_positive() -> None:
    for seed in range(10):
        x = np.random.default_rng(seed).normal(size=(30, 8))
        components = pca(x, n_components=3).state["components"]
        largest = np.abs(components).argmax(axis=1)
        assert (components[np.arange(3), largest] > 0).all()
        assert np.allclose(pca(-x, n_components=3).coords, -pca(x, n_components=3).coords)


def test_components_more_than_the_data_has_are_clamped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    x = np.random.default_rng(0).normal(size=(3, 8))
    result = pca(x, n_components=5)
    assert result.coords.shape == (3, 3)
    assert result.used["n_components"] == 3
    assert caplog.messages == ["n_components=5 is too large for these rows: using 3"]


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


@pytest.mark.slow
def test_tsne_of_many_rows_goes_by_the_grid_and_parts_clusters_too() -> None:
    x, labels = clusters(5400)
    coords, again = (tsne(x.astype(np.float32), n_iter=50).coords for _ in range(2))
    assert accuracy(coords, labels) > 0.95
    assert np.array_equal(coords, again)


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


@pytest.mark.parametrize("method", NONLINEAR)
def test_a_pair_of_equal_rows_lands_on_nearly_one_point(tmp_path: Path, method: str) -> None:
    x = np.random.default_rng(0).normal(size=(60, 10))
    x = np.repeat(x, 2, axis=0)
    coords = project(embeddings_file(tmp_path, x), method=method).coords
    indices, _ = nearest_neighbors(coords, n_neighbors=5)
    twin = np.arange(120) ^ 1
    assert (indices == twin[:, None]).any(axis=1).mean() > 0.9


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
    assert trustworthiness(x, coords, n_neighbors=5)[0] > 0.9


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
        (umap, "min_dist", 1.1, "0 to 1"),
        (umap, "min_dist", -0.1, "0 to 1"),
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
        "projection.min_dist, projection.n_components"
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
        "trustworthiness_rows": 60,
    }
    assert {key: done.attrs[key] for key in expected} == expected
    score, _ = trustworthiness(x.astype(np.float32), done.coords)
    assert done.attrs["trustworthiness"] == pytest.approx(score)
    reread = store.open_projection(done.path)
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

    monkeypatch.setattr(store, "open_projection", fail)
    about = store.describe(tmp_path)
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
    found = store.projections_of(opened, chosen)
    assert [done.name for done in found] == [third.name, first.name, second.name]
    everything = [done.name for done in store.projections_of(opened)]
    assert everything == sorted([second.name, third.name])


def test_unfinished_or_missing_embeddings_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no .*; make it with: python -m embedx extract"):
        project(tmp_path, method="pca")
    field = store.embeddings_field("avgpool", n_features=2, dtype=np.dtype("f4"), attrs={})
    writer = store.create(
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
    kept = json.loads(store.open_projection(done.path).attrs["settings"])
    assert (kept["format"], kept["version"]) == ("f", 7)
    assert store.describe(done.path)["file"] == str(done.path)


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
