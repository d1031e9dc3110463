"""The report: what the file holds, and what a person sees of it in a browser."""

import base64
import csv
import gzip
import hashlib
import html.parser
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedx import derived, report, store, unfinished
from embedx.errors import ConfigError, DataError, StoreError
from embedx.export import export
from embedx.figures import PALETTE
from embedx.panels import flat
from embedx.view import view
from tests.conftest import embeddings_file, projection_file

pytest.importorskip("matplotlib")

Array = np.ndarray[Any, Any]
HOSTILE = "</script><img src=x onerror=window.wrong=1>"


def make_run(folder: Path, *, n: int = 60, labels: Any = None, **options: Any) -> Path:
    """A run of n rows in three clusters, with maps of two and three dimensions."""
    rng = np.random.default_rng(0)
    classes = np.arange(n) % 3
    x = rng.normal(size=(3, 8))[classes] * 4 + rng.normal(size=(n, 8))
    path = embeddings_file(
        folder, x, labels=classes.tolist() if labels is None else labels, **options
    )
    flat = rng.normal(size=(n, 2)) + np.stack([classes * 9, (classes == 1) * 7], axis=1)
    failed = list(options.get("failed", ()))
    for name, coords in (
        ("tsne-1a2b3c", flat * [3, 1] + [500, -20]),
        ("umap-2a3b4c", flat[:, ::-1]),
        ("pca-3a4b5c", np.hstack([flat, rng.normal(size=(n, 1))])),
    ):
        placed = coords.copy()
        placed[failed] = np.nan
        projection_file(path, name, placed, trustworthiness=0.9, metric="euclidean")
    return path


def tiles(n: int) -> Array:
    """A thumbnail of one colour for each row, each another."""
    wheel = np.stack([37 * np.arange(n), 91 * np.arange(n) + 60, 149 * np.arange(n)], axis=1)
    return np.broadcast_to((wheel % 200 + 20).astype(np.uint8)[:, None, None], (n, 16, 16, 3))


def written(path: Path, **options: Any) -> str:
    assert view(path, viewer="report", **options) is None
    return (path.parent / "report.html").read_text("utf-8")


def held(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    assert found is not None
    made: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return made


def texts_of(column: dict[str, Any]) -> list[str]:
    """What the page shows of each row."""
    if "codes" not in column:
        return list(column["values"])
    codes = np.frombuffer(base64.b64decode(column["codes"]), "<i4")
    return ["" if code < 0 else column["values"][code] for code in codes]


def odd_columns(n: int) -> dict[str, Any]:
    """Columns called as what a page has already, and numbers that are easily told wrong."""
    return {
        "label": [f"meta {i % 2}" for i in range(n)],
        "id": [f"other id {i}" for i in range(n)],
        "embedx_row": np.arange(n)[::-1].copy(),
        "neighborhood": np.arange(n) + 500.5,
        "delta": np.arange(n) % 3 - 1,
        "pixel": np.arange(n) + 2**53 + 1,
        "third": (np.arange(n) / 29).astype(np.float32),
        "half": (np.arange(n) / 7).astype(np.float16),
        "zero": np.where(np.arange(n) % 2, -0.0, 0.0),
        "far": np.where(np.arange(n) % 4, np.arange(n) * 1.0, -np.inf),
        "edge": np.array([1.5, np.inf, np.nan])[np.arange(n) % 3],
        "flag": np.arange(n) % 2 == 0,
        "=1+1": ["-2+3"] * n,
    }


def floats(text: str) -> Array:
    return np.frombuffer(base64.b64decode(text), "<f4")


def test_a_report_holds_each_row_its_places_and_its_nearest_rows(tmp_path: Path) -> None:
    path = make_run(
        tmp_path,
        metadata={"size": np.arange(60) * 0.5, "note": [f"note {i}" for i in range(60)]},
        failed=(7, 21),
    )
    page = written(path)
    data, opened = held(page), store.open(path)
    rows = np.flatnonzero(opened.ok)
    assert data["ids"] == [opened.ids[i] for i in rows]
    assert len(rows) == 58
    for shown in data["maps"]:
        projection = derived.projections_of(opened, [shown["name"]])[0]
        coords = floats(shown["coords"]).reshape(-1, shown["dims"])
        assert np.array_equal(coords, projection.coords[rows])
    columns = {column["name"]: column for column in data["columns"]}
    assert columns["size"]["values"] == [str(i * 0.5) for i in rows]
    assert np.frombuffer(base64.b64decode(data["rows"]), "<i4").tolist() == rows.tolist()
    assert columns["note"]["values"] == [f"note {i}" for i in rows]
    label = columns["label"]
    codes = np.frombuffer(base64.b64decode(label["codes"]), "<i4")
    assert [label["values"][code] for code in codes] == [f"class {i % 3}" for i in rows]
    (graph,) = data["graphs"]
    x = opened.embeddings["avgpool"][rows].astype(float)
    distances = np.linalg.norm(x[:, None] - x[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    nearest = np.argsort(distances, axis=1)[:, : graph["k"]]
    found = np.frombuffer(base64.b64decode(graph["indices"]), "<i4").reshape(58, -1)
    assert np.array_equal(found, nearest)
    np.testing.assert_allclose(
        floats(graph["distances"]).reshape(58, -1),
        np.take_along_axis(distances, nearest, axis=1),
        rtol=1e-4,
    )
    assert data["n_failed"] == 2
    assert "2 rows failed and are left out" in data["left_out"]


def test_thumbnails_lie_on_the_sheets_where_the_page_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SHEET_ACROSS", 5)
    page = written(make_run(tmp_path, thumbnails=tiles(60), failed=(7,)))
    layout = held(page)["thumbnails"]
    sheets = re.findall(r'<script type="text/plain" id="sheet-\d+">([^<]*)</script>', page)
    pictures = [Image.open(io.BytesIO(base64.b64decode(sheet))).convert("RGB") for sheet in sheets]
    assert [p.height // layout["tile"] for p in pictures] == layout["rows"] == [5, 5, 2]
    colors = tiles(60)[[i for i in range(60) if i != 7], 0, 0]
    for i, color in enumerate(colors):
        sheet, k = divmod(i, 25)
        y, x = (np.array(divmod(k, 5)) + 0.5) * layout["tile"]
        assert np.abs(np.array(pictures[sheet].getpixel((int(x), int(y)))) - color).max() < 12


def test_pictures_are_made_small_enough_for_a_file_one_can_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (90, 48, 48, 3), dtype=np.uint8)
    monkeypatch.setattr(report, "PICTURES_BYTES_MOST", 30_000)
    with caplog.at_level("INFO", logger="embedx"):
        page = written(make_run(tmp_path, n=90, thumbnails=noise))
    assert re.search(r"pictures of the report are \d+ px, of the 48 px", caplog.text)
    sheets = re.findall(r'id="sheet-\d+">([^<]*)</script>', page)
    assert 0 < sum(len(base64.b64decode(sheet)) for sheet in sheets) <= 30_000


def test_the_page_runs_its_own_script_and_loads_nothing(tmp_path: Path) -> None:
    page = written(make_run(tmp_path, model=HOSTILE, data='"><b>'))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    rules = dict(rule.split(" ", maxsplit=1) for rule in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert "<img" not in markup
    assert "<b>" not in markup
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", markup)
    assert "&lt;/script&gt;" in markup


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    path = make_run(tmp_path, thumbnails=tiles(60))
    assert written(path) == written(path)


def test_a_column_is_classes_numbers_or_text_as_it_comes(tmp_path: Path) -> None:
    n = 60
    path = make_run(
        tmp_path,
        labels=[""] * 10 + [HOSTILE] * 50,
        metadata={
            "fold": np.arange(n) % 4,
            "loss": np.where(np.arange(n) % 5, np.arange(n) / 7, np.nan),
            "camera": [("left", "", "right 10", "right 2")[i % 4] for i in range(n)],
        },
    )
    columns = {column["name"]: column for column in held(written(path))["columns"]}
    assert {name: column["kind"] for name, column in columns.items()} == {
        "label": "class",
        "fold": "class",
        "loss": "number",
        "camera": "class",
    }
    assert columns["camera"]["values"] == ["left", "right 2", "right 10"]
    assert columns["fold"]["values"] == ["0", "1", "2", "3"]
    assert columns["loss"]["values"][:3] == ["", str(1 / 7), str(2 / 7)]
    codes = np.frombuffer(base64.b64decode(columns["label"]["codes"]), "<i4")
    assert codes.tolist() == [-1] * 10 + [0] * 50


def test_more_rows_than_a_page_bears_are_a_sample_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "ROWS_MOST", 30)
    data = held(written(make_run(tmp_path)))
    assert len(data["ids"]) == 30
    assert "at most 30 rows: taking a sample of 60, stratified by label" in data["left_out"][0]
    graph = data["graphs"][0]
    assert np.frombuffer(base64.b64decode(graph["indices"]), "<i4").max() < 30


def test_a_report_of_one_row_and_of_no_labels_is_a_report(tmp_path: Path) -> None:
    for n in (1, 2):
        path = embeddings_file(tmp_path / str(n), np.ones((n, 4)))
        projection_file(path, "pca-0a1b2c", np.zeros((n, 2)), metric="euclidean")
        data = held(written(path))
        assert len(data["ids"]) == n
        assert data["columns"] == []


def test_what_cannot_be_reported_is_one_line(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    with pytest.raises(ConfigError, match="color='nothing'"):
        written(path, color="nothing")
    assert not (tmp_path / "report.html").exists()
    alone = embeddings_file(tmp_path / "alone", np.ones((3, 2)))
    with pytest.raises(DataError, match="no projection yet"):
        written(alone)


def test_columns_called_as_what_the_page_has_get_another_name_and_replace_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    n = 60
    path = make_run(tmp_path, metadata=odd_columns(n))
    with caplog.at_level("INFO", logger="embedx"):
        data = held(written(path))
    columns = data["columns"]
    assert data["label"] == 0
    assert texts_of(columns[0]) == [f"class {i % 3}" for i in range(n)]
    names = [column["name"] for column in columns]
    assert len({name.casefold() for name in names}) == len(names) == 14
    for name in ("label", "id", "embedx_row"):
        assert f"the column {name!r} is called '{name}_': another one has that name" in caplog.text
    by_name = dict(zip(names, columns, strict=True))
    assert texts_of(by_name["label_"]) == [f"meta {i % 2}" for i in range(n)]
    assert texts_of(by_name["id_"]) == [f"other id {i}" for i in range(n)]
    assert texts_of(by_name["embedx_row_"]) == [str(n - 1 - i) for i in range(n)]
    assert data["color"] == "0"
    for name in ("neighborhood", "delta"):
        shown = held(written(path, color=name))
        assert shown["columns"][int(shown["color"])]["name"] == name


def test_numbers_are_shown_in_the_digits_that_the_table_has(tmp_path: Path) -> None:
    path = make_run(tmp_path, metadata=odd_columns(60), failed=(7,))
    columns = {column["name"]: column for column in held(written(path))["columns"]}
    export(path, exporter="table")
    with (tmp_path / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 59
    numbers = [name for name, column in columns.items() if column["is_number"]]
    assert sorted(numbers) == sorted(
        ["embedx_row_", "neighborhood", "delta", "pixel", "third", "half", "zero", "far", "edge"]
    )
    for name in numbers:
        assert texts_of(columns[name]) == [row[name] for row in table]
    assert texts_of(columns["pixel"])[:2] == ["9007199254740993", "9007199254740994"]
    assert texts_of(columns["flag"]) == [row["flag"] for row in table]
    assert set(texts_of(columns["flag"])) == {"true", "false"}
    assert texts_of(columns["third"])[1] == "0.03448276"
    assert set(texts_of(columns["zero"])) == {"0.0", "-0.0"}
    assert columns["edge"]["values"] == ["1.5", "inf"]
    assert columns["far"]["kind"] == "number"
    ends = [texts_of(columns["pixel"])[0], texts_of(columns["pixel"])[-1]]
    assert columns["pixel"]["ends"] == ends == ["9007199254740993", "9007199254741052"]
    assert "-inf" in texts_of(columns["far"])


def test_whatever_a_file_says_of_itself_is_text_in_the_page(tmp_path: Path) -> None:
    class Tags(html.parser.HTMLParser):
        def __init__(self, page: str) -> None:
            super().__init__()
            self.seen: list[Any] = []
            self.feed(page)

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            named = {key for key, _ in attrs}
            self.seen.append((tag, sorted(named)))

    hostile = '1"><meta http-equiv="refresh" content="0;url=data:,x"><b>'
    plain = Tags(written(make_run(tmp_path / "plain")))
    about = dict.fromkeys(("model", "data", "embedx", "weights", "license"), hostile)
    for number, bad in enumerate((hostile, "random " + HOSTILE)):
        told = {**about, "weights": bad}
        page = written(make_run(tmp_path / str(number), **told, metadata={hostile: ["x"] * 60}))
        assert Tags(page).seen == plain.seen
    assert len(plain.seen) > 50


def test_what_a_report_cannot_be_coloured_by_is_refused_as_for_pictures(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    for viewer in ("map", "report"):
        with pytest.raises(DataError, match="pca-3a4b5c.h5 has no score of each row; make it"):
            view(path, viewer=viewer, color="neighborhood")  # type: ignore[arg-type]  # of two
    assert not list(tmp_path.glob("*.html"))


def test_a_text_column_of_many_values_is_coloured_where_it_is_asked_for(tmp_path: Path) -> None:
    path = make_run(tmp_path, metadata={"note": [f"note {i}" for i in range(60)]})
    assert held(written(path))["columns"][1]["kind"] == "text"
    shown = held(written(path, color="note"))
    assert shown["color"] == "1"
    assert shown["columns"][1]["kind"] == "class"
    assert held(written(path, color="none"))["color"] == ""


def test_maps_of_any_number_of_dimensions_lie_as_in_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = embeddings_file(tmp_path, rng.normal(size=(40, 8)), failed=(3,))
    placed = {m: rng.normal(size=(40, m)).astype(np.float32) for m in (1, 2, 3, 5)}
    for m, coords in placed.items():
        coords[3] = np.nan
        projection_file(path, f"pca-{m}", coords, metric="euclidean")
    rows = np.delete(np.arange(40), 3)
    maps = {one["name"]: one for one in held(written(path))["maps"]}
    assert len(maps) == 4
    for m, coords in placed.items():
        shown = maps[f"pca-{m}"]
        assert shown["dims"] == (3 if m == 3 else 2)
        wanted = coords if m == 3 else flat(coords)
        found = floats(shown["coords"]).reshape(39, -1)
        assert np.array_equal(found, wanted[rows].astype(np.float32))
        assert np.array_equal(found[:, 0], coords[rows, 0])
    assert np.ptp(floats(maps["pca-1"]["coords"]).reshape(39, 2)[:, 1]) > 0.1
    assert maps["pca-5"]["note"] == "the first two of 5 dimensions"
    assert maps["pca-2"]["note"] == ""


def test_a_file_that_is_replaced_meanwhile_is_reported_as_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_run(tmp_path / "old", model="before")
    new = make_run(tmp_path / "new", n=300, model="after")
    rows_to_show = report.rows_to_show

    def replaced(*arguments: Any, **options: Any) -> Any:
        os.replace(new, old)
        return rows_to_show(*arguments, **options)

    monkeypatch.setattr(report, "rows_to_show", replaced)
    before = old.stat().st_size
    with pytest.raises(StoreError, match="make again what was just written"):
        view(old, viewer="report")
    page = old.with_name("report.html").read_text("utf-8")
    settings = {key: value for of, key, value in held(page)["settings"] if of[0] == "e"}
    assert settings["model"] == "before"
    assert settings["rows"] == "60"
    assert settings["size_mb"] == str(round(before / 1e6, 1))
    assert store.open(old).attrs["model"] == "after"


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("ValueError: cannot decode /home/al/secret/7.jpg", "ValueError: cannot decode .../7.jpg"),
        ("no '/home/al ice/my nice pics/x.jpg' there", "no '.../x.jpg' there"),
        ('"/home/al\'s/x.jpg" is bad', '".../x.jpg" is bad'),
        ("/home/al/my pics/x.jpg not found", ".../x.jpg not found"),
        ("/a/b, /c/d and (/e/f)", ".../b, .../d and (.../f)"),
        ("error:/home/al/x.jpg: short", "error:.../x.jpg: short"),
        ("file:///home/al/x.png, ~/x/y and ~al/z/", ".../x.png, .../y and .../z"),
        (r"C:\Users\al\x.jpg, D:/pics/y.jpg", ".../x.jpg, .../y.jpg"),
        (r"'C:\\Users\\al\\x y.jpg' and \\nas\share\z.jpg", "'.../x y.jpg' and .../z.jpg"),
        ("layer4/x, photos/cat/1.jpg, ../z", "layer4/x, photos/cat/1.jpg, ../z"),
        ("https://host/a/b s3://bucket/c image/png 3/4 a / b", None),
    ],
)
def test_an_absolute_path_in_a_reason_keeps_its_last_part(told: str, shown: str | None) -> None:
    assert report.without_folders(told) == (told if shown is None else shown)


def test_reasons_in_a_report_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    path = make_run(tmp_path, failed=(7,))
    reason = {"row": 7, "id": "row-0007", "reason": "ValueError: cannot read /home/alice/x/7.jpg"}
    unfinished.errors_path(path).write_text(json.dumps(reason) + "\n")
    assert held(written(path))["failed"] == [["row-0007", "ValueError: cannot read .../7.jpg"]]


def test_numbers_begin_on_dark_ground_where_they_can_be_told_from_it(tmp_path: Path) -> None:
    from matplotlib import colormaps

    light, dark = held(written(make_run(tmp_path)))["ramps"]
    for ramp, darkest in ((light, 0.0), (dark, 0.25)):
        ends = colormaps["cividis"]([darkest, 1.0], bytes=True)[:, :3]
        assert [ramp[0], ramp[-1]] == [f"#{bytes(end).hex()}" for end in ends]


# --------------------------------------------------------------------------- in a browser


class Page:
    """A report in a browser."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get_log("browser")
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [still]})
        driver.get(path.resolve().as_uri())
        self.until("window.report?.plot")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30, poll_frequency=0.05).until(
            lambda _: self.run(f"return Boolean({condition})")
        )

    def show(self, name: str) -> None:
        self.run("document.querySelector(`#maps input[value='${arguments[0]}']`).click()", name)

    def still(self) -> None:
        """Wait until what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; setTimeout(() => "
            "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100))), 300)"
        )

    def pixels(self) -> tuple[Array, Array]:
        """The screen ``(h, w, 3)``, and where each row is on it, ``(n, 2)``."""
        self.still()
        png = self.driver.get_screenshot_as_png()
        screen = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
        at = self.run(
            "const box = document.getElementById('map').getBoundingClientRect();"
            "return report.data.ids.map((_, i) => report.screen(i))"
            ".map(([x, y]) => [x + box.left, y + box.top])"
        )
        return screen, np.array(at)

    def errors(self) -> list[str]:
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def page(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("report")
    labels = [("cat", "dog", HOSTILE)[i % 3] for i in range(60)]
    path = make_run(
        folder,
        labels=labels,
        thumbnails=tiles(60),
        metadata={"size": np.arange(60) * 0.5, "note": ["=1+1,\n", '"x"', "ok", "fine"] * 15},
        failed=(7,),
    )
    view(path, viewer="report")
    return Page(driver, folder / "report.html")


@pytest.mark.browser
def test_every_point_is_drawn_in_the_colour_of_its_class(page: Page) -> None:
    from matplotlib.colors import to_rgb

    page.run("document.getElementById('names').click()")  # they hide points
    for name in ("tsne-1a2b3c", "umap-2a3b4c"):
        page.show(name)
        screen, at = page.pixels()
        found = screen[at[:, 1].round().astype(int), at[:, 0].round().astype(int)]
        label = page.run("const c = report.data.columns[0]; return [...c.codes]")
        wanted = np.array([to_rgb(PALETTE[code]) for code in label]) * 255
        # Points are a little transparent, on white.
        assert (np.abs(found - wanted).max(axis=1) < 60).mean() > 0.9
    assert page.errors() == []


RIGHT_TO_LEFT = "\u05e9\u05dc\u05d5\u05dd, 42 items"


def text_run(folder: Path) -> Path:
    """A run over texts: long ones, markup, one from right to left."""
    texts = [f"sentence number {i} " + "and so on " * (i % 2) for i in range(60)]
    texts[3], texts[4], texts[5] = HOSTILE, RIGHT_TO_LEFT, "very long " * 100
    n_tokens = np.arange(60, dtype=np.int32) + 3
    return make_run(folder, metadata={"size": n_tokens * 0.5, "text": texts})


@pytest.mark.browser
def test_nothing_from_the_data_became_an_element_of_the_page(page: Page) -> None:
    assert page.run("return window.wrong") is None
    assert page.run("return document.querySelectorAll('img').length") == 0
    assert HOSTILE in page.run("return document.getElementById('legend').textContent")


@pytest.mark.browser
def test_a_chosen_point_shows_its_picture_its_columns_and_its_nearest(page: Page) -> None:
    page.run("report.choose(10)")
    text = page.run("return document.getElementById('chosen').innerText")
    assert "row-0011" in text  # row 7 failed and is not there
    assert "5.5" in text
    near = page.run("return [...document.querySelectorAll('#near .name')].map((e) => e.title)")
    wanted = page.run(
        "const g = report.data.graphs[0];"
        "return [...g.indices.slice(10 * g.k, 11 * g.k)].map((i) => report.data.ids[i])"
    )
    assert near == wanted
    assert len(near) == 8
    page.still()
    box = page.run(
        "const b = document.querySelector('#chosen .picture').getBoundingClientRect();"
        "return [b.left + b.width / 2, b.top + b.height / 2]"
    )
    screen, _ = page.pixels()
    seen = screen[int(box[1]), int(box[0])]
    assert np.abs(seen - tiles(60)[11, 0, 0]).max() < 12
    page.run("document.querySelector('#near button').click()")
    assert page.run("return report.data.ids[report.state.chosen]") == wanted[0]
    page.run("report.choose(-1)")


@pytest.mark.browser
def test_the_mouse_over_a_point_shows_whose_it_is(page: Page) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page.show("tsne-1a2b3c")
    page.still()
    _, at = page.pixels()
    far = np.linalg.norm(at[:, None] - at[None], axis=2) + np.eye(59) * 1e9
    alone = int(far.min(axis=1).argmax())
    element = page.driver.find_element("id", "map")
    box = element.rect
    x, y = at[alone] - [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
    ActionChains(page.driver).move_to_element_with_offset(element, int(x), int(y)).perform()
    page.until("!document.getElementById('tip').hidden")
    tip = page.run("return document.getElementById('tip').innerText")
    assert page.run("return report.data.ids[arguments[0]]", alone) in tip


@pytest.mark.browser
def test_a_lasso_selects_what_it_encloses_and_the_table_copies_it(page: Page) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page.show("umap-2a3b4c")
    page.still()
    _, at = page.pixels()
    middle = np.median(at[:, 0])
    element = page.driver.find_element("id", "map")
    box = element.rect
    page.driver.find_element("id", "tool-lasso").click()
    left, top = box["x"] + 3, box["y"] + 3
    corners = [
        (left, top),
        (middle, top),
        (middle, top + box["height"] - 6),
        (left, top + box["height"] - 6),
    ]
    center = np.array([box["x"] + box["width"] / 2, box["y"] + box["height"] / 2])
    pointer = ActionChains(page.driver)
    for number, corner in enumerate(corners):
        x, y = (np.array(corner) - center).astype(int).tolist()
        pointer.move_to_element_with_offset(element, x, y)
        if number == 0:
            pointer.click_and_hold()
    pointer.release().perform()
    selected = set(page.run("return [...report.state.selected]"))
    inside = set(np.flatnonzero(at[:, 0] < int(middle - center[0]) + center[0]).tolist())
    assert 20 < len(selected) < 40
    assert len(selected ^ inside) <= 1  # a point on the line itself
    rows = page.run("return document.querySelectorAll('#table tbody tr').length")
    assert rows == len(selected)
    csv = page.run("return report.csv()")
    assert csv.count("\r\n") == len(selected) + 1
    assert csv.splitlines()[0] == "embedx_row,id,label,note,size"
    assert "'=1+1" in csv
    assert '"""x"""' in csv
    page.driver.find_element("id", "clear").click()
    assert page.run("return report.state.selected.size") == 0


@pytest.mark.browser
def test_search_and_legend_leave_what_was_asked_for(page: Page) -> None:
    field = page.driver.find_element("id", "search")
    field.send_keys("row-001")
    page.until("document.getElementById('found').textContent === '10 found'")
    page.driver.find_element("id", "select-found").click()
    assert page.run("return report.state.selected.size") == 10
    page.run("report.select([])")
    button = page.run(
        "return [...document.querySelectorAll('#legend button')]"
        ".find((b) => b.textContent.startsWith('cat'))"
    )
    before, at = page.pixels()
    button.click()
    after, _ = page.pixels()
    is_cat = np.array(page.run("const c = report.data.columns[0]; return [...c.codes]")) == 1
    names = page.run("return report.data.columns[0].values")
    assert names[1] == "cat"
    x, y = at.round().astype(int).T
    gone = (np.abs(after[y, x] - 255).max(axis=1) < 10) & (
        np.abs(before[y, x] - 255).max(axis=1) > 30
    )
    assert gone[is_cat].mean() > 0.7
    assert gone[~is_cat].mean() < 0.05
    button.click()
    assert button.get_attribute("aria-pressed") == "true"


@pytest.mark.browser
def test_the_keyboard_alone_walks_the_map(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.run("report.choose(-1); document.getElementById('fit').click()")
    stage = page.driver.find_element("id", "map")
    before = page.run("return {...report.plot.view}")
    stage.send_keys(Keys.ARROW_RIGHT, "+", "+")
    after = page.run("return {...report.plot.view}")
    assert after["x"] > before["x"]
    assert after["zoom"] == pytest.approx(before["zoom"] + 1)
    stage.send_keys("0", Keys.ENTER)
    first = page.run("return report.state.chosen")
    assert first >= 0
    said = page.run("return document.getElementById('say').textContent")
    assert page.run("return report.data.ids[arguments[0]]", first) in said
    stage.send_keys(Keys.ENTER)
    second = page.run("return report.state.chosen")
    graph = "const g = report.data.graphs[0]; "
    assert second == page.run(graph + "return g.indices[arguments[0] * g.k]", first)
    stage.send_keys(Keys.ESCAPE)
    assert page.run("return report.state.chosen") == -1


@pytest.mark.browser
def test_a_map_of_three_dimensions_is_drawn_and_turned(page: Page) -> None:
    page.show("pca-3a4b5c")
    screen, at = page.pixels()
    found = screen[at[:, 1].round().astype(int), at[:, 0].round().astype(int)]
    assert (np.abs(found - 255).max(axis=1) > 30).mean() > 0.9
    from selenium.webdriver.common.keys import Keys

    page.driver.find_element("id", "map").send_keys(Keys.ARROW_LEFT)
    _, turned = page.pixels()
    assert np.abs(turned - at).max() > 2
    page.show("tsne-1a2b3c")
    assert page.errors() == []


@pytest.mark.browser
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        page.until("innerWidth === 390 && report.plot.canvas.width === report.plot.size[0]")
        page.still()
        wide, map_px = page.run(
            "return [document.documentElement.scrollWidth, "
            "document.getElementById('map').getBoundingClientRect().width]"
        )
        assert wide <= 390
        assert map_px > 350
        screen, at = page.pixels()
        x, y = at.round().astype(int).T
        inside = (x > 0) & (x < 390) & (y > 0) & (y < 844)
        assert inside.mean() > 0.95
        assert (np.abs(screen[y[inside], x[inside]] - 255).max(axis=1) > 30).mean() > 0.9
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# --------------------------------------------------------------------------- another page


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of many classes of one tight cluster, with a table and odd columns."""
    folder, n = tmp_path_factory.mktemp("odd"), 120
    rng = np.random.default_rng(0)
    classes = np.arange(n) % 12
    path = embeddings_file(
        folder,
        rng.normal(size=(n, 8)),
        labels=["" if k == 11 else f"a class with a name {k}" for k in classes],
        metadata={
            **odd_columns(n),
            "a name of a column that is much longer than any of the values in it": np.arange(n),
        },
        thumbnails=tiles(n),
    )
    scores = dict.fromkeys(("continuity", "distance_correlation", "knn_recall_15", "stress"), 0.5)
    for number, name in enumerate(("umap-1a2b3c", "pca-2a3b4c")):
        projection_file(
            path,
            name,
            rng.normal(size=(n, 2)),
            row_scores={"neighborhood": rng.random(n).astype(np.float32) * (0.9 - number / 2)},
            trustworthiness=0.9 - number / 10,
            metric="euclidean",
            **scores,
        )
    view(path, viewer="report")
    export(path, exporter="table")
    return folder


@pytest.fixture
def odd(driver: Any, odd_run: Path) -> Iterator[Page]:
    before = driver.current_window_handle
    driver.switch_to.new_window("tab")
    try:
        yield Page(driver, odd_run / "report.html")
    finally:
        driver.close()
        driver.switch_to.window(before)


def press(page: Page, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    for key in keys:
        ActionChains(page.driver).send_keys(key).perform()


def focus(page: Page, selector: str) -> None:
    page.run("document.querySelector(arguments[0]).focus()", selector)


def focused(page: Page, selector: str) -> bool:
    return bool(page.run("return document.activeElement.matches(arguments[0])", selector))


@pytest.mark.browser
def test_what_is_saved_of_a_selection_is_what_the_table_has(odd: Page, odd_run: Path) -> None:
    odd.run("report.select([0, 1, 11, 119])")
    saved = list(csv.DictReader(io.StringIO(odd.run("return report.csv()"), newline="")))
    with (odd_run / "table.csv").open(newline="") as file:
        every = list(csv.DictReader(file))
    table = [every[row] for row in (0, 1, 11, 119)]
    assert len(saved) == len(table) == 4
    for ours, theirs in zip(saved, table, strict=True):
        assert ours == {name: theirs[name] for name in ours}
    assert {"embedx_row", "id", "label", "label_", "delta", "'=1+1"} <= saved[0].keys()
    assert [row["delta"] for row in saved] == ["-1", "0", "1", "1"]
    odd.run("document.execCommand = () => { window.copied = document.activeElement.value; }")
    odd.run(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
        "document.getElementById('copy-table').click()"
    )
    odd.until("window.copied")
    copied = [line.split("\t") for line in odd.run("return window.copied").split("\n")]
    assert [dict(zip(copied[0], line, strict=True)) for line in copied[1:]] == saved


@pytest.mark.browser
def test_the_score_of_a_map_and_a_column_of_its_name_are_two_and_one_scale_is_for_all(
    odd: Page,
) -> None:
    options = odd.run(
        "return [...document.getElementById('color').options].map((o) => [o.value, o.textContent])"
    )
    names = [name for _, name in options]
    assert names.count("neighborhood") == names.count("near rows kept") == 1
    assert len({value for value, _ in options}) == len(options)
    for name, ends in (("neighborhood", "500.5619.5"), ("near rows kept", "01")):
        value = options[names.index(name)][0]
        odd.run(
            "const select = document.getElementById('color'); select.value = arguments[0];"
            "select.dispatchEvent(new Event('change'))",
            value,
        )
        for map_name in ("pca-2a3b4c", "umap-1a2b3c"):
            odd.show(map_name)
            assert odd.run("return document.getElementById('legend-title').textContent") == name
            assert odd.run("return document.getElementById('legend').textContent") == ends


@pytest.mark.browser
def test_names_of_classes_stand_apart_and_within_the_map(odd: Page) -> None:
    odd.still()
    placed = odd.run(
        "const pen = document.createElement('canvas').getContext('2d');"
        "pen.font = '700 14px system-ui, sans-serif';"
        "return report.written().map(({ text, x, y }) => [x, y, pen.measureText(text).width])"
    )
    boxes = np.array([[x - w / 2, x + w / 2, y - 7, y + 7] for x, y, w in placed])
    width, height = odd.run("return report.plot.size")
    assert 2 <= len(boxes) <= 8  # of so many classes eight have a colour, and a name
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] <= width).all()
    assert (boxes[:, 2:] <= height).all()
    for i, (left, right, top, bottom) in enumerate(boxes):
        for other in boxes[:i]:
            assert right <= other[0] or other[1] <= left or bottom <= other[2] or other[3] <= top


@pytest.mark.browser
def test_keys_alone_reach_all_and_the_focus_is_never_lost(odd: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    stops = odd.run(
        "return [...document.querySelectorAll('#legend button')].map((b) => b.tabIndex)"
    )
    assert len(stops) == 24
    assert sorted(stops) == [-1] * 23 + [0]
    focus(odd, "#legend [tabindex='0']")
    press(odd, Keys.ARROW_DOWN, Keys.ARROW_DOWN, "o")
    assert focused(odd, "#legend .class:nth-child(3) .line")
    code = int(odd.run("return document.activeElement.dataset.code"))
    is_code = np.array(odd.run("return [...report.data.columns[0].codes]")) == code
    focus(odd, "#map")
    press(odd, "s")
    assert odd.run("return [...report.state.selected]") == np.flatnonzero(is_code).tolist()
    focus(odd, "#show-all")
    press(odd, Keys.ENTER)
    assert focused(odd, "#legend .line")
    assert odd.run("return report.state.hidden.size") == 0
    focus(odd, "#clear")
    press(odd, Keys.ENTER)
    assert focused(odd, "#selection")

    odd.run("report.plot.zoom(2)")
    odd.still()
    at = np.array(odd.run("return report.data.ids.map((_, i) => report.screen(i))"))
    inside = ((at >= 0) & (at <= odd.run("return report.plot.size"))).all(axis=1)
    assert 3 < inside.sum() < 117
    focus(odd, "#select-view")
    press(odd, Keys.ENTER)
    assert odd.run("return [...report.state.selected]") == np.flatnonzero(inside).tolist()

    focus(odd, "#search")
    press(odd, *"row-000")
    odd.until("document.getElementById('found').textContent === '10 found'")
    focus(odd, "#select-found")
    press(odd, Keys.ENTER)
    assert focused(odd, "#selection")
    assert odd.run("return report.state.selected.size") == 10

    odd.run("report.choose(5)")
    wanted = odd.run("return document.querySelectorAll('#near .name')[2].title")
    focus(odd, "#near li:nth-child(3) button")
    press(odd, Keys.ENTER)
    assert odd.run("return report.data.ids[report.state.chosen]") == wanted
    assert focused(odd, "#near li:nth-child(3) button")

    focus(odd, "#tool-lasso")
    press(odd, Keys.ENTER)
    assert odd.run("return report.state.lasso")
    press(odd, Keys.ESCAPE)
    assert not odd.run("return report.state.lasso")
    assert odd.run("return report.state.chosen") >= 0
    assert odd.errors() == []


@pytest.mark.browser
def test_what_is_chosen_is_shown_again_and_said_and_a_name_without_label_ends_with_the_id(
    odd: Page,
) -> None:
    odd.run("report.choose(-1)")
    lines = odd.run("return [...document.querySelectorAll('#legend .line')].map((b) => b.title)")
    assert len(lines) == 12
    odd.run("document.querySelectorAll('#legend .line').forEach((line) => line.click())")
    assert odd.run("return report.state.hidden.size") == 12
    odd.run("report.choose(4)")
    text = odd.run("const c = report.data.columns[0]; return c.values[c.codes[4]]")
    said = odd.run("return document.getElementById('say').textContent")
    assert said == f"Chosen: row-0004, {text}; {text} is shown again"
    assert odd.run("return report.state.hidden.size") == 11
    assert odd.run("return document.querySelectorAll('#legend [aria-pressed=true]').length") == 1
    field = odd.driver.find_element("id", "search")
    field.send_keys("row-0011")
    odd.until("document.getElementById('found').textContent === '1 found'")
    assert odd.run("return document.querySelector('#matches .name').textContent") == "row-0011"


@pytest.mark.browser
def test_a_tap_on_a_phone_shows_what_was_chosen_and_tables_scroll_sideways(odd: Page) -> None:
    send = odd.driver.execute_cdp_cmd
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    send("Emulation.setDeviceMetricsOverride", phone)
    send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    odd.until("innerWidth === 390 && report.plot.canvas.width === report.plot.size[0]")
    _, at = odd.pixels()
    far = np.linalg.norm(at[:, None] - at[None], axis=2) + np.eye(len(at)) * 1e9
    alone = int(far.min(axis=1).argmax())
    x, y = at[alone]
    send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    odd.until(f"report.state.chosen === {alone}")
    top, bottom, text = odd.run(
        "const card = document.getElementById('card'), box = card.getBoundingClientRect();"
        "return [box.top, box.bottom, card.innerText]"
    )
    assert 0 < top < bottom <= 844
    assert odd.run("return report.data.ids[arguments[0]]", alone) in text
    odd.driver.find_element("id", "to-side").click()
    assert 0 <= odd.run("return document.getElementById('chosen').getBoundingClientRect().top") < 99
    table, room, page_px, tallest = odd.run(
        "const box = document.getElementById('scores');"
        "return [box.scrollWidth, box.clientWidth, document.documentElement.scrollWidth,"
        "Math.max(...[...box.querySelectorAll('thead th')].map((th) => th.offsetHeight))]"
    )
    assert table > room
    assert page_px <= 390
    assert tallest < 40  # a line: no word is broken
    value_px = odd.run(
        "return Math.min(...[...document.querySelectorAll('#chosen dd')].map((d) => d.offsetWidth))"
    )
    assert value_px > 140
    names = [
        node["name"]["value"]
        for node in send("Accessibility.getFullAXTree", {})["nodes"]
        if not node["ignored"] and node["role"]["value"] == "table"
    ]
    odd.run("report.select([1])")
    assert "Scores of the maps" in names
    assert odd.run("return document.getElementById('table').getAttribute('aria-labelledby')")
    assert odd.errors() == []


@pytest.mark.browser
def test_texts_are_shown_where_ids_would_be_and_run_their_own_way(
    driver: Any, tmp_path: Path
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    path = text_run(tmp_path)
    view(path, viewer="report")
    page = Page(driver, path.parent / "report.html")
    page.run("report.choose(4)")
    shown = page.run(
        "const dd = document.querySelector('#chosen dd');"
        "return [dd.textContent, getComputedStyle(dd).direction]"
    )
    assert shown == [RIGHT_TO_LEFT, "rtl"]
    near = page.run(
        "return [...document.querySelectorAll('#near .name')].map((e) => e.textContent)"
    )
    texts = store.open(path).metadata["text"]
    assert len(near) == 8
    assert all(any(name.startswith(text) for text in texts) for name in near)
    page.run(
        "const s = document.getElementById('search'); s.value = 'onerror';"
        "s.dispatchEvent(new Event('input'))"
    )
    page.still()
    assert HOSTILE in page.run("return document.getElementById('matches').textContent")
    assert page.run("return window.wrong") is None
    _, at = page.pixels()
    element = page.driver.find_element("id", "map")
    box = element.rect
    x, y = at[5] - [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
    ActionChains(page.driver).move_to_element_with_offset(element, int(x), int(y)).perform()
    page.still()
    tip = page.run("return document.getElementById('tip').textContent")
    assert "sentence" in tip or "long" in tip or RIGHT_TO_LEFT in tip or HOSTILE in tip
    # Of a long text six lines are shown.
    tall = page.run(
        "const tip = document.getElementById('tip'); const dd = tip.querySelector('dd');"
        "dd.textContent = 'very long '.repeat(100);"
        "return dd.offsetHeight / parseFloat(getComputedStyle(dd).lineHeight)"
    )
    assert 5.5 < tall < 6.5
    assert page.errors() == []
