"""The stage ``view``: maps as pictures, and TensorBoard on this machine alone."""

import importlib.util
import io
import logging
import os
import socket
import subprocess
import sys
import webbrowser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from embedx import store
from embedx.errors import ConfigError, DataError, missing_extra
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
OTHER = "#d0d0d0"
PANEL_IN = 5.2
DPI = 150


def view(
    embeddings: str | os.PathLike[str],
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
        embeddings: The file or its folder.
        viewer: ``map`` draws ``map-<projection>.png`` for each projection and ``maps.png`` with
            all of them; ``tensorboard`` serves the exported projector on 127.0.0.1 until Ctrl-C.
        projections: Names or paths of projections; all of them where not given.
        color: Column to colour by: ``label``, a metadata column, or ``none``.
        out: Folder for the pictures; that of the embeddings where not given.
        open: Show the picture or the page on this machine's screen.
        port: For TensorBoard.

    Returns:
        The figure with all projections, or None after serving.

    Raises:
        ConfigError: No such column, or the port is in use.
        DataError: There is no projection, or no export to serve.
        DependencyError: The ``viz`` extra is not installed.
        StoreError: A file is missing or damaged, or there is no space.
    """
    opened = store.open(embeddings)
    if viewer == "tensorboard":
        _serve(opened.path.parent / "projector", port=port, show=open)
        return None
    maps = store.projections_of(opened, projections)
    if not maps:
        raise DataError(
            f"{opened.path} has no projection yet; make one with: python -m embedx project"
        )
    values = _values(opened, color)
    folder = Path(out) if out else opened.path.parent
    written = []
    for projection in maps:
        path = folder / f"map-{projection.name}.png"
        written.append(_save(_draw(opened, [projection], values, color), path))
    together = _draw(opened, maps, values, color)
    if len(maps) > 1:
        written.append(_save(together, folder / "maps.png"))
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
    if color not in opened.metadata:
        known = ", ".join(["label", "none", *opened.metadata])
        raise ConfigError(f"color={color!r} is no column of {opened.path}; it has: {known}")
    return opened.metadata[color]


def _draw(
    opened: Embeddings,
    maps: Sequence[Projection],
    values: Sequence[Any] | store.Array | None,
    color: str,
) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", extra="viz", needed_for="view") from None
    figure = Figure(figsize=(PANEL_IN * len(maps) + 1.2, PANEL_IN + 0.6), layout="constrained")
    for number, projection in enumerate(maps):
        in_3d = projection.coords.shape[1] >= 3
        axes = figure.add_subplot(
            1, len(maps), number + 1, projection="3d" if in_3d else "rectilinear"
        )
        _panel(axes, projection, values, name_clusters=not in_3d)
    handles, names = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            names,
            title=None if color == "label" else color,
            loc="outside right upper",
            frameon=False,
            markerscale=2.5,
        )
    model, data = opened.attrs.get("model", ""), opened.attrs.get("data", "")
    figure.suptitle(f"{model} on {data}, layer {maps[0].attrs['layer']}", fontsize=11)
    return figure


def _panel(
    axes: "Axes",
    projection: Projection,
    values: Sequence[Any] | store.Array | None,
    *,
    name_clusters: bool,
) -> None:
    coords = projection.coords[:, :3]
    placed = np.isfinite(coords).all(axis=1)
    n = int(placed.sum())
    # Fewer points are drawn larger: about the same ink from 50 to 50,000 of them.
    style: dict[str, Any] = {
        "s": float(np.clip(9000 / max(n, 1), 1.0, 40.0)),
        "linewidths": 0,
        "alpha": 0.85 if n < 20_000 else 0.5,
        "rasterized": True,
    }
    method = str(projection.attrs["method"])
    title = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}.get(method, method)
    score = projection.attrs.get("trustworthiness")
    axes.set_title(
        title + (f"  (trustworthiness {score:.3f})" if score is not None else ""), fontsize=10
    )
    axes.set_xticks([])
    axes.set_yticks([])
    if name_clusters:
        axes.set_aspect("equal", adjustable="datalim")
        for side in ("top", "right", "bottom", "left"):
            axes.spines[side].set_color("#cccccc")
    else:
        axes.set_zticks([])  # type: ignore[attr-defined]  # three-dimensional axes have it
    if values is None:
        axes.scatter(*coords[placed].T, color=PALETTE[0], **style)
        return
    array = np.asarray(values)
    if array.dtype.kind in "fiu" and len(np.unique(array)) > len(PALETTE):
        style.update(c=array[placed], cmap="cividis")
        drawn = axes.scatter(*coords[placed].T, **style)
        axes.figure.colorbar(drawn, ax=axes, shrink=0.6)
        return
    texts = np.array([str(value) or "(none)" for value in values])
    for name, shade, members in _classes(texts, placed):
        points = coords[members]
        label = _legible(name)
        axes.scatter(*points.T, color=shade, label=label, **style)
        if name_clusters and shade != OTHER:
            _name_cluster(axes, points, label)


def _classes(texts: "np.ndarray[Any, Any]", placed: Any) -> list[tuple[str, str, Any]]:
    """``(name, colour, mask)`` of each class; beyond ten, the rarest share one grey."""
    counts = Counter(texts[placed].tolist())
    names = sorted(counts, key=_natural)
    if len(names) > len(PALETTE):
        common = {name for name, _ in counts.most_common(len(PALETTE) - 1)}
        kept = [name for name in names if name in common]
        rest = f"{len(names) - len(kept)} other classes"
        log.info("%s classes: the %s largest have colours of their own", len(names), len(kept))
        grey = [(rest, OTHER, placed & ~np.isin(texts, kept))]
    else:
        kept, grey = names, []
    shown = [
        (name, shade, placed & (texts == name)) for name, shade in zip(kept, PALETTE, strict=False)
    ]
    return grey + shown


def _natural(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isascii() and name.isdigit() else (1, 0, name)


def _legible(name: str) -> str:
    """A name as matplotlib may draw it: no mathematics, one line, not hidden, not endless."""
    text = " ".join(name.replace("$", r"\$").split())
    text = text if len(text) <= 32 else text[:31] + "…"
    return f"\u200b{text}" if text.startswith("_") else text  # a leading _ hides it in a legend


def _name_cluster(axes: "Axes", points: Any, label: str) -> None:
    """Write a class where most of it lies: at the point of least median distance to the others."""
    from matplotlib import patheffects

    sample = points[:: max(1, len(points) // 300)]
    between = np.linalg.norm(sample[:, None] - sample[None, :], axis=2)
    x, y = sample[np.median(between, axis=1).argmin()]
    axes.annotate(
        label,
        (x, y),
        ha="center",
        va="center",
        fontsize=10,
        fontweight="bold",
        path_effects=[patheffects.withStroke(linewidth=3, foreground="white")],
    )


def _save(figure: "Figure", path: Path) -> Path:
    import warnings

    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(data, format="png", dpi=DPI, metadata={"Software": "embedx"})
    return store.replace_file(path, data.getvalue())


def _serve(folder: Path, *, port: int, show: bool) -> None:
    """Run TensorBoard on ``folder``, bound to this machine alone, until it is stopped."""
    if not (folder / "projector_config.pbtxt").exists():
        raise DataError(f"there is no export in {folder}; make it with: python -m embedx export")
    if importlib.util.find_spec("tensorboard") is None:
        raise missing_extra("tensorboard", extra="viz", needed_for="viewer=tensorboard")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"port {port} cannot be used ({reason}); choose port=NUMBER"
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
        server.terminate()
        server.wait()
        return
    raise DataError(
        f"TensorBoard ended with exit status {status}; run: tensorboard --logdir {folder}"
    )
