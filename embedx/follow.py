"""An extraction while it runs, in a terminal: rows, failed rows, rate, a map that fills up."""

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from embedx import unfinished
from embedx.align import procrustes
from embedx.disk import require_idle
from embedx.errors import InUseError, StoreError
from embedx.figures import PALETTE, Colors, colors_of
from embedx.layout import Status
from embedx.matrix import Array, Matrix
from embedx.methods import pca
from embedx.store import Embeddings

LOOK_EVERY_S = 1.0
LINE_EVERY_S = 10.0  # where the lines stay
RATE_OVER_S = 20.0
MAPPED_MOST = 4000  # rows, evenly over those that are there
WIDE, HIGH = 64, 20  # letters at most; each is two points wide and four high
# Of a Braille letter, from the left top downwards (Unicode 16.0, chapter 21.1).
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


def follow(path: Path, *, write: Callable[[str], object] | None = None) -> Embeddings:
    """Show a run until it is whole, or nobody writes it any more.

    On a terminal the picture is drawn anew in its place; elsewhere a line comes now and then, and
    the map at the end.

    Args:
        path: The file that the run will be, ``embeddings.h5``.
        write: Takes text, whose lines may move the cursor up; standard output where not given.

    Returns:
        The run as it was seen last.

    Raises:
        StoreError: There is no run, or its file is damaged.
    """
    in_place = write is not None or sys.stdout.isatty()
    write = sys.stdout.write if write is None else write
    seen: deque[tuple[float, int]] = deque()
    before: tuple[Array, Array] | None = None
    n_lines, said = 0, -LINE_EVERY_S
    while True:
        started = time.monotonic()
        is_running = _is_written(path)  # asked first: what is written until then is seen below
        opened = _newest(path)
        seen.append((started, opened.n_rows))
        while len(seen) > 2 and started - seen[0][0] > RATE_OVER_S:
            seen.popleft()
        is_over = opened.complete or not is_running
        lines = [_line(opened, seen, is_running=is_running)]
        if in_place or is_over:
            window = shutil.get_terminal_size((WIDE + 1, HIGH + 3))
            size = min(WIDE, window.columns - 1), max(1, min(HIGH, window.lines - 3))
            picture, before = _picture(opened, before, size, colored=in_place)
            lines += picture
        if in_place:
            write(f"\x1b[{n_lines}F\x1b[J" if n_lines else "")
            n_lines = len(lines)
        if in_place or is_over or started - said >= LINE_EVERY_S:
            said = started
            write("\n".join(lines) + "\n")
            sys.stdout.flush()
        if is_over:
            return opened
        # Opening a run of millions takes a while; it shall not be all that this machine does.
        time.sleep(max(LOOK_EVERY_S, 5 * (time.monotonic() - started)))


def _is_written(path: Path) -> bool:
    try:
        require_idle(path)
    except InUseError:
        return True
    return False


def _newest(path: Path) -> Embeddings:
    """The run that is being written, or the finished one."""
    partial = unfinished.partial_path(path)
    for _ in range(3):  # a run that ends takes its last name between two looks
        for candidate in (partial, path):
            if candidate.exists():
                try:
                    return Embeddings(candidate)
                except StoreError:
                    if candidate.exists():
                        raise
    raise StoreError(f"there is no {path} and no run that writes it; start one with extract")


def _line(opened: Embeddings, seen: deque[tuple[float, int]], *, is_running: bool) -> str:
    n, total = opened.n_rows, int(opened.attrs["n_rows"])
    failed = int((opened.status == Status.FAILED).sum())
    line = f"{n:,} of {total:,} rows ({n / max(total, 1):.0%}), {failed:,} failed"
    if opened.complete:
        return f"{line}, finished"
    if not is_running:
        return f"{line}, nobody writes it: go on with the same extract command"
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    if last == first:
        return f"{line}, waiting for the next rows"
    rate = (last - first) / (last_s - first_s)
    return f"{line}, {rate:,.1f} a second, {(total - n) / rate:,.0f} s left"


def _picture(
    opened: Embeddings,
    before: tuple[Array, Array] | None,
    size: tuple[int, int],
    *,
    colored: bool,
) -> tuple[list[str], tuple[Array, Array] | None]:
    """The principal components of the rows so far, turned as the picture before was."""
    point, rows = opened.rows()
    good = np.flatnonzero(opened.ok)
    at = good[:: max(1, -(-len(good) // MAPPED_MOST))]
    x = np.asarray(rows[at], np.float32)
    is_finite = np.isfinite(x).all(axis=1)
    at, x = at[is_finite], x[is_finite]
    if len(at) < 3 or x.shape[1] < 2:
        return [f"a map of {point} begins with the third row of two features"], before
    coords = pca(Matrix(x), n_components=2).coords.astype(np.float64)
    if before is not None:
        shared, ours, theirs = np.intersect1d(at, before[0], return_indices=True)
        if len(shared) > 2:
            turn, shift = procrustes(coords[ours], before[1][theirs])
            coords = coords @ turn + shift
    shades = None
    if colored and opened.labels is not None:
        shades = _shades(colors_of(opened.label_texts(), opened.ok, name="label"))[at]
    return [*_braille(coords, shades, size), f"PCA of {len(at):,} rows of {point}"], (at, coords)


def _shades(colors: Colors) -> Array:
    """The number of each row's colour, -1 for grey."""
    groups = colors.groups or []
    n = len(groups[0][2]) if groups else 0
    shades = np.full(n, -1)
    for _, shade, mask in groups:
        if shade in PALETTE:
            shades[mask] = PALETTE.index(shade)
    return shades


def _braille(coords: Array, shades: Array | None, size: tuple[int, int]) -> list[str]:
    across, down = size
    low, high = coords.min(axis=0), coords.max(axis=0)
    points = np.array([2 * across, 4 * down])
    scale = ((points - 1) / np.maximum(high - low, 1e-30)).min()  # one scale for both axes
    middle = (low + high) / 2
    column, row = ((coords - middle) * [scale, -scale] + (points - 1) / 2).round().astype(int).T
    letters = np.zeros((down, across), int)
    np.bitwise_or.at(letters, (row // 4, column // 2), _DOTS[row % 4, column % 2])
    lines = [[chr(0x2800 + bits) for bits in line] for line in letters.tolist()]
    if shades is not None:
        for y, x in zip(*np.nonzero(letters), strict=True):
            here = shades[(row // 4 == y) & (column // 2 == x)]
            shade = int(np.bincount(here + 1).argmax()) - 1
            red, green, blue = bytes.fromhex(PALETTE[shade][1:] if shade >= 0 else "999999")
            lines[y][x] = f"\x1b[38;2;{red};{green};{blue}m{lines[y][x]}\x1b[0m"
    return ["".join(line).rstrip("\u2800") for line in lines]
