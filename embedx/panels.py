"""Maps side by side: as dots, as shading or as pictures, with the names of classes on them."""

import logging
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from embedx.errors import number_of
from embedx.figures import (
    NAME,
    NONE,
    OTHER,
    PALETTE,
    PRINT_DPI,
    THEMES,
    Colors,
    Group,
    Theme,
    as_label,
    as_labels,
    color_scale,
    legend,
    new_figure,
    outline,
    themed,
)
from embedx.matrix import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

log = logging.getLogger("embedx")

Points = Literal["auto", "dots", "density", "images"]

PANEL_IN = 5.2
SMALL_IN = 4.0
MARGIN = 0.05  # of the map, on each side
SHADED_FROM = 50_000  # points of a panel: dots would hide each other
BIN_IN = 1 / 75  # of a shaded map; larger below 9,000 points
DOT_PT, SQUARE_PT = 40.0, 8.0  # the largest area of a dot and of a square, in square points
SMALL_DOT_PT = 8.0
FAINTEST_NUMBER = 0.6  # the colour of a lone point, where that is a number, must be read
NAMED_FROM = 10  # points of a class: a name would hide fewer
NAMED_SHARE = 0.3  # of the points below a name and around it: of fewer it would not be the name
NAMED_NEAREST = 5  # points that are looked at, where fewer lie there
NAME_REACH_PX = 8  # from a name to the nearest point of its class
NAME_PT, LABEL_PT = 10, 9
TILE_LEAST_IN = 0.185
TILES_LEAST = 12  # across a panel; the more, the more rows need them
FRAME_SHARE = 0.05
JITTER = 0.25  # of the width of a map of one dimension, up and down
# From where maps of three dimensions are seen, as matplotlib begins.
AZIMUTH_DEG, ELEVATION_DEG = -60, 30

Mask = npt.NDArray[np.bool_]


class Panel(NamedTuple):
    """A map in a figure of several.

    Attributes:
        title: Above it.
        coords: Shape ``(n, m)``, NaN for rows that are not shown.
        rows: Which of the N coloured rows these are.
        frame: Coordinates that the panel must have room for, so that panels can be compared;
            those of ``coords`` where not given.
        axes: What each axis is; nothing where that says nothing.
        members: Which of the n rows the panel is about, the others being pale behind; all where
            not given.
        pictures: Thumbnails of the rows, shape ``(n, h, w, 3)`` uint8, which images need.
        heading: Above the title of a panel that begins a line; a panel without it goes on in the
            line of the one before.
    """

    title: str
    coords: Array
    rows: slice | Array = slice(None)
    frame: Array | None = None
    axes: Sequence[str] = ()
    members: Mask | None = None
    pictures: Array | None = None
    heading: str = ""


class _Points(NamedTuple):
    """The k rows of a panel that have a place.

    Attributes:
        at: Row numbers within the panel, shape ``(k,)``.
        xy: Places, shape ``(k, 2)``, or ``(k, 3)`` where the panel is solid.
        shades: Colours, shape ``(k, 3)``, 0 to 1.
        is_grey: Which have no class or number of their own.
        is_member: Which the panel is about.
        numbers: On the scale, shape ``(k,)``; None where there is none.
    """

    at: Array
    xy: Array
    shades: Array
    is_grey: Mask
    is_member: Mask
    numbers: Array | None

    def taken(self, which: Array) -> "_Points":
        """Some of them, by mask or number."""
        return _Points(*(None if part is None else part[which] for part in self))  # type: ignore[arg-type]  # only numbers may be None


def panels(
    shown: Sequence[Panel],
    colors: Colors,
    *,
    across: int,
    title: str,
    needed_for: str,
    points: Points = "auto",
    theme: str = "light",
    panel_in: float = PANEL_IN,
    named: bool = True,
    told: str | None = None,
    note: str | None = None,
    remark: str | None = None,
) -> "Figure":
    """Maps side by side in the same colours, with one legend.

    Dots lie in an order drawn at random (seed 0), so that no class hides another, and those without
    a class of their own lowest. Shading gives each square of 1/75 inch, or of up to 1/25 where
    points are few, the colour of one of its points, drawn at random, or of the mean of their
    numbers, the fainter the fewer they are, on a logarithmic scale. Images are thumbnails at the
    places of their rows, as many as fit without touching; the other rows are dots behind them.
    Shading and images of a map of three dimensions show it from one side, without perspective.

    Args:
        shown: The maps, from left to right.
        colors: Of the rows.
        across: Panels in a line, at most.
        title: Above all of them.
        needed_for: What it is for, for the message.
        points: ``auto`` is dots for up to 50,000 points of a panel, and shading above.
        theme: One of ``THEMES``.
        panel_in: Side of a panel in inches.
        named: Whether classes are named, in a legend and, where panels have no members, on their
            points. Where they are not, the title of a panel is its class, and rows that share grey
            elsewhere are in a strong colour.
        told: Under which name the log says how many rows are shown as images; it does not where
            none is given.
        note: A line below the title.
        remark: A line above the title.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    look = THEMES[theme]
    places = _grid(shown, across)
    down, across = (1 + max(numbers) for numbers in zip(*places, strict=True))
    entries = [(name, look.shade(shade)) for name, shade, _ in colors.groups or ()] * named
    with themed(look):
        size_in = (panel_in * across, panel_in * down)
        figure = new_figure(size_in, layout="constrained", needed_for=needed_for)
        grid = figure.add_gridspec(down, across)
        scale = (
            None
            if colors.numbers is None
            else color_scale(colors.numbers, missing=look.none, darkest=look.darkest)
        )
        drawn = []
        for (line, column), panel in zip(places, shown, strict=True):
            way = "dots" if points == "auto" else points
            if is_shaded(points, panel.coords):
                way = "density"
            solid = panel.coords.shape[1] == 3 and way == "dots"
            kind = "3d" if solid else "rectilinear"
            axes = figure.add_subplot(grid[line, column], projection=kind)
            laid = _laid(panel, colors, scale, look, solid=solid, named=named)
            _dress(axes, panel, look, panel_in=panel_in, solid=solid)
            notes = []
            if way == "dots":
                _draw_dots(axes, laid, look, panel_in=panel_in)
            elif way == "density":
                notes.append(_draw_density(axes, laid, scale, look, panel_in=panel_in))
            else:
                notes.append(_draw_images(axes, panel, laid, look, panel_in=panel_in))
                if told is not None:
                    about = told if panel.members is None else f"{told}, {panel.title}"
                    log.info("%s: %s", about, notes[0])
            if panel.coords.shape[1] == 1:
                notes.append("heights say nothing")
            if panel.coords.shape[1] == 3 and not solid:
                notes.append("seen from one side")
            if notes:
                _note(axes, "; ".join(notes), look)
            if not solid and way != "images" and panel.members is None:
                drawn.append((axes, panel, laid))
        every = list(figure.axes)
        bar = key = None
        if scale is not None:
            bar = figure.colorbar(scale, ax=every, shrink=0.6, label=as_label(colors.name))
        if entries:
            name = None if colors.name == "label" else colors.name
            key = legend(figure, entries, title=name, beside=every[across - 1].transAxes)
        most = int(12 * panel_in * across)  # a letter is 0.08 inches wide
        lines = [as_label(text, most=most) for text in (remark, title, note) if text]
        above = figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11)
        # Letters that no font has are told when the figure is saved.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            _fit(figure, list(zip(every, places, strict=True)), above, key, bar, panel_in=panel_in)
            if entries:
                for axes, panel, laid in drawn:
                    _write_names(axes, panel, laid, colors.groups or (), look)
    return figure


def _grid(shown: Sequence[Panel], across: int) -> list[tuple[int, int]]:
    """The line and the column of each panel."""
    places: list[tuple[int, int]] = []
    for panel in shown:
        line, column = places[-1] if places else (0, -1)
        begins = places and (panel.heading or column + 1 == across)
        places.append((line + 1, 0) if begins else (line, column + 1))
    return places


def _fit(
    figure: "Figure",
    panels_at: Sequence[tuple["Axes", tuple[int, int]]],
    above: "Text",
    key: "Legend | None",
    bar: "Colorbar | None",
    *,
    panel_in: float,
) -> None:
    """Make the figure as large as its panels and all that stands around them."""
    figure.draw_without_rendering()
    dpi = figure.dpi
    lines, columns = (
        1 + max(numbers) for numbers in zip(*(at for _, at in panels_at), strict=True)
    )
    around = np.zeros((4, lines, columns))  # left, right, below, above, in px
    for axes, at in panels_at:
        inner, outer = axes.get_window_extent(), axes.get_tightbbox()
        if outer is not None:
            less, more = np.subtract(inner.min, outer.min), np.subtract(outer.max, inner.max)
            around[:, *at] = np.maximum(0, [less[0], more[0], less[1], more[1]])
    gap = 2 * 3 / 72  # of matplotlib's layout, around each panel
    beside_in = 0.0 if key is None else key.get_window_extent().width / dpi + 2 * gap
    wide = around[:2].max(axis=1).sum() / dpi + columns * (panel_in + gap)
    if bar is not None and (box := bar.ax.get_tightbbox()) is not None:
        wide += box.width / dpi + 4 * gap
    tall = around[2:].max(axis=2).sum() / dpi + lines * (panel_in + gap)
    tall += above.get_window_extent().height / dpi + gap
    figure.set_size_inches(wide + beside_in, tall)
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, 0, wide / (wide + beside_in), 1))  # type: ignore[call-arg]  # the constrained one takes it
    figure.draw_without_rendering()


def is_shaded(points: Points, coords: Array) -> bool:
    """Whether a map is drawn as shading."""
    if points != "auto":
        return points == "density"
    return int(np.isfinite(coords).all(axis=1).sum()) > SHADED_FROM


# --------------------------------------------------------------------------- places


def flat(coords: Array) -> Array:
    """Places on paper of a map of any number of dimensions.

    Of one, points have heights drawn at random (seed 0), which say nothing; three are seen from one
    side; of more the first two are shown.

    Args:
        coords: Shape ``(n, m)``, NaN for rows that are not shown.

    Returns:
        Shape ``(n, 2)``, in the unit of ``coords``.
    """
    m = coords.shape[1]
    if m == 1:  # all on one line would hide each other
        finite = coords[np.isfinite(coords[:, 0])]
        width = float(np.ptp(finite)) if len(finite) else 0.0
        height = np.random.default_rng(0).uniform(-JITTER, JITTER, len(coords)) * width
        return np.stack([coords[:, 0], height], axis=1)
    if m != 3:
        return coords[:, :2]  # a hundred components have no picture, the largest two have
    turn, lift = np.deg2rad(AZIMUTH_DEG), np.deg2rad(ELEVATION_DEG)
    right = [-np.sin(turn), np.cos(turn), 0.0]
    up = [-np.sin(lift) * np.cos(turn), -np.sin(lift) * np.sin(turn), np.cos(lift)]
    return np.asarray(coords @ np.array([right, up]).T)


def _window(panel: Panel, *, solid: bool) -> Array:
    """The square, or cube, that is shown: its lowest and its highest corner."""
    parts = [panel.coords] if panel.frame is None else [panel.coords, panel.frame]
    coords = np.concatenate([_seen(part, solid=solid) for part in parts])
    coords = coords[np.isfinite(coords).all(axis=1)]
    if not len(coords):
        coords = np.zeros((1, coords.shape[1]))
    low, high = coords.min(axis=0), coords.max(axis=0)
    half = float((high - low).max()) * (0.5 + MARGIN) or 1.0
    middle = low / 2 + high / 2
    return np.array([middle - half, middle + half])


def _seen(coords: Array, *, solid: bool) -> Array:
    coords = coords.astype(np.float64)
    return coords if solid else flat(coords)


def _laid(
    panel: Panel,
    colors: Colors,
    scale: "ScalarMappable | None",
    look: Theme,
    *,
    solid: bool,
    named: bool,
) -> _Points:
    from matplotlib.colors import to_rgb

    n = len(panel.coords)
    seen = _seen(panel.coords, solid=solid)
    numbers = None
    if scale is not None and colors.numbers is not None:
        numbers = colors.numbers[panel.rows]
        shades = scale.to_rgba(np.ma.masked_invalid(numbers))[:, :3]
        is_grey = ~np.isfinite(numbers)
    else:
        shades = np.tile(to_rgb(PALETTE[0]), (n, 1))
        is_grey = np.zeros(n, bool)
        for _, shade, mask in colors.groups or ():
            shades[mask[panel.rows]] = to_rgb(look.shade(shade))
            is_grey |= mask[panel.rows] & (shade in (OTHER, NONE))
        if not named:
            shades[is_grey] = to_rgb(look.strong)
    is_member = np.ones(n, bool) if panel.members is None else panel.members
    points = _Points(np.arange(n), seen, shades, is_grey, is_member, numbers)
    return points.taken(np.asarray(np.isfinite(seen).all(axis=1)))


# --------------------------------------------------------------------------- what is drawn


def _dress(axes: "Axes", panel: Panel, look: Theme, *, panel_in: float, solid: bool) -> None:
    """Title, frame and limits of a panel."""
    small = panel_in < SMALL_IN
    size = 9 if small else 10
    axes.set_title(panel.title, fontsize=size)
    if panel.heading:
        below = "\n " * len(panel.title.splitlines())
        axes.set_title(panel.heading + below, loc="left", fontsize=size, linespacing=1.6)
    sides = "xyz" if solid else "xy"
    for side, low, high in zip(sides, *_window(panel, solid=solid), strict=True):
        getattr(axes, f"set_{side}lim")(low, high)
        getattr(axes, f"set_{side}ticks")([])
    if solid:
        axes.set_box_aspect((1, 1, 1), zoom=1.1)  # type: ignore[arg-type,call-arg]  # three-dimensional axes take it
    else:
        axes.set_aspect("equal", adjustable="box")
        for spine in axes.spines.values():
            spine.set_color(look.other)
    if solid or panel.coords.shape[1] != 3:
        for side, text in zip(sides[: panel.coords.shape[1]], panel.axes, strict=False):
            getattr(axes, f"set_{side}label")(as_label(text), fontsize=LABEL_PT)


def _note(axes: "Axes", text: str, look: Theme) -> None:
    label = axes.xaxis.label
    down_pt = 3 + (LABEL_PT + 5) * bool(label.get_text())
    axes.annotate(
        text,
        (1, 0),
        xycoords="axes fraction",
        xytext=(0, -down_pt),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=7,
        color=look.quiet,
    )


def _in_order(laid: _Points) -> Array:
    """An order in which no class hides another, those without one lowest."""
    order = np.random.default_rng(0).permutation(len(laid.at))
    return np.concatenate([order[laid.is_grey[order]], order[~laid.is_grey[order]]])


def _draw_dots(
    axes: "Axes", laid: _Points, look: Theme, *, panel_in: float, small: bool = False
) -> None:
    points, behind = laid.taken(laid.is_member), laid.taken(~laid.is_member)
    points = points.taken(_in_order(points))
    alpha = 0.5 if small else 0.85 if len(laid.at) < 20_000 else 0.6
    for part, style in (
        (behind, {"color": look.behind, "zorder": 1}),
        (points, {"c": points.shades, "alpha": alpha, "zorder": 2}),
    ):
        if n := len(part.at):
            size = max(2.0, _area_pt(n, most=SMALL_DOT_PT if small else DOT_PT))
            size *= (panel_in / PANEL_IN) ** 2
            drawn: dict[str, Any] = {"s": size, "linewidths": 0, "rasterized": True, **style}
            axes.scatter(*part.xy.T, **drawn)


def _area_pt(n: int, *, most: float) -> float:
    """Fewer points are drawn larger: about the same ink from 200 to 20,000 of them."""
    return min(9000 / max(n, 1), most)


def _within(axes: "Axes", xy: Array) -> Array:
    """Places from 0 to 1 in the panel."""
    low, high = np.array([axes.get_xlim(), axes.get_ylim()]).T
    return np.asarray((xy - low) / (high - low))


def _draw_density(
    axes: "Axes", laid: _Points, scale: "ScalarMappable | None", look: Theme, *, panel_in: float
) -> str:
    from matplotlib.colors import to_rgb

    bins = round(panel_in / max(BIN_IN, _area_pt(len(laid.at), most=SQUARE_PT) ** 0.5 / 72))
    behind = laid.taken(~laid.is_member)
    if len(behind.at):
        pale = behind._replace(shades=np.tile(to_rgb(look.behind), (len(behind.at), 1)))
        image, _ = shaded(_within(axes, pale.xy), pale.shades, bins=bins, faintest=1.0)
        _draw_image(axes, image, zorder=1)
    points = laid.taken(laid.is_member)
    image, counts = shaded(
        _within(axes, points.xy),
        points.shades,
        bins=bins,
        faintest=look.faintest if scale is None else max(look.faintest, FAINTEST_NUMBER),
        numbers=None if scale is None else points.numbers,
        scale=scale,
    )
    _draw_image(axes, image, zorder=2)
    most = counts.max()
    depth = f", from 1 (faint) to {most:,} in a square" if most > 1 else ""
    return number_of(len(points.at), "point", "points") + depth


def shaded(
    places: Array,
    shades: Array,
    *,
    bins: int,
    faintest: float,
    numbers: Array | None = None,
    scale: "ScalarMappable | None" = None,
) -> tuple[Array, Array]:
    """Points as a picture whose opacity says how many they are.

    Args:
        places: From 0 to 1, shape ``(n, 2)``, y upwards.
        shades: Their colours, shape ``(n, 3)``, 0 to 1: a square has that of one of its points,
            drawn at random (seed 0).
        bins: Squares across and up.
        faintest: Opacity of a square with one point, where the most are 14 or more; the fewer
            those are, the less it need be fainter.
        numbers: Shape ``(n,)``: where given, a square has the colour of their mean, which NaN is
            left out of.
        scale: What gives that colour.

    Returns:
        The picture, shape ``(bins, bins, 4)``, 0 to 1, the lowest row first: opacity is 0 where
        nothing is, 1 for the most points, and goes with the logarithm between one and those. And
        the number of points in each square, shape ``(bins, bins)``.
    """
    column, row = (places * bins).astype(np.int64).clip(0, bins - 1).T
    square = row * bins + column
    counts = np.bincount(square, minlength=bins * bins)
    image = np.zeros((bins * bins, 4))
    order = np.random.default_rng(0).permutation(len(square))
    occupied, first = np.unique(square[order], return_index=True)
    image[occupied, :3] = shades[order[first]]
    if numbers is not None and scale is not None:
        finite = np.isfinite(numbers)
        sums = np.bincount(square[finite], numbers[finite], minlength=bins * bins)[occupied]
        n = np.bincount(square[finite], minlength=bins * bins)[occupied]
        means = np.ma.masked_array(sums / np.maximum(n, 1), mask=n == 0)
        image[occupied, :3] = scale.to_rgba(means)[:, :3]
    most = counts.max()
    depth = np.log(counts[occupied]) / np.log(most) if most > 1 else np.ones(len(occupied))
    least = max(faintest, 1 / (1 + math.log2(max(most, 1)) / 2))
    image[occupied, 3] = least + (1 - least) * depth
    return image.reshape(bins, bins, 4), counts.reshape(bins, bins)


def _draw_image(axes: "Axes", image: Array, *, zorder: float, smooth: bool = False) -> None:
    axes.imshow(
        image,
        extent=(*axes.get_xlim(), *axes.get_ylim()),
        origin="lower",
        interpolation="antialiased" if smooth else "nearest",
        zorder=zorder,
        rasterized=True,
    )


# --------------------------------------------------------------------------- pictures


def _draw_images(axes: "Axes", panel: Panel, laid: _Points, look: Theme, *, panel_in: float) -> str:
    from PIL import Image

    assert panel.pictures is not None
    members = np.flatnonzero(laid.is_member)
    places = _within(axes, laid.xy[members])
    tall, wide = panel.pictures.shape[1:3]
    longest = max(tall, wide)
    most = int(panel_in / TILE_LEAST_IN)
    for across in range(min(TILES_LEAST, most), most + 1, 4):
        wanted = round(panel_in / across * PRINT_DPI)
        edge = max(1, round(wanted * FRAME_SHARE))
        room = wanted - 2 * edge
        # Small ones are enlarged by whole numbers, so that their pixels stay as they are.
        by = room // longest if longest <= room else room / longest
        height, width = max(1, round(tall * by)), max(1, round(wide * by))
        box = width + 2 * edge, height + 2 * edge
        side = across * max(box)
        corners, chosen = without_overlap(places * side, width=box[0], height=box[1], most=side)
        if 2 * len(chosen) >= len(members):
            break  # the smaller, the more have room, and the less one sees of them
    sheet = np.zeros((side, side, 4))
    for (x, y), row in zip(corners.tolist(), members[chosen].tolist(), strict=True):
        picture = Image.fromarray(panel.pictures[int(laid.at[row])])
        how = Image.Resampling.NEAREST if by >= 1 else Image.Resampling.BOX
        pixels = np.asarray(picture.resize((width, height), how))[::-1] / 255
        tile = sheet[y : y + box[1], x : x + box[0]]
        tile[:] = (*laid.shades[row], 1.0)
        tile[edge : edge + height, edge : edge + width, :3] = pixels
    rest = np.ones(len(laid.at), bool)
    rest[members[chosen]] = False
    _draw_dots(axes, laid.taken(rest), look, panel_in=panel_in, small=True)
    _draw_image(axes, sheet, zorder=3, smooth=True)
    others = ", the others as dots" if len(chosen) < len(members) else ""
    of = number_of(len(members), "row as a picture", "rows as pictures")
    return f"{len(chosen):,} of {of}{others}"


def without_overlap(places: Array, *, width: int, height: int, most: int) -> tuple[Array, Array]:
    """Which of many boxes to draw so that none touches another, each at its own place.

    The panel is cut into cells as large as a box, of which each can hold one box's corner at most.
    Cell after cell, upwards and then to the right, the lowest free corner is taken.

    Args:
        places: Middles of the boxes in px, shape ``(n, 2)``.
        width: Of each box in px.
        height: Likewise.
        most: Side in px of the square that they stay within.

    Returns:
        The lowest corners in px, shape ``(r, 2)`` int, and which points they are of, ``(r,)``.
    """
    box = np.array([width, height])
    corners = np.rint(places - box / 2).astype(np.int64).clip(0, most - box)
    pitch = box + 1  # a pixel between them
    cells = corners // pitch
    number = cells[:, 0] * (most + 1) + cells[:, 1]
    order = np.lexsort(((corners - cells * pitch).sum(axis=1), number))
    _, starts, counts = np.unique(number[order], return_index=True, return_counts=True)
    taken: dict[tuple[int, int], int] = {}
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        rows = order[start : start + count]
        x, y = cells[rows[0]].tolist()
        around = [(x + i, y + j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
        for other in [taken[cell] for cell in around if cell in taken]:
            apart = np.abs(corners[rows] - corners[other]) >= pitch
            rows = rows[apart.any(axis=1)]
        if len(rows):
            taken[x, y] = int(rows[0])
    chosen = np.array(sorted(taken.values()), dtype=np.int64)
    return corners[chosen], chosen


# --------------------------------------------------------------------------- names


def _write_names(
    axes: "Axes", panel: Panel, laid: _Points, groups: Sequence[Group], look: Theme
) -> None:
    """Write each class on its points, the largest first, or beside them where they are few."""
    bounds = axes.get_window_extent()
    pixels = axes.transData.transform(laid.xy) if len(laid.at) else np.zeros((0, 2))
    every = slice(None, None, max(1, len(pixels) // 20_000))
    names = as_labels([name for name, _, _ in groups], most=20)
    masks = [
        (name, mask[panel.rows][laid.at])
        for name, (_, shade, mask) in zip(names, groups, strict=True)
        if shade not in (OTHER, NONE)
    ]
    classes = np.full(len(pixels), -1)
    for number, (_, mask) in enumerate(masks):
        classes[mask] = number
    crowd = _Crowd(pixels[every], classes[every], len(masks))
    written: list[Array] = []
    for number in sorted(range(len(masks)), key=lambda number: -int(masks[number][1].sum())):
        name, mask = masks[number]
        if mask.sum() < NAMED_FROM:
            continue
        text = axes.text(
            *(0, 0, name),
            ha="center",
            va="center",
            fontsize=NAME_PT if bounds.width > SMALL_IN * axes.figure.dpi else NAME_PT - 2,
            fontweight="bold",
            path_effects=outline(look),
            gid=f"{NAME}{len(written)}",
            in_layout=False,
            zorder=4,
        )
        extent = text.get_window_extent()
        half = np.array([extent.width, extent.height]) / 2 + 2
        at = _free_place(pixels[mask], crowd, number, half, bounds, written)
        if at is None:
            text.remove()
            continue
        written.append(np.array([at - half, at + half]))
        text.set_position(tuple(axes.transData.inverted().transform(at)))


class _Crowd(NamedTuple):
    """Points of all classes, in px, the number of the class of each, -1 for none, and how many."""

    xy: Array
    classes: Array
    n_classes: int

    def share(self, own: int, at: Array, half: Array) -> float:
        """Of a class among the points at a box, 0 where that may not bear the name of the class.

        Of the points that the box covers, and of those around it, which are all that is seen, more
        must be of the class than of any other. One of the class must be close, and none of another
        closer. What is of no class counts for none of them.
        """
        apart = np.linalg.norm(np.maximum(np.abs(self.xy - at) - half, 0), axis=1)
        if apart[self.classes == own].min(initial=np.inf) > NAME_REACH_PX:
            return 0.0
        covered = self.classes[apart == 0]
        order = np.argsort(apart)[len(covered) :]
        n_near = np.searchsorted(apart[order], NAME_REACH_PX, side="right")
        around = self.classes[order[: max(NAMED_NEAREST, n_near)]]
        shares = []
        for classes in (covered, around):
            counts = np.bincount(classes[classes >= 0], minlength=self.n_classes)
            if len(classes) and (counts >= counts[own]).sum() > 1:
                return 0.0
            shares.append(counts[own] / max(len(classes), 1))
        if (around[around >= 0][:1] != own).any():
            return 0.0
        return float(min(shares)) if len(covered) else float(shares[1])


def _free_place(
    members: Array,
    crowd: _Crowd,
    own: int,
    half: Array,
    bounds: "Bbox",
    written: Sequence[Array],
) -> Array | None:
    """Where a name may stand: on its class, where that is densest, else close beside it.

    Args:
        members: Places of the class in px.
        crowd: The points of all classes, or as many of them as tell.
        own: The number of the class.
        half: Half the width and the height of the name.
        bounds: Of the panel.
        written: Lowest and highest corners of the names that are there.
    """
    sample = members[:: max(1, len(members) // 300)]
    between = np.sort(np.linalg.norm(sample[:, None] - sample[None, :], axis=2), axis=1)
    spread = between[:, : max(4, len(sample) // 4)].mean(axis=1)
    dense = np.argsort(spread, kind="stable")[: max(1, min(len(sample) // 2, 80))]
    middle = sample[dense[0]]
    # Half of the class around its densest place: where the others are says little of that.
    away = np.linalg.norm(members - middle, axis=1)
    nearest = members[away <= np.median(away)]
    low, high = nearest.min(axis=0), nearest.max(axis=0)
    best, best_merit = None, -np.inf
    if ((high - low) > half).any():  # else the name would hide all of it
        for at, far in zip(sample[dense], spread[dense] / max(spread.max(), 1e-9), strict=True):
            if _is_free(at, half, bounds, written):
                share = crowd.share(own, at, half)
                if share >= NAMED_SHARE and share - far > best_merit:
                    best, best_merit = at, share - far
    if best is not None:
        return np.asarray(best)
    fewest = np.inf
    for i, j in ((0, 1), (0, -1), (-1, 0), (1, 0), (-1, 1), (1, 1), (-1, -1), (1, -1)):
        edge = np.where([i > 0, j > 0], high, low) + np.array([i, j]) * (half + 2)
        at = np.where([i != 0, j != 0], edge, middle)
        hidden = int((np.abs(crowd.xy - at) < half).all(axis=1).sum())
        if (
            hidden < fewest
            and _is_free(at, half, bounds, written)
            and crowd.share(own, at, half) >= NAMED_SHARE
        ):
            best, fewest = at, hidden
    return None if best is None else np.asarray(best)


def _is_free(at: Array, half: Array, bounds: "Bbox", written: Sequence[Array]) -> bool:
    low, high = at - half, at + half
    if (low < bounds.min).any() or (high > bounds.max).any():
        return False
    return not any((low < box[1]).all() and (high > box[0]).all() for box in written)
