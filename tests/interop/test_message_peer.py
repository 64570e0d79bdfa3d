"""Message streams with a program in C that was written from docs/message_wire.md alone."""

from __future__ import annotations

import asyncio
import random
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest
from programs import running_peer
from streaming import pattern

import aiordma
from aiordma import ConnectionOptions, PeerClosed, Rejected
from aiordma.message_streams.connect import connect_messages, listen_messages
from aiordma.message_streams.message_stream import MessageStream
from aiordma.message_streams.options import MessageOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]

SOURCE = Path(__file__).with_name("message_peer.c")
LIMIT = 1000
"""The size of the largest message that the program sends with its bytes."""
SLOT_SIZE, WINDOW = 256, 4
"""Limits of the program."""
EMPTY_FRAMES = SLOT_SIZE // 8 - 1
"""The number of empty frames that fill a slot."""
DEFAULT = MessageOptions()
SMALL = MessageOptions(window=2, announcements=1, slot_size=300, eager_limit=50)
OF_PROGRAM = b"message_peer"
"""The private data of the program when it connects."""

Frames = list[bytes]
Counts = dict[str, int]
"""The number of wire messages of each kind."""

with_each_role = pytest.mark.parametrize("role", ["listen", "connect"])
with_options = pytest.mark.parametrize(
    ("role", "options"),
    [
        pytest.param("listen", DEFAULT, id="listen-default"),
        pytest.param("connect", SMALL, id="connect-small"),
        pytest.param("listen", SMALL, id="listen-small", marks=pytest.mark.campaign),
        pytest.param("connect", DEFAULT, id="connect-default", marks=pytest.mark.campaign),
    ],
)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the program."""
    compiled = tmp_path_factory.mktemp("message_peer") / "message_peer"
    flags = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", compiled, SOURCE, "-lrdmacm", "-libverbs"], check=True)
    return compiled


async def next_line(process: asyncio.subprocess.Process) -> str:
    """Return the next line that the program prints."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode()


async def port_of(process: asyncio.subprocess.Process) -> int:
    """Return the port where the program listens, when it does."""
    line = await next_line(process)
    assert line.startswith("listening on "), line
    return int(line.split()[-1])


class Echo:
    """A message stream to the program, and the counts that the program prints at its end."""

    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream
        self.received: Counts = {}
        self.sent: Counts = {}

    async def read_counts(self, process: asyncio.subprocess.Process) -> None:
        """Read what the program prints at its end."""
        for counts in (self.received, self.sent):
            _, *words = (await next_line(process)).split()
            counts.update(zip(words[::2], map(int, words[1::2]), strict=True))

    async def send_all(self, messages: list[Frames]) -> None:
        """Send messages one after the other, and end this direction."""
        for frames in messages:
            await self.stream.send(frames)
        await self.stream.send_eof()

    async def send_at_once(self, messages: list[Frames]) -> None:
        """Send messages at the same time, and end this direction."""
        async with asyncio.TaskGroup() as group:
            for frames in messages:
                group.create_task(self.stream.send(frames))
        await self.stream.send_eof()

    async def receive_all(self) -> list[Frames]:
        """Receive messages until the peer ends its direction."""
        messages: list[Frames] = []
        with suppress(PeerClosed):
            while True:
                with await self.stream.recv_message() as message:
                    messages.append([bytes(frame) for frame in message.frames])
        return messages

    async def exchange(self, messages: list[Frames]) -> None:
        """Send messages while they come back, in the same order."""
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(self.receive_all())
            group.create_task(self.send_all(messages))
        check_equal(receiving.result(), messages)


def check_equal(received: list[Frames], sent: list[Frames]) -> None:
    """Check that messages are equal. A difference is not printed: the messages can be long."""
    assert [[*map(len, frames)] for frames in received] == [[*map(len, frames)] for frames in sent]
    are_equal = received == sent
    assert are_equal


@asynccontextmanager
async def echoing(
    program: Path,
    role: str,
    address: DeviceAddress,
    options: MessageOptions = DEFAULT,
    private_data: bytes = b"",
) -> AsyncIterator[Echo]:
    """Run the program in a role, and connect a message stream to it."""
    async with listen_messages(address.host, 0, options=options) as listener:
        port = listener.local_address[1] if role == "connect" else 0
        async with running_peer(
            program, role, address.host, port, LIMIT, prints="end 0"
        ) as process:
            streams: AbstractAsyncContextManager[MessageStream]
            if role == "connect":
                streams = await listener.accept()
            else:
                streams = connect_messages(
                    *(address.host, await port_of(process)),
                    private_data=private_data,
                    options=options,
                )
            try:
                async with streams as stream:
                    echo = Echo(stream)
                    yield echo
            except Exception as error:
                if process.returncode is not None and process.stderr is not None:
                    error.add_note((await process.stderr.read()).decode())
                raise
            await echo.read_counts(process)


# --- messages ---


@with_options
async def test_messages_of_each_size(
    program: Path, any_address: DeviceAddress, role: str, options: MessageOptions
) -> None:
    limits = (SLOT_SIZE - 16, options.eager_limit, options.slot_size - 16, LIMIT)
    around = sorted({limit + more for limit in limits for more in (-1, 0, 1)})
    sizes = [0, 1, *around, 64 * 1024, 3 * 1024 * 1024 + 1, 5, 9 * 1024 * 1024]
    async with echoing(program, role, any_address, options) as echo:
        await echo.exchange([[pattern(size, size)] for size in sizes])
    for counts in (echo.received, echo.sent):
        assert counts["EAGER"] + counts["ANNOUNCE"] == len(sizes)
        assert counts["EAGER"] > 1
        assert counts["ANNOUNCE"] > 3
        assert counts["FINISH"] == 1
    assert echo.sent["DONE"] == echo.received["ANNOUNCE"]
    assert echo.received["DONE"] == echo.sent["ANNOUNCE"]


@with_options
async def test_messages_of_many_frames(
    program: Path, any_address: DeviceAddress, role: str, options: MessageOptions
) -> None:
    """The entries of the last message need more wire messages than CREDIT waits for."""
    count = 2000 if options is DEFAULT else 300
    messages = [
        [b"", b""],
        [b"", b"one", b"", b"two"],
        *[[b""] * (EMPTY_FRAMES + more) for more in (-1, 0, 0, 0, 0, 0, 1)],
        [b""] * 300,
        [bytes([number]) for number in range(200)],
        [pattern(number * 7 % 5000, number) for number in range(count)],
    ]
    async with echoing(program, role, any_address, options) as echo:
        await echo.exchange(messages)
    assert echo.received["TABLE"] > WINDOW
    assert echo.sent["TABLE"] > options.window / 2
    assert echo.sent["CREDIT"] > 0
    assert echo.received["CREDIT"] > 0


@with_options
async def test_many_messages_at_once(
    program: Path, any_address: DeviceAddress, role: str, options: MessageOptions
) -> None:
    choose = random.Random(35)
    messages = [
        [
            pattern(choose.choice((0, 3, 30, 300, 3000, 30000)), number)
            for _ in range(choose.randint(1, 20))
        ]
        for number in range(60)
    ]
    async with (
        echoing(program, role, any_address, options) as echo,
        asyncio.TaskGroup() as group,
    ):
        receiving = group.create_task(echo.receive_all())
        group.create_task(echo.send_at_once(messages))
    # The order of messages that are sent at the same time is not defined.
    check_equal(sorted(receiving.result()), sorted(messages))


@with_each_role
async def test_messages_to_larger_slots(
    program: Path, any_address: DeviceAddress, role: str
) -> None:
    options = MessageOptions(slot_size=100, eager_limit=50)
    async with echoing(program, role, any_address, options) as echo:
        await echo.exchange([[b"more than fits into one slot"] * 10])


@with_each_role
async def test_messages_come_back_after_the_own_direction_has_ended(
    program: Path, any_address: DeviceAddress, role: str
) -> None:
    messages = [[b"small"], [pattern(100_000)], [b"last"]]
    async with echoing(program, role, any_address) as echo:
        await echo.send_all(messages)
        check_equal(await echo.receive_all(), messages)


@with_each_role
async def test_no_message_at_all(program: Path, any_address: DeviceAddress, role: str) -> None:
    async with echoing(program, role, any_address) as echo:
        await echo.exchange([])


# --- connecting ---


async def test_private_data_follows_the_hello(program: Path, any_address: DeviceAddress) -> None:
    async with echoing(program, "listen", any_address, private_data=b"of the user") as echo:
        assert echo.stream.private_data.rstrip(b"\0") == b"of the user"
        await echo.exchange([])
    async with echoing(program, "connect", any_address) as echo:
        assert echo.stream.private_data.rstrip(b"\0") == OF_PROGRAM
        await echo.exchange([])


# --- a peer that breaks the protocol, so that these tests can rely on what the program checks ---

EAGER, ANNOUNCE, TABLE, DONE, CREDIT, FINISH = range(1, 7)


def hello(magic: bytes = b"aiMS", version: int = 1, slot_size: int = 4096) -> bytes:
    """Return a Hello."""
    return struct.pack(">4sBBHHHIIQ", magic, version, 0, 16, 8, 0, slot_size, 1000, 1 << 30)


def wire(kind: int, number: int = 0, body: bytes = b"", *, credits: int = 0) -> bytes:
    """Return a wire message."""
    return struct.pack(">BBHI", kind, 0, credits, number) + body


def sizes(*numbers: int) -> bytes:
    """Return numbers of 8 bytes."""
    return struct.pack(f">{len(numbers)}Q", *numbers)


def entries(*numbers: int) -> bytes:
    """Return entries of frames of these sizes, in memory that does not exist."""
    return b"".join(struct.pack(">QQII", size, 0, 0, 0) for size in numbers)


LISTING = wire(ANNOUNCE, 3, sizes(0) + entries(0))
BREAKS = {
    "short header": [b"\1\0\0"],
    "unknown kind": [wire(7)],
    "eager sizes": [wire(EAGER, 2, sizes(0))],
    "eager short": [wire(EAGER, 1, sizes(5) + b"four")],
    "eager long": [wire(EAGER, 1, sizes(3) + b"four")],
    "eager overflow": [wire(EAGER, 2, sizes(1 << 63, 1 << 63))],
    "frames": [wire(ANNOUNCE, 2001, sizes(0) + entries(0))],
    "size": [wire(ANNOUNCE, 1, sizes(0) + entries(1 << 27))],
    "no entries": [wire(ANNOUNCE, 1, sizes(0))],
    "part of an entry": [wire(ANNOUNCE, 1, sizes(0) + entries(0)[1:])],
    "too many entries": [wire(ANNOUNCE, 1, sizes(0) + entries(0, 0))],
    "announced number": [wire(ANNOUNCE, 1, sizes(1) + entries(0))],
    "table of no message": [wire(TABLE, 1, entries(0))],
    "table number": [LISTING, wire(TABLE, 1, entries(0, 0))],
    "table long": [LISTING, wire(TABLE, 3, entries(0, 0, 0))],
    "eager while listing": [LISTING, wire(EAGER, 0)],
    "announce while listing": [LISTING, wire(ANNOUNCE, 1, sizes(1) + entries(0))],
    "finish while listing": [LISTING, wire(FINISH)],
    "finish with a body": [wire(FINISH, body=b"1")],
    "finish twice": [wire(FINISH), wire(FINISH)],
    "eager after finish": [wire(FINISH), wire(EAGER, 0)],
    "too many credits": [wire(CREDIT, credits=1)],
    "credit with a body": [wire(CREDIT, body=b"1")],
    "done of no message": [wire(DONE, body=sizes(0) + bytes(4))],
    "done short": [wire(DONE, body=sizes(0))],
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", BREAKS)
async def test_the_program_notices_a_broken_protocol(
    program: Path, any_address: DeviceAddress, name: str
) -> None:
    async with refused(program, any_address) as port:
        options = ConnectionOptions(max_message_size=4096)
        async with await aiordma.connect(
            any_address.host, port, private_data=hello(), options=options
        ) as connection:
            for message in BREAKS[name]:
                await connection.send(message)
            async for _ in connection:
                pass


@pytest.mark.campaign
@pytest.mark.parametrize(
    "private_data", [b"", hello(magic=b"aiMs"), hello(version=2), hello(slot_size=39)]
)
async def test_the_program_rejects_another_hello(
    program: Path, any_address: DeviceAddress, private_data: bytes
) -> None:
    async with refused(program, any_address) as port:
        with pytest.raises(Rejected):
            await aiordma.connect(any_address.host, port, private_data=private_data)


@asynccontextmanager
async def refused(program: Path, address: DeviceAddress) -> AsyncIterator[int]:
    """Run the program, and yield its port. In the block it ends: the protocol is broken."""
    process = await asyncio.create_subprocess_exec(
        *(program, "listen", address.host, "0", str(LIMIT)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield await port_of(process)
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 1
    assert errors.startswith(b"message_peer: broken protocol: ")
