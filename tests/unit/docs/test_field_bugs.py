"""`docs/reference/field-bugs.md`: each row names tests that exist, or says why there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "field-bugs.md"
ROW = re.compile(r"^\| (?P<seen>[^|]+) \| (?P<symptom>[^|]+) \| (?P<here>[^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
REASONS = ("Cannot happen", "Cannot be told by a test")


def rows() -> list[tuple[str, str]]:
    found = [(m["seen"], m["here"]) for m in ROW.finditer(PAGE.read_text())]
    return [row for row in found if row[0] not in ("seen in", "---")]


def test_all_rows_are_read():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(rows()) == len(lines) - 2 * 5 > 60


@pytest.mark.parametrize(("seen", "here"), rows(), ids=lambda x: x[:30])
def test_each_bug_has_a_test_or_a_reason(seen, here):
    tests = TEST.findall(here)
    assert tests or here.startswith(REASONS), here
    for path, name in tests:
        source = (ROOT / path).read_text()
        assert re.search(rf"^\s*(def {name}\(|{name} = |class {name}\b)", source, re.MULTILINE)
