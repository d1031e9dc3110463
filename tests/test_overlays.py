"""Pictures of maps: what is written in them, and in which colours the values stand."""

import logging
from typing import Any

import numpy as np
import pytest

from embedx import overlays
from embedx.overlays import Column, Sample

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8)


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


def images(figure: Any) -> list[Any]:
    return [np.asarray(image.get_array()) for axes in figure.axes for image in axes.images]


def test_what_enters_is_shown_as_it_is_or_stretched() -> None:
    assert np.array_equal(overlays.shown(np.moveaxis(PICTURE, -1, 0)), PICTURE)
    floats = np.array([[[-1.0, 1.0], [0.0, 3.0]]], np.float32)
    assert overlays.shown(floats)[..., 0].tolist() == [[0, 128], [64, 255]]
    for channels in (1, 2, 3, 5):
        found = overlays.shown(RNG.normal(size=(channels, 4, 6)))
        assert found.shape == (4, 6, 3)
        assert (found.min(), found.max()) == (0, 255)
    assert not overlays.shown(np.full((1, 2, 2), np.nan, np.float32)).any()


def test_a_tile_says_its_channel_and_the_range_of_its_values() -> None:
    maps = np.stack([np.linspace(-2, 7.5, 24).reshape(4, 6), np.full((4, 6), 3.0)])
    maps[1, 0, 0] += 1e-7  # rounding is no pattern
    sample = Sample("a$_b", 5, PICTURE)
    column = Column("layer4", 64, "4x6", [17, 3], [maps])
    for figure in (
        overlays.layer_sheet([sample], column, title="net over photos"),
        overlays.depth_sheet(sample, [column], 0, title="net over photos"),
    ):
        written = texts(figure)
        for words in ("channel 17", "\N{MINUS SIGN}2 to 7.5", "channel 3", "3 everywhere"):
            assert words in written
        assert any("net over photos; each map from dark to light" in text for text in written)
        assert any(r"a\$_b" in text for text in written)  # no mathematics
        picture, first, second = images(figure)
        assert np.array_equal(picture, PICTURE)
        assert np.array_equal(first, maps[0])
        shades = [axes.images[0] for axes in figure.axes][1:]
        assert [shade.get_cmap().name for shade in shades] == ["viridis", "viridis"]
        assert shades[0].get_clim() == (-2, 7.5)
        assert np.ptp(shades[1].norm(second)) < 1e-6


def test_a_map_lies_on_its_picture_where_it_is_strong() -> None:
    explained = np.zeros((2, 3), np.float32)
    explained[0, 2] = 4.0  # the upper right third
    figure = overlays.overlay(
        Sample("x", 0, np.full((20, 30, 3), 100, np.uint8)),
        explained,
        measured="weight",
        is_signed=False,
        title="Grad-CAM of net",
        caption=["class 3 <b>", "score 2"],
    )
    picture, shown, mixed = images(figure)[:3]
    assert np.array_equal(shown, explained)
    grey = 0.25 + 0.75 * 100 / 255
    assert np.allclose(mixed[15:, :10], grey)
    assert abs(mixed[0, 29] - grey).max() > 0.2
    assert mixed.shape == picture.shape
    assert {"Grad-CAM of net", "class 3 <b>", "score 2", "weight", "row 0, x"} <= set(texts(figure))
    (bar,) = [axes for axes in figure.axes if axes.get_xticklabels() and not axes.images]
    assert [label.get_text() for label in bar.get_xticklabels()] == ["0", "2", "4"]


@pytest.mark.parametrize("is_signed", [False, True])
def test_channels_are_summed_of_signed_maps_and_else_the_largest_counts(is_signed: bool) -> None:
    explained = RNG.normal(size=(3, 120, 90)).astype(np.float32)
    figure = overlays.overlay(
        Sample("0", 0, np.zeros((120, 90, 3), np.uint8)),
        explained,
        measured="part",
        is_signed=is_signed,
        title="t",
        caption=["c"],
    )
    wanted = explained.sum(0) if is_signed else np.abs(explained).max(0)
    shown = [axes.images[0] for axes in figure.axes if axes.images][1]
    assert np.allclose(shown.get_array(), wanted, atol=1e-5)
    top = np.percentile(np.abs(wanted), 99.5)
    assert shown.get_clim() == pytest.approx((-top if is_signed else 0, top))
    assert shown.get_cmap().name == ("PuOr_r" if is_signed else "viridis")
    (bar,) = [axes for axes in figure.axes if axes.get_xticklabels() and not axes.images]
    labels = [label.get_text() for label in bar.get_xticklabels()]
    assert labels[-1].startswith("\N{GREATER-THAN OR EQUAL TO} ")
    assert labels[0].startswith("\N{LESS-THAN OR EQUAL TO} ") == is_signed
    assert any("orange: for the class" in text for text in texts(figure)) == is_signed


def test_a_map_of_zeros_and_maps_that_are_not_finite_are_drawn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from embedx import figures

    with caplog.at_level(logging.WARNING, "embedx"):
        zeros = overlays.overlay(
            Sample("0", 0, PICTURE),
            np.zeros((2, 3), np.float32),
            measured="w",
            is_signed=False,
            title="t",
            caption=["c"],
        )
        column = Column("l", 1, "2x2", [0], [np.full((1, 2, 2), np.nan)])
        nothing = overlays.layer_sheet([Sample("0", 0, PICTURE)], column, title="t")
        for figure in (zeros, nothing):
            assert figures._png(figure).startswith(b"\x89PNG")
    assert "not finite" in texts(nothing)
    assert not caplog.records
