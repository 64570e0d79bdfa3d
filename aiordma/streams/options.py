"""StreamOptions: what a byte stream is made with."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma.enums import PortSpace
from aiordma.options import ConnectionOptions, check_ranges
from aiordma.streams.wire import MAX_CREDITS

MESSAGE_SIZE = 4


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How to set up a byte stream. Sizes are bytes, times are seconds.

    Both sides choose for themselves: each learns of the other's receive buffer when they connect.

    Raises:
        ValueError: a value is out of range.
    """

    send_buffer: int = 1 << 18
    """Registered memory for data that is copied, and not yet at the peer: SO_SNDBUF."""

    recv_buffer: int = 1 << 18
    """Registered memory that the peer writes to, half of it at a time: SO_RCVBUF."""

    send_depth: int = 128
    """Writes on their way at once."""

    recv_depth: int = 256
    """Writes of the peer's on their way at once, however small."""

    max_inline: int = 64
    """Writes up to this size travel inside the work request. Devices allow tens to hundreds."""

    mappings: int = 0
    """Buffers that the peer may map, for iowrite() from here: RDMA_IOMAPSIZE in rsocket(7)."""

    busy_poll: float = 0.0
    """How long a wait looks at the completion queue before it parks on the loop: as in
    ConnectionOptions."""

    resolve_timeout: float = 5.0
    """How long resolving the address, and then the route, may each take."""

    close_timeout: float = 5.0
    """How long closing waits for posted writes and for the peer before it just ends it."""

    tos: int | None = None
    """Type of service, 0 to 255 (rdma_set_option(3), RDMA_OPTION_ID_TOS); None: the system's."""

    ack_timeout: int | None = None
    """Time until a repeat is 4.096 us times 2 to this power, 0 to 31; None: what the CM finds."""

    reuse_address: bool = False
    """Whether the local address may be in use already (RDMA_OPTION_ID_REUSEADDR)."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        self.of_connection()

    def of_connection(self) -> ConnectionOptions:
        """The same, as far as they are a connection's."""
        return ConnectionOptions(
            send_depth=self.send_depth,
            recv_depth=self.recv_depth,
            max_message_size=MESSAGE_SIZE,
            max_inline=self.max_inline,
            max_sge=1,
            busy_poll=self.busy_poll,
            # iWARP reads once while it connects.
            responder_resources=1,
            initiator_depth=1,
            resolve_timeout=self.resolve_timeout,
            close_timeout=self.close_timeout,
            tos=self.tos,
            ack_timeout=self.ack_timeout,
            reuse_address=self.reuse_address,
            port_space=PortSpace.TCP,
        )


_MAX_BUFFER = 1 << 31
_RANGES = (
    ("send_buffer", 1 << 11, _MAX_BUFFER),
    ("recv_buffer", 1 << 11, _MAX_BUFFER),
    # Enough for what the protocol has to say beside the data, even where that takes two requests.
    ("send_depth", 16, MAX_CREDITS),
    ("recv_depth", 16, MAX_CREDITS),
    ("mappings", 0, 128),
)

DEFAULT_OPTIONS = StreamOptions()
