"""The state after a cancelled await: messages of any size."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import loops
import pytest
from cancelling import cancel, cancelled
from helpers import can_be_resized
from streaming import message_streams, pattern

from aiordma import Connection, LocalClosed, MessageOptions, MessageStream, PeerClosed
from aiordma.rdmacm import DeviceAddress

OPTIONS = MessageOptions(window=2, announcements=1)
LARGE = pattern(3 << 20)


async def receive_message(stream: MessageStream) -> bytes:
    with await stream.recv_message() as message:
        return b"".join(message.frames)


async def receive_into(stream: MessageStream) -> bytes:
    buffer = bytearray(len(LARGE))
    return bytes(buffer[: await stream.recv_into(buffer)])


async def receive_frames(stream: MessageStream) -> bytes:
    def allocate(sizes: Sequence[int]) -> list[bytearray]:
        return [bytearray(size) for size in sizes]

    buffers = await stream.recv_frames(allocate)
    assert all(isinstance(buffer, bytearray) for buffer in buffers)
    return b"".join(bytes(memoryview(buffer)) for buffer in buffers)  # type: ignore[arg-type]


@pytest.mark.awaits("MessageStream.recv", "MessageStream.recv_message")
@pytest.mark.awaits("MessageStream.recv_into", "MessageStream.recv_frames")
@pytest.mark.awaits("MessageStream.__anext__")
@pytest.mark.parametrize(
    "receive", [MessageStream.recv, receive_message, receive_into, receive_frames, anext]
)
async def test_cancelled_receive_loses_no_message(
    address: DeviceAddress,
    receive: Callable[[MessageStream], Awaitable[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled before the message comes, before it begins, and while the device reads."""
    read, begun, may_end = Connection.read, list[bool](), list[bool]()

    async def read_slowly(*arguments: Any) -> None:
        begun.append(True)
        await read(*arguments)
        await loops.until(lambda: may_end, "the test to go on")

    async with message_streams(address, OPTIONS) as (near, far):
        await cancel(lambda: receive(far))
        await near.send(b"kept")
        assert await cancelled(lambda: receive(far), begun=False)
        assert await receive(far) == b"kept"
        sending = loops.create_task(near.send(LARGE))
        await loops.until(lambda: far._connection.stats.messages_unread, "the announcement")
        monkeypatch.setattr(Connection, "read", read_slowly)
        receiving = loops.create_task(receive(far))
        await loops.until(lambda: begun, "the read to be posted")
        await loops.cancel(receiving)
        assert not sending.done()
        may_end.append(True)
        assert await receive(far) == LARGE
        await sending


@pytest.mark.awaits("MessageStream.send")
async def test_cancelled_send_of_which_nothing_is_posted_sends_nothing(
    address: DeviceAddress,
) -> None:
    async with message_streams(address, OPTIONS) as (near, far):
        for _ in range(OPTIONS.window):
            await near.send(b"fills the window")
        await cancel(lambda: near.send(b"never"))
        assert await cancelled(lambda: near.send(b"never"), begun=False)
        for _ in range(OPTIONS.window):
            assert await far.recv() == b"fills the window"
        await near.send(b"next")
        assert await far.recv() == b"next"


@pytest.mark.awaits("MessageStream.send", "MessageStream.drain")
async def test_a_cancelled_send_that_was_announced_is_received_all_the_same(
    address: DeviceAddress,
) -> None:
    buffer = bytearray(LARGE)
    async with message_streams(address, OPTIONS) as (near, far):
        sending = loops.create_task(near.send(buffer))
        await loops.until(lambda: near.stats.messages_announced, "the announcement")
        await loops.cancel(sending)
        near.send_soon(b"next")
        await cancel(near.drain)
        assert not can_be_resized(buffer)
        assert await far.recv() == LARGE
        assert await far.recv() == b"next"
        await near.drain()
        await loops.until(lambda: can_be_resized(buffer), "the memory to be deregistered")


@pytest.mark.awaits("MessageStream.send_eof")
async def test_cancelled_send_eof_can_be_repeated(address: DeviceAddress) -> None:
    async with message_streams(address) as (near, far):
        assert await cancelled(near.send_eof, begun=False)
        await near.send(b"goes on")
        assert await far.recv() == b"goes on"
        await cancelled(near.send_eof)
        await near.send_eof()
        assert [message async for message in far] == []


@pytest.mark.awaits("MessageStream.register", "MessageStream.register_dmabuf")
@pytest.mark.awaits("MessageStream.allocate")
async def test_cancelled_registration_leaves_nothing_registered(address: DeviceAddress) -> None:
    """Connections share the code. Their test, in test_cancel_data.py, has all three calls."""
    buffer = bytearray(1 << 20)
    async with message_streams(address) as (near, _):
        await cancel(lambda: near.register(buffer))
        await loops.until(lambda: can_be_resized(buffer), "a worker thread to deregister it")
        await cancel(lambda: near.allocate(4096))


@pytest.mark.awaits("MessageStream.aclose")
async def test_cancelled_aclose_aborts_the_stream(address: DeviceAddress) -> None:
    """It waits for the peer, which does not receive the message."""
    async with message_streams(address) as (near, far):
        near.send_soon(LARGE)
        await cancel(near.aclose)
        assert near._endpoint.released
        with pytest.raises(LocalClosed):
            await near.send(b"x")
        with pytest.raises(PeerClosed):
            await far.recv()
