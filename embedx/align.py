"""What two files have in common: the space of their rows, samples, how a map lies on another."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from embedx.matrix import Array

_OF_MODEL = ("model", "weights_sha256", "code", "tokens", "preprocess", "normalize", "revisions")
_OF_LAYER = ("pooling", "pooling_code")  # a list each, as long as that of the layers
_AS_ASKED = ("objective", "ablate")  # where there are none, as before these could be asked for
SPACE = (*_OF_MODEL, *_OF_LAYER, *_AS_ASKED)


def space_of(identity: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """What decides in which space the rows of a layer lie, as far as the identity of a file says.

    Distances between rows of two files mean something where these are equal.

    Args:
        identity: Of the file.
        layer: The capture point.

    Returns:
        Values by the keys of ``SPACE``, but for those that the identity has not.
    """
    space = {key: identity[key] for key in _OF_MODEL if key in identity}
    space |= {key: identity.get(key) for key in _AS_ASKED if space}
    layers = identity.get("layers")
    for key in _OF_LAYER:
        values = identity.get(key)
        if isinstance(layers, list) and isinstance(values, list) and layer in layers:
            at = layers.index(layer)
            space.update({key: values[at]} if at < len(values) else {})
    return space


def untold(mine: Mapping[str, Any], its: Mapping[str, Any]) -> str:
    """What cannot be told of two files' spaces, as a line; empty where nothing is missing.

    Args:
        mine: What :func:`space_of` gives of the one, perhaps with further settings.
        its: The same of the other.
    """
    known = mine.keys() & its.keys()
    missing = [key for key in dict.fromkeys([*SPACE, *mine]) if key not in known]
    what = ", ".join(missing)
    return f"whether both were made with the same {what} cannot be told" if missing else ""


def shared_rows(ours: Sequence[str], theirs: Sequence[str]) -> tuple[Array, Array]:
    """The rows of two files that have the same id.

    Args:
        ours: The n ids of one, each once.
        theirs: The ids of the other, each once.

    Returns:
        Indices ``(k,)`` into each, pair by pair, in the order of ``ours``.
    """
    row_of = {sample_id: row for row, sample_id in enumerate(theirs)}
    at = np.array([row_of.get(sample_id, -1) for sample_id in ours], np.int64)
    found = np.flatnonzero(at >= 0)
    return found, at[found]


class Samples(Protocol):
    """What is asked of a file to tell of which samples it is: see ``embedx.store.Embeddings``."""

    @property
    def path(self) -> Path: ...

    @property
    def ids(self) -> Sequence[str]: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    def label_texts(self) -> list[str] | None: ...


@dataclasses.dataclass(frozen=True)
class OnlyIds:
    """Samples of which no more is known than their ids, as those of a map whose run is elsewhere.

    Attributes:
        path: Of the file that has them.
        ids: n texts.
    """

    path: Path
    ids: Sequence[str]

    @property
    def identity(self) -> Mapping[str, Any]:
        return {}

    def label_texts(self) -> list[str] | None:
        return None


def doubt_of_pairs(ours: Samples, theirs: Samples) -> str:
    """Why rows of two files that have the same id may be of other samples, in a line.

    The number of a row tells a sample only among the same data.

    Returns:
        Empty where no id is the same, ids are more than numbers, the data are the same, or all
        labels are, unless these stand sorted.
    """
    mine, its = (one.identity.get("items") for one in (ours, theirs))
    if mine is not None and mine == its:
        return ""
    if not (_are_numbers(ours.ids) and _are_numbers(theirs.ids)):
        return ""
    at, there = shared_rows(ours.ids, theirs.ids)
    if not len(at):
        return ""
    why = "whether these are the same samples cannot be told"
    if mine is not None and its is not None:
        why = "their data are not the same"
    labels, others = ours.label_texts(), theirs.label_texts()
    if labels is not None and others is not None:
        rows = zip(at.tolist(), there.tolist(), strict=True)
        pairs = [(labels[i], others[j]) for i, j in rows if labels[i] and others[j]]
        n_differ = sum(label != other for label, other in pairs)
        if n_differ:
            why = f"{n_differ:,} of the {len(pairs):,} labels differ"
        n_changes = sum(one != other for one, other in itertools.pairwise(pairs))
        if not n_differ and n_changes > len(set(pairs)) > 1:  # sorted ones are alike in any data
            return ""
    return (
        f"rows of {ours.path} and {theirs.path} are paired by their numbers, and {why}: what is "
        "made of such pairs says something only of the same samples in the same order"
    )


def _are_numbers(ids: Sequence[str]) -> bool:
    """Whether ids are numbers that rise, all with the same text before them or none.

    Such as of rows, of lines that are not blank and of samples in shards: ``7``, ``line-000007``,
    ``00001/0007``. Those of files, such as ``0007.png``, are names.
    """
    if not len(ids) or not (match := re.match(r"\D*", ids[0])):
        return False
    start = match[0]
    before: tuple[int, ...] = ()
    for one in ids:
        if not one.startswith(start) or not _NUMBERS.fullmatch(one, len(start)):
            return False
        numbers = tuple(map(int, re.findall(r"\d+", one[len(start) :])))
        if numbers <= before:
            return False
        before = numbers
    return True


_NUMBERS = re.compile(r"\d+([/_-]\d+)*", re.ASCII)


def places_in(ids: Sequence[str], coords: Array, theirs: Sequence[str]) -> Array:
    """Where a map of other rows has these, by their ids.

    Args:
        ids: The n ids of these, each once.
        coords: The map, shape ``(k, m)``.
        theirs: The k ids of its rows, each once.

    Returns:
        Shape ``(n, m)`` float64, NaN where the map has none.
    """
    found, there = shared_rows(ids, theirs)
    placed = np.full((len(ids), coords.shape[1]), np.nan)
    placed[found] = coords[there]
    return placed


def procrustes(coords: Array, aim: Array) -> tuple[Array, Array]:
    """Rotation or reflection, and shift, that bring a map closest to another.

    There is no scaling: distances stay what they are.

    Args:
        coords: Shape ``(n, m)``, NaN for rows that do not count.
        aim: Shape ``(n, m)``, row-aligned, NaN likewise.

    Returns:
        ``turn`` ``(m, m)`` and ``shift`` ``(m,)``, for ``coords @ turn + shift``.

    References:
        Schönemann 1966, Psychometrika 31(1).
    """
    both = np.isfinite(aim).all(axis=1) & np.isfinite(coords).all(axis=1)
    ours, theirs = coords[both].astype(np.float64), aim[both]
    center, to = ours.mean(axis=0), theirs.mean(axis=0)
    left, _, right = np.linalg.svd((ours - center).T @ (theirs - to))
    turn = left @ right
    return turn, to - center @ turn
