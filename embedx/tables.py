"""Tables for a terminal and for spreadsheets."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from embedx.matrix import Array

# Scores by the short names that the head of a table has room for.
EMBEDDINGS_HEADS = {
    "rows": "rows",
    "dims": "dims",
    "knn_accuracy": "5-NN",
    "linear_probe": "probe",
    "silhouette": "silhouette",
    "effective_rank": "effective rank",
    "anisotropy": "anisotropy",
}
MAP_HEADS = {
    "knn_accuracy": "5-NN",
    "trustworthiness": "trustworthiness",
    "continuity": "continuity",
    "knn_recall_5": "recall @5",
    "knn_recall_15": "@15",
    "knn_recall_50": "@50",
    "distance_correlation": "distances",
    "stress": "stress",
}
_WIDTH = 100
# What a spreadsheet would compute.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def aligned(cells: Sequence[Sequence[str]], *, n_texts: int = 1) -> list[str]:
    """Lines of a table, of which the first columns are texts and the others figures.

    Args:
        cells: Rows, the heads first.
        n_texts: How many columns stand at the left.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < n_texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def matrix(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Array, *, where: str
) -> list[str]:
    """Lines of a matrix under the names of its columns, or under numbers where they are too long.

    Args:
        title: Above it.
        rows: The names of the p rows.
        columns: The names of the q columns.
        values: Shape ``(p, q)``, NaN where there is none.
        where: Where the figures stand that are too many to show.
    """
    cells = [[figure("cka", value) for value in row] for row in values]
    named = [[name, *row] for name, row in zip(rows, cells, strict=True)]
    lines = aligned([["", *columns], *named])
    if len(lines[0]) > _WIDTH:
        numbers = [str(i) for i in range(1, len(columns) + 1)]
        listed = ", ".join(f"{i} {name}" for i, name in zip(numbers, columns, strict=True))
        lines = [f"columns: {listed}", *aligned([["", *numbers], *named])]
        if len(lines[1]) > _WIDTH:
            lines = [f"{len(rows)} x {len(columns)} figures, too many to show: see {where}"]
    return [title, *lines]


def yardsticks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands below a table of maps whose scores are not of one metric: a line, or none."""
    metrics = sorted({str(row["quality_metric"]) for row in rows if row["quality_metric"]})
    if len(metrics) < 2:
        return []
    return [f"each map is scored in its own metric, {' or '.join(metrics)}: compare within one"]


def figure(key: str, value: Any) -> str:
    """A score as a table shows it; ``-`` where it is not defined."""
    if not isinstance(value, (int, float)) or math.isnan(value):
        return "-"
    if key in ("rows", "dims"):
        return f"{value:,}" if key == "rows" else str(value)
    return f"{value:.1f}" if key == "effective_rank" else f"{value:.3f}"


def as_csv(
    table: Sequence[Mapping[str, Any]], columns: Sequence[str], *, head: bool = True
) -> bytes:
    """Comma-separated values in UTF-8, where no text is a formula to a spreadsheet.

    Args:
        table: Rows; what a row has no value for is empty.
        columns: Keys of the rows, in their order.
        head: Whether the names of the columns come first; False for further rows of a table.
    """

    def inert(value: Any) -> Any:
        if isinstance(value, bool):
            return str(value).lower()
        return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value

    data = io.StringIO()
    # A carriage return ends a row to most readers, and is quoted only with the line's own end.
    writer = csv.writer(data, lineterminator="\r\n")
    if head:
        writer.writerow(map(inert, columns))
    writer.writerows([inert(row.get(column)) for column in columns] for row in table)
    return data.getvalue().encode("utf-8", "backslashreplace")
