"""RemoteAccess: one-sided operations, by which the peer's memory is read and written."""

from __future__ import annotations

import copy
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiordma.datapath.operation import Operation
from aiordma.datapath.send_queue import SendQueue
from aiordma.enums import AccessFlags, WrOpcode
from aiordma.errors import RdmaError, VerbsError
from aiordma.loop import Loop
from aiordma.memory import MemoryRegion, MemorySlice, PooledBuffer, RemoteBuffer
from aiordma.verbs import Device, QueuePair
from aiordma.verbs.queue_pair import NO_IMMEDIATE

ATOMIC_SIZE = 8

Post = Callable[[QueuePair, int], None]
Call = Callable[[Callable[[], None]], Awaitable[None]]
"""Awaits a function in a worker thread."""


class Owner(Protocol):
    """The connection, as far as its one-sided operations need it."""

    initiator_depth: int

    def check_open(self) -> None:
        """Raise why nothing can be sent any more, if that is so."""

    def end_reason(self) -> RdmaError:
        """Why it ended."""

    def not_posted(self, error: VerbsError) -> RdmaError:
        """What a refused request means."""


class RemoteAccess:
    """Posts one-sided operations and waits for their ends, one completion each."""

    def __init__(self, loop: Loop, device: Device, sends: SendQueue, owner: Owner) -> None:
        self._loop = loop
        self._device = device
        self._sends = sends
        self._owner = owner

    async def read(self, remote: RemoteBuffer, into: MemorySlice) -> None:
        """See Connection.read."""
        self._check_reads()
        _check_fits(len(remote), len(into), "the memory to read into")
        self._check_sink(into.region)
        local = (into.addr, len(remote), into.lkey)
        await self._on_region(
            into.region,
            lambda qp, wr_id: qp.post_rdma(
                wr_id, WrOpcode.RDMA_READ, local, (remote.addr, remote.rkey)
            ),
        )

    def _check_reads(self) -> None:
        if not self._owner.initiator_depth:
            raise ValueError("the connection was made without reads and atomics: initiator_depth 0")

    def _check_sink(self, region: MemoryRegion) -> None:
        needed = AccessFlags.LOCAL_WRITE
        if self._device.is_iwarp:
            needed |= AccessFlags.REMOTE_WRITE
        if needed & ~region.access:
            raise ValueError(f"the memory to read into must be registered with {needed!r}")

    async def write(self, source: MemorySlice, remote: RemoteBuffer, imm: int) -> None:
        """See Connection.write."""
        _check_fits(len(source), len(remote), "the remote buffer")
        post = self._write((source.addr, len(source), source.lkey), remote, imm)
        await self._on_region(source.region, post)

    async def write_copy(
        self, data: bytes | memoryview, nbytes: int, remote: RemoteBuffer, imm: int, call: Call
    ) -> None:
        """write() of a copy, which may be longer than a message."""
        _check_fits(nbytes, len(remote), "the remote buffer")
        self._owner.check_open()
        buffer = self._sends.try_buffer(nbytes) or await self._sends.buffer(nbytes, call)
        buffer.view[:nbytes] = memoryview(data).cast("B")
        await self._post(
            self._write((buffer.address, nbytes, buffer.lkey), remote, imm), buffer.release
        )

    @staticmethod
    def _write(local: tuple[int, int, int], remote: RemoteBuffer, imm: int) -> Post:
        with_imm = imm != NO_IMMEDIATE
        opcode = WrOpcode.RDMA_WRITE_WITH_IMM if with_imm else WrOpcode.RDMA_WRITE
        return lambda qp, wr_id: qp.post_rdma(wr_id, opcode, local, (remote.addr, remote.rkey), imm)

    async def atomic(
        self, opcode: WrOpcode, remote: RemoteBuffer, operands: tuple[int, int], call: Call
    ) -> int:
        """See Connection.fetch_and_add and compare_and_swap."""
        self._check_atomic(remote, operands)
        buffer = self._sends.try_buffer(ATOMIC_SIZE) or await self._sends.buffer(ATOMIC_SIZE, call)
        result = 0

        def take() -> None:
            nonlocal result
            result = _read_int(buffer)
            buffer.release()

        await self._post(
            lambda qp, wr_id: qp.post_atomic(
                wr_id,
                opcode,
                (buffer.address, buffer.lkey),
                (remote.addr, remote.rkey),
                operands,
            ),
            take,
        )
        return result

    def _check_atomic(self, remote: RemoteBuffer, operands: tuple[int, int]) -> None:
        if not self._device.attributes.has_atomics:
            raise ValueError(f"{self._device.name} has no atomic operations")
        self._check_reads()
        _check_fits(ATOMIC_SIZE, len(remote), "the remote buffer")
        if remote.addr % ATOMIC_SIZE:
            raise ValueError(f"atomics need an address that {ATOMIC_SIZE} divides")
        for operand in operands:
            if not 0 <= operand < 1 << 64:
                raise ValueError(f"{operand} is not a number of 64 bits")

    # --- posting ---

    async def _on_region(self, region: MemoryRegion, post: Post) -> None:
        region.take()
        await self._post(post, region.give_back)

    async def _post(self, post: Post, give_back: Callable[[], None]) -> None:
        """Post, and wait for the end. `give_back` is called when the device is done, always."""
        operation = Operation(self._loop, give_back)
        try:
            self._owner.check_open()
            if not self._sends.try_reserve():
                await self._sends.reserve()
        except BaseException:
            operation.release()
            raise
        try:
            self._owner.check_open()
            self._sends.post(post, operation)
        except VerbsError as error:
            # libsiw keeps a request that it reports as failed.
            self._sends.unreserve()
            self._sends.keep(operation)
            raise self._owner.not_posted(error) from None
        except BaseException:
            self._sends.unreserve()
            operation.release()
            raise
        await operation.wait()
        if not operation.succeeded:
            raise copy.copy(operation.error) if operation.error else self._owner.end_reason()


def _check_fits(nbytes: int, room: int, where: str) -> None:
    if nbytes > room:
        raise ValueError(f"{nbytes} bytes do not fit into {where} of {room}")


def _read_int(buffer: PooledBuffer) -> int:
    return int.from_bytes(buffer.view[:ATOMIC_SIZE], sys.byteorder)
