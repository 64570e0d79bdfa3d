"""CompletionReader: what the completion queues of a device say, as far as it is for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import fast_path, ffi
from aiordma.errors import VerbsError
from aiordma.verbs import CompletionChannel, CompletionQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiordma._native._lib import IbvWc

POLL_BATCH = fast_path.BATCH
"""A batch with fewer means that the queue was emptied."""


class CompletionReader:
    """Takes completions in batches. Most are done with in C: see fast_path/.

    Whenever something is left of a batch, or somebody is to look, `on_pending` is called.
    """

    def __init__(self, on_pending: Callable[[], None]) -> None:
        self.dispatcher = fast_path.CompletionDispatcher(on_pending)
        """The C half: it may be polled from there, too."""
        self._batch = ffi.cast("struct ibv_wc *", self.dispatcher.batch)
        self.attach = self.dispatcher.attach
        """attach(key, sends, arrivals): most completions with this key are for these."""
        self.detach = self.dispatcher.detach
        """Undo that."""

    def event(self, channel: CompletionChannel) -> int:
        """Read and acknowledge an event of the channel: the address of a queue, or 0.

        The queue is to be armed, and then polled until it is empty. Does not block.

        Raises:
            VerbsError: EIO after the device was removed; the fd then stays readable for ever.
        """
        address = self.dispatcher.event(channel.address)
        if address < 0:
            raise VerbsError(-address, "ibv_get_cq_event")
        return address

    def arm(self, cq: CompletionQueue) -> None:
        """Have the next completion raise an event. What is there already raises none.

        Raises:
            VerbsError: the device is gone.
        """
        error = self.dispatcher.arm(cq.address)
        if error:
            raise VerbsError(error, "ibv_req_notify_cq")

    def poll(self, cq: CompletionQueue) -> int:
        """Take up to POLL_BATCH completions: how many there were. Does not block.

        Raises:
            VerbsError: the queue is broken (it overran, or the device is gone).
        """
        return _checked(self.dispatcher.poll(cq.address))

    def poll_for(self, cq: CompletionQueue, nanoseconds: int) -> int:
        """poll(), again and again until there is a completion, or so long. Keeps its thread busy.

        Raises:
            VerbsError: as poll().
        """
        return _checked(self.dispatcher.poll_for(cq.address, nanoseconds))

    def pending(self) -> Iterable[IbvWc]:
        """Completions of the batch that are for Python. The next poll() overwrites them."""
        count = self.dispatcher.pending
        if not count:
            return ()
        batch = self._batch
        return (batch[0],) if count == 1 else [batch[index] for index in range(count)]

    def notified(self) -> Iterable[int]:
        """Keys of those whom something was done for in C that they are to hear of."""
        told = self.dispatcher.notified
        if not told:
            return ()
        keys = told[:]
        told.clear()
        return keys


def _checked(count: int) -> int:
    if count < 0:
        raise VerbsError(abs(count), "ibv_poll_cq")
    return count
