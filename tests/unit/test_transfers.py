"""Transfers and post lists: requests on registered memory, posted and completed in C."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import loops
import numpy as np
import pytest
from attempts import send_now
from simulator import Simulation
from simulator.pairs import CtrlC, Pair, connected
from simulator.queues import Queues

from aiordma import AccessFlags, ConnectionOptions, MemoryRegion, PeerClosed, RemoteBuffer
from aiordma._native import fast_path
from aiordma.enums import SendFlags, WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import future_factory, running_loop
from aiordma.messages.message_data_path import MessageDataPath
from aiordma.verbs import RequestChain
from aiordma.verbs.queue_pair import SIGNALED

# A loop with checkpoints has no transfers, and its tasks are not woken together.
pytestmark = pytest.mark.loops("asyncio")

SEND, WRITE, READ = int(WrOpcode.SEND), int(WrOpcode.RDMA_WRITE), int(WrOpcode.RDMA_READ)
MAX_BATCHED = fast_path.MAX_BATCHED
LOCAL = AccessFlags.LOCAL_WRITE
RDMA = LOCAL | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
SIZE = 100


class Interrupted:
    """A SendQueueCore some of whose methods are replaced: Ctrl-C comes before or after a call."""

    def __init__(self, core: fast_path.SendQueueCore, **methods: Callable[..., None]) -> None:
        self._core = core
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class Transfers:
    """A connected pair, a region of each end, and transfers between the two."""

    def __init__(self, pair: Pair, region: MemoryRegion, source: MemoryRegion) -> None:
        self.far, self.near = pair.far, pair.near
        self.connection, self.core = pair.near.connection, pair.near.sends.core
        self.region, self.source, self.remote = region, source, source.remote
        resources = pair.near.data_path._resources
        self.dispatcher, self.cq = resources.loop_device.dispatcher, resources.send_cq.cq.address

    def send_now(self, data: bytes) -> int:
        """Post a message on the fast path. Return 0, or -1 if it leaves it to Python."""
        result = send_now(self.core, data)
        self.core.set_slow(self.near.data_path.slow.sender.send)
        return result

    def start(self, opcode: int = WRITE) -> fast_path.Transfer:
        """Start a transfer of the region on the fast path."""
        transfer = self.core.start_transfer(opcode, self.region, self.remote)
        assert transfer is not None
        return transfer

    def begin(self, opcode: int = WRITE, memory: Any = None) -> Awaitable[None]:
        """Start a call of the connection, which starts a transfer."""
        what = self.region if memory is None else memory
        if opcode == SEND:
            return self.connection.send(what)
        if opcode == READ:
            return self.connection.read(self.remote, what)
        return self.connection.write(what, self.remote)

    async def tasks(self, *opcodes: int, memory: Any = None) -> list[loops.Task[None]]:
        """Start one task after the other."""
        return [await loops.start(self.begin(opcode, memory)) for opcode in opcodes]

    @property
    def uses(self) -> int:
        """The number of requests that use the region."""
        return self.region.references.count

    @property
    def lengths(self) -> list[int]:
        """The lengths of the posted requests, which name them."""
        return [post.length for post in self.near.posts]

    async def woken(self, *calls: Callable[[], Any]) -> list[loops.Task[Any]]:
        """Start tasks that wait, wake them by one event, and let each of them make its call.

        Return the tasks. The requests of the calls stay in the send queue.
        """

        async def wait_and_call(call: Callable[[], Any]) -> Any:
            await self.connection.write(b"", RemoteBuffer(0, 0, 0))
            result = call()
            return await result if result is not None else None

        tasks = [loops.create_task(wait_and_call(call)) for call in calls]
        await loops.settle()
        self.near.execute(len(calls))
        self.near.forget_posts()
        await loops.sleep(1e-5)
        return tasks

    async def finish(self, *tasks: loops.Task[Any]) -> None:
        """Let the device execute everything. All tasks must succeed, and all memory be released."""
        await self.near.complete()
        await loops.gather(*tasks)
        assert (self.uses, self.core.transfers_in_flight) == (0, 0)

    async def fail(self, code: int, tasks: list[loops.Task[Any]]) -> None:
        """Check that the device's refusal ends all tasks."""
        for task in tasks:
            with pytest.raises(VerbsError) as raised:
                await task
            assert (raised.value.errno, raised.value.function) == (code, "ibv_post_send")

    async def close(self, uses: int) -> None:
        """Check that the memory is kept until the queue pair is destroyed."""
        assert (self.uses, self.connection.closed) == (uses, True)
        await self.connection.aclose()
        assert (self.uses, self.core.transfers_in_flight, self.core.queued_reads) == (0, 0, 0)


@contextlib.asynccontextmanager
async def transfers(
    simulation: Simulation, *, depth: int = 16, credits: int = 4, **more: Any
) -> AsyncIterator[Transfers]:
    """Connect a pair for transfers of `near`, whose device is held back."""
    options = ConnectionOptions(
        send_depth=depth, initiator_depth=credits, recv_depth=64, max_message_size=1000, **more
    )
    async with connected(simulation, options, options) as pair:
        region = await pair.near.connection.allocate(SIZE, RDMA)
        source = await pair.far.connection.allocate(SIZE, RDMA)
        await loops.sleep(0.1)
        pair.near.hold()
        yield Transfers(pair, region, source)
        region.close()
        source.close()


@pytest.mark.parametrize("opcode", [SEND, WRITE, READ])
async def test_a_transfer_is_posted_at_once_and_completes_without_python(
    simulation: Simulation, opcode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed: list[object] = []
    monkeypatch.setattr(MessageDataPath, "complete", lambda *arguments: completed.append(arguments))
    async with transfers(simulation) as t:
        before = t.connection.stats
        t.send_now(b"unsignaled")
        memory = t.region[20:50][:30] if opcode != READ else t.region
        memoryview(t.source)[:], memoryview(t.region)[:] = b"s" * SIZE, b"r" * SIZE
        tasks = await t.tasks(opcode, memory=memory)
        post = t.near.posts[-1]
        assert (post.opcode, post.flags, post.num_sge) == (opcode, SIGNALED, 1)
        assert (post.address, post.length, post.lkey) == memory.segment
        assert post.remote == ((t.remote.addr, t.remote.rkey) if opcode != SEND else (0, 0))
        assert (t.uses, t.near.free) == (1, (14, 4 - (opcode == READ)))
        assert (t.core.transfers_in_flight, t.core.unsignaled, tasks[0].done()) == (1, 0, False)
        await t.finish(*tasks)
        assert (t.near.free, completed) == ((16, 4), [])
        after = t.connection.stats
        sent = after.bytes_sent - before.bytes_sent - len(b"unsignaled")
        counts = {SEND: (30, 0, 0), WRITE: (0, 30, 0), READ: (0, 0, SIZE)}
        assert (sent, after.bytes_written, after.bytes_read) == counts[opcode]
        written = b"r" * 30 if opcode == WRITE else b""
        assert bytes(memoryview(t.source)) == written.ljust(SIZE, b"s")
        assert memoryview(t.region)[50] == ord("s" if opcode == READ else "r")


@pytest.mark.parametrize("opcode", [SEND, WRITE, READ])
async def test_a_task_waits_without_a_coroutine_of_python(
    simulation: Simulation, opcode: int
) -> None:
    async def finish(*_: object) -> None:
        raise AssertionError("Python has waited")

    async with transfers(simulation) as t:
        t.core.await_transfers(finish, lambda _: None, False)
        t.core.set_slow(finish)
        t.core.set_slow_access(finish, finish)
        waiting: Any = t.begin(opcode)
        task = await loops.start(waiting)
        assert (type(waiting.cr_await).__name__, waiting.cr_frame) == ("InlineFuture", None)
        await t.finish(task)


@pytest.mark.parametrize("how", ["cancelled", "closed", "collected"])
@pytest.mark.parametrize("opcode", [SEND, WRITE, READ])
async def test_a_transfer_that_no_task_waits_for_any_more(
    simulation: Simulation, opcode: int, how: str
) -> None:
    """Later requests are fenced until it has ended if it is a read."""
    async with transfers(simulation) as t:
        waiting: Any = t.begin(opcode)
        if how == "cancelled":
            await loops.cancel(await loops.start(waiting))
        else:
            waiting.send(None)
            if how == "closed":
                waiting.close()
            del waiting
        is_read = opcode == READ
        assert (t.uses, t.core.transfers_in_flight, t.core.abandoned_reads) == (1, 1, is_read)
        assert t.send_now(b"x") == 0
        assert bool(t.near.posts[-1].flags & SendFlags.FENCE) == is_read
        await t.finish()
        assert t.core.abandoned_reads == 0


@pytest.mark.parametrize("how", ["closed", "collected"])
async def test_a_queued_read_that_no_task_waits_for_is_dropped(
    simulation: Simulation, how: str
) -> None:
    async with transfers(simulation, credits=1) as t:
        first = await loops.start(t.begin(READ))
        waiting: Any = t.begin(READ)
        waiting.send(None)
        assert (t.uses, t.core.queued_reads) == (2, 1)
        if how == "closed":
            waiting.close()
        del waiting
        assert (t.uses, t.core.queued_reads) == (1, 0)
        await t.finish(first)


async def test_an_error_of_a_callback_for_an_abandoned_read_is_reported(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not replace the exception that ends the wait."""
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(error.exc_value))

    def interrupted(_: object) -> None:
        raise CtrlC

    async with transfers(simulation) as t:
        operations = t.near.data_path.slow.sender._operations
        t.core.await_transfers(operations.finish, interrupted, False)
        waiting: Any = t.begin(READ)
        waiting.send(None)
        with pytest.raises(KeyError, match="reason"):
            waiting.throw(KeyError("reason"))
        assert [type(error) for error in reported] == [CtrlC]
        await t.finish()


async def test_a_task_that_is_busy_polling_waits_in_python(simulation: Simulation) -> None:
    async with transfers(simulation, busy_poll=1e-9) as t:
        waiting: Any = t.begin(WRITE)
        task = await loops.start(waiting)
        assert waiting.cr_frame.f_code.co_name == "finish"
        await t.finish(task)


async def test_arguments_that_only_the_slow_path_checks(simulation: Simulation) -> None:
    class Number:  # like a numpy integer
        def __index__(self) -> int:
            return 5

    async with transfers(simulation) as t:
        start: Any = t.core.start_transfer
        address, _, lkey = t.region.segment

        def memory(segment: tuple[int, ...], references: object = t.region.references) -> Any:
            return SimpleNamespace(references=references, segment=segment)

        huge, unknown = memory((address, (1 << 32) + 10, lkey)), memory((1, 2, 3), references=1)
        for source in (huge, unknown, None, b"x", [t.region], t.region[:0], t.source):
            assert start(WRITE, source, t.remote) is None
        assert start(WRITE, t.region, t.remote[1:]) is None
        text = SimpleNamespace(addr="x", rkey=1, length=2)
        calls: list[tuple[Any, ...]] = [(), ("x", t.region, t.remote), (WRITE, t.region, text)]
        for arguments in (*calls, (WRITE, memory((1, 2)), t.remote)):
            with pytest.raises(TypeError):
                start(*arguments)
        with pytest.raises(AttributeError):
            start(WRITE, t.region, "x")
        assert (t.near.posts, t.near.free, t.uses) == ([], (16, 4), 0)
        assert start(WRITE, t.region, SimpleNamespace(addr=Number(), rkey=Number(), length=200))
        assert [post.remote for post in t.near.posts] == [(5, 5)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_forked_child_posts_and_takes_nothing(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        await t.far.connection.send(b"hello")
        await loops.sleep(0.01)
        path, posted = t.near.data_path, t.near.receives_posted
        cq = simulation.world.objects[t.cq].pointer
        child = os.fork()
        if not child:
            fast_path.note_fork()
            results: list[Any] = [
                t.send_now(b"x"),
                t.core.start_transfer(WRITE, t.region, t.remote),
            ]
            results += [path.receiver.queue.take_bytes(), path._ring._post(0)]
            t.dispatcher.budget = 10**18
            t.core.set_polling(t.dispatcher, t.cq, 10**6)
            t.core.pause()  # it would poll for a credit
            polls = cq.polls
            results += [t.send_now(b"x"), cq.polls - polls]
            t.core.start_batching()
            t.core.batch(t.region, WRITE, (1, 1, 1), (1, 1), -1)
            results += [t.core.unposted, t.core.flush(), t.core.unposted]
            is_unchanged = (t.near.posts, t.near.receives_posted) == ([], posted)
            os._exit(42 if results == [-1, None, None, 0, -1, 0, 1, 0, 0] and is_unchanged else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42  # noqa: ASYNC222
        assert await t.connection.recv() == b"hello"


@pytest.mark.parametrize("opcode", [WRITE, READ, SEND])
async def test_a_refused_transfer_ends_the_connection(simulation: Simulation, opcode: int) -> None:
    """libsiw keeps the request, so its memory is kept until the queue pair is destroyed."""
    async with transfers(simulation) as t:
        t.send_now(b"before")
        unsignaled = t.core.unsignaled
        t.near.refuse(errno.ENOMEM)
        await t.fail(errno.ENOMEM, await t.tasks(opcode))
        stats = t.connection.stats
        assert (stats.writes, stats.reads, t.lengths) == (0, 0, [6])
        assert t.core.unsignaled == unsignaled
        await t.close(1)


@pytest.mark.parametrize("dispatched", [False, True])
async def test_an_error_stops_no_other_transfer(simulation: Simulation, dispatched: bool) -> None:
    def interrupted() -> None:
        raise CtrlC

    def closed(_: None) -> None:
        raise RuntimeError("Event loop is closed")

    async with transfers(simulation) as t:
        t.core.allow_transfers(lambda: SimpleNamespace(done=lambda: False, set_result=closed))
        started = [t.start(WRITE)]
        t.core.allow_transfers(future_factory(running_loop()))
        started += [t.start(opcode) for opcode in (READ, READ, READ, WRITE)]
        started[2].on_abandoned_end = started[3].on_abandoned_end = interrupted
        t.near.execute()
        poll = t.dispatcher.poll if dispatched else lambda cq: t.dispatcher.poll_for(cq, 10**9)
        with pytest.raises(CtrlC):
            poll(t.cq)
        assert [(one.is_over(), one.succeeded) for one in started] == [(True, True)] * 5
        assert (t.uses, t.near.free) == (0, (16, 4))


@pytest.mark.parametrize("removed_by", ["set_result", "the end of the memory"])
def test_a_waiter_can_remove_the_transfers_that_are_being_woken(
    verbs: Queues, removed_by: str
) -> None:
    """Only a sanitizer notices if one of them is used after that."""
    woken, pd = list[object](), object()

    class Future:
        def done(self) -> bool:
            return False

        def set_result(self, result: None) -> None:
            woken.append(self)
            core.abandon()

    class Memory:
        def __init__(self) -> None:
            self.references, self.segment = references, (0x10000, SIZE, 7)

        def __del__(self) -> None:
            if removed_by != "set_result":
                core.abandon()

    core: Any = fast_path.SendQueueCore(8, 4, 16)
    core.open(verbs, verbs.qp_cell, 5 << 32)
    core.allow_transfers(Future)
    core.use_memory(pd, SIZE)
    references = fast_path.ReferenceCount(pd, int(LOCAL))
    for _ in range(4):
        assert core.start_transfer(WRITE, Memory(), RemoteBuffer(0, 1, SIZE)) is not None
    core.stop_waiting(4)
    assert core.transfers_in_flight == references.count == 0
    assert len({id(future) for future in woken}) == 4


def test_waking_a_waiter_holds_a_reference_to_its_transfer(verbs: Queues) -> None:
    """The waiter drops all others. Without it the transfer would be used after it is freed."""
    futures, counts, pd = list[object](), list[int](), object()

    def count(index: int) -> int:
        return sys.getrefcount(transfers[index])

    class Future:
        def __init__(self) -> None:
            futures.append(self)

        def done(self) -> bool:
            return bool(counts)

        def set_result(self, result: None) -> None:
            counts.append(0)  # waiters that abandon() wakes are done
            core.abandon()
            counts[0] = count(futures.index(self))

    core: Any = fast_path.SendQueueCore(8, 4, 16)
    core.open(verbs, verbs.qp_cell, 5 << 32)
    core.allow_transfers(Future)
    core.use_memory(pd, SIZE)
    memory: Any = SimpleNamespace(
        references=fast_path.ReferenceCount(pd, int(LOCAL)), segment=(0x10000, SIZE, 7)
    )
    transfers = [core.start_transfer(WRITE, memory, RemoteBuffer(0, 1, SIZE)) for _ in range(4)]
    core.stop_waiting(4)
    assert counts == [count(0) + 1]


def test_a_dropped_core_and_its_transfers_are_collected(verbs: Queues) -> None:
    class Future:
        pass

    pd = object()
    core: Any = fast_path.SendQueueCore(8, 4, 16)
    core.open(verbs, verbs.qp_cell, 5 << 32)
    core.allow_transfers(Future)
    core.use_memory(pd, SIZE)
    core.allow_reads(int(LOCAL))
    core.release_rd_atomic(1)
    references = fast_path.ReferenceCount(pd, int(LOCAL))
    memory: Any = SimpleNamespace(references=references, segment=(0x10000, SIZE, 7))
    started = [core.start_transfer(READ, memory, RemoteBuffer(0, 1, SIZE)) for _ in range(2)]
    assert (core.transfers_in_flight, core.queued_reads) == (1, 1)
    futures = [weakref.ref(transfer.future) for transfer in started]
    del core, started
    gc.collect()
    assert [ref() for ref in futures] == [None, None]


async def test_reads_beyond_the_rd_atomic_credits_are_queued(simulation: Simulation) -> None:
    async with transfers(simulation, credits=2) as t:
        tasks = await t.tasks(*[READ] * 7, WRITE)  # writes and sends do not wait for queued reads
        assert t.send_now(b"x") == 0
        assert (t.lengths, t.core.queued_reads, t.near.free) == ([SIZE] * 3 + [1], 5, (12, 0))
        assert (t.uses, t.connection.stats.send_waits) == (8, 5)
        await loops.cancel(tasks.pop(3))  # it is never posted
        calls = t.near.calls
        await t.near.complete(4)
        assert (len(t.lengths), t.core.queued_reads, t.near.calls) == (6, 2, calls + 1)
        assert [task.done() for task in tasks] == [True, True] + [False] * 4 + [True]
        await t.finish(*tasks)
        assert all(post.flags & SendFlags.SIGNALED for post in t.near.posts if post.length > 1)
        assert (t.connection.stats.reads, t.near.free[1], t.core.abandoned_reads) == (6, 2, 0)


async def test_many_queued_reads_are_posted_in_several_calls(simulation: Simulation) -> None:
    async with transfers(simulation, depth=64) as t:
        while t.core.try_acquire_rd_atomic():
            pass
        started = [t.start(READ) for _ in range(40)]
        assert (t.near.posts, t.core.queued_reads) == ([], 40)
        calls = t.near.calls
        t.core.release_rd_atomic(40)
        assert (t.near.calls - calls, t.core.queued_reads, t.near.free) == (3, 0, (24, 0))
        await t.finish()
        assert all(one.succeeded for one in started)


async def test_a_queued_read_waits_for_a_send_credit_too(simulation: Simulation) -> None:
    """Without a completion, it gets a credit that a task releases unused."""
    async with transfers(simulation, credits=1, depth=2) as t:
        first, second = t.start(READ), t.start(READ)
        assert t.near.sends.try_reserve()
        t.core.unreserve(-1)  # as if the credit of the read were in use again: possible on iWARP
        await t.near.complete()
        assert (first.is_over(), second.is_over(), t.near.free) == (True, False, (0, 1))
        assert (len(t.lengths), t.core.queued_reads) == (1, 1)
        t.near.sends.unreserve()
        assert (len(t.lengths), t.core.queued_reads) == (2, 0)
        await t.near.complete()
        assert second.is_over()


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("how", ["ended", "refused"])
async def test_the_end_drops_queued_reads(simulation: Simulation, how: str, cancels: bool) -> None:
    """The memory of refused reads is kept until the queue pair is destroyed."""
    async with transfers(simulation, credits=2) as t:
        tasks = await t.tasks(*[READ] * 5)
        if how == "ended":
            t.near.data_path._callbacks.fail(PeerClosed("gone"))
            assert t.core.queued_reads == 0
        else:
            t.near.refuse(errno.ENOMEM)
            t.near.execute()
            t.dispatcher.poll(t.cq)
        if cancels:
            await loops.cancel(tasks.pop(2))
        assert len(t.lengths) == 2
        if how == "ended":
            for task in tasks:
                with pytest.raises(PeerClosed):
                    await task
        else:
            await loops.gather(*tasks[:2])
            await t.fail(errno.ENOMEM, tasks[2:])
            await t.close(2)


async def test_queued_reads_and_tasks_get_credits_alternately(simulation: Simulation) -> None:
    """Reads queued in C and tasks that wait in Python each get every second credit."""
    async with (
        transfers(simulation, credits=1) as t,
        await t.connection.allocate(SIZE, RDMA) as more,
    ):
        pieces = [more[:30], t.region[:30], more[50:], t.region[60:]]
        if simulation.near.is_iwarp:  # one piece a request
            pieces = [t.region[10:], t.region[:10]]
        tasks = await t.tasks(READ, READ)
        tasks += [*await t.tasks(READ, READ, READ, memory=pieces), *await t.tasks(READ, READ)]
        is_queued_in_c: list[bool] = []
        while not all(task.done() for task in tasks):
            assert len(t.near.posts) == len(is_queued_in_c) + 1
            is_queued_in_c.append(t.near.posts[-1].length == SIZE)
            await t.near.complete(1)
        assert is_queued_in_c[1] != is_queued_in_c[2]
        assert is_queued_in_c[2] != is_queued_in_c[3]
        assert t.near.free == (16, 1)


@pytest.mark.parametrize("count", [1, MAX_BATCHED + 2])
async def test_tasks_woken_together_post_in_one_call(simulation: Simulation, count: int) -> None:
    """A full list is posted before the next one begins."""
    async with transfers(simulation, depth=4 * MAX_BATCHED) as t:
        calls = t.near.calls + count
        tasks = await t.woken(*[t.begin] * count)
        assert (t.near.calls - calls, t.lengths) == (1 + count // MAX_BATCHED, [SIZE] * count)
        tasks += await t.tasks(WRITE, WRITE)  # no event has woken these: they post at once
        assert len(t.lengths) == count + 2
        await t.finish(*tasks)


async def test_requests_of_all_kinds_keep_their_order(simulation: Simulation) -> None:
    async with transfers(simulation, credits=1) as t:
        calls = t.near.calls + 6  # of waiting
        rd_atomic_credits = t.near.data_path.slow.remote._rd_atomic_credits
        assert rd_atomic_credits.try_acquire()

        def write_slowly(nbytes: int) -> Awaitable[None]:
            return t.near.data_path.slow.remote.write(t.region[:nbytes], t.remote, -1)

        tasks = await t.woken(
            lambda: write_slowly(1),
            lambda: t.begin(WRITE, t.region[:2]),
            lambda: t.begin(READ),  # it is queued, and posted after the batch
            lambda: write_slowly(4),
            lambda: t.begin(SEND, t.region[:5]),
            rd_atomic_credits.release,
        )
        assert (t.near.calls - calls, t.lengths) == (2, [1, 2, 4, 5, SIZE])
        assert {post.flags for post in t.near.posts} == {SIGNALED}
        assert (t.dispatcher.open_post_lists, t.core.batching, t.core.unposted) == (0, 0, 0)
        await t.finish(*tasks)
        assert (t.near.free, t.connection.stats.writes) == ((16, 1), 6 + 3)
        tasks = await t.woken(
            lambda: t.begin(WRITE, t.region[:2]),
            lambda: t.connection.send(b"four"),
            lambda: t.begin(WRITE, t.region[:5]),
            lambda: t.begin(WRITE, [t.region[:1], t.region[50:52]]),
            lambda: t.begin(WRITE, t.region[:7]),
        )
        assert t.lengths == [2, 4, 5, 1, 7]
        await t.finish(*tasks)


@pytest.mark.parametrize(("accepted", "count"), [(0, 4), (2, 4), (3, MAX_BATCHED + 2)])
async def test_a_refused_list_wakes_all(simulation: Simulation, accepted: int, count: int) -> None:
    """The memory of all of them is kept until the queue pair is destroyed."""
    async with transfers(simulation, depth=4 * MAX_BATCHED) as t:
        waiting = loops.create_task(t.connection.recv())

        def refuse() -> Awaitable[None]:
            t.near.refuse(errno.ENOMEM, accepted=accepted)
            return t.begin(WRITE)

        async def send_done() -> None:
            """Send a message that must not arrive without the requests before it."""
            await t.connection.send(b"done")

        tasks = await t.woken(refuse, *[t.begin] * (count - 1), send_done)
        assert len(t.lengths) == accepted
        t.near.refuse(0)  # from now on the device would accept it
        assert (t.core.flush(), len(t.lengths)) == (errno.ENOMEM, accepted)
        await t.fail(errno.ENOMEM, [*tasks, *await t.tasks(SEND), waiting])
        assert t.uses >= min(count, MAX_BATCHED) - accepted
        await t.close(t.uses)


async def test_after_a_ctrl_c_while_posting_no_request_is_posted_twice(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transfers(simulation) as t:
        post_list, posted = t.near.sends.post_list, list[int]()
        assert post_list is not None

        def interrupted() -> None:
            posted.append(t.core.unposted)
            t.core.flush()
            raise CtrlC

        def flush() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(post_list, "_core", Interrupted(t.core, flush=interrupted))
                with pytest.raises(CtrlC):
                    post_list.flush()

        tasks = await t.woken(t.begin, lambda: t.begin(WRITE, t.region[:2]), flush)
        await t.connection.send(b"x")
        assert (t.lengths, posted) == ([SIZE, 2, 1], [2])
        await t.finish(*tasks)


@pytest.mark.parametrize("is_added", [False, True])
async def test_a_ctrl_c_while_adding_keeps_the_memory(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, is_added: bool
) -> None:
    async with transfers(simulation) as t:
        post_list = t.near.sends.post_list

        def interrupted(*arguments: Any) -> None:
            if is_added:
                t.core.batch(*arguments)
            raise CtrlC

        async def write() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(post_list, "_core", Interrupted(t.core, batch=interrupted))
                with pytest.raises(CtrlC):
                    await t.near.data_path.slow.remote.write(t.region, t.remote, -1)

        tasks = await t.woken(write, lambda: None)
        await tasks[0]
        assert len(t.lengths) == is_added
        t.connection.abort()
        await t.close(is_added)


async def test_a_batched_address_can_be_a_number_of_numpy(simulation: Simulation) -> None:
    async with transfers(simulation) as t:
        remote = RemoteBuffer(np.uint64(t.remote.addr), t.remote.rkey, t.remote.length)  # type: ignore[arg-type]
        before = len(t.near.posts)
        tasks = await t.woken(
            lambda: t.near.data_path.slow.remote.write(t.region[:3], remote, -1), lambda: t.begin()
        )
        assert [post.remote[0] for post in t.near.posts[before:]] == [t.remote.addr] * 2
        await t.finish(*tasks)


def test_a_batch_has_a_limit() -> None:
    core = fast_path.SendQueueCore(64, 16, 0)
    request: Any = (None, WRITE, (1, 1, 1), (1, 1), -1)
    with pytest.raises(ValueError, match=r"^the batch is full$"):
        core.batch(*request)  # there is none before start_batching()
    core.start_batching()
    for _ in range(MAX_BATCHED):
        core.batch(*request)
    with pytest.raises(ValueError, match=r"^the batch is full$"):
        core.batch(*request)
    assert (core.unposted, core.next_number) == (MAX_BATCHED, MAX_BATCHED)


def test_a_full_chain_refuses_another_request() -> None:
    chain = RequestChain(2)
    request: Any = (1, WrOpcode.RDMA_READ, (1 << 16, 1 << 16, 9), (1, 2), SIGNALED, -1)
    for _ in range(2):
        chain.add(*request)
    with pytest.raises(ValueError, match="a chain of 2 requests is full"):
        chain.add(*request)
    assert chain.count == 2
