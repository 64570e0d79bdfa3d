"""The peer has reached a limit: of locked memory, of open files, of RDMA objects.

The peer's program connects and listens, so both sides of a connection are without a resource. Each
failure has a typed error whose text says how to raise the limit. Afterwards the peer is served.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import loops
import pytest
from exchanges import check_service, connection_to, exchange_messages
from helpers import TIME_LIMIT, serving
from network_peer import Peer

import aiordma
from aiordma import Connection, Rejected
from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.campaign

OBJECTS = 30
"""More RDMA objects than one connection needs."""


@asynccontextmanager
async def lasting(peer: Peer, address: DeviceAddress) -> AsyncIterator[Connection]:
    """Yield a connection that works before, in and after the block."""
    async with await connection_to(peer, address) as connection:
        await exchange_messages(connection, 2)
        yield connection
        await exchange_messages(connection, 2)


async def failure(peer: Peer, *command: object) -> tuple[str, int, str]:
    """Have the peer perform a command. Return the type, the errno and the text of its error."""
    error = await peer.command("attempt", *command)
    assert error is not None, f"{command} has not failed"
    return error[0], error[1], error[2]


async def check_refused(peer: Peer, address: DeviceAddress, port: int, advice: str) -> None:
    """Check that a listener of the peer rejects this side, and that the peer logs the reason."""
    with pytest.raises(Rejected):
        await aiordma.connect(peer.host(address), port)
    texts: list[str] = []

    async def is_logged() -> bool:
        texts.extend(await peer.command("logged"))
        return bool(texts)

    await loops.until(is_logged, "the peer to log the reason")
    assert "could not be accepted" in texts[0]
    assert advice in texts[0]


@pytest.mark.parametrize("limit", [0, 4096])
async def test_the_locked_memory_of_the_peer_is_used_up(
    peer: Peer, address: DeviceAddress, limit: int
) -> None:
    # siw compares the limit itself. For rxe, the kernel's ib_umem_get() has an errno for 0.
    is_siw = address.transport is TransportType.IWARP
    code = errno.ENOMEM if limit or is_siw else errno.EPERM
    port = await peer.command("serve_messages", peer.host(address))
    async with (
        loops.timeout(2 * TIME_LIMIT),
        serving(address) as listener,
        lasting(peer, address) as connection,
    ):
        await loops.to_thread(peer.limit_locked_memory, limit)
        await exchange_messages(connection, 2)
        failed = await failure(peer, "use_once", *listener.local_address)
        assert failed[:2] == ("VerbsError", code)
        assert "ulimit -l" in failed[2]
        await check_refused(peer, address, port, "ulimit -l")
        await loops.to_thread(peer.lift_limits)
        await peer.command("use_once", *listener.local_address)
    await check_service(peer, address)


async def test_the_descriptors_of_the_peer_are_used_up(peer: Peer, address: DeviceAddress) -> None:
    """A connection needs no descriptor. The first one of a loop does, and so does a listener."""
    host = peer.host(address)
    async with loops.timeout(2 * TIME_LIMIT), serving(address) as listener:
        await loops.to_thread(peer.limit_descriptors, await peer.command("lowest_free_descriptor"))
        for command in (("use_once", *listener.local_address), ("listen_only", host)):
            failed = await failure(peer, *command)
            assert failed[:2] == ("VerbsError", errno.EMFILE)
            assert "ulimit -n" in failed[2]
        await loops.to_thread(peer.lift_limits)
        port = await peer.command("serve_messages", host)
        async with lasting(peer, address):
            lowest = await peer.command("lowest_free_descriptor")
            await loops.to_thread(peer.limit_descriptors, lowest)
            async with await aiordma.connect(host, port) as connection:
                await exchange_messages(connection, 2)
            await peer.command("use_once", *listener.local_address)
            failed = await failure(peer, "listen_only", host)
            assert failed[:2] == ("VerbsError", errno.EMFILE)
            await loops.to_thread(peer.lift_limits)
    await check_service(peer, address)


async def test_the_rdma_objects_of_the_peer_are_used_up(peer: Peer, address: DeviceAddress) -> None:
    """The rdma control group of the peer allows 0 objects, then 1, until a connection works.

    So the protection domain, the completion queue, the queue pair and each registration is once
    the one object too many.
    """
    port = await peer.command("serve_messages", peer.host(address))
    async with loops.timeout(2 * TIME_LIMIT), serving(address) as listener:
        functions = []
        for count in range(OBJECTS):
            await loops.to_thread(peer.limit_objects, address.device, count)
            error = await peer.command("attempt", "use_once", *listener.local_address)
            if error is None:
                break
            kind, code, text = error
            print(f"{count} objects: {text}")
            assert (kind, code) == ("VerbsError", errno.EAGAIN)
            assert "rdma.max" in text
            functions.append(text.partition(":")[0])
            if count == 0:
                await check_refused(peer, address, port, "rdma.max")
        else:
            raise AssertionError(f"{OBJECTS} objects were not enough")
        assert functions
        await loops.to_thread(peer.lift_limits)
    await check_service(peer, address)
