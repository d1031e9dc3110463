"""Maps side by side: as dots, as shading or as pictures, with the names of classes on them."""

import logging
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from embedx.figures import (
    NAME,
    OTHER,
    PALETTE,
    PRINT_DPI,
    THEMES,
    Colors,
    Group,
    Theme,
    as_label,
    color_scale,
    legend,
    new_figure,
    outline,
    themed,
)
from embedx.store import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

log = logging.getLogger("embedx")

Points = Literal["auto", "dots", "density", "images"]

PANEL_IN = 5.2
SMALL_IN = 4.0
MARGIN = 0.05  # of the map, on each side
SHADED_FROM = 50_000  # points of a panel: dots would hide each other
BIN_IN = 1 / 75
FAINTEST = 0.35  # a lone point must still be seen
FAINTEST_NUMBER = 0.6  # and its colour, where that is a number, be read
NAMED_FROM = 10  # points of a class: a name would hide fewer
NAMED_SHARE = 0.3  # of the points below a name: of fewer it would not be the name
NAME_PT = 10
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
    """

    title: str
    coords: Array
    rows: slice | Array = slice(None)
    frame: Array | None = None
    axes: Sequence[str] = ()
    members: Mask | None = None
    pictures: Array | None = None


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
) -> "Figure":
    """Maps side by side in the same colours, with one legend.

    Dots lie in an order drawn at random (seed 0), so that no class hides another, and those without
    a class of their own lowest. Shading gives each square of 1/75 inch the colour of one of its
    points, drawn at random, or of the mean of their numbers, the fainter the fewer they are, on a
    logarithmic scale. Images are thumbnails at the places of their rows, as many as fit without
    touching; the other rows are dots behind them. Shading and images of a map of three dimensions
    show it from one side, without perspective.

    Args:
        shown: The maps, from left to right.
        colors: Of the rows.
        across: Panels in a line, at most.
        title: Above all of them.
        needed_for: What it is for, for the message.
        points: ``auto`` is dots for up to 50,000 points of a panel, and shading above.
        theme: One of ``THEMES``.
        panel_in: Side of a panel in inches.
        named: Whether classes are named, on their points and in a legend.
        told: Under which name the log says how many rows are shown as images; it does not where
            none is given.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    look = THEMES[theme]
    across = min(len(shown), across)
    down = math.ceil(len(shown) / across)
    entries = [(name, look.shade(shade)) for name, shade, _ in colors.groups or ()] * named
    longest = max((len(as_label(name)) for name, _ in entries), default=0)
    # Beside the panels a legend takes about 0.09 inch a letter.
    size_in = (panel_in * across + 0.7 + 0.09 * longest, panel_in * down + 0.6)
    with themed(look):
        figure = new_figure(size_in, layout="constrained", needed_for=needed_for)
        scale = (
            None
            if colors.numbers is None
            else color_scale(colors.numbers, missing=look.other, darkest=look.darkest)
        )
        drawn = []
        for number, panel in enumerate(shown, 1):
            way = "dots" if points == "auto" else points
            if is_shaded(points, panel.coords):
                way = "density"
            solid = panel.coords.shape[1] == 3 and way == "dots"
            kind = "3d" if solid else "rectilinear"
            axes = figure.add_subplot(down, across, number, projection=kind)
            laid = _laid(panel, colors, scale, look, solid=solid)
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
            if not solid and way != "images":
                drawn.append((axes, panel, laid))
        if scale is not None:
            figure.colorbar(scale, ax=figure.axes, shrink=0.6, label=as_label(colors.name))
        if entries:
            legend(figure, entries, title=None if colors.name == "label" else colors.name)
        figure.suptitle(
            as_label(title, most=int(11.5 * panel_in * across)), x=0.01, ha="left", fontsize=11
        )
        if entries and drawn:
            # Letters that no font has are told when the figure is saved.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                figure.draw_without_rendering()  # room is known when all has its place
                for axes, panel, laid in drawn:
                    _write_names(axes, panel, laid, colors.groups or (), look)
    return figure


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
    panel: Panel, colors: Colors, scale: "ScalarMappable | None", look: Theme, *, solid: bool
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
            is_grey |= mask[panel.rows] & (shade == OTHER)
    is_member = np.ones(n, bool) if panel.members is None else panel.members
    points = _Points(np.arange(n), seen, shades, is_grey, is_member, numbers)
    return points.taken(np.asarray(np.isfinite(seen).all(axis=1)))


# --------------------------------------------------------------------------- what is drawn


def _dress(axes: "Axes", panel: Panel, look: Theme, *, panel_in: float, solid: bool) -> None:
    """Title, frame and limits of a panel."""
    small = panel_in < SMALL_IN
    axes.set_title(panel.title, fontsize=9 if small else 10)
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
            getattr(axes, f"set_{side}label")(as_label(text), fontsize=9)


def _note(axes: "Axes", text: str, look: Theme) -> None:
    axes.text(
        *(1, -0.012, text),
        transform=axes.transAxes,
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
            # Fewer points are drawn larger: about the same ink from 200 to 20,000 of them.
            size = float(np.clip(9000 / n, 2.0, 8.0 if small else 40.0))
            size *= (panel_in / PANEL_IN) ** 2
            drawn: dict[str, Any] = {"s": size, "linewidths": 0, "rasterized": True, **style}
            axes.scatter(*part.xy.T, **drawn)


def _within(axes: "Axes", xy: Array) -> Array:
    """Places from 0 to 1 in the panel."""
    low, high = np.array([axes.get_xlim(), axes.get_ylim()]).T
    return np.asarray((xy - low) / (high - low))


def _draw_density(
    axes: "Axes", laid: _Points, scale: "ScalarMappable | None", look: Theme, *, panel_in: float
) -> str:
    from matplotlib.colors import to_rgb

    bins = round(panel_in / BIN_IN)
    behind = laid.taken(~laid.is_member)
    if len(behind.at):
        pale = behind._replace(shades=np.tile(to_rgb(look.behind), (len(behind.at), 1)))
        image, _ = shaded(_within(axes, pale.xy), pale.shades, bins=bins)
        image[..., 3] = image[..., 3] > 0
        _draw_image(axes, image, zorder=1)
    points = laid.taken(laid.is_member)
    numbers = None if scale is None else points.numbers
    image, counts = shaded(
        _within(axes, points.xy), points.shades, bins=bins, numbers=numbers, scale=scale
    )
    _draw_image(axes, image, zorder=2)
    most = counts.max()
    depth = f", from 1 (faint) to {most:,} in a square" if most > 1 else ""
    return f"{len(points.at):,} points{depth}"


def shaded(
    places: Array,
    shades: Array,
    *,
    bins: int,
    numbers: Array | None = None,
    scale: "ScalarMappable | None" = None,
) -> tuple[Array, Array]:
    """Points as a picture whose opacity says how many they are.

    Args:
        places: From 0 to 1, shape ``(n, 2)``, y upwards.
        shades: Their colours, shape ``(n, 3)``, 0 to 1: a square has that of one of its points,
            drawn at random (seed 0).
        bins: Squares across and up.
        numbers: Shape ``(n,)``: where given, a square has the colour of their mean, which NaN is
            left out of.
        scale: What gives that colour.

    Returns:
        The picture, shape ``(bins, bins, 4)``, 0 to 1, the lowest row first: opacity is 0 where
        nothing is, 0.35 for one point (0.6 with numbers), 1 for the most, and between goes with
        the logarithm. And
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
    least = FAINTEST if numbers is None else FAINTEST_NUMBER
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
    return f"{len(chosen):,} of {len(members):,} rows as pictures{others}"


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
    to_px = axes.transData.transform
    bounds = axes.get_window_extent()
    pixels = to_px(laid.xy) if len(laid.at) else np.zeros((0, 2))
    every = slice(None, None, max(1, len(pixels) // 20_000))
    written: list[Array] = []
    masks = [
        (name, mask[panel.rows][laid.at] & laid.is_member)
        for name, shade, mask in groups
        if shade != OTHER
    ]
    for name, mask in sorted(masks, key=lambda group: -int(group[1].sum())):
        if mask.sum() < NAMED_FROM:
            continue
        text = axes.text(
            *(0, 0, as_label(name, most=20)),
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
        at = _free_place(pixels[mask], pixels[every], mask[every], half, bounds, written)
        if at is None:
            text.remove()
            continue
        written.append(np.array([at - half, at + half]))
        text.set_position(tuple(axes.transData.inverted().transform(at)))


def _free_place(
    members: Array,
    crowd: Array,
    is_own: Mask,
    half: Array,
    bounds: "Bbox",
    written: Sequence[Array],
) -> Array | None:
    """Where a name may stand: on its class, where there is most of it, else close beside it.

    Args:
        members: Places of the class in px.
        crowd: Places of points of all classes.
        is_own: Which of those are of the class.
        half: Half the width and the height of the name.
        bounds: Of the panel.
        written: Lowest and highest corners of the names that are there.
    """
    sample = members[:: max(1, len(members) // 300)]
    between = np.linalg.norm(sample[:, None] - sample[None, :], axis=2)
    spread = np.median(between, axis=1)
    central = np.argsort(spread, kind="stable")[: max(1, min(len(sample) // 2, 80))]
    low, high = np.percentile(members, [10, 90], axis=0)
    best, best_merit = None, -np.inf
    if ((high - low) > 1.2 * half).any():  # else the name would hide all of it
        for at, far in zip(sample[central], spread[central] / spread.max(), strict=True):
            if _is_free(at, half, bounds, written):
                share = is_own[(np.abs(crowd - at) < half).all(axis=1)].mean()
                if share >= NAMED_SHARE and share - far > best_merit:
                    best, best_merit = at, share - far
    if best is not None:
        return np.asarray(best)
    middle = sample[central[0]]
    around = np.abs(crowd - middle) < np.maximum(half, (high - low) / 2)
    if is_own[around.all(axis=1)].mean() < NAMED_SHARE:
        return None  # it is nowhere in particular, and a name would say that it is
    low, high = np.percentile(members, [2, 98], axis=0)
    fewest = np.inf
    for i, j in ((0, 1), (0, -1), (-1, 0), (1, 0), (-1, 1), (1, 1), (-1, -1), (1, -1)):
        edge = np.where([i > 0, j > 0], high, low) + np.array([i, j]) * (half + 2)
        at = np.where([i != 0, j != 0], edge, middle)
        hidden = int((np.abs(crowd - at) < half).all(axis=1).sum())
        if hidden < fewest and _is_free(at, half, bounds, written):
            best, fewest = at, hidden
    return None if best is None else np.asarray(best)


def _is_free(at: Array, half: Array, bounds: "Bbox", written: Sequence[Array]) -> bool:
    low, high = at - half, at + half
    if (low < bounds.min).any() or (high > bounds.max).any():
        return False
    return not any((low < box[1]).all() and (high > box[0]).all() for box in written)
