"""Exchange: posts the wire messages of a stream, and takes those of the peer.

There is no task in the background as long as none is needed. A task that waits to send or to
receive makes progress for all: it posts what may be posted, and else takes the next wire message,
if no other task does so. Only what no task waits for is left to a background task: the rest of an
announcement whose sender was cancelled, the end of such a message, and control messages.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

from aiordma.errors import ProtocolError, RdmaError
from aiordma.loop import WaitQueue, running_loop
from aiordma.loop.task_groups import run_in_background
from aiordma.message_streams.outgoing import AnnouncedOutgoing, FinishOutgoing, Outgoing
from aiordma.message_streams.protocol import (
    AnnouncedMessage,
    Done,
    EagerMessage,
    MessageProtocol,
)
from aiordma.message_streams.received import EagerArrival
from aiordma.message_streams.wire import Result
from aiordma.messages.connection import Connection
from aiordma.messages.message import Message

Arrival = EagerArrival | AnnouncedMessage


class Exchange:
    """The wire messages of one side of a stream: those to be posted, and those that arrive."""

    def __init__(self, connection: Connection, protocol: MessageProtocol) -> None:
        self._connection = connection
        self.protocol = protocol
        self.loop = running_loop()
        self._changed = WaitQueue(self.loop)
        self.end: RdmaError | None = None
        """The reason of the stream's end, or None."""
        self.on_end: Callable[[], None] = lambda: None
        """Called once when the stream ends."""
        # What is to be posted: control messages first, then messages in order. A wire message that
        # was taken from them and is not posted yet comes before everything else.
        self._controls: deque[bytes] = deque()
        self._outbox: deque[Outgoing] = deque()
        self._wire: tuple[bytes, Outgoing | None] | None = None
        self._is_posting = self._is_pulling = self._has_background_task = False
        self._in_flight: dict[int, AnnouncedOutgoing] = {}
        # Messages that are posted in part or read by the peer, and whose senders were cancelled.
        self._abandoned: set[Outgoing] = set()
        self.inbox: deque[Arrival] = deque()
        """The messages that have arrived and that no task has received."""

    @property
    def has_finished(self) -> bool:
        """True if the end of this side's messages is posted, or waits to be."""
        if self.protocol.has_finished:
            return True
        return bool(self._outbox) and isinstance(self._outbox[-1], FinishOutgoing)

    @property
    def is_idle(self) -> bool:
        """True if nothing is to be posted, and the peer reads no memory."""
        return not (self._outbox or self._in_flight or self._wire or self._controls)

    async def send(self, outgoing: Outgoing) -> None:
        """Post a message behind the others, and wait until it is over.

        Cancelling drops it, unless a part of it is posted.

        Raises: the reason of the stream's end.
        """
        self._outbox.append(outgoing)
        try:
            await self.progress(lambda: outgoing.is_over)
        except BaseException:
            self._withdraw(outgoing)
            raise

    def finish_reading(self, number: int) -> None:
        """Have the peer told that an announced message is read."""
        self._controls.append(self.protocol.done(number, Result.READ))
        self._leave_rest()

    def _withdraw(self, outgoing: Outgoing) -> None:
        """Forget a message whose sender was cancelled, unless a part of it is posted."""
        if outgoing.has_begun:
            self._abandoned.add(outgoing)
        elif outgoing in self._outbox:
            self._outbox.remove(outgoing)
            outgoing.release()
        self._leave_rest()

    # --- progress ---

    async def progress(self, is_over: Callable[[], bool]) -> None:
        """Post and take wire messages until `is_over()`.

        A task that takes wire messages notices only what these bring about. So it does not begin
        while another one posts, which might post the message that this task waits for.

        Raises: the reason of the stream's end.
        """
        try:
            while not is_over():
                self.check_end()
                if self._may_post():
                    await self._post()
                elif not (self._is_pulling or self._is_posting):
                    await self._pull()
                else:
                    await self._changed.wait()
        finally:
            self._changed.wake_all()  # another task must go on with what this one did for all
            self._leave_rest()

    def _may_post(self) -> bool:
        if self._is_posting or self.end is not None:
            return False
        if self._wire is not None or self._controls:
            return True
        return bool(self._outbox) and self._outbox[0].may_post(self.protocol)

    async def _post(self) -> None:
        self._is_posting = True
        try:
            wire, outgoing = self._wire = self._wire or self._take_wire()
            await self._connection.send(wire)
            self._wire = None
            if outgoing is not None and outgoing.is_taken:
                self._outbox.popleft()
                if not isinstance(outgoing, AnnouncedOutgoing):
                    self._finish(outgoing)
        except RdmaError as error:
            self.lost(error)
        finally:
            self._is_posting = False
            self._changed.wake_all()

    def _take_wire(self) -> tuple[bytes, Outgoing | None]:
        if self._controls:
            return self._controls.popleft(), None
        outgoing = self._outbox[0]
        wire = outgoing.next_wire(self.protocol)
        if isinstance(outgoing, AnnouncedOutgoing):
            self._in_flight[outgoing.number] = outgoing
        return wire, outgoing

    async def _pull(self) -> None:
        self._is_pulling = True
        try:
            self._received(await self._connection.recv_message())
        except RdmaError as error:
            self.lost(error)
            self._connection.abort()
        finally:
            self._is_pulling = False
            self._changed.wake_all()

    def _received(self, message: Message) -> None:
        """Handle a wire message.

        Raises:
            ProtocolError: the peer breaks the protocol.
        """
        try:
            event = self.protocol.received(message.data)
        except ProtocolError:
            message.release()
            raise
        if isinstance(event, EagerMessage):
            self.inbox.append(EagerArrival(message, event, self._released))
            return
        message.release()
        if isinstance(event, AnnouncedMessage):
            self.inbox.append(event)
        elif isinstance(event, Done):
            self._finish(self._in_flight.pop(event.number))
        self._return_credits()

    def _finish(self, outgoing: Outgoing) -> None:
        outgoing.is_over = True
        outgoing.release()
        self._abandoned.discard(outgoing)

    def _released(self) -> None:
        """Note that a receive buffer is free again."""
        self.protocol.release()
        self._return_credits()
        self._leave_rest()

    def _return_credits(self) -> None:
        update = self.protocol.credit_update()
        if update is not None:
            self._controls.append(update)

    def _leave_rest(self) -> None:
        """Have a background task do what must be done and no task does."""
        if self._has_background_task or not self._needs_background_task():
            return
        self._has_background_task = True
        run_in_background(self.loop, self._finish_rest())

    def _needs_background_task(self) -> bool:
        return self._may_post() or (self.end is None and bool(self._abandoned))

    async def _finish_rest(self) -> None:
        try:
            await self.progress(lambda: not self._needs_background_task())
        except RdmaError:
            pass  # the tasks that wait raise it
        finally:
            self._has_background_task = False

    # --- the end ---

    def check_end(self) -> None:
        """Raise the reason of the stream's end, if it has ended."""
        if self.end is not None:
            raise copy.copy(self.end)

    def lost(self, error: RdmaError) -> None:
        """End the stream. The first reason is kept."""
        if self.end is None:
            self.end = error
            for outgoing in (*self._in_flight.values(), *self._outbox):
                outgoing.release()
            self._in_flight.clear()
            self._outbox.clear()
            self._abandoned.clear()
            self.on_end()
        self._changed.wake_all()
