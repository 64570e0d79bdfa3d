"""Operation: a request that a task waits for, and what is lent to the device for it."""

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

# Other requests that are posted after these may overtake them at the peer.
READS_AND_ATOMICS = {WcOpcode.RDMA_READ, WcOpcode.COMP_SWAP, WcOpcode.FETCH_ADD}


class Operation:
    """From its posting to its end the device has what was lent, whoever still waits for it."""

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
    """Of a Transfer: why the device did not take it."""

    def __init__(
        self, future: LoopFuture, opcode: WcOpcode, release_memory: Callable[[], None]
    ) -> None:
        """`give_back` is called when the device is done with what was lent."""
        self.opcode = opcode
        self.is_read = opcode in READS_AND_ATOMICS
        """Whether others that are posted after it may overtake it at the peer."""
        self.future = future
        """Set at the end. Cancelling leaves that to the device."""
        self._release_memory = release_memory
        self._over = False
        self.succeeded = False
        self.on_abandoned_end: Callable[[], None] | None = None
        """Called at the end of one that nobody waits for any more."""

    def release(self) -> None:
        """It ended, well or not."""
        self._release_memory()
        if self.on_abandoned_end is not None:
            self.on_abandoned_end()
        self._over = True  # as stop_waiting(), for each operation
        if not self.future.done():
            wake(self.future)

    def stop_waiting(self) -> None:
        """Let the waiter go: if it has not ended yet, nobody will hear of its end."""
        self._over = True
        if not self.future.done():
            wake(self.future)

    def is_over(self) -> bool:
        """Whether nobody needs to wait any more. The future does not tell: it may be cancelled."""
        return self._over

    @staticmethod
    def withdraw() -> bool:
        """Of a Transfer: give it up if it was not posted yet; whether that was so."""
        return False


class Operations:
    """Posts requests from the send queue, and waits for the end of each.

    What is registered in one piece is a Transfer instead, where the loop allows that: posted and
    ended in C, so that only the waiting is done here.
    """

    def __init__(
        self, loop: Loop, sends: SendQueue, callbacks: EndpointCallbacks, busy: BusyPoll
    ) -> None:
        self.loop = loop
        self.sends = sends
        self.callbacks = callbacks
        self._busy = busy
        self._cancel_checkpoint = cancellation_of(loop)
        self.make_future = future_factory(loop)
        """A wake-up for the waiter of an operation: see future_of()."""
        if (
            self._cancel_checkpoint is None
        ):  # else a checkpoint is owed, whatever can be done at once
            sends.core.make_future = self.make_future

    async def perform(
        self, opcode: WcOpcode, post: Post, release_memory: Callable[[], None]
    ) -> None:
        """Post one, and wait for its end. `give_back` is called when the device is done, always.

        Cancelling stops the waiting only. What is posted after a read that was given up is fenced
        until that has ended: whoever gave it up may go on to tell the peer that its memory is free.

        Raises:
            WorkRequestError: it failed, and with it the connection.
            PeerClosed, DeviceRemoved, LocalClosed: the connection ended before.
        """
        operation = Operation(self.make_future(), opcode, release_memory)
        if self._cancel_checkpoint is None and self.sends.try_reserve():
            self._post_reserved(post, operation)
        else:
            await self._post(post, operation)
        await self.finish(operation)

    async def finish(self, operation: Operation | Transfer) -> None:
        """Wait for the end of one that was posted; see perform().

        Raises:
            WorkRequestError, PeerClosed, DeviceRemoved, LocalClosed: as perform().
            VerbsError: the device has refused it, and with that ended the connection.
        """
        try:
            if self._busy.is_on:
                await self._busy.until(operation.is_over, self._busy.nanoseconds)
            await operation.future
        except BaseException:
            if operation.error:
                self._post_error(operation)
            elif operation.is_read and not operation.withdraw() and not operation.is_over():
                operation.on_abandoned_end = self.sends.fence()
            raise
        if operation.succeeded:
            return
        if operation.error:
            raise self._post_error(operation)
        await self.callbacks.wait_ended()
        raise self.callbacks.end_reason()

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
            # libsiw keeps a request that it reports as failed.
            sends.unreserve()
            sends.keep_until_destroyed(operation)
            raise self.callbacks.post_failed(error) from None
        except BaseException:
            if not sends.is_in_flight(
                operation
            ):  # if it does, a Ctrl-C came, and it is posted or will be
                sends.unreserve()
                operation.release()
            raise
