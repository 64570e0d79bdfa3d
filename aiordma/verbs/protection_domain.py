"""ProtectionDomain: the queue pairs and the memory that can be used together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import check_errno, last_error
from aiordma.verbs.context_references import context_references
from aiordma.verbs.device import Device

if TYPE_CHECKING:
    from aiordma._native._lib import IbvPd


class ProtectionDomain:
    """`struct ibv_pd`. See ibv_alloc_pd(3)."""

    __slots__ = ("device", "pointer")

    def __init__(self, device: Device) -> None:
        """Allocate a protection domain on `device`.

        Raises:
            VerbsError: ENOMEM, or EAGAIN when the rdma control group's limit is reached.
        """
        self.device = device
        self.pointer: IbvPd | None = lib.ibv_alloc_pd(device.context)
        if self.pointer == ffi.NULL:
            raise last_error("ibv_alloc_pd")
        context_references.acquire(device.context)

    @classmethod
    def wrap(cls, device: Device, pointer: IbvPd) -> ProtectionDomain:
        """Return an object for a C protection domain that other code owns. Do not close it."""
        wrapper = cls.__new__(cls)
        wrapper.device, wrapper.pointer = device, pointer
        return wrapper

    @property
    def open_pointer(self) -> IbvPd:
        """The C protection domain.

        Raises:
            ValueError: the protection domain is closed.
        """
        if self.pointer is None:
            raise ValueError("the protection domain is closed")
        return self.pointer

    def close(self) -> None:
        """Free the protection domain: ibv_dealloc_pd(3). Idempotent.

        Raises:
            VerbsError: EBUSY while a queue pair or a registration still belongs to it.
        """
        if self.pointer is not None:
            check_errno(lib.ibv_dealloc_pd(self.pointer), "ibv_dealloc_pd")
            self.pointer = None
            context_references.release(self.device.context)
