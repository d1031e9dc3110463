"""Extraction of 512 JPEGs of 500x375 by resnet18, beside what one would use otherwise.

Run: python benchmarks/extract.py [--pairs 5] [--thingsvision PYTHON]
Prints medians over interleaved runs of one process, as ratios:

- beside a loop written by hand, which does what a notebook would: a Dataset that opens and
  transforms, a DataLoader with 2 workers, a hook, a list, one file at the end;
- beside thingsvision, whose environment is named by its Python (pip install thingsvision==2.7.3);
- beside the roofline 1 / (1 / forward rate + decode seconds / processors), of parts of our own
  pipeline measured alone in the same run;
- the share of the time that hook, copy and store take;
- five layers beside one, and a layer of the first third of resnet50 beside the whole network.

The weights are random: they do not change the work.
"""

import argparse
import contextlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset
from torchvision.models import ResNet18_Weights, resnet18

import embedx
from embedx import data, models, pooling, writing
from embedx.forward import forward_of
from embedx.inputs import Batches
from embedx.plans import Plan
from embedx.points import resolve_points
from embedx.rows import Rows
from embedx.threads import n_threads

N_IMAGES = 512
BATCH = 64


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


def timed(what: Callable[[], object]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def interleaved(runs: dict[str, Callable[[], float]], *, pairs: int) -> dict[str, list[float]]:
    """Seconds of each, in turn; the first round warms caches."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(pairs + 1):
        for name, run in runs.items():
            taken = run()
            if pair:
                seconds[name].append(taken)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, beside: str) -> str:
    """How many times as fast as the other, pair by pair."""
    pairs = [b / a for a, b in zip(seconds[name], seconds[beside], strict=True)]
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"


THINGSVISION = """
import contextlib, io, sys, time
from thingsvision import get_extractor
from thingsvision.utils.data import DataLoader, ImageDataset
root, out = sys.argv[1:]
extractor = get_extractor(
    model_name="resnet18", source="torchvision", device="cpu", pretrained=False
)
print("ready", flush=True)
for _ in sys.stdin:
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        transforms, backend = extractor.get_transformations(), extractor.get_backend()
        images = ImageDataset(root=root, out_path=out, backend=backend, transforms=transforms)
        batches = DataLoader(dataset=images, batch_size=64, backend=backend)
        rows = extractor.extract_features(
            batches=batches, module_name="avgpool", flatten_acts=True, output_type="ndarray"
        )
    assert rows.shape == (512, 512)
    print(time.perf_counter() - started, flush=True)
"""


@contextlib.contextmanager
def thingsvision(python: str, photos: Path, out: Path) -> Iterator[Callable[[], float]]:
    """A process that extracts once whenever it is asked, and says how long it took."""
    command = [python, "-c", THINGSVISION, str(photos), str(out)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        while process.stdout.readline().strip() != "ready":
            assert process.poll() is None

        def once() -> float:
            process.stdin.write("\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        yield once
        process.stdin.close()


def roofline(plan: Plan) -> tuple[float, float]:
    """Images a second of the forward pass alone, and seconds to read one image on one processor."""
    batches = Batches(
        plan.source,
        plan.model,
        batch_size=BATCH,
        num_workers=0,
        thumbnails=plan.thumbnails,
        only_pictures=False,
        first_row=0,
        end_row=N_IMAGES,
    )
    batches._n_threads = 1
    read = [timed(lambda i=i: batches[i]) / BATCH for i in range(3)]
    ready = [batches[i] for i in range(3)]
    with forward_of(plan) as forward:
        forward(ready[0], ready[0].pieces[0])
        rates = [
            BATCH / timed(lambda b=b: forward(b, b.pieces[0])) for _ in range(3) for b in ready
        ]
    return statistics.median(rates), statistics.median(read)


@contextlib.contextmanager
def watched() -> Iterator[list[float]]:
    """Seconds within hook, copy and store, added up while the block runs."""
    places = [
        (Rows, "reduce"),
        (Rows, "arrays"),
        (writing.Writer, "append"),
        (writing.Writer, "commit"),
    ]
    total = [0.0]
    depth = [0]

    def watch(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    total[0] += time.perf_counter() - started

        return call

    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, method in before:
        setattr(owner, name, watch(method))
    try:
        yield total
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--thingsvision", metavar="PYTHON")
    options = parser.parse_args()
    described = models.torchvision("resnet18", weights=None, layer="avgpool")
    plain = resnet18(weights=None).eval()
    plain.load_state_dict(described.module.state_dict())
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "photos").mkdir()
        make_photos(folder / "photos")
        photos = data.folder(str(folder / "photos"))

        def extract(model: Any = described, **how: Any) -> float:
            shutil.rmtree(folder / "out", ignore_errors=True)
            return timed(
                lambda: embedx.extract(model, photos, batch_size=BATCH, out=folder / "out", **how)
            )

        def hand() -> float:
            seconds = timed(lambda: by_hand(plain, folder / "photos", folder / "h.h5", 2, BATCH))
            with h5py.File(folder / "h.h5") as file:
                wanted = file["embeddings"][()]
            got = embedx.open(folder / "out").rows()[1]
            assert np.abs(got - wanted).max() / np.abs(wanted).max() < 1e-5
            return seconds

        runs = {
            "embedx bf16": lambda: extract(precision="bf16"),
            "embedx": extract,
            "by hand": hand,
        }
        if options.thingsvision:
            (folder / "tv").mkdir()
            other = thingsvision(options.thingsvision, folder / "photos", folder / "tv")
            runs["thingsvision"] = stack.enter_context(other)
        seconds = interleaved(runs, pairs=options.pairs)
        for what, values in seconds.items():
            print(f"{what:12} {N_IMAGES / statistics.median(values):6.1f} images/s")
        for beside in list(runs)[2:]:
            for what in ("embedx", "embedx bf16"):
                print(f"{what}: {ratio(seconds, what, beside)} times as fast as {beside}")

        cpus = n_threads()
        for precision, what in (("fp32", "embedx"), ("bf16", "embedx bf16")):
            plan = Plan(
                model=described,
                source=photos,
                rows=range(N_IMAGES),
                points=resolve_points(described.module, "avgpool"),
                poolings=pooling.per_point("auto", n_points=1),
                normalize=[False],
                device=torch.device("cpu"),
                precision=precision,  # type: ignore[arg-type]
                dtype=np.dtype(np.float32),
                batch_size=BATCH,
                num_workers=0,
                save_outputs=False,
                thumbnails=32,
                on_error="skip",
                only_pictures=False,
                objective=None,
                classes=None,
                ablations=[],
                ablated=[],
            )
            shares = []
            for _ in range(options.pairs):
                rate, read_s = roofline(plan)
                best = 1 / (1 / rate + read_s / cpus)
                shares.append(N_IMAGES / extract(precision=precision) / best)
            print(
                f"{what}: {statistics.median(shares):.2f} of the roofline "
                f"({min(shares):.2f} to {max(shares):.2f}; forward {rate:.1f} images/s, "
                f"reading {read_s * 1e3:.1f} ms an image)"
            )
        shares = []
        for _ in range(options.pairs):
            with watched() as total:
                whole = extract()
            shares.append(total[0] / whole)
        print(f"hook, copy and store take {statistics.median(shares):.2%} of the time")

        deep = models.torchvision("resnet50", weights=None, layer="avgpool")
        five = ["layer1", "layer2", "layer3", "layer4", "avgpool"]
        seconds = interleaved(
            {
                "five layers": lambda: extract(layers=five),
                "one layer": extract,
                "layer1 of resnet50": lambda: extract(deep, layers="layer1"),
                "all of resnet50": lambda: extract(deep),
            },
            pairs=min(options.pairs, 3),
        )
        print(f"five layers take {ratio(seconds, 'one layer', 'five layers')} of one in one pass")
        early = ratio(seconds, "all of resnet50", "layer1 of resnet50")
        print(f"layer1 of resnet50 alone takes {early} of the whole network")


if __name__ == "__main__":
    main()
