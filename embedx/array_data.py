"""Pictures or tensors in a file of arrays."""

import builtins
import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from embedx.array_files import ArrayFile, arrays_in, is_label_key
from embedx.columns import minus_one_told
from embedx.errors import ConfigError, DataError, listed, nearest
from embedx.pictures import PIXELS_MOST, picture
from embedx.sources import (
    Array,
    RowNumbers,
    Source,
    counted_through,
    file_hashes,
    limited,
    name_of,
    require_unchanged,
    stamp_of,
)

Layout = Literal["nhw", "nhwc", "nchw", "tensor"]
CHANNELS = (1, 3, 4)
_BLOCK_BYTES = 2**24
_ROWS_BYTES = 2**18
_OF_TYPE = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0), "bool": (0.0, 1.0)}


def array(
    path: str,
    *,
    key: str | None = None,
    layout: Layout | None = None,
    range: Sequence[float] | None = None,
    labels: str | None = None,
    limit: int | None = None,
) -> Source:
    """Pictures, or tensors, in an array of a ``.npy``, ``.npz`` or HDF5 file.

    Pictures go through the model's preprocessing as those of a folder do; tensors enter the model
    as they are. Ids are row numbers. Nothing of the file is kept in memory.

    Args:
        path: The file.
        key: Which of its arrays; the only one of two or more axes where not given.
        layout: What its axes are: ``nhw``, ``nhwc`` or ``nchw`` of pictures, with 1, 3 or 4
            channels c (grey, RGB, RGB and alpha), or ``tensor``. Where not given three axes are
            nhw, four are nhwc or nchw by the one that has 1, 3 or 4 entries, and others are
            tensors.
        range: Which values are black and white, [low, high]; a picture with others fails. Where
            not given [0, 255] for uint8, [0, 65535] for uint16, and else [0, 1] or [0, 255],
            by what all values lie in.
        labels: The labels, shape ``(n,)``: the key of another array of the file, another ``.npy``
            file, or ``none``; where not given the array that is called label, labels, target,
            targets or y, if there is one. An empty text is no label.
        limit: Take the first so many rows.

    Raises:
        ConfigError: There is no such array, or it could be meant in several ways.
        DataError: The file cannot be read, does not match its checksum, says that it holds more
            than it does, or holds values whose range is not known.
    """
    where = Path(path).expanduser()
    limited(0, limit)
    arrays, refused = arrays_in(where)
    # What another process writes by a memory map moves the time of the file only when it is new
    # since it was synced last.
    with contextlib.suppress(OSError), where.open("rb") as file:
        os.fsync(file.fileno())
    about = where.stat()
    found = _chosen(where, arrays, refused, key)
    if found.dtype.kind not in "biuf":
        raise DataError(f"{found} holds texts ({found.dtype}); name one of numbers")
    found.require_whole()
    is_inferred = layout is None
    layout = _inferred(found) if layout is None else layout
    _require_layout(found, layout)
    n = limited(len(found), limit)
    texts, label_by = _labels(where, arrays, refused, labels, found)
    form = str(found.dtype)
    items = found.first(n)
    read: Any = _RowReader(items, stamp_of(about))
    told: tuple[Any, ...] = (found.key, found.shape, form, layout)
    note = f"{path}: {n:,} "
    shape = "x".join(map(str, found.shape[1:])) or "1"
    if layout == "tensor":
        note += f"tensors of {shape} {form}, which enter the model as they are"
    else:
        low, high = _range(items, range)
        read = _PictureReader(read, layout, low, high)
        h, w = _size(found, layout)
        note += f"pictures of {w}x{h} px, {form}, {low:g} black and {high:g} white"
        told += (low, high)
    if is_inferred and len(found.shape) > 2:
        note += f", by layout {layout}"
    names: list[str] = []
    numbers: list[int] | None = None
    indices: Array | None = None
    warnings = items.holes_told()
    if texts is not None:
        indices, names, numbers = counted_through(texts[:n], None)
        note += f", labels by {label_by}: {len(names)} classes"
        warnings += minus_one_told(names, path)
    else:
        note += ", no labels"
    if n < len(found):
        note += f", the first of {len(found):,}"
    digest, (whole,) = file_hashes([(where.name, *stamp_of(about))])
    return Source(
        name=name_of(where),
        ids=RowNumbers(n),
        read=read,
        fingerprint=hashlib.sha256(f"{digest} {told!r}".encode()).hexdigest(),
        item_hashes=np.full(n, whole),
        labels=indices if names else None,
        label_names=names,
        label_numbers=numbers,
        notes=(note, *(f"passed over: {key} {why}" for key, why in refused.items())),
        warnings=tuple(warnings),
        reads_files=items.is_shared,
    )


def _chosen(
    path: Path, arrays: dict[str, ArrayFile], refused: dict[str, str], key: str | None
) -> ArrayFile:
    if key is not None:
        if key in refused:
            raise DataError(f"{key} of {path} {refused[key]}")
        if key not in arrays:
            known = sorted(filter(None, arrays))
            raise ConfigError(
                f"data.key={key} is no array of {path}; "
                + (f"the nearest are {', '.join(nearest(key, known))}" if known else "it has one")
            )
        return arrays[key]
    whole = {name: one for name, one in arrays.items() if len(one.shape) > 1 or not name}
    if len(whole) == 1:
        return next(iter(whole.values()))
    shown = listed([f"{name} {one.shape}" for name, one in (whole or arrays).items()])
    if whole:
        name = next(iter(whole))
        raise ConfigError(f"{path} has {len(whole)} arrays, {shown}; say which: data.key={name}")
    for name, why in refused.items():
        raise DataError(f"{name} of {path} {why}")
    raise DataError(f"{path} has no array of two or more axes; it has: {shown or 'none'}")


def _inferred(found: ArrayFile) -> Layout:
    """What the axes of an array are.

    Raises:
        ConfigError: They could be several things.
    """
    if len(found.shape) == 3:
        return "nhw"
    if len(found.shape) != 4:
        return "tensor"
    is_first, is_last = found.shape[1] in CHANNELS, found.shape[3] in CHANNELS
    if is_first != is_last:
        return "nchw" if is_first else "nhwc"
    which = "both of" if is_first else "neither of"
    raise ConfigError(
        f"{found} has shape {found.shape}, in which {which} axis 1 and the last can be 1, "
        "3 or 4 channels; say which: data.layout=nhwc or nchw, or tensor if its rows enter the "
        "model as they are"
    )


def _require_layout(found: ArrayFile, layout: Layout) -> None:
    if layout == "tensor":
        return
    fits = len(found.shape) == len(layout)
    if not fits or ("c" in layout and found.shape[layout.index("c")] not in CHANNELS):
        axes = ", ".join(layout)
        raise ConfigError(
            f"{found} has shape {found.shape}, and data.layout={layout} takes ({axes}) "
            "with 1, 3 or 4 channels c; choose another layout, or tensor"
        )
    if math.prod(_size(found, layout)) > PIXELS_MOST:
        raise DataError(
            f"{found} has shape {found.shape}: pictures of more than "
            f"{PIXELS_MOST / 1e6:.0f} megapixels are not read; shrink them, or give layout=tensor"
        )


def _size(found: ArrayFile, layout: Layout) -> tuple[int, int]:
    """Height and width in px."""
    at = layout.index("h")
    return found.shape[at], found.shape[at + 1]


def _extremes(found: ArrayFile) -> tuple[float, float]:
    """The smallest and the largest finite value of all rows."""
    smallest, largest = math.inf, -math.inf
    step = max(1, _BLOCK_BYTES // max(1, math.prod(found.shape[1:]) * found.dtype.itemsize))
    for start in builtins.range(0, len(found), step):
        block = found[start : start + step]
        values = block[np.isfinite(block)] if block.dtype.kind == "f" else block
        if values.size:
            smallest = min(smallest, float(values.min()))
            largest = max(largest, float(values.max()))
    found.close()
    return smallest, largest


def _range(found: ArrayFile, given: Sequence[float] | None) -> tuple[float, float]:
    """The values that are black and white.

    Raises:
        ConfigError: Those given are none.
        DataError: They are not given, and the values do not tell.
    """
    if given is not None:
        if len(given) != 2 or not -math.inf < given[0] < given[1] < math.inf:
            raise ConfigError(
                f"data.range={list(given)} must be two numbers, that of black and a larger one "
                "that of white, such as [0,255]"
            )
        return float(given[0]), float(given[1])
    if found.dtype.name in _OF_TYPE:
        return _OF_TYPE[found.dtype.name]
    smallest, largest = _extremes(found)
    if smallest > largest:
        raise DataError(f"{found} has no finite value; there is no picture in it")
    if smallest >= 0 and largest <= 255:
        return 0.0, 1.0 if largest <= 1 else 255.0
    raise DataError(
        f"{found} has values from {smallest:g} to {largest:g}, and pictures have 0 to 1 "
        "or 0 to 255; say which are black and white: 'data.range=[LOW,HIGH]', or "
        "data.layout=tensor if its rows enter the model as they are"
    )


@dataclasses.dataclass
class _RowReader:
    """Row i of an array, if its file is as it was when it was listed.

    Small rows are read some at a time, and the file is looked at after each reading.
    """

    items: ArrayFile
    stamp: tuple[int, int]
    _held: tuple[int, Array] = (0, np.empty(0))  # the first row, and the rows

    def __post_init__(self) -> None:
        row_bytes = math.prod(self.items.shape[1:]) * self.items.dtype.itemsize
        self._step = max(1, _ROWS_BYTES // max(1, row_bytes))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": (0, np.empty(0))}

    def __call__(self, i: int) -> Array:
        first, rows = self._held
        if not first <= i < first + len(rows):
            first = i - i % self._step
            try:
                rows = self.items[first : first + self._step]
            finally:
                require_unchanged(stamp_of(os.stat(self.items.path)) == self.stamp)
            self._held = first, rows
        return np.asarray(rows[i - first])


@dataclasses.dataclass(frozen=True)
class _PictureReader:
    items: _RowReader
    layout: str
    low: float
    high: float

    def __call__(self, i: int) -> Image.Image:
        values = self.items(i)
        if self.layout == "nchw":
            values = np.moveaxis(values, 0, -1)
        if values.ndim == 3 and values.shape[-1] == 1:
            values = values[..., 0]
        if values.dtype != np.uint8 or (self.low, self.high) != (0, 255):
            values = values.astype(np.float64)
            low, high = values.min(), values.max()
            if not (np.isfinite(low) and np.isfinite(high)):
                raise DataError("it has values that are not finite")
            if low < self.low or high > self.high:
                raise DataError(
                    f"its values go from {low:g} to {high:g}, and black is {self.low:g} and white "
                    f"{self.high:g}"
                )
            values = ((values - self.low) * (255 / (self.high - self.low))).round()
        image = Image.fromarray(np.ascontiguousarray(values, np.uint8))
        if image.mode == "RGB":  # as it comes out of an array, nothing is left to be done
            return image
        made = picture(image)
        assert made is not None
        return made


def _labels(
    path: Path,
    arrays: dict[str, ArrayFile],
    refused: dict[str, str],
    given: str | None,
    items: ArrayFile,
) -> tuple[list[Any] | None, str]:
    """The labels of all rows, or None, and where they are from."""
    if given == "none":
        return None, ""
    if given is None:
        names = [name for name, one in arrays.items() if is_label_key(name) and one is not items]
        if len(names) > 1:
            raise ConfigError(
                f"{path} has the arrays {listed(names)}; say which has the labels: "
                f"data.labels={names[0]}, or none"
            )
        if not names:
            return None, ""
        given = names[0]
    if given in refused:
        raise DataError(f"data.labels={given}: that of {path} {refused[given]}")
    found = arrays.get(given)
    if found is None:
        other = Path(given).expanduser()
        if not other.is_file():
            keys = [name for name in arrays if name]
            raise ConfigError(
                f"data.labels={given} is no array of {path}"
                + (f", which has {listed(keys)}," if keys else "")
                + " and no file; name one, or none"
            )
        found = arrays_in(other)[0].get("")
        if found is None:
            raise ConfigError(f"data.labels={given} is no .npy file; save the labels as one")
    if found.shape != (len(items),):
        raise DataError(
            f"the labels, {found}, have shape {found.shape}, and {items} has "
            f"{len(items):,} rows; give one label a row, shape ({len(items)},)"
        )
    return found.as_list(), given
