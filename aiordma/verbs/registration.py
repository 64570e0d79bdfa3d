"""Registration: memory that the device may use, and its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from aiordma._native import ffi, lib
from aiordma.enums import AccessFlags
from aiordma.errors import check_errno, last_error
from aiordma.verbs.protection_domain import ProtectionDomain

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._lib import Bytes, IbvMr


class Registration:
    """`struct ibv_mr`: the pages of a buffer pinned, and its keys. See ibv_reg_mr(3).

    Holds the buffer exported, so that it can be neither freed nor resized, until close().
    Registering blocks while the pages are pinned: past a few pages, call it in a worker thread.
    """

    __slots__ = ("_data", "address", "is_open", "length", "lkey", "pd", "pointer", "rkey")

    def __init__(self, pd: ProtectionDomain, buffer: Buffer, access: AccessFlags) -> None:
        """Register the whole of `buffer` (C-contiguous, of any item type) with `access`.

        With AccessFlags.ON_DEMAND nothing is pinned: the device pages in what it needs.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached), EINVAL (wrong access flags).
            ValueError: the protection domain is closed.
            BufferError: the buffer is not contiguous.
        """
        domain = pd.open_pointer
        data: Bytes = ffi.from_buffer("char[]", buffer)
        pointer = lib.ibv_reg_mr(domain, data, len(data), access)
        if pointer == ffi.NULL:
            error = last_error("ibv_reg_mr")
            ffi.release(data)  # or it would stay exported as long as the error is looked at
            raise error
        self._keep(pd, pointer, int(ffi.cast("uintptr_t", data)), len(data))
        self._data: Bytes | None = data

    @classmethod
    def of_dmabuf(
        cls, pd: ProtectionDomain, fd: int, part: tuple[int, int], access: AccessFlags
    ) -> Self:
        """Register a part, an offset and a length, of a dma-buf: ibv_reg_dmabuf_mr(3).

        Its addresses begin at the offset. The dma-buf lives as long as the registration, whatever
        happens to the file descriptor.

        Raises:
            VerbsError: EOPNOTSUPP (the device or the kernel cannot), EINVAL, EBADF.
            ValueError: the protection domain is closed.
        """
        offset, length = part
        # The same place in its page as in the dma-buf, as the man page demands.
        pointer = lib.ibv_reg_dmabuf_mr(pd.open_pointer, offset, length, offset, fd, access)
        if pointer == ffi.NULL:
            raise last_error("ibv_reg_dmabuf_mr")
        registration = cls.__new__(cls)
        registration._keep(pd, pointer, offset, length)
        registration._data = None
        return registration

    def _keep(self, pd: ProtectionDomain, pointer: IbvMr, address: int, length: int) -> None:
        self.pd = pd
        self.pointer = pointer
        self.address = address
        self.length = length
        self.lkey = pointer.lkey
        self.rkey = pointer.rkey
        self.is_open = True

    def close(self) -> None:
        """Unpin the buffer and let go of it: ibv_dereg_mr(3) or rdma_dereg_mr(3). Idempotent.

        Can block.

        Call it only when no work request that names the memory is outstanding.

        Raises:
            VerbsError: EBUSY while memory windows are bound to it.
        """
        if self.is_open:
            check_errno(lib.ibv_dereg_mr(self.pointer), "ibv_dereg_mr")
            self.is_open = False
            self._data = None
