"""Objects that are dropped without being closed: they warn, and free no memory in use."""

from __future__ import annotations

import errno
import gc

import loops
import pytest
from helpers import TIME_LIMIT, read_line, start_python

import aiordma
from aiordma import Connection
from aiordma.rdmacm import DeviceAddress


async def test_a_dropped_connection_warns_and_is_aborted(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        accepting = loops.create_task(listener.accept())
        client: Connection | None = await aiordma.connect(*listener.local_address)
        async with await accepting as server:
            for _ in range(20):
                await server.send(b"x" * 5000)  # the device writes while the connection is dropped
            with pytest.warns(ResourceWarning, match="unclosed <Connection"):  # noqa: PT031
                client = None
                gc.collect()
            async with loops.timeout(TIME_LIMIT):
                with pytest.raises(aiordma.RdmaError):
                    await server.recv()
    assert client is None


async def test_a_dropped_listener_warns_and_stops_listening(address: DeviceAddress) -> None:
    listener: aiordma.Listener | None = await aiordma.listen(address.host, 0)
    assert listener is not None
    where = listener.local_address
    with pytest.warns(ResourceWarning, match="unclosed <AsyncCmId LIST"):  # noqa: PT031
        listener = None
        gc.collect()
    await loops.until(lambda: is_free(where), "the port to be free")


async def is_free(where: tuple[str, int]) -> bool:
    """Return True if a listener can bind to this address."""
    try:
        async with aiordma.listen(*where):
            return True
    except aiordma.VerbsError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False


async def test_a_dropped_request_warns_and_is_rejected(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        connecting = loops.create_task(aiordma.connect(*listener.local_address))
        request: aiordma.ConnectRequest | None = await listener.get_request()
        assert request is not None
        with pytest.warns(ResourceWarning, match="unclosed <AsyncCmId REQ"):  # noqa: PT031
            request = None
            gc.collect()
        with pytest.raises(aiordma.Rejected):
            await connecting


LEAVES_ALL_OPEN = """
import asyncio, sys, warnings
import aiordma
warnings.simplefilter("ignore")

async def main(host):
    listener = await aiordma.listen(host, 0)
    accepting = asyncio.create_task(listener.accept())
    client = await aiordma.connect(*listener.local_address)
    server = await accepting
    await client.send(b"x")
    keep.extend([listener, client, server])
    print("leaving", flush=True)

keep = []
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.loops("asyncio")  # the other process is tested
async def test_an_interpreter_exits_with_open_connections(address: DeviceAddress) -> None:
    process = start_python(LEAVES_ALL_OPEN, address.host)
    assert await loops.to_thread(read_line, process) == "leaving"
    assert await loops.to_thread(process.wait, TIME_LIMIT) == 0
    process.communicate()
