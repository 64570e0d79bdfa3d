"""Exchange: posts the wire messages of a stream, and takes those of the peer.

Small messages need none of this as long as no other message waits: EagerPath posts and takes them
in C. For the rest, a task that waits makes progress for all: it posts what may be posted, and else
takes the next wire message, if no other task does so. A background task runs only while no task
waits and something is left: messages of send_soon(), the rest of an announcement whose sender was
cancelled. Another one posts wire messages that cannot be posted at once.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace

from aiordma._native import fast_path
from aiordma.errors import LocalClosed, RdmaError
from aiordma.loop import WaitQueue, checkpoint_halves_of, checkpoint_of, running_loop
from aiordma.loop.task_groups import run_in_background
from aiordma.message_streams.inbox import Inbox
from aiordma.message_streams.outbox import Outbox
from aiordma.message_streams.outgoing import Outgoing
from aiordma.message_streams.protocol import MessageProtocol
from aiordma.message_streams.stats import MessageStreamStats, with_eager
from aiordma.message_streams.wire import Result
from aiordma.messages.connection import Connection, MessageEndpoint

SENDING_ENDED = "the sending side of the stream was ended"


class Exchange:
    """The wire messages of one side of a stream: those to be posted, and those that arrive."""

    def __init__(self, endpoint: MessageEndpoint, protocol: MessageProtocol) -> None:
        self._endpoint = endpoint
        self.connection = Connection(endpoint)
        self.protocol = protocol
        self.loop = running_loop()
        self.stats = MessageStreamStats()
        """The numbers of the messages that this object has handled."""
        self.data_path = data_path = endpoint.data_path
        self.receiver = data_path.receiver
        self._queue = self.receiver.queue
        core = data_path.sends.core
        self._credits = protocol.wire_credits
        self.eager = fast_path.EagerPath(self._credits, core, self._queue)
        self.eager.checkpoints = checkpoint_halves_of(type(self.loop))
        self.checkpoint = checkpoint_of(type(self.loop))
        """The checkpoint of an await, or None if the loop requires none."""
        self._changed = WaitQueue(self.loop)
        self.end: RdmaError | None = None
        """The reason of the stream's end, or None."""
        self._is_drained = False  # after the end: no message can be received any more
        self.on_end: Callable[[], None] = lambda: None
        """Called once when the stream ends."""
        self._outbox = Outbox(protocol, self.stats)
        self.inbox = Inbox(protocol, self.eager, self.loop, self._outbox.done, self._released)
        self._is_posting = self._is_pulling = False
        self._has_background_task = self._has_background_poster = False
        self._must_post = False  # something that only a task can post is left
        self._progressing = 0  # the number of tasks in progress()
        self.is_receiving = False
        """True if a task receives a message in Python: see set_receiving()."""
        self.note_change()

    @property
    def has_finished(self) -> bool:
        """True if the end of this side's messages is posted, or waits to be."""
        return self.protocol.has_finished or self._outbox.has_finished

    @property
    def is_finishing(self) -> bool:
        """True if the end of this side's messages waits to be posted."""
        return self._outbox.has_finished

    @property
    def is_idle(self) -> bool:
        """True if nothing is to be posted, and the peer reads no memory."""
        return self._outbox.is_idle

    @property
    def is_waited_for(self) -> bool:
        """True if a task receives, or waits to receive."""
        return self.is_receiving or (self._queue.has_waiter and not self._is_pulling)

    def snapshot(self, bytes_pooled: int) -> MessageStreamStats:
        """Return the statistics of this moment."""
        return replace(
            with_eager(self.stats, self.eager),
            messages_queued=len(self._outbox.messages),
            messages_announced=len(self._outbox.announced),
            messages_unread=len(self.inbox.messages),
            bytes_pooled=bytes_pooled,
        )

    # --- sending ---

    async def send(self, outgoing: Outgoing) -> None:
        """Post a message behind the others, and wait until it is over.

        Cancelling drops it, unless a part of it is posted.

        Raises:
            LocalClosed: send_eof() was called while the message was prepared.
            Others: the reason of the stream's end.
        """
        if self.end is not None or self.has_finished:
            outgoing.release()
            self.check_end()
            raise LocalClosed(SENDING_ENDED)
        self._outbox.messages.append(outgoing)
        self._must_post = self._post_now()
        self._update_fast_path()
        try:
            await self.progress(lambda: outgoing.is_over)
        except BaseException:
            self._outbox.withdraw(outgoing)
            self.note_change()
            if self._is_pulling:  # by a task that can have waited for this message, in drain()
                self.receiver.interrupt()
            raise

    def send_soon(self, outgoing: Outgoing) -> None:
        """Have a message posted behind the others."""
        self._outbox.messages.append(outgoing)
        self._outbox.unattended.add(outgoing)
        self.note_change()

    async def drain(self) -> None:
        """Wait until the messages that are queued now are over. Cancelling stops the waiting.

        Raises: the reason of the stream's end.
        """
        self.check_end()
        waiting: deque[Outgoing] = deque(self._outbox.announced.values())
        waiting.extend(self._outbox.messages)

        def is_over() -> bool:
            while waiting and waiting[0].is_over:
                waiting.popleft()
            return not waiting

        await self.progress(is_over)

    def finish_reading(self, number: int, result: Result) -> None:
        """Have the peer told that an announced message is read, or dropped."""
        self._post_control(self.protocol.done(number, result))

    def _post_control(self, wire: bytes) -> None:
        """Post a wire message that takes no credit, now or as soon as that is possible."""
        outbox = self._outbox
        must_wait = self._is_posting or outbox.wire or outbox.controls or self.end is not None
        if must_wait or not self.eager.try_post(wire):
            outbox.controls.append(wire)
            self.note_change()

    # --- receiving ---

    def set_receiving(self, is_receiving: bool) -> None:
        """Note whether a task receives a message in Python. No other task receives meanwhile."""
        self.is_receiving = is_receiving
        if is_receiving:
            self.eager.may_receive = False
        else:
            self._update_fast_path()

    async def wait_for_arrival(self) -> None:
        """Wait until a message is in the inbox, or the peer has finished.

        After the end of the connection, messages that have arrived before are taken first.

        Raises: the reason of the stream's end.
        """
        await self.progress(
            lambda: bool(self.inbox.messages) or self.protocol.peer_has_finished, drains=True
        )

    def take_arrived(self, count: int) -> None:
        """Take wire messages that have arrived, until `count` messages are in the inbox."""
        queue, inbox = self._queue, self.inbox
        if self._is_pulling or queue.has_waiter or not queue:
            return
        try:
            while len(inbox.messages) < count and queue and self.end is None:
                if not inbox.take_other() and queue:
                    inbox.take(self.receiver.take_message())
        except RdmaError as error:
            self._fail(error)
        self.note_change()

    # --- progress ---

    async def progress(self, is_over: Callable[[], bool], *, drains: bool = False) -> None:
        """Post and take wire messages until `is_over()`.

        With `drains`, it goes on after the end until no message is left.

        Raises: the reason of the stream's end.
        """
        self._progressing += 1
        try:
            while not is_over():
                if self.end is not None and (self._is_drained or not drains):
                    self.check_end()
                await self._step()
        finally:
            self._progressing -= 1
            if self._outbox.unattended:
                self._see_to_rest()

    def _step(self) -> Coroutine[object, None, None]:
        """Return what a task is to await next: it posts, takes, or waits for a task that does.

        A task that takes wire messages notices only what these bring about. So it does not begin
        while another one posts, which might post the message that this task waits for.
        """
        if self._must_post and not self._is_posting:
            return self._post()
        if not (self._is_pulling or self._is_posting or self._queue.has_waiter):
            return self._pull()
        return self._follow()

    async def _post(self) -> None:
        self._is_posting = True
        outbox = self._outbox
        try:
            wire = outbox.next_wire()
            if wire is not None:
                await self.connection.send(wire)
                outbox.posted()
            elif outbox.messages:
                await self._prepare(outbox.messages[0])
        except RdmaError as error:
            if self.connection.closed:
                self.lost(error, is_drained=False)
            else:  # without memory for a copy: the peer must know that nothing more is sent
                self._fail(error)
        finally:
            self._is_posting = False
            self.note_change()

    async def _prepare(self, outgoing: Outgoing) -> None:
        """Prepare a message of send_soon(). All others are prepared before they are queued.

        The stream ends if that fails: no message can be left out.
        """
        try:
            await outgoing.prepare()
        except (RdmaError, ValueError) as error:
            failure = RdmaError(f"a message of send_soon() cannot be sent: {error}")
            failure.__cause__ = error
            self._fail(failure)
        if self.end is not None:
            outgoing.release()

    def _post_now(self) -> bool:
        """Post wire messages without waiting. Return True if one is left that a task must post."""
        outbox = self._outbox
        while self.end is None and not self._is_posting:
            wire = outbox.next_wire()
            if wire is None:
                return bool(outbox.messages) and not outbox.messages[0].is_prepared
            if not self.eager.try_post(wire):
                return True
            outbox.posted()
        return False

    async def _pull(self) -> None:
        self._is_pulling = True
        try:
            wait = self.receiver.wait_if_needed()
            if wait is not None:
                await wait
            if self.receiver.is_ready() and not self.inbox.take_other():
                self.inbox.take(await self.connection.recv_message())
        except RdmaError as error:
            self._fail(error)
        finally:
            self._is_pulling = False
            self.note_change()

    def _fail(self, error: RdmaError) -> None:
        """End the stream and its connection."""
        self.lost(error)
        self.connection.abort()

    async def _follow(self) -> None:
        """Wait until another task has posted or taken something.

        A task that waits to receive in C is woken, so that it goes on in Python: only there it does
        the work of all.
        """
        eager = self.eager
        eager.followers += 1
        try:
            if self._queue.has_waiter and not self._is_pulling:
                self._queue.wake()
            await self._changed.wait()
        finally:
            eager.followers -= 1

    def _released(self) -> None:
        """Note that a receive buffer is free again."""
        self.protocol.release()
        self.note_change()

    def note_change(self) -> None:
        """Post what can be posted now, wake the tasks that follow, and see to the rest.

        EagerPath calls this when it has taken a wire message that Python must know of.
        """
        outbox = self._outbox
        self._must_post = False
        if outbox.messages or outbox.controls or outbox.wire:
            self._must_post = self._post_now()
        # Not behind a control message: for a peer that posts no receives, they would pile up.
        if self._credits.is_update_due and not (outbox.controls or outbox.wire or self.end):
            self._post_control(self.protocol.credit_update())
        self._update_fast_path()
        if self.eager.followers:
            self._changed.wake_all()
        if self._must_post or outbox.unattended:
            self._see_to_rest()

    def _update_fast_path(self) -> None:
        eager, is_open = self.eager, self.end is None
        eager.has_queued = bool(self._outbox.messages)
        eager.may_send = is_open and not eager.has_queued and not self.protocol.has_finished
        is_free = not self.inbox.messages and not self.is_receiving
        eager.may_receive = is_open and is_free and self.protocol.is_between_messages

    def _see_to_rest(self) -> None:
        """Start background tasks if something is left that no other task does.

        A task that waits for a wire message does not notice that something must be posted. So
        another one posts.
        """
        if self._must_post and not self._has_background_poster:
            self._has_background_poster = True
            run_in_background(self.loop, self._post_rest())
        if self._is_rest_left and not self._has_background_task:
            self._has_background_task = True
            run_in_background(self.loop, self._finish_rest())

    @property
    def _is_rest_left(self) -> bool:
        """True if messages are not over for whose end no task waits in progress()."""
        return bool(self._outbox.unattended and not self._progressing)

    async def _post_rest(self) -> None:
        try:
            while self._must_post and not self._is_posting:
                await self._post()
        finally:
            self._has_background_poster = False

    async def _finish_rest(self) -> None:
        try:
            while self._is_rest_left:
                await self._step()
        finally:
            self._has_background_task = False

    # --- the end ---

    def check_end(self) -> None:
        """Raise the reason of the stream's end, if it has ended."""
        if self.end is not None:
            raise copy.copy(self.end)

    def lost(self, error: RdmaError, *, is_drained: bool = True) -> None:
        """End the stream. The first reason is kept.

        `is_drained`: no message that has arrived before can be received any more.
        """
        self._is_drained |= is_drained or isinstance(error, LocalClosed)
        if self.end is None:
            self.end = error
            if self._outbox.announced:  # the users may change the memory from now on
                self._endpoint.refuse_access()
            self._outbox.drop()
            self.on_end()
        self.note_change()
