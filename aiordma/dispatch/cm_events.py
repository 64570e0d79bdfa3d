"""CmDispatcher: reads the rdma_cm events of one loop and hands each to the id it belongs to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from aiordma.enums import CmEventType, PortSpace
from aiordma.errors import VerbsError
from aiordma.loop import Loop, hand_over, refuse_forked_child, run_in_worker, workers
from aiordma.rdmacm import CmEvent, CmId, DeviceReference, EventChannel
from aiordma.rdmacm.channel import EVENT_BATCH

logger = logging.getLogger(__name__)


class CmEventHandler(Protocol):
    """What an event is given to."""

    def handle_event(self, event: CmEvent) -> None:
        """Take note of the event. Runs on the loop's thread; must not block."""


class CmDispatcher:
    """The one rdma_event_channel of a loop.

    It exists while ids live on it: each id is a user, and the last to go closes the channel. Ids
    are known by the address of their C struct, and held weakly: an id that its owner forgot gets
    no events, but is not kept from warning about that.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._channel = EventChannel()
        self._handlers: WeakValueDictionary[int, CmEventHandler] = WeakValueDictionary()
        self._users = 0
        loop.add_reader(self._channel.fd, self._on_readable)

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

    def create_id(self, port_space: PortSpace) -> CmId:
        """Make an id on the channel. It is a user from now on.

        Raises:
            VerbsError: see CmId.create.
        """
        self._users += 1
        try:
            return CmId.create(self._channel, port_space)
        except BaseException:
            self.release()
            raise

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Be a user of the channel for a while."""
        self._users += 1
        try:
            yield
        finally:
            self.release()

    def adopt_id(self, cm_id: CmId) -> None:
        """Move a synchronous id to the channel. It is a user from now on.

        Raises:
            VerbsError: see CmId.migrate.
        """
        cm_id.migrate(self._channel)
        self._users += 1

    def register(self, cm_id: CmId, handler: CmEventHandler) -> None:
        """Give the id's events to `handler` from now on."""
        self._handlers[cm_id.address] = handler

    def forget(self, cm_id: CmId) -> None:
        """Give its events to nobody: to be called before the id is destroyed.

        Its address can belong to another id as soon as it is.
        """
        self._handlers.pop(cm_id.address, None)

    def release(self) -> None:
        """One user less: its id is destroyed."""
        self._users -= 1
        if not self._users:
            self._close()

    def _close(self) -> None:
        self._unregister()
        with suppress(RuntimeError):  # a closed loop watches nothing any more
            self._loop.remove_reader(self._channel.fd)
        self._channel.close()

    def _unregister(self) -> None:
        if _dispatchers.get(self._loop) is self:
            del _dispatchers[self._loop]

    def read_all(self) -> None:
        """Dispatch every event that is pending now."""
        while self._read() == EVENT_BATCH:
            pass

    def _on_readable(self) -> None:
        self._read()

    def _read(self) -> int:
        try:
            events = self._channel.get_events()
        except VerbsError as error:
            self._fail(error)
            return 0
        for event in events:
            self._dispatch_safely(event)
        return len(events)

    def _fail(self, error: VerbsError) -> None:
        """Nothing more can be read, and staying registered would spin: end all that waits."""
        logger.error("the rdma_cm event channel failed, and all its ids with it: %s", error)
        self._loop.remove_reader(self._channel.fd)
        self._unregister()
        status = -(error.errno or 1)
        for address in list(self._handlers):
            self._dispatch_safely(CmEvent(CmEventType.DEVICE_REMOVAL, address, status=status))

    def _dispatch_safely(self, event: CmEvent) -> None:
        try:
            self._dispatch(event)
        except Exception:  # the events behind it are other ids' and must arrive
            logger.exception("could not handle %s", event.type.name)

    def _dispatch(self, event: CmEvent) -> None:
        is_request = event.type is CmEventType.CONNECT_REQUEST
        if is_request:
            self._users += 1  # the id that came with the request
        handler = self._handlers.get(event.listen_id if is_request else event.id)
        logger.debug("%s (status %d) for id %#x", event.type.name, event.status, event.id)
        if handler is not None:
            handler.handle_event(event)
        elif is_request:
            self._refuse(CmId.from_address(event.id))

    def _refuse(self, child: CmId) -> None:
        """Destroy the id of a request whose listener is being closed, which rejects it."""

        def destroy() -> None:
            destroy_quietly(child)
            hand_over(self._loop, self.release)

        workers.submit(destroy)


def destroy_quietly(cm_id: CmId) -> None:
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
