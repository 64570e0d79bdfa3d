"""LastReceive: waits until a queue pair has taken its last receive from a shared receive queue."""

from __future__ import annotations

import threading
from collections.abc import Callable

from aiordma.enums import QpState
from aiordma.errors import VerbsError
from aiordma.loop import Loop, call_threadsafe
from aiordma.verbs import Device, QueuePair, QueuePairAttributes

LAST_RECEIVE_SECONDS = 1.0
"""A device that has not reported the last receive after this time will not report it."""


class LastReceive:
    """The end of a queue pair's use of a shared receive queue.

    A device may drop the completions that were not polled when the queue pair is destroyed, as mlx5
    does. The buffers of such receives would never be posted again. So the queue pair is moved to
    its error state first, and the device reports that the last receive was taken: the event
    IBV_EVENT_QP_LAST_WQE_REACHED. Then all completions are polled.

    rxe and siw do not report it, and drop no completions.
    """

    def __init__(self, loop: Loop, drain: Callable[[Callable[[], None]], None]) -> None:
        """`drain` polls all completions of the queue pair, then calls its argument."""
        self._loop = loop
        self._drain = drain
        self._changed = threading.Condition()
        self._is_over = False

    @staticmethod
    def is_needed(device: Device) -> bool:
        """Return False if the device drops no completions of a destroyed queue pair."""
        return not (device.attributes.is_rxe or device.attributes.is_siw)

    def reached(self) -> None:
        """Poll the remaining completions: the device has reported the last receive."""
        self._drain(self.stop)

    def stop(self) -> None:
        """End the wait: there are no completions any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, qp: QueuePair) -> None:
        """End the queue pair, and wait until its last receive has completed.

        Waits at most twice LAST_RECEIVE_SECONDS. Called in a worker thread before the queue pair
        is destroyed.
        """
        if self._loop.is_closed():  # so that the shared receive queue is not used any more
            return
        try:
            qp.modify(QueuePairAttributes.to_state(QpState.ERR))
        except VerbsError:  # the device was removed
            return
        if not self._wait():
            call_threadsafe(self._loop, self.reached)
            self._wait()

    def _wait(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, LAST_RECEIVE_SECONDS)
