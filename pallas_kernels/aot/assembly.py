"""Reads what assembler, disassembler and XLA say about kernels. Text in, numbers out."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.aot.report import KernelReport

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<target>[^']+)'")
_SPILLS = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers")
_STATIC = re.compile(r"(?P<bytes>\d+) bytes smem")
_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)", re.MULTILINE
)
_THUNK = re.compile(
    r"kCustomKernel \[[^\]]*\] (?P<name>\S+) grid: \[(?P<grid>[^\]]*)\] "
    r"threads: \[(?P<threads>[^\]]*)\]\s+shared_memory: (?P<bytes>\d+) bytes"
)
_MOSAIC = re.compile(r"Resources\(smem_scratch_bytes=(?P<bytes>\d+)")


def read_assembler_log(text: str) -> list[KernelReport]:
    """Return the kernels of one `ptxas -v` call, in its order.

    Raises:
        ValueError: A kernel is announced without its statistics.
    """
    kernels = []
    for entry, part in _parts(_ENTRY, text):
        spills, used = _SPILLS.search(part), _USED.search(part)
        if spills is None or used is None:
            raise ValueError(f"expected statistics of a kernel, got {part!r}")
        static = _STATIC.search(part)
        kernels.append(
            KernelReport(
                name=entry["name"],
                target=entry["target"],
                registers=int(used["registers"]),
                spill_bytes=int(spills["stores"]) + int(spills["loads"]),
                stack_bytes=int(spills["stack"]),
                shared_bytes=int(static["bytes"]) if static else 0,
            )
        )
    return kernels


def count_instructions(disassembly: str) -> dict[str, Counter[str]]:
    """Return how often each opcode occurs in each function; modifiers are cut off."""
    counts: dict[str, Counter[str]] = {}
    for match, body in _parts(_FUNCTION, disassembly):
        opcodes = Counter(found["opcode"] for found in _INSTRUCTION.finditer(body))
        counts.setdefault(match[1], Counter()).update(opcodes)
    return counts


class Launch(NamedTuple):
    """How XLA starts a kernel.

    Attributes:
        grid: Thread blocks by axis.
        threads: Of a block.
        shared_bytes: Of a block, beyond what the kernel declares.
    """

    grid: tuple[int, ...]
    threads: int
    shared_bytes: int


def read_launches(thunks: str) -> dict[str, Launch]:
    """Return the launches in XLA's list of thunks; of one kernel's, the largest in each respect."""
    launches: dict[str, Launch] = {}
    for match in _THUNK.finditer(thunks):
        threads = math.prod(_sizes(match["threads"]))
        launch = Launch(_sizes(match["grid"]), threads, int(match["bytes"]))
        known = launches.get(match["name"], launch)
        launches[match["name"]] = Launch(
            tuple(map(max, known.grid, launch.grid)),
            max(known.threads, launch.threads),
            max(known.shared_bytes, launch.shared_bytes),
        )
    return launches


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def read_mosaic_resources(output: str) -> list[int]:
    """Return the shared bytes of each Mosaic kernel, in the order in which they were lowered."""
    return [int(match["bytes"]) for match in _MOSAIC.finditer(output)]


def _parts(head: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each match with the text up to the next."""
    matches = list(head.finditer(text))
    for match, following in itertools.zip_longest(matches, matches[1:]):
        yield match, text[match.end() : following.start() if following else len(text)]
