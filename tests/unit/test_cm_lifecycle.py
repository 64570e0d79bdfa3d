"""AsyncCmId: events and waiting, in every order; cancelling, failing and closing."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import pytest_asyncio
from cm_fakes import PEER, FakeCm, FakeQp, event, fake_cm, raw_of

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
from aiordma.loop import SerialJobs, blocking_pool, running_loop
from aiordma.loop import threadsafe_call as handing
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
        await eventually(lambda: not any(channel.holders for channel in made.channels))
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


async def begun(cm_id: AsyncCmId, call: str, state: CmState) -> None:
    """Wait until the C call was made and the id's task waits for an event."""
    await eventually(lambda: call in raw_of(cm_id).calls and cm_id.state is state)
    await eventually(lambda: len(cm_id._changed) == 1)


def failing(code: int, function: str) -> Callable[[], None]:
    def fail() -> None:
        raise VerbsError(code, function)

    return fail


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- the way of an active id ---


@pytest.mark.asyncio
async def test_an_id_connects(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await task

        task = asyncio.create_task(cm_id.resolve_route())
        await begun(cm_id, "resolve_route", S.ROUTE_QUERY)
        cm_id.handle_event(event(E.ROUTE_RESOLVED))
        await task

        task = asyncio.create_task(cm_id.connect(PARAMETERS))
        await begun(cm_id, "connect", S.CONNECTING)
        cm_id.handle_event(event(E.ESTABLISHED, private_data=b"welcome"))
        await task
        assert cm_id.state is S.CONNECTED
        assert cm_id.event is not None
        assert cm_id.event.private_data == b"welcome"
        assert raw_of(cm_id).calls == ["resolve_addr", "resolve_route", "connect"]
    assert cm_id.state is S.CLOSED


@pytest.mark.asyncio
async def test_an_event_may_come_before_the_call_returns(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        raw = raw_of(cm_id)
        raw.during["resolve_addr"] = lambda: cm_id.handle_event(event(E.ADDR_RESOLVED))
        await cm_id.resolve_addr(PEER)

        overtaken = threading.Event()

        def resolve_route() -> None:
            def deliver() -> None:
                cm_id.handle_event(event(E.ROUTE_RESOLVED))
                overtaken.set()

            asyncio_loop.call_soon_threadsafe(deliver)
            assert overtaken.wait(TIME_LIMIT)

        asyncio_loop = asyncio.get_running_loop()
        raw.during["resolve_route"] = resolve_route
        await cm_id.resolve_route()
        assert cm_id.state is S.ROUTE_RESOLVED


@pytest.mark.asyncio
async def test_an_event_is_not_lost_with_a_cancelled_waiter(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        await cancel(task)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        assert cm_id.state is S.ADDR_RESOLVED
        raw_of(cm_id).during["resolve_route"] = lambda: None
        task = asyncio.create_task(cm_id.resolve_route())
        await begun(cm_id, "resolve_route", S.ROUTE_QUERY)
        cm_id.handle_event(event(E.ROUTE_RESOLVED))
        await task


@pytest.mark.asyncio
async def test_an_event_is_not_lost_with_a_waiter_cancelled_as_it_comes(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await cancel(task)
        assert cm_id.state is S.ADDR_RESOLVED


@pytest.mark.asyncio
async def test_a_hint_wakes_nobody_for_good(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        for kind in (E.ADDR_CHANGE, E.TIMEWAIT_EXIT, CmEventType(99)):
            cm_id.handle_event(event(kind))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done()
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await task


@pytest.mark.asyncio
async def test_a_failed_query_can_be_tried_again(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        cm_id.handle_event(event(E.ADDR_ERROR, -errno.ETIMEDOUT))
        with pytest.raises(AddressError, match=r"no RDMA path to 10\.7\.1\.2: .*timed out"):
            await task
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await eventually(lambda: len(cm_id._changed) == 1)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await task


@pytest.mark.asyncio
async def test_a_call_that_fails_at_once_leaves_the_id_where_it_was(cm: FakeCm) -> None:
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
        assert cm_id.state is S.ADDR_BOUND


@pytest.mark.asyncio
async def test_a_call_that_fails_in_its_thread_leaves_the_id_where_it_was(cm: FakeCm) -> None:
    async with cm.make_id(S.ADDR_RESOLVED) as cm_id:
        raw_of(cm_id).during["resolve_route"] = failing(errno.EINVAL, "rdma_resolve_route")
        with pytest.raises(RouteError, match="Invalid argument"):
            await cm_id.resolve_route()
        assert cm_id.state is S.ADDR_RESOLVED


# --- failing to connect ---


async def connecting(cm_id: AsyncCmId) -> asyncio.Task[None]:
    task = asyncio.create_task(cm_id.connect(PARAMETERS))
    await begun(cm_id, "connect", S.CONNECTING)
    return task


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "status", "error", "text"),
    [
        (E.REJECTED, 28, Rejected, r"10\.7\.1\.2:7471 rejected .* application refused"),
        (E.REJECTED, 8, Rejected, "nobody listens there"),
        (E.UNREACHABLE, -errno.ETIMEDOUT, Unreachable, r"10\.7\.1\.2:7471 does not answer"),
        (E.CONNECT_ERROR, -errno.EIO, ConnectError, r"could not connect to 10\.7\.1\.2:7471"),
        (E.DEVICE_REMOVAL, 0, DeviceRemoved, "device was removed"),
        (E.ADDR_RESOLVED, 0, RdmaError, "unexpected ADDR_RESOLVED event"),
    ],
)
async def test_what_goes_wrong_while_connecting_is_told(
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
async def test_the_first_failure_is_the_one_that_is_told(cm: FakeCm) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED) as cm_id:
        task = await connecting(cm_id)
        cm_id.handle_event(event(E.UNREACHABLE))
        cm_id.handle_event(event(E.REJECTED, 8))
        cm_id.handle_event(event(E.DEVICE_REMOVAL))
        with pytest.raises(Unreachable):
            await task
        assert isinstance(cm_id.failure("x"), Unreachable)


@pytest.mark.asyncio
async def test_a_failure_has_a_new_traceback_each_time(cm: FakeCm) -> None:
    async with cm.make_id(S.CONNECTED) as cm_id:
        assert cm_id.failure("x") is None
        cm_id.handle_event(event(E.DISCONNECTED))
        assert isinstance(cm_id.failure("x"), PeerClosed)
        assert cm_id.failure("x") is not cm_id.failure("x")


@pytest.mark.asyncio
async def test_on_iwarp_a_connect_fails_as_tcp_does(cm: FakeCm) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED, iwarp=True) as cm_id:
        raw_of(cm_id).during["connect"] = failing(errno.ECONNREFUSED, "rdma_connect")
        with pytest.raises(Rejected, match="Connection refused"):
            await cm_id.connect(PARAMETERS)


@pytest.mark.asyncio
async def test_elsewhere_it_stays_a_verbs_error(cm: FakeCm) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED) as cm_id:
        raw_of(cm_id).during["connect"] = failing(errno.EINVAL, "rdma_connect")
        with pytest.raises(VerbsError, match="rdma_connect"):
            await cm_id.connect(PARAMETERS)


@pytest.mark.asyncio
async def test_what_is_prepared_comes_before_the_call(cm: FakeCm) -> None:
    async with cm.make_id(S.ROUTE_RESOLVED) as cm_id:
        raw = raw_of(cm_id)
        raw.during["connect"] = failing(errno.EINVAL, "rdma_connect")
        with pytest.raises(VerbsError):
            await cm_id.connect(PARAMETERS, lambda: raw.calls.append("prepare"))
        assert raw.calls == ["prepare", "connect"]
        with pytest.raises(ZeroDivisionError):
            await cm_id.connect(PARAMETERS, lambda: 1 // 0)  # type: ignore[arg-type,return-value]
        assert raw.calls == ["prepare", "connect"]


# --- misuse ---


@pytest.mark.asyncio
async def test_a_second_call_is_refused_while_one_is_under_way(cm: FakeCm) -> None:
    async with cm.make_id() as cm_id:
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await begun(cm_id, "resolve_addr", S.ADDR_QUERY)
        with pytest.raises(RdmaError, match="not possible in state ADDR_QUERY"):
            await cm_id.resolve_addr(PEER)
        cm_id.handle_event(event(E.ADDR_RESOLVED))
        await task
        assert raw_of(cm_id).calls == ["resolve_addr"]


@pytest.mark.asyncio
async def test_two_tasks_may_not_wait_for_one_id(cm: FakeCm) -> None:
    async with cm.make_id(S.ADDR_BOUND) as cm_id:
        task = asyncio.create_task(cm_id.join_multicast(PEER))
        await begun(cm_id, "join_multicast", S.ADDR_BOUND)
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
async def test_calls_at_the_wrong_time_are_refused_and_never_made(
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


# --- the way of a listener ---


@pytest.mark.asyncio
async def test_requests_come_in_order_before_anybody_waits(cm: FakeCm) -> None:
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
async def test_two_tasks_may_not_wait_for_requests(cm: FakeCm) -> None:
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
async def test_closing_a_listener_rejects_the_requests_that_wait(cm: FakeCm) -> None:
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
        assert channel.holders == 3  # the listener, the loop, and the request
        async with await listener.get_request() as request:
            assert channel.holders == 2
            assert raw_of(request).calls == ["migrate"]


@pytest.mark.asyncio
async def test_a_request_whose_device_went_away_is_passed_over(cm: FakeCm) -> None:
    async with cm.make_id() as listener:
        listener.listen()
        listener.handle_event(cm.request_event(b"gone"))
        *_, gone = cm.ids.values()
        gone.during["migrate"] = failing(errno.ENXIO, "rdma_migrate_id")
        listener.handle_event(cm.request_event(b"here"))
        async with await listener.get_request() as request:
            assert request.event is not None
            assert request.event.private_data == b"here"
        await eventually(gone.destroyed.is_set)


@pytest.mark.asyncio
async def test_a_listener_is_handed_over_as_a_whole(cm: FakeCm) -> None:
    """Nothing is asked of librdmacm, so nothing can be lost there."""
    listener = cm.make_id()
    listener.listen()
    listener.handle_event(cm.request_event(b"waits"))
    *_, raw = cm.ids.values()
    [channel] = cm.channels
    before = list(raw_of(listener).calls)
    moved = await listener.migrate(None)
    assert listener.state is S.CLOSED
    assert channel.holders == 2  # the loop reads it no more
    assert raw_of(moved).calls == before
    assert raw.calls == []
    async with await moved.get_request() as request:
        assert request.cm_id is raw
        assert raw.calls == ["migrate"]
        assert channel.holders == 1
    await moved.aclose()


@pytest.mark.asyncio
async def test_an_id_does_not_listen_in_the_middle_of_a_call(
    cm: FakeCm, gate: threading.Event
) -> None:
    """It would change the channel under the call."""
    async with cm.make_id() as cm_id:
        raw_of(cm_id).during["create_qp"] = lambda: gate.wait(TIME_LIMIT)  # type: ignore[assignment,return-value]
        call = asyncio.create_task(cm_id.create_qp(SMALL, pd=object()))  # type: ignore[arg-type]
        await eventually(lambda: "create_qp" in raw_of(cm_id).calls)
        with pytest.raises(BusyError):
            cm_id.listen()
        assert cm_id.state is S.IDLE
        gate.set()
        await call
        cm_id.listen()
    assert [channel.holders for channel in cm.channels] == [0]


@pytest.mark.asyncio
async def test_a_listener_tells_what_became_of_it(cm: FakeCm) -> None:
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
        await begun(request, "accept", S.ACCEPTING)
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
async def test_a_peer_that_leaves_at_once_was_connected(
    cm: FakeCm, side: str, kinds: list[CmEventType]
) -> None:
    """What it sent before can still be received."""
    made = cm.make_request() if side == "accept" else cm.make_id(S.ROUTE_RESOLVED)
    async with made as cm_id:
        operation = cm_id.accept if side == "accept" else cm_id.connect
        task = asyncio.create_task(operation(PARAMETERS))
        await begun(cm_id, side, S.ACCEPTING if side == "accept" else S.CONNECTING)
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
        await begun(request, "accept", S.ACCEPTING)
        request.handle_event(event(kind))
        with pytest.raises(ConnectError):
            await task


@pytest.mark.asyncio
async def test_a_request_is_refused(cm: FakeCm) -> None:
    async with cm.make_request() as request:
        request.reject(b"no")
        assert request.state is S.REFUSED
        with pytest.raises(LocalClosed):
            request.reject()
        with pytest.raises(LocalClosed):
            request.check_unanswered()
        assert raw_of(request).calls == ["reject"]


@pytest.mark.asyncio
async def test_refusing_a_peer_that_is_gone_is_no_error(cm: FakeCm) -> None:
    async with cm.make_request() as request:
        raw_of(request).during["reject"] = failing(errno.EINVAL, "rdma_reject")
        request.reject()
        assert request.state is S.REFUSED


@pytest.mark.asyncio
async def test_a_request_that_nobody_answered_is_unanswered(cm: FakeCm) -> None:
    async with cm.make_request() as request:
        request.check_unanswered()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "cause"), [(E.REJECTED, type(None)), (E.DEVICE_REMOVAL, DeviceRemoved)]
)
async def test_a_request_whose_peer_gave_up_says_so(
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
async def test_abort_wakes_who_waits(cm: FakeCm, state: CmState) -> None:
    cm_id = cm.make_id(state)
    start = {
        S.ADDR_BOUND: lambda: cm_id.resolve_addr(PEER),
        S.ADDR_RESOLVED: cm_id.resolve_route,
        S.ROUTE_RESOLVED: lambda: cm_id.connect(PARAMETERS),
        S.REQUESTED: lambda: cm_id.accept(PARAMETERS),
    }[state]
    task = asyncio.create_task(start())
    await eventually(lambda: len(cm_id._changed) == 1)
    cm_id.abort()
    with pytest.raises(LocalClosed, match="closed while waiting"):
        await task
    await cm_id.aclose()


@pytest.mark.asyncio
async def test_abort_wakes_who_waits_for_requests(cm: FakeCm) -> None:
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
async def test_no_event_comes_to_an_id_that_is_being_destroyed(cm: FakeCm) -> None:
    cm_id, known = cm.make_id(), list[bool]()
    address = raw_of(cm_id).address
    raw_of(cm_id).during["destroy"] = lambda: known.append(address in cm.dispatcher.handlers)
    await cm_id.aclose()
    assert known == [False]
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
async def test_destruction_waits_for_a_call_whose_owner_was_cancelled(
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
async def test_an_id_aborted_while_it_connects_tells_that_it_was(
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
async def test_what_can_take_long_does_not_keep_short_calls_waiting(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    parked: list[object] = []
    submit = blocking_pool.submit

    def park(job: Callable[[], None]) -> None:
        parked.append(job)
        submit(job)

    monkeypatch.setattr(blocking_pool, "submit", park)
    cm_id = cm.make_id(S.ADDR_RESOLVED)
    task = asyncio.create_task(cm_id.resolve_route())
    await begun(cm_id, "resolve_route", S.ROUTE_QUERY)
    assert len(parked) == 1
    await cancel(task)
    cm_id.handle.is_slow_to_destroy = slow
    await cm_id.aclose()
    assert len(parked) == 1 + slow


@pytest.mark.asyncio
async def test_an_id_that_cannot_be_destroyed_is_logged(
    cm: FakeCm, caplog: pytest.LogCaptureFixture
) -> None:
    cm_id = cm.make_id()
    raw_of(cm_id).during["destroy"] = failing(errno.EINVAL, "rdma_destroy_id")
    await cm_id.aclose()
    assert "an id could not be destroyed" in caplog.text


@pytest.mark.asyncio
async def test_memory_under_a_queue_pair_that_lives_on_is_never_freed(
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
async def test_every_change_is_announced(cm: FakeCm) -> None:
    cm_id, seen = cm.make_id(S.CONNECTED), list[CmState]()
    cm_id.on_change = lambda: seen.append(cm_id.state)
    cm_id.handle_event(event(E.ADDR_CHANGE))
    cm_id.handle_event(event(E.DISCONNECTED))
    await cm_id.aclose()
    assert seen == [S.CONNECTED, S.DISCONNECTED, S.CLOSED]


@pytest.mark.asyncio
async def test_disconnecting_is_asked_for_once(cm: FakeCm) -> None:
    async with cm.make_id(S.CONNECTED) as cm_id:
        cm_id.start_disconnect()
        cm_id.start_disconnect()
        assert cm_id.state is S.DISCONNECTING
        await eventually(lambda: raw_of(cm_id).calls == ["disconnect"])
        cm_id.handle_event(event(E.DISCONNECTED))
        assert cm_id.state is S.DISCONNECTED


@pytest.mark.asyncio
async def test_an_id_that_is_dropped_warns_and_is_destroyed(cm: FakeCm) -> None:
    ids = [cm.make_id()]
    raw = raw_of(ids[0])
    with pytest.warns(ResourceWarning, match="unclosed <AsyncCmId IDLE"):
        ids.clear()
    await eventually(raw.destroyed.is_set)


@pytest.mark.asyncio
async def test_an_id_is_destroyed_even_where_no_thread_is_to_be_had(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    # No thread that idles since an earlier test may help out.
    monkeypatch.setattr(handing, "_watcher", handing._Watcher())
    # SerialJobs' own default was bound when it was defined.
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


def test_a_loop_closed_meanwhile_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_loop_closed_under_a_waiting_task_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
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
            if cm_id.handle._finished or errors:
                break
            threading.Event().wait(0.001)
        threading.Event().wait(0.01)
        del task
    assert errors == []
