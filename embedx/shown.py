"""What of a file other tools and pages are shown: which rows, their columns, their pictures."""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from embedx import derived
from embedx.derived import Projection
from embedx.errors import DataError
from embedx.matrix import Array, Matrix, stratified
from embedx.neighbors import Graph, Metric, layer_graph, nearest_neighbors
from embedx.store import Embeddings

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger("embedx")

ROW = derived.EXPORT_ROW
NEIGHBORHOOD = "neighborhood"  # the score of each row in a map
Columns = dict[str, Array | list[str | None]]


def rows_to_show(
    embeddings: Embeddings,
    projections: Sequence[Projection],
    *,
    most: int | None,
    where: str,
    least: int = 1,
) -> tuple[Array, list[str]]:
    """The rows that are good in every layer and every map, and why others are not among them.

    All that is shown of a file shows the same rows, so that one thing can be held against another.

    Args:
        embeddings: The opened file.
        projections: Of it.
        most: Where there are more, a sample of so many, stratified by label; None for all.
        where: Who shows them, for the messages: ``the projector``.
        least: How many it takes.

    Returns:
        Numbers of the r rows, ascending, and a sentence for each reason that left rows out; they
        are logged too.

    Raises:
        DataError: Fewer than ``least`` are left.
    """
    ok = embeddings.ok
    placed = ok.copy()
    for projection in projections:
        placed &= np.isfinite(projection.coords).all(axis=1)
    finite = np.ones(len(ok), bool)
    for array in embeddings.embeddings.values():
        finite &= _finite(array)
    rows = np.flatnonzero(placed & finite)
    left_out = {
        "failed": int((~ok).sum()),
        "could not be placed by every projection": int((ok & ~placed).sum()),
        "hold a number that is not finite": int((placed & ~finite).sum()),
    }
    reasons = [f"{n:,} rows {why} and are left out" for why, n in left_out.items() if n]
    if not len(rows):
        raise DataError(f"{embeddings.path} has no row to show: {'; '.join(reasons)}")
    if len(rows) < least:
        raise DataError(
            f"{embeddings.path} has {len(rows)} rows of {embeddings.n_rows} to show "
            f"({'; '.join(reasons) or 'there are no more'}), and {where} shows no fewer than "
            f"{least}; extract more samples"
        )
    if most is not None and len(rows) > most:
        reasons.insert(
            0,
            f"{where} shows at most {most:,} rows: taking a sample of {len(rows):,}, stratified "
            "by label",
        )
        labels = None if embeddings.labels is None else embeddings.labels[rows]
        rows = rows[stratified(len(rows), most, labels, seed=0)]
    for reason in reasons:
        log.info("%s", reason)
    return rows, reasons


def most_trusted(maps: Sequence[Projection]) -> int:
    """The number of the map with the largest trustworthiness, the first of equal ones."""
    trust = [float(one.attrs.get("trustworthiness", -1)) for one in maps]
    return int(np.argmax(trust))


def _finite(array: Array) -> Array:
    """Shape ``(n,)``: the rows whose numbers are all finite in float32."""
    finite = np.empty(len(array), bool)
    for start in range(0, len(array), 65_536):
        part = slice(start, start + 65_536)
        with np.errstate(over="ignore"):  # past the range of float32 no tool can show it
            values = np.asarray(array[part], dtype=np.float32)
        finite[part] = np.isfinite(values).all(axis=1)
    return finite


# --------------------------------------------------------------------------- columns


def heads(embeddings: Embeddings) -> list[str]:
    """The names of the columns that come first and keep their names."""
    return [ROW, "id"] if embeddings.labels is None else [ROW, "id", "label"]


class Names:
    """The names of columns, each once; databases do not tell upper from lower case in them.

    Args:
        taken: Names that no other column can have.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._folded = {name.casefold() for name in taken}

    def free(self, name: str) -> str:
        """``name``, with ``_`` behind it where it is taken, which is said; it then is taken."""
        given = name
        while given.casefold() in self._folded:
            given += "_"
        if given != name:
            log.info("the column %r is called %r: another one has that name", name, given)
        self._folded.add(given.casefold())
        return given


def about_rows(embeddings: Embeddings, rows: Array, names: Names) -> Columns:
    """Row, id, label, metadata and saved outputs of one number, in this order.

    Args:
        embeddings: The opened file.
        rows: Numbers of the r rows.
        names: What columns may be called no more: those of :func:`heads` at least.

    Returns:
        Columns of r numbers or texts, the first under the names of :func:`heads`.
    """
    columns: Columns = {ROW: rows, "id": [embeddings.ids[i] for i in rows]}
    texts = embeddings.label_texts()
    if texts is not None:
        columns["label"] = [texts[i] or None for i in rows]
    for name, values in [*embeddings.metadata.items(), *embeddings.output_columns.items()]:
        columns[names.free(name)] = taken(values, rows)
    return columns


def taken(values: Array | list[str], rows: Array) -> Any:
    """Some rows of a column."""
    return [values[i] for i in rows] if isinstance(values, list) else values[rows]


def neighborhoods_of(projection: Projection) -> Array | None:
    """The share of each row's nearest rows that are near it in the map.

    Returns:
        Shape ``(n,)`` float64 from 0 to 1, NaN where a row has none; None where no row has one.
    """
    scores = projection.row_scores.get(NEIGHBORHOOD)
    if scores is None:
        return None
    is_score = (scores >= 0) & (scores <= 1)
    return np.where(is_score, scores.astype(np.float64), np.nan) if is_score.any() else None


def cells_of(values: Array | list[str | None]) -> list[Any]:
    """Numbers as NumPy writes them, in the fewest digits that are the same number; none for NaN."""
    if isinstance(values, list):
        return list(values)
    if values.dtype.kind != "f":
        return list(values.tolist())
    return [None if is_nan else v for v, is_nan in zip(values, np.isnan(values), strict=True)]


# --------------------------------------------------------------------------- neighbours, pictures


def graph_of_shown(
    opened: Embeddings, layer: str, rows: Array, *, n_neighbors: int, metric: Metric
) -> Graph:
    """The nearest of the rows shown to each of them, counted through the rows shown.

    It is the graph kept beside the embeddings where all good rows are shown. Of fewer a graph of
    their own is made, for no other row can be gone to.

    Args:
        opened: The file.
        layer: The capture point.
        rows: Of :func:`rows_to_show`, r of them.
        n_neighbors: k, less than r.
        metric: Of the distances.

    Raises:
        ValueError: ``n_neighbors`` is not between 1 and r - 1.
    """
    values = opened.embeddings[layer]
    n_good = int(opened.ok.sum())
    if n_good != len(rows):
        n_good = int((opened.ok & _finite(values)).sum())
    if n_good != len(rows):
        return nearest_neighbors(values[rows], n_neighbors=n_neighbors, metric=metric)
    matrix = Matrix(values, rows)
    graph = layer_graph(opened, layer, matrix, n_neighbors=n_neighbors, metric=metric)
    return graph.first(n_neighbors)


def sheet_of(thumbnails: Array, *, tile: int, across: int, down: int) -> "Image":
    """Thumbnails on one sheet, row by row from the top left, each in a square tile.

    Args:
        thumbnails: Shape ``(n, h, w, 3)`` uint8, n at most ``across * down``.
        tile: Side of a tile in px; a picture that is not square is centred on white.
        across: Tiles in a row.
        down: Rows.
    """
    from PIL import Image

    height, width = thumbnails.shape[1:3]
    scale = tile / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = (tile - size[0]) // 2, (tile - size[1]) // 2
    sheet = Image.new("RGB", (across * tile, down * tile), "white")
    for i in range(len(thumbnails)):
        picture = Image.fromarray(thumbnails[i])
        if picture.size != size:
            picture = picture.resize(size, Image.Resampling.BOX)
        y, x = divmod(i, across)
        sheet.paste(picture, (x * tile + left, y * tile + top))
    return sheet
