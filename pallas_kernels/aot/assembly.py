"""Reads what assembler, disassembler and XLA say about kernels. Text in, numbers out."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping

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
    r"kCustomKernel \[[^\]]*\] (?P<name>\S+) grid: \[[^\]]*\] threads: \[(?P<threads>[^\]]*)\]"
    r"\s+shared_memory: (?P<bytes>\d+) bytes"
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


def read_launches(thunks: str) -> Mapping[str, tuple[int, int]]:
    """Return threads per block and shared bytes of each kernel in XLA's list of thunks.

    A kernel that is launched several times counts with its largest launch.
    """
    launches: dict[str, tuple[int, int]] = {}
    for match in _THUNK.finditer(thunks):
        threads = 1
        for size in match["threads"].split(","):
            threads *= int(size)
        known = launches.get(match["name"], (0, 0))
        launches[match["name"]] = (
            max(threads, known[0]),
            max(int(match["bytes"]), known[1]),
        )
    return launches


def read_mosaic_resources(output: str) -> list[int]:
    """Return the shared bytes of each Mosaic kernel, in the order in which they were lowered."""
    return [int(match["bytes"]) for match in _MOSAIC.finditer(output)]


def _parts(head: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each match with the text up to the next."""
    matches = list(head.finditer(text))
    for match, following in itertools.zip_longest(matches, matches[1:]):
        yield match, text[match.end() : following.start() if following else len(text)]
