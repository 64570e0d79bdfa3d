"""CompletionChannel: the fd of completion events; CompletionQueue: the queue of completions."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import WcFlags, WcOpcode, WcStatus
from aiordma.errors import VerbsError, WorkRequestError, check, check_errno, last_error
from aiordma.verbs.context_references import context_references
from aiordma.verbs.device import Device
from aiordma.verbs.element import element_of, new_context

if TYPE_CHECKING:
    from aiordma._native._lib import IbvCompChannel, IbvCq, IbvWc, WcArray


_SUCCESS = int(WcStatus.SUCCESS)
_WITH_IMM = int(WcFlags.WITH_IMM)
# rxe (in Linux 6.1) sets the kernel's number of WITH_INV, which is IP_CSUM_OK in libibverbs. The
# checksum flag is not used on a connected queue pair, so either flag means WITH_INV there.
_WITH_INV = int(WcFlags.WITH_INV | WcFlags.IP_CSUM_OK)


def immediate(wc: IbvWc) -> int | None:
    """Return the immediate data of a completion, or None."""
    return immediate_of(wc.wc_flags, wc.imm_data) if wc.status == _SUCCESS else None


def immediate_of(flags: int, imm_data: int) -> int | None:
    """Return the immediate data, or None, from two members of a successful completion."""
    return socket.ntohl(imm_data) if flags & _WITH_IMM else None


def invalidated_of(flags: int, imm_data: int) -> int | None:
    """Return the key that the peer of a connected queue pair invalidated, or None."""
    return imm_data if flags & _WITH_INV else None


@dataclass(frozen=True, slots=True)
class Completion:
    """`struct ibv_wc` as a value. See ibv_poll_cq(3).

    For a failed request, only `wr_id`, `status`, `vendor_err` and `qp_num` are valid. `imm` is None
    if there is no immediate data.
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
        """Return the value of a C struct."""
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
        """Return this completion if the request succeeded.

        Raises:
            WorkRequestError: the request failed.
        """
        if self.status is not WcStatus.SUCCESS:
            raise WorkRequestError(self.status, self.opcode, self.vendor_err)
        return self


POLL_BATCH = 64
EVENT_BATCH = 16


class CompletionChannel:
    """`struct ibv_comp_channel` with a non-blocking fd. See ibv_create_comp_channel(3)."""

    __slots__ = ("_ready", "address", "device", "fd", "pointer")

    def __init__(self, device: Device) -> None:
        """Create a channel on `device`.

        Raises:
            VerbsError: ENOMEM, EMFILE; EAGAIN when the rdma control group's limit is reached.
        """
        self.device = device
        pointer = lib.ibv_create_comp_channel(device.context)
        if pointer == ffi.NULL:
            raise last_error("ibv_create_comp_channel")
        self.pointer: IbvCompChannel | None = pointer
        self.address = int(ffi.cast("uintptr_t", pointer))
        """The address of the C channel; 0 once it is destroyed."""
        self.fd = pointer.fd
        self._ready = ffi.new("struct ibv_cq *[]", EVENT_BATCH)
        check(lib.aiordma_set_nonblocking(self.fd), "fcntl")
        context_references.acquire(device.context)

    def ready_queues(self) -> list[IbvCq]:
        """Read the pending events and return their queues, armed again.

        The events are acknowledged. Poll each queue afterwards until it is empty. Does not block.

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

    __slots__ = ("_batch", "address", "capacity", "element", "pointer")

    def __init__(self, channel: CompletionChannel, entries: int) -> None:
        """Create a queue with at least `entries` entries, whose events come through `channel`.

        Raises:
            VerbsError: EINVAL (more than the device's max_cqe), ENOMEM.
            ValueError: the channel is closed.
        """
        if channel.pointer is None:
            raise ValueError("the completion channel is closed")
        context = channel.device.context
        own = new_context()
        pointer = lib.ibv_create_cq(context, entries, own, channel.pointer, 0)
        if pointer == ffi.NULL:
            raise last_error("ibv_create_cq")
        self.pointer: IbvCq | None = pointer
        self.address = int(ffi.cast("uintptr_t", pointer))
        """The address of the C queue; 0 once it is destroyed."""
        self.element = element_of(own)
        """The number that asynchronous events of the queue contain: `AsyncEvent.element`."""
        self.capacity = pointer.cqe
        self._batch: WcArray = ffi.new("struct ibv_wc[]", POLL_BATCH)

    @property
    def open_pointer(self) -> IbvCq:
        """The C queue.

        Raises:
            ValueError: the queue is closed.
        """
        if self.pointer is None:
            raise ValueError("the completion queue is closed")
        return self.pointer

    def request_notify(self) -> None:
        """Arm the queue: its next completion raises one event. See ibv_req_notify_cq(3).

        Raises:
            VerbsError: the device was removed.
        """
        if self.pointer is not None:
            check_errno(lib.ibv_req_notify_cq(self.pointer, 0), "ibv_req_notify_cq")

    def poll(self) -> list[IbvWc]:
        """Return up to POLL_BATCH completions. Fewer mean that the queue is empty now.

        They are views of one batch: the next poll() overwrites them. Does not block.
        See ibv_poll_cq(3).

        Raises:
            VerbsError: the queue failed (it overflowed, or the device was removed).
        """
        if self.pointer is None:
            return []
        return self._views(lib.ibv_poll_cq(self.pointer, POLL_BATCH, self._batch))

    def _views(self, count: int) -> list[IbvWc]:
        """Return the first `count` completions of the batch. A negative count is an error."""
        if count < 0:
            raise VerbsError(abs(count), "ibv_poll_cq")
        batch = self._batch
        return [batch[index] for index in range(count)]

    def close(self) -> None:
        """Destroy the queue: ibv_destroy_cq(3). Idempotent.

        Raises:
            VerbsError: EBUSY while a queue pair still uses it.
        """
        # The pointer is cleared first: another thread must not poll a queue that is destroyed.
        pointer, self.pointer, self.address = self.pointer, None, 0
        if pointer is not None:
            check_errno(lib.ibv_destroy_cq(pointer), "ibv_destroy_cq")
