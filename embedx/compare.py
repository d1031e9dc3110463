"""The stage ``compare``: several runs ranked in one table, their maps side by side."""

import dataclasses
import glob
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embedx import derived, figures, ready_made, store, unfinished
from embedx.align import doubt_of_pairs, places_in, procrustes, shared_rows
from embedx.checks import checked, signature_of
from embedx.configs import literal, read_settings
from embedx.derived import Projection
from embedx.disk import replace_file
from embedx.errors import ConfigError, DataError, StoreError, listed, nearest
from embedx.figures import as_labels, column_of, title_of
from embedx.matrix import Array, Matrix
from embedx.methods import METHODS
from embedx.panels import Panel, panels
from embedx.scores import (
    cka_matrix,
    embedding_quality,
    finite_rows,
    knn_accuracy,
    n_measured,
)
from embedx.store import Embeddings
from embedx.tables import EMBEDDINGS_HEADS, MAP_HEADS, aligned, as_csv, figure, matrix, yardsticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("embedx")

LOWER_IS_BETTER = ("stress", "anisotropy")
PANELS_ACROSS, MOST_ACROSS = 4, 6
MOST_EPOCHS = 12  # of one map
MOST_NAMED = 3  # settings in the name of a run
CKA_COMPUTED, CKA_SHOWN = 24, 12
_SCORES = [
    key for key in dict.fromkeys([*EMBEDDINGS_HEADS, *MAP_HEADS]) if key not in ("rows", "dims")
]
_COLUMNS = ["rank", "kind", "run", "layer", "map", "settings", "rows", "dims", *_SCORES]
_COLUMNS.append("quality_metric")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a comparison gives.

    Attributes:
        table: A dict a row: the embeddings of each run and layer, the best first, then the maps.
        cka: ``names`` of embeddings, the ``matrix`` of their CKA, None where it is not defined,
            and on how many ``rows`` it was measured, pair by pair; None where it was not.
        figure: The maps side by side; None where there are none.
        paths: The files written.
    """

    table: list[dict[str, Any]]
    cka: dict[str, Any] | None
    figure: "Figure | None"
    paths: list[Path]


@checked
def compare(
    runs: Sequence[str | os.PathLike[str] | Embeddings],
    *,
    projections: Sequence[str] | None = None,
    sort: str | None = None,
    color: str = "label",
    panels: int = 24,
    out: str | os.PathLike[str] = "outputs/compare",
) -> Comparison:
    """Rank several runs in one table, and draw their maps side by side.

    Scores are those that ``evaluate`` and ``project`` have stored; those of embeddings, and the
    accuracy of maps, are computed where they have not. The maps are turned and shifted onto the
    first one (orthogonal Procrustes over the samples that both have), without scaling. Of a
    recording each epoch has a panel.

    Args:
        runs: Files, their folders, opened files, or patterns such as ``outputs/*``, of which
            what is no finished run is passed over.
        projections: Names of projections, such as ``umap`` or ``umap-1a2b3c``; all of them where
            not given.
        sort: The score to rank by: ``knn_accuracy`` where there are labels and else
            ``trustworthiness`` where not given. Of ``stress`` and ``anisotropy`` less is better.
        color: Column to colour by: ``label``, one of the metadata or saved outputs, or ``none``;
            the same colours everywhere.
        panels: How many to draw at most; of more maps the best.
        out: Folder for ``compare.csv``, ``compare.json`` and ``compare.png``.

    Returns:
        The table, the CKA between the embeddings of samples that runs share, and the figure.

    Raises:
        ConfigError: There is no such score or column, or ``panels`` is less than 1.
        DataError: There is nothing to compare.
        DependencyError: There are maps, and the ``viz`` extra is not installed.
        StoreError: A file is missing or damaged, or there is no space.
    """
    if sort is not None and sort not in _SCORES:
        raise ConfigError(
            f"sort={sort} is no score; the nearest are {', '.join(nearest(sort, _SCORES))}, and "
            f"all are {', '.join(_SCORES)}"
        )
    if panels < 1:
        raise ConfigError(f"panels must be at least 1, not {panels}")
    opened = _opened(runs)
    maps = _maps(opened, projections)
    if maps:
        figures.require("compare")
        for i in {i for i, _ in maps}:
            column_of(opened[i], color)  # a wrong name is told before the work
    names = _names(opened)
    titles = _titles(opened, names)
    for run, name in zip(opened, names, strict=True):
        if str(run.attrs.get("weights", "")).startswith("random"):
            log.warning("%s has RANDOM weights", name)
    for i, run in enumerate(opened):  # each is paired with each, and one word of it is enough
        if doubt := next(filter(None, (doubt_of_pairs(one, run) for one in opened[:i])), ""):
            log.warning("%s", doubt)
    stored = [_stored_scores(run) for run in opened]
    embedded = [
        _embeddings_row(run, name, title if title != name else "", point, known)
        for run, name, title, known in zip(opened, names, titles, stored, strict=True)
        for point in run.embeddings
    ]
    about = _about(opened, titles, maps)
    mapped = [
        _map_row(opened[i], names[i], projection, ", ".join(settings))
        for (i, projection), settings in zip(maps, (one.settings for one in about), strict=True)
    ]
    usual = "knn_accuracy" if any(row["knn_accuracy"] is not None for row in embedded) else None
    lines = []
    ranked_by: dict[str, str | None] = {}
    for title, rows, heads in (
        ("embeddings", embedded, EMBEDDINGS_HEADS),
        ("maps", mapped, MAP_HEADS),
    ):
        by = sort if sort in heads else usual or ("trustworthiness" if rows is mapped else None)
        _rank(rows, by)
        ranked_by[title] = by
        named = rows
        if rows is mapped:  # with the run, as briefly as it can be told
            words = [", ".join([*one.head, *one.settings]) for one in about]
            named = [{**row, "settings": what} for row, what in zip(rows, words, strict=True)]
        lines += _table(title, sorted(named, key=_rank_of), heads, by)
    lines += yardsticks(mapped)
    if any(_is_supervised(_settings_of(projection)) for _, projection in maps):
        lines.append(
            "a map with supervised=true was made with the labels: its 5-NN, and a rank by that, "
            "say nothing of the model"
        )
    table = sorted(embedded, key=_rank_of) + sorted(mapped, key=_rank_of)
    cka = _cka(opened, names)
    if cka is not None and len(cka["names"]) <= CKA_SHOWN:
        values = np.array(cka["matrix"], float)
        lines += matrix("CKA", cka["names"], cka["names"], values, where="compare.json")
    for line in lines:
        log.info("%s", line)
    folder = Path(out)
    document = json.dumps({"ranked_by": ranked_by, "table": table, "cka": cka}, indent=2) + "\n"
    for name, mark in (("csv", as_csv([], _COLUMNS)), ("json", b'"ranked_by"')):
        derived.require_ours(folder / f"compare.{name}", mark.rstrip())
    paths = [
        replace_file(folder / "compare.csv", as_csv(table, _COLUMNS)),
        replace_file(folder / "compare.json", document.encode()),
    ]
    drawn = None
    if maps:
        drawn = _draw(opened, maps, mapped, about, color=color, most=panels)
        paths.append(figures.save(drawn, folder / "compare.png"))
    for path in paths:
        log.info("wrote %s", path)
    return Comparison(table, cka, drawn, paths)


# --------------------------------------------------------------------------- what there is


def _opened(runs: Sequence[str | os.PathLike[str] | Embeddings]) -> list[Embeddings]:
    found: dict[Path, Embeddings] = {}
    for run in runs:
        if isinstance(run, Embeddings):
            found.setdefault(run.path.resolve(), run)
            continue
        where = os.path.expanduser(run)
        is_pattern = glob.has_magic(where) and not os.path.exists(where)
        for path in sorted(glob.glob(where)) if is_pattern else [where]:
            try:
                opened = ready_made.opened(path)
            except StoreError as error:
                if not is_pattern:
                    raise
                if _was_begun(Path(path)):
                    log.warning("passed over: %s", error)
                continue
            if not opened.complete:
                raise DataError(f"{opened.path} is not finished; finish the extraction first")
            found.setdefault(opened.path.resolve(), opened)
    if not found:
        raise DataError(
            f"there is no finished run in {listed([str(run) for run in runs]) or '[]'}; make one "
            "with: python -m embedx extract model=resnet18, or name others: 'runs=[PATH,PATH]'"
        )
    return list(found.values())


def _was_begun(path: Path) -> bool:
    whole = path / store.EMBEDDINGS_NAME if path.is_dir() else path
    return (
        whole.exists()
        or unfinished.partial_path(whole).exists()
        or unfinished.parts_folder(whole).exists()
    )


def _maps(
    opened: Sequence[Embeddings], chosen: Sequence[str] | None
) -> list[tuple[int, Projection]]:
    """Each map with the number of its run: those chosen of all runs that have them."""
    maps: list[tuple[int, Projection]] = []
    if chosen is None:
        maps = [(i, found) for i, run in enumerate(opened) for found in derived.projections_of(run)]
    for name in chosen or ():
        errors = []
        for i, run in enumerate(opened):
            try:
                maps += [(i, found) for found in derived.projections_of(run, [name])]
            except StoreError as error:
                errors.append(error)
        if len(errors) == len(opened):
            raise errors[0]
        for reason in errors:
            log.info("passed over: %s", reason)
    once = {projection.path.resolve(): (i, projection) for i, projection in maps}
    return sorted(once.values(), key=lambda pair: pair[0])


def _stored_scores(run: Embeddings) -> dict[str, dict[str, Any]]:
    """What ``evaluate`` has written beside a run, by the name of the layer or the map."""
    try:
        document = json.loads((run.path.parent / "scores.json").read_text(encoding="utf-8"))
        if not run.is_parent_of(document):
            return {}
        return {str(row["name"]): row for row in document["scores"] if "rows" in row}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _score(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not -1e300 < value < 1e300:  # also an integer that no float holds, and NaN
        return None
    return float(value)


def _embeddings_row(
    run: Embeddings, name: str, told: str, point: str, stored: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    kept = np.flatnonzero(run.ok & finite_rows(run.embeddings[point]))
    rows = Matrix(run.embeddings[point], kept)
    scores = stored.get(point, {})
    if "anisotropy" not in scores:
        log.info("scoring %s of %s", point, run.path)
        scores = embedding_quality(rows, None if run.labels is None else run.labels[kept])
    about = {"kind": "embeddings", "run": name, "layer": point, "map": None, "settings": told}
    known = {key: _score(scores, key) for key in EMBEDDINGS_HEADS if key in _SCORES}
    sizes = {"rows": len(rows), "dims": int(rows.shape[1])}
    return {"rank": None, **about, "path": str(run.path), **sizes, **known}


def _map_row(
    run: Embeddings,
    name: str,
    projection: Projection,
    settings: str,
) -> dict[str, Any]:
    placed = np.isfinite(projection.coords).all(axis=1)
    scores = {key: _score(projection.attrs, key) for key in MAP_HEADS}
    if run.labels is not None:  # of a map that was made again what evaluate wrote may be old
        scores["knn_accuracy"] = knn_accuracy(projection.coords[placed], run.labels[placed])
    return {
        "rank": None,
        "kind": str(projection.attrs["method"]),
        "run": name,
        "layer": str(projection.attrs["layer"]),
        "map": projection.name,
        "settings": settings,
        "path": str(projection.path),
        "rows": int(placed.sum()),
        "dims": int(projection.coords.shape[1]),
        **scores,
        "quality_metric": projection.attrs.get("quality_metric"),
    }


# --------------------------------------------------------------------------- names


def _names(opened: Sequence[Embeddings]) -> list[str]:
    """The name of each run's folder, as much of its path as tells them apart."""
    paths = [run.path.parent.absolute().parts for run in opened]
    n = 1
    while len({parts[-n:] for parts in paths}) < len(set(paths)):
        n += 1
    names = ["/".join(parts[-n:]) for parts in paths]
    return [  # of several files in a folder the file's name says which
        name if names.count(name) == 1 else f"{name}/{run.path.name}"
        for name, run in zip(names, opened, strict=True)
    ]


def _titles(opened: Sequence[Embeddings], names: Sequence[str]) -> list[str]:
    """What differs between runs, where that is told in a few words; else their names."""
    facts = []
    for run in opened:
        settings = read_settings(run.attrs.get("config")) or {}
        flat = dict(_flat({key: settings[key] for key in settings if key != "choices"}))
        facts.append(flat)
    heads = [(str(run.attrs.get("model", "")), str(run.attrs.get("data", ""))) for run in opened]
    titles = []
    for head, own in zip(heads, facts, strict=True):
        words = [
            mine
            for mine, all_ in zip(head, zip(*heads, strict=True), strict=True)
            if len(set(all_)) > 1
        ]
        alike = [other for other, that in zip(facts, heads, strict=True) if that == head]
        keys = [key for key in own if any(other.get(key) != own[key] for other in alike)]
        titles.append(
            ", ".join([*words, *(f"{key.rpartition('.')[2]}={_shown(own[key])}" for key in keys)])
            if len(keys) <= MOST_NAMED
            else ""
        )
    is_told = len(set(titles)) == len(titles) and all(titles)
    return titles if is_told else list(names)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclasses.dataclass(frozen=True)
class _About:
    """What tells a map from the others.

    Attributes:
        head: Run, layer and method, as far as they differ.
        settings: Those of the method that differ between its maps, as ``key=value``.
        order: Sorts the maps so that a sweep lies in its order.
    """

    head: list[str]
    settings: list[str]
    order: tuple[Any, ...]


def _about(
    opened: Sequence[Embeddings], titles: Sequence[str], maps: Sequence[tuple[int, Projection]]
) -> list[_About]:
    given = [_settings_of(projection) for _, projection in maps]
    methods = [str(projection.attrs["method"]) for _, projection in maps]
    # Where rows were placed in another map, that map has the settings.
    kinds = [(name, "transform_from" in own) for name, own in zip(methods, given, strict=True)]
    layers = [str(projection.attrs["layer"]) for _, projection in maps]
    is_told = len({i for i, _ in maps}) > 1, len(set(layers)) > 1, len(set(methods)) > 1
    found = []
    for number, (i, projection) in enumerate(maps):
        method, layer, own = methods[number], layers[number], given[number]
        facts = (titles[i], layer, title_of(method))
        head = [fact for fact, told in zip(facts, is_told, strict=True) if told]
        alike = [other for other, kind in zip(given, kinds, strict=True) if kind == kinds[number]]
        keys = [
            key
            for key in own
            if key == "transform_from"
            or _is_supervised({key: own[key]})
            or any(other.get(key) != own[key] for other in alike)
        ]
        points = list(opened[i].embeddings)
        place = points.index(layer) if layer in points else len(points)
        values = tuple(_sortable(own[key]) for key in keys)
        settings = [f"{key}={_shown(own[key])}" for key in keys]
        found.append(_About(head, settings, (i, place, method, values, projection.name)))
    return found


def _settings_of(projection: Projection) -> dict[str, Any]:
    try:
        settings = json.loads(str(projection.attrs["settings"]))
    except (KeyError, ValueError, RecursionError):
        return {}
    if not isinstance(settings, dict):
        return {}
    method = METHODS.get(str(projection.attrs["method"]))
    order = [] if method is None else list(signature_of(method).parameters)
    own = ("method", "layer", "function")
    return {key: settings[key] for key in [*order, *settings] if key in settings.keys() - own}


def _is_supervised(settings: Mapping[str, Any]) -> bool:
    return settings.get("supervised") is True


def _sortable(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, (int, float))
    return not is_number, float(value) if is_number else 0.0, str(value)


def _shown(value: Any) -> str:
    return value[:12] if isinstance(value, str) else literal(value)


# --------------------------------------------------------------------------- the table


def _rank(rows: Sequence[dict[str, Any]], by: str | None) -> None:
    """Number the rows by a score, the best 1, equals alike; those without it have no rank."""
    if by is None:
        return
    sign = 1 if by in LOWER_IS_BETTER else -1
    values = [sign * row[by] for row in rows if row[by] is not None]
    for row in rows:
        if row[by] is not None:
            row["rank"] = 1 + sum(value < sign * row[by] for value in values)


def _rank_of(row: Mapping[str, Any]) -> float:
    return math.inf if row["rank"] is None else float(row["rank"])


def _table(
    title: str, rows: Sequence[Mapping[str, Any]], heads: Mapping[str, str], by: str | None
) -> list[str]:
    if not rows:
        return []
    texts = ["run", "layer"] if len({row["layer"] for row in rows}) > 1 else ["run"]
    if any(row["settings"] for row in rows):
        texts.append("settings")
    if title == "maps":
        texts = ["map", "settings"]
    ranks = ["-" if row["rank"] is None else str(row["rank"]) for row in rows]
    cells = [
        [rank, *(row[key] or "" for key in texts), *(figure(key, row[key]) for key in heads)]
        for rank, row in zip(ranks, rows, strict=True)
    ]
    order = "in the order given" if by is None else f"by {by}"
    return [
        f"{title}, {order}",
        *aligned([["", *texts, *heads.values()], *cells], n_texts=1 + len(texts)),
    ]


def _cka(opened: Sequence[Embeddings], names: Sequence[str]) -> dict[str, Any] | None:
    """CKA of each run and layer with each, on the rows whose ids both runs have."""
    points = [(i, point) for i, run in enumerate(opened) for point in run.embeddings]
    if len(points) < 2:
        return None
    if len(points) > CKA_COMPUTED:
        log.info("no CKA: %s embeddings are more than %s", len(points), CKA_COMPUTED)
        return None
    values = np.full((len(points), len(points)), np.nan)
    counts = np.zeros(values.shape, int)
    for i, ours in enumerate(opened):
        for j, theirs in enumerate(opened[: i + 1]):
            at = [np.array([run == which for run, _ in points]) for which in (i, j)]
            mine, other = shared_rows(ours.ids, theirs.ids)
            usable = ours.ok[mine] & theirs.ok[other]
            pairs = ((ours, mine[usable]), (theirs, other[usable]))
            xs, ys = ([Matrix(x, rows) for x in run.embeddings.values()] for run, rows in pairs)
            if not usable.any():
                continue
            block = cka_matrix(xs, None if i == j else ys)
            values[np.ix_(*at)], values[np.ix_(*at[::-1])] = block, block.T
            counts[np.ix_(*at)] = counts[np.ix_(*at[::-1])] = n_measured([*xs, *ys])
    has_layers = any(len(run.embeddings) > 1 for run in opened)
    return {
        "names": [f"{names[i]}:{point}" if has_layers else names[i] for i, point in points],
        "rows": counts.tolist(),
        "matrix": [[float(v) if np.isfinite(v) else None for v in row] for row in values],
    }


# --------------------------------------------------------------------------- the picture


def _draw(
    opened: Sequence[Embeddings],
    maps: Sequence[tuple[int, Projection]],
    rows: Sequence[Mapping[str, Any]],
    about: Sequence[_About],
    *,
    color: str,
    most: int,
) -> "Figure":
    best = sorted(range(len(maps)), key=lambda number: _rank_of(rows[number]))
    if left_out := best[most:]:
        names = listed([f"{rows[n]['run']}/{rows[n]['map']}" for n in left_out])
        log.info("not drawn, for panels=%s: %s", most, names)
    drawn = sorted(best[:most], key=lambda number: about[number].order)
    starts, colors = _colors(opened, {maps[number][0] for number in drawn}, color)
    aligned_to: dict[int, tuple[Embeddings, Array]] = {}
    shown: list[tuple[str, str, Panel]] = []
    labels = []
    for number in drawn:
        i, projection = maps[number]
        run, row = opened[i], rows[number]
        m = projection.coords.shape[1]
        label = [*about[number].head, *about[number].settings]
        coords: Array = projection.coords.astype(np.float64)
        if m not in aligned_to:
            aligned_to[m] = run, coords
        else:
            moved = _aligned(run, coords, *aligned_to[m])
            if moved is None:
                log.warning("%s is not aligned: it shares too few samples", projection.path)
            coords = coords if moved is None else moved
        at = starts[i] + np.arange(run.n_rows)
        scores = [
            f"{MAP_HEADS[key]} {row[key]:.3f}"
            for key in ("knn_accuracy", "trustworthiness")
            if row[key] is not None
        ]
        for epoch, members in _epochs(run, len(drawn), most):
            words = label if epoch is None else [*label, f"epoch {epoch}"]
            labels.append(words)
            name = ", ".join(words) or str(row["map"])
            below = ", ".join(scores) + " of all epochs" * (epoch is not None and bool(scores))
            shown.append((name, below, Panel("", coords[members], at[members], coords)))
    runs = [opened[maps[number][0]] for number in drawn]
    common = [
        listed(list(dict.fromkeys(words)), most=3)
        for words in (
            [title_of(str(rows[n]["kind"])) for n in drawn],
            [str(rows[n]["layer"]) for n in drawn],
            [f"{run.attrs.get('model', '')} on {run.attrs.get('data', '')}" for run in runs],
        )
    ]
    title = f"{common[0]} of {common[1]}, {common[2]}"
    remarks = [run.remarks(str(rows[n]["layer"]) for n in drawn) for run in runs]
    remark = ", ".join(
        one if all(one in of_run for of_run in remarks) else f"some {one}"
        for one in dict.fromkeys(one for of_run in remarks for one in of_run)
    )
    unique = list(dict.fromkeys(name for name, _, _ in shown))
    told = dict(zip(unique, as_labels(unique, most=64), strict=True))
    titled = [
        panel._replace(title=f"{told[name]}\n{below}".strip()) for name, below, panel in shown
    ]
    return panels(
        titled,
        colors,
        across=_across(labels),
        title=title,
        remark=remark,
        needed_for="compare",
    )


def _colors(
    opened: Sequence[Embeddings], which: set[int], color: str
) -> tuple[dict[int, int], figures.Colors]:
    """The colours of the rows of several runs, one after the other, and where each begins."""
    columns = {i: column_of(opened[i], color) for i in sorted(which)}
    starts, n = {}, 0
    for i in columns:
        starts[i] = n
        n += opened[i].n_rows
    ok = np.concatenate([opened[i].ok for i in columns])
    if all(column is None for column in columns.values()):
        return starts, figures.colors_of(None, ok, name=color)
    arrays = [
        np.full(opened[i].n_rows, "") if column is None else np.asarray(column)
        for i, column in columns.items()
    ]
    if len({array.dtype.kind in "fiub" for array in arrays}) > 1:
        arrays = [array.astype(str) for array in arrays]
    return starts, figures.colors_of(np.concatenate(arrays), ok, name=color)


def _aligned(run: Embeddings, coords: Array, other: Embeddings, aim: Array) -> Array | None:
    """A map turned and shifted onto another, or None where too few samples are in both."""
    target = places_in(run.ids, aim, other.ids)
    both = np.isfinite(target).all(axis=1) & np.isfinite(coords).all(axis=1)
    if both.sum() <= coords.shape[1]:
        return None
    turn, shift = procrustes(coords, target)
    return np.asarray(coords @ turn + shift)


def _epochs(run: Embeddings, n_maps: int, most: int) -> Iterator[tuple[Any, Array]]:
    """The epochs of a recording that have a panel each, with their rows; else all rows."""
    epochs = run.metadata.get("epoch")
    room = min(MOST_EPOCHS, most // n_maps)
    known = np.unique(epochs) if isinstance(epochs, np.ndarray) else np.empty(0)
    if len(known) < 2 or room < 2:
        if len(known) > 1:
            log.info(
                "%s: its %s epochs share a panel, for there are too many", run.path, len(known)
            )
        yield None, np.arange(run.n_rows)
        return
    chosen = known[np.linspace(0, len(known) - 1, min(len(known), room)).round().astype(int)]
    if len(chosen) < len(known):
        log.info(
            "%s: epochs %s of %s are drawn", run.path, listed(list(map(str, chosen))), len(known)
        )
    for epoch in chosen:
        yield epoch, np.flatnonzero(epochs == epoch)


def _across(labels: Sequence[Sequence[str]]) -> int:
    """As many panels in a line as make a sweep a grid: those that share what comes first."""
    best = 0
    for n_shared in range(1, max(map(len, labels))):
        sizes = set(Counter(tuple(label[:n_shared]) for label in labels).values())
        if len(sizes) == 1 and max(sizes) <= MOST_ACROSS:
            best = max(best, *sizes)
    return best if best > 1 else PANELS_ACROSS
