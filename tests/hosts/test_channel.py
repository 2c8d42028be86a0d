"""Messages between hosts, and how each side notices that the other is gone."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import Queue

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, HostLostError
from jaxinfer.hosts.channel import STOP, Follower, Leader
from jaxinfer.hosts.facts import difference, facts
from jaxinfer.hosts.leader import LeadingRunner
from jaxinfer.hosts.meeting import check_hosts
from jaxinfer.hosts.messages import Decoder, Encoder, Message
from jaxinfer.loading import load_replicas
from jaxinfer.model_runner import ModelRunner

pytestmark = pytest.mark.timeout(60)
SECRET = bytes(range(16))
TIMEOUT_S = 20.0

arrays = st.one_of(
    st.none(),
    st.lists(st.integers(-3, 3), max_size=12).map(lambda x: np.array(x, np.int32)),
    st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4).map(
        lambda x: np.array(x, np.uint32).reshape(2, 2)
    ),
)
messages = st.lists(
    st.builds(
        Message,
        st.sampled_from(["a", "b"]),
        st.integers(0, 1),
        st.tuples(arrays, arrays),
        st.text(),
    ),
    max_size=6,
)


def roundtrip(sent: list[Message]) -> list[Message]:
    encoder = Encoder()
    stream = io.BytesIO(b"".join(map(encoder.encode, sent)))
    decoder = Decoder(stream.read)
    return [decoder.decode() for _ in sent]


@given(messages)
def test_messages_arrive_as_they_were_sent(sent: list[Message]) -> None:
    for one, other in zip(sent, roundtrip(sent), strict=True):
        assert (one.word, one.number, one.text) == (other.word, other.number, other.text)
        for a, b in zip(one.arrays, other.arrays, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)


def test_of_a_page_table_only_what_changed_is_sent() -> None:
    encoder, table = Encoder(), np.zeros((256, 2048), np.int32)
    first = len(encoder.encode(Message("decode", 256, (table,))))
    table[:, 7] = 1
    second = len(encoder.encode(Message("decode", 256, (table,))))
    assert first > 2**21 and second < 2**12


def test_bytes_of_somebody_else_are_refused() -> None:
    with pytest.raises(ConnectionError, match="not one of ours"):
        Decoder(io.BytesIO(b"GET / HTTP/1.1\r\n").read).decode()


class Pair:
    """A leader and what stands in for its follower."""

    def __init__(self, timeout_s: float, **more):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            stranger = socket.create_connection((host, port))
            stranger.sendall(b"x" * 20)
            joined = threading.Thread(target=self._join, args=(host, port, timeout_s))
            joined.start()
            self.leader = Leader(listener, SECRET, 1, timeout_s, **more)
            joined.join(TIMEOUT_S)
        assert stranger.recv(1) == b""  # it was shown out
        stranger.close()

    def _join(self, *where) -> None:
        self.follower = Follower(*where[:2], SECRET, 1, where[2])

    def carry_out(self) -> Message:
        message = self.follower.receive()
        self.follower.answer()
        return message


@pytest.fixture
def pair():
    made: list[Pair] = []

    def make(timeout_s: float = TIMEOUT_S, **more) -> Pair:
        made.append(Pair(timeout_s, **more))
        return made[-1]

    yield make
    for each in made:
        each.leader.close()
        each.follower.close()
        for thread in threading.enumerate():
            if thread.name.startswith("jaxinfer-host-"):
                thread.join(TIMEOUT_S)


def test_what_is_sent_is_carried_out_in_order_until_stop(pair) -> None:
    both = pair()
    both.leader.send(Message("load", text="{}"))
    assert both.carry_out().text == "{}"
    both.leader.wait_ready()
    both.leader.send(Message("backbone", 4, (np.arange(3, dtype=np.int32),)))
    assert both.carry_out().number == 4
    both.leader.close()
    assert both.carry_out().word == STOP
    with pytest.raises(HostLostError, match="host 0 has ended"):
        both.follower.receive()


def lost(leader: Leader) -> str:
    with leader._changed:
        assert leader._changed.wait_for(lambda: leader.lost, TIMEOUT_S)
    with pytest.raises(HostLostError) as caught:
        leader.check()
    with pytest.raises(HostLostError):
        leader.send(Message("backbone"))
    return str(caught.value)


def test_a_follower_that_ends_is_lost_at_once_even_while_it_loads(pair) -> None:
    both = pair()
    both.leader.send(Message("load"))
    threading.Timer(0.1, both.follower.close).start()
    with pytest.raises(HostLostError, match=r"has ended; start all hosts again"):
        both.leader.wait_ready()


def test_a_follower_that_stops_answering_hangs(pair) -> None:
    both = pair(0.4)
    both.leader.send(Message("load"))
    both.carry_out()
    both.leader.wait_ready()
    start = time.monotonic()
    assert "hangs: no answer for 0.4 s" in lost(both.leader)
    assert time.monotonic() - start < 3


def test_a_process_that_hangs_is_lost_however_long_its_devices_may_take(pair) -> None:
    """Without warm-up a call may compile for minutes; a stopped process answers no ping either."""
    both = pair(0.4, call_timeout_s=TIMEOUT_S)
    both.leader.wait_ready()
    start = time.monotonic()
    assert "hangs: no answer for 0.4 s" in lost(both.leader)
    assert time.monotonic() - start < 3


def test_devices_that_hang_are_told_from_a_process_that_does(pair) -> None:
    both = pair(0.4, call_timeout_s=1.5)
    both.leader.wait_ready()
    both.follower.listen(on_lost=lambda error: None)  # answers pings
    both.leader.send(Message("backbone"))
    assert "hangs: no answer for 1.5 s" in lost(both.leader)


def test_a_follower_says_why_it_cannot_go_on(pair) -> None:
    both = pair()
    both.leader.send(Message("load"))
    both.follower.fail("no such folder: größer")
    assert "cannot go on: no such folder: größer; start all hosts again" in lost(both.leader)


def test_what_waits_inside_the_devices_is_left_behind_when_a_host_is_lost(
    pair, monkeypatch
) -> None:
    exits = []
    monkeypatch.setattr("atexit.register", lambda *call: exits.append(call))
    both = pair()
    assert both.leader.watched(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        both.leader.watched(lambda: 1 // 0)
    assert not exits
    released = threading.Event()
    threading.Timer(0.1, both.follower.close).start()
    with pytest.raises(HostLostError, match="has ended"):
        both.leader.watched(lambda: released.wait(TIMEOUT_S))
    assert exits == [(os._exit, 1)]
    released.set()


def test_a_rank_that_is_given_twice_is_refused_and_hurts_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as beside:
        where = (*listener.getsockname(), SECRET)
        leader = beside.submit(Leader, listener, SECRET, 2, TIMEOUT_S, welcome="hello")
        joining = [beside.submit(Follower, *where, 1, TIMEOUT_S) for _ in range(2)]
        refused = next(as_completed(joining, TIMEOUT_S))  # the other one waits for rank 2
        with pytest.raises(ConfigError, match="host 0 refuses this one: host_rank 1 is here alre"):
            refused.result()
        followers = [beside.submit(Follower, *where, 2, TIMEOUT_S)]
        followers += [each for each in joining if each is not refused]
        assert [each.result(TIMEOUT_S).welcome for each in followers] == ["hello"] * 2
    with pytest.raises(ConfigError, match="host_rank=2 started twice"):
        Follower(*where, 2, TIMEOUT_S)
    leader.result().close()
    for each in followers:
        each.result().close()


def test_weights_code_and_versions_have_to_be_equal_texts_and_names_not(tmp_path) -> None:
    weights = np.arange(2**20, dtype=np.float32)
    folders = []
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text(name)
        (folder / "model.safetensors").write_bytes((weights + seed).tobytes())
        folders.append(facts(folder))
    one, same, other = folders
    assert difference(one, same) == ""
    assert difference(other, one).startswith(f"model: {other['model']}, on host 0 {one['model']}")
    assert "jaxinfer: abc" in difference({**one, "code of jaxinfer": "abc"}, one)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(weights.tobytes())
    assert difference(facts(tmp_path / "a.gguf"), facts(tmp_path / "b.gguf")) == ""


def test_a_follower_may_be_silent_as_long_as_it_loads(pair) -> None:
    both = pair(0.2)
    both.leader.send(Message("load"))
    assert not both.leader._closed.wait(1.0) and both.leader.lost is None
    assert both.carry_out().word == "load"


def test_a_leader_that_falls_silent_is_given_up(pair) -> None:
    both = pair(TIMEOUT_S)
    both.follower.timeout_s = 0.3
    errors: Queue[HostLostError] = Queue()
    both.follower.listen(on_lost=errors.put)
    assert not both.leader._closed.wait(0.4) and errors.empty()  # it may be loading
    start = time.monotonic()
    both.follower.expect_pings()
    assert "has been silent for 0.3 s" in str(errors.get(timeout=TIMEOUT_S))
    assert time.monotonic() - start < 2


def test_devices_that_never_answer_are_not_waited_for(pair, monkeypatch) -> None:
    both = pair()
    monkeypatch.setattr(ModelRunner, "__init__", lambda self: None)
    monkeypatch.setattr(ModelRunner, "close", lambda self: None)
    exits = []
    monkeypatch.setattr("atexit.register", lambda *call: exits.append(call))
    runner = LeadingRunner(channel=both.leader)
    assert runner._guarded(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        runner._guarded(lambda: 1 // 0)
    released = threading.Event()
    runner._timeout_s = 0.3
    with pytest.raises(HostLostError, match=r"the devices gave no answer for 0\.3 s; start all"):
        runner._guarded(lambda: released.wait(TIMEOUT_S))
    with pytest.raises(HostLostError):
        runner.check()
    runner.close()
    # jax would wait for the others at the end of the process.
    assert exits == [(os._exit, 1)]
    released.set()


def test_a_call_that_is_under_way_when_a_host_is_lost_has_no_result(pair, monkeypatch) -> None:
    both = pair()
    monkeypatch.setattr(ModelRunner, "__init__", lambda self: None)
    runner = LeadingRunner(channel=both.leader)

    def lose_one() -> str:
        both.follower.close()
        assert lost(both.leader)
        return "wrong tokens"

    with pytest.raises(HostLostError, match="has ended"):
        runner._guarded(lose_one)
    runner._calls.put(None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_hosts": 2}, "needs coordinator_address"),
        ({"num_hosts": 2, "coordinator_address": "here"}, "needs coordinator_address"),
        ({"num_hosts": 2, "coordinator_address": "here:xyz"}, "needs coordinator_address"),
        ({"num_hosts": 2, "coordinator_address": "here:99999"}, "needs coordinator_address"),
        ({"num_hosts": 2, "coordinator_address": ":8476"}, "needs coordinator_address"),
        ({"coordinator_address": "here:8476"}, "needs num_hosts, which is 1"),
        (
            {"num_hosts": 2, "coordinator_address": "a:1", "logits_processors": ("x:y",)},
            "need an engine on one host",
        ),
        ({"num_hosts": 2, "host_rank": 2}, "host_rank must lie in"),
        ({"host_rank": 1}, "host_rank must lie in"),
        (
            {"num_hosts": 2, "coordinator_address": "a:1", "data_parallel_size": 2},
            "a router in front",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, words: str) -> None:
    config = EngineConfig(**settings)
    with pytest.raises(ConfigError, match=words):
        check_hosts(config)
    with pytest.raises(ConfigError, match=words):
        load_replicas(config)
