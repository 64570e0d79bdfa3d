"""DatagramEndpoint: peers, datagrams, groups, address handles, and the ends of an endpoint."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import loops
import pytest
from simulator import Simulation
from simulator.world import ffi, lib

import aiordma
from aiordma import (
    AddressError,
    BusyError,
    ConnectError,
    DatagramOptions,
    DatagramPeer,
    DeviceRemoved,
    LocalClosed,
    RdmaError,
    Rejected,
    RouteError,
    Unreachable,
    VerbsError,
    WorkRequestError,
)
from aiordma.datagrams import address_handles, datagram_receive_ring
from aiordma.datagrams.datagram_endpoint import DatagramEndpoint
from aiordma.enums import AsyncEventType, CmEventType, WcStatus

pytestmark = pytest.mark.transport("IB")

NEAR, FAR, NEAR6, FAR6, ABSENT = "10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "10.9.9.9"
GROUP = "239.1.1.1"
PORT = 7174
DEFAULT = DatagramOptions()


@asynccontextmanager
async def pair(
    near: DatagramOptions = DEFAULT,
    far: DatagramOptions = DEFAULT,
    hosts: tuple[str, str] = (NEAR, FAR),
) -> AsyncIterator[tuple[DatagramEndpoint, DatagramEndpoint, DatagramPeer]]:
    """Open an endpoint on each device, and resolve the far one from the near one."""
    async with (
        aiordma.open_datagram((hosts[0], 0), options=near) as here,
        aiordma.open_datagram((hosts[1], PORT), options=far) as there,
    ):
        serving = loops.create_task(there.serve(b"welcome"))
        await loops.sleep(0.001)
        yield here, there, await here.resolve(hosts[1], PORT)
        there.abort()
        await loops.gather(serving, return_exceptions=True)


# --- peers ---


@pytest.mark.parametrize("hosts", [(NEAR, FAR), (NEAR6, FAR6)])
async def test_a_peer_is_resolved_and_answers(
    simulation: Simulation, hosts: tuple[str, str]
) -> None:
    async with pair(hosts=hosts) as (here, there, peer):
        assert (peer.address, peer.qp_num) == ((hosts[1], PORT), there.qp_num)
        assert peer.private_data.rstrip(b"\0") == b"welcome"
        for data, imm in ((b"", None), ([b"two ", b"parts"], 0xFEEDBEEF), (bytes(1024), 0)):
            await here.send_to(peer, data, imm=imm)  # type: ignore[arg-type]
            got = await there.recv_from()
            expected = b"".join(data) if isinstance(data, list) else data
            assert (got.data, got.imm, got.group) == (expected, imm, None)
            assert (got.peer.host, got.peer.qp_num) == (hosts[0], here.qp_num)
            await there.send_to(got.peer, b"answer")
            assert (await here.recv_from()).peer == peer
        with pytest.raises(ValueError, match="the limit is 1024 bytes"):
            await here.send_to(peer, bytes(1025))


async def test_a_request_can_be_rejected_or_dropped(simulation: Simulation) -> None:
    async with (
        aiordma.open_datagram((NEAR, 0)) as here,
        aiordma.open_datagram((FAR, PORT), options=DatagramOptions(tos=4)) as there,
    ):
        with pytest.raises(RdmaError, match="call listen"):
            await there.get_request()
        with pytest.raises(Rejected, match="no listener"):
            await here.resolve(FAR, PORT)
        there.listen()
        task = loops.create_task(here.resolve(FAR, PORT, b"hello"))
        request = await there.get_request()
        assert request.private_data.rstrip(b"\0") == b"hello"
        assert repr(request).startswith(f"<DatagramRequest from {NEAR} port ")
        assert request.peer_address[0] == NEAR
        for answer in (request.accept, request.reject):
            with pytest.raises(ValueError, match="at most 136"):
                await answer(bytes(137))
        await request.reject(b"no")
        with pytest.raises(Rejected, match="application refused") as caught:
            await task
        assert caught.value.private_data.rstrip(b"\0") == b"no"
        for answer in (request.accept, request.reject):
            with pytest.raises(LocalClosed, match="answered already"):
                await answer()
        task = loops.create_task(here.resolve(FAR, PORT))
        request = await there.get_request()
        with pytest.warns(ResourceWarning, match="unclosed"):
            del request
        with pytest.raises(Rejected):
            await task


async def test_a_peer_that_gave_up_is_skipped(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma")
    async with (
        aiordma.open_datagram((NEAR, 0)) as here,
        aiordma.open_datagram((FAR, PORT)) as there,
    ):
        there.listen()
        task = loops.create_task(here.resolve(FAR, PORT))
        request = await there.get_request()
        simulation.world.calls.fail("rdma_accept", errno.EINVAL)
        with pytest.raises(ConnectError):
            await request.accept()
        with pytest.raises(Rejected):
            await task
        simulation.world.calls.fail("rdma_accept", errno.EINVAL)
        serving = loops.create_task(there.serve())
        with pytest.raises(Rejected):
            await here.resolve(FAR, PORT)
        assert (await here.resolve(FAR, PORT)).qp_num == there.qp_num
        there.abort()
        await serving
    assert "could not be accepted" in caplog.text


async def test_a_peer_that_cannot_be_resolved_raises(simulation: Simulation) -> None:
    options = DatagramOptions(resolve_timeout=0.5, tos=4)
    async with aiordma.open_datagram((NEAR, 0), options=options) as here:
        with pytest.raises(AddressError):
            await here.resolve(ABSENT, PORT)
        with pytest.raises(ConnectError, match="no address of the local address's family"):
            await here.resolve(FAR6, PORT)
        simulation.cm.unreachable.add(FAR)
        with pytest.raises(Unreachable):
            await here.resolve(FAR, PORT)
        simulation.world.calls.fail("rdma_resolve_route", errno.EINVAL)
        with pytest.raises(RouteError):
            await here.resolve(FAR, PORT)
        simulation.world.calls.fail("rdma_set_option", errno.EINVAL)
        with pytest.raises(VerbsError, match="rdma_set_option"):
            await here.resolve(FAR, PORT)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "here"])
async def test_an_endpoint_is_at_the_address_of_one_device(
    simulation: Simulation, host: str
) -> None:
    simulation.names["here"] = ["127.0.0.1", ABSENT]
    with pytest.raises((AddressError, VerbsError)):
        await aiordma.open_datagram((host, 0))
    simulation.names["here"].append(NEAR)
    async with aiordma.open_datagram(("here", 0)) as endpoint:
        assert endpoint.local_address[0] == NEAR
        with pytest.raises(VerbsError, match="port is in use"):
            await aiordma.open_datagram(endpoint.local_address)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (DatagramOptions(recv_depth=1 << 15), "sim0 allows"),
        (DatagramOptions(max_message_size=1025), "the port's MTU carries 1024"),
    ],
)
async def test_options_beyond_the_device_are_refused(
    simulation: Simulation, options: DatagramOptions, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        await aiordma.open_datagram((NEAR, 0), options=options)


# --- sending and receiving ---


async def test_a_full_send_queue_makes_senders_wait(simulation: Simulation) -> None:
    async with pair(DatagramOptions(send_depth=1), DatagramOptions(recv_depth=4)) as ends:
        here, there, peer = ends
        tasks = [loops.create_task(here.send_to(peer, b"%d" % number)) for number in range(4)]
        await loops.sleep(1)
        for task in tasks:
            await task
        assert [(await there.recv_from()).data for _ in tasks] == [b"0", b"1", b"2", b"3"]
        for number in range(6):  # two of them find no receive
            await here.send_to(peer, b"%d" % number)
        await loops.sleep(1)
        assert [(await there.recv_from()).data for _ in range(4)] == [b"0", b"1", b"2", b"3"]


async def test_a_cancelled_receive_loses_no_datagram(simulation: Simulation) -> None:
    async with pair() as (here, there, peer):
        task = loops.create_task(there.recv_from())
        await loops.sleep(0.1)
        for call in (there.recv_from, there.get_request):
            with pytest.raises(BusyError):
                await call()
        task.cancel()
        await loops.wait([task])
        await here.send_to(peer, b"kept")
        assert (await there.recv_from()).data == b"kept"


async def test_the_senders_are_cached_up_to_a_limit(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datagram_receive_ring, "MAX_SENDERS", 2)
    async with pair() as (here, there, peer):
        for _ in range(2):
            await here.send_to(peer, b"")
        first = await there.recv_from()
        assert (await there.recv_from()).peer is first.peer
        for _ in range(3):
            async with aiordma.open_datagram((NEAR, 0)) as other:
                await other.send_to(peer, b"")
                assert (await there.recv_from()).peer.qp_num == other.qp_num
                assert len(there._queue_pair.receive_ring._senders) <= 2


# --- address handles ---


async def test_a_handle_is_created_once_for_tasks_that_need_it(simulation: Simulation) -> None:
    counts = simulation.world.calls.counts
    async with pair() as (here, _, peer):
        simulation.world.calls.delay("ibv_create_ah", before=1)
        await loops.gather(*(here.send_to(peer, b"") for _ in range(5)))
        assert counts["ibv_create_ah"] == 1
        simulation.world.calls.fail("ibv_create_ah", errno.ETIMEDOUT)
        group = await here.join(GROUP)
        outcomes = await loops.gather(
            *(here.send_to(group, b"") for _ in range(2)), return_exceptions=True
        )
        assert {type(one) for one in outcomes} == {VerbsError, type(None)}
    assert counts["ibv_destroy_ah"] == 2


async def test_a_slow_handle_delays_no_other_send(simulation: Simulation) -> None:
    async with pair() as (here, there, peer):
        await here.send_to(peer, b"first")
        simulation.world.calls.delay("ibv_create_ah", before=3)
        group = await here.join(GROUP, send_only=True)
        slow = loops.create_task(here.send_to(group, b""))
        await loops.sleep(1)
        await here.send_to(peer, b"second")
        assert [(await there.recv_from()).data for _ in range(2)] == [b"first", b"second"]
        assert not slow.done()
        slow.cancel()  # the handle is destroyed when it is made
        await loops.wait([slow])
        await loops.sleep(5)
        assert simulation.world.calls.counts["ibv_destroy_ah"] == 1
        await here.send_to(group, b"")


async def test_the_least_recently_used_handle_is_evicted_after_its_sends(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_handles, "MAX_HANDLES", 1)
    counts = simulation.world.calls.counts
    async with pair() as (here, there, peer):
        first = loops.create_task(here.send_to(peer, b"1"))
        group = await here.join(GROUP, send_only=True)
        await first
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


# --- groups ---


async def test_members_of_a_group_receive_a_copy_and_can_answer(simulation: Simulation) -> None:
    async with pair(near=DatagramOptions(multicast_loopback=False)) as (here, there, peer):
        async with await here.join(GROUP) as group, await there.join(GROUP):
            assert repr(group) == f"<MulticastGroup {GROUP}, joined>"
            with pytest.raises(RdmaError, match="already"):
                await here.join(GROUP)
            await here.send_to(group, b"to all")
            got = await there.recv_from()
            assert (got.data, got.group, got.peer.qp_num) == (b"to all", GROUP, here.qp_num)
            await there.send_to(got.peer, b"answer")
            assert (await here.recv_from()).data == b"answer"  # and no own copy before
            await there.leave(GROUP)
            with pytest.raises(RdmaError, match="is not in the group"):
                await there.leave(GROUP)
        with pytest.raises(LocalClosed, match="was left"):
            await here.send_to(group, b"")
        await group.leave()
        sender = await here.join(GROUP, send_only=True)
        await there.join(GROUP)
        await there.send_to(await there.join("239.1.1.2"), b"own copy")
        assert (await there.recv_from()).group == "239.1.1.2"
        simulation.datagrams.end_membership(GROUP)
        await loops.sleep(1)
        with pytest.raises(ConnectError, match=GROUP):
            await here.send_to(sender, b"")
        assert peer.qp_num == there.qp_num


async def test_a_group_that_cannot_be_joined_leaves_nothing(simulation: Simulation) -> None:
    async with aiordma.open_datagram((NEAR, 0)) as here:
        with pytest.raises(ValueError, match="not the address of a multicast group"):
            await here.join(NEAR)
        with pytest.raises(VerbsError):
            await here.join("ff12::1")
        simulation.world.calls.fail("ibv_attach_mcast", errno.ENOMEM)
        with pytest.raises(VerbsError, match="ibv_attach_mcast"):
            await here.join(GROUP)
        await (await here.join(GROUP)).leave()


# --- the end ---


async def waiting_tasks(
    simulation: Simulation, ends: tuple[DatagramEndpoint, DatagramEndpoint, DatagramPeer]
) -> list[loops.Task[object]]:
    """Start a task of the near endpoint in each method that can wait. Its only send is stuck."""
    here, _, peer = ends
    here.listen()
    handle = await here._queue_pair._handles.acquire(peer.address_key)
    assert here._queue_pair._sends.try_reserve()
    tasks: list[loops.Task[object]] = [
        loops.create_task(here.recv_from()),
        loops.create_task(here.get_request()),
        loops.create_task(here.send_to(peer, b"")),
    ]
    await loops.sleep(1)
    handle.release()
    return tasks


SHALLOW = DatagramOptions(send_depth=1, recv_depth=2)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("removal", DeviceRemoved),
        ("poll failure", VerbsError),
        ("unexpected event", RdmaError),
        ("queue pair failure", RdmaError),
        ("request failure", WorkRequestError),
        ("abort", LocalClosed),
    ],
)
async def test_the_end_of_an_endpoint_ends_every_wait(
    simulation: Simulation, how: str, kind: type[RdmaError]
) -> None:
    async with pair(SHALLOW) as ends:
        here = ends[0]
        tasks = await waiting_tasks(simulation, ends)
        sim_id = simulation.cm.id_of(here._queue_pair.cm)
        qp = sim_id.qp
        assert qp is not None
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
        assert here.closed
        with pytest.raises(kind):
            here.listen()
        with pytest.raises(kind):
            await here.recv_from()


async def test_a_refused_send_ends_the_endpoint(simulation: Simulation) -> None:
    async with pair(DatagramOptions(max_inline=0)) as (here, _, peer):
        qp = simulation.cm.id_of(here._queue_pair.cm).qp
        assert qp is not None
        qp.pointer.sends.refusal = errno.EINVAL
        for _ in range(2):
            with pytest.raises(VerbsError, match="ibv_post_send"):
                await here.send_to(peer, b"copied")


async def test_a_send_that_fails_ends_the_endpoint(simulation: Simulation) -> None:
    async with pair() as (here, _, peer):
        qp = simulation.cm.id_of(here._queue_pair.cm).qp
        assert qp is not None
        await here.send_to(peer, b"lost")
        simulation.network.fail_queue_pair(qp)
        with pytest.raises(WorkRequestError, match="SEND"):
            await here.recv_from()


async def test_a_refused_receive_ends_the_endpoint(simulation: Simulation) -> None:
    async with pair() as (here, there, peer):
        await here.send_to(peer, b"last")
        await loops.sleep(1)
        qp = simulation.cm.id_of(there._queue_pair.cm).qp
        assert qp is not None
        qp.pointer.receives.refusal = errno.EINVAL
        assert (await there.recv_from()).data == b"last"
        with pytest.raises(VerbsError, match="ibv_post_recv"):
            await there.recv_from()


async def test_closing_waits_for_posted_sends_and_ends_the_iteration(
    simulation: Simulation,
) -> None:
    async with pair() as (here, there, peer):

        async def iterate() -> list[bytes]:
            return [one.data async for one in there]

        iterating = loops.create_task(iterate())
        await here.send_to(peer, b"sent")
        resolving = loops.create_task(here.resolve(ABSENT, PORT))
        await loops.sleep(0.0001)
        await here.aclose()
        await here.aclose()
        with pytest.raises(LocalClosed):
            await resolving
        await there.aclose()
        assert await iterating == [b"sent"]
        assert repr(here) == f"<DatagramEndpoint at {NEAR} port {here.local_address[1]}, closed>"
    endpoint = await aiordma.open_datagram((NEAR, 0))
    with pytest.warns(ResourceWarning, match="unclosed <DatagramEndpoint at"):
        del endpoint
