"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A ready server, shared by the tests of a file: one bad request must not hurt the next."""
    with running_server() as running:
        running.load()
        yield running


@pytest.fixture
def own_server() -> Iterator[RunningServer]:
    """A server without a model, for a test that changes or breaks it."""
    with running_server() as running:
        yield running
