"""SendQueue: posts requests, and holds their memory until the device is done with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aiordma.datapath.stats import ConnectionStats
from aiordma.enums import WrOpcode
from aiordma.loop import Loop, Slots
from aiordma.memory import BufferPool, PooledBuffer
from aiordma.verbs import QueuePair
from aiordma.verbs.queue_pair import FENCE, NO_IMMEDIATE, SIGNALED, UNSIGNALED

if TYPE_CHECKING:
    from typing_extensions import Buffer

NUMBER_MASK = (1 << 31) - 1

Post = Callable[[QueuePair, int, int], None]
"""Posts a request to a queue pair, with a wr_id and flags."""


class Lent(Protocol):
    """What the device uses until a request has ended."""

    def release(self) -> None:
        """The device is done with it."""


@runtime_checkable
class Waited(Lent, Protocol):
    """What a task waits for the end of."""

    def stop_waiting(self) -> None:
        """Let the task go."""


class SendQueue:
    """The send side of a queue pair. Requests end in the order in which they were posted.

    A full queue makes senders wait, first come first served; the device never sees one too many.

    Signalling is selective: an inline message lends nothing to the device, so that nobody needs to
    hear of its end but the queue itself, to which one completion speaks for all requests before it.
    """

    def __init__(self, loop: Loop, depth: int, *, selective: bool = True) -> None:
        self._depth = depth
        self._slots = Slots(loop, depth)
        self._posted: deque[tuple[int, Lent | None]] = deque()
        self._kept: list[Lent] = []
        self._number = 0
        self._first_wr_id = 0
        self._qp: QueuePair
        self._pool: BufferPool
        # A full queue always has a signalled request in it, which empties it.
        self._interval = max(1, depth // 4) if selective else 1
        self._unsignalled = 0
        self._held = 0
        self._strays = 0
        self._order = UNSIGNALED
        self.stats = ConnectionStats()
        self.try_reserve = self._slots.try_acquire
        """Take a place in the queue if one is free and nobody waits for one."""

    def __len__(self) -> int:
        """Requests that the device has not completed yet, as far as it has said."""
        return len(self._posted)

    def open(self, qp: QueuePair, pool: BufferPool, first_wr_id: int) -> None:
        """Start using a queue pair; wr_ids are `first_wr_id` plus a number of 31 bits."""
        self._qp, self._pool, self._first_wr_id = qp, pool, first_wr_id

    # --- places ---

    @property
    def places(self) -> int:
        """Places that are free."""
        return self._slots.free

    async def reserve(self) -> None:
        """Wait for a place in the queue. Cancelling takes none."""
        self.stats.send_waits += 1
        await self._slots.acquire()

    def unreserve(self) -> None:
        """Give back a place that was not used."""
        self._slots.release()

    def hold(self) -> None:
        """Have no place for anybody until let_go(), while nothing is posted yet."""
        self._held, self._slots.free = self._slots.free, 0

    def let_go(self) -> None:
        """End that. Idempotent."""
        held, self._held = self._held, 0
        self._slots.release(held)

    # --- requests ---

    def post_inline(self, data: Buffer, imm: int = NO_IMMEDIATE) -> None:
        """Send a short message from a reserved place.

        Raises:
            VerbsError: the device refused; the place is still reserved.
        """
        before = self._unsignalled
        is_signalled = before + 1 >= self._interval
        flags = self._order | SIGNALED if is_signalled else self._order
        wr_id = self._enqueue(None, 0 if is_signalled else before + 1)
        try:
            self._qp.post_send_inline(wr_id, data, imm, flags)
        except Exception:
            self._take_back(before)
            raise

    def post_unlent(self, post: Post) -> None:
        """Likewise another request that lends the device nothing.

        Raises:
            VerbsError: the device refused; the place is still reserved.
        """
        before = self._unsignalled
        is_signalled = before + 1 >= self._interval
        wr_id = self._enqueue(None, 0 if is_signalled else before + 1)
        try:
            post(self._qp, wr_id, self._order | SIGNALED if is_signalled else self._order)
        except Exception:
            self._take_back(before)
            raise

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
        before, flags = self._unsignalled, self._order | SIGNALED
        wr_id = self._enqueue(buffer)
        try:
            self._qp.post_send_copy(wr_id, buffer.address, data, buffer.lkey, imm, flags)
        except Exception:
            self._take_back(before)
            raise

    def post(self, post: Post, lent: Lent | None, *, reads: bool = False) -> None:
        """Post another request from a reserved place: `post` is given a wr_id and flags.

        One that itself `reads` needs no fence, as reads are done in order; and iWARP allows none.

        Raises:
            VerbsError: the device refused; the place and `lent` are still the caller's.
        """
        before, order = self._unsignalled, UNSIGNALED if reads else self._order
        wr_id = self._enqueue(lent)
        try:
            post(self._qp, wr_id, order | SIGNALED)
        except Exception:
            self._take_back(before)
            raise

    def close_tail(self) -> None:
        """If nothing will tell of the end of the newest requests, post what does, if there is room.

        It is a write of no bytes: the peer's device answers it as any other, but looks at neither
        address nor key. No place is needed, as nobody else may post any more.

        Raises:
            VerbsError: the device refused.
        """
        if self._unsignalled and len(self._posted) < self._depth:
            self.post(_write_nothing, None)

    def _enqueue(self, lent: Lent | None, unsignalled: int = 0) -> int:
        """Note what is about to be posted, and under which wr_id.

        Before, not afterwards: a Ctrl-C between the two must not leave the device with memory that
        nobody holds. It leaves at worst a note of what was not posted, which goes with the next.
        """
        number = self._number
        self._posted.append((number, lent))
        self._number = (number + 1) & NUMBER_MASK
        self._unsignalled = unsignalled
        return self._first_wr_id + number

    def _take_back(self, unsignalled: int) -> None:
        """It was not posted after all."""
        self._posted.pop()
        self._number = (self._number - 1) & NUMBER_MASK
        self._unsignalled = unsignalled

    def fence(self) -> Callable[[], None]:
        """Have what is posted wait for the reads before it, until the result is called."""
        self._strays += 1
        self._order = FENCE
        return self._unfence

    def _unfence(self) -> None:
        self._strays -= 1
        if not self._strays:
            self._order = UNSIGNALED

    # --- ends ---

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
            if isinstance(lent, Waited):
                lent.stop_waiting()

    def wake_senders(self) -> None:
        """Let every waiting sender look again: nothing more will be sent."""
        self._slots.release(NUMBER_MASK)


def _write_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    qp.post_list(wr_id, WrOpcode.RDMA_WRITE, [], flags=flags)
