"""The stage ``evaluate``: how far to believe embeddings and their maps."""

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embedx import derived, ready_made
from embedx.align import doubt_of_pairs, shared_rows
from embedx.checks import checked
from embedx.derived import Projection
from embedx.disk import replace_file
from embedx.errors import DataError, number_of, short
from embedx.matrix import Array, Matrix
from embedx.neighbors import layer_graph, metric_of
from embedx.ready_made import Given
from embedx.scores import (
    RECALL_KS,
    SCORED_K,
    WHOLE_ROWS,
    cka_matrix,
    embedding_quality,
    finite_rows,
    knn_accuracy,
    map_quality,
    n_measured,
)
from embedx.store import Embeddings
from embedx.tables import EMBEDDINGS_HEADS, MAP_HEADS, aligned, figure, matrix, yardsticks

log = logging.getLogger("embedx")

_MAP_SCORES = (
    "trustworthiness",
    "continuity",
    *(f"knn_recall_{k}" for k in RECALL_KS),
    "distance_correlation",
    "stress",
    "trustworthiness_k",
    "scored_rows",
    "quality_metric",
)
_EPOCHS = 10  # compared with each other


@checked
def evaluate(
    embeddings: Given,
    *,
    projections: Sequence[str] | None = None,
    against: Sequence[str | os.PathLike[str]] | None = None,
) -> list[dict[str, Any]]:
    """Score embeddings and projections, as tables and as ``scores.json`` beside them.

    Args:
        embeddings: The file, its folder, or the opened file.
        projections: Names or paths of projections; all of them where not given.
        against: Files or folders of other runs: the linear CKA of each layer with each of theirs,
            on the rows that have the same ids.

    Returns:
        One dict a row of the tables: ``name``, ``kind`` (``embeddings``, or the method of a map),
        ``layer``, ``rows``, ``dims`` and ``knn_accuracy``. Further, None where it is not defined:
        of embeddings what :func:`embedx.scores.embedding_quality` gives; ``cka`` by the name of
        another layer, where there are several; ``cka_epochs``, where the rows are of several
        epochs, with up to ten ``epochs``, the ``matrix`` and its ``rows``; ``cka_against``, by the
        path of the other file from this one's folder, with its ``rows`` and the CKA by ``layers``.
        Of maps the scores of :func:`embedx.scores.map_quality`, as they are stored with the map;
        they are computed for a map that was made without.

    Raises:
        DataError: A run of ``against`` has fewer than two ids in common with this one.
        StoreError: A file is missing or damaged, or a projection belongs to other embeddings.
    """
    opened = ready_made.opened(embeddings)
    opened.require_there()
    maps = derived.projections_of(opened, projections)
    others = [(ready_made.opened(where), os.fspath(where)) for where in against or ()]
    shared = [_shared_rows(opened, other, where) for other, where in others]
    kept = {
        point: np.flatnonzero(opened.ok & finite_rows(rows))
        for point, rows in opened.embeddings.items()
    }
    table = [_embeddings_row(opened, point, rows) for point, rows in kept.items()]
    matrices: list[tuple[str, list[str], list[str], Array]] = []
    names = list(kept)
    if len(names) > 1:
        every = np.arange(opened.n_rows)
        between, n = _cka(opened, every, opened, every)
        matrices.append((f"CKA of layers, {n:,} rows", names, names, between))
        for row, values in zip(table, between, strict=True):
            row["cka"] = {
                name: _number(value)
                for name, value in zip(names, values, strict=True)
                if name != row["name"]
            }
    for row in table:
        if (epochs := _between_epochs(opened, row["name"])) is not None:
            row["cka_epochs"] = epochs
            heads = [str(epoch) for epoch in epochs["epochs"]]
            title = f"CKA of epochs, {row['name']}, {epochs['rows']:,} samples"
            matrices.append((title, heads, heads, np.array(epochs["matrix"], float)))
    for (other, where), (ours, theirs) in zip(others, shared, strict=True):
        between, n = _cka(opened, ours, other, theirs)
        title = f"CKA with {where}, {n:,} rows of the {len(ours):,} whose ids both have"
        matrices.append((title, names, list(other.embeddings), between))
        place = os.path.relpath(other.path, opened.path.parent)
        for row, values in zip(table, between, strict=True):
            layers = dict(zip(other.embeddings, map(_number, values), strict=True))
            row.setdefault("cka_against", {})[place] = {"rows": n, "layers": layers}
    embedded = list(table)
    for projection in maps:
        layer, _ = opened.rows(projection.attrs["layer"])
        table.append(_map_row(opened, projection, kept[layer]))
    path = opened.path.parent / "scores.json"
    text = json.dumps({**opened.parentage, "scores": table}, indent=2) + "\n"
    opened.require_there()
    replace_file(path, text.encode())
    lines = _table("embeddings", EMBEDDINGS_HEADS, embedded)
    lines += _map_tables(table[len(embedded) :], n_layers=len(names))
    for figures in matrices:
        lines += matrix(*figures, where="scores.json")
    for line in lines:
        log.info("%s", line)
    if opened.labels is None:
        log.info("there are no labels, so no accuracy, probe or silhouette")
    for row in table:
        if opened.labels is not None and opened.is_of_labels(str(row["layer"])):
            log.warning(
                "%s: gradients of the loss of the labels have these in them, so what is scored by "
                "labels (accuracy, probe, silhouette) says nothing of the model",
                row["name"],
            )
    for row in embedded:
        if row["linear_probe_converged"] == 0:
            log.info("the probe of %s did not converge: it may be better", row["name"])
    log.info("wrote %s", path)
    return table


# --------------------------------------------------------------------------- scores


def _embeddings_row(opened: Embeddings, point: str, kept: Array) -> dict[str, Any]:
    labels = None if opened.labels is None else opened.labels[kept]
    rows = Matrix(opened.embeddings[point], kept)
    return {
        "name": point,
        "kind": "embeddings",
        "layer": point,
        "rows": len(kept),
        "dims": int(rows.shape[1]),
        "trustworthiness": None,
        **embedding_quality(rows, labels),
    }


def _map_row(opened: Embeddings, projection: Projection, kept: Array) -> dict[str, Any]:
    placed = np.flatnonzero(np.isfinite(projection.coords).all(axis=1))
    coords = projection.coords[placed]
    labels = None if opened.labels is None else opened.labels[placed]
    scores: Mapping[str, Any] = projection.attrs
    if "quality_metric" not in scores:  # made before scores were stored with a map
        scores = _measured(opened, projection, kept)
    return {
        "name": projection.name,
        "kind": projection.attrs["method"],
        "layer": projection.attrs["layer"],
        "rows": len(placed),
        "dims": int(coords.shape[1]),
        "knn_accuracy": None if labels is None else knn_accuracy(coords, labels),
        **{name: _plain(scores.get(name)) for name in _MAP_SCORES},
    }


def _measured(opened: Embeddings, projection: Projection, kept: Array) -> Mapping[str, Any]:
    layer = projection.attrs["layer"]
    metric = metric_of(projection.attrs)
    rows = Matrix(opened.embeddings[layer], kept)
    placed = np.isfinite(projection.coords[kept]).all(axis=1)
    graph = None
    if placed.all() and 2 < len(kept) <= WHOLE_ROWS:
        k = min(SCORED_K, len(kept) - 1)
        graph = layer_graph(opened, layer, rows, n_neighbors=k, metric=metric)
    log.info("%s holds no scores: measuring them", projection.path)
    return map_quality(
        rows.among(np.flatnonzero(placed)),
        projection.coords[kept[placed]],
        metric=metric,
        graph=graph,
    ).scores


def _shared_rows(opened: Embeddings, other: Embeddings, where: str) -> tuple[Array, Array]:
    """The rows of both that have the same id, in the same order."""
    ours, theirs = shared_rows(opened.ids, other.ids)
    if len(ours) < 2:
        raise DataError(
            f"against={where} has {len(ours)} ids in common with {opened.path}, and CKA needs the "
            "same samples, 2 or more; name a run over the same data"
        )
    if doubt := doubt_of_pairs(opened, other):
        log.warning("%s", doubt)
    return ours, theirs


def _cka(opened: Embeddings, ours: Array, other: Embeddings, theirs: Array) -> tuple[Array, int]:
    """CKA ``(layers, layers of the other)`` on pairs of rows, and on how many of them."""
    usable = opened.ok[ours] & other.ok[theirs]
    pairs = ((opened, ours[usable]), (other, theirs[usable]))
    xs, ys = ([Matrix(rows, at) for rows in run.embeddings.values()] for run, at in pairs)
    return cka_matrix(xs, None if opened is other else ys), n_measured([*xs, *ys])


def _between_epochs(opened: Embeddings, point: str) -> dict[str, Any] | None:
    """CKA of up to ten of the epochs of a recording, on the samples that are in all of them."""
    epochs, samples = opened.metadata.get("epoch"), opened.metadata.get("sample")
    if not isinstance(epochs, np.ndarray) or samples is None:
        return None
    usable = opened.ok & finite_rows(opened.embeddings[point])
    usable &= np.isfinite(epochs) if epochs.dtype.kind == "f" else True
    found = np.unique(epochs[usable])
    if len(found) < 2:
        return None
    spread = np.linspace(0, len(found) - 1, min(len(found), _EPOCHS)).round().astype(int)
    chosen = found[spread]
    names = np.asarray(samples)
    at = [np.flatnonzero(usable & (epochs == epoch)) for epoch in chosen]
    counts = [Counter(names[rows].tolist()) for rows in at]
    several = {name for count in counts for name, n in count.items() if n > 1}
    if several:
        log.warning(
            "CKA of epochs, %s, leaves out %s that an epoch has more than once, as %s",
            *(point, number_of(len(several), "sample", "samples"), short(repr(min(several)))),
        )
    common = set.intersection(*map(set, counts)) - several
    at = [rows[np.isin(names[rows], list(common))] for rows in at]
    at = [rows[np.argsort(names[rows], kind="stable")] for rows in at]
    between = cka_matrix([Matrix(opened.embeddings[point], rows) for rows in at])
    return {
        "epochs": chosen.tolist(),
        "rows": len(common),
        "matrix": [[_number(value) for value in row] for row in between],
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


# --------------------------------------------------------------------------- tables


def _table(title: str, heads: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [[row["name"], *(figure(key, row[key]) for key in heads)] for row in rows]
    return aligned([[title, *heads.values()], *cells])


def _map_tables(rows: Sequence[Mapping[str, Any]], *, n_layers: int) -> list[str]:
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        if n_layers > 1:
            lines.append(f"of {layer}:")
        lines += _table("maps", MAP_HEADS, [row for row in rows if row["layer"] == layer])
    return [*lines, *yardsticks(rows)]
