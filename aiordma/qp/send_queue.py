"""SendQueue: posts requests, and holds their memory until the device is done with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aiordma._native import fast_path
from aiordma.enums import WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import Loop, Slots
from aiordma.memory import BufferPool, PooledBuffer
from aiordma.qp.post_list import ListRequest, Together, Waiter
from aiordma.qp.stats import ConnectionStats
from aiordma.verbs import QueuePair
from aiordma.verbs.queue_pair import FENCE, NO_IMMEDIATE, SIGNALED, UNSIGNALED

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._fast_path import Transfer

NUMBER_MASK = fast_path.NUMBER_MASK

Post = Callable[[QueuePair, int, int], None]
"""Posts a request to a queue pair, with a wr_id and flags."""


class Lent(Protocol):
    """What the device uses until a request has ended."""

    def release(self) -> None:
        """The device is done with it."""


@runtime_checkable
class Waited(Lent, Waiter, Protocol):
    """What a task waits for the end of."""


class _Places(Slots):
    """The places of a send queue, of which a SendLane takes some on its own."""

    __slots__ = ("_lane",)

    def __init__(self, loop: Loop, lane: fast_path.SendLane) -> None:
        self._lane = lane
        super().__init__(loop, lane.free)

    @property
    def free(self) -> int:
        """Places that nobody has taken."""
        return self._lane.free

    @free.setter
    def free(self, value: int) -> None:
        self._lane.free = value

    def try_acquire(self) -> bool:
        """As Slots does, with a frame less for each of its looks."""
        lane = self._lane
        free = lane.free
        if free <= 0:
            return False
        lane.free = free - 1
        return True

    def release(self, count: int = 1) -> None:
        """As Slots does. What nobody waits for here, the lane's queued reads may have."""
        super().release(count)
        if self._lane.queued:
            self._lane.hand_out_turns()


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
        self.lane = fast_path.SendLane(depth, self._interval, max_inline)
        self._slots = _Places(loop, self.lane)
        self._lent: deque[tuple[int, Lent]] = deque()
        self._kept: list[Lent] = []
        self._first_wr_id = 0
        self._qp: QueuePair
        self._pool: BufferPool
        self._held = 0
        self._strays = 0
        self.stats = ConnectionStats()
        self.together: Together | None = None
        """Where requests wait for those of other tasks, if any may."""
        self.try_reserve = self._slots.try_acquire
        """Take a place in the queue if one is free and nobody waits for one."""

    def __len__(self) -> int:
        """Requests that the device has not completed yet, as far as it has said."""
        return (self.lane.number - self.lane.ended) & NUMBER_MASK

    def open(self, qp: QueuePair, pool: BufferPool, first_wr_id: int) -> None:
        """Start using a queue pair; wr_ids are `first_wr_id` plus a number of 31 bits."""
        self._qp, self._pool, self._first_wr_id = qp, pool, first_wr_id
        self.lane.open(qp, qp.cells[0], first_wr_id)

    def stop(self) -> None:
        """Nothing will be posted in short any more; the owner hears of every end."""
        self.lane.is_open = False
        self.lane.waiting += 1
        self.lane.drop_queued()

    # --- places ---

    @property
    def places(self) -> int:
        """Places that are free."""
        return self._slots.free

    async def reserve(self) -> None:
        """Wait for a place in the queue. Cancelling takes none."""
        self.stats.send_waits += 1
        self.lane.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.lane.waiting -= 1
            self.lane.resumed()

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
        before = self.lane.unsignalled
        is_signalled = before + 1 >= self._interval
        flags = self.lane.order | SIGNALED if is_signalled else self.lane.order
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
        before = self.lane.unsignalled
        is_signalled = before + 1 >= self._interval
        flags = self.lane.order | SIGNALED if is_signalled else self.lane.order
        wr_id = self._enqueue(None, 0 if is_signalled else before + 1)
        try:
            post(self._qp, wr_id, flags)
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
        before, flags = self.lane.unsignalled, self.lane.order | SIGNALED
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
        before, order = self.lane.unsignalled, UNSIGNALED if reads else self.lane.order
        wr_id = self._enqueue(lent)
        try:
            post(self._qp, wr_id, order | SIGNALED)
        except Exception:
            self._take_back(before)
            raise

    def post_together(self, request: ListRequest, waited: Waited, reads: bool) -> None:
        """post(), in one call with what other tasks post that the same event has woken.

        Raises:
            VerbsError: as post(). If others are waited for, a refusal ends the connection later.
        """
        together = self.together
        if together is None or len(request.segments) != 1 or not together.is_open():
            self.post(request, waited, reads=reads)
            return
        together.make_room()
        before, order = self.lane.unsignalled, UNSIGNALED if reads else self.lane.order
        wr_id = self._enqueue(waited, joins=True)
        try:
            together.add(request, wr_id, order | SIGNALED, waited)
        except Exception:
            self._take_back(before)
            raise

    def knock(self, lent: Lent | None) -> bool:
        """Read no bytes, if there is a place: the peer's device answers, and looks at no key.

        Raises:
            VerbsError: the device refused; `lent` is kept until the queue pair is gone.
        """
        if not self.try_reserve():
            return False
        try:
            self.post(_read_nothing, lent, reads=True)
        except VerbsError:
            self.unreserve()
            if lent is not None:
                self.keep(lent)
            raise
        return True

    def close_tail(self) -> None:
        """If nothing will tell of the end of the newest requests, post what does, if there is room.

        It is a write of no bytes: the peer's device answers it as any other, but looks at neither
        address nor key. No place is needed, as nobody else may post any more.

        Raises:
            VerbsError: the device refused.
        """
        if self.lane.unsignalled and len(self) < self._depth:
            self.post(_write_nothing, None)

    def _enqueue(self, lent: Lent | None, unsignalled: int = 0, *, joins: bool = False) -> int:
        """Note what is about to be posted, and under which wr_id.

        What waits to be posted before it is posted first, unless it joins that.

        Raises:
            VerbsError: the device refused that.

        Before, not afterwards: a Ctrl-C between the two must not leave the device with memory that
        nobody holds. It leaves at worst a note of what was not posted, which goes with the next.
        """
        lane = self.lane
        if lane.is_due and not joins and self.together is not None:
            self.together.flush()
        number = lane.number
        if lent is not None:
            self._lent.append((number, lent))
            lane.lent += 1
        lane.number = (number + 1) & NUMBER_MASK
        lane.unsignalled = unsignalled
        return self._first_wr_id + number

    def _take_back(self, unsignalled: int) -> None:
        """It was not posted after all."""
        lane = self.lane
        lane.number = number = (lane.number - 1) & NUMBER_MASK
        lane.unsignalled = unsignalled
        if self._lent and self._lent[-1][0] == number:
            self._lent.pop()
            lane.lent -= 1

    def holds(self, lent: Lent) -> bool:
        """Whether it is noted as lent to the device."""
        return any(noted is lent for _, noted in self._lent)

    def fence(self) -> Callable[[], None]:
        """Have what is posted wait for the reads before it, until the result is called."""
        self._strays += 1
        self.lane.order = FENCE
        return self._unfence

    def _unfence(self) -> None:
        self._strays -= 1
        if not self._strays:
            self.lane.order = UNSIGNALED

    # --- ends ---

    def keep(self, lent: Lent) -> None:
        """Hold it until the queue pair is gone."""
        self._kept.append(lent)

    def completed(self, number: int, *, failed: bool = False) -> Lent | Transfer | None:
        """The request with this number ended; what was lent for it is returned, and released.

        The lane itself has released what was lent for a transfer, unless that has failed.

        Where signalling is selective, so did all that were posted before it. Where it is not, each
        is reported itself: on Linux's siw a read may end after what was posted later.
        """
        lane = self.lane
        lane.completed(number)
        lent = self._end_all(number) if self._is_selective else self._end_one(number)
        transfer = lane.failed(number) if failed else None
        if lane.waiting or lane.queued:
            self._slots.release(0)
        return transfer or lent

    def _end_all(self, number: int) -> Lent | None:
        lane, under_way = self.lane, self._lent
        lent = None
        while under_way and (number - under_way[0][0]) & NUMBER_MASK <= NUMBER_MASK >> 1:
            oldest, ended = under_way.popleft()
            lane.lent -= 1
            ended.release()
            if oldest == number:
                lent = ended
        return lent

    def _end_one(self, number: int) -> Lent | None:
        for index, (noted, lent) in enumerate(self._lent):
            if noted == number:
                del self._lent[index]
                self.lane.lent -= 1
                lent.release()
                return lent
        return None

    def abandon(self) -> None:
        """The queue pair is gone, and with it all that was posted. Those who wait are let go."""
        self._kept += [lent for _, lent in self._lent]
        self._lent.clear()
        self.lane.lent, self.lane.ended = 0, self.lane.number
        while self._kept:
            self._kept.pop().release()
        self.lane.make_future = self.lane.join = self.lane.on_turn = None
        self.lane.abandon()
        self.wake_senders()

    def stop_waiting(self) -> None:
        """No completion will come any more: let those go who wait for one."""
        for _, lent in self._lent:
            if isinstance(lent, Waited):
                lent.stop_waiting()
        self.lane.stop_waiting(NUMBER_MASK)

    def wake_senders(self) -> None:
        """Let every waiting sender look again: nothing more will be sent."""
        self._slots.release(NUMBER_MASK)


def _write_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    qp.post_list(wr_id, WrOpcode.RDMA_WRITE, [], flags=flags)


def _read_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    qp.post_list(wr_id, WrOpcode.RDMA_READ, [], flags=flags)
