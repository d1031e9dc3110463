"""The stage ``view``: what is really in the pictures."""

import base64
import io
import logging
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedx import store
from embedx.errors import ConfigError, DataError, StoreError
from embedx.figures import OTHER, PALETTE, PALETTE_BESIDE_OTHER
from embedx.view import view
from tests.conftest import embeddings_file, projection_file

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


def painted(figure: Figure, panel: int = 0) -> dict[str, tuple[str, Array]]:
    """By name of the class: the colour and the points really handed to matplotlib."""
    return {
        str(artist.get_label()): (to_hex(artist.get_facecolor()[0]), np.array(artist.get_offsets()))
        for artist in figure.axes[panel].collections
    }


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
    for name, (color, points) in painted(figure).items():
        number = int(name.split()[1])
        assert color == PALETTE[number]
        assert np.allclose(points, xy[np.array(labels) == number], atol=1e-5)
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
            pixels = np.asarray(image.convert("RGB")).astype(int)
        widths.append(pixels.shape[1])
        for color in PALETTE:
            assert near(pixels, color, 20).sum() > 100, (name, color)
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
    first = store.open_projection(tmp_path / "projections" / "tsne-000000.h5")
    for name, layer in (("tsne-ffffff", "hidden"), ("umap-ffffff", "avgpool")):
        attrs = {**first.attrs, "layer": layer, "method": name.split("-")[0]}
        for key in ("format", "version"):
            del attrs[key]
        store.write_projection(
            tmp_path / "projections" / f"{name}.h5", coords=xy, ids=first.ids, attrs=attrs
        )
    titles = [axes.get_title().split("  ")[0] for axes in draw(path).axes]
    assert titles == ["t-SNE of avgpool", "t-SNE of hidden", "UMAP of avgpool"]


def test_failed_and_unplaced_rows_are_not_drawn(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    xy[10] = np.nan
    path = make_run(tmp_path, {"umap": xy}, labels=labels, failed=(0, 5))
    shown = np.vstack([points for _, points in painted(draw(path)).values()])
    assert len(shown) == 27
    assert np.isfinite(shown).all()


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
    labels = [i % 12 for i in range(120)] + [11, 11, 10, 10] + list(range(2, 8)) * 2
    xy = np.random.default_rng(0).normal(size=(len(labels), 2))
    figure = draw(make_run(tmp_path, {"umap": xy, "pca": xy}, labels=labels))
    large = [2, 3, 4, 5, 6, 7, 10, 11]
    assert legend(figure) == {
        **{f"class {i}": shade for i, shade in zip(large, PALETTE_BESIDE_OTHER, strict=True)},
        "4 other classes": OTHER,
    }
    shown = painted(figure)
    assert len(shown["4 other classes"][1]) == 40
    assert np.allclose(shown["class 11"][1], xy[np.array(labels) == 11], atol=1e-5)
    assert sum(len(points) for _, points in shown.values()) == len(labels)
    assert next(iter(shown)) == "4 other classes"  # drawn first, below the others
    said = "12 classes: the 8 largest have colours of their own"
    assert caplog.messages.count(said) == 1


def test_rows_without_a_label_are_grey_and_nameless(tmp_path: Path) -> None:
    xy, labels = blobs(60, 3)
    labels[::2] = [-1] * 30
    figure = draw(make_run(tmp_path, {"umap": xy}, labels=labels))
    assert legend(figure)["(none)"] == OTHER
    assert list(legend(figure))[-1] == "(none)"
    assert len(painted(figure)["(none)"][1]) == 30
    assert "(none)" not in [text.get_text() for text in figure.axes[0].texts]


def test_legend_counts_as_people_do(tmp_path: Path) -> None:
    names = ["10", "9", "img 12", "img 3", "B", "a", "007", "7", "9" * 40]
    xy, labels = blobs(90, 9)
    figure = draw(make_run(tmp_path, {"umap": xy}, labels=labels, names=names))
    shown = list(legend(figure))
    assert shown == ["007", "7", "9", "10", "9" * 29 + "...", "a", "B", "img 3", "img 12"]


def test_names_of_classes_stand_on_their_points_and_not_on_each_other(tmp_path: Path) -> None:
    xy, labels = blobs(200, 4)
    inside = draw(make_run(tmp_path / "apart", {"umap": xy}, labels=labels)).axes[0].texts
    assert sorted(text.get_text() for text in inside) == [f"class {i}" for i in range(4)]
    for text in inside:
        members = xy[np.array(labels) == int(text.get_text()[-1])]
        assert np.linalg.norm(np.array(text.xy) - members.mean(axis=0)) < 1.5
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
        pixels = np.asarray(image.convert("RGB")).astype(int)
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
        assert plain[:20] == " ".join(name.split())[:20]


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
        expected[7] = to_rgb(OTHER)
        assert np.allclose(colors, expected, atol=1e-2)
    rendered(figure)


def test_column_of_few_numbers_or_of_texts_is_classes(tmp_path: Path) -> None:
    xy, _ = blobs(60, 3)
    metadata = {
        "grade": np.arange(60) % 4 * 5,
        "share": np.array([0.5, np.nan, 0.25] * 20),
        "where": ["north", "", "south"] * 20,
    }
    path = make_run(tmp_path, {"umap": xy}, metadata=metadata)
    grade = draw(path, color="grade")
    assert list(legend(grade)) == ["0", "5", "10", "15"]
    assert grade.legends[0].get_title().get_text() == "grade"
    assert legend(draw(path, color="share")) == {
        "0.25": PALETTE[0],
        "0.5": PALETTE[1],
        "(none)": OTHER,
    }
    where = draw(path, color="where")
    assert list(legend(where)) == ["north", "south", "(none)"]
    assert np.allclose(painted(where)["south"][1], xy[2::3], atol=1e-5)


@pytest.mark.parametrize("labelled", [True, False])
def test_without_a_column_all_points_have_one_colour(tmp_path: Path, labelled: bool) -> None:
    xy, labels = blobs(60, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels if labelled else None)
    figure = draw(path, **({"color": "none"} if labelled else {}))
    assert not figure.legends
    (artist,) = figure.axes[0].collections
    assert {to_hex(color) for color in artist.get_facecolor()} == {PALETTE[0]}
    assert np.allclose(np.array(artist.get_offsets()), xy, atol=1e-5)
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
        np.full((5, 2), np.nan),
        np.random.default_rng(0).normal(size=(30, 5)),
    ],
    ids=["one", "one-1d", "line", "equal", "equal-3d", "huge", "nothing", "5d"],
)
def test_map_of_any_shape_is_drawn(tmp_path: Path, xy: Array) -> None:
    labels = [i % 2 for i in range(len(xy))]
    figure = draw(make_run(tmp_path, {"pca": xy}, labels=labels))
    points = [len(points) for _, points in painted(figure).values()]
    assert sum(points) == np.isfinite(xy).all(axis=1).sum()
    with Image.open(tmp_path / "map-pca-000000.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    panel = pixels[:, : int(0.75 * pixels.shape[1])]  # the legend lies to the right
    assert near(panel, PALETTE[0], 45).any() == (sum(points) > 0)


def test_map_of_three_dimensions_is_drawn_in_three(tmp_path: Path) -> None:
    xyz, labels = blobs(60, 3, m=3)
    figure = draw(make_run(tmp_path, {"umap": xyz}, labels=labels))
    assert figure.axes[0].name == "3d"
    first = next(a for a in figure.axes[0].collections if a.get_label() == "class 0")
    assert np.allclose(np.sort(np.array(first._offsets3d[2])), np.sort(xyz[::3, 2]), atol=1e-4)
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


# --------------------------------------------------------------------------- mistakes


def test_missing_or_stale_projection_is_refused_in_one_line(tmp_path: Path) -> None:
    xy, labels = blobs(30, 3)
    path = make_run(tmp_path, {"umap": xy}, labels=labels)
    with pytest.raises(StoreError, match="there is no projection 'pca'"):
        view(path, projections=["pca"])
    present = store.open_projection(tmp_path / "projections" / "umap-000000.h5")
    store.write_projection(
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


def test_tensorboard_that_ends_by_itself_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        view(path, viewer="tensorboard", port=6123)
    (command,) = commands
    assert command[:3] == [sys.executable, "-m", "tensorboard.main"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "6123"
    assert command[command.index("--logdir") + 1] == str(tmp_path / "projector")


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
    assert "1 maps are newer than the export and not in it" in caplog.text


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
        np.testing.assert_allclose(artist.get_offsets(), projection.coords[placed, :2])
        light = np.asarray(artist.get_facecolor())[:, :3].sum(axis=1)
        scores = projection.row_scores["neighborhood"][placed]
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
