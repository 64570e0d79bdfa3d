"""Synchronous ids: every step in worker threads, cancelled and closed at any point."""

from __future__ import annotations

import subprocess
import sys
import threading

import loops
import pytest
from cm_ids import SMALL, Kind, both_kinds, close, connect, exchange, listening, resolved
from helpers import ROOT, TIME_LIMIT, has_waiter

from aiordma import CmEventType, LocalClosed, Rejected, VerbsError
from aiordma.cm import CmState, SyncCmId
from aiordma.enums import AddrInfoFlags, WcStatus
from aiordma.rdmacm import AddrInfo, ConnectionParameters, DeviceAddress, parse_address
from aiordma.verbs import SharedReceiveQueueCaps

UNUSED_PORT = 9


def state_of(cm: SyncCmId) -> CmState:
    """Return the state. mypy does not assume that the next call returns the same."""
    return cm.state


async def test_messages_and_private_data_are_sent_both_ways(any_address: DeviceAddress) -> None:
    """The calls are those of the programs rdma_client and rdma_server (rdma_verbs.h)."""
    async with (
        await listening(any_address, SyncCmId) as listener,
        await resolved(listener.local_address, SyncCmId) as client,
    ):
        inbox = await client.reg_msgs(bytearray(16))
        client.cm_id.post_recv(1, inbox, 0, 16)
        connecting = loops.create_task(client.connect(ConnectionParameters(b"hello")))
        async with await listener.get_request() as server:
            assert state_of(server) is CmState.REQUESTED
            assert server.event is not None
            assert server.event.private_data.rstrip(b"\0") == b"hello"
            await server.create_qp(SMALL)
            outbox = await server.reg_msgs(bytearray(b"sixteen bytes ok"))
            server.cm_id.post_recv(2, outbox, 0, 16)
            await server.accept(ConnectionParameters(b"welcome"))
            await connecting
            assert client.event is not None
            assert client.event.type is CmEventType.ESTABLISHED
            assert client.event.private_data.rstrip(b"\0") == b"welcome"
            hello = await client.reg_msgs(bytearray(b"hello from client"))
            client.cm_id.post_send(3, hello, 0, 5)
            assert (await client.get_send_comp()).check().wr_id == 3
            received = (await server.get_recv_comp()).check()
            assert (received.wr_id, received.byte_len) == (2, 5)
            server.cm_id.post_send(4, outbox, 0, 16)
            assert (await server.get_send_comp()).check().wr_id == 4
            assert (await client.get_recv_comp()).check().byte_len == 16
            await loops.gather(client.disconnect(), server.disconnect())
            assert client.state is server.state is CmState.DISCONNECTED


@pytest.mark.real("the loops of two threads, whose calls wait in threads, too")
async def test_two_loops_can_close_an_id(address: DeviceAddress) -> None:
    """The loop that waits for requests leaves its block, because the other one closes the id."""
    may_destroy = threading.Event()

    def wait() -> None:
        may_destroy.wait()

    async with await listening(address, SyncCmId) as listener:
        listener.handle.add_pre_destroy_hook("test", wait)
        getting = loops.create_task(listener.get_request())
        await loops.until(lambda: has_waiter(listener), "a thread to wait")
        run = loops.runner_of_this_kind()
        closing = loops.create_task(loops.to_thread(run, listener.aclose))
        with pytest.raises(LocalClosed):
            await getting
        closing_here = loops.create_task(listener.aclose())
        await loops.until(lambda: len(listener.handle._waiters) == 2, "both loops to wait")
        may_destroy.set()
        await loops.gather(closing, closing_here)


async def test_connect_is_rejected_by_a_peer_or_without_a_listener(address: DeviceAddress) -> None:
    async with (
        await listening(address, SyncCmId) as listener,
        await resolved(listener.local_address, SyncCmId) as client,
        await resolved((address.host, UNUSED_PORT), SyncCmId) as lost,
    ):
        connecting = loops.create_task(client.connect())
        async with await listener.get_request() as server:
            server.reject(b"no")
        with pytest.raises(Rejected) as rejected:
            await connecting
        assert rejected.value.private_data.rstrip(b"\0") == b"no"
        with pytest.raises(Rejected):
            await lost.connect()


async def test_a_request_that_arrives_around_a_cancellation_is_not_lost(
    address: DeviceAddress,
) -> None:
    """The task is cancelled at any moment around the request's arrival."""
    async with await listening(address, SyncCmId) as listener:
        for delay in (0.0, 0.002, 0.01, 0.05, 0.1):
            async with await resolved(listener.local_address, SyncCmId) as client:
                waiting = loops.create_task(listener.get_request())
                connecting = loops.create_task(client.connect())
                await loops.sleep(delay)  # time is the subject: it selects the moment
                waiting.cancel()
                await loops.wait([waiting])
                lost = waiting.cancelled()
                async with await listener.get_request() if lost else waiting.result() as server:
                    server.reject()
                with pytest.raises(Rejected):
                    await connecting


async def test_closing_ends_every_wait(address: DeviceAddress) -> None:
    listener = await listening(address, SyncCmId)
    waiting = loops.create_task(listener.get_request())
    client = await resolved(listener.local_address, SyncCmId)
    receiving = loops.create_task(client.get_recv_comp())
    await loops.until(lambda: has_waiter(client) and has_waiter(listener), "both threads to wait")
    await close(client, listener)
    for task in (waiting, receiving):
        with pytest.raises(LocalClosed):
            await task


async def test_a_cancelled_connect_ends_without_an_answer(address: DeviceAddress) -> None:
    """The peer never answers the request."""
    async with (
        await listening(address, SyncCmId) as listener,
        await resolved(listener.local_address, SyncCmId) as client,
    ):
        connecting = loops.create_task(client.connect())
        async with await listener.get_request():
            await loops.cancel(connecting)
            assert client.state is CmState.CONNECTING  # no event has ended the call


async def test_200_waiting_listeners_do_not_block_other_calls(address: DeviceAddress) -> None:
    listeners = []
    for _ in range(200):
        listeners.append(await listening(address, SyncCmId))
        await loops.settle()  # each one blocks the loop for a short time
    waiting = [loops.create_task(listener.get_request()) for listener in listeners]
    await loops.until(lambda: all(map(has_waiter, listeners)), "200 threads to wait")
    for number in (0, 99, 199):
        async with await resolved(listeners[number].local_address, SyncCmId) as client:
            connecting = loops.create_task(client.connect())
            async with await waiting[number] as server:
                await server.create_qp(SMALL)
                await server.accept()
                await connecting
    await close(*listeners)
    await loops.gather(*waiting, return_exceptions=True)


OUTSTANDING = """
import sys
from aiordma.cm import SyncCmId
from aiordma.rdmacm import parse_address

host, kind, tests = sys.argv[1:]
sys.path.append(tests)
import loops

async def main():
    listener = await SyncCmId.create()
    listener.bind_addr(parse_address(host))
    listener.listen()
    task = loops.create_task(listener.get_request())
    await loops.until(lambda: listener.handle.interrupts, "a thread to wait for a request")
    print("waiting", flush=True)
    raise SystemExit(7)

loops.run(kind, main)
"""


@pytest.mark.parametrize("kind", ["asyncio", "trio"])
def test_the_interpreter_exits_with_calls_outstanding(address: DeviceAddress, kind: str) -> None:
    tests = str(ROOT / "tests")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OUTSTANDING, address.host, kind, tests],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "waiting\n"), done.stderr


# --- endpoints ---


async def test_endpoints_connect_and_send_a_message(any_address: DeviceAddress) -> None:
    """The ids of requests at a passive endpoint have a queue pair already."""
    here = AddrInfo(flags=AddrInfoFlags.PASSIVE, source=parse_address(any_address.host))
    listener = await SyncCmId.create_ep(here, init=SMALL)
    listener.listen()
    there = AddrInfo(destination=parse_address(*listener.local_address))
    client = await SyncCmId.create_ep(there, init=SMALL)
    assert client.state is CmState.ROUTE_RESOLVED
    connecting = loops.create_task(client.connect())
    server = await listener.get_request()
    assert server.cm_id.has_qp
    await server.accept()
    await connecting
    await exchange(client, server)
    await close(client, server, listener)


async def test_create_ep_without_a_route_or_on_a_port_in_use_fails(address: DeviceAddress) -> None:
    with pytest.raises(VerbsError):
        await SyncCmId.create_ep(AddrInfo(destination=parse_address("240.0.0.1", 1)))
    async with await listening(address, SyncCmId) as listener:
        source = parse_address(*listener.local_address)
        with pytest.raises(VerbsError):
            await SyncCmId.create_ep(AddrInfo(flags=AddrInfoFlags.PASSIVE, source=source))


async def test_messages_arrive_in_a_shared_receive_queue(address: DeviceAddress) -> None:
    async with (
        await listening(address, SyncCmId) as listener,
        await resolved(listener.local_address, SyncCmId) as client,
    ):
        connecting = loops.create_task(client.connect())
        async with await listener.get_request() as server:
            srq = await server.create_srq(SharedReceiveQueueCaps(max_wr=8))
            assert srq.caps.max_wr >= 8
            await server.create_qp(SMALL)
            memory = bytearray(64)
            inbox = await server.reg_msgs(memory)
            for number in range(2):
                server.cm_id.post_recv(number, inbox, 32 * number, 32)
            await server.accept()
            await connecting
            hello = await client.reg_msgs(bytearray(b"to the shared one"))
            for _ in range(2):
                client.cm_id.post_send(1, hello, 0, 17)
                (await client.get_send_comp()).check()
                assert (await server.get_recv_comp()).check().byte_len == 17
            assert bytes(memory[:17]) == bytes(memory[32:49]) == b"to the shared one"


@both_kinds
async def test_a_peer_that_disconnects_ends_the_wait_for_completions(
    address: DeviceAddress, kind: Kind
) -> None:
    async with (
        await listening(address, SyncCmId) as listener,
        await resolved(listener.local_address, kind) as client,
    ):
        client.cm_id.post_recv(1, await client.reg_msgs(bytearray(16)), 0, 16)
        server = await connect(client, listener)
        receiving = loops.create_task(client.get_recv_comp())
        await loops.until(lambda: has_waiter(client), "a thread to wait for a completion")
        await server.aclose()
        assert (await receiving).status is WcStatus.WR_FLUSH_ERR
