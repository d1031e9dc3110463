"""What it takes to look inside a model.

Run: python benchmarks/inside.py gradcam [--pairs 5] [--batch 16]
Prints medians over interleaved runs:

- Grad-CAM of a batch of resnet18 and of resnet50 at 224 px, at layer4, by embedx and by the package
  grad-cam (pip install "grad-cam==1.5.*"), and how far their maps are from each other when both are
  scaled to 0 to 1. Both have the network and the batch in memory, and give maps of the batch.
"""

import argparse
import statistics
import time
from collections.abc import Callable


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def gradcam(*, pairs: int, batch: int) -> None:
    import numpy as np
    import torch
    import torchvision
    from PIL import Image
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    from embedx import hooks, saliency
    from embedx.inputs import channels_last

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batches of {batch}")
    point = hooks.parse_point("layer4")
    for name in ("resnet18", "resnet50"):
        torch.manual_seed(0)
        module = torchvision.models.get_model(name, weights=None).eval()
        x, classes = torch.randn(batch, 3, 224, 224), torch.arange(batch)
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
            f"{name}: embedx {batch / mine:.1f} images/s, grad-cam {batch / other_s:.1f} images/s, "
            f"{ratio:.2f} times as fast (median of {pairs} pairs), maps {apart:.3f} apart at most"
        )
        del other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["gradcam"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    gradcam(pairs=options.pairs, batch=options.batch)


if __name__ == "__main__":
    main()
