"""probe(): a request of no bytes, by which the peer's device shows that it answers."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.enums import WrOpcode
from aiordma.errors import VerbsError
from aiordma.qp.send_queue import SendQueue, write_nothing
from aiordma.verbs import QueuePair


def probe(sends: SendQueue, on_end: Callable[[], None], *, is_read: bool) -> bool:
    """Post a read or a write of no bytes, to which the peer's device responds.

    `on_end` is called when it has ended. Return False if the queue is full: nothing is posted.

    Raises:
        VerbsError: the device refused it. `on_end` is called when the queue pair is destroyed.
    """
    if not sends.try_reserve():
        return False
    request = _Probe(on_end)
    try:
        sends.post(_read_nothing if is_read else write_nothing, request, is_read=is_read)
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
