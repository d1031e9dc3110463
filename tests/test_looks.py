"""What further passes of the first batch show: whose tokens a mask is of, and what padding does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import embedx
from embedx.errors import ShapeError


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

    def forward(self, text: Tensor, summary: Tensor, attention_mask: Tensor) -> Tensor:
        is_padding = attention_mask == 0
        found = self.encoder(self.tokens(text), src_key_padding_mask=is_padding)
        t = summary.shape[1]
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        given = self.tokens(summary)
        return self.decoder(  # type: ignore[no-any-return]
            given, found, tgt_mask=later, memory_key_padding_mask=is_padding
        )


@pytest.mark.parametrize("pool", ["mean_token", "max_token", "auto"])
def test_a_mask_of_one_sequence_is_not_taken_for_another_of_any_name(
    pool: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, items = Translator().eval(), sequences()
    with pytest.raises(ShapeError, match="decoder: its tokens are those of summary, and the mask "):
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
