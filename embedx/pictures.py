"""Pictures out of files and bytes: upright, 8-bit RGB, whole or refused."""

import contextlib
import io
import os
import threading
import warnings
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from embedx.errors import DataError, first_line

_TIFF_BITS, _TIFF_COMPRESSION, _TIFF_SAMPLES, _TIFF_PLANES, _TIFF_SIGN = 258, 259, 277, 284, 339
_TIFF_PHOTOMETRIC, _TIFF_WHITE_IS_ZERO = 262, 0

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # JPEG takes in MPO
PIXELS_MOST = 100_000_000
ALPHA_ON = (255, 255, 255)


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
            float, signed) or is lost in reading (a transparent colour of 16 bits), or a TIFF of
            planes that Pillow misreads.
        OSError: Missing, truncated, or a PNG whose checksums do not match.
    """
    with open(path, "rb") as file:
        return decode_file(file)


def decode_bytes(data: bytes) -> Image.Image:
    """Read a picture from memory, as :func:`decode_image` does from a file.

    Args:
        data: What such a file holds.

    Raises:
        DataError: As there.
        OSError: As there.
    """
    return decode_file(io.BytesIO(data))


def decode_file(file: IO[bytes]) -> Image.Image:
    """Read a picture from an open file, as :func:`decode_image` does.

    Args:
        file: At its beginning; it stays open.

    Raises:
        DataError: As there.
        OSError: As there.
    """
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
            return upright_rgb(opened, in_place=True)


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


def upright_rgb(opened: Image.Image, *, in_place: bool = False) -> Image.Image:
    """A picture turned as its EXIF says, in 8-bit RGB; a copy, unless it may be turned in place.

    What Pillow notes beside the pixels, the EXIF and a transparent colour, outlives what is done to
    these: it counts for a picture as its file gave it, and one that was converted, turned or cut
    since is taken as its pixels are.

    Raises:
        DataError: Its pixels do not state their range, or its transparent colour is lost.
    """
    is_as_read = opened.format is not None
    if opened.format == "TIFF":
        _require_read_right(opened)
    transparent = _transparent(opened) if is_as_read or opened.mode == "P" else None
    image = opened
    if not is_as_read:
        image = opened.copy()
        if transparent is None:
            image.info.pop("transparency", None)
    elif in_place:
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
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        ground = Image.new("RGBA", image.size, (*ALPHA_ON, 255))
        image = Image.alpha_composite(ground, image)
    if in_place and image.mode == "RGB":  # to convert it would copy it
        image.load()
        return image
    return image.convert("RGB")


def _require_read_right(opened: Image.Image) -> None:
    """Raise DataError for a TIFF of which Pillow makes other pixels: held to tifffile, 2026."""
    tags: Any = getattr(opened, "tag_v2", {})
    n_samples = tags.get(_TIFF_SAMPLES, 1)
    is_plain = tags.get(_TIFF_COMPRESSION, 1) == 1
    is_deep = max(tags.get(_TIFF_BITS, (1,))) > 8
    is_misread = n_samples == 2 or (n_samples > 1 and is_deep and is_plain)
    if tags.get(_TIFF_PLANES, 1) == 2 and is_misread:
        raise DataError(
            f"a TIFF of {n_samples} planes one after the other is not read at this depth; save it "
            "with the samples of a pixel together (contiguous)"
        )
    if opened.mode == "L" and 2 in tags.get(_TIFF_SIGN, (1,)):
        raise DataError("8 bits with a sign do not state their range; convert them")


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


def thumbnail(image: Image.Image, side_px: int) -> npt.NDArray[Any]:
    """A square miniature, the whole picture centred on white: uint8 ``(side, side, 3)``."""
    scale = side_px / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    # A handful of pixels is shown as pixels; anything larger is averaged down.
    resample = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    small = image.resize(size, resample, reducing_gap=2.0 if scale < 1 else None)
    tile = Image.new("RGB", (side_px, side_px), ALPHA_ON)
    tile.paste(small, ((side_px - size[0]) // 2, (side_px - size[1]) // 2))
    return np.asarray(tile)


def picture(raw: Any) -> Image.Image | None:
    """The picture that an item of a Dataset is or begins with, upright and RGB."""
    first = raw[0] if isinstance(raw, tuple) and raw else raw
    return upright_rgb(first) if isinstance(first, Image.Image) else None
