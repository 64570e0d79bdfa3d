"""Handshakes: the peers that a listener accepts at the same time.

A peer that sends a request and never confirms the reply must not delay the others. So each
handshake runs in a task of its own, in which serve() then runs the handler. The number of
handshakes is limited, because each has a queue pair and registered memory. When all are in use, one
is ended for a new request, if its peer has had time to confirm: the oldest one of the host with the
most handshakes. The time begins when the reply is sent. What this side needs before that does not
count.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from aiordma.cm.occasional_log import OccasionalLog
from aiordma.errors import (
    ConnectError,
    ConnectionClosed,
    ProtocolError,
    ReceiveOverrun,
    WorkRequestError,
)
from aiordma.loop import Loop, run_in_background
from aiordma.loop.context_managers import Closable
from aiordma.options import ListenerLimits

logger = logging.getLogger(__name__)

# Errors that the peer or the network causes, not this side.
PEER_ERRORS = (ConnectError, ConnectionClosed, ProtocolError, ReceiveOverrun, WorkRequestError)
# A peer confirms the reply within milliseconds. After this time, its handshake can be ended for a
# new one.
CONFIRM_SECONDS = 1.0


class Answerable(Protocol):
    """A connection request."""

    on_replied: Callable[[], None] | None
    """Called on the loop when the reply to the peer is sent."""

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer."""

    def abort(self) -> None:
        """Reject the peer, or end the handshake with it. Idempotent."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason, on this side, why a peer could not be accepted."""

    error: Exception


R = TypeVar("R", bound=Answerable)
C = TypeVar("C", bound=Closable)


@dataclass(slots=True)
class ListenerStats:
    """A snapshot of a listener's numbers: the result of `Listener.stats`."""

    accepted: int = 0
    """Connections that were established."""

    failed: int = 0
    """Handshakes that failed, because the peer gave up, did not confirm, or broke a rule."""

    dropped: int = 0
    """Handshakes that were ended for a new request, when `max_handshakes` were under way."""

    rejected: int = 0
    """Requests that were rejected because of the backlog or of `max_connections`."""

    requests_waiting: int = 0
    """Requests that no task has taken yet."""

    handshakes: int = 0
    """Requests that were accepted, and whose peer has not confirmed yet."""

    connections: int = 0
    """Requests that were taken, and connections made of them, until they are destroyed."""

    def connection_ended(self) -> None:
        """Count a connection as destroyed. Called by the listener."""
        self.connections -= 1


class Handshakes(Generic[R, C]):
    """The handshakes of a listener, and their outcomes that no task has taken yet."""

    def __init__(self, loop: Loop, limits: ListenerLimits, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever there is an outcome, or another handshake can begin."""
        self._loop = loop
        self._limits = limits
        self._on_change = on_change
        # Each with the time after which it can be ended, oldest first. None: the reply is not sent.
        self._under_way: dict[R, float | None] = {}
        self._is_full = False
        # Those whose time was over then can be ended. Set by a timer, so that the loop has read
        # before which peers have confirmed.
        self._checked_at = -math.inf
        self._has_timer = False
        self._outcomes: deque[C | Failure] = deque()
        self._log = OccasionalLog(logger)
        self.stats = ListenerStats()

    @property
    def may_start(self) -> bool:
        """True if another handshake can begin now."""
        return not self._is_full or self._replaceable() is not None

    def _replaceable(self) -> R | None:
        """Return the handshake that can be ended for a new one.

        None: all those of the hosts with the most handshakes are too young.
        """
        by_host = Counter(request.peer_address[0] for request in self._under_way)
        most, checked_at = max(by_host.values()), self._checked_at
        for request, end in self._under_way.items():
            if end is not None and end <= checked_at and by_host[request.peer_address[0]] == most:
                return request
        return None

    def start(self, request: R, accept: Callable[[R], Awaitable[C]]) -> None:
        """Accept the request in the background, for take(). Call it only if `may_start`."""
        self.begin(request)
        run_in_background(self._loop, self._run(request, accept))

    def begin(self, request: R) -> None:
        """Note that a handshake begins: finish() follows. Call it only if `may_start`."""
        if self._is_full:
            dropped = self._replaceable()
            assert dropped is not None, "a handshake can be started only if may_start"
            self._log.log(logging.INFO, "%r was dropped for a new request", dropped)
            self.stats.dropped += 1
            self._end(dropped)
        self._under_way[request] = None
        self._is_full = len(self._under_way) >= self._limits.max_handshakes
        request.on_replied = lambda: self._replied(request)
        self._set_timer_if_full()

    def _replied(self, request: R) -> None:
        """Begin the time in which the peer must confirm, before the handshake can be ended."""
        if request in self._under_way:
            self._under_way[request] = self._loop.time() + CONFIRM_SECONDS
            self._set_timer_if_full()

    def _set_timer_if_full(self) -> None:
        """Call `on_change` when the next handshake can be ended for a new one."""
        if self._has_timer or not self._is_full:
            return
        ends = [end for end in self._under_way.values() if end is not None]
        later = [end for end in ends if end > self._checked_at]
        if later:
            self._has_timer = True
            self._loop.call_later(max(0.0, min(later) - self._loop.time()), self._on_timer)

    def _on_timer(self) -> None:
        self._has_timer = False
        self._checked_at = self._loop.time()
        self._set_timer_if_full()
        self._on_change()

    async def _run(self, request: R, accept: Callable[[R], Awaitable[C]]) -> None:
        outcome = await self.finish(request, accept)
        if outcome is not None:
            self._outcomes.append(outcome)
            self._on_change()

    async def finish(self, request: R, accept: Callable[[R], Awaitable[C]]) -> C | Failure | None:
        """Accept the request, and return the connection, or the reason on this side if that fails.

        Return None if the peer has caused the failure, or if the handshake was ended meanwhile.
        """
        try:
            connection = await accept(request)
        except PEER_ERRORS as error:
            if self._forget(request):
                self._log.log(logging.INFO, "the handshake with %r failed: %s", request, error)
                self.stats.failed += 1
        except Exception as error:
            is_wanted = self._forget(request)
            request.abort()
            if is_wanted:
                return Failure(error)
        except BaseException:  # the event loop ends, or the task was cancelled
            self._end(request)
            raise
        else:
            if self._forget(request):
                self.stats.accepted += 1
                return connection
            connection.abort()
        return None

    def __len__(self) -> int:
        """Return the number of handshakes under way."""
        return len(self._under_way)

    def take(self) -> C | Failure | None:
        """Return the connection that was established first, or a Failure; None if there is none."""
        return self._outcomes.popleft() if self._outcomes else None

    def close(self) -> None:
        """End all handshakes, and abort the connections that no task has taken. Idempotent."""
        for request in list(self._under_way):
            self._end(request)
        while (outcome := self.take()) is not None:
            if not isinstance(outcome, Failure):
                outcome.abort()

    def _end(self, request: R) -> None:
        self._forget(request)
        request.abort()

    def _forget(self, request: R) -> bool:
        """Remove a handshake that has ended. Return False if it was removed before."""
        if request not in self._under_way:
            return False
        request.on_replied = None
        del self._under_way[request]
        if self._is_full:
            self._is_full = False
            self._on_change()
        return True
