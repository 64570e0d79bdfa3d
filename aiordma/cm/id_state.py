"""IdState: the state of an id, and the events that led to it."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.cm import states
from aiordma.cm.failures import error_for_event
from aiordma.cm.states import TRANSITIONS, CmCall, CmState, after_call
from aiordma.enums import CmEventType
from aiordma.errors import LocalClosed, PeerClosed, RdmaError
from aiordma.rdmacm import CmEvent

_ANSWERS = frozenset({CmEventType.CONNECT_RESPONSE, CmEventType.ESTABLISHED})


class IdState:
    """Calls and events move an id from state to state, according to `aiordma.cm.states`.

    A call moves the state before the C function is called. An event that arrives before that
    function has returned then finds the state that it belongs to.
    """

    __slots__ = ("_failure", "current", "established", "event", "is_closed", "request")

    def __init__(self, state: CmState, event: CmEvent | None) -> None:
        self.current = state
        """The state. CLOSED is final, so change it by move()."""
        self.is_closed = state is states.CLOSED
        """True if the state is CLOSED."""
        self.event = event
        """The last event. It holds the peer's private data until the next event arrives."""
        self.request = event if state is states.REQUESTED else None
        """The CONNECT_REQUEST event of a request. Later events do not replace it."""
        self.established: CmEvent | None = None
        """The event that reported the connection. It holds the peer's answer to connect()."""
        self._failure: CmEvent | None = None

    def move(self, state: CmState) -> None:
        """Move to `state`, unless the id is closed."""
        self.current = state
        if self.is_closed:  # perhaps just now, by another thread
            self.current = states.CLOSED

    def on_event(self, event: CmEvent) -> None:
        """Move to the state that `event` leads to, and store the event."""
        kind, before = event.type, self.current
        state, is_failure = TRANSITIONS[before].get(kind, (before, False))
        self.move(state)
        self.event = event
        if kind in _ANSWERS:
            self.established = event
        if is_failure:
            self._failure = event

    # --- calls ---

    def check_allowed(self, call: CmCall) -> CmState:
        """Return the state that `call` leads to.

        Raises:
            LocalClosed, PeerClosed, RdmaError: the call is not allowed in this state.
        """
        state = after_call(self.current, call)
        if state is None:
            raise self._not_allowed(call)
        return state

    def enter(self, call: CmCall) -> CmState:
        """Move to the state that `call` leads to. Return the state before, for call_failed().

        Raises: as check_allowed().
        """
        before = self.current
        self.move(self.check_allowed(call))
        return before

    def call(self, call: CmCall, function: Callable[[], None]) -> None:
        """Enter `call` and call `function`. An exception moves the state back."""
        before = self.enter(call)
        try:
            function()
        except BaseException:
            self.move(before)
            raise

    def call_failed(self, call: CmCall, before: CmState, expected: CmState) -> None:
        """Move back to `before` after a failed C call, unless an event has moved the id since."""
        if self.current is expected:
            self.move(states.FAILED if call is states.ACCEPT else before)

    # --- errors ---

    def failure(self, peer: str) -> RdmaError | None:
        """Return the reason why the id, or its last query, failed; None if neither did."""
        return error_for_event(self._failure, peer) if self._failure is not None else None

    def error(self, peer: str, expected: CmState) -> RdmaError:
        """Return the exception for an id that did not reach the state `expected`."""
        if self.current is states.CLOSED:
            return LocalClosed("closed while waiting")
        text = f"the id is in state {self.current.name}, not {expected.name}"
        return self.failure(peer) or RdmaError(text)

    def _not_allowed(self, call: CmCall) -> RdmaError:
        name = call.name.lower()
        if self.current in (states.CLOSED, states.REFUSED):
            return LocalClosed(f"{name}: the id is closed")
        if self.current is states.DISCONNECTED:
            return PeerClosed(f"{name}: the peer closed the connection")
        if self.current is states.REMOVED and (failure := self.failure("the peer")) is not None:
            return failure
        return RdmaError(f"{name} is not possible in state {self.current.name}")

    def check_open(self) -> None:
        """Check that the id is not closed.

        Raises:
            LocalClosed: the id is closed.
        """
        if self.is_closed:
            raise LocalClosed("the id is closed")

    # --- the end ---

    def close(self) -> None:
        """Move to CLOSED, and drop the failure."""
        self.is_closed = True
        self.current = states.CLOSED
        self._failure = None

    def copy_to(self, successor: IdState) -> None:
        """Copy to the state of a migrated id, except the state itself and the last event."""
        successor.request = self.request
        successor.established = self.established
        successor._failure = self._failure
