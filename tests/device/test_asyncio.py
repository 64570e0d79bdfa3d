"""Features that asyncio has and trio lacks: eager tasks, runners that run again, a debug mode.

The other tests of this folder run on asyncio and uvloop, too; there asyncio is in debug mode.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import loops
import pytest
import uvloop
from helpers import TIME_LIMIT, connected, serving

import aiordma
from aiordma import Connection, Listener
from aiordma.rdmacm import DeviceAddress

FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
factories = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())
Factory = Callable[[], asyncio.AbstractEventLoop]


@pytest.mark.loops("asyncio")  # uvloop does not support eager tasks
@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks need Python 3.12")
async def test_eager_tasks_send_and_receive(address: DeviceAddress) -> None:
    """An eager task runs up to its first wait inside create_task()."""
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    async with serving(address) as listener, aiordma.connect(*listener.local_address) as connection:
        sends = [asyncio.create_task(connection.send(b"%d" % number)) for number in range(20)]
        assert sends[0].done()  # it did not have to wait
        for number in range(20):
            assert await connection.recv() == b"%d" % number
        await asyncio.gather(*sends)
        receiving = asyncio.create_task(connection.recv())
        with pytest.raises(aiordma.BusyError):
            await connection.recv()
        await loops.cancel(receiving)
        region = await connection.register(bytearray(b"eager"))
        await asyncio.create_task(connection.send(region))
        assert await connection.recv() == b"eager"


@factories
def test_connections_survive_between_the_runs_of_a_runner(
    address: DeviceAddress, factory: Factory
) -> None:
    """Between the runs the loop does not run, and its pending work waits."""

    async def open_both() -> tuple[Listener, Connection, Connection]:
        listener = await aiordma.listen(address.host, 0)
        accepting = asyncio.create_task(listener.accept())
        connection = await aiordma.connect(*listener.local_address)
        return listener, connection, await accepting

    with asyncio.Runner(loop_factory=factory) as runner:
        listener, near, far = runner.run(open_both())
        for _ in range(3):
            runner.run(near.send(b"there"))
            assert runner.run(far.recv()) == b"there"
        for thing in (near, far, listener):
            runner.run(thing.aclose())


@factories
def test_debug_mode_of_asyncio_finds_nothing(
    address: DeviceAddress, factory: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    """It reports calls from a wrong thread, and coroutines that are never awaited."""

    async def main() -> None:
        async with connected(address) as pair:
            region = await pair.client.allocate(100)
            await pair.client.send(region)
            assert len(await pair.server.recv()) == 100
            await pair.client.aclose()
            assert [message async for message in pair.server] == []

    with asyncio.Runner(debug=True, loop_factory=factory) as runner:
        runner.get_loop().slow_callback_duration = TIME_LIMIT
        runner.run(main())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == [
        message for message in caplog.messages if message.startswith("Using selector")
    ]
