"""Frames of videos as a data source of one's own.

From this folder, over a GIF or a folder of them (``data.every=10`` for every tenth frame)::

    python -m embedx extract --config-dir conf model=resnet18 data=video data.path=clips

``conf/data/video.yaml`` names the function. Animated GIF, PNG and WebP are read by Pillow; MP4 and
other videos by PyAV, where that is installed (``pip install av``).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from embedx.errors import DataError, DependencyError
from embedx.pictures import picture, whole_pictures
from embedx.sources import Source, file_hashes, limited

OF_PILLOW = {".gif": "GIF", ".png": "PNG", ".apng": "PNG", ".webp": "WEBP"}
OF_PYAV = (".avi", ".mkv", ".mov", ".mp4", ".webm")


def video(path: str, *, every: int = 1, limit: int | None = None) -> Source:
    """Frames of a video, or of each below a folder; the labels are the videos.

    Args:
        path: A video, or a folder with some.
        every: Take the first of so many frames.
        limit: Take the first so many of these.

    Raises:
        DataError: There is no video, or none of its frames can be read.
        DependencyError: A video needs PyAV, which is not installed.
    """
    if every < 1:
        raise DataError(f"data.every must be at least 1, not {every}")
    top = Path(path).expanduser()
    known = (*OF_PILLOW, *OF_PYAV)
    found = sorted(top.rglob("*")) if top.is_dir() else [top]
    videos = [one for one in found if one.suffix.lower() in known and one.is_file()]
    if not videos:
        raise DataError(f"data.path {path} holds no video; give one of {' '.join(known)}")
    root = top if top.is_dir() else top.parent
    names = [one.relative_to(root).as_posix() for one in videos]
    stats = [one.stat() for one in videos]
    before = [
        (name, about.st_size, about.st_mtime_ns) for name, about in zip(names, stats, strict=True)
    ]
    ids, labels, numbers, times, warned = [], [], [], [], []
    for label, (name, file) in enumerate(zip(names, videos, strict=True)):
        n_read = 0
        try:
            for number, (time_s, _) in enumerate(frames(file)):
                n_read += 1
                if number % every == 0:
                    ids.append(f"{name}#{number:06d}")
                    labels.append(label)
                    numbers.append(number)
                    times.append(time_s)
        except DependencyError:
            raise
        except Exception as error:  # whatever a decoder stumbles over
            warned.append(f"{name} cannot be read after frame {n_read} ({error}): the rest is left")
    if not ids:
        raise DataError(f"no frame of data.path {path} can be read: {warned[0]}")
    n = limited(len(ids), limit)
    fingerprint, of_files = file_hashes(before)
    return Source(
        name=top.resolve().name,
        ids=ids[:n],
        read=FrameReader(str(root), before, list(zip(labels, numbers, strict=True))[:n]),
        fingerprint=f"{fingerprint} {every}",
        item_hashes=of_files[labels][:n] + np.array(numbers[:n], np.uint64),
        labels=np.array(labels[:n], np.int32),
        label_names=names,
        metadata={"frame": np.array(numbers[:n]), "time_s": np.array(times[:n])},
        notes=(f"{path}: {n:,} frames of {len(names)} videos, one of {every}",),
        warnings=tuple(warned),
    )


def frames(file: Path) -> Iterator[tuple[float, Image.Image]]:
    """The frames of a video in order, each with its time in s."""
    kind = OF_PILLOW.get(file.suffix.lower())
    if kind is not None:
        time_ms = 0.0
        with whole_pictures(), Image.open(file, formats=(kind,)) as opened:
            for frame in ImageSequence.Iterator(opened):
                yield time_ms / 1000, picture(frame.copy())
                time_ms += frame.info.get("duration", 0)
        return
    try:
        import av
    except ImportError:
        raise DependencyError(
            f"{file.name} needs the package 'av', which is not installed; install it with: "
            "pip install av"
        ) from None
    with av.open(str(file)) as opened:
        for frame in opened.decode(video=0):
            yield float(frame.time or 0), frame.to_image()


class FrameReader:
    """Item i: most often the one after the last, so that a video is decoded once.

    Args:
        root: The folder of the videos.
        videos: ``(path below it, bytes, mtime_ns)`` of each.
        items: For each item the number of its video, and that of the frame in it.
    """

    def __init__(
        self, root: str, videos: list[tuple[str, int, int]], items: list[tuple[int, int]]
    ) -> None:
        self.root, self.videos, self.items = root, videos, items
        self._at: tuple[int, int] = (-1, 0)
        self._left: Iterator[tuple[float, Image.Image]] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        # What is open stays in its process.
        return {**vars(self), "_at": (-1, 0), "_left": iter(())}

    def __call__(self, i: int) -> Image.Image:
        video, number = self.items[i]
        name, size_bytes, mtime_ns = self.videos[video]
        file = Path(self.root, name)
        about = file.stat()
        if (about.st_size, about.st_mtime_ns) != (size_bytes, mtime_ns):
            raise DataError("it was changed after the run had listed it")
        if self._at[0] != video or self._at[1] > number:
            self._at, self._left = (video, 0), frames(file)
        while True:
            self._at = (video, self._at[1] + 1)
            try:
                _, frame = next(self._left)
            except Exception as error:
                self._at = (-1, 0)
                raise DataError(f"frame {number} cannot be read ({error!r})") from None
            if self._at[1] > number:
                return frame
