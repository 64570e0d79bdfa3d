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
from aiordma.dispatch.adaptive_polling import Outlook
from aiordma.enums import WcOpcode
from aiordma.errors import BusyError, ReceiveOverrun, VerbsError
from aiordma.loop import Checkpoint, Loop, checkpoint_of, future_of, post, refuse_forked_child, wake
from aiordma.messages.message import Message
from aiordma.qp.data_path import Owner
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.stats import ConnectionStats
from aiordma.verbs.completion import immediate_of, invalidated_of

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc
    from aiordma.dispatch import BusyPoll
    from aiordma.loop.protocol import LoopFuture

WRITTEN_WITH_IMM = int(WcOpcode.RECV_RDMA_WITH_IMM)
TOO_MANY = (
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
        self, loop: Loop, ring: ReceiveRing, owner: Owner, stats: ConnectionStats, busy: BusyPoll
    ) -> None:
        self._loop = loop
        self._ring = ring
        self._owner = owner
        self._stats = stats
        self._busy = busy
        self.arrivals = arrivals = fast_path.Arrivals(ring)
        self._waiter: LoopFuture | None = None
        self._woken = 0
        self.outlook = Outlook(arrivals)
        """How long take() looks for a message before it takes the long way."""
        self._checkpoint = checkpoint_of(loop)
        # What is there at once is no reason to skip the checkpoint that a loop is owed.
        self.take: Callable[[], bytes | None] = arrivals.take if self._checkpoint is None else _none
        """The next message, if nothing needs to be waited for, or decided, before: see recv()."""

    def spill(self, backlog: int) -> None:
        """Copy messages away rather than let the buffers run out, up to so many."""
        self.arrivals.backlog = backlog

    def __len__(self) -> int:
        """Messages that have arrived and are not taken."""
        return len(self.arrivals)

    @property
    def is_waited_for(self) -> bool:
        """Whether a task waits for a message."""
        return self.arrivals.waited

    # --- from the device ---

    def arrived(self, slot: int, wc: IbvWc) -> None:
        """The device filled a slot with a message."""
        # The bytes of a write with immediate data went elsewhere: the message itself is empty.
        length = 0 if wc.opcode == WRITTEN_WITH_IMM else wc.byte_len
        self.arrivals.add(slot, length, wc.wc_flags, wc.imm_data)
        self.look()

    def look(self) -> None:
        """Something has arrived, or a slot could not be given back."""
        arrivals = self.arrivals
        if arrivals.error:
            self._owner.break_off(VerbsError(arrivals.error, "ibv_post_recv"))
        if 0 <= arrivals.backlog < len(arrivals):
            self._owner.break_off(ReceiveOverrun(TOO_MANY.format(arrivals.backlog)))
        self.wake()

    def wake(self) -> None:
        """Have the task that waits look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            self._woken = time.monotonic_ns()
            wake(waiter)

    def stop(self) -> None:
        """It ended: messages that are there may still be taken, unless it was closed here."""
        self.arrivals.closed = self._owner.closed_here
        self.wake()

    def abandon(self) -> None:
        """Nobody will take what is left."""
        while (arrival := self.arrivals.look()) is not None:
            self._taken(arrival[0])

    # --- to the user ---

    async def recv(self) -> bytes:
        """See Connection.recv. Comes after `take`, which had nothing."""
        if (wait := self._waiting(has_looked=True)) is not None:
            await wait
        self._check()
        message = self.arrivals.take()
        assert message is not None
        if self.arrivals.error:
            self.look()
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
        self.arrivals.drop()
        self._stats.messages_held += 1
        return Message(message, imm, invalidated, _Loan(self, slot))

    def _waiting(self, *, has_looked: bool = False) -> Awaitable[None] | None:
        """What is to be awaited before a message can be taken, if anything is."""
        refuse_forked_child()
        if self.arrivals.error:
            self.look()
        if self.arrivals.waited:
            raise BusyError("another task is receiving on this connection")
        if not self._has_news():
            return self._wait(has_looked)
        return None if self._checkpoint is None else self._pause(self._checkpoint)

    def _check(self) -> None:
        """Make sure that there is a message to be taken."""
        if self._owner.closed_here or not self.arrivals:
            raise self._owner.end_reason()

    def _first(self) -> tuple[int, memoryview, int | None, int | None]:
        """The oldest message: its slot, the bytes, immediate data, the key that it invalidated."""
        self._check()
        arrival = self.arrivals.look()
        assert arrival is not None
        slot, length, flags, imm_data, copy = arrival
        message = self._ring.view(slot, length) if copy is None else memoryview(copy)
        return slot, message, immediate_of(flags, imm_data), invalidated_of(flags, imm_data)

    async def _wait(self, has_looked: bool) -> None:
        self._stats.recv_waits += 1
        arrivals = self.arrivals
        arrivals.waited = True
        try:
            if self._checkpoint is not None:
                if self._busy.is_on:
                    await self._checkpoint()  # what polling finds has waited for nothing
                    await self._busy.until(self._has_news, self._busy.nanoseconds)
            elif arrivals.patience > 0 and (arrivals.cut_short or not has_looked):
                gives_way = not self._busy.is_on
                await self._busy.until(self._has_news, arrivals.patience, gives_way=gives_way)
                if not self._has_news():
                    arrivals.missed += 1
            while not self._has_news():
                arrivals.tell = True
                self._waiter = waiter = future_of(self._loop)
                began = time.monotonic_ns()
                await waiter
                self.outlook.parked(began, self._woken)
        finally:
            arrivals.waited = False
            self._waiter = None

    async def _pause(self, checkpoint: Checkpoint) -> None:
        self.arrivals.waited = True
        try:
            await checkpoint()
        finally:
            self.arrivals.waited = False

    def _has_news(self) -> bool:
        if self.arrivals:
            return True
        owner = self._owner
        return owner.closed_here or owner.is_drained

    def _taken(self, slot: int) -> None:
        """The oldest message, in this slot, is not needed any more."""
        self.arrivals.drop()
        if slot != SPILLED:
            self.give_back(slot)

    def give_back(self, slot: int) -> None:
        """A slot's message is not needed any more."""
        try:
            self._ring.post(slot)
        except VerbsError as error:
            self._owner.break_off(error)

    def returned(self, slot: int) -> None:
        """A message that the user held is released."""
        self._stats.messages_held -= 1
        if slot != SPILLED:
            self.give_back(slot)

    def post_soon(self, loan: _Loan) -> None:
        """Have the loop take a loan back; from any thread."""
        post(self._loop, loan.give_back)


def _none() -> None:
    return None


class _Loan:
    """A slot that the user holds a message in."""

    __slots__ = ("_receiver", "_slot")

    def __init__(self, receiver: Receiver, slot: int) -> None:
        self._receiver = receiver
        self._slot = slot

    def give_back(self) -> None:
        self._receiver.returned(self._slot)

    def drop(self) -> None:
        self._receiver.post_soon(self)
