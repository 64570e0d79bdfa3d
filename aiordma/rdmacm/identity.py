"""Identity: what a communication identifier tells of itself (the fields of `struct rdma_cm_id`)."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import PortSpace, QpType
from aiordma.rdmacm.address import SocketAddress, read_sockaddr
from aiordma.rdmacm.contexts import device_contexts
from aiordma.rdmacm.event import CmEvent, read_event
from aiordma.rdmacm.route import Route
from aiordma.verbs import Device

if TYPE_CHECKING:
    from aiordma._native._lib import CmIdPtr


class Identity:
    """The part of CmId that asks and changes nothing."""

    __slots__ = ("_pointer", "context")

    def __init__(self, pointer: CmIdPtr) -> None:
        self._pointer: CmIdPtr | None = pointer
        self.context: object = None
        """The user's own; librdmacm's `context` field is not used."""

    @property
    def pointer(self) -> CmIdPtr:
        """The C id.

        Raises:
            ValueError: it is destroyed.
        """
        if self._pointer is None:
            raise ValueError("the id is destroyed")
        return self._pointer

    @property
    def address(self) -> int:
        """The address of the C id, as it stands in events. Unique while the id lives."""
        return int(ffi.cast("uintptr_t", self.pointer))

    @property
    def channel_fd(self) -> int:
        """The fd of its event channel; of a synchronous id, its private one's."""
        return self.pointer.channel.fd

    @property
    def port_space(self) -> PortSpace:
        """The port space it was made in."""
        return PortSpace(self.pointer.ps)

    @property
    def qp_type(self) -> QpType:
        """The type of queue pair that it carries."""
        return QpType(self.pointer.qp_type)

    @property
    def is_datagram(self) -> bool:
        """Whether it stands for datagrams, not for a connection."""
        return self.qp_type is QpType.UD

    @property
    def has_device(self) -> bool:
        """Whether the id is bound to a device: after an address of one is bound or resolved."""
        return self.pointer.verbs != ffi.NULL

    @property
    def has_qp(self) -> bool:
        """Whether it has a queue pair."""
        return self.pointer.qp != ffi.NULL

    @property
    def qp_num(self) -> int:
        """The number of its queue pair; 0 without one."""
        return self.pointer.qp.qp_num if self.has_qp else 0

    @property
    def port_num(self) -> int:
        """The port of the device, from 1; 0 before there is one."""
        return self.pointer.port_num

    def device(self) -> Device:
        """The device that the id is bound to.

        Raises:
            ValueError: it is bound to none yet.
        """
        if not self.has_device:
            raise ValueError("the id is not bound to a device yet")
        return device_contexts.device_of(self.pointer.verbs)

    # Both C functions return just this. A call of them would give up the GIL, and wait for it.

    @property
    def local_address(self) -> SocketAddress | None:
        """The address the id is bound to, or None: rdma_get_local_addr(3)."""
        return read_sockaddr(ffi.addressof(self.pointer.route.addr, "src_addr"))

    @property
    def peer_address(self) -> SocketAddress | None:
        """The address of the peer, or None: rdma_get_peer_addr(3)."""
        return read_sockaddr(ffi.addressof(self.pointer.route.addr, "dst_addr"))

    @property
    def src_port(self) -> int:
        """The local port; 0 before there is one: rdma_get_src_port(3)."""
        return socket.ntohs(lib.rdma_get_src_port(self.pointer))

    @property
    def dst_port(self) -> int:
        """The peer's port; 0 before there is one: rdma_get_dst_port(3)."""
        return socket.ntohs(lib.rdma_get_dst_port(self.pointer))

    @property
    def route(self) -> Route:
        """The way to the peer, as far as it is known."""
        return Route.read(self.pointer.route)

    def take_event(self) -> CmEvent | None:
        """The event that the last call on a synchronous id ended with, acknowledged; or None."""
        copy = ffi.new("struct aiordma_cm_event *")
        if not lib.aiordma_take_event(self.pointer, copy):
            return None
        return read_event(copy)
