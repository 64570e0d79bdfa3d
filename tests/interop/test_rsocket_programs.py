"""Byte streams with the rsocket programs rstream, riostream and rcopy of rdma-core."""

from __future__ import annotations

import asyncio
import struct
from functools import partial
from pathlib import Path

import loops
import pytest
from helpers import TIME_LIMIT
from programs import end, free_port, start, until_accepted
from streaming import pattern, receive_exactly

import aiordma
from aiordma import ByteStream, StreamOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

SMALL = StreamOptions(send_buffer=4096, recv_buffer=4096, send_depth=16, recv_depth=16)
# The size of rstream's first message. The bytes count up through all messages; rstream checks them.
SYNC = 16
RSTREAM_OPTIONS = {
    "blocking": ["-T", "b"],
    "small buffers": ["-T", "b", "-B", "4096"],
    "not inline": ["-T", "b", "-i", "0"],
}


async def connect_when_it_listens(host: str, port: int, options: StreamOptions) -> ByteStream:
    """Connect to a program that is still starting."""
    return await until_accepted(lambda: aiordma.connect_stream(host, port, options=options), port)


def counting(nbytes: int) -> bytes:
    """Return bytes that count up, modulo 256."""
    return (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]


@pytest.mark.parametrize("arguments", RSTREAM_OPTIONS.values(), ids=RSTREAM_OPTIONS.keys())
async def test_rstream_connects_to_aiordma(address: DeviceAddress, arguments: list[str]) -> None:
    size, count, rounds = 5000, 40, 3
    options = SMALL if "-B" in arguments else StreamOptions()
    async with aiordma.listen_stream(address.host, 0, options=options) as listener:
        host, port = listener.local_address
        test = ["-S", str(size), "-C", str(count), "-I", str(rounds), "-T", "v", *arguments]
        client = await start("rstream", "-s", host, "-p", str(port), *test)
        try:
            async with asyncio.timeout(TIME_LIMIT), await listener.accept() as stream:
                for expected in (SYNC, *[size * count] * rounds):
                    await stream.send(await receive_exactly(stream, expected))
                assert await stream.receive() == b""
                output, _ = await client.communicate()
        finally:
            await end(client)
    assert client.returncode == 0, output.decode()
    assert "custom" in output.decode()


@pytest.mark.parametrize("arguments", RSTREAM_OPTIONS.values(), ids=RSTREAM_OPTIONS.keys())
async def test_aiordma_connects_to_rstream(address: DeviceAddress, arguments: list[str]) -> None:
    size, count, rounds = 100_000, 3, 2
    port = await free_port(address)
    test = ["-S", str(size), "-C", str(count), "-I", str(rounds), "-T", "v", *arguments]
    server = await start("rstream", "-b", address.host, "-p", port, *test)
    options = SMALL if "-B" in arguments else StreamOptions()
    data = counting(SYNC + size * count * rounds)
    try:
        async with asyncio.timeout(TIME_LIMIT):
            async with await connect_when_it_listens(address.host, int(port), options) as stream:
                at = 0
                for nbytes in (SYNC, *[size * count] * rounds):
                    part = data[at : at + nbytes]
                    at += nbytes
                    await stream.send(part)
                    assert await receive_exactly(stream, nbytes) == part
            output, _ = await server.communicate()
    finally:
        await end(server)
    assert server.returncode == 0, output.decode()
    assert "custom" in output.decode()


# --- riostream: each end writes into memory of the other, and polls the last byte of its own ---

IO_SIZE, IO_COUNT, IO_ROUNDS = 1000, 3, 2
# riostream sets its number of mappings after it has started to listen. An earlier client gets none.
# That is rare, however fast the machine is: the client repeats its requests at intervals.
ATTEMPTS = 50
IO_TEST = ["-S", str(IO_SIZE), "-C", str(IO_COUNT), "-I", str(IO_ROUNDS)]


def ends_with(memory: memoryview, marker: int) -> bool:
    """Return True if the last byte of the memory is `marker`."""
    return memory[-1] == marker


async def write_directly(stream: ByteStream, *, is_client: bool) -> None:
    """Run riostream's test: both ends write into each other's memory in turns."""
    async with await stream.allocate(IO_SIZE) as region:
        memory = memoryview(region)
        memory[-1] = 255
        await stream.iomap(region, 0)
        for send_first in (is_client, not is_client):
            if send_first:
                await stream.send(counting(SYNC))
            else:
                await receive_exactly(stream, SYNC)
        for marker in range(2 * IO_ROUNDS):
            if is_client == (marker % 2 == 0):
                for _ in range(IO_COUNT - 1):
                    await stream.iowrite(bytes(IO_SIZE - 1) + b"\xff", 0)
                await stream.iowrite(bytes(IO_SIZE - 1) + bytes([marker]), 0)
            else:
                await loops.until(partial(ends_with, memory, marker), f"the marker {marker}")
        memory.release()
        await stream.aclose()


async def test_riostream_connects_to_aiordma(address: DeviceAddress) -> None:
    options = StreamOptions(mappings=1)
    async with aiordma.listen_stream(address.host, 0, options=options) as listener:
        host, port = listener.local_address
        client = await start("riostream", "-s", host, "-p", str(port), *IO_TEST)
        try:
            async with asyncio.timeout(TIME_LIMIT):
                await write_directly(await listener.accept(), is_client=False)
                output, _ = await client.communicate()
        finally:
            await end(client)
    assert client.returncode == 0, output.decode()
    assert "custom" in output.decode()


async def test_aiordma_connects_to_riostream(address: DeviceAddress) -> None:
    for _ in range(ATTEMPTS):
        port = await free_port(address)
        server = await start("riostream", "-b", address.host, "-p", port, *IO_TEST)
        try:
            async with asyncio.timeout(TIME_LIMIT):
                options = StreamOptions(mappings=1)
                stream = await connect_when_it_listens(address.host, int(port), options)
                async with stream:
                    if not stream.peer_mappings:
                        continue
                    await write_directly(stream, is_client=True)
                output, _ = await server.communicate()
        finally:
            await end(server)
        assert server.returncode == 0, output.decode()
        assert "custom" in output.decode()
        return
    pytest.fail("riostream never allowed a mapping")


# --- rcopy ---

HEADER = struct.Struct("=BBHIQ")  # version, command, length, data, id
OPEN, CLOSE, WRITE, ANSWER = 1, 2, 3, 0x80


async def test_rcopy_sends_a_file_to_aiordma(address: DeviceAddress, tmp_path: Path) -> None:
    content = pattern(1_000_003)
    (tmp_path / "source").write_bytes(content)
    async with aiordma.listen_stream(address.host, 0) as listener:
        host, port = listener.local_address
        client = await start("rcopy", str(tmp_path / "source"), f"{host}:copy", "-p", str(port))
        try:
            async with asyncio.timeout(TIME_LIMIT), await listener.accept() as stream:
                commands = []
                while header := await stream.receive(1):
                    header += await receive_exactly(stream, HEADER.size - 1)
                    _, command, length, _, _ = HEADER.unpack(header)
                    body = await receive_exactly(stream, length - HEADER.size)
                    commands.append(command)
                    if command == OPEN:
                        assert body.rstrip(b"\0") == b"copy"
                    if command == WRITE:
                        assert await receive_exactly(stream, len(content)) == content
                    await stream.send(HEADER.pack(0, command | ANSWER, HEADER.size, 0, 0))
            output, _ = await client.communicate()
        finally:
            await end(client)
    assert commands == [OPEN, WRITE, CLOSE]
    assert client.returncode == 0, output.decode()


async def test_aiordma_sends_a_file_to_rcopy(address: DeviceAddress, tmp_path: Path) -> None:
    content = pattern(1_000_003)
    port = await free_port(address)
    server = await start("rcopy", "-p", port)
    target = tmp_path / "copy"
    path = str(target).encode() + b"\0"
    try:
        async with (
            asyncio.timeout(TIME_LIMIT),
            await connect_when_it_listens(address.host, int(port), StreamOptions()) as stream,
        ):

            async def ask(command: int, data: int, body: bytes, more: bytes = b"") -> None:
                length = HEADER.size + len(body)
                await stream.send(HEADER.pack(0, command, length, data, 0) + body + more)
                answer = HEADER.unpack(await receive_exactly(stream, HEADER.size))
                assert (answer[1], answer[3]) == (command | ANSWER, 0)

            await ask(OPEN, 0o600, path)
            await ask(WRITE, 0, struct.pack("=Q", len(content)), content)
            await ask(CLOSE, 0, b"")
        assert target.read_bytes() == content
    finally:
        await end(server)
