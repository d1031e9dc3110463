"""What further passes of the first batch show: whose tokens a mask is of, and what padding does."""

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import embedx
from embedx.errors import ShapeError
from embedx.inputs import is_alike
from embedx.looks import _is_padded, _may_be_lengths, _padded_and_ends, _Share
from embedx.rows import _like_a_mask, _like_padded, token_mask


def sequences(n: int = 6, t: int = 7, *, kinds: int = 2) -> list[dict[str, Tensor]]:
    """Sequences of one length, of which the first is padded and has a mask."""
    rng = torch.Generator().manual_seed(0)
    items = []
    for i in range(n):
        mask = (torch.arange(t) < 3 + i % 3).long()
        tokens = torch.randint(1, 20, (kinds, t), generator=rng)
        names = ("text", "summary", "boxes")
        item = dict(zip(names, tokens, strict=False))
        item["text"] = item["text"] * mask
        items.append({**item, "attention_mask": mask})
    return items


class Translator(nn.Module):
    """Two stacks; the second looks at the first one's tokens, by the mask of these."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, text: Tensor, summary: Tensor, attention_mask: Tensor) -> Tensor:
        is_padding = attention_mask == 0
        found = self.encoder(self.tokens(text), src_key_padding_mask=is_padding)
        t = summary.shape[1]
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        given = self.tokens(summary)
        decoded = self.decoder(given, found, tgt_mask=later, memory_key_padding_mask=is_padding)
        return self.out(decoded.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("pool", ["mean_token", "max_token", "auto"])
def test_a_mask_of_one_sequence_is_not_taken_for_another_of_any_name(
    pool: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, items = Translator().eval(), sequences()
    with pytest.raises(
        ShapeError, match="decoder: the mask .* for its tokens are those of summary, not of text"
    ):
        embedx.extract(model, items, layers="decoder", pooling=pool, out=tmp_path)
    run = embedx.extract(model, items, layers="encoder", pooling=pool, out=tmp_path)
    for row, item in zip(run.embeddings["encoder"], items, strict=True):
        text = item["text"][item["attention_mask"] == 1]
        with torch.no_grad():
            alone = model.encoder(model.tokens(text)[None])[0]
        wanted = alone.amax(0) if pool == "max_token" else alone.mean(0)
        assert np.allclose(row, wanted, atol=1e-5)
    assert "hang on padding" not in caplog.text


class Layout(nn.Module):
    """Of each token the word and where it stands: two tensors of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)

    def forward(self, text: Tensor, summary: Tensor, attention_mask: Tensor) -> Tensor:
        both = self.tokens(text) + self.places(summary)
        return self.encoder(both, src_key_padding_mask=attention_mask == 0)  # type: ignore[no-any-return]


class Backwards(nn.Module):
    """Reads from the end, with the mask turned round with the tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)

    def forward(self, text: Tensor, attention_mask: Tensor) -> Tensor:
        is_padding = attention_mask.flip(1) == 0
        return self.encoder(  # type: ignore[no-any-return]
            self.tokens(text.flip(1)), src_key_padding_mask=is_padding
        )


class Recurrent(nn.Module):
    """Runs over padding as over tokens, from the end too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.out = nn.Linear(8, 2)

    def forward(self, text: Tensor, attention_mask: Tensor) -> Tensor:
        return self.out(self.lstm(self.tokens(text))[0])  # type: ignore[no-any-return]


class Placed(Backwards):
    """Takes one length alone."""

    def forward(self, text: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(text + torch.zeros(7, dtype=torch.long), attention_mask)


class ByItself(nn.Module):
    """Knows padding by its number, and no mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)

    def forward(self, text: Tensor, attention_mask: Tensor) -> Tensor:
        return self.encoder(self.tokens(text), src_key_padding_mask=text == 0)  # type: ignore[no-any-return]


class Queries(nn.Module):
    """As many of its own tokens as a text may have look at the text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.queries = nn.Embedding(20, 8), nn.Parameter(torch.randn(1, 7, 8))
        self.look = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, text: Tensor, attention_mask: Tensor) -> Tensor:
        tokens, is_padding = self.tokens(text), attention_mask == 0
        queries = self.queries.expand(len(text), -1, -1)
        found, _ = self.look(queries, tokens, tokens, key_padding_mask=is_padding)
        return self.out(found)  # type: ignore[no-any-return]


def test_as_many_tokens_by_chance_are_said_not_to_be_told_from_those_of_the_mask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for layer, is_said in (("out", True), ("tokens", False)):
        embedx.extract(Queries().eval(), sequences(kinds=1), layers=layer, out=tmp_path / layer)
        said = f"{layer}: 7 tokens come also where a token less enters"
        assert (said in caplog.text) == is_said


class Towers(nn.Module):
    """Two sequences of one length alone, and the mask of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(20, 8), nn.Parameter(torch.randn(7, 8))
        self.first = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.second = nn.GRU(8, 4, batch_first=True)
        self.both = nn.Linear(12, 5)

    def forward(self, text: Tensor, summary: Tensor, attention_mask: Tensor) -> Tensor:
        one = self.tokens(text) + self.places
        one = self.first(one, src_key_padding_mask=attention_mask == 0)
        other, _ = self.second(self.tokens(summary) + self.places)
        return self.both(torch.cat([one, other], -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layer", "is_said"), [("first", False), ("second:output.0", True), ("both", True)]
)
def test_where_it_cannot_be_told_whose_a_mask_is_this_is_said(
    layer: str, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedx.extract(Towers().eval(), sequences(), layers=layer, pooling="mean_token", out=tmp_path)
    said = f"{layer}: which of text and summary the mask of padding is of could not be told"
    assert (said in caplog.text) == is_said


@pytest.mark.parametrize(
    ("model", "layer", "kinds", "is_said"),
    [
        (Layout, "encoder", 2, False),
        (Backwards, "encoder", 1, True),
        (Backwards, "tokens", 1, True),
        (Placed, "encoder", 1, True),
        (ByItself, "encoder", 1, False),
        (Recurrent, "out", 1, True),
        (Recurrent, "tokens", 1, False),
    ],
)
@pytest.mark.parametrize("objective", [None, "predicted"])
def test_rows_that_hang_on_padding_are_said_to(
    model: Any,
    layer: str,
    kinds: int,
    is_said: bool,
    objective: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of = model()

        def forward(self, **given: Tensor) -> Tensor:
            return self.of(**given)[:, 0] * 1.0  # type: ignore[no-any-return]

    name = f"of.{layer}"
    embedx.extract(
        Scores().eval(),
        sequences(kinds=kinds),
        layers=[name, f"{name}:grad"] if objective else [name],
        objective=objective,
        pooling="mean_token",
        out=tmp_path,
    )
    said = re.findall(r"WARNING +\S+ (.*): rows hang on padding", caplog.text)
    # What comes back to the tokens has been where padding was read.
    comes_by = model in (Backwards, Placed) or (model is Recurrent and layer == "tokens")
    wanted = [f"{name}:grad"] if objective and comes_by else []
    if is_said:
        wanted = [name, *wanted]
    assert said == ([", ".join(wanted)] if wanted else [])


def test_the_first_batch_with_padding_is_the_one_that_is_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = sequences(kinds=1)
    whole = {"text": torch.arange(7) + 1, "attention_mask": torch.ones(7, dtype=torch.long)}
    embedx.extract(
        Backwards().eval(), [whole] * 4 + items, layers="encoder", batch_size=2, out=tmp_path
    )
    assert caplog.text.count("rows hang on padding") == 1


class TwoStacks(nn.Module):
    """Two sequences by themselves, each with a mask, of which one has a name of its own."""

    def __init__(self, *, has_places: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(20, 8)
        self.places = nn.Parameter(torch.randn(7, 8)) if has_places else None
        self.first = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(
        self, text: Tensor, attention_mask: Tensor, summary: Tensor, summary_mask: Tensor
    ) -> Tensor:
        found = []
        for stack, ids, mask in (
            (self.first, text, attention_mask),
            (self.second, summary, summary_mask),
        ):
            tokens = self.tokens(ids) if self.places is None else self.tokens(ids) + self.places
            found.append(stack(tokens, src_key_padding_mask=mask == 0))
        return self.out(found[1])[:, 0] + found[0].mean((1, 2))[:, None]  # type: ignore[no-any-return]


@pytest.mark.parametrize("has_places", [False, True])
def test_a_second_sequence_with_a_mask_of_another_name_is_told_from_the_first(
    has_places: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = sequences()
    for i, item in enumerate(items):
        item["summary_mask"] = (torch.arange(7) < 2 + i % 4).long()
    model = TwoStacks(has_places=has_places).eval()
    for layer in ("second", "out"):
        if has_places:
            embedx.extract(model, items, layers=layer, pooling="mean_token", out=tmp_path / layer)
            assert f"{layer}: which of text and summary the mask" in caplog.text
        else:
            with pytest.raises(ShapeError, match="its tokens are those of summary, not of text"):
                embedx.extract(model, items, layers=layer, pooling="mean_token", out=tmp_path)
    caplog.clear()
    run = embedx.extract(model, items, layers="first", pooling="mean_token", out=tmp_path / "1")
    assert caplog.text == ""
    for row, item in zip(run.embeddings["first"], items, strict=True):
        is_token = item["attention_mask"] == 1
        with torch.no_grad():
            tokens = model.tokens(item["text"]) + (0 if model.places is None else model.places)
            alone = model.first(tokens[is_token][None])[0].mean(0)
        assert np.allclose(row, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "is_turned", "is_refused"),
    [
        ("key_padding_mask", True, False),
        ("key_padding_mask", False, True),
        ("src_key_padding_mask", False, True),
        ("decoder_attention_mask", False, False),
        ("memory_key_padding_mask", False, True),
        ("memory_key_padding_mask", True, False),
    ],
)
def test_two_masks_are_one_if_they_say_the_same(
    name: str, is_turned: bool, is_refused: bool
) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    inputs = {"attention_mask": mask, name: 1 - mask if is_turned else mask}
    if is_refused:
        with pytest.raises(ShapeError, match=f"attention_mask and {name}"):
            token_mask(inputs, spellings=set())
    else:
        assert torch.equal(token_mask(inputs, spellings=set()), mask == 1)  # type: ignore[arg-type]


def test_a_model_that_works_in_place_on_what_enters_is_looked_at_as_it_entered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.sub_(0.5).div_(0.1))  # type: ignore[no-any-return]

    x = torch.rand(7, 4)
    model = InPlace().eval()
    run = embedx.extract(model, x, layers="linear", batch_size=3, out=tmp_path)
    with torch.no_grad():
        assert np.allclose(run.embeddings["linear"], model(x.clone()), atol=1e-5)
    assert caplog.text == ""


class PlaceInBatch(nn.Module):
    """Adds what stands for places of tokens along the axis of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("places", torch.randn(50, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.places[: len(x)])  # type: ignore[index,no-any-return]


class ByLargest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x / x.max())  # type: ignore[no-any-return]


class Summed(ByLargest):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.cumsum(0))  # type: ignore[no-any-return]


class Plain(ByLargest):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class OverBatch(nn.Module):
    """Runs along the axis of the samples, for want of batch_first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize(
    ("kind", "is_said"),
    [(PlaceInBatch, True), (ByLargest, True), (Summed, True), (OverBatch, True), (Plain, False)],
)
def test_rows_that_hang_on_the_batch_are_said_to_whichever_way(
    kind: Any, is_said: bool, n: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    x = torch.rand(n, 4, 6) * torch.tensor([1.0, *[0.9] * (n - 1)])[:, None, None]
    model = kind().eval()
    run = embedx.extract(model, x, layers="linear", pooling="flatten", out=tmp_path)
    with torch.no_grad():
        alone = torch.cat([model(one[None]) for one in x]).flatten(1)
    assert np.allclose(run.embeddings["linear"], alone, atol=1e-5) != is_said
    assert ("rows hang on the samples beside them, or on their place" in caplog.text) == is_said


@pytest.mark.parametrize("units", [[1], "all"])
def test_an_ablation_averages_over_the_tokens_of_no_other_mask(units: Any, tmp_path: Path) -> None:
    ablate = [{"at": "decoder", "units": units, "by": "mean"}]
    with pytest.raises(ShapeError, match="decoder: the mask .* those of summary, not of text"):
        embedx.extract(
            Translator().eval(), sequences(), layers="out", ablate=ablate, out=tmp_path / "a"
        )
    ablate[0]["at"] = "encoder"
    run = embedx.extract(
        Translator().eval(), sequences(), layers="out", ablate=ablate, out=tmp_path / "b"
    )
    assert run.n_rows == 6


class WithFeatures(Backwards):
    """Beside its tokens numbers of the sample enter, as many as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(7, 8)

    def forward(self, text: Tensor, summary: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.tokens(text) + self.features(summary.float())[:, None]
        return self.encoder(tokens, src_key_padding_mask=attention_mask == 0)  # type: ignore[no-any-return]


class Crossed(Backwards):
    """The tokens with a mask look at those of another sequence, as many of them."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, text: Tensor, summary: Tensor, attention_mask: Tensor) -> Tensor:
        tokens, others = self.tokens(text), self.tokens(summary)
        tokens = tokens + self.look(tokens, others, others)[0]
        return self.encoder(tokens, src_key_padding_mask=attention_mask == 0)  # type: ignore[no-any-return]


class TokensWithTypes(nn.Module):
    """A text as BERT takes it, and a history beside it, along which an LSTM goes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.types = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.lstm, self.history = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, history: Tensor
    ) -> Tensor:
        tokens = self.tokens(input_ids) + self.types(token_type_ids)
        found = self.encoder(tokens, src_key_padding_mask=attention_mask == 0).mean(1)
        return self.history(self.lstm(self.tokens(history))[0]).mean(1) + found  # type: ignore[no-any-return]


def test_a_history_beside_a_text_with_types_is_not_pooled_by_its_mask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, names = TokensWithTypes().eval(), ("input_ids", "token_type_ids", "history")
    items = [
        {**dict(zip(names, (one["text"], one["summary"], one["boxes"]), strict=True)), **rest}
        for one in sequences(kinds=3)
        for rest in [{"attention_mask": one["attention_mask"]}]
    ]
    with pytest.raises(ShapeError, match="its tokens are those of history, not of input_ids"):
        embedx.extract(model, items, layers="history", pooling="mean_token", out=tmp_path)
    embedx.extract(model, items, layers="encoder", pooling="mean_token", out=tmp_path)
    assert caplog.text == ""


@pytest.mark.parametrize("kind", [WithFeatures, Crossed])
def test_what_enters_beside_the_tokens_is_no_padding(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, items = kind().eval(), sequences()
    run = embedx.extract(model, items, layers="encoder", pooling="mean_token", out=tmp_path)
    for row, item in zip(run.embeddings["encoder"], items, strict=True):
        is_token = item["attention_mask"] == 1
        with torch.no_grad():
            alone = model(
                item["text"][is_token][None], item["summary"][None], torch.ones(1, is_token.sum())
            )[0].mean(0)
        assert np.allclose(row, alone, atol=1e-5)
    assert caplog.text == ""


class CutToLongest(ByLargest):
    """Cuts all to the longest of the batch, and averages over the rest of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        longest = int((x[:, :, 0] != 0).sum(1).max())
        return self.out(self.linear(x[:, :longest]).mean(1))  # type: ignore[no-any-return]


def test_what_shows_by_few_samples_alone_is_looked_for_in_several(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.rand(32, 4, 6) + 1
    x[::2, 3:] = 0  # half of them are shorter
    x[torch.tensor([0, 30])] = torch.rand(2, 4, 6) / 100 + 0.01  # of which two are the least
    embedx.extract(CutToLongest().eval(), x, layers="out", pooling="none", out=tmp_path)
    assert "rows hang on the samples beside them" in caplog.text


def test_what_the_first_batches_do_not_show_is_looked_for_in_later_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.rand(64, 4, 6) + 1
    embedx.extract(CutToLongest().eval(), x, layers="out", batch_size=8, out=tmp_path / "alike")
    assert caplog.text == ""
    x[56:60, 3:] = 0  # of the eighth batch
    out = tmp_path / "shorter"
    embedx.extract(CutToLongest().eval(), x, layers="out", batch_size=8, out=out)
    assert caplog.text.count("rows hang on the samples beside them") == 1


def test_layers_that_mix_samples_later_than_others_are_said_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Both(ByLargest):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            late = self.late(x * (2 if (x > 100).any() else 1))
            return self.early(late - late.mean(0))  # type: ignore[no-any-return]

    x = torch.rand(64, 6)
    x[63] = 1e4
    embedx.extract(Both().eval(), x, layers=["early", "late"], batch_size=8, out=tmp_path)
    said = [one.getMessage().partition(":")[0] for one in caplog.records]
    assert said == ["layer early", "layer late"]


class TakesLengths(nn.Module):
    """Averages over the first steps if it is told how many, and over all if not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.out = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        steps = self.tokens(x)
        if lengths is not None:
            is_step = torch.arange(x.shape[1]) < lengths[:, None]
            steps = steps * is_step[..., None]
        return self.out(steps.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("x length label", "items of list have 3 parts, of which the first enters the network"),
        ("x length", "takeslengths may take lengths, and is given the first part"),
        ("x label row", "takeslengths may take lengths"),
        ("dict label", None),
        ("dict", None),
    ],
)
def test_lengths_that_are_taken_for_labels_or_left_out_are_said(
    form: str, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, lengths, labels = torch.randint(1, 20, (6, 5)), torch.arange(6) % 5 + 1, torch.arange(6) % 3
    items: list[Any] = []
    for row in range(6):
        named = {"x": x[row], "lengths": lengths[row]}
        item = {
            "x length label": (x[row], int(lengths[row]), int(labels[row])),
            "x length": (x[row], int(lengths[row])),
            "x label row": (x[row], int(labels[row]), row),
            "dict label": (named, int(labels[row])),
            "dict": named,
        }
        items.append(item[form])
    model = TakesLengths().eval()
    run = embedx.extract(model, items, layers="out", out=tmp_path)
    messages = [one.getMessage() for one in caplog.records]
    assert any(re.search(said, one) for one in messages) if said else not messages
    if form == "x label row":
        assert len(messages) == 1
    with torch.no_grad():
        wanted = model(x, lengths if "dict" in form else None)
    np.testing.assert_allclose(run.embeddings["out"], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "is_said"),
    [
        *[(name, True) for name in ("lengths", "seq_len", "x_lens", "length")],
        *[(name, False) for name in ("max_len", "silent", "length_penalty", "labels")],
    ],
)
def test_arguments_that_are_called_lengths(name: str, is_said: bool) -> None:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert _may_be_lengths(inspect.Parameter(name, kind, default=None)) == is_said
    assert not _may_be_lengths(inspect.Parameter(name, kind, default=512))


@pytest.mark.parametrize("has_mask", [True, False])
def test_the_shortest_item_is_among_those_collated_alone(
    has_mask: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def collated(items: list[Tensor]) -> dict[str, Tensor]:
        found = padded(items)
        return found if has_mask else {"text": found["text"]}

    items = [torch.arange(3 if i == 17 else 8) + 1 for i in range(32)]
    loader = DataLoader(items, batch_size=32, collate_fn=collated)  # type: ignore[arg-type]
    model = LastStep(masks=False).eval()
    embedx.extract(model, loader, layers="out", out=tmp_path)
    assert "rows hang on the other items of their batch by the collate_fn" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_padding_of_data_that_are_in_order_of_length_is_said(
    num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = [torch.arange(3 + max(0, i - 21)) + 1 for i in range(24)]  # the sixth batch alone
    loader = DataLoader(items, batch_size=4, collate_fn=padded)  # type: ignore[arg-type]
    model = LastStep(masks=False).eval()
    embedx.extract(model, loader, layers="out", num_workers=num_workers, out=tmp_path)
    assert caplog.text.count("rows hang on the other items of their batch by the collate_fn") == 1


def test_samples_go_through_alone_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    linear = nn.functional.linear

    def counted(x: Tensor, *given: Tensor) -> Tensor:
        sizes.append(len(x))
        return linear(x, *given)

    monkeypatch.setattr(nn.functional, "linear", counted)
    x = torch.rand(400, 6)
    embedx.extract(Plain().eval(), x, layers="linear", batch_size=4, out=tmp_path)
    # Of the first four batches 16 samples, and 4 of the batches 8, 16, 32 and 64.
    assert sizes.count(1) == 32
    assert sizes.count(4) == 100
    assert sizes[-36:] == [4] * 36


class OwnGenerator(ByLargest):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.default_rng().random(x.shape)).float()
        return self.linear(x + noise)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [OwnGenerator, Plain])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_draws_from_a_generator_that_is_made_in_a_pass_are_said(
    kind: Any, batch_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.rand(5, 6)
    embedx.extract(kind().eval(), x, layers="linear", batch_size=batch_size, out=tmp_path)
    said = "a sample has another row in each pass|rows hang on the samples beside them"
    assert (re.search(said, caplog.text) is not None) == (kind is OwnGenerator)


class LastStep(nn.Module):
    """Takes the last step of an LSTM, which for shorter texts has run over padding."""

    def __init__(self, *, masks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masks = masks
        self.tokens, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 6, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, text: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        steps, _ = self.lstm(self.tokens(text))
        last = torch.full((len(text),), -1)
        if self.masks and attention_mask is not None:
            last = attention_mask.sum(1) - 1
        return self.out(steps[torch.arange(len(text)), last])  # type: ignore[no-any-return]


def padded(items: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(one) for one in items])
    text = nn.utils.rnn.pad_sequence(items, batch_first=True)
    return {"text": text, "attention_mask": (torch.arange(text.shape[1]) < lengths[:, None]).long()}


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize(("batch_size", "num_workers"), [(5, 0), (5, 2), (1, 0)])
def test_rows_that_hang_on_the_longest_of_their_batch_are_said_to(
    masks: bool,
    batch_size: int,
    num_workers: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    items = [torch.arange(3 + i * 5 % 7) + 1 for i in range(12)]
    loader = DataLoader(items, batch_size=batch_size, collate_fn=padded)  # type: ignore[arg-type]
    model = LastStep(masks=masks).eval()
    run = embedx.extract(model, loader, layers="out", num_workers=num_workers, out=tmp_path)
    with torch.no_grad():
        alone = torch.cat([model(**padded([one])) for one in items])
    hangs = not masks and batch_size > 1
    assert np.allclose(run.embeddings["out"], alone, atol=1e-5) != hangs
    assert ("rows hang on the other items of their batch by the collate_fn" in caplog.text) == hangs


def test_what_enters_beside_tokens_may_be_of_any_kind() -> None:
    beside = {
        "x": torch.ones(3, 4, 2),
        "none": torch.ones(3, 0, 4, 1),
        "sparse_mask": torch.ones(3, 4).to_sparse(),
        "lengths": [],
        "names": ["a", "b"],
        "mask": np.array(["a"]),
    }
    assert _like_a_mask(beside) is None
    assert _like_a_mask({**beside, "pad": torch.ones(3, 1, 4)}) == "pad"
    assert _like_padded(beside) is None


def test_a_complex_mask_is_refused() -> None:
    with pytest.raises(ShapeError, match="attention_mask holds complex numbers"):
        token_mask({"attention_mask": torch.ones(2, 3) * 1j}, spellings=set())


KINDS = [torch.int64, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (3, 0), (3, 1), (1, 4), (3, 4), (3, 4, 0)])
def test_what_is_looked_at_for_padding_may_be_of_any_kind(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for name in ("x", "mask", "lengths"):
        inputs = {name: torch.ones(shape).to(dtype), "y": torch.ones(3, 4)}
        assert _like_padded(inputs) is None
        assert _like_a_mask(inputs, has_padding=True) is None
        assert not _is_padded(inputs)  # type: ignore[arg-type]
        assert _padded_and_ends(inputs, n=3) == (set(), set())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("has_words", [False, True])
def test_samples_that_are_padded_are_looked_at(is_turned: bool, has_words: bool) -> None:
    mask = torch.ones(12, 6, dtype=torch.long)
    mask[[3, 4, 10], 5] = 0
    mask[7, 2:] = 0
    words = {"words": mask * 7 if has_words else torch.full((12, 6), 7)}
    inputs = {**words, "mask": mask == 0 if is_turned else mask}
    chosen = _Share(8).of_batch(12, inputs)
    assert {3, 4, 7, 10} <= set(chosen)
    assert 8 <= len(chosen) <= 10
    many = torch.full((16, 6, 2), 7.0)
    many[1:12, 4:] = 0
    padded, ends = _padded_and_ends({"x": many}, n=16)
    assert padded == set(range(1, 12))
    assert ends == {0, 1}
    assert len(padded & set(_Share(8).of_batch(16, {"x": many}))) >= 6
    plain = {"x": torch.ones(12, 6)}
    share = _Share(8)
    assert share.of_batch(12, plain) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert [len(share.of_batch(12, plain)) for _ in range(7)] == [4, 0, 4, 0, 0, 0, 4]
    assert _Share(8).of_batch(3, inputs) == [0, 1, 2]
    assert _Share(8).of_batch(1, inputs) == []


class TwoTowers(nn.Module):
    """Questions of one length, and documents that are padded to it, with masks of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(20, 6)
        self.question, self.document = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(
        self, text: Tensor, attention_mask: Tensor, document: Tensor, document_mask: Tensor
    ) -> Tensor:
        asked = (self.question(self.tokens(text)) * attention_mask[..., None]).sum(1)
        found = (self.document(self.tokens(document)) * document_mask[..., None]).sum(1)
        return asked * found


@pytest.mark.parametrize("from_row", [0, 8, 99])
def test_a_second_mask_is_said_also_beside_one_that_leaves_nothing_out(
    from_row: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = [
        {
            "text": torch.arange(8),
            "attention_mask": torch.ones(8),
            "document": torch.arange(8),
            "document_mask": (torch.arange(8) < (5 if i >= from_row else 8)).long(),
        }
        for i in range(12)
    ]
    model = TwoTowers().eval()
    given: dict[str, Any] = {"layers": "document", "pooling": "mean_token", "batch_size": 4}
    embedx.extract(model, items, out=tmp_path / "a", **given)
    said = "document_mask looks like a mask of padding"
    assert caplog.text.count(said) == (from_row < 99)
    caplog.clear()
    embedx.extract(model, items, out=tmp_path / "one", **{**given, "batch_size": 1})
    assert caplog.text.count(said) == (from_row < 99)
    caplog.clear()
    with torch.no_grad(), embedx.record(model, "document", tmp_path / "b") as recorder:
        for i in range(0, 12, 4):
            model(*(torch.stack([one[key] for one in items[i : i + 4]]) for key in items[0]))
            recorder.batch()
    assert caplog.text.count(said) == (from_row < 99)


@pytest.mark.parametrize("kind", [torch.tensor, int])
def test_lengths_of_the_last_sample_alone_are_said(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Lengths(TwoTowers):
        def forward(
            self, text: Tensor, attention_mask: Tensor, document: Tensor, lengths: Any
        ) -> Tensor:  # type: ignore[override]
            shown = torch.arange(8)[None] < torch.as_tensor(lengths).reshape(-1, 1)
            return super().forward(text, attention_mask, document, shown)

    items = [
        {
            "text": torch.arange(1, 9),
            "attention_mask": torch.ones(8),
            "document": torch.arange(1, 9) * (torch.arange(8) < (3 if i == 4 else 8)),
            "lengths": kind(3 if i == 4 else 8),
        }
        for i in range(5)
    ]
    model = Lengths().eval()
    with (
        torch.no_grad(),
        embedx.record(model, "document", tmp_path / "a", pooling="mean_token") as recorder,
    ):
        for some in (items[:2], items[2:4], items[4:]):
            batch = {key: [one[key] for one in some] for key in items[0]}
            batch |= {
                key: torch.stack(batch[key]) for key in batch if isinstance(batch[key][0], Tensor)
            }
            model(**batch)
            recorder.batch()
    assert caplog.text.count("lengths looks like a mask of padding or lengths") == 1


def test_padding_that_a_mask_told_is_not_said_of_later_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [8, 5, 6, 8, 8, 8]
    masks = [torch.arange(8) < n for n in lengths]
    x = torch.arange(1, 9).float()[:, None].expand(8, 6)
    items = [{"x": x * mask[:, None], "attention_mask": mask.long()} for mask in masks]

    class Masked(Averages):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            return (self.steps(x) * attention_mask[..., None]).sum(1)

    given: dict[str, Any] = {"layers": "steps", "pooling": "mean_token", "batch_size": 2}
    embedx.extract(Masked().eval(), items, out=tmp_path, **given)
    assert "looks padded" not in caplog.text


class OwnPadding(TwoTowers):
    """Knows by the numbers of words which of a document are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 1, 8, batch_first=True)

    def forward(self, text: Tensor, attention_mask: Tensor, document: Tensor) -> Tensor:  # type: ignore[override]
        asked = (self.question(self.tokens(text)) * attention_mask[..., None]).sum(1)
        found = self.layer(self.tokens(document), src_key_padding_mask=document == 0)
        return asked * found[:, 0]


@pytest.mark.parametrize("descends", [False, True])
def test_padding_of_data_in_order_of_length_is_said(
    descends: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = torch.tensor([3] * 16 + [5] * 8 + [8] * 8)
    lengths = lengths.flip(0) if descends else lengths
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(1, 20, (32, 8), generator=rng)
    x = x * (torch.arange(8) < lengths[:, None])
    given: dict[str, Any] = {"layers": "steps", "pooling": "mean_token"}
    for batch_size in (1, 4, 8):
        out = tmp_path / str(batch_size)
        embedx.extract(Averages().eval(), x, out=out, batch_size=batch_size, **given)
    assert caplog.text.count("looks padded, for some samples end or begin") == 3


@pytest.mark.parametrize("pad", [0.0, -1.0, -100.0])
def test_padding_of_many_kinds_is_told(pad: float) -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.tensor([20, 12, 17, 20, 8])
    is_shown = torch.arange(20) < lengths[:, None]
    steps = torch.randn(5, 20, 3, generator=rng)
    padded = torch.where(is_shown[..., None], steps, pad)
    frames = torch.where(
        is_shown[..., None, None, None], torch.rand(5, 20, 3, 2, 2, generator=rng), pad
    )
    sound = torch.randn(5, 400, generator=rng)
    sound = torch.where(is_shown.repeat_interleave(20, 1), sound, pad)
    for given in (padded, padded.flip(1), padded.transpose(1, 2), frames, sound):
        assert _like_padded({"x": given}) == "x"
        assert _like_padded({"x": given[lengths == 20]}) is None
    classes = torch.tensor([[1, 0, 0], [2, 3, 4], [4, 1, 2], [3, 3, 1]])  # of a table
    for given in (steps, steps.transpose(1, 2), padded[:, :, 0], torch.rand(5, 3, 8, 8), classes):
        assert _like_padded({"x": given}) is None


def test_padding_within_is_said_also_beside_a_mask_that_leaves_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = torch.arange(8) + 1
    document[5:] = 0
    item = {"text": torch.arange(8), "attention_mask": torch.ones(8), "document": document}
    given: dict[str, Any] = {"layers": "layer", "pooling": "mean_token"}
    embedx.extract(OwnPadding().eval(), [item] * 6, out=tmp_path, **given)
    assert "masks padding by itself, at layer" in caplog.text


def test_averages_that_cancel_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(5, 3, 12, 12)
    embedx.extract(model, x, layers=["0", "1", "2"], pooling="gap", out=tmp_path / "a")
    said = [one.getMessage().partition(":")[0] for one in caplog.records]
    assert said == ["1"]
    embedx.extract(model, 0 * x, layers=["1", "2"], pooling="gap", out=tmp_path / "b")
    embedx.extract(model, x, layers="1", pooling="max", out=tmp_path / "c")
    assert len(caplog.records) == 1


class DrawsForSome(ByLargest):
    """Fills what is missing with noise."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            x = torch.where(x.isnan(), torch.randn(x.shape), x)
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_network_that_draws_for_some_samples_alone_is_said_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.rand(20, 6)
    x[17, 2] = torch.nan
    embedx.extract(DrawsForSome().eval(), x, layers="linear", batch_size=4, out=tmp_path)
    assert caplog.text.count("draws random numbers in its passes") == 1


class Averages(nn.Module):
    """Words or steps, one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.steps = nn.Embedding(20, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps(x if x.is_floating_point() else self.words(x))
        return steps.mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("pad", [0, 9])
@pytest.mark.parametrize("side", ["left", "right", "none", "one length", "steps", "whole steps"])
def test_what_looks_padded_without_a_mask_is_said(
    side: str, pad: int, batch_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = torch.tensor([8, 5, 3, 8, 6, 7])
    if side == "one length":
        lengths[:] = 5
    is_token = torch.arange(8) < lengths[:, None]
    rng = torch.Generator().manual_seed(pad)
    x = torch.randint(1, 9, (6, 8), generator=rng)
    if "steps" in side:
        x = torch.randn(6, 8, 6, generator=rng)
        is_token = is_token[..., None]
    if side not in ("none", "whole steps"):
        x = torch.where(is_token, x, pad if side != "steps" else 0)
    if side == "left":
        x = x.flip(1)
    given: dict[str, Any] = {"layers": "steps", "pooling": "mean_token", "batch_size": batch_size}
    embedx.extract(Averages().eval(), x, out=tmp_path / "a", **given)
    is_said = side in ("left", "right", "steps")
    assert caplog.text.count("looks padded, for some samples end or begin") == is_said
    caplog.clear()
    embedx.extract(Averages().eval(), x, layers="steps", pooling="cls", out=tmp_path / "b")
    assert caplog.text == ""


class Digits(nn.Module):
    """Takes pictures without an axis of channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x[:, None]).relu().mean((2, 3)))  # type: ignore[no-any-return]


def test_what_a_convolution_gives_has_channels_first_whatever_entered(tmp_path: Path) -> None:
    model, x = Digits().eval(), torch.randn(5, 8, 8)
    run = embedx.extract(model, x, layers="conv", out=tmp_path / "a")
    assert run.point_attrs["conv"]["pooling"] == "gap"
    with torch.no_grad():
        assert np.allclose(run.embeddings["conv"], model.conv(x[:, None]).mean((2, 3)), atol=1e-6)
        with embedx.record(model, "conv", tmp_path / "b") as recorder:
            model(x)
            recorder.batch()
    assert np.array_equal(embedx.open(tmp_path / "b").embeddings["conv"], run.embeddings["conv"])


class ChannelsLast(nn.Conv2d):
    """Takes and gives pictures with channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous()


def test_a_convolution_of_ones_own_may_have_channels_last(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ChannelsLast(3, 8, 3, padding=1), ChannelsLast(8, 12, 3, stride=2))
    x = torch.randn(5, 16, 16, 3)
    with pytest.raises(ShapeError, match=r"gap_last \(of channels last\)|pooling=gap_last"):
        embedx.extract(model, x, layers="1", out=tmp_path)


class Windows(nn.Module):
    """Cuts a picture into windows of tokens, and those into a batch of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU())
        self.mix = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU(), nn.Dropout())
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        cut = self.conv(x).reshape(n, 12, 4, h // 4, 4, w // 4).permute(0, 2, 4, 3, 5, 1)
        return self.out(self.mix(cut.reshape(n, 16, -1, 12)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layer", ["mix", "mix.1", "mix.2", "out"])
def test_windows_of_tokens_are_not_taken_for_maps(layer: str, tmp_path: Path) -> None:
    x = torch.randn(3, 3, 32, 24)
    with pytest.raises(ShapeError, match="pooling=auto cannot tell what"):
        embedx.extract(Windows().eval(), x, layers=layer, out=tmp_path)
    run = embedx.extract(Windows().eval(), x, layers="conv", out=tmp_path)
    assert run.point_attrs["conv"]["pooling"] == "gap"
    assert run.embeddings["conv"].shape == (3, 12)


def test_what_a_linear_layer_gives_has_channels_last_whatever_its_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(3), nn.Linear(24, 24))  # (n, 3, 32, 24) of 32x24 px
    x = torch.randn(3, 3, 32, 24)
    with pytest.raises(ShapeError, match="choose pooling=gap_last or pooling=flatten"):
        embedx.extract(model, x, layers="1", out=tmp_path)


class Steps(nn.Module):
    """Convolves steps of time, of which some are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 5, 3, padding=1)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2) * attention_mask[:, None])  # type: ignore[no-any-return]


def test_channels_of_a_convolution_over_time_are_not_taken_for_tokens(tmp_path: Path) -> None:
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5)
    mask[0, 3:] = 0
    data = [{"x": one, "attention_mask": of} for one, of in zip(x, mask, strict=True)]
    with pytest.raises(ShapeError, match="has channels first; choose a function of your own"):
        embedx.extract(Steps().eval(), data, layers="conv", out=tmp_path)


class Routed(nn.Module):
    """Runs a layer where one sample of a batch wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.more = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.more(x) if (x[:, 0] > 0).any() else x


def test_layers_that_run_for_the_sake_of_another_sample_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Routed().eval(), torch.randn(8, 6)
    first = model.first(x)[:, 0]
    assert (first > 0).any()
    assert (first < 0).any()
    embedx.extract(model, x, layers="more", out=tmp_path / "mixed")
    assert "layer more: rows hang on the samples beside them" in caplog.text
    caplog.clear()
    embedx.extract(model, x[first > 0], layers="more", out=tmp_path / "alike")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("values", "others", "are_alike"),
    [
        ([1e-10, 0.14, 0.1], [1.5e-8, 0.14, 0.1], True),  # rounding of the others
        ([0.0, 0.14, 0.1], [1e-3, 0.14, 0.1], False),
        ([-1e9, 0.1, 0.2], [-1e9, 0.1, 0.3], False),  # of scores of which some are masked
        ([-1e9, 0.1, 0.2], [-1e9, 0.1, 0.2], True),
    ],
)
def test_rows_are_alike_but_for_rounding(
    values: list[float], others: list[float], are_alike: bool
) -> None:
    assert is_alike(torch.tensor([values]), torch.tensor([others]), most=1e-3) == are_alike
