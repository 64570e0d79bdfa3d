"""What happens for each message in C, on a provider of verbs that is no device."""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verbs_fakes import NUMBER_MASK, RECEIVE, FakeVerbs

from aiordma import VerbsError
from aiordma._native import ffi
from aiordma._native._fast_path import (
    LOOP_BUDGET_NS,
    CompletionDispatcher,
    ReceiveQueue,
    ReceiveRingCore,
    SendQueueCore,
)
from aiordma.enums import SendFlags, WcOpcode, WcStatus

pytestmark = pytest.mark.usefixtures("time_limit")

KEY = 5
FIRST = KEY << 32
SLOTS, SLOT_SIZE = 4, 32
LKEY = 77
S = 1_000_000_000
FLUSHED = WcStatus.WR_FLUSH_ERR
INLINE, SIGNALED, FENCE = SendFlags.INLINE, SendFlags.SIGNALED, SendFlags.FENCE

REFUSALS = pytest.mark.parametrize(
    ("result", "code", "error"),
    [
        (errno.ENOMEM, 0, errno.ENOMEM),
        (-errno.ENOMEM, 0, errno.ENOMEM),
        (-1, errno.EINVAL, errno.EINVAL),
        (errno.EINVAL, errno.EAGAIN, errno.EINVAL),
        (-1, 0, 1),  # it has an errno that was there before, or none
    ],
)


# --- SendLane ---


def lane_of(
    verbs: FakeVerbs, depth: int = 8, interval: int = 4, max_inline: int = 16
) -> SendQueueCore:
    lane = SendQueueCore(depth, interval, max_inline)
    lane.open(verbs, verbs.qp_cell, FIRST)
    return lane


def state_of(lane: SendQueueCore) -> tuple[int, ...]:
    numbers = (
        lane.next_number,
        lane.oldest_pending,
        lane.credits,
        lane.unsignaled,
        lane.fence_flags,
        lane.in_flight,
    )
    return (*numbers, lane.waiters, lane.messages, lane.nbytes)


def test_a_short_message_is_posted_inline(verbs: FakeVerbs) -> None:
    lane = lane_of(verbs)
    messages = [b"hello", b"", bytes(range(16))]
    assert [lane.send(message) for message in messages] == [0, 0, 0]
    posts = verbs.posts
    assert [post.data for post in posts] == messages
    assert [post.wr_id for post in posts] == [FIRST, FIRST + 1, FIRST + 2]
    assert [post.num_sge for post in posts] == [1, 0, 1]
    assert {post.kind for post in posts} == {"s"}
    assert {post.opcode for post in posts} == {2}  # IBV_WR_SEND
    assert [post.flags for post in posts] == [INLINE] * 3
    assert state_of(lane) == (3, 0, 5, 3, 0, 0, 0, 3, 21)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_one_in_so_many_is_signalled(verbs: FakeVerbs, interval: int) -> None:
    lane = lane_of(verbs, 16, interval)
    while not lane.send(b"x"):
        pass
    signaled = [bool(post.flags & SIGNALED) for post in verbs.posts]
    assert signaled == [(number + 1) % interval == 0 for number in range(16)]
    assert signaled[-1], "nothing would empty the queue"
    assert lane.unsignaled == 0


def test_counting_goes_on_from_where_the_long_way_left_it(verbs: FakeVerbs) -> None:
    lane = lane_of(verbs, 16, 4)
    lane.unsignaled = 2
    for _ in range(4):
        lane.send(b"x")
    assert [bool(post.flags & SIGNALED) for post in verbs.posts] == [False, True, False, False]
    assert lane.unsignaled == 2


def test_what_is_ordered_behind_a_fence_is_fenced(verbs: FakeVerbs) -> None:
    lane = lane_of(verbs, 8, 2)
    lane.fence_flags = int(FENCE)
    lane.send(b"x")
    lane.send(b"x")
    lane.fence_flags = 0
    lane.send(b"x")
    assert [post.flags for post in verbs.posts] == [
        INLINE | FENCE,
        INLINE | FENCE | SIGNALED,
        INLINE,
    ]


@REFUSALS
def test_what_the_device_refuses_has_not_been_posted(
    verbs: FakeVerbs, result: int, code: int, error: int
) -> None:
    lane = lane_of(verbs)
    lane.send(b"one")
    lane.send(b"two")
    before = state_of(lane)
    verbs.refuse(result, code)
    assert lane.send(b"three") == error
    assert state_of(lane) == before
    verbs.refuse(0)
    assert lane.send(b"three") == 0
    assert [post.wr_id - FIRST for post in verbs.posts] == [0, 1, 2]


class Text(bytes):
    pass


@pytest.mark.parametrize(
    "data", [bytearray(b"x"), memoryview(b"x"), "x", 1, None, Text(b"x"), b"x" * 17], ids=repr
)
def test_what_needs_a_closer_look_takes_the_long_way(verbs: FakeVerbs, data: object) -> None:
    lane = lane_of(verbs)
    before = state_of(lane)
    assert lane.send(data) == -1
    assert (state_of(lane), verbs.posted) == (before, 0)


def test_without_room_for_inline_data_everything_does(verbs: FakeVerbs) -> None:
    lane = lane_of(verbs, max_inline=0)
    assert lane.send(b"x") == -1
    assert verbs.posted == 0


@pytest.mark.parametrize("state", ["new", "closed", "waiting", "full", "destroyed", "no cell"])
def test_a_lane_that_is_not_free_takes_the_long_way(verbs: FakeVerbs, state: str) -> None:
    lane = lane_of(verbs)
    match state:
        case "new":
            lane = SendQueueCore(8, 4, 16)
        case "closed":
            lane.is_open = False
        case "waiting":
            lane.waiters = 1
        case "full":
            lane.credits = 0
        case "destroyed":
            verbs.destroy()
        case "no cell":
            lane.open(None, 0, FIRST)
    before = state_of(lane)
    assert lane.send(b"x") == -1
    assert (state_of(lane), verbs.posted) == (before, 0)


def test_the_keeper_of_the_queue_pair_is_kept_as_long_as_the_lane() -> None:
    first, second = Text(b"first"), Text(b"second")
    counts = sys.getrefcount(first), sys.getrefcount(second)
    lane = SendQueueCore(8, 4, 16)
    lane.open(first, 0, FIRST)
    lane.open(second, 0, FIRST)
    assert (sys.getrefcount(first), sys.getrefcount(second)) == (counts[0], counts[1] + 1)
    del lane
    assert sys.getrefcount(second) == counts[1]


def test_numbers_wrap_at_31_bits(verbs: FakeVerbs) -> None:
    lane = lane_of(verbs)
    lane.next_number = lane.oldest_pending = NUMBER_MASK - 1
    for _ in range(4):
        assert lane.send(b"x") == 0
    assert [post.wr_id - FIRST for post in verbs.posts] == [NUMBER_MASK - 1, NUMBER_MASK, 0, 1]
    assert (lane.next_number, lane.credits) == (2, 4)
    lane.completed(NUMBER_MASK)
    assert (lane.oldest_pending, lane.credits) == (0, 6)
    lane.completed(NUMBER_MASK - 1)
    assert (lane.oldest_pending, lane.credits) == (0, 6)
    lane.completed(1)
    assert (lane.oldest_pending, lane.credits) == (2, 8)


def test_an_end_stands_for_all_before_it_and_counts_once(verbs: FakeVerbs) -> None:
    lane = lane_of(verbs)
    for _ in range(6):
        lane.send(b"x")
    for number in (3, 3, 1, 0):
        lane.completed(number)
        assert (lane.oldest_pending, lane.credits) == (4, 6)
    for number in (6, 7, NUMBER_MASK, 1 << 30):  # nothing of the kind was posted
        lane.completed(number)
        assert (lane.oldest_pending, lane.credits) == (4, 6)
    lane.completed(5)
    assert (lane.oldest_pending, lane.credits) == (6, 8)


@pytest.mark.parametrize(("number", "kind"), [(-1, OverflowError), ("1", TypeError)])
def test_what_is_no_number_ends_nothing(
    verbs: FakeVerbs, number: Any, kind: type[Exception]
) -> None:
    lane = lane_of(verbs)
    with pytest.raises(kind):
        lane.completed(number)
    assert state_of(lane) == state_of(lane_of(verbs))


@pytest.mark.parametrize("seed", range(10))
def test_a_long_exchange_loses_no_place(verbs: FakeVerbs, seed: int) -> None:
    source = random.Random(seed)
    depth = source.randrange(1, 20)
    interval = max(1, depth // 4)
    lane = lane_of(verbs, depth, interval)
    start = source.choice([0, NUMBER_MASK - 500])
    lane.next_number = lane.oldest_pending = start
    under_way: deque[tuple[int, bool]] = deque()
    unsignaled = sent = 0
    for _ in range(5000):
        match source.randrange(8):
            case 0:
                verbs.refuse(errno.EINVAL)
                assert lane.send(b"x") == (errno.EINVAL if len(under_way) < depth else -1)
                verbs.refuse(0)
            case 1 | 2 | 3 | 4:
                expected = 0 if len(under_way) < depth else -1
                assert lane.send(b"message") == expected
                if not expected:
                    unsignaled += 1
                    is_signalled = unsignaled == interval
                    unsignaled = 0 if is_signalled else unsignaled
                    under_way.append(((start + sent) & NUMBER_MASK, is_signalled))
                    sent += 1
                    post = verbs.post(verbs.posted - 1)
                    assert post.wr_id == FIRST + under_way[-1][0]
                    assert bool(post.flags & SIGNALED) is is_signalled
            case _ if any(is_signalled for _, is_signalled in under_way):
                number, is_signalled = under_way.popleft()
                while not is_signalled:
                    number, is_signalled = under_way.popleft()
                for _ in range(source.randrange(1, 3)):
                    lane.completed(number)
        assert lane.credits == depth - len(under_way)
        assert (lane.next_number - lane.oldest_pending) & NUMBER_MASK == len(under_way)
    assert (lane.messages, lane.nbytes) == (sent, 7 * sent)


# --- SlotRing ---


def ring_of(verbs: FakeVerbs, slots: int = SLOTS, *, shared: bool = False) -> ReceiveRingCore:
    """One that is open, on memory that looks as if it were at 0x10000."""
    ring = ReceiveRingCore(slots, SLOT_SIZE)
    ring._use(bytearray(slots * SLOT_SIZE), 0x10000, LKEY)
    cells = (0, verbs.srq_cell) if shared else (verbs.qp_cell, 0)
    ring._open(verbs, cells, FIRST | RECEIVE)
    return ring


@pytest.mark.parametrize(("shared", "kind"), [(False, "r"), (True, "q")])
def test_a_slot_is_posted_where_it_is(verbs: FakeVerbs, shared: bool, kind: str) -> None:
    ring = ring_of(verbs, shared=shared)
    assert (ring.slots, ring.slot_size, ring.posted) == (SLOTS, SLOT_SIZE, 0)
    for slot in (0, 3, 1):
        assert ring._post(slot) == 0
    assert ring.posted == 3
    for slot, post in zip((0, 3, 1), verbs.posts, strict=True):
        assert (post.kind, post.wr_id) == (kind, FIRST | RECEIVE | slot)
        assert (post.address, post.length) == (0x10000 + slot * SLOT_SIZE, SLOT_SIZE)
        assert (post.lkey, post.num_sge) == (LKEY, 1)


@pytest.mark.parametrize("slot", [-1, SLOTS, 1 << 30, -(1 << 30)])
def test_there_are_no_other_slots(verbs: FakeVerbs, slot: int) -> None:
    ring = ring_of(verbs)
    assert ring._post(slot) == errno.EINVAL
    assert (ring.posted, verbs.posted) == (0, 0)


def test_before_it_is_open_nothing_is_posted(verbs: FakeVerbs) -> None:
    ring = ReceiveRingCore(SLOTS, SLOT_SIZE)
    assert ring._post(0) == errno.EINVAL
    assert ring.posted == 0


@pytest.mark.parametrize("shared", [False, True])
@REFUSALS
def test_a_slot_that_is_refused_is_not_counted(
    verbs: FakeVerbs, shared: bool, result: int, code: int, error: int
) -> None:
    ring = ring_of(verbs, shared=shared)
    ring._post(0)
    verbs.refuse(result, code)
    assert ring._post(1) == error
    assert ring.posted == 1


@pytest.mark.parametrize("shared", [False, True])
def test_when_the_queue_is_destroyed_it_refuses(verbs: FakeVerbs, shared: bool) -> None:
    ring = ring_of(verbs, shared=shared)
    verbs.destroy()
    assert ring._post(0) == errno.EINVAL
    assert (ring.posted, verbs.posted) == (0, 0)


def test_when_it_is_stopped_slots_stay_here(verbs: FakeVerbs) -> None:
    ring = ring_of(verbs)
    ring.stopped = True
    assert ring._post(0) == 0
    assert (ring.posted, verbs.posted) == (0, 0)


def test_opening_it_again_begins_anew(verbs: FakeVerbs) -> None:
    ring = ring_of(verbs)
    ring._post(0)
    ring.stopped = True
    ring._open(verbs, (verbs.qp_cell, 0), 7 << 32)
    assert (ring.posted, ring.stopped) == (0, False)
    ring._post(2)
    assert verbs.posts[-1].wr_id == (7 << 32) + 2


def test_the_memory_must_hold_all_slots_and_be_for_writing() -> None:
    ring = ReceiveRingCore(SLOTS, SLOT_SIZE)
    with pytest.raises(ValueError, match="smaller than the slots"):
        ring._use(bytearray(SLOTS * SLOT_SIZE - 1), 0, 0)
    with pytest.raises(BufferError):
        ring._use(bytes(SLOTS * SLOT_SIZE), 0, 0)
    with pytest.raises(TypeError):
        ring._use(None, 0, 0)  # type: ignore[arg-type]


def test_the_memory_is_held_as_long_as_the_ring() -> None:
    memory, other = bytearray(SLOTS * SLOT_SIZE), bytearray(SLOTS * SLOT_SIZE)
    ring = ReceiveRingCore(SLOTS, SLOT_SIZE)
    ring._use(memory, 0, 0)
    with pytest.raises(BufferError):
        memory.clear()
    ring._use(other, 0, 0)
    memory.clear()
    del ring
    other.clear()


def test_memory_that_is_too_small_is_let_go_of() -> None:
    memory = bytearray(SLOTS * SLOT_SIZE - 1)
    ring = ReceiveRingCore(SLOTS, SLOT_SIZE)
    with pytest.raises(ValueError, match="smaller than the slots"):
        ring._use(memory, 0, 0)
    with pytest.raises(ValueError, match="the slot does not exist"):
        ReceiveQueue(ring).append(0, 0, 0, 0)
    memory.clear()


def test_a_slot_of_more_than_32_bits_is_no_other(verbs: FakeVerbs) -> None:
    ring = ring_of(verbs)
    assert ring._post(1 << 32) == errno.EINVAL
    assert ring.posted == 0


class Method:
    """A receive queue without a cell: one that is not libibverbs'."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.calls: list[tuple[int, ...]] = []
        self.on_post: Callable[[], None] = lambda: None

    def post_recv(self, *arguments: int) -> None:
        self.on_post()
        if self.error is not None:
            raise self.error
        self.calls.append(arguments)


def method_ring(queue: Method, slots: int = SLOTS) -> ReceiveRingCore:
    ring = ReceiveRingCore(slots, SLOT_SIZE)
    ring._use(bytearray(slots * SLOT_SIZE), 0x10000, LKEY)
    ring._open(queue, (0, 0), FIRST)
    return ring


def test_without_a_cell_receives_are_posted_by_a_method() -> None:
    queue = Method()
    ring = method_ring(queue)
    counted: list[int] = []
    queue.on_post = lambda: counted.append(ring.posted)
    assert ring._post(2) == 0
    assert queue.calls == [(FIRST + 2, 0x10000 + 2 * SLOT_SIZE, SLOT_SIZE, LKEY)]
    assert (ring.posted, counted) == (1, [1])  # counted first


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (VerbsError(errno.ENOMEM, "ibv_post_recv"), errno.ENOMEM),
        (OSError(errno.EIO, "gone"), errno.EIO),
        (OSError("without a number"), errno.EINVAL),
    ],
)
def test_what_such_a_method_raises_counts_as_its_errno(raised: OSError, error: int) -> None:
    ring = method_ring(Method(raised))
    for _ in range(3):
        assert ring._post(0) == error
    assert ring.posted == 0
    assert sys.exc_info() == (None, None, None)


def test_any_other_exception_goes_on() -> None:
    ring = method_ring(Method(RuntimeError("no")))
    with pytest.raises(RuntimeError):
        ring._post(0)
    assert ring.posted == 0


# --- Arrivals ---


class ReceiveRig:
    """Arrivals on a ring whose slots are filled in the order in which they were posted."""

    def __init__(self, verbs: FakeVerbs, slots: int = SLOTS) -> None:
        self.verbs = verbs
        self.memory = bytearray(slots * SLOT_SIZE)
        self._seen = verbs.posted
        self._posted: list[int] = []
        self.ring = ReceiveRingCore(slots, SLOT_SIZE)
        self.ring._use(self.memory, 0x10000, LKEY)
        self.ring._open(verbs, (verbs.qp_cell, 0), FIRST | RECEIVE)
        for slot in range(slots):
            assert self.ring._post(slot) == 0
        self.arrivals = ReceiveQueue(self.ring)

    @property
    def posted(self) -> list[int]:
        """Slots that the device has."""
        for index in range(self._seen, self.verbs.posted):
            post = self.verbs.post(index)
            if post.kind == "r":
                self._posted.append(post.wr_id & NUMBER_MASK)
        self._seen = self.verbs.posted
        return self._posted

    def fill(self, message: bytes) -> int:
        """The device puts a message into the next slot."""
        slot = self.posted.pop(0)
        self.memory[slot * SLOT_SIZE : slot * SLOT_SIZE + len(message)] = message
        return slot

    def arrive(self, message: bytes = b"hello", flags: int = 0, imm_data: int = 0) -> int:
        slot = self.fill(message)
        self.ring.posted -= 1
        self.arrivals.append(slot, len(message), flags, imm_data)
        return slot

    def complete(self, message: bytes = b"hello", **more: Any) -> int:
        """The same by way of the completion queue."""
        slot = self.fill(message)
        self.verbs.received(KEY, slot, len(message), **more)
        return slot


@pytest.fixture
def inbox(verbs: FakeVerbs) -> ReceiveRig:
    return ReceiveRig(verbs)


def test_messages_are_taken_in_their_order_and_their_slots_given_back(
    inbox: ReceiveRig,
) -> None:
    messages = [b"", b"one", bytes(range(SLOT_SIZE))]
    for message in messages:
        inbox.arrive(message)
    arrivals = inbox.arrivals
    assert (len(arrivals), inbox.ring.posted, inbox.posted) == (3, 1, [3])
    assert [arrivals.take_bytes() for _ in range(4)] == [*messages, None]
    assert (len(arrivals), inbox.ring.posted, inbox.posted) == (0, 4, [3, 0, 1, 2])
    assert (arrivals.messages, arrivals.nbytes, arrivals.spilled) == (3, 3 + SLOT_SIZE, 0)


def test_to_look_at_the_oldest_leaves_it_there(inbox: ReceiveRig) -> None:
    arrivals = inbox.arrivals
    assert arrivals.peek() is None
    arrivals.drop_oldest()
    inbox.arrive(b"one", 1, 0xFFFFFFFF)
    inbox.arrive(b"three", 2, 3)
    for _ in range(2):
        assert arrivals.peek() == (0, 3, 1, 0xFFFFFFFF, None)
    arrivals.drop_oldest()
    assert arrivals.peek() == (1, 5, 2, 3, None)
    assert (len(arrivals), inbox.posted) == (1, [2, 3])  # the slot is the caller's
    arrivals.drop_oldest()
    arrivals.drop_oldest()
    assert (len(arrivals), arrivals.peek()) == (0, None)


@pytest.mark.parametrize("reason", ["has_waiter", "closed"])
def test_while_a_task_waits_or_after_closing_nothing_is_taken(
    inbox: ReceiveRig, reason: str
) -> None:
    inbox.arrive()
    setattr(inbox.arrivals, reason, True)
    assert inbox.arrivals.take_bytes() is None
    assert len(inbox.arrivals) == 1
    setattr(inbox.arrivals, reason, False)
    assert inbox.arrivals.take_bytes() == b"hello"


@pytest.mark.parametrize(
    ("slot", "length"), [(-1, 0), (SLOTS, 0), (1 << 30, 0), (0, SLOT_SIZE + 1), (0, (1 << 32) - 1)]
)
def test_what_lies_in_no_slot_is_refused(inbox: ReceiveRig, slot: int, length: int) -> None:
    with pytest.raises(ValueError, match="the slot does not exist"):
        inbox.arrivals.append(slot, length, 0, 0)
    assert (len(inbox.arrivals), inbox.arrivals.messages) == (0, 0)


def test_without_memory_nothing_arrives() -> None:
    arrivals = ReceiveQueue(ReceiveRingCore(SLOTS, SLOT_SIZE))
    with pytest.raises(ValueError, match="the slot does not exist"):
        arrivals.append(0, 0, 0, 0)
    assert arrivals.take_bytes() is None


@pytest.mark.parametrize(("slots", "kept"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
def test_below_half_of_the_slots_messages_are_copied_away(
    verbs: FakeVerbs, slots: int, kept: int
) -> None:
    inbox = ReceiveRig(verbs, slots)
    arrivals = inbox.arrivals
    arrivals.backlog = 1000
    messages = [b"message %d" % number for number in range(30)]
    for number, message in enumerate(messages, 1):
        inbox.arrive(message, number, 2 * number)
        assert arrivals.spilled == max(0, number - kept)
        assert inbox.ring.posted == len(inbox.posted) == slots - min(number, kept)
    for number in range(1, kept + 1):
        found = arrivals.peek()
        assert found is not None
        assert found[1:] == (len(messages[number - 1]), number, 2 * number, None)
        assert arrivals.take_bytes() == messages[number - 1]
    inbox.memory[:] = bytes(len(inbox.memory))
    for number in range(kept + 1, 31):
        message = messages[number - 1]
        assert arrivals.peek() == (-1, len(message), number, 2 * number, message)
        assert arrivals.take_bytes() == message
    assert arrivals.take_bytes() is None
    assert sorted(inbox.posted) == list(range(slots))


def test_without_a_backlog_nothing_is_copied_away(inbox: ReceiveRig) -> None:
    for _ in range(SLOTS):
        inbox.arrive()
    assert (inbox.arrivals.spilled, inbox.ring.posted) == (0, 0)


def test_more_than_the_backlog_is_told(inbox: ReceiveRig) -> None:
    arrivals = inbox.arrivals
    arrivals.backlog = 3
    arrivals.notify = False
    for _ in range(3):
        inbox.arrive()
    assert not arrivals.notify
    inbox.arrive()
    assert arrivals.notify


def test_without_a_backlog_no_number_is_too_many(verbs: FakeVerbs) -> None:
    inbox = ReceiveRig(verbs, 100)
    inbox.arrivals.notify = False
    for _ in range(100):
        inbox.arrive()
    assert not inbox.arrivals.notify


def test_a_slot_that_is_refused_loses_no_message_and_is_told(inbox: ReceiveRig) -> None:
    arrivals = inbox.arrivals
    for number in range(3):
        inbox.arrive(b"%d" % number)
    arrivals.notify = False
    inbox.verbs.refuse(errno.ENOMEM)
    assert arrivals.take_bytes() == b"0"
    assert (arrivals.error, arrivals.notify) == (errno.ENOMEM, True)
    inbox.verbs.refuse(errno.EIO)
    arrivals.notify = False
    assert arrivals.take_bytes() == b"1"
    assert (arrivals.error, arrivals.notify) == (errno.ENOMEM, False)  # the first is the cause
    assert inbox.ring.posted == 1
    inbox.verbs.refuse(0)
    assert arrivals.take_bytes() == b"2"


def test_a_slot_that_is_refused_as_its_message_is_copied_away_is_told_too(
    inbox: ReceiveRig,
) -> None:
    arrivals = inbox.arrivals
    arrivals.backlog, arrivals.notify = 100, False
    inbox.arrive()
    inbox.arrive()
    inbox.verbs.refuse(errno.EIO)
    inbox.arrive(b"spilled")
    assert (arrivals.error, arrivals.notify) == (errno.EIO, True)
    assert [arrivals.take_bytes() for _ in range(3)] == [b"hello", b"hello", b"spilled"]


def test_a_failing_method_leaves_the_messages_whole() -> None:
    queue = Method()
    arrivals = ReceiveQueue(method_ring(queue, 1))
    arrivals.append(0, 1, 0, 0)
    queue.error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        arrivals.take_bytes()
    assert len(arrivals) == 0
    arrivals.backlog = 5
    with pytest.raises(RuntimeError):
        arrivals.append(0, 1, 0, 0)
    arrivals.drop_oldest()  # whether it is there or not
    queue.error = None
    arrivals.append(0, 1, 0, 0)
    assert arrivals.take_bytes() == b"\0"


def test_what_arrives_as_a_slot_is_posted_comes_behind() -> None:
    """By way of a method; in a process of its own, which may come to grief."""
    code = """
from aiordma._native import fast_path
class Queue:
    posts = 0
    def post_recv(self, *_):
        self.posts += 1
        if self.posts < 20:
            ring.posted -= 1
            arrivals.append(0, 1, self.posts, 0)
ring = fast_path.ReceiveRingCore(1, 8)
ring._use(bytearray(8), 0, 0)
ring._open(Queue(), (0, 0), 0)
arrivals = fast_path.ReceiveQueue(ring)
arrivals.backlog = 50
arrivals.append(0, 1, 0, 0)
for number in range(20):
    assert arrivals.peek()[2] == number
    arrivals.drop_oldest()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=30, capture_output=True
    )
    assert ended.returncode == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("spills", [False, True])
def test_a_long_exchange_keeps_every_message(verbs: FakeVerbs, seed: int, spills: bool) -> None:
    """The ring buffer grows while it is wrapped, and the other way round."""
    source = random.Random(seed)
    inbox = ReceiveRig(verbs, source.randrange(1, 40))
    arrivals = inbox.arrivals
    if spills:
        arrivals.backlog = 10_000
    sent: deque[tuple[bytes, int, int]] = deque()
    total = 0
    for step in range(3000):
        likely = 0.6 if step // 300 % 2 else 0.4
        if source.random() < likely and inbox.posted:
            flags, imm = source.randrange(4), source.randrange(1 << 32)
            sent.append((source.randbytes(source.randrange(SLOT_SIZE + 1)), flags, imm))
            total += len(sent[-1][0])
            inbox.arrive(*sent[-1])
        elif sent:
            message, flags, imm = sent.popleft()
            found = arrivals.peek()
            assert found is not None
            assert found[1:4] == (len(message), flags, imm)
            if source.random() < 0.8:
                assert arrivals.take_bytes() == message
            else:
                slot, length, *_, copy = found
                start = slot * SLOT_SIZE
                assert (copy or inbox.memory[start : start + length]) == message
                arrivals.drop_oldest()
                if slot >= 0:
                    inbox.ring._post(slot)
        assert len(arrivals) == len(sent)
        assert inbox.ring.posted == len(inbox.posted)
    assert arrivals.nbytes == total
    assert bool(arrivals.spilled) is spills
    arrivals.backlog = -1
    while sent:
        assert arrivals.take_bytes() == sent.popleft()[0]
    assert sorted(inbox.posted) == list(range(inbox.ring.slots))


# --- Completions ---


class Desk:
    """Completions, and what was delivered of each batch."""

    def __init__(self, verbs: FakeVerbs) -> None:
        self.verbs = verbs
        self.completions = CompletionDispatcher(self.deliver)
        self._batch: Any = ffi.cast("struct ibv_wc *", self.completions.batch)
        self.left: list[tuple[int, ...]] = []
        """(wr_id, status, opcode, byte_len, wc_flags, imm_data, qp_num) of each."""
        self.told: list[int] = []
        self.calls = 0
        self.on_deliver: Callable[[], None] = lambda: None

    def deliver(self) -> None:
        self.calls += 1
        for index in range(self.completions.pending):
            wc = self._batch[index]
            what = (wc.wr_id, wc.status, wc.opcode, wc.byte_len)
            self.left.append((*what, wc.wc_flags, wc.imm_data, wc.qp_num))
        self.told += self.completions.notified
        self.completions.notified.clear()
        self.on_deliver()

    def poll(self) -> int:
        return self.completions.poll(self.verbs.cq)

    @property
    def left_ids(self) -> list[int]:
        return [wr_id for wr_id, *_ in self.left]


@pytest.fixture
def desk(verbs: FakeVerbs) -> Desk:
    return Desk(verbs)


def owner(verbs: FakeVerbs, desk: Desk, key: int = KEY) -> tuple[SendQueueCore, ReceiveQueue]:
    lane, arrivals = SendQueueCore(8, 4, 16), ReceiveQueue(ring_of(verbs))
    desk.completions.attach(key, lane, arrivals)
    return lane, arrivals


def test_an_empty_queue_tells_nobody_anything(desk: Desk) -> None:
    assert desk.poll() == 0
    assert (desk.calls, desk.completions.pending, desk.completions.notified) == (0, 0, [])


def test_sends_end_without_python(verbs: FakeVerbs, desk: Desk) -> None:
    lane = lane_of(verbs)
    desk.completions.attach(KEY, lane, ReceiveQueue(ring_of(verbs)))
    for _ in range(8):
        lane.send(b"x")
    verbs.sent(KEY, 3)
    verbs.sent(KEY, 7)
    assert desk.poll() == 2
    assert (lane.oldest_pending, lane.credits, desk.calls) == (8, 8, 0)


@pytest.mark.parametrize("reason", ["in_flight", "waiters", "failed"])
def test_sends_that_somebody_is_to_hear_of_are_left(
    verbs: FakeVerbs, desk: Desk, reason: str
) -> None:
    lane = lane_of(verbs)
    desk.completions.attach(KEY, lane, ReceiveQueue(ring_of(verbs)))
    for _ in range(8):
        lane.send(b"x")
    if reason != "failed":
        setattr(lane, reason, 1)
    verbs.sent(KEY, 3, FLUSHED if reason == "failed" else WcStatus.SUCCESS)
    assert desk.poll() == 1
    assert (lane.oldest_pending, lane.credits) == (4, 4)  # the places are free all the same
    assert desk.left_ids == [FIRST + 3]


def test_messages_arrive_without_python(verbs: FakeVerbs, desk: Desk) -> None:
    inbox = ReceiveRig(verbs)
    desk.completions.attach(KEY, SendQueueCore(8, 4, 16), inbox.arrivals)
    inbox.arrivals.notify = False
    inbox.complete(b"one", flags=1, imm_data=9)
    inbox.complete(b"three")
    assert desk.poll() == 2
    assert (desk.calls, inbox.ring.posted) == (0, SLOTS - 2)
    assert inbox.arrivals.peek() == (0, 3, 1, 9, None)
    assert [inbox.arrivals.take_bytes() for _ in range(2)] == [b"one", b"three"]
    assert inbox.ring.posted == SLOTS


def test_who_asks_for_it_is_told_once(verbs: FakeVerbs, desk: Desk) -> None:
    inbox = ReceiveRig(verbs, 8)
    desk.completions.attach(KEY, SendQueueCore(8, 4, 16), inbox.arrivals)
    assert inbox.arrivals.notify
    inbox.complete()
    inbox.complete()
    desk.poll()
    inbox.complete()
    desk.poll()
    assert (desk.told, desk.calls, inbox.arrivals.notify) == ([KEY], 1, False)
    inbox.arrivals.notify = True
    inbox.complete()
    desk.poll()
    assert (desk.told, desk.calls) == ([KEY, KEY], 2)


def test_the_bytes_of_a_write_with_immediate_data_are_elsewhere(
    verbs: FakeVerbs, desk: Desk
) -> None:
    inbox = ReceiveRig(verbs)
    desk.completions.attach(KEY, SendQueueCore(8, 4, 16), inbox.arrivals)
    slot = inbox.fill(b"")
    verbs.received(KEY, slot, 1 << 20, opcode=WcOpcode.RECV_RDMA_WITH_IMM, flags=2, imm_data=7)
    desk.poll()
    assert inbox.arrivals.peek() == (0, 0, 2, 7, None)
    assert (inbox.arrivals.take_bytes(), inbox.arrivals.nbytes) == (b"", 0)


def test_receives_that_failed_are_left_and_counted_by_nobody(verbs: FakeVerbs, desk: Desk) -> None:
    inbox = ReceiveRig(verbs)
    desk.completions.attach(KEY, SendQueueCore(8, 4, 16), inbox.arrivals)
    slot = inbox.fill(b"")
    verbs.received(KEY, slot, status=FLUSHED)
    desk.poll()
    assert desk.left_ids == [FIRST | RECEIVE | slot]
    assert (len(inbox.arrivals), inbox.ring.posted, desk.told) == (0, SLOTS, [])


def test_what_is_left_is_in_order_and_as_it_was(verbs: FakeVerbs, desk: Desk) -> None:
    inbox = ReceiveRig(verbs)
    inbox.arrivals.notify = False
    lane = lane_of(verbs)
    desk.completions.attach(KEY, lane, inbox.arrivals)
    lane.send(b"x")
    expected = []
    for number in range(20):
        wr_id = (100 + number) << 32 | number
        status = WcStatus.SUCCESS if number % 2 else FLUSHED
        fields = {"opcode": WcOpcode.RDMA_READ, "flags": number, "imm_data": 3 * number}
        verbs.put(wr_id, 1000 + number, status=status, qp_num=number, **fields)  # type: ignore[arg-type]
        expected.append(
            (wr_id, status, WcOpcode.RDMA_READ, 1000 + number, number, 3 * number, number)
        )
        if number in (3, 11):
            inbox.complete()
        if number == 7:
            verbs.sent(KEY, 0)
    assert desk.poll() == 23
    assert (desk.left, desk.calls) == (expected, 1)
    assert (len(inbox.arrivals), lane.oldest_pending) == (2, 1)
    assert desk.completions.pending == 0  # they are gone


def test_key_zero_is_nobodys(verbs: FakeVerbs, desk: Desk) -> None:
    owner(verbs, desk)
    verbs.sent(0, 3)
    desk.poll()
    assert desk.left_ids == [3]
    desk.completions.detach(0)


def test_a_batch_has_a_limit(verbs: FakeVerbs, desk: Desk) -> None:
    for number in range(150):
        verbs.sent(1, number)
    assert [desk.poll() for _ in range(4)] == [64, 64, 22, 0]
    assert desk.left_ids == [(1 << 32) + number for number in range(150)]


@pytest.mark.parametrize("result", [-1, -errno.EIO, -errno.ENODEV])
def test_a_broken_queue_gives_a_negative_number(verbs: FakeVerbs, desk: Desk, result: int) -> None:
    verbs.break_queue(poll=result)
    assert desk.poll() == result
    assert desk.completions.poll_for(verbs.cq, S) == result
    assert desk.calls == 0


def test_a_queue_that_is_gone_has_nothing(desk: Desk) -> None:
    completions = desk.completions
    assert (completions.poll(0), completions.arm(0), completions.event(0)) == (0, 0, 0)
    assert completions.poll_for(0, S) == 0


@pytest.mark.parametrize("call", ["poll", "arm", "event"])
def test_an_address_is_a_number(call: str) -> None:
    """In a process of its own, which would else take this one with it."""
    code = f"""
from aiordma._native import fast_path
try:
    fast_path.CompletionDispatcher(lambda: None).{call}("address")
except TypeError:
    raise SystemExit(42)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=30)
    assert ended.returncode == 42


@pytest.mark.parametrize("result", [0, errno.EIO, -errno.EIO])
def test_arming(verbs: FakeVerbs, desk: Desk, result: int) -> None:
    verbs.break_queue(arm=result)
    assert desk.completions.arm(verbs.cq) == abs(result)
    assert verbs.arms == 1


def test_events_are_read_one_at_a_time_and_acknowledged(verbs: FakeVerbs, desk: Desk) -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    verbs.watch(reading)
    completions = desk.completions
    assert completions.event(verbs.channel) == 0
    os.write(writing, 3 * verbs.event())
    for number in range(1, 4):
        assert completions.event(verbs.channel) == verbs.cq
        assert verbs.acknowledged == number
    assert completions.event(verbs.channel) == 0
    os.close(writing)
    os.close(reading)
    assert completions.event(verbs.channel) == -errno.EBADF
    assert (verbs.polls, verbs.arms) == (0, 0)


# --- whose they are ---


@pytest.mark.parametrize("seed", range(20))
def test_keys_come_and_go_in_any_order(verbs: FakeVerbs, seed: int) -> None:
    source = random.Random(seed)
    desk = Desk(verbs)
    # All in a row, anywhere, or such that many begin at the same place of the table.
    inverse = pow(2654435769, -1, 1 << 32)
    pools = [
        list(range(1, 200)),
        [source.randrange(1, 1 << 32) for _ in range(200)],
        [(low + (high << 10)) * inverse % (1 << 32) for low in range(1, 5) for high in range(50)],
    ]
    keys = [key for key in pools[seed % 3] if key]
    model: dict[int, SendQueueCore] = {}
    arrivals = ReceiveQueue(ReceiveRingCore(1, 1))
    for step in range(1500):
        key = source.choice(keys)
        if source.random() < (0.7 if step // 250 % 2 == 0 else 0.3):
            model[key] = SendQueueCore(2, 1, 0)
            desk.completions.attach(key, model[key], arrivals)
        else:
            desk.completions.detach(key)
            model.pop(key, None)
        if step % 25 == 0:
            check_keys(verbs, desk, model, keys)
    for key in list(model):
        desk.completions.detach(key)
    check_keys(verbs, desk, {}, keys)
    assert sys.getrefcount(arrivals) == 2


def check_keys(
    verbs: FakeVerbs, desk: Desk, model: dict[int, SendQueueCore], keys: list[int]
) -> None:
    desk.left.clear()
    for lane in model.values():
        lane.next_number, lane.oldest_pending, lane.credits = 1, 0, 1
    for key in keys:
        verbs.sent(key, 0)
    while desk.poll():
        pass
    assert desk.left_ids == [key << 32 for key in keys if key not in model]
    assert all((lane.oldest_pending, lane.credits) == (1, 2) for lane in model.values())


def test_who_moves_into_a_gap_leaves_nothing_where_it_was(verbs: FakeVerbs, desk: Desk) -> None:
    inverse = pow(2654435769, -1, 1 << 32)
    # Of 16 places the first two begin at the first one, the third at the second.
    first, second, third = (place * inverse % (1 << 32) for place in (16, 32, 17))
    lanes = [SendQueueCore(2, 1, 0) for _ in range(3)]
    arrivals = ReceiveQueue(ReceiveRingCore(1, 1))
    desk.completions.attach(first, lanes[0], arrivals)
    desk.completions.attach(second, lanes[1], arrivals)
    desk.completions.detach(first)
    desk.completions.attach(third, lanes[2], arrivals)
    counts = [sys.getrefcount(lane) for lane in lanes]
    assert [count - counts[0] for count in counts] == [0, 1, 1]
    assert sys.getrefcount(arrivals) == 4


def test_attaching_again_replaces(verbs: FakeVerbs, desk: Desk) -> None:
    first, arrivals = owner(verbs, desk)
    second, _ = owner(verbs, desk)
    assert (sys.getrefcount(first), sys.getrefcount(arrivals)) == (2, 2)
    second.next_number = 1
    verbs.sent(KEY, 0)
    desk.poll()
    assert (first.oldest_pending, second.oldest_pending) == (0, 1)
    desk.completions.detach(KEY)
    desk.completions.detach(KEY)
    assert sys.getrefcount(second) == 2


@pytest.mark.parametrize("which", ["key", "sends", "arrivals"])
def test_only_what_fits_is_attached(verbs: FakeVerbs, desk: Desk, which: str) -> None:
    right: dict[str, Any] = {
        "key": KEY,
        "sends": SendQueueCore(8, 4, 16),
        "arrivals": ReceiveQueue(ring_of(verbs)),
    }
    right[which] = 0 if which == "key" else object()
    wrong = {
        "key": "must not be 0",
        "sends": "SendQueueCore expected",
        "arrivals": "ReceiveQueue expected",
    }[which]
    with pytest.raises(ValueError if which == "key" else TypeError, match=wrong):
        desk.completions.attach(*right.values())


def test_a_message_that_lies_in_no_slot_raises(verbs: FakeVerbs, desk: Desk) -> None:
    _, arrivals = owner(verbs, desk)
    verbs.received(KEY, SLOTS, 1)
    with pytest.raises(ValueError, match="the slot does not exist"):
        desk.poll()
    assert len(arrivals) == 0


def test_what_deliver_raises_goes_on_and_the_next_batch_is_taken(
    verbs: FakeVerbs, desk: Desk
) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    desk.on_deliver = fail
    verbs.sent(9, 1)
    with pytest.raises(RuntimeError):
        desk.poll()
    verbs.sent(9, 2)
    with pytest.raises(RuntimeError):
        desk.completions.poll_for(verbs.cq, S)
    assert desk.completions.pending == 0
    desk.on_deliver = lambda: None
    verbs.sent(9, 3)
    assert desk.poll() == 1
    assert [wr_id & NUMBER_MASK for wr_id in desk.left_ids] == [1, 2, 3]


def test_who_is_delivered_to_may_detach(verbs: FakeVerbs, desk: Desk) -> None:
    inbox = ReceiveRig(verbs)
    desk.completions.attach(KEY, SendQueueCore(8, 4, 16), inbox.arrivals)
    desk.on_deliver = lambda: desk.completions.detach(KEY)
    inbox.complete()
    inbox.complete()
    desk.poll()
    assert (desk.told, len(inbox.arrivals)) == ([KEY], 2)


# --- spinning ---


def later(function: Callable[[], None], seconds: float = 0.02) -> threading.Thread:
    def run() -> None:
        time.sleep(seconds)
        function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_spinning_ends_with_what_another_thread_brings(verbs: FakeVerbs, desk: Desk) -> None:
    """Which it can do as the interpreter's lock is let go of."""

    def bring() -> None:
        while verbs.polls <= 10:
            time.sleep(0.001)
        verbs.sent(9, 1)

    began = time.monotonic()
    thread = later(bring, 0)
    assert desk.completions.poll_for(verbs.cq, 15 * S) == 1
    assert time.monotonic() - began < 10
    thread.join()
    assert desk.left_ids == [(9 << 32) + 1]
    assert verbs.polls > 10


def test_spinning_ends_in_time(verbs: FakeVerbs, desk: Desk) -> None:
    began = time.monotonic_ns()
    assert desk.completions.poll_for(verbs.cq, 2_000_000) == 0
    assert time.monotonic_ns() - began >= 2_000_000
    polls = verbs.polls
    assert desk.completions.poll_for(verbs.cq, 0) == 0
    assert verbs.polls == polls + 1
    assert desk.calls == 0


def test_what_is_there_already_needs_no_spinning(verbs: FakeVerbs, desk: Desk) -> None:
    verbs.sent(9, 1)
    assert desk.completions.poll_for(verbs.cq, 15 * S) == 1
    assert verbs.polls == 1


# --- looking out ---


class Watch(Desk):
    """An inbox and a lane that look out for themselves, in a turn that has just begun."""

    def __init__(self, verbs: FakeVerbs, time_limit: int) -> None:
        super().__init__(verbs)
        self.inbox = ReceiveRig(verbs)
        self.lane = lane_of(verbs, 8, 1)
        self.arrivals = self.inbox.arrivals
        self.arrivals.notify = False
        self.completions.attach(KEY, self.lane, self.arrivals)
        self.arrivals.set_polling(self.completions, verbs.cq, time_limit)
        self.lane.set_polling(self.completions, verbs.cq, time_limit)
        self.begin_turn()

    def begin_turn(self, nanoseconds_ago: int = 0) -> None:
        self.completions.budget_start = time.monotonic_ns() - nanoseconds_ago


def test_take_finds_what_has_just_come(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 0)
    watch.begin_turn(-S)
    watch.inbox.complete(b"hello")
    assert watch.arrivals.take_bytes() == b"hello"
    assert (watch.calls, watch.arrivals.preempted, verbs.polls) == (0, False, 1)
    assert watch.arrivals.take_bytes() is None
    assert verbs.polls == 2
    assert watch.arrivals.missed_polls == 0


def test_nobody_looks_once_the_loop_is_due_its_turn(verbs: FakeVerbs) -> None:
    """Or else a task that always finds something would keep the loop from all others."""
    watch = Watch(verbs, 0)
    watch.inbox.complete(b"hello")
    watch.lane.credits = 0
    watch.begin_turn(S)
    assert watch.arrivals.take_bytes() is None
    assert watch.lane.send(b"x") == -1
    assert verbs.polls == 0
    watch.lane.resumed()
    assert watch.arrivals.take_bytes() == b"hello"


def test_nobody_looks_longer_than_the_turn_may_take(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    for length in (LOOP_BUDGET_NS, 20 * LOOP_BUDGET_NS):
        watch.completions.budget = length
        watch.begin_turn()
        began = time.monotonic_ns()
        assert watch.arrivals.take_bytes() is None
        assert length - S // 1000 <= time.monotonic_ns() - began <= S
        assert watch.arrivals.preempted


def test_nobody_looks_while_others_wait_for_the_loop(verbs: FakeVerbs) -> None:
    """What was found last was theirs."""
    watch = Watch(verbs, 15 * S)
    watch.begin_turn()
    watch.lane.in_flight = 1
    watch.lane.send(b"x")
    verbs.sent(KEY, 0)
    assert watch.arrivals.take_bytes() is None
    assert (watch.calls, watch.arrivals.preempted) == (1, True)
    assert watch.completions.notified_at > watch.completions.budget_start
    watch.inbox.complete(b"hello")
    polls = verbs.polls
    assert watch.arrivals.take_bytes() is None
    assert (verbs.polls, watch.arrivals.preempted) == (polls, True)
    watch.begin_turn()
    assert watch.arrivals.take_bytes() == b"hello"


@pytest.mark.parametrize("by_polling", [True, False])
def test_spinning_notes_when_it_found_something_for_others(
    verbs: FakeVerbs, desk: Desk, by_polling: bool
) -> None:
    """The loop, when it polls, has its turn already."""
    verbs.sent(99, 1)
    if by_polling:
        assert desk.completions.poll_for(verbs.cq, S) == 1
    else:
        assert desk.completions.poll(verbs.cq) == 1
    assert (desk.completions.notified_at > 0) is by_polling


@pytest.mark.parametrize("time_limit", [-1, 0, 50_000])
def test_without_completions_or_patience_nobody_looks(verbs: FakeVerbs, time_limit: int) -> None:
    watch = Watch(verbs, time_limit)
    if time_limit >= 0:
        watch.arrivals.set_polling(None, verbs.cq, time_limit)
    watch.inbox.complete()
    assert watch.arrivals.take_bytes() is None
    assert verbs.polls == 0
    watch.arrivals.set_polling(watch.completions, 0, 0)
    assert watch.arrivals.take_bytes() is None
    assert verbs.polls == 0


def test_what_is_there_is_not_looked_for(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 100_000)
    watch.inbox.arrive()
    assert watch.arrivals.take_bytes() == b"hello"
    assert verbs.polls == 0


def test_take_looks_as_long_as_it_has_patience(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 200_000)
    for missed in range(1, 4):
        watch.begin_turn(-1000 * S)  # a turn that never ends
        began = time.monotonic_ns()
        assert watch.arrivals.take_bytes() is None
        assert time.monotonic_ns() - began >= 200_000
        assert (watch.arrivals.missed_polls, watch.arrivals.preempted) == (missed, False)
    watch.inbox.complete()
    assert watch.arrivals.take_bytes() == b"hello"
    assert watch.arrivals.missed_polls == 0


def test_take_finds_what_comes_while_it_looks(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    watch.begin_turn(-1000 * S)
    thread = later(lambda: watch.inbox.complete(b"hello") and None)
    assert watch.arrivals.take_bytes() == b"hello"
    thread.join()
    assert (watch.calls, watch.arrivals.missed_polls) == (0, 0)


def test_what_is_found_by_way_of_python_makes_up_for_misses(verbs: FakeVerbs) -> None:
    """As with a shared receive queue."""
    watch = Watch(verbs, 15 * S)
    watch.arrivals.missed_polls = 3
    watch.on_deliver = lambda: watch.inbox.arrive(b"hello") and None
    verbs.sent(9, 1)
    assert watch.arrivals.take_bytes() == b"hello"
    assert watch.arrivals.missed_polls == 0


def test_what_is_found_late_in_a_turn_makes_up_for_misses(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    watch.arrivals.missed_polls = 3
    watch.inbox.complete(b"hello")
    watch.begin_turn()
    assert watch.arrivals.take_bytes() == b"hello"
    assert watch.arrivals.missed_polls == 0


def test_what_comes_for_others_meanwhile_is_no_reason_to_stop(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    watch.begin_turn(-1000 * S)
    watch.lane.send(b"x")
    verbs.sent(KEY, 0)
    thread = later(lambda: watch.inbox.complete(b"hello") and None)
    assert watch.arrivals.take_bytes() == b"hello"
    thread.join()
    assert (watch.lane.oldest_pending, watch.calls) == (1, 0)


def test_who_else_is_told_something_is_a_reason_to_stop(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    watch.begin_turn(-1000 * S)
    verbs.sent(9, 1)
    assert watch.arrivals.take_bytes() is None
    assert watch.left_ids == [(9 << 32) + 1]
    assert (watch.arrivals.preempted, watch.arrivals.missed_polls) == (True, 0)


def test_the_end_of_the_turn_is_a_reason_to_stop(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    began = time.monotonic_ns()
    assert watch.arrivals.take_bytes() is None
    assert time.monotonic_ns() - began < 10 * S
    assert (watch.arrivals.preempted, watch.arrivals.missed_polls) == (True, 0)
    polls = verbs.polls
    watch.begin_turn(S)
    assert watch.arrivals.take_bytes() is None
    assert (verbs.polls, watch.arrivals.preempted) == (polls, True)
    watch.begin_turn(-1000 * S)
    watch.arrivals.poll_budget = 1000
    assert watch.arrivals.take_bytes() is None
    assert (watch.arrivals.preempted, watch.arrivals.missed_polls) == (False, 1)


def test_a_broken_queue_is_found_by_others(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    verbs.break_queue(poll=-errno.EIO)
    assert watch.arrivals.take_bytes() is None
    assert (verbs.polls, watch.calls) == (1, 0)


def test_take_raises_what_deliver_raises(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)

    def fail() -> None:
        raise RuntimeError("no")

    watch.on_deliver = fail
    verbs.sent(9, 1)
    with pytest.raises(RuntimeError):
        watch.arrivals.take_bytes()
    watch.lane.credits = 0
    verbs.sent(9, 1)
    with pytest.raises(RuntimeError):
        watch.lane.send(b"x")


def test_what_is_closed_while_it_looks_gives_nothing(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    watch.on_deliver = lambda: setattr(watch.arrivals, "closed", True)
    watch.inbox.complete()
    verbs.sent(9, 1)
    assert watch.arrivals.take_bytes() is None
    assert len(watch.arrivals) == 1


def test_a_full_queue_looks_for_a_place(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 15 * S)
    watch.begin_turn(-1000 * S)
    lane = watch.lane
    for _ in range(8):
        assert lane.send(b"x") == 0
    assert verbs.polls == 0
    thread = later(lambda: verbs.sent(KEY, 2))
    assert lane.send(b"y") == 0
    thread.join()
    assert (lane.credits, lane.oldest_pending, verbs.posted) == (2, 3, SLOTS + 9)
    lane.set_polling(None, 0, -1)
    assert [lane.send(b"z") for _ in range(3)] == [0, 0, -1]


@pytest.mark.parametrize("how", ["closed", "destroyed"])
def test_a_lane_that_ends_while_it_looks_posts_nothing(verbs: FakeVerbs, how: str) -> None:
    watch = Watch(verbs, 15 * S)
    lane = watch.lane
    for _ in range(8):
        lane.send(b"x")

    def end() -> None:
        if how == "closed":
            lane.is_open = False
        else:
            verbs.destroy()

    watch.on_deliver = end
    verbs.sent(KEY, 2)
    verbs.sent(9, 1)
    assert lane.send(b"y") == -1
    assert (lane.credits, verbs.posted) == (3, SLOTS + 8)


# --- memory ---


class Deliver:
    """Something to call that knows all the rest."""

    def __init__(self) -> None:
        self.all: list[object] = []

    def __call__(self) -> None:
        raise AssertionError("nothing is left")


class Ring(ReceiveRingCore):
    """As ReceiveRing, one that there can be weak references to."""


def test_cycles_are_collected(verbs: FakeVerbs) -> None:
    gc.collect()
    deliver = Deliver()
    completions = CompletionDispatcher(deliver)
    ring, lane = Ring(SLOTS, SLOT_SIZE), SendQueueCore(8, 4, 16)
    arrivals = ReceiveQueue(ring)
    arrivals.set_polling(completions, verbs.cq, 5)
    lane.set_polling(completions, verbs.cq, 5)
    lane.open(deliver, 0, 0)
    completions.attach(KEY, lane, arrivals)
    deliver.all = [completions, lane, arrivals]
    gone = [weakref.ref(deliver), weakref.ref(ring)]
    del completions, lane, arrivals, ring, deliver
    assert gone[0]() is not None
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_cycle_without_python_is_collected(verbs: FakeVerbs) -> None:
    ring = Ring(SLOTS, SLOT_SIZE)
    arrivals, completions = ReceiveQueue(ring), CompletionDispatcher(lambda: None)
    completions.attach(KEY, SendQueueCore(8, 4, 16), arrivals)
    arrivals.set_polling(completions, verbs.cq, 5)
    gone = weakref.ref(ring)
    del ring, arrivals, completions
    gc.collect()
    assert gone() is None


def test_looking_out_elsewhere_lets_go(verbs: FakeVerbs) -> None:
    arrivals, lane = ReceiveQueue(ring_of(verbs)), SendQueueCore(8, 4, 16)
    first, second = CompletionDispatcher(lambda: None), CompletionDispatcher(lambda: None)
    for one in (arrivals, lane):
        one.set_polling(first, verbs.cq, 5)
        assert sys.getrefcount(first) == 3
        one.set_polling(second, verbs.cq, 5)
        one.set_polling(second, verbs.cq, 5)
        assert (sys.getrefcount(first), sys.getrefcount(second)) == (2, 3)
        one.set_polling(None, 0, -1)
        assert sys.getrefcount(second) == 2


def test_thousands_of_messages_leave_no_memory_behind(verbs: FakeVerbs) -> None:
    watch = Watch(verbs, 0)
    arrivals, lane = watch.arrivals, watch.lane
    arrivals.backlog = 1000

    def exchange(times: int) -> None:
        for number in range(times):
            for _ in range(3):
                watch.inbox.complete(b"some message")
            assert lane.send(b"some answer") == 0
            verbs.sent(KEY, lane.next_number - 1)
            verbs.sent(9, 1)
            arrivals.notify = number % 5 == 0
            watch.poll()
            found = arrivals.peek()
            assert found is not None
            if number % 2:
                arrivals.drop_oldest()
                if found[0] >= 0:
                    assert watch.inbox.ring._post(found[0]) == 0
                assert [arrivals.take_bytes() for _ in range(3)] == [b"some message"] * 2 + [None]
            else:
                assert [arrivals.take_bytes() for _ in range(4)] == [b"some message"] * 3 + [None]
            watch.left.clear()
            watch.told.clear()

    exchange(200)
    gc.collect()
    watched = [watch.completions, lane, arrivals, watch.inbox.ring, None]
    counts = [sys.getrefcount(one) for one in watched]
    tracemalloc.start()
    try:
        exchange(20)
        gc.collect()
        before, blocks = tracemalloc.get_traced_memory()[0], sys.getallocatedblocks()
        exchange(3000)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    assert sys.getallocatedblocks() - blocks < 300
    now = [sys.getrefcount(one) for one in watched]
    assert all(abs(one - other) < 100 for one, other in zip(counts, now, strict=True))
    assert arrivals.spilled > 1000


def test_what_nobody_took_is_let_go_of(verbs: FakeVerbs) -> None:
    def fill() -> None:
        inbox = ReceiveRig(verbs)
        inbox.arrivals.backlog = 1000
        for _ in range(50):
            inbox.arrive(b"x" * SLOT_SIZE)
        inbox.arrivals.peek()

    fill()
    gc.collect()
    blocks = sys.getallocatedblocks()
    for _ in range(100):
        fill()
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 300


def test_two_modules_have_types_of_their_own(verbs: FakeVerbs) -> None:
    """Completions know the types of their own module."""
    code = """
import importlib.util, sys
from aiordma._native import fast_path
spec = importlib.util.spec_from_file_location("aiordma._native._fast_path", fast_path.__file__)
other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
assert other.SendQueueCore is not fast_path.SendQueueCore
for one, another in ((fast_path, other), (other, fast_path)):
    completions = one.CompletionDispatcher(lambda: None)
    completions.attach(1, one.SendQueueCore(1, 1, 1), one.ReceiveQueue(one.ReceiveRingCore(1, 1)))
    try:
        receives = one.ReceiveQueue(one.ReceiveRingCore(1, 1))
        completions.attach(1, another.SendQueueCore(1, 1, 1), receives)
    except TypeError:
        continue
    raise AssertionError("another module's")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- forked children ---

FORKED = """
import os, sys, warnings
from pathlib import Path
from verbs_fakes import RECEIVE, FakeVerbs
from aiordma._native._fast_path import ReceiveQueue, ReceiveRingCore, SendQueueCore
from aiordma.loop.forked import note_use

warnings.simplefilter("ignore")
verbs = FakeVerbs(Path(sys.argv[1]))
lane = SendQueueCore(8, 4, 16)
lane.open(verbs, verbs.qp_cell, 5 << 32)
ring = ReceiveRingCore(4, 32)
ring._use(bytearray(128), 0x10000, 7)
ring._open(verbs, (verbs.qp_cell, 0), 5 << 32 | RECEIVE)
arrivals = ReceiveQueue(ring)
for slot in range(2):
    arrivals.append(slot, 5, 0, 0)
note = sys.argv[2] == "used"
if note:
    note_use()
child = os.fork()
if not child:
    posted = verbs.posted
    results = (lane.send(b"x"), ring._post(3), arrivals.take_bytes(), verbs.posted - posted)
    expected = (-1, 0, None, 0) if note else (0, 0, bytes(5), 3)
    os._exit(42 if results == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
assert (lane.send(b"x"), ring._post(3), arrivals.take_bytes()) == (0, 0, bytes(5))
assert (verbs.posted, ring.posted, len(arrivals)) == (3, 2, 1)
"""


@pytest.mark.parametrize("parent", ["used", "unused"])
def test_a_forked_child_posts_and_takes_nothing(library: Path, parent: str) -> None:
    folder = Path(__file__).parent
    paths = [str(folder), str(folder.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", FORKED, str(library), parent]
    subprocess.run(command, check=True, timeout=30, env=environment)
