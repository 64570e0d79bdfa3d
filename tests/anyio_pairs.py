"""Helpers for tests of aiordma.anyio: two connected streams, tasks, counts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import NamedTuple

import anyio
import loops
from helpers import DEFAULT, pending_requests

import aiordma
import aiordma.anyio
from aiordma import ConnectionOptions
from aiordma.anyio import RdmaAttribute, RdmaConnection, RdmaListener
from aiordma.rdmacm import DeviceAddress


class Ends(NamedTuple):
    """Two connected streams, and the listener that accepted the second."""

    near: RdmaConnection
    far: RdmaConnection
    listener: RdmaListener


def address_of(listener: RdmaListener) -> tuple[str, int]:
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
        accepting = loops.create_task(listener.accept())
        near = await aiordma.anyio.connect(*address_of(listener), options=client)
        far = await accepting
        try:
            yield Ends(near, far, listener)
        finally:
            with anyio.CancelScope(shield=True):
                for stream in (near, far):
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


def unread(stream: RdmaConnection) -> int:
    """Return the number of messages that a stream has received and that were not read."""
    return stream.extra(RdmaAttribute.connection).stats.messages_unread


def pending(listener: RdmaListener) -> int:
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
