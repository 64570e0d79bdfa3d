"""Outgoing messages: what is still to be posted for each, and the memory that the peer reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiordma.enums import AccessFlags
from aiordma.memory import MemoryRegion, MemorySlice
from aiordma.message_streams.frames import bytes_of
from aiordma.message_streams.protocol import Announcement, MessageProtocol
from aiordma.message_streams.rendezvous import EMPTY_FRAME, registered, remote_frame
from aiordma.message_streams.wire import RemoteFrame
from aiordma.messages.connection import Connection
from aiordma.verbs import ProtectionDomain


class Outgoing(Protocol):
    """A message, or the end of the messages, that waits to be posted."""

    nbytes: int
    """The size of the message in bytes."""

    copied: int
    """The number of bytes of it that were copied."""

    is_over: bool
    """True if its sender need not wait any more."""

    has_begun: bool
    """True if next_wire() was called: the rest must follow."""

    is_taken: bool
    """True if next_wire() has returned the last wire message."""

    is_prepared: bool
    """True if next_wire() can be called."""

    async def prepare(self) -> None:
        """Register the memory. Cancelling leaves nothing registered.

        Raises: as Connection.register().
        """

    def may_post(self, protocol: MessageProtocol) -> bool:
        """Return True if it is prepared, and the peer takes the next wire message now."""

    def next_wire(self, protocol: MessageProtocol) -> bytes:
        """Return the next wire message. It takes a credit."""

    def release(self) -> None:
        """Release the memory: the peer does not read it any more."""


class _Prepared:
    """An outgoing message of a single wire message, which needs no memory."""

    is_prepared = True
    nbytes = copied = 0

    def __init__(self) -> None:
        self.has_begun = self.is_taken = self.is_over = False

    async def prepare(self) -> None:
        """See Outgoing."""

    def release(self) -> None:
        """See Outgoing."""


class EagerOutgoing(_Prepared):
    """A message that is sent with its bytes."""

    def __init__(self, frames: Sequence[memoryview | MemorySlice]) -> None:
        super().__init__()
        self._sizes = [len(frame) for frame in frames]
        self._data = b"".join(map(bytes_of, frames))
        self.nbytes = self.copied = len(self._data)

    def may_post(self, protocol: MessageProtocol) -> bool:
        """See Outgoing."""
        return protocol.wire_credits.credits > 0

    def next_wire(self, protocol: MessageProtocol) -> bytes:
        """See Outgoing."""
        self.has_begun = self.is_taken = True
        return protocol.eager(self._sizes) + self._data


class FinishOutgoing(_Prepared):
    """The end of the messages of this side."""

    def may_post(self, protocol: MessageProtocol) -> bool:
        """See Outgoing. It takes no credit."""
        return True

    def next_wire(self, protocol: MessageProtocol) -> bytes:
        """See Outgoing."""
        self.has_begun = self.is_taken = True
        return protocol.finish()


class AnnouncedOutgoing:
    """A message whose memory the peer reads. It is over when the peer has read it."""

    copied = 0

    def __init__(
        self,
        connection: Connection,
        pd: ProtectionDomain,
        frames: Sequence[memoryview | MemorySlice],
    ) -> None:
        """Prepare it if all its memory is registered already.

        Registered memory stays registered until release(), even if the user closes it.

        Raises:
            ValueError: registered memory does not allow the peer to read it, is closed, or belongs
                to another protection domain than `pd`, that of the connection.
        """
        self.nbytes = sum(map(len, frames))
        self._connection = connection
        self._frames: Sequence[memoryview | MemorySlice] = frames
        self._regions: list[MemoryRegion] = []
        self._acquired: list[MemoryRegion] = []
        """The regions of the user."""
        self._announcement: Announcement | None = None
        self.has_begun = self.is_taken = self.is_over = False
        parts = [remote_frame(frame) for frame in frames if isinstance(frame, MemorySlice)]
        self.is_prepared = len(parts) == len(frames)
        self._remote_frames: list[RemoteFrame] = parts
        self._acquire(pd)

    def _acquire(self, pd: ProtectionDomain) -> None:
        try:
            for frame in self._frames:
                if isinstance(frame, MemorySlice) and frame.length:
                    frame.region.acquire(pd)
                    self._acquired.append(frame.region)
        except BaseException:
            self._release_acquired()
            raise

    @property
    def number(self) -> int:
        """The number of the announced message, after next_wire()."""
        assert self._announcement is not None
        return self._announcement.number

    async def prepare(self) -> None:
        """See Outgoing. Memory that is registered already is used as it is.

        Raises: as Connection.register().
        """
        if self.is_prepared:
            return
        try:
            self._remote_frames = [await self._make_readable(frame) for frame in self._frames]
        except BaseException:
            self._close_regions()  # it can be prepared again
            raise
        self.is_prepared = True

    async def _make_readable(self, frame: memoryview | MemorySlice) -> RemoteFrame:
        if not len(frame):
            return EMPTY_FRAME  # empty memory cannot be registered
        access = AccessFlags.REMOTE_READ
        return remote_frame(await registered(self._connection, frame, access, self._regions))

    def may_post(self, protocol: MessageProtocol) -> bool:
        """See Outgoing."""
        may_begin = self.has_begun or (self.is_prepared and protocol.announcements > 0)
        return may_begin and protocol.wire_credits.credits > 0

    def next_wire(self, protocol: MessageProtocol) -> bytes:
        """See Outgoing."""
        if self._announcement is None:
            self._announcement = protocol.announce(self._remote_frames)
            self.has_begun = True
        wire = protocol.next_part(self._announcement)
        self.is_taken = self._announcement.is_listed
        return wire

    def release(self) -> None:
        """See Outgoing. The traceback of a cancelled task can keep this object, but no views."""
        self._frames = ()
        self._close_regions()
        self._release_acquired()

    def __del__(self) -> None:
        self._release_acquired()  # if the stream was dropped unclosed

    def _release_acquired(self) -> None:
        while self._acquired:
            self._acquired.pop().release()

    def _close_regions(self) -> None:
        while self._regions:
            self._regions.pop().close()
