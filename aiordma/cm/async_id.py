"""AsyncCmId: an rdma_cm id on the event channel of a loop, with awaitable operations."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from aiordma.cm import states
from aiordma.cm.base_id import BaseCmId
from aiordma.cm.handle import IdHandle
from aiordma.cm.states import CmState
from aiordma.cm.step import Step
from aiordma.dispatch import CmDispatcher
from aiordma.enums import PortSpace
from aiordma.errors import BusyError, DeviceRemoved, LocalClosed, VerbsError
from aiordma.loop import (
    WaitQueue,
    cancellation_of,
    checkpoint,
    refuse_forked_child,
    running_loop,
)
from aiordma.rdmacm import CmEvent, IdCalls, OwnChannel

if TYPE_CHECKING:
    from aiordma.cm.sync_id import SyncCmId

logger = logging.getLogger(__name__)


class AsyncCmId(BaseCmId):
    """A communication identifier whose events the running loop reads.

    Make one with `await AsyncCmId.create()`. A listening id returns the ids of requests from
    get_request(), or from `async for`. A task waits for a change of state, not for an event. So no
    event is lost if the task is cancelled.
    """

    def __init__(
        self, handle: IdHandle, dispatcher: CmDispatcher, state: CmState, event: CmEvent | None
    ) -> None:
        """Called by create(), by get_request() and by migrate(); not for users."""
        super().__init__(handle, state, event)
        self.on_change: Callable[[], None] | None = None
        """Called on the loop's thread after each event, and after abort()."""
        self.on_replied: Callable[[], None] | None = None
        """Called on the loop's thread when accept() has sent the reply."""
        self._changed = WaitQueue(handle.loop)
        self._is_awaited: Callable[[], bool] | None = None
        """Returns True after the change that the task waits for. None: it waits for any change."""
        self._dispatcher = dispatcher
        self._stop_watching: Callable[[], None] | None = None
        dispatcher.register(handle.cm_id, self)
        handle.calls.reader = dispatcher.call_reader
        handle.add_released_callback(dispatcher.release)
        if handle.channel is not None:
            self._watch(handle.channel)

    @classmethod
    async def create(cls, port_space: PortSpace = PortSpace.TCP) -> AsyncCmId:
        """Make an id on the running loop's event channel: rdma_create_id(3).

        Cancelling leaves nothing behind.

        Raises:
            VerbsError: ENODEV (no RDMA device), ENOMEM.
        """
        loop = running_loop()
        await checkpoint(loop)
        dispatcher = await CmDispatcher.of(loop)
        dispatcher.acquire()
        try:
            return create_id(dispatcher, port_space)
        finally:
            dispatcher.release()

    # --- waiting ---

    async def _perform(self, step: Step, is_done: Callable[[], bool]) -> None:
        raise_if_cancelled = cancellation_of(type(self.handle.loop))
        if raise_if_cancelled is not None:
            await raise_if_cancelled()
        if step.call is None:
            self._check_idle()
        else:
            before = self.id_state.enter(step.call)
        expected = self.id_state.current
        try:
            if step.calls is not None:
                await self._make_calls(step, step.calls, is_done)
            elif step.pool is None:
                step.run()
            else:
                await self.handle.call(step.run, step.pool)
        except Exception:
            if step.call is not None:
                self.id_state.call_failed(step.call, before, expected)
            raise
        if step.calls is None and step.call is states.ACCEPT:
            self._note_reply()
        if not is_done():
            self._check_idle()
            await self._wait(is_done)

    async def _make_calls(self, step: Step, calls: IdCalls, is_done: Callable[[], bool]) -> None:
        """Await the calls of a step in a thread of C, and the events until `is_done()`.

        If `step.finish` has to follow, do not wait for events. After abort(), wait for nothing.
        """
        if step.prepare is not None:
            await self.handle.call(step.prepare)

        def is_over() -> bool:
            if calls.have_ended:
                return calls.have_failed or step.finish is not None or is_done()
            return self.id_state.is_closed

        def on_end() -> None:
            if step.call is states.ACCEPT and not calls.have_failed:
                self._note_reply()
            if is_over():
                self._changed.wake_all()

        refuse_forked_child()
        self._check_idle()
        self.handle.make_calls(calls, on_end)
        try:
            await self._wait(is_over)
        finally:
            calls.cancel()  # those that have not begun, and connecting along a route
        if self.id_state.is_closed:
            return
        try:
            calls.check()
        except VerbsError as error:
            step.raise_translated(error)
        if step.finish is not None:
            await self.handle.call(step.finish)

    async def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for the change that makes `is_over()` true. It is not true yet."""
        self._is_awaited = is_over
        try:
            await self._changed.wait()
        finally:
            if self._is_awaited is is_over:  # else this task was cancelled, and another one waits
                self._is_awaited = None

    def _note_reply(self) -> None:
        if self.on_replied is not None:
            self.on_replied()

    def _check_idle(self) -> None:
        if len(self._changed):
            raise BusyError("another task is waiting for this id")

    def _notify(self) -> None:
        if self._is_awaited is None or self._is_awaited():
            self._changed.wake_all()
        if self.on_change is not None:
            self.on_change()

    def dispatch_events(self) -> None:
        """Process the events of the ids on this loop that have arrived and are not read yet."""
        self._dispatcher.read_all()

    # --- listening ---

    def _listen(self, backlog: int) -> None:
        if self.handle.channel is None:
            self._watch(self.handle.move_to_own_channel())
        super()._listen(backlog)

    def _watch(self, channel: OwnChannel) -> None:
        """Make the loop read the channel, too, until the id is destroyed or migrates."""
        self._stop_watching = self._dispatcher.watch(self.handle.cm_id, channel)
        self.handle.add_released_callback(self._stop_watching)

    async def get_request(self) -> AsyncCmId:
        """Wait for a connection request. Return its id, in state REQUESTED; accept or reject it.

        Cancelling loses no request. See rdma_get_request(3), the synchronous counterpart.

        Raises:
            LocalClosed: the id is closed, or was closed during the wait.
            DeviceRemoved: the device of the id was removed.
            BusyError: another task is waiting for requests.
        """
        self._check_idle()
        await checkpoint()
        self._check_idle()
        while (request := self.take_request()) is None:
            await self._changed.wait()
        return request

    def take_request(self) -> AsyncCmId | None:
        """Return a connection request that has arrived already, or None. See get_request().

        Raises:
            LocalClosed: the id is closed.
            DeviceRemoved: the device of the id was removed.
        """
        while requests := self._requests:
            request = requests.pop()
            try:
                request.handle.move_to(self.handle.loop)
                request.handle.move_to_loop(self._dispatcher)
            except (VerbsError, DeviceRemoved) as error:
                logger.info("a connection request was dropped with its device: %s", error)
                request.handle.destroy()
            else:
                return AsyncCmId(request.handle, self._dispatcher, states.REQUESTED, request.event)
        self._check_listening()
        return None

    def __aiter__(self) -> AsyncIterator[AsyncCmId]:
        """Iterate over requests until the id is closed."""
        return self

    async def __anext__(self) -> AsyncCmId:
        try:
            return await self.get_request()
        except LocalClosed:
            raise StopAsyncIteration from None

    # --- migration ---

    async def migrate(self, channel: None) -> SyncCmId:
        """Make the id synchronous: rdma_migrate_id(3) with no channel.

        Return the new object, and close this one. The new object has the state, the queue pair, the
        events that are not read yet, and the requests that are not taken yet. A listener misses no
        request, as its channel stays the same. Calls under way in worker threads are completed
        first. A SyncCmId belongs to no loop: its migrate() moves the id to the loop that runs then.

        Cancelling leaves the id as it is.

        Raises:
            BusyError: a task is waiting for the id, or a call on it is under way.
            LocalClosed: the id is closed.
            VerbsError: EMFILE (a synchronous id needs a descriptor; a listening id has one).
        """
        from aiordma.cm.sync_id import SyncCmId  # here, because it imports this module

        self.id_state.check_open()
        await self.handle.call(lambda: None)  # waits for the calls under way
        self._check_idle()
        self.id_state.check_open()
        self._leave_loop()
        successor = SyncCmId(self.handle, self.id_state.current, self.event)
        self._transfer_to(successor)
        return successor

    def _leave_loop(self) -> None:
        handle = self.handle
        if self._stop_watching is None:
            handle.move_to_own_channel()
        else:
            handle.remove_released_callback(self._stop_watching)
            self._stop_watching()
        handle.calls.reader = None
        handle.remove_released_callback(self._dispatcher.release)
        self._dispatcher.forget(self.handle.cm_id)
        self._dispatcher.release()

    # --- the end ---

    def abort(self) -> None:
        """Close at once: waiters get LocalClosed, everything is destroyed in the background.

        Requests that no task has taken are rejected. Idempotent. See rdma_destroy_id(3).
        """
        if self.id_state.is_closed:
            return
        super().abort()
        self._notify()

    def _leave(self) -> None:
        self._dispatcher.forget(self.handle.cm_id)
        super()._leave()


def create_id(dispatcher: CmDispatcher, port_space: PortSpace) -> AsyncCmId:
    """Make an id as AsyncCmId.create() does. The caller has a reference to the dispatcher."""
    handle = IdHandle(dispatcher.loop, dispatcher.create_id(port_space))
    return AsyncCmId(handle, dispatcher, states.IDLE, None)
