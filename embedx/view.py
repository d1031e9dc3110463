"""The stage ``view``: maps as pictures, and TensorBoard on this machine alone."""

import contextlib
import hashlib
import importlib.util
import itertools
import logging
import math
import os
import re
import socket
import subprocess
import sys
import webbrowser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from embedx import derived, ready_made, store, unfinished
from embedx.checks import checked, signature_of
from embedx.derived import Projection
from embedx.disk import sweep
from embedx.errors import ConfigError, DataError, missing_extra, number_of
from embedx.figures import (
    PALETTE,
    PRINT_DPI,
    THEMES,
    Colors,
    as_label,
    as_labels,
    colors_of,
    column_of,
    natural,
    new_figure,
    save,
    themed,
    title_of,
)
from embedx.follow import follow as follow_run
from embedx.matrix import Array
from embedx.panels import PANEL_IN, Mask, Panel, Points, is_shaded, panels
from embedx.ready_made import Given
from embedx.report import write_report
from embedx.shown import NEIGHBORHOOD, neighborhoods_of
from embedx.store import Embeddings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("embedx")

PANELS_ACROSS = 3
COLUMN_MOST = 60  # letters of a column in the name of a file
FACETS_ACROSS, FACET_IN = 4, 3.2
FACETS_MOST = 24
INTERVALS = 8


@checked
def view(
    embeddings: Given,
    *,
    viewer: Literal["map", "report", "tensorboard"] = "map",
    projections: Sequence[str] | None = None,
    color: str = "label",
    points: Points = "auto",
    facet: str | None = None,
    theme: Literal["light", "dark"] = "light",
    format: Literal["png", "svg"] = "png",
    out: str | os.PathLike[str] | None = None,
    open: bool = False,
    port: int = 6006,
    follow: bool = False,
) -> "Figure | None":
    """Draw projections as pictures, or serve them with TensorBoard.

    Args:
        embeddings: The file, its folder, or the opened file.
        viewer: ``map`` draws ``map-<projection>.png`` for each projection and ``maps.png`` with
            all of them; ``report`` writes ``report.html``, one page that holds all it needs;
            ``tensorboard`` serves the exported projector on 127.0.0.1 until Ctrl-C.
        projections: Names or paths of projections; all of them where not given.
        color: Column to colour by: ``label``, a metadata column, ``predicted`` where outputs were
            saved, ``neighborhood`` for each point's own score (the share of its nearest rows that
            are near it in the map), or ``none``. Of more than ten classes the nine largest have a
            colour of their own and the others share grey; of more than ten numbers it is a scale.
        points: ``dots``; ``density`` for shading, the fainter the fewer points; ``images`` for
            thumbnails in place of points, as many as fit without touching. ``auto`` is dots for up
            to 50,000 points, and density above.
        facet: Column, as ``color`` takes them: one panel for each of its values, with the other
            rows pale behind. More than 24 numbers are cut into eight intervals with about equally
            many rows; of more than 24 classes the smallest share the last panel.
        theme: ``light`` or ``dark`` paper.
        format: ``png`` with 300 dots an inch, or ``svg``, where letters are letters and points are
            a picture, so that a million of them stay small.
        out: Folder for the pictures, or of the export to serve, or one above several exports, of
            which each is a run; beside the embeddings where not given.
        open: Show the picture or the page on this machine's screen.
        port: For TensorBoard.
        follow: Show an extraction while it runs, in the terminal: rows, failed rows, rate, and a
            small map by PCA that fills up; no projection is needed.

    Returns:
        The figure with all projections, which a notebook shows; None after another viewer.

    Raises:
        ConfigError: No such column, an option that the viewer does not have, or the port is in use.
        DataError: There is no projection, no row of one that has a place, no export to serve, or
            no thumbnails for images.
        DependencyError: The ``viz`` extra is not installed.
        StoreError: A file is missing or damaged, or there is no space.
    """
    if ready_made.is_ready_made(embeddings):
        embeddings = ready_made.opened(embeddings)
    assert not isinstance(embeddings, np.ndarray)
    if follow:
        beside: dict[str, Any] = {
            "viewer": viewer,
            "color": color,
            "points": points,
            "facet": facet,
        }
        beside |= {"theme": theme, "format": format, "projections": projections}
        _refuse_unused("follow=true", **beside, out=out, open=open, port=port)
        _follow(embeddings)
        return None
    opened = ready_made.opened(embeddings)
    opened.require_there()
    if out is not None and Path(out).suffix in (".html", ".png", ".svg", ".pdf"):
        raise ConfigError(f"out={out} is the name of a file; give a folder, out=FOLDER")
    if viewer != "map":
        drawn = {"points": points, "facet": facet, "theme": theme, "format": format}
        _refuse_unused(f"viewer={viewer}", **drawn)
    if viewer == "tensorboard":
        folder = Path(out) if out else opened.path.parent / "projector"
        _serve(opened, folder, port=port, show=open)
        return None
    maps = derived.projections_of(opened, projections)
    if projections is not None and not projections:
        raise ConfigError("projections=[] names none; leave it out for all of them")
    if not maps:
        raise DataError(
            f"{opened.path} has no projection yet; make one with: python -m embedx project "
            f"embeddings={opened.path}"
        )
    folder = Path(out) if out else opened.path.parent
    is_of_maps = color == NEIGHBORHOOD and color not in opened.metadata
    if is_of_maps:
        _require_neighborhoods(maps)
    if viewer == "report":
        with opened.staying():
            path = write_report(
                opened, maps, color=None if is_of_maps else color, path=folder / "report.html"
            )
        log.info("wrote %s: %.1f MB", path, path.stat().st_size / 1e6)
        if open:
            _show(path.resolve().as_uri())
        return None
    if is_of_maps:
        colors = _neighborhoods(maps)
    else:
        colors = colors_of(column_of(opened, color), opened.ok, name=color)
    if points == "images" and opened.thumbnails is None:
        raise DataError(
            f"{opened.path} has no thumbnails, which points=images needs; make it again, with "
            f"thumbnails=32 overwrite=true, by the command that this prints: python -m embedx info "
            f"path={opened.path}"
        )
    facets = None if facet is None else _facets(opened, facet)
    missing = _missing(opened, maps)
    if missing:
        log.info(missing)
    drawing = _Drawing(opened, maps, color, colors, facets, facet, points, theme, missing)
    written = []
    figures = []
    with opened.staying():
        for number, projection in enumerate(maps):
            if is_shaded(points, projection.coords) and points == "auto":
                log.info(
                    "%s: more than 50,000 points, drawn as shading; points=dots draws each",
                    projection.name,
                )
            figures.append(drawing.figure([number], told=projection.name))
            path = folder / f"map-{projection.name}{drawing.suffix}.{format}"
            written.append(save(figures[-1], path, dpi=PRINT_DPI))
            if (ratios := _ratios(projection)) is not None:
                path = folder / f"variance-{projection.name}{drawing.paper}.{format}"
                written.append(save(_draw_variance(projection, ratios, theme), path, dpi=PRINT_DPI))
        together = figures[0] if len(maps) == 1 else drawing.figure(range(len(maps)))
        if len(maps) > 1:
            path = folder / f"maps{drawing.suffix}.{format}"
            written.append(save(together, path, dpi=PRINT_DPI))
    for path in written:
        log.info("wrote %s", path)
    if open:
        _show(written[-1].resolve().as_uri())
    return together


def _show(address: str) -> None:
    if not webbrowser.open(address):
        log.warning(
            "no browser could be opened on this machine; open %s where there is one", address
        )


def _refuse_unused(beside: str, **given: Any) -> None:
    """Refuse what is given and has no use beside something else."""
    parameters = signature_of(view).parameters
    for key, value in given.items():
        if value != parameters[key].default:
            raise ConfigError(f"{key}={value} has no use beside {beside}; leave one of them out")


def _require_neighborhoods(maps: Sequence[Projection]) -> None:
    for projection in maps:
        if neighborhoods_of(projection) is None:
            raise DataError(
                f"{projection.path} has no score of each row; make it again, with overwrite=true, "
                f"by the command that this prints: python -m embedx info path={projection.path}"
            )


def _neighborhoods(maps: Sequence[Projection]) -> Colors:
    """The score of each row in each map, one map after the other."""
    numbers = [scores for one in maps if (scores := neighborhoods_of(one)) is not None]
    return Colors("share of near rows kept", numbers=np.concatenate(numbers))


class _Drawing(NamedTuple):
    """What all pictures of a call have in common."""

    opened: Embeddings
    maps: Sequence[Projection]
    color: str
    colors: Colors
    facets: Sequence[tuple[str, Mask]] | None
    facet: str | None
    points: Points
    theme: str
    missing: str

    @property
    def paper(self) -> str:
        return "" if self.theme == "light" else f"-on-{self.theme}"

    @property
    def suffix(self) -> str:
        """Of the names of files: a map drawn otherwise is another picture."""

        def plain(name: str) -> str:
            escaped = re.sub(r"[^A-Za-z0-9_.]", "_", name)[:COLUMN_MOST]
            if escaped == name:
                return name
            # A hyphen is in no escaped name: no other column has this one.
            return (
                f"{escaped}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:6]}"
            )

        color = "" if self.color == "label" else f"-{plain(self.color)}"
        facet = "" if self.facet is None else f"-by-{plain(self.facet)}"
        points = "" if self.points == "auto" else f"-as-{self.points}"
        return f"{color}{facet}{points}{self.paper}"

    def figure(self, numbers: Sequence[int], *, told: str | None = None) -> "Figure":
        """Some of the maps side by side."""
        opened = self.opened
        about = f"{opened.attrs.get('model', '')} on {opened.attrs.get('data', '')}"
        maps = [self.maps[number] for number in numbers]
        layers = dict.fromkeys(str(projection.attrs["layer"]) for projection in maps)
        title = f"{about}, layer {', '.join(layers)}"
        if self.facets is not None:
            title += f", by {self.facet}"
            if len(maps) == 1:
                title = f"{_title(maps[0], self.maps)}, {title}"
        is_small = self.facets is not None and self.points != "images"
        across = FACETS_ACROSS if is_small else PANELS_ACROSS
        if self.facets is not None:
            n = len(self.facets)
            is_line_a_map = len(maps) > 1 and n <= 2 * across
            across = n if is_line_a_map else math.ceil(n / math.ceil(n / across))
        return panels(
            [panel for number in numbers for panel in self._panels(number, maps)],
            self.colors,
            across=across,
            title=title,
            remark=", ".join(opened.remarks(layers)),
            needed_for="view",
            points=self.points,
            theme=self.theme,
            panel_in=FACET_IN if is_small else PANEL_IN,
            named=self.facet != self.color,
            told=told,
            note=self.missing,
        )

    def _panels(self, number: int, maps: Sequence[Projection]) -> list[Panel]:
        projection, n = self.maps[number], self.opened.n_rows
        is_one_a_row = self.colors.numbers is None or len(self.colors.numbers) == n
        axes: list[str] = []
        if (ratios := _ratios(projection)) is not None:
            axes = [f"PC{i} ({ratio:.1%})" for i, ratio in enumerate(ratios[:3], 1)]
        whole = Panel(
            _title(projection, maps),
            projection.coords,
            rows=slice(None) if is_one_a_row else slice(number * n, (number + 1) * n),
            axes=axes,
            pictures=self.opened.thumbnails,
        )
        if self.facets is None:
            return [whole]
        placed = np.isfinite(projection.coords).all(axis=1)
        shown = []
        for value, (_, mask) in zip(
            as_labels([v for v, _ in self.facets]), self.facets, strict=True
        ):
            title = f"{value} ({int((mask & placed).sum()):,})"
            shown.append(whole._replace(title=title, members=mask, axes=()))
        heading = whole.title if len(maps) > 1 else ""
        shown[0] = shown[0]._replace(axes=axes, heading=heading)  # the others are like it
        return shown


def _missing(opened: Embeddings, maps: Sequence[Projection]) -> str:
    """Which rows are not drawn, in one line; nothing where all are.

    Raises:
        DataError: None of them can be drawn.
    """
    n_failed = int((~opened.ok).sum())
    unplaced = {}
    for projection in maps:
        placed = np.isfinite(projection.coords).all(axis=1)
        unplaced[projection.path] = int((opened.ok & ~placed).sum())
    if n_failed == opened.n_rows:
        raise DataError(
            f"every row of {opened.path} failed, and there is nothing to draw; the reasons are in "
            f"{unfinished.errors_path(opened.path)}"
        )
    if all(n == opened.n_rows - n_failed for n in unplaced.values()):
        raise DataError(
            f"no row of {opened.path} has a place in {', '.join(map(str, unplaced))}; make the map "
            "again, with overwrite=true"
        )
    parts = [f"{n_failed:,} of {number_of(opened.n_rows, 'row', 'rows')} failed"] * bool(n_failed)
    for projection in maps:
        if n := unplaced[projection.path]:
            rows = number_of(n, "row has", "rows have")
            parts.append(f"{rows} no place in {projection.name}")
    return f"not drawn: {', '.join(parts)}" if parts else ""


def _facets(opened: Embeddings, facet: str) -> list[tuple[str, Mask]]:
    """The values of a column in their order, and which good rows have them."""
    column = column_of(opened, facet, key="facet")
    if column is None:
        what = "has no labels" if facet == "label" else f"has no column {facet!r}"
        raise ConfigError(
            f"{opened.path} {what} to make panels of; name another column, or leave facet out"
        )
    values = np.asarray(column)
    finite = opened.ok.copy()
    is_number = values.dtype.kind in "fiu"
    if is_number:
        values = values + values.dtype.type(0)  # -0.0 is the number 0.0
        finite &= np.isfinite(values)
        distinct = np.unique(values[finite])
        if len(distinct) > FACETS_MOST:
            edges = np.unique(np.quantile(values[finite], np.linspace(0, 1, INTERVALS + 1)))
            which = np.searchsorted(edges[1:-1], values, side="right")
            parts = [finite & (which == i) for i in range(len(edges) - 1)]
            ends = list(itertools.pairwise(_told_apart(edges)))
            if values.dtype.kind != "f":
                ends = [(str(values[part].min()), str(values[part].max())) for part in parts]
            facets = [
                (f"{low} to {high}", part) for (low, high), part in zip(ends, parts, strict=True)
            ]
        else:
            facets = [(str(value), finite & (values == value)) for value in distinct]
    else:
        texts = values.astype(str)
        finite &= texts != ""
        counts = Counter(texts[finite].tolist())
        names = sorted(counts, key=natural)
        if len(names) > FACETS_MOST:
            log.info(
                "%s values of %s: the %s largest have a panel of their own",
                f"{len(names):,}",
                facet,
                FACETS_MOST - 1,
            )
            common = {name for name, _ in counts.most_common(FACETS_MOST - 1)}
            kept = [name for name in names if name in common]
            rest = finite & ~np.isin(texts, kept)
            facets = [(name, finite & (texts == name)) for name in kept]
            facets.append((f"{len(names) - len(kept):,} others", rest))
        else:
            facets = [(name, finite & (texts == name)) for name in names]
    if (without := opened.ok & ~finite).any():
        facets.append(("(none)", without))
    return facets


def _told_apart(numbers: Array) -> list[str]:
    """Different numbers with as few digits, three at least, as tell them apart."""
    texts: list[str] = []
    for digits in range(3, 18):
        texts = [
            np.format_float_positional(number, precision=digits, fractional=False, trim="-")
            for number in numbers
        ]
        if len(set(texts)) == len(texts):
            break
    return texts


def _ratios(projection: Projection) -> Array | None:
    """Which share of the variance each component holds, where the file says so."""
    ratios = projection.state.get("explained_variance_ratio")
    if ratios is None or ratios.ndim != 1 or ratios.dtype.kind != "f":
        return None
    return ratios if ((ratios >= 0) & (ratios <= 1)).all() else None


def _draw_variance(projection: Projection, ratios: Array, theme: str) -> "Figure":
    """How much of the variance the first components hold together."""
    with themed(THEMES[theme]):
        figure = new_figure((5.2, 3.6), layout="constrained", needed_for="view")
        axes = figure.add_subplot()
        held = np.concatenate([[0.0], np.cumsum(ratios)])
        axes.plot(held, color=PALETTE[0])
        for share in (0.5, 0.9, 0.99):
            if held[-1] >= share:
                n = int(np.argmax(held >= share))
                axes.plot([n], [held[n]], "o", color=PALETTE[1])
                axes.annotate(f" {n}: {share:.0%}", (n, held[n]), va="top", fontsize=9)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("components")
        axes.set_ylabel("share of the variance")
        axes.set_title(as_label(f"PCA of {projection.attrs['layer']}"), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _title(projection: Projection, maps: Sequence[Projection]) -> str:
    method, layer = str(projection.attrs["method"]), projection.attrs["layer"]
    title = title_of(method)
    alike = [m for m in maps if (m.attrs["method"], m.attrs["layer"]) == (method, layer)]
    if len(alike) > 1:
        title = projection.name
    if len({other.attrs["layer"] for other in maps}) > 1:
        title += f" of {layer}"
    score = projection.attrs.get("trustworthiness")
    return as_label(title) + (f"  (trustworthiness {score:.3f})" if score is not None else "")


def _follow(embeddings: str | os.PathLike[str] | Embeddings) -> None:
    if isinstance(embeddings, Embeddings):
        path = embeddings.path
    else:
        path = Path(embeddings)
        path = path if path.suffix in (".h5", ".partial") else path / store.EMBEDDINGS_NAME
    if path.suffix == ".partial":
        path = path.with_suffix("")
    with contextlib.suppress(KeyboardInterrupt):
        follow_run(path)


# A server whose parent was killed would keep the port.
_SERVER = """
import os, sys, threading, time
parent = os.getppid()
def end_with_parent():
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
from tensorboard.main import run_main
sys.argv[0] = "tensorboard"
run_main()
"""


def _serve(opened: Embeddings, folder: Path, *, port: int, show: bool) -> None:
    """Run TensorBoard on ``folder``, bound to this machine alone, until it is stopped."""
    sweep(folder)
    exports = [folder] if (folder / derived.EXPORT_CONFIG).exists() else []
    exports = exports or [path.parent for path in sorted(folder.rglob(derived.EXPORT_CONFIG))]
    if not exports:
        raise DataError(
            f"there is no export in {folder}; make it with: python -m embedx export "
            f"embeddings={opened.path.parent} out={folder}"
        )
    for export in exports:
        exported = (export / derived.EXPORT_CONFIG).stat().st_mtime
        maps = (export.parent / "projections").glob("*.h5")
        if n_newer := sum(path.stat().st_mtime > exported for path in maps):
            log.warning(
                "%s newer than the export and not in it; to show all: python -m embedx export "
                "embeddings=%s",
                number_of(n_newer, "map is", "maps are"),
                export.parent,
            )
    if importlib.util.find_spec("tensorboard") is None:
        raise missing_extra("tensorboard", extra="viz", needed_for="viewer=tensorboard")
    if not 1 <= port <= 65_535:
        raise ConfigError(f"port {port} cannot be used (it is not 1 to 65535); choose port=NUMBER")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}); choose port=NUMBER"
            ) from None
    address = f"http://127.0.0.1:{port}/#projector"
    log.info("serving %s at %s until Ctrl-C", folder, address)
    log.info("from another machine: ssh -L %s:127.0.0.1:%s HOST, then the same address", port, port)
    if show:
        _show(address)
    command = ["-c", _SERVER, "--logdir", str(folder), "--host", "127.0.0.1"]
    server = subprocess.Popen(
        [sys.executable, *command, "--port", str(port), "--load_fast=false"],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        status = server.wait()
    except KeyboardInterrupt:
        return
    finally:
        server.terminate()
        server.wait()
    raise DataError(
        f"TensorBoard ended with exit status {status}; run: tensorboard --logdir {folder}"
    )
