"""A short version of `make abuse`: after every kind of attack, the server is as it was before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from jaxinfer.server.options import ServerOptions
from tests.server.attacks import ATTACKS, LONG, Target
from tests.server.serving import TIMEOUT_S, RunningServer, running_server, wait_until

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def attacked():
    options = ServerOptions(receive_timeout_s=2, send_timeout_s=2, keep_alive_timeout_s=2)
    with running_server(options) as running:
        running.load(max_num_seqs=64)
        running.runner.step_s = 0.001
        yield running


def target_of(server: RunningServer) -> Target:
    host, port = server.url.removeprefix("http://").split(":")
    return Target(host=host, port=int(port), scale=0.05)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_after_an_attack_the_server_is_as_before(
    attacked: RunningServer, attack: Callable[[Target], Awaitable[None]]
):
    neighbour: list[list[str]] = []
    thread = threading.Thread(
        target=lambda: neighbour.append(attacked.events("/v1/completions", LONG))
    )
    thread.start()
    asyncio.run(attack(target_of(attacked)))
    thread.join(TIMEOUT_S)
    assert neighbour and neighbour[0][-1] == "[DONE]" and '"length"' in neighbour[0][-2]
    attacked.assert_works()
    attacked.assert_idle()
    assert attacked.state.num_in_flight == attacked.state.streams.num_open == 0
    # Ours stays open.
    wait_until(lambda: len(attacked.server.server_state.connections) <= 1)
    assert attacked.series()["http_requests_total//v1/completions/POST/5xx"] == 0
