"""The example rping.py, against the C program rping of rdma-core and against itself.

In the lab without KVM it takes seconds to start an interpreter, so the example runs in this process
where that makes no difference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import ModuleType

import pytest
from example_runs import (
    Done,
    finish,
    interrupt,
    load,
    next_line,
    run,
    run_program,
    running,
    running_program,
)
from helpers import PATIENCE, give_name
from programs import free_port

import aiordma
from aiordma import Connection, RemoteBuffer
from aiordma.rdmacm import DeviceAddress

COUNT = 3
LETTERS = "".join(map(chr, range(ord("A"), ord("z") + 1)))


def expected_pings(prefix: str, size: int, count: int = COUNT) -> str:
    """What -v prints, made another way than the example does."""
    lines = ""
    for number in range(count):
        text = f"rdma-ping-{number}: "
        while len(text) < size - 1:
            text += LETTERS[number % 58 :] if text.endswith(" ") else LETTERS
        lines += f"{prefix}{text[: size - 1]}\n"
    return lines


class InProcess:
    """The example, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.module: ModuleType = load("rping")
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self._output = self._errors = ""

    def arguments(self, *words: str) -> argparse.Namespace:
        self._monkeypatch.setattr(sys, "argv", ["rping.py", *words])
        parsed = self.module.parse_arguments()
        assert isinstance(parsed, argparse.Namespace)
        return parsed

    def printed(self) -> tuple[str, str]:
        """All of standard output and of the errors, so far."""
        output, errors = self._capsys.readouterr()
        self._output += output
        self._errors += errors
        return self._output, self._errors

    async def ask(self, *words: str) -> None:
        await self.module.connect_and_ping(self.arguments("-c", *words))

    async def ask_when_it_listens(self, *words: str) -> None:
        """ask() a program that is still starting."""
        while True:
            try:
                return await self.ask(*words)
            except aiordma.Rejected:
                await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def serving(self, *words: str) -> AsyncIterator[tuple[asyncio.Task[None], str]]:
        """A server on a port of its choice, and that port."""
        task = asyncio.create_task(self.module.serve(self.arguments("-s", "-p", "0", *words)))
        try:
            while not (announcement := self.printed()[1]):
                await asyncio.sleep(0.01)
            assert announcement.startswith("listening on port "), announcement
            self._errors = ""
            yield task, announcement.split()[-1]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def rping(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    return InProcess(monkeypatch, capsys)


async def check_our_client_their_server(
    rping: InProcess, address: DeviceAddress, size: int
) -> None:
    common = ("-v", "-a", address.host, "-p", await free_port(address), "-S", str(size))
    async with asyncio.timeout(PATIENCE), running_program("rping", "-s", *common) as server:
        ours = rping.ask_when_it_listens("-V", "-C", str(COUNT), *common)
        theirs, _ = await asyncio.gather(finish(server), ours)
    assert rping.printed() == (expected_pings("ping data: ", size), "")
    assert theirs.status == 0, theirs.errors
    assert theirs.output == expected_pings("server ping data: ", size)


async def check_their_client_our_server(
    rping: InProcess, address: DeviceAddress, size: int
) -> None:
    common = ("-v", "-a", address.host, "-S", str(size))
    async with asyncio.timeout(PATIENCE), rping.serving(*common) as (ours, port):
        theirs = await run_program("rping", "-c", "-V", "-C", str(COUNT), "-p", port, *common)
        await ours
    assert theirs.status == 0, theirs.errors
    assert theirs.output == expected_pings("ping data: ", size)
    expected = expected_pings("server ping data: ", size)
    assert rping.printed() == (expected, "server DISCONNECT EVENT...\n")


@pytest.mark.asyncio
async def test_our_client_their_server(any_address: DeviceAddress, rping: InProcess) -> None:
    await check_our_client_their_server(rping, any_address, 64)


@pytest.mark.asyncio
async def test_their_client_our_server(any_address: DeviceAddress, rping: InProcess) -> None:
    await check_their_client_our_server(rping, any_address, 64)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [26, 4097, 65535])
async def test_sizes_of_our_client(address: DeviceAddress, rping: InProcess, size: int) -> None:
    await check_our_client_their_server(rping, address, size)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [26, 4097, 65535])
async def test_sizes_of_their_client(address: DeviceAddress, rping: InProcess, size: int) -> None:
    await check_their_client_our_server(rping, address, size)


@pytest.mark.asyncio
async def test_two_programs(address: DeviceAddress) -> None:
    """At all addresses, and the usual port; the letters go round."""
    async with asyncio.timeout(2 * PATIENCE), running("rping", "-s", "-v") as server:
        assert await next_line(server.stderr) == "listening on port 7174"
        client = run("rping", "-c", "-v", "-V", "-a", address.host, "-C", "60")
        served, asked = await asyncio.gather(finish(server), client)
    assert asked == Done(0, expected_pings("ping data: ", 64, 60), "")
    pings = expected_pings("server ping data: ", 64, 60)
    assert served == Done(0, pings, "server DISCONNECT EVENT...\n")


@pytest.mark.asyncio
async def test_for_ever_and_an_interrupt(address: DeviceAddress, rping: InProcess) -> None:
    async with asyncio.timeout(PATIENCE), rping.serving("-a", address.host) as (ours, port):
        async with running("rping", "-c", "-v", "-a", address.host, "-p", port) as client:
            for number in range(5):
                assert (await next_line(client.stdout)).startswith(f"ping data: rdma-ping-{number}")
            done = await interrupt(client)
        with contextlib.suppress(aiordma.RdmaError):  # it may end in the middle of a ping
            await ours
    assert (done.status, done.errors) == (0, "")


@pytest.mark.asyncio
async def test_a_name_and_a_source(
    address: DeviceAddress, rping: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = give_name(address, monkeypatch)
    async with asyncio.timeout(PATIENCE), rping.serving("-v", "-a", name) as (ours, port):
        await rping.ask("-a", name, "-p", port, "-I", address.host, "-C", "1")
        await ours
    expected = expected_pings("server ping data: ", 64, 1)
    assert rping.printed() == (expected, "server DISCONNECT EVENT...\n")


@pytest.mark.asyncio
async def test_a_persistent_server(address: DeviceAddress, rping: InProcess) -> None:
    """It outlives its clients, good and bad; ours and theirs may come at the same time."""
    host = address.host
    async with asyncio.timeout(PATIENCE), rping.serving("-P", "-a", host) as (ours, port):
        async with aiordma.connect(host, int(port)) as bad:
            await bad.send(b"bad")
            assert [message async for message in bad] == []
        client = ("-V", "-a", host, "-p", port, "-C", "20")
        theirs, *_ = await asyncio.gather(
            run_program("rping", "-c", *client), rping.ask(*client), rping.ask(*client)
        )
        assert theirs.status == 0, theirs.errors
        farewells = "server DISCONNECT EVENT...\n" * 3
        while not rping.printed()[1].endswith(farewells):
            await asyncio.sleep(0.01)
        assert not ours.done()
    assert rping.printed() == ("", f"rping: the peer sent a record of 3 bytes, not 16\n{farewells}")


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-c", "-a", "10.7.1.1", "-S", "25"), "25 is not between 26 and 65535"),
        (("-s", "-S", "65536"), "65536 is not between 26 and 65535"),
        (("-s", "-S", "many"), "invalid ping_size value: 'many'"),
        (("-c", "-a", "10.7.1.1", "-C-1"), "-1 is negative"),
        (("-s", "-c"), "not allowed with"),
        (("-c",), "the server's address: -a ADDRESS"),
        (("-s", "-p", "65536"), "rping: port 65536 is not between 0 and 65535"),
        (("-s", "-a", "127.0.0.1"), "RDMA has no loopback"),
        (("-c", "-a", "no.such.name.invalid"), "no.such.name.invalid"),
    ],
)
def test_wrong_arguments(
    arguments: Sequence[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rping.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        load("rping").main()
    said = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
    assert complaint in said


@pytest.mark.asyncio
async def test_nobody_listens(address: DeviceAddress) -> None:
    done = await asyncio.wait_for(run("rping", "-c", "-a", address.host, "-p", "1"), PATIENCE)
    assert done.status == 1
    assert done.errors.startswith("rping: ")
    assert "rejected the connection" in done.errors
    assert done.errors.count("\n") == 1


@contextlib.asynccontextmanager
async def our_own(
    address: DeviceAddress, play: Callable[[Connection], Awaitable[object]]
) -> AsyncIterator[str]:
    """A server of the test's, which plays one connection its own way; its port."""
    async with aiordma.listen(address.host, 0) as listener:

        async def serve_one() -> None:
            async with await listener.accept() as connection:
                await play(connection)

        playing = asyncio.create_task(serve_one())
        try:
            yield str(listener.local_address[1])
            await playing
        finally:
            playing.cancel()


@pytest.mark.asyncio
async def test_wrong_data_is_detected(address: DeviceAddress, rping: InProcess) -> None:
    """The server's memory goes wrong in the third ping, in the last byte: only -V looks there."""

    async def play(connection: Connection) -> None:
        """rping's server, but for that."""
        pings = 0
        with await connection.allocate(64) as memory:
            async for record in connection:
                await connection.read(RemoteBuffer.unpack(record), memory)
                pings += 1
                if pings == 3:
                    memoryview(memory)[63] ^= 1
                await connection.send(bytes(16))
                await connection.write(memory, RemoteBuffer.unpack(await connection.recv()))
                await connection.send(bytes(16))

    async with asyncio.timeout(PATIENCE):
        async with our_own(address, play) as port:
            await rping.ask("-a", address.host, "-p", port, "-C", "4")
        async with our_own(address, play) as port:
            done = await run("rping", "-c", "-V", "-a", address.host, "-p", port, "-C", "4")
    assert done == Done(1, "", "rping: data mismatch in ping 2\n")


@pytest.mark.asyncio
@pytest.mark.parametrize("length", [0, 15, 17])
async def test_a_record_of_the_wrong_size(
    address: DeviceAddress, rping: InProcess, length: int
) -> None:
    async def play(connection: Connection) -> None:
        await connection.recv()
        await connection.send(bytes(length))
        assert [message async for message in connection] == []

    complaint = f"^the peer sent a record of {length} bytes, not 16$"
    async with asyncio.timeout(PATIENCE):
        async with our_own(address, play) as port:
            with pytest.raises(ValueError, match=complaint):
                await rping.ask("-a", address.host, "-p", port)
        async with rping.serving("-a", address.host) as (ours, port):
            async with aiordma.connect(address.host, int(port)) as connection:
                await connection.send(bytes(length))
                assert [message async for message in connection] == []
            with pytest.raises(ValueError, match=complaint):
                await ours


@pytest.mark.asyncio
async def test_a_ping_that_does_not_fit(address: DeviceAddress, rping: InProcess) -> None:
    server = rping.serving("-a", address.host, "-S", "64")
    async with asyncio.timeout(PATIENCE), server as (ours, port):
        with pytest.raises(aiordma.PeerClosed):
            await rping.ask("-a", address.host, "-p", port, "-S", "65")
        with pytest.raises(ValueError, match=r"^a ping of 65 bytes: -S allows for 64 here$"):
            await ours


@pytest.mark.asyncio
async def test_memory_that_may_not_be_read(address: DeviceAddress) -> None:
    """The server as a program: it ends with one line, and not with a traceback."""
    server = running("rping", "-s", "-a", address.host, "-p", "0")
    async with asyncio.timeout(PATIENCE), server as process:
        port = (await next_line(process.stderr)).removeprefix("listening on port ")
        async with aiordma.connect(address.host, int(port)) as connection:
            await connection.send(RemoteBuffer(4096, 77, 64).pack())
            with pytest.raises(aiordma.RdmaError):
                await connection.recv()
        done = await finish(process)
    assert (done.status, done.output) == (1, "")
    assert done.errors.startswith("rping: ")
    assert done.errors.count("\n") == 1


@pytest.mark.asyncio
async def test_a_peer_that_vanishes(address: DeviceAddress, rping: InProcess) -> None:
    async def vanish(connection: Connection) -> None:
        await connection.recv()
        connection.abort()

    async with asyncio.timeout(PATIENCE):
        async with our_own(address, vanish) as port:
            with pytest.raises(aiordma.PeerClosed):
                await rping.ask("-a", address.host, "-p", port)
        async with rping.serving("-a", address.host) as (ours, port):
            async with aiordma.connect(address.host, int(port)) as connection:
                with await connection.allocate(64) as memory:
                    await connection.send(memory.remote.pack())
                    await connection.recv()
            with pytest.raises(aiordma.PeerClosed):
                await ours
