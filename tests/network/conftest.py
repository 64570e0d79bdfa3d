"""Tests between two machines: they run on node1 of a lab of two nodes, and their peer on node2.

aiordma lab run --nodes 2 --device both -- python -m pytest tests/network
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from every_loop import pytest_generate_tests, pytest_pyfunc_call  # noqa: F401
from leaks import no_leaks  # noqa: F401
from network_peer import Peer

from aiordma.lab.nodes import Node


@pytest.fixture(scope="session")
def session_peer() -> Iterator[Peer]:
    peer = Peer(Node("node2"))
    peer.start()
    yield peer
    peer.close()


@pytest.fixture
def peer(session_peer: Peer) -> Iterator[Peer]:
    """Return the other node. After the test its power is on, and the wire without faults."""
    yield session_peer
    session_peer.mend()
