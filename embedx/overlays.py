"""Pictures of feature maps, and of maps on the pictures that they explain."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from embedx.errors import number_of
from embedx.figures import QUIET, THEMES, as_label, new_figure, themed
from embedx.matrix import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Both keep their order for common colour-vision deficiencies; of two signs, orange and purple.
SCALE, SIGNED_SCALE = "viridis", "PuOr_r"
STRONGEST = 0.8  # opacity of the largest value on a picture
FLAT = 1e-5
MOST_SHOWN = 99.5  # percentile of the values of pixels at which colours end: a few are far out
TILE_IN, GAP_IN, LINE_IN, MARGIN_IN = 1.25, 0.1, 0.17, 0.22
MOST_WIDENED = 2.5  # times the width of a tile, of pictures that are wide
LINES_MOST = 6  # of maps in a column of a layer: more stand side by side
PANEL_IN = 2.9
NARROW_IN = 1.8  # three figures below a narrower panel would touch
FILLED_IN = 3.4  # a narrower picture has no room for its title
TITLE_PT, TEXT_PT, SMALL_PT = 11.0, 9.0, 7.5
PT_IN = 1 / 72


class Sample(NamedTuple):
    """A sample as it is shown.

    Attributes:
        id: Its id, which may hold anything.
        row: Its number.
        picture: Shape ``(h, w, 3)`` uint8.
    """

    id: str
    row: int
    picture: Array


class Column(NamedTuple):
    """Maps of a layer.

    Attributes:
        layer: Its point.
        width: How many maps it has.
        words: Of their grid.
        channels: Which of them are drawn, k.
        maps: Those of each sample, shape ``(k, h, w)``.
    """

    layer: str
    width: int
    words: str
    channels: Sequence[int]
    maps: Sequence[Array]


def shown(entered: Array) -> Array:
    """What enters a network as a picture ``(h, w, 3)`` uint8.

    Args:
        entered: Shape ``(c, h, w)``: pixels of uint8, or floats, which are stretched over what can
            be shown; of other than 1 or 3 channels the mean.
    """
    values = np.moveaxis(entered, 0, -1)
    if values.dtype != np.uint8:
        values = values.astype(np.float64)
        if values.shape[2] not in (1, 3):
            values = values.mean(2, keepdims=True)
        low, high = _range(values)
        values = np.nan_to_num((values - low) / (high - low), posinf=1.0, neginf=0.0)
        values = (np.clip(values, 0, 1) * 255).round().astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:2], 3)))


def _range(values: Array) -> tuple[float, float]:
    """The smallest and the largest finite value, well apart from each other."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return low, low + 1.0 if _is_flat(low, high) else high


def _is_flat(low: float, high: float) -> bool:
    """Whether values differ by no more than rounding: a scale would show that alone."""
    return high - low <= FLAT * max(abs(low), abs(high))


# --------------------------------------------------------------------------- maps of a class


def overlay(
    sample: Sample,
    explained: Array,
    *,
    measured: str,
    is_signed: bool,
    title: str,
    caption: Sequence[str],
) -> "Figure":
    """What enters, its map, and the map on what enters, side by side.

    Args:
        sample: The sample.
        explained: Its map, shape ``(h, w)`` of any size, or ``(c, h, w)``, of which the sum over
            the channels is shown where it is signed, else the largest absolute value.
        measured: What its values are, for the scale.
        is_signed: Whether values below 0 mean something.
        title: Above all.
        caption: Lines below, the first in bold.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = explained.astype(np.float64)
    if values.ndim == 3:
        values = values.sum(0) if is_signed else np.abs(values).max(0)
    size = np.abs(values)
    top = float(np.percentile(size, MOST_SHOWN)) if values.size > 10_000 else float(size.max())
    top = top or float(size.max()) or 1.0
    limits = Normalize(-top if is_signed else 0.0, top, clip=True)
    scale = colormaps[SIGNED_SCALE if is_signed else SCALE]
    high, wide = sample.picture.shape[:2]
    large = np.array(
        Image.fromarray(values.astype(np.float32)).resize((wide, high), Image.Resampling.BILINEAR)
    )
    grey = sample.picture.mean(2, keepdims=True) / 255
    ground = np.broadcast_to(0.25 + 0.75 * grey, sample.picture.shape)
    strength = STRONGEST * np.clip(np.abs(large) / top, 0, 1)[..., None]
    mixed = (1 - strength) * ground + strength * scale(limits(large))[..., :3]

    longest = max(high, wide)
    w, h = PANEL_IN * wide / longest, PANEL_IN * high / longest
    lines = [*caption, sample_words(sample)]
    below = [measured, *(["orange: for the class, purple: against it"] if is_signed else [])]
    width = max(2 * MARGIN_IN + 3 * w + 2 * GAP_IN, 2 * FILLED_IN)
    head = MARGIN_IN + 3.2 * LINE_IN
    foot = MARGIN_IN + LINE_IN * (len(lines) + 2.8 + 0.8 * len(below))
    page = _Page(width, head + h + foot)
    with themed(THEMES["light"]):
        figure = page.begin(needed_for="a picture of a map")
        page.text(MARGIN_IN, MARGIN_IN + 0.5 * LINE_IN, title, size_pt=TITLE_PT, bold=True)
        heads = ("input", "map", "map on input")
        pictures = (sample.picture, None, mixed)
        for i, (words, picture) in enumerate(zip(heads, pictures, strict=True)):
            x = MARGIN_IN + i * (w + GAP_IN)
            page.text(x, head - 0.45 * LINE_IN, words, size_pt=TEXT_PT, color=QUIET)
            axes = page.axes(x, head, w, h)
            if picture is None:
                axes.imshow(values, cmap=scale, norm=limits, interpolation="nearest", aspect="auto")
            else:
                axes.imshow(picture, interpolation="nearest", aspect="auto")
        x = MARGIN_IN + w + GAP_IN  # of the map
        bar = page.axes(x, head + h + 0.55 * LINE_IN, w, 0.09, frame=False)
        colors = figure.colorbar(ScalarMappable(limits, scale), cax=bar, orientation="horizontal")
        colors.outline.set_visible(False)
        ticks = [-top, 0.0, top] if is_signed else [0.0, top / 2, top]
        if w < NARROW_IN and not is_signed:
            ticks = [0.0, top]
        said = [_figure(tick) for tick in ticks]
        if size.max() > top:
            said[-1] = f"\N{GREATER-THAN OR EQUAL TO} {said[-1]}"
            said[0] = f"\N{LESS-THAN OR EQUAL TO} {said[0]}" if is_signed else said[0]
        colors.set_ticks(ticks, labels=said)
        bar.tick_params(labelsize=SMALL_PT, length=2, pad=1.5, labelcolor=QUIET, color=QUIET)
        first, *_, last = bar.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
        y = head + h + 2.75 * LINE_IN
        for i, words in enumerate(below):
            base = y + 0.8 * i * LINE_IN
            page.text(x, base, words, size_pt=SMALL_PT, color=QUIET)
        for i, line in enumerate(lines):
            page.text(
                MARGIN_IN,
                head + h + LINE_IN * (3.6 + 0.8 * len(below) + i),
                line,
                size_pt=TEXT_PT,
                bold=i == 0,
                color=QUIET if i == len(lines) - 1 else None,
            )
    return figure


def sample_words(sample: Sample) -> str:
    """What a sample is called in a picture."""
    return f"row {sample.row}" + (f", {sample.id}" if sample.id != str(sample.row) else "")


def _figure(number: float) -> str:
    return f"{number:.3g}".replace("-", "\N{MINUS SIGN}")


# --------------------------------------------------------------------------- feature maps


class _Cells(NamedTuple):
    """Where the tiles of a sheet are, and how large.

    Attributes:
        width: Of a tile, in inches.
        height: Of a tile, in inches.
        head: Lines of text above the first tile.
    """

    width: float
    height: float
    head: float

    @classmethod
    def around(cls, pictures: Sequence[Array], *, head: float) -> "_Cells":
        """Cells that pictures fill: wide ones have wide cells, and none that are empty below."""
        shape = max(picture.shape[1] / picture.shape[0] for picture in pictures)
        width = TILE_IN * min(MOST_WIDENED, max(1.0, math.sqrt(shape)))
        height = max(min(1.0, p.shape[0] / p.shape[1]) for p in pictures) * width
        return cls(width, height, head)

    def place(self, column: int, line: int) -> tuple[float, float]:
        """The upper left corner of a tile, in inches; the first column is set apart."""
        x = MARGIN_IN + column * (self.width + GAP_IN) + (GAP_IN if column else 0)
        top = MARGIN_IN + self.head * LINE_IN
        return x, top + line * (self.height + 2.5 * LINE_IN)

    def page(self, *, across: int, down: int) -> "_Page":
        """A sheet of so many tiles."""
        x, y = self.place(across, down)
        return _Page(max(x - GAP_IN + MARGIN_IN, 2 * FILLED_IN), y + MARGIN_IN - 0.3 * LINE_IN)


def layer_sheet(samples: Sequence[Sample], column: Column, *, title: str) -> "Figure":
    """Maps of a layer: a line a sample, a column a map.

    Args:
        samples: What entered.
        column: The maps.
        title: Of model and data.
    """
    k = len(column.channels)
    size, remarks = _parted([column])
    words = f"{column.layer}, {k} of {number_of(column.width, 'map', 'maps')} of {size[0]}"
    pictures = [*(sample.picture for sample in samples), *(maps[0] for maps in column.maps)]
    cells = _Cells.around(pictures, head=2.9 + (1.1 if remarks else 0))
    page = cells.page(across=k + 1, down=len(samples))
    with themed(THEMES["light"]):
        figure = page.begin(needed_for="a picture of feature maps")
        _heading(page, words, title, remarks)
        for line, sample in enumerate(samples):
            about = [] if sample.id == str(sample.row) else [sample.id]
            _tile(page, cells, 0, line, sample.picture, f"row {sample.row}", *about)
            for i, channel in enumerate(column.channels):
                _map_tile(page, cells, i + 1, line, column.maps[line][i], channel)
    return figure


def depth_sheet(sample: Sample, columns: Sequence[Column], number: int, *, title: str) -> "Figure":
    """Maps of a sample through the depth of a network: a column a layer, or several of many maps.

    Args:
        sample: What entered.
        columns: The layers, in order.
        number: Which of their samples it is.
        title: Of model and data.
    """
    down = max(len(column.channels) for column in columns)
    beside = 1  # tiles of a layer, side by side
    if down > LINES_MOST:
        beside = max(1, round(math.sqrt(down / len(columns))))
    down = math.ceil(down / beside)
    sizes, remarks = _parted(columns)
    pictures = [sample.picture, *(column.maps[number][0] for column in columns)]
    cells = _Cells.around(pictures, head=0)
    room = cells.width * beside + GAP_IN * (beside - 1)
    names = [_wrapped(column.layer, _letters(room, SMALL_PT, bold=True)) for column in columns]
    n_lines = max(map(len, names))
    cells = cells._replace(head=4.0 + 0.8 * n_lines + (1.1 if remarks else 0))
    page = cells.page(across=len(columns) * beside + 1, down=down)
    with themed(THEMES["light"]):
        figure = page.begin(needed_for="a picture of feature maps")
        _heading(page, f"{sample_words(sample)}, layer by layer", title, remarks)
        _tile(page, cells, 0, 0, sample.picture, "input")
        for i, column in enumerate(columns):
            first = 1 + i * beside
            x, y = cells.place(first, 0)
            for line, name in enumerate(reversed(names[i])):
                base = y - (1.25 + 0.8 * line) * LINE_IN
                page.text(x, base, name, size_pt=SMALL_PT, bold=True, wide=room)
            grid = f"{column.width} of {sizes[i]}"
            page.text(x, y - 0.45 * LINE_IN, grid, size_pt=SMALL_PT - 1, color=QUIET, wide=room)
            for at, channel in enumerate(column.channels):
                line, step = divmod(at, beside)
                _map_tile(page, cells, first + step, line, column.maps[number][at], channel)
    return figure


def _parted(columns: Sequence[Column]) -> tuple[list[str], str]:
    """The size of the maps of each layer, and what else is to be said of them, once for all."""
    found = [re.fullmatch(r"(\d+x\d+)(?:, | )?(.*)", column.words) for column in columns]
    sizes = [one[1] if one else column.words for one, column in zip(found, columns, strict=True)]
    remarks = dict.fromkeys(one[2] for one in found if one and one[2])
    return sizes, "; ".join(remarks)


def _wrapped(name: str, most: int) -> list[str]:
    """A name in one or two lines; what is too long for them lacks its beginning."""
    if len(name) <= most:
        return [name]
    name = name if len(name) <= 2 * most else f"...{name[3 - 2 * most :]}"
    rest = len(name) - most  # letters that the second line cannot take
    ends = [found.end() for found in re.finditer(r"[._]+", name) if rest <= found.end() <= most]
    end = ends[-1] if ends else most
    return [name[:end], name[end:]]


def _heading(page: "_Page", words: str, title: str, remarks: str) -> None:
    page.text(MARGIN_IN, MARGIN_IN + 0.5 * LINE_IN, words, size_pt=TITLE_PT, bold=True)
    about = f"{title}; each map from dark to light on its own scale"
    for i, line in enumerate([about, remarks] if remarks else [about]):
        y = MARGIN_IN + (1.9 + 1.1 * i) * LINE_IN
        page.text(MARGIN_IN, y, line, size_pt=TEXT_PT, color=QUIET)


def _map_tile(
    page: "_Page", cells: _Cells, column: int, line: int, values: Array, channel: int
) -> None:
    finite = values[np.isfinite(values)]
    said = "not finite"
    if finite.size:
        low, high = finite.min(), finite.max()
        is_flat = _is_flat(low, high)
        said = f"{_figure(low)} " + ("everywhere" if is_flat else f"to {_figure(high)}")
    _tile(page, cells, column, line, values, f"channel {channel}", said)


def _tile(
    page: "_Page", cells: _Cells, column: int, line: int, picture: Array, *words: str
) -> None:
    high, wide = picture.shape[:2]
    scale = min(cells.width / wide, cells.height / high)
    w, h = wide * scale, high * scale
    x, y = cells.place(column, line)
    axes = page.axes(x, y + (cells.height - h) / 2, w, h)
    if picture.ndim == 2:
        low, high_value = _range(picture)
        options: dict[str, Any] = {"cmap": SCALE, "vmin": low, "vmax": high_value}
        axes.imshow(picture, interpolation="nearest", aspect="auto", **options)
    else:
        axes.imshow(picture, interpolation="nearest", aspect="auto")
    for i, text in enumerate(words):
        base = y + cells.height + (0.85 + 0.75 * i) * LINE_IN
        page.text(x, base, text, size_pt=SMALL_PT, wide=cells.width, color=QUIET if i else None)


def _letters(room: float, size_pt: float, *, bold: bool) -> int:
    """How many letters about go into so many inches."""
    # A letter is 0.6 of its size wide in the mean, in bold some more.
    return max(8, math.floor(room / (size_pt * PT_IN * (0.64 if bold else 0.56))))


class _Page:
    """A figure on which things are put by inches from its upper left corner.

    Args:
        width: In inches.
        height: In inches.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure: Figure | None = None

    def begin(self, *, needed_for: str) -> "Figure":
        self.figure = new_figure((self.width, self.height), layout="none", needed_for=needed_for)
        return self.figure

    def axes(self, x: float, y: float, w: float, h: float, *, frame: bool = True) -> "Axes":
        assert self.figure is not None
        place = (
            x / self.width,
            1 - (y + h) / self.height,
            w / self.width,
            h / self.height,
        )
        axes = self.figure.add_axes(place)
        if frame:
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_linewidth(0.4)
                spine.set_edgecolor("#c9c9c9")
        return axes

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size_pt: float,
        bold: bool = False,
        color: str | None = None,
        wide: float | None = None,
    ) -> None:
        """One line with its base at y, cut to the width that there is."""
        assert self.figure is not None
        room = self.width - MARGIN_IN - x if wide is None else wide
        self.figure.text(
            x / self.width,
            1 - y / self.height,
            as_label(words, most=_letters(room, size_pt, bold=bold)),
            fontsize=size_pt,
            fontweight="bold" if bold else "normal",
            color=color or "black",
            va="baseline",
        )
