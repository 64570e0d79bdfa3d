"""Fetch a file from another machine over RDMA, with a progress bar and a checksum.

    python examples/file_transfer.py serve FILE [--host HOST] [--port PORT]
    python examples/file_transfer.py fetch HOST PORT TARGET

The server reads the file into registered memory, piece by piece, and sends each piece as a message.
The client's device reads it from there into registered memory of the client. So a file can be
larger than the memory that can be registered.

The mapped file itself is not registered. Linux 6.5 and later refuse that for writable mappings on
most file systems, because RDMA bypasses the file system. Linux 6.1 refuses it for read-only ones.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Self

import aiordma

PIECE = 4 * 1024 * 1024
HEADER = struct.Struct(">Q32s")
OPTIONS = aiordma.MessageOptions(max_nbytes=PIECE)


@dataclass(frozen=True)
class Announcement:
    """The description of a file: 8 bytes for the size, 32 for the SHA-256, then the name."""

    size: int
    digest: bytes
    name: str

    def pack(self) -> bytes:
        return HEADER.pack(self.size, self.digest) + os.fsencode(self.name)

    @classmethod
    def unpack(cls, message: bytes) -> Self:
        if len(message) < HEADER.size:
            raise ValueError("the peer is not a file_transfer server")
        size, digest = HEADER.unpack_from(message)
        return cls(size, digest, os.fsdecode(message[HEADER.size :]))

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the length of each piece, in bytes."""
        for start in range(0, self.size, PIECE):
            yield start, min(PIECE, self.size - start)


# --- the server ---


def announce(file: BufferedReader) -> Announcement:
    digest = hashlib.file_digest(file, "sha256").digest()
    return Announcement(file.tell(), digest, Path(file.name).name)


async def serve_one(
    stream: aiordma.MessageStream, file: BufferedReader, announcement: Announcement
) -> None:
    try:
        with await stream.allocate(PIECE, aiordma.AccessFlags.REMOTE_READ) as memory:
            await stream.recv()
            await stream.send(announcement.pack())
            for start, length in announcement.pieces():
                piece = memory[:length]
                if await asyncio.to_thread(os.preadv, file.fileno(), [piece.view], start) != length:
                    raise ValueError(f"{announcement.name} has become shorter")
                await stream.send(piece)
    except (aiordma.RdmaError, OSError, ValueError) as error:
        print(f"file_transfer: {stream.peer_address[0]}: {error}", file=sys.stderr)


async def serve(path: Path, host: str | None, port: int) -> None:
    with path.open("rb") as file:
        announcement = announce(file)
        async with aiordma.listen_messages(host, port, options=OPTIONS) as listener:
            print(f"listening on port {listener.local_address[1]}", flush=True)
            await listener.serve(functools.partial(serve_one, file=file, announcement=announcement))


# --- the client ---


class Progress:
    """A progress bar on standard error: each step if that is a terminal, otherwise only the end."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._done = 0
        self._began = time.perf_counter()
        self._is_terminal = sys.stderr.isatty()

    def add(self, length: int) -> None:
        self._done += length
        if self._is_terminal:
            print(f"\r{self}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self.add(0)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if self._is_terminal:
            print(file=sys.stderr)
        elif exc_type is None:
            print(self, file=sys.stderr)

    def __str__(self) -> str:
        share = self._done / self._size if self._size else 1.0
        bar = "#" * int(30 * share)
        rate = self._done / (time.perf_counter() - self._began)
        return f"[{bar:<30}] {share:4.0%}  {self._done:,} bytes  {rate / 1e6:.1f} MB/s"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file. At the end of the block, rename it to `target`; at a failure, delete it."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    with partial.open("xb") as file:
        try:
            yield file
            file.flush()
            partial.replace(target)
        except BaseException:
            partial.unlink()
            raise


async def fetch_into(file: BinaryIO, stream: aiordma.MessageStream) -> None:
    await stream.send(b"")  # on iWARP, the connecting side must send first
    announcement = Announcement.unpack(await stream.recv())
    print(f"fetching {announcement.name!a}, {announcement.size:,} bytes", flush=True)
    received = hashlib.sha256()

    def store(data: memoryview) -> None:
        file.write(data)
        received.update(data)

    with (
        await stream.allocate(PIECE, stream.read_access) as memory,
        Progress(announcement.size) as progress,
    ):
        for _, length in announcement.pieces():
            nbytes = await stream.recv_into(memory)
            if nbytes != length:
                raise ValueError(f"the server sent {nbytes} bytes instead of {length}")
            await asyncio.to_thread(store, memory[:length].view)
            progress.add(length)
    if received.digest() != announcement.digest:
        raise ValueError(
            "the checksum is wrong: the file was changed during the transfer, or damaged"
        )


async def fetch(host: str, port: int, target: Path) -> None:
    with replacing(target) as file:
        async with aiordma.connect_messages(host, port, options=OPTIONS) as stream:
            await fetch_into(file, stream)


# --- the command line ---


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="serve a file until Ctrl-C")
    serving.add_argument("file", type=Path)
    serving.add_argument("--host", help="an RDMA address of this machine (default: all)")
    serving.add_argument(
        "--port", type=int, default=7475, help="default: %(default)s; 0: any free port"
    )
    fetching = commands.add_parser("fetch", help="fetch the file of a server")
    fetching.add_argument("host")
    fetching.add_argument("port", type=int)
    fetching.add_argument("target", type=Path, help="the file to write")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        if arguments.command == "serve":
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(serve(arguments.file, arguments.host, arguments.port))
        else:
            asyncio.run(fetch(arguments.host, arguments.port, arguments.target))
    except KeyboardInterrupt:
        sys.exit("file_transfer: interrupted")
    except (aiordma.RdmaError, OSError, ValueError) as error:
        sys.exit(f"file_transfer: {error}")


if __name__ == "__main__":
    main()
