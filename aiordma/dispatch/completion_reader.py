"""CompletionReader: polls the completion queues of a device; the completions for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from aiordma._native import fast_path, ffi
from aiordma.errors import VerbsError
from aiordma.loop import call_each
from aiordma.verbs import CompletionQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from aiordma._native._lib import IbvWc
    from aiordma.dispatch.shared_completion_queue import SharedCompletionQueue

# A wr_id has two parts: above these bits the key of the handler, in them the request's number.
KEY_SHIFT = fast_path.KEY_SHIFT
LOW_BITS = (1 << KEY_SHIFT) - 1
POLL_BATCH = fast_path.BATCH
"""The largest number of completions in a batch. Fewer mean that the queue is empty now."""


class CompletionHandler(Protocol):
    """The handler of a queue pair's completions."""

    def complete(self, number: int, wc: IbvWc) -> None:
        """Handle the completion of a request. `wc` is overwritten afterwards. Must not block."""

    def device_failed(self, error: VerbsError) -> None:
        """Fail all requests: the device was removed or failed, and completes nothing any more."""


class CompletionReader:
    """A reader that takes completions in batches. C code handles most of them: see fast_path/.

    `on_pending` is called when a batch contains completions for Python, or when a queue pair has
    pending work. `on_failure` is called with an errno and a function of libibverbs if the handling
    of an event fails, `on_full` if a queue might have more completions than a batch.
    """

    def __init__(
        self,
        on_pending: Callable[[], None],
        on_failure: Callable[[int, str], None],
        on_full: Callable[[SharedCompletionQueue], None],
    ) -> None:
        self.dispatcher = fast_path.CompletionDispatcher(on_pending, on_failure, on_full)
        """The C half of this object. C code polls it, too."""
        self._batch = ffi.cast("struct ibv_wc *", self.dispatcher.batch)
        self.attach = self.dispatcher.attach
        """attach(key, sends, receives): these queues get most completions with this key."""
        self.detach = self.dispatcher.detach
        """detach(key): undo attach()."""

    def poll(self, cq: CompletionQueue) -> int:
        """Take up to POLL_BATCH completions. Return their number. Does not block.

        Raises:
            VerbsError: the queue failed (it overflowed, or the device was removed).
        """
        count = self.dispatcher.poll(cq.address)
        return count if count >= 0 else _checked(count)

    def poll_for(self, cq: CompletionQueue, nanoseconds: int) -> int:
        """Call poll() until there is a completion, or for `nanoseconds`. Blocks its thread.

        Raises:
            VerbsError: as poll().
        """
        return _checked(self.dispatcher.poll_for(cq.address, nanoseconds))

    def dispatch(
        self,
        handlers: Mapping[int, CompletionHandler],
        on_notified: Mapping[int, Callable[[], None]],
        device: str,
    ) -> None:
        """Dispatch pending() and notified() to the connections with these keys.

        Each connection gets its own, even if another one raises, or is interrupted by Ctrl-C.
        """

        def complete(wc: IbvWc) -> None:
            handler = handlers.get(wc.wr_id >> KEY_SHIFT)
            if handler is not None:
                handler.complete(wc.wr_id & LOW_BITS, wc)

        def notify(key: int) -> None:
            call = on_notified.get(key)
            if call is not None:  # pragma: no branch - a handler of the batch can detach it
                call()

        try:
            call_each(complete, self.pending(), f"{device}: a completion was not handled")
        finally:
            call_each(notify, self.notified(), f"{device}: a connection was not notified")

    def pending(self) -> Iterable[IbvWc]:
        """Return the completions of the batch for Python. The next poll() overwrites them."""
        count, batch = self.dispatcher.pending, self._batch
        return (batch[0],) if count == 1 else [batch[index] for index in range(count)]

    def notified(self) -> Iterable[int]:
        """Return the keys of the queue pairs with pending work from C code, and clear them."""
        notified = self.dispatcher.notified
        if not notified:
            return ()
        keys = notified[:]
        notified.clear()
        return keys


def _checked(count: int) -> int:
    if count < 0:
        raise VerbsError(abs(count), "ibv_poll_cq")
    return count
