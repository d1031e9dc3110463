"""What all methods of `explain` have in common: samples, a network at work, parts."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedx import fold, overlays, saliency, sources
from embedx.errors import (
    DataError,
    ShapeError,
)
from embedx.inputs import (
    Batches,
    arithmetic,
    channels_last,
    draws_unseen,
    is_by_sample,
    placed,
    random_states,
    seed_all,
)
from embedx.matrix import Array
from embedx.models import Model
from embedx.passes import on_device, run_model, undisturbed
from embedx.pictures import whole_pictures
from embedx.points import Point
from embedx.sources import Source

log = logging.getLogger("embedx")

OF_SEVERAL_PASSES = ("integrated_gradients", "occlusion")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is explained and how: the arguments of :func:`embedx.explain`, looked up and checked.

    Attributes:
        rows: Numbers of the samples, shape ``(m,)``.
        points: The layers; None where they are chosen by what the network gives.
        of_globs: Those of them that only globs stand for, and that may give no feature maps.
        only_pictures: Whether items must be pictures, as a preprocessing was given for them.
    """

    model: Model
    source: Source
    rows: Array
    method: str
    points: list[Point] | None
    of_globs: Sequence[Point]
    target: int | str | Sequence[int] | None
    class_names: list[str] | None
    channels: str | Sequence[int]
    n_channels: int
    baseline: float | None
    steps: int
    window: int | None
    stride: int | None
    batch_size: int
    device: torch.device
    only_pictures: bool

    @property
    def n_parts(self) -> int:
        """How many batches there are, each of which is a part of the work."""
        return -(-len(self.rows) // self.batch_size)

    def part(self, number: int) -> "Plan":
        """The plan of a batch alone."""
        some = slice(number * self.batch_size, (number + 1) * self.batch_size)
        target = self.target
        if target is not None and not isinstance(target, (int, str)):
            target = target[some]
        return dataclasses.replace(self, rows=self.rows[some], target=target)


@dataclasses.dataclass
class Samples:
    """A batch of m samples.

    Attributes:
        places: Of those that were read.
        inputs: They, on the CPU, as they were read; None where none was.
        pictures: As shown, shape ``(h, w, 3)`` uint8, by place.
        reasons: Why one failed, by place.
        labels: Shape ``(m,)`` int32, -1 for none; None without labels.
        normalize: From what was read to what enters.
    """

    places: list[int]
    inputs: Tensor | None
    pictures: dict[int, Array]
    reasons: dict[int, str]
    labels: Array | None
    normalize: Callable[[Tensor], Tensor]


def read_batch(plan: Plan) -> Samples:
    """Read a batch as extract does; a sample that cannot be read fails alone."""
    source, rows = plan.source, plan.rows
    prepared = plan.model.preprocess
    draws = source.draws or (prepared is not None and prepared.is_own)

    def read(place: int) -> Any:
        row = int(rows[place])
        if draws:  # as of the row in the whole, and not of its place among those chosen
            sources.seed_random(row)
        return source.read(row)

    some = dataclasses.replace(
        source,
        ids=[source.ids[row] for row in rows],
        read=read,
        labels=None if source.labels is None else np.asarray(source.labels)[rows],
        item_hashes=None,
        metadata={},
    )
    batches = Batches(
        some, plan.model, batch_size=plan.batch_size, only_pictures=plan.only_pictures
    )
    with contextlib.ExitStack() as stack:
        if source.reads_files:
            stack.enter_context(whole_pictures())
        if draws:
            stack.enter_context(sources.random_put_back())
        batch = batches[0]
    if batch.fatal is not None:
        raise batch.fatal
    labels = batch.labels if source.labels_in_items else some.labels
    samples = Samples([], None, {}, dict(batch.reasons), labels, lambda tensor: tensor)
    for piece in batch.pieces:  # one, or none where all have failed
        inputs = piece.inputs
        if not isinstance(inputs, Tensor) or inputs.ndim != 4:
            shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else ", ".join(inputs)
            raise ShapeError(
                f"what is explained are pictures (n, c, h, w), and what enters "
                f"{plan.model.name} is {shape}"
            )
        samples.places = [i for i in range(batch.size) if i not in batch.reasons]
        samples.inputs = kept = inputs[samples.places]
        if not batch.are_pixels and not kept.is_floating_point():
            raise ShapeError(
                f"the inputs are {str(kept.dtype).removeprefix('torch.')}, which have no gradient; "
                "give floats, or pictures"
            )
        if batch.are_pixels and plan.model.preprocess is not None:
            samples.normalize = plan.model.preprocess.normalize
        shown = kept.numpy() if batch.are_pixels else kept.detach().float().numpy()
        for place, one in zip(samples.places, shown, strict=True):
            samples.pictures[place] = overlays.shown(one)
    return samples


Enter = Callable[[Tensor, int], Tensor]


@contextlib.contextmanager
def running(plan: Plan) -> Iterator[Enter]:
    """The network on its device, as it will be put back; gives what makes a batch enter, of which
    it is told the number of the first row."""
    module = plan.model.module
    is_known = fold.is_known(module)
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_device(module, plan.device))
        stack.enter_context(undisturbed(module, device=plan.device))
        stack.enter_context(arithmetic("fp32"))
        stack.enter_context(saliency.ready(module))

        def enter(tensor: Tensor, row: int) -> Tensor:
            seed_all(row, plan.device)
            inputs = placed(tensor, plan.device)
            if is_known:
                inputs = channels_last(inputs)
            assert isinstance(inputs, Tensor)
            return inputs

        yield enter


@dataclasses.dataclass
class Part:
    """What was found of a batch; beside it there is a picture of each sample.

    Attributes:
        reasons: Why samples failed, by their place in the batch.
        arrays: Of the samples.
        facts: Plain values.
    """

    reasons: dict[int, str]
    arrays: dict[str, Array] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Explainer:
    """The network at work, batch by batch.

    What all batches have in common, such as the layer, is taken from the first sample that can be
    explained, whoever makes which batches.

    Args:
        plan: Of the whole.
        enter: What makes a batch enter.
        say: Called with what is to be told of the whole.
    """

    def __init__(self, plan: Plan, enter: Enter, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._enter = enter
        self._say = say
        self._read: tuple[int, Plan, Samples] | None = None
        self._is_set_up = False

    def part(self, number: int, folder: Path) -> Part:
        """Explain a batch, with a picture of each sample in the folder."""
        raise NotImplementedError

    def _samples(self, number: int) -> tuple[Plan, Samples]:
        """A batch with its plan; the last one is kept."""
        if self._read is None or self._read[0] != number:
            some = self._plan.part(number)
            self._read = number, some, read_batch(some)
        return self._read[1:]

    def _set_up(self) -> None:
        """Make sure that what all batches have in common is known; one must have a good sample."""
        number = 0
        while not self._is_set_up:
            some, samples = self._samples(number)
            self._is_set_up = self._set_up_by(some, samples)
            if self._is_set_up:
                self._require_drawn_none(some, samples)
                assert samples.inputs is not None
                are_pixels = samples.inputs.dtype == torch.uint8
                if words := self._plan.model.told_of(samples.inputs, are_pixels=are_pixels):
                    self._say(words)
            number += 1

    def _require_drawn_none(self, some: Plan, samples: Samples) -> None:
        """See by a pass whether the network draws random numbers.

        Raises:
            ModelError: It does, and its code is taken for such that does not.
        """
        plan = self._plan
        assert samples.inputs is not None
        row = int(some.rows[samples.places[0]])
        inputs = self._enter(samples.normalize(samples.inputs[:1]), row)
        states = random_states(plan.device)
        with torch.no_grad():
            run_model(plan.model.module, inputs, title=plan.model.name)
        if random_states(plan.device) == states:
            return
        if is_by_sample(plan.model):
            raise draws_unseen(plan.model, what="map")
        if plan.method in OF_SEVERAL_PASSES:
            log.warning(
                "%s draws random numbers in its passes, in eval mode too, and others in each pass "
                "of %s: what its maps add up is noise in part",
                plan.model.name,
                plan.method,
            )

    def _set_up_by(self, some: Plan, samples: Samples) -> bool:
        """The same by one batch, if it has a good sample."""
        raise NotImplementedError


def require_some(reasons: Mapping[int, str], plan: Plan) -> None:
    """Raise DataError if all samples failed."""
    if len(reasons) == len(plan.rows):
        place, reason = min(reasons.items())
        raise DataError(
            f"every one of the {len(plan.rows):,} samples failed; the first, "
            f"{plan.source.ids[plan.rows[place]]}: {reason}"
        )


def say_failed(reasons: Mapping[int, str], plan: Plan) -> None:
    for place, reason in sorted(reasons.items())[:3]:
        row = plan.rows[place]
        log.warning("failed row %s, %s: %s", row, plan.source.ids[row], reason)
    if len(reasons) > 3:
        log.warning("and %s more failed", len(reasons) - 3)


def shown_samples(
    plan: Plan, places: Sequence[int], pictures: Mapping[int, Array]
) -> list[overlays.Sample]:
    rows = [int(plan.rows[place]) for place in places]
    return [
        overlays.Sample(plan.source.ids[row], row, pictures[place])
        for place, row in zip(places, rows, strict=True)
    ]


def random_words(model: Model) -> str:
    """What a picture must say first, for it travels alone."""
    return "RANDOM weights, " if model.weights.startswith("random") else ""
