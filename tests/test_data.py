"""Sources of samples: pictures of every kind, folders of every kind, objects in memory."""

import dataclasses
import io
import itertools
import os
import re
import shutil
import struct
import sys
import unicodedata
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageFile
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import embedx
from embedx import data, sources
from embedx.errors import ConfigError, DataError
from embedx.models import Preprocess
from embedx.pictures import SUFFIXES, decode_bytes, decode_image, thumbnail, upright_rgb

RGB = np.array([[[10, 20, 30], [40, 50, 60], [70, 80, 90]], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]])
PICTURE = Image.fromarray(RGB.astype(np.uint8))
linux = pytest.mark.skipif(sys.platform != "linux", reason="file names here are any bytes")


def _pixels(path: Path) -> list[Any]:
    image = decode_image(path)
    assert image.mode == "RGB"
    return np.asarray(image).tolist()


def _png(
    width: int,
    height: int,
    *,
    color: int,
    bits: int,
    rows: bytes,
    transparent: tuple[int, ...] = (),
) -> bytes:
    """A PNG written by hand: it may declare what Pillow does not write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    if transparent:
        clear = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))
    else:
        clear = b""
    end = clear + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + end


# --------------------------------------------------------------------------- pictures


def _cmyk(c: int, m: int, y: int, k: int) -> list[float]:
    return [(255 - ink) * (255 - k) / 255 for ink in (c, m, y)]


def _ycbcr(y: int, cb: int, cr: int) -> list[float]:
    """ITU-R BT.601 as JPEG uses it (JFIF 1.02)."""
    cb, cr = cb - 128, cr - 128
    return [y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb]


def _cie(lightness: int) -> list[float]:
    """A neutral of CIELAB in sRGB."""
    y = ((100 * lightness / 255 + 16) / 116) ** 3
    return [255 * (1.055 * y ** (1 / 2.4) - 0.055)] * 3


def _on_white(color: tuple[int, int, int], alpha: int) -> list[float]:
    return [255 + (channel - 255) * alpha / 255 for channel in color]


COLORS = [(255, 0, 0), (30, 120, 200), (250, 240, 10)]
ALPHAS = [0, 51, 255]
LOSSLESS = "bmp gif png ppm tif webp"
# Mode of Pillow -> formats that hold it, three pixels of it, and what they are in RGB.
MODES: dict[str, tuple[str, list[Any], list[Any]]] = {
    "1": (f"{LOSSLESS} jpg", [0, 255, 0], [[0] * 3, [255] * 3, [0] * 3]),
    "L": (f"{LOSSLESS} jpg", [0, 100, 255], [[0] * 3, [100] * 3, [255] * 3]),
    "P": ("bmp gif png tif webp", [2, 0, 1], [COLORS[2], COLORS[0], COLORS[1]]),
    "PA": ("tif webp", [(i, ALPHAS[i]) for i in range(3)],
           [_on_white(COLORS[i], ALPHAS[i]) for i in range(3)]),
    "LA": ("png tif webp", [(40, alpha) for alpha in ALPHAS],
           [_on_white((40, 40, 40), alpha) for alpha in ALPHAS]),
    "RGB": (f"{LOSSLESS} jpg", COLORS, COLORS),
    "RGBX": ("tif webp jpg", [(*color, 9) for color in COLORS], COLORS),
    "RGBA": ("png tif webp", [(*COLORS[i], ALPHAS[i]) for i in range(3)],
             [_on_white(COLORS[i], ALPHAS[i]) for i in range(3)]),
    "CMYK": ("tif jpg", [(255, 0, 0, 0), (0, 100, 200, 50), (9, 9, 9, 255)],
             [_cmyk(255, 0, 0, 0), _cmyk(0, 100, 200, 50), _cmyk(9, 9, 9, 255)]),
    "YCbCr": ("tif jpg", [(100, 128, 128), (90, 160, 100), (150, 100, 160)],
              [_ycbcr(100, 128, 128), _ycbcr(90, 160, 100), _ycbcr(150, 100, 160)]),
    "LAB": ("tif", [(64, 128, 128), (128, 128, 128), (255, 128, 128)],
            [_cie(64), _cie(128), _cie(255)]),
    "I;16": ("png tif ppm", [0, 257 * 77, 65535], [[0] * 3, [77] * 3, [255] * 3]),
    "I;16B": ("png tif", [0, 257 * 77, 65535], [[0] * 3, [77] * 3, [255] * 3]),
    "I": ("ppm", [0, 257 * 77, 65535], [[0] * 3, [77] * 3, [255] * 3]),
}  # fmt: skip
REFUSED = {"I": "tif", "F": "tif ppm"}


def _blocks(mode: str, values: list[Any]) -> Image.Image:
    """One block of 16x16 px a value: JPEG keeps those apart."""
    if mode in ("P", "PA"):
        image = Image.new(mode, (48, 16))
        image.putpalette([channel for color in COLORS for channel in color])
    elif mode == "I;16B":
        deep = np.repeat(np.array(values, ">u2"), 16)[None].repeat(16, 0)
        return Image.frombytes(mode, (48, 16), deep.tobytes())
    else:
        image = Image.new(mode, (48, 16))
    for i, value in enumerate(values):
        for x in range(16 * i, 16 * i + 16):
            for y in range(16):
                image.putpixel((x, y), value)
    return image


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_of_any_mode_comes_out_as_its_colours_on_white(tmp_path: Path, mode: str) -> None:
    suffixes, values, expected = MODES[mode]
    for suffix in suffixes.split():
        path = tmp_path / f"a.{suffix}"
        extra: dict[str, Any] = {"jpg": {"quality": 98, "subsampling": 0}}.get(suffix, {})
        extra = {"lossless": True, "exact": True} if suffix == "webp" else extra
        _blocks(mode, values).save(path, **extra)
        decoded = np.array(_pixels(path))[8, 8::16]
        tolerance = 4 if suffix == "jpg" or mode in ("LAB", "YCbCr") else 1
        assert np.abs(decoded - np.clip(expected, 0, 255)).max() <= tolerance, (mode, suffix)


def test_the_modes_tested_are_all_that_pillow_writes_in_the_formats_that_are_read(
    tmp_path: Path,
) -> None:
    every = "1 L P PA LA La RGB RGBA RGBa RGBX CMYK YCbCr LAB HSV I F I;16 I;16B I;16L I;16N"
    found = set()
    for mode in every.split():
        for suffix in SUFFIXES:
            path = tmp_path / f"a{suffix}"
            try:
                Image.new(mode, (16, 16)).save(path)
            except (OSError, KeyError, ValueError):
                continue
            with Image.open(path) as opened:
                if opened.mode == mode:
                    found.add((mode, suffix.removeprefix(".")))
    names = {"jpeg": "jpg", "tiff": "tif", "pgm": "ppm", "pbm": "ppm"}
    known = {(mode, s) for mode, (suffixes, *_) in MODES.items() for s in suffixes.split()}
    known |= {(mode, s) for mode, suffixes in REFUSED.items() for s in suffixes.split()}
    assert len(found) > 20
    assert {(mode, names.get(suffix, suffix)) for mode, suffix in found} <= known


@pytest.mark.parametrize("suffix", ["png", "bmp", "ppm", "tif", "tiff", "webp"])
def test_lossless_format_gives_back_its_pixels(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    PICTURE.save(path, **({"lossless": True} if suffix == "webp" else {}))
    assert _pixels(path) == RGB.tolist()


def test_png_opens_in_a_fresh_process_whatever_was_opened_before(tmp_path: Path) -> None:
    import subprocess

    PICTURE.save(tmp_path / "a.png")
    code = (
        "import sys; from embedx.pictures import decode_image;"
        "print(decode_image(sys.argv[1]).getpixel((1, 0)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.png")], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("(40, 50, 60)\n", "")


def test_jpeg_and_its_two_picture_kind_give_nearly_their_pixels(tmp_path: Path) -> None:
    smooth = Image.new("RGB", (16, 16), (200, 100, 50))
    smooth.save(tmp_path / "a.jpg", quality=95)
    smooth.save(
        tmp_path / "b.jpg",
        format="MPO",
        save_all=True,
        append_images=[Image.new("RGB", (16, 16), "blue")],
    )
    for name in ("a.jpg", "b.jpg"):
        assert np.abs(np.array(_pixels(tmp_path / name)) - (200, 100, 50)).max() <= 3


def test_format_is_told_by_content_and_not_by_suffix(tmp_path: Path) -> None:
    PICTURE.save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.jpg")
    assert _pixels(tmp_path / "a.jpg") == RGB.tolist()


def test_palette_gives_its_colours(tmp_path: Path) -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([255, 0, 0, 0, 255, 0])
    indexed.putpixel((1, 0), 1)
    indexed.save(tmp_path / "a.png")
    indexed.save(tmp_path / "a.gif")
    indexed.save(tmp_path / "clear.png", transparency=0)
    indexed.save(tmp_path / "clear.gif", transparency=0)
    indexed.save(tmp_path / "half.png", transparency=bytes([128, 255]))
    for name in ("a.png", "a.gif"):
        assert _pixels(tmp_path / name) == [[[255, 0, 0], [0, 255, 0]]]
    for name in ("clear.png", "clear.gif"):
        assert _pixels(tmp_path / name) == [[[255, 255, 255], [0, 255, 0]]]
    assert _pixels(tmp_path / "half.png") == [[[255, 127, 127], [0, 255, 0]]]


def test_grey_becomes_three_equal_channels(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 100, 255]], np.uint8)).save(tmp_path / "l.png")
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "1.png")
    assert _pixels(tmp_path / "l.png") == [[[0] * 3, [100] * 3, [255] * 3]]
    assert _pixels(tmp_path / "1.png") == [[[255] * 3, [0] * 3]]


def test_alpha_is_laid_on_white(tmp_path: Path) -> None:
    rgba = np.array([[[0, 0, 255, 0], [0, 0, 255, 255], [0, 0, 255, 51]]], np.uint8)
    Image.fromarray(rgba).save(tmp_path / "rgba.png")
    Image.fromarray(rgba).save(tmp_path / "rgba.webp", lossless=True, exact=True)
    Image.fromarray(rgba).save(tmp_path / "rgba.tif")
    for name in ("rgba.png", "rgba.webp", "rgba.tif"):
        assert _pixels(tmp_path / name) == [[[255, 255, 255], [0, 0, 255], [204, 204, 255]]]
    grey = Image.fromarray(np.array([[[0, 0], [0, 255], [0, 51]]], np.uint8), "LA")
    grey.save(tmp_path / "la.png")
    assert _pixels(tmp_path / "la.png") == [[[255] * 3, [0] * 3, [204] * 3]]


def test_transparent_colour_of_a_plain_png_is_laid_on_white(tmp_path: Path) -> None:
    PICTURE.save(tmp_path / "rgb.png", transparency=(40, 50, 60))
    Image.fromarray(np.array([[0, 100]], np.uint8)).save(tmp_path / "l.png", transparency=100)
    assert _pixels(tmp_path / "rgb.png")[0][1] == [255, 255, 255]
    assert _pixels(tmp_path / "rgb.png")[0][0] == [10, 20, 30]
    assert _pixels(tmp_path / "l.png") == [[[0] * 3, [255] * 3]]


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    deep = np.array([[0, 257, 32768, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "a.png")
    Image.fromarray(deep).save(tmp_path / "a.tif")
    Image.frombytes("I;16B", (4, 1), deep.astype(">u2").tobytes()).save(tmp_path / "big.tif")
    (tmp_path / "a.pgm").write_bytes(b"P5 4 1 65535\n" + deep.astype(">u2").tobytes())
    for name in ("a.png", "a.tif", "big.tif", "a.pgm"):
        assert _pixels(tmp_path / name) == [[[0] * 3, [1] * 3, [128] * 3, [255] * 3]], name
    row = b"\0" + struct.pack(">HHH", 65535, 257, 32768)
    (tmp_path / "rgb.png").write_bytes(_png(1, 1, color=2, bits=16, rows=row))
    assert _pixels(tmp_path / "rgb.png") == [[[255, 1, 128]]]
    row = b"\0" + struct.pack(">HHHH", 0, 65535, 0, 257 * 51)
    (tmp_path / "rgba.png").write_bytes(_png(1, 1, color=6, bits=16, rows=row))
    assert _pixels(tmp_path / "rgba.png") == [[[204, 255, 204]]]
    row = b"\0" + struct.pack(">HH", 0, 257 * 51)
    (tmp_path / "la.png").write_bytes(_png(1, 1, color=4, bits=16, rows=row))
    assert _pixels(tmp_path / "la.png") == [[[204] * 3]]


@pytest.mark.parametrize("mode", REFUSED)
def test_pixels_without_a_stated_range_are_refused(tmp_path: Path, mode: str) -> None:
    for suffix in REFUSED[mode].split():
        Image.new(mode, (2, 2), 7).save(tmp_path / f"a.{suffix}")
        with pytest.raises(DataError, match=f"mode '{mode}' does not state its range"):
            decode_image(tmp_path / f"a.{suffix}")


def test_cmyk_is_converted(tmp_path: Path) -> None:
    Image.new("CMYK", (2, 2), (255, 0, 0, 0)).save(tmp_path / "a.tif")
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a.jpg", quality=95)
    for name in ("a.tif", "a.jpg"):
        assert np.abs(np.array(_pixels(tmp_path / name)) - (0, 255, 255)).max() <= 3


@pytest.mark.parametrize("suffix", ["png", "tif", "webp", "jpg"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_turned_upright(tmp_path: Path, suffix: str, orientation: int) -> None:
    upright = np.kron(np.array([[0, 60, 120], [180, 210, 240]], np.uint8), np.ones((8, 8)))
    # How a camera stores the upright scene under each orientation, from the EXIF standard.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored).astype(np.uint8)).convert("RGB")
    path = tmp_path / f"a.{suffix}"
    image.save(path, exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    decoded = np.asarray(decode_image(path)).astype(int)
    assert decoded.shape == (16, 24, 3)
    assert np.abs(decoded - upright[..., None]).max() <= (8 if suffix == "jpg" else 0)


@pytest.mark.parametrize("body", [b"", b"garbage", b"II*\0\x08\0\0\0\xff\xff"])
def test_damaged_exif_does_not_cost_the_picture(tmp_path: Path, body: bytes) -> None:
    Image.new("RGB", (8, 8), (200, 100, 50)).save(tmp_path / "a.jpg", exif=b"Exif\0\0" + body)
    assert np.abs(np.array(_pixels(tmp_path / "a.jpg")) - (200, 100, 50)).max() <= 3


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path, suffix: str) -> None:
    first, second = (Image.new("RGB", (4, 4), color) for color in ("red", "blue"))
    extra = {"lossless": True} if suffix == "webp" else {}
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=[second], **extra)
    assert _pixels(tmp_path / f"a.{suffix}") == [[[255, 0, 0]] * 4] * 4


def test_one_pixel_is_a_picture(tmp_path: Path) -> None:
    for suffix in ("png", "gif", "bmp", "tif"):
        Image.new("RGB", (1, 1), (9, 9, 9)).save(tmp_path / f"a.{suffix}")
        assert _pixels(tmp_path / f"a.{suffix}") == [[[9, 9, 9]]]


@pytest.mark.parametrize(
    "content",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
        b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>',
        b"%PDF-1.4\n",
        b"GIF",
        b"",
    ],
)
def test_other_formats_under_the_name_of_a_picture_are_refused(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises((DataError, OSError), match=r"not a picture of the formats|truncated"):
        decode_image(tmp_path / "a.jpg")


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "bmp", "tif", "webp", "ppm"])
def test_truncated_picture_is_refused(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(OSError):
        decode_image(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "bmp", "tif", "webp", "ppm"])
def test_truncated_picture_is_refused_though_another_library_allows_half_ones(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(OSError):
        decode_image(path)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    told = data.in_memory([torch.zeros(2)]).warnings
    assert [line.split(":")[0] for line in told] == ["PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set"]


def _tiff(values: list[int], *, bits: int, white_is_zero: bool) -> bytes:
    """A row of grey as a TIFF written by hand."""
    packed = sum(v << (bits * i) for i, v in enumerate(reversed(values)))
    body = packed.to_bytes(bits * len(values) // 8, "big")
    if bits == 16:
        body = np.array(values, "<u2").tobytes()
    tags = [
        *((256, len(values)), (257, 1), (258, bits), (259, 1), (262, 0 if white_is_zero else 1)),
        *((273, 8), (277, 1), (278, 1), (279, len(body))),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    start = struct.pack("<2sHI", b"II", 42, 8 + len(body))
    return start + body + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(
    ("bits", "white_is_zero"), [(8, False), (8, True), (12, False), (16, False), (16, True)]
)
def test_grey_of_a_tiff_goes_from_its_black_to_its_white(
    tmp_path: Path, bits: int, white_is_zero: bool
) -> None:
    white = 2**bits - 1
    values = [0, white // 4, white // 2, white]
    (tmp_path / "a.tif").write_bytes(_tiff(values, bits=bits, white_is_zero=white_is_zero))
    light = [(white - v if white_is_zero else v) * 255 / white for v in values]
    got = np.array(_pixels(tmp_path / "a.tif"))[0]
    assert np.abs(got - np.array(light)[:, None]).max() <= 0.5


def _tiff_of_planes(
    values: npt.NDArray[Any],
    *,
    is_together: bool = False,
    is_packed: bool = False,
    sign: int = 1,
    alpha: int = 2,
) -> bytes:
    """A row of colours ``(w, c)`` as a TIFF written by hand, a plane a sample or all together."""
    width, n_samples = values.shape
    parts = [values] if is_together else list(values.T)
    strips = [np.ascontiguousarray(part).tobytes() for part in parts]
    if is_packed:
        strips = [zlib.compress(strip) for strip in strips]
    bits = values.dtype.itemsize * 8
    starts = list(itertools.accumulate(map(len, strips), initial=8))
    tags = [
        *((256, [width]), (257, [1]), (258, [bits] * n_samples), (259, [8 if is_packed else 1])),
        *((262, [2 if n_samples > 2 else 1]), (273, starts[:-1]), (277, [n_samples]), (278, [1])),
        *((279, [len(strip) for strip in strips]), (284, [1 if is_together else 2])),
        *((338, [alpha]) for _ in range(n_samples % 2 == 0)),
        (339, [sign] * n_samples),
    ]
    lists = at = starts[-1]
    entries = arrays = b""
    for tag, numbers in tags:
        packed = struct.pack(f"<{len(numbers)}I", *numbers)
        if len(numbers) > 1:
            packed, arrays = struct.pack("<I", at), arrays + packed
            at = lists + len(arrays)
        entries += struct.pack("<HHI", tag, 4, len(numbers)) + packed
    start = struct.pack("<2sHI", b"II", 42, at)
    return start + b"".join(strips) + arrays + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_a_tiff_of_which_pillow_makes_other_pixels_fails(tmp_path: Path) -> None:
    rgb = np.array([[0, 50, 255], [255, 100, 3], [9, 200, 30]], np.uint8)
    deep = rgb.astype("<u2") * 257
    for values in (rgb, deep):
        for is_together, is_packed in itertools.product((False, True), repeat=2):
            path = tmp_path / "a.tif"
            path.write_bytes(_tiff_of_planes(values, is_together=is_together, is_packed=is_packed))
            if values is deep and not is_together and not is_packed:
                with pytest.raises(
                    DataError, match="a TIFF of 3 planes one after the other is not"
                ):
                    decode_image(path)
            else:
                assert np.array_equal(np.array(decode_image(path))[0], rgb)
    grey = np.array([[50, 255], [100, 255]], np.uint8)
    together = decode_bytes(_tiff_of_planes(grey, is_together=True, is_packed=True))
    assert np.array(together)[0, :, 0].tolist() == [50, 100]
    half = np.array([[50, 127]], np.uint8)  # of which half is there already
    associated = decode_bytes(_tiff_of_planes(half, is_together=True, alpha=1))
    assert abs(int(np.array(associated)[0, 0, 0]) - (50 + 128)) <= 1
    for is_packed in (False, True):
        with pytest.raises(DataError, match="a TIFF of 2 planes"):
            decode_bytes(_tiff_of_planes(grey, is_packed=is_packed))
    with pytest.raises(DataError, match="8 bits with a sign"):
        decode_bytes(_tiff_of_planes(grey[:, :1], sign=2))
    opened = Image.open(io.BytesIO(_tiff_of_planes(deep)))
    with pytest.raises(DataError, match="a TIFF of 3 planes"):  # a Dataset's own
        data.in_memory(_Dataset([opened, opened])).read(0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_the_transparent_grey_of_a_png_of_any_depth_is_laid_on_white(
    tmp_path: Path, bits: int
) -> None:
    most = 2**bits - 1
    values = [1, 0, min(2, most), most] * 2  # with its nearest, which is another grey
    packed = sum(v << (bits * i) for i, v in enumerate(reversed(values)))
    rows = b"\0" + packed.to_bytes(bits, "big")
    for transparent in sorted(set(values)):
        made = _png(8, 1, color=0, bits=bits, rows=rows, transparent=(transparent,))
        (tmp_path / "a.png").write_bytes(made)
        wanted = [255 if v == transparent else round(v * 255 / most) for v in values]
        assert _pixels(tmp_path / "a.png") == [[[v] * 3 for v in wanted]]


def test_the_transparent_colour_of_sixteen_bits_is_refused(tmp_path: Path) -> None:
    rows = b"\0" + struct.pack(">HHH", 0, 0, 6)  # of the high bytes it would be that colour
    made = _png(1, 1, color=2, bits=16, rows=rows, transparent=(0, 0, 5))
    (tmp_path / "a.png").write_bytes(made)
    with pytest.raises(DataError, match="a transparent colour of 16 bits is not read; convert"):
        decode_image(tmp_path / "a.png")


@pytest.mark.parametrize(("width", "height"), [(20_000, 20_000), (12_500, 8_001)])
def test_too_many_pixels_are_refused_before_they_are_read(
    tmp_path: Path, width: int, height: int
) -> None:
    (tmp_path / "a.png").write_bytes(_png(width, height, color=2, bits=8, rows=b""))
    with pytest.raises(DataError, match=r"pixels; shrink it"):
        decode_image(tmp_path / "a.png")


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        decode_image(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("size", "inner"),
    [
        ((100, 100), (0, 0, 32, 32)),
        ((100, 50), (0, 8, 32, 24)),
        ((50, 100), (8, 0, 24, 32)),
        ((8, 8), (0, 0, 32, 32)),
        ((4, 2), (0, 8, 32, 24)),
        ((1, 1), (0, 0, 32, 32)),
        ((5000, 1), (0, 15, 32, 16)),
    ],
)
def test_thumbnail_shows_the_whole_picture_centred_on_white(
    size: tuple[int, int], inner: tuple[int, int, int, int]
) -> None:
    tile = thumbnail(Image.new("RGB", size, (10, 20, 30)), 32)
    expected = np.full((32, 32, 3), 255, np.uint8)
    left, top, right, bottom = inner
    expected[top:bottom, left:right] = (10, 20, 30)
    assert tile.dtype == np.uint8
    assert np.array_equal(tile, expected)


def test_thumbnail_averages_when_it_shrinks_and_repeats_when_it_grows() -> None:
    board = np.indices((64, 64)).sum(axis=0) % 2 * 255
    small = thumbnail(Image.fromarray(board.astype(np.uint8)).convert("RGB"), 32)
    assert set(np.unique(small)) <= {127, 128}
    grown = thumbnail(PICTURE.crop((0, 0, 2, 2)), 4)
    assert np.array_equal(grown, np.kron(RGB[:2, :2], np.ones((2, 2, 1))))


# --------------------------------------------------------------------------- folders


def _put(root: Path, *names: str) -> None:
    """A picture under each name; its red value is the number of the name."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (number, 0, 0)).save(path, format="PNG")


def _labels(source: sources.Source) -> list[str | None]:
    assert source.labels is not None
    return [source.label_names[i] if i >= 0 else None for i in source.labels]


def test_folder_is_read_recursively_in_the_order_of_its_paths(tmp_path: Path) -> None:
    names = ["b/2.png", "a.b.c.png", "b/1.png", "b/deep/er/3.png", "A.png", "b.png"]
    _put(tmp_path, *names)
    source = data.folder(str(tmp_path))
    assert list(source.ids) == sorted(names)
    assert len(source) == 6
    assert [source.read(i).getpixel((0, 0))[0] for i in range(6)] == [
        names.index(name) for name in sorted(names)
    ]
    assert source.name == tmp_path.name


def test_first_level_of_folders_gives_the_labels(tmp_path: Path) -> None:
    _put(tmp_path, "cat/1.png", "cat/old/2.png", "dog/1.png", "loose.png")
    source = data.folder(str(tmp_path))
    assert list(source.ids) == ["cat/1.png", "cat/old/2.png", "dog/1.png", "loose.png"]
    assert _labels(source) == ["cat", "cat", "dog", None]
    assert source.labels is not None
    assert source.labels.dtype == np.int32
    assert source.notes == (f"{tmp_path}: 4 pictures, 2 classes, 1 outside any class",)


def test_flat_folder_has_no_labels_and_labels_can_be_left_out(tmp_path: Path) -> None:
    _put(tmp_path / "flat", "1.png", "2.png")
    _put(tmp_path / "classes", "a/1.png", "b/2.png")
    flat = data.folder(str(tmp_path / "flat"))
    bare = data.folder(str(tmp_path / "classes"), labels="none")
    for source in (flat, bare):
        assert source.labels is None
        assert list(source.label_names) == []
        assert "no classes" in source.notes[0]


@pytest.mark.parametrize(
    ("labels", "expected", "note"),
    [
        ("(cat|dog)", ["cat", "dog", "dog", None], "4 pictures, 2 classes, 1 unlabelled"),
        (r"^(\w+)-", ["img", "img", None, "img"], "4 pictures, 1 class, 1 unlabelled"),
        (r"(\d)-(?P<label>\d+)", ["1", "10", "2", None], "4 pictures, 3 classes, 1 unlabelled"),
        ("^(img)?.*$", ["img", "img", None, "img"], "4 pictures, 1 class, 1 unlabelled"),
        ("(?i)/(DOG)|(?P<label>cat)", ["cat", None, None, None], "1 class, 3 unlabelled"),
        (r"\.(...)$", ["png"] * 4, "4 pictures, 1 class"),
    ],
)
def test_a_regular_expression_finds_the_label_in_the_path(
    tmp_path: Path, labels: str, expected: list[str | None], note: str
) -> None:
    _put(tmp_path, "img-cat/1-1.png", "img-dog/1-10.png", "old/dog/2-2.png", "img-z.png")
    source = data.folder(str(tmp_path), labels=labels)
    assert list(source.ids) == sorted(source.ids)
    got = dict(zip(source.ids, _labels(source), strict=True))
    names = ["img-cat/1-1.png", "img-dog/1-10.png", "old/dog/2-2.png", "img-z.png"]
    assert [got[name] for name in names] == expected
    assert list(source.label_names) == sorted({name for name in expected if name})
    assert source.notes[0].endswith(note)


@pytest.mark.parametrize(
    ("labels", "kind", "why"),
    [
        ("flder", ConfigError, "'flder' has no group"),
        ("", ConfigError, "'' has no group"),
        ("(cat", ConfigError, r"is no regular expression (missing ), unterminated subpattern"),
        ("*", ConfigError, "is no regular expression (nothing to repeat"),
        ("(bird)", DataError, "'(bird)' is found in none of the 2 ids, such as 'a/1.png'"),
        ("(bird)?", DataError, "is found in none of the 2 ids"),
        ("(bird)|a", DataError, "is found in none of the 2 ids"),
    ],
)
def test_labels_that_are_none_of_the_choices_are_refused_with_the_choices(
    tmp_path: Path, labels: str, kind: type[Exception], why: str
) -> None:
    _put(tmp_path, "a/1.png", "a/2.png")
    with pytest.raises(kind) as caught:
        data.folder(str(tmp_path), labels=labels)
    message = str(caught.value)
    assert why in message
    assert message.startswith(f"data.labels={labels!r} ")
    assert message.endswith(
        "; choose none, folder, or a regular expression whose group is the label, such as "
        "labels='(cat|dog)'"
    )
    assert len(message.splitlines()) == 1


def test_suffixes_count_in_any_case_and_other_files_are_passed_over_and_counted(
    tmp_path: Path,
) -> None:
    _put(tmp_path, "a.PNG", "b.Jpeg", "c.webp", "d.TIFF", ".hidden.png", ".git/e.png")
    for name in ("notes.txt", "more.txt", "README", "table.csv", "odd.", "x.svg"):
        (tmp_path / name).write_text("x")
    source = data.folder(str(tmp_path))
    assert list(source.ids) == ["a.PNG", "b.Jpeg", "c.webp", "d.TIFF"]
    assert source.notes[1] == (
        "passed over: 1 .csv, 1 .svg, 2 .txt, 2 files without suffix, 1 hidden files, "
        "1 hidden folders"
    )


def test_note_of_many_kinds_stays_one_short_line(tmp_path: Path) -> None:
    _put(tmp_path, "a.png")
    for number in range(200):
        (tmp_path / f"x.{number:03d}").touch()
    (tmp_path / "y.b\nc").touch()
    (tmp_path / "z.b\nc").touch()
    (_, note) = data.folder(str(tmp_path)).notes
    assert len(note.splitlines()) == 1
    assert len(note) < 200
    assert r"2 '.b\nc'" in note
    assert note.endswith("193 of other kinds")


def test_links_to_pictures_are_followed_and_linked_folders_are_not(tmp_path: Path) -> None:
    _put(tmp_path / "elsewhere", "x.png")
    root = tmp_path / "root"
    _put(root, "a.png")
    (root / "link.png").symlink_to(tmp_path / "elsewhere" / "x.png")
    (root / "gone.png").symlink_to(tmp_path / "nothing.png")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "loop").symlink_to(root)
    source = data.folder(str(root))
    assert list(source.ids) == ["a.png", "gone.png", "link.png"]
    assert source.notes[1] == "passed over: 2 linked folders"
    assert source.read(2).size == (2, 2)
    with pytest.raises(FileNotFoundError):
        source.read(1)


def test_pipe_named_as_a_picture_is_passed_over(tmp_path: Path) -> None:
    _put(tmp_path, "a.png")
    os.mkfifo(tmp_path / "b.png")
    source = data.folder(str(tmp_path))
    assert list(source.ids) == ["a.png"]
    assert source.notes[1] == "passed over: 1 pipes and devices"


@linux
def test_any_file_name_is_an_id_and_leads_back_to_its_file(tmp_path: Path) -> None:
    name = "Zoë"
    composed, parted = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    assert composed != parted
    names = [
        f"{composed}.png",
        f"{parted}.png",
        "with space.png",
        "line\nbreak.png",
        "'single' \"double\".png",
        "tab\t.png",
        "back\\slash.png",
        "😀.png",
        os.fsdecode(b"latin-\xe9.png"),
        "a=b,c;{d}[e].png",
        "…/…\u200b.png",
    ]
    _put(tmp_path, *names)
    source = data.folder(str(tmp_path))
    assert list(source.ids) == sorted(names)
    for i, sample_id in enumerate(source.ids):
        assert source.read(i).getpixel((0, 0))[0] == names.index(sample_id)
    assert len(source.fingerprint) == 64


def test_same_name_in_two_folders_is_two_ids(tmp_path: Path) -> None:
    _put(tmp_path, "a/1.png", "b/1.png")
    assert list(data.folder(str(tmp_path)).ids) == ["a/1.png", "b/1.png"]


@pytest.mark.parametrize(
    "name", ["embeddings.h5", "embeddings.h5.partial", "embeddings.h5.parts/of.txt"]
)
def test_output_of_embedx_inside_the_folder_is_not_data(tmp_path: Path, name: str) -> None:
    _put(tmp_path, "a.png", "outputs/run/map-umap.png", "outputs/run/projector/sprite.png")
    (tmp_path / "outputs/run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "outputs/run" / name).touch()
    source = data.folder(str(tmp_path))
    assert list(source.ids) == ["a.png"]
    assert source.notes[1] == "passed over: 1 folders of embedx output"


def test_folder_that_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    others = tmp_path / "others"
    others.mkdir()
    (others / "a.txt").touch()
    for root, why in (
        (tmp_path / "nothing", "is not there; name a folder of pictures"),
        (others / "a.txt", "is not a folder; name a folder of pictures"),
        (empty, "holds no picture (it is empty)"),
        (others, "holds no picture (1 .txt)"),
    ):
        with pytest.raises(DataError) as caught:
            data.folder(str(root))
        assert str(caught.value).startswith(f"data.root {root} {why}")
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read anything")
def test_folder_without_rights_is_told_and_not_passed_over(tmp_path: Path) -> None:
    _put(tmp_path, "a.png", "closed/b.png")
    (tmp_path / "closed").chmod(0)
    try:
        with pytest.raises(DataError, match="check its rights"):
            data.folder(str(tmp_path))
    finally:
        (tmp_path / "closed").chmod(0o755)


def test_home_is_expanded_in_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _put(tmp_path / "pictures", "a.png")
    assert list(data.folder("~/pictures").ids) == ["a.png"]


def test_fingerprint_changes_with_the_files_and_only_with_them(tmp_path: Path) -> None:
    root = tmp_path / "root"
    _put(root, "a.png", "b/c.png")

    def now(**options: Any) -> str:
        return data.folder(str(root), **options).fingerprint

    first = now()
    assert now() == first
    (root / "notes.txt").touch()
    assert now() == first
    root.rename(tmp_path / "moved")
    assert data.folder(str(tmp_path / "moved")).fingerprint == first
    (tmp_path / "moved").rename(root)
    _put(root, "d.png")
    added = now()
    assert added != first
    assert now(limit=2) == first  # the new one comes last
    (root / "d.png").unlink()
    assert now() == first
    about = (root / "a.png").stat()
    os.utime(root / "a.png", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    touched = now()
    assert touched != first
    with (root / "a.png").open("ab") as file:
        file.write(b"x")
    os.utime(root / "a.png", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert len({first, touched, now()}) == 3
    (root / "b/c.png").rename(root / "b/e.png")
    assert len({first, touched, now()}) == 3


def test_the_hash_of_a_file_changes_with_that_file_alone(tmp_path: Path) -> None:
    _put(tmp_path, "a.png", "b.png", "c.png")

    def now() -> list[int]:
        hashes = data.folder(str(tmp_path)).item_hashes
        assert hashes is not None
        assert hashes.dtype == np.uint64
        return hashes.tolist()

    first = now()
    assert len(set(first)) == 3
    about = (tmp_path / "b.png").stat()
    os.utime(tmp_path / "b.png", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    touched = now()
    assert [a == b for a, b in zip(first, touched, strict=True)] == [True, False, True]
    (tmp_path / "c.png").rename(tmp_path / "0.png")
    assert now()[1:] == touched[:2]
    assert now()[0] not in first


def test_a_picture_that_changed_after_it_was_listed_is_not_read_as_the_one_that_was(
    tmp_path: Path,
) -> None:
    import os

    _put(tmp_path, "a.png", "b.png", "c.png", "d.png")
    source = data.folder(str(tmp_path))
    about = (tmp_path / "b.png").stat()
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    os.utime(tmp_path / "b.png", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    (tmp_path / "c.png").write_bytes(b"half of one")
    for i in range(3):
        with pytest.raises(DataError, match="it was changed after the run had listed it"):
            source.read(i)
    assert source.read(3).mode == "RGB"


def test_the_hash_of_a_row_is_that_of_its_values_type_and_shape() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 2, 2)

    def of(items: Any) -> list[int]:
        hashes = data.in_memory(items).item_hashes
        assert hashes is not None
        return hashes.tolist()

    assert of(values) == of(np.asfortranarray(values)) == of(torch.tensor(values))
    assert of(values[::-1]) == of(values)[::-1]
    edited = values.copy()
    edited[1, 0, 0] += 1
    assert [a == b for a, b in zip(of(values), of(edited), strict=True)] == [True, False, True]
    for other in (values.reshape(3, 4), values.view(np.int32)):
        assert not set(of(values)) & set(of(other))
    assert len(set(of(np.arange(5)))) == 5
    assert data.in_memory(_Dataset([torch.zeros(2)])).item_hashes is None


def test_limit_takes_the_first_and_says_so(tmp_path: Path) -> None:
    _put(tmp_path, "b/1.png", "a/1.png", "a/2.png")
    source = data.folder(str(tmp_path), limit=2)
    assert list(source.ids) == ["a/1.png", "a/2.png"]
    assert list(source.label_names) == ["a"]
    assert source.notes[0].endswith("2 pictures, 1 class, the first of 3")
    assert len(data.folder(str(tmp_path), limit=9)) == 3


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_is_refused(tmp_path: Path, limit: int) -> None:
    _put(tmp_path, "a.png")
    for make in (data.digits, lambda **options: data.folder(str(tmp_path), **options)):
        with pytest.raises(ConfigError, match=f"limit must be at least 1, not {limit}"):
            make(limit=limit)


def test_folder_source_travels_to_a_worker_process(tmp_path: Path) -> None:
    import pickle

    _put(tmp_path, "a.png", "b.png")
    there = pickle.loads(pickle.dumps(data.folder(str(tmp_path))))
    assert there.read(1).getpixel((0, 0)) == (1, 0, 0)


# --------------------------------------------------------------------------- in memory


def test_digits_are_the_pictures_and_labels_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    source = data.digits()
    assert (len(source), len(set(source.ids))) == (1797, 1797)
    assert _labels(source) == [str(target) for target in loaded.target]
    for i in (0, 1000, 1796):
        image = source.read(i)
        assert image.mode == "RGB"
        assert np.abs(np.asarray(image)[..., 0] - loaded.images[i] * 255 / 16).max() <= 0.5
    assert data.digits(limit=10).fingerprint != source.fingerprint
    assert list(data.digits(limit=10).ids) == list(source.ids)[:10]


@pytest.mark.parametrize("kind", ["array", "tensor", "grad", "bfloat16", "list"])
def test_rows_of_an_array_tensor_or_list_are_the_samples(kind: str) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    items: Any = {
        "array": values,
        "tensor": torch.tensor(values),
        "grad": torch.tensor(values, requires_grad=True),
        "bfloat16": torch.tensor(values, dtype=torch.bfloat16),
        "list": [torch.tensor(row) for row in values],
    }[kind]
    source = data.in_memory(items)
    assert list(source.ids) == ["0", "1", "2", "3"]
    assert source.labels is None
    assert [torch.as_tensor(source.read(i)).tolist() for i in range(4)] == values.tolist()


def test_fingerprint_of_an_array_is_that_of_its_values_type_and_shape() -> None:
    values = np.zeros((4, 2, 3), np.float32)
    same = [values, values.copy(), np.asfortranarray(values), torch.zeros(4, 2, 3)]
    assert len({data.in_memory(items).fingerprint for items in same}) == 1
    edited = values.copy()
    edited[-1, -1, -1] = 1
    others = [edited, values.reshape(4, 3, 2), values.astype(np.int32), values[:3]]
    assert len({data.in_memory(items).fingerprint for items in [values, *others]}) == 5


def test_labels_of_any_kind_that_sorts_become_classes() -> None:
    x = np.zeros((4, 2))
    for labels, names in (
        (["b", "a", "b", "c"], ["a", "b", "c"]),
        ([30, 7, 30, 100], ["7", "30", "100"]),
        (np.array([False, True, True, False]), ["False", "True"]),
        (torch.tensor([1, 0, 1, 1]), ["0", "1"]),
    ):
        source = data.in_memory(x, labels=labels)
        assert list(source.label_names) == names
        assert _labels(source) == [str(label) for label in np.asarray(labels).tolist()]
    assert source.notes == ("ndarray: 4 samples, 2 classes",)


class _Dataset(torch.utils.data.Dataset[Any]):
    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def test_dataset_gives_inputs_targets_and_names_of_classes() -> None:
    pairs = [(torch.full((2,), float(i)), i % 2) for i in range(4)]
    for targets in ([0, 1, 0, 1], torch.tensor([0, 1, 0, 1])):
        source = data.in_memory(_Dataset(pairs, targets=targets, classes=["cat", "dog"]))
        assert _labels(source) == ["cat", "dog", "cat", "dog"]
        assert source.read(3).tolist() == [3.0, 3.0]
        assert not source.labels_in_items


def test_whole_numbers_in_the_items_are_labels_that_come_with_them() -> None:
    kinds: list[Any] = [2, np.int64(0), np.array(1), torch.tensor(2), np.array([0]), -1]
    items = [(torch.full((2,), float(i)), kinds[i]) for i in range(6)]
    source = data.in_memory(_Dataset(items))
    assert source.labels is None
    assert (source.labels_in_items, list(source.label_names)) == (True, [])
    read = [source.read(i) for i in range(6)]
    assert [label for _, label in read] == [2, 0, 1, 2, 0, -1]
    assert [item.tolist() for item, _ in read] == [[float(i)] * 2 for i in range(6)]
    assert source.notes == (
        "_dataset: 6 samples, labels in the items; whether they changed is seen on 6 of them",
    )
    assert source.warnings == ("-1 in the items of _dataset is taken for no label",)
    named = data.in_memory(_Dataset(items, classes=["a", "b", "c"]))
    assert (named.labels_in_items, list(named.label_names)) == (True, ["a", "b", "c"])
    relabelled = data.in_memory(_Dataset([(items[0][0], 7), *items[1:]]))
    assert relabelled.fingerprint != source.fingerprint
    few = data.in_memory(_Dataset(items, classes=["a", "b"]))  # they name something else
    assert (few.labels_in_items, list(few.label_names)) == (True, [])


@pytest.mark.parametrize(
    "label",
    [1.0, "cat", None, True, -2, 2**31, np.float32(1), (1, 2), {"x": 1}],
    ids=repr,
)
def test_labels_in_items_that_are_no_whole_numbers_are_said_not_to_be_read(label: Any) -> None:
    items = [(torch.zeros(2), 0), (torch.ones(2), label)]
    for pairs in (items, items[1:]):
        source = data.in_memory(_Dataset(pairs))
        assert (source.labels, source.labels_in_items) == (None, False)
        assert source.read(0).shape == (2,)
        assert source.warnings == (
            "the labels in the items of _dataset are not read; give them as labels=",
        )
    assert data.in_memory(_Dataset(items), labels=["a", "b"]).warnings == ()


@pytest.mark.parametrize(
    ("parts", "is_said"),
    [
        ((torch.ones(3, dtype=torch.long),), True),  # a mask
        ((1, 5), True),
        ((1, np.ones(4)), True),
        (("a", 1.5), True),
        ((1, "photos/a.png"), False),
        ((1, None), False),
        ((1,), False),
    ],
)
@pytest.mark.parametrize("labels", [None, ["a", "b", "a"]])
def test_parts_of_items_that_the_network_may_want_are_said_to_be_left_out(
    parts: tuple[Any, ...], is_said: bool, labels: Any
) -> None:
    items = _Dataset([(torch.zeros(3), *parts)] * 3)
    said = " ".join(data.in_memory(items, labels=labels).warnings)
    n = len(parts) + 1
    assert (f"items of _dataset have {n} parts, of which the first enters" in said) == is_said
    numbered = _Dataset([(torch.zeros(3), 1, row) for row in range(3)])
    assert data.in_memory(numbered, labels=labels).warnings == ()


def test_labels_in_dicts_are_said_not_to_be_read() -> None:
    for name, label, is_said in (
        ("label", 1, True),
        ("labels", torch.tensor(2), True),
        ("target", "cat", True),
        ("target", torch.zeros(3), False),  # a sequence that enters the model
        ("x", 1.0, False),
    ):
        items = [{"input_ids": torch.ones(2), name: label}] * 3
        said = " ".join(data.in_memory(_Dataset(items)).warnings)
        assert ("are not read; give them as labels=" in said) == is_said


def test_a_label_unlike_those_that_were_seen_fails_its_item_alone() -> None:
    items: list[Any] = [(torch.zeros(2), i % 3) for i in range(100)]
    items[1], items[2], items[3] = (torch.zeros(2), "x\ny"), (torch.zeros(2), 3), torch.zeros(2)
    source = data.in_memory(_Dataset(items, classes=["a", "b", "c"]))
    assert source.labels_in_items
    for i, why in (
        (1, r"its label is 'x\\ny', and other items have whole numbers; give them all as labels="),
        (2, "its label 3 is past the 3 classes; give labels="),
        (3, "its label is None, and other items have whole numbers"),
    ):
        with pytest.raises(DataError, match=why):
            source.read(i)
    assert source.read(4)[1] == 1


def test_the_wrappers_of_torch_hand_their_labels_through() -> None:

    x = torch.arange(8.0).reshape(4, 2)
    tensors = TensorDataset(x, torch.tensor([5, 3, 5, 3]))

    def of(targets: list[int], *classes: str) -> _Dataset:
        return _Dataset(list(zip(x, targets, strict=True)), targets=targets, classes=list(classes))

    pets, same = of([0, 1, 1, 0], "cat", "dog"), of([1, 1, 1, 1], "cat", "dog")
    birds = of([0, 0, 1, -1], "owl", "tit")
    for dataset, expected in (
        (tensors, ["5", "3", "5", "3"]),
        (Subset(tensors, [2, 1]), ["5", "3"]),
        (Subset(pets, [3, 1]), ["cat", "dog"]),
        (Subset(Subset(pets, [3, 1, 2]), torch.tensor([2, 0])), ["dog", "cat"]),
        (ConcatDataset([pets, same]), ["cat", "dog", "dog", "cat", *["dog"] * 4]),
        (ConcatDataset([pets, birds]), ["cat", "dog", "dog", "cat", "owl", "owl", "tit", "-1"]),
        (ConcatDataset([Subset(tensors, [0]), pets]), ["5", "cat", "dog", "dog", "cat"]),
        (Subset(ConcatDataset([pets, birds]), [6, 0]), ["tit", "cat"]),
    ):
        source = data.in_memory(dataset)
        assert _labels(source) == expected
        assert (source.warnings, source.labels_in_items) == ((), False)
        assert source.read(0).shape == (2,)


def test_labels_that_a_dataset_tells_and_its_items_contradict_are_refused() -> None:
    from torch.utils.data import Subset, TensorDataset

    x = torch.arange(8.0).reshape(4, 2)

    class Relabels(Subset[Any]):
        def __getitem__(self, i: Any) -> Any:
            item, label = self.dataset[self.indices[i]]
            return item, 9 - label

        def __getitems__(self, rows: list[int]) -> Any:
            return [self[i] for i in rows]

    pairs = [(row, i % 2) for i, row in enumerate(x)]
    for dataset, told, said in (
        (_Dataset(pairs, targets=[0, 1, 2, 3]), 2, 0),  # a target_transform
        (_Dataset(pairs, targets=list(np.array([0, 1, 2, 3]))), 2, 0),
        (_Dataset(pairs, targets=list(torch.tensor([0, 1, 2, 3]))), 2, 0),
        (Relabels(TensorDataset(x, torch.tensor([5, 3, 5, 3])), [3, 0]), 3, 6),
    ):
        match = f"is {told} by its targets and {said} in its item; say which are right with labels="
        with pytest.raises(DataError, match=match):
            data.in_memory(dataset)
        assert data.in_memory(dataset, labels=["a"] * len(dataset)).warnings == ()
    texts = _Dataset([(row, "ab"[i % 2]) for i, row in enumerate(x)], targets=[0, 1, 0, 1])
    assert _labels(data.in_memory(texts)) == ["0", "1", "0", "1"]


def test_wrappers_whose_parts_do_not_tell_their_labels_read_them_with_the_items() -> None:

    x = torch.arange(8.0).reshape(4, 2)
    named = _Dataset([(row, i % 2) for i, row in enumerate(x)], classes=["cat", "dog"])
    source = data.in_memory(Subset(named, [3, 0]))
    assert (source.labels_in_items, list(source.label_names)) == (True, ["cat", "dog"])
    assert [source.read(i)[1] for i in range(2)] == [1, 0]
    both = data.in_memory(ConcatDataset([named, TensorDataset(x, torch.tensor([5, 3, 5, 3]))]))
    assert [both.read(i)[1] for i in range(8)] == [0, 1, 0, 1, 5, 3, 5, 3]
    assert both.label_names == []
    assert "some parts of concatdataset name their classes" in both.warnings[0]
    floats = data.in_memory(TensorDataset(x, x[:, 0]))
    assert (floats.labels, floats.labels_in_items, len(floats.warnings)) == (None, False, 1)


def test_labels_in_items_of_parts_that_name_their_classes_otherwise_are_not_taken_for_one() -> None:
    from torch.utils.data import ConcatDataset, Subset

    def of(*classes: str) -> _Dataset:
        return _Dataset([(torch.zeros(2), i % 2) for i in range(4)], classes=list(classes))

    for other in (of("dog", "cat"), of("cat", "banded"), Subset(of("dog", "cat"), [1])):
        both = ConcatDataset([of("cat", "dog"), other])
        for dataset in (both, Subset(both, [0, 4]), ConcatDataset([of("cat", "dog"), both])):
            with pytest.raises(DataError, match=r"name their classes otherwise: \d is '(cat|dog)'"):
                data.in_memory(dataset)
        assert data.in_memory(both, labels=["a"] * len(both)).label_names == ["a"]


def test_classes_that_all_parts_name_alike_are_kept() -> None:
    from torch.utils.data import ConcatDataset, Subset

    def of(*classes: str) -> _Dataset:
        return _Dataset([(torch.zeros(2), i % 2) for i in range(4)], classes=list(classes))

    pets = of("cat", "dog")
    for dataset in (
        ConcatDataset([pets, of("cat", "dog")]),
        Subset(ConcatDataset([pets, Subset(of("cat", "dog"), [0])]), [4, 1]),
        ConcatDataset([_Dataset(list(pets), targets=[0, 1, 0, 1], classes=["cat", "dog"]), pets]),
    ):
        source = data.in_memory(dataset)
        assert (list(source.label_names), source.warnings) == (["cat", "dog"], ())
    longer = data.in_memory(ConcatDataset([pets, of("cat", "dog", "owl")]))
    assert list(longer.label_names) == ["cat", "dog", "owl"]


class _Handing(_Dataset):
    """Wraps a Dataset, backwards, and hands on its attributes."""

    def __getitem__(self, i: int) -> Any:
        return self.items[len(self.items) - 1 - i][: 1 if self.gives_x else 2]

    def __getattr__(self, name: str) -> Any:
        if name in ("items", "gives_x"):
            raise AttributeError(name)
        return getattr(self.items, name)


class _Backwards(TensorDataset):
    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(len(self) - 1 - i)[0]


class _BackwardsOf(Subset[Any]):
    def __getitem__(self, i: Any) -> Any:
        return super().__getitem__(len(self) - 1 - i)[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


def test_targets_of_a_wrapped_dataset_are_said_where_no_item_tells() -> None:
    x, y = torch.arange(4.0)[:, None], torch.tensor([0, 1, 1, 1])
    pairs = _Dataset(list(zip(x, y.tolist(), strict=True)), targets=y.tolist())
    handing = _Handing(pairs, gives_x=True)  # type: ignore[arg-type]
    plain = TensorDataset(x, y)
    said = "the labels of {} are the targets of the Dataset that it wraps"
    for items, kind in (
        (handing, "_handing"),
        (Subset(handing, [0, 2]), "subset"),
        (ConcatDataset([plain, handing]), "concatdataset"),
        (_Backwards(x, y), "_backwards"),
        (_BackwardsOf(plain, [0, 1, 2]), "_backwardsof"),
    ):
        assert [one for one in data.in_memory(items).warnings if said.format(kind) in one], kind
    own = _Dataset(list(x), targets=y.tolist())
    for items in (own, plain, Subset(own, [0, 2]), ConcatDataset([own, plain])):
        assert not data.in_memory(items).warnings
    with pytest.raises(DataError, match="is 0 by its targets and 1 in its item"):
        data.in_memory(_Handing(pairs, gives_x=False))  # type: ignore[arg-type]


def test_names_of_classes_are_not_put_on_labels_of_another_kind() -> None:
    dataset = _Dataset([torch.zeros(1)] * 3, targets=[0, 1, 0], classes=["cat", "dog"])
    assert list(data.in_memory(dataset, labels=[5, 0, 1]).label_names) == ["0", "1", "5"]
    odd = _Dataset([torch.zeros(1)] * 3, targets=[-1, 0, 1], classes=["cat", "dog"])
    assert list(data.in_memory(odd).label_names) == ["-1", "0", "1"]


def test_pictures_of_a_dataset_come_out_upright_and_rgb() -> None:
    grey = Image.fromarray(np.array([[0, 200]], np.uint8))
    source = data.in_memory(_Dataset([(grey, 0), (Image.new("RGBA", (2, 1)), 0)]))
    assert np.asarray(source.read(0)[0]).tolist() == [[[0] * 3, [200] * 3]]
    assert np.asarray(source.read(1)[0]).tolist() == [[[255] * 3] * 2]


def test_fingerprint_of_a_dataset_repeats_and_tells_items_apart() -> None:
    def of(*items: Any) -> str:
        return data.in_memory(_Dataset(list(items))).fingerprint

    image = Image.new("RGB", (2, 2))
    assert of(torch.zeros(2), image) == of(torch.zeros(2), image.copy())
    assert of({"x": object()}) == of({"x": object()})  # no address of memory enters
    assert of(torch.zeros(2, dtype=torch.bfloat16)) == of(torch.zeros(2, dtype=torch.bfloat16))
    kinds = [torch.zeros(2), torch.ones(2), torch.zeros(3), image, "text", "other", 1, 2]
    assert len({of(kind) for kind in kinds}) == len(kinds)

    class Broken(_Dataset):
        def __getitem__(self, i: int) -> Any:
            raise OSError("no such item")

    broken = data.in_memory(Broken([1, 2]))
    assert len(broken) == 2
    with pytest.raises(OSError, match="no such item"):
        broken.read(0)


def test_data_in_memory_that_cannot_be_used_is_told_in_one_line() -> None:
    pandas = pytest.importorskip("pandas")
    x = np.zeros((3, 2))
    for make, why in (
        (lambda: data.in_memory(iter([1])), "data is a list_iterator, which has no length"),
        (lambda: data.in_memory(i for i in x), "data is a generator, which has no length"),
        (lambda: data.in_memory(pandas.DataFrame(x)), "data is a DataFrame; give its values"),
        (lambda: data.in_memory(pandas.Series([1])), "data is a Series; give its values"),
        (lambda: data.in_memory({"x": x}), "data is a dict; give a folder"),
        (lambda: data.in_memory(b"photos"), "data is a bytes; give a folder"),
        (lambda: data.in_memory(7), "data is a int; give a folder"),
        (lambda: data.in_memory(np.float32(7)), "data is "),
        (lambda: data.in_memory(np.array(7)), "data is a single number"),
        (lambda: data.in_memory([]), "data is empty"),
        (lambda: data.in_memory(x[:0]), "data is empty"),
        (lambda: data.in_memory(x, labels=[1]), "data has 3 samples and 1 labels"),
        (lambda: data.in_memory(x, ids=["a"]), "data has 3 samples and 1 ids"),
        (lambda: data.in_memory(x, ids=["a", "b", "a"]), "the id 'a' is given 2 times"),
        (
            lambda: data.in_memory(x, labels=["a", None, 1]),
            "the labels are of kind NoneType; give one",
        ),
        (lambda: data.in_memory(x, labels=x), "labels have shape (3, 2)"),
    ):
        with pytest.raises(DataError) as caught:
            make()
        assert str(caught.value).startswith(why)
        assert len(str(caught.value).splitlines()) == 1


def test_labels_are_told_apart_as_they_are_given() -> None:
    items = [1.0, 2.0, 3.0]
    large = data.in_memory(items, labels=[2**63, 2**63 + 1, 0])
    assert large.label_names == ["0", str(2**63), str(2**63 + 1)]
    assert large.labels is not None
    assert large.labels.tolist() == [1, 2, 0]
    larger = data.in_memory(items, labels=[10**400, 0, 1])  # than any float
    assert larger.label_numbers == [0, 1, 10**400]
    assert data.in_memory(items, labels=["a", "a\0", "b"]).label_names == ["a", "a\0", "b"]
    for labels, message in (
        ([1, "1", 2], "the labels are texts and numbers; give one text or one number a sample"),
        ([b"a", b"b", b"c"], "the labels are of kind bytes"),
        ([[1], [2], [3]], "the labels are of kind list"),
        ({0: "a", 1: "b", 2: "c"}, "labels is a dict, which has no entry a sample in order"),
        ({"a", "b", "c"}, "labels is a set, which has no entry a sample in order"),
        ("abc", "labels is a str, which has no entry a sample in order"),
    ):
        with pytest.raises(DataError, match=message):
            data.in_memory(items, labels=labels)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="ids is a set"):
        data.in_memory(items, ids={"a", "b", "c"})  # type: ignore[arg-type]


def test_what_stands_for_no_label_is_one_or_is_said() -> None:
    items = [1.0, 2.0, 3.0]
    none = data.in_memory(items, labels=["b", "", "a"])
    assert (_labels(none), none.label_names, none.warnings) == (["b", None, "a"], ["a", "b"], ())
    assert data.in_memory(items, labels=["", "", ""]).labels is None
    signs = data.in_memory(items, labels=[-1, 1, -1])
    assert (_labels(signs), signs.label_names) == (["-1", "1", "-1"], ["-1", "1"])
    assert signs.warnings == (
        "-1 among the labels of list is a class of that name; for none give texts, ''",
    )
    for nan in (float("nan"), np.float32("nan")):
        with pytest.raises(DataError, match="a label is NaN; give texts, and '' where there is no"):
            data.in_memory(items, labels=[1.0, nan, 2.0])


def test_arrays_that_are_in_part_masked_or_sparse_are_refused() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    x = np.arange(6.0).reshape(3, 2)
    with pytest.raises(DataError, match="data is a sparse csr_matrix; give data.toarray()"):
        data.in_memory(sparse.csr_matrix(x))
    for make in (
        lambda: data.in_memory(np.ma.masked_greater(x, 3)),
        lambda: data.in_memory(x, labels=np.ma.masked_equal([1, 2, 3], 2)),
    ):
        with pytest.raises(DataError, match="a masked array has values that do not count; give"):
            make()
    whole = data.in_memory(np.ma.masked_greater(x, 9))
    assert whole.fingerprint == data.in_memory(x).fingerprint


def test_a_source_of_ones_own_that_no_file_could_hold_is_refused_when_it_is_made() -> None:
    def make(**options: Any) -> sources.Source:
        usual: dict[str, Any] = {"name": "s", "ids": list("abc"), "read": str, "fingerprint": "f"}
        return sources.Source(**usual | options)

    names = ["x", "y"]
    for options, why in (
        ({"labels": np.array([0, 2, 1]), "label_names": names}, "hold 2, and there are 2 label_n"),
        ({"labels": np.array([0, -2, 1]), "label_names": names}, "hold -2, and"),
        ({"labels": np.array([0, 2**32, 1]), "label_names": names}, "hold 4294967296, and"),
        ({"labels": np.array([0, 0.7, 1]), "label_names": names}, "type float64; give 3 whole num"),
        ({"labels": np.array([0, 1]), "label_names": names}, "have shape"),
        ({"labels": np.array([0, 0, 0])}, "hold 0, and there are 0 label_names"),
        ({"metadata": {"c": np.zeros(3, complex)}}, "the column 'c' of s is of type complex128"),
        ({"metadata": {"c": np.zeros(3, "M8[D]")}}, "is of type datetime64"),
        ({"metadata": {"c": np.zeros(3, "S1")}}, "numbers of at most 64 bits, or texts"),
        ({"metadata": {"c": np.zeros((3, 2))}}, "give one number or text a sample: 3"),
        ({"metadata": {"c": [[1], [1, 2], []]}}, "give one number or text a sample: 3"),
        ({"metadata": {"c": [1, 2]}}, "has shape"),
        ({"metadata": {"c": [1, "a", 2.5]}}, "is of texts and numbers"),
        ({"metadata": {"c": ["a", None, "b"]}}, "is of type object"),
        ({"metadata": {"c": [2**53 + 1, 0.5, 0]}}, "holds 9007199254740993, which among the oth"),
        ({"metadata": {"c": [2**64 - 1, 0, -1]}}, "holds 18446744073709551615, which among"),
        ({"metadata": {"": [1, 2, 3]}}, "a column of s is called ''; give a text"),
        ({"metadata": {"a\0b": [1, 2, 3]}}, "is called 'a\\x00b'; give a text"),
        ({"metadata": {"a\udc80": [1, 2, 3]}}, "is called 'a\\udc80'; give a text"),
        ({"ids": [1, 2, 3]}, "the ids of s are not all texts, such as 1 (int); give ids="),
        ({"ids": [b"a", b"b", b"c"]}, "the ids of s are not all texts, such as b'a' (bytes)"),
        ({"ids": [None, "b", "c"]}, "the ids of s are not all texts, such as None (NoneType)"),
    ):
        with pytest.raises(DataError, match=re.escape(why)) as caught:
            make(**options)
        assert "\n" not in str(caught.value)
    good = {"t": ["a", "", "c"], "i": [1, 2, 3], "f": np.zeros(3, "f2"), "b": [True, False, True]}
    source = make(labels=np.array([-1, 1, 0]), label_names=names, metadata=good)
    assert _labels(source) == [None, "y", "x"]


class _Noisy(_Dataset):
    """Draws from one of the sources of random numbers."""

    def __getitem__(self, i: int) -> Any:
        import random

        drawn = {
            "torch": lambda: torch.rand(1).item(),
            "numpy": np.random.random,
            "python": random.random,
            "own": self.generator.random,
            "none": lambda: 0.0,
        }[self.items[i]]()
        return torch.full((2,), float(drawn))

    generator = np.random.default_rng(0)


def test_a_dataset_that_draws_at_random_is_told_from_one_that_does_not() -> None:
    import random

    def states() -> list[Any]:
        state = np.random.get_state()  # noqa: NPY002
        return [random.getstate(), torch.get_rng_state().tolist(), state[1].tolist(), state[2]]

    before = states()
    for kind in ("torch", "numpy", "python", "own", "none"):
        source = data.in_memory(_Noisy([kind] * 40))
        assert source.draws == (kind in ("torch", "numpy", "python"))
        words = {"own": "an item of _noisy is another when it is read again", "none": None}.get(
            kind, "the items of _noisy are drawn at random: row i is drawn from seed i"
        )
        assert [line[: len(words or "")] for line in source.warnings] == [words] * bool(words)
        assert states() == before
    fingerprints = {data.in_memory(_Noisy(["torch"] * 40)).fingerprint for _ in range(3)}
    assert len(fingerprints) == 1


def test_the_ids_of_an_image_folder_are_its_paths(photos: Path) -> None:
    from torchvision.datasets import ImageFolder

    source = data.in_memory(ImageFolder(str(photos)))
    assert source.ids == data.folder(str(photos)).ids
    assert list(source.label_names) == ["cat", "dog"]

    class Turned(ImageFolder):
        def __getitem__(self, i: int) -> Any:
            return super().__getitem__(len(self) - 1 - i)

    turned = data.in_memory(Turned(str(photos)), labels=["a"] * len(source))
    assert list(turned.ids) == [str(i) for i in range(len(source))]
    assert "turned has a __getitem__ of its own" in turned.warnings[0]


def test_values_of_another_type_or_behind_addresses_are_told_apart() -> None:
    half = torch.ones(3, 2).bfloat16()
    for items, others in (
        (half, half.float()),
        (list(half), list(half.float())),
        (_objects(1, 2, 3), _objects(1, 2, 4)),
        ([_objects(1, 2)], [_objects(1, 3)]),
    ):
        assert data.in_memory(items).fingerprint != data.in_memory(others).fingerprint
    again = [data.in_memory(_objects(1, 2, 3)).fingerprint for _ in range(2)]
    assert again[0] == again[1]


def _objects(*values: int) -> npt.NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = [np.full(2, float(value)) for value in values]
    return array


def test_another_collate_fn_is_told_by_what_it_makes_of_two_items() -> None:
    items = [torch.ones(1 + i % 3) for i in range(6)]

    def made(length: Any) -> str:
        def collate(batch: list[Any]) -> Any:
            n = length(map(len, batch))
            padded = [torch.nn.functional.pad(one, (0, max(0, n - len(one)))) for one in batch]
            return torch.stack([one[:n] for one in padded])

        return data.in_memory(items, collate=collate).fingerprint

    assert made(max) == made(max) != made(min)


def test_a_row_of_an_array_that_was_changed_after_it_was_hashed_is_not_read(
    tmp_path: Path,
) -> None:
    values = np.arange(8, dtype="f4").reshape(4, 2)
    np.save(tmp_path / "a.npy", values)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    written = np.load(tmp_path / "a.npy", mmap_mode="r+")
    for items in (mapped, torch.tensor(values), values[::-1], values.astype(">f4")):
        source = data.in_memory(items)
        assert [source.read(i).tolist() for i in range(4)] == items.tolist()
    source = data.in_memory(mapped)
    written[2] += 1
    written.flush()
    assert source.read(1).tolist() == [2, 3]
    with pytest.raises(DataError, match="it was changed after the run had listed it"):
        source.read(2)


def test_the_name_of_a_folder_may_be_of_any_bytes(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/p\x80s"))
    _put(root, "a/1.png")
    assert data.folder(str(root)).name == "p\\x80s"


def test_what_pillow_notes_counts_for_a_picture_as_its_file_gave_it_alone(tmp_path: Path) -> None:
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[0] = 200
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, indexed = tmp_path / "turned.png", tmp_path / "indexed.png"
    Image.fromarray(pixels).save(turned, exif=exif)
    flat = Image.fromarray(np.array([[0, 1, 1]], np.uint8), "P")
    flat.putpalette([0] * 6)
    flat.save(indexed, transparency=0)
    upright = decode_image(turned)
    assert upright.size == (4, 8)
    cases = [
        (Image.open(turned), upright),
        (Image.open(turned).convert("RGB"), Image.fromarray(pixels)),
        (Image.open(turned).convert("RGB").rotate(270, expand=True), upright),
        (Image.open(turned).crop((0, 0, 4, 4)), Image.fromarray(pixels[:4, :4])),
        (Image.open(indexed), Image.fromarray(np.array([[[255] * 3, [0] * 3, [0] * 3]], np.uint8))),
        (Image.open(indexed).convert("RGB"), Image.new("RGB", (3, 1))),
        (Image.open(indexed).convert("L"), Image.new("RGB", (3, 1))),
    ]
    for opened, wanted in cases:
        given = np.asarray(opened)
        assert np.array_equal(upright_rgb(opened), wanted)
        assert np.array_equal(opened, given)  # it is the user's
    folder = tmp_path / "set" / "a"
    folder.mkdir(parents=True)
    shutil.copy(indexed, folder)
    torchvision = pytest.importorskip("torchvision")
    ((item, _),) = torchvision.datasets.ImageFolder(folder.parent)
    assert np.array_equal(upright_rgb(item), np.zeros((1, 3, 3)))


@pytest.mark.parametrize(
    ("class_to_idx", "targets", "names", "numbers"),
    [
        ({"cat": 0, "dog": 1}, [0, 1, 1], ["cat", "dog", "dog"], [0, 1]),
        ({"cat": 1, "dog": 0}, [1, 0, 0], ["cat", "dog", "dog"], [0, 1]),
        ({"cat": 281, "dog": 7}, [281, 7, 7], ["cat", "dog", "dog"], [7, 281]),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_names_of_classes_are_by_the_numbers_that_a_dataset_gives_them(
    class_to_idx: dict[str, int],
    targets: list[int],
    names: list[str],
    numbers: list[int],
    within: bool,
) -> None:
    class Numbered(
        torch.utils.data.Dataset[Any]
    ):  # as of an ImageFolder with a find_classes of its own
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            return torch.zeros(2), targets[i]

    items: Any = Numbered()
    items.classes, items.class_to_idx, items.targets = ["cat", "dog"], class_to_idx, targets
    source = data.in_memory(torch.utils.data.Subset(items, [0, 1, 2]) if within else items)
    assert source.labels is not None
    assert [source.label_names[i] for i in source.labels] == names
    assert source.label_numbers == numbers
    items.class_to_idx = {"cat": 1, "dog": 1}
    with pytest.raises(DataError, match="classes and class_to_idx of numbered contradict"):
        data.in_memory(items)


@pytest.mark.parametrize(
    "targets",
    [torch.zeros(4, 5), [[1], [2, 3], [], [1]], [{"a": 1}] * 4, dict.fromkeys("abcd", 1)],
)
def test_targets_that_are_no_labels_are_passed_over_and_that_is_told(targets: Any) -> None:
    class Items(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> Any:
            return torch.full((3,), float(i))

    items: Any = Items()
    items.targets = targets
    source = data.in_memory(items)
    assert source.labels is None
    assert any("are not one number or text a sample" in line for line in source.warnings)
    items.targets = [torch.tensor(i % 2) for i in range(4)]
    assert data.in_memory(items).label_names == ["0", "1"]


class Relabelled(torch.utils.data.Dataset[Any]):
    """Names of classes, and other numbers in its items than they are of."""

    def __init__(self, **attributes: Any) -> None:
        self.classes = ["cat", "dog", "owl"]
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        return torch.full((3,), float(i)), i % 2


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({}, ["cat", "dog", "owl"]),
        ({"_labels": [0, 1, 0, 1, 0, 1], "target_transform": None}, ["cat", "dog", "owl"]),
        ({"_labels": [0, 1, 2, 0, 1, 2]}, []),
        ({"target_transform": abs}, []),
    ],
)
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: torch.utils.data.Subset(d, range(6))])
def test_names_of_classes_are_put_on_no_other_labels(
    attributes: dict[str, Any], names: list[str], wrap: Any
) -> None:
    source = data.in_memory(wrap(Relabelled(**attributes)))
    assert source.label_names == names
    assert source.labels_in_items
    assert any("not told by its classes" in line for line in source.warnings) == (not names)
    both = data.in_memory(torch.utils.data.ConcatDataset([Relabelled(), Relabelled(**attributes)]))
    assert both.label_names == names


def test_two_classes_of_one_name_are_two_in_every_source() -> None:
    targets = [0, 1, 2, 0]
    items = [torch.zeros(2)] * 4
    named = _Dataset(items, targets=targets, classes=["crane", "hen", "crane", "crane"])
    in_items = _Dataset([(x, i) for x, i in zip(items, targets, strict=True)])
    in_items.classes = named.classes
    for source, n in ((data.in_memory(named), 2), (data.in_memory(in_items), 3)):
        assert list(source.label_names)[:3] == ["crane (0)", "hen", "crane (2)"]
        assert f"{n} classes are called 'crane': named crane (0), crane (2)" in source.warnings[0]
        again = dataclasses.replace(source, name="x")
        assert (again.label_names, again.warnings) == (source.label_names, source.warnings)


def test_pictures_that_embedx_drew_are_no_samples(tmp_path: Path) -> None:
    for kind in "ab":
        (tmp_path / kind).mkdir()
        for i in range(2):
            pixels = np.random.default_rng(i).integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / kind / f"row-{i}.png")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(784, 2)).eval()
    source = data.folder(str(tmp_path))
    drawn = tmp_path / "outputs" / "explain"
    prepared = Preprocess(16, 16)
    embedx.explain(net, source, preprocess=prepared, method="gradcam", layers="1", out=drawn)
    embedx.explain(net, source, preprocess=prepared, layers="1", out=tmp_path / "outputs" / "maps")
    assert len(list(tmp_path.rglob("*.png"))) > 6
    again = data.folder(str(tmp_path))
    assert again.ids == source.ids == [f"{kind}/row-{i}.png" for kind in "ab" for i in range(2)]
    assert again.label_names == ["a", "b"]
    assert "pictures that embedx drew" in " ".join(again.notes)
