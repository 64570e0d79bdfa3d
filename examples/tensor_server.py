"""Serve numpy arrays to any number of clients, without a copy in the server.

    python examples/tensor_server.py serve [FILE.npy ...] [--host HOST] [--port PORT]
    python examples/tensor_server.py list HOST PORT
    python examples/tensor_server.py fetch HOST PORT NAME ... [--output FILE.npy]

The server registers each array once. The device of a client reads it from the server's memory, by
RDMA READ, into a new array. A request is the name of an array. The answers are its description in
JSON, and then the array as one message. An empty request asks for all descriptions.

The files are read, not mapped: Linux refuses to register mapped files of most file systems.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import aiordma

Array = npt.NDArray[Any]

MEGABYTE = 1_000_000
MAX_NAME = 200
MAX_DESCRIPTION = 4096
MAX_DIMENSIONS = 32
NUMBERS = "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
DTYPES = {np.dtype(order + code).str for order in "<>" for code in NUMBERS}
KEEPALIVE = aiordma.ConnectionOptions(keepalive=10)  # finds out that a peer has lost power


@dataclass(frozen=True)
class Description:
    """The description of an array. It can come from a peer, so each value is checked."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not 0 < len(self.name.encode()) <= MAX_NAME:
            raise ValueError(f"{self.name!a} is not a name of up to {MAX_NAME} bytes")
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name} has the dtype {self.dtype!a}, not one of numbers")
        is_shape = all(type(length) is int and 0 < length < 1 << 63 for length in self.shape)
        if not is_shape or len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(f"{self.name} is empty, or its shape is invalid")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def pack(self) -> bytes:
        return json.dumps([self.name, self.dtype, self.shape, self.checksum]).encode()

    @classmethod
    def unpack(cls, message: bytes | bytearray) -> Self:
        fields = None
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(message)
        match fields:
            case [str(name), str(dtype), [*shape], int(checksum)]:
                return cls(name, dtype, tuple(shape), checksum)
        raise ValueError("the peer is not a tensor_server")

    def __str__(self) -> str:
        return f"{self.name}  {np.dtype(self.dtype)}  {self.shape}  crc32 {self.checksum:08x}"


# --- the server ---


class Store:
    """The arrays, each registered once on each device that clients connect to."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays
        self._regions: dict[tuple[str, str], aiordma.MemoryRegion] = {}
        self._lock = asyncio.Lock()
        self.descriptions = {
            name: Description(name, array.dtype.str, array.shape, zlib.crc32(array.data)).pack()
            for name, array in arrays.items()
        }

    async def region(self, name: str, stream: aiordma.MessageStream) -> aiordma.MemoryRegion:
        key = name, stream.device_name
        async with self._lock:
            if key not in self._regions:
                memory, access = self._arrays[name].data, aiordma.AccessFlags.REMOTE_READ
                self._regions[key] = await stream.register(memory, access)
        return self._regions[key]

    def close(self) -> None:
        for region in self._regions.values():
            region.close()


async def serve_client(stream: aiordma.MessageStream, store: Store) -> None:
    try:
        async for request in stream:
            name = request.decode()
            if not name:
                for description in store.descriptions.values():
                    await stream.send(description)
                await stream.send_eof()
            elif name in store.descriptions:
                await stream.send(store.descriptions[name])
                await stream.send(await store.region(name, stream))
            else:
                await stream.send(b"")
    except (aiordma.RdmaError, ValueError) as error:
        print(f"tensor_server: {stream.peer_address[0]}: {error}", file=sys.stderr)


async def serve(arrays: dict[str, Array], host: str | None, port: int) -> None:
    options = aiordma.MessageOptions(max_nbytes=MAX_NAME, connection=KEEPALIVE)
    with contextlib.closing(Store(arrays)) as store:
        async with aiordma.listen_messages(host, port, options=options) as listener:
            print(f"listening on port {listener.local_address[1]}", flush=True)
            await listener.serve(functools.partial(serve_client, store=store))


def load(paths: list[Path]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for path in paths:
        if path.stem in arrays:
            raise ValueError(f"two arrays have the name {path.stem}")
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        arrays[path.stem] = np.asarray(array, order="C")
    return arrays


def generate(count: int, megabytes: int) -> dict[str, Array]:
    random = np.random.default_rng(0)
    shape = megabytes, MEGABYTE // 4
    return {f"array{number}": random.random(shape, np.float32) for number in range(count)}


# --- the client ---


@contextlib.contextmanager
def progress_bar(nbytes: int) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that draws a bar on standard error, or None if that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    def draw(done: int) -> None:
        share = done / nbytes
        print(f"\r[{'#' * int(30 * share):<30}] {share:4.0%}", end="", file=sys.stderr, flush=True)

    draw(0)
    try:
        yield draw
    finally:
        print(file=sys.stderr)


async def fetch_array(stream: aiordma.MessageStream, name: str, max_bytes: int) -> Array:
    await stream.send(name.encode())
    message = bytearray(MAX_DESCRIPTION)
    nbytes = await stream.recv_into(message)
    if not nbytes:
        raise ValueError(f"the server has no array {name}")
    description = Description.unpack(message[:nbytes])
    if description.name != name:
        raise ValueError(f"the server described {description.name} instead of {name}")
    if description.nbytes > max_bytes:
        raise ValueError(f"{name} has {description.nbytes:,} bytes, more than --max-bytes")
    array = np.empty(description.shape, description.dtype)
    began = time.perf_counter()
    with progress_bar(array.nbytes) as progress:
        nbytes = await stream.recv_into(array.data, progress=progress)
    rate = nbytes / (time.perf_counter() - began) / MEGABYTE
    if nbytes != array.nbytes:
        raise ValueError(f"the server sent {nbytes:,} bytes of {name} instead of {array.nbytes:,}")
    if await asyncio.to_thread(zlib.crc32, array.data) != description.checksum:
        raise ValueError(f"the checksum of {name} is wrong")
    print(f"{description}  {rate:.1f} MB/s", flush=True)
    return array


async def fetch(
    host: str, port: int, names: list[str], output: Path | None, max_bytes: int
) -> None:
    options = aiordma.MessageOptions(
        max_nbytes=max(max_bytes, MAX_DESCRIPTION), connection=KEEPALIVE
    )
    async with aiordma.connect_messages(host, port, options=options) as stream:
        for name in names:
            array = await fetch_array(stream, name, max_bytes)
            if output is not None:
                with output.open("wb") as file:
                    np.save(file, array)
        await stream.send_eof()


async def show_list(host: str, port: int) -> None:
    options = aiordma.MessageOptions(max_nbytes=MAX_DESCRIPTION, connection=KEEPALIVE)
    async with aiordma.connect_messages(host, port, options=options) as stream:
        await stream.send(b"")
        async for message in stream:
            print(Description.unpack(message))
        await stream.send_eof()


# --- the command line ---


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="serve arrays until Ctrl-C")
    serving.add_argument("files", nargs="*", type=Path, help="default: generated arrays")
    serving.add_argument("--arrays", type=int, default=3, help="to generate; default: %(default)s")
    serving.add_argument("--megabytes", type=int, default=100, help="of each; default: %(default)s")
    serving.add_argument("--host", help="an RDMA address of this machine (default: all)")
    serving.add_argument(
        "--port", type=int, default=7478, help="default: %(default)s; 0: any free port"
    )
    listing = commands.add_parser("list", help="list the arrays of a server")
    fetching = commands.add_parser("fetch", help="fetch arrays of a server")
    for client in (listing, fetching):
        client.add_argument("host")
        client.add_argument("port", type=int)
    fetching.add_argument("names", nargs="+", metavar="NAME")
    fetching.add_argument("--output", type=Path, help="the file to write")
    fetching.add_argument(
        "--max-bytes", type=int, default=1 << 32, help="of an array; default: %(default)s"
    )
    arguments = parser.parse_args()
    if arguments.command == "fetch" and arguments.output and len(arguments.names) > 1:
        parser.error("--output takes a single array")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    host, port = arguments.host, arguments.port
    try:
        if arguments.command == "serve":
            with contextlib.suppress(KeyboardInterrupt):
                arrays = load(arguments.files) or generate(arguments.arrays, arguments.megabytes)
                asyncio.run(serve(arrays, host, port))
        elif arguments.command == "list":
            asyncio.run(show_list(host, port))
        else:
            names, output, max_bytes = arguments.names, arguments.output, arguments.max_bytes
            asyncio.run(fetch(host, port, names, output, max_bytes))
    except KeyboardInterrupt:
        sys.exit("tensor_server: interrupted")
    except (aiordma.RdmaError, OSError, ValueError, MemoryError) as error:
        sys.exit(f"tensor_server: {error}")


if __name__ == "__main__":
    main()
