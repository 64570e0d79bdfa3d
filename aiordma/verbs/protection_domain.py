"""ProtectionDomain: what queue pairs and memory belong to; Registration: pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import AccessFlags
from aiordma.errors import check_errno, last_error
from aiordma.verbs.device import Device
from aiordma.verbs.holds import holds

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._lib import Bytes, IbvMr, IbvPd


class ProtectionDomain:
    """`struct ibv_pd`. See ibv_alloc_pd(3)."""

    __slots__ = ("device", "pointer")

    def __init__(self, device: Device) -> None:
        """Allocate a protection domain of `device`.

        Raises:
            VerbsError: ENOMEM, or EAGAIN when the rdma control group's limit is reached.
        """
        self.device = device
        self.pointer: IbvPd | None = lib.ibv_alloc_pd(device.context)
        if self.pointer == ffi.NULL:
            raise last_error("ibv_alloc_pd")
        holds.take(device.context)

    @classmethod
    def borrow(cls, device: Device, pointer: IbvPd) -> ProtectionDomain:
        """One that belongs to somebody else, and is not to be closed."""
        borrowed = cls.__new__(cls)
        borrowed.device, borrowed.pointer = device, pointer
        return borrowed

    @property
    def open_pointer(self) -> IbvPd:
        """The C protection domain.

        Raises:
            ValueError: it is closed.
        """
        if self.pointer is None:
            raise ValueError("the protection domain is closed")
        return self.pointer

    def close(self) -> None:
        """Free it: ibv_dealloc_pd(3). Idempotent.

        Raises:
            VerbsError: EBUSY while a queue pair or a registration still belongs to it.
        """
        if self.pointer is not None:
            check_errno(lib.ibv_dealloc_pd(self.pointer), "ibv_dealloc_pd")
            self.pointer = None
            holds.give_back(self.device.context)


class Registration:
    """`struct ibv_mr`: the pages of a buffer pinned, and its keys. See ibv_reg_mr(3).

    Holds the buffer exported, so that it can be neither freed nor resized, until close().
    Registering blocks while the pages are pinned: past a few pages, call it in a worker thread.
    """

    __slots__ = ("address", "data", "length", "lkey", "pointer", "rkey")

    def __init__(self, pd: ProtectionDomain, buffer: Buffer, access: AccessFlags) -> None:
        """Register the whole of `buffer` (C-contiguous, of any item type) with `access`.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached), EINVAL (wrong access flags).
            ValueError: the protection domain is closed.
            BufferError: the buffer is not contiguous.
        """
        if pd.pointer is None:
            raise ValueError("the protection domain is closed")
        self.data: Bytes | None = ffi.from_buffer("char[]", buffer)
        self.length = len(self.data)
        self.pointer: IbvMr = lib.ibv_reg_mr(pd.pointer, self.data, self.length, access)
        if self.pointer == ffi.NULL:
            raise last_error("ibv_reg_mr")
        self.address = int(ffi.cast("uintptr_t", self.data))
        self.lkey = self.pointer.lkey
        self.rkey = self.pointer.rkey

    def close(self) -> None:
        """Unpin the buffer and let go of it: ibv_dereg_mr(3) or rdma_dereg_mr(3). Idempotent.

        Can block.

        Call it only when no work request that names the memory is outstanding.

        Raises:
            VerbsError: EBUSY while memory windows are bound to it.
        """
        if self.data is not None:
            check_errno(lib.ibv_dereg_mr(self.pointer), "ibv_dereg_mr")
            self.data = None
