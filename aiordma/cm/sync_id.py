"""SyncCmId: a synchronous rdma_cm id, served by worker threads."""

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
from aiordma.errors import BusyError, LocalClosed, RdmaError, VerbsError
from aiordma.loop import Interrupt, blocking_pool, checkpoint, make_in_worker, running_loop
from aiordma.rdmacm import AddrInfo, CmEvent, CmId, OwnChannel
from aiordma.verbs import ProtectionDomain, QueuePairInit

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long a thread that waits for completions lets a step have the channel, before it looks again.
READ_LOCK_SECONDS = 0.05


class SyncCmId(BaseCmId):
    """A communication identifier with an event channel of its own, as C makes them of a NULL one.

    To librdmacm it is an asynchronous id, so that a call starts the operation and does not block;
    then a thread waits for the event, and for somebody who cancels. It belongs to no loop: calls
    may be awaited on one, then on another. `event` is the event of the last call until the next.

    No event is ever left unacknowledged in the C id, which spares the caller what the man pages
    warn of: a listener may be closed before its children, a group may be left after it was joined.
    """

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        """For the makers below; not to be called by others."""
        super().__init__(handle, state, event)
        self._channel: OwnChannel | None = handle.channel
        self._busy = False
        self._reading = threading.Lock()  # held by the thread that reads the channel

    @classmethod
    async def create(cls, port_space: PortSpace = PortSpace.TCP) -> SyncCmId:
        """Make a synchronous id: rdma_create_id(3) with no channel.

        Cancelling leaves nothing behind.

        Raises:
            VerbsError: ENODEV when there is no RDMA device, EMFILE, ENOMEM.
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
        """Make an endpoint from what getaddrinfo() gave: rdma_create_ep(3).

        An active one is ready to connect: its address and route are resolved, and it has a queue
        pair if `init` is given, in `pd` or in the default one. A passive one is ready to listen;
        ids from its get_request() arrive with a queue pair made of `pd` and `init`.

        Takes up to 4 seconds. Cancelling returns at once; what is made nevertheless is destroyed.

        Raises:
            VerbsError: ENODEV (no device there), ETIMEDOUT (nobody has the address), EADDRINUSE or
                EADDRNOTAVAIL (the port is taken), ENOMEM, EMFILE, EINVAL.
            DeviceRemoved: the device went away meanwhile.
            ValueError: an argument is closed.
        """
        loop = running_loop()
        await initialise(loop)

        def make() -> tuple[IdHandle, CmEvent | None]:
            handle = IdHandle(loop, CmId.create_ep(info, pd, init))
            try:
                event = handle.cm_id.take_event()
                handle.move_to_own_channel()  # it has one already, but that is librdmacm's
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
        """One call at a time, on the loop that is running."""
        if self._busy:
            raise BusyError("another task is waiting for this id")
        self._busy = True
        try:
            self.handle.move_to(running_loop())
            yield
        finally:
            self._busy = False

    async def _perform(self, step: Step, is_done: Callable[[], bool]) -> None:
        with self._in_use():
            await self.handle.wait(lambda interrupt: self._run(step, is_done, interrupt))

    def _run(self, step: Step, is_done: Callable[[], bool], interrupt: Interrupt) -> None:
        """The whole of a step, in a thread."""
        with self._reading:
            self._run_alone(step, is_done, interrupt)

    def _run_alone(self, step: Step, is_done: Callable[[], bool], interrupt: Interrupt) -> None:
        if step.call is not None:
            before = self._state.enter(step.call)
        expected = self.state
        try:
            self._start(step)
        except Exception:
            if step.call is not None:
                self._state.call_failed(step.call, before, expected)
            raise
        self._wait_until(is_done, interrupt)

    def _start(self, step: Step) -> None:
        step.prepare()
        try:
            step.start()
        except VerbsError as error:
            raise step.translate(error) from error

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
        # After a migration the loop reads them, though a thread may still wait for completions.
        return [] if self._channel is None else [self._channel.fd]

    def read_events(self) -> None:
        # Should a step be under way, it sees to events itself.
        if self._reading.acquire(timeout=READ_LOCK_SECONDS):
            try:
                self._read_events()
            finally:
                self._reading.release()

    # --- being connected to ---

    async def get_request(self) -> SyncCmId:
        """Wait for a connection request: rdma_get_request(3), in a worker thread.

        It is a synchronous id in state REQUESTED, to be accepted or rejected. Cancelling loses
        none.

        Raises:
            LocalClosed: the id is closed, or was while waiting.
            DeviceRemoved: the device it was bound to went away.
            BusyError: another task is waiting for this id.
            VerbsError: EMFILE, or the queue pair for the request could not be made; the request is
                then rejected.
        """
        with self._in_use():
            if not self._requests:
                self._check_listening()
            await self.handle.wait(self._wait_for_request)
            if not self._requests:
                self._check_listening()
            request = self._requests.pop()
            return SyncCmId(request.handle, CmState.REQUESTED, request.event)

    def _wait_for_request(self, interrupt: Interrupt) -> None:
        with self._reading:
            self._wait_until(
                lambda: bool(self._requests) or self.state is not CmState.LISTENING, interrupt
            )
            self._prepare_request()

    def _prepare_request(self) -> None:
        """In a thread: give the first request what a synchronous id has. If cancelled, it stays."""
        try:
            request = self._requests.pop()
        except IndexError:
            return
        try:
            self._prepare(request.handle)
        except RdmaError:
            request.handle.destroy()
            raise
        self._requests.put_back(request)
        self._drop_requests_if_closed()

    def _prepare(self, handle: IdHandle) -> None:
        if handle.channel is self._channel:
            handle.move_to_own_channel()
        if self.cm_id.for_requests is not None and not handle.cm_id.has_qp:
            pd, init = self.cm_id.for_requests
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
        """Move to the running loop's event channel: rdma_migrate_id(3).

        Everything goes along: the state, the queue pair, events that are not read yet, requests
        that are not taken yet. A listener misses no request meanwhile, as its channel stays the
        same, and is read by the loop from now on. This object is closed. Best done before
        connecting: who waits for completions here, waits on.

        Cancelling leaves it as it is.

        Raises:
            BusyError: a task is waiting for it, or a call on it is under way.
            LocalClosed: it is closed.
        """
        dispatcher = await CmDispatcher.of(running_loop())
        with dispatcher.referenced(), self._in_use():
            self._state.check_open()
            await self.handle.call(lambda: None)  # behind a call whose task was cancelled
            self._state.check_open()
            with self._reading:
                return self._move_to(dispatcher)

    def _move_to(self, dispatcher: CmDispatcher) -> AsyncCmId:
        # On the loop's thread, with nobody reading the channel meanwhile.
        if not self._has_listened:
            self.handle.move_to_loop(dispatcher)
        self._channel = None
        successor = AsyncCmId(self.handle, dispatcher, self.state, self.event)
        self._transfer_to(successor)
        if not successor._has_listened:
            # The kernel moves events without waking those who watch the descriptor.
            dispatcher.read_all()
        return successor

    # --- the end ---

    async def aclose(self) -> None:
        """abort(), and wait until everything is destroyed. Idempotent.

        Cancelling stops the waiting only.
        """
        if self.state is not CmState.CLOSED:
            self.handle.move_to(running_loop())
        await super().aclose()
