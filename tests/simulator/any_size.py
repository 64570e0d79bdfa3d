"""Programs of the campaign with messages of any size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from simulator.program import Program

# isort: split
import loops

import aiordma
from aiordma import AccessFlags, ConnectionOptions, MessageOptions, MessageStream, PeerClosed

READABLE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ
LARGEST = 40_000


class AnySize(Program):
    """Messages of any size in both directions of a message stream."""

    async def operate(self) -> None:
        ends = [End(self), End(self)]
        functions = aiordma.connect_messages, aiordma.listen_messages
        async with self.pair(self._options(), self._options(), functions) as streams:
            for end, stream in zip(ends, streams, strict=True):
                end.stream = stream
            tasks = [loops.create_task(end.send_all()) for end in ends]
            tasks += [loops.create_task(end.receive_all()) for end in ends]
            if self.early or self.has_faults:
                await self.finish(list(streams), tasks)
            await self.ended(tasks, allowed=self.early or self.has_faults)
        for end, other in (ends, ends[::-1]):
            numbers = list(other.received)
            assert numbers == sorted(numbers), "messages came in another order"
            if not (self.early or self.has_faults):
                lost = end.sent - other.received.keys()
                assert not lost, f"{len(lost)} messages were lost"

    def _options(self) -> MessageOptions:
        chance = self.chance
        return MessageOptions(
            window=chance.choice([1, 2, 16]),
            announcements=chance.choice([1, 2, 8]),
            slot_size=chance.choice([64, 300, 4096]),
            eager_limit=chance.choice([0, 100, 4096]),
            max_pooled=chance.choice([0, 1 << 14, 1 << 28]),
            connection=ConnectionOptions(
                max_inline=chance.choice([0, 64]),
                initiator_depth=chance.choice([1, 4]),
                adaptive_poll=False,  # polling would read the real clock
            ),
        )


class End:
    """One of the ends, with the messages that it sends and receives."""

    stream: MessageStream

    def __init__(self, program: AnySize) -> None:
        self.chance, self.program = program.chance, program
        self.sent: set[int] = set()
        """The numbers of the messages whose send() has returned."""
        self.queued: set[int] = set()
        """The numbers of the messages of send_soon() that are not known to be sent."""
        self.received: dict[int, int] = {}
        """The number of copies of each message, by its number."""

    async def send_all(self) -> None:
        """Send messages, and the end of them. Cancel some of the sends."""
        chance, program = self.chance, self.program
        for number in range(chance.randrange(3, 25)):
            message = await self._message(number)
            if chance.random() < 0.3:
                self.stream.send_soon(message)
                self.queued.add(number)
            else:
                seconds = program.sometimes(program.moment() / 10, 0.2)
                task = await program.attempt(partial(self.stream.send, message), seconds)
                if task.cancelled():
                    continue
                task.result()
                self.sent.add(number)
                self._overwrite(message)
            if chance.random() < 0.2:
                await self._drain()
            if chance.random() < 0.3:
                await loops.sleep(program.moment())
        await self._drain()
        await self.stream.send_eof()

    async def _message(self, number: int) -> Any:
        """Return a message: its number, random bytes, and their checksum.

        They are in one buffer or in several frames.
        """
        chance = self.chance
        if chance.random() < 0.5:
            data = number.to_bytes(4, "big") + chance.randbytes(chance.choice([0, 10, 40, 5000]))
            whole = data + zlib.crc32(data).to_bytes(4, "big")
            return whole if chance.random() < 0.5 else bytearray(whole)
        count = chance.choice([0, 1, 1, 3, 20])
        frames: list[Any] = [bytearray(number.to_bytes(4, "big"))]
        for _ in range(count):
            size = chance.choice([0, 1, 50, 1000, 1 + LARGEST // (count + 1)])
            frames.append(bytearray(chance.randbytes(size)))
        checksum = zlib.crc32(b"".join(frames))
        if chance.random() < 0.2:
            region = await self.stream.register(frames[0], READABLE)
            self.program.regions.append(region)
            frames[0] = region
        return [*frames, checksum.to_bytes(4, "big")]

    def _overwrite(self, message: Any) -> None:
        """Use the memory of a message for something else."""
        for frame in message[1:-1] if isinstance(message, list) else [message]:
            if isinstance(frame, bytearray):
                frame[:] = b"?" * len(frame)

    async def _drain(self) -> None:
        queued = set(self.queued)
        seconds = self.program.sometimes(self.program.moment() / 10, 0.2)
        task = await self.program.attempt(self.stream.drain, seconds)
        if not task.cancelled():
            task.result()
            self.sent |= queued

    async def receive_all(self) -> None:
        """Receive until the peer has finished, in all ways. Cancel some of the receives."""
        program = self.program
        while True:
            receive: Any = self.chance.choice(
                [self.stream.recv, self._recv_message, self._recv_into, self._recv_frames]
            )
            seconds = program.sometimes(program.moment() / 10, 0.2)
            task = await program.attempt(receive, seconds)
            if task.cancelled():
                continue
            if isinstance(task.exception(), PeerClosed):
                return
            data = task.result()
            number = int.from_bytes(data[:4], "big")
            assert zlib.crc32(data[:-4]).to_bytes(4, "big") == data[-4:], "a message is corrupt"
            self.received[number] = self.received.get(number, 0) + 1
            assert self.received[number] == 1, "a message came twice"
            if self.chance.random() < 0.2:
                await loops.sleep(program.moment())

    async def _recv_message(self) -> bytes:
        with await self.stream.recv_message() as message:
            return b"".join(message.frames)

    async def _recv_into(self) -> bytes:
        buffer = bytearray(2 * LARGEST)
        return bytes(buffer[: await self.stream.recv_into(buffer)])

    async def _recv_frames(self) -> bytes:
        def allocate(sizes: Sequence[int]) -> list[bytearray]:
            return [bytearray(size) for size in sizes]

        frames: Sequence[Any] = await self.stream.recv_frames(allocate)
        return b"".join(frames)
