"""What a source of samples is: items with ids, labels and metadata, in one fixed order."""

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import random
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from PIL import Image

from embedx.checks import require_exact, require_unmasked
from embedx.columns import told_apart
from embedx.errors import ConfigError, DataError, number_of
from embedx.pictures import decode_file

log = logging.getLogger("embedx")

Array = npt.NDArray[Any]
KINDS_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Source:
    """Samples in a fixed order; row i of every file is item i, always.

    Attributes:
        name: For files and tables.
        ids: n unique texts.
        read: Item i, an upright RGB picture, a text or a tensor, or what ``collate`` takes; the
            pair of it and its label where ``labels_in_items``. Raises for an item that cannot be
            read.
        fingerprint: Hash of what the items are: it decides whether rows are still theirs.
        item_hashes: Shape ``(n,)`` uint64, the same for each item by itself, to name those that
            changed; None where that would cost a pass.
        labels: Shape ``(n,)`` int32 indices into ``label_names``, -1 for none; None without labels.
        label_names: Names of the labels, told apart by their numbers where one comes twice, which
            is put among the warnings; empty where each of ``labels_in_items`` is its own name.
        label_numbers: The number that each name has in the data, where its labels are numbers,
            among all its classes, also those that do not occur; None where they are texts.
        labels_in_items: Whether ``read`` gives the labels, int32, -1 for none.
        collate: Makes the inputs of a batch, shape ``(b, ...)``, of its items as read; None to
            stack them.
        draws: Whether ``read`` or ``collate`` draws random numbers (of torch, NumPy or Python, not
            from a generator of its own): row i is then drawn from seed i, in every run.
        metadata: Further columns of n numbers or texts.
        notes: What was found and what was passed over, for the user.
        warnings: What the user should be told aloud.
        root: The folder that holds the items; None where there is none.
        reads_files: Whether ``read`` is ours and opens a file each time, so that threads may
            share it.

    Raises:
        DataError: An id that is no text, a label that is no index into its names, or a column that
            a file cannot hold.
    """

    name: str
    ids: Sequence[str]
    read: Callable[[int], Any]
    fingerprint: str
    item_hashes: Array | None = None
    labels: Array | None = None
    label_names: Sequence[str] = ()
    label_numbers: Sequence[int] | None = None
    labels_in_items: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    draws: bool = False
    metadata: dict[str, Array | Sequence[str]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    root: Path | None = None
    reads_files: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.ids, RowNumbers):
            require_texts(self.ids, f"the ids of {self.name}")
        for given in (self.labels, *self.metadata.values()):
            require_unmasked(given)
        if self.labels is not None:
            labels, n_names = np.asarray(self.labels), len(self.label_names)
            if labels.shape != (len(self),) or labels.dtype.kind not in "iu":
                raise DataError(
                    f"the labels of {self.name} have shape {labels.shape} and type {labels.dtype}; "
                    f"give {len(self)} whole numbers, indices into label_names"
                )
            if len(labels) and not (labels.min() >= -1 and labels.max() < n_names):
                odd = labels[(labels < -1) | (labels >= n_names)][0]
                raise DataError(
                    f"the labels of {self.name} hold {odd}, and there are {n_names} label_names; "
                    "give indices into these, -1 for none"
                )
        names, told = told_apart(self.label_names, self.label_numbers)
        if told:
            object.__setattr__(self, "label_names", names)
            object.__setattr__(self, "warnings", (*self.warnings, *told))
        for name, column in self.metadata.items():
            _check_name(name, self.name)
            _check_column(f"the column {name!r} of {self.name}", column, n=len(self))

    def __len__(self) -> int:
        return len(self.ids)

    def tell(self) -> None:
        """Tell the user what was found."""
        _tell(self.warnings, self.notes)


@dataclasses.dataclass(frozen=True)
class Shards:
    """Samples that come shard by shard; how many there are is known when the last one was read.

    Attributes:
        name: For files and tables.
        names: Of the shards, in order.
        fingerprint: Hash of what the shards are.
        read: Gives shard i as a :class:`Source`, for as long as its ``with`` block lasts: called
            with ``scratch``, a path at which it may put a copy, and ``most``, how many samples are
            wanted at most. Ids of two shards differ.
        limit: How many samples are wanted of all; None for no limit.
        notes: What was found, for the user.
        warnings: What the user should be told aloud.
        root: The folder that holds the shards; None where there is none.
    """

    name: str
    names: Sequence[str]
    fingerprint: str
    read: Callable[..., contextlib.AbstractContextManager[Source]]
    limit: int | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    root: Path | None = None

    def tell(self) -> None:
        """Tell the user what was found."""
        _tell(self.warnings, self.notes)


def _tell(warnings: Iterable[str], notes: Iterable[str]) -> None:
    for warning in warnings:
        log.warning("%s", warning)
    for note in notes:
        log.info("%s", note)


def require_texts(ids: Any, what: str) -> None:
    """Refuse ids of another kind: to NumPy, 1 and "1" may be one.

    Raises:
        DataError: One is no text.
    """
    odd = [name for name in ids if not isinstance(name, str)]
    if odd:
        raise DataError(
            f"{what} are not all texts, such as {odd[0]!r} ({type(odd[0]).__name__}); give "
            "ids=list(map(str, ids))"
        )


def _check_name(name: Any, source: str) -> None:
    if not isinstance(name, str) or not name or "\0" in name or not _is_utf8(name):
        raise DataError(
            f"a column of {source} is called {name!r}; give a text of one or more characters in "
            "UTF-8, without NUL"
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair, as in the name of a file of other bytes
        return False
    return True


def _check_column(what: str, column: Any, *, n: int) -> None:
    if isinstance(column, list) and all(isinstance(value, str) for value in column):
        # Not as an array: there each would take the room of the longest.
        if len(column) != n:
            raise DataError(f"{what} has {len(column)} texts; give one a sample: {n}")
        return
    try:
        values = np.asarray(column)
    except ValueError:  # lists of several lengths
        values = np.empty((0, 0))
    if values.shape != (n,):
        raise DataError(f"{what} has shape {values.shape}; give one number or text a sample: {n}")
    is_texts = values.dtype.kind in "UO" and all(isinstance(value, str) for value in column)
    # Texts beside numbers become texts in NumPy, so that those of a list are looked at.
    is_mixed = values.dtype.kind == "U" and not is_texts
    is_number = values.dtype.kind in "biuf" and values.dtype.itemsize <= 8
    if is_mixed or not (is_texts or is_number):
        kind = "texts and numbers" if is_mixed else f"type {values.dtype}"
        raise DataError(f"{what} is of {kind}; give numbers of at most 64 bits, or texts")
    if values.dtype.kind == "f" and not isinstance(column, np.ndarray):
        require_exact(column, what=what)


def limited(n: int, limit: int | None) -> int:
    """How many of n items count where ``data.limit`` takes the first so many.

    Raises:
        ConfigError: It is less than 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"data.limit must be at least 1, not {limit}")
    return n if limit is None else min(n, limit)


@dataclasses.dataclass(frozen=True)
class PixelReader:
    """Picture i of pixels in memory, shape ``(n, h, w)`` or ``(n, h, w, 3)``, uint8."""

    pixels: Array

    def __call__(self, i: int) -> Image.Image:
        return Image.fromarray(self.pixels[i]).convert("RGB")


def file_line(name: str, size_bytes: int, mtime_ns: int) -> bytes:
    """What of a file tells whether it is as it was, as one line to be hashed."""
    return f"{name}\0{size_bytes}\0{mtime_ns}\n".encode("utf-8", "backslashreplace")


def file_hashes(items: Iterable[tuple[str, int, int]]) -> tuple[str, Array]:
    """What tells files apart without reading them: of all together, and of each, ``(n,)`` uint64.

    Args:
        items: ``(path, bytes, mtime_ns)`` of each; -1 for those of a file that is not there.
    """
    digest, hashes = hashlib.sha256(), []
    for item in items:
        line = file_line(*item)
        digest.update(line)
        hashes.append(item_hash(line))
    return digest.hexdigest(), np.array(hashes, np.uint64)


def stamp_of(about: os.stat_result) -> tuple[int, int]:
    """What tells whether a file is as it was: bytes and mtime_ns."""
    return about.st_size, about.st_mtime_ns


def require_unchanged(is_same: bool) -> None:
    """Refuse an item that is another than when the run listed it.

    Raises:
        DataError: It is.
    """
    if not is_same:
        raise DataError("it was changed after the run had listed it") from None


def name_of(path: Path) -> str:
    """The name of a source: that of its folder, or of its file."""
    # A link to a file has a name that was chosen; what it leads to may be called by a hash.
    last = path.name if path.is_file() else path.resolve().name
    return os.fsencode(last).decode(errors="backslashreplace")


@dataclasses.dataclass(frozen=True)
class FileReader:
    """Picture i out of the i-th of some files, if it is as it was when they were listed.

    Attributes:
        root: The folder that the paths count from.
        paths: n paths with ``/``.
        hashes: Of the files, shape ``(n,)``, by :func:`file_hashes`.
        refused: Why a row is not read at all, by its number.
    """

    root: str
    paths: tuple[str, ...]
    hashes: Array
    refused: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def __call__(self, i: int) -> Image.Image:
        if i in self.refused:
            raise DataError(self.refused[i])
        with open(os.path.join(self.root, *self.paths[i].split("/")), "rb") as file:
            try:
                return decode_file(file)
            finally:
                # Of the file that was read, though its name be taken.
                stamp = stamp_of(os.fstat(file.fileno()))
                require_unchanged(item_hash(file_line(self.paths[i], *stamp)) == self.hashes[i])


class Located:
    """Where files are that a table or a data set names.

    Attributes:
        names: The paths for ids: below the root, or as they stand where they lead out of it.
        paths: The paths to open, ``""`` of rows that are refused.
        files: ``(path, bytes, mtime_ns)`` of each; -1 for those of a file that is not there.
        refused: Why a row is not read, by its number.
        n_missing: How many are not there.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.paths: list[str] = []
        self.files: list[tuple[str, int, int]] = []
        self.refused: dict[int, str] = {}
        self.n_missing = 0

    def told(self) -> list[str]:
        """What rows will fail, as far as it is known before they are read."""
        whys = Counter(self.refused.values())
        told = [f"{n:,} rows will fail: {why}" for why, n in sorted(whys.items())]
        if self.n_missing:
            told.append(f"{self.n_missing:,} rows will fail: their files are not there")
        return told


def located(paths: Iterable[str], top: Path, *, elsewhere: str) -> Located:
    """Where files are, none of which may lie outside a folder, nor be anything but a plain file.

    Args:
        paths: As they are written, from that folder or from the root.
        top: The folder.
        elsewhere: Why one that leads out of it is refused.
    """
    found = Located()
    base = os.path.abspath(top)
    real = os.path.realpath(top)
    folders: dict[str, bool] = {}

    def is_inside(resolved: str) -> bool:
        return resolved == real or resolved.startswith(real.rstrip(os.sep) + os.sep)

    def look(written: str) -> tuple[str, int, int, str]:
        """Its path below the root, bytes, mtime_ns, and why it is refused."""
        if not written or "\0" in written:
            return written, -1, -1, "its path " + ("has NUL in it" if written else "is missing")
        joined = os.path.normpath(os.path.join(base, written))
        relative = os.path.relpath(joined, base)
        if relative == os.pardir or relative.startswith(os.pardir + os.sep):
            return written, -1, -1, elsewhere
        if os.pardir in written.split(os.sep):
            named = os.path.realpath(os.path.join(base, written))
            if named != os.path.realpath(joined):  # from where the link leads to
                return written, -1, -1, "its path goes up (..) out of a link; write it without"
        name = relative.replace(os.sep, "/")
        folder = os.path.dirname(joined)
        if folder not in folders:
            folders[folder] = is_inside(os.path.realpath(folder))
        try:
            about = os.lstat(joined)
            is_in = folders[folder]
            if stat.S_ISLNK(about.st_mode):
                is_in = is_inside(os.path.realpath(joined))
                about = os.stat(joined) if is_in else about
        except OSError:
            if "\\" in written and os.sep == "/":
                return name, -1, -1, "its file is not there, and its path has \\ where / is meant"
            found.n_missing += 1
            return name, -1, -1, ""
        if not is_in:
            return name, -1, -1, elsewhere
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
            return name, -1, -1, "its path is that of no plain file"
        return name, *stamp_of(about), ""

    for row, written in enumerate(paths):
        name, size_bytes, mtime_ns, why = look(written)
        if why:
            found.refused[row] = why
        found.names.append(name)
        found.paths.append("" if why else name)
        found.files.append((name, size_bytes, mtime_ns))
    return found


def counted(passed_over: Counter[str]) -> str:
    """What was passed over, in one line; of many kinds, the most frequent."""
    kinds = sorted(passed_over.items(), key=lambda kind: (-kind[1], kind[0]))
    shown = sorted((why if why.isprintable() else ascii(why), n) for why, n in kinds[:KINDS_SHOWN])
    rest = sum(n for _, n in kinds[KINDS_SHOWN:])
    return ", ".join(
        [*(f"{n:,} {why}" for why, n in shown), *([f"{rest:,} of other kinds"] if rest else [])]
    )


def scan(top: Path, suffixes: Set[str]) -> tuple[list[tuple[str, int, int]], Counter[str]]:
    """The files of some kinds below a folder, and what was passed over, by what it is.

    Args:
        top: The folder.
        suffixes: Of the files, in lower case.

    Returns:
        ``(path below the folder, bytes, mtime_ns)`` of each, sorted; -1 for those of a link that
        leads nowhere.

    Raises:
        DataError: A folder cannot be read.
    """
    found: list[tuple[str, int, int]] = []
    passed_over: Counter[str] = Counter()

    def unreadable(error: OSError) -> None:
        raise DataError(
            f"cannot read the folder {error.filename}: {error.strerror}; check its rights"
        )

    for base, folders, files in os.walk(top, onerror=unreadable):
        if any(name.startswith("embeddings.h5") for name in (*files, *folders)):
            passed_over["folders of embedx output"] += 1
            folders.clear()
            continue
        for name in list(folders):
            hidden = name.startswith(".")
            if hidden or os.path.islink(os.path.join(base, name)):
                folders.remove(name)
                passed_over["hidden folders" if hidden else "linked folders"] += 1
        for name in files:
            path = os.path.join(base, name)
            suffix = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                passed_over["hidden files"] += 1
            elif suffix not in suffixes:
                passed_over[suffix if len(suffix) > 1 else "files without suffix"] += 1
            else:
                stamp = (-1, -1)
                with contextlib.suppress(OSError):  # a dangling link: its own row fails
                    about = os.stat(path)
                    if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
                        passed_over["pipes and devices"] += 1
                        continue
                    stamp = stamp_of(about)
                if suffix == ".png" and _DRAWN.match(name) and _is_drawn_by_us(path):
                    passed_over["pictures that embedx drew"] += 1
                    continue
                found.append((os.path.relpath(path, top).replace(os.sep, "/"), *stamp))
    return sorted(found), passed_over


_DRAWN = re.compile("(layer|row)-[0-9]|maps?[-.]|variance-|compare")


def _is_drawn_by_us(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return b"Software\0embedx" in file.read(4096)
    return False


@dataclasses.dataclass(frozen=True)
class RowNumbers(Sequence[str]):
    """The ids of rows that have no others; as texts in a list they would take 60 bytes each."""

    n: int

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        found = range(self.n)[index]
        return str(found) if isinstance(found, int) else [str(i) for i in found]


def classes_said(label_names: Sequence[str]) -> str:
    """``1 class``, ``10 classes``, ``no classes``."""
    return number_of(len(label_names), "class", "classes") if label_names else "no classes"


def counted_through(
    labels: Sequence[Any], classes: Sequence[Any] | None, *, none: Sequence[Any] = ()
) -> tuple[Array, list[str], list[int] | None]:
    """Labels as indices ``(n,)`` int32 into their sorted names, the names, and their numbers.

    Python tells them apart, not NumPy, to which 1 and "1", or two large numbers, may be one.

    Args:
        labels: n texts, numbers or booleans; the index of the empty text is -1.
        classes: Names that numbers may count through.
        none: What else is no label.

    Raises:
        DataError: They are of several kinds, or one is NaN.
    """
    given = [label for label in labels if label not in none] if none else labels
    for kinds in ((str,), (bool, np.bool_), (int, np.integer), (int, float, np.number)):
        if all(isinstance(label, kinds) for label in given):
            break
    else:
        odd = next((type(v).__name__ for v in given if not isinstance(v, (str, int, float))), "")
        raise DataError(
            f"the labels are {'of kind ' + odd if odd else 'texts and numbers'}; give one text or "
            "one number a sample"
        )
    # Each NaN would be a class of its own.
    if any(isinstance(label, (float, np.floating)) and np.isnan(label) for label in given):
        raise DataError("a label is NaN; give texts, and '' where there is no label")
    unique = sorted(set(given) - {""})
    index = {label: i for i, label in enumerate(unique)}
    names = [str(label) for label in unique]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise DataError(f"two labels are both written {twice!r}; give them as texts that differ")
    if classes is not None and set(unique) <= set(range(len(classes))):
        names = [str(classes[int(label)]) for label in unique]
    are_whole = all(  # floats too, which a column with missing values has in pandas
        type(label) is not bool
        and isinstance(label, (int, float, np.number))
        and (isinstance(label, (int, np.integer)) or float(label).is_integer())
        for label in unique
    )
    numbers = [int(label) for label in unique] if are_whole and unique else None
    return np.array([index.get(label, -1) for label in labels], np.int32), names, numbers


def whole_label(label: Any, *, n_names: int) -> int:
    """A label as a whole number from -1 on that fits into int32.

    Raises:
        DataError: It is none, or it has no name although there are ``n_names``.
    """
    if not isinstance(label, int):
        array = as_array(label)
        if array is not None and array.size == 1 and array.dtype.kind in "iu":
            label = array.item()
    if isinstance(label, int) and not isinstance(label, bool):
        if n_names and label >= n_names:
            raise DataError(f"its label {label} is past the {n_names} classes; give labels=")
        if -1 <= label < 2**31:
            return label
    shown = " ".join(repr(label).split())[:40]
    raise DataError(
        f"its label is {shown}, and other items have whole numbers; give them all as labels="
    )


def require_item(item: Any) -> None:
    """Refuse an item that a Dataset gives as None, as many do where a file cannot be read.

    A ``collate_fn`` that leaves such items out would give the others their places.

    Raises:
        DataError: It is None or an empty tensor, or a tuple, list or mapping that begins so.
    """
    first = item
    if isinstance(item, (tuple, list, Mapping)) and item:
        first = next(iter(item.values() if isinstance(item, Mapping) else item))
    if first is None:
        raise DataError("the Dataset gives None in its place")
    if math.prod(getattr(first, "shape", (1,))) == 0:
        raise DataError(f"the Dataset gives a tensor of shape {tuple(first.shape)} in its place")


def require_text(found: str) -> str:
    """A text that is an item, if there is anything in it.

    Raises:
        DataError: It is blank.
    """
    if not found.strip():
        raise DataError("the text is empty")
    return found


def item_hash(data: bytes) -> int:
    """What an item is, in 64 bits: to name those that changed."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hashed_rows(values: Array, dtype: str) -> tuple[str, Array]:
    """SHA-256 of an array, and a hash of each of its rows, shape ``(n,)`` uint64.

    Args:
        values: Shape ``(n, ...)``.
        dtype: Its type, in words.
    """
    digest = hashlib.sha256(f"{values.shape} {dtype}".encode())
    form = f"{values.shape[1:]} {dtype}".encode()
    hashes: list[Array] = []
    for block in row_blocks(values):
        digest.update(block.tobytes())
        hashes.append(np.array([item_hash(form + row.tobytes()) for row in block], np.uint64))
    return digest.hexdigest(), np.concatenate(hashes)


def row_blocks(values: Any) -> Iterator[Array]:
    """The rows of an array, some megabytes at a time: it may be mapped from a disk."""
    row_bytes = math.prod(values.shape[1:]) * values.dtype.itemsize
    block_rows = max(1, 2**24 // max(1, row_bytes))
    for start in range(0, len(values), block_rows):
        yield np.ascontiguousarray(values[start : start + block_rows])


def as_array(value: Any) -> Array | None:
    """An array or tensor as an array, anything else as None.

    Raises:
        DataError: It is a tensor that is sparse, nested, quantized or without values.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        require_unmasked(value)
        return np.asarray(value)
    if not hasattr(value, "detach"):  # torch is not imported to ask: tensors have it
        return None
    try:
        if str(value.layout) != "torch.strided" or value.is_nested:
            kind = "nested" if value.is_nested else "sparse"
            raise DataError(f"data is a {kind} tensor; give a dense one, such as data.to_dense()")
        if value.is_quantized:
            raise DataError("data is a quantized tensor; give data.dequantize()")
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
    except NotImplementedError:
        raise DataError(
            "data is a tensor without values (on meta); give one that has them"
        ) from None
    try:
        array: Array = tensor.numpy()
    except TypeError:  # bfloat16, which NumPy does not have, fits into float32
        array = tensor.float().numpy()
    return array


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]]:
    """Of each source of random numbers that all code shares: get its state, set it, seed it."""
    known: list[Any] = [
        (random.getstate, random.setstate, random.seed),
        (np.random.get_state, np.random.set_state, np.random.seed),
    ]
    torch: Any = sys.modules.get("torch")  # not imported to ask
    if torch is not None:
        cpu = torch.default_generator
        known.append((cpu.get_state, cpu.set_state, cpu.manual_seed))
    return known


def random_states() -> list[Any]:
    """The states of all random generators that code shares, as values that can be compared."""

    def plain(state: Any) -> Any:
        array = as_array(state)
        return state if array is None else array.tobytes()

    # Of a tuple one level is looked into: that of Python holds 625 numbers, and takes most time.
    states = (get() for get, _, _ in _generators())
    return [
        tuple(map(plain, state)) if isinstance(state, tuple) else plain(state) for state in states
    ]


def seed_random(seed: int) -> None:
    """Let torch (on the CPU), NumPy and Python draw from a seed below 2**32."""
    for _, _, put in _generators():
        put(seed % 2**32)
    torch_data: Any = sys.modules.get("torch.utils.data")
    worker = None if torch_data is None else torch_data.get_worker_info()
    if worker is not None:  # from which code may seed a generator of its own
        object.__setattr__(worker, "seed", seed)


@contextlib.contextmanager
def random_put_back() -> Iterator[None]:
    """Leave random numbers as they were."""
    before = [(put, get()) for get, put, _ in _generators()]
    try:
        yield
    finally:
        for put, state in before:
            put(state)
