"""DatagramEndpoint: failures of peers, groups and address handles, and the ends of an endpoint."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock
from unittest.mock import Mock

import loops
import pytest
from simulator import Simulation
from simulator.pairs import CtrlC
from simulator.verbs import QueuePair
from simulator.world import ffi, lib

import aiordma
from aiordma import ConnectError, DatagramOptions, DatagramPeer, DeviceRemoved, open_datagram
from aiordma.datagrams import address_handles, datagram_receive_ring
from aiordma.datagrams.datagram_endpoint import DatagramEndpoint
from aiordma.datagrams.options import _RANGES
from aiordma.enums import AsyncEventType, CmEventType, WcStatus
from aiordma.errors import LocalClosed, RdmaError, Rejected, RouteError, Unreachable, VerbsError

pytestmark = pytest.mark.transport("IB")

NEAR, FAR, ABSENT, GROUP = "10.0.0.1", "10.0.0.2", "10.9.9.9", "239.1.1.1"
PORT = 7174
DEFAULT = DatagramOptions()


@asynccontextmanager
async def pair(
    near: DatagramOptions = DEFAULT,
) -> AsyncIterator[tuple[DatagramEndpoint, DatagramEndpoint, DatagramPeer]]:
    """Open an endpoint on each device, the near one with options, and resolve the far one."""
    async with open_datagram((NEAR, 0), options=near) as here, open_datagram((FAR, PORT)) as there:
        serving = loops.create_task(there.serve(b"welcome"))
        await loops.sleep(0.001)
        yield here, there, await here.resolve(FAR, PORT)
        there.abort()
        await loops.gather(serving, return_exceptions=True)


def queue_pair(simulation: Simulation, endpoint: DatagramEndpoint) -> QueuePair:
    qp = simulation.cm.id_of(endpoint._queue_pair.cm).qp
    assert qp is not None
    return qp


def test_every_number_of_the_options_has_a_range() -> None:
    numbers = {field.name for field in dataclasses.fields(DatagramOptions)}
    assert numbers - {name for name, _, _ in _RANGES} == {"multicast_loopback"}
    for name, low, high in _RANGES:
        for value in (low - 1, high + 1):
            wrong: dict[str, Any] = {name: value}
            with pytest.raises(ValueError, match=f"^{name} is {value}, not between {low} and"):
                DatagramOptions(**wrong)


async def test_a_peer_that_gave_up_is_skipped(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma")
    async with open_datagram((NEAR, 0)) as here, open_datagram((FAR, PORT)) as there:
        there.listen()
        task = loops.create_task(here.resolve(FAR, PORT))
        request = await there.get_request()
        assert repr(request).startswith(f"<DatagramRequest from {NEAR} port ")
        simulation.world.calls.fail("rdma_accept", errno.EINVAL)
        with pytest.raises(ConnectError):
            await request.accept()
        with pytest.raises(Rejected):
            await task
        simulation.world.calls.fail("rdma_accept", errno.EINVAL)
        serving = loops.create_task(there.serve())
        with pytest.raises(Rejected):
            await here.resolve(FAR, PORT)
        with pytest.raises(aiordma.BusyError):
            await there.get_request()
        assert (await here.resolve(FAR, PORT)).qp_num == there.qp_num
        there.abort()
        await serving
    assert "could not be accepted" in caplog.text


async def test_a_peer_that_cannot_be_resolved_raises(simulation: Simulation) -> None:
    options = DatagramOptions(resolve_timeout=0.5, tos=4)
    async with open_datagram((NEAR, 0), options=options) as here:
        simulation.cm.unreachable.add(FAR)
        with pytest.raises(Unreachable):
            await here.resolve(FAR, PORT)
        simulation.world.calls.fail("rdma_resolve_route", errno.EINVAL)
        with pytest.raises(RouteError):
            await here.resolve(FAR, PORT)
        simulation.world.calls.fail("rdma_set_option", errno.EINVAL)
        with pytest.raises(VerbsError, match="rdma_set_option"):
            await here.resolve(FAR, PORT)


async def test_an_endpoint_is_at_the_first_address_of_a_device(simulation: Simulation) -> None:
    simulation.names["here"] = ["127.0.0.1", ABSENT]
    with pytest.raises(VerbsError):
        await open_datagram(("here", 0))
    simulation.names["here"].append(NEAR)
    async with open_datagram(("here", 0)) as endpoint:
        assert endpoint.local_address[0] == NEAR


@mock.patch.object(datagram_receive_ring, "MAX_SENDERS", 2)
async def test_the_senders_are_cached_up_to_a_limit(simulation: Simulation) -> None:
    async with pair() as (here, there, peer):
        for _ in range(2):
            await here.send_to(peer, b"")
        first = await there.recv_from()
        assert (await there.recv_from()).peer is first.peer
        for _ in range(3):
            async with open_datagram((NEAR, 0)) as other:
                await other.send_to(peer, b"")
                assert (await there.recv_from()).peer.qp_num == other.qp_num
                assert len(there._queue_pair.receive_ring._senders) <= 2


async def test_a_handle_is_created_once_for_tasks_that_need_it(simulation: Simulation) -> None:
    counts = simulation.world.calls.counts
    async with pair() as (here, _, peer):
        simulation.world.calls.delay("ibv_create_ah", before=1)
        await loops.gather(*(here.send_to(peer, b"") for _ in range(5)))
        assert counts["ibv_create_ah"] == 1
        simulation.world.calls.fail("ibv_create_ah", errno.ETIMEDOUT)
        group = await here.join(GROUP)
        sends = (here.send_to(group, b"") for _ in range(2))
        outcomes = await loops.gather(*sends, return_exceptions=True)
        assert {type(one) for one in outcomes} == {VerbsError, type(None)}
    assert counts["ibv_destroy_ah"] == 2


async def test_a_handle_of_a_cancelled_send_is_destroyed(simulation: Simulation) -> None:
    async with pair() as (here, there, peer):
        await here.send_to(peer, b"first")
        simulation.world.calls.delay("ibv_create_ah", before=3)
        group = await here.join(GROUP, send_only=True)
        slow = loops.create_task(here.send_to(group, b""))
        await loops.sleep(1)
        await here.send_to(peer, b"second")  # is not delayed
        assert [(await there.recv_from()).data for _ in range(2)] == [b"first", b"second"]
        await loops.cancel(slow)
        await loops.sleep(5)
        assert simulation.world.calls.counts["ibv_destroy_ah"] == 1
        await here.send_to(group, b"")


@mock.patch.object(address_handles, "MAX_HANDLES", 1)
async def test_a_least_recently_used_handle_is_evicted_after_sends(simulation: Simulation) -> None:
    counts = simulation.world.calls.counts
    async with pair() as (here, there, peer):
        await here.send_to(peer, b"1")
        group = await here.join(GROUP, send_only=True)
        reference = await here._queue_pair._handles.acquire(peer.address_key)
        await here.send_to(group, b"2")
        await loops.sleep(1)
        assert (counts["ibv_destroy_ah"], len(here._queue_pair._handles)) == (0, 1)
        reference.release()
        await loops.sleep(1)
        assert counts["ibv_destroy_ah"] == 1
        await here.send_to(peer, b"3")  # evicts the handle of the group
        await loops.sleep(1)
        assert (counts["ibv_create_ah"], counts["ibv_destroy_ah"]) == (3, 2)
        assert [(await there.recv_from()).data for _ in range(2)] == [b"1", b"3"]


async def test_a_group_whose_membership_ended_cannot_be_sent_to(simulation: Simulation) -> None:
    async with open_datagram((NEAR, 0)) as here:
        simulation.world.calls.fail("ibv_attach_mcast", errno.ENOMEM)
        with pytest.raises(VerbsError, match="ibv_attach_mcast"):
            await here.join(GROUP)
        group = await here.join(GROUP)
        assert repr(group) == f"<MulticastGroup {GROUP}, joined>"
        simulation.datagrams.end_membership(GROUP)
        await loops.sleep(1)
        with pytest.raises(ConnectError, match=GROUP):
            await here.send_to(group, b"")


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("removal", DeviceRemoved),
        ("poll failure", VerbsError),
        ("unexpected event", RdmaError),
        ("queue pair failure", RdmaError),
        ("request failure", aiordma.WorkRequestError),
        ("abort", LocalClosed),
    ],
)
async def test_the_end_of_an_endpoint_ends_every_wait(
    simulation: Simulation, how: str, kind: type[RdmaError]
) -> None:
    async with pair(DatagramOptions(send_depth=1, recv_depth=2)) as (here, _, peer):
        here.listen()
        handle = await here._queue_pair._handles.acquire(peer.address_key)
        assert here._queue_pair._sends.try_reserve()  # the next send has to wait
        calls = here.recv_from(), here.get_request(), here.send_to(peer, b"")
        tasks = [loops.create_task(call) for call in calls]
        await loops.sleep(1)
        handle.release()
        qp = queue_pair(simulation, here)
        if how == "removal":
            simulation.cm.remove_device(simulation.near)
        elif how == "poll failure":
            qp.send_cq.pointer.poll_failure = -errno.EINVAL
            lib.sim_raise_completion_event(qp.send_cq.pointer)
        elif how == "unexpected event":
            simulation.cm.put(here._queue_pair.cm, CmEventType.DISCONNECTED)
        elif how == "queue pair failure":
            for event in (AsyncEventType.SQ_DRAINED, AsyncEventType.QP_FATAL):
                simulation.near.raise_event(event, ffi.addressof(qp.pointer.qp))
        elif how == "request failure":
            receive = qp.take_receive()
            assert receive is not None
            qp.complete_receive(receive, WcStatus.LOC_QP_OP_ERR)
        else:
            here.abort()
        for task in tasks:
            with pytest.raises(kind):
                await task
        assert repr(here).endswith(f" port {here.local_address[1]}, closed>")
        with pytest.raises(kind):
            here.listen()
        with pytest.raises(kind):
            await here.recv_from()


async def test_a_refused_or_failed_request_ends_the_endpoint(simulation: Simulation) -> None:
    async with pair(DatagramOptions(max_inline=0)) as (here, _, peer):
        queue_pair(simulation, here).pointer.sends.refusal = errno.EINVAL
        for _ in range(2):
            with pytest.raises(VerbsError, match="ibv_post_send"):
                await here.send_to(peer, b"copied")
    async with pair() as (here, _, peer):
        await here.send_to(peer, b"lost")
        simulation.network.fail_queue_pair(queue_pair(simulation, here))
        with pytest.raises(aiordma.WorkRequestError, match="SEND"):
            await here.recv_from()
    async with pair() as (here, there, peer):
        await here.send_to(peer, b"last")
        await loops.sleep(1)
        queue_pair(simulation, there).pointer.receives.refusal = errno.EINVAL
        assert (await there.recv_from()).data == b"last"
        with pytest.raises(VerbsError, match="ibv_post_recv"):
            await there.recv_from()


async def test_a_ctrl_c_after_posting_releases_nothing_that_is_in_flight(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as (here, there, peer):
        await here.send_to(peer, b"1")
        sends, handles = here._queue_pair._sends, here._queue_pair._handles
        (reference,) = handles._cached.values()
        before, post_to = (reference.count, sends.credits), sends.post_to

        def post_and_interrupt(*arguments: Any) -> None:
            post_to(*arguments)
            raise CtrlC

        with monkeypatch.context() as patch:
            patch.setattr(sends, "post_to", post_and_interrupt)
            with pytest.raises(CtrlC):
                await here.send_to(peer, b"2")
        assert (reference.count, sends.credits) == (before[0] + 1, before[1] - 1)
        assert [(await there.recv_from()).data for _ in range(2)] == [b"1", b"2"]


async def test_a_handle_that_is_made_for_a_cancelled_send_is_kept_or_destroyed(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the cache if the loop finds it; if not, the thread that has made it destroys it."""

    async def make_and_cancel(make: Any, *, serialized: bool) -> None:
        make(Mock(is_set=False))
        raise KeyError("cancelled")

    async with pair() as (here, _, peer):
        handles, counts = here._queue_pair._handles, simulation.world.calls.counts
        with monkeypatch.context() as patch:
            patch.setattr(handles, "_id_handle", Mock(wait=make_and_cancel))
            with pytest.raises(KeyError):
                await handles._add(peer.address_key)
        await here.send_to(peer, b"1")
        assert (len(handles), counts["ibv_create_ah"], counts["ibv_destroy_ah"]) == (1, 1, 0)
        made: list[Any] = []
        handles._create(peer.address_key, made, Mock(is_set=True))
        assert (made, counts["ibv_create_ah"], counts["ibv_destroy_ah"]) == ([], 2, 1)
