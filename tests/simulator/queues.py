"""Queues: a queue pair whose completions the test adds itself, without a network."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from aiordma.enums import WcOpcode, WcStatus
from simulator.verbs import Request
from simulator.world import address_of, ffi, lib

RECEIVE = 1 << 31
NUMBER_MASK = RECEIVE - 1
DEPTH = 1 << 16
"""The entries of each queue. A post beyond them overwrites the record of the oldest."""


@dataclass(frozen=True)
class Posted:
    """A posted work request. `kind` is "s": a send, "r": a receive, "q": one of the shared queue.

    `data` is a copy of a send's memory.
    """

    kind: str
    wr_id: int
    address: int
    length: int
    lkey: int
    num_sge: int
    opcode: int
    flags: int
    remote: tuple[int, int]
    imm_data: int
    data: bytes


class Queues:
    """One queue pair, one shared receive queue and one completion queue. The test closes it."""

    def __init__(self) -> None:
        self._context = lib.sim_new_context(b"queues0", lib.IBV_TRANSPORT_IB)
        context = ffi.addressof(self._context.verbs.context)
        self._channel = lib.sim_new_channel(context)
        self._cq = lib.sim_new_cq(context, 1 << 16, ffi.addressof(self._channel.channel))
        attr = ffi.new("struct ibv_qp_init_attr *")
        attr.send_cq = attr.recv_cq = ffi.addressof(self._cq.cq)
        attr.cap.max_send_wr = attr.cap.max_recv_wr = DEPTH
        attr.cap.max_send_sge = attr.cap.max_recv_sge = 16
        attr.cap.max_inline_data = 256
        self._qp = lib.sim_new_qp(context, attr, 17)
        self._qp.qp.state = lib.IBV_QPS_RTS
        self._srq = lib.sim_new_srq(context, DEPTH)
        self._queues = {"s": self._qp.sends, "r": self._qp.receives, "q": self._srq.receives}
        self._read = dict.fromkeys(self._queues, 0)
        self._qp_cell = ffi.new("struct ibv_qp *[]", [ffi.addressof(self._qp.qp)])
        self._srq_cell = ffi.new("struct ibv_srq *[]", [ffi.addressof(self._srq.srq)])
        self.qp_cell, self.srq_cell = address_of(self._qp_cell), address_of(self._srq_cell)
        self.cq = address_of(ffi.addressof(self._cq.cq))
        self.channel = address_of(ffi.addressof(self._channel.channel))

    def close(self) -> None:
        """Free everything."""
        lib.sim_free_qp(self._qp)
        lib.sim_free_srq(self._srq)
        lib.sim_free_cq(self._cq)
        lib.sim_free_channel(self._channel)

    def destroy(self) -> None:
        """Set the cells of the queue pair and of the shared receive queue to NULL."""
        self._qp_cell[0] = self._srq_cell[0] = ffi.NULL

    # --- posting ---

    def refuse(self, result: int, code: int = 0) -> None:
        """Refuse all requests: posting returns `result`, and sets errno to a `code` that is not 0.

        A `result` of 0 ends that.
        """
        for queue in self._queues.values():
            queue.refusal, queue.refusal_errno = result, code

    @property
    def calls(self) -> int:
        """The number of calls of ibv_post_send()."""
        return int(self._qp.sends.calls)

    @property
    def posted(self) -> int:
        """The number of posted requests."""
        return sum(int(queue.posted) for queue in self._queues.values())

    @property
    def posts(self) -> list[Posted]:
        """All posted requests in their order."""
        return self._posts(dict.fromkeys(self._queues, 0))

    def new_posts(self) -> list[Posted]:
        """Return the requests that were posted since the last call."""
        read, self._read = self._read, {kind: q.posted for kind, q in self._queues.items()}
        return self._posts(read)

    def _posts(self, read: dict[str, int]) -> list[Posted]:
        found = [
            (int(queue.ring[index % DEPTH].order), record(kind, queue.ring[index % DEPTH]))
            for kind, queue in self._queues.items()
            for index in range(read[kind], queue.posted)
        ]
        return [post for _, post in sorted(found, key=lambda entry: entry[0])]

    # --- completions ---

    def put(
        self,
        wr_id: int,
        length: int = 0,
        *,
        status: WcStatus = WcStatus.SUCCESS,
        opcode: WcOpcode = WcOpcode.RECV,
        flags: int = 0,
        imm_data: int = 0,
        qp_num: int = 0,
    ) -> None:
        """Add a completion. The queues never get full, as if all before it had completed."""
        wc = ffi.new("struct ibv_wc *")
        wc.wr_id, wc.status, wc.opcode, wc.byte_len = wr_id, status, opcode, length
        wc.wc_flags, wc.imm_data, wc.qp_num = flags, imm_data, qp_num
        for queue in self._queues.values():
            queue.freed = queue.posted
        lib.sim_complete(self._cq, wc, ffi.NULL, 0, False)

    def sent(self, key: int, number: int, status: WcStatus = WcStatus.SUCCESS) -> None:
        """Add the completion of a send."""
        self.put(key << 32 | number, status=status, opcode=WcOpcode.SEND)

    def received(self, key: int, slot: int, length: int = 0, **more: Any) -> None:
        """Add the completion of a receive."""
        self.put(key << 32 | RECEIVE | slot, length, **more)

    def hide_completions(self, polls: int) -> None:
        """Let this number of polls find nothing, as if the completions came while it polls."""
        self._cq.hidden_until = self._cq.polls + polls + 1

    def break_queue(self, poll: int = 0, arm: int = 0) -> None:
        """Set the results of polling (if negative) and of arming."""
        self._cq.poll_failure, self._cq.arm_failure = poll, arm

    def raise_event(self) -> None:
        """Raise an event of the completion queue."""
        lib.sim_raise_completion_event(self._cq)

    def break_channel(self) -> None:
        """Let reading an event fail with EIO."""
        self._channel.failure = errno.EIO

    @property
    def polls(self) -> int:
        """The number of calls of ibv_poll_cq()."""
        return int(self._cq.polls)

    @property
    def arms(self) -> int:
        """The number of calls of ibv_req_notify_cq()."""
        return int(self._cq.arms)

    @property
    def waiting(self) -> int:
        """The number of completions that were not polled yet."""
        return int(self._cq.put - self._cq.polled)

    @property
    def acknowledged(self) -> int:
        """The number of acknowledged events of the completion queue."""
        return int(self._cq.acknowledged)


def record(kind: str, posted: Any) -> Posted:
    """Return the values of a posted request."""
    request = Request(posted, 0)
    address, length, lkey = request.segments[0] if request.segments else (0, 0, 0)
    return Posted(
        kind,
        request.wr_id,
        address,
        length,
        lkey,
        len(request.segments),
        request.opcode,
        request.flags,
        request.remote,
        request.imm_data,
        request.inline or b"",
    )
