"""A device that is removed while it is in use, and added again.

The kernel removes a soft device only when every process has closed it. So each of these tests also
checks that this process closes it: otherwise `rdma link delete` would not end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial

import loops
import pytest
from helpers import (
    TIME_LIMIT,
    Pair,
    connected,
    end,
    has_pending_event,
    has_waiter,
    is_accepting,
    is_receiving,
    pending_requests,
    read_line,
    start_python,
)
from removing import SoftDevice, one_per_device
from streaming import DEFAULT, is_full, streaming

import aiordma
from aiordma import AsyncCmId, DeviceRemoved, PeerClosed, SyncCmId
from aiordma.rdmacm import DeviceAddress, parse_address
from aiordma.verbs import QueuePairCaps, QueuePairInit

ROUNDS = 2


async def error_of(waiting: Awaitable[object]) -> type[BaseException]:
    """Wait until an await fails with an RdmaError. Return the type of the error."""
    with pytest.raises(aiordma.RdmaError) as caught:
        await loops.wait_for(waiting, TIME_LIMIT)
    return type(caught.value)


async def start(
    *waiting: Awaitable[object], until: Callable[[], object]
) -> list[loops.Task[type[BaseException]]]:
    """Start a task with error_of() for each await. Return when they wait: when `until()` is true.

    None of them has ended by then.
    """
    tasks = [loops.create_task(error_of(one)) for one in waiting]
    await loops.until(
        lambda: until() or any(task.done() for task in tasks), "the tasks to wait or to end"
    )
    assert not any(task.done() for task in tasks)
    return tasks


async def start_receiving(pair: Pair) -> list[loops.Task[type[BaseException]]]:
    """Start a task that receives at each end of a connection."""
    ends = (pair.client, pair.server)
    return await start(*(end.recv() for end in ends), until=lambda: is_receiving(*ends))


async def check_echo(listener: aiordma.Listener, host: str) -> None:
    """Connect to a listener, and check that a message is echoed."""
    async with loops.timeout(TIME_LIMIT):
        accepting = loops.create_task(listener.accept())
        where = host, listener.local_address[1]
        async with aiordma.connect(*where) as client, await accepting as server:
            await client.send(b"still here")
            await server.send(await server.recv())
            assert await client.recv() == b"still here"


# --- waits that the removal ends ---


async def test_removal_ends_both_ends_of_a_connection(
    address: DeviceAddress, device: SoftDevice
) -> None:
    """The kernel removes one end first. That can close the connection before it removes the other,
    which then raises PeerClosed.
    """
    async with connected(address) as pair:
        tasks = await start_receiving(pair)
        device.start_removing()
        errors = set(await loops.gather(*tasks))
        assert DeviceRemoved in errors
        assert errors <= {DeviceRemoved, PeerClosed}
        for end in (pair.client, pair.server):
            assert await error_of(end.send(b"x")) in errors
            assert await error_of(end.recv()) in errors
    await device.wait_removed()


@pytest.mark.loops("asyncio")  # a variant of the test above: one loop is enough
async def test_removal_ends_both_ends_of_a_stream(
    address: DeviceAddress, device: SoftDevice
) -> None:
    async with streaming(address) as pair:
        blocked_send = pair.client.send(bytes(4 * DEFAULT.recv_buffer))
        tasks = await start(pair.client.receive(), blocked_send, until=lambda: is_full(pair.server))
        device.start_removing()
        errors = set(await loops.gather(*tasks))
        assert errors <= {DeviceRemoved, PeerClosed}
        await loops.until(lambda: pair.client.closed and pair.server.closed, "both ends to end")
        for end in (pair.client, pair.server):
            assert await error_of(end.send(b"x")) in (DeviceRemoved, PeerClosed)
    await device.wait_removed()


@pytest.mark.transport("IB")  # iWARP has no receiver-not-ready: its queue would not fill
async def test_removal_ends_a_send_on_a_full_queue(
    address: DeviceAddress, device: SoftDevice
) -> None:
    async def flood(pair: Pair) -> None:
        while True:
            await pair.client.send(b"x")

    async with connected(address) as pair:
        tasks = await start(flood(pair), until=lambda: pair.client.stats.send_waits)
        device.start_removing()
        assert await tasks[0] in (DeviceRemoved, PeerClosed)
    await device.wait_removed()


async def test_removal_ends_listeners_of_every_kind(
    address: DeviceAddress, device: SoftDevice
) -> None:
    here = parse_address(address.host)
    async with (
        aiordma.listen(address.host, 0) as first,
        aiordma.listen(address.host, 0) as second,
        aiordma.listen(address.host, 0) as third,
        await AsyncCmId.create() as async_id,
        await SyncCmId.create() as sync_id,
    ):
        for cm_id in (async_id, sync_id):
            cm_id.bind_addr(here)
            cm_id.listen()
        tasks = await start(
            first.get_request(),
            second.accept(),
            third.serve(lambda connection: connection.recv()),
            async_id.get_request(),
            sync_id.get_request(),
            until=lambda: (
                all(map(is_accepting, (first, second, third)))
                and all(map(has_waiter, (async_id, sync_id)))
            ),
        )
        device.start_removing()
        assert set(await loops.gather(*tasks)) == {DeviceRemoved}
        assert await error_of(first.get_request()) is DeviceRemoved
    await device.wait_removed()


@pytest.mark.parametrize("kind", [AsyncCmId, SyncCmId])
async def test_a_listener_that_migrates_after_removal_raises_device_removed(
    address: DeviceAddress, device: SoftDevice, kind: type[AsyncCmId | SyncCmId]
) -> None:
    """Its pending request is lost with the device. No migration changes that."""
    listener: AsyncCmId | SyncCmId = await kind.create()
    listener.bind_addr(parse_address(address.host))
    listener.listen()
    tasks = await start(
        aiordma.connect(*listener.local_address), until=partial(has_pending_event, listener)
    )
    device.start_removing()
    await loops.gather(*tasks)
    for _ in range(3):
        assert await error_of(listener.get_request()) is DeviceRemoved
        if isinstance(listener, SyncCmId):
            listener = await listener.migrate()
        else:
            listener = await listener.migrate(None)
    await listener.aclose()
    await device.wait_removed()


@pytest.mark.parametrize(("answer", "late"), [("reject", 0), ("accept", 0), ("accept", 1)])
async def test_a_request_after_removal_can_only_be_rejected(
    address: DeviceAddress, device: SoftDevice, answer: str, late: float
) -> None:
    """It is not notified of the removal. Its id is still bound to the device, which allows no new
    objects. The removal ends the connect() of the peer.
    """
    async with aiordma.listen(address.host, 0) as listener:
        tasks = await start(
            aiordma.connect(*listener.local_address), until=lambda: pending_requests(listener)
        )
        request = await listener.get_request()
        device.start_removing()
        assert await tasks[0] is DeviceRemoved
        await loops.sleep(late)  # time is the subject: it selects the moment of the answer
        if answer == "reject":
            await request.reject()
        else:
            error = await error_of(request.accept())
            assert issubclass(error, (DeviceRemoved, aiordma.ConnectError))
        del request
    await device.wait_removed()


async def test_connect_of_a_synchronous_id_after_removal_fails(
    address: DeviceAddress, device: SoftDevice
) -> None:
    async with aiordma.listen(address.host, 0) as listener, await SyncCmId.create() as cm_id:
        accepting = loops.create_task(error_of(listener.accept()))
        await cm_id.resolve_addr(parse_address(address.host, listener.local_address[1]))
        await cm_id.resolve_route()
        device.start_removing()
        assert await accepting is DeviceRemoved
        assert issubclass(await error_of(cm_id.connect()), aiordma.RdmaError)
    await device.wait_removed()


@pytest.mark.parametrize("kind", [AsyncCmId, SyncCmId])
async def test_removal_ends_the_wait_for_a_completion(
    address: DeviceAddress, device: SoftDevice, kind: type[AsyncCmId | SyncCmId]
) -> None:
    async with aiordma.listen(address.host, 0) as listener, await kind.create() as cm_id:
        accepting = loops.create_task(listener.accept())
        await cm_id.resolve_addr(parse_address(address.host, listener.local_address[1]))
        await cm_id.resolve_route()
        await cm_id.create_qp(QueuePairInit(QueuePairCaps(max_send_wr=4, max_recv_wr=4)))
        await cm_id.reg_msgs(bytearray(64))
        await cm_id.connect()
        async with await accepting:
            (task,) = await start(cm_id.get_recv_comp(), until=lambda: has_waiter(cm_id))
            device.start_removing()
            assert await task in (DeviceRemoved, PeerClosed)
    await device.wait_removed()


# --- a device that is added again ---


@pytest.fixture
def devices() -> Iterator[list[SoftDevice]]:
    """Yield all devices of this machine. They are restored after the test."""
    with ExitStack() as stack:
        soft = [SoftDevice.of_address(found).restored() for found in one_per_device()]
        yield [stack.enter_context(one) for one in soft]


@pytest.mark.parametrize("which", ["one", "all"])
async def test_a_device_that_is_added_again_can_be_used(
    address: DeviceAddress, devices: list[SoftDevice], which: str
) -> None:
    """librdmacm does not close the last device: see aiordma.rdmacm.contexts."""
    removed = [device for device in devices if which == "all" or device.name == address.device]
    for _ in range(ROUNDS):
        async with connected(address) as pair:
            await pair.client.send(b"hello")
            assert await pair.server.recv() == b"hello"
            tasks = await start_receiving(pair)
            for device in removed:
                device.start_removing()
            await loops.gather(*tasks)
        for device in removed:
            await device.wait_removed()
        async with loops.timeout(TIME_LIMIT):
            with pytest.raises(aiordma.RdmaError):
                await aiordma.listen(address.host, 0)
        for device in removed:
            await device.add_again()
        async with aiordma.listen(address.host, 0) as listener:
            await check_echo(listener, address.host)


async def test_a_listener_on_all_addresses_survives_removal(
    address: DeviceAddress, device: SoftDevice
) -> None:
    async with aiordma.listen(None, 0) as listener:
        await check_echo(listener, address.host)
        waiting = loops.create_task(listener.get_request())
        for _ in range(ROUNDS):
            device.start_removing()
            await device.wait_removed()
            assert not waiting.done()
            await device.add_again()
        async with loops.timeout(TIME_LIMIT):
            where = address.host, listener.local_address[1]
            connecting = loops.create_task(error_of(aiordma.connect(*where)))
            await (await waiting).reject()
            assert await connecting is aiordma.Rejected
        await check_echo(listener, address.host)


async def test_removal_does_not_disturb_another_device(
    address: DeviceAddress, device: SoftDevice
) -> None:
    """Without a second device this checks nothing. The lab has two with `--device both`."""
    others = [other for other in one_per_device() if other.device != address.device]
    for other in others:
        async with connected(other) as pair:
            for _ in range(ROUNDS):
                device.start_removing()
                await device.wait_removed()
                await pair.client.send(b"hello")
                assert await pair.server.recv() == b"hello"
                async with aiordma.listen(other.host, 0) as listener:
                    await check_echo(listener, other.host)
                await device.add_again()


# --- no wait is under way ---

IDLE = """
import asyncio, signal, sys
import aiordma

async def main(host):
    async with aiordma.listen(host, 0) as listener:
        accepting = asyncio.create_task(listener.accept())
        async with aiordma.connect(*listener.local_address), await accepting:
            pass

asyncio.run(main(sys.argv[1]))
print("idle", flush=True)
signal.pause()
"""


@pytest.mark.loops("asyncio")  # the other process is tested
async def test_a_process_without_a_loop_closes_the_device(
    address: DeviceAddress, device: SoftDevice
) -> None:
    process = start_python(IDLE, address.host)
    try:
        assert await loops.to_thread(read_line, process) == "idle"
        device.start_removing()
        await device.wait_removed()
        assert process.poll() is None
    finally:
        await end(process)


async def test_removal_completes_after_a_late_close(
    address: DeviceAddress, device: SoftDevice
) -> None:
    """A driver with "disassociation" removes the device at once, others after the close."""
    async with connected(address) as pair:
        device.start_removing()
        assert await error_of(pair.client.recv()) in (DeviceRemoved, PeerClosed)
        await loops.sleep(1)  # time is the subject: a close long after the removal
    await device.wait_removed()
