"""SyncCmId: a synchronous rdma_cm id, whose calls run in worker threads."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiordma.cm.async_id import AsyncCmId
from aiordma.cm.base_id import BaseCmId
from aiordma.cm.handle import IdHandle
from aiordma.cm.states import CmState
from aiordma.cm.step import Step
from aiordma.dispatch import CmDispatcher, initialise
from aiordma.enums import PortSpace
from aiordma.errors import BusyError, LocalClosed, RdmaError
from aiordma.loop import Interrupt, blocking_pool, checkpoint, make_in_worker, running_loop
from aiordma.rdmacm import AddrInfo, CmEvent, CmId, OwnChannel
from aiordma.verbs import ProtectionDomain, QueuePairInit

if TYPE_CHECKING:
    from collections.abc import Iterator

# A thread that waits for completions also reads the channel's events. While a step reads them, it
# waits this long for the channel, and then polls its queue again.
READ_LOCK_SECONDS = 0.05


class SyncCmId(BaseCmId):
    """A communication identifier with an event channel of its own, like a C id without a channel.

    For librdmacm it is an asynchronous id: a call starts the operation and does not block. Then a
    worker thread waits for the event, and for cancellation. The id belongs to no loop: each call
    can be awaited on another one. `event` is the event of the last call, until the next call.

    Every event is acknowledged at once. So the restrictions in the man pages do not apply: a
    listener can be closed before the ids of its requests, and a joined group can be left at any
    time.
    """

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        """Called by create(), create_ep(), get_request() and migrate(); not for users."""
        super().__init__(handle, state, event)
        self._channel: OwnChannel | None = handle.channel
        self._is_busy = False
        self._read_lock = threading.Lock()  # held by the thread that reads the channel

    @classmethod
    async def create(cls, port_space: PortSpace = PortSpace.TCP) -> SyncCmId:
        """Make a synchronous id: rdma_create_id(3) with no channel.

        Cancelling leaves nothing behind.

        Raises:
            VerbsError: ENODEV (no RDMA device), EMFILE, ENOMEM.
        """
        loop = running_loop()
        await checkpoint()
        await initialise(loop)
        channel = OwnChannel()
        try:
            cm_id = CmId.create(channel, port_space)
        except BaseException:
            channel.release()
            raise
        return cls(IdHandle(loop, cm_id, channel), CmState.IDLE, None)

    @classmethod
    async def create_ep(
        cls,
        info: AddrInfo,
        pd: ProtectionDomain | None = None,
        init: QueuePairInit | None = None,
    ) -> SyncCmId:
        """Make an endpoint from a result of getaddrinfo(): rdma_create_ep(3).

        An active endpoint is ready to connect: its address and route are resolved, and it has a
        queue pair if `init` is given, in `pd` or in the default protection domain. A passive
        endpoint is ready to listen. If `init` is given, the ids from its get_request() have a queue
        pair made with `pd` and `init`.

        Takes up to 4 seconds. Cancelling returns at once; the endpoint is then destroyed when it
        has been made.

        Raises:
            VerbsError: ENODEV (no device has the address), ETIMEDOUT (no host has the address),
                EADDRINUSE or EADDRNOTAVAIL (the port is in use), ENOMEM, EMFILE, EINVAL.
            DeviceRemoved: the device was removed meanwhile.
            ValueError: an argument is closed.
        """
        loop = running_loop()
        await initialise(loop)

        def make() -> tuple[IdHandle, CmEvent | None]:
            handle = IdHandle(loop, CmId.create_ep(info, pd, init))
            try:
                event = handle.cm_id.take_event()
                handle.move_to_own_channel()  # it has librdmacm's private channel
                if handle.cm_id.has_qp and pd is None:
                    handle.acquire_context()
            except RdmaError:
                handle.destroy()
                raise
            return handle, event

        handle, event = await make_in_worker(
            loop, make, lambda made: made[0].destroy(), blocking_pool.submit
        )
        state = CmState.ADDR_BOUND if info.is_passive else CmState.ROUTE_RESOLVED
        return cls(handle, state, event)

    # --- waiting ---

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Reserve the id for one call, on the running loop."""
        if self._is_busy:
            raise BusyError("another task is waiting for this id")
        self._is_busy = True
        try:
            self.handle.move_to(running_loop())
            yield
        finally:
            self._is_busy = False

    async def _perform(self, step: Step, is_done: Callable[[], bool]) -> None:
        with self._in_use():
            await self.handle.wait(lambda interrupt: self._run(step, is_done, interrupt))

    def _run(self, step: Step, is_done: Callable[[], bool], interrupt: Interrupt) -> None:
        """Run a whole step, in a worker thread."""
        with self._read_lock:
            self._run_locked(step, is_done, interrupt)

    def _run_locked(self, step: Step, is_done: Callable[[], bool], interrupt: Interrupt) -> None:
        if step.call is not None:
            before = self.id_state.enter(step.call)
        expected = self.id_state.current
        try:
            step.run()
        except Exception:
            if step.call is not None:
                self.id_state.call_failed(step.call, before, expected)
            raise
        self._wait_until(is_done, interrupt)

    def _wait_until(self, is_done: Callable[[], bool], interrupt: Interrupt) -> None:
        while not is_done():
            if not interrupt.wait_readable(*self.event_fds()):
                raise LocalClosed("closed while waiting")
            self._read_events()

    def _read_events(self) -> None:
        if self._channel is not None:
            for event in self._channel.get_events():
                self.handle_event(event)

    def event_fds(self) -> list[int]:
        # After a migration the loop reads them, while a thread might still wait for completions.
        return [] if self._channel is None else [self._channel.fd]

    def read_events(self) -> None:
        # If a step is under way, it reads the events itself.
        if self._read_lock.acquire(timeout=READ_LOCK_SECONDS):  # pragma: no branch - real seconds
            try:
                self._read_events()
            finally:
                self._read_lock.release()

    # --- listening ---

    async def get_request(self) -> SyncCmId:
        """Wait for a connection request: rdma_get_request(3), in a worker thread.

        Return its id, which is synchronous and in state REQUESTED; accept or reject it. Cancelling
        loses no request.

        Raises:
            LocalClosed: the id is closed, or was closed during the wait.
            DeviceRemoved: the device of the id was removed.
            BusyError: another task is waiting for this id.
            VerbsError: EMFILE, or the queue pair for the request could not be made. The request is
                then rejected.
        """
        with self._in_use():
            if not self._requests:
                self._check_listening()
            await self.handle.wait(self._wait_for_request)
            if not self._requests:
                self._check_listening()
            request = self._own_requests().pop()
            return SyncCmId(request.handle, CmState.REQUESTED, request.event)

    def _wait_for_request(self, interrupt: Interrupt) -> None:
        with self._read_lock:
            self._wait_until(
                lambda: bool(self._requests) or self.id_state.current is not CmState.LISTENING,
                interrupt,
            )
            self._prepare_request()

    def _prepare_request(self) -> None:
        """Give the first request a channel and a queue pair, in a worker thread.

        The request stays in the queue, so that cancelling does not lose it.
        """
        try:
            request = self._own_requests().pop()
        except IndexError:
            return
        try:
            self._prepare(request.handle)
        except BaseException:
            request.handle.destroy()
            raise
        self._own_requests().put_back(request)
        self._drop_requests_if_closed()

    def _prepare(self, handle: IdHandle) -> None:
        if handle.channel is self._channel:
            handle.move_to_own_channel()
        if self.handle.cm_id.request_qp_arguments is not None and not handle.cm_id.has_qp:
            pd, init = self.handle.cm_id.request_qp_arguments
            if pd is None:
                handle.acquire_context()
            handle.cm_id.create_qp(init, pd)

    def __aiter__(self) -> AsyncIterator[SyncCmId]:
        """Iterate over requests until the id is closed."""
        return self

    async def __anext__(self) -> SyncCmId:
        try:
            return await self.get_request()
        except LocalClosed:
            raise StopAsyncIteration from None

    # --- migration ---

    async def migrate(self) -> AsyncCmId:
        """Move the id to the running loop's event channel: rdma_migrate_id(3).

        Return the new object, and close this one. The new object has the state, the queue pair, the
        events that are not read yet, and the requests that are not taken yet. A listener misses no
        request, as its channel stays the same; the loop reads it from now on. Best called before
        connecting: a task that waits for completions of this object continues to wait.

        Cancelling leaves the id as it is.

        Raises:
            BusyError: a task is waiting for the id, or a call on it is under way.
            LocalClosed: the id is closed.
        """
        dispatcher = await CmDispatcher.of(running_loop())
        with dispatcher.referenced(), self._in_use():
            self.id_state.check_open()
            await self.handle.call(lambda: None)  # waits for a call whose task was cancelled
            self.id_state.check_open()
            with self._read_lock:
                return self._move_to(dispatcher)

    def _move_to(self, dispatcher: CmDispatcher) -> AsyncCmId:
        # On the loop's thread. No thread reads the channel meanwhile.
        if not self._has_listened:
            self.handle.move_to_loop(dispatcher)
        self._channel = None
        successor = AsyncCmId(self.handle, dispatcher, self.id_state.current, self.event)
        self._transfer_to(successor)
        if not successor._has_listened:
            # The kernel moves events without waking the pollers of the new channel.
            dispatcher.read_all()
        return successor

    # --- the end ---

    async def aclose(self) -> None:
        """Close the id as abort() does, and wait until everything is destroyed. Idempotent.

        Cancelling stops the wait only.
        """
        if not self.id_state.is_closed:
            self.handle.move_to(running_loop())
        await super().aclose()
