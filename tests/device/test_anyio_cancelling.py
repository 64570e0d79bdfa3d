"""aiordma.anyio and cancel scopes: every await is a checkpoint, and cancelling loses nothing."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio.testing
from anyio.lowlevel import checkpoint
from anyio_backends import address_of, connected, on_every_backend, running, settle, unread, until
from helpers import TIME_LIMIT

import aiordma.anyio
from aiordma import ConnectionOptions
from aiordma.anyio import MessageStream
from aiordma.rdmacm import DeviceAddress

# Enough messages that are ready, and places in the send queue, for a test that never waits.
DEEP = ConnectionOptions(send_depth=64, recv_depth=64, max_message_size=64)
READY = 40


async def fill(near: MessageStream, far: MessageStream) -> list[bytes]:
    """Have messages be ready to be received by `far`."""
    sent = [b"%d" % number for number in range(READY)]
    for message in sent:
        await near.send(message)
    await until(lambda: unread(far) == READY)
    return sent


async def is_cancelled(call: Callable[[], Awaitable[object]]) -> bool:
    """Whether a call in a cancelled scope is; and each time that it is made there."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        for _ in range(2):
            with contextlib.suppress(anyio.get_cancelled_exc_class()):
                await call()
                return False
        await checkpoint()
    return scope.cancelled_caught


@on_every_backend
async def test_no_message_is_lost_to_a_deadline(address: DeviceAddress) -> None:
    random.seed(17)
    sent = [b"%d" % number for number in range(300)]
    received: list[bytes] = []
    cancelled = 0

    async def send() -> None:
        for number, message in enumerate(sent):
            await anyio.sleep(random.uniform(0, 0.004))
            if number % 10 == 0:  # some deadlines pass, however slow this machine is
                before = cancelled
                await until(lambda before=before: cancelled > before)
            await near.send(message)

    async with connected(address) as (near, far, _), anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        while len(received) < len(sent):
            with anyio.move_on_after(random.uniform(0, 0.004)) as scope:
                received.append(await far.receive())
            cancelled += scope.cancelled_caught
    assert received == sent
    assert cancelled > 20


@on_every_backend
async def test_what_is_cancelled_already_does_nothing(address: DeviceAddress) -> None:
    """Though everything is ready, and again and again: cancellation is a level, not an edge."""
    async with connected(address, DEEP, DEEP) as (near, far, listener):
        sent = await fill(near, far)
        assert await is_cancelled(far.receive)
        assert await is_cancelled(lambda: near.send(b"never sent"))
        assert [await far.receive() for _ in sent] == sent
        await near.send(b"the end")
        assert await far.receive() == b"the end"

        async with anyio.create_task_group() as tasks:
            connecting = aiordma.anyio.connect(*address_of(listener), options=DEEP)
            await tasks.start(_open, connecting)
            await anyio.sleep(0.2)
            assert await is_cancelled(listener.accept)
            async with await listener.accept() as stream:
                await stream.send(b"accepted all the same")


async def _open(
    connecting: Awaitable[MessageStream], *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    task_status.started()
    async with await connecting as stream:
        assert await stream.receive() == b"accepted all the same"


@on_every_backend
async def test_closing_in_a_cancelled_scope(address: DeviceAddress) -> None:
    """It is closed, and the peer hears of it; a second time it is a checkpoint."""
    async with connected(address) as (near, far, listener):
        for _ in range(2):
            assert await is_cancelled(near.aclose)
            assert await is_cancelled(listener.aclose)
        with pytest.raises(anyio.ClosedResourceError):
            await near.receive()
        with pytest.raises(anyio.ClosedResourceError):
            await listener.accept()
        with pytest.raises(anyio.EndOfStream):
            await far.receive()


@on_every_backend
async def test_a_deadline_that_is_over_ends_a_loop_that_never_waits(address: DeviceAddress) -> None:
    received: list[bytes] = []
    async with connected(address, DEEP, DEEP) as (near, far, _):
        sent = await fill(near, far)
        with anyio.move_on_after(0.01) as scope:
            time.sleep(0.02)  # noqa: ASYNC251 - the loop is not to notice yet
            while True:
                received.append(await far.receive())
        assert scope.cancelled_caught
        assert len(received) < 5
        received += [await far.receive() for _ in range(READY - len(received))]
        assert received == sent


class Others:
    """A task that does nothing but let others run, and counts how often it ran itself."""

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await checkpoint()


@on_every_backend
async def test_others_have_their_turn(address: DeviceAddress, backend: str) -> None:
    others = Others()

    async def takes_turns(call: Callable[[], Awaitable[object]]) -> None:
        before = others.turns
        for _ in range(READY):
            with checkpointing(backend):
                await call()
        assert others.turns >= before + READY - 1  # trio draws lots for who is first

    async with connected(address, DEEP, DEEP) as (near, far, listener), running(others.run):
        await takes_turns(lambda: near.send(b"x"))
        await until(lambda: unread(far) == READY)
        await takes_turns(far.receive)
        await takes_turns(near.aclose)
        await takes_turns(listener.aclose)


def checkpointing(backend: str) -> contextlib.AbstractContextManager[object]:
    """trio's own word for it, where that can be had."""
    if backend != "trio":
        return contextlib.nullcontext()
    return trio.testing.assert_checkpoints()


@on_every_backend
async def test_a_checkpoint_is_not_passed_twice(address: DeviceAddress) -> None:
    """Each message costs one turn of the loop: on trio the core's own checkpoint is enough."""
    others = Others()
    async with connected(address, DEEP, DEEP) as (near, far, _):
        await fill(near, far)
        async with running(others.run):
            await checkpoint()
            others.turns = 0
            for _ in range(READY):
                await far.receive()
            assert READY - 5 <= others.turns <= READY + 5


@on_every_backend
async def test_connecting_is_given_up(address: DeviceAddress) -> None:
    """Nobody accepts: nothing is left behind, which the fixture of this folder looks at."""
    async with aiordma.anyio.listen(address.host, 0) as listener:
        for seconds in (0, 0.001, 0.01, 0.1):
            with anyio.move_on_after(seconds) as scope:
                async with aiordma.anyio.connect(*address_of(listener)):
                    pytest.fail("nobody has accepted")
            assert scope.cancelled_caught


@on_every_backend
async def test_a_waiting_receiver_is_cancelled(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(far.receive)
            await settle()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(TIME_LIMIT):
            await near.send(b"for the next one")
            assert await far.receive() == b"for the next one"
