"""Tests of aiordma.anyio: each runs on every back end of anyio's, and has two streams to use."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import anyio
import pytest
import sniffio
import uvloop
from helpers import DEFAULT, PATIENCE

import aiordma.anyio
from aiordma import ConnectionOptions
from aiordma.anyio import MessageListener, MessageStream, RdmaAttribute
from aiordma.rdmacm import DeviceAddress

uvloop.new_event_loop().close()  # libuv keeps a pipe of its own from its first loop on


class Backend(NamedTuple):
    """What anyio.run() is told, and which package's loop then runs."""

    library: str
    options: dict[str, Any]
    package: str

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run `main()` there, and nowhere else; not longer than a test may take."""

        async def checked() -> None:
            assert sniffio.current_async_library() == self.library
            if self.library == "asyncio":
                assert type(asyncio.get_running_loop()).__module__.partition(".")[0] == self.package
            with anyio.fail_after(PATIENCE):
                await main()

        anyio.run(checked, backend=self.library, backend_options=self.options)


BACKENDS = {
    "asyncio": Backend("asyncio", {}, "asyncio"),
    "uvloop": Backend("asyncio", {"use_uvloop": True}, "uvloop"),
    "trio": Backend("trio", {}, "trio"),
}


def on_every_backend(function: Callable[..., Coroutine[object, None, None]]) -> Callable[..., None]:
    """Make a test of an `async def` that runs once on each back end; it may ask for `backend`."""
    signature = inspect.signature(function)
    names = list(signature.parameters)

    def test(backend: str, **arguments: object) -> None:
        if "backend" in names:
            arguments["backend"] = backend
        BACKENDS[backend].run(functools.partial(function, **arguments))

    parameters = list(signature.parameters.values())
    if "backend" not in names:
        parameters.append(inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY))
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.__name__, test.__doc__ = function.__name__, function.__doc__
    test.__module__ = function.__module__
    return pytest.mark.parametrize("backend", BACKENDS)(test)


class Ends(NamedTuple):
    """Two streams that are connected, and what accepted the second."""

    near: MessageStream
    far: MessageStream
    listener: MessageListener


def address_of(listener: MessageListener) -> tuple[str, int]:
    return listener.extra(RdmaAttribute.local_address)


@contextlib.asynccontextmanager
async def connected(
    address: DeviceAddress,
    client: ConnectionOptions = DEFAULT,
    server: ConnectionOptions = DEFAULT,
) -> AsyncIterator[Ends]:
    """Two ends on one device. Whatever the test left open is closed by force afterwards."""
    async with aiordma.anyio.listen(address.host, 0, options=server) as listener:
        accepted: list[MessageStream] = []

        async def accept() -> None:
            accepted.append(await listener.accept())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(accept)
            near = await aiordma.anyio.connect(*address_of(listener), options=client)
        try:
            yield Ends(near, accepted[0], listener)
        finally:
            with anyio.CancelScope(shield=True):
                for stream in (near, accepted[0]):
                    stream.abort()
                    await stream.aclose()


@contextlib.asynccontextmanager
async def running(
    call: Callable[..., Awaitable[object]], *arguments: object
) -> AsyncIterator[None]:
    """Have a task run beside the block, which is cancelled at its end."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, *arguments)
        yield
        tasks.cancel_scope.cancel()


async def settle() -> None:
    """Let whoever was started come to where it waits."""
    await anyio.wait_all_tasks_blocked()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the device does in its own time."""
    while not condition():
        await anyio.sleep(0.01)


def unread(stream: MessageStream) -> int:
    """Messages that have arrived at a stream and are not taken."""
    return stream.extra(RdmaAttribute.connection).stats.messages_unread


class Caught:
    """Runs calls in tasks, and keeps the exceptions that they end with."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self.errors: list[Exception] = []

    def start(self, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        self._tasks.start_soon(self._run, call, *arguments)

    async def _run(self, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        try:
            await call(*arguments)
        except Exception as error:
            self.errors.append(error)

    @property
    def types(self) -> list[type[Exception]]:
        return [type(error) for error in self.errors]
