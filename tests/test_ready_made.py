"""Embeddings that were made elsewhere go through every stage as a run's own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest

import embedx
from embedx import ready_made, store, unfinished
from embedx.errors import DataError, StoreError
from embedx.ready_made import opened

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(60, 8)).astype(np.float32)
KINDS = ["ab"[i % 2] for i in range(60)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_parquet(path: str, columns: dict[str, Any], **options: Any) -> str:
    pa.parquet.write_table(pa.table(columns), path, **options)
    return path


def test_every_way_to_give_the_same_rows_gives_them_back(here: Path) -> None:
    np.save("a.npy", ROWS)
    np.save("b.npy", np.asfortranarray(ROWS.astype(np.float64)))
    np.save("c.npy", ROWS.astype(">f4"))
    np.savez("d.npz", x=ROWS)
    np.savez_compressed("e.npz", x=ROWS)
    write_parquet("f.parquet", {"x": ROWS.tolist()}, row_group_size=7)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.reshape(-1)), 8)
    write_parquet("g.parquet", {"x": fixed})
    given: list[Any] = [ROWS, *sorted(path.name for path in here.iterdir())]
    assert len(given) == 8
    for one in given:
        run = opened(one)
        np.testing.assert_array_equal(run.rows()[1], ROWS)
        assert run.ids == [str(i) for i in range(60)]
        assert run.complete
        assert run.verify() == []
        assert run.attrs["model"] == "ready-made"
        assert run.ok.all()


def test_what_stands_beside_the_rows_is_kept(here: Path) -> None:
    frame = pandas.DataFrame(
        {
            "ID": [f"s{i}" for i in range(60)],
            "label": ["", *KINDS[1:]],
            "age": range(60),
            "ok": [i % 3 == 0 for i in range(60)],
            "note": ["n" * 3000, *["x"] * 59],
            "x": list(ROWS),
        }
    )
    frame.to_parquet("t.parquet")
    run = opened("t.parquet")
    assert run.ids == frame["ID"].tolist()
    assert run.label_texts() == frame["label"].tolist()
    assert list(run.embeddings) == ["x"]
    np.testing.assert_array_equal(run.metadata["age"], frame["age"])
    np.testing.assert_array_equal(run.metadata["ok"], frame["ok"])
    assert len(run.metadata["note"][0].encode()) == 1024
    np.savez("t.npz", x=ROWS, ids=frame["ID"].to_numpy(str), y=np.arange(60) % 3, age=frame["age"])
    run = opened("t.npz")
    assert run.ids == frame["ID"].tolist()
    assert run.label_texts() == [str(i % 3) for i in range(60)]
    np.testing.assert_array_equal(run.metadata["age"], frame["age"])


def test_a_row_that_is_not_finite_or_has_no_numbers_fails_alone(here: Path) -> None:
    bad = ROWS.astype(np.float64)
    bad[3, 1], bad[5, 0], bad[7, 2] = np.nan, np.inf, 1e300
    np.save("x.npy", bad)
    run = opened("x.npy")
    assert np.flatnonzero(~run.ok).tolist() == [3, 5, 7]
    np.testing.assert_array_equal(run.rows()[1][run.ok], ROWS[run.ok])
    assert np.isnan(run.rows()[1][~run.ok]).all()
    lists: list[Any] = ROWS.tolist()
    lists[0], lists[2], lists[4] = None, [1.0], []
    lists[6] = [None, *lists[6][1:]]
    run = opened(write_parquet("x.parquet", {"x": lists}, row_group_size=4))
    assert np.flatnonzero(~run.ok).tolist() == [0, 2, 4, 6]
    np.testing.assert_array_equal(run.rows()[1][run.ok], ROWS[run.ok])
    whys = [one["reason"] for one in unfinished.read_reasons(run.path)]
    assert ["no numbers" in whys[0], "has 1 numbers" in whys[1]] == [True, True]
    assert projected(run) == [1, 3, 5, *range(7, 60)]


def projected(run: Any) -> list[int]:
    placed = np.isfinite(embedx.project(run, method="pca").coords).all(axis=1)
    return [int(row) for row in np.flatnonzero(placed)]


def test_the_same_is_copied_once_and_another_goes_elsewhere(here: Path) -> None:
    np.save("x.npy", ROWS)
    first = opened("x.npy")
    before = first.path.stat().st_mtime_ns
    assert opened("x.npy").path == first.path
    assert first.path.stat().st_mtime_ns == before
    np.save("x.npy", ROWS + 1)
    assert opened("x.npy").path != first.path
    assert sorted(path.name for path in first.path.parent.iterdir()) == ["embeddings.h5"]
    first.path.write_bytes(opened("x.npy").path.read_bytes())
    np.save("x.npy", ROWS)
    with pytest.raises(StoreError, match="holds other embeddings than x.npy"):
        opened("x.npy")


def test_every_stage_takes_a_file_of_vectors(
    here: Path, embedx_here: Callable[..., tuple[int, list[str], list[str]]]
) -> None:
    np.savez("x.npz", x=ROWS, labels=np.array(KINDS), ok=np.arange(60) % 3 == 0)
    np.save("y.npy", ROWS * 2)
    written = []
    for words in (
        ["project", "projection=pca", "embeddings=x.npz"],
        ["evaluate", "embeddings=x.npz", "against=[y.npy]"],
        ["export", "exporter=npz", "embeddings=x.npz"],
        ["view", "embeddings=x.npz", "color=ok"],
        ["neighbors", "embeddings=x.npz", "query=3"],
        ["compare", "runs=[x.npz,y.npy]"],
        ["info"],
    ):
        status, out, err = embedx_here(*words)
        assert (status, err) == (0, []), words
        written += [line.split()[1].rstrip(":") for line in out if line.startswith("wrote ")]
    (folder,) = (here / "outputs").glob("x-*")
    assert len(written) >= 7
    assert all((here / path).exists() for path in written)
    with np.load(folder / "embeddings.npz") as archive:
        np.testing.assert_array_equal(archive["embeddings/x"], ROWS)
    assert {path.name for path in folder.iterdir()} >= {"projections", "scores.json"}


def test_an_array_in_memory_is_projected_as_its_principal_components(here: Path) -> None:
    coords = embedx.project(ROWS, method="pca").coords
    centred = ROWS - ROWS.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    expected = np.abs(centred @ axes[:2].T)
    np.testing.assert_allclose(np.abs(coords), expected, atol=1e-4)


def test_what_float32_does_not_tell_apart_is_said(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = ROWS.astype(np.float64)
    wide[5, 1] = np.nan
    years, near, tiny = wide.copy(), wide.copy(), wide * 1e-46
    years[:, 2] = 1.7e9 + 3e7 * np.abs(wide[:, 2])  # seconds since 1970
    near[:, 2:4] = 1.7e9 + wide[:, 2:4]
    whole = np.full((60, 3), 2**60) + np.arange(180).reshape(60, 3)
    same = np.full((60, 3), 0.1)

    def said(rows: Any) -> list[str]:
        caplog.clear()
        opened(rows)
        return [one.getMessage() for one in caplog.records if "float32 keeps" in one.getMessage()]

    for rows in (wide, years, ROWS, ROWS.astype(np.float16), (1000 * ROWS).astype(np.int64)):
        assert not said(rows)
    np.save("near.npy", near)
    write_parquet("whole.parquet", {"x": whole.tolist()})
    for one, columns in (
        (near, "2 of the 8 numbers of a row (the first is 2)"),
        ("near.npy", "2 of the 8 numbers of a row (the first is 2)"),
        (tiny, "8 of the 8 numbers of a row (the first is 0)"),
        ("whole.parquet", "3 of the 3 numbers of a row (the first is 0)"),
    ):
        (words,) = said(one)
        assert columns in words
        assert said(one) == [words]  # copied already
    assert not said(same)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (ROWS[0], r"shape \(8,\) .* embeddings are numbers \(n, d\)"),
        (ROWS.reshape(60, 2, 4), r"shape \(60, 2, 4\)"),
        (ROWS[:0], r"shape \(0, 8\)"),
        (ROWS.astype(complex), "complex"),
        (np.full((3, 2), np.nan), "every one of the 3 rows"),
        (np.ma.masked_less(ROWS, 0), "is masked"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(here: Path, x: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(x)
    assert list(here.iterdir()) == []


def test_a_file_in_which_the_rows_are_not_clear_is_refused(here: Path) -> None:
    np.savez("x.npz", a=ROWS, b=ROWS)
    with pytest.raises(DataError, match=r"has 2 arrays of rows \(n, d\), and one is taken"):
        opened("x.npz")
    np.save("x.npy", np.array([[1], "a"], object))
    with pytest.raises(DataError, match="Python objects"):
        opened("x.npy")
    with pytest.raises(DataError, match="has 0 columns of lists of numbers"):
        opened(write_parquet("x.parquet", {"a": [1.0]}))
    with pytest.raises(DataError, match="has 2 columns of lists of numbers"):
        opened(write_parquet("x.parquet", {"a": [[1.0]], "b": [[1.0]]}))
    with pytest.raises(DataError, match="none.npy is not there"):
        opened("none.npy")
    assert not (here / "outputs").exists()


KILLED = """
import os, sys
from embedx import ready_made, writing
append = writing.Writer.append
def once(self, *args, **kwargs):
    if self._written:
        os.kill(os.getpid(), 9)
    append(self, *args, **kwargs)
    self.commit()
writing.Writer.append = once
ready_made._BLOCK_BYTES = 700
ready_made.opened("x.npy")
"""


@pytest.mark.parametrize("when", ["_mark", "_copied", "_write"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    when: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed("x.npz", rows=ROWS, id=[f"a{i}" for i in range(len(ROWS))])
    np.savez_compressed("y.npz", rows=-ROWS, id=[f"b{i}" for i in range(len(ROWS))])
    plain, n_calls = getattr(ready_made, when), 0

    def after(*args: Any, **given: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        before = plain(*args, **given) if when == "_mark" else None
        if n_calls == 1:
            os.replace("y.npz", "x.npz")
        return before if when == "_mark" else plain(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(ready_made, when, after)
        with pytest.raises(DataError, match="changed while it was read"):
            opened("x.npz")
    assert not list(here.glob("outputs/*/embeddings.h5*"))
    run = opened("x.npz")
    assert run.ids[0] == "b0"
    assert np.array_equal(run.embeddings["rows"], -ROWS)


def test_an_array_that_changes_while_it_is_copied_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, plain = ROWS.copy(), ready_made._write

    def after(*args: Any, **given: Any) -> None:
        rows[3] += 1
        plain(*args, **given)

    monkeypatch.setattr(ready_made, "_write", after)
    with pytest.raises(DataError, match="changed while it was read"):
        opened(rows)


def test_a_copy_that_was_killed_goes_on_to_the_same_bytes(here: Path) -> None:
    np.save("x.npy", ROWS)
    expected = opened("x.npy").path
    content = expected.read_bytes()
    expected.unlink()
    killed = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert store.Embeddings(unfinished.partial_path(expected)).n_rows == 21
    assert opened("x.npy").path.read_bytes() == content


@pytest.mark.parametrize("name", ["x.npz", "x.parquet"])
def test_minus_one_among_labels_is_a_class_and_that_is_told(
    here: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    labels = np.arange(60) % 3 - 1  # as HDBSCAN gives them
    if name == "x.npz":
        np.savez(name, x=ROWS, labels=labels)
    else:
        write_parquet(name, {"x": ROWS.tolist(), "label": labels})
    assert opened(name).label_names == ["-1", "0", "1"]
    assert f"-1 among the labels of {name} is a class of that name" in caplog.messages


def test_of_several_labels_those_that_have_names_are_taken_and_it_is_told(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coarse, fine = np.arange(60) % 2, np.arange(60) % 3
    names = np.array(["cat", "dog", "bird"])
    np.savez("x.npz", x=ROWS, y=coarse, labels=fine, label_names=names)
    run = opened("x.npz")
    assert run.label_texts() == names[fine].tolist()
    np.testing.assert_array_equal(run.metadata["y"], coarse)
    assert "x.npz has y, labels: the labels are labels, and what is left is" in caplog.text
    write_parquet("y.parquet", {"x": ROWS.tolist(), "class": coarse, "label": fine})
    run = opened("y.parquet")
    assert run.label_texts() == [str(i) for i in coarse]
    np.testing.assert_array_equal(run.metadata["label"], fine)
    assert "y.parquet has class, label: the labels are class, and what is left" in caplog.text


def test_no_column_beside_the_rows_takes_the_place_of_another(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "embedx")
    age, years = np.arange(60), np.arange(60) * 10
    one, two = ([f"{word}{i}" for i in range(60)] for word in "ab")
    np.savez("x.npz", x=ROWS, **{"metadata/age": age, "age": years}, id=one, ids=two)
    run = opened("x.npz")
    np.testing.assert_array_equal(run.metadata["age"], age)
    np.testing.assert_array_equal(run.metadata["age_"], years)
    assert (run.ids, run.metadata["ids"]) == (one, two)
    assert "x.npz: age is the column age_, for another one has its name" in caplog.messages


@pytest.mark.parametrize("name", ["x.npz", "x.parquet"])
@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (["a", "a", *map(str, range(58))], "the id 'a' comes 2 times"),
        (["a", "", *map(str, range(58))], "the id of row 1 is empty"),
        ([str(i) for i in range(60)], ""),
    ],
)
def test_ids_that_do_not_tell_rows_apart_are_metadata_and_that_is_told(
    here: Path, name: str, ids: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "x.npz":
        np.savez(name, x=ROWS, ids=ids)
    else:
        write_parquet(name, {"x": ROWS.tolist(), "ids": ids})
    run = opened(name)
    assert run.ids == [str(i) for i in range(60)]
    told = f"{name}: rows have their numbers as ids, and ids is metadata: {why}"
    assert [one for one in caplog.messages if "as ids" in one] == ([told] if why else [])
    assert list(run.metadata) == (["ids"] if why else [])


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (
            np.arange(60) % 3 * 1.0,
            "labels of x.npz are not whole numbers from -1 to 2, and so have no",
        ),
        (np.arange(60) % 4, "labels of x.npz are not whole numbers from -1 to 2, and so have no"),
        (None, "x.npz has label_names and no labels that count through them"),
        (np.arange(60) % 3, ""),
        (np.array(["cat", "dog", ""])[np.arange(60) % 3], ""),
    ],
)
def test_names_of_labels_that_are_not_put_on_them_are_told(
    here: Path, labels: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["cat", "dog", "bird"]
    np.savez("x.npz", x=ROWS, label_names=names, **({} if labels is None else {"labels": labels}))
    opened("x.npz")
    assert ("label_names" in caplog.text) == bool(told)
    assert told in caplog.text


def test_labels_that_a_file_has_no_room_for_are_refused(here: Path) -> None:
    np.savez("x.npz", x=ROWS, labels=["x" * 1100 + "ab"[i % 2] for i in range(60)])
    with pytest.raises(DataError, match=r"a label in labels of x.npz, .* more than 1,024 bytes"):
        opened("x.npz")


def test_two_classes_of_one_name_are_two_and_that_is_told(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez("x.npz", x=ROWS, labels=np.arange(60) % 3, label_names=["crane", "hen", "crane"])
    assert opened("x.npz").label_names == ["crane (0)", "hen", "crane (2)"]
    assert "2 classes are called 'crane': named crane (0), crane (2) here" in caplog.messages
