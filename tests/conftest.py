"""What several test modules share."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]


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
