"""What pictures are made of: names as they may be drawn, panels of maps, sheets of miniatures."""

import dataclasses
import io
import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embedx import store
from embedx.errors import ConfigError, missing_extra, short
from embedx.store import Embeddings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.patheffects import AbstractPathEffect

log = logging.getLogger("embedx")

DPI = 150
NOTEBOOK_PX_PER_IN = 100
# Ten colours that stay apart for common colour-vision deficiencies: Petroff 2021, arXiv:2107.02270.
PALETTE = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
OTHER = "#dcdcdc"
# With a class of its own in grey, "other" could not be told from it.
PALETTE_BESIDE_OTHER = tuple(shade for shade in PALETTE if shade not in ("#94a4a2", "#717581"))
PANEL_IN = 5.2
NAMED_FROM = 10  # points of a class: a name would hide fewer

TILE_IN, GAP_IN, LINE_IN = 0.85, 0.12, 0.11
SHEET_IN = 9.0  # wide enough for a title
SUSPECT = "#bd1f01"
QUIET = "#666666"

# (name, colour, mask of the rows)
Group = tuple[str, str, npt.NDArray[np.bool_]]


def require(needed_for: str) -> None:
    """Refuse work that will need matplotlib where it is not installed.

    Raises:
        DependencyError: It is not.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise missing_extra("matplotlib", extra="viz", needed_for=needed_for) from None


def new_figure(size_in: tuple[float, float], *, layout: str, needed_for: str) -> "Figure":
    """An empty figure that a notebook shows by itself, unknown to pyplot, which would keep it.

    Args:
        size_in: Width and height in inches.
        layout: Of matplotlib's layout engines.
        needed_for: What it is for, for the message.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    require(needed_for)
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            # Fine enough for a dense screen, in the size that the figure has on paper.
            width_in, height_in = self.get_size_inches()
            return _png(self), {
                "width": round(width_in * NOTEBOOK_PX_PER_IN),
                "height": round(height_in * NOTEBOOK_PX_PER_IN),
            }

    return ShownFigure(figsize=size_in, layout=layout)  # type: ignore[arg-type]  # a text it knows


def color_scale(numbers: store.Array, *, missing: str) -> "ScalarMappable":
    """Colours from dark to light for finite numbers, and ``missing`` for the others."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    finite = numbers[np.isfinite(numbers)]
    scale = ScalarMappable(Normalize(finite.min(), finite.max()), "cividis")
    scale.set_cmap(scale.cmap.with_extremes(bad=missing))
    return scale


def legend(figure: "Figure", entries: Sequence[tuple[str, str]], *, title: str | None) -> None:
    """Names with the colours of their points, outside the panels at the upper right."""
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[
            Line2D([], [], linestyle="", marker="o", color=shade, label=as_label(name))
            for name, shade in entries
        ],
        title=None if title is None else as_label(title),
        loc="outside right upper",
        frameon=False,
    )


def outline() -> "list[AbstractPathEffect]":
    """What keeps letters legible on points."""
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=3, foreground="white")]


def as_label(name: str, *, most: int = 32) -> str:
    """A name as matplotlib may draw it: no mathematics, one line, not hidden, not endless."""
    text = short(name, most=most).replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text  # a leading _ hides it in a legend


def title_of(method: str) -> str:
    """The name of a method of projection as papers write it."""
    return {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}.get(method, method)


# --------------------------------------------------------------------------- maps


@dataclasses.dataclass(frozen=True)
class Colors:
    """What N rows are coloured by: one colour for all, numbers on a scale, or classes.

    Attributes:
        name: Of the column.
        numbers: Shape ``(N,)`` float64, NaN where there is none; None where there is no scale.
        groups: The classes in the order of the legend; None where there are none.
    """

    name: str
    numbers: store.Array | None = None
    groups: Sequence[Group] | None = None


def colors_of(
    values: Sequence[Any] | store.Array | None, ok: npt.NDArray[np.bool_], *, name: str
) -> Colors:
    """How a column is coloured: as a scale where it has more than ten numbers, else by classes.

    Args:
        values: N texts or numbers; None for one colour.
        ok: Which of them count, shape ``(N,)``.
        name: Of the column.
    """
    if values is None:
        return Colors(name)
    if _is_scale(values):
        return Colors(name, numbers=np.asarray(values, dtype=np.float64))
    return Colors(name, groups=_groups(values, ok))


def column_of(opened: Embeddings, color: str) -> Sequence[Any] | store.Array | None:
    """The column to colour by, or None for one colour.

    Raises:
        ConfigError: There is no such column.
    """
    if color == "none" or (color == "label" and opened.labels is None):
        return None
    if color == "label":
        return opened.label_texts()
    saved = {name: values for name, values in opened.outputs.items() if values.ndim == 1}
    columns: dict[str, Any] = {**saved, **opened.metadata}
    if color not in columns:
        known = ", ".join(["label", "none", *columns])
        raise ConfigError(f"color={color!r} is no column of {opened.path}; it has: {known}")
    column: Sequence[Any] | store.Array = columns[color]
    return column


def _is_scale(values: Sequence[Any] | store.Array) -> bool:
    array = np.asarray(values)
    return array.dtype.kind in "fiu" and len(np.unique(array[np.isfinite(array)])) > len(PALETTE)


def _groups(values: Sequence[Any] | store.Array, ok: npt.NDArray[np.bool_]) -> list[Group]:
    """The classes of a column, in the order of the legend; those without a value come last."""
    array = np.asarray(values)
    texts = array.astype(str)
    if array.dtype.kind == "f":
        texts[~np.isfinite(array)] = ""
    counts = Counter(texts[ok].tolist())
    without = counts.pop("", 0)
    names = sorted(counts, key=float if array.dtype.kind in "fiu" else natural)
    shades: Sequence[str] = PALETTE
    kept = names
    if len(names) > len(PALETTE):
        shades = PALETTE_BESIDE_OTHER
        common = {name for name, _ in counts.most_common(len(shades))}
        kept = [name for name in names if name in common]
        log.info("%s classes: the %s largest have colours of their own", len(names), len(kept))
    groups = [(name, shade, texts == name) for name, shade in zip(kept, shades, strict=False)]
    if rest := len(names) - len(kept):
        groups.append((f"{rest} other classes", OTHER, ~np.isin(texts, [*kept, ""])))
    if without:
        groups.append(("(none)", OTHER, texts == ""))
    return groups


def natural(name: str) -> tuple[list[str | int], str]:
    """Sorts 2 before 10, also within a name."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [int(part) if i % 2 else part.casefold() for i, part in enumerate(parts)], name


class Panel(NamedTuple):
    """A map in a figure of several.

    Attributes:
        title: Above it.
        coords: Shape ``(n, m)``, NaN for rows that are not shown.
        rows: Which of the N coloured rows these are.
        frame: Coordinates that the panel must have room for, so that panels can be compared;
            those of ``coords`` where not given.
        axes: What each axis is; nothing where that says nothing.
    """

    title: str
    coords: store.Array
    rows: slice | store.Array = slice(None)
    frame: store.Array | None = None
    axes: Sequence[str] = ()


def panels(
    shown: Sequence[Panel], colors: Colors, *, across: int, title: str, needed_for: str
) -> "Figure":
    """Maps side by side in the same colours, with one legend.

    Args:
        shown: The maps, from left to right.
        colors: Of the rows.
        across: Panels in a line, at most.
        title: Above all of them.
        needed_for: What it is for, for the message.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    across = min(len(shown), across)
    down = math.ceil(len(shown) / across)
    longest = max((len(as_label(name)) for name, _, _ in colors.groups or ()), default=0)
    # Beside the panels a legend takes about 0.09 inch a letter.
    size_in = (PANEL_IN * across + 0.7 + 0.09 * longest, PANEL_IN * down + 0.6)
    figure = new_figure(size_in, layout="constrained", needed_for=needed_for)
    scale = None
    if colors.numbers is not None:
        scale = color_scale(colors.numbers, missing=OTHER)
        shades = scale.to_rgba(np.ma.masked_invalid(colors.numbers))
    for number, panel in enumerate(shown, 1):
        kind = "3d" if panel.coords.shape[1] >= 3 else "rectilinear"
        axes = figure.add_subplot(down, across, number, projection=kind)
        axes.set_title(panel.title, fontsize=10)
        groups = colors.groups
        if groups is not None:
            groups = [(name, shade, mask[panel.rows]) for name, shade, mask in groups]
        if panel.frame is not None:
            _make_room(axes, panel.frame)
        _panel(axes, panel.coords, groups, None if scale is None else shades[panel.rows])
        for side, text in zip("xyz"[: panel.coords.shape[1]], panel.axes, strict=False):
            getattr(axes, f"set_{side}label")(as_label(text), fontsize=9)
    if scale is not None:
        figure.colorbar(scale, ax=figure.axes, shrink=0.6, label=as_label(colors.name))
    if colors.groups:
        entries = [(name, shade) for name, shade, _ in colors.groups]
        legend(figure, entries, title=None if colors.name == "label" else colors.name)
    figure.suptitle(as_label(title, most=60 * across), x=0.01, ha="left", fontsize=11)
    return figure


def _make_room(axes: "Axes", coords: store.Array) -> None:
    placed = coords[np.isfinite(coords).all(axis=1)]
    if not len(placed) or coords.shape[1] == 1:
        return
    corners = np.array([placed.min(axis=0), placed.max(axis=0)])[:, :3]
    if corners.shape[1] == 2:
        axes.update_datalim(corners)
    else:
        axes.auto_scale_xyz(*corners.T)  # type: ignore[attr-defined]  # as set_zticks


def _panel(
    axes: "Axes",
    coords: store.Array,
    groups: Sequence[Group] | None,
    colors: store.Array | None,
) -> None:
    coords = coords[:, :3]
    if coords.shape[1] == 1:
        coords = np.hstack([coords, np.zeros_like(coords)])  # on a line
    placed = np.asarray(np.isfinite(coords).all(axis=1))
    coords = np.where(placed[:, None], coords, 0).astype(np.float64)
    n = int(placed.sum())
    # Fewer points are drawn larger: about the same ink from 200 to 20,000 of them.
    style: dict[str, Any] = {
        "s": float(np.clip(9000 / max(n, 1), 2.0, 40.0)),
        "linewidths": 0,
        "alpha": 0.85 if n < 20_000 else 0.6,
        "rasterized": True,
    }
    flat = coords.shape[1] == 2
    axes.set_xticks([])
    axes.set_yticks([])
    if flat:
        axes.set_aspect("equal", adjustable="datalim")
        for side in ("top", "right", "bottom", "left"):
            axes.spines[side].set_color("#cccccc")
    else:
        axes.set_zticks([])  # type: ignore[attr-defined]  # three-dimensional axes have it
    if groups is None:
        one = PALETTE[0] if colors is None else colors[placed]
        axes.scatter(*coords[placed].T, color=one, **style)
        return
    for name, shade, members in reversed(groups):  # grey below
        points = coords[members & placed]
        axes.scatter(*points.T, color=shade, label=as_label(name), **style)
    if flat:
        _write_names(axes, coords, placed, groups)


def _write_names(
    axes: "Axes", coords: store.Array, placed: npt.NDArray[np.bool_], groups: Sequence[Group]
) -> None:
    """Write each class at its most central point, the largest first, where there is room."""
    if not placed.any():
        return
    points_per_unit = PANEL_IN * 72 / max(float(np.ptp(coords[placed], axis=0).max()), 1e-30)
    written: list[tuple[float, float, int]] = []
    for name, shade, mask in sorted(groups, key=lambda group: -int(group[2].sum())):
        members = coords[mask & placed]
        if shade == OTHER or len(members) < NAMED_FROM:
            continue
        reach = np.ptp(np.percentile(members, [10, 90], axis=0), axis=0)
        if reach.max() * points_per_unit < 13:  # the name would hide all of it
            continue
        sample = members[:: max(1, len(members) // 300)]
        between = np.linalg.norm(sample[:, None] - sample[None, :], axis=2)
        at = sample[np.median(between, axis=1).argmin()]
        label = as_label(name, most=20)
        x, y = (at * points_per_unit).tolist()
        # A letter of this size is about 7 points wide and a line 13 high.
        if any(
            abs(x - x2) < 3.5 * (len(label) + length) and abs(y - y2) < 13
            for x2, y2, length in written
        ):
            continue
        written.append((x, y, len(label)))
        axes.annotate(
            label,
            at,
            ha="center",
            va="center",
            fontsize=10,
            fontweight="bold",
            path_effects=outline(),
        )


# --------------------------------------------------------------------------- sheets


class Tile(NamedTuple):
    """A miniature with what stands below it.

    Attributes:
        picture: Shape ``(h, w, 3)`` uint8.
        caption: Lines of text.
        marked: Whether the caption is in the colour of what is wrong.
    """

    picture: store.Array
    caption: Sequence[str]
    marked: bool = False


def sheet(lines: Sequence[Sequence[Tile]], *, title: str) -> "Figure":
    """Miniatures line by line, the first of each set apart from those that it is compared with.

    Args:
        lines: Tiles, from left to right.
        title: Above them.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    across = max(map(len, lines))
    texts = max(len(tile.caption) for line in lines for tile in line)
    step_x, step_y = TILE_IN + GAP_IN, TILE_IN + LINE_IN * (texts + 1.2)
    width, height = max(across * step_x + 3 * GAP_IN, SHEET_IN), len(lines) * step_y + 3.5 * LINE_IN
    figure = new_figure((width, height), layout="none", needed_for="a sheet of pictures")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    # One unit is one inch, y downwards, so that pictures stand upright.
    shown: dict[str, Any] = {"interpolation": "nearest", "aspect": "auto"}
    for row, line in enumerate(lines):
        y = 3.5 * LINE_IN + row * step_y
        for column, tile in enumerate(line):
            x = GAP_IN + column * step_x + (GAP_IN if column else 0)
            high, wide = tile.picture.shape[:2]
            w, h = TILE_IN * wide / max(high, wide), TILE_IN * high / max(high, wide)
            left, top = x + (TILE_IN - w) / 2, y + (TILE_IN - h) / 2
            axes.imshow(tile.picture, extent=(left, left + w, top + h, top), **shown)
            for number, text in enumerate(tile.caption):
                axes.text(
                    x + TILE_IN / 2,
                    y + TILE_IN + LINE_IN * (number + 0.9),
                    as_label(text, most=19),
                    ha="center",
                    va="baseline",
                    fontsize=6,
                    color=SUSPECT if tile.marked else "black" if number == 0 else QUIET,
                )
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    most = int(width / 0.075)
    axes.text(GAP_IN, 1.6 * LINE_IN, as_label(title, most=most), fontsize=9, va="baseline")
    return figure


def _png(figure: "Figure") -> bytes:
    import warnings

    data = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(data, format="png", dpi=DPI, metadata={"Software": "embedx"})
    missing = [w for w in caught if "missing from font" in str(w.message)]
    if missing:
        log.warning(
            "%s characters of the names are in no font that matplotlib found, and show as boxes; "
            "install a font that has them",
            len({str(w.message) for w in missing}),
        )
    return data.getvalue()


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG, the same bytes for the same figure.

    Raises:
        StoreError: The disk refused.
    """
    return store.replace_file(path, _png(figure))
