"""What it takes to look inside a model.

Run: python benchmarks/inside.py [--pairs 5]
Prints medians over interleaved runs of whole processes:

- the table of layers of vit_b_16 (`layers`), in seconds beyond those of a process that imports
  torch and torchvision and does nothing.
"""

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    layers(pairs=options.pairs)


if __name__ == "__main__":
    main()
