"""The stage ``neighbors``: rows that resemble a query, and rows that look wrong among theirs."""

import dataclasses
import hashlib
import heapq
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embedx import derived, figures, layout, ready_made, store
from embedx.align import SPACE, space_of, untold
from embedx.checks import checked
from embedx.configs import settings_sha256
from embedx.disk import replace_file
from embedx.errors import ConfigError, DataError, StoreError, listed, nearest, short
from embedx.figures import Tile
from embedx.layout import Status
from embedx.matrix import Array
from embedx.neighbors import EXACT_ROWS, Graph, Metric, layer_graph, nearest_rows
from embedx.ready_made import Given
from embedx.store import Embeddings
from embedx.tables import aligned, as_csv

log = logging.getLogger("embedx")

Find = Literal["all", "duplicates", "outliers", "labels"]
Row = dict[str, Any]

PRINTED = 10
TILES_MOST = 11
# Half as far as usual: cosine distance grows with the square of the angle.
NEAR_SHARE = {"cosine": 0.25, "euclidean": 0.5}
ODD_FROM = 3.5
_HDF5 = b"\x89HDF\r\n\x1a\n"
_LINKS_MOST = 2**24


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a search gives.

    Attributes:
        tables: A list of rows by the name of the table: ``duplicates``, ``outliers`` and
            ``labels``, or ``neighbors`` of a query. Each row is a dict of plain values.
        about: ``parent``, ``layer``, ``metric``, ``n_neighbors``, how many ``rows`` were searched
            and ``left_out``, and the figures that are printed above each table.
        paths: The files written.
    """

    tables: dict[str, list[Row]]
    about: dict[str, Any]
    paths: list[Path]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a point that can be searched, by their numbers in the file."""

    opened: Embeddings
    point: str
    numbers: Array
    x: Array
    labels: list[str] | None

    def id(self, i: int) -> str:
        return self.opened.ids[int(self.numbers[i])]

    def label(self, i: int) -> str | None:
        return None if self.labels is None else self.labels[int(self.numbers[i])]

    def named(self, i: int) -> Row:
        """Row, id and, where there are labels, label."""
        label = {} if self.labels is None else {"label": self.label(i)}
        return {"row": int(self.numbers[i]), "id": self.id(i), **label}

    def tile(self, i: int, *texts: str, marked: bool = False) -> Tile:
        assert self.opened.thumbnails is not None
        picture = self.opened.thumbnails[int(self.numbers[i])]
        return Tile(picture, _caption(self.id(i), self.label(i), *texts), marked)


@checked
def search(
    embeddings: Given,
    *,
    query: str | int | os.PathLike[str] | Embeddings | None = None,
    find: Find = "all",
    layer: str | None = None,
    metric: Metric = "cosine",
    n_neighbors: int = 10,
    threshold: float | None = None,
    sheet: int = 20,
    out: str | os.PathLike[str] | None = None,
) -> Findings:
    """Find the rows nearest to a query, or without one duplicates, outliers and doubtful labels.

    Each table is printed in short, and written whole as CSV and as JSON, with a sheet of pictures
    where the file has thumbnails. A cell that a spreadsheet would take for a formula, which begins
    with one of ``= + - @``, begins with ``'`` in the CSV; the JSON has the text as it is.

    *Duplicates* are groups of rows that are equal in every number (``exact``), or linked by pairs
    closer than ``threshold`` (``near``). The *outlier* score of a row is its mean distance to its
    nearest rows; suspect is one whose modified z-score, of the logarithms, exceeds 3.5. A *label*
    is suspect where another one has a larger share among the nearest rows than the row's own, and
    at least the share that rows of that label have of their own label in the mean.

    Args:
        embeddings: The file, its folder, or the opened file.
        query: The id or the number of a row, or other embeddings of the same model (a file, a
            folder, or opened); on the command line also a picture, which is run through the model
            that made the file. Null examines the whole file.
        find: What to look for without a query: ``duplicates``, ``outliers``, ``labels``, or
            ``all``.
        layer: Capture point; the first of the file where not given.
        metric: ``cosine`` (1 - cosine similarity), or ``euclidean``.
        n_neighbors: How many nearest rows are shown of a query, or make a row's score.
        threshold: Distance below which rows are near duplicates; where not given, 0.25 (of
            euclidean distances 0.5) times the median distance to the nearest row.
        sheet: Lines of a sheet of pictures, 0 for no sheet.
        out: Folder for tables and sheets; ``neighbors`` beside the embeddings where not given.

    Returns:
        The tables.

    Raises:
        ConfigError: A number is out of its range, or the query is nothing that can be found.
        DataError: Too few rows, or there are no labels for ``find=labels``.
        DependencyError: The ``viz`` extra is not installed, which sheets need.
        StoreError: A file is missing or damaged, no file of the same model, or there is no space.

    References:
        Outliers: Angiulli, Pizzuti 2002, PKDD, LNCS 2431, after Ramaswamy, Rastogi, Shim 2000,
        SIGMOD; cut off by Iglewicz, Hoaglin 1993, How to Detect and Handle Outliers. Labels: the
        confident joint of Northcutt, Jiang, Chuang 2021, JAIR 70, with shares among neighbours for
        probabilities.
    """
    opened = ready_made.opened(embeddings)
    if n_neighbors < 1:
        raise ConfigError(f"n_neighbors must be at least 1, not {n_neighbors}")
    if threshold is not None and not 0 <= threshold < float("inf"):
        raise ConfigError(f"threshold must be a distance, 0 or more, not {threshold}")
    if sheet < 0:
        raise ConfigError(f"sheet must be 0 or more lines, not {sheet}")
    if query is not None and find != "all":
        raise ConfigError(f"find={find} looks through the whole file; leave out find or query")
    if query is not None and threshold is not None:
        raise ConfigError(f"threshold={threshold} is for duplicates; leave out threshold or query")
    if sheet and opened.thumbnails is not None:
        figures.require("a sheet of pictures (sheet=0 leaves it out)")
    rows = _searchable(opened, layer)
    if metric == "cosine" and (n_zero := int((~rows.x.any(axis=1)).sum())):
        log.warning("%s rows are all zeros: by cosine they are at distance 1 from all", n_zero)
    folder = Path(out) if out else opened.path.parent / "neighbors"
    writer = _Writer(
        folder=folder,
        about={
            **opened.parentage,
            "layer": rows.point,
            "metric": metric,
            "n_neighbors": n_neighbors,
            "rows": len(rows.x),
            "left_out": opened.n_rows - len(rows.x),
        },
        is_labelled=rows.labels is not None,
        n_lines=sheet,
        title=f"{opened.attrs.get('model', '')} on {opened.attrs.get('data', '')}, layer "
        f"{rows.point}, {metric} distance",
    )
    with opened.staying():
        if query is not None:
            return _answer(
                rows, _Query.of(rows, query), writer, n_neighbors=n_neighbors, metric=metric
            )
        usual = next(iter(opened.embeddings)), "cosine", 10, None
        settings = rows.point, metric, n_neighbors, threshold
        suffix = "" if settings == usual else f"-{settings_sha256({'of': settings})[:6]}"
        return _examine(
            rows,
            writer,
            find=find,
            n_neighbors=n_neighbors,
            metric=metric,
            threshold=threshold,
            suffix=suffix,
        )


def _searchable(opened: Embeddings, layer: str | None) -> _Rows:
    """The rows of a layer that hold finite numbers."""
    point, stored = opened.rows(layer)
    with np.errstate(over="ignore"):  # what is beyond float32 is left out
        x = np.asarray(stored, dtype=np.float32)
    finite = np.isfinite(x).all(axis=1)
    kept = opened.ok & finite
    if n_failed := int((~opened.ok).sum()):
        log.info("%s rows failed and are left out", f"{n_failed:,}")
    if n_bad := int((opened.ok & ~finite).sum()):
        log.info("%s rows hold a number that is not finite and are left out", f"{n_bad:,}")
    if not kept.any():
        raise DataError(f"{opened.path} has no row of {opened.n_rows:,} that can be searched")
    labels = opened.label_texts()
    labels = labels if labels is not None and any(labels) else None
    return _Rows(opened, point, np.flatnonzero(kept), x if kept.all() else x[kept], labels)


# --------------------------------------------------------------------------- the whole file


def _examine(
    rows: _Rows,
    writer: "_Writer",
    *,
    find: Find,
    n_neighbors: int,
    metric: Metric,
    threshold: float | None,
    suffix: str,
) -> Findings:
    opened, n, k = rows.opened, len(rows.x), n_neighbors
    if find == "labels" and rows.labels is None:
        raise DataError(
            f"{opened.path} has no labels, so find=labels finds nothing; choose find=duplicates "
            "or find=outliers, or extract with data.labels=..."
        )
    if n < 2:
        raise DataError(f"{opened.path} has one row that can be searched; extract more samples")
    if k >= n:
        raise ConfigError(
            f"n_neighbors={k} needs more than {k} rows, and {opened.path} has {n} that can be "
            f"searched; choose at most n_neighbors={n - 1}"
        )
    log.info(
        "examining %s of %s: %s rows of %s dims by their %s nearest, %s distance",
        *(rows.point, opened.path, f"{n:,}", rows.x.shape[1], k, metric),
    )
    graph = layer_graph(opened, rows.point, rows.x, n_neighbors=k, metric=metric)
    writer.about.update(exact=graph.exact, recall=graph.recall)
    if find in ("all", "duplicates"):
        _duplicates(rows, graph, writer, threshold=threshold, suffix=suffix)
    if find in ("all", "outliers"):
        _outliers(rows, graph, writer, suffix=suffix)
    if find in ("all", "labels"):
        if rows.labels is None:
            log.info("labels: there are none to check")
        else:
            _labels(rows, graph, writer, suffix=suffix)
    return writer.findings()


def _duplicates(
    rows: _Rows, graph: Graph, writer: "_Writer", *, threshold: float | None, suffix: str
) -> None:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(rows.x)
    first = _first_equal(rows.x)
    n_equal = np.bincount(first, minlength=n)[first]
    alone = graph.distances[n_equal == 1, 0]
    rule = "as asked for"
    if threshold is None:
        share = NEAR_SHARE[graph.metric]
        threshold = share * float(np.median(alone)) if len(alone) else 0.0
        rule = f"{share} x the median distance to the nearest row"
    start, slot = np.nonzero(graph.distances < threshold)
    one, other_one = _links_beyond(rows.x, graph, first, threshold)
    links = (
        np.concatenate([start, np.arange(n), one]),
        np.concatenate([graph.indices[start, slot], first, other_one]),
    )
    linked = coo_array((np.ones(len(links[0]), np.int8), links), shape=(n, n))
    _, component = connected_components(linked, directed=False)
    members: dict[int, list[int]] = {}
    for i in np.flatnonzero(np.bincount(component)[component] > 1).tolist():
        members.setdefault(int(component[i]), []).append(i)

    def partner(i: int) -> tuple[int, float]:
        """The nearest other row of its group."""
        if n_equal[i] == 1:
            return int(graph.indices[i, 0]), float(graph.distances[i, 0])
        return next(j for j in members[int(component[i])] if j != i and first[j] == first[i]), 0.0

    def differ(group: Sequence[int]) -> bool:
        return len({rows.label(i) for i in group} - {""}) > 1

    groups = sorted(
        members.values(),
        key=lambda group: (not differ(group), min(partner(i)[1] for i in group), group[0]),
    )
    differing = [differ(group) for group in groups]
    table: list[Row] = []
    for number, group in enumerate(groups, start=1):
        with_labels = {} if rows.labels is None else {"labels_differ": differing[number - 1]}
        for i in group:
            other, distance = partner(i)
            kind = "exact" if n_equal[i] > 1 else "near"
            about = {"rows_in_group": len(group), "nearest": rows.id(other)}
            about["distance"] = _figure(distance)
            table.append({"group": number, "kind": kind, **rows.named(i), **about, **with_labels})
    kinds = [row["kind"] for row in table]
    counts = {
        "near_below": _figure(threshold),
        "groups": len(groups),
        "exact_rows": kinds.count("exact"),
        "near_rows": kinds.count("near"),
        "groups_whose_labels_differ": sum(differing),
    }
    log.info(
        "duplicates: %s groups, of %s exact copies and %s near ones (closer than %s: %s)",
        *(f"{len(groups):,}", f"{kinds.count('exact'):,}", f"{kinds.count('near'):,}"),
        *(f"{threshold:.4g}", rule),
    )
    if counts["groups_whose_labels_differ"]:
        log.info("in %s of the groups the labels differ", counts["groups_whose_labels_differ"])

    def line(group: list[int]) -> list[Tile]:
        rest = len(group) - TILES_MOST
        more = [f"and {rest} more"] if rest > 0 else []
        is_marked = differ(group)
        tiles = [
            rows.tile(i, _text(partner(i)[1]) if n_equal[i] == 1 else "copy", marked=is_marked)
            for i in group[:TILES_MOST]
        ]
        return [*tiles[:-1], tiles[-1]._replace(caption=[*tiles[-1].caption, *more])]

    shown = ("id", "label", "kind", "group", "distance")
    writer.write(
        f"duplicates{suffix}",
        table,
        table,
        shown,
        counts,
        _sheet_of(rows, groups, line),
        about="a group a line; red where its labels differ",
    )


def _links_beyond(x: Array, graph: Graph, first: Array, threshold: float) -> tuple[Array, Array]:
    """Pairs closer than ``threshold`` of rows all of whose neighbours in the graph are so near.

    They may have further ones, as where a picture is there more often than a row has neighbours.

    Args:
        x: Shape ``(n, d)``.
        graph: Of them.
        first: For each row the number of the first one that equals it, shape ``(n,)``.
        threshold: A distance.
    """
    unique = np.unique(first)
    cut = unique[graph.distances[unique, -1] < threshold]
    k = graph.distances.shape[1]  # copies among them
    links: list[tuple[Array, Array]] = [(np.empty(0, np.int64),) * 2]
    are_all = len(unique) < 2
    while len(cut) and not are_all:
        k = min(4 * k, len(unique))
        are_all = k == len(unique)
        if len(cut) * len(unique) > EXACT_ROWS**2 or len(cut) * k > _LINKS_MOST:
            log.warning(
                "duplicates: %s rows have more rows that are closer than %s than were looked at: "
                "what is told as several groups may be one; choose a smaller threshold, or a "
                "larger n_neighbors",
                *(f"{len(cut):,}", f"{threshold:.4g}"),
            )
            break
        indices, distances = nearest_rows(x[cut], x[unique], n_neighbors=k, metric=graph.metric)
        start, slot = np.nonzero(distances < threshold)
        links.append((cut[start], unique[indices[start, slot]]))
        cut = cut[distances[:, -1] < threshold]
    ones, others = zip(*links, strict=True)
    return np.concatenate(ones), np.concatenate(others)


def _first_equal(x: Array) -> Array:
    """For each row the number of the first one that equals it, shape ``(n,)``."""
    first: dict[bytes, int] = {}
    found = np.empty(len(x), np.int64)
    for i, row in enumerate(x):
        # Adding 0 makes 0.0 of -0.0, which equals it.
        digest = hashlib.blake2b((row + 0.0).tobytes(), digest_size=16).digest()
        found[i] = first.setdefault(digest, i)
    return found


def _outliers(rows: _Rows, graph: Graph, writer: "_Writer", *, suffix: str) -> None:
    score = graph.distances.mean(axis=1, dtype=np.float64)
    placed = score > 0  # the others equal all their neighbours
    z = np.full(len(score), -np.inf)
    spread = 0.0
    if placed.any():
        logs = np.log(score[placed])
        away = logs - np.median(logs)
        spread = float(np.median(np.abs(away)))
        if spread > 0:
            z[placed] = 0.6745 * away / spread
    order = np.lexsort((-score, -z))
    table = [
        {
            **rows.named(i),
            "score": _figure(score[i]),
            "z": _figure(z[i]) if np.isfinite(z[i]) else None,
            "suspect": bool(z[i] > ODD_FROM),
            "nearest": rows.id(int(graph.indices[i, 0])),
        }
        for i in order.tolist()
    ]
    suspects = order[z[order] > ODD_FROM].tolist()
    log.info(
        "outliers: %s of %s rows (mean distance to their %s nearest, z above %s)",
        *(f"{len(suspects):,}", f"{len(score):,}", graph.indices.shape[1], ODD_FROM),
    )
    if spread == 0:
        log.info("the rows are all about as far from their nearest, so no z can be given")

    def line(i: int) -> list[Tile]:
        around = _around(rows, graph, i, marked=lambda j: False)
        return [rows.tile(i, f"score {_text(score[i])}"), *around]

    shown = ("id", "label", "nearest", "score", "z")
    writer.write(
        f"outliers{suffix}",
        table,
        table[: len(suspects)],
        shown,
        {"suspects": len(suspects)},
        _sheet_of(rows, suspects, line),
        about="outliers, each with its nearest rows",
    )


def _labels(rows: _Rows, graph: Graph, writer: "_Writer", *, suffix: str) -> None:
    assert rows.labels is not None
    assert rows.opened.labels is not None
    if rows.opened.is_of_labels(rows.point):
        log.warning(
            "labels: gradients of the loss of the labels have these in them, so that wrong ones "
            "are not found; take another layer, or gradients of objective=predicted"
        )
    labels = rows.opened.labels[rows.numbers]
    if len(classes := np.unique(labels[labels >= 0])) < 2:
        log.info("labels: there is only one, so none can be wrong")
        return
    own, best, best_share = _shares(labels, graph.indices, classes)
    measured = np.flatnonzero(np.isfinite(own))
    suspect = best_share > 0
    order = measured[
        np.lexsort((graph.distances[measured, 0], (own - best_share)[measured], ~suspect[measured]))
    ].tolist()
    names = dict(zip(labels.tolist(), (rows.label(i) for i in range(len(labels))), strict=True))
    table = [
        {
            **rows.named(i),
            "share": _figure(own[i]),
            "suggested": names[int(best[i])] if suspect[i] else None,
            "suggested_share": _figure(best_share[i]) if suspect[i] else None,
            "suspect": bool(suspect[i]),
            "nearest": rows.id(int(graph.indices[i, 0])),
        }
        for i in order
    ]
    suspects = order[: int(suspect[order].sum())]
    n_outvoted = int((own[measured] < 0.5).sum())
    counts = {
        "suspects": len(suspects),
        "measured": len(measured),
        "outvoted": n_outvoted,
        "mean_share": _figure(own[measured].mean()) if len(measured) else None,
    }
    log.info(
        "labels: %s of %s rows look mislabelled (%s have another label than most of their nearest)",
        *(f"{len(suspects):,}", f"{len(measured):,}", f"{n_outvoted:,}"),
    )
    k = graph.indices.shape[1]
    small = [names[int(c)] for c in classes if (labels == c).sum() <= k // 2]
    if small:
        log.info(
            "%s labels have no more than %s rows, too few to tell: %s",
            *(len(small), k // 2, listed([short(str(name), most=30) for name in small])),
        )

    def line(i: int) -> list[Tile]:
        around = _around(rows, graph, i, marked=lambda j: labels[j] not in (labels[i], -1))
        text = f"rather {names[int(best[i])]}: {best_share[i]:.0%}"
        return [rows.tile(i, text), *around]

    shown = ("id", "label", "suggested", "share", "suggested_share")
    writer.write(
        f"labels{suffix}",
        table,
        table[: len(suspects)],
        shown,
        counts,
        _sheet_of(rows, suspects, line),
        about="doubtful labels, each with its nearest rows; red where theirs is another",
    )


def _shares(labels: Array, indices: Array, classes: Array) -> tuple[Array, Array, Array]:
    """What the neighbours of each row say of its label.

    Args:
        labels: Shape ``(n,)``, -1 for none.
        indices: Neighbours, shape ``(n, k)``.
        classes: The labels that occur, sorted.

    Returns:
        Shape ``(n,)`` each: the share of its own label among its neighbours with one (NaN where
        the row or all of them have none); the label that is rather its own; the share of that one
        (0 where there is none).
    """
    n, k = indices.shape
    own = np.full(n, np.nan)
    shares = np.zeros((n, k), np.float32)
    block = max(1, 2**24 // k**2)
    for at in range(0, n, block):
        around = labels[indices[at : at + block]]
        known = (around >= 0).sum(axis=1)
        # Of the label of each neighbour, how many of them have it.
        votes = (around[:, :, None] == around[:, None, :]).sum(axis=2) * (around >= 0)
        shares[at : at + block] = votes / np.maximum(known, 1)[:, None]
        mine = labels[at : at + block]
        share = (around == mine[:, None]).sum(axis=1) / np.maximum(known, 1)
        own[at : at + block] = np.where((mine >= 0) & (known > 0), share, np.nan)
    usual = np.full(len(classes), np.inf)
    for number, name in enumerate(classes.tolist()):
        of_class = own[(labels == name) & np.isfinite(own)]
        usual[number] = of_class.mean() if len(of_class) else np.inf
    around = labels[indices]
    needed = usual[np.searchsorted(classes, np.maximum(around, classes[0]))]
    may_be = (
        np.isfinite(own)[:, None]
        & (around >= 0)
        & (around != labels[:, None])
        & (shares >= needed - 1e-6)
        & (shares > own[:, None] + 1e-6)
    )
    candidates = np.where(may_be, shares, 0)
    slot = candidates.argmax(axis=1)  # of equal shares, the label of the nearest
    every = np.arange(n)
    return own, around[every, slot], candidates[every, slot].astype(np.float64)


def _around(rows: _Rows, graph: Graph, i: int, *, marked: Callable[[int], bool]) -> list[Tile]:
    pairs = zip(graph.indices[i].tolist(), graph.distances[i].tolist(), strict=True)
    return [
        rows.tile(j, _text(distance), marked=marked(j))
        for j, distance in list(pairs)[: TILES_MOST - 1]
    ]


# --------------------------------------------------------------------------- a query


@dataclasses.dataclass(frozen=True)
class _Query:
    """What is looked for.

    Attributes:
        name: In words.
        key: What tells it from other queries.
        ids: q texts.
        labels: q texts, or None.
        x: Shape ``(q, d)``.
        thumbnails: Shape ``(q, h, w, 3)``, or None.
        itself: Which of the searchable rows it is, or None.
    """

    name: str
    key: str
    ids: list[str]
    labels: list[str] | None
    x: Array
    thumbnails: Array | None
    itself: int | None

    @classmethod
    def of(cls, rows: _Rows, query: str | int | os.PathLike[str] | Embeddings) -> "_Query":
        if isinstance(query, Embeddings):
            return cls._of_embeddings(rows, query)
        if (number := row_of(rows.opened, query)) is not None:
            return cls._of_row(rows, number)
        path = Path(query if not isinstance(query, int) else str(query)).expanduser()
        if path.is_dir() or is_hdf5(path):
            return cls._of_embeddings(rows, store.open(path))
        if path.is_file():
            raise ConfigError(
                f"query={short(str(path))} is no file of embeddings; run it through the model of "
                f"{rows.opened.path} first (embedx.extract), and give what that returns; on the "
                "command line a picture can be named itself"
            )
        like = _ids_like(str(query), rows.opened.ids)
        raise ConfigError(
            f"query={short(str(query))!r} is no id of {rows.opened.path}, no row number below "
            f"{rows.opened.n_rows}, and no file; the nearest ids are "
            + ", ".join(short(name, most=60) for name in like)
        )

    @classmethod
    def _of_row(cls, rows: _Rows, number: int) -> "_Query":
        opened = rows.opened
        itself = int(np.searchsorted(rows.numbers, number))
        if itself == len(rows.numbers) or rows.numbers[itself] != number:
            failed = opened.status[number] == Status.FAILED
            why = "failed" if failed else "holds a number that is not finite"
            raise DataError(
                f"row {number} ({short(opened.ids[number])}) of {opened.path} {why}, so nothing is "
                "near it; name another row"
            )
        tiles = opened.thumbnails
        return cls(
            name=f"row {number}, {opened.ids[number]}",
            key=f"row {number}",
            ids=[opened.ids[number]],
            labels=None if rows.labels is None else [rows.labels[number]],
            x=rows.x[itself : itself + 1],
            thumbnails=None if tiles is None else tiles[number : number + 1],
            itself=itself,
        )

    @classmethod
    def _of_embeddings(cls, rows: _Rows, other: Embeddings) -> "_Query":
        if other.attrs["id"] == rows.opened.attrs["id"]:
            raise ConfigError(
                f"query={other.path} holds the same rows as {rows.opened.path}; leave query out to "
                "examine them, or name one row"
            )
        if rows.point not in other.embeddings:
            raise StoreError(
                f"query={other.path} has no layer {rows.point!r}, as {rows.opened.path} has; it "
                f"holds {listed(other.embeddings)}; extract the same layer, or choose layer="
            )
        _refuse_another_model(rows, other)
        found = _searchable(other, rows.point)
        if found.x.shape[1] != rows.x.shape[1]:
            raise StoreError(
                f"query={other.path} has {found.x.shape[1]} dims and {rows.opened.path} has "
                f"{rows.x.shape[1]}; extract it by the same model and pooling"
            )
        tiles = other.thumbnails
        return cls(
            name=f"{len(found.x):,} rows of {other.path}" if len(found.x) > 1 else found.id(0),
            key=str(other.attrs["id"]),
            ids=[found.id(i) for i in range(len(found.x))],
            labels=None
            if found.labels is None
            else [found.labels[number] for number in found.numbers.tolist()],
            x=found.x,
            thumbnails=None if tiles is None else tiles[found.numbers],
            itself=None,
        )


def row_of(opened: Embeddings, query: str | int | os.PathLike[str]) -> int | None:
    """The row that a query names: by its id, or else by its number; None if it names none."""
    if isinstance(query, str) and query in opened.ids:
        return opened.ids.index(query)
    if isinstance(query, str) and not re.fullmatch(r"\d{1,18}", query, re.ASCII):
        return None
    if isinstance(query, os.PathLike):
        return None
    number = int(query)
    return number if 0 <= number < opened.n_rows else None


def is_hdf5(path: Path) -> bool:
    """Whether a file begins as those of HDF5 do."""
    try:
        with path.open("rb") as file:
            return file.read(len(_HDF5)) == _HDF5
    except OSError:
        return False


def _ids_like(query: str, ids: Sequence[str]) -> list[str]:
    """The ids spelled most like a query, out of those that begin and end most like it."""

    def alike(one: str, other: str) -> int:
        pairs = zip(one, other, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def ends_alike(name: str) -> int:
        return alike(query, name) + alike(query[::-1], name[::-1])

    # Similarity by letters takes a second for some thousand ids.
    return nearest(query, heapq.nlargest(200, ids, key=ends_alike))


def _refuse_another_model(rows: _Rows, other: Embeddings) -> None:
    """Refuse embeddings whose distances to these would mean nothing."""
    here, there = rows.opened.identity, other.identity
    where = f"query={other.path} cannot be compared with {rows.opened.path}"
    advice = "extract it by the model, weights and settings of that file"
    if not here or not there:
        log.warning(
            "%s does not say which weights made it: distances are taken at their word",
            rows.opened.path if not here else other.path,
        )
        return
    mine, its = (space_of(identity, rows.point) for identity in (here, there))
    for key in SPACE:
        if mine.get(key) != its.get(key):
            ours, theirs = _differing(mine.get(key), its.get(key))
            if key == "weights_sha256":
                ours, theirs = (
                    f"{short(str(file.attrs.get('weights')), most=40)}, {str(value.get(key))[:8]}"
                    for file, value in ((rows.opened, here), (other, there))
                )
            raise StoreError(f"{where}: {key} is {theirs} there and {ours} here; {advice}")
    if unknown := untold(mine, its):
        log.warning("%s: distances to rows of %s are taken as they are", unknown, other.path)
    for key in ("precision", "dtype"):
        if here.get(key) != there.get(key):
            log.warning(
                "%s is %s there and %s here: distances are as coarse as the coarser of them",
                *(key, there.get(key), here.get(key)),
            )


def _differing(ours: Any, theirs: Any) -> tuple[str, str]:
    """Two settings in short; of keys and values those that are not the same."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        ours, theirs = ({key: value.get(key) for key in keys} for value in (ours, theirs))
    return short(json.dumps(ours), most=60), short(json.dumps(theirs), most=60)


def _answer(
    rows: _Rows, query: _Query, writer: "_Writer", *, n_neighbors: int, metric: Metric
) -> Findings:
    n = len(rows.x) - (query.itself is not None)
    if n_neighbors > n:
        raise ConfigError(
            f"n_neighbors={n_neighbors} is more than the {n} rows of {rows.opened.path} that can "
            f"be found; choose at most n_neighbors={n}"
        )
    log.info(
        "the %s nearest to %s in %s of %s: %s rows of %s dims, %s distance",
        *(n_neighbors, short(query.name), rows.point, rows.opened.path),
        *(f"{len(rows.x):,}", rows.x.shape[1], metric),
    )
    extra = query.itself is not None  # a row finds itself, unless more rows equal it than asked for
    indices, distances = nearest_rows(
        query.x, rows.x, n_neighbors=n_neighbors + extra, metric=metric
    )
    if query.itself is not None:
        others = np.flatnonzero(indices[0] != query.itself)[:n_neighbors]
        indices, distances = indices[:, others], distances[:, others]
    table = []
    for q, name in enumerate(query.ids):
        asked = {"query": name}
        if query.labels is not None:
            asked["query_label"] = query.labels[q]
        pairs = zip(indices[q].tolist(), distances[q].tolist(), strict=True)
        for rank, (j, distance) in enumerate(pairs, start=1):
            found = {"rank": rank, **rows.named(j), "distance": _figure(distance)}
            table.append({**asked, **found})
    several = len(query.ids) > 1
    settings = [query.key, rows.point, metric, n_neighbors]
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(query.ids[0]).stem if not several else "rows")[:60]
    stem = f"query-{stem}-{settings_sha256({'of': settings})[:6]}"

    def line(q: int) -> list[Tile]:
        assert query.thumbnails is not None
        label = None if query.labels is None else query.labels[q]
        asked = Tile(query.thumbnails[q], _caption(query.ids[q], label, "query"))
        pairs = zip(indices[q].tolist(), distances[q].tolist(), strict=True)
        return [
            asked,
            *(rows.tile(j, _text(d)) for j, d in list(pairs)[: TILES_MOST - 1]),
        ]

    if several:
        log.info("%s queries; here the nearest row of each", f"{len(query.ids):,}")
    writer.write(
        stem,
        table,
        [row for row in table if row["rank"] == 1] if several else table,
        ("query", "id", "label", "distance") if several else ("id", "label", "rank", "distance"),
        {"query": query.name},
        None if query.thumbnails is None else _sheet_of(rows, list(range(len(query.ids))), line),
        about="queries on the left, their nearest rows beside them",
        name="neighbors",
    )
    return writer.findings()


# --------------------------------------------------------------------------- what is written


def _sheet_of(
    rows: _Rows, items: Sequence[Any], line: Callable[[Any], list[Tile]]
) -> tuple[Sequence[Any], Callable[[Any], list[Tile]]] | None:
    """The lines of a sheet, to be made as they are drawn; None without pictures."""
    return None if rows.opened.thumbnails is None else (items, line)


@dataclasses.dataclass
class _Writer:
    """Prints tables in short, and writes them whole."""

    folder: Path
    about: dict[str, Any]
    is_labelled: bool
    n_lines: int
    title: str
    tables: dict[str, list[Row]] = dataclasses.field(default_factory=dict)
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    paths: list[Path] = dataclasses.field(default_factory=list)

    def write(
        self,
        stem: str,
        table: list[Row],
        printed: list[Row],
        shown: Sequence[str],
        counts: Mapping[str, Any],
        lines: tuple[Sequence[Any], Callable[[Any], list[Tile]]] | None,
        *,
        about: str,
        name: str | None = None,
    ) -> None:
        """Print the first rows, and write CSV, JSON and a sheet.

        Args:
            stem: Of the files.
            table: All rows.
            printed: Those worth printing.
            shown: Columns to print, texts before figures.
            counts: Figures of this table.
            lines: What the sheet is made of; None without pictures.
            about: What the sheet shows.
            name: Of the table; the stem up to its hash where not given.
        """
        name = name or stem.partition("-")[0]
        self.tables[name], self.counts[name] = table, dict(counts)
        first = printed[:PRINTED]
        heads = [column for column in shown if first and column in first[0]]
        n_texts = sum(not isinstance(first[0][column], (int, float)) for column in heads)
        cells = [heads, *([_cell(row[column]) for column in heads] for row in first)]
        for text in aligned(cells, n_texts=n_texts):
            log.info("  %s", text)
        if len(printed) > PRINTED:
            log.info("  and %s more", f"{len(printed) - PRINTED:,}")
        self._refuse_foreign(stem)
        document = {"format": layout.FINDINGS_FORMAT, **self.about, **counts, "table": table}
        # A table without rows has its columns all the same.
        columns = list(table[0]) if table else _columns(name, is_labelled=self.is_labelled)
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        for suffix, data in (("json", text.encode()), ("csv", as_csv(table, columns))):
            self._wrote(replace_file(self.folder / f"{stem}.{suffix}", data))
        if lines is None:
            log.info("no pictures are stored in the file, so there is no sheet of them")
        elif self.n_lines and lines[0]:
            items, line = lines
            drawn = [line(item) for item in items[: self.n_lines]]
            of = f", {len(drawn)} of {len(items):,}" if len(items) > len(drawn) else ""
            figure = figures.sheet(drawn, title=f"{self.title}: {about}{of}")
            self._wrote(figures.save(figure, self.folder / f"{stem}.png"))

    def _wrote(self, path: Path) -> None:
        self.paths.append(path)
        log.info("wrote %s", path)

    def _refuse_foreign(self, stem: str) -> None:
        """Refuse to write over what is not a search of the same embeddings."""
        there = [
            path
            for suffix in ("json", "csv", "png")
            if (path := self.folder / f"{stem}.{suffix}").exists()
        ]
        if there and derived.findings_parent(self.folder / f"{stem}.json") != self.about["parent"]:
            raise StoreError(
                f"{there[0]} is not of these embeddings; choose another out=FOLDER, or remove it"
            )

    def findings(self) -> Findings:
        return Findings(self.tables, {**self.about, **self.counts}, self.paths)


def _columns(name: str, *, is_labelled: bool) -> list[str]:
    """The columns of a table that may be empty."""
    if name == "labels":
        return ["row", "id", "label", "share", "suggested", "suggested_share", "suspect", "nearest"]
    label, differ = (["label"], ["labels_differ"]) if is_labelled else ([], [])
    return ["group", "kind", "row", "id", *label, "rows_in_group", "nearest", "distance", *differ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return _text(value) if isinstance(value, float) else short(str(value), most=60)


def _figure(value: float) -> float:
    """A number with as many digits as mean something."""
    return float(f"{value:.6g}")


def _text(value: float) -> str:
    return f"{value:.4g}"


def _caption(name: str, label: str | None, *texts: str) -> list[str]:
    """What stands below a miniature; of a long id its end, which tells it from its neighbours."""
    end = name if len(name) <= 18 else f"...{name[-15:]}"
    return [end, *([] if label is None else [label or "(none)"]), *texts]
