"""How many decode steps may go into one dispatch, by how long a step takes. Reads no clock.

A newcomer waits until the dispatch in flight is over. A fixed number of steps would make that wait
longer the more requests run, and save ever less: what is saved is the host's share of each step.
"""

from __future__ import annotations

MAX_DISPATCH_S = 0.05
"""A dispatch of several steps takes about so long: as much as a step of a prompt's chunk may take
anyway, and short enough that a reader sees text flow."""

_WEIGHT = 0.25  # of a new measurement
_MOST = 4.0  # times the estimate: what lies beyond is a hiccup of the machine, not of the step


class StepTimer:
    """Remembers how long decode steps take, by how many rows they have.

    Args:
        most_steps: Never more than so many.
    """

    def __init__(self, most_steps: int):
        self.most_steps = most_steps
        self._step_s: dict[int, float] = {}

    def max_steps(self, num_rows: int) -> int:
        """Return how many steps of that many rows may go together; 1 until one was timed."""
        step_s = self._step_s.get(num_rows.bit_length())
        if step_s is None:
            return 1
        return max(1, min(self.most_steps, int(MAX_DISPATCH_S / step_s)))

    def timed(self, num_rows: int, step_s: float) -> None:
        """Learn that a step of so many rows took so many seconds."""
        key = num_rows.bit_length()
        known = self._step_s.setdefault(key, max(step_s, 1e-6))
        self._step_s[key] = known + _WEIGHT * (min(step_s, _MOST * known) - known)
