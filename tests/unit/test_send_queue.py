"""SendQueue: places in the queue, numbers of requests, and buffers until the device is done."""

from __future__ import annotations

import asyncio
import errno
import random
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from aiordma import VerbsError
from aiordma.datapath import NUMBER_MASK, SendQueue
from aiordma.loop import running_loop
from aiordma.memory import PooledBuffer

pytestmark = pytest.mark.asyncio

FIRST_WR_ID = 5 << 32
DEPTH = 4


class FakeQueuePair:
    """A send queue of DEPTH requests that complete in order, when told to."""

    def __init__(self) -> None:
        self.posted: deque[int] = deque()
        self.sent: list[tuple[bytes, int]] = []
        self.refuses = False

    def _post(self, wr_id: int, data: bytes, imm: int) -> None:
        if self.refuses:
            raise VerbsError(errno.EINVAL, "ibv_post_send")
        assert len(self.posted) < DEPTH, "one too many"
        assert wr_id >> 32 == FIRST_WR_ID >> 32, "the number ran into the key"
        self.posted.append(wr_id - FIRST_WR_ID)
        self.sent.append((data, imm))

    def post_send_inline(self, wr_id: int, data: bytes, imm: int) -> None:
        self._post(wr_id, data, imm)

    def post_send_copy(self, wr_id: int, address: int, data: bytes, lkey: int, imm: int) -> None:
        assert (address, lkey) == (0x1000, 99)
        self._post(wr_id, data, imm)


class FakePool:
    """Buffers of 1024 bytes."""

    def __init__(self, free: int = 0) -> None:
        self.home: deque[PooledBuffer] = deque()
        self.made = 0
        self.asked: list[tuple[int, object]] = []
        for _ in range(free):
            self.add()

    def add(self) -> None:
        self.made += 1
        self.home.append(PooledBuffer(self.home, 0x1000, 99, memoryview(bytearray(1024))))

    def try_acquire(self, nbytes: int) -> PooledBuffer | None:
        return self.home.pop() if self.home else None

    async def acquire(
        self, nbytes: int, call: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> PooledBuffer:
        self.asked.append((nbytes, call))
        await call(self.add)
        return self.home.pop()

    @property
    def whole(self) -> bool:
        """Whether every buffer is here, once."""
        return len(self.home) == self.made == len({id(buffer) for buffer in self.home})


class Rig:
    """A SendQueue on fakes; must be made on a running loop."""

    def __init__(self, free_buffers: int = 0) -> None:
        self.qp, self.pool = FakeQueuePair(), FakePool(free_buffers)
        self.queue = SendQueue(running_loop(), DEPTH)
        self.queue.open(self.qp, self.pool, FIRST_WR_ID)  # type: ignore[arg-type]

    def send(self, data: bytes = b"x") -> None:
        assert self.queue.try_reserve()
        self.queue.post_inline(data)

    def send_copy(self, data: bytes = b"x" * 100) -> None:
        assert self.queue.try_reserve()
        buffer = self.queue.try_buffer(len(data))
        assert buffer is not None
        self.queue.post_copy(buffer, data)

    def complete(self, count: int = 1) -> None:
        """Report the last of the `count` oldest requests only, as selective signalling does."""
        for _ in range(count):
            number = self.qp.posted.popleft()
        self.queue.completed(number)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_are_numbered_in_order() -> None:
    rig = Rig(free_buffers=1)
    rig.send(b"one")
    rig.send_copy(b"two")
    rig.send(b"three")
    assert list(rig.qp.posted) == [0, 1, 2]
    assert rig.qp.sent == [(b"one", -1), (b"two", -1), (b"three", -1)]
    assert len(rig.queue) == 3


async def test_immediate_data_goes_along() -> None:
    rig = Rig(free_buffers=1)
    await rig.queue.reserve()
    rig.queue.post_inline(b"one", 7)
    await rig.queue.reserve()
    buffer = rig.queue.try_buffer(100)
    assert buffer is not None
    rig.queue.post_copy(buffer, b"two", 0)
    assert rig.qp.sent == [(b"one", 7), (b"two", 0)]


async def test_a_full_queue_has_no_place() -> None:
    rig = Rig()
    for _ in range(DEPTH):
        rig.send()
    assert not rig.queue.try_reserve()
    rig.complete()
    assert rig.queue.try_reserve()
    assert not rig.queue.try_reserve()


async def test_senders_wait_for_a_place_in_order() -> None:
    rig, order = Rig(), list[int]()
    for _ in range(DEPTH):
        rig.send()

    async def sender(number: int) -> None:
        await rig.queue.reserve()
        order.append(number)
        rig.queue.post_inline(b"x")

    tasks = [asyncio.create_task(sender(number)) for number in range(3)]
    await settle()
    assert order == []
    rig.complete()
    await settle()
    assert order == [0]
    rig.complete(2)
    await asyncio.wait_for(asyncio.gather(*tasks), timeout=5)
    assert order == [0, 1, 2]


async def test_a_cancelled_sender_takes_no_place() -> None:
    rig = Rig()
    for _ in range(DEPTH):
        rig.send()
    task = asyncio.create_task(rig.queue.reserve())
    await settle()
    rig.complete()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.queue.try_reserve()


async def test_a_place_that_was_not_used_is_given_back() -> None:
    rig = Rig()
    for _ in range(DEPTH):
        assert rig.queue.try_reserve()
    rig.queue.unreserve()
    assert rig.queue.try_reserve()
    assert not rig.queue.try_reserve()


async def test_a_completion_ends_all_that_was_posted_before() -> None:
    rig = Rig(free_buffers=DEPTH)
    for _ in range(DEPTH):
        rig.send_copy()
    assert len(rig.pool.home) == 0
    rig.complete(3)
    assert (len(rig.queue), len(rig.pool.home)) == (1, 3)
    rig.complete()
    assert len(rig.queue) == 0
    assert rig.pool.whole


async def test_a_buffer_is_not_given_back_before_its_completion() -> None:
    rig = Rig(free_buffers=2)
    rig.send_copy()
    rig.send()
    rig.send_copy()
    rig.complete()
    assert len(rig.pool.home) == 1
    rig.complete()
    assert len(rig.pool.home) == 1
    rig.complete()
    assert rig.pool.whole


async def test_a_refused_request_stays_the_callers() -> None:
    rig = Rig(free_buffers=1)
    rig.qp.refuses = True
    await rig.queue.reserve()
    buffer = rig.queue.try_buffer(100)
    assert buffer is not None
    with pytest.raises(VerbsError):
        rig.queue.post_copy(buffer, b"x")
    with pytest.raises(VerbsError):
        rig.queue.post_inline(b"x")
    assert len(rig.queue) == 0
    buffer.release()
    rig.queue.unreserve()
    rig.qp.refuses = False
    for _ in range(DEPTH):
        rig.send()
    assert list(rig.qp.posted) == [0, 1, 2, 3]
    assert rig.pool.whole


async def test_a_buffer_that_is_not_there_is_asked_of_the_pool() -> None:
    async def call(function: Callable[[], None]) -> None:
        function()

    rig = Rig()
    assert rig.queue.try_buffer(100) is None
    buffer = await rig.queue.buffer(100, call)
    assert len(buffer.view) == 1024
    assert rig.pool.asked == [(100, call)]


async def test_a_pool_that_cannot_grow_says_so() -> None:
    async def fail(function: Callable[[], None]) -> None:
        raise VerbsError(errno.ENOMEM, "ibv_reg_mr")

    rig = Rig()
    with pytest.raises(VerbsError, match="RLIMIT_MEMLOCK"):
        await rig.queue.buffer(100, fail)


async def test_numbers_wrap_below_the_bit_of_receives() -> None:
    rig = Rig(free_buffers=DEPTH)
    rig.queue._number = NUMBER_MASK - 1
    for _ in range(DEPTH):
        rig.send_copy()
    assert list(rig.qp.posted) == [NUMBER_MASK - 1, NUMBER_MASK, 0, 1]
    rig.complete(3)
    assert (len(rig.queue), len(rig.pool.home)) == (1, 3)
    rig.complete()
    assert len(rig.queue) == 0
    assert rig.pool.whole
    assert NUMBER_MASK == (1 << 31) - 1


async def test_abandoning_gives_every_buffer_back_once() -> None:
    rig = Rig(free_buffers=3)
    for _ in range(3):
        rig.send_copy()
    rig.complete()
    rig.queue.abandon()
    assert len(rig.queue) == 0
    assert rig.pool.whole
    rig.queue.abandon()
    assert rig.pool.whole


async def test_a_kept_buffer_comes_back_when_the_queue_pair_is_gone() -> None:
    rig = Rig(free_buffers=2)
    buffer = rig.queue.try_buffer(100)
    assert buffer is not None
    rig.queue.keep(buffer)
    rig.send_copy()
    assert len(rig.queue) == 1
    rig.complete()
    assert (len(rig.queue), len(rig.pool.home)) == (0, 1)
    rig.queue.abandon()
    assert rig.pool.whole
    rig.queue.abandon()
    assert rig.pool.whole


async def test_a_completion_after_abandoning_does_no_harm() -> None:
    rig = Rig(free_buffers=1)
    rig.send_copy()
    rig.queue.abandon()
    rig.complete()
    assert rig.pool.whole


@pytest.mark.parametrize("method", ["abandon", "wake_senders"])
async def test_at_the_end_every_waiting_sender_is_let_go(method: str) -> None:
    rig = Rig()
    for _ in range(DEPTH):
        rig.send()
    tasks = [asyncio.create_task(rig.queue.reserve()) for _ in range(10)]
    await settle()
    getattr(rig.queue, method)()
    await asyncio.wait_for(asyncio.gather(*tasks), timeout=5)
    getattr(rig.queue, method)()
    await asyncio.wait_for(rig.queue.reserve(), timeout=5)


@pytest.mark.parametrize("seed", range(10))
async def test_a_long_exchange_loses_no_place_and_no_buffer(seed: int) -> None:
    source, rig = random.Random(seed), Rig(free_buffers=DEPTH)
    rig.queue._number = NUMBER_MASK - 1000
    for _ in range(3000):
        if source.random() < 0.5 and rig.queue.try_reserve():
            if source.random() < 0.5:
                rig.queue.post_inline(b"x")
            else:
                buffer = rig.queue.try_buffer(100)
                assert buffer is not None
                rig.queue.post_copy(buffer, b"x")
        elif rig.qp.posted:
            rig.complete(source.randrange(1, len(rig.qp.posted) + 1))
        assert len(rig.queue) == len(rig.qp.posted)
    while rig.qp.posted:
        rig.complete()
    assert rig.pool.whole
    assert [rig.queue.try_reserve() for _ in range(DEPTH + 1)] == [True] * DEPTH + [False]
