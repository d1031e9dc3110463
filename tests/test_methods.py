"""Each method of projection against an oracle, and one contract over all, of others too."""

import importlib
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedx import matrix, methods
from embedx.errors import ConfigError, DataError
from embedx.matrix import Matrix
from embedx.methods import METHODS, Context, Fitted, Place, Result, pca, place_of, tsne, umap
from embedx.neighbors import nearest_neighbors
from embedx.project import project
from tests.conftest import ROOT, embeddings_file

Array = np.ndarray[Any, Any]
Method = Callable[..., Result]


def clusters(n: int = 150, d: int = 10, *, n_clusters: int = 3) -> tuple[Array, Array]:
    """Gaussian clusters far apart, float32, and which of them each row is of, in turn."""
    rng = np.random.default_rng(0)
    labels = np.arange(n, dtype=np.int32) % n_clusters
    centers = rng.normal(size=(n_clusters, d)) * 20
    return (centers[labels] + rng.normal(size=(n, d))).astype(np.float32), labels


def share_of_own_kind(coords: Array, labels: Array) -> float:
    """How many of the 5 nearest in a map have the label of the row."""
    indices = nearest_neighbors(coords, n_neighbors=5).indices
    return float((labels[indices] == labels[:, None]).mean())


def digits(n: int) -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(x))[:n]
    return x[chosen].astype(np.float32), y[chosen].astype(np.int32)


# --------------------------------------------------------------------------- the contract


@pytest.fixture(params=["pca", "tsne", "umap", pytest.param("pacmap", marks=pytest.mark.slow)])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Method:
    """The methods, and that of ``examples/``, which comes as any other of one's own."""
    if request.param in METHODS:
        return METHODS[request.param]
    pytest.importorskip("pacmap", reason="the example needs the package pacmap")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    found: Method = importlib.import_module("pacmap_method").pacmap
    return found


def quietly(method: Method, x: Array, **parameters: Any) -> Result:
    """As the stage calls it: what libraries warn of is said in words of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method(x, **parameters)


@pytest.mark.parametrize("m", [2, 3])
def test_contract_clusters_are_apart_and_every_row_keeps_its_place(method: Method, m: int) -> None:
    x, labels = clusters()
    order = np.random.default_rng(1).permutation(len(x))
    x, labels = x[order], labels[order]
    coords = quietly(method, x, n_components=m).coords
    assert coords.shape == (150, m)
    assert np.isfinite(coords).all()
    assert share_of_own_kind(np.random.default_rng(0).permutation(coords), labels) < 0.5
    assert share_of_own_kind(coords, labels) > 0.95


def test_contract_a_seed_decides_the_bytes_and_the_rows_are_left_as_they_are(
    method: Method,
) -> None:
    x, _ = clusters(90)
    before = x.copy()
    x.setflags(write=False)
    first, again = (quietly(method, x, random_state=3).coords for _ in range(2))
    assert first.tobytes() == again.tobytes()
    other = quietly(method, x, random_state=4).coords
    assert (first.tobytes() == other.tobytes()) == (method is pca)
    assert x.tobytes() == before.tobytes()
    in_double = quietly(method, x.astype(np.float64), random_state=3).coords
    assert in_double.shape == first.shape
    assert np.isfinite(in_double).all()


def test_contract_equal_rows_land_together(method: Method) -> None:
    x, _ = clusters(60)
    x = np.repeat(x, 2, axis=0)
    coords = quietly(method, x).coords
    indices = nearest_neighbors(coords, n_neighbors=5).indices
    twin = np.arange(120) ^ 1
    assert (indices == twin[:, None]).any(axis=1).mean() > 0.9


def test_contract_the_map_keeps_every_parameter_and_nothing_is_printed(
    method: Method, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = embeddings_file(tmp_path, clusters(60)[0])
    done = project(path, method=method, random_state=2)
    assert capfd.readouterr() == ("", "")
    parameters = set(inspect.signature(method).parameters) - {"x", "context"}
    assert parameters <= set(done.attrs)
    assert set(json.loads(done.attrs["settings"])) >= parameters | {"method", "layer"}
    assert done.attrs["seed"] == 2
    assert "trustworthiness" in done.attrs


def fitted_to(method: Method, x: Array, **parameters: Any) -> Fitted:
    """What the stage hands on to place rows in the map of a method."""
    result = quietly(method, x, **parameters)
    signature = inspect.signature(method).parameters
    defaults = {key: p.default for key, p in signature.items() if key not in ("x", "context")}
    kept = {**defaults, **parameters, **result.used}
    return Fitted(Matrix(x), result.coords, kept, result.state)


def place_that_it_has(method: Method) -> Place:
    place = place_of(method)
    if place is None:
        pytest.skip("it places no new rows")
    return place


def test_contract_a_new_row_is_placed_alike_whatever_comes_with_it(method: Method) -> None:
    place = place_that_it_has(method)
    x, labels = clusters(210)
    fitted = fitted_to(method, x[:150])
    before = fitted.coords.tobytes()
    new = x[150:]
    coords = place(new, fitted)
    assert coords.shape == (60, 2)
    assert fitted.coords.tobytes() == before
    both = np.vstack([fitted.coords, coords])
    assert share_of_own_kind(both, labels) > 0.95
    for company in (new[20:], np.full((3, 10), 1e6, np.float32), np.repeat(x[:1], 40, axis=0)):
        beside = place(np.vstack([new[:20], company]), fitted)[:20]
        assert np.abs(beside - coords[:20]).max() <= 1e-6 * np.abs(coords).max()
    # A product with one row is another routine of the library than with several.
    assert np.abs(place(new[:1], fitted)[0] - coords[0]).max() <= 1e-12 * np.abs(coords).max()


def test_contract_rows_of_the_map_are_placed_where_they_are(method: Method) -> None:
    place = place_that_it_has(method)
    x, _ = digits(400)
    fitted = fitted_to(method, x)
    off = np.linalg.norm(place(x, fitted) - fitted.coords, axis=1)
    span = np.ptp(fitted.coords, axis=0).max()
    assert np.quantile(off, 0.95) < (1e-5 if method is pca else 0.03) * span


# --------------------------------------------------------------------------- PCA


def a_table(kind: str) -> Array:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 12)) * np.linspace(1, 4, 12) + 50
    if kind == "fewer rows than features":
        x = rng.normal(size=(9, 40)) * np.linspace(1, 4, 40)
    elif kind == "far from 0":
        x = rng.normal(size=(300, 12)) * np.linspace(1, 4, 12) + 1e4
    elif kind == "of lower rank":
        x = rng.normal(size=(80, 4)) @ rng.normal(size=(4, 12))
    elif kind == "with constant features":
        x[:, [0, 7]] = 7.0
    elif kind == "of one feature":
        x = x[:, :1]
    return x.astype(np.float32)


KINDS = [
    "plain",
    "fewer rows than features",
    "far from 0",
    "of lower rank",
    "with constant features",
    "of one feature",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("block_rows", [7, 8192])
def test_pca_equals_the_full_decomposition_of_scikit_learn(
    kind: str, whiten: bool, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sklearn.decomposition import PCA

    x = a_table(kind)
    m = min(4, *x.shape)
    monkeypatch.setattr(matrix, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(matrix, "_BLOCK_BYTES", block_rows * 4 * max(x.shape))
    oracle = PCA(n_components=m, svd_solver="full", whiten=whiten)
    expected = oracle.fit_transform(x.astype(np.float64))
    result = pca(x, n_components=m, whiten=whiten)
    signs = np.sign((result.coords * expected).sum(axis=0))
    assert set(np.abs(signs)) == {1.0}
    assert np.abs(result.coords * signs - expected).max() < 1e-5 * np.abs(expected).max()
    axes = result.state["components"]
    assert np.abs(axes * signs[:, None] - oracle.components_).max() < 1e-5
    assert np.allclose(result.state["mean"], oracle.mean_)
    ratio = result.state["explained_variance_ratio"]
    assert len(ratio) == min(x.shape)
    assert np.allclose(ratio[:m], oracle.explained_variance_ratio_)
    assert result.used["explained_variance"] == pytest.approx(ratio[:m].sum())
    assert (axes[np.arange(m), np.abs(axes).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_pca_is_the_same_whatever_the_size_of_a_block(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = a_table(kind)
    m = min(4, *x.shape)
    whole = pca(x, n_components=m).coords
    for n_rows in (1, 5, 64):
        monkeypatch.setattr(matrix, "BLOCK_ROWS", n_rows)
        coords = pca(x, n_components=m).coords
        assert np.abs(coords - whole).max() < 1e-6 * np.abs(whole).max()


def test_components_beyond_the_rank_are_flat_and_whitening_leaves_them_so() -> None:
    for shape in ((80, 12), (10, 12)):
        x = np.random.default_rng(0).normal(size=(shape[0], 3)) @ np.eye(3, shape[1])
        plain, white = (pca(x, n_components=6, whiten=whiten).coords for whiten in (False, True))
        assert np.abs(plain[:, 3:]).max() < 1e-6
        assert np.abs(white[:, 3:]).max() < 1e-6
        assert np.allclose(white[:, :3].std(axis=0, ddof=1), 1.0)


def test_sign_of_a_principal_component_makes_its_largest_loading_positive() -> None:
    for seed in range(10):
        x = np.random.default_rng(seed).normal(size=(30, 8))
        components = pca(x, n_components=3).state["components"]
        largest = np.abs(components).argmax(axis=1)
        assert (components[np.arange(3), largest] > 0).all()
        assert np.allclose(pca(-x, n_components=3).coords, -pca(x, n_components=3).coords)


def test_sign_does_not_hang_on_last_digits_where_two_loadings_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(10):
        a = np.random.default_rng(seed).normal(size=60)
        x = np.stack([a, -a, np.random.default_rng(seed + 50).normal(size=60) / 9], axis=1)
        for n_rows in (3, 8192):
            monkeypatch.setattr(matrix, "BLOCK_ROWS", n_rows)
            assert pca(x, n_components=1).state["components"][0, 0] > 0.5


def test_components_more_than_the_data_has_are_clamped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = np.random.default_rng(0).normal(size=(3, 8))
    result = pca(x, n_components=5)
    assert result.coords.shape == (3, 3)
    assert result.used["n_components"] == 3
    assert caplog.messages == ["n_components=5 is too large for these rows: using 3"]


class Counted:
    """A matrix that is read piece by piece, and counts."""

    def __init__(self, x: Array) -> None:
        self._x = x
        self.shape = x.shape
        self.most, self.total = 0, 0

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, at: Any) -> Array:
        piece: Array = self._x[at]
        self.most, self.total = max(self.most, piece.size), self.total + piece.size
        return piece


@pytest.mark.parametrize(("n", "d"), [(3000, 20), (40, 3000)])
def test_pca_holds_a_block_of_the_rows_at_a_time_and_reads_them_twice(
    n: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)
    expected = pca(x).coords
    counted: Any = Counted(x)
    monkeypatch.setattr(matrix, "_BLOCK_BYTES", 4 * 6000)
    result = pca(Matrix(counted), n_components=2)
    assert counted.most <= 6000
    assert counted.total == (2 if n > d else 3) * n * d
    assert np.allclose(result.coords, expected, atol=1e-4)


def test_matrix_too_large_both_ways_is_refused_in_one_line() -> None:
    class Huge:
        shape = (20_000, 30_000)

        def __len__(self) -> int:
            return 20_000

    huge: Any = Huge()
    with pytest.raises(DataError, match=r"need a matrix of 3 GB; store fewer features: extract"):
        pca(Matrix(huge))


@pytest.mark.parametrize("chosen", [None, np.array([5, 2, 9, 2])])
@pytest.mark.parametrize("reduced", [False, True])
def test_matrix_gives_the_rows_and_columns_that_numpy_gives(
    chosen: Array | None, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x, mean, axes = (rng.normal(size=s).astype(np.float32) for s in ((12, 5), (5,), (3, 5)))
    expected = x if chosen is None else x[chosen]
    rows = Matrix(x, chosen)
    if reduced:
        expected, rows = (expected - mean) @ axes.T, rows.along(mean=mean, axes=axes)
    monkeypatch.setattr(matrix, "_BLOCK_BYTES", 4 * 7)
    assert rows.shape == expected.shape
    assert np.allclose(np.asarray(rows), expected, atol=1e-6)
    assert np.allclose(np.asarray(rows, np.float64), expected, atol=1e-6)
    by_columns = [rows.columns(columns) for columns in rows.column_blocks()]
    assert len(by_columns) > 1
    assert np.allclose(np.hstack(by_columns), expected, atol=1e-6)
    some = np.array([3, 0])
    assert np.allclose(np.asarray(rows.among(some)), expected[some], atol=1e-6)


# --------------------------------------------------------------------------- t-SNE


def test_both_backends_of_tsne_come_to_the_same_divergence() -> None:
    x, labels = digits(500)
    ours, theirs = (tsne(x, backend=backend) for backend in ("opentsne", "sklearn"))
    assert ours.used["kl_divergence"] == pytest.approx(theirs.used["kl_divergence"], rel=0.05)
    for result in (ours, theirs):
        assert share_of_own_kind(result.coords, labels) > 0.9


def test_exaggeration_draws_clusters_together() -> None:
    x, labels = digits(400)

    def tightness(coords: Array) -> float:
        within = [coords[labels == k].std(axis=0).mean() for k in range(10)]
        return float(np.mean(within) / coords.std(axis=0).mean())

    plain, drawn = (tsne(x, exaggeration=factor).coords for factor in (1.0, 4.0))
    assert tightness(drawn) < 0.85 * tightness(plain)


def test_each_parameter_of_tsne_changes_the_map_and_no_clusters_are_lost() -> None:
    x, labels = clusters(120)
    base = tsne(x, perplexity=10).coords
    for other in (
        {"perplexity": 20},
        {"early_exaggeration": 4.0},
        {"early_exaggeration_iter": 100},
        {"n_iter": 300},
        {"initialization": "spectral"},
        {"initialization": "random"},
        {"metric": "cosine"},
        {"perplexity": [5, 20]},
        {"backend": "sklearn"},
    ):
        parameters: dict[str, Any] = {"perplexity": 10, **other}
        coords = tsne(x, **parameters).coords
        assert not np.array_equal(coords, base), other
        assert share_of_own_kind(coords, labels) > 0.95, other
        assert np.array_equal(tsne(x, **parameters).coords, coords), other


def test_several_perplexities_are_kept_in_order_each_once_and_within_the_data() -> None:
    x, _ = clusters(61)
    result = tsne(x, perplexity=[50, 5, 5, 30.0], n_iter=20)
    assert result.used["perplexity"] == [5, 20]
    assert tsne(x, perplexity=[7], n_iter=20).used["perplexity"] == [7]
    alone, listed = (tsne(x, perplexity=p, n_iter=20).coords for p in (7.0, [7]))
    assert np.array_equal(alone, listed)
    with pytest.raises(ConfigError, match=r"^projection.perplexity is an empty list"):
        tsne(x, perplexity=[])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("early_exaggeration_iter", 100),
        ("exaggeration", 2.0),
        ("perplexity", [5, 10]),
        ("initialization", "spectral"),
    ],
)
def test_what_scikit_learn_does_not_have_is_refused_in_one_line(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        tsne(clusters(60)[0], backend="sklearn", **{key: value})
    assert str(caught.value) == (
        f"projection.{key}={value} is of openTSNE alone; leave it out, or take "
        "projection.backend=opentsne"
    )


def test_spectral_start_of_too_few_rows_is_refused_in_one_line() -> None:
    with pytest.raises(DataError) as caught:
        tsne(clusters(4)[0], n_components=3, initialization="spectral")
    assert str(caught.value) == (
        "projection.initialization=spectral needs at least 5 rows for 3 dimensions, and there are "
        "4; take pca"
    )


@pytest.mark.parametrize("n", [5, 6, 9])
@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize(
    "parameters", [{"initialization": "spectral"}, {"backend": "sklearn"}, {"perplexity": [1, 9]}]
)
def test_few_rows_are_placed_by_every_way_of_tsne(n: int, m: int, parameters: Any) -> None:
    coords = quietly(tsne, clusters(n)[0], n_components=m, n_iter=30, **parameters).coords
    assert coords.shape == (n, m)
    assert np.isfinite(coords).all()


@pytest.mark.parametrize("initialization", ["pca", "spectral", "random"])
def test_equal_rows_part_from_the_others_from_every_start(initialization: Any) -> None:
    x, labels = clusters(90)
    x[:45], labels[:45] = x[0], 3
    coords = quietly(tsne, x, initialization=initialization).coords
    assert np.isfinite(coords).all()
    assert share_of_own_kind(coords, labels) > 0.9


@pytest.mark.slow
def test_tsne_of_many_rows_by_all_threads_parts_clusters_and_places_rows() -> None:
    x, labels = clusters(5400)
    coords, again = (tsne(x, n_iter=50).coords for _ in range(2))
    assert share_of_own_kind(coords, labels) > 0.95
    assert np.array_equal(coords, again)
    away = coords + np.array([300.0, -40.0])
    fitted = Fitted(Matrix(x), away, {"metric": "euclidean"}, {})
    place = place_of(tsne)
    assert place is not None
    new = x[:60] + np.random.default_rng(0).normal(size=(60, 10)).astype(np.float32)
    placed = place(new, fitted)
    assert np.array_equal(place(new[:7], fitted), placed[:7])
    distances = np.linalg.norm(placed[:, None] - away[None], axis=2)
    nearest = distances.argmin(axis=1)
    assert distances.min(axis=1).max() < 0.05 * np.ptp(coords, axis=0).max()
    assert np.median(np.linalg.norm(place(x[:60], fitted) - away[:60], axis=1)) < 0.5
    assert (labels[nearest] == labels[:60]).all()


def test_placing_by_tsne_equals_that_of_opentsne() -> None:
    import openTSNE

    x, _ = digits(500)
    # By the same sums of the repulsion, which tests/test_forces.py holds to those of all pairs.
    gradient = methods._gradient_on_grid
    fit = openTSNE.TSNE(random_state=0, negative_gradient_method=gradient).fit(x[:400])
    place = place_of(tsne)
    assert place is not None
    before = np.array(fit)
    ours = place(x[400:], Fitted(Matrix(x[:400]), before, {"metric": "euclidean"}, {}))
    theirs = np.asarray(fit.transform(x[400:]))
    moved = np.asarray(fit) - before  # by openTSNE, all of it
    assert np.abs(ours + moved[0] - theirs).max() < 1e-3


# --------------------------------------------------------------------------- UMAP


def nearest_distance(coords: Array) -> float:
    """The median distance to the nearest other, in parts of the map."""
    distances = nearest_neighbors(coords, n_neighbors=1).distances[:, 0]
    return float(np.median(distances) / coords.std())


def test_min_dist_holds_points_of_the_map_apart() -> None:
    x, _ = digits(400)
    close, far = (quietly(umap, x, min_dist=value).coords for value in (0.0, 0.9))
    assert nearest_distance(far) > 1.5 * nearest_distance(close)


def test_densmap_keeps_a_dense_cluster_small() -> None:
    rng = np.random.default_rng(0)
    wide, dense = rng.normal(size=(150, 8)) * 5, rng.normal(size=(150, 8)) * 0.5 + 60
    x = np.vstack([wide, dense]).astype(np.float32)

    def ratio(coords: Array) -> float:
        return float(coords[150:].std(axis=0).mean() / coords[:150].std(axis=0).mean())

    plain, kept = (quietly(umap, x, densmap=densmap).coords for densmap in (False, True))
    assert ratio(kept) < 0.6 * ratio(plain)


def labelled(x: Array, labels: Array) -> Context:
    return Context(
        lambda k, metric: nearest_neighbors(x, n_neighbors=k, metric=metric), labels=labels
    )


def test_supervised_draws_rows_of_one_label_together() -> None:
    x = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    labels = (np.arange(200) % 2).astype(np.int32)
    context = labelled(x, labels)
    assert share_of_own_kind(quietly(umap, x, context=context).coords, labels) < 0.65
    drawn = quietly(umap, x, supervised=True, context=context).coords
    assert share_of_own_kind(drawn, labels) > 0.9
    some = np.where(np.arange(200) < 150, labels, -1).astype(np.int32)
    partly = quietly(umap, x, supervised=True, context=labelled(x, some)).coords
    assert np.isfinite(partly).all()
    assert share_of_own_kind(partly[:150], labels[:150]) > 0.8


@pytest.mark.parametrize("labels", [None, np.full(30, -1, np.int32)])
def test_supervised_without_labels_is_refused_in_one_line(labels: Array | None) -> None:
    x, _ = clusters(30)
    context = None if labels is None else labelled(x, labels)
    with pytest.raises(DataError) as caught:
        quietly(umap, x, supervised=True, context=context)
    assert str(caught.value) == (
        "projection.supervised=true needs labels, and these rows have none; leave it out"
    )


def test_each_parameter_of_umap_changes_the_map() -> None:
    x, _ = clusters(100)
    base = quietly(umap, x).coords
    for other in (
        {"n_neighbors": 8},
        {"min_dist": 0.5},
        {"spread": 2.0},
        {"n_epochs": 50},
        {"metric": "cosine"},
    ):
        parameters: dict[str, Any] = other
        coords = quietly(umap, x, **parameters).coords
        assert not np.array_equal(coords, base), other
        assert np.array_equal(quietly(umap, x, **parameters).coords, coords), other


@pytest.mark.slow
def test_placing_by_umap_is_as_good_as_that_of_umap_learn() -> None:
    from sklearn.neighbors import KNeighborsClassifier

    x, labels = digits(1500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import umap as umap_learn

        fit = umap_learn.UMAP(random_state=0).fit(x[:1000])
        theirs = fit.transform(x[1000:])
    kept = {"metric": "euclidean", "n_neighbors": 15, "a": fit._a, "b": fit._b, "random_state": 0}
    place = place_of(umap)
    assert place is not None
    ours = place(x[1000:], Fitted(Matrix(x[:1000]), fit.embedding_, kept, {}))
    vote = KNeighborsClassifier(5).fit(fit.embedding_, labels[:1000])
    scores = [vote.score(coords, labels[1000:]) for coords in (ours, theirs)]
    assert scores[1] > 0.9
    assert abs(scores[0] - scores[1]) < 0.02
    span = np.ptp(fit.embedding_, axis=0).max()
    assert np.median(np.linalg.norm(ours - theirs, axis=1)) < 0.02 * span


# --------------------------------------------------------------------------- placing


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"n_neighbors": "many"}, "its parameter n_neighbors is 'many', and a number from 2 to"),
        ({"n_neighbors": float("nan")}, "its parameter n_neighbors is nan, and a number"),
        ({"metric": "hamming"}, "its parameter metric is 'hamming', and not one of euclidean, cos"),
        ({"a": -1.0}, "its parameter a is -1.0, and a number"),
        ({"random_state": 2**40}, "its parameter random_state is 1099511627776, and a number"),
    ],
)
def test_parameters_of_a_map_that_cannot_be_are_refused_in_one_line(
    change: dict[str, Any], what: str
) -> None:
    x, _ = clusters(40)
    kept = {"metric": "euclidean", "n_neighbors": 15, "a": 1.5, "b": 0.9, "random_state": 0}
    place = place_of(umap)
    assert place is not None
    with pytest.raises(DataError) as caught:
        place(x[:5], Fitted(Matrix(x), x[:, :2], {**kept, **change}, {}))
    assert str(caught.value).startswith(what)
    assert str(caught.value).endswith("make that map again")


def test_densmap_has_no_place_for_new_rows() -> None:
    assert methods.why_not_placed(umap, {"densmap": False}) is None
    assert "densMAP" in str(methods.why_not_placed(umap, {"densmap": True}))
    assert methods.why_not_placed(pca, {"densmap": True}) is None


def test_a_method_of_ones_own_can_place_rows_too() -> None:
    def place(x: Array, fitted: Fitted) -> Array:
        return x[:, :2]

    @methods.places(place)
    def own(x: Array) -> Result:
        return Result(x[:, :2])

    assert place_of(own) is place
    assert place_of(Result) is None


def test_no_method_imports_torch() -> None:
    code = (
        "import sys, numpy as np; from embedx.methods import METHODS;"
        "[METHODS[m](np.random.default_rng(0).normal(size=(30, 4))) for m in ('pca', 'tsne')];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
