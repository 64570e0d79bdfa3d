"""The example file_transfer.py: its two programs, and servers of this test that fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import example_runs
import loops
import pytest
from example_runs import (
    StreamHandler,
    interrupt,
    run,
    running,
    serving_messages_with,
    serving_with,
)

import aiordma
from aiordma import Connection, MessageStream
from aiordma.rdmacm import DeviceAddress
from examples import file_transfer
from examples.file_transfer import OPTIONS, PIECE

SIZE = 300_000

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]


@contextlib.asynccontextmanager
async def serving(host: str, path: Path) -> AsyncIterator[int]:
    """Run the server of the example in this process. Yield the port."""
    with path.open("rb") as file:
        announcement = file_transfer.announce(file)
        handler = functools.partial(file_transfer.serve_one, file=file, announcement=announcement)
        async with serving_messages_with(host, handler, OPTIONS) as (port, _):
            yield port


def make_file(path: Path, size: int) -> bytes:
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    return content


async def test_fetching_with_the_programs(address: DeviceAddress, tmp_path: Path) -> None:
    """Two clients fetch at the same time. A third one replaces a file that exists."""
    source, first, second = (tmp_path / name for name in ("source", "first", "second"))
    content = make_file(source, 2 * PIECE + 12345)
    serve = ("file_transfer", "serve", str(source), "--host", address.host, "--port", "0")
    async with example_runs.serving(*serve) as (process, port):
        fetch = ("file_transfer", "fetch", address.host, port)
        done = await asyncio.gather(run(*fetch, str(first)), run(*fetch, str(second)))
        assert first.read_bytes() == second.read_bytes() == content
        first.write_bytes(b"old")
        await file_transfer.fetch(address.host, int(port), first)
        assert first.read_bytes() == content
        assert await interrupt(process) == (0, "", "")
    for status, output, errors in done:
        assert (status, output) == (0, f"fetching 'source', {len(content):,} bytes\n")
        assert errors.startswith(f"[{30 * '#'}] 100%  {len(content):,} bytes  ")
        assert errors.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == [first, second, source]


async def test_files_of_each_size(address: DeviceAddress, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for size in (0, 1, 4096, 4097, PIECE, PIECE + 1):
        content = make_file(source, size)
        async with serving(address.host, source) as port:
            await file_transfer.fetch(address.host, port, target)
        assert target.read_bytes() == content


# --- failures ---


async def test_a_file_that_changes_is_not_fetched(
    address: DeviceAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server has computed the checksum before the change. The old target file stays."""
    source, target = tmp_path / "source", tmp_path / "target"
    make_file(source, SIZE)
    target.write_bytes(b"old")
    async with serving(address.host, source) as port:
        with source.open("r+b") as file:
            file.seek(SIZE // 2)
            file.write(b"changed")
        with pytest.raises(ValueError, match="the checksum is wrong"):
            await file_transfer.fetch(address.host, port, target)
        capsys.readouterr()
        os.truncate(source, 5)
        with pytest.raises(aiordma.PeerClosed):
            await file_transfer.fetch(address.host, port, target)
    error = f"file_transfer: {address.host}: source has become shorter\n"
    assert capsys.readouterr().err == error
    assert target.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [source, target]


def sends_one_piece(then: StreamHandler, when: str) -> StreamHandler:
    """Return a handler that announces two pieces, sends one, and then calls `then`."""

    async def handle(stream: MessageStream) -> None:
        content = bytes(2 * PIECE)
        digest = hashlib.sha256(content).digest()
        await stream.recv()
        await stream.send(file_transfer.Announcement(len(content), digest, "zeros").pack())
        if when == "between pieces":
            await stream.send(content[:PIECE])
        else:
            stream.send_soon(content[:PIECE])
        await then(stream)

    return handle


@pytest.mark.parametrize("when", ["while it reads", "between pieces"])
async def test_a_server_that_aborts_its_stream(
    address: DeviceAddress, tmp_path: Path, when: str
) -> None:
    async def abort(stream: MessageStream) -> None:
        stream.abort()

    handler = sends_one_piece(abort, when)
    async with serving_messages_with(address.host, handler, OPTIONS) as (port, _):
        with pytest.raises((aiordma.PeerClosed, aiordma.WorkRequestError)):
            await file_transfer.fetch(address.host, port, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


async def test_ctrl_c_leaves_no_file(address: DeviceAddress, tmp_path: Path) -> None:
    """The client is interrupted while it waits for a piece that never comes."""
    waiting = asyncio.Event()

    async def stall(stream: MessageStream) -> None:
        waiting.set()
        with contextlib.suppress(aiordma.PeerClosed):
            await stream.recv()

    handler = sends_one_piece(stall, "between pieces")
    async with serving_messages_with(address.host, handler, OPTIONS) as (port, _):
        command = ("fetch", address.host, str(port), str(tmp_path / "target"))
        async with running("file_transfer", *command) as client:
            await waiting.wait()
            [partial] = tmp_path.iterdir()
            assert partial.name == f"target.{client.pid}.part"
            done = await interrupt(client)
    assert (done.status, done.errors) == (1, "file_transfer: interrupted\n")
    assert list(tmp_path.iterdir()) == []


async def test_a_client_that_aborts_its_stream(
    address: DeviceAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server reports it, and serves the next client."""
    content = make_file(tmp_path / "source", SIZE)
    async with serving(address.host, tmp_path / "source") as port:
        stream = await aiordma.connect_messages(address.host, port)
        await stream.send(b"")
        await stream.recv()
        stream.abort()
        await stream.aclose()
        await loops.until(
            lambda: "closed the connection" in capsys.readouterr().err, "the server's report"
        )
        await file_transfer.fetch(address.host, port, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([b"hello"], "not a file_transfer server"),
        ([bytes(7) + b"\1" + bytes(32), b""], "sent 0 bytes instead of 1"),
        ([bytes(7) + b"\1" + bytes(32), b"five!"], "sent 5 bytes instead of 1"),
        ([bytes(7) + b"\1" + bytes(32), b"x"], "the checksum is wrong"),
    ],
)
async def test_a_server_of_another_protocol(
    address: DeviceAddress, tmp_path: Path, messages: list[bytes], error: str
) -> None:
    async def handle(stream: MessageStream) -> None:
        await stream.recv()
        for message in messages:
            await stream.send(message)
        with pytest.raises(aiordma.PeerClosed):
            await stream.recv()

    async with serving_messages_with(address.host, handle, OPTIONS) as (port, _):
        with pytest.raises(ValueError, match=error):
            await file_transfer.fetch(address.host, port, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


async def test_a_server_without_message_streams(address: DeviceAddress, tmp_path: Path) -> None:
    async def handle(connection: Connection) -> None:
        assert [message async for message in connection] == []

    async with serving_with(address.host, handle) as (port, _):
        with pytest.raises(aiordma.ProtocolError):
            await file_transfer.fetch(address.host, port, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
