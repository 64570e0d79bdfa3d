"""CmDispatcher: reads the rdma_cm events of one loop and hands each to the id it belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from aiordma.dispatch.channel_reader import ChannelReader
from aiordma.enums import CmEventType, PortSpace
from aiordma.errors import VerbsError
from aiordma.loop import Loop, refuse_forked_child, run_in_worker, worker_pool
from aiordma.rdmacm import CmEvent, CmId, DeviceReference, EventChannel, OwnChannel

logger = logging.getLogger(__name__)


class CmEventHandler(Protocol):
    """What an event is given to."""

    def handle_event(self, event: CmEvent) -> None:
        """Take note of the event. Runs on the loop's thread; must not block."""


class CmDispatcher:
    """The rdma_event_channel that the ids of a loop share, and those that its listening ids have.

    It exists while the loop has ids: each is a user, and the last to go closes the channel. Ids
    are known by the address of their C struct, and held weakly: an id that its owner forgot gets
    no events, but is not kept from warning about that.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._channel = EventChannel()
        self._handlers: WeakValueDictionary[int, CmEventHandler] = WeakValueDictionary()
        self._users = 0
        self._reader = ChannelReader(loop, self._channel, self._dispatch, self._fail)

    @classmethod
    async def of(cls, loop: Loop) -> CmDispatcher:
        """The dispatcher of `loop`, made if need be.

        Raises:
            VerbsError: there is no RDMA device, or no right to use one.
            RdmaError: this process is a forked child.
        """
        await initialise(loop)
        dispatcher = _dispatchers.get(loop)
        if dispatcher is None:
            dispatcher = _dispatchers[loop] = cls(loop)
        return dispatcher

    # --- users ---

    def register(self, cm_id: CmId, handler: CmEventHandler) -> None:
        """Give the id's events to `handler` from now on. The id is a user, until release()."""
        self._users += 1
        self._handlers[cm_id.address] = handler

    def forget(self, cm_id: CmId) -> None:
        """Give its events to nobody: to be called before the id is destroyed.

        Its address can belong to another id as soon as it is.
        """
        self._handlers.pop(cm_id.address, None)

    def release(self) -> None:
        """One user less: its id is destroyed, or has left the loop."""
        self._users -= 1
        if not self._users:
            self._close()

    @contextmanager
    def referenced(self) -> Iterator[None]:
        """Be a user for a while."""
        self._users += 1
        try:
            yield
        finally:
            self.release()

    def _close(self) -> None:
        self._unregister()
        self._reader.stop()
        self._channel.close()

    def _unregister(self) -> None:
        if _dispatchers.get(self._loop) is self:
            del _dispatchers[self._loop]

    # --- the channel that ids share ---

    def create_id(self, port_space: PortSpace) -> CmId:
        """Make an id on the channel.

        Raises:
            VerbsError: see CmId.create.
        """
        return CmId.create(self._channel, port_space)

    def migrate_id(self, cm_id: CmId) -> None:
        """Move an id to the channel. Events that come along wait for read_all().

        Raises:
            VerbsError: see CmId.migrate.
        """
        cm_id.migrate(self._channel)

    def read_all(self) -> None:
        """Dispatch every event that is pending there now."""
        self._reader.read_all()

    def _dispatch(self, event: CmEvent) -> None:
        _log_event(event)
        handler = self._handlers.get(event.id)
        if handler is not None:
            handler.handle_event(event)

    def _fail(self, error: VerbsError) -> None:
        """Nothing more can be read: end all that waits."""
        logger.error("the rdma_cm event channel failed, and all its ids with it: %s", error)
        self._unregister()
        for address in list(self._handlers):
            self._reader.dispatch_safely(_removal(address, error))

    # --- the channels of listening ids ---

    def watch(self, cm_id: CmId, channel: OwnChannel) -> Callable[[], None]:
        """Read the channel that a listening id has to itself, too. What is returned ends that."""
        listener = cm_id.address

        def fail(error: VerbsError) -> None:
            logger.error("the rdma_cm event channel of a listener failed: %s", error)
            reader.dispatch_safely(_removal(listener, error))

        def stop() -> None:
            reader.stop()
            channel.release()

        reader = ChannelReader(self._loop, channel, partial(self._dispatch_from, channel), fail)
        channel.acquire()
        return stop

    def _dispatch_from(self, channel: OwnChannel, event: CmEvent) -> None:
        if event.type is not CmEventType.CONNECT_REQUEST:
            self._dispatch(event)
            return
        _log_event(event)
        handler = self._handlers.get(event.listen_id)
        if handler is not None:
            handler.handle_event(event)
        else:
            _reject(CmId.from_address(event.id), channel)


def _log_event(event: CmEvent) -> None:
    logger.debug("%s (status %d) for id %#x", event.type.name, event.status, event.id)


def _removal(address: int, error: VerbsError) -> CmEvent:
    """What an id is told when its channel failed."""
    return CmEvent(CmEventType.DEVICE_REMOVAL, address, status=-(error.errno or 1))


def _reject(child: CmId, channel: OwnChannel) -> None:
    """Destroy the id of a request whose listener is being closed, which rejects it."""
    channel.acquire()

    def destroy() -> None:
        destroy_and_log(child)
        channel.release()

    worker_pool.submit(destroy)


def destroy_and_log(cm_id: CmId) -> None:
    """Destroy an id whose owner has no more use for an error."""
    try:
        cm_id.destroy()
    except VerbsError:
        logger.exception("an id could not be destroyed")


async def initialise(loop: Loop) -> None:
    """Have librdmacm look for its devices, if it has not yet: in a worker thread.

    Raises:
        VerbsError: there is no RDMA device, or no right to use one.
        RdmaError: this process is a forked child.
    """
    refuse_forked_child()
    if not _initialised:
        await run_in_worker(loop, _initialise)


_dispatchers: WeakKeyDictionary[Loop, CmDispatcher] = WeakKeyDictionary()
_initialised = False


def _initialise() -> None:
    """Have librdmacm look for its devices and open them: tens of milliseconds, once a process.

    Otherwise it would open a device on the loop's thread, while it reads the first event about it.
    """
    global _initialised
    DeviceReference().close()  # first, see DeviceThread
    EventChannel().close()
    _initialised = True
