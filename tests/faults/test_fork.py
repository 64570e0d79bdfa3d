"""A forked child does not disturb its parent's connections, and cannot use them."""

from __future__ import annotations

import functools
import subprocess

import loops
import pytest
from helpers import TIME_LIMIT, start_python

import aiordma
from aiordma.rdmacm import DeviceAddress

# The other process is tested. The loop of its peer, which runs here, makes no difference.
pytestmark = pytest.mark.loops("asyncio")

start_piped = functools.partial(start_python, stderr=subprocess.PIPE)

# The child's status is 5 if an error names its parent's use of RDMA as the reason, 7 without error.
FORKS = """
import asyncio, os, sys
import aiordma

async def once(host, port):
    async with aiordma.connect(host, int(port)) as connection:
        await connection.send(b"hello")
        assert await connection.recv() == b"hello"

used_before, *where = sys.argv[1:]
if used_before == "True":
    asyncio.run(once(*where))
child = os.fork()
if not child:
    try:
        asyncio.run(once(*where))
    except aiordma.RdmaError as error:
        os._exit(5 if "forked child" in str(error) else 6)
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("used_before", "status"), [(True, 5), (False, 7)])
async def test_a_child_can_use_rdma_only_if_its_parent_had_not(
    address: DeviceAddress, used_before: bool, status: int
) -> None:
    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with aiordma.listen(address.host, 0) as listener:
        serving = loops.create_task(listener.serve(echo))
        host, port = listener.local_address
        process = start_piped(FORKS, str(used_before), host, str(port))
        _, errors = await loops.to_thread(process.communicate, TIME_LIMIT)
        await listener.aclose()
        await serving
    assert process.returncode == status, errors


# The child must not return from asyncio.run(). That would remove descriptors from the epoll
# instance that it shares with its parent, and the parent's loop would miss its wake-ups.
IN_USE = """
import asyncio, gc, os, sys
import aiordma
from aiordma import AccessFlags, RegistrationCache

WRITABLE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE

async def exit_at_once(main, *arguments):
    try:
        await main(*arguments)
    except SystemExit as error:
        os._exit(error.code)

async def refused(call):
    try:
        await call
    except aiordma.RdmaError as error:
        assert "forked child" in str(error), error
    else:
        raise AssertionError(f"{call} was not refused")

async def try_all(connection, region, message, cache):
    remote = region.remote
    for call in (
        connection.send(b"x"),
        connection.send(region),
        connection.recv(),
        connection.recv_into(bytearray(10)),
        connection.recv_message(),
        connection.read(remote, region),
        connection.write(b"x", remote),
        connection.write(region, remote),
        connection.register(bytearray(10)),
        connection.allocate(10),
        connection.bind(region),
        cache.register(bytearray(10)),
        region.aclose(),
    ):
        await refused(call)
    message.release()
    memoryview(region)[:] = b"c" * len(region)
    region.close()
    cache.close()
    connection.abort()

async def main(host, port):
    async with aiordma.connect(host, int(port)) as connection:
        region = await connection.allocate(100_000, WRITABLE)
        cache = RegistrationCache(connection)
        cached = await cache.register(bytearray(b"cached"))
        await connection.send(region.remote.pack())
        message = await connection.recv_message()
        child = os.fork()
        if not child:
            asyncio.new_event_loop().run_until_complete(
                try_all(connection, region, message, cache))
            del connection, region, message, cache, cached
            gc.collect()
            sys.exit(3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3, status
        assert bytes(message.data) == b"held"
        message.release()
        await connection.send(cached)
        assert await connection.recv() == b"written"
        assert bytes(memoryview(region)) == b"w" * len(region)
        await connection.read(aiordma.RemoteBuffer.unpack(await connection.recv()), region)
        assert bytes(memoryview(region)[:4]) == b"read"
        cached.close()
        cache.close()
        region.close()

asyncio.run(exit_at_once(main, *sys.argv[1:]))
"""


async def test_calls_in_a_child_fail_and_do_not_disturb_the_parent(address: DeviceAddress) -> None:
    """The child writes to its own copy of the memory. The device accesses the parent's memory."""
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
        process = start_piped(IN_USE, host, str(port))
        async with loops.timeout(TIME_LIMIT), await listener.accept() as connection:
            remote = aiordma.RemoteBuffer.unpack(await connection.recv())
            readable = await connection.register(b"read", aiordma.AccessFlags.REMOTE_READ)
            await connection.send(b"held")
            assert await connection.recv() == b"cached"
            await connection.write(b"w" * len(remote), remote)
            await connection.send(b"written")
            await connection.send(readable.remote.pack())
            assert [message async for message in connection] == []
            readable.close()
        _, errors = await loops.to_thread(process.communicate)
    assert process.returncode == 0, errors
