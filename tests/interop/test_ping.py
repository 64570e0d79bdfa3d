"""`aiordma ping` as a process. tests/device/test_ping_server.py has both in one process."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import loops
import pytest
from example_runs import Done, interrupt, next_line, run_program, running_program
from helpers import TIME_LIMIT

import aiordma
from aiordma.ping.client import ping
from aiordma.ping.options import PingOptions
from aiordma.ping.report import Statistics
from aiordma.ping.server import listen
from aiordma.rdmacm import DeviceAddress

PING = (sys.executable, "-m", "aiordma", "ping")
LONG_WAIT = ("-w", str(TIME_LIMIT))

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]


@asynccontextmanager
async def running_server(host: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Start `aiordma ping --listen`; yield the process and its port."""
    async with running_program(*PING, "--listen", host, "-p", "0") as process:
        line = await next_line(process.stdout)
        found = re.fullmatch(r"listening on port (\d+) at (\S+) \((\S+)\); Ctrl-C ends it", line)
        assert found is not None, line
        assert found[2] == host
        yield process, int(found[1])


def check_answered(done: Done, count: int) -> None:
    assert (done.status, done.errors) == (0, ""), done
    assert f"\n{count} sent, {count} received, 0 lost\n" in done.output
    assert "\nround trip min/avg/median/max/mdev = " in done.output


async def test_client_and_server_as_processes(address: DeviceAddress) -> None:
    """One client ends after three messages, another by Ctrl-C while it sends."""
    host = address.host
    async with running_server(host) as (server, port):
        done = await run_program(*PING, host, "-p", str(port), "-c", "3", "-i", "0", *LONG_WAIT)
        check_answered(done, 3)
        assert done.output.startswith(f"{address.device} ({address.transport.name}) at ")
        assert f"64 bytes from {host} port {port}: seq=3 time=" in done.output
        endless = (*PING, host, "-p", str(port), "-i", "0.01", *LONG_WAIT)
        async with running_program(*endless) as client:
            for _ in range(5):
                await next_line(client.stdout)
            ended = await interrupt(client)
        assert (ended.status, ended.errors) == (0, "")
        assert ", 0 lost" in ended.output
        served = await interrupt(server)
    assert (served.status, served.errors) == (0, "")
    assert served.output.count(": connected, with messages of up to 64 bytes\n") == 2
    assert ": disconnected after 3 messages\n" in served.output


async def test_without_a_host_the_command_answers_itself(address: DeviceAddress) -> None:
    """The first RDMA address of this machine, which can be that of another device."""
    done = await run_program(*PING, "-c", "2", "-i", "0", *LONG_WAIT)
    check_answered(done, 2)
    assert done.output.startswith("no host was given: ")


async def test_commands_that_fail(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        port = listener.local_address[1]
        for arguments, errors in (
            (
                (address.host, "-p", "1"),
                f"{address.host} is this machine and RDMA reaches it, but no program listens on "
                "port 1: run `aiordma ping --listen -p 1` in another terminal, or",
            ),
            (("--listen", address.host, "-p", str(port)), f"port {port} is in use: "),
            (("127.0.0.1", "-c", "1"), r"no [\w ]+ to 127\.0\.0\.1: .*aiordma devices"),
        ):
            done = await run_program(*PING, *arguments)
            assert (done.status, done.output, done.errors.count("\n")) == (1, "", 1)
            assert re.match(f"aiordma ping: {errors}", done.errors), done.errors


async def test_a_killed_server_ends_the_ping(address: DeviceAddress) -> None:
    """The ping ends with one error, and the statistics count one lost message."""
    statistics = Statistics()
    async with running_server(address.host) as (server, port):
        options = PingOptions(address.host, port, interval=0.01, wait=TIME_LIMIT / 4)
        task = asyncio.create_task(ping(options, statistics, lambda _: None))
        await loops.until(lambda: statistics.received >= 3 or task.done(), "three answers")
        server.kill()
        with pytest.raises((aiordma.PeerClosed, aiordma.WorkRequestError, TimeoutError)):
            await task
    assert statistics.lost == 1
    assert statistics.lines()[2].endswith(" received, 1 lost")


async def test_the_server_listens_at_all_addresses(address: DeviceAddress) -> None:
    printed, statistics = asyncio.Queue[str](), Statistics()
    listening = asyncio.create_task(listen(None, 0, printed.put_nowait))
    line = await printed.get()
    assert f"{address.host} ({address.device})" in line
    options = PingOptions(address.host, int(line.split()[3]), 1, wait=TIME_LIMIT)
    await ping(options, statistics, printed.put_nowait)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert statistics.all_correct
