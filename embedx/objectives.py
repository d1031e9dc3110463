"""What gradients are of: one number a sample, made of the class scores that a model gives."""

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from embedx.errors import ConfigError, EmbedxError, LayerError, ModelError, ShapeError, first_line
from embedx.hooks import class_scores

log = logging.getLogger("embedx")

Objective = Literal["predicted", "loss"] | int


def scores_of(output: Any, *, n: int, title: str) -> Tensor:
    """The class scores in what a model gives for n samples: it, or its ``logits``.

    Args:
        output: What the model gives.
        n: How many samples went in.
        title: What the user calls the model, for the message.

    Returns:
        Shape ``(n, classes)``.

    Raises:
        ShapeError: There are none.
    """
    scores = class_scores(output)
    if scores is None or len(scores) != n:
        what = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ShapeError(
            f"this needs class scores of shape (n, classes), and {title} gives {what} for {n} "
            "samples; wrap it in a module whose forward gives such scores"
        )
    return scores


def require_class(unit: int, *, n_classes: int, key: str, title: str) -> None:
    """Raise ConfigError if a class is not among those that a model has scores of."""
    if not 0 <= unit < n_classes:
        raise ConfigError(
            f"{key}={unit} is out of range: {title} has scores of {n_classes:,} classes, numbered "
            f"0 to {n_classes - 1}"
        )


class Backward:
    """The backward pass of a batch from its objective, after which gradients at layers are there.

    The sum over the batch is what is differentiated, so that each sample has its own gradient,
    whatever else is in the batch, as long as the model looks at one sample at a time.

    Args:
        objective: ``predicted``, the score of the class with the highest one; ``loss``, the
            cross-entropy of the label; or the number of a class, for its score.
        title: What the user calls the model, for messages.
        label_names: Names of the labels, as far as they have any.
    """

    def __init__(self, objective: Objective, *, title: str, label_names: Sequence[str]) -> None:
        self._objective = objective
        self._title = title
        self._label_names = label_names
        self._is_said = False

    def run(self, output: Any, labels: Tensor | None, *, n: int) -> None:
        """One backward pass.

        Args:
            output: What the model gave, in a pass with gradients.
            labels: Shape ``(n,)``, whole numbers, -1 for none; for ``loss`` alone.
            n: How many samples went in.

        Raises:
            ConfigError: The objective is of a class that the model has no score of.
            LayerError: The scores depend on no layer that was captured, as far as torch knows.
            ModelError: The backward pass failed; the cause is attached.
            ShapeError: The model gives no class scores.
        """
        scores = scores_of(output, n=n, title=self._title)
        if not scores.requires_grad:
            raise LayerError(
                f"what {self._title} gives depends on none of the layers that gradients are wanted "
                "of: they come after it, or the model runs under torch.no_grad() or detaches; "
                "choose others"
            )
        with torch.enable_grad():
            total = self._total(scores.float(), labels)
        try:
            total.backward()  # type: ignore[no-untyped-call]
        except EmbedxError:
            raise
        except Exception as error:
            raise ModelError(
                f"the backward pass of {self._title} failed: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error

    def _total(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        if self._objective == "predicted":
            return scores.gather(1, scores.argmax(1, keepdim=True)).sum()
        n_classes = scores.shape[1]
        if self._objective != "loss":
            require_class(self._objective, n_classes=n_classes, key="objective", title=self._title)
            return scores[:, self._objective].sum()
        assert labels is not None
        self._require_labels(labels, n_classes)
        return torch.nn.functional.cross_entropy(
            scores, labels.long(), ignore_index=-1, reduction="sum"
        )

    def _require_labels(self, labels: Tensor, n_classes: int) -> None:
        highest = max(int(labels.max()), len(self._label_names) - 1)
        if n_classes < 2 or highest >= n_classes:
            raise ConfigError(
                f"objective=loss takes labels for numbers of classes, and they go up to {highest} "
                f"where {self._title} has scores of {n_classes:,}; choose a model that was trained "
                "on these labels, or objective=predicted"
            )
        if not self._is_said:
            self._is_said = True
            few = ", ".join(f"{name} for {i}" for i, name in enumerate(self._label_names[:3]))
            log.info(
                "the loss is that of the labels, taken for numbers of the %s classes of %s%s",
                f"{n_classes:,}",
                self._title,
                f": {few}{', ...' if len(self._label_names) > 3 else ''}" if few else "",
            )
