"""Guarantees of trio, on a device: checkpoints, deadlines, and no task left behind.

The other tests of this folder run on trio, too. These are about trio itself.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import pytest
import trio
from helpers import SHARED, TIME_LIMIT, Pair, connected, echo, pending_requests, serving
from loops import until
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

import aiordma
from aiordma import AccessFlags, AsyncCmId, Connection, PeerClosed, RegistrationCache, SyncCmId
from aiordma.rdmacm import DeviceAddress, parse_address

pytestmark = pytest.mark.loops("trio")

T = TypeVar("T")


async def checked(start: Callable[[], Awaitable[T]]) -> T:
    """Return the result of an await. Check that it has passed a checkpoint."""
    with assert_checkpoints():
        return await start()


def system_tasks() -> set[str]:
    """Return the names of the system tasks of aiordma that run now."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    tasks = [task for nursery in root.child_nurseries for task in nursery.child_tasks]
    return {task.name for task in tasks if task.name.startswith("aiordma")}


# --- checkpoints, also when everything is ready ---


async def test_message_calls_are_checkpoints(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        near = await pair.client.allocate(5, SHARED)
        for data in (b"inline", b"c" * 5000, [b"a", b"list"], near):
            await checked(partial(pair.client.send, data))
        await until(lambda: pair.server.stats.messages_unread == 4, "four messages to arrive")
        assert await checked(pair.server.recv) == b"inline"
        assert await checked(lambda: pair.server.recv_into(bytearray(5000))) == 5000
        with await checked(pair.server.recv_message) as message:
            assert bytes(message.data) == b"alist"
        assert await checked(lambda: anext(pair.server)) == bytes(5)
        await pair.client.aclose()
        assert await checked(lambda: anext(pair.server, "the end")) == "the end"


async def test_memory_calls_are_checkpoints(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        buffer = bytearray(64)
        region = await checked(lambda: pair.client.register(buffer, SHARED))
        far = await checked(lambda: pair.server.allocate(64, SHARED))
        for part in (region, region[:0]):
            await checked(partial(pair.client.write, part, far.remote))
            await checked(partial(pair.client.read, far.remote[: len(part)], part))
        await checked(lambda: pair.client.write(b"inline", far.remote))
        with RegistrationCache(pair.client) as cache:
            for _ in range(2):  # the second call finds it in the cache
                with await checked(lambda: cache.register(buffer, SHARED)):
                    pass
        for _ in range(2):
            await checked(region.aclose)


@pytest.mark.transport("IB")
async def test_atomic_and_window_calls_are_checkpoints(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        far = await pair.server.allocate(8, AccessFlags(0xF) | AccessFlags.MW_BIND)
        assert await checked(lambda: pair.client.fetch_and_add(far.remote, 1)) == 0
        assert await checked(lambda: pair.client.compare_and_swap(far.remote, 1, 2)) == 1
        await checked(lambda: pair.server.bind(far))


async def test_connecting_calls_are_checkpoints(address: DeviceAddress) -> None:
    listener = await checked(lambda: aiordma.listen(address.host, 0))
    where = listener.local_address
    async with trio.open_nursery() as nursery:

        async def connect() -> None:
            connection = await checked(lambda: aiordma.connect(*where))
            for _ in range(2):
                await checked(connection.aclose)

        nursery.start_soon(connect)
        await until(lambda: pending_requests(listener), "the request to arrive")
        request = await checked(listener.get_request)
        accepted = await checked(request.accept)
        await until(lambda: accepted.closed, "the peer to disconnect")
        with pytest.raises(PeerClosed):
            await accepted.recv()
        await checked(accepted.aclose)
    async with trio.open_nursery() as nursery:

        async def be_rejected() -> None:
            with pytest.raises(aiordma.Rejected):
                await aiordma.connect(*where)

        nursery.start_soon(be_rejected)
        await until(lambda: pending_requests(listener), "the request to arrive")
        await checked((await checked(lambda: anext(listener))).reject)
    for _ in range(2):
        await checked(listener.aclose)


@pytest.mark.parametrize("kind", [AsyncCmId, SyncCmId])
async def test_id_calls_are_checkpoints(
    address: DeviceAddress, kind: type[AsyncCmId] | type[SyncCmId]
) -> None:
    for _ in range(2):  # the second time all objects of the loop exist
        cm = await checked(kind.create)
        await checked(partial(cm.resolve_addr, parse_address(address.host, 1)))
        await checked(cm.resolve_route)
        await checked(partial(cm.reg_msgs, bytearray(10)))
        for _ in range(2):
            await checked(cm.aclose)
    await checked(lambda: aiordma.getaddrinfo(address.host, 1))


@pytest.mark.transport("IB")
async def test_datagram_calls_are_checkpoints(address: DeviceAddress) -> None:
    one = await checked(lambda: aiordma.open_datagram((address.host, 0)))
    other = await checked(lambda: aiordma.open_datagram((address.host, 0)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.serve)
        peer = await checked(lambda: one.resolve(*other.local_address))
        nursery.cancel_scope.cancel()
    for _ in range(2):
        await checked(lambda: one.send_to(peer, b"x"))
    ring = other._queue_pair.receive_ring
    await until(lambda: len(ring) == 2, "both datagrams to arrive")
    await checked(other.recv_from)
    await checked(lambda: anext(other))
    group = await checked(lambda: one.join("239.20.30.70"))
    for _ in range(2):
        await checked(group.leave)
    for endpoint in (one, other):
        for _ in range(2):
            await checked(endpoint.aclose)


async def test_device_watch_calls_are_checkpoints() -> None:
    watch = aiordma.watch_devices()
    await checked(watch.__aenter__)
    await checked(lambda: watch.__aexit__(None, None, None))


async def test_calls_that_poll_are_checkpoints(address: DeviceAddress) -> None:
    """Polling finds a message without an iteration of the loop, but not in a cancelled scope."""
    polling = aiordma.ConnectionOptions(busy_poll=0.05)
    async with connected(address, polling, polling) as pair:
        far = await pair.server.allocate(8, SHARED)
        for _ in range(10):
            await pair.client.send(b"x")
            with trio.CancelScope() as scope:
                scope.cancel()
                await pair.server.recv()
            assert scope.cancelled_caught
            assert await checked(pair.server.recv) == b"x"
            await checked(lambda: pair.client.write(b"y", far.remote))


# --- calls that never wait ---


async def test_a_deadline_ends_calls_that_never_wait(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        with trio.move_on_after(0.5) as scope:  # time is the subject
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo, pair.server)
                while True:
                    await pair.client.send(b"x")
                    await pair.client.recv()
        assert scope.cancelled_caught


# --- level cancellation ---


async def test_calls_in_a_cancelled_scope_do_nothing(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        region = await pair.client.allocate(8, SHARED)
        far = await pair.server.allocate(8, SHARED)
        for start in (
            lambda: pair.client.send(b"never"),
            lambda: pair.client.send(region),
            lambda: pair.client.write(b"never", far.remote),
            lambda: pair.client.read(far.remote, region),
            lambda: pair.client.allocate(8, SHARED),
            lambda: aiordma.connect(*pair.listener.local_address),
        ):
            with trio.CancelScope() as scope:
                scope.cancel()
                await start()
            assert scope.cancelled_caught
        assert pair.client.stats.messages_sent == 0
        assert bytes(memoryview(far)) == bytes(8)


async def test_aclose_in_a_cancelled_scope_aborts(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        with trio.CancelScope() as scope:
            scope.cancel()
            await pair.client.aclose()
        assert scope.cancelled_caught
        assert pair.client._endpoint.released
        with pytest.raises(PeerClosed):
            await pair.server.recv()


async def test_a_deadline_around_a_block_aborts_its_connection(address: DeviceAddress) -> None:
    connections: list[Connection] = []

    async def connect_with_deadline(scope: trio.CancelScope) -> None:
        async with aiordma.connect(*listener.local_address) as connection:
            connections.append(connection)
            scope.deadline = trio.current_time() + 0.1  # time is the subject
            await connection.recv()  # the peer sends nothing

    async with serving(address) as listener:
        with pytest.raises(trio.TooSlowError), trio.fail_after(TIME_LIMIT) as scope:
            await connect_with_deadline(scope)
        assert [connection._endpoint.released for connection in connections] == [True]


# --- nurseries and exception groups ---


async def test_a_nursery_that_fails_aborts_its_connections(address: DeviceAddress) -> None:
    connections: list[Connection] = []

    async def connect_and_receive(where: tuple[str, int]) -> None:
        async with aiordma.connect(*where) as connection:
            connections.append(connection)
            await connection.recv()

    async def connect_and_fail(where: tuple[str, int]) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(connect_and_receive, where)
            await until(lambda: len(connections) == 3, "three tasks to connect")
            raise ValueError("one of many")

    async with serving(address) as listener:
        with pytest.raises(ExceptionGroup) as group:
            await connect_and_fail(listener.local_address)
        assert [str(error) for error in group.value.exceptions] == ["one of many"]
        assert all(connection._endpoint.released for connection in connections)


async def test_serve_ends_with_a_plain_error(address: DeviceAddress) -> None:
    """It raises no exception group, although it runs its handlers in a nursery."""
    async with aiordma.listen(address.host, 0) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(listener.get_request)
        await wait_all_tasks_blocked()
        with pytest.raises(aiordma.BusyError):
            await listener.serve(echo)
        nursery.cancel_scope.cancel()


# --- after the end ---


@asynccontextmanager
async def used_connection(address: DeviceAddress) -> AsyncIterator[Pair]:
    async with connected(address) as pair:
        await pair.client.send(b"x")
        await pair.server.recv()
        yield pair


async def test_no_system_task_outlives_its_connection(address: DeviceAddress) -> None:
    assert system_tasks() == set()
    for end in (Connection.aclose, Connection.abort):
        async with used_connection(address) as pair:
            assert system_tasks()
            closing = end(pair.client)
            if closing is not None:
                await closing
        await until(lambda: not system_tasks(), "the system tasks to end")
    with trio.CancelScope() as scope:
        async with used_connection(address) as pair:
            scope.deadline = trio.current_time() + 0.1
            await pair.server.recv()  # the peer sends nothing more
    assert scope.cancelled_caught
    await until(lambda: not system_tasks(), "the system tasks to end")


async def test_keyboard_interrupt_does_not_disturb_a_connection(address: DeviceAddress) -> None:
    """The exception is raised in user code, between awaits. System tasks of aiordma go on."""

    async def send_and_receive(pair: Pair) -> None:
        for number in range(1000):
            await pair.client.send(b"%d" % number)
            assert await pair.server.recv() == b"%d" % number
            if number == 20:
                signal.raise_signal(signal.SIGINT)

    async with connected(address) as pair:
        with pytest.raises(KeyboardInterrupt):
            await send_and_receive(pair)
        await pair.client.send(b"goes on")
        assert await pair.server.recv() == b"goes on"
