"""Messages that the fast path copies to registered buffers, because they cannot be inline."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from attempts import reasons_to_wait, send_now
from simulator.queues import Posted, Queues
from simulator.world import address_of, ffi

from aiordma._native import fast_path
from aiordma.dispatch.completion_reader import CompletionReader
from aiordma.enums import SendFlags, WcStatus

KEY = 5
FIRST = KEY << 32
DEPTH, INTERVAL = 256, 128
MAX_INLINE, MAX_MESSAGE_SIZE = 16, 1 << 17
SLOW = -1
LKEY = 99
SIZES = {1 << 10: 130, 1 << 12: 33, 1 << 14: 9, 1 << 16: 3, 1 << 18: 1}
"""The number of free buffers of each size."""


def unexpected(*arguments: object) -> None:
    """Fail: a queue has failed, or it contains more than a batch."""
    pytest.fail(f"called with {arguments}")


class Memory:
    """A request of Python with memory in flight."""

    def release(self) -> None:
        pass


class Rig:
    """A send queue with buffers for copies, and a dispatcher that handles its completions."""

    def __init__(self, verbs: Queues, *, is_selective: bool = True) -> None:
        self.verbs = verbs
        self.free = fast_path.FreeBuffers()
        self.memory = bytearray(sum(size * count for size, count in SIZES.items()))
        self.address = address_of(ffi.from_buffer(self.memory))
        start = 0
        for size, count in SIZES.items():
            for _ in range(count):
                view = memoryview(self.memory)[start : start + size]
                self.free.add(self.address + start, LKEY, view)
                start += size
        self.core = fast_path.SendQueueCore(
            DEPTH, INTERVAL if is_selective else 1, MAX_INLINE, is_selective
        )
        self.core.open(verbs, verbs.qp_cell, FIRST)
        self.core.use_memory(None, MAX_MESSAGE_SIZE)
        self.core.use_buffers(self.free)
        self.for_python: list[int] = []
        self._reader = CompletionReader(self._take_pending, unexpected, unexpected)
        self.dispatcher = self._reader.dispatcher
        ring = fast_path.ReceiveRingCore(1, 1)
        self.dispatcher.attach(KEY, self.core, fast_path.ReceiveQueue(ring))

    def _take_pending(self) -> None:
        self.for_python += [wc.wr_id - FIRST for wc in self._reader.pending()]

    def send(self, *sizes: int) -> list[Posted]:
        """Send messages of these sizes. Return their requests."""
        assert [send_now(self.core, bytes(size)) for size in sizes] == [0] * len(sizes)
        return self.verbs.new_posts()

    def complete(self, number: int, status: WcStatus = WcStatus.SUCCESS) -> None:
        self.verbs.sent(KEY, number, status)
        self.dispatcher.poll(self.verbs.cq)

    @property
    def taken(self) -> int:
        """The bytes in the buffers that are not free."""
        return len(self.memory) - self.free.nbytes


@pytest.fixture
def rig(verbs: Queues) -> Rig:
    return Rig(verbs)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_message_is_copied_and_can_change_at_once(rig: Rig, kind: Any) -> None:
    data = bytes(range(250)) * 4
    source = kind(data)
    assert send_now(rig.core, source) == 0
    (post,) = rig.verbs.new_posts()
    assert (post.wr_id, post.length, post.lkey, post.num_sge) == (FIRST, 1000, LKEY, 1)
    assert not post.flags & SendFlags.INLINE
    start = post.address - rig.address
    if kind is bytearray:
        source.clear()  # nothing refers to it any more
    assert rig.memory[start : start + 1000] == data
    assert (rig.core.messages, rig.core.nbytes, rig.core.credits) == (1, 1000, DEPTH - 1)
    assert (rig.core.count_in_flight, rig.taken) == (1, 1024)


def test_a_completion_releases_all_buffers_before_it_without_python(rig: Rig) -> None:
    """Inline messages are between the copies. A buffer that was released last is taken first."""
    posts = rig.send(17, 1, 1024, 16, 1025)
    assert rig.taken == 2 * 1024 + 4096
    rig.complete(2)
    assert (rig.taken, rig.core.count_in_flight, rig.for_python) == (4096, 1, [])
    rig.complete(3)  # an inline message, which is older than the copy
    assert rig.taken == 4096
    (again,) = rig.send(500)
    assert again.address == posts[2].address
    rig.complete(5)
    assert (rig.taken, rig.core.count_in_flight, rig.for_python) == (0, 0, [])
    assert rig.core.credits == DEPTH


@pytest.mark.parametrize(("size", "every"), [(17, 64), (1025, 16), (4097, 4), (16385, 1)])
def test_a_request_is_signaled_when_64_kib_of_buffers_are_in_flight(
    verbs: Queues, size: int, every: int
) -> None:
    sent = Rig(verbs).send(*[size] * 2 * every)
    signaled = [bool(post.flags & SendFlags.SIGNALED) for post in sent]
    assert signaled == [not (number + 1) % every for number in range(2 * every)]


def test_a_signaled_request_of_python_begins_the_count_again(rig: Rig) -> None:
    rig.send(4097, 4097, 4097)
    rig.core.commit(None, True)
    (last,) = rig.send(4097)
    assert not last.flags & SendFlags.SIGNALED
    rig.core.roll_back()  # its commit() was not the newest, but the state is the one before it
    (last,) = rig.send(4097)
    assert last.flags & SendFlags.SIGNALED


def test_python_releases_the_memory_that_ends_with_its_requests(rig: Rig) -> None:
    memory = Memory()
    rig.send(100)
    rig.core.commit(memory, True)
    rig.send(100, 100)
    rig.complete(3)  # the completion of the request of Python is in the same batch
    assert rig.for_python == [3]
    assert rig.taken == 2 * 1024  # the buffers after that request
    ended = rig.core.completed(3)
    assert ended[0] is memory
    for buffer in ended[1:]:
        buffer.release()
    assert (rig.taken, rig.core.count_in_flight, len(ended)) == (0, 0, 3)


def test_without_selective_signaling_each_completion_releases_its_own_buffer(
    verbs: Queues,
) -> None:
    rig = Rig(verbs, is_selective=False)
    memory = Memory()
    sent = rig.send(100, 100)
    rig.core.commit(memory, True)
    sent += rig.send(1025)
    assert all(post.flags & SendFlags.SIGNALED for post in sent)
    rig.complete(3)
    assert (rig.taken, rig.for_python) == (2 * 1024, [])
    rig.complete(1)
    assert (rig.taken, rig.core.count_in_flight) == (1024, 2)
    rig.complete(2)
    assert (rig.for_python, rig.core.completed(2)) == ([2], [memory])
    rig.complete(0)
    assert (rig.taken, rig.core.count_in_flight, rig.for_python) == (0, 0, [2])


def test_a_failed_completion_is_for_python(rig: Rig) -> None:
    rig.send(100, 100)
    rig.complete(1, WcStatus.WR_FLUSH_ERR)
    assert (rig.for_python, rig.taken) == ([1], 2 * 1024)
    assert [buffer.release() for buffer in rig.core.completed(1)] == [None, None]
    assert rig.taken == 0


def test_the_buffer_of_a_refused_message_is_kept_until_the_end(rig: Rig) -> None:
    """libsiw keeps a request that it reports as failed: the device can still read the buffer."""
    rig.send(100)
    core = rig.core

    def state() -> tuple[int, ...]:
        return core.next_number, core.credits, core.unsignaled, core.messages, core.count_in_flight

    before = state()
    rig.verbs.refuse(errno.ENOMEM)
    assert [send_now(core, bytes(100)) for _ in range(2)] == [errno.ENOMEM] * 2
    assert (state(), rig.taken) == (before, 3 * 1024)
    rig.verbs.refuse(0)
    rig.complete(0)
    assert rig.taken == 2 * 1024
    kept = core.abandon()
    assert [buffer.release() for buffer in kept] == [None, None]
    assert (rig.taken, core.abandon()) == (0, [])


def test_what_cannot_be_copied_at_once_is_left_to_python(rig: Rig) -> None:
    held = []
    while (buffer := rig.free.take(1024)) is not None:
        held.append(buffer)
    assert send_now(rig.core, bytes(1024)) == SLOW  # larger buffers are free
    held.pop().release()
    rig.send(1024)
    assert send_now(rig.core, bytes((1 << 16) + 1)) == SLOW  # copied without the lock
    rig.core.use_memory(None, 2000)
    assert send_now(rig.core, bytes(2001)) == SLOW  # Python raises an exception
    rig.send(2000)
    core = rig.core
    for _ in reasons_to_wait(core):
        assert send_now(core, bytes(1025)) == SLOW
    assert (rig.taken, core.messages) == (130 * 1024 + 4096, 2)
    core.close()
    assert send_now(core, bytes(1025)) == SLOW


def test_a_full_queue_polls_for_a_credit(rig: Rig) -> None:
    rig.dispatcher.budget = 10**18
    rig.core.set_polling(rig.dispatcher, rig.verbs.cq, 10**10)
    rig.send(*[17] * 130, *[1] * (DEPTH - 130))
    rig.verbs.sent(KEY, 129)
    rig.verbs.hide_completions(100)
    rig.send(17)  # the completion frees buffers, too
    assert (rig.core.credits, rig.taken) == (129, 1024)


def test_a_closed_pool_has_no_buffers(rig: Rig) -> None:
    rig.send(100, 100)
    buffer = rig.free.take(1)
    assert buffer is not None
    rig.free.close()
    buffer.release()
    rig.complete(1)
    assert (rig.free.nbytes, rig.core.count_in_flight, rig.free.take(1)) == (0, 0, None)
    assert send_now(rig.core, bytes(100)) == SLOW


def test_free_buffers_refuse_what_they_cannot_use(rig: Rig) -> None:
    free = fast_path.FreeBuffers()
    assert [free.size_for(size) for size in (0, 1024, 1025, 1 << 32)] == [1024, 1024, 4096, 1 << 32]
    with pytest.raises(ValueError, match="more bytes than the largest buffer"):
        free.size_for((1 << 32) + 1)
    assert free.take(1 << 40) is None
    for size in (0, 1000, 2048):
        with pytest.raises(ValueError, match="no size of a buffer"):
            free.add(0, 0, memoryview(bytes(size)))
    assert free.nbytes == 0
    free.add(0, 0, memoryview(bytes(1024)))
    buffer = free.take(1)
    assert buffer is not None
    buffer.release()
    with pytest.raises(ValueError, match="released before"):
        buffer.release()
    assert free.nbytes == 1024
    with pytest.raises(TypeError, match="FreeBuffers expected"):
        rig.core.use_buffers(object())  # type: ignore[arg-type]
