"""Inbox: the messages of the peer that have arrived, until a task receives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aiordma._native import fast_path
from aiordma.loop import Loop, call_threadsafe
from aiordma.message_streams.protocol import (
    AnnouncedMessage,
    Done,
    EagerMessage,
    Event,
    MessageProtocol,
)
from aiordma.message_streams.received import EagerArrival
from aiordma.messages.message import BufferOwner, Message

Arrival = EagerArrival | AnnouncedMessage


class _CreditedBuffer:
    """The receive buffer of EAGER: when it is released, its credit is free again."""

    __slots__ = ("_loop", "_on_release", "_owner")

    def __init__(self, owner: BufferOwner, loop: Loop, on_release: Callable[[], None]) -> None:
        self._owner = owner
        self._loop = loop
        self._on_release = on_release

    def release(self) -> None:
        self._owner.release()
        self._on_release()

    def release_threadsafe(self) -> None:
        self._owner.release_threadsafe()
        call_threadsafe(self._loop, self._on_release)


class Inbox:
    """The messages that have arrived. Wire messages become messages here."""

    def __init__(
        self,
        protocol: MessageProtocol,
        eager: fast_path.EagerPath,
        loop: Loop,
        on_done: Callable[[int], None],
        on_released: Callable[[], None],
    ) -> None:
        """`on_done` is called with the number of a message that the peer has read or dropped,
        `on_released` when a receive buffer is free again.
        """
        self.messages: deque[Arrival] = deque()
        """The messages that have arrived and that no task has received."""
        self._protocol = protocol
        self._eager = eager
        self._loop = loop
        self._on_done = on_done
        self._on_released = on_released

    def take_other(self) -> bool:
        """Take the oldest wire message if it has arrived and is not EAGER. Return True if it was.

        Raises:
            ProtocolError: the peer breaks the protocol.
        """
        wire = self._eager.take_other()
        if wire is None:
            return False
        self._handle(self._protocol.received(memoryview(wire)))
        return True

    def take(self, message: Message) -> None:
        """Take a wire message of any kind. The bytes of EAGER stay in it.

        Raises:
            ProtocolError: the peer breaks the protocol. The traceback has views of the message,
                which is released with it.
        """
        event = self._protocol.received(message.data)
        if isinstance(event, EagerMessage):
            message._wrap_owner(self._with_credit)
            self.messages.append(EagerArrival(message, event))
        else:
            message.release()
            self._handle(event)

    def _with_credit(self, owner: BufferOwner) -> BufferOwner:
        return _CreditedBuffer(owner, self._loop, self._on_released)

    def _handle(self, event: Event | None) -> None:
        if isinstance(event, AnnouncedMessage):
            self.messages.append(event)
        elif isinstance(event, Done):
            self._on_done(event.number)
