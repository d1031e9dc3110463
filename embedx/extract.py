"""The stage ``extract``: data through a model, what its layers give into ``embeddings.h5``."""

import contextlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.utils.data
import yaml

from embedx import derived, layout, store, unfinished
from embedx import pooling as pools
from embedx.ablations import as_ablations
from embedx.checks import checked
from embedx.configs import public_config, settings_sha256
from embedx.errors import ConfigError, StoreError
from embedx.inputs import (
    Network,
    Precision,
    as_model,
    as_source,
    device_of,
    in_order,
    made_by,
)
from embedx.layout import Status
from embedx.models import Model, Preprocess
from embedx.objectives import Objective, read_classes
from embedx.parts import Engine, Feed
from embedx.plans import Plan
from embedx.points import Point, resolve_points
from embedx.pooling import Function
from embedx.runs import PARTS_MOST, ahead, cuts_of, run, run_part, run_parts, say_failed
from embedx.sources import Shards, Source
from embedx.store import Embeddings
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
            ``Dataset``, a ``DataLoader`` of one, a :class:`~embedx.sources.Source`, or
            :class:`~embedx.sources.Shards`. Of a loader, rows are in the order of its Dataset, and
            its ``collate_fn`` makes the inputs.
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
        overwrite: Replace what another run left in ``out``, and all that was derived from it; not
            beside ``part``, where that could be what another job has just made.
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
    _check_parts(n_parts, part, engine, out=out, overwrite=overwrite)
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
    for note in described.notes:
        log.warning(note)
    source.tell()
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
    points = resolve_points(
        described.module,
        layers,
        penultimate=described.layer,
        title=described.name if isinstance(model, Model) else None,
    )
    ablations = as_ablations(ablate)
    plan = Plan(
        model=described,
        source=source if isinstance(source, Source) else ahead(source),
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
            for point in resolve_points(
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
    cuts = cuts_of(plan, source, path, file_id=file_id, n_parts=n_parts, engine=engine)
    if isinstance(engine, Feed):
        engine.require_same(file_id, identity)
    elif not overwrite:
        partial = unfinished.partial_path(path)
        replaces = unfinished.parts_id(path) == file_id and unfinished.parts_replace(path)
        is_begun = _is_begun(partial, identity)
        if path.exists() and not replaces and not is_begun:
            _refuse_another(path, identity, source)
            log.info("%s is complete already with these settings: nothing to do", path)
            say_failed(path, int((store.open(path).status == Status.FAILED).sum()))
            if unfinished.parts_id(path) == file_id:  # killed when all was done but this
                unfinished.remove_parts(path)
            return store.open(path)
        if cuts is not None or not is_begun:  # else it goes on, and replaces what parts are there
            _refuse_other_parts(path, identity, source)
            unfinished.require_no_parts(path, of=file_id, n=0 if cuts is None else cuts.n)
        if partial.exists():
            _refuse_another(partial, identity, source)
            if cuts is not None and unfinished.parts_id(path) is None:
                raise StoreError(
                    f"{partial} was begun in one go; go on without n_parts and engine, or start "
                    "anew with overwrite=true"
                )
    derived.require_own_beside(path, has_config=True)
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
        "data": source.name,
        "batch_size": batch_size,
        **made_by(described, torch_device),
    }
    text = yaml.safe_dump({"id": file_id, **recorded}, sort_keys=False, allow_unicode=True)
    if cuts is None:
        run(plan, path, attrs, config=text, overwrite=overwrite)
    elif part is not None or isinstance(engine, Feed):
        assert n_parts is not None
        alone = [] if part is None else [part]
        numbers = engine if isinstance(engine, Feed) else alone
        return store.open(run_part(plan, cuts, path, attrs, numbers=numbers, n_parts=n_parts))
    else:
        run_parts(plan, cuts, path, attrs, config=text, overwrite=overwrite, engine=engine)
    return store.open(path)


def _objective(
    points: Sequence[Point], asked: Objective | None, source: Source | Shards
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


def _normalized(model: Model, points: Sequence[Point], asked: bool | None) -> list[bool]:
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


def _differing(there: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """What of that which decides the rows of a file is another than what is asked for."""
    return [key for key in {**identity, **there} if there.get(key) != identity.get(key)]


def _is_begun(partial: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a run that was to overwrite a file with this one was stopped."""
    with contextlib.suppress(StoreError):  # damaged: the file stays as it is
        there = store.Embeddings(partial).identity if partial.exists() else {}
        return bool(there) and not _differing(there, identity)
    return False


def _refuse_another(present: Path, identity: Mapping[str, Any], source: Source | Shards) -> None:
    """Raise if the file that is there belongs to another run, naming the first difference."""
    there = store.Embeddings(present).identity
    differing = _differing(there, identity)
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
        theirs = json.loads(store.Embeddings(present).attrs.get("environment", "{}")).get("python")
        if theirs != (python := platform.python_version()):
            difference += f" (or the same, compiled by Python {theirs} there and {python} here)"
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
    now = layout.stored_texts(source.ids)
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


def _few(names: Sequence[str]) -> str:
    shown = [_short(name if name.isprintable() else ascii(name)) for name in names[:3]]
    return ", ".join([*shown, *(["..."] if len(names) > 3 else [])])


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 80 else text[:77] + "..."


def _check_parts(
    n_parts: int | None,
    part: int | None,
    engine: Engine | Feed | None,
    *,
    out: str | os.PathLike[str] | None,
    overwrite: bool,
) -> None:
    """Refuse parts that cannot be.

    Raises:
        ConfigError: A number is out of its range, or two of them do not go together.
    """
    if n_parts is not None and not 1 <= n_parts <= PARTS_MOST:
        raise ConfigError(f"n_parts must be 1 to {PARTS_MOST:,}, not {n_parts}")
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
            f"overwrite=true beside part={part}: a part of the old run and one that another job "
            f"has just made cannot be told apart; remove {out or 'the folder of the old run'} "
            "before the first job, or choose another name"
        )


def _refuse_other_parts(path: Path, identity: Mapping[str, Any], source: Source | Shards) -> None:
    """Raise if parts that lie there are of another run, naming the first difference."""
    for one in sorted(unfinished.parts_folder(path).glob(f"*/{path.name}*")):
        attrs: dict[str, Any] = {}
        if one.suffix in (path.suffix, ".partial"):
            with contextlib.suppress(StoreError):  # damaged: that is told when they are joined
                attrs = store.PartReader(one).read().attrs
        if "identity" in attrs:
            # Another job may give it its final name meanwhile: it is opened to be refused alone.
            there = json.loads(attrs["identity"])
            if _differing(there, identity):
                _refuse_another(one, identity, source)
            return
