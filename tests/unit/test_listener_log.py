"""The log of serve() and of servers about connections that peers end."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import loops
import pytest
import trustme
from simulator import Simulation

import aiordma
import aiordma.asyncio
from aiordma import ByteStream, Connection, PeerClosed, ProtocolError
from aiordma.cm.accepting import BaseListener

PORT = 7471
FAR = "10.0.0.2"


@asynccontextmanager
async def running(listener: BaseListener[Any, Any], serve: Awaitable[None]) -> AsyncIterator[None]:
    """Let a listener serve in the block."""
    task = loops.create_task(serve)
    try:
        yield
    finally:
        listener.abort()
        await task


GONE, BROKEN = PeerClosed("the peer is gone"), ProtocolError("a wrong message")


@pytest.mark.parametrize(
    "error",
    [
        GONE,
        ExceptionGroup("unhandled errors in a TaskGroup", [GONE]),
        ExceptionGroup("outer", [ExceptionGroup("inner", [GONE, BROKEN]), BROKEN]),
    ],
)
async def test_what_a_peer_causes_in_a_task_group_is_no_error_in_the_log(
    simulation: Simulation, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma.cm.accepting")
    await serve_failing(lambda _: error)
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert record.getMessage().endswith(" ended: the peer is gone")


async def test_a_group_with_an_error_of_the_handler_is_logged_with_its_traceback(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    await serve_failing(lambda _: ExceptionGroup("two", [GONE, ZeroDivisionError()]))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.exc_info is not None


async def test_connections_that_peers_end_are_logged_once_in_a_while(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aiordma.cm.accepting")
    await serve_failing(lambda number: PeerClosed(f"peer {number} is gone"), peers=5)
    levels = [one.levelname for one in caplog.records if one.getMessage().endswith(" is gone")]
    assert levels == ["INFO", *["DEBUG"] * 4]


async def serve_failing(error: Callable[[int], Exception], peers: int = 1) -> None:
    """Serve peers with a handler that raises `error(number)` for each."""
    served = iter(range(peers))

    async def fail(connection: Connection) -> None:
        raise error(next(served))

    async with (
        aiordma.listen(FAR, PORT) as listener,
        running(listener, listener.serve(fail)),
    ):
        for _ in range(peers):
            async with aiordma.connect(FAR, PORT) as client:
                async for _ in client:
                    pass


async def read_all(stream: ByteStream) -> None:
    while await stream.receive():
        pass


@pytest.mark.loops("asyncio")
async def test_peers_that_do_not_speak_tls_are_logged_once_in_a_while(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aiordma.asyncio.server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert(FAR).configure_cert(context)
    server = await aiordma.asyncio.create_server(asyncio.Protocol, FAR, PORT, ssl=context)
    for _ in range(3):
        async with aiordma.connect_stream(FAR, PORT) as stream:
            await stream.send(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises(PeerClosed):
                await read_all(stream)
    records = [one for one in caplog.records if "could not begin" in one.getMessage()]
    assert [one.levelname for one in records] == ["INFO", "DEBUG", "DEBUG"]
    server.close()
    await server.wait_closed()


async def test_a_handler_that_fails_leaves_no_reference_cycle(simulation: Simulation) -> None:
    errors = list[weakref.ref[PeerClosed]]()

    async def fail(connection: Connection) -> None:
        error = PeerClosed("gone")
        errors.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    gc.disable()
    try:
        async with aiordma.listen(FAR, PORT) as listener:
            task = loops.create_task(listener.serve(fail))
            async with aiordma.connect(FAR, PORT) as client:
                async for _ in client:
                    pass
            listener.abort()
            await task
            assert [error() for error in errors] == [None]
    finally:
        gc.enable()
