"""Wire messages of message streams that break the protocol, and a peer that sends them."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import AsyncIterator

import loops
from helpers import Host

import aiordma
from aiordma import Connection, ConnectionOptions, MessageOptions, MessageStream
from aiordma.message_streams.protocol import MessageProtocol
from aiordma.message_streams.wire import Kind

OPTIONS = MessageOptions(
    window=4, announcements=2, slot_size=256, max_frames=100, max_nbytes=1 << 20
)
HELLO = OPTIONS.hello()


def wire(kind: int, body: bytes = b"", *, count: int = 0, credits: int = 0) -> bytes:
    """Return a wire message."""
    return struct.pack(">BBHI", kind, 0, credits, count) + body


ENTRY = struct.pack(">QQII", 10, 20, 30, 0)
NUMBER = struct.pack(">Q", 0)
"""The body of ANNOUNCE: the number, before the entries."""
BAD: list[tuple[list[bytes], str]] = [
    ([b""], "no header"),
    ([wire(Kind.CREDIT)[:-1]], "no header"),
    ([wire(0)], "unknown kind 0"),
    ([wire(7)], "unknown kind 7"),
    ([wire(Kind.CREDIT, credits=1)], "5 credits; the window is 4"),
    ([wire(Kind.CREDIT, b"x")], "CREDIT with a body"),
    ([wire(Kind.FINISH, count=1)], "FINISH with the number 1"),
    ([wire(Kind.DONE, NUMBER + bytes(4), count=1)], "DONE with the number 1"),
    ([wire(Kind.FINISH)] * 2, "FINISH in the state FINISHED"),
    ([wire(Kind.FINISH), wire(Kind.EAGER)], "EAGER in the state FINISHED"),
    ([wire(Kind.DONE, b"x")], "DONE with 1 bytes"),
    ([wire(Kind.DONE, NUMBER + bytes(4))], "DONE for message 0"),
    ([wire(Kind.DONE, NUMBER + b"\0\0\0\2")], "unknown result 2"),
    ([wire(Kind.EAGER)] * 5, "more messages than it has credits for"),
    ([wire(Kind.EAGER, count=101)], "101 frames; the limit is 100"),
    ([wire(Kind.EAGER, count=0xFFFFFFFF)], "4294967295 frames"),
    ([wire(Kind.EAGER, NUMBER, count=2)], "does not fill its 8 bytes"),
    ([wire(Kind.EAGER, NUMBER + b"x", count=1)], "does not fill its 9 bytes"),
    ([wire(Kind.EAGER, struct.pack(">Q", 2) + b"x", count=1)], "does not fill its 9 bytes"),
    ([wire(Kind.EAGER, struct.pack(">Q", 1 << 63) + b"x", count=1)], "does not fill"),
    ([wire(Kind.ANNOUNCE, b"", count=1)], "has no number"),
    ([wire(Kind.ANNOUNCE, NUMBER, count=1)], "lists no frame"),
    ([wire(Kind.ANNOUNCE, NUMBER + ENTRY[1:], count=1)], "not a number of whole frame entries"),
    ([wire(Kind.ANNOUNCE, NUMBER + ENTRY * 2, count=1)], "more frames are listed than 1"),
    ([wire(Kind.ANNOUNCE, NUMBER + ENTRY, count=101)], "101 frames"),
    ([wire(Kind.ANNOUNCE, struct.pack(">Q", 1) + ENTRY, count=1)], "in place of another one"),
    ([wire(Kind.ANNOUNCE, NUMBER + ENTRY, count=1)] * 2, "in place of another one"),
    (
        [wire(Kind.ANNOUNCE, struct.pack(">Q", number) + ENTRY, count=1) for number in range(3)],
        "more than 2 messages are announced",
    ),
    (
        [wire(Kind.ANNOUNCE, NUMBER + struct.pack(">QQII", 1 << 21, 0, 0, 0), count=1)],
        "2097152 bytes; the limit is 1048576",
    ),
    (
        [wire(Kind.ANNOUNCE, NUMBER + struct.pack(">QQII", 2, (1 << 64) - 1, 0, 0), count=1)],
        "behind the last address",
    ),
    ([wire(Kind.TABLE, ENTRY, count=1)], "TABLE in the state READY"),
    ([wire(Kind.ANNOUNCE, NUMBER + ENTRY, count=2), wire(Kind.EAGER)], "EAGER in the state LI"),
    ([wire(Kind.ANNOUNCE, NUMBER + ENTRY, count=2), wire(Kind.TABLE)], "TABLE of 0 frames"),
    (
        [wire(Kind.ANNOUNCE, NUMBER + ENTRY, count=2), wire(Kind.TABLE, ENTRY, count=2)],
        "TABLE of 2 frames has 1",
    ),
    (
        [wire(Kind.ANNOUNCE, NUMBER + ENTRY, count=2), wire(Kind.TABLE, ENTRY * 2, count=2)],
        "more frames are listed than 2",
    ),
]
"""Wire messages of which the last one breaks the protocol, and a part of the error's text."""


def without_events() -> list[tuple[list[bytes], str]]:
    """Return those of BAD of which no message before the last one is an event for the user."""

    def is_silent(messages: list[bytes]) -> bool:
        protocol = MessageProtocol(HELLO, HELLO)
        return all(protocol.received(memoryview(message)) is None for message in messages[:-1])

    return [(messages, error) for messages, error in BAD if is_silent(messages)]


def random_message(chance: random.Random) -> bytes:
    """Return a wire message that is legal, broken, or nearly right."""
    kind = chance.choice([*Kind, chance.randrange(256)])
    body = chance.choice([ENTRY, NUMBER, NUMBER + ENTRY, chance.randbytes(20), b""])
    count = chance.choice([0, 1, 2, chance.randrange(1 << 32)])
    return wire(
        kind, body, count=count, credits=chance.choice([0, 0, 1, chance.randrange(1 << 16)])
    )


@contextlib.asynccontextmanager
async def raw_peer(address: Host) -> AsyncIterator[tuple[Connection, MessageStream]]:
    """Yield a message stream, and the plain connection that is its peer."""
    plain = ConnectionOptions(max_message_size=HELLO.slot_size, recv_depth=32)
    async with aiordma.listen_messages(address.host, 0, options=OPTIONS) as listener:
        accepting = loops.create_task(listener.accept())
        async with (
            aiordma.connect(
                *listener.local_address, private_data=HELLO.pack(), options=plain
            ) as raw,
            await accepting as stream,
        ):
            yield raw, stream
