"""Memory and the peers that can access it: registered access, and protection domains."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import loops
import pytest
from helpers import SHARED, Pair, connected
from streaming import pattern, streaming

from aiordma import (
    AccessFlags,
    Connection,
    ConnectionOptions,
    PeerClosed,
    RemoteBuffer,
    StreamOptions,
    WorkRequestError,
)
from aiordma.rdmacm import DeviceAddress

OWN = ConnectionOptions(own_protection_domain=True)
SECRET = b"the secret of another connection"


async def overwrite(pair: Pair, remote: RemoteBuffer) -> None:
    """Write to `remote` from the client of a pair. Return when the write has arrived.

    On iWARP a write completes before it has arrived, the read behind it does not.
    """
    mine = await pair.server.allocate(1, AccessFlags.REMOTE_READ)
    into = await pair.client.allocate(1, pair.client.read_access)
    await pair.client.write(b"X" * remote.length, remote)
    await pair.client.read(mine.remote, into)


async def check_refused(pair: Pair, remote: RemoteBuffer) -> None:
    """Make sure that the device lets the client of a pair not write to `remote`."""
    with pytest.raises((WorkRequestError, PeerClosed)):
        await overwrite(pair, remote)


async def test_peers_cannot_write_unless_it_was_given(address: DeviceAddress) -> None:
    for make in (Connection.register, Connection.allocate):
        async with connected(address) as pair:
            memory = bytearray(SECRET)
            region = await (
                pair.server.register(memory)
                if make is Connection.register
                else pair.server.allocate(len(SECRET))
            )
            memoryview(region)[:] = SECRET
            for part in (region, region[:4]):
                with pytest.raises(ValueError, match=r"register it with AccessFlags\.REMOTE_READ"):
                    part.remote  # noqa: B018 - a property
            await check_refused(pair, RemoteBuffer(region.addr, region.rkey, len(region)))
            assert bytes(region) == SECRET


@pytest.mark.transport("IB")  # siw of Linux 6.1 does not check the access of reads
async def test_peers_cannot_read_unless_it_was_given(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        region = await pair.server.register(bytearray(SECRET))
        into = await pair.client.allocate(len(SECRET), pair.client.read_access)
        with pytest.raises((WorkRequestError, PeerClosed)):
            await pair.client.read(RemoteBuffer(region.addr, region.rkey, len(region)), into)
        assert bytes(into) == bytes(len(SECRET))


async def test_read_access_is_what_a_read_needs(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        far = await pair.server.register(SECRET, AccessFlags.REMOTE_READ)
        near = await pair.client.allocate(len(SECRET), pair.client.read_access)
        await pair.client.read(far.remote, near)
        assert bytes(near) == SECRET


@asynccontextmanager
async def victim_and_stranger(address: DeviceAddress) -> AsyncIterator[tuple[Pair, Pair]]:
    """Connect two peers of this process. The first connection has protection domains of its own."""
    async with connected(address, OWN, OWN) as victim, connected(address) as stranger:
        yield victim, stranger


async def test_other_peers_cannot_access_an_own_domain(address: DeviceAddress) -> None:
    async with victim_and_stranger(address) as (victim, stranger):
        region = await victim.server.register(bytearray(SECRET), SHARED)
        await check_refused(stranger, region.remote)
        assert bytes(region) == SECRET
        into = await victim.client.allocate(len(SECRET), victim.client.read_access)
        await victim.client.read(region.remote, into)
        assert bytes(into) == SECRET
    async with victim_and_stranger(address) as (victim, stranger):
        region = await victim.server.register(bytearray(SECRET), SHARED)
        into = await stranger.client.allocate(len(SECRET), stranger.client.read_access)
        with pytest.raises((WorkRequestError, PeerClosed)):
            await stranger.client.read(region.remote, into)
        assert bytes(into) == bytes(len(SECRET))


async def test_a_region_is_only_used_in_its_own_domain(address: DeviceAddress) -> None:
    async with victim_and_stranger(address) as (victim, stranger):
        for owner, other in ((victim, stranger), (stranger, victim)):
            region = await owner.client.allocate(10)
            with pytest.raises(ValueError, match="in another protection domain"):
                await other.client.send(region)
            await owner.client.send(region)
            assert await owner.server.recv() == bytes(10)


async def test_messages_of_all_sizes_in_an_own_domain(address: DeviceAddress) -> None:
    """They are sent inline, and copied to buffers of the connection's own pool."""
    async with connected(address, OWN, OWN) as pair:
        for size in (1, 64, 65, 1000, 5000, 16384):
            for sender, receiver in ((pair.client, pair.server), (pair.server, pair.client)):
                await sender.send(pattern(size))
                assert await receiver.recv() == pattern(size)


async def test_a_region_outlives_a_connection_with_an_own_domain(address: DeviceAddress) -> None:
    async with connected(address, OWN) as pair:
        region = await pair.client.allocate(100)
    memoryview(region)[:] = bytes(100)
    await region.aclose()


@pytest.mark.parametrize("is_own", [True, False])
async def test_only_the_peer_of_a_stream_writes_to_its_buffer(
    address: DeviceAddress, is_own: bool
) -> None:
    """A second peer of the process has been told the address and the key of the buffer."""
    options = StreamOptions(own_protection_domain=is_own)
    async with streaming(address, server=options) as victim, connected(address) as stranger:
        inbound = victim.server._core.data_path.protocol.inbound
        buffer = inbound.first_buffer
        remote = RemoteBuffer(buffer.addr, buffer.key, len(SECRET))
        await victim.client.send(SECRET)
        await loops.until(lambda: inbound.available, "the data to arrive")
        if is_own:
            await check_refused(stranger, remote)
            assert await victim.server.receive() == SECRET
        else:  # a key is enough
            await overwrite(stranger, remote)
            assert await victim.server.receive() == b"X" * len(SECRET)


def test_unpickling_checks_the_numbers() -> None:
    remote = RemoteBuffer(1 << 63, 7, 100)
    assert pickle.loads(pickle.dumps(remote)) == remote
    forged = RemoteBuffer(1, 2, 3)
    object.__setattr__(forged, "length", -1)
    with pytest.raises(ValueError, match="length is -1"):
        pickle.loads(pickle.dumps(forged))
