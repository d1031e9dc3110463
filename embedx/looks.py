"""What further passes of some batches show of a network, and the rows alone do not."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor, nn

from embedx import hooks
from embedx.ablations import Ablation, Seen
from embedx.errors import LayerError, ModelError, ShapeError, listed
from embedx.fingerprints import code_sha256, state_marks, value_sha256
from embedx.grids import channels_of
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
            self._plan,
            self._got,
            self._rows,
            self._seen,
            self._run,
            self._is_known,
            self._is_by_sample,
        )
        self._stack = contextlib.ExitStack()
        self._is_call_looked_at = False
        self._are_changes_looked_at = self._plan.objective is None and not self._plan.ablated
        self._are_samples_looked_at = False
        self._alone = _Share(_ALONE, is_over=self._is_by_sample)
        self._collated = _Share(_COLLATED, is_over=self._plan.source.collate is None)
        self._are_passes_compared = self._plan.objective is not None or bool(self._plan.ablated)

    def are_due(self, inputs: Inputs) -> bool:
        """Whether the pass of what enters next may be one to look at."""
        are_first = not (self._are_samples_looked_at and self._are_passes_compared)
        return are_first or self._padding.are_due or self._alone.is_due(inputs)

    def end(self) -> None:
        """Take the ablations away again."""
        self._stack.close()

    def before_pass(self, inputs: Inputs, labels: Tensor | None, *, n: int, seed: int) -> None:
        """Before the first pass: set the ablations, and see that nothing else changes by them.

        Raises:
            LayerError: What is asked for changes what the model gives.
        """
        if not self._is_call_looked_at:
            self._is_call_looked_at = True
            self._say_of_lengths(inputs)
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
            keeps: Whether one of the first passes made something that stays.
            enter: What of a batch enters the network, with the seed of the pass; what it is besides
                goes to the rows.

        Raises:
            ModelError: A text has another row when padded.
            ShapeError: What a layer gives is not one row a sample, or not of the mask's tokens.
        """
        n = piece.size
        captured, mixed = dict[str, Tensor](), set[str]()
        to_collate, to_pass = (share.of_batch(n, inputs) for share in (self._collated, self._alone))
        is_wanted = to_pass or not self._are_samples_looked_at
        before = self._kept(output) if is_wanted else {}
        if to_collate and piece.rows is None and not (draws or keeps or self._plan.source.draws):
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
            if not keeps or n in by_chance:
                mixed |= self._require_samples_first(inputs, labels, before, n=n)
        self._alone.is_over |= keeps or draws
        if to_pass and not self._alone.is_over:
            mixed |= self._others_alone(inputs, labels, before, of=to_pass)
        if mixed and not (draws or keeps):
            self._say_of_mixed(mixed, before)
        self._padding.after_pass(batch, inputs, labels, output, seed=seed, draws=draws, keeps=keeps)
        if captured:
            self._say_of_collating(batch, captured, labels, enter, of=to_collate)

    def _say_of_lengths(self, inputs: Inputs) -> None:
        """Say where what is taken for the label of an item may be the length that a network takes.

        That of ``(text, length)`` is a whole number as a label is, and a network that may do
        without it runs.
        """
        if not (isinstance(inputs, Tensor) and self._plan.source.labels_in_items):
            return
        with contextlib.suppress(ValueError, TypeError):  # what C does has no signature
            taken = inspect.signature(self._plan.model.module.forward).parameters
            may_be = (name for name, one in taken.items() if _may_be_lengths(one))
            if name := next(may_be, None):
                log.warning(
                    "%s may take %s, and is given the first part of each item alone: the second is "
                    "taken for the label; if it is that, give a dict by the names of the arguments",
                    self._plan.model.name,
                    name,
                )

    def _say_of_collating(
        self,
        batch: Batch,
        before: dict[str, Tensor],
        labels: Tensor | None,
        enter: Callable[[Batch, Piece, int], Inputs],
        *,
        of: list[int],
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
        chosen = [i for i in of if i not in batch.reasons]
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
        if new := self._collated.new(others, before):
            log.warning(
                "%s: rows hang on the other items of their batch by the collate_fn, as on the "
                "longest of them where it pads: an item that is collated alone has another one; "
                "let %s leave padding out, or take batch_size=1",
                listed(new),
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

    def _kept(self, output: Any) -> dict[str, Tensor | None]:
        """What a pass gave that becomes rows, by what it is called in a message."""
        plan, found = self._plan, dict[str, Tensor | None]()
        for point in plan.points:
            title = f"layer {point.name}"
            found[title] = None
            with contextlib.suppress(LayerError):  # it did not come, or came more often
                found[title] = self._got[point.name]
        scores = class_scores(output)
        if scores is not None and (plan.save_outputs or plan.objective is not None):
            found[f"the output of {plan.model.name}"] = scores
        return found

    def _again(
        self, inputs: Inputs, labels: Tensor | None, *, of: list[int]
    ) -> dict[str, Tensor | None]:
        """The same of another pass, of some of the samples.

        Returns:
            None for what came once in the batch, and does not so of these.

        Raises:
            LayerError: Gradients cannot be taken of these.
            ModelError: The network does not take so many.
            ShapeError: The pooling of a layer does not.
        """
        rows, mask = self._rows, self._rows.mask
        some = copied(mapped(inputs, lambda tensor: tensor[of]))
        rows.mask = None if mask is None else mask[of]
        seed_all(0, self._plan.device)
        try:
            output = self._run(some, None if labels is None else labels[of], len(of))
        finally:
            rows.mask = mask
        return self._kept(output)

    def _others_alone(
        self,
        inputs: Inputs,
        labels: Tensor | None,
        before: Mapping[str, Tensor | None],
        *,
        of: list[int],
    ) -> set[str]:
        """What gives some samples another row by themselves than in their batch, or none.

        Such as where all are cut to the longest of them, which two samples show by chance alone.
        """
        mixed: set[str] = set()
        for i in of:
            with contextlib.suppress(ModelError, LayerError, ShapeError):  # it takes no single one
                for title, now in self._again(inputs, labels, of=[i]).items():
                    was = before[title]
                    assert was is not None
                    if now is None or (
                        len(now) == 1 and not gives_alike(self._plan, now, was[[i]])
                    ):
                        mixed.add(title)
        return mixed

    def _say_of_mixed(self, mixed: Set[str], every: Collection[str]) -> None:
        """Say which rows of all hang on the batch, once of each."""
        if new := self._alone.new(mixed, every):
            log.warning(
                "%s: rows hang on the samples beside them, or on their place in the batch, for "
                "some alone give others (a normalization over the batch, or tokens before samples: "
                "is batch_first=True missing?); batch_size=1 gives each its own",
                listed(new),
            )

    def _require_samples_first(
        self,
        inputs: Inputs,
        labels: Tensor | None,
        before: Mapping[str, Tensor | None],
        *,
        n: int,
    ) -> set[str]:
        """See by two samples alone that a row is one a sample, and has no axis of the batch.

        Args:
            inputs: Of the n samples.
            labels: Theirs.
            before: What their pass gave, as :meth:`_kept` has it.
            n: How many, at least 2.

        Returns:
            What gives these other rows than in their batch.

        Raises:
            ShapeError: The first axis of what a layer gives is not that of the samples, or another
                one is as long as there are of them.
        """
        chosen = apart(inputs, n=n)
        few, mixed = len(chosen), set[str]()
        try:
            found = self._again(inputs, labels, of=chosen)
        except (ModelError, LayerError):
            found = {}
        except ShapeError as error:  # of a pooling that holds something for a whole batch
            if not str(error).startswith("layer "):
                raise
            found = {}
        for title, now in found.items():
            was = before[title]
            assert was is not None
            if now is None:
                mixed.add(title)
                continue
            shown = f"{title} gives {tuple(now.shape)} for {few} samples after pooling"
            if len(now) != few:
                raise ShapeError(
                    f"{shown}, so its first axis is not that of the samples, though {n} long for "
                    f"{n} of them; {_SAMPLES_FIRST}"
                )
            if now.shape[1:] != was.shape[1:]:
                raise ShapeError(
                    f"{shown}, and {tuple(was.shape)} for {n}: a row is as long as the "
                    "batch, of which it says something; choose another layer"
                )
            if not gives_alike(self._plan, now, was[chosen]):
                mixed.add(title)
        if found:
            return mixed
        self._alone.is_over = True
        # A model may be written for one size of batch alone: the samples in the other order then
        # show whether the rows go with them.
        backwards = list(range(n))[::-1]
        with contextlib.suppress(ModelError, LayerError):
            for title, now in self._again(inputs, labels, of=backwards).items():
                was = before[title]
                assert was is not None
                if now is None or is_near(now, was[backwards]):
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
        return set()


@dataclasses.dataclass
class _Share:
    """Which samples of each batch are looked at by themselves.

    So many of the first batches, and a few of the second, the fourth, the eighth and so on, and of
    the first that has padding: data may be in order of length, and what mixes samples may do so for
    some of them alone.
    """

    n_first: int
    is_over: bool = False
    _n_batches: int = 0
    _n_taken: int = 0
    _was_padded: bool = False
    _said: set[str] = dataclasses.field(default_factory=set)

    def is_due(self, inputs: Inputs) -> bool:
        """Whether samples of the next batch are, by its number or by what enters."""
        number = self._n_batches + 1
        is_one = self._n_taken < self.n_first or number & (number - 1) == 0
        return not self.is_over and (is_one or (not self._was_padded and _is_padded(inputs)))

    def of_batch(self, n: int, inputs: Inputs) -> list[int]:
        """Those of the next batch, of n samples: half of them among those that look padded, and
        those that are filled most and least.
        """
        is_one = n > 1 and self.is_due(inputs)
        most = max(self.n_first - self._n_taken, _LATER) if is_one else 0
        self._n_batches += 1
        self._was_padded = self._was_padded or (is_one and _is_padded(inputs))
        if not most:
            return []
        padded, ends = _padded_and_ends(inputs, n=n)
        chosen = set(_spread(sorted(padded), most // 2))
        chosen |= set(_spread(sorted(set(range(n)) - chosen), most - len(chosen)))
        self._n_taken += len(chosen)
        return sorted(chosen | ends)

    def new(self, mixed: Set[str], every: Collection[str]) -> list[str]:
        """What mixes samples and was not said to; when that is all, none are looked at any more."""
        found = sorted(mixed - self._said)
        self._said |= mixed
        self.is_over |= len(self._said) == len(every)
        return found


def _may_be_lengths(parameter: inspect.Parameter) -> bool:
    """Whether an argument is called lengths, and has no value unless it is given."""
    is_so_called = re.fullmatch(r"(?!max)(\w*_)?len(gth)?s?", parameter.name.lower()) is not None
    return is_so_called and parameter.default in (None, inspect.Parameter.empty)


def _is_padded(inputs: Inputs) -> bool:
    """Whether some samples have fewer words, or true values in a mask, than others."""
    words = (one for one in _dense(inputs) if one.ndim == 2 and not one.is_floating_point())
    filled = ((one != 0).sum(1) for one in words)
    return any(bool(counts.min() < counts.max()) for counts in filled)


def _padded_and_ends(inputs: Inputs, *, n: int) -> tuple[set[int], set[int]]:
    """The samples that look padded, and of each tensor one with the most and the fewest entries
    that are not zero.

    Padded are those of which some data has fewer such entries than of another; where that is of
    none, those of which a mask, in any spelling, has another number than most.
    """
    padded: dict[bool, set[int]] = {False: set(), True: set()}
    ends: set[int] = set()
    for tensor in _dense(inputs):
        if tensor.ndim > 1 and len(tensor) == n:
            filled = (tensor != 0).flatten(1).sum(1).tolist()
            is_mask = bool(((tensor == 0) | (tensor == 1)).all())
            ((usual, _),) = Counter(filled).most_common(1)
            full = usual if is_mask else max(filled)
            if min(filled) < max(filled):
                padded[is_mask] |= {i for i, count in enumerate(filled) if count != full}
                ends |= {filled.index(min(filled)), filled.index(max(filled))}
    return padded[False] or padded[True], ends


def _spread(places: Sequence[int], most: int) -> Iterator[int]:
    """So many of the places at most, evenly from the first to the last."""
    step = (len(places) - 1) / (most - 1) if most > 1 else 0
    return (places[round(j * step)] for j in range(most) if places)


def _dense(inputs: Inputs) -> Iterator[Tensor]:
    """What enters and has numbers that can be looked at."""
    for one in tensors_of(inputs):
        is_plain = one.layout == torch.strided and not (one.is_nested or one.is_quantized)
        if is_plain and one.numel():
            yield one


class Memory:
    """What code of the user's own keeps of a pass for later ones, seen on the first two.

    A layer that is made when the size of the input is known, a centre of the first batch, a
    generator: rows then hang on which batch came first.

    Attributes:
        keeps: Whether something was another after one of them.
        first_pass: SHA-256 of what was another after the first pass; "" where nothing was. A run
            that goes on, whose first batch is another, has to find the same.
    """

    def __init__(self, plan: Plan, *, is_known: bool, is_by_sample: bool) -> None:
        self.keeps = False
        self.first_pass = ""
        self._plan = plan
        self._is_known = is_known
        self._n_passes = 2 if is_known and not plan.has_own_pooling else 0  # that need no look
        self._before: tuple[str, dict[str, str]] = "", {}
        self._said_of_zeros = is_by_sample

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
                self.keeps = True
                self.first_pass = value_sha256([kept, others])
        elif kept != before:
            self.keeps = True
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
    layers = dict(plan.model.module.named_modules())
    for point, one in plan.ablated:
        layer = layers[point.layer] if point.what == "output" else None
        change = functools.partial(_unless_plain, one, seen, layer)
        changes.setdefault(point.name, []).append(change)
    # They stand in the identity as they were asked for, and hold the batch at hand.
    return hooks.intervene(plan.model.module, changes, is_told=False)


def _unless_plain(ablation: Ablation, seen: Seen, layer: nn.Module | None, value: Tensor) -> Tensor:
    if seen.is_plain:
        return value
    channels = None if layer is None else channels_of(layer, value)
    return ablation.changed(value, seen, channels=channels)


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


_COLLATED = 8  # items that are collated alone, of the first batches
_ALONE = 16  # samples that go through by themselves, of the first batches
_LATER = 4  # of each batch whose number is a power of two
_SAMPLES_FIRST = (
    "choose another layer, or where tokens come first pooling=function, such as lambda a: a.mean(0)"
)


def _is_same(rows: Tensor, others: Tensor) -> bool:
    """Whether they are equal, NaN to NaN too."""
    if rows.shape != others.shape:
        return False
    return bool(((rows == others) | (rows.isnan() & others.isnan())).all())
