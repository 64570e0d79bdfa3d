"""QueuePairs: whose queue pair a device's event is about, and what the event means."""

from __future__ import annotations

from collections.abc import Callable

from aiordma._native import ffi
from aiordma.enums import AsyncEventType
from aiordma.errors import RdmaError
from aiordma.verbs import AsyncEvent, CompletionQueue, QueuePair

_E = AsyncEventType
_FAILURES = {
    _E.QP_FATAL: "its queue pair failed",
    _E.QP_REQ_ERR: "the peer sent what cannot be: larger than the receive buffer, for one",
    _E.QP_ACCESS_ERR: "the peer accessed memory in a way that is not allowed",
    _E.CQ_ERR: "its completion queue overflowed",
}


class QueuePairEvents:
    """The queue pairs of a LoopDevice, and who is to be told what happens to them."""

    def __init__(self) -> None:
        # By the key of the owner: an address may be another queue pair's as soon as it is freed.
        self._owners: dict[int, tuple[set[int], Callable[[AsyncEvent], None]]] = {}

    def add(
        self, key: int, qp: QueuePair, cq: CompletionQueue, handler: Callable[[AsyncEvent], None]
    ) -> None:
        """Have the loop call `tell` with what happens to the queue pair, and to its queue."""
        addresses = {ffi.cast("uintptr_t", pointer) for pointer in (qp.pointer, cq.open_pointer)}
        self._owners[key] = {int(address) for address in addresses}, handler

    def remove(self, key: int) -> None:
        """It is destroyed."""
        self._owners.pop(key, None)

    def dispatch(self, event: AsyncEvent) -> None:
        """Pass an event on: to one owner, or to all that share a completion queue."""
        for addresses, tell in list(self._owners.values()):
            if event.element in addresses:
                tell(event)


def failure_of(event: AsyncEvent) -> RdmaError | None:
    """How a connection ends by this event of its queue pair; None if it does not."""
    why = _FAILURES.get(event.type)
    return RdmaError(f"the connection failed: {why} ({event.type.name})") if why else None
