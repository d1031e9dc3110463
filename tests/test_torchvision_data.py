"""The data sets of torchvision by name: what torchvision itself reads is the oracle."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn
from torchvision import datasets

import embedx
from embedx.errors import ConfigError, DataError, DependencyError
from embedx.torchvision_data import torchvision


def picture(i: int) -> Image.Image:
    pixels = np.random.default_rng(i).integers(0, 255, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST, an ImageFolder and VOC of some pictures, written as they are published."""
    top = tmp_path_factory.mktemp("root")
    raw = top / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", 30), ("t10k", 12)):
        pixels = rng.integers(0, 255, (n, 28, 28), dtype=np.uint8)
        header = struct.pack(">IIII", 2051, n, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = bytes((i * 7) % 10 for i in range(n))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, n) + labels)
    for i in range(9):
        path = top / "pets" / ("cat", "dog", "owl")[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(path)
    voc = top / "VOCdevkit" / "VOC2012"
    for folder in ("ImageSets/Segmentation", "JPEGImages", "SegmentationClass"):
        (voc / folder).mkdir(parents=True)
    (voc / "ImageSets" / "Segmentation" / "val.txt").write_text("a\nb\n")
    for i, name in enumerate("ab"):
        picture(i).save(voc / "JPEGImages" / f"{name}.jpg")
        picture(i).save(voc / "SegmentationClass" / f"{name}.png")
    return top


@pytest.mark.parametrize(
    ("given", "theirs", "ids"),
    [
        (
            {"name": "MNIST", "split": "test"},
            lambda root: datasets.MNIST(root, train=False),
            ["test-00000", "test-00001"],
        ),
        ({"name": "MNIST"}, datasets.MNIST, ["train-00000", "train-00001"]),
        (
            {"name": "ImageFolder", "at": "pets"},
            lambda root: datasets.ImageFolder(f"{root}/pets"),
            ["cat/0.png", "cat/3.png"],
        ),
    ],
    ids=["MNIST-test", "MNIST", "ImageFolder"],
)
def test_pictures_and_labels_are_those_that_torchvision_gives(
    given: dict[str, str], theirs: Callable[[Path], Any], ids: list[str], root: Path
) -> None:
    given = dict(given)
    source = torchvision(root=str(root / given.pop("at", "")), **given)
    items = theirs(root)
    assert len(source) == len(items) > 8
    assert list(source.ids[:2]) == ids
    assert source.labels is not None
    sent = pickle.loads(pickle.dumps(source.read))
    for i, (image, label) in enumerate(items):
        for read in (source.read, sent):
            np.testing.assert_array_equal(np.asarray(read(i)), np.asarray(image.convert("RGB")))
        assert source.label_names[source.labels[i]] == items.classes[label]
    assert source.item_hashes is not None
    assert len(set(source.item_hashes.tolist())) == len(items)


def test_a_file_that_is_changed_fails_its_row_and_tells_another_data_set(
    root: Path, tmp_path: Path
) -> None:
    for i in range(4):
        (tmp_path / "a").mkdir(exist_ok=True)
        picture(i).save(tmp_path / "a" / f"{i}.png")
    source = torchvision("ImageFolder", root=str(tmp_path))
    picture(9).resize((3, 3)).save(tmp_path / "a" / "2.png")
    with pytest.raises(DataError, match="changed after the run had listed it"):
        source.read(2)
    assert source.read(3).size == (9, 6)
    again = torchvision("ImageFolder", root=str(tmp_path))
    assert np.flatnonzero(again.item_hashes != source.item_hashes).tolist() == [2]
    first = torchvision("MNIST", root=str(root), limit=5)
    assert first.fingerprint != torchvision("MNIST", root=str(root), split="test", limit=5)
    assert (len(first), "the first of 30" in first.notes[0]) == (5, True)


def test_targets_that_are_no_classes_are_passed_over_and_said(root: Path) -> None:
    source = torchvision("VOCSegmentation", root=str(root), split="val")
    assert source.labels is None
    assert any("passed over: the targets of VOCSegmentation" in note for note in source.notes)
    assert list(source.ids) == [f"VOCdevkit/VOC2012/JPEGImages/{name}.jpg" for name in "ab"]
    assert source.read(1).size == (9, 6)


def test_labels_in_the_items_are_kept(tmp_path: Path) -> None:
    options = {"size": 7, "image_size": (3, 8, 8), "num_classes": 3}
    run = embedx.extract(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        torchvision("FakeData", options=options),
        layers=["0"],
        preprocess=embedx.models.Preprocess(resize_px=8, crop_px=8),
        out=tmp_path / "run",
    )
    theirs = datasets.FakeData(**options)
    assert run.ids[:2] == ["fakedata-00000", "fakedata-00001"]
    assert run.label_texts() == [str(int(label)) for _, label in theirs]


class Harmful:
    """What runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self.mark, "ran")


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100", "LSUN", "LSUNClass"])
def test_no_pickle_of_others_is_opened(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    harm = pickle.dumps(Harmful(mark))
    for kind in (datasets.CIFAR10, datasets.CIFAR100):
        folder = tmp_path / kind.base_folder
        folder.mkdir()
        for file in [*(f for f, _ in kind.train_list + kind.test_list), kind.meta["filename"]]:
            (folder / file).write_bytes(harm)
    with pytest.raises((DataError, ConfigError), match="pickle"):
        torchvision(name, root=str(tmp_path))
    assert not mark.exists()
    pickle.loads(harm)
    assert mark.exists(), "the pickle would have run"


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "class": ({"name": "cifar10"}, ConfigError, "no data set 'cifar10'; the nearest are CIFAR10"),
    "base": ({"name": "DatasetFolder"}, ConfigError, "no data set 'DatasetFolder'"),
    "root": ({"name": "MNIST"}, DataError, "data.root is empty"),
    "no root": ({"name": "FakeData", "root": "x"}, ConfigError, "leave data.root=x out"),
    "missing": (
        {"name": "MNIST", "root": "nowhere"},
        DataError,
        "not below data.root nowhere; data.download=true fetches them",
    ),
    "train": (
        {"name": "MNIST", "root": "nowhere", "split": "val"},
        ConfigError,
        "no split 'val'; choose one of: train, test",
    ),
    "split": (
        {"name": "SVHN", "root": "nowhere", "split": "val"},
        ConfigError,
        "no split 'val'; choose one of: train, test, extra",
    ),
    "image set": (
        {"name": "VOCDetection", "root": "nowhere", "split": "x"},
        ConfigError,
        "no split 'x'; choose one of: train, trainval, val",
    ),
    "no split": ({"name": "ImageFolder", "root": "x", "split": "a"}, ConfigError, "has no splits"),
    "option": (
        {"name": "FakeData", "options": {"sise": 3}},
        ConfigError,
        "no key 'data.options.sise'; the nearest are data.options.size",
    ),
    "ours": ({"name": "MNIST", "root": "x", "options": {"transform": 1}}, ConfigError, "no key"),
    "needed": ({"name": "CocoCaptions", "root": "x"}, ConfigError, r"\+data.options.annFile="),
    "download": (
        {"name": "ImageNet", "root": "x", "download": True},
        ConfigError,
        "torchvision does not download ImageNet",
    ),
    "video": ({"name": "UCF101", "root": "x"}, ConfigError, "its items are videos"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given, kind, message = MISTAKES[what]
    with pytest.raises(kind, match=message) as raised:
        torchvision(**given)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_every_class_says_in_one_line_that_nothing_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [n for n in datasets.__all__ if isinstance(getattr(datasets, n), type)]
    assert len(names) > 60
    for name in names:
        with pytest.raises((ConfigError, DataError, DependencyError)) as raised:
            torchvision(name, root="empty")
        assert "\n" not in str(raised.value), name


def test_the_command_takes_it(
    root: Path, embedx_here: Callable[..., tuple[int, list[str], list[str]]]
) -> None:
    words = ("extract", "model=efficientnet_lite0", "model.input_size=32", "data=torchvision")
    status, out, err = embedx_here(*words, "data.name=MNIST", f"data.root={root}", "data.limit=8")
    assert (status, err) == (0, [])
    assert out[0] == "MNIST, train: 8 pictures, 8 classes, the first of 30"
    (run,) = Path("outputs").glob("efficientnet_lite0-MNIST-*")
    assert embedx.open(run).n_rows == 8
    fake = ("data.name=FakeData", "data.limit=4", "+data.options.size=5", "name=fake")
    assert embedx_here(*words, *fake)[0] == 0
    assert embedx.open("outputs/fake").n_rows == 4


@pytest.mark.parametrize("limit", [None, 8, 16])
def test_names_of_other_classes_are_not_given_to_few_rows_either(
    limit: int | None, tmp_path: Path
) -> None:
    folder = tmp_path / "oxford-iiit-pet"
    (folder / "annotations" / "trimaps").mkdir(parents=True)
    (folder / "images").mkdir()
    lines = []
    for kind, (name, species) in enumerate([("Abyssinian", 1), ("beagle", 2), ("Bombay", 1)]):
        for i in range(8):
            picture(i).convert("RGB").save(folder / "images" / f"{name}_{i}.jpg")
            lines.append(f"{name}_{i} {kind + 1} {species} 1")
    for part in ("trainval", "test"):
        (folder / "annotations" / f"{part}.txt").write_text("\n".join(lines) + "\n")
    source = torchvision(
        "OxfordIIITPet",
        root=str(tmp_path),
        options={"target_types": "binary-category"},
        limit=limit,
    )
    assert source.label_names == []  # cat and dog, of which the breeds' names say nothing
    assert "its classes do not tell its labels" in " ".join(source.notes)
