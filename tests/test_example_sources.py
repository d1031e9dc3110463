"""The data sources in ``examples/``: from files made here to embeddings, as their pages say."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy.io import wavfile
from scipy.signal import sawtooth

import embedx
from embedx.errors import DataError

from .conftest import ROOT

RATE_HZ = 16_000


def extracted(source: str, *words: str, out: Path) -> "embedx.store.Embeddings":
    command = [sys.executable, "-m", "embedx", "extract", "--config-dir", "conf", f"data={source}"]
    command += ["model=efficientnet_lite0", "model.input_size=128", *words, f"out={out}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, cwd=ROOT / "examples"
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return embedx.open(out)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield ROOT / "examples"
    for name in ("audio", "video"):
        sys.modules.pop(name, None)


@pytest.fixture
def audio(examples: Path) -> ModuleType:
    import audio  # type: ignore[import-not-found]

    return audio


@pytest.fixture
def video(examples: Path) -> ModuleType:
    import video  # type: ignore[import-not-found]

    return video


def write_gif(path: Path, color: tuple[int, int, int], n: int = 12) -> list[Image.Image]:
    drawn = []
    for k in range(n):
        frame = Image.new("RGB", (96, 64), "white")
        ImageDraw.Draw(frame).rectangle((k * 5, 10, k * 5 + 30, 40), fill=color)
        drawn.append(frame)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=40)
    return drawn


def test_frames_are_those_that_were_drawn_in_whatever_order_they_are_read(
    video: ModuleType, tmp_path: Path
) -> None:
    drawn = write_gif(tmp_path / "clips" / "red.gif", (255, 0, 0))
    write_gif(tmp_path / "clips" / "blue.gif", (0, 0, 255), n=5)
    source = video.video(str(tmp_path / "clips"), every=2)
    assert list(source.ids)[2:5] == ["blue.gif#000004", "red.gif#000000", "red.gif#000002"]
    assert len(source) == 3 + 6
    assert source.metadata["time_s"].tolist()[3:6] == [0.0, 0.08, 0.16]
    assert [source.label_names[i] for i in source.labels] == ["blue.gif"] * 3 + ["red.gif"] * 6
    for i in (3, 8, 5, 5, 4):
        np.testing.assert_array_equal(source.read(i), drawn[2 * (i - 3)])
    whole = (tmp_path / "clips" / "red.gif").read_bytes()
    (tmp_path / "clips" / "red.gif").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="changed after the run had listed it"):
        source.read(6)
    assert source.read(1).size == (96, 64)


@pytest.mark.slow
def test_frames_of_a_folder_go_through_a_model(tmp_path: Path) -> None:
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        write_gif(tmp_path / "clips" / f"{name}.gif", color)
    words = (f"data.path={tmp_path / 'clips'}", "data.every=3", "num_workers=2")
    run = extracted("video", *words, "batch_size=2", out=tmp_path / "run")
    assert run.n_rows == 8
    middle = run.thumbnails[:, 16].astype(int)  # a row of px across the figure
    is_red = (middle[..., 0] - middle[..., 2] > 100).any(1)
    assert is_red.tolist() == [text == "red.gif" for text in run.label_texts()]


def test_videos_that_pyav_reads_come_out_frame_by_frame(video: ModuleType, tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(tmp_path / "v.mp4"), "w") as writer:
        stream = writer.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for k in range(10):
            frame = av.VideoFrame.from_image(Image.new("RGB", (64, 48), (25 * k, 0, 0)))
            writer.mux(stream.encode(frame))
        writer.mux(stream.encode())
    source = video.video(str(tmp_path / "v.mp4"))
    reds = [np.asarray(source.read(i))[..., 0].mean() for i in range(len(source))]
    assert np.abs(np.array(reds) - 25 * np.arange(10)).max() < 20


def test_a_spectrogram_is_bright_where_the_pitch_is(audio: ModuleType) -> None:
    for pitch_hz in (500, 2000, 6500):
        wave = np.sin(2 * np.pi * pitch_hz * np.arange(RATE_HZ) / RATE_HZ)
        image = np.asarray(audio.spectrogram(wave, RATE_HZ, highest_hz=8000, range_db=60))
        assert image.shape == (224, 224, 3)
        brightest = image[:, 112, 0].argmax()
        assert abs(brightest - 224 * (1 - pitch_hz / 8000)) < 3


@pytest.mark.slow
def test_neighbours_of_a_sound_are_those_of_its_pitch(audio: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for pitch_hz in (220, 440, 880, 1760):
        for k in range(6):
            t = np.arange(int(RATE_HZ * (0.6 + 0.1 * k))) / RATE_HZ
            wave = sawtooth(2 * np.pi * pitch_hz * t + k) * (0.3 + 0.1 * k)
            wave += rng.normal(0, 0.01, len(t))
            whole = (wave * 20_000).clip(-32_000, 32_000).astype(np.int16)
            path = tmp_path / "sounds" / f"{pitch_hz} Hz" / f"{k}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            wavfile.write(path, RATE_HZ, whole if k % 2 else wave.astype(np.float32))
    (tmp_path / "sounds" / "880 Hz" / "short.wav").write_bytes(path.read_bytes()[:1000])
    run = extracted("audio", f"data.root={tmp_path / 'sounds'}", out=tmp_path / "run")
    bad = [name for name, ok in zip(run.ids, run.ok, strict=True) if not ok]
    assert bad == ["880 Hz/short.wav"]
    (rows,) = (np.asarray(rows)[run.ok] for rows in run.embeddings.values())
    labels = np.asarray(run.labels)[run.ok]
    distances = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    np.fill_diagonal(distances, np.inf)
    nearest = labels[distances.argsort(1)[:, :3]]
    assert len(labels) == 24
    assert (nearest == labels[:, None]).mean() > 0.9
