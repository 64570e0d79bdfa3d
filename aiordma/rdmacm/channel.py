"""EventChannel: the fd on which rdma_cm events arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import check, last_error
from aiordma.rdmacm.event import CmEvent, read_event

if TYPE_CHECKING:
    from aiordma._native._lib import CmEventArray, EventChannelPtr

EVENT_BATCH = 16


class EventChannel:
    """`struct rdma_event_channel`, its fd non-blocking. See rdma_create_event_channel(3)."""

    __slots__ = ("_events", "fd", "pointer")

    pointer: EventChannelPtr | None
    fd: int
    _events: CmEventArray

    def __init__(self) -> None:
        """Open a channel. The first one in a process looks for devices, which takes a while.

        Raises:
            VerbsError: ENODEV or ENOENT (no RDMA device), EACCES (no right to use them), EMFILE.
        """
        pointer = lib.rdma_create_event_channel()
        if pointer == ffi.NULL:
            raise last_error("rdma_create_event_channel")
        self._take(pointer)

    @classmethod
    def borrow(cls, pointer: EventChannelPtr) -> EventChannel:
        """A channel that belongs to an id, made non-blocking; not to be closed."""
        borrowed = cls.__new__(cls)
        borrowed._take(pointer)
        return borrowed

    def _take(self, pointer: EventChannelPtr) -> None:
        self.pointer = pointer
        self.fd = pointer.fd
        self._events = ffi.new("struct aiordma_cm_event[]", EVENT_BATCH)
        check(lib.aiordma_set_nonblocking(self.fd), "fcntl")

    @property
    def open_pointer(self) -> EventChannelPtr:
        """The C channel.

        Raises:
            ValueError: it is closed.
        """
        if self.pointer is None:
            raise ValueError("the event channel is closed")
        return self.pointer

    def get_events(self) -> list[CmEvent]:
        """Read up to EVENT_BATCH pending events, each acknowledged already. Does not block.

        See rdma_get_cm_event(3) and rdma_ack_cm_event(3).

        Raises:
            VerbsError: EACCES when the process changed its credentials since it opened the channel.
        """
        if self.pointer is None:
            return []
        count = lib.aiordma_get_cm_events(self.pointer, self._events, EVENT_BATCH)
        if count < 0:
            raise last_error("rdma_get_cm_event")
        return [read_event(self._events[index]) for index in range(count)]

    def close(self) -> None:
        """Close the channel, which every id must have left: rdma_destroy_event_channel(3).

        Idempotent. Take the fd out of the event loop first.
        """
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            lib.rdma_destroy_event_channel(pointer)
