"""SendQueue: send credits, numbers of requests, and buffers until their requests complete."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.qp import SEND_WR_ID, CountedMemory, FakePool, SendRig
from simulator.queues import untyped_ffi

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


async def test_immediate_data_is_posted_with_the_message() -> None:
    rig = SendRig(free_buffers=1)
    await rig.queue.reserve()
    rig.queue.post_inline(b"one", 7)
    await rig.queue.reserve()
    buffer = rig.queue.try_buffer(100)
    assert buffer is not None
    rig.queue.post_copy(buffer, b"two", 0)
    assert rig.qp.sent == [(b"one", 7), (b"two", 0)]


async def test_a_full_queue_has_no_credit() -> None:
    rig = SendRig()
    for _ in range(DEPTH):
        rig.send()
    assert not rig.queue.try_reserve()
    rig.complete()
    assert rig.queue.try_reserve()
    assert not rig.queue.try_reserve()


async def test_senders_wait_for_a_credit_in_order() -> None:
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


async def test_a_cancelled_sender_takes_no_credit() -> None:
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


async def test_unreserve_releases_the_credit() -> None:
    rig = SendRig()
    for _ in range(DEPTH):
        assert rig.queue.try_reserve()
    rig.queue.unreserve()
    assert rig.queue.try_reserve()
    assert not rig.queue.try_reserve()


async def test_a_completion_completes_all_requests_before_it() -> None:
    rig = SendRig(free_buffers=DEPTH)
    for _ in range(DEPTH):
        rig.send_copy()
    assert len(rig.pool.free) == 0
    rig.complete(3)
    assert (len(rig.queue), len(rig.pool.free)) == (1, 3)
    rig.complete()
    assert len(rig.queue) == 0
    assert rig.pool.is_whole


async def test_a_buffer_is_not_released_before_its_completion() -> None:
    rig = SendRig(free_buffers=2)
    rig.send_copy()
    rig.send()
    rig.send_copy()
    rig.complete()
    assert len(rig.pool.free) == 1
    rig.complete()
    assert len(rig.pool.free) == 1
    rig.complete()
    assert rig.pool.is_whole


async def test_after_a_refused_request_the_caller_has_its_credit_and_buffer() -> None:
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


async def test_an_interrupt_after_posting_keeps_the_memory() -> None:
    """A Ctrl-C comes right after the device has accepted a request."""
    memory = CountedMemory()
    rig = SendRig()

    def post_and_be_interrupted(qp: Any, wr_id: int, flags: int) -> None:
        post_something(qp, wr_id, flags)
        raise KeyboardInterrupt

    await rig.queue.reserve()
    with pytest.raises(KeyboardInterrupt):
        rig.queue.post(post_and_be_interrupted, memory)
    assert (len(rig.queue), memory.releases) == (1, 0)
    rig.send()
    rig.complete()
    assert (len(rig.queue), memory.releases) == (1, 1)
    rig.complete()
    assert (len(rig.queue), memory.releases) == (0, 1)


async def test_a_missing_buffer_is_acquired_from_the_pool() -> None:
    async def call(function: Callable[[], None]) -> None:
        function()

    rig = SendRig()
    assert rig.queue.try_buffer(100) is None
    buffer = await rig.queue.buffer(100, call)
    assert len(buffer.view) == 1024
    assert rig.pool.requested == [(100, call)]


async def test_a_pool_that_cannot_grow_raises() -> None:
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
    assert (len(rig.queue), len(rig.pool.free)) == (1, 3)
    rig.complete()
    assert len(rig.queue) == 0
    assert rig.pool.is_whole
    assert NUMBER_MASK == (1 << 31) - 1


async def test_abandon_releases_every_buffer_once() -> None:
    rig = SendRig(free_buffers=3)
    for _ in range(3):
        rig.send_copy()
    rig.complete()
    rig.queue.abandon()
    assert len(rig.queue) == 0
    assert rig.pool.is_whole
    rig.queue.abandon()
    assert rig.pool.is_whole


async def test_a_kept_buffer_is_released_by_abandon() -> None:
    rig = SendRig(free_buffers=2)
    buffer = rig.queue.try_buffer(100)
    assert buffer is not None
    rig.queue.keep_until_destroyed(buffer)
    rig.send_copy()
    assert len(rig.queue) == 1
    rig.complete()
    assert (len(rig.queue), len(rig.pool.free)) == (0, 1)
    rig.queue.abandon()
    assert rig.pool.is_whole
    rig.queue.abandon()
    assert rig.pool.is_whole


async def test_a_completion_after_abandon_changes_nothing() -> None:
    rig = SendRig(free_buffers=1)
    rig.send_copy()
    rig.queue.abandon()
    rig.complete()
    assert rig.pool.is_whole


@pytest.mark.parametrize("method", ["abandon", "wake_senders"])
async def test_at_the_end_every_waiting_sender_is_woken(method: str) -> None:
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
async def test_a_long_exchange_loses_no_credit_and_no_buffer(seed: int) -> None:
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


# --- selective signaling ---


@pytest.mark.parametrize(("depth", "every"), [(1, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 16)])
async def test_one_inline_message_per_interval_is_signaled(depth: int, every: int) -> None:
    rig = SendRig(depth=depth)
    for _ in range(depth):
        rig.send()
    assert rig.signaled == [(number + 1) % every == 0 for number in range(depth)]


async def test_requests_with_memory_are_always_signaled() -> None:
    rig = SendRig(free_buffers=3, depth=64)
    for _ in range(3):
        rig.send_copy()
    await rig.queue.reserve()
    rig.queue.post(post_something, CountedMemory())
    assert rig.signaled == [True] * 4


async def test_the_interval_starts_again_after_a_signaled_request() -> None:
    rig = SendRig(free_buffers=1, depth=16)
    for _ in range(3):
        rig.send()
    rig.send_copy()
    for _ in range(4):
        rig.send()
    assert rig.signaled == [False] * 3 + [True] + [False] * 3 + [True]


async def test_a_refused_message_does_not_count_for_the_interval() -> None:
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


async def test_without_selective_signaling_every_message_is_signaled() -> None:
    rig = SendRig(depth=64, selective=False)
    for _ in range(64):
        rig.send()
    assert rig.signaled == [True] * 64


async def test_without_selective_signaling_a_read_can_end_after_a_later_write() -> None:
    """This happens on Linux's siw. Its memory is released at its end, its credit only once."""
    rig = SendRig(depth=4, selective=False)
    read, write = CountedMemory(), CountedMemory()
    for memory, reads in ((read, True), (write, False)):
        assert rig.queue.try_reserve()
        rig.queue.post(post_something, memory, is_read=reads)
    assert rig.queue.completed(1) is write
    assert (read.releases, write.releases) == (0, 1)
    rig.send()
    assert rig.queue.completed(2) is None
    assert (read.releases, rig.queue.core.in_flight, rig.queue.credits) == (0, 1, 4)
    assert rig.queue.completed(0) is read
    assert (read.releases, rig.queue.core.in_flight, rig.queue.credits) == (1, 0, 4)
    assert len(rig.queue) == 0


async def test_one_completion_reports_the_unsignaled_requests_before_it() -> None:
    rig = SendRig(depth=16)
    for _ in range(16):
        rig.send()
    assert not rig.queue.try_reserve()
    rig.complete_oldest_signaled()
    assert len(rig.queue) == 12
    assert [rig.queue.try_reserve() for _ in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("seed", range(20))
async def test_no_sender_waits_for_ever_with_selective_signaling(seed: int) -> None:
    source = random.Random(seed)
    depth = source.randrange(1, 40)
    rig = SendRig(free_buffers=depth, depth=depth)
    rig.number_from(NUMBER_MASK - 500)
    kinds = [rig.send, rig.send, rig.send, rig.send_copy, rig.send_refused]
    memory: list[CountedMemory] = []
    for _ in range(2000):
        if rig.queue._credits.free and source.random() < 0.6:
            if source.random() < 0.1:
                memory.append(CountedMemory())
                assert rig.queue.try_reserve()
                rig.queue.post(post_something, memory[-1])
            else:
                source.choice(kinds)()
        else:
            rig.complete_oldest_signaled()
        assert len(rig.queue) == len(rig.qp.posted)
        if not rig.queue._credits.free:
            assert any(map(rig.qp.is_signalled, rig.qp.posted)), "no completion will free a credit"
    while rig.complete_oldest_signaled():
        pass
    rig.queue.signal_tail()
    rig.complete_oldest_signaled()
    assert len(rig.queue) == len(rig.qp.posted) == 0
    assert rig.pool.is_whole
    assert [one.releases for one in memory] == [1] * len(memory)


@pytest.mark.parametrize("depth", [1, 5, 8, 40])
async def test_all_waiting_senders_get_a_credit(depth: int) -> None:
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


# --- signal_tail() ---


async def test_signal_tail_posts_a_request_after_unsignaled_ones() -> None:
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
async def test_signal_tail_after_a_signaled_request_posts_nothing(count: int) -> None:
    rig = SendRig(depth=16)
    for _ in range(count):
        rig.send()
    rig.queue.signal_tail()
    assert rig.qp.requests == []


async def test_signal_tail_on_a_full_queue_posts_when_there_is_room() -> None:
    rig = SendRig(free_buffers=1, depth=10)  # every second inline message is signaled
    rig.send_copy()
    for _ in range(9):
        rig.send()
    assert rig.signaled == [True] + [False, True] * 4 + [False]
    rig.queue.signal_tail()
    assert rig.qp.requests == []  # the queue is full
    rig.complete_oldest_signaled()
    rig.queue.signal_tail()
    assert len(rig.qp.requests) == 1
    while rig.complete_oldest_signaled():
        pass
    assert len(rig.queue) == 0


async def test_signal_tail_needs_no_credit() -> None:
    rig = SendRig(depth=16)
    rig.send()
    for _ in range(15):  # credits of tasks that wait for a buffer, for example
        assert rig.queue.try_reserve()
    rig.queue.signal_tail()
    assert len(rig.qp.requests) == 1


async def test_a_refused_signal_tail_raises_and_can_be_repeated() -> None:
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


async def test_requests_are_fenced_between_fence_and_unfence() -> None:
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


async def test_requests_are_fenced_until_the_last_fence_ends() -> None:
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


# --- waiters and memory ---


async def test_waits_for_credits_are_counted() -> None:
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


async def test_completed_returns_the_memory_of_its_own_request() -> None:
    rig = SendRig(depth=16)
    first, second = CountedMemory(), CountedMemory()
    for memory in (first, None, second, None):
        await rig.queue.reserve()
        rig.queue.post(post_something, memory)
    assert rig.queue.completed(1) is None
    assert (first.releases, second.releases) == (1, 0)
    assert rig.queue.completed(2) is second
    assert rig.queue.completed(3) is None
    assert (first.releases, second.releases) == (1, 1)


async def test_stop_waiting_wakes_waiters_and_releases_nothing() -> None:
    rig = SendRig(free_buffers=1, depth=16)
    has_waiter = CountedMemory()
    rig.send()
    rig.send_copy()
    await rig.queue.reserve()
    rig.queue.post(post_something, has_waiter)
    rig.queue.stop_waiting()
    assert (has_waiter.stops, has_waiter.releases) == (1, 0)
    assert len(rig.pool.free) == 0
    rig.queue.abandon()
    assert (has_waiter.stops, has_waiter.releases) == (1, 1)
    assert rig.pool.is_whole


# --- datagrams ---


class FakeHandle:
    pointer = 0x4000


async def test_every_datagram_is_signaled(monkeypatch: pytest.MonkeyPatch) -> None:
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
    handle_reference: Any = SimpleNamespace(
        handle=FakeHandle(), release=lambda: released.append("handle")
    )
    for number in range(32):
        assert sends.try_reserve()
        datagram_send = DatagramSend(handle_reference)
        if number % 2:
            datagram_send.buffer = PooledBuffer(pool.free, address, 99, memoryview(memory))
        sends.post_to(datagram_send, b"data", -1, (1, 2))
    assert len(flags) == 32
    assert all(flag & SendFlags.SIGNALED for flag in flags)
    assert len(sends) == 32
    for number in range(32):
        sends.completed(number)
    assert (len(released), len(pool.free)) == (32, 16)


async def test_a_paused_queue_has_credits_after_resume() -> None:
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


# --- the SendQueueCore ---


async def test_the_core_counts_requests_with_memory() -> None:
    rig = SendRig(free_buffers=3, depth=16)
    core = rig.queue.core
    rig.send()
    rig.send_copy()
    rig.send_copy()
    assert core.in_flight == 2
    rig.qp.refuses = True
    with pytest.raises(VerbsError):
        rig.send_copy()
    assert core.in_flight == 2
    rig.qp.refuses = False
    rig.complete(2)
    assert core.in_flight == 1
    rig.queue.abandon()
    assert (core.in_flight, len(rig.queue)) == (0, 0)


async def test_the_core_counts_tasks_that_wait_for_a_credit() -> None:
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


async def test_a_credit_freed_by_the_core_goes_to_a_waiting_task() -> None:
    rig = SendRig()
    for _ in range(DEPTH):
        rig.send()
    waiting = asyncio.create_task(rig.queue.reserve())
    await settle()
    rig.queue.core.completed(rig.qp.posted[1])  # as C does before it passes the completion on
    assert not waiting.done()
    rig.queue.completed(rig.qp.posted[1])
    await asyncio.wait_for(waiting, timeout=5)
    assert rig.queue.credits == 1


async def test_requests_of_core_and_queue_share_the_numbers() -> None:
    rig = SendRig(depth=16)
    rig.send()
    core = rig.queue.core
    core.next_number, core.credits, core.unsignaled = core.next_number + 2, core.credits - 2, 3
    rig.send()
    assert list(rig.qp.posted) == [0, 3]
    assert rig.signaled == [False, True]
    assert (len(rig.queue), rig.queue.credits) == (4, 12)


async def test_a_core_without_a_queue_pair_takes_the_slow_path() -> None:
    rig = SendRig()
    assert rig.queue.core.is_open
    assert rig.queue.core.send(b"x") == -1


async def test_stop_closes_the_core_and_reports_every_completion() -> None:
    rig = SendRig()
    rig.queue.stop()
    assert (rig.queue.core.is_open, rig.queue.core.waiters) == (False, 1)


async def test_a_paused_queue_has_no_credits_for_the_core() -> None:
    rig = SendRig()
    rig.queue.pause()
    assert rig.queue.core.credits == 0
    rig.queue.resume()
    assert rig.queue.core.credits == DEPTH
