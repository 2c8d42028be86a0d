"""Text to train the tiny vocabularies on: sentences of several scripts, repeated and varied."""

from __future__ import annotations

import random

_TEXT = (
    "the of and to in is it that was for on are with as his they be at one have this from "
    "or had by hot word but what some we can out other were all there when up use your "
    "how said an each she which do their time if will way about many then them write "
    "would like so these her long make thing see him two has look more day could go come "
    "did number sound no most people my over know water than call first who may down side "
    "been now find hello world return value table number naive façade été Straße Русский "
    "слово мир Ελληνικά 你好 世界 今天 日本語 テキスト 한국어 مرحبا नमस्ते 😀 👍 123 2024 3.14 0x1F "
    "snake_case CamelCase it's we've don't I'm "
)
_WORDS = _TEXT.split()
_CODE = (
    "def f(x):\n    return x ** 2\n",
    "for i in range(10):\n        print(i)\n",
    "if (a[i] > b[j]) {\n\treturn c;\n}\n",
    '{"key": ["value", 1.5, null]}\n',
    "<div class='a'>text</div>\n\n",
    "https://example.org/path?query=1\n",
)


def lines(seed: int = 0, count: int = 2000) -> list[str]:
    """Return the same lines for the same seed."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        words = rng.choices(_WORDS, k=rng.randint(3, 12))
        separators = rng.choices((" ", " ", " ", ", ", ". ", "  ", "\n"), k=len(words))
        text = "".join(w + s for w, s in zip(words, separators, strict=True))
        result.append(text.capitalize() + rng.choice(("", "!", "?", " ...", rng.choice(_CODE))))
    return result
