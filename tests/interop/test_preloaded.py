"""TCP programs that run over RDMA with librspreload, in both roles.

One is tcp_program.c. The other is rstream, which can use TCP sockets, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from pathlib import Path

import loops
import pytest
from helpers import TIME_LIMIT
from programs import end, free_port
from streaming import pattern, receive_exactly

import aiordma
from aiordma import ByteStream, PeerClosed
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

PRELOAD = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"
SIZE = 2_000_000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile tcp_program.c. Return the path of the program."""
    target = tmp_path_factory.mktemp("program") / "tcp_program"
    source = Path(__file__).with_name("tcp_program.c")
    subprocess.run(["gcc", "-pthread", "-o", target, source], check=True)
    return target


async def start_preloaded(*command: object) -> asyncio.subprocess.Process:
    """Start a program with librspreload. Its output and errors are one pipe."""
    return await asyncio.create_subprocess_exec(
        *map(str, command),
        env={**os.environ, "LD_PRELOAD": PRELOAD},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def exchange(stream: ByteStream) -> str:
    """Send and receive SIZE bytes, as the program does. Return the hash of those received."""
    data = pattern(SIZE)

    async def send() -> None:
        for start in range(0, SIZE, 200_000):
            await stream.send(data[start : start + 200_000])
        await stream.send_eof()

    sending = asyncio.create_task(send())
    digest = hashlib.sha256()
    async for part in stream:
        digest.update(part)
    await sending
    return digest.hexdigest()


async def check(program: asyncio.subprocess.Process, found: str) -> None:
    """Check the program's exit code and output, and the hash of its bytes."""
    output, _ = await program.communicate()
    expected = hashlib.sha256(pattern(SIZE)).hexdigest()
    assert program.returncode == 0, output.decode()
    assert output.decode().strip() == f"{SIZE} bytes"
    assert found == expected


async def test_tcp_program_connects_to_aiordma(address: DeviceAddress, program: Path) -> None:
    async with aiordma.listen_stream(address.host, 0) as listener:
        client = await start_preloaded(program, "connect", *listener.local_address, SIZE)
        try:
            async with asyncio.timeout(TIME_LIMIT), await listener.accept() as stream:
                await check(client, await exchange(stream))
        finally:
            await end(client)


async def test_aiordma_connects_to_tcp_program(address: DeviceAddress, program: Path) -> None:
    port = await free_port(address)
    server = await start_preloaded(program, "listen", address.host, port, SIZE)
    try:
        async with asyncio.timeout(TIME_LIMIT):
            assert server.stdout is not None
            assert await server.stdout.readline() == b"listening\n"
            async with aiordma.connect_stream(address.host, int(port)) as stream:
                await check(server, await exchange(stream))
    finally:
        await end(server)


async def kill_and_check(stream: ByteStream, program: asyncio.subprocess.Process) -> None:
    """Kill a program that sends "hello" and never receives.

    Before, send() waits, since the program's buffer is full. Afterwards send() and receive() raise
    PeerClosed.
    """
    assert await stream.receive() == b"hello"
    sending = asyncio.create_task(stream.send(bytes(SIZE)))
    receiving = asyncio.create_task(stream.receive())
    protocol = stream._core.data_path.protocol
    await loops.until(lambda: not protocol.room, "the program's buffer to be full")
    assert not sending.done()
    program.kill()
    ends = await asyncio.gather(sending, receiving, return_exceptions=True)
    assert [type(end) for end in ends] == [PeerClosed, PeerClosed]


async def test_killed_client_that_does_not_receive(address: DeviceAddress, program: Path) -> None:
    async with aiordma.listen_stream(address.host, 0) as listener:
        client = await start_preloaded(program, "connect", *listener.local_address, 0)
        try:
            async with asyncio.timeout(TIME_LIMIT), await listener.accept() as stream:
                await kill_and_check(stream, client)
        finally:
            await end(client)


async def test_killed_server_that_does_not_receive(address: DeviceAddress, program: Path) -> None:
    port = await free_port(address)
    server = await start_preloaded(program, "listen", address.host, port, 0)
    try:
        async with asyncio.timeout(TIME_LIMIT):
            assert server.stdout is not None
            assert await server.stdout.readline() == b"listening\n"
            async with aiordma.connect_stream(address.host, int(port)) as stream:
                await stream.send(b"on iWARP the connecting side sends first")
                await kill_and_check(stream, server)
    finally:
        await end(server)


async def test_rstream_with_tcp_sockets_connects_to_aiordma(address: DeviceAddress) -> None:
    size, count = 5000, 40
    async with aiordma.listen_stream(address.host, 0) as listener:
        host, port = listener.local_address
        test = ["-T", "s", "-T", "b", "-T", "v", "-S", str(size), "-C", str(count), "-I", "1"]
        client = await start_preloaded("rstream", "-s", host, "-p", str(port), *test)
        try:
            async with asyncio.timeout(TIME_LIMIT), await listener.accept() as stream:
                for expected in (16, size * count):
                    await stream.send(await receive_exactly(stream, expected))
                output, _ = await client.communicate()
        finally:
            await end(client)
    assert client.returncode == 0, output.decode()
