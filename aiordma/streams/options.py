"""StreamOptions: the options of a byte stream."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma.enums import PortSpace
from aiordma.options import ConnectionOptions, check_ranges
from aiordma.streams.wire import MAX_CREDITS

MESSAGE_SIZE = 4


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a byte stream. Sizes are in bytes, times in seconds.

    Each side chooses its own options. The sides announce their receive buffers to each other when
    they connect.

    Raises:
        ValueError: a value is out of range.
    """

    send_buffer: int = 1 << 18
    """Registered memory for copied data that has not reached the peer: SO_SNDBUF."""

    recv_buffer: int = 1 << 18
    """Registered memory that the peer writes to, half of it at a time: SO_RCVBUF."""

    send_depth: int = 128
    """The number of writes in flight at once."""

    recv_depth: int = 256
    """The number of writes of the peer in flight at once, of any size."""

    max_inline: int = 64
    """Writes up to this size are sent inline: the work request carries the data. Devices allow tens
    to hundreds of bytes."""

    mappings: int = 0
    """The number of buffers that the peer may map, for iowrite() from here: RDMA_IOMAPSIZE in
    rsocket(7)."""

    busy_poll: float = 0.0
    """The time that a wait polls the completion queue before it parks on the loop, as in
    ConnectionOptions."""

    adaptive_poll: bool = True
    """Without `busy_poll`: allow a wait to poll the completion queue if the wait before it was
    short, as in ConnectionOptions."""

    resolve_timeout: float = 5.0
    """The time limit for resolving the address, and then again for resolving the route."""

    close_timeout: float = 5.0
    """The time that closing waits for the posted writes and the peer. After that the connection is
    ended by force."""

    tos: int | None = None
    """The type of service, 0 to 255 (rdma_set_option(3), RDMA_OPTION_ID_TOS). None: the default of
    the system."""

    ack_timeout: int | None = None
    """The exponent of the time until a retransmission: 4.096 us times 2 to this power, 0 to 31.
    None: the value that the CM determines."""

    keepalive: float = 0.0
    """The time without traffic after which this side checks that the peer's machine still answers:
    SO_KEEPALIVE of rsocket(7). On InfiniBand and RoCE, the check is rsocket's KEEPALIVE message.
    Otherwise as in ConnectionOptions."""

    peer_timeout: float = 15.0
    """On iWARP: the time in which the peer's machine must answer, as in ConnectionOptions."""

    own_protection_domain: bool = False
    """True: only this stream's peer can access the memory of the stream, as in
    ConnectionOptions."""

    reuse_address: bool = False
    """True to allow a local address that is in use already (RDMA_OPTION_ID_REUSEADDR)."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        self.connection_options()

    def connection_options(self) -> ConnectionOptions:
        """Return the options of the connection that carries the stream."""
        return ConnectionOptions(
            send_depth=self.send_depth,
            recv_depth=self.recv_depth,
            max_message_size=MESSAGE_SIZE,
            max_inline=self.max_inline,
            max_sge=1,
            busy_poll=self.busy_poll,
            adaptive_poll=self.adaptive_poll,
            # On iWARP one RDMA READ is made while connecting.
            responder_resources=1,
            initiator_depth=1,
            resolve_timeout=self.resolve_timeout,
            close_timeout=self.close_timeout,
            tos=self.tos,
            ack_timeout=self.ack_timeout,
            keepalive=self.keepalive,
            peer_timeout=self.peer_timeout,
            own_protection_domain=self.own_protection_domain,
            reuse_address=self.reuse_address,
            port_space=PortSpace.TCP,
        )


_MAX_BUFFER = 1 << 31
_RANGES = (
    ("send_buffer", 1 << 11, _MAX_BUFFER),
    ("recv_buffer", 1 << 11, _MAX_BUFFER),
    # Enough for the control messages beside the data, even where each takes two work requests.
    ("send_depth", 16, MAX_CREDITS),
    ("recv_depth", 16, MAX_CREDITS),
    ("mappings", 0, 128),
)

DEFAULT_OPTIONS = StreamOptions()
