"""watch_devices(): ports that go down and up, and devices that are removed."""

from __future__ import annotations

import select

import loops
import pytest
from helpers import connected
from machine import kernel_version
from removing import SoftDevice, one_per_device

import aiordma
from aiordma import BusyError, DeviceWatch, LocalClosed
from aiordma.enums import AsyncEventType, PortState
from aiordma.rdmacm import DeviceAddress, DeviceReference
from aiordma.verbs import AsyncEvent

DOWN, UP = AsyncEventType.PORT_ERR, AsyncEventType.PORT_ACTIVE
REMOVED = AsyncEventType.DEVICE_FATAL


async def next_of(watch: DeviceWatch, device: str, kind: AsyncEventType) -> AsyncEvent:
    """Return the next event of this device and kind. Skip the others."""
    async for event in watch:
        if (event.device, event.type) == (device, kind):
            return event
    pytest.fail("the watch ended")


async def start_waiting(watch: DeviceWatch) -> loops.Task[AsyncEvent | None]:
    """Start a task that waits for the next event, and skip the events that have arrived before.

    The events of a test, or of another device, can arrive during the next test.
    """

    def waits_or_is_done() -> bool:
        return task.done() or (watch._arrived is not None and len(watch._arrived) > 0)

    while True:
        task = loops.create_task(anext(watch, None))
        await loops.until(waits_or_is_done, "a task to wait for an event")
        if not task.done():
            return task
        assert task.result() is not None, "the watch ended"


def port_state(name: str) -> PortState:
    reference = DeviceReference()
    try:
        (device,) = (device for device in reference.devices if device.name == name)
        return device.query_port(1).state
    finally:
        reference.close()


async def test_a_port_goes_down_and_up(address: DeviceAddress, device: SoftDevice) -> None:
    async with aiordma.watch_devices() as watch:
        assert address.device in watch.devices
        await loops.to_thread(device.set_link, "down")
        assert (await next_of(watch, address.device, DOWN)).port_num == 1
        assert await loops.to_thread(port_state, address.device) is PortState.DOWN
        await loops.to_thread(device.set_link, "up")
        assert (await next_of(watch, address.device, UP)).port_num == 1
        assert await loops.to_thread(port_state, address.device) is PortState.ACTIVE


async def test_every_watch_receives_an_event(address: DeviceAddress, device: SoftDevice) -> None:
    """Two watches are in this loop, a third one is in the loop of another thread."""

    async def watch_one() -> AsyncEvent:
        async with aiordma.watch_devices() as watch:
            watching.append(watch)
            return await next_of(watch, address.device, DOWN)

    watching: list[DeviceWatch] = []
    tasks = [loops.create_task(watch_one()) for _ in range(2)]
    tasks.append(loops.create_task(loops.to_thread(loops.runner_of_this_kind(), watch_one)))
    async with connected(address):
        await loops.until(lambda: len(watching) == 3, "three watches to begin")
        await loops.to_thread(device.set_link, "down")
        assert len(set(await loops.gather(*tasks))) == 1
        await loops.to_thread(device.set_link, "up")


@pytest.mark.transport("IB")
async def test_a_connection_survives_a_port_that_goes_down(
    address: DeviceAddress, device: SoftDevice
) -> None:
    async with connected(address) as pair, aiordma.watch_devices() as watch:
        await loops.to_thread(device.set_link, "down")
        await next_of(watch, address.device, DOWN)
        await loops.to_thread(device.set_link, "up")
        await next_of(watch, address.device, UP)
        await pair.client.send(b"after")
        assert await pair.server.recv() == b"after"


@pytest.mark.transport("IWARP")
async def test_an_iwarp_connection_ends_with_its_port_or_survives(
    address: DeviceAddress, device: SoftDevice
) -> None:
    """siw of Linux 6.1 ends its connections when the port goes down, that of 6.12 does not."""
    async with connected(address) as pair:
        receiving = loops.create_task(pair.client.recv())
        await loops.to_thread(device.set_link, "down")
        if kernel_version() < (6, 12):
            with pytest.raises(aiordma.RdmaError):
                await receiving
            return
        await loops.to_thread(device.set_link, "up")
        await pair.server.send(b"after")
        assert await receiving == b"after"


async def test_a_removed_device_is_reported_and_others_stay_watched(
    address: DeviceAddress, device: SoftDevice
) -> None:
    others = sorted(one.device for one in one_per_device() if one.device != address.device)
    async with aiordma.watch_devices() as watch:
        device.start_removing()
        assert (await next_of(watch, address.device, REMOVED)).port_num == 0
        assert list(watch.devices) == others
        await device.wait_removed()
        if others:
            await loops.cancel(await start_waiting(watch))
        else:
            with pytest.raises(StopAsyncIteration):
                await anext(watch)
        await device.add_again()
        assert list(watch.devices) == others
    async with aiordma.watch_devices() as watch:
        assert address.device in watch.devices


@pytest.mark.may_block
async def test_a_cancelled_wait_loses_no_event(address: DeviceAddress, device: SoftDevice) -> None:
    async with aiordma.watch_devices() as watch:
        task = await start_waiting(watch)
        fds = [one.device.async_fd for one in watch._subscriptions]
        device.set_link("down")  # blocks: the loop does not run before the task is cancelled
        loops.block_until(lambda: select.select(fds, [], [], 0)[0], "the event to arrive")
        await loops.cancel(task)
        await next_of(watch, address.device, DOWN)


async def test_a_second_task_that_waits_raises_busy(address: DeviceAddress) -> None:
    async with aiordma.watch_devices() as watch:
        task = await start_waiting(watch)
        with pytest.raises(BusyError):
            await anext(watch)
    assert await task is None


async def test_a_watch_can_be_entered_only_once(address: DeviceAddress) -> None:
    watch = aiordma.watch_devices()
    with pytest.raises(LocalClosed):
        await anext(watch)
    async with watch:
        pass
    assert [event async for event in watch] == []
    with pytest.raises(LocalClosed):
        await watch.__aenter__()
