"""SendQueue: posts requests, and keeps their memory until they have completed."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aiordma._native import fast_path
from aiordma.enums import WrOpcode
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
    """Memory that the device uses until a request has ended."""

    def release(self) -> None:
        """Release the memory: the device does not use it any more."""


@runtime_checkable
class AwaitedRequest(InFlightMemory, Waiter, Protocol):
    """A request with memory in flight and a task that waits for its end."""


class _SendCredits(FairSemaphore):
    """The credits of a send queue. They are counted in its SendQueueCore, which takes some, too."""

    __slots__ = ("_core",)

    def __init__(self, loop: Loop, core: fast_path.SendQueueCore) -> None:
        self._core = core
        super().__init__(loop, core.credits)

    @property
    def free(self) -> int:
        """The number of credits that are not used."""
        return self._core.credits

    @free.setter
    def free(self, value: int) -> None:
        self._core.credits = value

    def try_acquire(self) -> bool:
        """Take a credit if one is free: FairSemaphore.try_acquire() with fewer Python frames."""
        core = self._core
        free = core.credits
        if free <= 0:
            return False
        core.credits = free - 1
        return True

    def release(self, count: int = 1) -> None:
        """Release credits. Those that no task waits for here go to the core's queued reads."""
        super().release(count)
        if self._core.queued_reads:
            self._core.grant_rd_atomic_credits()


class SendQueue:
    """The send side of a queue pair. Requests mostly end in the order in which they were posted.

    Senders wait for a credit while the queue is full, first come first served.

    Signaling is selective. An inline message has no memory in flight, and no task waits for its
    end. Only the queue uses its completion, and one completion reports all requests before it.

    The counters are in a SendQueueCore. It posts small messages, and transfers of registered memory
    in one piece, and handles their completions without a Python frame. This class does the rest.
    """

    def __init__(
        self, loop: Loop, depth: int, *, selective: bool = True, max_inline: int = 0
    ) -> None:
        """`max_inline`: the most bytes in a message that the core posts inline."""
        self._depth = depth
        # So a full queue always contains a signaled request, whose completion frees credits.
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
        """The batched requests. None: requests are never batched."""
        self.try_reserve = self._credits.try_acquire
        """Take a send credit if one is free. Returns True if it was taken."""

    def __len__(self) -> int:
        """Return the number of posted requests that are not known to have completed."""
        return (self.core.next_number - self.core.oldest_pending) & NUMBER_MASK

    def open(self, qp: QueuePair, pool: BufferPool, first_wr_id: int) -> None:
        """Start to use a queue pair. A wr_id is `first_wr_id` plus a number of 31 bits."""
        self._qp, self._pool, self._first_wr_id = qp, pool, first_wr_id
        self.core.open(qp, qp.cells[0], first_wr_id)

    def stop(self) -> None:
        """Stop posting on the fast path. From now on every completion is reported to the owner."""
        self.core.is_open = False
        self.core.waiters += 1
        self.core.drop_queued_reads()

    # --- credits ---

    @property
    def credits(self) -> int:
        """The number of free send credits."""
        return self._credits.free

    async def reserve(self) -> None:
        """Wait for a send credit, and take it. If cancelled, no credit is taken."""
        self.stats.send_waits += 1
        self.core.waiters += 1
        try:
            await self._credits.acquire()
        finally:
            self.core.waiters -= 1
            self.core.resumed()

    def unreserve(self) -> None:
        """Release a send credit that was not used."""
        self._credits.release()

    def pause(self) -> None:
        """Withhold all credits until resume(). Called before anything is posted."""
        self._paused_credits, self._credits.free = self._credits.free, 0

    def resume(self) -> None:
        """End a pause(). Idempotent."""
        withheld, self._paused_credits = self._paused_credits, 0
        self._credits.release(withheld)

    # --- requests ---

    def post_inline(self, data: Buffer, imm: int = NO_IMMEDIATE) -> None:
        """Send an inline message. The caller has a credit.

        Raises:
            VerbsError: the device refused it; the caller still has the credit.
        """
        before = self.core.unsignaled
        is_signaled = before + 1 >= self._interval
        flags = self.core.fence_flags | SIGNALED if is_signaled else self.core.fence_flags
        wr_id = self._enqueue(None, 0 if is_signaled else before + 1)
        try:
            self._qp.post_send_inline(wr_id, data, imm, flags)
        except Exception:
            self._roll_back(before)
            raise

    def post_without_memory(self, post: Post) -> None:
        """Post another request without memory in flight. The caller has a credit.

        Raises:
            VerbsError: the device refused it; the caller still has the credit.
        """
        before = self.core.unsignaled
        is_signaled = before + 1 >= self._interval
        flags = self.core.fence_flags | SIGNALED if is_signaled else self.core.fence_flags
        wr_id = self._enqueue(None, 0 if is_signaled else before + 1)
        try:
            post(self._qp, wr_id, flags)
        except Exception:
            self._roll_back(before)
            raise

    def try_buffer(self, nbytes: int) -> PooledBuffer | None:
        """Return a registered buffer for a message, or None if the pool has none now."""
        return self._pool.try_acquire(nbytes)

    async def buffer(
        self, nbytes: int, call: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> PooledBuffer:
        """Return a registered buffer for a message; see BufferPool.acquire."""
        return await self._pool.acquire(nbytes, call)

    def post_copy(self, buffer: PooledBuffer, data: Buffer, imm: int = NO_IMMEDIATE) -> None:
        """Copy `data` into `buffer` and send it. The caller has a credit.

        Raises:
            VerbsError: the device refused it; the caller still has the credit and the buffer.
        """
        before, flags = self.core.unsignaled, self.core.fence_flags | SIGNALED
        wr_id = self._enqueue(buffer)
        try:
            self._qp.post_send_copy(wr_id, buffer.address, data, buffer.lkey, imm, flags)
        except Exception:
            self._roll_back(before)
            raise

    def post(self, post: Post, memory: InFlightMemory | None, *, is_read: bool = False) -> None:
        """Post another request: `post` is called with a wr_id and flags. The caller has a credit.

        A read needs no fence: reads are done in order, and iWARP allows no fence on them.

        Raises:
            VerbsError: the device refused it; the caller still has the credit and `memory`.
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
        """Post as post() does, but batched with other requests if the post list is open.

        Raises:
            VerbsError: as post(). The refusal of a batched request ends the connection later.
        """
        post_list = self.post_list
        if post_list is None or len(request.segments) != 1 or not post_list.is_open():
            self.post(request, operation, is_read=is_read)
            return
        post_list.make_room()
        order = UNSIGNALED if is_read else self.core.fence_flags
        wr_id = self._enqueue(operation, is_batched=True)
        post_list.add(request, wr_id, order | SIGNALED, operation)

    @property
    def posted(self) -> int:
        """The number of requests posted so far, modulo NUMBER_MASK + 1."""
        return self.core.next_number

    def signal_tail(self) -> None:
        """Post a signaled request if the newest requests are unsignaled and the queue has room.

        It is a write of no bytes: the peer's device acknowledges it, but checks neither its address
        nor its key. It needs no credit, because nothing else can be posted any more.

        Raises:
            VerbsError: the device refused it.
        """
        if self.core.unsignaled and len(self) < self._depth:
            self.post(write_nothing, None)

    def _enqueue(
        self, memory: InFlightMemory | None, unsignaled: int = 0, *, is_batched: bool = False
    ) -> int:
        """Record a request and its memory before it is posted. Return its wr_id.

        Batched requests are posted first, unless the request is batched, too.

        The record is made before the posting: if a Ctrl-C comes in between, memory that the device
        uses must not be without a reference. At worst, a request that was not posted stays
        recorded until the next one completes.

        Raises:
            VerbsError: the device refused the batched requests.
        """
        core = self.core
        if core.has_unposted and not is_batched and self.post_list is not None:
            self.post_list.flush()
        number = core.next_number
        if memory is not None:
            self._in_flight.append((number, memory))
            core.in_flight += 1
        core.next_number = (number + 1) & NUMBER_MASK
        core.unsignaled = unsignaled
        return self._first_wr_id + number

    def _roll_back(self, unsignaled: int) -> None:
        """Remove the record of the last request: it was not posted."""
        core = self.core
        core.next_number = number = (core.next_number - 1) & NUMBER_MASK
        core.unsignaled = unsignaled
        if self._in_flight and self._in_flight[-1][0] == number:
            self._in_flight.pop()
            core.in_flight -= 1

    def is_in_flight(self, memory: InFlightMemory) -> bool:
        """Return True if `memory` is recorded as in flight."""
        return any(other is memory for _, other in self._in_flight)

    def fence(self) -> Callable[[], None]:
        """Fence requests: they wait for the reads before them. Return a function that ends this."""
        self._abandoned_reads += 1
        self.core.fence_flags = FENCE
        return self._unfence

    def _unfence(self) -> None:
        self._abandoned_reads -= 1
        if not self._abandoned_reads:
            self.core.fence_flags = UNSIGNALED

    # --- completions ---

    def keep_until_destroyed(self, memory: InFlightMemory) -> None:
        """Keep the memory until the queue pair is destroyed."""
        self._kept.append(memory)

    def completed(self, number: int, *, failed: bool = False) -> InFlightMemory | Transfer | None:
        """Release the memory of the request with this number, and return it (None: it had none).

        The core has already released the memory of a successful transfer.

        If signaling is selective, the requests before it have ended, too. If not, each one is
        reported, because on Linux's siw a read can end after requests that were posted later.
        """
        core = self.core
        core.completed(number)
        memory = self._release_up_to(number) if self._is_selective else self._release_one(number)
        transfer = core.take_failed(number) if failed else None
        if core.waiters or core.queued_reads:
            self._credits.release(0)
        return transfer or memory

    def _release_up_to(self, number: int) -> InFlightMemory | None:
        core, in_flight = self.core, self._in_flight
        memory = None
        while in_flight and (number - in_flight[0][0]) & NUMBER_MASK <= NUMBER_MASK >> 1:
            oldest, ended = in_flight.popleft()
            core.in_flight -= 1
            ended.release()
            if oldest == number:
                memory = ended
        return memory

    def _release_one(self, number: int) -> InFlightMemory | None:
        for index, (other, memory) in enumerate(self._in_flight):
            if other == number:
                del self._in_flight[index]
                self.core.in_flight -= 1
                memory.release()
                return memory
        return None

    def abandon(self) -> None:
        """Release all memory and wake all waiters: the queue pair is destroyed."""
        self._kept += [memory for _, memory in self._in_flight]
        self._in_flight.clear()
        self.core.in_flight, self.core.oldest_pending = 0, self.core.next_number
        while self._kept:
            self._kept.pop().release()
        self.core.make_future = self.core.should_batch = self.core.on_rd_atomic_credit = None
        self.core.abandon()
        self.wake_senders()

    def stop_waiting(self) -> None:
        """Wake all tasks that wait for a completion: no completion will come any more."""
        for _, memory in self._in_flight:
            if isinstance(memory, AwaitedRequest):
                memory.stop_waiting()
        self.core.stop_waiting(NUMBER_MASK)

    def wake_senders(self) -> None:
        """Wake all tasks that wait for a credit: nothing more will be sent."""
        self._credits.release(NUMBER_MASK)


def write_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    """Post a write of no bytes, which the peer's device acknowledges."""
    qp.post_list(wr_id, WrOpcode.RDMA_WRITE, [], flags=flags)
