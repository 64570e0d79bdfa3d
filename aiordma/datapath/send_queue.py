"""SendQueue: posts messages, and holds their memory until the device is done with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from aiordma.datapath.operation import Operation
from aiordma.loop import Loop, Slots
from aiordma.memory import BufferPool, PooledBuffer
from aiordma.verbs import QueuePair
from aiordma.verbs.queue_pair import NO_IMMEDIATE

if TYPE_CHECKING:
    from typing_extensions import Buffer

NUMBER_MASK = (1 << 31) - 1


class Lent(Protocol):
    """What the device uses until a request has ended."""

    def release(self) -> None:
        """The device is done with it."""


class SendQueue:
    """The send side of a queue pair. Requests end in the order in which they were posted.

    A full queue makes senders wait, first come first served; the device never sees one too many.
    """

    def __init__(self, loop: Loop, depth: int) -> None:
        self._slots = Slots(loop, depth)
        self._posted: deque[tuple[int, Lent | None]] = deque()
        self._kept: list[Lent] = []
        self._number = 0
        self._first_wr_id = 0
        self._qp: QueuePair
        self._pool: BufferPool

    def __len__(self) -> int:
        """Sends that the device has not completed yet."""
        return len(self._posted)

    def open(self, qp: QueuePair, pool: BufferPool, first_wr_id: int) -> None:
        """Start using a queue pair; wr_ids are `first_wr_id` plus a number of 31 bits."""
        self._qp, self._pool, self._first_wr_id = qp, pool, first_wr_id

    def try_reserve(self) -> bool:
        """Take a place in the queue if one is free and nobody waits for one."""
        return self._slots.try_acquire()

    async def reserve(self) -> None:
        """Wait for a place in the queue. Cancelling takes none."""
        await self._slots.acquire()

    def unreserve(self) -> None:
        """Give back a place that was not used."""
        self._slots.release()

    def post_inline(self, data: Buffer, imm: int = NO_IMMEDIATE) -> None:
        """Send a short message from a reserved place.

        Raises:
            VerbsError: the device refused; the place is still reserved.
        """
        self._qp.post_send_inline(self._first_wr_id + self._number, data, imm)
        self._enqueue(None)

    def try_buffer(self, nbytes: int) -> PooledBuffer | None:
        """A registered buffer for a message, if the pool has one now."""
        return self._pool.try_acquire(nbytes)

    async def buffer(
        self, nbytes: int, call: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> PooledBuffer:
        """A registered buffer for a message; see BufferPool.acquire."""
        return await self._pool.acquire(nbytes, call)

    def post_copy(self, buffer: PooledBuffer, data: Buffer, imm: int = NO_IMMEDIATE) -> None:
        """Send a copy of `data`, made in `buffer`, from a reserved place.

        Raises:
            VerbsError: the device refused; place and buffer are still the caller's.
        """
        wr_id = self._first_wr_id + self._number
        self._qp.post_send_copy(wr_id, buffer.address, data, buffer.lkey, imm)
        self._enqueue(buffer)

    def _enqueue(self, lent: Lent | None) -> None:
        self._posted.append((self._number, lent))
        self._number = (self._number + 1) & NUMBER_MASK

    def post(self, post: Callable[[QueuePair, int], None], lent: Lent) -> None:
        """Post another request from a reserved place: `post` is given a wr_id.

        Raises:
            VerbsError: the device refused; the place and `lent` are still the caller's.
        """
        post(self._qp, self._first_wr_id + self._number)
        self._enqueue(lent)

    def keep(self, lent: Lent) -> None:
        """Hold it until the queue pair is gone."""
        self._kept.append(lent)

    def completed(self, number: int) -> Lent | None:
        """The request with this number ended, and so did all that were posted before it.

        Returns what was lent for it.
        """
        posted = self._posted
        count = 0
        lent = None
        while posted:
            oldest, lent = posted.popleft()
            count += 1
            if lent is not None:
                lent.release()
            if oldest == number:
                break
        self._slots.release(count)
        return lent

    def abandon(self) -> None:
        """The queue pair is gone, and with it all that was posted. Those who wait are let go."""
        self._kept += [lent for _, lent in self._posted if lent is not None]
        self._posted.clear()
        while self._kept:
            self._kept.pop().release()
        self.wake_senders()

    def stop_waiting(self) -> None:
        """No completion will come any more: let those go who wait for one."""
        for _, lent in self._posted:
            if isinstance(lent, Operation):
                lent.stop_waiting()

    def wake_senders(self) -> None:
        """Let every waiting sender look again: nothing more will be sent."""
        self._slots.release(NUMBER_MASK)
