"""Transfers and post lists: requests on registered memory, posted and completed in C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import End, Pair, connected
from simulator.queues import Queues

from aiordma import (
    AccessFlags,
    ConnectionOptions,
    MemoryRegion,
    PeerClosed,
    RemoteBuffer,
    VerbsError,
    WorkRequestError,
)
from aiordma._native import fast_path
from aiordma.enums import SendFlags, WrOpcode
from aiordma.memory import MemorySlice
from aiordma.messages.message_data_path import MessageDataPath
from aiordma.qp import post_list as post_list_module
from aiordma.qp.post_list import MAX_LENGTH
from aiordma.verbs import QueuePair, RequestChain
from aiordma.verbs.queue_pair import SIGNALED, UNSIGNALED

# A loop with checkpoints has no transfers, and its tasks are not woken together.
pytestmark = pytest.mark.loops("asyncio")

SEND, WRITE, READ = int(WrOpcode.SEND), int(WrOpcode.RDMA_WRITE), int(WrOpcode.RDMA_READ)
LOCAL = AccessFlags.LOCAL_WRITE
RDMA = LOCAL | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
SIZE = 100
NOTHING = RemoteBuffer(0, 0, 0)


class Transfers:
    """A connected pair, a region of each end, and transfers between the two."""

    def __init__(self, pair: Pair, region: MemoryRegion, source: MemoryRegion) -> None:
        self.far, self.near = pair.far, pair.near
        self.connection, self.core = pair.near.connection, pair.near.sends.core
        self.region, self.remote = region, source.remote
        self.source = source

    def start(self, opcode: int = WRITE, memory: Any = None) -> fast_path.Transfer:
        """Start a transfer of the region on the fast path."""
        what = self.region if memory is None else memory
        transfer = self.core.start_transfer(opcode, what, None if opcode == SEND else self.remote)
        assert transfer is not None
        return transfer

    def begin(self, opcode: int, memory: Any = None) -> Awaitable[None]:
        """Start a call of the connection, which starts a transfer."""
        what = self.region if memory is None else memory
        if opcode == SEND:
            return self.connection.send(what)
        if opcode == READ:
            return self.connection.read(self.remote, what)
        return self.connection.write(what, self.remote)

    async def task(self, opcode: int, memory: Any = None) -> loops.Task[None]:
        task = loops.create_task(self.begin(opcode, memory))
        await loops.settle()
        return task

    @property
    def uses(self) -> int:
        """The number of requests that use the region."""
        return self.region.references.count

    @property
    def lengths(self) -> list[int]:
        """The lengths of the posted requests, which name them."""
        return [post.length for post in self.near.posts]


@contextlib.asynccontextmanager
async def transfers(
    simulation: Simulation, *, held: bool = True, depth: int = 16, credits: int = 4, **more: Any
) -> AsyncIterator[Transfers]:
    """Connect a pair for transfers of `near`, whose device is held back if `held`."""
    options = ConnectionOptions(
        send_depth=depth, initiator_depth=credits, recv_depth=64, max_message_size=1000, **more
    )
    async with connected(simulation, options, options) as pair:
        region = await pair.near.connection.allocate(SIZE, RDMA)
        source = await pair.far.connection.allocate(SIZE, RDMA)
        await loops.sleep(0.1)
        if held:
            pair.near.hold()
        yield Transfers(pair, region, source)
        region.close()
        source.close()


async def cancel(task: loops.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(loops.CancelledError):
        await task


# --- posting and completing ---


@pytest.mark.parametrize("opcode", [SEND, WRITE, READ])
async def test_a_transfer_is_posted_at_once_and_completes_without_python(
    simulation: Simulation, opcode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed: list[object] = []
    monkeypatch.setattr(MessageDataPath, "complete", lambda *arguments: completed.append(arguments))
    async with transfers(simulation) as t:
        before = t.connection.stats
        t.core.send(b"unsignaled")
        memory = t.region[20:50] if opcode != READ else t.region
        memoryview(t.source)[:] = b"s" * SIZE
        memoryview(t.region)[:] = b"r" * SIZE
        task = await t.task(opcode, memory)
        post = t.near.posts[-1]
        assert (post.opcode, post.flags, post.num_sge) == (opcode, SIGNALED, 1)
        assert (post.address, post.length, post.lkey) == memory.segment
        if opcode != SEND:
            assert post.remote == (t.remote.addr, t.remote.rkey)
        assert (t.uses, t.near.free) == (1, (14, 4 - (opcode == READ)))
        assert (t.core.transfers_in_flight, t.core.unsignaled, task.done()) == (1, 0, False)
        await t.near.complete()
        await task
        assert (t.uses, t.near.free, t.core.transfers_in_flight) == (0, (16, 4), 0)
        assert completed == []
        after = t.connection.stats
        sent = after.bytes_sent - before.bytes_sent - len(b"unsignaled")
        assert (sent, after.bytes_written, after.bytes_read) == (
            (30, 0, 0) if opcode == SEND else (0, 30, 0) if opcode == WRITE else (0, 0, SIZE)
        )
        assert bytes(memoryview(t.source)) == (b"r" * 30 if opcode == WRITE else b"").ljust(
            SIZE, b"s"
        )
        assert memoryview(t.region)[50] == ord("s" if opcode == READ else "r")


def unregistered(t: Transfers, nbytes: int) -> Any:
    """Return an object like a region, of any size."""
    address, _, lkey = t.region.segment
    return SimpleNamespace(references=t.region.references, segment=(address, nbytes, lkey))


@pytest.mark.parametrize(
    ("opcode", "memory", "remote"),
    [
        (WRITE, lambda t: b"not registered", SIZE),
        (WRITE, lambda t: bytearray(b"not registered"), SIZE),
        (WRITE, lambda t: [t.region], SIZE),
        (WRITE, lambda t: None, SIZE),
        (WRITE, lambda t: SimpleNamespace(references=1, segment=(1, 2, 3)), SIZE),
        (WRITE, lambda t: t.region, SIZE - 1),
        (WRITE, lambda t: t.region[:0], SIZE),
        (WRITE, lambda t: t.source, SIZE),
        (WRITE, lambda t: unregistered(t, (1 << 32) + 10), SIZE),
        (READ, lambda t: t.region[1:], SIZE),
        (READ, lambda t: t.region, 0),
        (SEND, lambda t: unregistered(t, 1001), 0),
    ],
)
async def test_arguments_that_fail_a_check_take_the_slow_path(
    simulation: Simulation, opcode: int, memory: Callable[[Transfers], Any], remote: int
) -> None:
    """The slow path posts the request, or explains the error."""
    async with transfers(simulation) as t:
        free = t.near.free
        assert t.core.start_transfer(opcode, memory(t), t.remote[:remote]) is None
        assert (t.near.posts, t.near.free, t.uses) == ([], free, 0)


async def test_memory_that_cannot_be_used_takes_the_slow_path(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        async with await t.connection.allocate(SIZE, AccessFlags.REMOTE_READ) as readable:
            assert t.core.start_transfer(READ, readable, t.remote) is None
        async with await t.connection.allocate(SIZE, LOCAL) as local:
            is_usable = t.core.start_transfer(READ, local, t.remote) is not None
            assert is_usable is not simulation.near.is_iwarp  # it needs REMOTE_WRITE there
            t.near.execute()
        closed = local[:80]
        for memory in (local, closed):
            assert t.core.start_transfer(WRITE, memory, t.remote) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("credits", 0), ("waiters", 1), ("has_unposted", True), ("make_future", None)],
)
async def test_a_core_that_cannot_post_takes_the_slow_path(
    simulation: Simulation, name: str, value: object
) -> None:
    async with transfers(simulation) as t:
        before = getattr(t.core, name)
        setattr(t.core, name, value)
        assert t.core.start_transfer(WRITE, t.region, t.remote) is None
        setattr(t.core, name, before)
        t.connection.abort()
        assert t.core.start_transfer(WRITE, t.region, t.remote) is None
        assert (t.near.posts, t.uses) == ([], 0)


async def test_wrong_arguments_raise(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        for arguments in ((), (WRITE,), (WRITE, None), (WRITE, None, t.remote, 1)):
            with pytest.raises(TypeError, match="transfer"):
                t.core.start_transfer(*arguments)
        with pytest.raises(TypeError):
            t.core.start_transfer("x", t.region, t.remote)  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            t.core.start_transfer(WRITE, t.region, "x")
        with pytest.raises(TypeError):
            fast_path.Transfer()


async def test_numbers_can_be_numpy_integers(simulation: Simulation) -> None:
    class Number:
        def __index__(self) -> int:
            return 5

    async with transfers(simulation) as t:
        remote: Any = SimpleNamespace(addr=Number(), rkey=Number(), length=200)
        assert t.core.start_transfer(WRITE, t.region, remote)
        assert t.near.posts[0].remote == (5, 5)


def exit_code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def test_a_forked_child_starts_nothing(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        child = os.fork()
        if not child:
            fast_path.note_fork()
            is_none = t.core.start_transfer(WRITE, t.region, t.remote) is None
            os._exit(42 if is_none and not t.near.posts else 1)
        assert exit_code_of(child) == 42


async def test_many_transfers_complete_in_a_batch(simulation: Simulation) -> None:
    async with transfers(simulation, credits=16) as t:
        tasks = [await t.task(READ) for _ in range(10)]
        await t.near.complete(7)
        assert [task.done() for task in tasks] == [True] * 7 + [False] * 3
        assert t.uses == 3
        await t.near.complete()
        await loops.gather(*tasks)
        assert t.near.free == (16, 16)


@pytest.mark.transport("IWARP")
async def test_on_iwarp_a_read_can_complete_after_a_later_write(simulation: Simulation) -> None:
    """This happens on Linux's siw. Its memory is released at its end, its credit only once."""
    simulation.network.read_delay = 1.0
    async with transfers(simulation, held=False, depth=4) as t:
        pieces = [t.region[:10], t.region[20:]]
        async with await t.connection.allocate(SIZE, RDMA) as other:
            reads = [await t.task(READ), await t.task(READ, other)]
            await t.connection.write(pieces, t.remote)  # not a transfer
            await t.connection.write(t.region, t.remote)
            assert [task.done() for task in reads] == [False, False]
            assert (t.uses, other.references.count, t.near.sends.credits) == (1, 1, 4)
            await loops.gather(*reads)
            assert (t.uses, t.near.free, len(t.near.sends)) == (0, (4, 4), 0)


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_memory_is_registered_until_the_end_of_the_transfer(
    simulation: Simulation, is_dropped: bool
) -> None:
    async with transfers(simulation) as t:
        memory = bytearray(SIZE)
        region = await t.connection.register(memory)
        task = await t.task(WRITE, region[10:90])
        if not is_dropped:
            region.close()
        del region
        gc.collect()
        await loops.sleep(1)
        with pytest.raises(BufferError):
            memory.append(0)
        await t.near.complete()
        await task
        await loops.sleep(1)
        memory.append(0)


async def test_a_failed_transfer_raises_why_the_connection_ended(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        remote, t.remote = t.remote, RemoteBuffer(t.remote.addr, 1, SIZE)
        first = await t.task(READ)
        t.remote = remote
        tasks = [first, await t.task(WRITE), await t.task(SEND)]
        await t.near.complete()
        for task in tasks:
            with pytest.raises(WorkRequestError, match="RDMA_READ failed: REM_ACCESS_ERR"):
                await task
        assert t.uses == 0


@pytest.mark.parametrize("is_destroyed", [False, True])
async def test_transfers_that_are_not_flushed_end_with_the_connection(
    simulation: Simulation, is_destroyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting tasks go on. The memory is kept until the queue pair is destroyed."""
    async with transfers(simulation, credits=1) as t:
        tasks = [await t.task(opcode) for opcode in (READ, READ, READ, WRITE)]
        assert (t.core.queued_reads, t.uses) == (2, 4)
        monkeypatch.setattr(simulation.network, "_flush", lambda qp: None)
        t.far.connection.abort()
        if is_destroyed:
            await loops.sleep(1)
            await t.connection.aclose()
        for task in tasks:
            with pytest.raises(PeerClosed):
                await task
        assert t.uses == (0 if is_destroyed else 2)
        await t.connection.aclose()
        assert (t.uses, t.core.transfers_in_flight, t.core.queued_reads) == (0, 0, 0)


@pytest.mark.parametrize("opcode", [WRITE, READ, SEND])
async def test_a_refused_transfer_ends_the_connection_and_keeps_its_memory(
    simulation: Simulation, opcode: int
) -> None:
    """libsiw keeps the request, so its memory is kept until the queue pair is destroyed."""
    async with transfers(simulation) as t:
        t.core.send(b"before")
        unsignaled = t.core.unsignaled
        t.near.refuse(errno.ENOMEM)
        with pytest.raises(VerbsError) as raised:
            await t.begin(opcode)
        assert (raised.value.errno, raised.value.function) == (errno.ENOMEM, "ibv_post_send")
        stats = t.connection.stats
        assert (stats.writes, stats.reads, t.lengths) == (0, 0, [6])
        assert (t.uses, t.core.unsignaled) == (1, unsignaled)
        await t.connection.aclose()
        assert t.uses == 0


@pytest.mark.parametrize("is_dispatched", [False, True])
async def test_an_exception_at_the_end_of_a_transfer_does_not_stop_the_others(
    simulation: Simulation, is_dispatched: bool
) -> None:
    class CtrlC(BaseException):
        pass

    def interrupted() -> None:
        raise CtrlC

    def closed(_: None) -> None:
        raise RuntimeError("Event loop is closed")

    async with transfers(simulation) as t:
        make_future = t.core.make_future
        future = SimpleNamespace(done=lambda: False, set_result=closed)
        t.core.make_future = lambda: future
        started = [t.start(WRITE)]
        t.core.make_future = make_future
        started += [t.start(opcode) for opcode in (READ, READ, READ, WRITE)]
        started[2].on_abandoned_end = interrupted
        loop_device = t.near.data_path._resources.loop_device
        address = t.near.data_path._resources.send_cq.cq.address
        t.near.execute()
        dispatcher = loop_device.dispatcher
        poll = dispatcher.poll if is_dispatched else lambda cq: dispatcher.poll_for(cq, 10**9)
        with pytest.raises(CtrlC):
            poll(address)
        assert [(one.is_over(), one.succeeded) for one in started] == [(True, True)] * 5
        assert (t.uses, t.near.free) == (0, (16, 4))


def core_with_transfers(verbs: Queues, count: int) -> tuple[Any, list[weakref.ref[Any]]]:
    """Return a SendQueueCore without a connection, and references to the futures of reads."""

    class Future:
        pass

    pd = object()
    core = fast_path.SendQueueCore(8, 4, 16)
    core.open(verbs, verbs.qp_cell, 5 << 32)
    core.make_future, core.pd, core.rd_atomic_credits = Future, pd, 1  # type: ignore[assignment]
    core.read_access, core.max_message_size = int(LOCAL), 1000
    memory: Any = SimpleNamespace(
        references=fast_path.ReferenceCount(pd, int(LOCAL)), segment=(0x10000, SIZE, 7)
    )
    futures = []
    for _ in range(count):
        transfer = core.start_transfer(READ, memory, RemoteBuffer(0, 1, SIZE))
        assert transfer is not None
        futures.append(weakref.ref(transfer.future))
    return core, futures


def test_a_dropped_core_and_its_transfers_are_collected(verbs: Queues) -> None:
    core, futures = core_with_transfers(verbs, 2)
    assert (core.transfers_in_flight, core.queued_reads) == (1, 1)
    del core
    gc.collect()
    assert [ref() for ref in futures] == [None, None]


# --- RD/atomic credits ---


async def test_reads_beyond_the_rd_atomic_credits_are_queued(simulation: Simulation) -> None:
    async with transfers(simulation, credits=2) as t:
        tasks = [await t.task(READ) for _ in range(7)]
        tasks.append(await t.task(WRITE))  # writes and sends do not wait for queued reads
        assert t.core.send(b"x") == 0
        assert (t.lengths, t.core.queued_reads, t.near.free) == ([SIZE] * 3 + [1], 5, (12, 0))
        assert (t.uses, t.connection.stats.send_waits) == (8, 5)
        calls = t.near.calls
        await t.near.complete(4)
        assert (len(t.lengths), t.core.queued_reads, t.near.calls) == (6, 3, calls + 1)
        await t.near.complete()
        await loops.gather(*tasks)
        assert {post.flags & SendFlags.SIGNALED for post in t.near.posts if post.length > 1} == {
            SendFlags.SIGNALED
        }
        assert (t.connection.stats.reads, t.near.free[1], t.uses) == (7, 2, 0)


async def test_many_queued_reads_are_posted_in_several_calls(simulation: Simulation) -> None:
    async with transfers(simulation, depth=64) as t:
        t.core.rd_atomic_credits = 0
        started = [t.start(READ) for _ in range(40)]
        assert (t.near.posts, t.core.queued_reads) == ([], 40)
        t.core.rd_atomic_credits, calls = 40, t.near.calls
        t.core.grant_rd_atomic_credits()
        assert (t.near.calls - calls, t.core.queued_reads, t.near.free) == (3, 0, (24, 0))
        await t.near.complete()
        assert all(one.succeeded for one in started)


async def test_a_queued_read_waits_for_a_send_credit_too(simulation: Simulation) -> None:
    """Without a completion, it gets a credit that a task releases unused."""
    async with transfers(simulation, credits=1, depth=2) as t:
        first, second = t.start(READ), t.start(READ)
        assert t.near.sends.try_reserve()
        t.core.credits = -1  # as if the credit of the read were in use again: possible on iWARP
        await t.near.complete()
        assert (first.is_over(), second.is_over()) == (True, False)
        assert (len(t.lengths), t.near.free, t.core.queued_reads) == (1, (0, 1), 1)
        t.near.sends.unreserve()
        assert (len(t.lengths), t.core.queued_reads) == (2, 0)
        await t.near.complete()
        assert second.is_over()


async def test_a_cancelled_queued_read_is_never_posted(simulation: Simulation) -> None:
    async with transfers(simulation, credits=1) as t:
        tasks = [await t.task(READ, t.region) for _ in range(3)]
        await cancel(tasks[1])
        assert (t.uses, t.core.queued_reads, t.core.fence_flags) == (2, 1, UNSIGNALED)
        await t.near.complete()
        await loops.gather(tasks[0], tasks[2])
        assert (t.lengths, t.near.free) == ([SIZE] * 2, (16, 1))


@pytest.mark.parametrize("how", ["ended", "cancelled"])
async def test_queued_reads_end_with_the_connection(simulation: Simulation, how: str) -> None:
    async with transfers(simulation, credits=1) as t:
        tasks = [await t.task(READ) for _ in range(3)]
        t.near.data_path._callbacks.fail(PeerClosed("gone"))
        if how == "cancelled":
            await cancel(tasks.pop())
        assert (t.core.queued_reads, len(t.lengths)) == (0, 1)
        for task in tasks:
            with pytest.raises(PeerClosed):
                await task


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_refused_queued_reads_end_the_connection(
    simulation: Simulation, is_cancelled: bool
) -> None:
    """The memory of all of them is kept until the queue pair is destroyed."""
    async with transfers(simulation, credits=2) as t:
        tasks = [await t.task(READ) for _ in range(5)]
        t.near.refuse(errno.ENOMEM)
        t.near.execute()
        if is_cancelled:
            address = t.near.data_path._resources.send_cq.cq.address
            t.near.data_path._resources.loop_device.dispatcher.poll(address)
            await cancel(tasks.pop(2))
        await loops.gather(*tasks[:2])
        for task in tasks[2:]:
            with pytest.raises(VerbsError) as raised:
                await task
            assert raised.value.errno == errno.ENOMEM
        assert (t.connection.closed, t.uses) == (True, 2)
        await t.connection.aclose()
        assert t.uses == 0


async def test_queued_reads_and_waiting_tasks_get_credits_alternately(
    simulation: Simulation,
) -> None:
    """Reads queued in C and tasks that wait in Python each get every second credit."""
    async with transfers(simulation, credits=1) as t:
        pieces = [t.region[:10], t.region[10:]]
        async with await t.connection.allocate(SIZE, RDMA) as other:
            in_pieces = [other[:30], t.region[:30], other[50:], t.region[60:]]
            tasks = [await t.task(READ) for _ in range(2)]
            if simulation.near.is_iwarp:  # one piece a request
                in_pieces = [pieces[1], pieces[0]]
            tasks += [await t.task(READ, in_pieces) for _ in range(3)]
            tasks += [await t.task(READ) for _ in range(2)]
            posted = 0
            kinds = []
            while not all(task.done() for task in tasks):
                assert len(t.near.posts) == posted + 1
                kinds.append(t.near.posts[-1].length == SIZE)
                posted += 1
                await t.near.complete(1)
            assert kinds[1] != kinds[2]
            assert kinds[2] != kinds[3]
            assert t.near.free == (16, 1)


# --- post lists ---


async def woken(end: End, *calls: Callable[[], Any]) -> list[loops.Task[Any]]:
    """Start tasks that wait, wake them by one event, and let each of them make its call.

    Return the tasks. The requests of the calls stay in the send queue.
    """

    async def wait_and_call(call: Callable[[], Any]) -> Any:
        await end.connection.write(b"", NOTHING)
        result = call()
        return await result if result is not None else None

    end.hold()
    tasks = [loops.create_task(wait_and_call(call)) for call in calls]
    await loops.settle()
    end.execute(len(calls))
    end.forget_posts()
    await loops.sleep(1e-5)
    return tasks


async def test_requests_of_tasks_woken_together_are_posted_in_one_call(
    simulation: Simulation,
) -> None:
    """Requests of the fast path and of the slow path keep their order."""
    async with transfers(simulation) as t:
        calls = t.near.calls + 5  # of waiting

        def write_slowly(nbytes: int) -> Awaitable[None]:
            return t.near.data_path.remote.write(t.region[:nbytes], t.remote, -1)

        tasks = await woken(
            t.near,
            lambda: write_slowly(1),
            lambda: t.begin(WRITE, t.region[:2]),
            lambda: t.begin(READ),
            lambda: write_slowly(4),
            lambda: t.begin(SEND, t.region[:5]),
        )
        assert (t.near.calls - calls, t.lengths) == (1, [1, 2, SIZE, 4, 5])
        numbers = [post.wr_id for post in t.near.posts]
        assert numbers == [*range(numbers[0], numbers[0] + 5)]
        assert {post.flags for post in t.near.posts} == {SIGNALED}
        dispatcher = t.near.data_path._resources.loop_device.dispatcher
        assert (dispatcher.open_post_lists, t.core.batching, t.core.has_unposted) == (0, False, 0)
        await t.near.complete()
        await loops.gather(*tasks)
        assert (t.near.free, t.connection.stats.writes) == ((16, 4), 5 + 3)


async def test_a_task_woken_alone_posts_at_once(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        seen: list[int] = []

        async def write() -> None:
            writing = t.begin(WRITE)
            waiting = loops.create_task(writing)
            seen.append(len(t.near.posts))
            await waiting

        (task,) = await woken(t.near, lambda: t.begin(WRITE))
        assert t.lengths == [SIZE]
        tasks = [await t.task(WRITE) for _ in range(3)]  # no event has woken these
        assert t.lengths == [SIZE] * 4
        await t.near.complete()
        await loops.gather(task, *tasks)


async def test_a_full_chain_is_posted_before_the_next(simulation: Simulation) -> None:
    async with transfers(simulation, depth=4 * MAX_LENGTH) as t:
        count = MAX_LENGTH + 2
        calls = t.near.calls + count
        tasks = await woken(t.near, *[lambda: t.begin(WRITE)] * count)
        assert (t.near.calls - calls, t.lengths) == (2, [SIZE] * count)
        await t.near.complete()
        await loops.gather(*tasks)


async def test_other_requests_do_not_overtake_batched_ones(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        pieces = [t.region[:1], t.region[50:52]]
        tasks = await woken(
            t.near,
            lambda: t.begin(WRITE, t.region[:2]),
            lambda: t.begin(WRITE, t.region[:3]),
            lambda: t.connection.send(b"four"),
            lambda: t.begin(WRITE, t.region[:5]),
            lambda: t.begin(WRITE, pieces),
            lambda: t.begin(WRITE, t.region[:7]),
        )
        assert t.lengths == [2, 3, 4, 5, 1, 7]
        assert t.core.send(b"small") == 0
        await t.near.complete()
        await loops.gather(*tasks)


@pytest.mark.transport("IB")
async def test_immediate_data_is_posted_with_batched_requests(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        calls = t.near.calls + 2
        tasks = await woken(
            t.near, *[lambda n=n: t.connection.write(t.region, t.remote, imm=n) for n in (7, 8)]
        )
        assert t.near.calls == calls + 1
        await t.near.complete()
        await loops.gather(*tasks)
        for imm in (7, 8):
            with await t.far.connection.recv_message() as message:
                assert message.imm == imm


async def test_no_task_polls_before_batched_requests_are_posted(simulation: Simulation) -> None:
    async with transfers(simulation, adaptive_poll=False) as t:
        queue = t.near.qp.send_cq.pointer
        seen: list[tuple[int, int]] = []

        def poll() -> None:
            polls = queue.polls
            assert t.near.data_path.receiver.take() is None
            credits, t.core.credits = t.core.credits, 0
            assert t.core.send(b"x") == -1
            t.core.credits = credits
            dispatcher = t.near.data_path._resources.loop_device.dispatcher
            seen.append((dispatcher.open_post_lists, queue.polls - polls))

        tasks = await woken(t.near, lambda: t.begin(WRITE), poll)
        assert seen == [(1, 0)]
        await t.near.complete()
        await loops.gather(*tasks)


@pytest.mark.parametrize(("accepted", "count"), [(0, 4), (2, 4), (3, MAX_LENGTH + 2)])
async def test_a_refused_list_ends_the_connection_and_wakes_all_waiters(
    simulation: Simulation, accepted: int, count: int
) -> None:
    """The memory of all of them is kept until the queue pair is destroyed."""
    async with transfers(simulation, depth=4 * MAX_LENGTH) as t:
        earlier = await t.task(WRITE)
        waiting = loops.create_task(t.connection.recv())

        def refuse() -> Awaitable[None]:
            t.near.refuse(errno.ENOMEM, accepted=accepted)
            return t.begin(WRITE)

        async def send_done() -> None:
            """Send a message that must not arrive without the requests before it."""
            await t.connection.send(b"done")

        t.near.execute(1)
        await earlier
        tasks = await woken(t.near, refuse, *[lambda: t.begin(WRITE)] * (count - 1), send_done)
        assert len(t.lengths) == accepted
        t.near.refuse(0)  # from now on the device would accept it
        for task in (*tasks, await t.task(SEND), waiting):
            with pytest.raises(VerbsError) as raised:
                await task
            assert (raised.value.errno, raised.value.function) == (errno.ENOMEM, "ibv_post_send")
        assert t.uses >= min(count, MAX_LENGTH) - accepted
        await t.connection.aclose()
        assert t.uses == 0


async def test_a_request_cancelled_before_it_is_posted_is_posted(simulation: Simulation) -> None:
    """Its memory is released when it has completed, as after a later cancellation."""
    async with transfers(simulation) as t:
        reading: list[loops.Task[None]] = []

        def cancel_the_other() -> None:
            assert t.near.posts == []
            reading[0].cancel()

        async def read() -> None:
            task: Any = asyncio.current_task()
            reading.append(task)
            await t.begin(READ)

        tasks = await woken(t.near, read, cancel_the_other)
        with pytest.raises(loops.CancelledError):
            await tasks[0]
        assert (t.lengths, t.uses, t.core.fence_flags) == ([SIZE], 1, SendFlags.FENCE)
        await t.near.complete()
        assert (t.uses, t.core.fence_flags) == (0, UNSIGNALED)


async def test_a_read_queued_while_batching_is_posted_after_the_batch(
    simulation: Simulation,
) -> None:
    async with transfers(simulation, credits=1) as t:
        credits = t.near.data_path.remote._rd_atomic_credits
        assert credits.try_acquire()
        tasks = await woken(
            t.near,
            lambda: t.begin(WRITE, t.region[:1]),
            lambda: t.begin(READ),
            credits.release,
            lambda: t.begin(WRITE, t.region[:3]),
        )
        assert t.lengths == [1, 3, SIZE]
        await t.near.complete()
        await loops.gather(*tasks)


class CtrlC(BaseException):
    """Like KeyboardInterrupt, it can come after any call."""


async def test_after_a_ctrl_c_while_posting_no_request_is_posted_twice(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transfers(simulation) as t:
        post_list = t.near.sends.post_list
        assert post_list is not None
        post_chain, posted = QueuePair.post_chain, []

        def interrupted(qp: QueuePair, chain: RequestChain) -> None:
            post_chain(qp, chain)
            posted.append(chain.count)
            raise CtrlC

        def flush() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(QueuePair, "post_chain", interrupted)
                with pytest.raises(CtrlC):
                    post_list.flush()

        tasks = await woken(
            t.near, lambda: t.begin(WRITE), lambda: t.begin(WRITE, t.region[:2]), flush
        )
        assert (t.lengths, len(posted)) == ([SIZE, 2], 1)
        await t.connection.send(b"x")
        assert t.lengths == [SIZE, 2, 1]
        await t.near.complete()
        await loops.gather(*tasks)


@pytest.mark.parametrize("is_added", [False, True])
async def test_a_ctrl_c_while_adding_keeps_the_memory(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, is_added: bool
) -> None:
    async with transfers(simulation) as t:
        add = RequestChain.add

        def interrupted(chain: RequestChain, *arguments: Any) -> None:
            if is_added:
                add(chain, *arguments)
            raise CtrlC

        async def write() -> bool:
            with monkeypatch.context() as patch:
                patch.setattr(RequestChain, "add", interrupted)
                try:
                    await t.near.data_path.remote.write(t.region, t.remote, -1)
                except CtrlC:
                    return True
            return False

        tasks = await woken(t.near, write, lambda: None)
        assert await tasks[0]
        assert (len(t.lengths), t.uses) == (is_added, 1)
        await t.connection.aclose()
        assert t.uses == 0


async def test_a_forked_child_posts_no_list(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transfers(simulation) as t:
        monkeypatch.setattr(post_list_module, "is_forked_child", lambda: True)
        tasks = await woken(t.near, *[lambda: t.begin(WRITE)] * 2)
        assert t.near.posts == []
        t.connection.abort()
        await loops.gather(*tasks, return_exceptions=True)


def test_a_full_chain_refuses_another_request() -> None:
    chain = RequestChain(2)
    for _ in range(2):
        chain.add(1, WrOpcode.RDMA_READ, (1 << 16, 1 << 16, 9), (1, 2), SIGNALED, -1)
    with pytest.raises(ValueError, match="a chain of 2 requests is full"):
        chain.add(1, WrOpcode.RDMA_READ, (1 << 16, 1 << 16, 9), (1, 2), SIGNALED, -1)
    assert chain.count == 2


# --- ReferenceCount ---


def test_a_reference_count_counts_uses() -> None:
    here, elsewhere, ended = object(), object(), list[int]()
    references = fast_path.ReferenceCount(here, int(LOCAL))
    assert (references.pd, references.access, references.closed) == (here, LOCAL, False)
    for _ in range(2):
        references.acquire(here)
    with pytest.raises(ValueError, match="another device"):
        references.acquire(elsewhere)
    references.close(lambda: ended.append(references.count))
    with pytest.raises(ValueError, match="closed"):
        references.acquire(here)
    references.release()
    assert (references.count, references.closed, ended) == (1, True, [])
    references.release()
    assert ended == [0]
    fast_path.ReferenceCount(here, 0).close(lambda: ended.append(1))
    assert ended == [0, 1]


async def test_a_slice_shares_the_reference_count_of_its_region(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        part: MemorySlice = t.region[10:30][5:]
        assert part.references is t.region.references
        assert part.segment == (t.region.addr + 15, 15, t.region.lkey)


# --- polling ---


async def test_a_task_polls_for_its_transfer(simulation: Simulation) -> None:
    async with transfers(simulation, busy_poll=1e-3) as t:
        t.near.data_path._resources.loop_device.dispatcher.budget = 10**18
        waiting: Any = t.near.data_path.finish(t.start(WRITE))
        t.near.execute()
        with pytest.raises(StopIteration):  # without an iteration of the loop
            waiting.send(None)
        await t.begin(WRITE)  # it polls in vain, and then parks
