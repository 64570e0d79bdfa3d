"""Device: an opened RDMA device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import TransportType
from aiordma.errors import check_errno

if TYPE_CHECKING:
    from aiordma._native._lib import IbvContext


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """The limits of a device that aiordma respects (`struct ibv_device_attr`)."""

    max_qp_wr: int
    max_sge: int
    max_cqe: int
    max_mr_size: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int


class Device:
    """A device that librdmacm has opened (`struct ibv_context`).

    librdmacm keeps one context for each device in a process and shares it among its ids, so a
    Device only points at it and has nothing to close. Two are equal if they are the same context.
    """

    def __init__(self, context: IbvContext) -> None:
        self.context = context
        self.name = ffi.string(lib.ibv_get_device_name(context.device)).decode()
        self.transport = TransportType(context.device.transport_type)

    @cached_property
    def attributes(self) -> DeviceAttributes:
        """The device's limits, asked for once: ibv_query_device(3), a system call.

        Raises:
            VerbsError: the device does not answer (EIO: it was removed).
        """
        return _query(self.context)

    @property
    def is_iwarp(self) -> bool:
        """Whether this device speaks iWARP: no immediates, no atomics, no receiver-not-ready."""
        return self.transport is TransportType.IWARP

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.context == self.context

    def __hash__(self) -> int:
        return hash(self.context)

    def __repr__(self) -> str:
        return f"<Device {self.name} ({self.transport.name})>"


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
    )
