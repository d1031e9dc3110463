"""Maps beside what one would use otherwise, with the quality of both; one part a call.

Run: python benchmarks/project.py tsne [--rows 10000] | sweep | pca | landmarks | curve
Rows are a seeded mixture of 20 curved classes in 512 features. Times are medians of interleaved
runs where a part repeats; quality is measured by embedx.scores for both sides.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from embedx import derived, store, writing
from embedx.layout import Field

N_FEATURES = 512
SETTINGS = [(k, d) for k in (5, 15, 50) for d in (0.0, 0.3)]


def rows(n: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Classes that bend: 20 of them, each of ten dimensions, in noise of all dimensions."""
    rng = np.random.default_rng(0)
    labels = np.random.default_rng(seed).integers(0, 20, n).astype(np.int32)
    centers = rng.normal(size=(20, N_FEATURES)).astype(np.float32)
    bases = (rng.normal(size=(20, 10, N_FEATURES)) / np.sqrt(10)).astype(np.float32)
    bends = (rng.normal(size=(20, 10, N_FEATURES)) / np.sqrt(40)).astype(np.float32)
    draw = np.random.default_rng(seed + 1)
    x = draw.standard_normal((n, N_FEATURES), dtype=np.float32)
    x *= 0.2
    inner = draw.standard_normal((n, 10), dtype=np.float32)
    for label in range(20):
        for at in np.array_split(np.flatnonzero(labels == label), max(1, n // 200_000)):
            x[at] += centers[label] + inner[at] @ bases[label] + inner[at] ** 2 @ bends[label]
    return x, labels


def embeddings(folder: Path, n: int) -> Path:
    """A run of ``n`` rows, made without a model."""
    x, labels = rows(n)
    writer = writing.create(
        folder / "embeddings.h5",
        ids=[f"{i:07d}" for i in range(n)],
        fields=[Field("embeddings/a", (N_FEATURES,), np.dtype(np.float32))],
        attrs={"id": f"benchmark {n}"},
        labels=labels,
        label_names=[str(i) for i in range(20)],
    )
    for start in range(0, n, 4096):
        part = x[start : start + 4096]
        writer.append({"embeddings/a": part}, status=np.ones(len(part), np.uint8))
    return writer.finish()


def python(code: str, *arguments: object, **environment: str) -> dict[str, float]:
    """Run code in a process of its own; its last line is JSON."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def timed(*command: str, **options: object) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    return time.perf_counter() - started


# --------------------------------------------------------------------------- t-SNE

TSNE_OURS = """
import json, sys, time, numpy as np
import openTSNE
from embedx.methods import tsne
x = np.load(sys.argv[1])
started = time.perf_counter()
made = tsne(x, n_iter=int(sys.argv[3]))
seconds = time.perf_counter() - started
np.save(sys.argv[2], made.coords)
print(json.dumps({"seconds": seconds, "kl": made.used["kl_divergence"]}))
"""
TSNE_THEIRS = """
import json, sys, time, numpy as np
from sklearn.manifold import TSNE
x = np.load(sys.argv[1])
started = time.perf_counter()
fit = TSNE(init="pca", max_iter=250 + int(sys.argv[3]), random_state=0, n_jobs=-1)
coords = fit.fit_transform(x)
seconds = time.perf_counter() - started
np.save(sys.argv[2], coords)
print(json.dumps({"seconds": seconds, "kl": float(fit.kl_divergence_)}))
"""


def tsne(folder: Path, *, n: int, pairs: int) -> None:
    """openTSNE on our graph beside scikit-learn, from the same 50 principal components."""
    from embedx.matrix import Matrix
    from embedx.methods import pca
    from embedx.scores import map_quality

    x, _ = rows(n)
    reduced = pca(Matrix(x), n_components=50).coords.astype(np.float32)
    np.save(folder / "x.npy", reduced)
    ratios, trust = [], {}
    for _ in range(pairs):
        ours = python(TSNE_OURS, folder / "x.npy", folder / "ours.npy", 500)
        theirs = python(TSNE_THEIRS, folder / "x.npy", folder / "theirs.npy", 500)
        ratios.append(theirs["seconds"] / ours["seconds"])
        print(
            f"  {ours['seconds']:.1f} s, KL {ours['kl']:.4f}; scikit-learn "
            f"{theirs['seconds']:.1f} s, KL {theirs['kl']:.4f}"
        )
    for side in ("ours", "theirs"):
        quality = map_quality(reduced, np.load(folder / f"{side}.npy"), metric="euclidean")
        trust[side] = quality.scores["trustworthiness"]
    print(
        f"t-SNE of {n:,} x 50: {statistics.median(ratios):.2f} times the speed of scikit-learn's "
        f"({min(ratios):.2f} to {max(ratios):.2f}), KL {ours['kl'] / theirs['kl'] - 1:+.2%}, "
        f"trustworthiness {trust['ours']:.4f} and {trust['theirs']:.4f}"
    )


# --------------------------------------------------------------------------- a sweep of UMAP

UMAP_ALONE = """
import json, sys, time, numpy as np
import umap
x = np.load(sys.argv[1])
fit = umap.UMAP(n_neighbors=int(sys.argv[3]), min_dist=float(sys.argv[4]), random_state=0)
np.save(sys.argv[2], fit.fit_transform(x))
print("{}")
"""
LAYOUTS = """
import json, sys, time, numpy as np
from embedx.methods import umap
from embedx.neighbors import nearest_neighbors
from embedx.methods import Context
x = np.load(sys.argv[1])
graph = nearest_neighbors(x, n_neighbors=51)
context = Context(lambda k, metric: graph)
umap(x[:200], context=Context(lambda k, metric: nearest_neighbors(x[:200], n_neighbors=51)))
seconds = []
for n_neighbors, min_dist in json.loads(sys.argv[2]):
    started = time.perf_counter()
    umap(x, n_neighbors=n_neighbors, min_dist=min_dist, context=context)
    seconds.append(time.perf_counter() - started)
print(json.dumps({"seconds": sum(seconds)}))
"""


def sweep(folder: Path, *, n: int) -> None:
    """Six settings of UMAP in one sweep beside six processes of umap-learn on its own."""
    from embedx.scores import map_quality

    run = embeddings(folder / "run", n)
    x, _ = rows(n)
    np.save(folder / "x.npy", x)
    words = [
        *(sys.executable, "-m", "embedx", "project", "-m", f"embeddings={run}"),
        "projection.n_neighbors=5,15,50",
        "projection.min_dist=0.0,0.3",
    ]
    alone = timed(*words, cwd=str(folder))
    parallel = timed(
        *words,
        "overwrite=true",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        cwd=str(folder),
    )
    layouts = python(LAYOUTS, folder / "x.npy", json.dumps(SETTINGS))["seconds"]
    theirs = 0.0
    lower = []
    maps = {
        (p.attrs["n_neighbors"], round(float(p.attrs["min_dist"]), 3)): p
        for p in derived.projections_of(store.open(run))
    }
    for n_neighbors, min_dist in SETTINGS:
        theirs += timed(
            *(sys.executable, "-c", UMAP_ALONE, str(folder / "x.npy"), str(folder / "y.npy")),
            *(str(n_neighbors), str(min_dist)),
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        other = map_quality(x, np.load(folder / "y.npy")).scores["trustworthiness"]
        lower.append(other - maps[n_neighbors, min_dist].attrs["trustworthiness"])
    print(
        f"six maps of {n:,} rows: {alone:.0f} s in one sweep, {parallel:.0f} s by two processes, "
        f"their layouts alone {layouts:.0f} s, six processes of umap-learn {theirs:.0f} s; so "
        f"{alone / layouts:.2f} of the layouts, {theirs / parallel:.2f} and {theirs / alone:.2f} "
        f"times the speed; trustworthiness at most {max(lower):.4f} lower"
    )


# --------------------------------------------------------------------------- memory

PEAK = """
import threading, time
peak = 0
def watch():
    global peak
    while True:
        with open("/proc/self/status") as status:
            kb = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
        peak = max(peak, kb)
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
"""
PCA_OURS = (
    PEAK
    + """
import json, sys, time, numpy as np
from embedx.methods import pca
from embedx.matrix import Matrix
x = np.load(sys.argv[1], mmap_mode="r")
started = time.perf_counter()
made = pca(Matrix(x), n_components=50)
seconds = time.perf_counter() - started
np.savez(sys.argv[2], axes=made.state["components"])
print(json.dumps({"seconds": seconds, "peak_mb": peak / 1e3}))
"""
)
PCA_THEIRS = (
    PEAK
    + """
import json, sys, time, numpy as np
from sklearn.decomposition import IncrementalPCA
x = np.load(sys.argv[1], mmap_mode="r")
started = time.perf_counter()
fit = IncrementalPCA(50, batch_size=8192).fit(x)
coords = np.empty((len(x), 50), np.float32)
for start in range(0, len(x), 8192):
    coords[start:start + 8192] = fit.transform(x[start:start + 8192])
seconds = time.perf_counter() - started
np.savez(sys.argv[2], axes=fit.components_)
print(json.dumps({"seconds": seconds, "peak_mb": peak / 1e3}))
"""
)


def pca(folder: Path, *, n: int) -> None:
    """PCA of rows on the disk beside scikit-learn's IncrementalPCA; the oracle is a full eigh."""
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (n, N_FEATURES))
    scatter, mean = np.zeros((N_FEATURES, N_FEATURES)), np.zeros(N_FEATURES)
    for start in range(0, n, 50_000):
        part, _ = rows(min(50_000, n - start), seed=start)
        x[start : start + len(part)] = part
        mean += part.sum(axis=0, dtype=np.float64) / n
        scatter += part.T.astype(np.float64) @ part.astype(np.float64) / n
    x.flush()
    covariance = scatter - np.outer(mean, mean)
    best = np.linalg.eigvalsh(covariance)[::-1][:50].sum()
    ours = python(PCA_OURS, folder / "x.npy", folder / "ours.npz")
    theirs = python(PCA_THEIRS, folder / "x.npy", folder / "theirs.npz")
    errors = []
    for side in ("ours", "theirs"):
        found = np.load(folder / f"{side}.npz")["axes"]
        errors.append(1 - np.trace(found @ covariance @ found.T) / best)
    print(
        f"PCA of {n:,} x {N_FEATURES} from disk to 50: "
        f"{theirs['seconds'] / ours['seconds']:.2f} times the speed of IncrementalPCA, "
        f"RssAnon {ours['peak_mb']:.0f} and {theirs['peak_mb']:.0f} MB, {errors[0]:.0e} and "
        f"{errors[1]:.0e} of the variance missed"
    )


PROJECT = (
    PEAK
    + """
import json, sys, time, embedx
started = time.perf_counter()
made = embedx.project(sys.argv[1], **json.loads(sys.argv[2]))
print(json.dumps({
    "seconds": time.perf_counter() - started,
    "peak_mb": peak / 1e3,
    "trustworthiness": float(made.attrs["trustworthiness"]),
}))
"""
)


def landmarks(folder: Path, *, n: int) -> None:
    """A million rows placed by landmarks, beside a full fit of a tenth of them."""
    peaks = {}
    for size in (n // 10, n):
        run = embeddings(folder / str(size), size)
        options = {"method": "umap", "pre_pca": 50}
        if size == n // 10:
            full = python(PROJECT, run, json.dumps(options))
        placed = python(PROJECT, run, json.dumps({**options, "landmarks": 20_000}))
        peaks[size] = placed["peak_mb"]
        print(
            f"  {size:,} rows by 20,000 landmarks: {placed['seconds']:.0f} s, "
            f"trustworthiness {placed['trustworthiness']:.4f}, RssAnon {placed['peak_mb']:.0f} MB"
        )
    print(
        f"{n:,} rows by 20,000 landmarks of UMAP: trustworthiness {placed['trustworthiness']:.3f}, "
        f"a full fit of {n // 10:,} rows {full['trustworthiness']:.3f} ({full['seconds']:.0f} s); "
        f"RssAnon {peaks[n]:.0f} MB, of {n // 10:,} rows {peaks[n // 10]:.0f} MB"
    )


CURVE = """
import json, sys, time, numpy as np
from embedx import methods, neighbors, scores
x = np.load(sys.argv[1])
n = len(x)
found = {}
def clock(name, function):
    started = time.perf_counter()
    made = function()
    found[name] = time.perf_counter() - started
    return made
methods.umap(x[:200])  # compiles
graph = clock("graph", lambda: neighbors.nearest_neighbors(x, n_neighbors=100, exact=True))
context = methods.Context(lambda k, metric: graph)
pca = clock("pca", lambda: methods.pca(x))
clock("tsne", lambda: methods.tsne(x, context=context))
made = clock("umap", lambda: methods.umap(x, context=context))
clock("scores", lambda: scores.map_quality(x, made.coords, graph=graph))
print(json.dumps(found))
"""


def curve(folder: Path, *, largest: int) -> None:
    """Cost against n, by stage, drawn as docs/cost.png."""
    from matplotlib.figure import Figure

    sizes = [n for n in (1_000, 3_000, 10_000, 30_000, 100_000) if n <= largest]
    found = []
    for n in sizes:
        np.save(folder / "x.npy", rows(n)[0])
        found.append(python(CURVE, folder / "x.npy"))
        print(f"  {n:,} rows: " + ", ".join(f"{k} {v:.1f} s" for k, v in found[-1].items()))
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name in found[0]:
        axes.loglog(sizes, [costs[name] for costs in found], marker="o", label=name)
    last = np.array([n * np.log(n) for n in sizes])
    scale = found[-1]["tsne"] / last[-1]
    axes.loglog(sizes, last * scale, linestyle=":", color="#717581", label="n log n")
    axes.set_xlabel("rows of 512 features")
    axes.set_ylabel("seconds on two cores")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    target = Path(__file__).parent.parent / "docs" / "cost.png"
    figure.savefig(target, dpi=150, metadata={"Software": "embedx"})
    print(f"wrote {target}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["tsne", "sweep", "pca", "landmarks", "curve"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        if options.part == "tsne":
            tsne(folder, n=options.rows or 10_000, pairs=options.pairs)
        elif options.part == "sweep":
            sweep(folder, n=options.rows or 10_000)
        elif options.part == "pca":
            pca(folder, n=options.rows or 1_000_000)
        elif options.part == "landmarks":
            landmarks(folder, n=options.rows or 1_000_000)
        else:
            curve(folder, largest=options.rows or 100_000)


if __name__ == "__main__":
    main()
