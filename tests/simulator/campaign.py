"""A campaign: programs that a seed decides, on simulated devices that the same seed decides.

A program connects, sends, receives, reads, writes, uses byte streams, cancels, closes and aborts.
The seed also draws the order of all events, and which calls fail. At the end of each program:

- bytes have arrived as they were sent, in order, and no message twice;
- memory that was given back was not used any more;
- every await has ended, with a result or a typed error;
- nothing is left: no C object, no task, no job.

    python -m simulator.campaign SEED [COUNT]

runs COUNT programs from SEED on, and prints the seeds that fail. PYTHONPATH must contain `tests`.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import random
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from simulator import Simulation

# isort: split
import loops

import aiordma
from aiordma import (
    AccessFlags,
    BusyError,
    ByteStream,
    Connection,
    ConnectionOptions,
    MemoryRegion,
    RdmaError,
    StreamOptions,
)
from simulator.world import Failure

PORT = 7471
LONGEST = 2000.0
"""Seconds of virtual time for one program."""
LIMIT = 120.0
"""Seconds of real time for one program. Most take a fraction of a second."""
SHARED = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
AREA = 4096
# Calls that can fail on a real machine, with the errno.
FALLIBLE = {
    "ibv_reg_mr": errno.ENOMEM,
    "ibv_alloc_pd": errno.ENOMEM,
    "ibv_create_cq": errno.ENOMEM,
    "ibv_create_comp_channel": errno.EMFILE,
    "rdma_create_event_channel": errno.EMFILE,
    "rdma_create_id": errno.ENOMEM,
    "rdma_create_qp": errno.ENOMEM,
    "rdma_resolve_addr": errno.ENODEV,
    "rdma_resolve_route": errno.ENODEV,
    "rdma_connect": errno.ENOMEM,
    "rdma_accept": errno.ECONNRESET,
    "rdma_listen": errno.EADDRINUSE,
    "rdma_migrate_id": errno.ENXIO,
    "rdma_reject": errno.EINVAL,
}
Step = Callable[[], Awaitable[Any]]


class Campaign:
    """The program of one seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.figures: Counter[str] = Counter()
        self.attempts: list[Any] = []
        """The tasks of attempt()."""
        self.regions: list[MemoryRegion] = []
        """Regions that are closed after the connections, as cancelled requests can use them."""
        chance = self.chance
        self.kind = chance.choice(["asyncio", "trio"])
        self.simulation = Simulation(seed=seed, iwarp=chance.random() < 0.4)
        self.failure_rate = chance.choice([0.0, 0.0, 0.01, 0.1])
        self.has_faults = self.failure_rate > 0 or chance.random() < 0.3
        """True if a fault can end an operation that neither side has ended."""
        self.end = chance.choice(["close", "close", "abort", "both", "cancel", "remove"])
        self.scenario = chance.choice([self.messages, self.messages, self.streams, self.connects])

    def run(self) -> None:
        """Run the program.

        Raises:
            AssertionError: a rule does not hold.
        """
        self.simulation.world.calls.any_hook = self._on_call
        self.simulation.run(lambda: loops.in_nursery(self._program), self.kind)

    def _on_call(self, name: str) -> None:
        if name in FALLIBLE and self.failure_rate and self.chance.random() < self.failure_rate:
            self.figures["failed calls"] += 1
            raise Failure(FALLIBLE[name])

    async def _program(self) -> None:
        self._schedule_faults()
        with self._typed_errors():
            async with loops.timeout(LONGEST):
                await self.scenario()
        await self._end(self.attempts)

    async def attempt(self, step: Step, seconds: float | None = None) -> Any:
        """Run a step in a task, and cancel it after `seconds`. Return the task, which has ended."""
        task = loops.create_task(step())
        self.attempts.append(task)
        try:
            if seconds is not None:
                await loops.sleep(seconds)
                task.cancel()
            await loops.wait([task])
        finally:
            task.cancel()
        return task

    def _schedule_faults(self) -> None:
        world, chance = self.simulation.world, self.chance
        if self.has_faults and chance.random() < 0.5:
            world.after(self.moment(), self._refuse_posts)
        if self.has_faults and chance.random() < 0.3:
            world.after(self.moment(), self.simulation.network.cut)
        if self.end == "remove":
            self.has_faults = True
            device = chance.choice([self.simulation.near, self.simulation.far])
            world.after(self.moment(), lambda: self.simulation.cm.remove_device(device))

    def _refuse_posts(self) -> None:
        """Let each queue pair refuse one request."""
        for qp in self.simulation.queue_pairs():
            qp.pointer.sends.refusal = errno.ENOMEM
        self.simulation.world.after(1e-4, self._accept_posts)

    def _accept_posts(self) -> None:
        for qp in self.simulation.queue_pairs():
            qp.pointer.sends.refusal = 0

    def moment(self) -> float:
        """Return a time in seconds at which a program is usually busy."""
        return self.chance.choice([0.0, 1e-4, 1e-3, 0.01, 0.1]) * self.chance.random()

    @contextlib.contextmanager
    def _typed_errors(self) -> Any:
        """Accept a typed error if the program has faults."""
        try:
            yield
        except RdmaError as error:
            if not self.has_faults:
                raise
            self.figures[type(error).__name__] += 1

    def cancel_another(self) -> None:
        """Cancel another attempt: it can have been woken by the same event."""
        others = [task for task in self.attempts if not task.done()]
        if others:
            self.chance.choice(others).cancel()

    # --- connecting ---

    @contextlib.asynccontextmanager
    async def _pair(
        self, client: Any, server: Any, *, streams: bool = False
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Connect two ends. Abort them at the end of the block."""
        host = self.simulation.far.host
        connect: Any = aiordma.connect_stream if streams else aiordma.connect
        listen: Any = aiordma.listen_stream if streams else aiordma.listen
        async with listen(host, PORT, options=server) as listener:
            accepting = loops.create_task(listener.accept())
            try:
                near = await connect(host, PORT, options=client)
            except BaseException:
                accepting.cancel()
                await loops.wait([accepting])
                raise
            try:
                far = await accepting
            except BaseException:
                near.abort()
                await near.aclose()
                raise
        try:
            yield near, far
        finally:
            for end in (near, far):
                end.abort()
                await end.aclose()
            while self.regions:
                self.regions.pop().close()

    async def connects(self) -> None:
        """Connect and listen again and again. Cancel, reject, or close some of the connections."""
        host = self.simulation.far.host
        for _ in range(self.chance.randrange(2, 6)):
            with self._typed_errors():
                async with aiordma.listen(host, PORT) as listener:
                    serving = loops.create_task(self._answer(listener))
                    clients = [
                        loops.create_task(self._client())
                        for _ in range(self.chance.randrange(1, 5))
                    ]
                    for client in clients:
                        if self.chance.random() < 0.4:
                            await loops.sleep(self.moment())
                            client.cancel()
                    await self._end(clients)
                    serving.cancel()
                    await self._end([serving])

    async def _answer(self, listener: aiordma.Listener) -> None:
        async for request in listener:
            with contextlib.suppress(RdmaError):
                if self.chance.random() < 0.3:
                    await request.reject(b"no")
                    continue
                async with request.accept() as connection:
                    if self.chance.random() < 0.5:
                        await connection.send(b"hello")
                    if self.chance.random() < 0.3:
                        connection.abort()

    async def _client(self) -> None:
        with contextlib.suppress(RdmaError):  # rejected, or the peer was faster
            async with aiordma.connect(self.simulation.far.host, PORT) as connection:
                await connection.send(b"first")
                async for message in connection:
                    assert message == b"hello"
        self.figures["clients"] += 1

    async def _end(self, tasks: list[Any], *, allowed: bool = True) -> None:
        """Wait until tasks have ended: with a result, a typed error, or cancelled."""
        await loops.wait(tasks)
        for task in tasks:
            if task.cancelled():
                self.figures["cancelled"] += 1
                continue
            error = task.exception()
            if error is not None and not (allowed and isinstance(error, RdmaError)):
                raise error
            if isinstance(error, BusyError):
                raise error

    # --- messages ---

    async def messages(self) -> None:
        """Use all operations of a connection in both directions."""
        chance = self.chance
        options = [
            ConnectionOptions(
                send_depth=chance.choice([1, 2, 8, 64]),
                recv_depth=chance.choice([4, 8, 64]),
                max_message_size=chance.choice([64, 2000, 8192]),
                initiator_depth=chance.choice([1, 4]),
                responder_resources=chance.choice([1, 4]),
                max_inline=chance.choice([0, 64]),
                adaptive_poll=False,  # polling would read the real clock
            )
            for _ in range(2)
        ]
        async with self._pair(options[0], options[1]) as (near, far):
            await near.send(Direction.first)
            assert await far.recv() == Direction.first
            there = Direction(self, near, far, *options)
            back = Direction(self, far, near, *reversed(options))
            tasks = [
                loops.create_task(step())
                for direction in (there, back)
                for step in (direction.send_all, direction.receive_all, direction.access_all)
            ]
            early = chance.random() < 0.5 or self.end == "remove"
            if early:
                await loops.sleep(self.moment())
                await self._finish(near, far, tasks)
            await self._end(tasks, allowed=early or self.has_faults)
            if not early and not self.has_faults:
                there.check_complete()
                back.check_complete()

    async def _finish(self, near: Any, far: Any, tasks: list[Any]) -> None:
        """End a connection early in one of several manners."""
        ends = [near, far]
        self.chance.shuffle(ends)
        self.figures[f"ended by {self.end}"] += 1
        if self.end == "cancel":
            for task in tasks:
                task.cancel()
        elif self.end == "abort":
            ends[0].abort()
        elif self.end == "both":
            closing = [loops.create_task(end.aclose()) for end in ends]
            await self._end(closing)
        else:
            await ends[0].aclose()
        await loops.sleep(100.0)
        if not self.has_faults:
            waiting = sum(not task.done() for task in tasks)
            assert not waiting, f"the connection has ended, and {waiting} tasks still wait"
        for task in tasks:
            task.cancel()

    # --- streams ---

    async def streams(self) -> None:
        """Send bytes in both directions of a stream, and end it in one of several manners."""
        chance = self.chance
        options = [
            StreamOptions(
                send_buffer=chance.choice([2048, 10_000, 1 << 16]),
                recv_buffer=chance.choice([2048, 10_001, 1 << 16]),
                send_depth=chance.choice([16, 128]),
                recv_depth=chance.choice([16, 64]),
                max_inline=chance.choice([0, 64]),
            )
            for _ in range(2)
        ]
        sent = [chance.randbytes(chance.choice([10, 1000, 60_000])) for _ in range(2)]
        received = [bytearray(), bytearray()]
        async with self._pair(options[0], options[1], streams=True) as ends:
            tasks = [
                loops.create_task(self._send_bytes(end, data))
                for end, data in zip(ends, sent, strict=True)
            ]
            tasks += [
                loops.create_task(self._receive_bytes(end, into))
                for end, into in zip(ends, received, strict=True)
            ]
            early = chance.random() < 0.4 or self.end == "remove"
            if early:
                await loops.sleep(self.moment())
                await self._finish(*ends, tasks)
            await self._end(tasks, allowed=early or self.has_faults)
        for data, into in zip(sent, reversed(received), strict=True):
            assert data.startswith(into), "the received bytes differ from those sent"
            assert early or self.has_faults or len(into) == len(data)

    async def _send_bytes(self, stream: ByteStream, data: bytes) -> None:
        at = 0
        while at < len(data):
            part = bytearray(data[at : at + self.chance.choice([1, 63, 1000, 5000, 100_000])])
            await stream.send(part)
            at += len(part)
            part[:] = b"?" * len(part)  # the stream has a copy
        await stream.send_eof()

    async def _receive_bytes(self, stream: ByteStream, into: bytearray) -> None:
        while True:
            count = self.chance.choice([1, 100, 4096, 1 << 20])
            receiving = await self.attempt(
                partial(stream.receive, count),
                self.moment() / 100 if self.chance.random() < 0.1 else None,
            )
            if receiving.cancelled():
                continue
            data = receiving.result()
            if not data:
                return
            into += data


class Direction:
    """One direction of a connection: the messages, and the memory of the peer that it uses."""

    first = b"first"

    def __init__(
        self,
        campaign: Campaign,
        sender: Connection,
        receiver: Connection,
        sender_options: ConnectionOptions,
        receiver_options: ConnectionOptions,
    ) -> None:
        self.chance, self.campaign = campaign.chance, campaign
        self.sender, self.receiver = sender, receiver
        self.largest = min(sender_options.max_message_size, receiver_options.max_message_size)
        self.window = receiver_options.recv_depth if campaign.simulation.near.is_iwarp else 1 << 30
        self.senders = self.chance.choice([1, 1, 3])
        """The number of tasks that send. Each sends its messages in order."""
        self.count = self.chance.randrange(1, 40) // self.senders
        self.sent: set[bytes] = set()
        """The heads of the messages whose send() has returned."""
        self.received: list[bytes] = []
        self.done = 0
        """The number of tasks that have sent all their messages."""

    def message(self, sender: int, number: int) -> bytes:
        """Return a message: its head (the sender and the number), random bytes, a checksum."""
        size = self.chance.randrange(self.largest - 12)
        body = bytes([sender]) + number.to_bytes(7, "big") + self.chance.randbytes(size)
        return body + zlib.crc32(body).to_bytes(4, "big")

    def take(self, data: bytes) -> None:
        """Check a received message."""
        body, checksum = data[:-4], data[-4:]
        assert zlib.crc32(body).to_bytes(4, "big") == checksum, "a message is corrupt"
        head = body[:8]
        before = [other for other in self.received if other[0] == head[0]]
        assert not before or head > before[-1], "a message came twice or too late"
        self.received.append(head)

    def check_complete(self) -> None:
        """Check that each message whose send() has returned was received."""
        missing = self.sent - set(self.received)
        assert not missing, f"messages were lost: {sorted(missing)}"

    def unread(self) -> int:
        """Return the number of messages that were posted and not yet received by a task."""
        posted, stats = self.sender.stats.messages_sent, self.receiver.stats
        return posted - (stats.messages_received - stats.messages_unread)

    async def send_all(self) -> None:
        """Send the messages of all senders by all methods. Cancel some of the sends."""
        await loops.gather(*(self._send_from(sender) for sender in range(self.senders)))

    async def _send_from(self, sender: int) -> None:
        for number in range(self.count):
            # iWARP has no flow control: this is it.
            pause = 1e-5
            while self.unread() + self.senders > self.window:
                await loops.sleep(pause)
                pause = min(2 * pause, 1.0)
                if self.sender.closed or self.receiver.closed:
                    return
            message = self.message(sender, number)
            sending = await self.campaign.attempt(
                partial(self._send, message),
                self.campaign.moment() / 10 if self.chance.random() < 0.2 else None,
            )
            if not sending.cancelled():
                sending.result()
                self.sent.add(message[:8])
                if self.chance.random() < 0.2:
                    self.campaign.cancel_another()
        self.done += 1

    async def _send(self, data: bytes) -> None:
        method = self.chance.randrange(4)
        if method == 0:
            await self.sender.send(data)
        elif method == 1:
            copied = bytearray(data)
            await self.sender.send(copied)
            copied[:] = b"?" * len(copied)
        elif method == 2:
            memory = bytearray(data)
            async with self._registered(memory, AccessFlags(0)) as region:
                await self.sender.send(region)
                memory[:] = b"?" * len(memory)  # the memory may be used again
        else:
            middle = bytearray(data[4:-2])
            async with self._registered(middle, AccessFlags(0)) as region:
                await self.sender.send([data[:4], region, data[-2:]])

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
        while self.done < self.senders or not self.sent <= set(self.received):
            moment = self.campaign.moment() / 10
            receiving = await self.campaign.attempt(
                self._receive, moment if self.chance.random() < 0.3 else 0.5
            )
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
                    self.take(bytes(message.data))

    async def access_all(self) -> None:
        """Read and write the memory of the peer. Cancel some of the operations."""
        constant = bytearray(self.chance.randbytes(AREA))
        regions = self.campaign.regions
        regions.append(readable := await self.receiver.register(constant, SHARED))
        regions.append(writable := await self.receiver.allocate(AREA, SHARED))
        for _ in range(self.chance.randrange(10)):
            step = self.chance.choice([self._read, self._write, self._write_bytes])
            remote = readable if step == self._read else writable
            task = await self.campaign.attempt(
                partial(step, remote, bytes(constant)),
                self.campaign.moment() / 10 if self.chance.random() < 0.3 else None,
            )
            if not task.cancelled():
                task.result()
        assert bytes(memoryview(readable)) == constant

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
            assert memoryview(remote)[:1000] == memory
            memory[:] = b"?" * 1000

    async def _write_bytes(self, remote: MemoryRegion, _: bytes) -> None:
        data = self.chance.randbytes(self.chance.choice([10, 1000]))
        await self.sender.write(data, remote.remote[2000:])


def run_seed(seed: int) -> Counter[str]:
    """Run the program of a seed. Return its figures.

    Raises:
        AssertionError: a rule does not hold. A note has the seed.
    """
    campaign = Campaign(seed)
    try:
        campaign.run()
    except BaseException as error:
        error.add_note(f"seed {seed}: python -m simulator.campaign {seed}")
        raise
    return campaign.figures


def run_in_child(seed: int) -> tuple[Counter[str], str]:
    """Run the program of a seed in a forked process, so that no seed depends on another.

    Return its figures, and its failure or "". A program that takes longer than LIMIT seconds of
    real time has failed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        failure, figures = "", Counter[str]()
        try:
            figures = run_seed(seed)
        except BaseException:
            failure = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            json.dump([figures, failure], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return Counter(), f"seed {seed} has ended with status {status}"
    figures, failure = json.loads(text)
    return Counter(figures), failure


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    failed = []
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        figures, failure = run_in_child(seed)
        total += figures
        if failure:
            failed.append(seed)
            print(failure, flush=True)
            if "AIORDMA_CAMPAIGN_STOP" in os.environ:
                break
    print(f"{count} seeds, {len(failed)} failed: {failed}")
    print(dict(total))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
