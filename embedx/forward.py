"""What one forward pass of an extraction gives, and the checks that go with the first one."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedx import fold, hooks
from embedx.ablations import Seen
from embedx.errors import LayerError, ShapeError, listed
from embedx.inputs import (
    Batch,
    Inputs,
    Piece,
    arithmetic,
    autocast,
    channels_last,
    draws_unseen,
    mapped,
    placed,
    random_states,
    seed_all,
    tensors_of,
)
from embedx.looks import Looks, Memory, own_generators
from embedx.matrix import Array
from embedx.objectives import Backward, scores_of
from embedx.passes import differentiable, on_device, run_model, undisturbed
from embedx.plans import Plan
from embedx.rows import (
    Rows,
    not_finite,
    picture_size,
    require_float32,
    strangers_to,
    token_mask,
)

log = logging.getLogger("embedx")


@dataclasses.dataclass(frozen=True)
class Results:
    """What one forward pass gave: arrays by field name, and rows that are not finite.

    And what the first pass of the process made of the network: see :class:`_Memory`.
    """

    arrays: dict[str, Array]
    attrs: dict[str, dict[str, Any]]
    not_finite: dict[int, str]
    first_pass: str


def joined(batch: Batch, done: Sequence[tuple[Piece, Results]]) -> Results:
    """What the passes of a batch gave, in the order of its rows.

    Raises:
        ShapeError: They gave rows of several shapes.
    """
    (piece, first), *others = done
    if piece.rows is None and not others:
        return first
    arrays = {
        name: np.full((batch.size, *array.shape[1:]), unset(array.dtype), array.dtype)
        for name, array in first.arrays.items()
    }
    bad: dict[int, str] = {}
    for piece, results in done:
        assert piece.rows is not None
        bad |= results.not_finite
        for name, array in results.arrays.items():
            if array.shape[1:] != arrays[name].shape[1:]:
                raise ShapeError(
                    f"{name} has shape {array.shape[1:]} for some texts and "
                    f"{arrays[name].shape[1:]} for others; choose a pooling that gives one length, "
                    "such as pooling=mean_token"
                )
            arrays[name][piece.rows] = array
    return Results(arrays, first.attrs, bad, first.first_pass)


@contextlib.contextmanager
def forward_of(plan: Plan) -> Iterator[Callable[[Batch, Piece], Results]]:
    """The network on its device, with hooks, for one forward pass after the other.

    What the first pass does not show is looked for by further ones of its inputs.

    Args:
        plan: What to do.

    Yields:
        A function of a batch and one of its pieces, which gives :class:`Results`; it raises what is
        below.

    Raises:
        LayerError: A point did not fire, its layer ran twice, or what it asks for changes what the
            model gives.
        ModelError: The pass failed, draws random numbers, or gives a text another row when padded.
        ShapeError: What a layer gives is not one row a sample.
    """
    module = plan.model.module
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_device(module, plan.device))
        stack.enter_context(undisturbed(module, device=plan.device))
        stack.enter_context(arithmetic(plan.precision))
        # Code of the user's own may keep something from layer to layer, run a layer again in
        # another batch, or look at strides: only what is known is run otherwise than as written.
        is_known, is_by_sample = fold.is_known(module), plan.is_by_sample  # it gets hooks below
        if is_known:
            ablated = [point for point, _ in plan.ablated]
            stack.enter_context(fold.folded(module, [*plan.points, *ablated]))
        elif names := own_generators(module):
            log.warning(
                "%s has a random generator of its own, which goes on from pass to pass: %s; if it "
                "draws from it, another run gives other rows",
                plan.model.name,
                listed(names),
            )
        yield stack.enter_context(_Forward(plan, is_known=is_known, is_by_sample=is_by_sample))


class _Forward:
    """The forward pass of a plan, for one piece after the other; the first is looked at closely.

    Args:
        plan: What to do.
        is_known: Whether the network may be run otherwise than it is written.
        is_by_sample: Whether it is taken to draw nothing, and to see one sample at a time.
    """

    def __init__(self, plan: Plan, *, is_known: bool, is_by_sample: bool) -> None:
        self._plan = plan
        self._is_known, self._is_by_sample = is_known, is_by_sample
        self._rows = Rows(
            plan.points,
            plan.poolings,
            dtype=plan.dtype,
            normalize=plan.normalize,
            tokens=plan.model.tokens,
            layers=dict(plan.model.module.named_modules()),
        )
        self._got = hooks.Capture(
            plan.model.module, plan.points, reduce=self._rows.reduce, only_here=True
        )
        self._got.is_verified = True  # by the looks, where gradients are wanted
        self._backward: Backward | None = None
        if plan.objective is not None:
            self._backward = Backward(
                plan.objective,
                self._got,
                title=plan.model.name,
                label_names=plan.source.label_names,
                label_numbers=plan.source.label_numbers,
                classes=plan.classes,
            )
        self._memory = Memory(plan, is_known=is_known, is_by_sample=is_by_sample)
        self._seen = Seen()
        self._looks = Looks(
            plan, self._got, self._rows, self._seen, self._run, is_known, is_by_sample
        )
        self._stack = contextlib.ExitStack()
        self._is_draw_looked_at = self._draws = False
        self._may_stop_early = is_known and not plan.save_outputs and self._backward is None
        self._whole: set[tuple[torch.Size, ...]] = set()  # shapes of inputs, less the samples

    def __enter__(self) -> "_Forward":
        self._stack.callback(self._memory.end)
        self._stack.callback(self._looks.end)
        self._stack.enter_context(self._got)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, batch: Batch, piece: Piece) -> Results:
        """One pass, as :func:`forward_of` has it."""
        plan, rows, got = self._plan, self._rows, self._got
        first = batch.start + (0 if piece.rows is None else int(piece.rows.min()))
        labels = _labels_of(plan, batch, piece)
        # Not inference mode: a model's own cache could not be trained on afterwards.
        with torch.no_grad():
            self._memory.before_pass()
            inputs = self._entering(batch, piece, seed=first)
            given = piece.inputs
            rows.note_masks({"what enters": given} if isinstance(given, Tensor) else given)
            self._looks.before_pass(inputs, labels, n=piece.size, seed=first)
            # A whole pass of such shapes has shown that each layer runs once.
            shapes = tuple(tensor.shape[1:] for tensor in tensors_of(inputs))
            got.stops_early = self._may_stop_early and shapes in self._whole
            # What is taken to draw nothing is not looked at again; other code may draw for some.
            is_later = self._is_draw_looked_at
            is_looked_at = self._draws or (self._is_by_sample and is_later)
            before = None if is_looked_at else random_states(plan.device, of_torch_alone=is_later)
            # The model may work in place on what enters it.
            entered = mapped(inputs, torch.clone) if self._looks.are_due(inputs) else inputs
            output = self._run(inputs, labels, piece.size)
            draws = before is not None and before != random_states(
                plan.device, of_torch_alone=is_later
            )
            if draws and self._is_by_sample:
                raise draws_unseen(plan.model, what="row")
            if draws:
                log.warning(
                    "%s draws random numbers in its passes, in eval mode too: each row is that of "
                    "one draw, which hangs on batch_size",
                    plan.model.name,
                )
            self._draws |= draws
            self._is_draw_looked_at = True
            self._memory.after_pass()
            try:
                arrays, attrs = rows.arrays(got, n=piece.size)
            except LayerError as error:
                last = batch.start + batch.size - 1
                raise LayerError(f"rows {batch.start} to {last}: {error}") from None
            if plan.save_outputs:
                logits = _logits(output, plan.model.name, piece.size)
                arrays["outputs/logits"] = logits
                arrays["outputs/predicted"] = logits.argmax(1).astype(np.int32)
            self._whole.add(shapes)
            got.stops_early = self._may_stop_early
            self._looks.after_pass(
                batch,
                piece,
                entered,
                labels,
                output,
                seed=first,
                draws=self._draws,
                keeps=self._memory.keeps,
                enter=lambda batch, piece, seed: self._entering(batch, piece, seed=seed),
            )
        self._memory.say_of_zeros(batch)
        odd = not_finite(arrays)
        if self._backward is not None:
            scores = scores_of(output, n=piece.size, title=plan.model.name)
            odd |= _without_gradient(scores.detach(), labels)
        places = range(piece.size) if piece.rows is None else piece.rows.tolist()
        bad = {places[i]: why for i, why in odd.items() if places[i] not in batch.reasons}
        return Results(arrays, attrs, bad, self._memory.first_pass)

    def _entering(self, batch: Batch, piece: Piece, *, seed: int) -> Inputs:
        """What enters the network, on its device; what of it is padding goes to the rows."""
        plan, rows = self._plan, self._rows
        prepared = plan.model.preprocess
        inputs = placed(piece.inputs, plan.device)
        seed_all(seed, plan.device)
        if prepared is not None and batch.are_pixels and isinstance(inputs, Tensor):
            with autocast(plan.precision, plan.device):
                inputs = prepared.normalize(inputs)
        if self._is_known:
            inputs = channels_last(inputs)
        given = {} if isinstance(piece.inputs, Tensor) else piece.inputs
        wants_mask = bool(rows.mask_takers or plan.ablated)
        mask = token_mask(given, spellings=rows.spellings) if wants_mask else None
        rows.mask = None if mask is None else mask.to(plan.device)
        self._seen.strangers = strangers_to(rows.mask, given)
        rows.picture = picture_size(tensors_of(inputs))
        return inputs

    def _run(self, inputs: Inputs, labels: Tensor | None, n: int) -> Any:
        """One pass, and one back where gradients are wanted."""
        plan, rows = self._plan, self._rows
        module, title = plan.model.module, plan.model.name
        self._seen.n, self._seen.mask, self._seen.picture = n, rows.mask, rows.picture
        with contextlib.ExitStack() as block:
            if self._backward is not None:
                inputs = block.enter_context(differentiable(module, inputs))
            with autocast(plan.precision, plan.device):
                output = run_model(module, inputs, title=title)
            if self._backward is not None:
                self._backward.run(output, labels, n=n)
                if self._got.cut_off:
                    raise LayerError(
                        f"{title} also keeps what {', '.join(self._got.cut_off)} is taken at by "
                        "itself (an attribute, a hook of its own, a list that it gives), and what "
                        "comes by that way would be left out; choose another layer"
                    )
        return output


def _labels_of(plan: Plan, batch: Batch, piece: Piece) -> Tensor | None:
    """The labels of what goes through the model, where the objective takes them."""
    if plan.objective != "loss":
        return None
    labels = batch.labels
    if labels is None:
        assert plan.source.labels is not None
        labels = plan.source.labels[batch.start : batch.start + batch.size]
    if piece.rows is not None:
        labels = labels[piece.rows]
    return torch.from_numpy(np.asarray(labels, np.int64)).to(plan.device)


def _without_gradient(scores: Tensor, labels: Tensor | None) -> dict[int, str]:
    """Rows whose objective has no gradient, with why: they are failed rows of a file.

    Args:
        scores: Shape ``(n, classes)``.
        labels: Shape ``(n,)``, -1 for none; None where the objective takes none.
    """
    strange = (~scores.isfinite().all(1)).nonzero()[:, 0].tolist()
    found = dict.fromkeys(strange, "its scores are not finite")
    if labels is not None:
        of_none = np.flatnonzero(labels.cpu().numpy() < 0).tolist()
        found |= dict.fromkeys(of_none, "it has no label to have a loss of")
    return found


def _logits(output: Any, model: str, size: int) -> Array:
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != size:
        what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ShapeError(
            f"save_outputs keeps outputs of shape (n, classes), and {model} gives {what}; capture "
            "a layer instead, such as layers=[NAME:output.0]"
        )
    require_float32(output, what=f"save_outputs keeps floats of 32 bits, and {model}")
    # A copy: it may be what entered, or a buffer that the next pass fills.
    logits: Array = output.to("cpu", torch.float32, copy=True).numpy()
    return logits


def unset(dtype: np.dtype[Any]) -> float | int:
    """What stands where there is no number of a row."""
    return {"f": np.nan, "u": 255, "i": -1}[dtype.kind]
