"""OwnCompletions: waits for completions of the completion queues that belong to an id."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from aiordma.cm.handle import IdHandle
from aiordma.cm.id_state import IdState
from aiordma.cm.states import CmState
from aiordma.errors import BusyError
from aiordma.loop import Interrupt, checkpoint
from aiordma.rdmacm import OwnQueue
from aiordma.verbs import Completion

# In these states, no completion comes that is not there already.
_UNWAITABLE = (CmState.FAILED, CmState.REMOVED, CmState.CLOSED)


class EventSource(Protocol):
    """Event channels that no loop reads. Their rdma_cm events can end a wait for completions."""

    def event_fds(self) -> list[int]:
        """Return the descriptors that become readable with such an event."""

    def read_events(self) -> None:
        """Read the events that have arrived. Called in a worker thread."""


class _ReadCompletions:
    """The completions of one queue that a worker thread has read and no task has taken."""

    def __init__(self) -> None:
        self.unread: deque[Completion] = deque()
        self.has_waiter = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self.has_waiter:
            raise BusyError("another task is waiting for completions here")
        self.has_waiter = True
        try:
            yield
        finally:
            self.has_waiter = False


class OwnCompletions:
    """Waits in worker threads, one for each of the two queues that rdma_create_qp(3) made.

    When the peer disconnects during a wait, this side disconnects too. The device then flushes the
    posted requests, and their completions end the wait.
    """

    def __init__(self, handle: IdHandle, state: IdState) -> None:
        self._handle = handle
        self._state = state
        self._sent = _ReadCompletions()
        self._received = _ReadCompletions()

    def move_to(self, state: IdState) -> None:
        """Belong to the id with this state, to which the C id was moved. Waits go on."""
        self._state = state

    async def next_sent(self, queue: OwnQueue, source: EventSource) -> Completion:
        """Wait for the next completion of the send queue. See BaseCmId.get_send_comp."""
        return await self._next(self._sent, queue, source)

    async def next_received(self, queue: OwnQueue, source: EventSource) -> Completion:
        """Wait for the next completion of the receive queue. See BaseCmId.get_recv_comp."""
        return await self._next(self._received, queue, source)

    async def _next(
        self, completions: _ReadCompletions, queue: OwnQueue, source: EventSource
    ) -> Completion:
        with completions.waiting():
            await checkpoint()
            self._flush_if_disconnected()
            while not completions.unread:
                self._check_waitable()
                await self._handle.wait(
                    lambda interrupt: self._read_one(completions, queue, source, interrupt),
                    serialized=False,
                )
            return completions.unread.popleft()

    def _check_waitable(self) -> None:
        if self._state.current in _UNWAITABLE:
            raise self._state.error("the peer", CmState.CONNECTED)

    def _read_one(
        self,
        completions: _ReadCompletions,
        queue: OwnQueue,
        source: EventSource,
        interrupt: Interrupt,
    ) -> None:
        """Wait for one completion in a worker thread.

        The queue is armed before it is polled again, so that no completion is missed. The state can
        have changed since the task has looked at it. Only from now on a change sets `interrupt`.
        """
        if self._state.current in _UNWAITABLE:
            return
        while (completion := queue.poll()) is None:
            queue.arm()
            if (completion := queue.poll()) is not None:
                break
            if not interrupt.wait_readable(queue.fd, *source.event_fds()):
                return
            queue.read_event()
            source.read_events()
        completions.unread.append(completion)

    def on_event(self) -> None:
        """End the waits if the event that has just arrived ended the connection."""
        if not (self._sent.has_waiter or self._received.has_waiter):
            return
        self._flush_if_disconnected()
        if self._state.current in (CmState.FAILED, CmState.REMOVED):
            self._handle.interrupt_waits()

    def _flush_if_disconnected(self) -> None:
        if self._state.current is CmState.DISCONNECTED:
            self._handle.submit(self._flush)

    def _flush(self) -> None:
        with self._handle.calls.channel_lock:
            self._handle.cm_id.disconnect()
