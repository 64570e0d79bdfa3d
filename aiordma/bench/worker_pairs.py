"""Pairs of worker processes: a server and a client that do the work of one run after another."""

from __future__ import annotations

import json
import operator
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from statistics import median

from aiordma.bench.environment import Environment
from aiordma.bench.errors import BenchError
from aiordma.bench.plan import MANY, Work
from aiordma.bench.processes import EXIT_TIMEOUT, START_TIMEOUT, Child, wait_readable
from aiordma.bench.sample import Sample
from aiordma.bench.workers.turns import END_LINE, TURN_LINE

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
        self.write(json.dumps([self._role, kind, host, port, asdict(work)]))

    def write(self, line: str) -> None:
        """Write a line to its standard input.

        Raises:
            BenchError: it has ended.
        """
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
        self.begin(kind, work)
        return self.finish(work)

    def begin(self, kind: str, work: Work) -> None:
        """Begin some work.

        Raises:
            BenchError: one of them failed.
        """
        self._server.begin(kind, self._host, 0, work)
        port = json.loads(self._server.result(START_TIMEOUT))["port"]
        self._client.begin(kind, self._host, port, work)

    def finish(self, work: Work) -> Sample:
        """Return the sample of this work, which has begun.

        Raises:
            BenchError: one of them failed, or the client took longer than allowed.
        """
        line = self._client_result()
        try:
            sample = Sample.from_json(line)
        except ValueError as error:
            raise BenchError(f"the client's output: {error}") from error
        cpu = float(json.loads(self._server.result(EXIT_TIMEOUT))["cpu"])
        operations = work.idle if work.test in MANY else work.count + work.warmup
        return replace(sample, server_cpu=cpu / operations * 1e6)

    def wait_ready(self) -> None:
        """Wait until the client can take turns.

        Raises:
            BenchError: as finish().
        """
        self._client_result()

    def take_turn(self) -> float:
        """Have the client time round trips for a turn; return their median in microseconds.

        Raises:
            BenchError: as finish().
        """
        self._client.write(TURN_LINE)
        return float(json.loads(self._client_result())["median"])

    def end_turns(self) -> None:
        """Tell the client that it has had its last turn.

        Raises:
            BenchError: the client has ended.
        """
        self._client.write(END_LINE)

    def _client_result(self) -> str:
        return self._client.result(self._timeout, self._server)

    def end(self) -> None:
        """Kill both."""
        self._client.end()
        self._server.end()


def run_in_turns(kind: str, work: Work, environment: Environment) -> Sample:
    """Do some work with its idle connections, and at the same time without them, in new processes.

    Both clients time the round trips of an active connection in turns. Return the sample of the
    work with the idle connections. Its details have the medians of the turns' latencies, and the
    median of the ratios of each turn to that of the other client beside it.

    Raises:
        BenchError: as WorkerPair.run().
    """
    with ExitStack() as stack:
        pairs = []
        for idle in (0, work.idle):
            pair = WorkerPair(environment)
            stack.callback(pair.end)
            pair.begin(kind, replace(work, idle=idle))
            pair.wait_ready()
            pairs.append(pair)
        latencies: dict[WorkerPair, list[float]] = {pair: [] for pair in pairs}
        for number in range(work.turns):
            for pair in reversed(pairs) if number % 2 else pairs:
                latencies[pair].append(pair.take_turn())
        for pair in pairs:
            pair.end_turns()
        _, sample = [pair.finish(work) for pair in pairs]
    alone, among = latencies.values()
    details = {
        "latency_alone": median(alone),
        "latency_among": median(among),
        "latency_ratio": median(map(operator.truediv, among, alone)),
    }
    return replace(sample, details={**sample.details, **details})


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
        if work.turns:
            return run_in_turns(kind, work, environment)
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
