"""What one forward pass of an extraction gives, and the checks that go with the first one."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor, nn

from embedx import fold, hooks, models
from embedx import pooling as pools
from embedx.ablations import Ablation, Seen
from embedx.errors import LayerError, ModelError, ShapeError, listed
from embedx.fingerprints import code_sha256, state_marks, value_sha256
from embedx.inputs import (
    Batch,
    Inputs,
    Piece,
    Precision,
    arithmetic,
    channels_last,
    draws_unseen,
    is_by_sample,
    mapped,
    placed,
    random_states,
    seed_all,
    tensors_of,
)
from embedx.layout import Field, layer_name
from embedx.matrix import Array
from embedx.models import Model
from embedx.objectives import Backward, Objective, scores_of
from embedx.passes import (
    FAST_PATHS_OFF,
    class_scores,
    differentiable,
    on_device,
    run_model,
    tensors_in,
    undisturbed,
)
from embedx.points import Point
from embedx.rows import (
    Rows,
    not_finite,
    picture_size,
    require_float32,
    strangers_to,
    token_mask,
    tokens_unknown,
)
from embedx.sources import Source

log = logging.getLogger("embedx")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an extraction is to do: its arguments, resolved, and what decides its rows."""

    model: Model
    source: Source
    rows: range  # those to make, of the source: all, or a part of them
    points: list[Point]
    poolings: list[pools.Pooling]
    normalize: list[bool]
    device: torch.device
    precision: Precision
    dtype: np.dtype[Any]
    batch_size: int
    num_workers: int
    save_outputs: bool
    thumbnails: int
    on_error: str
    only_pictures: bool
    objective: Objective | None
    classes: list[str] | None
    ablations: list[Ablation]
    ablated: list[tuple[Point, Ablation]]

    @property
    def has_own_pooling(self) -> bool:
        """Whether a pooling is code of the user's own."""
        return any(one.code for one in self.poolings)

    @property
    def is_by_sample(self) -> bool:
        """Whether no code may draw random numbers, or see the samples of a batch together."""
        return is_by_sample(self.model) and not self.has_own_pooling

    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, for the id of the file and to name a difference."""
        prepared = self.model.preprocess
        makes_batches = self.source.collate is not None
        tokenizer = self.model.tokenizer
        # What only some runs have is left out of the others, whose ids are older than it.
        ablated = [{**one.settings(), "at": point.name} for point, one in self.ablated]
        of_loss = self.objective == "loss" and self.classes is None
        numbers = self.source.label_numbers if of_loss else None
        return {
            **({} if tokenizer is None else {"tokenizer": tokenizer.config()}),
            **({} if self.objective is None else {"objective": self.objective}),
            **({} if self.classes is None else {"classes": self.classes}),
            **({"ablate": ablated} if ablated else {}),
            **({} if numbers is None else {"label_numbers": list(numbers)}),
            "model": self.model.source,
            "weights_sha256": self.model.weights_sha256,
            "code": self.model.code,
            "tokens": self.model.tokens,
            "preprocess": prepared.config() if prepared else None,
            "layers": [point.name for point in self.points],
            "pooling": [one.name for one in self.poolings],
            "pooling_code": [one.code for one in self.poolings],
            "normalize": self.normalize if len(set(self.normalize)) > 1 else self.normalize[0],
            "precision": self.precision,
            "dtype": self.dtype.name,
            "save_outputs": self.save_outputs,
            "thumbnails": self.thumbnails,
            "batch_size": self.batch_size if makes_batches or not self.is_by_sample else None,
            "default_dtype": str(torch.get_default_dtype()),
            "rows": len(self.source),
            "items": self.source.fingerprint,
            "columns": _columns_sha256(self.source),
            "revisions": [
                hooks.HOOKS_REVISION,
                pools.POOLING_REVISION,
                models.PREPROCESS_REVISION,
            ],
        }


def with_poolings_of(plan: Plan, fields: Sequence[Field]) -> Plan:
    """What to do where ``auto`` has been told by the first rows already: it is not told anew.

    Other rows may have shapes that would mean another one, or none.

    Args:
        plan: What to do.
        fields: Of the file that has these rows; none where there is no such file.
    """
    told = {field.name: field.attrs.get("pooling") for field in fields}
    names = [told.get(layer_name(point.name)) for point in plan.points]
    return dataclasses.replace(
        plan,
        poolings=[
            pools.per_point(name, n_points=1)[0] if one.name == "auto" and name else one
            for one, name in zip(plan.poolings, names, strict=True)
        ],
    )


def _columns_sha256(source: Source) -> str:
    """SHA-256 of what the file keeps of the samples beside what the model makes of them.

    It is that of the JSON of ids, labels, names of labels and metadata, of which some rows at a
    time are made: the whole text would take more room than the ids.
    """
    digest = hashlib.sha256()

    def add(values: Iterable[Any]) -> None:
        values, before = iter(values), "["
        while block := list(itertools.islice(values, _HASHED_ROWS)):
            digest.update((before + json.dumps(block)[1:-1]).encode())
            before = ", "
        digest.update(b"[]" if before == "[" else b"]")

    digest.update(b"[")
    add(source.ids)
    digest.update(b", ")
    labels = source.labels
    if source.labels_in_items:
        digest.update(b'"in the items"')
    elif labels is None:
        digest.update(b"null")
    else:
        starts = range(0, len(labels), _HASHED_ROWS)
        add(v for start in starts for v in labels[start : start + _HASHED_ROWS].tolist())
    digest.update(b", ")
    add(source.label_names)
    digest.update(b", {")
    for i, (name, column) in enumerate(source.metadata.items()):
        digest.update(f"{', ' if i else ''}{json.dumps(name)}: ".encode())
        add(itertools.chain([_kind_of(column)], map(str, column)))
    digest.update(b"}]")
    return digest.hexdigest()


_HASHED_ROWS = 65_536


def _kind_of(column: Any) -> str:
    if isinstance(column, list) and column and all(isinstance(v, str) for v in column):
        return "texts"  # an array of them would take four times the room of the longest in each row
    dtype = np.asarray(column).dtype
    return "texts" if dtype.kind in "OU" else str(dtype)


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
        is_known = fold.is_known(module)
        if is_known:
            ablated = [point for point, _ in plan.ablated]
            stack.enter_context(fold.folded(module, [*plan.points, *ablated]))
        elif names := _own_generators(module):
            log.warning(
                "%s has a random generator of its own, which goes on from pass to pass: %s; if it "
                "draws from it, another run gives other rows",
                plan.model.name,
                listed(names),
            )
        yield stack.enter_context(_Forward(plan, is_known=is_known))


class _Forward:
    """The forward pass of a plan, for one piece after the other; the first is looked at closely.

    Args:
        plan: What to do.
        is_known: Whether the network may be run otherwise than it is written.
    """

    def __init__(self, plan: Plan, *, is_known: bool) -> None:
        self._plan = plan
        self._is_known = is_known
        self._rows = Rows(
            plan.points,
            plan.poolings,
            dtype=plan.dtype,
            normalize=plan.normalize,
            tokens=plan.model.tokens,
        )
        self._got = hooks.Capture(
            plan.model.module, plan.points, reduce=self._rows.reduce, only_here=True
        )
        self._got.is_verified = True  # by _look_first, where gradients are wanted
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
        self._memory = _Memory(plan, is_known=is_known)
        self._seen = Seen()
        self._stack = contextlib.ExitStack()
        self._is_draw_looked_at = self._draws = False
        self._is_checked = False
        self._is_looked_at = self._backward is None and not plan.ablated
        self._is_padding_checked = plan.model.tokenizer is None
        self._is_within_looked_at = plan.objective is not None or bool(plan.ablated)
        self._may_stop_early = is_known and not plan.save_outputs and self._backward is None
        self._whole: set[tuple[torch.Size, ...]] = set()  # shapes of inputs, less the samples
        self._of_mask: set[str] = set()

    def __enter__(self) -> "_Forward":
        self._stack.callback(self._memory.end)
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
            if not self._is_looked_at:
                self._is_looked_at = True
                self._look_first(inputs, labels, n=piece.size, seed=first)
            # A whole pass of such shapes has shown that each layer runs once.
            shapes = tuple(tensor.shape[1:] for tensor in tensors_of(inputs))
            got.stops_early = self._may_stop_early and shapes in self._whole
            states = None if self._is_draw_looked_at else random_states(plan.device)
            output = self._run(inputs, labels, piece.size)
            draws = states is not None and random_states(plan.device) != states
            if draws and plan.is_by_sample:
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
            if not self._is_checked and piece.size > 1:
                self._is_checked = True
                by_chance = _other_sizes(inputs) | rows.other_sizes | self._seen.sizes
                by_chance |= {size for one in tensors_in(output) for size in one.shape[1:]}
                # A layer of the user's own may have one axis more, of codes or queries.
                may_mix = not (self._is_known and plan.is_by_sample)
                if (may_mix and not self._memory.first_pass) or piece.size in by_chance:
                    _require_samples_first(
                        plan,
                        got,
                        rows,
                        self._run,
                        inputs,
                        labels,
                        output,
                        n=piece.size,
                        draws=self._draws,
                    )
            if not self._is_padding_checked:
                self._is_padding_checked = _require_padding_unseen(
                    plan, got, rows, self._run, batch
                )
            if new := rows.masked - self._of_mask:
                self._of_mask |= new
                if self._seen.strangers:
                    assert isinstance(inputs, dict)
                    self._require_own_tokens(new, inputs, self._seen.strangers, seed=first)
            if not self._is_within_looked_at:
                self._is_within_looked_at = True
                if not self._memory.first_pass:
                    self._say_of_padding_within(inputs, output, seed=first)
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
            with self._autocast():
                inputs = prepared.normalize(inputs)
        if self._is_known:
            inputs = channels_last(inputs)
        given = {} if isinstance(piece.inputs, Tensor) else piece.inputs
        wants_mask = bool(rows.mask_takers or plan.ablated)
        mask = token_mask(given, spellings=rows.spellings) if wants_mask else None
        rows.mask = None if mask is None else mask.to(plan.device)
        self._seen.strangers = strangers_to(rows.mask, given)
        rows.say_of_masks(given)
        rows.picture = picture_size(tensors_of(inputs))
        return inputs

    def _autocast(self) -> torch.autocast:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._plan.precision)
        return torch.autocast(self._plan.device.type, dtype=half, enabled=half is not None)

    def _run(self, inputs: Inputs, labels: Tensor | None, n: int) -> Any:
        """One pass, and one back where gradients are wanted."""
        module, title, rows = self._plan.model.module, self._plan.model.name, self._rows
        self._seen.n, self._seen.mask, self._seen.picture = n, rows.mask, rows.picture
        with contextlib.ExitStack() as block:
            if self._backward is not None:
                inputs = block.enter_context(differentiable(module, inputs))
            with self._autocast():
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

    def _look_first(self, inputs: Inputs, labels: Tensor | None, *, n: int, seed: int) -> None:
        """Set the ablations, and see by passes of the first batch that nothing else changes."""
        plan, got = self._plan, self._got
        module, title = plan.model.module, plan.model.name
        if self._backward is not None:
            got.remove()
        others = [point for point in plan.points if point.what in ("output", "input")]
        found = []
        with (
            hooks.Capture(module, others, reduce=self._rows.reduce, only_here=True) as before,
            FAST_PATHS_OFF,
            self._autocast(),
        ):
            for _ in range(2):
                seed_all(seed, plan.device)
                output = run_model(module, _copied(inputs), title=title)
                found.append([output, {one.name: before[one.name].clone() for one in others}])
        got.set()
        plain: list[Any] | None = found[0]
        got.is_verified = _gives_alike(plan, *found)
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
            output = self._run(_copied(inputs), labels, n)
            self._seen.is_plain = False
            ablating.require_fired()
            _require_same(plan, plain, [output, {one.name: got[one.name] for one in others}])
            rows_before = {point.name: got[point.name] for point in plan.points}
            seed_all(seed, plan.device)
            self._run(_copied(inputs), labels, n)
            if all(_is_same(rows_before[key], got[key]) for key in rows_before):
                log.warning(
                    "the ablations change none of the rows of the first batch: they are of layers "
                    "that do not lead to %s, or change no number",
                    ", ".join(rows_before),
                )
        elif self._backward is not None:
            seed_all(seed, plan.device)
            output = self._run(_copied(inputs), labels, n)
            _require_same(plan, plain, [output, {one.name: got[one.name] for one in others}])
        seed_all(seed, plan.device)

    def _say_of_padding_within(self, inputs: Inputs, output: Any, *, seed: int) -> None:
        """Say where the network masks padding by itself, and where torch treats it otherwise.

        Two more passes of the first batch, of networks with layers that can have a mask.
        """
        module, title, rows = self._plan.model.module, self._plan.model.name, self._rows
        layers = dict(module.named_modules())
        fused = any(isinstance(layer, nn.TransformerEncoder) for layer in layers.values())
        takers = rows.mask_takers if rows.mask is None and not self._is_known else []
        if not fused and not (takers and any(isinstance(x, _MASKED) for x in layers.values())):
            return
        masked: list[str] = []

        def entered(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _has_padding(layers[name], args, kwargs):
                masked.append(name)

        self._got.remove()
        try:
            if takers:
                seed_all(seed, self._plan.device)
                with (
                    hooks.watched(module, entered=entered, left=lambda *_: None),
                    self._autocast(),
                ):
                    run_model(module, _copied(inputs), title=title)
            if fused:
                seed_all(seed, self._plan.device)
                with self._autocast(), warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
                    plain = run_model(module, _copied(inputs), title=title)
                if output is not None and not _gives_alike(self._plan, plain, output):
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

    def _require_own_tokens(
        self, names: Collection[str], inputs: dict[str, Tensor], others: Sequence[str], *, seed: int
    ) -> None:
        """See that the tokens of layers are those of the mask, where others enter beside them.

        Raises:
            ShapeError: They are not, or both lead to the layer.
        """
        points = {
            dataclasses.replace(point, what="input" if point.is_at_input else "output")
            for point in self._plan.points
            if point.name in names
        }
        changed = {name: _another(one) if name in others else one for name, one in inputs.items()}
        found = []
        self._got.remove()
        with (
            hooks.Capture(
                self._plan.model.module,
                list(points),
                reduce=lambda _, activation: activation.float().mean(1),
                only_here=True,
            ) as got,
            self._autocast(),
        ):
            for given in (inputs, changed):
                seed_all(seed, self._plan.device)
                run_model(self._plan.model.module, _copied(given), title=self._plan.model.name)
                found.append({point.name: got[point.name].clone() for point in points})
        self._got.set()
        for name, rows in found[0].items():
            if not _is_near(found[1][name], rows):
                raise tokens_unknown(name, others)


class _Memory:
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


def _own_generators(module: nn.Module) -> list[str]:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return [
        ".".join(filter(None, (name, key)))
        for name, child in module.named_modules()
        for key, value in {**vars(type(child)), **vars(child)}.items()
        if isinstance(value, kinds)
    ]


def _other_sizes(inputs: Inputs) -> set[int]:
    """Sizes of the axes that are not that of the samples."""
    return {size for tensor in tensors_of(inputs) for size in tensor.shape[1:]}


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


def _ablating(plan: Plan, seen: Seen) -> hooks.Intervention:
    changes: dict[str, list[hooks.Change]] = {}
    for point, one in plan.ablated:
        change = functools.partial(_unless_plain, one, seen)
        changes.setdefault(point.name, []).append(change)
    # They stand in the identity as they were asked for, and hold the batch at hand.
    return hooks.intervene(plan.model.module, changes, is_told=False)


def _unless_plain(ablation: Ablation, seen: Seen, value: Tensor) -> Tensor:
    return value if seen.is_plain else ablation.changed(value, seen)


def _copied(inputs: Inputs) -> Inputs:
    """A model may work in place on what enters it."""
    return mapped(inputs, torch.clone)


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


def _asked_for(plan: Plan) -> str:
    """The gradients, or else the points of the ablations."""
    gradients = [point.name for point in plan.points if point.is_gradient]
    return ", ".join(gradients or [point.name for point, _ in plan.ablated])


def _require_same(plan: Plan, plain: Any, found: Any) -> None:
    """Raise LayerError if the model gives something else when gradients or changes are asked for.

    Copies go on in place of some tensors then: what a layer does to them in place, others do not
    see that hold the tensor itself.
    """
    if plain is not None and not _gives_alike(plan, plain, found):
        raise LayerError(
            f"{plan.model.name} gives something else when {_asked_for(plan)} is asked for: a layer "
            "there works in place on what another one takes too; name the layer before, or one "
            "around it"
        )


def _gives_alike(plan: Plan, output: Any, other: Any) -> bool:
    tensors = zip(tensors_in(output), tensors_in(other), strict=False)
    most = 1e-3 if plan.precision in ("fp32", "tf32") else 0.05
    return all(_is_alike(one, another, most=most) for one, another in tensors)


def _require_padding_unseen(
    plan: Plan,
    got: hooks.Capture,
    rows: Rows,
    run: Callable[[Inputs, Tensor | None, int], Any],
    batch: Batch,
) -> bool:
    """See that a text has the row that it has alone, also padded beside the longest one.

    Returns:
        Whether the batch had texts of two lengths to see it by.

    Raises:
        ModelError: It has another one: the network takes a mask of padding and does not keep to it.
    """
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
        rows.mask = (inputs["attention_mask"] != 0).to(plan.device) if mask is not None else None
        seed_all(0, plan.device)
        run(placed(inputs, plan.device), label if plan.objective == "loss" else None, 1)
        found.append({point.name: got[point.name].clone() for point in plan.points})
    rows.mask = mask
    most = 1e-4 if plan.precision == "fp32" else 0.1
    for name, row in found[0].items():
        if found[1][name].shape == row.shape and not _is_alike(found[1][name], row, most=most):
            raise ModelError(
                f"{plan.model.name} gives a text another row at {name} when it is padded beside "
                "longer ones, though it takes an attention_mask; such rows would hang on their "
                "batch: use batch_size=1, or another encoder"
            )
    return True


def _require_samples_first(
    plan: Plan,
    got: hooks.Capture,
    rows: Rows,
    run: Callable[[Inputs, Tensor | None, int], Any],
    inputs: Inputs,
    labels: Tensor | None,
    output: Any,
    *,
    n: int,
    draws: bool,
) -> None:
    """See by two samples alone that what is kept is a row a sample, and has no axis of the batch.

    Args:
        plan: What to do.
        got: What was captured of n samples.
        rows: Where it is pooled.
        run: A pass, as :meth:`_Forward._run`.
        inputs: Of the n samples.
        labels: Theirs.
        output: What the model gave for them.
        n: How many, at least 2.
        draws: Whether a pass draws random numbers, so that rows cannot be compared.

    Raises:
        ShapeError: The first axis of what a layer gives is not that of the samples, or another one
            is as long as there are of them.
    """

    def kept(output: Any) -> dict[str, Tensor]:
        found = {f"layer {point.name}": got[point.name] for point in plan.points}
        scores = class_scores(output)
        if scores is not None and (plan.save_outputs or plan.objective is not None):
            found[f"the output of {plan.model.name}"] = scores
        return found

    def again(rows_of: slice | list[int]) -> dict[str, Tensor]:
        some = _copied(mapped(inputs, lambda tensor: tensor[rows_of]))
        rows.mask = None if mask is None else mask[rows_of]
        of = None if labels is None else labels[rows_of]
        seed_all(0, plan.device)
        return kept(run(some, of, len(tensors_of(some)[0])))

    before, few, mask = kept(output), min(2, n - 1), rows.mask
    mixed: list[str] = []
    try:
        found = again(slice(few))
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
        mixed += [] if _gives_alike(plan, now, before[title][:few]) else [title]
    if mixed and not draws:
        log.warning(
            "%s: rows hang on the samples beside them, for two alone give others (a normalization "
            "over the batch, or tokens before samples); batch_size=1 gives each its own",
            listed(mixed),
        )
    if found:
        return
    # A model may be written for one size of batch alone: the samples in the other order then show
    # whether the rows go with them.
    backwards = list(range(n))[::-1]
    with contextlib.suppress(ModelError, LayerError):
        for title, now in again(backwards).items():
            was = before[title]
            if _is_near(now, was[backwards]):
                continue
            if not _is_near(now, was):
                log.warning(
                    "%s gives %s for %s samples, and whether its first axis is theirs could not be "
                    "told: the model takes no other number of them",
                    title,
                    tuple(now.shape),
                    n,
                )
            else:
                raise ShapeError(
                    f"{title} gives the same {tuple(now.shape)} for {n} samples in the other "
                    f"order, so its first axis is not that of the samples; {_SAMPLES_FIRST}"
                )


_SAMPLES_FIRST = (
    "choose another layer, or where tokens come first pooling=function, such as lambda a: a.mean(0)"
)


def _is_same(rows: Tensor, others: Tensor) -> bool:
    """Whether they are equal, NaN to NaN too."""
    if rows.shape != others.shape:
        return False
    return bool(((rows == others) | (rows.isnan() & others.isnan())).all())


def _is_near(rows: Tensor, others: Tensor) -> bool:
    return rows.shape == others.shape and torch.allclose(
        rows.double(), others.double(), rtol=1e-3, atol=1e-6, equal_nan=True
    )


def _is_alike(values: Tensor, others: Tensor, *, most: float) -> bool:
    """Whether they differ by at most a share of the largest, masked ones aside.

    Scores of classes that are masked are often -1e9 or less, and would hide all others: what is
    10,000 times as large as nearly all is held to its own size alone.
    """
    if values.shape != others.shape:
        return False
    ours, theirs = values.detach().double().flatten(), others.detach().double().flatten()
    sizes = theirs.abs()
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    if not torch.equal(ours.isfinite(), theirs.isfinite()) or not len(sizes):
        return bool(torch.equal(ours.nan_to_num(), theirs.nan_to_num()))
    small = sizes.kthvalue(1 + len(sizes) // 100).values
    scale = sizes[sizes <= 1e4 * small].amax()
    is_near = (ours - theirs).abs() <= most * torch.maximum(scale, theirs.abs())
    return bool((is_near | ~theirs.isfinite()).all())


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
