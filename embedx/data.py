"""Sources of samples: items with ids, labels and metadata, in one fixed order."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import itertools
import math
import os
import random
import re
import stat
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from embedx.checks import require_exact, require_unmasked
from embedx.errors import ConfigError, DataError, first_line, number_of

Array = npt.NDArray[Any]

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # JPEG takes in MPO
PIXELS_MOST = 100_000_000
ALPHA_ON = (255, 255, 255)
KINDS_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Source:
    """Samples in a fixed order; row i of every file is item i, always.

    Attributes:
        name: For files and tables.
        ids: n unique texts.
        read: Item i, an upright RGB picture, a text or a tensor, or what ``collate`` takes; the
            pair of it and its label where ``labels_in_items``. Raises for an item that cannot be
            read.
        fingerprint: Hash of what the items are: it decides whether rows are still theirs.
        item_hashes: Shape ``(n,)`` uint64, the same for each item by itself, to name those that
            changed; None where that would cost a pass.
        labels: Shape ``(n,)`` int32 indices into ``label_names``, -1 for none; None without labels.
        label_names: Names of the labels; empty where each of ``labels_in_items`` is its own name.
        label_numbers: The number that each name has in the data, where its labels are numbers,
            among all its classes, also those that do not occur; None where they are texts.
        labels_in_items: Whether ``read`` gives the labels, int32, -1 for none.
        collate: Makes the inputs of a batch, shape ``(b, ...)``, of its items as read; None to
            stack them.
        draws: Whether ``read`` or ``collate`` draws random numbers (of torch, NumPy or Python, not
            from a generator of its own): row i is then drawn from seed i, in every run.
        metadata: Further columns of n numbers or texts.
        notes: What was found and what was passed over, for the user.
        warnings: What the user should be told aloud.
        root: The folder that holds the items; None where there is none.
        reads_files: Whether ``read`` is ours and opens a file each time, so that threads may
            share it.

    Raises:
        DataError: An id that is no text, a label that is no index into its names, or a column that
            a file cannot hold.
    """

    name: str
    ids: Sequence[str]
    read: Callable[[int], Any]
    fingerprint: str
    item_hashes: Array | None = None
    labels: Array | None = None
    label_names: Sequence[str] = ()
    label_numbers: Sequence[int] | None = None
    labels_in_items: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    draws: bool = False
    metadata: dict[str, Array | Sequence[str]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    root: Path | None = None
    reads_files: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.ids, RowNumbers):
            _require_texts(self.ids, f"the ids of {self.name}")
        for given in (self.labels, *self.metadata.values()):
            require_unmasked(given)
        if self.labels is not None:
            labels, n_names = np.asarray(self.labels), len(self.label_names)
            if labels.shape != (len(self),) or labels.dtype.kind not in "iu":
                raise DataError(
                    f"the labels of {self.name} have shape {labels.shape} and type {labels.dtype}; "
                    f"give {len(self)} whole numbers, indices into label_names"
                )
            if len(labels) and not (labels.min() >= -1 and labels.max() < n_names):
                odd = labels[(labels < -1) | (labels >= n_names)][0]
                raise DataError(
                    f"the labels of {self.name} hold {odd}, and there are {n_names} label_names; "
                    "give indices into these, -1 for none"
                )
        for name, column in self.metadata.items():
            _check_name(name, self.name)
            _check_column(f"the column {name!r} of {self.name}", column, n=len(self))

    def __len__(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True)
class Shards:
    """Samples that come shard by shard; how many there are is known when the last one was read.

    Attributes:
        name: For files and tables.
        names: Of the shards, in order.
        fingerprint: Hash of what the shards are.
        read: Gives shard i as a :class:`Source`, for as long as its ``with`` block lasts: called
            with ``scratch``, a path at which it may put a copy, and ``most``, how many samples are
            wanted at most. Ids of two shards differ.
        limit: How many samples are wanted of all; None for no limit.
        notes: What was found, for the user.
        warnings: What the user should be told aloud.
        root: The folder that holds the shards; None where there is none.
    """

    name: str
    names: Sequence[str]
    fingerprint: str
    read: Callable[..., contextlib.AbstractContextManager[Source]]
    limit: int | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    root: Path | None = None


def _require_texts(ids: Any, what: str) -> None:
    odd = next((name for name in ids if not isinstance(name, str)), None)
    if odd is not None:
        raise DataError(
            f"{what} are not all texts, such as {odd!r} ({type(odd).__name__}); give "
            "ids=list(map(str, ids))"
        )


def _check_name(name: Any, source: str) -> None:
    if not isinstance(name, str) or not name or "\0" in name or not _is_utf8(name):
        raise DataError(
            f"a column of {source} is called {name!r}; give a text of one or more characters in "
            "UTF-8, without NUL"
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair, as in the name of a file of other bytes
        return False
    return True


def _check_column(what: str, column: Any, *, n: int) -> None:
    if isinstance(column, list) and all(isinstance(value, str) for value in column):
        # Not as an array: there each would take the room of the longest.
        if len(column) != n:
            raise DataError(f"{what} has {len(column)} texts; give one a sample: {n}")
        return
    try:
        values = np.asarray(column)
    except ValueError:  # lists of several lengths
        values = np.empty((0, 0))
    if values.shape != (n,):
        raise DataError(f"{what} has shape {values.shape}; give one number or text a sample: {n}")
    is_texts = values.dtype.kind in "UO" and all(isinstance(value, str) for value in column)
    # Texts beside numbers become texts in NumPy, so that those of a list are looked at.
    is_mixed = values.dtype.kind == "U" and not is_texts
    is_number = values.dtype.kind in "biuf" and values.dtype.itemsize <= 8
    if is_mixed or not (is_texts or is_number):
        kind = "texts and numbers" if is_mixed else f"type {values.dtype}"
        raise DataError(f"{what} is of {kind}; give numbers of at most 64 bits, or texts")
    if values.dtype.kind == "f" and not isinstance(column, np.ndarray):
        require_exact(column, what=what)


def limited(n: int, limit: int | None) -> int:
    """How many of n items count where ``data.limit`` takes the first so many.

    Raises:
        ConfigError: It is less than 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"data.limit must be at least 1, not {limit}")
    return n if limit is None else min(n, limit)


# --------------------------------------------------------------------------- pictures


class _Pillow:
    """What Pillow and its warnings are told while any thread reads; after the last, as it was.

    Both are one for all threads: each that put back what it found would put back another's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = self._quiet = 0
        self._before = False
        self._filters = warnings.catch_warnings()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        with self._lock:
            if not self._users or ImageFile.LOAD_TRUNCATED_IMAGES:  # set by others meanwhile
                self._before = ImageFile.LOAD_TRUNCATED_IMAGES
            self._users += 1
            ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    ImageFile.LOAD_TRUNCATED_IMAGES |= self._before

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        with self._lock:
            self._quiet += 1
            if self._quiet == 1:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
        try:
            yield
        finally:
            with self._lock:
                self._quiet -= 1
                if not self._quiet:
                    self._filters.__exit__(None, None, None)


_PILLOW = _Pillow()


def whole_pictures() -> contextlib.AbstractContextManager[None]:
    """Let no half of a picture pass for a whole one, whatever another library asked of Pillow."""
    return _PILLOW.whole()


def decode_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read a picture as upright 8-bit RGB: first frame, EXIF turned, alpha on white.

    Formats are told by content, not by name. Grey of 12 and 16 bits is scaled, not clipped.

    Args:
        path: A BMP, GIF, JPEG, PNG, PNM, TIFF or WebP file of at most 100 megapixels.

    Raises:
        DataError: Of another format, too large, or pixels whose range is not stated (32-bit,
            float) or is lost in reading (a transparent colour of 16 bits).
        OSError: Missing, truncated, or a PNG whose checksums do not match.
    """
    with open(path, "rb") as file:
        return _decoded(file)


def decode_bytes(data: bytes) -> Image.Image:
    """Read a picture from memory, as :func:`decode_image` does from a file.

    Args:
        data: What such a file holds.

    Raises:
        DataError: As there.
        OSError: As there.
    """
    return _decoded(io.BytesIO(data))


def _decoded(file: IO[bytes]) -> Image.Image:
    with _PILLOW.quiet(), whole_pictures():  # our own cap stands before Pillow's warning
        try:
            opened = Image.open(file, formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise DataError(f"{str(error).split(',')[0]}; shrink it") from None
        except UnidentifiedImageError:
            raise DataError(f"not a picture of the formats {', '.join(FORMATS)}") from None
        with opened:
            width, height = opened.size
            if width * height > PIXELS_MOST:
                raise DataError(
                    f"{width}x{height} px is more than {PIXELS_MOST / 1e6:.0f} megapixels; "
                    "shrink it"
                )
            if opened.format == "PNG":
                _require_checksums(file)
            return _upright_rgb(opened, in_place=True)


def _require_checksums(file: IO[bytes]) -> None:
    """Raise OSError for a PNG whose checksums do not match: Pillow reads pixels without them."""
    at = file.tell()
    file.seek(0)
    try:
        with Image.open(file, formats=["PNG"]) as again:
            again.verify()
    except SyntaxError as error:
        raise OSError(f"image file is damaged ({first_line(error)})") from None
    file.seek(at)


def _upright_rgb(opened: Image.Image, *, in_place: bool = False) -> Image.Image:
    """A picture turned as its EXIF says, in 8-bit RGB; a copy, unless it may be turned in place."""
    transparent = _transparent(opened)
    image = opened
    if in_place:
        ImageOps.exif_transpose(opened, in_place=True)
    else:
        image = ImageOps.exif_transpose(opened)
    # Pillow widens 16-bit PNM to 32 bits, and its range is still that of 16.
    if image.mode.startswith("I;16") or (image.mode == "I" and opened.format == "PPM"):
        values = np.asarray(image)
        # Of a TIFF, Pillow leaves it to us how many of the 16 bits are used and which end is white.
        tags: Any = getattr(opened, "tag_v2", {})
        white = 2 ** tags.get(_TIFF_BITS, (16,))[0] - 1
        scaled = (values / (white / 255)).round().astype(np.uint8)
        if tags.get(_TIFF_PHOTOMETRIC) == _TIFF_WHITE_IS_ZERO:
            scaled = 255 - scaled
        if transparent is not None:
            scaled[values == transparent] = ALPHA_ON[0]
        return Image.fromarray(scaled).convert("RGB")
    if image.mode in ("I", "F"):
        raise DataError(f"mode {image.mode!r} does not state its range; convert it to 8 or 16 bits")
    if transparent is not None:
        image.info["transparency"] = transparent
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (*ALPHA_ON, 255))
        image = Image.alpha_composite(ground, image)
    if in_place and image.mode == "RGB":  # to convert it would copy it
        image.load()
        return image
    return image.convert("RGB")


_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_WHITE_IS_ZERO = 258, 262, 0
_PNG_WIDENED = {"L;2": 85, "L;4": 17}


def _transparent(opened: Image.Image) -> Any:
    """The transparent value of a picture, which Pillow does not widen as it does the pixels.

    It has to be asked before these are loaded: the depth of the file is forgotten then.

    Raises:
        DataError: A PNG of 16-bit colours, of which Pillow keeps but 8 bits.
    """
    transparent = opened.info.get("transparency")
    tiles: Any = getattr(opened, "tile", None)
    if transparent is None or not tiles or opened.format != "PNG":
        return transparent
    if tiles[0][3] == "RGB;16B":
        raise DataError("a transparent colour of 16 bits is not read; convert it to 8 bits")
    return transparent * _PNG_WIDENED.get(tiles[0][3], 1)


def thumbnail(image: Image.Image, side_px: int) -> Array:
    """A square miniature, the whole picture centred on white: uint8 ``(side, side, 3)``."""
    scale = side_px / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    # A handful of pixels is shown as pixels; anything larger is averaged down.
    resample = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    small = image.resize(size, resample, reducing_gap=2.0 if scale < 1 else None)
    tile = Image.new("RGB", (side_px, side_px), ALPHA_ON)
    tile.paste(small, ((side_px - size[0]) // 2, (side_px - size[1]) // 2))
    return np.asarray(tile)


# --------------------------------------------------------------------------- sources


def digits(*, limit: int | None = None) -> Source:
    """scikit-learn's 1,797 handwritten digits of 8x8 px, in memory, ten classes.

    Args:
        limit: Take the first so many.

    References:
        Alpaydin, Kaynak 1998, Optical Recognition of Handwritten Digits, UCI.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    n = limited(len(loaded.images), limit)
    pixels = (loaded.images[:n] * (255 / 16)).round().astype(np.uint8)
    return Source(
        name="digits",
        ids=[f"digit-{i:04d}" for i in range(n)],
        read=PixelReader(pixels),
        fingerprint=hashlib.sha256(pixels.tobytes()).hexdigest(),
        labels=loaded.target[:n].astype(np.int32),
        label_names=[str(name) for name in loaded.target_names],
        label_numbers=range(len(loaded.target_names)),
        notes=(f"digits: {n:,} pictures of 8x8 px, 10 classes",),
    )


@dataclasses.dataclass(frozen=True)
class PixelReader:
    """Picture i of pixels in memory, shape ``(n, h, w)`` or ``(n, h, w, 3)``, uint8."""

    pixels: Array

    def __call__(self, i: int) -> Image.Image:
        return Image.fromarray(self.pixels[i]).convert("RGB")


def folder(root: str, *, limit: int | None = None, labels: str = "folder") -> Source:
    """Every picture below a folder, sorted by its path.

    Ids are paths relative to ``root`` with ``/``; the first level of folders gives the labels.
    Hidden files, other kinds of files, and folders that embedx wrote are passed over and counted.

    Args:
        root: The folder.
        limit: Take the first so many.
        labels: ``folder``, ``none`` to have no labels, or a regular expression that is searched in
            each id: its group ``label``, or else its first group, is the label. An id in which it
            is not found has none.

    Raises:
        ConfigError: ``labels`` is no regular expression or has no group.
        DataError: The folder is missing, is not one, or holds no picture, or ``labels`` is found
            in no id.
    """
    expression = None if labels in ("none", "folder") else _expression(labels)
    if not root:
        raise DataError("data.root is empty; name a folder of pictures")
    top = Path(root).expanduser()
    if not top.is_dir():
        what = "is not a folder" if top.exists() else "is not there"
        raise DataError(f"data.root {root} {what}; name a folder of pictures")
    found, passed_over = scan(top, SUFFIXES)
    where = counted(passed_over)
    if not found:
        raise DataError(
            f"data.root {root} holds no picture ({where or 'it is empty'}); embedx reads "
            + " ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        )
    n = limited(len(found), limit)
    items = found[:n]
    ids = [name for name, _, _ in items]
    if expression is not None:
        classes = _searched(expression, ids)
    elif labels == "folder":
        classes = [name.split("/", 1)[0] if "/" in name else "" for name in ids]
    else:
        classes = [""] * n
    indices, label_names, _ = counted_through(classes, None)
    fingerprint, hashes = file_hashes(items)
    note = f"{root}: {number_of(n, 'picture', 'pictures')}, {classes_said(label_names)}"
    if n < len(found):
        note += f", the first of {len(found):,}"
    unlabelled = sum(name == "" for name in classes)
    if label_names and unlabelled:
        note += f", {unlabelled:,} " + ("outside any class" if expression is None else "unlabelled")
    return Source(
        name=name_of(top) or "folder",
        ids=ids,
        read=FileReader(str(top), tuple(ids), hashes),
        fingerprint=fingerprint,
        item_hashes=hashes,
        labels=indices if label_names else None,
        label_names=label_names,
        notes=(note, *((f"passed over: {where}",) if where else ())),
        root=top,
        reads_files=True,
    )


_LABEL_CHOICES = (
    "choose none, folder, or a regular expression whose group is the label, such as "
    "labels='(cat|dog)'"
)


def _expression(labels: str) -> re.Pattern[str]:
    try:
        expression = re.compile(labels)
    except re.error as error:
        raise ConfigError(
            f"data.labels={labels!r} is no regular expression ({error}); {_LABEL_CHOICES}"
        ) from None
    if not expression.groups:
        raise ConfigError(f"data.labels={labels!r} has no group; {_LABEL_CHOICES}")
    return expression


def _searched(expression: re.Pattern[str], ids: Sequence[str]) -> list[str]:
    """The label in each id, "" for none."""
    group = "label" if "label" in expression.groupindex else 1
    found = [expression.search(name) for name in ids]
    labels = [(match[group] or "") if match else "" for match in found]
    if not any(labels):
        raise DataError(
            f"data.labels={expression.pattern!r} is found in none of the {len(ids):,} ids, such "
            f"as {ids[0]!r}; {_LABEL_CHOICES}"
        )
    return labels


def _line(name: str, size_bytes: int, mtime_ns: int) -> bytes:
    return f"{name}\0{size_bytes}\0{mtime_ns}\n".encode("utf-8", "backslashreplace")


def file_hashes(items: Iterable[tuple[str, int, int]]) -> tuple[str, Array]:
    """What tells files apart without reading them: of all together, and of each, ``(n,)`` uint64.

    Args:
        items: ``(path, bytes, mtime_ns)`` of each; -1 for those of a file that is not there.
    """
    digest, hashes = hashlib.sha256(), []
    for item in items:
        line = _line(*item)
        digest.update(line)
        hashes.append(item_hash(line))
    return digest.hexdigest(), np.array(hashes, np.uint64)


def stamp_of(about: os.stat_result) -> tuple[int, int]:
    """What tells whether a file is as it was: bytes and mtime_ns."""
    return about.st_size, about.st_mtime_ns


def require_unchanged(is_same: bool) -> None:
    """Refuse an item that is another than when the run listed it.

    Raises:
        DataError: It is.
    """
    if not is_same:
        raise DataError("it was changed after the run had listed it") from None


def name_of(path: Path) -> str:
    """The name of a source: that of its folder, or of its file."""
    # A link to a file has a name that was chosen; what it leads to may be called by a hash.
    last = path.name if path.is_file() else path.resolve().name
    return os.fsencode(last).decode(errors="backslashreplace")


@dataclasses.dataclass(frozen=True)
class FileReader:
    """Picture i out of the i-th of some files, if it is as it was when they were listed.

    Attributes:
        root: The folder that the paths count from.
        paths: n paths with ``/``.
        hashes: Of the files, shape ``(n,)``, by :func:`file_hashes`.
        refused: Why a row is not read at all, by its number.
    """

    root: str
    paths: tuple[str, ...]
    hashes: Array
    refused: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def __call__(self, i: int) -> Image.Image:
        if i in self.refused:
            raise DataError(self.refused[i])
        with open(os.path.join(self.root, *self.paths[i].split("/")), "rb") as file:
            try:
                return _decoded(file)
            finally:
                # Of the file that was read, though its name be taken.
                stamp = stamp_of(os.fstat(file.fileno()))
                require_unchanged(item_hash(_line(self.paths[i], *stamp)) == self.hashes[i])


class Located:
    """Where files are that a table or a data set names.

    Attributes:
        names: The paths for ids: below the root, or as they stand where they lead out of it.
        paths: The paths to open, ``""`` of rows that are refused.
        files: ``(path, bytes, mtime_ns)`` of each; -1 for those of a file that is not there.
        refused: Why a row is not read, by its number.
        n_missing: How many are not there.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.paths: list[str] = []
        self.files: list[tuple[str, int, int]] = []
        self.refused: dict[int, str] = {}
        self.n_missing = 0

    def told(self) -> list[str]:
        """What rows will fail, as far as it is known before they are read."""
        whys = Counter(self.refused.values())
        told = [f"{n:,} rows will fail: {why}" for why, n in sorted(whys.items())]
        if self.n_missing:
            told.append(f"{self.n_missing:,} rows will fail: their files are not there")
        return told


def located(paths: Iterable[str], top: Path, *, elsewhere: str) -> Located:
    """Where files are, none of which may lie outside a folder, nor be anything but a plain file.

    Args:
        paths: As they are written, from that folder or from the root.
        top: The folder.
        elsewhere: Why one that leads out of it is refused.
    """
    found = Located()
    base = os.path.abspath(top)
    real = os.path.realpath(top)
    folders: dict[str, bool] = {}

    def is_inside(resolved: str) -> bool:
        return resolved == real or resolved.startswith(real.rstrip(os.sep) + os.sep)

    def look(written: str) -> tuple[str, int, int, str]:
        """Its path below the root, bytes, mtime_ns, and why it is refused."""
        if not written or "\0" in written:
            return written, -1, -1, "its path " + ("has NUL in it" if written else "is missing")
        joined = os.path.normpath(os.path.join(base, written))
        relative = os.path.relpath(joined, base)
        if relative == os.pardir or relative.startswith(os.pardir + os.sep):
            return written, -1, -1, elsewhere
        name = relative.replace(os.sep, "/")
        folder = os.path.dirname(joined)
        if folder not in folders:
            folders[folder] = is_inside(os.path.realpath(folder))
        try:
            about = os.lstat(joined)
            is_in = folders[folder]
            if stat.S_ISLNK(about.st_mode):
                is_in = is_inside(os.path.realpath(joined))
                about = os.stat(joined) if is_in else about
        except OSError:
            if "\\" in written and os.sep == "/":
                return name, -1, -1, "its file is not there, and its path has \\ where / is meant"
            found.n_missing += 1
            return name, -1, -1, ""
        if not is_in:
            return name, -1, -1, elsewhere
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
            return name, -1, -1, "its path is that of no plain file"
        return name, *stamp_of(about), ""

    for row, written in enumerate(paths):
        name, size_bytes, mtime_ns, why = look(written)
        if why:
            found.refused[row] = why
        found.names.append(name)
        found.paths.append("" if why else name)
        found.files.append((name, size_bytes, mtime_ns))
    return found


def counted(passed_over: Counter[str]) -> str:
    """What was passed over, in one line; of many kinds, the most frequent."""
    kinds = sorted(passed_over.items(), key=lambda kind: (-kind[1], kind[0]))
    shown = sorted((why if why.isprintable() else ascii(why), n) for why, n in kinds[:KINDS_SHOWN])
    rest = sum(n for _, n in kinds[KINDS_SHOWN:])
    return ", ".join(
        [*(f"{n:,} {why}" for why, n in shown), *([f"{rest:,} of other kinds"] if rest else [])]
    )


def scan(top: Path, suffixes: Set[str]) -> tuple[list[tuple[str, int, int]], Counter[str]]:
    """The files of some kinds below a folder, and what was passed over, by what it is.

    Args:
        top: The folder.
        suffixes: Of the files, in lower case.

    Returns:
        ``(path below the folder, bytes, mtime_ns)`` of each, sorted; -1 for those of a link that
        leads nowhere.

    Raises:
        DataError: A folder cannot be read.
    """
    found: list[tuple[str, int, int]] = []
    passed_over: Counter[str] = Counter()

    def unreadable(error: OSError) -> None:
        raise DataError(
            f"cannot read the folder {error.filename}: {error.strerror}; check its rights"
        )

    for base, folders, files in os.walk(top, onerror=unreadable):
        if any(name.startswith("embeddings.h5") for name in files):
            passed_over["folders of embedx output"] += 1
            folders.clear()
            continue
        for name in list(folders):
            hidden = name.startswith(".")
            if hidden or os.path.islink(os.path.join(base, name)):
                folders.remove(name)
                passed_over["hidden folders" if hidden else "linked folders"] += 1
        for name in files:
            path = os.path.join(base, name)
            suffix = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                passed_over["hidden files"] += 1
            elif suffix not in suffixes:
                passed_over[suffix if len(suffix) > 1 else "files without suffix"] += 1
            else:
                stamp = (-1, -1)
                with contextlib.suppress(OSError):  # a dangling link: its own row fails
                    about = os.stat(path)
                    if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
                        passed_over["pipes and devices"] += 1
                        continue
                    stamp = stamp_of(about)
                found.append((os.path.relpath(path, top).replace(os.sep, "/"), *stamp))
    return sorted(found), passed_over


def in_memory(
    items: Any,
    *,
    labels: Sequence[Any] | None = None,
    ids: Sequence[str] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    look: Callable[[Callable[[], "Looked"]], "Looked"] | None = None,
) -> Source:
    """An array or tensor of samples, or a map-style ``Dataset``, as a source.

    Labels that are not given are those in the attribute ``targets`` of a Dataset, in the second
    tensor of a ``TensorDataset`` if that is one whole number a sample, those of the parts of a
    ``Subset`` or ``ConcatDataset``, or else whole numbers in the items. An attribute ``classes``
    names them.

    Of a ``Dataset`` 16 items are read, evenly spread: whatever is told of it is seen on these.

    Args:
        items: Shape ``(n, ...)``, or an object with ``__len__`` and ``__getitem__`` whose items
            are inputs, or tuples that begin with the input and the label.
        labels: n labels of any kind that sorts; the empty text is none.
        ids: n unique texts; where they are not given the paths that an ``ImageFolder`` has, else
            row numbers.
        collate: Makes of a list of b items a tensor ``(b, ...)``, or a tuple or list that begins
            with one; items are stacked where it is not given.
        look: Where the items are read that are looked at, as a function that calls the one it is
            given: in another process, if others will read the rest; here where it is not given.

    Raises:
        ConfigError: ``collate`` gives something else, or not in the order of its items.
        DataError: Empty, or without a length, lengths that differ, labels that do not sort or are
            not those in the items, or an id given twice.
    """
    _check_usable(items)
    n = len(items)
    if n == 0:
        raise DataError("data is empty; give at least one sample")
    kind = type(items).__name__.lower()
    values = _as_array(items)
    if values is not None and values.dtype.hasobject:  # its bytes are addresses of its items
        values = None
    found = _targets(items) if labels is None else None
    looked = None
    if values is None:
        at_it = functools.partial(_look, items, collate, takes_labels=labels is None and not found)
        looked = look(at_it) if look is not None else at_it()
    classes: Sequence[Any] | None = None
    names: list[str] = []
    aloud = [] if looked is None else _told(looked, kind)
    seen: list[int] | None = None
    if labels is None:
        classes = _classes(items)
        if found is not None:
            labels, classes = found
            if looked is not None:
                _require_labels_of_items(labels, looked, kind)
        elif looked is not None and looked.are_labelled:
            seen = list(looked.labels.values())
            if classes is not None and max(seen) < len(classes):
                names = [str(name) for name in classes]
            if -1 in seen:
                aloud.append(f"-1 in the items of {kind} is taken for no label")
        elif looked is not None and looked.are_pairs:
            aloud.append(f"the labels in the items of {kind} are not read; give them as labels=")
    labels, ids = _listed(labels, "labels"), _listed(ids, "ids")
    for what, given in (("labels", labels), ("ids", ids)):
        if given is not None and len(given) != n:
            raise DataError(f"data has {n} samples and {len(given)} {what}; give one each")
    if ids is not None:
        _require_texts(ids, "the ids")
    if ids is not None and len(set(ids)) != n:
        twice, count = Counter(ids).most_common(1)[0]
        raise DataError(f"the id {twice!r} is given {count} times; make every id unique")
    indices: Array | None = None
    numbers: list[int] | None = None
    if labels is not None:
        indices, names, numbers = counted_through(labels, classes)
        if "-1" in names and "-1" not in labels:
            aloud.append(
                f"-1 among the labels of {kind} is a class of that name; for none give texts, ''"
            )
    if ids is None and (ids := _paths(items)) is None and _has_paths(items):
        aloud.append(
            f"{kind} has a __getitem__ of its own, whose items need not be those of its paths: the "
            "ids are row numbers, and labels those of its targets, if it has any; ids= and labels= "
            "give others"
        )
    note = f"{kind}: {n:,} samples, "
    note += "labels in the items" if seen else f"{len(names) or 'no'} classes"
    hashes = None
    if looked is not None:
        fingerprint = looked.fingerprint
        note += f"; whether they changed is seen on {min(n, _DIGEST_ITEMS)} of them"
    else:
        assert values is not None
        fingerprint, hashes = hashed_rows(values, _form(items, values))
    return Source(
        name=kind,
        ids=RowNumbers(n) if ids is None else list(ids),
        read=ItemReader(
            items,
            hashes=hashes,
            gives_all=collate is not None,
            gives_label=bool(seen),
            n_names=len(names),
        ),
        fingerprint=fingerprint,
        item_hashes=hashes,
        labels=indices if names else None,
        label_names=names,
        label_numbers=numbers,
        labels_in_items=bool(seen),
        collate=collate,
        draws=looked is not None and looked.draws,
        notes=(note,),
        warnings=tuple(aloud),
    )


def _check_usable(items: Any) -> None:
    kind = type(items).__name__
    if getattr(items, "is_nested", False):  # which has no shape to ask for
        raise DataError("data is a nested tensor; give a list of tensors, list(data.unbind())")
    if hasattr(items, "iloc") or (hasattr(items, "columns") and hasattr(items, "to_numpy")):
        raise DataError(f"data is a {kind}; give its values, data.to_numpy(), and its labels")
    if isinstance(items, Iterator):
        raise DataError(
            f"data is a {kind}, which has no length and no order to come back to; give a list of "
            "it, list(data), an array or a Dataset"
        )
    is_sequence = hasattr(items, "__len__") and hasattr(items, "__getitem__")
    if not is_sequence or isinstance(items, (str, bytes, Mapping)):
        raise DataError(
            f"data is a {kind}; give a folder, an array, a tensor or a Dataset with __len__ and "
            "__getitem__"
        )
    if hasattr(items, "toarray"):  # of SciPy
        raise DataError(f"data is a sparse {kind}; give data.toarray()")
    if getattr(items, "shape", None) == ():
        raise DataError("data is a single number; give at least one sample")


@dataclasses.dataclass(frozen=True)
class RowNumbers(Sequence[str]):
    """The ids of rows that have no others; as texts in a list they would take 60 bytes each."""

    n: int

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        found = range(self.n)[index]
        return str(found) if isinstance(found, int) else [str(i) for i in found]


def _has_paths(items: Any) -> bool:
    return isinstance(getattr(items, "samples", None), list) and hasattr(items, "root")


def _paths(items: Any) -> list[str] | None:
    """The paths of a Dataset of files, as ``ImageFolder`` keeps them, relative to its root.

    Only where its items are read by the code of torchvision: another may have another order.
    """
    if not str(getattr(type(items).__getitem__, "__module__", "")).startswith("torchvision."):
        return None
    samples, root = getattr(items, "samples", None), getattr(items, "root", None)
    if not isinstance(samples, list) or len(samples) != len(items) or not isinstance(root, str):
        return None
    paths = [sample[0] if isinstance(sample, tuple) and sample else None for sample in samples]
    if not all(isinstance(path, str) for path in paths) or len(set(paths)) != len(paths):
        return None
    relative = [os.path.relpath(str(path), root).replace(os.sep, "/") for path in paths]
    return None if any(path.startswith("../") for path in relative) else relative


def classes_said(label_names: Sequence[str]) -> str:
    """``1 class``, ``10 classes``, ``no classes``."""
    return number_of(len(label_names), "class", "classes") if label_names else "no classes"


def counted_through(
    labels: Sequence[Any], classes: Sequence[Any] | None, *, none: Sequence[Any] = ()
) -> tuple[Array, list[str], list[int] | None]:
    """Labels as indices ``(n,)`` int32 into their sorted names, the names, and their numbers.

    Python tells them apart, not NumPy, to which 1 and "1", or two large numbers, may be one.

    Args:
        labels: n texts, numbers or booleans; the index of the empty text is -1.
        classes: Names that numbers may count through.
        none: What else is no label.

    Raises:
        DataError: They are of several kinds, or one is NaN.
    """
    given = [label for label in labels if label not in none] if none else labels
    for kinds in ((str,), (bool, np.bool_), (int, np.integer), (int, float, np.number)):
        if all(isinstance(label, kinds) for label in given):
            break
    else:
        odd = next((type(v).__name__ for v in given if not isinstance(v, (str, int, float))), "")
        raise DataError(
            f"the labels are {'of kind ' + odd if odd else 'texts and numbers'}; give one text or "
            "one number a sample"
        )
    # Each NaN would be a class of its own.
    if any(isinstance(label, (float, np.floating)) and np.isnan(label) for label in given):
        raise DataError("a label is NaN; give texts, and '' where there is no label")
    unique = sorted(set(given) - {""})
    index = {label: i for i, label in enumerate(unique)}
    names = [str(label) for label in unique]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise DataError(f"two labels are both written {twice!r}; give them as texts that differ")
    if classes is not None and set(unique) <= set(range(len(classes))):
        names = [str(classes[int(label)]) for label in unique]
    are_whole = all(
        type(label) is not bool and isinstance(label, (int, np.integer)) for label in unique
    )
    numbers = [int(label) for label in unique] if are_whole and unique else None
    return np.array([index.get(label, -1) for label in labels], np.int32), names, numbers


def _listed(values: Any, what: str) -> list[Any] | None:
    """Labels or ids of any container as a list."""
    if values is None:
        return None
    if isinstance(values, (Mapping, Set, str, bytes)):
        raise DataError(
            f"{what} is a {type(values).__name__}, which has no entry a sample in order; give a "
            "list, one a sample"
        )
    array = _as_array(values)
    if array is not None and array.ndim != 1:
        raise DataError(f"{what} have shape {array.shape}; give one number or text a sample")
    try:
        return list(values) if array is None else list(array.tolist())
    except TypeError:
        raise DataError(f"{what} is a {type(values).__name__}; give a list, one a sample") from None


# --------------------------------------------------------------------------- labels of a Dataset


def _is_of_torch(items: Any, kind: str) -> bool:
    """Whether it is one of the Datasets of torch, which is not imported to ask."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(items, getattr(torch_data, kind))


def _classes(items: Any) -> Sequence[Any] | None:
    """The names of the classes of a Dataset, or of the one that a Subset is of."""
    classes: Any = getattr(items, "classes", None)
    if classes is None and _is_of_torch(items, "Subset"):
        return _classes(items.dataset)
    is_list = isinstance(classes, (Sequence, np.ndarray)) and not isinstance(classes, str)
    return list(classes) if is_list else None


def _targets(items: Any) -> tuple[list[Any], Sequence[Any] | None] | None:
    """The labels that a Dataset can tell without reading its items, and its classes."""
    n = len(items)
    targets: Any = getattr(items, "targets", None)
    if hasattr(targets, "__len__") and len(targets) == n:
        return _listed(targets, "targets") or [], _classes(items)
    if _is_of_torch(items, "TensorDataset") and len(items.tensors) > 1:
        second = _as_array(items.tensors[1])
        if second is not None and second.ndim == 1 and second.dtype.kind in "iu":
            return second.tolist(), None
    if _is_of_torch(items, "Subset") and (whole := _targets(items.dataset)) is not None:
        return [whole[0][int(i)] for i in items.indices], whole[1]
    if _is_of_torch(items, "ConcatDataset"):
        parts = [_targets(part) for part in items.datasets]
        known = [part for part in parts if part is not None]
        return _joined(known) if len(known) == len(parts) else None
    return None


def _joined(
    parts: Sequence[tuple[list[Any], Sequence[Any] | None]],
) -> tuple[list[Any], Sequence[Any] | None]:
    """Labels one after the other; as texts where the parts have other names for a number."""
    classes = parts[0][1]
    if all(names == classes for _, names in parts):
        return [label for labels, _ in parts for label in labels], classes
    texts = []
    for labels, names in parts:
        known = {str(i): str(name) for i, name in enumerate(names or ())}
        texts += [known.get(str(label), str(label)) for label in labels]
    return texts, None


def _require_labels_of_items(labels: Sequence[Any], looked: "Looked", kind: str) -> None:
    """Refuse labels that a Dataset tells of itself where its items say others.

    Raises:
        DataError: They differ: it may relabel what it gives, or give other numbers than labels.
    """
    for row, label in looked.labels.items():
        told = labels[row]
        if hasattr(told, "item"):  # a number of NumPy or of torch
            told = told.item()
        if isinstance(told, (int, float)) and told != label:
            raise DataError(
                f"the label of row {row} of {kind} is {told} by its targets and {label} in its "
                "item; say which are right with labels=, such as labels=[y for _, y in data]"
            )


def _label(raw: Any, n_names: int = 0) -> int:
    """The label in an item: see :func:`whole_label`."""
    return whole_label(raw[1] if isinstance(raw, tuple) and len(raw) > 1 else None, n_names=n_names)


def whole_label(label: Any, *, n_names: int) -> int:
    """A label as a whole number from -1 on that fits into int32.

    Raises:
        DataError: It is none, or it has no name although there are ``n_names``.
    """
    if not isinstance(label, int):
        array = _as_array(label)
        if array is not None and array.size == 1 and array.dtype.kind in "iu":
            label = array.item()
    if isinstance(label, int) and not isinstance(label, bool):
        if n_names and label >= n_names:
            raise DataError(f"its label {label} is past the {n_names} classes; give labels=")
        if -1 <= label < 2**31:
            return label
    shown = " ".join(repr(label).split())[:40]
    raise DataError(
        f"its label is {shown}, and other items have whole numbers; give them all as labels="
    )


# --------------------------------------------------------------------------- hashes


def require_text(found: str) -> str:
    """A text that is an item, if there is anything in it.

    Raises:
        DataError: It is blank.
    """
    if not found.strip():
        raise DataError("the text is empty")
    return found


def numbers_first(label: str) -> tuple[int, int, str]:
    """A key to sort labels by that are texts: whole numbers by size, then all others."""
    is_number = label.isascii() and label.isdecimal() and len(label) < 19
    return (0, int(label), label) if is_number else (1, 0, label)


def item_hash(data: bytes) -> int:
    """What an item is, in 64 bits: to name those that changed."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _form(item: Any, values: Array) -> str:
    """The type of an array or tensor, also of one that NumPy does not have, such as bfloat16."""
    return str(getattr(item, "dtype", values.dtype)).removeprefix("torch.")


def hashed_rows(values: Array, dtype: str) -> tuple[str, Array]:
    """SHA-256 of an array, and a hash of each of its rows, shape ``(n,)`` uint64.

    Args:
        values: Shape ``(n, ...)``.
        dtype: Its type, in words.
    """
    digest = hashlib.sha256(f"{values.shape} {dtype}".encode())
    form = f"{values.shape[1:]} {dtype}".encode()
    hashes: list[Array] = []
    for block in _blocks(values):
        digest.update(block.tobytes())
        hashes.append(np.array([item_hash(form + row.tobytes()) for row in block], np.uint64))
    return digest.hexdigest(), np.concatenate(hashes)


# What tells a Dataset, where reading all of it would cost a pass.
_DIGEST_ITEMS = 16
_READ_TWICE = 3


@dataclasses.dataclass(frozen=True)
class Looked:
    """What some items of a Dataset tell of it.

    Attributes:
        fingerprint: Hash of them as they enter the model, and of the labels in them if they count.
        labels: The whole numbers that stand where a label does, by row.
        are_labelled: Whether each item that could be read has one.
        are_pairs: Whether some item has anything there.
        draws: Whether reading or collating draws random numbers.
        is_unsteady: Whether an item is another when it is read again, all the same.
    """

    fingerprint: str
    labels: dict[int, int]
    are_labelled: bool
    are_pairs: bool
    draws: bool
    is_unsteady: bool


def _told(looked: Looked, kind: str) -> list[str]:
    """What the user should be told aloud."""
    told = []
    if looked.is_unsteady:
        told.append(
            f"an item of {kind} is another when it is read again: its rows are not the same in "
            "another run, nor after an interruption"
        )
    elif looked.draws:
        told.append(
            f"the items of {kind} are drawn at random: row i is drawn from seed i, in every run"
        )
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        told.append(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: pictures of which the half is missing "
            f"pass for whole in {kind}"
        )
    return told


def _look(items: Any, collate: Callable[[list[Any]], Any] | None, *, takes_labels: bool) -> Looked:
    """Read some items of a Dataset, evenly spread.

    Raises:
        ConfigError: ``collate`` gives no inputs, or not in the order of its items.
        DataError: Items change while others are read, and ``collate`` takes several at once.
    """

    def hashed(make: Callable[[Any], Any], raw: Any) -> bytes:
        digest = hashlib.sha256()
        try:
            _update(digest, str(raw) if isinstance(raw, BaseException) else make(raw))
        except ConfigError:
            raise
        except Exception as error:  # a row that cannot be read fails later, and by itself
            _update(digest, str(error))
        return digest.digest()

    def read(row: int) -> tuple[Any, bytes, bytes]:
        seed_random(row)
        before = _random_states()
        try:
            raw = items[row]
        except (Exception, SystemExit) as error:
            raw = error
        item = entered = hashed(_input, raw)
        if collate is not None:
            entered = hashed(lambda raw: collated(collate([_apart(raw)])), raw)
        drawn.append(_random_states() != before)
        return raw, item, entered

    n = len(items)
    rows = sorted({round(j * (n - 1) / (_DIGEST_ITEMS - 1)) for j in range(_DIGEST_ITEMS)})
    drawn: list[bool] = []
    together: list[bytes] = []
    with random_put_back():
        sample = {row: read(row) for row in rows}
        good = {row: raw for row, (raw, *_) in sample.items() if not isinstance(raw, BaseException)}
        first = next(iter(good), None)
        if collate is not None and first is not None:
            if hashed(_input, good[first]) != sample[first][1]:
                raise DataError(
                    f"item {first} of the Dataset changed when others were read, as if it filled "
                    "one buffer again and again, and the collate_fn takes several at once; let "
                    "__getitem__ give a copy"
                )
            together = _require_order_kept(list(good.values()), collate)
        is_unsteady = any(read(row)[1:] != sample[row][1:] for row in list(good)[:_READ_TWICE])
    labels = {}
    for row, raw in good.items():
        with contextlib.suppress(DataError):
            labels[row] = _label(raw)
    are_labelled = bool(labels) and len(labels) == len(good)
    name = f"{type(items).__module__}.{type(items).__qualname__} {n}"
    digest = hashlib.sha256(name.encode())
    if takes_labels and are_labelled:
        digest.update(f"{list(labels.values())}".encode())
    for _, item, entered in sample.values():
        digest.update(item + entered)
    for slot in together:
        digest.update(slot)
    return Looked(
        fingerprint=digest.hexdigest(),
        labels=labels,
        are_labelled=are_labelled,
        are_pairs=any(isinstance(raw, tuple) and len(raw) > 1 for raw in good.values()),
        draws=any(drawn),
        is_unsteady=is_unsteady,
    )


def copied(item: Any) -> Any:
    """An item that shares nothing with another: a ``collate_fn`` may work in place on both.

    Raises:
        DataError: It cannot be copied.
    """
    try:
        return copy.deepcopy(item)
    except Exception as error:  # each type raises its own
        raise DataError(
            f"an item of the Dataset cannot be copied ({first_line(error)}); let __getitem__ give "
            "plain values, and tensors detached"
        ) from None


def _apart(item: Any) -> Any:
    """A copy of an item, where there can be one."""
    try:
        return copied(item)
    except DataError:
        return item


def _require_order_kept(good: Sequence[Any], collate: Callable[[list[Any]], Any]) -> list[bytes]:
    """Refuse a ``collate_fn`` with an order of its own, as some sort by length.

    Of a batch of one item twice and another once, the slots that are equal are looked at: whatever
    a batch is padded to, and whatever else the function does, they are those of the one item.

    Returns:
        A hash of each slot of these batches: what the function makes of several items.

    Raises:
        ConfigError: Other slots are.
    """

    def slots(*items: Any) -> list[bytes]:
        seed_random(0)
        try:
            inputs = collated(collate([_apart(item) for item in items]))
            parts = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
            arrays = [array for array in map(_as_array, parts) if array is not None]
            found = []
            for i in range(len(items)):
                digest = hashlib.sha256()
                for array in arrays:
                    _update(digest, array[i])
                found.append(digest.digest())
        except ConfigError:
            raise
        except Exception:  # of odd items it may fail, and then their batch does
            return []
        return found

    found = []
    for pair in itertools.pairwise(good):
        for one, other in (pair, pair[::-1]):
            first, second, third = slots(one, one, other) or [b""] * 3
            found += [first, second, third]
            if first != second and third in (first, second):
                raise ConfigError(
                    "the collate_fn of the DataLoader puts the samples of a batch in an order of "
                    "its own, so that rows could not be told whose they are; let it keep their "
                    "order"
                )
    return found


def _update(digest: "hashlib._Hash", item: Any) -> None:
    """Add an item to a hash, by its values as far as they can be read."""
    if isinstance(item, Mapping):
        for key, value in item.items():
            digest.update(f"{key!r}:".encode("utf-8", "backslashreplace"))
            _update(digest, value)
        return
    if isinstance(item, (list, tuple)):
        digest.update(f"{type(item).__name__} {len(item)}:".encode())
        for value in item:
            _update(digest, value)
        return
    values = np.asarray(item) if isinstance(item, Image.Image) else _as_array(item)
    if values is None:
        item = item if isinstance(item, (str, bytes, int, float)) else type(item).__qualname__
        digest.update(repr(item).encode("utf-8", "backslashreplace"))
        return
    if values.dtype.hasobject:  # the bytes would be addresses
        _update(digest, values.tolist())
        return
    digest.update(f"{values.shape} {_form(item, values)}".encode())
    for block in _blocks(values.reshape(1) if values.ndim == 0 else values):
        digest.update(block.tobytes())


def _blocks(values: Any) -> Iterator[Array]:
    """The rows of an array, some megabytes at a time: it may be mapped from a disk."""
    row_bytes = math.prod(values.shape[1:]) * values.dtype.itemsize
    block_rows = max(1, 2**24 // max(1, row_bytes))
    for start in range(0, len(values), block_rows):
        yield np.ascontiguousarray(values[start : start + block_rows])


def _as_array(value: Any) -> Array | None:
    """An array or tensor as an array, anything else as None."""
    if isinstance(value, (np.ndarray, np.generic)):
        require_unmasked(value)
        return np.asarray(value)
    if not hasattr(value, "detach"):  # torch is not imported to ask: tensors have it
        return None
    try:
        if str(value.layout) != "torch.strided" or value.is_nested:
            kind = "nested" if value.is_nested else "sparse"
            raise DataError(f"data is a {kind} tensor; give a dense one, such as data.to_dense()")
        if value.is_quantized:
            raise DataError("data is a quantized tensor; give data.dequantize()")
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
    except NotImplementedError:
        raise DataError(
            "data is a tensor without values (on meta); give one that has them"
        ) from None
    try:
        array: Array = tensor.numpy()
    except TypeError:  # bfloat16, which NumPy does not have, fits into float32
        array = tensor.float().numpy()
    return array


# --------------------------------------------------------------------------- random numbers


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]]:
    """Of each source of random numbers that all code shares: get its state, set it, seed it."""
    known: list[Any] = [
        (random.getstate, random.setstate, random.seed),
        (np.random.get_state, np.random.set_state, np.random.seed),
    ]
    torch: Any = sys.modules.get("torch")  # not imported to ask
    if torch is not None:
        cpu = torch.default_generator
        known.append((cpu.get_state, cpu.set_state, cpu.manual_seed))
    return known


def _random_states() -> list[Any]:
    def plain(state: Any) -> Any:
        if isinstance(state, tuple):
            return tuple(map(plain, state))
        array = _as_array(state)
        return state if array is None else array.tobytes()

    return [plain(get()) for get, _, _ in _generators()]


def seed_random(seed: int) -> None:
    """Let torch (on the CPU), NumPy and Python draw from a seed below 2**32."""
    for _, _, put in _generators():
        put(seed % 2**32)


@contextlib.contextmanager
def random_put_back() -> Iterator[None]:
    """Leave random numbers as they were."""
    before = [(put, get()) for get, put, _ in _generators()]
    try:
        yield
    finally:
        for put, state in before:
            put(state)


# --------------------------------------------------------------------------- items of a Dataset


def collated(batch: Any) -> Any:
    """The inputs in what a ``collate_fn`` gives: a tensor, a mapping, or the first of several.

    Raises:
        ConfigError: There is none.
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(inputs, Mapping) and _as_array(inputs) is None:
        raise ConfigError(
            f"the collate_fn of the DataLoader gives a {type(batch).__name__}; let it give a "
            "tensor, a dict of tensors by the names of the model's arguments, or a tuple that "
            "begins with one"
        )
    return inputs


def picture(raw: Any) -> Image.Image | None:
    """The picture that an item of a Dataset is or begins with, upright and RGB."""
    first = raw[0] if isinstance(raw, tuple) and raw else raw
    return _upright_rgb(first) if isinstance(first, Image.Image) else None


def _input(raw: Any) -> Any:
    first = raw[0] if isinstance(raw, tuple) else raw
    return _upright_rgb(first) if isinstance(first, Image.Image) else first


@dataclasses.dataclass(frozen=True)
class ItemReader:
    """Item i of an array, a tensor or a Dataset, if its row is as it was when it was hashed.

    Attributes:
        items: Where they are.
        hashes: Of the rows of an array, shape ``(n,)``, by :func:`hashed_rows`; None of a Dataset.
        gives_all: Whether an item is given whole, and not the input in it.
        gives_label: Whether the label in an item is given too.
        n_names: How many names there are for labels, 0 for any.
    """

    items: Any
    hashes: Array | None
    gives_all: bool
    gives_label: bool
    n_names: int

    def __call__(self, i: int) -> Any:
        if self.hashes is None:
            raw = self.items[i]
        else:  # as of a file: another process may write a mapped array
            rows = _rows_apart(self.items[i : i + 1])
            values = _as_array(rows)
            assert values is not None
            form = f"{values.shape[1:]} {_form(rows, values)}".encode()
            require_unchanged(item_hash(form + values.tobytes()) == self.hashes[i])
            raw = rows[0]
        item = raw if self.gives_all else _input(raw)
        return (item, _label(raw, self.n_names)) if self.gives_label else item


def _rows_apart(rows: Any) -> Any:
    """Rows of an array or tensor, sharing nothing with it."""
    return rows.clone() if hasattr(rows, "clone") else np.array(rows)
