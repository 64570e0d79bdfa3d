"""aiordma.anyio and cancel scopes: every await is a checkpoint, and cancelling loses nothing."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Awaitable, Callable

import anyio
import loops
import pytest
import trio.testing
from anyio.lowlevel import checkpoint
from anyio_pairs import address_of, connected, pending, running, unread
from loops import until

import aiordma.anyio
from aiordma import ConnectionOptions
from aiordma.anyio import RdmaConnection
from aiordma.rdmacm import DeviceAddress

# Queues that are deep enough for READY messages, so that no call has to wait.
DEEP = ConnectionOptions(send_depth=64, recv_depth=64, max_message_size=64)
READY = 40


async def fill(near: RdmaConnection, far: RdmaConnection) -> list[bytes]:
    """Send READY messages, and wait until `far` has received them. Return the messages."""
    sent = [b"%d" % number for number in range(READY)]
    for message in sent:
        await near.send(message)
    await until(lambda: unread(far) == READY, "all messages to arrive")
    return sent


async def is_cancelled(call: Callable[[], Awaitable[object]]) -> bool:
    """Return True if a call in a cancelled scope is cancelled, the first and the second time."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        for _ in range(2):
            with contextlib.suppress(anyio.get_cancelled_exc_class()):
                await call()
                return False
        await checkpoint()
    return scope.cancelled_caught


async def test_a_receive_with_a_deadline_loses_no_message(address: DeviceAddress) -> None:
    random.seed(17)
    sent = [b"%d" % number for number in range(300)]
    received: list[bytes] = []
    cancelled = in_a_row = 0

    def more_cancelled_than(before: int) -> bool:
        return cancelled > before

    async def send() -> None:
        for number, message in enumerate(sent):
            await anyio.sleep(random.uniform(0, 0.004))  # time is the subject, as for deadlines
            if number % 10 == 0:  # some deadlines pass, on any machine
                passed = functools.partial(more_cancelled_than, cancelled)
                await until(passed, "a deadline to pass")
            await near.send(message)

    async with connected(address) as (near, far, _), anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        while len(received) < len(sent):
            # Longer after each cancellation: some receives end before theirs, on any machine.
            with anyio.move_on_after(random.uniform(0, 0.004 * (1 + in_a_row))) as scope:
                received.append(await far.receive())
            cancelled += scope.cancelled_caught
            in_a_row = in_a_row + 1 if scope.cancelled_caught else 0
    assert received == sent
    assert cancelled > 20


async def test_a_call_in_a_cancelled_scope_does_nothing(address: DeviceAddress) -> None:
    """A second call in the scope does nothing either, even if everything is ready."""
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
            await until(lambda: pending(listener) == 1, "the request to arrive")
            assert await is_cancelled(listener.accept)
            async with await listener.accept() as stream:
                await stream.send(b"accepted all the same")


async def _open(
    connecting: Awaitable[RdmaConnection], *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    task_status.started()
    async with await connecting as stream:
        assert await stream.receive() == b"accepted all the same"


async def test_aclose_in_a_cancelled_scope_closes(address: DeviceAddress) -> None:
    """The peer is notified. A second aclose() is a checkpoint."""
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


async def test_a_passed_deadline_ends_receives_that_never_wait(address: DeviceAddress) -> None:
    received: list[bytes] = []
    async with connected(address, DEEP, DEEP) as (near, far, _):
        sent = await fill(near, far)
        with anyio.move_on_after(0.01) as scope:
            loops.block(0.02)  # the deadline passes before the loop runs
            while True:
                received.append(await far.receive())
        assert scope.cancelled_caught
        assert len(received) < 5
        received += [await far.receive() for _ in range(READY - len(received))]
        assert received == sent


class OtherTask:
    """A task that only lets other tasks run. It counts how often it has run."""

    def __init__(self) -> None:
        self.runs = 0

    async def run(self) -> None:
        while True:
            self.runs += 1
            await checkpoint()


async def test_a_call_that_need_not_wait_lets_other_tasks_run(address: DeviceAddress) -> None:
    other = OtherTask()

    async def lets_another_task_run(call: Callable[[], Awaitable[object]]) -> None:
        before = other.runs
        for _ in range(READY):
            with checking_checkpoints():
                await call()
        assert other.runs >= before + READY - 1  # trio runs the first of them in random order

    async with connected(address, DEEP, DEEP) as (near, far, listener), running(other.run):
        await lets_another_task_run(lambda: near.send(b"x"))
        await until(lambda: unread(far) == READY, "all messages to arrive")
        await lets_another_task_run(far.receive)
        await lets_another_task_run(near.aclose)
        await lets_another_task_run(listener.aclose)


def checking_checkpoints() -> contextlib.AbstractContextManager[object]:
    """Return trio's check that the block passes a checkpoint. The other loops have none."""
    if not loops.on_trio():
        return contextlib.nullcontext()
    return trio.testing.assert_checkpoints()


async def test_a_receive_passes_only_one_checkpoint(address: DeviceAddress) -> None:
    """Each message takes one iteration of the loop. On trio the core passes the checkpoint."""
    other = OtherTask()
    async with connected(address, DEEP, DEEP) as (near, far, _):
        await fill(near, far)
        async with running(other.run):
            await checkpoint()
            other.runs = 0
            for _ in range(READY):
                await far.receive()
            assert READY - 5 <= other.runs <= READY + 5


async def test_a_connect_with_a_deadline_leaks_nothing(address: DeviceAddress) -> None:
    """The listener accepts nothing. The fixture `no_leaks` checks that nothing is left."""
    async with aiordma.anyio.listen(address.host, 0) as listener:
        for seconds in (0, 0.001, 0.01, 0.1):  # time is the subject: it selects the moment
            with anyio.move_on_after(seconds) as scope:
                async with aiordma.anyio.connect(*address_of(listener)):
                    pytest.fail("connected without an accept()")
            assert scope.cancelled_caught
