"""`aiordma ping` on a device: with its own server, in one process, and with an example."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import loops
import pytest
from example_runs import Done, interrupt, next_line, run_program, running, running_program
from helpers import TIME_LIMIT

import aiordma
from aiordma.ping.client import ping, timed_connect
from aiordma.ping.handshake import announced_size, announcement, rejection_reason
from aiordma.ping.options import MAX_SIZE, PingOptions
from aiordma.ping.report import Statistics
from aiordma.ping.server import listen, local_server
from aiordma.rdmacm import DeviceAddress

PING = (sys.executable, "-m", "aiordma", "ping")
LONG_WAIT = ("-w", str(TIME_LIMIT))

pytestmark = pytest.mark.asyncio


def running_ping(*arguments: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Start `aiordma ping`; the process is killed when the block ends."""
    return running_program(*PING, *arguments)


@asynccontextmanager
async def running_server(host: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Start `aiordma ping --listen`; yield the process and its port."""
    async with running_ping("--listen", host, "-p", "0") as process:
        line = await next_line(process.stdout)
        found = re.fullmatch(r"listening on port (\d+) at (\S+) \((\S+)\); Ctrl-C ends it", line)
        assert found is not None, line
        assert found[2] == host
        yield process, int(found[1])


async def run_ping(options: PingOptions) -> tuple[Statistics, list[str]]:
    """Ping from this process, because starting another takes long in the lab.

    The time limit of an answer is TIME_LIMIT. Return the statistics and the lines printed.
    """
    statistics, printed = Statistics(), list[str]()
    options = dataclasses.replace(options, wait=TIME_LIMIT)
    await ping(options, statistics, printed.append)
    return statistics, printed


def check_answered(done: Done, count: int) -> None:
    assert (done.status, done.errors) == (0, ""), done
    assert f"\n{count} sent, {count} received, 0 lost\n" in done.output
    assert "\nround trip min/avg/median/max/mdev = " in done.output


async def test_client_and_server_as_processes(address: DeviceAddress) -> None:
    """One client ends after three messages, another by Ctrl-C while it sends."""
    host = address.host
    async with asyncio.timeout(TIME_LIMIT), running_server(host) as (server, port):
        done = await run_program(*PING, host, "-p", str(port), "-c", "3", "-i", "0", *LONG_WAIT)
        check_answered(done, 3)
        assert done.output.startswith(f"{address.device} ({address.transport.name}) at ")
        assert f"64 bytes from {host} port {port}: seq=3 time=" in done.output
        async with running_ping(host, "-p", str(port), "-i", "0.01", *LONG_WAIT) as endless:
            for _ in range(5):
                await next_line(endless.stdout)
            ended = await interrupt(endless)
        assert (ended.status, ended.errors) == (0, "")
        assert ", 0 lost" in ended.output
        served = await interrupt(server)
    assert (served.status, served.errors) == (0, "")
    assert served.output.count(": connected, with messages of up to 64 bytes\n") == 2
    assert ": disconnected after 3 messages\n" in served.output


async def test_without_a_host_the_command_answers_itself(address: DeviceAddress) -> None:
    """The first RDMA address of this machine, which can be that of another device."""
    async with asyncio.timeout(TIME_LIMIT):
        done = await run_program(*PING, "-c", "2", "-i", "0", *LONG_WAIT)
    check_answered(done, 2)
    assert done.output.startswith("no host was given: ")


@pytest.mark.parametrize("size", [1, 64, 65536, MAX_SIZE])
async def test_messages_of_each_size_are_answered(size: int, address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT), local_server(address.host) as port:
        statistics, printed = await run_ping(
            PingOptions(address.host, port, count=3, interval=0, size=size)
        )
    assert statistics.all_correct
    assert statistics.received == 3
    assert printed[3].startswith(f"{size} bytes from {address.host} port {port}: seq=3 time=")


async def test_a_source_address_and_busy_polling(any_address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT), local_server(any_address.host) as port:
        statistics, printed = await run_ping(
            PingOptions(
                *(any_address.host, port),
                count=2,
                interval=0,
                source=any_address.host,
                busy_poll=0.001,
            )
        )
    assert statistics.all_correct
    assert f" at {any_address.host} to {any_address.host} port {port}: " in printed[0]


async def test_client_and_server_agree_on_the_size(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT), local_server(address.host) as port:
        timed = await timed_connect(PingOptions(address.host, port, size=100_000, wait=TIME_LIMIT))
        async with timed.connection as connection:
            assert announced_size(connection.private_data) == 100_000
            assert connection.max_message_size == 100_000
            assert min(timed.address_time, timed.route_time, timed.connect_time) > 0


async def test_larger_messages_are_rejected(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT), local_server(address.host) as port:
        with pytest.raises(aiordma.Rejected) as caught:
            await aiordma.connect(address.host, port, private_data=announcement(MAX_SIZE + 1))
    reason = rejection_reason(caught.value.private_data)
    assert reason == f"messages of at most {MAX_SIZE} bytes are answered"


async def test_the_server_answers_any_program(address: DeviceAddress) -> None:
    async with (
        asyncio.timeout(TIME_LIMIT),
        local_server(address.host) as port,
        aiordma.connect(address.host, port) as connection,
    ):
        for message in (b"hello", b"", b"x" * 16384):
            await connection.send(message)
            assert await connection.recv() == message


async def test_the_echo_example_answers_small_messages(address: DeviceAddress) -> None:
    """The example does not accept an announced size, so large messages fail."""
    async with asyncio.timeout(TIME_LIMIT), running("echo_server", address.host, "0") as server:
        line = await next_line(server.stdout)
        small = PingOptions(address.host, int(line.removeprefix("listening on port ")), 2, 0)
        statistics, _ = await run_ping(small)
        assert statistics.all_correct
        large = PingOptions(small.host, small.port, 2, 0, size=65536)
        explained = "the peer does not accept messages of 65536 bytes: "
        with pytest.raises(aiordma.RdmaError, match=explained):
            await run_ping(large)


async def test_a_port_without_a_listener(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        done = await run_program(*PING, address.host, "-p", "1")
    assert (done.status, done.output) == (1, "")
    assert done.errors == (
        f"aiordma ping: {address.host} is this machine and RDMA reaches it, but no program "
        "listens on port 1: run `aiordma ping --listen -p 1` in another terminal, or "
        "`aiordma ping` without a host\n"
    )


async def test_listening_on_a_port_in_use(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT), aiordma.listen(address.host, 0) as listener:
        port = listener.local_address[1]
        done = await run_program(*PING, "--listen", address.host, "-p", str(port))
    assert (done.status, done.output) == (1, "")
    assert done.errors.startswith(f"aiordma ping: port {port} is in use: ")


async def test_the_loopback_address_is_not_an_rdma_address() -> None:
    async with asyncio.timeout(TIME_LIMIT):
        done = await run_program(*PING, "127.0.0.1", "-c", "1")
    assert (done.status, done.output) == (1, "")
    assert "127.0.0.1" in done.errors
    assert "aiordma devices" in done.errors
    assert "Traceback" not in done.errors


async def test_a_killed_server_ends_the_ping(address: DeviceAddress) -> None:
    """The ping ends with one error, and the statistics count one lost message."""
    statistics, answered = Statistics(), asyncio.Event()
    async with asyncio.timeout(TIME_LIMIT), running_server(address.host) as (server, port):
        options = PingOptions(address.host, port, interval=0.01, wait=TIME_LIMIT / 4)
        task = asyncio.create_task(ping(options, statistics, lambda _: answered.set()))
        await answered.wait()
        await loops.until(lambda: statistics.received >= 3 or task.done(), "three answers")
        server.kill()
        with pytest.raises((aiordma.PeerClosed, aiordma.WorkRequestError, TimeoutError)):
            await task
    assert statistics.lost == 1
    assert statistics.lines()[2].endswith(" received, 1 lost")


async def test_the_server_listens_at_all_addresses(address: DeviceAddress) -> None:
    printed: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.timeout(TIME_LIMIT):
        listening = asyncio.create_task(listen(None, 0, printed.put_nowait))
        line = await printed.get()
        assert f"{address.host} ({address.device})" in line
        port = int(line.split()[3])
        statistics, _ = await run_ping(PingOptions(address.host, port, 1))
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    assert statistics.all_correct


async def test_the_server_answers_several_clients_at_once(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT), local_server(address.host) as port:
        each = [PingOptions(address.host, port, 3, 0, size) for size in (1, 1000, 20_000)]
        results = await asyncio.gather(*(run_ping(options) for options in each))
    assert [statistics.received for statistics, _ in results] == [3, 3, 3]
    assert all(statistics.all_correct for statistics, _ in results)
