"""A device that is removed under everything, and comes back.

The kernel removes a soft device only when every process has closed it, so each of these tests also
shows that this process does: `rdma link delete` ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import ExitStack

import loops
import pytest
from helpers import TIME_LIMIT, Pair, connected, end, read_line, start_python
from removing import SoftDevice, one_per_device
from streaming import DEFAULT, streaming

import aiordma
from aiordma import AsyncCmId, Connection, DeviceRemoved, PeerClosed, SyncCmId
from aiordma.rdmacm import DeviceAddress, parse_address
from aiordma.verbs import QueuePairCaps, QueuePairInit

ROUNDS = 2


@pytest.fixture
def device(address: DeviceAddress) -> Iterator[SoftDevice]:
    """The device at `address`, which is there again after the test."""
    with SoftDevice.of_address(address).restored() as soft:
        yield soft


async def error_of(waiting: Awaitable[object]) -> type[BaseException]:
    with pytest.raises(aiordma.RdmaError) as caught:
        await loops.wait_for(waiting, TIME_LIMIT)
    return type(caught.value)


async def start(*waiting: Awaitable[object]) -> list[loops.Task[type[BaseException]]]:
    tasks = [loops.create_task(error_of(one)) for one in waiting]
    await loops.sleep(0.2)
    assert not any(task.done() for task in tasks)
    return tasks


async def echo_at(listener: aiordma.Listener, host: str) -> None:
    async with loops.timeout(TIME_LIMIT):
        accepting = loops.create_task(listener.accept())
        where = host, listener.local_address[1]
        async with aiordma.connect(*where) as client, await accepting as server:
            await client.send(b"still here")
            await server.send(await server.recv())
            assert await client.recv() == b"still here"


async def open_one(where: tuple[str, int]) -> Connection:
    return await aiordma.connect(*where)


# --- whoever waits ---


async def test_both_ends_of_a_connection(address: DeviceAddress, device: SoftDevice) -> None:
    """The end that the kernel takes first may close the connection before the other is taken."""
    async with connected(address) as pair:
        tasks = await start(pair.client.recv(), pair.server.recv())
        device.start_removing()
        errors = set(await loops.gather(*tasks))
        assert DeviceRemoved in errors
        assert errors <= {DeviceRemoved, PeerClosed}
        for end in (pair.client, pair.server):
            assert await error_of(end.send(b"x")) in errors
            assert await error_of(end.recv()) in errors
    await device.wait_removed()


@pytest.mark.loops("asyncio")  # another shape of the above
async def test_both_ends_of_a_stream(address: DeviceAddress, device: SoftDevice) -> None:
    async with streaming(address) as pair:
        held_back = pair.client.send(bytes(4 * DEFAULT.recv_buffer))
        tasks = await start(pair.client.receive(), held_back)
        device.start_removing()
        errors = set(await loops.gather(*tasks))
        assert errors <= {DeviceRemoved, PeerClosed}
        for end in (pair.client, pair.server):
            assert await error_of(end.send(b"x")) in (DeviceRemoved, PeerClosed)
    await device.wait_removed()


@pytest.mark.transport("IB")  # iWARP does not hold a sender back
async def test_a_sender_that_is_held_back(address: DeviceAddress, device: SoftDevice) -> None:
    async def flood(pair: Pair) -> None:
        while True:
            await pair.client.send(b"x")

    async with connected(address) as pair:
        tasks = await start(flood(pair))
        device.start_removing()
        assert await tasks[0] in (DeviceRemoved, PeerClosed)
    await device.wait_removed()


async def test_listeners_of_every_kind(address: DeviceAddress, device: SoftDevice) -> None:
    here = parse_address(address.host)
    async with (
        aiordma.listen(address.host, 0) as first,
        aiordma.listen(address.host, 0) as second,
        aiordma.listen(address.host, 0) as third,
        await AsyncCmId.create() as in_loop,
        await SyncCmId.create() as in_thread,
    ):
        for cm_id in (in_loop, in_thread):
            cm_id.bind_addr(here)
            cm_id.listen()
        tasks = await start(
            first.get_request(),
            second.accept(),
            third.serve(lambda connection: connection.recv()),
            in_loop.get_request(),
            in_thread.get_request(),
        )
        device.start_removing()
        assert set(await loops.gather(*tasks)) == {DeviceRemoved}
        assert await error_of(first.get_request()) is DeviceRemoved
    await device.wait_removed()


@pytest.mark.parametrize("kind", [AsyncCmId, SyncCmId])
async def test_a_listener_that_moves_afterwards(
    address: DeviceAddress, device: SoftDevice, kind: type[AsyncCmId | SyncCmId]
) -> None:
    """A request that nobody has taken goes with the device, wherever it is asked for."""
    listener: AsyncCmId | SyncCmId = await kind.create()
    listener.bind_addr(parse_address(address.host))
    listener.listen()
    tasks = await start(open_one(listener.local_address))
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


async def test_a_pending_connect(address: DeviceAddress, device: SoftDevice) -> None:
    """The request that nobody answers hears nothing: it is only good to be refused."""
    async with aiordma.listen(address.host, 0) as listener:
        tasks = await start(open_one(listener.local_address))
        request = await listener.get_request()
        device.start_removing()
        assert await tasks[0] is DeviceRemoved
        await request.reject()
        del request
    await device.wait_removed()


@pytest.mark.parametrize("late", [0, 1])
async def test_a_request_that_is_accepted_too_late(
    address: DeviceAddress, device: SoftDevice, late: float
) -> None:
    """Its id is bound to the device still, but nothing may be made from that any more."""
    async with aiordma.listen(address.host, 0) as listener:
        tasks = await start(open_one(listener.local_address))
        request = await listener.get_request()
        device.start_removing()
        await tasks[0]
        await loops.sleep(late)
        error = await error_of(request.accept())
        assert issubclass(error, (DeviceRemoved, aiordma.ConnectError))
        del request
    await device.wait_removed()


async def test_a_connected_synchronous_id(address: DeviceAddress, device: SoftDevice) -> None:
    async with aiordma.listen(address.host, 0) as listener, await SyncCmId.create() as cm_id:
        accepting = loops.create_task(error_of(listener.accept()))
        await cm_id.resolve_addr(parse_address(address.host, listener.local_address[1]))
        await cm_id.resolve_route()
        device.start_removing()
        assert await accepting is DeviceRemoved
        assert issubclass(await error_of(cm_id.connect()), aiordma.RdmaError)
    await device.wait_removed()


@pytest.mark.parametrize("kind", [AsyncCmId, SyncCmId])
async def test_completions_of_an_id(
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
            (task,) = await start(cm_id.get_recv_comp())
            device.start_removing()
            assert await task in (DeviceRemoved, PeerClosed)
    await device.wait_removed()


@pytest.mark.transport("IB")
async def test_datagrams(address: DeviceAddress, device: SoftDevice) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        tasks = await start(endpoint.recv_from())
        device.start_removing()
        assert await tasks[0] is DeviceRemoved
    await device.wait_removed()
    await device.add_again()
    async with aiordma.open_datagram((address.host, 0)):
        pass


# --- and back again ---


async def test_the_device_is_used_again_when_it_returns(
    address: DeviceAddress, device: SoftDevice
) -> None:
    for _ in range(ROUNDS):
        async with connected(address) as pair:
            await pair.client.send(b"hello")
            assert await pair.server.recv() == b"hello"
            tasks = await start(pair.client.recv(), pair.server.recv())
            device.start_removing()
            await loops.gather(*tasks)
        await device.wait_removed()
        async with loops.timeout(TIME_LIMIT):
            with pytest.raises(aiordma.RdmaError):
                await aiordma.listen(address.host, 0)
        await device.add_again()
        async with aiordma.listen(address.host, 0) as listener:
            await echo_at(listener, address.host)


async def test_a_listener_on_all_addresses_lives_on(
    address: DeviceAddress, device: SoftDevice
) -> None:
    async with aiordma.listen(None, 0) as listener:
        await echo_at(listener, address.host)
        waiting = loops.create_task(listener.get_request())
        for _ in range(ROUNDS):
            device.start_removing()
            await device.wait_removed()
            assert not waiting.done()
            await device.add_again()
        async with loops.timeout(TIME_LIMIT):
            where = address.host, listener.local_address[1]
            connecting = loops.create_task(error_of(open_one(where)))
            await (await waiting).reject()
            assert await connecting is aiordma.Rejected
        await echo_at(listener, address.host)


async def test_a_device_beside_it_does_not_notice(
    address: DeviceAddress, device: SoftDevice
) -> None:
    """For which the lab is to have two: alone, it is the removal of the last one."""
    others = [other for other in one_per_device() if other.device != address.device]
    for other in others:
        async with connected(other) as pair:
            for _ in range(ROUNDS):
                device.start_removing()
                await device.wait_removed()
                await pair.client.send(b"hello")
                assert await pair.server.recv() == b"hello"
                async with aiordma.listen(other.host, 0) as listener:
                    await echo_at(listener, other.host)
                await device.add_again()


@pytest.fixture
def devices() -> Iterator[list[SoftDevice]]:
    """All of the machine, which are there again after the test."""
    with ExitStack() as stack:
        soft = [SoftDevice.of_address(found).restored() for found in one_per_device()]
        yield [stack.enter_context(one) for one in soft]


async def test_the_last_device_of_the_machine(
    address: DeviceAddress, devices: list[SoftDevice]
) -> None:
    """librdmacm closes nothing then, see aiordma.rdmacm.contexts."""
    for _ in range(ROUNDS):
        async with connected(address) as pair:
            tasks = await start(pair.client.recv(), pair.server.recv())
            for device in devices:
                device.start_removing()
            await loops.gather(*tasks)
        for device in devices:
            await device.wait_removed()
        for device in devices:
            await device.add_again()
        async with aiordma.listen(address.host, 0) as listener:
            await echo_at(listener, address.host)


# --- nobody waits ---

IDLE = """
import asyncio, sys, time
import aiordma

async def main(host):
    async with aiordma.listen(host, 0) as listener:
        accepting = asyncio.create_task(listener.accept())
        async with aiordma.connect(*listener.local_address), await accepting:
            pass

asyncio.run(main(sys.argv[1]))
print("idle", flush=True)
time.sleep(600)
"""


@pytest.mark.loops("asyncio")  # it is the other process that is tested
async def test_a_process_without_a_loop_lets_go(address: DeviceAddress, device: SoftDevice) -> None:
    process = start_python(IDLE, address.host)
    try:
        assert await loops.to_thread(read_line, process) == "idle"
        device.start_removing()
        await device.wait_removed()
        assert process.poll() is None
    finally:
        await end(process)


async def test_a_process_that_never_closes_is_waited_for(
    address: DeviceAddress, device: SoftDevice
) -> None:
    """Or the driver has "disassociation", and the device goes at once. In the end it is gone."""
    async with connected(address) as pair:
        device.start_removing()
        assert await error_of(pair.client.recv()) in (DeviceRemoved, PeerClosed)
        await loops.sleep(1)
    await device.wait_removed()
