"""On trio, an await for a message raises only before it has taken or posted something."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import loops
import pytest
import trio
from simulator import Simulation
from simulator.pairs import PORT
from trio.testing import assert_checkpoints

import aiordma
from aiordma import ByteStream, Connection
from aiordma.loop import checkpoint_halves_of, schedule_point_of
from aiordma.loop.trio_loop import TrioLoop

pytestmark = [pytest.mark.usefixtures("time_limit"), pytest.mark.loops("trio")]

Peer = Connection | ByteStream


@dataclass
class SchedulePoints:
    """The schedule points of the loop. A test can cancel the task that passes one."""

    cancelling: trio.CancelScope | None = None
    passed: list[bool] = field(default_factory=list)
    """For each of them: True if its task was cancelled meanwhile."""

    async def run(self) -> None:
        if self.cancelling is not None:
            self.cancelling.cancel()
        self.passed.append(self.cancelling is not None)
        await trio.lowlevel.cancel_shielded_checkpoint()


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulePoints]:
    found = SchedulePoints()
    with monkeypatch.context() as patched:
        patched.setattr(TrioLoop, "schedule_point", staticmethod(found.run))
        forget_functions()
        yield found
    forget_functions()


def forget_functions() -> None:
    """Have the functions of TrioLoop looked up again."""
    for function in (schedule_point_of, checkpoint_halves_of):
        function.cache_clear()


@asynccontextmanager
async def peers(simulation: Simulation, kind: type[Peer]) -> AsyncIterator[tuple[Peer, Peer]]:
    """Yield both ends of a connection or of a stream."""
    host, is_stream = simulation.far.host, kind is ByteStream
    listen: Any = aiordma.listen_stream if is_stream else aiordma.listen
    connect: Any = aiordma.connect_stream if is_stream else aiordma.connect
    async with listen(host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        async with connect(host, PORT) as near, await accepting as far:
            yield near, far


def receive(peer: Peer) -> Awaitable[bytes]:
    return peer.receive() if isinstance(peer, ByteStream) else peer.recv()


async def receive_into(peer: Peer) -> bytes:
    buffer = bytearray(100)
    receiving = peer.receive_into if isinstance(peer, ByteStream) else peer.recv_into
    return bytes(buffer[: await receiving(buffer)])


RECEIVES: list[Callable[[Peer], Awaitable[bytes]]] = [receive, receive_into]
both = pytest.mark.parametrize("kind", [Connection, ByteStream])


async def has_raised(scope: trio.CancelScope, call: Callable[[], Awaitable[object]]) -> bool:
    """Await a call in the scope. Return True if it was cancelled."""
    with scope:
        await call()
    return scope.cancelled_caught


@both
@pytest.mark.parametrize("receive", RECEIVES)
async def test_an_await_in_a_cancelled_scope_does_nothing(
    simulation: Simulation, kind: type[Peer], receive: Callable[[Peer], Awaitable[bytes]]
) -> None:
    async with peers(simulation, kind) as (near, far):
        cancelled = trio.CancelScope()
        cancelled.cancel()
        assert await has_raised(cancelled, lambda: near.send(b"never"))
        await near.send(b"one")
        await loops.sleep(0.01)
        cancelled = trio.CancelScope()
        cancelled.cancel()
        assert await has_raised(cancelled, lambda: receive(far))
        assert await receive(far) == b"one"


@both
async def test_a_send_that_is_posted_does_not_raise(
    simulation: Simulation, kind: type[Peer], points: SchedulePoints
) -> None:
    async with peers(simulation, kind) as (near, far):
        scope = points.cancelling = trio.CancelScope()
        assert not await has_raised(scope, lambda: near.send(b"one"))
        assert scope.cancel_called
        points.cancelling = None
        assert await receive(far) == b"one"


@both
async def test_a_message_that_was_taken_is_returned(
    simulation: Simulation, kind: type[Peer], points: SchedulePoints
) -> None:
    async with peers(simulation, kind) as (near, far):
        await near.send(b"one")
        await loops.sleep(0.01)
        received: list[bytes] = []

        async def take() -> None:
            received.append(await receive(far))

        scope = points.cancelling = trio.CancelScope()
        assert not await has_raised(scope, take)
        assert (scope.cancel_called, received) == (True, [b"one"])
        points.cancelling = None


@both
@pytest.mark.parametrize("receive", RECEIVES)
async def test_every_await_lets_other_tasks_run(
    simulation: Simulation, kind: type[Peer], receive: Callable[[Peer], Awaitable[bytes]]
) -> None:
    async with peers(simulation, kind) as (near, far):
        for _ in range(3):
            with assert_checkpoints():
                await near.send(b"one")
            await loops.sleep(0.01)
            with assert_checkpoints():
                assert await receive(far) == b"one"
