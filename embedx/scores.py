"""Measures of quality: of maps against their data, and of embeddings."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from embedx.matrix import Array, Matrix, stratified
from embedx.neighbors import Graph, Metric, nearest_neighbors, nearest_rows

NEIGHBORHOOD_K = 15
RECALL_KS = (5, 15, 50)
SCORED_K = RECALL_KS[-1] + 1  # neighbours that serve every score, the next to see ties by included
SAMPLED_ROWS = 10_000
SAMPLED_PAIRS = 100_000
WHOLE_VECTORS = 20_000
WHOLE_ROWS = 20_000  # up to here the neighbours of every row cost little beside a map
_RANKED = 10**7  # distances to rank in a pass: a sixth of the time of a map of 10,000 rows
_PRODUCTS = 2**39  # multiplications of one pass over distances: half a minute on two cores
_DOUBLE_PRODUCTS = 2**36  # up to here in double precision
_BLOCK = 2**23  # numbers of a block of rows
_PART_BYTES = 2**27  # of rows as float32 that are searched at a time
_TILE = (256, 2**14)  # rows x columns of the distances held at a time
_SORTED = 2000  # so many are sorted faster than counted again and again
_CROWD = 10_000  # so many candidates for the nearest are left to a search that bears any number
_SPECTRUM_ROWS = 4096
_PROBE_PRODUCTS = 2**38  # multiplications of all iterations of a linear probe
_LEAST_ITERATIONS = 20
_PROBE_TOLERANCE = 1e-3


# --------------------------------------------------------------------------- maps


@dataclasses.dataclass(frozen=True)
class Quality:
    """How far to believe a map.

    Attributes:
        scores: What :func:`map_quality` measured, by name.
        neighborhood: Shape ``(n,)`` float32, each row's own score, 0 to 1; NaN where not measured.
    """

    scores: dict[str, float | str]
    neighborhood: Array


def map_quality(
    x: Array | Matrix,
    coords: Array,
    *,
    metric: Metric = "euclidean",
    graph: Graph | None = None,
    seed: int = 0,
) -> Quality:
    """How far neighbourhoods and distances of a map are those of the data.

    All but stress are best at 1, and scores of neighbours are measured from ``scored_rows`` rows,
    each among all n: all of them up to 3,162, then so many sampled ones that rows x n is 10^7, but
    1,000 at least, and fewer where rows x n x d would pass 2^39. Rows equally far, to within
    rounding, are equally near: they share a rank, and one as far as the k-th nearest is among the
    k nearest.

    - ``trustworthiness``: how far the k neighbours in the map are near in the data, by their ranks.
      ``trustworthiness_k`` is k: 15, less where that is not below n / 2.
    - ``continuity``: how far the same k neighbours in the data are near in the map.
    - ``knn_recall_5``, ``_15``, ``_50``: the share of the k nearest rows in the data that are among
      the k nearest in the map.
    - ``distance_correlation``: Spearman's rank correlation of the distances of 100,000 sampled
      pairs of rows (all pairs where there are fewer) in the data and in the map, -1 to 1.
    - ``stress``: Kruskal's stress-1 of those pairs, the map at its best scale: with distances
      a in the data and b in the map, ``sqrt(1 - (sum ab)^2 / (sum a^2 sum b^2))``; 0 is best.
    - ``scored_rows``, and ``quality_metric``, the metric.

    A score that is not defined is not there: all of them below 3 rows, a recall at k >= n / 2, the
    last two where all distances are equal to 0, the correlation where they are equal.

    A row's own neighbourhood score is its recall at ``trustworthiness_k``: for every row where
    ``graph`` is given or n <= 20,000, else for the scored ones.

    Args:
        x: Data, shape ``(n, d)``, finite; read in blocks.
        coords: Map, shape ``(n, m)``, finite.
        metric: Of the distances in ``x``, the one that the map was to keep; with cosine a row of
            zeros has the distance 1 to every row. Distances in the map are Euclidean.
        graph: Neighbours of the rows of ``x``, 50 or more of each (all others where n <= 51), in
            the same metric. An approximate one serves the rows that are not scored.
        seed: Of the samples. Maps of the same rows that are to be compared need the same.

    Raises:
        ValueError: ``coords`` or ``graph`` do not fit ``x``.

    References:
        Venna, Kaski 2001, ICANN, LNCS 2130 (trustworthiness, continuity); Lee, Verleysen 2009,
        Neurocomputing 72 (shared neighbours); Kruskal 1964, Psychometrika 29(1); Smelser, Miller,
        Kobourov 2024, arXiv:2408.07724 (the best scale).
    """
    n = len(x)
    _refuse_unfit(x, coords, metric, graph)
    scores: dict[str, float | str] = {}
    neighborhood = np.full(n, np.nan, np.float32)
    if n < 3:
        return Quality({"scored_rows": 0, "quality_metric": metric}, neighborhood)
    deepest = min(SCORED_K, n - 1)
    rng = np.random.default_rng(seed)
    scored = np.arange(n)
    most = min(max(1000, _RANKED // n), _affordable_rows(n, x.shape[1]))
    if most < n:
        scored = np.sort(rng.choice(n, most, replace=False))
    if graph is None and n <= WHOLE_ROWS:
        graph = nearest_neighbors(np.asarray(x), n_neighbors=deepest, metric=metric)
    tree = _MapNeighbors(coords)
    mapped = tree.of(scored, deepest)
    data, map_ = _Space.of(x, metric), _Space.of(coords, "euclidean")
    k = min(NEIGHBORHOOD_K, (n - 1) // 2)
    deepest = deepest if graph is None else min(deepest, graph.indices.shape[1])
    within = None if graph is None or graph.exact else graph.distances[scored, deepest - 1]
    nearer, candidates = data.nearer(scored, mapped.indices[:, :k], within=within)
    if graph is None:
        near = data.nearest(scored, deepest)
    elif graph.exact:
        near = _Lists(graph.indices[scored], graph.distances[scored])
    else:
        near = data.nearest_among(scored, candidates, deepest)
    scores["trustworthiness"] = _rank_score(nearer, n)
    scores["continuity"] = _rank_score(map_.nearer(scored, near.indices[:, :k])[0], n)
    scores["trustworthiness_k"] = k
    for recall_k in RECALL_KS:
        if recall_k < n / 2:
            recalls = _recalls(data, map_, scored, near, mapped, recall_k)
            scores[f"knn_recall_{recall_k}"] = float(recalls.mean())
    neighborhood[scored] = _recalls(data, map_, scored, near, mapped, k)
    rest = np.setdiff1d(np.arange(n), scored, assume_unique=True)
    if graph is not None and len(rest):
        near = _Lists(graph.indices[rest, : k + 1], graph.distances[rest, : k + 1])
        neighborhood[rest] = _recalls(data, map_, rest, near, tree.of(rest, k), k)
    scores |= _distance_scores(data, map_, rng)
    return Quality({**scores, "scored_rows": len(scored), "quality_metric": metric}, neighborhood)


def _refuse_unfit(x: Array | Matrix, coords: Array, metric: Metric, graph: Graph | None) -> None:
    if coords.ndim != 2 or len(coords) != len(x):
        raise ValueError(f"coords must be ({len(x)}, m), row-aligned with x, not {coords.shape}")
    if graph is None:
        return
    least = min(RECALL_KS[-1], len(x) - 1)
    if len(graph.indices) != len(x) or graph.indices.shape[1] < least:
        raise ValueError(
            f"graph must hold {least} neighbours or more of each of {len(x)} rows, not "
            f"{graph.indices.shape}"
        )
    if graph.metric != metric:
        raise ValueError(f"graph must be of metric {metric}, not {graph.metric}")


def _affordable_rows(n: int, d: int) -> int:
    return min(n, SAMPLED_ROWS, max(256, _PRODUCTS // (n * d)))


@dataclasses.dataclass(frozen=True)
class _Space:
    """Rows as vectors whose squared Euclidean distances rank as the distances of a metric.

    For cosine they have length 1, so that half the squared distance is 1 - cosine similarity. A
    row of zeros is at right angles to all: the last of its d + 1 numbers is 1, of others 0.
    """

    x: Array | Matrix
    metric: Metric
    center: Array

    @classmethod
    def of(cls, x: Array | Matrix, metric: Metric) -> "_Space":
        # Near the middle of the rows products lose the fewest digits; a median, for one huge row
        # would carry the mean away.
        whole = cls(x, metric, np.zeros(1))
        center = np.median(whole.vectors(slice(None, None, len(x) // 1000 + 1)), axis=0)
        if metric == "cosine":
            center[-1] = 0
        return cls(x, metric, center)

    def vectors(self, rows: Any) -> Array:
        """Shape ``(len(rows), d)``, or d + 1 for cosine, in double precision."""
        block = self.x[rows].astype(np.float64)
        if self.metric == "cosine":
            largest = np.abs(block).max(axis=1, keepdims=True)  # its square could overflow
            block /= np.where(largest > 0, largest, 1)
            length = np.linalg.norm(block, axis=1, keepdims=True)
            block = np.hstack([block / np.where(length > 0, length, 1), length == 0])
        vectors: Array = block - self.center
        return vectors

    def squared(self, rows: Array, others: Array) -> Array:
        """Squared distances of ``rows`` ``(r,)`` to ``others`` ``(r, k)``, pair by pair."""
        result = np.empty(others.shape)
        block = max(1, _BLOCK // (self.x.shape[1] * (others.shape[1] + 1)))
        for start in range(0, len(rows), block):
            part = slice(start, start + block)
            own = self.vectors(rows[part])[:, None]
            other = self.vectors(others[part].ravel()).reshape(len(own), others.shape[1], -1)
            result[part] = np.square(other - own).sum(axis=2)
            if self.metric == "cosine":
                result[part][(other * own)[:, :, -1] == 1] = 2
        return result

    def nearer(
        self, rows: Array, others: Array, *, within: Array | None = None
    ) -> tuple[Array, list[list[Array]]]:
        """In one pass over blocks of all rows, what is nearer to some rows than others are.

        Args:
            rows: Indices ``(r,)``.
            others: Indices ``(r, k)``.
            within: Distances ``(r,)`` in the metric.

        Returns:
            How many rows are nearer than each of ``others``, ``(r, k)``; and for each row, block by
            block, which may be as near as ``within``: none where they are a crowd.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # beyond single precision is far away
            return self._nearer(rows, others, within)

    def _nearer(
        self, rows: Array, others: Array, within: Array | None
    ) -> tuple[Array, list[list[Array]]]:
        n, d = self.x.shape
        is_small = len(rows) * n * d <= _DOUBLE_PRODUCTS
        dtype = np.float64 if is_small else np.float32
        # What a product rounds off, with room: whoever is as far must not count as nearer.
        slack = 16 * float(np.finfo(dtype).eps)
        block, few = min(_TILE[1], max(1, _BLOCK // d)), _TILE[0]
        own = np.empty(len(rows))
        # With u of another row as (u, |u|^2), and v as (-2v, 1), a product is |u - v|^2 - |v|^2.
        mine = np.ones((len(rows), len(self.center) + 1), dtype)
        for start in range(0, len(rows), block):
            exact = self.vectors(rows[start : start + block])
            own[start : start + block] = np.square(exact).sum(axis=1)
            mine[start : start + block, :-1] = -2 * exact
        reach = self.squared(rows, others)
        limits = (reach - slack * (own[:, None] + reach) - own[:, None]).astype(dtype)
        farthest = limits.max(axis=1)
        bounds: Array | None = None
        if within is not None:
            radius = within.astype(np.float64) * (1 + 1e-6)
            radius = 2 * radius if self.metric == "cosine" else np.square(radius)
            bounds = (radius + slack * (own + radius) - own).astype(dtype)
            if self.metric == "cosine":
                bounds[mine[:, -2] == -2] = -np.inf  # everything is as near to a row of zeros
        counts = np.zeros(others.shape, np.int64)
        found: list[list[Array]] = [[] for _ in rows]
        for start in range(0, n, block):
            exact = self.vectors(slice(start, start + block))
            vectors = np.hstack([exact, np.square(exact).sum(axis=1, keepdims=True)]).astype(dtype)
            for first in range(0, len(rows), few):
                part = slice(first, first + few)
                products = mine[part] @ vectors.T
                inside = np.flatnonzero((rows[part] >= start) & (rows[part] < start + block))
                products[inside, rows[part][inside] - start] = np.inf  # no rank in its own list
                for i, row in enumerate(products, start=first):
                    nearer = row[row < farthest[i]]
                    if len(nearer) < _SORTED:
                        nearer.sort()
                        counts[i] += np.searchsorted(nearer, limits[i])
                    else:
                        counts[i] += [np.count_nonzero(nearer < limit) for limit in limits[i]]
                    if bounds is not None and len(at := np.flatnonzero(row < bounds[i])):
                        found[i].append(start + at)
                        if sum(map(len, found[i])) > _CROWD:
                            found[i], bounds[i] = [], -np.inf
        if self.metric == "cosine":
            counts[mine[:, -2] == -2] = 0  # a row of zeros is as far from all
        return counts, found

    def nearest(self, rows: Array, k: int) -> "_Lists":
        """The k nearest others of some rows, by a search of all, part by part."""
        n, queries = len(self.x), np.asarray(self.x[rows])
        indices, distances = (
            np.empty((len(rows), 0), np.int64),
            np.empty((len(rows), 0), np.float32),
        )
        step = max(1, _PART_BYTES // (4 * self.x.shape[1]))
        for start in range(0, n, step):
            part = np.asarray(self.x[start : start + step])
            found = nearest_rows(
                queries, part, n_neighbors=min(k + 1, len(part)), metric=self.metric
            )
            indices = np.hstack([indices, found[0] + start])
            distances = np.hstack([distances, found[1]])
            order = np.argsort(distances, axis=1, kind="stable")[:, : k + 1]
            indices = np.take_along_axis(indices, order, axis=1)
            distances = np.take_along_axis(distances, order, axis=1)
        return _others(rows, indices, distances)

    def nearest_among(self, rows: Array, candidates: list[list[Array]], k: int) -> "_Lists":
        """The k nearest others of some rows, which are among the candidates of each."""
        indices, distances = np.empty((len(rows), k), np.int64), np.zeros((len(rows), k))
        lacking = []
        for i, found in enumerate(candidates):
            listed = np.concatenate([np.empty(0, np.int64), *found])
            if len(listed) < k:  # a crowd, or out of the range of single precision
                lacking.append(i)
                continue
            squares = self.squared(rows[i : i + 1], listed[None])[0]
            order = np.argsort(squares, kind="stable")[:k]
            indices[i], distances[i] = listed[order], squares[order]
        distances = distances / 2 if self.metric == "cosine" else np.sqrt(distances)
        if lacking:
            rest = self.nearest(rows[lacking], k)
            indices[lacking], distances[lacking] = rest.indices, rest.distances
        return _Lists(indices, distances)


@dataclasses.dataclass(frozen=True)
class _Lists:
    """The nearest other rows of some rows: indices and distances ``(r, k)``, nearest first."""

    indices: Array
    distances: Array


def _others(rows: Array, indices: Array, distances: Array) -> _Lists:
    """Lists ``(r, k)`` of the nearest of all rows, without the row itself: ``(r, k - 1)``."""
    is_own = indices == rows[:, None]
    is_own[~is_own.any(axis=1), -1] = True  # k rows or more are as near as it is to itself
    shape = len(indices), indices.shape[1] - 1
    return _Lists(indices[~is_own].reshape(shape), distances[~is_own].reshape(shape))


class _MapNeighbors:
    """The nearest rows in a map."""

    def __init__(self, coords: Array) -> None:
        self._coords = coords
        self._tree: Any = None
        if coords.shape[1] <= 3:
            from sklearn.neighbors import KDTree

            self._tree = KDTree(coords)

    def of(self, rows: Array, k: int) -> _Lists:
        if self._tree is not None:
            distances, indices = self._tree.query(self._coords[rows], k + 1)
            return _others(rows, indices, distances)
        if len(rows) > SAMPLED_ROWS:
            graph = nearest_neighbors(self._coords, n_neighbors=k)
            return _Lists(graph.indices[rows], graph.distances[rows])
        return _others(rows, *nearest_rows(self._coords[rows], self._coords, n_neighbors=k + 1))


def _rank_score(n_nearer: Array, n: int) -> float:
    """1 less the normalized sum of how far the ranks ``(r, k)`` lie beyond k."""
    r, k = len(n_nearer), int(n_nearer.shape[1])
    penalty = float(np.maximum(n_nearer + 1 - k, 0).sum())
    return 1.0 - penalty * 2.0 / (r * k * (2.0 * n - 3.0 * k - 1.0))


def _recalls(
    data: _Space, map_: _Space, rows: Array, near: _Lists, mapped: _Lists, k: int
) -> Array:
    """Shape ``(r,)``: the share of the k nearest rows in the data that are so in the map."""
    listed, shown = near.indices[:, :k], mapped.indices[:, :k]
    slack = 1 + 1e-9
    # Not the distances of the search, which may have been rounded to float32.
    reach = map_.squared(rows, shown).max(axis=1, keepdims=True)
    is_found = map_.squared(rows, listed) <= reach * slack
    n_found = is_found.sum(axis=1)
    # Where others are as near in the data as the k-th, any of them may stand in the list.
    tied = np.arange(len(rows))
    if near.distances.shape[1] > k:
        last, next_ = near.distances[:, k - 1], near.distances[:, k]
        tied = np.flatnonzero(next_ / (1 + 1e-5) <= last)  # a product could overflow
    if len(tied):
        mine, shown = rows[tied], shown[tied]
        radius = data.squared(mine, listed[tied]).max(axis=1, keepdims=True)
        is_listed = (shown[:, :, None] == listed[tied][:, None, :]).any(axis=2)
        also = ~is_listed & (data.squared(mine, shown) <= radius * slack)
        n_found[tied] += also.sum(axis=1)
    recalls: Array = np.minimum(n_found, k) / k
    return recalls


def _distance_scores(data: _Space, map_: _Space, rng: np.random.Generator) -> dict[str, float]:
    n = len(data.x)
    if n * (n - 1) // 2 <= SAMPLED_PAIRS:
        first, second = np.triu_indices(n, 1)
    else:
        first = rng.integers(0, n, SAMPLED_PAIRS)
        second = (first + rng.integers(1, n, SAMPLED_PAIRS)) % n
    a, b = (space.squared(first, second[:, None])[:, 0] for space in (data, map_))
    a = a / 2 if data.metric == "cosine" else np.sqrt(a)
    b = np.sqrt(b)
    if not (a.any() and b.any()):
        return {}
    a, b = a / a.max(), b / b.max()
    aligned = float((a @ b) ** 2 / ((a @ a) * (b @ b)))
    scores = {"stress": max(0.0, 1 - aligned) ** 0.5}
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    if np.ptp(ranks_a) > 0 and np.ptp(ranks_b) > 0:
        scores["distance_correlation"] = float(np.corrcoef(ranks_a, ranks_b)[0, 1])
    return scores


def _ranks(values: Array) -> Array:
    """Ranks from 0; equal values share their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return ranks


# --------------------------------------------------------------------------- embeddings


def embedding_quality(
    x: Array | Matrix, labels: Array | None, *, seed: int = 0
) -> dict[str, float | None]:
    """What embeddings hold of their labels, and how they fill their space.

    - ``knn_accuracy``: :func:`knn_accuracy` of 5 neighbours; ``knn_accuracy_rows`` were tried.
    - ``linear_probe``: :func:`linear_probe`, of ``linear_probe_rows`` rows;
      ``linear_probe_converged`` is 0 where the fit was ended before it converged.
    - ``silhouette``: the mean silhouette of the classes, -1 to 1, of ``silhouette_rows`` rows: at
      most 10,000, a stratified sample.
    - ``effective_rank``: exp of the entropy of the singular values of the centred rows, each
      divided by their sum: how many dimensions are in use, 1 to min(n - 1, d). Of
      ``effective_rank_rows`` rows: at most 20,000 sampled ones, 4,096 where d is above that.
    - ``anisotropy``: the mean cosine similarity of all pairs of rows that are not zero, exactly:
      0 where directions are spread evenly, 1 where all are one.

    Args:
        x: Shape ``(n, d)``, finite.
        labels: Shape ``(n,)``, -1 for rows without one, or None.
        seed: Of folds and samples.

    Returns:
        Each by its name; None where it is not defined.

    References:
        Alain, Bengio 2016, arXiv:1610.01644 (probes); Rousseeuw 1987, J. Comput. Appl. Math. 20;
        Roy, Vetterli 2007, EUSIPCO (effective rank); Ethayarajh 2019, EMNLP (anisotropy).
    """
    labels = np.full(len(x), -1) if labels is None else labels
    scores: dict[str, float | None] = {}
    scores["knn_accuracy"], scores["knn_accuracy_rows"] = _knn_accuracy(x, labels, seed=seed)
    scores |= linear_probe(x, labels, seed=seed)
    scores["silhouette"], scores["silhouette_rows"] = _silhouette(x, labels, seed)
    scores["effective_rank"], scores["effective_rank_rows"] = _effective_rank(x, seed)
    scores["anisotropy"] = _anisotropy(x)
    return scores


def knn_accuracy(
    x: Array, labels: Array, *, n_neighbors: int = 5, n_splits: int = 5, seed: int = 0
) -> float | None:
    """Accuracy of a k-nearest-neighbour vote, cross-validated over stratified folds.

    Above 10,000 rows so many sampled ones (fewer where rows x n x d would pass 2^39) are voted on
    by all rows of the other folds.

    Args:
        x: Shape ``(n, d)``, finite.
        labels: Shape ``(n,)``, -1 for rows without one, which are left out.
        n_neighbors: k; of classes with as many votes the smallest label wins.
        n_splits: Folds, shuffled by ``seed``.
        seed: Of the shuffling.

    Returns:
        The mean over the folds, or None where fewer than two classes have ``n_splits`` rows.
    """
    return _knn_accuracy(x, labels, n_neighbors=n_neighbors, n_splits=n_splits, seed=seed)[0]


def _knn_accuracy(
    x: Array | Matrix, labels: Array, *, n_neighbors: int = 5, n_splits: int = 5, seed: int = 0
) -> tuple[float | None, int]:
    from sklearn.model_selection import StratifiedKFold

    kept, codes = _classes(labels, least=n_splits)
    if len(kept) == 0:
        return None, 0
    n = len(kept)
    k = min(n_neighbors, n * (n_splits - 1) // n_splits)
    most = _affordable_rows(n, x.shape[1]) // n_splits
    rng = np.random.default_rng(seed)
    accuracies, tried = [], 0
    folds = StratifiedKFold(n_splits, shuffle=True, random_state=seed)
    for train, fold in folds.split(codes, codes):
        is_sampled = n > SAMPLED_ROWS and most < len(fold)
        test = rng.choice(fold, most, replace=False) if is_sampled else fold
        indices, _ = nearest_rows(x[kept[test]], x[kept[train]], n_neighbors=k)
        accuracies.append(float((_votes(codes[train][indices]) == codes[test]).mean()))
        tried += len(test)
    return float(np.mean(accuracies)), tried


def _votes(codes: Array) -> Array:
    """The code that comes most often in each row ``(r, k)``, of equals the smallest: ``(r,)``."""
    ordered = np.sort(codes, axis=1)
    counts = np.zeros(ordered.shape, np.int64)
    for column in ordered.T:
        counts += ordered == column[:, None]
    best = counts.argmax(axis=1)[:, None]  # the first of equals
    voted: Array = np.take_along_axis(ordered, best, axis=1)[:, 0]
    return voted


def _classes(labels: Array, *, least: int) -> tuple[Array, Array]:
    """Rows whose class has ``least`` rows or more, and their classes 0, 1, ...; none where one."""
    classes, counts = np.unique(labels[labels >= 0], return_counts=True)
    classes = classes[counts >= least]
    if len(classes) < 2:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    kept = np.flatnonzero(np.isin(labels, classes))
    return kept, np.searchsorted(classes, labels[kept])


def linear_probe(
    x: Array | Matrix, labels: Array, *, n_splits: int = 5, seed: int = 0
) -> dict[str, float | None]:
    """Accuracy of a logistic regression on the rows, cross-validated over stratified folds.

    Each fold's features are standardized by its training rows; the penalty is L2 with C = 1, and
    no derivative of the mean loss is above 1e-3 in the end. Above 10,000 rows (fewer where rows x
    d would pass 2^26) it is a stratified sample of so many.

    Args:
        x: Shape ``(n, d)``, finite.
        labels: Shape ``(n,)``, -1 for rows without one, which are left out.
        n_splits: Folds, shuffled by ``seed``.
        seed: Of shuffling and sample.

    Returns:
        ``linear_probe``, the mean over the folds, or None where fewer than two classes have
        ``n_splits`` rows; ``linear_probe_rows``; ``linear_probe_converged``, 1, or 0 where the
        iterations that a few minutes allow were not enough.

    References:
        Alain, Bengio 2016, arXiv:1610.01644.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.preprocessing import StandardScaler

    kept, codes = _classes(labels, least=n_splits)
    most = min(SAMPLED_ROWS, max(256, 2**26 // x.shape[1]))
    sampled = stratified(len(codes), most, codes, seed=seed)
    enough, codes = _classes(codes[sampled], least=n_splits)
    rows = kept[sampled][enough]
    if len(rows) == 0:
        return {"linear_probe": None, "linear_probe_rows": 0, "linear_probe_converged": None}
    features = x[rows].astype(np.float64)
    largest = np.abs(features).max(axis=0)
    features /= np.where(largest > 0, largest, 1)  # so that no square overflows
    n_classes = int(codes.max()) + 1
    products = len(rows) * x.shape[1] * n_classes * n_splits
    max_iter = int(np.clip(_PROBE_PRODUCTS // products, _LEAST_ITERATIONS, 1000))
    accuracies, converged = [], True
    folds = StratifiedKFold(n_splits, shuffle=True, random_state=seed)
    for train, test in folds.split(codes, codes):
        scaler = StandardScaler().fit(features[train])
        fitted = scaler.transform(features[train]).astype(np.float32)
        model = LogisticRegression(max_iter=max_iter, tol=_PROBE_TOLERANCE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said by linear_probe_converged
            model.fit(fitted, codes[train])
        converged &= int(model.n_iter_.max()) < max_iter
        predicted = model.predict(scaler.transform(features[test]).astype(np.float32))
        accuracies.append(float((predicted == codes[test]).mean()))
    return {
        "linear_probe": float(np.mean(accuracies)),
        "linear_probe_rows": len(rows),
        "linear_probe_converged": float(converged),
    }


def _scaled(x: Array) -> Array:
    """Rows in double precision whose squares do not overflow."""
    largest = float(np.abs(x).max(initial=0))
    return x.astype(np.float64) / (largest if largest > 0 else 1.0)


def _silhouette(x: Array | Matrix, labels: Array, seed: int) -> tuple[float | None, int]:
    from sklearn.metrics import silhouette_score

    kept, codes = _classes(labels, least=2)
    if len(kept) == 0:
        return None, 0
    most = min(SAMPLED_ROWS, int((_PRODUCTS / x.shape[1]) ** 0.5))
    sampled = stratified(len(codes), most, codes, seed=seed)
    enough, codes = _classes(codes[sampled], least=2)
    rows = kept[sampled][enough]
    if len(rows) == 0:
        return None, 0
    return float(silhouette_score(_scaled(x[rows]), codes)), len(rows)


def _sampled(n: int, most: int, seed: int) -> Any:
    """Which of n rows: all of them, or a sorted sample."""
    if n <= most:
        return slice(None)
    return np.sort(np.random.default_rng(seed).choice(n, most, replace=False))


def _effective_rank(x: Array | Matrix, seed: int) -> tuple[float | None, int]:
    most = _SPECTRUM_ROWS if x.shape[1] > _SPECTRUM_ROWS else WHOLE_VECTORS
    chosen = x[_sampled(len(x), min(most, held_rows(x.shape[1])), seed)]
    n = len(chosen)
    if n < 2:
        return None, n
    centered = _centered(chosen)
    is_wide = centered.shape[1] > n
    gram = centered @ centered.T if is_wide else centered.T @ centered
    # Each is known to within rounding of the largest: what is below that is no direction.
    squares = np.linalg.eigvalsh(gram)
    squares = squares[squares > squares[-1] * len(gram) * np.finfo(np.float64).eps]
    if len(squares) == 0:
        return None, n
    shares = np.sqrt(squares) / np.sqrt(squares).sum()
    return float(np.exp(-(shares * np.log(shares)).sum())), n


def _anisotropy(x: Array | Matrix) -> float | None:
    total: Array = np.zeros(x.shape[1])
    n = 0
    for start in range(0, len(x), max(1, _BLOCK // x.shape[1])):
        block = x[start : start + max(1, _BLOCK // x.shape[1])].astype(np.float64)
        largest = np.abs(block).max(axis=1)
        block = block[largest > 0] / largest[largest > 0, None]
        total += (block / np.linalg.norm(block, axis=1, keepdims=True)).sum(axis=0)
        n += len(block)
    return float((total @ total - n) / (n * (n - 1))) if n > 1 else None


def cka(x: Array | Matrix, y: Array | Matrix, *, seed: int = 0) -> float:
    """Linear centred kernel alignment of two embeddings of the same rows, 0 to 1.

    It does not change with rotation, shift and scale of either; 1 means that they are equal but for
    those. Where n is not well above the numbers of dimensions it is high for any two.

    Args:
        x: Shape ``(n, d)``.
        y: Shape ``(n, e)``, row-aligned; rows that are not finite in either are left out.
        seed: Of the sample that is taken above 20,000 rows, fewer where rows x d would pass 2^27.

    Returns:
        The alignment; NaN where fewer than 2 rows are left or those of one are all equal.

    Raises:
        ValueError: The numbers of rows differ.

    References:
        Kornblith, Norouzi, Lee, Hinton 2019, ICML, arXiv:1905.00414.
    """
    return float(cka_matrix([x], [y], seed=seed)[0, 0])


def cka_matrix(
    xs: Sequence[Array | Matrix], ys: Sequence[Array | Matrix] | None = None, *, seed: int = 0
) -> Array:
    """:func:`cka` of each of ``xs`` with each of ``ys``.

    Args:
        xs: p embeddings ``(n, d)`` of the same rows, of any d.
        ys: q embeddings of the same rows; ``xs`` where not given. Rows that are not finite in all
            of both are left out.
        seed: Of the sample.

    Returns:
        Shape ``(p, q)``.

    Raises:
        ValueError: The numbers of rows differ.
    """
    all_ = [*xs, *(ys or ())]
    if len({len(array) for array in all_}) != 1:
        raise ValueError(f"all must have the same number of rows, not {[len(a) for a in all_]}")
    rows = np.flatnonzero(np.all([finite_rows(array) for array in all_], axis=0))
    rows = rows[_sampled(len(rows), held_rows(max(a.shape[1] for a in all_)), seed)]
    result = np.full((len(xs), len(xs if ys is None else ys)), np.nan)
    if len(rows) < 2:
        return result
    own = [_alignment(a, a) for a in (_centered(array[rows]) for array in all_)]
    for i, x in enumerate(xs):
        a = _centered(x[rows])
        for j, y in enumerate(xs if ys is None else ys):
            lengths = own[i] * own[j if ys is None else len(xs) + j]
            if ys is None and j < i:
                result[i, j] = result[j, i]
            elif lengths > 0:
                result[i, j] = min(1.0, _alignment(a, _centered(y[rows])) / lengths**0.5)
    return result


def n_measured(embeddings: Sequence[Array | Matrix]) -> int:
    """On how many rows :func:`cka_matrix` measures these embeddings of the same rows."""
    n = int(np.all([finite_rows(rows) for rows in embeddings], axis=0).sum())
    return min(n, held_rows(max(rows.shape[1] for rows in embeddings)))


def finite_rows(x: Array | Matrix) -> Array:
    """Shape ``(n,)``: which rows hold numbers only."""
    block = max(1, _BLOCK // x.shape[1])
    finite = np.empty(len(x), bool)
    for start in range(0, len(x), block):
        part = slice(start, start + block)
        finite[part] = np.isfinite(x[part]).all(axis=1)
    return finite


def held_rows(d: int) -> int:
    """Of how many rows of d dimensions, at most, CKA and effective rank are measured."""
    return min(WHOLE_VECTORS, max(256, 2**27 // d))


def _centered(x: Array) -> Array:
    """Centred columns, the largest number 1; zeros where all rows are equal."""
    x = _scaled(x)
    if (x == x[0]).all():  # their mean may be another number in the last digit
        return np.zeros_like(x)
    x -= x.mean(axis=0)
    x /= np.abs(x).max()
    return x


def _alignment(x: Array, y: Array) -> float:
    """The squared Frobenius norm of ``x.T @ y``, in blocks."""
    n, d, e = len(x), x.shape[1], y.shape[1]
    total, block = 0.0, 4096
    if n * (d + e) < d * e:  # the sum of the products of two n x n kernels is the same
        for start in range(0, n, block):
            part = slice(start, start + block)
            total += float(np.vdot(x[part] @ x.T, y[part] @ y.T))
        return total
    for first in range(0, d, block):
        for second in range(0, e, block):
            cross = x[:, first : first + block].T @ y[:, second : second + block]
            total += float(np.square(cross).sum())
    return total
