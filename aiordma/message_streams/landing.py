"""Landing: an announced message that is read into registered memory. LandingPool: such memory."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from aiordma.enums import WrOpcode
from aiordma.errors import RdmaError, VerbsError
from aiordma.loop import Deadline, Loop, WaitQueue
from aiordma.loop.task_groups import run_in_background
from aiordma.memory import MemoryRegion, MemorySlice
from aiordma.message_streams.frames import parts_for
from aiordma.message_streams.protocol import AnnouncedMessage
from aiordma.message_streams.rendezvous import read_frames
from aiordma.message_streams.wire import Result

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from aiordma._native._fast_path import Transfer
    from aiordma.message_streams.exchange import Exchange
    from aiordma.messages.connection import Connection

READ = int(WrOpcode.RDMA_READ)  # the C functions take no enumeration members
MIN_CLASS = 1 << 12
IDLE_SECONDS = 10.0
READ_DIRECTLY = 1 << 20
"""The size of the largest message that is read without a background task, which takes less time.
If the task that waits for it is cancelled, the message is read again."""


async def complete_reading(
    exchange: Exchange, message: AnnouncedMessage, reading: Awaitable[None]
) -> None:
    """Wait until `reading` has read an announced message, and tell the peer.

    Raises: as Connection.read(). The stream has ended then.
    """
    try:
        await reading
    except RdmaError as error:
        exchange.lost(error)
        raise
    exchange.finish_reading(message.number, Result.READ)


class Landing:
    """An announced message that is read into memory of a pool.

    It can be read before a task asks for it: see try_post() and start(). If neither was called,
    wait() reads it.
    """

    def __init__(self, exchange: Exchange, pool: LandingPool, message: AnnouncedMessage) -> None:
        self._exchange = exchange
        self._pool = pool
        self._message = message
        self.nbytes = message.nbytes
        """The size of the message in bytes."""
        self._ended: WaitQueue | None = None  # for the end of the background task, if there is one
        self._transfer: Transfer | None = None  # posted by try_post(), until a task has waited
        self._is_started = self._is_over = False
        self._error: BaseException | None = None
        self._region: MemoryRegion | None = None
        self.parts: list[MemorySlice] = []
        """The memory of the frames."""

    def try_post(self) -> bool:
        """Post the read now. Return False if that is not possible.

        The peer is told that the message is read when a task waits for it.
        """
        message = self._message
        if len(message.frames) != 1 or not 0 < message.nbytes <= READ_DIRECTLY:
            return False
        region = self._pool.take_kept(message.nbytes)
        if region is None:
            return False
        part = MemorySlice(region, 0, message.nbytes)
        transfer = self._exchange.data_path.start_transfer(READ, part, message.frames[0])
        if transfer is None:
            self._pool.give_back(region)
            return False
        self._transfer, self._region, self.parts = transfer, region, [part]
        self._is_started = True
        return True

    def start(self) -> None:
        """Have a background task read it."""
        loop = self._exchange.loop
        self._is_started = True
        self._ended = WaitQueue(loop)
        run_in_background(loop, self._finish(self._read()))

    async def wait(self) -> None:
        """Wait until it is read. If this is cancelled, see `has_failed`.

        Raises: as Connection.allocate() and Connection.read().
        """
        exchange = self._exchange
        if self._transfer is not None:
            if self._transfer.succeeded:
                self._end(None)
                exchange.finish_reading(self._message.number, Result.READ)
                return
            reading = exchange.data_path.finish(self._transfer)
            await self._finish(complete_reading(exchange, self._message, reading))
        elif not self._is_started:
            self._is_started = True
            await self._finish(self._read())
        elif self._ended is not None:  # a background task reads it, or has read it
            while not self._is_over:
                await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def _read(self) -> None:
        exchange, message = self._exchange, self._message
        self._region = await self._pool.take(max(message.nbytes, 1))
        self.parts = parts_for([self._region[:]], message.sizes)
        reading = read_frames(exchange.connection, exchange.loop, message.frames, self.parts)
        await complete_reading(exchange, message, reading)

    async def _finish(self, reading: Awaitable[None]) -> None:
        """Wait for the end of `reading`. wait() raises the error if it fails."""
        try:
            await reading
        except BaseException as error:
            self._end(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._transfer = None
        self._is_over = True
        self._error = error
        if error is not None and self._region is not None:
            self._region.close()  # not given back: the device can still write to it
            self._region = None
        if self._ended is not None:
            self._ended.wake_all()

    @property
    def has_failed(self) -> bool:
        """True if it could not be read: it must be read again."""
        return self._error is not None

    def tobytes(self) -> bytes:
        """Return a copy of the message."""
        assert self._region is not None
        return bytes(memoryview(self._region)[: self._message.nbytes])

    def release(self) -> None:
        """Give the memory back: the message is not used any more.

        Memory that the device can still write to is closed instead.
        """
        region, self._region = self._region, None
        if region is None:
            return
        if self._is_over:
            self._pool.give_back(region)
        else:
            region.close()


def class_of(nbytes: int) -> int:
    """Return the size of the regions for messages of `nbytes` bytes."""
    return max(MIN_CLASS, 1 << (nbytes - 1).bit_length())


class LandingPool:
    """Registered memory for messages that are read without a target of the caller.

    Regions have sizes of powers of two. Those that are given back stay registered, the latest ones
    up to `max_nbytes` bytes in all, until none was taken for `IDLE_SECONDS`.
    """

    def __init__(self, connection: Connection, loop: Loop, max_nbytes: int) -> None:
        self._connection = connection
        self._loop = loop
        self._max_nbytes = max_nbytes
        self._free: list[MemoryRegion] = []  # those given back last are at the end
        self._timer: Deadline | None = None
        self._is_used = False  # since the timer was started
        self.nbytes = 0
        """The number of bytes that stay registered for later messages."""

    async def take(self, nbytes: int) -> MemoryRegion:
        """Return a region of at least `nbytes` bytes. Cancelling takes none.

        Raises:
            VerbsError: ENOMEM, also without the regions that are kept.
            Others: as Connection.allocate().
        """
        region = self.take_kept(nbytes)
        if region is not None:
            return region
        try:
            return await self._allocate(nbytes)
        except VerbsError:
            kept = list(self._free)
            if not kept:
                raise
        self._close_free()
        for region in kept:
            await region.aclose()
        return await self._allocate(nbytes)

    async def _allocate(self, nbytes: int) -> MemoryRegion:
        connection = self._connection
        try:
            return await connection.allocate(class_of(nbytes), connection.read_access)
        except MemoryError as error:
            raise VerbsError(errno.ENOMEM, "mmap") from error

    def take_kept(self, nbytes: int) -> MemoryRegion | None:
        """Return a region that was given back, of at least `nbytes` bytes, or None.

        The user can still have a slice of a frame in a region. That region is not used then.
        """
        self._is_used = True
        size = class_of(nbytes)
        free = self._free
        for index in range(len(free) - 1, -1, -1):
            if free[index].length == size and not free[index].has_views:
                self.nbytes -= size
                return free.pop(index)
        return None

    def give_back(self, region: MemoryRegion) -> None:
        """Take a region back. The device does not use it any more."""
        self._free.append(region)
        self.nbytes += region.length
        while self.nbytes > self._max_nbytes:
            self._close_oldest()
        if self._free and self._timer is None:
            self._start_timer()

    def _close_oldest(self) -> None:
        region = self._free.pop(0)
        self.nbytes -= region.length
        region.close()

    def _start_timer(self) -> None:
        self._is_used = False
        self._timer = Deadline(self._loop, IDLE_SECONDS, self._expire)

    def _expire(self) -> None:
        if self._is_used:
            self._start_timer()
        else:
            self._timer = None
            self._close_free()

    def _close_free(self) -> None:
        while self._free:
            self._close_oldest()

    def close(self) -> None:
        """Close the regions that were given back, and keep none from now on."""
        self._max_nbytes = 0
        self._close_free()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
