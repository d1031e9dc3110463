"""Watch a layer learn: train a small CNN on the digits, record it, draw the epochs side by side.

Run: python examples/watch_training.py [FOLDER]
The recorder copies what the layer gives during the forward passes that the training makes anyway.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import embedx

EPOCHS = 4


def train(out: Path) -> embedx.store.Embeddings:
    """Train, and record ``hidden`` in every epoch; rows are digits, in the order of the loop."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, layer in {
        "conv": nn.Conv2d(1, 16, 3, stride=2),
        "relu": nn.ReLU(),
        "flat": nn.Flatten(),
        "hidden": nn.Linear(16 * 3 * 3, 32),
        "act": nn.ReLU(),
        "head": nn.Linear(32, 10),
    }.items():
        model.add_module(name, layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with embedx.record(model, "hidden", out, overwrite=True) as recorder:
        for epoch in range(EPOCHS):
            for rows in torch.randperm(len(images)).split(64):
                loss = nn.functional.cross_entropy(
                    model(images[rows]), labels[rows], reduction="none"
                )
                recorder.batch(ids=rows, labels=labels[rows], epoch=epoch, loss=loss)
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()
    return embedx.open(out)


def draw(run: embedx.store.Embeddings, path: Path) -> Figure:
    """One map of all epochs, a panel each: the same digit can be followed from panel to panel."""
    coords = embedx.project(run, method="pca").coords
    epochs = np.asarray(run.metadata["epoch"])
    loss = np.asarray(run.metadata["loss"])
    figure = Figure(figsize=(4 * EPOCHS, 4.4), layout="constrained")
    panels = figure.subplots(1, EPOCHS, sharex=True, sharey=True)
    for epoch, panel in enumerate(panels):
        now = epochs == epoch
        panel.scatter(*coords[now].T, c=run.labels[now], cmap="tab10", s=6, linewidths=0)
        panel.set_title(f"epoch {epoch}, mean loss {loss[now].mean():.2f}")
        panel.set_xticks([])
        panel.set_yticks([])
    figure.savefig(path, dpi=120)
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/learning")
    run = train(folder)
    draw(run, folder / "epochs.png")
    print(run)
    print(f"to look at: {folder / 'epochs.png'}")
