"""The C types of the fast path, on a verbs provider without a device."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulator.queues import NUMBER_MASK, RECEIVE, Queues

from aiordma import VerbsError
from aiordma._native import ffi
from aiordma._native._fast_path import (
    BATCH,
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
LONG = 10**18
"""A time budget of the loop that does not end, in nanoseconds."""
FLUSHED = WcStatus.WR_FLUSH_ERR
INLINE, SIGNALED, FENCE = SendFlags.INLINE, SendFlags.SIGNALED, SendFlags.FENCE

REFUSALS = pytest.mark.parametrize(
    ("result", "code", "error"),
    [
        (errno.ENOMEM, 0, errno.ENOMEM),
        (-errno.ENOMEM, 0, errno.ENOMEM),
        (-1, errno.EINVAL, errno.EINVAL),
        (errno.EINVAL, errno.EAGAIN, errno.EINVAL),
        (-1, 0, 1),  # errno was not set
    ],
)


# --- SendQueueCore ---


def core_of(
    verbs: Queues, depth: int = 8, interval: int = 4, max_inline: int = 16
) -> SendQueueCore:
    core = SendQueueCore(depth, interval, max_inline)
    core.open(verbs, verbs.qp_cell, FIRST)
    return core


def state_of(core: SendQueueCore) -> tuple[int, ...]:
    numbers = (
        core.next_number,
        core.oldest_pending,
        core.credits,
        core.unsignaled,
        core.fence_flags,
        core.in_flight,
    )
    return (*numbers, core.waiters, core.messages, core.nbytes)


def test_a_small_message_is_posted_inline(verbs: Queues) -> None:
    core = core_of(verbs)
    messages = [b"hello", b"", bytes(range(16))]
    assert [core.send(message) for message in messages] == [0, 0, 0]
    posts = verbs.posts
    assert [post.data for post in posts] == messages
    assert [post.wr_id for post in posts] == [FIRST, FIRST + 1, FIRST + 2]
    assert [post.num_sge for post in posts] == [1, 0, 1]
    assert {post.kind for post in posts} == {"s"}
    assert {post.opcode for post in posts} == {2}  # IBV_WR_SEND
    assert [post.flags for post in posts] == [INLINE] * 3
    assert state_of(core) == (3, 0, 5, 3, 0, 0, 0, 3, 21)


@REFUSALS
def test_a_refused_message_changes_nothing(
    verbs: Queues, result: int, code: int, error: int
) -> None:
    core = core_of(verbs)
    core.send(b"one")
    core.send(b"two")
    before = state_of(core)
    verbs.refuse(result, code)
    assert core.send(b"three") == error
    assert state_of(core) == before
    verbs.refuse(0)
    assert core.send(b"three") == 0
    assert [post.wr_id - FIRST for post in verbs.posts] == [0, 1, 2]


class Text(bytes):
    pass


@pytest.mark.parametrize(
    "data",
    [bytearray(b"x"), memoryview(b"x"), "x", 1, None, Text(b"x"), b"x" * 17],
    ids=["bytearray", "memoryview", "str", "int", "None", "a subclass", "too long"],
)
def test_data_that_is_not_small_bytes_takes_the_slow_path(verbs: Queues, data: object) -> None:
    core = core_of(verbs)
    before = state_of(core)
    assert core.send(data) == -1
    assert (state_of(core), verbs.posted) == (before, 0)


@pytest.mark.parametrize("state", ["new", "closed", "waiting", "full", "destroyed", "no cell"])
def test_a_core_that_cannot_post_takes_the_slow_path(verbs: Queues, state: str) -> None:
    core = core_of(verbs)
    match state:
        case "new":
            core = SendQueueCore(8, 4, 16)
        case "closed":
            core.is_open = False
        case "waiting":
            core.waiters = 1
        case "full":
            core.credits = 0
        case "destroyed":
            verbs.destroy()
        case "no cell":
            core.open(None, 0, FIRST)
    before = state_of(core)
    assert core.send(b"x") == -1
    assert (state_of(core), verbs.posted) == (before, 0)


def test_the_core_has_a_reference_to_the_keeper() -> None:
    first, second = Text(b"first"), Text(b"second")
    counts = sys.getrefcount(first), sys.getrefcount(second)
    core = SendQueueCore(8, 4, 16)
    core.open(first, 0, FIRST)
    core.open(second, 0, FIRST)
    assert (sys.getrefcount(first), sys.getrefcount(second)) == (counts[0], counts[1] + 1)
    del core
    assert sys.getrefcount(second) == counts[1]


def test_a_completion_completes_all_requests_before_it_once(verbs: Queues) -> None:
    core = core_of(verbs)
    for _ in range(6):
        core.send(b"x")
    for number in (3, 3, 1, 0):
        core.completed(number)
        assert (core.oldest_pending, core.credits) == (4, 6)
    for number in (6, 7, NUMBER_MASK, 1 << 30):  # such requests were not posted
        core.completed(number)
        assert (core.oldest_pending, core.credits) == (4, 6)
    core.completed(5)
    assert (core.oldest_pending, core.credits) == (6, 8)


@pytest.mark.parametrize(("number", "kind"), [(-1, OverflowError), ("1", TypeError)])
def test_an_invalid_number_completes_nothing(
    verbs: Queues, number: Any, kind: type[Exception]
) -> None:
    core = core_of(verbs)
    with pytest.raises(kind):
        core.completed(number)
    assert state_of(core) == state_of(core_of(verbs))


# --- ReceiveRingCore ---


def ring_of(verbs: Queues, slots: int = SLOTS, *, shared: bool = False) -> ReceiveRingCore:
    """Return an open ring on memory with the fake address 0x10000."""
    ring = ReceiveRingCore(slots, SLOT_SIZE)
    ring._use(bytearray(slots * SLOT_SIZE), 0x10000, LKEY)
    cells = (0, verbs.srq_cell) if shared else (verbs.qp_cell, 0)
    ring._open(verbs, cells, FIRST | RECEIVE)
    return ring


@pytest.mark.parametrize(("shared", "kind"), [(False, "r"), (True, "q")])
def test_a_slot_is_posted_with_its_address(verbs: Queues, shared: bool, kind: str) -> None:
    ring = ring_of(verbs, shared=shared)
    assert (ring.slots, ring.slot_size, ring.posted) == (SLOTS, SLOT_SIZE, 0)
    for slot in (0, 3, 1):
        assert ring._post(slot) == 0
    assert ring.posted == 3
    for slot, post in zip((0, 3, 1), verbs.posts, strict=True):
        assert (post.kind, post.wr_id) == (kind, FIRST | RECEIVE | slot)
        assert (post.address, post.length) == (0x10000 + slot * SLOT_SIZE, SLOT_SIZE)
        assert (post.lkey, post.num_sge) == (LKEY, 1)


@pytest.mark.parametrize("slot", [-1, SLOTS, -(1 << 30), 1 << 32])
def test_a_slot_outside_the_ring_is_refused(verbs: Queues, slot: int) -> None:
    ring = ring_of(verbs)
    assert ring._post(slot) == errno.EINVAL
    assert (ring.posted, verbs.posted) == (0, 0)


def test_an_unopened_ring_posts_nothing(verbs: Queues) -> None:
    ring = ReceiveRingCore(SLOTS, SLOT_SIZE)
    assert ring._post(0) == errno.EINVAL
    assert ring.posted == 0


@pytest.mark.parametrize("shared", [False, True])
@REFUSALS
def test_a_refused_slot_is_not_counted(
    verbs: Queues, shared: bool, result: int, code: int, error: int
) -> None:
    ring = ring_of(verbs, shared=shared)
    ring._post(0)
    verbs.refuse(result, code)
    assert ring._post(1) == error
    assert ring.posted == 1


@pytest.mark.parametrize("shared", [False, True])
def test_after_the_queue_is_destroyed_slots_are_refused(verbs: Queues, shared: bool) -> None:
    ring = ring_of(verbs, shared=shared)
    verbs.destroy()
    assert ring._post(0) == errno.EINVAL
    assert (ring.posted, verbs.posted) == (0, 0)


def test_a_stopped_ring_posts_nothing(verbs: Queues) -> None:
    ring = ring_of(verbs)
    ring.stopped = True
    assert ring._post(0) == 0
    assert (ring.posted, verbs.posted) == (0, 0)


def test_opening_a_ring_again_resets_it(verbs: Queues) -> None:
    ring = ring_of(verbs)
    ring._post(0)
    ring.stopped = True
    ring._open(verbs, (verbs.qp_cell, 0), 7 << 32)
    assert (ring.posted, ring.stopped) == (0, False)
    ring._post(2)
    assert verbs.posts[-1].wr_id == (7 << 32) + 2


def test_the_memory_must_be_large_enough_and_writable() -> None:
    ring = ReceiveRingCore(SLOTS, SLOT_SIZE)
    with pytest.raises(ValueError, match="smaller than the slots"):
        ring._use(bytearray(SLOTS * SLOT_SIZE - 1), 0, 0)
    with pytest.raises(BufferError):
        ring._use(bytes(SLOTS * SLOT_SIZE), 0, 0)
    with pytest.raises(TypeError):
        ring._use(None, 0, 0)  # type: ignore[arg-type]


def test_the_ring_has_a_reference_to_its_memory() -> None:
    memory, other = bytearray(SLOTS * SLOT_SIZE), bytearray(SLOTS * SLOT_SIZE)
    ring = ReceiveRingCore(SLOTS, SLOT_SIZE)
    ring._use(memory, 0, 0)
    with pytest.raises(BufferError):
        memory.clear()
    ring._use(other, 0, 0)
    memory.clear()
    del ring
    other.clear()


def test_memory_that_is_too_small_is_released() -> None:
    memory = bytearray(SLOTS * SLOT_SIZE - 1)
    ring = ReceiveRingCore(SLOTS, SLOT_SIZE)
    with pytest.raises(ValueError, match="smaller than the slots"):
        ring._use(memory, 0, 0)
    with pytest.raises(ValueError, match="the slot does not exist"):
        ReceiveQueue(ring).append(0, 0, 0, 0)
    memory.clear()


class MethodQueue:
    """A receive queue without a cell. Receives are posted by its method."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.calls: list[tuple[int, ...]] = []
        self.on_post: Callable[[], None] = lambda: None

    def post_recv(self, *arguments: int) -> None:
        self.on_post()
        if self.error is not None:
            raise self.error
        self.calls.append(arguments)


def method_ring(queue: MethodQueue, slots: int = SLOTS) -> ReceiveRingCore:
    ring = ReceiveRingCore(slots, SLOT_SIZE)
    ring._use(bytearray(slots * SLOT_SIZE), 0x10000, LKEY)
    ring._open(queue, (0, 0), FIRST)
    return ring


def test_without_a_cell_receives_are_posted_by_a_method() -> None:
    queue = MethodQueue()
    ring = method_ring(queue)
    counted: list[int] = []
    queue.on_post = lambda: counted.append(ring.posted)
    assert ring._post(2) == 0
    assert queue.calls == [(FIRST + 2, 0x10000 + 2 * SLOT_SIZE, SLOT_SIZE, LKEY)]
    assert (ring.posted, counted) == (1, [1])  # counted before it is posted


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (VerbsError(errno.ENOMEM, "ibv_post_recv"), errno.ENOMEM),
        (OSError(errno.EIO, "gone"), errno.EIO),
        (OSError("without a number"), errno.EINVAL),
    ],
)
def test_an_oserror_of_the_method_is_returned_as_its_errno(raised: OSError, error: int) -> None:
    ring = method_ring(MethodQueue(raised))
    for _ in range(3):
        assert ring._post(0) == error
    assert ring.posted == 0
    assert sys.exc_info() == (None, None, None)


def test_another_exception_of_the_method_is_raised() -> None:
    ring = method_ring(MethodQueue(RuntimeError("no")))
    with pytest.raises(RuntimeError):
        ring._post(0)
    assert ring.posted == 0


# --- ReceiveQueue ---


class ReceiveRig:
    """A ReceiveQueue on a ring whose slots are filled in the order of their posting."""

    def __init__(self, verbs: Queues, slots: int = SLOTS) -> None:
        self.verbs = verbs
        self.memory = bytearray(slots * SLOT_SIZE)
        verbs.new_posts()
        self._posted: list[int] = []
        self.ring = ReceiveRingCore(slots, SLOT_SIZE)
        self.ring._use(self.memory, 0x10000, LKEY)
        self.ring._open(verbs, (verbs.qp_cell, 0), FIRST | RECEIVE)
        for slot in range(slots):
            assert self.ring._post(slot) == 0
        self.receives = ReceiveQueue(self.ring)

    @property
    def posted(self) -> list[int]:
        """The slots that are posted now."""
        for post in self.verbs.new_posts():
            if post.kind == "r":
                self._posted.append(post.wr_id & NUMBER_MASK)
        return self._posted

    def fill(self, message: bytes) -> int:
        """Put a message into the next posted slot. Return the slot."""
        slot = self.posted.pop(0)
        self.memory[slot * SLOT_SIZE : slot * SLOT_SIZE + len(message)] = message
        return slot

    def arrive(self, message: bytes = b"hello", flags: int = 0, imm_data: int = 0) -> int:
        slot = self.fill(message)
        self.ring.posted -= 1
        self.receives.append(slot, len(message), flags, imm_data)
        return slot

    def complete(self, message: bytes = b"hello", **more: Any) -> int:
        """Put a message into the next posted slot, and add its completion. Return the slot."""
        slot = self.fill(message)
        self.verbs.received(KEY, slot, len(message), **more)
        return slot


@pytest.fixture
def receive_rig(verbs: Queues) -> ReceiveRig:
    return ReceiveRig(verbs)


def test_peek_does_not_remove_the_oldest_message(receive_rig: ReceiveRig) -> None:
    receives = receive_rig.receives
    assert receives.peek() is None
    receives.drop_oldest()
    receive_rig.arrive(b"one", 1, 0xFFFFFFFF)
    receive_rig.arrive(b"three", 2, 3)
    for _ in range(2):
        assert receives.peek() == (0, 3, 1, 0xFFFFFFFF, None)
    receives.drop_oldest()
    assert receives.peek() == (1, 5, 2, 3, None)
    assert (len(receives), receive_rig.posted) == (1, [2, 3])  # the caller posts the slot
    receives.drop_oldest()
    receives.drop_oldest()
    assert (len(receives), receives.peek()) == (0, None)


@pytest.mark.parametrize(
    ("slot", "length"), [(-1, 0), (SLOTS, 0), (1 << 30, 0), (0, SLOT_SIZE + 1), (0, (1 << 32) - 1)]
)
def test_a_message_outside_the_slots_is_refused(
    receive_rig: ReceiveRig, slot: int, length: int
) -> None:
    with pytest.raises(ValueError, match="the slot does not exist"):
        receive_rig.receives.append(slot, length, 0, 0)
    assert (len(receive_rig.receives), receive_rig.receives.messages) == (0, 0)


def test_a_ring_without_memory_accepts_no_message() -> None:
    receives = ReceiveQueue(ReceiveRingCore(SLOTS, SLOT_SIZE))
    with pytest.raises(ValueError, match="the slot does not exist"):
        receives.append(0, 0, 0, 0)
    assert receives.take_bytes() is None


def test_the_owner_is_notified_if_the_backlog_is_exceeded(receive_rig: ReceiveRig) -> None:
    receives = receive_rig.receives
    receives.backlog = 3
    receives.notify = False
    for _ in range(3):
        receive_rig.arrive()
    assert not receives.notify
    receive_rig.arrive()
    assert receives.notify


def test_a_refused_slot_loses_no_message_and_notifies(receive_rig: ReceiveRig) -> None:
    receives = receive_rig.receives
    for number in range(3):
        receive_rig.arrive(b"%d" % number)
    receives.notify = False
    receive_rig.verbs.refuse(errno.ENOMEM)
    assert receives.take_bytes() == b"0"
    assert (receives.error, receives.notify) == (errno.ENOMEM, True)
    receive_rig.verbs.refuse(errno.EIO)
    receives.notify = False
    assert receives.take_bytes() == b"1"
    assert (receives.error, receives.notify) == (errno.ENOMEM, False)  # the first error is kept
    assert receive_rig.ring.posted == 1
    receive_rig.verbs.refuse(0)
    assert receives.take_bytes() == b"2"


def test_a_failing_method_leaves_the_queue_usable() -> None:
    queue = MethodQueue()
    receives = ReceiveQueue(method_ring(queue, 1))
    receives.append(0, 1, 0, 0)
    queue.error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        receives.take_bytes()
    assert len(receives) == 0
    receives.backlog = 5
    with pytest.raises(RuntimeError):
        receives.append(0, 1, 0, 0)
    receives.drop_oldest()  # if the message was appended
    queue.error = None
    receives.append(0, 1, 0, 0)
    assert receives.take_bytes() == b"\0"


def test_messages_that_arrive_while_a_slot_is_posted_come_later() -> None:
    """The slot is posted by a method. The test runs in a new process, which might crash."""
    code = """
from aiordma._native import fast_path
class Queue:
    posts = 0
    def post_recv(self, *_):
        self.posts += 1
        if self.posts < 20:
            ring.posted -= 1
            receives.append(0, 1, self.posts, 0)
ring = fast_path.ReceiveRingCore(1, 8)
ring._use(bytearray(8), 0, 0)
ring._open(Queue(), (0, 0), 0)
receives = fast_path.ReceiveQueue(ring)
receives.backlog = 50
receives.append(0, 1, 0, 0)
for number in range(20):
    assert receives.peek()[2] == number
    receives.drop_oldest()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=30, capture_output=True
    )
    assert ended.returncode == 0


# --- CompletionDispatcher ---


class DispatchRig:
    """A CompletionDispatcher, and a record of the completions for Python."""

    def __init__(self, verbs: Queues) -> None:
        self.verbs = verbs
        self.dispatcher = CompletionDispatcher(self.take_pending)
        self._batch: Any = ffi.cast("struct ibv_wc *", self.dispatcher.batch)
        self.for_python: list[tuple[int, ...]] = []
        """(wr_id, status, opcode, byte_len, wc_flags, imm_data, qp_num) of each completion."""
        self.notified_keys: list[int] = []
        self.calls = 0
        self.on_take: Callable[[], object] = lambda: None

    def take_pending(self) -> None:
        self.calls += 1
        for index in range(self.dispatcher.pending):
            wc = self._batch[index]
            what = (wc.wr_id, wc.status, wc.opcode, wc.byte_len)
            self.for_python.append((*what, wc.wc_flags, wc.imm_data, wc.qp_num))
        self.notified_keys += self.dispatcher.notified
        self.dispatcher.notified.clear()
        self.on_take()

    def poll(self) -> int:
        return self.dispatcher.poll(self.verbs.cq)

    @property
    def ids_for_python(self) -> list[int]:
        return [wr_id for wr_id, *_ in self.for_python]


@pytest.fixture
def rig(verbs: Queues) -> DispatchRig:
    return DispatchRig(verbs)


def attach_queues(
    verbs: Queues, rig: DispatchRig, key: int = KEY
) -> tuple[SendQueueCore, ReceiveQueue]:
    core, receives = SendQueueCore(8, 4, 16), ReceiveQueue(ring_of(verbs))
    rig.dispatcher.attach(key, core, receives)
    return core, receives


def test_an_empty_queue_notifies_nothing(rig: DispatchRig) -> None:
    assert rig.poll() == 0
    assert (rig.calls, rig.dispatcher.pending, rig.dispatcher.notified) == (0, 0, [])


def test_sends_complete_without_python(verbs: Queues, rig: DispatchRig) -> None:
    core = core_of(verbs)
    rig.dispatcher.attach(KEY, core, ReceiveQueue(ring_of(verbs)))
    for _ in range(8):
        core.send(b"x")
    verbs.sent(KEY, 3)
    verbs.sent(KEY, 7)
    assert rig.poll() == 2
    assert (core.oldest_pending, core.credits, rig.calls) == (8, 8, 0)


@pytest.mark.parametrize("reason", ["in_flight", "waiters", "failed"])
def test_sends_that_python_must_handle_are_passed_on(
    verbs: Queues, rig: DispatchRig, reason: str
) -> None:
    core = core_of(verbs)
    rig.dispatcher.attach(KEY, core, ReceiveQueue(ring_of(verbs)))
    for _ in range(8):
        core.send(b"x")
    if reason != "failed":
        setattr(core, reason, 1)
    verbs.sent(KEY, 3, FLUSHED if reason == "failed" else WcStatus.SUCCESS)
    assert rig.poll() == 1
    assert (core.oldest_pending, core.credits) == (4, 4)  # the credits are free nevertheless
    assert rig.ids_for_python == [FIRST + 3]


def test_messages_arrive_without_python(verbs: Queues, rig: DispatchRig) -> None:
    receive_rig = ReceiveRig(verbs)
    rig.dispatcher.attach(KEY, SendQueueCore(8, 4, 16), receive_rig.receives)
    receive_rig.receives.notify = False
    receive_rig.complete(b"one", flags=1, imm_data=9)
    receive_rig.complete(b"three")
    assert rig.poll() == 2
    assert (rig.calls, receive_rig.ring.posted) == (0, SLOTS - 2)
    assert receive_rig.receives.peek() == (0, 3, 1, 9, None)
    assert [receive_rig.receives.take_bytes() for _ in range(2)] == [b"one", b"three"]
    assert receive_rig.ring.posted == SLOTS


def test_a_queue_with_notify_set_is_notified_once(verbs: Queues, rig: DispatchRig) -> None:
    receive_rig = ReceiveRig(verbs, 8)
    rig.dispatcher.attach(KEY, SendQueueCore(8, 4, 16), receive_rig.receives)
    assert receive_rig.receives.notify
    receive_rig.complete()
    receive_rig.complete()
    rig.poll()
    receive_rig.complete()
    rig.poll()
    assert (rig.notified_keys, rig.calls, receive_rig.receives.notify) == ([KEY], 1, False)
    receive_rig.receives.notify = True
    receive_rig.complete()
    rig.poll()
    assert (rig.notified_keys, rig.calls) == ([KEY, KEY], 2)


def test_failed_receives_are_passed_on_and_not_counted(verbs: Queues, rig: DispatchRig) -> None:
    receive_rig = ReceiveRig(verbs)
    rig.dispatcher.attach(KEY, SendQueueCore(8, 4, 16), receive_rig.receives)
    slot = receive_rig.fill(b"")
    verbs.received(KEY, slot, status=FLUSHED)
    rig.poll()
    assert rig.ids_for_python == [FIRST | RECEIVE | slot]
    assert (len(receive_rig.receives), receive_rig.ring.posted, rig.notified_keys) == (0, SLOTS, [])


def test_completions_for_python_are_in_order_and_unchanged(verbs: Queues, rig: DispatchRig) -> None:
    receive_rig = ReceiveRig(verbs)
    receive_rig.receives.notify = False
    core = core_of(verbs)
    rig.dispatcher.attach(KEY, core, receive_rig.receives)
    core.send(b"x")
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
            receive_rig.complete()
        if number == 7:
            verbs.sent(KEY, 0)
    assert rig.poll() == 23
    assert (rig.for_python, rig.calls) == (expected, 1)
    assert (len(receive_rig.receives), core.oldest_pending) == (2, 1)
    assert rig.dispatcher.pending == 0  # they were handled


def test_key_zero_has_no_queues(verbs: Queues, rig: DispatchRig) -> None:
    attach_queues(verbs, rig)
    verbs.sent(0, 3)
    rig.poll()
    assert rig.ids_for_python == [3]
    rig.dispatcher.detach(0)


def test_a_batch_has_a_limit(verbs: Queues, rig: DispatchRig) -> None:
    for number in range(150):
        verbs.sent(1, number)
    assert [rig.poll() for _ in range(4)] == [64, 64, 22, 0]
    assert rig.ids_for_python == [(1 << 32) + number for number in range(150)]


@pytest.mark.parametrize("result", [-1, -errno.EIO, -errno.ENODEV])
def test_a_failed_queue_returns_a_negative_number(
    verbs: Queues, rig: DispatchRig, result: int
) -> None:
    verbs.break_queue(poll=result)
    assert rig.poll() == result
    assert rig.dispatcher.poll_for(verbs.cq, S) == result
    assert rig.calls == 0


@pytest.mark.parametrize("call", ["poll", "arm", "event"])
def test_an_address_must_be_a_number(call: str) -> None:
    """The test runs in a new process, because a failure would crash it."""
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
def test_arm_returns_0_or_an_errno(verbs: Queues, rig: DispatchRig, result: int) -> None:
    verbs.break_queue(arm=result)
    assert rig.dispatcher.arm(verbs.cq) == abs(result)
    assert verbs.arms == 1


def test_events_are_read_one_at_a_time_and_acknowledged(verbs: Queues, rig: DispatchRig) -> None:
    dispatcher = rig.dispatcher
    assert dispatcher.event(verbs.channel) == 0
    for _ in range(3):
        verbs.raise_event()
    for number in range(1, 4):
        assert dispatcher.event(verbs.channel) == verbs.cq
        assert verbs.acknowledged == number
    assert dispatcher.event(verbs.channel) == 0
    verbs.break_channel()
    assert dispatcher.event(verbs.channel) == -errno.EIO
    assert (verbs.polls, verbs.arms) == (0, 0)


# --- keys ---


@pytest.mark.parametrize("seed", range(20))
def test_keys_are_attached_and_detached_in_any_order(verbs: Queues, seed: int) -> None:
    source = random.Random(seed)
    rig = DispatchRig(verbs)
    # Consecutive keys, random keys, or keys of which many have the same index in the table.
    inverse = pow(2654435769, -1, 1 << 32)
    pools = [
        list(range(1, 200)),
        [source.randrange(1, 1 << 32) for _ in range(200)],
        [(low + (high << 10)) * inverse % (1 << 32) for low in range(1, 5) for high in range(50)],
    ]
    keys = [key for key in pools[seed % 3] if key]
    model: dict[int, SendQueueCore] = {}
    receives = ReceiveQueue(ReceiveRingCore(1, 1))
    for step in range(1500):
        key = source.choice(keys)
        if source.random() < (0.7 if step // 250 % 2 == 0 else 0.3):
            model[key] = SendQueueCore(2, 1, 0)
            rig.dispatcher.attach(key, model[key], receives)
        else:
            rig.dispatcher.detach(key)
            model.pop(key, None)
        if step % 25 == 0:
            check_keys(verbs, rig, model, keys)
    for key in list(model):
        rig.dispatcher.detach(key)
    check_keys(verbs, rig, {}, keys)
    assert sys.getrefcount(receives) == 2


def check_keys(
    verbs: Queues, rig: DispatchRig, model: dict[int, SendQueueCore], keys: list[int]
) -> None:
    rig.for_python.clear()
    for core in model.values():
        core.next_number, core.oldest_pending, core.credits = 1, 0, 1
    for key in keys:
        verbs.sent(key, 0)
    while rig.poll():
        pass
    assert rig.ids_for_python == [key << 32 for key in keys if key not in model]
    assert all((core.oldest_pending, core.credits) == (1, 2) for core in model.values())


def test_an_entry_moved_into_a_gap_leaves_no_copy(verbs: Queues, rig: DispatchRig) -> None:
    inverse = pow(2654435769, -1, 1 << 32)
    # In a table of 16 entries the first two keys have the index 0, the third has the index 1.
    first, second, third = (place * inverse % (1 << 32) for place in (16, 32, 17))
    cores = [SendQueueCore(2, 1, 0) for _ in range(3)]
    receives = ReceiveQueue(ReceiveRingCore(1, 1))
    rig.dispatcher.attach(first, cores[0], receives)
    rig.dispatcher.attach(second, cores[1], receives)
    rig.dispatcher.detach(first)
    rig.dispatcher.attach(third, cores[2], receives)
    counts = [sys.getrefcount(core) for core in cores]
    assert [count - counts[0] for count in counts] == [0, 1, 1]
    assert sys.getrefcount(receives) == 4


def test_attaching_a_key_again_replaces_its_queues(verbs: Queues, rig: DispatchRig) -> None:
    first, receives = attach_queues(verbs, rig)
    second, _ = attach_queues(verbs, rig)
    assert (sys.getrefcount(first), sys.getrefcount(receives)) == (2, 2)
    second.next_number = 1
    verbs.sent(KEY, 0)
    rig.poll()
    assert (first.oldest_pending, second.oldest_pending) == (0, 1)
    rig.dispatcher.detach(KEY)
    rig.dispatcher.detach(KEY)
    assert sys.getrefcount(second) == 2


@pytest.mark.parametrize("argument", ["key", "sends", "receives"])
def test_attach_refuses_wrong_arguments(verbs: Queues, rig: DispatchRig, argument: str) -> None:
    right: dict[str, Any] = {
        "key": KEY,
        "sends": SendQueueCore(8, 4, 16),
        "receives": ReceiveQueue(ring_of(verbs)),
    }
    right[argument] = 0 if argument == "key" else object()
    wrong = {
        "key": "must not be 0",
        "sends": "SendQueueCore expected",
        "receives": "ReceiveQueue expected",
    }[argument]
    with pytest.raises(ValueError if argument == "key" else TypeError, match=wrong):
        rig.dispatcher.attach(*right.values())


def test_a_completion_for_a_slot_outside_the_ring_raises(verbs: Queues, rig: DispatchRig) -> None:
    _, receives = attach_queues(verbs, rig)
    verbs.received(KEY, SLOTS, 1)
    with pytest.raises(ValueError, match="the slot does not exist"):
        rig.poll()
    assert len(receives) == 0


def test_an_exception_of_on_pending_is_raised_and_the_next_batch_is_handled(
    verbs: Queues, rig: DispatchRig
) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    rig.on_take = fail
    verbs.sent(9, 1)
    with pytest.raises(RuntimeError):
        rig.poll()
    verbs.sent(9, 2)
    with pytest.raises(RuntimeError):
        rig.dispatcher.poll_for(verbs.cq, S)
    assert rig.dispatcher.pending == 0
    rig.on_take = lambda: None
    verbs.sent(9, 3)
    assert rig.poll() == 1
    assert [wr_id & NUMBER_MASK for wr_id in rig.ids_for_python] == [1, 2, 3]


def test_on_pending_can_detach(verbs: Queues, rig: DispatchRig) -> None:
    receive_rig = ReceiveRig(verbs)
    rig.dispatcher.attach(KEY, SendQueueCore(8, 4, 16), receive_rig.receives)
    rig.on_take = lambda: rig.dispatcher.detach(KEY)
    receive_rig.complete()
    receive_rig.complete()
    rig.poll()
    assert (rig.notified_keys, len(receive_rig.receives)) == ([KEY], 2)


# --- poll_for() ---


def test_poll_for_ends_with_a_completion_from_another_thread(
    verbs: Queues, rig: DispatchRig
) -> None:
    """Polling releases the interpreter's lock, so the other thread can run."""

    def bring() -> None:
        while verbs.polls <= 10:
            time.sleep(0.001)
        verbs.sent(9, 1)

    thread = threading.Thread(target=bring)
    thread.start()
    assert rig.dispatcher.poll_for(verbs.cq, 100 * S) == 1
    thread.join()
    assert rig.ids_for_python == [(9 << 32) + 1]
    assert verbs.polls > 10


def test_poll_for_ends_in_time(verbs: Queues, rig: DispatchRig) -> None:
    began = time.monotonic_ns()
    assert rig.dispatcher.poll_for(verbs.cq, 2_000_000) == 0
    assert time.monotonic_ns() - began >= 2_000_000
    polls = verbs.polls
    assert rig.dispatcher.poll_for(verbs.cq, 0) == 0
    assert verbs.polls == polls + 1
    assert rig.calls == 0


def test_poll_for_with_a_completion_polls_once(verbs: Queues, rig: DispatchRig) -> None:
    verbs.sent(9, 1)
    assert rig.dispatcher.poll_for(verbs.cq, 15 * S) == 1
    assert verbs.polls == 1


# --- polling before a wait ---


class PollingRig(DispatchRig):
    """A ReceiveQueue and a SendQueueCore that poll. The budget of the loop does not end."""

    def __init__(self, verbs: Queues, poll_budget: int) -> None:
        super().__init__(verbs)
        self.receive_rig = ReceiveRig(verbs)
        self.core = core_of(verbs, 8, 1)
        self.receives = self.receive_rig.receives
        self.receives.notify = False
        self.dispatcher.attach(KEY, self.core, self.receives)
        self.receives.set_polling(self.dispatcher, verbs.cq, poll_budget)
        self.core.set_polling(self.dispatcher, verbs.cq, poll_budget)
        self.dispatcher.budget = LONG

    def begin_budget(self) -> None:
        self.dispatcher.budget_start = time.monotonic_ns()


def test_take_bytes_finds_a_message_by_polling(verbs: Queues) -> None:
    rig = PollingRig(verbs, 0)
    rig.receive_rig.complete(b"hello")
    assert rig.receives.take_bytes() == b"hello"
    assert (rig.calls, rig.receives.preempted, verbs.polls) == (0, False, 1)
    assert rig.receives.take_bytes() is None
    assert verbs.polls == 2
    assert rig.receives.missed_polls == 0


def test_no_task_polls_after_the_budget_of_the_loop(verbs: Queues) -> None:
    """Otherwise a task that always finds messages would block all other tasks."""
    rig = PollingRig(verbs, 0)
    rig.receive_rig.complete(b"hello")
    rig.core.credits = 0
    rig.dispatcher.budget = 0
    assert rig.receives.take_bytes() is None
    assert rig.core.send(b"x") == -1
    assert (verbs.polls, rig.receives.preempted) == (0, True)
    rig.core.resumed()
    assert rig.dispatcher.budget_start > 0
    rig.dispatcher.budget = LONG
    assert rig.receives.take_bytes() == b"hello"


def test_no_task_polls_longer_than_the_budget_of_the_loop(verbs: Queues) -> None:
    rig = PollingRig(verbs, 15 * S)
    assert CompletionDispatcher(lambda: None).budget == LOOP_BUDGET_NS
    for length in (LOOP_BUDGET_NS, 20 * LOOP_BUDGET_NS):
        rig.dispatcher.budget = length
        rig.begin_budget()
        assert rig.receives.take_bytes() is None
        assert time.monotonic_ns() >= rig.dispatcher.budget_start + length
        assert (rig.receives.preempted, rig.receives.missed_polls) == (True, 0)


def test_no_task_polls_while_other_tasks_wait_for_the_loop(verbs: Queues) -> None:
    """The last poll produced work for another task."""
    rig = PollingRig(verbs, 15 * S)
    rig.core.in_flight = 1
    rig.core.send(b"x")
    verbs.sent(KEY, 0)
    assert rig.receives.take_bytes() is None
    assert (rig.calls, rig.receives.preempted) == (1, True)
    assert rig.dispatcher.notified_at > rig.dispatcher.budget_start
    rig.receive_rig.complete(b"hello")
    polls = verbs.polls
    assert rig.receives.take_bytes() is None
    assert (verbs.polls, rig.receives.preempted) == (polls, True)
    rig.begin_budget()
    assert rig.receives.take_bytes() == b"hello"


@pytest.mark.parametrize("by_polling", [True, False])
def test_poll_for_sets_notified_at(verbs: Queues, rig: DispatchRig, by_polling: bool) -> None:
    """poll() does not set it: the loop calls it, and runs the woken tasks afterwards."""
    verbs.sent(99, 1)
    if by_polling:
        assert rig.dispatcher.poll_for(verbs.cq, S) == 1
    else:
        assert rig.dispatcher.poll(verbs.cq) == 1
    assert (rig.dispatcher.notified_at > 0) is by_polling


@pytest.mark.parametrize("poll_budget", [-1, 0, 50_000])
def test_without_a_dispatcher_or_budget_take_bytes_does_not_poll(
    verbs: Queues, poll_budget: int
) -> None:
    rig = PollingRig(verbs, poll_budget)
    if poll_budget >= 0:
        rig.receives.set_polling(None, verbs.cq, poll_budget)
    rig.receive_rig.complete()
    assert rig.receives.take_bytes() is None
    assert verbs.polls == 0
    rig.receives.set_polling(rig.dispatcher, 0, 0)
    assert rig.receives.take_bytes() is None
    assert verbs.polls == 0


def test_take_bytes_with_a_message_does_not_poll(verbs: Queues) -> None:
    rig = PollingRig(verbs, 100_000)
    rig.receive_rig.arrive()
    assert rig.receives.take_bytes() == b"hello"
    assert verbs.polls == 0


def test_take_bytes_polls_for_the_poll_budget(verbs: Queues) -> None:
    rig = PollingRig(verbs, 200_000)
    for missed in range(1, 4):
        began = time.monotonic_ns()
        assert rig.receives.take_bytes() is None
        assert time.monotonic_ns() - began >= 200_000
        assert (rig.receives.missed_polls, rig.receives.preempted) == (missed, False)
    rig.receive_rig.complete()
    assert rig.receives.take_bytes() == b"hello"
    assert rig.receives.missed_polls == 0


def test_take_bytes_finds_a_message_that_comes_while_it_polls(verbs: Queues) -> None:
    rig = PollingRig(verbs, 15 * S)
    rig.receive_rig.complete(b"hello")
    verbs.hide_completions(100)
    assert rig.receives.take_bytes() == b"hello"
    assert (rig.calls, rig.receives.missed_polls, verbs.polls) == (0, 0, 101)


def test_a_message_found_by_python_resets_missed_polls(verbs: Queues) -> None:
    """This is the case with a shared receive queue."""
    rig = PollingRig(verbs, 15 * S)
    rig.receives.missed_polls = 3
    rig.on_take = lambda: rig.receive_rig.arrive(b"hello")
    verbs.sent(9, 1)
    assert rig.receives.take_bytes() == b"hello"
    assert rig.receives.missed_polls == 0


def test_a_completion_without_work_for_tasks_does_not_end_polling(verbs: Queues) -> None:
    rig = PollingRig(verbs, 15 * S)
    rig.core.send(b"x")
    for _ in range(BATCH):  # the first poll takes only these
        verbs.sent(KEY, 0)
    rig.receive_rig.complete(b"hello")
    assert rig.receives.take_bytes() == b"hello"
    assert (rig.core.oldest_pending, rig.calls, verbs.polls) == (1, 0, 2)


def test_work_for_another_task_ends_polling(verbs: Queues) -> None:
    rig = PollingRig(verbs, 15 * S)
    verbs.sent(9, 1)
    assert rig.receives.take_bytes() is None
    assert rig.ids_for_python == [(9 << 32) + 1]
    assert (rig.receives.preempted, rig.receives.missed_polls) == (True, 0)


def test_take_bytes_ignores_a_failed_queue(verbs: Queues) -> None:
    rig = PollingRig(verbs, 15 * S)
    verbs.break_queue(poll=-errno.EIO)
    assert rig.receives.take_bytes() is None
    assert (verbs.polls, rig.calls) == (1, 0)


def test_take_bytes_raises_what_on_pending_raises(verbs: Queues) -> None:
    rig = PollingRig(verbs, 15 * S)

    def fail() -> None:
        raise RuntimeError("no")

    rig.on_take = fail
    verbs.sent(9, 1)
    with pytest.raises(RuntimeError):
        rig.receives.take_bytes()
    rig.core.credits = 0
    verbs.sent(9, 1)
    with pytest.raises(RuntimeError):
        rig.core.send(b"x")


def test_a_queue_closed_while_polling_returns_nothing(verbs: Queues) -> None:
    rig = PollingRig(verbs, 15 * S)
    rig.on_take = lambda: setattr(rig.receives, "closed", True)
    rig.receive_rig.complete()
    verbs.sent(9, 1)
    assert rig.receives.take_bytes() is None
    assert len(rig.receives) == 1


def test_a_full_queue_polls_for_a_credit(verbs: Queues) -> None:
    rig = PollingRig(verbs, 15 * S)
    core = rig.core
    for _ in range(8):
        assert core.send(b"x") == 0
    assert verbs.polls == 0
    verbs.sent(KEY, 2)
    verbs.hide_completions(100)
    assert core.send(b"y") == 0
    assert (core.credits, core.oldest_pending, verbs.posted) == (2, 3, SLOTS + 9)
    core.set_polling(None, 0, -1)
    assert [core.send(b"z") for _ in range(3)] == [0, 0, -1]


@pytest.mark.parametrize("how", ["closed", "destroyed"])
def test_a_core_that_is_closed_while_polling_posts_nothing(verbs: Queues, how: str) -> None:
    rig = PollingRig(verbs, 15 * S)
    core = rig.core
    for _ in range(8):
        core.send(b"x")

    def end() -> None:
        if how == "closed":
            core.is_open = False
        else:
            verbs.destroy()

    rig.on_take = end
    verbs.sent(KEY, 2)
    verbs.sent(9, 1)
    assert core.send(b"y") == -1
    assert (core.credits, verbs.posted) == (3, SLOTS + 8)


# --- memory ---


class Callback:
    """A callback that refers to all other objects."""

    def __init__(self) -> None:
        self.all: list[object] = []

    def __call__(self) -> None:
        raise AssertionError("there are no completions for Python")


class Ring(ReceiveRingCore):
    """Like ReceiveRing, a subclass that allows weak references."""


def test_cycles_are_collected(verbs: Queues) -> None:
    gc.collect()
    callback = Callback()
    dispatcher = CompletionDispatcher(callback)
    ring, core = Ring(SLOTS, SLOT_SIZE), SendQueueCore(8, 4, 16)
    receives = ReceiveQueue(ring)
    receives.set_polling(dispatcher, verbs.cq, 5)
    core.set_polling(dispatcher, verbs.cq, 5)
    core.open(callback, 0, 0)
    dispatcher.attach(KEY, core, receives)
    callback.all = [dispatcher, core, receives]
    references: list[weakref.ref[Any]] = [weakref.ref(callback), weakref.ref(ring)]
    del dispatcher, core, receives, ring, callback
    assert references[0]() is not None
    gc.collect()
    assert [ref() for ref in references] == [None, None]


def test_a_cycle_without_python_is_collected(verbs: Queues) -> None:
    ring = Ring(SLOTS, SLOT_SIZE)
    receives, dispatcher = ReceiveQueue(ring), CompletionDispatcher(lambda: None)
    dispatcher.attach(KEY, SendQueueCore(8, 4, 16), receives)
    receives.set_polling(dispatcher, verbs.cq, 5)
    references = weakref.ref(ring)
    del ring, receives, dispatcher
    gc.collect()
    assert references() is None


def test_set_polling_releases_the_previous_dispatcher(verbs: Queues) -> None:
    receives, core = ReceiveQueue(ring_of(verbs)), SendQueueCore(8, 4, 16)
    first, second = CompletionDispatcher(lambda: None), CompletionDispatcher(lambda: None)
    for one in (receives, core):
        one.set_polling(first, verbs.cq, 5)
        assert sys.getrefcount(first) == 3
        one.set_polling(second, verbs.cq, 5)
        one.set_polling(second, verbs.cq, 5)
        assert (sys.getrefcount(first), sys.getrefcount(second)) == (2, 3)
        one.set_polling(None, 0, -1)
        assert sys.getrefcount(second) == 2


def least(growth: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """Measure several times, and return the smallest growth of each figure.

    Other threads of the process, such as those of the test runner, allocate memory, too. A leak
    grows each time.
    """
    return tuple(map(min, zip(*(growth() for _ in range(5)), strict=True)))


def test_thousands_of_messages_leave_no_memory_behind(verbs: Queues) -> None:
    rig = PollingRig(verbs, 0)
    receives, core = rig.receives, rig.core
    receives.backlog = 1000

    def exchange(times: int) -> None:
        for number in range(times):
            for _ in range(3):
                rig.receive_rig.complete(b"some message")
            assert core.send(b"some answer") == 0
            verbs.sent(KEY, core.next_number - 1)
            verbs.sent(9, 1)
            receives.notify = number % 5 == 0
            rig.poll()
            found = receives.peek()
            assert found is not None
            if number % 2:
                receives.drop_oldest()
                if found[0] >= 0:
                    assert rig.receive_rig.ring._post(found[0]) == 0
                assert [receives.take_bytes() for _ in range(3)] == [b"some message"] * 2 + [None]
            else:
                assert [receives.take_bytes() for _ in range(4)] == [b"some message"] * 3 + [None]
            rig.for_python.clear()
            rig.notified_keys.clear()

    exchange(200)
    gc.collect()
    watched = [rig.dispatcher, core, receives, rig.receive_rig.ring, None]

    def growth() -> tuple[int, int, int]:
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
        more_blocks = sys.getallocatedblocks() - blocks
        now = [sys.getrefcount(one) for one in watched]
        references = max(abs(one - other) for one, other in zip(counts, now, strict=True))
        return after - before, more_blocks, references

    memory, more_blocks, references = least(growth)
    assert memory < 20_000
    assert more_blocks < 300
    assert references < 100
    assert receives.spilled > 1000


def test_messages_that_were_not_taken_are_freed(verbs: Queues) -> None:
    def fill() -> None:
        receive_rig = ReceiveRig(verbs)
        receive_rig.receives.backlog = 1000
        for _ in range(50):
            receive_rig.arrive(b"x" * SLOT_SIZE)
        receive_rig.receives.peek()

    def growth() -> tuple[int]:
        blocks = sys.getallocatedblocks()
        for _ in range(100):
            fill()
        gc.collect()
        return (sys.getallocatedblocks() - blocks,)

    fill()
    gc.collect()
    assert least(growth)[0] < 300


def test_two_modules_have_types_of_their_own(verbs: Queues) -> None:
    """A CompletionDispatcher accepts only the types of its own module."""
    code = """
import importlib.util, sys
from aiordma._native import fast_path
spec = importlib.util.spec_from_file_location("aiordma._native._fast_path", fast_path.__file__)
other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
assert other.SendQueueCore is not fast_path.SendQueueCore
for one, another in ((fast_path, other), (other, fast_path)):
    dispatcher = one.CompletionDispatcher(lambda: None)
    dispatcher.attach(1, one.SendQueueCore(1, 1, 1), one.ReceiveQueue(one.ReceiveRingCore(1, 1)))
    try:
        receives = one.ReceiveQueue(one.ReceiveRingCore(1, 1))
        dispatcher.attach(1, another.SendQueueCore(1, 1, 1), receives)
    except TypeError:
        continue
    raise AssertionError("another module's")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- forked children ---

FORKED = """
import os, sys, warnings
from simulator.queues import RECEIVE, Queues
from aiordma._native._fast_path import ReceiveQueue, ReceiveRingCore, SendQueueCore
from aiordma.loop.forked import note_use

warnings.simplefilter("ignore")
verbs = Queues()
core = SendQueueCore(8, 4, 16)
core.open(verbs, verbs.qp_cell, 5 << 32)
ring = ReceiveRingCore(4, 32)
ring._use(bytearray(128), 0x10000, 7)
ring._open(verbs, (verbs.qp_cell, 0), 5 << 32 | RECEIVE)
receives = ReceiveQueue(ring)
for slot in range(2):
    receives.append(slot, 5, 0, 0)
note = sys.argv[1] == "used"
if note:
    note_use()
child = os.fork()
if not child:
    posted = verbs.posted
    results = (core.send(b"x"), ring._post(3), receives.take_bytes(), verbs.posted - posted)
    expected = (-1, 0, None, 0) if note else (0, 0, bytes(5), 3)
    os._exit(42 if results == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
assert (core.send(b"x"), ring._post(3), receives.take_bytes()) == (0, 0, bytes(5))
assert (verbs.posted, ring.posted, len(receives)) == (3, 2, 1)
"""


@pytest.mark.parametrize("parent", ["used", "unused"])
def test_a_forked_child_posts_and_takes_nothing(parent: str) -> None:
    folder = Path(__file__).parent.parent
    paths = [str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", FORKED, parent]
    subprocess.run(command, check=True, timeout=30, env=environment)
