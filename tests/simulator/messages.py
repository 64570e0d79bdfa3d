"""Messages: programs that use all operations of a connection, in both directions."""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import AsyncIterator
from functools import partial

from simulator.program import Program, Step

# isort: split
import loops
from helpers import SHARED

import aiordma
from aiordma import AccessFlags, Connection, ConnectionOptions, MemoryRegion
from simulator.pairs import End

AREA = 4096
FUNCTIONS = aiordma.connect, aiordma.listen
Side = tuple[Connection, ConnectionOptions]


class Messages(Program):
    """Messages, reads, writes and atomics between two ends of a connection."""

    async def operate(self) -> None:
        client, server = self._options(), self._options(is_server=True)
        async with self.pair(client, server, FUNCTIONS) as (near, far):
            ends = (near, client), (far, server)
            directions = [Direction(self, *ends), Direction(self, *reversed(ends))]
            tasks = [
                loops.create_task(step())
                for direction in directions
                for step in (*direction.senders, direction.receive_all, direction.access_all)
            ]
            if self.early or self.has_faults:
                await self.finish([near, far], tasks)
                await self.ended(tasks)
            else:
                await self.ended(tasks, allowed=False)
                self.figures["complete"] += 1
                await loops.sleep(1.0)  # cancelled requests complete
                for direction in directions:
                    direction.check_complete()

    def _options(self, *, is_server: bool = False) -> ConnectionOptions:
        chance = self.chance
        return ConnectionOptions(
            send_depth=chance.choice([1, 2, 8, 64]),
            recv_depth=chance.choice([4, 8, 64]),
            shared_recv_depth=chance.choice([0, 0, 8, 64]) if is_server else 0,
            max_message_size=chance.choice([64, 2000, 8192]),
            initiator_depth=chance.choice([1, 4]),
            responder_resources=chance.choice([1, 4]),
            max_inline=chance.choice([0, 64]),
            adaptive_poll=False,  # polling would read the real clock
        )


class Direction:
    """One direction of a connection: the messages, and the memory of the peer that it uses."""

    def __init__(self, program: Messages, sender: Side, receiver: Side) -> None:
        self.chance, self.program = program.chance, program
        (self.sender, sender_options), (self.receiver, receiver_options) = sender, receiver
        self.is_iwarp = program.simulation.near.is_iwarp
        self.largest = min(sender_options.max_message_size, receiver_options.max_message_size)
        depth = receiver_options.shared_recv_depth or receiver_options.recv_depth
        self.window = depth if self.is_iwarp else 1 << 30
        self.send_depth = sender_options.send_depth
        count = self.chance.choice([1, 3, 8])
        self.senders: list[Step] = [partial(self._send_all, number) for number in range(count)]
        """The functions of the tasks that send. Each sends its messages in order."""
        self.count = self.chance.randrange(1, 40) // count + 1
        self.immediates: dict[bytes, int | None] = {}
        """The immediate data of each message, by its head."""
        self.sent: set[bytes] = set()
        """The heads of the messages whose send() has returned."""
        self.received: list[bytes] = []
        self.sending = 0
        """The number of sends that are not done."""
        self.done = 0
        """The number of tasks that send no more."""
        self.sums = [0, 0]
        """The sum of the numbers that were added at the peer, and of those that perhaps were."""

    def message(self, sender: int, number: int) -> bytes:
        """Return a message: its head (the sender and the number), random bytes, a checksum."""
        size = self.chance.randrange(self.largest - 12)
        body = bytes([sender]) + number.to_bytes(7, "big") + self.chance.randbytes(size)
        has_immediate = not self.is_iwarp and self.chance.random() < 0.3
        self.immediates[body[:8]] = self.chance.randrange(1 << 32) if has_immediate else None
        return body + zlib.crc32(body).to_bytes(4, "big")

    def take(self, data: bytes) -> bytes:
        """Check a received message, and return its head."""
        body, checksum = data[:-4], data[-4:]
        assert zlib.crc32(body).to_bytes(4, "big") == checksum, "a message is corrupt"
        head = body[:8]
        before = [other for other in self.received if other[0] == head[0]]
        assert not before or head > before[-1], "a message came twice or too late"
        self.received.append(head)
        return head

    def check_complete(self) -> None:
        """Check that every message that was sent was received, and that nothing is left of it.

        The sender has all its credits again, and no memory in flight but that of unsignaled
        requests.
        """
        missing = self.sent - set(self.received)
        assert not missing, f"messages were lost: {sorted(missing)}"
        end = End(self.program.simulation, self.sender)
        credits, reads = end.free
        assert credits + len(end.sends) == self.send_depth, "a send credit was lost"
        assert reads == end.data_path.slow.remote.initiator_depth, "an RD/atomic credit was lost"
        assert end.taken_buffers == end.unsignaled_copies, "a buffer of the pool was lost"

    def unread(self) -> int:
        """Return the number of messages that were posted and not yet received by a task."""
        posted, stats = self.sender.stats.messages_sent, self.receiver.stats
        return posted - (stats.messages_received - stats.messages_unread)

    async def _send_all(self, sender: int) -> None:
        """Send the messages of one sender by all methods. Cancel some of the sends."""
        try:
            await self._send_each(sender)
        finally:
            self.done += 1

    async def _send_each(self, sender: int) -> None:
        for number in range(self.count):
            # iWARP has no flow control: this is it.
            pause = 1e-5
            while self.unread() + self.sending >= self.window:
                await loops.sleep(pause)
                pause = min(2 * pause, 1.0)
                if self.sender.closed or self.receiver.closed:
                    return
            message = self.message(sender, number)
            self.sending += 1
            sending = await self.program.attempt(
                partial(self._send, message, self.immediates[message[:8]]),
                self.program.sometimes(self.program.moment() / 10, 0.2),
            )
            self.sending -= 1
            if not sending.cancelled():
                sending.result()
                self.sent.add(message[:8])

    async def _send(self, data: bytes, imm: int | None) -> None:
        method = self.chance.randrange(4)
        if method == 0:
            await self.sender.send(data, imm=imm)
        elif method == 1:
            copied = bytearray(data)
            await self.sender.send(copied, imm=imm)
            copied[:] = b"?" * len(copied)
        elif method == 2:
            memory = bytearray(data)
            async with self._registered(memory, AccessFlags(0)) as region:
                await self.sender.send(region, imm=imm)
                memory[:] = b"?" * len(memory)  # the memory may be used again
        else:
            middle = bytearray(data[4:-2])
            async with self._registered(middle, AccessFlags(0)) as region:
                await self.sender.send([data[:4], region, data[-2:]], imm=imm)
        if self.chance.random() < 0.3:
            self.program.cancel_another()  # before a task runs that the same completion has woken

    @contextlib.asynccontextmanager
    async def _registered(
        self, memory: bytearray, access: AccessFlags
    ) -> AsyncIterator[MemoryRegion]:
        region = await self.sender.register(memory, access)
        try:
            yield region
        finally:
            region.close()

    async def receive_all(self) -> None:
        """Receive by all methods until the sender is done. Cancel some of the receives."""
        while self.done < len(self.senders) or not self.sent <= set(self.received):
            seconds = self.program.sometimes(self.program.moment() / 10) or 0.5
            receiving = await self.program.attempt(self._receive, seconds)
            if not receiving.cancelled():
                receiving.result()

    async def _receive(self) -> None:
        while True:
            method = self.chance.randrange(3)
            if method == 0:
                self.take(await self.receiver.recv())
            elif method == 1:
                buffer = bytearray(9000)
                self.take(bytes(buffer[: await self.receiver.recv_into(buffer)]))
            else:
                with await self.receiver.recv_message() as message:
                    head = self.take(bytes(message.data))
                    assert message.imm == self.immediates[head], "other immediate data"

    async def access_all(self) -> None:
        """Read and write the memory of the peer. Cancel some of the operations."""
        constant = bytearray(self.chance.randbytes(AREA))
        regions, steps = self.program.regions, [self._read, self._write, self._write_bytes]
        access = SHARED
        if not self.is_iwarp:
            steps.append(self._add)
            access |= AccessFlags.REMOTE_ATOMIC
        regions.append(readable := await self.receiver.register(constant, SHARED))
        regions.append(writable := await self.receiver.allocate(AREA, access))
        for _ in range(self.chance.randrange(10)):
            step = self.chance.choice(steps)
            remote = readable if step == self._read else writable
            task = await self.program.attempt(
                partial(step, remote, bytes(constant)),
                self.program.sometimes(self.program.moment() / 10),
            )
            if not task.cancelled():
                task.result()
        assert bytes(memoryview(readable)) == constant
        counter = int.from_bytes(memoryview(writable)[-8:], sys.byteorder)
        assert self.sums[0] <= counter <= self.sums[1], "an atomic was lost, or done twice"

    async def _read(self, remote: MemoryRegion, expected: bytes) -> None:
        start = self.chance.randrange(AREA - 1)
        part = remote.remote[start : start + self.chance.randrange(1, 2000)]
        buffer = bytearray(len(part))
        async with self._registered(buffer, SHARED) as region:
            await self.sender.read(part, region)
            assert buffer == expected[start : start + len(part)], "a read returned other bytes"

    async def _write(self, remote: MemoryRegion, _: bytes) -> None:
        memory = bytearray(self.chance.randbytes(1000))
        async with self._registered(memory, AccessFlags(0)) as region:
            await self.sender.write(region, remote.remote)
            if self.is_iwarp:  # which completes a write when it is sent, a read when it is answered
                async with self._registered(bytearray(1), SHARED) as answer:
                    await self.sender.read(remote.remote[:1], answer)
            assert memoryview(remote)[:1000] == memory
            memory[:] = b"?" * 1000

    async def _write_bytes(self, remote: MemoryRegion, _: bytes) -> None:
        data = self.chance.randbytes(self.chance.choice([10, 1000]))
        await self.sender.write(data, remote.remote[2000:])

    async def _add(self, remote: MemoryRegion, _: bytes) -> None:
        number = self.chance.randrange(1, 100)
        self.sums[1] += number
        before = await self.sender.fetch_and_add(remote.remote[-8:], number)
        assert before + number <= self.sums[1]
        self.sums[0] += number
