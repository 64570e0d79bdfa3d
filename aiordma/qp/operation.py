"""Operation: a request that a task waits for, and the memory that is in flight for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.enums import WcOpcode, WrOpcode
from aiordma.errors import RdmaError, VerbsError
from aiordma.loop import cancellation_of, future_factory, wake
from aiordma.qp.data_path import EndpointCallbacks
from aiordma.qp.post_list import MemoryRequest
from aiordma.qp.send_queue import Post, SendQueue

if TYPE_CHECKING:
    from aiordma._native._fast_path import Transfer
    from aiordma.dispatch import BusyPoll
    from aiordma.loop import Loop
    from aiordma.loop.protocol import LoopFuture

WC_OPCODE_OF = {
    WrOpcode.SEND: WcOpcode.SEND,
    WrOpcode.RDMA_WRITE: WcOpcode.RDMA_WRITE,
    WrOpcode.RDMA_READ: WcOpcode.RDMA_READ,
    WrOpcode.ATOMIC_FETCH_AND_ADD: WcOpcode.FETCH_ADD,
    WrOpcode.ATOMIC_CMP_AND_SWP: WcOpcode.COMP_SWAP,
}

# Requests that are posted after these can overtake them at the peer.
READS_AND_ATOMICS = {WcOpcode.RDMA_READ, WcOpcode.COMP_SWAP, WcOpcode.FETCH_ADD}


class Operation:
    """A read, a write or a send that a task waits for.

    Its memory is in flight from its posting to its end, even if the task was cancelled.
    """

    __slots__ = (
        "_over",
        "_release_memory",
        "future",
        "is_read",
        "on_abandoned_end",
        "opcode",
        "succeeded",
    )

    error = 0
    """Always 0. A Transfer, which is used in the same places, can have an errno here."""

    def __init__(
        self, future: LoopFuture, opcode: WcOpcode, release_memory: Callable[[], None]
    ) -> None:
        """`release_memory` is called when the device does not use the memory any more."""
        self.opcode = opcode
        self.is_read = opcode in READS_AND_ATOMICS
        """True if requests that are posted after it can overtake it at the peer."""
        self.future = future
        """Set at the end. Cancelling it does not stop the device."""
        self._release_memory = release_memory
        self._over = False
        self.succeeded = False
        self.on_abandoned_end: Callable[[], None] | None = None
        """Called at the end of an operation whose waiter was cancelled."""

    def release(self) -> None:
        """Release the memory and wake the waiter: the request ended, successfully or not."""
        self._release_memory()
        if self.on_abandoned_end is not None:
            self.on_abandoned_end()
        self._over = True  # stop_waiting(), inlined: this runs for each operation
        if not self.future.done():
            wake(self.future)

    def stop_waiting(self) -> None:
        """Wake the waiter. If the request has not ended, its end will not be reported."""
        self._over = True
        if not self.future.done():
            wake(self.future)

    def is_over(self) -> bool:
        """Return True if the waiter can go on.

        The future does not show that: it is also done when the waiter was cancelled.
        """
        return self._over

    @staticmethod
    def withdraw() -> bool:
        """Return False: an operation is posted. A Transfer that is not posted can be dropped."""
        return False


class Operations:
    """Posts requests to the send queue, and waits for the end of each.

    If the loop allows it, a request on registered memory in one piece is a Transfer instead. It is
    posted, awaited and completed in C. Only its failure and busy polling are handled here.
    """

    def __init__(
        self, loop: Loop, sends: SendQueue, callbacks: EndpointCallbacks, busy: BusyPoll
    ) -> None:
        self.loop = loop
        self.sends = sends
        self.callbacks = callbacks
        self._busy = busy
        self._cancel_checkpoint = cancellation_of(type(loop))
        self.make_future = future_factory(loop)
        """Makes the future that the waiter of an operation awaits: see future_factory()."""
        # A loop such as trio needs a checkpoint in each operation. A transfer has none.
        if self._cancel_checkpoint is None:
            sends.core.allow_transfers(self.make_future)
            sends.core.await_transfers(self.finish, self.abandoned, busy.is_on)

    async def perform(
        self, opcode: WcOpcode, post: Post, release_memory: Callable[[], None]
    ) -> None:
        """Post a request, and wait for its end.

        `release_memory` is called in every case, when the device does not use the memory any more.

        Cancelling stops the waiting only. After a cancelled read or atomic, later requests are
        fenced until it has ended: the caller might send the peer a message that its memory is free.

        Raises:
            WorkRequestError: the request failed, and with it the connection.
            PeerClosed, DeviceRemoved, LocalClosed: the connection ended before.
        """
        operation = Operation(self.make_future(), opcode, release_memory)
        if self._cancel_checkpoint is None and self.sends.try_reserve():
            self._post_reserved(post, operation)
        else:
            await self._post(post, operation)
        await self.finish(operation)

    async def finish(self, operation: Operation | Transfer) -> None:
        """Wait for the end of a posted request; see perform().

        Raises:
            WorkRequestError, PeerClosed, DeviceRemoved, LocalClosed: as perform().
            VerbsError: the device has refused the request, which ended the connection.
        """
        try:
            if self._busy.is_on:
                await self._busy.until(operation.is_over, self._busy.nanoseconds)
            await operation.future
        except BaseException:
            self.abandoned(operation)
            raise
        if operation.succeeded:
            return
        if operation.error:
            raise self._post_error(operation)
        await self.callbacks.wait_ended()
        raise self.callbacks.end_reason()

    def abandoned(self, operation: Operation | Transfer) -> None:
        """The task that waits for the end of the operation was cancelled: see perform()."""
        if operation.error:
            self._post_error(operation)
        elif operation.is_read and not operation.withdraw() and not operation.is_over():
            operation.on_abandoned_end = self.sends.fence()

    def _post_error(self, operation: Operation | Transfer) -> RdmaError:
        return self.callbacks.post_failed(VerbsError(operation.error, "ibv_post_send"))

    async def _post(self, post: Post, operation: Operation) -> None:
        sends = self.sends
        try:
            if self._cancel_checkpoint is not None:
                await self._cancel_checkpoint()
            self.callbacks.check_open()
            if not sends.try_reserve():
                await sends.reserve()
        except BaseException:
            operation.release()
            raise
        self._post_reserved(post, operation)

    def _post_reserved(self, post: Post, operation: Operation) -> None:
        sends = self.sends
        try:
            self.callbacks.check_open()
            if isinstance(post, MemoryRequest):
                sends.post_batched(post, operation, operation.is_read)
            else:
                sends.post(post, operation, is_read=operation.is_read)
        except VerbsError as error:
            # libsiw keeps the request although it reports it as failed.
            sends.unreserve()
            sends.keep_until_destroyed(operation)
            raise self.callbacks.post_failed(error) from None
        except BaseException:
            # In flight after a Ctrl-C: the request is posted, or will be.
            if not sends.is_in_flight(operation):
                sends.unreserve()
                operation.release()
            raise
