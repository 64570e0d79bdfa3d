"""Byte streams side by side: rstream of rdma-core, aiordma's streams, and asyncio over TCP.

    python benchmarks/streams.py            # on this machine's first RDMA device
    python benchmarks/streams.py --quick    # few rounds: whether it works, not how fast

Every kind does what rstream does, on the same addresses, in one run, each side in a process of its
own: the client sends so much, then the server sends as much back, and so on. What counts is the
ratio to rstream in the same run; the other numbers say more about the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import aiordma
import aiordma.asyncio
from aiordma.rdmacm import device_addresses

SYNC = 16


@dataclass(frozen=True)
class Test:
    """So many rounds of so many writes of so many bytes, there and back."""

    name: str
    size: int
    count: int
    rounds: int

    @property
    def nbytes(self) -> int:
        return self.size * self.count


TESTS = [
    Test("64 bytes, there and back", 64, 1, 1000),
    Test("64 KiB writes", 1 << 16, 128, 3),
    Test("1 MiB writes", 1 << 20, 16, 3),
]
QUICK = [Test("64 KiB writes", 1 << 16, 2, 2)]


class Peer(Protocol):
    """One end, whatever it is made of."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self, nbytes: int) -> None: ...

    async def aclose(self) -> None: ...


class NativePeer:
    """A ByteStream."""

    def __init__(self, stream: aiordma.ByteStream) -> None:
        self._stream = stream
        self.send = stream.send
        self.aclose = stream.aclose

    async def receive(self, nbytes: int) -> None:
        while nbytes:
            data = await self._stream.receive(nbytes)
            if not data:
                raise EOFError
            nbytes -= len(data)


class WriterPeer:
    """asyncio's reader and writer, of aiordma or of TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self, nbytes: int) -> None:
        while nbytes:
            data = await self._reader.read(min(nbytes, 1 << 18))
            if not data:
                raise EOFError
            nbytes -= len(data)

    async def aclose(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


# --- the kinds: how each serves one peer, and connects to one ---


async def serve_native(host: str, announce: Callable[[int], None]) -> Peer:
    async with aiordma.listen_stream(host, 0) as listener:
        announce(listener.local_address[1])
        return NativePeer(await listener.accept())


async def connect_native(host: str, port: int) -> Peer:
    return NativePeer(await aiordma.connect_stream(host, port))


def serve_writer(start_server: Callable[..., Awaitable[asyncio.AbstractServer]]) -> Serve:
    async def serve(host: str, announce: Callable[[int], None]) -> Peer:
        found: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        server = await start_server(lambda r, w: found.set_result(WriterPeer(r, w)), host, 0)
        announce(server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]
        peer = await found
        server.close()
        return peer

    return serve


def connect_writer(
    open_connection: Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
) -> Connect:
    async def connect(host: str, port: int) -> Peer:
        return WriterPeer(*await open_connection(host, port))

    return connect


Serve = Callable[[str, Callable[[int], None]], Awaitable[Peer]]
Connect = Callable[[str, int], Awaitable[Peer]]

KINDS: dict[str, tuple[Serve, Connect]] = {
    "aiordma, ByteStream": (serve_native, connect_native),
    "aiordma, reader and writer": (
        serve_writer(aiordma.asyncio.start_server),
        connect_writer(aiordma.asyncio.open_connection),
    ),
    "asyncio, TCP": (
        serve_writer(asyncio.start_server),
        connect_writer(asyncio.open_connection),
    ),
}


async def talk(peer: Peer, test: Test, is_client: bool) -> float:
    """What rstream does. Seconds for all rounds."""
    part = bytes(test.size)

    async def send() -> None:
        for _ in range(test.count):
            await peer.send(part)

    for send_first in (is_client, not is_client):
        await (peer.send(bytes(SYNC)) if send_first else peer.receive(SYNC))
    begin = time.perf_counter()
    for _ in range(test.rounds):
        for send_first in (is_client, not is_client):
            await (send() if send_first else peer.receive(test.nbytes))
    seconds = time.perf_counter() - begin
    await peer.aclose()
    return seconds


async def serve(kind: str, host: str, test: Test) -> None:
    peer = await KINDS[kind][0](host, lambda port: print(port, flush=True))
    await talk(peer, test, is_client=False)


async def connect(kind: str, host: str, port: int, test: Test) -> float:
    return await talk(await KINDS[kind][1](host, port), test, is_client=True)


def measure(kind: str, host: str, test: Test) -> float:
    """Seconds for all rounds, with the server in a process of its own."""
    numbers = [str(number) for number in (test.size, test.count, test.rounds)]
    command = [sys.executable, __file__, "--serve", kind, "--host", host, "--test", *numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        return asyncio.run(connect(kind, host, port, test))


def measure_rstream(host: str, test: Test) -> float | None:
    """Likewise of rstream; None if it is not installed."""
    options = ["-p", "7471", "-S", str(test.size), "-C", str(test.count), "-I", str(test.rounds)]
    options += ["-T", "b"]  # blocking: it does not spin either
    try:
        server = subprocess.Popen(["rstream", "-b", host, *options], stdout=subprocess.DEVNULL)
    except FileNotFoundError:
        return None
    try:
        for _ in range(100):
            client = subprocess.run(
                ["rstream", "-s", host, *options], capture_output=True, text=True, check=False
            )
            if client.returncode == 0:
                break
            time.sleep(0.1)
        else:
            raise RuntimeError(client.stderr)
        server.wait()
    finally:
        server.kill()
        server.wait()
    # The last column: microseconds for a transfer, of which there are two in a round.
    microseconds = float(client.stdout.split()[-1])
    return microseconds * 2 * test.rounds * test.count / 1e6


def figure(test: Test, seconds: float) -> str:
    if test.count == 1:
        return f"{seconds / test.rounds * 1e6:10.0f} us"
    return f"{2 * test.rounds * test.nbytes / seconds / 1e6:8.1f} MB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each kind (median counts)")
    parser.add_argument("--host", default=None)
    parser.add_argument("--serve", metavar="KIND", help=argparse.SUPPRESS)
    parser.add_argument("--test", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    host = arguments.host or next(
        found.host for found in device_addresses() if ":" not in found.host
    )
    if arguments.serve:
        asyncio.run(serve(arguments.serve, host, Test("", *arguments.test)))
        return
    pairs = 1 if arguments.quick else arguments.pairs
    for test in QUICK if arguments.quick else TESTS:
        compare(test, host, pairs)


def compare(test: Test, host: str, pairs: int) -> None:
    """Run all kinds in turn, so often, and print the medians and their ratios to rstream's."""
    print(f"\n{test.name} ({host}, median of {pairs})", flush=True)
    rounds: dict[str, list[float]] = {}
    for _ in range(pairs):
        reference = measure_rstream(host, test)
        if reference is not None:
            rounds.setdefault("rstream", []).append(reference)
        for kind in KINDS:
            rounds.setdefault(kind, []).append(measure(kind, host, test))
    medians = {kind: sorted(found)[len(found) // 2] for kind, found in rounds.items()}
    if "rstream" not in medians:
        print("rstream is not installed: no ratios")
    for kind, seconds in medians.items():
        ratio = f"{seconds / medians['rstream']:8.2f} x rstream" if "rstream" in medians else ""
        print(f"  {kind:28} {figure(test, seconds)} {ratio}", flush=True)


if __name__ == "__main__":
    main()
