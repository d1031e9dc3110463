"""What capture points give in a pass, as rows of a file: pooled, in arrays, with their facts."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from embedx import hooks, pooling, store
from embedx.errors import ShapeError
from embedx.store import Array

log = logging.getLogger("embedx")


class Rows:
    """Reduces activations inside the hook, and turns what was captured into arrays.

    Args:
        points: The capture points.
        poolings: One for each.
        dtype: Of the arrays.
        normalize: Whether rows are scaled to length 1 (L2); a row of zeros stays zero.
        tokens: The pooling that ``auto`` means for tokens.

    Attributes:
        mask: Shape ``(n, t)``, which tokens of the pass at hand are none of padding; None where
            all are.
    """

    def __init__(
        self,
        points: Sequence[hooks.Point],
        poolings: Sequence[pooling.Pooling],
        *,
        dtype: np.dtype[Any],
        normalize: bool,
        tokens: str | None = None,
    ) -> None:
        self.mask: Tensor | None = None
        self._points = list(points)
        self._poolings = dict(zip((p.name for p in points), poolings, strict=True))
        self._dtype = dtype
        self._normalize = normalize
        self._tokens = tokens
        self._shapes: dict[str, tuple[int, ...]] = {}

    def reduce(self, point: hooks.Point, activation: Tensor) -> Tensor:
        """Pool an activation ``(n, ...)``, for :class:`~embedx.hooks.Capture`.

        Raises:
            ShapeError: The pooling does not take its shape.
        """
        if point.name not in self._shapes:
            self._settle(point, activation)
        chosen = self._poolings[point.name]
        assert chosen.function is not None
        with_mask = {"mask": self.mask} if self.mask is not None and chosen.takes_mask else {}
        try:
            return chosen.function(activation, **with_mask)
        except ShapeError as error:
            raise ShapeError(f"layer {point.name}: {error}") from None

    def _settle(self, point: hooks.Point, activation: Tensor) -> None:
        if self._poolings[point.name].name == "auto":
            try:
                name = pooling.choose(
                    activation, tokens=self._tokens, is_masked=self.mask is not None
                )
            except ShapeError as error:
                raise ShapeError(f"layer {point.name}: {error}") from None
            (self._poolings[point.name],) = pooling.per_point(name, n_points=1)
            shape = ", ".join(map(str, activation.shape[1:]))
            log.info("pooling of %s: %s, from (n, %s)", point.name, name, shape)
        self._shapes[point.name] = tuple(activation.shape[1:])

    @property
    def other_sizes(self) -> set[int]:
        """Sizes of the axes of the activations, less the first."""
        return {size for shape in self._shapes.values() for size in shape}

    def arrays(
        self, got: Mapping[str, Tensor], *, n: int
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """What was captured in the latest pass.

        Args:
            got: A tensor ``(n, d)`` for each point.
            n: How many samples went in.

        Returns:
            An array ``(n, d)`` for each point, by the name of its dataset, and the attributes of
            the dataset.

        Raises:
            LayerError: A point did not fire, or its layer ran twice.
            ShapeError: A tensor is of another shape, complex, or of too large whole numbers.
        """
        arrays: dict[str, Array] = {}
        attrs: dict[str, dict[str, Any]] = {}
        for point in self._points:
            rows = got[point.name]
            if rows.is_complex():
                raise ShapeError(f"layer {point.name} gives complex numbers")
            if rows.ndim != 2 or len(rows) != n:
                raise ShapeError(
                    f"layer {point.name} gives {tuple(rows.shape)} for {n} samples after pooling; "
                    "choose a layer with one entry a sample"
                )
            if not rows.shape[1]:
                raise ShapeError(f"layer {point.name} gives rows of no numbers; choose another")
            if not rows.is_floating_point() and (rows.float().to(rows.dtype) != rows).any():
                raise ShapeError(
                    f"layer {point.name} gives whole numbers above 2**24, which float32 does not "
                    "hold; choose another layer"
                )
            values = rows.float().cpu().numpy()
            if self._normalize:
                values = _of_length_one(values)
            field = store.embeddings_field(
                point.name, n_features=rows.shape[1], dtype=self._dtype, attrs={}
            )
            with np.errstate(over="ignore"):  # overflow makes the row a failed one
                arrays[field.name] = values.astype(self._dtype, copy=False)
            attrs[field.name] = {
                "layer": point.layer,
                "what": point.what,
                "pooling": self._poolings[point.name].name,
                "normalized": self._normalize,
                "activation_shape": list(self._shapes[point.name]),
            }
        return arrays, attrs


def _of_length_one(rows: Array) -> Array:
    """Rows over their lengths, which in float32 would overflow or vanish when squared."""
    wide = rows.astype(np.float64)
    lengths = np.sqrt(np.square(wide).sum(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):  # Inf over Inf makes the row a failed one
        wide /= np.where(lengths == 0, 1, lengths)
    return wide.astype(np.float32)


def not_finite(arrays: Mapping[str, Array]) -> dict[int, str]:
    """Rows that hold NaN or Inf, with where: they are failed rows of a file."""
    found: dict[int, str] = {}
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            for i in np.flatnonzero(~np.isfinite(array).all(axis=1)).tolist():
                found[i] = f"NaN or Inf in {name.split('/')[-1]}"
    return found
