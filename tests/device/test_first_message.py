"""iWARP, where the peer's first message comes before the device is ready to hear it.

Linux's siw answers a request to connect before it takes the connection over: what comes in between
lies there until more comes. A real peer hits that by chance, so here it is one in plain TCP, which
does not even wait for the answer.
"""

from __future__ import annotations

import asyncio

import mpa
import pytest
from helpers import TIME_LIMIT

import aiordma
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.transport("IWARP"), pytest.mark.loops("asyncio")]


async def test_a_first_message_that_the_device_has_not_looked_at_is_heard(
    address: DeviceAddress,
) -> None:
    async with (
        asyncio.timeout(TIME_LIMIT),
        aiordma.listen(address.host, 0) as listener,
    ):
        reader, writer = await asyncio.open_connection(*listener.local_address)
        writer.write(mpa.request())
        request = await listener.get_request()
        writer.write(mpa.send(b"too early"))
        await asyncio.sleep(0.1)  # it is there
        async with request.accept() as connection:
            hearing = asyncio.create_task(connection.recv())
            await mpa.read_reply(reader)
            kind, read = await mpa.read_frame(reader)
            assert kind == mpa.READ_REQUEST
            assert not hearing.done()
            writer.write(mpa.read_response(read))
            assert await hearing == b"too early"
            writer.write(mpa.send(b"and more", number=2))
            assert await connection.recv() == b"and more"
            writer.close()
