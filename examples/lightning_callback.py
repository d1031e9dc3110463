"""``record`` as a callback of PyTorch Lightning, which calls it by the names of its methods.

With Lightning: ``Trainer(callbacks=[RecordLayers("encoder", "outputs/run", ids=lambda b: b[2])])``.
Run: python examples/lightning_callback.py [FOLDER], which needs no Lightning: a loop of a few lines
calls it as a Trainer would.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import embedx

try:
    from lightning.pytorch import Callback
except ImportError:  # it is found by its methods alone
    Callback = object


class RecordLayers(Callback):  # type: ignore[misc]
    """Record layers of a LightningModule over the epochs of its training.

    Args:
        points: Capture points of the module, such as ``encoder`` or ``model.layer4``.
        out: Folder for the file.
        ids: From a batch to the ids of its samples; None for the number of the row.
        labels: From a batch to its labels; None for none.
    """

    def __init__(
        self,
        points: str | list[str],
        out: str,
        *,
        ids: Callable[[Any], Any] | None = None,
        labels: Callable[[Any], Any] | None = None,
    ) -> None:
        self._points, self._out, self._ids, self._labels = points, out, ids, labels
        self._pause = contextlib.ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._recorder = embedx.record(pl_module, self._points, self._out, overwrite=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._recorder.batch(
            ids=self._ids(batch) if self._ids else None,
            labels=self._labels(batch) if self._labels else None,
            epoch=trainer.current_epoch,
        )

    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._pause.enter_context(self._recorder.paused())

    def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self._pause.close()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self._recorder.close()

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self._recorder.finish()


class Digits(nn.Module):
    """A LightningModule in all but name: a Trainer calls its steps, never the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels, _ = batch
        return nn.functional.cross_entropy(self.head(self.encoder(images)), labels)

    validation_step = training_step


class Trainer:
    """Calls a module and its callback in the order in which Lightning does."""

    current_epoch = 0

    def fit(self, module: Digits, batches: list[Any], callback: RecordLayers) -> None:
        optimizer = torch.optim.Adam(module.parameters())
        callback.on_fit_start(self, module)
        try:
            for self.current_epoch in range(2):
                for i, batch in enumerate(batches):
                    loss = module.training_step(batch, i)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    callback.on_train_batch_end(self, module, loss, batch, i)
                callback.on_validation_start(self, module)
                module.validation_step(batches[0], 0)
                callback.on_validation_end(self, module)
        except BaseException as error:
            callback.on_exception(self, module, error)
            raise
        callback.on_fit_end(self, module)


if __name__ == "__main__":
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    loader = [
        (images[rows], torch.tensor(digits.target)[rows], rows)
        for rows in torch.arange(len(images)).split(64)
    ]
    folder = sys.argv[1] if len(sys.argv) > 1 else "outputs/lightning"
    callback = RecordLayers("encoder", folder, ids=lambda b: b[2], labels=lambda b: b[1])
    Trainer().fit(Digits(), loader, callback)
    print(embedx.open(folder))
