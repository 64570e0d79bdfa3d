"""Receiver: the messages that have arrived, and the task that waits for them.

On InfiniBand and RoCE, a reader that falls behind holds the peer back: its messages occupy the
receive buffers, and the peer's device repeats sends that find no buffer. This does not work on
iWARP, which ends the connection instead, and with a shared receive queue, where it would hold back
other connections. There, messages are copied out of the receive buffers (spilled) when half of
those are full. If more than `recv_backlog` messages wait, the connection ends.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiordma._native import fast_path
from aiordma.dispatch import AdaptivePolling
from aiordma.enums import WcOpcode
from aiordma.errors import BusyError, ReceiveOverrun, VerbsError
from aiordma.loop import (
    Checkpoint,
    Loop,
    call_threadsafe,
    cancellation_of,
    checkpoint_halves_of,
    checkpoint_of,
    refuse_forked_child,
    schedule_point_of,
    yield_of,
)
from aiordma.messages.message import Message
from aiordma.qp.data_path import EndpointCallbacks
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.stats import ConnectionStats
from aiordma.verbs.completion import immediate_of, invalidated_of

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc
    from aiordma.dispatch import BusyPoll
    from aiordma.loop import LoopFuture

WRITE_WITH_IMM = int(WcOpcode.RECV_RDMA_WITH_IMM)
BACKLOG_EXCEEDED = (
    "more than {} messages (recv_backlog) waited to be received, and nothing holds the peer back "
    "on iWARP or with a shared receive queue: receive faster, or make the peer wait for answers"
)
# In place of a slot, for a message that was copied out of its slot.
SPILLED = -1


class Receiver:
    """Returns the messages that the device has received, in order. One task can wait at a time.

    The queue of messages is in C (fast_path.ReceiveQueue). Most completions reach it without a
    Python frame. Its awaitables take a message without one if the task does not need to wait.
    Otherwise they await recv() or next().
    """

    def __init__(
        self,
        loop: Loop,
        ring: ReceiveRing,
        callbacks: EndpointCallbacks,
        stats: ConnectionStats,
        busy: BusyPoll,
        make_future: Callable[[], LoopFuture],
    ) -> None:
        """`make_future` returns the future that the waiting task awaits: see future_factory()."""
        self._loop = loop
        self._make_future = make_future
        self._ring = ring
        self._callbacks = callbacks
        self._stats = stats
        self._busy = busy
        self.queue = queue = fast_path.ReceiveQueue(ring)
        self.polling = AdaptivePolling(queue)
        """The policy for the time that take_bytes() polls before the slow path, recv(), parks."""
        self._is_interrupted = False
        self._checkpoint = checkpoint_of(type(loop))
        self._raise_if_cancelled = cancellation_of(type(loop))
        self._schedule_point = schedule_point_of(type(loop))
        # On a loop with checkpoints (trio), each await must pass one, also when a message is there.
        queue.checkpoints = checkpoint_halves_of(type(loop))
        queue.set_slow(self.recv, self.next)
        queue.set_parking(self._make_future, yield_of(loop), self.polling)

    def start(self) -> None:
        """Let recv() and next() of the core wait for messages: the connection is established."""
        self.queue.may_park = not self._callbacks.closed

    def set_backlog(self, backlog: int) -> None:
        """Copy messages out of their slots when those run short, up to `backlog` messages."""
        self.queue.backlog = backlog

    def __len__(self) -> int:
        """Return the number of messages that have arrived and are not taken."""
        return len(self.queue)

    @property
    def is_waited_for(self) -> bool:
        """True if a task waits for a message."""
        return self.queue.has_waiter

    # --- from the device ---

    def message_received(self, slot: int, wc: IbvWc) -> None:
        """Append the message that the device has written to a slot."""
        # The bytes of a write with immediate data are not in the slot: the message itself is empty.
        length = 0 if wc.opcode == WRITE_WITH_IMM else wc.byte_len
        self.queue.append(slot, length, wc.wc_flags, wc.imm_data)
        self.check_queue()

    def check_queue(self) -> None:
        """Wake the waiting task, after checking for failed posts and for an overrun."""
        queue = self.queue
        if queue.error:
            self._callbacks.fail(VerbsError(queue.error, "ibv_post_recv"))
        if 0 <= queue.backlog < len(queue):
            self._callbacks.fail(ReceiveOverrun(BACKLOG_EXCEEDED.format(queue.backlog)))
        self.wake()

    def wake(self) -> None:
        """Wake the waiting task, so that it checks the state again."""
        self.queue.wake()

    def stop(self) -> None:
        """Wake the waiting task: the connection has ended. After a local close, refuse messages."""
        self.queue.may_park = False
        self.queue.closed = self._callbacks.closed_here
        self.wake()

    def abandon(self) -> None:
        """Drop the messages that were not taken, and post their slots again."""
        while (oldest := self.queue.peek()) is not None:
            self._drop_oldest(oldest[0])

    def copy_out(self) -> None:
        """Copy the messages that were not taken out of their slots, and post the slots again."""
        self.queue.copy_out()

    # --- to the user ---

    async def recv(self) -> bytes:
        """Wait for the next message and return it: see Connection.recv().

        The core has none, and cannot wait for one itself.
        """
        if (message := await self._take()) is None:
            raise self._callbacks.end_reason()
        return message

    async def next(self) -> bytes:
        """Wait for the next message and return it: see Connection.__aiter__()."""
        if (message := await self._take()) is None:
            if self._callbacks.closed_by_peer:
                raise StopAsyncIteration
            raise self._callbacks.end_reason()
        return message

    async def _take(self) -> bytes | None:
        """Wait for the next message and return it; None if none will come any more."""
        if (wait := self.wait_if_needed(has_polled=True)) is not None:
            await wait
        queue = self.queue
        message = queue.take_bytes() if queue else None
        if message is not None and queue.error:
            self.check_queue()
        return message

    async def recv_into(self, memory: memoryview) -> int:
        """Wait for a message and copy it: see Connection.recv_into(). `memory` has format "B"."""
        if (wait := self.wait_if_needed()) is not None:
            await wait
        slot, message, _, _ = self._oldest()
        length = message.nbytes
        if length > memory.nbytes:
            raise ValueError(f"a message of {length} bytes does not fit into {memory.nbytes}")
        memory[:length] = message
        self._drop_oldest(slot)
        return length

    async def recv_message(self) -> Message:
        """Wait for a message and return it in its slot: see Connection.recv_message()."""
        if (wait := self.wait_if_needed()) is not None:
            await wait
        return self.take_message()

    def take_message(self) -> Message:
        """Return the oldest message in its slot. The caller has found that one is there."""
        slot, message, imm, invalidated = self._oldest()
        self.queue.drop_oldest()
        self._stats.messages_held += 1
        return Message(message, imm, invalidated, _ReceivedBuffer(self, slot))

    def wait_if_needed(self, *, has_polled: bool = False) -> Awaitable[None] | None:
        """Return an awaitable to await before a message can be taken, or None."""
        refuse_forked_child()
        if self.queue.error:
            self.check_queue()
        if self.queue.has_waiter:
            raise BusyError("another task is receiving on this connection")
        if not self.is_ready():
            return self._wait(has_polled)
        return None if self._checkpoint is None else self._pass_checkpoint(self._checkpoint)

    def _check_available(self) -> None:
        """Raise the reason of the connection's end if there is no message to take."""
        if self._callbacks.closed_here or not self.queue:
            raise self._callbacks.end_reason()

    def _oldest(self) -> tuple[int, memoryview, int | None, int | None]:
        """Return the oldest message: slot, bytes, immediate data and invalidated key."""
        self._check_available()
        oldest = self.queue.peek()
        assert oldest is not None
        slot, length, flags, imm_data, copy = oldest
        message = self._ring.view(slot, length) if copy is None else memoryview(copy)
        return slot, message, immediate_of(flags, imm_data), invalidated_of(flags, imm_data)

    async def _wait(self, has_polled: bool) -> None:
        """Wait until is_ready(). The caller has found that it is not."""
        self._stats.recv_waits += 1
        queue, is_ready = self.queue, False
        queue.has_waiter = True
        try:
            if self._raise_if_cancelled is not None:
                await self._raise_if_cancelled()
            if queue.poll_budget > 0 and not has_polled:
                is_ready = await self._busy.until_adaptively(
                    self.is_ready, queue.poll_budget, self.polling
                )
                if is_ready and self._schedule_point is not None:
                    await self._schedule_point()
                    is_ready = self.is_ready()  # another task may have taken a CREDIT
            while not (is_ready or self._is_interrupted):
                queue.waiter = waiter = self._make_future()
                began = time.monotonic_ns()
                await waiter
                self.polling.parked(began, queue.woken_at)
                is_ready = self.is_ready()
        finally:
            queue.has_waiter = self._is_interrupted = False
            queue.waiter = None

    def interrupt(self) -> None:
        """End a wait of wait_if_needed() early: is_ready() is then false."""
        self._is_interrupted = self.queue.has_waiter
        self.wake()

    async def _pass_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.queue.has_waiter = True  # no other task can take the message meanwhile
        try:
            await checkpoint()
        finally:
            self.queue.has_waiter = self._is_interrupted = False

    def is_ready(self) -> bool:
        """Return True if a message can be taken, or none will come any more."""
        if self.queue:
            return True
        callbacks = self._callbacks
        return callbacks.closed_here or callbacks.is_drained

    def _drop_oldest(self, slot: int) -> None:
        """Remove the oldest message from the queue and post its slot again."""
        self.queue.drop_oldest()
        if slot != SPILLED:
            self.repost(slot)

    def repost(self, slot: int) -> None:
        """Post a slot again. If that fails, end the connection."""
        try:
            self._ring.post(slot)
        except VerbsError as error:
            self._callbacks.fail(error)

    def message_released(self, slot: int) -> None:
        """Post the slot of a Message that is released."""
        self._stats.messages_held -= 1
        if slot != SPILLED:
            self.repost(slot)

    def release_threadsafe(self, buffer: _ReceivedBuffer) -> None:
        """Release a buffer on the loop's thread. Callable from any thread."""
        call_threadsafe(self._loop, buffer.release)


class _ReceivedBuffer:
    """The slot of a Message that is not released: the BufferOwner of the Message."""

    __slots__ = ("_receiver", "_slot")

    def __init__(self, receiver: Receiver, slot: int) -> None:
        self._receiver = receiver
        self._slot = slot

    def release(self) -> None:
        self._receiver.message_released(self._slot)

    def release_threadsafe(self) -> None:
        self._receiver.release_threadsafe(self)
