"""What an extraction is to do, and what of it decides its rows."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from embedx import hooks, models
from embedx import pooling as pools
from embedx.ablations import Ablation
from embedx.inputs import Precision, is_by_sample
from embedx.layout import Field, layer_name
from embedx.models import Model
from embedx.objectives import Objective
from embedx.points import Point
from embedx.sources import Source


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
