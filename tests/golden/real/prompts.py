"""The prompts of Gemma's goldens, and the windows of text in which perplexity is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TEXT = (Path(__file__).parent / "text.txt").read_text()

# `crossing` outgrows the window of 512 tokens while it generates, `long` is past it from the start.
PROMPTS = {
    "raw": "The three primary colors are",
    "code": "import math\n\nclass Circle:\n    def __init__(self, radius):\n",
    "unicode": "La città più grande d'Italia è Roma — 永遠の都. 🏛️ La sua storia",
    "crossing": TEXT[:2200],
    "long": TEXT[:3800],
}

GEMMA_WINDOW = 768  # more than the 512 positions that most of its layers look back
SMOLLM2_WINDOW = 512


def windows(token_ids: Sequence[int], size: int, prefix: Sequence[int] = ()) -> list[list[int]]:
    """Cut a text into pieces of at most `size` tokens, each with `prefix` in front."""
    step = size - len(prefix)
    pieces = [token_ids[i : i + step] for i in range(0, len(token_ids), step)]
    return [[*prefix, *piece] for piece in pieces]
