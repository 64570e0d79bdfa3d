"""SendQueue: places in the queue, numbers of requests, and buffers until the device is done."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from qp_fakes import SEND_WR_ID, CountedMemory, FakePool, SendRig
from verbs_fakes import untyped_ffi

from aiordma import VerbsError
from aiordma.datagrams.datagram_send_queue import DatagramSend, DatagramSendQueue
from aiordma.enums import SendFlags, WrOpcode
from aiordma.loop import running_loop
from aiordma.memory import PooledBuffer, address_and_length
from aiordma.qp import NUMBER_MASK
from aiordma.verbs import QueuePair, QueuePairCaps, queue_pair

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

DEPTH = 4


def post_something(qp: Any, wr_id: int, flags: int) -> None:
    qp.post_list(wr_id, WrOpcode.RDMA_READ, [], flags=flags)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_are_numbered_in_order() -> None:
    rig = SendRig(free_buffers=1)
    rig.send(b"one")
    rig.send_copy(b"two")
    rig.send(b"three")
    assert list(rig.qp.posted) == [0, 1, 2]
    assert rig.qp.sent == [(b"one", -1), (b"two", -1), (b"three", -1)]
    assert len(rig.queue) == 3


async def test_immediate_data_goes_along() -> None:
    rig = SendRig(free_buffers=1)
    await rig.queue.reserve()
    rig.queue.post_inline(b"one", 7)
    await rig.queue.reserve()
    buffer = rig.queue.try_buffer(100)
    assert buffer is not None
    rig.queue.post_copy(buffer, b"two", 0)
    assert rig.qp.sent == [(b"one", 7), (b"two", 0)]


async def test_a_full_queue_has_no_place() -> None:
    rig = SendRig()
    for _ in range(DEPTH):
        rig.send()
    assert not rig.queue.try_reserve()
    rig.complete()
    assert rig.queue.try_reserve()
    assert not rig.queue.try_reserve()


async def test_senders_wait_for_a_place_in_order() -> None:
    rig, order = SendRig(), list[int]()
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
    rig = SendRig()
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
    rig = SendRig()
    for _ in range(DEPTH):
        assert rig.queue.try_reserve()
    rig.queue.unreserve()
    assert rig.queue.try_reserve()
    assert not rig.queue.try_reserve()


async def test_a_completion_ends_all_that_was_posted_before() -> None:
    rig = SendRig(free_buffers=DEPTH)
    for _ in range(DEPTH):
        rig.send_copy()
    assert len(rig.pool.home) == 0
    rig.complete(3)
    assert (len(rig.queue), len(rig.pool.home)) == (1, 3)
    rig.complete()
    assert len(rig.queue) == 0
    assert rig.pool.is_whole


async def test_a_buffer_is_not_given_back_before_its_completion() -> None:
    rig = SendRig(free_buffers=2)
    rig.send_copy()
    rig.send()
    rig.send_copy()
    rig.complete()
    assert len(rig.pool.home) == 1
    rig.complete()
    assert len(rig.pool.home) == 1
    rig.complete()
    assert rig.pool.is_whole


async def test_a_refused_request_stays_the_callers() -> None:
    rig = SendRig(free_buffers=1)
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
    assert rig.pool.is_whole


async def test_an_interrupt_leaves_the_device_no_memory_that_nobody_holds() -> None:
    """Ctrl-C strikes right after the device has taken a request."""
    lent = CountedMemory()
    rig = SendRig()

    def post_and_be_struck(qp: Any, wr_id: int, flags: int) -> None:
        post_something(qp, wr_id, flags)
        raise KeyboardInterrupt

    await rig.queue.reserve()
    with pytest.raises(KeyboardInterrupt):
        rig.queue.post(post_and_be_struck, lent)
    assert (len(rig.queue), lent.releases) == (1, 0)
    rig.send()
    rig.complete()
    assert (len(rig.queue), lent.releases) == (1, 1)
    rig.complete()
    assert (len(rig.queue), lent.releases) == (0, 1)


async def test_a_buffer_that_is_not_there_is_asked_of_the_pool() -> None:
    async def call(function: Callable[[], None]) -> None:
        function()

    rig = SendRig()
    assert rig.queue.try_buffer(100) is None
    buffer = await rig.queue.buffer(100, call)
    assert len(buffer.view) == 1024
    assert rig.pool.asked == [(100, call)]


async def test_a_pool_that_cannot_grow_says_so() -> None:
    async def fail(function: Callable[[], None]) -> None:
        raise VerbsError(errno.ENOMEM, "ibv_reg_mr")

    rig = SendRig()
    with pytest.raises(VerbsError, match="RLIMIT_MEMLOCK"):
        await rig.queue.buffer(100, fail)


async def test_numbers_wrap_below_the_bit_of_receives() -> None:
    rig = SendRig(free_buffers=DEPTH)
    rig.number_from(NUMBER_MASK - 1)
    for _ in range(DEPTH):
        rig.send_copy()
    assert list(rig.qp.posted) == [NUMBER_MASK - 1, NUMBER_MASK, 0, 1]
    rig.complete(3)
    assert (len(rig.queue), len(rig.pool.home)) == (1, 3)
    rig.complete()
    assert len(rig.queue) == 0
    assert rig.pool.is_whole
    assert NUMBER_MASK == (1 << 31) - 1


async def test_abandoning_gives_every_buffer_back_once() -> None:
    rig = SendRig(free_buffers=3)
    for _ in range(3):
        rig.send_copy()
    rig.complete()
    rig.queue.abandon()
    assert len(rig.queue) == 0
    assert rig.pool.is_whole
    rig.queue.abandon()
    assert rig.pool.is_whole


async def test_a_kept_buffer_comes_back_when_the_queue_pair_is_gone() -> None:
    rig = SendRig(free_buffers=2)
    buffer = rig.queue.try_buffer(100)
    assert buffer is not None
    rig.queue.keep_until_destroyed(buffer)
    rig.send_copy()
    assert len(rig.queue) == 1
    rig.complete()
    assert (len(rig.queue), len(rig.pool.home)) == (0, 1)
    rig.queue.abandon()
    assert rig.pool.is_whole
    rig.queue.abandon()
    assert rig.pool.is_whole


async def test_a_completion_after_abandoning_does_no_harm() -> None:
    rig = SendRig(free_buffers=1)
    rig.send_copy()
    rig.queue.abandon()
    rig.complete()
    assert rig.pool.is_whole


@pytest.mark.parametrize("method", ["abandon", "wake_senders"])
async def test_at_the_end_every_waiting_sender_is_let_go(method: str) -> None:
    rig = SendRig()
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
    source, rig = random.Random(seed), SendRig(free_buffers=DEPTH)
    rig.number_from(NUMBER_MASK - 1000)
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
    assert rig.pool.is_whole
    assert [rig.queue.try_reserve() for _ in range(DEPTH + 1)] == [True] * DEPTH + [False]


# --- which of them are signalled ---


@pytest.mark.parametrize(("depth", "every"), [(1, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 16)])
async def test_of_short_messages_every_so_many_is_signalled(depth: int, every: int) -> None:
    rig = SendRig(depth=depth)
    for _ in range(depth):
        rig.send()
    assert rig.signaled == [(number + 1) % every == 0 for number in range(depth)]


async def test_what_lends_memory_is_always_signalled() -> None:
    rig = SendRig(free_buffers=3, depth=64)
    for _ in range(3):
        rig.send_copy()
    await rig.queue.reserve()
    rig.queue.post(post_something, CountedMemory())
    assert rig.signaled == [True] * 4


async def test_counting_begins_again_after_what_was_signalled() -> None:
    rig = SendRig(free_buffers=1, depth=16)
    for _ in range(3):
        rig.send()
    rig.send_copy()
    for _ in range(4):
        rig.send()
    assert rig.signaled == [False] * 3 + [True] + [False] * 3 + [True]


async def test_a_refused_message_does_not_count() -> None:
    rig = SendRig(depth=16)
    for _ in range(3):
        rig.send()
    rig.qp.refuses = True
    for _ in range(5):
        with pytest.raises(VerbsError):
            rig.send()
        rig.queue.unreserve()
    rig.qp.refuses = False
    for _ in range(2):
        rig.send()
    assert rig.signaled == [False, False, False, True, False]


async def test_where_it_is_not_selective_every_message_is_signalled() -> None:
    rig = SendRig(depth=64, selective=False)
    for _ in range(64):
        rig.send()
    assert rig.signaled == [True] * 64


async def test_where_it_is_not_selective_a_read_may_end_after_a_later_write() -> None:
    """As on Linux's siw: its memory is not given back before, and its place is not given twice."""
    rig = SendRig(depth=4, selective=False)
    read, write = CountedMemory(), CountedMemory()
    for lent, reads in ((read, True), (write, False)):
        assert rig.queue.try_reserve()
        rig.queue.post(post_something, lent, is_read=reads)
    assert rig.queue.completed(1) is write
    assert (read.releases, write.releases) == (0, 1)
    rig.send()
    assert rig.queue.completed(2) is None
    assert (read.releases, rig.queue.core.in_flight, rig.queue.credits) == (0, 1, 4)
    assert rig.queue.completed(0) is read
    assert (read.releases, rig.queue.core.in_flight, rig.queue.credits) == (1, 0, 4)
    assert len(rig.queue) == 0


async def test_one_completion_speaks_for_the_unsignalled_before_it() -> None:
    rig = SendRig(depth=16)
    for _ in range(16):
        rig.send()
    assert not rig.queue.try_reserve()
    rig.complete_oldest_signaled()
    assert len(rig.queue) == 12
    assert [rig.queue.try_reserve() for _ in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("seed", range(20))
async def test_nobody_gets_stuck_when_only_the_signalled_are_reported(seed: int) -> None:
    source = random.Random(seed)
    depth = source.randrange(1, 40)
    rig = SendRig(free_buffers=depth, depth=depth)
    rig.number_from(NUMBER_MASK - 500)
    kinds = [rig.send, rig.send, rig.send, rig.send_copy, rig.send_refused]
    lent: list[CountedMemory] = []
    for _ in range(2000):
        if rig.queue._credits.free and source.random() < 0.6:
            if source.random() < 0.1:
                lent.append(CountedMemory())
                assert rig.queue.try_reserve()
                rig.queue.post(post_something, lent[-1])
            else:
                source.choice(kinds)()
        else:
            rig.complete_oldest_signaled()
        assert len(rig.queue) == len(rig.qp.posted)
        if not rig.queue._credits.free:
            assert any(map(rig.qp.is_signalled, rig.qp.posted)), "nothing will empty the queue"
    while rig.complete_oldest_signaled():
        pass
    rig.queue.signal_tail()
    rig.complete_oldest_signaled()
    assert len(rig.queue) == len(rig.qp.posted) == 0
    assert rig.pool.is_whole
    assert [one.releases for one in lent] == [1] * len(lent)


@pytest.mark.parametrize("depth", [1, 5, 8, 40])
async def test_waiting_senders_all_come_through(depth: int) -> None:
    rig, done = SendRig(depth=depth), 0

    async def sender() -> None:
        nonlocal done
        for _ in range(20):
            await rig.queue.reserve()
            rig.queue.post_inline(b"x")
            done += 1

    tasks = [asyncio.create_task(sender()) for _ in range(10)]
    async with asyncio.timeout(5):
        while done < 200:
            await settle()
            rig.complete_oldest_signaled()
        await asyncio.gather(*tasks)
    assert len(rig.qp.sent) == 200


# --- the last of them ---


async def test_a_tail_that_nobody_tells_of_is_closed() -> None:
    rig = SendRig(depth=16)
    for _ in range(6):
        rig.send()
    rig.queue.signal_tail()
    assert rig.qp.requests == [(WrOpcode.RDMA_WRITE, [], (0, 0), -1)]
    assert rig.signaled == [False, False, False, True, False, False, True]
    rig.queue.signal_tail()  # once is enough
    assert len(rig.qp.posted) == 7
    assert rig.complete_oldest_signaled()
    assert rig.complete_oldest_signaled()
    assert len(rig.queue) == 0


@pytest.mark.parametrize("count", [0, 4, 8])
async def test_a_tail_that_is_told_of_needs_no_closing(count: int) -> None:
    rig = SendRig(depth=16)
    for _ in range(count):
        rig.send()
    rig.queue.signal_tail()
    assert rig.qp.requests == []


async def test_the_tail_of_a_full_queue_is_closed_when_there_is_room() -> None:
    rig = SendRig(free_buffers=1, depth=10)  # of short messages, every second is signalled
    rig.send_copy()
    for _ in range(9):
        rig.send()
    assert rig.signaled == [True] + [False, True] * 4 + [False]
    rig.queue.signal_tail()
    assert rig.qp.requests == []  # the device would not take one more
    rig.complete_oldest_signaled()
    rig.queue.signal_tail()
    assert len(rig.qp.requests) == 1
    while rig.complete_oldest_signaled():
        pass
    assert len(rig.queue) == 0


async def test_a_tail_needs_no_place_of_its_own() -> None:
    rig = SendRig(depth=16)
    rig.send()
    for _ in range(15):  # of those who wait for memory, for one
        assert rig.queue.try_reserve()
    rig.queue.signal_tail()
    assert len(rig.qp.requests) == 1


async def test_a_tail_that_is_refused_says_so_and_is_closed_the_next_time() -> None:
    rig = SendRig(depth=16)
    rig.send()
    rig.qp.refuses = True
    with pytest.raises(VerbsError):
        rig.queue.signal_tail()
    assert len(rig.queue) == 1
    rig.qp.refuses = False
    rig.queue.signal_tail()
    assert len(rig.queue) == 2


# --- fences ---


async def test_what_is_posted_behind_a_fence_waits() -> None:
    rig = SendRig(free_buffers=1, depth=16)
    rig.send()
    unfence = rig.queue.fence()
    rig.send()
    rig.send_copy()
    await rig.queue.reserve()
    rig.queue.post(post_something, None)
    unfence()
    rig.send()
    fences = [bool(flags & SendFlags.FENCE) for flags in rig.qp.flags.values()]
    assert fences == [False, True, True, True, False]
    assert rig.signaled == [False, False, True, True, False]


async def test_the_last_that_is_fenced_off_takes_the_fence_away() -> None:
    rig = SendRig(depth=64)
    ends = [rig.queue.fence() for _ in range(3)]
    for end in ends:
        rig.send()
        end()
    rig.send()
    fences = [bool(flags & SendFlags.FENCE) for flags in rig.qp.flags.values()]
    assert fences == [True, True, True, False]
    end = rig.queue.fence()
    rig.send()
    assert rig.qp.flags[4] & SendFlags.FENCE
    end()


# --- who waits, and what was lent ---


async def test_waits_are_counted() -> None:
    rig = SendRig(depth=2)
    for _ in range(2):
        rig.send()
    assert rig.queue.stats.send_waits == 0
    tasks = [asyncio.create_task(rig.queue.reserve()) for _ in range(3)]
    await settle()
    assert rig.queue.stats.send_waits == 3
    rig.queue.wake_senders()
    await asyncio.gather(*tasks)
    assert rig.queue.stats.send_waits == 3


async def test_a_completion_tells_what_was_lent_for_its_own_request() -> None:
    rig = SendRig(depth=16)
    first, second = CountedMemory(), CountedMemory()
    for lent in (first, None, second, None):
        await rig.queue.reserve()
        rig.queue.post(post_something, lent)
    assert rig.queue.completed(1) is None
    assert (first.releases, second.releases) == (1, 0)
    assert rig.queue.completed(2) is second
    assert rig.queue.completed(3) is None
    assert (first.releases, second.releases) == (1, 1)


async def test_those_who_wait_for_an_end_are_let_go_and_nothing_is_given_back() -> None:
    rig = SendRig(free_buffers=1, depth=16)
    has_waiter = CountedMemory()
    rig.send()
    rig.send_copy()
    await rig.queue.reserve()
    rig.queue.post(post_something, has_waiter)
    rig.queue.stop_waiting()
    assert (has_waiter.stops, has_waiter.releases) == (1, 0)
    assert len(rig.pool.home) == 0
    rig.queue.abandon()
    assert (has_waiter.stops, has_waiter.releases) == (1, 1)
    assert rig.pool.is_whole


# --- datagrams ---


class FakeHandle:
    pointer = 0x4000


async def test_every_datagram_is_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []

    def post_ud_send(*arguments: Any) -> int:
        flags.append(arguments[5])
        return 0

    fake_lib = SimpleNamespace(aiordma_post_ud_send=post_ud_send)
    monkeypatch.setattr(queue_pair, "lib", fake_lib)
    pointer = untyped_ffi.new("struct ibv_qp *")
    sends = DatagramSendQueue(running_loop(), 64, selective=False)
    memory = bytearray(1024)
    pool = FakePool()
    address = address_and_length(memory)[0]
    sends.open(QueuePair(pointer, QueuePairCaps(64, 0)), pool, SEND_WR_ID)  # type: ignore[arg-type]
    released: list[str] = []
    borrowed: Any = SimpleNamespace(handle=FakeHandle(), release=lambda: released.append("handle"))
    for number in range(32):
        assert sends.try_reserve()
        parcel = DatagramSend(borrowed)
        if number % 2:
            parcel.buffer = PooledBuffer(pool.home, address, 99, memoryview(memory))
        sends.post_to(parcel, b"data", -1, (1, 2))
    assert len(flags) == 32
    assert all(flag & SendFlags.SIGNALED for flag in flags)
    assert len(sends) == 32
    for number in range(32):
        sends.completed(number)
    assert (len(released), len(pool.home)) == (32, 16)


async def test_a_queue_that_is_held_has_places_when_it_is_let_go() -> None:
    rig = SendRig()
    rig.queue.pause()
    assert not rig.queue.try_reserve()
    waiting = asyncio.create_task(rig.queue.reserve())
    await settle()
    assert not waiting.done()
    rig.queue.resume()
    rig.queue.resume()
    await asyncio.wait_for(waiting, timeout=5)
    assert [rig.queue.try_reserve() for _ in range(DEPTH)] == [True] * (DEPTH - 1) + [False]


# --- the lane ---


async def test_the_lane_knows_what_is_lent() -> None:
    rig = SendRig(free_buffers=3, depth=16)
    lane = rig.queue.core
    rig.send()
    rig.send_copy()
    rig.send_copy()
    assert lane.in_flight == 2
    rig.qp.refuses = True
    with pytest.raises(VerbsError):
        rig.send_copy()
    assert lane.in_flight == 2
    rig.qp.refuses = False
    rig.complete(2)
    assert lane.in_flight == 1
    rig.queue.abandon()
    assert (lane.in_flight, len(rig.queue)) == (0, 0)


async def test_the_lane_knows_who_waits_for_a_place() -> None:
    rig = SendRig()
    for _ in range(DEPTH):
        rig.send()
    tasks = [asyncio.create_task(rig.queue.reserve()) for _ in range(3)]
    await settle()
    assert rig.queue.core.waiters == 3
    tasks[0].cancel()
    await settle()
    assert rig.queue.core.waiters == 2
    rig.complete(2)
    await asyncio.gather(*tasks[1:])
    assert (rig.queue.core.waiters, rig.queue.credits) == (0, 0)


async def test_a_place_that_the_lane_has_freed_goes_to_who_waits() -> None:
    rig = SendRig()
    for _ in range(DEPTH):
        rig.send()
    waiting = asyncio.create_task(rig.queue.reserve())
    await settle()
    rig.queue.core.completed(rig.qp.posted[1])  # by C, which then leaves it for Python
    assert not waiting.done()
    rig.queue.completed(rig.qp.posted[1])
    await asyncio.wait_for(waiting, timeout=5)
    assert rig.queue.credits == 1


async def test_what_lane_and_queue_post_is_numbered_together() -> None:
    rig = SendRig(depth=16)
    rig.send()
    lane = rig.queue.core
    lane.next_number, lane.credits, lane.unsignaled = lane.next_number + 2, lane.credits - 2, 3
    rig.send()
    assert list(rig.qp.posted) == [0, 3]
    assert rig.signaled == [False, True]
    assert (len(rig.queue), rig.queue.credits) == (4, 12)


async def test_a_queue_on_fakes_takes_the_long_way() -> None:
    rig = SendRig()
    assert rig.queue.core.is_open
    assert rig.queue.core.send(b"x") == -1


async def test_a_queue_that_is_stopped_posts_nothing_in_short_and_hears_of_every_end() -> None:
    rig = SendRig()
    rig.queue.stop()
    assert (rig.queue.core.is_open, rig.queue.core.waiters) == (False, 1)


async def test_a_queue_that_is_held_has_no_place_for_the_lane_either() -> None:
    rig = SendRig()
    rig.queue.pause()
    assert rig.queue.core.credits == 0
    rig.queue.resume()
    assert rig.queue.core.credits == DEPTH
