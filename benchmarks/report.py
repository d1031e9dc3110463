"""The report in a browser: how long it takes to open, to redraw while it is dragged, and its size.

Run: python benchmarks/report.py [--rows 2000 50000]
Headless Chromium, whose WebGL is computed by the processor. A redraw is timed from the drag until a
pixel can be read back, so that nothing is still under way. Rows are ten round clusters, pictures
are tinted digits in noise.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from embedx.view import view
from tests.conftest import embeddings_file, projection_file, start_browser

REDRAWS = 60
PAN = """
const done = arguments[1], { plot } = report, times = [], pixel = new Uint8Array(4);
(async () => {
  for (let k = 0; k < arguments[0]; k += 1) {
    const start = performance.now();
    plot.pan(Math.sin(k) * 9, Math.cos(k) * 9);
    await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn, 0)));
    plot.gl.readPixels(0, 0, 1, 1, plot.gl.RGBA, plot.gl.UNSIGNED_BYTE, pixel);
    times.push(performance.now() - start);
  }
  done(times);
})();
"""


def make(folder: Path, n: int, *, has_pictures: bool) -> Path:
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(0)
    classes = np.arange(n) % 10
    x = rng.normal(size=(10, 64))[classes] * 2 + rng.normal(size=(n, 64))
    pictures = None
    if has_pictures:
        digits = (load_digits().images[np.arange(n) % 1797] * 16).clip(0, 255)
        big = np.kron(digits.astype(np.uint8), np.ones((1, 8, 8), np.uint8))
        tinted = big[..., None] * (rng.integers(60, 255, (n, 1, 1, 3)) / 255)
        pictures = (tinted + rng.normal(size=(n, 64, 64, 1)) * 6).clip(0, 255).astype(np.uint8)
    path = embeddings_file(
        folder,
        {"pool": x},
        labels=[f"class {label}" for label in classes],
        metadata={"size": rng.normal(size=n), "side": [("left", "right")[i % 2] for i in range(n)]},
        thumbnails=pictures,
    )
    centers = rng.normal(size=(10, 2)) * 12
    for name in ("tsne-1a2b3c", "umap-2a3b4c"):
        places = centers[classes] + rng.normal(size=(n, 2)) * 2.5
        projection_file(path, name, places, trustworthiness=0.9, metric="euclidean")
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000, 50_000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        for n in options.rows:
            for has_pictures in (False, True):
                folder = Path(name).resolve() / f"{n}-{has_pictures}"
                view(make(folder, n, has_pictures=has_pictures), viewer="report")
                started = time.perf_counter()
                view(folder, viewer="report")  # the neighbours are there
                written = time.perf_counter() - started
                page = folder / "report.html"
                opened = []
                for number in range(3):
                    driver = start_browser(folder / f"profile{number}")
                    try:
                        driver.set_script_timeout(300)
                        started = time.perf_counter()
                        driver.get(page.as_uri())
                        while not driver.execute_script("return Boolean(window.report?.plot)"):
                            time.sleep(0.01)
                        opened.append(time.perf_counter() - started)
                        times = driver.execute_async_script(PAN, REDRAWS)
                    finally:
                        driver.quit()
                print(
                    f"report of {n:,} points, {'with' if has_pictures else 'without'} pictures: "
                    f"{page.stat().st_size / 1e6:.1f} MB, written in {written:.1f} s, open in "
                    f"{statistics.median(opened):.2f} s (at most {max(opened):.2f}), redrawn in "
                    f"{statistics.median(times):.0f} ms (9 of 10 in at most "
                    f"{np.quantile(times, 0.9):.0f})"
                )


if __name__ == "__main__":
    main()
