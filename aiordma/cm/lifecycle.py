"""CmLifecycle: an id's state, the events that move it, the waiting for them, and its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiordma.cm.failures import error_for_event
from aiordma.cm.handle import IdHandle
from aiordma.cm.states import FINAL, WAITING, CmCall, CmState, after_call, after_event
from aiordma.dispatch import CmDispatcher
from aiordma.enums import CmEventType
from aiordma.errors import BusyError, LocalClosed, PeerClosed, RdmaError
from aiordma.loop import Loop, WaitQueue
from aiordma.rdmacm import CmEvent, CmId

_ANSWERS = frozenset({CmEventType.CONNECT_RESPONSE, CmEventType.ESTABLISHED})
_QUERY_FAILURES = frozenset({CmEventType.ADDR_ERROR, CmEventType.ROUTE_ERROR})


class CmLifecycle:
    """What every asynchronous id does, whatever it is used for.

    Calls move the state before they are made, so that an event that overtakes their return finds
    it; events move it as the table in `aiordma.cm.states` says. Waiting is for a change of state:
    an event is never lost with the task that waited for it.
    """

    def __init__(
        self,
        loop: Loop,
        dispatcher: CmDispatcher,
        cm_id: CmId,
        state: CmState,
        event: CmEvent | None,
    ) -> None:
        self.loop = loop
        self.state = state
        self.event = event
        """The last event: what the peer said is in it, until the next one comes."""
        self.established: CmEvent | None = None
        """The event that told of the connection: the peer's answer to connect() is in it."""
        self.on_change: Callable[[], None] | None = None
        """Called on the loop's thread after each event, and after abort()."""
        self.handle = IdHandle(loop, cm_id)
        self._dispatcher = dispatcher
        self._changed = WaitQueue(loop)
        self._failure: CmEvent | None = None
        self.handle.on_released(dispatcher.release)
        dispatcher.register(cm_id, self)

    @property
    def cm_id(self) -> CmId:
        """The id itself."""
        return self.handle.cm_id

    # --- events ---

    def handle_event(self, event: CmEvent) -> None:
        """Take an event from the dispatcher."""
        before, self.state = self.state, after_event(self.state, event.type)
        self.event = event
        if event.type in _ANSWERS:
            self.established = event
        if self._is_failure(event, before):
            self._failure = event
        self._notify()

    def _is_failure(self, event: CmEvent, before: CmState) -> bool:
        if self.state in FINAL:
            return before not in FINAL
        return self.state is CmState.DISCONNECTED or event.type in _QUERY_FAILURES

    def _notify(self) -> None:
        self._changed.wake_all()
        if self.on_change is not None:
            self.on_change()

    # --- calls and waiting ---

    def _enter(self, call: CmCall) -> CmState:
        """Move to the state in which `call` leaves the id; the one before, to fall back to."""
        before, self.state = self.state, self._allowed(call)
        return before

    def _allowed(self, call: CmCall) -> CmState:
        """The state to which `call` would lead; raises if it is not allowed now."""
        state = after_call(self.state, call)
        if state is None:
            raise self._misuse(call)
        return state

    def _call_now(self, call: CmCall, function: Callable[[], None]) -> None:
        before = self._enter(call)
        try:
            function()
        except BaseException:
            self.state = before
            raise

    async def _call_in_worker(
        self, call: CmCall, function: Callable[[], None], *, parked: bool = False
    ) -> None:
        before = self._enter(call)
        expected = self.state
        try:
            await self.handle.call(function, parked=parked)
        except Exception:
            if self.state is expected:
                self.state = CmState.FAILED if call is CmCall.ACCEPT else before
            raise

    async def _wait_for(self, peer: str, *wanted: CmState) -> None:
        """Wait until nothing is under way; the id must then stand in one of the states `wanted`."""
        while self.state in WAITING:
            if len(self._changed):
                raise BusyError("another task is waiting for this id")
            await self._changed.wait()
        if self.state not in wanted:
            raise self._error(peer, wanted[0])

    def failure(self, peer: str) -> RdmaError | None:
        """Why the id, or its last query, failed; None if it has not."""
        return error_for_event(self._failure, peer) if self._failure is not None else None

    def _error(self, peer: str, wanted: CmState) -> RdmaError:
        if self.state is CmState.CLOSED:
            return LocalClosed("closed while waiting")
        text = f"the id is {self.state.name}, not {wanted.name}"
        return self.failure(peer) or RdmaError(text)

    def _misuse(self, call: CmCall) -> RdmaError:
        if self.state in (CmState.CLOSED, CmState.REFUSED):
            return LocalClosed(f"{call.name.lower()}: the id is closed")
        if self.state is CmState.DISCONNECTED:
            return PeerClosed(f"{call.name.lower()}: the peer closed the connection")
        return RdmaError(f"{call.name.lower()} is not possible in state {self.state.name}")

    # --- the end ---

    def abort(self) -> None:
        """Close at once: waiters get LocalClosed, everything is destroyed in the background.

        Idempotent. See rdma_destroy_id(3).
        """
        if self.state is not CmState.CLOSED:
            self.abandon()
            self._notify()

    def abandon(self) -> None:
        """abort() without telling anyone who waits; callable from any thread. Idempotent."""
        if self.state is CmState.CLOSED:
            return
        self.state = CmState.CLOSED
        self._failure = None
        self._dispatcher.forget(self.cm_id)
        self.handle.destroy()

    async def aclose(self) -> None:
        """abort(), and wait until everything is destroyed. Idempotent.

        Cancelling stops the waiting only.
        """
        self.abort()
        await self.handle.wait_destroyed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "state", CmState.CLOSED) is CmState.CLOSED:
            return
        name = repr(self)
        self.abandon()
        warnings.warn(f"unclosed {name}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state.name} at {id(self):#x}>"
