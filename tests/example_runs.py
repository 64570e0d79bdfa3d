"""Programs of examples/, run as a user runs them, or loaded to play one side of their protocol."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import sys
from collections.abc import AsyncIterator
from types import ModuleType
from typing import NamedTuple

from helpers import ROOT

SECOND_PRESS = 30.0
"""Seconds: longer than any of these programs takes to end."""


class Done(NamedTuple):
    """How a program ended."""

    status: int
    output: str
    errors: str


def load(name: str) -> ModuleType:
    """An example as a module; its main() does not run."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextlib.asynccontextmanager
async def running_program(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process; it is killed at the end of the block if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()  # wait() would hang if there is more output than a pipe holds


def running(
    name: str, *arguments: str
) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """An example's process, likewise."""
    return running_program(sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments)


async def finish(process: asyncio.subprocess.Process) -> Done:
    """Wait until it ends; what it printed that nobody has read, and its exit status."""
    output, errors = await process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, output.decode(), errors.decode())


async def interrupt(process: asyncio.subprocess.Process) -> Done:
    """Press Ctrl-C, and wait until it ends; press again if nothing comes of that.

    asyncio.run() misses a signal that comes just before its loop goes to sleep: 10 of 6000 in the
    lab, of a program that does nothing else.
    """
    process.send_signal(signal.SIGINT)
    ending = asyncio.create_task(finish(process))
    done, _ = await asyncio.wait([ending], timeout=SECOND_PRESS)
    if not done:
        process.send_signal(signal.SIGINT)
    return await ending


async def run_program(*command: str) -> Done:
    """Run a program to its end."""
    async with running_program(*command) as process:
        return await finish(process)


async def run(name: str, *arguments: str) -> Done:
    """Run an example to its end."""
    async with running(name, *arguments) as process:
        return await finish(process)


async def next_line(stream: asyncio.StreamReader | None) -> str:
    """The next line that a process prints; "" when it ended."""
    assert stream is not None
    return (await stream.readline()).decode().rstrip("\n")
