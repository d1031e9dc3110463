"""An export in TensorBoard's own page, in a real browser: what a person would see.

Screenshots of every view stay in the temporary folder of the test run.
"""

import contextlib
import dataclasses
import io
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedx.export import export
from tests.conftest import BROWSER_WAIT_S as WAIT_S
from tests.conftest import embeddings_file, projection_file

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.browser

COLORS = np.array(
    [
        (214, 39, 40),
        (31, 119, 180),
        (44, 160, 44),
        (255, 127, 14),
        (148, 103, 189),
        (140, 86, 75),
        (227, 119, 194),
        (60, 60, 60),
        (188, 189, 34),
        (23, 190, 207),
    ],
    np.uint8,
)
# As stored, and as the page is to show it.
LABELS = {
    "a\tb": "a b",
    "two\r\nlines": "two lines",
    'say "hi"': 'say "hi"',
    "": "(none)",
    "=cmd|' /C calc'!A0": "=cmd|' /C calc'!A0",
    "</script><b>": "</script><b>",
    "\N{CAT FACE}\N{ZERO WIDTH JOINER}\N{SNOWMAN}": "\N{CAT FACE}\N{ZERO WIDTH JOINER}\N{SNOWMAN}",
    "007": "#007",
    "7": "#7",
    "1e5": "#1e5",
    "0x1F": "#0x1F",
    "0b11": "#0b11",
    "-Infinity": "#-Infinity",
    "+.5": "#+.5",
    "5.": "#5.",
    "1_000": "1_000",
    "nan": "nan",
    "e": "e",
    "\xa0\u3000\ufeff": "(none)",
    "\u30007": "#7",
    "constructor": "constructor",
}


@dataclasses.dataclass(frozen=True)
class Shown:
    """What one export holds, for comparison.

    Attributes:
        folder: The export.
        columns: What the page is to show for each row.
        colors: Shape ``(n, 3)``: the one colour of each row's thumbnail.
        maps: Projections by name, sorted.
        shots: Where screenshots go.
    """

    folder: Path
    columns: dict[str, list[Any]]
    colors: Array
    maps: dict[str, Array]
    shots: Path

    @property
    def n(self) -> int:
        return len(self.colors)


def build(
    folder: Path,
    *,
    x: Array,
    maps: dict[str, Array],
    colors: Array,
    labels: list[str],
    metadata: dict[str, Any],
) -> Path:
    """Embeddings with thumbnails of one colour each, projections, and their export."""
    path = embeddings_file(
        folder,
        {"pool": x},
        labels=labels,
        metadata=metadata,
        thumbnails=np.broadcast_to(colors[:, None, None], (len(x), 16, 16, 3)).copy(),
    )
    for name, coords in maps.items():
        projection_file(path, name, coords)
    return export(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """50 rows, not a square number, each of a colour of its own, with labels of every odd kind."""
    n = 50
    rng = np.random.default_rng(0)
    grid = np.stack(np.divmod(rng.permutation(n), 8), axis=1).astype(np.float32)
    wheel = np.stack([37 * np.arange(n), 91 * np.arange(n) + 60, 149 * np.arange(n)], axis=1)
    maps = {
        "pca-0a1b2c": grid * np.float32(1e-7),
        "tsne-1a2b3c": (grid[::-1] * [40, -3] + 1000).astype(np.float32),
        "umap-2a3b4c": rng.normal(size=(n, 3)).astype(np.float32),
    }
    labels = [list(LABELS)[i % len(LABELS)] for i in range(n)]
    colors = (wheel % 200 + 20).astype(np.uint8)
    folder = tmp_path_factory.mktemp("small")
    return Shown(
        folder=build(
            folder,
            x=rng.normal(size=(n, 5)).astype(np.float32),
            maps=maps,
            colors=colors,
            labels=labels,
            metadata={"width": np.arange(n), "score": np.where(np.arange(n) % 2, 0.5, np.nan)},
        ),
        columns={
            "id": [f"row-{i:04d}" for i in range(n)],
            "label": [LABELS[label] for label in labels],
            "width": list(range(n)),
            "score": [0.5 if i % 2 else None for i in range(n)],
        },
        colors=colors,
        maps=maps,
        shots=folder,
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """1,797 rows in ten clusters, a colour each, with more than a megabyte of metadata."""
    n = 1797
    rng = np.random.default_rng(1)
    classes = np.arange(n) % 10
    centers = np.stack([np.cos(np.arange(10) * 0.628), np.sin(np.arange(10) * 0.628)], axis=1)
    flat = centers[classes] * 20 + rng.normal(size=(n, 2))
    solid = np.hstack([flat, rng.normal(size=(n, 1)) * 20])
    maps = {
        "pca-0a1b2c": flat.astype(np.float32),
        "tsne-1a2b3c": (flat[:, ::-1] * [2, -1] + 7).astype(np.float32),
        "umap-2a3b4c": solid.astype(np.float32),
    }
    notes = ["\N{CAT FACE}" * (140 + i % 31) for i in range(n)]
    folder = tmp_path_factory.mktemp("large")
    exported = build(
        folder,
        x=(rng.normal(size=(10, 64))[classes] * 4 + rng.normal(size=(n, 64))).astype(np.float32),
        maps=maps,
        colors=COLORS[classes],
        labels=[f"class {c}" for c in classes],
        metadata={"note": notes},
    )
    assert (exported / "metadata.tsv").stat().st_size > 1_000_000
    return Shown(
        folder=exported,
        columns={
            "id": [f"row-{i:04d}" for i in range(n)],
            "label": [f"class {c}" for c in classes],
            "note": notes,
        },
        colors=COLORS[classes],
        maps=maps,
        shots=folder,
    )


@contextlib.contextmanager
def served(folder: Path, log: Path) -> Iterator[str]:
    """The address of a TensorBoard over an export."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command, "--port", str(port), "--load_fast=false"],
            stdout=output,
            stderr=output,
        )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
    try:
        while True:
            try:
                runs = f"{address}/data/plugin/projector/runs"
                with urllib.request.urlopen(runs, timeout=10) as answer:
                    assert answer.read() == b'["."]'
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, "tensorboard ended: see its log"
                assert time.monotonic() < end, "tensorboard did not answer"
                time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def addresses(
    small: Shown, large: Shown, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, str]]:
    """A TensorBoard over each export, until the module is done."""
    logs = tmp_path_factory.mktemp("tensorboard")
    with contextlib.ExitStack() as stack:
        yield {
            shown.folder: stack.enter_context(served(shown.folder, logs / f"{shown.n}.log"))
            for shown in (small, large)
        }


# Everything of the page lies below this element's shadow root.
PROJECTOR = """
const projector = document.querySelector('vz-projector-dashboard')
    ?.shadowRoot?.querySelector('vz-projector');
const root = projector?.shadowRoot;
const panel = (name) => root.querySelector(`vz-projector-${name}-panel`);
"""

STATE = """
if (!root || !panel('data')) return null;
const data = projector.dataSet;
return {
  tensor: panel('data').selectedTensor,
  n: root.querySelector('span.numDataPoints')?.innerText,
  ready: Boolean(data && !data.outdated && projector.projection && data.spriteAndMetadataInfo),
  sprite: Boolean(data?.spriteAndMetadataInfo?.spriteImage),
  bookmarks: (panel('bookmark').savedStates || []).map((state) => state.label),
  color: panel('data').selectedColorOptionName,
  colors: (panel('data').colorOptions || []).map((option) => option.name),
  dialog: root.querySelector('#notification-dialog')?.opened
      ? root.querySelector('#notification-dialog').innerText : '',
  errors: [...root.querySelectorAll('.notify-msg.error')].map((message) => message.innerText),
};
"""

# The page keeps the old points until the new ones are there: mark them, to tell one from the other.
SELECT = """
if (panel('data').selectedTensor === arguments[0]) return;
projector.dataSet.outdated = true;
panel('data').selectedTensor = arguments[0];
"""

VIEW = """
const plot = projector.projectorScatterPlotAdapter.scatterPlot;
if (!plot.worldSpacePointPositions) return null;
plot.stopOrbitAnimation();
plot.render();
plot.camera.updateMatrixWorld();
const box = plot.renderer.domElement.getBoundingClientRect();
return {
  world: [...plot.worldSpacePointPositions],
  view: [...plot.camera.matrixWorldInverse.elements],
  lens: [...plot.camera.projectionMatrix.elements],
  box: [box.left, box.top, box.width, box.height],
};
"""

CLICK_BOOKMARK = """
const rows = panel('bookmark').shadowRoot.querySelectorAll('.state-row');
rows[arguments[0]].querySelector('[icon="radio-button-unchecked"]').click();
"""


class Page:
    """TensorBoard's projector page, showing one export."""

    def __init__(self, driver: Any, address: str, shown: Shown) -> None:
        self.driver = driver
        self.shown = shown
        driver.get_log("browser")  # what an earlier page logged
        driver.get(f"{address}/data/plugin/projector/projector_binary.html")
        self.wait(lambda state: self.whole(state) and state["sprite"])

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(PROJECTOR + script, *args)

    def whole(self, state: dict[str, Any]) -> bool:
        """Points, metadata and bookmarks are there."""
        return bool(state["ready"] and state["bookmarks"] and not state["dialog"])

    def wait(self, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + WAIT_S
        state = None
        while time.monotonic() < end:
            state = self.run(STATE)
            if state is not None:
                assert not state["errors"], state
                if met(state):
                    return dict(state)
            time.sleep(0.1)
        self.driver.save_screenshot(str(self.shown.shots / "timeout.png"))
        raise AssertionError(f"the page is not ready after {WAIT_S} s: {state}")

    def select(self, tensor: str) -> dict[str, Any]:
        self.run(SELECT, tensor)
        return self.wait(lambda state: state["ready"] and state["tensor"] == tensor)

    def click_bookmark(self, number: int) -> Array:
        """Click one and return the positions of the points once they are those of its map."""
        coords = list(self.shown.maps.values())[number]
        self.run(CLICK_BOOKMARK, number)
        end = time.monotonic() + WAIT_S / 2
        while True:
            world, _ = self.places()
            if np.allclose(world, as_drawn(coords), atol=1e-5) or time.monotonic() > end:
                return world
            time.sleep(0.1)

    def places(self) -> tuple[Array, Array]:
        """Where each point lies: in the page's space ``(n, 3)``, and on the screen in px."""
        found = self.run(VIEW)
        world = np.array(found["world"], dtype=float).reshape(-1, 3)
        lens, view = (np.array(found[key]).reshape(4, 4).T for key in ("lens", "view"))
        clip = np.c_[world, np.ones(len(world))] @ (lens @ view).T
        across, down = (clip[:, :2] / clip[:, 3:] * [1, -1] + 1).T / 2
        left, top, width, height = found["box"]
        return world, np.stack([left + across * width, top + down * height], axis=1)

    def pixels(self, name: str) -> tuple[Array, Array]:
        """What is drawn at the points, and which points are on the screen; keeps the picture.

        Returns:
            The 3 by 3 pixels around each point on the screen, shape ``(k, 9, 3)``, its own the
            fifth; and the mask of those points, shape ``(n,)``.
        """
        _, at = self.places()
        time.sleep(0.2)
        png = self.driver.get_screenshot_as_png()
        (self.shown.shots / f"{name}.png").write_bytes(png)
        screen = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
        height, width = screen.shape[:2]
        inside = ((at >= 1) & (at < [width - 1, height - 1])).all(axis=1)
        x, y = at[inside].astype(int).T
        around = [(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
        return np.stack([screen[place] for place in around], axis=1), inside

    def logged_errors(self) -> list[str]:
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
        ]


def as_drawn(coords: Array) -> Array:
    """The page stretches each axis from -1 to 1, and draws 2-D at depth 0."""
    exact = coords.astype(float)
    least, most = exact.min(axis=0), exact.max(axis=0)
    return np.pad((exact - least) / (most - least) * 2 - 1, ((0, 0), (0, 3 - coords.shape[1])))


def drawn(pixels: Array, inside: Array) -> bool:
    """Whether points are seen: a point count, for one, is right on a blank canvas too."""
    assert inside.mean() > 0.9
    return bool((pixels[:, 4] != 255).any(axis=1).mean() > 0.99)


@pytest.fixture(scope="module", params=["small", "large"])
def page(request: pytest.FixtureRequest, driver: Any, addresses: dict[Path, str]) -> Page:
    shown = request.getfixturevalue(request.param)
    return Page(driver, addresses[shown.folder], shown)


def test_the_page_opens_the_first_layer_with_every_point_and_no_error(page: Page) -> None:
    state = page.run(STATE)
    assert state["tensor"] == "1-pool"
    assert state["n"].replace(",", "") == str(page.shown.n)
    assert state["bookmarks"] == ["PCA pca-0a1b2c", "TSNE tsne-1a2b3c", "UMAP umap-2a3b4c"]
    assert state["dialog"] == ""
    world, _ = page.places()
    assert world.shape == (page.shown.n, 3)
    assert np.isfinite(world).all()
    assert world.std(axis=0).min() > 0.01
    assert drawn(*page.pixels("opened"))
    assert page.logged_errors() == []


def test_every_point_bears_its_own_metadata(page: Page) -> None:
    rows = page.run("return projector.dataSet.points.map((point) => point.metadata);")
    for name, values in page.shown.columns.items():
        assert [row[name] for row in rows] == values
    assert len(rows[0]) == len(page.shown.columns)


def test_each_bookmark_shows_its_projection_in_pictures(page: Page) -> None:
    page.select("1-pool")
    for number, (name, coords) in enumerate(page.shown.maps.items()):
        world = page.click_bookmark(number)
        np.testing.assert_allclose(world, as_drawn(coords), atol=1e-5)
        state = page.run(STATE)
        assert (state["color"], state["errors"]) == ("No color map", [])
        pixels, inside = page.pixels(f"pictures-{name}")
        assert drawn(pixels, inside)
        if coords.shape[1] == 2:  # in 3-D one picture may hide another
            assert inside.all()
            # The page blends the edge of a tile with its neighbour on the sheet, and a point may
            # lie under such a line, a pixel wide, of a picture nearby.
            off = np.abs(pixels.astype(int) - page.shown.colors.astype(int)[:, None])
            assert (off.max(axis=2).min(axis=1) <= 2).mean() > 0.99
    assert page.logged_errors() == []


def test_each_bookmark_shows_its_projection_in_coloured_points(page: Page) -> None:
    state = page.select("2-pool.points")
    assert not state["sprite"]
    for number, (name, coords) in enumerate(page.shown.maps.items()):
        world = page.click_bookmark(number)
        np.testing.assert_allclose(world, as_drawn(coords), atol=1e-5)
        state = page.run(STATE)
        assert state["color"] in state["colors"]
        assert (state["color"], state["errors"]) == ("label", [])
        pixels, inside = page.pixels(f"points-{name}")
        assert drawn(pixels, inside)
        assert len(np.unique(pixels[:, 4], axis=0)) >= len(set(page.shown.columns["label"])) / 2
    assert page.logged_errors() == []


def test_each_projection_is_a_tensor_that_shows_with_no_click(page: Page) -> None:
    for number, (name, coords) in enumerate(page.shown.maps.items(), start=3):
        state = page.select(f"{number}-{name}")
        assert state["n"].replace(",", "") == str(page.shown.n)
        world, _ = page.places()
        assert np.isfinite(world).all()
        spread = np.ptp(world, axis=0)
        np.testing.assert_allclose(spread[: coords.shape[1]], 2, atol=1e-5)
        assert drawn(*page.pixels(f"tensor-{name}"))
    assert page.logged_errors() == []


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 20_000])
def test_few_rows_and_many_are_shown_each_with_its_label_and_picture(
    n: int, driver: Any, tmp_path: Path
) -> None:
    classes = np.arange(n) % 10
    across = int(np.ceil(np.sqrt(n)))
    turned = np.array([[1, 0.5], [-0.5, 1]])  # no axis of two rows without width
    grid = (np.stack(np.divmod(np.arange(n), across), axis=1) @ turned).astype(np.float32)
    labels = [f"class {c}" for c in classes]
    folder = build(
        tmp_path,
        x=np.random.default_rng(0).normal(size=(n, 8)).astype(np.float32),
        maps={"umap-1a2b3c": grid},
        colors=COLORS[classes],
        labels=labels,
        metadata={},
    )
    shown = Shown(folder, {}, COLORS[classes], {"umap-1a2b3c": grid}, tmp_path)
    with served(folder, tmp_path / "log") as address:
        page = Page(driver, address, shown)
        assert page.run(STATE)["n"].replace(",", "") == str(n)
        found = page.run("return projector.dataSet.points.map((point) => point.metadata.label);")
        assert found == labels
        np.testing.assert_allclose(page.click_bookmark(0), as_drawn(grid), atol=1e-5)
        pixels, inside = page.pixels("shown")
        assert drawn(pixels, inside)
        # Pictures of many rows lie on each other, of a few pixels each: a colour of one is near.
        off = np.abs(pixels[:, :, None].astype(int) - COLORS.astype(int)).max(axis=3)
        assert (off.min(axis=(1, 2)) <= 2).mean() > 0.9
        assert page.logged_errors() == []
