"""Server and client of each kind in workers/, on the simulated devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import loops
import pytest
from simulator import Simulation

from aiordma import Connection, ConnectionOptions
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers import idle, messages
from aiordma.bench.workers.__main__ import kind_functions


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


@pytest.mark.loops("asyncio")
@pytest.mark.parametrize("kind", ["idle", "idle streams"])
async def test_idle_memory_is_the_difference_for_each_connection(
    simulation: Simulation, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert idle.memory() > 1 << 20
    pages = iter([1 << 20, (1 << 20) + 10 * 2048])
    monkeypatch.setattr(idle, "memory", lambda: next(pages))
    work = Work("idle", idle=10, warmup=1, interval=0.1, concurrency=4)
    sample = await run_both(simulation, kind, work)
    assert (sample.value, sample.details["connections"]) == (2.0, 10)
    assert simulation.world.calls.counts["rdma_accept"] == 11
    assert sample.details["latency_ratio"] > 0


@pytest.mark.loops("asyncio")
async def test_all_connections_answer_while_one_is_timed(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The active connection is timed until each of the others has had a round trip."""
    begun: list[idle.Asking] = []

    def ask(peer: idle.Peer, interval: float) -> idle.Asking:
        begun.append(asking(peer, interval))
        return begun[-1]

    asking = idle.Asking
    monkeypatch.setattr(idle, "Asking", ask)

    async def exchange_until_all_have(exchange: Any, seconds: float, warmup: int) -> Sample:
        await exchange()
        await loops.until(lambda: all(one.answers for one in begun), "all answers")
        return Sample(10.0 + len(begun), details={"fastest": 1.0 + len(begun)})

    monkeypatch.setattr(idle, "time_round_trips_for", exchange_until_all_have)
    work = Work("answering", idle=10, interval=0.01, concurrency=4)
    sample = await run_both(simulation, "answering", work)
    assert (sample.value, sample.details["latency_ratio"]) == (20.0, 11.0)
    assert sample.details["answers"] >= 10


def test_options_depend_on_the_work() -> None:
    assert messages.options(Work("rate")).recv_depth == 512
    assert messages.options(Work("latency", size=1)).max_message_size == 64
    large = messages.options(Work("bandwidth", size=1 << 20))
    assert (large.max_message_size, large.recv_depth) == (1 << 20, 64)
    assert messages.options(Work("bandwidth", size=1 << 16)).recv_depth == 128
    written = messages.options(Work("bandwidth", "write", size=1 << 20, busy_poll=0.5))
    assert (written.max_message_size, written.busy_poll) == (64, 0.5)
