"""Rings with one wait or arrival missing: what the race detector has to catch."""

from __future__ import annotations

from pallas_kernels.mosaic.ring import Ring


class NoWaitForFreeSlots(Ring):
    def wait_free(self, kind, step) -> None:
        pass


class NoWaitForKeys(Ring):
    def wait_full(self, kind, step) -> None:
        if kind != "k":
            super().wait_full(kind, step)


class NoWaitForValues(Ring):
    def wait_full(self, kind, step) -> None:
        if kind != "v":
            super().wait_full(kind, step)


class NoMeetings(Ring):
    def meet(self) -> None:
        pass


class KeysAreNeverReleased(Ring):
    def release(self, kind, step) -> None:
        if kind != "k":
            super().release(kind, step)


RINGS: dict[str, type[Ring]] = {
    ring.__name__: ring
    for ring in (
        Ring,
        NoWaitForFreeSlots,
        NoWaitForKeys,
        NoWaitForValues,
        NoMeetings,
        KeysAreNeverReleased,
    )
}
