"""`aiordma ping` on a device: against itself, against its other side, and against an example."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from example_runs import Done, interrupt, next_line, run_program, running, running_program
from helpers import PATIENCE

import aiordma
from aiordma.ping.client import ping, reach
from aiordma.ping.handshake import announced_size, greeting, refusal_reason
from aiordma.ping.options import MAX_SIZE, Plan
from aiordma.ping.report import Tally
from aiordma.ping.server import listen, listening_here
from aiordma.rdmacm import DeviceAddress

PING = (sys.executable, "-m", "aiordma", "ping")

pytestmark = pytest.mark.asyncio


def pinging(*arguments: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """The command's process."""
    return running_program(*PING, *arguments)


@asynccontextmanager
async def other_side(host: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """`aiordma ping --listen` in another process, and its port."""
    async with pinging("--listen", host, "-p", "0") as process:
        line = await next_line(process.stdout)
        found = re.fullmatch(r"listening on port (\d+) at (\S+) \((\S+)\); Ctrl-C ends it", line)
        assert found is not None, line
        assert found[2] == host
        yield process, int(found[1])


async def pinged(plan: Plan) -> tuple[Tally, list[str]]:
    """A ping from this process: starting another takes long in the lab."""
    tally, said = Tally(), list[str]()
    await ping(plan, tally, said.append)
    return tally, said


def check_answered(done: Done, count: int) -> None:
    assert (done.status, done.errors) == (0, ""), done
    assert f"\n{count} sent, {count} received, 0 lost\n" in done.output
    assert "\nround trip min/avg/median/max/mdev = " in done.output


async def test_both_sides(address: DeviceAddress) -> None:
    """As processes, for who pings once, and for one who is ended by Ctrl-C in the middle."""
    host = address.host
    async with asyncio.timeout(PATIENCE), other_side(host) as (listener, port):
        done = await run_program(*PING, host, "-p", str(port), "-c", "3", "-i", "0")
        check_answered(done, 3)
        assert done.output.startswith(f"{address.device} ({address.transport.name}) at ")
        assert f"64 bytes from {host} port {port}: seq=3 time=" in done.output
        async with pinging(host, "-p", str(port), "-i", "0.01") as endless:
            for _ in range(5):
                await next_line(endless.stdout)
            ended = await interrupt(endless)
        assert (ended.status, ended.errors) == (0, "")
        assert ", 0 lost" in ended.output
        said = await interrupt(listener)
    assert (said.status, said.errors) == (0, "")
    assert said.output.count(": connected, with messages of up to 64 bytes\n") == 2
    assert ": gone after 3 messages\n" in said.output


async def test_alone(address: DeviceAddress) -> None:
    """Without a host, this machine's first address answers itself: not always this device's."""
    async with asyncio.timeout(PATIENCE):
        done = await run_program(*PING, "-c", "2", "-i", "0")
    check_answered(done, 2)
    assert done.output.startswith("no host was given: ")


@pytest.mark.parametrize("size", [1, 64, 65536, MAX_SIZE])
async def test_sizes(size: int, address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE), listening_here(address.host) as port:
        tally, said = await pinged(
            Plan(address.host, port, count=3, interval=0, size=size, wait=PATIENCE)
        )
    assert tally.good
    assert tally.received == 3
    assert said[3].startswith(f"{size} bytes from {address.host} port {port}: seq=3 time=")


async def test_a_source_and_a_spin(any_address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE), listening_here(any_address.host) as port:
        tally, said = await pinged(
            Plan(
                *(any_address.host, port),
                count=2,
                interval=0,
                source=any_address.host,
                busy_poll=0.001,
            )
        )
    assert tally.good
    assert f" at {any_address.host} to {any_address.host} port {port}: " in said[0]


async def test_the_sides_agree_on_the_size(address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE), listening_here(address.host) as port:
        reached = await reach(Plan(address.host, port, size=100_000))
        async with reached.connection as connection:
            assert announced_size(connection.private_data) == 100_000
            assert connection.max_message_size == 100_000
            assert min(reached.address_time, reached.route_time, reached.connect_time) > 0


async def test_larger_messages_are_refused(address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE), listening_here(address.host) as port:
        with pytest.raises(aiordma.Rejected) as caught:
            await aiordma.connect(address.host, port, private_data=greeting(MAX_SIZE + 1))
    reason = refusal_reason(caught.value.private_data)
    assert reason == f"messages of at most {MAX_SIZE} bytes are answered"


async def test_any_program_is_answered(address: DeviceAddress) -> None:
    async with (
        asyncio.timeout(PATIENCE),
        listening_here(address.host) as port,
        aiordma.connect(address.host, port) as connection,
    ):
        for message in (b"hello", b"", b"x" * 16384):
            await connection.send(message)
            assert await connection.recv() == message


async def test_the_echo_example(address: DeviceAddress) -> None:
    """It answers, but knows nothing of sizes."""
    async with asyncio.timeout(PATIENCE), running("echo_server", address.host, "0") as server:
        line = await next_line(server.stdout)
        plan = Plan(address.host, int(line.removeprefix("listening on port ")), 2, 0)
        tally, _ = await pinged(plan)
        assert tally.good
        large = Plan(plan.host, plan.port, 2, 0, size=65536)
        with pytest.raises(aiordma.RdmaError, match="the peer does not take 65536 bytes: "):
            await pinged(large)


async def test_nobody_listens(address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE):
        done = await run_program(*PING, address.host, "-p", "1")
    assert (done.status, done.output) == (1, "")
    assert done.errors == (
        f"aiordma ping: {address.host} is this machine, which RDMA reaches, but nobody listens on "
        "port 1: run `aiordma ping --listen -p 1` in another terminal, or `aiordma ping` without "
        "a host\n"
    )


async def test_a_port_that_is_taken(address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE), aiordma.listen(address.host, 0) as taken:
        port = taken.local_address[1]
        done = await run_program(*PING, "--listen", address.host, "-p", str(port))
    assert (done.status, done.output) == (1, "")
    assert done.errors.startswith(f"aiordma ping: port {port} is taken: ")


async def test_the_loopback_address_is_none() -> None:
    async with asyncio.timeout(PATIENCE):
        done = await run_program(*PING, "127.0.0.1", "-c", "1")
    assert (done.status, done.output) == (1, "")
    assert "127.0.0.1" in done.errors
    assert "aiordma devices" in done.errors
    assert "Traceback" not in done.errors


async def test_the_listener_is_killed(address: DeviceAddress) -> None:
    """In the middle: one sentence, and the statistics all the same."""
    tally, answered = Tally(), asyncio.Event()
    async with asyncio.timeout(PATIENCE), other_side(address.host) as (listener, port):
        plan = Plan(address.host, port, interval=0.01)
        task = asyncio.create_task(ping(plan, tally, lambda _: answered.set()))
        await answered.wait()
        while tally.received < 3:
            await asyncio.sleep(0.01)
        listener.kill()
        with pytest.raises((aiordma.PeerClosed, aiordma.WorkRequestError, TimeoutError)):
            await task
    assert tally.lost == 1
    assert tally.lines()[2].endswith(" received, 1 lost")


async def test_the_listener_listens_everywhere(address: DeviceAddress) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.timeout(PATIENCE):
        listening = asyncio.create_task(listen(None, 0, said.put_nowait))
        line = await said.get()
        assert f"{address.host} ({address.device})" in line
        port = int(line.split()[3])
        tally, _ = await pinged(Plan(address.host, port, 1))
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    assert tally.good


async def test_several_at_once(address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE), listening_here(address.host) as port:
        plans = [Plan(address.host, port, 3, 0, size) for size in (1, 1000, 20_000)]
        results = await asyncio.gather(*(pinged(plan) for plan in plans))
    assert [tally.received for tally, _ in results] == [3, 3, 3]
    assert all(tally.good for tally, _ in results)
