"""Byte streams with rsocket programs of rdma-core, and with TCP programs under librspreload."""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import loops
import pytest
from helpers import SHARED
from programs import PRELOAD, free_port, running_peer, unless_ended, until_accepted
from streaming import pattern, receive_all, receive_exactly

import aiordma
from aiordma import ByteStream, ConnectError, PeerClosed, StreamOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]

DEFAULT = StreamOptions()
SMALL = StreamOptions(send_buffer=4096, recv_buffer=4096, send_depth=16, recv_depth=16)


def words_for(command: tuple[object, ...], host: str, port: int) -> list[str]:
    """Return the words of a command. HOST and PORT in them become this address."""
    return [str(word).replace("HOST", host).replace("PORT", str(port)) for word in command]


@asynccontextmanager
async def connected_to(
    address: DeviceAddress,
    *command: object,
    options: StreamOptions = DEFAULT,
    prints: str = "",
    environment: dict[str, str] | None = None,
) -> AsyncIterator[tuple[ByteStream, asyncio.subprocess.Process]]:
    """Run a program that listens. HOST and PORT in its command become an address for it.

    When soft-iWARP loses the connection, the program is started again.
    """
    host, port = address.host, await free_port(address)
    words = words_for(command, host, port)
    while True:
        with suppress(LostConnection):
            async with (
                running_peer(*words, prints=prints, environment=environment) as process,
                await connect_to_program(address, port, options) as stream,
            ):
                yield stream, process
            return


class LostConnection(Exception):
    """soft-iWARP lost the connection that the program accepted."""


async def connect_to_program(
    address: DeviceAddress, port: int, options: StreamOptions
) -> ByteStream:
    """Connect to a program that might still be starting.

    rsockets send as soon as they have accepted. On a busy machine, soft-iWARP loses a connection by
    that (docs/transports.md).

    Raises:
        LostConnection: It did. The program can fail, too.
    """
    try:
        return await until_accepted(
            lambda: aiordma.connect_stream(address.host, port, options=options), port
        )
    except ConnectError as error:
        if "Invalid argument" in str(error) and address.transport.name == "IWARP":
            raise LostConnection from error
        raise


@asynccontextmanager
async def accepted_from(
    address: DeviceAddress,
    *command: object,
    options: StreamOptions = DEFAULT,
    prints: str = "",
    environment: dict[str, str] | None = None,
) -> AsyncIterator[tuple[ByteStream, asyncio.subprocess.Process]]:
    """Run a program that connects. HOST and PORT in its command become those of a listener."""
    async with aiordma.listen_stream(address.host, 0, options=options) as listener:
        host, port = listener.local_address
        words = words_for(command, host, port)
        async with (
            running_peer(*words, prints=prints, environment=environment) as process,
            await unless_ended(process, listener.accept()) as stream,
        ):
            yield stream, process


def counting(nbytes: int) -> bytes:
    """Return bytes that count up, modulo 256."""
    return (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]


# --- rstream. The bytes count up through all messages; rstream checks them ---

SYNC = 16
"""The size of the first message."""
RSTREAM = {
    "blocking": ["-T", "b"],
    "small buffers": ["-T", "b", "-B", "4096"],
    "not inline": ["-T", "b", "-i", "0"],
    "TCP under librspreload": ["-T", "s", "-T", "b"],
}


@pytest.mark.parametrize("name", RSTREAM)
async def test_rstream_connects_to_aiordma(address: DeviceAddress, name: str) -> None:
    size, count, rounds = 5000, 40, 3
    test = ["-S", size, "-C", count, "-I", rounds, "-T", "v", *RSTREAM[name]]
    async with accepted_from(
        address,
        *("rstream", "-s", "HOST", "-p", "PORT", *test),
        options=SMALL if name == "small buffers" else DEFAULT,
        prints="custom",
        environment=PRELOAD if name.startswith("TCP") else None,
    ) as (stream, _):
        for expected in (SYNC, *[size * count] * rounds):
            await stream.send(await receive_exactly(stream, expected))
        assert await stream.receive() == b""


@pytest.mark.parametrize("name", [name for name in RSTREAM if not name.startswith("TCP")])
async def test_aiordma_connects_to_rstream(address: DeviceAddress, name: str) -> None:
    size, count, rounds = 100_000, 3, 2
    test = ["-S", size, "-C", count, "-I", rounds, "-T", "v", *RSTREAM[name]]
    data = counting(SYNC + size * count * rounds)
    async with connected_to(
        address,
        *("rstream", "-b", "HOST", "-p", "PORT", *test),
        options=SMALL if name == "small buffers" else DEFAULT,
        prints="custom",
    ) as (stream, _):
        for nbytes in (SYNC, *[size * count] * rounds):
            part, data = data[:nbytes], data[nbytes:]
            await stream.send(part)
            assert await receive_exactly(stream, nbytes) == part


# --- riostream: each end writes into memory of the other, and polls the last byte of its own ---

IO_SIZE, IO_COUNT, IO_ROUNDS = 1000, 3, 2
ATTEMPTS = 50
"""The number of times that riostream is started, at most. See `NoMappings`."""
IO_TEST = ("-S", IO_SIZE, "-C", IO_COUNT, "-I", IO_ROUNDS)
ONE_MAPPING = StreamOptions(mappings=1)


def ends_with(memory: memoryview, marker: int) -> bool:
    """Return True if the last byte of the memory is `marker`."""
    return memory[-1] == marker


async def write_directly(stream: ByteStream, *, is_client: bool) -> None:
    """Run riostream's test: both ends write into each other's memory in turns."""
    async with await stream.allocate(IO_SIZE, SHARED) as region:
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
                for last in [255] * (IO_COUNT - 1) + [marker]:
                    await stream.iowrite(bytes(IO_SIZE - 1) + bytes([last]), 0)
            else:
                await loops.until(partial(ends_with, memory, marker), f"the marker {marker}")
        memory.release()
        await stream.aclose()


async def test_riostream_connects_to_aiordma(address: DeviceAddress) -> None:
    command = ("riostream", "-s", "HOST", "-p", "PORT", *IO_TEST)
    peer = accepted_from(address, *command, options=ONE_MAPPING, prints="custom")
    async with peer as (stream, _):
        await write_directly(stream, is_client=False)


async def test_aiordma_connects_to_riostream(address: DeviceAddress) -> None:
    for _ in range(ATTEMPTS):
        command = ("riostream", "-b", "HOST", "-p", "PORT", *IO_TEST)
        peer = connected_to(address, *command, options=ONE_MAPPING, prints="custom")
        with suppress(NoMappings):
            async with peer as (stream, _):
                if not stream.peer_mappings:
                    raise NoMappings
                await write_directly(stream, is_client=True)
            return
    pytest.fail("riostream never allowed a mapping")


class NoMappings(Exception):
    """riostream sets its number of mappings after it has started to listen. An earlier client has
    none. That is rare, however fast the machine is: the client repeats its requests at intervals.
    """


# --- rcopy ---

HEADER = struct.Struct("=BBHIQ")  # version, command, length, data, id
OPEN, CLOSE, WRITE, ANSWER = 1, 2, 3, 0x80
CONTENT = pattern(1_000_003)


async def test_rcopy_sends_a_file_to_aiordma(address: DeviceAddress, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(CONTENT)
    commands = []
    peer = accepted_from(address, "rcopy", tmp_path / "source", "HOST:copy", "-p", "PORT")
    async with peer as (stream, _):
        while header := await stream.receive(1):
            header += await receive_exactly(stream, HEADER.size - 1)
            _, command, length, _, _ = HEADER.unpack(header)
            body = await receive_exactly(stream, length - HEADER.size)
            commands.append(command)
            if command == OPEN:
                assert body.rstrip(b"\0") == b"copy"
            if command == WRITE:
                assert await receive_exactly(stream, len(CONTENT)) == CONTENT
            await stream.send(HEADER.pack(0, command | ANSWER, HEADER.size, 0, 0))
    assert commands == [OPEN, WRITE, CLOSE]


async def test_aiordma_sends_a_file_to_rcopy(address: DeviceAddress, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    async with connected_to(address, "rcopy", "-p", "PORT") as (stream, server):

        async def ask(command: int, data: int, body: bytes, more: bytes = b"") -> None:
            length = HEADER.size + len(body)
            await stream.send(HEADER.pack(0, command, length, data, 0) + body + more)
            answer = HEADER.unpack(await receive_exactly(stream, HEADER.size))
            assert (answer[1], answer[3]) == (command | ANSWER, 0)

        await ask(OPEN, 0o600, str(target).encode() + b"\0")
        await ask(WRITE, 0, struct.pack("=Q", len(CONTENT)), CONTENT)
        await ask(CLOSE, 0, b"")
        await stream.aclose()
        server.kill()  # it serves for ever
    assert target.read_bytes() == CONTENT


# --- a TCP program under librspreload ---

NBYTES = 2_000_000
DATA = pattern(NBYTES)
# It sends DATA, and stops sending long before it has received DATA, as HTTP/1.0 clients do. With 0
# bytes it sends "hello", then never receives and never ends. C calls make its sockets. Python would
# call accept4(), which librspreload does not replace, and socket() with a flag, which it leaves to
# the kernel.
TCP_PROGRAM = """
import ctypes, signal, socket, sys, threading

def made(descriptor):
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)

def send():
    for start in range(0, nbytes, 30_000):
        sock.sendall(data[start : start + 30_000])
    sock.shutdown(socket.SHUT_WR)

role, host, port, nbytes = *sys.argv[1:4], int(sys.argv[4])
data = b"".join(number.to_bytes(4, "big") for number in range(nbytes // 4))
libc = ctypes.CDLL(None)
sock = made(libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0))
if role == "listen":
    listener = sock
    listener.bind((host, int(port)))
    listener.listen(1)
    sock = made(libc.accept(listener.fileno(), None, None))
else:
    sock.connect((host, int(port)))
if not nbytes:
    sock.sendall(b"hello")
    signal.pause()
threading.Thread(target=send).start()
assert b"".join(iter(lambda: sock.recv(20_000), b"")) == data, "other bytes were received"
"""
# With -I, tests/warm_python.py does not fork for it: a fork would load no library.
COMMAND = (sys.executable, "-I", "-c", TCP_PROGRAM)


@asynccontextmanager
async def connected_to_program(
    address: DeviceAddress, role: str, nbytes: int
) -> AsyncIterator[tuple[ByteStream, asyncio.subprocess.Process]]:
    """Run the program. It listens or connects. Yield a stream to it, and its process."""
    peer = accepted_from if role == "connect" else connected_to
    command = (*COMMAND, role, "HOST", "PORT", nbytes)
    async with peer(address, *command, environment=PRELOAD) as ends:
        yield ends


@pytest.mark.parametrize("role", ["listen", "connect"])
async def test_tcp_program_exchanges_data(address: DeviceAddress, role: str) -> None:
    """Both send and receive at the same time."""
    async with connected_to_program(address, role, NBYTES) as (stream, _):

        async def send() -> None:
            for start in range(0, NBYTES, 200_000):
                await stream.send(DATA[start : start + 200_000])
            await stream.send_eof()

        sending = asyncio.create_task(send())
        is_same = await receive_all(stream) == DATA  # a failed comparison would print all bytes
        await sending
        assert is_same


@pytest.mark.parametrize("role", ["listen", "connect"])
async def test_killed_tcp_program_that_does_not_receive(address: DeviceAddress, role: str) -> None:
    """The program is killed while send() waits because the program's buffer is full."""
    async with connected_to_program(address, role, 0) as (stream, program):
        if role == "listen":
            await stream.send(b"on iWARP the connecting side sends first")
        assert await stream.receive() == b"hello"
        sending = asyncio.create_task(stream.send(bytes(NBYTES)))
        receiving = asyncio.create_task(stream.receive())
        protocol = stream._core.data_path.protocol
        await loops.until(lambda: not protocol.room, "the program's buffer to be full")
        assert not sending.done()
        program.kill()
        ends = await asyncio.gather(sending, receiving, return_exceptions=True)
        assert [type(end) for end in ends] == [PeerClosed, PeerClosed]
