"""QueuePair: where work requests are posted."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import QpState, QpType, SendFlags, WrOpcode
from aiordma.errors import VerbsError, check_errno, last_error
from aiordma.verbs.address_handle import AddressHandle, make_gid
from aiordma.verbs.completion import CompletionQueue
from aiordma.verbs.protection_domain import ProtectionDomain
from aiordma.verbs.shared_receive_queue import SharedReceiveQueue

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._lib import IbvQp, IbvQpAttr, IbvQpCap, IbvQpInitAttr

NO_IMMEDIATE = -1


def checked_immediate(imm: int) -> int:
    """Immediate data, if it is a number of 32 bits.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= imm < 1 << 32:
        raise ValueError(f"immediate data is a number of 32 bits, not {imm}")
    return imm


_INLINE = SendFlags.SIGNALED | SendFlags.INLINE


@dataclass(frozen=True, slots=True)
class QueuePairCaps:
    """How much a queue pair can hold (`struct ibv_qp_cap`): requests, segments, inline bytes."""

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclass(frozen=True, slots=True)
class QueuePairInit:
    """What a queue pair is made with (`struct ibv_qp_init_attr` and `_ex`).

    An id makes completion queues, a channel for each, of its own where none are given here. For
    `qp_type` it takes its port space's if None; `create_flags` go to rdma_create_qp_ex(3).
    """

    caps: QueuePairCaps
    send_cq: CompletionQueue | None = None
    recv_cq: CompletionQueue | None = None
    srq: SharedReceiveQueue | None = None
    qp_type: QpType | None = None
    sq_sig_all: bool = False
    create_flags: int = 0

    def fill(self, attr: IbvQpInitAttr, qp_type: QpType) -> None:
        """Write it into a C struct.

        Raises:
            ValueError: a queue is closed.
        """
        caps = self.caps
        attr.send_cq = self.send_cq.open_pointer if self.send_cq is not None else ffi.NULL
        attr.recv_cq = self.recv_cq.open_pointer if self.recv_cq is not None else ffi.NULL
        attr.srq = self.srq.pointer if self.srq is not None else ffi.NULL
        attr.qp_type = qp_type if self.qp_type is None else self.qp_type
        attr.sq_sig_all = self.sq_sig_all
        attr.cap.max_send_wr, attr.cap.max_recv_wr = caps.max_send_wr, caps.max_recv_wr
        attr.cap.max_send_sge, attr.cap.max_recv_sge = caps.max_send_sge, caps.max_recv_sge
        attr.cap.max_inline_data = caps.max_inline_data


def read_caps(cap: IbvQpCap) -> QueuePairCaps:
    """What the device gave, which is no less than what it was asked for."""
    return QueuePairCaps(
        max_send_wr=cap.max_send_wr,
        max_recv_wr=cap.max_recv_wr,
        max_send_sge=cap.max_send_sge,
        max_recv_sge=cap.max_recv_sge,
        max_inline_data=cap.max_inline_data,
    )


class QueuePairAttributes:
    """`struct ibv_qp_attr` with the mask of its fields that count. See ibv_modify_qp(3).

    `CmId.init_qp_attr` fills in what a connection needs; `pointer`'s fields may then be changed.
    """

    __slots__ = ("mask", "pointer")

    def __init__(self, pointer: IbvQpAttr, mask: int) -> None:
        self.pointer = pointer
        self.mask = mask

    @classmethod
    def to_state(cls, state: QpState) -> QueuePairAttributes:
        """Nothing but a move to `state`."""
        attr = ffi.new("struct ibv_qp_attr *")
        attr.qp_state = state
        return cls(attr, lib.IBV_QP_STATE)


class QueuePair:
    """`struct ibv_qp`, made by `CmId.create_qp` or alone; outlives its id until destroyed.

    Every `post_*` call copies the request and returns at once; the memory it names belongs to the
    device until the request's completion, or the destruction of the queue pair.
    """

    __slots__ = ("caps", "number", "pointer")

    def __init__(self, pointer: IbvQp, caps: QueuePairCaps) -> None:
        self.pointer: IbvQp = pointer
        self.number = pointer.qp_num
        self.caps = caps

    @classmethod
    def create(cls, pd: ProtectionDomain, init: QueuePairInit) -> QueuePair:
        """Make one that belongs to no id: ibv_create_qp(3). A system call.

        Raises:
            VerbsError: EINVAL (more than the device can), ENOMEM, EOPNOTSUPP (not this type).
            ValueError: an argument is closed, or a completion queue is missing.
        """
        if pd.pointer is None or init.send_cq is None or init.recv_cq is None:
            raise ValueError("an open protection domain and two completion queues are needed")
        attr = ffi.new("struct ibv_qp_init_attr *")
        init.fill(attr, QpType.RC)
        pointer = lib.ibv_create_qp(pd.pointer, attr)
        if pointer == ffi.NULL:
            raise last_error("ibv_create_qp")
        return cls(pointer, read_caps(attr.cap))

    def modify(self, attributes: QueuePairAttributes) -> None:
        """Change the attributes that the mask names, such as the state: ibv_modify_qp(3).

        Raises:
            VerbsError: EINVAL (not possible in this state, or it is destroyed).
        """
        if self.pointer == ffi.NULL:
            raise VerbsError(errno.EINVAL, "ibv_modify_qp")
        check_errno(
            lib.ibv_modify_qp(self.pointer, attributes.pointer, attributes.mask), "ibv_modify_qp"
        )

    def attach_mcast(self, gid: bytes, lid: int) -> None:
        """Have what is sent to a multicast group delivered here: ibv_attach_mcast(3).

        Raises:
            VerbsError: EINVAL (no datagram queue pair, or no such group), ENOMEM.
        """
        check_errno(lib.ibv_attach_mcast(self.pointer, make_gid(gid), lid), "ibv_attach_mcast")

    def detach_mcast(self, gid: bytes, lid: int) -> None:
        """Undo attach_mcast(): ibv_detach_mcast(3). Must come before destroy().

        Raises:
            VerbsError: EINVAL (it is not attached).
        """
        check_errno(lib.ibv_detach_mcast(self.pointer, make_gid(gid), lid), "ibv_detach_mcast")

    def post_ud_send(
        self,
        wr_id: int,
        address: int,
        length: int,
        lkey: int,
        flags: SendFlags,
        imm: int,
        destination: tuple[AddressHandle, int, int],
    ) -> None:
        """Send a datagram from registered memory. See ibv_post_send(3).

        `destination` is an address handle, a queue pair number and a queue key.

        Raises:
            VerbsError: ENOMEM (the send queue is full), EINVAL (wrong state, too long for inline).
        """
        handle, qp_num, qkey = destination
        error = lib.aiordma_post_ud_send(
            self.pointer, wr_id, address, length, lkey, flags, imm, handle.pointer, qp_num, qkey
        )
        if error:
            raise VerbsError(error, "ibv_post_send")

    def post_ud_send_copy(
        self,
        wr_id: int,
        address: int,
        data: Buffer,
        lkey: int,
        imm: int,
        destination: tuple[AddressHandle, int, int],
    ) -> None:
        """Copy `data` into registered memory at `address`, which has room for it, and send that.

        Raises:
            VerbsError: as post_ud_send.
        """
        chars = ffi.from_buffer("char[]", data)
        ffi.memmove(ffi.cast("void *", address), chars, len(chars))
        self.post_ud_send(wr_id, address, len(chars), lkey, SendFlags.SIGNALED, imm, destination)

    def post_ud_send_inline(
        self, wr_id: int, data: Buffer, imm: int, destination: tuple[AddressHandle, int, int]
    ) -> None:
        """Send a datagram that travels in the request itself: `data` may be reused on return.

        Raises:
            VerbsError: as post_ud_send.
        """
        chars = ffi.from_buffer("char[]", data)
        address = int(ffi.cast("uintptr_t", chars))
        self.post_ud_send(wr_id, address, len(chars), 0, _INLINE, imm, destination)

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

    def post_rdma(
        self,
        wr_id: int,
        opcode: WrOpcode,
        local: tuple[int, int, int],
        remote: tuple[int, int],
        imm: int = NO_IMMEDIATE,
    ) -> None:
        """Read or write the peer's memory. See ibv_post_send(3).

        `local` is an address, a length and a local key, `remote` an address and a remote key.

        Raises:
            VerbsError: as post_send.
        """
        address, length, lkey = local
        remote_addr, rkey = remote
        error = lib.aiordma_post_rdma(
            self.pointer,
            wr_id,
            opcode,
            address,
            length,
            lkey,
            SendFlags.SIGNALED,
            imm,
            remote_addr,
            rkey,
        )
        if error:
            raise VerbsError(error, "ibv_post_send")

    def post_atomic(
        self,
        wr_id: int,
        opcode: WrOpcode,
        local: tuple[int, int],
        remote: tuple[int, int],
        operands: tuple[int, int],
    ) -> None:
        """An atomic operation on 8 bytes of the peer's memory. See ibv_post_send(3).

        What was there before comes to the `local` address (with its key). `operands` are what to
        add, and 0; or what to compare with, and what to put there if that is equal.

        Raises:
            VerbsError: as post_send.
        """
        address, lkey = local
        remote_addr, rkey = remote
        error = lib.aiordma_post_atomic(
            self.pointer, wr_id, opcode, address, lkey, remote_addr, rkey, *operands
        )
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

    def forget(self) -> None:
        """Somebody else has destroyed it."""
        self.pointer = ffi.NULL

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
