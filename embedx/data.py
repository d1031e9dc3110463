"""Sources that are at hand: a folder of pictures, what is in memory, the digits."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from embedx.errors import ConfigError, DataError, first_line, number_of
from embedx.pictures import SUFFIXES, upright_rgb
from embedx.sources import (
    Array,
    FileReader,
    PixelReader,
    RowNumbers,
    Source,
    as_array,
    classes_said,
    counted,
    counted_through,
    file_hashes,
    hashed_rows,
    item_hash,
    limited,
    name_of,
    random_put_back,
    random_states,
    require_item,
    require_texts,
    require_unchanged,
    row_blocks,
    scan,
    seed_random,
    whole_label,
)


def digits(*, limit: int | None = None) -> Source:
    """scikit-learn's 1,797 handwritten digits of 8x8 px, in memory, ten classes.

    Args:
        limit: Take the first so many.

    References:
        Alpaydin, Kaynak 1998, Optical Recognition of Handwritten Digits, UCI.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    n = limited(len(loaded.images), limit)
    pixels = (loaded.images[:n] * (255 / 16)).round().astype(np.uint8)
    return Source(
        name="digits",
        ids=[f"digit-{i:04d}" for i in range(n)],
        read=PixelReader(pixels),
        fingerprint=hashlib.sha256(pixels.tobytes()).hexdigest(),
        labels=loaded.target[:n].astype(np.int32),
        label_names=[str(name) for name in loaded.target_names],
        label_numbers=range(len(loaded.target_names)),
        notes=(f"digits: {n:,} pictures of 8x8 px, 10 classes",),
    )


def folder(root: str, *, limit: int | None = None, labels: str = "folder") -> Source:
    """Every picture below a folder, sorted by its path.

    Ids are paths relative to ``root`` with ``/``; the first level of folders gives the labels.
    Hidden files, other kinds of files, and folders that embedx wrote are passed over and counted.

    Args:
        root: The folder.
        limit: Take the first so many.
        labels: ``folder``, ``none`` to have no labels, or a regular expression that is searched in
            each id: its group ``label``, or else its first group, is the label. An id in which it
            is not found has none.

    Raises:
        ConfigError: ``labels`` is no regular expression or has no group.
        DataError: The folder is missing, is not one, or holds no picture, or ``labels`` is found
            in no id.
    """
    expression = None if labels in ("none", "folder") else _expression(labels)
    if not root:
        raise DataError("data.root is empty; name a folder of pictures")
    top = Path(root).expanduser()
    if not top.is_dir():
        what = "is not a folder" if top.exists() else "is not there"
        raise DataError(f"data.root {root} {what}; name a folder of pictures")
    found, passed_over = scan(top, SUFFIXES)
    where = counted(passed_over)
    if not found:
        raise DataError(
            f"data.root {root} holds no picture ({where or 'it is empty'}); embedx reads "
            + " ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        )
    n = limited(len(found), limit)
    items = found[:n]
    ids = [name for name, _, _ in items]
    if expression is not None:
        classes = _searched(expression, ids)
    elif labels == "folder":
        classes = [name.split("/", 1)[0] if "/" in name else "" for name in ids]
    else:
        classes = [""] * n
    indices, label_names, _ = counted_through(classes, None)
    fingerprint, hashes = file_hashes(items)
    note = f"{root}: {number_of(n, 'picture', 'pictures')}, {classes_said(label_names)}"
    if n < len(found):
        note += f", the first of {len(found):,}"
    unlabelled = sum(name == "" for name in classes)
    if label_names and unlabelled:
        note += f", {unlabelled:,} " + ("outside any class" if expression is None else "unlabelled")
    return Source(
        name=name_of(top) or "folder",
        ids=ids,
        read=FileReader(str(top), tuple(ids), hashes),
        fingerprint=fingerprint,
        item_hashes=hashes,
        labels=indices if label_names else None,
        label_names=label_names,
        notes=(note, *((f"passed over: {where}",) if where else ())),
        root=top,
        reads_files=True,
    )


_LABEL_CHOICES = (
    "choose none, folder, or a regular expression whose group is the label, such as "
    "labels='(cat|dog)'"
)


def _expression(labels: str) -> re.Pattern[str]:
    try:
        expression = re.compile(labels)
    except re.error as error:
        raise ConfigError(
            f"data.labels={labels!r} is no regular expression ({error}); {_LABEL_CHOICES}"
        ) from None
    if not expression.groups:
        raise ConfigError(f"data.labels={labels!r} has no group; {_LABEL_CHOICES}")
    return expression


def _searched(expression: re.Pattern[str], ids: Sequence[str]) -> list[str]:
    """The label in each id, "" for none."""
    group = "label" if "label" in expression.groupindex else 1
    found = [expression.search(name) for name in ids]
    labels = [(match[group] or "") if match else "" for match in found]
    if not any(labels):
        raise DataError(
            f"data.labels={expression.pattern!r} is found in none of the {len(ids):,} ids, such "
            f"as {ids[0]!r}; {_LABEL_CHOICES}"
        )
    return labels


def in_memory(
    items: Any,
    *,
    labels: Sequence[Any] | None = None,
    ids: Sequence[str] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    look: Callable[[Callable[[], "Looked"]], "Looked"] | None = None,
) -> Source:
    """An array or tensor of samples, or a map-style ``Dataset``, as a source.

    Labels that are not given are those in the attribute ``targets`` of a Dataset, in the second
    tensor of a ``TensorDataset`` if that is one whole number a sample, those of the parts of a
    ``Subset`` or ``ConcatDataset``, or else whole numbers in the items. An attribute ``classes``
    names them.

    Of a ``Dataset`` 16 items are read, evenly spread: whatever is told of it is seen on these.

    Args:
        items: Shape ``(n, ...)``, or an object with ``__len__`` and ``__getitem__`` whose items
            are inputs, or tuples that begin with the input and the label.
        labels: n labels of any kind that sorts; the empty text is none.
        ids: n unique texts; where they are not given the paths that an ``ImageFolder`` has, else
            row numbers.
        collate: Makes of a list of b items a tensor ``(b, ...)``, or a tuple or list that begins
            with one; items are stacked where it is not given.
        look: Where the items are read that are looked at, as a function that calls the one it is
            given: in another process, if others will read the rest; here where it is not given.

    Raises:
        ConfigError: ``collate`` gives something else, or not in the order of its items.
        DataError: Empty, or without a length, lengths that differ, labels that do not sort or are
            not those in the items, or an id given twice.
    """
    _check_usable(items)
    n = len(items)
    if n == 0:
        raise DataError("data is empty; give at least one sample")
    kind = type(items).__name__.lower()
    values = as_array(items)
    if values is not None and values.dtype.hasobject:  # its bytes are addresses of its items
        values = None
    found = _targets(items) if labels is None else None
    looked = None
    if values is None:
        at_it = functools.partial(_look, items, collate, takes_labels=labels is None and not found)
        looked = look(at_it) if look is not None else at_it()
    classes: Sequence[Any] | None = None
    names: list[str] = []
    numbers: list[int] | None = None
    aloud = [] if looked is None else _told(looked, kind, is_collated=collate is not None)
    seen: list[int] | None = None
    if labels is None:
        classes = _classes(items)
        if found is not None:
            labels, classes = found
            if looked is not None:
                _require_labels_of_items(labels, looked, kind)
                if not looked.are_labelled and _are_of_another(items):
                    aloud.append(
                        f"the labels of {kind} are the targets of the Dataset that it wraps, and "
                        "its items, which may be in another order, have none to tell; labels= "
                        "gives others"
                    )
        elif looked is not None and looked.are_labelled:
            seen = list(looked.labels.values())
            aloud += _require_one_meaning(items, kind)
            why = "" if classes is None else relabels(items, looked.labels)
            if why:
                aloud.append(
                    f"the labels in the items of {kind} are not told by its classes, for {why}: "
                    "they are plain numbers; labels= gives others"
                )
            elif classes is not None and max(seen) < len(classes):
                names, numbers = [str(name) for name in classes], list(range(len(classes)))
            if -1 in seen:
                aloud.append(f"-1 in the items of {kind} is taken for no label")
        elif looked is not None and looked.are_pairs and not looked.n_parts:
            aloud.append(f"the labels in the items of {kind} are not read; give them as labels=")
        if found is None and _is_long(getattr(items, "targets", None), n):
            aloud.append(
                f"the targets of {kind} are not one number or text a sample and are passed over; "
                "labels= gives others"
            )
    labels, ids = _listed(labels, "labels"), _listed(ids, "ids")
    for what, given in (("labels", labels), ("ids", ids)):
        if given is not None and len(given) != n:
            raise DataError(f"data has {n} samples and {len(given)} {what}; give one each")
    if ids is not None:
        require_texts(ids, "the ids")
    if ids is not None and len(set(ids)) != n:
        twice, count = Counter(ids).most_common(1)[0]
        raise DataError(f"the id {twice!r} is given {count} times; make every id unique")
    indices: Array | None = None
    if labels is not None:
        indices, names, numbers = counted_through(labels, classes)
        if "-1" in names and "-1" not in labels:
            aloud.append(
                f"-1 among the labels of {kind} is a class of that name; for none give texts, ''"
            )
    if ids is None and (ids := _paths(items)) is None and _has_paths(items):
        aloud.append(
            f"{kind} has a __getitem__ of its own, whose items need not be those of its paths: the "
            "ids are row numbers, and labels those of its targets, if it has any; ids= and labels= "
            "give others"
        )
    note = f"{kind}: {n:,} samples, "
    note += "labels in the items" if seen else classes_said(names)
    hashes = None
    if looked is not None:
        fingerprint = looked.fingerprint
        note += f"; whether they changed is seen on {min(n, _DIGEST_ITEMS)} of them"
    else:
        assert values is not None
        fingerprint, hashes = hashed_rows(values, _form(items, values))
    return Source(
        name=kind,
        ids=RowNumbers(n) if ids is None else list(ids),
        read=ItemReader(
            items,
            hashes=hashes,
            gives_all=collate is not None,
            gives_label=bool(seen),
            n_names=len(names),
        ),
        fingerprint=fingerprint,
        item_hashes=hashes,
        labels=indices if names else None,
        label_names=names,
        label_numbers=numbers,
        labels_in_items=bool(seen),
        collate=collate,
        draws=looked is not None and looked.draws,
        notes=(note,),
        warnings=tuple(aloud),
    )


def _check_usable(items: Any) -> None:
    kind = type(items).__name__
    if getattr(items, "is_nested", False):  # which has no shape to ask for
        raise DataError("data is a nested tensor; give a list of tensors, list(data.unbind())")
    if hasattr(items, "iloc") or (hasattr(items, "columns") and hasattr(items, "to_numpy")):
        raise DataError(f"data is a {kind}; give its values, data.to_numpy(), and its labels")
    if isinstance(items, Iterator):
        raise DataError(
            f"data is a {kind}, which has no length and no order to come back to; give a list of "
            "it, list(data), an array or a Dataset"
        )
    is_sequence = hasattr(items, "__len__") and hasattr(items, "__getitem__")
    if not is_sequence or isinstance(items, (str, bytes, Mapping)):
        raise DataError(
            f"data is a {kind}; give a folder, an array, a tensor or a Dataset with __len__ and "
            "__getitem__"
        )
    if hasattr(items, "toarray"):  # of SciPy
        raise DataError(f"data is a sparse {kind}; give data.toarray()")
    if getattr(items, "shape", None) == ():
        raise DataError("data is a single number; give at least one sample")


def _has_paths(items: Any) -> bool:
    return isinstance(getattr(items, "samples", None), list) and hasattr(items, "root")


def _paths(items: Any) -> list[str] | None:
    """The paths of a Dataset of files, as ``ImageFolder`` keeps them, relative to its root.

    Only where its items are read by the code of torchvision: another may have another order.
    """
    if not str(getattr(type(items).__getitem__, "__module__", "")).startswith("torchvision."):
        return None
    samples, root = getattr(items, "samples", None), getattr(items, "root", None)
    if not isinstance(samples, list) or len(samples) != len(items) or not isinstance(root, str):
        return None
    paths = [sample[0] if isinstance(sample, tuple) and sample else None for sample in samples]
    if not all(isinstance(path, str) for path in paths) or len(set(paths)) != len(paths):
        return None
    relative = [os.path.relpath(str(path), root).replace(os.sep, "/") for path in paths]
    return None if any(path.startswith("../") for path in relative) else relative


def _listed(values: Any, what: str) -> list[Any] | None:
    """Labels or ids of any container as a list."""
    if values is None:
        return None
    if isinstance(values, (Mapping, Set, str, bytes)):
        raise DataError(
            f"{what} is a {type(values).__name__}, which has no entry a sample in order; give a "
            "list, one a sample"
        )
    array = as_array(values)
    if array is not None and array.ndim != 1:
        raise DataError(f"{what} have shape {array.shape}; give one number or text a sample")
    try:
        return list(values) if array is None else list(array.tolist())
    except TypeError:
        raise DataError(f"{what} is a {type(values).__name__}; give a list, one a sample") from None


def _is_of_torch(items: Any, kind: str) -> bool:
    """Whether it is one of the Datasets of torch, which is not imported to ask."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(items, getattr(torch_data, kind))


def named_by_number(classes: list[Any], items: Any) -> list[Any]:
    """The names of the classes of a Dataset in the order of its numbers.

    Args:
        classes: As the Dataset lists them.
        items: The Dataset; where it has a ``class_to_idx`` that says otherwise, as one whose
            ``find_classes`` gives the numbers of a model, that holds: its labels are made by it.

    Raises:
        DataError: That gives two names one number, or a number that is none of a class.
    """
    number_of_class: Any = getattr(items, "class_to_idx", None)
    if not isinstance(number_of_class, Mapping) or not number_of_class:
        return classes
    listed_at = {name: i for i, name in enumerate(classes) if isinstance(name, str)}
    if all(number_of_class.get(name, i) == i for name, i in listed_at.items()):
        return classes
    names = {number: name for name, number in number_of_class.items()}
    are_numbers = all(
        isinstance(number, (int, np.integer)) and 0 <= number < 10**6 for number in names
    )
    if not are_numbers or len(names) < len(number_of_class):
        raise DataError(
            f"classes and class_to_idx of {type(items).__name__.lower()} contradict each other; "
            "give labels=, one text a sample"
        )
    return [names.get(number, str(number)) for number in range(max(names) + 1)]


def _classes(items: Any) -> Sequence[Any] | None:
    """The names of the classes of a Dataset, or of all those that it wraps, if they are the same.

    Of parts that name the first few of the classes of another, it is that one's.
    """
    of_parts = _classes_of_parts(items)
    known = [names for names in of_parts if names is not None]
    if not known or len(known) < len(of_parts):
        return None
    longest = max(known, key=len)
    return longest if all(names == longest[: len(names)] for names in known) else None


def _classes_of_parts(items: Any) -> list[list[Any] | None]:
    """The names of the classes of each Dataset that a ``Subset`` or ``ConcatDataset`` is of."""
    classes: Any = getattr(items, "classes", None)
    if classes is None and _is_of_torch(items, "Subset"):
        return _classes_of_parts(items.dataset)
    if classes is None and _is_of_torch(items, "ConcatDataset"):
        return [names for part in items.datasets for names in _classes_of_parts(part)]
    is_list = isinstance(classes, (Sequence, np.ndarray)) and not isinstance(classes, str)
    return [named_by_number(list(classes), items) if is_list else None]


def _require_one_meaning(items: Any, kind: str) -> list[str]:
    """Refuse labels in items whose numbers stand for other classes in other parts of a Dataset.

    Returns:
        What is to be said where some parts name their classes and others do not.

    Raises:
        DataError: Two parts name one number otherwise.
    """
    of_parts = _classes_of_parts(items)
    named = [names for names in of_parts if names is not None]
    for names in named:
        for number, (one, other) in enumerate(zip(named[0], names, strict=False)):
            if one != other:
                raise DataError(
                    f"the parts of {kind} name their classes otherwise: {number} is {one!r} in one "
                    f"and {other!r} in another; give labels=, one text a sample"
                )
    if not named or len(named) == len(of_parts):
        return []
    return [
        f"some parts of {kind} name their classes and others do not: labels are plain numbers, the "
        "same number one class; labels= gives others"
    ]


def _targets(items: Any) -> tuple[list[Any], Sequence[Any] | None] | None:
    """The labels that a Dataset can tell without reading its items, and its classes."""
    n = len(items)
    targets: Any = getattr(items, "targets", None)
    if (own := _one_each(targets, n)) is not None:
        return own, _classes(items)
    if _is_of_torch(items, "TensorDataset") and len(items.tensors) > 1:
        second = as_array(items.tensors[1])
        if second is not None and second.ndim == 1 and second.dtype.kind in "iu":
            return second.tolist(), None
    if _is_of_torch(items, "Subset") and (whole := _targets(items.dataset)) is not None:
        return [whole[0][int(i)] for i in items.indices], whole[1]
    if _is_of_torch(items, "ConcatDataset"):
        parts = [_targets(part) for part in items.datasets]
        known = [part for part in parts if part is not None]
        return _joined(known) if len(known) == len(parts) else None
    return None


def _are_of_another(items: Any) -> bool:
    """Whether the targets of a Dataset are those of one within it, whose order may be another.

    So they are where a ``__getattr__`` hands them on, and in a class of one's own on top of a
    wrapper of torch.
    """
    wrapped = [items.dataset] if _is_of_torch(items, "Subset") else []
    wrapped = items.datasets if _is_of_torch(items, "ConcatDataset") else wrapped
    if inspect.getattr_static(items, "targets", None) is not None:
        return False
    if not wrapped and not _is_of_torch(items, "TensorDataset"):
        return True
    is_own = not str(type(items).__getitem__.__module__).startswith("torch.")
    return is_own or any(_are_of_another(part) for part in wrapped)


def _is_long(values: Any, n: int) -> bool:
    return hasattr(values, "__len__") and getattr(values, "shape", None) != () and len(values) == n


def _one_each(targets: Any, n: int) -> list[Any] | None:
    """The numbers or texts of n targets; None where those are something else, as sets of labels."""
    if not _is_long(targets, n):
        return None
    array = as_array(targets)
    if isinstance(targets, (Mapping, Set)) or (array is not None and array.ndim != 1):
        return None
    values = _listed(targets, "targets") or []
    for i, value in enumerate(values):
        one = as_array(value)
        if isinstance(value, (list, tuple, Mapping, Set)) or (one is not None and one.size != 1):
            return None
        values[i] = value if one is None else one.item()
    return values


def _joined(
    parts: Sequence[tuple[list[Any], Sequence[Any] | None]],
) -> tuple[list[Any], Sequence[Any] | None]:
    """Labels one after the other; as texts where the parts have other names for a number."""
    classes = parts[0][1]
    if all(names == classes for _, names in parts):
        return [label for labels, _ in parts for label in labels], classes
    texts = []
    for labels, names in parts:
        known = {str(i): str(name) for i, name in enumerate(names or ())}
        texts += [known.get(str(label), str(label)) for label in labels]
    return texts, None


def _require_labels_of_items(labels: Sequence[Any], looked: "Looked", kind: str) -> None:
    """Refuse labels that a Dataset tells of itself where its items say others.

    Raises:
        DataError: They differ: it may relabel what it gives, or give other numbers than labels.
    """
    for row, label in looked.labels.items():
        told = labels[row]
        if hasattr(told, "item"):  # a number of NumPy or of torch
            told = told.item()
        if isinstance(told, (int, float)) and told != label:
            raise DataError(
                f"the label of row {row} of {kind} is {told} by its targets and {label} in its "
                "item; say which are right with labels=, such as labels=[y for _, y in data]"
            )


def relabels(items: Any, labels: Mapping[int, int]) -> str:
    """Why the numbers in the items of a Dataset need not be those of its ``classes``; "" if none.

    Args:
        items: The Dataset.
        labels: Some labels as its items have them, by row.
    """
    if _is_of_torch(items, "Subset"):
        return relabels(items.dataset, {int(items.indices[row]): labels[row] for row in labels})
    if _is_of_torch(items, "ConcatDataset"):
        start = 0
        for part in items.datasets:
            rows = range(start, start + len(part))
            own = {row - start: label for row, label in labels.items() if row in rows}
            if why := relabels(part, own):
                return why
            start = rows.stop
        return ""
    if getattr(items, "target_transform", None) is not None:
        return "it has a target_transform"
    for key in ("_labels", "labels"):
        told: Any = getattr(items, key, None)
        if isinstance(told, (list, np.ndarray)) and len(told) == len(items):
            odd = [row for row, label in labels.items() if told[row] != label]
            if odd:
                return f"its {key} say {told[odd[0]]} of row {odd[0]} and the item {labels[odd[0]]}"
    return ""


def _label(raw: Any, n_names: int = 0) -> int:
    """The label in an item: see :func:`~embedx.sources.whole_label`."""
    return whole_label(raw[1] if isinstance(raw, tuple) and len(raw) > 1 else None, n_names=n_names)


def _form(item: Any, values: Array) -> str:
    """The type of an array or tensor, also of one that NumPy does not have, such as bfloat16."""
    return str(getattr(item, "dtype", values.dtype)).removeprefix("torch.")


# What tells a Dataset, where reading all of it would cost a pass.
_DIGEST_ITEMS = 16
_READ_TWICE = 3


@dataclasses.dataclass(frozen=True)
class Looked:
    """What some items of a Dataset tell of it.

    Attributes:
        fingerprint: Hash of them as they enter the model, and of the labels in them if they count.
        labels: The whole numbers that stand where a label does, by row.
        are_labelled: Whether each item that could be read has one.
        are_pairs: Whether some item has anything there.
        draws: Whether reading or collating draws random numbers.
        is_unsteady: Whether an item is another when it is read again, all the same.
        are_padded: Whether collating makes an item longer beside another, and gives no mask.
        n_parts: How many parts an item or what is collated has, of which some are left out that
            the network may want; 0 where there are none.
    """

    fingerprint: str
    labels: dict[int, int]
    are_labelled: bool
    are_pairs: bool
    draws: bool
    is_unsteady: bool
    are_padded: bool = False
    n_parts: int = 0


def _told(looked: Looked, kind: str, *, is_collated: bool) -> list[str]:
    """What the user should be told aloud."""
    told = []
    if looked.n_parts:
        what = "the collate_fn of {} gives {} parts" if is_collated else "items of {} have {} parts"
        told.append(
            f"{what.format(kind, looked.n_parts)}, of which the first enters the network, the "
            "second is the label if it is one number, and all else is left out; if the network "
            "takes more of them, give a dict by the names of its arguments"
        )
    if looked.are_padded:
        told.append(
            f"the collate_fn of {kind} pads the samples of a batch to one length and gives no mask "
            "with them: padding counts as tokens, and rows may hang on the longest of their batch; "
            "let it give a dict with an attention_mask, or take batch_size=1"
        )
    if looked.is_unsteady:
        told.append(
            f"an item of {kind} is another when it is read again: its rows are not the same in "
            "another run, nor after an interruption"
        )
    elif looked.draws:
        told.append(
            f"the items of {kind} are drawn at random: row i is drawn from seed i, in every run"
        )
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        told.append(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: pictures of which the half is missing "
            f"pass for whole in {kind}"
        )
    return told


def _look(items: Any, collate: Callable[[list[Any]], Any] | None, *, takes_labels: bool) -> Looked:
    """Read some items of a Dataset, evenly spread.

    Raises:
        ConfigError: ``collate`` gives no inputs, or not in the order of its items.
        DataError: Items change while others are read, and ``collate`` takes several at once.
    """

    def hashed(make: Callable[[Any], Any], raw: Any) -> bytes:
        digest = hashlib.sha256()
        try:
            _update(digest, str(raw) if isinstance(raw, BaseException) else make(raw))
        except ConfigError:
            raise
        except Exception as error:  # a row that cannot be read fails later, and by itself
            _update(digest, str(error))
        return digest.digest()

    def read(row: int, *, seed: int | None = None) -> tuple[Any, bytes, bytes]:
        seed_random(row if seed is None else seed)
        before = random_states()
        try:
            raw = items[row]
            require_item(raw)
        except (Exception, SystemExit) as error:
            raw = error
        item = entered = hashed(_input, raw)
        if collate is not None:
            entered = hashed(lambda raw: collated(collate([_apart(raw)])), raw)
        drawn.append(random_states() != before)
        return raw, item, entered

    n = len(items)
    rows = sorted({round(j * (n - 1) / (_DIGEST_ITEMS - 1)) for j in range(_DIGEST_ITEMS)})
    drawn: list[bool] = []
    together: list[bytes] = []
    are_padded = False
    with random_put_back():
        sample = {row: read(row) for row in rows}
        good = {row: raw for row, (raw, *_) in sample.items() if not isinstance(raw, BaseException)}
        first = next(iter(good), None)
        if collate is not None and first is not None:
            changed = (row for row in good if hashed(_input, good[row]) != sample[row][1])
            if (row := next(changed, None)) is not None:
                raise DataError(
                    f"item {row} of the Dataset changed when others were read, as if it filled "
                    "one buffer again and again, and the collate_fn takes several at once; let "
                    "__getitem__ give a copy"
                )
            together = _require_order_kept(list(good.values()), collate)
            are_padded = _are_padded(list(good.values()), collate)
        n_parts = _parts_of(good, collate)
        few = list(good)[:_READ_TWICE]
        is_unsteady = any(read(row)[1:] != sample[row][1:] for row in few)
        # By torch.initial_seed(), say, from which an item seeds a generator of its own.
        by_seed = (read(row, seed=row + n)[1:] != sample[row][1:] for row in few)
        drawn.append(not is_unsteady and any(by_seed))
    labels = {}
    for row, raw in good.items():
        with contextlib.suppress(DataError):
            labels[row] = _label(raw)
    are_labelled = bool(labels) and len(labels) == len(good)
    name = f"{type(items).__module__}.{type(items).__qualname__} {n}"
    digest = hashlib.sha256(name.encode())
    if takes_labels and are_labelled:
        digest.update(f"{list(labels.values())}".encode())
    for _, item, entered in sample.values():
        digest.update(item + entered)
    for slot in together:
        digest.update(slot)
    return Looked(
        fingerprint=digest.hexdigest(),
        labels=labels,
        are_labelled=are_labelled,
        are_pairs=any(_has_label(raw) for raw in good.values()),
        draws=any(drawn),
        is_unsteady=is_unsteady,
        are_padded=are_padded,
        n_parts=n_parts,
    )


def _parts_of(good: Mapping[int, Any], collate: Callable[[list[Any]], Any] | None) -> int:
    """How many parts items have, where one beside the first may be for the network.

    An array may be, or a number after the second part, which is the label; but not the number of
    the row, or a path.
    """
    for row, raw in good.items():
        parts = raw
        if collate is not None:
            parts = None
            with contextlib.suppress(Exception):  # of odd items it may fail, as their batch does
                parts = collate([_apart(raw)])
        if not isinstance(parts, (tuple, list) if collate is not None else tuple):
            continue
        for place, part in enumerate(parts[1:], start=1):
            values = None
            with contextlib.suppress(DataError):
                values = np.asarray(part) if isinstance(part, (int, float)) else as_array(part)
            if values is None or values.dtype.kind not in "fiub":
                continue
            if values.size != 1 or (place > 1 and values.reshape(-1)[0] != row):
                return len(parts)
    return 0


def _has_label(raw: Any) -> bool:
    """Whether something stands beside the input of an item, or goes by the name of a label."""
    if isinstance(raw, Mapping):
        named = (raw[key] for key in ("label", "labels", "target", "targets") if key in raw)
        return any(np.ndim(value) == 0 for value in named)
    return isinstance(raw, tuple) and len(raw) > 1


def copied(item: Any) -> Any:
    """An item that shares nothing with another: a ``collate_fn`` may work in place on both.

    Raises:
        DataError: It cannot be copied.
    """
    try:
        return copy.deepcopy(item)
    except Exception as error:  # each type raises its own
        raise DataError(
            f"an item of the Dataset cannot be copied ({first_line(error)}); let __getitem__ give "
            "plain values, and tensors detached"
        ) from None


def _apart(item: Any) -> Any:
    """A copy of an item, where there can be one."""
    try:
        return copied(item)
    except DataError:
        return item


def _are_padded(good: Sequence[Any], collate: Callable[[list[Any]], Any]) -> bool:
    """Whether a ``collate_fn`` makes an item longer beside another, and gives no mask with them."""

    def shapes(*items: Any) -> list[tuple[int, ...]]:
        seed_random(0)
        inputs = collated(collate([_apart(item) for item in items]))
        if isinstance(inputs, Mapping):
            if any("mask" in str(name) for name in inputs):
                return []
            inputs = list(inputs.values())
        parts = inputs if isinstance(inputs, list) else [inputs]
        return [array.shape[1:] for array in map(as_array, parts) if array is not None]

    with contextlib.suppress(Exception):  # of odd items it may fail, and then their batch does
        return any(shapes(one) != shapes(one, other) for one, other in itertools.pairwise(good))
    return False


def _require_order_kept(good: Sequence[Any], collate: Callable[[list[Any]], Any]) -> list[bytes]:
    """Refuse a ``collate_fn`` with an order of its own, as some sort by length.

    Of a batch of one item twice and another once, the slots that are equal are looked at: whatever
    a batch is padded to, and whatever else the function does, they are those of the one item.

    Returns:
        A hash of each slot of these batches: what the function makes of several items.

    Raises:
        ConfigError: Other slots are.
    """

    def slots(*items: Any) -> list[tuple[bytes, list[Any]]]:
        """A hash of each, and its shapes."""
        seed_random(0)
        try:
            inputs = collated(collate([_apart(item) for item in items]))
            parts = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
            arrays = [array for array in map(as_array, parts) if array is not None]
            found = []
            for i in range(len(items) if arrays else 0):
                digest = hashlib.sha256()
                for array in arrays:
                    _update(digest, array[i])
                found.append((digest.digest(), [np.shape(array[i]) for array in arrays]))
        except ConfigError:
            raise
        except Exception:  # of odd items it may fail, and then their batch does
            return []
        return found

    def is_left_out(one: Any, other: Any, slot: Any) -> bool:
        """Whether all slots of a batch of both are those of the other, and the one has none."""
        return slots(other, other, other)[:1] == [slot] and not slots(one, one, one)

    found = []
    none: tuple[bytes, list[Any]] = b"", []
    for pair in itertools.pairwise(good):
        for one, other in (pair, pair[::-1]):
            first, second, third = slots(one, one, other) or [none] * 3
            found += [first[0], second[0], third[0]]
            if (first != second and third in (first, second)) or (
                first == second == third != none and is_left_out(one, other, first)
            ):
                raise ConfigError(
                    "the collate_fn of the DataLoader puts the samples of a batch in an order of "
                    "its own, or leaves some out, so that rows could not be told whose they are; "
                    "let it keep all in their order"
                )
            alone = (slots(one, one, one) or [first])[0]
            if first != alone and first[1] == alone[1] and third[0]:
                raise ConfigError(
                    "the collate_fn of the DataLoader makes something else of a sample beside "
                    "another one, as MixUp or a normalization over the batch does, so that its row "
                    "would be of both; let it take each by itself"
                )
    return found


def _update(digest: "hashlib._Hash", item: Any) -> None:
    """Add an item to a hash, by its values as far as they can be read."""
    if isinstance(item, Mapping):
        for key, value in item.items():
            digest.update(f"{key!r}:".encode("utf-8", "backslashreplace"))
            _update(digest, value)
        return
    if isinstance(item, (list, tuple)):
        digest.update(f"{type(item).__name__} {len(item)}:".encode())
        for value in item:
            _update(digest, value)
        return
    values = np.asarray(item) if isinstance(item, Image.Image) else as_array(item)
    if values is None:
        item = item if isinstance(item, (str, bytes, int, float)) else type(item).__qualname__
        digest.update(repr(item).encode("utf-8", "backslashreplace"))
        return
    if values.dtype.hasobject:  # the bytes would be addresses
        _update(digest, values.tolist())
        return
    digest.update(f"{values.shape} {_form(item, values)}".encode())
    for block in row_blocks(values.reshape(1) if values.ndim == 0 else values):
        digest.update(block.tobytes())


def collated(batch: Any) -> Any:
    """The inputs in what a ``collate_fn`` gives: a tensor, a mapping, or the first of several.

    Raises:
        ConfigError: There is none.
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(inputs, Mapping) and as_array(inputs) is None:
        raise ConfigError(
            f"the collate_fn of the DataLoader gives a {type(batch).__name__}; let it give a "
            "tensor, a dict of tensors by the names of the model's arguments, or a tuple that "
            "begins with one"
        )
    return inputs


def _input(raw: Any) -> Any:
    first = raw[0] if isinstance(raw, tuple) else raw
    return upright_rgb(first) if isinstance(first, Image.Image) else first


@dataclasses.dataclass(frozen=True)
class ItemReader:
    """Item i of an array, a tensor or a Dataset, if its row is as it was when it was hashed.

    Attributes:
        items: Where they are.
        hashes: Of the rows of an array, shape ``(n,)``, by :func:`~embedx.sources.hashed_rows`;
            None of a Dataset.
        gives_all: Whether an item is given whole, and not the input in it.
        gives_label: Whether the label in an item is given too.
        n_names: How many names there are for labels, 0 for any.
    """

    items: Any
    hashes: Array | None
    gives_all: bool
    gives_label: bool
    n_names: int

    def __call__(self, i: int) -> Any:
        if self.hashes is None:
            raw = self.items[i]
        else:  # as of a file: another process may write a mapped array
            rows = _rows_apart(self.items[i : i + 1])
            values = as_array(rows)
            assert values is not None
            form = f"{values.shape[1:]} {_form(rows, values)}".encode()
            require_unchanged(item_hash(form + values.tobytes()) == self.hashes[i])
            raw = rows[0]
        item = raw if self.gives_all else _input(raw)
        return (item, _label(raw, self.n_names)) if self.gives_label else item


def _rows_apart(rows: Any) -> Any:
    """Rows of an array or tensor, sharing nothing with it."""
    return rows.clone() if hasattr(rows, "clone") else np.array(rows)
