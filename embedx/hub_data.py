"""Data sets as HuggingFace's ``datasets`` and its Hub keep them: Arrow and Parquet files.

pyarrow alone reads them. The package ``datasets`` would copy Parquet into a cache in the home
folder first, follow whatever file names a data set holds, and take seconds to import.
"""

import dataclasses
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from embedx.arrow_files import RowFile, Rows, open_rows
from embedx.columns import (
    from_arrow,
    has_place,
    is_label_name,
    is_text,
    kept,
    minus_one_told,
    require_ids,
    require_labels,
    told_apart,
)
from embedx.errors import (
    ConfigError,
    DataError,
    first_line,
    listed,
    missing_extra,
    number_of,
    short,
)
from embedx.matrix import Array
from embedx.pictures import decode_bytes
from embedx.sources import (
    FileReader,
    RowNumbers,
    Source,
    classes_said,
    counted,
    counted_through,
    file_hashes,
    limited,
    located,
    name_of,
    require_text,
    require_unchanged,
    scan,
    stamp_of,
)
from embedx.table_files import no_column, only_label

_JSON_BYTES_MOST = 2**24
_OPEN_MOST = 8
_TEXT_NAMES = ("text", "sentence", "content", "document", "review", "question", "caption")
_NO_ITEMS = ("Audio", "Video", "Pdf")  # features that are kept as pictures are
_PART = r"-(\d{5})-of-(\d{5})\b"  # of a file that is one of several
_ELSEWHERE = "its path leads out of the folder of the data set"
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}


def huggingface(
    path: str,
    *,
    split: str | None = None,
    column: str | None = None,
    label: str | None = None,
    id: str | None = None,
    limit: int | None = None,
) -> Source:
    """A data set of HuggingFace on this machine: what ``save_to_disk`` wrote, or Parquet files.

    The items are pictures (a column of the feature ``Image``, or of encoded bytes) or texts. All
    other columns that hold one number, truth value, time or text a row become metadata; of texts
    the first 1,024 bytes.

    Args:
        path: A folder that ``save_to_disk`` wrote, a folder with Parquet files, as a checkout of
            the Hub is, or one file, ``.parquet`` or ``.arrow``.
        split: Which part, such as ``test``; needed where there are several.
        column: The column of the items; the one of pictures, or else of texts, where not given.
        label: The column of labels; the only ``ClassLabel``, or else a column called ``label``,
            ``labels``, ``class``, ``target`` or ``targets`` where not given; ``none`` for no
            labels.
        id: A column of unique texts or whole numbers; row numbers where not given.
        limit: Take the first so many rows.

    Raises:
        ConfigError: A split or column is not there, or has to be chosen.
        DataError: ``path`` is missing, or holds no such data set, or a damaged one; ids come twice;
            a label has no name.
        DependencyError: pyarrow is not installed.

    References:
        Lhoest et al. 2021, Datasets: A Community Library for NLP, EMNLP (demos).
    """
    try:
        import pyarrow
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise missing_extra("pyarrow", extra="data", needed_for="data=huggingface") from None
    found = _find(path, split)
    opened = [open_rows(found.top / name, shown=name) for name in found.names]
    schema = opened[0].schema
    for name, other in zip(found.names, opened, strict=True):
        if not other.schema.equals(schema, check_metadata=False):
            raise DataError(
                f"{name} has other columns than {found.names[0]} "
                f"({_difference(schema, other.schema)}); give one of them as data.path"
            )
    features = _same_features(found.names, [one.schema for one in opened])
    n_all = sum(one.n_rows for one in opened)
    if n_all == 0:
        raise DataError(f"data.path {path} holds no row; give a data set with some")
    n = limited(n_all, limit)
    table = _Table(found.shown, Rows(opened, n), features)
    item = _item_column(table, column)
    label_column = _label_column(table, label, {item.name, id})
    labels, label_names, label_numbers = _labels(table, label_column)
    ids = _ids(table, id)
    metadata, passed_over, cut, nameless = _metadata(table, item, {label_column, id})
    files = tuple((one.shown, one.n_rows, one.stamp) for one in table.rows.files)
    stated = [(f"{item.name} of {name}", *stamp) for name, _, stamp in files]
    paths = table.rows.paths(item.name) if item.kind == "picture" else {}
    beside = located(paths.values(), found.top, elsewhere=_ELSEWHERE)
    fingerprint, hashes = file_hashes([*stated, *beside.files])
    of_files, of_paths = np.split(hashes, [len(files)])
    item_hashes = _item_hashes(of_files, [n_rows for _, n_rows, _ in files], n)
    item_hashes[list(paths)] ^= of_paths
    what = "pictures" if item.kind == "picture" else "texts"
    note = f"{found.shown}: {n:,} {what} of the column {item.name}, {classes_said(label_names)}"
    note += f" of {label_column}" if label_names else ""
    note += f", the first of {n_all:,}" if n < n_all else ""
    notes = [note + ("; ids are row numbers" if id is None else f"; ids are those of {id}")]
    if passed_over := [*filter(None, [found.passed_over]), *passed_over]:
        notes.append(f"passed over: {listed(passed_over)}")
    return Source(
        name=found.name,
        ids=ids,
        read=_Reader(
            str(found.top),
            files,
            item,
            {row: j for j, row in enumerate(paths)},
            FileReader(str(found.top), tuple(beside.paths), of_paths, beside.refused),
        ),
        fingerprint=fingerprint,
        item_hashes=item_hashes,
        labels=labels,
        label_names=label_names,
        label_numbers=label_numbers,
        metadata=metadata,
        notes=(*notes, *cut),
        warnings=(
            *found.warnings,
            *beside.told(),
            *nameless,
            *minus_one_told(label_names, found.shown),
        ),
        root=found.top,
        reads_files=True,
    )


# --------------------------------------------------------------------------- which files


@dataclasses.dataclass(frozen=True)
class _Found:
    top: Path
    names: Sequence[str]
    name: str
    shown: str
    passed_over: str = ""
    warnings: tuple[str, ...] = ()


def _find(path: str, split: str | None) -> _Found:
    """The files of a data set, relative to its folder, in their order."""
    if not path:
        raise DataError("data.path is empty; name a folder of save_to_disk, or Parquet files")
    top = Path(path).expanduser()
    if not top.exists():
        raise DataError(
            f"data.path {path} is not there; give a folder that datasets' save_to_disk wrote, or "
            "Parquet files (nothing is downloaded)"
        )
    if not top.is_dir():
        if top.suffix.lower() not in (".parquet", ".arrow"):
            raise DataError(
                f"data.path {path} is no .parquet or .arrow file; give one, or a folder of "
                "save_to_disk"
            )
        if split is not None:
            raise ConfigError(f"data.split={split} has no use for one file, {path}; leave it out")
        return _Found(top.parent, [top.name], name_of(top), path)
    name = name_of(top) or "data"
    if (top / "dataset_dict.json").is_file():
        splits = _plain_names(_read_json(top / "dataset_dict.json").get("splits"), top)
        chosen = _chosen(splits, split, path)
        return dataclasses.replace(
            _saved(top / chosen, f"{path}, {chosen}"), name=f"{name}-{chosen}"
        )
    if (top / "state.json").is_file():
        if split is not None:
            raise ConfigError(
                f"data.split={split} has no use for {path}, which is one part; leave it out"
            )
        return dataclasses.replace(_saved(top, path), name=name)
    return _loose(top, path, split, name)


def _chosen(splits: Sequence[str], split: str | None, path: str) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split in splits:
        return str(split)
    if split is None:
        raise ConfigError(
            f"data.path {path} has the splits {', '.join(splits)}; choose one: "
            f"data.split={splits[0] if splits else 'NAME'}"
        )
    raise ConfigError(
        f"data.path {path} has no split {split!r}; choose one of: {', '.join(splits) or 'none'}"
    )


def _saved(folder: Path, shown: str) -> _Found:
    """What ``save_to_disk`` of one data set wrote."""
    state = _read_json(folder / "state.json")
    if any(value for key, value in state.items() if key.startswith("_indices")):
        raise DataError(
            f"{shown} keeps its rows in another order (indices), as old versions of datasets did; "
            "load it and save it again by save_to_disk"
        )
    files = state.get("_data_files")
    named = [one.get("filename") if isinstance(one, dict) else None for one in files or ()]
    return _Found(folder, _plain_names(named, folder), folder.name, shown)


def _plain_names(names: Any, folder: Path) -> list[str]:
    """Names that a data set says, each of something right in its folder.

    Raises:
        DataError: There is none, or one leads elsewhere.
    """
    if not isinstance(names, list) or not names:
        raise DataError(f"{folder} names no files or splits; save it again by save_to_disk")
    for name in names:
        is_plain = isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name
        if not is_plain or "/" in name or "\\" in name:
            raise DataError(
                f"{folder} names {name!r}, which is not right in that folder; save it again by "
                "save_to_disk"
            )
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_JSON_BYTES_MOST + 1)
        found = json.loads(data) if len(data) <= _JSON_BYTES_MOST else None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; save the data set again") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON ({first_line(error)}); save the data set again"
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is no JSON object of at most 16 MiB; save the data set again")
    return found


def _loose(top: Path, path: str, split: str | None, name: str) -> _Found:
    """Parquet (or else Arrow) files below a folder, as a checkout of the Hub has them."""
    files, others = scan(top, {".parquet", ".arrow"})
    found = [file for file, _, _ in files if file.lower().endswith(".parquet")]
    if not found:
        found = [file for file, _, _ in files]
    elif len(found) < len(files):
        others[".arrow"] += len(files) - len(found)
    if not found:
        raise DataError(
            f"data.path {path} holds no Parquet file and nothing of save_to_disk "
            f"({counted(others) or 'it is empty'}); for a folder of pictures use data=folder"
        )
    of_split: dict[str, list[str]] = {}
    for file in found:
        of_split.setdefault(_split_of(file), []).append(file)
    unnamed = of_split.pop("", [])
    if not of_split:
        if split is not None:
            raise ConfigError(
                f"data.split={split}: the files below {path} name no split; leave it out"
            )
        return _Found(top, unnamed, name, path, counted(others), _missing_parts(unnamed, path))
    chosen = _chosen(sorted(of_split), split, path)
    if unnamed:
        others["files of no split"] += len(unnamed)
    names, shown = of_split[chosen], f"{path}, {chosen}"
    missing = _missing_parts(names, path)
    return _Found(top, names, f"{name}-{chosen}", shown, counted(others), missing)


def _missing_parts(files: Sequence[str], path: str) -> tuple[str, ...]:
    """What is to be said of parts that are not there, as the names of the others tell.

    Raises:
        DataError: A part is there twice, as where a data set was saved anew beside the old files.
    """
    of_whole: dict[str, dict[int, list[str]]] = {}
    n_parts: dict[str, dict[int, str]] = {}
    for file in files:
        if match := re.match(rf"(.*?){_PART}", file):
            of_whole.setdefault(match[1], {}).setdefault(int(match[2]), []).append(file)
            n_parts.setdefault(match[1], {})[int(match[3])] = file
    told = []
    for whole, parts in of_whole.items():
        several = list(n_parts[whole].values())
        same = several if len(several) > 1 else max(parts.values(), key=len)
        if len(same) > 1:
            raise DataError(
                f"data.path {path} holds {same[0]} and {same[1]}, which are parts of two copies; "
                "move the files of one of them away"
            )
        (n,) = n_parts[whole]
        missing = [f"{i:05d}" for i in range(n) if i not in parts]
        if missing:
            told.append(
                f"{path} lacks {len(missing):,} of the {n:,} parts of {whole}: {listed(missing)}; "
                "rows are numbered without theirs, and are others once these are there"
            )
    return tuple(told)


def _split_of(file: str) -> str:
    """The split that the path of a file names, by the Hub's rules, "" for none."""
    *folders, name = file.split("/")
    if match := re.match(rf"(\w[\w.]*?){_PART}", name):
        return _SPLITS.get(match[1], match[1])
    for part in (name, *reversed(folders)):
        words = re.split(r"[^a-zA-Z]+", part.lower())
        if known := [_SPLITS[word] for word in words if word in _SPLITS]:
            return known[0]
    return ""


# --------------------------------------------------------------------------- which columns


@dataclasses.dataclass(frozen=True)
class _Table:
    """Rows, what they are called in messages, and what ``datasets`` noted of their columns."""

    shown: str
    rows: Rows
    features: Mapping[str, Mapping[str, Any]]

    @property
    def names(self) -> list[str]:
        return list(self.rows.schema.names)

    def type_of(self, name: str) -> Any:
        return self.rows.schema.field(name).type

    def require(self, name: str, key: str) -> str:
        if name not in self.names:
            raise no_column(key, name, self.names, self.shown)
        return name

    def feature(self, name: str) -> str:
        return str(self.features.get(name, {}).get("_type", ""))

    def class_names(self, name: str) -> list[str] | None:
        """The names that whole numbers stand for, None where they are no classes."""
        names = self.features.get(name, {}).get("names")
        is_usable = isinstance(names, list) and all(isinstance(one, str) for one in names)
        return names if is_usable and self.feature(name) == "ClassLabel" else None

    def values(self, name: str, key: str) -> list[Any]:
        """The whole numbers, truth values or texts of a column, None or "" where one is missing."""
        kind = self.type_of(name)
        if not _is_label(kind):
            raise ConfigError(
                f"data.{key}={name} holds {short(str(kind))}; choose a column of texts or whole "
                "numbers"
            )
        if _is_texts(kind):
            return self.rows.texts(name)
        return list(self.rows.converted(name, lambda column: column.to_pylist()))


@dataclasses.dataclass(frozen=True)
class _Item:
    name: str
    kind: Literal["picture", "text"]


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """What ``datasets`` noted of the columns: names of classes, and which are pictures."""
    noted = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(noted)["info"]["features"]
        return {name: one for name, one in features.items() if isinstance(one, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _same_features(names: Sequence[str], schemas: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """What ``datasets`` noted of the columns of all files.

    Raises:
        DataError: One has other names for the numbers of a column, or other kinds of features.
    """
    noted = [_features(schema) for schema in schemas]
    for name, other in zip(names, noted, strict=True):
        for column in {**noted[0], **other}:
            here, there = (_meaning(one.get(column, {})) for one in (noted[0], other))
            if here != there:
                raise DataError(
                    f"{name} says otherwise what {column} is than {names[0]} ({_said(there)}, and "
                    f"there {_said(here)}); give one of them as data.path, or save all anew as one"
                )
    return noted[0]


def _meaning(feature: Mapping[str, Any]) -> tuple[str, Any]:
    """What a feature says beyond the type that its column has."""
    kind = str(feature.get("_type", ""))
    return (kind, feature.get("names")) if kind in ("ClassLabel", *_NO_ITEMS) else ("", None)


def _said(meaning: tuple[str, Any]) -> str:
    kind, names = meaning
    if kind != "ClassLabel":
        return kind or "nothing noted"
    return f"the classes {short(listed([str(one) for one in names or ()]))}"


def _difference(first: Any, other: Any) -> str:
    here, there = ({field.name: str(field.type) for field in one} for one in (first, other))
    name = next((k for k in [*here, *there] if here.get(k) != there.get(k)), None)
    if name is None:
        return "another order"
    return f"{name} is {here.get(name, 'not there')} here and {there.get(name, 'not there')} there"


def _item_kind(kind: Any) -> Literal["picture", "text"] | None:
    """What the values of an Arrow type are as items: encoded bytes, texts, or none."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        index = kind.get_field_index("bytes")
        found = _item_kind(kind.field(index).type) if index >= 0 else None
        return found if found == "picture" else None
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "picture"
    return "text" if _is_texts(kind) else None


def _item_column(table: _Table, column: str | None) -> _Item:
    kinds = {
        name: kind
        for name in table.names
        if (kind := _item_kind(table.type_of(name))) and table.feature(name) not in _NO_ITEMS
    }
    if column is not None:
        if table.require(column, "column") not in kinds:
            feature = table.feature(column)
            shown = feature if feature in _NO_ITEMS else short(str(table.type_of(column)))
            raise ConfigError(
                f"data.column={column} holds {shown}, neither pictures nor texts; choose one of: "
                f"{listed(kinds) or 'none here'}"
            )
        return _Item(column, kinds[column])
    pictures = [name for name, kind in kinds.items() if kind == "picture"]
    texts = [name for name, kind in kinds.items() if kind == "text"]
    named = [name for name in _TEXT_NAMES if name in texts]
    # As dictionaries, which pandas' categories are, texts are rather classes.
    plain = [name for name in texts if is_text(table.type_of(name))]
    likely = pictures or named[:1] or plain or texts
    if len(likely) == 1:
        return _Item(likely[0], kinds[likely[0]])
    if likely:
        what = "pictures" if pictures else "texts"
        raise ConfigError(
            f"the columns {listed(likely)} all hold {what}; choose one: data.column={likely[0]}"
        )
    raise DataError(
        f"no column holds pictures or texts; there are {listed(table.names) or 'none at all'}"
    )


def _label_column(table: _Table, label: str | None, taken: set[str | None]) -> str | None:
    if label == "none":
        return None
    if label is not None:
        return table.require(label, "label")
    free = [name for name in table.names if name not in taken]
    classes = [name for name in free if table.class_names(name) is not None]
    named = [name for name in free if is_label_name(name) and _is_label(table.type_of(name))]
    return only_label(classes or named, table.shown)


def _is_texts(kind: Any) -> bool:
    """Whether an Arrow type is one of texts, each of which may be kept once."""
    import pyarrow as pa

    return is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _is_label(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return is_text(kind) or bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


# --------------------------------------------------------------------------- columns


def _labels(table: _Table, name: str | None) -> tuple[Array | None, list[str], list[int] | None]:
    if name is None:
        return None, [], None
    values = table.values(name, "label")
    names = table.class_names(name)
    if _is_texts(table.type_of(name)):
        require_labels(values, f"column {name} of {table.shown}")
    if names is not None and (odd := _outside(values, len(names))) is not None:
        raise DataError(
            f"row {odd} has the label {values[odd]!r} of {name}, and that has {len(names)} names; "
            "mend it, or choose data.label=none"
        )
    none = (None,) if names is None else (None, -1)
    labels, told, numbers = counted_through(values, names, none=none)
    return (labels, told, numbers) if told else (None, [], None)


def _outside(values: Sequence[Any], n_names: int) -> int | None:
    """The first row whose value is no index into so many names."""
    return next((row for row, value in enumerate(values) if _is_outside(value, n_names)), None)


def _is_outside(value: Any, n_names: int) -> bool:
    is_index = isinstance(value, int) and not isinstance(value, bool)
    return value is not None and not (is_index and -1 <= value < n_names)


def _ids(table: _Table, name: str | None) -> Sequence[str]:
    if name is None:
        return RowNumbers(table.rows.n)
    values = table.values(table.require(name, "id"), "id")
    ids = ["" if value is None else str(value) for value in values]
    require_ids(ids, f"column {name} of {table.shown}")
    return ids


def _metadata(
    table: _Table, item: _Item, taken: set[str | None]
) -> tuple[dict[str, Any], list[str], list[str], list[str]]:
    """Columns beside items, labels and ids, and what is to be said of them.

    Returns:
        The columns; what has no place in one; which texts were cut; which numbers of classes have
        no name, or none of their own.
    """
    columns: dict[str, Any] = {}
    passed_over, cut, nameless = [], [], []
    for name in table.names:
        key, kind, is_item = name, table.type_of(name), name == item.name
        if name in taken or (is_item and item.kind == "picture"):
            continue
        if is_item:
            key = "text"
        elif name == "text" and item.kind == "text":
            while key in table.names:  # beside the texts that are the items
                key += "_"
        if not name or "\0" in name:
            passed_over.append(f"the column {name!r}, whose name no file keeps")
            continue
        if not has_place(kind):
            passed_over.append(f"the column {name} ({short(str(kind), most=40)})")
            continue
        column: Any
        if _is_texts(kind):
            column = table.rows.texts(name)
        elif names := table.class_names(name):
            names, told = told_apart(names)
            nameless += [f"{name}: {line}" for line in told]
            numbers = table.values(name, "column")
            bad = [row for row, i in enumerate(numbers) if _is_outside(i, len(names))]
            if bad:
                nameless.append(
                    f"{number_of(len(bad), 'row has', 'rows have')} in {name} a number that is "
                    f"none of its {len(names)} classes, the first {numbers[bad[0]]!r} in row "
                    f"{bad[0]}: it is kept as an empty text"
                )
            column = [
                "" if i in (None, -1) or _is_outside(i, len(names)) else names[i] for i in numbers
            ]
        else:
            column = table.rows.converted(name, from_arrow)
        columns[key], said = kept(column, key, is_item=is_item)
        cut += said
    return columns, passed_over, cut, nameless


# --------------------------------------------------------------------------- items


def _item_hashes(of_files: Array, n_rows: Sequence[int], n: int) -> Array:
    """Shape ``(n,)`` uint64: of a file that was changed, all rows are others."""
    step = np.uint64(0x9E3779B97F4A7C15)  # odd, so that rows of a file never meet
    parts = [
        seed + step * np.arange(rows, dtype=np.uint64)
        for seed, rows in zip(of_files, n_rows, strict=True)
    ]
    return np.concatenate(parts)[:n]


class _Reader:
    """Item i, from files that are opened when the first one of a process is read.

    Args:
        top: The folder of the data set.
        files: The path of each, its rows, and its bytes and mtime_ns.
        item: The column.
        beside: Which rows may be files beside these, and the number of each among them.
        read_beside: Reads such a file.
    """

    def __init__(
        self,
        top: str,
        files: tuple[tuple[str, int, tuple[int, int]], ...],
        item: _Item,
        beside: Mapping[int, int],
        read_beside: FileReader,
    ) -> None:
        self._top, self._files, self._item = top, files, item
        self._beside, self._read_beside = beside, read_beside
        self._starts = np.cumsum([0, *(n_rows for _, n_rows, _ in files)])
        self._forget()

    def _forget(self) -> None:
        self._opened: dict[int, RowFile] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __call__(self, i: int) -> Image.Image | str:
        number = int(np.searchsorted(self._starts, i, side="right")) - 1
        # A file cut short under its map would end the process: it is looked at before, too.
        self._require_unchanged(number)
        with self._lock:
            raw = self._file(number).cell(self._item.name, i - int(self._starts[number]))
        self._require_unchanged(number)
        if raw is None and i in self._beside:
            return self._read_beside(self._beside[i])
        if raw is None:
            raise DataError(f"it has no {self._item.kind} in the column {self._item.name}")
        return decode_bytes(raw) if self._item.kind == "picture" else require_text(raw.decode())

    def _file(self, number: int) -> RowFile:
        if number not in self._opened:
            name, n_rows, _ = self._files[number]
            opened = open_rows(Path(self._top, name), shown=name)
            require_unchanged(opened.n_rows == n_rows)
            if len(self._opened) >= _OPEN_MOST:
                del self._opened[next(iter(self._opened))]
            self._opened[number] = opened
        return self._opened[number]

    def _require_unchanged(self, number: int) -> None:
        name, _, stamp = self._files[number]
        require_unchanged(stamp_of(os.stat(os.path.join(self._top, name))) == stamp)
