"""The backend of distributed on simulated devices: addresses, messages, failures, encryption."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import dask
import loops
import numpy as np
import pytest
from distributed.comm.addressing import (
    get_address_host,
    get_address_host_port,
    resolve_address,
)
from distributed.comm.core import CommClosedError
from distributed.comm.registry import get_backend
from distributed.protocol.serialize import to_serialize
from simulator import Simulation
from simulator.pairs import PORT
from streaming import message_streams

import aiordma.dask.addresses
import aiordma.dask.backend
import aiordma.dask.comm
from aiordma.dask import RdmaBackend, RdmaComm, RdmaListener
from aiordma.dask.frames import LARGE, MAX_PARTS, pack, receive
from aiordma.dask.options import message_options
from aiordma.errors import AddressError, PeerClosed, ProtocolError
from aiordma.message_streams.message_stream import MessageStream
from aiordma.message_streams.wire import EAGER_OVERHEAD

pytestmark = [pytest.mark.usefixtures("time_limit"), pytest.mark.loops("asyncio")]

BACKEND = RdmaBackend()
LARGE_ARRAY = np.arange(1 << 16)


class Unserializable:
    """An object that pickle refuses."""

    def __reduce__(self) -> str:
        raise TypeError


class Comms(NamedTuple):
    """Both ends of a comm. `near` connected to `far`."""

    near: RdmaComm
    far: RdmaComm


@contextlib.asynccontextmanager
async def listening(
    address: str, deserialize: bool = True
) -> AsyncIterator[tuple[RdmaListener, asyncio.Queue[RdmaComm]]]:
    """Listen at an address without its scheme. Yield the listener and a queue of its comms."""
    comms: asyncio.Queue[RdmaComm] = asyncio.Queue()
    listener = BACKEND.get_listener(address, comms.put, deserialize, ignored="argument")
    async with listener:
        yield listener, comms


@contextlib.asynccontextmanager
async def connected(simulation: Simulation, deserialize: bool = True) -> AsyncIterator[Comms]:
    """Connect two comms, with their handshakes. After the block, close those that are open."""
    async with listening(simulation.far.host, deserialize) as (listener, comms):
        connector = BACKEND.get_connector()
        loc = listener.contact_address.removeprefix("rdma://")
        near = await connector.connect(loc, deserialize, ignored="argument")
        await near.write(near.handshake_info())
        await near.read()
        far = await comms.get()
        yield Comms(near, far)
        await near.close()
        await far.close()


def test_distributed_finds_the_backend_by_its_entry_point() -> None:
    assert isinstance(get_backend("rdma"), RdmaBackend)


def test_addresses_are_parsed_and_resolved_as_those_of_tcp() -> None:
    assert get_address_host("rdma://10.7.1.1:8786") == "10.7.1.1"
    assert get_address_host_port("rdma://[fd07::1]:8786") == ("fd07::1", 8786)
    assert resolve_address("rdma://localhost:1") == "rdma://127.0.0.1:1"
    assert resolve_address("rdma://[fd07::1]:1") == "rdma://[fd07::1]:1"
    with pytest.raises(ValueError, match="ipv6 needs brackets"):
        get_address_host("rdma://fd07::1:1")


async def test_the_local_address_is_that_of_an_rdma_device(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = simulation.far.host
    monkeypatch.setattr(aiordma.dask.backend, "get_ip", lambda host: route)
    assert BACKEND.get_local_address_for("10.0.0.9:1") == simulation.far.host
    route = "192.168.0.1"
    assert BACKEND.get_local_address_for("10.0.0.9:1") == simulation.near.host
    assert BACKEND.get_local_address_for("[fd00::9]:1") == "[fd00::1]"


@pytest.mark.parametrize(
    ("given", "bound", "contact"),
    [
        ("10.0.0.2", "10.0.0.2", "10.0.0.2"),
        ("[fd00::2]", "[fd00::2]", "[fd00::2]"),
        ("", "0.0.0.0", "10.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "10.0.0.1"),
        ("[::]", "[::]", "[fd00::1]"),
    ],
)
async def test_the_addresses_of_a_listener(
    simulation: Simulation, given: str, bound: str, contact: str
) -> None:
    async with listening(f"{given}:{PORT}") as (listener, _):
        assert listener.listen_address == f"rdma://{bound}:{PORT}"
        assert listener.contact_address == f"rdma://{contact}:{PORT}"
    async with listening(given) as (listener, _):
        assert listener.get_host_port()[1] > 0
    chosen = RdmaListener("", lambda comm: None, default_host="host", default_port=PORT)
    with pytest.raises(ValueError, match="not started"):
        _ = chosen.listen_address
    async with chosen:
        assert chosen.contact_address == f"rdma://host:{PORT}"


async def test_objects_go_both_ways_in_order(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        assert near.peer_address == far.local_address
        assert near.local_address == far.peer_address
        assert far.remote_info["python"]
        messages = [
            {"op": "small"},
            {"op": "large", "data": to_serialize(LARGE_ARRAY), "x": b"x" * LARGE},
            {"op": "both", "data": [to_serialize(LARGE_ARRAY[:9]), to_serialize(LARGE_ARRAY)]},
        ]
        for source, sink in ((near, far), (far, near)):
            sizes = [await source.write(message) for message in messages]
            assert [size > LARGE for size in sizes] == [False, True, True]
            assert await sink.read() == {"op": "small"}
            received = await sink.read()
            assert received["x"] == b"x" * LARGE
            np.testing.assert_array_equal(received["data"], LARGE_ARRAY)
            few, many = (await sink.read())["data"]
            np.testing.assert_array_equal(few, LARGE_ARRAY[:9])
            np.testing.assert_array_equal(many, LARGE_ARRAY)
            many[:] = few[0] = 1  # writable, and not in the memory of another object
            assert few[1] == 1


async def test_writes_do_not_wait_for_a_reader(simulation: Simulation) -> None:
    """Neither side reads. There are more messages than credits, and than announcements."""
    count = 3 * message_options().window
    async with connected(simulation) as (near, far):
        for side in (near, far):
            for number in range(count):
                await side.write(number)
                await side.write(to_serialize(LARGE_ARRAY + number))
        assert near._stream.stats.messages_queued
        for side in (far, near):
            for number in range(count):
                assert await side.read() == number
                np.testing.assert_array_equal(await side.read(), LARGE_ARRAY + number)


async def test_a_write_waits_if_half_of_the_memory_limit_waits_to_be_sent(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = message_options().announcements + 1
    monkeypatch.setattr(aiordma.dask.comm, "MAX_UNSENT", (count - 0.5) * LARGE_ARRAY.nbytes)
    async with connected(simulation) as (near, far):
        for _ in range(count):
            await near.write(to_serialize(LARGE_ARRAY))
        writing = loops.create_task(near.write("last"))
        await loops.sleep(1)
        assert not writing.done()
        for _ in range(count):
            await far.read()
        await writing
        assert await far.read() == "last"


async def test_close_waits_for_the_messages_that_were_written(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        for number in range(9):
            await near.write([number, to_serialize(LARGE_ARRAY)])
        closing = loops.create_task(near.close())
        assert [(await far.read())[0] for _ in range(9)] == list(range(9))
        await closing
        with pytest.raises(CommClosedError, match="PeerClosed"):
            await far.read()
        assert far.closed()
        assert "closed" in repr(far)
        with pytest.raises(CommClosedError):
            await far.write("more")


async def test_a_comm_of_which_a_read_is_cancelled_is_aborted(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(near.read(), 1)
        assert near.closed()
        with pytest.raises(CommClosedError):
            await near.read()
        with pytest.raises(CommClosedError):
            await far.read()


async def test_closing_a_comm_ends_its_read(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        reading = await loops.start(near.read())
        await near.close()
        with pytest.raises(CommClosedError, match="LocalClosed"):
            await reading
        await loops.until(far.closed, "the peer's end to be noticed without a read")


@pytest.mark.parametrize("is_closed_by_peer", [True, False])
async def test_a_comm_that_is_dropped_is_aborted(
    simulation: Simulation, caplog: pytest.LogCaptureFixture, is_closed_by_peer: bool
) -> None:
    """distributed drops the idle comms of its pool that the peer has closed."""
    async with listening(simulation.far.host) as (listener, comms):
        connector = BACKEND.get_connector()
        near = await connector.connect(listener.contact_address.removeprefix("rdma://"))
        await near.write(near.handshake_info())
        far = await comms.get()
        if is_closed_by_peer:
            await far.close()
            await loops.until(near.closed, "the peer's end to be noticed")
        del near
        gc.collect()
        with pytest.raises(CommClosedError):
            await far.read()
    dropped = [record for record in caplog.records if "was dropped" in record.message]
    assert bool(dropped) != is_closed_by_peer


async def test_a_comm_that_is_dropped_after_its_loop_was_closed_is_aborted(
    simulation: Simulation,
) -> None:
    closed = asyncio.new_event_loop()
    closed.close()
    async with message_streams(simulation.far) as (near, far):
        aiordma.dask.comm._abort_dropped(closed, near)
        with pytest.raises(PeerClosed):
            await far.recv()


async def test_errors_of_serializing_leave_the_comm_open(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        with pytest.raises(TypeError):
            await near.write(to_serialize(Unserializable()), on_error="raise")
        await near.write("next")
        assert await far.read() == "next"


class Truncated:
    """An object that pickle takes apart, and cannot put together again."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return raise_eof_error, ()


def raise_eof_error() -> None:
    raise EOFError


async def test_a_message_that_cannot_be_deserialized_ends_the_comm(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(simulation) as (near, far):
        await near.write(to_serialize(Truncated()))
        with pytest.raises(CommClosedError, match="truncated"):
            await far.read()
        assert far.closed()
    async with connected(simulation) as (near, far):
        monkeypatch.setattr(aiordma.dask.comm, "from_frames", lambda *_, **__: asyncio.sleep(3600))
        await near.write("lost")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(far.read(), 1)
        assert far.closed()


async def test_a_message_of_another_program_ends_the_comm(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        await near._stream.send(b"short")
        with pytest.raises(CommClosedError, match="ProtocolError"):
            await far.read()
        assert far.closed()


@pytest.mark.parametrize(
    "arguments", [{"require_encryption": True}, {"ssl_context": ssl.create_default_context()}]
)
async def test_encryption_is_refused(simulation: Simulation, arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="refusing communication from/to rdma://"):
        await BACKEND.get_connector().connect("10.0.0.2:1", **arguments)
    with pytest.raises(RuntimeError, match="has none"):
        BACKEND.get_listener("10.0.0.2:1", lambda comm: None, True, **arguments)


async def test_failures_to_connect_and_to_listen_are_os_errors(simulation: Simulation) -> None:
    connector = BACKEND.get_connector()
    with pytest.raises(CommClosedError, match="Rejected"):
        await connector.connect(f"{simulation.far.host}:{PORT}")
    with pytest.raises(CommClosedError, match="RDMA"):
        await connector.connect("127.0.0.1:1")
    with pytest.raises(AddressError, match="loopback") as raised:
        await RdmaListener("127.0.0.1", lambda comm: None)
    assert isinstance(raised.value, OSError)
    async with listening(f"10.0.0.2:{PORT}"):
        with pytest.raises(OSError, match="in use"):
            await RdmaListener(f"10.0.0.2:{PORT}", lambda comm: None)


async def test_a_stopped_listener_accepts_no_more(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far), listening("10.0.0.2") as (listener, comms):
        connector = BACKEND.get_connector()
        loc = listener.contact_address.removeprefix("rdma://")
        halfway = await connector.connect(loc)  # and sends no handshake
        await halfway.read()
        listener.stop()
        listener.stop()
        listener.abort_handshaking_comms()
        with pytest.raises(CommClosedError):
            await halfway.read()
        with pytest.raises(CommClosedError, match="Rejected"):
            await connector.connect(loc)
        assert comms.empty()
        await near.write("the comms before stay open")
        assert await far.read() == "the comms before stay open"


async def test_a_peer_that_connects_while_the_listener_is_stopped_is_disconnected(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = RdmaListener._handle_stream

    async def stop_and_handle(listener: RdmaListener, stream: MessageStream) -> None:
        listener.stop()
        await handle(listener, stream)

    monkeypatch.setattr(RdmaListener, "_handle_stream", stop_and_handle)
    async with listening(simulation.far.host) as (listener, _):
        loc = listener.contact_address.removeprefix("rdma://")
        comm = await BACKEND.get_connector().connect(loc)
        with pytest.raises(CommClosedError):
            await comm.read()


async def test_a_peer_with_a_malformed_handshake_is_disconnected(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(simulation.far.host) as (listener, comms):
        loc = listener.contact_address.removeprefix("rdma://")
        comm = await BACKEND.get_connector().connect(loc)
        assert (await comm.read())["python"]
        await comm.write("no handshake")
        with pytest.raises(CommClosedError):
            await comm.read()
        assert comms.empty()
    assert "a background task failed" in caplog.text


async def test_a_listener_without_an_address_for_its_peers_does_not_start(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiordma.dask.addresses, "device_addresses", list)
    with pytest.raises(AddressError, match="has an IPv4 address"):
        await RdmaListener(f":{PORT}", lambda comm: None)
    assert not aiordma.dask.addresses.is_device_host("10.0.0.1")
    monkeypatch.undo()
    async with listening(f":{PORT}"):
        pass


def test_the_options_are_those_of_the_configuration() -> None:
    values = {
        f"distributed.comm.{key}": value
        for key, value in (("rdma.window", 9), ("rdma.slot-size", "16 KiB"), ("timeouts.tcp", "3s"))
    }
    with dask.config.set(values):
        options = message_options()
    assert (options.window, options.slot_size, options.connection.keepalive) == (9, 16384, 1.0)
    with dask.config.set({"distributed.comm.rdma.window": 0}), pytest.raises(ValueError, match="0"):
        message_options()


PART = message_options().slot_size - EAGER_OVERHEAD


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], 1),
        ([0], 1),
        ([3], 1),
        ([LARGE], 1),
        ([LARGE, 0, 5], 1),
        ([PART - 16], 1),
        ([PART - 15], 2),
        ([1, PART, LARGE, 2, PART], 3),
        ([MAX_PARTS * PART - 16], MAX_PARTS),
        ([MAX_PARTS * PART - 15], 1),
        ([1] * (PART // 8), 1),
    ],
)
async def test_frames_are_received_as_they_were_packed(
    simulation: Simulation, sizes: list[int], parts: int
) -> None:
    frames = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    packed = pack(frames, PART)
    assert len(packed.parts) == parts
    assert packed.nbytes == 8 + 8 * len(sizes) + sum(sizes)
    async with message_streams(simulation.far, message_options()) as (near, far):
        for part in packed.parts:
            near.send_soon(part)
        if packed.large:
            near.send_soon(packed.large)
        assert await receive(far) == frames
        if packed.large:
            await near.drain()


ONE = (1).to_bytes(8, "big")


@pytest.mark.parametrize(
    "messages",
    [
        [[]],
        [b""],
        [[ONE, b""]],
        [b"1234567"],
        [ONE],
        [b"\xff" * 16],
        [ONE + (3).to_bytes(8, "big") + b"abcd"],
        [ONE + (3).to_bytes(8, "big") + b"ab", b"cd"],
        [ONE + (3).to_bytes(8, "big") + b"ab", b""],
        [ONE + LARGE.to_bytes(8, "big"), [bytes(LARGE - 1)]],
        [ONE + LARGE.to_bytes(8, "big"), [bytes(LARGE), b""]],
    ],
)
async def test_messages_without_the_frames_that_they_list_are_refused(
    simulation: Simulation, messages: list[Any]
) -> None:
    async with message_streams(simulation.far, message_options()) as (near, far):
        for message in messages:
            near.send_soon(message)
        with pytest.raises(ProtocolError, match="of distributed"):
            await receive(far)
        await near.drain()
