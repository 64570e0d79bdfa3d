"""CmListening: what an id does that listens, in both modes.

A listening id has an event channel of its own, whichever mode it is in. Linux can move an id to
another channel with its events, but not the ids that came with its unread requests: those would be
lost. So it never moves one that listens: migrate() hands its channel over as a whole.

The id of a request is on that channel, too, until somebody takes the request; then it is moved to
where the taker wants its events. It has none before it is accepted, so none are missed.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from aiordma.cm.handle import IdHandle
from aiordma.cm.states import CmCall, CmState
from aiordma.cm.steps import CmSteps
from aiordma.enums import CmEventType
from aiordma.rdmacm import CmEvent, CmId

logger = logging.getLogger(__name__)

# What rdma_listen() makes of a backlog of 0, unless the administrator changed it.
MAX_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A connection request that nobody has taken: the id that came with it, and the event."""

    handle: IdHandle
    event: CmEvent


class CmListening(CmSteps):
    """What AsyncCmId and SyncCmId have in common when they listen."""

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        super().__init__(handle, state, event)
        self._requests: deque[PendingRequest] = deque()
        self._backlog = MAX_BACKLOG
        self._has_listened = state is CmState.LISTENING

    def listen(self, backlog: int = 0) -> None:
        """Listen: rdma_listen(3). At most `backlog` requests wait to be taken (0: 1024).

        Requests that come when so many wait are rejected.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken), EMFILE (listening takes a descriptor).
            BusyError: a call on the id is under way.
        """
        self._call_now(CmCall.LISTEN, lambda: self._listen(backlog))
        self._has_listened = True
        self._backlog = backlog if 0 < backlog < MAX_BACKLOG else MAX_BACKLOG

    def _listen(self, backlog: int) -> None:
        self.cm_id.listen(backlog)

    def handle_event(self, event: CmEvent) -> None:
        """Take note of an event."""
        if event.type is CmEventType.CONNECT_REQUEST:
            self._keep_request(event)
        super().handle_event(event)

    def _keep_request(self, event: CmEvent) -> None:
        channel = self.handle.channel
        assert channel is not None, "it listens"
        handle = IdHandle(self.loop, CmId.from_address(event.id), channel.hold())
        if self.state is CmState.LISTENING and len(self._requests) < self._backlog:
            self._requests.append(PendingRequest(handle, event))
            self._drop_requests_if_closed()
        else:
            logger.warning(
                "a connection request was rejected: %d wait already", len(self._requests)
            )
            handle.destroy()

    def _check_listening(self) -> None:
        if self.state is not CmState.LISTENING:
            raise self._error("the listener", CmState.LISTENING)

    def _drop_requests_if_closed(self) -> None:
        """Closed by another thread meanwhile, and so too late for that to find the request."""
        if self.state is CmState.CLOSED:
            self._drop_requests()

    def _drop_requests(self) -> None:
        with suppress(IndexError):
            while True:
                self._requests.popleft().handle.destroy()

    def _pass_on_to(self, heir: CmListening) -> None:
        """For migrate(): all that this object knows is the heir's, which has the C id already."""
        heir.established, heir.context = self.established, self.context
        heir._failure = self._failure
        heir._requests, self._requests = self._requests, deque()
        heir._backlog, heir._has_listened = self._backlog, self._has_listened
        self._move_away()

    def abandon(self) -> None:
        """abort() without telling anyone who waits; callable from any thread. Idempotent."""
        super().abandon()
        self._drop_requests()
