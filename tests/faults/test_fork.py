"""A forked child leaves its parent's connections alone, and is told so."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from helpers import PATIENCE

import aiordma
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

CODE = """
import asyncio, gc, os, sys
import aiordma

async def main(host, port):
    async with aiordma.connect(host, int(port)) as connection:
        child = os.fork()
        if not child:
            sys.exit(3)  # leaves the block, and closes what is the parent's
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3, status
        await connection.send(b"still here")
        assert await connection.recv() == b"still here"

asyncio.run(main(*sys.argv[1:]))
"""


USED = """
import asyncio, os, sys
import aiordma

async def once(host, port):
    async with aiordma.connect(host, int(port)):
        pass

asyncio.run(once(*sys.argv[1:]))
child = os.fork()
if not child:
    try:
        asyncio.run(once(*sys.argv[1:]))
    except aiordma.RdmaError as error:
        os._exit(5 if "forked child" in str(error) else 6)
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

UNUSED = """
import asyncio, os, sys
import aiordma

async def once(host, port):
    async with aiordma.connect(host, int(port)) as connection:
        await connection.send(b"from the child")
        assert await connection.recv() == b"from the child"

child = os.fork()
if not child:
    asyncio.run(once(*sys.argv[1:]))
    os._exit(5)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("code", [USED, UNUSED], ids=["used-before", "not-used-before"])
async def test_a_child_can_use_rdma_only_if_its_parent_had_not(
    address: DeviceAddress, code: str
) -> None:
    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with aiordma.listen(address.host, 0) as listener:
        serving = asyncio.create_task(listener.serve(echo))
        host, port = listener.local_address
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, host, str(port), stderr=subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
        await listener.aclose()
        await serving
    assert process.returncode == 5, errors.decode()


async def test_the_parents_connection_survives_its_childs_exit(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CODE, host, str(port), stderr=subprocess.PIPE
        )
        async with asyncio.timeout(PATIENCE), await listener.accept() as connection:
            async for message in connection:
                await connection.send(message)
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
