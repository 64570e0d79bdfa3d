"""Processes: start a server and a client, wait for their results within time limits, end them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiordma.bench.errors import BenchError

START_TIMEOUT = 120.0
"""Seconds within which a server must listen. An emulated processor needs that long."""
EXIT_TIMEOUT = 60.0
"""Seconds within which a server must exit after its client. Thousands of connections need that."""
MAX_RUNS = 3
"""The number of times that a C program is run if its server or its client crashes or hangs."""
_POLL_INTERVAL = 0.01
_QUOTED_LINES = 5
_MAX_OUTPUT = 1 << 24

T = TypeVar("T")


@dataclass(frozen=True)
class Pair(Generic[T]):
    """The commands of a server and its client, and the parser of the client's output."""

    server: Sequence[str]
    client: Callable[[int], Sequence[str]]
    """Returns the client's command for a port."""
    parse: Callable[[str], T]
    """Returns the result in the client's output. Raises ValueError if there is none."""
    port: int = 0
    """The port in the server's command; 0 if the server chooses one and prints {"port": N}."""
    server_exits: bool = True
    """True if the server exits after its client, False if it must be killed."""


class Child:
    """A child process and its output."""

    def __init__(self, command: Sequence[str], has_pipes: bool = False) -> None:
        """Start the process, in a session of its own.

        Ctrl-C is then sent to this process only, which ends the child. `has_pipes`: its standard
        input and output are pipes. Otherwise it has no input, and its output is a file.

        Raises:
            BenchError: there is no such program.
        """
        self.name = os.path.basename(command[0])
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if has_pipes else self._out,
                stderr=self._err,
                start_new_session=True,
            )
        except OSError as error:
            self._close_output()
            raise BenchError(f"{command[0]} cannot be run: {error.strerror}") from error
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """The standard output so far."""
        return os.pread(self._out.fileno(), _MAX_OUTPUT, 0).decode(errors="replace")

    @property
    def stdin(self) -> int:
        """The descriptor of the pipe to its standard input."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def stdout(self) -> int:
        """The descriptor of the pipe from its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def failure(self) -> str:
        """Return the exit code and the last lines of standard error, or else of the output."""
        errors = os.pread(self._err.fileno(), _MAX_OUTPUT, 0).decode(errors="replace")
        lines = (errors.strip() or self.output.strip()).splitlines()[-_QUOTED_LINES:]
        return "\n".join([f"exit code {self.code}", *lines])

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has exited: pidfd_open(2)."""
        return self._pidfd

    def wait(self, seconds: float) -> bool:
        """Wait until the process exits or the time is over; return True if it has exited."""
        wait_readable([self], seconds)
        return self.code is not None

    def end(self) -> None:
        """Kill the process and its own children if it still runs; close the output."""
        if self.code is None:
            # PermissionError: it belongs to another user. The end of its input ends it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT)
        os.close(self._pidfd)
        self._close_output()

    def _close_output(self) -> None:
        self._out.close()
        self._err.close()


def wait_readable(sources: Sequence[Child | int], seconds: float) -> set[int]:
    """Wait until a process exits, a descriptor is readable, or the time is over.

    Return the descriptors that are ready. This process sleeps meanwhile: it takes no processor time
    from what is measured.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until `condition()` or the time is over; return True if the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_INTERVAL)
    return True


class CrashError(BenchError):
    """A signal ended the server or the client, or the client has not finished in time."""


def run_pair(pair: Pair[T], client_timeout: float) -> T:
    """Run server and client; return the client's parsed output.

    A C program whose server or client crashes or hangs is run again, MAX_RUNS times in all: each
    run has its part of `client_timeout`. Both are started again, because a server has perhaps
    accepted the only connection that it accepts. On a busy machine, 3 of 80 clients of ib_read_bw
    (perftest 4.5) crashed, one hung, and a server of cmtime (rdma-core 44) crashed.

    Raises:
        BenchError: one of them failed, or the client ran longer than `client_timeout` seconds.
    """
    runs = MAX_RUNS if pair.port else 1
    for _ in range(runs - 1):
        with contextlib.suppress(CrashError):
            return _run_once(pair, client_timeout / runs)
    return _run_once(pair, client_timeout / runs)


def _run_once(pair: Pair[T], client_timeout: float) -> T:
    server = Child(pair.server)
    try:
        port = pair.port or _announced_port(server)
        result = _run_client(pair, server, port, client_timeout)
        has_exited = not pair.server_exits or server.wait(EXIT_TIMEOUT)
        # For a C program the client's result is enough: its server's exit code is ignored.
        if not pair.port and (not has_exited or server.code):
            raise BenchError(f"the server did not exit normally: {server.failure()}")
        return result
    finally:
        server.end()


def _announced_port(server: Child) -> int:
    """Wait for the server's first line; return the port in it."""
    wait_until(lambda: "\n" in server.output or server.code is not None, START_TIMEOUT)
    line = server.output.partition("\n")[0]
    try:
        return int(json.loads(line)["port"])
    except (ValueError, TypeError, KeyError):
        raise BenchError(f"the server does not listen: {server.failure()}") from None


def _run_client(pair: Pair[T], server: Child, port: int, client_timeout: float) -> T:
    """Return the client's result.

    If the server does not print when it listens, the client is started again until it succeeds.
    """
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        client = Child(pair.client(port))
        try:
            return _client_result(pair, client, server, client_timeout)
        except CrashError:
            raise
        except BenchError:
            if not pair.port or time.monotonic() > deadline:
                raise
            if server.wait(10 * _POLL_INTERVAL):  # perhaps the client failed because of this
                _raise_if_failed(server, "server")
                raise
        finally:
            client.end()


def _client_result(pair: Pair[T], client: Child, server: Child, client_timeout: float) -> T:
    deadline = time.monotonic() + client_timeout
    wait_readable([client, server], client_timeout)
    if client.code is None and server.code == 0:
        client.wait(deadline - time.monotonic())
    if client.code is None and not server.code:
        raise CrashError(f"the client has not finished after {client_timeout:.0f} seconds")
    if server.code:  # the client might notice this late, or never
        client.wait(1.0)
    if client.code is not None and client.code < 0:  # the server might fail because of this
        _raise_if_failed(client, "client")
    _raise_if_failed(server, "server")
    _raise_if_failed(client, "client")
    try:
        return pair.parse(client.output)
    except ValueError as error:
        raise BenchError(f"the client's output: {error}\n{client.failure()}") from error


def _raise_if_failed(child: Child, role: str) -> None:
    if child.code:
        error = CrashError if child.code < 0 else BenchError
        raise error(f"the {role} failed: {child.failure()}")
