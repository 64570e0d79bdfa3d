"""QueuePair: where work requests are posted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import SendFlags
from aiordma.errors import VerbsError, check_errno

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._lib import IbvQp

NO_IMMEDIATE = -1


@dataclass(frozen=True, slots=True)
class QueuePairCaps:
    """How much a queue pair can hold (`struct ibv_qp_cap`): requests, segments, inline bytes."""

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


class QueuePair:
    """`struct ibv_qp`, made by `CmId.create_qp`; outlives its id until destroyed.

    Every `post_*` call copies the request and returns at once; the memory it names belongs to the
    device until the request's completion, or the destruction of the queue pair.
    """

    __slots__ = ("caps", "number", "pointer")

    def __init__(self, pointer: IbvQp, caps: QueuePairCaps) -> None:
        self.pointer: IbvQp = pointer
        self.number = pointer.qp_num
        self.caps = caps

    def post_recv(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        """Post one receive into registered memory. See ibv_post_recv(3).

        Raises:
            VerbsError: ENOMEM (the receive queue is full), EINVAL (wrong state).
        """
        error = lib.aiordma_post_recv(self.pointer, wr_id, address, length, lkey)
        if error:
            raise VerbsError(error, "ibv_post_recv")

    def post_recvs(
        self, first_wr_id: int, address: int, slot_size: int, count: int, lkey: int
    ) -> None:
        """Post `count` receives into adjacent slots, their wr_ids counting up from `first_wr_id`.

        Raises:
            VerbsError: as post_recv; those before the failing one stay posted.
        """
        error = lib.aiordma_post_recvs(self.pointer, first_wr_id, address, slot_size, count, lkey)
        check_errno(error, "ibv_post_recv")

    def post_send(
        self,
        wr_id: int,
        address: int,
        length: int,
        lkey: int,
        flags: SendFlags = SendFlags.SIGNALED,
        imm: int = NO_IMMEDIATE,
    ) -> None:
        """Send `length` bytes of registered memory. See ibv_post_send(3).

        Raises:
            VerbsError: ENOMEM (the send queue is full), EINVAL (wrong state).
        """
        error = lib.aiordma_post_send(self.pointer, wr_id, address, length, lkey, flags, imm)
        if error:
            raise VerbsError(error, "ibv_post_send")

    def post_send_copy(
        self, wr_id: int, address: int, data: Buffer, lkey: int, imm: int = NO_IMMEDIATE
    ) -> None:
        """Copy `data` into registered memory at `address`, which has room for it, and send that.

        Raises:
            VerbsError: as post_send.
        """
        chars = ffi.from_buffer("char[]", data)
        error = lib.aiordma_post_send_copy(
            self.pointer, wr_id, address, chars, len(chars), lkey, imm
        )
        if error:
            raise VerbsError(error, "ibv_post_send")

    def post_send_inline(self, wr_id: int, data: Buffer, imm: int = NO_IMMEDIATE) -> None:
        """Send bytes that travel in the request itself: `data` may be reused on return.

        Raises:
            VerbsError: ENOMEM (the send queue is full), EINVAL (longer than max_inline_data).
        """
        chars = ffi.from_buffer("char[]", data)
        error = lib.aiordma_post_send_inline(self.pointer, wr_id, chars, len(chars), imm)
        if error:
            raise VerbsError(error, "ibv_post_send")

    def set_min_rnr_timer(self, timer: int) -> None:
        """Say how long a peer that found no receive here waits: IBV_QP_MIN_RNR_TIMER, 0 to 31.

        The numbers stand for times that the InfiniBand specification lists: 1 is 0.01 ms, 12 is
        0.64 ms, 0 is 655.36 ms. Only once the connection is established. See ibv_modify_qp(3).

        Raises:
            VerbsError: EINVAL (wrong state, or iWARP, which has no such thing).
        """
        check_errno(lib.aiordma_set_min_rnr_timer(self.pointer, timer), "ibv_modify_qp")

    def destroy(self) -> None:
        """Destroy the queue pair: ibv_destroy_qp(3). Afterwards the device touches no memory of it.

        Waits until every asynchronous event of the queue pair is acknowledged. Idempotent; what is
        posted afterwards fails with EINVAL.

        Raises:
            VerbsError: EBUSY while it is attached to a multicast group.
        """
        pointer, self.pointer = self.pointer, ffi.NULL
        if pointer != ffi.NULL:
            check_errno(lib.ibv_destroy_qp(pointer), "ibv_destroy_qp")
