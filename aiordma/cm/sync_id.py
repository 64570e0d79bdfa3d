"""SyncCmId: a synchronous rdma_cm id, served by worker threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from aiordma.cm.async_id import AsyncCmId
from aiordma.cm.handle import IdHandle
from aiordma.cm.states import CmState
from aiordma.cm.step import Step
from aiordma.cm.steps import CmSteps
from aiordma.dispatch import CmDispatcher, destroy_quietly, initialise
from aiordma.enums import CmEventType, PortSpace
from aiordma.errors import BusyError, LocalClosed, RdmaError, VerbsError
from aiordma.loop import Interrupt, make_in_worker, parking, running_loop
from aiordma.rdmacm import AddrInfo, CmEvent, CmId, EventChannel
from aiordma.verbs import ProtectionDomain, QueuePairInit

if TYPE_CHECKING:
    from collections.abc import Iterator


logger = logging.getLogger(__name__)


# How long a thread that waits for completions lets a step have the channel, before it looks again.
LOOK_SECONDS = 0.05


class SyncCmId(CmSteps):
    """A communication identifier with an event channel of its own (a NULL one, in C).

    A call starts the operation, which does not block as the channel's descriptor is non-blocking;
    then a thread waits for the event, and for somebody who cancels. It belongs to no loop: calls
    may be awaited on one, then on another. `event` is the event of the last call until the next.

    No event is ever left unacknowledged in the C id, which spares the caller what the man pages
    warn of: a listener may be closed before its children, a group may be left after it was joined.
    """

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        """For the makers below; not to be called by others."""
        self._is_closed = False
        super().__init__(handle, state, event)
        self._requests: deque[SyncCmId] = deque()
        self._channel: EventChannel = handle.cm_id.private_channel()
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
        await initialise(loop)
        return cls(IdHandle(loop, CmId.create(None, port_space)), CmState.IDLE, None)

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
                EADDRNOTAVAIL (the port is taken), ENOMEM, EINVAL.
            DeviceRemoved: the device went away meanwhile.
            ValueError: an argument is closed.
        """
        loop = running_loop()
        await initialise(loop)

        def make() -> IdHandle:
            handle = IdHandle(loop, CmId.create_ep(info, pd, init))
            try:
                if handle.cm_id.has_qp and pd is None:
                    handle.keep_device()
            except RdmaError:
                handle.destroy()
                raise
            return handle

        handle = await make_in_worker(loop, make, IdHandle.destroy, parking.submit)
        state = CmState.ADDR_BOUND if info.is_passive else CmState.ROUTE_RESOLVED
        return cls(handle, state, handle.cm_id.take_event())

    @classmethod
    def taken_over(cls, other: AsyncCmId) -> SyncCmId:
        """For AsyncCmId.migrate(): the same C id, made synchronous."""
        requests = other.waiting_requests()
        state, event, established = other.state, other.event, other.established
        other.leave_channel()
        moved = cls(other.handle, state, event)
        moved.established, moved.context = established, other.context
        while requests:
            moved._requests.append(cls.taken_over(requests.popleft()))
        return moved

    @property
    def state(self) -> CmState:
        """Where it stands."""
        return CmState.CLOSED if self._is_closed else self._state

    @state.setter
    def state(self, state: CmState) -> None:
        # A thread may be about to move it while it is closed: closed it stays.
        self._state = state
        self._is_closed |= state is CmState.CLOSED

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

    async def _take(self, step: Step, is_done: Callable[[], bool]) -> None:
        with self._in_use():
            await self.handle.wait(lambda interrupt: self._run(step, is_done, interrupt))

    def _run(self, step: Step, is_done: Callable[[], bool], interrupt: Interrupt) -> None:
        """The whole of a step, in a thread."""
        with self._reading:
            self._run_alone(step, is_done, interrupt)

    def _run_alone(self, step: Step, is_done: Callable[[], bool], interrupt: Interrupt) -> None:
        if step.call is not None:
            before = self._enter(step.call)
        expected = self.state
        try:
            self._start(step)
        except Exception:
            if step.call is not None:
                self._call_failed(step.call, before, expected)
            raise
        self._wait_until(is_done, self._read_events, interrupt)

    def _start(self, step: Step) -> None:
        """Make the call. If it found an event at once, that says more than its errno."""
        step.prepare()
        failure: VerbsError | None = None
        try:
            step.start()
        except VerbsError as error:
            failure = error
        event = self.cm_id.take_event()
        if event is not None:
            self.handle_event(event)
        elif failure is not None and not failure.would_block:
            raise step.translate(failure) from failure

    def _wait_until(
        self, is_done: Callable[[], bool], read: Callable[[], None], interrupt: Interrupt
    ) -> None:
        while not is_done():
            if not interrupt.wait_readable(self._channel.fd):
                raise LocalClosed("closed while waiting")
            read()

    def _read_events(self) -> None:
        for event in self._channel.get_events():
            self.handle_event(event)

    def _event_fds(self) -> list[int]:
        return [self._channel.fd]

    def _look_for_events(self) -> None:
        # Should a step be under way, it sees to events itself.
        if self._reading.acquire(timeout=LOOK_SECONDS):
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
            VerbsError: the queue pair for the request, which is then rejected, could not be made.
        """
        with self._in_use():
            while not self._requests:
                if self.state is not CmState.LISTENING:
                    raise self._error("the listener", CmState.LISTENING)
                await self.handle.wait(self._wait_for_request)
            return self._requests.popleft()

    def _wait_for_request(self, interrupt: Interrupt) -> None:
        with self._reading:
            self._read_request()
            self._wait_until(
                lambda: bool(self._requests) or self.state is not CmState.LISTENING,
                self._read_request,
                interrupt,
            )

    def _read_request(self) -> None:
        """In a thread: take a request if there is one now."""
        try:
            made = self.cm_id.get_request()
        except VerbsError as error:
            if not error.would_block:
                self._note_no_request(error)
            return
        child = type(self)(IdHandle(self.loop, made), CmState.REQUESTED, made.take_event())
        try:
            if made.has_qp:
                child.handle.keep_device()
        except RdmaError:
            child.abort()
            raise
        self._requests.append(child)
        if self.state is CmState.CLOSED:  # meanwhile, and so too late for abort() to find it
            self._drop_requests()

    def _drop_requests(self) -> None:
        with suppress(IndexError):
            while True:
                self._requests.popleft().abort()

    def _note_no_request(self, error: VerbsError) -> None:
        event = self.cm_id.take_event()
        if event is None:
            raise error
        if event.type is CmEventType.CONNECT_REQUEST:
            # Nobody else knows the id that came with it: its queue pair could not be made.
            destroy_quietly(CmId.from_address(event.id))
            raise error
        self.handle_event(event)

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
        that are not taken yet. This object is closed. Best done before connecting: who waits for
        completions here, waits on.

        Linux does not move a request that reaches a listener in the very moment of migration,
        between the last look for requests and the move: its peer is rejected.

        Cancelling leaves it as it is.

        Raises:
            BusyError: a task is waiting for it.
            LocalClosed: it is closed.
        """
        dispatcher = await CmDispatcher.of(running_loop())
        with dispatcher.kept_open(), self._in_use():
            self._check_open()
            await self.handle.call(lambda: None)  # behind a call whose task was cancelled
            self._check_open()
            moved = self._move_to(dispatcher)
            # The kernel moves events without waking those who watch the descriptor.
            dispatcher.read_all()
            return moved

    def _move_to(self, dispatcher: CmDispatcher) -> AsyncCmId:
        # On the loop's thread, so that nobody reads the channel meanwhile. It does not block: all
        # events are acknowledged.
        if self.state is CmState.LISTENING:
            self._read_all_requests()
        self.handle.move_to(running_loop())
        dispatcher.adopt_id(self.cm_id)
        moved = AsyncCmId(self.handle, dispatcher, self.state, self.event)
        moved.established, moved.context = self.established, self.context
        requests = self._requests
        self._move_away()
        while requests:
            moved.waiting_requests().append(requests.popleft()._move_to(dispatcher))
        return moved

    def _read_all_requests(self) -> None:
        """An unread request would die with the channel that it came by: read it now."""
        known = -1
        while known < len(self._requests):
            known = len(self._requests)
            try:
                self._read_request()
            except VerbsError as error:
                logger.warning("a connection request was rejected: %s", error)

    # --- the end ---

    def abort(self) -> None:
        """Close at once: waiters get LocalClosed, everything is destroyed in the background.

        Requests that nobody has taken are rejected. Idempotent. See rdma_destroy_id(3).
        """
        super().abort()
        self._drop_requests()

    async def aclose(self) -> None:
        """abort(), and wait until everything is destroyed. Idempotent.

        Cancelling stops the waiting only.
        """
        if self.state is not CmState.CLOSED:
            self.handle.move_to(running_loop())
        await super().aclose()
