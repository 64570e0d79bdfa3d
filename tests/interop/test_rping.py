"""The example rping.py, with the C program rping of rdma-core and with itself as the peer.

Without KVM, the lab needs seconds to start an interpreter. So the example runs in this process
where that makes no difference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import loops
import pytest
from example_runs import Done, finish, interrupt, next_line, run, running, serving_with
from helpers import SHARED
from programs import free_port, running_peer, until_accepted

import aiordma
from aiordma import Connection, PeerClosed, RemoteBuffer
from aiordma.rdmacm import DeviceAddress
from examples import rping as example

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]

COUNT = 3
LETTERS = "".join(map(chr, range(ord("A"), ord("z") + 1)))
DISCONNECT = "server DISCONNECT EVENT...\n"


def expected_pings(prefix: str, size: int, count: int = COUNT) -> str:
    """Return the output of -v, computed in another way than in the example."""
    lines = ""
    for number in range(count):
        text = f"rdma-ping-{number}: "
        while len(text) < size - 1:
            text += LETTERS[number % 58 :] if text.endswith(" ") else LETTERS
        lines += f"{prefix}{text[: size - 1]}\n"
    return lines


class InProcess:
    """The client and the server of the example, run in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self._output = self._errors = ""

    def arguments(self, *words: object) -> argparse.Namespace:
        self._monkeypatch.setattr(sys, "argv", ["rping.py", *map(str, words)])
        return example.parse_arguments()

    def printed(self) -> tuple[str, str]:
        """Return the standard output and the standard error so far."""
        output, errors = self._capsys.readouterr()
        self._output += output
        self._errors += errors
        return self._output, self._errors

    async def ping(self, *words: object) -> None:
        await example.connect_and_ping(self.arguments("-c", *words))

    @contextlib.asynccontextmanager
    async def serving(self, *words: object) -> AsyncIterator[tuple[asyncio.Task[None], int]]:
        """Run a server on a free port. Yield its task and the port."""
        task = asyncio.create_task(example.serve(self.arguments("-s", "-p", "0", *words)))
        try:
            await loops.until(lambda: self.printed()[1] or task.done(), "the server to listen")
            announcement = self.printed()[1]
            assert announcement.startswith("listening on port "), announcement
            self._errors = ""
            yield task, int(announcement.split()[-1])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def rping(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    return InProcess(monkeypatch, capsys)


@pytest.mark.parametrize("size", [26, 64, 4097, 65535])
async def test_example_client_and_c_server(
    any_address: DeviceAddress, rping: InProcess, size: int
) -> None:
    port = await free_port(any_address)
    common = ("-v", "-a", any_address.host, "-p", port, "-S", size)
    printed = expected_pings("server ping data: ", size)
    async with running_peer("rping", "-s", *common, prints=printed):
        await until_accepted(lambda: rping.ping("-V", "-C", COUNT, *common), port)
    assert rping.printed() == (expected_pings("ping data: ", size), "")


@pytest.mark.parametrize("size", [26, 64, 4097, 65535])
async def test_c_client_and_example_server(
    any_address: DeviceAddress, rping: InProcess, size: int
) -> None:
    common = ("-v", "-a", any_address.host, "-S", size)
    async with rping.serving(*common) as (serving, port):
        client = ("rping", "-c", "-V", "-C", COUNT, "-p", port, *common)
        async with running_peer(*client, prints=expected_pings("ping data: ", size)):
            await serving
    assert rping.printed() == (expected_pings("server ping data: ", size), DISCONNECT)


async def test_example_client_and_example_server(address: DeviceAddress) -> None:
    """All addresses and the default port. 60 pings are more than there are first letters."""
    async with running("rping", "-s", "-v") as server:
        assert await next_line(server.stderr) == "listening on port 7174"
        client = run("rping", "-c", "-v", "-V", "-a", address.host, "-C", "60")
        served, pinged = await asyncio.gather(finish(server), client)
    assert pinged == Done(0, expected_pings("ping data: ", 64, 60), "")
    assert served == Done(0, expected_pings("server ping data: ", 64, 60), DISCONNECT)


async def test_ctrl_c_ends_the_client(address: DeviceAddress, rping: InProcess) -> None:
    async with rping.serving("-a", address.host) as (serving, port):
        async with running("rping", "-c", "-v", "-a", address.host, "-p", str(port)) as client:
            for number in range(5):
                assert (await next_line(client.stdout)).startswith(f"ping data: rdma-ping-{number}")
            done = await interrupt(client)
        with contextlib.suppress(aiordma.RdmaError):  # the client can end in the middle of a ping
            await serving
    assert (done.status, done.errors) == (0, "")


async def test_a_persistent_server_serves_many_clients(
    address: DeviceAddress, rping: InProcess
) -> None:
    """The server continues after a failed client, and serves three clients at the same time."""
    host, expected = address.host, 3 * DISCONNECT
    async with rping.serving("-P", "-a", host) as (serving, port):
        async with aiordma.connect(host, port) as bad:
            await bad.send(b"bad")
            assert [message async for message in bad] == []
        client = ("-V", "-a", host, "-p", port, "-C", "20")
        async with running_peer("rping", "-c", *client):
            await asyncio.gather(rping.ping(*client), rping.ping(*client))
        await loops.until(lambda: rping.printed()[1].endswith(expected), "three clients to end")
        assert not serving.done()
    refused = "rping: the peer sent a record of 3 bytes, not 16\n"
    assert rping.printed() == ("", refused + expected)


# --- failures ---


async def test_wrong_data_is_detected(address: DeviceAddress, rping: InProcess) -> None:
    """The server changes the last byte of the third ping: only -V detects that."""

    async def handle(connection: Connection) -> None:
        """Serve as rping does, except for the changed byte."""
        pings = 0
        with await connection.allocate(64, SHARED) as memory:
            async for record in connection:
                await connection.read(RemoteBuffer.unpack(record), memory)
                pings += 1
                if pings == 3:
                    memoryview(memory)[63] ^= 1
                await connection.send(bytes(16))
                await connection.write(memory, RemoteBuffer.unpack(await connection.recv()))
                await connection.send(bytes(16))

    async with serving_with(address.host, handle) as (port, _):
        await rping.ping("-a", address.host, "-p", port, "-C", "4")
    async with serving_with(address.host, handle) as (port, _):
        done = await run("rping", "-c", "-V", "-a", address.host, "-p", str(port), "-C", "4")
    assert done == Done(1, "", "rping: data mismatch in ping 2\n")


@pytest.mark.parametrize("length", [0, 15, 17])
async def test_a_record_of_the_wrong_size_is_refused(
    address: DeviceAddress, rping: InProcess, length: int
) -> None:
    async def handle(connection: Connection) -> None:
        await connection.recv()
        await connection.send(bytes(length))
        assert [message async for message in connection] == []

    error = f"^the peer sent a record of {length} bytes, not 16$"
    async with serving_with(address.host, handle) as (port, _):
        with pytest.raises(ValueError, match=error):
            await rping.ping("-a", address.host, "-p", port)
    async with rping.serving("-a", address.host) as (serving, port):
        async with aiordma.connect(address.host, port) as connection:
            await connection.send(bytes(length))
            assert [message async for message in connection] == []
        with pytest.raises(ValueError, match=error):
            await serving


async def test_a_ping_that_is_too_large_for_the_server(
    address: DeviceAddress, rping: InProcess
) -> None:
    async with rping.serving("-a", address.host, "-S", "64") as (serving, port):
        with pytest.raises(PeerClosed):
            await rping.ping("-a", address.host, "-p", port, "-S", "65")
        with pytest.raises(ValueError, match=r"^a ping of 65 bytes: -S allows 64 here$"):
            await serving


async def test_programs_that_fail_print_one_line(address: DeviceAddress) -> None:
    """The client has no server. The server cannot read the memory of its client."""
    async with running("rping", "-s", "-a", address.host, "-p", "0") as process:
        port = (await next_line(process.stderr)).removeprefix("listening on port ")
        async with aiordma.connect(address.host, int(port)) as connection:
            await connection.send(RemoteBuffer(4096, 77, 64).pack())
            with pytest.raises(aiordma.RdmaError):
                await connection.recv()
        client = await run("rping", "-c", "-a", address.host, "-p", "1")
        assert "rejected the connection" in client.errors
        for done in (await finish(process), client):
            assert (done.status, done.output, done.errors.count("\n")) == (1, "", 1)
            assert done.errors.startswith("rping: ")
