"""DeviceSubscription: the asynchronous events of a device, for handlers in all loops.

A process has one fd for these events of a device. Each loop with a subscription watches it. The
loop that reads an event dispatches it to all others. Drivers without "disassociation" raise no
event when a device is removed; `device_contexts` detects the removal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from aiordma.enums import AsyncEventType
from aiordma.errors import VerbsError
from aiordma.loop import Loop, call_threadsafe
from aiordma.rdmacm import device_contexts
from aiordma.verbs import AsyncEvent, Device

logger = logging.getLogger(__name__)


class DeviceSubscription:
    """A subscription: from start() to stop(), the loop calls `handler` with each event of `device`.

    When the device is removed, the handler gets one DEVICE_FATAL, however the removal was detected,
    and no further event. The device's context stays open until stop(), so call that soon then.
    """

    def __init__(self, loop: Loop, device: Device, handler: Callable[[AsyncEvent], None]) -> None:
        self.loop = loop
        self.device = device
        self._handler = handler
        self._active = False
        self._is_removed = False

    def start(self) -> None:
        """Begin. Call it on the loop's thread.

        Raises:
            VerbsError: the device is closed already.
        """
        self.device.watch_async_events()
        self.device.acquire()
        self._active = True
        with _lock:
            reader = _readers.get((self.device, self.loop))
            if reader is None:
                reader = _readers[self.device, self.loop] = _Reader(self.device, self.loop)
            reader.subscriptions.append(self)
        reader.watch()
        if reader.is_removed or device_contexts.is_removed(self.device):  # before the subscription
            call_threadsafe(self.loop, reader.dispatch_removal)

    def stop(self) -> None:
        """End the subscription. Idempotent.

        Call it on the loop's thread, or on any thread once the loop is closed.
        """
        if not self._active:
            return
        self._active = False
        with _lock:
            reader = _readers[self.device, self.loop]
            reader.subscriptions.remove(self)
            if not reader.subscriptions:
                del _readers[self.device, self.loop]
        if not reader.subscriptions:
            reader.unwatch()
        self.device.release()  # from here on the fd can be closed

    def handle(self, event: AsyncEvent) -> None:
        """Call the handler. An exception is only logged. Called by the reader."""
        if not self._active or self._is_removed:
            return
        self._is_removed = event.type is AsyncEventType.DEVICE_FATAL
        try:
            self._handler(event)
        except Exception:  # the other handlers must get the event too
            logger.exception("could not handle %s of %s", event.type.name, event.device)


class _Reader:
    """The reader of one device's events on one loop."""

    def __init__(self, device: Device, loop: Loop) -> None:
        self.subscriptions: list[DeviceSubscription] = []
        self._device = device
        self._loop = loop
        self._watching = False
        self.is_removed = False
        """True if the removal of the device was dispatched."""

    def watch(self) -> None:
        if not self._watching and not self.is_removed:
            self._watching = True
            self._loop.add_reader(self._device.async_fd, self._on_readable)

    def unwatch(self) -> None:
        if self._watching:
            self._watching = False
            with suppress(RuntimeError):  # a closed loop watches no fd any more
                self._loop.remove_reader(self._device.async_fd)

    def dispatch(self, event: AsyncEvent) -> None:
        if event.type is AsyncEventType.DEVICE_FATAL:
            self.dispatch_removal()
            return
        for subscription in list(self.subscriptions):
            subscription.handle(event)

    def dispatch_removal(self) -> None:
        """Dispatch the removal to the subscriptions that do not know it yet."""
        self.unwatch()  # the fd might stay readable for ever
        self.is_removed = True
        event = AsyncEvent(self._device.name, AsyncEventType.DEVICE_FATAL)
        for subscription in list(self.subscriptions):
            subscription.handle(event)

    def _on_readable(self) -> None:
        try:
            events = self._device.get_async_events()
        except VerbsError as error:
            logger.debug("%s: %s", self._device.name, error)
            events = [AsyncEvent(self._device.name, AsyncEventType.DEVICE_FATAL)]
            device_contexts.check_soon()
        for event in events:
            logger.debug("%s", event)
            _dispatch_to_others(self._device, event, self)
            self.dispatch(event)


def _dispatch_to_others(device: Device, event: AsyncEvent, reader: _Reader | None) -> None:
    """Have all readers of `device` but `reader` dispatch the event, each on its own loop."""
    with _lock:
        others = [
            (loop, other)
            for (other_device, loop), other in _readers.items()
            if other_device == device and other is not reader
        ]
    for loop, other in others:
        call_threadsafe(loop, lambda other=other: other.dispatch(event))  # type: ignore[misc]


def _device_removed(device: Device) -> None:
    """Dispatch the removal of a device. Called in the thread that looks for devices."""
    _dispatch_to_others(device, AsyncEvent(device.name, AsyncEventType.DEVICE_FATAL), None)


_lock = threading.Lock()
_readers: dict[tuple[Device, Loop], _Reader] = {}
device_contexts.on_removed = _device_removed
