"""iWARP: a first message of the peer that arrives before siw receives from the TCP connection.

siw replies to a connection request before it takes over the TCP connection. It does not process
data that arrives in between until more data arrives. A real peer causes that only by chance. So the
peer here uses plain TCP, and does not wait for the reply.
"""

from __future__ import annotations

import asyncio

import loops
import mpa
import pytest

import aiordma
from aiordma.rdmacm import DeviceAddress

pytestmark = [
    pytest.mark.transport("IWARP"),
    pytest.mark.loops("asyncio"),
    pytest.mark.real("the peer uses plain TCP"),
]


async def test_a_first_message_that_arrives_too_early_is_received(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        reader, writer = await asyncio.open_connection(*listener.local_address)
        writer.write(mpa.request())
        request = await listener.get_request()
        writer.write(mpa.send(b"too early"))
        await loops.until(lambda: not mpa.unacknowledged(writer), "the message to arrive")
        async with request.accept() as connection:
            receiving = asyncio.create_task(connection.recv())
            await mpa.read_reply(reader)
            kind, read = await mpa.read_frame(reader)
            assert kind == mpa.READ_REQUEST
            assert not receiving.done()
            writer.write(mpa.read_response(read))
            assert await receiving == b"too early"
            writer.write(mpa.send(b"and more", number=2))
            assert await connection.recv() == b"and more"
            writer.close()
