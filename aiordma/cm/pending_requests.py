"""PendingRequests: the connection requests of a listening id that no task has taken yet.

A listening id has an event channel of its own, whether it is asynchronous or synchronous. Linux can
move an id with its events to another channel, but not the ids of its unread requests: those
requests would be lost. So a listening id is never moved. migrate() transfers its channel instead.

The id of a request is on that channel, too, until a task takes the request. Then the id moves to
the channel where the task wants its events. Before the request is accepted it has no events, so
none is missed.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from aiordma.cm.handle import IdHandle
from aiordma.rdmacm import CmEvent, CmId

logger = logging.getLogger(__name__)

# The backlog that rdma_listen() uses for 0, unless the administrator changed it.
MAX_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A connection request: its id, and its CONNECT_REQUEST event."""

    handle: IdHandle
    event: CmEvent


class PendingRequests:
    """A queue of connection requests, of at most `backlog` entries."""

    __slots__ = ("_requests", "backlog")

    def __init__(self) -> None:
        self._requests: deque[PendingRequest] = deque()
        self.backlog = MAX_BACKLOG

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._requests)

    def add(self, listener: IdHandle, event: CmEvent, *, is_listening: bool) -> None:
        """Append the request of `event`; reject it if there are `backlog` requests already."""
        channel = listener.channel
        assert channel is not None, "a listening id has its own channel"
        handle = IdHandle(listener.loop, CmId.from_address(event.id), channel.acquire())
        if is_listening and len(self._requests) < self.backlog:
            self._requests.append(PendingRequest(handle, event))
        else:
            logger.warning(
                "a connection request was rejected: %d are waiting already", len(self._requests)
            )
            handle.destroy()

    def pop(self) -> PendingRequest:
        """Take the oldest request.

        Raises:
            IndexError: there is none.
        """
        return self._requests.popleft()

    def put_back(self, request: PendingRequest) -> None:
        """Make `request` the oldest again."""
        self._requests.appendleft(request)

    def drop_all(self) -> None:
        """Destroy the ids of all requests, which rejects them. Callable from any thread."""
        with suppress(IndexError):
            while True:
                self._requests.popleft().handle.destroy()

    def move_to(self, successor: PendingRequests) -> None:
        """Move all requests to `successor`, and copy the backlog."""
        successor._requests, self._requests = self._requests, deque()
        successor.backlog = self.backlog
