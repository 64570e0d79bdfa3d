"""IdVerbs: the calls of rdma_verbs.h, by which an id's own queue pair and queues are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import AccessFlags, SendFlags, SrqType
from aiordma.errors import check, last_error
from aiordma.rdmacm.identity import Identity
from aiordma.verbs import (
    AddressHandle,
    Completion,
    ProtectionDomain,
    Registration,
    SharedReceiveQueue,
    SharedReceiveQueueCaps,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._lib import CmIdPtr, IbvPd, SgeArray, VoidPtr

Segment = tuple[Registration, int, int]
"""A piece of registered memory: the registration, an offset, and a length in bytes."""

_SIGNALED = SendFlags.SIGNALED


class IdVerbs(Identity):
    """The part of CmId that moves data, through the queue pair made by `create_qp`.

    `wr_id` comes back in the completion. The memory that a request names belongs to the device
    until then. An id has completion queues of its own only if none were given to `create_qp`.
    """

    __slots__ = ("srq",)

    def __init__(self, pointer: CmIdPtr) -> None:
        super().__init__(pointer)
        self.srq: SharedReceiveQueue | None = None
        """The shared receive queue made by create_srq()."""

    # --- memory ---

    def reg_msgs(self, buffer: Buffer) -> Registration:
        """Register memory to send from and receive into: rdma_reg_msgs(3). Blocks, as all three do.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached).
            ValueError: the id has no protection domain yet.
        """
        return self._register(buffer, AccessFlags.LOCAL_WRITE)

    def reg_read(self, buffer: Buffer) -> Registration:
        """Register memory that the peer may read: rdma_reg_read(3). Raises: as reg_msgs."""
        return self._register(buffer, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ)

    def reg_write(self, buffer: Buffer) -> Registration:
        """Register memory that the peer may write: rdma_reg_write(3). Raises: as reg_msgs.

        `Registration.close` is rdma_dereg_mr(3) for all of them.
        """
        return self._register(buffer, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)

    def _register(self, buffer: Buffer, access: AccessFlags) -> Registration:
        return Registration(self.pd(), buffer, access)

    def pd(self) -> ProtectionDomain:
        """The protection domain of the id: the one given, or librdmacm's default of the device.

        Not to be closed.

        Raises:
            ValueError: it has none yet.
        """
        pointer = self.pointer.pd
        if pointer == ffi.NULL:
            raise ValueError("the id has no protection domain before it is bound to a device")
        return ProtectionDomain.borrow(self.device(), pointer)

    # --- shared receive queues ---

    def create_srq(
        self, pd: ProtectionDomain | None, caps: SharedReceiveQueueCaps
    ) -> SharedReceiveQueue:
        """Make a shared receive queue for the id's queue pair: rdma_create_srq(3). A system call.

        Raises:
            VerbsError: EINVAL (more than the device can), ENOMEM, EOPNOTSUPP.
            ValueError: the id is not bound to a device yet.
        """
        attr = ffi.new("struct ibv_srq_init_attr *")
        caps.fill(attr.attr)
        check(lib.rdma_create_srq(self.pointer, self._pd_pointer(pd), attr), "rdma_create_srq")
        return self._made_srq(attr.attr.max_wr, attr.attr.max_sge)

    def create_srq_ex(
        self,
        pd: ProtectionDomain | None,
        caps: SharedReceiveQueueCaps,
        srq_type: SrqType = SrqType.BASIC,
    ) -> SharedReceiveQueue:
        """Make one of a given type: rdma_create_srq_ex(3). XRC brings its domain and queue along.

        Raises:
            VerbsError: EOPNOTSUPP (the device has no such thing), EINVAL, ENOMEM.
            ValueError: the id is not bound to a device yet.
        """
        attr = ffi.new("struct ibv_srq_init_attr_ex *")
        caps.fill(attr.attr)
        attr.srq_type = srq_type
        attr.comp_mask = lib.IBV_SRQ_INIT_ATTR_TYPE | lib.IBV_SRQ_INIT_ATTR_PD
        attr.pd = self._pd_pointer(pd)
        check(lib.rdma_create_srq_ex(self.pointer, attr), "rdma_create_srq_ex")
        return self._made_srq(attr.attr.max_wr, attr.attr.max_sge)

    def _pd_pointer(self, pd: ProtectionDomain | None) -> IbvPd:
        """For calls that would crash without a device."""
        if not self.has_device:
            raise ValueError("the id is not bound to a device yet")
        return self.pd().open_pointer if pd is None else pd.open_pointer

    def _made_srq(self, max_wr: int, max_sge: int) -> SharedReceiveQueue:
        self.srq = SharedReceiveQueue(self.pointer.srq, SharedReceiveQueueCaps(max_wr, max_sge))
        return self.srq

    def destroy_srq(self) -> None:
        """Destroy the shared receive queue, and what XRC brought along: rdma_destroy_srq(3).

        Not if its own close() did so already; then, or without one, nothing happens.
        """
        srq, self.srq = self.srq, None
        if srq is None or srq.pointer == ffi.NULL:
            self.pointer.srq = ffi.NULL
            return
        lib.rdma_destroy_srq(self.pointer)
        srq.forget()

    # --- requests ---

    def post_recv(self, wr_id: int, memory: Registration, offset: int, length: int) -> None:
        """Post a receive into one piece of memory: rdma_post_recv(3). Does not block.

        It goes to the id's shared receive queue if it has one.

        Raises:
            VerbsError: ENOMEM (the queue is full), EINVAL (no memory there, or wrong state).
            ValueError: the id has no queue pair.
        """
        address = self._inside(memory, offset, length)
        pointer = self._with_queue()
        check(
            lib.rdma_post_recv(pointer, _context(wr_id), address, length, memory.pointer),
            "rdma_post_recv",
        )

    def post_send(
        self,
        wr_id: int,
        memory: Registration,
        offset: int,
        length: int,
        flags: SendFlags = _SIGNALED,
    ) -> None:
        """Send one piece of memory: rdma_post_send(3). Raises: as post_recv."""
        address = self._inside(memory, offset, length)
        check(
            lib.rdma_post_send(
                self._with_qp(), _context(wr_id), address, length, memory.pointer, flags
            ),
            "rdma_post_send",
        )

    def post_read(
        self, wr_id: int, segment: Segment, remote: int, rkey: int, flags: SendFlags = _SIGNALED
    ) -> None:
        """Read the peer's memory at address `remote` into a piece of ours: rdma_post_read(3).

        Raises: as post_recv.
        """
        memory, offset, length = segment
        address = self._inside(memory, offset, length)
        check(
            lib.rdma_post_read(
                self._with_qp(),
                _context(wr_id),
                address,
                length,
                memory.pointer,
                flags,
                remote,
                rkey,
            ),
            "rdma_post_read",
        )

    def post_write(
        self, wr_id: int, segment: Segment, remote: int, rkey: int, flags: SendFlags = _SIGNALED
    ) -> None:
        """Write a piece of our memory to the peer's at address `remote`: rdma_post_write(3).

        Raises: as post_recv.
        """
        memory, offset, length = segment
        address = self._inside(memory, offset, length)
        check(
            lib.rdma_post_write(
                self._with_qp(),
                _context(wr_id),
                address,
                length,
                memory.pointer,
                flags,
                remote,
                rkey,
            ),
            "rdma_post_write",
        )

    def post_ud_send(
        self,
        wr_id: int,
        segment: Segment,
        handle: AddressHandle,
        remote_qpn: int,
        flags: SendFlags = _SIGNALED,
    ) -> None:
        """Send a datagram with the queue key of port space UDP: rdma_post_ud_send(3).

        `QueuePair.post_ud_send` sends with any key. Raises: as post_recv.
        """
        memory, offset, length = segment
        address = self._inside(memory, offset, length)
        check(
            lib.rdma_post_ud_send(
                self._with_qp(),
                _context(wr_id),
                address,
                length,
                memory.pointer,
                flags,
                handle.pointer,
                remote_qpn,
            ),
            "rdma_post_ud_send",
        )

    def post_recvv(self, wr_id: int, segments: Sequence[Segment]) -> None:
        """Post a receive into several pieces: rdma_post_recvv(3). Raises: as post_recv."""
        sges = self._segments(segments)
        check(
            lib.rdma_post_recvv(self._with_queue(), _context(wr_id), sges, len(segments)),
            "rdma_post_recvv",
        )

    def post_sendv(
        self, wr_id: int, segments: Sequence[Segment], flags: SendFlags = _SIGNALED
    ) -> None:
        """Send several pieces as one message: rdma_post_sendv(3). Raises: as post_recv."""
        sges = self._segments(segments)
        check(
            lib.rdma_post_sendv(self._with_qp(), _context(wr_id), sges, len(segments), flags),
            "rdma_post_sendv",
        )

    def post_readv(
        self,
        wr_id: int,
        segments: Sequence[Segment],
        remote: int,
        rkey: int,
        flags: SendFlags = _SIGNALED,
    ) -> None:
        """Read into several pieces: rdma_post_readv(3). Raises: as post_recv."""
        sges = self._segments(segments)
        check(
            lib.rdma_post_readv(
                self._with_qp(), _context(wr_id), sges, len(segments), flags, remote, rkey
            ),
            "rdma_post_readv",
        )

    def post_writev(
        self,
        wr_id: int,
        segments: Sequence[Segment],
        remote: int,
        rkey: int,
        flags: SendFlags = _SIGNALED,
    ) -> None:
        """Write several pieces, one after the other: rdma_post_writev(3). Raises: as post_recv."""
        sges = self._segments(segments)
        check(
            lib.rdma_post_writev(
                self._with_qp(), _context(wr_id), sges, len(segments), flags, remote, rkey
            ),
            "rdma_post_writev",
        )

    def _segments(self, segments: Sequence[Segment]) -> SgeArray:
        sges = ffi.new("struct ibv_sge[]", len(segments))
        for index, (memory, offset, length) in enumerate(segments):
            _check_inside(memory, offset, length)
            sge = sges[index]
            sge.addr, sge.length, sge.lkey = memory.address + offset, length, memory.lkey
        return sges

    def _inside(self, memory: Registration, offset: int, length: int) -> VoidPtr:
        _check_inside(memory, offset, length)
        return ffi.cast("void *", memory.address + offset)

    def _with_qp(self) -> CmIdPtr:
        """For calls that would crash without a queue pair."""
        if not self.has_qp:
            raise ValueError("the id has no queue pair")
        return self.pointer

    def _with_queue(self) -> CmIdPtr:
        if self.pointer.srq == ffi.NULL:
            return self._with_qp()
        return self.pointer

    # --- completions ---

    def get_send_comp(self) -> Completion:
        """Wait for the next completion of its own send queue: rdma_get_send_comp(3). Blocks.

        Raises:
            VerbsError: the device is gone.
            ValueError: the id has no completion queue of its own for sending.
        """
        if self.pointer.send_cq_channel == ffi.NULL:
            raise ValueError("the id has no completion queue of its own for sending")
        wc = ffi.new("struct ibv_wc *")
        if lib.rdma_get_send_comp(self.pointer, wc) < 0:
            raise last_error("rdma_get_send_comp")
        return Completion.read(wc)

    def get_recv_comp(self) -> Completion:
        """Wait for the next completion of its own receive queue: rdma_get_recv_comp(3). Blocks.

        Raises:
            VerbsError: the device is gone.
            ValueError: the id has no completion queue of its own for receiving.
        """
        if self.pointer.recv_cq_channel == ffi.NULL:
            raise ValueError("the id has no completion queue of its own for receiving")
        wc = ffi.new("struct ibv_wc *")
        if lib.rdma_get_recv_comp(self.pointer, wc) < 0:
            raise last_error("rdma_get_recv_comp")
        return Completion.read(wc)


def _context(wr_id: int) -> VoidPtr:
    return ffi.cast("void *", wr_id)


def _check_inside(memory: Registration, offset: int, length: int) -> None:
    """Where C has an assertion, or nothing."""
    if offset < 0 or length < 0 or offset + length > memory.length or not memory.is_open:
        raise ValueError(
            f"bytes {offset} to {offset + length} are not within the {memory.length} registered"
        )
