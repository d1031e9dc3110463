"""Sources of samples: items with ids, labels and metadata, in one fixed order."""

import contextlib
import dataclasses
import hashlib
import os
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from embedx.errors import ConfigError, DataError

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
        read: Item i, an upright RGB picture or a tensor; raises for an item that cannot be read.
        fingerprint: Hash of what the items are: it decides whether rows are still theirs.
        labels: Shape ``(n,)`` int32 indices into ``label_names``, -1 for none; None without labels.
        label_names: Names of the labels.
        metadata: Further columns of n numbers or texts.
        notes: What was found and what was passed over, for the user.
        warnings: What the user should be told aloud.
        root: The folder that holds the items; None where there is none.
    """

    name: str
    ids: Sequence[str]
    read: Callable[[int], Any]
    fingerprint: str
    labels: Array | None = None
    label_names: Sequence[str] = ()
    metadata: dict[str, Array | Sequence[str]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    root: Path | None = None

    def __len__(self) -> int:
        return len(self.ids)


def _limited(n: int, limit: int | None) -> int:
    if limit is not None and limit < 1:
        raise ConfigError(f"data.limit must be at least 1, not {limit}")
    return n if limit is None else min(n, limit)


# --------------------------------------------------------------------------- pictures


def decode_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read a picture as upright 8-bit RGB: first frame, EXIF turned, alpha on white.

    Formats are told by content, not by name. 16-bit grey is scaled, not clipped.

    Args:
        path: A BMP, GIF, JPEG, PNG, PNM, TIFF or WebP file of at most 100 megapixels.

    Raises:
        DataError: Of another format, too large, or pixels whose range is not stated (32-bit,
            float).
        OSError: Missing or truncated.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # our own cap stands before Pillow's warning
        try:
            opened = Image.open(path, formats=FORMATS)
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
            opened.load()
            return _upright_rgb(opened)


def _upright_rgb(opened: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(opened)
    # Pillow widens 16-bit PNM to 32 bits, and its range is still that of 16.
    if image.mode.startswith("I;16") or (image.mode == "I" and opened.format == "PPM"):
        image = Image.fromarray((np.asarray(image) / 257.0).round().astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise DataError(f"mode {image.mode!r} does not state its range; convert it to 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (*ALPHA_ON, 255))
        image = Image.alpha_composite(ground, image)
    return image.convert("RGB")


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
    n = _limited(len(loaded.images), limit)
    pixels = (loaded.images[:n] * (255 / 16)).round().astype(np.uint8)
    return Source(
        name="digits",
        ids=[f"digit-{i:04d}" for i in range(n)],
        read=_PixelReader(pixels),
        fingerprint=hashlib.sha256(pixels.tobytes()).hexdigest(),
        labels=loaded.target[:n].astype(np.int32),
        label_names=[str(name) for name in loaded.target_names],
        notes=(f"digits: {n:,} pictures of 8x8 px, 10 classes",),
    )


@dataclasses.dataclass(frozen=True)
class _PixelReader:
    pixels: Array

    def __call__(self, i: int) -> Image.Image:
        return Image.fromarray(self.pixels[i]).convert("RGB")


def folder(
    root: str, *, limit: int | None = None, labels: Literal["none", "folder"] = "folder"
) -> Source:
    """Every picture below a folder, sorted by its path.

    Ids are paths relative to ``root`` with ``/``; the first level of folders gives the labels.
    Hidden files, other kinds of files, and folders that embedx wrote are passed over and counted.

    Args:
        root: The folder.
        limit: Take the first so many.
        labels: ``folder``, or ``none`` to have no labels.

    Raises:
        DataError: It is missing, is not a folder, or holds no picture.
    """
    if not root:
        raise DataError("data.root is empty; name a folder of pictures")
    top = Path(root).expanduser()
    if not top.is_dir():
        what = "is not a folder" if top.exists() else "is not there"
        raise DataError(f"data.root {root} {what}; name a folder of pictures")
    found, passed_over = _scan(top)
    where = _counted(passed_over)
    if not found:
        raise DataError(
            f"data.root {root} holds no picture ({where or 'it is empty'}); embedx reads "
            + " ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        )
    n = _limited(len(found), limit)
    items = found[:n]
    ids = [name for name, _, _ in items]
    classes = [name.split("/", 1)[0] if "/" in name else "" for name in ids]
    label_names = sorted(set(classes) - {""}) if labels == "folder" else []
    index = {name: i for i, name in enumerate(label_names)}
    digest = hashlib.sha256()
    for name, size_bytes, mtime_ns in items:
        line = f"{name}\0{size_bytes}\0{mtime_ns}\n"
        digest.update(line.encode("utf-8", "backslashreplace"))
    note = f"{root}: {n:,} pictures, {len(label_names) or 'no'} classes"
    if n < len(found):
        note += f", the first of {len(found):,}"
    unlabelled = sum(name == "" for name in classes)
    if label_names and unlabelled:
        note += f", {unlabelled:,} outside any class"
    return Source(
        name=top.resolve().name or "folder",
        ids=ids,
        read=_FileReader(str(top), tuple(ids)),
        fingerprint=digest.hexdigest(),
        labels=np.array([index.get(c, -1) for c in classes], np.int32) if label_names else None,
        label_names=label_names,
        notes=(note, *((f"passed over: {where}",) if where else ())),
        root=top,
    )


@dataclasses.dataclass(frozen=True)
class _FileReader:
    root: str
    ids: tuple[str, ...]

    def __call__(self, i: int) -> Image.Image:
        return decode_image(os.path.join(self.root, *self.ids[i].split("/")))


def _counted(passed_over: Counter[str]) -> str:
    """What was passed over, in one line; of many kinds, the most frequent."""
    kinds = sorted(passed_over.items(), key=lambda kind: (-kind[1], kind[0]))
    shown = sorted((why if why.isprintable() else ascii(why), n) for why, n in kinds[:KINDS_SHOWN])
    rest = sum(n for _, n in kinds[KINDS_SHOWN:])
    return ", ".join(
        [*(f"{n:,} {why}" for why, n in shown), *([f"{rest:,} of other kinds"] if rest else [])]
    )


def _scan(top: Path) -> tuple[list[tuple[str, int, int]], Counter[str]]:
    """``(id, bytes, mtime_ns)`` of each picture, sorted by id; and what was passed over."""
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
            elif suffix not in SUFFIXES:
                passed_over[suffix if len(suffix) > 1 else "files without suffix"] += 1
            else:
                size_bytes = mtime_ns = -1
                with contextlib.suppress(OSError):  # a dangling link: its own row fails
                    about = os.stat(path)
                    if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
                        passed_over["pipes and devices"] += 1
                        continue
                    size_bytes, mtime_ns = about.st_size, about.st_mtime_ns
                relative = os.path.relpath(path, top).replace(os.sep, "/")
                found.append((relative, size_bytes, mtime_ns))
    return sorted(found), passed_over


def in_memory(
    items: Any, *, labels: Sequence[Any] | None = None, ids: Sequence[str] | None = None
) -> Source:
    """An array or tensor of samples, or a map-style ``Dataset``, as a source.

    Args:
        items: Shape ``(n, ...)``, or an object with ``__len__`` and ``__getitem__`` whose items
            are inputs, or tuples that begin with the input and the label.
        labels: n labels of any kind that sorts.
        ids: n unique texts; row numbers where they are not given.

    Raises:
        DataError: Empty, or without a length, lengths that differ, labels that do not sort, or an
            id given twice.
    """
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise DataError(
            f"data is a {type(items).__name__}; give a folder, an array, a tensor or a Dataset "
            "with __len__ and __getitem__"
        )
    if hasattr(items, "iloc"):
        raise DataError("data is a data frame; give its values, data.to_numpy(), and its labels")
    if getattr(items, "shape", None) == ():
        raise DataError("data is a single number; give at least one sample")
    n = len(items)
    if n == 0:
        raise DataError("data is empty; give at least one sample")
    classes = None
    targets: Any = getattr(items, "targets", None)
    if labels is None and hasattr(targets, "__len__") and len(targets) == n:
        labels, classes = targets, getattr(items, "classes", None)
    labels, ids = _listed(labels, "labels"), _listed(ids, "ids")
    for what, given in (("labels", labels), ("ids", ids)):
        if given is not None and len(given) != n:
            raise DataError(f"data has {n} samples and {len(given)} {what}; give one each")
    if ids is not None and not all(isinstance(name, str) for name in ids):
        raise DataError("the ids are not all texts; give ids=list(map(str, ids))")
    if ids is not None and len(set(ids)) != n:
        twice, count = Counter(ids).most_common(1)[0]
        raise DataError(f"the id {twice!r} is given {count} times; make every id unique")
    kind = type(items).__name__.lower()
    names: list[str] = []
    indices: Array | None = None
    if labels is not None:
        try:
            unique, inverse = np.unique(np.asarray(labels), return_inverse=True)
        except (TypeError, ValueError):
            raise DataError("the labels are of kinds that do not sort; give texts") from None
        if inverse.shape != (n,):
            raise DataError(f"labels have shape {inverse.shape}; give one number or text a sample")
        indices = inverse.astype(np.int32)
        names = [str(value) for value in unique.tolist()]
        if classes is not None and set(unique.tolist()) <= set(range(len(classes))):
            names = [str(classes[int(value)]) for value in unique.tolist()]
    note = f"{kind}: {n:,} samples, {len(names) or 'no'} classes"
    aloud = []
    if _as_array(items) is None:
        note += f"; recognised by {min(n, _DIGEST_ITEMS)} of them"
        if labels is None and _is_labelled(items):
            aloud.append(f"the labels in the items of {kind} are not read; give them as labels=")
    return Source(
        name=kind,
        ids=list(ids) if ids is not None else [str(i) for i in range(n)],
        read=_ItemReader(items),
        fingerprint=_digest(items),
        labels=indices,
        label_names=names,
        notes=(note,),
        warnings=tuple(aloud),
    )


_DIGEST_ITEMS = 16


def _listed(values: Any, what: str) -> list[Any] | None:
    """Labels or ids of any container as a list."""
    if values is None:
        return None
    array = _as_array(values)
    try:
        return list(values) if array is None else list(array.tolist())
    except TypeError:
        raise DataError(f"{what} is a {type(values).__name__}; give a list, one a sample") from None


def _is_labelled(items: Any) -> bool:
    with contextlib.suppress(Exception):  # a row that cannot be read fails later, and by itself
        return isinstance(items[0], tuple) and len(items[0]) > 1
    return False


def _digest(items: Any) -> str:
    """Tells an array by its bytes; a Dataset, where reading all would cost a pass, by 16 items."""
    if (values := _as_array(items)) is not None:
        digest = hashlib.sha256()
        _update(digest, values)
        return digest.hexdigest()
    n = len(items)
    digest = hashlib.sha256(f"{type(items).__module__}.{type(items).__qualname__} {n}".encode())
    read = _ItemReader(items)
    for i in sorted({round(j * (n - 1) / (_DIGEST_ITEMS - 1)) for j in range(_DIGEST_ITEMS)}):
        try:
            item = read(i)
        except Exception as error:  # a row that cannot be read fails later, and by itself
            item = str(error)
        values = np.asarray(item) if isinstance(item, Image.Image) else _as_array(item)
        if values is None:
            item = item if isinstance(item, (str, bytes, int, float)) else type(item).__qualname__
            digest.update(repr(item).encode("utf-8", "backslashreplace"))
        else:
            _update(digest, values)
    return digest.hexdigest()


def _as_array(value: Any) -> Array | None:
    """An array or tensor as an array, anything else as None."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if not hasattr(value, "detach"):  # torch is not imported to ask: tensors have it
        return None
    try:
        tensor = value.detach().cpu()
        if str(tensor.layout) != "torch.strided":
            raise DataError("data is a sparse tensor; give data.to_dense()")
    except NotImplementedError:
        raise DataError(
            "data is a tensor without values (on meta); give one that has them"
        ) from None
    try:
        array: Array = tensor.numpy()
    except TypeError:  # bfloat16, which NumPy does not have, fits into float32
        array = tensor.float().numpy()
    return array


def _update(digest: "hashlib._Hash", values: Array) -> None:
    """Add an array to a hash, a block at a time: it may be mapped from a disk."""
    digest.update(f"{values.shape} {values.dtype}".encode())
    rows = values.reshape(1) if values.ndim == 0 else values
    block = max(1, 2**24 // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), block):
        digest.update(np.ascontiguousarray(rows[start : start + block]).tobytes())


@dataclasses.dataclass(frozen=True)
class _ItemReader:
    items: Any

    def __call__(self, i: int) -> Any:
        item = self.items[i]
        item = item[0] if isinstance(item, tuple) else item
        return _upright_rgb(item) if isinstance(item, Image.Image) else item
