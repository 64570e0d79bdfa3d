"""The options of `aiordma ping`, with their defaults and limits.

The command line imports this module for its help text, so it imports nothing of aiordma.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

DEFAULT_PORT = 7473
DEFAULT_SIZE = 64
MAX_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class PingOptions:
    """The options of a client. Sizes are in bytes, times in seconds."""

    host: str
    port: int = DEFAULT_PORT
    count: int | None = None
    """The number of messages; None: send until Ctrl-C."""
    interval: float = 1.0
    size: int = DEFAULT_SIZE
    source: str | None = None
    """The local address; None: the address that the route to the host selects."""
    busy_poll: float = 0.0
    wait: float = 5.0
    """The limit for resolving the address, resolving the route, connecting, and each answer."""
    family: socket.AddressFamily | None = None
    """Use only addresses of this family; None: of both."""
