"""Receiver: messages in order, each taken once, and their buffers back to the device."""

from __future__ import annotations

import asyncio
import errno
import gc
import random
from collections import deque
from typing import Any

import pytest
from qp_fakes import (
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

# Nanoseconds of polling.
TIME_LIMIT = 5_000


class Rig:
    """A Receiver on a ring that a fake device fills."""

    def __init__(self, slots: int = SLOTS, busy: BusyPoll | None = None) -> None:
        self.ring = ReceiveRing(slots, SLOT_SIZE)
        pages: Any = FakePages(None, slots * SLOT_SIZE, None)  # type: ignore[arg-type]
        self.ring.use_region(pages)
        self.pages: FakePages = pages
        self.queue = FakeReceivePoster(pages)
        self.ring.post_all(self.queue, RECV_WR_ID)
        self.owner = FakeCallbacks()
        self.stats = ConnectionStats()
        loop = running_loop()
        self.receiver = Receiver(loop, self.ring, self.owner, self.stats, busy or no_polling())

    def arrive(self, message: bytes = b"hello", **fields: Any) -> int:
        slot = self.queue.fill(message)
        self.ring.completed()
        self.receiver.message_received(slot, completion(len(message), **fields))
        return slot

    def use_up_the_turn(self) -> None:
        """Have take() look for a message, and find that the loop is due."""
        completions = fast_path.CompletionDispatcher(lambda: None)
        completions.budget_start = 0
        # There is no queue: in a turn that is used up nobody looks there.
        self.receiver.queue.set_polling(completions, 1, TIME_LIMIT)
        assert self.receiver.take() is None
        assert self.receiver.queue.preempted

    def owe_checkpoints(self) -> list[bool]:
        """Have a loop that is owed checkpoints: at each, whether somebody waits."""
        seen: list[bool] = []

        async def checkpoint() -> None:
            seen.append(self.receiver.is_waited_for)

        self.receiver._checkpoint = checkpoint
        return seen

    def flush(self) -> None:
        """All that is posted comes back empty."""
        while self.queue.posted:
            self.queue.posted.popleft()
            self.ring.completed()
        self.owner.is_drained = True
        self.receiver.wake()

    @property
    def posted(self) -> list[int]:
        assert self.ring.posted == len(self.queue.posted)
        return list(self.queue.posted)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def receiving(rig: Rig) -> asyncio.Task[bytes]:
    task = asyncio.create_task(rig.receiver.recv())
    await settle()
    assert rig.receiver.is_waited_for
    return task


# --- one message ---


async def test_messages_are_taken_in_the_order_they_came() -> None:
    rig = Rig()
    messages = [b"", b"one", bytes(range(SLOT_SIZE))]
    for message in messages:
        rig.arrive(message)
    assert len(rig.receiver) == 3
    assert [await rig.receiver.recv() for _ in messages] == messages
    assert len(rig.receiver) == 0


async def test_the_slot_of_a_taken_message_goes_to_the_end_of_the_queue() -> None:
    rig = Rig()
    rig.arrive()
    assert rig.posted == [1, 2, 3]
    await rig.receiver.recv()
    assert rig.posted == [1, 2, 3, 0]


async def test_what_was_taken_is_a_copy() -> None:
    rig = Rig()
    rig.arrive(b"before")
    message = await rig.receiver.recv()
    rig.pages.memory[:6] = b"after!"
    assert message == b"before"
    assert type(message) is bytes


async def test_who_came_first_waits_for_the_message() -> None:
    rig = Rig()
    task = await receiving(rig)
    rig.arrive(b"hello")
    assert await task == b"hello"
    assert not rig.receiver.is_waited_for
    assert rig.posted == [1, 2, 3, 0]


async def test_a_wake_up_without_news_is_slept_through() -> None:
    rig = Rig()
    task = await receiving(rig)
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
    slot = rig.queue.fill(b"")
    rig.ring.completed()
    # Its byte_len tells of what was written elsewhere.
    wc = completion(100_000, opcode=WcOpcode.RECV_RDMA_WITH_IMM, imm=0xFEEDBEEF)
    rig.receiver.message_received(slot, wc)
    assert await rig.receiver.recv() == b""
    with await rig.receiver.recv_message() as message:
        assert (len(message), bytes(message.data), message.imm) == (0, b"", 0xFEEDBEEF)
    assert rig.receiver.queue.nbytes == 0
    assert rig.posted == [2, 3, 0, 1]


async def test_what_comes_beside_the_data() -> None:
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


async def test_a_buffer_of_just_the_size_will_do() -> None:
    rig = Rig()
    for message in (b"hello", b""):
        rig.arrive(message)
        memory = bytearray(len(message))
        assert await rig.receiver.recv_into(memoryview(memory)) == len(message)
        assert bytes(memory) == message


async def test_a_message_that_does_not_fit_comes_next() -> None:
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


async def test_a_message_is_seen_where_it_arrived() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    with await rig.receiver.recv_message() as message:
        rig.pages.memory[0] = ord("j")
        assert bytes(message.data) == b"jello"


async def test_a_message_that_is_dropped_gives_its_slot_back_soon() -> None:
    rig = Rig()
    rig.arrive()
    message: Message | None = await rig.receiver.recv_message()
    del message
    gc.collect()
    assert rig.posted == [1, 2, 3]  # not before the loop gets to it: it may be another thread
    await settle()
    assert rig.posted == [1, 2, 3, 0]
    assert rig.stats.messages_held == 0


async def test_a_message_that_is_released_after_the_end_is_not_posted() -> None:
    rig = Rig()
    rig.arrive()
    message = await rig.receiver.recv_message()
    rig.ring.stop()
    message.release()
    assert rig.posted == [1, 2, 3]
    assert rig.stats.messages_held == 0


# --- one at a time ---


async def test_two_tasks_may_not_wait_for_messages() -> None:
    rig = Rig()
    task = await receiving(rig)
    with pytest.raises(BusyError):
        await rig.receiver.recv()
    with pytest.raises(BusyError):
        await rig.receiver.recv_into(memoryview(bytearray(10)))
    with pytest.raises(BusyError):
        await rig.receiver.recv_message()
    rig.arrive(b"hello")
    with pytest.raises(BusyError):  # it is the other's, who was there first
        await rig.receiver.recv()
    assert await task == b"hello"
    rig.arrive(b"then")
    assert await rig.receiver.recv() == b"then"


@pytest.mark.parametrize("arrives", [False, True])
async def test_cancelling_loses_no_message(arrives: bool) -> None:
    rig = Rig()
    task = await receiving(rig)
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


@pytest.mark.parametrize("owes_checkpoints", [False, True])
async def test_a_failing_wait_leaves_the_place_free(owes_checkpoints: bool) -> None:
    class Failing:
        is_on = True
        nanoseconds = TIME_LIMIT

        async def until(self, is_over: object, nanoseconds: int, **_: bool) -> None:
            assert nanoseconds == TIME_LIMIT
            raise RuntimeError("no time")

    rig = Rig(busy=Failing())  # type: ignore[arg-type]
    if owes_checkpoints:
        rig.owe_checkpoints()
    else:
        rig.use_up_the_turn()
    with pytest.raises(RuntimeError):
        await rig.receiver.recv()
    assert not rig.receiver.is_waited_for


# --- the end ---


async def test_messages_that_came_before_the_end_come_first() -> None:
    rig = Rig()
    rig.arrive(b"last")
    rig.owner.fail(PeerClosed("closed there"))
    rig.flush()
    assert await rig.receiver.recv() == b"last"
    for _ in range(2):
        with pytest.raises(PeerClosed):
            await rig.receiver.recv()


async def test_who_waits_hears_of_the_end_when_all_was_seen() -> None:
    rig = Rig()
    task = await receiving(rig)
    rig.owner.fail(PeerClosed("closed there"))
    rig.receiver.wake()
    await settle()
    assert not task.done()  # messages may still be among what is flushed
    rig.arrive(b"last")
    assert await task == b"last"
    task = await receiving(rig)
    rig.flush()
    with pytest.raises(PeerClosed):
        await task


async def test_after_closing_here_nothing_is_received() -> None:
    rig = Rig()
    rig.arrive(b"too late")
    rig.owner.closed_here = True
    for receive in (rig.receiver.recv, rig.receiver.recv_message):
        with pytest.raises(LocalClosed):
            await receive()


async def test_closing_here_lets_the_waiting_task_go() -> None:
    rig = Rig()
    task = await receiving(rig)
    rig.owner.closed_here = True
    rig.receiver.wake()
    with pytest.raises(LocalClosed):
        await task


async def test_a_message_whose_slot_is_refused_is_not_lost() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.arrive(b"then")
    rig.queue.refuses = True
    assert await rig.receiver.recv() == b"hello"
    [cause] = rig.owner.breaks
    assert isinstance(cause, VerbsError)
    assert cause.errno == errno.ENOMEM
    assert await rig.receiver.recv() == b"then"
    assert rig.posted == [2, 3]


async def test_what_nobody_takes_goes_back_once() -> None:
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


# --- where nothing holds the peer back ---


@pytest.mark.parametrize(("slots", "kept"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
async def test_messages_are_copied_away_once_half_of_the_slots_are_full(
    slots: int, kept: int
) -> None:
    rig = Rig(slots)
    rig.receiver.set_backlog(100)
    messages = [b"message %d" % number for number in range(50)]
    for number, message in enumerate(messages, 1):
        rig.arrive(message)
        assert rig.receiver.queue.spilled == max(0, number - kept)
        assert len(rig.posted) == slots - min(number, kept)
    rig.pages.memory[:] = bytes(len(rig.pages.memory))
    taken = [await rig.receiver.recv() for _ in messages]
    assert taken[kept:] == messages[kept:]  # those copied are copies
    assert sorted(rig.posted) == list(range(slots))
    assert rig.owner.breaks == []


async def test_without_spilling_the_slots_run_out() -> None:
    rig = Rig()
    for _ in range(SLOTS):
        rig.arrive()
    assert rig.posted == []
    assert rig.receiver.queue.spilled == 0


async def test_messages_that_are_held_count_as_full_slots() -> None:
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
    assert sorted(rig.posted) == [2, 3]  # it had no slot to give back
    assert rig.stats.messages_held == 2
    for one in held:
        one.release()
    assert sorted(rig.posted) == [0, 1, 2, 3]


async def test_more_than_the_backlog_is_an_overrun() -> None:
    rig = Rig()
    rig.receiver.set_backlog(10)
    for number in range(10):
        rig.arrive(b"%d" % number)
    assert rig.owner.breaks == []
    rig.arrive(b"10")
    assert isinstance(rig.owner.end, ReceiveOverrun)
    assert "more than 10 messages (recv_backlog)" in str(rig.owner.end)
    rig.flush()
    assert [await rig.receiver.recv() for _ in range(11)] == [b"%d" % n for n in range(11)]
    with pytest.raises(ReceiveOverrun):
        await rig.receiver.recv()


async def test_a_reader_that_keeps_up_overruns_nothing() -> None:
    rig = Rig()
    rig.receiver.set_backlog(2)
    for number in range(100):
        rig.arrive(b"%d" % number)
        rig.arrive(b"again")
        assert await rig.receiver.recv() == b"%d" % number
        assert await rig.receiver.recv() == b"again"
    assert rig.owner.breaks == []


async def test_a_spilled_message_that_does_not_fit_comes_next() -> None:
    rig = Rig(1)
    rig.receiver.set_backlog(10)
    rig.arrive(b"hello", imm=3)
    with pytest.raises(ValueError, match="does not fit"):
        await rig.receiver.recv_into(memoryview(bytearray(1)))
    with await rig.receiver.recv_message() as message:
        assert (bytes(message.data), message.imm) == (b"hello", 3)
    assert rig.posted == [0]


async def test_a_slot_refused_while_spilling_loses_no_message() -> None:
    rig = Rig(1)
    rig.receiver.set_backlog(10)
    rig.queue.refuses = True
    rig.arrive(b"hello")
    assert len(rig.owner.breaks) == 1
    assert await rig.receiver.recv() == b"hello"


async def test_what_was_copied_away_has_no_slot_to_go_back() -> None:
    rig = Rig()
    rig.receiver.set_backlog(10)
    for _ in range(6):
        rig.arrive()
    rig.receiver.abandon()
    assert sorted(rig.posted) == [0, 1, 2, 3]


# --- polling, and counting ---


class Looking:
    """A BusyPoll that makes a message arrive while it looks."""

    is_on = True
    nanoseconds = TIME_LIMIT

    def __init__(self) -> None:
        self.rig: Rig | None = None
        self.looks: list[bool] = []
        self.waited_for: list[bool] = []

    async def until(self, is_over: Any, nanoseconds: int, *, preemptible: bool = False) -> None:
        assert self.rig is not None
        assert (nanoseconds, preemptible) == (TIME_LIMIT, not self.is_on)
        self.waited_for.append(self.rig.receiver.is_waited_for)
        self.looks.append(is_over())
        self.rig.arrive(b"polled")
        self.looks.append(is_over())


async def test_a_message_that_polling_finds_takes_no_turn_of_the_loop() -> None:
    busy = Looking()
    rig = busy.rig = Rig(busy=busy)  # type: ignore[arg-type]
    rig.use_up_the_turn()
    with pytest.raises(StopIteration) as caught:
        rig.receiver.recv().send(None)
    assert caught.value.value == b"polled"
    assert (busy.looks, busy.waited_for) == ([False, True], [True])
    rig.arrive(b"there already")
    assert await rig.receiver.recv() == b"there already"
    assert len(busy.looks) == 2  # for that nobody looked


async def test_where_the_turn_is_not_used_up_take_has_looked_already() -> None:
    busy = Looking()
    rig = busy.rig = Rig(busy=busy)  # type: ignore[arg-type]
    assert rig.receiver.take() is None
    task = await receiving(rig)
    assert busy.looks == []
    rig.arrive(b"hello")
    assert await task == b"hello"


async def test_where_checkpoints_are_owed_one_comes_before_polling() -> None:
    busy = Looking()
    rig = busy.rig = Rig(busy=busy)  # type: ignore[arg-type]
    checkpoints = rig.owe_checkpoints()
    assert await rig.receiver.recv() == b"polled"
    assert (busy.looks, checkpoints) == ([False, True], [True])
    rig.arrive(b"there already")
    assert await rig.receiver.recv() == b"there already"
    assert (len(busy.looks), checkpoints) == (2, [True, True])
    assert not rig.receiver.is_waited_for


# --- without waiting ---


async def test_what_is_there_is_taken_at_once() -> None:
    rig = Rig()
    assert rig.receiver.take() is None
    rig.arrive(b"hello")
    rig.arrive(b"then")
    assert rig.receiver.take() == b"hello"
    assert rig.posted == [2, 3, 0]
    assert await rig.receiver.recv() == b"then"
    assert rig.receiver.take() is None


async def test_nothing_is_taken_from_under_the_task_that_waits() -> None:
    rig = Rig()
    task = await receiving(rig)
    rig.arrive(b"hello")
    assert rig.receiver.take() is None
    assert await task == b"hello"


async def test_nothing_is_taken_at_once_where_a_checkpoint_is_owed() -> None:
    class Owing:
        def create_future(self) -> None:
            """Nobody waits."""

        async def checkpoint(self) -> None:
            """Nor here."""

    rig = Rig()
    loop: Any = Owing()
    receiver = Receiver(loop, rig.ring, rig.owner, rig.stats, no_polling())
    rig.receiver = receiver
    rig.arrive(b"hello")
    assert receiver.take() is None
    assert await receiver.recv() == b"hello"


@pytest.mark.parametrize("closed_here", [False, True])
async def test_after_the_end_what_is_there_is_taken_unless_it_was_closed_here(
    closed_here: bool,
) -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.owner.closed_here = closed_here
    rig.receiver.stop()
    assert rig.receiver.take() == (None if closed_here else b"hello")


async def test_a_slot_that_is_refused_as_its_message_is_taken_at_once_is_told_by_the_next() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.arrive(b"then")
    rig.queue.refuses = True
    assert rig.receiver.take() == b"hello"
    assert rig.owner.breaks == []
    assert rig.receiver.queue.notify  # the next that arrives is told, too
    assert await rig.receiver.recv() == b"then"
    [cause, *_] = rig.owner.breaks
    assert isinstance(cause, VerbsError)
    assert cause.errno == errno.ENOMEM


async def test_a_slot_that_is_refused_is_told_though_nothing_more_arrives() -> None:
    rig = Rig()
    rig.arrive(b"hello")
    rig.queue.refuses = True
    assert rig.receiver.take() == b"hello"
    task = asyncio.create_task(rig.receiver.recv())
    await settle()
    task.cancel()
    assert rig.owner.breaks != []


@pytest.mark.parametrize("how", ["recv_into", "recv_message"])
async def test_who_receives_in_another_way_looks_too(how: str) -> None:
    busy = Looking()
    rig = busy.rig = Rig(busy=busy)  # type: ignore[arg-type]
    completions = fast_path.CompletionDispatcher(lambda: None)
    rig.receiver.queue.set_polling(completions, 1, TIME_LIMIT)  # as with busy_poll
    receive = rig.receiver.recv_message()
    if how == "recv_into":
        receive.close()
        receive = rig.receiver.recv_into(memoryview(bytearray(SLOT_SIZE)))  # type: ignore[assignment]
    with pytest.raises(StopIteration) as caught:
        receive.send(None)
    if how == "recv_message":
        caught.value.value.release()
    assert busy.looks == [False, True]


async def test_to_look_has_the_waiting_task_go_on_and_asks_for_no_more_than_it_needs() -> None:
    rig = Rig()
    arrivals = rig.receiver.queue
    arrivals.notify = False
    task = await receiving(rig)
    assert arrivals.notify  # it waits
    arrivals.append(rig.queue.fill(b"hello"), 5, 0, 0)
    await settle()
    assert not task.done()
    rig.receiver.check_queue()
    assert await task == b"hello"
    assert rig.owner.breaks == []


async def test_the_numbers() -> None:
    rig = Rig()
    arrivals = rig.receiver.queue
    rig.arrive(b"12345")
    rig.arrive(b"123")
    assert (arrivals.messages, arrivals.nbytes) == (2, 8)
    for _ in range(2):
        await rig.receiver.recv()
    assert rig.stats.recv_waits == 0
    task = await receiving(rig)
    assert rig.stats.recv_waits == 1
    rig.arrive(b"1")
    await task
    assert (arrivals.messages, arrivals.nbytes) == (3, 9)


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("seed", range(10))
async def test_a_long_exchange_keeps_every_byte_and_every_slot(seed: int, spills: bool) -> None:
    source, rig = random.Random(seed), Rig()
    sent: deque[bytes] = deque()
    held: list[tuple[Message, bytes]] = []
    if spills:
        rig.receiver.set_backlog(1000)
    for _ in range(2000):
        if rig.queue.posted and source.random() < 0.5:
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
