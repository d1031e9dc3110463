"""One HTML file that shows a run: its maps to walk in, its scores, its settings, what failed.

The page is put together of its markup, style and code (``page/``) and the data, compressed. It
loads nothing from anywhere, and its policy lets nothing run but the one script whose hash it names.
"""

import base64
import gzip
import hashlib
import html
import io
import json
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedx import derived
from embedx.columns import spelled
from embedx.derived import Projection
from embedx.disk import replace_file
from embedx.errors import short
from embedx.figures import (
    OTHER,
    PALETTE,
    PALETTE_BESIDE_OTHER,
    THEMES,
    color_scale,
    column_of,
    is_scale,
    natural,
    title_of,
)
from embedx.matrix import Array
from embedx.neighbors import metric_of
from embedx.panels import flat
from embedx.shown import (
    Names,
    about_rows,
    cells_of,
    graph_of_shown,
    heads,
    most_trusted,
    neighborhoods_of,
    rows_to_show,
    sheet_of,
)
from embedx.store import Embeddings

log = logging.getLogger("embedx")

PAGE = Path(__file__).parent / "page"
ROWS_MOST = 100_000
NEIGHBORS_MOST = 8
SHEET_ACROSS = 32  # pictures a sheet: the page decodes one when it shows the first of it
TILE_PX_MOST = 64
PICTURES_BYTES_MOST = 42_000_000  # which text makes 56 MB of
PICTURE_QUALITY = 80
RAMP_STEPS = 64
CLASSES_MOST = 1000  # a column of more texts is for reading and searching, not for colours
FAILED_MOST = 1000
_ROOT = r"(?:file://|(?<![\w/.~-])/(?=[^\s/])|(?<![\w/])~[\w.-]*/|(?<!\w)[A-Za-z]:[\\/]|\\\\(?=\w))"
# To the closing quote, or over words with a slash in them to the first without.
_ABSOLUTE = re.compile(
    rf"""(?P<quote>['"`]){_ROOT}(?:(?!(?P=quote)).)*"""
    rf"""|{_ROOT}(?:[^\s'"`]|[ ](?![/~]|\\\\|[A-Za-z]:[\\/])(?=[^\s'"`]*[\\/]))*"""
)


def write_report(
    opened: Embeddings, maps: Sequence[Projection], *, color: str | None, path: Path
) -> Path:
    """Write the report of a run as one HTML file.

    Args:
        opened: The run.
        maps: Its projections, at least one; that of the largest trustworthiness is shown first.
        color: Column that the points are coloured by at first, or ``none``; None for each point's
            own score in the map.
        path: The file to write.

    Returns:
        ``path``.

    Raises:
        ConfigError: No such column.
        DataError: No row can be shown.
        DependencyError: matplotlib is not installed.
        StoreError: There is no space.
    """
    if color is not None:
        column_of(opened, color)  # refuses what is not there
    rows, reasons = rows_to_show(opened, maps, most=ROWS_MOST, where="the report")
    sheets, pictures = _sheets(opened, rows)
    model, source = opened.attrs.get("model", "embeddings"), opened.attrs.get("data", "data")
    title = short(f"{model} on {source}")
    n_failed = int((~opened.ok).sum())
    about = f"{len(rows):,} of {opened.n_rows:,} samples"
    if remarks := opened.remarks([str(one.attrs["layer"]) for one in maps]):
        words = ", ".join(remarks)
        words += ": the embeddings mean nothing by themselves" * ("RANDOM" in words)
        about = f"{words[:1].upper()}{words[1:]}. {about}"
    graphs, graph_of = _graphs(opened, maps, rows)
    label = None if opened.labels is None else 0
    first = None if color is None else _place_of(opened, color)
    about_each = about_rows(opened, rows, Names(heads(opened)))
    columns = [
        _column(name, values, as_classes=number in (first, label))
        for number, (name, values) in enumerate(list(about_each.items())[2:])  # after row and id
    ]
    failed = opened.reasons()
    data = {
        "rows": _numbers(rows, "<i4"),
        "ids": about_each["id"],
        "columns": columns,
        "label": label,
        "color": "kept" if color is None else "" if first is None else str(first),
        "maps": [_map(one, rows, graph=graph_of[one.name], maps=maps) for one in maps],
        "graphs": graphs,
        "first": most_trusted(maps),
        "scores": _SCORES,
        "thumbnails": pictures,
        "settings": _settings(opened, maps),
        "n_failed": n_failed,
        "failed": [
            [one["id"], short(without_folders(one["reason"]), most=300)]
            for one in failed[:FAILED_MOST]
        ],
        "left_out": reasons
        + ([f"The first {FAILED_MOST:,} are listed."] if len(failed) > FAILED_MOST else []),
        "palette": PALETTE,
        "greys": [i for i, shade in enumerate(PALETTE) if shade not in PALETTE_BESIDE_OTHER],
        "other": OTHER,
        "ramps": [_ramp(THEMES[theme].darkest) for theme in ("light", "dark")],
    }
    script = "".join((PAGE / name).read_text("utf-8") for name in ("plot.js", "report.js"))
    style = (PAGE / "report.css").read_text("utf-8")
    generator = f"embedx {opened.attrs.get('embedx', '')}".strip()
    told = {"title": title, "about": about, "generator": short(generator)}
    filled = {
        **{name: html.escape(text) for name, text in told.items()},
        "style": style,
        "sheets": "\n".join(
            f'<script type="text/plain" id="sheet-{number}">{_base64(sheet)}</script>'
            for number, sheet in enumerate(sheets)
        ),
        "data": _packed(data),
        "script": script,
        "policy": "; ".join(
            [
                "default-src 'none'",
                f"script-src {_hash(script)}",
                f"style-src {_hash(style)}",
                "img-src data: blob:",
                "base-uri 'none'",
                "form-action 'none'",
            ]
        ),
    }
    derived.require_ours(path, derived.REPORT_MARK)
    template = (PAGE / "report.html").read_text("utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], template)
    return replace_file(path, page.encode("utf-8", "backslashreplace"))


# --------------------------------------------------------------------------- the page


def _hash(text: str) -> str:
    return f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _packed(data: Any) -> str:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return _base64(gzip.compress(text.encode(), 6, mtime=0))


def _numbers(values: Array, dtype: str) -> str:
    return _base64(np.ascontiguousarray(values, dtype).tobytes())


def _ramp(darkest: float) -> list[str]:
    steps = np.linspace(0, 1, RAMP_STEPS)
    shades = color_scale(steps, missing=OTHER, darkest=darkest).to_rgba(steps, bytes=True)
    return ["#" + bytes(shade[:3]).hex() for shade in shades.tolist()]


# --------------------------------------------------------------------------- its data


def without_folders(text: str) -> str:
    """``text`` with what looks like an absolute path cut to ``.../`` and its last part.

    Args:
        text: A line of prose. Where a path is not in quotes and has blanks in its last folders,
            those behind the first such blank may stay.
    """

    def cut(found: re.Match[str]) -> str:
        last = re.split(r"[\\/]", found[0].rstrip("\\/"))[-1]
        return f"{found['quote'] or ''}.../{last}"

    return _ABSOLUTE.sub(cut, text)


def _place_of(opened: Embeddings, color: str) -> int | None:
    """Which of the columns of the page a name means, as in :func:`column_of`; None for none."""
    labels = [] if opened.labels is None else ["label"]
    if color == "none" or (color == "label" and not labels):
        return None
    return [*labels, *opened.metadata, *opened.output_columns].index(color)


def _column(name: str, values: Array | list[str | None], *, as_classes: bool) -> dict[str, Any]:
    """As classes, as numbers on a scale, or as texts to read and search; each cell as text."""
    values = spelled(values)
    texts = ["" if cell is None else str(cell) for cell in cells_of(values)]
    about = {"name": name, "is_number": isinstance(values, np.ndarray)}
    if isinstance(values, np.ndarray) and is_scale(values):
        finite = values[np.isfinite(values)]
        ends = [str(finite.min()), str(finite.max())]  # exact, as no number of the page may be
        return {**about, "kind": "number", "values": texts, "ends": ends}
    names = sorted(set(texts) - {""}, key=natural)
    if about["is_number"]:
        names.sort(key=float)
    elif not as_classes and len(names) > min(CLASSES_MOST, max(len(PALETTE), len(texts) // 2)):
        return {**about, "kind": "text", "values": texts}
    code = {text: number for number, text in enumerate(names)} | {"": -1}
    codes = np.array([code[text] for text in texts], np.int32)
    return {**about, "kind": "class", "values": names, "codes": _numbers(codes, "<i4")}


def _map(
    projection: Projection, rows: Array, *, graph: int | None, maps: Sequence[Projection]
) -> dict[str, Any]:
    m = projection.coords.shape[1]
    coords = (projection.coords if m == 3 else flat(projection.coords))[rows]
    notes = {1: "one dimension: heights say nothing", 2: "", 3: "three dimensions: drag turns them"}
    method, layer = str(projection.attrs["method"]), str(projection.attrs["layer"])
    title = title_of(method)
    if len({str(other.attrs["layer"]) for other in maps}) > 1:
        title += f" of {layer}"
    alike = [o for o in maps if (o.attrs["method"], str(o.attrs["layer"])) == (method, layer)]
    if len(alike) > 1:
        title += f" ({projection.name})"
    kept = neighborhoods_of(projection)
    return {
        "name": projection.name,
        "title": short(title, most=80),
        "dims": coords.shape[1],
        "note": notes.get(m, f"the first two of {m} dimensions"),
        "coords": _numbers(coords, "<f4"),
        "kept": None if kept is None else _numbers(kept[rows], "<f4"),
        "graph": graph,
        "scores": [
            [key, f"{value:.3f}"]
            for key, value in projection.attrs.items()
            if key in _SCORES and isinstance(value, float)
        ],
    }


_SCORES = (
    "trustworthiness",
    "continuity",
    "knn_recall_5",
    "knn_recall_15",
    "knn_recall_50",
    "distance_correlation",
    "stress",
    "kl_divergence",
)


def _graphs(
    opened: Embeddings, maps: Sequence[Projection], rows: Array
) -> tuple[list[dict[str, Any]], dict[str, int | None]]:
    """The nearest rows in each layer and metric that a map is of, and which is whose."""
    k = min(NEIGHBORS_MOST, len(rows) - 1)
    graphs: list[dict[str, Any]] = []
    numbers: dict[tuple[str, str], int] = {}
    graph_of: dict[str, int | None] = {}
    for one in maps:
        layer, metric = str(one.attrs["layer"]), metric_of(one.attrs)
        graph_of[one.name] = None
        if k < 1 or layer not in opened.embeddings:
            continue
        if (layer, metric) not in numbers:
            found = graph_of_shown(opened, layer, rows, n_neighbors=k, metric=metric)
            numbers[layer, metric] = len(graphs)
            graphs.append(
                {
                    "title": f"by {metric} distance in {layer}",
                    "k": k,
                    "indices": _numbers(found.indices, "<i4"),
                    "distances": _numbers(_four_digits(found.distances), "<f4"),
                }
            )
        graph_of[one.name] = numbers[layer, metric]
    return graphs, graph_of


def _four_digits(values: Array) -> Array:
    """What the page shows of them; the bits that it does not show do not compress."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: Array = ((bits + 0x80) & 0xFFFFFF00).view(np.float32)
    return rounded


def _settings(opened: Embeddings, maps: Sequence[Projection]) -> list[list[str]]:
    """What made the run and its maps, without the folders of the machine that did."""
    hidden = {"file", "identity", "format", "row_fields", "projections", "config"}
    made = [
        ["embeddings", key, short(str(value), most=200)]
        for key, value in derived.describe(opened).items()
        if key not in hidden and not key.startswith("metadata/")
    ]
    for one in maps:
        made += [
            [one.name, key, short(str(value), most=200)]
            for key, value in one.attrs.items()
            if key not in hidden | {"settings", "path"}
        ]
    return made


# --------------------------------------------------------------------------- its pictures


def _sheets(opened: Embeddings, rows: Array) -> tuple[list[bytes], dict[str, Any] | None]:
    """Sheets of square miniatures, row by row from the top left, and how they are laid out."""
    if opened.thumbnails is None:
        return [], None
    side = max(opened.thumbnails.shape[1:3])
    tile = min(side, TILE_PX_MOST)
    step = SHEET_ACROSS**2
    parts = [rows[start : start + step] for start in range(0, len(rows), step)]
    while True:
        sheets: list[bytes] = []
        for part in parts:
            sheets.append(_sheet(opened.thumbnails[part], tile))
            expected = sum(map(len, sheets)) * len(parts) / len(sheets)
            if expected > PICTURES_BYTES_MOST and tile > 16 and len(sheets) in (1, len(parts)):
                break
        else:
            break
        tile = max(16, int(tile * math.sqrt(PICTURES_BYTES_MOST / expected) * 0.95))
    if tile < side:
        log.info("the pictures of the report are %s px, of the %s px that the file has", tile, side)
    tall = [math.ceil(len(part) / SHEET_ACROSS) for part in parts]
    return sheets, {"tile": tile, "across": SHEET_ACROSS, "rows": tall}


def _sheet(thumbnails: Array, tile: int) -> bytes:
    down = math.ceil(len(thumbnails) / SHEET_ACROSS)
    data = io.BytesIO()
    sheet = sheet_of(thumbnails, tile=tile, across=SHEET_ACROSS, down=down)
    sheet.save(data, "WEBP", quality=PICTURE_QUALITY, method=1)
    return data.getvalue()
