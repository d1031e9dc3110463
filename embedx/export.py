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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedx import store
from embedx.errors import ConfigError, DataError, missing_extra
from embedx.store import Array, Embeddings, Projection

log = logging.getLogger("embedx")

ROWS_MOST = 100_000  # what TensorBoard's page asks for
SHEET_PX_MOST = 8192
CLASSES_MOST = 50


def export(
    embeddings: str | os.PathLike[str],
    *,
    exporter: str | Callable[..., Path] = "tensorboard",
    projections: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Path:
    """Write embeddings and their projections for another tool.

    Args:
        embeddings: The file or its folder.
        exporter: ``tensorboard``, or a function ``(embeddings, projections, folder) -> path``.
        projections: Names or paths of projections; all of them where not given.
        out: Folder to write; ``projector`` beside the embeddings where not given.
        options: Of the exporter.

    Returns:
        The folder written. It replaces an earlier export whole.

    Raises:
        ConfigError: An unknown exporter, or ``out`` holds something that is not an export.
        DataError: Fewer than two rows can be shown.
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
    folder = Path(out) if out else opened.path.parent / "projector"
    return exporter(opened, maps, folder, **options)


def tensorboard(embeddings: Embeddings, projections: Sequence[Projection], folder: Path) -> Path:
    """A log directory for TensorBoard's projector.

    Each capture point is a tensor, with thumbnails and without; each projection is a bookmark of
    the first point, and a tensor of three columns. Rows that failed or could not be placed are
    left out of every file alike, and above 100,000 rows a sample stratified by label is shown.

    Args:
        embeddings: Opened file.
        projections: Projections of it.
        folder: Where to; an earlier export there is replaced whole.

    Returns:
        ``folder``.

    Raises:
        DependencyError: TensorBoard is not installed.
        ConfigError: ``folder`` holds something that is not an export.
        DataError: Fewer than two rows can be shown.

    References:
        The projector plugin of TensorBoard 2.21; ``docs/tensorboard.md`` states its rules.
    """
    try:
        from google.protobuf import text_format
        from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
    except ImportError:
        raise missing_extra("tensorboard", extra="viz", needed_for="exporter=tensorboard") from None
    if folder.exists() and any(folder.iterdir()) and not (folder / _CONFIG).exists():
        raise ConfigError(f"{folder} holds files that are not an export; choose another out=FOLDER")
    shown = embeddings.ok.copy()
    for projection in projections:
        shown &= np.isfinite(projection.coords).all(axis=1)
    rows = np.flatnonzero(shown)
    if len(rows) < 2:
        raise DataError(
            f"{embeddings.path} has {len(rows)} rows to show, and the projector needs at least 2"
        )
    if len(rows) < embeddings.n_rows:
        log.info("%s rows failed and are left out", f"{embeddings.n_rows - len(rows):,}")
    if len(rows) > ROWS_MOST:
        log.info(
            "the projector shows at most %s rows: taking a sample of %s, stratified by label",
            f"{ROWS_MOST:,}",
            f"{len(rows):,}",
        )
        rows = _stratified(rows, embeddings.labels, ROWS_MOST)
    files: dict[str, bytes] = {"metadata.tsv": _metadata(embeddings, rows)}
    sprite_px = 0
    if embeddings.thumbnails is not None:
        files["sprite.png"], sprite_px = _sprite(embeddings.thumbnails[rows])
    config = ProjectorConfig()

    def add(name: str, array: Array, *, sprite: bool, bookmarks: str = "", file: str = "") -> None:
        tensor = config.embeddings.add()
        tensor.tensor_name = name
        data = np.ascontiguousarray(array, dtype="<f4").tobytes()
        if _is_utf8(data):  # the server would take it for text
            tensor.tensor_path = f"{file or name}.tsv"
            lines = ("\t".join(f"{v:.9g}" for v in row) for row in array.tolist())
            files[tensor.tensor_path] = ("\n".join(lines) + "\n").encode()
        else:
            tensor.tensor_path = f"{file or name}.bin"
            tensor.tensor_shape.extend(array.shape)
            files[tensor.tensor_path] = data
        tensor.metadata_path = "metadata.tsv"
        if sprite and sprite_px:
            tensor.sprite.image_path = "sprite.png"
            tensor.sprite.single_image_dim.extend([sprite_px, sprite_px])
        if bookmarks:
            tensor.bookmarks_path = bookmarks

    names: set[str] = set()
    for number, (point, array) in enumerate(embeddings.embeddings.items()):
        x = np.asarray(array[rows], dtype=np.float32)
        bookmarks = ""
        if number == 0 and projections:
            bookmarks = "bookmarks.json"
            files[bookmarks] = _bookmarks(x, rows, projections)
        if x.shape[1] == 1:
            x = np.pad(x, ((0, 0), (0, 1)))  # the page lists no tensor of one column
        name = _tensor_name(point, names)
        add(name, x, sprite=True, bookmarks=bookmarks)
        if sprite_px:  # "color by" tints the pictures: without them it shows
            plain = _tensor_name(f"{point}.points", names)
            add(plain, x, sprite=False, bookmarks=bookmarks, file=name)
    for projection in projections:
        flat = _principal_axes(projection.coords[rows])
        add(_tensor_name(projection.name, names), flat, sprite=False)
    files[_CONFIG] = text_format.MessageToString(config).encode()
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


_CONFIG = "projector_config.pbtxt"
EXPORTERS: dict[str, Callable[..., Path]] = {"tensorboard": tensorboard}


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _tensor_name(text: str, taken: set[str]) -> str:
    """``text`` in the characters that TensorBoard's addresses bear, unique."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", text).strip(".") or "tensor"
    name, number = safe, 2
    while name in taken:
        name, number = f"{safe}-{number}", number + 1
    taken.add(name)
    return name


def _stratified(rows: Array, labels: Array | None, most: int, *, seed: int = 0) -> Array:
    """``most`` of ``rows``, of each label its share, in order."""
    rng = np.random.default_rng(seed)
    groups = np.zeros(len(rows), int) if labels is None else labels[rows]
    kept = []
    for group in np.unique(groups):
        members = rows[groups == group]
        share = max(1, math.floor(most * len(members) / len(rows)))
        kept.append(rng.choice(members, min(share, len(members)), replace=False))
    return np.sort(np.concatenate(kept))[:most]


# --------------------------------------------------------------------------- metadata.tsv


def _metadata(embeddings: Embeddings, rows: Array) -> bytes:
    """Tab-separated rows; a header only above several columns, as the page demands."""
    columns: dict[str, list[str]] = {"id": [_cell(embeddings.ids[i]) for i in rows]}
    texts = embeddings.label_texts()
    if texts is not None:
        labels = [texts[i] for i in rows]
        columns["label"] = _as_text([_cell(text) for text in labels])
        if len(set(labels)) > CLASSES_MOST:
            columns["class"] = _grouped(columns["label"])
    for name, column in embeddings.metadata.items():
        values = [_cell(str(column[i])) for i in rows]
        safe = _cell(name)
        while safe in columns or safe in ("__next__", "__seq_next__", "__index__"):
            safe += "_"
        columns[safe] = values
    lines = ["\t".join(row) for row in zip(*columns.values(), strict=True)]
    if len(columns) > 1:
        lines.insert(0, "\t".join(columns))
    text = "\n".join(lines) + "\n"
    assert text.count("\n") == len(rows) + (len(columns) > 1)
    return text.encode("utf-8", "backslashreplace")


def _cell(value: str) -> str:
    """A value without what ends a cell or a line; an empty cell would be read as missing."""
    return re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]+", " ", value).strip() or "(none)"


def _as_text(values: list[str]) -> list[str]:
    """Keep class names such as 007 from being read as numbers."""
    numbers = [
        value for value in values if value != "(none)" and re.fullmatch(r"[\d.eE+-]+", value)
    ]
    if any(not re.fullmatch(r"0|-?[1-9]\d*", value) for value in numbers):
        return [value if value == "(none)" else f"#{value}" for value in values]
    return values


def _grouped(labels: list[str]) -> list[str]:
    """The most frequent labels by name and the rest as one: the page colours at most 50."""
    common = {label for label, _ in Counter(labels).most_common(CLASSES_MOST - 1)}
    return [label if label in common else "(other)" for label in labels]


# --------------------------------------------------------------------------- sprite.png


def _sprite(thumbnails: Array) -> tuple[bytes, int]:
    """The square sheet of square tiles, row by row from the top left, and the side of a tile."""
    from PIL import Image

    n, side = thumbnails.shape[:2]
    across = math.ceil(math.sqrt(n))
    tile = min(side, SHEET_PX_MOST // across)
    sheet = np.full((across * tile, across * tile, 3), 255, np.uint8)
    for i in range(n):
        picture = thumbnails[i]
        if tile != side:
            picture = np.asarray(
                Image.fromarray(picture).resize((tile, tile), Image.Resampling.BOX)
            )
        y, x = divmod(i, across)
        sheet[y * tile : (y + 1) * tile, x * tile : (x + 1) * tile] = picture
    data = io.BytesIO()
    Image.fromarray(sheet).save(data, "PNG")
    return data.getvalue(), tile


# --------------------------------------------------------------------------- projections


def _principal_axes(coords: Array) -> Array:
    """Coordinates centred, turned to their principal axes and padded to three columns."""
    centered = coords.astype(np.float64) - coords.mean(axis=0, dtype=np.float64)
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    turned = (centered @ axes.T)[:, :3]
    return np.pad(turned, ((0, 0), (0, 3 - turned.shape[1]))).astype(np.float32)


def _bookmarks(x: Array, rows: Array, projections: Sequence[Projection]) -> bytes:
    """One saved state a projection, in the slot "umap": the slot "tsne" would start moving."""
    pca = _principal_axes(x) if x.shape[1] > 1 else np.zeros((len(x), 3), np.float32)
    states = []
    for projection in projections:
        coords = projection.coords[rows][:, :3].astype(np.float64)
        in_3d = coords.shape[1] == 3
        coords = np.pad(coords, ((0, 0), (0, 3 - coords.shape[1])))
        keys = ["umap-0", "umap-1", "umap-2", "pca-0", "pca-1", "pca-2"]
        table = np.hstack([coords, pca]).round(6).tolist()
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
                "dataSetDimensions": [len(x), x.shape[1]],
                "umapIs3d": in_3d,
                "umapNeighbors": 15,
                "umapMinDist": 0.1,
                "tSNEis3d": in_3d,
                "tSNEIteration": 0,
                "tSNEPerplexity": 0,
                "tSNELearningRate": 0,
                "pcaComponentDimensions": [0, 1, 2],
                "customXLeftText": "",
                "customXRightText": "",
                "customYUpText": "",
                "customYDownText": "",
                "filteredPoints": None,
                "selectedPoints": [],
                "selectedLabelOption": "label",
                "selectedColorOptionName": "label",
                "forceCategoricalColoring": True,
                "cameraDef": camera,
                "projections": [dict(zip(keys, row, strict=True)) for row in table],
            }
        )
    return json.dumps(states, allow_nan=False).encode()


def _swap_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write a whole folder beside ``folder`` and put it in its place in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    old = new.with_name(new.name + ".old")
    try:
        new.chmod(0o755)
        for name, data in files.items():
            store.replace_file(new / name, data)
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
