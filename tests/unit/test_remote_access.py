"""Reads, writes and atomics: their memory, their credits, and the checks of their arguments."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import connected

from aiordma import (
    AccessFlags,
    Connection,
    ConnectionOptions,
    LocalClosed,
    MemoryRegion,
    PeerClosed,
    RemoteBuffer,
    VerbsError,
    WorkRequestError,
)
from aiordma.enums import SendFlags, WrOpcode

SIZE = 100
MAX_INLINE = 16
LOCAL = AccessFlags.LOCAL_WRITE
RDMA = LOCAL | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
LARGEST = (1 << 64) - 1


class Access:
    """A connected pair, two regions of the near end, and one of the far end."""

    def __init__(self, pair: Any, one: MemoryRegion, two: MemoryRegion, far: MemoryRegion) -> None:
        self.near, self.far_end = pair.near, pair.far
        self.connection: Connection = pair.near.connection
        self.one, self.two, self.far = one, two, far
        self.remote = far.remote

    async def start(self, awaitable: Any) -> loops.Task[Any]:
        """Start a task, and let it run until it waits."""
        task = loops.create_task(awaitable)
        await loops.sleep(1e-5)
        return task

    async def read_into(self, *pieces: Any) -> loops.Task[None]:
        """Start a read on the slow path."""
        return await self.start(self.connection.read(self.remote, list(pieces)))

    @property
    def uses(self) -> tuple[int, int]:
        """The number of requests that use each region of the near end."""
        return self.one.references.count, self.two.references.count

    @property
    def targets(self) -> list[tuple[int, int, int]]:
        """Opcode, offset in the far region and length of the first piece, of each request."""
        return [
            (post.opcode, post.remote[0] - self.remote.addr, post.length)
            for post in self.near.posts
        ]


@contextlib.asynccontextmanager
async def access_of(
    simulation: Simulation, *, credits: int = 4, held: bool = True, **more: Any
) -> AsyncIterator[Access]:
    """Connect a pair. The device of the near end is held back if `held`."""
    options = ConnectionOptions(
        send_depth=16, initiator_depth=credits, max_inline=MAX_INLINE, **more
    )
    async with connected(simulation, options) as pair:
        near = pair.near.connection
        regions = [await near.allocate(SIZE, RDMA) for _ in range(2)]
        regions.append(await pair.far.connection.allocate(SIZE, RDMA))
        await near.send(bytes(50))  # the pool for copies has memory from now on
        await pair.far.connection.recv()
        await loops.sleep(0.001)
        pair.near.forget_posts()
        if held:
            pair.near.hold()
        yield Access(pair, *regions)
        for region in regions:
            region.close()


async def cancel(task: loops.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(loops.CancelledError):
        await task


# --- reading ---


async def test_a_read_fills_the_beginning_of_the_memory(simulation: Simulation) -> None:
    async with access_of(simulation, held=False) as a:
        memoryview(a.far)[:] = bytes(range(SIZE))
        await a.connection.read(a.remote[20:50], a.one[10:])
        assert bytes(memoryview(a.one)[8:42]) == bytes(2) + bytes(range(20, 50)) + bytes(2)
        await a.connection.read(a.remote, [a.one[60:], a.two[:0], a.two])
        assert bytes(memoryview(a.one)[60:]) == bytes(range(40))
        assert bytes(memoryview(a.two)) == bytes(range(40, 100)) + bytes(40)
        await a.connection.read(a.remote[:0], a.one)
        await a.connection.read(a.remote[:0], [])
        stats = a.connection.stats
        assert (stats.reads, stats.bytes_read) == (2 + simulation.near.is_iwarp, 130)
        assert (a.uses, a.near.free) == ((0, 0), (16, 4))


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
async def test_a_read_of_too_many_segments_is_split(simulation: Simulation, how: str) -> None:
    async with access_of(simulation) as a:
        if how == "failed":
            a.remote = RemoteBuffer(a.remote.addr, 1, SIZE)
        task = await a.read_into(a.one[:60], a.two)
        assert (a.uses, a.targets) == ((1, 1), [(WrOpcode.RDMA_READ, 0, 60)])
        if how == "cancelled":
            await cancel(task)
            assert a.uses == (1, 0)  # the second request was not posted
        await a.near.complete()
        if how == "failed":
            with pytest.raises(WorkRequestError, match="RDMA_READ failed: REM_ACCESS_ERR"):
                await task
        assert len(a.targets) == 1 + (how == "completed")
        if how == "completed":
            await task
            assert a.targets[1] == (WrOpcode.RDMA_READ, 60, 40)
        assert a.uses == (0, 0)


@pytest.mark.parametrize("access", [AccessFlags.REMOTE_READ, LOCAL])
async def test_a_read_needs_memory_with_the_access_of_the_transport(
    simulation: Simulation, access: AccessFlags
) -> None:
    async with access_of(simulation, held=False) as a:
        region = await a.connection.allocate(SIZE, access)
        for into in (region, [region[:50], region[50:]]):
            if access is LOCAL and not simulation.near.is_iwarp:
                await a.connection.read(a.remote, into)
                continue
            with pytest.raises(ValueError, match=r"must be registered with .*LOCAL_WRITE"):
                await a.connection.read(a.remote, into)
        assert (region.references.count, a.near.free) == (0, (16, 4))
        region.close()


# --- credits for reads and atomics ---


@pytest.mark.parametrize("credits", [1, 3])
async def test_reads_beyond_the_credits_wait_in_order(simulation: Simulation, credits: int) -> None:
    async with access_of(simulation, credits=credits) as a:
        tasks = []
        for size in range(1, 7):
            into = a.one if size % 2 else [a.one]
            tasks.append(await a.start(a.connection.read(a.remote[:size], into)))
        tasks.append(await a.start(a.connection.write(a.two, a.remote)))  # it takes no credit
        assert len(a.targets) == credits + 1
        assert a.connection.stats.send_waits == 6 - credits
        await a.near.complete()
        await loops.gather(*tasks)
        reads = [length for opcode, _, length in a.targets if opcode == WrOpcode.RDMA_READ]
        assert sorted(reads) == [1, 2, 3, 4, 5, 6]
        assert (a.uses, a.near.free) == ((0, 0), (16, credits))


@pytest.mark.transport("IB")
async def test_reads_and_atomics_share_the_credits(simulation: Simulation) -> None:
    async with access_of(simulation, credits=1) as a:
        tasks = [await a.start(a.connection.read(a.remote, a.one))]
        tasks += [await a.start(a.connection.fetch_and_add(a.remote[:8], 1)) for _ in range(2)]
        assert len(a.targets) == 1
        await cancel(tasks.pop())  # it takes none
        assert a.near.pool_is_whole is False  # the other atomic has a buffer
        await a.near.complete()
        await loops.gather(*tasks)
        assert (len(a.targets), a.near.free, a.near.pool_is_whole) == (2, (16, 1), True)


@pytest.mark.parametrize("is_list", [False, True])
async def test_the_credit_of_a_cancelled_read_is_free_after_its_completion(
    simulation: Simulation, is_list: bool
) -> None:
    async with access_of(simulation, credits=1) as a:
        await cancel(await a.start(a.connection.read(a.remote, [a.one] if is_list else a.one)))
        waiting = await a.start(a.connection.read(a.remote, [a.two]))
        await cancel(waiting)
        assert (a.uses, len(a.targets)) == ((1, 0), 1)
        task = await a.start(a.connection.read(a.remote, a.two))
        assert len(a.targets) == 1
        await a.near.complete()
        await task
        assert (a.uses, a.near.free) == ((0, 0), (16, 1))


async def test_a_refused_read_keeps_its_memory_until_the_queue_pair_is_destroyed(
    simulation: Simulation,
) -> None:
    async with access_of(simulation, credits=1) as a:
        a.near.refuse(errno.ENOMEM)
        with pytest.raises(VerbsError, match="ibv_post_send"):
            await a.connection.read(a.remote, [a.one])
        assert (a.uses, a.connection.stats.reads) == ((1, 0), 0)
        await a.connection.aclose()
        assert a.uses == (0, 0)


async def test_without_credits_reads_and_atomics_are_refused(simulation: Simulation) -> None:
    async with access_of(simulation, credits=0, held=False) as a:
        calls = [a.connection.read(a.remote, a.one), a.connection.read(a.remote, [a.one])]
        if not simulation.near.is_iwarp:
            calls.append(a.connection.fetch_and_add(a.remote, 1))  # type: ignore[arg-type]
        for call in calls:
            with pytest.raises(ValueError, match="initiator_depth 0"):
                await call
        a.near.data_path.probe()  # posts nothing
        assert (a.uses, a.near.pool_is_whole, a.targets) == ((0, 0), True, [])
        await a.connection.write(a.one, a.remote)


async def test_the_end_wakes_the_tasks_that_wait_for_a_credit(simulation: Simulation) -> None:
    async with access_of(simulation, credits=1) as a:
        tasks = [await a.start(a.connection.read(a.remote, a.one))]
        tasks += [await a.start(a.connection.read(a.remote, [a.two])) for _ in range(3)]
        assert a.uses == (1, 3)
        a.far_end.connection.abort()
        for task in tasks:
            with pytest.raises(PeerClosed):
                await task
        assert (a.uses, len(a.targets)) == ((0, 0), 1)


async def test_a_probe_is_a_read_of_no_bytes(simulation: Simulation) -> None:
    async with access_of(simulation, credits=1) as a:
        a.near.sends.pause()
        a.near.data_path.probe()
        assert (a.targets, a.near.free) == ([], (0, 1))
        a.near.data_path.resume()
        for _ in range(2):  # the second time, one is under way
            a.near.data_path.probe()
        (post,) = a.near.posts
        assert (post.opcode, post.num_sge, post.remote) == (WrOpcode.RDMA_READ, 0, (0, 0))
        await a.near.complete()
        assert a.near.free == (16, 1)
        a.near.refuse(errno.ENOMEM)
        a.near.data_path.probe()
        assert a.connection.closed


# --- writing ---


@pytest.mark.parametrize("imm", [None, 0, 7])
async def test_writes_reach_the_remote_memory(simulation: Simulation, imm: int | None) -> None:
    imm = None if simulation.near.is_iwarp else imm
    async with access_of(simulation, held=False) as a:
        memoryview(a.one)[:] = b"r" * SIZE
        cases: list[tuple[Any, bytes, bool]] = [
            (a.one, b"r" * SIZE, False),
            (a.one[:30], b"r" * 30, False),
            ([a.one[:5]], b"r" * 5, False),
            ([a.one[:10], b"copy", a.one[50:60]], b"r" * 10 + b"copy" + b"r" * 10, False),
            (bytearray(b"c" * 50), b"c" * 50, False),
            (b"d" * (MAX_INLINE + 1), b"d" * (MAX_INLINE + 1), False),
            (b"i" * MAX_INLINE, b"i" * MAX_INLINE, True),
            ([b"a", bytearray(b"b")], b"ab", True),
            (b"", b"", True),
        ]
        for source, data, is_inline in cases:
            memoryview(a.far)[:] = bytes(SIZE)
            await a.connection.write(source, a.remote, imm=imm)
            assert bytes(memoryview(a.far)) == data.ljust(SIZE, b"\0")
            assert bool(a.near.posts[-1].flags & SendFlags.INLINE) is is_inline
            if imm is not None:
                with await a.far_end.connection.recv_message() as message:
                    assert (len(message), message.imm) == (0, imm)
        stats = a.connection.stats
        assert (stats.writes, stats.bytes_written) == (9, sum(len(data) for _, data, _ in cases))
        assert (a.uses, a.near.pool_is_whole) == ((0, 0), True)


async def test_a_buffer_that_was_copied_can_be_resized(simulation: Simulation) -> None:
    async with access_of(simulation) as a:
        memory = bytearray(b"c" * 50)
        task = await a.start(a.connection.write([memory, a.one[:10]], a.remote))
        memory.append(0)
        await a.near.complete()
        await task
        assert bytes(memoryview(a.far)[:50]) == b"c" * 50


@pytest.mark.parametrize("nbytes", [9, 50])
async def test_a_write_that_does_not_fit_is_refused(simulation: Simulation, nbytes: int) -> None:
    async with access_of(simulation) as a:
        source: Any
        for source in (bytes(nbytes), a.one[:nbytes], [a.one[: nbytes - 1], b"x"]):
            with pytest.raises(ValueError, match=f"{nbytes} bytes do not fit into the remote"):
                await a.connection.write(source, a.remote[: nbytes - 1])
        assert (a.uses, a.near.pool_is_whole, a.targets) == ((0, 0), True, [])


@pytest.mark.parametrize(
    "source", [lambda a: [a.one], lambda a: a.one, lambda a: b"x", lambda a: bytes(50)]
)
async def test_a_failed_write_raises_the_reason_of_the_end(
    simulation: Simulation, source: Callable[[Access], Any]
) -> None:
    async with access_of(simulation, held=False) as a:
        for _ in range(2):
            with pytest.raises(WorkRequestError, match="RDMA_WRITE failed: REM_ACCESS_ERR"):
                await a.connection.write(source(a), RemoteBuffer(a.remote.addr, 1, SIZE))
        assert (a.uses, a.near.pool_is_whole) == ((0, 0), True)


# --- atomics ---


@pytest.mark.transport("IB")
@pytest.mark.parametrize("before", [0, 5, LARGEST, 0x0102030405060708])
async def test_an_atomic_returns_the_number_before(simulation: Simulation, before: int) -> None:
    async with access_of(simulation, held=False) as a:
        memory = memoryview(a.far)[8:16]
        memory[:] = before.to_bytes(8, sys.byteorder)

        def value() -> int:
            return int.from_bytes(memory, sys.byteorder)

        assert await a.connection.fetch_and_add(a.remote[8:16], -1) == before
        assert value() == (before - 1) % (1 << 64)
        assert await a.connection.fetch_and_add(a.remote[8:], 1) == (before - 1) % (1 << 64)
        for compare, after in ((before + 1 & LARGEST, before), (before, 7), (before, 7)):
            found = value()
            assert await a.connection.compare_and_swap(a.remote[8:16], compare, 7) == found
            assert value() == after
        assert (a.connection.stats.atomics, a.connection.stats.reads) == (5, 0)
        assert (a.near.pool_is_whole, a.near.free) == (True, (16, 4))


@pytest.mark.transport("IB")
@pytest.mark.parametrize("name", ["FETCH_ADD", "COMP_SWAP"])
async def test_a_failed_atomic_names_its_operation(simulation: Simulation, name: str) -> None:
    async with access_of(simulation, held=False) as a:
        remote = RemoteBuffer(a.remote.addr, 1, 8)
        call = (
            a.connection.fetch_and_add(remote, 1)
            if name == "FETCH_ADD"
            else a.connection.compare_and_swap(remote, 1, 1)
        )
        with pytest.raises(WorkRequestError, match=f"{name} failed"):
            await call
        assert a.near.pool_is_whole


@pytest.mark.transport("IB")
async def test_the_buffer_of_a_cancelled_atomic_is_used_until_its_completion(
    simulation: Simulation,
) -> None:
    async with access_of(simulation) as a:
        await cancel(await a.start(a.connection.fetch_and_add(a.remote[:8], 1)))
        assert not a.near.pool_is_whole
        await a.connection.send(b"fenced")
        assert SendFlags.FENCE in a.near.flags[-1]
        await a.near.complete()
        assert a.near.pool_is_whole
        assert memoryview(a.far)[:8].tobytes() == (1).to_bytes(8, sys.byteorder)


@pytest.mark.transport("IWARP")
async def test_an_atomic_on_a_device_without_atomics_is_refused(simulation: Simulation) -> None:
    async with access_of(simulation) as a:
        with pytest.raises(ValueError, match="sim0 has no atomic operations"):
            await a.connection.fetch_and_add(a.remote, 1)


@pytest.mark.transport("IB")
@pytest.mark.parametrize(
    ("part", "operands", "why"),
    [
        (slice(0, 7), (0, 0), "8 bytes do not fit into the remote buffer of 7"),
        (slice(4, 12), (0, 0), "an address that is a multiple of 8"),
        (slice(0, 8), (-1, 0), "-1 is not a number of 64 bits"),
        (slice(0, 8), (0, 1 << 64), "is not a number of 64 bits"),
    ],
)
async def test_an_atomic_with_a_wrong_address_or_operand_is_refused(
    simulation: Simulation, part: slice, operands: tuple[int, int], why: str
) -> None:
    async with access_of(simulation) as a:
        with pytest.raises(ValueError, match=why):
            await a.connection.compare_and_swap(a.remote[part], *operands)
        assert (a.near.pool_is_whole, a.near.free, a.targets) == (True, (16, 4), [])


# --- memory windows ---


WINDOW = RDMA | AccessFlags.MW_BIND


@pytest.mark.transport("IB")
async def test_a_window_gives_access_until_it_is_closed(simulation: Simulation) -> None:
    async with access_of(simulation, held=False) as a:
        far = a.far_end.connection
        region = await far.allocate(SIZE, WINDOW)
        with await far.bind(region[10:30], AccessFlags.REMOTE_WRITE) as window:
            await a.connection.write(b"w" * 20, window.remote)
            assert bytes(memoryview(region)[10:30]) == b"w" * 20
            region.close()
            await a.connection.write(b"x" * 20, window.remote)  # the memory is registered
        window.close()
        await loops.sleep(0.01)
        with pytest.raises(WorkRequestError, match="REM_ACCESS_ERR"):
            await a.connection.write(b"y", window.remote)


@pytest.mark.transport("IB")
@pytest.mark.parametrize("is_posted", [False, True])
async def test_cancelling_bind_leaves_no_window(simulation: Simulation, is_posted: bool) -> None:
    async with access_of(simulation) as a, await a.connection.allocate(SIZE, WINDOW) as region:
        if is_posted:
            task = await a.start(a.connection.bind(region))
            await loops.sleep(0.01)
            await cancel(task)
            assert region.references.count == 1
        else:
            simulation.world.calls.fail("ibv_alloc_mw", errno.ENOMEM)
            with pytest.raises(VerbsError, match="ibv_alloc_mw"):
                await a.connection.bind(region)
            assert region.references.count == 0
        await a.near.complete()
        await loops.sleep(0.01)
        assert region.references.count == 0


@pytest.mark.transport("IB")
async def test_a_refused_bind_closes_its_window(simulation: Simulation) -> None:
    async with access_of(simulation) as a, await a.connection.allocate(SIZE, WINDOW) as region:
        a.near.refuse(errno.ENOMEM)
        with pytest.raises(VerbsError, match="ibv_post_send"):
            await a.connection.bind(region)
        await a.connection.aclose()
        assert region.references.count == 0


async def test_memory_that_cannot_be_bound_is_refused(simulation: Simulation) -> None:
    async with access_of(simulation) as a, await a.connection.allocate(SIZE, WINDOW) as region:
        cases: list[tuple[Any, str]] = [
            (a.one, "with AccessFlags.MW_BIND"),
            (region[:0], "an empty slice"),
        ]
        for part, why in cases:
            if simulation.near.is_iwarp:
                why = "sim0 has no memory windows"
            with pytest.raises(ValueError, match=why):
                await a.connection.bind(part)


# --- the end ---


async def test_on_an_ended_connection_nothing_is_acquired(simulation: Simulation) -> None:
    async with access_of(simulation) as a:
        calls = [
            a.connection.read(a.remote, a.one),
            a.connection.read(a.remote, [a.one]),
            a.connection.write(a.one, a.remote),
            a.connection.write([a.one], a.remote),
            a.connection.write(b"x", a.remote),
            a.connection.write(bytes(50), a.remote),
        ]
        a.connection.abort()
        for call in calls:
            with pytest.raises(LocalClosed):
                await call
        assert (a.uses, a.targets) == ((0, 0), [])
