"""Datagrams on a device: resolving peers, sending, limits and closing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import threading
from array import array
from typing import TYPE_CHECKING

import loops
import pytest
from datagram_pairs import endpoints, two_endpoints
from helpers import host_name

import aiordma
from aiordma import (
    AddressError,
    BusyError,
    DatagramEndpoint,
    DatagramOptions,
    LocalClosed,
    RdmaError,
    Rejected,
    VerbsError,
)
from aiordma.datagrams.peer import AddressKey
from aiordma.rdmacm import DeviceAddress
from aiordma.verbs import AddressHandle, AddressHandleAttributes

if TYPE_CHECKING:
    from typing_extensions import Buffer

pytestmark = pytest.mark.transport("IB")

UDP_QKEY = 0x01234567
# The number of moments at which a test cancels a task.
MOMENTS = 100


# --- peers ---


async def test_a_peer_is_resolved_and_answers(any_address: DeviceAddress) -> None:
    async with endpoints(any_address) as (one, other, peer):
        assert one.local_address[0] == any_address.host
        assert one.local_address[1] > 0
        assert peer.address == other.local_address
        assert peer.host == any_address.host
        assert (peer.qp_num, peer.qkey) == (other.qp_num, UDP_QKEY)
        assert peer.private_data == b"welcome".ljust(136, b"\0")
        await one.send_to(peer, b"ping", imm=0xFEEDBEEF)
        asked = await other.recv_from()
        assert (asked.data, asked.imm, asked.group) == (b"ping", 0xFEEDBEEF, None)
        assert asked.peer.qp_num == one.qp_num
        assert asked.peer.host == any_address.host.partition("%")[0]
        await other.send_to(asked.peer, b"pong")
        answered = await one.recv_from()
        assert (answered.data, answered.imm) == (b"pong", None)
        assert answered.peer == peer
        assert len({answered.peer, peer, asked.peer}) == 2


async def test_private_data_of_the_maximum_length_is_sent_both_ways(address: DeviceAddress) -> None:
    async with two_endpoints(address) as (one, other):
        resolving = loops.create_task(one.resolve(*other.local_address, b"q" * 180))
        request = await other.get_request()
        assert request.private_data == b"q" * 180
        assert request.peer_address[0] == address.host
        for answer in (request.accept, request.reject):
            with pytest.raises(ValueError, match="private data of 137 bytes"):
                await answer(bytes(137))
        await request.accept(b"a" * 136)
        assert (await resolving).private_data == b"a" * 136
        for answer in (request.accept, request.reject):
            with pytest.raises(LocalClosed, match="answered already"):
                await answer()
        with pytest.raises(ValueError, match="private data of 181 bytes"):
            await one.resolve(*other.local_address, bytes(181))


async def test_resolve_of_a_peer_that_rejects_raises_rejected(address: DeviceAddress) -> None:
    async with two_endpoints(address) as (one, other):
        resolving = loops.create_task(one.resolve(*other.local_address))
        await (await other.get_request()).reject(b"go away")
        with pytest.raises(Rejected, match="the application refused") as caught:
            await resolving
        assert caught.value.status == 2
        assert caught.value.private_data == b"go away".ljust(136, b"\0")
        resolving = loops.create_task(one.resolve(*other.local_address))
        dropped = [await other.get_request()]
        with pytest.warns(ResourceWarning, match="unclosed"):
            dropped.clear()
        with pytest.raises(Rejected):
            await resolving


async def test_resolve_of_an_endpoint_that_does_not_listen_is_rejected(
    any_address: DeviceAddress,
) -> None:
    async with (
        aiordma.open_datagram((any_address.host, 0)) as one,
        aiordma.open_datagram((any_address.host, 0)) as other,
    ):
        with pytest.raises(Rejected, match="no listener at this port") as caught:
            await one.resolve(*other.local_address)  # which does not listen
        assert caught.value.status == 1


async def test_many_endpoints_can_resolve_one_at_once(address: DeviceAddress) -> None:
    async with endpoints(address) as (_, other, _), contextlib.AsyncExitStack() as stack:
        opening = [aiordma.open_datagram((address.host, 0)) for _ in range(12)]
        clients = [await stack.enter_async_context(each) for each in opening]
        resolving = [client.resolve(*other.local_address) for client in clients]
        peers = await loops.gather(*resolving)
        assert set(peers) == {peers[0]}
        for client in clients:
            await client.send_to(peers[0], b"%d" % client.qp_num)
        for _ in clients:
            datagram = await other.recv_from()
            assert datagram.data == b"%d" % datagram.peer.qp_num
            await other.send_to(datagram.peer, datagram.data)
        for client in clients:
            assert (await client.recv_from()).data == b"%d" % client.qp_num


async def test_an_endpoint_can_resolve_itself(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as alone:
        serving = loops.create_task(alone.serve())
        peer = await alone.resolve(*alone.local_address)
        await alone.send_to(peer, b"to myself")
        assert (await alone.recv_from()).data == b"to myself"
    await serving


async def test_open_and_resolve_by_name(address: DeviceAddress) -> None:
    with host_name(address) as name:
        async with aiordma.open_datagram((name, 0)) as endpoint:
            assert endpoint.local_address[0] == address.host
            serving = loops.create_task(endpoint.serve())
            peer = await endpoint.resolve(name, endpoint.local_address[1])
            assert peer.address == endpoint.local_address
        await serving


async def test_resolve_in_another_address_family_fails(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        other = "::1" if ":" not in address.host else "127.0.0.1"
        with pytest.raises(aiordma.ConnectError, match="no address of the local address's family"):
            await endpoint.resolve(other, 1)


async def test_resolve_of_an_absent_host_fails(address: DeviceAddress) -> None:
    options = DatagramOptions(resolve_timeout=0.5)
    async with aiordma.open_datagram((address.host, 0), options=options) as endpoint:
        with pytest.raises(AddressError, match="no RDMA path to"):
            await endpoint.resolve(absent(address.host), 1)


def absent(host: str) -> str:
    """Return an address in the same network that no machine has."""
    return str(ipaddress.ip_address(host) + 77)


def delay_handle(
    endpoint: DatagramEndpoint, delayed: AddressHandleAttributes
) -> tuple[threading.Event, threading.Event]:
    """Delay the creation of an address handle of an endpoint.

    Return two events. The first is set when a worker thread has begun to create the handle. The
    thread goes on when the second is set.
    """
    begun, go_on = threading.Event(), threading.Event()
    handles = endpoint._queue_pair._handles
    create = handles._create_handle

    def create_late(key: AddressKey) -> AddressHandle:
        if key == delayed:
            begun.set()
            loops.block_until(go_on.is_set, "the test to go on")
        return create(key)

    handles._create_handle = create_late
    return begun, go_on


async def test_send_to_an_absent_host_fails_and_does_not_block_others(
    address: DeviceAddress,
) -> None:
    async with endpoints(address) as (one, other, peer):
        assert isinstance(peer.address_key, AddressHandleAttributes)
        packed = ipaddress.ip_address(absent(address.host)).packed
        key = dataclasses.replace(
            peer.address_key, dgid=peer.address_key.dgid[: -len(packed)] + packed
        )
        resolving, go_on = delay_handle(one, key)
        lost = loops.create_task(one.send_to(dataclasses.replace(peer, address_key=key), b"lost"))
        try:
            await loops.until(resolving.is_set, "a thread to create the address handle")
            await one.send_to(peer, b"not held up")
            assert (await other.recv_from()).data == b"not held up"
            assert not lost.done()
        finally:
            go_on.set()
        with pytest.raises(VerbsError, match="ibv_create_ah"):
            await lost
        await one.send_to(peer, b"still there")
        assert (await other.recv_from()).data == b"still there"


# --- datagrams ---


async def test_every_size_arrives_without_its_global_routing_header(address: DeviceAddress) -> None:
    async with endpoints(address) as (one, other, peer):
        limit = one.max_message_size
        for size in (0, 1, 39, 40, 41, 64, 65, limit - 1, limit):
            message = bytes(index % 251 for index in range(size))
            await one.send_to(peer, message)
            assert (await other.recv_from()).data == message


async def test_a_datagram_larger_than_the_mtu_is_refused(address: DeviceAddress) -> None:
    async with endpoints(address, DatagramOptions(max_message_size=100)) as (one, other, peer):
        assert one.max_message_size == 100
        limit = other.max_message_size
        assert limit in (256, 512, 1024, 2048, 4096)
        for sender, most in ((one, 100), (other, limit)):
            with pytest.raises(ValueError, match=rf"of {most + 1} bytes; .* {most} .*MTU"):
                await sender.send_to(peer, bytes(most + 1))
        await one.send_to(peer, b"still there")
        assert (await other.recv_from()).data == b"still there"
        # An endpoint with a small max_message_size still receives what the MTU allows.
        serving = loops.create_task(one.serve())
        back = await other.resolve(*one.local_address)
        await other.send_to(back, bytes(limit))
        assert (await one.recv_from()).data == bytes(limit)
        serving.cancel()
    with pytest.raises(ValueError, match="the port's MTU carries"):
        await aiordma.open_datagram(
            (address.host, 0), options=DatagramOptions(max_message_size=4096)
        )


async def test_any_bytes_like_object_can_be_sent(address: DeviceAddress) -> None:
    async with endpoints(address) as (one, other, peer):
        cases: list[tuple[Buffer | list[Buffer] | tuple[Buffer, ...], bytes]] = [
            (bytearray(b"array"), b"array"),
            (memoryview(b"0123456789")[::2], b"02468"),
            (array("I", [1, 2]), array("I", [1, 2]).tobytes()),
            ([b"in ", bytearray(b"pieces")], b"in pieces"),
            ((), b""),
        ]
        for data, expected in cases:
            await one.send_to(peer, data)
            assert (await other.recv_from()).data == expected
        for number in (-1, 1 << 32):
            with pytest.raises(ValueError, match="32 bits"):
                await one.send_to(peer, b"", imm=number)


async def test_send_to_on_a_full_queue_waits(address: DeviceAddress) -> None:
    options = DatagramOptions(send_depth=2, max_inline=0)
    async with endpoints(address, options, DatagramOptions(recv_depth=512)) as (one, other, peer):
        count = 200
        await loops.gather(*(one.send_to(peer, b"%d" % number) for number in range(count)))
        received = {int((await other.recv_from()).data) for _ in range(count)}
        assert received == set(range(count))


async def test_only_datagrams_without_a_receive_buffer_are_lost(address: DeviceAddress) -> None:
    async with endpoints(address, far=DatagramOptions(recv_depth=4)) as (one, other, peer):
        for number in range(20):
            await one.send_to(peer, b"%d" % number)
        await loops.until(lambda: not len(one._queue_pair._sends), "all sends to complete")
        first = [(await other.recv_from()).data for _ in range(4)]
        assert first == [b"0", b"1", b"2", b"3"]

        async def send_repeatedly() -> None:
            while True:  # late datagrams can fill the buffers once more
                await one.send_to(peer, b"last")
                await loops.sleep(0.05)  # paces the sends, until one of them arrives

        sending = loops.create_task(send_repeatedly())
        while (await other.recv_from()).data != b"last":
            pass
        await loops.cancel(sending)


async def test_iteration_ends_when_the_endpoint_is_closed(address: DeviceAddress) -> None:
    collected = []

    async def collect(endpoint: DatagramEndpoint) -> None:
        async for datagram in endpoint:
            collected.append(datagram.data)

    async with endpoints(address) as (one, other, peer):
        collecting = loops.create_task(collect(other))
        await one.send_to(peer, b"a")
        await one.send_to(peer, b"b")
        await loops.until(lambda: len(collected) == 2, "both datagrams to be collected")
        await other.aclose()
        await collecting
        assert collected == [b"a", b"b"]


async def test_a_second_task_that_receives_raises_busy(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as one:
        receiving = loops.create_task(one.recv_from())
        await loops.settle()
        with pytest.raises(BusyError):
            await one.recv_from()
        await loops.cancel(receiving)


async def test_a_cancelled_recv_from_loses_no_datagram(address: DeviceAddress) -> None:
    async with endpoints(address) as (one, other, peer):
        for number in range(30):
            receiving = loops.create_task(other.recv_from())
            await loops.settle()
            await one.send_to(peer, b"%d" % number)
            if number % 3:
                await loops.sleep(0.001 * (number % 5))  # time is the subject: the moment
            receiving.cancel()
            received = await loops.gather(receiving, return_exceptions=True)
            if isinstance(received[0], BaseException):
                received = [await other.recv_from()]
            assert isinstance(received[0], aiordma.Datagram)
            assert received[0].data == b"%d" % number


async def test_a_cancelled_send_sends_nothing(address: DeviceAddress) -> None:
    options = DatagramOptions(send_depth=1)
    async with endpoints(address, options) as (one, other, peer):
        sending = [loops.create_task(one.send_to(peer, b"%d" % n)) for n in range(10)]
        await loops.sleep(0)
        for task in sending[1:]:
            task.cancel()
        done = await loops.gather(*sending, return_exceptions=True)
        await one.send_to(peer, b"end")
        sent = [b"%d" % n for n, result in enumerate(done) if result is None]
        for expected in [*sent, b"end"]:
            assert (await other.recv_from()).data == expected


# --- opening ---


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
async def test_open_at_an_address_of_no_device_fails_with_advice(
    address: DeviceAddress, host: str
) -> None:
    with pytest.raises(AddressError, match="aiordma devices"):
        await aiordma.open_datagram((host, 0))


async def test_open_at_an_address_of_another_machine_fails(address: DeviceAddress) -> None:
    with pytest.raises(VerbsError, match="rdma_bind_addr"):
        await aiordma.open_datagram(("192.0.2.1", 0))


async def test_open_at_a_port_in_use_fails(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        with pytest.raises(VerbsError) as caught:
            await aiordma.open_datagram(endpoint.local_address)
        assert caught.value.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
        where = endpoint.local_address
    async with aiordma.open_datagram(where) as again:
        assert again.local_address == where


@pytest.mark.transport("IWARP")
async def test_open_on_iwarp_fails_with_a_reason(address: DeviceAddress) -> None:
    with pytest.raises(VerbsError, match="iWARP, for example, has no datagrams") as caught:
        await aiordma.open_datagram((address.host, 0))
    assert caught.value.errno == errno.EOPNOTSUPP


async def test_queues_deeper_than_the_device_allows_are_refused(address: DeviceAddress) -> None:
    with pytest.raises(ValueError, match=f"{address.device} allows a send_depth"):
        await aiordma.open_datagram(
            (address.host, 0), options=DatagramOptions(recv_depth=1 << 20, send_depth=1 << 20)
        )


# --- closing ---


async def test_closing_ends_every_wait(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as other:
        other.listen()
        one = await aiordma.open_datagram((address.host, 0))
        one.listen()
        waiting = [
            loops.create_task(one.recv_from()),
            loops.create_task(one.get_request()),
            loops.create_task(one.resolve(*other.local_address)),
        ]
        request = await other.get_request()
        await one.aclose()
        for result in await loops.gather(*waiting, return_exceptions=True):
            assert isinstance(result, LocalClosed), result
        assert one.closed
        with pytest.raises(LocalClosed):
            await one.resolve(*other.local_address)
        with pytest.raises(LocalClosed):
            await one.join("239.1.1.1")
        with pytest.raises(LocalClosed):
            one.listen()
        await request.reject()
        await one.aclose()


async def test_aclose_sends_posted_datagrams_first(address: DeviceAddress) -> None:
    async with endpoints(address) as (one, other, peer):
        for number in range(50):
            await one.send_to(peer, b"%d" % number)
        await one.aclose()
        with pytest.raises(LocalClosed):
            await one.send_to(peer, b"late")
        for number in range(50):
            assert (await other.recv_from()).data == b"%d" % number


async def test_a_dropped_endpoint_warns_and_is_closed(address: DeviceAddress) -> None:
    endpoints = [await aiordma.open_datagram((address.host, 0))]
    endpoints[0].listen()
    await endpoints[0].join("239.1.1.1")
    with pytest.warns(ResourceWarning, match="unclosed <DatagramEndpoint at"):
        endpoints.clear()


async def test_a_cancelled_block_aborts_its_endpoint(address: DeviceAddress) -> None:
    inside = loops.make_event()

    async def block() -> None:
        async with aiordma.open_datagram((address.host, 0)) as endpoint:
            inside.set()
            await endpoint.recv_from()

    task = loops.create_task(block())
    await inside.wait()
    await loops.cancel(task)


async def test_cancelling_at_any_moment_leaks_nothing(address: DeviceAddress) -> None:
    async def use_endpoints() -> None:
        async with endpoints(address) as (one, other, peer), await one.join("239.7.7.7") as group:
            await one.send_to(group, b"x" * 500)
            await one.send_to(peer, b"y")
            await other.send_to((await other.recv_from()).peer, b"z")

    durations = []
    for _ in range(3):  # one can be interrupted for long
        begin = loops.now()
        await use_endpoints()
        durations.append(loops.now() - begin)
    duration = min(durations)
    for moment in range(MOMENTS):
        task = loops.create_task(use_endpoints())
        # Time is the subject: it selects the moment. The moments cover the measured duration.
        await loops.sleep(duration * moment / MOMENTS)
        task.cancel()
        with contextlib.suppress(*loops.CancelledError, LocalClosed):
            await task


async def test_get_request_before_listen_fails(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        with pytest.raises(RdmaError, match=r"call listen\(\) first"):
            await endpoint.get_request()
        endpoint.listen()
        with pytest.raises(RdmaError, match="not possible in state LISTENING"):
            endpoint.listen()
