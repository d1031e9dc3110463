"""The stage ``extract``: data through a model, what its layers give into ``embeddings.h5``."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
import torch.utils.data
import yaml
from torch import Tensor, nn

from embedx import data as sources
from embedx import fold, hooks, models, store
from embedx import pooling as pools
from embedx.ablations import Ablation, Seen, as_ablations
from embedx.checks import checked
from embedx.columns import concatenated
from embedx.configs import public_config, settings_sha256
from embedx.data import Shards, Source
from embedx.errors import (
    ConfigError,
    DataError,
    Interrupted,
    LayerError,
    ModelError,
    ShapeError,
    StoreError,
    listed,
    number_of,
)
from embedx.fingerprints import code_sha256, state_marks, value_sha256
from embedx.inputs import (
    TOKENS_FIELD,
    Batch,
    Batches,
    Inputs,
    Network,
    Piece,
    Precision,
    as_model,
    as_source,
    channels_last,
    device_of,
    environment,
    in_order,
    matmul_precision,
    only,
    placed,
    rows_together,
    seed_all,
    start_worker,
    started,
    workers_said,
)
from embedx.models import Model, Preprocess
from embedx.objectives import Backward, Objective, read_classes, scores_of
from embedx.parts import Engine, Feed, append_parts, part_rows
from embedx.pooling import Function
from embedx.progress import Progress
from embedx.rows import Rows, not_finite, picture_size, require_float32, token_mask
from embedx.store import Array, Embeddings, Field, Status
from embedx.threads import n_threads

log = logging.getLogger("embedx")


@checked
def extract(
    model: Network,
    data: Any,
    *,
    layers: str | Sequence[str] = "penultimate",
    pooling: str | Function | Sequence[str | Function] = "auto",
    normalize: bool | None = None,
    batch_size: int | None = None,
    num_workers: int | Literal["auto"] | None = None,
    device: str | torch.device = "auto",
    precision: Precision = "fp32",
    dtype: Literal["float32", "float16"] = "float32",
    save_outputs: bool = False,
    thumbnails: int = 32,
    objective: Objective | None = None,
    classes: str | Sequence[str] | None = None,
    ablate: Sequence[Any] | None = None,
    on_error: Literal["skip", "raise"] = "skip",
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    preprocess: Preprocess | None = None,
    labels: Any = None,
    ids: Any = None,
    n_parts: int | None = None,
    part: int | None = None,
    engine: Engine | Feed | None = None,
    config: Mapping[str, Any] | None = None,
) -> Embeddings:
    """Run data through a model once and stream what its layers give into one file.

    Done already with the same settings, it does nothing; interrupted, it goes on where the last
    commit was; the file's rows are those of the data, in order, always.

    Args:
        model: A network, or a :class:`~embedx.models.Model` from :mod:`embedx.models`.
        data: A folder of pictures, an array or tensor ``(n, ...)``, a list of texts, a map-style
            ``Dataset``, a ``DataLoader`` of one, a :class:`~embedx.data.Source`, or
            :class:`~embedx.data.Shards`. Of a loader, rows are in the order of its Dataset, and its
            ``collate_fn`` makes the inputs.
        layers: Capture points, ``NAME[@CALL][:WHAT[.PATH]]``, globs, or ``penultimate``.
        pooling: ``auto``, ``none``, ``flatten``, ``gap``, ``gap_last``, ``max``, ``gem``, ``cls``,
            ``mean_token``, ``max_token``, or a function ``(activation) -> (n, d)``; one for all
            points or one each.
        normalize: Scale each row to length 1 (L2); None for what the model was made for, at the
            layer that ``penultimate`` means.
        batch_size: Samples in a forward pass; the loader's, or 64, where not given.
        num_workers: Processes that read and prepare the data, 0 for none; the loader's, or
            ``auto``, where not given: up to eight for files beside a GPU, else none, and files are
            read by threads.
        device: ``auto`` (cuda, mps, cpu; a live network's own), or one of torch's names.
        precision: Of the arithmetic: ``fp32``, or the faster ``tf32``, ``bf16``, ``fp16``.
        dtype: Of the stored numbers.
        save_outputs: Keep the model's outputs too, as ``logits`` and ``predicted``.
        thumbnails: Side in px of the miniatures kept for pictures; 0 for none.
        objective: What the gradients of points such as ``layer4:grad`` are of: ``predicted``, the
            score of the class with the highest one (where not given); ``loss``, the cross-entropy
            of the label; or the number of a class, for its score.
        classes: For ``loss``: names of the classes, in the order of the scores, or a text file with
            a name a line. The class of a label is then the one of its name; where not given that of
            its number, or of its place where there are as many names as scores.
        ablate: Parts of layers to silence or change in the pass, a mapping each with the keys of
            :class:`~embedx.ablations.Ablation`: ``{at: layer4, channels: [3, 5], by: zero}``.
        on_error: ``skip`` marks a sample that cannot be read as failed, ``raise`` stops at it.
        out: Folder for ``embeddings.h5``; one below ``outputs``, named after model and data, where
            not given.
        overwrite: Replace what another run left in ``out``, and all that was derived from it.
        preprocess: For pictures into a live network, or in the place of a Model's own; tensors
            enter unchanged without it.
        labels: For data that has none of its own, n of any kind.
        ids: For data that has none of its own, n unique texts.
        n_parts: Parts to cut the rows into, each with a file of its own until all are joined; the
            rows are the same. Without ``part``, those that are missing are made, then all joined.
        part: The number of the one part to make, 0 to ``n_parts`` - 1, as a job of a cluster does.
        engine: What has the parts made, by other processes; given by the command line alone.
        config: The settings to record; those of this call where not given.

    Returns:
        The file, opened for reading; with ``part``, that of the part.

    Raises:
        ConfigError: An argument is out of its range.
        LayerError: A layer is not there, or does not fire exactly once.
        DataError: The data cannot be used, or every sample failed.
        ModelError: The forward pass failed.
        StoreError: No space, another writer, or ``out`` holds another run.
        Interrupted: SIGINT or SIGTERM; everything finished so far is kept.
    """
    loader = data if isinstance(data, torch.utils.data.DataLoader) else None
    if loader is not None:
        batch_size = in_order(loader).batch_size if batch_size is None else batch_size
        num_workers = loader.num_workers if num_workers is None else num_workers
    batch_size = 64 if batch_size is None else batch_size
    if not 1 <= batch_size < 2**31:
        raise ConfigError(f"batch_size must be at least 1 (and below 2**31), not {batch_size}")
    if isinstance(num_workers, int) and num_workers < 0:
        raise ConfigError(f"num_workers must be at least 0, not {num_workers}")
    _check_parts(n_parts, part, engine, overwrite=overwrite)
    if not 0 <= thumbnails <= 512:
        raise ConfigError(f"thumbnails must be 0 to 512 px, not {thumbnails}")
    described = as_model(model, preprocess=preprocess)
    source = as_source(data, labels=labels, ids=ids, num_workers=num_workers)
    collates = isinstance(source, Source) and source.collate is not None
    if collates and (preprocess is not None or described.tokenizer is not None):
        what = f"the tokenizer of {described.name}" if preprocess is None else "preprocess="
        raise ConfigError(
            f"{what} and the collate_fn of the DataLoader both make the inputs; leave one out"
        )
    for note in (*described.notes, *source.warnings):
        log.warning(note)
    for note in source.notes:
        log.info(note)
    if not isinstance(engine, Engine):
        torch_device = device_of(str(device), described, is_live=not isinstance(model, Model))
        if precision == "fp16" and torch_device.type == "cpu":
            raise ConfigError("precision=fp16 needs a GPU, and the device is cpu; use bf16 or fp32")
        if precision == "tf32" and torch_device.type != "cuda":
            raise ConfigError(
                f"precision=tf32 needs cuda, and the device is {torch_device}; use fp32"
            )
    else:  # the network runs elsewhere, where another device may be
        torch_device = torch.device("cpu")
    points = hooks.resolve_points(
        described.module,
        layers,
        penultimate=described.layer,
        title=described.name if isinstance(model, Model) else None,
    )
    ablations = as_ablations(ablate)
    plan = _Plan(
        model=described,
        source=source if isinstance(source, Source) else _ahead(source),
        rows=range(len(source) if isinstance(source, Source) else 0),
        points=points,
        poolings=pools.per_point(pooling, n_points=len(points)),
        normalize=_normalized(described, points, normalize),
        device=torch_device,
        precision=precision,
        dtype=np.dtype(dtype),
        batch_size=batch_size,
        num_workers=(
            num_workers
            if isinstance(num_workers, int)
            else _workers_for(
                source,
                torch_device,
                batch_size=batch_size,
                tokenizes=described.tokenizer is not None,
            )
        ),
        save_outputs=save_outputs,
        thumbnails=thumbnails,
        on_error=on_error,
        only_pictures=preprocess is not None,
        objective=_objective(points, objective, source),
        classes=_classes(classes, objective),
        ablations=ablations,
        ablated=[
            (point, one)
            for one in ablations
            for point in hooks.resolve_points(
                described.module, one.at, penultimate=described.layer, title=described.name
            )
        ],
    )
    identity = plan.identity()
    if isinstance(source, Shards):
        identity |= {"rows": source.limit, "items": source.fingerprint, "columns": None}
    file_id = settings_sha256(identity)
    folder = Path(out) if out else Path("outputs") / f"{described.name}-{source.name}-{file_id[:6]}"
    path = folder / store.EMBEDDINGS_NAME
    if source.root is not None and folder.resolve() == source.root.resolve():
        raise ConfigError(f"out={folder} is the folder of the data; choose another out=FOLDER")
    cuts = _cuts(plan, source, path, file_id=file_id, n_parts=n_parts, engine=engine)
    if isinstance(engine, Feed):
        _require_the_same(engine, file_id, identity)
    elif not overwrite:
        partial = store.partial_path(path)
        if path.exists() and not _is_begun(partial, identity):
            _refuse_another(path, identity, source)
            log.info("%s is complete already with these settings: nothing to do", path)
            _say_failed(path, int((store.open(path).status == Status.FAILED).sum()))
            if store.parts_id(path) == file_id:  # killed when all was done but this
                store.remove_parts(path)
            return store.open(path)
        _refuse_other_parts(path, identity, source)
        store.require_no_parts(path, of=file_id, n=0 if cuts is None else cuts.n)
        if partial.exists():
            _refuse_another(partial, identity, source)
            if cuts is not None and store.parts_id(path) is None:
                raise StoreError(
                    f"{partial} was begun in one go; go on without n_parts and engine, or start "
                    "anew with overwrite=true"
                )
    store.require_own_beside(path, has_config=True)
    log.info(
        "extracting %s of %s over %s (%s) on %s into %s",
        ", ".join(point.name for point in points),
        described.name,
        source.name,
        f"{len(source):,} rows" if isinstance(source, Source) else f"{len(source.names):,} shards",
        torch_device,
        path,
    )
    given = {
        "layers": [point.name for point in points],
        "pooling": [one.name for one in plan.poolings],
        "normalize": normalize,
        "precision": precision,
        "dtype": dtype,
        "save_outputs": save_outputs,
        "thumbnails": thumbnails,
        "objective": plan.objective,
        "classes": classes,
        "ablate": [one.settings() for one in ablations] or None,
        "batch_size": batch_size,
    }
    recorded = dict(config) if config is not None else given
    attrs = {
        "id": file_id,
        "identity": json.dumps(identity, sort_keys=True),
        "config": public_config(recorded),
        "model": described.name,
        "weights": described.weights,
        "weights_sha256": described.weights_sha256,
        "source": described.source,
        "license": described.license,
        "data": source.name,
        "batch_size": batch_size,
        "device": torch_device.type,
        "environment": json.dumps(environment()),
    }
    text = yaml.safe_dump({"id": file_id, **recorded}, sort_keys=False, allow_unicode=True)
    if cuts is None:
        _run(plan, path, attrs, config=text, overwrite=overwrite)
    elif part is not None or isinstance(engine, Feed):
        assert n_parts is not None
        alone = [] if part is None else [part]
        numbers = iter(engine.next, None) if isinstance(engine, Feed) else alone
        return store.open(_run_part(plan, cuts, path, attrs, numbers=numbers, n_parts=n_parts))
    else:
        _run_parts(plan, cuts, path, attrs, config=text, overwrite=overwrite, engine=engine)
    return store.open(path)


# --------------------------------------------------------------------------- settings


@dataclasses.dataclass(frozen=True)
class _Plan:
    model: Model
    source: Source
    rows: range  # those to make, of the source: all, or a part of them
    points: list[hooks.Point]
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
    ablated: list[tuple[hooks.Point, Ablation]]

    @property
    def has_own_pooling(self) -> bool:
        return any(one.code for one in self.poolings)

    @property
    def is_by_sample(self) -> bool:
        """Whether no code may draw random numbers, or see the samples of a batch together."""
        prepared = self.model.preprocess
        return (
            fold.is_by_sample(self.model.module)
            and not self.has_own_pooling
            and not (prepared is not None and prepared.is_own)
        )

    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, for the id of the file and to name a difference."""
        prepared = self.model.preprocess
        makes_batches = self.source.collate is not None
        tokenizer = self.model.tokenizer
        # What only some runs have is left out of the others, whose ids are older than it.
        ablated = [one.settings() for one in self.ablations]
        return {
            **({} if tokenizer is None else {"tokenizer": tokenizer.config()}),
            **({} if self.objective is None else {"objective": self.objective}),
            **({} if self.classes is None else {"classes": self.classes}),
            **({"ablate": ablated} if ablated else {}),
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


def _objective(
    points: Sequence[hooks.Point], asked: Objective | None, source: Source | Shards
) -> Objective | None:
    """What gradients are of; None where there are none.

    Raises:
        ConfigError: It has no use, or takes labels that are not there.
    """
    names = ", ".join(point.name for point in points if point.is_gradient)
    if not names:
        if asked is not None:
            raise ConfigError(
                f"objective={asked} has no use without a gradient, such as layers=[NAME:grad]; "
                "leave it out"
            )
        return None
    if asked is None:
        log.info("%s: gradients of the score of the predicted class (objective=predicted)", names)
    if asked != "loss":
        return "predicted" if asked is None else asked
    if isinstance(source, Shards):
        raise ConfigError(
            f"objective=loss takes labels, and how those of {source.name} are numbered is known "
            "when all shards are read; use objective=predicted, or the number of a class"
        )
    if not (source.labels_in_items or source.labels is not None):
        raise ConfigError(
            f"objective=loss takes labels, and {source.name} has none; use objective=predicted, or "
            "the number of a class"
        )
    return asked


def _classes(classes: str | Sequence[str] | None, objective: Objective | None) -> list[str] | None:
    if classes is not None and objective != "loss":
        raise ConfigError("classes has no use without objective=loss; leave it out")
    return read_classes(classes)


def _normalized(model: Model, points: Sequence[hooks.Point], asked: bool | None) -> list[bool]:
    """Whether the rows of each point are scaled to length 1."""
    if asked is not None:
        return [asked] * len(points)
    each = [model.normalizes and point.name == model.layer for point in points]
    if any(each):
        log.info(
            "rows of %s are scaled to length 1, as the model was made for; normalize=false leaves "
            "them as they are",
            model.layer,
        )
    return each


def _columns_sha256(source: Source) -> str:
    """SHA-256 of what the file keeps of the samples beside what the model makes of them."""
    labels: Any = None if source.labels is None else source.labels.tolist()
    if source.labels_in_items:
        labels = "in the items"
    metadata = {
        name: [_kind_of(column), *map(str, column)] for name, column in source.metadata.items()
    }
    columns = [list(source.ids), labels, list(source.label_names), metadata]
    return hashlib.sha256(json.dumps(columns).encode()).hexdigest()


def _kind_of(column: Any) -> str:
    dtype = np.asarray(column).dtype
    return "texts" if dtype.kind in "OU" else str(dtype)


def _workers_for(
    source: Source | Shards, device: torch.device, *, batch_size: int, tokenizes: bool
) -> int:
    """How many processes read, where it is left to us; the rows are the same for any number."""
    # Beside a network on the same processors, a worker only takes turns with it: there the
    # pictures of a batch are read by threads, and then all processors multiply.
    reads = isinstance(source, Shards) or source.reads_files or tokenizes
    is_small = isinstance(source, Source) and len(source) <= batch_size
    if device.type == "cpu" or not reads or is_small:
        return 0
    return max(1, min(n_threads() - 1, 8))


def _is_begun(partial: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a run that was to overwrite a file with this one was stopped."""
    with contextlib.suppress(StoreError):  # damaged: the file stays as it is
        there = store.Embeddings(partial).identity if partial.exists() else {}
        return bool(there) and all(there.get(k) == identity.get(k) for k in {**there, **identity})
    return False


def _refuse_another(present: Path, identity: Mapping[str, Any], source: Source | Shards) -> None:
    """Raise if the file that is there belongs to another run, naming the first difference."""
    there = store.Embeddings(present).identity
    differing = [key for key in {**identity, **there} if there.get(key) != identity.get(key)]
    if not differing:
        return
    late = ["rows", "code", "items", "columns", "revisions"]
    key = min(differing, key=late.__contains__)
    was, now = there.get(key), identity.get(key)
    if isinstance(was, dict) and isinstance(now, dict):
        others = {name for name in was | now if was.get(name) != now.get(name)}
        was, now = ({k: v for k, v in one.items() if k in others} for one in (was, now))
    if key in ("rows", "items"):
        changes = _changes(present, source) if isinstance(source, Source) else "other shards"
        difference = f"the data has changed since: {changes}"
    elif key == "weights_sha256":
        words = store.Embeddings(present).attrs.get("weights")
        difference = f"its weights are {_short(words)}, {str(was)[:8]}, and here {str(now)[:8]}"
    elif key == "columns":
        difference = "the ids or labels are others"
    elif key == "code":
        difference = "the code, the structure or an attribute of the model is another"
        made_by = json.loads(store.Embeddings(present).attrs.get("environment", "{}")).get("python")
        if made_by != (python := platform.python_version()):
            difference += f" (or the same, compiled by Python {made_by} there and {python} here)"
    elif key == "pooling_code":
        difference = "the code of the pooling, or what it holds, is another"
    else:
        difference = f"{key} is {_short(was)} there and {_short(now)} here"
    raise StoreError(
        f"{present} holds another run: {difference}; choose another name or out folder, or replace "
        "it with overwrite=true"
    )


def _changes(present: Path, source: Source) -> str:
    """How the items of a source differ from those that a file was begun with."""
    ids, hashes = store.read_items(present)
    now = store.stored_texts(source.ids)
    n_there = store.Embeddings(present).identity["rows"]  # of all parts, where it is one
    if hashes is None or source.item_hashes is None:
        if n_there != len(now):
            return f"{n_there:,} samples there and {len(now):,} here"
        return "some samples are others (which ones is not kept for such data)"
    there = dict(zip(ids, hashes.tolist(), strict=True))
    here = dict(zip(now, source.item_hashes.tolist(), strict=True))
    kinds = {
        "added": [name for name in now if name not in there],
        "removed": [name for name in ids if name not in here],
        "edited": [name for name in now if there.get(name, here[name]) != here[name]],
    }
    if n_there != len(ids):  # what other parts hold is not known here
        del kinds["added"]
    counted = [f"{len(names):,} {kind} ({_few(names)})" for kind, names in kinds.items() if names]
    if n_there != len(now) and not counted:
        return f"{n_there:,} samples there and {len(now):,} here"
    return ", ".join(counted) or "the samples are in another order"


def _few(names: Sequence[str], most: int = 3) -> str:
    shown = [_short(name if name.isprintable() else ascii(name)) for name in names[:most]]
    return ", ".join([*shown, *(["..."] if len(names) > most else [])])


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 80 else text[:77] + "..."


# --------------------------------------------------------------------------- the loop


@dataclasses.dataclass
class _Stop:
    number: int = 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """SIGINT and SIGTERM ask the loop to stop after the batch at hand; a second one insists."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: FrameType | None) -> None:
        if stop.number:
            raise KeyboardInterrupt
        stop.number = number
        if number == signal.SIGINT:
            # Written at once: a log line could meet the half of another.
            os.write(2, b"\nstopping after this batch; Ctrl-C again stops at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    plan: _Plan, path: Path, attrs: Mapping[str, Any], *, config: str, overwrite: bool
) -> None:
    """Fill ``path``, from the start or from where it was left."""
    replaced = _id_of(path)
    started = time.monotonic()
    with _stop_on_signal() as stop, _forward(plan) as forward:
        filled = _fill(plan, path, attrs, forward=forward, stop=stop, overwrite=overwrite)
        if isinstance(filled, str):
            raise DataError(
                f"every one of the {len(plan.source):,} rows failed; the first, {filled}"
            )
        with contextlib.closing(filled.writer):
            _put_in_place(filled.writer, config=config, replaced=replaced, overwrite=overwrite)
        if stop.number:  # too late for this file, in time for what would follow
            raise Interrupted(
                f"stopped by {stop.name} when {path} was complete", signal_number=stop.number
            )
    seconds = time.monotonic() - started
    _report(plan, filled.writer, path, seconds=seconds, rate=filled.rate)


def _id_of(path: Path) -> str | None:
    """The id of a file that is to be replaced; None of none, or of one that is damaged."""
    if path.exists():
        with contextlib.suppress(StoreError):  # nothing can be known to be made of it
            return str(store.open(path).attrs["id"])
    return None


def _put_in_place(
    writer: store.Writer, *, config: str, replaced: str | None, overwrite: bool
) -> None:
    """Give a file with all its rows its name, and take away what it replaces.

    Raises:
        DataError: Every row failed; the file is taken away.
    """
    path = writer.path
    if writer.n_failed == writer.n_rows:
        writer.commit()
        reasons = [one["reason"] for one in store.read_reasons(path)]
        writer.discard()
        _remove_if_empty(path.parent)
        raise DataError(
            f"every one of the {writer.n_rows:,} rows failed; the first: {(*reasons, 'unknown')[0]}"
        )
    writer.require_own()
    # Before the file takes its name: whatever stops us here, the next run comes by again.
    store.replace_file(path.with_name("config.yaml"), config.encode())
    if replaced is not None:
        store.remove_derived(path.parent, replaced)
    if overwrite:
        store.remove_parts(path)
    writer.finish()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


@dataclasses.dataclass(frozen=True)
class _Filled:
    """A writer that has all rows, and how many a second it got."""

    writer: store.Writer
    rate: float


def _fill(
    plan: _Plan,
    path: Path,
    attrs: Mapping[str, Any],
    *,
    forward: Callable[[Batch, Piece], "_Results"],
    stop: _Stop,
    overwrite: bool = False,
    fields: Sequence[Field] | None = None,
    title: str = "",
) -> _Filled | str:
    """Write all rows that ``path`` does not have yet, and leave it to be finished.

    Args:
        plan: What to do.
        path: The file.
        attrs: Its root attributes.
        forward: The forward pass.
        stop: Whether to stop after the batch at hand.
        overwrite: Whether the file takes the place of another.
        fields: Of the file; those of the first good batch where not given.
        title: Which part of a whole it is, in words.

    Returns:
        The writer, which has the lock; where no row is good and ``fields`` are not given, the id of
        the first and why it failed.
    """
    first_pass = attrs.get(_BY_FIRST, "" if fields is not None else None)
    if overwrite:  # from the start: what is there may be of code that has changed unseen
        store.require_idle(path)
        writer = None
    else:
        if store.partial_path(path).exists():
            begun = store.Embeddings(store.partial_path(path))
            first_pass = begun.attrs.get(_BY_FIRST, "")
        expected = {key: attrs[key] for key in ("id", "batch_size", "device")}
        writer = store.resume(path, expected=expected)
    n_rows, before = len(plan.rows), plan.rows.start  # rows of the file, and those before it
    first_row = writer.rows_done if writer else 0
    of = f" of {title}" if title else ""
    in_title = of if n_rows == len(plan.source) else ""  # rows are called by their number of all
    if first_row:
        log.info("going on at row %s of %s%s", f"{first_row:,}", f"{n_rows:,}", of)
    if writer is None and fields is not None:
        writer = _create(plan, path, fields, attrs, replace=overwrite)
    loader = torch.utils.data.DataLoader(
        Batches(
            plan.source,
            plan.model,
            batch_size=plan.batch_size,
            num_workers=plan.num_workers,
            thumbnails=plan.thumbnails,
            only_pictures=plan.only_pictures,
            first_row=before + first_row,
            end_row=plan.rows.stop,
        ),
        batch_size=1,
        collate_fn=only,
        num_workers=plan.num_workers,
        worker_init_fn=start_worker,
        pin_memory=plan.device.type == "cuda",
    )
    waiting: list[Batch] = []  # bad batches before the first good one: the shapes are not known
    with workers_said(plan.num_workers), contextlib.ExitStack() as stack:
        failing = stack.enter_context(contextlib.ExitStack())
        failing.callback(lambda: writer.close() if writer else None)
        if plan.source.reads_files:  # before the threads that read: it is one for all
            stack.enter_context(sources.whole_pictures())
        prepared = plan.model.preprocess
        if plan.source.draws or (prepared is not None and prepared.is_own):
            stack.enter_context(sources.random_put_back())
        progress = stack.enter_context(
            Progress(n_rows, what=title or "extract", done=first_row, unit=_unit(plan))
        )
        for batch in started(loader):
            if batch.fatal is not None:
                raise batch.fatal
            if batch.reasons and plan.on_error == "raise":
                row = batch.start + min(batch.reasons)
                if writer:
                    writer.commit()
                raise DataError(
                    f"row {row}{in_title}, {plan.source.ids[row]}: "
                    f"{batch.reasons[min(batch.reasons)]}; mend or remove it, or go on without "
                    "such rows: on_error=skip"
                )
            done: list[tuple[Piece, _Results]] = []
            for piece in batch.pieces:
                if stop.number and done:  # a window of texts may take minutes
                    break
                done.append((piece, forward(batch, piece)))
                progress.advance(piece.size)
            is_whole = len(done) == len(batch.pieces)
            results = _joined(batch, done) if done and is_whole else None
            if results is not None:
                if first_pass is None:
                    first_pass = results.first_pass
                    attrs = {**attrs, _BY_FIRST: first_pass} if first_pass else attrs
                _require_same_first_pass(path, first_pass, results.first_pass)
            if not is_whole:
                pass
            elif writer is None and results is None:
                waiting.append(batch)
            else:
                if writer is None:
                    assert results is not None
                    fields = _fields(batch, results)
                    writer = _create(plan, path, fields, attrs, replace=overwrite)
                    for earlier in waiting:
                        _append(writer, earlier, None, plan)
                _append(writer, batch, results, plan)
            progress.advance(batch.size - sum(piece.size for piece, _ in done))
            if stop.number and not (is_whole and batch.start + batch.size == plan.rows.stop):
                if writer is not None:
                    writer.commit()
                kept = writer.rows_done if writer is not None else 0
                anew = ", but without overwrite=true," if overwrite else ""
                raise Interrupted(
                    f"stopped by {stop.name}: {kept:,} of {n_rows:,} rows{of} "
                    f"are kept; run the same command again{anew} to go on",
                    signal_number=stop.number,
                )
        if writer is None:
            place, reason = min(waiting[0].reasons.items())
            return f"{plan.source.ids[waiting[0].start + place]}: {reason}"
        failing.pop_all()
        return _Filled(writer, progress.rate)


_BY_FIRST = "made_by_first_pass"


def _require_same_first_pass(path: Path, there: str, here: str) -> None:
    """Refuse to put rows beside those of a network that was another one.

    Raises:
        StoreError: The first pass of this run has made something else of the network, or of its
            pooling, than that of the run which began the file.
    """
    if there != here:
        raise StoreError(
            f"{path} was begun by a model that made itself something else in its first pass (a "
            "layer, a centre), so its further rows would be those of another model; start anew "
            "with overwrite=true, or run the model once on one fixed example before"
        )


# --------------------------------------------------------------------------- parts


def _check_parts(
    n_parts: int | None, part: int | None, engine: Engine | Feed | None, *, overwrite: bool
) -> None:
    """Refuse parts that cannot be.

    Raises:
        ConfigError: A number is out of its range, or two of them do not go together.
    """
    if n_parts is not None and not 1 <= n_parts <= _PARTS_MOST:
        raise ConfigError(f"n_parts must be 1 to {_PARTS_MOST:,}, not {n_parts}")
    if part is None:
        return
    if n_parts is None:
        raise ConfigError(f"part={part} of how many? give n_parts too, such as n_parts={part + 1}")
    if not 0 <= part < n_parts:
        raise ConfigError(f"part must be 0 to {n_parts - 1} for n_parts={n_parts}, not {part}")
    if engine is not None:
        raise ConfigError(
            f"part={part} is made by this process alone, and an engine has all parts made; leave "
            "one of the two out"
        )
    if overwrite:
        raise ConfigError(
            f"overwrite=true has no use with part={part}, for other parts may be under way: remove "
            "the folder of the old run first, or choose another name"
        )


def _require_the_same(feed: Feed, file_id: str, identity: Mapping[str, Any]) -> None:
    """Refuse to make parts of another run than was asked for.

    Raises:
        StoreError: What decides the rows is another thing here.
    """
    if feed.file_id != file_id:
        differing = [key for key, value in identity.items() if feed.identity.get(key) != value]
        raise StoreError(
            f"here {listed(differing) or 'the run'} is another than where the command was given "
            f"(on {platform.node()}, Python {platform.python_version()}); give all processes the "
            "same data, code and versions"
        )


@dataclasses.dataclass(frozen=True)
class _RowCuts:
    """A run cut into ranges of the rows of its source, each with a file of its own."""

    plan: _Plan
    n: int
    whole_id: str
    limit: None = None
    unit: str = "part"

    def title(self, number: int) -> str:
        """What a file is called in messages."""
        return f"part {number:,} of {self.n:,}"

    def rows(self, number: int) -> range:
        block = rows_together(self.plan.model, batch_size=self.plan.batch_size)
        return part_rows(number, n_parts=self.n, n_rows=len(self.plan.source), block=block)

    def open(
        self, number: int, *, scratch: Path, most: int | None
    ) -> contextlib.AbstractContextManager[_Plan]:
        """What to do for a file."""
        return contextlib.nullcontext(dataclasses.replace(self.plan, rows=self.rows(number)))

    def file_id(self, number: int, plan: _Plan | None) -> str:
        """The id of a file; of a shard None as long as it was not read."""
        rows = self.rows(number)
        return settings_sha256({"of": self.whole_id, "rows": [rows.start, rows.stop]})

    def create(
        self, path: Path, parts: Callable[[], Iterator[Embeddings]], attrs: Mapping[str, Any]
    ) -> store.Writer:
        """The file that the parts are joined into, at row 0."""
        return _create(self.plan, path, next(parts()).fields, attrs, replace=True)


@dataclasses.dataclass(frozen=True)
class _ShardCuts:
    """A run cut into shards, whose samples are known when they are read."""

    plan: _Plan
    shards: Shards
    unit: str = "shard"

    @property
    def n(self) -> int:
        return len(self.shards.names)

    @property
    def limit(self) -> int | None:
        return self.shards.limit

    def title(self, number: int) -> str:
        return f"shard {number + 1:,} of {self.n:,}"

    @contextlib.contextmanager
    def open(self, number: int, *, scratch: Path, most: int | None) -> Iterator[_Plan]:
        with self.shards.read(number, scratch=scratch, most=most) as source:
            yield dataclasses.replace(self.plan, source=source, rows=range(len(source)))

    def file_id(self, number: int, plan: _Plan | None) -> str | None:
        return None if plan is None else settings_sha256({**plan.identity(), "part": number})

    def create(
        self, path: Path, parts: Callable[[], Iterator[Embeddings]], attrs: Mapping[str, Any]
    ) -> store.Writer:
        ids: list[str] = []
        texts: list[str] = []
        columns: list[tuple[int, dict[str, Any]]] = []
        for part in parts():
            ids += part.ids
            texts += part.label_texts() or [""] * part.n_rows
            columns.append((part.n_rows, part.metadata))
        label_names = sorted(set(texts) - {""}, key=sources.numbers_first)
        index = {"": -1, **{name: i for i, name in enumerate(label_names)}}
        return store.create(
            path,
            ids=ids,
            fields=next(parts()).fields,
            attrs=attrs,
            labels=np.array([index[text] for text in texts], np.int32) if label_names else None,
            label_names=label_names,
            metadata={
                name: concatenated([(n_rows, column.get(name)) for n_rows, column in columns])
                for name in dict.fromkeys(name for _, column in columns for name in column)
            },
            replace=True,
        )


_Cuts = _RowCuts | _ShardCuts


def _ahead(shards: Shards) -> Source:
    """What is known of the samples of shards before the first one is read."""
    return Source(shards.name, [], shards.read, shards.fingerprint, root=shards.root)


def _cuts(
    plan: _Plan,
    source: Source | Shards,
    path: Path,
    *,
    file_id: str,
    n_parts: int | None,
    engine: Engine | Feed | None,
) -> _Cuts | None:
    """How a run is cut; None where it is made in one go.

    Raises:
        ConfigError: There are more parts than can have a row, or a limit that hangs on other parts.
    """
    if isinstance(source, Shards):
        asked = n_parts is not None or engine is not None
        if asked and source.limit is not None:
            raise ConfigError(
                f"data.limit={source.limit} counts through the shards in order, and parts are made "
                "in any; leave data.limit out, or n_parts and engine"
            )
        if n_parts is not None and n_parts > len(source.names):
            raise ConfigError(
                f"n_parts must be at most {len(source.names)}, the number of shards, not {n_parts}"
            )
        return _ShardCuts(plan, source)
    if n_parts is None and engine is None:
        return None
    block = rows_together(plan.model, batch_size=plan.batch_size)
    most = max(1, -(-len(source) // block))
    if n_parts is None:
        assert isinstance(engine, Engine)
        begun = store.parts_number(path) if store.parts_id(path) == file_id else None
        wanted = max(_PARTS_A_WORKER * engine.n_workers, -(-len(source) // _PART_ROWS))
        n_parts = min(begun or wanted, most)
    if n_parts > most:
        raise ConfigError(
            f"n_parts must be at most {most:,} for {len(source):,} rows, which are made {block:,} "
            f"at once, not {n_parts:,}"
        )
    return _RowCuts(plan, n_parts, file_id)


_PARTS_MOST = 10**6
_PARTS_A_WORKER = 4  # so that the last one keeps few waiting
_PART_ROWS = 65_536


def _refuse_other_parts(path: Path, identity: Mapping[str, Any], source: Source | Shards) -> None:
    """Raise if parts that lie there are of another run, naming the first difference."""
    for one in sorted(store.parts_folder(path).glob(f"*/{path.name}*")):
        attrs: dict[str, Any] = {}
        if one.suffix in (path.suffix, ".partial"):
            with contextlib.suppress(StoreError):  # damaged: that is told when they are joined
                attrs = store.PartReader(one).read().attrs
        if "identity" in attrs:
            _refuse_another(one, identity, source)
            return


class _Made:
    """Which parts of a run are made, and what all of them have in common.

    Args:
        cuts: How it is cut.
        path: The file that they will be joined into.
        attrs: Its root attributes.

    Attributes:
        sizes: How many rows a part has, by its number, as soon as that is known.
        late: Parts of which no row is good before it is known what is stored of a row: the first
            such row, and why.
        n_new: Rows made by this process.
    """

    def __init__(self, cuts: _Cuts, path: Path, attrs: Mapping[str, Any]) -> None:
        self.sizes: dict[int, int] = {}
        self.late: dict[int, str] = {}
        self.n_new = 0
        self._cuts = cuts
        self._path = path
        self._attrs = attrs
        self._first = cuts.n  # the lowest number of a part that is made, and what it says
        self._fields: list[Field] | None = None
        self._common: dict[str, Any] = {}
        self._is_said = False

    @property
    def attrs(self) -> dict[str, Any]:
        """The root attributes of the whole: what the parts were made by is known of them."""
        return {**self._attrs, **self._common}

    @property
    def has_any(self) -> bool:
        """Whether it is known what is stored of a row."""
        return self._fields is not None

    def add(self, number: int) -> bool:
        """Look at the file of a part; whether it is there.

        Raises:
            StoreError: It is damaged, of another run, or was made otherwise than the others.
        """
        path = store.part_path(self._path, number)
        if not path.exists():
            return False
        title = self._cuts.title(number)
        anew = f"remove {path.parent} and run again, which makes it anew"
        try:
            found = store.PartReader(path).read()
        except StoreError as error:
            raise StoreError(f"{title} cannot be joined: {error}; {anew}") from error
        attrs = found.attrs
        if self._cuts.file_id(number, None) not in (None, attrs["id"]):
            raise StoreError(f"{path} is not {title} of this run, it has other rows; {anew}")
        if not found.is_complete:
            raise StoreError(f"{title} cannot be joined: {path} is not complete; {anew}")
        common = {key: attrs[key] for key in (*_MADE_BY, _BY_FIRST) if key in attrs}
        if self._fields is not None:
            self._require_alike(number, common, found.fields)
        if number < self._first:
            self._first, self._common, self._fields = number, common, found.fields
        self.sizes[number] = found.rows_done
        return True

    def _require_alike(self, number: int, made_by: dict[str, Any], fields: list[Field]) -> None:
        """Refuse parts that are not of one model on one kind of device; say what may be."""
        one, other = self._cuts.title(self._first), self._cuts.title(number)
        where = store.parts_folder(self._path)
        for key in ("device", "batch_size"):
            if made_by[key] != self._common[key]:
                raise StoreError(
                    f"{where}: {one} was made with {key}={self._common[key]} and {other} with "
                    f"{key}={made_by[key]}; remove the one and make it again by the same"
                )
        if made_by.get(_BY_FIRST) != self._common.get(_BY_FIRST):
            raise StoreError(
                f"{where}: {one} and {other} are of a model that made itself something else in the "
                "first pass of each (a layer, a centre), so their rows are those of two models; "
                "run it without n_parts, or run the model once on one fixed example before"
            )
        assert self._fields is not None
        for was, now in zip(self._fields, fields, strict=False):
            if (was.name, was.shape, was.dtype) != (now.name, now.shape, now.dtype):
                raise ShapeError(
                    f"{now.name} has shape {now.shape} in {other} and {was.name} {was.shape} in "
                    f"{one}; choose a pooling that gives one length, such as pooling=gap"
                )
        was, now = (json.loads(one["environment"]) for one in (self._common, made_by))
        if was != now and not self._is_said:
            self._is_said = True
            keys = [key for key in was if was[key] != now.get(key)]
            log.warning(
                "%s and %s were made with another %s (%s and %s): the rows agree within rounding, "
                "and the file says the one of the first part",
                one,
                other,
                ", ".join(keys),
                ", ".join(str(was[key]) for key in keys),
                ", ".join(str(now.get(key)) for key in keys),
            )

    def make(
        self,
        number: int,
        *,
        forward: Any,
        most: int | None = None,
        alone: bool = False,
    ) -> None:
        """Make a part, from the start or from where it was left.

        Args:
            number: Of the part.
            forward: The forward pass.
            most: How many rows are wanted of it at most.
            alone: Whether nothing is known of other parts: it says by itself what is stored.

        Raises:
            Interrupted: A signal came when the part was complete.
        """
        part, title = store.part_path(self._path, number), self._cuts.title(number)
        scratch = store.parts_folder(self._path) / f"shard-{number}.tmp"
        with (
            self._cuts.open(number, scratch=scratch, most=most) as plan,
            _stop_on_signal() as stop,
        ):
            notes_of = (
                plan.source if self._cuts.unit == "shard" and number not in self.late else None
            )
            for warning in notes_of.warnings if notes_of else ():
                log.warning(warning)
            for note in notes_of.notes if notes_of else ():
                log.info(note)
            self.sizes[number] = n_rows = len(plan.rows)
            if not n_rows:
                return
            fields = None if alone else self._fields
            common = {} if fields is None else self._common
            if number not in self.late:  # it says by itself what it is made by
                common = {key: value for key, value in common.items() if key == _BY_FIRST}
            filled = _fill(
                plan,
                part,
                {**self._attrs, **common, "id": self._cuts.file_id(number, plan)},
                forward=forward,
                stop=stop,
                fields=fields,
                title=title,
            )
            if isinstance(filled, str):
                self.late[number] = filled
                return
            with contextlib.closing(filled.writer):
                filled.writer.finish()
            self.n_new += n_rows
            if stop.number:
                raise Interrupted(
                    f"stopped by {stop.name} after {title}; run the same command again to go on",
                    signal_number=stop.number,
                )
        self.late.pop(number, None)
        self.add(number)


_MADE_BY = ("batch_size", "device", "environment")


def _run_parts(
    plan: _Plan,
    cuts: _Cuts,
    path: Path,
    attrs: Mapping[str, Any],
    *,
    config: str,
    overwrite: bool,
    engine: Engine | None,
) -> None:
    """Fill ``path`` from parts, of which those are made that are missing."""
    started = time.monotonic()
    made = _Made(cuts, path, attrs)
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_if_empty, path.parent)
        stack.enter_context(store.writing_lock(path))
        if overwrite:
            store.remove_parts(path)
        store.begin_parts(path, of=str(attrs["id"]), n=cuts.n)
        stack.callback(store.end_parts, path)
        missing = [number for number in range(cuts.n) if not made.add(number)]
        if made.sizes:
            of = f"{len(made.sizes):,} of {number_of(cuts.n, cuts.unit, cuts.unit + 's')}"
            then = "going on with the rest" if missing else "joining them"
            log.info("%s made before: %s", of, then)
        n_before = sum(made.sizes.values())
        if engine is not None and missing:
            _run_elsewhere(plan, made, cuts, path, missing, engine=engine)
        is_complete = len(made.sizes) == cuts.n
        with _forward(plan) if not is_complete else contextlib.nullcontext() as forward:
            left = cuts.limit
            for number in range(cuts.n):
                if left == 0:
                    break
                if number not in made.sizes:
                    made.make(number, forward=forward, most=left)
                left = None if left is None else left - made.sizes[number]
            n_rows = sum(made.sizes.values())
            if not made.has_any:
                first = next(iter(made.late.values()), "there is none")
                raise DataError(
                    f"every one of the {n_rows:,} rows of {plan.source.name} failed; the first, "
                    f"{first}"
                )
            for number in list(made.late):
                made.make(number, forward=forward, most=made.sizes[number])
    writer = _join(made, cuts, path, config=config)
    seconds = time.monotonic() - started
    _report(plan, writer, path, seconds=seconds, rate=(n_rows - n_before) / max(seconds, 1e-9))


def _run_elsewhere(
    plan: _Plan, made: _Made, cuts: _Cuts, path: Path, missing: Sequence[int], *, engine: Engine
) -> None:
    """Have parts made by an engine.

    Raises:
        DataError: Some could not be made; the others are.
        Interrupted: A signal came.
    """
    is_known = isinstance(cuts, _RowCuts)  # how many rows there are
    readers: dict[int, store.PartReader] = {}
    counted: dict[int, int] = {}
    looked = time.monotonic()
    with (
        _stop_on_signal() as stop,
        Progress(
            len(plan.source) if is_known else cuts.n,
            what="extract",
            done=sum(made.sizes.values()) if is_known else len(made.sizes),
            unit=_unit(plan) if is_known else "shards",
        ) as progress,
    ):

        def tick(running: Collection[int]) -> None:
            nonlocal looked
            if stop.number:
                raise Interrupted(
                    f"stopped by {stop.name}: {len(made.sizes):,} of "
                    f"{number_of(cuts.n, cuts.unit, cuts.unit + 's')} and what others have so far "
                    "are kept; run the same command again to go on",
                    signal_number=stop.number,
                )
            if not is_known or time.monotonic() - looked < _LOOK_S:
                return
            looked = time.monotonic()
            for number in running:
                reader = readers.setdefault(number, store.PartReader(store.part_path(path, number)))
                with contextlib.suppress(StoreError):  # it is being renamed; or told when it ends
                    more = reader.read().rows_done - counted.get(number, 0)
                    if more > 0:
                        counted[number] = counted.get(number, 0) + more
                        progress.advance(more)

        def ended(number: int) -> None:
            readers.pop(number, None)
            before = counted.pop(number, 0)
            if made.add(number):  # else it has no row, or no good one
                progress.advance(made.sizes[number] - before if is_known else 1)

        failed = engine.run(
            missing,
            about={
                "n_parts": cuts.n,
                "file_id": str(made.attrs["id"]),
                "identity": json.loads(made.attrs["identity"]),
            },
            ended=ended,
            tick=tick,
        )
    if failed:
        number, *others = sorted(failed)
        error = DataError(
            f"{cuts.title(number)} failed: {failed[number]}; {len(made.sizes):,} of {cuts.n:,} are "
            f"made and kept, run the same command again to try {len(failed):,} again"
        )
        if others:
            error.add_note("\n".join(f"{cuts.title(one)}: {failed[one]}" for one in others))
        raise error


_LOOK_S = 0.5


def _run_part(
    plan: _Plan,
    cuts: _Cuts,
    path: Path,
    attrs: Mapping[str, Any],
    *,
    numbers: Iterable[int],
    n_parts: int,
) -> Path:
    """Make parts, one after the other; the last file that was made.

    Raises:
        DataError: None of them has a good row.
    """
    started = time.monotonic()
    store.begin_parts(path, of=str(attrs["id"]), n=cuts.n)
    made = _Made(cuts, path, attrs)
    last: Path | None = None
    with contextlib.ExitStack() as stack:
        forward = None
        for part in numbers:
            for number in part_rows(part, n_parts=n_parts, n_rows=cuts.n, block=1):
                if not made.add(number):
                    forward = forward or stack.enter_context(_forward(plan))
                    made.make(number, forward=forward, alone=True)
                if number not in made.late and made.sizes[number]:
                    last = store.part_path(path, number)
    if last is None:
        first = next(iter(made.late.values()), "there is none")
        raise DataError(
            f"every one of the {sum(made.sizes.values()):,} rows of part {part} failed; the first, "
            f"{first}; where other parts have good rows, they are listed when all are joined"
        )
    if not made.n_new:
        log.info("%s is complete already: nothing to do", last)
    else:
        log.info(
            "wrote %s: part %s of %s, %s rows, %s failed, %.1f s",
            last,
            f"{part:,}",
            f"{n_parts:,}",
            f"{sum(made.sizes.values()):,}",
            f"{int((store.open(last).status == Status.FAILED).sum()):,}",
            time.monotonic() - started,
        )
    return last


def _join(made: _Made, cuts: _Cuts, path: Path, *, config: str) -> store.Writer:
    """Make ``path`` of its parts, and take them away."""

    def parts() -> Iterator[Embeddings]:  # one at a time: of many the files could not be open
        for number in sorted(made.sizes):
            if made.sizes[number]:
                yield store.open(store.part_path(path, number))

    replaced = _id_of(path)
    writer = cuts.create(path, parts, made.attrs)
    with contextlib.closing(writer):
        append_parts(writer, parts())
        _put_in_place(writer, config=config, replaced=replaced, overwrite=False)
    store.remove_parts(path)
    return writer


def _say_cut(path: Path, *, most: int) -> None:
    n_tokens = store.open(path).outputs[TOKENS_FIELD.partition("/")[2]]
    n_cut = int((n_tokens > most).sum())
    if n_cut:
        log.warning(
            "%s of %s texts are longer than %s tokens, up to %s: what comes after is not in their "
            "rows; the column n_tokens has their lengths, and model.max_length may allow more",
            f"{n_cut:,}",
            f"{len(n_tokens):,}",
            most,
            f"{n_tokens.max():,}",
        )


def _unit(plan: _Plan) -> str:
    return "images" if plan.model.tokenizer is None else "texts"


def _report(plan: _Plan, writer: store.Writer, path: Path, *, seconds: float, rate: float) -> None:
    shapes = ", ".join(
        f"{field.name.removeprefix('embeddings/')} ({field.shape[0]} {field.dtype})"
        for field in writer.fields
        if field.name.startswith("embeddings/")
    )
    log.info(
        "wrote %s: %s rows, %s failed, %s, %.1f s, %.1f %s/s",
        path,
        f"{writer.n_rows:,}",
        f"{writer.n_failed:,}",
        shapes,
        seconds,
        rate,
        _unit(plan),
    )
    _say_failed(path, writer.n_failed)
    if plan.model.tokenizer is not None:
        _say_cut(path, most=plan.model.tokenizer.max_length)


def _say_failed(path: Path, n_failed: int) -> None:
    if n_failed:
        for reason in store.read_reasons(path)[:3]:
            log.warning("failed row %s, %s: %s", reason["row"], reason["id"], reason["reason"])
        log.warning(
            "all %s failed rows: %s; overwrite=true tries them again",
            f"{n_failed:,}",
            store.errors_path(path),
        )


@dataclasses.dataclass(frozen=True)
class _Results:
    """What one forward pass gave: arrays by field name, and rows that are not finite.

    And what the first pass of the process made of the network: see :class:`_Memory`.
    """

    arrays: dict[str, Array]
    attrs: dict[str, dict[str, Any]]
    not_finite: dict[int, str]
    first_pass: str


def _joined(batch: Batch, done: Sequence[tuple[Piece, _Results]]) -> _Results:
    """What the passes of a batch gave, in the order of its rows."""
    (piece, first), *others = done
    if piece.rows is None and not others:
        return first
    arrays = {
        name: np.full((batch.size, *array.shape[1:]), _unset(array.dtype), array.dtype)
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
    return _Results(arrays, first.attrs, bad, first.first_pass)


@contextlib.contextmanager
def _forward(plan: _Plan) -> Iterator[Any]:
    """The forward pass with its hooks, as a function from a batch to results."""
    module = plan.model.module
    prepared = plan.model.preprocess
    rows = Rows(
        plan.points,
        plan.poolings,
        dtype=plan.dtype,
        normalize=plan.normalize,
        tokens=plan.model.tokens,
    )
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision)
    with contextlib.ExitStack() as stack:
        lies_on = next((p.device for p in module.parameters()), plan.device)
        if lies_on != plan.device:
            stack.callback(module.to, lies_on)
            module.to(plan.device)
        stack.enter_context(hooks.undisturbed(module, device=plan.device))
        stack.enter_context(matmul_precision(plan.precision))
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
        memory = _Memory(plan, is_known=is_known)
        seen = Seen()
        got = stack.enter_context(
            hooks.Capture(module, plan.points, reduce=rows.reduce, only_here=True)
        )
        got.is_verified = True  # by look_first
        ablating: hooks.Intervention | None = None
        backward = None
        if plan.objective is not None:
            backward = Backward(
                plan.objective,
                got,
                title=plan.model.name,
                label_names=plan.source.label_names,
                label_numbers=plan.source.label_numbers,
                classes=plan.classes,
            )

        def run(inputs: Inputs, labels: Tensor | None, n: int) -> Any:
            """One pass, and one back where gradients are wanted."""
            seen.n, seen.mask, seen.picture = n, rows.mask, rows.picture
            with contextlib.ExitStack() as block:
                if backward is not None:
                    inputs = block.enter_context(hooks.differentiable(module, inputs))
                with torch.autocast(plan.device.type, dtype=half, enabled=half is not None):
                    output = hooks.run_model(module, inputs, title=plan.model.name)
                if backward is not None:
                    backward.run(output, labels, n=n)
                    if got.cut_off:
                        raise LayerError(
                            f"{plan.model.name} also keeps what {', '.join(got.cut_off)} is taken "
                            "at by itself (an attribute, a hook of its own, a list that it gives), "
                            "and what comes by that way would be left out; choose another layer"
                        )
            return output

        is_checked = False
        is_looked_at = backward is None and not plan.ablated
        is_padding_checked = plan.model.tokenizer is None

        def look_first(inputs: Inputs, labels: Tensor | None, n: int, seed: int) -> None:
            """Set the ablations, and see by passes of the first batch that nothing else changes."""
            nonlocal ablating
            if backward is not None:
                got.remove()
            seed_all(seed, plan.device)
            with (
                hooks.FAST_PATHS_OFF,
                torch.autocast(plan.device.type, dtype=half, enabled=half is not None),
            ):
                plain = hooks.run_model(module, _copied(inputs), title=plan.model.name)
                seed_all(seed, plan.device)
                again = hooks.run_model(module, _copied(inputs), title=plan.model.name)
            got.set()
            if not _gives_alike(plan, plain, again):  # it keeps something from pass to pass
                plain = None
            if plan.ablated:
                ablating = _ablating(plan, seen)
                stack.callback(ablating.remove)
                seen.is_plain = True
                seed_all(seed, plan.device)
                output = run(_copied(inputs), labels, n)
                seen.is_plain = False
                ablating.require_fired()
                _require_same_output(plan, plain, output)
                rows_before = {point.name: got[point.name] for point in plan.points}
                seed_all(seed, plan.device)
                run(_copied(inputs), labels, n)
                if all(torch.equal(rows_before[key], got[key]) for key in rows_before):
                    log.warning(
                        "the ablations change none of the rows of the first batch: they are of "
                        "layers that do not lead to %s, or change no number",
                        ", ".join(rows_before),
                    )
            elif backward is not None:
                seed_all(seed, plan.device)
                _require_same_output(plan, plain, run(_copied(inputs), labels, n))
            seed_all(seed, plan.device)

        def forward(batch: Batch, piece: Piece) -> _Results:
            nonlocal is_checked, is_looked_at, is_padding_checked
            first = batch.start + (0 if piece.rows is None else int(piece.rows.min()))
            labels = _labels_of(plan, batch, piece)
            # Not inference mode: a model's own cache could not be trained on afterwards.
            with torch.no_grad():
                memory.before_pass()
                inputs = placed(piece.inputs, plan.device)
                seed_all(first, plan.device)
                if prepared is not None and batch.are_pixels and isinstance(inputs, Tensor):
                    with torch.autocast(plan.device.type, dtype=half, enabled=half is not None):
                        inputs = prepared.normalize(inputs)
                if is_known:
                    inputs = channels_last(inputs)
                given = {} if isinstance(piece.inputs, Tensor) else piece.inputs
                wants_mask = bool(rows.mask_takers or plan.ablated)
                mask = token_mask(given, spellings=rows.spellings) if wants_mask else None
                rows.mask = None if mask is None else mask.to(plan.device)
                rows.picture = picture_size(
                    [inputs] if isinstance(inputs, Tensor) else inputs.values()
                )
                if not is_looked_at:
                    is_looked_at = True
                    look_first(inputs, labels, piece.size, first)
                output = run(inputs, labels, piece.size)
                memory.after_pass()
                try:
                    arrays, attrs = rows.arrays(got, n=piece.size)
                except LayerError as error:
                    last = batch.start + batch.size - 1
                    raise LayerError(f"rows {batch.start} to {last}: {error}") from None
                if plan.save_outputs:
                    logits = _logits(output, plan.model.name, piece.size)
                    arrays["outputs/logits"] = logits
                    arrays["outputs/predicted"] = logits.argmax(1).astype(np.int32)
                # The first pass was whole: it has shown that each layer runs once.
                got.stops_early = is_known and not plan.save_outputs and backward is None
                if not is_checked and piece.size > 1:
                    is_checked = True
                    if piece.size in _other_sizes(inputs) | rows.other_sizes | seen.sizes:
                        _require_samples_first(plan, got, rows, run, inputs, labels, n=piece.size)
                if not is_padding_checked:
                    is_padding_checked = _require_padding_unseen(plan, got, rows, run, batch)
            memory.say_of_zeros(batch)
            places = range(piece.size) if piece.rows is None else piece.rows.tolist()
            odd = {places[i]: why for i, why in not_finite(arrays).items()}
            if backward is not None:
                scores = scores_of(output, n=piece.size, title=plan.model.name)
                strange = (~scores.detach().isfinite().all(1)).nonzero()[:, 0].tolist()
                odd |= {places[i]: "its scores are not finite" for i in strange}
            if plan.objective == "loss" and labels is not None:
                of_none = np.flatnonzero(labels.cpu().numpy() < 0).tolist()
                odd |= {places[i]: "it has no label to have a loss of" for i in of_none}
            bad = {i: why for i, why in odd.items() if i not in batch.reasons}
            return _Results(arrays, attrs, bad, memory.first_pass)

        yield forward


class _Memory:
    """What code of the user's own keeps of a pass for later ones, seen on the first two.

    A layer that is made when the size of the input is known, a centre of the first batch, a
    generator: rows then hang on which batch came first.

    Attributes:
        first_pass: SHA-256 of what was another after the first pass; "" where nothing was. A run
            that goes on, whose first batch is another, has to find the same.
    """

    def __init__(self, plan: _Plan, *, is_known: bool) -> None:
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
    tensors = [inputs] if isinstance(inputs, Tensor) else inputs.values()
    return {size for tensor in tensors for size in tensor.shape[1:]}


def _labels_of(plan: _Plan, batch: Batch, piece: Piece) -> Tensor | None:
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


def _ablating(plan: _Plan, seen: Seen) -> hooks.Intervention:
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
    if isinstance(inputs, Tensor):
        return inputs.clone()
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _require_same_output(plan: _Plan, plain: Any, output: Any) -> None:
    """Raise LayerError if the model gives something else when gradients or changes are asked for.

    Copies go on in place of some tensors then: what a layer does to them in place, others do not
    see that hold the tensor itself.
    """
    if plain is not None and not _gives_alike(plan, plain, output):
        names = ", ".join(
            [p.name for p in plan.points if p.is_gradient] or [p.name for p, _ in plan.ablated]
        )
        raise LayerError(
            f"{plan.model.name} gives something else when {names} is asked for: a layer there "
            "works in place on what another one takes too; name the layer before, or one around it"
        )


def _gives_alike(plan: _Plan, output: Any, other: Any) -> bool:
    tensors = zip(_tensors_in(output), _tensors_in(other), strict=False)
    most = 1e-3 if plan.precision in ("fp32", "tf32") else 0.1
    return all(_is_alike(one, another, most=most) for one, another in tensors)


def _tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors_in(value)


def _require_padding_unseen(
    plan: _Plan,
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
    plan: _Plan,
    got: hooks.Capture,
    rows: Rows,
    run: Callable[[Inputs, Tensor | None, int], Any],
    inputs: Inputs,
    labels: Tensor | None,
    *,
    n: int,
) -> None:
    """Look at two samples where an axis of another kind is as long as the batch by chance.

    Raises:
        ShapeError: The first axis of what a layer gives is not that of the samples.
    """
    before = {point.name: got[point.name] for point in plan.points}

    def run_again(rows_of: slice | list[int]) -> None:
        # A copy: the model may work in place on what enters.
        if isinstance(inputs, Tensor):
            some: Inputs = inputs[rows_of].clone()
        else:
            some = {name: tensor[rows_of].clone() for name, tensor in inputs.items()}
        rows.mask = None if mask is None else mask[rows_of]
        of = None if labels is None else labels[rows_of]
        seed_all(0, plan.device)
        run(some, of, len(some if isinstance(some, Tensor) else next(iter(some.values()))))

    few, mask = min(2, n - 1), rows.mask
    try:
        run_again(slice(few))
        for point in plan.points:
            if len(got[point.name]) != few:
                raise ShapeError(
                    f"layer {point.name} gives {tuple(got[point.name].shape)} for {few} samples "
                    f"after pooling, so its first axis is not that of the samples, though {n} long "
                    f"for {n} of them; {_SAMPLES_FIRST}"
                )
        return
    except (ModelError, LayerError):
        pass
    # A model may be written for one size of batch alone: the samples in the other order then show
    # whether the rows go with them.
    backwards = list(range(n))[::-1]
    with contextlib.suppress(ModelError, LayerError):
        run_again(backwards)
        for point in plan.points:
            was, now = before[point.name], got[point.name]
            if _is_near(now, was[backwards]):
                continue
            if not _is_near(now, was):
                log.warning(
                    "%s gives %s for %s samples, and whether its first axis is theirs could not be "
                    "told: the model takes no other number of them",
                    point.name,
                    tuple(now.shape),
                    n,
                )
            else:
                raise ShapeError(
                    f"layer {point.name} gives the same {tuple(now.shape)} for {n} samples in the "
                    f"other order, so its first axis is not that of the samples; {_SAMPLES_FIRST}"
                )


_SAMPLES_FIRST = (
    "choose another layer, or where tokens come first pooling=function, such as lambda a: a.mean(0)"
)


def _is_near(rows: Tensor, others: Tensor) -> bool:
    return rows.shape == others.shape and torch.allclose(
        rows.double(), others.double(), rtol=1e-3, atol=1e-6, equal_nan=True
    )


def _is_alike(values: Tensor, others: Tensor, *, most: float) -> bool:
    """Whether they differ by at most a share of the largest."""
    if values.shape != others.shape:
        return False
    ours, theirs = values.detach().double(), others.detach().double()
    apart = (ours - theirs).nan_to_num(0).abs().amax() if ours.numel() else 0.0
    return bool(apart <= most * theirs.nan_to_num(0).abs().amax() + 1e-30) if ours.numel() else True


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


def _fields(batch: Batch, results: _Results) -> list[Field]:
    """The datasets for results of the shapes and types that the first forward pass gave."""
    return [
        Field(name, array.shape[1:], array.dtype, results.attrs.get(name, {}))
        for name, array in {**results.arrays, **batch.kept}.items()
    ]


def _create(
    plan: _Plan,
    path: Path,
    fields: Sequence[Field],
    attrs: Mapping[str, Any],
    *,
    replace: bool,
) -> store.Writer:
    source, rows = plan.source, slice(plan.rows.start, plan.rows.stop)
    if len(plan.rows) == len(source):
        rows = slice(None)
    return store.create(
        path,
        ids=source.ids if rows == slice(None) else source.ids[rows],
        fields=fields,
        attrs=attrs,
        item_hashes=None if source.item_hashes is None else source.item_hashes[rows],
        labels=None if source.labels is None else source.labels[rows],
        label_names=source.label_names,
        metadata={name: column[rows] for name, column in source.metadata.items()},
        replace=replace,
    )


def _append(writer: store.Writer, batch: Batch, results: _Results | None, plan: _Plan) -> None:
    """Write a batch; of rows that failed, what was read (picture and label) is kept."""
    reasons = dict(batch.reasons)
    if results is not None:
        reasons.update(results.not_finite)
    bad = sorted(reasons)
    rows = {}
    arrays = {**(results.arrays if results is not None else {}), **batch.kept}
    for field in writer.fields:
        array = arrays.get(field.name)
        if array is not None and array.shape[1:] != field.shape:
            raise ShapeError(
                f"{field.name} has shape {array.shape[1:]} from row {batch.start} on and "
                f"{field.shape} before; choose a pooling that gives one length, such as pooling=gap"
            )
        if array is None:
            array = np.empty((batch.size, *field.shape), field.dtype)
            array[...] = _unset(field.dtype)
        elif bad and field.name not in ("thumbnails", "labels"):
            array = array.copy()
            array[bad] = _unset(field.dtype)
        rows[field.name] = array
    status = np.full(batch.size, Status.OK, np.uint8)
    status[bad] = Status.FAILED
    listed = {
        batch.start - plan.rows.start + i: (plan.source.ids[batch.start + i], reasons[i])
        for i in bad
    }
    writer.append(rows, status=status, reasons=listed)


def _unset(dtype: np.dtype[Any]) -> float | int:
    """What stands where there is no number of a row."""
    return {"f": np.nan, "u": 255, "i": -1}[dtype.kind]
