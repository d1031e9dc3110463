"""The nearest rows of each row: exact or approximate, computed once and kept in a file."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embedx import layout, store
from embedx.disk import waiting_lock
from embedx.errors import StoreError, first_line
from embedx.matrix import Array, Matrix
from embedx.threads import n_threads

Metric = Literal["euclidean", "cosine"]

log = logging.getLogger("embedx")

EXACT_ROWS = 100_000
KEPT_K = 100
RECALL_ROWS = 1000
_REVISION = 1  # raised when the same rows give another graph
_BLOCK_BYTES = 2**24  # of products, which are read five times: they lie in a cache
_PAIR_NUMBERS = 2**18
_FAR = np.finfo(np.float32).max
_NO_ANGLE = 1e-28  # what rounding leaves of the cosine distance of a row and thrice the row


@dataclasses.dataclass(frozen=True)
class Graph:
    """The nearest rows of each of n rows, nearest first; a row is never its own neighbour.

    Attributes:
        indices: Shape ``(n, k)`` int32.
        distances: Shape ``(n, k)`` float32.
        metric: Of the distances.
        exact: Whether these are the nearest rows, and not only near ones.
        recall: Share of the nearest rows that were found, measured on a sample; None where exact.
    """

    indices: Array
    distances: Array
    metric: Metric
    exact: bool
    recall: float | None

    def first(self, n_neighbors: int) -> "Graph":
        """The graph of the ``n_neighbors`` nearest: the one that is computed for so many.

        Raises:
            ValueError: ``n_neighbors`` is not between 1 and k.
        """
        k = self.indices.shape[1]
        if not 1 <= n_neighbors <= k:
            raise ValueError(f"n_neighbors must be 1 to {k}, not {n_neighbors}")
        return dataclasses.replace(
            self, indices=self.indices[:, :n_neighbors], distances=self.distances[:, :n_neighbors]
        )


def nearest_neighbors(
    x: Array,
    *,
    n_neighbors: int,
    metric: Metric = "euclidean",
    exact: bool | None = None,
    seed: int = 0,
) -> Graph:
    """The k nearest other rows of each row.

    Exactly: products of blocks in float32 leave out whatever, within their rounding error, cannot
    be among the nearest; the distances of the few that remain are computed from the differences,
    in double precision. Rows equally far (to float32) come in an order that a fixed hash of the
    two row numbers decides: the first k of more neighbours are the neighbours for k, whatever the
    blocks, and of many equal rows each has others for neighbours.

    Approximately: by NN-descent, for 100, 200, 400, ... neighbours, whichever is enough, so that
    here too fewer are the first of more; the distances are computed as above. The same seed gives
    the same graph with the same number of processors.

    Args:
        x: Shape ``(n, d)``, finite; may be a memory map.
        n_neighbors: k, less than n.
        metric: ``euclidean``, or ``cosine``, which is 1 - cosine similarity; a row of zeros has no
            direction and the distance 1 to every row, also to another of zeros.
        exact: Whether to look at all pairs; where not given, up to 100,000 rows.
        seed: Of the approximate search.

    Returns:
        The graph. A distance beyond float32 is the largest float32. Memory: a copy of ``x`` in
        float32 (in float64 where its values are too far apart for float32) and blocks of 16 MiB.

    Raises:
        ValueError: ``n_neighbors`` is not between 1 and n - 1.

    References:
        Dong, Charikar, Li 2011, WWW '11, doi:10.1145/1963405.1963487 (NN-descent). The bound on
        the error of a product: Higham 2002, Accuracy and Stability of Numerical Algorithms, 3.1.
    """
    n = len(x)
    if not 1 <= n_neighbors < n:
        raise ValueError(f"n_neighbors must be 1 to {n - 1}, not {n_neighbors}")
    space = _Space(_floats(x), metric)
    if _is_exact(n, exact):
        return Graph(*_search(space, space, n_neighbors, own=np.arange(n)), metric, True, None)
    return _approximate(space, _approximate_k(n, n_neighbors), seed).first(n_neighbors)


def nearest_rows(
    queries: Array, x: Array, *, n_neighbors: int, metric: Metric = "euclidean"
) -> tuple[Array, Array]:
    """The k rows nearest to each of other vectors, exactly, as :func:`nearest_neighbors` does.

    Rows equally far come in an order that a hash of the vector's numbers and of the row number
    decides, so that a vector has the same neighbours among whichever others it is asked for.

    Args:
        queries: Shape ``(q, d)``, finite; may be a memory map, of which blocks are read.
        x: Shape ``(n, d)``, finite.
        n_neighbors: k, at most n.
        metric: As there.

    Returns:
        Indices ``(q, k)`` int32 into ``x`` and distances ``(q, k)`` float32, nearest first.

    Raises:
        ValueError: ``n_neighbors`` is not between 1 and n, or the numbers of columns differ.
    """
    if not 1 <= n_neighbors <= len(x):
        raise ValueError(f"n_neighbors must be 1 to {len(x)}, not {n_neighbors}")
    if queries.shape[1] != x.shape[1]:
        raise ValueError(f"queries have {queries.shape[1]} columns, and x has {x.shape[1]}")
    return _search(
        _Space(_floats(queries), metric), _Space(_floats(x), metric), n_neighbors, own=None
    )


# --------------------------------------------------------------------------- exact


def _floats(x: Array) -> Array:
    if x.dtype in (np.float32, np.float64):
        return x
    return x.astype(np.float32 if x.dtype == np.float16 else np.float64)


class _Space:
    """Rows with what their metric makes of them.

    Cosine distance is half the squared distance of the rows at length 1. A row of zeros counts as
    one at right angles to all others.
    """

    def __init__(self, x: Array, metric: Metric) -> None:
        self.x = x
        self.metric = metric
        self.factors: Array | None = None
        self.zero = np.zeros(len(x), bool)
        if metric == "cosine":
            self.factors = np.empty(len(x))
            for rows in _blocks(len(x), 8 * x.shape[1]):
                block = np.abs(x[rows], dtype=np.float64)
                largest = block.max(axis=1, initial=0)
                self.zero[rows] = largest == 0
                largest[largest == 0] = 1
                block /= largest[:, None]
                lengths = np.sqrt(np.einsum("ij,ij->i", block, block))
                self.factors[rows] = 1 / np.where(self.zero[rows], 1, lengths) / largest

    def take(self, rows: Array | slice) -> Array:
        """Rows in double precision, with cosine at length 1."""
        taken = self.x[rows].astype(np.float64)
        if self.factors is not None:
            taken *= self.factors[rows, None]
        return taken

    @functools.cached_property
    def same(self) -> Array:
        """For each row, the first that has the same bytes."""
        first: dict[bytes, int] = {}
        return np.array(
            [
                first.setdefault(hashlib.blake2b(row, digest_size=16).digest(), i)
                for i, row in enumerate(np.ascontiguousarray(self.x))
            ]
        )

    def moved(self, rows: slice, middle: Array, unit: int, dtype: Any) -> tuple[Array, Array]:
        """Rows seen from ``middle`` in units of ``2**-unit``, and their squared lengths."""
        moved = np.ldexp(self.take(rows) - middle, unit)
        squares = np.einsum("ij,ij->i", moved, moved)
        squares[self.zero[rows]] = np.ldexp(1.0, 2 * unit)
        return moved.astype(dtype), squares


class _Sieve:
    """Leaves out rows that, within the rounding error, cannot be among the nearest.

    The squared distance of z and y is |z|^2 + |y|^2 - 2 z.y. In a precision u the product of
    blocks gives it with an error of at most c (|z|^2 + |y|^2), where c is a little above d u
    (Higham 2002, 3.1): that much is taken from the lengths, so that what comes out is a lower
    bound, and whatever lies above an upper bound of the k-th smallest is out.
    """

    def __init__(self, space: _Space, dtype: Any) -> None:
        n, d = space.x.shape
        middle = np.zeros(d)
        if space.metric == "euclidean":  # one huge row does not move a median
            middle = np.median(space.take(np.linspace(0, n - 1, min(n, 1000), dtype=int)), axis=0)
        most = max(
            float(np.abs(space.take(rows) - middle).max(initial=0)) for rows in _blocks(n, 8 * d)
        )
        # In this unit the squares of the longest rows fit, and those of much shorter ones too.
        fits = 60 if dtype == np.float32 else 500
        self.unit = fits - int(np.frexp(most)[1]) - math.ceil(math.log2(d) / 2)
        self.middle = middle
        self.dtype = dtype
        self.error = 1.1 * (d + 16) * float(np.finfo(dtype).eps) / 2
        self.lost = 4 * (d + 16) * float(np.finfo(dtype).tiny)  # by products that underflow
        self.euclidean = space.metric == "euclidean"
        self.moved = np.empty((n, d), dtype)
        self.lower = np.empty(n, dtype)
        for rows in _blocks(n, 16 * d):
            self.moved[rows], squares = space.moved(rows, middle, self.unit, dtype)
            self.lower[rows] = squares * (1 - self.error)

    def pairs(self, queries: _Space, rows: slice, k: int, own: Array | None) -> tuple[Array, Array]:
        """What may be among the k nearest: numbers of queries in the block, and rows, in order."""
        n = len(self.moved)
        moved, squares = queries.moved(rows, self.middle, self.unit, self.dtype)
        bounds = np.matmul(-2 * moved, self.moved.T)
        bounds += self.lower
        if own is not None:
            bounds[np.arange(len(own)), own] = np.inf
        # The k-th smallest of the least of each stripe is no less than that of all.
        stripes = max(1, n // (8 * k))
        width = n // stripes
        least = bounds[:, : stripes * width].reshape(len(bounds), stripes, width).min(axis=1)
        least.partition(k - 1, axis=1)
        is_out = bounds > self._limit(least[:, k - 1].astype(np.float64), squares)[:, None]
        found = np.flatnonzero(np.logical_not(is_out, out=is_out))  # what is no number stays
        numbers, columns = np.divmod(found, n)
        if own is not None:
            others = columns != own[numbers]
            numbers, columns = numbers[others], columns[others]
        return numbers, columns

    def _limit(self, kth: Array, squares: Array) -> Array:
        """What the bound of a row among the k nearest, or as far as the k-th, does not exceed."""
        c = self.error
        near = np.maximum(kth + squares * (1 + c), 0) + self.lost
        longest = (2 * squares + 2 * near) / (1 - 4 * c)  # of a row so near
        far = near + 2 * c * longest
        if self.euclidean:
            beyond = far >= np.ldexp(float(_FAR) ** 2, 2 * self.unit) * (1 - 2.0**-20)
            far = np.where(beyond, np.inf, far)  # these share the largest distance
            least = np.ldexp(1.0, 2 * (self.unit - 125))
        else:
            least = np.ldexp(4 * _NO_ANGLE, 2 * self.unit)
        # Distances are compared in float32, in which a little further is as far.
        limit = far * (1 + 2.0**-20) + least + self.lost - squares * (1 - c)
        above: Array = np.nextafter(limit.astype(self.dtype), self.dtype(np.inf))
        return above


def _search(queries: _Space, space: _Space, k: int, *, own: Array | None) -> tuple[Array, Array]:
    """Indices and distances ``(q, k)``; ``own`` is the row that each query is, and does not get."""
    q, (n, d) = len(queries.x), space.x.shape
    indices, distances = np.empty((q, k), np.int32), np.empty((q, k), np.float32)
    with np.errstate(all="ignore"):  # what leaves the range of numbers stays in the sieve
        sieve = _Sieve(space, np.float32)
        is_settled = False
        for rows in _blocks(q, 4 * n + 16 * d):
            itself = None if own is None else own[rows]
            pairs = sieve.pairs(queries, rows, k, itself)
            crowd = 4 * (rows.stop - rows.start) * (k + 16)
            if len(pairs[0]) > crowd and not is_settled:
                # Rounding lets so many through, or they really are as far: no need to know which.
                is_settled = True
                finer = _Sieve(space, np.float64)
                fewer = finer.pairs(queries, rows, k, itself)
                if len(fewer[0]) < len(pairs[0]) / 2:
                    sieve, pairs = finer, fewer
            salts = _salts(queries.x[rows]) if itself is None else _mixed(itself + 1)
            same = space.same if itself is not None and len(pairs[0]) > crowd else None
            indices[rows], distances[rows] = _nearest(queries, rows, space, pairs, k, salts, same)
    return indices, distances


def _nearest(
    queries: _Space,
    rows: slice,
    space: _Space,
    pairs: tuple[Array, Array],
    k: int,
    salts: Array,
    same: Array | None,
) -> tuple[Array, Array]:
    """The k nearest of the pairs of a block: by distance, then by the hash of the pair."""
    numbers, columns = pairs
    b = rows.stop - rows.start
    indices, distances = np.empty((b, k), np.int32), np.empty((b, k), np.float32)
    counts = np.bincount(numbers, minlength=b)
    starts = np.concatenate([[0], np.cumsum(counts)])
    step = max(1, _PAIR_NUMBERS * 4 // int(counts.max()))
    for top in range(0, b, step):
        part = slice(top, min(top + step, b))
        flat = slice(starts[part.start], starts[part.stop])
        j, number = columns[flat], numbers[flat]
        apart = _distances(queries, rows, space, number, j, same)
        # Bits of positive floats are in the order of the floats; hashes of one row never meet.
        keys = apart.view(np.uint32).astype(np.uint64) << np.uint64(32)
        keys |= _mixed(j ^ salts[number])
        shape = (part.stop - top, int(counts[part].max()))
        place = number - top, np.arange(len(j)) - (starts[number] - flat.start)
        key, column = np.full(shape, 2**64 - 1, np.uint64), np.empty(shape, np.int32)
        distance = np.empty(shape, np.float32)
        key[place], column[place], distance[place] = keys, j, apart
        order = np.argsort(key, axis=1)[:, :k]
        indices[part] = np.take_along_axis(column, order, axis=1)
        distances[part] = np.take_along_axis(distance, order, axis=1)
    return indices, distances


def _distances(
    queries: _Space, rows: slice, space: _Space, number: Array, j: Array, same: Array | None
) -> Array:
    """Shape ``(pairs,)`` float32, each of its two rows alone, whatever else is computed."""
    distances = np.zeros(len(j), np.float32)
    is_cosine = space.metric == "cosine"
    zero = space.zero[j] | queries.zero[rows][number]
    distances[zero] = 1
    left = ~zero if same is None else ~zero & (same[j] != same[rows][number])
    todo = np.flatnonzero(left)
    block = queries.take(rows)
    step = max(1, _PAIR_NUMBERS // space.x.shape[1])
    for start in range(0, len(todo), step):
        chosen = todo[start : start + step]
        apart = space.take(j[chosen])
        apart -= block[number[chosen]]
        squares = np.einsum("ij,ij->i", apart, apart)
        if is_cosine:
            distances[chosen] = np.where(squares < _NO_ANGLE, 0, squares / 2)
        else:
            distances[chosen] = np.minimum(np.sqrt(squares), _FAR)
    return distances


def _mixed(numbers: Array) -> Array:
    """A hash of 32 bits that no two numbers of 32 bits share (the last step of MurmurHash3)."""
    mixed = numbers.astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(16))


def _salts(vectors: Array) -> Array:
    """A hash of each vector's numbers."""
    return np.array([zlib.crc32(row) for row in np.ascontiguousarray(vectors)], np.uint32)


def _blocks(n: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


# --------------------------------------------------------------------------- approximate


def _is_exact(n: int, exact: bool | None) -> bool:
    return n <= EXACT_ROWS if exact is None else exact


def _approximate_k(n: int, k: int) -> int:
    """How many neighbours an approximate search looks for: it depends on that what it finds."""
    enough = KEPT_K
    while enough < k:
        enough *= 2
    return min(enough, n - 1)


def _threads() -> int:
    """How many NN-descent runs on: what it finds depends on their number."""
    return min(n_threads(), int(os.environ.get("NUMBA_NUM_THREADS", n_threads())))


@np.errstate(all="ignore")  # as in _search
def _approximate(space: _Space, k: int, seed: int) -> Graph:
    from pynndescent import NNDescent

    n = len(space.x)
    rows = np.arange(n)
    # Rows without a direction would be near to everything: they are no part of the index.
    indexed = np.flatnonzero(~space.zero)
    near = np.full((n, k), -1)
    if len(indexed) > k + 1:
        moved = _Sieve(space, np.float32).moved
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numba's compiler and of disconnected parts
            found, _ = NNDescent(
                moved if len(indexed) == n else moved[indexed],
                n_neighbors=k + 1,  # the row itself is one of them
                random_state=np.random.RandomState(seed),
                n_jobs=_threads(),
                low_memory=True,
            ).neighbor_graph
        del moved
        for part in _blocks(len(indexed), 32 * k):
            near[indexed[part]] = _others(found[part], np.arange(part.start, part.stop), indexed)
    left = np.flatnonzero(np.asarray((near < 0).any(axis=1)))
    if len(left):
        near[left], _ = _search(_Space(space.x[left], space.metric), space, k, own=left)
    indices, distances = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
    for part in _blocks(n, 16 * space.x.shape[1] + 32 * k):
        numbers = np.repeat(np.arange(part.stop - part.start), k)
        indices[part], distances[part] = _nearest(
            space, part, space, (numbers, near[part].ravel()), k, _mixed(rows[part] + 1), None
        )
    recall, measured = _recall(space, indices, distances, seed)
    log.info(
        "approximate neighbours, recall %.2f on %s rows; exact=true computes all",
        recall,
        f"{measured:,}",
    )
    return Graph(indices, distances, space.metric, False, recall)


def _others(found: Array, rows: Array, indexed: Array) -> Array:
    """The lists of an index ``(b, k + 1)`` without the row itself ``(b, k)``, as rows of x."""
    found = found.copy()
    itself: Array = found == rows[:, None]
    itself[~itself.any(axis=1), -1] = True  # equal rows took its place: the farthest goes
    others = found[~itself].reshape(len(found), -1)
    return np.where(others >= 0, indexed[others], -1)


def _recall(space: _Space, indices: Array, distances: Array, seed: int) -> tuple[float, int]:
    """The share of the nearest rows that were found, and on how many rows it was measured.

    A row as far as the farthest of the nearest is one of them.
    """
    n, k = indices.shape
    sample = np.sort(np.random.default_rng(seed).choice(n, min(n, RECALL_ROWS), replace=False))
    _, truth = _search(_Space(space.x[sample], space.metric), space, k, own=sample)
    return float((distances[sample] <= truth[:, -1:]).mean()), len(sample)


# --------------------------------------------------------------------------- the file


def metric_of(parameters: Mapping[str, Any]) -> Metric:
    """The metric that a map with these parameters was to keep; Euclidean where they name none."""
    return "cosine" if parameters.get("metric") == "cosine" else "euclidean"


def layer_graph(
    opened: store.Embeddings,
    layer: str,
    rows: Array | Matrix,
    *,
    n_neighbors: int,
    metric: Metric,
    which: str = "",
) -> Graph:
    """The graph of the good, finite rows of a layer, kept beside the embeddings for all that ask.

    Args:
        opened: The file.
        layer: The capture point.
        rows: Those rows, shape ``(n, d)``, or what was made of them.
        n_neighbors: k, less than n.
        metric: Of the distances.
        which: What was made of the rows, in a word; nothing where they are as the file has them.

    Raises:
        ValueError: ``n_neighbors`` is not between 1 and n - 1.
    """
    return cached_graph(
        opened.path.parent,
        key=f"{opened.attrs['id']}/{layer}/ok{which}",
        rows=rows,
        n_neighbors=n_neighbors,
        metric=metric,
        parentage=opened.parentage,
    )


def cached_graph(
    folder: Path,
    *,
    key: str,
    rows: Array | Matrix,
    n_neighbors: int,
    metric: Metric = "euclidean",
    parentage: Mapping[str, str],
    exact: bool | None = None,
    seed: int = 0,
) -> Graph:
    """The graph of :func:`nearest_neighbors`, kept in ``folder/neighbors-<hash>.h5``.

    It is computed for 100 neighbours (n - 1 where there are no more), or for as many as are asked
    for where that is more, and then serves whoever asks for no more. Another process that asks
    meanwhile waits. A file that is damaged or holds something else is made anew, and where the
    folder cannot be written the graph is computed and not kept; a log line says so.

    Args:
        folder: Where the embeddings lie.
        key: What tells these rows from all others: the id of the embeddings, the layer, which of
            the rows.
        rows: Shape ``(n, d)``, finite; of a :class:`Matrix` they are read only where needed.
        n_neighbors: k, less than n.
        metric: As for :func:`nearest_neighbors`.
        parentage: That of the embeddings: when they are replaced, the file goes.
        exact: As there.
        seed: As there.

    Raises:
        ValueError: ``n_neighbors`` is not between 1 and n - 1.
    """
    damaged: dict[Path, StoreError] = {}
    about = {"revision": _REVISION, "key": key, "metric": metric, **parentage}

    def place(is_exact: bool) -> tuple[Path, dict[str, Any]]:
        asked: dict[str, Any] = {**about, "exact": is_exact}
        if not is_exact:  # what it finds depends on these
            asked |= {
                "seed": seed,
                "threads": _threads(),
                "searched": _approximate_k(2**31, n_neighbors),
            }
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return folder / f"neighbors-{digest[:12]}.h5", asked

    def kept() -> Graph | None:
        # Whether the search is exact may depend on n, which is not known before rows are read.
        for is_exact in (True, False) if exact is None else (exact,):
            path, asked = place(is_exact)
            if not path.exists():
                continue
            try:
                graph = _read(path, asked)
            except StoreError as error:
                damaged.setdefault(path, error)
                continue
            n, k = graph.indices.shape
            is_ours = _is_exact(n, exact) == is_exact and len(rows) == n
            if is_ours and k >= min(n_neighbors, n - 1):
                return graph.first(n_neighbors)
        return None

    if (graph := kept()) is not None:
        return graph
    x, n = np.asarray(rows), len(rows)
    is_exact = _is_exact(n, exact)
    path, asked = place(is_exact)
    with contextlib.ExitStack() as stack:
        why = ""
        try:
            stack.enter_context(waiting_lock(path, work="computes the neighbours"))
        except OSError as error:
            why = error.strerror or first_line(error)
        else:
            if (graph := kept()) is not None:  # somebody else was at it
                return graph
        for reason in damaged.values():
            log.warning("the neighbours are computed anew: %s", reason)
        started = time.monotonic()
        k = max(n_neighbors, min(n - 1, KEPT_K)) if is_exact else _approximate_k(n, n_neighbors)
        graph = nearest_neighbors(x, n_neighbors=k, metric=metric, exact=is_exact, seed=seed)
        seconds = time.monotonic() - started
        if not why:
            try:
                _write(path, graph, asked)
            except StoreError as error:
                why = str(error)
    log.info(
        "found the %s nearest neighbours of each of %s rows, %s, %s, %.1f s, %s",
        k,
        f"{n:,}",
        metric,
        "exact" if is_exact else "approximate",
        seconds,
        f"not kept: {why}" if why else f"kept in {path}",
    )
    return graph.first(n_neighbors)


def _write(path: Path, graph: Graph, asked: Mapping[str, Any]) -> None:
    attrs = {**asked, "sha256": _sha256(graph.indices, graph.distances)}
    if graph.recall is not None:
        attrs["recall"] = graph.recall
    arrays = {"indices": graph.indices, "distances": graph.distances}
    layout.write_arrays(path, format=layout.NEIGHBORS_FORMAT, attrs=attrs, arrays=arrays)


def _read(path: Path, asked: Mapping[str, Any]) -> Graph:
    """The graph in a file, which may come from anywhere.

    Raises:
        StoreError: It is damaged, of other rows, or no graph.
    """
    attrs, arrays = layout.read_arrays(
        path, format=layout.NEIGHBORS_FORMAT, names=("indices", "distances")
    )
    indices, distances = arrays["indices"], arrays["distances"]
    recall = attrs.get("recall")
    n, k = indices.shape if indices.ndim == 2 else (0, 0)
    if any(attrs.get(name) != value for name, value in asked.items()):
        why = "it is of other rows"
    elif (
        not 1 <= k < n
        or distances.shape != (n, k)
        or indices.dtype != np.int32
        or distances.dtype != np.float32
        or not (recall is None if asked["exact"] else isinstance(recall, float))
    ):
        why = "it holds no graph"
    elif attrs.get("sha256") != _sha256(indices, distances):
        why = "its numbers are not those that were written"
    elif (
        not (indices.min() >= 0 and indices.max() < n)
        or (indices == np.arange(n)[:, None]).any()
        or (np.diff(np.sort(indices, axis=1), axis=1) == 0).any()
        or not (distances[:, 0] >= 0).all()
        or not np.isfinite(distances).all()
        or not (distances[:, :-1] <= distances[:, 1:]).all()
    ):
        why = "its numbers are no neighbours"
    else:
        return Graph(indices, distances, asked["metric"], asked["exact"], recall)
    raise StoreError(f"{path} is damaged or foreign: {why}")


def _sha256(*arrays: Array) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
