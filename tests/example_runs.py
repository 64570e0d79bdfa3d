"""Run the programs of examples/ as a user runs them, and servers that tests use as their peers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from helpers import DEFAULT, ROOT

import aiordma
from aiordma import Connection, ConnectionOptions, MessageOptions, MessageStream

SECOND_INTERRUPT = 60.0
"""Seconds until Ctrl-C is repeated: longer than any of these programs needs to end."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Handler = Callable[[Connection], Awaitable[None]]
StreamHandler = Callable[[MessageStream], Awaitable[None]]


class Listener(Protocol[T_co]):
    """A listener for connections or for message streams."""

    @property
    def local_address(self) -> tuple[str, int]:
        """The address and the port."""

    async def serve(self, handler: Callable[[T_co], Awaitable[object]]) -> None:
        """Run `handler` for each peer."""

    async def aclose(self) -> None:
        """Close the listener."""


class Done(NamedTuple):
    """The exit status of a program, and its output."""

    status: int
    output: str
    errors: str


@contextlib.asynccontextmanager
async def running_program(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program; yield its process. The process is killed when the block ends."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()  # wait() would hang if the output fills a pipe


def running(
    name: str, *arguments: str
) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Start an example; yield its process. The process is killed when the block ends."""
    return running_program(sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments)


@contextlib.asynccontextmanager
async def serving(
    name: str, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start an example that listens; yield its process and the port."""
    async with running(name, *arguments) as process:
        line = await next_line(process.stdout)
        assert line.startswith("listening"), line
        yield process, line.removeprefix("listening on port ")


def serving_with(
    host: str, handler: Handler, options: ConnectionOptions = DEFAULT
) -> contextlib.AbstractAsyncContextManager[tuple[int, asyncio.Task[None]]]:
    """Serve connections with `handler` in this process: see serving_by()."""
    return serving_by(aiordma.listen(host, 0, options=options), handler)


def serving_messages_with(
    host: str, handler: StreamHandler, options: MessageOptions
) -> contextlib.AbstractAsyncContextManager[tuple[int, asyncio.Task[None]]]:
    """Serve message streams with `handler` in this process: see serving_by()."""
    return serving_by(aiordma.listen_messages(host, 0, options=options), handler)


@contextlib.asynccontextmanager
async def serving_by(
    listening: contextlib.AbstractAsyncContextManager[Listener[T]],
    handler: Callable[[T], Awaitable[None]],
) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Serve with `handler` in this process. Yield the port, and the task: it may be cancelled.

    An exception of `handler` is raised after the block: serve() would only log it.
    """
    errors: list[Exception] = []

    async def handle(peer: T) -> None:
        try:
            await handler(peer)
        except Exception as error:
            errors.append(error)
            raise

    async with listening as listener:
        task = asyncio.create_task(listener.serve(handle))
        yield listener.local_address[1], task
        await listener.aclose()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        for error in errors:
            raise error


async def finish(process: asyncio.subprocess.Process) -> Done:
    """End its input, and wait until it ends. Return its status, and the output not read so far."""
    if process.stdin is not None:
        process.stdin.close()
    output, errors = await process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, output.decode(), errors.decode())


async def interrupt(process: asyncio.subprocess.Process) -> Done:
    """Send SIGINT, as Ctrl-C does, and wait until the process ends. Repeat SIGINT if it does not.

    asyncio.run() misses a signal that comes just before its loop sleeps: 10 of 6000 signals in the
    lab, with a program that does nothing else.
    """
    process.send_signal(signal.SIGINT)
    ending = asyncio.create_task(finish(process))
    done, _ = await asyncio.wait([ending], timeout=SECOND_INTERRUPT)
    if not done:
        process.send_signal(signal.SIGINT)
    return await ending


async def run_program(*command: str) -> Done:
    """Run a program until it ends."""
    async with running_program(*command) as process:
        return await finish(process)


async def run(name: str, *arguments: str) -> Done:
    """Run an example until it ends."""
    async with running(name, *arguments) as process:
        return await finish(process)


async def next_line(stream: asyncio.StreamReader | None) -> str:
    """Return the next line that a process prints; "" when it has ended."""
    assert stream is not None
    return (await stream.readline()).decode().rstrip("\n")
