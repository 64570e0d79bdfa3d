"""Objects that cannot be destroyed: the error is logged, and the rest is destroyed."""

from __future__ import annotations

import errno

import loops
import pytest
from simulator import Simulation, pairs
from simulator.world import Failure


@pytest.mark.parametrize(
    ("function", "left", "texts"),
    [
        ("ibv_dereg_mr", {"Region", "Domain"}, ["memory could not be unregistered", "> failed"]),
        (
            "ibv_destroy_cq",
            {"CompletionQueue", "Channel", "Domain"},
            ["sim0: a resource could not be destroyed"],
        ),
        ("ibv_dealloc_pd", {"Domain"}, ["sim1: a resource could not be destroyed"]),
    ],
)
async def test_an_object_that_cannot_be_destroyed_is_logged(
    simulation: Simulation,
    caplog: pytest.LogCaptureFixture,
    function: str,
    left: set[str],
    texts: list[str],
) -> None:
    def fail() -> None:
        raise Failure(errno.EBUSY)

    async with pairs.connected(simulation) as pair:
        region = await pair.near.connection.register(bytearray(10_000))
        await pair.near.connection._endpoint.cm.reg_msgs(bytearray(10))
        simulation.world.calls.hooks[function] = fail
        region.close()
    await loops.sleep(1)
    assert simulation.left().keys() == left
    assert all(text in caplog.text for text in texts)
    simulation.exit_process()
