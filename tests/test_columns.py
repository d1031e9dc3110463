"""Columns of tables: their types, names that come again, labels as indices."""

import datetime
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedx import columns


@pytest.mark.parametrize(
    ("texts", "kind", "values"),
    [
        (["1", "-2", "30"], "i", [1, -2, 30]),
        (["1", "", "3"], "f", [1, np.nan, 3]),
        (["1.5", "2", ""], "f", [1.5, 2, np.nan]),
        (["true", "False"], "b", [True, False]),
        (["true", ""], "", ["true", ""]),
        (["007", "8"], "", ["007", "8"]),
        (["9007199254740993", ""], "", ["9007199254740993", ""]),
        (["a", "1"], "", ["a", "1"]),
        (["1.1", "1.10"], "", ["1.1", "1.10"]),  # versions
        (["1e5", "100000"], "", ["1e5", "100000"]),  # hashes
        (["7e10", "70e9"], "", ["7e10", "70e9"]),
        (["1e-400", "1"], "", ["1e-400", "1"]),
        (["1.2345678e-320", "1"], "", ["1.2345678e-320", "1"]),
        (["0", "0.0", "2.", "2.00"], "f", [0, 0, 2, 2]),
        (["0e9", "1.5", "1.5"], "f", [0, 1.5, 1.5]),
        (["nan", "NaN", "inf", "Infinity"], "f", [np.nan, np.nan, np.inf, np.inf]),
        (["", ""], "", ["", ""]),
        (["e0", "e1"], "", ["e0", "e1"]),
        ([".5", "-.5e1", "2.e-1"], "f", [0.5, -5, 0.2]),
    ],
)
def test_cells_become_the_narrowest_type_that_says_the_same(
    texts: list[str], kind: str, values: Sequence[object]
) -> None:
    column = columns.from_texts(texts)
    assert (column.dtype.kind if isinstance(column, np.ndarray) else "") == kind
    np.testing.assert_array_equal(column, values)


def test_what_counts_as_a_number_is_one() -> None:
    n_numbers = 0
    for length in range(1, 6):
        for parts in itertools.product("10.eE-+", repeat=length):
            text = "".join(parts)
            column = columns.from_texts([text, "0.5"])
            if isinstance(column, np.ndarray):
                n_numbers += 1
                assert column.tolist() == [float(text), 0.5]
    assert n_numbers > 500


def test_minus_zero_is_not_zero() -> None:
    assert list(map(str, np.asarray(columns.from_texts(["-0", "0", "5"])).tolist())) == [
        *("-0.0", "0.0", "5.0")
    ]


@given(st.lists(st.sampled_from(["a", "b", "a#2", "a#3", "b#2", ""]), max_size=12))
def test_names_that_come_again_become_unique_and_a_first_one_stays(names: list[str]) -> None:
    unique, n_again = columns.unique_names(names)
    assert len(set(unique)) == len(names)
    assert n_again == len(names) - len(set(names))
    for i, (name, made) in enumerate(zip(names, unique, strict=True)):
        assert made == name if name not in names[:i] else made.startswith(f"{name}#")


JSON_VALUES = [None, 3, 3.0, 0.5, -0.0, 1e16, 2**60, 2**70, float("nan"), True, "3.0", "a", ""]


@given(
    st.lists(st.lists(st.sampled_from(JSON_VALUES), min_size=1), min_size=1, max_size=4),
)
def test_a_value_reads_the_same_however_samples_are_cut_into_shards(parts: list[list[Any]]) -> None:
    whole = columns.from_values([value for part in parts for value in part])
    made = [
        None if all(value is None for value in part) else columns.from_values(part)
        for part in parts
    ]
    joined = columns.concatenated([(len(p), c) for p, c in zip(parts, made, strict=True)])
    if isinstance(whole, list):
        assert joined == whole
    elif whole is not None:
        np.testing.assert_array_equal(joined, whole)


def test_labels_are_counted_through_as_numbers_where_all_are_and_else_as_texts() -> None:
    indices, names = columns.indexed(["10", "9", "", "10"])
    assert (names, indices.tolist()) == (["9", "10"], [1, 0, -1, 1])
    indices, names = columns.indexed(["10", "9", "x"])
    assert (names, indices.tolist()) == (["10", "9", "x"], [0, 1, 2])


def test_texts_of_an_arrow_dictionary_are_those_of_the_plain_column() -> None:
    texts = ["a", None, "b", "a", ""]
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        plain = pa.chunked_array([pa.array(texts[:3], kind), pa.array(texts[3:], kind)])
        assert columns.from_arrow(plain) == ["a", "", "b", "a", ""]
    one = pa.array(texts[:3]).dictionary_encode()
    other = pa.array(["c", *texts[3:]]).dictionary_encode()
    assert columns.from_arrow(pa.chunked_array([one, other])) == ["a", "", "b", "c", "a", ""]


def test_a_date_of_arrow_is_iso_8601() -> None:
    when = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    (text,) = columns.from_arrow(pa.array([when]))  # type: ignore[misc]
    assert datetime.datetime.fromisoformat(text) == when


def test_a_text_that_is_cut_fits_and_is_counted_each_time() -> None:
    kept, n_cut = columns.shortened(["ä" * 600, "b\0c", "ä" * 600, "x" * 1024])
    assert n_cut == 2
    assert kept[1:2] == ["b c"]
    assert kept[0] == kept[2] == "ä" * 510 + "…"
    assert [len(text.encode()) <= 1024 for text in kept] == [True] * 4


def test_a_name_that_a_file_cannot_keep_is_shortened_or_spelled() -> None:
    assert columns.storable("a b/ü") == "a b/ü"
    assert columns.storable("a\0b") == "a\\x00b"
    assert len(columns.storable("ü" * 2000).encode()) <= 1024


def test_texts_that_would_be_one_number_are_no_numbers() -> None:
    assert columns.whole_numbers(["0", "2", "10"]) == [0, 2, 10]
    assert columns.whole_numbers(["01", "02"]) == [1, 2]
    assert columns.whole_numbers(["001", "01", "1", "10"]) is None
    assert columns.whole_numbers(["-0", "0"]) is None
    assert columns.indexed(["1", "10", "01", "2"])[1] == ["01", "1", "2", "10"]


@given(st.lists(st.sampled_from(["a", "b", "a (0)", "", "(1)"]), max_size=6))
def test_classes_are_told_apart_and_those_whose_name_is_their_own_keep_it(names: list[str]) -> None:
    apart, told = columns.told_apart(names)
    assert len(set(apart)) == len(names)
    assert "" not in apart
    for name, made in zip(names, apart, strict=True):
        assert name == made or names.count(name) > 1 or not name
    assert bool(told) == (apart != names)


def test_a_class_whose_name_comes_twice_gets_its_number() -> None:
    apart, told = columns.told_apart(["crane", "hen", "crane"], [134, 8, 517])
    assert apart == ["crane (134)", "hen", "crane (517)"]
    assert told == ["2 classes are called 'crane': named crane (134), crane (517) here"]
