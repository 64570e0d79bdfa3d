"""A locked-memory limit that is too low: the error names the limit and the way to raise it."""

from __future__ import annotations

import loops
import pytest
from helpers import TIME_LIMIT, start_python

import aiordma
from aiordma.rdmacm import DeviceAddress

CODE = """
import asyncio, errno, sys
import aiordma

async def main(host, port):
    try:
        await aiordma.connect(host, int(port))
    except aiordma.VerbsError as error:
        assert error.errno == errno.ENOMEM, error
        assert error.function == "ibv_reg_mr", error
        print(error)
    small = aiordma.ConnectionOptions(recv_depth=1, max_message_size=4096)
    async with aiordma.connect(host, int(port), options=small) as connection:
        await connection.send(b"small enough")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.loops("asyncio")  # the other process is tested
async def test_connect_beyond_the_locked_memory_limit_names_the_limit(
    address: DeviceAddress,
) -> None:
    limited = ("setpriv", "--bounding-set", "-ipc_lock", "prlimit", "--memlock=131072:131072")
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
        process = start_python(CODE, host, str(port), under=limited)
        async with loops.timeout(TIME_LIMIT), await listener.accept() as connection:
            assert await connection.recv() == b"small enough"
        output, _ = await loops.to_thread(process.communicate)
    assert process.returncode == 0
    assert "locked-memory limit" in output
    assert "ulimit -l" in output
