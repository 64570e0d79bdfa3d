"""The example tensor_server.py: its programs, and servers and clients of this test that fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import re
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import example_runs
import loops
import numpy as np
import pytest
from broken_messages import wire
from example_runs import interrupt, run, running, serving_messages_with

import aiordma
from aiordma import MessageOptions, MessageStream
from aiordma.message_streams.wire import Kind
from aiordma.rdmacm import DeviceAddress
from examples import tensor_server
from examples.tensor_server import MAX_DESCRIPTION, MAX_NAME, Description, Store

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]

SERVER_OPTIONS = MessageOptions(max_nbytes=MAX_NAME)
LIMIT = 1 << 24
"""The largest array in bytes that clients take."""


def an_array(seed: int = 0) -> tensor_server.Array:
    """Return an array of 4.4 MB, which is read in two pieces."""
    return np.random.default_rng(seed).random((5, 220, 1000), np.float32)


@contextlib.asynccontextmanager
async def serving(
    host: str, **arrays: tensor_server.Array
) -> AsyncIterator[tuple[int, Store, list[MessageStream]]]:
    """Run the server of the example in this process. Yield the port, the store, and its streams."""
    streams: list[MessageStream] = []

    async def handle(stream: MessageStream) -> None:
        streams.append(stream)
        await tensor_server.serve_client(stream, store)

    with contextlib.closing(Store(arrays)) as store:
        async with serving_messages_with(host, handle, SERVER_OPTIONS) as (port, _):
            yield port, store, streams


async def fetch(host: str, port: int, name: str, output: Path | None = None) -> None:
    """Run the client of the example in this process."""
    await tensor_server.fetch(host, port, [name], output, LIMIT)


# --- the programs ---


async def test_several_clients_fetch_at_the_same_time(
    address: DeviceAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = an_array(1), an_array(2)
    np.save(tmp_path / "first.npy", first)
    np.save(tmp_path / "second.npy", second)
    lines = {
        name: f"{name}  float32  (5, 220, 1000)  crc32 {zlib.crc32(array.data):08x}"
        for name, array in (("first", first), ("second", second))
    }
    files = [str(tmp_path / f"{name}.npy") for name in lines]
    serve = ("tensor_server", "serve", *files, "--host", address.host, "--port", "0")
    async with example_runs.serving(*serve) as (process, port):
        program = ("tensor_server", "fetch", address.host, port)
        targets = [tmp_path / "target1", tmp_path / "target2"]
        one, both, _ = await asyncio.gather(
            run(*program, "first", "--output", str(targets[0])),
            run(*program, "second", "first"),
            fetch(address.host, int(port), "second", targets[1]),
        )
        assert capsys.readouterr().out.startswith(lines["second"])
        await tensor_server.show_list(address.host, int(port))
        assert await interrupt(process) == (0, "", "")
    assert capsys.readouterr().out.splitlines() == [*lines.values()]
    assert np.array_equal(np.load(targets[0]), first)
    assert np.array_equal(np.load(targets[1]), second)
    for done, names in ((one, ["first"]), (both, ["second", "first"])):
        assert (done.status, done.errors) == (0, "")
        printed = [re.sub(r"  [0-9.]+ MB/s$", "", line) for line in done.output.splitlines()]
        assert printed == [lines[name] for name in names]


async def test_generated_arrays(address: DeviceAddress, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--arrays", "2", "--megabytes", "1", "--host", address.host, "--port", "0")
    async with example_runs.serving("tensor_server", "serve", *options) as (process, port):
        await tensor_server.fetch(address.host, int(port), ["array1", "array0"], None, LIMIT)
        assert await interrupt(process) == (0, "", "")
    assert capsys.readouterr().out.count("  float32  (1, 250000)  crc32 ") == 2


async def test_ctrl_c_ends_a_client_that_waits(address: DeviceAddress) -> None:
    waiting = asyncio.Event()

    async def stall(stream: MessageStream) -> None:
        await stream.send(Description(await a_name(stream), "<f4", (10,), 0).pack())
        waiting.set()
        with pytest.raises(aiordma.PeerClosed):
            await stream.recv()

    async with (
        serving_messages_with(address.host, stall, SERVER_OPTIONS) as (port, _),
        running("tensor_server", "fetch", address.host, str(port), "array") as client,
    ):
        await waiting.wait()
        done = await interrupt(client)
    assert done == (1, "", "tensor_server: interrupted\n")


async def a_name(stream: MessageStream) -> str:
    """Receive the request of a client, and return the name in it."""
    return (await stream.recv()).decode()


# --- arrays ---


async def test_arrays_of_each_kind(address: DeviceAddress, tmp_path: Path) -> None:
    numbers = np.arange(4000, dtype=np.int16)
    arrays: dict[str, tensor_server.Array] = {
        "scalar": np.asarray(2.5),
        "bool": numbers % 3 == 0,
        "swapped": numbers.astype(">i2"),
        "complex": numbers.astype(np.complex128) * 1j,
        "half": numbers.astype(np.float16),
        "long": numbers.astype(np.longdouble),
        "shape": numbers.reshape(1, 40, 1, 100),
        "fortran": np.asarray(numbers.reshape(40, 100), order="F"),
    }
    paths = [tmp_path / f"{name}.npy" for name in arrays]
    for path in paths:
        np.save(path, arrays[path.stem])
    target = tmp_path / "target"
    async with serving(address.host, **tensor_server.load(paths)) as (port, *_):
        for name, array in arrays.items():
            await fetch(address.host, port, name, target)
            fetched = np.load(target)
            assert (fetched.dtype, fetched.shape) == (array.dtype, array.shape)
            assert np.array_equal(fetched, array)


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.array([None]), "Object arrays cannot be loaded"),
        (np.array(["text"]), "not one of numbers"),
        (np.array(["2026-01-01"], "M8[D]"), "cannot include dtype 'M' in a buffer"),
        (np.zeros(2, "f4,f4"), "not one of numbers"),
        (np.zeros((3, 0)), "is empty"),
    ],
)
def test_arrays_that_are_not_served(array: tensor_server.Array, error: str, tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", array)
    with pytest.raises(ValueError, match=error):
        Store(tensor_server.load([tmp_path / "array.npy"]))


async def test_an_array_is_registered_once_and_not_copied(address: DeviceAddress) -> None:
    """All clients ask at the same time, before the array is registered."""
    async with serving(address.host, array=an_array()) as (port, store, streams):
        await asyncio.gather(*(fetch(address.host, port, "array") for _ in range(4)))
        await fetch(address.host, port, "array")
        assert len(store._regions) == 1
    assert [stream.stats.messages_sent for stream in streams] == [2] * 5
    described = len(store.descriptions["array"])
    assert {stream.stats.bytes_copied for stream in streams} == {described + len("array")}


async def test_a_progress_bar_on_a_terminal(
    address: DeviceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    array = np.ones(10_000_000, np.uint8)
    async with serving(address.host, array=array) as (port, *_):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        await fetch(address.host, port, "array")
    first, *others = terminal.getvalue().removeprefix("\r").split("\r")
    assert first == f"[{30 * ' '}]   0%"
    assert [bar[-4:] for bar in others[:-1]] == sorted(bar[-4:] for bar in others[:-1])
    assert len(others) == 3
    assert others[-1] == f"[{30 * '#'}] 100%\n"


# --- servers that fail ---


def described(**changed: Any) -> bytes:
    """Return the description of an array of 10 floats, with some values changed."""
    fields = {"name": "array", "dtype": "<f4", "shape": [10], "checksum": zlib.crc32(bytes(40))}
    return json.dumps([*(fields | changed).values()]).encode()


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([b""], "the server has no array array"),
        ([b"hello"], "not a tensor_server"),
        ([b"\xff"], "not a tensor_server"),
        ([b"[" * 3000], "not a tensor_server"),
        ([b'["array", "<f4", 10, 0]'], "not a tensor_server"),
        ([b'["array", "<f4", [10]]'], "not a tensor_server"),
        ([bytes(MAX_DESCRIPTION + 1)], "4097 bytes does not fit into 4096"),
        ([described(name="other")], "described other instead of array"),
        ([described(name="\33[2J")], r"'\\x1b\[2J' is not a name"),
        ([described(name="\ud800")], r"'\\ud800' is not a name"),
        ([described(name="x" * (MAX_NAME + 1))], "is not a name"),
        ([described(dtype="|O")], "has the dtype '|O', not one of numbers"),
        ([described(dtype="f4,f4")], "not one of numbers"),
        ([described(dtype="(1000000,1000000)f4")], "not one of numbers"),
        ([described(dtype="\33")], r"has the dtype '\\x1b'"),
        ([described(shape=[-10])], "its shape is invalid"),
        ([described(shape=[True])], "its shape is invalid"),
        ([described(shape=["10"])], "its shape is invalid"),
        ([described(shape=[0, 1 << 62])], "its shape is invalid"),
        ([described(shape=[10**1000])], "its shape is invalid"),
        ([described(shape=[1] * 33)], "its shape is invalid"),
        ([described(shape=[1 << 62] * 32)], "more than --max-bytes"),
        ([described(shape=[LIMIT // 4 + 1])], "16,777,220 bytes, more than --max-bytes"),
        ([described(), bytes(39)], "sent 39 bytes of array instead of 40"),
        ([described(), bytes(41)], "41 bytes does not fit into 40"),
        ([described(), b"x" * 40], "the checksum of array is wrong"),
        ([described(checksum=-1), bytes(40)], "the checksum of array is wrong"),
    ],
)
async def test_a_server_that_sends_nonsense(
    address: DeviceAddress, tmp_path: Path, messages: list[bytes], error: str
) -> None:
    async def handle(stream: MessageStream) -> None:
        assert await a_name(stream) == "array"
        for message in messages:
            stream.send_soon(message)
        with contextlib.suppress(aiordma.PeerClosed):
            await stream.recv()

    async with serving_messages_with(address.host, handle, SERVER_OPTIONS) as (port, _):
        with pytest.raises(ValueError, match=error):
            await fetch(address.host, port, "array", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


async def test_a_server_that_aborts_while_the_client_reads(address: DeviceAddress) -> None:
    array = an_array()

    async def handle(stream: MessageStream) -> None:
        name = await a_name(stream)
        await stream.send(Description(name, array.dtype.str, array.shape, 0).pack())
        stream.send_soon(array.data)
        stream.abort()

    async with serving_messages_with(address.host, handle, SERVER_OPTIONS) as (port, _):
        with pytest.raises((aiordma.PeerClosed, aiordma.WorkRequestError)):
            await fetch(address.host, port, "array")


# --- clients that fail ---


async def goes_before_it_reads(host: str, port: int) -> None:
    async with aiordma.connect_messages(host, port) as stream:
        await stream.send(b"array")
        await stream.recv()
        stream.abort()


async def goes_while_it_reads(host: str, port: int) -> None:
    async with aiordma.connect_messages(host, port) as stream:
        await stream.send(b"array")
        description = Description.unpack(await stream.recv())
        with contextlib.suppress(aiordma.LocalClosed):
            memory = bytearray(description.nbytes)
            await stream.recv_into(memory, progress=lambda _: stream.abort())


async def sends_invalid_text(host: str, port: int) -> None:
    async with aiordma.connect_messages(host, port) as stream:
        await stream.send(b"\xff")
        with pytest.raises(aiordma.PeerClosed):
            await stream.recv()


async def sends_wire_message(host: str, port: int, wire_message: bytes) -> None:
    """Speak the protocol of message streams over a plain connection."""
    private_data = MessageOptions().hello().pack()
    options = aiordma.ConnectionOptions(max_message_size=4096)
    async with aiordma.connect(host, port, private_data=private_data, options=options) as peer:
        await peer.send(wire_message)
        assert [message async for message in peer] == []


UNKNOWN = wire(9)
TOO_LARGE = wire(Kind.EAGER, (MAX_NAME + 1).to_bytes(8, "big") + bytes(MAX_NAME + 1), count=1)


@pytest.mark.parametrize(
    ("failing", "report"),
    [
        (goes_before_it_reads, "closed the connection"),
        (goes_while_it_reads, "closed the connection"),
        (sends_invalid_text, "can't decode byte 0xff"),
        (functools.partial(sends_wire_message, wire_message=UNKNOWN), "unknown kind 9"),
        (functools.partial(sends_wire_message, wire_message=TOO_LARGE), "the limit is 200"),
    ],
)
async def test_a_client_that_fails_does_not_disturb_the_others(
    address: DeviceAddress,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failing: Callable[[str, int], Awaitable[None]],
    report: str,
) -> None:
    """Two more clients are connected: one is idle, and one has not taken its array yet."""
    host, array, errors = address.host, an_array(), ""

    def is_reported() -> bool:
        nonlocal errors
        errors += capsys.readouterr().err
        return report in errors

    async with (
        serving(host, array=array) as (port, *_),
        aiordma.connect_messages(host, port) as idle,
        aiordma.connect_messages(host, port) as slow,
    ):
        await slow.send(b"array")
        await slow.recv()
        await failing(host, port)
        await loops.until(is_reported, "the server's report")
        assert re.fullmatch(rf"tensor_server: {re.escape(host)}: .*{report}.*\n", errors)
        await fetch(host, port, "array", tmp_path / "target")
        assert np.array_equal(np.load(tmp_path / "target"), array)
        await idle.send(b"array")
        assert Description.unpack(await idle.recv()).name == "array"
        for stream in (idle, slow):
            assert await stream.recv() == array.tobytes()
            await stream.send_eof()


async def test_clients_that_the_server_does_not_take(address: DeviceAddress) -> None:
    """A request that is too long is refused by the client, a plain connection by the server."""
    async with serving(address.host, array=an_array()) as (port, *_):
        with pytest.raises(ValueError, match="a message of 201 bytes; the peer takes 200"):
            await fetch(address.host, port, "x" * (MAX_NAME + 1))
        with pytest.raises(aiordma.Rejected):
            await aiordma.connect(address.host, port)
        await fetch(address.host, port, "array")
