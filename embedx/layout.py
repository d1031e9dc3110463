"""How the files of embedx lie on the disk, laid out once by HDF5 and then filled in place.

An embeddings file is an ordinary HDF5 file whose skeleton (every dataset at its final size,
contiguous, unfiltered) is made by h5py in memory; HDF5 never writes to the disk: rows go in by
``pwrite`` at known offsets, and two alternating commit records, each on a page of its own, say how
many of them count. A crash therefore can tear at most what no record has claimed yet.
All that is not rows is guarded by a checksum behind the end of what HDF5 sees of the file.
``docs/format.md`` specifies the layout; this is the only module that imports h5py. Files that come
from anywhere, those of others among them, are read without trusting them.
"""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from embedx.disk import (
    replace_file,
)
from embedx.errors import StoreError, first_line
from embedx.matrix import Array

EMBEDDINGS_FORMAT = "embedx-embeddings"
PROJECTION_FORMAT = "embedx-projection"
FINDINGS_FORMAT = "embedx-findings"
NEIGHBORS_FORMAT = "embedx-neighbors"
MAPS_FORMAT = "embedx-maps"
PART_FORMAT = "embedx-part"  # until all parts are joined
FORMAT_VERSION = 1
ID_BYTES_MAX = 1024

PAGE_BYTES = 4096

_RECORD = struct.Struct("<8sQQQI16s")  # magic, sequence, rows done, rows before, state, run
_MAGIC = b"EMBXCMT1"

_REGION = struct.Struct("<QQ")  # offset and length of what changes while rows are written
_FOOTER = struct.Struct("<QI")  # how many regions go before it, CRC-32 of all bytes outside them
_FOOTER_MAGIC = b"EMBXFTR1"
_FOOTER_BYTES = _FOOTER.size + 4 + len(_FOOTER_MAGIC)


class Status(IntEnum):
    """The state of a row, as stored in ``/status``."""

    PENDING = 0
    OK = 1
    FAILED = 2


@dataclasses.dataclass(frozen=True)
class Field:
    """A dataset with one entry a row, streamed while the work runs.

    Attributes:
        name: Its path in the file, such as ``embeddings/avgpool``.
        shape: Shape of one row, ``(d,)`` for embeddings.
        dtype: NumPy type of the stored numbers.
        attrs: What the numbers are, stored as attributes of the dataset.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


# --------------------------------------------------------------------------- text in HDF5


def encode_texts(values: Sequence[str], *, what: str, most_bytes: int = ID_BYTES_MAX) -> Array:
    """Texts as the fixed-length, zero-padded UTF-8 that the files hold.

    Bytes of a file name that are not UTF-8 are written as ``\\xNN``-style escapes.

    Args:
        values: n texts.
        what: What they are, for the message.
        most_bytes: Longest text taken, in bytes.

    Returns:
        Shape ``(n,)``, dtype ``S<longest>``.

    Raises:
        StoreError: One is longer than ``most_bytes`` or holds a NUL character.
    """
    width = 1
    for value in values:
        size = len(value) if value.isascii() else len(value.encode("utf-8", "backslashreplace"))
        if size > most_bytes:
            raise StoreError(
                f"{what} {value[:60]!r}... has {size} bytes, and at most {most_bytes} "
                "are stored; shorten it"
            )
        if "\0" in value:
            raise StoreError(f"{what} {value[:60]!r} holds a NUL character; rename it")
        width = max(width, size)
    # By blocks: as objects, all of them would take twice the room of the texts themselves.
    encoded = np.empty(len(values), dtype=f"S{width}")
    for start in range(0, len(values), _TEXTS):
        block = values[start : start + _TEXTS]
        encoded[start : start + _TEXTS] = [v.encode("utf-8", "backslashreplace") for v in block]
    return encoded


def are_unique(encoded: Array) -> bool:
    """Whether no two of n texts are the same, told in 16 bytes each.

    Args:
        encoded: As :func:`encode_texts` gives them.
    """
    hashes = np.empty(len(encoded), np.int64)
    for start in range(0, len(encoded), _TEXTS):
        hashes[start : start + _TEXTS] = [hash(v) for v in encoded[start : start + _TEXTS].tolist()]
    ordered = np.sort(hashes)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return True
    alike = encoded[np.isin(hashes, twice)].tolist()  # two texts may have one hash
    return len(set(alike)) == len(alike)


_TEXTS = 8192


def decoded(values: Array) -> list[str]:
    return [bytes(value).decode("utf-8", "replace") for value in values]


def stored_texts(values: Sequence[str]) -> list[str]:
    """Texts as they are read back from a file."""
    return [value.encode("utf-8", "backslashreplace").decode() for value in values]


def _h5_type(array_dtype: np.dtype[Any]) -> Any:
    if array_dtype.kind == "S":
        return h5py.string_dtype("utf-8", array_dtype.itemsize)
    return array_dtype


def _safe_name(name: str) -> str:
    """A capture point as the name of a dataset: ``/`` would make a group, ``%`` is the escape."""
    escaped = name.replace("%", "%25").replace("/", "%2F")
    return {".": "%2E", "..": "%2E%2E"}.get(escaped, escaped)


def plain_name(name: str) -> str:
    return name.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")


def column_name(name: str) -> str:
    """The path of a column of metadata in the file."""
    return f"metadata/{_safe_name(name)}"


def layer_name(point: str) -> str:
    """The path of a capture point's embeddings in the file."""
    return f"embeddings/{_safe_name(point)}"


def point_of(name: str) -> str:
    """The capture point whose dataset has this name."""
    return plain_name(name.removeprefix("embeddings/"))


def embeddings_field(
    point: str, *, n_features: int, dtype: np.dtype[Any], attrs: Mapping[str, Any]
) -> Field:
    """The dataset of one capture point."""
    return Field(layer_name(point), (n_features,), dtype, attrs)


# --------------------------------------------------------------------------- commit records


RUNNING, COMPLETE = 1, 2  # states of a record


@dataclasses.dataclass(frozen=True)
class Record:
    sequence: int
    rows_done: int
    rows_before: int
    state: int
    run: bytes

    @property
    def place(self) -> int:
        """Its offset in ``/commit``: never that of the record before it."""
        return self.sequence % 2 * PAGE_BYTES

    def pack(self) -> bytes:
        body = _RECORD.pack(
            _MAGIC, self.sequence, self.rows_done, self.rows_before, self.state, self.run
        )
        return body + struct.pack("<I", zlib.crc32(body))


def _read_record(page: bytes, *, n_rows: int, run: bytes) -> Record | None:
    body = page[: _RECORD.size]
    (checksum,) = struct.unpack_from("<I", page, _RECORD.size)
    if zlib.crc32(body) != checksum:
        return None
    magic, sequence, rows_done, rows_before, state, got_run = _RECORD.unpack(body)
    if magic != _MAGIC or got_run != run or not rows_before <= rows_done <= n_rows:
        return None
    return Record(sequence, rows_done, rows_before, state, got_run)


def newest_record(pages: Array, *, n_rows: int, run: bytes) -> Record | None:
    seen = b""
    while seen != (seen := pages.tobytes()):  # a writer may be at work: both of one moment
        pass
    found = (seen[:PAGE_BYTES], seen[PAGE_BYTES:])
    records = [_read_record(page, n_rows=n_rows, run=run) for page in found]
    return max((r for r in records if r), key=lambda r: r.sequence, default=None)


def run_bytes(file_id: str) -> bytes:
    """Marks the commit records of this file. Derived from its id, so that equal runs make equal
    files, and a recycled disk page of another run is not taken for a record of this one."""
    return hashlib.sha256(file_id.encode()).digest()[:16]


_BEGUN = [zlib.crc32(bytes((state,))) for state in range(256)]


def row_checksums(status: Array, parts: Sequence[Array]) -> Array:
    """CRC-32 of each row: its status byte, then its bytes in every streamed dataset, in order."""
    checksums = [_BEGUN[state] for state in status.tolist()]
    for part in parts:
        data = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        row_bytes = len(data) // max(1, len(part))
        # One slice and one call a row: with 2 KB of each, what surrounds them would cost as much.
        checksums = [
            zlib.crc32(data[row * row_bytes : (row + 1) * row_bytes], checksum)
            for row, checksum in enumerate(checksums)
        ]
    return np.array(checksums, dtype=np.uint32)


def bad_rows(row_maps: Sequence[Array], rows: slice) -> list[int]:
    """The rows whose bytes do not match their checksum."""
    status, stored, *maps = row_maps
    bad: list[int] = []
    for start in range(rows.start, rows.stop, 4096):
        block = slice(start, min(start + 4096, rows.stop))
        computed = row_checksums(status[block], [m[block] for m in maps])
        bad += (start + np.flatnonzero(computed != stored[block])).tolist()
    return bad


def crc_outside(fd: int, size: int, regions: Sequence[tuple[int, int]]) -> int:
    """CRC-32 of the first ``size`` bytes of a file but for those of regions (offset, length)."""
    checksum, at = 0, 0
    for offset, length in [*regions, (size, 0)]:
        while at < offset:
            data = os.pread(fd, min(2**20, offset - at), at)
            if not data:
                raise OSError(errno.EIO, "the file ends too early")
            checksum = zlib.crc32(data, checksum)
            at += len(data)
        at = offset + length
    return checksum


def footer(checksum: int, regions: Sequence[tuple[int, int]]) -> bytes:
    body = b"".join(_REGION.pack(*region) for region in regions)
    body += _FOOTER.pack(len(regions), checksum)
    return body + struct.pack("<I", zlib.crc32(body)) + _FOOTER_MAGIC


def _is_as_laid_out(fd: int) -> bool | None:
    """Whether all that is not rows is as it was written; None of a file that has no footer.

    HDF5 trusts what it parses: a changed byte in it can end the process.
    """
    size = os.fstat(fd).st_size
    end = os.pread(fd, _FOOTER_BYTES, max(0, size - _FOOTER_BYTES))
    if end[-len(_FOOTER_MAGIC) :] != _FOOTER_MAGIC or len(end) < _FOOTER_BYTES:
        return None
    n_regions, checksum = _FOOTER.unpack_from(end)
    size -= _FOOTER_BYTES + n_regions * _REGION.size
    if size < 0:
        return False
    body = os.pread(fd, n_regions * _REGION.size, size)
    regions = list(_REGION.iter_unpack(body))
    ends = [0, *(offset + length for offset, length in regions)]
    starts = [*(offset for offset, _ in regions), size]
    if any(start < end for start, end in zip(starts, ends, strict=True)):
        return False
    return footer(checksum, regions) == body + end and checksum == crc_outside(fd, size, regions)


class _Image(io.RawIOBase):
    """A file in memory that keeps the pages that were written alone, so that rows cost nothing."""

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}
        self.size = 0
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        for done, page, start, n in self._pieces(len(view)):
            view[done : done + n] = self.pages.get(page, bytes(PAGE_BYTES))[start : start + n]
        return len(view)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for done, page, start, n in self._pieces(len(view)):
            kept = self.pages.setdefault(page, bytearray(PAGE_BYTES))
            kept[start : start + n] = view[done : done + n]
        self.size = max(self.size, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size

    def _pieces(self, n_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """The next bytes page by page: how many went before, the page, where in it, how many."""
        done = 0
        while done < n_bytes:
            start = self._at % PAGE_BYTES
            n = min(n_bytes - done, PAGE_BYTES - start)
            yield done, self._at - start, start, n
            done, self._at = done + n, self._at + n


def lay_out(
    layout: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    *,
    root: Mapping[str, Any],
    attrs: Mapping[str, Mapping[str, Any]],
) -> tuple[_Image, dict[str, int]]:
    """Let HDF5 make the skeleton: every dataset allocated, every attribute written, closed.

    It does so in memory: on a disk that fills meanwhile HDF5 crashes.

    Returns:
        The file without its rows, and the offset of each dataset.
    """
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # equal runs give equal bytes
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    image, offsets = _Image(), {}
    with h5py.File(
        image, "w", libver="earliest", alignment_threshold=1, alignment_interval=PAGE_BYTES
    ) as file:
        for key, value in root.items():
            file.attrs[key] = value
        for name, (shape, dtype) in layout.items():
            dataset_id = h5py.h5d.create(
                file.id,
                name.encode(),
                h5py.h5t.py_create(np.dtype(_h5_type(dtype)), logical=True),
                h5py.h5s.create_simple(shape),
                dcpl=creation,
                lcpl=links,
            )
            dataset = h5py.Dataset(dataset_id)
            # In the order in which they are read back: a file that is joined of parts, whose fields
            # are those of a part, is then the one that was written in one go.
            for key, value in sorted(attrs.get(name, {}).items()):
                dataset.attrs[key] = value
            # An empty dataset has no place in the file, and nothing is written to it.
            offsets[name] = int(dataset_id.get_offset() or 0)
    return image, offsets


# --------------------------------------------------------------------------- reading

BOOKKEEPING = ("row_crc32", "status", "commit")
BOOLEAN = "bool"  # what a column of uint8 says of itself that holds 0 for false and 1 for true
_KINDS = "fiuS"


def _has_magic(file: IO[bytes], room: int) -> bool:
    """Whether a file begins as those of HDF5 do, or goes on so after a block of its writer's own.

    References:
        HDF5 File Format Specification 3.0, II.A: it may begin at byte 0, 512, 1024, 2048, ...
    """
    at = 0
    while at <= room:
        file.seek(at)
        if file.read(8) == b"\x89HDF\r\n\x1a\n":
            return True
        at = max(512, 2 * at)
    return False


class Skeleton:
    """The layout of a file that may come from anywhere: read only, and trusted in nothing.

    Only hard links to contiguous, unfiltered datasets that lie whole within the file are
    followed, so that no other file is read and nothing larger than the file is mapped.
    """

    def __init__(self, path: Path, *, is_of_others: bool = False) -> None:
        self.path = path
        self._checked: dict[str, h5py.Dataset] = {}
        try:
            about = path.stat()
            is_hdf5 = False
            if stat.S_ISREG(about.st_mode):  # opening a pipe would wait for ever
                with path.open("rb") as file:
                    is_hdf5 = _has_magic(file, about.st_size if is_of_others else 0)
        except FileNotFoundError:
            raise StoreError(f"{path} is not there; check the path") from None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}; check its rights") from None
        if stat.S_ISDIR(about.st_mode):
            raise StoreError(f"{path} is a folder; name the file in it")
        if not is_hdf5:
            wanted = "one, or a file of NumPy's" if is_of_others else "a file that embedx wrote"
            raise StoreError(f"{path} is not an HDF5 file; name {wanted}")
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    self._bytes = stack.enter_context(path.open("rb"))
                    self.is_as_laid_out = _is_as_laid_out(self._bytes.fileno())
                    if self.is_as_laid_out is False:
                        raise self._foreign("bytes outside its rows have changed")
                    self._file = stack.enter_context(h5py.File(path, "r"))
                    named, about = path.stat(), os.fstat(self._bytes.fileno())
                except FileNotFoundError:
                    raise StoreError(f"{path} was renamed meanwhile; open it again") from None
                except StoreError:
                    raise
                except OSError as error:
                    if not path.exists():  # HDF5 has words of its own for that
                        raise StoreError(f"{path} was renamed meanwhile; open it again") from None
                    raise StoreError(
                        f"{path} does not open as HDF5, it may be truncated ({first_line(error)}); "
                        "make it anew"
                    ) from None
                # Else another file took the name meanwhile, with rows in other places.
                if os.path.samestat(named, about):
                    self.size_bytes = about.st_size
                    self._opened = stack.pop_all()
                    return

    def __enter__(self) -> "Skeleton":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def check_embeddings(self) -> dict[str, Any]:
        """The root attributes, once every dataset has the shape and kind that is promised."""
        attrs = self.attrs(EMBEDDINGS_FORMAT)
        n_rows = attrs["n_rows"]
        if not isinstance(n_rows, int) or n_rows < 0:
            raise self._foreign(f"n_rows is {n_rows!r}")
        self.expect("ids", (n_rows,), "S")
        self.expect("status", (n_rows,), "u", 1)
        self.expect("row_crc32", (n_rows,), "u", 4)
        self.expect("commit", (2, PAGE_BYTES), "u", 1)
        if self.has("item_hashes"):
            self.expect("item_hashes", (n_rows,), "u", 8)
        if self.has("labels"):
            self.expect("labels", (n_rows,), "i", 4)
            if self.has("label_names") or "labels" not in self._streamed():
                self.expect("label_names", (None,), "S")
        for name in self.names("metadata"):
            self.expect(name, (n_rows,), _KINDS)
        for name in self._streamed():
            if name.startswith("embeddings/"):
                self.expect(name, (n_rows, None), "f")
            elif name == "thumbnails":
                self.expect(name, (n_rows, None, None, 3), "u", 1)
            elif self._dataset(name).shape[:1] != (n_rows,):
                raise self._foreign(f"{name} has not {n_rows} rows")
        return attrs

    def _streamed(self) -> list[str]:
        try:
            names = json.loads(plain(self._file.attrs["row_fields"]))
        except (ValueError, TypeError, RecursionError):
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._foreign("row_fields is not a JSON list of names")
        return names

    def expect(
        self, name: str, shape: tuple[int | None, ...], kinds: str, n_bytes: int | None = None
    ) -> None:
        """Refuse a dataset of another shape (None is any but 0) or another kind of numbers."""
        dataset = self._dataset(name)
        fits = len(dataset.shape) == len(shape) and all(
            got == want if want is not None else got > 0 or name == "label_names"
            for got, want in zip(dataset.shape, shape, strict=True)
        )
        size = dataset.dtype.itemsize
        if not fits or dataset.dtype.kind not in kinds or n_bytes not in (None, size):
            raise self._foreign(f"{name} has shape {dataset.shape} and type {dataset.dtype}")

    def attrs(self, expected_format: str) -> dict[str, Any]:
        try:
            attrs = {key: plain(value) for key, value in self._file.attrs.items()}
        except (OSError, RuntimeError, TypeError) as error:
            raise self._foreign(f"its attributes cannot be read: {first_line(error)}") from None
        got = attrs.get("format")
        if got != expected_format:
            raise StoreError(
                f"{self.path} is not an {expected_format} file (its format says {got!r}); "
                "name a file that embedx wrote"
            )
        if attrs.get("version") != FORMAT_VERSION:
            raise StoreError(
                f"{self.path} has format version {attrs.get('version')}, and this embedx reads "
                f"version {FORMAT_VERSION}; read it with the embedx that wrote it"
            )
        needed = {
            EMBEDDINGS_FORMAT: {"id", "n_rows", "row_fields"},
            PROJECTION_FORMAT: {"id", "parent", "method", "layer"},
            NEIGHBORS_FORMAT: {"parent"},
            MAPS_FORMAT: {"id", "method", "model"},
            PART_FORMAT: {"id"},
        }[expected_format]
        if missing := needed - attrs.keys():
            raise self._foreign(f"the attribute {min(missing)!r} is missing")
        return attrs

    def names(self, group: str = "") -> list[str]:
        """Paths of the datasets directly below a group, sorted."""
        if group and self._link(group) is None:
            return []
        parent = self._file[group] if group else self._file
        if not isinstance(parent, h5py.Group):
            raise self._foreign(f"{group} is not a group")
        prefix = f"{group}/" if group else ""
        return [prefix + name for name in sorted(parent)]

    def has(self, name: str) -> bool:
        return self._link(name) is not None

    def offsets(self, names: Sequence[str] | Mapping[str, Any]) -> dict[str, int]:
        # An empty dataset has no place in the file, and nothing is written to it.
        return {name: int(self._dataset(name).id.get_offset() or 0) for name in names}

    def dataset_attrs(self, name: str) -> dict[str, Any]:
        return {key: plain(value) for key, value in self._dataset(name).attrs.items()}

    def fields(self) -> list[Field]:
        datasets = {name: self._dataset(name) for name in self._streamed()}
        return [Field(name, found.shape[1:], found.dtype) for name, found in datasets.items()]

    def map(self, name: str) -> Array:
        """A dataset as a read-only memory map; the map outlives the open file."""
        dataset = self._dataset(name)
        if dataset.size == 0:
            return np.empty(dataset.shape, dataset.dtype)
        return np.memmap(
            self._bytes,
            mode="r",
            dtype=dataset.dtype,
            shape=dataset.shape,
            offset=dataset.id.get_offset(),
        )

    def row_maps(self, fields: Sequence[Field]) -> list[Array]:
        """What :func:`bad_rows` takes."""
        return [self.map(name) for name in ("status", "row_crc32", *(f.name for f in fields))]

    def _link(self, name: str) -> h5py.Group | h5py.Dataset | None:
        node: Any = self._file
        for part in name.split("/"):
            if not isinstance(node, h5py.Group):
                return None
            link = node.get(part, getlink=True)
            if link is None:
                return None
            if not isinstance(link, h5py.HardLink):
                raise self._foreign(f"{name} is a link to somewhere else")
            node = node[part]
        return node

    def _dataset(self, name: str) -> h5py.Dataset:
        if name not in self._checked:
            self._checked[name] = self._check(name)
        return self._checked[name]

    def _check(self, name: str) -> h5py.Dataset:
        dataset = self._link(name)
        if not isinstance(dataset, h5py.Dataset):
            raise self._foreign(f"the dataset {name} is missing")
        creation = dataset.id.get_create_plist()
        if creation.get_layout() != h5py.h5d.CONTIGUOUS or creation.get_nfilters():
            raise self._foreign(f"{name} is not stored contiguous and unfiltered")
        if creation.get_external_count():
            raise self._foreign(f"{name} keeps its data in another file")
        if dataset.shape is None:
            raise self._foreign(f"{name} is empty")
        if dataset.dtype.kind not in _KINDS or dataset.dtype.hasobject:
            raise self._foreign(f"{name} has the type {dataset.dtype}")
        if dataset.size:
            offset = dataset.id.get_offset()
            n_bytes = int(dataset.size) * dataset.dtype.itemsize
            if offset is None or offset + n_bytes > self.size_bytes:
                raise self._foreign(f"{name} reaches past the end of the file")
        return dataset

    def foreign_arrays(self) -> "dict[str, ForeignArray]":
        """Every array of numbers or texts, by its path; see :func:`foreign_arrays`."""
        found: dict[str, ForeignArray] = {}
        seen: set[Any] = set()
        groups = [("", self._file)]
        while groups:
            prefix, group = groups.pop()
            for name in sorted(group):
                if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                    continue
                node = group[name]
                address = h5py.h5o.get_info(node.id).addr
                if address in seen:  # a group may hold itself
                    continue
                seen.add(address)
                if len(seen) > _FOREIGN_OBJECTS:
                    raise StoreError(
                        f"{self.path} holds more than {_FOREIGN_OBJECTS:,} objects; name one array "
                        "of a smaller file"
                    )
                if isinstance(node, h5py.Group):
                    groups.append((f"{prefix}{name}/", node))
                elif isinstance(node, h5py.Dataset) and node.shape:
                    found[prefix + name] = self._foreign_array(prefix + name, node)
        return dict(sorted(found.items()))

    def _foreign_array(self, name: str, dataset: h5py.Dataset) -> "ForeignArray":
        creation = dataset.id.get_create_plist()
        layout = creation.get_layout()
        filters = {creation.get_filter(i)[0] for i in range(creation.get_nfilters())}
        n_bytes = int(dataset.size) * dataset.dtype.itemsize
        stored = int(dataset.id.get_storage_size())
        offset: int | None = None
        chunk_bytes = 0
        why = ""
        if dataset.dtype.kind not in _FOREIGN_KINDS or dataset.dtype.hasobject:
            why = f"is of type {dataset.dtype}; numbers and fixed-length texts are read"
        elif layout == h5py.h5d.VIRTUAL or creation.get_external_count():
            why = "keeps its data in another file, which is not followed"
        elif filters - _FOREIGN_FILTERS:
            why = "is compressed by a filter that is not HDF5's own; write it by gzip or lzf"
        elif layout == h5py.h5d.CHUNKED:
            chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
            if chunk_bytes > _FOREIGN_CHUNK_BYTES:
                why = f"has chunks of {chunk_bytes:,} bytes; write it in smaller ones"
        elif layout == h5py.h5d.CONTIGUOUS:
            offset = dataset.id.get_offset()
            kind = dataset.id.get_type()
            declared = int(dataset.size) * kind.get_size()
            if offset is None or offset + declared > self.size_bytes:
                why = f"declares {declared:,} bytes, and the file has {self.size_bytes:,}"
            elif not kind.equal(h5py.h5t.py_create(dataset.dtype)):
                offset = None  # as bfloat16, of which HDF5 makes the numbers of another type
        if not why and min(stored, self.size_bytes) * DEFLATE_MOST < n_bytes:
            why = f"declares {n_bytes:,} bytes and holds {stored:,}"
        shape = tuple(int(size) for size in dataset.shape)
        if not why and layout == h5py.h5d.CHUNKED:
            n_chunks = math.prod(-(-s // c) for s, c in zip(shape, dataset.chunks, strict=True))
            n_written = dataset.id.get_num_chunks()
            if n_written < n_chunks:  # the others are read as zeros, or what else fills them
                why = f"has {n_written:,} of its {n_chunks:,} chunks: all is to be written to it"
        return ForeignArray(self.path, name, shape, dataset.dtype, offset, chunk_bytes, why)

    def _foreign(self, why: str) -> StoreError:
        return StoreError(f"{self.path} is damaged or not written by embedx: {why}; make it anew")


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


DEFLATE_MOST = 1100  # how many bytes one byte of what deflate writes may become, and some more
_FOREIGN_KINDS = "biufS"
_FOREIGN_OBJECTS = 10_000
_FOREIGN_CHUNK_BYTES = 2**28
_FOREIGN_FILTERS = frozenset(
    {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}
    | {h5py.h5z.FILTER_LZF}
)


@dataclasses.dataclass(frozen=True)
class ForeignArray:
    """An array in an HDF5 file that another program wrote.

    Attributes:
        path: The file.
        name: Its path in the file.
        shape: Its shape.
        dtype: Its type.
        offset: Where its numbers begin, if they lie in the file as they are; else None.
        chunk_bytes: How large a piece is that is read as a whole; 0 where there are none.
        refused: Why it is not read; empty where it is.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None
    chunk_bytes: int
    refused: str

    def opened(self) -> Any:
        """It as h5py reads it, for slices; closing ``.file`` ends that.

        Raises:
            StoreError: It is another one by now.
        """
        if foreign_arrays(self.path).get(self.name) != self:
            raise StoreError(f"{self.name} of {self.path} was changed meanwhile; run again")
        # Of a piece that is not kept, each row would cost the whole.
        cache_bytes = max(2**20, 2 * self.chunk_bytes)
        return h5py.File(self.path, "r", rdcc_nbytes=cache_bytes)[self.name]


def foreign_arrays(path: Path) -> dict[str, ForeignArray]:
    """Every array of numbers or texts in an HDF5 file of any program, by its path.

    Hard links alone are followed, and nothing in another file.

    Raises:
        StoreError: It is not there, damaged, or no HDF5 file.
    """
    with reading(path), Skeleton(path, is_of_others=True) as skeleton:
        return skeleton.foreign_arrays()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """A file may come from anywhere: what HDF5 or NumPy stumble over is its fault, not ours."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise StoreError(
            f"{path} is damaged or not written by embedx ({first_line(error)}); make it anew"
        ) from error


# --------------------------------------------------------------------------- files of arrays


def write_arrays(
    path: Path, *, format: str, attrs: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Path:
    """Write a file of arrays, whole or not at all.

    Args:
        path: Where to.
        format: What the file says it is.
        attrs: Root attributes.
        arrays: Datasets by path, of numbers or of :func:`encode_texts`.

    Raises:
        StoreError: The disk refused.
    """
    image = io.BytesIO()
    with h5py.File(image, "w", libver="earliest") as file:
        # A parameter of the user's own may have any name, but not make another format of the file.
        for key, value in {**attrs, "format": format, "version": FORMAT_VERSION}.items():
            file.attrs[key] = value
        for name, array in arrays.items():
            kind = _h5_type(array.dtype)
            file.create_dataset(name, data=array.astype(kind, copy=False), track_times=False)
    image.seek(0, os.SEEK_END)
    image.write(footer(zlib.crc32(image.getbuffer()), []))
    return replace_file(path, image.getbuffer())


def read_arrays(
    path: Path, *, format: str, names: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The root attributes of a file of :func:`write_arrays`, and some of its arrays by name.

    Raises:
        StoreError: It is not there, damaged, of another format, or has no such array.
    """
    with reading(path), Skeleton(path) as skeleton:
        if format == PART_FORMAT and not skeleton.is_as_laid_out:  # its checksum is torn off
            raise skeleton._foreign("its end is missing")
        return skeleton.attrs(format), {name: np.array(skeleton.map(name)) for name in names}
