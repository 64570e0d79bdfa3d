"""Queues, memory and endpoint callbacks for tests of the data path without a device.

The loop, the send queue and the code above it are real. Only the verbs are replaced.
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
    """A protection domain without methods: only its identity is compared."""


HERE: Any = FakeDomain()
ELSEWHERE: Any = FakeDomain()


def no_polling() -> BusyPoll:
    """Return a BusyPoll of zero seconds."""
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
    """Return a fake `struct ibv_wc`."""
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
    """Memory with the attributes of an AllocatedRegion that is not registered."""

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
    """A receive queue. fill() fills the posted slots in the order in which they were posted."""

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
        """Put a message into the slot that was posted first. Return the slot."""
        slot = self.posted.popleft()
        start = slot * SLOT_SIZE
        self.pages.memory[start : start + len(message)] = message
        return slot


# --- sending ---


class FakeQueuePair:
    """A send queue of `depth` requests. The test completes them in their order."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.cells = (0, 0)
        self.posted: deque[int] = deque()
        self.sent: list[tuple[bytes, int]] = []
        self.requests: list[tuple[object, ...]] = []
        """The arguments of each posted request that is not a message."""
        self.flags: dict[int, int] = {}
        """The send flags of each posted request, by its number."""
        self.refuses = False
        self.error = VerbsError(errno.EINVAL, "ibv_post_send")

    def _post(self, wr_id: int, flags: int) -> None:
        if self.refuses:
            raise copy.copy(self.error)
        assert len(self.posted) < self.depth, "the send queue is full"
        assert wr_id >> 32 == SEND_WR_ID >> 32, "the number has overwritten the key"
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


class CountedMemory:
    """Memory of a request. It counts the calls of its methods."""

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
        self.free: deque[PooledBuffer] = deque()
        self.made = 0
        self.requested: list[tuple[int, object]] = []
        for _ in range(free):
            self.add()

    def add(self) -> None:
        self.made += 1
        self.free.append(PooledBuffer(self.free, 0x1000, 99, memoryview(bytearray(BUFFER_SIZE))))

    def try_acquire(self, nbytes: int) -> PooledBuffer | None:
        return self.free.pop() if self.free else None

    async def acquire(
        self, nbytes: int, call: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> PooledBuffer:
        self.requested.append((nbytes, call))
        await call(self.add)
        return self.free.pop()

    @property
    def is_whole(self) -> bool:
        """True if every buffer is in the pool exactly once."""
        return len(self.free) == self.made == len({id(buffer) for buffer in self.free})


async def call_at_once(function: Callable[[], None]) -> None:
    """Call the function, without a worker thread."""
    function()


class SendRig:
    """A SendQueue on a FakeQueuePair and a FakePool. It must be made on a running loop."""

    def __init__(self, free_buffers: int = 0, *, depth: int = 4, selective: bool = True) -> None:
        self.qp, self.pool = FakeQueuePair(depth), FakePool(free_buffers)
        self.queue = SendQueue(running_loop(), depth, selective=selective)
        self.queue.open(self.qp, self.pool, SEND_WR_ID)  # type: ignore[arg-type]

    def number_from(self, number: int) -> None:
        """Give the first request this number."""
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
        """Complete the `count` oldest requests. Only the last of them is reported."""
        for _ in range(count):
            number = self.qp.posted.popleft()
        self.queue.completed(number)

    def complete_oldest_signaled(self) -> bool:
        """Report the oldest signaled request, as a device does. Return False if there is none."""
        if not any(map(self.qp.is_signalled, self.qp.posted)):
            return False
        while not self.qp.is_signalled(number := self.qp.posted.popleft()):
            pass
        self.queue.completed(number)
        return True

    def send_refused(self) -> None:
        """Try to send a message that the device refuses."""
        assert self.queue.try_reserve()
        self.qp.refuses = True
        with pytest.raises(VerbsError):
            self.queue.post_inline(b"x")
        self.qp.refuses = False
        self.queue.unreserve()

    @property
    def signaled(self) -> list[bool]:
        """True for each posted request that was signaled, in the order of posting."""
        return [self.qp.is_signalled(number) for number in self.qp.flags]


# --- memory ---


class FakeRegistration:
    """The result of ibv_reg_mr(3). Its address is the buffer's number times 65536."""

    def __init__(self, nbytes: int, number: int = 1, pd: object = HERE) -> None:
        self.address, self.lkey, self.rkey = number << 16, 10 + number, 20 + number
        self.length = nbytes
        self.pd = pd


def _dispose(registration: object, on_disposed: Callable[[], None]) -> None:
    on_disposed()


class FakeRegion(MemoryRegion):
    """A region of zeros. `uses` is the number of requests that use it."""

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


# --- the endpoint ---


class FakeCallbacks:
    """EndpointCallbacks of a connection that is open until fail() or `closed_here`."""

    def __init__(self) -> None:
        self.closed_here = False
        self.is_drained = False
        self.released = False
        self.end: RdmaError | None = None
        self.failures: list[RdmaError] = []
        self.failed: list[WcOpcode] = []
        self.messages_arrived = 0
        self.requests_completed = 0
        self.reason_known = asyncio.Event()
        """Tests clear it to make wait_ended() wait."""
        self.reason_known.set()
        self.device_failures: list[VerbsError] = []

    def check_open(self) -> None:
        if self.closed_here or self.end is not None:
            raise self.end_reason()

    def end_reason(self) -> RdmaError:
        if self.closed_here or self.end is None:
            return LocalClosed("closed here")
        return copy.copy(self.end)

    async def wait_ended(self) -> None:
        await self.reason_known.wait()

    def post_failed(self, error: VerbsError) -> RdmaError:
        self.fail(error)
        return self.end_reason()

    def fail(self, cause: RdmaError) -> None:
        self.failures.append(cause)
        if self.end is None:
            self.end = cause

    def request_failed(self, opcode: WcOpcode, wc: object) -> None:
        self.failed.append(opcode)

    def message_arrived(self) -> None:
        self.messages_arrived += 1

    def request_completed(self) -> None:
        self.requests_completed += 1

    def queue_pair_event(self, event: AsyncEvent) -> None:
        raise AssertionError("an event came; none was expected")

    def device_failed(self, error: VerbsError) -> None:
        self.device_failures.append(error)
