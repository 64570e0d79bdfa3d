"""A server and a client, started, watched and ended, with a limit to how long they may take."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiordma.bench.errors import BenchError

STARTING = 40.0
"""Seconds in which a server must begin to listen: an emulated processor takes a while."""
ENDING = 60.0
"""Seconds in which a server that has served must end, with thousands of connections, too."""
_TICK = 0.01
_LINES = 5
_MUCH = 1 << 24

T = TypeVar("T")


@dataclass(frozen=True)
class Pair(Generic[T]):
    """How to run a contender once."""

    server: Sequence[str]
    client: Callable[[int], Sequence[str]]
    """Its command, given the port."""
    parse: Callable[[str], T]
    """What the client's output says. Raises ValueError where it says nothing."""
    port: int = 0
    """Where the server was told to listen; 0: it says so itself, as {"port": N}."""
    goes_on: bool = False
    """Whether the server never ends by itself."""


class Child:
    """A process of ours, with what it writes."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it, in a session of its own: Ctrl-C is for us, and we end it.

        Raises:
            BenchError: there is no such program.
        """
        self.name = os.path.basename(command[0])
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
            )
        except OSError as error:
            self._close()
            raise BenchError(f"{command[0]} cannot be run: {error.strerror}") from error

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """What it has written so far."""
        return os.pread(self._out.fileno(), _MUCH, 0).decode(errors="replace")

    def complaint(self) -> str:
        """The last lines that it wrote about what went wrong."""
        errors = os.pread(self._err.fileno(), _MUCH, 0).decode(errors="replace")
        lines = (errors.strip() or self.output.strip()).splitlines()[-_LINES:]
        return "\n".join([f"exit code {self.code}", *lines])

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it came."""
        return wait_until(lambda: self.code is not None, seconds)

    def end(self) -> None:
        """Kill it, and what it has started, if it still runs."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._close()

    def _close(self) -> None:
        self._out.close()
        self._err.close()


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait for something, at most so long; whether it came."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK)
    return True


def run_pair(pair: Pair[T], limit: float) -> tuple[T, str]:
    """Run both; what the client said, and the server's output.

    Raises:
        BenchError: one of them failed, or they took more than `limit` seconds.
    """
    server = Child(pair.server)
    try:
        port = pair.port or _announced(server)
        found = _result_of(pair, server, port, limit)
        ended = pair.goes_on or server.wait(ENDING)
        if not pair.port and (not ended or server.code):  # of others' the client's word is enough
            raise BenchError(f"the server did not end well: {server.complaint()}")
        return found, server.output
    finally:
        server.end()


def _announced(server: Child) -> int:
    """The port on its first line."""
    wait_until(lambda: "\n" in server.output or server.code is not None, STARTING)
    line = server.output.partition("\n")[0]
    try:
        return int(json.loads(line)["port"])
    except (ValueError, TypeError, KeyError):
        raise BenchError(f"the server does not listen: {server.complaint()}") from None


def _result_of(pair: Pair[T], server: Child, port: int, limit: float) -> T:
    """The client's result. A server that does not tell when it listens is tried again."""
    deadline = time.monotonic() + STARTING
    while True:
        client = Child(pair.client(port))
        try:
            return _parsed(pair, client, server, limit)
        except BenchError:
            tried_enough = not pair.port or time.monotonic() > deadline
            if tried_enough or server.code is not None:
                raise
        finally:
            client.end()
        time.sleep(10 * _TICK)


def _parsed(pair: Pair[T], client: Child, server: Child, limit: float) -> T:
    if not wait_until(lambda: client.code is not None or bool(server.code), limit):
        raise BenchError(f"not done after {limit:.0f} seconds")
    if server.code:  # the client learns of that in its own time, or never
        client.wait(1.0)
        raise BenchError(f"the server failed: {server.complaint()}")
    if client.code != 0:
        raise BenchError(f"the client failed: {client.complaint()}")
    try:
        return pair.parse(client.output)
    except ValueError as error:
        raise BenchError(f"the client's output: {error}\n{client.complaint()}") from error
