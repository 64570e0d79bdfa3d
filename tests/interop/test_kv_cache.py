"""The example kv_cache.py: as programs, and with readers and writers at the same slots."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from example_runs import Done, interrupt, load, next_line, run, running
from helpers import PATIENCE

import aiordma
from aiordma.rdmacm import DeviceAddress

kv_cache = load("kv_cache")
SLOT_SIZE, HEADER = kv_cache.SLOT_SIZE, kv_cache.HEADER
ROOM = SLOT_SIZE - HEADER.size


@contextlib.asynccontextmanager
async def serving(host: str, table: Any) -> AsyncIterator[int]:
    """The example's server in this process; its port."""
    async with aiordma.listen(host, 0, options=kv_cache.OPTIONS) as listener:
        handler = functools.partial(kv_cache.serve_client, table=table)
        task = asyncio.create_task(listener.serve(handler))
        yield listener.local_address[1]
        await listener.aclose()
        await asyncio.wait_for(task, PATIENCE)


@pytest.fixture
def torn(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The slots that were found to be not whole."""
    found: list[bytes] = []
    unpack = kv_cache.Slot.unpack

    def noting(memory: bytes | memoryview) -> Any:
        slot = unpack(memory)
        if slot is None:
            found.append(bytes(memory[: HEADER.size]))
        return slot

    monkeypatch.setattr(kv_cache.Slot, "unpack", noting)
    return found


@pytest.mark.asyncio
async def test_the_programs(address: DeviceAddress) -> None:
    async with (
        asyncio.timeout(3 * PATIENCE),
        running("kv_cache", "serve", "--host", address.host, "--port", "0") as server,
    ):
        port = (await next_line(server.stdout)).removeprefix("listening on port ")
        where = (address.host, port)
        assert await run("kv_cache", "put", *where, "colour", "grün") == Done(0, "", "")
        assert await run("kv_cache", "get", *where, "colour") == Done(0, "grün\n", "")
        done = await run("kv_cache", "delete", *where, "size")
        assert done == Done(1, "", "kv_cache: there is no key 'size'\n")
        assert await interrupt(server) == (0, "", "")


@pytest.mark.asyncio
async def test_the_commands(
    address: DeviceAddress,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    """As the programs, but in this process, which takes less time."""
    async with asyncio.timeout(PATIENCE), serving(address.host, kv_cache.Table(16)) as port:

        async def ask(command: str, *words: str) -> bytes:
            command_line = ["kv_cache.py", command, address.host, str(port), *words]
            monkeypatch.setattr(sys, "argv", command_line)
            await kv_cache.ask(kv_cache.parse_arguments())
            return capsysbinary.readouterr().out

        with pytest.raises(KeyError, match="colour"):
            await ask("get", "colour")
        for value in ("grün", "", "\udcff", "red\nand blue"):
            assert await ask("put", "colour", value) == b""
            assert await ask("get", "colour") == os.fsencode(value) + b"\n"
        assert await ask("delete", "colour") == b""
        for command in ("get", "delete"):
            with pytest.raises(KeyError, match="colour"):
                await ask(command, "colour")
        with pytest.raises(ValueError, match=f"more than {ROOM} bytes together"):
            await ask("put", "colour", ROOM * "x")
    with pytest.raises(aiordma.Rejected):
        await ask("get", "colour")


@pytest.mark.asyncio
async def test_against_a_dictionary(address: DeviceAddress) -> None:
    """Puts and deletes of few keys, so that slots are used again."""
    choose = random.Random(7)
    model: dict[bytes, bytes] = {}
    keys = [b"key %d" % number for number in range(40)]
    async with (
        asyncio.timeout(PATIENCE),
        serving(address.host, kv_cache.Table(256)) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        for _ in range(200):
            key = choose.choice(keys)
            if choose.random() < 0.6:
                model[key] = choose.randbytes(choose.randrange(ROOM - len(key)))
                await cache.put(key, model[key])
            else:
                assert await cache.delete(key) == (model.pop(key, None) is not None)
            asked = choose.choice(keys)
            assert await cache.get(asked) == model.get(asked)
        values = await asyncio.gather(*(cache.get(key) for key in keys))
    assert values == [model.get(key) for key in keys]


@pytest.mark.asyncio
async def test_the_limits(address: DeviceAddress) -> None:
    async with (
        asyncio.timeout(PATIENCE),
        serving(address.host, kv_cache.Table(1)) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        for key, value in ((b"k", bytes(ROOM - 1)), (bytes(ROOM), b""), (b"k", b"")):
            await cache.put(key, value)
            assert await cache.get(key) == value
        for key, value in ((b"", b"v"), (b"k", bytes(ROOM)), (bytes(ROOM + 1), b"")):
            with pytest.raises(ValueError, match=r"empty|more than"):
                await cache.put(key, value)
        assert await cache.get(b"k") == b""


@pytest.mark.asyncio
async def test_what_was_written_longest_ago_goes(address: DeviceAddress) -> None:
    """All keys compete for the same slots of a table that has no more than are probed."""
    keys = [b"%d" % number for number in range(kv_cache.PROBES + 2)]
    async with (
        asyncio.timeout(PATIENCE),
        serving(address.host, kv_cache.Table(kv_cache.PROBES)) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        for key in keys[:-2]:
            await cache.put(key, b"old")
        await cache.put(keys[0], b"new")
        for key in keys[-2:]:
            await cache.put(key, b"new")
        values = [await cache.get(key) for key in keys]
        assert values == [b"new", None, None, *([b"old"] * (kv_cache.PROBES - 3)), b"new", b"new"]
        await cache.delete(keys[4])
        await cache.put(b"in its place", b"new")
        assert await cache.get(keys[3]) == b"old"
        assert await cache.get(keys[4]) is None


# --- readers beside writers ---


def spoil(table: Any, position: int, how: str) -> bytes:
    """Leave a slot as a reader may see it halfway through a put; returns how it was."""
    slot = table.memory[position * SLOT_SIZE :][:SLOT_SIZE]
    before = bytes(slot)
    if how == "odd version":
        kv_cache.VERSION.pack_into(slot, 0, 3)
    elif how == "new value, old header":
        slot[HEADER.size + 10 : HEADER.size + 20] = b"new value "
    elif how == "new version, old value":
        kv_cache.VERSION.pack_into(slot, 0, 4)
    else:
        HEADER.pack_into(slot, 0, 2, 65535, 65535, 0)
    return before


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "how", ["odd version", "new value, old header", "new version, old value", "wild lengths"]
)
async def test_a_slot_that_is_not_whole(
    address: DeviceAddress, how: str, torn: list[bytes]
) -> None:
    """It is read again until it is whole, and no more often than that."""
    table = kv_cache.Table(1)
    table.put(b"key", b"a value of some length, to be written over")
    async with (
        asyncio.timeout(PATIENCE),
        serving(address.host, table) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        before = spoil(table, 0, how)
        with pytest.raises(kv_cache.TornRead, match=r"slot 0 was not whole in any of 100 reads"):
            await cache.get(b"key")
        assert len(torn) == kv_cache.ATTEMPTS
        getting = asyncio.create_task(cache.get(b"key"))
        while len(torn) == kv_cache.ATTEMPTS:
            await asyncio.sleep(0)
        assert not getting.done()
        table.memory[:SLOT_SIZE] = before
        assert await getting == b"a value of some length, to be written over"


class RudeTable(kv_cache.Table):  # type: ignore[misc]
    """Writes in pieces, and does not warn with an odd version: readers have the checksum alone."""

    def _write(self, position: int, key: bytes, value: bytes) -> None:
        self._version += 2
        packed = kv_cache.Slot(self._version, key, value).pack()
        slot = self.memory[position * SLOT_SIZE :]
        for start in range(0, len(packed), 16):
            slot[start : start + 16] = packed[start : start + 16]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [kv_cache.Table, RudeTable])
async def test_a_slot_that_never_rests(
    address: DeviceAddress, kind: Any, torn: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes all the time, and the device reads when it likes: no mixture is returned."""
    monkeypatch.setattr(kv_cache, "ATTEMPTS", 100_000)
    table, stop = kind(1), threading.Event()
    table.put(b"key", bytes(ROOM - 3))

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            table.put(b"key", bytes([number % 256]) * (ROOM - 3))

    values = set()
    async with (
        asyncio.timeout(2 * PATIENCE),
        serving(address.host, table) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        writer = threading.Thread(target=write)
        writer.start()
        try:
            while len(values) < 20 or not torn:
                value = await cache.get(b"key")
                assert len(value) == ROOM - 3
                assert len(set(value)) == 1
                values.add(value)
        finally:
            stop.set()
            await asyncio.to_thread(writer.join)


@pytest.mark.asyncio
async def test_readers_and_writers(address: DeviceAddress) -> None:
    """Each key has one writer: whoever reads it sees its values in the order they were written."""
    keys, rounds = [b"key %d" % number for number in range(4)], 50
    table = kv_cache.Table(16)

    def value_of(key: bytes, number: int) -> bytes:
        return b"%s %d;" % (key, number) * (1 + number % 20)

    async def write(port: int, key: bytes) -> None:
        async with kv_cache.open_cache(address.host, port) as cache:
            for number in range(rounds):
                await cache.put(key, value_of(key, number))
                if number % 10 == 5:
                    assert await cache.delete(key)

    async def read(port: int, writing: list[asyncio.Task[None]]) -> None:
        last = dict.fromkeys(keys, -1)
        async with kv_cache.open_cache(address.host, port) as cache:
            over = False
            while not over:
                over = all(task.done() for task in writing)  # and then once more
                for key, value in zip(
                    keys, await asyncio.gather(*(cache.get(key) for key in keys)), strict=True
                ):
                    if value is not None:
                        number = int(value.partition(b";")[0].removeprefix(key))
                        assert value == value_of(key, number)
                        assert number >= last[key]
                        last[key] = number
            assert await cache.get(keys[0]) == value_of(keys[0], rounds - 1)
        assert max(last.values()) > 0

    async with (
        asyncio.timeout(2 * PATIENCE),
        serving(address.host, table) as port,
        asyncio.TaskGroup() as tasks,
    ):
        writing = [tasks.create_task(write(port, key)) for key in keys]
        for _ in range(2):
            tasks.create_task(read(port, writing))


@pytest.mark.asyncio
async def test_many_tasks_at_one_client(address: DeviceAddress) -> None:
    """More than it has receive buffers and memory to read into, some of them cancelled."""
    keys = [b"%d" % number for number in range(60)]
    async with (
        asyncio.timeout(PATIENCE),
        serving(address.host, kv_cache.Table(4096)) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
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
            # The answer is to this, and not to the delete that nobody waits for.
            assert await cache.delete(keys[number])
        values = await asyncio.gather(*(cache.get(key) for key in keys))
    assert values == [None] * 40 + keys[40:]


# --- peers that do wrong ---


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (b"", "a request of 0 bytes"),
        (b"x\0\1kv", "an unknown request b'x'"),
        (b"p\0\0v", "the key is empty"),
        (b"d\0\0", "an unknown request b'd'"),
        (b"p\0\1k" + bytes(ROOM), f"key and value have more than {ROOM} bytes together"),
    ],
)
async def test_a_bad_client(
    address: DeviceAddress,
    request_: bytes,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is the only one that the server ends."""
    async with (
        asyncio.timeout(PATIENCE),
        serving(address.host, kv_cache.Table(16)) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        async with aiordma.connect(address.host, port, options=kv_cache.OPTIONS) as bad:
            await bad.send(b"")
            await bad.recv()
            await bad.send(request_)
            assert [message async for message in bad] == []
        await cache.put(b"key", b"value")
        assert await cache.get(b"key") == b"value"
    assert capsys.readouterr().err == f"kv_cache: {address.host}: {complaint}\n"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"hello", "a RemoteBuffer has 16 bytes, not 5"),
        (bytes(16), "a table of 0 bytes has no slots of 512"),
        (bytes(15) + b"\1", "a table of 1 bytes has no slots of 512"),
    ],
)
async def test_a_server_of_something_else(
    address: DeviceAddress, answer: bytes, complaint: str
) -> None:
    async def play(connection: aiordma.Connection) -> None:
        await connection.recv()
        await connection.send(answer)
        assert [message async for message in connection] == []

    async with aiordma.listen(address.host, 0) as listener:
        task = asyncio.create_task(listener.serve(play))
        with pytest.raises(ValueError, match=complaint):
            async with kv_cache.open_cache(*listener.local_address):
                pytest.fail("that is no cache")
        await listener.aclose()
        await task


@pytest.mark.asyncio
async def test_a_server_that_vanishes(address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE):
        table = kv_cache.Table(16)
        async with aiordma.listen(address.host, 0, options=kv_cache.OPTIONS) as listener:
            handler = functools.partial(kv_cache.serve_client, table=table)
            task = asyncio.create_task(listener.serve(handler))
            async with kv_cache.open_cache(*listener.local_address) as cache:
                await cache.put(b"key", b"value")
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                with pytest.raises(aiordma.RdmaError):
                    await cache.get(b"key")
                with pytest.raises(aiordma.RdmaError):
                    await cache.put(b"key", b"value")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("serve", "--slots", "0"), "a table cannot have 0 slots"),
        (("serve", "--slots", "8388608"), "a table cannot have 8388608 slots"),
        (("serve", "--port", "65536"), "port 65536 is not between 0 and 65535"),
        (("get", "no.such.name.invalid", "1", "key"), "no.such.name.invalid"),
        (("get", "10.7.1.1", "1"), "required: key"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["kv_cache.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        kv_cache.main()
    said = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
    assert complaint in said
