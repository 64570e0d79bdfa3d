"""MessageReceiver: gives the messages that have arrived to the user, in each of the ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING

from aiordma.errors import BusyError, PeerClosed, RdmaError
from aiordma.loop import refuse_forked_child
from aiordma.memory import MemoryRegion, MemorySlice
from aiordma.message_streams.exchange import Exchange
from aiordma.message_streams.frames import bytes_of, check_room, nbytes_of, parts_for
from aiordma.message_streams.inbox import Arrival
from aiordma.message_streams.landing import READ_DIRECTLY, Landing, LandingPool, complete_reading
from aiordma.message_streams.protocol import AnnouncedMessage
from aiordma.message_streams.received import EagerArrival, ReceivedMessage
from aiordma.message_streams.rendezvous import Progress, read_frames, registered
from aiordma.rdmacm.address import format_address

if TYPE_CHECKING:
    from aiordma.message_streams.frames import Frame

READ_AHEAD = 1 << 23
"""The size of the largest message that is read before a task asks for it."""
READS_AHEAD = 6
"""The number of messages that are read before a task asks for them."""
MIN_READS_AHEAD = 3
"""While as many are left, no further ones are read: several at once take less time."""


class _NextMessage:
    """A block that receives the next message. It is the next one again if the block raises.

    If the stream has ended, the reason replaces an RdmaError that the block raises.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __aenter__(self) -> Arrival:
        exchange = self._exchange
        if exchange.is_waited_for:
            raise BusyError("another task is receiving on this stream")
        exchange.set_receiving(True)
        try:
            refuse_forked_child()
            if exchange.checkpoint is not None:
                await exchange.checkpoint()
            if not exchange.inbox.messages:
                await exchange.wait_for_arrival()
            if not exchange.inbox.messages:
                raise PeerClosed(
                    f"{format_address(exchange.connection.peer_address)} sends no further message"
                )
        except BaseException:
            exchange.set_receiving(False)
            raise
        self._arrival = exchange.inbox.messages.popleft()
        return self._arrival

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self._exchange.inbox.messages.appendleft(self._arrival)
        self._exchange.set_receiving(False)
        if isinstance(exc, RdmaError):
            self._exchange.check_end()  # which has the reason why a read failed


class MessageReceiver:
    """Receives messages: see the methods of MessageStream with the same names."""

    def __init__(self, exchange: Exchange, max_pooled: int) -> None:
        self._exchange = exchange
        self._connection = exchange.connection
        self._pool = LandingPool(exchange.connection, exchange.loop, max_pooled)
        self._max_pooled = max_pooled
        exchange.on_end = self._pool.close
        self._landings: dict[int, Landing] = {}  # by the numbers of their messages
        # The message whose reading a task has begun and not finished. A background task reads it
        # then: tasks that are cancelled again and again would never finish.
        self._unfinished = -1

    @property
    def bytes_pooled(self) -> int:
        """The registered memory that is kept for the messages to come."""
        return self._pool.nbytes

    async def recv(self) -> bytes:
        """Receive a message that the fast path has not taken: see MessageStream.recv()."""
        data = await self._recv_eager()
        if data is not None:
            return data
        async with _NextMessage(self._exchange) as arrival:
            nbytes = arrival.nbytes
            if isinstance(arrival, EagerArrival):
                data = b"".join(arrival.frames)
                arrival.release()
            else:
                landing = await self._land(arrival)
                data = landing.tobytes()
                self._landings.pop(arrival.number).release()
            self._count(nbytes, copied=nbytes)
            return data

    async def _recv_eager(self) -> bytes | None:
        """Wait for a wire message. Return its bytes if it is EAGER and this task may take it.

        A task whose polling was interrupted waits here. Other tasks that wait go on with it.
        """
        exchange = self._exchange
        if not exchange.eager.may_receive or exchange.receiver.is_waited_for:
            return None
        wait = exchange.receiver.wait_if_needed(has_polled=True)
        if wait is not None:
            await wait
        return exchange.eager.try_recv()

    async def next(self) -> bytes:
        """Receive a message that the fast path has not taken: see MessageStream.__aiter__()."""
        try:
            return await self.recv()
        except PeerClosed:
            if self._exchange.protocol.peer_has_finished:
                raise StopAsyncIteration from None
            raise

    async def recv_message(self) -> ReceivedMessage:
        """Receive a message where it arrived: see MessageStream.recv_message()."""
        async with _NextMessage(self._exchange) as arrival:
            if isinstance(arrival, EagerArrival):
                self._count(arrival.nbytes)
                return ReceivedMessage(arrival.frames, arrival.release)
            landing = await self._land(arrival)
            views = tuple([part.view for part in landing.parts])
            del self._landings[arrival.number]
            self._count(arrival.nbytes)
            return ReceivedMessage(views, landing.release)

    async def recv_into(self, buffer: Frame, progress: Progress | None) -> int:
        """Receive a message into a buffer: see MessageStream.recv_into()."""
        async with _NextMessage(self._exchange) as arrival:
            nbytes, room = arrival.nbytes, nbytes_of(buffer)
            if nbytes > room:
                raise ValueError(f"a message of {nbytes} bytes does not fit into {room}")
            await self._receive_into(arrival, [buffer], progress)
            return nbytes

    async def recv_frames(
        self,
        allocator: Callable[[Sequence[int]], Sequence[Frame]],
        progress: Progress | None,
    ) -> Sequence[Frame]:
        """Receive a message into a buffer for each frame: see MessageStream.recv_frames()."""
        async with _NextMessage(self._exchange) as arrival:
            buffers = list(allocator(arrival.sizes))
            if len(buffers) != len(arrival.sizes):
                raise ValueError(f"{len(buffers)} buffers for {len(arrival.sizes)} frames")
            check_room([nbytes_of(buffer) for buffer in buffers], arrival.sizes)
            await self._receive_into(arrival, buffers, progress)
            return buffers

    def drop(self) -> None:
        """Give back the memory of messages that were read ahead: the stream is closed here."""
        while self._landings:
            self._landings.popitem()[1].release()

    def _count(self, nbytes: int, copied: int = 0) -> None:
        stats = self._exchange.stats
        stats.messages_received += 1
        stats.bytes_received += nbytes
        stats.bytes_copied += copied

    async def _receive_into(
        self, arrival: Arrival, buffers: Sequence[Frame], progress: Progress | None
    ) -> None:
        """Put the frames of a message into buffers: one for each, or one for all together."""
        if isinstance(arrival, EagerArrival):
            self._copy_into(arrival.frames, arrival, buffers, progress)
            arrival.release()
            return
        if arrival.number in self._landings:  # recv() or recv_message() has begun to read it
            landing = await self._land(arrival)
            frames = [part.view for part in landing.parts]
            self._copy_into(frames, arrival, buffers, progress)
            self._landings.pop(arrival.number).release()
            return
        regions: list[MemoryRegion] = []
        try:
            parts = [await self._make_writable(buffer, regions) for buffer in buffers]
            parts = parts_for(parts, arrival.sizes)
            exchange = self._exchange
            reading = read_frames(
                exchange.connection, exchange.loop, arrival.frames, parts, progress
            )
            await complete_reading(exchange, arrival, reading)
        finally:
            for region in regions:
                region.close()
        self._count(arrival.nbytes)

    def _copy_into(
        self,
        frames: Sequence[memoryview],
        arrival: Arrival,
        buffers: Sequence[Frame],
        progress: Progress | None,
    ) -> None:
        targets = parts_for([bytes_of(buffer) for buffer in buffers], arrival.sizes)
        for target, frame in zip(targets, frames, strict=True):
            target[:] = frame
        self._count(arrival.nbytes, copied=arrival.nbytes)
        if progress is not None:
            progress(arrival.nbytes)

    async def _make_writable(self, buffer: Frame, regions: list[MemoryRegion]) -> MemorySlice:
        memory = buffer if nbytes_of(buffer) else bytearray(1)  # empty memory is refused
        return await registered(self._connection, memory, self._connection.read_access, regions)

    async def _land(self, arrival: AnnouncedMessage) -> Landing:
        """Read an announced message into a region of the pool, and the next ones, too.

        The caller takes it out of the landings if the message has reached the user.
        """
        landing = self._landings.get(arrival.number)
        if landing is None or landing.has_failed:  # read ahead: there can be more memory now
            landing = self._add_landing(arrival)
            if arrival.nbytes > READ_DIRECTLY or arrival.number == self._unfinished:
                landing.start()
            else:
                landing.try_post()  # else wait() reads it
        if len(self._landings) <= MIN_READS_AHEAD:  # this one included
            self._read_ahead()
        try:
            await landing.wait()
        except BaseException:
            if landing.has_failed:
                self._landings.pop(arrival.number, None)
                self._unfinished = arrival.number
            raise
        if arrival.number not in self._landings:
            self._exchange.check_end()  # drop() was called: the stream is closed here
        return landing

    def _read_ahead(self) -> None:
        """Have the next messages read before a task asks for them, as far as memory allows."""
        self._exchange.take_arrived(READS_AHEAD)
        room = self._max_pooled - sum([landing.nbytes for landing in self._landings.values()])
        for following in islice(self._exchange.inbox.messages, READS_AHEAD):
            if (
                isinstance(following, AnnouncedMessage)
                and following.nbytes <= min(READ_AHEAD, room)
                and following.number not in self._landings
            ):
                room -= following.nbytes
                landing = self._add_landing(following)
                if not landing.try_post():
                    landing.start()

    def _add_landing(self, arrival: AnnouncedMessage) -> Landing:
        landing = self._landings[arrival.number] = Landing(self._exchange, self._pool, arrival)
        return landing
