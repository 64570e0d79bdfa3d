"""ReceivedMessage: a message in the memory in which it arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.loop.context_managers import ContextManagerMixin
from aiordma.message_streams.protocol import EagerMessage

if TYPE_CHECKING:
    from aiordma.messages.message import Message


class EagerArrival:
    """A message that has arrived with its bytes, in a receive buffer of the connection."""

    def __init__(self, message: Message, event: EagerMessage) -> None:
        self._message = message
        self.frames = event.frames
        self.sizes = tuple([frame.nbytes for frame in event.frames])
        """The sizes of the frames in bytes."""
        self.nbytes = sum(self.sizes)
        """The size of all frames together."""

    def release(self) -> None:
        """Release the receive buffer, and all frames with it.

        Raises:
            BufferError: a frame is still in use. The receive buffer is not released then.
        """
        for frame in self.frames:
            frame.release()
        self._message.release()


class ReceivedMessage(ContextManagerMixin):
    """A message that was received without a copy.

    MessageStream.recv_message() returns one. Its memory is used for other messages after release(),
    which the end of a `with` block calls too.
    """

    def __init__(self, frames: tuple[memoryview, ...], on_release: Callable[[], None]) -> None:
        """Called by MessageStream; not for users.

        `on_release` raises BufferError if the memory is still in use.
        """
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

        A slice of a frame can be read as long as it exists, if the message is a large one.

        Raises:
            BufferError: a frame is still in use, for example by a numpy array; or a slice of a
                frame exists, if the message is a small one, which is in a receive buffer. The
                message is not released then, but frames can be, which cannot be read any more.
        """
        frames = self._frames
        if frames is None:
            return
        for frame in frames:
            frame.release()
        self._on_release()
        self._frames = None

    def close(self) -> None:
        """Release the memory: see release()."""
        self.release()
