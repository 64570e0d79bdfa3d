"""MemoryWindow: a key for a part of a region, which comes and goes with work requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import check_errno, last_error
from aiordma.verbs.protection_domain import ProtectionDomain

if TYPE_CHECKING:
    from aiordma._native._lib import IbvMw, NullPtr


class MemoryWindow:
    """`struct ibv_mw` of type 2. `QueuePair.post_bind_mw` gives it memory. See ibv_alloc_mw(3)."""

    __slots__ = ("_pointer", "rkey")

    def __init__(self, pd: ProtectionDomain) -> None:
        """Make a window that is bound to nothing. A system call.

        Raises:
            VerbsError: EOPNOTSUPP (the device has none, as iWARP), ENOMEM.
            ValueError: the protection domain is closed.
        """
        pointer = lib.ibv_alloc_mw(pd.open_pointer, lib.IBV_MW_TYPE_2)
        if pointer == ffi.NULL:
            raise last_error("ibv_alloc_mw")
        self._pointer: IbvMw | NullPtr | None = pointer
        self.rkey = pointer.rkey
        """The key that peers use, valid from a bind to its invalidation."""

    @property
    def open_pointer(self) -> IbvMw | NullPtr:
        """The C window.

        Raises:
            ValueError: it is closed.
        """
        if self._pointer is None:
            raise ValueError("the memory window is closed")
        return self._pointer

    def next_rkey(self) -> int:
        """The key for the next bind: none may be used twice in a row. See ibv_inc_rkey(3)."""
        self.rkey = lib.ibv_inc_rkey(self.rkey)
        return self.rkey

    def close(self) -> None:
        """Free it, and end all access by its key: ibv_dealloc_mw(3). Idempotent. A system call.

        Raises:
            VerbsError: the device refused.
        """
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            check_errno(lib.ibv_dealloc_mw(pointer), "ibv_dealloc_mw")
