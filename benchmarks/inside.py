"""What it takes to look inside a model.

Run: python benchmarks/inside.py [layers] [gradients] [--pairs 5]
Prints medians over interleaved runs:

- `layers`: the table of layers of vit_b_16, in seconds beyond those of a process that imports
  torch and torchvision and does nothing;
- `gradients`: passes forward and backward with gradients captured at layers, beside the same passes
  without, of resnet18 and vit_b_16 (batches of 16, 224 px); and an extraction of the gradients at a
  late layer, which goes back no further.
"""

import argparse
import logging
import statistics
import subprocess
import sys
import time

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
BATCH, N_BATCHES = 16, 4


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


FIGURES = {"layers": layers, "gradients": gradients}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("figures", nargs="*", default=[*FIGURES])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    for name in options.figures:
        FIGURES[name](pairs=options.pairs)


if __name__ == "__main__":
    main()
