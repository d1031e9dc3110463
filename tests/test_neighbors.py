"""Nearest rows against brute force, and the file that they are kept in."""

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from embedx import layout, neighbors
from embedx.errors import StoreError
from embedx.matrix import Matrix
from embedx.neighbors import Graph, Metric, cached_graph, nearest_neighbors, nearest_rows
from tests.conftest import EXHAUSTIVE

Array = np.ndarray[Any, Any]
METRICS: list[Metric] = ["euclidean", "cosine"]


def _distances(x: Array, metric: Metric, y: Array | None = None) -> Array:
    """Shape (n, n), each by its definition in double precision; a row is far from itself."""
    others = (x if y is None else y).astype(np.float64)
    x = x.astype(np.float64)
    if metric == "cosine":
        units = [
            rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
            for rows in (x, others)
        ]
        distances = ((units[0][:, None] - units[1][None, :]) ** 2).sum(axis=2) / 2
        distances[~x.any(axis=1)] = 1
        distances[:, ~others.any(axis=1)] = 1
    else:
        distances = np.sqrt(((x[:, None] - others[None, :]) ** 2).sum(axis=2))
    if y is None:
        np.fill_diagonal(distances, np.inf)
    return np.minimum(distances, np.finfo(np.float32).max) if y is not None else distances


def _check_neighbors(x: Array, k: int, metric: Metric) -> Graph:
    graph = nearest_neighbors(x, n_neighbors=k, metric=metric)
    truth = _distances(x, metric)
    assert graph.indices.shape == graph.distances.shape == (len(x), k)
    assert (graph.indices.dtype, graph.distances.dtype) == (np.int32, np.float32)
    assert (graph.metric, graph.exact, graph.recall) == (metric, True, None)
    assert (graph.indices != np.arange(len(x))[:, None]).all()
    assert all(len(set(row)) == k for row in graph.indices.tolist())
    assert (np.diff(graph.distances, axis=1) >= 0).all()
    # Rows equally far may come in any order: the distances decide.
    tolerance = {"rtol": 3e-6, "atol": 1e-14 if metric == "cosine" else 0.0}
    nearest = np.minimum(np.sort(truth, axis=1)[:, :k], np.finfo(np.float32).max)
    assert np.allclose(graph.distances, nearest, **tolerance)
    found = np.take_along_axis(truth, graph.indices.astype(int), axis=1)
    found = np.minimum(found, np.finfo(np.float32).max)
    assert np.allclose(graph.distances, found, **tolerance)
    return graph


def _rows(kind: str, n: int, d: int) -> Array:
    rng = np.random.default_rng(n + d)
    x = rng.normal(size=(n, d)).astype(np.float32)
    if kind == "double":
        return rng.normal(size=(n, d))
    if kind == "half":
        return x.astype(np.float16)
    if kind == "far":
        return rng.normal(size=(n, d)) + 1e4
    if kind == "two far apart":
        return x.astype(np.float64) + 1e5 * rng.integers(0, 2, (n, 1))
    if kind == "tiny":
        return x * np.float32(1e-30)
    if kind == "grid":
        return rng.integers(-2, 3, (n, d)).astype(np.float32)
    if kind == "after a ReLU":
        return np.maximum(x - 1, 0)
    if kind == "one huge":
        x[0] = 1e30
    if kind == "two as huge as can be":
        x[0], x[1] = 3e38, -3e38
    if kind == "zeros":
        x[::3] = 0
    if kind == "equal":
        x[n // 3 :] = x[0]
    if kind == "thrice as long":
        x[n // 2 :] = x[: n - n // 2] * 3
    if kind == "all equal":
        x[:] = 1
    if kind == "all at one distance":
        x = np.eye(n, dtype=np.float32)
    return x


KINDS = [
    *("single", "double", "half", "far", "two far apart", "tiny", "grid", "after a ReLU"),
    *("one huge", "two as huge as can be", "zeros", "equal", "thrice as long", "all equal"),
    "all at one distance",
]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_those_of_brute_force_whatever_the_k_and_the_blocks(
    kind: str, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, d in ((2, 1), (50, 7), (120, 300), (150, 3)):
        x = _rows(kind, n, d)
        whole = _check_neighbors(x, n - 1, metric)
        for block_bytes, pairs, ks in (
            (2**26, 2**18, {1, 5, 20}),
            (2**12, 50, {5, 20}),
            (1, 1, {5} if n <= 50 else {}),
        ):
            monkeypatch.setattr(neighbors, "_BLOCK_BYTES", block_bytes)
            monkeypatch.setattr(neighbors, "_PAIR_NUMBERS", pairs)
            for k in (min(k, n - 1) for k in ks):
                graph = nearest_neighbors(x, n_neighbors=k, metric=metric)
                assert graph.indices.tobytes() == whole.first(k).indices.tobytes()
                assert graph.distances.tobytes() == whole.first(k).distances.tobytes()
        monkeypatch.undo()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_rows_are_those_of_brute_force_and_the_same_in_any_company(
    kind: str, metric: Metric
) -> None:
    x = _rows(kind, 200, 200)
    queries = np.concatenate([x[:20], x[20:40] + x[40:60]])
    indices, distances = nearest_rows(queries, x, n_neighbors=7, metric=metric)
    truth = _distances(queries, metric, x)
    assert (indices.dtype, distances.dtype) == (np.int32, np.float32)
    assert indices.shape == distances.shape == (40, 7)
    assert all(len(set(row)) == 7 for row in indices.tolist())
    tolerance = {"rtol": 3e-6, "atol": 1e-14 if metric == "cosine" else 0.0}
    assert np.allclose(distances, np.sort(truth, axis=1)[:, :7], **tolerance)
    found = np.take_along_axis(truth, indices.astype(int), axis=1)
    assert np.allclose(distances, found, **tolerance)
    for some in (slice(3, 4), slice(10, 30)):
        again, apart = nearest_rows(queries[some], x, n_neighbors=7, metric=metric)
        assert (again == indices[some]).all()
        assert (apart == distances[some]).all()


@pytest.mark.parametrize("metric", METRICS)
def test_many_rows_have_the_neighbours_that_scikit_learn_finds(metric: Metric) -> None:
    x = np.random.default_rng(0).normal(size=(6000, 64)).astype(np.float32)
    index = NearestNeighbors(n_neighbors=30, metric=metric, algorithm="brute").fit(x)
    distances, _ = index.kneighbors()
    graph = nearest_neighbors(x, n_neighbors=30, metric=metric)
    assert np.allclose(graph.distances, distances, rtol=1e-5)


def test_rows_of_a_memory_map_have_the_neighbours_of_those_in_memory(tmp_path: Path) -> None:
    x = _rows("single", 90, 8)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    graph = nearest_neighbors(mapped, n_neighbors=6)
    assert (graph.indices == _check_neighbors(x, 6, "euclidean").indices).all()
    assert (nearest_rows(mapped[:9], mapped, n_neighbors=1)[0][:, 0] == np.arange(9)).all()


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(*[st.integers(-3, 3)] * 2), min_size=2, max_size=12), data=st.data())
def test_neighbours_are_right_for_any_rows_on_a_grid(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rows) - 1))
    for metric in METRICS:
        _check_neighbors(np.array(rows, np.float32), k, metric)


@pytest.mark.parametrize("metric", METRICS)
def test_equal_rows_are_at_distance_zero_and_each_is_chosen_about_as_often(metric: Metric) -> None:
    x = np.random.default_rng(0).normal(size=(1500, 9)).astype(np.float32)
    x[:1000] = x[0]
    graph = _check_neighbors(x, 15, metric)
    assert (graph.distances[:1000] == 0).all()
    chosen = np.bincount(graph.indices[:1000].ravel(), minlength=1500)
    assert chosen[1000:].sum() == 0
    # Chosen by lot, each 15 times on average, as a Poisson number.
    assert chosen[:1000].std() == pytest.approx(15**0.5, rel=0.2)
    assert (chosen[:1000].min(), chosen[:1000].max()) == (
        pytest.approx(4, abs=3),
        pytest.approx(28, abs=5),
    )
    apart = (graph.indices[:1000] - np.arange(1000)[:, None]) % 1000
    assert apart.mean() == pytest.approx(500, abs=15)  # no ring


def test_a_row_without_a_direction_is_at_distance_one_from_all() -> None:
    x = np.array([[0, 0], [0, 0], [1, 0], [2, 0], [-1, 0]], np.float32)
    graph = nearest_neighbors(x, n_neighbors=4, metric="cosine")
    assert graph.distances.tolist() == [
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [0, 1, 1, 2],
        [0, 1, 1, 2],
        [1, 1, 2, 2],
    ]


def test_distance_beyond_float32_is_the_largest() -> None:
    x = np.array([[0.0], [1.0], [3e38], [-3e38]], np.float32)
    distances = nearest_neighbors(x, n_neighbors=3).distances
    most = np.finfo(np.float32).max
    assert distances[0].tolist() == [1, np.float32(3e38), np.float32(3e38)]
    assert distances[2].tolist() == [np.float32(3e38), np.float32(3e38), most]


@pytest.mark.parametrize("k", [0, -1, 5, 6])
def test_number_of_neighbours_out_of_range_is_refused(k: int, tmp_path: Path) -> None:
    x = np.eye(5)
    with pytest.raises(ValueError, match=f"n_neighbors must be 1 to 4, not {k}"):
        nearest_neighbors(x, n_neighbors=k)
    graph = nearest_neighbors(x, n_neighbors=4)
    with pytest.raises(ValueError, match=f"n_neighbors must be 1 to 4, not {k}"):
        graph.first(k)
    for _ in range(2):  # without a file and with one
        with pytest.raises(ValueError, match=f"n_neighbors must be 1 to 4, not {k}"):
            cached_graph(tmp_path, key="x", rows=x, n_neighbors=k, parentage={"parent": "p"})
        cached_graph(tmp_path, key="x", rows=x, n_neighbors=1, parentage={"parent": "p"})


def test_queries_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="n_neighbors must be 1 to 5, not 6"):
        nearest_rows(np.eye(5), np.eye(5), n_neighbors=6)
    with pytest.raises(ValueError, match="queries have 4 columns, and x has 5"):
        nearest_rows(np.eye(4), np.eye(5), n_neighbors=1)


# --------------------------------------------------------------------------- approximate


@pytest.mark.slow
@pytest.mark.parametrize("metric", [METRICS[0], pytest.param(METRICS[1], marks=EXHAUSTIVE)])
def test_approximate_neighbours_are_near_and_the_recall_that_is_printed_is_true(
    metric: Metric, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbors, "KEPT_K", 10)  # with 100 it finds all of so few rows
    caplog.set_level(logging.INFO, logger="embedx")
    x = np.random.default_rng(0).normal(size=(3000, 100)).astype(np.float32)
    x[:200] = x[0]
    x[200:210] = 0
    graph = nearest_neighbors(x, n_neighbors=10, metric=metric, exact=False)
    truth = nearest_neighbors(x, n_neighbors=10, metric=metric)
    assert not graph.exact
    assert graph.recall is not None
    found = float((graph.distances <= truth.distances[:, -1:]).mean())
    assert 0.5 < found < 1
    assert graph.recall == pytest.approx(found, abs=0.02)
    (line,) = caplog.messages
    assert line == (
        f"approximate neighbours, recall {graph.recall:.2f} on 1,000 rows; exact=true computes all"
    )
    assert (graph.indices != np.arange(3000)[:, None]).all()
    assert all(len(set(row)) == 10 for row in graph.indices.tolist())
    assert (np.diff(graph.distances, axis=1) >= 0).all()
    pairs = _distances(x[:300], metric, x)
    apart = np.take_along_axis(pairs, graph.indices[:300].astype(int), axis=1)
    assert np.allclose(graph.distances[:300], apart, rtol=3e-6, atol=1e-14)
    # Fewer are the first of more; the same seed gives the same, another seed another graph.
    few = nearest_neighbors(x, n_neighbors=4, metric=metric, exact=False)
    assert few.indices.tobytes() == graph.first(4).indices.tobytes()
    other = nearest_neighbors(x, n_neighbors=10, metric=metric, exact=False, seed=1)
    assert (other.indices != graph.indices).any()


@pytest.mark.slow
def test_too_few_rows_with_a_direction_for_an_index_are_searched_exactly() -> None:
    x = np.zeros((300, 3), np.float32)
    x[:40] = np.random.default_rng(0).normal(size=(40, 3))
    graph = nearest_neighbors(x, n_neighbors=60, metric="cosine", exact=False)
    truth = nearest_neighbors(x, n_neighbors=60, metric="cosine")
    assert (graph.indices == truth.indices).all()
    assert graph.recall == 1


def test_beyond_the_limit_the_search_is_approximate_unless_exact_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbors, "EXACT_ROWS", 49)
    exact = neighbors._search
    searched: list[int] = []

    def approximate(space: Any, k: int, seed: int) -> Graph:
        searched.append(k)
        rows = np.arange(len(space.x))
        return Graph(*exact(space, space, k, own=rows), space.metric, False, 0.5)

    monkeypatch.setattr(neighbors, "_approximate", approximate)

    def cached(k: int, n: int = 300, **options: Any) -> Graph:
        rows = _rows("single", n, 3)
        graph = cached_graph(
            tmp_path, key="x", rows=rows, n_neighbors=k, parentage={"parent": "p"}, **options
        )
        assert graph.indices.shape == (n, k)
        return graph

    assert cached(5, n=49).exact
    assert searched == []
    assert (cached(5).exact, cached(100).recall, cached(7).recall) == (False, 0.5, 0.5)
    assert searched == [100]
    assert not cached(101).exact
    assert searched == [100, 200]  # and the graph for fewer stays the one it was
    cached(5)
    cached(5, seed=1)
    assert searched == [100, 200, 100]
    assert cached(5, exact=True).exact
    assert not cached(5).exact
    assert searched == [100, 200, 100]


# --------------------------------------------------------------------------- the file


class _Counted:
    """Counts computations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []

        def count(x: Array, *, n_neighbors: int, **options: Any) -> Graph:
            self.asked.append(n_neighbors)
            return nearest_neighbors(x, n_neighbors=n_neighbors, **options)

        monkeypatch.setattr(neighbors, "nearest_neighbors", count)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    return _Counted(monkeypatch)


class _Unread(Matrix):
    """Rows that are there and may not be read."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        pytest.fail("the rows were read although their neighbours are kept")


def _cached(folder: Path, rows: Array | Matrix, k: int = 5, **options: Any) -> Graph:
    return cached_graph(
        folder, n_neighbors=k, **{"key": "x", "parentage": {"parent": "p"}, **options}, rows=rows
    )


def _same(graph: Graph, rows: Array, k: int, metric: Metric = "euclidean") -> bool:
    plain = nearest_neighbors(rows, n_neighbors=k, metric=metric)
    return (
        graph.indices.tobytes() == plain.indices.tobytes()
        and graph.distances.tobytes() == plain.distances.tobytes()
        and (graph.metric, graph.exact, graph.recall) == (metric, True, None)
    )


def test_a_graph_is_computed_once_for_all_that_ask_for_no_more(
    tmp_path: Path, counted: _Counted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="embedx")
    x = _rows("grid", 150, 3)
    assert _same(_cached(tmp_path, Matrix(x), 5), x, 5)
    (file,) = tmp_path.iterdir()
    (line,) = caplog.messages
    assert line.startswith("found the 100 nearest neighbours of each of 150 rows, euclidean, exact")
    assert line.endswith(f"kept in {file}")
    for k in (1, 15, 100):
        assert _same(_cached(tmp_path, _Unread(x), k), x, k)
    assert counted.asked == [100]
    assert _same(_cached(tmp_path, x, 120), x, 120)
    assert _same(_cached(tmp_path, x, 100), x, 100)
    assert counted.asked == [100, 120]
    assert list(tmp_path.iterdir()) == [file]
    assert _same(_cached(tmp_path, x, 5, metric="cosine"), x, 5, "cosine")
    assert _same(_cached(tmp_path, x[:30], 5, key="y"), x[:30], 5)
    assert _same(_cached(tmp_path, _Unread(x[:30]), 29, key="y"), x[:30], 29)
    assert _same(_cached(tmp_path, x[:20], 5, key="y"), x[:20], 5)
    _cached(tmp_path, x, 5, parentage={"parent": "q"})
    assert counted.asked == [100, 120, 100, 29, 19, 100]


def _damage(path: Path, change: Callable[[h5py.File], None], *, seal: bool = True) -> None:
    with h5py.File(path, "r+") as file:
        change(file)
        if seal:
            arrays = np.array(file["indices"]), np.array(file["distances"])
            file.attrs["sha256"] = neighbors._sha256(*arrays)


def _put(name: str, where: Any, value: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file[name][where] = value

    return change


def _swap(name: str, make: Callable[[Array], Array]) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        array = make(np.array(file[name]))
        del file[name]
        file[name] = array

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no HDF5": lambda path: path.write_text("hello"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "empty": lambda path: path.write_bytes(b""),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a bit": lambda path: _damage(path, _put("distances", (0, 0), 1e-9), seal=False),
    "index n": lambda path: _damage(path, _put("indices", (3, 2), 40)),
    "index -1": lambda path: _damage(path, _put("indices", (3, 2), -1)),
    "itself": lambda path: _damage(path, _put("indices", (3, 2), 3)),
    "twice the same": lambda path: _damage(path, _put("indices", 3, 7)),
    "nan": lambda path: _damage(path, _put("distances", (3, 2), np.nan)),
    "negative": lambda path: _damage(path, _put("distances", (3, 0), -1)),
    "not sorted": lambda path: _damage(path, _put("distances", (3, 0), 1e9)),
    "int64": lambda path: _damage(path, _swap("indices", lambda a: a.astype("i8"))),
    "float64": lambda path: _damage(path, _swap("distances", lambda a: a.astype("f8"))),
    "one row less": lambda path: _damage(path, _swap("distances", lambda a: a[1:])),
    "flat": lambda path: _damage(path, _swap("indices", lambda a: a.ravel())),
    "no indices": lambda path: _damage(path, lambda file: file.pop("indices"), seal=False),
    "other key": lambda path: _damage(path, lambda file: file.attrs.update(key="z")),
    "other metric": lambda path: _damage(path, lambda file: file.attrs.update(metric="cosine")),
    "list for a key": lambda path: _damage(path, lambda file: file.attrs.update(key=[1, 2])),
    "no parent": lambda path: _damage(path, lambda file: file.attrs.pop("parent")),
    "recall": lambda path: _damage(path, lambda file: file.attrs.update(recall="much")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_made_anew_and_said_in_a_line(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = _rows("single", 40, 3)
    _cached(tmp_path, x)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    DAMAGES[damage](path)
    assert _same(_cached(tmp_path, x), x, 5)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert "\n" not in warnings[0]
    if damage != "a folder":
        assert path.read_bytes() == good


def test_a_graph_that_cannot_be_kept_is_computed_and_that_is_said(
    tmp_path: Path, counted: _Counted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="embedx")
    x = _rows("single", 40, 3)
    for _ in range(2):
        assert _same(_cached(tmp_path / "none", x), x, 5)
    assert counted.asked == [39, 39]
    assert not any(tmp_path.iterdir())
    assert all("not kept: " in line for line in caplog.messages)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_in_a_folder_that_cannot_be_written_a_graph_is_computed(tmp_path: Path) -> None:
    x = _rows("single", 40, 3)
    tmp_path.chmod(0o500)
    try:
        assert _same(_cached(tmp_path, x), x, 5)
    finally:
        tmp_path.chmod(0o700)
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_said_and_the_graph_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="embedx")

    def refuse(path: Path, *_: object, **__: object) -> Path:
        raise StoreError(f"no disk space for {path}")

    monkeypatch.setattr(layout, "replace_file", refuse)
    x = _rows("single", 40, 3)
    assert _same(_cached(tmp_path, x), x, 5)
    (line,) = caplog.messages
    assert "not kept: no disk space for" in line
    assert not any(tmp_path.iterdir())


def _compute_slowly(folder: Path, x: Array, begun: Any, go_on: Any) -> None:
    plain = nearest_neighbors

    def slowly(*args: Any, **options: Any) -> Graph:
        begun.set()
        go_on.wait(60)
        return plain(*args, **options)

    neighbors.nearest_neighbors = slowly
    _cached(folder, x)


@pytest.mark.parametrize("dies", [False, True], ids=["finishes", "dies"])
def test_a_process_waits_for_another_that_computes_and_takes_over_when_that_dies(
    dies: bool, tmp_path: Path, counted: _Counted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="embedx")
    x = _rows("single", 40, 3)
    spawn = multiprocessing.get_context("spawn")
    begun, go_on = spawn.Event(), spawn.Event()
    first = spawn.Process(target=_compute_slowly, args=(tmp_path, x, begun, go_on))
    first.start()
    assert first.pid is not None
    assert begun.wait(60)

    def end(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("waiting for"):
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL) if dies else go_on.set()
        return True

    logging.getLogger("embedx").addFilter(end)
    try:
        assert _same(_cached(tmp_path, x), x, 5)
    finally:
        logging.getLogger("embedx").removeFilter(end)
        first.join(60)
    assert first.exitcode == (-signal.SIGKILL if dies else 0)
    assert counted.asked == ([39] if dies else [])
    host = os.uname().nodename
    line = f"waiting for process {first.pid} on {host}, which computes the neighbours"
    assert caplog.messages.count(line) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".h5"]
