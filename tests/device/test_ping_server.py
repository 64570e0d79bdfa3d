"""The client and the server of `aiordma ping` in one process, and other programs as the peer."""

from __future__ import annotations

import dataclasses

import loops
import pytest
from helpers import TIME_LIMIT, serving

import aiordma
from aiordma.ping.client import ping, timed_connect
from aiordma.ping.options import MAX_SIZE, PingOptions
from aiordma.ping.private_data import announced_size, announcement, rejection_reason
from aiordma.ping.report import Statistics
from aiordma.ping.server import local_server, serve
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.loops("asyncio", "uvloop")


async def run_ping(options: PingOptions) -> tuple[Statistics, list[str]]:
    """Ping with the time limit TIME_LIMIT. Return the statistics and the lines printed."""
    statistics, printed = Statistics(), list[str]()
    options = dataclasses.replace(options, wait=TIME_LIMIT, interval=0)
    await ping(options, statistics, printed.append)
    return statistics, printed


async def test_messages_of_each_size_are_answered_at_once(any_address: DeviceAddress) -> None:
    host, sizes = any_address.host, (1, 64, 65536, MAX_SIZE)
    async with local_server(host) as port:
        each = [PingOptions(host, port, 3, 0, size, host, 0.001) for size in sizes]
        results = await loops.gather(*(run_ping(options) for options in each))
    for size, (statistics, printed) in zip(sizes, results, strict=True):
        assert (statistics.all_correct, statistics.received) == (True, 3)
        assert f" at {host} to {host} port {port}: address " in printed[0]
        assert printed[3].startswith(f"{size} bytes from {host} port {port}: seq=3 time=")


async def test_the_server_accepts_the_announced_size_and_answers_any_program(
    address: DeviceAddress,
) -> None:
    printed: list[str] = []
    async with aiordma.listen(address.host, 0) as listener:
        task = loops.create_task(serve(listener, printed.append))
        port = listener.local_address[1]
        timed = await timed_connect(PingOptions(address.host, port, size=100_000, wait=TIME_LIMIT))
        async with timed.connection as connection:
            assert announced_size(connection.private_data) == 100_000
            assert connection.max_message_size == 100_000
            assert min(timed.address_time, timed.route_time, timed.connect_time) > 0
        async with aiordma.connect(address.host, port) as connection:
            for message in (b"hello", b"", b"x" * 16384):
                await connection.send(message)
                assert await connection.recv() == message
        with pytest.raises(aiordma.Rejected) as caught:
            await aiordma.connect(address.host, port, private_data=announcement(MAX_SIZE + 1))
        reason = rejection_reason(caught.value.private_data)
        assert reason == f"messages of at most {MAX_SIZE} bytes are answered"
        await loops.until(lambda: len(printed) == 5, "the lines of three peers")
        await listener.aclose()
        await task
    lines = sorted(line.partition(": ")[2] for line in printed)
    assert lines == [
        "connected, with messages of up to 100000 bytes",
        "connected, with messages of up to 16384 bytes",
        "disconnected after 0 messages",
        "disconnected after 3 messages",
        f"rejected, its messages of {MAX_SIZE + 1} bytes are too large",
    ]


async def test_a_peer_that_does_not_accept_large_messages(address: DeviceAddress) -> None:
    async with serving(address) as listener:
        small = PingOptions(*listener.local_address, 2)
        assert (await run_ping(small))[0].all_correct
        explained = "the peer does not accept messages of 65536 bytes: "
        with pytest.raises(aiordma.RdmaError, match=explained):
            await run_ping(dataclasses.replace(small, size=65536))
