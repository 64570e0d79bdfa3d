"""EventChannel: the fd on which rdma_cm events arrive. OwnChannel: the channel of one id only."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import check, last_error
from aiordma.rdmacm.event import CmEvent, read_event

if TYPE_CHECKING:
    from aiordma._native._lib import CmEventArray, EventChannelPtr

EVENT_BATCH = 16


class EventChannel:
    """`struct rdma_event_channel`, with a non-blocking fd. See rdma_create_event_channel(3)."""

    __slots__ = ("_events", "fd", "pointer")

    pointer: EventChannelPtr | None
    fd: int
    _events: CmEventArray

    def __init__(self) -> None:
        """Open a channel. The first one in a process lists the devices, which takes a while.

        Raises:
            VerbsError: ENODEV or ENOENT (no RDMA device), EACCES (no permission), EMFILE.
        """
        pointer = lib.rdma_create_event_channel()
        if pointer == ffi.NULL:
            raise last_error("rdma_create_event_channel")
        self.pointer = pointer
        self.fd = pointer.fd
        self._events = ffi.new("struct aiordma_cm_event[]", EVENT_BATCH)
        check(lib.aiordma_set_nonblocking(self.fd), "fcntl")

    @property
    def open_pointer(self) -> EventChannelPtr:
        """The C channel.

        Raises:
            ValueError: the channel is closed.
        """
        if self.pointer is None:
            raise ValueError("the event channel is closed")
        return self.pointer

    def get_events(self) -> list[CmEvent]:
        """Return up to EVENT_BATCH pending events, each acknowledged already. Does not block.

        See rdma_get_cm_event(3) and rdma_ack_cm_event(3).

        Raises:
            VerbsError: EACCES (the process has changed its credentials since it opened the
                channel).
        """
        if self.pointer is None:
            return []
        count = lib.aiordma_get_cm_events(self.pointer, self._events, EVENT_BATCH)
        if count < 0:
            raise last_error("rdma_get_cm_event")
        return list(map(read_event, self._events[0:count]))

    def close(self) -> None:
        """Close the channel: rdma_destroy_event_channel(3). Idempotent.

        First destroy or migrate every id on it, and remove the fd from the event loop.
        """
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            lib.rdma_destroy_event_channel(pointer)


class OwnChannel(EventChannel):
    """The event channel of one id only. It is closed when its last reference is released.

    References belong to that id, to the ids of connection requests that arrived on the channel
    (until they are moved to another channel), and to the loop that watches the fd. Each can be
    released at any time and in any thread: the channel outlives all ids on it, and its fd is not
    closed while a loop watches it.
    """

    __slots__ = ("_lock", "_references")

    def __init__(self) -> None:
        """Open a channel with one reference. Raises: VerbsError, as EventChannel."""
        super().__init__()
        self._references = 1
        # Reentrant: the garbage collector can close an object while this thread has the lock.
        self._lock = RLock()

    def acquire(self) -> OwnChannel:
        """Add a reference and return the channel. The caller makes sure that one exists already."""
        with self._lock:
            self._references += 1
        return self

    def release(self) -> None:
        """Drop a reference. The last one closes the channel."""
        with self._lock:
            self._references -= 1
            if self._references:
                return
        self.close()
