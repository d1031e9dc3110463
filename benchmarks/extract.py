"""Extraction of 500 JPEGs of 500x375 by resnet18 beside a loop written by hand.

Run: python benchmarks/extract.py [--workers 2] [--batch-size 64] [--pairs 5]
Prints medians over interleaved pairs in one process. The loop does what a notebook would: a
Dataset that opens and transforms, a DataLoader, a hook, a list, one file at the end. The weights
are random: they do not change the work.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset
from torchvision.models import ResNet18_Weights, resnet18

import embedx
from embedx import data, models

N_IMAGES = 500


def make_photos(folder: Path) -> None:
    """Crops of two real photos, so that the JPEGs are as hard to decode as photos are."""
    rng = np.random.default_rng(0)
    photos = [Image.fromarray(image) for image in load_sample_images().images]
    for i in range(N_IMAGES):
        x, y = rng.integers(0, 640 - 500), rng.integers(0, 427 - 375)
        crop = photos[i % 2].crop((x, y, x + 500, y + 375))
        if rng.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        crop.save(folder / f"{i:04d}.jpg", quality=90)


class Photos(Dataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))
        self.transform = ResNet18_Weights.DEFAULT.transforms()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        image = Image.open(self.paths[i]).convert("RGB")
        tensor: torch.Tensor = self.transform(image)
        return tensor


def by_hand(model: torch.nn.Module, folder: Path, out: Path, workers: int, batch: int) -> None:
    rows: list[np.ndarray] = []
    hook = model.avgpool.register_forward_hook(
        lambda _module, _args, output: rows.append(output.flatten(1).numpy())
    )
    loader = DataLoader(Photos(folder), batch_size=batch, num_workers=workers)
    with torch.inference_mode():
        for images in loader:
            model(images)
    hook.remove()
    with h5py.File(out, "w") as file:
        file["embeddings"] = np.concatenate(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    described = models.torchvision("resnet18", weights=None, layer="avgpool")
    plain = resnet18(weights=None).eval()
    plain.load_state_dict(described.module.state_dict())
    seconds: dict[str, list[float]] = {"embedx": [], "by hand": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photos").mkdir()
        make_photos(folder / "photos")
        for pair in range(options.pairs + 1):
            out = folder / str(pair)
            out.mkdir()
            started = time.perf_counter()
            run = embedx.extract(
                described,
                data.folder(str(folder / "photos")),
                num_workers=options.workers,
                batch_size=options.batch_size,
                out=out,
            )
            middle = time.perf_counter()
            by_hand(plain, folder / "photos", out / "hand.h5", options.workers, options.batch_size)
            ended = time.perf_counter()
            with h5py.File(out / "hand.h5") as file:
                difference = np.abs(run.rows()[1] - file["embeddings"][()]).max()
                assert difference / np.abs(file["embeddings"][()]).max() < 1e-5
            if pair:  # the first warms caches
                seconds["embedx"].append(middle - started)
                seconds["by hand"].append(ended - middle)
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:8} {median:6.2f} s  {N_IMAGES / median:6.1f} images/s")
    pairs = [hand / ours for ours, hand in zip(*seconds.values(), strict=True)]
    print(
        f"speed    {statistics.median(pairs):6.2f}  times the loop by hand "
        f"(median of {options.pairs} pairs, {min(pairs):.2f} to {max(pairs):.2f})"
    )


if __name__ == "__main__":
    main()
