"""CompletionChannel: the fd that tells of completions; CompletionQueue: where they are read."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import WcFlags, WcOpcode, WcStatus
from aiordma.errors import VerbsError, WorkRequestError, check, check_errno, last_error
from aiordma.verbs.context_references import context_references
from aiordma.verbs.device import Device

if TYPE_CHECKING:
    from aiordma._native._lib import IbvCompChannel, IbvCq, IbvWc, WcArray


_SUCCESS = int(WcStatus.SUCCESS)
_WITH_IMM = int(WcFlags.WITH_IMM)
# rxe gives the kernel's number for WITH_INV (in Linux 6.1), which is IP_CSUM_OK here: on a
# connected queue pair, where nobody looks at checksums of IP, either means the same.
_WITH_INV = int(WcFlags.WITH_INV | WcFlags.IP_CSUM_OK)


def immediate(wc: IbvWc) -> int | None:
    """The immediate data that came with a message, if any."""
    return immediate_of(wc.wc_flags, wc.imm_data) if wc.status == _SUCCESS else None


def immediate_of(flags: int, imm_data: int) -> int | None:
    """Likewise, from two members of a completion that tells of success."""
    return socket.ntohl(imm_data) if flags & _WITH_IMM else None


def invalidated_of(flags: int, imm_data: int) -> int | None:
    """The key that the peer of a connected queue pair invalidated with a message, if any."""
    return imm_data if flags & _WITH_INV else None


@dataclass(frozen=True, slots=True)
class Completion:
    """`struct ibv_wc` as a value. See ibv_poll_cq(3).

    Of a failed request only `wr_id`, `status`, `vendor_err` and `qp_num` mean something. `imm` is
    None if none came along.
    """

    wr_id: int
    status: WcStatus
    opcode: WcOpcode
    vendor_err: int
    byte_len: int
    imm: int | None
    qp_num: int
    src_qp: int
    flags: WcFlags

    @classmethod
    def read(cls, wc: IbvWc) -> Completion:
        """The value of a C struct."""
        flags = WcFlags(wc.wc_flags) if wc.status == WcStatus.SUCCESS else WcFlags(0)
        return cls(
            wr_id=wc.wr_id,
            status=WcStatus(wc.status),
            opcode=WcOpcode(wc.opcode),
            vendor_err=wc.vendor_err,
            byte_len=wc.byte_len,
            imm=immediate(wc),
            qp_num=wc.qp_num,
            src_qp=wc.src_qp,
            flags=flags,
        )

    def check(self) -> Completion:
        """Itself, if it tells of success.

        Raises:
            WorkRequestError: it does not.
        """
        if self.status is not WcStatus.SUCCESS:
            raise WorkRequestError(self.status, self.opcode, self.vendor_err)
        return self


POLL_BATCH = 64
EVENT_BATCH = 16


class CompletionChannel:
    """`struct ibv_comp_channel`, its fd non-blocking. See ibv_create_comp_channel(3)."""

    __slots__ = ("_ready", "address", "device", "fd", "pointer")

    def __init__(self, device: Device) -> None:
        """Create a channel of `device`.

        Raises:
            VerbsError: ENOMEM, EMFILE; EAGAIN when the rdma control group's limit is reached.
        """
        self.device = device
        pointer = lib.ibv_create_comp_channel(device.context)
        if pointer == ffi.NULL:
            raise last_error("ibv_create_comp_channel")
        self.pointer: IbvCompChannel | None = pointer
        self.address = int(ffi.cast("uintptr_t", pointer))
        """Of the C channel; 0 once it is destroyed."""
        self.fd = pointer.fd
        self._ready = ffi.new("struct ibv_cq *[]", EVENT_BATCH)
        check(lib.aiordma_set_nonblocking(self.fd), "fcntl")
        context_references.acquire(device.context)

    def ready_queues(self) -> list[IbvCq]:
        """Read what events are pending: the queues they name, acknowledged and armed again.

        Poll each of them afterwards until it is empty. Does not block.

        Raises:
            VerbsError: EIO after the device was removed; the fd then stays readable for ever.
        """
        if self.pointer is None:
            return []
        count = lib.aiordma_comp_events(self.pointer, self._ready, EVENT_BATCH)
        if count < 0:
            raise VerbsError(-count, "ibv_get_cq_event")
        ready = self._ready
        return [ready[index] for index in range(count)]

    def close(self) -> None:
        """Destroy the channel: ibv_destroy_comp_channel(3). Idempotent.

        Raises:
            VerbsError: EBUSY while a completion queue still uses it.
        """
        if self.pointer is not None:
            check_errno(lib.ibv_destroy_comp_channel(self.pointer), "ibv_destroy_comp_channel")
            self.pointer = None
            self.address = 0
            context_references.release(self.device.context)


class CompletionQueue:
    """`struct ibv_cq`. See ibv_create_cq(3)."""

    __slots__ = ("_batch", "address", "capacity", "pointer")

    def __init__(self, channel: CompletionChannel, entries: int) -> None:
        """Create a queue of at least `entries` entries behind `channel`; the device may give more.

        Raises:
            VerbsError: EINVAL (more than the device's max_cqe), ENOMEM.
            ValueError: the channel is closed.
        """
        if channel.pointer is None:
            raise ValueError("the completion channel is closed")
        context = channel.device.context
        pointer = lib.ibv_create_cq(context, entries, ffi.NULL, channel.pointer, 0)
        if pointer == ffi.NULL:
            raise last_error("ibv_create_cq")
        self.pointer: IbvCq | None = pointer
        self.address = int(ffi.cast("uintptr_t", pointer))
        """Of the C queue; 0 once it is destroyed."""
        self.capacity = pointer.cqe
        self._batch: WcArray = ffi.new("struct ibv_wc[]", POLL_BATCH)

    @property
    def open_pointer(self) -> IbvCq:
        """The C queue.

        Raises:
            ValueError: it is closed.
        """
        if self.pointer is None:
            raise ValueError("the completion queue is closed")
        return self.pointer

    def request_notify(self) -> None:
        """Arm the queue: its next completion raises one event. See ibv_req_notify_cq(3).

        Raises:
            VerbsError: the device is gone.
        """
        if self.pointer is not None:
            check_errno(lib.ibv_req_notify_cq(self.pointer, 0), "ibv_req_notify_cq")

    def poll(self) -> list[IbvWc]:
        """Take up to POLL_BATCH completions; fewer than that means that the queue was emptied.

        They are views of one batch: the next poll() overwrites them. Does not block.
        See ibv_poll_cq(3).

        Raises:
            VerbsError: the queue is broken (it overran, or the device is gone).
        """
        if self.pointer is None:
            return []
        return self._taken(lib.ibv_poll_cq(self.pointer, POLL_BATCH, self._batch))

    def _taken(self, count: int) -> list[IbvWc]:
        if count < 0:
            raise VerbsError(abs(count), "ibv_poll_cq")
        batch = self._batch
        return [batch[index] for index in range(count)]

    def close(self) -> None:
        """Destroy the queue: ibv_destroy_cq(3). Idempotent.

        Raises:
            VerbsError: EBUSY while a queue pair still uses it.
        """
        # Forgotten first: another thread that polls must not see it go.
        pointer, self.pointer, self.address = self.pointer, None, 0
        if pointer is not None:
            check_errno(lib.ibv_destroy_cq(pointer), "ibv_destroy_cq")
