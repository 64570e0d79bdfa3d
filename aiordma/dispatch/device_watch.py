"""watch_devices(): the events of the RDMA devices of this machine."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from aiordma.dispatch import DeviceSubscription, initialise
from aiordma.enums import AsyncEventType
from aiordma.errors import BusyError, LocalClosed, VerbsError
from aiordma.loop import Loop, WaitQueue, checkpoint, make_in_worker, running_loop, worker_pool
from aiordma.rdmacm import DeviceReference
from aiordma.verbs import AsyncEvent, Device


def watch_devices() -> DeviceWatch:
    """Watch the RDMA devices of this machine::

        async with aiordma.watch_devices() as events:
            async for event in events:
                print(event.device, event.type.name, event.port_num)

    Watches all devices that exist when the block is entered; `events.devices` lists them. A device
    that is added later, or added again, needs a new watch. No connection is needed.

    See DeviceWatch for the exceptions at the beginning of the block.
    """
    return DeviceWatch()


class DeviceWatch:
    """The events of all devices, one after another: `async for event in events`.

    Each event is a `verbs.AsyncEvent`: of a port (PORT_ERR: it is down, PORT_ACTIVE: it is up), of
    a device (DEVICE_FATAL: it was removed, and raises no further event), or of a queue, see
    ibv_get_async_event(3). The iteration ends when the block is left or the last device is removed.
    """

    def __init__(self) -> None:
        self.devices: tuple[str, ...] = ()
        """The names of the watched devices, without the removed ones."""
        self._subscriptions: list[DeviceSubscription] = []
        self._events: deque[AsyncEvent] = deque()
        self._arrived: WaitQueue | None = None

    async def __aenter__(self) -> Self:
        """Start watching. Cancelling leaves nothing behind.

        Raises:
            VerbsError: ENODEV when there is no RDMA device.
            LocalClosed: this watch was entered before.
        """
        if self._arrived is not None:
            raise LocalClosed("a watch can be entered only once: call watch_devices() again")
        loop = running_loop()
        self._arrived = WaitQueue(loop)
        await initialise(loop)
        reference = await make_in_worker(loop, DeviceReference, DeviceReference.close)
        try:
            for device in reference.devices:
                self._watch(loop, device)
        except VerbsError:
            self._stop()
            raise
        finally:
            worker_pool.submit(reference.close)
        return self

    def _watch(self, loop: Loop, device: Device) -> None:
        subscription = DeviceSubscription(loop, device, lambda event: self._append(event, device))
        subscription.start()
        self._subscriptions.append(subscription)
        self.devices = tuple(sorted([*self.devices, device.name]))

    def _append(self, event: AsyncEvent, device: Device) -> None:
        self._events.append(event)
        if event.type is AsyncEventType.DEVICE_FATAL:
            self._unwatch(device)
        self._wake()

    def _unwatch(self, device: Device) -> None:
        """Stop watching a removed device, so that its context can be closed."""
        self.devices = tuple(name for name in self.devices if name != device.name)
        for subscription in list(self._subscriptions):
            if subscription.device == device:
                self._subscriptions.remove(subscription)
                subscription.stop()

    def _wake(self) -> None:
        assert self._arrived is not None  # since the watch was entered
        self._arrived.wake_all()

    def __aiter__(self) -> AsyncIterator[AsyncEvent]:
        """Iterate over events."""
        return self

    async def __anext__(self) -> AsyncEvent:
        """Wait for the next event. Cancelling loses no event.

        Raises:
            BusyError: another task is waiting for events of this watch.
            LocalClosed: the watch was not entered.
        """
        if self._arrived is None:
            raise LocalClosed("the watch was not entered: use async with watch_devices()")
        if len(self._arrived):
            raise BusyError("another task is waiting for events of this watch")
        await checkpoint()
        while not self._events:
            if not self._subscriptions:
                raise StopAsyncIteration
            await self._arrived.wait()
        return self._events.popleft()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
        await checkpoint()

    def _stop(self) -> None:
        for subscription in self._subscriptions:
            subscription.stop()
        self._subscriptions.clear()
        self._events.clear()
        self.devices = ()
        self._wake()

    def __repr__(self) -> str:
        return f"<DeviceWatch of {', '.join(self.devices) or 'nothing'}>"
