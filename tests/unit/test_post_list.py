"""PostList: the requests of tasks that one event has woken are posted in one call, in order."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes import wakeups
from fakes.qp import FakeCallbacks, FakePool, no_polling
from simulator.queues import Queues, untyped_ffi

from aiordma import VerbsError
from aiordma._native import fast_path
from aiordma.enums import SendFlags, WcOpcode, WrOpcode
from aiordma.loop import run_with_inline_wakeups, running_loop
from aiordma.loop.inline_wakeup import InlineFuture
from aiordma.qp import SendQueue
from aiordma.qp import post_list as post_list_module
from aiordma.qp.operation import Operations
from aiordma.qp.post_list import MAX_LENGTH, MemoryRequest, PostList
from aiordma.verbs import QueuePair, QueuePairCaps, RequestChain
from aiordma.verbs.queue_pair import SIGNALED

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

KEY = 5
DEPTH = 4 * MAX_LENGTH
TARGET = (0x8000, 17)


class Rig:
    """Operations on the queue pair of a Queues, which records the posted requests."""

    def __init__(self, verbs: Queues) -> None:
        self.verbs = verbs
        self.queue = SendQueue(running_loop(), DEPTH, max_inline=64)
        cell = untyped_ffi.cast("struct ibv_qp **", verbs.qp_cell)
        self.qp = QueuePair(cell[0], QueuePairCaps(DEPTH, 0))
        self.queue.open(self.qp, FakePool(), KEY << 32)  # type: ignore[arg-type]
        self.dispatcher = fast_path.CompletionDispatcher(lambda: None)
        self.callbacks = FakeCallbacks()
        self.queue.post_list = PostList(
            self.qp, self.queue.core, self.dispatcher, self.callbacks.post_failed
        )
        self.operations = Operations(running_loop(), self.queue, self.callbacks, no_polling())
        self.counted = 0
        self.released: list[int] = []

    def request(self, number: int, pieces: int = 1, imm: int = -1) -> MemoryRequest:
        """Return a read of 64 KiB, or a write with `imm`. Its address contains its number."""
        opcode = WrOpcode.RDMA_READ if imm < 0 else WrOpcode.RDMA_WRITE_WITH_IMM
        segments = [((number + 1) << 16, 1 << 16, 9)] * pieces
        return MemoryRequest(opcode, segments, TARGET, self._count, imm)

    def _count(self) -> None:
        self.counted += 1

    async def perform(self, request: MemoryRequest, number: int = 0) -> None:
        await self.operations.perform(
            WcOpcode.RDMA_READ, request, lambda: self.released.append(number)
        )

    async def waiting(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Start tasks that wait. Return their futures."""
        futures, self.tasks = await wakeups.waiting(calls)
        return futures

    async def woken(self, *calls: Callable[[], Any]) -> list[asyncio.Task[None]]:
        """Tasks that go on post_list_module, each with its call."""
        return await wakeups.woken(*calls)

    async def reads(self, count: int) -> list[asyncio.Task[None]]:
        return await self.woken(
            *(lambda n=number: self.perform(self.request(n), n) for number in range(count))
        )

    def complete(self, count: int) -> None:
        """Complete the `count` oldest requests."""
        for number in range(count):
            operation: Any = self.queue.completed(number)
            operation.succeeded = True

    @property
    def numbers(self) -> list[int]:
        """The numbers of the posted requests, from their addresses; -1: a message."""
        opcodes = (WrOpcode.SEND,)
        return [
            -1 if found.opcode in opcodes else (found.address >> 16) - 1
            for found in self.verbs.posts
        ]


async def test_requests_of_tasks_woken_together_are_posted_in_one_call(verbs: Queues) -> None:
    rig = Rig(verbs)
    tasks = await rig.reads(5)
    assert verbs.calls == 1
    assert rig.numbers == list(range(5))
    assert [found.wr_id for found in verbs.posts] == [KEY << 32 | n for n in range(5)]
    assert {(found.length, found.lkey, found.remote) for found in verbs.posts} == {
        (1 << 16, 9, TARGET)
    }
    assert {found.flags for found in verbs.posts} == {SIGNALED}
    assert rig.counted == 5
    rig.complete(5)
    await asyncio.gather(*tasks)
    assert rig.released == list(range(5))


async def test_tasks_woken_by_another_event_post_in_another_call(verbs: Queues) -> None:
    rig = Rig(verbs)
    await rig.reads(3)
    await rig.reads(2)
    assert verbs.calls == 2
    assert rig.numbers == [0, 1, 2, 0, 1]


async def test_immediate_data_is_posted_with_batched_requests(verbs: Queues) -> None:
    rig = Rig(verbs)
    await rig.woken(*(lambda n=n: rig.perform(rig.request(n, imm=n)) for n in (7, 8)))
    assert verbs.calls == 1
    assert [found.imm_data for found in verbs.posts] == [socket.htonl(7), socket.htonl(8)]
    assert {found.opcode for found in verbs.posts} == {WrOpcode.RDMA_WRITE_WITH_IMM}


async def test_a_task_woken_alone_posts_at_once(verbs: Queues) -> None:
    rig = Rig(verbs)
    seen: list[int] = []

    async def read() -> None:
        running_loop().call_soon(lambda: seen.append(verbs.calls))
        await rig.perform(rig.request(0))

    await rig.woken(read)
    assert verbs.calls == 1
    assert rig.dispatcher.open_post_lists == 0
    await asyncio.sleep(0)
    assert seen == [1]


async def test_tasks_that_no_event_has_woken_post_at_once(verbs: Queues) -> None:
    rig = Rig(verbs)
    tasks = [asyncio.create_task(rig.perform(rig.request(n))) for n in range(3)]
    await asyncio.sleep(0)
    assert verbs.calls == 3
    rig.complete(3)
    await asyncio.gather(*tasks)


async def test_many_requests_are_posted_in_several_calls(verbs: Queues) -> None:
    rig = Rig(verbs)
    tasks = await rig.reads(2 * MAX_LENGTH + 1)
    assert verbs.calls == 3
    assert rig.numbers == list(range(2 * MAX_LENGTH + 1))
    rig.complete(2 * MAX_LENGTH + 1)
    await asyncio.gather(*tasks)


async def test_a_message_does_not_overtake_batched_requests(verbs: Queues) -> None:
    rig = Rig(verbs)
    core_results: list[int] = []

    def send() -> None:
        core_results.append(rig.queue.core.send(b"small"))
        assert rig.queue.try_reserve()
        rig.queue.post_inline(b"hello")

    await rig.woken(
        lambda: rig.perform(rig.request(0)),
        lambda: rig.perform(rig.request(1)),
        send,
        lambda: rig.perform(rig.request(2)),
    )
    assert core_results == [-1]  # take the slow path
    assert rig.numbers == [0, 1, -1, 2]
    assert verbs.calls == 3
    assert [found.wr_id & 0xFF for found in verbs.posts] == [0, 1, 2, 3]
    assert rig.queue.core.send(b"small") == 0


async def test_a_request_in_several_pieces_is_posted_alone_and_in_order(verbs: Queues) -> None:
    rig = Rig(verbs)
    await rig.woken(
        lambda: rig.perform(rig.request(0)),
        lambda: rig.perform(rig.request(1, pieces=3)),
        lambda: rig.perform(rig.request(2)),
    )
    assert rig.numbers == [0, 1, 2]
    assert [found.num_sge for found in verbs.posts] == [1, 3, 1]


async def test_no_task_polls_before_batched_requests_are_posted(verbs: Queues) -> None:
    rig = Rig(verbs)
    rig.queue.core.set_polling(rig.dispatcher, verbs.cq, 10**9)
    seen: list[tuple[int, int]] = []

    def poll() -> None:
        rig.queue.core.credits = 0
        rig.queue.core.waiters -= 1  # otherwise it would not poll for a credit
        assert rig.queue.core.send(b"x") == -1
        rig.queue.core.waiters += 1
        rig.queue.core.credits = DEPTH
        seen.append((rig.dispatcher.open_post_lists, verbs.polls))

    await rig.woken(lambda: rig.perform(rig.request(0)), poll)
    assert seen == [(1, 0)]
    assert rig.dispatcher.open_post_lists == 0
    assert rig.queue.core.waiters == 0


@pytest.mark.parametrize("accepted", [0, 2])
async def test_a_refused_list_ends_the_connection_and_wakes_all_waiters(
    verbs: Queues, accepted: int
) -> None:
    """The memory of all of them is kept until the queue pair is destroyed."""
    rig = Rig(verbs)
    verbs.refuse(errno.ENOMEM)
    verbs.accept_sends(accepted)
    tasks = await rig.reads(4)
    assert verbs.posted == accepted
    assert len(rig.callbacks.failures) == 1
    for task in tasks:
        with pytest.raises(VerbsError) as raised:
            await task
        assert raised.value.errno == errno.ENOMEM
        assert raised.value.function == "ibv_post_send"
    assert rig.released == []
    rig.queue.abandon()
    assert sorted(rig.released) == list(range(4))


async def test_nothing_is_posted_after_a_refused_list(verbs: Queues) -> None:
    """A task that found the connection open before must not send "done" without the read."""
    rig = Rig(verbs)
    seen: list[VerbsError] = []

    def send(data: bytes) -> None:
        assert rig.queue.try_reserve()
        with pytest.raises(VerbsError) as raised:
            rig.queue.post_inline(data)
        rig.queue.unreserve()
        verbs.refuse(0)  # from now on the device would accept it
        seen.append(raised.value)

    verbs.refuse(errno.ENOMEM)
    tasks = await rig.woken(
        lambda: rig.perform(rig.request(0)),
        lambda: send(b"done"),
        lambda: send(b"done, again"),
    )
    await rig.woken(lambda: send(b"later"), lambda: send(b"and later"))
    assert verbs.posted == 0
    assert [error.errno for error in seen] == [errno.ENOMEM] * 4
    assert rig.released == []
    with pytest.raises(VerbsError):
        await tasks[0]


async def test_requests_after_a_refused_full_chain_are_not_posted(verbs: Queues) -> None:
    rig = Rig(verbs)
    verbs.refuse(errno.ENOMEM)
    verbs.accept_sends(3)
    tasks = await rig.reads(MAX_LENGTH + 2)
    assert verbs.posted == 3
    for task in tasks:
        with pytest.raises(VerbsError):
            await task
    assert len(rig.callbacks.failures) >= 1
    rig.queue.abandon()
    assert sorted(rig.released) == list(range(MAX_LENGTH + 2))


async def test_a_request_cancelled_before_it_is_posted_is_posted(verbs: Queues) -> None:
    """Its memory is released when it has completed, as after a later cancellation."""
    rig = Rig(verbs)
    reader: list[asyncio.Task[None] | None] = []

    async def read() -> None:
        reader.append(asyncio.current_task())
        await rig.perform(rig.request(0), 0)

    def cancel() -> None:
        assert verbs.posted == 0
        assert reader[0] is not None
        reader[0].cancel()

    tasks = await rig.woken(read, cancel)
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert verbs.posted == 1
    assert rig.released == []
    assert rig.queue.core.fence_flags == SendFlags.FENCE
    rig.complete(1)
    assert rig.released == [0]
    assert rig.queue.core.fence_flags == 0


async def test_batched_requests_are_posted_though_a_task_ends_the_loop(verbs: Queues) -> None:
    class End(BaseException):
        pass

    rig = Rig(verbs)

    first, second = (InlineFuture(asyncio.get_running_loop()) for _ in range(2))

    async def read() -> None:
        await first
        await rig.perform(rig.request(0))

    def end_loop(_: object) -> None:
        assert verbs.posted == 0
        raise End

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    second.add_done_callback(end_loop, context=contextvars.copy_context())

    def call() -> None:
        with pytest.raises(End):
            run_with_inline_wakeups(wakeups.wake_all, [first, second])

    running_loop().call_soon(call)
    await asyncio.sleep(0)
    assert verbs.calls == 1
    assert rig.dispatcher.open_post_lists == 0
    rig.complete(1)
    await task


class CtrlC(BaseException):
    """Like KeyboardInterrupt, it can come after any call."""


def interrupt_posting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise a CtrlC whenever a chain was posted."""
    post_chain = QueuePair.post_chain

    def interrupted(qp: QueuePair, chain: RequestChain) -> None:
        post_chain(qp, chain)
        raise CtrlC

    monkeypatch.setattr(QueuePair, "post_chain", interrupted)


async def test_after_a_ctrl_c_while_posting_no_request_is_posted_twice(
    verbs: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(verbs)
    interrupt_posting(monkeypatch)
    with pytest.raises(CtrlC):
        await rig.woken(*(lambda n=n: rig.perform(rig.request(n), n) for n in range(3)))
    monkeypatch.undo()
    assert rig.numbers == [0, 1, 2]
    rig.queue.try_reserve()
    rig.queue.post_inline(b"x")
    await rig.reads(2)
    assert rig.numbers == [0, 1, 2, -1, 0, 1]
    assert (rig.dispatcher.open_post_lists, rig.queue.core.waiters) == (0, 0)


@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_ctrl_c_while_adding_keeps_the_memory(
    verbs: Queues, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    rig = Rig(verbs)
    add = RequestChain.add

    def interrupted(chain: RequestChain, *arguments: Any) -> None:
        if where == "after":
            add(chain, *arguments)
        raise CtrlC

    monkeypatch.setattr(RequestChain, "add", interrupted)
    ended: list[BaseException] = []

    async def read() -> None:
        try:
            await rig.perform(rig.request(0), 0)
        except CtrlC as error:
            ended.append(error)

    await rig.woken(read, lambda: None)
    monkeypatch.undo()
    assert len(ended) == 1
    assert verbs.posted == (where == "after")
    assert rig.released == []  # released with the next completion, or with the queue pair
    rig.queue.abandon()
    assert rig.released == [0]


async def test_two_connections_post_though_one_is_interrupted(
    verbs: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_verbs = Queues()
    rig, other = Rig(verbs), Rig(other_verbs)
    interrupt_posting(monkeypatch)
    with pytest.raises(CtrlC):
        await rig.woken(
            lambda: rig.perform(rig.request(0)), lambda: other.perform(other.request(0))
        )
    assert (verbs.posted, other_verbs.posted) == (1, 1)
    assert (rig.dispatcher.open_post_lists, other.dispatcher.open_post_lists) == (0, 0)
    other_verbs.close()


async def test_a_forked_child_posts_nothing(verbs: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(verbs)
    monkeypatch.setattr(post_list_module, "is_forked_child", lambda: True)
    await rig.reads(2)
    assert verbs.posted == 0


async def test_a_full_chain_refuses_another_request() -> None:
    chain = RequestChain(2)
    for _ in range(2):
        chain.add(1, WrOpcode.RDMA_READ, (1 << 16, 1 << 16, 9), TARGET, SIGNALED, -1)
    with pytest.raises(ValueError, match="a chain of 2 requests is full"):
        chain.add(1, WrOpcode.RDMA_READ, (1 << 16, 1 << 16, 9), TARGET, SIGNALED, -1)
    assert chain.count == 2
