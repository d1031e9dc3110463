"""What further passes of the first batches show of a network, and the rows alone do not."""

import contextlib
import functools
import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor, nn

from embedx import hooks
from embedx.ablations import Ablation, Seen
from embedx.errors import LayerError, ModelError, ShapeError, listed
from embedx.fingerprints import code_sha256, state_marks, value_sha256
from embedx.inputs import (
    Batch,
    Batches,
    Inputs,
    Piece,
    apart,
    mapped,
    seed_all,
    start_worker,
    started,
    tensors_of,
    workers_said,
)
from embedx.padding import Look, PaddingLook, copied, gives_alike, is_near
from embedx.passes import FAST_PATHS_OFF, class_scores, tensors_in
from embedx.plans import Plan
from embedx.sources import random_put_back

log = logging.getLogger("embedx")


class Looks(Look):
    """Looks at all that further passes show, each once it can be taken."""

    def __post_init__(self) -> None:
        self._padding = PaddingLook(
            self._plan, self._got, self._rows, self._seen, self._run, self._is_known
        )
        self._stack = contextlib.ExitStack()
        self._are_changes_looked_at = self._plan.objective is None and not self._plan.ablated
        self._are_samples_looked_at = False
        self._are_collated_looked_at = self._plan.source.collate is None
        self._are_passes_compared = self._plan.objective is not None or bool(self._plan.ablated)

    @property
    def are_due(self) -> bool:
        """Whether the next pass may be one to look at."""
        are_first = not (self._are_samples_looked_at and self._are_passes_compared)
        return are_first or self._padding.are_due

    def end(self) -> None:
        """Take the ablations away again."""
        self._stack.close()

    def before_pass(self, inputs: Inputs, labels: Tensor | None, *, n: int, seed: int) -> None:
        """Before the first pass: set the ablations, and see that nothing else changes by them.

        Raises:
            LayerError: What is asked for changes what the model gives.
        """
        if not self._are_changes_looked_at:
            self._are_changes_looked_at = True
            self._look_at_changes(inputs, labels, n=n, seed=seed)

    def after_pass(
        self,
        batch: Batch,
        piece: Piece,
        inputs: Inputs,
        labels: Tensor | None,
        output: Any,
        *,
        seed: int,
        draws: bool,
        keeps: bool,
        enter: Callable[[Batch, Piece, int], Inputs],
    ) -> None:
        """See what a pass and some more like it show; what was captured is another afterwards.

        Args:
            batch: What was read.
            piece: What of it entered.
            inputs: That, as it entered.
            labels: Theirs.
            output: What the model gave.
            seed: Of the pass.
            draws: Whether a pass draws random numbers, so that rows cannot be compared.
            keeps: Whether the first pass made something that stays.
            enter: What of a batch enters the network, with the seed of the pass; what it is besides
                goes to the rows.

        Raises:
            ModelError: A text has another row when padded.
            ShapeError: What a layer gives is not one row a sample, or not of the mask's tokens.
        """
        n = piece.size
        captured: dict[str, Tensor] = {}
        if n > 1 and piece.rows is None and not self._are_collated_looked_at:
            self._are_collated_looked_at = True
            if not (draws or keeps or self._plan.source.draws):
                captured = {one.name: self._got[one.name].clone() for one in self._plan.points}
        if not self._are_passes_compared:
            self._are_passes_compared = True
            if n == 1 and not (self._is_known or draws or keeps):  # of more another look shows it
                self._say_of_draws(inputs, labels, seed=seed)
        if not self._are_samples_looked_at and n > 1:
            self._are_samples_looked_at = True
            by_chance = {size for one in tensors_of(inputs) for size in one.shape[1:]}
            by_chance |= self._rows.other_sizes | self._seen.sizes
            by_chance |= {size for one in tensors_in(output) for size in one.shape[1:]}
            # A layer of the user's own may have one axis more, of codes or queries.
            may_mix = not (self._is_known and self._plan.is_by_sample)
            if (may_mix and not keeps) or n in by_chance:
                self._require_samples_first(
                    inputs, labels, output, n=n, draws=draws, may_mix=may_mix
                )
        self._padding.after_pass(batch, inputs, labels, output, seed=seed, draws=draws, keeps=keeps)
        if captured:
            self._say_of_collating(batch, captured, labels, enter)

    def _say_of_collating(
        self,
        batch: Batch,
        before: dict[str, Tensor],
        labels: Tensor | None,
        enter: Callable[[Batch, Piece, int], Inputs],
    ) -> None:
        """Say which rows are others where their items are collated alone, as without padding.

        Where processes read the data one of them reads the items again: what a Dataset opens on
        first use must not be open here when others are forked.
        """
        plan, rows, seen = self._plan, self._rows, self._seen
        every = Batches(
            plan.source,
            plan.model,
            batch_size=1,
            only_pictures=plan.only_pictures,
            first_row=batch.start,
            end_row=batch.start + batch.size,
        )
        spread = {round(j * (batch.size - 1) / (_COLLATED - 1)) for j in range(_COLLATED)}
        chosen = sorted(spread - batch.reasons.keys())
        n_workers = min(1, plan.num_workers)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.Subset(every, chosen),
            batch_size=None,
            num_workers=n_workers,
            worker_init_fn=start_worker,
        )
        with workers_said(n_workers), random_put_back():
            alone = list(started(loader))
        held = rows.mask, seen.strangers, rows.picture
        others: set[str] = set()
        for i, one in zip(chosen, alone, strict=True):
            if one.fatal is not None or one.reasons or not one.pieces:
                continue
            label = None if labels is None else labels[[i]]
            with contextlib.suppress(ModelError, LayerError, ShapeError):  # it takes no single one
                self._run(enter(one, one.pieces[0], one.start), label, 1)
                others |= {
                    name
                    for name, row in before.items()
                    if not gives_alike(plan, self._got[name], row[[i]])
                }
        rows.mask, seen.strangers, rows.picture = held
        if others:
            log.warning(
                "%s: rows hang on the other items of their batch by the collate_fn, as on the "
                "longest of them where it pads: an item that is collated alone has another one; "
                "let %s leave padding out, or take batch_size=1",
                listed(sorted(others)),
                plan.model.name,
            )

    def _say_of_draws(self, inputs: Inputs, labels: Tensor | None, *, seed: int) -> None:
        """Say where the same sample has another row in another pass: by a generator of its own."""
        before = {point.name: self._got[point.name].clone() for point in self._plan.points}
        seed_all(seed, self._plan.device)
        self._run(copied(inputs), labels, 1)
        others = [
            name
            for name, row in before.items()
            if not gives_alike(self._plan, self._got[name], row)
        ]
        if others:
            log.warning(
                "%s: a sample has another row in each pass: %s draws from a generator that no seed "
                "is known of",
                listed(others),
                self._plan.model.name,
            )

    def _look_at_changes(self, inputs: Inputs, labels: Tensor | None, *, n: int, seed: int) -> None:
        plan, got = self._plan, self._got
        module, title = plan.model.module, plan.model.name
        if plan.objective is not None:
            got.remove()
        others = [point for point in plan.points if point.what in ("output", "input")]
        found = []
        with (
            hooks.Capture(module, others, reduce=self._rows.reduce, only_here=True) as before,
            FAST_PATHS_OFF,
        ):
            for _ in range(2):
                output = self._plain(inputs, seed=seed)
                found.append([output, {one.name: before[one.name].clone() for one in others}])
        got.set()
        plain: list[Any] | None = found[0]
        got.is_verified = gives_alike(plan, *found)
        if not got.is_verified:  # then nothing can be told by it
            plain = None
            log.warning(
                "%s gives something else in each pass, so that it cannot be seen whether it does "
                "so because %s is asked for",
                title,
                _asked_for(plan),
            )
        if plan.ablated:
            ablating = _ablating(plan, self._seen)
            ablating.is_verified = got.is_verified
            self._stack.callback(ablating.remove)
            self._seen.is_plain = True
            seed_all(seed, plan.device)
            output = self._run(copied(inputs), labels, n)
            self._seen.is_plain = False
            ablating.require_fired()
            _require_same(plan, plain, [output, {one.name: got[one.name] for one in others}])
            rows_before = {point.name: got[point.name] for point in plan.points}
            seed_all(seed, plan.device)
            self._run(copied(inputs), labels, n)
            if all(_is_same(rows_before[key], got[key]) for key in rows_before):
                log.warning(
                    "the ablations change none of the rows of the first batch: they are of layers "
                    "that do not lead to %s, or change no number",
                    ", ".join(rows_before),
                )
        elif plan.objective is not None:
            seed_all(seed, plan.device)
            output = self._run(copied(inputs), labels, n)
            _require_same(plan, plain, [output, {one.name: got[one.name] for one in others}])
        seed_all(seed, plan.device)

    def _others_alone(
        self,
        alone: Callable[[int], dict[str, Tensor]],
        before: dict[str, Tensor],
        *,
        n: int,
    ) -> list[str]:
        """What gives some of n samples another row by themselves than in their batch.

        Such as where all are cut to the longest of them, which two samples show by chance alone.
        """
        mixed: set[str] = set()
        for i in {round(j * (n - 1) / (_ALONE - 1)) for j in range(_ALONE)}:
            with contextlib.suppress(ModelError, LayerError, ShapeError):  # it takes no single one
                found = alone(i)
                is_other = (
                    len(now) == 1 and not gives_alike(self._plan, now, before[title][[i]])
                    for title, now in found.items()
                )
                mixed |= set(itertools.compress(found, is_other))
        return sorted(mixed)

    def _require_samples_first(
        self,
        inputs: Inputs,
        labels: Tensor | None,
        output: Any,
        *,
        n: int,
        draws: bool,
        may_mix: bool,
    ) -> None:
        """See by two samples alone that a row is one a sample, and has no axis of the batch.

        Args:
            inputs: Of the n samples.
            labels: Theirs.
            output: What the model gave for them.
            n: How many, at least 2.
            draws: Whether a pass draws random numbers, so that rows cannot be compared.
            may_mix: Whether the network may see the samples of a batch together.

        Raises:
            ShapeError: The first axis of what a layer gives is not that of the samples, or another
                one is as long as there are of them.
        """

        plan, got, rows = self._plan, self._got, self._rows

        def kept(output: Any) -> dict[str, Tensor]:
            found = {f"layer {point.name}": got[point.name] for point in plan.points}
            scores = class_scores(output)
            if scores is not None and (plan.save_outputs or plan.objective is not None):
                found[f"the output of {plan.model.name}"] = scores
            return found

        def again(rows_of: list[int]) -> dict[str, Tensor]:
            some = copied(mapped(inputs, lambda tensor: tensor[rows_of]))
            rows.mask = None if mask is None else mask[rows_of]
            of = None if labels is None else labels[rows_of]
            seed_all(0, plan.device)
            try:
                return kept(self._run(some, of, len(tensors_of(some)[0])))
            finally:
                rows.mask = mask

        before, mask = kept(output), rows.mask
        chosen = apart(inputs, n=n)
        few, mixed = len(chosen), list[str]()
        try:
            found = again(chosen)
        except (ModelError, LayerError):
            found = {}
        except ShapeError as error:  # of a pooling that holds something for a whole batch
            if not str(error).startswith("layer "):
                raise
            found = {}
        for title, now in found.items():
            shown = f"{title} gives {tuple(now.shape)} for {few} samples after pooling"
            if len(now) != few:
                raise ShapeError(
                    f"{shown}, so its first axis is not that of the samples, though {n} long for "
                    f"{n} of them; {_SAMPLES_FIRST}"
                )
            if now.shape[1:] != before[title].shape[1:]:
                raise ShapeError(
                    f"{shown}, and {tuple(before[title].shape)} for {n}: a row is as long as the "
                    "batch, of which it says something; choose another layer"
                )
            mixed += [] if gives_alike(plan, now, before[title][chosen]) else [title]
        if found and may_mix and not (mixed or draws):
            mixed = self._others_alone(lambda i: again([i]), before, n=n)
        if mixed and not draws:
            log.warning(
                "%s: rows hang on the samples beside them, or on their place in the batch, for "
                "some alone give others (a normalization over the batch, or tokens before samples: "
                "is batch_first=True missing?); batch_size=1 gives each its own",
                listed(mixed),
            )
        if found:
            return
        # A model may be written for one size of batch alone: the samples in the other order then
        # show whether the rows go with them.
        backwards = list(range(n))[::-1]
        with contextlib.suppress(ModelError, LayerError):
            for title, now in again(backwards).items():
                was = before[title]
                if is_near(now, was[backwards]):
                    continue
                if not is_near(now, was):
                    log.warning(
                        "%s gives %s for %s samples, and whether its first axis is theirs could "
                        "not be told: the model takes no other number of them",
                        title,
                        tuple(now.shape),
                        n,
                    )
                else:
                    raise ShapeError(
                        f"{title} gives the same {tuple(now.shape)} for {n} samples in the other "
                        f"order, so its first axis is not that of the samples; {_SAMPLES_FIRST}"
                    )


class Memory:
    """What code of the user's own keeps of a pass for later ones, seen on the first two.

    A layer that is made when the size of the input is known, a centre of the first batch, a
    generator: rows then hang on which batch came first.

    Attributes:
        first_pass: SHA-256 of what was another after the first pass; "" where nothing was. A run
            that goes on, whose first batch is another, has to find the same.
    """

    def __init__(self, plan: Plan, *, is_known: bool) -> None:
        self.first_pass = ""
        self._plan = plan
        self._is_known = is_known
        self._n_passes = 2 if is_known and not plan.has_own_pooling else 0  # that need no look
        self._before: tuple[str, dict[str, str]] = "", {}
        self._said_of_zeros = plan.is_by_sample

    def before_pass(self) -> None:
        if not self._n_passes:
            self._before = self._kept(), self._marks()

    def after_pass(self) -> None:
        self._n_passes += 1
        if self._n_passes > 2:
            return
        kept, (before, marks) = self._kept(), self._before
        if self._n_passes == 1:
            now = self._marks()
            others = sorted((name, mark) for name, mark in now.items() if marks.get(name) != mark)
            self._before = kept, now
            if kept != before or others:
                self.first_pass = value_sha256([kept, others])
        elif kept != before:
            log.warning(
                "%s or its pooling keeps something from pass to pass; if that enters the rows, a "
                "run that was interrupted and goes on gives others",
                self._plan.model.name,
            )
        elif self.first_pass:
            log.warning(
                "%s or its pooling has made something in its first pass that later ones may use "
                "(a layer, a centre, a cache): if the run is interrupted, it goes on only where "
                "its first pass makes the same",
                self._plan.model.name,
            )

    def end(self) -> None:
        """Say what the only pass has made; of several the second one said it."""
        if self._n_passes == 1 and self.first_pass:
            log.warning(
                "%s or its pooling has made something in its pass that stays (a layer, a centre, "
                "a cache)",
                self._plan.model.name,
            )

    def _kept(self) -> str:
        """SHA-256 of what the code of the user's own holds, its weights aside."""
        held = [value_sha256(one.function) for one in self._plan.poolings if one.code]
        code = "" if self._is_known else code_sha256(self._plan.model.module)
        return "".join([code, *held])

    def _marks(self) -> dict[str, str]:
        return {} if self._is_known else state_marks(self._plan.model.module)

    def say_of_zeros(self, batch: Batch) -> None:
        """Say once that something stands in a batch in place of what could not be read."""
        if batch.reasons and not self._said_of_zeros:
            self._said_of_zeros = True
            log.warning(
                "in place of what cannot be read, such as row %s, %s enter beside the others of "
                "its batch; where %s sees the samples of a batch together, their rows hang on it",
                batch.start + min(batch.reasons),
                "copies of other items" if self._plan.source.collate is not None else "zeros",
                self._plan.model.name,
            )


def own_generators(module: nn.Module) -> list[str]:
    """The random generators that modules of a network hold, by their names."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return [
        ".".join(filter(None, (name, key)))
        for name, child in module.named_modules()
        for key, value in {**vars(type(child)), **vars(child)}.items()
        if isinstance(value, kinds)
    ]


def _ablating(plan: Plan, seen: Seen) -> hooks.Intervention:
    changes: dict[str, list[hooks.Change]] = {}
    for point, one in plan.ablated:
        change = functools.partial(_unless_plain, one, seen)
        changes.setdefault(point.name, []).append(change)
    # They stand in the identity as they were asked for, and hold the batch at hand.
    return hooks.intervene(plan.model.module, changes, is_told=False)


def _unless_plain(ablation: Ablation, seen: Seen, value: Tensor) -> Tensor:
    return value if seen.is_plain else ablation.changed(value, seen)


def _asked_for(plan: Plan) -> str:
    """The gradients, or else the points of the ablations."""
    gradients = [point.name for point in plan.points if point.is_gradient]
    return ", ".join(gradients or [point.name for point, _ in plan.ablated])


def _require_same(plan: Plan, plain: Any, found: Any) -> None:
    """Raise LayerError if the model gives something else when gradients or changes are asked for.

    Copies go on in place of some tensors then: what a layer does to them in place, others do not
    see that hold the tensor itself.
    """
    if plain is not None and not gives_alike(plan, plain, found):
        raise LayerError(
            f"{plan.model.name} gives something else when {_asked_for(plan)} is asked for: a layer "
            "there works in place on what another one takes too; name the layer before, or one "
            "around it"
        )


_COLLATED = 8  # items that are collated alone, of the first batch
_ALONE = 16  # samples that go through by themselves, of the first batch
_SAMPLES_FIRST = (
    "choose another layer, or where tokens come first pooling=function, such as lambda a: a.mean(0)"
)


def _is_same(rows: Tensor, others: Tensor) -> bool:
    """Whether they are equal, NaN to NaN too."""
    if rows.shape != others.shape:
        return False
    return bool(((rows == others) | (rows.isnan() & others.isnan())).all())
