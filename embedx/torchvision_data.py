"""The data sets of torchvision, by the names of their classes, as sources."""

import contextlib
import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from embedx.checks import unknown_key
from embedx.data import in_memory, named_by_number, relabels
from embedx.errors import (
    ConfigError,
    DataError,
    DependencyError,
    EmbedxError,
    first_line,
    listed,
    nearest,
    number_of,
)
from embedx.matrix import Array
from embedx.pictures import decode_image
from embedx.sources import (
    FileReader,
    PixelReader,
    Source,
    classes_said,
    counted_through,
    file_hashes,
    hashed_rows,
    limited,
    stamp_of,
    whole_label,
)

_BASES = frozenset({"VisionDataset", "DatasetFolder"})
# By torchvision's classes: why such data are not taken.
_REFUSED = {
    "LSUN": "torchvision unpickles a list of its keys from a file that anybody may write",
    "LSUNClass": "torchvision unpickles a list of its keys from a file that anybody may write",
    "Kinetics": "its items are videos; see examples/video.py for one of your own",
    "HMDB51": "its items are videos; see examples/video.py for one of your own",
    "UCF101": "its items are videos; see examples/video.py for one of your own",
    "PCAM": "torchvision opens its HDF5 files without a look; give them by data=array",
    "MovingMNIST": "its items are videos; see examples/video.py for one of your own",
}
# What a class calls its parts, where it has no `split`.
_PARTS = ("what", "image_set", "version", "train", "background")
_OF_TRUTH = {"train": True, "test": False}
_OURS = frozenset({"root", "download", "transform", "target_transform", "transforms", "loader"})
# Where classes keep the paths of their items, and their labels, in the order of the items.
_PATHS = ("samples", "_samples", "_image_files", "_images", "images", "_image_paths")
_LABELS = ("targets", "_labels", "labels", "y")


def torchvision(
    name: str,
    *,
    root: str | None = None,
    split: str | None = None,
    download: bool = False,
    options: dict[str, Any] | None = None,
    limit: int | None = None,
) -> Source:
    """A data set of torchvision from a folder on this machine, by the name of its class.

    Labels are the whole numbers among its targets, through its classes; other targets (captions,
    boxes, masks) are passed over. Ids are paths below ``root`` where it keeps its pictures as
    files, which are then read as those of ``data=folder`` are; else the split and a number,
    ``test-00001``.

    Args:
        name: Such as ``CIFAR10``, ``OxfordIIITPet`` or ``ImageFolder``.
        root: The folder that holds the files as torchvision lays them out.
        split: Which part, as the class calls it; ``train`` or ``test`` where it takes
            ``train=True``; its default where not given.
        download: Whether torchvision fetches into ``root`` what is missing there.
        options: Further arguments of the class, such as ``annFile`` of ``CocoCaptions``.
        limit: Take the first so many.

    Raises:
        ConfigError: There is no such class, split or option.
        DataError: Its files are not below ``root``, are damaged or not those that were published,
            or its items are no pictures.
        DependencyError: It needs a package that is not installed.

    References:
        Marcel, Rodriguez 2010, ACM Multimedia, doi:10.1145/1873951.1874254.
    """
    kind = _class(name)
    known = _parameters(kind)
    given: dict[str, Any] = dict(options or {})
    for key in given:
        if key not in known or key in _OURS:
            raise unknown_key(
                f"data.options.{key}",
                [f"data.options.{word}" for word in known if word not in _OURS],
            )
    where = ""
    if "root" in known:
        if not root:
            raise DataError(f"data.root is empty; name the folder that holds {name}")
        where = str(Path(root).expanduser())
        given["root"] = where
    elif root:
        raise ConfigError(f"{name} has no files; leave data.root={root} out")
    if "download" in known:
        given["download"] = download
    elif download:
        raise ConfigError(
            f"torchvision does not download {name}; put its files below data.root yourself, and "
            "leave data.download out"
        )
    given.update(_split(kind, known, split))
    if "loader" in known:
        given["loader"] = decode_image
    items = _made(kind, given, root=root, split=split)
    return _source(items, name=name, root=where, split=split, limit=limit)


def _class(name: str) -> Any:
    from torchvision import datasets

    kinds = {
        one
        for one in datasets.__all__
        if isinstance(getattr(datasets, one), type) and one not in _BASES
    }
    if name not in kinds:
        raise ConfigError(
            f"torchvision has no data set {name!r}; the nearest are "
            f"{', '.join(nearest(name, sorted(kinds)))}"
        )
    if name in _REFUSED:
        raise ConfigError(f"data.name={name} is not taken: {_REFUSED[name]}")
    return getattr(datasets, name)


def _parameters(kind: Any) -> dict[str, inspect.Parameter]:
    """What a class takes, also what it hands on to the one that it is made of."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        for one in parameters:
            if one.kind is not inspect.Parameter.VAR_KEYWORD:
                found.setdefault(one.name, one)
        if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters):
            break
    return found


def _split(kind: Any, known: Mapping[str, inspect.Parameter], split: str | None) -> dict[str, Any]:
    """The argument that stands for a split."""
    # EMNIST has a `split` of letters and digits beside `train`.
    if "split" in known and "train" not in known:
        return {} if split is None else {"split": split}
    part = next((one for one in _PARTS if one in known), None)
    if split is None:
        return {}
    if part is None:
        raise ConfigError(f"{kind.__name__} has no splits; leave data.split={split} out")
    if part not in ("train", "background"):
        return {part: split}
    if split not in _OF_TRUTH:
        raise ConfigError(
            f"{kind.__name__} has no split {split!r}; choose one of: {', '.join(_OF_TRUTH)}"
        )
    return {part: _OF_TRUTH[split]}


def _made(kind: Any, given: Mapping[str, Any], *, root: str | None, split: str | None) -> Any:
    name = kind.__name__
    try:
        return kind(**given)
    except EmbedxError:
        raise
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"{name} needs the package {error.name!r}, which is not installed; install it with: "
            f"pip install {error.name}"
        ) from None
    except MemoryError:
        raise DataError(f"{name} does not fit into memory; use a machine with more") from None
    except TypeError as error:
        missing = re.findall(r"'(\w+)'", str(error)) if "missing" in str(error) else []
        if not missing:
            raise _damaged(name, root, error) from None
        words = ", ".join(f"+data.options.{one}=..." for one in missing)
        raise ConfigError(f"{name} needs {' and '.join(missing)}; add {words}") from None
    except ValueError as error:
        choices = re.search(r"Valid values are \{(.*)\}|should be one of \{?(.*)", str(error))
        if choices is None:
            raise _damaged(name, root, error) from None
        key = re.search(r"argument (\w+)", str(error))
        is_split = split is not None and (key is None or key[1] in ("split", *_PARTS))
        what = f"split {split!r}" if is_split else f"such option ({first_line(error)})"
        shown = (choices[1] or choices[2]).replace("'", "").replace('"', "").rstrip(".")
        raise ConfigError(f"{name} has no {what}; choose one of: {shown}") from None
    except Exception as error:  # whatever torchvision stumbles over in the files
        if given.get("download"):
            raise DataError(
                f"{name} could not be downloaded into data.root {root}: {first_line(error)[:160]}; "
                "check the network, or put its files there"
            ) from None
        raise _damaged(name, root, error) from None


def _damaged(name: str, root: str | None, error: Exception) -> DataError:
    from torchvision.datasets import CIFAR10

    text = first_line(error)[:160]
    is_missing = isinstance(error, FileNotFoundError) or re.search(
        "not (found|present|exist)", text, re.I
    )
    if not is_missing:
        return DataError(
            f"{name} below data.root {root} cannot be read ({type(error).__name__}: {text}); its "
            "files are damaged, or laid out in another way"
        )
    published = ""
    if isinstance(_class(name), type) and issubclass(_class(name), CIFAR10):
        published = (
            " (by their MD5: its batches are pickles, which can run code, so that others than the "
            "published ones are not opened)"
        )
    can_fetch = "download" in _parameters(_class(name))
    way_out = (
        "data.download=true fetches them, or put them there" if can_fetch else "put them there"
    )
    return DataError(
        f"the files of {name} are not below data.root {root}{published}; {way_out} as torchvision "
        "lays them out"
    )


# --------------------------------------------------------------------------- items


@dataclasses.dataclass(frozen=True)
class _First:
    """The first n items of a data set, and the names of its classes."""

    items: Any
    n: int
    classes: list[str] | None

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def _source(items: Any, *, name: str, root: str, split: str | None, limit: int | None) -> Source:
    n_all = len(items)
    if n_all == 0:
        raise DataError(f"{name} holds no picture; check data.root {root}")
    n = limited(n_all, limit)
    part = split or _own_part(items)
    classes = _classes(items)
    passed_over = _passed_over(items, n, name)
    labels = None if passed_over else _labels(items)
    is_told = labels is not None or bool(passed_over)
    paths = _paths(items, root) if is_told else None
    pixels = _pixels(items)
    notes = []
    width = max(5, len(str(n_all - 1)))
    numbered = [f"{part or name.lower()}-{i:0{width}d}" for i in range(n)] if paths is None else []
    if paths is not None:
        source = _of_files(paths[:n], root)
    elif is_told and pixels is not None and _are_read(items, PixelReader(pixels)):
        source = Source(name, numbered, PixelReader(pixels[:n]), fingerprint="")
    else:
        # Also where a few are taken: of the first ones the labels may be those of one class.
        told = {} if is_told else dict(_told_labels(items, n_all))
        if classes and (why := relabels(items, told)):
            notes.append(f"{name}: its classes do not tell its labels, for {why}: they are numbers")
            classes = None
        source = in_memory(
            _First(items, n, classes), labels=[""] * n if is_told else None, ids=numbered
        )
        source = dataclasses.replace(
            source, warnings=tuple(word.replace("_first", name) for word in source.warnings)
        )
        if pixels is None:
            notes.append(f"whether items of {name} changed is seen on {min(n, 16)} of them")
    if paths is None and pixels is not None:
        fingerprint, hashes = hashed_rows(pixels[:n], "uint8")
        source = dataclasses.replace(source, fingerprint=fingerprint, item_hashes=hashes)
    if labels is not None:
        indices, names, numbers = counted_through(labels[:n], classes, none=(-1,))
        source = dataclasses.replace(
            source,
            labels=indices if names else None,
            label_names=names,
            label_numbers=numbers,
        )
    note = f"{name}{f', {part}' * bool(part)}: {number_of(n, 'picture', 'pictures')}, "
    note += "labels in the items" if source.labels_in_items else classes_said(source.label_names)
    note += f", the first of {n_all:,}" if n < n_all else ""
    if passed_over:
        notes.append(f"passed over: the targets of {name}, which are {passed_over} and no classes")
    return dataclasses.replace(
        source,
        name=f"{name}-{part}" if part else name,
        root=Path(root) if root else None,
        notes=(note, *notes),
    )


def _own_part(items: Any) -> str:
    """The split that was taken where none was asked for."""
    for key in ("what", "train", "background", "image_set", "version", "split", "_split"):
        value = getattr(items, key, None)
        if isinstance(value, bool) and key in ("train", "background"):
            return "train" if value else "test"
        if isinstance(value, str) and key not in ("train", "background"):
            return value
    return ""


def _classes(items: Any) -> list[str] | None:
    for key in ("classes", "categories"):
        found = getattr(items, key, None)
        if isinstance(found, (list, tuple)) and found:
            # ImageNet has several words for a class.
            names = named_by_number(list(found), items)
            return [", ".join(one) if isinstance(one, tuple) else str(one) for one in names]
    return None


def _labels(items: Any) -> list[int] | None:
    """The labels of all items where the class keeps them in a list, -1 for none."""
    lists: list[Any] = [getattr(items, key, None) for key in _LABELS]
    for key in ("samples", "_samples"):
        found = getattr(items, key, None)
        if isinstance(found, list) and found and isinstance(found[0], tuple):
            lists.append([one[1] for one in found])
    for found in lists:
        if not hasattr(found, "__len__") or len(found) != len(items):
            continue
        values = found.tolist() if hasattr(found, "tolist") else list(found)
        try:
            labels = [whole_label(value, n_names=0) for value in values]
            told = dict(_told_labels(items, len(labels)))
        except DataError:
            continue
        if all(labels[row] == label for row, label in told.items()):
            return labels
    return None


def _told_labels(items: Any, n: int) -> Iterator[tuple[int, int]]:
    """The labels in some of the first n items, by row.

    Raises:
        DataError: One is no label.
    """
    for row, item in _some(items, _spread(n)):
        yield row, whole_label(item[1], n_names=0)


def _spread(n: int) -> set[int]:
    return {round(j * (n - 1) / 15) for j in range(16)}


def _some(items: Any, rows: Iterable[int]) -> Iterator[tuple[int, Any]]:
    """Some items with their rows; one that cannot be read fails its own row, later."""
    for row in sorted(rows):
        item = None
        with contextlib.suppress(Exception):
            item = items[row]
        if item is None:
            continue
        try:
            yield row, item
        finally:  # torchvision leaves the files of masks open
            for part in item if isinstance(item, tuple) else ():
                if isinstance(part, Image.Image):
                    part.close()


def _passed_over(items: Any, n: int, name: str) -> str:
    """What the targets are where they are no whole numbers; "" where they are, or cannot be read.

    Raises:
        DataError: The items are no pairs of a picture and a target.
    """
    for _, item in _some(items, _spread(n)):
        is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], Image.Image)
        if not is_pair:
            kinds = listed([type(one).__name__ for one in item] if isinstance(item, tuple) else [])
            raise DataError(
                f"the items of {name} are {kinds or type(item).__name__}; only those that are a "
                "picture and a target can be taken"
            )
        try:
            whole_label(item[1], n_names=0)
        except DataError:
            return {"str": "texts", "Image": "pictures", "dict": "mappings", "list": "lists"}.get(
                type(item[1]).__name__, f"of type {type(item[1]).__name__}"
            )
        return ""
    return ""


def _paths(items: Any, root: str) -> list[str] | None:
    """The path of each item below the root, if the class keeps them and they are what it reads."""
    for key in _PATHS:
        found = getattr(items, key, None)
        if not isinstance(found, list) or len(found) != len(items):
            continue
        paths = [one[0] if isinstance(one, tuple) and one else one for one in found]
        if not all(isinstance(path, (str, Path)) for path in paths):
            continue
        relative = [os.path.relpath(path, root).replace(os.sep, "/") for path in paths]
        if len(set(relative)) < len(relative) or any(one.startswith("../") for one in relative):
            continue
        if _are_read(items, functools.partial(_decoded_below, root, relative)):
            return relative
    return None


def _decoded_below(root: str, paths: Sequence[str], i: int) -> Image.Image:
    return decode_image(Path(root, paths[i]))


def _are_read(items: Any, ours: Callable[[int], Image.Image]) -> bool:
    """Whether some items are the pictures that we would read in their place."""
    n = len(items)
    for row, (theirs, *_) in _some(items, {0, n // 2, n - 1}):
        try:
            mine = np.asarray(ours(row).convert("RGB"))
        except Exception:  # pixels in another order, or a file that torchvision alone can read
            return False
        if not np.array_equal(mine, np.asarray(theirs.convert("RGB"))):
            return False
    return True


def _of_files(paths: Sequence[str], root: str) -> Source:
    stated = []
    for path in paths:
        try:
            about = os.stat(os.path.join(root, *path.split("/")))
            stated.append((path, *stamp_of(about)))
        except OSError:  # its own row fails
            stated.append((path, -1, -1))
    fingerprint, hashes = file_hashes(stated)
    return Source(
        name="files",
        ids=list(paths),
        read=FileReader(root, tuple(paths), hashes),
        fingerprint=fingerprint,
        item_hashes=hashes,
        reads_files=True,
    )


def _pixels(items: Any) -> Array | None:
    """The pixels of all items where the class holds them in memory."""
    data: Any = getattr(items, "data", None)
    array: Any = data.numpy() if hasattr(data, "numpy") else data
    is_whole = isinstance(array, np.ndarray) and array.dtype == np.uint8
    return array if is_whole and array.ndim >= 3 and len(array) == len(items) else None
