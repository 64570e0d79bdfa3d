"""aiordma.anyio listeners on a real device, on every loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest
from anyio.abc import AsyncResource, Listener, SocketAttribute, TaskGroup
from anyio_pairs import address_of, pending, running, settle
from helpers import unconfirmed_peer
from loops import until

import aiordma.anyio
from aiordma import ConnectError
from aiordma.anyio import RdmaConnection, RdmaListener
from aiordma.rdmacm import DeviceAddress


async def echo(stream: RdmaConnection) -> None:
    async for message in stream:
        await stream.send(message)


async def check_echo(where: tuple[str, int]) -> None:
    """Connect to a listener, and check that a message is echoed."""
    async with aiordma.anyio.connect(*where) as stream:
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"


@contextlib.asynccontextmanager
async def serving(
    address: DeviceAddress, handler: Callable[[RdmaConnection], Awaitable[object]]
) -> AsyncIterator[RdmaListener]:
    async with aiordma.anyio.listen(address.host, 0) as listener, running(listener.serve, handler):
        yield listener


Handler = Callable[[RdmaConnection], Awaitable[object]]
Serve = Callable[[RdmaListener, Handler, TaskGroup], Coroutine[object, None, None]]


async def serve_in_own_group(listener: RdmaListener, handler: Handler, _: TaskGroup) -> None:
    await listener.serve(handler)


async def serve_in_given_group(listener: RdmaListener, handler: Handler, tasks: TaskGroup) -> None:
    await listener.serve(handler, tasks)


in_either_task_group = pytest.mark.parametrize(
    "serve",
    [
        pytest.param(serve_in_own_group, id="its_own"),
        pytest.param(serve_in_given_group, id="given"),
    ],
)


@in_either_task_group
async def test_serve_handles_peers_at_the_same_time(address: DeviceAddress, serve: Serve) -> None:
    """The stream is closed when its handler returns."""
    all_connected = anyio.Event()
    served: list[RdmaConnection] = []

    async def handler(stream: RdmaConnection) -> None:
        assert await stream.receive() == b"hello"
        served.append(stream)
        if len(served) == 3:
            all_connected.set()
        await all_connected.wait()
        await stream.send(b"together")

    async def peer() -> None:
        async with aiordma.anyio.connect(*address_of(listener)) as stream:
            await stream.send(b"hello")
            assert await stream.receive() == b"together"
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()

    listening = aiordma.anyio.listen(address.host, 0)
    async with listening as listener, anyio.create_task_group() as serving:
        serving.start_soon(serve, listener, handler, serving)
        async with anyio.create_task_group() as peers:
            for _ in range(3):
                peers.start_soon(peer)
        serving.cancel_scope.cancel()
    for stream in served:
        with pytest.raises(anyio.ClosedResourceError):
            await stream.receive()


async def test_a_handler_can_close_its_stream(address: DeviceAddress) -> None:
    async def handler(stream: RdmaConnection) -> None:
        await stream.send(b"bye")
        await stream.aclose()

    async with serving(address, handler) as listener:
        for _ in range(2):
            async with aiordma.anyio.connect(*address_of(listener)) as stream:
                assert [message async for message in stream] == [b"bye"]


@in_either_task_group
async def test_an_exception_in_a_handler_ends_the_task_group(
    address: DeviceAddress, serve: Serve
) -> None:
    """As with all anyio listeners. The streams are closed, the listener stays open."""

    async def handler(stream: RdmaConnection) -> None:
        if await stream.receive() == b"fail":
            raise ZeroDivisionError
        await anyio.sleep_forever()

    peers: list[RdmaConnection] = []
    async with aiordma.anyio.listen(address.host, 0) as listener:

        async def fail() -> None:
            async with anyio.create_task_group() as serving:
                serving.start_soon(serve, listener, handler, serving)
                for message in (b"wait", b"fail"):
                    peers.append(await aiordma.anyio.connect(*address_of(listener)))
                    await peers[-1].send(message)
                await anyio.sleep_forever()

        with pytest.raises(ExceptionGroup) as caught:
            await fail()
        assert caught.group_contains(ZeroDivisionError)
        for stream in peers:
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            await stream.aclose()
        async with running(listener.serve, echo):
            await check_echo(address_of(listener))


Connect = Callable[[], Awaitable[AsyncResource]]


async def outcome(listener: Listener[Any], tasks: TaskGroup | None, connect: Connect) -> list[str]:
    """Close a listener that serves a peer. Return what happens to the handler and to serve()."""
    seen: list[str] = []

    async def handler(stream: AsyncResource) -> None:
        try:
            async with stream:
                seen.append("handling")
                await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            seen.append("cancelled")
            raise

    async def serve() -> None:
        try:
            await listener.serve(handler, tasks)
        except BaseException as error:
            seen.append(repr(_types(error)))

    async with anyio.create_task_group() as serving:
        serving.start_soon(serve)
        async with await connect():
            await until(lambda: seen == ["handling"], "the handler to begin")
            await listener.aclose()
            await until(lambda: len(seen) > 1, "the handler to end")
            await settle()
    return list(seen)


def _types(error: BaseException) -> object:
    """Return the type of an exception; for an exception group, a list of those in it."""
    if isinstance(error, BaseExceptionGroup):
        return [_types(one) for one in error.exceptions]
    return type(error)


@pytest.mark.real("compares with TCP sockets")
@pytest.mark.parametrize("given", [False, True])
async def test_closing_a_listener_ends_serve_as_with_sockets(
    address: DeviceAddress, given: bool
) -> None:
    (socket,) = (await anyio.create_tcp_listener(local_host="127.0.0.1")).listeners
    port = socket.extra(SocketAttribute.local_port)
    rdma = await aiordma.anyio.listen(address.host, 0)
    outcomes = []
    both: list[tuple[Listener[Any], Connect]] = [
        (socket, lambda: anyio.connect_tcp("127.0.0.1", port)),
        (rdma, lambda: aiordma.anyio.connect(*address_of(rdma))),
    ]
    for listener, connect in both:
        async with anyio.create_task_group() as tasks:
            outcomes.append(await outcome(listener, tasks if given else None, connect))
            tasks.cancel_scope.cancel()
    assert outcomes[0] == outcomes[1]
    assert "ClosedResourceError" in " ".join(outcomes[1])
    assert ("cancelled" in outcomes[1]) is not given


async def test_cancelling_serve_leaves_the_listener_open(address: DeviceAddress) -> None:
    ended: list[str] = []

    async def handler(stream: RdmaConnection) -> None:
        try:
            await echo(stream)
        finally:
            ended.append("handler")

    async with aiordma.anyio.listen(address.host, 0) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, handler)
            async with aiordma.anyio.connect(*address_of(listener)) as stream:
                await stream.send(b"hello")
                assert await stream.receive() == b"hello"
                tasks.cancel_scope.cancel()
        assert ended == ["handler"]
        async with running(listener.serve, echo):
            await check_echo(address_of(listener))


@pytest.mark.transport("IB")
async def test_a_slow_peer_does_not_delay_others(address: DeviceAddress) -> None:
    async with serving(address, echo) as listener, await unconfirmed_peer(*address_of(listener)):
        for _ in range(3):
            await check_echo(address_of(listener))


@pytest.mark.transport("IB")
async def test_a_peer_that_gives_up_is_logged_and_skipped(
    address: DeviceAddress, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma")
    async with serving(address, echo) as listener:
        await (await unconfirmed_peer(*address_of(listener))).aclose()
        await until(lambda: "the handshake with" in caplog.text, "a line of the log")
        assert {record.levelname for record in caplog.records} == {"INFO"}
        await check_echo(address_of(listener))


@pytest.mark.transport("IB")
async def test_accept_skips_a_peer_that_gives_up(address: DeviceAddress) -> None:
    async def give_up_and_try_again() -> None:
        await (await unconfirmed_peer(*address_of(listener))).aclose()
        await check_echo(address_of(listener))

    listening = aiordma.anyio.listen(address.host, 0)
    async with listening as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(give_up_and_try_again)
        async with await listener.accept() as stream:
            await echo(stream)


async def test_closing_a_listener_rejects_pending_requests(address: DeviceAddress) -> None:
    errors: list[ConnectError] = []

    async def peer() -> None:
        try:
            await aiordma.anyio.connect(*address_of(listener))
        except ConnectError as error:
            errors.append(error)

    listener = await aiordma.anyio.listen(address.host, 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer)
        await until(lambda: pending(listener) == 1, "the request to arrive")
        await listener.aclose()
    assert [type(error) for error in errors] == [aiordma.Rejected]


async def test_listen_without_a_host_listens_on_all_addresses(address: DeviceAddress) -> None:
    async with aiordma.anyio.listen(None, 0) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, echo)
        await check_echo((address.host, listener.extra(SocketAttribute.local_port)))
        tasks.cancel_scope.cancel()
