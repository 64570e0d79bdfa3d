"""AsyncCmId: events before, during and after a wait; cancelling, failing and closing."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import pytest_asyncio
from fakes.cm import PEER, FakeCm, FakeQp, event, fake_cm, raw_of

from aiordma import (
    AddressError,
    BusyError,
    ConnectError,
    DeviceRemoved,
    LocalClosed,
    PeerClosed,
    RdmaError,
    Rejected,
    RouteError,
    Unreachable,
    VerbsError,
)
from aiordma.cm import AsyncCmId, CmState
from aiordma.enums import CmEventType
from aiordma.loop import SerialJobs, blocking_pool, running_loop, threadsafe_call
from aiordma.loop.workers import WorkerPool
from aiordma.rdmacm import CmEvent, ConnectionParameters
from aiordma.verbs import QueuePairCaps, QueuePairInit

E, S = CmEventType, CmState
PARAMETERS = ConnectionParameters()
SMALL = QueuePairInit(QueuePairCaps(max_send_wr=1, max_recv_wr=1))
TIME_LIMIT = 10


@pytest_asyncio.fixture
async def cm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeCm]:
    with fake_cm(running_loop(), monkeypatch) as made:
        yield made
        await eventually(lambda: made.dispatcher.users == 0)
        assert made.dispatcher.handlers == {}
        await eventually(lambda: not any(channel.references for channel in made.channels))
        assert [raw.calls.count("destroy") for raw in made.ids.values()] == [1] * len(made.ids)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        while not condition():
            await asyncio.sleep(0.001)


async def call_begun(cm_id: AsyncCmId, call: str, state: CmState) -> None:
    """Wait until the C call was made and the id's task waits for an event."""
    await eventually(lambda: call in raw_of(cm_id).calls and cm_id.state is state)
    await eventually(lambda: len(cm_id._changed) == 1)


def state_of(cm_id: AsyncCmId) -> CmState:
    """Return `cm_id.state`. mypy takes the attribute for unchanged after an assertion."""
    return cm_id.state


def failing(code: int, function: str) -> Callable[[], None]:
    def fail() -> None:
        raise VerbsError(code, function)

    return fail


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- resolving and connecting ---


@pytest.mark.asyncio
async def test_an_id_connects(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await call_begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await task

        task = asyncio.create_task(cm_id.resolve_route())
        await call_begun(cm_id, "resolve_route", S.ROUTE_QUERY)
        cm_id.handle_event(event(E.ROUTE_RESOLVED))
        await task

        task = asyncio.create_task(cm_id.connect(PARAMETERS))
        await call_begun(cm_id, "connect", S.CONNECTING)
        cm_id.handle_event(event(E.ESTABLISHED, private_data=b"welcome"))
        await task
        assert cm_id.state is S.CONNECTED
        assert cm_id.event is not None
        assert cm_id.event.private_data == b"welcome"
        assert raw_of(cm_id).calls == ["resolve_addr", "resolve_route", "connect"]
    assert state_of(cm_id) is S.CLOSED


@pytest.mark.asyncio
async def test_an_event_can_arrive_before_the_call_returns(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        raw = raw_of(cm_id)
        raw.during["resolve_addr"] = lambda: cm_id.handle_event(event(E.ADDR_RESOLVED))
        await cm_id.resolve_addr(PEER)

        handled = threading.Event()

        def resolve_route() -> None:
            def handle_event() -> None:
                cm_id.handle_event(event(E.ROUTE_RESOLVED))
                handled.set()

            asyncio_loop.call_soon_threadsafe(handle_event)
            assert handled.wait(TIME_LIMIT)

        asyncio_loop = asyncio.get_running_loop()
        raw.during["resolve_route"] = resolve_route
        await cm_id.resolve_route()
        assert cm_id.state is S.ROUTE_RESOLVED


@pytest.mark.asyncio
async def test_an_event_is_not_lost_with_a_cancelled_waiter(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await call_begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        await cancel(task)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        assert cm_id.state is S.ADDR_RESOLVED
        raw_of(cm_id).during["resolve_route"] = lambda: None
        task = asyncio.create_task(cm_id.resolve_route())
        await call_begun(cm_id, "resolve_route", S.ROUTE_QUERY)
        cm_id.handle_event(event(E.ROUTE_RESOLVED))
        await task


@pytest.mark.asyncio
async def test_an_event_is_not_lost_with_a_waiter_cancelled_as_it_arrives(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await call_begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await cancel(task)
        assert cm_id.state is S.ADDR_RESOLVED


@pytest.mark.asyncio
async def test_a_hint_does_not_end_a_wait(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await call_begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        for kind in (E.ADDR_CHANGE, E.TIMEWAIT_EXIT, CmEventType(99)):
            cm_id.handle_event(event(kind))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done()
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await task


@pytest.mark.asyncio
async def test_a_failed_query_can_be_repeated(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await call_begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        cm_id.handle_event(event(E.ADDR_ERROR, -errno.ETIMEDOUT))
        with pytest.raises(AddressError, match=r"no RDMA path to 10\.7\.1\.2: .*timed out"):
            await task
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await eventually(lambda: len(cm_id._changed) == 1)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await task


@pytest.mark.asyncio
async def test_a_call_that_fails_at_once_leaves_the_state_unchanged(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        raw = raw_of(cm_id)
        raw.during["bind_addr"] = failing(errno.EADDRINUSE, "rdma_bind_addr")
        with pytest.raises(VerbsError, match="port is in use"):
            cm_id.bind_addr(PEER)
        assert cm_id.state is S.IDLE
        raw.during["resolve_addr"] = failing(errno.ENODEV, "rdma_resolve_addr")
        with pytest.raises(AddressError, match="aiordma devices") as caught:
            await cm_id.resolve_addr(PEER)
        assert isinstance(caught.value.__cause__, VerbsError)
        assert cm_id.state is S.IDLE
        del raw.during["bind_addr"]
        cm_id.bind_addr(PEER)
        assert state_of(cm_id) is S.ADDR_BOUND


@pytest.mark.asyncio
async def test_a_call_that_fails_in_its_thread_leaves_the_state_unchanged(cm: FakeCm) -> None:
    async with cm.make_id(S.ADDR_RESOLVED) as cm_id:
        raw_of(cm_id).during["resolve_route"] = failing(errno.EINVAL, "rdma_resolve_route")
        with pytest.raises(RouteError, match="Invalid argument"):
            await cm_id.resolve_route()
        assert cm_id.state is S.ADDR_RESOLVED


# --- failing to connect ---


async def connecting(cm_id: AsyncCmId) -> asyncio.Task[None]:
    task = asyncio.create_task(cm_id.connect(PARAMETERS))
    await call_begun(cm_id, "connect", S.CONNECTING)
    return task


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "status", "error", "text"),
    [
        (E.REJECTED, 28, Rejected, r"10\.7\.1\.2:7471 rejected .* application refused"),
        (E.REJECTED, 8, Rejected, "no listener at this port"),
        (E.UNREACHABLE, -errno.ETIMEDOUT, Unreachable, r"10\.7\.1\.2:7471 does not answer"),
        (E.CONNECT_ERROR, -errno.EIO, ConnectError, r"could not connect to 10\.7\.1\.2:7471"),
        (E.DEVICE_REMOVAL, 0, DeviceRemoved, "device was removed"),
        (E.ADDR_RESOLVED, 0, RdmaError, "unexpected ADDR_RESOLVED event"),
    ],
)
async def test_an_error_event_while_connecting_raises(
    cm: FakeCm, kind: CmEventType, status: int, error: type[RdmaError], text: str
) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED) as cm_id:
        task = await connecting(cm_id)
        cm_id.handle_event(event(kind, status, b"because"))
        with pytest.raises(error, match=text) as caught:
            await task
        assert type(caught.value) is error
        if isinstance(caught.value, Rejected):
            assert (caught.value.status, caught.value.private_data) == (status, b"because")


@pytest.mark.asyncio
async def test_the_first_failure_is_raised(cm: FakeCm) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED) as cm_id:
        task = await connecting(cm_id)
        cm_id.handle_event(event(E.UNREACHABLE))
        cm_id.handle_event(event(E.REJECTED, 8))
        cm_id.handle_event(event(E.DEVICE_REMOVAL))
        with pytest.raises(Unreachable):
            await task
        assert isinstance(cm_id.failure("x"), Unreachable)


@pytest.mark.asyncio
async def test_a_failure_is_a_new_exception_each_time(cm: FakeCm) -> None:
    async with cm.make_id(S.CONNECTED) as cm_id:
        assert cm_id.failure("x") is None
        cm_id.handle_event(event(E.DISCONNECTED))
        assert isinstance(cm_id.failure("x"), PeerClosed)
        assert cm_id.failure("x") is not cm_id.failure("x")


@pytest.mark.asyncio
async def test_a_refused_connect_on_iwarp_is_rejected(cm: FakeCm) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED, iwarp=True) as cm_id:
        raw_of(cm_id).during["connect"] = failing(errno.ECONNREFUSED, "rdma_connect")
        with pytest.raises(Rejected, match="Connection refused"):
            await cm_id.connect(PARAMETERS)


@pytest.mark.asyncio
async def test_a_failed_connect_on_other_transports_is_a_verbs_error(cm: FakeCm) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED) as cm_id:
        raw_of(cm_id).during["connect"] = failing(errno.EINVAL, "rdma_connect")
        with pytest.raises(VerbsError, match="rdma_connect"):
            await cm_id.connect(PARAMETERS)


@pytest.mark.asyncio
async def test_prepare_is_called_before_the_c_call(cm: FakeCm) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED) as cm_id:
        raw = raw_of(cm_id)
        raw.during["connect"] = failing(errno.EINVAL, "rdma_connect")
        with pytest.raises(VerbsError):
            await cm_id.connect(PARAMETERS, lambda: raw.calls.append("prepare"))
        assert raw.calls == ["prepare", "connect"]
        with pytest.raises(ZeroDivisionError):
            await cm_id.connect(PARAMETERS, lambda: 1 // 0)  # type: ignore[arg-type]
        assert raw.calls == ["prepare", "connect"]


# --- calls that are not allowed ---


@pytest.mark.asyncio
async def test_a_second_call_is_refused_while_one_is_under_way(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await call_begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        with pytest.raises(RdmaError, match="not possible in state ADDR_QUERY"):
            await cm_id.resolve_addr(PEER)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await task
        assert raw_of(cm_id).calls == ["resolve_addr"]


@pytest.mark.asyncio
async def test_two_tasks_cannot_wait_for_one_id(cm: FakeCm) -> None:
    async with cm.make_id(S.ADDR_BOUND) as cm_id:
        task = asyncio.create_task(cm_id.join_multicast(PEER))
        await call_begun(cm_id, "join_multicast", S.ADDR_BOUND)
        (token,) = cm_id._joining
        with pytest.raises(BusyError):
            await cm_id.join_multicast(PEER)
        joined = CmEvent(E.MULTICAST_JOIN, 0, context=token)
        cm_id.handle_event(joined)
        assert await task is joined


def calls_of(cm_id: AsyncCmId) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    async def bind_addr() -> None:
        cm_id.bind_addr(PEER)

    async def listen() -> None:
        cm_id.listen()

    return {
        "bind_addr": bind_addr,
        "resolve_addr": lambda: cm_id.resolve_addr(PEER),
        "resolve_route": cm_id.resolve_route,
        "connect": lambda: cm_id.connect(PARAMETERS),
        "listen": listen,
        "accept": lambda: cm_id.accept(PARAMETERS),
    }


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("state", "error"),
    [(S.CLOSED, LocalClosed), (S.DISCONNECTED, PeerClosed), (S.CONNECTED, RdmaError)],
)
async def test_calls_in_the_wrong_state_raise_and_are_not_made(
    cm: FakeCm, state: CmState, error: type[RdmaError]
) -> None:
    cm_id = cm.make_id(S.IDLE if state is S.CLOSED else state)
    if state is S.CLOSED:
        await cm_id.aclose()
    for name, call in calls_of(cm_id).items():
        with pytest.raises(error, match=name):
            await call()
    await cm_id.aclose()
    assert raw_of(cm_id).calls == ["destroy"]


# --- listening ---


@pytest.mark.asyncio
async def test_requests_that_arrive_before_a_wait_are_returned_in_order(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen()
        for data in (b"one", b"two"):
            listener.handle_event(cm.request_event(data))
        for data in (b"one", b"two"):
            async with await listener.get_request() as request:
                assert request.state is S.REQUESTED
                assert request.event is not None
                assert request.event.private_data == data


@pytest.mark.asyncio
async def test_a_request_wakes_the_task_that_waits(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen()
        task = asyncio.create_task(listener.get_request())
        await eventually(lambda: len(listener._changed) == 1)
        listener.handle_event(cm.request_event())
        async with await task as request:
            assert request.state is S.REQUESTED


@pytest.mark.asyncio
async def test_a_request_is_not_lost_with_a_cancelled_waiter(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen()
        task = asyncio.create_task(listener.get_request())
        await eventually(lambda: len(listener._changed) == 1)
        listener.handle_event(cm.request_event(b"mine"))
        await cancel(task)
        async with await listener.get_request() as request:
            assert request.event is not None
            assert request.event.private_data == b"mine"


@pytest.mark.asyncio
async def test_two_tasks_cannot_wait_for_requests(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen()
        task = asyncio.create_task(listener.get_request())
        await eventually(lambda: len(listener._changed) == 1)
        with pytest.raises(BusyError):
            await listener.get_request()
        await cancel(task)


@pytest.mark.asyncio
async def test_requests_beyond_the_backlog_are_rejected(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen(backlog=2)
        for _ in range(3):
            listener.handle_event(cm.request_event())
        *_, last = cm.ids.values()
        await eventually(last.destroyed.is_set)
        for _ in range(2):
            await (await listener.get_request()).aclose()
        listener.handle_event(cm.request_event())
        await (await listener.get_request()).aclose()


@pytest.mark.asyncio
async def test_closing_a_listener_rejects_its_pending_requests(cm: FakeCm) -> None:
    listener = cm.make_id()
    listener.listen()
    listener.handle_event(cm.request_event())
    taken = await listener.get_request()
    listener.handle_event(cm.request_event())
    await listener.aclose()
    *_, waiting = cm.ids.values()
    await eventually(waiting.destroyed.is_set)
    assert not raw_of(taken).destroyed.is_set()
    await taken.aclose()


@pytest.mark.asyncio
async def test_a_request_is_on_the_listeners_channel_until_it_is_taken(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen()
        [channel] = cm.channels
        assert raw_of(listener).calls == ["migrate", "listen"]
        listener.handle_event(cm.request_event())
        assert channel.references == 3  # the listener, the loop, and the request
        async with await listener.get_request() as request:
            assert channel.references == 2
            assert raw_of(request).calls == ["migrate"]


@pytest.mark.asyncio
async def test_a_request_whose_device_was_removed_is_skipped(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen()
        listener.handle_event(cm.request_event(b"removed"))
        *_, removed = cm.ids.values()
        removed.during["migrate"] = failing(errno.ENXIO, "rdma_migrate_id")
        listener.handle_event(cm.request_event(b"present"))
        async with await listener.get_request() as request:
            assert request.event is not None
            assert request.event.private_data == b"present"
        await eventually(removed.destroyed.is_set)


@pytest.mark.asyncio
async def test_migrating_a_listener_keeps_its_channel_and_requests(cm: FakeCm) -> None:
    """No function of librdmacm is called, so no request can be lost."""
    listener = cm.make_id()
    listener.listen()
    listener.handle_event(cm.request_event(b"waits"))
    *_, raw = cm.ids.values()
    [channel] = cm.channels
    before = list(raw_of(listener).calls)
    moved = await listener.migrate(None)
    assert listener.state is S.CLOSED
    assert channel.references == 2  # the loop no longer reads it
    assert raw_of(moved).calls == before
    assert raw.calls == []
    async with await moved.get_request() as request:
        assert raw_of(request) is raw
        assert raw.calls == ["migrate"]
        assert channel.references == 1
    await moved.aclose()


@pytest.mark.asyncio
async def test_listening_during_another_call_raises_busy_error(
    cm: FakeCm, gate: threading.Event
) -> None:
    """Listening would change the channel during the call."""
    async with cm.make_id() as cm_id:
        raw_of(cm_id).during["create_qp"] = lambda: gate.wait(TIME_LIMIT)
        call = asyncio.create_task(cm_id.create_qp(SMALL, pd=object()))  # type: ignore[arg-type]
        await eventually(lambda: "create_qp" in raw_of(cm_id).calls)
        with pytest.raises(BusyError):
            cm_id.listen()
        assert cm_id.state is S.IDLE
        gate.set()
        await call
        cm_id.listen()
    assert [channel.references for channel in cm.channels] == [0]


@pytest.mark.asyncio
async def test_a_listener_raises_the_reason_of_its_end(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen()
        task = asyncio.create_task(listener.get_request())
        await eventually(lambda: len(listener._changed) == 1)
        listener.handle_event(event(E.DEVICE_REMOVAL))
        with pytest.raises(DeviceRemoved):
            await task
    with pytest.raises(LocalClosed):
        await listener.get_request()


# --- accepting ---


@pytest.mark.asyncio
async def test_a_request_is_accepted(cm: FakeCm) -> None:
    async with cm.make_request() as request:
        task = asyncio.create_task(request.accept(PARAMETERS))
        await call_begun(request, "accept", S.ACCEPTING)
        request.handle_event(event(E.ESTABLISHED))
        await task
        assert request.state is S.CONNECTED


@pytest.mark.asyncio
async def test_a_request_that_cannot_be_accepted_has_failed(cm: FakeCm) -> None:
    async with cm.make_request() as request:
        raw_of(request).during["accept"] = failing(errno.EINVAL, "rdma_accept")
        with pytest.raises(ConnectError, match=r"10\.7\.1\.2:7471 could not be accepted"):
            await request.accept(PARAMETERS)
        assert request.state is S.FAILED


@pytest.mark.asyncio
@pytest.mark.parametrize("side", ["connect", "accept"])
@pytest.mark.parametrize("kinds", [[E.ESTABLISHED, E.DISCONNECTED], [E.DISCONNECTED]], ids=len)
async def test_a_peer_that_disconnects_at_once_was_connected(
    cm: FakeCm, side: str, kinds: list[CmEventType]
) -> None:
    """Messages that the peer sent before can still be received."""
    made = cm.make_request() if side == "accept" else cm.make_id(S.ROUTE_RESOLVED)
    async with made as cm_id:
        operation = cm_id.accept if side == "accept" else cm_id.connect
        task = asyncio.create_task(operation(PARAMETERS))
        await call_begun(cm_id, side, S.ACCEPTING if side == "accept" else S.CONNECTING)
        for kind in kinds:
            cm_id.handle_event(event(kind, private_data=kind.name.encode()))
        await task
        assert cm_id.state is S.DISCONNECTED
        assert isinstance(cm_id.failure("x"), PeerClosed)
        if E.ESTABLISHED in kinds:
            assert cm_id.established is not None
            assert cm_id.established.private_data == b"ESTABLISHED"


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [E.REJECTED, E.UNREACHABLE, E.CONNECT_ERROR])
async def test_a_peer_that_does_not_confirm_is_a_connect_error(
    cm: FakeCm, kind: CmEventType
) -> None:
    async with cm.make_request() as request:
        task = asyncio.create_task(request.accept(PARAMETERS))
        await call_begun(request, "accept", S.ACCEPTING)
        request.handle_event(event(kind))
        with pytest.raises(ConnectError):
            await task


@pytest.mark.asyncio
async def test_a_request_is_rejected(cm: FakeCm) -> None:
    async with cm.make_request() as request:
        request.reject(b"no")
        assert request.state is S.REFUSED
        with pytest.raises(LocalClosed):
            request.reject()
        with pytest.raises(LocalClosed):
            request.check_unanswered()
        assert raw_of(request).calls == ["reject"]


@pytest.mark.asyncio
async def test_rejecting_a_peer_that_has_disconnected_is_no_error(cm: FakeCm) -> None:
    async with cm.make_request() as request:
        raw_of(request).during["reject"] = failing(errno.EINVAL, "rdma_reject")
        request.reject()
        assert request.state is S.REFUSED


@pytest.mark.asyncio
async def test_a_new_request_is_unanswered(cm: FakeCm) -> None:
    async with cm.make_request() as request:
        request.check_unanswered()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "cause"), [(E.REJECTED, type(None)), (E.DEVICE_REMOVAL, DeviceRemoved)]
)
async def test_a_request_whose_peer_gave_up_raises_connect_error(
    cm: FakeCm, kind: CmEventType, cause: type[RdmaError | None]
) -> None:
    async with cm.make_request() as request:
        request.handle_event(event(kind, 4))
        with pytest.raises(ConnectError, match=r"10\.7\.1\.2:7471") as caught:
            request.check_unanswered()
        assert type(caught.value.__cause__) is cause
        assert request.state is S.CLOSED
        with pytest.raises(LocalClosed, match="answered already"):
            request.check_unanswered()


# --- the end ---


@pytest.mark.asyncio
@pytest.mark.parametrize("state", [S.ADDR_BOUND, S.ADDR_RESOLVED, S.ROUTE_RESOLVED, S.REQUESTED])
async def test_abort_wakes_a_waiting_task(cm: FakeCm, state: CmState) -> None:
    cm_id = cm.make_id(state)
    calls: dict[CmState, Callable[[], Coroutine[Any, Any, None]]] = {
        S.ADDR_BOUND: lambda: cm_id.resolve_addr(PEER),
        S.ADDR_RESOLVED: cm_id.resolve_route,
        S.ROUTE_RESOLVED: lambda: cm_id.connect(PARAMETERS),
        S.REQUESTED: lambda: cm_id.accept(PARAMETERS),
    }
    task = asyncio.create_task(calls[state]())
    await eventually(lambda: len(cm_id._changed) == 1)
    cm_id.abort()
    with pytest.raises(LocalClosed, match="closed while waiting"):
        await task
    await cm_id.aclose()


@pytest.mark.asyncio
async def test_abort_wakes_a_task_that_waits_for_requests(cm: FakeCm) -> None:
    listener = cm.make_id()
    listener.listen()
    task = asyncio.create_task(listener.get_request())
    await eventually(lambda: len(listener._changed) == 1)
    listener.abort()
    with pytest.raises(LocalClosed):
        await task


@pytest.mark.asyncio
async def test_closing_twice_destroys_once(cm: FakeCm) -> None:
    cm_id = cm.make_id()
    cm_id.abort()
    cm_id.abort()
    await asyncio.gather(cm_id.aclose(), cm_id.aclose())
    assert raw_of(cm_id).calls == ["destroy"]


@pytest.mark.asyncio
async def test_an_id_gets_no_events_while_it_is_destroyed(cm: FakeCm) -> None:
    cm_id, registered = cm.make_id(), list[bool]()
    address = raw_of(cm_id).address
    raw_of(cm_id).during["destroy"] = lambda: registered.append(address in cm.dispatcher.handlers)
    await cm_id.aclose()
    assert registered == [False]
    cm_id.handle_event(event(E.DEVICE_REMOVAL))
    assert cm_id.state is S.CLOSED


@pytest.mark.asyncio
async def test_cancelling_aclose_does_not_stop_it(cm: FakeCm, gate: threading.Event) -> None:
    cm_id = cm.make_id()
    raw_of(cm_id).during["destroy"] = lambda: assert_opened(gate)
    task = asyncio.create_task(cm_id.aclose())
    await asyncio.sleep(0.01)
    await cancel(task)
    gate.set()
    await cm_id.aclose()
    assert raw_of(cm_id).destroyed.is_set()


def assert_opened(gate: threading.Event) -> None:
    assert gate.wait(TIME_LIMIT)


@pytest.mark.asyncio
async def test_destruction_waits_for_a_call_whose_task_was_cancelled(
    cm: FakeCm, gate: threading.Event
) -> None:
    cm_id = cm.make_id(S.ROUTE_RESOLVED)
    raw = raw_of(cm_id)
    raw.during["connect"] = lambda: assert_opened(gate)
    task = asyncio.create_task(cm_id.connect(PARAMETERS))
    await eventually(lambda: raw.calls == ["connect"])
    await cancel(task)
    cm_id.abort()
    await asyncio.sleep(0.02)
    assert raw.calls == ["connect"]
    gate.set()
    await cm_id.aclose()
    assert raw.calls == ["connect", "destroy"]


@pytest.mark.asyncio
async def test_connecting_an_id_that_is_aborted_raises_local_closed(
    cm: FakeCm, gate: threading.Event
) -> None:
    cm_id = cm.make_id(S.ROUTE_RESOLVED)
    raw_of(cm_id).during["connect"] = lambda: assert_opened(gate)
    task = asyncio.create_task(cm_id.connect(PARAMETERS))
    await eventually(lambda: raw_of(cm_id).calls == ["connect"])
    cm_id.abort()
    gate.set()
    with pytest.raises(LocalClosed):
        await task
    await cm_id.aclose()


@pytest.mark.asyncio
async def test_memory_is_freed_after_the_id_and_before_release(cm: FakeCm) -> None:
    cm_id, order = cm.make_id(), list[str]()
    raw_of(cm_id).during["destroy"] = lambda: order.append("id")
    cm_id.handle.add_destroyed_callback(lambda: order.append("first"))
    cm_id.handle.add_destroyed_callback(lambda: order.append("second"))
    cm_id.handle.add_released_callback(lambda: order.append("released"))
    await cm_id.aclose()
    assert order == ["id", "second", "first", "released"]


@pytest.mark.asyncio
@pytest.mark.parametrize("slow", [False, True])
async def test_calls_that_can_take_long_run_in_the_blocking_pool(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    blocking_jobs: list[object] = []
    submit = blocking_pool.submit

    def record(job: Callable[[], None]) -> None:
        blocking_jobs.append(job)
        submit(job)

    monkeypatch.setattr(blocking_pool, "submit", record)
    cm_id = cm.make_id(S.ADDR_RESOLVED)
    task = asyncio.create_task(cm_id.resolve_route())
    await call_begun(cm_id, "resolve_route", S.ROUTE_QUERY)
    assert len(blocking_jobs) == 1
    await cancel(task)
    cm_id.handle.is_slow_to_destroy = slow
    await cm_id.aclose()
    assert len(blocking_jobs) == 1 + slow


@pytest.mark.asyncio
async def test_an_id_that_cannot_be_destroyed_is_logged(
    cm: FakeCm, caplog: pytest.LogCaptureFixture
) -> None:
    cm_id = cm.make_id()
    raw_of(cm_id).during["destroy"] = failing(errno.EINVAL, "rdma_destroy_id")
    await cm_id.aclose()
    assert "an id could not be destroyed" in caplog.text


@pytest.mark.asyncio
async def test_memory_of_a_queue_pair_that_is_not_destroyed_is_never_freed(
    cm: FakeCm, caplog: pytest.LogCaptureFixture
) -> None:
    cm_id, freed = cm.make_id(), list[str]()
    qp = raw_of(cm_id).qp = FakeQp(failure=VerbsError(errno.EBUSY, "ibv_destroy_qp"))
    cm_id.handle.add_destroyed_callback(lambda: freed.append("memory"))
    await cm_id.aclose()
    assert (qp.destroyed, freed) == (False, [])
    assert "a queue pair or its queues could not be destroyed" in caplog.text
    cm.dispatcher.release()


@pytest.mark.asyncio
async def test_every_change_calls_on_change(cm: FakeCm) -> None:
    cm_id, seen = cm.make_id(S.CONNECTED), list[CmState]()
    cm_id.on_change = lambda: seen.append(cm_id.state)
    cm_id.handle_event(event(E.ADDR_CHANGE))
    cm_id.handle_event(event(E.DISCONNECTED))
    await cm_id.aclose()
    assert seen == [S.CONNECTED, S.DISCONNECTED, S.CLOSED]


@pytest.mark.asyncio
async def test_starting_to_disconnect_twice_disconnects_once(cm: FakeCm) -> None:
    async with cm.make_id(S.CONNECTED) as cm_id:
        cm_id.start_disconnect()
        cm_id.start_disconnect()
        assert cm_id.state is S.DISCONNECTING
        await eventually(lambda: raw_of(cm_id).calls == ["disconnect"])
        cm_id.handle_event(event(E.DISCONNECTED))
        assert state_of(cm_id) is S.DISCONNECTED


@pytest.mark.asyncio
async def test_an_id_that_is_dropped_warns_and_is_destroyed(cm: FakeCm) -> None:
    ids = [cm.make_id()]
    raw = raw_of(ids[0])
    with pytest.warns(ResourceWarning, match="unclosed <AsyncCmId IDLE"):
        ids.clear()
    await eventually(raw.destroyed.is_set)


@pytest.mark.asyncio
async def test_an_id_is_destroyed_even_if_no_thread_can_start(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    # Idle threads of earlier tests must not run the jobs.
    monkeypatch.setattr(threadsafe_call, "_watcher", threadsafe_call._Watcher())
    # The default argument of SerialJobs.submit was bound when it was defined.
    pool = WorkerPool()
    monkeypatch.setattr(SerialJobs.submit, "__defaults__", (pool,))
    monkeypatch.setattr(threading.Thread, "start", start)
    cm_id = cm.make_id(S.ADDR_BOUND)
    task = asyncio.create_task(cm_id.resolve_addr(PEER))
    await eventually(lambda: len(cm_id._changed) == 1)
    cm_id.abort()
    with pytest.raises(LocalClosed):
        await task
    async with asyncio.timeout(TIME_LIMIT):
        await cm_id.aclose()
    assert raw_of(cm_id).calls == ["resolve_addr", "destroy"]


@pytest.mark.asyncio
async def test_no_call_is_made_after_destruction_has_begun(cm: FakeCm) -> None:
    cm_id, made = cm.make_id(), list[None]()
    cm_id.abort()
    with pytest.raises(LocalClosed):
        await cm_id.handle.call(lambda: made.append(None))
    await cm_id.aclose()
    with pytest.raises(LocalClosed):
        await cm_id.handle.call(lambda: made.append(None))
    assert made == []


def test_an_id_is_destroyed_after_its_loop_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    with fake_cm(loop, monkeypatch) as cm:
        cm_id = cm.make_id()
        raw = raw_of(cm_id)
        loop.close()
        cm_id.abort()
        assert raw.destroyed.wait(TIME_LIMIT)
        for _ in range(1000):
            if cm.dispatcher.users == 0:
                break
            threading.Event().wait(0.001)
        assert cm.dispatcher.users == 0


def test_closing_the_loop_during_aclose_causes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, errors = threading.Event(), list[object]()
    monkeypatch.setattr(threading, "excepthook", errors.append)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    with fake_cm(loop, monkeypatch) as cm:
        cm_id = cm.make_id()
        raw_of(cm_id).during["destroy"] = lambda: assert_opened(gate)
        task = loop.create_task(cm_id.aclose())
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        gate.set()
        for _ in range(1000):
            if cm_id.handle._is_destroyed or errors:
                break
            threading.Event().wait(0.001)
        threading.Event().wait(0.01)
        del task
    assert errors == []
