"""Registration: memory that the device is allowed to use, and its keys."""

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
    """`struct ibv_mr`: a buffer whose pages are pinned (locked), and its keys. See ibv_reg_mr(3).

    The buffer stays exported until close(), so it can be neither freed nor resized.
    Registering blocks while the pages are pinned. For more than a few pages, call it in a worker
    thread.
    """

    __slots__ = ("_data", "address", "is_open", "length", "lkey", "pd", "pointer", "rkey")

    def __init__(self, pd: ProtectionDomain, buffer: Buffer, access: AccessFlags) -> None:
        """Register the whole of `buffer` (C-contiguous, of any item type) with `access`.

        With AccessFlags.ON_DEMAND no page is pinned: the device pages them in when it needs them.

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
            ffi.release(data)  # otherwise the traceback of the error would keep it exported
            raise error
        self._store(pd, pointer, int(ffi.cast("uintptr_t", data)), len(data))
        self._data: Bytes | None = data

    @classmethod
    def of_dmabuf(
        cls, pd: ProtectionDomain, fd: int, part: tuple[int, int], access: AccessFlags
    ) -> Self:
        """Register a part of a dma-buf, an offset and a length: ibv_reg_dmabuf_mr(3).

        The address of its first byte is the offset. The dma-buf lives as long as the registration,
        even if the file descriptor is closed.

        Raises:
            VerbsError: EOPNOTSUPP (the device or the kernel does not support it), EINVAL, EBADF.
            ValueError: the protection domain is closed.
        """
        offset, length = part
        # The address needs the same offset in its page as in the dma-buf: see the man page.
        pointer = lib.ibv_reg_dmabuf_mr(pd.open_pointer, offset, length, offset, fd, access)
        if pointer == ffi.NULL:
            raise last_error("ibv_reg_dmabuf_mr")
        registration = cls.__new__(cls)
        registration._store(pd, pointer, offset, length)
        registration._data = None
        return registration

    def _store(self, pd: ProtectionDomain, pointer: IbvMr, address: int, length: int) -> None:
        self.pd = pd
        self.pointer = pointer
        self.address = address
        self.length = length
        self.lkey = pointer.lkey
        self.rkey = pointer.rkey
        self.is_open = True

    def close(self) -> None:
        """Unpin and release the buffer: ibv_dereg_mr(3) or rdma_dereg_mr(3). Idempotent.

        Can block. Call it only when no work request that uses the memory is in flight.

        Raises:
            VerbsError: EBUSY while memory windows are bound to the memory.
        """
        if self.is_open:
            check_errno(lib.ibv_dereg_mr(self.pointer), "ibv_dereg_mr")
            self.is_open = False
            self._data = None
