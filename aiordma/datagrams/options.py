"""DatagramOptions: what a datagram endpoint is made with."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma.options import check_depths, check_ranges
from aiordma.verbs import Device


@dataclass(frozen=True, slots=True)
class DatagramOptions:
    """How to set up a datagram endpoint. Sizes are bytes, times are seconds.

    Raises:
        ValueError: a value is out of range.
    """

    send_depth: int = 64
    """Sends on their way at once; more wait in send_to()."""

    recv_depth: int = 128
    """Receive buffers: datagrams that arrive when all of them are full are lost."""

    max_message_size: int | None = None
    """The largest datagram to send; None: what the port's MTU carries, which is the most there can
    be. Receive buffers always have room for that, so that no peer can send too much."""

    max_inline: int = 64
    """Datagrams up to this size travel inside the work request. Devices allow tens to hundreds."""

    backlog: int = 0
    """Requests of peers that wait to be answered, at most; 0: 1024."""

    resolve_timeout: float = 5.0
    """How long finding a peer's address, and then the route to it, may each take."""

    close_timeout: float = 5.0
    """How long aclose() waits for posted sends."""

    multicast_loopback: bool = True
    """Whether this endpoint gets its own copy of what it sends to a group that it is in."""

    tos: int | None = None
    """Type of service, 0 to 255 (rdma_set_option(3), RDMA_OPTION_ID_TOS); None: the system's."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)

    def check_device(self, device: Device) -> None:
        """Make sure that `device` can do it.

        Raises:
            ValueError: a queue is deeper than the device allows.
        """
        check_depths(device, self.send_depth, self.recv_depth)


# The MTU of a port is at most 4096 bytes.
_RANGES = (
    ("send_depth", 1, 1 << 20),
    ("recv_depth", 1, 1 << 20),
    ("max_message_size", 1, 1 << 12),
    ("max_inline", 0, 1 << 12),
    ("backlog", 0, (1 << 31) - 1),
    ("resolve_timeout", 0.001, 3600.0),
    ("close_timeout", 0.0, 3600.0),
    ("tos", 0, 255),
)
