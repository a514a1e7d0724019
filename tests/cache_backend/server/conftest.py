"""Real servers for the tests of this folder; all end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from running import Peer, Program


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """Start servers: ``program(*options)``."""
    started: list[Program] = []

    def start(*options: str, **how: object) -> Program:
        started.append(Program(*options, **how))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def standing() -> Iterator[Program]:
    """One server for all tests of a file that leave no trace that others would mind."""
    server = Program()
    yield server
    server.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Connect clients: ``peer(address, worker=..., session=...)``."""
    connected: list[Peer] = []

    def connect(address: str, **how: object) -> Peer:
        connected.append(Peer(address, **how))
        return connected[-1]

    yield connect
    for client in connected:
        client.close()
