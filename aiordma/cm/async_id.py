"""AsyncCmId: an rdma_cm id on a loop's event channel, its operations awaited."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from aiordma.cm.handle import IdHandle
from aiordma.cm.states import CmState
from aiordma.cm.step import Place, Step
from aiordma.cm.steps import CmSteps
from aiordma.dispatch import CmDispatcher
from aiordma.enums import CmEventType, PortSpace
from aiordma.errors import BusyError, LocalClosed, VerbsError
from aiordma.loop import WaitQueue, running_loop
from aiordma.rdmacm import CmEvent, CmId

if TYPE_CHECKING:
    from aiordma.cm.sync_id import SyncCmId

logger = logging.getLogger(__name__)

# What rdma_listen() makes of a backlog of 0, unless the administrator changed it.
MAX_BACKLOG = 1024


class AsyncCmId(CmSteps):
    """A communication identifier whose events come through the running loop.

    Make one with `await AsyncCmId.create()`; a listening one yields others from get_request(), or
    by `async for`. Waiting is for a change of state: an event is never lost with the task that
    waited for it.
    """

    def __init__(
        self, handle: IdHandle, dispatcher: CmDispatcher, state: CmState, event: CmEvent | None
    ) -> None:
        """For create(), for requests and for migrate(); not to be called by others."""
        super().__init__(handle, state, event)
        self.on_change: Callable[[], None] | None = None
        """Called on the loop's thread after each event, and after abort()."""
        self._changed = WaitQueue(handle.loop)
        self._requests: deque[AsyncCmId] = deque()
        self._backlog = MAX_BACKLOG
        self._dispatcher = dispatcher
        handle.on_released(dispatcher.release)
        dispatcher.register(handle.cm_id, self)

    @classmethod
    async def create(cls, port_space: PortSpace = PortSpace.TCP) -> AsyncCmId:
        """Make an id on the running loop's event channel: rdma_create_id(3).

        Cancelling leaves nothing behind.

        Raises:
            VerbsError: ENODEV when there is no RDMA device, ENOMEM.
        """
        loop = running_loop()
        dispatcher = await CmDispatcher.of(loop)
        handle = IdHandle(loop, dispatcher.create_id(port_space))
        return cls(handle, dispatcher, CmState.IDLE, None)

    # --- waiting ---

    async def _take(self, step: Step, is_done: Callable[[], bool]) -> None:
        if step.call is None:
            self._check_idle()
        else:
            before = self._enter(step.call)
        expected = self.state
        try:
            await self._make_call(step)
        except Exception:
            if step.call is not None:
                self._call_failed(step.call, before, expected)
            raise
        while not is_done():
            self._check_idle()
            await self._changed.wait()

    def _check_idle(self) -> None:
        if len(self._changed):
            raise BusyError("another task is waiting for this id")

    async def _make_call(self, step: Step) -> None:
        if step.place is Place.LOOP:
            _call(step)
        else:
            await self.handle.call(lambda: _call(step), parked=step.place is Place.PARKED)

    def handle_event(self, event: CmEvent) -> None:
        """Take an event from the dispatcher."""
        if event.type is CmEventType.CONNECT_REQUEST:
            self._handle_request(event)
        super().handle_event(event)
        self._notify()

    def _notify(self) -> None:
        self._changed.wake_all()
        if self.on_change is not None:
            self.on_change()

    # --- being connected to ---

    def listen(self, backlog: int = 0) -> None:
        """Listen: rdma_listen(3). At most `backlog` requests wait unread (0: 1024).

        Requests that come when so many wait are rejected.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken).
        """
        super().listen(backlog)
        self._backlog = backlog if 0 < backlog < MAX_BACKLOG else MAX_BACKLOG

    async def get_request(self) -> AsyncCmId:
        """Wait for a connection request: an id in state REQUESTED, to be accepted or rejected.

        Cancelling loses none. See rdma_get_request(3), the synchronous counterpart.

        Raises:
            LocalClosed: the id is closed, or was while waiting.
            DeviceRemoved: the device it was bound to went away.
            BusyError: another task waits for requests.
        """
        self._check_idle()
        while (request := self.take_request()) is None:
            await self._changed.wait()
        return request

    def take_request(self) -> AsyncCmId | None:
        """A connection request that has come already, or None. See get_request().

        Raises:
            LocalClosed: the id is closed.
            DeviceRemoved: the device it was bound to went away.
        """
        if self._requests:
            return self._requests.popleft()
        if self.state is not CmState.LISTENING:
            raise self._error("the listener", CmState.LISTENING)
        return None

    def __aiter__(self) -> AsyncIterator[AsyncCmId]:
        """Iterate over requests until the id is closed."""
        return self

    async def __anext__(self) -> AsyncCmId:
        try:
            return await self.get_request()
        except LocalClosed:
            raise StopAsyncIteration from None

    def _handle_request(self, event: CmEvent) -> None:
        handle = IdHandle(self.loop, CmId.from_address(event.id))
        child = AsyncCmId(handle, self._dispatcher, CmState.REQUESTED, event)
        if self.state is CmState.LISTENING and len(self._requests) < self._backlog:
            self._requests.append(child)
        else:
            logger.warning(
                "a connection request was rejected: %d wait already", len(self._requests)
            )
            child.abort()

    # --- migration ---

    async def migrate(self, channel: None) -> SyncCmId:
        """Make it a synchronous id: rdma_migrate_id(3) with no channel.

        Everything goes along: the state, the queue pair, events that are not read yet, requests
        that are not taken yet. This object is closed; calls under way in worker threads are waited
        for. A SyncCmId belongs to no loop, so its own migrate() leads to any.

        Linux does not move a request that reaches a listener in the very moment of migration,
        between the last look for requests and the move: its peer times out, or is rejected.

        Cancelling leaves it as it is.

        Raises:
            BusyError: a task is waiting for it.
            LocalClosed: it is closed.
            VerbsError: EMFILE (a synchronous id needs a descriptor).
        """
        from aiordma.cm.sync_id import SyncCmId  # which imports this module

        self._check_open()
        await self.handle.call(lambda: None)  # behind those under way
        self._check_idle()
        self._check_open()
        return SyncCmId.taken_over(self)

    def leave_channel(self) -> None:
        """For migrate(): the C id becomes a synchronous one, and this object loses it."""
        dispatcher = self._dispatcher
        if self.state is CmState.LISTENING:
            # An unread request goes along, but the id that came with it stays behind: read it now.
            dispatcher.read_all()
        self.cm_id.migrate(None)
        self.handle.not_on_released(dispatcher.release)
        self._move_away()
        dispatcher.release()

    def waiting_requests(self) -> deque[AsyncCmId]:
        """For migrate(): the requests that nobody has taken."""
        return self._requests

    # --- the end ---

    def abort(self) -> None:
        """Close at once: waiters get LocalClosed, everything is destroyed in the background.

        Requests that nobody has taken are rejected. Idempotent. See rdma_destroy_id(3).
        """
        if self.state is CmState.CLOSED:
            return
        super().abort()
        self._notify()
        while self._requests:
            self._requests.popleft().abort()

    def _leave(self) -> None:
        self._dispatcher.forget(self.cm_id)
        super()._leave()


def _call(step: Step) -> None:
    step.prepare()
    try:
        step.start()
    except VerbsError as error:
        failure = step.translate(error)
        if failure is error:
            raise
        raise failure from error
