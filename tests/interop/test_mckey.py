"""Multicast with the C program mckey of rdma-core, in both roles.

The sender sends COUNT datagrams of 100 bytes, each with its queue pair number as immediate data,
and leaves the group at once. The receiver waits for COUNT datagrams.
"""

from __future__ import annotations

import asyncio

import pytest
from helpers import TIME_LIMIT
from programs import end, start

import aiordma
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.asyncio, pytest.mark.transport("IB")]

GROUP = "239.60.61.62"
COUNT = 10
SIZE = 100
MCKEY = ("mckey", "-m", GROUP, "-C", str(COUNT), "-S", str(SIZE))


@pytest.mark.parametrize("send_only", [False, True], ids=["member", "send-only"])
async def test_aiordma_sends_to_mckey(address: DeviceAddress, send_only: bool) -> None:
    receiver = await start(*MCKEY, "-b", address.host)
    try:
        async with (
            asyncio.timeout(TIME_LIMIT),
            aiordma.open_datagram((address.host, 0)) as endpoint,
            await endpoint.join(GROUP, send_only=send_only) as group,
        ):
            reading = asyncio.create_task(receiver.communicate())
            while not reading.done():  # mckey prints nothing when it is ready
                await endpoint.send_to(group, bytes(SIZE), imm=endpoint.qp_num)
                await asyncio.sleep(0.02)  # paces the datagrams
            output, _ = await reading
    finally:
        await end(receiver)
    assert receiver.returncode == 0, output.decode()
    assert "test complete" in output.decode()


@pytest.mark.parametrize("mode", [(), ("-o",)], ids=["member", "send-only"])
async def test_mckey_sends_to_aiordma(address: DeviceAddress, mode: tuple[str, ...]) -> None:
    async with (
        asyncio.timeout(TIME_LIMIT),
        aiordma.open_datagram((address.host, 0)) as endpoint,
        await endpoint.join(GROUP),
    ):
        sender = await start(*MCKEY, "-s", "-b", address.host, *mode)
        try:
            datagram = await endpoint.recv_from()
            output, _ = await sender.communicate()
        finally:
            await end(sender)
    assert sender.returncode == 0, output.decode()
    assert len(datagram.data) == SIZE
    assert datagram.group == GROUP
    assert datagram.imm == datagram.peer.qp_num
    assert datagram.peer.host == address.host
