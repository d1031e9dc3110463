"""The stage ``view``: maps as pictures, and TensorBoard on this machine alone."""

import importlib.util
import io
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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from embedx import store
from embedx.checks import checked
from embedx.errors import ConfigError, DataError, missing_extra, short
from embedx.store import Embeddings, Projection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger("embedx")

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
PANELS_ACROSS = 3
DPI = 150
NOTEBOOK_PX_PER_IN = 100
NAMED_FROM = 10  # points of a class: a name would hide fewer

# (name, colour, mask of the rows)
Group = tuple[str, str, npt.NDArray[np.bool_]]


@checked
def view(
    embeddings: str | os.PathLike[str] | Embeddings,
    *,
    viewer: Literal["map", "tensorboard"] = "map",
    projections: Sequence[str] | None = None,
    color: str = "label",
    out: str | os.PathLike[str] | None = None,
    open: bool = False,
    port: int = 6006,
) -> "Figure | None":
    """Draw projections as pictures, or serve them with TensorBoard.

    Args:
        embeddings: The file, its folder, or the opened file.
        viewer: ``map`` draws ``map-<projection>.png`` for each projection and ``maps.png`` with
            all of them; ``tensorboard`` serves the exported projector on 127.0.0.1 until Ctrl-C.
        projections: Names or paths of projections; all of them where not given.
        color: Column to colour by: ``label``, a metadata column, ``predicted`` where outputs were
            saved, or ``none``. Of more than ten classes the eight largest have a colour of their
            own and the others share grey; of more than ten numbers it is a scale.
        out: Folder for the pictures, or of the export to serve; beside the embeddings where not
            given.
        open: Show the picture or the page on this machine's screen.
        port: For TensorBoard.

    Returns:
        The figure with all projections, which a notebook shows; None after serving.

    Raises:
        ConfigError: No such column, or the port is in use.
        DataError: There is no projection, or no export to serve.
        DependencyError: The ``viz`` extra is not installed.
        StoreError: A file is missing or damaged, or there is no space.
    """
    opened = store.open(embeddings)
    if viewer == "tensorboard":
        _serve(Path(out) if out else opened.path.parent / "projector", port=port, show=open)
        return None
    maps = store.projections_of(opened, projections)
    if not maps:
        raise DataError(
            f"{opened.path} has no projection yet; make one with: python -m embedx project "
            f"embeddings={opened.path}"
        )
    values = _values(opened, color)
    groups = None if values is None or _is_scale(values) else _groups(values, opened.ok)
    folder = Path(out) if out else opened.path.parent
    # A picture in other colours is another picture.
    suffix = "" if color == "label" else f"-{re.sub(r'[^A-Za-z0-9_.]', '_', color)}"
    written = []
    for projection in maps:
        path = folder / f"map-{projection.name}{suffix}.png"
        written.append(_save(_draw(opened, [projection], values, groups, color), path))
    together = _draw(opened, maps, values, groups, color)
    if len(maps) > 1:
        written.append(_save(together, folder / f"maps{suffix}.png"))
    for path in written:
        log.info("wrote %s", path)
    if open:
        webbrowser.open(written[-1].resolve().as_uri())
    return together


def _values(opened: Embeddings, color: str) -> Sequence[Any] | store.Array | None:
    """The column to colour by, or None for one colour."""
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
    names = sorted(counts, key=float if array.dtype.kind in "fiu" else _natural)
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


def _natural(name: str) -> tuple[list[str | int], str]:
    """Sorts 2 before 10, also within a name."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [int(part) if i % 2 else part.casefold() for i, part in enumerate(parts)], name


def _draw(
    opened: Embeddings,
    maps: Sequence[Projection],
    values: Sequence[Any] | store.Array | None,
    groups: Sequence[Group] | None,
    color: str,
) -> "Figure":
    try:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.lines import Line2D

        figure_class = _figure_class()
    except ImportError:
        raise missing_extra("matplotlib", extra="viz", needed_for="view") from None
    across = min(len(maps), PANELS_ACROSS)
    down = math.ceil(len(maps) / across)
    longest = max((len(_as_label(name)) for name, _, _ in groups or ()), default=0)
    # Beside the panels a legend takes about 0.09 inch a letter.
    size_in = (PANEL_IN * across + 0.7 + 0.09 * longest, PANEL_IN * down + 0.6)
    figure = figure_class(figsize=size_in, layout="constrained")
    scale = None
    if values is not None and groups is None:
        numbers = np.asarray(values, dtype=np.float64)
        finite = numbers[np.isfinite(numbers)]
        scale = ScalarMappable(Normalize(finite.min(), finite.max()), "cividis")
        scale.set_cmap(scale.cmap.with_extremes(bad=OTHER))
        colors = scale.to_rgba(np.ma.masked_invalid(numbers))
    for number, projection in enumerate(maps):
        in_3d = projection.coords.shape[1] >= 3
        axes = figure.add_subplot(
            down, across, number + 1, projection="3d" if in_3d else "rectilinear"
        )
        axes.set_title(_title(projection, maps), fontsize=10)
        _panel(axes, projection, groups, None if scale is None else colors)
    if scale is not None:
        figure.colorbar(scale, ax=figure.axes, shrink=0.6, label=_as_label(color))
    if groups:
        figure.legend(
            handles=[
                Line2D([], [], linestyle="", marker="o", color=shade, label=_as_label(name))
                for name, shade, _ in groups
            ],
            title=None if color == "label" else _as_label(color),
            loc="outside right upper",
            frameon=False,
        )
    about = f"{opened.attrs.get('model', '')} on {opened.attrs.get('data', '')}"
    if str(opened.attrs.get("weights", "")).startswith("random"):
        about = f"RANDOM weights, {about}"
    layers = dict.fromkeys(str(projection.attrs["layer"]) for projection in maps)
    title = _as_label(f"{about}, layer {', '.join(layers)}", most=60 * across)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _figure_class() -> type["Figure"]:
    from matplotlib.figure import Figure

    class MapFigure(Figure):
        """A figure that a notebook shows by itself, unknown to pyplot, which would keep it."""

        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            # Fine enough for a dense screen, in the size that the figure has on paper.
            width_in, height_in = self.get_size_inches()
            return _png(self), {
                "width": round(width_in * NOTEBOOK_PX_PER_IN),
                "height": round(height_in * NOTEBOOK_PX_PER_IN),
            }

    return MapFigure


def _title(projection: Projection, maps: Sequence[Projection]) -> str:
    method, layer = str(projection.attrs["method"]), projection.attrs["layer"]
    title = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}.get(method, method)
    alike = [m for m in maps if (m.attrs["method"], m.attrs["layer"]) == (method, layer)]
    if len(alike) > 1:
        title = projection.name
    if len({other.attrs["layer"] for other in maps}) > 1:
        title += f" of {layer}"
    score = projection.attrs.get("trustworthiness")
    return _as_label(title) + (f"  (trustworthiness {score:.3f})" if score is not None else "")


def _panel(
    axes: "Axes",
    projection: Projection,
    groups: Sequence[Group] | None,
    colors: store.Array | None,
) -> None:
    coords = projection.coords[:, :3]
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
        axes.scatter(*points.T, color=shade, label=_as_label(name), **style)
    if flat:
        _write_names(axes, coords, placed, groups)


def _as_label(name: str, *, most: int = 32) -> str:
    """A name as matplotlib may draw it: no mathematics, one line, not hidden, not endless."""
    text = short(name, most=most).replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text  # a leading _ hides it in a legend


def _write_names(
    axes: "Axes", coords: store.Array, placed: npt.NDArray[np.bool_], groups: Sequence[Group]
) -> None:
    """Write each class at its most central point, the largest first, where there is room."""
    from matplotlib import patheffects

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
        label = _as_label(name, most=20)
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
            path_effects=[patheffects.withStroke(linewidth=3, foreground="white")],
        )


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


def _save(figure: "Figure", path: Path) -> Path:
    return store.replace_file(path, _png(figure))


def _serve(folder: Path, *, port: int, show: bool) -> None:
    """Run TensorBoard on ``folder``, bound to this machine alone, until it is stopped."""
    if not (folder / "projector_config.pbtxt").exists():
        raise DataError(
            f"there is no export in {folder}; make it with: python -m embedx export "
            f"embeddings={folder.parent}"
        )
    exported = (folder / "projector_config.pbtxt").stat().st_mtime
    newer = [
        p for p in (folder.parent / "projections").glob("*.h5") if p.stat().st_mtime > exported
    ]
    if newer:
        log.warning(
            "%s maps are newer than the export and not in it; to show them too: python -m embedx "
            "export embeddings=%s",
            len(newer),
            folder.parent,
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
        webbrowser.open(address)
    command = ["-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
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
