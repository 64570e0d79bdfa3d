"""Reads, writes and atomics: their memory, their credits, and the checks of their arguments."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import connected

import aiordma
from aiordma import AccessFlags, ConnectionOptions, MemoryRegion
from aiordma.enums import SendFlags, WrOpcode

SIZE = 100
MAX_INLINE = 16
LOCAL = AccessFlags.LOCAL_WRITE
RDMA = LOCAL | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
WINDOW = RDMA | AccessFlags.MW_BIND
READ, WRITE = WrOpcode.RDMA_READ, WrOpcode.RDMA_WRITE


class Access:
    """A connected pair, two regions of the near end, and one of the far end."""

    def __init__(self, pair: Any, one: MemoryRegion, two: MemoryRegion, far: MemoryRegion) -> None:
        self.near, self.far_end = pair.near, pair.far
        self.connection: aiordma.Connection = pair.near.connection
        self.one, self.two, self.far = one, two, far
        self.remote = far.remote
        self.wrong = aiordma.RemoteBuffer(self.remote.addr, 1, SIZE)
        """The far region, with a wrong key."""

    async def start_reads(self, *into: Any) -> list[loops.Task[None]]:
        """Start a read of the far region into each of these."""
        tasks = [loops.create_task(self.connection.read(self.remote, each)) for each in into]
        await loops.sleep(1e-5)
        return tasks

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
    simulation: Simulation, *, credits: int = 4, held: bool = True
) -> AsyncIterator[Access]:
    """Connect a pair. The device of the near end is held back if `held`.

    At the end no request may use the memory, and no buffer for copies.
    """
    options = ConnectionOptions(send_depth=16, initiator_depth=credits, max_inline=MAX_INLINE)
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
        access = Access(pair, *regions)
        yield access
        assert (access.uses, pair.near.pool_is_whole) == ((0, 0), True)
        for region in regions:
            region.close()


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
        for access in (AccessFlags.REMOTE_READ, LOCAL):
            region = await a.connection.allocate(SIZE, access)
            for into in (region, [region[:50], region[50:]]):
                if access is LOCAL and not simulation.near.is_iwarp:
                    await a.connection.read(a.remote, into)
                    continue
                with pytest.raises(ValueError, match=r"must be registered with .*LOCAL_WRITE"):
                    await a.connection.read(a.remote, into)
            assert region.references.count == 0
            region.close()
        assert a.near.free == (16, 4)


@pytest.mark.parametrize(
    ("start", "nbytes", "on_iwarp"),
    [
        (4095, 32, [1, 31]),
        (4064, 33, [33]),
        (4064, 32, [32]),
        (4090, 7, [6, 1]),
        (4090, 0, []),
    ],
)
async def test_a_small_read_that_crosses_a_page_is_split_on_iwarp(
    simulation: Simulation, start: int, nbytes: int, on_iwarp: list[int]
) -> None:
    """Soft-iWARP answers it with wrong bytes if it is posted in one piece."""
    async with access_of(simulation, held=False) as a:
        far = await a.far_end.connection.allocate(2 * 4096, RDMA)
        memoryview(far)[:] = bytes(number % 251 for number in range(len(far)))
        assert far.remote.addr % 4096 == 0
        await a.connection.read(far.remote[start : start + nbytes], a.one)
        assert bytes(memoryview(a.one)[:nbytes]) == bytes(far[start : start + nbytes].view)
        lengths = [length for _, _, length in a.targets]
        one_piece = [nbytes] if nbytes else []
        assert lengths == (on_iwarp if simulation.near.is_iwarp else one_piece)
        far.close()


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
async def test_a_read_of_too_many_segments_is_split(simulation: Simulation, how: str) -> None:
    async with access_of(simulation) as a:
        if how == "failed":
            a.remote = a.wrong
        (task,) = await a.start_reads([a.one[:60], a.two])
        assert (a.uses, a.targets) == ((1, 1), [(READ, 0, 60)])
        if how == "cancelled":
            await loops.cancel(task)
            assert a.uses == (1, 0)  # the second request was not posted
        await a.near.complete()
        if how == "failed":
            with pytest.raises(aiordma.WorkRequestError, match="RDMA_READ failed: REM_ACCESS_ERR"):
                await task
        elif how == "completed":
            await task
        assert a.targets[1:] == ([(READ, 60, 40)] if how == "completed" else [])


@pytest.mark.transport("IB")
async def test_reads_and_atomics_share_the_credits(simulation: Simulation) -> None:
    async with access_of(simulation, credits=1) as a:
        tasks: list[Any] = await a.start_reads(a.one)
        for _ in range(2):
            tasks.append(await loops.start(a.connection.fetch_and_add(a.remote[:8], 1)))
        assert len(a.targets) == 1
        await loops.cancel(tasks.pop())  # it takes none
        assert a.near.pool_is_whole is False  # the other atomic has a buffer
        await a.near.complete()
        await loops.gather(*tasks)
        assert (len(a.targets), a.near.free) == (2, (16, 1))
        a.near.hold()
        await loops.cancel(await loops.start(a.connection.fetch_and_add(a.remote[8:], 1)))
        assert not a.near.pool_is_whole  # the device uses the buffer until the completion
        await a.connection.send(b"fenced")
        assert SendFlags.FENCE in a.near.flags[-1]
        await a.near.complete()
        assert bytes(memoryview(a.far)[:16]) == (1).to_bytes(8, sys.byteorder) * 2


@pytest.mark.loops("asyncio")  # it has a fast path
async def test_without_credits_reads_and_atomics_are_refused(simulation: Simulation) -> None:
    async with access_of(simulation, credits=0, held=False) as a:
        calls: list[Any] = [a.connection.read(a.remote, into) for into in (a.one, [a.one])]
        if not simulation.near.is_iwarp:
            calls.append(a.connection.fetch_and_add(a.remote, 1))
        for call in calls:
            with pytest.raises(ValueError, match="initiator_depth 0"):
                await call
        assert a.targets == []
        if simulation.near.is_iwarp:
            assert not a.near.data_path.may_read
            assert a.near.data_path.probe()
            assert [(post.opcode, post.num_sge) for post in a.near.posts] == [(WRITE, 0)]


async def test_the_end_wakes_the_tasks_that_wait_for_a_credit(simulation: Simulation) -> None:
    async with access_of(simulation, credits=1) as a:
        tasks = await a.start_reads(a.one, [a.two], [a.two], [a.two])
        assert a.uses == (1, 3)
        a.far_end.connection.abort()
        for task in tasks:
            with pytest.raises(aiordma.PeerClosed):
                await task
        assert (a.uses, len(a.targets)) == ((0, 0), 1)
        for into in (a.one, [a.one]):
            with pytest.raises(aiordma.PeerClosed):
                await a.connection.read(a.remote, into)
        for source in (a.one, [a.one], b"x", bytes(50)):
            with pytest.raises(aiordma.PeerClosed):
                await a.connection.write(source, a.remote)
        a.connection.abort()
        with pytest.raises(aiordma.LocalClosed):
            await a.connection.read(a.remote, a.one)


async def test_a_probe_is_a_read_or_a_write_of_no_bytes(simulation: Simulation) -> None:
    is_iwarp = simulation.near.is_iwarp
    async with access_of(simulation, credits=1) as a:
        data_path = a.near.data_path
        a.near.sends.pause()
        assert not data_path.probe()
        assert (a.targets, a.near.free) == ([], (0, 1))
        data_path.resume()
        for _ in range(2):  # on iWARP the only credit for reads is in use the second time
            assert data_path.probe()
        posts = a.near.posts
        assert [post.opcode for post in posts] == ([READ] if is_iwarp else [WRITE, WRITE])
        assert {(post.num_sge, post.remote) for post in posts} == {(int(is_iwarp), (0, 0))}
        await a.near.complete()
        assert a.near.free == (16, 1)
        assert data_path.reads_completed == is_iwarp
        a.near.refuse(errno.ENOMEM)
        assert not data_path.probe()
        assert a.connection.closed


@pytest.mark.parametrize("imm", [None, 0, 7])
async def test_writes_reach_the_remote_memory(simulation: Simulation, imm: int | None) -> None:
    imm = None if simulation.near.is_iwarp else imm
    async with access_of(simulation, held=False) as a:
        memoryview(a.one)[:] = b"r" * SIZE
        cases: list[tuple[Any, bytes]] = [
            (a.one, b"r" * SIZE),
            (a.one[:30], b"r" * 30),
            ([a.one[:10], b"copy", a.one[50:60]], b"r" * 10 + b"copy" + b"r" * 10),
            (bytearray(b"c" * 50), b"c" * 50),
            (b"d" * (MAX_INLINE + 1), b"d" * (MAX_INLINE + 1)),
            (b"i" * MAX_INLINE, b"i" * MAX_INLINE),
            ([b"a", bytearray(b"b")], b"ab"),
            (b"", b""),
        ]
        for source, data in cases:
            memoryview(a.far)[:] = bytes(SIZE)
            await a.connection.write(source, a.remote, imm=imm)
            assert bytes(memoryview(a.far)) == data.ljust(SIZE, b"\0")
            is_inline = len(data) <= MAX_INLINE
            assert bool(a.near.posts[-1].flags & SendFlags.INLINE) is is_inline
            if imm is not None:
                with await a.far_end.connection.recv_message() as message:
                    assert (len(message), message.imm) == (0, imm)
        stats = a.connection.stats
        assert (stats.writes, stats.bytes_written) == (8, sum(len(data) for _, data in cases))
        a.near.hold()
        memory = bytearray(b"c" * 50)
        task = await loops.start(a.connection.write([memory, a.one[:10]], a.remote))
        memory.append(0)  # it was copied, so it can be resized
        await a.near.complete()
        await task
        for nbytes in (9, 50):
            too_long: list[Any] = [bytes(nbytes), a.one[:nbytes], [a.one[: nbytes - 1], b"x"]]
            for source in too_long:
                with pytest.raises(ValueError, match=f"{nbytes} bytes do not fit into the remote"):
                    await a.connection.write(source, a.remote[: nbytes - 1])


@pytest.mark.transport("IB")  # on iWARP the write completes before the peer ends the connection
@pytest.mark.parametrize("kind", ["list", "region", "inline", "copied", "FETCH_ADD", "COMP_SWAP"])
async def test_a_failed_request_raises_the_cause(simulation: Simulation, kind: str) -> None:
    async with access_of(simulation, held=False) as a:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "list": lambda: a.connection.write([a.one], a.wrong),
            "region": lambda: a.connection.write(a.one, a.wrong),
            "inline": lambda: a.connection.write(b"x", a.wrong),
            "copied": lambda: a.connection.write(bytes(50), a.wrong),
            "FETCH_ADD": lambda: a.connection.fetch_and_add(a.wrong[:8], 1),
            "COMP_SWAP": lambda: a.connection.compare_and_swap(a.wrong[:8], 1, 1),
        }
        name = kind if kind.isupper() else "RDMA_WRITE"
        for _ in range(2):
            with pytest.raises(aiordma.WorkRequestError, match=f"{name} failed: REM_ACCESS_ERR"):
                await calls[kind]()


@pytest.mark.transport("IB")
async def test_atomics_take_numbers_of_64_bits(simulation: Simulation) -> None:
    async with access_of(simulation, held=False) as a:
        largest, target = (1 << 64) - 1, a.remote[8:16]
        for before in (0, largest, 0x0102030405060708):
            memoryview(a.far)[8:16] = before.to_bytes(8, sys.byteorder)
            assert await a.connection.fetch_and_add(target, -1) == before
            assert (
                await a.connection.compare_and_swap(target, (before - 1) & largest, 7)
                == (before - 1) & largest
            )
            assert bytes(memoryview(a.far)[8:16]) == (7).to_bytes(8, sys.byteorder)
        assert (a.connection.stats.atomics, a.connection.stats.reads) == (6, 0)
        for part, operands, why in (
            (a.remote[:7], (0, 0), "8 bytes do not fit into the remote buffer of 7"),
            (a.remote[4:12], (0, 0), "an address that is a multiple of 8"),
            (target, (-1, 0), "-1 is not a number of 64 bits"),
            (target, (0, 1 << 64), "is not a number of 64 bits"),
        ):
            with pytest.raises(ValueError, match=why):
                await a.connection.compare_and_swap(part, *operands)
        assert a.near.free == (16, 4)


@pytest.mark.transport("IB")
async def test_a_bind_that_fails_leaves_no_window(simulation: Simulation) -> None:
    async with access_of(simulation) as a, await a.connection.allocate(SIZE, WINDOW) as region:
        with pytest.raises(ValueError, match="an empty slice"):
            await a.connection.bind(region[:0])
        simulation.world.calls.fail("ibv_alloc_mw", errno.ENOMEM)
        with pytest.raises(aiordma.VerbsError, match="ibv_alloc_mw"):
            await a.connection.bind(region)
        assert region.references.count == 0
        task = loops.create_task(a.connection.bind(region))
        await loops.sleep(0.01)
        await loops.cancel(task)
        assert region.references.count == 1
        await a.near.complete()
        await loops.sleep(0.01)
        assert region.references.count == 0
        a.near.refuse(errno.ENOMEM)
        with pytest.raises(aiordma.VerbsError, match="ibv_post_send"):
            await a.connection.bind(region)
        await a.connection.aclose()
        assert region.references.count == 0
