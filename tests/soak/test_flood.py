"""A flood of connection requests of peers that say nothing, while a well-behaved client is served.

The flood comes from a process of its own, and from one address or from SOURCES addresses that take
turns, as a peer can use that forges its source. AIORDMA_SOAK_REQUESTS is the number of its requests
(default 10,000). The client connects again and again, gets a reply to one message, and
closes. Its times, the counts of the listener, and the growth of the server's memory are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers import TIME_LIMIT, echo, end, read_line, run_program, start_python

import aiordma
from aiordma import Connection, ConnectionOptions, ListenerLimits
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

REQUESTS = int(os.environ.get("AIORDMA_SOAK_REQUESTS", "10000"))
MAX_CONNECTIONS = 1000
LIMITS = ListenerLimits(max_connections=MAX_CONNECTIONS, max_handshakes=64)
SOURCES = 32
OPTIONS = ConnectionOptions()
# The growth of the server's process: the receive buffers of the connections that exist at the same
# time, and the rest. On RoCE that is 115 MiB: there only connections that confirm outlive a second.
# On iWARP each peer that sends a valid request has a connection, until the handler gives it up.
RECEIVE_BUFFERS = (OPTIONS.recv_depth + 1) * OPTIONS.max_message_size
MAX_OTHER_GROWTH = 64 << 20
QUIET_CLIENTS = 20

SILENT_ON_ROCE = """
import asyncio, sys
from aiordma import AsyncCmId, RdmaError
from aiordma.rdmacm import ConnectionParameters, parse_address

async def main(host, port, requests, *sources):
    todo, peers = iter(range(int(requests))), []

    async def request():
        for number in todo:
            cm_id = await AsyncCmId.create()
            peers.append(cm_id)
            try:
                await cm_id.resolve_addr(
                    parse_address(host, int(port)),
                    source=parse_address(sources[number % len(sources)], 0),
                )
                await cm_id.resolve_route()
                await cm_id.connect(ConnectionParameters(qp_num=0x100000 + number))
            except RdmaError:
                pass

    print("begins", flush=True)
    await asyncio.gather(*(request() for _ in range(200)))
    print("done", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""

# Half of the peers send nothing at all, the other half a valid request and then nothing.
SILENT_ON_IWARP = """
import asyncio, resource, struct, sys

FRAME = b"MPA ID Req Frame" + struct.pack("!HHHH", 0x1002, 4, 16, 16)

async def main(host, port, requests, *sources):
    todo, peers = iter(range(int(requests))), []
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def request():
        for number in todo:
            try:
                reader, writer = await asyncio.open_connection(
                    host, int(port), local_addr=(sources[number // 2 % len(sources)], 0)
                )
            except OSError:
                continue
            peers.append(writer)
            if number % 2:
                writer.write(FRAME)

    print("begins", flush=True)
    await asyncio.gather(*(request() for _ in range(200)))
    print("done", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def more_addresses(address: DeviceAddress, count: int) -> Iterator[list[str]]:
    """Give the interface of `address` that many others for the block, and return them."""
    shown = json.loads(run_program("ip", "-json", "address", "show", "to", address.host))
    interface = shown[0]["ifname"]
    head, _, last = address.host.rpartition(".")
    others = [f"{head}.{(int(last) + 76 + number) % 256}" for number in range(count)]
    with ExitStack() as stack:
        for other in others:
            run_program("ip", "address", "add", f"{other}/24", "dev", interface)
            stack.callback(run_program, "ip", "address", "del", f"{other}/24", "dev", interface)
        yield others


def resident_bytes() -> int:
    """Return the size of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Served:
    """A listener's figures while a client is served, in seconds and bytes."""

    def __init__(self, listener: aiordma.Listener) -> None:
        self._listener = listener
        self.times: list[float] = []
        self.most_resident = 0
        self.most_connections = 0

    async def client(self) -> None:
        """Connect, get a reply, close, and look at the listener."""
        begin = time.monotonic()
        async with asyncio.timeout(TIME_LIMIT):
            async with aiordma.connect(*self._listener.local_address) as client:
                await client.send(b"hello")
                assert await client.recv() == b"hello"
        self.times.append(time.monotonic() - begin)
        stats = self._listener.stats
        self.most_resident = max(self.most_resident, resident_bytes())
        self.most_connections = max(self.most_connections, stats.connections)
        assert stats.handshakes <= LIMITS.max_handshakes
        assert stats.connections <= MAX_CONNECTIONS

    def __str__(self) -> str:
        return (
            f"{len(self.times)} clients in {statistics.median(self.times) * 1e3:.0f} ms, "
            f"at most {max(self.times) * 1e3:.0f} ms; "
            f"at most {self.most_connections} connections and {self.most_resident >> 20} MiB"
        )


async def echo_once(connection: Connection) -> None:
    """Answer each message. A peer has 5 seconds to send the first one."""
    try:
        async with asyncio.timeout(5):
            message = await connection.recv()
    except TimeoutError:
        connection.abort()
        return
    await connection.send(message)
    await echo(connection)


async def flood(
    address: DeviceAddress, program: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiordma.listen(address.host, 0, limits=LIMITS) as listener:
        serving = asyncio.create_task(listener.serve(echo_once))
        quiet = Served(listener)
        for _ in range(QUIET_CLIENTS):
            await quiet.client()
        flooded = Served(listener)
        with more_addresses(address, count) as sources:
            host, port = listener.local_address
            process = start_python(program, host, str(port), str(REQUESTS), *sources)
            assert await asyncio.to_thread(read_line, process) == "begins"
            begin = time.monotonic()
            done = asyncio.create_task(asyncio.to_thread(read_line, process))
            while not done.done():
                await flooded.client()
            assert await done == "done"
            seconds = time.monotonic() - begin
            with capsys.disabled():
                print(f"\n{address.device}: {REQUESTS} requests in {seconds:.0f} s", end=" ")
                print(f"from {count} addresses")
                print(f"before: {quiet}\nflooded: {flooded}\n{listener.stats}", flush=True)
            await end(process)
        await flooded.client()
        await listener.aclose()
        async with asyncio.timeout(TIME_LIMIT):
            await serving
    buffers = flooded.most_connections * RECEIVE_BUFFERS
    assert flooded.most_resident < quiet.most_resident + buffers + MAX_OTHER_GROWTH


@pytest.mark.transport("IB")
@pytest.mark.parametrize("sources", [1, SOURCES])
async def test_peers_that_never_confirm(
    address: DeviceAddress, sources: int, capsys: pytest.CaptureFixture[str]
) -> None:
    await flood(address, SILENT_ON_ROCE, sources, capsys)


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("sources", [1, SOURCES])
async def test_peers_that_say_nothing(
    address: DeviceAddress, sources: int, capsys: pytest.CaptureFixture[str]
) -> None:
    await flood(address, SILENT_ON_IWARP, sources, capsys)
