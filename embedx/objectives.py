"""What gradients are of: one number a sample, made of the class scores that a model gives."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embedx.errors import (
    ConfigError,
    EmbedxError,
    LayerError,
    ModelError,
    ShapeError,
    first_line,
    listed,
    nearest,
)
from embedx.hooks import Capture
from embedx.matrix import Array
from embedx.passes import class_scores

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
            if n_classes > 1
            else f"{key}={unit} is out of range: {title} has one score, which is {key}=0"
        )


def read_classes(classes: str | Sequence[str] | None) -> list[str] | None:
    """Names of classes in the order of the scores, as they are, or a name a line of a file.

    Raises:
        ConfigError: The file cannot be read, or a name is there twice.
    """
    if isinstance(classes, str):
        try:
            lines = Path(classes).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise ConfigError(
                f"classes={classes} cannot be read: {why}; name a text file with a name a line"
            ) from None
        classes = [line.strip() for line in lines if line.strip()]
    names = None if classes is None else list(classes)
    if names and (twice := [name for name, n in Counter(names).items() if n > 1]):
        at = [f"{twice[0]} ({i})" for i, name in enumerate(names) if name == twice[0]]
        raise ConfigError(
            f"classes names {twice[0]!r} {len(at)} times; give each class a name of its own, as by "
            f"its number: {listed(at)}"
        )
    return names


def class_of_label(
    label_names: Sequence[str],
    label_numbers: Sequence[int] | None,
    classes: Sequence[str] | None,
    *,
    n_classes: int,
    title: str,
) -> Array | None:
    """The number of the class that each label means.

    Args:
        label_names: Names of the labels; empty where labels are numbers of classes themselves.
        label_numbers: The number that each has in the data, where its labels are numbers.
        classes: Names of the classes, in the order of the scores.
        n_classes: How many scores there are.
        title: What the user calls the model, for messages.

    Returns:
        Shape ``(len(label_names),)``: by the names of ``classes``; without these, by the numbers,
        and of texts in their alphabetical order where there are as many as classes, which is said.
        None where labels are numbers of classes themselves.

    Raises:
        ConfigError: A label means no class, or which one is not known.
    """
    if classes is not None and len(classes) != n_classes:
        raise ConfigError(
            f"classes has {len(classes):,} names, and {title} has scores of {n_classes:,} classes; "
            "give one name each, in their order"
        )
    if not label_names:
        return None
    if classes is not None:
        if strange := [name for name in label_names if name not in classes]:
            raise ConfigError(
                f"the label {strange[0]!r} is none of the classes; the nearest are "
                + ", ".join(nearest(strange[0], classes))
            )
        return np.array([classes.index(name) for name in label_names])
    if label_numbers is not None:
        if not 0 <= min(label_numbers) <= max(label_numbers) < n_classes:
            raise ConfigError(
                f"the labels are numbers {min(label_numbers)} to {max(label_numbers)}, and {title} "
                f"has scores of {n_classes:,} classes, numbered 0 to {n_classes - 1}; choose a "
                "model that was trained on these labels, or say which class each is: classes=FILE"
            )
        return np.array(label_numbers)
    if len(label_names) != n_classes:
        raise ConfigError(
            f"which of the {n_classes:,} classes of {title} the labels mean is not known: "
            f"{listed(label_names)}; name the classes in the order of the scores: classes=FILE "
            "with a name a line, or classes=[A,B]"
            + (
                f" (where these names are numbers of classes, the lines are 0 to {n_classes - 1})"
                if all(name.isdecimal() for name in label_names)
                else ""
            )
        )
    order = sorted(label_names)
    log.warning(
        "the labels are taken for the classes of %s in alphabetical order, %s, as if it was "
        "trained on folders of these names; where its order is another, say it by classes=",
        title,
        listed([f"{name} is {number}" for number, name in enumerate(order)], most=4),
    )
    return np.array([order.index(name) for name in label_names])


def numbered(label_names: Sequence[str], classes: Array) -> str:
    """Which class each label is, in words."""
    pairs = zip(label_names, classes, strict=True)
    return listed([f"{name} is {number}" for name, number in pairs])


class Backward:
    """The backward pass of a batch from its objective, after which gradients at layers are there.

    The sum over the batch is what is differentiated, so that each sample has its own gradient,
    whatever else is in the batch, as long as the model looks at one sample at a time.

    Args:
        objective: ``predicted``, the score of the class with the highest one; ``loss``, the
            cross-entropy of the label; or the number of a class, for its score.
        got: The capture that the gradients are for.
        title: What the user calls the model, for messages.
        label_names: Names of the labels, as far as they have any.
        label_numbers: Their numbers in the data, where they are numbers there.
        classes: Names of the classes, in the order of the scores.
    """

    def __init__(
        self,
        objective: Objective,
        got: Capture,
        *,
        title: str,
        label_names: Sequence[str],
        label_numbers: Sequence[int] | None,
        classes: Sequence[str] | None,
    ) -> None:
        self._objective = objective
        self._got = got
        self._title = title
        self._label_names = label_names
        self._label_numbers = label_numbers
        self._known: Array | None = None
        self._classes = classes

    def run(self, output: Any, labels: Tensor | None, *, n: int) -> None:
        """One backward pass.

        Args:
            output: What the model gave, in a pass with gradients.
            labels: Shape ``(n,)``, whole numbers, -1 for none; for ``loss`` alone.
            n: How many samples went in.

        Raises:
            ConfigError: The objective is of a class that the model has no score of, or which
                class a label means is not known.
            LayerError: The scores depend on no layer that was captured, as far as torch knows.
            ModelError: The backward pass failed; the cause is attached.
            ShapeError: The model gives no class scores.
        """
        scores = scores_of(output, n=n, title=self._title)
        if not scores.requires_grad:
            raise LayerError(
                f"what {self._title} gives has no gradient: it runs under torch.no_grad(), or "
                "detaches; choose another objective or model"
            )
        with torch.enable_grad():
            total = self._total(scores.float(), labels)
        try:
            self._got.backward(total)
        except EmbedxError:
            raise
        except Exception as error:
            raise ModelError(
                f"the backward pass of {self._title} failed: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error

    def _total(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        n_classes = scores.shape[1]
        if self._objective not in ("predicted", "loss"):
            assert isinstance(self._objective, int)
            require_class(self._objective, n_classes=n_classes, key="objective", title=self._title)
            return scores[:, self._objective].sum()
        if n_classes < 2:
            raise ConfigError(
                f"objective={self._objective} takes scores of several classes, and {self._title} "
                "gives one score; its gradient is objective=0"
            )
        if self._objective == "predicted":
            return scores.gather(1, scores.argmax(1, keepdim=True)).sum()
        assert labels is not None
        return torch.nn.functional.cross_entropy(
            scores, self._as_classes(labels, n_classes), ignore_index=-1, reduction="sum"
        )

    def _as_classes(self, labels: Tensor, n_classes: int) -> Tensor:
        if self._known is None:
            self._known = class_of_label(
                self._label_names,
                self._label_numbers,
                self._classes,
                n_classes=n_classes,
                title=self._title,
            )
            if self._known is not None:
                log.info(
                    "the loss is that of the labels as classes of %s: %s",
                    self._title,
                    numbered(self._label_names, self._known),
                )
        if self._known is None:
            if int(labels.max()) >= n_classes:
                raise ConfigError(
                    f"objective=loss takes labels for numbers of classes, and they go up to "
                    f"{int(labels.max())} where {self._title} has scores of {n_classes:,}; choose "
                    "a model that was trained on these labels, or objective=predicted"
                )
            return labels.long()
        # The last one is that of -1, none.
        table = torch.as_tensor(np.append(self._known, -1), device=labels.device)
        return table[labels.long()]
