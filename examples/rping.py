"""Ping a peer by RDMA READ and WRITE, or answer the pings, as rping(1) of rdma-core does.

    python examples/rping.py -s [-a ADDRESS] [-p PORT] [-S SIZE] [-P] [-v]
    python examples/rping.py -c -a ADDRESS [-p PORT] [-S SIZE] [-C COUNT] [-I ADDRESS] [-v] [-V]

The other side can be the C program. A ping has four steps. The client sends the address of a text.
The server reads the text and sends a reply. The client sends the address of a second buffer. The
server writes the text to that buffer and sends a reply.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import sys

import aiordma

MIN_SIZE = 26  # "rdma-ping-2147483647: " and some text
MAX_SIZE = 65535
RECORD_SIZE = 16
GO_AHEAD = bytes(RECORD_SIZE)  # the client checks only the size
LETTERS = bytes(range(ord("A"), ord("z") + 1))
# The C program has one of each, and does not accept more from a peer.
SOURCE_ACCESS = aiordma.AccessFlags.LOCAL_WRITE | aiordma.AccessFlags.REMOTE_READ
SINK_ACCESS = aiordma.AccessFlags.LOCAL_WRITE | aiordma.AccessFlags.REMOTE_WRITE
OPTIONS = aiordma.ConnectionOptions(responder_resources=1, initiator_depth=1)


def unpack(record: bytes) -> aiordma.RemoteBuffer:
    if len(record) != RECORD_SIZE:
        raise ValueError(f"the peer sent a record of {len(record)} bytes, not {RECORD_SIZE}")
    return aiordma.RemoteBuffer.unpack(record)


def text_of(ping: bytes) -> str:
    return ping.partition(b"\0")[0].decode("ascii", "backslashreplace")


# --- the server ---


async def answer_pings(connection: aiordma.Connection, arguments: argparse.Namespace) -> None:
    with await connection.allocate(arguments.S, connection.read_access) as memory:
        async for record in connection:
            source = unpack(record)
            if len(source) > len(memory):
                raise ValueError(f"a ping of {len(source)} bytes: -S allows {len(memory)} here")
            ping = memory[: len(source)]
            await connection.read(source, ping)
            if arguments.v:
                print(f"server ping data: {text_of(bytes(ping.view))}", flush=True)
            await connection.send(GO_AHEAD)
            await connection.write(ping, unpack(await connection.recv()))
            await connection.send(GO_AHEAD)
    print("server DISCONNECT EVENT...", file=sys.stderr)


async def answer_one_of_many(connection: aiordma.Connection, arguments: argparse.Namespace) -> None:
    try:
        await answer_pings(connection, arguments)
    except (aiordma.RdmaError, ValueError) as error:
        print(f"rping: {error}", file=sys.stderr)


async def serve(arguments: argparse.Namespace) -> None:
    async with aiordma.listen(arguments.a, arguments.p, options=OPTIONS) as listener:
        print(f"listening on port {listener.local_address[1]}", file=sys.stderr, flush=True)
        if arguments.P:
            handler = functools.partial(answer_one_of_many, arguments=arguments)
            await listener.serve(handler)
        else:
            async with await listener.accept() as connection:
                await answer_pings(connection, arguments)


# --- the client ---


def make_ping(number: int, size: int) -> bytes:
    """Return a C string: the number, and letters that start one further in each ping."""
    start = number % len(LETTERS)
    letters = LETTERS[start:] + LETTERS * (size // len(LETTERS) + 1)
    return (b"rdma-ping-%d: " % number + letters)[: size - 1] + b"\0"


async def ping(connection: aiordma.Connection, arguments: argparse.Namespace) -> None:
    with (
        await connection.allocate(arguments.S, SOURCE_ACCESS) as source,
        await connection.allocate(arguments.S, SINK_ACCESS) as sink,
    ):
        for number in itertools.islice(itertools.count(), arguments.C or None):
            sent = make_ping(number, arguments.S)
            memoryview(source)[:] = sent
            for memory in (source, sink):
                await connection.send(memory.remote.pack())
                unpack(await connection.recv())
            received = bytes(sink)
            if arguments.V and received != sent:
                raise ValueError(f"data mismatch in ping {number}")
            if arguments.v:
                print(f"ping data: {text_of(received)}", flush=True)


async def connect_and_ping(arguments: argparse.Namespace) -> None:
    local_address = (arguments.I, 0) if arguments.I else None
    async with aiordma.connect(
        arguments.a, arguments.p, local_address=local_address, options=OPTIONS
    ) as connection:
        await ping(connection, arguments)


# --- the command line ---


def ping_count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def ping_size(text: str) -> int:
    number = int(text)
    if not MIN_SIZE <= number <= MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{number} is not between {MIN_SIZE} and {MAX_SIZE}")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("-s", action="store_true", help="run the server")
    role.add_argument("-c", action="store_true", help="run the client")
    parser.add_argument(
        "-a", metavar="ADDRESS", help="address of the server (default of -s: all addresses)"
    )
    parser.add_argument("-p", metavar="PORT", type=int, default=7174, help="default: %(default)s")
    parser.add_argument(
        "-S",
        metavar="SIZE",
        type=ping_size,
        default=64,
        help="size of a ping in bytes; default: %(default)s",
    )
    parser.add_argument(
        "-C",
        metavar="COUNT",
        type=ping_count,
        default=0,
        help="number of pings; default: 0, no limit",
    )
    parser.add_argument("-I", metavar="ADDRESS", help="address that the client connects from")
    parser.add_argument(
        "-P", action="store_true", help="persistent: serve any number of clients, until Ctrl-C"
    )
    parser.add_argument("-v", action="store_true", help="print the pings")
    parser.add_argument(
        "-V", action="store_true", help="validate: compare the data received with the data sent"
    )
    arguments = parser.parse_args()
    if arguments.c and not arguments.a:
        parser.error("a client needs the server's address: -a ADDRESS")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(arguments) if arguments.s else connect_and_ping(arguments))
    except (aiordma.RdmaError, ValueError) as error:
        sys.exit(f"rping: {error}")


if __name__ == "__main__":
    main()
