"""Server and client of each kind in workers/, on the simulated devices."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import loops
import pytest
from simulator import Simulation

from aiordma import Connection, ConnectionOptions
from aiordma.bench.plan import TURN, Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers import idle, messages
from aiordma.bench.workers import turns as turn_module
from aiordma.bench.workers.__main__ import kind_functions
from aiordma.bench.workers.lines import read_line
from aiordma.bench.workers.timing import time_round_trips_for
from aiordma.bench.workers.turns import END_LINE, READY, TURN_LINE


async def run_both(simulation: Simulation, kind: str, work: Work) -> Sample:
    """Run server and client until both have ended; return the sample."""
    return await run_at(simulation.far.host, kind, work)


async def run_at(host: str, kind: str, work: Work) -> Sample:
    """Do what run_both() does, at this address."""
    serve, measure = kind_functions(kind)
    ports: list[int] = []
    serving = loops.create_task(serve(host, ports.append, work))
    await loops.until(lambda: ports, "the server to listen")
    sample = await measure(host, ports[0], work)
    await serving
    return sample


LATENCY = Work("latency", count=5, warmup=2)
RATE = [Work("rate", count=5, warmup=warmup) for warmup in (0, 3)]
BANDWIDTH = [
    Work("bandwidth", operation, size=1 << 16, count=count, warmup=2)
    for operation in ("send", "write", "read")
    for count in (3, 40)
]


@pytest.mark.parametrize("work", [LATENCY, *RATE, *BANDWIDTH], ids=lambda work: work.key)
async def test_all_messages_of_a_work_are_timed(
    simulation: Simulation, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, sizes = getattr(Connection, work.operation), list[int]()

    async def operate(*arguments: Any) -> None:
        sizes.append(len(arguments[1]))
        await method(*arguments)

    monkeypatch.setattr(Connection, work.operation, operate)
    check(await run_both(simulation, "messages", work), work)
    sides = 2 if work.test == "latency" else 1
    assert sizes.count(work.size) == sides * (work.warmup + work.count)


async def test_only_the_server_of_bandwidth_polls_busily(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled: list[float] = []
    make = messages.options

    def options(work: Work) -> ConnectionOptions:
        polled.append(work.busy_poll)
        return make(work)

    monkeypatch.setattr(messages, "options", options)
    for work in (LATENCY, BANDWIDTH[0]):
        await run_both(simulation, "messages", replace(work, busy_poll=1e-6))
    assert polled == [1e-6, 1e-6, 1e-6, 0.0]


@pytest.mark.loops("asyncio")
@pytest.mark.parametrize("kind", ["streams", "writers"])
@pytest.mark.parametrize("work", [LATENCY, RATE[1], BANDWIDTH[0]], ids=lambda work: work.key)
async def test_streams_do_the_work(simulation: Simulation, kind: str, work: Work) -> None:
    check(await run_both(simulation, kind, work), work)


@pytest.mark.loops("trio")
@pytest.mark.parametrize("work", [LATENCY, BANDWIDTH[0]], ids=lambda work: work.key)
async def test_streams_of_trio_do_the_work(simulation: Simulation, work: Work) -> None:
    check(await run_both(simulation, "trio", work), work)


@pytest.mark.loops("asyncio")
async def test_requests_of_http_are_answered(simulation: Simulation) -> None:
    work = Work("http", count=11, warmup=2, concurrency=3)
    check(await run_both(simulation, "http", work), work)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["http tcp", "http memory"])
async def test_requests_of_http_are_answered_without_rdma(kind: str) -> None:
    work = Work("http", count=11, warmup=2, concurrency=3)
    check(await run_at("127.0.0.1", kind, work), work)


def check(sample: Sample, work: Work) -> None:
    if work.test == "latency":
        assert sample.percentiles.keys() == {"min", "50", "90", "99", "99.9", "max"}
    else:
        unit = work.size / 1e6 if work.test == "bandwidth" else 1
        assert sample.value == pytest.approx(work.count * unit / sample.details["seconds"])


async def test_connections_are_made_for_the_warmup_and_the_count(simulation: Simulation) -> None:
    work = Work("connections", count=10, warmup=3, concurrency=4)
    assert (await run_both(simulation, "connections", work)).value > 0
    assert simulation.world.calls.counts["rdma_accept"] == 1 + 3 + 10


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of turns that the process which started the client gives to it."""
    lines = iter([TURN_LINE, TURN_LINE, TURN_LINE, END_LINE])

    async def read_line() -> str:
        return next(lines)

    monkeypatch.setattr(turn_module, "read_line", read_line)
    return 3


@pytest.mark.loops("asyncio")
@pytest.mark.parametrize("kind", ["idle", "idle streams"])
async def test_idle_memory_is_the_difference_for_each_connection(
    simulation: Simulation,
    kind: str,
    turns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert idle.memory() > 1 << 20
    pages = iter([1 << 20, (1 << 20) + 10 * 2048])
    monkeypatch.setattr(idle, "memory", lambda: next(pages))
    work = Work("idle", idle=10, warmup=1, turns=turns, concurrency=4)
    sample = await run_both(simulation, kind, work)
    assert (sample.value, sample.details) == (2.0, {"connections": 10})
    assert simulation.world.calls.counts["rdma_accept"] == 11
    ready, *medians = capsys.readouterr().out.splitlines()
    assert (ready, len(medians)) == (READY, turns)


@pytest.mark.loops("asyncio")
async def test_active_connection_is_timed_without_idle_ones(
    simulation: Simulation, turns: int
) -> None:
    work = Work("idle", idle=0, warmup=1, turns=turns)
    assert (await run_both(simulation, "idle", work)).details == {"connections": 0}
    assert simulation.world.calls.counts["rdma_accept"] == 1


def test_peers_that_are_due_are_asked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    asked: list[tuple[int, float]] = []

    async def pass_time(seconds: float) -> None:
        nonlocal now
        now += max(0.0, seconds)

    def peer(number: int) -> Mock:
        async def send(message: bytes) -> None:
            asked.append((number, round(now / TURN, 3)))

        return Mock(send=send, answer_time=TURN * 0.6 if number == 1 else 0)

    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(asyncio, "sleep", pass_time)
    monkeypatch.setattr(idle, "receive_answer", lambda peer: pass_time(peer.answer_time))
    asyncio.run(idle.ask_all([peer(number) for number in range(8)]))
    late = [(number, 0.725) for number in range(2, 6)]
    assert asked == [(0, 0), (1, 0.125), *late, (6, 0.75), (7, 0.875)]


@pytest.mark.loops("asyncio")
@pytest.mark.parametrize("connections", [0, 2, 10])
async def test_each_connection_answers_once_in_all_turns(
    simulation: Simulation, turns: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The active connection has a round trip of the warmup, and one in each turn."""
    asked: list[idle.Peer] = []
    receive_answer = idle.receive_answer

    async def count(peer: idle.Peer) -> bytes:
        asked.append(peer)
        return await receive_answer(peer)

    async def time_one(exchange_one: Callable[[], Awaitable[object]], seconds: float) -> list[int]:
        await exchange_one()
        return [1000 * len(asked)]

    monkeypatch.setattr(idle, "receive_answer", count)
    monkeypatch.setattr(idle, "time_round_trips_for", time_one)
    work = Work("answering", idle=connections, warmup=1, turns=turns, concurrency=4)
    sample = await run_both(simulation, "answering", work)
    assert sorted(Counter(asked).values()) == [1] * connections + [1 + turns]
    assert sample.details == {"connections": connections}
    assert sample.value > 0


@pytest.mark.asyncio
async def test_lines_of_standard_input_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("turn\nend\n"))
    assert [await read_line() for _ in range(3)] == [TURN_LINE, END_LINE, ""]


@pytest.mark.asyncio
async def test_round_trips_are_timed_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second in each round trip."""
    seconds = itertools.count()
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(seconds) * 10**9)
    assert list(await time_round_trips_for(lambda: asyncio.sleep(0), 2.5)) == [10**9] * 3


def test_options_depend_on_the_work() -> None:
    assert messages.options(Work("rate")).recv_depth == 512
    assert messages.options(Work("latency", size=1)).max_message_size == 64
    large = messages.options(Work("bandwidth", size=1 << 20))
    assert (large.max_message_size, large.recv_depth) == (1 << 20, 64)
    assert messages.options(Work("bandwidth", size=1 << 16)).recv_depth == 128
    written = messages.options(Work("bandwidth", "write", size=1 << 20, busy_poll=0.5))
    assert (written.max_message_size, written.busy_poll) == (64, 0.5)
