"""aiordma.anyio's listeners on a real device, on every back end of anyio's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest
from anyio.abc import Listener, ObjectStream, SocketAttribute, TaskGroup
from anyio_backends import address_of, on_every_backend, running, settle, until

import aiordma.anyio
from aiordma import AsyncCmId, ConnectError
from aiordma.anyio import MessageListener, MessageStream
from aiordma.cm import CmState
from aiordma.rdmacm import ConnectionParameters, DeviceAddress, parse_address


async def echo(stream: MessageStream) -> None:
    async for message in stream:
        await stream.send(message)


async def is_echoed(where: tuple[str, int]) -> None:
    async with aiordma.anyio.connect(*where) as stream:
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"


@contextlib.asynccontextmanager
async def serving(
    address: DeviceAddress, handler: Callable[[MessageStream], Awaitable[object]]
) -> AsyncIterator[MessageListener]:
    async with aiordma.anyio.listen(address.host, 0) as listener, running(listener.serve, handler):
        yield listener


Serve = Callable[[Listener, Callable[..., Awaitable[object]], TaskGroup], Awaitable[None]]


async def serve_in_its_own(
    listener: Listener, handler: Callable[..., Awaitable[object]], _: TaskGroup
) -> None:
    await listener.serve(handler)


async def serve_in_a_given_one(
    listener: Listener, handler: Callable[..., Awaitable[object]], tasks: TaskGroup
) -> None:
    await listener.serve(handler, tasks)


in_either_task_group = pytest.mark.parametrize(
    "serve",
    [
        pytest.param(serve_in_its_own, id="its_own"),
        pytest.param(serve_in_a_given_one, id="given"),
    ],
)


@in_either_task_group
@on_every_backend
async def test_every_peer_is_served(address: DeviceAddress, serve: Serve) -> None:
    """All at once; and the stream is closed when the handler returns."""
    together = anyio.Event()
    served: list[MessageStream] = []

    async def handler(stream: MessageStream) -> None:
        assert await stream.receive() == b"hello"
        served.append(stream)
        if len(served) == 3:
            together.set()
        await together.wait()
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


@on_every_backend
async def test_a_handler_may_close_its_stream(address: DeviceAddress) -> None:
    async def handler(stream: MessageStream) -> None:
        await stream.send(b"bye")
        await stream.aclose()

    async with serving(address, handler) as listener:
        for _ in range(2):
            async with aiordma.anyio.connect(*address_of(listener)) as stream:
                assert [message async for message in stream] == [b"bye"]


@in_either_task_group
@on_every_backend
async def test_what_a_handler_raises_ends_the_task_group(
    address: DeviceAddress, serve: Serve
) -> None:
    """As with every listener of anyio's. The streams are closed, the listener is not."""

    async def handler(stream: MessageStream) -> None:
        if await stream.receive() == b"fail":
            raise ZeroDivisionError
        await anyio.sleep_forever()

    peers: list[MessageStream] = []
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
            await is_echoed(address_of(listener))


Connect = Callable[[], Awaitable[ObjectStream[bytes]]]


async def outcome(listener: Listener, tasks: TaskGroup | None, connect: Connect) -> list[str]:
    """What happens when a listener is closed that serves a peer: to serve(), and to the handler."""
    seen: list[str] = []

    async def handler(stream: ObjectStream[bytes]) -> None:
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
            seen.append(repr(_bare(error)))

    async with anyio.create_task_group() as serving:
        serving.start_soon(serve)
        async with await connect():
            await until(lambda: seen == ["handling"])
            await listener.aclose()
            await until(lambda: len(seen) > 1)
            await settle()
    return list(seen)


def _bare(error: BaseException) -> object:
    """An exception as far as it is to be the same: a group's contents, and types."""
    if isinstance(error, BaseExceptionGroup):
        return [_bare(one) for one in error.exceptions]
    return type(error)


@pytest.mark.parametrize("given", [False, True])
@on_every_backend
async def test_closing_ends_serving_as_it_does_with_sockets(
    address: DeviceAddress, given: bool
) -> None:
    (socket,) = (await anyio.create_tcp_listener(local_host="127.0.0.1")).listeners
    port = socket.extra(SocketAttribute.local_port)
    rdma = await aiordma.anyio.listen(address.host, 0)
    outcomes = []
    for listener, connect in (
        (socket, lambda: anyio.connect_tcp("127.0.0.1", port)),
        (rdma, lambda: aiordma.anyio.connect(*address_of(rdma))),
    ):
        async with anyio.create_task_group() as tasks:
            outcomes.append(await outcome(listener, tasks if given else None, connect))
            tasks.cancel_scope.cancel()
    assert outcomes[0] == outcomes[1]
    assert "ClosedResourceError" in " ".join(outcomes[1])
    assert ("cancelled" in outcomes[1]) is not given


@on_every_backend
async def test_cancelling_ends_serving_but_not_the_listener(address: DeviceAddress) -> None:
    ended: list[str] = []

    async def handler(stream: MessageStream) -> None:
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
            await is_echoed(address_of(listener))


async def half_a_peer(listener: MessageListener) -> AsyncCmId:
    """Has asked to connect, and will never confirm what it is answered; not possible on iWARP."""
    where = parse_address(*address_of(listener))
    cm_id = await AsyncCmId.create()
    await cm_id.resolve_addr(where)
    await cm_id.resolve_route()
    await cm_id.connect(ConnectionParameters(qp_num=17))
    assert cm_id.state is CmState.RESPONDED
    return cm_id


@pytest.mark.transport("IB")
@on_every_backend
async def test_a_peer_that_takes_its_time_holds_nobody_up(address: DeviceAddress) -> None:
    async with serving(address, echo) as listener, await half_a_peer(listener):
        for _ in range(3):
            await is_echoed(address_of(listener))


@pytest.mark.transport("IB")
@on_every_backend
async def test_a_peer_that_gives_up_is_logged_and_passed_over(
    address: DeviceAddress, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma")
    async with serving(address, echo) as listener:
        await (await half_a_peer(listener)).aclose()
        await until(lambda: "could not be accepted" in caplog.text)
        assert {record.levelname for record in caplog.records} == {"INFO"}
        await is_echoed(address_of(listener))


@pytest.mark.transport("IB")
@on_every_backend
async def test_accept_passes_over_a_peer_that_gives_up(address: DeviceAddress) -> None:
    async def give_up_and_try_again() -> None:
        await (await half_a_peer(listener)).aclose()
        await is_echoed(address_of(listener))

    listening = aiordma.anyio.listen(address.host, 0)
    async with listening as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(give_up_and_try_again)
        async with await listener.accept() as stream:
            await echo(stream)


@on_every_backend
async def test_closing_rejects_who_was_not_taken(address: DeviceAddress) -> None:
    refused: list[ConnectError] = []

    async def peer() -> None:
        try:
            await aiordma.anyio.connect(*address_of(listener))
        except ConnectError as error:
            refused.append(error)

    listener = await aiordma.anyio.listen(address.host, 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer)
        await anyio.sleep(0.2)
        await listener.aclose()
    assert [type(error) for error in refused] == [aiordma.Rejected]


@on_every_backend
async def test_at_all_addresses(address: DeviceAddress) -> None:
    async with aiordma.anyio.listen(None, 0) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, echo)
        await is_echoed((address.host, listener.extra(SocketAttribute.local_port)))
        tasks.cancel_scope.cancel()
