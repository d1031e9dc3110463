"""Columns of tables in the types that a file of rows keeps: numbers, booleans, texts."""

import decimal
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from math import isnan
from typing import Any

import numpy as np

from embedx.errors import DataError, listed, number_of, short
from embedx.matrix import Array

Column = Array | list[str]

# A longer text is cut: a file has room for the longest text in every row.
TEXT_BYTES_MOST = 1024
COLUMNS_MOST = 4096
LABEL_NAMES = ("label", "labels", "class", "target", "targets")
_WHOLE = re.compile(r"0|-?[1-9]\d{0,18}", re.ASCII)  # 007 is a name, not a number
_NUMBER = re.compile(
    r"-?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?inf(inity)?|nan", re.ASCII
)
_BOOLEANS = {"true": True, "True": True, "TRUE": True} | dict.fromkeys(
    ("false", "False", "FALSE"), False
)
_DIGITS_KEPT = 15  # by float64, whatever they are
_SMALLEST = float(np.finfo(np.float64).smallest_normal)
_EXACT = 2**53  # the largest whole number up to which float64 has them all


def from_texts(texts: Sequence[str]) -> Column:
    """A column of cells of a text file in the narrowest type that says the same.

    Args:
        texts: n cells; an empty one is missing.

    Returns:
        Shape ``(n,)``: int64 where each cell is a whole number; float64 where each is a number or
        missing, which is NaN, no digit is lost, and no two that are written otherwise are one (but
        2 and 2.0); bool where each is true or false; else the texts as they are. So versions (1.1
        and 1.10) and hashes (1e5 and 10e4) are texts. A number with a leading zero or plus is a
        text, as codes and postcodes are.
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
    elif all(map(_is_number, present)) and not one_number(present):
        return np.array([float(text) if text else np.nan for text in texts], np.float64)
    return list(texts)


def _fits(numbers: Sequence[int]) -> bool:
    return min(numbers) >= -(2**63) and max(numbers) < 2**63


def one_number(texts: Sequence[str]) -> tuple[str, str] | None:
    """Two texts that are written otherwise and are one number, but for zeros behind a point.

    Returns:
        The first two; None where there are none, or not all are numbers or empty.
    """
    unique = [text for text in dict.fromkeys(texts) if text]
    if not all(map(_is_number, unique)):
        return None
    seen: dict[str, str] = {}
    for text in unique:
        if text.strip("-")[:1] in ("i", "I", "n", "N"):  # words for what is not finite
            continue
        written = re.sub(r"\.0*$", "", text)
        # As text, for -0.0 is written otherwise than 0.0 and equals it.
        other = seen.setdefault(repr(float(text)), text)
        if re.sub(r"\.0*$", "", other) != written:
            return other, text
    return None


def _is_number(text: str) -> bool:
    """Whether a text is a number that float64 holds as exactly as it is written."""
    if not _NUMBER.fullmatch(text.lower()):
        return False
    if len(re.sub(r"[eE].*|[-.]", "", text).strip("0")) > _DIGITS_KEPT:
        return decimal.Decimal(text) == decimal.Decimal(repr(float(text)))
    value = abs(float(text))
    if value < _SMALLEST:  # below it float64 drops digits, and in the end all
        return not re.search("[1-9]", re.sub(r"[eE].*", "", text))
    return value != np.inf or "inf" in text.lower()


def from_values(values: Sequence[Any]) -> Column | None:
    """A column of values as JSON has them, None for a missing one.

    Returns:
        Shape ``(n,)``: bool, int64 or float64 where all are such, missing numbers being NaN; else
        texts, a missing one being empty and others than texts as JSON writes them, 3.0 as 3. None
        where one is a list or an object.
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
    return list(map(_as_text, values))


def _as_text(value: Any) -> str:
    """A value of JSON among texts: a missing one is empty, and 3.0 is 3.

    So it reads the same whatever stood beside it: a whole number among others that are not is a
    float when texts join them.
    """
    if value is None or (isinstance(value, float) and isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def numbers_first(label: str) -> tuple[int, int, str]:
    """A key to sort labels by that are texts: whole numbers by size, then all others."""
    is_number = label.isascii() and label.isdecimal() and len(label) < 19
    return (0, int(label), label) if is_number else (1, 0, label)


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
            texts += map(_as_text, column.tolist())
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
        if is_text(column.type.value_type):
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
    if is_text(kind) or pa.types.is_string_view(kind) or is_plain:
        return ["" if text is None else text for text in column.cast(pa.string()).to_pylist()]
    return None


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is one of texts that lie one after the other."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def has_place(kind: Any) -> bool:
    """Whether a column of an Arrow type is one of numbers, booleans or texts."""
    import pyarrow as pa

    return not pa.types.is_nested(kind) and from_arrow(pa.array([], kind)) is not None


def plain_name(name: str) -> str:
    """A name in lower case without what separates words in it."""
    return re.sub(r"[\s_.-]", "", name).casefold()


def is_label_name(name: str) -> bool:
    """Whether what is called so is the labels."""
    return plain_name(name) in LABEL_NAMES


def require_fit(where: str, names: Sequence[str]) -> None:
    """Refuse names of columns that come twice, and more columns than a file keeps.

    Args:
        where: What has them, for the message.
        names: Of all columns; empty ones may come twice.

    Raises:
        DataError: There are such.
    """
    if len(names) > COLUMNS_MOST:
        raise DataError(
            f"{where} has {len(names):,} columns, and at most {COLUMNS_MOST:,} are read; keep "
            "those that say something of a sample"
        )
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise DataError(
            f"{where} has the column {short(twice[0])!r} {names.count(twice[0])} times; give each "
            "a name of its own"
        )


_UNSTORABLE = f"NUL in it, or more than {TEXT_BYTES_MOST:,} bytes"


def require_labels(texts: Sequence[str], where: str) -> None:
    """Refuse labels that a file cannot keep as they are.

    Args:
        texts: n labels.
        where: The column that has them, for the message.

    Raises:
        DataError: One is longer than a file keeps, or has NUL in it.
    """
    odd = next((text for text in dict.fromkeys(texts) if storable(text) != text), None)
    if odd is not None:
        raise DataError(
            f"a label in {where}, {short(repr(odd), most=40)}, has {_UNSTORABLE}; shorten it, or "
            "choose another column"
        )


def require_ids(texts: Sequence[str], where: str) -> None:
    """Refuse ids that do not tell rows apart, or that a file cannot keep as they are.

    Args:
        texts: n ids, one or more.
        where: The column that has them, for the message.

    Raises:
        DataError: One is empty, comes twice, is longer than a file keeps, or has NUL in it.
    """
    which, why = _unfit(texts)
    if why:
        raise DataError(
            f"the id {which} in {where} {why}; make the ids unique texts, or choose another column"
        )


def not_ids(texts: Sequence[str]) -> str:
    """Why :func:`require_ids` refuses them, empty where it does not."""
    which, why = _unfit(texts)
    return f"the id {which} {why}" if why else ""


def _unfit(texts: Sequence[str]) -> tuple[str, str]:
    """Which id is none, and why; empty where all are ids."""
    if "" in texts:
        return f"of row {texts.index('')}", "is empty"
    twice, count = Counter(texts).most_common(1)[0]
    if count > 1:
        return short(repr(twice), most=40), f"comes {count} times"
    odd = next((text for text in texts if storable(text) != text), "")
    return short(repr(odd), most=40), f"has {_UNSTORABLE}" if odd else ""


def whole_numbers(texts: Sequence[str]) -> list[int] | None:
    """The numbers that texts spell; None where there is none, or one is no whole number.

    Nor are they numbers where two texts, as 1 and 01, would be one.
    """
    numbers = [int(text) for text in texts] if _are_whole(texts) else []
    return numbers if numbers and len(set(numbers)) == len(set(texts)) else None


def _are_whole(texts: Collection[str]) -> bool:
    return all(re.fullmatch(r"-?\d{1,18}", text, re.ASCII) for text in texts)


def indexed(texts: Sequence[str]) -> tuple[Array, list[str]]:
    """Labels as indices ``(n,)`` int32 into their names, -1 for an empty text, and the names.

    The names are sorted, as numbers where all are whole ones.
    """
    unique = set(texts) - {""}
    numbers = _are_whole(unique)
    names = sorted(unique, key=lambda text: (int(text), text) if numbers else (0, text))
    index = {text: i for i, text in enumerate(names)}
    return np.array([index.get(text, -1) for text in texts], np.int32), names


def minus_one_told(label_names: Sequence[str], where: str) -> tuple[str, ...]:
    """That -1 is a class, where whole numbers are labels; many a program means none by it."""
    if "-1" not in label_names or not _are_whole(label_names):
        return ()
    return (f"-1 among the labels of {where} is a class of that name",)


def told_apart(
    names: Sequence[str], numbers: Sequence[int] | None = None
) -> tuple[list[str], list[str]]:
    """Names of classes of which each is one class, and what is to be said of those that were not.

    Two classes of one name, as the crane that flies and the one that lifts in ImageNet, would be
    one wherever names are shown, counted or coloured; one of no name would be no label.

    Args:
        names: Of n classes.
        numbers: The number of each; its place where None.

    Returns:
        The names, with the number behind those that come twice or are empty.
    """
    counts = Counter(names)
    if len(counts) == len(names) and "" not in counts:
        return list(names), []
    own = {name for name, n in counts.items() if n == 1 and name}
    taken, apart = set(own), []
    for name, number in zip(names, range(len(names)) if numbers is None else numbers, strict=True):
        new = name if name in own else f"{name} ({number})".strip()
        while new in taken and name not in own:
            new += f" ({number})"
        taken.add(new)
        apart.append(new)
    told = []
    for name, n in counts.items():
        if n > 1 or not name:
            others = [short(new) for one, new in zip(names, apart, strict=True) if one == name]
            what = f"are called {short(repr(name))}" if name else "without a name"
            told.append(f"{number_of(n, 'class', 'classes')} {what}: named {listed(others)} here")
    return apart, told


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


def spelled_label(value: Any) -> str:
    """A label as tables spell it: a truth value in small letters, "" for NaN."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value)).lower()
    return "" if isinstance(value, float) and isnan(value) else str(value)


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


def kept(column: Column, name: str, *, is_item: bool = False) -> tuple[Column, list[str]]:
    """A column as a file keeps it, and what is to be said of texts that are cut for that.

    Args:
        column: n numbers, booleans or texts.
        name: What it is called.
        is_item: Whether its texts are the items, too.
    """
    if not isinstance(column, list):
        return column, []
    column, n_cut = shortened(column)
    note = f"{n_cut:,} texts of {name} are cut to {TEXT_BYTES_MOST:,} bytes"
    note += "; the model gets them whole" if is_item else ""
    return column, [note] if n_cut else []
