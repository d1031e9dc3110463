"""The stage ``export``: embeddings and projections as files of other tools."""

import io
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedx import store
from embedx.checks import check_arguments, checked, refuse_taken
from embedx.errors import ConfigError, StoreError, missing_extra
from embedx.shown import rows_to_show, sheet_of
from embedx.store import Array, Embeddings, Projection
from embedx.tabular import atlas, npz, table

log = logging.getLogger("embedx")

ROWS_MOST = 100_000  # what TensorBoard's page asks for
SHEET_PX_MOST = 8192
CLASSES_MOST = 50


@checked
def export(
    embeddings: str | os.PathLike[str] | Embeddings,
    *,
    exporter: str | Callable[..., Path] = "tensorboard",
    projections: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Path:
    """Write embeddings and their projections for another tool.

    Args:
        embeddings: The file, its folder, or the opened file.
        exporter: ``tensorboard``, ``atlas``, ``table``, ``npz``, or a function ``(embeddings,
            projections, out) -> path``, of which ``out`` is a path, or None for a place beside
            the embeddings.
        projections: Names or paths of projections; all of them where not given.
        out: What to write: a folder for TensorBoard, a file or a folder for the others; beside
            the embeddings where not given.
        options: Of the exporter.

    Returns:
        The folder or file written. It replaces an earlier export whole.

    Raises:
        ConfigError: An unknown exporter, an option it does not have or that has the name of an
            argument of ``export``, or ``out`` holds something that is not an export.
        DataError: Too few rows can be shown.
        DependencyError: A package that the exporter needs is not installed.
        StoreError: A file is missing or damaged, or there is no space.
    """
    opened = store.open(embeddings)
    maps = store.projections_of(opened, projections)
    if isinstance(exporter, str):
        if exporter not in EXPORTERS:
            raise ConfigError(
                f"exporter {exporter!r} is not known; choose one of: {', '.join(EXPORTERS)}"
            )
        exporter = EXPORTERS[exporter]
    refuse_taken(export, plugin=exporter, given=options, positional=3, where="exporter.")
    check_arguments(exporter, options, positional=3, where="exporter.")
    return exporter(opened, maps, Path(out) if out else None, **options)


def tensorboard(
    embeddings: Embeddings, projections: Sequence[Projection], out: Path | None
) -> Path:
    """A log directory for TensorBoard's projector.

    Each capture point is a tensor, with thumbnails and without; each projection is a bookmark of
    the point it was made from, and a tensor of three columns. Rows that failed or could not be
    placed are left out of every file alike, and above 100,000 rows a sample stratified by label
    is shown.

    Args:
        embeddings: Opened file.
        projections: Projections of it.
        out: Folder to write, ``projector`` beside the embeddings where not given; an earlier export
            there is replaced whole.

    Returns:
        The folder. Above it, or above many of them, TensorBoard shows each as a run.

    Raises:
        DependencyError: TensorBoard is not installed.
        ConfigError: ``out`` holds something that is not an export.
        DataError: Fewer than two rows can be shown.
        StoreError: There is no space, or the folder cannot be written.

    References:
        The projector plugin of TensorBoard 2.21; ``docs/tensorboard.md`` states its rules.
    """
    try:
        from google.protobuf import text_format
        from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
    except ImportError:
        raise missing_extra("tensorboard", extra="viz", needed_for="exporter=tensorboard") from None
    folder = out or embeddings.path.parent / "projector"
    _check_ours(folder)
    rows, _ = rows_to_show(embeddings, projections, most=ROWS_MOST, where="the projector", least=2)
    points = {
        point: np.asarray(array[rows], dtype=np.float32)
        for point, array in embeddings.embeddings.items()
    }
    columns = _metadata(embeddings, rows)
    files: dict[str, bytes] = {"metadata.tsv": _tab_separated(columns)}
    sprite_px = 0
    if embeddings.thumbnails is not None:
        files["sprite.png"], sprite_px = _sprite(embeddings.thumbnails[rows])
    tensors: list[tuple[str, Array, bool, list[Projection]]] = []
    for point, features in points.items():
        # Of fewer than three columns the page lists a tensor and draws nothing.
        x = np.pad(features, ((0, 0), (0, max(0, 3 - features.shape[1]))))
        own = [p for p in projections if _layer(p, points) == point]
        tensors.append((point, x, sprite_px > 0, own))
        if sprite_px:  # "color by" tints the pictures: without them it shows
            tensors.append((f"{point}.points", x, False, own))
    for projection in projections:
        tensors.append((projection.name, _principal_axes(projection.coords[rows]), False, []))

    config = ProjectorConfig()
    # By the identity of an array: with thumbnails and without, a point is the same one.
    paths: dict[int, str] = {}
    axes: dict[int, Array] = {}
    for number, (text, x, pictures, own) in enumerate(tensors, start=1):
        # The page sorts tensors by name and opens the first one: the number keeps our order.
        name = f"{number:0{len(str(len(tensors)))}}-{_safe(text)}"
        if id(x) not in paths:
            path, data = _tensor_file(name, x)
            paths[id(x)], files[path] = path, data
        tensor = config.embeddings.add(
            tensor_name=name, tensor_path=paths[id(x)], metadata_path="metadata.tsv"
        )
        if tensor.tensor_path.endswith(".bin"):
            tensor.tensor_shape.extend(x.shape)
        if pictures:
            tensor.sprite.image_path = "sprite.png"
            tensor.sprite.single_image_dim.extend([sprite_px, sprite_px])
        if own:
            tensor.bookmarks_path = f"{name}.bookmarks.json"
            color = None if pictures else _color_column(columns)
            if id(x) not in axes:
                axes[id(x)] = _principal_axes(x)
            files[tensor.bookmarks_path] = _bookmarks(
                x.shape, axes[id(x)], rows, own, label=_label_column(columns), color=color
            )
    files[store.EXPORT_EVENTS] = _events()
    files[store.EXPORT_CONFIG] = (store.EXPORT_MARK + text_format.MessageToString(config)).encode()
    _swap_folder(folder, files)
    log.info(
        "wrote %s: %s rows, %s tensors, %s projections as bookmarks, %s",
        folder,
        f"{len(rows):,}",
        len(config.embeddings),
        len(projections),
        f"thumbnails of {sprite_px} px" if sprite_px else "no thumbnails",
    )
    return folder


EXPORTERS: dict[str, Callable[..., Path]] = {
    "tensorboard": tensorboard,
    "atlas": atlas,
    "table": table,
    "npz": npz,
}


def _check_ours(folder: Path) -> None:
    """Refuse a folder that holds anything but an export, for it will be replaced whole."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; choose another out=FOLDER")
    foreign = store.foreign_in_export(folder)
    if foreign:
        raise ConfigError(
            f"{folder} holds {min(foreign)}, which is no part of an export; choose another "
            "out=FOLDER"
        )


def _events() -> bytes:
    """A file of events without any, of no time and no machine.

    A folder below TensorBoard's log directory is a run of its own only if it has such a file.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    RecordWriter(data).write(Event(file_version="brain.Event:2").SerializeToString())
    return data.getvalue()


# --------------------------------------------------------------------------- tensors


def _safe(text: str) -> str:
    """``text`` in the characters that TensorBoard's addresses bear, short enough for a file."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:100]


def _tensor_file(name: str, x: Array) -> tuple[str, bytes]:
    """Name and bytes of a tensor's file: raw, or text where raw would be read as text."""
    data = x.astype("<f4").tobytes()
    # The server tries text first, line by line, and goes on to raw when a line is not UTF-8.
    end = data.find(b"\n") + 1
    try:
        data[: end or None].decode("utf-8")
    except UnicodeDecodeError:
        return f"{name}.bin", data
    lines = ("\t".join(f"{v:.9g}" for v in row) for row in x.tolist())
    return f"{name}.tsv", ("\n".join(lines) + "\n").encode()


# --------------------------------------------------------------------------- metadata.tsv


def _metadata(embeddings: Embeddings, rows: Array) -> dict[str, list[str]]:
    """The columns shown, as the page will read them."""
    columns = {"id": _as_text([embeddings.ids[i] for i in rows])}
    texts = embeddings.label_texts()
    if texts is not None:
        columns["label"] = _as_text([texts[i] for i in rows])
        if len(set(columns["label"])) > CLASSES_MOST:
            columns["class"] = _grouped(columns["label"])
    for name, column in embeddings.metadata.items():
        safe = _cell(name)
        while safe in columns or safe in ("__next__", "__seq_next__", "__index__"):
            safe += "_"
        values = [column[i] for i in rows]
        if isinstance(column, list) or column.dtype.kind in "iu":
            columns[safe] = _as_text([str(value) for value in values])
        else:  # an empty cell is a missing number; the text "nan" would make texts of them all
            columns[safe] = [str(value) if np.isfinite(value) else "" for value in values]
    return columns


def _tab_separated(columns: dict[str, list[str]]) -> bytes:
    """A row a line; a header only above several columns, as the page demands."""
    lines = ["\t".join(row) for row in zip(*columns.values(), strict=True)]
    if len(columns) > 1:
        lines.insert(0, "\t".join(columns))
    data = bytearray()
    for line in lines:
        encoded = line.encode("utf-8", "backslashreplace") + b"\n"
        # The page decodes a megabyte at a time and spoils a character that lies across the border.
        # Tabs past the last column move it; nothing reads them.
        cut = _PAGE_BLOCK_BYTES - len(data) % _PAGE_BLOCK_BYTES
        while cut < len(encoded) and encoded[cut] & 0xC0 == 0x80:
            data[-1:] = b"\t\n"
            cut -= 1
        data += encoded
    assert data.count(b"\n") == len(lines)
    return bytes(data)


_PAGE_BLOCK_BYTES = 1_000_000


def _cell(value: str) -> str:
    """A value without what ends a cell or a line; an empty cell would be read as missing."""
    line = re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]+", " ", value)
    return re.sub(r"^[\s\ufeff]+|[\s\ufeff]+$", "", line) or "(none)"


# What JavaScript takes for a number, and what comes out of it unchanged.
_NUMBER = re.compile(
    r"[+-]?(Infinity|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)|0x[\da-f]+|0o[0-7]+|0b[01]+",
    re.ASCII | re.IGNORECASE,
)
_PLAIN_NUMBER = re.compile(r"0|-?[1-9]\d{0,14}|-?(0|[1-9]\d{0,5})\.\d{0,5}[1-9]", re.ASCII)


def _as_text(values: list[str]) -> list[str]:
    """Cells that the page shows as they are: 007, which it would make 7, becomes #007."""
    cells = [_cell(value) for value in values]
    numbers = {cell for cell in cells if _NUMBER.fullmatch(cell)}
    if all(_PLAIN_NUMBER.fullmatch(cell) for cell in numbers):
        return cells
    mark = "#"
    while any(cell.startswith(mark) for cell in cells):
        mark += "#"
    return [mark + cell if cell in numbers else cell for cell in cells]


def _grouped(labels: list[str]) -> list[str]:
    """The most frequent labels by name and the rest as one: the page colours at most 50."""
    common = {label for label, _ in Counter(labels).most_common(CLASSES_MOST - 1)}
    return [label if label in common else "(other)" for label in labels]


def _label_column(columns: dict[str, list[str]]) -> str:
    """The column that names points; the page calls a column without a header "label"."""
    return "label" if "label" in columns or len(columns) == 1 else "id"


def _color_column(columns: dict[str, list[str]]) -> str | None:
    """The column to colour by, of those that the page offers for it."""
    for name in ("label", "class"):
        if name in columns and len(set(columns[name])) <= CLASSES_MOST:
            return name
    return None


# --------------------------------------------------------------------------- sprite.png


def _sprite(thumbnails: Array) -> tuple[bytes, int]:
    """The square sheet of square tiles, row by row from the top left, and the side of a tile."""
    n, height, width = thumbnails.shape[:3]
    across = math.ceil(math.sqrt(n))
    tile = min(max(height, width), SHEET_PX_MOST // across)
    sheet = sheet_of(thumbnails, tile=tile, across=across, down=across)
    data = io.BytesIO()
    sheet.save(data, "PNG", compress_level=1)  # 0.6 of the time for 1.1 of the bytes
    return data.getvalue(), tile


# --------------------------------------------------------------------------- projections


def _layer(projection: Projection, points: Mapping[str, Array]) -> str:
    """The capture point that a projection was made from; the first where it does not say."""
    layer = str(projection.attrs.get("layer"))
    return layer if layer in points else next(iter(points))


def _principal_axes(coords: Array) -> Array:
    """Coordinates centred, turned to their principal axes, cut or padded to three columns."""
    centered = coords.astype(np.float64) - coords.mean(axis=0, dtype=np.float64)
    if min(centered.shape) > 500:
        from sklearn.utils.extmath import randomized_svd

        _, _, axes = randomized_svd(centered, 3, random_state=0)
    else:
        _, _, axes = np.linalg.svd(centered, full_matrices=False)
    turned = centered @ axes[:3].T
    return np.pad(turned, ((0, 0), (0, 3 - turned.shape[1]))).astype(np.float32)


def _bookmarks(
    shape: tuple[int, ...],
    pca: Array,
    rows: Array,
    projections: Sequence[Projection],
    *,
    label: str,
    color: str | None,
) -> bytes:
    """One saved state a projection, in the slot "umap": the slot "tsne" would start moving."""
    states = []
    for projection in projections:
        coords = projection.coords[rows][:, :3]
        in_3d = coords.shape[1] == 3
        coords = np.pad(coords, ((0, 0), (0, 3 - coords.shape[1])))
        keys = ["umap-0", "umap-1", "umap-2", "pca-0", "pca-1", "pca-2"]
        table = [[float(f"{v:.7g}") for v in row] for row in np.hstack([coords, pca]).tolist()]
        camera = {
            "orthographic": not in_3d,
            "position": [0.45, 0.9, 1.6] if in_3d else [0, 0, 4],
            "target": [0, 0, 0],
            "zoom": 1,
        }
        states.append(
            {
                "label": f"{str(projection.attrs['method']).upper()} {projection.name}",
                "isSelected": False,
                "selectedProjection": "umap",
                "dataSetDimensions": list(shape),
                "umapIs3d": in_3d,
                "umapNeighbors": 15,
                "umapMinDist": 0.1,
                "tSNEis3d": in_3d,
                "tSNEIteration": 0,
                "tSNEPerplexity": 30,  # of the page's own sliders, which a bookmark sets
                "tSNELearningRate": 1,
                "pcaComponentDimensions": [0, 1, 2],
                "customXLeftText": "",
                "customXRightText": "",
                "customYUpText": "",
                "customYDownText": "",
                "filteredPoints": None,
                "selectedPoints": [],
                "selectedLabelOption": label,
                "selectedColorOptionName": color or "No color map",
                "forceCategoricalColoring": False,  # up to 50 values are categories anyway
                "cameraDef": camera,
                "projections": [dict(zip(keys, row, strict=True)) for row in table],
            }
        )
    return json.dumps(states, allow_nan=False).encode()


def _swap_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write a whole folder beside ``folder``, then put it in its place or leave all as it was."""
    target = folder.resolve()  # a link stays, and what it leads to is replaced
    new = old = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        new.chmod(0o755)
        for name, data in files.items():
            store.replace_file(new / name, data)
        if target.exists():
            old = new.with_name(new.name + ".old")
            os.replace(target, old)
        os.replace(new, target)
    except BaseException as error:
        if old is not None and old.exists() and not target.exists():
            os.replace(old, target)
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise StoreError(
                f"cannot write {folder}: {error.strerror or error}; choose another out=FOLDER"
            ) from error
        raise
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
