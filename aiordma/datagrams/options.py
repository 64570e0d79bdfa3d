"""DatagramOptions: the options of a datagram endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma.options import check_depths, check_ranges
from aiordma.verbs import Device


@dataclass(frozen=True, slots=True)
class DatagramOptions:
    """The options of a datagram endpoint. Sizes are in bytes, times in seconds.

    Raises:
        ValueError: a value is out of range.
    """

    send_depth: int = 64
    """The largest number of sends in flight. When it is reached, send_to() waits."""

    recv_depth: int = 128
    """The number of receive buffers. Datagrams that arrive while all of them are full are lost."""

    max_message_size: int | None = None
    """The size of the largest datagram to send; None: the port's MTU, which is also the limit.
    Receive buffers always have the size of the MTU, so that no peer can send too much."""

    max_inline: int = 64
    """Datagrams up to this size are copied into the work request. Devices allow tens to hundreds
    of bytes."""

    backlog: int = 0
    """The largest number of requests of peers that wait for an answer; 0: 1024."""

    resolve_timeout: float = 5.0
    """The time limit for resolving a peer's address, and again for resolving the route to it."""

    close_timeout: float = 5.0
    """The time that aclose() waits for posted sends, at most."""

    multicast_loopback: bool = True
    """True: the endpoint receives a copy of each message that it sends to a group it joined."""

    tos: int | None = None
    """Type of service, 0 to 255 (rdma_set_option(3), RDMA_OPTION_ID_TOS); None: the default of
    the system."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)

    def check_device(self, device: Device) -> None:
        """Make sure that the queues are within the limits of `device`.

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
