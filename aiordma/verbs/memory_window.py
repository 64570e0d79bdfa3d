"""MemoryWindow: a key for a part of a memory region, which work requests bind and invalidate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import check_errno, last_error
from aiordma.verbs.protection_domain import ProtectionDomain

if TYPE_CHECKING:
    from aiordma._native._lib import IbvMw, NullPtr


class MemoryWindow:
    """`struct ibv_mw` of type 2, which `QueuePair.post_bind_mw` binds. See ibv_alloc_mw(3)."""

    __slots__ = ("_pointer", "rkey")

    def __init__(self, pd: ProtectionDomain) -> None:
        """Allocate a window that is not bound yet. A system call.

        Raises:
            VerbsError: EOPNOTSUPP (the device, for example iWARP, has no memory windows), ENOMEM.
            ValueError: the protection domain is closed.
        """
        pointer = lib.ibv_alloc_mw(pd.open_pointer, lib.IBV_MW_TYPE_2)
        if pointer == ffi.NULL:
            raise last_error("ibv_alloc_mw")
        self._pointer: IbvMw | NullPtr | None = pointer
        self.rkey = pointer.rkey
        """The key for the peers, valid from a bind until it is invalidated."""

    @property
    def open_pointer(self) -> IbvMw | NullPtr:
        """The C window.

        Raises:
            ValueError: the window is closed.
        """
        if self._pointer is None:
            raise ValueError("the memory window is closed")
        return self._pointer

    def next_rkey(self) -> int:
        """Change `rkey` and return it: each bind needs a new key. See ibv_inc_rkey(3)."""
        self.rkey = lib.ibv_inc_rkey(self.rkey)
        return self.rkey

    def close(self) -> None:
        """Free the window, which invalidates its key: ibv_dealloc_mw(3). Idempotent. A system call.

        Raises:
            VerbsError: the device refused.
        """
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            check_errno(lib.ibv_dealloc_mw(pointer), "ibv_dealloc_mw")
