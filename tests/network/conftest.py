"""Tests between two machines: they run on node1 of a lab of two nodes, and their peer on node2.

    aiordma lab run --nodes 2 --device both -- python -m pytest tests/network

Tests with the mark `campaign` are for `make soak`.
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
    peer.mend()
    yield peer
    peer.close()


@pytest.fixture
def peer(session_peer: Peer, no_leaks: None) -> Iterator[Peer]:  # noqa: F811
    """Return the other node. After the test nothing is left there, and there are no faults."""
    session_peer.mend()
    yield session_peer
    session_peer.mend()
    assert session_peer.stop() == {}
