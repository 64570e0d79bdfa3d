"""RemoteAccess: one-sided operations, by which the peer's memory is read and written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aiordma.enums import AccessFlags, WcOpcode, WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import Slots, checkpoint
from aiordma.memory import PooledBuffer, RemoteBuffer
from aiordma.qp.operation import COMPLETION_OF, Operation, Operations
from aiordma.qp.post_list import ListRequest
from aiordma.qp.scatter_gather import Gathered, Gatherer, check_fits, is_one, is_registered, joined
from aiordma.qp.send_queue import NUMBER_MASK, Post
from aiordma.verbs import Device, QueuePair
from aiordma.verbs.queue_pair import NO_IMMEDIATE

if TYPE_CHECKING:
    from aiordma._native._fast_path import SendLane
    from aiordma.loop import Loop
    from aiordma.qp.scatter_gather import Sink, Source

ATOMIC_SIZE = 8


class _Turns(Slots):
    """The reads and atomics that may be under way, some of which a SendLane starts on its own."""

    __slots__ = ("_lane",)

    def __init__(self, loop: Loop, lane: SendLane) -> None:
        self._lane = lane
        super().__init__(loop, 0)
        lane.on_turn = partial(super().release, 0)

    @property
    def free(self) -> int:
        """Turns that nobody has."""
        return self._lane.turns

    @free.setter
    def free(self, value: int) -> None:
        self._lane.turns = value

    async def acquire(self) -> None:
        """As Slots does."""
        self._lane.turn_waiters += 1
        try:
            await super().acquire()
        finally:
            self._lane.turn_waiters -= 1

    def release(self, count: int = 1) -> None:
        """Give back `count` turns, to whom waits here or in the lane."""
        self._lane.turns += count
        self._lane.hand_out_turns()


class RemoteAccess:
    """Posts one-sided operations and waits for their ends, one completion each.

    Reads and atomics take turns: the device would make everything behind one too many wait, sends
    as well.
    """

    def __init__(
        self, device: Device, operations: Operations, gatherer: Gatherer, max_inline: int
    ) -> None:
        self._device = device
        self._sends = operations.sends
        self._owner = operations.owner
        self._operations = operations
        self._gatherer = gatherer
        self._max_inline = max_inline
        self._turns = _Turns(operations.loop, self._sends.lane)
        self._needed_to_read = AccessFlags.LOCAL_WRITE
        if device.is_iwarp:
            self._needed_to_read |= AccessFlags.REMOTE_WRITE
        self.initiator_depth = 0
        """Reads and atomics that may be under way from here; 0 until it is negotiated."""

    def negotiated(self, initiator_depth: int) -> None:
        """So many reads and atomics may be under way."""
        self.initiator_depth = initiator_depth
        if initiator_depth:
            self._sends.lane.read_access = self._needed_to_read
            self._turns.release(initiator_depth)

    def ended(self) -> None:
        """Nothing will be posted any more: let those go who wait for their turn."""
        self._turns.release(NUMBER_MASK)

    async def read(self, remote: RemoteBuffer, into: Sink) -> None:
        """See Connection.read."""
        self._check_reads()
        needed = self._needed_to_read
        self._owner.check_open()
        if is_one(into) and remote.length:
            await self._read(self._gatherer.sink(into, remote.length, needed), remote)
            return
        at_once = self._device.attributes.max_sge_rd
        requests = self._gatherer.sinks(into, len(remote), needed, at_once)
        if not requests:  # nothing is to be read
            await checkpoint()
        try:
            while requests:
                gathered = requests.popleft()
                await self._read(gathered, remote[: gathered.nbytes])
                remote = remote[gathered.nbytes :]
        finally:
            for gathered in requests:
                gathered.release()

    async def _read(self, gathered: Gathered, remote: RemoteBuffer) -> None:
        def count() -> None:
            stats = self._sends.stats
            stats.reads += 1
            stats.bytes_read += remote.length

        target = (remote.addr, remote.rkey)
        request = ListRequest(WrOpcode.RDMA_READ, gathered.segments, target, count)
        await self._in_turn(WcOpcode.RDMA_READ, request, gathered.release)

    def knock(self) -> None:
        """Read no bytes, if anything may be read: see SendQueue.knock."""
        if self._turns.try_acquire():
            give_back = self._turns.release
            knocking = Operation(self._operations.make_future(), WcOpcode.RDMA_READ, give_back)
            try:
                if not self._sends.knock(knocking):
                    give_back()
            except VerbsError as error:
                self._owner.not_posted(error)

    def _check_reads(self) -> None:
        if not self.initiator_depth:
            raise ValueError("the connection was made without reads and atomics: initiator_depth 0")

    async def write(self, source: Source, remote: RemoteBuffer, imm: int) -> None:
        """See Connection.write."""
        self._owner.check_open()
        room, where = remote.length, "the remote buffer"
        if is_one(source):
            gathered = self._gatherer.one(source, room, where)
        else:
            if not is_registered(source):
                source = joined(source)
                if len(source) <= self._max_inline:
                    await self._write_inline(source, remote, imm)
                    return
            gathered = await self._gatherer.sources(source, room, where)
            del source  # what was copied may be resized
        opcode = WrOpcode.RDMA_WRITE if imm == NO_IMMEDIATE else WrOpcode.RDMA_WRITE_WITH_IMM
        target = (remote.addr, remote.rkey)
        count = partial(self._count_write, gathered.nbytes)
        request = ListRequest(opcode, gathered.segments, target, count, imm)
        await self._operations.perform(WcOpcode.RDMA_WRITE, request, gathered.release)

    async def _write_inline(self, data: memoryview, remote: RemoteBuffer, imm: int) -> None:
        check_fits(len(data), len(remote), "the remote buffer")
        target = (remote.addr, remote.rkey)

        def post(qp: QueuePair, wr_id: int, flags: int) -> None:
            qp.post_write_inline(wr_id, data, target, imm, flags)
            self._count_write(len(data))

        await self._operations.perform(WcOpcode.RDMA_WRITE, post, _nothing)

    def _count_write(self, nbytes: int) -> None:
        stats = self._sends.stats
        stats.writes += 1
        stats.bytes_written += nbytes

    async def atomic(
        self, opcode: WrOpcode, remote: RemoteBuffer, operands: tuple[int, int]
    ) -> int:
        """See Connection.fetch_and_add and compare_and_swap."""
        self._check_atomic(remote, operands)
        sends = self._sends
        buffer = sends.try_buffer(ATOMIC_SIZE) or await sends.buffer(
            ATOMIC_SIZE, self._gatherer.call
        )
        local, target = (buffer.address, buffer.lkey), (remote.addr, remote.rkey)
        result = 0

        def post(qp: QueuePair, wr_id: int, flags: int) -> None:
            qp.post_atomic(wr_id, opcode, local, target, operands, flags)
            sends.stats.atomics += 1

        def take() -> None:
            nonlocal result
            result = _read_int(buffer)
            buffer.release()

        await self._in_turn(COMPLETION_OF[opcode], post, take)
        return result

    def _check_atomic(self, remote: RemoteBuffer, operands: tuple[int, int]) -> None:
        if not self._device.attributes.has_atomics:
            raise ValueError(f"{self._device.name} has no atomic operations")
        self._check_reads()
        check_fits(ATOMIC_SIZE, len(remote), "the remote buffer")
        if remote.addr % ATOMIC_SIZE:
            raise ValueError(f"atomics need an address that {ATOMIC_SIZE} divides")
        for operand in operands:
            if not 0 <= operand < 1 << 64:
                raise ValueError(f"{operand} is not a number of 64 bits")

    async def _in_turn(self, opcode: WcOpcode, post: Post, give_back: Callable[[], None]) -> None:
        turns = self._turns
        try:
            if not turns.try_acquire():
                self._sends.stats.send_waits += 1
                await turns.acquire()
        except BaseException:
            give_back()
            raise

        def end() -> None:
            give_back()
            turns.release()

        await self._operations.perform(opcode, post, end)


def _read_int(buffer: PooledBuffer) -> int:
    return int.from_bytes(buffer.view[:ATOMIC_SIZE], sys.byteorder)


def _nothing() -> None:
    """For a request that nothing is lent for."""
