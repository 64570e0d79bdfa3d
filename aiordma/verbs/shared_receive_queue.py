"""SharedReceiveQueue: a receive queue that many queue pairs share."""

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
    """The capacity of a shared receive queue (`struct ibv_srq_attr`): requests, segments each.

    If `limit` is armed, the device raises SRQ_LIMIT_REACHED when fewer receives are left.
    """

    max_wr: int
    max_sge: int = 1
    limit: int = 0

    def fill(self, attr: IbvSrqAttr) -> None:
        """Write the values into a C struct."""
        attr.max_wr, attr.max_sge, attr.srq_limit = self.max_wr, self.max_sge, self.limit


class SharedReceiveQueue:
    """`struct ibv_srq`, created by `create` or by `CmId.create_srq`. See ibv_create_srq(3)."""

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
        """0, and the address of the cell where `pointer` is stored, valid while this object lives.

        The first one is that of a queue pair. See QueuePair.cells.
        """
        return 0, int(ffi.cast("uintptr_t", self._cell))

    @classmethod
    def create(cls, pd: ProtectionDomain, caps: SharedReceiveQueueCaps) -> SharedReceiveQueue:
        """Create a queue for the queue pairs of `pd`: ibv_create_srq(3). A system call.

        Raises:
            VerbsError: EINVAL (a limit of the device is exceeded), ENOMEM, EOPNOTSUPP.
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
        """The number of the queue, which XRC peers send to: ibv_get_srq_num(3).

        Raises:
            VerbsError: it is not an XRC queue.
        """
        out = ffi.new("uint32_t *")
        check_errno(lib.ibv_get_srq_num(self.pointer, out), "ibv_get_srq_num")
        return out[0]

    def post_recv(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        """Post one receive into registered memory: ibv_post_srq_recv(3). Does not block.

        Raises:
            VerbsError: ENOMEM (the queue is full), EINVAL (the queue is destroyed).
        """
        error = lib.aiordma_post_srq_recv(self._cell, wr_id, address, length, lkey)
        if error:
            raise VerbsError(error, "ibv_post_srq_recv")

    def arm(self, limit: int) -> None:
        """Request one SRQ_LIMIT_REACHED event when fewer than `limit` receives are left.

        See ibv_modify_srq(3).

        Raises:
            VerbsError: EINVAL (more than max_wr).
        """
        attr = ffi.new("struct ibv_srq_attr *")
        attr.srq_limit = limit
        check_errno(lib.ibv_modify_srq(self.pointer, attr, lib.IBV_SRQ_LIMIT), "ibv_modify_srq")

    def query(self) -> SharedReceiveQueueCaps:
        """Return the capacity and the limit: ibv_query_srq(3). A system call.

        Raises:
            VerbsError: the device does not answer.
        """
        attr = ffi.new("struct ibv_srq_attr *")
        check_errno(lib.ibv_query_srq(self.pointer, attr), "ibv_query_srq")
        return SharedReceiveQueueCaps(attr.max_wr, attr.max_sge, attr.srq_limit)

    def forget(self) -> IbvSrq:
        """Clear the pointer. Return it when no thread posts any more: the caller destroys it."""
        pointer, self._cell[0] = self._cell[0], ffi.NULL
        lib.aiordma_await_posts()
        return pointer

    def close(self) -> None:
        """Destroy the queue: ibv_destroy_srq(3). Idempotent.

        Posted receives are dropped. They do not complete as flushed.

        Raises:
            VerbsError: EBUSY while a queue pair uses the queue.
        """
        if (pointer := self.forget()) != ffi.NULL:
            check_errno(lib.ibv_destroy_srq(pointer), "ibv_destroy_srq")
