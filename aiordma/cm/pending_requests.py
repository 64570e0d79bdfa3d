"""PendingRequests: the connection requests of a listening id that no task has taken yet.

A listening id has an event channel of its own, whether it is asynchronous or synchronous. Linux can
move an id with its events to another channel, but not the ids of its unread requests: those
requests would be lost. So a listening id is never moved. migrate() transfers its channel instead.

The id of a request is on that channel, too, until a task takes the request. Then the id moves to
the channel where the task wants its events. Before the request is accepted it has no events, so
none is missed.

The hosts of the peers take turns. When there are too many requests, the host with the most requests
loses its newest one. So a host that floods the listener delays its own requests only.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aiordma.cm.handle import IdHandle
from aiordma.cm.occasional_log import OccasionalLog
from aiordma.rdmacm import CmEvent, CmId

logger = logging.getLogger(__name__)

# The backlog that rdma_listen() uses for 0, unless the administrator changed it.
MAX_BACKLOG = 1024


@dataclass(slots=True)
class PendingRequest:
    """A connection request: its id, its CONNECT_REQUEST event, and the host of the peer."""

    handle: IdHandle
    event: CmEvent
    host: str


class PendingRequests:
    """A queue of connection requests, of at most `backlog` entries. Callable from any thread."""

    __slots__ = ("_by_host", "_count", "_lock", "_log", "backlog", "rejected", "room")

    def __init__(self) -> None:
        self._by_host: dict[str, deque[PendingRequest]] = {}  # the host whose turn is next first
        self._count = 0
        self._lock = threading.Lock()
        self._log = OccasionalLog(logger)
        self.backlog = MAX_BACKLOG
        self.room: Callable[[], int] = lambda: MAX_BACKLOG
        """Returns the number of further connections that the listener takes at present."""
        self.rejected = 0
        """The number of requests that were rejected because the queue was full, or without room."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return self._count

    def add(self, listener: IdHandle, event: CmEvent, *, is_listening: bool) -> None:
        """Append the request of `event`. Reject it, or another one, if that is one too many."""
        channel = listener.channel
        assert channel is not None, "a listening id has its own channel"
        handle = IdHandle(listener.loop, CmId.from_address(event.id), channel.acquire())
        if not is_listening:
            handle.destroy()
            return
        handle.request_addresses = addresses = handle.cm_id.addresses
        request = PendingRequest(handle, event, addresses.peer[0])
        limit = self._count + self.room()
        surplus = self._append(request, limit if limit < self.backlog else self.backlog)
        if surplus is not None:
            surplus.handle.destroy()
            self.rejected += 1
            self._log.log(
                logging.WARNING,
                "a connection request of %s was rejected: %d requests wait, or the listener has "
                "all the connections that it may have",
                surplus.host,
                self._count,
            )

    def _append(self, request: PendingRequest, limit: int) -> PendingRequest | None:
        """Append a request. Return the one to reject, if there are more than `limit` then."""
        with self._lock:
            own = self._by_host.get(request.host, deque())
            surplus = None
            if self._count >= limit:
                longest = max(self._by_host.values(), key=len, default=own)
                if len(own) + 1 >= len(longest):
                    return request
                surplus = longest.pop()
                self._count -= 1
            self._by_host[request.host] = own
            own.append(request)
            self._count += 1
            return surplus

    def pop(self) -> PendingRequest:
        """Take the oldest request of the host whose turn it is.

        Raises:
            IndexError: there is none.
        """
        with self._lock:
            if not self._by_host:
                raise IndexError("no request")
            host = next(iter(self._by_host))
            requests = self._by_host.pop(host)
            request = requests.popleft()
            self._count -= 1
            if requests:
                self._by_host[host] = requests  # behind the other hosts
            return request

    def put_back(self, request: PendingRequest) -> None:
        """Make `request` the next one to be taken."""
        with self._lock:
            requests = self._by_host.pop(request.host, deque())
            requests.appendleft(request)
            self._count += 1
            self._by_host = {request.host: requests, **self._by_host}

    def drop_all(self) -> None:
        """Destroy the ids of all requests, which rejects them."""
        while self._count:
            try:
                self.pop().handle.destroy()
            except IndexError:  # another thread has taken the last one
                return

    def move_to(self, successor: PendingRequests) -> None:
        """Move all requests to `successor`, and copy the backlog."""
        with self._lock:
            successor._by_host, self._by_host = self._by_host, {}
            successor._count, self._count = self._count, 0
        successor.backlog = self.backlog
