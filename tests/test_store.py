"""The files: rows read back as written, whatever stops the writer; foreign files are refused."""

import contextlib
import errno
import gc
import hashlib
import json
import os
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedx import derived, layout, store, unfinished, writing
from embedx.disk import DiskIO
from embedx.errors import InUseError, StoreError
from embedx.layout import Field, Status
from tests.conftest import sha256

N_ROWS = 23
WIDTH = 5


def fields() -> list[Field]:
    return [
        layout.embeddings_field(
            "layer/a.b", n_features=WIDTH, dtype=np.dtype("f4"), attrs={"layer": "layer/a.b"}
        ),
        Field("outputs/predicted", (), np.dtype("i4")),
        Field("thumbnails", (2, 2, 3), np.dtype("u1")),
    ]


def all_rows(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    names = [field.name for field in fields()]
    return {
        names[0]: rng.standard_normal((N_ROWS, WIDTH)).astype("f4"),
        names[1]: rng.integers(0, 9, N_ROWS, dtype="i4"),
        names[2]: rng.integers(0, 255, (N_ROWS, 2, 2, 3), dtype="u1"),
    }


def create(path: Path, disk: DiskIO | None = None) -> writing.Writer:
    return writing.create(
        path,
        ids=[f"ïd {i}\n" for i in range(N_ROWS)],
        fields=fields(),
        attrs={"id": "0123", "model": "m"},
        labels=np.arange(N_ROWS) % 3 - 1,
        label_names=["a", "ü"],
        metadata={"size": np.arange(N_ROWS) * 0.5, "note": [f"n{i}" for i in range(N_ROWS)]},
        disk=disk or DiskIO(),
    )


def append(
    writer: writing.Writer, start: int, stop: int, bad: frozenset[int] = frozenset()
) -> None:
    rows = {name: array[start:stop] for name, array in all_rows().items()}
    status = [Status.FAILED if i in bad else Status.OK for i in range(start, stop)]
    reasons = {i: (f"ïd {i}\n", "broken") for i in range(start, stop) if i in bad}
    writer.append(rows, status=np.array(status), reasons=reasons)


def finished(path: Path) -> Path:
    writer = create(path)
    append(writer, 0, N_ROWS)
    return writer.finish()


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.sets(st.integers(1, N_ROWS - 1)),
    commits=st.sets(st.integers(1, N_ROWS - 1)),
    reopened=st.sets(st.integers(1, N_ROWS - 1)),
    bad=st.frozensets(st.integers(0, N_ROWS - 1)),
)
def test_rows_read_back_the_same_however_they_were_batched_committed_and_interrupted(
    tmp_path_factory: pytest.TempPathFactory,
    cuts: set[int],
    commits: set[int],
    reopened: set[int],
    bad: frozenset[int],
) -> None:
    folder = tmp_path_factory.mktemp("store")
    path = folder / "embeddings.h5"
    writer = create(path)
    stops = sorted(cuts | commits | reopened | {N_ROWS})
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        append(writer, start, stop, bad)
        if stop in commits or stop in reopened:
            writer.commit()
            assert writer.rows_done == stop
        if stop in reopened:
            writer.close()
            again = writing.resume(path, expected={"id": "0123"})
            assert again is not None
            assert again.rows_done == stop
            writer = again
    assert writer.n_failed == len(bad)
    assert writer.finish() == path

    opened = store.open(folder)
    expected = all_rows()
    assert opened.complete
    assert opened.n_rows == N_ROWS
    assert opened.ids == [f"ïd {i}\n" for i in range(N_ROWS)]
    np.testing.assert_array_equal(opened.embeddings["layer/a.b"], expected[fields()[0].name])
    np.testing.assert_array_equal(opened.outputs["predicted"], expected["outputs/predicted"])
    np.testing.assert_array_equal(opened.thumbnails, expected["thumbnails"])
    assert opened.labels is not None
    assert opened.label_texts() == [["", "a", "ü"][i % 3] for i in range(N_ROWS)]
    np.testing.assert_array_equal(opened.metadata["size"], np.arange(N_ROWS) * 0.5)
    assert opened.metadata["note"] == [f"n{i}" for i in range(N_ROWS)]
    assert np.flatnonzero(~opened.ok).tolist() == sorted(bad)
    assert opened.verify() == []
    assert [reason["row"] for reason in unfinished.read_reasons(path)] == sorted(bad)
    assert {file.name for file in folder.iterdir()} <= {"embeddings.h5", "errors.jsonl"}

    one_go = create(folder / "whole" / "embeddings.h5")
    append(one_go, 0, N_ROWS, bad)
    assert sha256(one_go.finish()) == sha256(path)


def read_by_the_document(path: Path) -> tuple[dict[str, np.ndarray], dict[str, object], int, bool]:
    """The rows of a file as docs/format.md has it, by nothing but h5py: the second reader.

    Returns:
        The datasets cut to the rows that count, root attributes, how many rows count, and whether
        the file is complete.
    """
    with h5py.File(path) as file:
        attrs = dict(file.attrs)
        assert (attrs["format"], attrs["version"]) == ("embedx-embeddings", 1)
        datasets: dict[str, h5py.Dataset] = {}
        file.visititems(
            lambda name, node: (
                datasets.update({name: node}) if isinstance(node, h5py.Dataset) else None
            )
        )
        for dataset in datasets.values():
            assert dataset.chunks is None
            assert dataset.compression is None
            assert dataset.id.get_offset() % 4096 == 0
        run = hashlib.sha256(attrs["id"].encode()).digest()[:16]
        newest = (0, 0, 0)
        for page in datasets["commit"][()]:
            magic, sequence, done, before, state, of, crc = struct.unpack_from(
                "<8sQQQI16sI", page.tobytes()
            )
            is_whole = zlib.crc32(page.tobytes()[:52]) == crc
            if magic == b"EMBXCMT1" and is_whole and of == run and before <= done:
                newest = max(newest, (sequence, done, state))
        _, n_done, state = newest
        rows = {
            name: dataset[()] if name in ("commit", "label_names") else dataset[:n_done]
            for name, dataset in datasets.items()
        }
    streamed = [rows[name] for name in json.loads(attrs["row_fields"])]
    for row in range(n_done):
        crc = zlib.crc32(rows["status"][row].tobytes())
        for values in streamed:
            crc = zlib.crc32(values[row].tobytes(), crc)
        assert crc == rows["row_crc32"][row]
    data = path.read_bytes()
    n_regions, outside, crc = struct.unpack_from("<QII", data, len(data) - 24)
    assert data[-8:] == b"EMBXFTR1"
    start = len(data) - 24 - 16 * n_regions
    assert zlib.crc32(data[start:-12]) == crc
    skeleton = bytearray(data[:start])
    for offset, length in sorted(struct.iter_unpack("<QQ", data[start:-24]), reverse=True):
        del skeleton[offset : offset + length]
    assert zlib.crc32(skeleton) == outside
    return rows, attrs, n_done, state == 2


@pytest.mark.parametrize("n_done", [9, N_ROWS])
def test_a_second_reader_that_has_the_document_alone_sees_the_same_rows(
    tmp_path: Path, n_done: int
) -> None:
    path = tmp_path / "embeddings.h5"
    writer = create(path)
    append(writer, 0, 4)
    writer.commit()
    append(writer, 4, n_done, bad=frozenset({7}))
    writer.commit()
    if n_done == N_ROWS:
        writer.finish()
    else:
        append(writer, n_done, N_ROWS)  # not committed: it does not count
        writer.close()
        path = unfinished.partial_path(path)
    rows, attrs, counted, complete = read_by_the_document(path)
    assert (counted, complete, attrs["n_rows"]) == (n_done, n_done == N_ROWS, N_ROWS)
    for name, values in all_rows().items():
        np.testing.assert_array_equal(rows[name], values[:n_done])
    assert [text.decode() for text in rows["ids"]] == [f"ïd {i}\n" for i in range(n_done)]
    assert [text.decode() for text in rows["label_names"]] == ["a", "ü"]
    assert rows["labels"].tolist() == [i % 3 - 1 for i in range(n_done)]
    assert np.flatnonzero(rows["status"] == 2).tolist() == [7]
    assert set(rows) == {
        *("ids", "status", "row_crc32", "commit", "labels", "label_names"),
        *("embeddings/layer%2Fa.b", "outputs/predicted", "thumbnails"),
        *("metadata/size", "metadata/note"),
    }


def test_rows_after_the_last_commit_are_not_claimed(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    writer = create(path)
    append(writer, 0, 7)
    writer.commit()
    append(writer, 7, 19)
    writer.close()
    partial = store.Embeddings(unfinished.partial_path(path))
    assert (partial.complete, partial.n_rows, len(partial.ids)) == (False, 7, 7)
    with pytest.raises(StoreError, match="is not finished, 7 of 23 rows are there; go on with"):
        store.open(path)


def test_a_torn_newest_record_falls_back_to_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    writer = create(path)
    append(writer, 0, 7)
    writer.commit()
    append(writer, 7, 19)
    writer.commit()
    slot = writer._sequence % 2
    offset = writer._offsets["commit"] + slot * 4096
    writer.close()
    with unfinished.partial_path(path).open("r+b") as file:
        file.seek(offset + 20)
        file.write(b"\xff\xff")
    again = writing.resume(path)
    assert again is not None
    assert again.rows_done == 7
    append(again, 7, N_ROWS)
    again.finish()
    assert store.open(path).verify() == []


def test_a_full_disk_shows_before_work_starts_and_leaves_nothing(tmp_path: Path) -> None:
    class Full(DiskIO):
        def allocate(self, fd: int, n_bytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match=r"no disk space for .*: it needs [\d,]+ kB and .* free"):
        create(tmp_path / "outputs" / "run" / "embeddings.h5", Full())
    assert list(tmp_path.iterdir()) == []


def test_resuming_with_other_settings_is_refused_with_both_values(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    create(path).close()
    with pytest.raises(StoreError, match="begun with id '0123', and this run has 'other'"):
        writing.resume(path, expected={"id": "other"})


def test_texts_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    assert layout.encode_texts(["ab", "é"], what="the id").tolist() == [b"ab", "é".encode()]
    assert layout.encode_texts(["\udcff"], what="the id").tolist() == [b"\\udcff"]
    with pytest.raises(StoreError, match="has 1025 bytes, and at most 1024"):
        layout.encode_texts(["x" * 1025], what="the id")
    with pytest.raises(StoreError, match="holds a NUL"):
        layout.encode_texts(["a\0b"], what="the id")


def test_a_flipped_bit_is_found_and_its_row_named(tmp_path: Path) -> None:
    path = finished(tmp_path / "embeddings.h5")
    with h5py.File(path) as file:
        offset = file["embeddings/layer%2Fa.b"].id.get_offset()
    with path.open("r+b") as file:
        file.seek(offset + 4 * WIDTH * 4)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert store.open(path).verify() == [4]
    with pytest.raises(StoreError, match="1 of 23 rows do not match their checksum, first row 4"):
        derived.describe(path, verify=True)


def test_a_changed_byte_outside_the_rows_is_refused_before_hdf5_parses_it(tmp_path: Path) -> None:
    good = finished(tmp_path / "good" / "embeddings.h5")
    rows = ("embeddings/layer%2Fa.b", "outputs/predicted", "thumbnails", "row_crc32", "status")
    with h5py.File(good) as file:
        of_rows = np.zeros(good.stat().st_size, bool)
        for name in (*rows, "commit"):
            offset = file[name].id.get_offset()
            of_rows[offset : offset + file[name].nbytes] = True
        places = {name: file[name].id.get_offset() for name in ("ids", "labels", "metadata/size")}
    data = np.frombuffer(good.read_bytes(), "u1")
    rng = np.random.default_rng(0)
    skeleton = np.flatnonzero(~of_rows & (data != 0))[:-8]
    at_random = np.flatnonzero(~of_rows)[:-8]
    path = tmp_path / "embeddings.h5"
    for at in [*places.values(), *rng.choice(skeleton, 200), *rng.choice(at_random, 50)]:
        changed = data.copy()
        changed[at] ^= 1 << rng.integers(8)
        path.write_bytes(changed.tobytes())
        for opened in (store.open, store.read_items, derived.describe):
            with pytest.raises(StoreError, match="outside its rows have changed|not an HDF5 file"):
                opened(path)
    for name in rows:
        changed = data.copy()
        with h5py.File(good) as file:
            changed[file[name].id.get_offset()] ^= 1
        path.write_bytes(changed.tobytes())
        assert store.open(path).verify() == [0]


def test_a_projection_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    path = derived.write_projection(
        tmp_path / "pca-1.h5",
        coords=np.ones((3, 2)),
        ids=list("abc"),
        attrs={"id": "x", "parent": "p", "method": "pca", "layer": "a"},
    )
    good = path.read_bytes()
    n = 0
    for at in range(8, len(good) - 8, 37):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(StoreError, match="bytes outside its rows have changed"):
            derived.open_projection(path)
        n += 1
    assert n > 50


def test_files_without_a_checksum_behind_them_are_read(tmp_path: Path) -> None:
    """Older ones have none, and HDF5 takes it away where another tool changes a file."""
    path = finished(tmp_path / "embeddings.h5")
    whole = path.read_bytes()
    n_regions = struct.unpack_from("<Q", whole, len(whole) - 24)[0]
    path.write_bytes(whole[: -24 - 16 * n_regions])
    assert store.open(path).verify() == []
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        file.attrs["note"] = "mine"
        file["more"] = np.arange(9)
    opened = store.open(path)
    assert (opened.attrs["note"], opened.verify()) == ("mine", [])


def test_a_footer_that_lies_is_refused(tmp_path: Path) -> None:
    path = finished(tmp_path / "embeddings.h5")
    whole = path.read_bytes()
    size = len(whole)
    for regions in ([(0, size - 40)], [(5000, 10), (4000, 10)], [(size, 1)], [(2**64 - 1, 2)]):
        path.write_bytes(whole + layout.footer(0, regions))
        with pytest.raises(StoreError, match="outside its rows have changed"):
            store.open(path)
    body = struct.pack("<QI", 2**60, 0)
    path.write_bytes(whole + body + struct.pack("<I", zlib.crc32(body)) + b"EMBXFTR1")
    with pytest.raises(StoreError, match="outside its rows have changed"):
        store.open(path)


def test_an_unfinished_file_under_a_final_name_is_not_taken_for_whole(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    writer = create(path)
    append(writer, 0, 7)
    writer.commit()
    writer.close()
    unfinished.partial_path(path).rename(path)
    for opened in (store.open, store.Embeddings, derived.describe):
        with pytest.raises(StoreError, match=r"is not finished, 7 of 23 .* embeddings.h5.partial"):
            opened(path)


def hostile(path: Path, change: str) -> None:
    """Remake a good file with one thing wrong."""
    good = finished(path.parent / "good" / "embeddings.h5")
    with h5py.File(good) as source, h5py.File(path, "w") as target:
        for key, value in source.attrs.items():
            target.attrs[key] = value
        for name in ("ids", "status", "row_crc32", "commit", "outputs", "thumbnails"):
            source.copy(name, target)
        name = "embeddings/layer%2Fa.b"
        data = source[name][()]
        if change == "chunked":
            target.create_dataset(name, data=data, chunks=True)
        elif change == "compressed":
            target.create_dataset(name, data=data, compression="gzip")
        elif change == "soft link":
            target["elsewhere"] = data
            target[name] = h5py.SoftLink("/elsewhere")
        elif change == "external link":
            target[name] = h5py.ExternalLink(str(good), name)
        elif change == "external storage":
            secret = path.parent / "secret"
            secret.write_bytes(data.tobytes())
            target.create_dataset(
                name, shape=data.shape, dtype="f4", external=[(str(secret), 0, data.nbytes)]
            )
        elif change == "virtual":
            layout = h5py.VirtualLayout(data.shape, "f4")
            layout[:, 0] = h5py.VirtualSource(good, "outputs/predicted", (N_ROWS,))
            target.create_virtual_dataset(name, layout)
        elif change == "huge":
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
            space = h5py.h5s.create_simple((N_ROWS, 10**11))
            group = target.create_group("embeddings")
            h5py.h5d.create(group.id, b"layer%2Fa.b", h5py.h5t.NATIVE_FLOAT, space, dcpl=plist)
        elif change == "objects":
            target.create_dataset(name, data=["x"] * N_ROWS, dtype=h5py.string_dtype())
        elif change == "short":
            target[name] = data[:-1]


@pytest.mark.parametrize(
    "change",
    [
        "chunked",
        "compressed",
        "soft link",
        "external link",
        "external storage",
        "virtual",
        "huge",
        "objects",
        "short",
        "missing",
    ],
)
def test_a_file_that_is_not_laid_out_as_ours_is_refused_in_one_line(
    tmp_path: Path, change: str
) -> None:
    path = tmp_path / "hostile.h5"
    hostile(path, change)
    with pytest.raises(StoreError) as caught:
        store.open(path)
    assert "\n" not in str(caught.value)
    assert "hostile.h5" in str(caught.value)


def test_files_of_something_else_are_said_to_be_so(tmp_path: Path) -> None:
    text = tmp_path / "text.h5"
    text.write_text("hello")
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["x"] = [1]
    good = finished(tmp_path / "embeddings.h5")
    cut = tmp_path / "cut.h5"
    cut.write_bytes(good.read_bytes()[:5000])
    newer = tmp_path / "newer.h5"
    newer.write_bytes(good.read_bytes())
    with h5py.File(newer, "r+") as file:
        file.attrs["version"] = 99
    for path, words in [
        (text, "is not an HDF5 file"),
        (other, "is not an embedx-embeddings file"),
        (cut, "may be truncated"),
        (newer, "has format version 99, and this embedx reads version 1"),
        (tmp_path / "none.h5", "there is no"),
    ]:
        with pytest.raises(StoreError, match=words) as caught:
            store.open(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(StoreError, match="not an embedx-projection file"):
        derived.open_projection(good)


def test_a_projection_reads_back_as_written(tmp_path: Path) -> None:
    coords = np.array([[1, 2], [np.nan, np.nan], [3, 4]], dtype="f4")
    path = derived.write_projection(
        tmp_path / "projections" / "pca-123456.h5",
        coords=coords,
        ids=["a", "b", "ç"],
        attrs={"id": "x", "parent": "p", "method": "pca", "layer": "a", "seed": 0},
        state={"mean": np.arange(3.0)},
    )
    opened = derived.open_projection(path)
    np.testing.assert_array_equal(opened.coords, coords)
    assert opened.ids == ["a", "b", "ç"]
    assert (opened.name, opened.attrs["method"]) == ("pca-123456", "pca")
    np.testing.assert_array_equal(opened.state["mean"], np.arange(3.0))
    before = path.read_bytes()
    time.sleep(1.1)  # HDF5 stores times in seconds, where it stores them
    derived.write_projection(
        path,
        coords=coords,
        ids=["a", "b", "ç"],
        attrs={"id": "x", "parent": "p", "method": "pca", "layer": "a", "seed": 0},
        state={"mean": np.arange(3.0)},
    )
    assert path.read_bytes() == before


def test_a_file_of_arrays_reads_back_as_written_and_no_other_format_is_taken_for_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "neighbors-1.h5"
    arrays = {"a": np.arange(6, dtype="i4").reshape(2, 3), "b": np.ones((2, 1), "f4")}
    layout.write_arrays(
        path, format=layout.NEIGHBORS_FORMAT, attrs={"parent": "p", "k": 3}, arrays=arrays
    )
    attrs, read = layout.read_arrays(path, format=layout.NEIGHBORS_FORMAT, names=["b", "a"])
    assert (attrs["parent"], attrs["k"]) == ("p", 3)
    assert list(read) == ["b", "a"]
    for name, array in read.items():
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name])
    with pytest.raises(StoreError, match="is not an embedx-projection file"):
        derived.open_projection(path)
    with pytest.raises(StoreError, match="the dataset c is missing"):
        layout.read_arrays(path, format=layout.NEIGHBORS_FORMAT, names=["c"])
    with pytest.raises(StoreError, match="not an embedx-neighbors file"):
        layout.read_arrays(finished(tmp_path / "embeddings.h5"), format=layout.NEIGHBORS_FORMAT)


def test_the_neighbours_of_replaced_embeddings_go_and_those_of_others_stay(tmp_path: Path) -> None:
    own, other, foreign = (
        tmp_path / f"neighbors-{name}.h5" for name in ("own", "other", "foreign")
    )
    for path, parent in ((own, "p"), (other, "q")):
        layout.write_arrays(
            path, format=layout.NEIGHBORS_FORMAT, attrs={"parent": parent}, arrays={}
        )
    foreign.write_text("not ours")
    derived.remove_derived(tmp_path, "p")
    assert sorted(tmp_path.iterdir()) == [foreign, other]


def test_rows_may_all_be_without_a_label(tmp_path: Path) -> None:
    writer = writing.create(
        tmp_path / "embeddings.h5",
        ids=["a", "b"],
        fields=[layout.embeddings_field("x", n_features=1, dtype=np.dtype("f4"), attrs={})],
        attrs={"id": "0"},
        labels=np.array([-1, -1]),
        label_names=[],
    )
    writer.append({"embeddings/x": np.ones((2, 1), "f4")}, status=np.ones(2))
    assert store.open(writer.finish()).label_texts() == ["", ""]


@pytest.mark.parametrize("names", [[], ["a", "b", "c"]])
def test_labels_that_come_with_the_rows_are_numbers_or_names(
    tmp_path: Path, names: list[str]
) -> None:
    path = tmp_path / "embeddings.h5"
    x = layout.embeddings_field("x", n_features=1, dtype=np.dtype("f4"), attrs={})
    labels = np.array([2, -1, 0, 2], "i4")
    writer = writing.create(
        path,
        ids=list("wxyz"),
        fields=[x, Field("labels", (), np.dtype("i4"))],
        attrs={"id": "0"},
        label_names=names,
    )
    for start in (0, 2):
        rows = {"embeddings/x": np.ones((2, 1), "f4"), "labels": labels[start : start + 2]}
        writer.append(rows, status=np.ones(2))
        writer.commit()
        partial = store.Embeddings(unfinished.partial_path(path))
        assert partial.labels is not None
        assert partial.labels.tolist() == labels[: start + 2].tolist()
    opened = store.open(writer.finish())
    assert opened.label_names == names
    texts = ["c", "", "a", "c"] if names else ["2", "", "0", "2"]
    assert opened.label_texts() == texts
    assert opened.to_pandas()["label"].tolist() == texts
    assert derived.describe(path)["labels"] == ("3 classes" if names else "2 classes")
    with path.open("r+b") as file:  # a label is guarded as the rest of its row is
        file.seek(writer._offsets["labels"] + 2 * 4)
        file.write(b"\x01")
    assert store.open(path).verify() == [2]


def test_large_numbers_as_labels_cost_nothing(tmp_path: Path) -> None:
    writer = writing.create(
        tmp_path / "embeddings.h5",
        ids=["a", "b"],
        fields=[
            layout.embeddings_field("x", n_features=1, dtype=np.dtype("f4"), attrs={}),
            Field("labels", (), np.dtype("i4")),
        ],
        attrs={"id": "0"},
    )
    labels = np.array([2**31 - 1, 0], "i4")
    writer.append({"embeddings/x": np.ones((2, 1), "f4"), "labels": labels}, status=np.ones(2))
    assert store.open(writer.finish()).label_texts() == ["2147483647", "0"]


def test_what_each_item_was_can_be_read_before_its_row_is_written(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    ids = ["a", "\udcff", "c"]
    hashes = np.array([1, 2**64 - 1, 3], np.uint64)
    field = layout.embeddings_field("x", n_features=1, dtype=np.dtype("f4"), attrs={})
    writing.create(path, ids=ids, fields=[field], attrs={"id": "0"}, item_hashes=hashes).close()
    partial = unfinished.partial_path(path)
    assert store.Embeddings(partial).ids == []
    got, kept = store.read_items(partial)
    assert got == layout.stored_texts(ids) == ["a", "\\udcff", "c"]
    assert kept is not None
    assert kept.tolist() == hashes.tolist()
    assert store.read_items(finished(tmp_path / "without" / "embeddings.h5"))[1] is None
    with pytest.raises(StoreError, match="item_hashes has 2 values for 3 rows"):
        writing.create(
            tmp_path / "x.h5", ids=ids, fields=[field], attrs={"id": "0"}, item_hashes=hashes[:2]
        )


def test_pandas_gets_one_row_a_sample(tmp_path: Path) -> None:
    frame = store.open(finished(tmp_path / "embeddings.h5")).to_pandas()
    assert frame.index[2] == "ïd 2\n"
    assert frame["label"].tolist()[:3] == ["", "a", "ü"]
    np.testing.assert_array_equal(
        frame[[f"layer/a.b[{i}]" for i in range(WIDTH)]].to_numpy("f4"),
        all_rows()["embeddings/layer%2Fa.b"],
    )


def test_a_column_that_is_called_as_another_one_takes_no_place_in_pandas(tmp_path: Path) -> None:
    field = layout.embeddings_field("a", n_features=2, dtype=np.dtype("f4"), attrs={})
    columns = {"label": [7, 8], "status": [9, 9], "label_": [5, 6], "a[1]": [3, 4]}
    with contextlib.closing(
        writing.create(
            tmp_path / "embeddings.h5",
            ids=["x", "y"],
            fields=[field],
            attrs={"id": "0"},
            labels=np.array([0, 1]),
            label_names=["dog", "cat"],
            metadata={name: np.array(values) for name, values in columns.items()},
        )
    ) as writer:
        rows = np.arange(4, dtype="f4").reshape(2, 2)
        writer.append({field.name: rows}, status=np.array([layout.Status.OK, layout.Status.FAILED]))
        writer.finish()
    frame = store.open(tmp_path).to_pandas()
    assert frame[["label", "status"]].to_numpy().tolist() == [["dog", "ok"], ["cat", "failed"]]
    np.testing.assert_array_equal(frame[["a[0]", "a[1]"]].to_numpy(), rows)
    others = frame.drop(columns=["label", "status", "a[0]", "a[1]"])
    assert sorted(others.to_numpy().T.tolist()) == sorted(columns.values())


def test_an_unfinished_file_that_another_program_wrote_into_is_not_gone_on_with(
    tmp_path: Path,
) -> None:
    path = tmp_path / "embeddings.h5"
    with contextlib.closing(create(path)) as writer:
        append(writer, 0, 7)
        writer.commit()
    with h5py.File(unfinished.partial_path(path), "r+") as file:
        file["ids"][:] = file["ids"][:][::-1]
    with pytest.raises(StoreError, match="lost the checksum of its ids and layers: another"):
        writing.resume(path)


@pytest.mark.parametrize("stop", [7, 12])
def test_every_row_is_checked_when_resuming(tmp_path: Path, stop: int) -> None:
    path = tmp_path / "embeddings.h5"
    writer = create(path)
    append(writer, 0, 7)
    writer.commit()
    append(writer, 7, stop)
    writer.commit()
    offset = writer._offsets["thumbnails"] + 5 * 12
    writer.close()
    with unfinished.partial_path(path).open("r+b") as file:
        file.seek(offset)
        file.write(b"\x07\x07")
    with pytest.raises(StoreError, match="row 5 does not match its checksum"):
        writing.resume(path)


def test_reasons_are_read_whatever_the_ids_hold_and_torn_lines_are_passed_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "embeddings.h5"
    ids = ["a\u2028b", "c\x85\n", "\udcff"]
    field = layout.embeddings_field("x", n_features=1, dtype=np.dtype("f4"), attrs={})
    writer = writing.create(path, ids=ids, fields=[field], attrs={"id": "0"})
    reasons = {i: (name, "x") for i, name in enumerate(ids)}
    rows = {field.name: np.zeros((3, 1), "f4")}
    writer.append(rows, status=np.full(3, Status.FAILED), reasons=reasons)
    writer.commit()
    writer.close()
    listing = unfinished.running_errors_path(path)
    written = listing.read_bytes()
    with listing.open("ab") as file:
        file.write(b'[]\n{"a": 1}\n{"row": 1e999, "id": "", "reason": ""}\n')
        file.write(b'{"row": Infinity, "id": "", "reason": ""}\n{"row": NaN, "id": 1}\n')
        file.write(b'{"row": ' + b"9" * 5000 + b"}\n" + b"[" * 100_000 + b"\n\xff\xfe\n")
        file.write(b'{"row": [], "id": "", "reason": ""}\n{"row": 9, "id": "\xc3')
    assert [
        reason["id"] for reason in unfinished.read_reasons(unfinished.partial_path(path))
    ] == ids
    with listing.open("ab") as file:  # of rows that did not fail, or of other ids: not ours
        file.write(b'\n{"row": 7, "id": "h", "reason": "forged"}\n')
        file.write(b'{"row": 0, "id": "b", "reason": "forged"}\n')
    again = writing.resume(path)
    assert again is not None
    again.close()
    assert listing.read_bytes() == written


def test_a_file_left_by_a_killed_create_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".embeddings.h5.99999.tmp").write_bytes(b"half")
    finished(tmp_path / "embeddings.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["embeddings.h5"]


def test_columns_may_have_any_name(tmp_path: Path) -> None:
    names = [".", "..", "%2E", "a/b", "%2F", "%", "ü", "a b"]
    writer = writing.create(
        tmp_path / "embeddings.h5",
        ids=["a"],
        fields=[layout.embeddings_field("..", n_features=1, dtype=np.dtype("f4"), attrs={})],
        attrs={"id": "0"},
        metadata={name: np.array([i]) for i, name in enumerate(names)},
    )
    writer.append({"embeddings/%2E%2E": np.ones((1, 1), "f4")}, status=np.ones(1))
    opened = store.open(writer.finish())
    assert {name: int(column[0]) for name, column in opened.metadata.items()} == {
        name: i for i, name in enumerate(names)
    }
    assert list(opened.embeddings) == [".."]


def test_columns_of_another_length_and_equal_ids_are_refused(tmp_path: Path) -> None:
    field = layout.embeddings_field("x", n_features=1, dtype=np.dtype("f4"), attrs={})
    for ids, options, message in [
        (["a", "b"], {"labels": np.zeros(3), "label_names": ["q"]}, "labels has 3 values for 2"),
        (["a", "b"], {"metadata": {"k": ["x"]}}, "k has 1 values for 2 rows"),
        (["a"], {"metadata": {"k": np.array(["2026-01-01"], "M8[D]")}}, r"type datetime64\[D\]"),
        (["a"], {"metadata": {"k": np.ones(1, "c8")}}, "k has .* type complex64; give numbers"),
        (["a"], {"metadata": {"k": np.ones((1, 2))}}, r"the column k has shape \(1, 2\)"),
        (["b", "a", "a"], {}, "two ids are written 'a'"),
        (["\udc80", "\\udc80"], {}, "two ids are written"),
    ]:
        with pytest.raises(StoreError, match=message):
            writing.create(tmp_path / "e.h5", ids=ids, fields=[field], attrs={"id": "0"}, **options)
    assert list(tmp_path.iterdir()) == []


def rewritten(path: Path, change: dict[str, object]) -> Path:
    """A good file with attributes or datasets replaced."""
    good = finished(path.parent / "good" / "embeddings.h5")
    with h5py.File(good) as source, h5py.File(path, "w") as target:
        target.attrs.update({k: v for k, v in source.attrs.items() if k not in change})
        for name in ("ids", "labels", "label_names", "metadata", "status", "row_crc32", "commit"):
            if name not in change:
                source.copy(name, target)
        for name in ("embeddings/layer%2Fa.b", "outputs/predicted", "thumbnails"):
            if name not in change:
                target[name] = source[name][()]
        for name, value in change.items():
            if name in source.attrs:
                target.attrs[name] = value
            elif value is not None:
                target[name] = value
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"row_fields": "{"},
        {"row_fields": "5"},
        {"row_fields": "[1, 2]"},
        {"row_fields": "[" * 5000},
        {"row_fields": np.array([1, 2])},
        {"n_rows": "x"},
        {"n_rows": -1},
        {"n_rows": 12.5},
        {"n_rows": np.array([23, 23])},
        {"id": np.array([1, 2])},
        {"labels": np.full(N_ROWS, 99, "i4")},
        {"labels": np.zeros(N_ROWS, "f4")},
        {"labels": np.zeros(5, "i4")},
        {"labels": np.zeros((N_ROWS, 2), "i4")},
        {"labels": np.full(N_ROWS, -2, "i4")},
        {"label_names": None},
        {"item_hashes": np.zeros(N_ROWS, "u4")},
        {"item_hashes": np.zeros(5, "u8")},
        {"status": np.zeros((N_ROWS, 2), "u1")},
        {"commit": np.zeros((2, 10), "u1")},
        {"ids": np.zeros((N_ROWS, 2), "S3")},
        {"ids": np.full(N_ROWS, b"same")},
        {"metadata/z": np.zeros(3)},
        {"metadata/z": h5py.Empty("f4")},
        {"embeddings/layer%2Fa.b": np.zeros((N_ROWS, 2, 2), "f4")},
        {"embeddings/layer%2Fa.b": np.zeros((N_ROWS, 0), "f4")},
        {"embeddings/layer%2Fa.b": np.zeros((N_ROWS, 2), "i4")},
        {"thumbnails": np.zeros((N_ROWS, 2, 2, 1), "u1")},
        {"thumbnails": np.zeros((N_ROWS, 2, 2, 3), "f4")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_with_wrong_values_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = rewritten(tmp_path / "wrong.h5", change)
    with pytest.raises(StoreError) as caught:
        store.open(path)
    assert "wrong.h5" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.h5")
    with pytest.raises(StoreError, match="is not an HDF5 file"):
        derived.open_projection(tmp_path / "x.h5")


def test_random_damage_never_shows_a_traceback(tmp_path: Path) -> None:
    good = finished(tmp_path / "good.h5").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for i in range(60):
        data = bytearray(good)
        for at in rng.integers(0, 4096 * 8, 30):
            data[at] = rng.integers(0, 256)
        path = tmp_path / f"{i}.h5"
        path.write_bytes(data)
        try:
            store.open(path)
        except StoreError:
            refused += 1
    assert refused > 20


def test_without_the_calls_that_linux_alone_has_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = sha256(finished(tmp_path / "linux" / "embeddings.h5"))
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.delattr(os, "fdatasync")
    path = tmp_path / "elsewhere" / "embeddings.h5"
    writer = create(path)
    rows_bytes = sum(field.row_bytes for field in fields()) * N_ROWS
    assert unfinished.partial_path(path).stat().st_blocks * 512 >= rows_bytes  # no holes
    append(writer, 0, 7)
    writer.commit()
    append(writer, 7, N_ROWS)
    assert sha256(writer.finish()) == wanted


class _SlowDisk(DiskIO):
    """A disk whose second sync of rows takes until it is told to go on, or fails."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.fails = False
        self.is_slow = False

    def sync(self, fd: int) -> None:
        if self.is_slow:
            assert self.go_on.wait(10)
            if self.fails:
                raise OSError(errno.EIO, "the medium is gone")
        super().sync(fd)


@pytest.mark.parametrize("fails", [False, True])
def test_rows_go_on_while_the_disk_is_slow_and_count_once_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    path = tmp_path / "embeddings.h5"
    disk = _SlowDisk()
    writer = create(path, disk)
    disk.is_slow, disk.fails = True, fails
    monkeypatch.setattr(writing, "COMMIT_S", 0.0)
    append(writer, 0, 5)  # begins a commit, and does not wait for it
    monkeypatch.setattr(writing, "COMMIT_S", 1e9)
    append(writer, 5, 9)
    assert writer.rows_done == 0
    assert store.Embeddings(unfinished.partial_path(path)).n_rows == 0
    disk.go_on.set()
    if not fails:
        writer.commit()
        assert writer.rows_done == 9
        append(writer, 9, N_ROWS)
        finished(tmp_path / "other" / "embeddings.h5")
        assert sha256(writer.finish()) == sha256(tmp_path / "other" / "embeddings.h5")
        return
    with pytest.raises(StoreError, match=r"the medium is gone; 0 of 23 rows are safe"):
        writer.commit()
    with pytest.raises(StoreError, match="closed"):
        append(writer, 9, 10)


# --------------------------------------------------------------------------- whose file it is


PLANTS = {
    "symbolic link": lambda path, victim: path.symlink_to(victim),
    "hard link": lambda path, victim: os.link(victim, path),
    "dangling link": lambda path, victim: path.symlink_to(victim.with_name("nowhere")),
    "folder": lambda path, victim: path.mkdir(),
    "pipe": lambda path, victim: os.mkfifo(path),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_nothing_is_written_through_a_link_and_into_nothing_that_is_no_file(
    tmp_path: Path, plant: str
) -> None:
    victim = tmp_path / "precious"
    victim.write_bytes(b"precious" * 20)
    path = tmp_path / "run" / "embeddings.h5"
    path.parent.mkdir()
    lock = path.with_name("embeddings.h5.lock")
    PLANTS[plant](lock, victim)
    with pytest.raises(StoreError, match="embeddings.h5.lock is a link, .*; remove it"):
        create(path)
    lock.rmdir() if lock.is_dir() else lock.unlink()
    writer = create(path)
    PLANTS[plant](unfinished.running_errors_path(path), victim)
    append(writer, 0, 5, frozenset({2}))
    with pytest.raises(StoreError, match="errors.jsonl.partial is a link, .*; remove it"):
        writer.commit()
    assert victim.read_bytes() == b"precious" * 20
    assert sorted(file.name for file in tmp_path.iterdir()) == ["precious", "run"]


def test_an_unfinished_file_that_has_a_second_name_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    create(path).close()
    os.link(unfinished.partial_path(path), tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    with pytest.raises(StoreError, match="has a second name"):
        writing.resume(path)
    assert (tmp_path / "backup").read_bytes() == before


def take_lock(path: Path) -> None:
    """As a process that begins anew after somebody removed the lock."""
    path.with_name(path.name + ".lock").unlink()
    path.with_name(path.name + ".lock").write_text("process 1 on elsewhere\n")


def take_partial(path: Path) -> None:
    unfinished.partial_path(path).rename(path.with_name("moved"))
    unfinished.partial_path(path).write_bytes(b"of another")


STEPS: dict[str, Callable[[writing.Writer], object]] = {
    "append": lambda writer: append(writer, 7, 9),
    "commit": lambda writer: writer.commit(),
    "finish": lambda writer: writer.finish(),
    "discard": lambda writer: writer.discard(),
    "before another file is written": lambda writer: writer.require_own(),
}


@pytest.mark.parametrize(
    ("take", "step"),
    # The name is looked at with each commit, the lock with each batch.
    [*((take_lock, step) for step in STEPS), *((take_partial, s) for s in STEPS if s != "append")],
)
def test_a_writer_whose_place_was_taken_stops_and_leaves_what_is_there(
    tmp_path: Path, step: str, take: Callable[[Path], None]
) -> None:
    path = tmp_path / "run" / "embeddings.h5"
    writer = create(path)
    append(writer, 0, 7, frozenset({2}))
    writer.commit()
    if step != "append":
        append(writer, 7, N_ROWS)
    take(path)
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(InUseError, match="was removed or replaced while .* was being written"):
        STEPS[step](writer)
    writer.close()
    if take is take_partial:
        del before[path.with_name("embeddings.h5.lock")]  # it is ours
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


def test_of_two_threads_that_begin_at_once_one_is_refused_and_the_other_is_whole(
    tmp_path: Path,
) -> None:
    def begin(path: Path, start: threading.Barrier, ends: list[str]) -> None:
        start.wait()
        try:
            writer = create(path)
            append(writer, 0, N_ROWS)
            start.wait(timeout=5)
            ends.append(sha256(writer.finish()))
        except InUseError as error:
            ends.append(str(error))
            start.wait(timeout=5)

    whole = sha256(finished(tmp_path / "whole" / "embeddings.h5"))
    for n in range(30):
        path = tmp_path / str(n) / "embeddings.h5"
        start, ends = threading.Barrier(2), list[str]()
        both = [threading.Thread(target=begin, args=(path, start, ends)) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert sorted(ends) == sorted(
            [whole, f"{path} is being written by this process; close it first"]
        )
        assert [file.name for file in path.parent.iterdir()] == ["embeddings.h5"]


# --------------------------------------------------------------------------- rows that wait


def test_a_writer_is_not_that_of_a_process_forked_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "embeddings.h5"
    writer = create(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(InUseError):
            append(writer, 0, 7)
    writer._lock.release()  # which that process did not
    assert not writer._lock.path.exists()
    again = writing.resume(path)
    assert again is not None
    assert again.rows_done == 0
    again.close()


def test_rows_that_nothing_follows_are_committed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "COMMIT_S", 0.1)
    path = tmp_path / "embeddings.h5"
    writer = create(path)
    append(writer, 0, 3)
    append(writer, 3, 7)
    until = time.monotonic() + 10
    while store.Embeddings(unfinished.partial_path(path)).n_rows < 7:
        assert time.monotonic() < until
        time.sleep(0.02)
    append(writer, 7, N_ROWS)
    assert sha256(writer.finish()) == sha256(finished(tmp_path / "other" / "embeddings.h5"))


def test_what_fails_while_rows_wait_is_said_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "COMMIT_S", 0.05)
    path = tmp_path / "embeddings.h5"
    writer = create(path)
    append(writer, 0, 3)
    writer._lock.path.unlink()
    until = time.monotonic() + 10
    while not (writer._committing and writer._committing[1].done()):
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(InUseError, match="was removed or replaced"):
        append(writer, 3, 5)
    with pytest.raises(StoreError, match="is closed"):
        writer.commit()
    assert store.Embeddings(unfinished.partial_path(path)).n_rows == 0


@given(
    values=st.lists(st.text(st.characters(exclude_characters="\0"), max_size=5), max_size=30),
    block=st.integers(1, 7),
    n_hashes=st.sampled_from([1, 3, 2**61]),
)
def test_texts_are_encoded_and_told_apart_by_blocks(
    values: list[str], block: int, n_hashes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_TEXTS", block)
        # Texts may have the hash of others.
        patch.setattr(layout, "hash", lambda v: hash(v) % n_hashes, raising=False)
        encoded = layout.encode_texts(values, what="the id")
        stored = [value.encode("utf-8", "backslashreplace") for value in values]
        assert encoded.tolist() == stored
        assert encoded.dtype.itemsize == max(1, *map(len, stored), 1)
        assert layout.are_unique(encoded) == (len(set(stored)) == len(stored))


def test_ids_take_little_more_room_than_their_bytes(tmp_path: Path) -> None:
    n = 200_000
    ids = [f"train/class_{i % 1000:04d}/{i:012d}.jpg" for i in range(n)]
    field = layout.embeddings_field("a", n_features=1, dtype=np.dtype("f4"), attrs={})
    tracemalloc.start()
    try:
        writer = writing.create(tmp_path / "x.h5", ids=ids, fields=[field], attrs={"id": "x"})
        # A list of them as bytes objects would take 72 bytes each beside.
        assert tracemalloc.get_traced_memory()[1] / n < len(ids[0]) + 60
        rows = {field.name: np.zeros((n, 1), np.float32)}
        writer.append(rows, status=np.ones(n, np.uint8))
        writer.finish()
        del rows
        gc.collect()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        opened = store.Embeddings(tmp_path / "x.h5")
        assert (tracemalloc.get_traced_memory()[1] - before) / n < 60
        assert (tracemalloc.get_traced_memory()[0] - before) / n < 10
    finally:
        tracemalloc.stop()
    assert opened.ids == ids
