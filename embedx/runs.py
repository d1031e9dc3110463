"""An extraction into its file: in one go, or part by part, from where it was left."""

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from embedx import derived, sources, store, unfinished, writing
from embedx.configs import settings_sha256
from embedx.disk import replace_file, require_idle, writing_lock
from embedx.errors import (
    ConfigError,
    DataError,
    Interrupted,
    ShapeError,
    StoreError,
    number_of,
)
from embedx.forward import Results, forward_of, joined, unset
from embedx.inputs import (
    TOKENS_FIELD,
    Batch,
    Batches,
    Piece,
    only,
    rows_together,
    start_worker,
    started,
    workers_said,
)
from embedx.layout import Field, Status
from embedx.parts import (
    AGAIN,
    Engine,
    Feed,
    Stop,
    append_parts,
    have_made,
    part_rows,
    stop_on_signal,
)
from embedx.pictures import whole_pictures
from embedx.plans import Plan, with_poolings_of
from embedx.progress import Progress
from embedx.sources import Shards, Source
from embedx.store import ENTERED, MADE_BY_FIRST, Embeddings, Parts, PartsFound
from embedx.unfinished import PartKind

log = logging.getLogger("embedx")


def _again(*, overwrite: bool) -> str:
    """How to go on: with ``overwrite`` a run begins anew, each time."""
    return f"{AGAIN}, but without overwrite=true," if overwrite else AGAIN


def run(plan: Plan, path: Path, attrs: Mapping[str, Any], *, config: str, overwrite: bool) -> None:
    """Fill ``path``, from the start or from where it was left."""
    replaced = _id_of(path)
    started = time.monotonic()
    if not overwrite:
        plan = with_poolings_of(plan, _begun_fields(unfinished.partial_path(path)))
    with stop_on_signal() as stop, forward_of(plan) as forward:
        filled = _fill(
            plan,
            path,
            attrs,
            forward=forward,
            stop=stop,
            overwrite=overwrite,
            again=_again(overwrite=overwrite),
        )
        if isinstance(filled, str):
            raise DataError(
                f"every one of the {len(plan.source):,} rows failed; the first, {filled}"
            )
        with contextlib.closing(filled.writer):
            _put_in_place(
                filled.writer,
                file_id=str(attrs["id"]),
                config=config,
                replaced=replaced,
                is_joined=False,
            )
        if stop.number:  # too late for this file, in time for what would follow
            raise Interrupted(
                f"stopped by {stop.name} when {path} was complete", signal_number=stop.number
            )
    seconds = time.monotonic() - started
    _report(plan, filled.writer, path, seconds=seconds, rate=filled.rate)


def _begun_fields(*paths: Path) -> list[Field]:
    """What is stored of a row by the first of some files that is there and can be read."""
    for path in paths:
        if path.exists():
            with contextlib.suppress(StoreError):  # that is told where it is read for its rows
                return store.PartReader(path).read().fields
    return []


def _id_of(path: Path) -> str | None:
    """The id of a file, or of its parts, that are to be replaced; None of a damaged one."""
    if not path.exists():
        return unfinished.parts_id(path)
    with contextlib.suppress(StoreError):  # nothing can be known to be made of it
        return str(store.open(path).attrs["id"])
    return None


def _put_in_place(
    writer: writing.Writer, *, file_id: str, config: str, replaced: str | None, is_joined: bool
) -> None:
    """Give a file with all its rows its name, and take away what it replaces.

    Raises:
        DataError: Every row failed; the file is taken away.
    """
    path = writer.path
    if writer.n_failed == writer.n_rows:
        writer.commit()
        partial = unfinished.partial_path(path)
        reasons = [one["reason"] for one in unfinished.read_reasons(partial)]
        writer.discard()
        _remove_if_empty(path.parent)
        raise DataError(
            f"every one of the {writer.n_rows:,} rows failed; the first: {(*reasons, 'unknown')[0]}"
        )
    writer.require_own()
    # Before the file takes its name: whatever stops us here, the next run comes by again.
    replace_file(path.with_name("config.yaml"), config.encode())
    if replaced is not None or not is_joined:  # of a file that was lost it lies there too
        derived.remove_derived(path.parent, replaced or "")
    if not is_joined:  # of its own parts it is not made, and nothing of less than all its rows
        derived.remove_derived(path.parent, file_id, is_replaced=False)
        unfinished.remove_parts(path)
    writer.finish()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


@dataclasses.dataclass(frozen=True)
class _Filled:
    """A writer that has all rows, and how many a second it got."""

    writer: writing.Writer
    rate: float


def _fill(
    plan: Plan,
    path: Path,
    attrs: Mapping[str, Any],
    *,
    forward: Callable[[Batch, Piece], Results],
    stop: Stop,
    overwrite: bool = False,
    fields: Sequence[Field] | None = None,
    title: str = "",
    again: str = AGAIN,
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
        again: How to go on, in words.

    Returns:
        The writer, which has the lock; where no row is good and ``fields`` are not given, the id of
        the first and why it failed.
    """
    first_pass = attrs.get(MADE_BY_FIRST, "" if fields is not None else None)
    if overwrite:  # from the start: what is there may be of code that has changed unseen
        require_idle(path)
        writer = None
    else:
        if unfinished.partial_path(path).exists():
            begun = store.Embeddings(unfinished.partial_path(path))
            first_pass = begun.attrs.get(MADE_BY_FIRST, "")
            attrs = {**attrs, **{key: begun.attrs[key] for key in (ENTERED,) if key in begun.attrs}}
            names = "the rows before", "those that follow"
            if words := store.other_environment(*names, begun.attrs, attrs):
                log.warning("%s", words)
        expected = {key: attrs[key] for key in ("id", "batch_size", "device")}
        writer = writing.resume(path, expected=expected)
        if writer is not None:
            _require_whole_batches(plan, writer)
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
            stack.enter_context(whole_pictures())
        prepared = plan.model.preprocess
        if plan.source.draws or (prepared is not None and prepared.is_own):
            stack.enter_context(sources.random_put_back())
        progress = stack.enter_context(
            Progress(n_rows, what=title or "extract", done=first_row, unit=_unit(plan))
        )
        is_told = False
        for batch in started(loader):
            if batch.fatal is not None:
                raise batch.fatal
            if batch.pieces and not is_told:
                is_told = True
                inputs = batch.pieces[0].inputs
                if words := plan.model.told_of(inputs, are_pixels=batch.are_pixels):
                    log.warning("%s", words)
            if batch.reasons and plan.on_error == "raise":
                row = batch.start + min(batch.reasons)
                if writer:
                    writer.commit()
                raise DataError(
                    f"row {row}{in_title}, {plan.source.ids[row]}: "
                    f"{batch.reasons[min(batch.reasons)]}; mend or remove it, or go on without "
                    "such rows: on_error=skip"
                )
            if batch.pieces:
                attrs = {**attrs, ENTERED: attrs.get(ENTERED, _kind(batch))}
                _require_one_kind(batch, str(attrs[ENTERED]), plan)
            done: list[tuple[Piece, Results]] = []
            for piece in batch.pieces:
                if stop.number and done:  # a window of texts may take minutes
                    break
                done.append((piece, forward(batch, piece)))
                progress.advance(piece.size)
            is_whole = len(done) == len(batch.pieces)
            results = joined(batch, done) if done and is_whole else None
            if results is not None:
                if first_pass is None:
                    first_pass = results.first_pass
                    attrs = {**attrs, MADE_BY_FIRST: first_pass} if first_pass else attrs
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
                raise Interrupted(
                    f"stopped by {stop.name}: {kept:,} of {n_rows:,} rows{of} "
                    f"are kept; {again} to go on",
                    signal_number=stop.number,
                )
        if writer is None:
            place, reason = min(waiting[0].reasons.items())
            return f"{plan.source.ids[waiting[0].start + place]}: {reason}"
        failing.pop_all()
        return _Filled(writer, progress.rate)


def _require_whole_batches(plan: Plan, writer: writing.Writer) -> None:
    """Refuse to go on amid a batch, where a join was stopped: all others would be cut elsewhere.

    Raises:
        StoreError: The rows that are there end so; the writer is closed.
    """
    block = rows_together(plan.model, batch_size=plan.batch_size)
    if writer.rows_done % block and writer.rows_done < writer.n_rows:
        writer.close()
        n = unfinished.parts_number(writer.path)
        how = f"go on with n_parts={n}" if n else "join them again"
        raise StoreError(
            f"{unfinished.partial_path(writer.path)} is being joined of parts, "
            f"{writer.rows_done:,} of {writer.n_rows:,} rows so far; {how}, or start anew with "
            "overwrite=true"
        )


def _kind(batch: Batch) -> str:
    return "pictures" if batch.are_pixels else "tensors"


def _require_one_kind(batch: Batch, before: str, plan: Plan) -> None:
    """Refuse pictures after tensors, or tensors after pictures: they enter by other ways.

    Raises:
        ShapeError: A batch has the one, and those before it the other.
    """
    if (kind := _kind(batch)) != before:
        raise ShapeError(
            f"the samples from {plan.source.ids[batch.start]} on are {kind}, and those before are "
            f"{before}; give all samples as the same"
        )


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


@dataclasses.dataclass(frozen=True)
class _RowCuts:
    """A run cut into ranges of the rows of its source, each with a file of its own."""

    plan: Plan
    n: int
    whole_id: str
    limit: None = None
    unit: PartKind = "part"

    def rows(self, number: int) -> range:
        block = rows_together(self.plan.model, batch_size=self.plan.batch_size)
        return part_rows(number, n_parts=self.n, n_rows=len(self.plan.source), block=block)

    def open(
        self, number: int, *, scratch: Path, most: int | None
    ) -> contextlib.AbstractContextManager[Plan]:
        """What to do for a file."""
        return contextlib.nullcontext(dataclasses.replace(self.plan, rows=self.rows(number)))

    def file_id(self, number: int, plan: Plan) -> str:
        """The id of a file, of which this is to be done."""
        rows = self.rows(number)
        return settings_sha256({"of": self.whole_id, "rows": [rows.start, rows.stop]})

    def create(self, made: "_Made") -> writing.Writer:
        """The file that the parts are joined into, at row 0."""
        return _create(self.plan, made.path, next(made.opened()).fields, made.attrs, replace=True)


@dataclasses.dataclass(frozen=True)
class _ShardCuts:
    """A run cut into shards, whose samples are known when they are read."""

    plan: Plan
    shards: Shards
    unit: PartKind = "shard"

    @property
    def n(self) -> int:
        return len(self.shards.names)

    @property
    def limit(self) -> int | None:
        return self.shards.limit

    @contextlib.contextmanager
    def open(self, number: int, *, scratch: Path, most: int | None) -> Iterator[Plan]:
        with self.shards.read(number, scratch=scratch, most=most) as source:
            yield dataclasses.replace(self.plan, source=source, rows=range(len(source)))

    def file_id(self, number: int, plan: Plan) -> str:
        return settings_sha256({**plan.identity(), "part": number})

    def create(self, made: "_Made") -> writing.Writer:
        whole = Parts(made.path, made)
        return writing.create(
            made.path,
            ids=whole.ids,
            fields=whole.fields,
            attrs=made.attrs,
            labels=None if "labels" in whole.streamed else whole.labels,
            label_names=whole.label_names,
            metadata=whole.metadata,
            replace=True,
        )


Cuts = _RowCuts | _ShardCuts


def ahead(shards: Shards) -> Source:
    """What is known of the samples of shards before the first one is read."""
    return Source(shards.name, [], shards.read, shards.fingerprint, root=shards.root)


def cuts_of(
    plan: Plan,
    source: Source | Shards,
    path: Path,
    *,
    file_id: str,
    n_parts: int | None,
    engine: Engine | Feed | None,
) -> Cuts | None:
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
        begun = unfinished.parts_number(path) if unfinished.parts_id(path) == file_id else None
        wanted = max(_PARTS_A_WORKER * engine.n_workers, -(-len(source) // _PART_ROWS))
        n_parts = min(begun or wanted, most)
    if n_parts > most:
        raise ConfigError(
            f"n_parts must be at most {most:,}, not {n_parts:,}: of the {len(source):,} rows "
            f"{block:,} are made at once; a smaller batch_size allows for more"
        )
    return _RowCuts(plan, n_parts, file_id)


PARTS_MOST = 10**6
_PARTS_A_WORKER = 4  # so that the last one keeps few waiting
_PART_ROWS = 65_536


class _Made(PartsFound):
    """Which parts of a run are made.

    Args:
        cuts: How it is cut.
        path: The file that they will be joined into.
        attrs: Its root attributes.

    Attributes:
        sizes: How many rows a part has, by its number, as soon as that is known.
        late: Parts of which no row is good before it is known what is stored of a row: the first
            such row, and why.
        n_new: Rows made by this process.
        fields: What is stored of a row; None as long as no part says it.
        again: How to go on, in words.
    """

    def __init__(
        self, cuts: Cuts, path: Path, attrs: Mapping[str, Any], *, again: str = AGAIN
    ) -> None:
        super().__init__(path, of=str(attrs["id"]), n=cuts.n, kind=cuts.unit)
        self.again = again
        self.late: dict[int, str] = {}
        self.n_new = 0
        self._cuts = cuts
        self._attrs = attrs

    @property
    def attrs(self) -> dict[str, Any]:
        """The root attributes of the whole: what the parts were made by is known of them."""
        return {**self._attrs, **self.common}

    def opened(self) -> Iterator[Embeddings]:
        """The parts in order, one at a time: of many the files could not be open."""
        for number in sorted(self.sizes):
            if self.sizes[number]:
                yield store.open(unfinished.part_path(self.path, number))

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
        part, title = unfinished.part_path(self.path, number), self.title(number)
        scratch = unfinished.parts_folder(self.path) / f"shard-{number}.tmp"
        with (
            self._cuts.open(number, scratch=scratch, most=most) as plan,
            stop_on_signal() as stop,
        ):
            if self._cuts.unit == "shard" and number not in self.late:
                plan.source.tell()
            self.sizes[number] = n_rows = len(plan.rows)
            if not n_rows:
                unfinished.note_empty_part(self.path, number)
                return
            fields = None if alone else self.fields
            common = {} if fields is None else self.common
            if number not in self.late:  # it says by itself what it is made by
                of_first = (MADE_BY_FIRST, ENTERED)
                common = {key: value for key, value in common.items() if key in of_first}
            filled = _fill(
                plan,
                part,
                {
                    **self._attrs,
                    **common,
                    **self.about(number),
                    "id": self._cuts.file_id(number, plan),
                },
                forward=forward,
                stop=stop,
                fields=fields,
                title=title,
                again=self.again,
            )
            if isinstance(filled, str):
                self.late[number] = filled
                return
            with contextlib.closing(filled.writer):
                filled.writer.finish()
            self.n_new += n_rows
            if stop.number:
                raise Interrupted(
                    f"stopped by {stop.name} after {title}; {self.again} to go on",
                    signal_number=stop.number,
                )
        self.late.pop(number, None)
        self.add(number)


def run_parts(
    plan: Plan,
    cuts: Cuts,
    path: Path,
    attrs: Mapping[str, Any],
    *,
    config: str,
    overwrite: bool,
    engine: Engine | None,
) -> None:
    """Fill ``path`` from parts, of which those are made that are missing."""
    started = time.monotonic()
    made = _Made(cuts, path, attrs, again=_again(overwrite=overwrite))
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_if_empty, path.parent)
        lock = stack.enter_context(writing_lock(path))
        if overwrite:
            if not path.exists() and (was := unfinished.parts_id(path)) is not None:
                derived.remove_derived(path.parent, was)  # of the parts: they were read as one
            unfinished.remove_parts(path)
        _remove_made_of_lost(path)
        unfinished.begin_parts(
            path, of=str(attrs["id"]), n=cuts.n, kind=cuts.unit, replaces=overwrite
        )
        stack.callback(unfinished.end_parts, path)
        missing = [number for number in range(cuts.n) if not made.add(number)]
        if made.sizes:
            of = f"{len(made.sizes):,} of {number_of(cuts.n, cuts.unit, cuts.unit + 's')}"
            then = "going on with the rest" if missing else "joining them"
            log.info("%s made before: %s", of, then)
        n_before = sum(made.sizes.values())
        if missing:
            _remove_made_of_parts(made)
        if engine is not None and missing:
            _run_elsewhere(plan, made, cuts, path, missing, engine=engine)
        is_complete = len(made.sizes) == cuts.n
        if not is_complete:
            of_parts = (unfinished.partial_path(unfinished.part_path(path, one)) for one in missing)
            plan = with_poolings_of(plan, made.fields or _begun_fields(*of_parts))
        with forward_of(plan) if not is_complete else contextlib.nullcontext() as forward:
            left = cuts.limit
            for number in range(cuts.n):
                if left == 0:
                    break
                if number not in made.sizes:
                    made.make(number, forward=forward, most=left)
                left = None if left is None else left - made.sizes[number]
            n_rows = sum(made.sizes.values())
            if made.fields is None:
                first = next(iter(made.late.values()), "there is none")
                raise DataError(
                    f"every one of the {n_rows:,} rows of {plan.source.name} failed; the first, "
                    f"{first}"
                )
            for number in list(made.late):
                made.make(number, forward=forward, most=made.sizes[number])
        lock.require_held()
    writer = _join(made, cuts, config=config)
    seconds = time.monotonic() - started
    _report(plan, writer, path, seconds=seconds, rate=(n_rows - n_before) / max(seconds, 1e-9))


def _run_elsewhere(
    plan: Plan, made: _Made, cuts: Cuts, path: Path, missing: Sequence[int], *, engine: Engine
) -> None:
    """Have parts made by an engine.

    Raises:
        DataError: Some could not be made; the others are.
        Interrupted: A signal came.
    """
    is_known = isinstance(cuts, _RowCuts)  # how many rows there are
    readers: dict[int, store.PartReader] = {}
    counted: dict[int, int] = {}
    with Progress(
        len(plan.source) if is_known else cuts.n,
        what="extract",
        done=sum(made.sizes.values()) if is_known else len(made.sizes),
        unit=_unit(plan) if is_known else "shards",
    ) as progress:

        def look(running: Iterable[int]) -> dict[int, int]:
            for number in running:
                part = unfinished.part_path(path, number)
                reader = readers.setdefault(number, store.PartReader(part))
                with contextlib.suppress(StoreError):  # it is being renamed; or told when it ends
                    more = reader.read().rows_done - counted.get(number, 0)
                    if more > 0:
                        counted[number] = counted.get(number, 0) + more
                        if is_known:
                            progress.advance(more)
            return {number: counted.get(number, 0) for number in running}

        def ended(number: int) -> bool:
            readers.pop(number, None)
            before = counted.pop(number, 0)
            is_there = made.add(number)  # else it has no good row
            if is_there:
                progress.advance(made.sizes[number] - before if is_known else 1)
            return is_there

        have_made(
            engine,
            missing,
            n=cuts.n,
            title=made.title,
            about={
                "n_parts": cuts.n,
                "file_id": str(made.attrs["id"]),
                "identity": json.loads(made.attrs["identity"]),
            },
            ended=ended,
            look=look,
            unit=cuts.unit,
            again=made.again,
        )


def _remove_made_of_lost(path: Path) -> None:
    """Take away what was made of a file that is there no more, where parts of one are begun."""
    if not path.exists() and unfinished.parts_id(path) is None:
        derived.remove_derived(path.parent, "")


def _remove_made_of_parts(made: _Made) -> None:
    """Take away what was made of all parts, read as one, before one of them was removed again."""
    if not made.path.exists():
        derived.remove_derived(made.path.parent, str(made.attrs["id"]))


def run_part(
    plan: Plan,
    cuts: Cuts,
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
    _remove_made_of_lost(path)
    unfinished.begin_parts(path, of=str(attrs["id"]), n=cuts.n, kind=cuts.unit)
    made = _Made(cuts, path, attrs)
    last: Path | None = None
    with contextlib.ExitStack() as stack:
        forward = None
        for part in numbers:
            for number in part_rows(part, n_parts=n_parts, n_rows=cuts.n, block=1):
                if not made.add(number):
                    if forward is None:
                        _remove_made_of_parts(made)
                        its_path = unfinished.part_path(path, number)
                        begun = _begun_fields(unfinished.partial_path(its_path))
                        forward = stack.enter_context(forward_of(with_poolings_of(plan, begun)))
                    made.make(number, forward=forward, alone=True)
                if number not in made.late and made.sizes[number]:
                    last = unfinished.part_path(path, number)
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


def _join(made: _Made, cuts: Cuts, *, config: str) -> writing.Writer:
    """Make ``path`` of its parts, and take them away."""
    path = made.path
    replaced = _id_of(path) if path.exists() else None  # what was made of the parts stays right
    writer = cuts.create(made)
    with contextlib.closing(writer):
        append_parts(writer, made.opened())
        of = str(made.attrs["id"])
        _put_in_place(writer, file_id=of, config=config, replaced=replaced, is_joined=True)
    unfinished.remove_parts(path)
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


def _unit(plan: Plan) -> str:
    return "images" if plan.model.tokenizer is None else "texts"


def _report(plan: Plan, writer: writing.Writer, path: Path, *, seconds: float, rate: float) -> None:
    shapes = ", ".join(
        f"{field.name.removeprefix('embeddings/')} ({field.shape[0]} {field.dtype})"
        for field in writer.fields
        if field.name.startswith("embeddings/")
    )
    log.info(
        "wrote %s: %s rows, %s failed, %s, %.1f s%s",
        path,
        f"{writer.n_rows:,}",
        f"{writer.n_failed:,}",
        shapes,
        seconds,
        f", {rate:.1f} {_unit(plan)}/s" if rate else "",  # of parts that were there, none
    )
    say_failed(path, writer.n_failed)
    if plan.model.tokenizer is not None:
        _say_cut(path, most=plan.model.tokenizer.max_length)


def say_failed(path: Path, n_failed: int) -> None:
    if n_failed:
        for reason in unfinished.read_reasons(path)[:3]:
            log.warning("failed row %s, %s: %s", reason["row"], reason["id"], reason["reason"])
        log.warning(
            "all %s failed rows: %s; overwrite=true tries them again",
            f"{n_failed:,}",
            unfinished.errors_path(path),
        )


def _fields(batch: Batch, results: Results) -> list[Field]:
    """The datasets for results of the shapes and types that the first forward pass gave."""
    return [
        Field(name, array.shape[1:], array.dtype, results.attrs.get(name, {}))
        for name, array in {**results.arrays, **batch.kept}.items()
    ]


_LARGE_BYTES = 10**9


def _create(
    plan: Plan,
    path: Path,
    fields: Sequence[Field],
    attrs: Mapping[str, Any],
    *,
    replace: bool,
) -> writing.Writer:
    source, rows = plan.source, slice(plan.rows.start, plan.rows.stop)
    row_bytes = sum(field.row_bytes for field in fields)
    if row_bytes * len(plan.rows) >= _LARGE_BYTES:
        log.info(
            "%s rows of %s numbers take %.1f GB in %s",
            f"{len(plan.rows):,}",
            f"{sum(math.prod(field.shape) for field in fields):,}",
            row_bytes * len(plan.rows) / 1e9,
            path,
        )
    if len(plan.rows) == len(source):
        rows = slice(None)
    return writing.create(
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


def _append(writer: writing.Writer, batch: Batch, results: Results | None, plan: Plan) -> None:
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
            array[...] = unset(field.dtype)
        elif bad and field.name not in ("thumbnails", "labels"):
            array = array.copy()
            array[bad] = unset(field.dtype)
        rows[field.name] = array
    status = np.full(batch.size, Status.OK, np.uint8)
    status[bad] = Status.FAILED
    listed = {
        batch.start - plan.rows.start + i: (plan.source.ids[batch.start + i], reasons[i])
        for i in bad
    }
    writer.append(rows, status=status, reasons=listed)
