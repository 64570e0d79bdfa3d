"""IdHandle: what an id owns in C, and its orderly destruction."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from aiordma.dispatch import destroy_quietly
from aiordma.errors import LocalClosed, RdmaError
from aiordma.loop import (
    Loop,
    SerialJobs,
    WaitQueue,
    hand_over,
    is_forked_child,
    parking,
    run_in_worker,
    workers,
)
from aiordma.rdmacm import CmId
from aiordma.verbs import QueuePair

logger = logging.getLogger(__name__)

T = TypeVar("T")


class IdHandle:
    """An id, the queue pair made for it, and the memory that the queue pair's requests name.

    Calls on the id that may block go to worker threads one after the other, and its destruction
    comes behind them: also behind a call that its cancelled owner no longer waits for.
    """

    def __init__(self, loop: Loop, cm_id: CmId) -> None:
        self.loop = loop
        self.cm_id = cm_id
        self.qp: QueuePair | None = None
        self.slow = False
        """Whether destroying can take seconds, as it can on iWARP."""
        self._jobs = SerialJobs()
        self._cleanups: list[Callable[[], None]] = []
        self._released: list[Callable[[], None]] = []
        self._started = False
        self._finished = False
        self._waiters = WaitQueue(loop)

    def on_destroyed(self, cleanup: Callable[[], None]) -> None:
        """Have a worker thread call `cleanup` once the device can touch no memory any more."""
        self._cleanups.append(cleanup)

    def on_released(self, callback: Callable[[], None]) -> None:
        """Have the loop call `callback` when everything is destroyed."""
        self._released.append(callback)

    async def call(self, function: Callable[[], T], *, parked: bool = False) -> T:
        """Await a call on the id in a worker thread; `parked`: one that may take minutes.

        Cancelling returns at once; a call under way goes on, and destruction waits for it.

        Raises:
            LocalClosed: destruction has begun.
        """
        if self._started:
            raise LocalClosed("closed on this side")
        pool = parking if parked else workers
        return await run_in_worker(self.loop, function, lambda job: self._jobs.submit(job, pool))

    def submit(self, function: Callable[[], None]) -> None:
        """Make a call on the id in a worker thread, with nobody waiting; errors are only logged.

        It is not made once destruction has begun.
        """

        def job() -> None:
            if self._started:
                return
            try:
                function()
            except RdmaError as error:
                logger.debug("ignored: %s", error)

        self._jobs.submit(job)

    def destroy(self) -> None:
        """Begin to destroy everything, in a worker thread. Idempotent. Callable from any thread."""
        if self._started:
            return
        self._started = True
        if is_forked_child():
            self._finished = True  # it is the parent's
        else:
            self._jobs.submit(self._destroy, parking if self.slow else workers)

    async def wait_destroyed(self) -> None:
        """Wait until it is done. Cancelling does not stop it."""
        while not self._finished and not is_forked_child():
            await self._waiters.wait()

    def _destroy(self) -> None:
        # The id first: afterwards rdma_get_cm_event(), on the loop's thread, can no longer be at
        # work on its queue pair.
        destroy_quietly(self.cm_id)
        if self._destroy_qp():
            self._clean_up()
        else:
            # What the queue pair's requests name is never freed: the device may still use it.
            _undestroyed.append((self._cleanups, self._released))
            self._released = []
        hand_over(self.loop, self._finish)

    def _destroy_qp(self) -> bool:
        try:
            if self.qp is not None:
                self.qp.destroy()
        except RdmaError:
            logger.exception("a queue pair could not be destroyed")
            return False
        return True

    def _clean_up(self) -> None:
        for cleanup in reversed(self._cleanups):
            try:
                cleanup()
            except RdmaError:
                logger.exception("%r failed", cleanup)

    def _finish(self) -> None:
        for callback in self._released:
            callback()
        self._released, self._cleanups = [], []
        self._finished = True
        self._waiters.wake_all()


_undestroyed: list[object] = []
