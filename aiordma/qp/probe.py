"""probe(): a request of no bytes, by which the peer's device shows that it answers."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.enums import WrOpcode
from aiordma.errors import VerbsError
from aiordma.qp.send_queue import SendQueue, write_nothing
from aiordma.verbs import QueuePair


def probe_by_write(sends: SendQueue) -> bool:
    """Post a write of no bytes. Return False if the queue is full: nothing is posted.

    Raises:
        VerbsError: the device refused it.
    """
    if not sends.try_reserve():
        return False
    try:
        sends.post(write_nothing, None)
    except VerbsError:
        sends.unreserve()
        raise
    return True


def probe_by_read(sends: SendQueue, on_end: Callable[[], None]) -> bool:
    """Post a read of no bytes. Return False if the queue is full: nothing is posted.

    `on_end` is called when the read has completed, or when the queue pair is destroyed.

    Raises:
        VerbsError: the device refused it.
    """
    if not sends.try_reserve():
        return False
    request = _Probe(on_end)
    try:
        sends.post(_read_nothing, request, is_read=True)
    except VerbsError:
        sends.unreserve()
        sends.keep_until_destroyed(request)
        raise
    return True


class _Probe:
    """A request without memory that is in flight."""

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def release(self) -> None:
        self._on_end()


def _read_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    qp.post_list(wr_id, WrOpcode.RDMA_READ, [], flags=flags)
