"""Thousands of tasks can connect at once: CONNECTS_AT_ONCE of them have a turn."""

from __future__ import annotations

import errno
import os

import loops
import pytest
from simulator import Simulation
from simulator.pairs import PORT

import aiordma
from aiordma import Connection, DeviceRemoved
from aiordma.cm import AsyncCmId
from aiordma.dispatch.connect_turns import CONNECTS_AT_ONCE, TURN_SECONDS, ConnectTurns
from aiordma.loop import running_loop

MORE = 10


def begun(simulation: Simulation) -> int:
    """Return the number of connects that have begun: each resolves an address once."""
    return simulation.world.calls.counts["rdma_resolve_addr"]


async def test_a_connect_begins_when_another_has_ended(simulation: Simulation) -> None:
    host = simulation.far.host
    async with aiordma.listen(host, PORT) as listener:
        tasks = [
            loops.create_task(aiordma.connect(host, PORT)) for _ in range(CONNECTS_AT_ONCE + MORE)
        ]
        await loops.until(lambda: begun(simulation) >= CONNECTS_AT_ONCE, "the turns to be taken")
        await loops.settle()
        assert begun(simulation) == CONNECTS_AT_ONCE
        accepted = [await listener.accept() for _ in range(MORE)]
        await loops.until(lambda: begun(simulation) == len(tasks), "the others to begin")
        accepted += [await listener.accept() for _ in range(CONNECTS_AT_ONCE)]
        for connection in [*accepted, *await loops.gather(*tasks)]:
            assert isinstance(connection, Connection)
            connection.abort()


async def test_a_silent_peer_keeps_no_turn(simulation: Simulation) -> None:
    """No task accepts: no connect ends."""
    host = simulation.far.host
    async with aiordma.listen(host, PORT):
        tasks = [loops.create_task(aiordma.connect(host, PORT)) for _ in range(CONNECTS_AT_ONCE)]
        await loops.until(lambda: begun(simulation) >= CONNECTS_AT_ONCE, "the turns to be taken")
        tasks.append(loops.create_task(aiordma.connect(host, PORT)))
        await loops.sleep(TURN_SECONDS / 2)
        assert begun(simulation) == CONNECTS_AT_ONCE
        await loops.sleep(TURN_SECONDS)
        assert begun(simulation) == len(tasks)
        await loops.cancel(*tasks)


async def test_cancelled_and_failed_connects_keep_no_turn(simulation: Simulation) -> None:
    host = simulation.far.host
    for _ in range(CONNECTS_AT_ONCE + MORE):
        with pytest.raises(aiordma.Rejected):
            await aiordma.connect(host, PORT)
    async with aiordma.listen(host, PORT) as listener:
        tasks = [loops.create_task(aiordma.connect(host, PORT)) for _ in range(CONNECTS_AT_ONCE)]
        waiting = await loops.start(aiordma.connect(host, PORT))
        await loops.until(lambda: begun(simulation) >= 2 * CONNECTS_AT_ONCE + MORE, "all turns")
        await loops.cancel(waiting, *tasks)
        connecting = loops.create_task(aiordma.connect(host, PORT))
        async with await listener.accept(), await connecting:
            pass


async def test_a_failed_channel_ends_the_connects_that_wait_for_a_turn(
    simulation: Simulation,
) -> None:
    """The failed channel reports no event. So they do not begin on it."""
    host = simulation.far.host
    async with aiordma.listen(host, PORT), await AsyncCmId.create() as other:
        tasks = [
            loops.create_task(aiordma.connect(host, PORT)) for _ in range(CONNECTS_AT_ONCE + MORE)
        ]
        await loops.until(lambda: begun(simulation) >= CONNECTS_AT_ONCE, "the turns to be taken")
        simulation.cm.fail_channels(simulation.cm.id_of(other).channel)
        for task in tasks:
            with pytest.raises(DeviceRemoved, match=os.strerror(errno.EACCES)):
                await task
        assert begun(simulation) == CONNECTS_AT_ONCE


async def test_a_turn_ends_once(simulation: Simulation) -> None:
    turns = ConnectTurns(running_loop())
    taken = [await turns.begin() for _ in range(CONNECTS_AT_ONCE)]
    (await loops.start(turns.begin())).cancel()
    await loops.sleep(TURN_SECONDS * 2)  # all have ended by themselves
    for turn in taken * 2:
        turns.end(turn)
    again = [await turns.begin() for _ in range(CONNECTS_AT_ONCE)]
    waiting = await loops.start(turns.begin())
    assert not waiting.done()
    turns.end(again[0])
    again.append(await waiting)
    for turn in again:
        turns.end(turn)


async def test_silent_peers_keep_no_turn_from_many_tasks(simulation: Simulation) -> None:
    """Tasks that were given the turns of others lose theirs, too."""
    turns = ConnectTurns(running_loop())
    tasks = [await loops.start(turns.begin()) for _ in range(3 * CONNECTS_AT_ONCE)]
    for periods in range(3):
        await loops.settle()
        assert sum(task.done() for task in tasks) == (periods + 1) * CONNECTS_AT_ONCE
        await loops.sleep(TURN_SECONDS)
