"""RemoteAccess: reads, writes and atomics, their credits, and the checks of their arguments."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import pytest
from fakes.qp import (
    ELSEWHERE,
    HERE,
    FakeCallbacks,
    FakeRegion,
    SendRig,
    call_at_once,
    no_polling,
)

from aiordma import AccessFlags, LocalClosed, PeerClosed, RemoteBuffer, VerbsError, WorkRequestError
from aiordma.enums import SendFlags, WcOpcode, WcStatus, WrOpcode
from aiordma.loop import running_loop
from aiordma.messages.remote_access import RemoteAccess
from aiordma.qp import Operation
from aiordma.qp.operation import Operations
from aiordma.qp.scatter_gather import ScatterGatherBuilder
from aiordma.verbs import DeviceAttributes
from aiordma.verbs.queue_pair import NO_IMMEDIATE

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

REMOTE = RemoteBuffer(0xABC000, 77, 100)
WORD = RemoteBuffer(0xABC000, 77, 8)
ADD, SWAP = WrOpcode.ATOMIC_FETCH_AND_ADD, WrOpcode.ATOMIC_CMP_AND_SWP
MAX_INLINE = 16


class FakeDevice:
    name = "fake0"

    def __init__(self, is_iwarp: bool, **limits: Any) -> None:
        self.is_iwarp = is_iwarp
        self.attributes = DeviceAttributes(100, 30, 1000, 1 << 30, 16, 16, **limits)


class Rig(SendRig):
    """A RemoteAccess whose requests complete when a test calls end()."""

    def __init__(
        self, credits: int = 4, *, depth: int = 16, is_iwarp: bool = False, **limits: Any
    ) -> None:
        super().__init__(free_buffers=1, depth=depth)
        loop = running_loop()
        self.callbacks = FakeCallbacks()
        operations = Operations(loop, self.queue, self.callbacks, no_polling())
        builder = ScatterGatherBuilder(self.queue, 4, call_at_once)
        builder.pd = HERE
        device: Any = FakeDevice(is_iwarp, **({"max_sge_rd": 30} | limits))
        self.remote = RemoteAccess(device, operations, builder, MAX_INLINE)
        self.remote.negotiated(credits)

    def end(self, status: WcStatus = WcStatus.SUCCESS) -> None:
        """Complete the oldest request, as MessageDataPath does with a completion of the device."""
        completed = self.queue.completed(self.qp.posted.popleft())
        if isinstance(completed, Operation):
            completed.succeeded = status is WcStatus.SUCCESS
            if status is not WcStatus.SUCCESS:
                self.callbacks.fail(WorkRequestError(status, completed.opcode))

    async def complete_all(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Complete all requests of a call with success, and return its result."""
        task = asyncio.create_task(call)
        await settle()
        while self.qp.posted:
            self.end()
            await settle()
        return await task

    @property
    def free_credits(self) -> int:
        return self.remote._rd_atomic_credits.free


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def start(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(call)
    await settle()
    return task


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- reading ---


async def test_a_read_is_one_request_for_all_of_the_remote_buffer() -> None:
    rig, region = Rig(), FakeRegion(200)
    task = await start(rig.remote.read(REMOTE, region[50:]))
    assert rig.qp.requests == [
        (WrOpcode.RDMA_READ, [(0x10000 + 50, 100, 11)], (0xABC000, 77), NO_IMMEDIATE)
    ]
    assert (region.uses, rig.free_credits) == (1, 3)
    rig.end()
    await task
    assert (region.uses, rig.free_credits) == (0, 4)
    assert (rig.queue.stats.reads, rig.queue.stats.bytes_read) == (1, 100)


async def test_a_read_of_too_many_segments_is_split_into_consecutive_requests() -> None:
    rig, first, second = Rig(max_sge_rd=1), FakeRegion(60, 1), FakeRegion(60, 2)
    await rig.complete_all(rig.remote.read(REMOTE, [first, second]))
    assert rig.qp.requests == [
        (WrOpcode.RDMA_READ, [(0x10000, 60, 11)], (0xABC000, 77), NO_IMMEDIATE),
        (WrOpcode.RDMA_READ, [(0x20000, 40, 12)], (0xABC000 + 60, 77), NO_IMMEDIATE),
    ]
    assert (first.uses, second.uses, rig.free_credits) == (0, 0, 4)
    assert (rig.queue.stats.reads, rig.queue.stats.bytes_read) == (2, 100)


async def test_a_failed_split_read_releases_the_memory_of_the_other_requests() -> None:
    rig, first, second = Rig(max_sge_rd=1), FakeRegion(60, 1), FakeRegion(60, 2)
    task = await start(rig.remote.read(REMOTE, [first, second]))
    assert (first.uses, second.uses) == (1, 1)
    rig.end(WcStatus.REM_ACCESS_ERR)
    with pytest.raises(WorkRequestError, match="RDMA_READ failed: REM_ACCESS_ERR"):
        await task
    assert (first.uses, second.uses, rig.free_credits) == (0, 0, 4)
    assert len(rig.qp.requests) == 1


async def test_a_cancelled_split_read_releases_the_memory_that_is_not_posted() -> None:
    rig, first, second = Rig(max_sge_rd=1), FakeRegion(60, 1), FakeRegion(60, 2)
    task = await start(rig.remote.read(REMOTE, [first, second]))
    await cancel(task)
    assert (first.uses, second.uses, rig.free_credits) == (1, 0, 3)
    rig.end()
    assert (first.uses, second.uses, rig.free_credits) == (0, 0, 4)


async def test_a_read_of_no_bytes_posts_no_request() -> None:
    rig, region = Rig(), FakeRegion()
    await rig.remote.read(REMOTE[:0], region)
    assert rig.qp.requests == []
    assert (region.uses, rig.free_credits) == (0, 4)


async def test_a_read_on_iwarp_needs_memory_with_remote_write_access() -> None:
    rig, region = Rig(is_iwarp=True), FakeRegion()
    with pytest.raises(ValueError, match="REMOTE_WRITE"):
        await rig.remote.read(REMOTE, region)
    both = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
    await rig.complete_all(rig.remote.read(REMOTE, FakeRegion(access=both)))


@pytest.mark.parametrize("is_iwarp", [False, True])
async def test_a_read_needs_memory_with_local_write_access(is_iwarp: bool) -> None:
    rig = Rig(is_iwarp=is_iwarp)
    with pytest.raises(ValueError, match="LOCAL_WRITE"):
        await rig.remote.read(REMOTE, FakeRegion(access=AccessFlags.REMOTE_WRITE))
    assert rig.free_credits == 4


async def test_a_read_into_memory_of_another_protection_domain_is_refused() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="registered on another device"):
        await rig.remote.read(REMOTE, FakeRegion(pd=ELSEWHERE))
    assert rig.free_credits == 4


async def test_messages_after_a_cancelled_read_are_fenced_until_it_completes() -> None:
    rig, region = Rig(), FakeRegion()
    await cancel(await start(rig.remote.read(REMOTE, region)))
    rig.send()
    assert rig.qp.flags[1] & SendFlags.FENCE
    assert region.uses == 1
    rig.end()
    rig.send()
    assert not rig.qp.flags[2] & SendFlags.FENCE
    assert region.uses == 0


# --- credits for reads and atomics ---


@pytest.mark.parametrize("credits", [1, 3])
async def test_reads_beyond_the_credits_wait_in_order(credits: int) -> None:
    rig, region = Rig(credits), FakeRegion()
    tasks = [await start(rig.remote.read(REMOTE[:size], region)) for size in range(1, 7)]
    assert len(rig.qp.posted) == credits
    assert rig.queue.stats.send_waits == 6 - credits
    for number in range(6):
        rig.end()
        await settle()
        assert tasks[number].done()
        assert len(rig.qp.posted) == min(credits, 5 - number)
    sizes = [request[1][0][1] for request in rig.qp.requests]  # type: ignore[index]
    assert sizes == [1, 2, 3, 4, 5, 6]
    await asyncio.gather(*tasks)


async def test_reads_and_atomics_share_the_credits() -> None:
    rig, region = Rig(1), FakeRegion()
    first = await start(rig.remote.read(REMOTE, region))
    second = await start(rig.remote.atomic(ADD, WORD, (1, 0)))
    assert len(rig.qp.requests) == 1
    rig.end()
    await first
    await settle()
    assert len(rig.qp.requests) == 2
    rig.end()
    await second


async def test_writes_take_no_credit() -> None:
    rig, region = Rig(1), FakeRegion()
    first = await start(rig.remote.read(REMOTE, region))
    second = await start(rig.remote.write(region, REMOTE, NO_IMMEDIATE))
    assert len(rig.qp.posted) == 2
    rig.end()
    rig.end()
    await asyncio.gather(first, second)


async def test_the_credit_of_a_cancelled_read_is_free_after_its_completion() -> None:
    rig, region = Rig(1), FakeRegion()
    await cancel(await start(rig.remote.read(REMOTE, region)))
    task = await start(rig.remote.read(REMOTE, region))
    assert len(rig.qp.posted) == 1
    rig.end()
    await settle()
    assert len(rig.qp.posted) == 1
    rig.end()
    await task
    assert rig.free_credits == 1


async def test_cancelling_a_wait_for_a_credit_takes_none() -> None:
    rig, region, other = Rig(1), FakeRegion(100, 1), FakeRegion(100, 2)
    first = await start(rig.remote.read(REMOTE, region))
    await cancel(await start(rig.remote.read(REMOTE, other)))
    assert other.uses == 0
    word = await start(rig.remote.atomic(ADD, WORD, (1, 0)))
    await cancel(word)
    assert rig.pool.is_whole
    rig.end()
    await first
    assert rig.free_credits == 1
    assert len(rig.qp.requests) == 1


async def test_a_refused_read_keeps_its_memory_until_the_queue_pair_is_destroyed() -> None:
    rig, region = Rig(1), FakeRegion()
    rig.qp.refuses = True
    with pytest.raises(VerbsError, match="ibv_post_send"):
        await rig.remote.read(REMOTE, region)
    assert region.uses == 1
    assert rig.queue.stats.reads == 0
    rig.queue.abandon()
    assert region.uses == 0


@pytest.mark.parametrize("opcode", [None, ADD, SWAP])
async def test_without_credits_reads_and_atomics_are_refused(opcode: WrOpcode | None) -> None:
    rig, region = Rig(0), FakeRegion()
    call = (
        rig.remote.read(REMOTE, region)
        if opcode is None
        else rig.remote.atomic(opcode, WORD, (0, 0))
    )
    with pytest.raises(ValueError, match="initiator_depth 0"):
        await call
    assert (region.uses, rig.pool.is_whole) == (0, True)
    assert rig.qp.requests == []


async def test_without_credits_writes_are_posted() -> None:
    rig, region = Rig(0), FakeRegion()
    await rig.complete_all(rig.remote.write(region, REMOTE, NO_IMMEDIATE))
    assert len(rig.qp.requests) == 1


async def test_probe_posts_a_read_of_no_bytes_with_a_credit() -> None:
    rig = Rig(1)
    rig.remote.probe()
    assert rig.qp.requests == [(WrOpcode.RDMA_READ, [], (0, 0), NO_IMMEDIATE)]
    assert rig.free_credits == 0
    rig.remote.probe()  # one is under way
    assert len(rig.qp.requests) == 1
    rig.end()
    assert rig.free_credits == 1


async def test_probe_without_a_credit_posts_nothing() -> None:
    rig = Rig(0)
    rig.remote.probe()
    assert rig.qp.requests == []
    rig = Rig(1)
    rig.queue.pause()
    rig.remote.probe()
    assert (rig.qp.requests, rig.free_credits) == ([], 1)


async def test_a_refused_probe_ends_the_connection() -> None:
    rig = Rig(1)
    rig.qp.refuses = True
    rig.remote.probe()
    assert isinstance(rig.callbacks.end, VerbsError)
    assert (rig.queue.credits, rig.free_credits) == (16, 0)
    rig.queue.abandon()
    assert rig.free_credits == 1


async def test_stop_wakes_the_tasks_that_wait_for_a_credit() -> None:
    rig, regions = Rig(1), [FakeRegion(100, number) for number in range(1, 6)]
    tasks = [await start(rig.remote.read(REMOTE, region)) for region in regions]
    assert [region.uses for region in regions] == [1] * 5
    rig.callbacks.fail(PeerClosed("closed there"))
    rig.remote.stop()
    for task in tasks[1:]:
        with pytest.raises(PeerClosed):
            await task
    assert [region.uses for region in regions] == [1, 0, 0, 0, 0]
    with pytest.raises(PeerClosed):
        await rig.remote.read(REMOTE, regions[1])
    rig.end(WcStatus.WR_FLUSH_ERR)
    with pytest.raises(PeerClosed):
        await tasks[0]
    assert [region.uses for region in regions] == [0] * 5
    assert len(rig.qp.requests) == 1


async def test_initiator_depth_is_the_negotiated_one() -> None:
    assert Rig(7).remote.initiator_depth == 7


# --- writing ---


@pytest.mark.parametrize(
    ("imm", "opcode"),
    [
        (NO_IMMEDIATE, WrOpcode.RDMA_WRITE),
        (0, WrOpcode.RDMA_WRITE_WITH_IMM),
        (7, WrOpcode.RDMA_WRITE_WITH_IMM),
    ],
)
async def test_registered_memory_is_written_in_place(imm: int, opcode: WrOpcode) -> None:
    rig, region = Rig(), FakeRegion(50)
    task = await start(rig.remote.write(region, REMOTE, imm))
    assert rig.qp.requests == [(opcode, [(0x10000, 50, 11)], (0xABC000, 77), imm)]
    assert region.uses == 1
    rig.end()
    await task
    assert region.uses == 0
    assert (rig.queue.stats.writes, rig.queue.stats.bytes_written) == (1, 50)


async def test_memory_that_is_not_registered_is_copied() -> None:
    rig = Rig()
    [buffer] = rig.pool.free
    task = await start(rig.remote.write(bytearray(range(50)), REMOTE, NO_IMMEDIATE))
    assert rig.qp.requests == [
        (WrOpcode.RDMA_WRITE, [(0x1000, 50, 99)], (0xABC000, 77), NO_IMMEDIATE)
    ]
    assert bytes(buffer.view[:50]) == bytes(range(50))
    assert len(rig.pool.free) == 0
    rig.end()
    await task
    assert rig.pool.is_whole
    assert rig.queue.stats.bytes_written == 50


async def test_small_writes_are_inline() -> None:
    rig = Rig()
    await rig.complete_all(rig.remote.write(bytes(MAX_INLINE), REMOTE, NO_IMMEDIATE))
    await rig.complete_all(rig.remote.write([b"a", b"b"], REMOTE, 7))
    await rig.complete_all(rig.remote.write(b"", REMOTE, NO_IMMEDIATE))
    assert rig.qp.requests == [
        (WrOpcode.RDMA_WRITE, bytes(MAX_INLINE), (0xABC000, 77), NO_IMMEDIATE),
        (WrOpcode.RDMA_WRITE, b"ab", (0xABC000, 77), 7),
        (WrOpcode.RDMA_WRITE, b"", (0xABC000, 77), NO_IMMEDIATE),
    ]
    assert rig.pool.is_whole
    assert (rig.queue.stats.writes, rig.queue.stats.bytes_written) == (3, MAX_INLINE + 2)
    await rig.complete_all(rig.remote.write(bytes(MAX_INLINE + 1), REMOTE, NO_IMMEDIATE))
    assert rig.qp.requests[-1][1] == [(0x1000, MAX_INLINE + 1, 99)]


@pytest.mark.parametrize("nbytes", [9, 50])
async def test_a_write_that_does_not_fit_is_refused(nbytes: int) -> None:
    rig, region = Rig(), FakeRegion()
    sources: list[Any] = [bytes(nbytes), region[:nbytes], [region[: nbytes - 1], b"x"]]
    for source in sources:
        with pytest.raises(ValueError, match=f"{nbytes} bytes do not fit into the remote buffer"):
            await rig.remote.write(source, REMOTE[: nbytes - 1], NO_IMMEDIATE)
    assert (region.uses, rig.pool.is_whole) == (0, True)
    assert rig.qp.requests == []


async def test_the_memory_of_a_cancelled_write_is_acquired_until_its_completion() -> None:
    rig, region = Rig(), FakeRegion()
    await cancel(await start(rig.remote.write(region, REMOTE, NO_IMMEDIATE)))
    assert region.uses == 1
    rig.end()
    assert region.uses == 0


async def test_a_failed_write_raises_the_reason_of_the_end() -> None:
    rig, region = Rig(), FakeRegion()
    for source in (region, b"x"):
        task = await start(rig.remote.write(source, REMOTE, NO_IMMEDIATE))
        rig.end(WcStatus.REM_ACCESS_ERR)
        with pytest.raises(WorkRequestError, match="RDMA_WRITE failed: REM_ACCESS_ERR"):
            await task
        rig.callbacks.end = None
    assert region.uses == 0


# --- atomics ---


def write_result(buffer: Any, number: int) -> None:
    """Write the number before to the buffer, as the device does: in this machine's byte order."""
    buffer.view[:8] = number.to_bytes(8, sys.byteorder)


@pytest.mark.parametrize("opcode", [ADD, SWAP])
@pytest.mark.parametrize("before", [0, 1, (1 << 64) - 1, 0x0102030405060708])
async def test_an_atomic_returns_the_number_before(opcode: WrOpcode, before: int) -> None:
    rig = Rig()
    [buffer] = rig.pool.free
    task = await start(rig.remote.atomic(opcode, WORD, (5, (1 << 64) - 1)))
    assert rig.qp.requests == [(opcode, (0x1000, 99), (0xABC000, 77), (5, (1 << 64) - 1))]
    assert rig.free_credits == 3
    write_result(buffer, before)
    rig.end()
    assert await task == before
    assert (rig.pool.is_whole, rig.free_credits) == (True, 4)
    assert (rig.queue.stats.atomics, rig.queue.stats.reads) == (1, 0)


@pytest.mark.parametrize(
    ("opcode", "named"), [(ADD, WcOpcode.FETCH_ADD), (SWAP, WcOpcode.COMP_SWAP)]
)
async def test_a_failed_atomic_names_its_operation(opcode: WrOpcode, named: WcOpcode) -> None:
    rig = Rig()
    task = await start(rig.remote.atomic(opcode, WORD, (0, 0)))
    rig.end(WcStatus.REM_ACCESS_ERR)
    with pytest.raises(WorkRequestError, match=f"{named.name} failed"):
        await task
    assert (rig.pool.is_whole, rig.free_credits) == (True, 4)


async def test_the_buffer_of_a_cancelled_atomic_is_acquired_until_its_completion() -> None:
    rig = Rig()
    await cancel(await start(rig.remote.atomic(ADD, WORD, (1, 0))))
    assert len(rig.pool.free) == 0
    rig.end()
    assert rig.pool.is_whole


async def test_an_atomic_waits_for_a_buffer() -> None:
    rig = Rig()
    rig.pool.try_acquire(8)
    await rig.complete_all(rig.remote.atomic(ADD, WORD, (1, 0)))
    assert rig.pool.requested == [(8, call_at_once)]


async def test_an_atomic_on_a_device_without_atomics_is_refused() -> None:
    rig = Rig(has_atomics=False)
    with pytest.raises(ValueError, match="fake0 has no atomic operations"):
        await rig.remote.atomic(ADD, WORD, (1, 0))


@pytest.mark.parametrize("opcode", [ADD, SWAP])
@pytest.mark.parametrize(
    ("remote", "operands", "why"),
    [
        (WORD[:7], (0, 0), "8 bytes do not fit into the remote buffer of 7"),
        (REMOTE[4:12], (0, 0), "an address that is a multiple of 8"),
        (REMOTE[1:], (0, 0), "an address that is a multiple of 8"),
        (WORD, (-1, 0), "-1 is not a number of 64 bits"),
        (WORD, (0, 1 << 64), "is not a number of 64 bits"),
        (WORD, (1 << 64, 0), "is not a number of 64 bits"),
        (WORD, (0, -1), "is not a number of 64 bits"),
    ],
)
async def test_an_atomic_with_a_wrong_address_or_operand_is_refused(
    opcode: WrOpcode, remote: RemoteBuffer, operands: tuple[int, int], why: str
) -> None:
    rig = Rig()
    with pytest.raises(ValueError, match=why):
        await rig.remote.atomic(opcode, remote, operands)
    assert (rig.pool.is_whole, rig.free_credits) == (True, 4)
    assert rig.qp.requests == []


async def test_an_atomic_at_any_multiple_of_8_is_allowed() -> None:
    rig = Rig()
    await rig.complete_all(rig.remote.atomic(ADD, REMOTE[8:], ((1 << 64) - 1, 0)))
    assert rig.qp.requests[0][2] == (0xABC008, 77)


# --- the end ---


async def test_on_an_ended_connection_nothing_is_acquired() -> None:
    rig, region = Rig(), FakeRegion()
    rig.callbacks.closed_here = True
    for call in (
        rig.remote.read(REMOTE, region),
        rig.remote.write(region, REMOTE, NO_IMMEDIATE),
        rig.remote.write(b"x", REMOTE, NO_IMMEDIATE),
        rig.remote.write(bytes(50), REMOTE, NO_IMMEDIATE),
        rig.remote.atomic(ADD, WORD, (1, 0)),
    ):
        with pytest.raises(LocalClosed):
            await call
    assert (region.uses, rig.pool.is_whole, rig.free_credits) == (0, True, 4)
    assert rig.qp.requests == []
