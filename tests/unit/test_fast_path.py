"""The C types of the fast path and CompletionReader, on queues without a network."""

from __future__ import annotations

import errno
import gc
import random
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from attempts import reasons_to_wait, send_now
from simulator.queues import NUMBER_MASK, RECEIVE, Queues

from aiordma import VerbsError
from aiordma._native import fast_path
from aiordma.dispatch.completion_reader import POLL_BATCH, CompletionReader
from aiordma.dispatch.deferred_arming import DeferredArming
from aiordma.enums import WcOpcode, WcStatus
from aiordma.loop import running_loop

KEY = 5
FIRST = KEY << 32
SLOTS, SLOT_SIZE = 4, 32
S = 1_000_000_000
LONG = 10**18
"""A time budget of the loop that does not end, in nanoseconds."""


class Rig:
    """A CompletionDispatcher with a send queue and a receive queue that poll.

    The slots are filled in the order of their posting. The budget of the loop does not end.
    """

    def __init__(self, verbs: Queues, poll_budget: int = 15 * S) -> None:
        self.verbs = verbs
        self.failures: list[tuple[int, str]] = []
        self.full: list[object] = []
        self.reader = CompletionReader(
            self.take_pending, lambda *failure: self.failures.append(failure), self.full.append
        )
        self.dispatcher = self.reader.dispatcher
        self.for_python: list[int] = []
        """The wr_ids of the completions for Python."""
        self.fields: list[tuple[int, ...]] = []
        """Their length, status, opcode, flags, immediate data and queue pair."""
        self.notified: list[int] = []
        self.on_take: Callable[[], object] = lambda: None
        self.memory = bytearray(SLOTS * SLOT_SIZE)
        self.ring = fast_path.ReceiveRingCore(SLOTS, SLOT_SIZE)
        self.ring._use(self.memory, 0x10000, 77)
        self.ring._open(verbs, (verbs.qp_cell, 0), FIRST | RECEIVE)
        assert [self.ring._post(slot) for slot in range(SLOTS)] == [0] * SLOTS
        self._posted: list[int] = []
        self.receives = fast_path.ReceiveQueue(self.ring)
        self.receives.notify = False
        self.policy = fast_path.AdaptivePolling(self.receives)
        self.receives.set_parking(None, None, self.policy)
        self.core = fast_path.SendQueueCore(8, 1, 16)
        self.core.open(verbs, verbs.qp_cell, FIRST)
        self.dispatcher.attach(KEY, self.core, self.receives)
        self.receives.set_polling(self.dispatcher, verbs.cq, poll_budget)
        self.core.set_polling(self.dispatcher, verbs.cq, poll_budget)
        self.dispatcher.budget = LONG

    def take_pending(self) -> None:
        for wc in self.reader.pending():
            self.for_python.append(wc.wr_id)
            fields = (wc.byte_len, wc.status, wc.opcode, wc.wc_flags, wc.imm_data, wc.qp_num)
            self.fields.append(fields)
        self.notified += self.reader.notified()
        self.on_take()

    def watch(self) -> fast_path.PolledQueue:
        """Read events from now on. Return the queue that they are of."""
        queue = self.dispatcher.queues[self.verbs.cq] = fast_path.PolledQueue()
        queue._open(self.verbs.cq)
        self.dispatcher.watch(self.verbs.channel)
        return queue

    def poll(self) -> int:
        return self.dispatcher.poll(self.verbs.cq)

    def send(self, count: int) -> None:
        """Post small messages."""
        assert [send_now(self.core, b"x") for _ in range(count)] == [0] * count

    def fill(self, message: bytes) -> int:
        """Put a message into the next posted slot. Return the slot."""
        posts = self.verbs.new_posts()
        self._posted += [post.wr_id & NUMBER_MASK for post in posts if post.kind == "r"]
        slot = self._posted.pop(0)
        self.memory[slot * SLOT_SIZE : slot * SLOT_SIZE + len(message)] = message
        return slot

    def arrive(self, message: bytes = b"hello") -> None:
        slot = self.fill(message)
        self.ring.posted -= 1
        self.receives.append(slot, len(message), 0, 0)

    def complete(self, message: bytes = b"hello") -> None:
        """Put a message into the next posted slot, and add its completion."""
        self.verbs.received(KEY, self.fill(message), len(message))


@pytest.fixture
def rig(verbs: Queues) -> Rig:
    return Rig(verbs)


def test_a_refused_request_changes_nothing(verbs: Queues, rig: Rig) -> None:
    rig.send(1)
    shared = fast_path.ReceiveRingCore(SLOTS, SLOT_SIZE)
    shared._open(verbs, (0, verbs.srq_cell), FIRST | RECEIVE)
    posts: list[Callable[[], int]] = [lambda: send_now(rig.core, b"x")]
    posts += [lambda: rig.ring._post(0), lambda: shared._post(0)]

    def state() -> tuple[int, ...]:
        core = rig.core
        return core.next_number, core.credits, core.unsignaled, core.messages, core.nbytes

    before = state()
    for result, code, error in (
        (errno.ENOMEM, 0, errno.ENOMEM),
        (-errno.ENOMEM, 0, errno.ENOMEM),
        (-1, errno.EINVAL, errno.EINVAL),
        (errno.EINVAL, errno.EAGAIN, errno.EINVAL),
        (-1, 0, 1),  # errno was not set
    ):
        verbs.refuse(result, code)
        assert [post() for post in posts] == [error] * 3
    assert state() == before
    assert (rig.ring.posted, shared.posted, verbs.posted) == (SLOTS, 0, SLOTS + 1)
    verbs.refuse(0)
    for slot in (-1, SLOTS, -(1 << 30), 1 << 32):
        assert rig.ring._post(slot) == errno.EINVAL
    core = rig.core
    for _ in reasons_to_wait(core):
        assert send_now(core, b"x") == -1  # the slow path waits, or posts the others first
    for data in ("x", None, bytes(17), bytearray(17), memoryview(b"x" * 9)[::2]):
        assert send_now(core, data) == -1
    verbs.destroy()
    assert [post() for post in posts] == [-1, errno.EINVAL, errno.EINVAL]
    rig.core.open(None, 0, FIRST)
    assert (send_now(rig.core, b"x"), fast_path.ReceiveRingCore(1, 1)._post(0)) == (
        -1,
        errno.EINVAL,
    )
    assert verbs.posted == SLOTS + 2  # the last one was the batch of reasons_to_wait()


def test_a_completion_completes_all_requests_before_it_once(rig: Rig) -> None:
    rig.send(6)
    for number in (3, 3, 1, 0, *(6, 7, NUMBER_MASK, 1 << 30)):  # the last four were not posted
        rig.core.completed(number)
        assert (rig.core.oldest_pending, rig.core.credits) == (4, 6)
    rig.core.completed(5)
    assert (rig.core.oldest_pending, rig.core.credits) == (6, 8)


def test_the_ring_has_a_reference_to_its_memory_which_is_large_enough() -> None:
    memory, small, other = (bytearray(SLOTS * SLOT_SIZE - is_small) for is_small in (0, 1, 0))
    ring = fast_path.ReceiveRingCore(SLOTS, SLOT_SIZE)
    ring._use(memory, 0, 0)
    with pytest.raises(BufferError):
        memory.clear()
    with pytest.raises(ValueError, match="smaller than the slots"):
        ring._use(small, 0, 0)
    with pytest.raises(ValueError, match="the slot does not exist"):  # it has no memory now
        fast_path.ReceiveQueue(ring).append(0, 0, 0, 0)
    ring._use(other, 0, 0)
    del ring
    for each in (memory, small, other):
        each.clear()


def test_wrong_arguments_are_refused(verbs: Queues, rig: Rig) -> None:
    core, receives, dispatcher = rig.core, rig.receives, rig.dispatcher
    wrong: Any = object()
    calls: list[tuple[str, Callable[..., object], tuple[Any, ...]]] = [
        ("must not be negative", fast_path.ReceiveRingCore, (-1, 1)),
        ("ReceiveRingCore expected", fast_path.ReceiveQueue, (wrong,)),
        ("SendQueueCore expected", dispatcher.attach, (1, wrong, receives)),
        ("ReceiveQueue expected", dispatcher.attach, (1, core, wrong)),
        ("must not be 0", dispatcher.attach, (0, core, receives)),
        ("CompletionDispatcher expected", core.set_polling, (wrong, 1, 1)),
        ("not writable", rig.ring._use, (bytes(SLOTS * SLOT_SIZE), 0, 0)),
    ]
    for slot, length in ((-1, 0), (SLOTS, 0), (1 << 30, 0), (0, SLOT_SIZE + 1), (0, 2**32 - 1)):
        calls.append(("the slot does not exist", receives.append, (slot, length, 0, 0)))
    numbered: Any = (core.completed, core.take_failed, core.stop_waiting)
    calls += [("can't convert negative", call, (-1,)) for call in numbered]
    for match, call, arguments in calls:
        with pytest.raises((TypeError, ValueError, OverflowError, BufferError), match=match):
            call(*arguments)
    assert (core.take_failed(0), len(receives), receives.messages) == (None, 0, 0)


def test_completions_for_python_come_in_batches_and_unchanged(verbs: Queues, rig: Rig) -> None:
    keys = [0, *range(100, 100 + POLL_BATCH)]  # the key 0 has no queues
    read, flushed = WcOpcode.RDMA_READ, WcStatus.WR_FLUSH_ERR
    expected = [(1000 + key, flushed, read, key % 8, 3 * key, key + 1) for key in keys]
    for key, (length, status, _, flags, imm_data, number) in zip(keys, expected, strict=True):
        more: Any = {"flags": flags, "imm_data": imm_data, "qp_num": number}
        verbs.put(key << 32 | 3, length, status=WcStatus(status), opcode=read, **more)
    assert [rig.poll() for _ in range(3)] == [POLL_BATCH, 1, 0]
    assert rig.for_python == [key << 32 | 3 for key in keys]
    assert rig.fields == expected
    rig.send(2)
    verbs.sent(KEY, 1, flushed)
    slot = rig.fill(b"")
    verbs.received(KEY, slot, status=flushed)
    assert (rig.poll(), rig.for_python[-2:]) == (2, [FIRST + 1, FIRST | RECEIVE | slot])
    assert (rig.core.credits, rig.ring.posted, len(rig.receives)) == (8, SLOTS, 0)
    assert (list(rig.reader.pending()), list(rig.reader.notified())) == ([], [])
    rig.receives.notify = True
    rig.complete()
    rig.complete()
    rig.poll()
    assert (rig.notified, rig.receives.notify) == ([KEY], False)  # once


def test_shared_receives_go_to_the_queue_pair_with_their_number(verbs: Queues, rig: Rig) -> None:
    """The key in such a receive is that of the shared receive queue, which has no entry."""
    shared, flushed = 50, WcStatus.WR_FLUSH_ERR
    rig.dispatcher.consumers.update({17: KEY, 18: KEY + 1})
    slot = rig.fill(b"hello")
    verbs.received(shared, slot, 5, qp_num=17)
    assert (rig.poll(), rig.for_python) == (1, [])
    assert (rig.receives.take_bytes(), rig.ring.posted) == (b"hello", SLOTS)
    receive = shared << 32 | RECEIVE | slot
    for number in (18, 19):  # of a queue pair that is not attached, and of one that does not share
        verbs.received(shared, slot, 5, qp_num=number)
    verbs.received(shared, slot, status=flushed, qp_num=17)
    verbs.put(shared << 32 | slot, 5, qp_num=17)
    assert (rig.poll(), rig.for_python) == (4, [receive, receive, receive, shared << 32 | slot])
    del rig.dispatcher.consumers[17]
    verbs.received(shared, slot, 5, qp_num=17)
    assert (rig.poll(), rig.for_python[4:], len(rig.receives)) == (1, [receive], 0)


def test_nothing_is_polled_while_a_batch_is_dispatched(verbs: Queues, rig: Rig) -> None:
    """A second batch would overwrite the completions that Python is reading."""
    rig.watch()

    def poll_again() -> None:
        assert verbs.polls == 1
        with pytest.raises(RuntimeError, match="a batch of completions is being dispatched"):
            rig.poll()
        with pytest.raises(RuntimeError, match="a batch of completions is being dispatched"):
            rig.dispatcher.poll_for(verbs.cq, LONG)
        assert rig.receives.take_bytes() is None
        rig.dispatcher.handle_event()
        assert verbs.polls == 1

    rig.on_take = poll_again
    verbs.put(1 << 32 | 3)
    assert (rig.poll(), rig.for_python) == (1, [1 << 32 | 3])
    rig.on_take = lambda: None
    assert rig.poll() == 0


def test_python_gets_the_first_and_the_last_flushed_receive(verbs: Queues, rig: Rig) -> None:
    verbs.received(KEY, 0, status=WcStatus.WR_FLUSH_ERR)
    rig.poll()
    rig.ring.posted -= 1  # as Python does
    for slot in range(1, SLOTS):
        verbs.received(KEY, slot, status=WcStatus.WR_FLUSH_ERR)
        rig.poll()
    assert rig.for_python == [FIRST | RECEIVE, FIRST | RECEIVE | SLOTS - 1]
    assert (rig.ring.failed, rig.ring.posted) == (SLOTS, 1)


def test_python_gets_each_receive_that_failed_for_another_reason(verbs: Queues, rig: Rig) -> None:
    for slot in range(SLOTS - 1):
        verbs.received(KEY, slot, status=WcStatus.LOC_LEN_ERR)
    rig.poll()
    assert rig.for_python == [FIRST | RECEIVE | slot for slot in range(SLOTS - 1)]
    assert rig.ring.failed == SLOTS - 1


def test_python_gets_no_failed_receive_of_a_connection_that_this_side_has_closed(
    verbs: Queues, rig: Rig
) -> None:
    rig.receives.closed = True
    for slot in range(SLOTS):
        verbs.received(KEY, slot, status=WcStatus.WR_FLUSH_ERR)
    rig.poll()
    assert rig.for_python == []
    assert (rig.ring.failed, rig.ring.posted) == (SLOTS, 0)


def test_the_queue_of_an_event_is_polled_and_armed_again(verbs: Queues, rig: Rig) -> None:
    queue = rig.watch()
    for _ in range(2):
        verbs.raise_event()
    for _ in range(3):  # more often than there are events
        rig.dispatcher.handle_event()
    assert (verbs.acknowledged, verbs.polls, verbs.arms, queue.is_armed) == (2, 5, 2, True)
    queue.pollers = 1
    verbs.raise_event()
    rig.dispatcher.handle_event()
    assert (verbs.acknowledged, verbs.polls, verbs.arms, queue.is_armed) == (3, 6, 2, False)
    queue.pollers = 0
    rig.dispatcher.arm_again(queue)
    assert (verbs.polls, verbs.arms, rig.full) == (7, 3, [])
    rig.dispatcher.queues.clear()  # the queue of this event is not known any more
    verbs.raise_event()
    rig.dispatcher.handle_event()
    assert (verbs.acknowledged, verbs.polls) == (4, 7)
    rig.dispatcher.watch(0)
    verbs.raise_event()
    rig.dispatcher.handle_event()
    assert (verbs.acknowledged, rig.failures) == (4, [])


def test_of_several_queues_the_one_of_the_event_is_polled(verbs: Queues, rig: Rig) -> None:
    queue, other = rig.watch(), fast_path.PolledQueue()
    rig.dispatcher.queues[0] = other
    verbs.raise_event()
    rig.complete()
    rig.dispatcher.handle_event()
    assert (rig.receives.take_bytes(), verbs.acknowledged) == (b"hello", 1)
    # The completion, then none, and none after arming.
    assert (verbs.polls, queue.is_armed, other.is_armed) == (3, True, False)


def test_completions_that_tasks_bring_about_are_taken_up_to_a_limit(
    verbs: Queues, rig: Rig
) -> None:
    queue = rig.watch()
    taken: list[bytes | None] = []

    def complete_another() -> None:
        taken.append(rig.receives.take_bytes())
        rig.receives.notify = True
        if len(taken) < 12:
            rig.complete()

    rig.receives.notify = True
    rig.on_take = complete_another
    verbs.raise_event()
    rig.complete()
    rig.dispatcher.handle_event()
    # The last one was found after arming.
    assert (taken, verbs.acknowledged, queue.is_armed) == ([b"hello"] * 9, 1, True)
    rig.dispatcher.handle_event()
    assert (len(taken), verbs.acknowledged) == (12, 2)  # the ninth was behind the arming


def test_a_task_runs_before_the_event_is_read(verbs: Queues, rig: Rig) -> None:
    """Its answer to the peer does not wait for two system calls."""
    queue = rig.watch()
    rig.receives.notify = True
    seen: list[tuple[int, int]] = []
    rig.on_take = lambda: seen.append((verbs.acknowledged, verbs.arms))
    verbs.raise_event()
    rig.complete()
    rig.dispatcher.handle_event()
    assert (seen, verbs.acknowledged, verbs.arms) == ([(0, 0)], 1, 1)
    assert queue.is_armed


def test_a_task_that_ends_the_reading_leaves_the_event(verbs: Queues, rig: Rig) -> None:
    rig.watch()
    rig.receives.notify = True
    rig.on_take = lambda: rig.dispatcher.watch(0)
    verbs.raise_event()
    rig.complete()
    rig.dispatcher.handle_event()
    assert (verbs.acknowledged, verbs.arms, rig.failures) == (0, 0, [])


def test_a_loop_that_waits_or_finds_no_completions_arms_its_queues(verbs: Queues, rig: Rig) -> None:
    queue, dispatcher = rig.watch(), rig.dispatcher
    calls: list[bool] = []
    dispatcher.on_wait = lambda: calls.append(dispatcher.arm_again(queue))
    dispatcher.before_wait(1.0)
    assert calls == []  # nothing was left unarmed
    verbs.raise_event()
    rig.dispatcher.handle_event()
    assert (verbs.arms, dispatcher.has_unarmed) == (0, True)
    for _ in range(8):  # the loop does not wait, and each iteration finds a message by polling
        rig.complete()
        rig.receives.take_bytes()
        dispatcher.before_wait(0.0)
    assert (calls, verbs.arms) == ([], 0)
    iterations = 0
    while not calls:
        dispatcher.before_wait(0.0)
        iterations += 1
    assert (iterations, calls, verbs.arms, queue.is_armed) == (3, [False], 1, True)
    verbs.raise_event()
    rig.dispatcher.handle_event()
    rig.complete()
    dispatcher.before_wait(0.001)
    assert (calls, verbs.arms, dispatcher.has_unarmed) == ([False, True], 2, False)
    dispatcher.on_wait = None
    dispatcher.has_unarmed = True
    dispatcher.before_wait(1.0)
    assert (len(calls), dispatcher.has_unarmed) == (2, False)
    verbs.raise_event()
    rig.dispatcher.handle_event()
    assert verbs.arms == 3  # at once
    with pytest.raises(TypeError):
        dispatcher.before_wait("soon")  # type: ignore[arg-type]


class CompletesBeforeTheWait(trio.abc.Instrument):
    """A message arrives when trio has decided to wait, and before the queue is armed."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.is_done = False

    def before_io_wait(self, timeout: float) -> None:
        if timeout and not self.is_done:
            self.is_done = True
            self._rig.complete()


@pytest.mark.usefixtures("time_limit")
def test_a_completion_just_before_trio_waits_ends_the_wait(verbs: Queues, rig: Rig) -> None:
    queue = rig.watch()

    async def main() -> None:
        trio.lowlevel.add_instrument(CompletesBeforeTheWait(rig))
        arming = DeferredArming(running_loop(), rig.dispatcher)
        states = [arming.is_on]
        arming.start()
        states.append(arming.is_on)
        assert states == [False, True]
        verbs.raise_event()
        rig.dispatcher.handle_event()
        assert not queue.is_armed
        rig.receives.waiter = running_loop().create_future()
        await rig.receives.waiter
        assert (rig.receives.take_bytes(), queue.is_armed) == (b"hello", True)
        arming.stop()
        arming.stop()
        verbs.raise_event()
        rig.dispatcher.handle_event()
        assert queue.is_armed

    trio.run(main)


def test_failures_of_the_queue_and_of_the_channel_are_reported(verbs: Queues, rig: Rig) -> None:
    reader: Any = rig.reader
    cq: Any = SimpleNamespace(address=verbs.cq)
    queue = rig.watch()
    verbs.break_channel()
    for failure in (-errno.EIO, errno.EIO):
        verbs.break_queue(poll=-errno.EIO, arm=failure)
        polls: list[Callable[[], object]] = [
            lambda: reader.poll(cq),
            lambda: reader.poll_for(cq, S),
        ]
        for call in polls:
            with pytest.raises(VerbsError, match="ibv_poll_cq") as caught:
                call()
            assert caught.value.errno == errno.EIO
        rig.dispatcher.handle_event()
        rig.dispatcher.arm_again(queue)
        assert rig.failures == [
            (errno.EIO, "ibv_poll_cq"),
            (errno.EIO, "ibv_get_cq_event"),
            (errno.EIO, "ibv_req_notify_cq"),
        ]
        rig.failures.clear()
    verbs.break_queue(poll=-errno.EIO, arm=0)
    rig.dispatcher.arm_again(queue)
    assert rig.failures == [(errno.EIO, "ibv_poll_cq")]


def test_exceptions_are_raised_and_the_next_batch_is_handled(verbs: Queues, rig: Rig) -> None:
    verbs.received(KEY, SLOTS, 1)
    with pytest.raises(ValueError, match="the slot does not exist"):
        rig.poll()

    def fail() -> None:
        raise RuntimeError("no")

    rig.on_take = fail
    rig.core.pause()
    calls: list[Callable[[], object]] = [rig.poll, lambda: rig.dispatcher.poll_for(verbs.cq, S)]
    calls += [rig.receives.take_bytes, lambda: send_now(rig.core, b"x")]
    for number, call in enumerate(calls):
        verbs.sent(9, number)
        with pytest.raises(RuntimeError):
            call()
        assert rig.dispatcher.pending == 0
    rig.on_take = lambda: None
    verbs.sent(9, 4)
    assert rig.poll() == 1
    assert [wr_id & NUMBER_MASK for wr_id in rig.for_python] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_keys_are_attached_and_detached_in_any_order(verbs: Queues, seed: int) -> None:
    source = random.Random(seed)
    rig = Rig(verbs)
    rig.dispatcher.detach(KEY)
    # Consecutive keys, random keys, or keys of which many have the same index in the table.
    inverse = pow(2654435769, -1, 1 << 32)
    pools = [
        list(range(1, 200)),
        [source.randrange(1, 1 << 32) for _ in range(200)],
        [(low + (high << 10)) * inverse % (1 << 32) for low in range(1, 5) for high in range(50)],
    ]
    keys = [key for key in pools[seed % 3] if key]
    model: dict[int, fast_path.SendQueueCore] = {}
    receives = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 1))

    def check() -> None:
        assert sys.getrefcount(receives) == 2 + len(model)
        rig.for_python.clear()
        for key in keys:
            number = 0
            if key in model:
                number = model[key].commit(None, False)[0]
                assert model[key].try_reserve()
            verbs.sent(key, number)
        while rig.poll():
            pass
        assert rig.for_python == [key << 32 for key in keys if key not in model]
        for core in model.values():
            assert (core.oldest_pending, core.credits) == (core.next_number, 2)

    for step in range(1500):
        key = source.choice(keys)
        if source.random() < (0.7 if step // 250 % 2 == 0 else 0.3):
            model[key] = fast_path.SendQueueCore(2, 1, 0)
            rig.dispatcher.attach(key, model[key], receives)
        else:
            rig.dispatcher.detach(key)
            model.pop(key, None)
        if step % 25 == 0:
            check()
    for key in list(model):
        rig.dispatcher.detach(key)
    model.clear()
    check()


def test_poll_for_ends_with_a_completion_from_another_thread(verbs: Queues, rig: Rig) -> None:
    """Polling releases the interpreter's lock, so the other thread can run."""

    def bring() -> None:
        while verbs.polls <= 10:
            time.sleep(0.001)
        verbs.sent(9, 1)

    thread = threading.Thread(target=bring)
    thread.start()
    assert rig.dispatcher.poll_for(verbs.cq, 100 * S) == 1
    thread.join()
    assert rig.for_python == [(9 << 32) + 1]
    assert verbs.polls > 10


def test_poll_for_ends_in_time(verbs: Queues, rig: Rig) -> None:
    began = time.monotonic_ns()
    assert rig.dispatcher.poll_for(verbs.cq, 2_000_000) == 0
    assert time.monotonic_ns() - began >= 2_000_000
    polls = verbs.polls
    assert rig.dispatcher.poll_for(verbs.cq, 0) == 0
    verbs.sent(9, 1)
    assert rig.dispatcher.poll_for(verbs.cq, 15 * S) == 1
    # It calls Python for the completion. Only Python knows if that wakes a task.
    assert (verbs.polls, rig.dispatcher.notified_at) == (polls + 2, 0)


def test_take_bytes_polls_for_the_poll_budget(verbs: Queues) -> None:
    rig = Rig(verbs, 200_000)
    for missed in range(1, 4):
        began = time.monotonic_ns()
        assert rig.receives.take_bytes() is None
        assert time.monotonic_ns() - began >= 200_000
        assert (rig.policy.misses, rig.receives.preempted) == (missed, False)
    rig.receives.poll_budget = 15 * S
    rig.complete()
    polls = verbs.polls
    verbs.hide_completions(100)
    assert (rig.receives.take_bytes(), verbs.polls - polls) == (b"hello", 101)
    assert (rig.policy.misses, rig.notified) == (0, [])
    rig.policy.polled(False)
    rig.on_take = rig.arrive  # as with a shared receive queue
    verbs.sent(9, 1)
    assert (rig.receives.take_bytes(), rig.policy.misses) == (b"hello", 0)
    rig.complete()
    polls = verbs.polls
    for dispatcher, budget in ((rig.dispatcher, -1), (None, 5)):
        rig.receives.set_polling(dispatcher, verbs.cq, budget)
        assert (rig.receives.take_bytes(), verbs.polls) == (None, polls)


def test_no_task_polls_beyond_the_budget_of_the_loop(verbs: Queues, rig: Rig) -> None:
    """Otherwise a task that always finds messages would block all other tasks."""
    dispatcher, receives = rig.dispatcher, rig.receives
    assert fast_path.CompletionDispatcher(lambda: None).budget == fast_path.LOOP_BUDGET_NS
    for length in (fast_path.LOOP_BUDGET_NS, 20 * fast_path.LOOP_BUDGET_NS):
        dispatcher.budget, dispatcher.budget_start = length, time.monotonic_ns()
        assert receives.take_bytes() is None
        assert time.monotonic_ns() >= dispatcher.budget_start + length
        assert (receives.preempted, rig.policy.misses) == (True, 0)
    rig.complete()
    dispatcher.budget = dispatcher.budget_start = 0
    rig.core.pause()
    polls = verbs.polls
    assert (receives.take_bytes(), send_now(rig.core, b"x")) == (None, -1)
    assert (verbs.polls, receives.preempted) == (polls, True)
    dispatcher.budget, before = LONG, time.monotonic_ns()
    dispatcher.open_post_lists = 1
    assert (receives.take_bytes(), verbs.polls) == (None, polls)
    dispatcher.open_post_lists = 0
    rig.core.resumed()
    assert (dispatcher.budget_start >= before, receives.take_bytes()) == (True, b"hello")


@pytest.mark.parametrize("key", [KEY, 9])
def test_work_for_another_task_ends_polling(verbs: Queues, rig: Rig, key: int) -> None:
    """No task polls until the other task has run."""
    rig.send(1)
    rig.core.commit(object(), True)  # a request of Python, which handles its completion
    verbs.sent(key, 1)
    assert rig.receives.take_bytes() is None
    assert (rig.for_python, rig.policy.misses) == ([key << 32 | 1], 0)
    assert rig.dispatcher.notified_at > rig.dispatcher.budget_start
    rig.complete()
    assert (rig.receives.take_bytes(), rig.receives.preempted, verbs.polls) == (None, True, 1)
    rig.dispatcher.budget_start = time.monotonic_ns()
    assert rig.receives.take_bytes() == b"hello"


class Step:
    """An awaitable that waits, and tells for what."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __await__(self) -> Generator[str, None, None]:
        yield self._name


async def yield_to_loop() -> None:
    await Step("loop runs")


def allow_waits(rig: Rig, hits: int) -> None:
    """Let recv() wait, after this number of polls that have found messages."""
    rig.policy.open(rig.dispatcher, 0, True)
    rig.receives.poll_budget = 15 * S
    rig.receives.may_park = True
    future: Any = Step("parked")
    rig.receives.set_parking(lambda: future, yield_to_loop, rig.policy)
    for _ in range(hits):
        rig.policy.polled(True)


def attach_other(verbs: Queues, rig: Rig) -> fast_path.ReceiveQueue:
    """Return the receive queue of another connection, with one posted slot. Its key is 9."""
    ring = fast_path.ReceiveRingCore(1, SLOT_SIZE)
    ring._use(bytearray(SLOT_SIZE), 0x20000, 77)
    ring._open(verbs, (verbs.qp_cell, 0), 9 << 32 | RECEIVE)
    assert ring._post(0) == 0
    other = fast_path.ReceiveQueue(ring)
    other.notify = False
    rig.dispatcher.attach(9, fast_path.SendQueueCore(8, 1, 16), other)
    return other


def resume(waiting: Any) -> object:
    """Resume an awaitable. Return what it waits for, or its result."""
    try:
        return waiting.send(None)
    except StopIteration as end:
        return end.value


def test_a_wait_lets_the_loop_run_for_another_task(verbs: Queues, rig: Rig) -> None:
    allow_waits(rig, hits=1)
    verbs.sent(9, 1)
    waiting = rig.receives.recv(None)
    assert (resume(waiting), rig.receives.has_waiter) == ("loop runs", True)
    rig.complete()
    assert resume(waiting) == b"hello"
    assert (rig.receives.has_waiter, rig.receives.waits, rig.policy.misses) == (False, 0, 0)


def test_a_wait_parks_if_other_tasks_have_work_too_often(verbs: Queues, rig: Rig) -> None:
    allow_waits(rig, hits=2)
    waiting, seen = rig.receives.recv(None), list[object]()
    for _ in range(3):
        verbs.sent(9, 1)
        assert rig.policy.misses == 0
        seen.append(resume(waiting))
    assert seen == ["loop runs", "loop runs", "parked"]
    assert (rig.receives.waits, rig.policy.misses) == (1, 1)
    waiting.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_only_the_same_wait_goes_on_with_a_poll(
    verbs: Queues, rig: Rig, is_cancelled: bool
) -> None:
    allow_waits(rig, hits=1)
    rig.receives.poll_budget = 1
    verbs.sent(9, 1)
    waiting = rig.receives.recv(None)
    assert resume(waiting) == "loop runs"  # after a poll without a time limit
    rig.receives.poll_budget = LONG
    if is_cancelled:
        with pytest.raises(KeyError):
            waiting.throw(KeyError())
        assert not rig.receives.has_waiter
        rig.dispatcher.budget_start = time.monotonic_ns()
        waiting = rig.receives.recv(None)
        rig.complete()
        verbs.hide_completions(100)
    assert resume(waiting) == (b"hello" if is_cancelled else "parked")
    assert rig.policy.misses == (0 if is_cancelled else 1)
    waiting.close()


@pytest.mark.parametrize("is_between_polls", [False, True])
def test_a_message_for_a_task_between_two_polls_ends_polling(
    verbs: Queues, rig: Rig, is_between_polls: bool
) -> None:
    """Nothing else tells the other task: it waits for the loop to run."""
    allow_waits(rig, hits=2)
    slot = rig.fill(b"hello")
    other = attach_other(verbs, rig)
    other.has_waiter = is_between_polls
    for _ in range(POLL_BATCH):  # the first poll takes only these
        verbs.sent(KEY, 0)
    verbs.received(9, 0, 4)
    for _ in range(POLL_BATCH - 1):
        verbs.sent(KEY, 0)
    verbs.received(KEY, slot, 5)
    waiting = rig.receives.recv(None)
    assert resume(waiting) == ("loop runs" if is_between_polls else b"hello")
    assert (len(other), rig.dispatcher.notified_at > 0) == (1, is_between_polls)
    waiting.close()


@pytest.mark.parametrize("other_polls", [False, True])
def test_a_poll_of_another_task_counts_for_a_wait_between_two_polls(
    verbs: Queues, rig: Rig, other_polls: bool
) -> None:
    """Else 1,000 idle tasks would each poll for their whole time: the loop would be busy."""
    allow_waits(rig, hits=1)
    rig.receives.poll_budget = 200_000
    rig.dispatcher.budget = rig.dispatcher.budget_start = 0
    waiting = rig.receives.recv(None)
    assert (resume(waiting), verbs.polls) == ("loop runs", 0)
    rig.dispatcher.budget, rig.dispatcher.budget_start = LONG, time.monotonic_ns()
    other = attach_other(verbs, rig)
    other.set_polling(rig.dispatcher, verbs.cq, 300_000 if other_polls else -1)
    assert other.take_bytes() is None
    polls = verbs.polls
    assert (resume(waiting), verbs.polls > polls) == ("parked", not other_polls)
    assert rig.policy.misses == 1
    waiting.close()


def test_a_completion_without_work_for_tasks_does_not_end_polling(verbs: Queues, rig: Rig) -> None:
    rig.send(1)
    for _ in range(POLL_BATCH):  # the first poll takes only these
        verbs.sent(KEY, 0)
    rig.complete()
    assert rig.receives.take_bytes() == b"hello"
    assert (rig.core.oldest_pending, rig.for_python, verbs.polls) == (1, [], 2)


def test_a_full_queue_polls_for_a_credit(verbs: Queues, rig: Rig) -> None:
    rig.send(8)
    assert verbs.polls == 0
    verbs.sent(KEY, 2)
    verbs.hide_completions(100)
    rig.send(1)
    assert (rig.core.credits, rig.core.oldest_pending, verbs.posted) == (2, 3, SLOTS + 9)
    rig.core.set_polling(None, 0, -1)
    assert [send_now(rig.core, b"z") for _ in range(3)] == [0, 0, -1]


@pytest.mark.parametrize("how", ["closed", "destroyed"])
def test_a_queue_closed_while_polling_does_nothing(verbs: Queues, rig: Rig, how: str) -> None:
    def end() -> None:
        rig.receives.closed = True
        if how == "closed":
            rig.core.close()
        else:
            verbs.destroy()

    rig.send(8)
    rig.on_take = end
    verbs.sent(KEY, 2)
    verbs.sent(9, 1)
    assert send_now(rig.core, b"y") == -1
    assert (rig.core.credits, verbs.posted) == (3, SLOTS + 8)
    rig.receives.closed, rig.dispatcher.budget_start = False, time.monotonic_ns()
    rig.complete()
    verbs.sent(9, 1)
    assert (rig.receives.take_bytes(), len(rig.receives)) == (None, 1)


class Ring(fast_path.ReceiveRingCore):
    """Like ReceiveRing, a subclass that allows weak references."""


@pytest.mark.parametrize("has_python", [False, True])
def test_cycles_are_collected(verbs: Queues, has_python: bool) -> None:
    def make() -> weakref.ref[Ring]:
        every: list[object] = []
        dispatcher = fast_path.CompletionDispatcher(lambda: every.clear())
        ring, core = Ring(SLOTS, SLOT_SIZE), fast_path.SendQueueCore(8, 4, 16)
        references = sys.getrefcount(ring)
        receives = fast_path.ReceiveQueue(ring)
        for queue in (receives, core):
            queue.set_polling(dispatcher, verbs.cq, 5)
        core.open(dispatcher, 0, 0)
        dispatcher.attach(KEY, core, receives)
        if has_python:
            every += (dispatcher, core, receives)
        assert sys.getrefcount(ring) == references + 1
        return weakref.ref(ring)

    reference = make()
    gc.collect()
    assert reference() is None


def leaked(work: Callable[[], object], watched: list[object]) -> tuple[int, int]:
    """Return the bytes and the references to `watched` that `work()` leaves behind.

    This is the least of several measurements. Other threads of the process, such as those of the
    test runner, allocate memory, too. A leak grows each time.
    """

    def measure() -> tuple[int, int]:
        work()
        gc.collect()
        counts, before = [*map(sys.getrefcount, watched)], tracemalloc.get_traced_memory()[0]
        work()
        gc.collect()
        more = [sys.getrefcount(one) - count for one, count in zip(watched, counts, strict=True)]
        return tracemalloc.get_traced_memory()[0] - before, max(map(abs, more))

    tracemalloc.start()
    try:
        measured = [measure() for _ in range(3)]
    finally:
        tracemalloc.stop()
    return min(memory for memory, _ in measured), min(references for _, references in measured)


def test_thousands_of_messages_leave_no_memory_behind(verbs: Queues) -> None:
    rig = Rig(verbs, 0)
    receives, core = rig.receives, rig.core
    receives.backlog = 1000

    def exchange() -> None:
        for number in range(1000):
            for _ in range(3):
                rig.complete(b"some message")
            rig.send(1)
            verbs.sent(KEY, core.next_number - 1)
            verbs.sent(9, 1)
            receives.notify = number % 5 == 0
            rig.poll()
            found = receives.peek()
            assert found is not None
            if number % 2:
                receives.drop_oldest()
                if found[0] >= 0:
                    assert rig.ring._post(found[0]) == 0
            taken = [receives.take_bytes() for _ in range(4 - number % 2)]
            assert taken == [b"some message"] * (3 - number % 2) + [None]
            for log in list[Any]((rig.for_python, rig.fields, rig.notified)):
                log.clear()

    memory, references = leaked(exchange, [rig.dispatcher, core, receives, rig.ring, None])
    assert (memory < 10_000, references < 100, receives.spilled > 1000) == (True, True, True)

    def fill() -> None:  # these are never taken
        for _ in range(100):
            rig = Rig(verbs)
            rig.receives.backlog = 1000
            for _ in range(50):
                rig.arrive(b"x" * SLOT_SIZE)

    assert leaked(fill, [None])[0] < 20_000
