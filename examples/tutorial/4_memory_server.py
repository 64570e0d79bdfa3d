"""Let each peer read and write 4096 bytes of this process."""

import asyncio
import contextlib

import aiordma
from aiordma import AccessFlags

PEER_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE


async def share(connection: aiordma.Connection) -> None:
    memory = bytearray(4096)
    memory[:5] = b"hello"
    async with await connection.register(memory, PEER_ACCESS) as region:
        await connection.recv()  # the client is ready; on iWARP it must send first
        await connection.send(region.remote.pack())
        await connection.recv()  # the client has finished
    print("the client wrote", bytes(memory[:7]), flush=True)


async def main() -> None:
    async with aiordma.listen(None, 7471) as listener:
        print("listening", flush=True)
        await listener.serve(share)


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
