"""Plan: what a run of `aiordma ping` was asked to do."""

from __future__ import annotations

import socket
from dataclasses import dataclass

DEFAULT_PORT = 7473
DEFAULT_SIZE = 64
MAX_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom to ping, and how. Sizes are bytes, times are seconds."""

    host: str
    port: int = DEFAULT_PORT
    count: int | None = None
    """So many messages; None: until somebody ends it."""
    interval: float = 1.0
    size: int = DEFAULT_SIZE
    source: str | None = None
    """The local address; None: what the route to the host says."""
    busy_poll: float = 0.0
    wait: float = 5.0
    """How long resolving the address, resolving the route, connecting, and each answer may take."""
    family: socket.AddressFamily | None = None
    """Only addresses of this family; None: of both."""
