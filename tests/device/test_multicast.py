"""Multicast on a device: joining and leaving, loopback, many groups, send-only members."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import loops
import pytest
from cm_ids import SMALL, Kind, both_kinds

import aiordma
from aiordma import (
    DatagramEndpoint,
    DatagramOptions,
    LocalClosed,
    MulticastGroup,
    PortSpace,
    RdmaError,
    VerbsError,
)
from aiordma.datagrams import address_handles as handles
from aiordma.rdmacm import DeviceAddress, SocketAddress, parse_address

pytestmark = pytest.mark.transport("IB")

GROUP = "239.20.30.40"
OTHER_GROUP = "239.20.30.41"


@contextlib.asynccontextmanager
async def members(
    address: DeviceAddress, count: int, options: DatagramOptions | None = None
) -> AsyncIterator[list[tuple[DatagramEndpoint, MulticastGroup]]]:
    """Yield `count` endpoints that have joined GROUP, each with its group."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            opening = aiordma.open_datagram((address.host, 0), options=options or DatagramOptions())
            endpoint = await stack.enter_async_context(opening)
            found.append((endpoint, await endpoint.join(GROUP)))
        yield found


async def received(endpoint: DatagramEndpoint) -> aiordma.Datagram:
    return await endpoint.recv_from()


async def check_nothing_arrived(endpoint: DatagramEndpoint, sender: DatagramEndpoint) -> None:
    """Check that an endpoint got no copy of what the members of the group have received.

    The next datagram that it receives is one that `sender` sends to it alone.
    """
    serving = loops.create_task(endpoint.serve())
    await sender.send_to(await sender.resolve(*endpoint.local_address), b"not to a group")
    datagram = await received(endpoint)
    assert (datagram.data, datagram.group) == (b"not to a group", None)
    await loops.cancel(serving)


async def test_all_members_and_the_sender_receive_a_copy(address: DeviceAddress) -> None:
    async with members(address, 3) as found:
        sender, group = found[0]
        assert (group.address, group.qp_num, group.joined) == (GROUP, 0xFFFFFF, True)
        await sender.send_to(group, b"to all", imm=5)
        for endpoint, _ in found:
            datagram = await received(endpoint)
            assert (datagram.data, datagram.imm, datagram.group) == (b"to all", 5, GROUP)
            assert datagram.peer.qp_num == sender.qp_num
            assert datagram.peer.host == address.host


async def test_the_sender_of_a_datagram_to_a_group_can_be_answered(address: DeviceAddress) -> None:
    async with members(address, 2) as ((one, group), (other, _)):
        await one.send_to(group, b"who is there?")
        asked = await received(other)
        await other.send_to(asked.peer, b"me")
        assert (await received(one)).group == GROUP  # its own copy
        answer = await received(one)
        assert (answer.data, answer.group) == (b"me", None)
        assert answer.peer.qp_num == other.qp_num
        assert answer.peer.host == address.host


async def test_without_loopback_only_the_others_receive_a_copy(address: DeviceAddress) -> None:
    options = DatagramOptions(multicast_loopback=False, recv_depth=4)
    async with members(address, 2, options) as ((one, group), (other, _)):
        for number in range(20):  # more than there are receive buffers
            await one.send_to(group, b"%d" % number)
            assert (await received(other)).data == b"%d" % number
        await check_nothing_arrived(one, one)


async def test_an_endpoint_can_join_several_groups(address: DeviceAddress) -> None:
    async with members(address, 2) as ((one, first), (other, _)):
        second = await one.join(OTHER_GROUP)
        third = await other.join(OTHER_GROUP)
        await other.send_to(third, b"second")
        assert (await received(one)).group == OTHER_GROUP
        await one.leave(GROUP)
        assert not first.joined
        await other.send_to(third, b"still in the second")
        assert (await received(one)).data == b"still in the second"
        assert second.joined


async def test_an_endpoint_that_left_receives_nothing_and_cannot_send(
    address: DeviceAddress,
) -> None:
    async with members(address, 2) as ((one, group), (other, stays)):
        async with group:
            await other.send_to(stays, b"in")
            assert (await received(one)).data == b"in"
        await other.send_to(stays, b"out")
        assert [(await received(other)).data for _ in range(2)] == [b"in", b"out"]
        await check_nothing_arrived(one, other)
        with pytest.raises(LocalClosed, match="was left"):
            await one.send_to(group, b"too late")
        again = await one.join(GROUP)
        await other.send_to(stays, b"in again")
        while (await received(one)).data != b"in again":
            pass
        assert again.joined
        assert not group.joined


async def test_a_second_join_and_leaving_another_group_are_refused(address: DeviceAddress) -> None:
    async with members(address, 1) as ((one, group),):
        with pytest.raises(RdmaError, match=f"in the group {GROUP} already"):
            await one.join(GROUP)
        await group.leave()
        await group.leave()
        await one.leave(group)
        with pytest.raises(RdmaError, match=f"not in the group {GROUP}"):
            await one.leave(GROUP)
        with pytest.raises(RdmaError, match=f"not in the group {OTHER_GROUP}"):
            await one.leave(OTHER_GROUP)


async def test_a_send_only_member_receives_nothing(address: DeviceAddress) -> None:
    async with (
        members(address, 1) as ((listener, _),),
        aiordma.open_datagram((address.host, 0)) as sender,
        await sender.join(GROUP, send_only=True) as group,
    ):
        await sender.send_to(group, b"news")
        assert (await received(listener)).data == b"news"
        await check_nothing_arrived(sender, listener)


async def test_many_groups_can_be_joined_and_left_at_once(
    address: DeviceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "MAX_HANDLES", 3)
    names = [f"239.20.31.{number}" for number in range(12)]
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        groups = await loops.gather(*(endpoint.join(name) for name in names))
        for _ in range(2):
            await loops.gather(
                *(endpoint.send_to(group, group.address.encode()) for group in groups)
            )
            got = [await received(endpoint) for _ in names]
            assert sorted(datagram.data.decode() for datagram in got) == sorted(names)
            assert {datagram.group for datagram in got} == set(names)
            assert len(endpoint._queue_pair._handles) <= 3
        await loops.gather(*(group.leave() for group in groups[:6]))


@pytest.mark.parametrize("group", ["10.7.1.1", "fd07::1", "nonsense", ""])
async def test_join_of_an_invalid_group_raises_value_error(
    address: DeviceAddress, group: str
) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        with pytest.raises(ValueError, match=r"."):
            await endpoint.join(group)


async def test_join_of_an_ipv6_group_fails(any_address: DeviceAddress) -> None:
    """RoCE v2 has no IPv6 groups. A device that has them would need a different test."""
    async with aiordma.open_datagram((any_address.host, 0)) as endpoint:
        with pytest.raises(VerbsError, match="only IPv4 multicast groups") as caught:
            await endpoint.join("ff12::1234")
        assert caught.value.errno == 524
        assert endpoint._groups._joined == {}


async def test_a_cancelled_join_leaves_nothing(address: DeviceAddress) -> None:
    async with (
        members(address, 1) as ((sender, group),),
        aiordma.open_datagram((address.host, 0)) as endpoint,
    ):
        for number in range(20):
            joining = loops.create_task(endpoint.join(GROUP))
            await loops.sleep(0.001 * number)  # time is the subject: it selects the moment
            joining.cancel()
            done = await loops.gather(joining, return_exceptions=True)
            if isinstance(done[0], MulticastGroup):
                await done[0].leave()
        await endpoint._queue_pair.cm.handle.call(lambda: None)
        await sender.send_to(group, b"not to you")
        assert (await received(sender)).data == b"not to you"
        await check_nothing_arrived(endpoint, sender)


@both_kinds
async def test_an_id_that_joined_groups_leaves_them_or_can_be_closed(
    address: DeviceAddress, kind: Kind
) -> None:
    """A queue pair that is attached to a group cannot be destroyed, so it is detached first."""
    first, second = SocketAddress(GROUP, 0), SocketAddress(OTHER_GROUP, 0)
    async with await kind.create(PortSpace.UDP) as cm:
        cm.bind_addr(parse_address(address.host))
        await cm.create_qp(SMALL)
        joined = [await cm.join_multicast(group) for group in (first, second)]
        assert {event.qp_num for event in joined} == {0xFFFFFF}
        assert len({event.ah_attr.dgid for event in joined if event.ah_attr is not None}) == 2
        await cm.leave_multicast(second)
        with pytest.raises(VerbsError, match="rdma_leave_multicast"):
            await cm.leave_multicast(second)
