"""Metrics of connections and listeners."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import loops
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from simulator import Simulation

import aiordma
from aiordma import Connection, PeerClosed
from aiordma.prometheus import StatsCollector
from aiordma.prometheus.metrics import METRICS, Stats

FAR, PORT = "10.0.0.2", 7471


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def collector(registry: CollectorRegistry) -> StatsCollector:
    return StatsCollector(registry)


@pytest.mark.parametrize("kind", METRICS, ids=lambda kind: kind.__name__)
def test_each_number_is_a_metric(kind: type[Stats]) -> None:
    metrics = METRICS[kind]
    assert [*metrics.counters, *metrics.gauges] == [field.name for field in fields(kind)]


async def test_numbers_of_connections_are_added_up_beyond_their_end(
    simulation: Simulation, registry: CollectorRegistry, collector: StatsCollector
) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        for _ in range(2):
            accepting = loops.create_task(listener.accept())
            async with aiordma.connect(FAR, PORT) as client, await accepting as server:
                with collector.watch("echo", server):
                    await client.send(b"hello")
                    await loops.until(partial(has_received_one, server), "the message")
                    unread = "aiordma_connection_messages_unread"
                    assert registry.get_sample_value(unread, {"name": "echo"}) == 1
    assert numbers(registry) == {
        'aiordma_connections{name="echo"}': 0,
        'aiordma_connections_opened_total{name="echo"}': 2,
        'aiordma_connections_ended_total{error="",name="echo"}': 2,
        'aiordma_connection_messages_received_total{name="echo"}': 2,
        'aiordma_connection_bytes_received_total{name="echo"}': 10,
    }


def has_received_one(connection: Connection) -> bool:
    return connection.stats.messages_received == 1


async def test_the_errors_that_end_connections_are_counted(
    simulation: Simulation, registry: CollectorRegistry, collector: StatsCollector
) -> None:
    async def fail(connection: Connection, error: type[Exception] | None) -> None:
        with collector.watch("echo", connection):
            if error is not None:
                raise error
            await connection.recv()

    async with aiordma.listen(FAR, PORT) as listener:
        for error in (None, ZeroDivisionError):
            accepting = loops.create_task(listener.accept())
            async with aiordma.connect(FAR, PORT) as client, await accepting as server:
                server.abort()
                with pytest.raises(error or PeerClosed):
                    await fail(client, error)
    ended = {key: value for key, value in numbers(registry).items() if "ended" in key}
    assert ended == {
        'aiordma_connections_ended_total{error="PeerClosed",name="echo"}': 1,
        'aiordma_connections_ended_total{error="other",name="echo"}': 1,
    }


async def test_the_numbers_of_streams(
    simulation: Simulation, registry: CollectorRegistry, collector: StatsCollector
) -> None:
    async with aiordma.listen_messages(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        async with aiordma.connect_messages(FAR, PORT) as near, await accepting as far:
            with collector.watch("objects", near):
                await near.send(b"hello")
                assert await far.recv() == b"hello"
    async with aiordma.listen_stream(FAR, PORT) as stream_listener:
        accepting_stream = loops.create_task(stream_listener.accept())
        async with aiordma.connect_stream(FAR, PORT) as client, await accepting_stream as server:
            with collector.watch("bytes", client):
                await client.send(b"hello!")
                assert await server.receive() == b"hello!"
    values = numbers(registry)
    waits = values.pop('aiordma_stream_send_waits_total{name="bytes"}', 0)
    assert waits <= 1  # on iWARP for the peer
    assert values == {
        'aiordma_message_streams_opened_total{name="objects"}': 1,
        'aiordma_message_streams_ended_total{error="",name="objects"}': 1,
        'aiordma_message_stream_messages_sent_total{name="objects"}': 1,
        'aiordma_message_stream_bytes_sent_total{name="objects"}': 5,
        'aiordma_message_stream_bytes_copied_total{name="objects"}': 5,
        'aiordma_streams_opened_total{name="bytes"}': 1,
        'aiordma_streams_ended_total{error="",name="bytes"}': 1,
        'aiordma_stream_bytes_sent_total{name="bytes"}': 6,
    }


async def test_the_numbers_of_a_listener(
    simulation: Simulation, registry: CollectorRegistry, collector: StatsCollector
) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        with collector.watch("echo", listener):
            accepting = loops.create_task(listener.accept())
            async with aiordma.connect(FAR, PORT), await accepting:
                assert numbers(registry) == {
                    'aiordma_listener_accepted_total{name="echo"}': 1,
                    'aiordma_listener_connections{name="echo"}': 1,
                }


def test_one_registry_takes_one_collector(
    registry: CollectorRegistry, collector: StatsCollector
) -> None:
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        StatsCollector(registry)


def numbers(registry: CollectorRegistry) -> dict[str, float]:
    """Return the metrics as Prometheus reads them, but those that are 0 (without the gauge)."""
    lines = generate_latest(registry).decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {
        key: float(value)
        for key, value in pairs
        if float(value) or key.startswith("aiordma_connections{")
    }
