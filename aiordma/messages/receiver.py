"""Receiver: the messages that have arrived, and the task that waits for them.

On InfiniBand and RoCE a reader that falls behind holds the peer back: its messages keep their
buffers, and the peer's device repeats what finds none. Where the transport cannot do that (iWARP
ends the connection instead) or others would suffer (a shared receive queue), messages are copied
away as soon as half of the buffers are full, and a reader that falls behind by more than
`recv_backlog` messages is told so by the end of its connection.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiordma._native import fast_path
from aiordma.dispatch.adaptive_polling import AdaptivePolling
from aiordma.enums import WcOpcode
from aiordma.errors import BusyError, ReceiveOverrun, VerbsError
from aiordma.loop import (
    Checkpoint,
    Loop,
    call_threadsafe,
    checkpoint_of,
    make_future,
    refuse_forked_child,
    wake,
)
from aiordma.messages.message import Message
from aiordma.qp.data_path import EndpointCallbacks
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.stats import ConnectionStats
from aiordma.verbs.completion import immediate_of, invalidated_of

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc
    from aiordma.dispatch import BusyPoll
    from aiordma.loop.protocol import LoopFuture

WRITE_WITH_IMM = int(WcOpcode.RECV_RDMA_WITH_IMM)
BACKLOG_EXCEEDED = (
    "more than {} messages (recv_backlog) waited to be received, and nothing holds the peer back "
    "on iWARP, or with a shared receive queue: take messages faster, or have the peer wait for "
    "answers"
)
# Instead of a slot, for what was copied away.
SPILLED = -1


class Receiver:
    """Takes what the device has received, in order. One task may wait at a time.

    What has arrived stands in C (fast_path.Arrivals), which is told of most of it without a Python
    frame, and gives it to a task likewise as long as the task need not wait: `take`.
    """

    def __init__(
        self,
        loop: Loop,
        ring: ReceiveRing,
        callbacks: EndpointCallbacks,
        stats: ConnectionStats,
        busy: BusyPoll,
    ) -> None:
        self._loop = loop
        self._ring = ring
        self._callbacks = callbacks
        self._stats = stats
        self._busy = busy
        self.queue = queue = fast_path.ReceiveQueue(ring)
        self._waiter: LoopFuture | None = None
        self._woken = 0
        self.polling = AdaptivePolling(queue)
        """How long take() looks for a message before it takes the long way."""
        self._checkpoint = checkpoint_of(loop)
        # What is there at once is no reason to skip the checkpoint that a loop is owed.
        self.take: Callable[[], bytes | None] = (
            queue.take_bytes if self._checkpoint is None else _none
        )
        """The next message, if nothing needs to be waited for, or decided, before: see recv()."""

    def set_backlog(self, backlog: int) -> None:
        """Copy messages away rather than let the buffers run out, up to so many."""
        self.queue.backlog = backlog

    def __len__(self) -> int:
        """Messages that have arrived and are not taken."""
        return len(self.queue)

    @property
    def is_waited_for(self) -> bool:
        """Whether a task waits for a message."""
        return self.queue.has_waiter

    # --- from the device ---

    def message_received(self, slot: int, wc: IbvWc) -> None:
        """The device filled a slot with a message."""
        # The bytes of a write with immediate data went elsewhere: the message itself is empty.
        length = 0 if wc.opcode == WRITE_WITH_IMM else wc.byte_len
        self.queue.append(slot, length, wc.wc_flags, wc.imm_data)
        self.check_queue()

    def check_queue(self) -> None:
        """Something has arrived, or a slot could not be given back."""
        queue = self.queue
        if queue.error:
            self._callbacks.fail(VerbsError(queue.error, "ibv_post_recv"))
        if 0 <= queue.backlog < len(queue):
            self._callbacks.fail(ReceiveOverrun(BACKLOG_EXCEEDED.format(queue.backlog)))
        self.wake()

    def wake(self) -> None:
        """Have the task that waits look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            self._woken = time.monotonic_ns()
            wake(waiter)

    def stop(self) -> None:
        """It ended: messages that are there may still be taken, unless it was closed here."""
        self.queue.closed = self._callbacks.closed_here
        self.wake()

    def abandon(self) -> None:
        """Nobody will take what is left."""
        while (arrival := self.queue.peek()) is not None:
            self._taken(arrival[0])

    # --- to the user ---

    async def recv(self) -> bytes:
        """See Connection.recv. Comes after `take`, which had nothing."""
        if (wait := self._waiting(has_polled=True)) is not None:
            await wait
        self._check()
        message = self.queue.take_bytes()
        assert message is not None
        if self.queue.error:
            self.check_queue()
        return message

    async def recv_into(self, memory: memoryview) -> int:
        """See Connection.recv_into. `memory` is one of bytes."""
        if (wait := self._waiting()) is not None:
            await wait
        slot, message, _, _ = self._first()
        length = message.nbytes
        if length > memory.nbytes:
            raise ValueError(f"a message of {length} bytes does not fit into {memory.nbytes}")
        memory[:length] = message
        self._taken(slot)
        return length

    async def recv_message(self) -> Message:
        """See Connection.recv_message."""
        if (wait := self._waiting()) is not None:
            await wait
        slot, message, imm, invalidated = self._first()
        self.queue.drop_oldest()
        self._stats.messages_held += 1
        return Message(message, imm, invalidated, _ReceivedBuffer(self, slot))

    def _waiting(self, *, has_polled: bool = False) -> Awaitable[None] | None:
        """What is to be awaited before a message can be taken, if anything is."""
        refuse_forked_child()
        if self.queue.error:
            self.check_queue()
        if self.queue.has_waiter:
            raise BusyError("another task is receiving on this connection")
        if not self._is_ready():
            return self._wait(has_polled)
        return None if self._checkpoint is None else self._pause(self._checkpoint)

    def _check(self) -> None:
        """Make sure that there is a message to be taken."""
        if self._callbacks.closed_here or not self.queue:
            raise self._callbacks.end_reason()

    def _first(self) -> tuple[int, memoryview, int | None, int | None]:
        """The oldest message: its slot, the bytes, immediate data, the key that it invalidated."""
        self._check()
        arrival = self.queue.peek()
        assert arrival is not None
        slot, length, flags, imm_data, copy = arrival
        message = self._ring.view(slot, length) if copy is None else memoryview(copy)
        return slot, message, immediate_of(flags, imm_data), invalidated_of(flags, imm_data)

    async def _wait(self, has_polled: bool) -> None:
        self._stats.recv_waits += 1
        queue = self.queue
        queue.has_waiter = True
        try:
            if self._checkpoint is not None:
                if self._busy.is_on:
                    await self._checkpoint()  # what polling finds has waited for nothing
                    await self._busy.until(self._is_ready, self._busy.nanoseconds)
            elif queue.poll_budget > 0 and (queue.preempted or not has_polled):
                gives_way = not self._busy.is_on
                await self._busy.until(self._is_ready, queue.poll_budget, preemptible=gives_way)
                if not self._is_ready():
                    queue.missed_polls += 1
            while not self._is_ready():
                queue.notify = True
                self._waiter = waiter = make_future(self._loop)
                began = time.monotonic_ns()
                await waiter
                self.polling.parked(began, self._woken)
        finally:
            queue.has_waiter = False
            self._waiter = None

    async def _pause(self, checkpoint: Checkpoint) -> None:
        self.queue.has_waiter = True
        try:
            await checkpoint()
        finally:
            self.queue.has_waiter = False

    def _is_ready(self) -> bool:
        if self.queue:
            return True
        callbacks = self._callbacks
        return callbacks.closed_here or callbacks.is_drained

    def _taken(self, slot: int) -> None:
        """The oldest message, in this slot, is not needed any more."""
        self.queue.drop_oldest()
        if slot != SPILLED:
            self.repost(slot)

    def repost(self, slot: int) -> None:
        """A slot's message is not needed any more."""
        try:
            self._ring.post(slot)
        except VerbsError as error:
            self._callbacks.fail(error)

    def message_released(self, slot: int) -> None:
        """A message that the user held is released."""
        self._stats.messages_held -= 1
        if slot != SPILLED:
            self.repost(slot)

    def release_threadsafe(self, loan: _ReceivedBuffer) -> None:
        """Have the loop take a loan back; from any thread."""
        call_threadsafe(self._loop, loan.release)


def _none() -> None:
    return None


class _ReceivedBuffer:
    """A slot that the user holds a message in."""

    __slots__ = ("_receiver", "_slot")

    def __init__(self, receiver: Receiver, slot: int) -> None:
        self._receiver = receiver
        self._slot = slot

    def release(self) -> None:
        self._receiver.message_released(self._slot)

    def release_threadsafe(self) -> None:
        self._receiver.release_threadsafe(self)
