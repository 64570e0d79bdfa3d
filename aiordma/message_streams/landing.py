"""Landing: an announced message that is read into registered memory. LandingPool: such memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiordma.loop import Loop, WaitQueue
from aiordma.loop.task_groups import run_in_background
from aiordma.memory import MemoryRegion, MemorySlice
from aiordma.message_streams.frames import parts_for
from aiordma.message_streams.protocol import AnnouncedMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiordma.loop.protocol import LoopTimer
    from aiordma.messages.connection import Connection

    Read = Callable[[AnnouncedMessage, Sequence[MemorySlice]], Awaitable[None]]
    """Reads a message into a part for each frame, and tells the peer."""

MIN_CLASS = 1 << 12
IDLE_SECONDS = 10.0


class Landing:
    """An announced message that is read into memory of a pool.

    A background task can read it, so that it is read before a task asks for it.
    """

    def __init__(
        self, loop: Loop, pool: LandingPool, message: AnnouncedMessage, read: Read
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._message = message
        self._read = read
        self._changed = WaitQueue(loop)
        self._is_over = self._is_dropped = False
        self._error: BaseException | None = None
        self._region: MemoryRegion | None = None
        self.parts: list[MemorySlice] = []
        """The memory of the frames."""

    def start(self) -> None:
        """Have a background task read it: see wait()."""
        run_in_background(self._loop, self.read())

    async def read(self) -> None:
        """Read it. Cancelling stops the waiting, and the memory is not given back.

        wait() raises the error if this fails.
        """
        region = None
        try:
            region = await self._pool.take(max(self._message.nbytes, 1))
            self.parts = parts_for([region[:]], self._message.sizes)
            await self._read(self._message, self.parts)
        except BaseException as error:
            if region is not None:
                region.close()  # not given back: the device can still write to it
            self._error = error
            if not isinstance(error, Exception):
                raise
        else:
            self._region = region
            if self._is_dropped:
                self.release()
        finally:
            self._is_over = True
            self._changed.wake_all()

    async def wait(self) -> None:
        """Wait until it is read. Cancelling stops only the waiting.

        Raises: as Connection.allocate() and Connection.read().
        """
        while not self._is_over:
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    @property
    def has_failed(self) -> bool:
        """True if it could not be read: it must be read again."""
        return self._error is not None

    def tobytes(self) -> bytes:
        """Return a copy of the message."""
        assert self._region is not None
        return bytes(memoryview(self._region)[: self._message.nbytes])

    def release(self) -> None:
        """Give the memory back: the message is not used any more."""
        self._is_dropped = True
        if self._region is not None:
            self._pool.give_back(self._region)
            self._region = None


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
        self._timer: LoopTimer | None = None
        self._is_used = False  # since the timer was started
        self.nbytes = 0
        """The number of bytes that stay registered for later messages."""

    async def take(self, nbytes: int) -> MemoryRegion:
        """Return a region of at least `nbytes` bytes. Cancelling takes none.

        Raises: as Connection.allocate().
        """
        self._is_used = True
        size = max(MIN_CLASS, 1 << (nbytes - 1).bit_length())
        for index in reversed(range(len(self._free))):
            if len(self._free[index]) == size:
                self.nbytes -= size
                return self._free.pop(index)
        return await self._connection.allocate(size, self._connection.read_access)

    def give_back(self, region: MemoryRegion) -> None:
        """Take a region back. The device does not use it any more."""
        self._free.append(region)
        self.nbytes += len(region)
        while self.nbytes > self._max_nbytes:
            self._close_oldest()
        if self._free and self._timer is None:
            self._start_timer()

    def _close_oldest(self) -> None:
        region = self._free.pop(0)
        self.nbytes -= len(region)
        region.close()

    def _start_timer(self) -> None:
        self._is_used = False
        self._timer = self._loop.call_later(IDLE_SECONDS, self._expire)

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
