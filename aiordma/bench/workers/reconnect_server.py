"""The server of the test of reconnecting: a program of its own, which the test kills and restarts.

    python -m aiordma.bench.workers.reconnect_server HOST PORT

It prints {"port": N} when it listens. PORT 0: a free one. It imports little, because clients wait
while it starts.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time

import aiordma
from aiordma import Connection
from aiordma.bench.workers.lines import print_port
from aiordma.bench.workers.options import MESSAGE_SIZE, SERVER

DIE = b"die".ljust(MESSAGE_SIZE)
STOP = b"stop".ljust(MESSAGE_SIZE)
PORT_TIMEOUT = 30.0
"""Seconds within which the port of a killed server must be free."""


async def serve(host: str, port: int) -> None:
    """Answer all messages. End after the message STOP, and be killed after the message DIE."""
    async with await _listen(host, port) as listener:
        print_port(listener.local_address[1])

        async def answer(connection: Connection) -> None:
            async for message in connection:
                if message == DIE:
                    os.kill(os.getpid(), signal.SIGKILL)
                elif message == STOP:
                    listener.abort()
                await connection.send(message)

        await listener.serve(answer)


async def _listen(host: str, port: int) -> aiordma.Listener:
    """Listen as soon as the port is free: it is not until the kernel has ended a killed server."""
    deadline = time.monotonic() + PORT_TIMEOUT
    while True:
        try:
            return await aiordma.listen(host, port, options=SERVER)
        except aiordma.VerbsError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
