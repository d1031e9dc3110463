"""What capture points give in a pass, as rows of a file: pooled, in arrays, with their facts."""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embedx import layout, pooling
from embedx.errors import ShapeError
from embedx.grids import channels_of
from embedx.matrix import Array
from embedx.points import Point

log = logging.getLogger("embedx")


class Rows:
    """Reduces activations inside the hook, and turns what was captured into arrays.

    Args:
        points: The capture points.
        poolings: One for each.
        dtype: Of the arrays.
        normalize: Whether rows are scaled to length 1 (L2), of all points or of each; a row of
            zeros stays zero.
        tokens: The pooling that ``auto`` means for tokens.
        layers: The layers by their names: of a convolution it is known where channels are.

    Attributes:
        mask: Shape ``(n, t)``, which tokens of the pass at hand are none of padding; None where
            all are.
        masked: The points that have been pooled by such a mask.
        strangers: What entered beside the mask and may be what a layer's tokens are of, by name: a
            pooling that takes the mask is refused. Empty where that is found out otherwise.
        picture: Height and width of what entered the model; None where it is no picture.
        spellings: What masks of floats have meant so far, for :func:`token_mask`.
    """

    def __init__(
        self,
        points: Sequence[Point],
        poolings: Sequence[pooling.Pooling],
        *,
        dtype: np.dtype[Any],
        normalize: bool | Sequence[bool],
        tokens: str | None = None,
        layers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.mask: Tensor | None = None
        self.masked: set[str] = set()
        self.strangers: Sequence[str] = ()
        self.picture: tuple[int, int] | None = None
        self.spellings: set[str] = set()
        self._points = list(points)
        self._poolings = dict(zip((p.name for p in points), poolings, strict=True))
        self._dtype = dtype
        each = [normalize] * len(points) if isinstance(normalize, bool) else normalize
        self._normalize = dict(zip((p.name for p in points), each, strict=True))
        self._tokens = tokens
        self._layers = layers or {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._vanished: set[str] = set()
        self._is_said_of_masks = False
        self._unknown_mask: str | None = None
        self._padded: str | None = None
        self._n_noted = 0  # passes in which a mask would have been, and left nothing out
        self._earlier: dict[str, Tensor] = {}  # what entered with the first samples of them

    def reduce(self, point: Point, activation: Tensor) -> Tensor:
        """Pool an activation ``(n, ...)``, for :class:`~embedx.hooks.Capture`.

        A pooling of the user's own may work in place, fill one buffer again and again, or be a
        module in train mode: it gets a copy, runs in eval mode, and what it gives is copied.

        Raises:
            ShapeError: The pooling does not take its shape, or is not given or gives no dense
                tensor.
        """
        is_dense = activation.layout == torch.strided and not activation.is_nested
        if not is_dense or activation.is_quantized or activation.is_meta:
            raise ShapeError(
                f"layer {point.name} gives a quantized, sparse or nested tensor, or one on meta; "
                "choose a layer whose output is dense"
            )
        is_first = point.name not in self._shapes
        if is_first:
            self._settle(point, activation)
        chosen = self._poolings[point.name]
        assert chosen.function is not None
        is_own = chosen.code != ""
        mask = self.mask if chosen.takes_mask else None
        if mask is not None:
            self.masked.add(point.name)
            if self.strangers:
                raise tokens_unknown(point.name, self.strangers)
        if is_own:
            activation = activation.clone()
            mask = None if mask is None else mask.clone()
        with_mask = {} if mask is None else {"mask": mask}
        try:
            with _in_eval_mode(chosen.module):
                pooled = chosen.function(activation, **with_mask)
        except ShapeError as error:
            raise ShapeError(f"layer {point.name}: {error}") from None
        if not isinstance(pooled, Tensor):
            raise ShapeError(
                f"layer {point.name}: pooling={chosen.name} gives a {type(pooled).__name__}; let "
                "it give a tensor (n, d)"
            )
        if is_first and chosen.name in _AVERAGES:
            self._say_of_cancelled(point, activation, pooled)
        return pooled.clone() if is_own else pooled

    def _say_of_cancelled(self, point: Point, activation: Tensor, pooled: Tensor) -> None:
        """Say where averages are nothing but the rounding of what they are of.

        As of a normalization over the very axes that are averaged, by which they are zero.
        """
        if activation.is_complex() or not pooled.numel():
            return
        if pooled.abs().max() < 1e-6 * activation.float().abs().mean():
            log.warning(
                "%s: its averages by pooling=%s cancel to rounding, as those of a normalization "
                "over the same axes do, so that rows mean nothing; choose another layer or pooling",
                point.name,
                self._poolings[point.name].name,
            )

    def _settle(self, point: Point, activation: Tensor) -> None:
        if self._poolings[point.name].name == "auto":
            layer = None if point.is_at_input else self._layers.get(point.layer)
            try:
                name = pooling.choose(
                    activation,
                    tokens=self._tokens,
                    is_masked=self.mask is not None,
                    picture=self.picture,
                    channels=None if layer is None else channels_of(layer, activation),
                )
            except ShapeError as error:
                raise ShapeError(f"layer {point.name}: {error}") from None
            (self._poolings[point.name],) = pooling.per_point(name, n_points=1)
            shape = ", ".join(map(str, activation.shape[1:]))
            log.info("pooling of %s: %s, from (n, %s)", point.name, name, shape)
        self._shapes[point.name] = tuple(activation.shape[1:])

    @property
    def mask_takers(self) -> list[str]:
        """The points whose pooling wants to know which tokens are padding, or may want it yet."""
        return [
            name
            for name, chosen in self._poolings.items()
            if chosen.name == "auto" or chosen.takes_mask
        ]

    def note_masks(self, inputs: Mapping[str, Any]) -> None:
        """Note what looks like a mask of padding and is not known as one, to be said of the rows.

        Where none is known, in the first passes of 16 samples and in each whose number is a power
        of two, for data may be in order of length; beside one that leaves nothing out, in each
        until it is said, if something else leaves out some. Beside one that does it is looked whose
        tokens it is of. Few samples are looked at together with the first ones.

        Args:
            inputs: What enters the model, by names.
        """
        leaves_out = self.mask is not None and not self.mask.all()
        if self._is_said_of_masks or not self.mask_takers or leaves_out:
            return
        self._n_noted += 1
        is_one = self._n_noted & (self._n_noted - 1) == 0
        n_earlier = min(map(len, self._earlier.values()), default=_SHOWN)
        if self.mask is None and not is_one and n_earlier >= _SHOWN:
            return
        others = {name: _numbers(given) for name, given in inputs.items() if name not in MASKS}
        if _go_together(self._earlier, others, most=None if is_one else _SHOWN):
            others = {name: torch.cat([self._earlier[name], others[name]]) for name in others}
        are_short = all(map(_is_short, others.values()))
        n = min((len(one) for one in others.values() if are_short), default=_SHOWN)
        self._earlier = {
            name: one[:_SHOWN].detach().clone() for name, one in others.items() if are_short
        }
        if self.mask is not None or self._n_noted == 1 or n >= _TELLING:
            self._unknown_mask = _like_a_mask(others, has_padding=self.mask is not None)
            self._padded = None if self._unknown_mask else _like_padded(others)

    def _say_of_masks(self) -> None:
        """Say it, once it is known which poolings take one."""
        name, self._unknown_mask = self._unknown_mask, None
        padded, self._padded = self._padded, None
        if not (takers := self.mask_takers):
            return
        if padded is not None:
            self._is_said_of_masks = True
            log.warning(
                "%s looks padded, for some samples end or begin with several of one value that is "
                "nowhere else in it, and no mask says so: if it is, padding counts as tokens in "
                "the rows of %s; give an attention_mask with the samples",
                f"argument {padded}" if padded.isdigit() else padded,
                ", ".join(takers),
            )
        if name is not None:
            self._is_said_of_masks = True
            log.warning(
                "%s looks like a mask of padding or lengths, and is none of those known by their "
                "names (attention_mask, src_key_padding_mask, key_padding_mask): if it is one, "
                "padding counts as tokens in the rows of %s",
                f"argument {name}" if name.isdigit() else name,
                ", ".join(takers),
            )

    @property
    def other_sizes(self) -> set[int]:
        """Sizes of the axes of the activations, less the first."""
        return {size for shape in self._shapes.values() for size in shape}

    def arrays(
        self, got: Mapping[str, Tensor], *, n: int
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """What was captured in the latest pass.

        Args:
            got: A tensor ``(n, d)`` for each point.
            n: How many samples went in.

        Returns:
            An array ``(n, d)`` for each point, by the name of its dataset, and the attributes of
            the dataset.

        Raises:
            LayerError: A point did not fire, or its layer ran twice.
            ShapeError: A tensor is of another shape, complex, or of too large whole numbers.
        """
        arrays: dict[str, Array] = {}
        attrs: dict[str, dict[str, Any]] = {}
        self._say_of_masks()
        for point in self._points:
            rows = got[point.name]
            if rows.ndim != 2 or len(rows) != n:
                raise ShapeError(
                    f"layer {point.name} gives {tuple(rows.shape)} for {n} samples after pooling; "
                    "choose a layer with one entry a sample"
                )
            if not rows.shape[1]:
                raise ShapeError(f"layer {point.name} gives rows of no numbers; choose another")
            require_float32(rows, what=f"layer {point.name}")
            if self._normalize[point.name]:
                wide = rows.double() if rows.dtype == torch.float64 else rows.float()
                values = _of_length_one(wide.cpu().numpy())
            else:
                values = rows.float().cpu().numpy()
            field = layout.embeddings_field(
                point.name, n_features=rows.shape[1], dtype=self._dtype, attrs={}
            )
            with np.errstate(all="ignore"):  # overflow makes the row a failed one
                arrays[field.name] = values.astype(self._dtype, copy=False)
            is_narrower = self._dtype == np.float16 or rows.dtype == torch.float64
            if is_narrower and point.name not in self._vanished:
                kept = np.abs(arrays[field.name]).max(axis=1)
                is_lost = (rows != 0).any(1).cpu().numpy() & (kept < _FEW_DIGITS[self._dtype.name])
                if is_lost.any():
                    self._vanished.add(point.name)
                    is_there = self._dtype == np.float16 and values[is_lost].any(axis=1).all()
                    log.warning(
                        "rows of %s are so small that %s makes zeros of them, or keeps few of "
                        "their digits; use %s",
                        point.name,
                        self._dtype,
                        "dtype=float32" if is_there else "normalize=true",
                    )
            attrs[field.name] = {
                "layer": point.layer,
                "what": point.what,
                "pooling": self._poolings[point.name].name,
                "normalized": self._normalize[point.name],
                "activation_shape": list(self._shapes[point.name]),
            }
        return arrays, attrs


def require_float32(tensor: Tensor, *, what: str) -> None:
    """Raise ShapeError for numbers that are no floats of 32 bits, and none near them."""
    if tensor.is_complex():
        raise ShapeError(f"{what} gives complex numbers")
    if not tensor.is_floating_point() and (tensor.float().to(tensor.dtype) != tensor).any():
        raise ShapeError(
            f"{what} gives whole numbers above 2**24, which float32 does not hold; choose another "
            "layer"
        )


@contextlib.contextmanager
def _in_eval_mode(module: nn.Module | None) -> Iterator[None]:
    """A pooling that is a module; it may have been put into another mode since the last pass."""
    modes = [] if module is None else [(child, child.training) for child in module.modules()]
    try:
        for child, _ in modes:
            child.training = False
        yield
    finally:
        for child, training in modes:
            child.training = training


def _of_length_one(rows: Array) -> Array:
    """Rows over their lengths, which in float32 would overflow or vanish when squared."""
    wide = rows.astype(np.float64)
    if rows.dtype == np.float64:  # and so would these; powers of two change no digit
        wide = np.ldexp(wide, -np.frexp(np.abs(wide).max(axis=1, keepdims=True))[1])
    lengths = np.sqrt(np.square(wide).sum(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):  # Inf over Inf makes the row a failed one
        wide /= np.where(lengths == 0, 1, lengths)
    return wide.astype(np.float32)


def not_finite(arrays: Mapping[str, Array]) -> dict[int, str]:
    """Rows that hold NaN or Inf, with where: they are failed rows of a file."""
    found: dict[int, str] = {}
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            for i in np.flatnonzero(~np.isfinite(array).all(axis=1)).tolist():
                found[i] = f"NaN or Inf in {name.split('/')[-1]}"
    return found


def picture_size(inputs: Iterable[Any]) -> tuple[int, int] | None:
    """Height and width of what enters a model, if that is one ``(n, c, h, w)``."""
    sizes = {
        tuple(one.shape[2:])
        for one in inputs
        if isinstance(one, Tensor) and one.ndim == 4 and one.numel()
    }
    return next(iter(sizes)) if len(sizes) == 1 else None  # type: ignore[return-value]


def token_mask(inputs: Mapping[str, Any], *, spellings: set[str]) -> Tensor | None:
    """Which tokens are none of padding, in the spellings that libraries have for it.

    Args:
        inputs: What enters a model, by the names of its arguments.
        spellings: Those of the passes before, to which that of this one is added: floats that are
            all zeros are none of padding if added to attention, and all of it if factors.

    Returns:
        Shape of the mask, such as ``(n, t)``, true for a token; None where there is no mask.

    Raises:
        ShapeError: The mask is neither of 0 and 1 nor one that is added to attention, or not the
            same of these in all passes; or there is another one, of other tokens.
    """
    _require_one_mask(inputs)
    for name in MASKS[:3]:
        if isinstance(mask := inputs.get(name), Tensor):
            break
    else:
        return None
    if mask.is_complex():
        raise ShapeError(f"{name} holds complex numbers; give true and false, or 1 and 0")
    is_padding = name != "attention_mask"
    if mask.dtype != torch.bool and mask.numel():
        lowest, highest = mask.min(), mask.max()
        is_float = mask.is_floating_point()
        if is_float and not is_padding and lowest == highest == 0 and not spellings:
            raise ShapeError(
                f"{name} is of floats that are zeros alone: padding alone, if 1 is a token, or no "
                "padding, if it is added to attention; give true and false"
            )
        is_added = lowest < 0 or (
            is_float and (is_padding or (highest == 0 and "1 and 0" not in spellings))
        )
        if is_float:
            spellings.add("0 and less" if is_added else "1 and 0")
        if len(spellings) > 1:
            raise ShapeError(
                f"{name} is of floats 1 and 0 in one batch, and of 0 and less, or of zeros alone, "
                "in another; give true and false"
            )
        if is_added:
            # Added to attention: 0 for a token, and for padding what leaves nothing of it.
            if not ((mask == 0) | (mask <= _LEAVES_NOTHING)).all():
                raise ShapeError(
                    f"{name} holds {float(lowest)} to {float(highest)}; give true and false, 1 and "
                    f"0, or 0 for a token and {_LEAVES_NOTHING} or less for padding"
                )
            mask, is_padding = mask == 0, False
        elif is_float and not ((mask == 0) | (mask == 1)).all():
            raise ShapeError(
                f"{name} holds {float(lowest)} to {float(highest)}; give true and false, or 1 and 0"
            )
    # A copy: the model may change its own in place before the layer runs.
    return mask == 0 if is_padding else mask != 0


def strangers_to(mask: Tensor | None, inputs: Mapping[str, Any]) -> list[str]:
    """What enters beside a mask ``(n, t)`` of one sequence and may have t tokens of its own.

    Args:
        mask: The mask; None where there is none.
        inputs: What enters a model, by the names of its arguments.
    """
    if mask is None or mask.ndim != 2:
        return []
    has_own = any(isinstance(inputs.get(name), Tensor) for name in _OF_SECOND_SEQUENCES)
    return [
        name
        for name, given in inputs.items()
        if isinstance(given, Tensor)
        and name not in MASKS
        and (
            # Pictures, films and sound, unless each token of the mask is one.
            ((given.ndim > 3 or name in _OF_SOUND) and given.shape[:2] != mask.shape)
            or (
                name in _SECOND_SEQUENCES
                and not has_own
                and given.ndim > 1
                and given.shape[1] == mask.shape[1]
            )
        )
    ]


def tokens_beside(mask: Tensor, inputs: Mapping[str, Any]) -> list[str]:
    """The names of tensors ``(n, t, ...)`` that enter beside a mask ``(n, t)``."""
    return [
        name
        for name, given in inputs.items()
        if isinstance(given, Tensor)
        and name not in MASKS
        and mask.ndim == 2
        and given.shape[:2] == mask.shape
    ]


def tokens_unknown(point: str, strangers: Sequence[str]) -> ShapeError:
    """The error for a layer whose tokens may be those of the mask or those of something else."""
    return ShapeError(
        f"layer {point}: the mask of padding may not be of its tokens, for "
        f"{' and '.join(strangers)} enters beside it, without a mask; choose a pooling that takes "
        "none, such as pooling=cls or a function of your own, or run that part of the model alone"
    )


def is_like_a_mask(name: str, given: Tensor) -> bool:
    """Whether a tensor is one of truth values ``(n, t)`` that is called a mask, or padding."""
    is_named = re.search("mask|pad", name.lower()) is not None
    return given.ndim == 2 and is_named and bool(((given == 0) | (given == 1)).all())


def _like_a_mask(inputs: Mapping[str, Any], *, has_padding: bool = False) -> str | None:
    """The name of truth values ``(n, t)`` beside a tensor of as many tokens, or of lengths.

    Some of them are to differ, if it has padding.

    With axes of one entry between, such as ``(n, 1, 1, t)``, or ``(n, t, t)`` that samples do not
    share, they are taken for them too, and so are sequences of several lengths packed as one.
    """
    for name, given in inputs.items():
        is_packed = isinstance(given, nn.utils.rnn.PackedSequence)
        if is_packed and bool((given.batch_sizes != given.batch_sizes[0]).any()):
            return name
    tensors = {name: one for name, given in inputs.items() if _is_plain(one := _numbers(given))}
    for name, tensor in tensors.items():
        others = [one.shape[:2] for one in tensors.values() if one is not tensor]
        of_tokens = tensor
        if tensor.ndim > 2 and tensor.numel():
            of_tokens = tensor.reshape(
                len(tensor), *(size for size in tensor.shape[1:] if size > 1)
            )
        if of_tokens.ndim == 3 and of_tokens.shape[1] == of_tokens.shape[2]:
            is_shared = bool((of_tokens == of_tokens[:1]).all())
            of_tokens = of_tokens if is_shared else of_tokens[:, -1]
        if of_tokens.ndim != 2 or name in _NO_MASKS or of_tokens.shape not in others:
            continue
        is_true = of_tokens != 0
        if has_padding and (not is_true.any() or is_true.all()):
            continue
        is_named = re.search("mask|pad", name.lower()) is not None
        if tensor.dtype == torch.bool:
            return name
        if (has_padding or tensor.is_floating_point() or tensor.ndim > 2) and not is_named:
            continue
        if bool(((tensor == 0) | (tensor == 1)).all()):
            return name
    for name, tensor in tensors.items():
        if tensor.ndim != 1 or tensor.is_floating_point() or "len" not in name.lower():
            continue
        if has_padding and not (tensor != tensor[:1]).any():
            continue
        if any(one.ndim > 1 and len(one) == len(tensor) for one in tensors.values()):
            return name
    return None


def _numbers(given: Any) -> Any:
    """Whole numbers in a list, or numbers in an array, as a tensor; else what is given."""
    is_list = isinstance(given, (list, tuple)) and len(given) > 0
    is_whole = is_list and all(type(one) is int for one in given)
    is_array = isinstance(given, np.ndarray) and given.dtype.kind in "biuf"
    return torch.as_tensor(given) if is_whole or is_array else given


def _is_plain(given: Any) -> bool:
    if not isinstance(given, Tensor) or given.layout != torch.strided:
        return False
    return not (given.is_nested or given.is_quantized)


def _is_short(given: Any) -> bool:
    """Whether it is a plain tensor of words, steps or lengths, one or more a sample."""
    return _is_plain(given) and 1 <= given.ndim <= 3 and given.numel() > 0


def _go_together(
    earlier: Mapping[str, Tensor], inputs: Mapping[str, Any], *, most: int | None
) -> bool:
    """Whether the samples of a batch, of fewer than so many, may stand beside earlier ones."""
    return earlier.keys() == inputs.keys() and all(
        _is_short(given)
        and (most is None or len(given) < most)
        and (given.shape[1:], given.dtype, given.device)
        == (earlier[name].shape[1:], earlier[name].dtype, earlier[name].device)
        for name, given in inputs.items()
    )


def _like_padded(inputs: Mapping[str, Any]) -> str | None:
    """The name of words or sound ``(n, t)``, steps ``(n, t, d)`` or ``(n, d, t)``, or frames
    ``(n, t, c, h, w)`` of several lengths, padded to t.
    """
    for name, given in inputs.items():
        if not _is_plain(given) or not given.numel() or name in _NOT_PADDED:
            continue
        steps: list[Tensor] = []
        if given.ndim < 2 or len(given) < 2 or given.is_complex() or given.dtype == torch.bool:
            continue
        if given.ndim == 2:
            is_long = given.shape[1] >= (_SOUND if given.is_floating_point() else _WORDS)
            steps = [given.unsqueeze(2)] if is_long else []
        elif given.ndim in (3, 5) and given.is_floating_point():
            is_turned = given.ndim == 3 and given.shape[2] > given.shape[1]
            steps = [given.flatten(2), *([given.transpose(1, 2)] if is_turned else [])]
        if any(_ends_alike(one) or _ends_alike(one.flip(1)) for one in steps):
            return name
    return None


def _ends_alike(steps: Tensor) -> bool:
    """Whether some samples end with two or more of one step, in runs of several lengths, and
    outside of these there is none.

    Args:
        steps: Shape ``(n, t, d)``.
    """
    ends = steps[:, -1:]
    runs = (steps == ends).all(2).flip(1).cumprod(1).sum(1)
    one = ends[runs.argmax()]
    is_pad = (steps == one).all(2)
    runs = is_pad.flip(1).cumprod(1).sum(1)
    are_all = bool(is_pad.sum() == runs.sum())
    if one.any() and len(steps) < _TELLING:
        return False
    # Any but zeros may be at the ends of some by chance, and twice of one.
    n_least, n_steps = (2, 5) if one.any() else (1, 2)
    is_some = (runs > 0).sum() >= n_least and runs.max() > 1 and runs.sum() >= n_steps
    return bool(are_all and is_some and runs.min() < runs.max() < steps.shape[1])


def _require_one_mask(inputs: Mapping[str, Any]) -> None:
    """Refuse several masks that differ, such as of encoder and decoder: a layer may be of any."""
    masks = {name: inputs[name] for name in MASKS if isinstance(inputs.get(name), Tensor)}
    others = [name for name in masks if name in _OF_OTHER_TOKENS]
    if not others and len(masks) < 2:
        return
    (name, first), *more = masks.items()

    def is_same(other: str, mask: Tensor) -> bool:
        if mask.shape != first.shape:
            return False
        is_turned = other.endswith("attention_mask") != name.endswith("attention_mask")
        if not is_turned:
            return bool((mask == first).all())
        # Floats are factors or added to attention, which two of them may not be alike.
        are_truths = not (mask.is_floating_point() or first.is_floating_point())
        return are_truths and bool(((mask == 0) == (first != 0)).all())

    is_one = len(masks) > len(others) and all(is_same(*one) for one in more)
    if not is_one:
        raise masks_unknown(list(masks))


def require_no_other_mask(mask: Tensor | None, inputs: Mapping[str, Any]) -> None:
    """Refuse a mask ``(n, t)`` beside which one of as many tokens enters that may be a layer's own.

    Where it can be looked whose tokens those of a layer are, this is not for.

    Args:
        mask: Which tokens are none of padding; None where there is no mask.
        inputs: What enters a model, by the names of its arguments.

    Raises:
        ShapeError: There is one, such as ``query_attention_mask``, that says something else.
    """
    if mask is None:
        return
    for name, given in inputs.items():
        is_named = re.fullmatch(r".+(attention|padding)_mask", name) and name not in MASKS
        if not is_named or name == "global_attention_mask" or not isinstance(given, Tensor):
            continue
        tokens = given != 0 if name.endswith("attention_mask") else given == 0
        if given.shape == mask.shape and not torch.equal(tokens, mask.to(given.device)):
            raise masks_unknown([next(one for one in MASKS if one in inputs), name])


def masks_unknown(names: Sequence[str]) -> ShapeError:
    """The error where several masks enter, and a layer may be of the tokens of any."""
    return ShapeError(
        f"which tokens of a layer are padding is not known where there is {' and '.join(names)}; "
        "choose a pooling that takes no mask, such as pooling=cls or a function of your own, or "
        "run the encoder alone"
    )


_OF_SECOND_SEQUENCES = ("decoder_attention_mask", "tgt_key_padding_mask")
_NOT_PADDED = (
    *("token_type_ids", "position_ids", "labels"),
    *("special_tokens_mask", "global_attention_mask", "bool_masked_pos"),
)
_NO_MASKS = ("input_ids", *_NOT_PADDED)
_OF_OTHER_TOKENS = (
    *_OF_SECOND_SEQUENCES,
    *("encoder_attention_mask", "memory_key_padding_mask"),
)
MASKS = ("attention_mask", "src_key_padding_mask", "key_padding_mask", *_OF_OTHER_TOKENS)
_SECOND_SEQUENCES = (
    *("decoder_input_ids", "decoder_inputs_embeds", "labels", "tgt", "trg", "tgt_tokens"),
    *("prev_output_tokens", "passage_ids", "visual_embeds", "visual_feats"),
)
_OF_SOUND = ("input_features", "input_values")
_AVERAGES = ("gap", "gap_last", "mean_token")
# Below these the largest number of a row has less than eight binary digits.
_SHOWN = 16  # samples that may show what is padding
_SOUND = 400  # samples of sound at least; of fewer floats each is a feature of its own
_WORDS = 4  # words at least; of fewer some end alike by chance, as classes in a table
_TELLING = 4  # so many of small batches together do
_FEW_DIGITS = {"float16": 2.0**-17, "float32": 2.0**-142}
_LEAVES_NOTHING = -100  # exp of it, beside that of 0
