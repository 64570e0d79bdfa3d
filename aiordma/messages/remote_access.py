"""RemoteAccess: the one-sided operations, which read and write the peer's memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aiordma.enums import AccessFlags, WcOpcode, WrOpcode
from aiordma.loop import FairSemaphore, checkpoint
from aiordma.memory import PooledBuffer, RemoteBuffer
from aiordma.qp.operation import WC_OPCODE_OF, Operations
from aiordma.qp.post_list import MemoryRequest
from aiordma.qp.probe import probe_by_read
from aiordma.qp.scatter_gather import (
    ScatterGatherBuilder,
    ScatterGatherList,
    check_fits,
    crosses_page,
    is_region,
    is_registered,
    join_buffers,
)
from aiordma.qp.send_queue import Post
from aiordma.verbs import Device, QueuePair
from aiordma.verbs.queue_pair import NO_IMMEDIATE

if TYPE_CHECKING:
    from aiordma._native._fast_path import SendQueueCore
    from aiordma.loop import Loop
    from aiordma.qp.scatter_gather import Sink, Source

ATOMIC_SIZE = 8

_FILLED_BY_DEVICE = AccessFlags.LOCAL_WRITE
_FILLED_BY_PEER = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


def read_access(device: Device) -> AccessFlags:
    """Return the access that memory needs for a read to fill it."""
    return _FILLED_BY_PEER if device.is_iwarp else _FILLED_BY_DEVICE


class _RdAtomicCredits(FairSemaphore):
    """Credits for reads and atomics. The SendQueueCore stores the number, and takes some itself."""

    __slots__ = ("_core",)

    def __init__(self, loop: Loop, core: SendQueueCore) -> None:
        super().__init__(loop, 0)
        self._core = core
        core.call_on_rd_atomic_credit(self.grant)

    def try_acquire(self) -> bool:
        """Take a credit if one is free."""
        return self._core.try_acquire_rd_atomic()

    async def acquire(self) -> None:
        """Wait for a credit and take it. Cancelling takes none."""
        self._core.add_rd_atomic_waiter()
        try:
            await super().acquire()
        finally:
            self._core.remove_rd_atomic_waiter()

    def release(self, count: int = 1) -> None:
        """Return `count` credits, to tasks that wait here or to reads queued in the core."""
        self._core.release_rd_atomic(count)


class RemoteAccess:
    """Posts one-sided operations and waits for their completions, one each.

    Reads and atomics take a credit each. If more were posted than the connection allows, the device
    would delay all requests behind them, also sends.
    """

    def __init__(
        self,
        device: Device,
        operations: Operations,
        builder: ScatterGatherBuilder,
        max_inline: int,
        initiator_depth: int,
    ) -> None:
        self._device = device
        self._sends = operations.sends
        self._callbacks = operations.callbacks
        self._operations = operations
        self._builder = builder
        self._max_inline = max_inline
        self._rd_atomic_credits = _RdAtomicCredits(operations.loop, self._sends.core)
        self._read_access = read_access(device)
        self.initiator_depth = initiator_depth
        """The number of reads and atomics that can be in flight."""

    async def read(self, remote: RemoteBuffer, into: Sink) -> None:
        """Read the peer's memory, if the core has not started that: see Connection.read()."""
        self._check_reads()
        needed = self._read_access
        self._callbacks.check_open()
        iwarp_addr = remote.addr if self._device.is_iwarp else None
        must_split = iwarp_addr is not None and crosses_page(iwarp_addr, remote.length)
        if is_region(into) and remote.length and not must_split:
            await self._read(self._builder.sink(into, remote.length, needed), remote)
            return
        max_segments = self._device.attributes.max_sge_rd
        requests = self._builder.sinks(into, len(remote), needed, max_segments, iwarp_addr)
        if not requests:  # `remote` is empty
            await checkpoint()
        try:
            while requests:
                sgl = requests.popleft()
                await self._read(sgl, remote[: sgl.nbytes])
                remote = remote[sgl.nbytes :]
        finally:
            for sgl in requests:
                sgl.release()

    async def _read(self, sgl: ScatterGatherList, remote: RemoteBuffer) -> None:
        def count() -> None:
            stats = self._sends.stats
            stats.reads += 1
            stats.bytes_read += remote.length

        target = (remote.addr, remote.rkey)
        request = MemoryRequest(WrOpcode.RDMA_READ, sgl.segments, target, count)
        await self._perform_with_credit(WcOpcode.RDMA_READ, request, sgl.release)

    def probe(self) -> bool:
        """Post a read of no bytes, unless reads that are in flight have taken all credits.

        Return True if a read is in flight now. Return False if the send queue is full.
        """
        if self._sends.credits <= 0:
            return False
        if not self._rd_atomic_credits.try_acquire():
            return True
        return probe_by_read(self._sends, self._rd_atomic_credits.release)

    def _check_reads(self) -> None:
        if not self.initiator_depth:
            raise ValueError("the connection was made without reads and atomics: initiator_depth 0")

    async def write(self, source: Source, remote: RemoteBuffer, imm: int = NO_IMMEDIATE) -> None:
        """Write to the peer's memory, if the core has not started that: see Connection.write()."""
        self._callbacks.check_open()
        max_bytes, where = remote.length, "the remote buffer"
        if is_region(source):
            sgl = self._builder.single(source, max_bytes, where)
        else:
            if not is_registered(source):
                source = join_buffers(source)
                if len(source) <= self._max_inline:
                    await self._write_inline(source, remote, imm)
                    return
            sgl = await self._builder.sources(source, max_bytes, where)
            del source  # a buffer that was copied can be resized from now on
        opcode = WrOpcode.RDMA_WRITE if imm == NO_IMMEDIATE else WrOpcode.RDMA_WRITE_WITH_IMM
        target = (remote.addr, remote.rkey)
        count = partial(self._count_write, sgl.nbytes)
        request = MemoryRequest(opcode, sgl.segments, target, count, imm)
        await self._operations.perform(WcOpcode.RDMA_WRITE, request, sgl.release)

    async def _write_inline(self, data: memoryview, remote: RemoteBuffer, imm: int) -> None:
        check_fits(len(data), len(remote), "the remote buffer")
        target = (remote.addr, remote.rkey)

        def post(qp: QueuePair, wr_id: int, flags: int) -> None:
            qp.post_write_inline(wr_id, data, target, imm, flags)
            self._count_write(len(data))

        await self._operations.perform(WcOpcode.RDMA_WRITE, post, _release_nothing)

    def _count_write(self, nbytes: int) -> None:
        stats = self._sends.stats
        stats.writes += 1
        stats.bytes_written += nbytes

    async def atomic(
        self, opcode: WrOpcode, remote: RemoteBuffer, operands: tuple[int, int]
    ) -> int:
        """Do an atomic operation: see Connection.fetch_and_add() and compare_and_swap()."""
        self._check_atomic(remote, operands)
        sends = self._sends
        buffer = sends.try_buffer(ATOMIC_SIZE) or await sends.buffer(
            ATOMIC_SIZE, self._builder.call_in_worker
        )
        local, target = (buffer.address, buffer.lkey), (remote.addr, remote.rkey)
        result = 0

        def post(qp: QueuePair, wr_id: int, flags: int) -> None:
            qp.post_atomic(wr_id, opcode, local, target, operands, flags)
            sends.stats.atomics += 1

        def take_result() -> None:
            nonlocal result
            result = _read_int(buffer)
            buffer.release()

        await self._perform_with_credit(WC_OPCODE_OF[opcode], post, take_result)
        return result

    def _check_atomic(self, remote: RemoteBuffer, operands: tuple[int, int]) -> None:
        if not self._device.attributes.has_atomics:
            raise ValueError(f"{self._device.name} has no atomic operations")
        self._check_reads()
        check_fits(ATOMIC_SIZE, len(remote), "the remote buffer")
        if remote.addr % ATOMIC_SIZE:
            raise ValueError(f"atomics need an address that is a multiple of {ATOMIC_SIZE}")
        for operand in operands:
            if not 0 <= operand < 1 << 64:
                raise ValueError(f"{operand} is not a number of 64 bits")

    async def _perform_with_credit(
        self, opcode: WcOpcode, post: Post, release_memory: Callable[[], None]
    ) -> None:
        credits = self._rd_atomic_credits
        try:
            if not credits.try_acquire():
                self._sends.stats.send_waits += 1
                await credits.acquire()
        except BaseException:
            release_memory()
            raise

        def release_all() -> None:
            release_memory()
            credits.release()

        await self._operations.perform(opcode, post, release_all)


def _read_int(buffer: PooledBuffer) -> int:
    return int.from_bytes(buffer.view[:ATOMIC_SIZE], sys.byteorder)


def _release_nothing() -> None:
    """Do nothing: an inline request uses no memory after it is posted."""
