"""The stage ``project``: embeddings to a map of two or three dimensions.

A projection is a function from rows to a :class:`Result`; its config file names it as
``_target_``, so that another method is one file more.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embedx import store
from embedx.checks import check_arguments, checked, refuse_taken, signature_of
from embedx.configs import settings_sha256
from embedx.errors import ConfigError, DataError, StoreError, short
from embedx.neighbors import Metric, nearest_neighbors, trustworthiness
from embedx.store import Array, Projection

log = logging.getLogger("embedx")

TRUSTWORTHINESS_K = 15


@dataclasses.dataclass(frozen=True)
class Result:
    """What a projection gives.

    Attributes:
        coords: Shape ``(n, m)``.
        used: Parameters as they were used, where that differs from what was asked for, and scores
            of the method's own.
        state: Arrays of the fitted projection.
    """

    coords: Array
    used: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[str, Array] = dataclasses.field(default_factory=dict)


# --------------------------------------------------------------------------- methods


def pca(x: Array, *, n_components: int = 2, random_state: int = 0) -> Result:
    """Principal component analysis, by a full singular value decomposition.

    The sign of each component makes its largest loading positive.

    Args:
        x: Shape ``(n, d)``, finite.
        n_components: m, at most min(n, d); clamped with a message.
        random_state: Not used; the result is exact.

    Returns:
        Coordinates and the fitted mean ``(d,)`` and components ``(m, d)``.

    Raises:
        ConfigError: A parameter is out of its range.

    References:
        Pearson 1901, Philosophical Magazine 2(11); Hotelling 1933.
    """
    _in_range("n_components", n_components, least=1)
    m = _clamp("n_components", n_components, most=min(x.shape))
    mean = x.mean(axis=0, dtype=np.float64)
    centered = x.astype(np.float64) - mean
    _, singular, components = np.linalg.svd(centered, full_matrices=False)
    components = components[:m]
    largest = np.abs(components).argmax(axis=1)
    components *= np.where(components[np.arange(m), largest] < 0, -1.0, 1.0)[:, None]
    total = float((singular**2).sum())
    ratio = singular[:m] ** 2 / total if total > 0 else np.zeros(m)
    return Result(
        coords=centered @ components.T,
        used={"n_components": m, "explained_variance_ratio": ratio.tolist()},
        state={"mean": mean, "components": components},
    )


def tsne(
    x: Array,
    *,
    n_components: int = 2,
    perplexity: float = 30.0,
    early_exaggeration: float = 12.0,
    n_iter: int = 500,
    metric: Metric = "euclidean",
    random_state: int = 0,
) -> Result:
    """t-distributed stochastic neighbour embedding, by openTSNE.

    Args:
        x: Shape ``(n, d)``, finite.
        n_components: m, 2 or 3.
        perplexity: Effective number of neighbours, at least 1; clamped to (n - 1) / 3 with a
            message.
        early_exaggeration: Factor of the attraction in the first 250 iterations, at least 1.
        n_iter: Iterations after those.
        metric: Of the distances in ``x``.
        random_state: Seed.

    Raises:
        ConfigError: A parameter is out of its range.
        DataError: Fewer than 4 rows.

    References:
        van der Maaten, Hinton 2008, JMLR 9; Policar, Strazar, Zupan 2024, JSS 109(3).
    """
    _in_range("perplexity", perplexity, least=1)
    _in_range("early_exaggeration", early_exaggeration, least=1)
    _in_range("n_iter", n_iter, least=1)
    n = _nonlinear("t-SNE", x, n_components=n_components, random_state=random_state)
    import openTSNE

    used = _clamp("perplexity", perplexity, most=(n - 1) / 3)
    k = min(n - 1, round(3 * used))
    indices, distances = nearest_neighbors(x, n_neighbors=k, metric=metric)
    # Perplexity is found row by row, whatever the unit: a row far from all would overflow.
    unit = distances.mean(axis=1, keepdims=True, dtype=np.float64)
    distances = distances / np.where(unit > 0, unit, 1)
    neighbors = openTSNE.nearest_neighbors.PrecomputedNeighbors(indices, distances)
    logging.getLogger("openTSNE").setLevel(logging.ERROR)  # it warns that it uses what it is given
    affinities = openTSNE.affinity.PerplexityBasedNN(
        knn_index=neighbors, perplexity=used, random_state=random_state
    )
    # The tree of Barnes-Hut holds any number of dimensions; the grid of FFT only two, and it pays
    # from some thousands of rows. So do threads: before, they wait for each other at every step,
    # on a busy machine many times as long as one alone would take.
    is_large = n > 5000
    threads = _cpus() if is_large else 1
    fit = openTSNE.TSNE(
        n_components=n_components,
        perplexity=used,
        early_exaggeration=early_exaggeration,
        n_iter=n_iter,
        initialization=_small_start(x, n_components, random_state),
        negative_gradient_method="fft" if n_components == 2 and is_large else "bh",
        n_jobs=threads,
        random_state=random_state,
    ).fit(affinities=affinities)
    return Result(
        coords=np.asarray(fit),
        used={
            "perplexity": used,
            "kl_divergence": float(fit.kl_divergence),
            "threads": threads,
        },
    )


def _small_start(x: Array, m: int, random_state: int) -> Array:
    """The principal components ``(n, m)`` at the scale 1e-4 that t-SNE starts from.

    Noise far below that scale parts rows that are equal, or that one huge row has pressed onto
    one point: points at the very same place repel each other in no direction and never part.
    """
    start = np.random.default_rng(random_state).normal(scale=1e-6, size=(len(x), m))
    components = pca(x, n_components=min(m, *x.shape)).coords
    largest = np.abs(components).max()
    if largest > 0:
        components = components / largest  # its square could overflow
        start[:, : components.shape[1]] += components * (1e-4 / components[:, 0].std())
    return start


def umap(
    x: Array,
    *,
    n_components: int = 2,
    n_neighbors: int = 15,
    min_dist: float = 0.1,
    metric: Metric = "euclidean",
    random_state: int = 0,
) -> Result:
    """Uniform manifold approximation and projection, by umap-learn on the exact neighbours.

    Args:
        x: Shape ``(n, d)``, finite.
        n_components: m, 2 or 3.
        n_neighbors: Size of a neighbourhood, counting the row itself, at least 2; clamped to n - 1
            with a message.
        min_dist: Least distance between points of the map, 0 to 1.
        metric: Of the distances in ``x``.
        random_state: Seed.

    Raises:
        ConfigError: A parameter is out of its range.
        DataError: Fewer than 4 rows.

    References:
        McInnes, Healy, Melville 2018, arXiv:1802.03426.
    """
    _in_range("n_neighbors", n_neighbors, least=2)
    _in_range("min_dist", min_dist, least=0, most=1)
    n = _nonlinear("UMAP", x, n_components=n_components, random_state=random_state)
    import umap as umap_learn

    k = int(_clamp("n_neighbors", n_neighbors, most=n - 1))
    indices, distances = nearest_neighbors(x, n_neighbors=k - 1, metric=metric)
    # umap-learn counts a row as its own first neighbour.
    indices = np.hstack([np.arange(n)[:, None], indices])
    distances = np.hstack([np.zeros((n, 1), np.float32), distances])
    fit = umap_learn.UMAP(
        n_components=n_components,
        n_neighbors=k,
        min_dist=min_dist,
        metric=metric,
        precomputed_knn=(indices, distances, None),
        # The spectral start solves for m + 1 eigenvectors, which tiny data do not have.
        init="spectral" if n > 2 * (n_components + 1) else "random",
        random_state=random_state,
        n_jobs=1,  # what a seed makes of it anyway
    )
    coords = fit.fit_transform(x)
    return Result(coords=np.asarray(coords), used={"n_neighbors": k})


def _cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


# --------------------------------------------------------------------------- the stage

_OURS = ["function"]  # a setting that stands beside the parameters
METHODS: dict[str, Callable[..., Result]] = {"pca": pca, "tsne": tsne, "umap": umap}


@checked
def project(
    embeddings: str | os.PathLike[str] | store.Embeddings,
    *,
    method: str | Callable[..., Result] = "umap",
    layer: str | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    **parameters: Any,
) -> Projection:
    """Project the rows of an embeddings file and write the map beside it.

    Done already with the same values, it does nothing. Failed rows are NaN in the map.

    Args:
        embeddings: The file, its folder, or the opened file.
        method: ``pca``, ``tsne``, ``umap``, or a function ``(x, **parameters) -> Result``, which
            is known by its name: after changing what it does, pass ``overwrite``.
        layer: The capture point; the first in the file where not given.
        out: Folder for the projection; ``projections`` beside the embeddings where not given.
        overwrite: Compute again what is there.
        parameters: Of the method.

    Returns:
        The projection, coordinates ``(n, m)`` row-aligned with the embeddings.

    Raises:
        ConfigError: An unknown method, a parameter it does not have or cannot take, or that has
            the name of an argument of ``project`` or a value that a file cannot hold.
        DataError: Too few rows, an unfinished file, or a function of one's own that gives no
            ``(n, m)`` coordinates or what a file cannot hold.
        StoreError: A file is missing or damaged, the map that is there belongs to other
            embeddings, or there is no space.
    """
    opened = store.open(embeddings)
    if not opened.complete:
        raise DataError(f"{opened.path} is not finished; finish the extraction first")
    if isinstance(method, str):
        if method not in METHODS:
            raise ConfigError(
                f"projection {method!r} is not known; choose one of: {', '.join(METHODS)}"
            )
        method = METHODS[method]
    name = re.sub(r"[^\w.-]+", "_", getattr(method, "__name__", "projection"))
    refuse_taken(
        project, plugin=method, given=parameters, positional=1, where="projection.", also=_OURS
    )
    parameters = {key: _plain(value) for key, value in parameters.items()}
    check_arguments(method, parameters, positional=1, where="projection.")
    parameters = _with_defaults(method, parameters)
    _refuse_unkept(parameters)
    point, rows = opened.rows(layer)
    if layer is None and len(opened.embeddings) > 1:
        log.warning("several layers: projecting the first, %s; choose with layer=", point)
    settings = {"method": name, "layer": point, **parameters}
    if METHODS.get(name) is not method:  # two functions of one name are not one method
        settings["function"] = f"{method.__module__}.{getattr(method, '__qualname__', name)}"
    digest = settings_sha256(settings)
    folder = Path(out) if out else opened.path.parent / "projections"
    path = folder / f"{name}-{digest[:6]}.h5"
    projection_id = hashlib.sha256(f"{opened.attrs['id']} {digest}".encode()).hexdigest()
    if path.exists() and not overwrite:
        present = store.open_projection(path)
        if present.attrs.get("id") == projection_id:
            log.info("%s is there already with these settings: nothing to do", path)
            return present
        raise StoreError(
            f"{path} belongs to other embeddings (parent {str(present.attrs.get('parent'))[:12]}, "
            f"and {opened.path} is {opened.attrs['id'][:12]}); replace it with overwrite=true"
        )
    ok = opened.ok
    x = np.asarray(rows[ok], dtype=np.float32)
    finite = np.isfinite(x).all(axis=1)
    ok[ok], x = finite, x[finite]
    n_ok = len(x)
    if n_ok == 0:
        raise DataError(f"{opened.path} has no row to project: all {opened.n_rows} failed")
    log.info(
        "projecting %s of %s by %s (%s rows of %s dims) into %s",
        point,
        opened.path,
        name,
        f"{n_ok:,}",
        rows.shape[1],
        path,
    )
    if n_ok < opened.n_rows:
        log.warning("%s failed rows are left out", f"{opened.n_rows - n_ok:,}")
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters of them is said in our own words
        result = method(x, **parameters)
    used, placed_at = _refuse_unusable(result, name, n_ok)
    with np.errstate(over="ignore"):  # what float32 cannot hold is not placed
        placed_at = placed_at.astype(np.float32)
    placed = np.isfinite(placed_at).all(axis=1)
    placed_at[~placed] = np.nan
    coords = np.full((opened.n_rows, placed_at.shape[1]), np.nan, np.float32)
    coords[ok] = placed_at
    attrs: dict[str, Any] = {
        "threads": _cpus(),
        **{key: _attr(value) for key, value in {**parameters, **used}.items()},
        "id": projection_id,
        "parent": opened.attrs["id"],
        "model": opened.attrs.get("model", ""),
        "data": opened.attrs.get("data", ""),
        "method": name,
        "layer": point,
        "seed": parameters.get("random_state", 0),
        "settings": json.dumps(settings, sort_keys=True),
    }
    if not placed.all():
        log.info("%s rows could not be placed and are absent from the map", int((~placed).sum()))
    k = min(TRUSTWORTHINESS_K, (int(placed.sum()) - 1) // 2)
    if k >= 1:
        score, measured = trustworthiness(x[placed], placed_at[placed], n_neighbors=k)
        attrs.update(trustworthiness=score, trustworthiness_k=k, trustworthiness_rows=measured)
    store.write_projection(path, coords=coords, ids=opened.ids, attrs=attrs, state=result.state)
    log.info(
        "wrote %s: %s rows, %s dims, trustworthiness %s, %.1f s",
        path,
        f"{n_ok:,}",
        coords.shape[1],
        f"{attrs['trustworthiness']:.3f}" if k >= 1 else "not defined for so few rows",
        time.monotonic() - started,
    )
    return store.open_projection(path)


def _with_defaults(function: Callable[..., Result], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter with its value, so that a default written out is the same settings."""
    signature = signature_of(function)
    bound = signature.bind(None, **given)
    bound.apply_defaults()
    values: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            values.update(value)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            values[name] = value
            if isinstance(parameter.default, float) and type(value) is int:
                values[name] = float(value)  # 30 and 30.0 are one setting
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    """A number of NumPy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def _refuse_unkept(parameters: Mapping[str, Any]) -> None:
    """The map's file holds every parameter as text, which must tell one map from another."""
    for key, value in parameters.items():
        if _as_json(value) is None:
            raise ConfigError(
                f"projection.{key} must be a number, a text, or a list or mapping of them, for the "
                f"file of the map keeps it, not {_shown(value)}"
            )


def _refuse_unusable(result: Any, name: str, n: int) -> tuple[dict[str, Any], Array]:
    """What a function of one's own gives must be a Result that fits the rows and a file."""
    gave = f"a {type(result).__name__}"
    if isinstance(result, Result):
        coords = result.coords
        if not isinstance(coords, np.ndarray):
            gave = f"coords that are a {type(coords).__name__}"
        elif coords.dtype.kind not in "biuf":
            gave = f"coords of type {coords.dtype}"
        elif coords.ndim != 2 or len(coords) != n or coords.shape[1] == 0:
            gave = f"coords {coords.shape}"
        else:
            used = {key: _plain(value) for key, value in result.used.items()}
            for key, value in used.items():
                if _as_json(value) is None:
                    raise DataError(
                        f"projection {name} gave used[{key!r}], {_shown(value)}, which an "
                        "attribute cannot hold; give arrays as state"
                    )
            for key, array in result.state.items():
                if np.asarray(array).dtype.kind not in "biufc":
                    raise DataError(
                        f"projection {name} gave state[{key!r}], {_shown(array)}, which is no "
                        "array of numbers; leave it out"
                    )
            return used, coords
    raise DataError(
        f"projection {name} must give a Result with coords, an array of numbers ({n}, m), and it "
        f"gave {gave}"
    )


def _shown(value: Any) -> str:
    return f"a {type(value).__name__} {short(repr(value), most=40)}"


def _as_json(value: Any) -> str | None:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None


def _attr(value: Any) -> Any:
    """A value as an attribute of HDF5, in JSON where that has no such value."""
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value):
        return value
    return json.dumps(value)
