"""CmLifecycle: an id's state, the events that move it, and its end."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiordma.cm.failures import error_for_event
from aiordma.cm.handle import IdHandle
from aiordma.cm.states import FINAL, CmCall, CmState, after_call, after_event
from aiordma.enums import CmEventType
from aiordma.errors import LocalClosed, PeerClosed, RdmaError
from aiordma.loop import Loop, checkpoint
from aiordma.loop.context_managers import AsyncBlock
from aiordma.rdmacm import CmEvent, CmId, Route, device_contexts

_ANSWERS = frozenset({CmEventType.CONNECT_RESPONSE, CmEventType.ESTABLISHED})
_QUERY_FAILURES = frozenset({CmEventType.ADDR_ERROR, CmEventType.ROUTE_ERROR})


class CmLifecycle(AsyncBlock):
    """What every id does, in whichever mode, whatever it is used for.

    Calls move the state before they are made, so that an event that overtakes their return finds
    it; events move it as the table in `aiordma.cm.states` says.
    """

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        self.handle = handle
        self.state = state
        self.event = event
        """The last event: what the peer said is in it, until the next one comes."""
        self.established: CmEvent | None = None
        """The event that told of the connection: the peer's answer to connect() is in it."""
        self.context: object = None
        """The user's own."""
        self._failure: CmEvent | None = None
        self._last_addresses = (("", 0), ("", 0))
        self._is_moved = False

    @property
    def loop(self) -> Loop:
        """The loop it belongs to."""
        return self.handle.loop

    @property
    def cm_id(self) -> CmId:
        """The id itself, whose `post_*` calls do not block and may be made directly."""
        return self.handle.cm_id

    # --- what it is ---

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side; `("", 0)` before there is one."""
        if self.state is CmState.CLOSED:
            return self._last_addresses[0]
        address = self.cm_id.local_address
        return address.pair if address is not None else ("", 0)

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the other side; `("", 0)` before there is one."""
        if self.state is CmState.CLOSED:
            return self._last_addresses[1]
        address = self.cm_id.peer_address
        return address.pair if address is not None else ("", 0)

    @property
    def route(self) -> Route:
        """The way to the peer, as far as it is known.

        Raises:
            LocalClosed: the id is closed.
        """
        self._check_open()
        return self.cm_id.route

    # --- events ---

    def handle_event(self, event: CmEvent) -> None:
        """Take note of an event."""
        before, self.state = self.state, after_event(self.state, event.type)
        self.event = event
        if event.type is CmEventType.DEVICE_REMOVAL:
            device_contexts.check_soon()
        if event.type in _ANSWERS:
            self.established = event
        if self._is_failure(event, before):
            self._failure = event

    def _is_failure(self, event: CmEvent, before: CmState) -> bool:
        if self.state in FINAL:
            return before not in FINAL
        return self.state is CmState.DISCONNECTED or event.type in _QUERY_FAILURES

    # --- calls ---

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

    def _call_failed(self, call: CmCall, before: CmState, expected: CmState) -> None:
        """The C call failed: unless an event has moved the id since, it is where it was before."""
        if self.state is expected:
            self.state = CmState.FAILED if call is CmCall.ACCEPT else before

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

    def _check_open(self) -> None:
        if self.state is CmState.CLOSED:
            raise LocalClosed("the id is closed")

    # --- the end ---

    def abort(self) -> None:
        """Close at once: waiters get LocalClosed, everything is destroyed in the background.

        Requests that nobody has taken are rejected. Idempotent. See rdma_destroy_id(3).
        """
        self.abandon()

    def abandon(self) -> None:
        """abort() without telling anyone who waits; callable from any thread. Idempotent."""
        if self.state is CmState.CLOSED:
            return
        self._leave()
        self.handle.destroy()

    def _leave(self) -> None:
        """Have nothing to do with the C id any more."""
        # It is about to be freed, or somebody else's: this is the last time that it can be asked.
        self._last_addresses = self.local_address, self.peer_address
        self.state = CmState.CLOSED
        self._failure = None

    def _move_away(self) -> None:
        """Leave the C id, and all that belongs to it, to another object."""
        self._leave()
        self._is_moved = True

    async def aclose(self) -> None:
        """abort(), and wait until everything is destroyed. Idempotent.

        Cancelling stops the waiting only.
        """
        self.abort()
        if self._is_moved:
            await checkpoint()
        else:
            await self.handle.wait_destroyed()

    @asynccontextmanager
    async def closed_on_failure(self) -> AsyncIterator[None]:
        """Close it if the block fails; nothing of a failed attempt is left when its error arrives.

        A block that is cancelled does not wait for that.
        """
        try:
            yield
        except Exception:
            await self.aclose()
            raise
        except BaseException:
            self.abort()
            raise

    def __del__(self) -> None:
        if getattr(self, "state", CmState.CLOSED) is CmState.CLOSED:
            return
        name = repr(self)
        self.abandon()
        warnings.warn(f"unclosed {name}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state.name} at {id(self):#x}>"
