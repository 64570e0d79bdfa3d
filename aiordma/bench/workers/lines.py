"""The lines that a worker exchanges with the process that started it."""

from __future__ import annotations

import asyncio
import json
import sys


def print_line(line: str) -> None:
    """Print a line on standard output, and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def print_port(port: int) -> None:
    """Print {"port": N}: the port on which this server listens."""
    print_line(json.dumps({"port": port}))


async def read_line() -> str:
    """Return the next line of standard input without its end; "" at the end of the input.

    A thread reads it: meanwhile the event loop, of asyncio, runs. Cancelling does not end the read.
    """
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.rstrip()
