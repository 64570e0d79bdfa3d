"""Receiver: the messages that have arrived, and the task that waits for them.

On InfiniBand and RoCE a reader that falls behind holds the peer back: its messages keep their
buffers, and the peer's device repeats what finds none. Where the transport cannot do that (iWARP
ends the connection instead) or others would suffer (a shared receive queue), messages are copied
away as soon as half of the buffers are full, and a reader that falls behind by more than
`recv_backlog` messages is told so by the end of its connection.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from aiordma.datapath.message import Message
from aiordma.datapath.owner import Owner
from aiordma.datapath.receive_ring import ReceiveRing
from aiordma.datapath.stats import ConnectionStats
from aiordma.enums import WcOpcode
from aiordma.errors import BusyError, ReceiveOverrun, VerbsError
from aiordma.loop import Checkpoint, Loop, WaitQueue, checkpoint_of, post, refuse_forked_child
from aiordma.verbs.completion import immediate, invalidated

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc
    from aiordma.dispatch import BusyPoll

WRITTEN_WITH_IMM = int(WcOpcode.RECV_RDMA_WITH_IMM)
TOO_MANY = (
    "more than {} messages (recv_backlog) waited to be received, and nothing holds the peer back "
    "on iWARP, or with a shared receive queue: take messages faster, or have the peer wait for "
    "answers"
)
# Instead of a slot, for what was copied away.
SPILLED = -1


class _Arrival(NamedTuple):
    """What is kept of a completion: where the message is, and what came with it."""

    slot: int
    memory: memoryview
    imm: int | None
    invalidated: int | None


class Receiver:
    """Takes what the device has received, in order. One task may wait at a time."""

    def __init__(
        self, loop: Loop, ring: ReceiveRing, owner: Owner, stats: ConnectionStats, busy: BusyPoll
    ) -> None:
        self._loop = loop
        self._ring = ring
        self._owner = owner
        self._stats = stats
        self._busy = busy
        self._arrived: deque[_Arrival] = deque()
        self._news = WaitQueue(loop)
        self._backlog: int | None = None
        self._checkpoint = checkpoint_of(loop)
        self.is_waited_for = False
        """Whether a task waits for a message."""

    def spill(self, backlog: int) -> None:
        """Copy messages away rather than let the buffers run out, up to so many."""
        self._backlog = backlog

    def __len__(self) -> int:
        """Messages that have arrived and are not taken."""
        return len(self._arrived)

    # --- from the device ---

    def arrived(self, slot: int, wc: IbvWc) -> None:
        """The device filled a slot with a message."""
        ring = self._ring
        # The bytes of a write with immediate data went elsewhere: the message itself is empty.
        length = 0 if wc.opcode == WRITTEN_WITH_IMM else wc.byte_len
        memory = ring.view(slot, length)
        self._stats.messages_received += 1
        self._stats.bytes_received += length
        if self._backlog is not None and ring.posted < (ring.slots + 1) // 2:
            memory, slot = self._copied_away(memory, slot), SPILLED
        if wc.wc_flags:
            arrival = _Arrival(slot, memory, immediate(wc), invalidated(wc))
        else:
            arrival = _Arrival(slot, memory, None, None)
        self._arrived.append(arrival)
        if self._backlog is not None and len(self._arrived) > self._backlog:
            self._owner.break_off(ReceiveOverrun(TOO_MANY.format(self._backlog)))
        self._news.wake_all()

    def _copied_away(self, memory: memoryview, slot: int) -> memoryview:
        copied = memoryview(bytes(memory))
        self._stats.spilled += 1
        self.give_back(slot)
        return copied

    def wake(self) -> None:
        """Have the task that waits look again."""
        self._news.wake_all()

    def abandon(self) -> None:
        """Nobody will take what is left."""
        while self._arrived:
            self._taken(self._arrived.popleft())

    # --- to the user ---

    async def recv(self) -> bytes:
        """See Connection.recv."""
        arrival = await self._next()
        message = bytes(arrival.memory)
        self._taken(arrival)
        return message

    async def recv_into(self, memory: memoryview) -> int:
        """See Connection.recv_into. `memory` is one of bytes."""
        arrival = await self._next()
        length = arrival.memory.nbytes
        if length > memory.nbytes:
            self._arrived.appendleft(arrival)
            raise ValueError(f"a message of {length} bytes does not fit into {memory.nbytes}")
        memory[:length] = arrival.memory
        self._taken(arrival)
        return length

    async def recv_message(self) -> Message:
        """See Connection.recv_message."""
        arrival = await self._next()
        self._stats.messages_held += 1
        return Message(arrival.memory, arrival.imm, arrival.invalidated, _Loan(self, arrival.slot))

    async def _next(self) -> _Arrival:
        refuse_forked_child()
        if self.is_waited_for:
            raise BusyError("another task is receiving on this connection")
        if not self._has_news():
            await self._wait()
        elif self._checkpoint is not None:
            await self._pause(self._checkpoint)
        if self._owner.closed_here or not self._arrived:
            raise self._owner.end_reason()
        return self._arrived.popleft()

    async def _wait(self) -> None:
        self._stats.recv_waits += 1
        self.is_waited_for = True
        try:
            if self._busy.is_on:
                if self._checkpoint is not None:  # what polling finds has waited for nothing
                    await self._checkpoint()
                await self._busy.until(self._has_news)
            while not self._has_news():
                await self._news.wait()
        finally:
            self.is_waited_for = False

    async def _pause(self, checkpoint: Checkpoint) -> None:
        self.is_waited_for = True
        try:
            await checkpoint()
        finally:
            self.is_waited_for = False

    def _has_news(self) -> bool:
        owner = self._owner
        return bool(self._arrived) or owner.closed_here or owner.is_drained

    def _taken(self, arrival: _Arrival) -> None:
        if arrival.slot != SPILLED:
            self.give_back(arrival.slot)

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
