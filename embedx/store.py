"""Embeddings files: found and read, also part by part."""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from embedx.checks import checked
from embedx.columns import Column, concatenated, numbers_first
from embedx.errors import ShapeError, StoreError
from embedx.layout import (
    Field,
    Skeleton,
    Status,
    are_unique,
    bad_rows,
    column_name,
    decoded,
    newest_record,
    plain_name,
    point_of,
    reading,
    run_bytes,
)
from embedx.matrix import Array, Stacked

if TYPE_CHECKING:
    import pandas
from embedx.layout import BOOLEAN, COMPLETE
from embedx.unfinished import (
    EMPTY_MARK,
    PARTS,
    PARTS_MARK,
    PartKind,
    has_parts,
    part_path,
    partial_path,
    parts_folder,
    parts_id,
    parts_mark,
    parts_replace,
    read_reasons,
    require_no_parts,
)

log = logging.getLogger("embedx")
EMBEDDINGS_NAME = "embeddings.h5"


_GRADIENT_POINT = re.compile(r":grad(_input)?(\.|$)")


class Embeddings:
    """An embeddings file, opened for reading; arrays are memory-mapped.

    Attributes:
        path: The file.
        attrs: Its root attributes: ``id``, ``model``, ``weights_sha256``, ``config``, ...
        complete: Whether every row was written; False for a ``.partial`` file.
        size_bytes: Of the file when it was opened.
        n_rows: Committed rows n; equals the number of samples once complete.
        status: Shape ``(n,)`` uint8 of :class:`Status`.
        labels: Shape ``(n,)`` int32, -1 for none, or None where the data has no labels.
        label_names: Names that ``labels`` counts through; empty where each number is its own name.
        metadata: Further columns, each of n numbers, booleans or texts.
        embeddings: For each capture point an array ``(n, d)``.
        outputs: What else was saved row by row, such as ``logits`` ``(n, classes)``.
        thumbnails: ``(n, h, w, 3)`` uint8, or None.
        point_attrs: What is said of each capture point: ``layer``, ``pooling``, ...
        streamed: All that was written row by row, by the name of its dataset.
        fields: The same, as :func:`create` takes them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path), Skeleton(path) as skeleton:
            self.attrs = skeleton.check_embeddings()
            fields = skeleton.fields()
            self._row_maps = skeleton.row_maps(fields)
            size = int(self.attrs["n_rows"])
            newest = newest_record(
                skeleton.map("commit"), n_rows=size, run=run_bytes(str(self.attrs["id"]))
            )
            if newest is None:
                raise StoreError(f"{path} holds no valid commit record; make it anew")
            self.complete = newest.state == COMPLETE
            self.size_bytes = skeleton.size_bytes
            self.offsets = skeleton.offsets([field.name for field in fields])
            self.n_rows = newest.rows_done
            if not self.complete and path.suffix != ".partial":
                raise StoreError(
                    f"{path} is not finished, {self.n_rows:,} of {size:,} rows are there; call it "
                    f"{partial_path(path).name} as before, and go on with the same command"
                )
            done = slice(0, self.n_rows)
            self._encoded_ids = skeleton.map("ids")[done]
            self.status = np.array(skeleton.map("status")[done])
            self.labels: Array | None = None
            self.label_names: list[str] = []
            if skeleton.has("labels"):
                self.labels = np.array(skeleton.map("labels")[done])
                names_end = 2**31
                if skeleton.has("label_names"):
                    self.label_names = decoded(skeleton.map("label_names"))
                    names_end = len(self.label_names)
                if len(self.labels) and not (
                    self.labels.min() >= -1 and self.labels.max() < names_end
                ):
                    raise StoreError(f"{path} is damaged: a label has no name; make it anew")
            self.metadata: dict[str, Array | list[str]] = {}
            for name in skeleton.names("metadata"):
                column = np.array(skeleton.map(name)[done])
                if column.dtype == np.uint8 and skeleton.dataset_attrs(name).get("type") == BOOLEAN:
                    column = column.astype(bool)
                plain = plain_name(name.removeprefix("metadata/"))
                self.metadata[plain] = decoded(column) if column.dtype.kind == "S" else column
            self._take(
                [
                    dataclasses.replace(f, attrs=skeleton.dataset_attrs(f.name))
                    if f.name.startswith("embeddings/")
                    else f
                    for f in fields
                ],
                {field.name: skeleton.map(field.name)[done] for field in fields},
            )

    def _take(self, fields: list[Field], streamed: dict[str, Array]) -> None:
        """Take what was streamed, by the name of its dataset, once the ids are known."""
        self.fields = fields
        self.streamed = streamed
        points = [field for field in fields if field.name.startswith("embeddings/")]
        self.embeddings = {point_of(field.name): streamed[field.name] for field in points}
        self.point_attrs = {point_of(field.name): dict(field.attrs) for field in points}
        self.outputs = {
            name.removeprefix("outputs/"): rows
            for name, rows in streamed.items()
            if name.startswith("outputs/")
        }
        self.thumbnails = streamed.get("thumbnails")
        if not self.embeddings:
            raise StoreError(f"{self.path} holds no embeddings; make it anew")
        if not are_unique(self._encoded_ids):
            raise StoreError(f"{self.path} is damaged: ids come twice; make it anew")

    @functools.cached_property
    def ids(self) -> list[str]:
        """Those of all rows, n unique texts; made when first asked for."""
        return decoded(self._encoded_ids)

    def __repr__(self) -> str:
        points = ", ".join(f"{name} {rows.shape}" for name, rows in self.embeddings.items())
        return f"<Embeddings {self.path}: {self.n_rows} rows, {points}>"

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the rows, as far as the file says; empty where it does not."""
        try:
            identity = json.loads(str(self.attrs.get("identity", "")))
        except (ValueError, RecursionError):
            identity = None
        return identity if isinstance(identity, dict) else {}

    def remarks(self, layers: Iterable[str] = ()) -> list[str]:
        """What whoever sees the rows of these layers has to know of how they were made.

        Args:
            layers: Capture points; some may be of gradients.
        """
        said = ["RANDOM weights"] if str(self.attrs.get("weights", "")).startswith("random") else []
        if self.identity.get("ablate"):
            said.append("ablated")
        objective = self.identity.get("objective")
        if objective is not None and any(_GRADIENT_POINT.search(layer) for layer in layers):
            of = {"predicted": "the predicted class", "loss": "the loss of the labels"}
            said.append(f"gradients of {of.get(str(objective), f'class {objective}')}")
        return said

    def is_of_labels(self, layer: str) -> bool:
        """Whether the rows of a layer were made with the labels, which they then tell of."""
        return self.identity.get("objective") == "loss" and bool(_GRADIENT_POINT.search(layer))

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Shape ``(n,)``: the rows that hold a result."""
        mask: npt.NDArray[np.bool_] = self.status == Status.OK
        return mask

    def rows(self, point: str | None = None) -> tuple[str, Array]:
        """The embeddings ``(n, d)`` of one point, by default the first, with the point's name.

        Raises:
            StoreError: The file has no such point.
        """
        name = point if point is not None else next(iter(self.embeddings))
        if name not in self.embeddings:
            raise StoreError(
                f"{self.path} has no layer {name!r}; it holds {', '.join(self.embeddings)}"
            )
        return name, self.embeddings[name]

    @property
    def output_columns(self) -> dict[str, Array]:
        """What was saved as one number a row, such as ``predicted``: shape ``(n,)`` by name."""
        return {name: rows for name, rows in self.outputs.items() if rows.ndim == 1}

    def label_texts(self) -> list[str] | None:
        """The label of each row as text, ``""`` for none, or None where there are no labels."""
        if self.labels is None:
            return None
        names = self.label_names or {label: str(label) for label in np.unique(self.labels).tolist()}
        return [names[label] if label >= 0 else "" for label in self.labels.tolist()]

    def to_pandas(self) -> "pandas.DataFrame":
        """A frame with one row a sample, indexed by id: label, status, metadata, embeddings.

        Metadata whose name another column has gets a name with ``_`` behind it, which is said.

        Raises:
            DependencyError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            from embedx.errors import missing_extra

            raise missing_extra("pandas", extra="data", needed_for="to_pandas()") from None
        columns: dict[str, Any] = {}
        if (labels := self.label_texts()) is not None:
            columns["label"] = labels
        columns["status"] = [Status(s).name.lower() for s in self.status]
        features = {
            f"{point}[{i}]": rows[:, i]
            for point, rows in self.embeddings.items()
            for i in range(rows.shape[1])
        }
        for name, values in self.metadata.items():
            free = name
            while free in columns or free in features:
                free += "_"
            if free != name:
                log.info("the column %r is called %r: another one has that name", name, free)
            columns[free] = values
        return pandas.DataFrame(columns | features, index=pandas.Index(self.ids, name="id"))

    def checksums(self) -> Array:
        """Shape ``(n,)`` uint32: CRC-32 of everything that was streamed of each row."""
        checksums: Array = self._row_maps[1][: self.n_rows]
        return checksums

    @functools.cached_property
    def parentage(self) -> dict[str, str]:
        """What is kept by a file that is made of these rows, for :meth:`is_parent_of`.

        The ``id`` alone does not tell rows from those of the same run made again: a picture that
        could not be read may be there now.
        """
        rows = hashlib.sha256(self.checksums().astype("<u4").tobytes()).hexdigest()
        return {"parent": str(self.attrs["id"]), "parent_rows": rows}

    def is_parent_of(self, about: Mapping[str, Any]) -> bool:
        """Whether what says this of itself was made of these rows; others need not say of which."""
        return {**self.parentage, **about}.items() >= self.parentage.items()

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """See that the file is still the one that was opened while something is put beside it.

        Raises:
            StoreError: It was moved, removed, or replaced by other rows, before or meanwhile.
        """
        self.require_there()
        yield
        try:
            self.require_there()
        except StoreError as error:
            raise StoreError(
                f"{error}, and make again what was just written: it is of the rows that were there"
            ) from None

    def require_there(self) -> None:
        """See that the file is still the one that was opened, before anything is put beside it.

        Raises:
            StoreError: It was moved, removed, or replaced by other rows.
        """
        is_same = are_there(self.path)
        if is_same and self.complete:  # else there may be more rows by now
            with contextlib.suppress(StoreError):
                is_same = open(self.path).parentage == self.parentage
        if not is_same:
            raise _replaced(self.path)

    def verify(self) -> list[int]:
        """Check the checksum of every committed row; returns the rows that do not match."""
        return bad_rows(self._row_maps, slice(0, self.n_rows))

    def reasons(self) -> list[dict[str, Any]]:
        """Why rows failed, as far as it is known: dicts of ``row``, ``id`` and ``reason``."""
        return read_reasons(self.path, ids=self._failed_ids())

    def _failed_ids(self) -> dict[int, str]:
        return {int(row): self.ids[row] for row in np.flatnonzero(self.status == Status.FAILED)}

    def row_file(self, row: int) -> Path:
        """The file that a row lies in."""
        return self.path


def read_items(path: Path) -> tuple[list[str], Array | None]:
    """The ids of all n items of a file, written or not yet, and their hashes if it has them.

    Raises:
        StoreError: It is damaged or not a file of embedx.
    """
    with reading(path), Skeleton(path) as skeleton:
        skeleton.check_embeddings()
        hashes = np.array(skeleton.map("item_hashes")) if skeleton.has("item_hashes") else None
        return decoded(skeleton.map("ids")), hashes


def find_embeddings(where: str | os.PathLike[str]) -> Path:
    """The embeddings file that a path names: the file itself, or the one in a folder.

    Raises:
        StoreError: There is none; the message says whether one is unfinished.
    """
    path = Path(where)
    if path.is_dir():
        path = path / EMBEDDINGS_NAME
    if not path.exists():
        require_no_parts(path)
        if partial_path(path).exists():
            partial = Embeddings(partial_path(path))
            raise StoreError(
                f"{path} is not finished, {partial.n_rows:,} of {partial.attrs['n_rows']:,} rows "
                f"are there; go on with the same extract command, or read {partial.path}"
            )
        raise StoreError(f"there is no {path}; make it with: python -m embedx extract")
    return path


# ----------------------------------------------------------------------- parts that are read as one


class PartReader:
    """What a file says of itself, again and again while it is being written, at little cost.

    Args:
        path: The final name of the file.

    Attributes:
        attrs: Its root attributes; empty as long as it is not there.
        fields: What is streamed of each row.
        rows_done: How many rows are committed.
        is_complete: Whether all are, and the file has its final name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attrs: dict[str, Any] = {}
        self.fields: list[Field] = []
        self.rows_done = 0
        self.is_complete = False
        self._commit: Array | None = None  # a map, which sees what is written later

    def read(self) -> "PartReader":
        """Look again.

        Raises:
            StoreError: It is damaged, or not a file of embedx.
        """
        if self._commit is None:
            found = self.path if self.path.exists() else partial_path(self.path)
            if not found.exists():
                return self
            with reading(found), Skeleton(found) as skeleton:
                self.attrs = skeleton.check_embeddings()
                self.fields = [
                    dataclasses.replace(field, attrs=skeleton.dataset_attrs(field.name))
                    for field in skeleton.fields()
                ]
                self._commit = skeleton.map("commit")
        newest = newest_record(
            self._commit, n_rows=int(self.attrs["n_rows"]), run=run_bytes(str(self.attrs["id"]))
        )
        if newest is None:
            raise StoreError(f"{self.path} holds no valid commit record; make it anew")
        self.rows_done = newest.rows_done
        self.is_complete = newest.state == COMPLETE and self.path.exists()
        return self


MADE_BY_FIRST = "made_by_first_pass"
ENTERED = "entered"  # "pictures" by the preprocessing, or "tensors" as they are
_MADE_BY = ("batch_size", "device", "environment", ENTERED, MADE_BY_FIRST)


class PartsFound:
    """The parts of a file that are there, each held against the others.

    Args:
        path: The file that they are parts of.
        of: Its id.
        n: How many there are to be.
        kind: ``part`` or ``shard``.

    Attributes:
        sizes: How many rows a part has, by its number.
        fields: What is streamed of each row; None as long as there is no part with a row.
        common: What all parts were made by, as the one with the lowest number says.
    """

    def __init__(self, path: Path, *, of: str, n: int, kind: PartKind) -> None:
        self.path = path
        self.of = of
        self.n = n
        self.kind: PartKind = kind
        self.sizes: dict[int, int] = {}
        self.fields: list[Field] | None = None
        self.common: dict[str, Any] = {}
        self._first = n  # the lowest number of a part with a row
        self._is_said = False

    def title(self, number: int) -> str:
        """What a part is called in messages."""
        return f"{self.kind} {number + (self.kind == 'shard'):,} of {self.n:,}"

    def about(self, number: int) -> dict[str, Any]:
        """The root attributes by which the file of a part says which one it is."""
        return {"part": number, "n_parts": self.n}

    def add(self, number: int) -> bool:
        """Look at the file of a part; whether it is there, or is known to have no row.

        Raises:
            ShapeError: Its rows have another shape than those of others.
            StoreError: It is damaged, of another run, or was made otherwise than the others.
        """
        path = part_path(self.path, number)
        if not path.exists():
            is_empty = path.with_name(EMPTY_MARK).exists()
            if is_empty:
                self.sizes[number] = 0
            return is_empty
        title = self.title(number)
        anew = f"remove {path.parent} and run again, which makes it anew"
        try:
            found = PartReader(path).read()
        except StoreError as error:
            why = str(error).removesuffix("; make it anew")
            raise StoreError(f"{title} cannot be read: {why}; {anew}") from error
        attrs = found.attrs
        is_own = hashlib.sha256(str(attrs.get("identity")).encode()).hexdigest() == self.of
        if not is_own or any(attrs.get(key) != said for key, said in self.about(number).items()):
            raise StoreError(f"{path} is not {title} of this run, it has other rows; {anew}")
        if not found.is_complete:
            raise StoreError(f"{title} cannot be read: {path} is not complete; {anew}")
        common = {key: attrs[key] for key in _MADE_BY if key in attrs}
        if self.fields is not None:
            self._require_alike(number, common, found.fields)
        if number < self._first:
            self._first, self.common, self.fields = number, common, found.fields
        self.sizes[number] = found.rows_done
        return True

    def _require_alike(self, number: int, made_by: dict[str, Any], fields: list[Field]) -> None:
        """Refuse parts that are not of one model on one kind of device; say what may be."""
        one, other = self.title(self._first), self.title(number)
        where = parts_folder(self.path)
        for key in ("device", "batch_size"):
            if made_by.get(key) != self.common.get(key):
                raise StoreError(
                    f"{where}: {one} was made with {key}={self.common.get(key)} and {other} with "
                    f"{key}={made_by.get(key)}; remove the one and make it again by the same"
                )
        if made_by.get(MADE_BY_FIRST) != self.common.get(MADE_BY_FIRST):
            raise StoreError(
                f"{where}: {one} and {other} are of a model that made itself something else in the "
                "first pass of each (a layer, a centre), so their rows are those of two models; "
                "run it without n_parts, or run the model once on one fixed example before"
            )
        was, now = self.common.get(ENTERED), made_by.get(ENTERED)
        if was != now:
            raise ShapeError(
                f"{where}: the samples of {one} are {was}, and those of {other} are {now}; give "
                "all samples as the same"
            )
        assert self.fields is not None
        for was, now in itertools.zip_longest(self.fields, fields):
            if was is None or now is None or was.name != now.name:
                raise StoreError(
                    f"{where}: {one} holds {', '.join(f.name for f in self.fields)}, and {other} "
                    f"{', '.join(f.name for f in fields)}; remove the one and make it again"
                )
            if (was.shape, was.dtype) != (now.shape, now.dtype):
                raise ShapeError(
                    f"{now.name} has shape {now.shape} in {other} and {was.name} {was.shape} in "
                    f"{one}; choose a pooling that gives one length, such as pooling=gap"
                )
            if was.attrs.get("pooling") != now.attrs.get("pooling"):
                raise ShapeError(
                    f"{now.name} is pooled by {now.attrs.get('pooling')} in {other} and by "
                    f"{was.attrs.get('pooling')} in {one}, as the first rows of each meant "
                    "pooling=auto; name the one that is meant"
                )
        words = other_environment(one, other, self.common, made_by)
        if words and not self._is_said:
            self._is_said = True
            log.warning("%s", words)


def other_environment(
    one: str, other: str, made_by: Mapping[str, Any], now_by: Mapping[str, Any]
) -> str:
    """That two parts were made in environments that differ, in words; empty where they do not.

    Args:
        one: What the first part is called.
        other: What the other is called.
        made_by: Root attributes of the first.
        now_by: Those of the other.
    """
    was, now = _environment(made_by), _environment(now_by)
    if was == now:
        return ""
    keys = [key for key in was | now if was.get(key) != now.get(key)]
    return (
        f"{one} and {other} were made with another {', '.join(keys)} "
        f"({', '.join(str(was.get(key)) for key in keys)} and "
        f"{', '.join(str(now.get(key)) for key in keys)}): the rows agree within rounding, and the "
        "file says the first"
    )


def _environment(attrs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        environment = json.loads(str(attrs.get("environment", "")))
    except (ValueError, RecursionError):
        environment = None
    return environment if isinstance(environment, dict) else {}


class Parts(Embeddings):
    """The parts of a file as the one file that joining them makes, row for row.

    Ids, labels, metadata and what is one number a row are read at once; all other rows are read
    from the parts when they are asked for, and lie in a :class:`~embedx.matrix.Stacked`, which is
    indexed as an array is. ``path`` is that of the file to be, beside which lies what is made of
    its rows: that stays right when the parts are joined.

    Args:
        path: The file that they are parts of.
        found: The parts that make it; all that there are to be where not given.

    Raises:
        ShapeError: The rows of two parts have other shapes.
        StoreError: One is missing, damaged, or of another run; the message says how to make it.
    """

    def __init__(self, path: Path, found: PartsFound | None = None) -> None:
        self.path = path
        found = found or _all_parts(path)
        self.complete = True
        self.n_parts = found.n
        self.size_bytes = 0
        self._files: list[tuple[Path, _Stamp]] = []
        sizes: list[int] = []
        ids: list[Array] = []
        status: list[Array] = []
        labels: list[Array] = []
        texts: list[str] = []
        columns: list[dict[str, Column]] = []
        pieces: dict[str, list[_Rows]] = {}
        numbers: dict[str, list[Array]] = {}  # one a row
        first: Embeddings | None = None
        for number in sorted(number for number, size in found.sizes.items() if size):
            file = part_path(path, number)
            try:
                stamp = file_stamp(os.stat(file))
            except FileNotFoundError:
                raise _replaced(file) from None
            part = Embeddings(file)
            first = first or part
            self._files.append((file, stamp))
            self.size_bytes += part.size_bytes
            ids.append(part._encoded_ids)
            sizes.append(part.n_rows)
            status.append(part.status)
            labels += [] if part.labels is None else [part.labels]
            if found.kind == "shard":
                texts += part.label_texts() or [""] * part.n_rows
            columns.append(part.metadata)
            for field in part.fields:
                rows = part.streamed[field.name]
                if field.shape:
                    place = _Rows(file, stamp, rows.shape, rows.dtype, part.offsets[field.name])
                    pieces.setdefault(field.name, []).append(place)
                else:
                    numbers.setdefault(field.name, []).append(np.array(rows))
        assert first is not None  # a part without rows has no file
        own = {key: said for key, said in first.attrs.items() if key not in found.about(0)}
        self.n_rows = sum(sizes)
        self.attrs = {**own, "id": found.of, "n_rows": self.n_rows}
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._encoded_ids = np.concatenate(ids)
        self.status = np.concatenate(status)
        self.labels, self.label_names = None, []
        if found.kind == "shard" and "labels" not in numbers:
            # Each counts through the names that it has seen.
            self.label_names = sorted(set(texts) - {""}, key=numbers_first)
            index = {"": -1, **{name: i for i, name in enumerate(self.label_names)}}
            if self.label_names:
                self.labels = np.array([index[text] for text in texts], np.int32)
        elif labels:
            self.labels, self.label_names = np.concatenate(labels), first.label_names
        named = {name for column in columns for name in column}
        self.metadata = {
            name: concatenated(
                [(n, column.get(name)) for n, column in zip(sizes, columns, strict=True)]
            )
            for name in sorted(named, key=column_name)
        }
        streamed = {}
        for field in first.fields:
            if field.shape:
                stacked = Stacked(pieces[field.name], sizes, shape=field.shape, dtype=field.dtype)
                streamed[field.name] = cast(Array, stacked)
            else:
                streamed[field.name] = np.concatenate(numbers[field.name])
        self._take(first.fields, streamed)

    def _opened(self) -> Iterator[tuple[int, Embeddings]]:
        """The parts one after the other, each with the number of its first row."""
        for start, (file, stamp) in zip(self._starts, self._files, strict=False):
            if not file.exists() or file_stamp(os.stat(file)) != stamp:
                raise _replaced(file)
            yield start, Embeddings(file)

    def checksums(self) -> Array:
        return np.concatenate([part.checksums() for _, part in self._opened()])

    def verify(self) -> list[int]:
        return [start + row for start, part in self._opened() for row in part.verify()]

    def reasons(self) -> list[dict[str, Any]]:
        return [
            {**one, "row": start + one["row"]}
            for start, part in self._opened()
            for one in part.reasons()
        ]

    def row_file(self, row: int) -> Path:
        return self._files[bisect.bisect_right(self._starts, row) - 1][0]


_Stamp = tuple[int, int, int, int]


def file_stamp(about: os.stat_result) -> _Stamp:
    """What changes with a file that is replaced or written."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _replaced(path: Path) -> StoreError:
    return StoreError(f"{path} was joined, moved, removed or replaced meanwhile; open it again")


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows in a file that is opened when they are wanted: of all parts the files could not be."""

    path: Path
    stamp: _Stamp
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    def __call__(self) -> Array:
        try:
            with self.path.open("rb") as file:
                if file_stamp(os.fstat(file.fileno())) != self.stamp:
                    raise _replaced(self.path)
                return np.memmap(file, self.dtype, "r", self.offset, self.shape)
        except FileNotFoundError:
            raise _replaced(self.path) from None
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror or error}") from error


def _all_parts(path: Path) -> PartsFound:
    """The parts of a file, of which none may be missing.

    Raises:
        ShapeError: The rows of two parts have other shapes.
        StoreError: One is missing, damaged or of another run, or it is not known which there are.
    """
    of, n, kind = (*parts_mark(path), "", "", "")[:3]
    if kind not in ("part", "shard") or not 0 < len(n) < 8 or not n.isdecimal():
        raise StoreError(
            f"{parts_folder(path) / PARTS_MARK} does not say which parts of {path} there are to "
            "be; run the command that made them again"
        )
    found = PartsFound(path, of=of, n=int(n), kind=cast(PartKind, kind))
    missing = [number for number in range(found.n) if not found.add(number)]
    if missing or found.fields is None:
        number = (*missing, 0)[0]
        begun = PartReader(part_path(path, number)).read()
        there = f"{begun.rows_done:,} of {begun.attrs['n_rows']:,} rows" if begun.attrs else ""
        state = f"is not finished, it has {there}" if there else "is missing"
        others = f", as {'are' if len(missing) > 2 else 'is'} {len(missing) - 1:,} more"
        raise StoreError(
            f"{path} is not joined yet, {len(found.sizes):,} of {found.n:,} {kind}s are there: "
            f"{found.title(number)} {state}{others if len(missing) > 1 else ''}; the command that "
            f"made them makes it with n_parts={found.n} part={number}, and without part all that "
            "are missing, which it then joins"
        )
    return found


def file_of_parts(where: Path) -> Path | None:
    """The file whose parts are what a path names; None where it names something else."""
    if where.name.endswith(PARTS) and where.is_dir():
        path = where.with_name(where.name.removesuffix(PARTS))
        return path if parts_id(path) is not None else None
    path = where / EMBEDDINGS_NAME if where.is_dir() else where
    is_begun = not path.exists() and parts_id(path) is not None and has_parts(path)
    return path if is_begun else None


def are_there(path: Path) -> bool:
    """Whether there are embeddings at ``path``: the file, or parts of it."""
    return path.is_file() or file_of_parts(path) is not None


@checked
def open(path: str | os.PathLike[str] | Embeddings) -> Embeddings:
    """Open an embeddings file, or the folder that holds one, for reading.

    The finished parts of a run (``n_parts``) are read as the file that joining them makes, without
    joining: the same ids, labels, metadata and rows. What has more than one number a row is then no
    memory map, but indexed as one: ``rows[5:9]``, ``rows[[3, 1]]``; ``numpy.asarray`` reads all.

    Args:
        path: ``embeddings.h5``, its folder, a ``.partial`` file (its committed rows), or the folder
            of parts ``embeddings.h5.parts``; a run's folder means its parts as long as they are not
            joined. Opened embeddings are given back as they are.

    Returns:
        The embeddings, memory-mapped.

    Raises:
        ConfigError: ``path`` is neither a path nor opened embeddings.
        ShapeError: The rows of two parts have other shapes.
        StoreError: It is not there, unfinished, damaged, or not a file of embedx; of parts, one is
            missing, damaged or of another run.
    """
    if isinstance(path, Embeddings):
        return path
    if (unjoined := file_of_parts(Path(path))) is not None:
        try:
            return Parts(unjoined)
        except StoreError:
            if file_of_parts(Path(path)) is not None:
                raise
            # They were joined while they were opened.
    found = find_embeddings(path)
    if Path(path).is_dir() and parts_replace(found):
        log.warning(
            "%s is to be replaced by the parts beside it; run the command that makes these again, "
            "without overwrite=true, to have them joined",
            found,
        )
    return Embeddings(found)
