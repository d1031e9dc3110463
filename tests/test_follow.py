"""``view follow=true``: a run while it is written, in the terminal."""

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedx import follow as module
from embedx import layout, writing
from embedx.errors import StoreError
from embedx.follow import WIDE, follow
from embedx.layout import Field
from embedx.view import view
from tests.conftest import Run, embeddings_file

COLOR = re.compile(r"\x1b\[[0-9;]*m")


def writer(path: Path, n: int = 90) -> Any:
    return writing.create(
        path,
        ids=[f"row-{i}" for i in range(n)],
        fields=[Field("embeddings/pool", (4,), np.dtype(np.float32))],
        attrs={"id": "x", "model": "net", "data": "blobs"},
        labels=np.arange(n, dtype=np.int32) % 3,
        label_names=["a", "b", "c"],
    )


def rows(n: int) -> Any:
    classes = np.arange(n) % 3
    x = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)
    x[:, 0] += classes * 20
    return x


def dots(picture: list[str]) -> int:
    letters = "".join(COLOR.sub("", line) for line in picture)
    return sum((ord(letter) - 0x2800).bit_count() for letter in letters if ord(letter) >= 0x2800)


def test_a_run_is_followed_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "embeddings.h5"
    run, x, shown = writer(path), rows(90), []
    status = np.full(30, layout.Status.OK, np.uint8)
    status[4] = layout.Status.FAILED
    batches = [0, 30, 60]
    now = [0.0]

    def next_batch(_: float) -> None:
        now[0] += 2.0
        if not batches:
            run.finish()
            return
        start = batches.pop(0)
        run.append({"embeddings/pool": x[start : start + 30]}, status=status)
        run.commit()

    monkeypatch.setattr(module.time, "sleep", next_batch)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    found = follow(path, write=shown.append)
    assert found.complete
    pictures = "".join(shown)
    heads = re.findall(r"[\d,]+ of .* rows \(.*", pictures)
    assert [head.split(",")[0] for head in heads] == [
        "0 of 90 rows (0%)",
        "30 of 90 rows (33%)",
        "60 of 90 rows (67%)",
        "90 of 90 rows (100%)",
        "90 of 90 rows (100%)",
    ]
    assert "60 of 90 rows (67%), 2 failed, 15.0 a second, 2 s left" in pictures
    assert heads[-1].endswith("3 failed, finished")
    assert "PCA of 87 rows of pool" in pictures
    last = shown[-1].splitlines()
    assert 40 < dots(last) <= 87  # a letter's dot may hold several rows
    assert max(len(COLOR.sub("", line)) for line in last[1:-1]) <= WIDE
    # Each picture is drawn over the one before: the cursor goes up as many lines as that had.
    ups = [int(up) for up in re.findall(r"\x1b\[(\d+)F", pictures)]
    assert ups == [text.count("\n") for text in shown if "rows (" in text][:-1]


def test_classes_have_their_colours_and_lie_apart(tmp_path: Path) -> None:
    path = embeddings_file(tmp_path, {"pool": rows(90)}, labels=[i % 3 for i in range(90)])
    shown: list[str] = []
    follow(path, write=shown.append)
    picture = shown[-1].splitlines()[1:-1]
    columns: dict[str, list[int]] = {}
    for line in picture:
        letters = re.findall(r"(?:\x1b\[38;2;([0-9;]+)m)?(.)(?:\x1b\[0m)?", line)
        for at, (color, letter) in enumerate(letters):
            if ord(letter) > 0x2800:
                columns.setdefault(color, []).append(at)
    assert len(columns) == 3
    spans = sorted((min(found), max(found)) for found in columns.values())
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = embeddings_file(tmp_path, {"pool": rows(90)}, labels=[i % 3 for i in range(90)])
    assert view(path, follow=True) is None
    out = capsys.readouterr().out
    assert out.startswith("90 of 90 rows (100%), 0 failed, finished\n")
    assert "\x1b" not in out
    assert dots(out.splitlines()[1:-1]) > 40


def test_a_run_that_nobody_writes_any_more_is_said(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    run = writer(path)
    run.append({"embeddings/pool": rows(30)}, status=np.full(30, layout.Status.OK, np.uint8))
    run.commit()
    run.close()
    shown: list[str] = []
    assert not follow(path, write=shown.append).complete
    assert "30 of 90 rows (33%), 0 failed, nobody writes it: go on with the same" in shown[-1]
    with pytest.raises(StoreError, match="no run that writes it"):
        follow(tmp_path / "none" / "embeddings.h5")


def test_two_rows_or_one_feature_are_no_map_yet(tmp_path: Path) -> None:
    for number, x in enumerate((np.ones((2, 3)), np.ones((5, 1)))):
        shown: list[str] = []
        follow(embeddings_file(tmp_path / str(number), x), write=shown.append)
        assert "a map of avgpool begins with the third row of two features" in shown[-1]


@pytest.mark.slow
def test_an_extraction_is_followed_from_another_process(run: Run, tmp_path: Path) -> None:
    model = "import torch; torch.manual_seed(0)\n"
    model += "import time\n"
    model += "class Net(torch.nn.Module):\n"
    model += "    def __init__(self):\n"
    model += "        super().__init__(); self.fc = torch.nn.Linear(8, 4)\n"
    model += "    def forward(self, x):\n"
    model += "        time.sleep(0.2); return self.fc(x)\n"
    code = "import embedx, numpy as np\n"
    code += "x = np.random.default_rng(0).normal(size=(300, 8)).astype('f4')\n"
    code += "embedx.extract(Net(), x, layers='fc', batch_size=10, out='outputs/it')\n"
    (tmp_path / "make.py").write_text(model + code)
    maker = subprocess.Popen([sys.executable, "make.py"], cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("outputs/it/*.partial")) and time.monotonic() < end:
            time.sleep(0.05)
        done = run("view", "follow=true")
        assert (done.returncode, done.stderr) == (0, "")
        assert "300 of 300 rows (100%), 0 failed, finished" in done.stdout
        assert "PCA of 300 rows of fc" in done.stdout
        assert maker.wait(60) == 0
    finally:
        maker.kill()
        maker.communicate()
