"""examples/service.py and its client: requests that survive faults, draining, health, metrics."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import loops
import pytest
from example_runs import finish, next_line, run, running

import aiordma
from aiordma import PeerClosed
from aiordma.rdmacm import DeviceAddress
from examples.service_client import Client

# Starting Python takes long in the lab, and other tests cover the differences between devices.
pytestmark = [
    pytest.mark.loops("asyncio"),
    pytest.mark.may_block,
    pytest.mark.transport("IB"),
]

ID = bytes(range(16))


class Service:
    """A process of the service."""

    def __init__(self, process: Process, port: int, monitor: str) -> None:
        self.process = process
        self.port = port
        self._monitor = monitor

    async def get(self, path: str) -> tuple[int, str]:
        """Send an HTTP request to the monitor. Return the status and the text."""
        async with aiohttp.ClientSession() as session, session.get(self._monitor + path) as answer:
            return answer.status, await answer.text()

    async def metric(self, name: str) -> float:
        """Return a metric of the service's connections."""
        _, text = await self.get("metrics")
        return float(text.split(f'\n{name}{{name="counters"}} ')[1].split("\n")[0])


@contextlib.asynccontextmanager
async def service(address: DeviceAddress, database: Path, port: int = 0) -> AsyncIterator[Service]:
    arguments = [address.host, str(port), "--database", str(database), "--monitor", "0"]
    async with running("service", *arguments, "--grace", "600") as process:
        first, second = [await next_line(process.stdout) for _ in range(2)]
        monitor = second.removeprefix("monitor: ").removesuffix("metrics")
        yield Service(process, int(first.removeprefix("listening on port ")), monitor)


async def test_a_client_goes_on_after_the_service_was_killed(
    address: DeviceAddress, tmp_path: Path
) -> None:
    """The requests without an answer are repeated, and the totals are kept."""
    async with service(address, tmp_path / "database") as first:
        client = Client(address.host, first.port)
        running_client = loops.create_task(client.run())
        assert await client.add("apples", 1) == 1
        first.process.kill()
        await first.process.wait()
        adding = [loops.create_task(client.add("apples", 10)) for _ in range(20)]
    async with service(address, tmp_path / "database", first.port) as second:
        assert sorted(await loops.gather(*adding)) == list(range(11, 202, 10))
        with pytest.raises(ValueError, match="invalid literal"):
            await client.add("apples", "many")  # type: ignore[arg-type]
        assert client.connections == 2
        second.process.send_signal(signal.SIGINT)
        assert await finish(second.process) == (0, "", "")
    await loops.cancel(running_client)


async def test_a_repeated_request_is_done_once(address: DeviceAddress, tmp_path: Path) -> None:
    async with service(address, tmp_path / "database") as running_service:
        for _ in range(2):
            async with aiordma.connect(address.host, running_service.port) as connection:
                await connection.send(ID + b"pears 5")
                assert await connection.recv() == ID + b"5"
        done = await run(
            "service_client", address.host, "pears", "--port", f"{running_service.port}"
        )
        assert done == (0, "pears: 6, connections: 1\n", "")


async def test_sigterm_lets_an_answer_in_progress_arrive(
    address: DeviceAddress, tmp_path: Path
) -> None:
    """The database is locked, so that the answer is in progress when the signal comes."""
    path = tmp_path / "database"
    async with (
        service(address, path) as running_service,
        aiordma.connect(address.host, running_service.port) as idle,
        aiordma.connect(address.host, running_service.port) as busy,
    ):
        assert await running_service.get("live") == (200, "live\n")
        assert await running_service.get("ready") == (200, "ready\n")
        received = "aiordma_connection_messages_received_total"
        before = await running_service.metric(received)
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("BEGIN EXCLUSIVE")
            await busy.send(ID + b"plums 7")

            async def is_taken() -> bool:
                unread = await running_service.metric("aiordma_connection_messages_unread")
                return unread == 0 and await running_service.metric(received) > before

            await loops.until(is_taken, "the service to take the request")
            running_service.process.terminate()
            with pytest.raises(PeerClosed):
                await idle.recv()
            assert await running_service.get("ready") == (503, "stopping\n")
            database.execute("ROLLBACK")
        assert await busy.recv() == ID + b"7"
        assert await finish(running_service.process) == (0, "", "")


async def test_a_client_says_that_there_is_no_answer(address: DeviceAddress) -> None:
    done = await run("service_client", address.host, "apples", "--port", "1", "--limit", "0.2")
    assert (done.status, done.output) == (1, "")
    assert done.errors.endswith("service_client: no answer within 0.2 s\n")
