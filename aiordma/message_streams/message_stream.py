"""MessageStream: messages of any size, in order, as they were framed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from aiordma.errors import BusyError, LocalClosed, PeerClosed, RdmaError
from aiordma.loop import Deadline, checkpoint
from aiordma.loop.context_managers import AbortingContextManagerMixin
from aiordma.memory import MemoryRegion, MemorySlice
from aiordma.message_streams.exchange import Arrival, Exchange
from aiordma.message_streams.frames import bytes_of, frames_of, nbytes_of, parts_for
from aiordma.message_streams.options import MessageOptions
from aiordma.message_streams.outgoing import EagerOutgoing, FinishOutgoing, Outgoing
from aiordma.message_streams.protocol import AnnouncedMessage, MessageProtocol
from aiordma.message_streams.received import EagerArrival, LandingPool, ReceivedMessage
from aiordma.message_streams.rendezvous import announce_frames, read_frames, registered
from aiordma.message_streams.wire import Hello
from aiordma.messages.connection import Connection
from aiordma.rdmacm.address import format_address

if TYPE_CHECKING:
    from aiordma.message_streams.frames import Frame

CLOSED_HERE = "the stream is closed on this side"


class MessageStream(AbortingContextManagerMixin):
    """Messages of any size to a peer that uses aiordma, in order.

    A message is a buffer, or a list of frames. Small messages are copied. Large ones stay where
    they are until the peer reads them, without a copy. Any number of tasks can send at the same
    time, but only one can receive.
    """

    def __init__(
        self, connection: Connection, peer: Hello, private_data: bytes, options: MessageOptions
    ) -> None:
        """Called by connect_messages() and accept(); not for users."""
        self._connection = connection
        self._options = options
        self._private_data = private_data
        self._exchange = Exchange(connection, MessageProtocol(options.hello(), peer))
        self._pool = LandingPool(connection, options.max_pooled)
        self._exchange.on_end = self._pool.close
        self._has_receiver = False

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side."""
        return self._connection.local_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer."""
        return self._connection.peer_address

    @property
    def private_data(self) -> bytes:
        """The private data of the peer's user. InfiniBand and RoCE pad it with zeros."""
        return self._private_data

    @property
    def closed(self) -> bool:
        """True if the stream has ended, here or at the peer."""
        return self._exchange.end is not None or self._connection.closed

    # --- sending ---

    async def send(self, message: Frame | Sequence[Frame]) -> None:
        """Send a message: a buffer, or a list of frames.

        It returns when the memory may be reused: a small message is copied and posted, and the peer
        has read a large one. Registered memory with REMOTE_READ is sent as it is; other large
        memory is registered meanwhile.

        Cancelling a send of which nothing is posted sends nothing. Otherwise the message is sent
        all the same, and its memory stays registered until the peer has read it.

        Raises:
            ValueError: the message has more frames or bytes than the peer takes.
            LocalClosed: the stream was closed here, or send_eof() was called.
            PeerClosed, PeerTimeout, DeviceRemoved, ...: the connection has ended.
        """
        await checkpoint()
        await self._exchange.send(await self._prepare(frames_of(message)))

    async def _prepare(self, frames: Sequence[memoryview | MemorySlice]) -> Outgoing:
        exchange = self._exchange
        exchange.check_end()
        if exchange.has_finished:
            raise LocalClosed("the sending side of the stream was ended")
        sizes = [len(frame) for frame in frames]
        exchange.protocol.check_message(sizes)
        if exchange.protocol.is_eager(sizes, self._options.eager_limit):
            return EagerOutgoing([bytes_of(frame) for frame in frames])
        return await announce_frames(self._connection, frames)

    async def send_eof(self) -> None:
        """Finish sending: the peer's `async for` ends after the messages before. Idempotent.

        Cancelling stops only the waiting.

        Raises: as send(), except for ValueError.
        """
        await checkpoint()
        exchange = self._exchange
        exchange.check_end()
        if not exchange.has_finished:
            await exchange.send(FinishOutgoing())

    # --- receiving ---

    async def recv(self) -> bytes:
        """Wait for the next message and return its bytes: those of all frames, joined.

        Use recv_message(), recv_into() or recv_frames() to receive large messages without a copy.
        Cancelling loses no message.

        Raises:
            BusyError: another task is receiving.
            PeerClosed: the peer sends no further message, or has closed the stream.
            Others: as send().
        """
        async with self._receiving() as arrival:
            if isinstance(arrival, EagerArrival):
                data = b"".join(arrival.frames)
                arrival.release()
                return data
            region, _ = await self._land(arrival)
            data = bytes(memoryview(region)[: arrival.nbytes])
            self._pool.give_back(region)
            return data

    async def recv_message(self) -> ReceivedMessage:
        """Wait for the next message, and return it where it arrived. Call its release() soon.

        Cancelling loses no message. Raises: as recv().
        """
        async with self._receiving() as arrival:
            if isinstance(arrival, EagerArrival):
                return ReceivedMessage(arrival.frames, arrival.release)
            region, parts = await self._land(arrival)
            views = tuple(part.view for part in parts)
            return ReceivedMessage(views, partial(self._pool.give_back, region))

    async def _land(self, arrival: AnnouncedMessage) -> tuple[MemoryRegion, list[MemorySlice]]:
        """Read an announced message into a region of the pool."""
        region = await self._pool.take(max(arrival.nbytes, 1))
        try:
            parts = parts_for([region[:]], arrival.sizes)
            await self._read(arrival, parts)
        except BaseException:
            region.close()  # not given back: the device can still write to it
            raise
        return region, parts

    async def recv_into(self, buffer: Frame) -> int:
        """Wait for the next message, put its frames into `buffer` one after another, and return
        their size in bytes.

        A large message is read into the buffer without a copy. A buffer that is not registered is
        registered meanwhile. Cancelling loses no message.

        Raises:
            ValueError: the message does not fit. It is the next one to be received.
            Others: as recv().
        """
        async with self._receiving() as arrival:
            nbytes, room = sum(arrival.sizes), nbytes_of(buffer)
            if nbytes > room:
                raise ValueError(f"a message of {nbytes} bytes does not fit into {room}")
            await self._receive_into(arrival, [buffer])
            return nbytes

    async def recv_frames(
        self, allocator: Callable[[Sequence[int]], Sequence[Frame]]
    ) -> Sequence[Frame]:
        """Wait for the next message, and return its frames in the buffers of `allocator`.

        `allocator` is called with the sizes of all frames, before any byte moves. It returns a
        buffer for each, which is at least as large. Cancelling loses no message: the next receive
        gets it again.

        Raises:
            ValueError: there are too few buffers, or one is too small. The message is the next one
                to be received.
            Others: as recv(), and what `allocator` raises.
        """
        async with self._receiving() as arrival:
            buffers = list(allocator(arrival.sizes))
            if len(buffers) != len(arrival.sizes):
                raise ValueError(f"{len(buffers)} buffers for {len(arrival.sizes)} frames")
            await self._receive_into(arrival, buffers)
            return buffers

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over messages as recv() returns them, until the peer has finished sending."""
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except PeerClosed:
            if self._exchange.protocol.peer_has_finished:
                raise StopAsyncIteration from None
            raise

    def _has_arrival(self) -> bool:
        return bool(self._exchange.inbox) or self._exchange.protocol.peer_has_finished

    @asynccontextmanager
    async def _receiving(self) -> AsyncIterator[Arrival]:
        """Yield the next message. It is the next one again if the block raises."""
        if self._has_receiver:
            raise BusyError("another task is receiving on this stream")
        self._has_receiver = True
        try:
            await checkpoint()
            await self._exchange.progress(self._has_arrival)
            if not self._exchange.inbox:
                raise PeerClosed(f"{format_address(self.peer_address)} sends no further message")
            arrival = self._exchange.inbox.popleft()
            try:
                yield arrival
            except BaseException:
                self._exchange.inbox.appendleft(arrival)
                raise
        finally:
            self._has_receiver = False

    async def _receive_into(self, arrival: Arrival, buffers: Sequence[Frame]) -> None:
        """Put the frames of a message into buffers: one for each, or one for all together."""
        if isinstance(arrival, EagerArrival):
            targets = parts_for([bytes_of(buffer) for buffer in buffers], arrival.sizes)
            for target, frame in zip(targets, arrival.frames, strict=True):
                target[:] = frame
            arrival.release()
            return
        regions: list[MemoryRegion] = []
        try:
            parts = [await self._make_writable(buffer, regions) for buffer in buffers]
            await self._read(arrival, parts_for(parts, arrival.sizes))
        finally:
            for region in regions:
                region.close()

    async def _make_writable(self, buffer: Frame, regions: list[MemoryRegion]) -> MemorySlice:
        memory = buffer if nbytes_of(buffer) else bytearray(1)  # empty memory is refused
        return await registered(self._connection, memory, self._connection.read_access, regions)

    async def _read(self, arrival: AnnouncedMessage, parts: Sequence[MemorySlice]) -> None:
        try:
            await read_frames(self._connection, self._exchange.loop, arrival.frames, parts)
        except RdmaError as error:
            self._exchange.lost(error)
            raise
        self._exchange.finish_reading(arrival.number)

    # --- closing ---

    async def aclose(self) -> None:
        """Close the stream, when the messages that were sent have reached the peer. Idempotent.

        If the peer does not take them within `close_timeout` seconds, they are lost. Cancelling
        ends the connection by force.
        """
        exchange = self._exchange
        if exchange.end is None:
            seconds = self._options.connection.close_timeout
            deadline = Deadline(exchange.loop, seconds, self.abort)
            try:
                await exchange.progress(lambda: exchange.is_idle)
            except RdmaError:
                pass  # the connection has ended already
            except BaseException:
                self.abort()
                raise
            finally:
                deadline.cancel()
            exchange.lost(LocalClosed(CLOSED_HERE))
        await self._connection.aclose()

    def abort(self) -> None:
        """End the stream at once. Idempotent. Messages that were not received are lost."""
        self._exchange.lost(LocalClosed(CLOSED_HERE))
        self._connection.abort()

    def __repr__(self) -> str:
        host, port = self.peer_address
        state = "closed" if self.closed else "open"
        return f"<MessageStream to {host} port {port}, {state}>"
