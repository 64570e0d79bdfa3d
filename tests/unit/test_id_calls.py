"""Threads of C that make calls on ids: their results, calls that block, and exits of Python."""

from __future__ import annotations

import errno
import gc
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import Mock, patch

import loops
import pytest
from simulator import Simulation
from simulator.ids import SMALL, accept, listening, make_qp, requested, resolved, target
from simulator.world import Failure

from aiordma._native import lib
from aiordma.cm import AsyncCmId, CmState
from aiordma.enums import CmEventType
from aiordma.errors import BusyError, LocalClosed, RdmaError, RouteError, VerbsError
from aiordma.rdmacm import ConnectionParameters, EndedCalls, IdCalls, id_calls

DISCONNECT = "rdma_disconnect"


@contextmanager
def real_threads() -> Iterator[EndedCalls]:
    """Make calls in real threads of C, which call the simulated library."""
    ended = EndedCalls()
    try:
        with patch.object(id_calls, "submit", lib.aiordma_submit_id_calls):
            yield ended
    finally:
        ended.close()


class Blocking:
    """A hook of the simulated library that blocks until release()."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self._go = threading.Event()
        self.threads: list[int] = []
        self.is_on = True

    def __call__(self) -> None:
        self.threads.append(threading.get_native_id())
        if self.is_on:
            self.begun.release()
            self._go.wait()

    def release(self) -> None:
        """Let all calls continue."""
        self.is_on = False
        self._go.set()


def disconnecting(cm_id: AsyncCmId) -> IdCalls:
    calls = IdCalls(cm_id.cm_id)
    calls.disconnect()
    return calls


def wait_ended(ended: EndedCalls, count: int) -> list[Callable[[], None]]:
    """Block until `count` calls have ended."""
    found: list[Callable[[], None]] = []
    poller = select.poll()
    poller.register(ended.fd, select.POLLIN)
    while len(found) < count:
        poller.poll()
        found += ended.take()
    return found


async def test_a_thread_of_c_makes_the_calls_and_reports_their_end(simulation: Simulation) -> None:
    hook = simulation.world.calls.hooks[DISCONNECT] = Blocking()
    async with await resolved(simulation) as cm_id:
        with real_threads() as ended:
            calls, order = disconnecting(cm_id), list[str]()
            ended.submit(calls, lambda: order.append("ended"))
            hook.begun.acquire()
            assert (len(ended), ended.take()) == (1, [])
            hook.release()
            for on_end in wait_ended(ended, 1):
                on_end()
            assert (order, len(ended)) == (["ended"], 0)
            assert hook.threads[0] not in {thread.native_id for thread in threading.enumerate()}
            calls.check()


async def test_private_data_that_is_too_long_is_refused(simulation: Simulation) -> None:
    """The request can be accepted all the same."""
    async with requested(simulation) as request:
        passive = request.passive
        limit = 251 if simulation.far.is_iwarp else 148
        with pytest.raises(ValueError, match=f"at most {limit}"):
            passive.reject(bytes(limit + 1))
        for nbytes in (256, 400):
            with pytest.raises(ValueError, match=f"{nbytes} bytes: rdma_cm takes up to 255"):
                await passive.accept(ConnectionParameters(bytes(nbytes)), lambda: make_qp(passive))
        await passive.accept(ConnectionParameters(b"yes"), lambda: make_qp(passive))
        await request.connecting


async def test_calls_are_freed_when_they_have_ended(simulation: Simulation) -> None:
    """Python can drop calls that have ended before it takes them: when it exits."""
    async with await resolved(simulation) as cm_id:
        with real_threads() as ended:
            for _ in range(3):
                ended.submit(disconnecting(cm_id), lambda: None)
                poller = select.poll()
                poller.register(ended.fd, select.POLLIN)
                poller.poll()
                ended._under_way.clear()
            last = disconnecting(cm_id)
            order = list[str]()
            ended.submit(last, lambda: order.append("ended"))
            for on_end in wait_ended(ended, 1):
                on_end()
            assert order == ["ended"]


async def test_the_first_error_ends_the_calls_and_is_raised(simulation: Simulation) -> None:
    def fail() -> None:
        raise Failure(errno.EBUSY)

    simulation.world.calls.hooks["rdma_resolve_route"] = fail
    async with await resolved_address(simulation) as cm_id:
        with real_threads() as ended:
            calls = disconnecting(cm_id)
            calls.resolve_route(1000)
            ended.submit(calls, lambda: None)
            wait_ended(ended, 1)
            with pytest.raises(VerbsError, match="rdma_resolve_route") as caught:
                calls.check()
            assert caught.value.errno == errno.EBUSY
            assert DISCONNECT not in simulation.world.calls.log


async def resolved_address(simulation: Simulation) -> AsyncCmId:
    """Return an id without a route."""
    cm_id = await AsyncCmId.create()
    await cm_id.resolve_addr(target(simulation))
    return cm_id


async def test_calls_that_block_do_not_delay_those_of_other_ids(simulation: Simulation) -> None:
    """If the busy threads make no progress, other threads take the next calls."""
    hook = simulation.world.calls.hooks[DISCONNECT] = Blocking()
    ids = [await resolved(simulation) for _ in range(4)]
    with real_threads() as ended:
        for cm_id in ids:
            ended.submit(disconnecting(cm_id), lambda: None)
        for _ in ids:
            hook.begun.acquire()
        assert len(set(hook.threads)) == len(ids)
        hook.release()
        wait_ended(ended, len(ids))
    for cm_id in ids:
        await cm_id.aclose()


async def test_threads_that_are_blocked_do_not_count_as_busy(simulation: Simulation) -> None:
    """Otherwise each further call would wait for a tenth of a second: 60 s in all."""
    hook = simulation.world.calls.hooks[DISCONNECT] = Blocking()
    ids = [await resolved(simulation) for _ in range(3)]
    with real_threads() as ended:
        for cm_id in ids[:2]:
            ended.submit(disconnecting(cm_id), lambda: None)
            hook.begun.acquire()
        hook.is_on = False  # the next calls do not block
        began = time.monotonic()
        for _ in range(600):
            ended.submit(disconnecting(ids[2]), lambda: None)
            wait_ended(ended, 1)
        assert time.monotonic() - began < 50
        hook.release()
        wait_ended(ended, 2)
    for cm_id in ids:
        await cm_id.aclose()


async def test_calls_that_are_cancelled_before_they_begin_are_not_made(
    simulation: Simulation,
) -> None:
    async with await resolved(simulation) as cm_id:
        with real_threads() as ended:
            calls = disconnecting(cm_id)
            calls.cancel()
            ended.submit(calls, lambda: None)
            wait_ended(ended, 1)
            calls.check()
            assert DISCONNECT not in simulation.world.calls.log


async def test_calls_outlive_the_objects_of_python(simulation: Simulation) -> None:
    """At the exit of the interpreter, the objects are freed while threads make calls."""
    hook = simulation.world.calls.hooks[DISCONNECT] = Blocking()
    async with await resolved(simulation) as cm_id:
        with real_threads() as ended:
            ended.submit(disconnecting(cm_id), lambda: None)
            hook.begun.acquire()
        with pytest.raises(ValueError, match="closed"):
            ended.submit(disconnecting(cm_id), lambda: None)
        del ended
        gc.collect()
        hook.release()
        with real_threads() as ended:  # on the same threads
            ended.submit(disconnecting(cm_id), lambda: None)
            wait_ended(ended, 1)


async def test_an_event_before_the_end_of_the_call_does_not_end_the_wait(
    simulation: Simulation,
) -> None:
    async with await resolved_address(simulation) as cm_id:
        simulation.world.calls.delay("rdma_resolve_route", after=5)
        task = loops.create_task(cm_id.resolve_route())
        await loops.sleep(1)
        assert (cm_id.state, task.done()) == (CmState.ROUTE_RESOLVED, False)
        await task


async def test_a_second_task_waits_for_nothing_that_the_first_makes(
    simulation: Simulation,
) -> None:
    """It fails before its call is made."""
    async with await resolved_address(simulation) as cm_id:
        simulation.world.calls.delay("rdma_resolve_route", before=5)
        task = loops.create_task(cm_id.resolve_route())
        await loops.sleep(1)
        with pytest.raises(BusyError):
            await cm_id.join_multicast(target(simulation))
        await task
        assert "rdma_join_multicast" not in simulation.world.calls.log


async def test_a_cancelled_call_delays_the_destruction_of_its_id(simulation: Simulation) -> None:
    simulation.world.calls.delay("rdma_resolve_route", before=5)
    cm_id = await resolved_address(simulation)
    task = loops.create_task(cm_id.resolve_route())
    await loops.sleep(1)
    await loops.cancel(task)
    closing = loops.create_task(cm_id.aclose())
    await loops.sleep(1)
    assert not closing.done()
    await closing
    log = simulation.world.calls.log
    assert log.index("rdma_resolve_route") < log.index("rdma_destroy_id")
    with pytest.raises(LocalClosed):
        await cm_id.resolve_route()


async def test_abort_ends_the_wait_for_a_call_that_blocks(simulation: Simulation) -> None:
    simulation.world.calls.delay("rdma_resolve_route", before=5)
    cm_id = await resolved_address(simulation)
    task = loops.create_task(cm_id.resolve_and_connect(ConnectionParameters()))
    await loops.sleep(1)
    cm_id.abort()
    with pytest.raises(LocalClosed):
        await task
    closing = loops.create_task(cm_id.aclose())
    await loops.sleep(1)
    assert not closing.done()  # the call is still under way
    await closing
    assert "rdma_connect" not in simulation.world.calls.log


@pytest.mark.transport("IB")
async def test_an_id_connects_when_its_route_is_resolved(simulation: Simulation) -> None:
    """C calls rdma_connect() in place of the event."""
    async with listening(simulation) as listener, await resolved_address(simulation) as cm_id:
        events = Mock(wraps=cm_id.handle_event)
        cm_id.handle_event = events  # type: ignore[method-assign]
        await cm_id.create_qp(SMALL)
        task = loops.create_task(cm_id.resolve_and_connect(ConnectionParameters(b"hello")))
        async with await listener.get_request() as request:
            assert request.request is not None
            assert request.request.private_data.rstrip(b"\0") == b"hello"
            assert cm_id.state is CmState.CONNECTING
            await accept(request)
            await task
        assert [call.args[0].type for call in events.call_args_list] == [CmEventType.ESTABLISHED]
    log = simulation.world.calls.log
    assert log.index("rdma_resolve_route") < log.index("rdma_connect")


async def test_connecting_fails_when_the_route_is_resolved(simulation: Simulation) -> None:
    simulation.world.calls.fail("rdma_connect", errno.EINVAL)
    async with await resolved_address(simulation) as cm_id:
        with pytest.raises(VerbsError, match="rdma_connect"):
            await cm_id.resolve_and_connect(ConnectionParameters())
        assert cm_id.state is CmState.ROUTE_RESOLVED


async def test_a_route_that_is_not_found_ends_resolving_and_connecting(
    simulation: Simulation,
) -> None:
    simulation.world.calls.fail("rdma_resolve_route", errno.EINVAL)
    async with await resolved_address(simulation) as cm_id:
        with pytest.raises(RouteError, match="Invalid argument"):
            await cm_id.resolve_and_connect(ConnectionParameters())
        assert cm_id.state is CmState.ADDR_RESOLVED
        await cm_id.resolve_route()
        with pytest.raises(RdmaError, match="not possible in state ROUTE_RESOLVED"):
            await cm_id.resolve_and_connect(ConnectionParameters())
    assert "rdma_connect" not in simulation.world.calls.log
    with pytest.raises(LocalClosed):
        await cm_id.resolve_and_connect(ConnectionParameters())


@pytest.mark.parametrize("end", ["cancelled", "dropped"])
async def test_an_id_does_not_connect_when_its_calls_have_no_user(
    simulation: Simulation, end: str
) -> None:
    async with await resolved_address(simulation) as cm_id:
        calls = connecting(cm_id)
        if end == "cancelled":
            calls.cancel()
        else:
            del calls
            gc.collect()
        await loops.sleep(1)
        assert cm_id.event is not None
        assert cm_id.event.type is CmEventType.ROUTE_RESOLVED
    assert "rdma_connect" not in simulation.world.calls.log


async def test_an_id_does_not_connect_with_the_calls_of_one_that_had_its_address(
    simulation: Simulation,
) -> None:
    cm_id = await resolved_address(simulation)
    memory = simulation.cm.id_of(cm_id).pointer
    simulation.cm.hold(CmEventType.ROUTE_RESOLVED)
    calls = connecting(cm_id)
    await loops.sleep(1)
    await cm_id.aclose()
    assert calls.pointer.failed == 0
    simulation.cm.held.clear()
    simulation.cm.memory_of_next_id = memory
    async with await resolved_address(simulation) as other:
        assert simulation.cm.id_of(other).pointer == memory
        await other.resolve_route()
        assert other.state is CmState.ROUTE_RESOLVED
    assert "rdma_connect" not in simulation.world.calls.log


@pytest.mark.transport("IB")
async def test_a_route_that_was_not_found_is_resolved_again(simulation: Simulation) -> None:
    """The errors have references to the calls of the attempts, which must not connect any more."""
    errors = list[BaseException]()
    async with await resolved_address(simulation) as cm_id:
        for _ in range(2):
            simulation.cm.hold(CmEventType.ROUTE_RESOLVED)
            task = await loops.start(cm_id.resolve_and_connect(ConnectionParameters()))
            await loops.sleep(1)
            simulation.cm.put(cm_id, CmEventType.ROUTE_ERROR, status=-errno.ETIMEDOUT)
            with pytest.raises(RouteError) as caught:
                await task
            errors.append(caught.value)
            simulation.cm.held.clear()
            simulation.cm.id_of(cm_id).state = "address resolved"
        errors.pop(0)
        gc.collect()
        await cm_id.resolve_route()
        assert cm_id.state is CmState.ROUTE_RESOLVED
    assert "rdma_connect" not in simulation.world.calls.log


def connecting(cm_id: AsyncCmId) -> IdCalls:
    """Make calls that resolve the route and connect: the event is not read yet."""
    calls = IdCalls(cm_id.cm_id)
    calls.resolve_route(1000)
    calls.connect(ConnectionParameters())
    lib.aiordma_make_id_calls(calls.pointer)
    return calls
