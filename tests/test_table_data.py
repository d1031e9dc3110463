"""Pictures that a table lists: columns, ids, labels, files that are missing or lie elsewhere."""

import csv
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from torch import nn

import embedx
from embedx import store, table_files, text_data
from embedx.errors import ConfigError, DataError
from embedx.table_data import table
from embedx.table_files import read_table

NAMES = [f"photos/{i}.png" for i in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures of one colour each, red as their number."""
    (tmp_path / "photos").mkdir()
    for i, name in enumerate(NAMES):
        Image.new("RGB", (8, 8), (i * 40, 9, 9)).save(tmp_path / name)
    return tmp_path


def write_csv(path: Path, rows: Sequence[Sequence[Any]], **options: Any) -> str:
    with path.open("w", newline="", encoding=options.pop("encoding", "utf-8")) as file:
        csv.writer(file, **options).writerows(rows)
    return str(path)


def reds(source: Any) -> list[int | str]:
    """The number of the picture that each row reads, or why it reads none."""
    found: list[int | str] = []
    for i in range(len(source)):
        try:
            found.append(source.read(i).getpixel((0, 0))[0] // 40)
        except (DataError, OSError) as error:
            found.append(str(error))
    return found


FRAME = pandas.DataFrame(
    {
        "file_name": [*NAMES, NAMES[2]],
        "Label": ["b", "a", None, "b", "a", "ä", "b"],
        "age": [1, 2, 3, 4, 5, 6, 7],
        "weight": [1.5, None, 3, 4, 5, 6, 7],
        "is_wild": [True, False, True, True, False, False, True],
        "note": ['a "quoted", cell', "two\nlines", "", "=x", "007", "ü", "z"],
    }
)


@pytest.mark.parametrize("kind", ["csv", "tsv", "bom", "crlf", "semicolon", "parquet"])
def test_a_table_of_any_kind_gives_what_pandas_wrote_into_it(folder: Path, kind: str) -> None:
    path = folder / f"t.{kind if kind in ('csv', 'tsv', 'parquet') else 'csv'}"
    options: dict[str, Any] = {
        "tsv": {"sep": "\t"},
        "bom": {"encoding": "utf-8-sig"},
        "crlf": {"lineterminator": "\r\n"},
        "semicolon": {"sep": ";"},
    }.get(kind, {})
    if kind == "parquet":
        FRAME.to_parquet(path, row_group_size=3)
    else:
        FRAME.to_csv(path, index=False, **options)
    quoting: Any = "rfc4180" if kind == "tsv" else None
    source = table(str(path), delimiter=";" if kind == "semicolon" else None, quoting=quoting)
    assert source.ids == [*NAMES, f"{NAMES[2]}#2"]
    assert reds(source) == [0, 1, 2, 3, 4, 5, 2]
    assert source.label_names == ["a", "b", "ä"]
    assert source.labels is not None
    texts = [[*source.label_names, ""][i] for i in source.labels]
    assert texts == FRAME["Label"].fillna("").tolist()
    assert {name: np.asarray(column).dtype.kind for name, column in source.metadata.items()} == {
        "age": "i",
        "weight": "f",
        "is_wild": "b",
        "note": "U",
    }
    for name, column in source.metadata.items():
        np.testing.assert_array_equal(column, FRAME[name].to_numpy())


def test_a_run_keeps_the_columns_and_booleans_are_booleans_again(
    folder: Path,
) -> None:
    path = str(folder / "t.csv")
    FRAME.to_csv(path, index=False)
    runs = []
    for workers in (0, 2):
        model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten())
        prepare = embedx.models.Preprocess(resize_px=8, crop_px=8, mean=(0, 0, 0), std=(1, 1, 1))
        out = folder / f"out-{workers}"
        runs.append(
            embedx.extract(
                model, table(path), layers="1", preprocess=prepare, out=out, num_workers=workers
            )
        )
    first = runs[0]
    assert [one.metadata["is_wild"].dtype for one in runs] == [np.dtype(bool)] * 2  # type: ignore[union-attr]
    assert first.to_pandas()["is_wild"].tolist() == FRAME["is_wild"].tolist()
    red = np.array([0, 1, 2, 3, 4, 5, 2]) * 40 / 255
    np.testing.assert_allclose(first.rows()[1][:, 0], red, atol=1e-6)
    assert (folder / "out-0/embeddings.h5").read_bytes() == (
        folder / "out-2/embeddings.h5"
    ).read_bytes()


def test_only_a_row_whose_file_cannot_be_read_fails_and_says_why(folder: Path) -> None:
    Image.new("RGB", (8, 8), (200, 0, 0)).save(folder.parent / "outside.png")
    (folder / NAMES[1]).write_bytes((folder / NAMES[1]).read_bytes()[:50])
    os.symlink(folder.parent / "outside.png", folder / "photos/link.png")
    os.symlink(folder.parent, folder / "photos/up")
    os.mkfifo(folder / "photos/pipe.png")
    cells = [
        NAMES[0],
        NAMES[1],
        "photos/none.png",
        "../outside.png",
        str(folder.parent / "outside.png"),
        "photos/link.png",
        "photos/up/outside.png",
        "photos/pipe.png",
        "photos",
        "",
        "a\0b",
        "photos\\3.png",
        "p" * 3000,
        str(folder / NAMES[4]),
        f"./photos/../{NAMES[5]}",
    ]
    path = write_csv(folder / "t.csv", [["path", "x"], *([cell, "1"] for cell in cells)])
    source = pickle.loads(pickle.dumps(table(path)))
    found = reds(source)
    assert (found[0], found[13], found[14]) == (0, 4, 5)
    whys = ["truncated", "No such file", *["leads out of the folder"] * 4, *["no plain file"] * 2]
    whys += ["missing", "NUL", "/ is meant", "too long"]
    for i, why in enumerate(whys, start=1):
        assert why.lower() in str(found[i]).lower(), (cells[i], found[i])
    assert source.ids[13] == NAMES[4]
    assert source.ids[14] == NAMES[5]
    assert len(set(source.ids)) == len(cells)
    assert sum(int(told.split()[0]) for told in source.warnings) == 11
    inside = table(path, root=str(folder.parent))
    assert reds(inside)[4] == 5  # an absolute path that the root contains


def test_a_picture_that_is_changed_after_the_listing_fails_and_changes_the_fingerprint(
    folder: Path,
) -> None:
    path = write_csv(folder / "t.csv", [["path"], *([name] for name in NAMES)])
    before = table(path)
    assert table(path).fingerprint == before.fingerprint
    Image.new("RGB", (9, 8), (0, 0, 0)).save(folder / NAMES[3])
    after = table(path)
    assert "changed" in str(reds(before)[3])
    assert [i for i in range(6) if before.item_hashes[i] != after.item_hashes[i]] == [3]  # type: ignore[index]
    assert before.fingerprint != after.fingerprint


def test_ids_labels_and_the_first_rows_are_those_that_are_asked_for(folder: Path) -> None:
    rows = [[name, f"k{i}", i % 2, ""] for i, name in enumerate(NAMES)]
    path = write_csv(folder / "t.csv", [["image", "key", "kind", ""], *rows])
    source = table(path, id="key", label="kind", limit=4)
    assert source.ids == ["k0", "k1", "k2", "k3"]
    assert source.label_names == ["0", "1"]
    assert source.metadata == {"image": NAMES[:4]}
    assert "1 columns without a name" in " ".join(source.notes)
    assert "the first of more" in source.notes[0]
    assert table(path, label="none").labels is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"path;label\nphotos/0.png;x\n", r"is it ';'\? give data.delimiter"),
        ("path,label\nphotos/0.png,é\n".encode("latin-1"), "line 2 .* is not UTF-8"),
        ("path,label\nphotos/0.png,x\n".encode("utf-16"), "line 1 .* is not UTF-8"),
        (b"path,x\nphotos/0.png,1\nphotos/1.png\n", "line 3 .* has 1 cells, .* names 2 columns"),
        (b"path,x,x\nphotos/0.png,1,2\n", "the column 'x' 2 times"),
        (b"photos/0.png,x\nphotos/1.png,y\n", "no column called path.*add a first line"),
        (b"path,image\nphotos/0.png,x\n", "has the columns path, image; say which"),
        (b"path,label,class\nphotos/0.png,x,y\n", "label, class; say which has the labels"),
        (b"", "is empty"),
        (b"path\n", "no row"),
        (b'path,x\n"photos/0.png"x,1\n', "line 2 .* is not what a CSV file holds"),
        (b'path,x\n"photos/0.png,1\n', "line 2 .* is not what a CSV file holds"),
        (b"path\n" + b"y" * (2**24 + 1), "line 2 .* more than 16 MiB"),
        (b",".join(b"c%d" % i for i in range(4097)) + b"\n", "4,097 columns, and at most 4,096"),
        (b"path\nnone.png\n", "none of the 1 pictures .* data.root=FOLDER"),
        (b"path,x\nphotos/0.png,1\npath,x\nphotos/1.png,2\n", "line 3 .* is its first line again"),
        (b"path,label\nphotos/0.png,a\0b\n", "a label in column label .* has NUL"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused_in_one_line(
    folder: Path, content: bytes, message: str
) -> None:
    path = folder / "t.csv"
    path.write_bytes(content)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        table(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "file"}, "data.column=file is no column of .*, and all are path, label"),
        ({"label": "lable"}, "data.label=lable is no column of .*; the nearest are label"),
        ({"id": "label"}, "the id '.*' in column label .* comes 3 times"),
        ({"root": "nowhere"}, "data.root nowhere is no folder"),
        ({"delimiter": "ab"}, "delimiter 'ab' is not one character"),
        ({"limit": 0}, "data.limit must be at least 1"),
    ],
)
def test_a_key_that_does_not_fit_the_table_is_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    rows = [[name, "ab"[i % 2]] for i, name in enumerate(NAMES)]
    path = write_csv(folder / "t.csv", [["path", "label"], *rows])
    with pytest.raises((ConfigError, DataError), match=message):
        table(path, **options)


@pytest.mark.parametrize("name", ["t.csv.gz", "t.xlsx", "t", "none.csv", "."])
def test_what_is_no_table_is_told_so(folder: Path, name: str) -> None:
    if name.startswith("t"):
        (folder / name).write_bytes(b"x")
    with pytest.raises(DataError, match="the table"):
        table(str(folder / name))


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> str:
    pa.parquet.write_table(pa.table(columns), path, **options)
    return str(path)


def test_columns_of_a_parquet_without_a_place_are_passed_over_and_said(folder: Path) -> None:
    columns = {"path": NAMES, "box": [[1, 2]] * 6, "a.b": range(6), "what": pa.nulls(6)}
    source = table(write_parquet(folder / "t.parquet", columns))
    assert list(source.metadata) == ["a.b"]
    assert source.metadata["a.b"] == pytest.approx(range(6))
    assert "passed over: box (list<element: int64>), what (null)" in source.notes


def test_pictures_within_a_parquet_are_sent_to_the_source_that_reads_them(folder: Path) -> None:
    for cells in ([b"x"] * 2, [{"bytes": b"x", "path": None}] * 2):
        path = write_parquet(folder / "t.parquet", {"image": cells, "label": [0, 1]})
        with pytest.raises(ConfigError, match="data=huggingface"):
            table(path)


def test_a_small_parquet_of_many_rows_or_of_a_huge_cell_is_refused_unread(folder: Path) -> None:
    many = table_files.ROWS_MOST + 1
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(many, np.int8)), ["photos/0.png"])
    path = write_parquet(folder / "t.parquet", {"path": same}, row_group_size=many)
    assert Path(path).stat().st_size < 100_000
    with pytest.raises(DataError, match="more than 10,000,000 rows"):
        table(path)
    columns = {"path": NAMES[:2], "note": ["x" * 2**27, ""]}
    path = write_parquet(folder / "t.parquet", columns, compression="zstd")
    assert Path(path).stat().st_size < 100_000
    with pytest.raises(DataError, match="bytes of the column note become 134,2"):
        table(path)


def test_a_text_that_stands_once_in_a_parquet_is_kept_once(folder: Path) -> None:
    """Written out, they would be 6 GB."""
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(6000, np.int32)), ["x" * 2**20])
    columns = {"path": NAMES * 1000, "note": long}
    source = table(write_parquet(folder / "t.parquet", columns))
    notes = source.metadata["note"]
    assert len(notes) == 6000
    assert len({id(note) for note in notes}) == 1
    assert "6,000 texts of note are cut to 1,024 bytes" in source.notes


@pytest.mark.parametrize("damage", [b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", b""])
def test_a_damaged_parquet_is_refused_in_one_line(folder: Path, damage: bytes) -> None:
    (folder / "t.parquet").write_bytes(damage)
    with pytest.raises(DataError, match="damaged or of another kind") as caught:
        table(str(folder / "t.parquet"))
    assert "\n" not in str(caught.value)


def test_the_command_line_reads_a_table_and_names_the_run_after_it(
    folder: Path, embedx_here: Callable[..., tuple[int, list[str], list[str]]]
) -> None:
    FRAME.to_csv(folder / "t.csv", index=False)
    words = ["extract", "model=resnet18", "model.weights=null", "model.input_size=32"]
    words += ["data=table", "data.path=t.csv"]
    status, out, err = embedx_here(*words)
    assert (status, err) == (0, [])
    (path,) = (folder / "outputs").glob("resnet18-t.csv-*/embeddings.h5")
    assert store.open(path).n_rows == 7
    assert "columns kept: age, weight, is_wild, note" in out
    assert (
        "t.csv: 7 rows, pictures by column file_name, labels by column Label: 3 classes"
        in " ".join(out)
    )
    assert "path: t.csv" in store.open(path).attrs["config"]
    status, out, _ = embedx_here(*words)
    assert status == 0
    assert any("nothing to do" in line for line in out)
    (folder / NAMES[0]).unlink()
    status, out, err = embedx_here(*words)
    assert status == 1
    assert "1 edited (photos/0.png)" in err[-1]
    status, _, err = embedx_here("extract", "model=resnet18", "data=table", "data.path=none.csv")
    assert (status, len(err)) == (1, 1)


def test_minus_one_among_whole_numbers_is_a_class_and_that_is_told(folder: Path) -> None:
    path = folder / "m.csv"
    path.write_text("path,label\nphotos/0.png,-1\nphotos/1.png,3\n")
    source = table(str(path))
    assert source.label_names == ["-1", "3"]
    assert source.warnings == (f"-1 among the labels of {path} is a class of that name",)
    texts = text_data.text(str(path), column="path")
    assert texts.warnings == source.warnings
    path.write_text("path,label\nphotos/0.png,-1\nphotos/1.png,x\n")
    assert table(str(path)).warnings == ()


def test_a_path_that_goes_up_out_of_a_link_reads_no_other_file(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    Image.new("RGB", (8, 8), (200, 0, 0)).save(folder / "deep" / "x.png")
    Image.new("RGB", (8, 8), (10, 0, 0)).save(folder / "x.png")
    (folder / "link").symlink_to("deep/er")
    (folder / "t.csv").write_text("path\nlink/../x.png\ndeep/../x.png\ndeep/er/../x.png\n")
    source = table(str(folder / "t.csv"))
    with pytest.raises(DataError, match="goes up .* out of a link"):
        source.read(0)
    assert [np.asarray(source.read(i))[0, 0, 0] for i in (1, 2)] == [10, 200]


MARKED = 'id\ttext\n1\t"Hello, she said.\n2\tA plain line\n3\tand so it ended"\n4\t"whole"\n'


def test_quotation_marks_between_tabs_swallow_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text(MARKED)
    with pytest.raises(DataError, match=r"lines 2 to 4 of .*data.quoting=none.*=rfc4180"):
        read_table(path)
    plain = read_table(path, quoting="none")
    wanted = ['"Hello, she said.', "A plain line", 'and so it ended"', '"whole"']
    assert plain.texts("text") == wanted
    assert plain.texts("id") == list("1234")
    asked = read_table(path, quoting="rfc4180")
    assert asked.texts("text") == ["Hello, she said.\n2\tA plain line\n3\tand so it ended", "whole"]
    assert any(
        "1 row that goes over several lines, the first at line 2" in s for s in asked.remarks
    )
    path.write_text('id\ttext\n1\t"a\tb"\n')
    with pytest.raises(DataError, match=r"line 2 of .*data.quoting"):
        read_table(path)
    path.with_suffix(".csv").write_text('id,text\n1,"a\nb"\n2,"c,d"\n')
    read = read_table(path.with_suffix(".csv"))
    assert read.texts("text") == ["a\nb", "c,d"]
    assert any("1 row that goes over several lines, the first at line 2" in s for s in read.remarks)
    assert not any("passed over" in s for s in read.told())  # for no row is


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ('id\t"te\n1\ta"\ttext\n1\t2\tb\n', {}, r"lines 1 to 2 of .*data.quoting=none"),
        ('id\t"a\ttext"\n1\tb\n', {}, r"line 1 of .*data.quoting=none"),
        ('id\ttext\n1\t"Hello" she said\n', {}, "line 2 of .*; .*part of its texts .*quoting=none"),
        ('id\ttext\n1\t"Hello\n', {}, "of .*; .*part of its texts .*quoting=none"),
        ('id\ttext\n1\t"Hello\n', {"quoting": "rfc4180"}, "save the table as parquet$"),
        ("\n\n", {}, "is empty"),
    ],
)
def test_what_marks_between_tabs_make_of_a_header_or_a_cell_is_refused_with_the_setting_for_it(
    content: str, options: Any, words: str, tmp_path: Path
) -> None:
    (tmp_path / "x.tsv").write_text(content)
    with pytest.raises(DataError, match=words):
        read_table(tmp_path / "x.tsv", **options)


def test_marks_that_are_taken_away_between_tabs_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('id\ttext\n1\tsay "x"\n2\t"whole"\n3\t""\n')
    for quoting, texts in ((None, ["whole", ""]), ("none", ['"whole"', '""'])):
        read = read_table(path, quoting=quoting)
        assert read.texts("text") == ['say "x"', *texts]
        told = [line for line in read.told() if "are taken away, the first in line 3" in line]
        assert len(told) == (quoting is None)


def test_a_column_of_versions_is_kept_as_texts_and_that_is_told(folder: Path) -> None:
    path = folder / "versions.csv"
    path.write_text(
        "path,version\n" + "".join(f"{n},1.{'1' + '0' * i}\n" for i, n in enumerate(NAMES))
    )
    source = table(str(path))
    assert source.metadata["version"] == [f"1.1{'0' * i}" for i in range(len(NAMES))]
    assert "version is kept as texts: 1.1 and 1.10 are one number" in source.notes
