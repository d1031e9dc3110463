"""Rows that may be larger than memory, and samples of them."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK_ROWS = 8192
_BLOCK_BYTES = 2**27


class Matrix:
    """Rows of a matrix that may be larger than memory: read where and when they are asked for.

    Args:
        matrix: Shape ``(N, D)``, such as a memory map.
        chosen: The n rows of it that count, as indices; all where not given.
        mean: Shape ``(D,)``; with ``axes``, taken from each row before it is projected.
        axes: Shape ``(d, D)``: the rows are given in these coordinates.

    Attributes:
        shape: ``(n, d)``.
        chosen: As it was given, and so ``mean`` and ``axes``.
    """

    def __init__(
        self,
        matrix: Array,
        chosen: Array | None = None,
        *,
        mean: Array | None = None,
        axes: Array | None = None,
    ) -> None:
        self._matrix = matrix
        self.chosen = chosen
        self.mean = mean
        self.axes = axes
        n = len(matrix) if chosen is None else len(chosen)
        self.shape = (n, matrix.shape[1] if axes is None else len(axes))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice | Array) -> Array:
        """Some of the rows, shape ``(k, d)`` float32."""
        at = which if self.chosen is None else self.chosen[which]
        rows: Array = np.asarray(self._matrix[at], dtype=np.float32)
        if self.axes is None or self.mean is None:
            return rows
        # In float64, whose rounding hardly ever shows in float32: a product of other rows beside
        # these is rounded otherwise.
        along = (rows.astype(np.float64) - self.mean) @ self.axes.T
        largest = np.finfo(np.float32).max  # a huge row stays huge, and finite
        return np.clip(along, -largest, largest).astype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        values = np.empty(self.shape, np.float32)
        for block in self.blocks():
            values[block] = self[block]
        return values if dtype is None else values.astype(dtype)

    @property
    def block_rows(self) -> int:
        """How many rows are read at once: 8,192, and at most 128 MiB as float32."""
        widest = max(int(self._matrix.shape[1]), self.shape[1], 1)
        return max(1, min(BLOCK_ROWS, _BLOCK_BYTES // (4 * widest)))

    def blocks(self) -> Iterator[slice]:
        """Slices that go through all rows, each of ``block_rows``."""
        yield from _slices(len(self), self.block_rows)

    def left_out(self) -> Array:
        """Which rows of the whole matrix are not among these, which must be in order: indices."""
        is_left_out = np.ones(len(self._matrix), bool)
        is_left_out[slice(None) if self.chosen is None else self.chosen] = False
        return np.flatnonzero(is_left_out)

    def columns(self, columns: slice) -> Array:
        """Some of the columns, shape ``(n, c)`` float32."""
        at = slice(None) if self.chosen is None else self.chosen
        if self.axes is None or self.mean is None:
            return np.asarray(self._matrix[:, columns][at], dtype=np.float32)
        return np.asarray(self.along(mean=self.mean, axes=self.axes[columns]), np.float32)

    def column_blocks(self) -> Iterator[slice]:
        """Slices that go through all columns, at most 128 MiB as float32 at a time."""
        yield from _slices(self.shape[1], _BLOCK_BYTES // (4 * max(len(self._matrix), 1)))

    def among(self, chosen: Array) -> "Matrix":
        """Those of the rows with these indices, not read yet."""
        inner = chosen if self.chosen is None else self.chosen[chosen]
        return Matrix(self._matrix, inner, mean=self.mean, axes=self.axes)

    def along(self, *, mean: Array, axes: Array) -> "Matrix":
        """The same rows in the coordinates of ``axes``, not read yet."""
        return Matrix(self._matrix, self.chosen, mean=mean, axes=axes)


def among_the_rest(left_out: Array, which: range) -> Array:
    """Indices of some of the rows that are left when others are taken out of a matrix.

    Args:
        left_out: The indices of those, in order.
        which: Numbers among the rows that are left.
    """
    numbers = np.arange(which.start, which.stop)
    n_before = left_out - np.arange(len(left_out))  # rows that are left before each of them
    return numbers + np.searchsorted(n_before, numbers, side="right")


class Stacked:
    """Arrays one below the other as one array, of which rows are read when they are asked for.

    It is indexed as an array is, and gives arrays; ``numpy.asarray`` reads all of it.

    Args:
        pieces: Each opens an array ``(n_i, ...)``, such as a memory map. Called when rows of it are
            wanted, so that not all of many files are open at once.
        sizes: n_i of each.
        shape: Of one row.
        dtype: Of all.
    """

    def __init__(
        self,
        pieces: Sequence[Callable[[], Array]],
        sizes: Sequence[int],
        *,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._pieces = pieces
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        self._opened: tuple[int, Array] | None = None  # the last one: rows are asked for in order
        self.shape = (int(self._starts[-1]), *shape)
        self.dtype = dtype
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<Stacked {self.shape} {self.dtype} of {len(self._pieces)} arrays>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"rows that are read where they are asked for have no {name!r}; take some of them, "
            f"rows[:1000].{name}, or all of them into memory: numpy.asarray(rows).{name}"
        )

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self._pieces)):
            yield from self._piece(number)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self[:], dtype, copy=copy)

    def __getitem__(self, which: Any) -> Any:
        which = which if isinstance(which, tuple) else (which,)
        rows, rest = (which[0], which[1:]) if which else (slice(None), ())
        if rows is Ellipsis:
            if sum(one is not None for one in rest) == self.ndim:  # it stands for nothing
                return self[rest]
            rows, rest = slice(None), which
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._between(start, max(start, stop), rest)
            rows = np.arange(start, stop, step)
            return self._at(rows)[(slice(None), *rest)]
        if rows is None:
            return self[slice(None)][which]
        rows = np.asarray(rows)
        if rows.dtype.kind == "b":
            if rows.shape != self.shape[:1]:  # of numbers, or of no length that fits
                return self[slice(None)][which]
            rows = np.flatnonzero(rows)
        elif rows.size == 0:
            rows = rows.astype(np.intp)
        if rows.dtype.kind not in "iu":
            raise IndexError(f"rows are chosen by whole numbers or booleans, not {rows.dtype}")
        at = np.where(rows < 0, rows + len(self), rows)
        if ((at < 0) | (at >= len(self))).any():
            raise IndexError(f"there is no such row among {len(self):,}")
        if at.ndim == 0:
            number = self._number_of(int(at))
            return self._piece(number)[(int(at) - self._starts[number], *rest)]
        values = self._at(at.reshape(-1))
        if at.ndim == 1 and not rest:
            return values
        # Arrays among the others go along with that of the rows, element by element.
        return values[(np.arange(at.size).reshape(at.shape), *rest)]

    def _number_of(self, row: int) -> int:
        return bisect.bisect_right(self._starts, row) - 1

    def _piece(self, number: int) -> Array:
        opened = self._opened  # another thread may put another one there meanwhile
        if opened is None or opened[0] != number:
            self._opened = opened = number, self._pieces[number]()
        return opened[1]

    def _between(self, start: int, stop: int, rest: tuple[Any, ...]) -> Array:
        """Rows that follow on each other; of one array alone no copy is made."""
        blocks = []
        number = self._number_of(start) if start < stop else len(self._pieces)
        while number < len(self._pieces) and self._starts[number] < stop:
            before, after = self._starts[number : number + 2]
            if before < after:
                rows = slice(max(start, before) - before, min(stop, after) - before)
                blocks.append(self._piece(number)[(rows, *rest)])
            number += 1
        if not blocks:
            return np.empty((0, *self.shape[1:]), self.dtype)[(slice(None), *rest)]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def _at(self, rows: Array) -> Array:
        """Rows by their numbers, shape ``(k, ...)``."""
        values = np.empty((len(rows), *self.shape[1:]), self.dtype)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            values[here] = self._piece(number)[rows[here] - self._starts[number]]
        return values


def stratified(n: int, most: int, labels: Array | None, *, seed: int) -> Array:
    """A sample of n rows that has of each label its share, and at least one row.

    Args:
        n: How many rows there are.
        most: How many to take; all rows where there are no more.
        labels: Shape ``(n,)``; None for one label.
        seed: Of the sample.

    Returns:
        Indices, sorted. Of more labels than ``most`` some have no row.
    """
    if n <= most:
        return np.arange(n)
    rng = np.random.default_rng(seed)
    order = rng.permutation(n)
    labels = np.zeros(n, int) if labels is None else labels
    order = order[np.argsort(labels[order], kind="stable")]
    _, first, size = np.unique(labels[order], return_index=True, return_counts=True)
    # The first of each label comes before the second of any: 0/size, 1/size, 2/size, ...
    share = (np.arange(n) - np.repeat(first, size)) / np.repeat(size, size)
    chosen: Array = order[np.lexsort((rng.random(n), share))[:most]]
    return np.sort(chosen)


def _slices(n: int, step: int) -> Iterator[slice]:
    for start in range(0, n, max(step, 1)):
        yield slice(start, min(start + max(step, 1), n))
