"""Spectrograms of sounds as a data source of one's own.

From this folder, over the WAV files below a folder, whose first level of folders gives the labels::

    python -m embedx extract --config-dir conf model=resnet18 data=audio data.root=sounds

``conf/data/audio.yaml`` names the function. A network for photographs knows nothing of sounds, but
a spectrogram has textures that tell many of them apart.
"""

import functools
import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import wavfile
from scipy.signal import ShortTimeFFT
from scipy.signal.windows import hann

from embedx.errors import DataError
from embedx.sources import Source, file_hashes, limited

SIDE_PX = 224
ROWS_MOST = 4096


def audio(
    root: str, *, highest_hz: float = 8000.0, range_db: float = 60.0, limit: int | None = None
) -> Source:
    """The spectrogram of each WAV file below a folder, as a grey picture of 224x224 px.

    Time goes to the right, whatever the length of the sound; frequency goes up, from 0.

    Args:
        root: The folder.
        highest_hz: Frequency of the upper edge, in Hz.
        range_db: What is so many dB below the loudest point of a sound, or less, is black.
        limit: Take the first so many.

    Raises:
        DataError: There is no WAV file, or a key is out of its range.
    """
    if highest_hz <= 0 or range_db <= 0:
        raise DataError(f"highest_hz={highest_hz} and range_db={range_db} must be above 0")
    top = Path(root).expanduser()
    files = sorted(one for one in top.rglob("*") if one.suffix.lower() == ".wav" and one.is_file())
    if not files:
        raise DataError(f"data.root {root} holds no .wav file")
    files = files[: limited(len(files), limit)]
    ids = [file.relative_to(top).as_posix() for file in files]
    folders = [name.split("/")[0] if "/" in name else "" for name in ids]
    label_names = sorted(set(folders) - {""})
    stated = [(name, os.stat(file)) for name, file in zip(ids, files, strict=True)]
    fingerprint, hashes = file_hashes(
        (name, about.st_size, about.st_mtime_ns) for name, about in stated
    )
    return Source(
        name=top.resolve().name,
        ids=ids,
        read=functools.partial(
            read,
            root=str(top),
            stated=[(name, about.st_size, about.st_mtime_ns) for name, about in stated],
            highest_hz=highest_hz,
            range_db=range_db,
        ),
        fingerprint=f"{fingerprint} {highest_hz} {range_db}",
        item_hashes=hashes,
        labels=(
            np.array([label_names.index(one) if one else -1 for one in folders], np.int32)
            if label_names
            else None
        ),
        label_names=label_names,
        notes=(f"{root}: {len(ids):,} sounds, {len(label_names) or 'no'} classes",),
        root=top,
        reads_files=True,
    )


def read(
    i: int,
    *,
    root: str,
    stated: list[tuple[str, int, int]],
    highest_hz: float,
    range_db: float,
) -> Image.Image:
    """Item i; raises for a sound that cannot be read, or was changed since it was listed."""
    name, *was = stated[i]
    with open(Path(root, name), "rb") as file:
        about = os.fstat(file.fileno())
        if [about.st_size, about.st_mtime_ns] != was:
            raise DataError("it was changed after the run had listed it")
        with warnings.catch_warnings():
            warnings.simplefilter("error", wavfile.WavFileWarning)  # cut short, say
            warnings.filterwarnings("ignore", message="Chunk .* not understood")
            rate_hz, samples = wavfile.read(file)
    if samples.dtype == np.uint8:  # the one kind whose silence is not 0
        samples = samples.astype(np.float64) - 128
    samples = samples.astype(np.float64)
    wave = samples.mean(1) if samples.ndim == 2 else samples
    return spectrogram(wave, rate_hz, highest_hz=highest_hz, range_db=range_db)


def spectrogram(
    wave: np.ndarray, rate_hz: int, *, highest_hz: float, range_db: float
) -> Image.Image:
    """The power of a sound over time and frequency, in dB from black to white.

    Args:
        wave: Shape ``(n,)``, of any scale.
        rate_hz: Samples a second.
        highest_hz: Frequency of the upper edge.
        range_db: From black to white.
    """
    n_window = max(16, round(0.032 * rate_hz))
    if len(wave) < n_window or not np.isfinite(wave).all():
        raise DataError(f"{len(wave)} samples, of which all must be finite, are less than 32 ms")
    transform = ShortTimeFFT(hann(n_window, sym=False), hop=max(1, n_window // 4), fs=rate_hz)
    power = transform.spectrogram(wave)
    power = power[: max(1, int(np.searchsorted(transform.f, highest_hz)))]
    db = 10 * np.log10(np.maximum(power, power.max() * 1e-12 + 1e-300))
    grey = np.clip((db - db.max()) / range_db + 1, 0, 1) * (power.max() > 0)  # silence is black
    rows = int(np.ceil(highest_hz / transform.delta_f))  # a sound may have less
    if rows > ROWS_MOST:
        raise DataError(
            f"{rate_hz} samples a second are too few for highest_hz={highest_hz:g}; lower it"
        )
    whole = np.zeros((rows, grey.shape[1]), np.uint8)
    whole[: len(grey)] = np.round(255 * grey[:rows]).astype(np.uint8)
    picture = Image.fromarray(whole[::-1]).resize((SIDE_PX, SIDE_PX), Image.Resampling.BILINEAR)
    return picture.convert("RGB")
