"""The stage ``export``: embeddings and projections as files of other tools."""

import codecs
import io
import json
import logging
import math
import os
import re
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from embedx import derived, ready_made
from embedx.checks import check_arguments, checked, refuse_taken
from embedx.columns import spelled
from embedx.derived import Projection
from embedx.disk import replace_file, replacing_file, replacing_folder
from embedx.errors import ConfigError, missing_extra
from embedx.matrix import Array, Matrix, stratified
from embedx.methods import principal_components
from embedx.ready_made import Given
from embedx.shown import rows_to_show, sheet_of
from embedx.store import Embeddings
from embedx.tabular import atlas, npz, table
from embedx.threads import n_threads

log = logging.getLogger("embedx")

_T = TypeVar("_T")

ROWS_MOST = 100_000  # what TensorBoard's page asks for
SHEET_PX_MOST = 8192
CLASSES_MOST = 50


@checked
def export(
    embeddings: Given,
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
    opened = ready_made.opened(embeddings)
    maps = derived.projections_of(opened, projections)
    if isinstance(exporter, str):
        if exporter not in EXPORTERS:
            raise ConfigError(
                f"exporter {exporter!r} is not known; choose one of: {', '.join(EXPORTERS)}"
            )
        exporter = EXPORTERS[exporter]
    refuse_taken(export, plugin=exporter, given=options, positional=3, where="exporter.")
    check_arguments(exporter, options, positional=3, where="exporter.")
    with opened.staying():
        return exporter(opened, maps, Path(out) if out else None, **options)


def tensorboard(
    embeddings: Embeddings, projections: Sequence[Projection], out: Path | None
) -> Path:
    """A log directory for TensorBoard's projector.

    Each capture point is a tensor, with thumbnails and without; each projection is a bookmark of
    the point it was made from, and a tensor of three columns. Rows that failed or could not be
    placed are left out of every file alike, and above 100,000 rows a sample stratified by label
    is shown. Memory does not grow with the features or the thumbnails.

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
        import tensorboard  # noqa: F401
        from google.protobuf import text_format
    except ImportError:
        raise missing_extra("tensorboard", extra="viz", needed_for="exporter=tensorboard") from None
    folder = out or embeddings.path.parent / "projector"
    _check_ours(folder)
    rows, _ = rows_to_show(embeddings, projections, most=ROWS_MOST, where="the projector", least=2)
    columns = _metadata(embeddings, rows)
    with replacing_folder(folder, foreign=derived.foreign_in_export) as new:
        config, sprite_px = _fill(new, embeddings, projections, rows=rows, columns=columns)
        marked = derived.EXPORT_MARK + text_format.MessageToString(config)
        replace_file(new / derived.EXPORT_CONFIG, marked.encode())
    log.info(
        "wrote %s: %s rows, %s tensors, %s projections as bookmarks, %s",
        folder,
        f"{len(rows):,}",
        len(config.embeddings),
        len(projections),
        f"thumbnails of {sprite_px} px" if sprite_px else "no thumbnails",
    )
    return folder


def _fill(
    folder: Path,
    embeddings: Embeddings,
    projections: Sequence[Projection],
    *,
    rows: Array,
    columns: dict[str, list[str]],
) -> tuple[Any, int]:
    """Write all files but the config; returns that and the side of a tile, 0 without pictures."""
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    replace_file(folder / "metadata.tsv", _tab_separated(columns))
    sprite_px = 0
    if embeddings.thumbnails is not None:
        with replacing_file(folder / "sprite.png") as file:
            sprite_px = _write_sprite(file, embeddings.thumbnails, rows)
    points = {point: Matrix(array, rows) for point, array in embeddings.embeddings.items()}
    tensors: list[tuple[str, Matrix, bool, list[Projection]]] = []
    for point, x in points.items():
        own = [p for p in projections if _layer(p, points) == point]
        tensors.append((point, x, sprite_px > 0, own))
        if sprite_px:  # "color by" tints the pictures: without them it shows
            tensors.append((f"{point}.points", x, False, own))
    for projection in projections:
        turned = Matrix(_principal_axes(Matrix(projection.coords, rows)))
        tensors.append((projection.name, turned, False, []))

    config = ProjectorConfig()
    # By the identity of a matrix: with thumbnails and without, a point is the same one.
    paths: dict[int, str] = {}
    axes: dict[int, Array] = {}
    for number, (text, x, pictures, own) in enumerate(tensors, start=1):
        # The page sorts tensors by name and opens the first one: the number keeps our order.
        name = f"{number:0{len(str(len(tensors)))}}-{_safe(text)}"
        if id(x) not in paths:
            paths[id(x)] = _write_tensor(folder, name, x)
        tensor = config.embeddings.add(
            tensor_name=name, tensor_path=paths[id(x)], metadata_path="metadata.tsv"
        )
        if tensor.tensor_path.endswith(".bin"):
            tensor.tensor_shape.extend(_drawn_shape(x))
        if pictures:
            tensor.sprite.image_path = "sprite.png"
            tensor.sprite.single_image_dim.extend([sprite_px, sprite_px])
        if own:
            tensor.bookmarks_path = f"{name}.bookmarks.json"
            color = None if pictures else _color_column(columns)
            if id(x) not in axes:
                axes[id(x)] = _principal_axes(x)
            with replacing_file(folder / tensor.bookmarks_path) as file:
                _write_bookmarks(
                    file,
                    _drawn_shape(x),
                    axes[id(x)],
                    rows,
                    own,
                    label=_label_column(columns),
                    color=color,
                )
    replace_file(folder / derived.EXPORT_EVENTS, _events())
    return config, sprite_px


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
    if Path.cwd().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"out={folder} is the folder you stand in, or one above, and would be replaced; choose "
            "another out=FOLDER"
        )
    foreign = derived.foreign_in_export(folder)
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


def _drawn_shape(x: Matrix) -> tuple[int, int]:
    """Rows and columns of a tensor: of fewer than three columns the page draws nothing."""
    return len(x), max(3, x.shape[1])


def _blocks(x: Matrix) -> Iterator[Array]:
    """The rows of a tensor as raw floats, some at a time."""
    for block in x.blocks():
        yield np.pad(x[block], ((0, 0), (0, _drawn_shape(x)[1] - x.shape[1]))).astype("<f4")


def _write_tensor(folder: Path, name: str, x: Matrix) -> str:
    """Write a tensor raw, or as text where raw would be read as text; returns the file's name."""
    path = f"{name}.{'tsv' if _reads_as_text(x) else 'bin'}"
    with replacing_file(folder / path) as file:
        for values in _blocks(x):
            if path.endswith(".bin"):
                file.write(values.tobytes())
            else:
                lines = ("\t".join(f"{v:.9g}" for v in row) for row in values.tolist())
                file.write(("\n".join(lines) + "\n").encode())
    return path


def _reads_as_text(x: Matrix) -> bool:
    """The server tries text first, line by line, and goes on to raw when a line is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for values in _blocks(x):
            line, end, _ = values.tobytes().partition(b"\n")
            decoder.decode(line, final=bool(end))
            if end:
                return True
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


# --------------------------------------------------------------------------- metadata.tsv


def _metadata(embeddings: Embeddings, rows: Array) -> dict[str, list[str]]:
    """The columns shown, as the page will read them."""
    columns = {"id": _as_text([embeddings.ids[i] for i in rows])}
    texts = embeddings.label_texts()
    if texts is not None:
        columns["label"] = _as_text([texts[i] for i in rows])
        if len(set(columns["label"])) > CLASSES_MOST:
            columns["class"] = _grouped(columns["label"])
    for name, given in embeddings.metadata.items():
        column = spelled(given)
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


_BAND_BYTES = 2**22


def _write_sprite(file: BinaryIO, thumbnails: Array, rows: Array) -> int:
    """Write the square sheet of square tiles, from the top left; returns the side of a tile."""
    largest = int(max(thumbnails.shape[1:3]))
    across = math.ceil(math.sqrt(len(rows)))
    tile = min(largest, SHEET_PX_MOST // across)
    step = max(1, _BAND_BYTES // (3 * across * tile**2))

    def band(first: int) -> Array:
        last = min(first + step, across)
        few = thumbnails[rows[first * across : last * across]]
        return np.asarray(sheet_of(few, tile=tile, across=across, down=last - first))

    side = across * tile
    _write_png(file, band, range(0, across, step), shape=(side, side))
    return tile


def _write_png(
    file: BinaryIO, band: Callable[[int], Array], bands: Sequence[int], *, shape: tuple[int, int]
) -> None:
    """Write a PNG of 8-bit RGB, its bands compressed side by side.

    Pillow takes four times as long in one thread: it weighs five filters for each line, and looks
    for strings where the noise of a photo has none. Here a line is told by the one above it, and
    only runs are looked for; the files are no larger.

    Args:
        file: Where to.
        band: Gives the pixels of a band, shape ``(h, width, 3)`` uint8.
        bands: What to call it with, from the top.
        shape: Height and width.

    References:
        Portable Network Graphics 1.2 (ISO/IEC 15948), sections 5, 9 and 10; RFC 1950.
    """

    def chunk(kind: bytes, data: bytes) -> None:
        checksum = zlib.crc32(kind + data)
        file.write(len(data).to_bytes(4) + kind + data + checksum.to_bytes(4))

    def compressed(which: int) -> tuple[Array, bytes]:
        pixels = band(which)
        lines = np.empty((len(pixels), 1 + pixels[0].size), np.uint8)
        flat = pixels.reshape(len(pixels), -1)
        lines[0, 0], lines[1:, 0] = 0, 2  # the filters None and Up
        lines[0, 1:] = flat[0]
        np.subtract(flat[1:], flat[:-1], out=lines[1:, 1:])
        deflate = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
        # Each band ends on a byte, and the last one ends the stream.
        end = zlib.Z_FINISH if which == bands[-1] else zlib.Z_SYNC_FLUSH
        return lines, deflate.compress(lines.data) + deflate.flush(end)

    file.write(b"\x89PNG\r\n\x1a\n")
    chunk(b"IHDR", shape[1].to_bytes(4) + shape[0].to_bytes(4) + bytes([8, 2, 0, 0, 0]))
    chunk(b"IDAT", b"\x78\x01")  # the head of a zlib stream
    checksum = zlib.adler32(b"")
    for lines, data in _side_by_side(compressed, bands):
        checksum = zlib.adler32(lines.data, checksum)
        chunk(b"IDAT", data)
    chunk(b"IDAT", checksum.to_bytes(4))
    chunk(b"IEND", b"")


def _side_by_side(work: Callable[[int], _T], items: Sequence[int]) -> Iterator[_T]:
    """Results in the order of the items, computed by threads that are few results ahead."""
    ahead: deque[Future[_T]] = deque()
    with ThreadPoolExecutor(n_threads()) as threads:
        for item in items:
            ahead.append(threads.submit(work, item))
            if len(ahead) > n_threads():
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


# --------------------------------------------------------------------------- projections


def _layer(projection: Projection, points: Mapping[str, Matrix]) -> str:
    """The capture point that a projection was made from; the first where it does not say."""
    layer = str(projection.attrs.get("layer"))
    return layer if layer in points else next(iter(points))


# Of so many features all rows are worth their axes; of more, so many rows are.
_AXES_FEATURES, _AXES_ROWS = 512, 2048


def _principal_axes(x: Matrix) -> Array:
    """Rows centred and turned to their principal axes, shape ``(n, 3)`` float32.

    The axes are those of all rows; of 2,048 of them, chosen at random, above 512 features.
    """
    some = x
    if x.shape[1] > _AXES_FEATURES:
        some = x.among(stratified(len(x), _AXES_ROWS, None, seed=0))
    mean, axes, _ = principal_components(some, min(3, *some.shape))
    turned = np.asarray(x.along(mean=mean, axes=axes))
    return np.pad(turned, ((0, 0), (0, 3 - turned.shape[1])))


def _write_bookmarks(
    file: BinaryIO,
    shape: tuple[int, ...],
    pca: Array,
    rows: Array,
    projections: Sequence[Projection],
    *,
    label: str,
    color: str | None,
) -> None:
    """Write a saved state a projection, in the slot "umap": the slot "tsne" would start moving."""
    keys = ["umap-0", "umap-1", "umap-2", "pca-0", "pca-1", "pca-2"]
    line = "{" + ", ".join(f'"{key}": %.7g' for key in keys) + "}"
    for number, projection in enumerate(projections):
        in_3d = projection.coords.shape[1] >= 3
        camera = {
            "orthographic": not in_3d,
            "position": [0.45, 0.9, 1.6] if in_3d else [0, 0, 4],
            "target": [0, 0, 0],
            "zoom": 1,
        }
        state = {
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
        }
        head = json.dumps(state, allow_nan=False).removesuffix("}")
        file.write(f'{", " if number else "["}{head}, "projections": ['.encode())
        for block in Matrix(pca).blocks():
            coords = projection.coords[rows[block], :3]
            coords = np.pad(coords, ((0, 0), (0, 3 - coords.shape[1])))
            table = np.hstack([coords, pca[block]]).tolist()
            text = ", ".join(line % tuple(row) for row in table)
            file.write(f"{', ' if block.start else ''}{text}".encode())
        file.write(b"]}")
    file.write(b"]")
