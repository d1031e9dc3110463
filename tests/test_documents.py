"""Every command and snippet of the README and of the pages in docs/ is run as it is written."""

import ast
import dataclasses
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import embedx
from embedx import cli, errors, models, store

from .conftest import ROOT

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
# In the order in which they are read: what one makes, the next ones use.
FIRST = ["index.md", "tutorial.md"]
PAGES = [
    ROOT / "README.md",
    *(DOCS / name for name in FIRST),
    *(path for path in sorted(DOCS.glob("*.md")) if path.name not in FIRST),
]


@dataclasses.dataclass
class Step:
    """A command, or a snippet, with the output that the page shows below it."""

    page: str
    language: str
    text: str
    shown: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page}: {self.text if self.language == 'bash' else self.text[:40]}"


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each block of code; ``after-bash`` for what directly follows one."""
    text = page.read_text(encoding="utf-8")
    end, previous = -1, ""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M):
        follows = previous == "bash" and not text[end : match.start()].strip()
        yield "after-bash" if follows and match[1] == "text" else match[1], match[2]
        end, previous = match.end(), match[1]


def read_pages() -> tuple[list[Step], dict[str, str]]:
    """What is to be run, a command once, and the files that the pages show by their names."""
    steps: list[Step] = []
    commands: dict[str, Step] = {}
    files: dict[str, str] = {}
    for page in PAGES:
        command = ""
        for language, text in fences(page):
            name = re.match(r"# ([\w./]+\.(?:py|yaml))\n", text)
            if name:
                assert name[1] not in files, f"{name[1]} is shown twice"
                files[name[1]] = text
            elif language == "bash":
                for command in text.splitlines():
                    if command not in commands:
                        commands[command] = Step(page.name, language, command)
                        steps.append(commands[command])
            elif language == "after-bash":
                commands[command].shown += text.splitlines()
            elif language == "python" and page.name != "README.md":
                steps.append(Step(page.name, language, text))
    return steps, files


STEPS, FILES = read_pages()
COMMANDS = [step.text for step in STEPS if step.page == "README.md"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the reader has it: photos, the files shown, torchvision's weights (random)."""
    folder = tmp_path_factory.mktemp("desk")
    rng = np.random.default_rng(0)
    for i in range(40):
        kind = ("cat", "dog")[i % 2]
        pixels = rng.integers(0, 255, (6, 8, 3), dtype=np.uint8)
        for path in (folder / "photos" / kind / f"{i}.jpg", folder / "flat" / f"{kind}_{i}.jpg"):
            if path.parent.name != "flat" or i < 8:
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).resize((64, 48)).save(path)
    (folder / "shards").mkdir()
    for number in range(2):
        with tarfile.open(folder / "shards" / f"photos-{number:03d}.tar", "w") as tar:
            for i in range(20 * number, 20 * number + 20):
                kind = ("cat", "dog")[i % 2]
                tar.add(folder / "photos" / kind / f"{i}.jpg", arcname=f"{kind}-{i}.jpg")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    cache = folder / "home" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    module = models.torchvision("resnet18", weights=None).module
    torch.save(module.state_dict(), cache / "resnet18-f37072fd.pth")
    return folder


def shell(command: str, desk: Path) -> "subprocess.Popen[str]":
    command = re.sub(r"^scripts/", f"{ROOT}/scripts/", command)
    binaries = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "TORCH_HOME": f"{desk}/home"}
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=desk,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_readme_has_its_commands() -> None:
    assert COMMANDS[:2] == ["scripts/embedx run", "scripts/test"]
    assert "python -m embedx extract +model=resnet18" in COMMANDS
    assert len(COMMANDS) >= 12


def test_the_pages_have_their_commands_and_snippets() -> None:
    assert {page.stem for page in PAGES} >= {"tutorial", "models", "data", "layers", "files"}
    assert set(FILES) >= {"mynet.py", "my_conf/model/mynet.yaml", "my_conf/data/stripes.yaml"}
    assert len([step for step in STEPS if step.shown]) >= 15
    for page in ("tutorial.md", "data.md", "layers.md", "files.md"):
        assert {step.language for step in STEPS if step.page == page} == {"bash", "python"}
    # A process each: whatever can be told without another command is told without it.
    assert len([step for step in STEPS if step.language == "bash"]) - len(COMMANDS) <= 61


@pytest.fixture(scope="module")
def notebooks() -> Iterator[dict[str, dict[str, Any]]]:
    """The names that the snippets of each page have made so far."""
    yield {}
    for name in FILES:  # a later test may have a module of this name
        sys.modules.pop(Path(name).stem, None)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_what_a_page_says_happens(
    step: Step,
    desk: Path,
    notebooks: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if step.language == "python":
        monkeypatch.chdir(desk)
        monkeypatch.setenv("TORCH_HOME", f"{desk}/home")
        monkeypatch.syspath_prepend(desk)
        run_snippet(step.text, notebooks.setdefault(step.page, {}), title=step.page)
        return
    command = step.text
    if command == "scripts/test":  # this very run; here only that it is what CI calls
        assert os.access(ROOT / command, os.X_OK)
        assert command in (ROOT / ".ci" / "run").read_text()
        return
    process = shell(command, desk)
    if "viewer=tensorboard" in command:
        check_server(process)
        return
    out, err = process.communicate(timeout=280)
    fails = any(re.match(r"\w+Error: ", line) for line in step.shown)
    assert process.returncode == fails, err
    assert bool(err) == fails
    printed = [plain(line) for line in (out + err).splitlines()]
    for line in map(plain, step.shown):
        assert any(
            there.startswith(line[:-4]) if line.endswith(" ...") else there == line
            for there in printed
        ), f"{line!r} is not in {printed}"
    for written in re.findall(r"^wrote ([^:\n]+)", out, re.M):
        assert (desk / written).exists(), written
    if command == "scripts/embedx run":
        demo = desk / "outputs" / "demo"
        assert store.open(demo).n_rows == 1797
        names = {path.name.split("-")[0] for path in demo.iterdir()}
        assert {"maps.png", "scores.json", "projector", "projections", "map"} <= names
        assert out.splitlines()[-1] == "to look at: outputs/demo/maps.png"
    if command.endswith("+model=resnet18"):
        assert store.open(desk / "outputs" / "resnet18-digits").rows()[1].shape == (1797, 512)
    if command.endswith('"layers=[layer3,avgpool]"'):
        run = next((desk / "outputs").glob("resnet18-photos-*"))
        assert list(store.open(run).embeddings) == ["layer3", "avgpool"]
        assert store.open(run).n_rows == 40


def plain(line: str) -> str:
    """A line without what differs from run to run: decimal figures, hashes, width of columns."""
    line = re.sub(r"[\d,]*\d\.\d+", "#", line)
    return re.sub(r"-[0-9a-f]{6}\b", "-#", " ".join(line.split()))


def run_snippet(text: str, names: dict[str, Any], *, title: str) -> None:
    """Run a snippet as a notebook would; a value in a comment is what stands before it."""
    sys.modules.pop("mynet", None)  # one of another test in this process
    exec(compile(text, title, "exec"), names)
    for match in re.finditer(r"^ *(?P<expression>[^#=\n]+?)  # (?P<value>.+)$", text, re.M):
        try:
            value = ast.literal_eval(match["value"])
        except (ValueError, SyntaxError):  # words
            continue
        assert eval(match["expression"], names) == value, match[0]


def check_server(process: "subprocess.Popen[str]") -> None:
    try:
        address = "http://127.0.0.1:6006/data/plugin/projector/runs"
        deadline = time.monotonic() + 60
        answer = b""
        while not answer and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(address, timeout=5) as response:
                    answer = response.read()
            except OSError:
                time.sleep(0.5)
        assert answer == b'["."]'
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = (text for language, text in fences(ROOT / "README.md") if language == "python")
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("layer4", nn.Conv2d(3, 6, 3))
    model.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    names = {
        "model": model,
        "images": torch.randn(40, 3, 8, 8),
        "labels": ["a", "b"] * 20,
    }
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["x"].shape == (40, 6)
    assert names["umap"].coords.shape == (40, 2)
    assert "torch.Size([8, 6, 6, 6])" in capsys.readouterr().out
    assert list((tmp_path / "outputs" / "mine").glob("map-umap-*.png"))
    assert len(snippet.strip().splitlines()) <= 14


def test_the_links_and_the_picture_of_the_readme_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


# --------------------------------------------------------------------------- generated pages


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The module that writes the pages a stage."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(page: str) -> dict[str, list[list[str]]]:
    """The rows of the tables of a page by the key in their first cell."""
    rows: dict[str, list[list[str]]] = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            key, *cells = line.strip("| ").split(" | ")
            assert all(cells), line
            rows.setdefault(key.strip("`"), []).append(cells)
    return rows


@pytest.mark.parametrize("stage", cli.STAGES)
def test_the_page_of_a_stage_has_every_key_with_its_default(
    stage: str, generate: ModuleType
) -> None:
    rows = rows_of(generate.stage_page(stage))
    conf = ROOT / "conf"

    def read(path: Path) -> dict[str, Any]:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert isinstance(document, dict)
        return document

    own = read(conf / f"{stage}.yaml")
    defaults = own.pop("defaults")
    if "_extraction" in defaults:
        own.update(read(conf / "_extraction.yaml"))
    for key, value in own.items():
        ((_, default, _),) = rows.pop(key)
        if default not in ("the newest run", "must be given"):
            assert yaml.safe_load(default.strip("`")) == value
    groups = {group for entry in defaults if isinstance(entry, dict) for group in entry}
    for group in groups & {path.name for path in conf.iterdir()} - {"experiment"}:
        for path in sorted((conf / group).glob("*.yaml")):
            for key, value in read(path).items():
                if key != "_target_":
                    found = {default for _, default, _ in rows[f"{group}.{key}"]}
                    typed = yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
                    assert found & (
                        {"must be given"} if value == "???" else {"its own", f"`{typed}`"}
                    )
    assert all("." in key for key in rows), "a key that the stage does not have"


def test_the_page_of_models_lists_all_of_them(generate: ModuleType) -> None:
    rows = rows_of(generate.models_page())
    assert set(rows) == {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
    assert rows["resnet18"][0][:2] == ["`avgpool`", "224&nbsp;px"]
    assert rows["efficientnet_lite1"][0][:2] == ["`_avg_pooling`", "240&nbsp;px"]


def test_every_exception_has_its_place_on_the_page_of_errors() -> None:
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.EmbedxError)
    }
    del classes["EmbedxError"]
    headings = dict(re.findall(r"^### (\w+) \((\w+)\)$", page, re.M))
    assert set(headings) == set(classes)
    for name, base in headings.items():
        assert base in {parent.__name__ for parent in classes[name].__mro__[1:]}, name


def test_every_public_name_is_on_the_page_of_python() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in embedx.__all__:
        assert f"embedx.{name}\n" in page, name
