"""What it takes to look inside a model.

Run: python benchmarks/inside.py [layers] [gradients] [gradcam] [--pairs 5]
Prints medians over interleaved runs:

- `layers`: the table of layers of vit_b_16, in seconds beyond those of a process that imports
  torch and torchvision and does nothing;
- `gradients`: passes forward and backward with gradients captured at layers, beside the same passes
  without, of resnet18 and vit_b_16 (two batches of 8, 224 px); and an extraction of gradients at a
  late layer, which goes back no further;
- `gradcam`: Grad-CAM of a batch of resnet18 and of resnet50 at 224 px, at layer4, beside the
  package grad-cam (pip install "grad-cam==1.5.*"), and how far their maps are from each other when
  both are scaled to 0 to 1. Both have network and batch in memory, and give maps of the batch.
"""

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

IMPORTS = [sys.executable, "-c", "import torch, torchvision"]
LAYERS = [sys.executable, "-m", "embedx", "layers", "model=vit_b_16", "model.weights=null"]


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def layers(*, pairs: int) -> None:
    rounds = [(seconds(IMPORTS), seconds(LAYERS)) for _ in range(pairs + 1)][1:]  # a warm disk
    imports, whole = (statistics.median(column) for column in zip(*rounds, strict=True))
    beyond = [b - a for a, b in rounds]
    print(f"import torch, torchvision      {imports:.2f} s")
    print(f"embedx layers model=vit_b_16   {whole:.2f} s")
    print(
        f"beyond the imports             {statistics.median(beyond):.2f} s "
        f"({min(beyond):.2f} to {max(beyond):.2f})"
    )


GRADIENTS = {
    "resnet18": ["conv1:grad", "layer2:grad", "layer4:grad"],
    "vit_b_16": ["conv_proj:grad", "encoder.layers.encoder_layer_5:grad", "heads:grad_input"],
}
LATE = {"resnet18": "layer4:grad", "vit_b_16": "encoder.layers.encoder_layer_11:grad"}
BATCH, N_BATCHES = 8, 2


def gradients(*, pairs: int) -> None:
    import tempfile

    import torch
    import torchvision

    import embedx

    logging.getLogger("embedx").setLevel(logging.ERROR)
    x = torch.randn(BATCH * N_BATCHES, 3, 224, 224, generator=torch.Generator().manual_seed(0))

    def passes(model: torch.nn.Module) -> None:
        for batch in x.split(BATCH):
            scores = model(batch)
            scores.gather(1, scores.argmax(1, keepdim=True)).sum().backward()
            model.zero_grad()

    for name, points in GRADIENTS.items():
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None).eval()
        took: dict[str, list[float]] = {"plain": [], "captured": [], "extracted": []}
        for _ in range(pairs + 1):
            started = time.perf_counter()
            passes(model)
            took["plain"].append(time.perf_counter() - started)
            started = time.perf_counter()
            with embedx.capture(
                model, points, reduce=lambda _, gradient: gradient.flatten(1)[:, :9]
            ):
                passes(model)
            took["captured"].append(time.perf_counter() - started)
            started = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=".") as out:
                embedx.extract(
                    model, x, layers=LATE[name], pooling="norm", batch_size=BATCH, out=out
                )
            took["extracted"].append(time.perf_counter() - started)
        for kind, what in (
            ("captured", f"gradients at {len(points)} layers from the first on, captured"),
            ("extracted", f"{LATE[name]} of an extraction, file included"),
        ):
            ratios = [a / b for a, b in zip(took[kind][1:], took["plain"][1:], strict=True)]
            print(
                f"{name}: {what}: {statistics.median(ratios):.2f} of plain passes forward and "
                f"backward ({min(ratios):.2f} to {max(ratios):.2f})"
            )


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def gradcam(*, pairs: int) -> None:
    import numpy as np
    import torch
    import torchvision
    from PIL import Image
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    from embedx import hooks, saliency
    from embedx.inputs import channels_last
    from embedx.points import parse_point

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batches of {BATCH}")
    point = parse_point("layer4")
    for name in ("resnet18", "resnet50"):
        torch.manual_seed(0)
        module = torchvision.models.get_model(name, weights=None).eval()
        x, classes = torch.randn(BATCH, 3, 224, 224), torch.arange(BATCH)
        network = saliency.look(module, x[:1], title=name)
        with hooks.Capture(module, [point]) as got, torch.no_grad():
            module(x[:1])
            layer = saliency.as_layer(network, point, got["layer4"], n=1)
        run = saliency.Scored(module, name)
        maps: dict[str, np.ndarray] = {}

        def ours(run=run, x=x, classes=classes, layer=layer, maps=maps) -> None:
            inputs = channels_last(x)  # as the stage does with networks that it knows
            maps["ours"] = saliency.gradcam(run, inputs, classes, layer=layer).maps.numpy()

        other = GradCAM(module, [module.layer4])

        def theirs(other=other, x=x, classes=classes, maps=maps) -> None:
            maps["theirs"] = other(x, [ClassifierOutputTarget(int(one)) for one in classes])

        rounds = []
        for _ in range(pairs + 1):
            with saliency.ready(module):
                first = seconds_of(ours)
            rounds.append((first, seconds_of(theirs)))
        mine, other_s = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        ratio = statistics.median(b / a for a, b in rounds[1:])

        def scaled(one: np.ndarray) -> np.ndarray:
            large = np.asarray(Image.fromarray(one).resize((224, 224), Image.Resampling.BILINEAR))
            return (large - large.min()) / (large.max() - large.min() + 1e-9)

        apart = max(
            float(np.abs(scaled(a) - b).max())
            for a, b in zip(maps["ours"], maps["theirs"], strict=True)
        )
        print(
            f"{name}: embedx {BATCH / mine:.1f} images/s, grad-cam {BATCH / other_s:.1f} images/s, "
            f"{ratio:.2f} times as fast (median of {pairs} pairs), maps {apart:.3f} apart at most"
        )
        del other


FIGURES = {"layers": layers, "gradients": gradients, "gradcam": gradcam}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("figures", nargs="*", default=[*FIGURES])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    for name in options.figures:
        FIGURES[name](pairs=options.pairs)


if __name__ == "__main__":
    main()
