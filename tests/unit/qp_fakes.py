"""Queues, memory and an owner for tests of the data path without a device.

The loop, the send queue and all that stands on it are real; only the verbs are not there.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import LocalClosed, RdmaError, VerbsError
from aiordma.dispatch import BusyPoll
from aiordma.enums import AccessFlags, WcFlags, WcOpcode, WcStatus, WrOpcode
from aiordma.loop import running_loop
from aiordma.memory import MemoryRegion, PooledBuffer
from aiordma.qp import SendQueue
from aiordma.verbs import AsyncEvent
from aiordma.verbs.queue_pair import SIGNALED, Segment

SEND_WR_ID = 5 << 32
RECV_WR_ID = (5 << 32) | (1 << 31)
SLOTS, SLOT_SIZE = 4, 64
BUFFER_SIZE = 1024


class FakeDomain:
    """A protection domain, of which nothing is asked but which one it is."""


HERE: Any = FakeDomain()
ELSEWHERE: Any = FakeDomain()


def no_polling() -> BusyPoll:
    """A BusyPoll of zero seconds."""
    return BusyPoll(None, 0.0)  # type: ignore[arg-type]


def completion(
    length: int = 0,
    *,
    opcode: WcOpcode = WcOpcode.RECV,
    imm: int | None = None,
    invalidated: int | None = None,
    status: WcStatus = WcStatus.SUCCESS,
    qp_num: int = 17,
) -> Any:
    """A `struct ibv_wc`."""
    flags, number = WcFlags(0), 0xDEAD
    if imm is not None:
        flags, number = flags | WcFlags.WITH_IMM, socket.htonl(imm)
    if invalidated is not None:
        flags, number = flags | WcFlags.WITH_INV, invalidated
    return SimpleNamespace(
        opcode=opcode,
        byte_len=length,
        wc_flags=int(flags),
        imm_data=number,
        status=status,
        qp_num=qp_num,
        vendor_err=0,
    )


# --- receiving ---


class FakePages:
    """Memory of its own that looks registered, as AllocatedRegion."""

    def __init__(self, pd: object, nbytes: int, access: AccessFlags) -> None:
        self.memory = bytearray(nbytes)
        self.view = memoryview(self.memory)
        self.address = 0x7F00_0000_0000
        self.lkey = 99
        self.access = access
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeReceivePoster:
    """Fills the slots that are posted in the order in which they were, when told to."""

    def __init__(self, pages: FakePages, first_wr_id: int = RECV_WR_ID) -> None:
        self.pages = pages
        self.first_wr_id = first_wr_id
        self.posted: deque[int] = deque()
        self.cells = (0, 0)
        self.refuses = False
        self.on_post: Callable[[], None] = lambda: None

    def post_recv(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        self.on_post()
        if self.refuses:
            raise VerbsError(errno.ENOMEM, "ibv_post_recv")
        slot = wr_id - self.first_wr_id
        assert slot not in self.posted, f"slot {slot} is posted twice"
        assert 0 <= slot < len(self.pages.memory) // SLOT_SIZE
        assert address == self.pages.address + slot * SLOT_SIZE
        assert (length, lkey) == (SLOT_SIZE, self.pages.lkey)
        self.posted.append(slot)

    def fill(self, message: bytes) -> int:
        """Put a message into the next slot."""
        slot = self.posted.popleft()
        start = slot * SLOT_SIZE
        self.pages.memory[start : start + len(message)] = message
        return slot


# --- sending ---


class FakeQueuePair:
    """A send queue of so many requests that complete in order, when told to."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.cells = (0, 0)
        self.posted: deque[int] = deque()
        self.sent: list[tuple[bytes, int]] = []
        self.requests: list[tuple[object, ...]] = []
        """What was asked for with each request that is no message."""
        self.flags: dict[int, int] = {}
        """Of each request that was posted, by its number."""
        self.refuses = False
        self.error = VerbsError(errno.EINVAL, "ibv_post_send")

    def _post(self, wr_id: int, flags: int) -> None:
        if self.refuses:
            raise copy.copy(self.error)
        assert len(self.posted) < self.depth, "one too many"
        assert wr_id >> 32 == SEND_WR_ID >> 32, "the number ran into the key"
        number = wr_id - SEND_WR_ID
        self.posted.append(number)
        self.flags[number] = flags

    def _send(self, wr_id: int, data: bytes, imm: int, flags: int) -> None:
        self._post(wr_id, flags)
        self.sent.append((bytes(data), imm))

    def post_send_inline(self, wr_id: int, data: bytes, imm: int, flags: int) -> None:
        self._send(wr_id, data, imm, flags)

    def post_send_copy(
        self, wr_id: int, address: int, data: bytes, lkey: int, imm: int, flags: int
    ) -> None:
        assert (address, lkey) == (0x1000, 99)
        self._send(wr_id, data, imm, flags)

    def post_list(
        self,
        wr_id: int,
        opcode: WrOpcode,
        segments: list[Segment],
        remote: tuple[int, int] = (0, 0),
        *,
        flags: int,
        imm: int = -1,
    ) -> None:
        self._post(wr_id, flags)
        self.requests.append((opcode, list(segments), remote, imm))

    def post_write_inline(
        self, wr_id: int, data: bytes, remote: tuple[int, int], imm: int, flags: int
    ) -> None:
        self._post(wr_id, flags)
        self.requests.append((WrOpcode.RDMA_WRITE, bytes(data), remote, imm))

    def post_atomic(
        self,
        wr_id: int,
        opcode: WrOpcode,
        local: tuple[int, int],
        remote: tuple[int, int],
        operands: tuple[int, int],
        flags: int,
    ) -> None:
        self._post(wr_id, flags)
        self.requests.append((opcode, local, remote, operands))

    def is_signalled(self, number: int) -> bool:
        return bool(self.flags[number] & SIGNALED)


class Counted:
    """Something to lend, that counts what happens to it."""

    def __init__(self) -> None:
        self.releases = 0
        self.stops = 0

    def release(self) -> None:
        self.releases += 1

    def stop_waiting(self) -> None:
        self.stops += 1


class FakePool:
    """Buffers of BUFFER_SIZE bytes."""

    def __init__(self, free: int = 0) -> None:
        self.home: deque[PooledBuffer] = deque()
        self.made = 0
        self.asked: list[tuple[int, object]] = []
        for _ in range(free):
            self.add()

    def add(self) -> None:
        self.made += 1
        self.home.append(PooledBuffer(self.home, 0x1000, 99, memoryview(bytearray(BUFFER_SIZE))))

    def try_acquire(self, nbytes: int) -> PooledBuffer | None:
        return self.home.pop() if self.home else None

    async def acquire(
        self, nbytes: int, call: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> PooledBuffer:
        self.asked.append((nbytes, call))
        await call(self.add)
        return self.home.pop()

    @property
    def is_whole(self) -> bool:
        """Whether every buffer is here, once."""
        return len(self.home) == self.made == len({id(buffer) for buffer in self.home})


async def call_at_once(function: Callable[[], None]) -> None:
    """What awaits a function in a worker thread, without one."""
    function()


class SendRig:
    """A SendQueue on fakes; must be made on a running loop."""

    def __init__(self, free_buffers: int = 0, *, depth: int = 4, selective: bool = True) -> None:
        self.qp, self.pool = FakeQueuePair(depth), FakePool(free_buffers)
        self.queue = SendQueue(running_loop(), depth, selective=selective)
        self.queue.open(self.qp, self.pool, SEND_WR_ID)  # type: ignore[arg-type]

    def begin_at(self, number: int) -> None:
        """Have the first request bear this number."""
        self.queue.core.next_number = self.queue.core.oldest_pending = number

    def send(self, data: bytes = b"x") -> None:
        assert self.queue.try_reserve()
        self.queue.post_inline(data)

    def send_copy(self, data: bytes = b"x" * 100) -> None:
        assert self.queue.try_reserve()
        buffer = self.queue.try_buffer(len(data))
        assert buffer is not None
        self.queue.post_copy(buffer, data)

    def complete(self, count: int = 1) -> None:
        """Report the last of the `count` oldest requests only, which stands for all of them."""
        for _ in range(count):
            number = self.qp.posted.popleft()
        self.queue.completed(number)

    def report(self) -> bool:
        """Report the oldest signalled request, as a device does; whether there was one."""
        if not any(map(self.qp.is_signalled, self.qp.posted)):
            return False
        while not self.qp.is_signalled(number := self.qp.posted.popleft()):
            pass
        self.queue.completed(number)
        return True

    def refused(self) -> None:
        """Try to send one that the device does not take."""
        assert self.queue.try_reserve()
        self.qp.refuses = True
        with pytest.raises(VerbsError):
            self.queue.post_inline(b"x")
        self.qp.refuses = False
        self.queue.unreserve()

    @property
    def signaled(self) -> list[bool]:
        """Of each request that was posted, in order, whether it was signalled."""
        return [self.qp.is_signalled(number) for number in self.qp.flags]


# --- memory ---


class FakeRegistration:
    """What ibv_reg_mr(3) gives, at an address that is the buffer's number times 65536."""

    def __init__(self, nbytes: int, number: int = 1, pd: object = HERE) -> None:
        self.address, self.lkey, self.rkey = number << 16, 10 + number, 20 + number
        self.length = nbytes
        self.pd = pd


def _dispose(registration: object, over: Callable[[], None]) -> None:
    over()


class FakeRegion(MemoryRegion):
    """A region of zeros whose uses are told."""

    def __init__(
        self,
        nbytes: int = 100,
        number: int = 1,
        pd: object = HERE,
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
    ) -> None:
        registration: Any = FakeRegistration(nbytes, number, pd)
        self.memory = bytearray(nbytes)
        super().__init__(registration, self.memory, access, _dispose)

    @property
    def uses(self) -> int:
        return self.references.count


# --- whose it is ---


class FakeCallbacks:
    """A connection that is open, until it is told otherwise."""

    def __init__(self) -> None:
        self.closed_here = False
        self.is_drained = False
        self.released = False
        self.end: RdmaError | None = None
        self.breaks: list[RdmaError] = []
        self.failed: list[WcOpcode] = []
        self.arrivals = 0
        self.requests_ended = 0
        self.knows_why = asyncio.Event()
        """Cleared as long as ended() is to wait."""
        self.knows_why.set()
        self.device_failures: list[VerbsError] = []

    def check_open(self) -> None:
        if self.closed_here or self.end is not None:
            raise self.end_reason()

    def end_reason(self) -> RdmaError:
        if self.closed_here or self.end is None:
            return LocalClosed("closed here")
        return copy.copy(self.end)

    async def wait_ended(self) -> None:
        await self.knows_why.wait()

    def post_failed(self, error: VerbsError) -> RdmaError:
        self.fail(error)
        return self.end_reason()

    def fail(self, cause: RdmaError) -> None:
        self.breaks.append(cause)
        if self.end is None:
            self.end = cause

    def request_failed(self, opcode: WcOpcode, wc: object) -> None:
        self.failed.append(opcode)

    def message_arrived(self) -> None:
        self.arrivals += 1

    def request_completed(self) -> None:
        self.requests_ended += 1

    def queue_pair_event(self, event: AsyncEvent) -> None:
        raise AssertionError("no event was to come")

    def device_failed(self, error: VerbsError) -> None:
        self.device_failures.append(error)
