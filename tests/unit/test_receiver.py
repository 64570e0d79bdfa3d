"""Receiver: each message is received once and in order, and its slot is posted again."""

from __future__ import annotations

import asyncio
import errno
import gc
import random
from collections import deque
from typing import Any

import pytest
from fakes.qp import (
    RECV_WR_ID,
    SLOT_SIZE,
    SLOTS,
    FakeCallbacks,
    FakePages,
    FakeReceivePoster,
    completion,
    no_polling,
)

from aiordma import BusyError, LocalClosed, PeerClosed, ReceiveOverrun, VerbsError
from aiordma._native import fast_path
from aiordma.dispatch import BusyPoll
from aiordma.enums import WcOpcode
from aiordma.loop import running_loop
from aiordma.messages import Message
from aiordma.messages.receiver import Receiver
from aiordma.qp import ConnectionStats, ReceiveRing

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

POLL_NS = 5_000


class Rig:
    """A Receiver on a ring whose slots a fake device fills."""

    def __init__(self, slots: int = SLOTS, busy_poll: BusyPoll | None = None) -> None:
        self.ring = ReceiveRing(slots, SLOT_SIZE)
        pages: Any = FakePages(None, slots * SLOT_SIZE, None)  # type: ignore[arg-type]
        self.ring.use_region(pages)
        self.pages: FakePages = pages
        self.poster = FakeReceivePoster(pages)
        self.ring.post_all(self.poster, RECV_WR_ID)
        self.callbacks = FakeCallbacks()
        self.stats = ConnectionStats()
        loop = running_loop()
        self.receiver = Receiver(
            loop, self.ring, self.callbacks, self.stats, busy_poll or no_polling()
        )

    def arrive(self, message: bytes = b"hello", **fields: Any) -> int:
        slot = self.poster.fill(message)
        self.ring.completed()
        self.receiver.message_received(slot, completion(len(message), **fields))
        return slot

    def exhaust_the_loop_budget(self) -> None:
        """Make take() find that polling has used up the time budget of the loop."""
        dispatcher = fast_path.CompletionDispatcher(lambda: None)
        dispatcher.budget_start = 0
        # 1 is not a completion queue. With an exhausted budget it is not polled.
        self.receiver.queue.set_polling(dispatcher, 1, POLL_NS)
        assert self.receiver.take() is None
        assert self.receiver.queue.preempted

    def use_checkpoints(self) -> list[bool]:
        """Add checkpoints to the loop. Return a list that gets `is_waited_for` at each."""
        waited_for: list[bool] = []

        async def checkpoint() -> None:
            waited_for.append(self.receiver.is_waited_for)

        self.receiver._checkpoint = checkpoint
        return waited_for

    def flush(self) -> None:
        """Complete all posted receives without a message."""
        while self.poster.posted:
            self.poster.posted.popleft()
            self.ring.completed()
        self.callbacks.is_drained = True
        self.receiver.wake()

    @property
    def posted(self) -> list[int]:
        assert self.ring.posted == len(self.poster.posted)
        return list(self.poster.posted)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def start_recv(rig: Rig) -> asyncio.Task[bytes]:
    task = asyncio.create_task(rig.receiver.recv())
    await settle()
    assert rig.receiver.is_waited_for
    return task


# --- one message ---


async def test_messages_are_received_in_the_order_of_arrival() -> None:
    rig = Rig()
    messages = [b"", b"one", bytes(range(SLOT_SIZE))]
    for message in messages:
        rig.arrive(message)
    assert len(rig.receiver) == 3
    assert [await rig.receiver.recv() for _ in messages] == messages
    assert len(rig.receiver) == 0


async def test_the_slot_of_a_received_message_is_posted_again_last() -> None:
    rig = Rig()
    rig.arrive()
    assert rig.posted == [1, 2, 3]
    await rig.receiver.recv()
    assert rig.posted == [1, 2, 3, 0]


async def test_recv_returns_a_copy_of_the_slot() -> None:
    rig = Rig()
    rig.arrive(b"before")
    message = await rig.receiver.recv()
    rig.pages.memory[:6] = b"after!"
    assert message == b"before"
    assert type(message) is bytes


async def test_recv_without_a_message_waits_for_one() -> None:
    rig = Rig()
    task = await start_recv(rig)
    rig.arrive(b"hello")
    assert await task == b"hello"
    assert not rig.receiver.is_waited_for
    assert rig.posted == [1, 2, 3, 0]


async def test_a_wake_up_without_a_message_lets_the_task_wait_again() -> None:
    rig = Rig()
    task = await start_recv(rig)
    for _ in range(3):
        rig.receiver.wake()
        await settle()
    assert not task.done()
    assert rig.receiver.is_waited_for
    rig.arrive()
    assert await task == b"hello"


async def test_a_write_with_immediate_data_is_an_empty_message() -> None:
    rig = Rig()
    rig.arrive(b"", opcode=WcOpcode.RECV_RDMA_WITH_IMM, imm=7)
    slot = rig.poster.fill(b"")
    rig.ring.completed()
    # Its byte_len is the length of the write, whose bytes are not in the slot.
    wc = completion(100_000, opcode=WcOpcode.RECV_RDMA_WITH_IMM, imm=0xFEEDBEEF)
    rig.receiver.message_received(slot, wc)
    assert await rig.receiver.recv() == b""
    with await rig.receiver.recv_message() as message:
        assert (len(message), bytes(message.data), message.imm) == (0, b"", 0xFEEDBEEF)
    assert rig.receiver.queue.nbytes == 0
    assert rig.posted == [2, 3, 0, 1]


async def test_a_message_has_its_immediate_data_or_its_invalidated_key() -> None:
    rig = Rig()
    rig.arrive(b"plain")
    rig.arrive(b"number", imm=0)
    rig.arrive(b"key", invalidated=0x1234)
    messages = [await rig.receiver.recv_message() for _ in range(3)]
    assert [(bytes(one.data), one.imm, one.invalidated) for one in messages] == [
        (b"plain", None, None),
        (b"number", 0, None),
        (b"key", None, 0x1234),
    ]
    for message in messages:
        message.release()


# --- into a buffer ---


async def test_a_message_is_copied_to_the_beginning_of_a_buffer() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    memory = bytearray(b"----------")
    assert await rig.receiver.recv_into(memoryview(memory)) == 5
    assert memory == b"hello-----"
    assert rig.posted == [1, 2, 3, 0]


async def test_recv_into_a_buffer_of_the_exact_size_copies_the_message() -> None:
    rig = Rig()
    for message in (b"hello", b""):
        rig.arrive(message)
        memory = bytearray(len(message))
        assert await rig.receiver.recv_into(memoryview(memory)) == len(message)
        assert bytes(memory) == message


async def test_a_message_that_does_not_fit_is_received_by_the_next_call() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.arrive(b"then")
    memory = bytearray(b"----")
    for _ in range(2):
        with pytest.raises(ValueError, match="a message of 5 bytes does not fit into 4"):
            await rig.receiver.recv_into(memoryview(memory))
    assert memory == b"----"
    assert rig.posted == [2, 3]
    assert [await rig.receiver.recv() for _ in range(2)] == [b"hello", b"then"]
    assert rig.posted == [2, 3, 0, 1]


# --- held by the user ---


async def test_a_slot_is_not_posted_while_its_message_is_held() -> None:
    rig = Rig()
    rig.arrive(b"first")
    rig.arrive(b"second")
    first = await rig.receiver.recv_message()
    second = await rig.receiver.recv_message()
    assert rig.stats.messages_held == 2
    assert rig.posted == [2, 3]
    second.release()
    assert rig.posted == [2, 3, 1]
    first.release()
    first.release()
    assert rig.posted == [2, 3, 1, 0]
    assert rig.stats.messages_held == 0


async def test_a_message_is_a_view_of_its_slot() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    with await rig.receiver.recv_message() as message:
        rig.pages.memory[0] = ord("j")
        assert bytes(message.data) == b"jello"


async def test_the_slot_of_a_dropped_message_is_posted_by_the_loop() -> None:
    rig = Rig()
    rig.arrive()
    message: Message | None = await rig.receiver.recv_message()
    del message
    gc.collect()
    assert rig.posted == [1, 2, 3]  # the loop posts it: another thread can drop the message
    await settle()
    assert rig.posted == [1, 2, 3, 0]
    assert rig.stats.messages_held == 0


async def test_the_slot_of_a_message_released_after_stop_is_not_posted() -> None:
    rig = Rig()
    rig.arrive()
    message = await rig.receiver.recv_message()
    rig.ring.stop()
    message.release()
    assert rig.posted == [1, 2, 3]
    assert rig.stats.messages_held == 0


# --- one at a time ---


async def test_a_second_task_that_receives_gets_a_busy_error() -> None:
    rig = Rig()
    task = await start_recv(rig)
    with pytest.raises(BusyError):
        await rig.receiver.recv()
    with pytest.raises(BusyError):
        await rig.receiver.recv_into(memoryview(bytearray(10)))
    with pytest.raises(BusyError):
        await rig.receiver.recv_message()
    rig.arrive(b"hello")
    with pytest.raises(BusyError):  # the message is for the task that waits
        await rig.receiver.recv()
    assert await task == b"hello"
    rig.arrive(b"then")
    assert await rig.receiver.recv() == b"then"


@pytest.mark.parametrize("arrives", [False, True])
async def test_cancelling_loses_no_message(arrives: bool) -> None:
    rig = Rig()
    task = await start_recv(rig)
    if arrives:
        rig.arrive(b"hello")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not rig.receiver.is_waited_for
    if not arrives:
        rig.arrive(b"hello")
    assert await rig.receiver.recv() == b"hello"
    assert rig.posted == [1, 2, 3, 0]


@pytest.mark.parametrize("has_checkpoints", [False, True])
async def test_after_a_failed_wait_another_task_can_wait(has_checkpoints: bool) -> None:
    class Failing:
        is_on = True
        nanoseconds = POLL_NS

        async def until(self, is_over: object, nanoseconds: int, **_: bool) -> None:
            assert nanoseconds == POLL_NS
            raise RuntimeError("no time")

    rig = Rig(busy_poll=Failing())  # type: ignore[arg-type]
    if has_checkpoints:
        rig.use_checkpoints()
    else:
        rig.exhaust_the_loop_budget()
    with pytest.raises(RuntimeError):
        await rig.receiver.recv()
    assert not rig.receiver.is_waited_for


# --- the end ---


async def test_messages_that_arrived_before_the_end_are_received_first() -> None:
    rig = Rig()
    rig.arrive(b"last")
    rig.callbacks.fail(PeerClosed("closed there"))
    rig.flush()
    assert await rig.receiver.recv() == b"last"
    for _ in range(2):
        with pytest.raises(PeerClosed):
            await rig.receiver.recv()


async def test_the_end_is_raised_after_all_receives_have_completed() -> None:
    rig = Rig()
    task = await start_recv(rig)
    rig.callbacks.fail(PeerClosed("closed there"))
    rig.receiver.wake()
    await settle()
    assert not task.done()  # there can still be messages before the flushed receives
    rig.arrive(b"last")
    assert await task == b"last"
    task = await start_recv(rig)
    rig.flush()
    with pytest.raises(PeerClosed):
        await task


async def test_after_a_local_close_nothing_is_received() -> None:
    rig = Rig()
    rig.arrive(b"too late")
    rig.callbacks.closed_here = True
    for receive in (rig.receiver.recv, rig.receiver.recv_message):
        with pytest.raises(LocalClosed):
            await receive()


async def test_a_local_close_wakes_the_waiting_task() -> None:
    rig = Rig()
    task = await start_recv(rig)
    rig.callbacks.closed_here = True
    rig.receiver.wake()
    with pytest.raises(LocalClosed):
        await task


async def test_a_message_whose_slot_cannot_be_posted_again_is_not_lost() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.arrive(b"then")
    rig.poster.refuses = True
    assert await rig.receiver.recv() == b"hello"
    [cause] = rig.callbacks.failures
    assert isinstance(cause, VerbsError)
    assert cause.errno == errno.ENOMEM
    assert await rig.receiver.recv() == b"then"
    assert rig.posted == [2, 3]


async def test_abandon_posts_the_slots_of_untaken_messages_once() -> None:
    rig = Rig()
    for number in range(4):
        rig.arrive(b"%d" % number)
    held = await rig.receiver.recv_message()
    rig.receiver.abandon()
    assert rig.posted == [1, 2, 3]
    rig.receiver.abandon()
    assert rig.posted == [1, 2, 3]
    held.release()
    assert rig.posted == [1, 2, 3, 0]


# --- spilling, where nothing holds the peer back ---


@pytest.mark.parametrize(("slots", "kept"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
async def test_messages_are_spilled_once_half_of_the_slots_are_full(slots: int, kept: int) -> None:
    rig = Rig(slots)
    rig.receiver.set_backlog(100)
    messages = [b"message %d" % number for number in range(50)]
    for number, message in enumerate(messages, 1):
        rig.arrive(message)
        assert rig.receiver.queue.spilled == max(0, number - kept)
        assert len(rig.posted) == slots - min(number, kept)
    rig.pages.memory[:] = bytes(len(rig.pages.memory))
    taken = [await rig.receiver.recv() for _ in messages]
    assert taken[kept:] == messages[kept:]  # spilled messages are copies
    assert sorted(rig.posted) == list(range(slots))
    assert rig.callbacks.failures == []


async def test_without_a_backlog_messages_can_fill_all_slots() -> None:
    rig = Rig()
    for _ in range(SLOTS):
        rig.arrive()
    assert rig.posted == []
    assert rig.receiver.queue.spilled == 0


async def test_held_messages_count_as_full_slots() -> None:
    rig = Rig()
    rig.receiver.set_backlog(100)
    for _ in range(2):
        rig.arrive()
    held = [await rig.receiver.recv_message() for _ in range(2)]
    rig.arrive(b"spilled")
    assert rig.receiver.queue.spilled == 1
    with await rig.receiver.recv_message() as message:
        assert bytes(message.data) == b"spilled"
        assert rig.stats.messages_held == 3
    assert sorted(rig.posted) == [2, 3]  # a spilled message has no slot
    assert rig.stats.messages_held == 2
    for one in held:
        one.release()
    assert sorted(rig.posted) == [0, 1, 2, 3]


async def test_more_messages_than_the_backlog_are_an_overrun() -> None:
    rig = Rig()
    rig.receiver.set_backlog(10)
    for number in range(10):
        rig.arrive(b"%d" % number)
    assert rig.callbacks.failures == []
    rig.arrive(b"10")
    assert isinstance(rig.callbacks.end, ReceiveOverrun)
    assert "more than 10 messages (recv_backlog)" in str(rig.callbacks.end)
    rig.flush()
    assert [await rig.receiver.recv() for _ in range(11)] == [b"%d" % n for n in range(11)]
    with pytest.raises(ReceiveOverrun):
        await rig.receiver.recv()


async def test_a_reader_that_keeps_up_causes_no_overrun() -> None:
    rig = Rig()
    rig.receiver.set_backlog(2)
    for number in range(100):
        rig.arrive(b"%d" % number)
        rig.arrive(b"again")
        assert await rig.receiver.recv() == b"%d" % number
        assert await rig.receiver.recv() == b"again"
    assert rig.callbacks.failures == []


async def test_a_spilled_message_that_does_not_fit_is_received_by_the_next_call() -> None:
    rig = Rig(1)
    rig.receiver.set_backlog(10)
    rig.arrive(b"hello", imm=3)
    with pytest.raises(ValueError, match="does not fit"):
        await rig.receiver.recv_into(memoryview(bytearray(1)))
    with await rig.receiver.recv_message() as message:
        assert (bytes(message.data), message.imm) == (b"hello", 3)
    assert rig.posted == [0]


async def test_a_failed_repost_while_spilling_loses_no_message() -> None:
    rig = Rig(1)
    rig.receiver.set_backlog(10)
    rig.poster.refuses = True
    rig.arrive(b"hello")
    assert len(rig.callbacks.failures) == 1
    assert await rig.receiver.recv() == b"hello"


async def test_abandon_posts_no_slot_for_a_spilled_message() -> None:
    rig = Rig()
    rig.receiver.set_backlog(10)
    for _ in range(6):
        rig.arrive()
    rig.receiver.abandon()
    assert sorted(rig.posted) == [0, 1, 2, 3]


# --- polling, and counting ---


class FakeBusyPoll:
    """A BusyPoll during which a message arrives."""

    is_on = True
    nanoseconds = POLL_NS

    def __init__(self) -> None:
        self.rig: Rig | None = None
        self.results: list[bool] = []
        self.waited_for: list[bool] = []

    async def until(self, is_over: Any, nanoseconds: int, *, preemptible: bool = False) -> None:
        assert self.rig is not None
        assert (nanoseconds, preemptible) == (POLL_NS, not self.is_on)
        self.waited_for.append(self.rig.receiver.is_waited_for)
        self.results.append(is_over())
        self.rig.arrive(b"polled")
        self.results.append(is_over())


async def test_a_message_that_polling_finds_is_received_without_a_loop_iteration() -> None:
    busy_poll = FakeBusyPoll()
    rig = busy_poll.rig = Rig(busy_poll=busy_poll)  # type: ignore[arg-type]
    rig.exhaust_the_loop_budget()
    with pytest.raises(StopIteration) as caught:
        rig.receiver.recv().send(None)
    assert caught.value.value == b"polled"
    assert (busy_poll.results, busy_poll.waited_for) == ([False, True], [True])
    rig.arrive(b"there already")
    assert await rig.receiver.recv() == b"there already"
    assert len(busy_poll.results) == 2  # recv() did not poll for that message


async def test_recv_does_not_poll_again_after_take_has_polled() -> None:
    busy_poll = FakeBusyPoll()
    rig = busy_poll.rig = Rig(busy_poll=busy_poll)  # type: ignore[arg-type]
    assert rig.receiver.take() is None
    task = await start_recv(rig)
    assert busy_poll.results == []
    rig.arrive(b"hello")
    assert await task == b"hello"


async def test_on_a_loop_with_checkpoints_recv_passes_one_before_polling() -> None:
    busy_poll = FakeBusyPoll()
    rig = busy_poll.rig = Rig(busy_poll=busy_poll)  # type: ignore[arg-type]
    checkpoints = rig.use_checkpoints()
    assert await rig.receiver.recv() == b"polled"
    assert (busy_poll.results, checkpoints) == ([False, True], [True])
    rig.arrive(b"there already")
    assert await rig.receiver.recv() == b"there already"
    assert (len(busy_poll.results), checkpoints) == (2, [True, True])
    assert not rig.receiver.is_waited_for


# --- take() ---


async def test_take_returns_a_message_that_has_arrived() -> None:
    rig = Rig()
    assert rig.receiver.take() is None
    rig.arrive(b"hello")
    rig.arrive(b"then")
    assert rig.receiver.take() == b"hello"
    assert rig.posted == [2, 3, 0]
    assert await rig.receiver.recv() == b"then"
    assert rig.receiver.take() is None


async def test_take_returns_none_while_a_task_waits() -> None:
    rig = Rig()
    task = await start_recv(rig)
    rig.arrive(b"hello")
    assert rig.receiver.take() is None
    assert await task == b"hello"


async def test_take_returns_none_on_a_loop_with_checkpoints() -> None:
    class CheckpointLoop:
        def create_future(self) -> None:
            """Make no future: no task waits."""

        async def checkpoint(self) -> None:
            """Pass a checkpoint without yielding."""

    rig = Rig()
    loop: Any = CheckpointLoop()
    receiver = Receiver(loop, rig.ring, rig.callbacks, rig.stats, no_polling())
    rig.receiver = receiver
    rig.arrive(b"hello")
    assert receiver.take() is None
    assert await receiver.recv() == b"hello"


@pytest.mark.parametrize("closed_here", [False, True])
async def test_take_after_stop_returns_messages_unless_this_side_closed(
    closed_here: bool,
) -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.callbacks.closed_here = closed_here
    rig.receiver.stop()
    assert rig.receiver.take() == (None if closed_here else b"hello")


async def test_a_failed_repost_in_take_is_reported_by_the_next_recv() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.arrive(b"then")
    rig.poster.refuses = True
    assert rig.receiver.take() == b"hello"
    assert rig.callbacks.failures == []
    assert rig.receiver.queue.notify  # the next message is notified, too
    assert await rig.receiver.recv() == b"then"
    [cause, *_] = rig.callbacks.failures
    assert isinstance(cause, VerbsError)
    assert cause.errno == errno.ENOMEM


async def test_a_failed_repost_in_take_is_reported_by_a_recv_that_waits() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.poster.refuses = True
    assert rig.receiver.take() == b"hello"
    task = asyncio.create_task(rig.receiver.recv())
    await settle()
    task.cancel()
    assert rig.callbacks.failures != []


@pytest.mark.parametrize("method", ["recv_into", "recv_message"])
async def test_recv_into_and_recv_message_poll_too(method: str) -> None:
    busy_poll = FakeBusyPoll()
    rig = busy_poll.rig = Rig(busy_poll=busy_poll)  # type: ignore[arg-type]
    dispatcher = fast_path.CompletionDispatcher(lambda: None)
    rig.receiver.queue.set_polling(dispatcher, 1, POLL_NS)  # as with the option busy_poll
    receive = rig.receiver.recv_message()
    if method == "recv_into":
        receive.close()
        receive = rig.receiver.recv_into(memoryview(bytearray(SLOT_SIZE)))  # type: ignore[assignment]
    with pytest.raises(StopIteration) as caught:
        receive.send(None)
    if method == "recv_message":
        caught.value.value.release()
    assert busy_poll.results == [False, True]


async def test_check_queue_wakes_the_waiting_task() -> None:
    rig = Rig()
    queue = rig.receiver.queue
    queue.notify = False
    task = await start_recv(rig)
    assert queue.notify  # it waits
    queue.append(rig.poster.fill(b"hello"), 5, 0, 0)
    await settle()
    assert not task.done()
    rig.receiver.check_queue()
    assert await task == b"hello"
    assert rig.callbacks.failures == []


async def test_statistics_count_messages_bytes_and_waits() -> None:
    rig = Rig()
    queue = rig.receiver.queue
    rig.arrive(b"12345")
    rig.arrive(b"123")
    assert (queue.messages, queue.nbytes) == (2, 8)
    for _ in range(2):
        await rig.receiver.recv()
    assert rig.stats.recv_waits == 0
    task = await start_recv(rig)
    assert rig.stats.recv_waits == 1
    rig.arrive(b"1")
    await task
    assert (queue.messages, queue.nbytes) == (3, 9)


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("seed", range(10))
async def test_a_long_exchange_loses_no_byte_and_no_slot(seed: int, spills: bool) -> None:
    source, rig = random.Random(seed), Rig()
    sent: deque[bytes] = deque()
    held: list[tuple[Message, bytes]] = []
    if spills:
        rig.receiver.set_backlog(1000)
    for _ in range(2000):
        if rig.poster.posted and source.random() < 0.5:
            sent.append(source.randbytes(source.randrange(SLOT_SIZE + 1)))
            rig.arrive(sent[-1])
        elif held and source.random() < 0.5:
            message, expected = held.pop(source.randrange(len(held)))
            with message:
                assert message.data == expected
        elif sent:
            expected = sent.popleft()
            match source.randrange(3):
                case 0:
                    assert await rig.receiver.recv() == expected
                case 1:
                    memory = bytearray(SLOT_SIZE)
                    length = await rig.receiver.recv_into(memoryview(memory))
                    assert memory[:length] == expected
                case 2:
                    held.append((await rig.receiver.recv_message(), expected))
        assert len(rig.receiver) == len(sent)
        assert rig.stats.messages_held == len(held)
        if not spills:
            assert len(rig.posted) == SLOTS - len(sent) - len(held)
    for message, _ in held:
        message.release()
    rig.receiver.abandon()
    assert sorted(rig.posted) == list(range(SLOTS))
    assert bool(rig.receiver.queue.spilled) is spills
