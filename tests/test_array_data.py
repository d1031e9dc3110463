"""Pictures and tensors in files of arrays, and files that lie about what they hold."""

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import embedx
from embedx import array_files, ready_made, store
from embedx.array_data import array
from embedx.errors import ConfigError, DataError, StoreError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (9, 7, 8, 3), dtype=np.uint8)  # n, h, w, c


def npy(header: str, body: bytes = b"") -> bytes:
    """A file of NumPy's whose header says what it likes (NEP 1)."""
    text = header.encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def declared(shape: str) -> str:
    return f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"


def save(path: Path, x: Any, **others: Any) -> Path:
    """The same array in the way that a name stands for."""
    if path.name == "plain.npy":
        np.save(path, x)
    elif path.name == "columns.npy":
        np.save(path, np.asfortranarray(x))
    elif path.name == "stored.npz":
        np.savez(path, x=x, **others)
    elif path.name == "deflated.npz":
        np.savez_compressed(path, x=x, **others)
    else:
        with h5py.File(path.with_suffix(".new"), "w") as file:
            chunks = {"chunks": (2, *x.shape[1:]), "compression": "gzip", "shuffle": True}
            file.create_dataset("x", data=x, **(chunks if path.name == "chunked.h5" else {}))
            for name, value in others.items():
                file[name] = np.asarray(value)
        path.with_suffix(".new").replace(path)  # HDF5 writes to no file that is open
    return path


WAYS = ["plain.npy", "columns.npy", "stored.npz", "deflated.npz", "plain.h5", "chunked.h5"]


def pixels(source: Any) -> Any:
    return np.stack([np.asarray(source.read(i)) for i in range(len(source))])


@pytest.mark.parametrize("name", WAYS)
def test_pictures_in_any_file_are_the_pixels_that_were_saved(tmp_path: Path, name: str) -> None:
    source = array(str(save(tmp_path / name, PIXELS)))
    np.testing.assert_array_equal(pixels(source), PIXELS)
    again = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 20_000
    np.testing.assert_array_equal(np.asarray(again.read(8)), PIXELS[8])  # in any order
    np.testing.assert_array_equal(np.asarray(again.read(2)), PIXELS[2])
    few = array(str(tmp_path / name), limit=4)
    np.testing.assert_array_equal(pixels(few), PIXELS[:4])
    assert list(few.ids) == ["0", "1", "2", "3"]
    assert "the first of 9" in few.notes[0]


@pytest.mark.parametrize("name", WAYS)
def test_a_file_that_is_written_anew_fails_what_is_read_of_it_and_changes_the_fingerprint(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedx.array_data._ROWS_BYTES", PIXELS[:2].nbytes)  # so many at a time
    path = save(tmp_path / name, PIXELS)
    before = array(str(path))
    np.testing.assert_array_equal(np.asarray(before.read(4)), PIXELS[4])
    about = path.stat()
    other = PIXELS.copy()
    other[5, 3] ^= 1
    save(path, other)
    assert array(str(path)).fingerprint != before.fingerprint
    with pytest.raises((DataError, StoreError), match="changed"):
        before.read(6)
    with pytest.raises((DataError, StoreError), match="changed"):
        before.read(0)
    # Read together with row 4, before there was another one.
    np.testing.assert_array_equal(np.asarray(before.read(5)), PIXELS[5])
    save(path, PIXELS)
    os.utime(path, ns=(about.st_mtime_ns, about.st_mtime_ns))
    if path.stat().st_size == about.st_size:
        assert array(str(path)).fingerprint == before.fingerprint


GREY = PIXELS[..., 0]
FLOATS = RNG.random((9, 7, 8, 3))


@pytest.mark.parametrize(
    ("x", "options", "expected", "said"),
    [
        (GREY, {}, GREY, "by layout nhw"),
        (PIXELS.transpose(0, 3, 1, 2), {}, PIXELS, "by layout nchw"),
        (PIXELS[..., :1], {}, GREY, "by layout nhwc"),
        (GREY.astype(np.uint16) * 257, {}, GREY, "uint16, 0 black and 65535 white"),
        (GREY > 99, {}, (GREY > 99) * 255, "bool, 0 black and 1 white"),
        (PIXELS.astype(np.int64), {}, PIXELS, "int64, 0 black and 255 white"),
        (PIXELS.astype(">f4"), {}, PIXELS, ">f4, 0 black and 255 white"),
        (FLOATS, {}, (FLOATS * 255).round(), "float64, 0 black and 1 white"),
        (FLOATS * 4 - 2, {"range": [-2, 2]}, (FLOATS * 255).round(), "-2 black and 2 white"),
        (GREY // 2, {"range": [0, 127]}, (GREY // 2 / 127 * 255).round(), "0 black and 127 white"),
    ],
)
def test_values_become_pixels_by_the_formula_of_their_range(
    tmp_path: Path, x: Any, options: dict[str, Any], expected: Any, said: str
) -> None:
    np.save(tmp_path / "x.npy", x)
    source = array(str(tmp_path / "x.npy"), **options)
    if expected.ndim == 3:
        expected = np.repeat(expected[..., None], 3, axis=-1)
    assert np.abs(pixels(source).astype(int) - expected.astype(int)).max() <= 1e-9
    assert said in source.notes[0]


def test_a_fourth_channel_is_alpha_on_white(tmp_path: Path) -> None:
    x = np.concatenate([PIXELS, RNG.integers(0, 256, (9, 7, 8, 1), dtype=np.uint8)], axis=-1)
    np.save(tmp_path / "x.npy", x)
    expected = 255 + (PIXELS.astype(float) - 255) * (x[..., 3:] / 255)
    assert np.abs(pixels(array(str(tmp_path / "x.npy"))) - expected).max() <= 1


def test_a_picture_with_values_out_of_the_range_fails_alone(tmp_path: Path) -> None:
    x = FLOATS.copy()
    x[1, 0, 0, 0], x[3, 0, 0, 0] = np.nan, np.inf
    np.save(tmp_path / "x.npy", x)
    source = array(str(tmp_path / "x.npy"))
    for row in (1, 3):
        with pytest.raises(DataError, match="not finite"):
            source.read(row)
    x[1], x[3] = 0, 1.25
    np.save(tmp_path / "x.npy", x)
    source = array(str(tmp_path / "x.npy"), range=[0, 1])
    with pytest.raises(DataError, match="from 1.25 to 1.25, and black is 0 and white 1"):
        source.read(3)
    np.testing.assert_array_equal(np.asarray(source.read(2)), (x[2] * 255).round())


def test_tensors_enter_the_model_as_they_are(tmp_path: Path) -> None:
    x = RNG.normal(size=(9, 6)).astype(np.float32)
    path = save(tmp_path / "deflated.npz", x, y=np.arange(9) % 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = model[:2](torch.from_numpy(x)).detach().numpy()
    for workers in (0, 2):
        run = embedx.extract(
            model, array(str(path)), batch_size=4, num_workers=workers, out=tmp_path / str(workers)
        )
        np.testing.assert_allclose(run.rows()[1], expected, rtol=1e-5, atol=1e-6)
        assert run.label_texts() == [str(i % 3) for i in range(9)]


def test_labels_are_another_array_or_file_and_none_of_the_empty_text(tmp_path: Path) -> None:
    texts = np.array(["b", "a", "", "ä", "b", "a", "a", "a", "b"])
    for path in (
        save(tmp_path / "stored.npz", PIXELS, labels=texts, other=np.arange(9)),
        save(tmp_path / "plain.h5", PIXELS, target=np.char.encode(texts, "utf-8")),
    ):
        source = array(str(path))
        assert source.label_names == ["a", "b", "ä"]
        assert source.labels is not None
        assert source.labels.tolist() == [1, 0, -1, 2, 1, 0, 0, 0, 1]
        assert array(str(path), labels="none").labels is None
    np.save(tmp_path / "y.npy", np.array([10, 9, 9, 9, 9, 9, 9, 9, -1]))
    source = array(str(save(tmp_path / "plain.npy", PIXELS)), labels=str(tmp_path / "y.npy"))
    assert source.label_names == ["-1", "9", "10"]
    assert "a class of that name" in source.warnings[0]
    np.save(tmp_path / "y.npy", np.arange(8))
    with pytest.raises(DataError, match=r"shape \(8,\), and .* has 9 rows"):
        array(str(tmp_path / "plain.npy"), labels=str(tmp_path / "y.npy"))


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.zeros((2, 3, 9, 3)), {}, "both of axis 1 and the last .* data.layout=nhwc or nchw"),
        (np.zeros((2, 9, 9, 9)), {}, "neither of axis 1 and the last"),
        (np.zeros((2, 9, 9, 9)), {"layout": "nhwc"}, r"takes \(n, h, w, c\) with 1, 3 or 4"),
        (np.zeros((2, 9)), {"layout": "nhw"}, r"has shape \(2, 9\), and data.layout=nhw"),
        (FLOATS - 0.5, {}, "values from -0.49.* to 0.49.*; say which are black and white"),
        (np.full((2, 9, 9), np.nan), {}, "no finite value"),
        (PIXELS, {"range": [1, 0]}, "must be two numbers"),
        (PIXELS, {"key": "x"}, "data.key=x is no array of .*; it has one"),
        (PIXELS, {"labels": "y"}, "data.labels=y is no array of .* and no file"),
        (PIXELS, {"limit": 0}, "data.limit must be at least 1"),
        (np.array(["a", "b"]), {}, "holds texts"),
        (np.zeros((2, 3), complex), {}, "is of type complex128"),
        (np.zeros(2, [("a", "f4")]), {}, "is of type"),
        (np.zeros((0, 3, 3)), {}, "nothing in it"),
        (np.float32(1), {}, "nothing in it"),
        (np.array([[1], "a"], object), {}, "Python objects, and to unpickle them could run any"),
    ],
)
def test_an_array_that_could_mean_several_things_or_none_is_refused(
    tmp_path: Path, x: Any, options: dict[str, Any], message: str
) -> None:
    np.save(tmp_path / "x.npy", x)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        array(str(tmp_path / "x.npy"), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(declared("(100, 900, 900)"), b"x"), "declares 81,000,000 bytes and holds 1"),
        (npy(declared("(10000000000, 9)"), b"x"), "10,000,000,000 rows"),
        (npy(declared("(1, 100000, 100000)"), b"x"), "rows of 10,000,000,000 bytes"),
        (npy(declared("(-1, 9)"), b"x"), "nothing in it"),
        (npy(declared("(" * 3000)), "damaged or of another kind"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"), "Python objects"),
        (pickle.dumps([1]), "damaged or of another kind"),
        (b"", "damaged or of another kind"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_header_that_lies_is_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str, packed: bool
) -> None:
    path = tmp_path / ("x.npz" if packed else "x.npy")
    if packed:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", content)
        message = message.replace("damaged or of another kind", "is no array")
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        array(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_fails_its_rows(tmp_path: Path) -> None:
    path = save(tmp_path / "plain.npy", PIXELS)
    source = array(str(path))
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - PIXELS[0].nbytes // 2)
    for row in (7, 8):
        with pytest.raises(DataError, match="changed after the run had listed it"):
            source.read(row)
    with pytest.raises(DataError, match="it may be cut off"):
        array(str(path))


@pytest.mark.parametrize("name", ["stored.npz", "deflated.npz"])
@pytest.mark.parametrize("damaged", ["x", "labels"])
def test_an_npz_with_a_flipped_bit_is_refused_as_numpy_does(
    tmp_path: Path, name: str, damaged: str
) -> None:
    x = np.arange(40_000, dtype=np.float32).reshape(1000, 40)
    path = save(tmp_path / name, x, labels=np.arange(1000) % 7)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{damaged}.npy")
    content = bytearray(path.read_bytes())
    content[info.header_offset + info.compress_size // 2] ^= 0x10
    path.write_bytes(content)
    with pytest.raises((zipfile.BadZipFile, zlib.error)):
        np.load(path)[damaged]
    with pytest.raises(DataError, match="damaged or of another kind"):
        array(str(path), layout="tensor")
    with pytest.raises(DataError, match="damaged or of another kind"):
        ready_made.opened(path)


def test_rows_that_outlive_the_modules_at_the_exit_are_let_go_of_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = array_files.arrays_in(save(tmp_path / "plain.npy", PIXELS))[0][""]
    assert found[:1].shape == (1, 7, 8, 3)
    monkeypatch.setattr(array_files, "os", None)  # as it is then
    del found  # what cannot be raised is an error of pytest


def test_rows_that_were_never_written_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(2**20)
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE):
            pytest.skip("the disk tells of no holes")
    size = (200, 32, 32, 3)
    made = np.lib.format.open_memmap(tmp_path / "half.npy", "w+", "u1", size)  # type: ignore[no-untyped-call]
    made[:] = 7
    made.flush()
    assert array(str(tmp_path / "half.npy")).warnings == ()
    vectors = np.lib.format.open_memmap(tmp_path / "v.npy", "w+", "f4", (500, 64))  # type: ignore[no-untyped-call]
    made = np.lib.format.open_memmap(tmp_path / "half.npy", "w+", "u1", size)  # type: ignore[no-untyped-call]
    made[:50], vectors[:300] = 7, 7
    made.flush()
    vectors.flush()
    (words,) = array(str(tmp_path / "half.npy")).warnings
    row = int(words.split("written to row ")[1].split()[0])
    assert 50 <= row < 55  # a page of memory, and no less, is written
    assert array(str(tmp_path / "half.npy"), limit=50).warnings == ()
    monkeypatch.chdir(tmp_path)
    ready_made.opened("v.npy")
    assert "v.npy: nothing was written to row 3" in caplog.text

    path = tmp_path / "half.h5"
    with h5py.File(path, "w") as file:
        pictures = file.create_dataset("x", (40, 8, 8, 3), "u1", chunks=(10, 8, 8, 3))
        pictures[:20] = 7
    with pytest.raises(DataError, match="x of .* has 2 of its 4 chunks: all is to be written"):
        array(str(path))
    with h5py.File(path, "a") as file:
        file["x"][20:] = 7
    assert len(array(str(path))) == 40


def test_only_what_lies_whole_in_an_hdf5_file_is_read(tmp_path: Path) -> None:
    path, other = tmp_path / "x.h5", tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["x"] = PIXELS
    (tmp_path / "raw").write_bytes(bytes(1000))
    with h5py.File(path, "w") as file:
        file["a/x"] = PIXELS
        file["a/loop"] = file["a"]
        file["soft"] = h5py.SoftLink("/a/x")
        file["away"] = h5py.ExternalLink(str(other), "/x")
        file.create_dataset("texts", data=["a", "b"])
        file.create_dataset("huge", (10**9, 900, 9), chunks=(9, 9, 9), dtype="u1")
        file.create_dataset("lies", (99, 900, 9), dtype="u1")
        file.create_dataset("raw", (10, 100), dtype="u1", external=str(tmp_path / "raw"))
        layout = h5py.VirtualLayout((9, 7, 8, 3), "u1")
        layout[:] = h5py.VirtualSource(str(other), "x", (9, 7, 8, 3))
        file.create_virtual_dataset("virtual", layout)
    arrays, refused = array_files.arrays_in(path)
    assert list(arrays) == ["a/x"]
    for key, why in {
        "huge": "rows|declares",
        "lies": "declares",
        "raw": "in another file",
        "texts": "of type object",
        "virtual": "in another file",
    }.items():
        assert np.any([part in refused[key] for part in why.split("|")]), (key, refused[key])
    assert set(refused) == {"huge", "lies", "raw", "texts", "virtual"}
    np.testing.assert_array_equal(pixels(array(str(path))), PIXELS)
    with pytest.raises(DataError, match="virtual of .* keeps its data in another file"):
        array(str(path), key="virtual")


def test_an_hdf5_file_after_a_block_of_its_writers_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", userblock_size=2048) as file:  # as MATLAB writes it
        file["x"] = PIXELS
    np.testing.assert_array_equal(pixels(array(str(path))), PIXELS)
    path.write_bytes(bytes(3000))
    with pytest.raises(StoreError, match="is not an HDF5 file; name one, or a file of NumPy's"):
        array(str(path))


def _bfloat16() -> Any:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)  # sign, exponent and mantissa
    kind.set_precision(16)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def _of_12_bits() -> Any:
    kind = h5py.h5t.STD_U16LE.copy()
    kind.set_precision(12)
    kind.set_offset(4)
    return kind


def _biased() -> Any:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_ebias(120)
    return kind


@pytest.mark.parametrize("kind", [_bfloat16, _of_12_bits, _biased, lambda: h5py.h5t.IEEE_F64BE])
def test_numbers_of_any_type_of_hdf5_are_those_that_h5py_reads(
    tmp_path: Path, kind: Callable[[], Any]
) -> None:
    path = tmp_path / "x.h5"
    x = np.random.default_rng(0).integers(0, 200, (8, 12)).astype(np.float32)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple(x.shape)
        dataset = h5py.h5d.create(file.id, b"x", kind(), space)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, x, h5py.h5t.py_create(x.dtype))
    with h5py.File(path) as file:
        expected = file["x"][:]
    np.testing.assert_allclose(expected, x, atol=1)
    np.testing.assert_array_equal(pixels(array(str(path), layout="tensor")), expected)


def test_several_arrays_are_told_apart_by_the_key(tmp_path: Path) -> None:
    path = save(tmp_path / "stored.npz", PIXELS, z=PIXELS[::-1])
    with pytest.raises(ConfigError, match="has 2 arrays, x .*, z .*; say which: data.key=x"):
        array(str(path))
    np.testing.assert_array_equal(pixels(array(str(path), key="z")), PIXELS[::-1])
    with pytest.raises(ConfigError, match="data.key=y is no array of .*; the nearest are"):
        array(str(path), key="y")


def test_the_command_line_reads_arrays(
    tmp_path: Path, embedx_here: Callable[..., tuple[int, list[str], list[str]]]
) -> None:
    save(tmp_path / "stored.npz", PIXELS, y=np.arange(9) % 2)
    words = ["extract", "model=resnet18", "model.weights=null", "model.input_size=32"]
    words += ["data=array", "data.path=stored.npz"]
    status, out, err = embedx_here(*words, "data.range=[0,255]")
    assert (status, err) == (0, [])
    (path,) = (tmp_path / "outputs").glob("resnet18-stored.npz-*/embeddings.h5")
    opened = store.open(path)
    assert opened.label_texts() == [str(i % 2) for i in range(9)]
    assert opened.thumbnails is not None
    assert opened.thumbnails.shape == (9, 32, 32, 3)
    status, _, err = embedx_here(*words, "data.layout=hwc")
    assert status == 1
    assert err == [
        "ConfigError: data.layout must be one of nhw, nhwc, nchw, tensor or null, not 'hwc'"
    ]
