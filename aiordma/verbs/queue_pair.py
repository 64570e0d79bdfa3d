"""QueuePair: the queues that work requests are posted to."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import AccessFlags, QpState, QpType, SendFlags, WrOpcode
from aiordma.errors import VerbsError, check_errno, last_error
from aiordma.verbs.address_handle import AddressHandle, make_gid
from aiordma.verbs.element import element_of
from aiordma.verbs.memory_window import MemoryWindow
from aiordma.verbs.protection_domain import ProtectionDomain
from aiordma.verbs.queue_pair_init import (
    QueuePairAttributes,
    QueuePairCaps,
    QueuePairInit,
    read_caps,
)
from aiordma.verbs.registration import Registration
from aiordma.verbs.request_chain import RequestChain

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._lib import Bytes, IbvQp, IbvQpCap, IbvQpInitAttr, QpCell, VoidPtr

NO_IMMEDIATE = -1


def checked_immediate(imm: int) -> int:
    """Return `imm` if it is a 32-bit number.

    Raises:
        ValueError: `imm` is negative or larger.
    """
    if not 0 <= imm < 1 << 32:
        raise ValueError(f"immediate data must be an unsigned number of 32 bits, not {imm}")
    return imm


Segment = tuple[int, int, int]
"""A part of registered memory: its address, its length, its local key."""

# Plain integers: combining enum flags would cost more than the call that uses them.
UNSIGNALED = 0
SIGNALED = int(SendFlags.SIGNALED)
FENCE = int(SendFlags.FENCE)
_INLINE = int(SendFlags.SIGNALED | SendFlags.INLINE)


def _refused(error: int, chars: Bytes) -> VerbsError:
    """Return the error of a request that was not posted, and release the buffer of its data.

    The traceback of the error refers to `chars`, which must not keep the buffer exported.
    """
    ffi.release(chars)
    return VerbsError(error, "ibv_post_send")


class QueuePair:
    """`struct ibv_qp`, created by `CmId.create_qp` or by `create`. See ibv_create_qp(3).

    A queue pair outlives its id until it is destroyed.

    Each `post_*` call copies the request and returns at once. The device uses the memory of the
    request until the request has completed or the queue pair is destroyed.
    """

    __slots__ = ("_caps", "cell", "cells", "element", "number")

    def __init__(self, pointer: IbvQp, caps: QueuePairCaps) -> None:
        self.cell: QpCell = ffi.new("struct ibv_qp *[1]", [pointer])
        """The memory where the pointer is stored."""
        self.cells = int(ffi.cast("uintptr_t", self.cell)), 0
        """The address of `cell`, valid while this object lives; and 0.

        The second one is that of a shared receive queue. See SharedReceiveQueue.cells.
        """
        self.number = pointer.qp_num
        self.element = element_of(pointer.qp_context)
        """The number that asynchronous events of the queue pair contain: `AsyncEvent.element`."""
        self._caps: QueuePairCaps | IbvQpCap = caps

    @classmethod
    def unmade(cls, context: VoidPtr, caps: QueuePairCaps) -> QueuePair:
        """Return an object for a queue pair that is made later, with this `qp_context`.

        Until then `pointer` is NULL, `number` is 0, and `caps` are those that are asked for.
        """
        qp = cls.__new__(cls)
        qp.cell = ffi.new("struct ibv_qp *[1]", [ffi.NULL])
        qp.cells = int(ffi.cast("uintptr_t", qp.cell)), 0
        qp.number = 0
        qp.element = element_of(context)
        qp._caps = caps
        return qp

    def note_made(self, init: IbvQpInitAttr) -> None:
        """Complete the object of unmade(). C has stored the pointer in `cell`, unless it failed."""
        pointer = self.cell[0]
        if pointer != ffi.NULL:
            self.number = pointer.qp_num
            self._caps = ffi.new("struct ibv_qp_cap *", init.cap)

    @property
    def caps(self) -> QueuePairCaps:
        """The real capacity, which is not less than what was asked for."""
        if not isinstance(self._caps, QueuePairCaps):
            self._caps = read_caps(self._caps)
        return self._caps

    @property
    def pointer(self) -> IbvQp:
        """The C queue pair; NULL once it is destroyed."""
        return self.cell[0]

    @classmethod
    def create(cls, pd: ProtectionDomain, init: QueuePairInit) -> QueuePair:
        """Create a queue pair that belongs to no id: ibv_create_qp(3). A system call.

        Raises:
            VerbsError: EINVAL (a limit of the device is exceeded), ENOMEM, EOPNOTSUPP (the device
                does not support the type).
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
        """Change the attributes in the mask, for example the state: ibv_modify_qp(3).

        Raises:
            VerbsError: EINVAL (not possible in this state, or the queue pair is destroyed).
        """
        if self.pointer == ffi.NULL:
            raise VerbsError(errno.EINVAL, "ibv_modify_qp")
        check_errno(
            lib.ibv_modify_qp(self.pointer, attributes.pointer, attributes.mask), "ibv_modify_qp"
        )

    def attach_mcast(self, gid: bytes, lid: int) -> None:
        """Receive the datagrams of a multicast group: ibv_attach_mcast(3).

        Raises:
            VerbsError: EINVAL (not a datagram queue pair, or no such group), ENOMEM.
        """
        check_errno(lib.ibv_attach_mcast(self.pointer, make_gid(gid), lid), "ibv_attach_mcast")

    def detach_mcast(self, gid: bytes, lid: int) -> None:
        """Undo attach_mcast(): ibv_detach_mcast(3). Call it before destroy().

        Raises:
            VerbsError: EINVAL (the queue pair is not attached).
        """
        check_errno(lib.ibv_detach_mcast(self.pointer, make_gid(gid), lid), "ibv_detach_mcast")

    def post_ud_send(
        self,
        wr_id: int,
        address: int,
        length: int,
        lkey: int,
        flags: int,
        imm: int,
        destination: tuple[AddressHandle, int, int],
    ) -> None:
        """Send a datagram from registered memory. See ibv_post_send(3).

        `destination` is an address handle, a queue pair number and a queue key.

        Raises:
            VerbsError: ENOMEM (the send queue is full), EINVAL (wrong state, or too long for
                inline data).
        """
        handle, qp_num, qkey = destination
        error = lib.aiordma_post_ud_send(
            self.cell, wr_id, address, length, lkey, flags, imm, handle.pointer, qp_num, qkey
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
        """Copy `data` into registered memory at `address`, and send it from there.

        The memory must have room for it.

        Raises:
            VerbsError: as post_ud_send.
        """
        with ffi.from_buffer("char[]", data) as chars:
            ffi.memmove(ffi.cast("void *", address), chars, len(chars))
            self.post_ud_send(wr_id, address, len(chars), lkey, SIGNALED, imm, destination)

    def post_ud_send_inline(
        self, wr_id: int, data: Buffer, imm: int, destination: tuple[AddressHandle, int, int]
    ) -> None:
        """Send a datagram inline: the request contains a copy of `data`.

        Raises:
            VerbsError: as post_ud_send.
        """
        with ffi.from_buffer("char[]", data) as chars:
            address = int(ffi.cast("uintptr_t", chars))
            self.post_ud_send(wr_id, address, len(chars), 0, _INLINE, imm, destination)

    def post_recv(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        """Post one receive into registered memory. See ibv_post_recv(3).

        Raises:
            VerbsError: ENOMEM (the receive queue is full), EINVAL (wrong state).
        """
        error = lib.aiordma_post_recv(self.cell, wr_id, address, length, lkey)
        if error:
            raise VerbsError(error, "ibv_post_recv")

    def post_list(
        self,
        wr_id: int,
        opcode: WrOpcode,
        segments: list[Segment],
        remote: tuple[int, int] = (0, 0),
        *,
        flags: int = SIGNALED,
        imm: int = NO_IMMEDIATE,
    ) -> None:
        """Post a send, an RDMA write or an RDMA read of the memory in `segments`.

        `remote` is an address and a remote key. SEND_WITH_INV uses only the key, which the peer
        then invalidates. `flags` are SendFlags. See ibv_post_send(3).

        Raises:
            VerbsError: ENOMEM (the send queue is full), EINVAL (wrong state, too many segments).
        """
        if len(segments) == 1:
            error = lib.aiordma_post_one(
                self.cell, wr_id, opcode, *segments[0], flags, imm, *remote
            )
        else:
            array = ffi.new("struct ibv_sge[]", segments)
            error = lib.aiordma_post_list(
                self.cell, wr_id, opcode, array, len(segments), flags, imm, *remote
            )
        if error:
            raise VerbsError(error, "ibv_post_send")

    def post_chain(self, chain: RequestChain) -> None:
        """Post all requests of a chain in one call. The chain is empty afterwards.

        The chain must contain at least one request.

        Raises:
            VerbsError: as post_list. The requests before the failed one have been posted.
        """
        chain.chain.count = 0  # before the call: after a Ctrl-C they must not be posted again
        error = lib.aiordma_post_chain(self.cell, chain.chain)
        if error:
            raise VerbsError(error, "ibv_post_send")

    def post_send_copy(
        self,
        wr_id: int,
        address: int,
        data: Buffer,
        lkey: int,
        imm: int = NO_IMMEDIATE,
        flags: int = SIGNALED,
    ) -> None:
        """Copy `data` into registered memory at `address`, and send it from there.

        The memory must have room for it.

        Raises:
            VerbsError: ENOMEM (the send queue is full), EINVAL (wrong state).
        """
        chars = ffi.from_buffer("char[]", data)
        error = lib.aiordma_post_send_copy(
            self.cell, wr_id, address, chars, len(chars), lkey, flags, imm
        )
        if error:
            raise _refused(error, chars)

    def post_send_inline(
        self, wr_id: int, data: Buffer, imm: int = NO_IMMEDIATE, flags: int = SIGNALED
    ) -> None:
        """Send bytes inline: the request contains a copy of `data`.

        Raises:
            VerbsError: ENOMEM (the send queue is full), EINVAL (longer than max_inline_data).
        """
        chars = ffi.from_buffer("char[]", data)
        error = lib.aiordma_post_send_inline(self.cell, wr_id, chars, len(chars), flags, imm)
        if error:
            raise _refused(error, chars)

    def post_write_inline(
        self,
        wr_id: int,
        data: Buffer,
        remote: tuple[int, int],
        imm: int = NO_IMMEDIATE,
        flags: int = SIGNALED,
    ) -> None:
        """Write bytes inline to the peer's memory: the request contains a copy of `data`.

        Raises:
            VerbsError: as post_send_inline.
        """
        chars = ffi.from_buffer("char[]", data)
        error = lib.aiordma_post_write_inline(
            self.cell, wr_id, chars, len(chars), flags, imm, *remote
        )
        if error:
            raise _refused(error, chars)

    def post_write_copy(
        self,
        wr_id: int,
        local: tuple[int, int],
        data: Buffer,
        remote: tuple[int, int],
        imm: int = NO_IMMEDIATE,
        flags: int = SIGNALED,
    ) -> None:
        """Copy `data` into registered memory, and write it from there to the peer's memory.

        `local` and `remote` are an address and a key each. The local memory must have room for
        `data`.

        Raises:
            VerbsError: ENOMEM (the send queue is full), EINVAL (wrong state).
        """
        address, lkey = local
        chars = ffi.from_buffer("char[]", data)
        error = lib.aiordma_post_write_copy(
            self.cell, wr_id, address, chars, len(chars), lkey, flags, imm, *remote
        )
        if error:
            raise _refused(error, chars)

    def post_atomic(
        self,
        wr_id: int,
        opcode: WrOpcode,
        local: tuple[int, int],
        remote: tuple[int, int],
        operands: tuple[int, int],
        flags: int = SIGNALED,
    ) -> None:
        """Post an atomic operation on 8 bytes of the peer's memory. See ibv_post_send(3).

        `local` and `remote` are an address and a key each. The old value of the remote memory is
        written to the local memory. `operands` are the number to add and 0, or the value to compare
        with and the value to store if both are equal.

        Raises:
            VerbsError: as post_list.
        """
        error = lib.aiordma_post_atomic(self.cell, wr_id, opcode, *local, flags, *remote, *operands)
        if error:
            raise VerbsError(error, "ibv_post_send")

    def post_bind_mw(
        self,
        wr_id: int,
        window: MemoryWindow,
        registration: Registration,
        part: tuple[int, int],
        access: AccessFlags,
        flags: int = SIGNALED,
    ) -> None:
        """Bind a memory window to a part of a memory region: IBV_WR_BIND_MW.

        `part` is an address and a length. The window has a new key from now on. See ibv_bind_mw(3)
        and ibv_post_send(3).

        Raises:
            VerbsError: as post_list.
            ValueError: the window is closed.
        """
        error = lib.aiordma_post_bind_mw(
            self.cell,
            wr_id,
            window.open_pointer,
            window.next_rkey(),
            registration.pointer,
            *part,
            access,
            flags,
        )
        if error:
            raise VerbsError(error, "ibv_post_send")

    def set_min_rnr_timer(self, timer: int) -> None:
        """Set the time that the peer waits after a receiver-not-ready NAK: IBV_QP_MIN_RNR_TIMER.

        `timer` is 0 to 31, a code of the InfiniBand specification: 1 is 0.01 ms, 12 is 0.64 ms, 0
        is 655.36 ms. Only possible once the connection is established. See ibv_modify_qp(3).

        Raises:
            VerbsError: EINVAL (wrong state, or iWARP, which has no such timer).
        """
        check_errno(lib.aiordma_set_min_rnr_timer(self.pointer, timer), "ibv_modify_qp")

    def set_retry_count(self, count: int) -> None:
        """Set how often the device repeats a packet without acknowledgment: IBV_QP_RETRY_CNT.

        `count` is 0 to 7. Only possible once the connection is established, and while the send
        queue is empty. Blocks for some milliseconds. See ibv_modify_qp(3).

        Raises:
            VerbsError: EINVAL (wrong state, the send queue was not empty, or iWARP, which has no
                such count). If the state is SQD afterwards, nothing that is posted is sent.
        """
        check_errno(lib.aiordma_set_retry_count(self.pointer, count), "ibv_modify_qp")

    def query_state(self) -> QpState:
        """Return the state, which the kernel might have changed: ibv_query_qp(3).

        Raises:
            VerbsError: the device was removed, or the queue pair is destroyed (EINVAL).
        """
        state = ffi.new("int *")
        check_errno(lib.aiordma_query_qp_state(self.pointer, state), "ibv_query_qp")
        return QpState(state[0])

    def forget(self) -> IbvQp:
        """Clear the pointer. Return it when no thread posts any more: the caller destroys it."""
        pointer, self.cell[0] = self.cell[0], ffi.NULL
        lib.aiordma_await_posts()
        return pointer

    def take_pointer(self) -> IbvQp | None:
        """Clear the pointer and return it: the caller destroys the queue pair. None if it is NULL.

        A thread can still be posting: see aiordma_destroy_qp() in work_requests.c.
        """
        pointer, self.cell[0] = self.cell[0], ffi.NULL
        return None if pointer == ffi.NULL else pointer

    def destroy(self) -> None:
        """Destroy the queue pair: ibv_destroy_qp(3). Idempotent.

        Afterwards the device does not use the memory of its requests any more, and posting fails
        with EINVAL. Waits until all asynchronous events of the queue pair are acknowledged.

        Raises:
            VerbsError: EBUSY while the queue pair is attached to a multicast group.
        """
        pointer = self.take_pointer()
        if pointer is not None:
            check_errno(lib.aiordma_destroy_qp(pointer), "ibv_destroy_qp")
