"""EventChannel: the fd on which rdma_cm events arrive; OwnChannel: one that an id has to itself."""

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


class OwnChannel(EventChannel):
    """An event channel that one id has to itself, closed when the last of its holders lets go.

    Its holders are that id; the ids of connection requests that came by it, until they are moved to
    another channel; and the loop that watches its fd. So each may go when it likes, in any thread:
    the channel outlives all ids on it, and its fd is not closed under a loop.
    """

    __slots__ = ("_holders", "_lock")

    def __init__(self) -> None:
        """Open a channel, held once. Raises: VerbsError, as EventChannel."""
        super().__init__()
        self._holders = 1
        # Reentrant: an object may be closed by the garbage collector, in the middle of this.
        self._lock = RLock()

    def acquire(self) -> OwnChannel:
        """One holder more; itself. Whoever calls this must know of one that does not let go yet."""
        with self._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """One holder less."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self.close()
