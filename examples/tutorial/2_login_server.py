"""Accept the peers that send a known name, and reject the others."""

import asyncio
import contextlib

import aiordma

NAMES = {b"alice", b"bob"}


async def answer(request: aiordma.ConnectRequest) -> None:
    name = request.private_data.rstrip(b"\0")  # InfiniBand and RoCE pad it with zeros
    if name not in NAMES:
        await request.reject(b"unknown name")
        return
    async with request.accept(b"hello " + name) as connection:
        async for message in connection:
            await connection.send(name + b": " + message)


async def answer_or_log(request: aiordma.ConnectRequest) -> None:
    try:
        await answer(request)
    except aiordma.RdmaError as error:  # a peer that fails must not end the server
        print(f"{request.peer_address[0]}: {error}", flush=True)


async def main() -> None:
    async with aiordma.listen(None, 7471) as listener, asyncio.TaskGroup() as tasks:
        print("listening", flush=True)
        async for request in listener:
            tasks.create_task(answer_or_log(request))


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
