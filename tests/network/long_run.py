"""Run for long between two machines, and measure what this process keeps.

    make long-run LONG="traffic --seconds 3600 --seed 1"
    make long-run LONG="connections --count 100000"
    make long-run LONG="cancels --count 1000000"

It runs on node1 of a lab of two nodes:

- `traffic`: messages, memory and byte streams of random sizes, each byte checked, with random
  faults: loss, delay, duplicates, corruption, a pulled cable, one direction that is blocked,
  a peer that is killed, a power cut.
- `connections`: connections that are opened, used for one message, and closed.
- `cancels`: receives, sends and connects that are cancelled.

Each prints a line for each interval, and writes them to build/long-run/NAME.json. At the end the
descriptors and RDMA objects must be those of the begin, and the memory that of the first tenth, or
the exit code is 1. `python -m benchmarks.plot_long_run` draws the files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from exchanges import (
    QUICK,
    exchange_memory,
    exchange_messages,
    exchange_stream,
    kernel_faults_as_closed,
)
from helpers import ROOT, ResourceSnapshot, wait_for_snapshot
from network_peer import Peer

import aiordma
from aiordma import Connection, ConnectionOptions, StreamOptions
from aiordma.enums import TransportType
from aiordma.lab.nodes import Node
from aiordma.rdmacm import DeviceAddress, device_addresses

SAMPLES = 120
ALLOWED_GROWTH = 4 << 20
"""Bytes by which the memory may be larger at the end than after the first tenth."""
AT_ONCE = 16
OPERATIONS_UNREAD = 20
"""Cancelled operations of a connection before it reads what came. On iWARP, a peer that sends more
than `recv_depth` messages ends the connection."""
CONNECT_SECONDS, WORK_SECONDS = 20.0, 200.0
"""Time limits. An exchange that takes longer is a hang, and ends the run."""
IMPAIRMENTS = (
    "loss 1%",
    "loss 10%",
    "delay 100ms",
    "delay 10ms 5ms",
    "duplicate 10%",
    "corrupt 2%",
)


@dataclass(frozen=True)
class Sample:
    """The state of this process at one moment. Times are in seconds, memory in bytes."""

    seconds: float
    done: int
    errors: int
    memory: int
    files: int
    objects: int


class Recorder:
    """The samples of a run."""

    def __init__(self, name: str, unit: str) -> None:
        self.done = 0
        self.errors: Counter[str] = Counter()
        self._name = name
        self._unit = unit
        self._began = time.monotonic()
        self._samples: list[Sample] = []
        self._before = ResourceSnapshot.take()

    def sample(self) -> None:
        """Record the present state, and print it."""
        gc.collect()
        snapshot = ResourceSnapshot.take()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        one = Sample(
            round(time.monotonic() - self._began, 1),
            self.done,
            self.errors.total(),
            pages * 4096,
            snapshot.files.total(),
            sum(snapshot.rdma.values()),
        )
        self._samples.append(one)
        print(
            f"{one.seconds:7.0f} s: {one.done} {self._unit}, {one.errors} ended by faults, "
            f"{one.memory / 2**20:.1f} MiB, {one.files} files, {one.objects} RDMA objects",
            flush=True,
        )

    def save(self) -> None:
        """Write the samples to a file."""
        path = ROOT / "build" / "long-run" / f"{self._name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = [asdict(one) for one in self._samples]
        content = {"unit": self._unit, "errors": self.errors, "samples": samples}
        path.write_text(json.dumps(content, indent=1))

    def verdict(self) -> int:
        """Return 1, and print the reason, if this process keeps more than at the begin."""
        after = wait_for_snapshot(self._before)
        self.sample()
        self.save()
        early = self._samples[: max(2, len(self._samples) // 10)]
        growth = self._samples[-1].memory - max(one.memory for one in early)
        print(f"ended by: {dict(self.errors)}; growth: {growth / 2**20:.1f} MiB")
        if after != self._before:
            print(f"before {self._before}\nafter  {after}")
        return int(after != self._before or growth > ALLOWED_GROWTH)


# --- traffic with faults ---

MESSAGE_PORT, STREAM_PORT = 7501, 7502


@dataclass(frozen=True)
class Target:
    """The addresses of a device here and at the peer."""

    local: DeviceAddress
    host: str


def targets(peer: Peer) -> list[Target]:
    """Return the devices over which the peer can be reached."""
    found = [one for one in device_addresses() if not one.host.startswith("fe80")]
    return [Target(one, peer.host(one)) for one in found]


async def start_servers(peer: Peer, **options: Any) -> None:
    """Start the servers of the peer, on ports that stay the same."""
    for target in targets(peer):
        await peer.command("serve_messages", target.host, MESSAGE_PORT, **options)
        await peer.command("serve_streams", target.host, STREAM_PORT, **options)


async def traffic(peer: Peer, arguments: argparse.Namespace, recorder: Recorder) -> None:
    """Exchange data while faults come and go."""
    end = time.monotonic() + arguments.seconds
    chance = random.Random(arguments.seed)
    await start_servers(peer, **QUICK)
    async with asyncio.TaskGroup() as tasks:
        for target in targets(peer):
            for work in (message_work, memory_work, stream_work):
                own = random.Random(chance.random())
                name = f"{work.__name__} to {target.host}"
                tasks.create_task(repeat(name, partial(work, target, own), end, recorder))
        tasks.create_task(sample_until(end, arguments.seconds / SAMPLES, recorder))
        await faults(peer, chance, end)


async def warm_up(peer: Peer) -> None:
    """Exchange data once over each device, so that what a process keeps for all time exists."""
    await start_servers(peer, **QUICK)
    for target in targets(peer):
        for work in (message_work, memory_work, stream_work):
            await work(target, random.Random(0))
    await peer.command("stop")


async def repeat(
    name: str, work: Callable[[], Awaitable[None]], end: float, recorder: Recorder
) -> None:
    """Do the work again and again. Errors of the peer and the network are counted."""
    while time.monotonic() < end:
        try:
            async with asyncio.timeout(CONNECT_SECONDS + WORK_SECONDS):
                with kernel_faults_as_closed():
                    await work()
        except (aiordma.ConnectError, aiordma.ConnectionClosed) as error:
            cause = error.__cause__
            named = cause if isinstance(cause, aiordma.WorkRequestError) else error
            recorder.errors[type(named).__name__] += 1
            await asyncio.sleep(0.2)
        except ConnectTimeout as error:
            recorder.errors[type(error).__name__] += 1
        except Exception:
            print(f"{name} has failed")
            raise
        else:
            recorder.done += 1


class ConnectTimeout(Exception):
    """The peer did not answer in CONNECT_SECONDS."""


@contextlib.asynccontextmanager
async def connect_timeout() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            yield
    except TimeoutError:
        raise ConnectTimeout from None


async def connected(target: Target) -> Connection:
    async with connect_timeout():
        options = ConnectionOptions(**QUICK)  # type: ignore[arg-type]
        return await aiordma.connect(target.host, MESSAGE_PORT, options=options)


async def message_work(target: Target, chance: random.Random) -> None:
    async with await connected(target) as connection:
        for _ in range(chance.randrange(1, 5)):
            await exchange_messages(connection, chance.randrange(1, 12))


async def memory_work(target: Target, chance: random.Random) -> None:
    async with await connected(target) as connection:
        await exchange_memory(connection, chance.randrange(1, 200_000))


async def stream_work(target: Target, chance: random.Random) -> None:
    async with connect_timeout():
        options = StreamOptions(**QUICK)  # type: ignore[arg-type]
        stream = await aiordma.connect_stream(target.host, STREAM_PORT, options=options)
    async with stream:
        await exchange_stream(stream, chance.randrange(1, 200_000))


async def faults(peer: Peer, chance: random.Random, end: float) -> None:
    """Make a random fault, wait, mend it, wait, until the end."""
    while time.monotonic() < end:
        await asyncio.sleep(chance.uniform(1, 5))
        fault = chance.choices([*FAULTS], [weight for weight, _ in FAULTS.values()])[0]
        print(f"fault: {fault}", flush=True)
        await asyncio.to_thread(FAULTS[fault][1], peer)
        await asyncio.sleep(chance.uniform(0.5, 5))
        was_running = peer.is_running
        await asyncio.to_thread(peer.mend)
        if not was_running:
            await start_servers(peer, **QUICK)


FAULTS: dict[str, tuple[int, Callable[[Peer], None]]] = {
    **{
        words: (4, partial(lambda peer, words: peer.netem(*words.split()), words=words))
        for words in IMPAIRMENTS
    },
    "cable pulled": (4, Peer.pull_cable),
    "to the peer blocked": (2, partial(Peer.block, to_peer=True)),
    "from the peer blocked": (2, partial(Peer.block, from_peer=True)),
    "SIGKILL": (2, Peer.kill),
    "power cut": (1, Peer.power_off),
}
"""Faults with their weights."""


# --- many connections, many cancelled operations ---


async def connections(peer: Peer, arguments: argparse.Namespace, recorder: Recorder) -> None:
    """Open, use and close connections, several at once."""
    await start_servers(peer)
    found = targets(peer)

    async def work(number: int) -> None:
        target = found[number % len(found)]
        try:
            connection = await aiordma.connect(target.host, MESSAGE_PORT)
        except aiordma.ConnectError as error:  # soft-iWARP, if the kernel was late: reliability.md
            if target.local.transport is not TransportType.IWARP:
                raise
            recorder.errors[type(error).__name__] += 1
            return
        async with connection:
            await exchange_messages(connection, 2)
        recorder.done += 1

    await in_turns(work, arguments.count, recorder)


async def cancels(peer: Peer, arguments: argparse.Namespace, recorder: Recorder) -> None:
    """Cancel receives, sends and connects."""
    await start_servers(peer)
    chance = random.Random(arguments.seed)
    found = targets(peer)
    lasting = [await aiordma.connect(one.host, MESSAGE_PORT) for one in found]

    async def connect(target: Target) -> Connection:
        return await aiordma.connect(target.host, MESSAGE_PORT)

    async def work(number: int) -> None:
        connection, target = lasting[number % len(found)], found[number % len(found)]
        if number // len(found) % OPERATIONS_UNREAD == 0:
            await read_all(connection)
        task: asyncio.Task[object]
        if number % 500 < len(found):  # few, because a handshake is slow
            task = asyncio.create_task(connect(target))
        elif chance.random() < 0.5:
            task = asyncio.create_task(connection.recv())
        else:
            task = asyncio.create_task(connection.send(b"x" * chance.randrange(100)))
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and isinstance(result := task.result(), Connection):
            result.abort()
        recorder.done += 1

    await in_turns(work, arguments.count, recorder, at_once=1)
    for connection in lasting:
        connection.abort()
        await connection.aclose()


async def read_all(connection: Connection) -> None:
    """Receive the messages that cancelled sends have left, up to one that is sent now."""
    last = secrets.token_bytes(16)
    await connection.send(last)
    while await connection.recv() != last:
        pass


async def in_turns(
    work: Callable[[int], Awaitable[None]], count: int, recorder: Recorder, at_once: int = AT_ONCE
) -> None:
    """Do the work `count` times, and take samples."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await work(number)
            if number % (count // SAMPLES or 1) == 0:
                recorder.sample()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(some())


async def sample_until(end: float, interval: float, recorder: Recorder) -> None:
    while time.monotonic() < end:
        recorder.sample()
        await asyncio.sleep(interval)


# --- the program ---

RUNS = {
    "traffic": ("exchanges", traffic),
    "connections": ("connections", connections),
    "cancels": ("cancelled operations", cancels),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=[*RUNS])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed: {arguments.seed}", flush=True)
    unit, run = RUNS[arguments.run]
    peer = Peer(Node("node2"))
    peer.mend()
    asyncio.run(warm_up(peer))
    recorder = Recorder(arguments.run, unit)
    try:
        asyncio.run(run(peer, arguments, recorder))
        return recorder.verdict()
    finally:
        recorder.save()
        peer.close()


if __name__ == "__main__":
    sys.exit(main())
