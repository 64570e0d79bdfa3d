"""QueuePairEvents: dispatches asynchronous events to the handlers of their queue pairs."""

from __future__ import annotations

import threading
from collections.abc import Callable

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


Handler = Callable[[AsyncEvent], None]


class QueuePairEvents:
    """The queue pairs of a LoopDevice, and the handlers of their asynchronous events."""

    def __init__(self) -> None:
        # For each queue pair and queue, the handlers by the key in the wr_ids.
        self._handlers: dict[int, dict[int, Handler]] = {}
        self._elements: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()  # queue pairs are added in worker threads

    def add(self, key: int, qp: QueuePair, cq: CompletionQueue, handler: Handler) -> None:
        """Call `handler` with the events of the queue pair and of its completion queue."""
        with self._lock:
            self._elements[key] = qp.element, cq.element
            for element in self._elements[key]:
                self._handlers.setdefault(element, {})[key] = handler

    def remove(self, key: int) -> None:
        """Remove the handler with this key, when its queue pair is destroyed."""
        with self._lock:
            for element in self._elements.pop(key, ()):
                del self._handlers[element][key]
                if not self._handlers[element]:
                    del self._handlers[element]

    def dispatch(self, event: AsyncEvent) -> None:
        """Call the handler of the event's queue pair, or of all that share its queue."""
        with self._lock:
            handlers = [*self._handlers.get(event.element, {}).values()]
        for handler in handlers:
            handler(event)


def failure_of(event: AsyncEvent) -> RdmaError | None:
    """Return the error of a queue pair that failed with this event; None for other events."""
    reason = _FAILURES.get(event.type)
    return RdmaError(f"the connection failed: {reason} ({event.type.name})") if reason else None
