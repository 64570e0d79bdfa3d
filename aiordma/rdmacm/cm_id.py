"""CmId: a communication identifier, RDMA's counterpart of a socket."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import IdOption, PortSpace, QpType
from aiordma.errors import check
from aiordma.rdmacm.address import PackedAddress, SocketAddress, read_sockaddr
from aiordma.rdmacm.channel import EventChannel
from aiordma.verbs import CompletionQueue, Device, ProtectionDomain, QueuePair, QueuePairCaps

if TYPE_CHECKING:
    from aiordma._native._lib import CmIdPtr, ConnParam

# How each option's value is laid out in C: uint8_t or int.
_OPTION_LAYOUT = {
    IdOption.TOS: struct.Struct("=B"),
    IdOption.REUSEADDR: struct.Struct("=i"),
    IdOption.AFONLY: struct.Struct("=i"),
    IdOption.ACK_TIMEOUT: struct.Struct("=B"),
}


@dataclass(frozen=True, slots=True)
class ConnectionParameters:
    """`struct rdma_conn_param`. See rdma_connect(3) and rdma_accept(3).

    `retry_count` and `rnr_retry_count` are 0 to 7; an `rnr_retry_count` of 7 means for ever.
    """

    private_data: bytes = b""
    responder_resources: int = 0
    initiator_depth: int = 0
    flow_control: int = 0
    retry_count: int = 7
    rnr_retry_count: int = 7
    srq: int = 0
    qp_num: int = 0


class _PackedParameters:
    """A `struct rdma_conn_param *` and the private data it points at."""

    __slots__ = ("_private_data", "pointer")

    def __init__(self, parameters: ConnectionParameters) -> None:
        self.pointer: ConnParam = ffi.new("struct rdma_conn_param *")
        self._private_data = ffi.from_buffer("char[]", parameters.private_data)
        self.pointer.private_data = self._private_data
        self.pointer.private_data_len = len(parameters.private_data)
        self.pointer.responder_resources = parameters.responder_resources
        self.pointer.initiator_depth = parameters.initiator_depth
        self.pointer.flow_control = parameters.flow_control
        self.pointer.retry_count = parameters.retry_count
        self.pointer.rnr_retry_count = parameters.rnr_retry_count
        self.pointer.srq = parameters.srq
        self.pointer.qp_num = parameters.qp_num


class CmId:
    """`struct rdma_cm_id` on an event channel. Each method is the C call of that name.

    "Starts" below means that the call returns at once and an event on the channel tells the result.
    All calls on one id are the caller's to serialise.
    """

    __slots__ = ("_pointer",)

    def __init__(self, pointer: CmIdPtr) -> None:
        self._pointer: CmIdPtr | None = pointer

    @property
    def pointer(self) -> CmIdPtr:
        """The C id.

        Raises:
            ValueError: it is destroyed.
        """
        if self._pointer is None:
            raise ValueError("the id is destroyed")
        return self._pointer

    @classmethod
    def create(cls, channel: EventChannel, port_space: PortSpace) -> CmId:
        """Make an id on `channel`: rdma_create_id(3).

        Raises:
            VerbsError: ENODEV (no device), ENOMEM.
            ValueError: the channel is closed.
        """
        if channel.pointer is None:
            raise ValueError("the event channel is closed")
        out = ffi.new("struct rdma_cm_id **")
        check(lib.rdma_create_id(channel.pointer, out, ffi.NULL, port_space), "rdma_create_id")
        return cls(out[0])

    @classmethod
    def from_address(cls, address: int) -> CmId:
        """The id that an event names by its address."""
        return cls(ffi.cast("struct rdma_cm_id *", address))

    @property
    def address(self) -> int:
        """The address of the C id, as it stands in events. Unique while the id lives."""
        return int(ffi.cast("uintptr_t", self.pointer))

    @property
    def has_device(self) -> bool:
        """Whether the id is bound to a device: after an address of one is bound or resolved."""
        return self.pointer.verbs != ffi.NULL

    def device(self) -> Device:
        """The device that the id is bound to.

        Raises:
            ValueError: it is bound to none yet.
            VerbsError: the device does not answer.
        """
        if not self.has_device:
            raise ValueError("the id is not bound to a device yet")
        return Device(self.pointer.verbs)

    @property
    def local_address(self) -> SocketAddress | None:
        """The address the id is bound to, or None: rdma_get_local_addr(3)."""
        return read_sockaddr(lib.rdma_get_local_addr(self.pointer))

    @property
    def peer_address(self) -> SocketAddress | None:
        """The address of the peer, or None: rdma_get_peer_addr(3)."""
        return read_sockaddr(lib.rdma_get_peer_addr(self.pointer))

    def set_option(self, option: IdOption, value: int) -> None:
        """Set an option of level `RDMA_OPTION_ID`: rdma_set_option(3).

        Raises:
            VerbsError: EINVAL (too late for it, or not on this kind of id), ENOSYS (unknown).
        """
        data = ffi.new("char[]", _OPTION_LAYOUT[option].pack(value))
        size = _OPTION_LAYOUT[option].size
        check(
            lib.rdma_set_option(self.pointer, lib.RDMA_OPTION_ID, option, data, size),
            "rdma_set_option",
        )

    def bind_addr(self, address: SocketAddress) -> None:
        """Bind to a local address; port 0 picks one: rdma_bind_addr(3). Does not block.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken, or not local), ENODEV, EACCES.
        """
        packed = PackedAddress(address)
        check(lib.rdma_bind_addr(self.pointer, packed.pointer), "rdma_bind_addr")

    def resolve_addr(
        self, source: SocketAddress | None, destination: SocketAddress, timeout_ms: int
    ) -> None:
        """Start to find the device for `destination`: rdma_resolve_addr(3).

        Raises:
            VerbsError: ENETUNREACH, ENODEV, EADDRNOTAVAIL, EINVAL.
        """
        src, dst = PackedAddress(source), PackedAddress(destination)
        check(
            lib.rdma_resolve_addr(self.pointer, src.pointer, dst.pointer, timeout_ms),
            "rdma_resolve_addr",
        )

    def resolve_route(self, timeout_ms: int) -> None:
        """Start to find the route: rdma_resolve_route(3). Can block, where ibacm runs.

        Raises:
            VerbsError: EINVAL (the address is not resolved), ENODEV.
            ValueError: the id is not bound to a device yet (the C function would crash).
        """
        if not self.has_device:
            raise ValueError("the address is not resolved yet")
        check(lib.rdma_resolve_route(self.pointer, timeout_ms), "rdma_resolve_route")

    def create_qp(
        self,
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        caps: QueuePairCaps,
    ) -> QueuePair:
        """Make a reliable-connected queue pair for the id: rdma_create_qp(3). System calls.

        Raises:
            VerbsError: EINVAL (more than the device can), ENOMEM (memory, or locked-memory limit).
            ValueError: an argument is closed.
        """
        if pd.pointer is None or send_cq.pointer is None or recv_cq.pointer is None:
            raise ValueError("the protection domain or a completion queue is closed")
        attr = ffi.new("struct ibv_qp_init_attr *")
        attr.send_cq, attr.recv_cq, attr.qp_type = send_cq.pointer, recv_cq.pointer, QpType.RC
        attr.cap.max_send_wr, attr.cap.max_recv_wr = caps.max_send_wr, caps.max_recv_wr
        attr.cap.max_send_sge, attr.cap.max_recv_sge = caps.max_send_sge, caps.max_recv_sge
        attr.cap.max_inline_data = caps.max_inline_data
        check(lib.rdma_create_qp(self.pointer, pd.pointer, attr), "rdma_create_qp")
        given = QueuePairCaps(
            attr.cap.max_send_wr,
            attr.cap.max_recv_wr,
            attr.cap.max_send_sge,
            attr.cap.max_recv_sge,
            attr.cap.max_inline_data,
        )
        return QueuePair(self.pointer.qp, given)

    def listen(self, backlog: int) -> None:
        """Start listening; 0 is the system's longest backlog: rdma_listen(3). Does not block.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken), EINVAL (wrong state).
        """
        check(lib.rdma_listen(self.pointer, backlog), "rdma_listen")

    def connect(self, parameters: ConnectionParameters) -> None:
        """Start to connect: rdma_connect(3). On iWARP it blocks for a TCP connect.

        Raises:
            VerbsError: EINVAL (wrong state; a parameter over a limit); on iWARP also what a TCP
                connect gives, such as ECONNREFUSED.
        """
        packed = _PackedParameters(parameters)
        check(lib.rdma_connect(self.pointer, packed.pointer), "rdma_connect")

    def accept(self, parameters: ConnectionParameters) -> None:
        """Start to accept the request that made this id: rdma_accept(3).

        If it fails the connection is lost: the only thing left to do is to destroy the id.

        Raises:
            VerbsError: EINVAL (the peer is gone; a parameter over a limit), ECONNRESET, ENOMEM.
        """
        packed = _PackedParameters(parameters)
        check(lib.rdma_accept(self.pointer, packed.pointer), "rdma_accept")

    def reject(self, private_data: bytes) -> None:
        """Refuse the request that made this id: rdma_reject(3). Does not block.

        Raises:
            VerbsError: EINVAL (the peer is gone; over 148 bytes on InfiniBand and RoCE).
        """
        data = ffi.from_buffer("char[]", private_data)
        check(lib.rdma_reject(self.pointer, data, len(private_data)), "rdma_reject")

    def notify_established(self) -> None:
        """Tell the CM that data has come, so the connection stands: rdma_notify(3). Does not block.

        Raises:
            VerbsError: EISCONN (it knows already), EINVAL.
        """
        check(lib.rdma_notify(self.pointer, lib.IBV_EVENT_COMM_EST), "rdma_notify")

    def disconnect(self) -> None:
        """Move the queue pair to its error state and start to disconnect: rdma_disconnect(3).

        Raises:
            VerbsError: EINVAL (never connected); others on iWARP when the peer closed first.
        """
        check(lib.rdma_disconnect(self.pointer), "rdma_disconnect")

    def destroy(self) -> None:
        """Free the id, telling the peer what its state demands: rdma_destroy_id(3).

        Can block: for the events of the id in flight, and on iWARP for a connect under way. Its
        queue pair is not destroyed.

        Raises:
            VerbsError: the kernel does not know the id.
            ValueError: it is destroyed already.
        """
        pointer, self._pointer = self.pointer, None
        check(lib.rdma_destroy_id(pointer), "rdma_destroy_id")
