"""Attempt: the awaitables of Connection.send(), recv() and iteration behave as coroutines."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import Callable, Generator
from typing import Any

import loops
import pytest
from attempts import refuse, send_now
from simulator import Simulation
from simulator.pairs import connected

from aiordma import PeerClosed, RemoteBuffer
from aiordma._native import fast_path
from aiordma.loop.inline_wakeup import InlineFuture


class Pause:
    """An awaitable that waits until it is resumed."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def wait_forever() -> Any:
    await Pause()


def waiting() -> Any:
    """Return an awaitable that cannot finish at once."""
    queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 1))
    queue.set_slow(wait_forever, wait_forever)
    return queue.recv(None)


async def test_nothing_is_taken_or_sent_before_the_await(simulation: Simulation) -> None:
    async with connected(simulation) as pair:
        near, far = pair.near.connection, pair.far.connection
        before = near.stats.messages_sent  # on iWARP the active side sends one at the beginning
        sending = near.send(b"first")
        assert near.stats.messages_sent == before
        await sending
        await loops.until(lambda: far.stats.messages_unread, "the message to arrive")
        tasks = [loops.create_task(far.recv()), loops.create_task(near.send(b"never"))]
        for task in tasks:
            task.cancel()
        await loops.wait(tasks)
        receiving = far.recv()
        assert far.stats.messages_unread == 1
        assert await receiving == b"first"
        assert near.stats.messages_sent == before + 1


async def test_tasks_await_them(simulation: Simulation) -> None:
    async with connected(simulation) as pair:
        near, far = pair.near.connection, pair.far.connection
        receiving = [loops.create_task(far.recv()), loops.create_task(near.recv())]
        await loops.gather(loops.create_task(near.send(b"one")), loops.create_task(far.send(b"2")))
        assert await loops.gather(*receiving) == [b"one", b"2"]
        await near.send(b"three")
        await near.aclose()
        assert [message async for message in far] == [b"three"]
        with pytest.raises(PeerClosed):
            await far.recv()


@pytest.mark.loops("asyncio")
async def test_they_name_themselves_and_what_they_wait_for(simulation: Simulation) -> None:
    async with connected(simulation) as pair:
        far = pair.far.connection
        receiving: Any = far.recv()
        inner: Any = receiving  # asyncio's checks narrow the type of the other one
        assert (receiving.cr_await, receiving.cr_frame) == (None, None)
        assert inspect.isawaitable(receiving)
        assert asyncio.iscoroutine(receiving)
        task: Any = asyncio.create_task(receiving)
        await loops.until(lambda: far._endpoint.data_path.receiver.is_waited_for, "recv() to wait")
        assert "Connection.recv" in repr(task)
        assert isinstance(inner.cr_await, InlineFuture)
        assert (inner.cr_frame, task.get_stack()) == (None, [])
        far._endpoint.data_path.receiver.queue.may_park = False
        far._endpoint.data_path.wake()
        await loops.until(lambda: inner.cr_frame is not None, "recv() to wait in Python")
        awaited: Any = inner.cr_await
        assert awaited.__qualname__ == "Receiver.recv"
        assert [frame.f_code.co_name for frame in task.get_stack()] == ["recv"]
        memory = RemoteBuffer(0, 0, 0)
        others: list[Any] = [
            far.send(b""),
            far.read(memory, []),
            far.write(b"", memory),
            far.__anext__(),
        ]
        names = [one.__name__.partition(".")[2] for one in others]
        assert names == ["send", "read", "write", "__anext__"]
        for one in others:
            one.close()
        task.cancel()
        await loops.wait([task])
        assert inner.cr_await is None


def test_one_that_was_never_awaited_warns() -> None:
    with pytest.warns(RuntimeWarning, match=r"coroutine 'Connection\.recv' was never awaited"):
        waiting()
    ends: list[Callable[[Any], object]] = [lambda one: one.close(), lambda one: one.send(None)]
    for end in ends:
        end(waiting())  # which warns of nothing


def test_it_can_be_awaited_once() -> None:
    for is_begun in (False, True):
        one = waiting()
        if is_begun:
            one.send(None)
        one.close()
        for resume, value in ((one.send, None), (one.throw, KeyError())):
            with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
                resume(value)
        one.close()


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_exception_ends_it(is_begun: bool) -> None:
    one = waiting()
    if is_begun:
        one.send(None)
    with pytest.raises(KeyError, match="reason"):
        one.throw(KeyError("reason"))
    with pytest.raises(RuntimeError, match="cannot reuse"):
        one.send(None)


def test_code_that_it_runs_cannot_resume_or_end_it() -> None:
    errors = []

    async def use_it() -> None:
        for use in (one.close, lambda: one.send(None), lambda: one.throw(KeyError())):
            with pytest.raises(ValueError, match="coroutine already executing") as caught:
                use()
            errors.append(caught.value)
        await Pause()

    queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 1))
    queue.set_slow(use_it, use_it)  # type: ignore[arg-type]
    one: Any = queue.recv(None)
    one.send(None)
    assert len(errors) == 3
    one.close()


async def _resumed_by_an_exception() -> str:
    try:
        await Pause()
    except KeyError:
        return "handled"
    return "never"


def test_an_exception_can_be_handled() -> None:
    queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 1))
    queue.set_slow(_resumed_by_an_exception, _resumed_by_an_exception)  # type: ignore[arg-type]
    one = queue.next(None)
    one.send(None)
    with pytest.raises(StopIteration) as stop:
        one.throw(KeyError())
    assert stop.value.value == "handled"


def with_checkpoints(steps: list[str], *, is_cancelled: bool = False) -> Any:
    """Return a queue whose awaitables note their steps. Both halves of the checkpoint wait."""

    async def raise_if_cancelled() -> None:
        steps.append("may raise")
        await Pause()
        if is_cancelled:
            raise KeyError("cancelled")

    async def schedule_point() -> None:
        steps.append("lets others run")
        await Pause()

    async def wait() -> bytes:
        steps.append("waits")
        return b"waited for"

    queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 8))
    queue.checkpoints = (raise_if_cancelled, schedule_point)
    queue.set_slow(wait, wait)
    return queue


def test_it_waits_after_the_first_half_of_a_checkpoint() -> None:
    steps: list[str] = []
    one = with_checkpoints(steps).recv(None)
    assert steps == []
    one.send(None)
    assert steps == ["may raise"]
    with pytest.raises(StopIteration) as stop:
        one.send(None)
    assert (stop.value.value, steps) == (b"waited for", ["may raise", "waits"])


def test_one_that_is_cancelled_tries_nothing() -> None:
    steps: list[str] = []
    one = with_checkpoints(steps, is_cancelled=True).recv(None)
    one.send(None)
    with pytest.raises(KeyError, match="cancelled"):
        one.send(None)
    assert steps == ["may raise"]


async def _goes_on_after_an_exception() -> None:
    try:
        await Pause()
    except KeyError:
        return


@pytest.mark.parametrize("halves", ["first", "second"])
async def test_an_exception_that_a_half_handles(simulation: Simulation, halves: str) -> None:
    async def nothing() -> None:
        pass

    async with connected(simulation) as pair:
        near, far = pair.near.connection, pair.far.connection
        await near.send(b"one")
        await loops.until(lambda: far.stats.messages_unread, "the message to arrive")
        queue = far._endpoint.data_path.receiver.queue
        is_first = halves == "first"
        queue.checkpoints = (
            (_goes_on_after_an_exception, nothing)
            if is_first
            else (nothing, _goes_on_after_an_exception)
        )
        one: Any = far.recv()
        one.send(None)
        assert far.stats.messages_unread == is_first
        with pytest.raises(StopIteration) as stop:
            one.throw(KeyError())
        assert (stop.value.value, far.stats.messages_unread) == (b"one", 0)


def test_the_owner_lives_until_the_end() -> None:
    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 1))
    queue.set_slow(wait_forever, wait_forever)
    one = queue.recv(owner)
    del owner
    one.send(None)
    assert gone() is not None
    one.close()
    assert gone() is None


def test_one_in_a_reference_cycle_is_collected() -> None:
    class Owner:
        one: Any

    owner = Owner()
    gone = weakref.ref(owner)
    queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 1))
    queue.set_slow(wait_forever, wait_forever)
    owner.one = queue.recv(owner)
    owner.one.send(None)
    del owner, queue
    gc.collect()
    assert gone() is None


def test_slow_functions_must_be_set() -> None:
    queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 1))
    core = fast_path.SendQueueCore(1, 1, 1, True)
    attempts = [
        queue.recv(None),
        queue.next(None),
        core.send(None, b""),
        core.read(None, None, None),
        core.write(None, None, None),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="set_slow"):
            attempt.send(None)
    core.set_slow(refuse)
    assert send_now(core, b"") == -1  # the queue is not open
