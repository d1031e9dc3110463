"""Rows that may be larger than memory, and samples of them."""

from collections.abc import Iterator
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
        self._chosen = chosen
        self._mean = mean
        self._axes = axes
        n = len(matrix) if chosen is None else len(chosen)
        self.shape = (n, matrix.shape[1] if axes is None else len(axes))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice | Array) -> Array:
        """Some of the rows, shape ``(k, d)`` float32."""
        at = which if self._chosen is None else self._chosen[which]
        rows: Array = np.asarray(self._matrix[at], dtype=np.float32)
        if self._axes is None or self._mean is None:
            return rows
        # In float64, whose rounding hardly ever shows in float32: a product of other rows beside
        # these is rounded otherwise.
        along = (rows.astype(np.float64) - self._mean) @ self._axes.T
        largest = np.finfo(np.float32).max  # a huge row stays huge, and finite
        return np.clip(along, -largest, largest).astype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        values = np.empty(self.shape, np.float32)
        for block in self.blocks():
            values[block] = self[block]
        return values if dtype is None else values.astype(dtype)

    def blocks(self) -> Iterator[slice]:
        """Slices that go through all rows, 8,192 at a time and at most 128 MiB as float32."""
        widest = max(self._matrix.shape[1], self.shape[1], 1)
        yield from _slices(len(self), min(BLOCK_ROWS, _BLOCK_BYTES // (4 * widest)))

    def columns(self, columns: slice) -> Array:
        """Some of the columns, shape ``(n, c)`` float32."""
        at = slice(None) if self._chosen is None else self._chosen
        if self._axes is None or self._mean is None:
            return np.asarray(self._matrix[:, columns][at], dtype=np.float32)
        return np.asarray(self.along(mean=self._mean, axes=self._axes[columns]), np.float32)

    def column_blocks(self) -> Iterator[slice]:
        """Slices that go through all columns, at most 128 MiB as float32 at a time."""
        yield from _slices(self.shape[1], _BLOCK_BYTES // (4 * max(len(self._matrix), 1)))

    def among(self, chosen: Array) -> "Matrix":
        """Those of the rows with these indices, not read yet."""
        inner = chosen if self._chosen is None else self._chosen[chosen]
        return Matrix(self._matrix, inner, mean=self._mean, axes=self._axes)

    def along(self, *, mean: Array, axes: Array) -> "Matrix":
        """The same rows in the coordinates of ``axes``, not read yet."""
        return Matrix(self._matrix, self._chosen, mean=mean, axes=axes)


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
