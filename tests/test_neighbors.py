"""Neighbours and the scores made of them, against brute force."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.manifold import trustworthiness as sklearn_trustworthiness
from sklearn.model_selection import StratifiedKFold

from embedx import neighbors
from embedx.neighbors import Metric, knn_accuracy, nearest_neighbors, trustworthiness

Array = np.ndarray[Any, Any]
METRICS: list[Metric] = ["euclidean", "cosine"]


def _distances(x: Array, metric: Metric) -> Array:
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


def _check_neighbors(x: Array, k: int, metric: Metric) -> None:
    indices, distances = nearest_neighbors(x, n_neighbors=k, metric=metric)
    truth = _distances(x, metric)
    assert indices.shape == distances.shape == (len(x), k)
    assert (indices.dtype, distances.dtype) == (np.int64, np.float32)
    assert (indices != np.arange(len(x))[:, None]).all()
    assert all(len(set(row)) == k for row in indices.tolist())
    scale = max(1.0, float(np.abs(x).max()))
    tolerance = 1e-6 if metric == "cosine" else 1e-6 * scale
    assert (np.diff(distances, axis=1) >= 0).all()
    # Rows equally far may come in any order: the distances decide.
    assert np.allclose(distances, np.sort(truth, axis=1)[:, :k], atol=tolerance, rtol=1e-5)
    found = np.take_along_axis(truth, indices, axis=1)
    assert np.allclose(found, distances, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "d", "k"), [(2, 1, 1), (50, 7, 5), (50, 7, 49), (300, 40, 15)])
def test_neighbours_are_those_of_brute_force(
    n: int, d: int, k: int, dtype: Any, metric: Metric
) -> None:
    x = np.random.default_rng(n).normal(size=(n, d)).astype(dtype)
    _check_neighbors(x, k, metric)


@pytest.mark.parametrize("metric", METRICS)
def test_neighbours_far_from_the_origin_are_those_of_brute_force(metric: Metric) -> None:
    x = np.random.default_rng(0).normal(size=(100, 10)) + 100
    _check_neighbors(x, 8, metric)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [1, 3, 12])
def test_row_is_never_its_own_neighbour_even_among_duplicates(k: int, metric: Metric) -> None:
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    x[5:25] = x[0]  # more equal rows than neighbours
    x[30] = x[31]
    _check_neighbors(x, k, metric)
    indices, distances = nearest_neighbors(x, n_neighbors=k, metric=metric)
    equal = {0, *range(5, 25)}
    assert all(set(indices[i].tolist()) <= equal for i in equal)
    assert indices[30, 0] == 31
    assert indices[31, 0] == 30
    assert np.allclose(distances[30, 0], 0, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(*[st.integers(-3, 3)] * 2), min_size=2, max_size=12), data=st.data())
def test_neighbours_are_right_for_any_rows_on_a_grid(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rows) - 1))
    for metric in METRICS:
        _check_neighbors(np.array(rows, np.float32), k, metric)


def test_rows_that_are_all_equal_have_neighbours_at_distance_zero() -> None:
    for metric in METRICS:
        indices, distances = nearest_neighbors(np.ones((9, 3)), n_neighbors=8, metric=metric)
        assert np.allclose(distances, 0, atol=1e-6)
        assert [sorted([i, *row]) for i, row in enumerate(indices.tolist())] == [list(range(9))] * 9


def test_distance_beyond_float32_is_finite() -> None:
    x = np.array([[0.0], [1.0], [3e38], [-3e38]], np.float32)
    _, distances = nearest_neighbors(x, n_neighbors=3)
    assert np.isfinite(distances).all()
    assert distances[0, 0] == 1


@pytest.mark.parametrize("k", [0, -1, 5, 6])
def test_number_of_neighbours_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"n_neighbors must be 1 to 4, not {k}"):
        nearest_neighbors(np.zeros((5, 2)), n_neighbors=k)


# --------------------------------------------------------------------------- trustworthiness


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "k"), [(3, 1), (7, 3), (60, 5), (60, 29), (400, 15)])
@pytest.mark.parametrize("shift", [0, 10_000])
def test_trustworthiness_equals_that_of_scikit_learn(
    n: int, k: int, shift: float, dtype: Any
) -> None:
    rng = np.random.default_rng(n)
    x = (rng.normal(size=(n, 20)) + shift).astype(dtype)
    for coords in (rng.normal(size=(n, 2)), x[:, :2] - shift, x[:, :1]):
        score, measured = trustworthiness(x, coords, n_neighbors=k)
        assert measured == n
        expected = sklearn_trustworthiness(x, coords, n_neighbors=k)
        # In float32 some distances round to the same one, and these share a rank here.
        assert score == pytest.approx(expected, abs=1e-9 if dtype is np.float64 else 1e-5)


def test_trustworthiness_does_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, coords = rng.normal(size=(101, 8)), rng.normal(size=(101, 2))
    whole = trustworthiness(x, coords, n_neighbors=7)
    for rows in (1, 10, 100):
        monkeypatch.setattr(neighbors, "_BLOCK_BYTES", rows * 8 * 101)
        assert trustworthiness(x, coords, n_neighbors=7) == whole
    assert whole[0] == pytest.approx(sklearn_trustworthiness(x, coords, n_neighbors=7), abs=1e-9)


def test_sampled_trustworthiness_is_near_the_whole_and_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 4))
    coords = x[:, :2]
    whole, _ = trustworthiness(x, coords)
    monkeypatch.setattr(neighbors, "SAMPLED_ROWS", 300)
    score, measured = trustworthiness(x, coords)
    assert measured == 300
    assert score == pytest.approx(whole, abs=0.02)
    assert score != whole
    assert trustworthiness(x, coords) == (score, 300)
    assert trustworthiness(x, coords, seed=1)[0] != score


def test_trustworthiness_of_a_sample_is_that_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    n, k, sampled = 60, 4, 25
    x, coords = rng.normal(size=(n, 5)), rng.normal(size=(n, 2))
    monkeypatch.setattr(neighbors, "SAMPLED_ROWS", sampled)
    chosen = np.random.default_rng(9).choice(n, sampled, replace=False)
    penalty = 0
    near, far = _distances(coords, "euclidean"), _distances(x, "euclidean")
    for i in chosen:
        for j in np.argsort(near[i])[:k]:
            penalty += max(0, int((far[i] < far[i, j]).sum()) + 1 - k)
    expected = 1 - penalty * 2 / (sampled * k * (2 * n - 3 * k - 1))
    assert trustworthiness(x, coords, n_neighbors=k, seed=9)[0] == pytest.approx(expected)


def test_rows_equally_far_share_a_rank() -> None:
    coords = np.random.default_rng(0).normal(size=(40, 2))
    assert trustworthiness(np.ones((40, 3)), coords, n_neighbors=5)[0] == 1.0
    # Five groups of eight equal rows: whichever of a group is near in the map, its rank is 1.
    groups = np.repeat(np.eye(5), 8, axis=0)
    score, _ = trustworthiness(groups, groups[:, :4] + coords[:, :1] * 1e-3, n_neighbors=7)
    assert score == 1.0


def test_one_huge_row_leaves_the_ranks_of_the_others() -> None:
    rng = np.random.default_rng(0)
    x, coords = rng.normal(size=(200, 6)).astype(np.float32), rng.normal(size=(200, 2))
    x[7] = 1e30
    coords[7] = 1e6  # as far in the map
    near, far = _distances(coords, "euclidean"), _distances(x, "euclidean")
    ranks = np.argsort(np.argsort(far, axis=1), axis=1)
    mapped = np.argsort(near, axis=1)[:, :5]
    beyond = np.maximum(np.take_along_axis(ranks, mapped, axis=1) + 1 - 5, 0)
    beyond[7] = 0  # every other row is equally far from it
    expected = 1 - beyond.sum() * 2 / (200 * 5 * (2 * 200 - 3 * 5 - 1))
    assert trustworthiness(x, coords, n_neighbors=5)[0] == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 5, 6])
def test_trustworthiness_of_too_many_neighbours_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"below n / 2 = 5.0, not {k}"):
        trustworthiness(np.zeros((10, 2)), np.zeros((10, 2)), n_neighbors=k)


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


@pytest.mark.parametrize(
    "labels", [[-1] * 10, [0] * 10, [0] * 6 + [1] * 4, list(range(10)), []], ids=str
)
def test_accuracy_of_fewer_than_two_classes_is_none(labels: list[int]) -> None:
    x = np.random.default_rng(0).normal(size=(len(labels), 2))
    assert knn_accuracy(x, np.array(labels, np.int32)) is None


def test_two_smallest_classes_that_count_give_an_accuracy() -> None:
    x = np.arange(10.0)[:, None]
    labels = np.array([0] * 5 + [1] * 5)
    assert knn_accuracy(x, labels, n_neighbors=3) == pytest.approx(
        _voted(x, labels, k=3, n_splits=5, seed=0)
    )
    assert knn_accuracy(x, labels, n_neighbors=100) == pytest.approx(0.5)  # everyone votes


def test_large_numbers_as_labels_cost_no_memory() -> None:
    x = np.repeat(np.arange(2.0), 6)[:, None]
    assert knn_accuracy(x, np.repeat(np.array([2**31 - 1, 7], np.int32), 6)) == 1.0
