"""Methods of projection, and how each places new rows in a map that is there.

A method is a function of rows ``(n, d)`` that returns a :class:`Result`. What is known of the rows
beside their values, such as their neighbours, which several methods share, comes to a method that
has an argument ``context``. A method that can place rows it was not fitted to is marked with
:func:`places`.
"""

import contextlib
import dataclasses
import functools
import logging
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np

from embedx.align import procrustes
from embedx.errors import ConfigError, DataError, short
from embedx.forces import attraction, repulsion
from embedx.matrix import BLOCK_ROWS, Array, Matrix
from embedx.neighbors import Graph, Metric, nearest_neighbors, nearest_rows
from embedx.parts import part_rows
from embedx.threads import n_threads

log = logging.getLogger("embedx")

F = TypeVar("F", bound=Callable[..., "Result"])

# The covariance of so many features, in float64, takes 2 GB.
WIDEST = 16_384
# Moments of so many rows are summed at once: of more where the rows are wide, so that those of all
# parts take an eighth of the rows at most, and never in more than so many parts.
MOMENT_ROWS = 65_536
MOMENT_PARTS = 256
# Raised when the maps of a method change under the same settings; part of a map's id.
REVISIONS = {"tsne": 3}
# Of openTSNE's placing: few neighbours, a small step, for the map itself does not move.
PLACING_PERPLEXITY = 5.0
PLACING_ITERATIONS = 250


@dataclasses.dataclass(frozen=True)
class Result:
    """What a projection gives.

    Attributes:
        coords: Shape ``(n, m)``.
        used: Parameters as they were used, where that differs from what was asked for, and scores
            of the method's own.
        state: Arrays of the fitted projection, for placing new rows.
    """

    coords: Array
    used: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[str, Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A map that is there, for placing new rows in it.

    Attributes:
        rows: The n rows that it was fitted to.
        coords: Shape ``(n, m)``, where they are.
        parameters: Every parameter with the value used, and what ``Result.used`` held.
        state: The arrays of ``Result.state``.
    """

    rows: Matrix
    coords: Array
    parameters: Mapping[str, Any]
    state: Mapping[str, Array]

    @functools.cached_property
    def x(self) -> Array:
        """The fitted rows in memory, shape ``(n, d)`` float32."""
        return np.asarray(self.rows, dtype=np.float32)

    def array(self, name: str, shape: tuple[int, ...]) -> Array:
        """An array of the state, float64.

        Raises:
            DataError: It is not there, or not finite numbers of this shape.
        """
        return state_array(self.state, name, shape)

    def number(self, name: str, *, least: float, most: float = 2**32 - 1) -> float:
        """A parameter that is a number.

        Raises:
            DataError: It is not there, or no number from ``least`` to ``most``.
        """
        value = self.parameters.get(name)
        if isinstance(value, (int, float)) and least <= value <= most:
            return float(value)
        raise DataError(
            f"its parameter {name} is {short(repr(value), most=40)}, and a number from {least} to "
            f"{most} is needed; make that map again"
        )

    def metric(self) -> Metric:
        """The parameter ``metric``.

        Raises:
            DataError: It is no metric.
        """
        value = self.parameters.get("metric")
        for metric in typing.get_args(Metric):
            if value == metric:
                return metric  # type: ignore[no-any-return]
        raise DataError(
            f"its parameter metric is {short(repr(value), most=40)}, and not one of "
            f"{', '.join(typing.get_args(Metric))}; make that map again"
        )


def state_array(state: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """An array of the state of a map, float64, which a file may hold anything as.

    Raises:
        DataError: It is not there, or not finite numbers of this shape.
    """
    array = state.get(name)
    is_numbers = array is not None and array.dtype.kind in "iuf" and np.isfinite(array).all()
    if array is None or array.shape != shape or not is_numbers:
        what = "missing" if array is None else f"{array.shape} {array.dtype}, or not finite"
        raise DataError(
            f"its state {name} is {what}, and {shape} of finite numbers is needed; make that map "
            "again"
        )
    return array.astype(np.float64)


Place = Callable[[Array, Fitted], Array]


class Work:
    """What is done in parts, by this process alone; the parts do not hang on who does them."""

    def moments(self, rows: Matrix) -> "Iterable[Moments]":
        """The moments of rows, part by part in their order."""
        block = rows.block_rows
        return (moments_of(rows, part, block=block) for part in moment_parts(rows))

    def placed(
        self, rows: Matrix, place: Place, fitted: Fitted, *, dtype: type = np.float64
    ) -> Array:
        """Where new rows go in a map, block by block, shape ``(q, m)``."""
        coords: Array = np.empty((len(rows), fitted.coords.shape[1]), dtype)
        for block in rows.blocks():
            with np.errstate(over="ignore"):
                coords[block] = placed_block(rows[block], place, fitted)
        return coords


def placed_block(x: Array, place: Place, fitted: Fitted) -> Array:
    """Where new rows ``(q, d)`` go in a map, shape ``(q, m)``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters is said in our own words
        return place(x, fitted)


@dataclasses.dataclass(frozen=True)
class Context:
    """What is known of the rows beside their values.

    Attributes:
        neighbors: Gives the graph of the k nearest neighbours of all n rows for ``(k, metric)``,
            computed once for all that ask.
        labels: Shape ``(n,)`` of int, -1 for none; None where there are no labels.
        target: Shape ``(n, m)``: where a map to align to has these rows, NaN where it has not;
            None where there is no such map.
        work: Who does what can be done in parts.
    """

    neighbors: Callable[[int, Metric], Graph]
    labels: Array | None = None
    target: Array | None = None
    work: Work = dataclasses.field(default_factory=Work)


def places(
    place: Place, *, unless: Callable[[Mapping[str, Any]], str | None] | None = None
) -> Callable[[F], F]:
    """Mark a method as one whose maps take new rows.

    Args:
        place: Gives the coordinates ``(q, m)`` of new rows ``(q, d)`` in a :class:`Fitted` map. It
            is called block by block, so a row's place may not depend on other new rows.
        unless: Gives the reason why a map of these parameters takes none, None where it does.
    """

    def mark(method: F) -> F:
        method.place = place  # type: ignore[attr-defined]  # a function may carry attributes
        method.unless = unless  # type: ignore[attr-defined]
        return method

    return mark


def place_of(method: Callable[..., Result]) -> Place | None:
    """How a method places new rows, if it can."""
    return getattr(method, "place", None)


def why_not_placed(method: Callable[..., Result], parameters: Mapping[str, Any]) -> str | None:
    """Why a method that places new rows does not in a map of these parameters; None if it does."""
    unless = getattr(method, "unless", None)
    return None if unless is None else unless(parameters)


# --------------------------------------------------------------------------- PCA


def _place_pca(x: Array, fitted: Fitted) -> Array:
    (d,), m = x.shape[1:], fitted.coords.shape[1]
    axes, mean = fitted.array("components", (m, d)), fitted.array("mean", (d,))
    coords: Array = (x.astype(np.float64) - mean) @ axes.T
    return coords * fitted.array("scale", (m,)) if "scale" in fitted.state else coords


@places(_place_pca)
def pca(
    x: Array | Matrix,
    *,
    n_components: int = 2,
    whiten: bool = False,
    random_state: int = 0,
    context: Context | None = None,
) -> Result:
    """Principal component analysis, exact and out of core.

    The mean and the scatter of all rows are summed in float64 in one pass over blocks of rows (the
    pairwise update of Chan, Golub, LeVeque), first within each part of 65,536 rows or more and then
    over the parts in their order, and the components are the eigenvectors of the scatter; of rows
    that are fewer than their features they come of the products of the rows, over blocks of
    columns. The sign of each component makes its largest loading positive, the first of equal ones;
    a component without variance is 0.

    Args:
        x: Shape ``(n, d)``, finite.
        n_components: m, at most min(n, d); clamped with a message.
        whiten: Divide each coordinate by its standard deviation.
        random_state: Not used; the result is exact.
        context: Who sums the parts, and places the rows.

    Returns:
        Coordinates, and as state the fitted ``mean`` ``(d,)``, ``components`` ``(m, d)`` and
        ``explained_variance_ratio`` ``(min(n, d),)`` of all components, with ``whiten`` also
        ``scale`` ``(m,)``.

    Raises:
        ConfigError: A parameter is out of its range.
        DataError: Both n and d are above 16,384: the matrix to decompose would not fit in memory.

    References:
        Pearson 1901, Philosophical Magazine 2(11); Hotelling 1933; Chan, Golub, LeVeque 1979.
    """
    _in_range("n_components", n_components, least=1)
    _in_range("random_state", random_state, least=0, most=2**32 - 1)
    rows = x if isinstance(x, Matrix) else Matrix(np.asarray(x))
    n, d = rows.shape
    m = int(_clamp("n_components", n_components, most=min(n, d)))
    work = Work() if context is None else context.work
    mean, axes, variances = principal_components(rows, m, work=work)
    total = float(variances.sum())
    ratio = variances / total if total > 0 else np.zeros(len(variances))
    state = {"mean": mean, "components": axes, "explained_variance_ratio": ratio}
    if whiten:
        deviation = np.sqrt(variances[:m])
        # A direction without variance has nothing to divide.
        flat = deviation <= 1e-7 * deviation.max(initial=0.0)
        state["scale"] = np.where(flat, 0.0, 1.0 / np.where(flat, 1.0, deviation))
    fitted = Fitted(rows.among(np.arange(0)), np.empty((0, m)), {}, state)  # it asks for no rows
    dtype = np.float32 if n > BLOCK_ROWS else np.float64
    coords = work.placed(rows, _place_pca, fitted, dtype=dtype)
    used = {"n_components": m, "explained_variance": float(ratio[:m].sum())}
    return Result(coords=coords, used=used, state=state)


def principal_components(
    rows: Matrix, n_components: int, *, work: Work | None = None
) -> tuple[Array, Array, Array]:
    """Mean ``(d,)``, the first axes ``(m, d)`` and all variances ``(min(n, d),)``, largest first.

    Args:
        rows: Shape ``(n, d)``.
        n_components: m.
        work: Who sums the moments; this process where not given.

    Raises:
        DataError: Both n and d are above 16,384.
    """
    n, d = rows.shape
    if min(n, d) > WIDEST:
        raise DataError(
            f"the principal components of {n:,} rows of {d:,} features need a matrix of "
            f"{min(n, d) ** 2 * 8 / 1e9:.0f} GB; store fewer features: extract with pooling=gap"
        )
    if n < d:
        mean, axes, variances = _components_of_few(rows, n_components)
    else:
        mean, axes, variances = _components_of_many(rows, n_components, work or Work())
    # Of loadings that are equal but for the last digits the first decides.
    sizes = np.abs(axes)
    first = (sizes >= sizes.max(axis=1, keepdims=True) * (1 - 1e-6)).argmax(axis=1)
    signs = np.where(np.take_along_axis(axes, first[:, None], axis=1) < 0, -1.0, 1.0)
    return mean, axes * signs, variances


def _components_of_few(rows: Matrix, m: int) -> tuple[Array, Array, Array]:
    """From the products of rows that are fewer than their features, column by column."""
    n, d = rows.shape
    mean, gram = np.empty(d), np.zeros((n, n))
    for columns in rows.column_blocks():
        values = rows.columns(columns).astype(np.float64)
        mean[columns] = values.mean(axis=0)
        values -= mean[columns]
        gram += values @ values.T
    squares, left = _eigen(gram)
    left = left[:, :m]
    axes = np.empty((m, d))
    for columns in rows.column_blocks():
        axes[:, columns] = left.T @ (rows.columns(columns).astype(np.float64) - mean[columns])
    length = np.linalg.norm(axes, axis=1, keepdims=True)
    # A direction without variance is noise of the last digits, and stays without length.
    is_flat = length <= 1e-7 * length.max(initial=0.0)
    axes = np.where(is_flat, 0.0, axes / np.where(is_flat, 1.0, length))
    return mean, axes, squares / max(1, n - 1)


def _eigen(symmetric: Array) -> tuple[Array, Array]:
    """Eigenvalues, largest first and none negative, and eigenvectors as columns."""
    # Squares of huge features lose the small ones less when all are of the same size.
    unit = float(np.abs(symmetric).max())
    values, vectors = np.linalg.eigh(symmetric / unit if unit > 0 else symmetric)
    return np.maximum(values[::-1], 0) * unit, vectors[:, ::-1]


def _components_of_many(rows: Matrix, m: int, work: Work) -> tuple[Array, Array, Array]:
    whole = Moments(rows.shape[1])
    for part in work.moments(rows):
        whole.add(part.n, part.mean, part.scatter)
    squares, axes = _eigen(whole.scatter)
    return whole.mean, axes.T[:m], squares / max(1, whole.n - 1)


class Moments:
    """Of n rows the mean ``(d,)``, and the scatter ``(d, d)`` about it, in float64; of none yet.

    Args:
        d: How many numbers a row has.
    """

    def __init__(self, d: int) -> None:
        self.n = 0
        self.mean: Array = np.zeros(d)
        self.scatter: Array = np.zeros((d, d))

    def add(self, n: int, mean: Array, scatter: Array) -> None:
        """Take in those of further rows, by the pairwise update of Chan, Golub, LeVeque."""
        between = mean - self.mean
        apart = np.outer(between, between)
        apart *= self.n * n / (self.n + n)
        self.scatter += scatter
        self.scatter += apart
        self.mean += between * (n / (self.n + n))
        self.n += n


def moments_of(rows: Matrix, which: range, *, block: int) -> Moments:
    """The moments of some of the rows, of which ``block`` are read at once."""
    moments = Moments(rows.shape[1])
    for start in range(which.start, which.stop, block):
        values = rows[start : min(start + block, which.stop)].astype(np.float64)
        mean = values.mean(axis=0)
        values -= mean
        moments.add(len(values), mean, values.T @ values)
    return moments


def moment_parts(rows: Matrix) -> list[range]:
    """The rows whose moments are summed by themselves; they do not hang on who does it."""
    (n, d), block = rows.shape, rows.block_rows
    most = min(MOMENT_PARTS, -(-n // MOMENT_ROWS), -(-n // block), n // (16 * max(1, d)))
    n_parts = max(1, most)
    return [part_rows(number, n_parts=n_parts, n_rows=n, block=block) for number in range(n_parts)]


# --------------------------------------------------------------------------- t-SNE


def _place_tsne(x: Array, fitted: Fitted) -> Array:
    """openTSNE's way: at the median of a row's neighbours, then by gradients, the map fixed."""
    import openTSNE
    import scipy.sparse

    # openTSNE moves the middle of a map to 0 before it lays its grid, but not the rows to place.
    middle = (fitted.coords.max(axis=0) + fitted.coords.min(axis=0)) / 2
    coords = fitted.coords.astype(np.float64) - middle
    n = len(coords)
    perplexity = min(PLACING_PERPLEXITY, (n - 1) / 3)
    k = min(n, max(1, round(3 * perplexity)))
    indices, distances = nearest_rows(x, fitted.x, n_neighbors=k, metric=fitted.metric())
    start = np.median(coords[indices], axis=1)
    if k < 3:
        return np.asarray(start + middle)
    affinities = openTSNE.affinity.joint_probabilities_nn(
        indices,
        _in_own_unit(distances),
        [perplexity],
        symmetrize=False,
        normalization="point-wise",
        n_reference_samples=n,
    )
    is_large = _is_large(n)
    method = _gradient(coords.shape[1])
    nothing = scipy.sparse.csr_matrix((n, n))
    reference = openTSNE.TSNEEmbedding(
        coords,
        openTSNE.affinity.PrecomputedAffinities(nothing, normalize=False),
        negative_gradient_method=method,
    )
    partial = openTSNE.tsne.PartialTSNEEmbedding(
        start, reference, affinities, negative_gradient_method=method
    )
    done = partial.optimize(
        n_iter=PLACING_ITERATIONS,
        learning_rate=0.1,
        momentum=0.8,
        exaggeration=1.5,
        max_grad_norm=0.25,
        n_jobs=n_threads() if is_large else 1,
    )
    placed: Array = np.asarray(done) + middle
    return placed


@places(_place_tsne)
def tsne(
    x: Array,
    *,
    n_components: int = 2,
    perplexity: float | list[float] = 30.0,
    early_exaggeration: float = 12.0,
    early_exaggeration_iter: int = 250,
    exaggeration: float = 1.0,
    n_iter: int = 500,
    initialization: Literal["pca", "spectral", "random"] = "pca",
    metric: Metric = "euclidean",
    backend: Literal["opentsne", "sklearn"] = "opentsne",
    random_state: int = 0,
    context: Context | None = None,
) -> Result:
    """t-distributed stochastic neighbour embedding, by openTSNE or scikit-learn.

    Args:
        x: Shape ``(n, d)``, finite.
        n_components: m, 2 or 3.
        perplexity: Effective number of neighbours, at least 1; clamped to (n - 1) / 3 with a
            message. A list of several mixes their affinities (openTSNE alone).
        early_exaggeration: Factor of the attraction in the early iterations, at least 1.
        early_exaggeration_iter: How many early iterations; 250 always by scikit-learn.
        exaggeration: Factor of the attraction after them; above 1 clusters draw together
            (openTSNE alone).
        n_iter: Iterations after the early ones.
        initialization: Where the rows start: at their principal components, at the eigenvectors of
            their neighbour graph (openTSNE alone), or at random.
        metric: Of the distances in ``x``.
        backend: openTSNE uses the shared neighbour graph and is faster; scikit-learn is there to
            compare with.
        random_state: Seed.
        context: The shared neighbours.

    Raises:
        ConfigError: A parameter is out of its range, or one that the backend does not have.
        DataError: Fewer than 4 rows, or than m + 2 for a spectral start.

    References:
        van der Maaten, Hinton 2008, JMLR 9; Policar, Strazar, Zupan 2024, JSS 109(3); several
        perplexities: Kobak, Berens 2019, Nature Communications 10:5416.
    """
    asked = perplexity if isinstance(perplexity, list) else [perplexity]
    if not asked:
        raise ConfigError("projection.perplexity is an empty list; give one number at least")
    for value in asked:
        _in_range("perplexity", value, least=1)
    _in_range("early_exaggeration", early_exaggeration, least=1)
    _in_range("early_exaggeration_iter", early_exaggeration_iter, least=0)
    _in_range("exaggeration", exaggeration, least=1)
    _in_range("n_iter", n_iter, least=1)
    n = _nonlinear("t-SNE", x, n_components=n_components, random_state=random_state)
    used = [_clamp("perplexity", value, most=(n - 1) / 3) for value in dict.fromkeys(asked)]
    used = sorted(dict.fromkeys(used))
    start = None
    target = None if context is None else context.target
    if target is not None and np.isfinite(target).all():
        start = _small_start(target, n_components, random_state)
    elif initialization == "pca":
        start = _small_start(x, n_components, random_state)
    elif initialization == "random":
        start = np.random.default_rng(random_state).normal(scale=1e-4, size=(n, n_components))
    # Threads pay from some thousands of rows. Before, they wait for each other at every step, on a
    # busy machine many times as long as one alone would take.
    is_large = _is_large(n)
    shown = {
        "perplexity": used if isinstance(perplexity, list) else used[0],
        "threads": n_threads() if is_large else 1,
    }
    if backend == "sklearn":
        for name, given, is_known in (
            ("early_exaggeration_iter", early_exaggeration_iter, early_exaggeration_iter == 250),
            ("exaggeration", exaggeration, exaggeration == 1),
            ("perplexity", perplexity, len(used) == 1),
            ("initialization", initialization, start is not None),
        ):
            if not is_known:
                raise ConfigError(
                    f"projection.{name}={given} is of openTSNE alone; leave it out, or take "
                    "projection.backend=opentsne"
                )
        assert start is not None
        from sklearn.manifold import TSNE

        other = TSNE(
            n_components=n_components,
            perplexity=used[0],
            early_exaggeration=early_exaggeration,
            max_iter=250 + n_iter,
            init=start.astype(np.float32),
            metric=metric,
            random_state=random_state,
            n_jobs=shown["threads"],
        )
        coords = other.fit_transform(np.asarray(x, np.float32))
        return Result(coords=coords, used={**shown, "kl_divergence": float(other.kl_divergence_)})
    import openTSNE

    k = min(n - 1, round(3 * max(used)))
    graph = _context(x, context).neighbors(k, metric).first(k)
    neighbors = openTSNE.nearest_neighbors.PrecomputedNeighbors(
        graph.indices, _in_own_unit(graph.distances)
    )
    logging.getLogger("openTSNE").setLevel(logging.ERROR)  # it warns that it uses what it is given
    if len(used) > 1:
        affinities = openTSNE.affinity.Multiscale(
            perplexities=used, knn_index=neighbors, random_state=random_state
        )
    else:
        affinities = openTSNE.affinity.PerplexityBasedNN(
            knn_index=neighbors, perplexity=used[0], random_state=random_state
        )
    if start is None:
        if n < n_components + 2:
            raise DataError(
                f"projection.initialization=spectral needs at least {n_components + 2} rows for "
                f"{n_components} dimensions, and there are {n}; take pca"
            )
        start = openTSNE.initialization.spectral(
            affinities.P, n_components=n_components, random_state=random_state
        )
    fit = openTSNE.TSNE(
        n_components=n_components,
        early_exaggeration=early_exaggeration,
        early_exaggeration_iter=early_exaggeration_iter,
        exaggeration=exaggeration,
        n_iter=n_iter,
        initialization=start,
        negative_gradient_method=_gradient(n_components),
        n_jobs=shown["threads"],
        random_state=random_state,
    ).fit(affinities=affinities)
    return Result(coords=np.asarray(fit), used={**shown, "kl_divergence": float(fit.kl_divergence)})


def _in_own_unit(distances: Array) -> Array:
    """Perplexity is found row by row, whatever the unit: a row far from all would overflow."""
    unit = np.median(distances, axis=1, keepdims=True).astype(np.float64)
    unit = np.where(unit > 0, unit, distances.mean(axis=1, keepdims=True, dtype=np.float64))
    return np.asarray(distances / np.where(unit > 0, unit, 1))


def _gradient_on_grid(
    embedding: Array,
    P: Any,
    dof: float = 1,
    reference_embedding: Array | None = None,
    should_eval_error: bool = False,
    n_jobs: int = 1,
    **options: Any,
) -> tuple[float, Array]:
    """Divergence and gradient of a flat map, as openTSNE takes them.

    What it wants to know the divergence for is summed by its own attraction, and so is that of few
    points, which is done before ours is compiled. A map whose points were flung too far apart for a
    grid is summed by openTSNE's tree.
    """
    from openTSNE import _tsne
    from openTSNE.tsne import kl_divergence_bh

    points = np.ascontiguousarray(embedding, np.float64)
    fixed = None if reference_embedding is None else np.asarray(reference_embedding, np.float64)
    repelled = repulsion(points, fixed=fixed, n_jobs=n_jobs)
    given = {"should_eval_error": should_eval_error, "dof": dof}
    if repelled is None:
        made: tuple[float, Array] = kl_divergence_bh(
            points, P, reference_embedding=fixed, n_jobs=n_jobs, **given, **options
        )
        return made
    gradient, total = np.ascontiguousarray(-repelled[0], np.float64), repelled[1]
    if fixed is None and dof == 1 and _is_large(len(points)) and not should_eval_error:
        return 0.0, gradient + attraction(P, points, n_jobs=n_jobs)
    others = points if fixed is None else fixed
    sum_p, divergence = _tsne.estimate_positive_gradient_nn(
        P.indices, P.indptr, P.data, points, others, gradient, num_threads=n_jobs, **given
    )
    return divergence + (sum_p * np.log(total) if should_eval_error else 0), gradient


def _gradient(m: int) -> str | Callable[..., Any]:
    """How the repulsion of all rows is summed: on a grid, which is flat, or by a tree."""
    return _gradient_on_grid if m == 2 else "bh"


def _is_large(n: int) -> bool:
    return n > 5000


def _small_start(x: Array, m: int, random_state: int) -> Array:
    """The principal components ``(n, m)`` at the scale 1e-4 that t-SNE starts from.

    Noise far below that scale parts rows that are equal, or that one huge row has pressed onto
    one point: points at the very same place repel each other in no direction and never part.
    """
    start = np.random.default_rng(random_state).normal(scale=1e-6, size=(len(x), m))
    components = pca(x, n_components=min(m, *x.shape)).coords.astype(np.float64)
    largest = np.abs(components).max()
    if largest > 0:
        components = components / largest  # its square could overflow
        start[:, : components.shape[1]] += components * (1e-4 / components[:, 0].std())
    return start


# --------------------------------------------------------------------------- UMAP


def _place_umap(x: Array, fitted: Fitted) -> Array:
    """umap-learn's way, from the arrays of a file: amid a row's neighbours, then by gradients."""
    from umap import layouts, umap_

    _keep_compiled()

    coords = fitted.coords.astype(np.float32)
    n, q = len(coords), len(x)
    k = min(int(fitted.number("n_neighbors", least=2)), n)
    indices, distances = nearest_rows(x, fitted.x, n_neighbors=k, metric=fitted.metric())
    # umap-learn bounds a row's reach by the mean distance of all rows that come with it: in units
    # of its own a row far from all does not widen the others'. Of distances 0 any unit is right.
    distances = _in_own_unit(distances).astype(np.float32)
    spread_out = np.where(distances.any(axis=1, keepdims=True), distances, np.float32(1))
    sigmas, rhos = umap_.smooth_knn_dist(spread_out, float(k), local_connectivity=0.0)
    at, to, strengths, _ = umap_.compute_membership_strengths(
        indices.astype(np.int32), distances, sigmas, rhos, bipartite=True
    )
    weights = strengths.reshape(q, k, 1)
    start = (weights * coords[indices]).sum(axis=1) / weights.sum(axis=1)
    is_equal = distances[:, 0] == 0
    start[is_equal] = coords[indices[is_equal, 0]]
    n_epochs = 100 if n <= 10_000 else 30
    strong = strengths >= 1.0 / n_epochs  # memberships go to 1
    seed = np.random.RandomState(int(fitted.number("random_state", least=0)))
    placed: Array = layouts.optimize_layout_euclidean(
        start.astype(np.float32),
        coords,
        at[strong],
        to[strong],
        n_epochs,
        n,
        umap_.make_epochs_per_sample(np.append(strengths[strong], np.float32(1)), n_epochs)[:-1],
        fitted.number("a", least=0),
        fitted.number("b", least=0),
        seed.randint(-(2**31) + 1, 2**31 - 2, 3).astype(np.int64),
        initial_alpha=0.25,
    )
    return placed


def _umap_places_none(parameters: Mapping[str, Any]) -> str | None:
    if parameters.get("densmap"):
        return "densMAP cannot place new rows, whose density is not known: projection.densmap=false"
    return None


@places(_place_umap, unless=_umap_places_none)
def umap(
    x: Array,
    *,
    n_components: int = 2,
    n_neighbors: int = 15,
    min_dist: float = 0.1,
    spread: float = 1.0,
    n_epochs: int | None = None,
    metric: Metric = "euclidean",
    densmap: bool = False,
    supervised: bool = False,
    alignment: float = 0.0,
    random_state: int = 0,
    context: Context | None = None,
) -> Result:
    """Uniform manifold approximation and projection, by umap-learn on the shared neighbours.

    Args:
        x: Shape ``(n, d)``, finite.
        n_components: m, 2 or 3.
        n_neighbors: Size of a neighbourhood, counting the row itself, at least 2; clamped to n - 1
            with a message.
        min_dist: Least distance between points of the map, 0 to ``spread``.
        spread: Scale of the map, above 0.
        n_epochs: Passes over the graph; 500 up to 10,000 rows and 200 above where not given.
        metric: Of the distances in ``x``.
        densmap: Keep the density of the rows too: dense regions stay small.
        supervised: Draw rows of one label together. Such a map says nothing of how far the
            embeddings part the classes.
        alignment: How strongly each row is drawn to where the map of ``align_to`` has it, at least
            0; 0.01 is a good beginning (AlignedUMAP, the other map held fixed).
        random_state: Seed.
        context: The shared neighbours, the labels, and where the other map has the rows.

    Raises:
        ConfigError: A parameter is out of its range, or ``alignment`` without a map to align to or
            beside ``densmap``.
        DataError: Fewer than 4 rows, or no labels where ``supervised`` needs them.

    References:
        McInnes, Healy, Melville 2018, arXiv:1802.03426; densMAP: Narayan, Berger, Cho 2021, Nature
        Biotechnology 39; AlignedUMAP: Dadu et al. 2023, Patterns 4(6).
    """
    _in_range("n_neighbors", n_neighbors, least=2)
    _in_range("alignment", alignment, least=0)
    if alignment > 0 and densmap:
        raise ConfigError(
            "projection.alignment has no use beside projection.densmap; leave one out"
        )
    if alignment > 0 and (context is None or context.target is None):
        raise ConfigError(f"projection.alignment={alignment} needs a map: name one with align_to")
    _in_range("spread", spread, least=1e-3)
    _in_range("min_dist", min_dist, least=0, most=spread)
    if n_epochs is not None:
        _in_range("n_epochs", n_epochs, least=1)
    n = _nonlinear("UMAP", x, n_components=n_components, random_state=random_state)
    known = _context(x, context)
    if supervised and (known.labels is None or not (known.labels >= 0).any()):
        raise DataError(
            "projection.supervised=true needs labels, and these rows have none; leave it out"
        )
    import umap as umap_learn

    _keep_compiled()

    k = int(_clamp("n_neighbors", n_neighbors, most=n - 1))
    graph = known.neighbors(k - 1, metric).first(k - 1)
    # umap-learn counts a row as its own first neighbour.
    indices = np.hstack([np.arange(n, dtype=np.int32)[:, None], graph.indices])
    distances = np.hstack([np.zeros((n, 1), np.float32), graph.distances])
    fit = umap_learn.UMAP(
        n_components=n_components,
        n_neighbors=k,
        min_dist=min_dist,
        spread=spread,
        n_epochs=n_epochs,
        metric=metric,
        densmap=densmap,
        precomputed_knn=(indices, distances, None),
        # The spectral start solves for m + 1 eigenvectors, which tiny data do not have.
        init="spectral" if n > 2 * (n_components + 1) else "random",
        random_state=random_state,
        n_jobs=1,  # what a seed makes of it anyway
    )
    if known.target is not None and np.isfinite(known.target).all():
        fit.init = known.target.astype(np.float32)
    coords = fit.fit_transform(x, known.labels if supervised else None)
    if alignment > 0:
        assert known.target is not None
        coords = _drawn_to(known.target, coords, fit, alignment=alignment, seed=random_state)
    used = {"n_neighbors": k, "a": float(fit._a), "b": float(fit._b)}
    return Result(coords=np.asarray(coords), used=used)


@functools.cache
def _keep_compiled() -> None:
    """Let numba keep on disk what it compiles of umap-learn, which takes a process about 10 s.

    umap-learn asks for that of a few functions only; what is kept is what would be compiled.
    """
    from umap import layouts, umap_

    for function in [*vars(layouts).values(), *vars(umap_).values()]:
        if hasattr(function, "enable_caching"):
            with contextlib.suppress(RuntimeError):  # no folder can be written
                function.enable_caching()


def _drawn_to(target: Array, coords: Array, fit: Any, *, alignment: float, seed: int) -> Array:
    """A fitted map laid out anew by AlignedUMAP, from the target on: shape ``(n, m)``.

    Of its two maps the target has no edges, and so does not move. Rows that the target does not
    have are tied to nothing, and start where they lie in ``coords``.
    """
    from numba.typed import List
    from umap import layouts, umap_

    turn, shift = procrustes(coords, target)
    shared = np.asarray(np.isfinite(target).all(axis=1))
    start = np.where(shared[:, None], target, coords @ turn + shift).astype(np.float32)
    n = len(start)
    n_epochs = fit.n_epochs or (500 if n <= 10_000 else 200)
    edges = fit.graph_.tocoo()
    strong = edges.data >= edges.data.max() / n_epochs
    no_edges = np.empty(0, np.int32)
    relations, weights = np.full((2, 3, n), -1, np.int32), np.zeros((2, 3, n), np.float32)
    relations[1, 0] = np.where(shared, np.arange(n), -1)  # of the map 1, to the one before it
    weights[1, 0] = 1
    maps = List([start.copy(), start])
    laid_out = layouts.optimize_layout_aligned_euclidean(
        maps,
        maps,
        List([no_edges, edges.row[strong]]),
        List([no_edges, edges.col[strong]]),
        n_epochs,
        List([np.empty(0), umap_.make_epochs_per_sample(edges.data[strong], n_epochs)]),
        weights,
        relations,
        np.random.RandomState(seed).randint(-(2**31) + 1, 2**31 - 2, 3).astype(np.int64),
        a=fit._a,
        b=fit._b,
        lambda_=alignment,
        parallel=False,
        move_other=True,
    )
    return np.asarray(laid_out[1])


# --------------------------------------------------------------------------- shared


def _context(x: Array, context: Context | None) -> Context:
    """What a method finds out by itself where it is called alone."""
    if context is not None:
        return context
    return Context(lambda k, metric: nearest_neighbors(x, n_neighbors=k, metric=metric))


def _clamp(name: str, value: Any, *, most: Any) -> Any:
    if value <= most:
        return value
    log.warning("%s=%s is too large for these rows: using %.4g", name, value, most)
    return most


def _in_range(name: str, value: float, *, least: float, most: float = np.inf) -> None:
    if not (least <= value <= most and np.isfinite(value)):
        limits = f"at least {least}" if most == np.inf else f"{least} to {most}"
        raise ConfigError(f"projection.{name} must be {limits}, not {value!r}")


def _nonlinear(title: str, x: Array, *, n_components: int, random_state: int) -> int:
    """Refuse what t-SNE and UMAP both cannot take; returns n."""
    _in_range("n_components", n_components, least=2, most=3)
    _in_range("random_state", random_state, least=0, most=2**32 - 1)
    if len(x) < 4:
        raise DataError(
            f"{title} needs at least 4 rows, and there are {len(x)}; use projection=pca"
        )
    return len(x)


METHODS: dict[str, Callable[..., Result]] = {"pca": pca, "tsne": tsne, "umap": umap}
