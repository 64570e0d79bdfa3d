"""Pairs of worker processes: a server and a client that do the work of one run after another."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from aiordma.bench.environment import Environment
from aiordma.bench.errors import BenchError
from aiordma.bench.plan import MANY, Work
from aiordma.bench.processes import EXIT_TIMEOUT, START_TIMEOUT, Child, wait_readable
from aiordma.bench.sample import Sample

COMMAND = (sys.executable, "-m", "aiordma.bench.workers")
_READ_SIZE = 1 << 16


class WorkerProcess(Child):
    """A process of aiordma.bench.workers: it reads lines of work, and prints results."""

    def __init__(self, role: str, command: Sequence[str]) -> None:
        """Start it. `role`: "server" or "client".

        Raises:
            BenchError: there is no such program.
        """
        super().__init__(command, has_pipes=True)
        self._role = role
        self._received = b""

    def begin(self, kind: str, host: str, port: int, work: Work) -> None:
        """Have it do this work.

        Raises:
            BenchError: it has ended.
        """
        line = json.dumps([self._role, kind, host, port, asdict(work)])
        try:
            os.write(self.stdin, f"{line}\n".encode())
        except BrokenPipeError:
            raise self._ended() from None

    def result(self, seconds: float, peer: WorkerProcess | None = None) -> str:
        """Return its next result: a line of JSON. Ignore what libraries print, such as warnings.

        Raises:
            BenchError: it has printed none within these seconds, or it or its peer has ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self._received:
                line, _, self._received = self._received.partition(b"\n")
                if line.startswith(b"{"):
                    return line.decode()
            if not self._wait_readable(deadline - time.monotonic(), peer):
                raise BenchError(f"the {self._role} has not finished after {seconds:.0f} seconds")
            received = os.read(self.stdout, _READ_SIZE)
            if not received:
                raise self._ended()
            self._received += received

    def _wait_readable(self, seconds: float, peer: WorkerProcess | None) -> bool:
        """Wait for output or its end. Return False when the time is over.

        Raises:
            BenchError: the peer has ended. This process might notice that late, or never.
        """
        ready = wait_readable([self.stdout] if peer is None else [self.stdout, peer], seconds)
        if ready and self.stdout not in ready and peer is not None:
            raise peer._ended()
        return bool(ready)

    def _ended(self) -> BenchError:
        self.wait(EXIT_TIMEOUT)
        return BenchError(f"the {self._role} failed: {self.failure()}")


class WorkerPair:
    """A server and its client. Starting them takes longer than most of their work."""

    def __init__(self, environment: Environment) -> None:
        """Start both.

        Raises:
            BenchError: a program does not exist.
        """
        self._host = environment.host
        self._timeout = environment.client_timeout
        self._server = WorkerProcess("server", environment.server_command(COMMAND))
        try:
            self._client = WorkerProcess("client", COMMAND)
        except BaseException:
            self._server.end()
            raise

    def run(self, kind: str, work: Work) -> Sample:
        """Do some work: in a new event loop of each process, by a new connection.

        Raises:
            BenchError: one of them failed, or the client took longer than allowed.
        """
        server, client = self._server, self._client
        server.begin(kind, self._host, 0, work)
        port = json.loads(server.result(START_TIMEOUT))["port"]
        client.begin(kind, self._host, port, work)
        line = client.result(self._timeout, server)
        try:
            sample = Sample.from_json(line)
        except ValueError as error:
            raise BenchError(f"the client's output: {error}") from error
        cpu = float(json.loads(server.result(EXIT_TIMEOUT))["cpu"])
        operations = work.idle if work.test in MANY else work.count + work.warmup
        return replace(sample, server_cpu=cpu / operations * 1e6)

    def end(self) -> None:
        """Kill both."""
        self._client.end()
        self._server.end()


class WorkerPairs:
    """The pairs that are running: one for each kind of worker and event loop."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], WorkerPair] = {}

    def run(self, kind: str, work: Work, environment: Environment) -> Sample:
        """Do some work in the pair for this kind and event loop, which is started if needed.

        Work of thousands of connections is done in new processes, and these are ended: memory that
        an earlier run has used would not be counted again.

        Raises:
            BenchError: as WorkerPair.run(). The pair has ended then.
        """
        key = kind, work.loop
        if key not in self._pairs:
            self._pairs[key] = WorkerPair(environment)
        keep = False
        try:
            sample = self._pairs[key].run(kind, work)
            keep = work.test not in MANY
            return sample
        finally:
            if not keep:
                self._pairs.pop(key).end()

    def close(self) -> None:
        """End all pairs."""
        while self._pairs:
            self._pairs.popitem()[1].end()
