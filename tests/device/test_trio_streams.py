"""aiordma.trio: the stream checks of trio.testing, and servers of trio."""

from __future__ import annotations

import threading
from functools import partial

import loops
import pytest
import trio
import trio.testing
from helpers import TIME_LIMIT
from loops import block_until, until
from streaming import is_full, pattern

import aiordma
import aiordma.trio
from aiordma import StreamOptions
from aiordma.cm import AsyncCmId
from aiordma.rdmacm import DeviceAddress
from aiordma.trio import RdmaStream

# Other tests cover the differences between devices. One device is enough here.
pytestmark = [pytest.mark.loops("trio"), pytest.mark.transport("IWARP")]

SMALL = StreamOptions(send_buffer=1 << 16, recv_buffer=1 << 16)


async def stream_pair(address: DeviceAddress) -> tuple[RdmaStream, RdmaStream]:
    listener = await aiordma.trio.listen_stream(address.host, 0, options=SMALL)
    accepting = loops.create_task(listener.accept())
    near = await aiordma.trio.connect_stream(*listener.local_address, options=SMALL)
    far = await accepting
    await listener.aclose()
    return near, far


async def full_stream_pair(address: DeviceAddress) -> tuple[RdmaStream, RdmaStream]:
    """Return streams on which nothing more can be sent: neither end receives."""
    one, other = await stream_pair(address)
    for sender, receiver in ((one, other), (other, one)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send_all, bytes(1 << 20))
            await until(partial(is_full, receiver.stream), "the receive buffer to be full")
            nursery.cancel_scope.cancel()
    return one, other


async def test_streams_pass_the_checks_of_trio(address: DeviceAddress) -> None:
    await trio.testing.check_half_closeable_stream(
        lambda: stream_pair(address), lambda: full_stream_pair(address)
    )


async def test_serve_listeners_of_trio_serves_streams(address: DeviceAddress) -> None:
    async def echo(stream: RdmaStream) -> None:
        async for data in stream:
            await stream.send_all(data)

    listener = await aiordma.trio.listen_stream(address.host, 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, echo, [listener])
        async with await aiordma.trio.connect_stream(*listener.local_address) as stream:
            await stream.send_all(pattern(200_000))
            received = b""
            while len(received) < 200_000:  # trio aborts the stream when the handler ends
                received += await stream.receive_some()
            assert received == pattern(200_000)
            assert stream.stream.peer_address == listener.local_address
        nursery.cancel_scope.cancel()


async def test_abort_by_the_peer_raises_broken_resource_error(address: DeviceAddress) -> None:
    near, far = await stream_pair(address)
    near.stream.abort()
    with pytest.raises(trio.BrokenResourceError):
        await far.receive_some()
    with pytest.raises(trio.ClosedResourceError):
        await near.receive_some()
    await near.aclose()
    await far.aclose()


async def test_accept_of_a_closed_listener_raises_closed_resource_error(
    address: DeviceAddress,
) -> None:
    listener = await aiordma.trio.listen_stream(address.host, 0)
    await listener.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()
    with pytest.raises(aiordma.Rejected):
        await aiordma.trio.connect_stream(*listener.local_address)


class DestructionAtTheEnd(trio.abc.Instrument):
    """Has a stream destroyed when its run takes no more calls, and is not reported as over yet."""

    def __init__(self) -> None:
        self._may_destroy = threading.Event()
        self._cm: AsyncCmId

    def hold(self, stream: RdmaStream) -> None:
        """Hold the destruction of `stream`."""
        self._cm = stream.stream._endpoint.cm
        self._cm.handle.add_pre_destroy_hook("test", self._wait)

    def _wait(self) -> None:
        assert self._may_destroy.wait(TIME_LIMIT)

    def after_run(self) -> None:
        self._may_destroy.set()
        block_until(lambda: self._cm.handle._is_destroyed, "the stream to be destroyed")


@pytest.mark.real("the end of a run and a worker thread meet, which simulated threads cannot")
def test_a_stream_destroyed_while_the_run_ends_leaks_nothing(address: DeviceAddress) -> None:
    at_the_end = DestructionAtTheEnd()

    async def main() -> None:
        near, far = await stream_pair(address)
        at_the_end.hold(near)
        await trio.aclose_forcefully(near)
        await trio.aclose_forcefully(far)

    trio.run(partial(loops.in_nursery, main), instruments=[at_the_end])
