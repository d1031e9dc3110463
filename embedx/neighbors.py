"""Exact nearest neighbours, and the scores that are made of them."""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Metric = Literal["euclidean", "cosine"]

SAMPLED_ROWS = 10_000
_BLOCK_BYTES = 2**27


def nearest_neighbors(
    x: Array, *, n_neighbors: int, metric: Metric = "euclidean"
) -> tuple[Array, Array]:
    """The k nearest other rows of each row, exactly, by blocked brute force.

    Args:
        x: Shape ``(n, d)``, finite.
        n_neighbors: k, less than n.
        metric: ``euclidean`` or ``cosine`` (1 - cosine similarity).

    Returns:
        Indices ``(n, k)`` int64 and distances ``(n, k)`` float32, nearest first. A row is never
        its own neighbour, also where other rows equal it.

    Raises:
        ValueError: ``n_neighbors`` is not between 1 and n - 1.
    """
    from sklearn.neighbors import NearestNeighbors

    if not 1 <= n_neighbors < len(x):
        raise ValueError(f"n_neighbors must be 1 to {len(x) - 1}, not {n_neighbors}")
    index = NearestNeighbors(n_neighbors=n_neighbors, metric=metric, algorithm="brute").fit(x)
    distances, indices = index.kneighbors()  # without a query, a row is left out of its own list
    return indices, np.minimum(distances, np.finfo(np.float32).max).astype(np.float32)


def trustworthiness(
    x: Array, coords: Array, *, n_neighbors: int = 15, seed: int = 0
) -> tuple[float, int]:
    """How far the neighbours in a map are neighbours in the data too, 0 to 1.

    Equal to scikit-learn's ``trustworthiness`` in blocks of bounded memory, but that rows equally
    far share a rank; above 10,000 rows it is the mean over 10,000 sampled rows, each ranked among
    all.

    Args:
        x: Data, shape ``(n, d)``.
        coords: Map, shape ``(n, m)``.
        n_neighbors: k, below n / 2.
        seed: Of the sample.

    Returns:
        The score, and how many rows it was measured on.

    Raises:
        ValueError: ``n_neighbors`` is not below n / 2.

    References:
        Venna, Kaski 2001, ICANN, LNCS 2130.
    """
    from sklearn.metrics.pairwise import euclidean_distances

    n, k = len(x), n_neighbors
    if not 1 <= k < n / 2:
        raise ValueError(f"n_neighbors must be 1 to below n / 2 = {n / 2}, not {k}")
    mapped, _ = nearest_neighbors(coords, n_neighbors=k)
    rows = np.arange(n)
    if n > SAMPLED_ROWS:
        rows = np.sort(np.random.default_rng(seed).choice(n, SAMPLED_ROWS, replace=False))
    penalty = 0
    block = max(1, _BLOCK_BYTES // (8 * n))
    for start in range(0, len(rows), block):
        chosen = rows[start : start + block]
        with np.errstate(over="ignore"):  # beyond float32 is far away, whatever it is exactly
            distances = euclidean_distances(x[chosen], x, squared=True)
        distances[np.arange(len(chosen)), chosen] = np.inf  # a row has no rank in its own list
        for neighbor in mapped[chosen].T:
            reach = distances[np.arange(len(chosen)), neighbor]
            rank = np.count_nonzero(distances < reach[:, None], axis=1) + 1
            penalty += int(np.maximum(rank - k, 0).sum())
    return 1.0 - penalty * 2.0 / (len(rows) * k * (2.0 * n - 3.0 * k - 1.0)), len(rows)


def knn_accuracy(
    x: Array, labels: Array, *, n_neighbors: int = 5, n_splits: int = 5, seed: int = 0
) -> float | None:
    """Accuracy of a k-nearest-neighbour vote, cross-validated over stratified folds.

    Args:
        x: Shape ``(n, d)``, finite.
        labels: Shape ``(n,)``, -1 for rows without one, which are left out.
        n_neighbors: k.
        n_splits: Folds, shuffled by ``seed``.
        seed: Of the shuffling.

    Returns:
        The mean over the folds, or None where fewer than two classes have ``n_splits`` rows.
    """
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.neighbors import KNeighborsClassifier

    classes, counts = np.unique(labels[labels >= 0], return_counts=True)
    kept = np.isin(labels, classes[counts >= n_splits])
    if len(np.unique(labels[kept])) < 2:
        return None
    folds = StratifiedKFold(n_splits, shuffle=True, random_state=seed)
    k = min(n_neighbors, int(kept.sum()) * (n_splits - 1) // n_splits)
    scores = cross_val_score(KNeighborsClassifier(k), x[kept], labels[kept], cv=folds)
    return float(scores.mean())
