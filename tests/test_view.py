"""The stage ``view``: what is really in the pictures."""

import base64
import contextlib
import io
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedx import derived, store
from embedx.errors import ConfigError, DataError, StoreError
from embedx.figures import NONE, OTHER, PALETTE, PALETTE_BESIDE_OTHER, THEMES
from embedx.view import view
from tests.conftest import by_axes, drawn_classes, embeddings_file, projection_file

pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]


def make_run(
    folder: Path,
    coords: dict[str, Array],
    *,
    labels: list[int] | None = None,
    names: list[str] | None = None,
    metadata: dict[str, Any] | None = None,
    failed: tuple[int, ...] = (),
    **about: Any,
) -> Path:
    """A finished run with a projection of each method in ``coords``."""
    n = len(next(iter(coords.values())))
    path = embeddings_file(
        folder,
        np.zeros((n, 2)),
        labels=labels,
        label_names=names,
        metadata=metadata,
        failed=failed,
        **about,
    )
    for number, (method, given) in enumerate(coords.items()):
        xy = np.array(given, dtype=np.float32)
        xy[list(failed)] = np.nan
        projection_file(path, f"{method}-{number:06d}", xy, method=method, trustworthiness=0.9)
    return path


def blobs(n: int, n_classes: int, *, m: int = 2) -> tuple[Array, list[int]]:
    """Small clusters on a wide circle, and which of them each row is of."""
    labels = np.arange(n) % n_classes
    turn = 2 * np.pi * labels / n_classes
    centers = np.stack([np.cos(turn), np.sin(turn), turn], axis=1)[:, :m] * 20
    return centers + np.random.default_rng(0).normal(size=(n, m)), labels.tolist()


def draw(path: Path, **options: Any) -> Figure:
    figure = view(path, **options)
    assert isinstance(figure, Figure)
    return figure


def legend(figure: Figure) -> dict[str, str]:
    (box,) = figure.legends
    return {
        text.get_text(): to_hex(handle.get_color())
        for text, handle in zip(box.get_texts(), box.legend_handles, strict=True)
    }


def rendered(figure: Figure) -> Array:
    """The figure's pixels, shape (h, w, 3), at the resolution of ``figure.dpi``."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return np.asarray(Image.open(data).convert("RGB")).astype(int)


def near(pixels: Array, color: str, tolerance: int = 60) -> Array:
    """Where the pixels have that colour, or that colour thinned by white."""
    wanted = np.array(to_rgb(color)) * 255
    return np.abs(pixels - wanted).max(axis=-1) < tolerance


# --------------------------------------------------------------------------- what is drawn


def test_each_class_is_drawn_in_its_colour_where_its_points_are(tmp_path: Path) -> None:
    xy, labels = blobs(60, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    figure = draw(path)
    assert legend(figure) == {f"class {i}": PALETTE[i] for i in range(3)}
    for name, (color, points) in drawn_classes(figure).items():
        number = int(name.split()[1])
        assert color == PALETTE[number]
        assert np.allclose(points, by_axes(xy[np.array(labels) == number]), atol=1e-5)
    pixels = rendered(figure)
    height = len(pixels)
    for number in range(3):
        members = xy[np.array(labels) == number]
        places = figure.axes[0].transData.transform(members)
        hits = [
            near(pixels[height - int(y) - 3 : height - int(y) + 3, int(x) - 3 : int(x) + 3],
                 PALETTE[number]).any()
            for x, y in places
        ]  # fmt: skip
        assert np.mean(hits) > 0.6  # the name of the class covers some


def test_saved_picture_decodes_and_holds_every_colour(tmp_path: Path) -> None:
    xy, labels = blobs(100, 10)
    path = make_run(tmp_path, {"umap": xy, "pca": xy[:, ::-1]}, labels=labels)
    draw(path)
    names = ["map-pca-000001.png", "map-umap-000000.png", "maps.png"]
    assert sorted(p.name for p in tmp_path.glob("*.png")) == names
    widths = []
    for name in names:
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG"
            widths.append(image.width)
            pixels = np.asarray(image.convert("RGB"))[::3, ::3].astype(int)
        for color in PALETTE:
            assert near(pixels, color, 20).sum() > 50, (name, color)
        assert (pixels == 255).all(axis=-1).mean() > 0.5
    assert widths[2] > 1.5 * widths[0]


def test_single_projection_has_one_picture_and_a_named_folder_takes_it(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path / "run", {"umap": xy}, labels=labels)
    draw(path, out=tmp_path / "pictures" / "deep")
    assert [p.name for p in (tmp_path / "pictures/deep").iterdir()] == ["map-umap-000000.png"]
    assert not list((tmp_path / "run").glob("*.png"))


def test_pictures_repeat_byte_by_byte(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    draw(path)
    before = (tmp_path / "map-umap-000000.png").read_bytes()
    draw(path)
    assert (tmp_path / "map-umap-000000.png").read_bytes() == before


def test_only_the_chosen_projections_are_drawn(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy, "pca": xy, "tsne": xy}, labels=labels)
    figure = draw(path, projections=["pca", "tsne-000002"])
    assert [axes.get_title() for axes in figure.axes] == [
        "PCA  (trustworthiness 0.900)",
        "t-SNE  (trustworthiness 0.900)",
    ]
    assert not (tmp_path / "map-umap-000000.png").exists()


def test_many_projections_are_wrapped_and_maps_of_one_method_told_apart(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    methods = ["pca", "a", "b", "c", "d"]
    path = make_run(tmp_path, dict.fromkeys(methods, xy), labels=labels)
    again = tmp_path / "projections" / "pca-ffffff.h5"
    again.write_bytes((tmp_path / "projections" / "pca-000000.h5").read_bytes())
    figure = draw(path)
    assert len(figure.axes) == 6
    assert {axes.get_subplotspec().get_gridspec().ncols for axes in figure.axes} == {3}
    titles = {axes.get_title().split()[0] for axes in figure.axes}
    assert titles == {"pca-000000", "pca-ffffff", "a", "b", "c", "d"}


def test_maps_of_one_method_are_told_apart_by_their_layers_where_those_differ(
    tmp_path: Path,
) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"tsne": xy}, labels=labels)
    first = derived.open_projection(tmp_path / "projections" / "tsne-000000.h5")
    for name, layer in (("tsne-ffffff", "hidden"), ("umap-ffffff", "avgpool")):
        attrs = {**first.attrs, "layer": layer, "method": name.split("-")[0]}
        for key in ("format", "version"):
            del attrs[key]
        derived.write_projection(
            tmp_path / "projections" / f"{name}.h5", coords=xy, ids=first.ids, attrs=attrs
        )
    titles = [axes.get_title().split("  ")[0] for axes in draw(path).axes]
    assert titles == ["t-SNE of avgpool", "t-SNE of hidden", "UMAP of avgpool"]


def test_failed_and_unplaced_rows_are_not_drawn(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    xy[10] = np.nan
    path = make_run(tmp_path, {"umap": xy}, labels=labels, failed=(0, 5))
    shown = np.vstack([points for _, points in drawn_classes(draw(path)).values()])
    assert len(shown) == 27
    assert np.isfinite(shown).all()


def test_rows_that_are_not_drawn_are_said_in_the_log_and_in_the_picture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    xy, labels = blobs(30, 3)
    far = xy.copy()
    far[[7, 8]] = np.nan
    maps = {"umap": xy, "pca": far}
    path = make_run(tmp_path / "some", maps, labels=labels, failed=(0, 5, 9))
    said = "not drawn: 3 of 30 rows failed, 2 rows have no place in pca-000001"
    for facet in (None, "label"):
        figure = draw(path, facet=facet)
        assert figure.get_suptitle().splitlines()[1] == said
    assert caplog.messages.count(said) == 2
    caplog.clear()
    figure = draw(make_run(tmp_path / "none", {"umap": xy}, labels=labels))
    assert len(figure.get_suptitle().splitlines()) == 1
    assert "not drawn" not in caplog.text


def test_where_no_row_can_be_drawn_no_picture_is_and_one_line_says_why(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path / "failed", {"umap": xy}, labels=labels, failed=tuple(range(30)))
    reasons = tmp_path / "failed" / "errors.jsonl"
    for facet in (None, "label"):
        with pytest.raises(DataError) as caught:
            view(path, facet=facet)
        assert str(caught.value) == (
            f"every row of {path} failed, and there is nothing to draw; the reasons are in "
            f"{reasons}"
        )
    empty = make_run(tmp_path / "empty", {"umap": np.full((30, 2), np.nan)}, labels=labels)
    where = empty.parent / "projections" / "umap-000000.h5"
    with pytest.raises(DataError) as caught:
        view(empty)
    assert str(caught.value) == (
        f"no row of {empty} has a place in {where}; make the map again, with overwrite=true"
    )
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize("facet", [None, "label"])
@pytest.mark.parametrize("m", [2, 3])
def test_panels_are_as_large_as_they_are_meant_to_be_and_the_legend_is_beside_the_first_line(
    tmp_path: Path, facet: str | None, m: int
) -> None:
    xy, _ = blobs(60, 3, m=m)
    where = ["north", "south", "a name of some length"] * 20
    path = make_run(
        tmp_path, {"umap": xy, "pca": xy}, labels=[0, 1] * 30, metadata={"where": where}
    )
    figure = draw(path, color="where", facet=facet)
    side = (5.2 if facet is None else 3.2) * figure.dpi
    figure.draw_without_rendering()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    for box in boxes:
        assert min(box.width, box.height) == pytest.approx(side, rel=0.02)
        assert max(box.width, box.height) < 1.06 * side
    (key,) = figure.legends
    extent = key.get_window_extent()
    (last,) = [box for box in boxes if box.x1 == max(b.x1 for b in boxes)][:1]
    assert extent.y1 <= last.y1 + 1
    assert 0 <= extent.x0 - last.x1 < 25
    assert extent.x1 <= figure.bbox.x1
    whole = figure.get_tightbbox()
    assert whole.width * figure.dpi > 0.97 * figure.bbox.width  # no empty margin


def test_title_says_model_data_and_layer(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    figure = draw(make_run(tmp_path, {"umap": xy}, labels=labels))
    assert figure.get_suptitle() == "net on blobs, layer avgpool"


# --------------------------------------------------------------------------- classes


def test_ten_classes_have_ten_colours(tmp_path: Path) -> None:
    xy, labels = blobs(100, 10)
    colors = legend(draw(make_run(tmp_path, {"umap": xy}, labels=labels)))
    assert list(colors.values()) == list(PALETTE)
    assert OTHER not in colors.values()


def test_of_more_than_ten_classes_the_rarest_share_grey(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    labels = [i % 12 for i in range(120)] + [11, 11, 10, 10] + list(range(2, 9)) * 2
    xy = np.random.default_rng(0).normal(size=(len(labels), 2))
    figure = draw(make_run(tmp_path, {"umap": xy, "pca": xy}, labels=labels))
    large = [2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert legend(figure) == {
        **{f"class {i}": shade for i, shade in zip(large, PALETTE_BESIDE_OTHER, strict=True)},
        "3 other classes": OTHER,
    }
    shown = drawn_classes(figure)
    assert len(shown["3 other classes"][1]) == 30
    assert np.allclose(shown["class 11"][1], by_axes(xy[np.array(labels) == 11]), atol=1e-5)
    assert sum(len(points) for _, points in shown.values()) == len(labels)
    (artist,) = figure.axes[0].collections
    grey = [to_hex(shade) == OTHER for shade in artist.get_facecolor()]
    assert grey == [True] * 30 + [False] * (len(labels) - 30)  # below the others
    said = "12 classes: the 9 largest have colours of their own"
    assert caplog.messages.count(said) == 1


def test_rows_without_a_label_are_grey_and_nameless(tmp_path: Path) -> None:
    xy, labels = blobs(60, 3)
    labels[::2] = [-1] * 30
    figure = draw(make_run(tmp_path, {"umap": xy}, labels=labels))
    assert legend(figure)["(none)"] == NONE
    assert list(legend(figure))[-1] == "(none)"
    assert len(drawn_classes(figure)["(none)"][1]) == 30
    assert "(none)" not in [text.get_text() for text in figure.axes[0].texts]


def test_legend_counts_as_people_do(tmp_path: Path) -> None:
    names = ["10", "9", "img 12", "img 3", "B", "a", "007", "7", "9" * 40]
    xy, labels = blobs(90, 9)
    figure = draw(make_run(tmp_path, {"umap": xy}, labels=labels, names=names))
    shown = list(legend(figure))
    assert shown == ["007", "7", "9", "10", f"{'9' * 15}...{'9' * 14}", "a", "B", "img 3", "img 12"]


def test_no_two_names_are_drawn_alike_however_long_and_alike_they_are() -> None:
    from embedx.figures import as_labels

    rng = np.random.default_rng(0)
    for most in (20, 32, 64):
        for _ in range(300):
            names = ["".join(rng.choice(list("ab "), k)) for k in (2, 2, 25, 40, 100, 100)]
            middle = len(names[-1]) // 2  # alike at both ends
            names += [f"{names[-1][:middle]}{c}{names[-1][middle:]}" for c in "xyz"]
            texts = as_labels(names, most=most)
            assert len(set(texts)) == len(names)
            assert max(map(len, texts)) <= most + len(" (9)")
    begins = "n02123045_domestic_animals_and_household_pets/"
    told = as_labels([f"{begins}tabby", f"{begins}siamese", "(none)", " ", "(none)"])
    assert told[0].endswith("pets/tabby")
    assert told[1].endswith("pets/siamese")
    assert told[2:] == ["(none)", "' '", "(none) (2)"]


def test_classes_that_begin_alike_are_told_apart_in_legend_map_and_facets(tmp_path: Path) -> None:
    begins = "n02123045_domestic_animals_and_household_pets/"
    names = [
        f"{begins}tabby",
        f"{begins}siamese",
        "Norwegian forest cat 2",
        "Norwegian forest cat 3",
    ]
    xy, labels = blobs(400, 4)
    path = make_run(tmp_path, {"umap": xy}, labels=labels, names=names)
    figure = draw(path)
    inside = [text.get_text() for text in figure.axes[0].texts]
    titles = [title.rpartition(" (")[0] for title in panel_titles(draw(path, facet="label"))]
    for shown in (list(legend(figure)), inside, titles):
        ends = [next(n for n in names if n.endswith(text[-6:])) for text in shown]
        assert sorted(ends) == sorted(names)


def test_a_name_stands_by_points_of_its_own_class_or_in_the_legend_alone(tmp_path: Path) -> None:
    n_named = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        n = (28, 60, 400)[seed % 3]
        labels = rng.integers(0, 2 + seed % 4, n)
        xy = rng.normal(size=(n, 2)) + labels[:, None] * (seed % 2)
        figure = draw(make_run(tmp_path / str(seed), {"umap": xy}, labels=labels.tolist()))
        (axes,) = figure.axes
        figure.draw_without_rendering()
        places = axes.transData.transform(xy)
        for text in axes.texts:
            own = labels == int(text.get_text().split()[1])
            box = text.get_window_extent().padded(2)
            apart = np.maximum(0, np.maximum(box.min - places, places - box.max))
            apart = np.hypot(*apart.T)
            seen = np.flatnonzero(apart > 0)
            assert own[seen[apart[seen].argmin()]]
            assert apart[own].min() < 9
            assert own[seen[np.argsort(apart[seen])[:5]]].mean() > 1 / 5
            if (apart == 0).any():
                covered = np.bincount(labels[apart == 0], minlength=6)
                assert covered.argmax() == labels[own][0]
            n_named += 1
    assert n_named > 12


def test_names_of_classes_stand_on_their_points_and_not_on_each_other(tmp_path: Path) -> None:
    xy, labels = blobs(200, 4)
    inside = draw(make_run(tmp_path / "apart", {"umap": xy}, labels=labels)).axes[0].texts
    assert sorted(text.get_text() for text in inside) == [f"class {i}" for i in range(4)]
    for text in inside:
        members = xy[np.array(labels) == int(text.get_text()[-1])]
        assert np.linalg.norm(np.array(text.get_position()) - members.mean(axis=0)) < 1.5
    heap = np.random.default_rng(0).normal(size=(200, 2))
    figure = draw(make_run(tmp_path / "heap", {"umap": heap}, labels=labels))
    rendered(figure)
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert boxes
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])


def test_few_points_are_not_covered_by_names(tmp_path: Path) -> None:
    xy = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    figure = draw(make_run(tmp_path, {"pca": xy}, labels=[0, 1, 2]))
    assert not figure.axes[0].texts
    pixels = rendered(figure)
    for number, (x, y) in enumerate(figure.axes[0].transData.transform(xy)):
        assert near(pixels[len(pixels) - round(y), round(x)], PALETTE[number], 45)


WEIRD = [
    "$x^2$",
    "$unclosed",
    "_hidden",
    "😀",
    "very long " * 50,
    "two\nlines\tand more",
    r"\frac{1}{2}",
    "漢字",
    "<b>&amp;</b>",
    "%s {0} \x07",
]


def test_any_label_is_drawn_without_error_or_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    xy, labels = blobs(200, 10)
    path = make_run(
        tmp_path,
        {"umap": xy, "$m_1$": xy},
        labels=labels,
        names=WEIRD,
        model="$net_{a}$",
        data="two\nlines",
    )
    figure = draw(path)  # warnings are errors in these tests
    shown = list(legend(figure))
    assert len(shown) == 10
    assert r"\$x^2\$" in shown
    assert r"\$unclosed" in shown
    assert "\u200b_hidden" in shown
    assert "two lines and more" in shown
    assert max(map(len, shown)) <= 34
    assert figure.get_suptitle() == r"\$net_{a}\$ on two lines, layer avgpool"
    with Image.open(tmp_path / "maps.png") as image:
        pixels = np.asarray(image.convert("RGB"))[::3, ::3].astype(int)
    assert all(near(pixels, color, 20).sum() > 100 for color in PALETTE)
    assert capfd.readouterr() == ("", "")


def test_dollar_signs_are_shown_as_they_are_and_not_as_mathematics() -> None:
    from matplotlib.cbook import is_math_text

    from embedx.figures import as_label

    assert is_math_text("$x^2$")
    for name in WEIRD:
        text = as_label(name)
        assert not is_math_text(text)
        plain = text.replace(r"\$", "$").removeprefix("\u200b")
        line = " ".join(name.split())
        assert (plain[:14], plain[-14:]) == (line[:14], line[-14:])


# --------------------------------------------------------------------------- colour


def test_column_of_numbers_is_a_scale(tmp_path: Path) -> None:
    import matplotlib

    xy, labels = blobs(60, 3)
    ages = np.linspace(-5, 5, 60).astype(np.float32)
    ages[7] = np.nan
    path = make_run(tmp_path, {"umap": xy, "pca": xy}, labels=labels, metadata={"age $": ages})
    figure = draw(path, color="age $")
    assert not figure.legends
    assert len(figure.axes) == 3  # one scale for both maps
    assert figure.axes[2].get_ylabel() == r"age \$"
    assert figure.axes[2].get_ylim() == (-5, 5)
    for panel in (0, 1):
        (artist,) = figure.axes[panel].collections
        colors = artist.get_facecolor()[:, :3]
        expected = matplotlib.colormaps["cividis"]((ages + 5) / 10)[:, :3]
        expected[7] = to_rgb(NONE)
        place = np.asarray(artist.get_offsets())
        row = np.abs(place[:, None] - xy[None, :]).sum(axis=2).argmin(axis=1)
        assert sorted(row) == list(range(60))
        assert row[0] == 7  # lowest
        assert np.allclose(colors, expected[row], atol=1e-2)
    rendered(figure)


def test_column_of_few_numbers_or_of_texts_is_classes(tmp_path: Path) -> None:
    xy, _ = blobs(60, 3)
    metadata = {
        "grade": np.arange(60) % 4 * 5,
        "share": np.array([0.5, np.nan, 0.25] * 20),
        "sign": np.array([0.0, -0.0, 1.5] * 20, np.float32),
        "where": ["north", "", "south"] * 20,
    }
    path = make_run(tmp_path, {"umap": xy}, metadata=metadata)
    grade = draw(path, color="grade")
    assert list(legend(grade)) == ["0", "5", "10", "15"]
    assert grade.legends[0].get_title().get_text() == "grade"
    assert legend(draw(path, color="share")) == {
        "0.25": PALETTE[0],
        "0.5": PALETTE[1],
        "(none)": NONE,
    }
    signs = draw(path, color="sign", facet="grade")
    assert list(legend(signs)) == ["0.0", "1.5"]
    assert panel_titles(draw(path, facet="sign")) == ["0.0 (40)", "1.5 (20)"]
    where = draw(path, color="where")
    assert list(legend(where)) == ["north", "south", "(none)"]
    assert np.allclose(drawn_classes(where)["south"][1], by_axes(xy[2::3]), atol=1e-5)


@pytest.mark.parametrize("labelled", [True, False])
def test_without_a_column_all_points_have_one_colour(tmp_path: Path, labelled: bool) -> None:
    xy, labels = blobs(60, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels if labelled else None)
    figure = draw(path, **({"color": "none"} if labelled else {}))
    assert not figure.legends
    (artist,) = figure.axes[0].collections
    assert {to_hex(color) for color in artist.get_facecolor()} == {PALETTE[0]}
    assert np.allclose(by_axes(artist.get_offsets()), by_axes(xy), atol=1e-5)
    assert near(rendered(figure), PALETTE[0]).sum() > 100


def test_unknown_colour_is_refused_with_what_there_is(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels, metadata={"age": np.arange(30)})
    with pytest.raises(ConfigError) as caught:
        view(path, color="ages")
    assert str(caught.value) == (f"color='ages' is no column of {path}; it has: label, none, age")
    assert not list(tmp_path.glob("*.png"))


# --------------------------------------------------------------------------- shapes of maps


@pytest.mark.parametrize(
    "xy",
    [
        np.zeros((1, 2)),
        np.zeros((1, 1)),
        np.array([[0.0], [1.0]]),
        np.ones((40, 2)),
        np.ones((40, 3)),
        np.array([[0.0, 0.0]] * 39 + [[3e38, -3e38]]),
        np.random.default_rng(0).normal(size=(30, 5)),
    ],
    ids=["one", "one-1d", "line", "equal", "equal-3d", "huge", "5d"],
)
def test_map_of_any_shape_is_drawn(tmp_path: Path, xy: Array) -> None:
    labels = [i % 2 for i in range(len(xy))]
    figure = draw(make_run(tmp_path, {"pca": xy}, labels=labels))
    points = [len(points) for _, points in drawn_classes(figure).values()]
    assert sum(points) == len(xy)
    with Image.open(tmp_path / "map-pca-000000.png") as image:
        pixels = np.asarray(image.convert("RGB"))[::3, ::3].astype(int)
    panel = pixels[:, : int(0.75 * pixels.shape[1])]  # the legend lies to the right
    drawn = near(panel, PALETTE[0], 45) | near(panel, PALETTE[1], 45)
    assert drawn.any()


@pytest.mark.parametrize("points", ["density", "images"])
@pytest.mark.parametrize(
    "xy",
    [
        np.zeros((1, 1)),
        np.ones((40, 3)),
        np.array([[0.0, 0.0]] * 39 + [[3e38, -3e38]]),
        np.random.default_rng(0).normal(size=(30, 5)),
    ],
    ids=["one-1d", "equal-3d", "huge", "5d"],
)
def test_map_of_any_shape_is_shaded_and_shown_as_images(
    tmp_path: Path, xy: Array, points: str
) -> None:
    n = len(xy)
    path = embeddings_file(
        tmp_path, np.zeros((n, 2)), thumbnails=np.full((n, 8, 8, 3), 200, np.uint8)
    )
    projection_file(path, "pca-000001", xy)
    axes = draw(path, points=points).axes[0]
    sheet = np.asarray(axes.images[0].get_array())
    assert (sheet[..., 3] > 0).any()
    said = {
        "density": f"{n} point{'s' * (n > 1)}",
        "images": f"of {n} row{'s' * (n > 1)} as {'pictures' if n > 1 else 'a picture'}",
    }
    assert any(said[points] in text.get_text() for text in axes.texts)


def test_map_of_three_dimensions_is_drawn_in_three(tmp_path: Path) -> None:
    xyz, labels = blobs(60, 3, m=3)
    figure = draw(make_run(tmp_path, {"umap": xyz}, labels=labels))
    assert figure.axes[0].name == "3d"
    assert np.allclose(drawn_classes(figure)["class 0"][1], by_axes(xyz[::3]), atol=1e-4)
    pixels = rendered(figure)
    assert all(near(pixels, PALETTE[i]).sum() > 50 for i in range(3))


def test_many_points_stay_visible_and_few_are_larger(tmp_path: Path) -> None:
    ink = {}
    for n in (3, 200, 20_000):
        xy, labels = blobs(n, 3)
        figure = draw(make_run(tmp_path / str(n), {"umap": xy}, labels=labels))
        sizes = {float(artist.get_sizes()[0]) for artist in figure.axes[0].collections}
        assert len(sizes) == 1
        ink[n] = (sizes.pop(), near(rendered(figure), PALETTE[0], 90).sum())
        assert {handle.get_markersize() for handle in figure.legends[0].legend_handles} == {6.0}
    assert ink[3][0] == ink[200][0] > 10 * ink[20_000][0]
    assert ink[20_000][1] > 500


# --------------------------------------------------------------------------- dots and shading


def test_of_two_classes_in_one_place_none_hides_the_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = [0] * 3000 + [1] * 3000
    figure = draw(make_run(tmp_path, {"umap": rng.normal(size=(6000, 2))}, labels=labels))
    pixels = rendered(figure)[:, :500]
    first, second = (near(pixels, shade, 70).sum() for shade in PALETTE[:2])
    assert first > 1000
    assert 0.8 < first / second < 1.25


def test_above_fifty_thousand_points_a_map_is_shading_that_holds_all_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    n = 50_001
    xy, labels = blobs(n, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    figure = draw(path)
    assert not figure.axes[0].collections
    (image,) = figure.axes[0].images
    pixels = np.asarray(image.get_array())
    opacity = pixels[..., 3]
    occupied = opacity > 0
    (note,) = [text.get_text() for text in figure.axes[0].texts if "faint" in text.get_text()]
    most = int(note.split()[6])
    assert note == f"{n:,} points, from 1 (faint) to {most} in a square"
    counts = np.exp((opacity[occupied] - 0.35) / 0.65 * np.log(most))
    assert np.allclose(counts, counts.round(), atol=1e-6)
    assert counts.sum() == pytest.approx(n)
    (left, right), (bottom, top) = figure.axes[0].get_xlim(), figure.axes[0].get_ylim()
    places = ((xy - [left, bottom]) / [right - left, top - bottom] * len(pixels)).astype(int)
    per_class = np.zeros((3, *occupied.shape))
    np.add.at(per_class, (labels, places[:, 1], places[:, 0]), 1)
    # Coordinates are float32 in the file: a few points lie in the square beside.
    assert (per_class.sum(axis=0)[occupied] == counts.round()).mean() > 0.99
    for number in range(3):
        own = np.abs(pixels[..., :3] - to_rgb(PALETTE[number])).max(axis=-1) < 1e-6
        assert (per_class[number][own & occupied] > 0).mean() > 0.99
    said = "umap-000000: more than 50,000 points, drawn as shading; points=dots draws each"
    assert caplog.messages.count(said) == 1
    dots = draw(path, points="dots")
    assert sum(len(xy) for _, xy in drawn_classes(dots).values()) == n
    assert (tmp_path / "map-umap-000000-as-dots.png").exists()


def test_a_mixed_square_has_the_colour_of_one_of_its_points_or_of_their_mean() -> None:
    from embedx.figures import color_scale
    from embedx.panels import shaded

    rng = np.random.default_rng(0)
    places = rng.uniform(size=(20_000, 2))
    is_blue = rng.uniform(size=20_000) < 0.25
    shades = np.where(is_blue[:, None], [0, 0, 1.0], [1.0, 0, 0])
    image, counts = shaded(places, shades, bins=30, faintest=0.2)
    expected, _, _ = np.histogram2d(places[:, 1], places[:, 0], bins=30, range=[[0, 1], [0, 1]])
    assert np.array_equal(counts, expected)
    blue = (image[..., :3] == [0, 0, 1]).all(axis=-1)
    assert (blue | (image[..., :3] == [1, 0, 0]).all(axis=-1)).all()
    assert 0.2 < blue.mean() < 0.3  # as many as there are blue points
    numbers = rng.uniform(size=20_000)
    numbers[::7] = np.nan
    scale = color_scale(numbers, missing=OTHER)
    image, _ = shaded(
        places, np.zeros((20_000, 3)), bins=20, faintest=0.2, numbers=numbers, scale=scale
    )
    for row, column in ((0, 0), (7, 13), (19, 19)):
        inside = ((places * 20).astype(int) == [column, row]).all(axis=1)
        wanted = scale.to_rgba(np.nanmean(numbers[inside]))[:3]
        assert np.allclose(image[row, column, :3], wanted)


def test_a_map_of_one_dimension_keeps_its_places_and_says_that_heights_say_nothing(
    tmp_path: Path,
) -> None:
    x = np.linspace(3, 9, 40)[:, None]
    figure = draw(make_run(tmp_path, {"pca": x}, labels=[0] * 40))
    ((_, points),) = drawn_classes(figure).values()
    assert np.allclose(points[:, 0], x[:, 0], atol=1e-5)
    assert len(np.unique(points[:, 1])) == 40
    assert "heights say nothing" in [text.get_text() for text in figure.axes[0].texts]


def test_shading_shows_a_map_of_three_dimensions_from_the_side_that_dots_show(
    tmp_path: Path,
) -> None:
    from mpl_toolkits.mplot3d import proj3d

    from embedx.panels import flat

    xyz, labels = blobs(300, 3, m=3)
    path = make_run(tmp_path, {"umap": xyz}, labels=labels)
    axes = draw(path).axes[0]
    axes.set_proj_type("ortho")
    x, y, _ = proj3d.proj_transform(*xyz.T, axes.get_proj())
    for ours, theirs in zip(flat(xyz).T, (x, y), strict=True):
        assert np.corrcoef(ours, theirs)[0, 1] == pytest.approx(1, abs=1e-9)
    shaded = draw(path, points="density").axes[0]
    assert shaded.name == "rectilinear"
    assert (np.asarray(shaded.images[0].get_array())[..., 3] > 0).sum() > 100
    assert any("seen from one side" in text.get_text() for text in shaded.texts)


def test_a_class_that_is_nowhere_in_particular_is_not_named_and_a_tight_one_beside(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    everywhere = rng.normal(size=(2000, 2))
    tight = rng.normal(size=(40, 2)) * 0.01 + [8, 0]
    names = ["all about", *[f"mixed {i}" for i in range(4)], "tight"]
    labels = (np.arange(2000) % 5).tolist() + [5] * 40
    path = make_run(tmp_path, {"umap": np.vstack([everywhere, tight])}, labels=labels, names=names)
    figure = draw(path)
    (text,) = figure.axes[0].texts
    assert text.get_text() == "tight"
    figure.draw_without_rendering()
    box = text.get_window_extent()
    assert not box.count_contains(figure.axes[0].transData.transform(tight))
    assert np.linalg.norm(np.array(text.get_position()) - [8, 0]) < 1.5


# --------------------------------------------------------------------------- images


def tiles(sheet: Array) -> list[tuple[slice, slice]]:
    """The parts of a sheet that are apart from each other, each of which is a full rectangle."""
    from scipy import ndimage

    labelled, n = ndimage.label(sheet[..., 3] == 1)
    assert n
    found = ndimage.find_objects(labelled)
    assert all((labelled[box] == number).all() for number, box in enumerate(found, 1))
    return found


@pytest.mark.parametrize("shape", [(10, 16), (24, 24)])
def test_each_thumbnail_is_that_of_the_row_at_its_place_framed_by_its_class_and_overlaps_none(
    tmp_path: Path, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rng = np.random.default_rng(0)
    n = 400
    xy, labels = rng.normal(size=(n, 2)), rng.integers(0, 3, n)
    thumbnails = rng.integers(0, 256, (n, *shape, 3), dtype=np.uint8)
    path = embeddings_file(
        tmp_path, np.zeros((n, 2)), labels=labels.tolist(), thumbnails=thumbnails, failed=(5,)
    )
    xy[5] = np.nan
    projection_file(path, "umap-000001", xy)
    axes = draw(path, points="images").axes[0]
    sheet = np.asarray(axes.images[0].get_array())
    side = len(sheet)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    places = (xy - [left, bottom]) / [right - left, top - bottom] * side
    shown = []
    for rows, columns in tiles(sheet):
        middle = [(columns.start + columns.stop) / 2, (rows.start + rows.stop) / 2]
        tile = sheet[rows, columns, :3]
        edge = 1 + int(np.argmin((tile[len(tile) // 2, 1:] == tile[0, 0]).all(axis=-1)))
        picture = tile[edge:-edge, edge:-edge]
        by = len(picture) // shape[0]
        assert picture.shape[:2] == (shape[0] * by, shape[1] * by)
        # Two rows may be less than a pixel apart, and one of them is hidden.
        here = np.flatnonzero(np.abs(places - middle).max(axis=1) < 0.51)
        (row,) = [
            int(i)
            for i in here
            if np.array_equal((picture[::-by, ::by] * 255).round(), thumbnails[i])
        ]
        frame = np.abs(tile - to_rgb(PALETTE[labels[row]])).max(axis=-1) < 1e-6
        for side_of in (frame[:edge], frame[-edge:], frame[:, :edge], frame[:, -edge:]):
            assert side_of.all()
        shown.append(row)
    assert 40 < len(shown) == len(set(shown))
    (said,) = [message for message in caplog.messages if message.startswith("umap-000001: ")]
    assert said == f"umap-000001: {len(shown)} of 399 rows as pictures, the others as dots"
    rest = np.vstack([points for _, points in drawn_classes(axes.figure).values()])
    others = np.setdiff1d(np.arange(n), [*shown, 5])
    assert np.allclose(by_axes(rest), by_axes(xy[others]), atol=1e-5)


def test_large_thumbnails_are_made_smaller_and_few_rows_are_all_shown(tmp_path: Path) -> None:
    xy = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    flat = np.zeros((3, 400, 300, 3), np.uint8) + np.array([9, 99, 199], np.uint8)
    path = embeddings_file(tmp_path, np.zeros((3, 2)), thumbnails=flat)
    projection_file(path, "umap-000001", xy)
    axes = draw(path, points="images").axes[0]
    sheet = np.asarray(axes.images[0].get_array())
    assert len(tiles(sheet)) == 3
    for rows, columns in tiles(sheet):
        tile = sheet[rows, columns, :3]
        height, width = tile.shape[:2]
        assert 80 < height < 160
        assert np.allclose(tile[height // 4 : -height // 4, width // 4 : -width // 4] * 255,
                           [9, 99, 199])  # fmt: skip
    assert not axes.collections


def test_boxes_never_touch_and_no_more_would_have_room() -> None:
    from embedx.panels import without_overlap

    rng = np.random.default_rng(0)
    for width, height in ((30, 30), (40, 17)):
        places = np.vstack([rng.normal(500, 120, (3000, 2)), rng.uniform(0, 1000, (50, 2))])
        corners, chosen = without_overlap(places, width=width, height=height, most=1000)
        every = np.rint(places - [width / 2, height / 2]).clip(0, [1000 - width, 1000 - height])
        assert np.array_equal(every[chosen], corners)
        apart = (np.abs(every[:, None] - corners[None]) > [width, height]).any(axis=2)
        assert len(chosen) > 50
        assert (~apart[chosen]).sum() == len(chosen)  # each touches itself alone
        assert (~apart).any(axis=1).all()


@pytest.mark.parametrize("points", ["images", "density"])
def test_the_note_below_a_map_stands_clear_of_the_name_of_its_axis(
    tmp_path: Path, points: str
) -> None:
    xy, labels = blobs(40, 2)
    path = embeddings_file(
        tmp_path, np.zeros((40, 2)), labels=labels, thumbnails=np.zeros((40, 8, 8, 3), np.uint8)
    )
    opened = store.open(path)
    attrs = {"id": "x", "parent": "one", "method": "pca", "layer": "avgpool"}
    derived.write_projection(
        tmp_path / "projections" / "pca-000001.h5",
        coords=xy,
        ids=opened.ids,
        attrs=attrs,
        state={"explained_variance_ratio": np.array([0.5, 0.25])},
    )
    figure = draw(path, points=points)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    (note,) = [text for text in axes.texts if "40" in text.get_text()]
    below, label = note.get_window_extent(), axes.xaxis.label.get_window_extent()
    assert axes.get_xlabel() == "PC1 (50.0%)"
    assert label.y0 > 0
    assert 0 < below.y1 < label.y0
    assert below.y0 > 0


def test_images_without_thumbnails_are_refused_in_one_line(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    with pytest.raises(DataError) as caught:
        view(path, points="images")
    assert str(caught.value) == (
        f"{path} has no thumbnails, which points=images needs; make it again, with thumbnails=32 "
        f"overwrite=true, by the command that this prints: python -m embedx info path={path}"
    )


# --------------------------------------------------------------------------- facets


def panel_titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def headings(figure: Figure) -> dict[int, str]:
    """What stands above the title of a panel, by the number of the panel."""
    lefts = {number: axes.get_title(loc="left") for number, axes in enumerate(figure.axes)}
    return {number: left.strip() for number, left in lefts.items() if left}


def test_a_facet_shows_the_rows_of_its_value_and_all_others_grey_behind(tmp_path: Path) -> None:
    xy, labels = blobs(60, 3)
    where = np.array(["south", "north", "", "south"] * 15)
    path = make_run(
        tmp_path, {"umap": xy}, labels=labels, metadata={"where": where.tolist()}, failed=(0, 1)
    )
    figure = draw(path, facet="where")
    assert [p.name for p in tmp_path.glob("*.png")] == ["map-umap-000000-by-where.png"]
    assert panel_titles(figure) == ["north (14)", "south (29)", "(none) (15)"]
    good = np.arange(60) > 1
    for panel, value in enumerate(["north", "south", ""]):
        behind, front = figure.axes[panel].collections
        assert behind.get_zorder() < front.get_zorder()
        assert {to_hex(shade) for shade in behind.get_facecolor()} == {THEMES["light"].behind}
        mine = good & (where == value)
        assert np.allclose(by_axes(front.get_offsets()), by_axes(xy[mine]), atol=1e-5)
        rest = good & (where != value)
        assert np.allclose(by_axes(behind.get_offsets()), by_axes(xy[rest]), atol=1e-5)
        classes = drawn_classes(figure, panel)
        for number in range(3):
            points = classes[f"class {number}"][1]
            assert np.allclose(points, by_axes(xy[mine & (np.array(labels) == number)]), atol=1e-5)
    windows = {(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}
    assert len(windows) == 1


def test_facets_of_several_maps_lie_a_line_a_map_and_shade_what_is_many(tmp_path: Path) -> None:
    xy, labels = blobs(90, 5)
    path = make_run(tmp_path, {"umap": xy, "pca": xy}, labels=labels)
    figure = draw(path, facet="label", points="density")
    assert panel_titles(figure) == [f"class {i} (18)" for i in range(5)] * 2
    assert headings(figure) == {
        0: "PCA  (trustworthiness 0.900)",
        5: "UMAP  (trustworthiness 0.900)",
    }
    assert figure.axes[0].get_subplotspec().get_gridspec().ncols == 5
    assert not figure.legends  # the title of a panel is its class
    behind, front = (np.asarray(image.get_array()) for image in figure.axes[3].images)
    shades = front[front[..., 3] > 0][:, :3]
    assert len(shades) > 5
    assert np.allclose(shades, to_rgb(PALETTE[3]))
    assert 20 < (behind[..., 3] == 1).sum() <= 72


def test_each_map_of_many_facets_begins_a_line_and_says_what_it_is_once(tmp_path: Path) -> None:
    xy, labels = blobs(180, 9)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    first = derived.open_projection(tmp_path / "projections" / "umap-000000.h5")
    attrs = {key: value for key, value in first.attrs.items() if key not in ("format", "version")}
    derived.write_projection(
        tmp_path / "projections" / "pca-ffffff.h5",
        coords=xy,
        ids=first.ids,
        attrs={**attrs, "method": "pca"},
        state={"explained_variance_ratio": np.array([0.5, 0.25])},
    )
    figure = draw(path, facet="label")
    assert panel_titles(figure) == [f"class {i} (20)" for i in range(9)] * 2
    told = {0: "PCA", 9: "UMAP"}
    assert headings(figure) == {i: f"{name}  (trustworthiness 0.900)" for i, name in told.items()}
    assert [i for i, axes in enumerate(figure.axes) if axes.get_xlabel()] == [0]
    at = [
        (axes.get_subplotspec().rowspan.start, axes.get_subplotspec().colspan.start)
        for axes in figure.axes
    ]
    assert at == [(3 * (i // 9) + i % 9 // 3, i % 9 % 3) for i in range(18)]
    figure.draw_without_rendering()
    heads = [figure.axes[i]._left_title for i in told]
    for head in heads:  # its first line, above the title of the panel
        box = head.get_window_extent()
        title = head.axes.title.get_window_extent()
        assert box.y1 - title.y1 > 0.8 * title.height


def test_a_panel_that_names_a_class_shows_it_in_a_colour_that_can_be_told_from_those_behind(
    tmp_path: Path,
) -> None:
    xy, labels = blobs(240, 12)
    labels[::24] = [-1] * 10
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    for theme, look in THEMES.items():
        plain = legend(draw(path, theme=theme))
        figure = draw(path, facet="label", theme=theme)
        titles = panel_titles(figure)
        assert len(titles) == 13
        seen = []
        for title, axes in zip(titles, figure.axes, strict=True):
            (color,) = {to_hex(shade) for shade in axes.collections[1].get_facecolor()}
            assert contrast(color, look.paper) > 1.5
            assert color == plain.get(title.rpartition(" (")[0], look.strong) or title[0] == "("
            seen.append(color)
        assert seen.count(look.strong) == 4  # three classes and what has none
        assert contrast(look.strong, look.behind) > 6


def test_with_facets_of_another_column_the_legend_alone_names_the_classes(tmp_path: Path) -> None:
    xy, labels = blobs(300, 3)
    where = (["north"] * 9 + ["south"]) * 30
    path = make_run(tmp_path, {"umap": xy}, labels=labels, metadata={"where": where})
    figure = draw(path, facet="where")
    assert list(legend(figure)) == [f"class {i}" for i in range(3)]
    assert [len(axes.texts) for axes in figure.axes] == [0, 0]
    assert len(draw(path).axes[0].texts) == 3


def test_a_facet_of_many_numbers_is_intervals_and_of_many_texts_the_largest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    n = 400
    xy = np.random.default_rng(0).normal(size=(n, 2))
    many = [f"t{i}" if i < 30 else f"t{i % 10}" for i in range(n)]
    years = np.arange(n) + 1600
    path = make_run(tmp_path, {"umap": xy}, metadata={"many": many, "year": years})
    titles = panel_titles(draw(path, facet="year", color="none"))
    assert titles[0] == "1600 to 1649 (50)"
    assert titles[-1] == "1950 to 1999 (50)"
    assert len(titles) == 8
    titles = panel_titles(draw(path, facet="many", color="none"))
    assert len(titles) == 24
    assert titles[0] == "t0 (38)"
    assert titles[-1] == "7 others (7)"
    assert sum(int(title.split("(")[1][:-1]) for title in titles) == n
    assert "30 values of many: the 23 largest have a panel of their own" in caplog.messages


def test_facets_of_what_is_not_there_are_refused_with_what_there_is(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path / "a", {"umap": xy}, labels=labels, metadata={"age": np.arange(30)})
    with pytest.raises(ConfigError) as caught:
        view(path, facet="ages")
    assert str(caught.value) == f"facet='ages' is no column of {path}; it has: label, age"
    bare = make_run(tmp_path / "b", {"umap": xy})
    with pytest.raises(ConfigError, match="has no labels to make panels of; name another column"):
        view(bare, facet="label")
    assert not list(tmp_path.rglob("*.png"))


# --------------------------------------------------------------------------- paper and files


def contrast(color: str, paper: str, opacity: float = 1.0) -> float:
    """By WCAG 2.2, 1 to 21, of a colour of that opacity on paper."""
    over = opacity * np.array(to_rgb(color)) + (1 - opacity) * np.array(to_rgb(paper))
    light = []
    for shade in (over, np.array(to_rgb(paper))):
        linear = np.where(shade <= 0.04045, shade / 12.92, ((shade + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_a_lone_point_of_a_shaded_map_can_be_told_from_the_paper() -> None:
    for look in THEMES.values():
        for shade in (*PALETTE, look.other):
            assert contrast(shade, look.paper, look.faintest) > 1.15
    dark = THEMES["dark"]
    assert contrast(dark.other, dark.paper, dark.faintest) > 2


def test_greys_are_told_apart_and_no_two_classes_are_grey() -> None:
    greys = [shade for shade in PALETTE if np.ptp(to_rgb(shade)) < 0.15]
    assert len(greys) == 1
    assert set(PALETTE) - set(PALETTE_BESIDE_OTHER) == set(greys)
    for look in THEMES.values():
        steps = [look.behind, look.none, look.other]
        light = [contrast(shade, look.paper) for shade in steps]
        assert (np.diff([1, *light]) > 0.12).all()  # each further from the paper


def test_dark_maps_have_light_letters_on_dark_paper_and_the_same_colours(tmp_path: Path) -> None:
    xy, labels = blobs(120, 12)
    labels[::10] = [-1] * 12
    figure = draw(make_run(tmp_path, {"umap": xy}, labels=labels), theme="dark")
    look = THEMES["dark"]
    assert legend(figure)["3 other classes"] == look.other
    assert legend(figure)["(none)"] == look.none
    with Image.open(tmp_path / "map-umap-000000-on-dark.png") as image:
        pixels = np.asarray(image.convert("RGB"))[::2, ::2].astype(int)
    assert (np.abs(pixels - np.array(to_rgb(look.paper)) * 255).max(axis=-1) < 2).mean() > 0.7
    assert (pixels > 225).all(axis=-1).sum() > 300  # letters
    assert all(near(pixels, shade, 40).sum() > 50 for shade in PALETTE_BESIDE_OTHER)
    assert not (pixels == 255).all(axis=-1).any()


def test_svg_holds_letters_as_text_and_points_as_a_picture_and_repeats_byte_by_byte(
    tmp_path: Path,
) -> None:
    from xml.etree import ElementTree

    xy, labels = blobs(20_000, 4)
    names = ["$x^2$", "<b>&", "dog", "a cat"]
    path = make_run(tmp_path, {"umap": xy}, labels=labels, names=names)
    draw(path, format="svg")
    file = tmp_path / "map-umap-000000.svg"
    assert [p.name for p in tmp_path.glob("map*")] == [file.name]
    data = file.read_bytes()
    draw(path, format="svg")
    assert file.read_bytes() == data
    assert len(data) < 1_000_000
    root = ElementTree.fromstring(data)
    space = {"svg": "http://www.w3.org/2000/svg"}
    texts = ["".join(text.itertext()) for text in root.iterfind(".//svg:text", space)]
    assert sorted(texts) == sorted(
        [*names, *names, "net on blobs, layer avgpool", "UMAP  (trustworthiness 0.900)"]
    )
    outlined = [
        "".join(text.itertext())
        for text in root.iterfind(".//svg:text", space)
        if "paint-order: stroke; stroke: #ffffff" in text.get("style", "")
    ]
    assert sorted(outlined) == sorted(names)
    (picture,) = root.iterfind(".//svg:image", space)
    content = picture.get("{http://www.w3.org/1999/xlink}href", "").split("base64,")[1]
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        pixels = np.asarray(image.convert("RGBA"))
    solid = pixels[pixels[..., 3] > 120][::5, :3].astype(int)
    assert all(near(solid, shade, 25).sum() > 100 for shade in PALETTE[:4])
    assert b"date" not in data


def test_pictures_of_two_columns_never_have_one_name(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    names = ["a b", "a_b", "a-b", "年齢", "性別", "x" * 250, "x" * 249 + "y", "plain"]
    metadata = {name: [f"{name[:3]} {i % 2}" for i in range(30)] for name in names}
    path = make_run(tmp_path, {"umap": xy}, labels=labels, metadata=metadata)
    for name in names:
        draw(path, color=name, facet=name)
    made = {file.name for file in tmp_path.glob("map-*.png")}
    assert len(made) == len(names)
    assert {f"map-umap-000000-{name}-by-{name}.png" for name in ("a_b", "plain")} < made
    assert max(map(len, made)) < 200
    derived.remove_derived(tmp_path, "one")
    assert not list(tmp_path.glob("*.png"))


def test_pictures_of_a_replaced_file_go_with_it_in_both_formats(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    for form in ("svg", "png"):
        draw(path, format=form, theme="dark")
    mine = tmp_path / "map-mine.svg"
    mine.write_text("<svg/>")
    assert len(list(tmp_path.glob("map-umap*"))) == 2
    derived.remove_derived(tmp_path, "one")
    assert list(tmp_path.glob("map*")) == [mine]


@pytest.mark.parametrize("viewer", ["report", "tensorboard"])
@pytest.mark.parametrize(
    ("option", "value"), [("points", "dots"), ("facet", "label"), ("format", "svg")]
)
def test_what_only_maps_have_is_refused_beside_another_viewer(
    tmp_path: Path, viewer: str, option: str, value: str
) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    with pytest.raises(ConfigError, match=f"{option}={value} has no use beside viewer={viewer}"):
        view(path, viewer=viewer, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"), [("color", "none"), ("open", True), ("out", "x"), ("viewer", "report")]
)
def test_what_following_has_no_use_for_is_refused(tmp_path: Path, option: str, value: Any) -> None:
    path = make_run(tmp_path, {"umap": blobs(30, 3)[0]})
    with pytest.raises(ConfigError, match=f"{option}={value} has no use beside follow=true"):
        view(path, follow=True, **{option: value})


@pytest.mark.parametrize("name", ["maps.png", "map-umap-000000.png", "report.html"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_that_embedx_did_not_write_is_not_replaced(
    tmp_path: Path, name: str, kind: str
) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy, "pca": xy}, labels=labels)
    figs = tmp_path / "figs"
    figs.mkdir()
    mine = figs / name if kind == "file" else tmp_path / "mine"
    mine.write_text("mine")
    if kind == "link":
        (figs / name).symlink_to(mine)
    viewer = "report" if name == "report.html" else "map"
    with pytest.raises(StoreError, match=r"was not written by embedx; move it, or choose another"):
        view(path, viewer=viewer, out=figs)
    assert mine.read_text() == "mine"
    (figs / name).unlink()
    view(path, viewer=viewer, out=figs)
    view(path, viewer=viewer, out=figs)  # ours is replaced


@pytest.mark.parametrize("out", ["my.html", "a.png"])
def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path, out: str) -> None:
    path = make_run(tmp_path, {"umap": blobs(30, 3)[0]})
    with pytest.raises(ConfigError, match="is the name of a file; give a folder"):
        view(path, viewer="report", out=tmp_path / out)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file is a file, and a folder is needed; choose another"):
        view(path, out=tmp_path / "file")


def test_no_browser_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_run(tmp_path, {"umap": blobs(30, 3)[0]})
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    view(path, open=True)
    assert "no browser could be opened on this machine; open file://" in caplog.text


def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    path = _exported(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"from embedx.view import view; view({str(path)!r}, viewer='tensorboard', port={port})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)

    def is_served() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    def wait_until(served: bool) -> bool:
        ends = time.monotonic() + 60
        while is_served() is not served and time.monotonic() < ends:
            time.sleep(0.2)
        return is_served() is served

    try:
        assert wait_until(True)
    finally:
        process.kill()
        process.wait()
    assert wait_until(False)


def test_each_option_can_be_given_on_the_command_line(
    tmp_path: Path, embedx_here: Callable[..., tuple[int, list[str], list[str]]]
) -> None:
    xy, labels = blobs(40, 2)
    path = embeddings_file(
        tmp_path / "run", np.zeros((40, 2)), labels=labels, metadata={"epoch": np.arange(40) % 2},
        thumbnails=np.zeros((40, 8, 8, 3), np.uint8),
    )  # fmt: skip
    projection_file(path, "umap-000001", xy)
    words = ["points=images", "facet=epoch", "theme=dark", "format=svg", "color=epoch"]
    status, _, err = embedx_here("view", "embeddings=run", *words)
    assert status == 0, err
    name = "map-umap-000001-epoch-by-epoch-as-images-on-dark.svg"
    assert (tmp_path / "run" / name).stat().st_size > 5000
    status, _, err = embedx_here("view", "embeddings=run", "theme=drak")
    assert (status, err) == (
        1,
        ["ConfigError: theme must be one of light, dark, not 'drak'; the nearest is dark"],
    )


# --------------------------------------------------------------------------- mistakes


def test_missing_or_stale_projection_is_refused_in_one_line(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    with pytest.raises(StoreError, match="there is no projection 'pca'"):
        view(path, projections=["pca"])
    present = derived.open_projection(tmp_path / "projections" / "umap-000000.h5")
    derived.write_projection(
        present.path, coords=xy, ids=present.ids, attrs={**present.attrs, "parent": "other"}
    )
    with pytest.raises(StoreError, match="belongs to other embeddings"):
        view(path, projections=["umap"])
    with pytest.raises(DataError, match="has no projection yet"):  # not asked for: passed over
        view(path)
    present.path.unlink()
    with pytest.raises(DataError) as caught:
        view(path)
    assert str(caught.value) == (
        f"{path} has no projection yet; make one with: python -m embedx project embeddings={path}"
    )
    with pytest.raises(StoreError, match="make it with: python -m embedx extract"):
        view(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import matplotlib.pyplot\n"], ids=["bare", "pyplot"])
def test_a_notebook_shows_the_map_once(tmp_path: Path, first: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    xy, labels = blobs(60, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    notebook = nbformat.v4.new_notebook()
    source = f"{first}import embedx\nembedx.view({str(path)!r})"
    notebook.cells = [nbformat.v4.new_code_cell(source)]
    nbclient.NotebookClient(notebook, timeout=120).execute()
    (output,) = notebook.cells[0].outputs
    assert output.output_type == "execute_result"
    with Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    for color in PALETTE[:3]:
        assert near(pixels, color, 20).sum() > 100
    if not first:  # pyplot brings a way of its own to show a figure
        shown = output.metadata["image/png"]
        assert shown["width"] * 1.5 == pytest.approx(pixels.shape[1], abs=2)
        assert shown["height"] * 1.5 == pytest.approx(pixels.shape[0], abs=2)


def test_a_map_is_unknown_to_pyplot_and_collected_when_it_is_let_go(tmp_path: Path) -> None:
    import gc
    import weakref

    from matplotlib import pyplot

    xy, labels = blobs(30, 3)
    figure = draw(make_run(tmp_path, {"umap": xy}, labels=labels))
    assert pyplot.get_fignums() == []
    kept = weakref.ref(figure)
    del figure
    gc.collect()
    assert kept() is None


def test_missing_matplotlib_is_told_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from embedx.errors import DependencyError

    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r"pip install -e \"\.\[viz\]\""):
        view(path)


def _exported(folder: Path) -> Path:
    xy, labels = blobs(30, 3)
    path = make_run(folder, {"umap": xy}, labels=labels)
    (folder / "projector").mkdir()
    (folder / "projector" / "projector_config.pbtxt").touch()
    return path


def test_tensorboard_without_an_export_is_refused(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    with pytest.raises(
        DataError, match=r"there is no export in .*: python -m embedx export embeddings=.*"
    ):
        view(path, viewer="tensorboard")


def test_port_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    path = _exported(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            view(path, viewer="tensorboard", port=port)
    assert str(caught.value) == (
        f"port {port} cannot be used (Address already in use); choose port=NUMBER"
    )


@pytest.mark.parametrize("port", [-1, 0, 65_536])
def test_port_that_is_none_is_refused_in_one_line(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port} cannot be used") as caught:
        view(_exported(tmp_path), viewer="tensorboard", port=port)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("out", [None, "."])
def test_tensorboard_that_ends_by_itself_is_told(
    out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess
    import sys

    commands = []

    class Server:
        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)

        def wait(self) -> int:
            return 3

        def terminate(self) -> None:
            pass

    path = _exported(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Server)
    with pytest.raises(DataError, match="TensorBoard ended with exit status 3"):
        view(path, viewer="tensorboard", port=6123, out=tmp_path if out else None)
    (command,) = commands
    assert command[:2] == [sys.executable, "-c"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "6123"
    # A folder above exports is served as it is, and shows each of them.
    assert command[command.index("--logdir") + 1] == str(tmp_path / (out or "projector"))


def test_names_in_no_font_are_said_and_the_rest_is_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels, names=["\U000130b8", "b", "c"])
    assert view(path) is not None
    assert "characters of the names are in no font that matplotlib found" in caplog.text


def test_maps_newer_than_an_export_are_said_before_it_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    export = path.parent / "projector" / "projector_config.pbtxt"
    export.parent.mkdir()
    export.write_text("")
    os.utime(export, (1, 1))
    with pytest.raises(ConfigError, match="port 0 cannot be used"):
        view(path, viewer="tensorboard", port=0)
    assert "1 map is newer than the export and not in it" in caplog.text


def test_each_map_is_coloured_by_its_own_score_of_each_point(tmp_path: Path) -> None:
    from embedx.project import project

    x = np.random.default_rng(0).normal(size=(80, 12))
    path = embeddings_file(tmp_path, x, failed=(3,))
    maps = [project(path, method="pca"), project(path, method="pca", n_components=7)]
    figure = draw(path, color="neighborhood", projections=[str(p.path) for p in maps])
    scale = figure.axes[-1]
    assert scale.get_ylabel() == "share of near rows kept"
    for panel, projection in enumerate(maps):
        (artist,) = figure.axes[panel].collections
        placed = np.isfinite(projection.coords).all(axis=1)
        xy, at = projection.coords[placed, :2], np.asarray(artist.get_offsets())
        row = np.abs(at[:, None] - xy[None, :]).sum(axis=2).argmin(axis=1)
        assert sorted(row) == list(range(len(xy)))
        light = np.asarray(artist.get_facecolor())[:, :3].sum(axis=1)
        scores = projection.row_scores["neighborhood"][placed][row]
        assert len(np.unique(scores)) > 5
        assert (np.diff(light[np.argsort(scores, kind="stable")]) >= -1e-6).all()
    assert figure.axes[0].get_xlabel().startswith("PC1 (")
    assert sorted(file.name for file in path.parent.glob("variance-*.png")) == sorted(
        f"variance-{projection.name}.png" for projection in maps
    )
    projection_file(path, "umap-000000", x[:, :2].astype("f4"), method="umap")
    with pytest.raises(DataError, match="no score of each row"):
        view(path, color="neighborhood")


def test_axes_of_a_pca_say_how_much_of_the_variance_they_hold(tmp_path: Path) -> None:
    from embedx.project import project

    x = np.random.default_rng(0).normal(size=(300, 3)) * [3, 2, 1]
    path = embeddings_file(tmp_path, x)
    project(path, method="pca")
    variance = np.sort(np.linalg.eigvalsh(np.cov(x.T)))[::-1]
    first, second = 100 * variance[:2] / variance.sum()
    axes = draw(path).axes[0]
    assert axes.get_xlabel() == f"PC1 ({first:.1f}%)"
    assert axes.get_ylabel() == f"PC2 ({second:.1f}%)"
