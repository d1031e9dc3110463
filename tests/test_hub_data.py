"""Data sets of HuggingFace on this machine: what ``datasets`` itself reads is the oracle."""

import datetime
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torch import nn

import embedx
from embedx.errors import ConfigError, DataError
from embedx.hub_data import huggingface

CLASSES = ["cat", "dog", "owl"]


def png(i: int, kind: str = "PNG", **about: Any) -> bytes:
    pixels = np.random.default_rng(i).integers(0, 255, (6, 9, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **about)
    return buffer.getvalue()


def rows(n: int) -> pa.Table:
    """Pictures with a class, and a column of each kind."""
    features = {
        "image": {"_type": "Image"},
        "label": {"names": CLASSES, "_type": "ClassLabel"},
        "tags": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
    }
    columns = {
        "image": pa.array(
            [{"bytes": png(i), "path": f"{i}.png"} for i in range(n)],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        ),
        "label": pa.array([(i % 4) - 1 for i in range(n)], pa.int64()),
        "caption": pa.array([f"Bild {i}, über" for i in range(n)]),
        "count": pa.array([None if i == 1 else i for i in range(n)], pa.int32()),
        "day": pa.array([datetime.date(2024, 1, 1 + i % 28) for i in range(n)]),
        "tags": pa.array([["x"]] * n),
        "name": pa.array([f"n{i}" for i in range(n)]),
    }
    note = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.table(columns).replace_schema_metadata(note)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 23 rows: saved in two Arrow files, as two splits, and as Parquet."""
    datasets = pytest.importorskip("datasets")
    top = tmp_path_factory.mktemp("hub")
    pq.write_table(rows(23), top / "all.parquet", row_group_size=5)
    whole = datasets.Dataset(rows(23))
    datasets.disable_progress_bars()
    whole.save_to_disk(top / "one", num_shards=2)
    parts = {"train": whole, "test": whole.select(range(15, 23))}
    datasets.DatasetDict(parts).save_to_disk(top / "both")
    for name, first, last in (("train", 0, 12), ("train", 12, 23), ("test", 15, 23)):
        folder = top / "hub" / "data"
        folder.mkdir(parents=True, exist_ok=True)
        part = rows(23).slice(first, last - first)
        pq.write_table(part, folder / f"{name}-{first // 12:05d}-of-00002.parquet")
    (top / "hub" / "README.md").write_text("about")
    return top


@pytest.mark.parametrize(
    ("path", "split"),
    [("one", None), ("both", "train"), ("hub", "train"), ("all.parquet", None)],
)
def test_pictures_labels_and_columns_are_those_that_datasets_reads(
    path: str, split: str | None, saved: Path
) -> None:
    import datasets

    theirs = datasets.load_from_disk(str(saved / "one"))
    source = huggingface(str(saved / path), split=split)
    sent = pickle.loads(pickle.dumps(source.read))
    assert len(source) == len(theirs) == 23
    for i in (7, 0, 22, 3, 3, 11, 12, *range(23)):
        expected = np.asarray(theirs[i]["image"].convert("RGB"))
        for read in (source.read, sent):
            np.testing.assert_array_equal(np.asarray(read(i)), expected)
    assert source.labels is not None
    assert source.labels.tolist() == theirs["label"][:]
    assert list(source.label_names) == theirs.features["label"].names
    assert source.metadata["caption"] == theirs["caption"][:]
    assert source.metadata["day"] == [str(day) for day in theirs["day"]]
    counts = np.array([np.nan if c is None else c for c in theirs["count"]])
    np.testing.assert_array_equal(np.asarray(source.metadata["count"]), counts)
    assert set(source.metadata) == {"caption", "count", "day", "name"}
    assert "the column tags" in source.notes[-1]
    assert list(source.ids) == [str(i) for i in range(23)]
    assert source.item_hashes is not None
    assert len(set(source.item_hashes.tolist())) == 23


def test_a_part_of_the_rows_with_ids_of_their_own(saved: Path) -> None:
    source = huggingface(str(saved / "both"), split="test", id="name", label="none", limit=5)
    assert list(source.ids) == [f"n{i}" for i in range(15, 20)]
    assert source.labels is None
    assert "the first of 8" in source.notes[0]
    named = huggingface(str(saved / "one"), label="name", limit=3)
    assert list(named.label_names) == ["n0", "n1", "n2"]


def test_a_column_whose_name_is_a_path_into_another_is_itself(tmp_path: Path) -> None:
    cells = [{"bytes": png(i), "path": None} for i in range(3)]
    flat = [png(i + 5) for i in range(3)]
    made = pa.table({"image": cells, "image.bytes": flat, "a": [{"b": 1}] * 3, "a.b": ["x"] * 3})
    pq.write_table(made, tmp_path / "d.parquet")
    for column, first in (("image.bytes", 5), ("image", 0)):
        source = huggingface(str(tmp_path / "d.parquet"), column=column)
        for i in range(3):
            expected = np.asarray(Image.open(io.BytesIO(png(first + i))).convert("RGB"))
            np.testing.assert_array_equal(np.asarray(source.read(i)), expected)
        assert source.metadata["a.b"] == ["x"] * 3


def test_the_texts_that_are_items_are_called_text_whatever_else_is(tmp_path: Path) -> None:
    made = pa.table({"text": ["s0", "s1"], "text_": ["t0", "t1"], "review": ["r0", "r1"]})
    pq.write_table(made, tmp_path / "r.parquet")
    source = huggingface(str(tmp_path / "r.parquet"), column="review")
    assert source.metadata == {
        "text__": ["s0", "s1"],
        "text_": ["t0", "t1"],
        "text": ["r0", "r1"],
    }


def test_texts_are_items_and_a_column_of_metadata(tmp_path: Path) -> None:
    texts = ["kurz", "x" * 5000, None, "", "名" * 600]
    bad = pa.array([*(t and t.encode() for t in texts), b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"sentence": bad, "label": [0, 1, 0, 1, 1, 0]}), tmp_path / "t.parquet")
    source = huggingface(str(tmp_path / "t.parquet"))
    assert [source.read(i) for i in (0, 1, 4)] == [texts[i] for i in (0, 1, 4)]
    with pytest.raises(DataError, match="the text is empty"):
        source.read(3)
    with pytest.raises(DataError, match="it has no text in the column sentence"):
        source.read(2)
    with pytest.raises(UnicodeDecodeError):
        source.read(5)
    kept = source.metadata["text"]
    assert kept[:1] + kept[2:4] + kept[5:] == ["kurz", "", "", "\\xff\\xfe"]
    assert all(len(text.encode()) <= 1024 for text in kept)
    assert any("2 texts of text are cut to 1,024 bytes; the model" in note for note in source.notes)
    assert list(source.label_names) == ["0", "1"]


def test_a_bad_cell_fails_alone_and_a_path_does_not_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.png").write_bytes(png(1))
    (tmp_path / "in" / "a.png").write_bytes(png(2))
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "out.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    cells = [
        {"bytes": png(0, "JPEG", exif=turned), "path": "/etc/passwd"},
        {"bytes": None, "path": "a.png"},
        {"bytes": None, "path": "../out.png"},
        {"bytes": None, "path": str(tmp_path / "out.png")},
        {"bytes": None, "path": "link.png"},
        {"bytes": None, "path": "gone.png"},
        {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "path": "x.png"},
        {"bytes": png(3)[:-20], "path": None},
        None,
        {"bytes": png(4), "path": None},
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(cells, kind)})
    pq.write_table(table, tmp_path / "in" / "t.parquet")
    with pa.ipc.new_stream(tmp_path / "in" / "t.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    for name in ("t.parquet", "t.arrow"):
        source = huggingface(str(tmp_path / "in" / name))
        found = {}
        for i in range(len(cells)):
            try:
                found[i] = source.read(i).size
            except (DataError, OSError) as error:
                found[i] = str(error)
        assert (found[0], found[1], found[9]) == ((6, 9), (9, 6), (9, 6))  # upright
        assert all("leads out of the folder" in found[i] for i in (2, 3, 4)), found
        assert "No such file" in found[5]
        assert "not a picture of the formats" in found[6]
        assert found[8] == "it has no picture in the column image"
        before = (source.fingerprint, source.item_hashes)
        (tmp_path / "in" / "a.png").write_bytes(png(20))
        with pytest.raises(DataError, match="changed after the run had listed it"):
            source.read(1)
        again = huggingface(str(tmp_path / "in" / name))
        assert again.fingerprint != before[0]
        assert np.flatnonzero(again.item_hashes != before[1]).tolist() == [1]


def test_a_file_that_is_written_again_fails_its_rows_and_no_others(saved: Path) -> None:
    source = huggingface(str(saved / "hub"), split="train")
    assert source.read(0).size == (9, 6)
    file = saved / "hub" / "data" / "train-00000-of-00002.parquet"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    for i in (0, 1, 11):
        with pytest.raises(DataError, match="changed after the run had listed it"):
            source.read(i)
    assert source.read(12).size == (9, 6)
    assert huggingface(str(saved / "hub"), split="train").fingerprint != source.fingerprint


MISTAKES: dict[str, tuple[type[Exception], str]] = {
    "path=nowhere": (DataError, r"data.path .*nowhere is not there; .* \(nothing is downloaded\)"),
    "path=both": (ConfigError, "has the splits train, test; choose one: data.split=train"),
    "path=both split=tset": (ConfigError, "has no split 'tset'; choose one of: train, test"),
    "path=one split=train": (ConfigError, "data.split=train has no use"),
    "path=all.parquet split=x": (ConfigError, "data.split=x has no use for one file"),
    "path=one column=imag": (ConfigError, "data.column=imag is no column of .*; the nearest"),
    "path=one column=tags": (ConfigError, "neither pictures nor texts; choose one of: image, cap"),
    "path=one label=tags": (ConfigError, "data.label=tags holds list"),
    "path=one label=lable": (ConfigError, "the nearest are label"),
    "path=one id=caption2": (ConfigError, "data.id=caption2"),
    "path=one id=label": (DataError, "the id '[-0-9]+' in column label of .*one comes . times"),
    "path=one id=count": (DataError, "the id of row 1 in column count of .*one is empty"),
    "path=hub/README.md": (DataError, "is no .parquet or .arrow file"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, saved: Path) -> None:
    given = dict(word.split("=") for word in words.split())
    kind, message = MISTAKES[words]
    with pytest.raises(kind, match=message) as raised:
        huggingface(**{**given, "path": str(saved / given["path"])})
    assert "\n" not in str(raised.value)


def declares_many(path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10_000_000, np.int8)), ["a"])
    pq.write_table(
        pa.table({"text": text.cast(pa.string())}),
        path,
        row_group_size=10_000_000,
        store_schema=False,
    )


def is_a_bomb(path: Path) -> None:
    cells = pa.array([b"\0" * 270_000_000], pa.binary())
    pq.write_table(pa.table({"image": cells}), path, compression="zstd", compression_level=1)


def has_one_name_twice(path: Path) -> None:
    one = pa.array(["a"])
    pq.write_table(pa.Table.from_arrays([one, one], ["text", "text"]), path)


def has_no_row(path: Path) -> None:
    pq.write_table(rows(0), path)


def is_cut(path: Path) -> None:
    pq.write_table(rows(3), path)
    path.write_bytes(path.read_bytes()[:-9])


def is_a_pipe(path: Path) -> None:
    os.mkfifo(path)


HOSTILE: dict[Callable[[Path], None], str] = {
    declares_many: "declares 10,000,000 rows and has",
    is_a_bomb: "bytes of the column image become 270,0",
    has_one_name_twice: "has the column 'text' 2 times",
    has_no_row: "holds no row",
    is_cut: "damaged or of another kind",
    is_a_pipe: "is no plain file",
}


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_a_hostile_file_is_refused_in_one_line(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=HOSTILE[make]):
        huggingface(str(tmp_path / "t.parquet"))


@pytest.mark.parametrize("name", ["../one/data.arrow", "/etc/passwd", "..", "", 7])
def test_a_data_set_names_no_file_of_another_folder(name: Any, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match="is not right in that folder"):
        huggingface(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(DataError, match="is not right in that folder"):
        huggingface(str(tmp_path))


def test_damage_anywhere_in_an_arrow_file_is_told_and_never_ends_the_process(saved: Path) -> None:
    code = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from embedx.hub_data import huggingface; from embedx.errors import EmbedxError\n"
        "raw = Path(sys.argv[1]).read_bytes(); rng = np.random.default_rng(0); told = 0\n"
        "for k in range(150):\n"
        "    data = bytearray(raw)\n"
        "    for _ in range(int(rng.integers(1, 6))):\n"
        "        data[int(rng.integers(min(len(raw), 4000) if k % 2 else len(raw)))] = "
        "int(rng.integers(256))\n"
        "    Path('flipped.arrow').write_bytes(data)\n"
        "    try:\n"
        "        source = huggingface('flipped.arrow', label='none')\n"
        "    except EmbedxError:\n"
        "        told += 1; continue\n"
        "    for i in range(len(source)):\n"
        "        try: source.read(i)\n"
        "        except Exception: told += 1\n"
        "print(told)\n"
    )
    (file, *_) = sorted((saved / "one").glob("*.arrow"))
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        cwd=saved,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_memory_does_not_grow_with_what_lies_on_disk(suffix: str, tmp_path: Path) -> None:
    cell = np.random.default_rng(0).bytes(400_000)
    batch = pa.table({"image": pa.array([cell] * 50, pa.binary()), "cap": ["y" * 2000] * 50})
    file = tmp_path / f"big.{suffix}"
    writer = (
        pq.ParquetWriter(file, batch.schema, use_dictionary=False, compression="none")
        if suffix == "parquet"
        else pa.ipc.new_stream(file, batch.schema)
    )
    with writer:
        for _ in range(20):
            writer.write_table(batch)
    assert file.stat().st_size > 400_000_000
    code = (
        "import sys, pyarrow, pyarrow.parquet; from embedx.hub_data import huggingface\n"
        "def anonymous():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return int(next(l for l in lines if l.startswith('RssAnon')).split()[1]) // 1024\n"
        "huggingface; before = anonymous(); most = 0\n"
        "source = huggingface(sys.argv[1])\n"
        "for i in range(len(source)):\n"
        "    try: source.read(i)\n"
        "    except ValueError: most = max(most, anonymous())\n"
        "print(len(source), most - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    n, grown_mb = map(int, done.stdout.split())
    assert n == 1000
    assert grown_mb < 150


def test_rows_are_the_same_with_workers_and_in_whatever_files_they_lie(
    saved: Path, tmp_path: Path
) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    prepare = embedx.models.Preprocess(resize_px=16, crop_px=16)
    runs = [
        embedx.extract(
            network,
            huggingface(str(saved / path), split=split),
            layers=["0"],
            preprocess=prepare,
            batch_size=4,
            num_workers=n,
            out=tmp_path / f"run-{i}",
        )
        for i, (path, split, n) in enumerate(
            [("one", None, 0), ("one", None, 2), ("both", "train", 2), ("all.parquet", None, 2)]
        )
    ]
    first = np.asarray(runs[0].embeddings["0"])
    assert first.shape == (23, 4)
    assert np.isfinite(first).all()
    for run in runs[1:]:
        np.testing.assert_array_equal(np.asarray(run.embeddings["0"]), first)
    assert runs[0].label_texts()[:5] == ["", "cat", "dog", "owl", ""]


def test_the_command_says_what_it_takes_and_what_has_to_be_chosen(
    saved: Path, embedx_here: Callable[..., tuple[int, list[str], list[str]]]
) -> None:
    words = ("extract", "model=efficientnet_lite0", "model.input_size=32", "data=huggingface")
    status, out, err = embedx_here(*words, f"data.path={saved / 'one'}", "name=hf")
    assert (status, err) == (0, [])
    assert "23 pictures of the column image, 3 classes of label; ids are row numbers" in out[0]
    assert embedx.open("outputs/hf").n_rows == 23
    status, out, err = embedx_here(*words, f"data.path={saved / 'both'}")
    assert status == 1
    assert err[-1].startswith("ConfigError: data.path")


def noted(labels: list[int], names: list[str] | None) -> pa.Table:
    """Texts with a class each, whose names are noted or not."""
    table = pa.table({"text": [f"t{i}" for i in labels], "label": pa.array(labels, pa.int64())})
    features = {"label": {"names": names, "_type": "ClassLabel"}} if names else {}
    return table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


@pytest.mark.parametrize("names", [["dog", "cat"], ["cat", "dog", "owl"], None])
def test_files_that_name_their_classes_otherwise_are_refused(
    names: list[str] | None, tmp_path: Path
) -> None:
    pq.write_table(noted([0, 1], ["cat", "dog"]), tmp_path / "a.parquet")
    pq.write_table(noted([0, 1], names), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet says otherwise what label is than a.parquet"):
        huggingface(str(tmp_path))


def test_a_part_that_is_not_there_is_told_by_its_number(tmp_path: Path) -> None:
    for i in (0, 2):
        pq.write_table(noted([0, 1], ["cat", "dog"]), tmp_path / f"train-{i:05d}-of-00003.parquet")
    (warning,) = huggingface(str(tmp_path)).warnings
    assert "lacks 1 of the 3 parts of train: 00001" in warning
    pq.write_table(noted([0, 1], ["cat", "dog"]), tmp_path / "train-00001-of-00003-ab.parquet")
    assert huggingface(str(tmp_path)).warnings == ()


@pytest.mark.parametrize(
    "other", ["train-00000-of-00002.parquet", "train-00000-of-00001-b.parquet"]
)
def test_two_copies_of_the_parts_of_a_split_are_refused(other: str, tmp_path: Path) -> None:
    for name in ("train-00000-of-00001-a.parquet", other):
        pq.write_table(noted([0, 1], ["cat", "dog"]), tmp_path / name)
    with pytest.raises(DataError, match="parts of two copies"):
        huggingface(str(tmp_path))


def test_numbers_that_no_class_has_are_told_in_metadata_and_as_labels(tmp_path: Path) -> None:
    features = {"breed": {"names": ["x", "y"], "_type": "ClassLabel"}}
    note = {"huggingface": json.dumps({"info": {"features": features}})}
    columns = {"text": list("abcd"), "breed": [0, -1, 7, None], "label": [0, -1, 3, None]}
    pq.write_table(pa.table(columns).replace_schema_metadata(note), tmp_path / "x.parquet")
    source = huggingface(str(tmp_path / "x.parquet"), label="label")
    assert list(source.metadata["breed"]) == ["x", "", "", ""]
    assert source.label_names == ["-1", "0", "3"]
    assert source.warnings == (
        "1 row has in breed a number that is none of its 2 classes, the first 7 in row 2: it is "
        "kept as an empty text",
        f"-1 among the labels of {tmp_path / 'x.parquet'} is a class of that name",
    )


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_texts_that_are_kept_as_a_dictionary_are_items_too(suffix: str, tmp_path: Path) -> None:
    texts = ["ja", "nein", None, "ja"]
    columns = {
        "text": pa.array(texts).dictionary_encode(),
        "caption": pa.array(list("abcd")),
        "breed": pa.array(list("xyxy")).dictionary_encode(),
    }

    def write(*names: str) -> str:
        path = tmp_path / f"x{suffix}"
        table = pa.table({name: columns[name] for name in names})
        if suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
                out.write_table(table)
        return str(path)

    source = huggingface(write("text", "caption"))
    assert [source.read(i) for i in (0, 1, 3)] == ["ja", "nein", "ja"]
    with pytest.raises(DataError, match="it has no text in the column text"):
        source.read(2)
    assert source.metadata["text"] == ["ja", "nein", "", "ja"]
    assert huggingface(write("caption", "breed")).read(0) == "a"
    assert huggingface(write("caption", "breed"), column="breed").read(1) == "y"


def test_two_classes_of_one_name_are_two_as_labels_and_as_metadata(tmp_path: Path) -> None:
    table = noted([0, 1, 2], ["crane", "hen", "crane"])
    table = table.append_column("kind", table.column("label"))
    features = {
        name: {"names": ["crane", "hen", "crane"], "_type": "ClassLabel"}
        for name in ("label", "kind")
    }
    note = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(note), tmp_path / "a.parquet")
    source = huggingface(str(tmp_path), label="label")
    assert list(source.label_names) == ["crane (0)", "hen", "crane (2)"]
    assert source.metadata["kind"] == ["crane (0)", "hen", "crane (2)"]
    assert len(source.warnings) == 2
