"""Memory: registration, registration cache, memory windows, and features that devices lack."""

from __future__ import annotations

import array
import errno
import mmap
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import loops
import numpy as np
import pytest
from helpers import SHARED, access_refused, can_be_resized, connected
from machine import kernel_version

from aiordma import (
    AccessFlags,
    LocalClosed,
    MemoryRegion,
    RegistrationCache,
    VerbsError,
)
from aiordma.rdmacm import DeviceAddress
from aiordma.rdmacm.devices import DeviceReference

if TYPE_CHECKING:
    from typing_extensions import Buffer

RECORD = np.dtype([("key", "S8"), ("value", "<f8"), ("when", "<M8[s]")])


def as_buffer(array: np.ndarray[Any, Any]) -> Buffer:
    """Return the array. numpy declares its arrays to be buffers only from Python 3.12 on."""
    return cast("Buffer", array)


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(b"0123456789abcdef"),
        array.array("d", [1.5, 2.5]),
        memoryview(bytearray(32))[8:24],
        memoryview(bytearray(16)).cast("I", (2, 2)),
        mmap.mmap(-1, 16),
        np.arange(16, dtype=np.uint8),
        np.ones((2, 2), dtype=np.float32),
        np.array([1 + 2j], dtype=np.complex128),
        np.array([True] * 16),
        np.array(["2026-11-21", "2026-11-22"], dtype="M8[D]"),
        np.array([1, 2, 3, 4, 5, 6, 7, 8], dtype=np.float16),
        np.array([b"a longer text", b""], dtype="S8"),
        np.zeros(2, dtype=">u8"),
        np.zeros(1, dtype=[("a", "<u8"), ("b", "<u8")]),
    ],
    ids=lambda buffer: f"{type(buffer).__name__}-{getattr(buffer, 'dtype', '')}",
)
async def test_any_buffer_can_be_registered(address: DeviceAddress, buffer: bytearray) -> None:
    async with connected(address) as pair:
        with await pair.server.register(buffer, SHARED) as far:
            assert len(far) == 16
            await pair.client.write(bytes(range(16)), far.remote)
            await pair.client.send(b"done")
            await pair.server.recv()
            assert bytes(far[:].view) == bytes(range(16))


async def test_a_structured_array_with_a_date_can_be_registered(address: DeviceAddress) -> None:
    """numpy does not export arrays with dates as buffers."""
    records = np.array([(b"one", 1.5, "2026-11-21T09:00:00")], dtype=RECORD)
    copied = np.zeros_like(records)
    async with connected(address) as pair:
        with (
            await pair.server.register(as_buffer(records), SHARED) as far,
            await pair.client.register(as_buffer(copied), SHARED) as near,
        ):
            await pair.client.read(far.remote, near)
    assert (copied == records).all()


async def test_unsuitable_memory_is_refused(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        register = pair.client.register
        with pytest.raises(ValueError, match="Python objects"):
            await register(as_buffer(np.array([object(), None])))
        with pytest.raises(BufferError):
            await register(as_buffer(np.zeros((4, 4))[:, 1]))
        with pytest.raises(ValueError, match="empty"):
            await register(b"")
        with pytest.raises(TypeError):
            await register("text")  # type: ignore[arg-type]
        frozen = np.arange(4)
        frozen.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            await register(as_buffer(frozen))
        with pytest.raises(ValueError, match="0 bytes"):
            await pair.client.allocate(0)
        with pytest.raises(MemoryError):
            await pair.client.allocate(1 << 60)


def has_on_demand_paging(address: DeviceAddress) -> bool:
    reference = DeviceReference()
    try:
        found = {device.name: device for device in reference.devices}
        return found[address.device].attributes.has_on_demand_paging
    finally:
        reference.close()


async def test_memory_that_is_paged_on_demand(address: DeviceAddress) -> None:
    """rxe of Linux 6.1 and 6.12, and siw, do not have this. rxe of Linux 7.2 does."""
    access = AccessFlags.ON_DEMAND | AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
    memory = bytearray(1 << 20)
    async with connected(address) as pair:
        if not has_on_demand_paging(address):
            with pytest.raises(ValueError, match="no on-demand paging"):
                await pair.client.register(memory, access)
            return
        async with await pair.client.register(memory, access) as region:
            await pair.server.write(b"paged in", region.remote[-8:])
            await pair.server.send(b"written")
            assert await pair.client.recv() == b"written"
            assert memory[-8:] == b"paged in"


async def test_features_that_the_device_lacks_are_refused(address: DeviceAddress) -> None:
    """Soft devices have no dma-bufs."""
    async with connected(address) as pair:
        descriptor = os.open("/dev/null", os.O_RDONLY)
        try:
            with pytest.raises(VerbsError, match=r"dma-buf") as refused:
                await pair.client.register_dmabuf(descriptor, 0, 4096)
            assert refused.value.errno == errno.EOPNOTSUPP
        finally:
            os.close(descriptor)
        with pytest.raises(ValueError, match="0 bytes at offset"):
            await pair.client.register_dmabuf(0, 0, 0)


WINDOW = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND


@pytest.mark.transport("IB")
async def test_a_window_invalidated_by_the_peer_refuses_access(address: DeviceAddress) -> None:
    """The peer sends with invalidate. The key is invalid when the message arrives."""
    async with connected(address) as pair:
        near = await pair.client.allocate(100, SHARED)
        with await pair.server.allocate(100, WINDOW) as region:
            window = await pair.server.bind(region[10:30])
            await pair.client.write(b"twenty bytes, no mor", window.remote)
            await pair.client.read(window.remote[:6], near)
            assert bytes(memoryview(near)[:6]) == b"twenty"
            await pair.client.send(b"finished", invalidate=window.remote)
            with await pair.server.recv_message() as message:
                assert bytes(message.data) == b"finished"
                assert message.invalidated == window.remote.rkey
                assert message.imm is None
            assert bytes(memoryview(region)[10:30]) == b"twenty bytes, no mor"
            memoryview(near)[:] = bytes(100)
            with access_refused():
                await pair.client.read(window.remote, near)
            assert bytes(memoryview(near)) == bytes(100)
            window.close()


@pytest.mark.transport("IB")
async def test_a_closed_window_refuses_access(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        region = await pair.server.allocate(100, WINDOW)
        with await pair.server.bind(region, AccessFlags.REMOTE_READ) as window:
            near = await pair.client.allocate(100, SHARED)
            await pair.client.read(window.remote, near)
            region.close()  # stays registered while the window exists
            await pair.client.read(window.remote, near)
        window.close()

        async def read() -> bool:
            await pair.client.read(window.remote, near)
            return False

        with access_refused():
            await loops.until(read, "a worker thread to close the window")
        with pytest.raises(ValueError, match="invalidates a key, not both"):
            await pair.server.send(b"x", imm=1, invalidate=window.remote)


@pytest.mark.transport("IB")
async def test_windows_are_closed_with_their_connection(address: DeviceAddress) -> None:
    """The fixture `no_leaks` checks that nothing is left."""
    async with connected(address) as pair:
        region = await pair.server.allocate(100, WINDOW)
        windows = [await pair.server.bind(region) for _ in range(5)]
        with pytest.raises(ValueError, match="MW_BIND"):
            await pair.client.bind(await pair.client.allocate(10))
    region.close()
    for window in windows:
        window.close()


async def test_the_cache_registers_a_buffer_once(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        data = bytearray(100_000)
        with RegistrationCache(pair.client) as cache:
            with await cache.register(data, SHARED) as first:
                key = first.rkey
            for _ in range(3):
                with await cache.register(data, SHARED) as again:
                    assert again.rkey == key
            with await cache.register(data, AccessFlags.LOCAL_WRITE) as other:
                assert other.rkey != key
            with await cache.register(memoryview(data)[:50_000], SHARED) as part:
                assert part.rkey != key
            assert (len(cache), cache.nbytes) == (3, 250_000)
            regions = await loops.gather(*[cache.register(bytearray(10)) for _ in range(5)])
            same = await loops.gather(*[cache.register(memoryview(data)[1:]) for _ in range(5)])
            assert len({region.rkey for region in same}) == 1
            for region in regions + same:
                region.close()
            assert len(cache) == 9
        assert (len(cache), cache.nbytes) == (0, 0)
        with pytest.raises(LocalClosed):
            await cache.register(data)


async def test_the_cache_returns_no_stale_registration(address: DeviceAddress) -> None:
    """A cached buffer cannot be resized or freed. A discarded one is registered anew."""
    async with connected(address) as pair:
        with RegistrationCache(pair.client) as cache:
            data = bytearray(b"before" * 1000)
            with await cache.register(data) as region:
                await pair.client.send(region[:6])
            with pytest.raises(BufferError):
                data.extend(b"more")
            cache.discard(data)
            cache.discard(b"never seen")
            await loops.until(
                lambda: can_be_resized(data), "a worker thread to deregister the buffer"
            )
            data[:6] = b"after!"
            with await cache.register(data) as region:
                await pair.client.send(region[:6])
            assert [await pair.server.recv() for _ in range(2)] == [b"before", b"after!"]


async def test_the_cache_keeps_at_most_max_bytes(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        buffers = [bytearray(1000) for _ in range(5)]
        with RegistrationCache(pair.client, max_bytes=3000) as cache:
            for buffer in buffers:
                (await cache.register(buffer)).close()
            assert (len(cache), cache.nbytes) == (3, 3000)
            regions = [await cache.register(buffer) for buffer in buffers]
            assert cache.nbytes == 5000  # in use
            await pair.client.send(regions[0][:1])
            for region in regions:
                region.close()
            assert cache.nbytes == 3000
        regions[0].close()


async def test_a_cached_region_outlives_the_cache(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        with RegistrationCache(pair.client) as cache:
            region = await cache.register(bytearray(b"still here"))
        await pair.client.send(region)
        assert await pair.server.recv() == b"still here"
        region.close()


async def iterations_while(registering: Awaitable[MemoryRegion]) -> int:
    """Return how often the loop runs another task until the memory is registered."""
    iterations = 0

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await loops.sleep(0)

    counting = loops.create_task(count())
    (await registering).close()
    counting.cancel()
    return iterations


async def check_that_the_loop_runs(register: Callable[[], Awaitable[MemoryRegion]]) -> None:
    """Check that the loop can run four iterations during a registration. It calls `register()`.

    A registration can end before the fourth iteration, because the system ran other threads
    meanwhile. Then another one is made.
    """

    async def runs() -> bool:
        return await iterations_while(register()) > 3

    await loops.until(runs, "the loop to run four iterations during a registration")


@pytest.mark.transport("IB")
async def test_large_allocations_do_not_block_the_loop(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await check_that_the_loop_runs(lambda: pair.client.allocate(128 << 20))


async def test_large_registrations_do_not_block_the_loop(address: DeviceAddress) -> None:
    """The memory was written to before, so that its pages exist. Otherwise registration allocates
    them while siw locks the memory map of the process, and all threads can have to wait.
    """
    data = bytearray(b"x") * (128 << 20)
    async with connected(address) as pair:
        await check_that_the_loop_runs(lambda: pair.client.register(data))


async def test_a_file_can_be_registered(address: DeviceAddress, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"from a file" + bytes(5000))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        async with (
            connected(address) as pair,
            await pair.server.register(mapped, AccessFlags.REMOTE_READ) as far,
        ):
            near = await pair.client.allocate(11, SHARED)
            await pair.client.read(far.remote[:11], near)
            assert bytes(memoryview(near)) == b"from a file"
        mapped.close()


@pytest.mark.real("the kernel pins the pages")
async def test_memory_that_cannot_be_pinned_fails_with_advice(
    address: DeviceAddress, tmp_path: Path
) -> None:
    """Linux before 6.2 pins pages for writing even if access is read-only. The error says so."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        async with connected(address) as pair:
            if kernel_version() < (6, 2):
                with pytest.raises(VerbsError, match="ACCESS_COPY"):
                    await pair.server.register(mapped, AccessFlags.REMOTE_READ)
                return
            async with await pair.server.register(mapped, AccessFlags.REMOTE_READ) as region:
                into = await pair.client.allocate(len(b"content"), SHARED)
                await pair.client.read(region.remote, into)
                assert bytes(memoryview(into)) == b"content"


async def test_the_buffer_of_a_closed_region_can_be_resized(address: DeviceAddress) -> None:
    data = bytearray(1 << 20)
    async with connected(address) as pair:
        async with await pair.client.register(data) as region:
            with pytest.raises(BufferError):
                data.append(1)
        data.append(1)
        await region.aclose()
