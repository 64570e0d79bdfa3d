"""SendQueue: posts requests, and holds their memory until the device is done with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aiordma._native import fast_path
from aiordma.enums import WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import FairSemaphore, Loop
from aiordma.memory import BufferPool, PooledBuffer
from aiordma.qp.post_list import MemoryRequest, PostList, Waiter
from aiordma.qp.stats import ConnectionStats
from aiordma.verbs import QueuePair
from aiordma.verbs.queue_pair import FENCE, NO_IMMEDIATE, SIGNALED, UNSIGNALED

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._fast_path import Transfer

NUMBER_MASK = fast_path.NUMBER_MASK

Post = Callable[[QueuePair, int, int], None]
"""Posts a request to a queue pair, with a wr_id and flags."""


class InFlightMemory(Protocol):
    """What the device uses until a request has ended."""

    def release(self) -> None:
        """The device is done with it."""


@runtime_checkable
class AwaitedRequest(InFlightMemory, Waiter, Protocol):
    """What a task waits for the end of."""


class _SendCredits(FairSemaphore):
    """The places of a send queue, of which a SendLane takes some on its own."""

    __slots__ = ("_core",)

    def __init__(self, loop: Loop, core: fast_path.SendQueueCore) -> None:
        self._core = core
        super().__init__(loop, core.credits)

    @property
    def free(self) -> int:
        """Places that nobody has taken."""
        return self._core.credits

    @free.setter
    def free(self, value: int) -> None:
        self._core.credits = value

    def try_acquire(self) -> bool:
        """As Slots does, with a frame less for each of its looks."""
        core = self._core
        free = core.credits
        if free <= 0:
            return False
        core.credits = free - 1
        return True

    def release(self, count: int = 1) -> None:
        """As Slots does. What nobody waits for here, the lane's queued reads may have."""
        super().release(count)
        if self._core.queued_reads:
            self._core.grant_rd_atomic_credits()


class SendQueue:
    """The send side of a queue pair. Requests end in the order in which they were posted, mostly.

    A full queue makes senders wait, first come first served; the device never sees one too many.

    Signalling is selective: an inline message lends nothing to the device, so that nobody needs to
    hear of its end but the queue itself, to which one completion speaks for all requests before it.

    The numbers stand in a SendLane, which posts what is short, and registered memory in one piece,
    and sees both end without a Python frame. All else that lends memory is here.
    """

    def __init__(
        self, loop: Loop, depth: int, *, selective: bool = True, max_inline: int = 0
    ) -> None:
        """`max_inline`: up to so many bytes the lane may post in short; 0: nothing."""
        self._depth = depth
        # A full queue always has a signalled request in it, which empties it.
        self._interval = max(1, depth // 4) if selective else 1
        self._is_selective = selective
        self.core = fast_path.SendQueueCore(depth, self._interval, max_inline)
        self._credits = _SendCredits(loop, self.core)
        self._in_flight: deque[tuple[int, InFlightMemory]] = deque()
        self._kept: list[InFlightMemory] = []
        self._first_wr_id = 0
        self._qp: QueuePair
        self._pool: BufferPool
        self._paused_credits = 0
        self._abandoned_reads = 0
        self.stats = ConnectionStats()
        self.post_list: PostList | None = None
        """Where requests wait for those of other tasks, if any may."""
        self.try_reserve = self._credits.try_acquire
        """Take a place in the queue if one is free and nobody waits for one."""

    def __len__(self) -> int:
        """Requests that the device has not completed yet, as far as it has said."""
        return (self.core.next_number - self.core.oldest_pending) & NUMBER_MASK

    def open(self, qp: QueuePair, pool: BufferPool, first_wr_id: int) -> None:
        """Start using a queue pair; wr_ids are `first_wr_id` plus a number of 31 bits."""
        self._qp, self._pool, self._first_wr_id = qp, pool, first_wr_id
        self.core.open(qp, qp.cells[0], first_wr_id)

    def stop(self) -> None:
        """Nothing will be posted in short any more; the owner hears of every end."""
        self.core.is_open = False
        self.core.waiters += 1
        self.core.drop_queued_reads()

    # --- places ---

    @property
    def credits(self) -> int:
        """Places that are free."""
        return self._credits.free

    async def reserve(self) -> None:
        """Wait for a place in the queue. Cancelling takes none."""
        self.stats.send_waits += 1
        self.core.waiters += 1
        try:
            await self._credits.acquire()
        finally:
            self.core.waiters -= 1
            self.core.resumed()

    def unreserve(self) -> None:
        """Give back a place that was not used."""
        self._credits.release()

    def pause(self) -> None:
        """Have no place for anybody until let_go(), while nothing is posted yet."""
        self._paused_credits, self._credits.free = self._credits.free, 0

    def resume(self) -> None:
        """End that. Idempotent."""
        held, self._paused_credits = self._paused_credits, 0
        self._credits.release(held)

    # --- requests ---

    def post_inline(self, data: Buffer, imm: int = NO_IMMEDIATE) -> None:
        """Send a short message from a reserved place.

        Raises:
            VerbsError: the device refused; the place is still reserved.
        """
        before = self.core.unsignaled
        is_signalled = before + 1 >= self._interval
        flags = self.core.fence_flags | SIGNALED if is_signalled else self.core.fence_flags
        wr_id = self._enqueue(None, 0 if is_signalled else before + 1)
        try:
            self._qp.post_send_inline(wr_id, data, imm, flags)
        except Exception:
            self._roll_back(before)
            raise

    def post_without_memory(self, post: Post) -> None:
        """Likewise another request that lends the device nothing.

        Raises:
            VerbsError: the device refused; the place is still reserved.
        """
        before = self.core.unsignaled
        is_signalled = before + 1 >= self._interval
        flags = self.core.fence_flags | SIGNALED if is_signalled else self.core.fence_flags
        wr_id = self._enqueue(None, 0 if is_signalled else before + 1)
        try:
            post(self._qp, wr_id, flags)
        except Exception:
            self._roll_back(before)
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
        before, flags = self.core.unsignaled, self.core.fence_flags | SIGNALED
        wr_id = self._enqueue(buffer)
        try:
            self._qp.post_send_copy(wr_id, buffer.address, data, buffer.lkey, imm, flags)
        except Exception:
            self._roll_back(before)
            raise

    def post(self, post: Post, memory: InFlightMemory | None, *, is_read: bool = False) -> None:
        """Post another request from a reserved place: `post` is given a wr_id and flags.

        One that itself `reads` needs no fence, as reads are done in order; and iWARP allows none.

        Raises:
            VerbsError: the device refused; the place and `memory` are still the caller's.
        """
        before, order = self.core.unsignaled, UNSIGNALED if is_read else self.core.fence_flags
        wr_id = self._enqueue(memory)
        try:
            post(self._qp, wr_id, order | SIGNALED)
        except Exception:
            self._roll_back(before)
            raise

    def post_batched(
        self, request: MemoryRequest, operation: AwaitedRequest, is_read: bool
    ) -> None:
        """post(), in one call with what other tasks post that the same event has woken.

        Raises:
            VerbsError: as post(). If others are waited for, a refusal ends the connection later.
        """
        together = self.post_list
        if together is None or len(request.segments) != 1 or not together.is_open():
            self.post(request, operation, is_read=is_read)
            return
        together.make_room()
        before, order = self.core.unsignaled, UNSIGNALED if is_read else self.core.fence_flags
        wr_id = self._enqueue(operation, is_batched=True)
        try:
            together.add(request, wr_id, order | SIGNALED, operation)
        except Exception:
            self._roll_back(before)
            raise

    def probe(self, memory: InFlightMemory | None) -> bool:
        """Read no bytes, if there is a place: the peer's device answers, and looks at no key.

        Raises:
            VerbsError: the device refused; `memory` is kept until the queue pair is gone.
        """
        if not self.try_reserve():
            return False
        try:
            self.post(_read_nothing, memory, is_read=True)
        except VerbsError:
            self.unreserve()
            if memory is not None:
                self.keep_until_destroyed(memory)
            raise
        return True

    def signal_tail(self) -> None:
        """If nothing will tell of the end of the newest requests, post what does, if there is room.

        It is a write of no bytes: the peer's device answers it as any other, but looks at neither
        address nor key. No place is needed, as nobody else may post any more.

        Raises:
            VerbsError: the device refused.
        """
        if self.core.unsignaled and len(self) < self._depth:
            self.post(_write_nothing, None)

    def _enqueue(
        self, memory: InFlightMemory | None, unsignalled: int = 0, *, is_batched: bool = False
    ) -> int:
        """Note what is about to be posted, and under which wr_id.

        What waits to be posted before it is posted first, unless it joins that.

        Raises:
            VerbsError: the device refused that.

        Before, not afterwards: a Ctrl-C between the two must not leave the device with memory that
        nobody holds. It leaves at worst a note of what was not posted, which goes with the next.
        """
        core = self.core
        if core.has_unposted and not is_batched and self.post_list is not None:
            self.post_list.flush()
        number = core.next_number
        if memory is not None:
            self._in_flight.append((number, memory))
            core.in_flight += 1
        core.next_number = (number + 1) & NUMBER_MASK
        core.unsignaled = unsignalled
        return self._first_wr_id + number

    def _roll_back(self, unsignalled: int) -> None:
        """It was not posted after all."""
        core = self.core
        core.next_number = number = (core.next_number - 1) & NUMBER_MASK
        core.unsignaled = unsignalled
        if self._in_flight and self._in_flight[-1][0] == number:
            self._in_flight.pop()
            core.in_flight -= 1

    def is_in_flight(self, memory: InFlightMemory) -> bool:
        """Whether it is noted as lent to the device."""
        return any(noted is memory for _, noted in self._in_flight)

    def fence(self) -> Callable[[], None]:
        """Have what is posted wait for the reads before it, until the result is called."""
        self._abandoned_reads += 1
        self.core.fence_flags = FENCE
        return self._unfence

    def _unfence(self) -> None:
        self._abandoned_reads -= 1
        if not self._abandoned_reads:
            self.core.fence_flags = UNSIGNALED

    # --- ends ---

    def keep_until_destroyed(self, memory: InFlightMemory) -> None:
        """Hold it until the queue pair is gone."""
        self._kept.append(memory)

    def completed(self, number: int, *, failed: bool = False) -> InFlightMemory | Transfer | None:
        """The request with this number ended; what was lent for it is returned, and released.

        The lane itself has released what was lent for a transfer, unless that has failed.

        Where signalling is selective, so did all that were posted before it. Where it is not, each
        is reported itself: on Linux's siw a read may end after what was posted later.
        """
        core = self.core
        core.completed(number)
        memory = self._end_all(number) if self._is_selective else self._end_one(number)
        transfer = core.take_failed(number) if failed else None
        if core.waiters or core.queued_reads:
            self._credits.release(0)
        return transfer or memory

    def _end_all(self, number: int) -> InFlightMemory | None:
        core, under_way = self.core, self._in_flight
        memory = None
        while under_way and (number - under_way[0][0]) & NUMBER_MASK <= NUMBER_MASK >> 1:
            oldest, ended = under_way.popleft()
            core.in_flight -= 1
            ended.release()
            if oldest == number:
                memory = ended
        return memory

    def _end_one(self, number: int) -> InFlightMemory | None:
        for index, (noted, memory) in enumerate(self._in_flight):
            if noted == number:
                del self._in_flight[index]
                self.core.in_flight -= 1
                memory.release()
                return memory
        return None

    def abandon(self) -> None:
        """The queue pair is gone, and with it all that was posted. Those who wait are let go."""
        self._kept += [memory for _, memory in self._in_flight]
        self._in_flight.clear()
        self.core.in_flight, self.core.oldest_pending = 0, self.core.next_number
        while self._kept:
            self._kept.pop().release()
        self.core.make_future = self.core.should_batch = self.core.on_rd_atomic_credit = None
        self.core.abandon()
        self.wake_senders()

    def stop_waiting(self) -> None:
        """No completion will come any more: let those go who wait for one."""
        for _, memory in self._in_flight:
            if isinstance(memory, AwaitedRequest):
                memory.stop_waiting()
        self.core.stop_waiting(NUMBER_MASK)

    def wake_senders(self) -> None:
        """Let every waiting sender look again: nothing more will be sent."""
        self._credits.release(NUMBER_MASK)


def _write_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    qp.post_list(wr_id, WrOpcode.RDMA_WRITE, [], flags=flags)


def _read_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    qp.post_list(wr_id, WrOpcode.RDMA_READ, [], flags=flags)
