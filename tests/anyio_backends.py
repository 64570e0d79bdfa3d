"""Helpers for tests of aiordma.anyio: run a test on every anyio backend, connect two streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import anyio
import sniffio
import uvloop
from helpers import DEFAULT, TIME_LIMIT, pending_requests

import aiordma
import aiordma.anyio
from aiordma import ConnectionOptions
from aiordma.anyio import MessageListener, MessageStream, RdmaAttribute
from aiordma.rdmacm import DeviceAddress

uvloop.new_event_loop().close()  # libuv opens a pipe for its first loop, and never closes it


class Backend(NamedTuple):
    """The arguments of anyio.run(), and the package of the loop that then runs."""

    library: str
    options: dict[str, Any]
    package: str

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run `main()` on this backend, and check that it is this one. The limit is TIME_LIMIT."""

        async def checked() -> None:
            assert sniffio.current_async_library() == self.library
            if self.library == "asyncio":
                assert type(asyncio.get_running_loop()).__module__.partition(".")[0] == self.package
            with anyio.fail_after(TIME_LIMIT):
                await main()

        anyio.run(checked, backend=self.library, backend_options=self.options)


BACKENDS = {
    "asyncio": Backend("asyncio", {}, "asyncio"),
    "uvloop": Backend("asyncio", {"use_uvloop": True}, "uvloop"),
    "trio": Backend("trio", {}, "trio"),
}


def on_every_backend(function: Callable[..., Coroutine[object, None, None]]) -> Callable[..., None]:
    """Make a test of an `async def` that runs on backends that selection.py chooses.

    It can have the argument `backend`, the name of the backend.
    """
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
    return test


class Ends(NamedTuple):
    """Two connected streams, and the listener that accepted the second."""

    near: MessageStream
    far: MessageStream
    listener: MessageListener


def address_of(listener: MessageListener) -> tuple[str, int]:
    """Return host and port of a listener."""
    return listener.extra(RdmaAttribute.local_address)


@contextlib.asynccontextmanager
async def connected(
    address: DeviceAddress,
    client: ConnectionOptions = DEFAULT,
    server: ConnectionOptions = DEFAULT,
) -> AsyncIterator[Ends]:
    """Connect two streams on one device. After the block, abort those that are still open."""
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
    call: Callable[..., Coroutine[object, None, object]], *arguments: object
) -> AsyncIterator[None]:
    """Run a call in a task during the block. Cancel the task at the block's end."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, *arguments)
        yield
        tasks.cancel_scope.cancel()


async def settle() -> None:
    """Wait until all other tasks are blocked."""
    await anyio.wait_all_tasks_blocked()


def unread(stream: MessageStream) -> int:
    """Return the number of messages that a stream has received and that were not read."""
    return stream.extra(RdmaAttribute.connection).stats.messages_unread


def pending(listener: MessageListener) -> int:
    """Return the number of requests that have arrived at a listener and that no task has taken."""
    core = listener._listener
    assert isinstance(core, aiordma.Listener)
    return pending_requests(core)


class Caught:
    """A collector: it runs calls in tasks and stores the exceptions that they raise."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self.errors: list[Exception] = []

    def start(self, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run a call in a task of the group."""
        self._tasks.start_soon(self._run, call, *arguments)

    async def _run(self, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        try:
            await call(*arguments)
        except Exception as error:
            self.errors.append(error)

    @property
    def types(self) -> list[type[Exception]]:
        """The types of the stored exceptions."""
        return [type(error) for error in self.errors]
