"""QueuePairEvents: dispatches asynchronous events to the handlers of their queue pairs."""

from __future__ import annotations

from collections.abc import Callable

from aiordma._native import ffi
from aiordma.enums import AsyncEventType
from aiordma.errors import RdmaError
from aiordma.verbs import AsyncEvent, CompletionQueue, QueuePair

_E = AsyncEventType
_FAILURES = {
    _E.QP_FATAL: "its queue pair failed",
    _E.QP_REQ_ERR: (
        "the peer sent an invalid request, for example one larger than the receive buffer"
    ),
    _E.QP_ACCESS_ERR: "the peer accessed memory in a way that is not allowed",
    _E.CQ_ERR: "its completion queue overflowed",
}


class QueuePairEvents:
    """The queue pairs of a LoopDevice, and the handlers of their asynchronous events."""

    def __init__(self) -> None:
        # By the key in the wr_ids: a new queue pair can get the address of a destroyed one.
        self._handlers: dict[int, tuple[set[int], Callable[[AsyncEvent], None]]] = {}

    def add(
        self, key: int, qp: QueuePair, cq: CompletionQueue, handler: Callable[[AsyncEvent], None]
    ) -> None:
        """Call `handler` with the events of the queue pair and of its completion queue."""
        addresses = {ffi.cast("uintptr_t", pointer) for pointer in (qp.pointer, cq.open_pointer)}
        self._handlers[key] = {int(address) for address in addresses}, handler

    def remove(self, key: int) -> None:
        """Remove the handler with this key, when its queue pair is destroyed."""
        self._handlers.pop(key, None)

    def dispatch(self, event: AsyncEvent) -> None:
        """Call the handler of the event's queue pair, or of all that share its queue."""
        for addresses, handler in list(self._handlers.values()):
            if event.element in addresses:
                handler(event)


def failure_of(event: AsyncEvent) -> RdmaError | None:
    """Return the error of a queue pair that failed with this event; None for other events."""
    reason = _FAILURES.get(event.type)
    return RdmaError(f"the connection failed: {reason} ({event.type.name})") if reason else None
