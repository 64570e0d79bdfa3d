"""ReceivedMessage: a message in the memory in which it arrived. LandingPool: such memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.loop import Loop
from aiordma.loop.context_managers import ContextManagerMixin
from aiordma.memory import MemoryRegion
from aiordma.message_streams.protocol import EagerMessage

if TYPE_CHECKING:
    from aiordma.loop.protocol import LoopTimer
    from aiordma.messages.connection import Connection
    from aiordma.messages.message import Message

MIN_CLASS = 1 << 12
IDLE_SECONDS = 10.0


class EagerArrival:
    """A message that has arrived with its bytes, in a receive buffer of the connection."""

    def __init__(
        self, message: Message, event: EagerMessage, on_release: Callable[[], None]
    ) -> None:
        """`on_release` is called when the receive buffer is free again."""
        self._message = message
        self._on_release = on_release
        self.frames = event.frames
        self.sizes = [frame.nbytes for frame in event.frames]
        """The sizes of the frames in bytes."""

    def release(self) -> None:
        """Release the receive buffer, and all frames with it.

        Raises:
            BufferError: a frame is still in use. The receive buffer is not released then.
        """
        for frame in self.frames:
            frame.release()
        self._message.release()
        self._on_release()


class ReceivedMessage(ContextManagerMixin):
    """A message that was received without a copy.

    MessageStream.recv_message() returns one. Its memory is used for other messages after release(),
    which the end of a `with` block calls too.
    """

    def __init__(self, frames: tuple[memoryview, ...], on_release: Callable[[], None]) -> None:
        """Called by MessageStream; not for users."""
        self._frames: tuple[memoryview, ...] | None = frames
        self._on_release = on_release

    @property
    def frames(self) -> tuple[memoryview, ...]:
        """The frames, as the peer sent them.

        Raises:
            ValueError: the message is released.
        """
        if self._frames is None:
            raise ValueError("the message is released")
        return self._frames

    @property
    def nbytes(self) -> int:
        """The size of all frames together, in bytes."""
        return sum(frame.nbytes for frame in self.frames)

    def release(self) -> None:
        """Release the memory; the frames cannot be read any more. Idempotent.

        Raises:
            BufferError: a frame is still in use, for example by a numpy array. The message is not
                released then; frames before that one cannot be read any more.
        """
        frames = self._frames
        if frames is None:
            return
        for frame in frames:
            frame.release()
        self._frames = None
        self._on_release()

    def close(self) -> None:
        """Release the memory: see release()."""
        self.release()


class LandingPool:
    """Registered memory for messages that are read without a target of the caller.

    Regions have sizes of powers of two. Those that are given back stay registered, up to
    `max_nbytes` bytes in all, until none was taken for `IDLE_SECONDS`.
    """

    def __init__(self, connection: Connection, loop: Loop, max_nbytes: int) -> None:
        self._connection = connection
        self._loop = loop
        self._max_nbytes = max_nbytes
        self._free: dict[int, list[MemoryRegion]] = {}
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
        free = self._free.get(size)
        if free:
            self.nbytes -= size
            return free.pop()
        return await self._connection.allocate(size, self._connection.read_access)

    def give_back(self, region: MemoryRegion) -> None:
        """Take a region back. The device does not use it any more."""
        size = len(region)
        if self.nbytes + size > self._max_nbytes:
            region.close()
            return
        self.nbytes += size
        self._free.setdefault(size, []).append(region)
        if self._timer is None:
            self._start_timer()

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
        for regions in self._free.values():
            while regions:
                regions.pop().close()
        self.nbytes = 0

    def close(self) -> None:
        """Close the regions that were given back, and keep none from now on."""
        self._max_nbytes = 0
        self._close_free()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
