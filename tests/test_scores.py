"""Measures of maps and embeddings, against brute force, scikit-learn and formulas written out."""

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import trustworthiness
from sklearn.metrics import silhouette_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from embedx import scores
from embedx.matrix import Matrix, stratified
from embedx.neighbors import Graph, Metric, nearest_neighbors
from embedx.scores import (
    cka,
    cka_matrix,
    embedding_quality,
    knn_accuracy,
    linear_probe,
    map_quality,
)

Array = np.ndarray[Any, Any]
METRICS: list[Metric] = ["euclidean", "cosine"]


def _distances(x: Array, metric: Metric = "euclidean") -> Array:
    """Shape (n, n), each by its definition in double precision; a row is far from itself."""
    x = x.astype(np.float64)
    if metric == "cosine":
        lengths = np.linalg.norm(x, axis=1)
        lengths[lengths == 0] = 1
        distances = 1 - (x / lengths[:, None]) @ (x / lengths[:, None]).T
    else:
        distances = np.sqrt(((x[:, None] - x[None, :]) ** 2).sum(axis=2))
    np.fill_diagonal(distances, np.inf)
    return distances


def _recalls(x: Array, coords: Array, k: int, metric: Metric = "euclidean") -> Array:
    """Each row's share of rows that are among the k nearest in both, ties taken in."""
    near, mapped = (
        d <= np.sort(d, axis=1)[:, k - 1 : k] * (1 + 1e-9) + 1e-12
        for d in (_distances(x, metric), _distances(coords))
    )
    return np.minimum((near & mapped).sum(axis=1), k) / k


def _noisy_map(n: int, d: int = 20, *, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * (5.0 / (1 + np.arange(d)))
    return x, x[:, :2] + rng.normal(size=(n, 2)) * 0.3


# --------------------------------------------------------------------------- maps


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "k"), [(3, 1), (7, 3), (60, 15), (400, 15)])
@pytest.mark.parametrize("shift", [0, 100])
def test_trustworthiness_and_continuity_equal_those_of_scikit_learn(
    n: int, k: int, shift: float, dtype: Any, metric: Metric
) -> None:
    x, coords = _noisy_map(n)
    x = (x + shift).astype(dtype)
    for map_ in (coords, coords[:, :1], np.hstack([coords, coords[:, ::-1] ** 2])):
        found = map_quality(x, map_, metric=metric).scores
        assert (found["trustworthiness_k"], found["scored_rows"]) == (k, n)
        expected = trustworthiness(x.astype(float), map_, n_neighbors=k, metric=metric)
        assert found["trustworthiness"] == pytest.approx(expected, abs=1e-9)
        if metric == "euclidean":
            expected = trustworthiness(map_, x.astype(float), n_neighbors=k)
            assert found["continuity"] == pytest.approx(expected, abs=1e-9)
    assert found["quality_metric"] == metric


def test_continuity_with_cosine_counts_ranks_in_the_map_of_neighbours_in_the_data() -> None:
    x, coords = _noisy_map(50)
    near = np.argsort(_distances(x, "cosine"), axis=1)[:, :15]
    ranks = np.argsort(np.argsort(_distances(coords), axis=1), axis=1) + 1
    beyond = np.maximum(np.take_along_axis(ranks, near, axis=1) - 15, 0).sum()
    expected = 1 - beyond * 2 / (50 * 15 * (2 * 50 - 3 * 15 - 1))
    assert 0.5 < expected < 0.99
    assert map_quality(x, coords, metric="cosine").scores["continuity"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", METRICS)
def test_recalls_are_those_of_brute_force_and_each_row_has_its_own(metric: Metric) -> None:
    x, coords = _noisy_map(120)
    quality = map_quality(x, coords, metric=metric)
    for k in (5, 15, 50):
        expected = _recalls(x, coords, k, metric)
        assert 0.1 < expected.mean() < 0.95
        assert quality.scores[f"knn_recall_{k}"] == pytest.approx(expected.mean())
    assert quality.neighborhood.dtype == np.float32
    assert np.allclose(quality.neighborhood, _recalls(x, coords, 15, metric))
    assert quality.neighborhood.std() > 0.01


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(3, 30), metric=st.sampled_from(METRICS))
def test_rows_equally_far_are_equally_near(data: st.DataObject, n: int, metric: Metric) -> None:
    """On a grid many distances are equal; a row as far as the k-th is among the k nearest."""
    grid = st.lists(st.tuples(*[st.integers(-2, 2)] * 2), min_size=n, max_size=n)
    x = np.array(data.draw(grid), np.float32)
    coords = x.copy() if data.draw(st.booleans()) else np.array(data.draw(grid), np.float32)
    quality = map_quality(x, coords, metric=metric)
    k = min(15, (n - 1) // 2)
    # Of a crowd of ties in both, the lists show a part: never more than there are.
    assert (quality.neighborhood <= _recalls(x, coords, k, metric) + 1e-6).all()
    if metric == "euclidean" and (coords == x).all():
        assert (quality.neighborhood == 1).all()
        assert quality.scores["trustworthiness"] == quality.scores["continuity"] == 1


def test_duplicates_that_land_together_count_as_kept_whichever_of_them_is_listed() -> None:
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(4, 6)), 30, axis=0)
    apart = x[:, :2] + rng.normal(size=(120, 2)) * 1e-6  # near in an order of their own
    for data, map_ in ((x, x[:, :2]), (x, apart), (np.hstack([apart, x]), x[:, :2])):
        quality = map_quality(data, map_)
        assert (quality.neighborhood == 1).all()
        assert quality.scores["knn_recall_15"] == quality.scores["knn_recall_5"] == 1
    assert map_quality(x, apart).scores["trustworthiness"] == 1


@pytest.mark.parametrize("metric", METRICS)
def test_a_graph_gives_the_scores_that_are_computed_without_one(metric: Metric) -> None:
    x, coords = _noisy_map(150)
    expected = map_quality(x, coords, metric=metric)
    for k in (50, 51, 100):
        graph = nearest_neighbors(x, n_neighbors=k, metric=metric)
        got = map_quality(x, coords, metric=metric, graph=graph)
        assert got.scores == expected.scores
        assert np.array_equal(got.neighborhood, expected.neighborhood)


def test_rows_read_from_a_file_give_the_scores_of_those_in_memory() -> None:
    x, coords = _noisy_map(90)
    whole = np.random.default_rng(0).normal(size=(100, 20)).astype(np.float32)
    chosen = np.delete(np.arange(100), np.arange(0, 100, 10))
    whole[chosen] = x
    got, expected = map_quality(Matrix(whole, chosen), coords), map_quality(whole[chosen], coords)
    assert got.scores == expected.scores
    assert np.array_equal(got.neighborhood, expected.neighborhood)


def test_a_graph_that_does_not_fit_is_refused() -> None:
    x, coords = _noisy_map(100)
    graph = nearest_neighbors(x, n_neighbors=50)
    with pytest.raises(ValueError, match="graph must be of metric cosine, not euclidean"):
        map_quality(x, coords, metric="cosine", graph=graph)
    with pytest.raises(
        ValueError, match=r"50 neighbours or more of each of 100 rows, not \(100, 9"
    ):
        map_quality(x, coords, graph=graph.first(9))
    with pytest.raises(
        ValueError, match=r"coords must be \(100, m\), row-aligned with x, not \(99"
    ):
        map_quality(x, coords[1:], graph=graph)


def test_scores_do_not_depend_on_blocks_or_on_how_nearer_rows_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, coords = _noisy_map(140)
    expected = map_quality(x, coords)
    for block, tile, most_sorted in ((2**23, (256, 2**14), 0), (1, (7, 11), 3), (500, (64, 9), 9)):
        monkeypatch.setattr(scores, "_BLOCK", block)
        monkeypatch.setattr(scores, "_TILE", tile)
        monkeypatch.setattr(scores, "_SORTED", most_sorted)
        got = map_quality(x, coords)
        assert got.scores == pytest.approx(expected.scores)
        assert np.array_equal(got.neighborhood, expected.neighborhood)


@pytest.mark.parametrize("metric", METRICS)
def test_single_precision_gives_nearly_the_same(
    metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, coords = _noisy_map(300)
    x[:, :10] += 50  # far from the origin
    expected = map_quality(x, coords, metric=metric).scores
    monkeypatch.setattr(scores, "_DOUBLE_PRODUCTS", 0)
    got = map_quality(x, coords, metric=metric).scores
    for name in ("trustworthiness", "continuity"):
        assert got[name] == pytest.approx(expected[name], abs=1e-5)


@pytest.mark.parametrize("metric", METRICS)
def test_a_sample_of_rows_is_ranked_among_all(
    metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, coords = _noisy_map(160)
    monkeypatch.setattr(scores, "SAMPLED_ROWS", 40)
    quality = map_quality(x, coords, metric=metric, seed=3)
    assert quality.scores["scored_rows"] == 40
    chosen = np.sort(np.random.default_rng(3).choice(160, 40, replace=False))
    near, mapped = _distances(x, metric), _distances(coords)
    k = 15
    for name, listed, ranked in (("trustworthiness", mapped, near), ("continuity", near, mapped)):
        ranks = np.argsort(np.argsort(ranked, axis=1), axis=1) + 1
        nearest = np.argsort(listed, axis=1)[:, :k]
        beyond = np.maximum(np.take_along_axis(ranks, nearest, axis=1) - k, 0)[chosen].sum()
        expected = 1 - beyond * 2 / (40 * k * (2 * 160 - 3 * k - 1))
        assert quality.scores[name] == pytest.approx(expected)
    recalls = {k: _recalls(x, coords, k, metric) for k in (5, 15, 50)}
    for k, expected in recalls.items():
        assert quality.scores[f"knn_recall_{k}"] == pytest.approx(expected[chosen].mean())
    assert np.allclose(quality.neighborhood, recalls[15])  # of all rows, of few as these
    assert map_quality(x, coords, metric=metric, seed=3).scores == quality.scores
    assert map_quality(x, coords, metric=metric, seed=4).scores != quality.scores
    monkeypatch.setattr(scores, "WHOLE_ROWS", 100)
    some = map_quality(x, coords, metric=metric, seed=3)
    assert some.scores == quality.scores
    assert np.array_equal(np.flatnonzero(np.isfinite(some.neighborhood)), chosen)
    assert np.allclose(some.neighborhood[chosen], recalls[15][chosen])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("crowd", [10_000, 55])
@pytest.mark.parametrize("k", [50, 60])
def test_an_approximate_graph_serves_only_the_rows_that_are_not_scored(
    k: int, crowd: int, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, coords = _noisy_map(160)
    chosen = np.random.default_rng(0).choice(160, 40, replace=False)
    x[np.setdiff1d(np.arange(160), chosen)[3]] = 0
    monkeypatch.setattr(scores, "SAMPLED_ROWS", 40)
    monkeypatch.setattr(scores, "_CROWD", crowd)
    exact = map_quality(x, coords, metric=metric)
    whole = nearest_neighbors(x, n_neighbors=k + 20, metric=metric)
    missed = np.r_[0:3, 10 : k + 7]  # seven of the near ones are not in the graph
    graph = Graph(whole.indices[:, missed], whole.distances[:, missed], metric, False, 0.9)
    got = map_quality(x, coords, metric=metric, graph=graph)
    assert got.scores == pytest.approx(exact.scores)
    same = np.isclose(got.neighborhood, exact.neighborhood)
    assert same[chosen].all()
    assert not same.all()


def test_rows_are_fewer_where_they_would_cost_more_than_half_a_minute() -> None:
    for n, d, rows in (
        (9_000, 64, 9_000),
        (100_000, 512, 10_000),
        (1_000_000, 512, 1_073),
        (1_000_000, 4096, 256),
        (100, 10**6, 100),
    ):
        assert scores._affordable_rows(n, d) == rows


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("pairs", [100_000, 700])
def test_distances_are_compared_by_rank_and_at_the_best_scale(
    metric: Metric, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "SAMPLED_PAIRS", pairs)
    x, coords = _noisy_map(60)
    found = map_quality(x, coords, metric=metric).scores
    first, second = np.triu_indices(60, 1)
    a, b = _distances(x, metric)[first, second], _distances(coords)[first, second]
    # The stress of the map at every one of many scales, by Kruskal's formula.
    stresses = [
        np.sqrt(((a - scale * b) ** 2).sum() / (a**2).sum())
        for scale in np.linspace(0, 3, 20_001) * a.mean() / b.mean()
    ]
    ranks_a, ranks_b = np.argsort(np.argsort(a)), np.argsort(np.argsort(b))
    expected = 1 - 6 * ((ranks_a - ranks_b) ** 2).sum() / (len(a) * (len(a) ** 2 - 1.0))
    assert 0.2 < expected < 0.98
    exact = {"abs": 1e-6 if pairs > len(a) else 0.06}
    assert found["stress"] == pytest.approx(min(stresses), **exact)
    assert found["distance_correlation"] == pytest.approx(expected, **exact)
    assert map_quality(x, coords * 1000, metric=metric).scores["stress"] == pytest.approx(
        found["stress"]
    )
    assert map_quality(x, x).scores["stress"] == pytest.approx(0, abs=1e-6)


def test_equal_distances_share_their_rank() -> None:
    x = np.array([[0.0], [1.0], [2.0], [4.0]])
    coords = np.array([[0.0], [2.0], [1.0], [3.0]])
    a, b = [1, 2, 4, 1, 3, 2], [2, 1, 3, 1, 1, 2]  # of pairs 01 02 03 12 13 23
    ranks_a, ranks_b = [1.5, 3.5, 6, 1.5, 5, 3.5], [4.5, 2, 6, 2, 2, 4.5]
    for values, ranks in ((a, ranks_a), (b, ranks_b)):
        assert scores._ranks(np.array(values)).tolist() == [rank - 1 for rank in ranks]
    expected = float(np.corrcoef(ranks_a, ranks_b)[0, 1])
    assert map_quality(x, coords).scores["distance_correlation"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 11])
def test_few_rows_have_the_scores_that_are_defined(n: int, metric: Metric) -> None:
    x, coords = _noisy_map(n)
    quality = map_quality(x, coords, metric=metric)
    if n < 3:
        assert quality.scores == {"scored_rows": 0, "quality_metric": metric}
        assert np.isnan(quality.neighborhood).all()
        return
    names = {"trustworthiness", "continuity", "trustworthiness_k", "stress", "scored_rows"}
    names |= {"quality_metric", "distance_correlation"} | ({"knn_recall_5"} if n > 10 else set())
    assert set(quality.scores) == names
    assert quality.scores["trustworthiness_k"] == (n - 1) // 2
    assert np.isfinite(quality.neighborhood).all()


@pytest.mark.parametrize("metric", METRICS)
def test_equal_rows_have_no_score_of_distances(metric: Metric) -> None:
    x, coords = _noisy_map(40)
    for data, map_ in ((np.ones((40, 3)), coords), (x, np.ones((40, 2)))):
        quality = map_quality(data, map_, metric=metric)
        assert not {"stress", "distance_correlation"} & set(quality.scores)
        # Everything is as near as everything else: no neighbourhood is broken.
        assert (quality.neighborhood == 1).all()
    assert map_quality(np.ones((40, 3)), coords, metric=metric).scores["trustworthiness"] == 1
    assert map_quality(x, np.ones((40, 2)), metric=metric).scores["continuity"] == 1


def test_one_huge_row_leaves_the_ranks_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    x, coords = _noisy_map(200)
    x = x.astype(np.float32)
    others = map_quality(np.delete(x, 7, axis=0), np.delete(coords, 7, axis=0))
    x[7], coords[7] = 1e30, 1e6
    for most in (scores._DOUBLE_PRODUCTS, 0):
        monkeypatch.setattr(scores, "_DOUBLE_PRODUCTS", most)
        quality = map_quality(x, coords)
        assert np.array_equal(np.delete(quality.neighborhood, 7), others.neighborhood)
        for name in ("trustworthiness", "continuity"):
            assert quality.scores[name] == pytest.approx(others.scores[name], abs=0.005)
        assert np.isfinite(quality.scores["stress"])


def test_a_row_of_zeros_has_no_direction_that_it_could_keep() -> None:
    x, coords = _noisy_map(60)
    x[:20] = 0  # the distance 1 to all
    quality = map_quality(x, coords, metric="cosine")
    assert (quality.neighborhood[:20] == 1).all()
    expected = _recalls(x, coords, 15, "cosine")
    assert np.allclose(quality.neighborhood, expected)
    near, mapped = _distances(x, "cosine"), np.argsort(_distances(coords), axis=1)[:, :15]
    nearer = near[:, None, :] < np.take_along_axis(near, mapped, axis=1)[:, :, None] - 1e-12
    beyond = np.maximum(nearer.sum(axis=2) + 1 - 15, 0).sum()
    score = 1 - beyond * 2 / (60 * 15 * (2 * 60 - 3 * 15 - 1))
    assert quality.scores["trustworthiness"] == pytest.approx(score)


# --------------------------------------------------------------------------- accuracy


def _voted(x: Array, labels: Array, *, k: int, n_splits: int, seed: int) -> float:
    """The vote of the k nearest rows of the other folds, in plain loops."""
    accuracies = []
    folds = StratifiedKFold(n_splits, shuffle=True, random_state=seed)
    for train, test in folds.split(x, labels):
        right = 0
        for i in test:
            nearest = sorted(train, key=lambda j, i=i: float(((x[i] - x[j]) ** 2).sum()))[:k]
            votes = Counter(labels[nearest].tolist())
            most = max(votes.values())
            right += min(label for label, n in votes.items() if n == most) == labels[i]
        accuracies.append(right / len(test))
    return float(np.mean(accuracies))


@pytest.mark.parametrize(("k", "n_splits", "seed"), [(5, 5, 0), (1, 3, 4), (4, 2, 1)])
def test_accuracy_equals_a_vote_counted_by_hand(k: int, n_splits: int, seed: int) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    x = rng.normal(size=(90, 4)) + labels[:, None]  # classes that overlap
    expected = _voted(x, labels, k=k, n_splits=n_splits, seed=seed)
    assert 0.4 < expected < 0.95
    got = knn_accuracy(x, labels, n_neighbors=k, n_splits=n_splits, seed=seed)
    assert got == pytest.approx(expected)


def test_rows_without_a_label_and_classes_too_small_for_the_folds_are_left_out() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    labels = np.array([0] * 20 + [1] * 20 + [2] * 4 + [-1] * 16)
    x[:20] += 1
    expected = _voted(x[:40], labels[:40], k=5, n_splits=5, seed=0)
    assert knn_accuracy(x, labels) == pytest.approx(expected)
    found = embedding_quality(x, labels)
    assert found["knn_accuracy"] == pytest.approx(expected)
    assert found["knn_accuracy_rows"] == found["linear_probe_rows"] == 40
    assert found["silhouette_rows"] == 44


@pytest.mark.parametrize(
    "labels", [[-1] * 10, [0] * 10, [0] * 6 + [1] * 4, list(range(10)), []], ids=str
)
def test_accuracy_of_fewer_than_two_classes_is_none(labels: list[int]) -> None:
    x = np.random.default_rng(0).normal(size=(len(labels), 2))
    assert knn_accuracy(x, np.array(labels, np.int32)) is None
    found = embedding_quality(x, np.array(labels, np.int32))
    assert found["knn_accuracy"] is found["linear_probe"] is None


def test_two_smallest_classes_that_count_give_an_accuracy() -> None:
    x = np.arange(10.0)[:, None] ** 1.5  # no two as far from a third
    labels = np.array([0] * 5 + [1] * 5)
    assert knn_accuracy(x, labels, n_neighbors=3) == pytest.approx(
        _voted(x, labels, k=3, n_splits=5, seed=0)
    )
    assert knn_accuracy(x, labels, n_neighbors=100) == pytest.approx(0.5)  # everyone votes


def test_large_numbers_as_labels_cost_no_memory() -> None:
    x = np.repeat(np.arange(2.0), 6)[:, None]
    labels = np.repeat(np.array([2**31 - 1, 7], np.int32), 6)
    assert knn_accuracy(x, labels) == 1.0
    assert linear_probe(x, labels)["linear_probe"] == 1.0


def test_a_sample_is_voted_on_by_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 2
    # Pairs of equal rows: where all others vote, a row's double is there in four cases of five.
    x = np.repeat(rng.normal(size=(200, 30)), 2, axis=0)
    labels = np.repeat(rng.integers(0, 2, 200), 2)
    monkeypatch.setattr(scores, "SAMPLED_ROWS", 100)
    found = embedding_quality(x, labels)
    assert found["knn_accuracy_rows"] == 100
    assert knn_accuracy(x, labels, n_neighbors=1) == pytest.approx(0.9, abs=0.07)
    assert knn_accuracy(x, labels, n_neighbors=1, seed=1) != knn_accuracy(x, labels, n_neighbors=1)


# --------------------------------------------------------------------------- the probe


def test_the_probe_is_a_logistic_regression_on_standardized_features() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 3
    x = (rng.normal(size=(300, 8)) + labels[:, None] * 0.7) * 10.0 ** np.arange(8)
    folds = StratifiedKFold(5, shuffle=True, random_state=2)
    model = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-3))
    expected = cross_val_score(model, x, labels, cv=folds).mean()
    assert 0.6 < expected < 0.95
    assert linear_probe(x, labels, seed=2) == {
        "linear_probe": pytest.approx(expected, abs=0.005),
        "linear_probe_rows": 300,
        "linear_probe_converged": 1,
    }


def test_a_probe_that_was_ended_early_says_so_and_warns_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(200, 50)) * np.arange(50), np.arange(200) % 4
    assert linear_probe(x, labels)["linear_probe_converged"] == 1
    monkeypatch.setattr(scores, "_PROBE_PRODUCTS", 0)
    monkeypatch.setattr(scores, "_LEAST_ITERATIONS", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert linear_probe(x, labels)["linear_probe_converged"] == 0


def test_a_stratified_sample_has_of_each_label_its_share_and_a_row_at_least() -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([-1, 1, 2], [7000, 2500, 500]))
    for seed in (0, 1):
        chosen = stratified(len(labels), 1000, labels, seed=seed)
        assert (np.diff(chosen) > 0).all()
        assert Counter(labels[chosen].tolist()) == {-1: 700, 1: 250, 2: 50}
    assert not np.array_equal(stratified(len(labels), 1000, labels, seed=0), chosen)
    assert stratified(len(labels), 10_000, labels, seed=0).tolist() == list(range(10_000))
    rare = rng.permutation(np.repeat([0, 1, 2, 3], [997, 1, 1, 1]))
    assert set(rare[stratified(1000, 10, rare, seed=0)].tolist()) == {0, 1, 2, 3}
    assert len(set(stratified(1000, 10, None, seed=0).tolist())) == 10
    assert len(stratified(99, 7, np.arange(99), seed=0)) == 7  # more labels than rows


# --------------------------------------------------------------------------- the space


def test_silhouette_equals_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 3
    x = rng.normal(size=(600, 4)) + labels[:, None] * 2
    found = embedding_quality(x, np.where(np.arange(600) < 60, -1, labels))
    assert found["silhouette"] == pytest.approx(silhouette_score(x[60:], labels[60:]))
    monkeypatch.setattr(scores, "SAMPLED_ROWS", 300)
    sampled = embedding_quality(x, labels)
    assert sampled["silhouette_rows"] == 300
    assert sampled["silhouette"] == pytest.approx(silhouette_score(x, labels), abs=0.05)


@pytest.mark.parametrize(("n", "d"), [(200, 12), (12, 200), (30, 30)])
def test_effective_rank_is_that_of_the_singular_values(n: int, d: int) -> None:
    x = np.random.default_rng(0).normal(size=(n, d)) * (1.0 / (1 + np.arange(d))) + 100
    singular = np.linalg.svd(x - x.mean(axis=0), compute_uv=False)
    shares = singular / singular.sum()
    shares = shares[shares > 1e-12]
    expected = np.exp(-(shares * np.log(shares)).sum())
    assert 2 < expected < min(n, d)
    assert embedding_quality(x, None)["effective_rank"] == pytest.approx(expected, rel=1e-6)


def test_effective_rank_counts_equal_directions_and_no_offset() -> None:
    corners = np.vstack([np.eye(5), -np.eye(5)]) + 7  # 5 singular values, all equal
    assert embedding_quality(corners, None)["effective_rank"] == pytest.approx(5)
    line = np.arange(50.0)[:, None] * np.ones(8)
    assert embedding_quality(line, None)["effective_rank"] == pytest.approx(1)


@pytest.mark.parametrize("block", [2**23, 30])
def test_anisotropy_is_the_mean_cosine_of_all_pairs(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "_BLOCK", block)
    x = np.random.default_rng(0).normal(size=(40, 6)) + 0.8
    similarities = cosine_similarity(x)[np.triu_indices(40, 1)]
    assert 0.2 < similarities.mean() < 0.6
    with_zero = np.vstack([x, np.zeros(6)])  # which has no direction
    for rows in (x, with_zero, x * 1e200):
        found = embedding_quality(rows, None)["anisotropy"]
        assert found == pytest.approx(similarities.mean())


@pytest.mark.parametrize("labels", [None, "one", "each"])
@pytest.mark.parametrize(
    "x",
    [
        np.ones((1, 3)),
        np.ones((9, 3)),
        np.zeros((9, 3)),
        np.zeros((0, 3)),
        np.full((6, 2), 0.1, np.float32),
        np.arange(2.0)[:, None],
        np.arange(3.0)[:, None],
    ],
    ids=lambda x: f"{x.shape} {x[:1, 0]}",
)
def test_what_is_not_defined_is_none(x: Array, labels: str | None) -> None:
    given = None if labels is None else np.zeros(len(x), int) if labels == "one" else None
    if labels == "each":
        given = np.arange(len(x))
    found = embedding_quality(x, given)
    for name in ("knn_accuracy", "linear_probe", "silhouette"):
        assert found[name] is None, name
    is_spread = len(x) > 1 and len(np.unique(x)) > 1
    assert (found["effective_rank"] is not None) == is_spread
    n_directions = int((np.abs(x).max(axis=1, initial=0) > 0).sum())
    assert (found["anisotropy"] is not None) == (n_directions > 1)


def test_a_feature_that_is_constant_and_one_that_is_huge_break_nothing() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(100) % 2
    x = (rng.normal(size=(100, 5)) + labels[:, None] * 3).astype(np.float32)
    x[:, 3] = 1.0
    plain = embedding_quality(x, labels)
    assert plain["linear_probe"] > 0.9
    x[0, 4] = 3e38
    found = embedding_quality(x, labels)
    assert all(value is None or np.isfinite(value) for value in found.values())
    assert found["linear_probe"] > 0.9


# --------------------------------------------------------------------------- CKA


def _hsic_cka(x: Array, y: Array) -> float:
    """By its definition: of the two n x n kernels, centred on both sides."""
    n = len(x)
    center = np.eye(n) - 1 / n
    k, m = center @ x @ x.T @ center, center @ y @ y.T @ center
    return float(np.trace(k @ m) / np.sqrt(np.trace(k @ k) * np.trace(m @ m)))


@pytest.mark.parametrize(("n", "d", "e"), [(60, 5, 9), (9, 40, 50), (30, 3, 200), (5000, 2, 3)])
def test_cka_equals_its_definition_by_kernels(n: int, d: int, e: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, d)) + 3
    y = np.tanh(x @ rng.normal(size=(d, e))) + rng.normal(size=(n, e)) * 0.5 - 9
    expected = _hsic_cka(x, y) if n < 5000 else None
    got = cka(x, y)
    if expected is None:
        x, y = x - x.mean(axis=0), y - y.mean(axis=0)
        norms = [np.linalg.norm(a.T @ b) for a, b in ((x, y), (x, x), (y, y))]
        expected = norms[0] ** 2 / (norms[1] * norms[2])
    assert 0.05 < expected < 0.99
    assert got == pytest.approx(expected)
    assert cka(y, x) == pytest.approx(expected)


def test_cka_does_not_see_rotation_shift_and_scale_but_noise() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 6))
    turn, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    assert cka(x, 1e-20 * (x @ turn) + 4e-20) == pytest.approx(1)
    assert cka(x, x * 1e30) == pytest.approx(1)
    assert cka(x, x * [1, 1, 1, 9, 9, 9]) < 0.9
    assert cka(x, rng.normal(size=(500, 6))) < 0.1


def test_rows_that_failed_in_either_are_left_out_of_cka() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4))
    y = x @ rng.normal(size=(4, 3)) + rng.normal(size=(50, 3))
    expected = cka(x[2:48], y[2:48])
    x[:2], y[48:] = np.nan, np.inf
    assert cka(x, y) == pytest.approx(expected)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_cka_of_too_few_or_equal_rows_is_not_a_number(rows: int) -> None:
    x = np.random.default_rng(0).normal(size=(30, 3))
    y = x.copy()
    y[rows:] = np.nan
    assert np.isnan(cka(x, y)) == (rows < 2)
    assert np.isnan(cka(x, np.full((30, 3), 0.1)))
    with pytest.raises(ValueError, match=r"the same number of rows, not \[30, 29\]"):
        cka(x, x[1:])


def test_the_matrix_holds_the_cka_of_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(80, 5))
    xs = [base, np.tanh(base), rng.normal(size=(80, 7))]
    ys = [base[:, :3], np.maximum(base, 0)]
    within, between = cka_matrix(xs), cka_matrix(xs, ys)
    assert within == pytest.approx(np.array([[cka(a, b) for b in xs] for a in xs]))
    assert between == pytest.approx(np.array([[cka(a, b) for b in ys] for a in xs]))
    assert len(set(between.round(6).ravel().tolist())) == 6
    monkeypatch.setattr(scores, "WHOLE_VECTORS", 60)
    sampled = cka_matrix(xs)
    assert (sampled != within)[~np.eye(3, dtype=bool)].all()
    assert np.allclose(sampled, within, atol=0.2)


@pytest.mark.parametrize("m", [2, 4, 50])
def test_a_map_that_is_the_data_keeps_every_neighbour_in_any_number_of_dimensions(m: int) -> None:
    x = np.random.default_rng(m).normal(size=(200, m)).astype(np.float32)
    quality = map_quality(x, x.copy())
    for k in (5, 15, 50):
        assert quality.scores[f"knn_recall_{k}"] == 1.0
    assert (quality.neighborhood == 1).all()


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_rows_are_searched_part_by_part_with_one_result(
    metric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x, coords = rng.normal(size=(400, 6)).astype(np.float32), rng.normal(size=(400, 2))
    x[200:] = x[:200]  # each row twice, the other in another part
    monkeypatch.setattr(scores, "WHOLE_ROWS", 10)
    whole = map_quality(x, coords, metric=metric)
    monkeypatch.setattr(scores, "_PART_BYTES", 70 * 4 * 6)
    parts = map_quality(x, coords, metric=metric)
    assert parts.scores == whole.scores
    assert np.array_equal(parts.neighborhood, whole.neighborhood)
    assert 0 < whole.scores["trustworthiness"] < 1
