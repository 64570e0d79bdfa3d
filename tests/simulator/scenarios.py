"""Programs of the campaign with byte streams, with many short connections, and with datagrams."""

from __future__ import annotations

import contextlib
import zlib
from functools import partial
from typing import Any

from simulator.program import PORT, Program

# isort: split
import loops

import aiordma
from aiordma import ByteStream, ConnectionOptions, DatagramOptions, RdmaError, StreamOptions
from aiordma.datagrams.datagram_endpoint import DatagramEndpoint

GROUP = "239.1.1.1"
STREAM_FUNCTIONS = aiordma.connect_stream, aiordma.listen_stream


class Streams(Program):
    """Bytes in both directions of a stream."""

    async def operate(self) -> None:
        chance = self.chance
        options = [
            StreamOptions(
                send_buffer=chance.choice([2048, 10_000, 1 << 16]),
                recv_buffer=chance.choice([2048, 10_001, 1 << 16]),
                send_depth=chance.choice([16, 128]),
                recv_depth=chance.choice([16, 64]),
                max_inline=chance.choice([0, 64]),
                adaptive_poll=False,  # polling would read the real clock
            )
            for _ in range(2)
        ]
        sent = [chance.randbytes(chance.choice([10, 1000, 60_000])) for _ in range(2)]
        received = [bytearray(), bytearray()]
        async with self.pair(options[0], options[1], STREAM_FUNCTIONS) as ends:
            tasks = [
                loops.create_task(self._send(end, data))
                for end, data in zip(ends, sent, strict=True)
            ]
            tasks += [
                loops.create_task(self._receive(end, into))
                for end, into in zip(ends, received, strict=True)
            ]
            if self.early or self.has_faults:
                await self.finish(list(ends), tasks)
            await self.ended(tasks, allowed=self.early or self.has_faults)
        for data, into in zip(sent, reversed(received), strict=True):
            assert data.startswith(into), "the received bytes differ from those sent"
            assert self.early or self.has_faults or len(into) == len(data)

    async def _send(self, stream: ByteStream, data: bytes) -> None:
        at = 0
        while at < len(data):
            part = bytearray(data[at : at + self.chance.choice([1, 63, 1000, 5000, 100_000])])
            await stream.send(part)
            at += len(part)
            if self.chance.random() < 0.3:
                await loops.sleep(self.moment())  # the peer waits for more
            part[:] = b"?" * len(part)  # the stream has a copy
        await stream.send_eof()

    async def _receive(self, stream: ByteStream, into: bytearray) -> None:
        while True:
            count = self.chance.choice([1, 100, 4096, 1 << 20])
            receiving = await self.attempt(
                partial(stream.receive, count), self.sometimes(self.moment() / 100, 0.1)
            )
            if receiving.cancelled():
                continue
            data = receiving.result()
            if not data:
                return
            into += data


class Connects(Program):
    """Connections that are made, cancelled, rejected and closed, again and again."""

    async def operate(self) -> None:
        self.begin_faults()
        chance = self.chance
        for _ in range(chance.randrange(2, 6)):
            options = ConnectionOptions(
                tos=chance.choice([None, 4]),
                reuse_address=chance.random() < 0.3,
                shared_recv_depth=chance.choice([0, 8]),
            )
            host = chance.choice([self.simulation.far.host, None])
            with self.typed_errors():
                async with aiordma.listen(host, PORT, options=options) as listener:
                    serving = loops.create_task(self._answer(listener))
                    clients = [
                        loops.create_task(self._connect()) for _ in range(chance.randrange(1, 5))
                    ]
                    for client in clients:
                        if chance.random() < 0.4:
                            await loops.sleep(self.moment())
                            client.cancel()
                    await self.ended(clients)
                    serving.cancel()
                    await self.ended([serving])

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

    async def _connect(self) -> None:
        with contextlib.suppress(RdmaError):  # rejected, or the peer was faster
            async with aiordma.connect(self.simulation.far.host, PORT) as connection:
                await connection.send(b"first")
                async for message in connection:
                    assert message == b"hello"
        self.figures["clients"] += 1


class Datagrams(Program):
    """Datagrams between two endpoints, and to a group. They can be lost, but not changed."""

    has_iwarp = False

    async def operate(self) -> None:
        near, far = (
            DatagramOptions(
                send_depth=self.chance.choice([1, 2, 8, 64]),
                recv_depth=self.chance.choice([2, 128]),
                max_inline=self.chance.choice([0, 64]),
                multicast_loopback=self.chance.random() < 0.5,
            )
            for _ in range(2)
        )
        hosts = self.simulation.near.host, self.simulation.far.host
        async with (
            aiordma.open_datagram((hosts[0], 0), options=near) as here,
            aiordma.open_datagram((hosts[1], PORT), options=far) as there,
        ):
            self.begin_faults()
            there.listen()
            ends = [DatagramEnd(self, here), DatagramEnd(self, there)]
            receiving = [loops.create_task(end.receive_all()) for end in ends]
            receiving.append(loops.create_task(there.serve()))
            sending = [loops.create_task(end.send_all()) for end in ends]
            if self.early:
                await loops.sleep(self.moment())
            else:
                await self.ended(sending, allowed=self.has_faults)
                await loops.sleep(1.0)
                if not self.has_faults and near.recv_depth == far.recv_depth == 128:
                    self.figures["complete datagrams"] += 1
                    for end, other in ((ends[0], ends[1]), (ends[1], ends[0])):
                        lost = end.sent - other.received.keys()
                        assert not lost, f"{len(lost)} datagrams were lost"
            if self.early and self.end in ("close", "abort"):
                there.abort() if self.end == "abort" else await there.aclose()
                await loops.sleep(100.0)
                tasks = [receiving[1], receiving[2], sending[1]]
                assert all(task.done() for task in tasks), "a closed endpoint has a waiting task"
            for endpoint in (here, there):
                endpoint.abort()
            await loops.sleep(100.0)
            assert all(task.done() for task in sending + receiving), "a task still waits"
            await self.ended(sending + receiving)


class DatagramEnd:
    """One of the endpoints, with the datagrams that it sends and receives."""

    def __init__(self, program: Datagrams, endpoint: DatagramEndpoint) -> None:
        self.chance, self.program, self.endpoint = program.chance, program, endpoint
        self.targets: list[Any] = []
        """The peers and the groups to send to."""
        self.sent: set[bytes] = set()
        """The heads of the datagrams to a peer whose send_to() has returned."""
        self.received: dict[bytes, int] = {}
        """The number of copies of each datagram, by its head."""

    async def send_all(self) -> None:
        """Resolve the peer, join and leave a group, and send. Cancel some of the operations."""
        for number in range(self.chance.randrange(5, 60)):
            step: Any = self.chance.choice([self._send, self._send, self._send, self._find])
            task = await self.program.attempt(
                partial(step, number), self.program.sometimes(self.program.moment() / 10, 0.2)
            )
            if not task.cancelled():
                task.result()

    async def _find(self, number: int) -> None:
        """Find another target: the peer, or a group."""
        if self.chance.random() < 0.5:
            if self.endpoint.local_address[1] != PORT:
                target: Any = await self.endpoint.resolve(self.program.simulation.far.host, PORT)
                self.targets.append(target)
        elif self.chance.random() < 0.3:
            groups = [one for one in self.targets if isinstance(one, aiordma.MulticastGroup)]
            self.targets = [one for one in self.targets if one not in groups]
            for group in groups:
                await group.leave()
        elif not any(isinstance(one, aiordma.MulticastGroup) for one in self.targets):
            self.targets.append(await self.endpoint.join(GROUP))

    async def _send(self, number: int) -> None:
        if not self.targets:
            return
        target = self.chance.choice(self.targets)
        size = self.chance.choice([0, 10, self.endpoint.max_message_size - 12])
        body = self.endpoint.qp_num.to_bytes(4, "big") + number.to_bytes(4, "big")
        data = body + self.chance.randbytes(size)
        await self.endpoint.send_to(target, [data, zlib.crc32(data).to_bytes(4, "big")])
        if isinstance(target, aiordma.DatagramPeer):
            self.sent.add(body)
        if self.chance.random() < 0.3:
            self.program.cancel_another()

    async def receive_all(self) -> None:
        """Receive until the endpoint is closed. Cancel some of the receives."""
        while True:
            task = await self.program.attempt(
                self.endpoint.recv_from, self.program.sometimes(self.program.moment() / 10)
            )
            if task.cancelled():
                continue
            datagram = task.result()
            data, checksum = datagram.data[:-4], datagram.data[-4:]
            assert zlib.crc32(data).to_bytes(4, "big") == checksum, "a datagram is corrupt"
            self.received[data[:8]] = self.received.get(data[:8], 0) + 1
            assert self.received[data[:8]] == 1, "a datagram came twice"
            if datagram.group is None and len(self.targets) < 3:
                self.targets.append(datagram.peer)
