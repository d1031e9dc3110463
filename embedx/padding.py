"""What further passes of the first batches show of padding: whose tokens a mask is of."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embedx import hooks
from embedx.ablations import Seen
from embedx.errors import LayerError, ModelError, ShapeError, listed
from embedx.inputs import (
    Batch,
    Inputs,
    autocast,
    is_alike,
    mapped,
    placed,
    seed_all,
)
from embedx.passes import run_model, tensors_in
from embedx.plans import Plan
from embedx.points import Point
from embedx.rows import MASKS, Rows, is_like_a_mask, tokens_beside, tokens_unknown

log = logging.getLogger("embedx")


@dataclasses.dataclass
class Look:
    """Looks at a network by further passes of what entered it.

    Args:
        plan: What is to do.
        got: What is captured in each pass.
        rows: Where it is pooled.
        seen: What ablations see of a pass.
        run: A pass of inputs, their labels and how many they are, and one back where gradients are
            wanted.
        is_known: Whether the network may be run otherwise than it is written.
        is_by_sample: Whether it is taken to draw nothing, and to see one sample at a time.
    """

    _plan: Plan
    _got: hooks.Capture
    _rows: Rows
    _seen: Seen
    _run: Callable[[Inputs, Tensor | None, int], Any]
    _is_known: bool
    _is_by_sample: bool

    def __post_init__(self) -> None:
        """What a kind of look holds besides; the base holds nothing."""

    def _plain(self, inputs: Inputs, *, seed: int) -> Any:
        """A pass that leaves the inputs as they are, and nothing is changed in or asked for."""
        plan, was_plain = self._plan, self._seen.is_plain
        seed_all(seed, plan.device)
        self._seen.is_plain = True
        try:
            with autocast(plan.precision, plan.device):
                return run_model(plan.model.module, copied(inputs), title=plan.model.name)
        finally:
            self._seen.is_plain = was_plain


class PaddingLook(Look):
    """Looks at what padding does to the rows of texts and of samples with a mask."""

    def __post_init__(self) -> None:
        plan = self._plan
        self._are_texts_looked_at = plan.model.tokenizer is None
        self._is_within_looked_at = plan.objective is not None or bool(plan.ablated)
        self._is_mask_looked_at = self._is_known
        self._of_mask: set[str] = set()

    @property
    def are_due(self) -> bool:
        """Whether the next pass may be one to look at."""
        is_mask_due = self._rows.mask is not None and not self._is_mask_looked_at
        return is_mask_due or not (self._are_texts_looked_at and self._is_within_looked_at)

    def after_pass(
        self,
        batch: Batch,
        inputs: Inputs,
        labels: Tensor | None,
        output: Any,
        *,
        seed: int,
        draws: bool,
        keeps: bool,
    ) -> None:
        """As :meth:`embedx.looks.Looks.after_pass`.

        Raises:
            ModelError: A text has another row when padded.
            ShapeError: What a layer gives is not of the mask's tokens.
        """
        if not self._are_texts_looked_at:
            self._are_texts_looked_at = self._require_padding_unseen(batch)
        if new := self._rows.masked - self._of_mask:
            self._of_mask |= new
            if self._seen.strangers:
                assert isinstance(inputs, dict)
                self._require_own_tokens(new, inputs, self._seen.strangers, seed=seed)
        if not self._is_mask_looked_at and self._has_masked_padding:
            self._is_mask_looked_at = True
            if not keeps and not draws and isinstance(inputs, dict):
                self._look_at_mask(inputs, labels, seed=seed)
        if not self._is_within_looked_at:
            self._is_within_looked_at = True
            if not keeps:
                self._say_of_padding_within(inputs, output, seed=seed)

    @property
    def _has_masked_padding(self) -> bool:
        mask = self._rows.mask
        if mask is None or mask.ndim != 2 or not (self._rows.masked or self._seen.masked):
            return False
        return not bool(mask.all())

    def _require_padding_unseen(self, batch: Batch) -> bool:
        """See that a text has the row that it has alone, also padded beside the longest one.

        Returns:
            Whether the batch had texts of two lengths to see it by.

        Raises:
            ModelError: It has another one: the network takes a mask of padding and does not keep
                to it.
        """
        plan, got, rows = self._plan, self._got, self._rows
        assert plan.model.tokenizer is not None
        longest, few = batch.pieces[0].inputs, batch.pieces[-1].inputs
        assert isinstance(longest, dict)
        assert isinstance(few, dict)
        lengths = few["attention_mask"].sum(1)
        i, n_more = int(lengths.argmin()), longest["attention_mask"].shape[1] - int(lengths.min())
        if not n_more:
            return False
        is_text = few["attention_mask"][i] != 0
        alone = {name: tensor[i : i + 1, is_text] for name, tensor in few.items()}
        padding = {"input_ids": plan.model.tokenizer.pad_id}
        padded = {
            name: nn.functional.pad(tensor, (0, n_more), value=padding.get(name, 0))
            for name, tensor in alone.items()
        }
        label = torch.zeros(1, dtype=torch.long, device=plan.device)
        mask, found = rows.mask, []
        for inputs in (alone, padded):
            rows.mask = (
                (inputs["attention_mask"] != 0).to(plan.device) if mask is not None else None
            )
            seed_all(0, plan.device)
            self._run(placed(inputs, plan.device), label if plan.objective == "loss" else None, 1)
            found.append({point.name: got[point.name].clone() for point in plan.points})
        rows.mask = mask
        most = 1e-4 if plan.precision == "fp32" else 0.1
        for name, row in found[0].items():
            if found[1][name].shape == row.shape and not is_alike(found[1][name], row, most=most):
                raise ModelError(
                    f"{plan.model.name} gives a text another row at {name} when it is padded "
                    "beside longer ones, though it takes an attention_mask; such rows would hang "
                    "on their batch: use batch_size=1, or another encoder"
                )
        return True

    def _say_of_padding_within(self, inputs: Inputs, output: Any, *, seed: int) -> None:
        """Say where the network masks padding by itself, and where torch treats it otherwise.

        Two more passes of the first batch, of networks with layers that can have a mask.
        """
        module, title, rows = self._plan.model.module, self._plan.model.name, self._rows
        layers = dict(module.named_modules())
        fused = any(isinstance(layer, nn.TransformerEncoder) for layer in layers.values())
        # A mask that leaves nothing out says nothing of a sequence beside its own.
        is_unknown = rows.mask is None or bool(rows.mask.all())
        takers = rows.mask_takers if is_unknown and not self._is_known else []
        if not fused and not (takers and any(isinstance(x, _MASKED) for x in layers.values())):
            return
        masked: list[str] = []

        def entered(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _has_padding(layers[name], args, kwargs):
                masked.append(name)

        self._got.remove()
        try:
            if takers:
                with hooks.watched(module, entered=entered, left=lambda *_: None):
                    self._plain(inputs, seed=seed)
            if fused:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
                    plain = self._plain(inputs, seed=seed)
                if output is not None and not gives_alike(self._plan, plain, output):
                    log.warning(
                        "%s gives something else by torch's fused encoder, which is off while "
                        "layers are looked at: it makes zeros of padding, which a later layer "
                        "sees; rows are those without it, as in training",
                        title,
                    )
        finally:
            self._got.set()
        if masked:
            log.warning(
                "%s masks padding by itself, at %s, and which tokens these are is not known here: "
                "padding counts as tokens in the rows of %s; give an attention_mask with the "
                "samples, or a pooling of your own",
                title,
                masked[0] or "its entrance",
                ", ".join(takers),
            )

    def _look_at_mask(self, inputs: dict[str, Tensor], labels: Tensor | None, *, seed: int) -> None:
        """See by a few samples whose tokens the mask is of, and what padding does to rows."""
        mask = self._rows.mask
        assert mask is not None
        few = mask.sum(1).argsort()[:4]  # the first has padding
        some = {name: tensor[few] for name, tensor in inputs.items()}
        self._rows.mask = mask[few]
        try:
            of_mask = self._require_mask_of(some, seed=seed)
            if of_mask and self._rows.masked:
                self._say_of_padding(
                    some, of_mask, None if labels is None else labels[few], n=len(few), seed=seed
                )
        finally:
            self._rows.mask = mask

    def _say_of_padding(
        self,
        inputs: dict[str, Tensor],
        of_mask: Collection[str],
        labels: Tensor | None,
        *,
        n: int,
        seed: int,
    ) -> None:
        """Say which rows hang on padding: the sample of the fewest tokens has another one alone.

        Where the model does not take it without its padding, other tokens enter at the places of
        that; it alone would not do, for a model may know padding by what stands there.

        Args:
            inputs: Of the n samples.
            of_mask: What of them is of the mask's tokens.
            labels: Theirs.
            n: How many.
            seed: Of the pass.

        Raises:
            LayerError: A point did not fire.
        """
        mask = self._rows.mask
        assert mask is not None
        i = int(mask.sum(1).argmin())
        alone, changed = dict(inputs), dict(inputs)
        for name, given in inputs.items():
            is_of_tokens = name in of_mask or (name in MASKS and given.shape == mask.shape)
            alone[name] = given[i : i + 1, mask[i]] if is_of_tokens else given[i : i + 1]
            if name in of_mask:
                of_a_token = given[torch.arange(n, device=given.device), mask.int().argmax(1)]
                is_token = mask.reshape(mask.shape + (1,) * (given.ndim - 2))
                changed[name] = torch.where(is_token, given, of_a_token[:, None])

        def row(some: Inputs, of: slice) -> dict[str, Tensor]:
            self._rows.mask = alone_mask if some is alone else mask
            seed_all(seed, self._plan.device)
            try:
                self._run(copied(some), None if labels is None else labels[of], of.stop - of.start)
            finally:
                self._rows.mask = mask
            return {name: self._got[name][0 if some is alone else i].clone() for name in masked}

        masked = sorted(self._rows.masked)
        alone_mask = mask[i : i + 1, mask[i]]
        plain = row(inputs, slice(0, n))
        try:
            other = row(alone, slice(i, i + 1))
        except (ModelError, LayerError, ShapeError):
            other = row(changed, slice(0, n))
        others = [name for name in masked if not gives_alike(self._plan, other[name], plain[name])]
        if others:
            log.warning(
                "%s: rows hang on padding, for a sample without its own has another one: %s looks "
                "at padding too, or its tokens are in another order than those of the mask",
                listed(others),
                self._plan.model.name,
            )

    def _require_mask_of(self, inputs: dict[str, Tensor], *, seed: int) -> list[str]:
        """See that the tokens of layers are those of the mask, by passes with one token less.

        Of two sequences that enter one may be shorter by itself, and the one of the mask with it.

        Returns:
            What enters and is of the mask's tokens; nothing where this is not known.

        Raises:
            ShapeError: They are those of another sequence.
        """
        mask = self._rows.mask
        assert mask is not None
        masks = [name for name in inputs if name in MASKS]
        beside = tokens_beside(mask, inputs)
        own_masks = [name for name in beside if is_like_a_mask(name, inputs[name])]
        beside = [name for name in beside if name not in own_masks]
        if len(masks) > 1 or not beside:  # several are equal: each sequence has its own
            return beside
        plan = self._plan
        pooled = [point for point in plan.points if point.name in self._rows.masked]
        averaged = [point for point, one in plan.ablated if one.at in self._seen.masked]
        points = _forward_points([*pooled, *averaged])
        self._got.remove()
        with hooks.Capture(
            plan.model.module, points, reduce=lambda _, value: value.float(), only_here=True
        ) as got:

            def values(some: dict[str, Tensor]) -> dict[str, Tensor] | None:
                try:
                    self._plain(some, seed=seed)
                    return {point.name: got[point.name].clone() for point in points}
                except (ModelError, LayerError, ShapeError):
                    return None

            def shorter(*cut: str) -> set[str] | None:
                """The points that give a token less if these do; None where the model may not."""
                some = {key: one[:, :-1] if key in cut else one for key, one in inputs.items()}
                found = values(some)
                if found is None:
                    return None
                return {key for key, value in found.items() if value.shape[1] < mask.shape[1]}

            whole = shorter(*beside, *masks, *own_masks)
            alone = {} if len(beside) == 1 else {name: shorter(name) for name in beside}
            for name, of_it in alone.items():
                if of_it is None and own_masks:
                    alone[name] = shorter(name, *own_masks)
            free = {name: of_it for name, of_it in alone.items() if of_it is not None}
            rest = [name for name in beside if name not in free]
            tied = None if not rest else shorter(*rest, *masks) if free else whole
            if tied is None and rest and own_masks:  # one of these is of the same tokens
                tied = shorter(*rest, *masks, *own_masks)
            for name in list(rest) if tied is None and len(rest) > 1 else ():
                others = [other for other in rest if other != name]  # it is none of tokens
                if tied is None and (of_others := shorter(*others, *masks)) is not None:
                    rest, tied = others, of_others
            unknown, as_many = list[str](), list[str]()
            for key in sorted(point.name for point in points):
                if tied and key in tied:
                    continue
                others = [name for name in free if key in free[name]]
                if tied is not None and others:
                    raise _not_of_mask(
                        key, f"its tokens are those of {listed(others)}, not of {listed(rest)}"
                    )
                if whole is not None and key not in whole:  # queries, or it pads to some length
                    as_many.append(key)
                else:
                    unknown.append(key)
            sequences = [name for name in beside if name not in _OF_THE_SAME_TOKENS]
            if len(sequences) > 1:
                unknown = _not_told(unknown, inputs, sequences, masks[0], values)
        self._got.set()
        if unknown and len(sequences) > 1:
            log.warning(
                "%s: which of %s the mask of padding is of could not be told, and the tokens there "
                "count by it; choose a pooling that takes no mask if it is not of these",
                listed(unknown),
                " and ".join(sequences),
            )
        if as_many:
            log.warning(
                "%s: %s tokens come also where a token less enters: padding is left out by the "
                "mask, and whether they are of its tokens could not be told (queries are not); "
                "choose a pooling that takes no mask if not",
                listed(as_many),
                mask.shape[1],
            )
        return rest if tied is not None or len(sequences) < 2 else []

    def _require_own_tokens(
        self, names: Collection[str], inputs: dict[str, Tensor], others: Sequence[str], *, seed: int
    ) -> None:
        """See that the tokens of layers are those of the mask, where others enter beside them.

        Raises:
            ShapeError: They are not, or both lead to the layer.
        """
        points = _forward_points([one for one in self._plan.points if one.name in names])
        changed = {name: _another(one) if name in others else one for name, one in inputs.items()}
        found = []
        self._got.remove()
        with hooks.Capture(
            self._plan.model.module,
            points,
            reduce=lambda _, activation: activation.float().mean(1),
            only_here=True,
        ) as got:
            for given in (inputs, changed):
                self._plain(given, seed=seed)
                found.append({point.name: got[point.name].clone() for point in points})
        self._got.set()
        for name, rows in found[0].items():
            if not is_near(found[1][name], rows):
                raise tokens_unknown(name, others)


def _not_told(
    points: Sequence[str],
    inputs: dict[str, Tensor],
    sequences: Sequence[str],
    mask: str,
    values: Callable[[dict[str, Tensor]], dict[str, Tensor] | None],
) -> list[str]:
    """The points that several sequences lead to, or one on which the mask does nothing.

    Args:
        points: Those to tell of.
        inputs: What enters.
        sequences: Names of what may be of the mask's tokens.
        mask: Its name.
        values: What the points give for other inputs; None where the model does not take them.
    """
    plain = values(inputs) if points else None
    if plain is None:
        return list(points)
    all_tokens = torch.ones_like if mask == "attention_mask" else torch.zeros_like
    changed = [values({**inputs, name: _another(inputs[name])}) for name in sequences]
    unmasked = values({**inputs, mask: all_tokens(inputs[mask])})

    def is_other(point: str, found: dict[str, Tensor] | None) -> bool:
        return found is None or not is_near(found[point], plain[point])

    return [
        point
        for point in points
        if sum(is_other(point, found) for found in changed) != 1 or not is_other(point, unmasked)
    ]


def _forward_points(points: Iterable[Point]) -> list[Point]:
    """Where the tensors go by that points are of, or are the gradients of."""
    return list(
        {
            dataclasses.replace(point, what="input" if point.is_at_input else "output")
            for point in points
        }
    )


def _another(tensor: Tensor) -> Tensor:
    """What may enter a model in the place of a tensor and is another everywhere."""
    return 1 - tensor if tensor.is_floating_point() else (tensor == 0).to(tensor.dtype)


_MASKED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention, nn.RNNBase)
_AT = {nn.TransformerEncoder: 2, nn.TransformerEncoderLayer: 2, nn.MultiheadAttention: 3}


def _has_padding(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a layer is given a mask of padding, or sequences of several lengths as one."""
    if isinstance(layer, nn.RNNBase):
        packed = next((one for one in args if isinstance(one, nn.utils.rnn.PackedSequence)), None)
        return packed is not None and bool((packed.batch_sizes != packed.batch_sizes[0]).any())
    if not isinstance(layer, _MASKED):
        return False
    place = next(at for kind, at in _AT.items() if isinstance(layer, kind))
    name = "key_padding_mask" if place == 3 else "src_key_padding_mask"
    mask = kwargs.get(name, args[place] if len(args) > place else None)
    if not isinstance(mask, Tensor):
        return False
    return bool(mask.any() if mask.dtype == torch.bool else (mask < 0).any())


def _not_of_mask(point: str, why: str) -> ShapeError:
    return ShapeError(
        f"layer {point}: the mask of padding is not of its tokens, for {why}; choose a pooling "
        "that takes no mask, such as pooling=cls or a function of your own, or run that part of "
        "the model alone"
    )


# What enters beside the words of a sequence and is of the same tokens.
_OF_THE_SAME_TOKENS = ("token_type_ids", "position_ids", "bbox")


def copied(inputs: Inputs) -> Inputs:
    """What enters, apart: a model may work in place on it."""
    return mapped(inputs, torch.clone)


def gives_alike(plan: Plan, output: Any, other: Any) -> bool:
    """Whether the tensors in two outputs are the same but for the rounding of the precision."""
    tensors = zip(tensors_in(output), tensors_in(other), strict=False)
    most = 1e-3 if plan.precision in ("fp32", "tf32") else 0.05
    return all(is_alike(one, another, most=most) for one, another in tensors)


def is_near(rows: Tensor, others: Tensor) -> bool:
    """Whether they are the same but for rounding, number by number, NaN to NaN too."""
    return rows.shape == others.shape and torch.allclose(
        rows.double(), others.double(), rtol=1e-3, atol=1e-6, equal_nan=True
    )
