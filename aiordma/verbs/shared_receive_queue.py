"""SharedReceiveQueue: receives that many queue pairs take from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import VerbsError, check_errno, last_error

if TYPE_CHECKING:
    from aiordma._native._lib import IbvSrq, IbvSrqAttr
    from aiordma.verbs.protection_domain import ProtectionDomain


@dataclass(frozen=True, slots=True)
class SharedReceiveQueueCaps:
    """How much a shared receive queue holds (`struct ibv_srq_attr`): requests, segments each.

    Once armed with a `limit`, the device raises SRQ_LIMIT_REACHED when fewer are left.
    """

    max_wr: int
    max_sge: int = 1
    limit: int = 0

    def fill(self, attr: IbvSrqAttr) -> None:
        """Write it into a C struct."""
        attr.max_wr, attr.max_sge, attr.srq_limit = self.max_wr, self.max_sge, self.limit


class SharedReceiveQueue:
    """`struct ibv_srq`. Made alone, or for an id by `CmId.create_srq`. See ibv_create_srq(3)."""

    __slots__ = ("_cell", "caps")

    def __init__(self, pointer: IbvSrq, caps: SharedReceiveQueueCaps) -> None:
        self._cell = ffi.new("struct ibv_srq *[1]", [pointer])
        self.caps = caps

    @property
    def pointer(self) -> IbvSrq:
        """The C queue; NULL once it is destroyed."""
        return self._cell[0]

    @property
    def cells(self) -> tuple[int, int]:
        """0, and the address of where `pointer` is kept, as long as this object lives."""
        return 0, int(ffi.cast("uintptr_t", self._cell))

    @classmethod
    def create(cls, pd: ProtectionDomain, caps: SharedReceiveQueueCaps) -> SharedReceiveQueue:
        """Make one that any queue pair of `pd` can use: ibv_create_srq(3). A system call.

        Raises:
            VerbsError: EINVAL (more than the device can), ENOMEM, EOPNOTSUPP.
            ValueError: the protection domain is closed.
        """
        if pd.pointer is None:
            raise ValueError("the protection domain is closed")
        attr = ffi.new("struct ibv_srq_init_attr *")
        caps.fill(attr.attr)
        pointer = lib.ibv_create_srq(pd.pointer, attr)
        if pointer == ffi.NULL:
            raise last_error("ibv_create_srq")
        return cls(pointer, SharedReceiveQueueCaps(attr.attr.max_wr, attr.attr.max_sge))

    @property
    def number(self) -> int:
        """The number by which XRC peers name it: ibv_get_srq_num(3).

        Raises:
            VerbsError: it is no XRC queue.
        """
        out = ffi.new("uint32_t *")
        check_errno(lib.ibv_get_srq_num(self.pointer, out), "ibv_get_srq_num")
        return out[0]

    def post_recv(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        """Post one receive into registered memory: ibv_post_srq_recv(3). Does not block.

        Raises:
            VerbsError: ENOMEM (the queue is full), EINVAL (it is destroyed).
        """
        error = lib.aiordma_post_srq_recv(self._cell, wr_id, address, length, lkey)
        if error:
            raise VerbsError(error, "ibv_post_srq_recv")

    def arm(self, limit: int) -> None:
        """Ask for one SRQ_LIMIT_REACHED event when fewer than `limit` receives are left.

        See ibv_modify_srq(3).

        Raises:
            VerbsError: EINVAL (more than max_wr).
        """
        attr = ffi.new("struct ibv_srq_attr *")
        attr.srq_limit = limit
        check_errno(lib.ibv_modify_srq(self.pointer, attr, lib.IBV_SRQ_LIMIT), "ibv_modify_srq")

    def query(self) -> SharedReceiveQueueCaps:
        """What it holds, and its limit, as the device says: ibv_query_srq(3). A system call.

        Raises:
            VerbsError: the device does not answer.
        """
        attr = ffi.new("struct ibv_srq_attr *")
        check_errno(lib.ibv_query_srq(self.pointer, attr), "ibv_query_srq")
        return SharedReceiveQueueCaps(attr.max_wr, attr.max_sge, attr.srq_limit)

    def forget(self) -> None:
        """Somebody else has destroyed it."""
        self._cell[0] = ffi.NULL

    def close(self) -> None:
        """Destroy it: ibv_destroy_srq(3). Idempotent. What is posted is not flushed, but dropped.

        Raises:
            VerbsError: EBUSY while a queue pair uses it.
        """
        pointer, self._cell[0] = self._cell[0], ffi.NULL
        if pointer != ffi.NULL:
            lib.aiordma_await_posts()
            check_errno(lib.ibv_destroy_srq(pointer), "ibv_destroy_srq")
