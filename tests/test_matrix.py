"""Rows that may be larger than memory."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from embedx.matrix import Matrix, Stacked

Array = np.ndarray[Any, Any]


def stacked(values: Array, cuts: list[int]) -> Stacked:
    parts = np.split(values, sorted(cuts))
    return Stacked(
        [lambda part=part: part for part in parts],  # type: ignore[misc]
        [len(part) for part in parts],
        shape=values.shape[1:],
        dtype=values.dtype,
    )


SHAPE = (11, 4, 3)
VALUES = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)
CUTS = st.lists(st.integers(0, SHAPE[0]), max_size=5)


@drawn(cuts=CUTS, which=arrays.basic_indices(SHAPE, allow_newaxis=True, allow_ellipsis=True))
@settings(max_examples=400, deadline=None)
def test_stacked_arrays_are_indexed_as_one_by_slices(cuts: list[int], which: Any) -> None:
    got = stacked(VALUES, cuts)[which]
    np.testing.assert_array_equal(got, VALUES[which])
    assert np.shape(got) == VALUES[which].shape
    assert got.dtype == VALUES.dtype


@drawn(
    cuts=CUTS,
    which=st.one_of(
        arrays.integer_array_indices(SHAPE, result_shape=arrays.array_shapes(max_dims=2)),
        arrays.integer_array_indices(SHAPE[:1], result_shape=arrays.array_shapes(min_side=0)),
        arrays.integer_array_indices(SHAPE[:2]),
        arrays.arrays(bool, SHAPE[0]),
        arrays.arrays(bool, SHAPE),
        st.lists(st.integers(-SHAPE[0], SHAPE[0] - 1)),
        st.tuples(arrays.arrays(bool, SHAPE[0]), st.slices(SHAPE[1]), st.integers(0, 2)),
        st.tuples(st.slices(SHAPE[0]), arrays.arrays(bool, SHAPE[1])),
        st.tuples(st.integers(0, 10), st.lists(st.integers(0, 3), min_size=1)),
    ),
)
@settings(max_examples=400, deadline=None)
def test_stacked_arrays_are_indexed_as_one_by_arrays(cuts: list[int], which: Any) -> None:
    got = stacked(VALUES, cuts)[which]
    np.testing.assert_array_equal(got, VALUES[which])
    assert np.shape(got) == VALUES[which].shape


def test_stacked_arrays_are_one_array_to_numpy() -> None:
    rows = stacked(VALUES, [2, 2, 7])
    assert (rows.shape, rows.ndim, rows.size, rows.nbytes) == (SHAPE, 3, 132, 528)
    np.testing.assert_array_equal(np.asarray(rows), VALUES)
    np.testing.assert_array_equal(np.array(rows, np.float64), VALUES.astype(np.float64))
    np.testing.assert_array_equal(np.stack(list(rows)), VALUES)
    np.testing.assert_array_equal(np.isfinite(rows), np.isfinite(VALUES))
    assert (rows == VALUES).all()
    whole = np.array(stacked(VALUES, []))  # of one array alone, too, it is a copy
    whole[:] = 0
    assert VALUES.any()
    flat = stacked(VALUES.reshape(11, 12), [4])
    np.testing.assert_array_equal(Matrix(flat, np.array([9, 3]))[0:2], flat[[9, 3]])  # type: ignore[arg-type]


class Shared(Stacked):
    """Another thread reads its first array again and again."""

    @property
    def _opened(self) -> tuple[int, Array]:
        return 0, self._pieces[0]()

    @_opened.setter
    def _opened(self, _: Any) -> None:
        pass


def test_stacked_arrays_are_read_by_several_threads_at_once() -> None:
    rows = Shared(
        [lambda: VALUES[:4], lambda: VALUES[4:]], [4, 7], shape=(4, 3), dtype=VALUES.dtype
    )
    for row in (1, 5, 2, 9):
        np.testing.assert_array_equal(rows[row], VALUES[row])


def test_what_stacked_arrays_do_not_have_is_refused_in_one_line() -> None:
    rows = stacked(VALUES, [4])
    for which in (11, -12, [3, 11]):
        with pytest.raises(IndexError, match="there is no such row among 11"):
            rows[which]
    with pytest.raises(IndexError, match="chosen by whole numbers or booleans, not float64"):
        rows[[0.5]]
    with pytest.raises(AttributeError, match=r"'mean'; take some .*numpy\.asarray\(rows\)\.mean"):
        rows.mean(0)
    with pytest.raises(IndexError):
        rows[np.ones(10, bool)]
