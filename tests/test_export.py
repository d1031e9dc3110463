"""The stage ``export``, read back by the code of TensorBoard's projector plugin."""

import contextlib
import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedx import derived
from embedx.disk import replace_file, replacing, replacing_folder, sweep
from embedx.errors import ConfigError, DataError, StoreError
from embedx.export import export
from tests.conftest import embeddings_file, projection_file

pytest.importorskip("tensorboard", reason="the viz extra is not installed")
from PIL import Image
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.projector.projector_plugin import ProjectorPlugin
from werkzeug.test import Client

Array = np.ndarray[Any, Any]
EXPORT = sys.modules["embedx.export"]  # the package shows the function under this name

ODD_LABELS = [
    "a\tb",
    "two\nlines",
    "back\r\nagain",
    'say "hi"',
    "it's",
    "",
    "=cmd|' /C calc'!A0",
    "</script><b>",
    "\N{CAT FACE}\N{ZERO WIDTH JOINER}\N{SNOWMAN}",
    "007",
    "7",
    "1e5",
    "0x10",
    "Infinity",
    "e",
    "-",
    "NaN",
    "\ufeff",
    "line\u2028separator",
]


class Served:
    """An exported folder through the handlers of TensorBoard's own server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plugin = ProjectorPlugin(TBContext(logdir=str(folder)))
        self._apps = plugin.get_plugin_apps()
        assert json.loads(self._get("/runs")) == ["."]
        self.config = json.loads(self._get("/info?run=."))["embeddings"]

    def _get(self, address: str) -> bytes:
        route = address.partition("?")[0]
        answer = Client(self._apps[route]).get(address)
        assert answer.status_code == 200, answer.get_data(as_text=True)
        return answer.get_data()

    def _ask(self, route: str, name: str) -> bytes:
        return self._get(f"{route}?run=.&name={quote(name)}&num_rows=100000")

    @property
    def names(self) -> list[str]:
        return [entry["tensorName"] for entry in self.config]

    def entry(self, name: str) -> dict[str, Any]:
        return next(e for e in self.config if e["tensorName"] == name)

    def tensor(self, name: str) -> Array:
        shape = [int(side) for side in self.entry(name)["tensorShape"]]
        return np.frombuffer(self._ask("/tensor", name), np.float32).reshape(shape)

    def metadata(self, name: str) -> dict[str, list[str | None]]:
        return as_page(self._ask("/metadata", name))

    def bookmarks(self, name: str) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = json.loads(self._ask("/bookmarks", name))
        return states

    def coords(self, name: str, number: int) -> Array:
        rows = self.bookmarks(name)[number]["projections"]
        return np.array([[row["umap-0"], row["umap-1"], row["umap-2"]] for row in rows])

    def sheet(self, name: str) -> Array:
        return np.asarray(Image.open(io.BytesIO(self._ask("/sprite_image", name))))

    def tile(self, name: str, row: int) -> Array:
        """The tile of a row as the page cuts it: as many across as fit, row by row."""
        side = int(self.entry(name)["sprite"]["singleImageDim"][0])
        sheet = self.sheet(name)
        y, x = divmod(row, sheet.shape[1] // side)
        return sheet[y * side : (y + 1) * side, x * side : (x + 1) * side]


def as_page(data: bytes) -> dict[str, list[str | None]]:
    """The columns that TensorBoard 2.21's page makes of metadata.tsv, before it finds numbers."""
    blocks = [data[i : i + 1_000_000] for i in range(0, len(data), 1_000_000)]
    assert data.endswith(b"\n"), "the page would wait for the rest for ever"
    lines = "".join(block.decode("utf-8", "replace") for block in blocks).split("\n")
    lines = [line for line in lines if line.strip()]
    names = lines.pop(0).split("\t") if "\t" in lines[0] else ["label"]
    rows = [line.split("\t") for line in lines]
    return {name: [row[i] or None for row in rows] for i, name in enumerate(names)}


def points_of(n: int, d: int = 8, *, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def pictures_of(n: int, side: int = 8) -> Array:
    """Every row a colour of its own, with a mark in one corner so that a turn would show."""
    pictures = np.empty((n, side, side, 3), np.uint8)
    for i in range(n):
        pictures[i] = (i % 256, 255 - i % 256, (i * 7) % 256)
        pictures[i, 0, 0] = 0
    return pictures


@pytest.mark.parametrize("n", [2, 3, 50])
def test_what_the_server_reads_back_equals_what_went_in(tmp_path: Path, n: int) -> None:
    x, pictures = points_of(n), pictures_of(n)
    labels = [f"class {i % 3}" for i in range(n)]
    flat, solid = points_of(n, 2, seed=1), points_of(n, 3, seed=2) * 1e-6
    path = embeddings_file(tmp_path, {"pool": x}, labels=labels, thumbnails=pictures)
    projection_file(path, "tsne-1", flat)
    projection_file(path, "umap-2", solid)
    served = Served(export(path))
    assert served.names == ["1-pool", "2-pool.points", "3-tsne-1", "4-umap-2"]
    for name in ("1-pool", "2-pool.points"):
        np.testing.assert_array_equal(served.tensor(name), x)
        assert [state["label"] for state in served.bookmarks(name)] == [
            "TSNE tsne-1",
            "UMAP umap-2",
        ]
        assert [state["umapIs3d"] for state in served.bookmarks(name)] == [False, True]
        np.testing.assert_allclose(served.coords(name, 0)[:, :2], flat, rtol=1e-6)
        assert not served.coords(name, 0)[:, 2].any()
        np.testing.assert_allclose(served.coords(name, 1), solid, rtol=1e-6)
    for name in served.names:
        assert served.metadata(name) == {"id": [f"row-{i:04d}" for i in range(n)], "label": labels}
    assert "sprite" in served.entry("1-pool")
    assert "sprite" not in served.entry("2-pool.points")
    across = math.ceil(math.sqrt(n))
    assert served.sheet("1-pool").shape == (across * 8, across * 8, 3)
    for row in range(n):
        np.testing.assert_array_equal(served.tile("1-pool", row), pictures[row])


@pytest.mark.parametrize("n", [2, 50])
def test_a_projection_tensor_is_the_projection_turned_to_its_principal_axes(
    tmp_path: Path, n: int
) -> None:
    coords = points_of(n, 2, seed=3) @ np.array([[3.0, 1.0], [0.0, 0.1]], np.float32)
    path = embeddings_file(tmp_path, {"pool": points_of(n)})
    projection_file(path, "umap-1", coords)
    turned = Served(export(path)).tensor("2-umap-1").astype(np.float64)
    assert turned.shape == (n, 3)
    assert not turned[:, 2].any()
    distances = np.linalg.norm(coords[:, None] - coords[None], axis=2)
    np.testing.assert_allclose(
        np.linalg.norm(turned[:, None] - turned[None], axis=2), distances, atol=1e-4
    )
    covariance = np.cov(turned[:, :2].T)
    assert abs(covariance[0, 1]) < 1e-5 * covariance[0, 0]
    assert covariance[0, 0] >= covariance[1, 1]


@pytest.mark.parametrize(("n", "failed"), [(1, []), (3, [0, 2])])
def test_one_row_to_show_is_an_error_of_one_line(tmp_path: Path, n: int, failed: list[int]) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(n)}, failed=failed)
    with pytest.raises(DataError, match=f"has 1 rows of {n} to show") as caught:
        export(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "projector").exists()


def test_every_row_keeps_its_own_label_whatever_the_labels_hold(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(len(ODD_LABELS))}, labels=ODD_LABELS)
    assert Served(export(path)).metadata("1-pool")["label"] == [
        "a b",
        "two lines",
        "back again",
        'say "hi"',
        "it's",
        "(none)",
        "=cmd|' /C calc'!A0",
        "</script><b>",
        "\N{CAT FACE}\N{ZERO WIDTH JOINER}\N{SNOWMAN}",
        "#007",  # the page would show 7
        "#7",
        "#1e5",  # 100000
        "#0x10",  # 16
        "#Infinity",
        "e",
        "-",
        "NaN",
        "(none)",  # blank for the page, which would show 0
        "line separator",
    ]


def test_numbers_that_the_page_shows_unchanged_stay_numbers(tmp_path: Path) -> None:
    labels = ["0", "10", "9", "-3", "0.5", "1.25"]
    path = embeddings_file(tmp_path, {"pool": points_of(6)}, labels=labels)
    assert Served(export(path)).metadata("1-pool")["label"] == labels


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
        | st.sampled_from(["007", "#007", "##1", "1e5", "7", "(none)"]),
        min_size=2,
        max_size=20,
    )
)
def test_labels_differ_after_the_export_where_their_printed_characters_differ(
    tmp_path_factory: pytest.TempPathFactory, labels: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("labels")
    path = embeddings_file(folder, {"pool": points_of(len(labels))}, labels=labels)
    shown = Served(export(path)).metadata("1-pool")["label"]
    assert len(shown) == len(labels)
    for label, cell in zip(labels, shown, strict=True):
        assert printed(str(cell)).lstrip("#") == printed(label or "(none)").lstrip("#") or (
            not printed(label) and cell == "(none)"
        )
    clean = {s for s in labels if s.isprintable() and s == s.strip() and s not in ("", "(none)")}
    assert len({cell for s, cell in zip(labels, shown, strict=True) if s in clean}) == len(clean)


def printed(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and not c.isspace())


def test_one_column_has_no_header_and_several_have_one(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    ids = ["first", "second", "003"]
    one = embeddings_file(tmp_path / "one", {"pool": points_of(3)}, ids=ids)
    assert (export(one) / "metadata.tsv").read_text() == "first\nsecond\n#003\n"
    metadata = {"label": ["x", "y", "z"], "__next__": np.array([1, 2, 3])}
    two = embeddings_file(tmp_path / "two", {"pool": points_of(3)}, ids=ids, metadata=metadata)
    text = (export(two) / "metadata.tsv").read_text()
    assert text.splitlines()[0] == "id\t__next___\tlabel"
    assert Served(tmp_path / "two" / "projector").metadata("1-pool") == {
        "id": ["first", "second", "#003"],
        "label": ["x", "y", "z"],
        "__next___": ["1", "2", "3"],
    }


def test_missing_numbers_are_empty_cells_and_text_columns_keep_their_text(tmp_path: Path) -> None:
    path = embeddings_file(
        tmp_path,
        {"pool": points_of(3)},
        metadata={
            "score": np.array([0.5, np.nan, np.inf]),
            "big": np.array([2**60 + 1, 2, 3]),
            "code": ["01", "a\tb", ""],
        },
    )
    columns = Served(export(path)).metadata("1-pool")
    assert columns["score"] == ["0.5", None, None]
    assert columns["big"] == [f"#{2**60 + 1}", "#2", "#3"]  # the page would round it
    assert columns["code"] == ["#01", "a b", "(none)"]


def test_more_than_50_classes_get_a_column_with_at_most_50(tmp_path: Path) -> None:
    labels = [f"class {i % 60}" for i in range(90)] + ["class 59"] * 5
    path = embeddings_file(tmp_path, {"pool": points_of(95)}, labels=labels)
    projection_file(path, "umap-1", points_of(95, 2))
    served = Served(export(path))
    columns = served.metadata("1-pool")
    assert columns["label"] == labels
    counts = Counter(columns["class"])
    assert len(counts) == 50
    assert counts["class 59"] == 6
    for label, group in zip(labels, columns["class"], strict=True):
        assert group in (label, "(other)")
    (state,) = served.bookmarks("1-pool")
    assert (state["selectedColorOptionName"], state["selectedLabelOption"]) == ("class", "label")


def test_50_classes_are_shown_by_their_own_names(tmp_path: Path) -> None:
    path = embeddings_file(
        tmp_path,
        {"pool": points_of(50)},
        labels=[f"class {i}" for i in range(50)],
        metadata={"class": np.arange(50)},
    )
    projection_file(path, "umap-1", points_of(50, 2))
    served = Served(export(path))
    assert list(served.metadata("1-pool")) == ["id", "label", "class"]
    assert served.bookmarks("1-pool")[0]["selectedColorOptionName"] == "label"


def test_bookmarks_colour_points_and_leave_pictures_as_they_are(tmp_path: Path) -> None:
    path = embeddings_file(
        tmp_path, {"pool": points_of(4)}, labels=["a", "b", "a", "b"], thumbnails=pictures_of(4)
    )
    projection_file(path, "umap-1", points_of(4, 2))
    served = Served(export(path))
    assert served.bookmarks("1-pool")[0]["selectedColorOptionName"] == "No color map"
    assert served.bookmarks("2-pool.points")[0]["selectedColorOptionName"] == "label"


@pytest.mark.parametrize("metadata", [None, {"width": np.arange(4)}])
def test_bookmarks_name_columns_that_are_there(
    tmp_path: Path, metadata: dict[str, Array] | None
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(4)}, metadata=metadata)
    projection_file(path, "umap-1", points_of(4, 2))
    served = Served(export(path))
    (state,) = served.bookmarks("1-pool")
    assert state["selectedLabelOption"] in served.metadata("1-pool")
    assert state["selectedColorOptionName"] == "No color map"


@pytest.mark.parametrize("cell_bytes", [60, 61, 62, 63])
def test_no_character_is_spoilt_where_the_page_cuts_the_metadata_into_megabytes(
    tmp_path: Path, cell_bytes: int
) -> None:
    n = 2_000_000 // (cell_bytes * 20) + 2
    note = "x" * (cell_bytes % 4) + "\N{CAT FACE}" * (cell_bytes * 5)
    path = embeddings_file(tmp_path, {"pool": points_of(n)}, metadata={"note": [note] * n})
    folder = export(path)
    assert (folder / "metadata.tsv").stat().st_size > 2_000_000
    columns = Served(folder).metadata("1-pool")
    assert columns["note"] == [note] * n
    assert columns["id"] == [f"row-{i:04d}" for i in range(n)]


def first_line_is_text(x: Array) -> bool:
    """Whether a server that reads line by line takes the first line of raw ``x`` for text."""
    line = x.astype("<f4").tobytes().split(b"\n")[0]
    return line.decode("utf-8", "ignore").encode() == line


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((5, 4), np.float32),
        np.tile(np.array([[0.5, 2.0, 0.0]], np.float32), (5, 1)),
        # valid text up to a line feed, and not after it
        np.vstack([np.frombuffer(b"abcd\n\0\0\0", "<f4"), -points_of(4, 2)]),
    ],
    ids=["zeros", "halves and twos", "text at first"],
)
def test_a_tensor_whose_bytes_read_as_text_is_written_as_text(tmp_path: Path, x: Array) -> None:
    assert first_line_is_text(x)
    served = Served(export(embeddings_file(tmp_path, {"pool": x})))
    assert served.entry("1-pool")["tensorPath"].endswith(".tsv")
    np.testing.assert_array_equal(served.tensor("1-pool")[:, : x.shape[1]], x)


def test_other_tensors_are_written_raw(tmp_path: Path) -> None:
    x = points_of(50, 300)
    assert not first_line_is_text(x)
    served = Served(export(embeddings_file(tmp_path, {"pool": x})))
    file = served.folder / served.entry("1-pool")["tensorPath"]
    assert file.read_bytes() == x.tobytes()


@pytest.mark.parametrize("d", [1, 2])
def test_a_tensor_of_one_or_two_columns_gets_the_three_that_the_page_draws(
    tmp_path: Path, d: int
) -> None:
    x = points_of(6, d)
    path = embeddings_file(tmp_path, {"pool": x})
    projection_file(path, "pca-1", points_of(6, 1))
    served = Served(export(path))
    for name in served.names:
        assert served.tensor(name).shape == (6, 3)
    np.testing.assert_array_equal(served.tensor("1-pool")[:, :d], x)
    assert served.bookmarks("1-pool")[0]["dataSetDimensions"] == [6, 3]


def test_failed_rows_are_dropped_from_every_file_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    n, failed, unplaced, overflow = 20, [0, 7], 11, 13
    x, pictures, flat = points_of(n).astype(np.float64), pictures_of(n), points_of(n, 2)
    x[overflow, 3] = 1e300  # finite as it is stored, infinite in the projector's float32
    flat[[*failed, unplaced]] = np.nan
    labels = [f"class {i}" for i in range(n)]
    path = embeddings_file(
        tmp_path,
        {"pool": x},
        labels=labels,
        thumbnails=pictures,
        failed=failed,
        dtype=np.float64,
    )
    projection_file(path, "umap-1", flat)
    with caplog.at_level(logging.INFO, "embedx"):
        served = Served(export(path))
    assert [message for message in caplog.messages if "left out" in message] == [
        "2 rows failed and are left out",
        "1 rows could not be placed by every projection and are left out",
        "1 rows hold a number that is not finite and are left out",
    ]
    kept = [i for i in range(n) if i not in (*failed, unplaced, overflow)]
    np.testing.assert_array_equal(served.tensor("1-pool"), x[kept].astype(np.float32))
    assert len(served.tensor("3-umap-1")) == len(kept)
    assert served.metadata("1-pool") == {
        "id": [f"row-{i:04d}" for i in kept],
        "label": [labels[i] for i in kept],
    }
    np.testing.assert_allclose(served.coords("1-pool", 0)[:, :2], flat[kept], rtol=1e-6)
    for row, i in enumerate(kept):
        np.testing.assert_array_equal(served.tile("1-pool", row), pictures[i])


def test_without_thumbnails_labels_and_projections_there_is_still_a_map(tmp_path: Path) -> None:
    served = Served(export(embeddings_file(tmp_path, {"pool": points_of(5)})))
    assert served.names == ["1-pool"]
    assert served.metadata("1-pool") == {"label": [f"row-{i:04d}" for i in range(5)]}
    assert not {"sprite", "bookmarksPath"} & set(served.entry("1-pool"))
    assert {p.name for p in served.folder.iterdir()} == {
        "projector_config.pbtxt",
        "metadata.tsv",
        "1-pool.bin",
        "events.out.tfevents.0.embedx",
    }


def test_each_layer_is_a_tensor_with_the_bookmarks_of_its_own_projections(tmp_path: Path) -> None:
    x = {"z/last&#+%": points_of(4), "block.0": points_of(4, 5, seed=1), "Block.0": points_of(4, 6)}
    path = embeddings_file(tmp_path, x)
    projection_file(path, "umap-1", points_of(4, 2, seed=2), layer="z/last&#+%")
    projection_file(path, "umap-2", points_of(4, 2, seed=3), layer="block.0")
    served = Served(export(path))
    assert served.names == ["1-z_last____", "2-block.0", "3-Block.0", "4-umap-1", "5-umap-2"]
    for name, array in zip(served.names, x.values(), strict=False):
        np.testing.assert_array_equal(served.tensor(name), array)
    assert [s["label"] for s in served.bookmarks("1-z_last____")] == ["UMAP umap-1"]
    assert [s["label"] for s in served.bookmarks("2-block.0")] == ["UMAP umap-2"]
    assert "bookmarksPath" not in served.entry("3-Block.0")


def test_a_folder_above_several_exports_is_a_log_directory_with_a_run_for_each(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    layers = {"pool": points_of(4), "block.0": points_of(4, 5, seed=1)}
    runs = {"resnet18-digits": layers, "swin_t-digits": {"pool": points_of(6, seed=2)}}
    for name, points in runs.items():
        (tmp_path / name).mkdir()
        path = embeddings_file(
            tmp_path / name, points, labels=["a", "b"] * (len(points["pool"]) // 2)
        )
        export(path)
    (tmp_path / "not exported").mkdir()
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    plugin = ProjectorPlugin(TBContext(logdir=str(tmp_path), data_provider=provider))
    apps = plugin.get_plugin_apps()

    def get(route: str, **words: str) -> bytes:
        answer = Client(apps[route]).get(route, query_string=words)
        assert answer.status_code == 200, answer.get_data(as_text=True)
        return answer.get_data()

    assert sorted(json.loads(get("/runs"))) == [f"{name}/projector" for name in sorted(runs)]
    for name, points in runs.items():
        run = f"{name}/projector"
        config = json.loads(get("/info", run=run))["embeddings"]
        assert [entry["tensorName"] for entry in config] == [
            f"{i}-{point}" for i, point in enumerate(points, start=1)
        ]
        for entry, x in zip(config, points.values(), strict=True):
            data = get("/tensor", run=run, name=entry["tensorName"], num_rows="1000")
            np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(x.shape), x)


def test_the_page_opens_the_first_layer_though_other_names_sort_before_it(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {f"layer{i}": points_of(3) for i in range(12, 0, -1)})
    projection_file(path, "a-1", points_of(3, 2), layer="layer12")
    served = Served(export(path))
    assert served.names == sorted(served.names)  # the page's order among equally many rows
    assert served.names[0] == "01-layer12"


def test_above_the_cap_a_stratified_sample_cuts_every_file_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EXPORT, "ROWS_MOST", 30)
    labels = ["many"] * 60 + ["some"] * 30 + ["few"] * 9 + ["one"]
    n = len(labels)
    x, pictures, flat = points_of(n), pictures_of(n), points_of(n, 2, seed=1)
    path = embeddings_file(tmp_path, {"pool": x}, labels=labels, thumbnails=pictures)
    projection_file(path, "umap-1", flat)
    with caplog.at_level(logging.INFO, "embedx"):
        served = Served(export(path))
    assert "at most 30 rows: taking a sample of 100, stratified by label" in caplog.text
    columns = served.metadata("1-pool")
    kept = [int(str(name).removeprefix("row-")) for name in columns["id"]]
    assert len(kept) == 30
    assert kept == sorted(set(kept))
    assert columns["label"] == [labels[i] for i in kept]
    counts = Counter(columns["label"])
    assert counts["one"] == 1
    for name, whole in (("many", 60), ("some", 30), ("few", 9)):
        assert abs(counts[name] - whole * 30 / n) <= 1
    np.testing.assert_array_equal(served.tensor("1-pool"), x[kept])
    np.testing.assert_array_equal(served.tensor("2-pool.points"), x[kept])
    assert len(served.tensor("3-umap-1")) == 30
    np.testing.assert_allclose(served.coords("1-pool", 0)[:, :2], flat[kept], rtol=1e-6)
    for row, i in enumerate(kept):
        np.testing.assert_array_equal(served.tile("1-pool", row), pictures[i])


@pytest.mark.parametrize("labels", [None, [f"class {i}" for i in range(40)]])
def test_the_cap_holds_without_labels_and_with_more_classes_than_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: list[str] | None
) -> None:
    monkeypatch.setattr(EXPORT, "ROWS_MOST", 7)
    path = embeddings_file(tmp_path, {"pool": points_of(40)}, labels=labels)
    first = Served(export(path)).metadata("1-pool")
    assert len(next(iter(first.values()))) == 7
    assert Served(export(path)).metadata("1-pool") == first  # the same sample again


def test_tiles_shrink_so_that_the_sheet_keeps_to_the_side_the_page_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EXPORT, "SHEET_PX_MOST", 17)
    pictures = np.empty((10, 8, 8, 3), np.uint8)
    pictures[:] = (np.arange(10, dtype=np.uint8) * 20)[:, None, None, None]
    path = embeddings_file(tmp_path, {"pool": points_of(10)}, thumbnails=pictures)
    served = Served(export(path))
    assert served.entry("1-pool")["sprite"]["singleImageDim"] == [4, 4]
    assert served.sheet("1-pool").shape == (16, 16, 3)
    for row in range(10):
        np.testing.assert_array_equal(served.tile("1-pool", row), np.full((4, 4, 3), row * 20))


def test_thumbnails_that_are_not_square_keep_their_shape_on_square_tiles(tmp_path: Path) -> None:
    pictures = np.full((5, 4, 8, 3), 60, np.uint8)
    served = Served(export(embeddings_file(tmp_path, {"pool": points_of(5)}, thumbnails=pictures)))
    tile = served.tile("1-pool", 4)
    assert tile.shape == (8, 8, 3)
    assert (tile[2:6] == 60).all()
    assert (tile[:2] == 255).all()
    assert (tile[6:] == 255).all()


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def foreign_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("three years of work")


def foreign_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "projector_config.pbtxt").write_text('embeddings { tensor_path: "by_hand.tsv" }')
    (folder / "by_hand.tsv").write_text("1\t2\n3\t4\n")


def a_file(folder: Path) -> None:
    folder.write_text("not a folder")


@pytest.mark.parametrize("put", [foreign_file, foreign_config, a_file])
def test_an_out_folder_with_files_of_others_is_refused_and_left_alone(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    put(tmp_path / "mine")
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match="choose another out=FOLDER") as caught:
        export(path, out=tmp_path / "mine")
    assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before


def test_an_export_to_which_someone_added_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    folder = export(path)
    (folder / "notes.md").write_text("what I saw")
    with pytest.raises(ConfigError, match=r"notes\.md, which is no part of an export"):
        export(path)
    assert (folder / "notes.md").read_text() == "what I saw"


def test_an_empty_out_folder_is_taken(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    (tmp_path / "empty").mkdir()
    assert export(path, out=tmp_path / "empty") == tmp_path / "empty"
    assert Served(tmp_path / "empty").names == ["1-pool"]


def test_exporting_again_replaces_the_folder_whole_and_leaves_nothing_beside_it(
    tmp_path: Path,
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)}, thumbnails=pictures_of(3))
    projection_file(path, "umap-1", points_of(3, 2))
    beside = {p.name for p in tmp_path.iterdir()} | {"projector"}
    folder = export(path)
    first = everything(folder)
    export(path)
    assert everything(folder) == first
    export(path, projections=[])
    assert Served(folder).names == ["1-pool", "2-pool.points"]
    assert not [name for name in everything(folder) if "umap" in name or "bookmarks" in name]
    assert {p.name for p in tmp_path.iterdir()} == beside


def test_a_link_stays_a_link_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    export(path, out=tmp_path / "link")
    export(path, out=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Served(tmp_path / "far").names == ["1-pool"]
    assert {p.name for p in tmp_path.iterdir()} == {"embeddings.h5", "far", "link"}


def test_a_failure_in_the_middle_leaves_the_old_export_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    folder = export(path)
    projection_file(path, "umap-1", points_of(3, 2))
    before = everything(tmp_path)
    written = []

    def full_disk(target: Path, data: bytes) -> Path:
        if len(written) == 2:
            raise StoreError(f"no disk space for {target}")
        written.append(target)
        return replace_file(target, data)

    monkeypatch.setattr(sys.modules["embedx.export"], "replace_file", full_disk)
    with pytest.raises(StoreError, match="no disk space"):
        export(path)
    assert len(written) == 2
    assert everything(tmp_path) == before
    assert Served(folder).names == ["1-pool"]


def test_the_old_export_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    folder = export(path)
    projection_file(path, "umap-1", points_of(3, 2))
    before = everything(tmp_path)
    replace = os.replace
    refused = []

    def refuse(old: Path, new: Path) -> None:
        if Path(new) == folder and not refused:
            refused.append(old)
            raise OSError(5, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreError, match="Input/output error; choose another out=FOLDER"):
        export(path)
    assert refused
    assert everything(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another out=FOLDER") as caught:
        export(path, out=tmp_path / "file" / "projector")
    assert "\n" not in str(caught.value)


KILLED = """
import os, signal, sys
from embedx.disk import replacing
from embedx.export import export

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def die_amid_a_file(path, data):
    with replacing(path) as fd:
        os.write(fd, data)
        die()

if sys.argv[2] == "tensorboard":
    sys.modules["embedx.export"].replace_file = die_amid_a_file
else:
    replace = os.replace
    os.replace = lambda old, new: die() if str(new).endswith(".npz") else replace(old, new)
export(sys.argv[1], exporter=sys.argv[2])
"""


@pytest.mark.parametrize("exporter", ["tensorboard", "npz"])
def test_what_a_killed_export_left_is_removed_by_the_next_and_of_a_living_one_is_not(
    tmp_path: Path, exporter: str
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    export(path, exporter=exporter)
    export(path, exporter=exporter)
    before = everything(tmp_path)
    command = [sys.executable, "-c", KILLED, str(path), exporter]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    left = {name: data for name, data in everything(tmp_path).items() if name not in before}
    assert left, "nothing was under way when it was killed"
    assert {name: data for name, data in everything(tmp_path).items() if name in before} == before
    living = tmp_path / ("projector" if exporter == "tensorboard" else "embeddings.npz")
    if exporter == "tensorboard":
        writing: Any = replacing_folder(living, foreign=derived.foreign_in_export)
    else:
        writing = replacing(living)
    with contextlib.suppress(KeyboardInterrupt), writing:
        beside = {p.name for p in tmp_path.glob(".*.tmp")}
        assert len(beside) == 1, "that of the killed one is removed"
        export(path, exporter=exporter)
        assert {p.name for p in tmp_path.glob(".*.tmp")} == beside
        raise KeyboardInterrupt
    assert everything(tmp_path) == before


def test_an_old_export_comes_back_where_the_new_one_was_killed_as_it_took_its_place(
    tmp_path: Path,
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    folder = export(path)
    before = everything(tmp_path)
    code = f"""
import os, signal
from embedx.export import export
replace, n = os.replace, 0
def killed(old, new):
    if str(new) == {str(folder)!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new)
os.replace = killed
export({str(path)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not folder.exists()
    sweep(folder)
    assert everything(tmp_path) == before


def test_what_somebody_puts_into_an_export_while_it_is_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    folder = export(path)
    plain = EXPORT._fill

    def meanwhile(*given: Any, **named: Any) -> Any:
        (folder / "notes.md").write_text("what I saw")
        return plain(*given, **named)

    monkeypatch.setattr(EXPORT, "_fill", meanwhile)
    export(path)
    assert (folder / "notes.md").read_text() == "what I saw"
    assert Served(folder).names == ["1-pool"]
    assert not list(tmp_path.glob(".projector*"))
    (folder / "notes.md").unlink()
    tensor = next(folder.glob("*.bin"))
    tensor.unlink()
    tensor.mkdir()  # a user's folder of the name that a file of ours has
    with pytest.raises(ConfigError, match="which is no part of an export"):
        export(path)


def test_the_folder_one_stands_in_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="is the folder you stand in, or one above"):
        export(path, out=".")


def test_rows_at_the_end_of_float32_are_exported(tmp_path: Path) -> None:
    x = points_of(6) * 1e38
    path = embeddings_file(tmp_path, {"pool": x})
    projection_file(path, "umap-1", points_of(6, 2))
    served = Served(export(path))
    np.testing.assert_array_equal(served.tensor("1-pool"), x)
    rows = served.bookmarks("1-pool")[0]["projections"]
    assert np.isfinite([[row[f"pca-{k}"] for k in range(3)] for row in rows]).all()


def test_a_sheet_in_many_bands_is_the_sheet_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (53, 6, 4, 3), dtype=np.uint8)
    pictures[20:40] //= 255  # flat ones beside noise
    path = embeddings_file(tmp_path, {"pool": points_of(53)}, thumbnails=pictures)
    monkeypatch.setattr(EXPORT, "_BAND_BYTES", 2000)
    served = Served(export(path))
    expected = np.full((8 * 6, 8 * 6, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = divmod(i, 8)
        expected[6 * y : 6 * y + 6, 6 * x + 1 : 6 * x + 5] = picture
    np.testing.assert_array_equal(served.sheet("1-pool"), expected)
    data = (served.folder / "sprite.png").read_bytes()
    assert data.count(b"IDAT") > 4


def test_axes_of_more_features_than_rows_to_take_them_from_are_the_principal_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 600)).astype(np.float32)
    x[:, :2] *= [[90, 40]]
    path = embeddings_file(tmp_path, {"pool": x + 5})
    projection_file(path, "umap-1", points_of(300, 2))
    monkeypatch.setattr(EXPORT, "_AXES_ROWS", 200)
    rows = Served(export(path)).bookmarks("1-pool")[0]["projections"]
    for axis in range(2):
        along = np.array([row[f"pca-{axis}"] for row in rows])
        assert abs(np.corrcoef(along, x[:, axis])[0, 1]) > 0.99
        assert abs(along.mean()) < 15, "centred on the mean of those rows"


def test_an_unknown_exporter_is_refused_with_the_ones_there_are(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    with pytest.raises(ConfigError, match="'tensorbord' is not known; choose one of: tensorboard"):
        export(path, exporter="tensorbord")


def test_an_exporter_may_be_any_function_with_options_of_its_own(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    projection_file(path, "umap-1", points_of(3, 2))

    def list_it(embeddings: Any, projections: Any, out: Path | None, *, suffix: str) -> Path:
        target = (out or embeddings.path.parent / "beside").with_suffix(suffix)
        target.write_text(f"{embeddings.n_rows} {[p.name for p in projections]}")
        return target

    target = export(path, exporter=list_it, out=tmp_path / "list", suffix=".txt")
    assert target.read_text() == "3 ['umap-1']"
    assert export(path, exporter=list_it, suffix=".txt") == tmp_path / "beside.txt"


@pytest.mark.parametrize(
    ("signature", "options", "message"),
    [
        ("out=None", {}, r"exporter\.out cannot be passed on: export has 'out' for itself; .*"),
        ("deep=1", {"dep": 2}, r"there is no key 'exporter\.dep'; .* exporter\.deep"),
        ("", {"dep": 2}, r"there is no key 'exporter\.dep', and none at all can be given here"),
        ("deep: int = 1", {"deep": "x"}, r"exporter\.deep must be a whole number, not 'x'"),
    ],
)
def test_an_exporter_of_ones_own_is_refused_options_it_cannot_take(
    tmp_path: Path, signature: str, options: dict[str, Any], message: str
) -> None:
    scope: dict[str, Any] = {}
    exec(f"def own(e, p, folder, {signature}): raise AssertionError", scope)
    path = embeddings_file(tmp_path, {"pool": points_of(3)})
    with pytest.raises(ConfigError) as caught:
        export(path, exporter=scope["own"], **options)
    assert re.fullmatch(message, str(caught.value))
