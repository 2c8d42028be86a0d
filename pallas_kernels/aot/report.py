"""What compiling one case for one chip gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel of a compiled program.

    Attributes:
        name: Its entry point.
        target: E.g. "sm_90a".
        registers: Per thread.
        spill_bytes: Written to and read from local memory because registers ran out.
        stack_bytes: Local memory of a thread.
        shared_bytes: Of a thread block, static and dynamic.
        threads: Of a thread block; 0 where unknown.
        grid: Thread blocks of the largest launch by axis; empty where unknown.
        instructions: How often each opcode occurs, e.g. {"HGMMA": 12}; only of the case's own
            kernels.
    """

    name: str
    target: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int = 0
    threads: int = 0
    grid: tuple[int, ...] = ()
    instructions: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> KernelReport:
        values: dict[str, Any] = {**fields, "grid": tuple(fields["grid"])}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of one case on one chip.

    Attributes:
        case: Name of the case.
        chip: Name of the chip.
        kernels: Every kernel of the program, XLA's own among them.
        error: "Type: message" of the exception that ended it.
        crash: Last words of a process that died or had to be ended.
        seconds: Tracing, lowering and compiling.
        facts: What `Program.inspect` found.
    """

    case: str
    chip: str
    kernels: tuple[KernelReport, ...] = ()
    error: str | None = None
    crash: str | None = None
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.error is None and self.crash is None

    @property
    def refused(self) -> bool:
        """Whether we said ourselves that the chip cannot do it."""
        return (self.error or "").startswith("NotImplementedError: ")

    def named(self, beginnings: tuple[str, ...]) -> tuple[KernelReport, ...]:
        """The kernels whose names begin so: those that are ours."""
        return tuple(k for k in self.kernels if k.name.startswith(beginnings))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Report:
        kernels = tuple(KernelReport.from_json(kernel) for kernel in fields["kernels"])
        values: dict[str, Any] = {**fields, "kernels": kernels}
        return cls(**values)
