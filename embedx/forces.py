"""The forces of t-SNE in two dimensions: attraction along the neighbour graph, repulsion on a grid.

Every point of a t-SNE map repels every other. Both the repulsion and its normalization are
convolutions of the points with smooth kernels, so that a grid can carry them: the points are spread
over the nodes about them, the grid is convolved, and the result is read at the points. openTSNE has
such a grid, and takes any function of the gradient in its place; this one takes a third of its time
or less (``benchmarks/project.py tsne``):

- one grid of ones is transformed, where theirs carries four charges: the repulsion of a point is a
  convolution with the gradient of the kernel;
- cubic B-splines spread and read, corrected for their own blur in the transform, as for long-range
  forces of molecules (smooth particle mesh Ewald: Essmann et al. 1995, J. Chem. Phys. 103:8577).
  At half a unit between nodes that is nearer to the sum over all pairs than quadratic polynomials
  at a third (Linderman et al. 2019, Nature Methods 16:243);
- single precision, whose 1e-6 is far below what the grid leaves out.

The attraction is summed over the edges of the graph. In single precision that takes less than
half of the time of openTSNE's: what it costs is to read the positions of the neighbours.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from embedx.matrix import Array

# Between nodes, in units of the map, where the kernel 1 / (1 + d^2) falls to a half in 1.
SPACING = 0.5
# Of a small map's longer side: nodes closer than SPACING, for what there is to see is smaller too.
LEAST_NODES = 64
# More would take 0.5 GB and longer than a tree.
NODES_MOST = 2048**2
# How many cells about the points are left for the reach of a spline.
MARGIN = 3


def repulsion(
    points: Array, *, fixed: Array | None = None, n_jobs: int = 1
) -> tuple[Array, float] | None:
    """How the points of a map repel each other, normalized: the negative part of the gradient.

    Args:
        points: Shape ``(n, 2)``, float64.
        fixed: A map that stays as it is, shape ``(r, 2)``, and alone repels; a point is then
            normalized by itself, as where it is placed among them.
        n_jobs: Threads.

    Returns:
        For each point i the sum over j of ``q_ij^2 (y_i - y_j)`` with ``q = 1 / (1 + d^2)``, over
        the sum of all ``q`` (with ``fixed`` of those of i), shape ``(n, 2)``; and the sum of all
        ``q``. None where the points lie too far apart for a grid.
    """
    if fixed is None:
        grid = _Grid.about(points)
        if grid.is_too_large:
            return None
        stencil = grid.stencil(points)
        read = stencil @ _field(grid, stencil, n_jobs)
        # Each point has met itself, at the distance 0.
        total = float(read[:, 0].sum(dtype=np.float64)) - len(points)
        return read[:, 1:] / total, total
    grid, field = _fixed_field(np.ascontiguousarray(fixed, np.float64).tobytes(), n_jobs)
    if field is None:
        return None
    read = grid.stencil(points) @ field
    return read[:, 1:] / read[:, :1], float(read[:, 0].sum(dtype=np.float64))


def attraction(affinities: Any, points: Array, *, n_jobs: int = 1) -> Array:
    """How the neighbours of each point of a map attract it: the positive part of the gradient.

    The first call compiles for half a second.

    Args:
        affinities: Sparse rows ``(n, n)``, the probabilities ``p``.
        points: Shape ``(n, 2)``.
        n_jobs: Threads.

    Returns:
        For each point i the sum over j of ``p_ij q_ij (y_i - y_j)`` with ``q = 1 / (1 + d^2)``,
        shape ``(n, 2)``.
    """
    n = len(points)
    at = points.astype(np.float32)
    made = np.empty((n, 2))
    # Parts of as many edges; what is summed of a row does not hang on how many there are.
    ends = np.searchsorted(affinities.indptr, np.linspace(0, affinities.nnz, n_jobs + 1)[1:-1])
    bounds = [0, *ends.tolist(), n]
    attract = _compiled_attraction()

    def run(part: tuple[int, int]) -> None:
        attract(affinities.indices, affinities.indptr, affinities.data, at, made, *part)

    with concurrent.futures.ThreadPoolExecutor(n_jobs) as threads:
        list(threads.map(run, itertools.pairwise(bounds)))
    return made


@functools.cache
def _compiled_attraction() -> Any:
    import numba

    one = np.float32(1)

    @numba.njit(nogil=True, fastmath=True)
    def attract(
        neighbors: Array, begins: Array, p: Array, y: Array, made: Array, first: int, end: int
    ) -> None:
        for i in range(first, end):
            along = across = np.float32(0)
            for edge in range(begins[i], begins[i + 1]):
                j = neighbors[edge]
                dx, dy = y[i, 0] - y[j, 0], y[i, 1] - y[j, 1]
                pull = np.float32(p[edge]) / (one + dx * dx + dy * dy)
                along += pull * dx
                across += pull * dy
            made[i, 0], made[i, 1] = along, across

    return attract


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Nodes about the points of a map.

    Attributes:
        low: Where the first node is, shape ``(2,)``.
        spacing: Between nodes.
        shape: Nodes along each axis.
    """

    low: Array
    spacing: float
    shape: tuple[int, int]

    @property
    def is_too_large(self) -> bool:
        return self.shape[0] * self.shape[1] > NODES_MOST

    @classmethod
    def about(cls, points: Array, *, room: float = 0.0) -> "_Grid":
        """A grid that holds points ``(n, 2)`` with ``room`` on each side, a share of theirs."""
        low, high = (np.array([f(side) for side in points.T]) for f in (np.min, np.max))
        low, high = low - room * (high - low), high + room * (high - low)
        longer = float((high - low).max())
        from scipy.fft import next_fast_len

        # Spacings by powers of two, and sizes in steps: a kernel then serves many iterations.
        halvings = np.ceil(np.log2(SPACING * LEAST_NODES / longer)) if longer > 0 else 0
        spacing = SPACING / 2 ** min(max(0, int(halvings)), 40)
        rows, columns = (
            next_fast_len(-(-(int(side / spacing) + 2 * MARGIN + 1) // 16) * 16)
            for side in high - low
        )
        return cls(low - MARGIN * spacing, spacing, (rows, columns))

    def stencil(self, points: Array) -> Any:
        """The weights of the 16 nodes about each point, sparse ``(n, nodes)``.

        A point outside counts as one at the edge.
        """
        import scipy.sparse

        n = len(points)
        scaled = (points.T - self.low[:, None]) / self.spacing
        scaled = np.clip(scaled, 1, np.asarray(self.shape)[:, None] - 3)
        cell = scaled.astype(np.int32)
        t = (scaled - cell).astype(np.float32)
        s = 1 - t
        t2, s2 = t * t, s * s
        t3, s3 = t2 * t, s2 * s  # ten times as fast as a power
        # The four pieces of the cubic B-spline, of the nodes -1, 0, 1 and 2 of the cell.
        x, y = np.stack([s3, 4 - 6 * t2 + 3 * t3, 4 - 6 * s2 + 3 * s3, t3], axis=2)
        weights = np.einsum("ij,ik->ijk", x / 36, y)
        around = np.add.outer(np.arange(-1, 3) * self.shape[1], np.arange(-1, 3)).ravel()
        nodes = (cell[0] * self.shape[1] + cell[1])[:, None] + around.astype(np.int32)
        return scipy.sparse.csr_matrix(
            (weights.ravel(), nodes.ravel(), np.arange(0, 16 * n + 1, 16, dtype=np.int32)),
            shape=(n, self.shape[0] * self.shape[1]),
            copy=False,
        )


@functools.lru_cache(maxsize=1)
def _fixed_field(points: bytes, n_jobs: int) -> tuple[_Grid, Array | None]:
    """The field of a map that does not move: the same in each step of placing rows in it."""
    fixed = np.frombuffer(points).reshape(-1, 2)
    grid = _Grid.about(fixed, room=0.25)
    if grid.is_too_large:
        return grid, None
    return grid, _field(grid, grid.stencil(fixed), n_jobs)


def _field(grid: _Grid, stencil: Any, n_jobs: int) -> Array:
    """What points do to one anywhere among them, shape ``(nodes, 3)`` of splines' coefficients.

    The sum of ``q = 1 / (1 + d^2)`` over all points, and of ``q^2`` times the way from them along
    each axis. The transforms are over a grid twice as wide, so that no point meets the image of
    another; the half that holds nothing, or that nobody reads, is not transformed.
    """
    import scipy.fft

    rows, columns = grid.shape
    ones = (stencil.T @ np.ones(stencil.shape[0], np.float32)).reshape(rows, columns)
    along = scipy.fft.rfft(ones, 2 * columns, axis=1, workers=n_jobs)
    both = scipy.fft.fft(along, 2 * rows, axis=0, workers=n_jobs, overwrite_x=True)
    field = both * _kernels(2 * rows, 2 * columns, grid.spacing)
    field = scipy.fft.ifft(field, axis=1, workers=n_jobs, overwrite_x=True)[:, :rows]
    field = scipy.fft.irfft(field, 2 * columns, axis=2, workers=n_jobs, overwrite_x=True)
    return np.ascontiguousarray(np.moveaxis(field[:, :, :columns], 0, 2)).reshape(-1, 3)


@functools.lru_cache(maxsize=4)
def _kernels(rows: int, columns: int, spacing: float) -> Array:
    """Transforms of the three kernels, shape ``(3, rows, columns // 2 + 1)``, splines corrected."""
    import scipy.fft

    x = np.fft.fftfreq(rows, 1 / rows)[:, None] * spacing
    y = np.fft.fftfreq(columns, 1 / columns)[None, :] * spacing
    q = 1 / (1 + x**2 + y**2)
    made = scipy.fft.rfft2(np.stack([q, x * q**2, y * q**2]), axes=(1, 2))
    for frequencies in (np.fft.fftfreq(rows)[:, None], np.fft.rfftfreq(columns)):
        blur = (2 + np.cos(2 * np.pi * frequencies)) / 3  # of a cubic spline's 1/6, 4/6, 1/6
        made /= blur**2  # once for spreading, once for reading
    return np.asarray(made.astype(np.complex64))
