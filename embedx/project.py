"""The stage ``project``: embeddings to a map of two or three dimensions.

A projection is a function from rows to a :class:`embedx.methods.Result`; its config file names it
as ``_target_``, so that another method is one file more.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embedx import derived, ready_made, store, unfinished
from embedx.align import OnlyIds, Samples, doubt_of_pairs, places_in, procrustes, space_of, untold
from embedx.checks import check_arguments, checked, refuse_taken, signature_of
from embedx.configs import settings_sha256
from embedx.derived import Projection
from embedx.disk import writing_lock
from embedx.errors import ConfigError, DataError, StoreError, short
from embedx.matrix import Array, Matrix, among_the_rest, stratified
from embedx.methods import (
    METHODS,
    REVISIONS,
    Context,
    Fitted,
    Moments,
    Place,
    Result,
    Work,
    moment_parts,
    moments_of,
    pca,
    place_of,
    placed_block,
    principal_components,
    state_array,
    why_not_placed,
)
from embedx.neighbors import Graph, Metric, layer_graph, metric_of
from embedx.parts import AGAIN, ArrayParts, Engine, Feed, Task, part_rows
from embedx.ready_made import Given
from embedx.scores import SCORED_K, WHOLE_ROWS, map_quality
from embedx.store import Embeddings
from embedx.threads import n_threads

log = logging.getLogger("embedx")

_OURS = ["function"]  # a setting that stands beside the parameters
_CONTEXT = "context"  # an argument that the stage gives, and nobody else


@checked
def project(
    embeddings: Given,
    *,
    method: str | Callable[..., Result] | None = None,
    layer: str | None = None,
    pre_pca: int | None = None,
    landmarks: int | None = None,
    transform_from: str | os.PathLike[str] | Projection | None = None,
    align_to: str | os.PathLike[str] | Projection | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    engine: Engine | None = None,
    **parameters: Any,
) -> Projection:
    """Project the rows of an embeddings file and write the map beside it.

    Done already with the same values, it does nothing. Failed rows are NaN in the map. The scores
    of :func:`embedx.scores.map_quality` are stored with it.

    Args:
        embeddings: The file, its folder, or the opened file.
        method: ``pca``, ``tsne``, ``umap`` (the default), or a function ``(x, **parameters) ->
            Result``, of which the name and the code count.
        layer: The capture point; the first in the file where not given.
        pre_pca: Reduce the rows to so many principal components first; the scores still compare
            the map with the whole rows.
        landmarks: Fit the map to so many rows, drawn from each label in proportion, and place the
            others in it block by block, in bounded memory.
        transform_from: A map of other embeddings of the same model and layer, by its path, or the
            folder of a run that has one: place the rows in it, by its method and parameters,
            without moving what is there.
        align_to: A map of the same samples, by path, name or folder: turn and shift this one so
            that they lie as close as they can (orthogonal Procrustes); where it has all samples of
            this one, t-SNE and UMAP also start from there.
        out: Folder for the projection; ``projections`` beside the embeddings where not given.
        overwrite: Compute again what is there.
        engine: What sums the rows of PCA, and places rows that are not fitted, part by part in
            other processes, such as ``embedx.engines.processes()``; this process where not given.
            The map is the same.
        parameters: Of the method.

    Returns:
        The projection, coordinates ``(n, m)`` row-aligned with the embeddings.

    Raises:
        ConfigError: An unknown method, a parameter it does not have or cannot take, or that has
            the name of an argument of ``project`` or a value that a file cannot hold; or an engine
            that has nothing to do.
        DataError: Too few rows, an unfinished file, a map that rows cannot be placed in or aligned
            with, a function of one's own that gives no ``(n, m)`` coordinates or what a file
            cannot hold, or parts that an engine could not have made.
        Interrupted: A signal came while an engine was at work.
        StoreError: A file is missing or damaged, the map that is there belongs to other
            embeddings, or there is no space.
    """
    opened = ready_made.opened(embeddings)
    opened.require_there()
    if not opened.complete:
        raise DataError(f"{opened.path} is not finished; finish the extraction first")
    if transform_from is not None:
        unused = {"method": method, "pre_pca": pre_pca, "landmarks": landmarks} | parameters
        unused |= {"layer": layer, "align_to": align_to}
        for key, value in unused.items():
            if value is not None:
                raise ConfigError(
                    f"{key} has no use beside transform_from: the rows are placed by the method "
                    "and the parameters of that map; leave it out"
                )
        job = _placing(opened, _projection_at(transform_from, opened, key="transform_from"))
    else:
        target = None if align_to is None else _projection_at(align_to, opened, key="align_to")
        job = _fitting(
            opened,
            method="umap" if method is None else method,
            layer=layer,
            pre_pca=pre_pca,
            landmarks=landmarks,
            target=target,
            parameters=parameters,
        )
    apart = {"beside": job.beside, "code": job.code}
    decides = {**job.settings, **{key: value for key, value in apart.items() if value}}
    if job.name in REVISIONS and "function" not in job.settings:
        decides["revision"] = REVISIONS[job.name]
    digest = settings_sha256(decides)
    folder = Path(out) if out else opened.path.parent / "projections"
    path = folder / f"{job.name}-{digest[:6]}.h5"
    of_rows = " ".join(opened.parentage.values())
    projection_id = hashlib.sha256(f"{of_rows} {digest}".encode()).hexdigest()
    if path.exists() and not overwrite:
        present = derived.open_projection(path)
        if present.attrs.get("id") == projection_id:
            log.info("%s is there already with these settings: nothing to do", path)
            _Elsewhere.remove(path)  # where it was killed when all was done but this
            return present
        if present.attrs.get("parent") == opened.attrs["id"]:
            raise StoreError(
                f"{path} is a map of rows of {opened.path} that have been replaced since; make it "
                "anew with overwrite=true"
            )
        raise StoreError(
            f"{path} belongs to other embeddings (parent {str(present.attrs.get('parent'))[:12]}, "
            f"and {opened.path} is {opened.attrs['id'][:12]}); replace it with overwrite=true"
        )
    rows = job.rows
    if engine is not None:
        _require_use(engine, job)
    log.info(
        "projecting %s of %s by %s (%s rows of %s dims) into %s",
        job.layer,
        opened.path,
        job.name,
        f"{len(rows):,}",
        rows.shape[1],
        path,
    )
    if len(rows) < opened.n_rows:
        log.warning("%s failed rows are left out", f"{opened.n_rows - len(rows):,}")
    started = time.monotonic()
    if engine is None:
        made = job.make(Work())
    else:
        with contextlib.ExitStack() as stack:
            stack.callback(_remove_if_empty, folder)
            stack.enter_context(writing_lock(path))
            if overwrite:  # from the start: parts may be of code that has changed unseen
                _Elsewhere.remove(path)
            again = None if overwrite else AGAIN
            made = job.make(_Elsewhere(engine, path, opened, job, again=again))
    with np.errstate(over="ignore"):  # what float32 cannot hold is not placed
        placed_at = made.coords.astype(np.float32)
    placed = np.isfinite(placed_at).all(axis=1)
    placed_at[~placed] = np.nan
    if not placed.all():
        log.info("%s rows could not be placed and are absent from the map", int((~placed).sum()))
    coords = np.full((opened.n_rows, placed_at.shape[1]), np.nan, np.float32)
    coords[job.at] = placed_at
    graph = made.graph if placed.all() else None
    if graph is None and placed.all() and 2 < len(rows) <= WHOLE_ROWS:
        k = min(SCORED_K, len(rows) - 1)
        graph = layer_graph(opened, job.layer, rows, n_neighbors=k, metric=made.metric)
    # Maps are compared by their scores: whatever their seeds, the sample is the same.
    quality = map_quality(
        rows.among(np.flatnonzero(placed)), placed_at[placed], metric=made.metric, graph=graph
    )
    neighborhood = np.full(opened.n_rows, np.nan, np.float32)
    neighborhood[job.at[placed]] = quality.neighborhood
    parameters = made.parameters
    seed = parameters.get("random_state", parameters.get("seed", 0))
    attrs: dict[str, Any] = {
        "threads": n_threads(),
        **{key: _attr(value) for key, value in parameters.items()},
        "id": projection_id,
        **opened.parentage,
        "model": opened.attrs.get("model", ""),
        "data": opened.attrs.get("data", ""),
        "method": job.name,
        "layer": job.layer,
        "seed": _attr(seed),
        "settings": json.dumps(job.settings, sort_keys=True),
        **quality.scores,
    }
    opened.require_there()  # what is made of it lies beside it, and is known by it
    derived.write_projection(
        path,
        coords=coords,
        ids=opened.ids,
        attrs=attrs,
        state=made.state,
        row_scores={"neighborhood": neighborhood},
    )
    _Elsewhere.remove(path)
    score = quality.scores.get("trustworthiness")
    log.info(
        "wrote %s: %s rows, %s dims, trustworthiness %s, %.1f s",
        path,
        f"{len(rows):,}",
        coords.shape[1],
        "not defined for so few rows" if score is None else f"{score:.3f}",
        time.monotonic() - started,
    )
    return derived.open_projection(path)


@dataclasses.dataclass(frozen=True)
class _Made:
    """A map before it is written.

    Attributes:
        coords: Of the rows that take part.
        parameters: With the values used.
        state: Arrays that placing rows in it needs.
        metric: In which it is compared with its rows.
        graph: Of these rows as they are, where the method asked for it.
    """

    coords: Array
    parameters: dict[str, Any]
    state: dict[str, Array]
    metric: Metric
    graph: Graph | None


@dataclasses.dataclass(frozen=True)
class _Job:
    """What is to be made: known before any work, so that what is there already is found.

    Attributes:
        name: Of the method.
        layer: The capture point.
        settings: Everything that decides the coordinates beside the embeddings.
        at: Which rows of the file take part, as indices.
        rows: They.
        make: Makes the map, with someone who does what can be done in parts.
        place: How further rows are placed in it; None where none are, or the method does it itself.
        fitted_to: The embeddings that it is fitted to.
        reduces: Whether the rows are summed for their principal components.
        beside: A hash of what another map holds that this one is made beside: made again under the
            same settings, it may hold something else.
        code: A hash of a function that is none of ours.
    """

    name: str
    layer: str
    settings: dict[str, Any]
    at: Array
    rows: Matrix
    make: Callable[[Work], _Made]
    place: Place | None
    fitted_to: Embeddings
    reduces: bool = False
    beside: str = ""
    code: str = ""


def _usable(opened: Embeddings, layer: str | None) -> tuple[str, Array, Matrix]:
    """The capture point, and its rows that are there and finite, with their indices."""
    point, matrix = opened.rows(layer)
    if layer is None and len(opened.embeddings) > 1:
        log.warning("several layers: projecting the first, %s; choose with layer=", point)
    at = np.flatnonzero(opened.ok)
    whole = Matrix(matrix, at)
    finite = np.ones(len(at), bool)
    for block in whole.blocks():
        finite[block] = np.isfinite(whole[block]).all(axis=1)
    at = at[finite]
    if not len(at):
        raise DataError(f"{opened.path} has no row to project: all {opened.n_rows} failed")
    # Without a list of rows they are read in long runs.
    return point, at, Matrix(matrix, None if len(at) == opened.n_rows else at)


# --------------------------------------------------------------------------- a new map


def _fitting(
    opened: Embeddings,
    *,
    method: str | Callable[..., Result],
    layer: str | None,
    pre_pca: int | None,
    landmarks: int | None,
    target: Projection | None,
    parameters: Mapping[str, Any],
) -> _Job:
    """Check everything that a new map is asked for."""
    if isinstance(method, str):
        if method not in METHODS:
            raise ConfigError(
                f"projection {method!r} is not known; choose one of: {', '.join(METHODS)}"
            )
        method = METHODS[method]
    function = method
    name = re.sub(r"[^\w.-]+", "_", getattr(function, "__name__", "projection"))
    refuse_taken(
        project, plugin=function, given=parameters, positional=1, where="projection.", also=_OURS
    )
    if _CONTEXT in parameters:
        raise ConfigError(f"there is no key projection.{_CONTEXT}: project gives it; leave it out")
    given = {key: _plain(value) for key, value in parameters.items()}
    check_arguments(function, given, positional=1, where="projection.")
    values = _with_defaults(function, given)
    _refuse_unkept(values)
    for key, number in (("pre_pca", pre_pca), ("landmarks", landmarks)):
        if number is not None and number < 1:
            raise ConfigError(f"{key} must be at least 1, not {number}")
    if landmarks is not None and place_of(function) is None:
        raise ConfigError(
            f"landmarks={landmarks}: projection {name} cannot place the other rows; leave it out, "
            "or mark the function with embedx.methods.places"
        )
    if landmarks is not None and (why := why_not_placed(function, values)):
        raise ConfigError(f"landmarks={landmarks}: {why}, or leave landmarks out")
    point, at, rows = _usable(opened, layer)
    options = {"pre_pca": pre_pca, "landmarks": landmarks}
    settings = {"method": name, "layer": point, **values}
    settings.update({key: value for key, value in options.items() if value is not None})
    if target is not None:
        settings["align_to"] = target.attrs["id"]
        _refuse_other_dims(target, values.get("n_components", target.coords.shape[1]))
    if METHODS.get(name) is not function:  # two functions of one name are not one method
        settings["function"] = f"{function.__module__}.{getattr(function, '__qualname__', name)}"
    n_fitted = len(rows)
    if landmarks is not None:
        if landmarks < n_fitted:
            n_fitted = landmarks
        else:
            log.warning("landmarks=%s: there are %s rows, all are fitted", landmarks, n_fitted)

    def make(work: Work) -> _Made:
        seed = values.get("random_state", 0)
        seed = seed if type(seed) is int and 0 <= seed < 2**32 else 0
        state: dict[str, Array] = {}
        used: dict[str, Any] = {}
        reduced = rows
        which = ""
        if pre_pca is not None and pre_pca < min(rows.shape):
            mean, axes, _ = principal_components(rows, pre_pca, work=work)
            mean, axes = mean.astype(np.float32), axes.astype(np.float32)
            reduced = rows.along(mean=mean, axes=axes)
            state |= {"pre_components": axes, "pre_mean": mean}
            used["pre_pca"] = pre_pca
            which += f"/pca{pre_pca}"
        elif pre_pca is not None:
            log.warning("pre_pca=%s: %s x %s rows have no more; not reduced", pre_pca, *rows.shape)
            used["pre_pca"] = min(rows.shape)
        fitted_at = np.arange(len(rows))
        labels = None if opened.labels is None else opened.labels[at]
        if n_fitted < len(rows):
            fitted_at = stratified(len(rows), n_fitted, labels, seed=seed)
            which += f"/landmarks{n_fitted}-{seed}"
            used["landmarks"] = n_fitted
            state["landmarks"] = at[fitted_at]
        chosen = reduced if n_fitted == len(rows) else reduced.among(fitted_at)
        x = chosen if function is pca else np.asarray(chosen)
        graphs: dict[Metric, Graph] = {}

        def neighbors(k: int, metric: Metric) -> Graph:
            if n_fitted < 2:
                raise DataError(f"{name} asks for neighbors, and there is one row; use pca")
            k = min(max(k, SCORED_K), n_fitted - 1)  # enough for the scores too
            graphs[metric] = layer_graph(
                opened, point, x, n_neighbors=k, metric=metric, which=which
            )
            return graphs[metric]

        start = None if target is None else _shared(target, opened, at[fitted_at])
        is_whole = n_fitted == len(rows)  # else they are few, and one process fits the map to them
        context = Context(
            neighbors,
            None if labels is None else labels[fitted_at],
            start,
            work if is_whole else Work(),
        )
        takes = {_CONTEXT: context} if _CONTEXT in signature_of(function).parameters else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters of them is said in our own words
            result = function(x, **values, **takes)
        found, coords = _refuse_unusable(result, name, n_fitted)
        used |= found
        state |= result.state
        if n_fitted < len(rows):
            place = place_of(function)
            assert place is not None
            there = np.flatnonzero(np.isfinite(coords).all(axis=1))
            fitted = Fitted(chosen.among(there), coords[there], {**values, **used}, result.state)
            whole = np.empty((len(rows), coords.shape[1]), np.float64)
            whole[fitted_at] = coords
            others = np.delete(np.arange(len(rows)), fitted_at)
            whole[others] = work.placed(reduced.among(others), place, fitted)
            coords = whole
        if start is not None:
            assert target is not None
            _refuse_other_dims(target, coords.shape[1])
            turn, shift = procrustes(coords[fitted_at], start)
            coords = coords @ turn + shift
            state |= {"align_rotation": turn, "align_shift": shift}
            used["align_to"] = str(target.attrs["id"])
        metric = metric_of(values)
        return _Made(
            coords, {**values, **used}, state, metric, None if which else graphs.get(metric)
        )

    return _Job(
        name,
        point,
        settings,
        at,
        rows,
        make,
        place=place_of(function) if n_fitted < len(rows) or function is pca else None,
        fitted_to=opened,
        reduces=pre_pca is not None or function is pca,
        beside="" if target is None else _content(target),
        code=_code_of(function) if "function" in settings else "",
    )


def _code_of(function: Callable[..., Any]) -> str:
    from embedx.fingerprints import value_sha256  # it takes torch, which our own methods do not

    return value_sha256(function)


# --------------------------------------------------------------------------- by other processes


class _Elsewhere(Work):
    """An engine does it, into files beside the map to be, which stay until that is written.

    Args:
        engine: It.
        path: The map to be.
        opened: Whose rows take part.
        job: What is made.
        again: How to go on, in words; None where that begins anew.
    """

    def __init__(
        self, engine: Engine, path: Path, opened: Embeddings, job: _Job, *, again: str | None
    ) -> None:
        self._engine = engine
        self._again = again
        self._path = path
        self._settings = {
            "embeddings": str(opened.path.resolve()),
            **opened.parentage,
            "layer": job.layer,
            "fitted_to": str(job.fitted_to.path.resolve()),
            "fitted_to_rows": job.fitted_to.parentage["parent_rows"],
            "place": "" if job.place is None else _name_of(job.place),
        }

    @staticmethod
    def remove(path: Path) -> None:
        """Take away what was left beside a map."""
        for kind in ("moments", "places"):
            if unfinished.parts_id(_beside(path, kind)) is not None:
                unfinished.remove_parts(_beside(path, kind))

    def moments(self, rows: Matrix) -> Iterator[Moments]:
        ranges = moment_parts(rows)
        parts = self._made("moments", rows, {}, n=len(ranges))
        for number in range(parts.n):
            arrays, said = parts.read(number)
            found = Moments(0)
            found.n, found.mean, found.scatter = said["n"], arrays["mean"], arrays["scatter"]
            yield found

    def placed(
        self, rows: Matrix, place: Place, fitted: Fitted, *, dtype: type = np.float64
    ) -> Array:
        arrays = {f"state/{name}": np.asarray(array) for name, array in fitted.state.items()}
        arrays["coords"] = fitted.coords
        arrays |= _along(fitted.rows, "fitted_")
        if fitted.rows.chosen is not None:
            arrays["fitted"] = fitted.rows.chosen
        blocks = list(rows.blocks())
        parts = self._made(
            "places", rows, arrays, n=len(blocks), parameters=dict(fitted.parameters)
        )
        coords: Array = np.empty((len(rows), fitted.coords.shape[1]), dtype)
        for number, block in enumerate(blocks):
            with np.errstate(over="ignore"):
                coords[block] = parts.read(number)[0]["coords"]
        return coords

    def _made(
        self, kind: str, rows: Matrix, shared: Mapping[str, Array], *, n: int, **more: Any
    ) -> ArrayParts:
        """Have parts of some rows made."""
        shared = {**shared, "left_out": rows.left_out(), **_along(rows)}
        block = rows.block_rows
        asked = {"kind": kind, "n": n, "block": block, "n_rows": len(rows), **more}
        # A fit may end otherwise each time, so that what it holds tells its parts from others.
        content = hashlib.sha256(json.dumps({**self._settings, **asked}, sort_keys=True).encode())
        for name, array in sorted(shared.items()):
            content.update(f"{name} {array.dtype} {array.shape}".encode())
            content.update(array.tobytes())
        asked["of"] = content.hexdigest()
        parts = ArrayParts(_beside(self._path, kind), of=asked["of"], n=n)
        parts.begin(shared)
        asked["path"] = str(self._path.resolve())
        self._engine.task = Task(f"{__name__}:make_parts", {**self._settings, **asked}, "cpu")
        parts.make(self._engine, about={}, what=kind, again=self._again)
        return parts


def make_parts(settings: dict[str, Any], feed: Feed) -> None:
    """Make parts of a map, in a worker of an engine: moments of rows, or places of them.

    Args:
        settings: What the driver gave to its task.
        feed: Which parts.

    Raises:
        DataError: The map takes no such rows.
        StoreError: The embeddings are not those of the driver, or there is no space.
    """
    opened = store.open(settings["embeddings"])
    if not opened.is_parent_of(settings):
        raise StoreError(
            f"{opened.path} has id {short(str(opened.attrs['id']), most=12)} here, and "
            f"{short(settings['parent'], most=12)} where the command was given, or other rows; "
            "give all processes the same files"
        )
    matrix = opened.rows(settings["layer"])[1]
    path = _beside(Path(settings["path"]), settings["kind"])
    parts = ArrayParts(path, of=settings["of"], n=settings["n"])
    shared, block, n_rows = parts.shared(), settings["block"], settings["n_rows"]

    whole = _in_axes(Matrix(matrix), shared)

    def rows_of(which: range) -> tuple[Matrix, range]:
        if not len(shared["left_out"]):  # without a list of rows they are read in long runs
            return whole, which
        some = Matrix(matrix, among_the_rest(shared["left_out"], which))
        return _in_axes(some, shared), range(len(some))

    if settings["kind"] == "moments":
        for number in feed:
            which = part_rows(number, n_parts=parts.n, n_rows=n_rows, block=block)
            found = moments_of(*rows_of(which), block=block)
            arrays = {"mean": found.mean, "scatter": found.scatter}
            parts.write(number, arrays, {"n": found.n})
        return
    place = _named(settings["place"])
    of_map = store.open(settings["fitted_to"]).rows(settings["layer"])[1]
    fitted = Fitted(
        _in_axes(Matrix(of_map, shared.get("fitted")), shared, "fitted_"),
        shared["coords"],
        settings["parameters"],
        {
            name.removeprefix("state/"): array
            for name, array in shared.items()
            if name.startswith("state/")
        },
    )
    for number in feed:
        rows, which = rows_of(range(number * block, min((number + 1) * block, n_rows)))
        coords = placed_block(rows[which.start : which.stop], place, fitted)
        parts.write(number, {"coords": np.asarray(coords, np.float64)}, {})


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.stem}.{kind}")


def _along(rows: Matrix, prefix: str = "") -> dict[str, Array]:
    """The coordinates that rows are given in, as arrays."""
    if rows.mean is None or rows.axes is None:
        return {}
    return {f"{prefix}mean": rows.mean, f"{prefix}axes": rows.axes}


def _in_axes(rows: Matrix, shared: Mapping[str, Array], prefix: str = "") -> Matrix:
    if f"{prefix}axes" not in shared:
        return rows
    return rows.along(mean=shared[f"{prefix}mean"], axes=shared[f"{prefix}axes"])


def _require_use(engine: Engine, job: _Job) -> None:
    """Refuse an engine that would have nothing to do, or cannot be told what.

    Raises:
        ConfigError: That is so.
    """
    if job.place is None and not job.reduces:
        raise ConfigError(
            f"engine has no use here: {job.name} is fitted to all rows at once, by this process; "
            "leave it out, or place most rows in the map of some: landmarks=N"
        )
    if job.place is not None:
        _name_of(job.place)


def _name_of(function: Callable[..., Any]) -> str:
    """The name by which another process finds a function."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or _found(sys.modules.get(module), name) is not function:
        raise ConfigError(
            f"engine: other processes cannot import {name}, which places rows; put it on the top "
            "level of a module of its own"
        )
    return f"{module}:{name}"


def _named(name: str) -> Callable[..., Any]:
    module, _, inner = name.partition(":")
    return _found(importlib.import_module(module), inner)  # type: ignore[no-any-return]


def _found(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


# --------------------------------------------------------------------------- beside other maps


def _projection_at(
    given: str | os.PathLike[str] | Projection, opened: Embeddings, *, key: str
) -> Projection:
    """A projection by its path, by its name beside the embeddings, or the only one of a run."""
    if isinstance(given, Projection):
        return given
    if Path(given).is_file():
        return derived.open_projection(given)
    if Path(given).is_dir():
        found = derived.projections_of(store.open(given))
    else:
        found = derived.projections_of(opened, [os.fspath(given)])
    if len(found) != 1:
        paths = ", ".join(str(projection.path) for projection in found)
        raise ConfigError(f"{key}={given} has {len(found)} maps; name one: {paths or 'none yet'}")
    return found[0]


def _shared(target: Projection, opened: Embeddings, at: Array) -> Array:
    """Where a map to align to has the rows with these indices: ``(k, m)``, NaN where it has not."""
    coords = places_in([opened.ids[row] for row in at.tolist()], target.coords, target.ids)
    n_shared = int(np.isfinite(coords).all(axis=1).sum())
    if n_shared <= coords.shape[1]:
        raise DataError(
            f"align_to={target.path} has {n_shared} samples in common with these embeddings, and "
            f"{coords.shape[1] + 1} are needed; choose a map of the same data"
        )
    if doubt := doubt_of_pairs(opened, _samples_of(target, opened)):
        log.warning("%s", doubt)
    return coords


def _samples_of(target: Projection, opened: Embeddings) -> Samples:
    """The embeddings of which a map is, by their id; of those that lie elsewhere but the ids."""
    parent = target.attrs["parent"]
    if opened.attrs["id"] == parent:
        return opened
    for folder in (target.path.parent.parent, target.path.parent):
        with contextlib.suppress(StoreError):
            found = store.open(folder)
            if found.attrs["id"] == parent:
                return found
    return OnlyIds(target.path, target.ids)


def _content(projection: Projection) -> str:
    """A hash of where a map has its rows and how it places others."""
    content = hashlib.sha256(projection.coords.tobytes())
    for name, array in sorted(projection.state.items()):
        content.update(name.encode() + array.tobytes())
    return content.hexdigest()


def _refuse_other_dims(target: Projection, m: Any) -> None:
    if m != target.coords.shape[1]:
        raise DataError(
            f"align_to={target.path} has {target.coords.shape[1]} dimensions and this map has "
            f"{m}; give both the same projection.n_components"
        )


def _placing(opened: Embeddings, source: Projection) -> _Job:
    """Check that the rows can be placed in a map of other embeddings."""
    name, layer = str(source.attrs["method"]), str(source.attrs["layer"])
    try:
        values = json.loads(str(source.attrs["settings"]))
    except (ValueError, KeyError, RecursionError):
        values = None
    place = place_of(METHODS[name]) if name in METHODS else None
    is_ours = isinstance(values, dict) and not {"function", "transform_from"} & values.keys()
    if place is None or not is_ours:
        raise DataError(
            f"transform_from={source.path}: rows can be placed in maps of {', '.join(METHODS)} "
            "that were fitted, and this is another; choose one of those"
        )
    if why := why_not_placed(METHODS[name], values):
        raise DataError(f"transform_from={source.path}: {why}")
    parent = _parent_of(source)
    if parent.attrs["id"] == opened.attrs["id"]:
        raise ConfigError(
            f"transform_from={source.path} is a map of these very embeddings, their rows are in it;"
            " name other embeddings"
        )
    _refuse_other_model(parent, opened, layer, source)
    _, at, rows = _usable(opened, layer)
    settings = {"method": name, "layer": layer, "transform_from": source.attrs["id"]}

    def make(work: Work) -> _Made:
        try:
            whole = _placed_in(source, parent, layer, rows, place, work)
        except DataError as error:
            raise DataError(f"transform_from={source.path} takes no rows: {error}") from None
        used = {key: source.attrs[key] for key in values if key in source.attrs}
        used["transform_from"] = source.attrs["id"]
        return _Made(whole, used, {}, metric_of(values), None)

    return _Job(
        name,
        layer,
        settings,
        at,
        rows,
        make,
        place=place,
        fitted_to=parent,
        beside=_content(source),
    )


def _placed_in(
    source: Projection, parent: Embeddings, layer: str, rows: Matrix, place: Place, work: Work
) -> Array:
    """Where rows go in a map that a file holds.

    Raises:
        DataError: What the file holds is not the state of such a map.
    """
    state, m = source.state, source.coords.shape[1]
    if len(source.coords) != parent.n_rows:
        raise DataError(
            f"it has {len(source.coords):,} rows, and its embeddings {parent.n_rows:,}; make that "
            "map again"
        )
    fitted_at = state.get("landmarks", np.arange(parent.n_rows))
    is_list = fitted_at.ndim == 1 and fitted_at.dtype.kind in "iu"
    if not is_list or ((fitted_at < 0) | (fitted_at >= parent.n_rows)).any():
        raise DataError("its state landmarks are no rows of its embeddings; make that map again")
    fitted_at = fitted_at[np.isfinite(source.coords[fitted_at]).all(axis=1)]
    if not len(fitted_at):
        raise DataError("no row has a place in it; make that map again")
    coords = source.coords[fitted_at].astype(np.float64)
    turn, shift = np.eye(m), np.zeros(m)
    if "align_rotation" in state:
        turn = state_array(state, "align_rotation", (m, m))
        shift = state_array(state, "align_shift", (m,))
    # As it was made: PCA places rows by its own axes.
    coords = (coords - shift) @ turn.T
    fitted = Matrix(parent.rows(layer)[1], fitted_at)
    if source.attrs["method"] != "pca" and m not in (2, 3):
        raise DataError(f"it has {m} dimensions, and maps of its method have 2 or 3")
    if "pre_components" in state:
        d = fitted.shape[1]
        n_axes = max(1, len(np.atleast_1d(state["pre_components"])))
        along = {
            "axes": state_array(state, "pre_components", (n_axes, d)).astype(np.float32),
            "mean": state_array(state, "pre_mean", (d,)).astype(np.float32),
        }
        fitted, rows = fitted.along(**along), rows.along(**along)
    return work.placed(rows, place, Fitted(fitted, coords, source.attrs, state)) @ turn + shift


def _parent_of(source: Projection) -> Embeddings:
    """The embeddings that a map was fitted to, which lie above or beside its file."""
    above = source.path.resolve().parent
    for folder in (above.parent, above):
        path = folder / store.EMBEDDINGS_NAME
        if store.are_there(path):
            parent = store.open(path)
            if parent.is_parent_of(source.attrs):
                return parent
    raise DataError(
        f"transform_from={source.path}: the embeddings that it was fitted to (id "
        f"{short(source.attrs['parent'], most=12)}) are needed, and are not at "
        f"{above.parent / store.EMBEDDINGS_NAME}; put the map's folder beside them"
    )


def _refuse_other_model(
    parent: Embeddings, opened: Embeddings, layer: str, source: Projection
) -> None:
    """Rows can be placed only among rows of the same space."""
    ours, theirs = opened.rows(layer)[1], parent.rows(layer)[1]
    if ours.shape[1] != theirs.shape[1]:
        raise DataError(
            f"transform_from={source.path} is a map of rows of {theirs.shape[1]} dims, and {layer} "
            f"of {opened.path} has {ours.shape[1]}; extract with the same model and pooling"
        )
    mine, other = (
        {**file.point_attrs[layer], **space_of(file.identity, layer)} for file in (opened, parent)
    )
    if unknown := untold(mine, other):
        log.warning("%s", unknown)
    for key in mine:
        if key in other and mine[key] != other[key]:
            raise DataError(
                f"transform_from={source.path} is a map of rows with {key} "
                f"{short(str(other[key]), most=60)}, and {opened.path} has "
                f"{short(str(mine[key]), most=60)}; extract both with the same"
            )


# --------------------------------------------------------------------------- values


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
    return {key: _plain(value) for key, value in values.items() if key != _CONTEXT}


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
