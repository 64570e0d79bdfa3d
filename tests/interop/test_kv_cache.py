"""The example kv_cache.py: its programs, and readers and writers of the same slots."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import sys
import threading
from collections.abc import AsyncIterator

import loops
import pytest
from example_runs import Done, interrupt, next_line, run, running
from helpers import TIME_LIMIT

import aiordma
from aiordma.rdmacm import DeviceAddress
from examples import kv_cache
from examples.kv_cache import HEADER, SLOT_SIZE

MAX_CONTENT = SLOT_SIZE - HEADER.size
"""The limit for the bytes of a key and its value together."""


@contextlib.asynccontextmanager
async def serving(host: str, table: kv_cache.Table) -> AsyncIterator[int]:
    """Run the server of the example in this process. Yield the port."""
    async with aiordma.listen(host, 0, options=kv_cache.OPTIONS) as listener:
        handler = functools.partial(kv_cache.serve_client, table=table)
        task = asyncio.create_task(listener.serve(handler))
        yield listener.local_address[1]
        await listener.aclose()
        await asyncio.wait_for(task, TIME_LIMIT)


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


@pytest.mark.asyncio
async def test_put_get_and_delete_with_the_programs(address: DeviceAddress) -> None:
    async with (
        asyncio.timeout(3 * TIME_LIMIT),
        running("kv_cache", "serve", "--host", address.host, "--port", "0") as server,
    ):
        port = (await next_line(server.stdout)).removeprefix("listening on port ")
        server_address = (address.host, port)
        assert await run("kv_cache", "put", *server_address, "colour", "grün") == Done(0, "", "")
        assert await run("kv_cache", "get", *server_address, "colour") == Done(0, "grün\n", "")
        done = await run("kv_cache", "delete", *server_address, "size")
        assert done == Done(1, "", "kv_cache: there is no key 'size'\n")
        assert await interrupt(server) == (0, "", "")


@pytest.mark.asyncio
async def test_the_commands_in_this_process(
    address: DeviceAddress,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    """The same commands as those of the programs, without the time to start a process."""
    async with asyncio.timeout(TIME_LIMIT), serving(address.host, kv_cache.Table(16)) as port:

        async def run_command(command: str, *words: str) -> bytes:
            command_line = ["kv_cache.py", command, address.host, str(port), *words]
            monkeypatch.setattr(sys, "argv", command_line)
            await kv_cache.run_client(kv_cache.parse_arguments())
            return capsysbinary.readouterr().out

        with pytest.raises(KeyError, match="colour"):
            await run_command("get", "colour")
        for value in ("grün", "", "\udcff", "red\nand blue"):
            assert await run_command("put", "colour", value) == b""
            assert await run_command("get", "colour") == os.fsencode(value) + b"\n"
        assert await run_command("delete", "colour") == b""
        for command in ("get", "delete"):
            with pytest.raises(KeyError, match="colour"):
                await run_command(command, "colour")
        with pytest.raises(ValueError, match=f"more than {MAX_CONTENT} bytes together"):
            await run_command("put", "colour", MAX_CONTENT * "x")
    with pytest.raises(aiordma.Rejected):
        await run_command("get", "colour")


@pytest.mark.asyncio
async def test_the_cache_behaves_as_a_dictionary(address: DeviceAddress) -> None:
    """Put and delete few keys, so that the slots are reused."""
    choose = random.Random(7)
    model: dict[bytes, bytes] = {}
    keys = [b"key %d" % number for number in range(40)]
    async with (
        asyncio.timeout(TIME_LIMIT),
        serving(address.host, kv_cache.Table(256)) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
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


@pytest.mark.asyncio
async def test_the_largest_keys_and_values(address: DeviceAddress) -> None:
    async with (
        asyncio.timeout(TIME_LIMIT),
        serving(address.host, kv_cache.Table(1)) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        for key, value in ((b"k", bytes(MAX_CONTENT - 1)), (bytes(MAX_CONTENT), b""), (b"k", b"")):
            await cache.put(key, value)
            assert await cache.get(key) == value
        for key, value in ((b"", b"v"), (b"k", bytes(MAX_CONTENT)), (bytes(MAX_CONTENT + 1), b"")):
            with pytest.raises(ValueError, match=r"empty|more than"):
                await cache.put(key, value)
        assert await cache.get(b"k") == b""


@pytest.mark.asyncio
async def test_the_oldest_key_is_replaced(address: DeviceAddress) -> None:
    """The table has only the slots of one search, so all keys use the same slots."""
    keys = [b"%d" % number for number in range(kv_cache.PROBES + 2)]
    async with (
        asyncio.timeout(TIME_LIMIT),
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
        await cache.put(b"replacement", b"new")
        assert await cache.get(keys[3]) == b"old"
        assert await cache.get(keys[4]) is None


# --- readers and writers at the same time ---


def spoil(table: kv_cache.Table, position: int, how: str) -> bytes:
    """Make a slot look as in the middle of a put. Return its previous bytes."""
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
async def test_an_inconsistent_slot_is_read_again(
    address: DeviceAddress,
    how: str,
    torn_reads: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client reads the slot again until it is consistent, at most ATTEMPTS times."""
    table = kv_cache.Table(1)
    table.put(b"key", b"a value of some length, to be written over")
    async with (
        asyncio.timeout(TIME_LIMIT),
        serving(address.host, table) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        before = spoil(table, 0, how)
        with pytest.raises(
            kv_cache.TornRead, match=r"slot 0 was inconsistent in each of 100 reads"
        ):
            await cache.get(b"key")
        assert len(torn_reads) == kv_cache.ATTEMPTS
        failed = len(torn_reads)
        monkeypatch.setattr(kv_cache, "ATTEMPTS", 1_000_000)
        getting = asyncio.create_task(cache.get(b"key"))
        await loops.until(lambda: len(torn_reads) > failed, "another inconsistent read")
        assert not getting.done()
        table.memory[:SLOT_SIZE] = before
        assert await getting == b"a value of some length, to be written over"


class UnguardedTable(kv_cache.Table):
    """A table that writes in pieces, without an odd version: readers have only the checksum."""

    def _write(self, position: int, key: bytes, value: bytes) -> None:
        self._version += 2
        packed = kv_cache.Slot(self._version, key, value).pack()
        slot = self.memory[position * SLOT_SIZE :]
        for start in range(0, len(packed), 16):
            slot[start : start + 16] = packed[start : start + 16]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [kv_cache.Table, UnguardedTable])
async def test_a_slot_that_is_always_being_written(
    address: DeviceAddress,
    kind: type[kv_cache.Table],
    torn_reads: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread writes all the time, and the device reads at any moment: no value is a mixture."""
    monkeypatch.setattr(kv_cache, "ATTEMPTS", 100_000)
    table, stop = kind(1), threading.Event()
    table.put(b"key", bytes(MAX_CONTENT - 3))

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            table.put(b"key", bytes([number % 256]) * (MAX_CONTENT - 3))

    values: set[bytes] = set()
    async with (
        asyncio.timeout(2 * TIME_LIMIT),
        serving(address.host, table) as port,
        kv_cache.open_cache(address.host, port) as cache,
    ):
        writer = threading.Thread(target=write)
        writer.start()
        try:
            while len(values) < 20 or not torn_reads:
                value = await cache.get(b"key")
                assert value is not None
                assert len(value) == MAX_CONTENT - 3
                assert len(set(value)) == 1
                values.add(value)
        finally:
            stop.set()
            await asyncio.to_thread(writer.join)


@pytest.mark.asyncio
async def test_readers_get_the_values_in_order(address: DeviceAddress) -> None:
    """Each key has one writer: a reader gets its values in the order of the writes."""
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
            finished = False
            while not finished:
                finished = all(task.done() for task in writing)  # then read once more
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
        asyncio.timeout(2 * TIME_LIMIT),
        serving(address.host, table) as port,
        asyncio.TaskGroup() as tasks,
    ):
        writing = [tasks.create_task(write(port, key)) for key in keys]
        for _ in range(2):
            tasks.create_task(read(port, writing))


@pytest.mark.asyncio
async def test_many_tasks_use_one_client(address: DeviceAddress) -> None:
    """More tasks than receive buffers and read buffers; some of them are cancelled."""
    keys = [b"%d" % number for number in range(60)]
    async with (
        asyncio.timeout(TIME_LIMIT),
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
            # This must be the answer to this delete, not to the cancelled one.
            assert await cache.delete(keys[number])
        values = await asyncio.gather(*(cache.get(key) for key in keys))
    assert values == [None] * 40 + keys[40:]


# --- peers that fail ---


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (b"", "a request of 0 bytes"),
        (b"x\0\1kv", "an unknown request b'x'"),
        (b"p\0\0v", "the key is empty"),
        (b"d\0\0", "an unknown request b'd'"),
        (
            b"p\0\1k" + bytes(MAX_CONTENT),
            f"key and value have more than {MAX_CONTENT} bytes together",
        ),
    ],
)
async def test_an_invalid_request_ends_only_its_client(
    address: DeviceAddress,
    request_: bytes,
    error: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with (
        asyncio.timeout(TIME_LIMIT),
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
    assert capsys.readouterr().err == f"kv_cache: {address.host}: {error}\n"


@pytest.mark.asyncio
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
    async def handle(connection: aiordma.Connection) -> None:
        await connection.recv()
        await connection.send(answer)
        assert [message async for message in connection] == []

    async with aiordma.listen(address.host, 0) as listener:
        task = asyncio.create_task(listener.serve(handle))
        with pytest.raises(ValueError, match=error):
            async with kv_cache.open_cache(*listener.local_address):
                pytest.fail("the server is not a cache")
        await listener.aclose()
        await task


@pytest.mark.asyncio
async def test_a_server_that_ends_fails_its_clients(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT):
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
    ("arguments", "error"),
    [
        (("serve", "--slots", "0"), "a table cannot have 0 slots"),
        (("serve", "--slots", "8388608"), "a table cannot have 8388608 slots"),
        (("serve", "--port", "65536"), "port 65536 is not between 0 and 65535"),
        (("get", "no.such.name.invalid", "1", "key"), "no.such.name.invalid"),
        (("get", "10.7.1.1", "1"), "required: key"),
    ],
)
def test_arguments_that_fail(
    arguments: tuple[str, ...],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["kv_cache.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        kv_cache.main()
    printed = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
    assert error in printed
