"""Device: an open RDMA device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import AsyncEventType, PortState, TransportType
from aiordma.errors import VerbsError, check, check_errno
from aiordma.verbs.address_handle import read_gid
from aiordma.verbs.context_references import context_references

if TYPE_CHECKING:
    from aiordma._native._lib import IbvContext

ASYNC_BATCH = 16
SIW_VENDOR_ID = 0x626D74
RXE_VENDOR_ID = 0xFFFFFF


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """The limits of a device that aiordma uses (`struct ibv_device_attr`)."""

    max_qp_wr: int
    max_sge: int
    max_cqe: int
    max_mr_size: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_srq: int = 0
    max_srq_wr: int = 0
    max_mcast_grp: int = 0
    phys_port_cnt: int = 1
    max_sge_rd: int = 1
    """The number of segments that one RDMA READ can scatter to: 1 on most iWARP devices."""
    has_atomics: bool = True
    has_memory_windows: bool = False
    """True if the device has memory windows of type 2, which a queue pair binds."""
    has_on_demand_paging: bool = False
    is_siw: bool = False
    """True for siw, the software iWARP device of Linux."""
    is_rxe: bool = False
    """True for rxe, the software RoCE device of Linux."""


@dataclass(frozen=True, slots=True)
class PortAttributes:
    """The current state of a port (`struct ibv_port_attr`). The MTUs are in bytes."""

    state: PortState
    max_mtu: int
    active_mtu: int
    max_msg_sz: int
    lid: int


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """`struct ibv_async_event` as a value: an event of a device, a port, a queue or a queue pair.

    `port_num` is 0 unless it is the event of a port. `element` is the number of the queue pair
    (`QueuePair.element`) or completion queue, or 0 unless it is the event of one. No number is used
    again.
    """

    device: str
    type: AsyncEventType
    port_num: int = 0
    element: int = 0


class Device:
    """A device that librdmacm has opened (`struct ibv_context`).

    librdmacm has one context for each device in a process, which all ids share. A Device only
    points to it, so it needs no closing. Two Devices are equal if they have the same context.
    """

    def __init__(self, context: IbvContext) -> None:
        self.context = context
        self.name = ffi.string(lib.ibv_get_device_name(context.device)).decode()
        self.transport = TransportType(context.device.transport_type)
        self.is_iwarp = self.transport is TransportType.IWARP
        """True for an iWARP device: no immediate data, no atomics, no receiver-not-ready."""
        self._max_message_sizes: dict[int, int] = {}

    @cached_property
    def attributes(self) -> DeviceAttributes:
        """The limits of the device: ibv_query_device(3), a system call at the first access.

        Raises:
            VerbsError: the device does not answer (EIO: it was removed).
        """
        return _query(self.context)

    def query_port(self, port_num: int) -> PortAttributes:
        """Return the state and the limits of a port; port numbers begin at 1: ibv_query_port(3).

        Raises:
            VerbsError: EINVAL (no such port), EIO (the device was removed).
        """
        attr = ffi.new("struct ibv_port_attr *")
        check_errno(lib.aiordma_query_port(self.context, port_num, attr), "ibv_query_port")
        return PortAttributes(
            state=PortState(attr.state),
            max_mtu=mtu_bytes(attr.max_mtu),
            active_mtu=mtu_bytes(attr.active_mtu),
            max_msg_sz=attr.max_msg_sz,
            lid=attr.lid,
        )

    def max_message_size(self, port_num: int) -> int:
        """Return the size in bytes of the largest message that a port carries.

        ibv_query_port(3), a system call at the first use of the port.

        Raises:
            VerbsError: as query_port().
        """
        size = self._max_message_sizes.get(port_num)
        if size is None:
            size = self._max_message_sizes[port_num] = self.query_port(port_num).max_msg_sz
        return size

    def query_gid(self, port_num: int, index: int) -> bytes:
        """Return one of the 16-byte addresses of a port: ibv_query_gid(3). Reads a system file.

        Raises:
            VerbsError: there is no such port or index.
        """
        gid = ffi.new("union ibv_gid *")
        check(lib.ibv_query_gid(self.context, port_num, index, gid), "ibv_query_gid")
        return read_gid(gid)

    @property
    def async_fd(self) -> int:
        """The fd that is readable while get_async_events() has events to return.

        The process has one for each device, because librdmacm shares its device contexts.
        """
        return self.context.async_fd

    def get_async_events(self) -> list[AsyncEvent]:
        """Return up to ASYNC_BATCH events, which are acknowledged: ibv_get_async_event(3).

        Does not block after watch_async_events(), which makes the fd non-blocking.

        Raises:
            VerbsError: EIO after the device was removed; the fd then stays readable for ever.
        """
        events = ffi.new("struct aiordma_async_event[]", ASYNC_BATCH)
        count = lib.aiordma_async_events(self.context, events, ASYNC_BATCH)
        if count < 0:
            raise VerbsError(-count, "ibv_get_async_event")
        copies = [events[index] for index in range(count)]
        return [
            AsyncEvent(self.name, AsyncEventType(copy.event_type), copy.port_num, copy.element)
            for copy in copies
        ]

    def watch_async_events(self) -> int:
        """Make the fd of the events non-blocking, and return it.

        Raises:
            VerbsError: the fd is closed.
        """
        check(lib.aiordma_set_nonblocking(self.async_fd), "fcntl")
        return self.async_fd

    def acquire(self) -> None:
        """Add one reference to the context: it stays open, even if the device is removed."""
        context_references.acquire(self.context)

    def release(self) -> None:
        """Drop the reference of one acquire()."""
        context_references.release(self.context)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.context == self.context

    def __hash__(self) -> int:
        return hash(self.context)

    def __repr__(self) -> str:
        return f"<Device {self.name} ({self.transport.name})>"


def mtu_bytes(mtu: int) -> int:
    """Return the number of bytes of an `enum ibv_mtu`: 256 for 1, 4096 for 5."""
    return 128 << mtu


def _query(context: IbvContext) -> DeviceAttributes:
    attr = ffi.new("struct ibv_device_attr *")
    check_errno(lib.ibv_query_device(context, attr), "ibv_query_device")
    return DeviceAttributes(
        max_qp_wr=attr.max_qp_wr,
        max_sge=attr.max_sge,
        max_cqe=attr.max_cqe,
        max_mr_size=attr.max_mr_size,
        max_qp_rd_atom=attr.max_qp_rd_atom,
        max_qp_init_rd_atom=attr.max_qp_init_rd_atom,
        max_srq=attr.max_srq,
        max_srq_wr=attr.max_srq_wr,
        max_mcast_grp=attr.max_mcast_grp,
        phys_port_cnt=attr.phys_port_cnt,
        max_sge_rd=attr.max_sge_rd or attr.max_sge,
        has_atomics=attr.atomic_cap != 0,
        is_siw=attr.vendor_id == SIW_VENDOR_ID,
        is_rxe=attr.vendor_id == RXE_VENDOR_ID,
        has_memory_windows=bool(attr.device_cap_flags & lib.IBV_DEVICE_MEM_WINDOW_TYPE_2B),
        has_on_demand_paging=bool(lib.aiordma_odp_caps(context) & lib.IBV_ODP_SUPPORT),
    )
