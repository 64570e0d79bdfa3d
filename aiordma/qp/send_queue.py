"""SendQueue: posts requests, and keeps their memory until they have completed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aiordma._native import fast_path
from aiordma.enums import WrOpcode
from aiordma.loop import FairSemaphore, Loop
from aiordma.memory import BufferPool, PooledBuffer
from aiordma.qp.post_list import MemoryRequest, PostList, Waiter
from aiordma.qp.stats import ConnectionStats
from aiordma.verbs import QueuePair
from aiordma.verbs.queue_pair import NO_IMMEDIATE

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
    """The credits of a send queue. Its SendQueueCore counts them, and takes some itself."""

    __slots__ = ("_core",)

    def __init__(self, loop: Loop, core: fast_path.SendQueueCore) -> None:
        super().__init__(loop, 0)
        self._core = core

    def try_acquire(self) -> bool:
        """Take a credit if one is free."""
        return self._core.try_reserve()

    def release(self, count: int = 1) -> None:
        """Release credits. Those that no task waits for here go to the core's queued reads."""
        self._core.unreserve(count)
        if self._waiting:
            self.grant()
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
        """`max_inline`: the most bytes in a message that the core posts. -1: it posts none."""
        self._depth = depth
        # So a full queue always contains a signaled request, whose completion frees credits.
        self._interval = (depth // 4 or 1) if selective else 1
        self.core = fast_path.SendQueueCore(depth, self._interval, max_inline, selective)
        self._credits = _SendCredits(loop, self.core)
        self._kept: list[InFlightMemory] = []
        self._qp: QueuePair
        self._pool: BufferPool
        self.stats = ConnectionStats.__new__(ConnectionStats)  # __init__() would set 16 fields
        self.post_list: PostList | None = None
        """The batched requests. None: requests are never batched."""
        self.try_reserve = self.core.try_reserve
        """Take a send credit if one is free. Returns True if it was taken."""

    def __len__(self) -> int:
        """Return the number of posted requests that are not known to have completed."""
        return (self.core.next_number - self.core.oldest_pending) & NUMBER_MASK

    def open(self, qp: QueuePair, pool: BufferPool, first_wr_id: int) -> None:
        """Start to use a queue pair. A wr_id is `first_wr_id` plus a number of 31 bits."""
        self._qp, self._pool = qp, pool
        self.core.open(qp, qp.cells[0], first_wr_id)
        self.core.use_buffers(pool.free)

    def stop(self) -> None:
        """Stop posting on the fast path. From now on every completion is reported to the owner."""
        self.core.close()

    # --- credits ---

    @property
    def credits(self) -> int:
        """The number of free send credits."""
        return self.core.credits

    async def reserve(self) -> None:
        """Wait for a send credit, and take it. If cancelled, no credit is taken."""
        self.stats.send_waits += 1
        self.core.add_waiter()
        try:
            await self._credits.acquire()
        finally:
            self.core.remove_waiter()
            self.core.resumed()

    def unreserve(self) -> None:
        """Release a send credit that was not used."""
        self._credits.release()

    def pause(self) -> None:
        """Withhold all credits until resume(). Called before anything is posted."""
        self.core.pause()

    def resume(self) -> None:
        """End a pause(). Idempotent."""
        self.core.resume()
        self._credits.release(0)

    # --- requests ---

    def post_inline(self, data: Buffer, imm: int = NO_IMMEDIATE) -> None:
        """Send an inline message. The caller has a credit.

        Raises:
            VerbsError: the device refused it; the caller still has the credit.
        """
        wr_id, flags = self._commit(None, needs_completion=False)
        try:
            self._qp.post_send_inline(wr_id, data, imm, flags)
        except Exception:
            self.core.roll_back()
            raise

    def post_without_memory(self, post: Post) -> None:
        """Post another request without memory in flight. The caller has a credit.

        Raises:
            VerbsError: the device refused it; the caller still has the credit.
        """
        wr_id, flags = self._commit(None, needs_completion=False)
        try:
            post(self._qp, wr_id, flags)
        except Exception:
            self.core.roll_back()
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
        wr_id, flags = self._commit(buffer)
        try:
            self._qp.post_send_copy(wr_id, buffer.address, data, buffer.lkey, imm, flags)
        except Exception:
            self.core.roll_back()
            raise

    def post(self, post: Post, memory: InFlightMemory | None, *, is_read: bool = False) -> None:
        """Post another request: `post` is called with a wr_id and flags. The caller has a credit.

        A read needs no fence: reads are done in order, and iWARP allows no fence on them.

        Raises:
            VerbsError: the device refused it; the caller still has the credit and `memory`.
        """
        wr_id, flags = self._commit(memory, is_read=is_read)
        try:
            post(self._qp, wr_id, flags)
        except Exception:
            self.core.roll_back()
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
        post_list.add(request, operation)

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

    def _commit(
        self,
        memory: InFlightMemory | None,
        *,
        needs_completion: bool = True,
        is_read: bool = False,
    ) -> tuple[int, int]:
        """Record a request and its memory before it is posted. Return its wr_id and its flags.

        Batched requests are posted first.

        The record is made before the posting: if a Ctrl-C comes in between, memory that the device
        uses must not be without a reference. At worst, a request that was not posted stays
        recorded until the next one completes.

        Raises:
            VerbsError: the device refused the batched requests.
        """
        core = self.core
        if core.unposted and self.post_list is not None:
            self.post_list.flush()
        return core.commit(memory, needs_completion, is_read)

    def is_in_flight(self, memory: InFlightMemory) -> bool:
        """Return True if `memory` is recorded as in flight."""
        return any(other is memory for other in self.core.in_flight())

    def fence(self) -> Callable[[], None]:
        """Fence requests: they wait for the reads before them. Return a function that ends this."""
        self.core.begin_fence()
        return self.core.end_fence

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
        core, exact = self.core, None
        ended = core.completed(number)
        if ended:
            exact = self._release(ended)
        transfer = core.take_failed(number) if failed else None
        if core.waiters or core.queued_reads:
            self._credits.release(0)
        return transfer or exact

    def _release(self, ended: list[InFlightMemory]) -> InFlightMemory:
        """Release memory, and return the last one. If one raises, the others are kept."""
        remaining = iter(ended)
        try:
            for memory in remaining:
                memory.release()
        finally:
            self._kept.extend(remaining)
        return ended[-1]

    def abandon(self) -> None:
        """Release all memory and wake all waiters: the queue pair is destroyed."""
        self._kept += self.core.abandon()
        while self._kept:
            self._kept.pop().release()
        if self.core.waiters or self.core.queued_reads:
            self.wake_senders()

    def stop_waiting(self) -> None:
        """Wake all tasks that wait for a completion: no completion will come any more."""
        for memory in self.core.in_flight():
            if isinstance(memory, AwaitedRequest):
                memory.stop_waiting()
        self.core.stop_waiting(NUMBER_MASK)

    def wake_senders(self) -> None:
        """Wake all tasks that wait for a credit: nothing more will be sent."""
        self._credits.release(NUMBER_MASK)


def write_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    """Post a write of no bytes, which the peer's device acknowledges."""
    qp.post_list(wr_id, WrOpcode.RDMA_WRITE, [], flags=flags)
