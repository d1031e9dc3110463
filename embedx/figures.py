"""What pictures are made of: colours, names as they may be drawn, sheets, files."""

import contextlib
import dataclasses
import io
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embedx import derived, matrix
from embedx.columns import spelled
from embedx.disk import replace_file
from embedx.errors import ConfigError, missing_extra, number_of
from embedx.store import Embeddings

if TYPE_CHECKING:
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.patheffects import AbstractPathEffect
    from matplotlib.transforms import Transform

log = logging.getLogger("embedx")

DPI = 150
PRINT_DPI = 300
PX_MOST = 20_000  # a side of a picture; a longer one no viewer opens
NOTEBOOK_PX_PER_IN = 100
# Ten colours that stay apart for common colour-vision deficiencies: Petroff 2021, arXiv:2107.02270,
# with a blue for his second grey, which a small dot does not tell from the first, nor from brown.
PALETTE = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#4d50ff",
    "#92dadd",
)
# What stands for rows of the smaller classes, and for rows without a value, in the tuples below; a
# theme has colours of its own for both.
OTHER, NONE = "#b8b8b8", "#dedede"
# With a class of its own in grey, "other" could not be told from it.
PALETTE_BESIDE_OTHER = tuple(shade for shade in PALETTE if shade != "#94a4a2")

OUTLINE_PT = 3
NAME = "name-"  # of the parts of a picture that are letters over points

TILE_IN, GAP_IN, LINE_IN = 0.85, 0.12, 0.11
SHEET_IN = 9.0  # wide enough for a title
SUSPECT = "#bd1f01"
QUIET = "#666666"

# (name, colour, mask of the rows)
Group = tuple[str, str, npt.NDArray[np.bool_]]


class Theme(NamedTuple):
    """What a picture is drawn on and with.

    Attributes:
        paper: Behind all.
        ink: Of letters.
        quiet: Of frames and of letters beside the matter.
        other: Of rows of the smaller classes, for which ``OTHER`` stands elsewhere.
        none: Of rows without a value, for which ``NONE`` stands elsewhere.
        strong: Of rows of those two kinds where a panel is about them alone.
        behind: Of rows that a panel is not about.
        pane: Of the walls of a map of three dimensions.
        darkest: Where on the scale of numbers the colours begin that can be told from the paper.
        faintest: Opacity of a lone point of a shaded map, which must still be seen.
    """

    paper: str
    ink: str
    quiet: str
    other: str
    none: str
    strong: str
    behind: str
    pane: str
    darkest: float
    faintest: float

    def shade(self, shade: str) -> str:
        """The colour of a class on this paper."""
        return {OTHER: self.other, NONE: self.none}.get(shade, shade)


# Each colour of the palette has a contrast of 2.6 to this black, more than some have to white.
THEMES = {
    "light": Theme(
        paper="#ffffff",
        ink="#000000",
        quiet="#6b6b6b",
        other=OTHER,
        none=NONE,
        strong="#3b3e44",
        behind="#ececec",
        pane="#f7f7f7",
        darkest=0.0,
        faintest=0.35,
    ),
    "dark": Theme(
        paper="#16181d",
        ink="#ececec",
        quiet="#9a9da3",
        other="#7d8188",
        none="#4b4f57",
        strong="#d6d8dc",
        behind="#2b2f36",
        pane="#1b1e24",
        darkest=0.25,
        faintest=0.6,
    ),
}


@contextlib.contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """Figures begun within are drawn on that paper.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    require("a picture")
    import matplotlib

    letters = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    colors: dict[Any, Any] = dict.fromkeys(letters, theme.ink)
    colors |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.paper)
    colors |= dict.fromkeys(("axes.edgecolor", "grid.color"), theme.quiet)
    colors |= {f"axes3d.{side}axis.panecolor": theme.pane for side in "xyz"}
    with matplotlib.rc_context(colors):
        yield


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


def color_scale(numbers: matrix.Array, *, missing: str, darkest: float = 0.0) -> "ScalarMappable":
    """Colours from dark to light for finite numbers, and ``missing`` for the others.

    Args:
        numbers: At least one of them finite.
        missing: A colour.
        darkest: Where the colours begin, 0 to 1.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    finite = numbers[np.isfinite(numbers)]
    shades = ListedColormap(colormaps["cividis"](np.linspace(darkest, 1, 256)), "numbers")
    limits = Normalize(finite.min(), finite.max())
    return ScalarMappable(limits, shades.with_extremes(bad=missing))


def legend(
    figure: "Figure",
    entries: Sequence[tuple[str, str]],
    *,
    title: str | None,
    beside: "Transform",
) -> "Legend":
    """Names with the colours of their points.

    Args:
        figure: To draw in.
        entries: Names, of which no two are drawn alike, and colours.
        title: Above them.
        beside: From (1, 1), where the upper left corner of the legend goes.
    """
    from matplotlib.lines import Line2D

    names = as_labels([name for name, _ in entries])
    return figure.legend(
        handles=[
            Line2D([], [], linestyle="", marker="o", color=shade, label=name)
            for name, (_, shade) in zip(names, entries, strict=True)
        ],
        title=None if title is None else as_label(title),
        loc="upper left",
        bbox_to_anchor=(1, 1),
        bbox_transform=beside,
        borderaxespad=0,
        frameon=False,
    )


def outline(theme: Theme) -> "list[AbstractPathEffect]":
    """What keeps letters legible on points."""
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=OUTLINE_PT, foreground=theme.paper)]


def as_label(name: str, *, most: int = 32) -> str:
    """A name as matplotlib may draw it: no mathematics, one line, not hidden, not endless."""
    return _drawable(_cut(_line(name), most))


def as_labels(names: Sequence[str], *, most: int = 32) -> list[str]:
    """Names as :func:`as_label` draws them, of which no two are drawn alike.

    What is too long is cut in the middle; names that then are alike are cut to where they differ,
    and numbered where that does not help, such as for blanks.

    Args:
        names: In the order in which they are numbered.
        most: Characters of a name, about.

    Returns:
        As many texts.
    """
    lines = [_line(name) for name in names]
    cut = [_cut(line, most) for line in lines]
    for alike in _alike(cut):
        if len({lines[i] for i in alike}) == 1:
            continue
        letters = itertools.zip_longest(*(lines[i] for i in alike))
        begin = next(at for at, here in enumerate(letters) if len(set(here)) > 1) - most // 4
        for i in alike:
            rest = lines[i][begin:]
            end = begin + most - 6
            cut[i] = f"...{rest}" if len(rest) <= most - 3 else f"...{lines[i][begin:end]}..."
    taken = set(cut)
    for alike in _alike(cut):
        number = 2
        for i in alike[1:]:
            while (numbered := f"{cut[i]} ({number})") in taken:
                number += 1
            taken.add(numbered)
            cut[i] = numbered
    return [_drawable(text) for text in cut]


def _line(name: str) -> str:
    return " ".join(name.split()) or (repr(name) if name else "")


def _cut(line: str, most: int) -> str:
    """Names of one run often begin alike, and end alike: both ends are kept."""
    if len(line) <= most:
        return line
    return f"{line[: (most - 2) // 2]}...{line[len(line) - (most - 3) // 2 :]}"


def _alike(texts: Sequence[str]) -> list[list[int]]:
    """Which are equal to others, group by group."""
    found: dict[str, list[int]] = {}
    for i, text in enumerate(texts):
        found.setdefault(text, []).append(i)
    return [group for group in found.values() if len(group) > 1]


def _drawable(text: str) -> str:
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text  # a leading _ hides it in a legend


def title_of(method: str) -> str:
    """The name of a method of projection as papers write it."""
    return {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}.get(method, method)


# --------------------------------------------------------------------------- colours


@dataclasses.dataclass(frozen=True)
class Colors:
    """What N rows are coloured by: one colour for all, numbers on a scale, or classes.

    Attributes:
        name: Of the column.
        numbers: Shape ``(N,)`` float64, NaN where there is none; None where there is no scale.
        groups: The classes in the order of the legend; None where there are none.
    """

    name: str
    numbers: matrix.Array | None = None
    groups: Sequence[Group] | None = None


def colors_of(
    values: Sequence[Any] | matrix.Array | None, ok: npt.NDArray[np.bool_], *, name: str
) -> Colors:
    """How a column is coloured: as a scale where it has more than ten numbers, else by classes.

    Args:
        values: N texts or numbers; None for one colour.
        ok: Which of them count, shape ``(N,)``.
        name: Of the column.
    """
    if values is None:
        return Colors(name)
    if is_scale(values):
        return Colors(name, numbers=np.asarray(values, dtype=np.float64))
    return Colors(name, groups=_groups(values, ok))


def column_of(
    opened: Embeddings, color: str, *, key: str = "color"
) -> Sequence[Any] | matrix.Array | None:
    """The column to colour by, or None for one colour.

    Args:
        opened: The embeddings.
        color: Its name.
        key: What asks for it, for the message.

    Raises:
        ConfigError: There is no such column.
    """
    if color == "none" or (color == "label" and opened.labels is None):
        return None
    if color == "label":
        return opened.label_texts()
    columns: dict[str, Any] = {**opened.output_columns, **opened.metadata}
    if color not in columns:
        known = ", ".join(["label", *(["none"] if key == "color" else []), *columns])
        raise ConfigError(f"{key}={color!r} is no column of {opened.path}; it has: {known}")
    column: Sequence[Any] | matrix.Array = spelled(columns[color])
    return column


def is_scale(values: Sequence[Any] | matrix.Array) -> bool:
    """Whether a column is coloured as numbers on a scale: it has more than ten."""
    array = np.asarray(values)
    return array.dtype.kind in "fiu" and len(np.unique(array[np.isfinite(array)])) > len(PALETTE)


def _groups(values: Sequence[Any] | matrix.Array, ok: npt.NDArray[np.bool_]) -> list[Group]:
    """The classes of a column, in the order of the legend; those without a value come last."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        array = array + array.dtype.type(0)  # -0.0 is the number 0.0
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
        log.info(
            "%s classes: the %s largest have colours of their own", f"{len(names):,}", len(kept)
        )
    groups = [(name, shade, texts == name) for name, shade in zip(kept, shades, strict=False)]
    if rest := len(names) - len(kept):
        other = number_of(rest, "other class", "other classes")
        groups.append((other, OTHER, ~np.isin(texts, [*kept, ""])))
    if without:
        groups.append(("(none)", NONE, texts == ""))
    return groups


def natural(name: str) -> tuple[list[str | int], str]:
    """Sorts 2 before 10, also within a name."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [int(part) if i % 2 else part.casefold() for i, part in enumerate(parts)], name


# --------------------------------------------------------------------------- sheets


class Tile(NamedTuple):
    """A miniature with what stands below it.

    Attributes:
        picture: Shape ``(h, w, 3)`` uint8.
        caption: Lines of text.
        marked: Whether the caption is in the colour of what is wrong.
    """

    picture: matrix.Array
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


def _png(figure: "Figure", dpi: float = DPI) -> bytes:
    return _written(figure, format="png", dpi=dpi, metadata={"Software": "embedx"})


def _svg(figure: "Figure") -> bytes:
    """Letters as letters, points as a picture, and nothing of the hour or of chance."""
    import matplotlib

    names = figure.findobj(lambda part: str(part.get_gid() or "").startswith(NAME))
    effects = [(name, name.get_path_effects()) for name in names]
    for name in names:  # matplotlib draws outlined letters as shapes
        name.set_path_effects([])
    try:
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "embedx"}):
            metadata = {"Creator": "embedx", "Date": None}
            data = _written(figure, format="svg", dpi=PRINT_DPI, metadata=metadata)
    finally:
        for name, effect in effects:
            name.set_path_effects(effect)
    from matplotlib.colors import to_hex

    paper = to_hex(figure.get_facecolor())
    outlined = f"paint-order: stroke; stroke: {paper}; stroke-width: {OUTLINE_PT}px; "
    return re.sub(
        rb'(<g id="%b\d+">\s*(?:<!--.*?-->\s*)?<text style=")' % NAME.encode(),
        rb"\g<1>" + outlined.encode(),
        data,
    )


def _written(figure: "Figure", **options: Any) -> bytes:
    import warnings

    data = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(data, **options)
    missing = [w for w in caught if "missing from font" in str(w.message)]
    if missing:
        log.warning(
            "%s characters of the names are in no font that matplotlib found, and show as boxes; "
            "install a font that has them",
            len({str(w.message) for w in missing}),
        )
    return data.getvalue()


def save(figure: "Figure", path: Path, *, dpi: float = DPI) -> Path:
    """Write a figure as PNG or SVG, the same bytes for the same figure.

    Args:
        figure: The figure.
        path: Ends in ``.png`` or ``.svg``.
        dpi: Of a PNG, lower where a side would be longer than 20,000 px.

    Raises:
        StoreError: The disk refused, or the file that is there is not ours.
    """
    derived.require_ours(path, derived.PICTURE_MARKS[path.suffix])
    if path.suffix == ".svg":
        return replace_file(path, _svg(figure))
    return replace_file(path, _png(figure, min(dpi, PX_MOST / max(figure.get_size_inches()))))
