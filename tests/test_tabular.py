"""Exports of one file that has a row a sample, read back by pyarrow, csv, pandas and NumPy."""

import csv
import errno
import io
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedx import derived, store, tabular
from embedx.errors import ConfigError, DataError, DependencyError, StoreError
from embedx.export import export
from tests.conftest import embeddings_file, projection_file

Array = np.ndarray[Any, Any]
parquet = pytest.importorskip("pyarrow.parquet", reason="the data extra is not installed")
pa = pytest.importorskip("pyarrow")

N = 30
FAILED, UNPLACED = (3, 17), 8
PRINTED = "to look at it, where embedding-atlas is installed: "


def points_of(n: int, d: int = 5, *, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def pictures_of(n: int) -> Array:
    return np.random.default_rng(1).integers(0, 256, (n, 6, 4, 3)).astype(np.uint8)


def run_with_all(
    folder: Path, *, failed: tuple[int, ...] = FAILED, metric: str = "euclidean"
) -> Path:
    """Two layers, labels with gaps, metadata of each kind, pictures, and maps of 2 and 3 axes."""
    folder.mkdir(exist_ok=True)
    path = embeddings_file(
        folder,
        {"pool": points_of(N), "fc:input": points_of(N, 3, seed=2)},
        labels=["" if i % 7 == 0 else f"class {i % 3}" for i in range(N)],
        metadata={
            "note": [f"=note {i}" for i in range(N)],
            "width": np.arange(N) * 2,
            "score": np.where(np.arange(N) % 5 == 0, np.nan, np.arange(N) / 7),
        },
        thumbnails=pictures_of(N),
        failed=failed,
    )
    flat, solid = points_of(N, 2, seed=3), points_of(N, 3, seed=4)
    for coords in (flat, solid):
        coords[list(failed)] = np.nan
    if failed:
        flat[UNPLACED] = np.nan
    projection_file(path, "pca-1", solid, layer="pool")
    projection_file(path, "umap-2", flat, layer="pool", metric=metric)
    return path


def kept_rows(*, failed: tuple[int, ...] = FAILED) -> list[int]:
    return [i for i in range(N) if not failed or i not in (*failed, UNPLACED)]


# --------------------------------------------------------------------------- Embedding Atlas


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("failed", [(), FAILED])
def test_the_atlas_holds_what_embedding_atlas_asks_for_row_by_row(
    tmp_path: Path, failed: tuple[int, ...], metric: str
) -> None:
    path = run_with_all(tmp_path, failed=failed, metric=metric)
    opened = store.open(path)
    made = export(path, exporter="atlas", projection="umap", n_neighbors=4)
    assert made == tmp_path / "atlas.parquet"
    table = parquet.read_table(made)
    assert {field.name: str(field.type) for field in table.schema} == {
        "embedx_row": "int64",
        "id": "string",
        "label": "string",
        "note": "string",
        "score": "double",
        "width": "int64",
        "x": "float",
        "y": "float",
        "x_pca-1": "float",
        "y_pca-1": "float",
        "z_pca-1": "float",
        "hubness": "int64",
        "image": "struct<bytes: binary, path: string>",
        "neighbors": "struct<ids: list<element: int32>, distances: list<element: float>>",
    }
    assert table.schema.metadata[b"embedx_parent"] == b"one"
    got = table.to_pydict()
    kept = kept_rows(failed=failed)
    assert got["embedx_row"] == kept
    assert got["id"] == [f"row-{i:04d}" for i in kept]
    assert got["label"] == [None if i % 7 == 0 else f"class {i % 3}" for i in kept]
    assert got["note"] == [f"=note {i}" for i in kept]
    assert got["score"] == [None if i % 5 == 0 else i / 7 for i in kept]
    solid, flat = (p.coords[kept] for p in derived.projections_of(opened))
    np.testing.assert_array_equal(np.array([got["x"], got["y"]], np.float32).T, flat)
    names = ("x_pca-1", "y_pca-1", "z_pca-1")
    np.testing.assert_array_equal(np.array([got[n] for n in names], np.float32).T, solid)
    for i, picture in zip(kept, got["image"], strict=True):
        assert picture["path"] is None
        pixels = Image.open(io.BytesIO(picture["bytes"]))
        assert pixels.format == "PNG"
        np.testing.assert_array_equal(np.asarray(pixels), pictures_of(N)[i])

    x = points_of(N)[kept].astype(np.float64)
    if metric == "cosine":
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        distances = 1 - unit @ unit.T
    else:
        distances = np.linalg.norm(x[:, None] - x[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    nearest = np.argsort(distances, axis=1)[:, :4]
    assert [row["ids"] for row in got["neighbors"]] == nearest.tolist()
    np.testing.assert_allclose(
        [row["distances"] for row in got["neighbors"]],
        np.take_along_axis(distances, nearest, axis=1),
        rtol=1e-5,
    )
    # The graph of all good rows serves others too; one of fewer rows is nobody else's.
    assert bool(list(tmp_path.glob("neighbors-*.h5"))) == (not failed)
    assert got["hubness"] == [int((nearest == i).sum()) for i in range(len(kept))]


def test_groups_of_rows_hold_the_same_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_with_all(tmp_path)
    whole = parquet.read_table(export(path, exporter="atlas"))
    vectors = parquet.read_table(export(path, exporter="table", format="parquet", vectors=True))
    text = export(path, exporter="table", vectors=True).read_bytes()
    arrays = export(path, exporter="npz").read_bytes()
    monkeypatch.setattr(tabular, "ROWS_A_BLOCK", 7)
    in_groups = export(path, exporter="atlas")
    assert parquet.ParquetFile(in_groups).num_row_groups == 4
    assert parquet.read_table(in_groups).equals(whole)
    again = export(path, exporter="table", format="parquet", vectors=True)
    assert parquet.ParquetFile(again).num_row_groups == 4
    assert parquet.read_table(again).equals(vectors)
    assert export(path, exporter="table", vectors=True).read_bytes() == text
    assert export(path, exporter="npz").read_bytes() == arrays


@pytest.mark.parametrize(
    ("with_pictures", "n_neighbors", "flags"),
    [
        (True, 4, {"image": "image", "neighbors": "neighbors", "pagerank": "hubness"}),
        (True, 0, {"image": "image"}),
        (False, 4, {"neighbors": "neighbors", "pagerank": "hubness"}),
    ],
)
def test_the_command_that_is_printed_names_columns_that_are_there(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    with_pictures: bool,
    n_neighbors: int,
    flags: dict[str, str],
) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    thumbnails = pictures_of(9) if with_pictures else None
    path = embeddings_file(folder, {"pool": points_of(9)}, thumbnails=thumbnails)
    projection_file(path, "umap-1", points_of(9, 2))
    with caplog.at_level(logging.INFO, "embedx"):
        made = export(path, exporter="atlas", n_neighbors=n_neighbors)
    (line,) = (text for text in caplog.messages if text.startswith(PRINTED))
    program, file, *words = shlex.split(line.removeprefix(PRINTED))
    assert (program, file) == ("embedding-atlas", str(made))
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.pop("--host") == "127.0.0.1"
    assert given == {f"--{k}": v for k, v in {"x": "x", "y": "y", **flags}.items()}
    # Nothing else of the file is taken for what it is not.
    assert set(given.values()) <= set(parquet.read_schema(made).names)
    assert ("hubness" in parquet.read_schema(made).names) == (n_neighbors > 0)


def test_a_map_of_one_axis_has_zeros_for_the_other_and_few_rows_have_fewer_neighbours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    projection_file(path, "pca-1", points_of(3, 1))
    with caplog.at_level(logging.INFO, "embedx"):
        got = parquet.read_table(export(path, exporter="atlas")).to_pydict()
    assert got["y"] == [0, 0, 0]
    assert np.ptp(got["x"]) > 0
    assert [sorted(row["ids"]) for row in got["neighbors"]] == [[1, 2], [0, 2], [0, 1]]
    assert "there are 3 rows: exporter.n_neighbors is 2, not 15" in caplog.messages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": "tsne"}, "there is no projection 'tsne' .*; there are: pca-1, pca-2"),
        ({"projection": "pca"}, "exporter.projection=pca is 2 .*; choose one of: pca-1, pca-2"),
        ({"n_neighbors": -1}, "exporter.n_neighbors must be 0 or more, not -1"),
    ],
)
def test_what_the_atlas_cannot_show_is_refused_in_one_line(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(4)})
    with pytest.raises(DataError, match="no projection to show; make one with: python -m embedx"):
        export(path, exporter="atlas")
    for name in ("pca-1", "pca-2"):
        projection_file(path, name, points_of(4, 2))
    with pytest.raises(ConfigError, match=message) as caught:
        export(path, exporter="atlas", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "atlas.parquet").exists()


def test_columns_by_the_names_of_the_export_keep_their_values_under_names_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["x", "ID", "image", "Hubness", "embedx_row", "X_umap-1", "pool", "pool[0]"]
    metadata = {name: np.arange(4) + 10 * k for k, name in enumerate(names)}
    path = embeddings_file(
        tmp_path, {"pool": points_of(4), "label": points_of(4, 2)}, metadata=metadata
    )
    projection_file(path, "umap-1", points_of(4, 2))
    exports: list[tuple[dict[str, Any], set[str]]] = [
        ({"exporter": "atlas"}, {"x", "ID", "image", "Hubness", "embedx_row"}),
        (
            {"exporter": "table", "format": "parquet", "vectors": True},
            {"ID", "embedx_row", "X_umap-1", "pool"},
        ),
        ({"exporter": "table", "vectors": True}, {"ID", "embedx_row", "X_umap-1", "pool[0]"}),
    ]
    for options, renamed in exports:
        caplog.clear()
        with caplog.at_level(logging.INFO, "embedx"):
            made = export(path, **options)
        if made.suffix == ".csv":
            rows = list(csv.DictReader(io.StringIO(made.read_text("utf-8"))))
            got = {key: [row[key] for row in rows] for key in rows[0]}
        else:
            got = parquet.read_table(made).to_pydict()
        folded = [name.casefold() for name in got]
        assert len(set(folded)) == len(folded)
        for name, values in metadata.items():
            column = got[f"{name}_" if name in renamed else name]
            assert [int(value) for value in column] == values.tolist()
        said = {name for name in names if f"the column {name!r} is called" in caplog.text}
        assert said == renamed


# --------------------------------------------------------------------------- tables


def test_a_csv_table_reads_back_as_what_was_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_with_all(tmp_path)
    with caplog.at_level(logging.INFO, "embedx"):
        made = export(path, exporter="table", vectors=True)
    assert made == tmp_path / "table.csv"
    assert "2 rows failed and are left out" in caplog.messages
    text = made.read_bytes().decode("utf-8")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    kept = [i for i in range(N) if i not in FAILED]
    assert [row["embedx_row"] for row in rows] == [str(i) for i in kept]
    assert [row["label"] for row in rows] == ["" if i % 7 == 0 else f"class {i % 3}" for i in kept]
    assert [row["note"] for row in rows] == [f"'=note {i}" for i in kept]  # no formula
    assert [row["width"] for row in rows] == [str(2 * i) for i in kept]
    scores = [float(row["score"]) if row["score"] else None for row in rows]
    assert scores == [None if i % 5 == 0 else i / 7 for i in kept]
    flat = derived.projections_of(store.open(path))[1].coords
    for row, i in zip(rows, kept, strict=True):
        there = [row["x_umap-2"], row["y_umap-2"]]
        expected = ["", ""] if i == UNPLACED else [str(v) for v in flat[i]]
        assert there == expected
    for layer, x in (("pool", points_of(N)), ("fc:input", points_of(N, 3, seed=2))):
        names = [f"{layer}[{j}]" for j in range(x.shape[1])]
        got = np.array([[np.float32(row[name]) for name in names] for row in rows])
        np.testing.assert_array_equal(got, x[kept])


def test_no_name_of_a_column_is_a_formula_to_a_spreadsheet(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(2)}, metadata={"=cmd()": np.arange(2)})
    assert export(path, exporter="table").read_text().splitlines()[0] == "embedx_row,id,'=cmd()"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_parquet_table_has_a_list_a_layer_and_the_scores_of_each_row(
    tmp_path: Path, dtype: type
) -> None:
    x = points_of(6, 4).astype(dtype)
    path = embeddings_file(tmp_path, {"a/b": x}, failed=[2], dtype=dtype)
    share = np.array([0, 0.5, np.nan, 1, 0.25, 0.75], np.float32)
    derived.write_projection(
        tmp_path / "projections" / "umap-1.h5",
        coords=points_of(6, 2),
        ids=store.open(path).ids,
        attrs={"id": "u", "parent": "one", "method": "umap", "layer": "a/b"},
        row_scores={"neighborhood": share},
    )
    table = parquet.read_table(export(path, exporter="table", format="parquet", vectors=True))
    kept = [0, 1, 3, 4, 5]
    assert table.column_names == [
        *("embedx_row", "id", "x_umap-1", "y_umap-1", "neighborhood_umap-1", "a/b")
    ]
    got = np.stack(table["a/b"].to_numpy())
    assert got.dtype == (np.float32 if dtype == np.float16 else dtype)
    np.testing.assert_array_equal(got, x[kept])
    assert table["neighborhood_umap-1"].to_pylist() == share[kept].tolist()
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(tmp_path / "table.parquet")
    np.testing.assert_array_equal(np.stack(frame["a/b"]), x[kept])


def test_a_column_without_a_single_value_keeps_its_type(tmp_path: Path) -> None:
    path = embeddings_file(
        tmp_path,
        {"pool": points_of(3)},
        labels=np.array([-1, -1, -1]),
        metadata={"age": np.full(3, np.nan)},
    )
    table = parquet.read_table(export(path, exporter="table", format="parquet"))
    assert [str(table.schema.field(name).type) for name in ("label", "age")] == ["string", "double"]
    assert table["label"].to_pylist() == table["age"].to_pylist() == [None] * 3


def test_npz_loads_without_pickle_as_what_was_stored(tmp_path: Path) -> None:
    path = run_with_all(tmp_path)
    made = export(path, exporter="npz")
    first = made.read_bytes()
    opened = store.open(path)
    kept = [i for i in range(N) if i not in FAILED]
    with np.load(made, allow_pickle=False) as arrays:
        got = {name: arrays[name] for name in arrays.files}
    assert list(got) == [
        *("embedx_row", "ids", "labels", "label_names"),
        *("metadata/note", "metadata/score", "metadata/width"),
        *("embeddings/pool", "embeddings/fc:input"),
        *("projections/pca-1", "projections/umap-2", "parent"),
    ]
    assert got["embedx_row"].tolist() == kept
    assert got["ids"].tolist() == [f"row-{i:04d}" for i in kept]
    assert opened.labels is not None
    np.testing.assert_array_equal(got["labels"], opened.labels[kept])
    assert got["label_names"].tolist() == opened.label_names
    assert got["metadata/note"].tolist() == [f"=note {i}" for i in kept]
    np.testing.assert_array_equal(got["metadata/score"], opened.metadata["score"][kept])
    for name, x in (("pool", points_of(N)), ("fc:input", points_of(N, 3, seed=2))):
        np.testing.assert_array_equal(got[f"embeddings/{name}"], x[kept])
    for projection in derived.projections_of(opened):
        np.testing.assert_array_equal(
            got[f"projections/{projection.name}"], projection.coords[kept]
        )
    assert str(got["parent"]) == "one"
    assert zipfile.ZipFile(made).testzip() is None
    assert export(path, exporter="npz").read_bytes() == first


def test_names_of_layers_and_columns_lead_to_no_other_folder(tmp_path: Path) -> None:
    path = embeddings_file(
        tmp_path, {"../../up": points_of(2)}, metadata={"..": np.arange(2), "a/b": ["", "é"]}
    )
    with np.load(export(path, exporter="npz")) as arrays:
        assert not [name for name in arrays.files if ".." in name.split("/")]
        np.testing.assert_array_equal(arrays["embeddings/..%2F..%2Fup"], points_of(2))
        assert arrays["metadata/a%2Fb"].tolist() == ["", "é"]


# --------------------------------------------------------------------------- where to

EXPORTS: list[tuple[dict[str, Any], str]] = [
    ({"exporter": "atlas"}, "atlas.parquet"),
    ({"exporter": "table"}, "table.csv"),
    ({"exporter": "table", "format": "parquet"}, "table.parquet"),
    ({"exporter": "npz"}, "embeddings.npz"),
]
ALL = pytest.mark.parametrize(("options", "name"), EXPORTS, ids=[name for _, name in EXPORTS])


def foreign(path: Path) -> None:
    """A file of somebody else's of the same kind, about the same."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"embedx_row": [0, 1], "mine": ["a", "embedx_row"]}), path)
    elif path.suffix == ".npz":
        np.savez(path, x=np.arange(3), about="embedx_row")
    else:
        path.write_text("id,embedx_row\n1,2\n")


@ALL
def test_a_file_of_somebody_else_is_refused_and_an_earlier_export_replaced(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    path = run_with_all(tmp_path)
    mine = tmp_path / name
    for put in (foreign, Path.mkdir, lambda p: p.write_bytes(b"PAR1"), lambda p: p.touch()):
        put(mine)
        before = mine.read_bytes() if mine.is_file() else None
        with pytest.raises(ConfigError, match="is there and is no export of embedx") as caught:
            export(path, **options)
        assert "\n" not in str(caught.value)
        if before is None:
            mine.rmdir()
        else:
            assert mine.read_bytes() == before
            mine.unlink()
    export(path, projections=["umap"], **options)
    fewer = mine.read_bytes()
    assert export(path, **options) == mine
    assert mine.read_bytes() != fewer


def annotated(path: Path) -> None:
    """An export to which a user's program added a column."""
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
        parquet.write_table(table.append_column("mine", pa.array(["x"] * len(table))), path)
    elif path.suffix == ".npz":
        with np.load(path) as loaded:
            arrays = dict(loaded)
        np.savez(path, **arrays, mine=np.arange(3))
    else:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line.replace("\n", ",mine\n") for line in lines))


@ALL
def test_an_export_that_a_user_changed_is_neither_replaced_nor_removed(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    path = run_with_all(tmp_path)
    mine = export(path, **options)
    annotated(mine)
    before = mine.read_bytes()
    with pytest.raises(ConfigError, match="was changed since; move it, or choose another out=FILE"):
        export(path, **options)
    file_id = str(store.open(path).attrs["id"])
    derived.remove_derived(tmp_path, file_id)
    assert mine.read_bytes() == before


@ALL
def test_an_export_that_is_removed_with_its_rows_is_said(
    tmp_path: Path, options: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_with_all(tmp_path)
    mine = export(path, **options)
    caplog.set_level(logging.INFO, logger="embedx")
    derived.remove_derived(tmp_path, str(store.open(path).attrs["id"]))
    assert not mine.exists()
    assert not list(tmp_path.glob(".*.sha256"))
    assert "removed what was made of the rows that are replaced" in caplog.text
    assert name in caplog.text


@ALL
def test_out_is_a_file_or_a_folder(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    path = run_with_all(tmp_path / "run")
    file = tmp_path / f"mine{Path(name).suffix}"
    assert export(path, out=file, **options) == file
    assert export(path, out=tmp_path / "new" / "deep", **options) == tmp_path / "new/deep" / name
    (tmp_path / "run-0.5").mkdir()
    assert export(path, out=tmp_path / "run-0.5", **options) == tmp_path / "run-0.5" / name
    with pytest.raises(ConfigError, match=r"mine\.txt ends in \.txt, and what is written is a \."):
        export(path, out=tmp_path / "mine.txt", **options)
    assert not (tmp_path / "run" / name).exists()
    for made in (file, tmp_path / "new/deep" / name):
        assert derived.is_export_table(made)


@pytest.mark.parametrize(
    ("options", "name", "breaks"),
    [
        ({"exporter": "atlas"}, "atlas.parquet", "_png"),
        ({"exporter": "table"}, "table.csv", "as_csv"),
        ({"exporter": "npz"}, "embeddings.npz", "_write_npy"),
    ],
)
def test_a_full_disk_in_the_middle_leaves_the_old_export_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    name: str,
    breaks: str,
) -> None:
    path = run_with_all(tmp_path)
    export(path, projections=["umap"], **options)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.setattr(tabular, "ROWS_A_BLOCK", 7)
    works = getattr(tabular, breaks)
    calls: list[Any] = []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return works(*args, **kwargs)

    monkeypatch.setattr(tabular, breaks, full)
    with pytest.raises(StoreError, match=rf"no disk space for .*{name}: it needs more and"):
        export(path, **options)
    assert len(calls) == 3
    calls.clear()
    with pytest.raises(StoreError, match="no disk space"):
        export(path, out=tmp_path / "new" / "deep", **options)
    assert not (tmp_path / "new").exists()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_exports_of_replaced_embeddings_go_and_files_of_others_stay(tmp_path: Path) -> None:
    path = run_with_all(tmp_path)
    for options, _ in EXPORTS:
        export(path, **options)
    assert {name for _, name in EXPORTS} == set(derived.EXPORT_TABLES)
    derived.remove_derived(tmp_path, "one")
    assert not [name for _, name in EXPORTS if (tmp_path / name).exists()]
    for _, name in EXPORTS:
        foreign(tmp_path / name)
    derived.remove_derived(tmp_path, "one")
    assert all((tmp_path / name).is_file() for _, name in EXPORTS)


@ALL
def test_there_is_nothing_to_export_where_every_row_failed(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)}, failed=[0, 1, 2])
    projection_file(path, "umap-1", np.full((3, 2), np.nan))
    with pytest.raises(DataError, match=r"3 rows|0 rows of 3") as caught:
        export(path, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"exporter": "atlas"}, "exporter=atlas"),
        ({"exporter": "table", "format": "parquet"}, "exporter.format=parquet"),
    ],
)
def test_without_pyarrow_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], needed: str
) -> None:
    path = run_with_all(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DependencyError, match=rf"{needed} needs the package 'pyarrow'.*\[data\]"):
        export(path, **options)
    export(path, exporter="table")


def test_a_table_from_the_command_line_names_no_next_command_of_tensorboard(
    tmp_path: Path, embedx_here: Callable[..., tuple[int, list[str], list[str]]]
) -> None:
    path = run_with_all(tmp_path)
    words = ("export", "exporter=table", "exporter.format=parquet", f"embeddings={path}")
    status, out, err = embedx_here(*words)
    assert (status, err) == (0, [])
    assert out[-1].startswith(f"wrote {tmp_path}/table.parquet: 28 rows, 11 columns, ")
    status, out, err = embedx_here(*words, "exporter.vectors=yes")
    assert (status, out) == (1, [])
    assert err == ["ConfigError: exporter.vectors must be true or false, not 'yes'"]


# --------------------------------------------------------------------------- the program itself


@pytest.mark.atlas
def test_embedding_atlas_itself_opens_the_file_by_the_command_that_is_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = os.environ.get("EMBEDX_ATLAS") or shutil.which("embedding-atlas")
    if not program:
        pytest.skip("embedding-atlas is not installed; EMBEDX_ATLAS=PROGRAM names one")
    path = run_with_all(tmp_path)
    with caplog.at_level(logging.INFO, "embedx"):
        export(path, exporter="atlas")
    (line,) = (text for text in caplog.messages if text.startswith(PRINTED))
    words = shlex.split(line.removeprefix(PRINTED))[1:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [program, *words, "--port", str(port), "--no-auto-port"],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}/data/"
        answer = b""
        deadline = time.monotonic() + 120
        while not answer and time.monotonic() < deadline and server.poll() is None:
            try:
                answer = urllib.request.urlopen(f"{address}metadata.json", timeout=5).read()
            except OSError:
                time.sleep(0.3)
        assert answer, (tmp_path / "log").read_text()
        assert json.loads(answer)["props"]["data"] == {
            "id": "__row_index__",
            "projection": {"x": "x", "y": "y"},
            "image": "image",
            "importance": "hubness",
            "neighbors": "neighbors",
        }
        served = urllib.request.urlopen(f"{address}dataset.parquet", timeout=30).read()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)
    got = parquet.read_table(io.BytesIO(served)).to_pydict()
    ours = parquet.read_table(tmp_path / "atlas.parquet").to_pydict()
    assert got["__row_index__"] == list(range(len(kept_rows())))
    assert {name: got[name] for name in ours} == ours
