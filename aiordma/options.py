"""The options of connections, the limits of listeners, and a transport's private data limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiordma.enums import PortSpace
from aiordma.verbs import Device


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The options of a connection. Sizes are in bytes, times in seconds.

    Each side chooses its own options. Nothing is negotiated except the number of RDMA reads and
    atomics (`responder_resources` and `initiator_depth`). So both sides must allow the size of each
    message: send() refuses a message that is larger than the `max_message_size` of its own side,
    and one that is larger than that of the peer ends the connection.

    Raises:
        ValueError: a value is out of range.
    """

    send_depth: int = 64
    """The number of requests that can be in flight at the same time. Further ones wait in send(),
    read() and so on."""

    recv_depth: int = 32
    """The number of receive buffers, and so of messages that can arrive before recv() takes one."""

    max_message_size: int = 16384
    """The largest message to send and to receive: less than 2 GiB, and not more than the port of
    the device carries (8 MiB on soft-RoCE). A connection registers memory of `recv_depth` times
    this size, which counts against the locked-memory limit."""

    max_inline: int = 64
    """Messages of up to this size are copied into the work request itself (inline data). Devices
    allow tens to hundreds of bytes."""

    max_sge: int = 4
    """The number of pieces of registered memory that one send, read or write can gather or
    scatter."""

    recv_backlog: int = 1024
    """The number of messages that can wait for recv() where the transport does not hold the peer
    back: on iWARP, and with a shared receive queue. There, messages are copied out of the receive
    buffers when half of those are full. One message more than this ends the connection, with
    ReceiveOverrun."""

    shared_recv_depth: int = 0
    """For listen() only: the number of receive buffers that all connections of the listener share
    (ibv_create_srq(3)), instead of `recv_depth` for each connection. 0: not shared."""

    busy_poll: float = 0.0
    """The time for which a wait polls the completion queue before it parks on the event loop. It
    costs processor time and improves latency, like SO_BUSY_POLL of socket(7). Polling yields to
    the loop once in a millisecond, or once in up to 5 ms where an iteration of the loop is slow."""

    adaptive_poll: bool = True
    """Without `busy_poll`: allow a wait for a message to poll the completion queue if the wait
    before it was short. It polls for a few times as long as parking takes, and then parks. The less
    often polling finds a message, the less often it is tried."""

    responder_resources: int = 16
    """The number of RDMA reads and atomics that the peer can have in flight to this side. The
    limit of the device applies."""

    initiator_depth: int = 16
    """The number of RDMA reads and atomics that this side can have in flight. The limits of the
    device and of the peer apply. On iWARP, 0 also turns off the checks of `peer_timeout`."""

    retry_count: int = 7
    """The number of times that the device repeats a packet without acknowledgment, 0 to 7. After
    that the connection ends with PeerTimeout. On soft-RoCE, 7 would mean for ever: 6 is used."""

    rnr_retry_count: int = 7
    """The number of times that the device repeats a send for which the peer had no receive buffer
    (receiver not ready), 0 to 6. 7: without limit."""

    resolve_timeout: float = 5.0
    """The time that resolving the address can take, and then the time that resolving the route can
    take."""

    close_timeout: float = 5.0
    """The time that aclose() waits for posted sends and for the peer. After that it ends the
    connection by force."""

    tos: int | None = None
    """The type of service, 0 to 255 (rdma_set_option(3), RDMA_OPTION_ID_TOS). None: the default of
    the system."""

    ack_timeout: int | None = None
    """The exponent of the time before a packet without acknowledgment is repeated: 4.096 us times 2
    to this power, 0 to 31 (RDMA_OPTION_ID_ACK_TIMEOUT). None: the connection manager chooses."""

    keepalive: float = 0.0
    """The time without traffic after which this side checks that the peer's machine still answers.
    The check is a write of no bytes, on iWARP a read of no bytes. If it is not answered, the
    connection ends with PeerTimeout. 0: an idle connection is not checked."""

    peer_timeout: float = 15.0
    """On iWARP: the time in which the peer's machine must answer a check. A connection that sends
    and receives nothing back is checked, too, also without `keepalive`. If large memory is
    registered, the time is longer, as a check waits behind transfers: 1 s for each 16 MiB of the
    largest region. On InfiniBand and RoCE, `retry_count` and `ack_timeout` decide how long the
    device waits for an answer."""

    own_protection_domain: bool = False
    """True: the memory of the connection is in a protection domain that no other connection uses,
    so that no other peer can access it, even if it knows the address and the key. Use it if you do
    not trust all peers equally. It costs some time to connect and some memory, and cannot be
    combined with `shared_recv_depth`."""

    reuse_address: bool = False
    """True: the local address can already be in use (RDMA_OPTION_ID_REUSEADDR)."""

    port_space: PortSpace = PortSpace.TCP
    """The space of port numbers in which to connect or listen: TCP or IB."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.recv_depth * self.max_message_size > _MAX_RING:
            raise ValueError(f"recv_depth times max_message_size is over {_MAX_RING} bytes")
        if self.shared_recv_depth * self.max_message_size > _MAX_RING:
            raise ValueError(f"shared_recv_depth times max_message_size is over {_MAX_RING} bytes")
        if self.own_protection_domain and self.shared_recv_depth:
            raise ValueError(
                "shared receive buffers are in one protection domain: set either "
                "own_protection_domain or shared_recv_depth"
            )
        if self.port_space not in (PortSpace.TCP, PortSpace.IB):
            raise ValueError(f"connections are made in port space TCP or IB, not {self.port_space}")

    def check_device(self, device: Device, port_num: int) -> None:
        """Make sure that this port of `device` allows these options.

        Raises:
            ValueError: a queue is deeper, a message larger, or a request has more pieces, than the
                device allows.
            VerbsError: the device does not answer (EIO: it was removed).
        """
        check_depths(device, self.send_depth, self.recv_depth)
        name, limits = device.name, device.attributes
        largest = device.max_message_size(port_num)
        if self.max_message_size > largest:
            raise ValueError(f"{name} allows a max_message_size of {largest}")
        if self.keepalive and device.is_iwarp and not self.initiator_depth:
            raise ValueError(f"{name} is iWARP, where keepalive needs an initiator_depth over 0")
        if self.max_sge > limits.max_sge:
            raise ValueError(f"{name} allows a max_sge of {limits.max_sge}")
        if self.shared_recv_depth > limits.max_srq_wr:
            raise ValueError(f"{name} allows a shared_recv_depth of {limits.max_srq_wr}")


def check_ranges(options: object, ranges: Iterable[tuple[str, float, float]]) -> None:
    """Make sure that each attribute is None or in its range: name, lowest and highest value.

    Raises:
        ValueError: an attribute is out of its range.
    """
    for name, low, high in ranges:
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} is {value}, not between {low} and {high}")


def check_depths(device: Device, *depths: int) -> None:
    """Make sure that `device` allows queues of these depths.

    Raises:
        ValueError: a depth is over the limit of the device.
    """
    limit = device.attributes.max_qp_wr
    for depth in depths:
        if depth > limit:
            raise ValueError(f"{device.name} allows a send_depth and recv_depth of {limit} each")


_MAX_DEPTH = 1 << 20
_MAX_RING = 1 << 40
_RANGES = (
    ("send_depth", 1, _MAX_DEPTH),
    ("recv_depth", 1, _MAX_DEPTH),
    ("max_message_size", 1, (1 << 31) - 1),
    ("max_inline", 0, 1 << 16),
    ("max_sge", 1, 1 << 10),
    ("recv_backlog", 1, 1 << 30),
    ("shared_recv_depth", 0, _MAX_DEPTH),
    ("busy_poll", 0.0, 10.0),
    ("responder_resources", 0, 255),
    ("initiator_depth", 0, 255),
    ("retry_count", 0, 7),
    ("rnr_retry_count", 0, 7),
    ("resolve_timeout", 0.001, 3600.0),
    ("close_timeout", 0.0, 3600.0),
    ("tos", 0, 255),
    ("ack_timeout", 0, 31),
    ("keepalive", 0.0, 86400.0),
    ("peer_timeout", 0.01, 3600.0),
)

DEFAULT_OPTIONS = ConnectionOptions()


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """The limits of a listener on its peers, beside the backlog. Times are in seconds.

    Raises:
        ValueError: a value is out of range.
    """

    max_handshakes: int = 256
    """The number of peers that accept() and serve() accept at the same time. Each has a queue pair
    and registered memory. When all are in use, a new request waits in the backlog. A handshake
    that has waited for its peer for a second is ended for the new request: the oldest one of the
    host with the most."""

    max_connections: int | None = None
    """The number of connections that can exist at the same time, with requests that wait or were
    taken. For a further request, the newest waiting request of the host with the most is rejected,
    or the further request itself. None: without limit."""

    handshake_timeout: float = 10.0
    """The time in which a peer must confirm, after it was accepted. After that it is rejected."""

    def __post_init__(self) -> None:
        check_ranges(self, _LIMIT_RANGES)


_LIMIT_RANGES = (
    ("max_handshakes", 1, _MAX_DEPTH),
    ("max_connections", 1, 1 << 30),
    ("handshake_timeout", 0.001, 3600.0),
)

DEFAULT_LIMITS = ListenerLimits()


@dataclass(frozen=True, slots=True)
class PrivateDataLimits:
    """The number of bytes of private data that a transport carries in each step of connecting."""

    connect: int
    accept: int
    reject: int

    @classmethod
    def of(cls, device: Device) -> PrivateDataLimits:
        """Return the limits of connections on `device`."""
        return _IWARP if device.is_iwarp else _INFINIBAND


_INFINIBAND = PrivateDataLimits(connect=56, accept=196, reject=148)
# librdmacm has 8 bits for the length, and the kernel puts 4 bytes before the private data.
_IWARP = PrivateDataLimits(connect=251, accept=251, reject=251)
DATAGRAM_LIMITS = PrivateDataLimits(connect=180, accept=136, reject=136)


def check_private_data(data: bytes, limit: int) -> None:
    """Make sure that private data fits, before the connection is lost because it does not.

    Raises:
        ValueError: it is longer than `limit` bytes.
    """
    if len(data) > limit:
        raise ValueError(f"private data of {len(data)} bytes; at most {limit} can be sent here")
