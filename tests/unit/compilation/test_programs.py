"""Programs are compiled once each, the needed ones first, and nobody waits for the others."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from jaxinfer.compilation import Programs

TIMEOUT_S = 20.0


class Workshop:
    """Lowerings whose compiling can be held up.

    Attributes:
        begun: Keys in the order in which their compiling began.
        open: What a key waits for before it is compiled; by default all go on at once.
    """

    def __init__(self, keys, broken=()):
        self.begun: list = []
        self.broken = set(broken)
        self.open = {key: threading.Event() for key in keys}
        self.programs = Programs({key: self._lower(key) for key in keys})

    def _lower(self, key):
        def compile():
            self.begun.append(key)
            assert self.open[key].wait(TIMEOUT_S), key
            if key in self.broken:
                raise MemoryError(key)
            return f"program {key}"

        return lambda: SimpleNamespace(compile=compile)

    def release(self, *keys) -> None:
        for key in keys or self.open:
            self.open[key].set()


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)


@pytest.fixture
def workshops() -> Iterator[list[Workshop]]:
    made: list[Workshop] = []
    yield made
    for workshop in made:
        workshop.programs.close()
        workshop.release()


def wait_until(condition) -> None:
    step = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.005)):
        if condition():
            return
        step.wait(0.005)
    raise AssertionError("it never came to that")


def test_without_threads_a_program_is_compiled_on_first_use_only() -> None:
    workshop = Workshop(range(3))
    workshop.release()
    assert workshop.programs[1] == workshop.programs[1] == "program 1"
    assert workshop.begun == [1]
    assert len(workshop.programs) == 1


def test_what_serving_needs_comes_first_and_the_rest_in_order(one_core, workshops) -> None:
    workshops.append(workshop := Workshop(range(6)))
    workshop.release()
    workshop.programs.start(first=[4, 2])
    workshop.programs.wait()
    assert workshop.begun == [4, 2, 0, 1, 3, 5]
    assert workshop.programs.num_pending == 0


def test_a_rest_that_is_held_begins_when_it_is_let_go(one_core, workshops) -> None:
    workshops.append(workshop := Workshop(range(5)))
    workshop.release()
    workshop.programs.start(first=[4], hold_rest=True)
    workshop.programs.wait([4])
    assert workshop.begun == [4] and workshop.programs.num_pending == 4
    # Who needs one of them gets it all the same, and no other with it.
    assert workshop.programs[2] == "program 2"
    assert workshop.begun == [4, 2]
    workshop.programs.go_on()
    wait_until(lambda: workshop.programs.num_pending == 0)
    assert workshop.begun == [4, 2, 0, 1, 3]


def test_a_held_rest_can_be_waited_for_and_given_up(one_core, workshops) -> None:
    for give_up in (False, True):
        workshops.append(workshop := Workshop(range(3)))
        workshop.release()
        workshop.programs.start(first=[0], hold_rest=True)
        workshop.programs.wait([0])
        if give_up:
            workshop.programs.close()
            wait_until(lambda w=workshop: w.programs._num_threads == 0)
        else:
            workshop.programs.wait()
        assert workshop.begun == ([0] if give_up else [0, 1, 2])


def test_readiness_does_not_wait_for_the_rest(one_core, workshops) -> None:
    workshops.append(workshop := Workshop(range(4)))
    workshop.release(3)
    done: list[tuple[int, int]] = []
    workshop.programs.start(first=[3])
    workshop.programs.wait([3], lambda *progress: done.append(progress))
    assert done == [(0, 1), (1, 1)]
    assert workshop.programs.num_pending == 3


def test_whoever_asks_while_it_is_compiled_gets_the_same_program(workshops) -> None:
    workshops.append(workshop := Workshop(range(8)))
    workshop.programs.start(first=[7])
    got: list = []
    askers = [
        threading.Thread(target=lambda: got.append([workshop.programs[k] for k in range(8)]))
        for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    workshop.release()
    for asker in askers:
        asker.join(TIMEOUT_S)
    assert got == [[f"program {k}" for k in range(8)]] * 4
    assert Counter(workshop.begun) == Counter(range(8))


def test_a_needed_program_jumps_the_queue(one_core, workshops) -> None:
    workshops.append(workshop := Workshop(range(5)))
    workshop.programs.start()
    wait_until(lambda: workshop.begun == [0])
    asker = threading.Thread(target=lambda: workshop.programs[3])
    asker.start()
    wait_until(lambda: workshop.programs._queue == [3, 1, 2, 4])
    workshop.release(0, 3)
    asker.join(TIMEOUT_S)
    assert workshop.begun[:2] == [0, 3]


def test_until_a_bucket_is_ready_the_next_larger_one_serves(one_core, workshops) -> None:
    keys = [("backbone", size) for size in (1, 4, 8, 16)]
    workshops.append(workshop := Workshop(keys))
    programs = workshop.programs
    assert programs.smallest_ready("backbone", (4, 8, 16)) == 4  # nobody compiles ahead
    programs.start(first=[("backbone", 16)])
    wait_until(lambda: workshop.begun == [("backbone", 16)])
    assert programs.smallest_ready("backbone", (8, 16)) is None
    workshop.release(("backbone", 16))
    wait_until(lambda: programs.smallest_ready("backbone", (8, 16)) == 16)
    # 8 was asked for, so it is the next.
    wait_until(lambda: len(workshop.begun) == 2)
    assert workshop.begun[1] == ("backbone", 8)
    workshop.release()
    programs.wait()
    assert programs.smallest_ready("backbone", (8, 16)) == 8


def test_an_error_is_its_users_alone(one_core, workshops) -> None:
    workshops.append(workshop := Workshop(range(3), broken=[1]))
    workshop.release()
    workshop.programs.start()
    assert workshop.programs[2] == "program 2"
    with pytest.raises(MemoryError):
        _ = workshop.programs[1]
    assert workshop.programs.num_pending == 0


def test_once_closed_nothing_is_compiled_in_advance(one_core, workshops) -> None:
    workshops.append(workshop := Workshop(range(4)))
    workshop.programs.start()
    wait_until(lambda: workshop.begun == [0])
    workshop.programs.close()
    workshop.release()
    wait_until(lambda: not workshop.programs._num_threads)
    assert workshop.begun == [0]
    assert workshop.programs[2] == "program 2"


def test_a_process_that_ends_waits_for_the_program_in_work_only() -> None:
    script = """
import time
from jaxinfer.compilation import Programs

class Slow:
    def compile(self):
        print("compiled", flush=True)
        time.sleep(0.2)
        return 1

programs = Programs(dict.fromkeys(range(1000), Slow))
programs.start(first=[0])
programs.wait([0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    assert 1 <= done.stdout.count("compiled") < 30
    assert not done.stderr


def test_who_starts_the_threads_does_not_make_them_daemons(workshops):
    """A server loads in a daemon thread; what it starts is waited for at the end all the same."""
    workshop = Workshop("ab")
    workshops.append(workshop)
    loader = threading.Thread(target=workshop.programs.start, args=("a",), daemon=True)
    loader.start()
    loader.join(TIMEOUT_S)
    compiling = [t for t in threading.enumerate() if t.name.startswith("jaxinfer-compile")]
    assert compiling and not any(thread.daemon for thread in compiling)
