"""Chat in a multicast group: each line of the standard input is sent as one datagram.

    python examples/multicast_chat.py HOST [GROUP] [--name NAME]

HOST is an RDMA address of this machine. The program ends at the end of the input, or by Ctrl-C.
"""

import argparse
import asyncio
import contextlib
import getpass
import sys
from collections.abc import AsyncIterator

import aiordma

# The sender of a line does not receive it.
OPTIONS = aiordma.DatagramOptions(multicast_loopback=False)


async def input_lines() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await reader.readline():
        yield line.decode().rstrip("\n")


async def show(endpoint: aiordma.DatagramEndpoint) -> None:
    async for datagram in endpoint:
        print(f"{datagram.peer.host}: {datagram.data.decode(errors='replace')}", flush=True)


async def chat(host: str, group: str, name: str) -> None:
    async with (
        aiordma.open_datagram((host, 0), options=OPTIONS) as endpoint,
        await endpoint.join(group) as members,
    ):
        showing = asyncio.create_task(show(endpoint))
        print(f"in the group {group}", flush=True)
        async for line in input_lines():
            message = f"{name}: {line}".encode()
            await endpoint.send_to(members, message[: endpoint.max_message_size])
        await endpoint.aclose()
        await showing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", help="an RDMA address of this machine")
    parser.add_argument("group", nargs="?", default="239.17.18.19", help="default: %(default)s")
    parser.add_argument("--name", default=getpass.getuser(), help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(chat(arguments.host, arguments.group, arguments.name))
    except (aiordma.RdmaError, ValueError) as error:
        sys.exit(f"multicast_chat: {error}")


if __name__ == "__main__":
    main()
