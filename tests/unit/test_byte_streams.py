"""Byte streams between two simulated devices."""

from __future__ import annotations

import loops
import pytest
from simulator import Simulation

import aiordma
from aiordma import LocalClosed

PORT = 7471


@pytest.mark.parametrize("direction", ["receive", "send"])
async def test_aborting_a_stream_ends_a_call_that_waits(
    simulation: Simulation, direction: str
) -> None:
    async with aiordma.listen_stream(simulation.far.host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        near = await aiordma.connect_stream(simulation.far.host, PORT)
        far = await accepting
    call = near.receive(1) if direction == "receive" else near.send(bytes(1 << 24))
    waiting = loops.create_task(call)
    await loops.sleep(10.0)  # in virtual time: the buffers are full by then
    assert not waiting.done()
    near.abort()
    with pytest.raises(LocalClosed):
        await loops.wait_for(waiting, 60.0)
    far.abort()
    await near.aclose()
    await far.aclose()
