"""aiordma.anyio streams on a real device, on every loop: behaviour and failures."""

from __future__ import annotations

import functools
from contextlib import AbstractAsyncContextManager
from socket import AddressFamily

import anyio
import pytest
from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError, EndOfStream
from anyio.abc import Listener, ObjectStream, SocketAttribute
from anyio_pairs import Caught, address_of, connected, settle, unread
from helpers import SHARED, TIME_LIMIT, send_one_at_a_time
from loops import until
from removing import SoftDevice

import aiordma.anyio
from aiordma import (
    BusyError,
    ConnectionOptions,
    DeviceRemoved,
    PeerClosed,
    ReceiveOverrun,
    Rejected,
    VerbsError,
    WorkRequestError,
)
from aiordma.anyio import RdmaAttribute, RdmaConnection
from aiordma.rdmacm import DeviceAddress

SMALL = ConnectionOptions(max_message_size=1024)
# A graceful close would exceed the time limit of a test. A close in time was a forced one.
NEVER_GRACEFUL = ConnectionOptions(max_message_size=1024, close_timeout=10 * TIME_LIMIT)


async def send_for_ever(stream: RdmaConnection, message: bytes) -> None:
    while True:
        await stream.send(message)


async def receive_for_ever(stream: RdmaConnection) -> None:
    while True:
        await stream.receive()


# --- messages ---


async def test_messages_are_echoed(any_address: DeviceAddress) -> None:
    async with connected(any_address) as (near, far, listener):
        assert isinstance(near, ObjectStream)
        assert isinstance(listener, Listener)
        largest = bytes(near.extra(RdmaAttribute.max_message_size))
        for message in (b"hello", b"", bytes(range(256)), bytearray(b"mutable"), largest):
            await near.send(message)
            await far.send(await far.receive())
            assert await near.receive() == message


async def test_iteration_ends_when_the_peer_closes_and_send_fails(address: DeviceAddress) -> None:
    sent = [b"%d" % number for number in range(10)]
    async with connected(address) as ends:
        for message in sent:
            await ends.near.send(message)
        await ends.near.aclose()
        assert [message async for message in ends.far] == sent
        for _ in range(2):
            with pytest.raises(EndOfStream, match="closed the connection") as caught:
                await ends.far.receive()
            assert type(caught.value.__cause__) is PeerClosed
        with pytest.raises(BrokenResourceError, match="closed the connection") as broken:
            await ends.far.send(b"x")
        assert type(broken.value.__cause__) is PeerClosed


async def test_connect_and_listen_can_be_awaited_or_entered(address: DeviceAddress) -> None:
    """Private data is sent in both cases."""
    listener = await aiordma.anyio.listen(address.host, 0, backlog=4, options=SMALL)

    async def serve_one() -> None:
        async with await listener.accept(b"welcome") as stream:
            assert stream.extra(RdmaAttribute.private_data).startswith(b"me again")
            async for message in stream:
                await stream.send(message)

    where = address_of(listener)
    connect = functools.partial(
        aiordma.anyio.connect,
        *where,
        local_address=(address.host, 0),
        private_data=b"me again",
        options=SMALL,
    )
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(serve_one)
        async with connect() as stream:
            assert stream.extra(RdmaAttribute.private_data).startswith(b"welcome")
            assert stream.extra(RdmaAttribute.max_message_size) == 1024
            await stream.send(b"entered")
            assert await stream.receive() == b"entered"
        tasks.start_soon(serve_one)
        stream = await connect()
        await stream.send(b"awaited")
        assert await stream.receive() == b"awaited"
        await stream.aclose()
    with pytest.raises(ClosedResourceError):
        await stream.receive()
    with pytest.raises(ClosedResourceError):
        await listener.accept()


# --- attributes ---


async def test_attributes_of_streams_and_listeners(any_address: DeviceAddress) -> None:
    family = AddressFamily.AF_INET6 if ":" in any_address.host else AddressFamily.AF_INET
    async with connected(any_address) as (near, far, listener):
        for one, other in ((near, far), (far, near)):
            connection = one.extra(RdmaAttribute.connection)
            for attributes in (RdmaAttribute, SocketAttribute):
                assert one.extra(attributes.local_address) == connection.local_address
            assert one.extra(RdmaAttribute.peer_address) == connection.peer_address
            assert one.extra(SocketAttribute.remote_address) == connection.peer_address
            assert one.extra(SocketAttribute.local_port) == connection.local_address[1]
            assert one.extra(SocketAttribute.remote_port) == other.extra(SocketAttribute.local_port)
            assert one.extra(SocketAttribute.family) is family
            assert one.extra(RdmaAttribute.device_name) == any_address.device
            with pytest.raises(anyio.TypedAttributeLookupError):
                one.extra(SocketAttribute.raw_socket)
        where = listener.extra(SocketAttribute.local_address)
        assert where == address_of(listener)
        assert where[0] == any_address.host
        assert listener.extra(SocketAttribute.local_port) == where[1]
        assert near.extra(SocketAttribute.remote_port) == where[1]
        assert listener.extra(SocketAttribute.family) is family
        assert listener.extra(SocketAttribute.remote_address, None) is None


async def test_the_connection_attribute_gives_one_sided_operations(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, _):
        exposed = await far.extra(RdmaAttribute.connection).register(
            bytearray(b"one-sided"), SHARED
        )
        await far.send(exposed.remote.pack())
        remote = aiordma.RemoteBuffer.unpack(await near.receive())
        connection = near.extra(RdmaAttribute.connection)
        into = await connection.allocate(remote.length, SHARED)
        await connection.read(remote, into)
        assert bytes(memoryview(into)) == b"one-sided"
        await near.send(into[4:])  # without a copy
        assert await far.receive() == b"sided"
        for memory in (exposed, into):
            memory.close()


# --- the end of a connection ---


async def test_use_after_close_raises_closed_resource_error(address: DeviceAddress) -> None:
    """The error is the same if messages are unread or the peer has closed as well."""
    async with connected(address) as (near, far, _):
        await far.send(b"never read")
        await until(lambda: unread(near) == 1, "a message to arrive")
        for _ in range(2):
            await near.aclose()
        await far.aclose()
        with pytest.raises(ClosedResourceError):
            await near.receive()
        with pytest.raises(ClosedResourceError):
            await near.send(b"x")


async def test_close_by_another_task_ends_every_wait(address: DeviceAddress) -> None:
    async with connected(address) as (near, _, listener), anyio.create_task_group() as tasks:
        caught = Caught(tasks)
        caught.start(near.receive)
        caught.start(listener.accept)
        await settle()
        assert caught.errors == []
        await near.aclose()
        await listener.aclose()
        await settle()
        assert caught.types == [ClosedResourceError] * 2


@pytest.mark.transport("IB")  # iWARP has no receiver-not-ready: its queue would not fill
async def test_abort_ends_a_send_on_a_full_queue(address: DeviceAddress) -> None:
    async with connected(address, SMALL, SMALL) as (near, _, _), anyio.create_task_group() as tasks:
        caught = Caught(tasks)
        caught.start(send_for_ever, near, b"x")
        sender = near.extra(RdmaAttribute.connection)
        await until(lambda: sender.stats.send_waits > 0, "the send queue to be full")
        near.abort()
        await until(lambda: caught.types == [ClosedResourceError], "the send to fail")


@pytest.mark.transport("IB")  # iWARP ends the connection without giving a reason
async def test_a_message_larger_than_the_peers_buffers_breaks_both_streams(
    address: DeviceAddress,
) -> None:
    async with connected(address, server=SMALL) as (near, far, _):
        await near.send(bytes(1025))
        with pytest.raises(BrokenResourceError, match="RECV failed") as caught:
            await far.receive()
        assert type(caught.value.__cause__) is WorkRequestError
        # The end of the connection can overtake the answer of the far device.
        with pytest.raises((BrokenResourceError, EndOfStream)) as ended:
            await near.receive()
        assert type(ended.value.__cause__) in (WorkRequestError, PeerClosed)
        with pytest.raises(BrokenResourceError) as caught:
            await near.send(b"x")
        assert type(caught.value.__cause__) in (WorkRequestError, PeerClosed)


async def test_a_receive_overrun_breaks_the_stream(address: DeviceAddress) -> None:
    shared = ConnectionOptions(shared_recv_depth=16, recv_backlog=20, max_message_size=1024)
    async with connected(address, SMALL, shared) as (near, far, _):
        with pytest.raises(BrokenResourceError):
            await send_one_at_a_time(near.send, far.extra(RdmaAttribute.connection))
        for _ in range(20):
            assert await far.receive() == b"too fast"
        with pytest.raises(BrokenResourceError, match="recv_backlog") as caught:
            await receive_for_ever(far)
        assert type(caught.value.__cause__) is ReceiveOverrun


async def test_device_removal_breaks_streams_and_listeners(
    address: DeviceAddress, device: SoftDevice
) -> None:
    """The kernel removes one end first. That can close the connection before it removes the other,
    which then raises EndOfStream.
    """
    async with connected(address) as ends, anyio.create_task_group() as tasks:
        streams, listening = Caught(tasks), Caught(tasks)
        streams.start(ends.near.receive)
        streams.start(ends.far.receive)
        listening.start(ends.listener.accept)
        await settle()
        assert not streams.errors + listening.errors
        device.start_removing()
        await until(lambda: len(streams.errors + listening.errors) == 3, "three calls to fail")
        causes = {type(error): type(error.__cause__) for error in streams.errors}
        assert causes[BrokenResourceError] is DeviceRemoved
        assert causes.get(EndOfStream, PeerClosed) is PeerClosed
        assert len(causes) <= 2
        assert listening.types == [BrokenResourceError]
        assert type(listening.errors[0].__cause__) is DeviceRemoved
        with pytest.raises(BrokenResourceError):
            await ends.near.send(b"x")


async def test_a_second_task_that_receives_or_accepts_raises_busy(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, listener), anyio.create_task_group() as tasks:
        tasks.start_soon(near.receive)
        tasks.start_soon(listener.accept)
        tasks.start_soon(far.extra(RdmaAttribute.connection).recv)
        await settle()
        with pytest.raises(BusyResourceError, match="receiving from"):
            await near.receive()
        with pytest.raises(BusyResourceError, match="accepting connections from"):
            await listener.accept()
        with pytest.raises(BusyResourceError, match="receiving from") as caught:
            await far.receive()
        assert type(caught.value.__cause__) is BusyError
        tasks.cancel_scope.cancel()


async def test_send_eof_is_not_supported(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, _):
        with pytest.raises(NotImplementedError, match="as the last one"):
            await near.send_eof()
        await near.send(b"still here")
        assert await far.receive() == b"still here"


async def test_failed_connect_and_listen_raise_aiordma_errors(address: DeviceAddress) -> None:
    async with aiordma.anyio.listen(address.host, 0) as listener:
        where = address_of(listener)
        with pytest.raises(VerbsError, match="port is in use"):
            await aiordma.anyio.listen(*where)
    with pytest.raises(Rejected) as caught:
        await aiordma.anyio.connect(*where)
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(OSError, match="rejected the connection"):
        async with aiordma.anyio.connect(*where):
            pytest.fail("connected without a listener")


# --- forced close ---


@pytest.mark.transport("IB")  # iWARP has no receiver-not-ready: its queue would not fill
async def test_aclose_forcefully_does_not_wait_for_the_peer(address: DeviceAddress) -> None:
    """Messages that the peer has no buffer for delay a graceful close, but not a forced one."""
    async with connected(address, NEVER_GRACEFUL, SMALL) as (near, far, _):
        for _ in range(60):
            await near.send(b"x")
        await until(lambda: unread(far), "a message to arrive")
        await anyio.aclose_forcefully(near)
        with pytest.raises(ClosedResourceError):
            await near.receive()
        assert {message async for message in far} == {b"x"}


@pytest.mark.transport("IB")
async def test_a_cancelled_block_aborts_the_stream(address: DeviceAddress) -> None:
    async with connected(address, NEVER_GRACEFUL, SMALL) as (near, far, _):
        await _cancel_inside(near, [far])
        assert {message async for message in far} == {b"x"}


@pytest.mark.transport("IB")
async def test_a_cancelled_block_of_connect_aborts_the_stream(address: DeviceAddress) -> None:
    received: set[bytes] = set()
    accepted: list[RdmaConnection] = []
    cancelled = anyio.Event()

    async def receive_all(stream: RdmaConnection) -> None:
        accepted.append(stream)
        await cancelled.wait()
        received.update([message async for message in stream])

    listening = aiordma.anyio.listen(address.host, 0, options=SMALL)
    async with listening as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, receive_all, tasks)
        connect = aiordma.anyio.connect(*address_of(listener), options=NEVER_GRACEFUL)
        await _cancel_inside(connect, accepted)
        cancelled.set()
        await until(lambda: received == {b"x"}, "the message to be received")
        tasks.cancel_scope.cancel()


async def _cancel_inside(
    block: AbstractAsyncContextManager[RdmaConnection], peers: list[RdmaConnection]
) -> None:
    """Cancel a block whose stream has more to send than its peer has buffers for."""
    with anyio.CancelScope() as scope:
        async with block as stream:
            for _ in range(60):
                await stream.send(b"x")
            await until(lambda: peers and unread(peers[0]), "a message to arrive")
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
