"""The example kv_cache.py: its programs, and readers and writers of the same slots."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator

import example_runs
import loops
import pytest
from example_runs import Done, interrupt, run, serving_with

import aiordma
from aiordma import Connection
from aiordma.rdmacm import DeviceAddress
from examples import kv_cache
from examples.kv_cache import HEADER, OPTIONS, SLOT_SIZE

MAX_CONTENT = SLOT_SIZE - HEADER.size
"""The limit for the bytes of a key and its value together."""

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]


def serving(
    host: str, table: kv_cache.Table
) -> contextlib.AbstractAsyncContextManager[tuple[int, asyncio.Task[None]]]:
    """Run the server of the example in this process. Yield the port and the task."""
    handler = functools.partial(kv_cache.serve_client, table=table)
    return serving_with(host, handler, OPTIONS)


@contextlib.asynccontextmanager
async def opened(host: str, table: kv_cache.Table) -> AsyncIterator[kv_cache.Cache]:
    """Run the server in this process, and open a cache there."""
    async with serving(host, table) as (port, _), kv_cache.open_cache(host, port) as cache:
        yield cache


@pytest.fixture
def torn_reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The headers of the slots that a client found inconsistent, so far."""
    found: list[bytes] = []
    unpack = kv_cache.Slot.unpack

    def unpack_and_record(memory: bytes | memoryview) -> kv_cache.Slot | None:
        slot = unpack(memory)
        if slot is None:
            found.append(bytes(memory[: HEADER.size]))
        return slot

    monkeypatch.setattr(kv_cache.Slot, "unpack", unpack_and_record)
    return found


async def test_put_get_and_delete_with_the_programs(address: DeviceAddress) -> None:
    serve = ("kv_cache", "serve", "--host", address.host, "--port", "0")
    async with example_runs.serving(*serve) as (process, port):
        where = (address.host, port)
        assert await run("kv_cache", "put", *where, "colour", "grün") == Done(0, "", "")
        assert await run("kv_cache", "get", *where, "colour") == Done(0, "grün\n", "")
        done = await run("kv_cache", "delete", *where, "size")
        assert done == Done(1, "", "kv_cache: there is no key 'size'\n")
        assert await interrupt(process) == (0, "", "")


async def test_the_cache_behaves_as_a_dictionary(address: DeviceAddress) -> None:
    """Put and delete few keys, so that the slots are reused."""
    choose = random.Random(7)
    model: dict[bytes, bytes] = {}
    keys = [b"key %d" % number for number in range(40)]
    async with opened(address.host, kv_cache.Table(256)) as cache:
        for _ in range(200):
            key = choose.choice(keys)
            if choose.random() < 0.6:
                model[key] = choose.randbytes(choose.randrange(MAX_CONTENT - len(key)))
                await cache.put(key, model[key])
            else:
                assert await cache.delete(key) == (model.pop(key, None) is not None)
            key = choose.choice(keys)
            assert await cache.get(key) == model.get(key)
        values = await asyncio.gather(*(cache.get(key) for key in keys))
        assert values == [model.get(key) for key in keys]
        for key, value in ((b"", b"v"), (b"k", bytes(MAX_CONTENT)), (bytes(MAX_CONTENT + 1), b"")):
            with pytest.raises(ValueError, match=r"empty|more than"):
                await cache.put(key, value)
        await cache.put(bytes(MAX_CONTENT), b"")
        assert await cache.get(bytes(MAX_CONTENT)) == b""


async def test_the_oldest_key_is_replaced(address: DeviceAddress) -> None:
    """The table has only the slots of one search, so all keys use the same slots."""
    keys = [b"%d" % number for number in range(kv_cache.PROBES + 2)]
    async with opened(address.host, kv_cache.Table(kv_cache.PROBES)) as cache:
        for key in keys[:-2]:
            await cache.put(key, b"old")
        await cache.put(keys[0], b"new")
        for key in keys[-2:]:
            await cache.put(key, b"new")
        values = [await cache.get(key) for key in keys]
        assert values == [b"new", None, None, *([b"old"] * (kv_cache.PROBES - 3)), b"new", b"new"]
        await cache.delete(keys[4])
        await cache.put(b"replacement", b"new")
        assert await cache.get(keys[3]) == b"old"
        assert await cache.get(keys[4]) is None


# --- readers and writers at the same time ---


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (0, kv_cache.VERSION.pack(3)),  # an odd version: a put in progress
        (0, kv_cache.VERSION.pack(4)),  # a new version and the old value
        (HEADER.size + 10, b"new value "),  # a new value and the old header
        (0, HEADER.pack(2, 65535, 65535, 0)),  # wild lengths
    ],
)
async def test_an_inconsistent_slot_is_read_again(
    address: DeviceAddress,
    at: int,
    data: bytes,
    torn_reads: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client reads the slot again until it is consistent, at most ATTEMPTS times."""
    table = kv_cache.Table(1)
    table.put(b"key", b"a value of some length, to be written over")
    before = bytes(table.memory)
    async with opened(address.host, table) as cache:
        table.memory[at : at + len(data)] = data
        with pytest.raises(kv_cache.TornRead, match="slot 0 was inconsistent in each of 100 reads"):
            await cache.get(b"key")
        assert len(torn_reads) == kv_cache.ATTEMPTS == 100
        monkeypatch.setattr(kv_cache, "ATTEMPTS", 1_000_000)
        getting = asyncio.create_task(cache.get(b"key"))
        await loops.until(lambda: len(torn_reads) > 100, "another inconsistent read")
        assert not getting.done()
        table.memory[:] = before
        assert await getting == b"a value of some length, to be written over"


async def test_many_tasks_use_one_client(address: DeviceAddress) -> None:
    """More tasks than receive buffers and read buffers; some of them are cancelled."""
    keys = [b"%d" % number for number in range(60)]
    async with opened(address.host, kv_cache.Table(4096)) as cache:
        await asyncio.gather(*(cache.put(key, key) for key in keys))
        for number in range(40):
            tasks = [
                asyncio.create_task(cache.get(keys[number])),
                asyncio.create_task(cache.delete(b"not there")),
            ]
            for _ in range(number % 8):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # This must be the answer to this delete, not to the cancelled one.
            assert await cache.delete(keys[number])
        values = await asyncio.gather(*(cache.get(key) for key in keys))
    assert values == [None] * 40 + keys[40:]


# --- peers that fail ---


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (b"", "a request of 0 bytes"),
        (b"x\0\1kv", "an unknown request b'x'"),
        (b"p\0\0v", "the key is empty"),
        (b"d\0\0", "an unknown request b'd'"),
        (b"p\0\1k" + bytes(MAX_CONTENT), f"have more than {MAX_CONTENT} bytes together"),
    ],
)
async def test_an_invalid_request_ends_only_its_client(
    address: DeviceAddress, request_: bytes, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    host = address.host
    async with (
        serving(host, kv_cache.Table(16)) as (port, _),
        kv_cache.open_cache(host, port) as cache,
    ):
        async with aiordma.connect(host, port, options=OPTIONS) as bad:
            await bad.send(b"")
            await bad.recv()
            await bad.send(request_)
            assert [message async for message in bad] == []
        await cache.put(b"key", b"value")
        assert await cache.get(b"key") == b"value"
    errors = capsys.readouterr().err
    assert errors.startswith(f"kv_cache: {host}: ")
    assert errors.endswith(f"{error}\n")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"hello", "a RemoteBuffer has 16 bytes, not 5"),
        (bytes(16), "a table of 0 bytes has no slots of 512"),
        (bytes(15) + b"\1", "a table of 1 bytes has no slots of 512"),
    ],
)
async def test_a_server_of_another_protocol(
    address: DeviceAddress, answer: bytes, error: str
) -> None:
    async def handle(connection: Connection) -> None:
        await connection.recv()
        await connection.send(answer)
        assert [message async for message in connection] == []

    async with serving_with(address.host, handle, OPTIONS) as (port, _):
        with pytest.raises(ValueError, match=error):
            async with kv_cache.open_cache(address.host, port):
                pytest.fail("the server is not a cache")


async def test_a_server_that_ends_fails_its_clients(address: DeviceAddress) -> None:
    async with (
        serving(address.host, kv_cache.Table(16)) as (port, task),
        kv_cache.open_cache(address.host, port) as cache,
    ):
        await cache.put(b"key", b"value")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for call in (cache.get(b"key"), cache.put(b"key", b"value")):
            with pytest.raises(aiordma.RdmaError):
                await call
