"""MessageStream: messages of any size, in order, as they were framed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

from aiordma.enums import AccessFlags
from aiordma.errors import LocalClosed, RdmaError
from aiordma.loop import Deadline, checkpoint
from aiordma.loop.context_managers import AbortingContextManagerMixin
from aiordma.memory.registrar import Registrar
from aiordma.message_streams.exchange import SENDING_ENDED, Exchange
from aiordma.message_streams.frames import frames_of
from aiordma.message_streams.message_receiver import MessageReceiver
from aiordma.message_streams.options import MessageOptions
from aiordma.message_streams.outgoing import (
    AnnouncedOutgoing,
    EagerOutgoing,
    FinishOutgoing,
    Outgoing,
)
from aiordma.message_streams.protocol import MessageProtocol
from aiordma.message_streams.received import ReceivedMessage
from aiordma.message_streams.stats import MessageStreamStats
from aiordma.message_streams.wire import Hello
from aiordma.messages.connection import MessageEndpoint

if TYPE_CHECKING:
    from aiordma.message_streams.frames import Frame

CLOSED_HERE = "the stream is closed on this side"


class MessageStream(Registrar, AbortingContextManagerMixin):
    """Messages of any size to a peer that uses aiordma, in order.

    A message is a buffer, or a list of frames. Small messages are copied. Large ones stay where
    they are until the peer reads them, without a copy. Any number of tasks can send at the same
    time, but only one can receive.
    """

    def __init__(
        self, endpoint: MessageEndpoint, peer: Hello, private_data: bytes, options: MessageOptions
    ) -> None:
        """Called by connect_messages() and accept(); not for users."""
        super().__init__(endpoint)
        self._endpoint = endpoint
        self._options = options
        self._private_data = private_data
        protocol = MessageProtocol(options.hello(), peer)
        self._exchange = exchange = Exchange(endpoint, protocol)
        self._connection = exchange.connection
        self._receiver = receiver = MessageReceiver(exchange, options.max_pooled)
        # Looked up once, because small messages need only these.
        eager = exchange.eager
        self._send, self._recv, self._next = eager.send, eager.recv, eager.next
        limit = protocol.max_eager(options.eager_limit)
        eager.set_limits(limit, options.max_frames, options.max_nbytes)
        eager.set_slow(self._send_slowly, receiver.recv, receiver.next, exchange.note_change)

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side."""
        return self._connection.local_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer."""
        return self._connection.peer_address

    @property
    def device_name(self) -> str:
        """The name of the RDMA device."""
        return self._connection.device_name

    @property
    def private_data(self) -> bytes:
        """The private data of the peer's user. InfiniBand and RoCE pad it with zeros."""
        return self._private_data

    @property
    def closed(self) -> bool:
        """True if the stream has ended, here or at the peer."""
        return self._exchange.end is not None or self._connection.closed

    @property
    def read_access(self) -> AccessFlags:
        """The access that memory needs to be received into: for register() and allocate()."""
        return self._connection.read_access

    @property
    def stats(self) -> MessageStreamStats:
        """A snapshot of the stream's counters, and of what waits."""
        return self._exchange.snapshot(self._receiver.bytes_pooled)

    # --- sending ---

    def send(self, message: Frame | Sequence[Frame]) -> Coroutine[object, None, None]:
        """Send a message: a buffer, or a list of frames.

        It returns when the memory may be reused: a small message is copied and posted, and the peer
        has read a large one. Registered memory with REMOTE_READ is sent as it is; other large
        memory is registered meanwhile.

        The messages of a task are sent in order. Messages that several tasks send at the same time
        have no order: a small one can overtake a large one that is being registered.

        Cancelling a send of which nothing is posted sends nothing. Otherwise the message is sent
        all the same, and its memory stays registered until the peer has read it.

        Raises:
            ValueError: the message has more frames or bytes than the peer takes, or registered
                memory is closed, or belongs to another protection domain.
            VerbsError: the memory could not be registered, for example because of the locked-memory
                limit. The stream goes on.
            LocalClosed: the stream was closed here, or send_eof() was called.
            PeerClosed, PeerTimeout, DeviceRemoved, ...: the connection has ended.
        """
        send = self._send  # a local name first: see Connection.send()
        return send(self, message)

    async def _send_slowly(self, message: Frame | Sequence[Frame], error: int = 0) -> None:
        """Send a message that the fast path has not posted. `error`: the errno of the attempt."""
        exchange = self._exchange
        await checkpoint()
        if error:
            await self._post_failed(error)
        outgoing = self._outgoing(message)
        try:
            await outgoing.prepare()
        except BaseException:
            outgoing.release()
            raise
        await exchange.send(outgoing)

    async def _post_failed(self, error: int) -> None:
        """End the stream: the fast path could not post a message because of this errno.

        Raises: the reason of the stream's end.
        """
        try:
            await self._endpoint.data_path.slow.sender.send(b"", error)
        except RdmaError as reason:
            self._exchange.lost(reason, is_drained=False)
            raise

    def send_soon(self, message: Frame | Sequence[Frame]) -> None:
        """Queue a message to be sent, without waiting. Messages are sent in order.

        The memory of a large message must not change until the peer has read it: drain() waits for
        that. Nothing limits the number of queued messages; call drain() to limit it. If the memory
        of a queued message cannot be registered, the stream ends.

        Raises: as send().
        """
        exchange = self._exchange
        if not exchange.eager.try_send(message):
            exchange.send_soon(self._outgoing(message))

    async def drain(self) -> None:
        """Wait until the messages that are queued now are sent: their memory may be reused.

        Cancelling stops only the waiting.

        Raises: the reason of the stream's end.
        """
        await checkpoint()
        await self._exchange.drain()

    def _outgoing(self, message: Frame | Sequence[Frame]) -> Outgoing:
        exchange, frames = self._exchange, frames_of(message)
        exchange.check_end()
        if exchange.has_finished:
            raise LocalClosed(SENDING_ENDED)
        sizes = [len(frame) for frame in frames]
        exchange.protocol.check_message(sizes)
        if exchange.protocol.is_eager(sizes, self._options.eager_limit):
            return EagerOutgoing(frames)
        return AnnouncedOutgoing(self._connection, exchange.data_path.pd, frames)

    async def send_eof(self) -> None:
        """Finish sending: the peer's `async for` ends after the messages before. Idempotent.

        If it is cancelled before the end is sent, nothing is sent, and you can still send.

        Raises: as send(), except for ValueError.
        """
        await checkpoint()
        exchange = self._exchange
        exchange.check_end()
        while not exchange.protocol.has_finished:
            if exchange.is_finishing:  # the end of another task, which can be cancelled
                await exchange.progress(lambda: not exchange.is_finishing)
            else:
                await exchange.send(FinishOutgoing())

    # --- receiving ---

    def recv(self) -> Coroutine[object, None, bytes]:
        """Wait for the next message and return its bytes: those of all frames, joined.

        Use recv_message(), recv_into() or recv_frames() to receive large messages without a copy.
        Cancelling loses no message.

        Raises:
            BusyError: another task is receiving.
            PeerClosed: the peer sends no further message, or has closed the stream.
            Others: as send().
        """
        recv = self._recv  # a local name first: see Connection.send()
        return recv(self)

    def recv_message(self) -> Coroutine[object, None, ReceivedMessage]:
        """Wait for the next message, and return it where it arrived. Call its release() soon.

        Cancelling loses no message. Raises: as recv().
        """
        return self._receiver.recv_message()

    async def recv_into(
        self, buffer: Frame, *, progress: Callable[[int], object] | None = None
    ) -> int:
        """Wait for the next message, put its frames into `buffer` one after another, and return
        their size in bytes.

        A large message is read into the buffer without a copy. A buffer that is not registered is
        registered meanwhile. `progress` is called with the number of bytes that have arrived, each
        time after some megabytes, and at the end.

        Cancelling loses no message. The device can still write to the buffer, which stays pinned
        until it has finished.

        Raises:
            ValueError: the message does not fit. It is the next one to be received.
            Others: as recv().
        """
        return await self._receiver.recv_into(buffer, progress)

    async def recv_frames(
        self,
        allocator: Callable[[Sequence[int]], Sequence[Frame]],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> Sequence[Frame]:
        """Wait for the next message, and return its frames in the buffers of `allocator`.

        `allocator` is called with the sizes of all frames, before any byte moves. It returns a
        buffer for each, which is at least as large. `progress` is that of recv_into().

        Cancelling loses no message: the next receive gets it again. The device can still write to
        the buffers, which stay pinned until it has finished.

        Raises:
            ValueError: there are too few buffers, or one is too small. The message is the next one
                to be received.
            Others: as recv(), and what `allocator` raises.
        """
        return await self._receiver.recv_frames(allocator, progress)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over messages as recv() returns them, until the peer has finished sending."""
        return self

    def __anext__(self) -> Coroutine[object, None, bytes]:
        receive_next = self._next  # a local name first: see Connection.send()
        return receive_next(self)

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
        self._receiver.drop()
        await self._connection.aclose()

    def abort(self) -> None:
        """End the stream at once. Idempotent. Messages that were not received are lost."""
        self._exchange.lost(LocalClosed(CLOSED_HERE))
        self._receiver.drop()
        self._connection.abort()

    def abandon(self) -> None:
        """Abort from any thread, when no task can be waiting any more: its loop is closed."""
        self._endpoint.abandon()

    def __repr__(self) -> str:
        host, port = self.peer_address
        state = "closed" if self.closed else "open"
        return f"<MessageStream to {host} port {port}, {state}>"
