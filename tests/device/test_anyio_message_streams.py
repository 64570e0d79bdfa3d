"""aiordma.anyio object streams of messages of any size: on a real device, on every loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import anyio
import loops
import pytest
from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError, EndOfStream
from anyio.abc import Listener, ObjectStream, SocketAttribute
from anyio.streams.tls import TLSStream
from anyio_pairs import settle
from streaming import pattern, tls_contexts

import aiordma.anyio
from aiordma import MessageOptions, PeerClosed
from aiordma.anyio import RdmaAttribute, RdmaMessageListener, RdmaMessageStream
from aiordma.rdmacm import DeviceAddress

SMALL = MessageOptions(window=2, announcements=1)
LARGE = pattern(100_000)


class Pair(NamedTuple):
    near: RdmaMessageStream
    far: RdmaMessageStream
    listener: RdmaMessageListener


@contextlib.asynccontextmanager
async def connected(address: DeviceAddress) -> AsyncIterator[Pair]:
    async with aiordma.anyio.listen_messages(address.host, 0, options=SMALL) as listener:
        accepting = loops.create_task(listener.accept())
        where = listener.extra(RdmaAttribute.local_address)
        near = await aiordma.anyio.connect_messages(*where, options=SMALL)
        far = await accepting
        try:
            yield Pair(near, far, listener)
        finally:
            for stream in (near, far):
                stream.abort()
                await stream.aclose()


async def test_streams_carry_objects_of_any_size(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, listener), anyio.create_task_group() as tasks:
        assert isinstance(near, ObjectStream)
        assert isinstance(listener, Listener)
        for data in (b"", b"small", LARGE):
            tasks.start_soon(near.send, data)
            assert await far.receive() == data
            tasks.start_soon(far.send, [data, b"+"])
            assert await near.receive() == data + b"+"
        assert near.extra(SocketAttribute.remote_address) == far.extra(RdmaAttribute.local_address)
        assert near.extra(RdmaAttribute.device_name) == address.device
        assert near.extra(RdmaAttribute.private_data).strip(b"\0") == b""
        assert near.extra(RdmaAttribute.message_stream).stats.messages_received == 3


async def test_half_close_and_flow_control(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, _), anyio.create_task_group() as tasks:
        sent: list[int] = []

        async def send() -> None:
            for number in range(10):
                await near.send(b"%d" % number)
                sent.append(number)
            await near.send_eof()

        tasks.start_soon(send)
        await loops.until(lambda: len(sent) == SMALL.window, "the window to be used")
        await settle()
        assert len(sent) == SMALL.window
        assert [message async for message in far] == [b"%d" % number for number in range(10)]
        with pytest.raises(EndOfStream):
            await far.receive()
        await far.send(b"the other direction")
        assert await near.receive() == b"the other direction"
        with pytest.raises(ClosedResourceError):
            await near.send(b"more")


async def test_the_exceptions_are_those_of_anyio(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(near.receive)
            await settle()
            with pytest.raises(BusyResourceError):
                await near.receive()
            await far.send(b"ends the task")
        await near.aclose()
        with pytest.raises(ClosedResourceError):
            await near.send(b"x")
        with pytest.raises(ClosedResourceError):
            await near.receive()
        with pytest.raises(EndOfStream) as end:
            await far.receive()
        assert isinstance(end.value.__cause__, PeerClosed)
        with pytest.raises(BrokenResourceError):
            await far.send(b"x")


async def test_serve_and_cancelling(address: DeviceAddress) -> None:
    async def echo(stream: RdmaMessageStream) -> None:
        async for message in stream:
            await stream.send(message)

    async with (
        aiordma.anyio.listen_messages(address.host, 0) as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, echo)
        where = listener.extra(RdmaAttribute.local_address)
        async with aiordma.anyio.connect_messages(*where) as stream:
            with anyio.move_on_after(0.01) as scope:
                await stream.receive()
            assert scope.cancelled_caught
            async with anyio.create_task_group() as sending:
                sending.start_soon(stream.send, LARGE)
                assert await stream.receive() == LARGE
        tasks.cancel_scope.cancel()


async def test_tls_needs_no_limit_of_its_messages(address: DeviceAddress) -> None:
    server, client = tls_contexts()
    async with connected(address) as (near, far, _), anyio.create_task_group() as tasks:

        async def echo() -> None:
            async with await TLSStream.wrap(far, server_side=True, ssl_context=server) as stream:
                await stream.send(await stream.receive(len(LARGE)))

        tasks.start_soon(echo)
        async with await TLSStream.wrap(
            near, hostname="rdma.example", ssl_context=client
        ) as stream:
            await stream.send(LARGE[:10_000])
            assert await stream.receive(len(LARGE)) == LARGE[:10_000]
