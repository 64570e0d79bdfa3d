"""probe(): a request of no bytes, by which the peer's device shows that it answers."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.enums import WcOpcode, WrOpcode
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
        sends.post(write_nothing, Probe(WcOpcode.RDMA_WRITE))
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
    request = Probe(WcOpcode.RDMA_READ, on_end)
    try:
        sends.post(_read_nothing, request, is_read=True)
    except VerbsError:
        sends.unreserve()
        sends.keep_until_destroyed(request)
        raise
    return True


class Probe:
    """A request without memory that is in flight."""

    __slots__ = ("_on_end", "opcode")

    def __init__(self, opcode: WcOpcode, on_end: Callable[[], None] | None = None) -> None:
        self.opcode = opcode
        self._on_end = on_end

    def release(self) -> None:
        """Note that the request has ended."""
        if self._on_end is not None:
            self._on_end()


def _read_nothing(qp: QueuePair, wr_id: int, flags: int) -> None:
    qp.post_list(wr_id, WrOpcode.RDMA_READ, [], flags=flags)
