"""The stage ``evaluate``: how far to believe embeddings and their maps."""

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from embedx import store
from embedx.checks import checked
from embedx.neighbors import knn_accuracy
from embedx.store import Embeddings

log = logging.getLogger("embedx")


@checked
def evaluate(
    embeddings: str | os.PathLike[str] | Embeddings, *, projections: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Score embeddings and projections, as a table and as ``scores.json`` beside them.

    Args:
        embeddings: The file, its folder, or the opened file.
        projections: Names or paths of projections; all of them where not given.

    Returns:
        One dict a row of the table: ``name``, ``kind``, ``layer``, ``rows``, ``dims``,
        ``knn_accuracy`` (5 neighbours, 5 stratified folds; None without labels) and
        ``trustworthiness`` (None for embeddings).

    Raises:
        StoreError: A file is missing or damaged, or a projection belongs to other embeddings.
    """
    opened = store.open(embeddings)
    maps = store.projections_of(opened, projections)
    labels = opened.labels
    table: list[dict[str, Any]] = []
    for point, rows in opened.embeddings.items():
        x = np.asarray(rows, dtype=np.float32)
        kept = opened.ok & np.isfinite(x).all(axis=1)
        score = _score(x[kept], None if labels is None else labels[kept])
        table.append({"name": point, "kind": "embeddings", "layer": point, **score})
    for projection in maps:
        placed = np.isfinite(projection.coords).all(axis=1)
        score = _score(projection.coords[placed], None if labels is None else labels[placed])
        score["trustworthiness"] = projection.attrs.get("trustworthiness")
        kind, layer = projection.attrs["method"], projection.attrs["layer"]
        table.append({"name": projection.name, "kind": kind, "layer": layer, **score})
    path = opened.path.parent / "scores.json"
    text = json.dumps({"parent": opened.attrs["id"], "scores": table}, indent=2) + "\n"
    store.replace_file(path, text.encode())
    width = max(len(row["name"]) for row in table)
    layer_width = max(len("layer"), *(len(row["layer"]) for row in table))
    heads = ("rows", "dims", "5-NN accuracy", "trustworthiness")
    log.info("%-*s  %-*s  %9s %6s  %13s  %15s", width, "", layer_width, "layer", *heads)
    for row in table:
        log.info(
            "%-*s  %-*s  %9s %6d  %13s  %15s",
            width,
            row["name"],
            layer_width,
            row["layer"],
            f"{row['rows']:,}",
            row["dims"],
            _figure(row["knn_accuracy"]),
            _figure(row["trustworthiness"]),
        )
    if opened.labels is None:
        log.info("there are no labels, so no accuracy")
    log.info("wrote %s", path)
    return table


def _score(x: store.Array, labels: store.Array | None) -> dict[str, Any]:
    return {
        "rows": len(x),
        "dims": int(x.shape[1]),
        "knn_accuracy": None if labels is None else knn_accuracy(x, labels),
        "trustworthiness": None,
    }


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
