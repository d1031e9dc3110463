"""The wheel in an environment of its own: it has all it needs, and runs far from the checkout."""

import json
import os
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from embedx import derived, store

from .conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout, with the build tool that is installed."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (path,) = out.glob("embedx_torch-*.whl")
    return path


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and this one's libraries: torch alone has 6 GB."""
    folder = tmp_path_factory.mktemp("elsewhere") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (libraries,) = {path for path in map(Path, sys.path) if path.name == "site-packages"}
    # A path in a .pth file is searched, and the .pth files in it, the checkout's too, are not read.
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return folder / "bin"


def run(binaries: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        words,
        cwd=cwd,
        env={**env, "PATH": f"{binaries}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_package_and_every_config_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    tracked = {
        *(p.relative_to(ROOT).as_posix() for p in (ROOT / "embedx").glob("*.py")),
        *(f"embedx/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "conf").rglob("*.yaml")),
        *(p.relative_to(ROOT).as_posix() for p in (ROOT / "embedx" / "page").iterdir()),
        "embedx/py.typed",
    }
    assert len(tracked) > 40
    assert names == tracked


def test_the_metadata_says_what_an_index_shows(wheel: Path) -> None:
    about = metadata(wheel)
    assert about["Name"] == "embedx-torch"
    assert about["Requires-Python"] == ">=3.11"
    assert about["License-Expression"] == "Apache-2.0"
    assert about.get_all("License-File") == ["LICENSE"]
    assert set(about.get_all("Provides-Extra") or []) == {
        "explain",
        "viz",
        "atlas",
        "data",
        "text",
        "timm",
        "ray",
        "sweep",
        "demo",
        "dev",
    }
    classifiers = about.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert "Programming Language :: Python :: 3.11" in classifiers
    assert "Project-URL" not in about  # there is none yet
    assert "# embedx" in str(about.get_payload())


def test_the_installed_program_is_the_wheel_and_not_the_checkout(
    binaries: Path, tmp_path: Path
) -> None:
    code = "import embedx; print(embedx.__file__)"
    assert str(binaries.parent) in run(binaries, "python", "-c", code, cwd=tmp_path).stdout
    import embedx

    version = run(binaries, "embedx", "--version", cwd=tmp_path)
    assert (version.returncode, version.stdout) == (0, f"embedx {embedx.__version__}\n")


def test_it_extracts_and_projects_far_from_the_checkout(binaries: Path, tmp_path: Path) -> None:
    words = ("model=efficientnet_lite0", "model.input_size=64", "data.limit=40", "name=small")
    done = run(binaries, "embedx", "extract", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(binaries, "embedx", "project", "projection=pca", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    opened = store.open(tmp_path / "outputs" / "small")
    assert opened.rows()[1].shape == (40, 1280)
    assert [p.coords.shape for p in derived.projections_of(opened)] == [(40, 2)]


def test_it_takes_a_model_file_of_the_users_own(binaries: Path, tmp_path: Path) -> None:
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n"
        "def make(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, width), nn.Linear(width, 2))\n"
    )
    path = tmp_path / "my_conf" / "model" / "mynet.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("_target_: mynet.make\nwidth: 5\ninput_size: 8\n")
    words = ("--config-dir", "my_conf", "model=mynet", "data.limit=6", "name=mine")
    done = run(binaries, "embedx", "extract", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert store.open(tmp_path / "outputs" / "mine").embeddings["2:input"].shape == (6, 5)


def test_it_completes_on_tab(binaries: Path, tmp_path: Path) -> None:
    script = (
        'eval "$(embedx -sc install=bash)"; COMP_LINE="embedx extract model=res"; COMP_CWORD=2; '
        'hydra_bash_completion; echo "${COMPREPLY[@]}"'
    )
    done = run(binaries, "bash", "-c", script, cwd=tmp_path)
    assert done.stdout.split() == ["model=resnet18", "model=resnet50"]


def test_without_what_unix_alone_has_it_imports_and_reads(binaries: Path, tmp_path: Path) -> None:
    """Windows has no fcntl; macOS neither posix_fallocate nor fdatasync."""
    import numpy as np
    import torch

    import embedx

    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    made = embedx.extract(net, torch.eye(3), layers="0", out=tmp_path / "run")
    code = """
import os, sys
sys.modules["fcntl"] = None
for name in ("posix_fallocate", "fdatasync", "O_DIRECTORY", "fork", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
import embedx
from embedx import checks, configs, data, evaluate, export, hooks, models, neighbors, pooling
from embedx import project, store, view
opened = embedx.open("run")
assert opened.verify() == []
print(opened.embeddings["0"].tolist())
import torch
try:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2)).eval()
    embedx.extract(net, torch.eye(3), layers="0", out="new")
except embedx.errors.StoreError as error:
    print(error)
"""
    done = run(binaries, "python", "-c", code, cwd=tmp_path)
    assert done.stderr == ""
    rows, refused = done.stdout.splitlines()
    assert np.array_equal(json.loads(rows), made.embeddings["0"])
    assert refused.startswith("cannot write new/embeddings.h5: on Windows embedx reads files only;")
