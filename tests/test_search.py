"""The stage ``neighbors``: what is found is what a plain loop finds, and what was planted."""

import csv
import json
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import embedx
from embedx import derived, ready_made, store
from embedx.errors import ConfigError, DataError, DependencyError, EmbedxError, StoreError
from embedx.search import search
from tests.conftest import ROOT, embeddings_file, sha256

Array = np.ndarray[Any, Any]
Here = Callable[..., tuple[int, list[str], list[str]]]

TINY = ("model=mobilenet_v3_small", "model.weights=null", "model.input_size=64")


def rows(n: int, d: int = 6, *, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def distances(x: Array, y: Array, metric: str) -> Array:
    """All distances, one pair at a time."""
    far = np.empty((len(x), len(y)))
    for i, a in enumerate(x.astype(np.float64)):
        for j, b in enumerate(y.astype(np.float64)):
            cosine = 1 - a @ b / np.sqrt((a @ a) * (b @ b))
            far[i, j] = cosine if metric == "cosine" else np.sqrt(((a - b) ** 2).sum())
    return far


def nearest_of_each(x: Array, k: int, metric: str = "cosine") -> tuple[Array, Array]:
    far = distances(x, x, metric)
    np.fill_diagonal(far, np.inf)
    order = np.argsort(far, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(far, order, axis=1)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# --------------------------------------------------------------------------- a query


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("query", [7, "7", "row-0007"])
def test_nearest_rows_of_a_row_are_those_of_a_plain_loop(
    query: int | str, metric: Any, tmp_path: Path
) -> None:
    x = rows(40)
    path = embeddings_file(tmp_path, x, labels=["a", "b"] * 20)
    found = search(path, query=query, metric=metric, n_neighbors=5)
    order, far = nearest_of_each(x, 5, metric)
    table = found.tables["neighbors"]
    assert [row["row"] for row in table] == order[7].tolist()
    assert [row["distance"] for row in table] == pytest.approx(far[7].tolist(), rel=1e-4)
    assert [row["rank"] for row in table] == [1, 2, 3, 4, 5]
    assert [row["label"] for row in table] == ["ab"[i % 2] for i in order[7]]
    assert {row["query"] for row in table} == {"row-0007"}


def test_an_id_comes_before_a_row_number(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, rows(4), ids=["3", "2", "1", "0"])
    assert search(path, query="3", n_neighbors=1).tables["neighbors"][0]["query"] == "3"
    assert search(path, query=3, n_neighbors=1).tables["neighbors"][0]["query"] == "0"


def test_a_row_never_finds_itself_however_many_equal_it(tmp_path: Path) -> None:
    x = np.repeat(rows(2), 6, axis=0)
    path = embeddings_file(tmp_path, x)
    for query in range(12):
        table = search(path, query=query, n_neighbors=3, sheet=0).tables["neighbors"]
        found = [row["row"] for row in table]
        assert len(set(found)) == 3
        assert query not in found
        assert {row // 6 for row in found} == {query // 6}


def test_rows_of_another_file_find_those_of_a_plain_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x, y = rows(30), rows(7, seed=1)
    path = embeddings_file(tmp_path / "a", x)
    other = embeddings_file(tmp_path / "b", y, failed=[2], id="two")
    for query in (other, other.parent, str(other), embedx.open(other)):
        table = search(path, query=query, n_neighbors=3).tables["neighbors"]
        order = np.argsort(distances(y, x, "cosine"), axis=1)[:, :3]
        kept = [i for i in range(7) if i != 2]
        assert [row["row"] for row in table] == order[kept].ravel().tolist()
        assert [row["query"] for row in table[::3]] == [f"row-{i:04d}" for i in kept]
    assert "1 rows failed and are left out" in said(caplog)
    assert any("taken at their word" in line for line in said(caplog))


IDENTITY = {
    "model": "net",
    "weights_sha256": "a" * 64,
    "code": "c",
    "tokens": False,
    "preprocess": {"crop_px": 96, "resize_px": 110},
    "normalize": False,
    "precision": "fp32",
    "layers": ["avgpool"],
    "pooling": ["gap"],
    "pooling_code": [""],
    "revisions": [1, 1, 1],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights_sha256": "b" * 64}, r"weights_sha256 is .*bbbbbbbb there and .*aaaaaaaa here"),
        (
            {"preprocess": {"crop_px": 96, "resize_px": 96}},
            r'preprocess is {"resize_px": 96} there and {"resize_px": 110} here',
        ),
        ({"pooling": ["max"]}, r'pooling is "max" there and "gap" here'),
        ({"pooling_code": ["x"]}, r'pooling_code is "x" there and "" here'),
        ({"tokens": True}, r"tokens is true there and false here"),
        ({"normalize": True}, r"normalize is true there and false here"),
        ({"model": "other"}, r'model is "other" there and "net" here'),
    ],
)
def test_rows_of_another_model_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = embeddings_file(tmp_path / "a", rows(9), identity=json.dumps(IDENTITY))
    there = json.dumps({**IDENTITY, **change})
    other = embeddings_file(tmp_path / "b", rows(3), id="two", identity=there)
    with pytest.raises(StoreError, match=message):
        search(path, query=other, n_neighbors=2)


def test_vectors_of_which_no_model_is_known_are_compared_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("bert.npy", rows(20).astype(np.float32))
    np.save("clip.npy", rows(20, seed=1).astype(np.float32))
    bert, clip = map(ready_made.opened, ("bert.npy", "clip.npy"))
    search(bert, query=clip, n_neighbors=2, sheet=0)
    (told,) = (line for line in caplog.messages if "cannot be told" in line)
    assert told.startswith("whether both were made with the same weights_sha256, code, ")


def test_rows_of_another_precision_are_compared_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = embeddings_file(tmp_path / "a", rows(9), identity=json.dumps(IDENTITY))
    there = json.dumps({**IDENTITY, "precision": "bf16"})
    other = embeddings_file(tmp_path / "b", rows(1), id="two", identity=there)
    found = search(path, query=other, n_neighbors=1).tables["neighbors"]
    assert (found[0]["row"], found[0]["distance"]) == (0, pytest.approx(0, abs=1e-6))
    assert "precision is bf16 there and fp32 here: distances are as coarse as" in caplog.text


# --------------------------------------------------------------------------- duplicates


def planted_copies() -> tuple[Array, list[str]]:
    """Rows of which 3, 4 equal 0, 5 is nearly 1, 6 nearly 5; 7 is 2 but for the sign of a zero."""
    x = rows(60, 16)
    x[2, 3] = 0.0
    x[[3, 4]] = x[0]
    x[5] = x[1] + 0.02
    x[6] = x[5] + 0.02
    x[7] = x[2]
    x[7, 3] = -0.0
    labels = ["a"] * 60
    labels[6] = "b"
    return x, labels


def test_copies_and_near_ones_are_grouped_as_a_plain_loop_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x, labels = planted_copies()
    found = search(embeddings_file(tmp_path, x, labels=labels), find="duplicates", n_neighbors=5)
    order, far = nearest_of_each(x, 5)
    alone = [i for i in range(60) if i not in (0, 2, 3, 4, 7)]
    below = 0.25 * np.median(far[alone, 0])
    assert found.about["duplicates"]["near_below"] == pytest.approx(below, rel=1e-4)
    expected = {i: i for i in range(60)}
    for i, j in zip(*np.nonzero(distances(x, x, "cosine") < below), strict=True):
        old, new = expected[int(j)], expected[int(i)]
        expected = {row: new if group == old else group for row, group in expected.items()}
    sizes = Counter(expected.values())
    table = found.tables["duplicates"]
    groups: dict[int, list[int]] = {}
    for row in table:
        groups.setdefault(row["group"], []).append(row["row"])
    assert sorted(groups.values()) == sorted(
        [[i for i in range(60) if expected[i] == g] for g, size in sizes.items() if size > 1]
    )
    assert groups == {1: [1, 5, 6], 2: [0, 3, 4], 3: [2, 7]}  # other labels first
    kinds = {row["row"]: row["kind"] for row in table}
    assert kinds == dict.fromkeys([0, 2, 3, 4, 7], "exact") | dict.fromkeys([1, 5, 6], "near")
    for row in table:
        i, j = row["row"], store.open(tmp_path).ids.index(row["nearest"])
        assert row["distance"] == pytest.approx(far[i, 0], abs=1e-6)
        assert j != i
        assert distances(x[[i]], x[[j]], "cosine")[0, 0] == pytest.approx(far[i, 0], abs=1e-6)
    assert [row["labels_differ"] for row in table] == [True] * 3 + [False] * 5
    lines = said(caplog)
    assert any("3 groups, of 5 exact copies and 3 near ones" in line for line in lines)
    assert "in 1 of the groups the labels differ" in lines


@pytest.mark.parametrize("spread", [0.0, 1e-5])
def test_more_copies_than_a_row_has_neighbours_are_one_group_with_those_near_them(
    tmp_path: Path, spread: float
) -> None:
    x = rows(70)
    x[:11], x[11:22] = x[0], x[0] + 1e-3  # a picture saved twice, and each many times
    x[:22] += np.random.default_rng(1).normal(size=(22, x.shape[1])) * spread
    path = embeddings_file(tmp_path, x, labels=["a"] * 11 + ["b"] * 59)
    found = search(path, find="duplicates", metric="euclidean", threshold=0.01, sheet=0)
    table = found.tables["duplicates"]
    assert {row["row"] for row in table if row["group"] == 1} == set(range(22))
    assert found.about["duplicates"]["groups_whose_labels_differ"] == 1


@pytest.mark.parametrize("n_distinct", [1, 2, 6, 10, 11])
def test_few_rows_that_are_there_many_times_are_linked_to_those_near_them(
    tmp_path: Path, n_distinct: int
) -> None:
    distinct = rows(n_distinct + 1)[1:] * 100
    distinct[1:2] = distinct[0] + 0.1
    x = np.repeat(distinct, 12, axis=0)
    path = embeddings_file(tmp_path, x)
    found = search(path, find="duplicates", metric="euclidean", threshold=1.0, sheet=0)
    groups: dict[int, set[int]] = {}
    for row in found.tables["duplicates"]:
        groups.setdefault(row["group"], set()).add(row["row"])
    n_first = min(24, 12 * n_distinct)
    expected = [range(n_first), *(range(i, i + 12) for i in range(n_first, len(x), 12))]
    assert sorted(map(sorted, groups.values())) == list(map(list, expected))


def test_rows_too_many_to_link_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["embedx.search"], "_LINKS_MOST", 100)
    search(embeddings_file(tmp_path, rows(60)), find="duplicates", threshold=3.0, sheet=0)
    assert "60 rows have more rows that are closer than 3 than were looked at" in caplog.text


@pytest.mark.parametrize(("threshold", "n"), [(0.0, 5), (3.0, 60)])
def test_a_threshold_is_taken_as_it_is(threshold: float, n: int, tmp_path: Path) -> None:
    x, _ = planted_copies()
    path = embeddings_file(tmp_path, x)
    found = search(path, find="duplicates", threshold=threshold, n_neighbors=59)
    assert len(found.tables["duplicates"]) == n
    assert {row["kind"] for row in found.tables["duplicates"]} == {"exact", "near"} - (
        {"near"} if threshold == 0 else set()
    )


def test_rows_that_all_equal_each_other_are_one_group_and_no_outliers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = search(embeddings_file(tmp_path, np.ones((30, 4))))
    assert [row["rows_in_group"] for row in found.tables["duplicates"]] == [30] * 30
    assert found.about["outliers"] == {"suspects": 0}
    assert any("no z can be given" in line for line in said(caplog))


# --------------------------------------------------------------------------- outliers, labels


def test_outliers_are_scored_by_the_formula(tmp_path: Path) -> None:
    x = np.abs(rows(80, 12)) + 3
    x[[11, 50]] = rows(2, 12, seed=4) * 5
    found = search(embeddings_file(tmp_path, x), find="outliers", n_neighbors=4)
    _, far = nearest_of_each(x, 4)
    score = far.mean(axis=1)
    logs = np.log(score)
    z = 0.6745 * (logs - np.median(logs)) / np.median(np.abs(logs - np.median(logs)))
    table = found.tables["outliers"]
    assert [row["row"] for row in table] == np.argsort(-score).tolist()
    assert [row["score"] for row in table] == pytest.approx(np.sort(score)[::-1].tolist(), rel=1e-3)
    assert [row["z"] for row in table] == pytest.approx(np.sort(z)[::-1].tolist(), abs=1e-2)
    assert {row["row"] for row in table[:2]} == {11, 50}
    suspects = [row["row"] for row in table if row["suspect"]]
    assert suspects == [row["row"] for row in table[: int((z > 3.5).sum())]]


def confident(labels: list[str], order: Array) -> dict[int, tuple[float, str, float]]:
    """Share of the own label, and the suggested one with its share, by the rule in words."""
    shares = []
    for neighbors in order:
        votes = Counter(labels[j] for j in neighbors if labels[j])
        shares.append({name: count / votes.total() for name, count in votes.items()})
    usual = {
        name: np.mean([shares[i].get(name, 0) for i in range(len(labels)) if labels[i] == name])
        for name in set(labels) - {""}
    }
    found = {}
    for i, name in enumerate(labels):
        if not name:
            continue
        own = shares[i].get(name, 0)
        may_be = {
            other: share
            for other, share in shares[i].items()
            if other != name and share >= usual[other] and share > own
        }
        best = max(may_be.values(), default=0)
        # Of equal shares, the label of the nearest.
        (rather,) = [labels[j] for j in order[i] if may_be.get(labels[j]) == best][:1] or [""]
        found[i] = (own, rather, best)
    return found


def clusters(n: int, *, flipped: tuple[int, ...]) -> tuple[Array, list[str]]:
    centers = rows(3, 10, seed=2) * 3
    truth = np.arange(n) % 3
    x = centers[truth] + rows(n, 10, seed=3)
    labels = ["abc"[(t + (i in flipped)) % 3] for i, t in enumerate(truth)]
    return x.astype(np.float32), labels


def test_labels_are_doubted_by_the_rule_in_words(tmp_path: Path) -> None:
    flipped = (5, 17, 40)
    x, labels = clusters(90, flipped=flipped)
    labels[3] = labels[8] = ""
    found = search(embeddings_file(tmp_path, x, labels=labels), find="labels", n_neighbors=7)
    order, _ = nearest_of_each(x, 7)
    expected = confident(labels, order)
    table = found.tables["labels"]
    assert {row["row"] for row in table} == set(expected)
    for row in table:
        own, rather, best = expected[row["row"]]
        assert row["share"] == pytest.approx(own, abs=1e-5)
        assert (row["suspect"], row["suggested"]) == (best > 0, rather or None)
        if best:
            assert row["suggested_share"] == pytest.approx(best, abs=1e-5)
    suspects = [row["row"] for row in table if row["suspect"]]
    assert set(suspects) == set(flipped)
    assert [row["row"] for row in table[: len(suspects)]] == suspects
    doubted = [row["share"] - row["suggested_share"] for row in table[: len(suspects)]]
    assert doubted == sorted(doubted)


def test_labels_too_few_to_tell_and_a_single_label_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x, labels = clusters(60, flipped=())
    labels[4] = "rare"
    search(embeddings_file(tmp_path / "a", x, labels=labels), find="labels")
    assert "1 labels have no more than 5 rows, too few to tell: rare" in said(caplog)
    found = search(embeddings_file(tmp_path / "b", x, labels=["one"] * 60))
    assert "labels: there is only one, so none can be wrong" in said(caplog)
    assert set(found.tables) == {"duplicates", "outliers"}


# --------------------------------------------------------------------------- rows left out


def test_failed_rows_and_bad_numbers_are_nowhere_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x, labels = clusters(50, flipped=(9,))
    x[[20, 21]] = x[22]
    x[30, 4] = np.inf
    path = embeddings_file(tmp_path, x, labels=labels, failed=[0, 21], thumbnails=tiles(50))
    found = search(path, n_neighbors=5)
    assert {row["row"] for row in found.tables["duplicates"]} == {20, 22}
    for name in ("outliers", "labels"):
        assert {row["row"] for row in found.tables[name]} == set(range(50)) - {0, 21, 30}
    assert {row["nearest"] for table in found.tables.values() for row in table}.isdisjoint(
        {"row-0000", "row-0021", "row-0030"}
    )
    assert (found.about["rows"], found.about["left_out"]) == (47, 3)
    lines = said(caplog)
    assert "2 rows failed and are left out" in lines
    assert "1 rows hold a number that is not finite and are left out" in lines
    with pytest.raises(DataError, match=r"row 21 \(row-0021\) of .* failed, so nothing is near"):
        search(path, query=21)
    with pytest.raises(DataError, match=r"row 30 .* holds a number that is not finite"):
        search(path, query=30)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"n_neighbors": 12},
            ConfigError,
            r"n_neighbors=12 needs more than 12 .* has 12 that",
        ),
        ({"n_neighbors": 12, "query": 0}, ConfigError, r"more than the 11 rows .* at most .*=11"),
        ({"n_neighbors": 0}, ConfigError, r"n_neighbors must be at least 1, not 0"),
        ({"threshold": -0.1}, ConfigError, r"threshold must be a distance, 0 or more, not -0.1"),
        ({"threshold": 0.1, "query": 1}, ConfigError, r"leave out threshold or query"),
        ({"find": "labels", "query": 1}, ConfigError, r"leave out find or query"),
        ({"find": "labels"}, DataError, r"has no labels, so find=labels finds nothing; choose"),
        ({"find": "label"}, ConfigError, r"the nearest is labels"),
        ({"sheet": -1}, ConfigError, r"sheet must be 0 or more lines, not -1"),
        ({"layer": "fc"}, StoreError, r"has no layer 'fc'; it holds avgpool"),
        (
            {"query": "row-00003"},
            ConfigError,
            r"query='row-00003' is no id of .*, no row number below 12, and no file; the nearest "
            r"ids are .*row-0003.*",
        ),
        ({"query": "12"}, ConfigError, r"query='12' is no id"),
        ({"query": -1}, ConfigError, r"query='-1' is no id"),
        ({"query": Path(__file__)}, ConfigError, r"is no file of embeddings; run it through .*"),
        ({"query": ROOT}, StoreError, r"there is no .*embeddings.h5"),
    ],
)
def test_a_mistake_is_one_line(
    options: dict[str, Any], error: type[EmbedxError], message: str, tmp_path: Path
) -> None:
    path = embeddings_file(tmp_path, rows(12))
    with pytest.raises(error, match=message) as caught:
        search(path, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "neighbors").exists()


def test_one_row_and_the_same_file_are_refused(tmp_path: Path) -> None:
    one = embeddings_file(tmp_path / "a", rows(1))
    with pytest.raises(DataError, match="has one row that can be searched"):
        search(one)
    none = embeddings_file(tmp_path / "b", rows(2), failed=[0, 1])
    with pytest.raises(DataError, match="has no row of 2 that can be searched"):
        search(none)
    path = embeddings_file(tmp_path / "c", rows(9))
    with pytest.raises(ConfigError, match="holds the same rows as"):
        search(path, query=path)
    other = embeddings_file(tmp_path / "d", {"fc": rows(9)}, id="two")
    with pytest.raises(StoreError, match="has no layer 'avgpool', as .* it holds fc"):
        search(path, query=other)


# --------------------------------------------------------------------------- what is written


WEIRD = ["=1+1", "+x", "-y", "@z", "tab\there", 'quo"te,', "new\nline", "\x1b[31mred", "ünï→"]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_tables_hold_the_same_in_csv_and_json_and_no_cell_is_a_formula(tmp_path: Path) -> None:
    n = len(WEIRD)
    path = embeddings_file(tmp_path, rows(n), ids=WEIRD, labels=WEIRD)
    found = search(path, n_neighbors=3, threshold=3.0)
    assert set(found.tables) == {"duplicates", "outliers", "labels"}
    for name, table in found.tables.items():
        (file,) = [p for p in found.paths if p.name.startswith(name) and p.suffix == ".csv"]
        document = json.loads(file.with_suffix(".json").read_text())
        assert document["table"] == table
        assert (document["parent"], document["metric"]) == ("one", "cosine")
        cells = read_csv(file)
        assert len(cells) == len(table) == n
        for row, cell in zip(table, cells, strict=True):
            assert cell.keys() == row.keys()
            for column, value in row.items():
                if isinstance(value, str):
                    formula = value.startswith(("=", "+", "-", "@", "\t"))
                    assert cell[column] == ("'" if formula else "") + value
            assert int(cell["row"]) == WEIRD.index(row["id"])


def test_a_table_without_rows_has_the_columns_of_one_with_rows(tmp_path: Path) -> None:
    x, labels = planted_copies()
    for name, given in (("labelled", labels), ("plain", None)):
        path = embeddings_file(tmp_path / name, x, labels=given)
        some = search(path, find="duplicates").paths
        distinct = embeddings_file(tmp_path / name / "distinct", rows(60, 16), labels=given)
        none = search(distinct, find="duplicates", threshold=0.0)
        assert none.tables["duplicates"] == []
        heads = [
            next(p for p in paths if p.suffix == ".csv").read_text().splitlines()[0]
            for paths in (some, none.paths)
        ]
        assert heads[0] == heads[1]


def test_text_from_data_cannot_steer_the_terminal(embedx_here: Here, tmp_path: Path) -> None:
    embeddings_file(tmp_path / "run", rows(len(WEIRD)), ids=WEIRD, labels=WEIRD)
    status, out, err = embedx_here("neighbors", "embeddings=run", "query=0", "n_neighbors=8")
    assert (status, err) == (0, [])
    assert all(line.isprintable() for line in out)
    assert any("?[31mred" in line for line in out)


def test_the_same_search_writes_the_same_bytes_and_another_elsewhere(tmp_path: Path) -> None:
    x, labels = clusters(40, flipped=(3, 10))
    path = embeddings_file(tmp_path, x, labels=labels, thumbnails=tiles(40))
    first = search(path)
    before = {file: sha256(file) for file in first.paths}
    assert {file.name for file in before} == {
        f"{name}.{suffix}"
        for name in ("duplicates", "outliers", "labels")
        for suffix in ("csv", "json", "png")
    } - {
        f"{name}.png"
        for name, table in first.tables.items()
        if not (table if name == "duplicates" else [row for row in table if row["suspect"]])
    }
    assert search(path).paths == first.paths
    assert {file: sha256(file) for file in first.paths} == before
    others = search(path, metric="euclidean").paths
    assert others
    assert not {*others} & {*first.paths}
    queries = [search(path, query=3).paths, search(path, query=3, n_neighbors=2).paths]
    assert not {*queries[0]} & {*queries[1]}
    assert {file: sha256(file) for file in first.paths} == before


def test_what_somebody_else_wrote_is_not_written_over(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path / "run", rows(20))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "duplicates.csv").write_text("my own")
    with pytest.raises(StoreError, match=r"duplicates.csv is not of these embeddings; choose"):
        search(path, out=folder)
    assert (folder / "duplicates.csv").read_text() == "my own"
    other = embeddings_file(tmp_path / "other", rows(20, seed=5), id="two")
    shared = tmp_path / "shared"
    search(path, out=shared)
    with pytest.raises(StoreError, match="is not of these embeddings"):
        search(other, out=shared)


def test_replacing_embeddings_removes_what_was_found_in_them(tmp_path: Path) -> None:
    x, labels = clusters(40, flipped=(3, 10))
    path = embeddings_file(tmp_path, x, labels=labels, thumbnails=tiles(40))
    found = search(path)
    (tmp_path / "neighbors" / "notes.txt").write_text("mine")
    (tmp_path / "neighbors" / "mine.json").write_text("[1]")
    derived.remove_derived(tmp_path, "another")
    assert all(file.exists() for file in found.paths)
    derived.remove_derived(tmp_path, "one")
    assert {file.name for file in (tmp_path / "neighbors").iterdir()} == {"notes.txt", "mine.json"}
    search(path)
    for name in ("notes.txt", "mine.json"):
        (tmp_path / "neighbors" / name).unlink()
    derived.remove_derived(tmp_path, "one")
    assert not (tmp_path / "neighbors").exists()


# --------------------------------------------------------------------------- sheets


def tiles(n: int) -> Array:
    """A miniature of one colour a row, each of its own."""
    color = np.stack([np.arange(n) * 5, 255 - np.arange(n) * 5, np.full(n, 77)], axis=1)
    return np.broadcast_to(color[:, None, None, :], (n, 8, 8, 3)).astype(np.uint8)


def colors_across(path: Path, line: int, n_lines: int) -> list[int]:
    """Which rows' miniatures a line of a sheet shows, from left to right."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    top, step = 0.385 * 150, (pixels.shape[0] - 0.385 * 150) / n_lines
    across = pixels[int(top + line * step + 40)]
    found = [
        int(red) // 5
        for red, green, blue in across.tolist()
        if blue == 77 and red % 5 == 0 and red + green == 255
    ]
    return list(dict.fromkeys(found))


def test_a_sheet_shows_a_suspect_on_the_left_and_its_nearest_in_order(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    x, labels = clusters(48, flipped=(3, 10, 32))
    path = embeddings_file(tmp_path, x, labels=labels, thumbnails=tiles(48))
    found = search(path, find="labels", n_neighbors=6)
    suspects = [row["row"] for row in found.tables["labels"] if row["suspect"]]
    assert set(suspects) == {3, 10, 32}
    order, _ = nearest_of_each(x, 6)
    (sheet,) = [file for file in found.paths if file.suffix == ".png"]
    for line, i in enumerate(suspects):
        assert colors_across(sheet, line, 3) == [i, *order[i].tolist()]
    found = search(path, query=20, n_neighbors=4)
    (sheet,) = [file for file in found.paths if file.suffix == ".png"]
    assert colors_across(sheet, 0, 1) == [20, *order[20, :4].tolist()]
    found = search(path, find="labels", n_neighbors=6, sheet=1)
    (sheet,) = [file for file in found.paths if file.suffix == ".png"]
    assert colors_across(sheet, 0, 1) == [suspects[0], *order[suspects[0]].tolist()]


def test_without_pictures_there_are_tables_alone_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x, labels = clusters(40, flipped=(3, 10))
    found = search(embeddings_file(tmp_path, x, labels=labels))
    assert {file.suffix for file in found.paths} == {".json", ".csv"}
    assert "no pictures are stored in the file, so there is no sheet of them" in said(caplog)


def test_sheets_need_matplotlib_and_tables_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = embeddings_file(tmp_path, rows(20), thumbnails=tiles(20))
    with pytest.raises(DependencyError, match=r"sheet=0 leaves it out.*matplotlib.*\[viz\]"):
        search(path)
    assert not (tmp_path / "neighbors").exists()
    assert {file.suffix for file in search(path, sheet=0).paths} == {".json", ".csv"}


# --------------------------------------------------------------------------- the command line


@pytest.fixture
def tiny(embedx_here: Here, photos: Path) -> Here:
    """A run over twelve photos by a random network."""
    words = (*TINY, "data=folder", "data.root=photos", "name=tiny")
    assert embedx_here("extract", *words)[0] == 0
    return embedx_here


def test_a_picture_goes_through_the_model_that_made_the_file(
    tiny: Here, tmp_path: Path, photos: Path
) -> None:
    shutil.copy(photos / "cat" / "03.jpg", tmp_path / "new, one.jpg")
    asked = "query='new, one.jpg'"
    status, out, err = tiny("neighbors", asked, "n_neighbors=3")
    assert status == 0
    assert err == []
    (document,) = (tmp_path / "outputs" / "tiny" / "neighbors").glob("query-new__one-*.json")
    table = json.loads(document.read_text())["table"]
    assert (table[0]["query"], table[0]["id"]) == ("new, one.jpg", "cat/03.jpg")
    assert table[0]["distance"] < 1e-5 < table[1]["distance"]
    assert document.with_suffix(".png").exists()
    assert not any("/tmp/embedx-" in line for line in out)
    assert any("RANDOM weights" in line for line in out)
    # By its id it is a row, which does not find itself.
    assert tiny("neighbors", "query=cat/03.jpg", "n_neighbors=3")[0] == 0
    (document,) = (tmp_path / "outputs" / "tiny" / "neighbors").glob("query-03-*.json")
    assert "cat/03.jpg" not in [row["id"] for row in json.loads(document.read_text())["table"]]


def test_no_picture_and_changed_weights_are_one_line(tiny: Here, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no picture")
    status, _, err = tiny("neighbors", "query=text.jpg")
    assert (status, len(err)) == (1, 1)
    assert err[0].startswith("DataError: query=text.jpg cannot be read as a picture: not a ")
    beside = tmp_path / "outputs" / "tiny" / "config.yaml"
    beside.write_text(beside.read_text().replace("seed: 0", "seed: 1"))
    Image.new("RGB", (40, 40)).save(tmp_path / "new.png")
    status, _, err = tiny("neighbors", "query=new.png", "n_neighbors=2")
    assert status == 1
    assert err[-1].startswith("StoreError: query=")
    assert "weights_sha256 is random, seed 1, " in err[-1]
    assert "random, seed 0, " in err[-1]


@pytest.mark.parametrize(
    "target", ["mine.make", "embedx.derived.remove_export", "embedx.models.Model", 3, None]
)
def test_code_that_a_file_names_is_not_run(target: Any, tiny: Here, tmp_path: Path) -> None:
    import yaml

    (tmp_path / "mine.py").write_text("open('run', 'w').write('')\ndef make(): return 1\n")
    beside = tmp_path / "outputs" / "tiny" / "config.yaml"
    settings = yaml.safe_load(beside.read_text())
    settings["model"]["_target_"] = target
    beside.write_text(yaml.safe_dump(settings))
    Image.new("RGB", (40, 40)).save(tmp_path / "new.png")
    status, _, err = tiny("neighbors", "query=new.png")
    assert (status, len(err)) == (1, 1)
    assert err[0].startswith("ConfigError: query=new.png is not run through the model of outputs/")
    assert err[0].endswith(
        "extract it by your own command with another name, then query=outputs/NAME"
    )
    assert ("mine.make" in err[0]) == (target == "mine.make")
    assert not (tmp_path / "run").exists()


def test_a_number_that_is_an_id_stays_a_text(embedx_here: Here, tmp_path: Path) -> None:
    ids = ["1.10", "1_000", "007", *map(str, range(20, 29))]
    embeddings_file(tmp_path / "run", rows(12), ids=ids)
    for name in ids[:4]:
        assert embedx_here("neighbors", "embeddings=run", f"query={name}")[0] == 0
    found = {
        json.loads(file.read_text())["query"] for file in (tmp_path / "run").rglob("query-*.json")
    }
    assert found == {"row 0, 1.10", "row 1, 1_000", "row 2, 007", "row 3, 20"}


# --------------------------------------------------------------------------- a dirty folder


@pytest.mark.slow
def test_what_was_planted_in_a_folder_of_digits_is_found(embedx_here: Here, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    from sklearn.datasets import load_digits

    digits = load_digits()
    rng = np.random.default_rng(0)
    root = tmp_path / "dirty"

    def picture(i: int) -> Image.Image:
        grey = Image.fromarray((digits.images[i] * 15.9375).astype(np.uint8))
        return grey.resize((64, 64), Image.Resampling.BICUBIC)

    n = 400
    flipped = range(0, 100, 12)
    for i in range(n):
        label = (digits.target[i] + 3 * (i in flipped)) % 10
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        picture(i).save(root / str(label) / f"{i:04d}.png")
    copied, encoded = range(101, 151, 10), range(201, 251, 10)
    for i in copied:
        path = root / str(digits.target[i]) / f"{i:04d}.png"
        shutil.copy(path, path.with_name(f"copy-{path.name}"))
    for i in encoded:
        path = root / str(digits.target[i]) / f"{i:04d}-again.jpg"
        picture(i).save(path, quality=92)
    for i in range(2):
        noise = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / str(i) / "noise.png")
    words = ("model=efficientnet_lite0", "model.input_size=96", "data=folder", "data.root=dirty")
    assert embedx_here("extract", *words, "name=dirty")[0] == 0
    status, out, err = embedx_here("neighbors")
    assert (status, err) == (0, [])
    folder = tmp_path / "outputs" / "dirty" / "neighbors"

    def table(name: str) -> list[dict[str, Any]]:
        found = json.loads((folder / f"{name}.json").read_text())["table"]
        assert isinstance(found, list)
        return found

    pairs: dict[int, set[str]] = {}
    for row in table("duplicates"):
        pairs.setdefault(row["group"], set()).add(Path(row["id"]).stem)
    planted = [{f"{i:04d}", f"copy-{i:04d}"} for i in copied]
    again = [{f"{i:04d}", f"{i:04d}-again"} for i in encoded]
    groups = list(pairs.values())
    assert all(pair in groups for pair in planted)
    assert sum(pair in groups for pair in again) >= 4
    assert all(pair in [*planted, *again] for pair in groups)
    odd = [row["id"] for row in table("outliers") if row["suspect"]]
    assert {"0/noise.png", "1/noise.png"} == set(odd[:2])
    assert len(odd) <= 4
    doubted = [int(Path(row["id"]).stem[:4]) for row in table("labels") if row["suspect"]]
    found = set(doubted) & set(flipped)
    assert len(found) >= 6
    assert len(set(doubted) - found) <= 6
    assert {"duplicates.png", "outliers.png", "labels.png"} <= {p.name for p in folder.iterdir()}


def test_a_negative_row_number_is_no_row(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, np.random.default_rng(0).normal(size=(20, 3)))
    with pytest.raises((DataError, ConfigError)) as caught:
        search(path, query=-1)
    assert "-1" in str(caught.value)
