"""Samples in tar shards, as WebDataset lays them out, read where they lie and never unpacked."""

import contextlib
import dataclasses
import glob
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from embedx import sources
from embedx.columns import LABEL_NAMES, from_values, indexed, kept, spelled_label, storable
from embedx.errors import DataError, first_line, listed
from embedx.pictures import SUFFIXES, decode_bytes
from embedx.sources import Shards, Source

_BLOCK = 512  # of a tar file
_TEXT_MOST = 2**20  # bytes of a member that says something of a sample
_MEMBER_MOST = 2**29
_KEY_MOST = 800  # bytes of what an id has room for
_COLUMNS_MOST = 200
# Deflate makes at most a thousand bytes of one; pictures, which are compressed, hardly two.
_INFLATED_MOST, _INFLATED_FREE = 100, 2**28
_PACKED = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".xz": "lzma"}


def webdataset(
    path: str, *, item: str = "picture", label: str | None = None, limit: int | None = None
) -> Shards:
    """Samples in tar shards, in the order in which they lie there.

    The members of a sample follow each other and are called ``KEY.EXTENSION``: its picture;
    ``cls``, the label; ``json``, whose numbers, texts and booleans become columns; ``txt``, a
    column. Ids are ``SHARD/KEY``. A shard is read by itself and its rows are put behind those
    before, so that how many there are is known in the end; a shard that is compressed or lies
    elsewhere is copied beside the run, one at a time.

    Args:
        path: A tar file, a folder of them, a glob, a range of numbers as ``shard-{000..012}.tar``,
            several of these between ``::``, or an address that fsspec opens, such as ``s3://...``.
        item: What a sample is: ``picture``, or the extension of its text, such as ``txt``.
        label: ``cls``, ``txt``, or a key of the ``json``; ``none``. Where not given: the ``cls``
            of a sample, or else the ``label``, ``labels``, ``class``, ``target`` or
            ``targets`` of its ``json``.
        limit: Take the first so many.

    Raises:
        DataError: There is no such shard.

    References:
        The WebDataset format: https://github.com/webdataset/webdataset
    """
    sources.limited(0, limit)
    places = _places(path)
    names = _names(places)
    found = [_about(place) for place in places]
    digest = hashlib.sha256(json.dumps([item, label]).encode())
    for name, about in zip(names, found, strict=True):
        digest.update(repr((name, *about)).encode("utf-8", "backslashreplace"))
    return Shards(
        name=_run_name(places),
        names=names,
        fingerprint=digest.hexdigest(),
        read=_Shards(tuple(places), tuple(names), tuple(found), item=item, label=label),
        limit=limit,
        notes=(f"{path}: {len(places):,} shards",),
        root=Path(places[0]).parent if "://" not in places[0] else None,
    )


# --------------------------------------------------------------------------- which shards


def _places(path: str) -> list[str]:
    """The shards that a path stands for, in order."""
    places: list[str] = []
    for part in path.split("::"):
        for one in _ranged(part):
            places += [one] if "://" in one else _local(one, path)
    twice = [place for place, n in Counter(places).items() if n > 1]
    if twice:
        raise DataError(f"data.path {path} names the shard {twice[0]} twice; name each once")
    return places


def _ranged(path: str) -> Iterator[str]:
    """``a-{08..10}`` as ``a-08``, ``a-09``, ``a-10``."""
    pieces = re.split(r"\{(\d+)\.\.(\d+)\}", path)
    spans = []
    for first, last in zip(pieces[1::3], pieces[2::3], strict=True):
        if not int(first) <= int(last) < int(first) + 10**6:
            raise DataError(f"data.path {path} holds the range {first}..{last}; let it ascend")
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        spans.append([f"{i:0{width}d}" for i in range(int(first), int(last) + 1)])
    for numbers in itertools.product(*spans):
        texts = pieces[::3]
        yield "".join(a + b for a, b in itertools.zip_longest(texts, numbers, fillvalue=""))


def _local(path: str, given: str) -> list[str]:
    place = os.path.expanduser(path)
    if os.path.isdir(place):
        found = [os.path.join(place, name) for name in sorted(os.listdir(place)) if _is_tar(name)]
        if not found:
            raise DataError(f"data.path {given} holds no tar file; name a folder of shards")
        return found
    if os.path.isfile(place):
        return [place]
    found = sorted(glob.glob(place))
    if not found:
        raise DataError(f"data.path {given}: there is no {path}; name tar files or their folder")
    return found


def _is_tar(name: str) -> bool:
    return not name.startswith(".") and re.search(r"\.(tar(\.(gz|bz2|xz))?|tgz)$", name) is not None


def _names(places: Sequence[str]) -> list[str]:
    """What ids call the shards: file names, with the folders before that tell them apart."""
    stems = [re.sub(r"\.(tar(\.\w+)?|tgz)$", "", place.split("?")[0]) for place in places]
    for depth in itertools.count(1):
        names = ["/".join(stem.replace(os.sep, "/").split("/")[-depth:]) for stem in stems]
        if len(set(names)) == len(names) or depth > max(stem.count("/") for stem in stems):
            break
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        same = [place for place, name in zip(places, names, strict=True) if name == twice[0]]
        raise DataError(
            f"{same[0]} and {same[1]} would give their samples the same ids, {twice[0]}/...; name "
            "one of them, or call one otherwise"
        )
    return names


def _run_name(places: Sequence[str]) -> str:
    """For files and tables: the folder of several shards, the name of one."""
    if len(places) == 1:
        return _names(places)[0].rsplit("/", 1)[-1] or "shards"
    return os.path.basename(os.path.dirname(os.path.abspath(places[0]))) or "shards"


def _about(place: str) -> tuple[Any, ...]:
    """Size and time of a shard, or what else its place knows of it."""
    if "://" not in place:
        return sources.stamp_of(os.stat(place))
    with _said(place):
        import fsspec

        system, inner = fsspec.core.url_to_fs(place)
        known = system.info(inner)
    keys = ("size", "ETag", "etag", "mtime", "LastModified", "created")
    return tuple(str(known.get(key)) for key in keys)


@contextlib.contextmanager
def _said(place: str) -> Iterator[None]:
    """What goes wrong with a shard, in one line that names it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of tarfile, of what unpacks, of any file system
        raise DataError(f"cannot read the shard {place}: {first_line(error)}") from error


# --------------------------------------------------------------------------- a shard


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Gives one shard as a source, while the block lasts; it must be as it was listed."""

    places: tuple[str, ...]
    names: tuple[str, ...]
    listed: tuple[tuple[Any, ...], ...]
    item: str
    label: str | None

    @contextlib.contextmanager
    def __call__(self, number: int, *, scratch: Path, most: int | None) -> Iterator[Source]:
        place = self.places[number]
        with _said(place), _at_hand(place, scratch) as path:
            source = _source(path, self.names[number], item=self.item, label=self.label, most=most)
            if _about(place) != self.listed[number]:
                raise DataError(
                    f"the shard {place} was changed after the run had listed it; run the same "
                    "command again: what was made of it as it was is another run"
                )
        try:
            yield source
        finally:
            if path == scratch:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _at_hand(place: str, scratch: Path) -> Iterator[Path]:
    """A plain local file of a shard: itself, or a copy at ``scratch``."""
    packed = _PACKED.get(os.path.splitext(place.split("?", maxsplit=1)[0])[1])
    if "://" not in place and packed is None:
        yield Path(place)
        return
    import fsspec

    size = 0
    try:
        with contextlib.ExitStack() as stack:
            raw: Any = stack.enter_context(fsspec.open(place, "rb"))
            counted: Any = _Counted(raw)
            opened: Any = counted
            if packed is not None:
                opened = stack.enter_context(importlib.import_module(packed).open(counted, "rb"))
            copy = stack.enter_context(open(scratch, "wb"))
            while block := opened.read(2**20):
                size += len(block)
                if size > max(_INFLATED_FREE, _INFLATED_MOST * counted.n_bytes):
                    raise DataError(
                        f"the shard {place} unpacks to more than {_INFLATED_MOST} times its size, "
                        "as no shard of pictures does; unpack it yourself if it is right"
                    )
                copy.write(block)
        yield scratch
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


class _Counted(io.RawIOBase):
    """A file that counts what was read of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.n_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        self.n_bytes += len(block)
        return len(block)


@dataclasses.dataclass(frozen=True)
class _Member:
    """A file in a tar file: where its bytes are."""

    name: str
    extension: str
    offset: int
    size: int


@dataclasses.dataclass
class _Sample:
    key: str
    members: dict[str, _Member] = dataclasses.field(default_factory=dict)
    fault: str = ""


def _source(path: Path, name: str, *, item: str, label: str | None, most: int | None) -> Source:
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        members, passed_over, aloud = _members(file, about.st_size, name)
        samples = list(itertools.islice(_samples(members), most))
        told = [_told(file, sample) for sample in samples]
    labels = [_label(sample, texts, label) for sample, texts in zip(samples, told, strict=True)]
    indices, label_names = indexed(labels)  # put into one order where shards are joined
    metadata, without, cut = _metadata(told, is_text=item == "txt")
    chosen = [_chosen(sample, item) for sample in samples]
    ids = [f"{name}/{sample.key}" for sample in samples]
    hashes = [
        sources.item_hash(
            f"{one}\0{about.st_mtime_ns}\0{sample.key}".encode("utf-8", "backslashreplace")
        )
        for one, sample in zip(chosen, samples, strict=True)
    ]
    passed_over.update(without)
    notes = [f"passed over: {sources.counted(passed_over)}"] if passed_over else []
    notes += cut
    return Source(
        name=name,
        ids=ids,
        read=_Reader(
            str(path),
            sources.stamp_of(about),
            tuple(chosen),
            tuple(sample.fault for sample in samples),
            is_picture=item == "picture",
        ),
        fingerprint=hashlib.sha256(np.array(hashes, np.uint64).tobytes()).hexdigest(),
        item_hashes=np.array(hashes, np.uint64),
        labels=indices if label_names else None,
        label_names=label_names,
        metadata=metadata,
        notes=tuple(f"{name}: {said}" for said in notes),
        warnings=tuple(aloud),
        root=None,
        reads_files=item == "picture",
    )


def _members(file: BinaryIO, size: int, name: str) -> tuple[list[_Member], Counter[str], list[str]]:
    """The plain files in a tar file, what else there is in it, and whether it ends as it should."""
    members = []
    passed_over: Counter[str] = Counter()
    aloud = []
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as opened:
            tar: Any = opened
            while (info := tar.next()) is not None:
                tar.members.clear()  # a list of its own, of a kilobyte a member
                end = info.offset
                base = info.name.rsplit("/", 1)[-1]
                if info.isdir():
                    continue
                if not info.isreg() or info.issparse():
                    passed_over["links, devices and sparse files"] += 1
                elif info.name.startswith("/") or ".." in info.name.split("/"):
                    passed_over["names that leave the shard"] += 1
                elif base.startswith(".") or "." not in base or "\0" in info.name:
                    passed_over["hidden files and files without extension"] += 1
                else:
                    members.append(
                        _Member(
                            info.name, base.split(".", 1)[1].lower(), info.offset_data, info.size
                        )
                    )
            end = tar.offset
    except (tarfile.ReadError, OSError) as error:  # a size to which no file can be read on
        if not members and not passed_over:
            raise
        aloud.append(f"{name}: {first_line(error)} after byte {end:,}: what follows there is lost")
    else:
        file.seek(end)
        block = file.read(_BLOCK)
        if block.strip(b"\0"):
            aloud.append(f"{name}: no tar header at byte {end:,} of {size:,}: what follows is lost")
        elif len(block) < _BLOCK:
            aloud.append(f"{name} ends without the mark of its end, as if it had been cut short")
        elif any(rest.strip(b"\0") for rest in iter(lambda: file.read(2**20), b"")):
            aloud.append(
                f"{name}: the mark of its end is at byte {end:,} of {size:,}, and more comes "
                "after, which is lost: a hole, or two tar files put together"
            )
    return members, passed_over, aloud


def _samples(members: Iterable[_Member]) -> Iterator[_Sample]:
    """Members whose names are one up to the first dot of their last part, as they follow."""
    taken: set[str] = set()
    seen: Counter[str] = Counter()
    for key, group in itertools.groupby(members, key=_key):
        # As ids are: two keys may be written alike.
        written = key.encode("utf-8", "backslashreplace")
        name, fault = written.decode(), ""
        if len(written) > _KEY_MOST:
            name = f"{name[:100]}~{hashlib.sha256(written).hexdigest()[:16]}"
            fault = f"its name has more than {_KEY_MOST} bytes; shorten it"
        unique = name
        while unique in taken:
            seen[name] += 1
            unique = f"{name}#{seen[name] + 1}"
        taken.add(unique)
        sample = _Sample(unique, fault=fault)
        for member in group:
            if member.extension in sample.members:
                sample.fault = f"it has two members .{member.extension}"
            sample.members[member.extension] = member
        yield sample


def _key(member: _Member) -> str:
    return member.name[: -len(member.extension) - 1]


def _chosen(sample: _Sample, item: str) -> _Member | None:
    """The member that is the item."""
    if item != "picture":
        return sample.members.get(item)
    pictures = [
        member
        for extension, member in sample.members.items()
        if "." + extension.rsplit(".", 1)[-1] in SUFFIXES
    ]
    if len(pictures) > 1:
        names = [f".{member.extension}" for member in pictures]
        sample.fault = sample.fault or f"it has {len(pictures)} pictures: {listed(names)}"
    return pictures[0] if pictures else None


# --------------------------------------------------------------------------- what a sample tells


def _told(file: BinaryIO, sample: _Sample) -> dict[str, Any]:
    """The texts of a sample by extension, and its ``json`` as it is."""
    told: dict[str, Any] = {}
    for extension in ("cls", "txt", "json"):
        member = sample.members.get(extension)
        if member is None:
            continue
        try:
            told[extension] = _text(file, member).strip()
            if extension == "json":
                told["json"] = json.loads(told["json"])
                if not isinstance(told["json"], dict):
                    raise ValueError("it holds no object")
        except (ValueError, OSError, RecursionError, DataError) as error:
            told.pop(extension, None)
            sample.fault = sample.fault or f"its .{extension} cannot be read: {first_line(error)}"
    return told


def _text(file: BinaryIO, member: _Member) -> str:
    if member.size > _TEXT_MOST:
        raise DataError(f"it has {member.size:,} bytes, and at most {_TEXT_MOST:,} are read")
    return _bytes(file, member).decode("utf-8-sig")


def _bytes(file: BinaryIO, member: _Member) -> bytes:
    if member.size > _MEMBER_MOST:
        raise DataError(f"{member.name} has {member.size:,} bytes, more than {_MEMBER_MOST:,}")
    file.seek(member.offset)
    data = file.read(member.size)
    if len(data) < member.size:
        raise DataError(f"its shard ends within {member.name}")
    return data


def _label(sample: _Sample, told: dict[str, Any], label: str | None) -> str:
    if label == "none":
        return ""
    keys = ("cls", *LABEL_NAMES) if label is None else (label,)
    for key in keys:
        of = told if key in ("cls", "txt") else told.get("json", {})
        if key not in of:
            continue
        found = _spelled(of[key])
        if found is None or storable(found) != found:
            what = "is no text and no number" if found is None else "is too long, or has NUL in it"
            sample.fault = sample.fault or f"its label, {key}, {what}"
            return ""
        return found
    return ""


def _spelled(value: Any) -> str | None:
    """A label as it is written in tables, "" for none; None for what cannot be one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # in one sample 1, in another 1.0
    if value is None:
        return ""
    return spelled_label(value) if isinstance(value, (str, int, float)) else None


def _metadata(
    told: Sequence[dict[str, Any]], *, is_text: bool
) -> tuple[dict[str, Any], Counter[str], list[str]]:
    """Columns of the keys of the ``json`` and of ``txt``, what has no place, which are cut.

    The text has its name in every shard, whatever the ``json`` has in one: a key of that name, with
    or without ``_`` behind it, gets one more.
    """
    of_text = "text" if is_text else "txt"
    rows = [
        {key + "_" * (key.rstrip("_") == of_text): value for key, value in one["json"].items()}
        if "json" in one
        else {}
        for one in told
    ]
    held = Counter(
        key
        for row in rows
        for key, value in row.items()
        if key and "\0" not in key and value is not None
    )
    most = {key for key, _ in held.most_common(_COLUMNS_MOST)}
    renamed = [key for key in held if key != of_text and key.rstrip("_") == of_text]
    columns: dict[str, Any] = {}
    passed_over: Counter[str] = Counter()
    if len(held) > len(most):
        passed_over[f"keys in .json that fewer samples have than the first {_COLUMNS_MOST}"] = len(
            held
        ) - len(most)
    for key in (key for key in held if key in most):
        values = from_values([row.get(key) for row in rows])
        if values is None:
            passed_over[f"values of {key} in .json, which are lists or objects"] += 1
        else:
            columns[key] = values
    if any("txt" in one for one in told):
        columns[of_text] = [one.get("txt", "") for one in told]
    cut = [f"{name[:-1]} of .json is the column {name}" for name in renamed if name in columns]
    for name, column in columns.items():
        columns[name], said = kept(column, name)
        cut += said
    return columns, passed_over, cut


@dataclasses.dataclass(frozen=True)
class _Reader:
    path: str
    stamp: tuple[int, int]
    members: tuple[_Member | None, ...]
    faults: tuple[str, ...]
    is_picture: bool

    def __call__(self, i: int) -> Any:
        member = self.members[i]
        if self.faults[i]:
            raise DataError(self.faults[i])
        if member is None:
            raise DataError("it has no " + ("picture" if self.is_picture else "such member"))
        with open(self.path, "rb") as file:
            data = _bytes(file, member)
            sources.require_unchanged(sources.stamp_of(os.fstat(file.fileno())) == self.stamp)
        if self.is_picture:
            return decode_bytes(data)
        return sources.require_text(data.decode("utf-8-sig"))
