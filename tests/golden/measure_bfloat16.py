"""Print how far bfloat16 takes each family from the float32 reference, as docs/reference/models.md
has it.

    .venv/bin/python -m tests.golden.measure_bfloat16
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from jaxinfer.models import family_of
from tests.engines import FAMILIES, GOLDEN, head_of, hidden_of, loaded, make_engine

PROMPT = "medium"


def main() -> None:
    write = sys.stdout.write
    write("| family | checkpoint | off, of the spread | same next token |\n")
    write("| --- | --- | --- | --- |\n")
    for name in checkpoints():
        source, _, _, _ = loaded(name)
        off, same = drift(name)
        write(f"| {family_of(source.config).name} | `{name}` | {off:.1%} | {same:.0%} |\n")


def checkpoints() -> Iterator[str]:
    """The goldens that are stored as folders."""
    for folder in (GOLDEN, FAMILIES):
        yield from sorted(path.parent.name for path in folder.glob("*/config.json"))


def drift(name: str) -> tuple[float, float]:
    """Return the root mean square error of the logits over their standard deviation, and the share
    of positions where the most probable token is the same."""
    folder = GOLDEN if (GOLDEN / name).exists() else FAMILIES
    with np.load(folder / f"{name}.npz") as data:
        token_ids, expected = data[f"{PROMPT}_token_ids"], data[f"{PROMPT}_logits"]
    # Up to where the RoPE variants that depend on the length have one set of frequencies.
    engine = make_engine(name, (32,), dtype="bfloat16", max_model_len=60)
    logits = head_of(engine, hidden_of(engine, token_ids, 32))
    error = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
    return float(error), float((logits.argmax(-1) == expected.argmax(-1)).mean())


if __name__ == "__main__":
    main()
