"""Every command and snippet of the README is run as it is written."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from embedx import models, store

from .conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README's reader has it: photos, a network, torchvision's weights (random)."""
    folder = tmp_path_factory.mktemp("desk")
    rng = np.random.default_rng(0)
    for i in range(40):
        path = folder / "photos" / ("cat", "dog")[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 48)).save(path)
    (folder / "mynet.py").write_text(
        "from torch import nn\n"
        "def make(depth):\n"
        "    body = [nn.Conv2d(3 if i == 0 else 8, 8, 3, 2) for i in range(depth)]\n"
        "    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))\n"
    )
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


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_does_what_it_says(command: str, desk: Path) -> None:
    if command == "scripts/test":  # this very run; here only that it is what CI calls
        assert os.access(ROOT / command, os.X_OK)
        assert command in (ROOT / ".ci" / "run").read_text()
        return
    process = shell(command, desk)
    if "viewer=tensorboard" in command:
        check_server(process)
        return
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert err == ""
    if command == "scripts/embedx run":
        demo = desk / "outputs" / "demo"
        assert store.open(demo).n_rows == 1797
        names = {path.name.split("-")[0] for path in demo.iterdir()}
        assert {"maps.png", "scores.json", "projector", "projections", "map"} <= names
        assert out.splitlines()[-1] == "to look at: outputs/demo/maps.png"
    if command.endswith("+model=resnet18"):
        assert store.open(desk / "outputs" / "resnet18-digits").rows()[1].shape == (1797, 512)
    if "data=folder" in command:
        run = next((desk / "outputs").glob("resnet18-photos-*"))
        assert list(store.open(run).embeddings) == ["layer3", "avgpool"]
        assert store.open(run).n_rows == 40


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
    (snippet,) = blocks("python")
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
