"""ConnectionOptions: what a connection is made with; Limits: what its transport sets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiordma.enums import PortSpace
from aiordma.verbs import Device


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to set up a connection. Sizes are bytes, times are seconds.

    Both sides choose for themselves, and nothing is negotiated beyond what is said here: a message
    fits if it is no larger than the `max_message_size` of the side that receives it.

    Raises:
        ValueError: a value is out of range.
    """

    send_depth: int = 64
    """Sends on their way at once; more wait in send()."""

    recv_depth: int = 32
    """Receive buffers: so many messages can arrive before they are taken by recv()."""

    max_message_size: int = 16384
    """The largest message to send and to receive. A connection registers recv_depth times as much
    memory, which counts against the locked-memory limit."""

    max_inline: int = 64
    """Messages up to this size travel inside the work request. Devices allow tens to hundreds."""

    max_sge: int = 4
    """Pieces of registered memory that one send, read or write may gather or scatter."""

    recv_backlog: int = 1024
    """Messages that may wait for recv() where nothing can hold the peer back, which is so on iWARP
    and with a shared receive queue. They are copied out of the receive buffers when half of those
    are full. One more ends the connection, with ReceiveOverrun."""

    shared_recv_depth: int = 0
    """For listeners: so many receive buffers shared by all connections that one listener accepts
    (ibv_create_srq(3)), instead of recv_depth for each. 0: not shared."""

    busy_poll: float = 0.0
    """How long a wait looks at the completion queue before it parks on the loop. Latency against
    processor time, as SO_BUSY_POLL; the loop gets a turn every millisecond all the same (every
    5 ms at most, on a machine where its turns take long)."""

    adaptive_poll: bool = True
    """Without busy_poll: whether a wait for a message that follows a short one may look at the
    completion queue, for a few times as long as parking takes, before it parks. It does so the
    less often the less that pays. Not on trio."""

    responder_resources: int = 16
    """RDMA reads and atomics that the peer may have under way here; the device's limit applies."""

    initiator_depth: int = 16
    """RDMA reads and atomics that may be under way from here; the device's limit applies."""

    retry_count: int = 7
    """How often the device repeats what is not acknowledged, 0 to 7."""

    rnr_retry_count: int = 7
    """How often it repeats a send that the peer had no buffer for, 0 to 6; 7: for ever."""

    resolve_timeout: float = 5.0
    """How long resolving the address, and then the route, may each take."""

    close_timeout: float = 5.0
    """How long aclose() waits for posted sends and for the peer before it just ends it."""

    tos: int | None = None
    """Type of service, 0 to 255 (rdma_set_option(3), RDMA_OPTION_ID_TOS); None: the system's."""

    ack_timeout: int | None = None
    """Time until a repeat is 4.096 us times 2 to this power, 0 to 31; None: what the CM finds."""

    reuse_address: bool = False
    """Whether the local address may be in use already (RDMA_OPTION_ID_REUSEADDR)."""

    port_space: PortSpace = PortSpace.TCP
    """TCP or IB: the space of port numbers in which to connect or listen."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.recv_depth * self.max_message_size > _MAX_RING:
            raise ValueError(f"recv_depth times max_message_size is over {_MAX_RING} bytes")
        if self.shared_recv_depth * self.max_message_size > _MAX_RING:
            raise ValueError(f"shared_recv_depth times max_message_size is over {_MAX_RING} bytes")
        if self.port_space not in (PortSpace.TCP, PortSpace.IB):
            raise ValueError(f"connections are made in port space TCP or IB, not {self.port_space}")

    def check_device(self, device: Device) -> None:
        """Make sure that `device` can do it.

        Raises:
            ValueError: a queue is deeper, or a request has more pieces, than the device allows.
        """
        check_depths(device, self.send_depth, self.recv_depth)
        name, limits = device.name, device.attributes
        if self.max_sge > limits.max_sge:
            raise ValueError(f"{name} allows a max_sge of {limits.max_sge}")
        if self.shared_recv_depth > limits.max_srq_wr:
            raise ValueError(f"{name} allows a shared_recv_depth of {limits.max_srq_wr}")


def check_ranges(options: object, ranges: Iterable[tuple[str, float, float]]) -> None:
    """Make sure that each named attribute is None, or from the one number to the other.

    Raises:
        ValueError: one is not.
    """
    for name, low, high in ranges:
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} is {value}, not between {low} and {high}")


def check_depths(device: Device, *depths: int) -> None:
    """Make sure that `device` can make queues so deep.

    Raises:
        ValueError: it cannot.
    """
    limit = device.attributes.max_qp_wr
    if max(depths) > limit:
        raise ValueError(f"{device.name} allows a send_depth and recv_depth of {limit} each")


_MAX_DEPTH = 1 << 20
_MAX_RING = 1 << 40
_RANGES = (
    ("send_depth", 1, _MAX_DEPTH),
    ("recv_depth", 1, _MAX_DEPTH),
    ("max_message_size", 1, 1 << 31),
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
)

DEFAULT_OPTIONS = ConnectionOptions()


@dataclass(frozen=True, slots=True)
class PrivateDataLimits:
    """How many bytes of private data a transport carries at each step of connecting."""

    connect: int
    accept: int
    reject: int

    @classmethod
    def of(cls, device: Device) -> PrivateDataLimits:
        """The limits of connections on `device`."""
        return _IWARP if device.is_iwarp else _INFINIBAND


_INFINIBAND = PrivateDataLimits(connect=56, accept=196, reject=148)
# librdmacm counts it in 8 bits, and the kernel puts 4 bytes of its own before it.
_IWARP = PrivateDataLimits(connect=251, accept=251, reject=251)
DATAGRAM_LIMITS = PrivateDataLimits(connect=180, accept=136, reject=136)


def check_private_data(data: bytes, limit: int) -> None:
    """Refuse private data that does not fit, before it costs the connection.

    Raises:
        ValueError: it is longer than `limit` bytes.
    """
    if len(data) > limit:
        raise ValueError(f"private data of {len(data)} bytes; at most {limit} can be carried here")
