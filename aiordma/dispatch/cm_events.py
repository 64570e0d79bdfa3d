"""CmDispatcher: reads the rdma_cm events of one loop and dispatches them to their ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from aiordma.dispatch.call_reader import CallReader
from aiordma.dispatch.channel_reader import ChannelReader
from aiordma.dispatch.connect_turns import ConnectTurns
from aiordma.enums import CmEventType, PortSpace
from aiordma.errors import DeviceRemoved, VerbsError
from aiordma.loop import Loop, refuse_forked_child, run_in_worker, worker_pool
from aiordma.rdmacm import CmEvent, CmId, DeviceReference, EventChannel, OwnChannel

logger = logging.getLogger(__name__)


class CmEventHandler(Protocol):
    """The handler of an id's events."""

    def handle_event(self, event: CmEvent) -> None:
        """Handle an event. Called on the loop's thread; must not block."""


class CmDispatcher:
    """The rdma_event_channel that the ids of a loop share, and those of its listening ids.

    It exists while the loop has ids. Each id has a reference to it; the last release() closes the
    channel. Handlers are found by the address of the C id. The references to them are weak: an
    unclosed id can be garbage-collected, with a ResourceWarning.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        """The loop that reads the events."""
        self._channel = EventChannel()
        # Until forget(). No WeakValueDictionary: it makes Python calls for each event.
        self._handlers: dict[int, ReferenceType[CmEventHandler]] = {}
        self._users = 0
        self._error: VerbsError | None = None
        """The error with which the channel failed. None: it works."""
        self.connect_turns = ConnectTurns(loop)
        """The turns of the tasks that connect."""
        try:
            self.call_reader = CallReader(loop)
            """Has threads of C make calls on the ids."""
        except VerbsError:
            self._channel.close()
            raise
        self._reader = ChannelReader(loop, self._channel, self._dispatch, self._fail)

    @classmethod
    async def of(cls, loop: Loop) -> CmDispatcher:
        """Return the dispatcher of `loop`. The first call creates it.

        Raises:
            VerbsError: there is no RDMA device, or no permission to use one.
            RdmaError: this process is a forked child.
        """
        await initialise(loop)
        dispatcher = _dispatchers.get(loop)
        if dispatcher is None:
            dispatcher = _dispatchers[loop] = cls(loop)
        return dispatcher

    # --- references ---

    def register(self, cm_id: CmId, handler: CmEventHandler) -> None:
        """Dispatch the id's events to `handler` from now on. Adds a reference, see release()."""
        self.acquire()
        self._handlers[cm_id.address] = ref(handler)

    def forget(self, cm_id: CmId) -> None:
        """Drop the id's events from now on. Call it before the id is destroyed.

        Another id can have the same address as soon as the id is destroyed.
        """
        self._handlers.pop(cm_id.address, None)

    def acquire(self) -> None:
        """Add a reference, see release()."""
        self._users += 1

    def release(self) -> None:
        """Drop one reference, when its id is destroyed or has left the loop."""
        self._users -= 1
        if not self._users:
            self._close()

    @contextmanager
    def referenced(self) -> Iterator[None]:
        """Return a context manager that has a reference in its block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def _close(self) -> None:
        self._unregister()
        self._reader.stop()
        self.call_reader.stop()
        self._channel.close()

    def _unregister(self) -> None:
        if _dispatchers.get(self.loop) is self:
            del _dispatchers[self.loop]

    # --- the channel that ids share ---

    def create_id(self, port_space: PortSpace) -> CmId:
        """Create an id on the channel.

        Raises:
            VerbsError: see CmId.create.
            DeviceRemoved: the channel has failed, so no event of the id would be read.
        """
        self._check_works()
        return CmId.create(self._channel, port_space)

    def _check_works(self) -> None:
        if self._error is not None:
            raise DeviceRemoved(f"the rdma_cm event channel failed: {self._error}")

    def migrate_id(self, cm_id: CmId) -> None:
        """Move an id to the channel. Its pending events are dispatched by read_all().

        Raises:
            VerbsError: see CmId.migrate.
            DeviceRemoved: the channel has failed.
        """
        self._check_works()
        cm_id.migrate(self._channel)

    def read_all(self) -> None:
        """Dispatch all events that are pending on the channel now."""
        if self._error is None:
            self._reader.read_all()

    def _dispatch(self, event: CmEvent) -> None:
        handler = self._handlers.get(event.id, _no_handler)()
        if handler is not None:
            handler.handle_event(event)

    def _fail(self, error: VerbsError) -> None:
        """Fail all ids, because the channel cannot be read any more."""
        logger.error("the rdma_cm event channel failed, and all its ids with it: %s", error)
        self._error = error
        self._unregister()
        self._reader.dispatch([_removal(address, error) for address in list(self._handlers)])

    # --- the channels of listening ids ---

    def watch(self, cm_id: CmId, channel: OwnChannel) -> Callable[[], None]:
        """Read the own channel of a listening id, too. Return a function that stops it."""
        listener = cm_id.address

        def fail(error: VerbsError) -> None:
            logger.error("the rdma_cm event channel of a listener failed: %s", error)
            reader.dispatch([_removal(listener, error)])

        def stop() -> None:
            reader.stop()
            channel.release()

        reader = ChannelReader(self.loop, channel, partial(self._dispatch_from, channel), fail)
        channel.acquire()
        return stop

    def _dispatch_from(self, channel: OwnChannel, event: CmEvent) -> None:
        if event.type is not CmEventType.CONNECT_REQUEST:
            self._dispatch(event)
            return
        handler = self._handlers.get(event.listen_id, _no_handler)()
        if handler is not None:
            handler.handle_event(event)
        else:
            _reject(CmId.from_address(event.id), channel)


def _no_handler() -> None:
    """Return None, as the reference to a handler that was garbage-collected does."""


def _removal(address: int, error: VerbsError) -> CmEvent:
    """Return the event that is dispatched to an id whose channel failed."""
    return CmEvent(CmEventType.DEVICE_REMOVAL, address, status=-(error.errno or 1))


def _reject(request_id: CmId, channel: OwnChannel) -> None:
    """Destroy the id of a request whose listener is being closed. This rejects the request."""
    channel.acquire()

    def destroy() -> None:
        destroy_and_log(request_id)
        channel.release()

    worker_pool.submit(destroy)


def destroy_and_log(cm_id: CmId) -> None:
    """Destroy an id and log an error, for callers that cannot handle one."""
    try:
        cm_id.destroy()
    except VerbsError:
        logger.exception("an id could not be destroyed")


async def initialise(loop: Loop) -> None:
    """Have librdmacm open its devices, in a worker thread. Only the first call does it.

    Raises:
        VerbsError: there is no RDMA device, or no permission to use one.
        RdmaError: this process is a forked child.
    """
    refuse_forked_child()
    if not _initialised:
        await run_in_worker(loop, _initialise)


_dispatchers: WeakKeyDictionary[Loop, CmDispatcher] = WeakKeyDictionary()
_initialised = False


def _initialise() -> None:
    """Have librdmacm open its devices. Takes tens of milliseconds, once in a process.

    Otherwise librdmacm would open a device on the loop's thread, when it reads the device's first
    event.
    """
    global _initialised
    DeviceReference().close()  # first, see DeviceThread
    EventChannel().close()
    _initialised = True
