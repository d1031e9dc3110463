"""What several test modules share."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedx import derived, layout, store, writing

Array = np.ndarray[Any, Any]
ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]

# Minutes of more draws, kills and cases, for whoever changes what they are about.
EXHAUSTIVE = pytest.mark.skipif(
    "EMBEDX_EXHAUSTIVE" not in os.environ, reason="EMBEDX_EXHAUSTIVE=1 runs it"
)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
BROWSER_WAIT_S = 60
BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--force-device-scale-factor=1",
    "--window-size=1500,950",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no page needs a network
)


def start_browser(profile: Path) -> Any:
    """A browser without a screen, driven by Selenium; ``quit`` ends it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*BROWSER_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    driver.set_page_load_timeout(BROWSER_WAIT_S)
    driver.set_script_timeout(BROWSER_WAIT_S)
    return driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("no chromium is installed")
    if not CHROMEDRIVER:
        pytest.skip("no chromedriver is installed")
    pytest.importorskip("selenium", reason="selenium is not installed")
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``python -m embedx`` in a process and a folder of its own, as a user would run it."""

    def call(*words: str, cwd: Path = tmp_path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "embedx", *words],
            cwd=cwd,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    return call


@pytest.fixture
def embedx_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str], list[str]]]:
    """The command line within this process: exit status, lines of stdout, lines of stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, list[str], list[str]]:
        from embedx.cli import main

        monkeypatch.setattr(sys, "argv", ["embedx", *words])
        capsys.readouterr()
        loggers = logging.root, logging.getLogger("embedx")
        before = [(lg, lg.handlers[:], lg.level, lg.propagate) for lg in loggers]
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
        finally:  # a command sets up the loggers of its own process
            for logger, handlers, level, propagate in before:
                logger.handlers[:] = handlers
                logger.setLevel(level)
                logger.propagate = propagate
        printed = capsys.readouterr()
        return status, printed.out.splitlines(), printed.err.splitlines()

    return call


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve small JPEGs in two class folders, each of another content."""
    rng = np.random.default_rng(0)
    root = tmp_path / "photos"
    for i in range(12):
        path = root / ("cat" if i % 2 else "dog") / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        low = rng.integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(low).resize((80, 60), Image.Resampling.BICUBIC).save(path, quality=90)
    return root


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def relative_error(a: Array, b: Array) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def embeddings_file(
    folder: Path,
    layers: Array | Mapping[str, Array],
    *,
    ids: Sequence[str] | None = None,
    labels: Array | Sequence[int] | Sequence[str] | None = None,
    label_names: Sequence[str] | None = None,
    metadata: Mapping[str, Array | Sequence[str]] | None = None,
    thumbnails: Array | None = None,
    failed: Sequence[int] = (),
    dtype: type = np.float32,
    **about: Any,
) -> Path:
    """A finished ``embeddings.h5`` in ``folder``, as ``extract`` writes it: failed rows are NaN.

    Args:
        folder: Where to.
        layers: Rows ``(n, d)`` by the name of their layer; an array alone is ``avgpool``.
        ids: n texts.
        labels: Texts, "" for none, of which the names are made, with one that no row has; or
            numbers through ``label_names``, -1 for none.
        label_names: For numbers; ``class 0``, ... where not given.
        metadata: Columns.
        thumbnails: Shape ``(n, h, w, 3)``.
        failed: Rows that failed.
        dtype: Of the rows in the file.
        about: Root attributes.
    """
    layers = {"avgpool": layers} if isinstance(layers, np.ndarray) else layers
    n = len(next(iter(layers.values())))
    if labels is not None and isinstance(labels[0], str):
        label_names = [*sorted(set(labels) - {""}), "unused"]
        labels = [label_names.index(text) if text else -1 for text in labels]
    elif labels is not None and label_names is None:
        label_names = [f"class {i}" for i in range(max(*labels, 0) + 1)]
    rows: dict[str, Array] = {}
    fields = []
    for layer, x in layers.items():
        field = layout.embeddings_field(
            layer, n_features=x.shape[1], dtype=np.dtype(dtype), attrs={}
        )
        fields.append(field)
        rows[field.name] = np.array(x, dtype=dtype)
        rows[field.name][list(failed)] = np.nan
    if thumbnails is not None:
        fields.append(layout.Field("thumbnails", thumbnails.shape[1:], np.dtype("u1")))
        rows["thumbnails"] = thumbnails
    status = np.full(n, layout.Status.OK, np.uint8)
    status[list(failed)] = layout.Status.FAILED
    writer = writing.create(
        folder / "embeddings.h5",
        ids=ids or [f"row-{i:04d}" for i in range(n)],
        fields=fields,
        attrs={"id": "one", "model": "net", "data": "blobs", **about},
        labels=None if labels is None else np.array(labels, np.int32),
        label_names=label_names or [],
        metadata=metadata,
    )
    writer.append(rows, status=status)
    return writer.finish()


def projection_file(
    path: Path,
    name: str,
    coords: Array,
    *,
    row_scores: Mapping[str, Array] | None = None,
    **about: Any,
) -> Path:
    """A map ``METHOD-HASH`` of an embeddings file, of its first layer unless ``layer`` says."""
    opened = store.open(path)
    return derived.write_projection(
        path.parent / "projections" / f"{name}.h5",
        coords=coords,
        ids=opened.ids,
        attrs={
            "id": name,
            "parent": opened.attrs["id"],
            "method": name.split("-", maxsplit=1)[0],
            "layer": next(iter(opened.embeddings)),
            **about,
        },
        row_scores=row_scores,
    )


def drawn_classes(figure: Any, panel: int = 0) -> dict[str, tuple[str, Array]]:
    """By name of the class: its colour and the points of that colour, in the order of all axes.

    Points are handed to matplotlib in an order drawn at random; here the first axis orders them.
    """
    from matplotlib.collections import Collection
    from matplotlib.colors import to_hex

    names = {
        to_hex(handle.get_color()): text.get_text()
        for box in figure.legends
        for text, handle in zip(box.get_texts(), box.legend_handles, strict=True)
    }
    found: dict[str, list[Array]] = {}
    for artist in figure.axes[panel].collections:
        is_solid = hasattr(artist, "_offsets3d")
        xy = np.stack(artist._offsets3d, axis=1) if is_solid else np.asarray(artist.get_offsets())
        shades = Collection.get_facecolor(artist)  # that of three dimensions sorts by depth
        for point, shade in zip(xy, np.broadcast_to(shades, (len(xy), 4)), strict=True):
            found.setdefault(to_hex(shade), []).append(point)
    return {
        names.get(shade, ""): (shade, by_axes(np.array(points))) for shade, points in found.items()
    }


def by_axes(points: Array) -> Array:
    """Points in the order of their first axis, then of the next."""
    points = np.asarray(points, dtype=np.float64)
    return points[np.lexsort(points.round(4).T[::-1])]
