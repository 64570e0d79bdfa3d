"""A datagram endpoint whose device is removed, and peers whose process is killed."""

from __future__ import annotations

import loops
import pytest
from helpers import TIME_LIMIT, end, read_line, start_python
from removing import SoftDevice

import aiordma
from aiordma import DeviceRemoved, MulticastGroup
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.transport("IB")

GROUP = "239.90.91.92"
PEER = """
import asyncio, sys, aiordma

async def main():
    async with aiordma.open_datagram((sys.argv[1], 0)) as endpoint:
        await endpoint.join(sys.argv[2])
        endpoint.listen()
        serving = asyncio.create_task(endpoint.serve())
        print(endpoint.local_address[1], flush=True)
        async for datagram in endpoint:
            await endpoint.send_to(datagram.peer, datagram.data)

asyncio.run(main())
"""


async def test_removal_of_the_device_ends_every_wait(
    address: DeviceAddress, device: SoftDevice
) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        endpoint.listen()
        group = await endpoint.join(GROUP)
        waiting = [
            loops.create_task(endpoint.recv_from()),
            loops.create_task(endpoint.get_request()),
        ]
        queue_pair = endpoint._queue_pair
        await loops.until(
            lambda: len(queue_pair._receive_waiters) and len(queue_pair._request_waiters),
            "both tasks to wait",
        )
        device.start_removing()
        async with loops.timeout(TIME_LIMIT):
            for result in await loops.gather(*waiting, return_exceptions=True):
                assert isinstance(result, DeviceRemoved)
        for call in (
            endpoint.recv_from(),
            endpoint.send_to(group, b"late"),
            endpoint.join("239.90.91.93"),
            endpoint.resolve(address.host, 1),
        ):
            with pytest.raises(DeviceRemoved):
                await call
        await endpoint.leave(group)
    await device.wait_removed()
    await device.add_again()
    async with (
        aiordma.open_datagram((address.host, 0)) as endpoint,
        await endpoint.join(GROUP) as again,
    ):
        await endpoint.send_to(again, b"back")
        async with loops.timeout(TIME_LIMIT):
            assert (await endpoint.recv_from()).data == b"back"


async def test_a_killed_peer_does_not_disturb_the_endpoint(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        for _ in range(2):
            process = start_python(PEER, address.host, GROUP)
            try:
                port = int(await loops.to_thread(read_line, process))
                peer = await endpoint.resolve(address.host, port)
                await endpoint.send_to(peer, b"hello")
                async with loops.timeout(TIME_LIMIT):
                    assert (await endpoint.recv_from()).data == b"hello"
            finally:
                await end(process)
            for _ in range(5):
                await endpoint.send_to(peer, b"to a dead peer")
            with pytest.raises(aiordma.Rejected):
                await endpoint.resolve(*peer.address)
            group = await endpoint.join(GROUP)
            assert isinstance(group, MulticastGroup)
            await endpoint.send_to(group, b"to myself")
            async with loops.timeout(TIME_LIMIT):
                assert (await endpoint.recv_from()).data == b"to myself"
            await group.leave()
