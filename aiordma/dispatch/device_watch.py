"""watch_devices(): what happens to the RDMA devices of this machine, as it happens."""

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
    """Watch the RDMA devices of this machine.

        async with aiordma.watch_devices() as events:
            async for event in events:
                print(event.device, event.type.name, event.port_num)

    Tells of every device that is there when the block is entered; `events.devices` says which. A
    device that comes later, or comes back, is another watch's. No connection is needed.

    See DeviceWatch for what entering raises.
    """
    return DeviceWatch()


class DeviceWatch:
    """The events of all devices, one after another: `async for event in events`.

    Each is a `verbs.AsyncEvent`, of a port (PORT_ERR: it went down, PORT_ACTIVE: it came up), of a
    device (DEVICE_FATAL: it was removed, nothing more comes of it), or of a queue, see
    ibv_get_async_event(3). Iterating ends when the block is left, or the last device is gone.
    """

    def __init__(self) -> None:
        self.devices: tuple[str, ...] = ()
        """The names of the devices that are watched, and are not gone."""
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
            raise LocalClosed("a watch is entered once: call watch_devices() again")
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
        subscription = DeviceSubscription(loop, device, lambda event: self._take(event, device))
        subscription.start()
        self._subscriptions.append(subscription)
        self.devices = tuple(sorted([*self.devices, device.name]))

    def _take(self, event: AsyncEvent, device: Device) -> None:
        self._events.append(event)
        if event.type is AsyncEventType.DEVICE_FATAL:
            self._drop(device)
        self._wake()

    def _drop(self, device: Device) -> None:
        """The device is gone, and will only be let go if nobody watches it any more."""
        self.devices = tuple(name for name in self.devices if name != device.name)
        for subscription in list(self._subscriptions):
            if subscription.device == device:
                self._subscriptions.remove(subscription)
                subscription.stop()

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.wake_all()

    def __aiter__(self) -> AsyncIterator[AsyncEvent]:
        """Iterate over events."""
        return self

    async def __anext__(self) -> AsyncEvent:
        """Wait for the next event. Cancelling loses none.

        Raises:
            BusyError: another task is waiting for events here.
        """
        if self._arrived is None:
            raise LocalClosed("a watch is to be entered first: async with watch_devices()")
        if len(self._arrived):
            raise BusyError("another task is waiting for device events here")
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
