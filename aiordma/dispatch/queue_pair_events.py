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
        # By the key in the wr_ids: the elements of the queue pair and of its queue.
        self._elements: dict[int, tuple[int, int]] = {}
        self._handlers: dict[int, Handler] = {}
        """The handlers by the elements of the queue pairs."""
        self._lock = threading.Lock()  # queue pairs are added in worker threads

    def add(self, key: int, qp: QueuePair, cq: CompletionQueue, handler: Handler) -> None:
        """Call `handler` with the events of the queue pair and of its completion queue."""
        with self._lock:
            self._elements[key] = qp.element, cq.element
            self._handlers[qp.element] = handler

    def remove(self, key: int) -> None:
        """Remove the handler with this key, when its queue pair is destroyed."""
        with self._lock:
            elements = self._elements.pop(key, None)
            if elements is not None:
                self._handlers.pop(elements[0], None)

    def dispatch(self, event: AsyncEvent) -> None:
        """Call the handler of the event's queue pair, or of all that share its queue."""
        with self._lock:
            if event.type is _E.CQ_ERR:
                handlers = self._sharing(event.element)
            else:
                handler = self._handlers.get(event.element)
                handlers = [] if handler is None else [handler]
        for handler in handlers:
            handler(event)

    def _sharing(self, cq: int) -> list[Handler]:
        """Return the handlers of the queue pairs that share a completion queue, which has failed.

        This searches all of them. So adding a queue pair costs less.
        """
        return [self._handlers[qp] for qp, queue in self._elements.values() if queue == cq]


def failure_of(event: AsyncEvent) -> RdmaError | None:
    """Return the error of a queue pair that failed with this event; None for other events."""
    reason = _FAILURES.get(event.type)
    return RdmaError(f"the connection failed: {reason} ({event.type.name})") if reason else None
