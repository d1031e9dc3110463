"""The stage ``view``: maps as pictures, and TensorBoard on this machine alone."""

import importlib.util
import logging
import os
import re
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from embedx import store
from embedx.checks import checked
from embedx.errors import ConfigError, DataError, missing_extra
from embedx.figures import (
    PALETTE,
    Colors,
    Panel,
    as_label,
    colors_of,
    column_of,
    new_figure,
    panels,
    save,
    title_of,
)
from embedx.report import write_report
from embedx.store import Array, Embeddings, Projection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("embedx")

PANELS_ACROSS = 3
NEIGHBORHOOD = "neighborhood"


@checked
def view(
    embeddings: str | os.PathLike[str] | Embeddings,
    *,
    viewer: Literal["map", "report", "tensorboard"] = "map",
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
            all of them; ``report`` writes ``report.html``, one page that holds all it needs;
            ``tensorboard`` serves the exported projector on 127.0.0.1 until Ctrl-C.
        projections: Names or paths of projections; all of them where not given.
        color: Column to colour by: ``label``, a metadata column, ``predicted`` where outputs were
            saved, ``neighborhood`` for each point's own score (the share of its nearest rows that
            are near it in the map), or ``none``. Of more than ten classes the eight largest have a
            colour of their own and the others share grey; of more than ten numbers it is a scale.
        out: Folder for the pictures, or of the export to serve; beside the embeddings where not
            given.
        open: Show the picture or the page on this machine's screen.
        port: For TensorBoard.

    Returns:
        The figure with all projections, which a notebook shows; None after another viewer.

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
    folder = Path(out) if out else opened.path.parent
    if viewer == "report":
        path = write_report(opened, maps, color=color, path=folder / "report.html")
        log.info("wrote %s: %.1f MB", path, path.stat().st_size / 1e6)
        if open:
            webbrowser.open(path.resolve().as_uri())
        return None
    if color == NEIGHBORHOOD and color not in opened.metadata:
        colors = _neighborhoods(maps)
    else:
        colors = colors_of(column_of(opened, color), opened.ok, name=color)
    # A picture in other colours is another picture.
    suffix = "" if color == "label" else f"-{re.sub(r'[^A-Za-z0-9_.]', '_', color)}"
    written = []
    for number, projection in enumerate(maps):
        path = folder / f"map-{projection.name}{suffix}.png"
        written.append(save(_draw(opened, [projection], colors, first=number), path))
        if (ratios := _ratios(projection)) is not None:
            path = folder / f"variance-{projection.name}.png"
            written.append(save(_draw_variance(projection, ratios), path))
    together = _draw(opened, maps, colors)
    if len(maps) > 1:
        written.append(save(together, folder / f"maps{suffix}.png"))
    for path in written:
        log.info("wrote %s", path)
    if open:
        webbrowser.open(written[-1].resolve().as_uri())
    return together


def _neighborhoods(maps: Sequence[Projection]) -> Colors:
    """The score of each row in each map, one map after the other."""
    for projection in maps:
        scores = projection.row_scores.get(NEIGHBORHOOD)
        if scores is None or not ((scores >= 0) & (scores <= 1)).any():
            raise DataError(
                f"{projection.path} has no score of each row; make it again, with overwrite=true, "
                f"by the command that this prints: python -m embedx info path={projection.path}"
            )
    numbers = [projection.row_scores[NEIGHBORHOOD].astype(np.float64) for projection in maps]
    numbers = [np.where((scores >= 0) & (scores <= 1), scores, np.nan) for scores in numbers]
    return Colors("share of near rows kept", numbers=np.concatenate(numbers))


def _draw(
    opened: Embeddings, maps: Sequence[Projection], colors: Colors, *, first: int = 0
) -> "Figure":
    """Maps side by side; ``first`` is the number of the first of them among those coloured."""
    about = f"{opened.attrs.get('model', '')} on {opened.attrs.get('data', '')}"
    if str(opened.attrs.get("weights", "")).startswith("random"):
        about = f"RANDOM weights, {about}"
    layers = dict.fromkeys(str(projection.attrs["layer"]) for projection in maps)
    n = opened.n_rows
    is_one_a_row = colors.numbers is None or len(colors.numbers) == n
    shown = []
    for number, projection in enumerate(maps, first):
        coords, axes = projection.coords, []
        if coords.shape[1] > 3:
            coords = coords[:, :2]  # a hundred components have no picture, the largest two have
        if (ratios := _ratios(projection)) is not None:
            axes = [f"PC{i} ({ratio:.1%})" for i, ratio in enumerate(ratios[:3], 1)]
        rows = slice(None) if is_one_a_row else slice(number * n, (number + 1) * n)
        shown.append(Panel(_title(projection, maps), coords, rows=rows, axes=axes))
    title = f"{about}, layer {', '.join(layers)}"
    return panels(shown, colors, across=PANELS_ACROSS, title=title, needed_for="view")


def _ratios(projection: Projection) -> Array | None:
    """Which share of the variance each component holds, where the file says so."""
    ratios = projection.state.get("explained_variance_ratio")
    if ratios is None or ratios.ndim != 1 or ratios.dtype.kind != "f":
        return None
    return ratios if ((ratios >= 0) & (ratios <= 1)).all() else None


def _draw_variance(projection: Projection, ratios: Array) -> "Figure":
    """How much of the variance the first components hold together."""
    figure = new_figure((5.2, 3.6), layout="constrained", needed_for="view")
    axes = figure.add_subplot()
    held = np.concatenate([[0.0], np.cumsum(ratios)])
    axes.plot(held, color=PALETTE[0])
    for share in (0.5, 0.9, 0.99):
        if held[-1] >= share:
            n = int(np.argmax(held >= share))
            axes.plot([n], [held[n]], "o", color=PALETTE[2])
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
