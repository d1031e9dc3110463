"""Exporters of one file that has a row a sample: for Embedding Atlas, for spreadsheets, for NumPy.

The first column of each is ``embedx_row``, the row of ``embeddings.h5``: it leads back from a
table that was sorted or cut. Beside each lies its SHA-256, which tells a file as we wrote it from
one that somebody worked on, and that must not be replaced.
"""

import contextlib
import dataclasses
import hashlib
import io
import logging
import os
import shlex
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from embedx import derived, layout
from embedx.derived import Projection
from embedx.disk import replace_file, replacing_file
from embedx.errors import ConfigError, DataError, missing_extra
from embedx.matrix import Array
from embedx.neighbors import Graph, metric_of
from embedx.shown import (
    ROW,
    Columns,
    Names,
    about_rows,
    cells_of,
    graph_of_shown,
    heads,
    most_trusted,
    rows_to_show,
    taken,
)
from embedx.store import Embeddings
from embedx.tables import as_csv

log = logging.getLogger("embedx")

ROWS_A_BLOCK = 8192
BLOCK_BYTES = 2**25


def atlas(
    embeddings: Embeddings,
    projections: Sequence[Projection],
    out: Path | None,
    *,
    projection: str | None = None,
    n_neighbors: int = 15,
) -> Path:
    """One parquet file for Embedding Atlas.

    It has one row a sample: ``embedx_row``, ``id``, ``label``, metadata and saved outputs; ``x``
    and ``y`` of one projection, ``x_NAME`` and ``y_NAME`` of each other; the thumbnail as
    ``image``; the nearest rows among the embeddings as ``neighbors``, and ``hubness``, how many
    rows have this one among their nearest. Rows that failed, could not be placed or hold a number
    that is not finite are left out. Memory does not grow with the thumbnails.

    Args:
        embeddings: Opened file.
        projections: Projections of it.
        out: File ending in ``.parquet``, or a folder; ``atlas.parquet`` beside the embeddings
            where not given. An earlier export there is replaced.
        projection: Name of the projection to show, such as ``umap``; that of the largest
            trustworthiness where not given.
        n_neighbors: How many nearest rows each row gets, in the layer and the metric that the
            projection was made from; 0 for none.

    Returns:
        The file.

    Raises:
        ConfigError: There is no such projection, ``n_neighbors`` is negative, or ``out`` is no
            place for the file.
        DataError: There is no projection, or no row can be shown.
        DependencyError: pyarrow is not installed.
        StoreError: There is no space.

    References:
        Embedding Atlas 0.26, https://apple.github.io/embedding-atlas. Hubness is the k-occurrence
        of Radovanovic, Nanopoulos, Ivanovic 2010, JMLR 11.
    """
    _require_pyarrow("exporter=atlas")
    if n_neighbors < 0:
        raise ConfigError(f"exporter.n_neighbors must be 0 or more, not {n_neighbors}")
    main = _main(embeddings, projections, projection)
    path = _target(embeddings, out, "atlas.parquet")
    maps = [main, *(other for other in projections if other is not main)]
    rows, _ = rows_to_show(embeddings, maps, most=None, where="the atlas")
    graph = _graph(embeddings, main, rows, n_neighbors)
    names = Names([*heads(embeddings), "x", "y", "z", "image", "neighbors", "hubness"])
    own: Columns = dict(zip("xyz", _axes(main, rows), strict=False))
    own.setdefault("y", np.zeros(len(rows), np.float32))
    for one in maps[1:]:
        own |= _coordinates(one, rows, names)
    if graph is not None:
        own["hubness"] = np.bincount(graph.indices.ravel(), minlength=len(rows))
    columns = {**about_rows(embeddings, rows, names), **own}
    made = [_plain(name, values) for name, values in columns.items()]
    named = {"x": "x", "y": "y"}
    if "text" in embeddings.metadata:
        named["text"] = "text"
    if embeddings.thumbnails is not None:
        made.append(_pictures("image", embeddings.thumbnails, rows))
        named["image"] = "image"
    if graph is not None:
        made.append(_neighbors("neighbors", graph))
        # Without a column for it, Embedding Atlas takes pictures and neighbours for the wish to
        # compute PageRank, by packages that this file spares its reader.
        named |= {"neighbors": "neighbors", "pagerank": "hubness"}
    _write_parquet(path, made, n=len(rows), parent=str(embeddings.attrs["id"]))
    _say(path, len(rows), f"{len(made)} columns, x and y of {main.name}")
    flags = " ".join(f"--{flag} {column}" for flag, column in named.items())
    log.info(
        "to look at it, where embedding-atlas is installed: embedding-atlas %s %s --host 127.0.0.1",
        shlex.quote(str(path)),
        flags,
    )
    return path


def table(
    embeddings: Embeddings,
    projections: Sequence[Projection],
    out: Path | None,
    *,
    format: Literal["csv", "parquet"] = "csv",
    vectors: bool = False,
) -> Path:
    """One table: a row a sample, for spreadsheets, pandas, R or a database.

    Its columns are ``embedx_row``, ``id``, ``label``, metadata and saved outputs; ``x_NAME``,
    ``y_NAME`` (and ``z_NAME``) of each projection, and its scores of each row, such as
    ``neighborhood_NAME``. Rows that failed are left out; what a row does not have is empty. In a
    CSV file no text is a formula to a spreadsheet: one that would be begins with an apostrophe.

    Args:
        embeddings: Opened file.
        projections: Projections of it.
        out: File ending in ``.csv`` or ``.parquet``, as ``format`` says, or a folder;
            ``table.csv`` or ``table.parquet`` beside the embeddings where not given. An earlier
            export there is replaced.
        format: ``csv``, or ``parquet``, which keeps types.
        vectors: Whether to add the embeddings: a list a layer in parquet, and in CSV a column
            ``LAYER[i]`` for each of its numbers.

    Returns:
        The file.

    Raises:
        ConfigError: ``out`` is no place for the file.
        DataError: Every row failed.
        DependencyError: pyarrow, for parquet, is not installed.
        StoreError: There is no space.
    """
    if format == "parquet":
        _require_pyarrow("exporter.format=parquet")
    path = _target(embeddings, out, f"table.{format}")
    rows = _good_rows(embeddings)
    layers = embeddings.embeddings if vectors else {}
    names = Names(heads(embeddings))
    own: Columns = {}
    for one in projections:
        own |= _coordinates(one, rows, names)
        for score, values in one.row_scores.items():
            own[names.free(f"{score}_{one.name}")] = values[rows]
    if format == "parquet":
        wide = [_vectors(names.free(layer), array, rows) for layer, array in layers.items()]
        columns = {**about_rows(embeddings, rows, names), **own}
        made = [*(_plain(name, values) for name, values in columns.items()), *wide]
        _write_parquet(path, made, n=len(rows), parent=str(embeddings.attrs["id"]))
        n_columns = len(made)
    else:
        numbered = [
            names.free(f"{layer}[{i}]")
            for layer, array in layers.items()
            for i in range(array.shape[1])
        ]
        columns = {**about_rows(embeddings, rows, names), **own}
        _write_csv(path, columns, numbered, list(layers.values()), rows)
        n_columns = len(columns) + len(numbered)
    _say(path, len(rows), f"{n_columns:,} columns")
    return path


def npz(embeddings: Embeddings, projections: Sequence[Projection], out: Path | None) -> Path:
    """One file of NumPy arrays, which ``numpy.load(path)`` reads without pickle.

    Its arrays are called as the datasets of ``embeddings.h5``: ``ids``, ``labels`` (indices into
    ``label_names``, -1 for none), ``metadata/COLUMN``, ``outputs/NAME`` and ``embeddings/LAYER``;
    then ``projections/NAME``, and its scores of each row ``row_scores/NAME/SCORE``. ``embedx_row``
    is the row of ``embeddings.h5``, ``parent`` the id of that file. Rows that failed are left out.

    Args:
        embeddings: Opened file.
        projections: Projections of it.
        out: File ending in ``.npz``, or a folder; ``embeddings.npz`` beside the embeddings where
            not given. An earlier export there is replaced.

    Returns:
        The file.

    Raises:
        ConfigError: ``out`` is no place for the file.
        DataError: Every row failed.
        StoreError: There is no space.
    """
    path = _target(embeddings, out, "embeddings.npz")
    rows = _good_rows(embeddings)
    everything: dict[str, Array | list[str]] = {
        ROW: rows,
        "ids": [embeddings.ids[i] for i in rows],
    }
    if embeddings.labels is not None:
        everything["labels"] = embeddings.labels[rows]
        everything["label_names"] = embeddings.label_names
    for name, values in embeddings.metadata.items():
        everything[layout.column_name(name)] = taken(values, rows)
    for name, values in embeddings.outputs.items():
        everything[f"outputs/{name}"] = values
    for layer, values in embeddings.embeddings.items():
        everything[layout.layer_name(layer)] = values
    whole = {name for name in everything if name.startswith(("outputs/", "embeddings/"))}
    names = Names([])
    for one in projections:
        name = names.free(one.name)
        everything[f"projections/{name}"] = one.coords[rows]
        for score, values in one.row_scores.items():
            everything[f"row_scores/{name}/{score}"] = values[rows]
    everything["parent"] = np.array(str(embeddings.attrs["id"]))
    with _exporting(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, values in everything.items():
            _write_npy(archive, name, values, rows if name in whole else None)
    _say(path, len(rows), f"{len(everything)} arrays")
    return path


# --------------------------------------------------------------------------- where to


def _target(embeddings: Embeddings, out: Path | None, name: str) -> Path:
    """The file to write: there is none yet, or an earlier export."""
    ending = Path(name).suffix
    path = embeddings.path.parent / name
    if out is not None:
        path = out / name if out.is_dir() or not out.suffix else out
    if path.suffix != ending:
        raise ConfigError(
            f"out={out} ends in {path.suffix}, and what is written is a {ending} file; name one "
            f"that ends in {ending}, or a folder that is there"
        )
    if os.path.lexists(path):
        try:
            is_ours = derived.is_export_table(path)
        except OSError:
            is_ours = False
        if not is_ours:
            raise ConfigError(
                f"{path} is there and is no export of embedx, or was changed since; move it, or "
                "choose another out=FILE"
            )
    return path


@contextlib.contextmanager
def _exporting(path: Path) -> Iterator[BinaryIO]:
    """A file to fill that takes the name ``path`` when the block ends, with its hash beside it."""
    with replacing_file(path) as file:
        yield file
        file.flush()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        # Before the table takes its name: without its hash it would be taken for a user's.
        before = ""
        with contextlib.suppress(OSError):
            before = derived.hash_path(path).read_text("ascii", "replace").partition("\n")[0]
        lines = [f"{digest}  {path.name}", *([before] if before else [])]
        replace_file(derived.hash_path(path), ("\n".join(lines) + "\n").encode())


def _require_pyarrow(needed_for: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise missing_extra("pyarrow", extra="data", needed_for=needed_for) from None


def _say(path: Path, n: int, about: str) -> None:
    size = path.stat().st_size / 1e6
    log.info("wrote %s: %s rows, %s, %.1f MB", path, f"{n:,}", about, size)


# --------------------------------------------------------------------------- what goes in


def _main(embeddings: Embeddings, maps: Sequence[Projection], name: str | None) -> Projection:
    """The projection that is shown."""
    if not maps:
        raise DataError(
            f"{embeddings.path} has no projection to show; make one with: python -m embedx project "
            f"embeddings={embeddings.path}"
        )
    if name is None:
        return maps[most_trusted(maps)]
    found = [one for one in maps if name in (one.name, one.name.rsplit("-", 1)[0])]
    if not found:
        raise ConfigError(
            f"there is no projection {name!r} among those to export (exporter.projection); there "
            f"are: {', '.join(one.name for one in maps)}"
        )
    if len(found) > 1:
        raise ConfigError(
            f"exporter.projection={name} is {len(found)} projections; choose one of: "
            + ", ".join(one.name for one in found)
        )
    return found[0]


def _good_rows(embeddings: Embeddings) -> Array:
    """The rows that did not fail; how many did is logged."""
    rows = np.flatnonzero(embeddings.ok)
    n_failed = embeddings.n_rows - len(rows)
    if not len(rows):
        raise DataError(
            f"all {embeddings.n_rows:,} rows of {embeddings.path} failed, and there is nothing to "
            "export; errors.jsonl beside it says why"
        )
    if n_failed:
        log.info("%s rows failed and are left out", f"{n_failed:,}")
    return rows


def _axes(projection: Projection, rows: Array) -> list[Array]:
    return list(projection.coords[rows].T)


def _coordinates(projection: Projection, rows: Array, names: Names) -> dict[str, Array]:
    """``x_NAME``, ``y_NAME``, ``z_NAME``; ``x1_NAME``, ... of more dimensions."""
    axes = _axes(projection, rows)
    letters = "xyz" if len(axes) <= 3 else [f"x{i}" for i in range(1, len(axes) + 1)]
    return {
        names.free(f"{letter}_{projection.name}"): axis
        for letter, axis in zip(letters, axes, strict=False)
    }


def _graph(
    embeddings: Embeddings, projection: Projection, rows: Array, n_neighbors: int
) -> Graph | None:
    """The nearest of the rows shown, in what the projection was made from."""
    layer, metric = str(projection.attrs["layer"]), metric_of(projection.attrs)
    k = min(n_neighbors, len(rows) - 1)
    if n_neighbors and layer not in embeddings.embeddings:
        log.info("%s is of no layer of this file: there are no neighbours", projection.name)
        return None
    if k < n_neighbors:
        log.info("there are %s rows: exporter.n_neighbors is %s, not %s", len(rows), k, n_neighbors)
    if not k:
        return None
    graph = graph_of_shown(embeddings, layer, rows, n_neighbors=k, metric=metric)
    kind = "" if graph.recall is None else f", {graph.recall:.3f} of them found"
    log.info("neighbors: the %s nearest by %s distance in %s%s", k, metric, layer, kind)
    return graph


# --------------------------------------------------------------------------- parquet


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column that is made block by block.

    Attributes:
        name: Of the column.
        type: Its pyarrow type.
        make: Numbers of rows of the table -> a pyarrow array.
        row_bytes: Of a row in memory, roughly.
        has_texts: Whether values come again, so that a dictionary of them is worth its while.
    """

    name: str
    type: Any
    make: Callable[[slice], Any]
    row_bytes: int
    has_texts: bool = False


def _plain(name: str, values: Array | list[str | None]) -> _Column:
    """Texts or numbers; a missing one is null."""
    import pyarrow as pa

    if isinstance(values, list):
        return _Column(
            name, pa.string(), lambda part: pa.array(values[part], pa.string()), 64, True
        )
    numbers = values.astype(_portable(values.dtype), copy=False)
    kind = pa.from_numpy_dtype(numbers.dtype)
    return _Column(
        name, kind, lambda part: pa.array(numbers[part], kind, from_pandas=True), numbers.itemsize
    )


def _portable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Float16 is unknown to half of what reads parquet; float32 holds the same numbers."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype.newbyteorder("=")


def _vectors(name: str, array: Array, rows: Array) -> _Column:
    """The rows of a layer, each as a list."""
    import pyarrow as pa

    dtype, d = _portable(array.dtype), array.shape[1]
    kind = pa.list_(pa.from_numpy_dtype(dtype), d)

    def make(part: slice) -> Any:
        numbers = np.ascontiguousarray(array[rows[part]], dtype)
        return pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), d)

    return _Column(name, kind, make, dtype.itemsize * d)


def _pictures(name: str, thumbnails: Array, rows: Array) -> _Column:
    """Thumbnails as Hugging Face's datasets write pictures."""
    import pyarrow as pa

    names = ["bytes", "path"]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

    def make(part: slice) -> Any:
        encoded = pa.array([_png(thumbnails[i]) for i in rows[part]], pa.binary())
        return pa.StructArray.from_arrays([encoded, pa.nulls(len(encoded), pa.string())], names)

    return _Column(name, kind, make, int(np.prod(thumbnails.shape[1:])))


def _png(pixels: Array) -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def _neighbors(name: str, graph: Graph) -> _Column:
    """The nearest rows of each, as numbers of rows of this table, and how far they are."""
    import pyarrow as pa

    k = graph.indices.shape[1]
    names = ["ids", "distances"]
    kind = pa.struct([("ids", pa.list_(pa.int32())), ("distances", pa.list_(pa.float32()))])

    def make(part: slice) -> Any:
        lists = []
        for values, dtype in ((graph.indices, np.int32), (graph.distances, np.float32)):
            block = np.ascontiguousarray(values[part], dtype)
            ends = np.arange(0, block.size + 1, k, dtype=np.int32)
            lists.append(pa.ListArray.from_arrays(pa.array(ends), pa.array(block.reshape(-1))))
        return pa.StructArray.from_arrays(lists, names)

    return _Column(name, kind, make, 8 * k)


def _write_parquet(path: Path, columns: Sequence[_Column], *, n: int, parent: str) -> None:
    """Write a table, a group of rows at a time."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([(column.name, column.type) for column in columns])
    schema = schema.with_metadata({derived.EXPORT_PARENT: parent})
    with_texts = [column.name for column in columns if column.has_texts]
    with (
        _exporting(path) as file,
        parquet.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=with_texts or False
        ) as writer,
    ):
        for part in _blocks(n, sum(column.row_bytes for column in columns)):
            arrays = [column.make(part) for column in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _blocks(n: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, min(ROWS_A_BLOCK, BLOCK_BYTES // max(row_bytes, 1)))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


# --------------------------------------------------------------------------- CSV


def _write_csv(
    path: Path, columns: Columns, numbered: Sequence[str], layers: Sequence[Array], rows: Array
) -> None:
    """Write a table as text, some rows at a time.

    Args:
        path: The file.
        columns: The first columns.
        numbered: Names of those that follow: the numbers of each layer.
        layers: The layers.
        rows: Those of their rows that count.
    """
    names = [*columns, *numbered]
    row_bytes = 200 * len(names)  # as Python's objects
    with _exporting(path) as file:
        for part in _blocks(len(rows), row_bytes):
            cells = [cells_of(values[part]) for values in columns.values()]
            for array in layers:
                cells += [cells_of(column) for column in np.asarray(array[rows[part]]).T]
            table = [dict(zip(names, row, strict=True)) for row in zip(*cells, strict=True)]
            file.write(as_csv(table, names, head=part.start == 0))


# --------------------------------------------------------------------------- NumPy


def _write_npy(
    archive: zipfile.ZipFile, name: str, values: Array | list[str], rows: Array | None
) -> None:
    """Write an array into an archive, some rows at a time.

    Args:
        archive: The archive.
        name: Of the array.
        values: The array, or n texts.
        rows: Those of its rows that count; all where None.
    """
    if isinstance(values, list):
        dtype = np.dtype(f"<U{max(map(len, values), default=1) or 1}")
        shape: tuple[int, ...] = (len(values),)
    else:
        dtype, shape = values.dtype, values.shape
    if rows is not None:
        shape = (len(rows), *shape[1:])
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    member = zipfile.ZipInfo(f"{name}.npy")  # of 1980: the same rows give the same bytes
    with archive.open(member, "w", force_zip64=True) as file:
        np.lib.format.write_array_header_2_0(file, header)
        if not shape:
            file.write(np.asarray(values).tobytes())
            return
        row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        for part in _blocks(shape[0], row_bytes):
            block = values[part] if rows is None else values[rows[part]]
            file.write(np.asarray(block, dtype).tobytes())
