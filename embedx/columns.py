"""Columns of tables in the types that a file of rows keeps: numbers, booleans, texts."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np

from embedx.matrix import Array

Column = Array | list[str]

# A longer text is cut: a file has room for the longest text in every row.
TEXT_BYTES_MOST = 1024
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,18})", re.ASCII)  # 007 is a name, not a number
_NUMBER = re.compile(r"-?(0|[1-9]\d*)?(\.\d*)?([eE][-+]?\d+)?|[-+]?inf(inity)?|nan", re.ASCII)
_BOOLEANS = {"true": True, "True": True, "TRUE": True} | dict.fromkeys(
    ("false", "False", "FALSE"), False
)
_EXACT = 2**53  # the largest whole number up to which float64 has them all


def from_texts(texts: Sequence[str]) -> Column:
    """A column of cells of a text file in the narrowest type that says the same.

    Args:
        texts: n cells; an empty one is missing.

    Returns:
        Shape ``(n,)``: int64 where each cell is a whole number; float64 where each is a number or
        missing, which is NaN, and no digit is lost; bool where each is true or false; else the
        texts as they are. A number with a leading zero or plus is a text, as codes and postcodes
        are.
    """
    present = [text for text in texts if text]
    if not present:
        return list(texts)
    if all(map(_WHOLE.fullmatch, present)):
        numbers = [int(text) for text in present]
        if len(present) == len(texts) and _fits(numbers):
            return np.array(numbers, np.int64)
        if max(map(abs, numbers)) <= _EXACT:
            return np.array([int(text) if text else np.nan for text in texts], np.float64)
    elif all(text in _BOOLEANS for text in present):
        if len(present) == len(texts):
            return np.array([_BOOLEANS[text] for text in texts], bool)
    elif all(_is_number(text) for text in present):
        return np.array([float(text) if text else np.nan for text in texts], np.float64)
    return list(texts)


def _fits(numbers: Sequence[int]) -> bool:
    return min(numbers) >= -(2**63) and max(numbers) < 2**63


def _is_number(text: str) -> bool:
    """Whether a text is a number that float64 holds as exactly as it is written."""
    if not _NUMBER.fullmatch(text.lower()) or not any(c.isdigit() or c in "fn" for c in text):
        return False
    digits = re.sub(r"[eE].*|[-.]", "", text).strip("0")
    return len(digits) <= 17 and (abs(float(text)) != np.inf or "inf" in text.lower())


def from_values(values: Sequence[Any]) -> Column | None:
    """A column of values as JSON has them, None for a missing one.

    Returns:
        Shape ``(n,)``: bool, int64 or float64 where all are such, missing numbers being NaN; else
        texts, a missing one being empty and others than texts as JSON writes them. None where one
        is a list or an object.
    """
    present = [value for value in values if value is not None]
    if any(isinstance(value, (list, dict)) for value in present):
        return None
    kinds = {type(value) for value in present}
    if kinds == {bool} and len(present) == len(values):
        return np.array(values, bool)
    if kinds and kinds <= {int, float}:
        if kinds == {int} and len(present) == len(values) and _fits(present):
            return np.array(values, np.int64)
        if all(abs(value) <= _EXACT for value in present if isinstance(value, int)):
            return np.array([np.nan if value is None else value for value in values], np.float64)
    return ["" if v is None else v if isinstance(v, str) else json.dumps(v) for v in values]


def concatenated(parts: Sequence[tuple[int, Column | None]]) -> Column:
    """Columns of one name one after the other.

    Args:
        parts: Of each how many rows it has, and the column; None where it has none, which is NaN
            among numbers and an empty text among texts.

    Returns:
        Numbers where all are numbers and stay what they are; else texts.
    """
    columns = [column for _, column in parts if column is not None]
    arrays = [np.asarray(column) for column in columns if not isinstance(column, list)]
    is_whole = len(columns) == len(parts)
    if len(arrays) == len(columns) and len({array.dtype.kind == "b" for array in arrays}) == 1:
        kinds = {array.dtype.kind for array in arrays}
        if is_whole and len(kinds) == 1:
            return np.concatenate(arrays)
        is_exact = all(
            array.dtype.kind == "f" or np.abs(array.astype(object)).max(initial=0) <= _EXACT
            for array in arrays
        )
        if "b" not in kinds and is_exact:
            return np.concatenate(
                [np.full(n, np.nan) if c is None else np.asarray(c, float) for n, c in parts]
            )
    texts: list[str] = []
    for n, column in parts:
        if column is None:
            texts += [""] * n
        elif isinstance(column, list):
            texts += column
        else:
            texts += ["" if isnan(v) else json.dumps(v) for v in column.tolist()]
    return texts


def from_arrow(column: Any) -> Column | None:
    """A column of an Arrow table in a type that a file keeps.

    Args:
        column: A ``ChunkedArray`` or ``Array`` of n values.

    Returns:
        Shape ``(n,)``: numbers and booleans as they are; with missing values whole numbers become
        float64 with NaN where that is exact, and texts where not, booleans texts; dates and times
        as ISO 8601 texts, with the offset of a zone; a missing text is empty. None for what has no
        place in a column: lists, structures, bytes.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if pa.types.is_dictionary(column.type):
        if _is_text(column.type.value_type):
            # Each text once: written out they may take many times the room of the file.
            texts = column.dictionary.to_pylist()
            return ["" if i is None else texts[i] or "" for i in column.indices.to_pylist()]
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_floating(kind):
        wide = pa.float32() if pa.types.is_float16(kind) else kind
        return np.asarray(column.cast(wide).to_numpy(zero_copy_only=False))
    if pa.types.is_integer(kind):
        if not column.null_count:
            return np.asarray(column.to_numpy(zero_copy_only=False))
        largest = pc.max(pc.abs(column.cast(pa.decimal128(20)))).as_py() or 0
        if largest <= _EXACT:
            return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    elif pa.types.is_boolean(kind) and not column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if pa.types.is_temporal(kind) and not (
        pa.types.is_duration(kind) or pa.types.is_interval(kind)
    ):
        texts = column.cast(pa.string()).to_pylist()
        return ["" if text is None else text.replace(" ", "T", 1) for text in texts]
    is_plain = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)
    if _is_text(kind) or is_plain:
        return ["" if text is None else text for text in column.cast(pa.string()).to_pylist()]
    return None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    types = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_of(kind) for is_of in types)


def indexed(texts: Sequence[str]) -> tuple[Array, list[str]]:
    """Labels as indices ``(n,)`` int32 into their names, -1 for an empty text, and the names.

    The names are sorted, as numbers where all are whole ones.
    """
    unique = set(texts) - {""}
    if all(re.fullmatch(r"-?\d{1,18}", text, re.ASCII) for text in unique):
        names = sorted(unique, key=lambda text: (int(text), text))
    else:
        names = sorted(unique)
    index = {text: i for i, text in enumerate(names)}
    return np.array([index.get(text, -1) for text in texts], np.int32), names


def unique_names(names: Sequence[str]) -> tuple[list[str], int]:
    """Each name as it is when it first comes, and then with ``#2``, ``#3``, ...

    Returns:
        n unique names, and how many had come before.
    """
    taken = set(names)
    counts: Counter[str] = Counter()
    unique = []
    for name in names:
        counts[name] += 1
        again = name
        while counts[name] > 1 and again in taken:
            again = f"{name}#{counts[name]}"
            counts[name] += again in taken
        taken.add(again)
        unique.append(again)
    return unique, len(names) - len(set(names))


def storable(name: str) -> str:
    """A text as an id or a label: without NUL, and not longer than a file keeps."""
    name = name.replace("\0", "\\x00")
    data = name.encode("utf-8", "backslashreplace")
    if len(data) <= TEXT_BYTES_MOST:
        return name
    # Room for what tells two of them apart.
    return data[: TEXT_BYTES_MOST - 24].decode("utf-8", "ignore") + "…"


def spelled(column: Any) -> Any:
    """A column of booleans as the texts true and false; any other as it is."""
    if isinstance(column, np.ndarray) and column.dtype.kind == "b":
        return ["true" if value else "false" for value in column.tolist()]
    return column


def shortened(texts: Sequence[str]) -> tuple[list[str], int]:
    """Texts of at most 1,024 bytes of UTF-8 without NUL, and how many had to be cut."""
    n_cut = 0
    kept = []
    cut: dict[str, str] = {}  # a text that comes again is kept once
    for given in texts:
        text = given.replace("\0", " ")
        data = text.encode("utf-8", "backslashreplace")
        if len(data) > TEXT_BYTES_MOST:
            n_cut += 1
            if text not in cut:
                cut[text] = data[: TEXT_BYTES_MOST - 3].decode("utf-8", "ignore") + "…"
            text = cut[text]
        kept.append(text)
    return kept, n_cut
