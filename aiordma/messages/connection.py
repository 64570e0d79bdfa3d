"""Connection: two peers, the messages between them, and what they do to each other's memory."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId, CmState, SyncCmId
from aiordma.enums import AccessFlags, WrOpcode
from aiordma.errors import PeerClosed, RdmaError
from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.memory import MemoryRegion, MemorySlice, RemoteBuffer, byte_view
from aiordma.memory.registrar import Registrar
from aiordma.messages.memory_windows import MemoryWindow
from aiordma.messages.message import Message
from aiordma.messages.message_data_path import MessageDataPath
from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions
from aiordma.qp import ConnectionStats, SharedReceives, is_registered, join_buffers
from aiordma.qp.endpoint import Endpoint
from aiordma.verbs import Device
from aiordma.verbs.queue_pair import NO_IMMEDIATE, checked_immediate

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma.qp.scatter_gather import Sink, Source

MessageEndpoint = Endpoint[MessageDataPath]
# Plain numbers, for C.
SEND = int(WrOpcode.SEND)
READ = int(WrOpcode.RDMA_READ)
WRITE = int(WrOpcode.RDMA_WRITE)


def message_endpoint(
    cm: AsyncCmId, options: ConnectionOptions, receives: SharedReceives | None = None
) -> MessageEndpoint:
    """The endpoint of a Connection, which receives from `receives` if that is given.

    Raises: see Endpoint.
    """
    return Endpoint(
        cm, options, lambda callbacks: MessageDataPath(cm, callbacks, options, receives)
    )


def checked_imm(device: Device, imm: int | None) -> int:
    """Immediate data for a request, NO_IMMEDIATE if None.

    Raises:
        ValueError: it is no number of 32 bits, or the device carries none.
    """
    if imm is None:
        return NO_IMMEDIATE
    number = checked_immediate(imm)
    if device.is_iwarp:
        raise ValueError("iWARP carries no immediate data")
    return number


class Connection(Registrar, AbortingContextManagerMixin):
    """A reliable connection that carries whole messages, in order (RDMA's RC queue pair).

    From `connect()`, or from accepting a ConnectRequest. It is closed by `aclose()`, or by leaving
    the `async with` block it was opened in; one that is just dropped warns, and is then aborted.

    One task may receive at a time; any number may send. Belongs to the event loop it was made on.
    """

    def __init__(self, endpoint: MessageEndpoint) -> None:
        """For connect() and accept(); not to be called by others."""
        super().__init__(endpoint)
        self._endpoint = endpoint
        self._local_address = endpoint.local_address
        self._peer_address = endpoint.peer_address
        # Looked up once: most messages need no more than these.
        self._post_now = endpoint.data_path.sender.post_now
        self._take_message = endpoint.data_path.receiver.take
        self._recv = endpoint.data_path.receiver.recv
        self._start_transfer = endpoint.data_path.start_transfer
        self._finish = endpoint.data_path.finish

    @classmethod
    def from_id(
        cls,
        cm: AsyncCmId | SyncCmId,
        *,
        private_data: bytes = b"",
        options: ConnectionOptions = DEFAULT_OPTIONS,
    ) -> AwaitableContextManager[Connection]:
        """Make one from an id: `await Connection.from_id(cm)`, or `async with`.

        An id whose route is resolved, as SyncCmId.create_ep makes it, connects; a request is
        accepted. A synchronous id moves to the running loop first. A queue pair that the id has is
        replaced by one on the loop's completion queues.

        The id is the connection's from now on, and is closed if this fails or is cancelled.

        Raises:
            RdmaError: the id is in another state; it is left as it is.
            Others: as connect(), and as ConnectRequest.accept().
        """
        return AwaitableContextManager(cls._from_id(cm, private_data, options))

    @classmethod
    async def _from_id(
        cls, cm: AsyncCmId | SyncCmId, private_data: bytes, options: ConnectionOptions
    ) -> Connection:
        if cm.state not in (CmState.ROUTE_RESOLVED, CmState.REQUESTED):
            raise RdmaError(
                f"an id in state {cm.state.name} makes no connection: its route must be resolved, "
                "or it must be a request that is not answered"
            )
        if options.shared_recv_depth:
            raise ValueError("shared_recv_depth is for listen(): one connection shares with nobody")
        own = await cm.migrate() if isinstance(cm, SyncCmId) else cm
        is_request = own.state is CmState.REQUESTED
        async with own.closed_on_failure():
            endpoint = message_endpoint(own, options)
            await (endpoint.accept if is_request else endpoint.connect)(private_data)
        return cls(endpoint)

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side."""
        return self._local_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the other side."""
        return self._peer_address

    @property
    def device_name(self) -> str:
        """The RDMA device it runs on. Registered memory is good for all of a loop's connections
        on one device."""
        return self._endpoint.device.name

    @property
    def private_data(self) -> bytes:
        """What the peer sent along when it accepted, or when it asked to connect.

        InfiniBand and RoCE pad it with zeros (196 and 56 bytes): a protocol that uses it says its
        own length.
        """
        return self._endpoint.peer_private_data

    @property
    def max_message_size(self) -> int:
        """The largest message in bytes: what send() takes, and what this side can receive."""
        return self._endpoint.options.max_message_size

    @property
    def closed(self) -> bool:
        """Whether it ended, here or at the peer. Messages that came before can still be received
        if it was not ended here."""
        return self._endpoint.closed

    @property
    def stats(self) -> ConnectionStats:
        """What it has carried, and how full its queues are: the numbers of this moment."""
        return self._endpoint.data_path.snapshot()

    # --- sending ---

    async def send(
        self,
        data: Source,
        *,
        imm: int | None = None,
        invalidate: RemoteBuffer | None = None,
    ) -> None:
        """Send one message: any bytes-like object, registered memory, or a list of such.

        It may be empty; a list is one message, of at most `max_sge` pieces of registered memory. A
        message without registered memory is copied: this returns when it is posted, which is at
        once unless `send_depth` requests are on their way already, and a later failure raises from
        the next call. Registered memory is not copied: this returns when it may be reused.

        `imm` is a number of 32 bits that travels beside the data (not on iWARP). `invalidate` is
        memory of the peer's, of a MemoryWindow, whose key is of no use any more when the message
        arrives. See ibv_post_send(3).

        While it waits to be copied, the object cannot be resized (BufferError), and what it holds
        in the end is sent. Cancelling before it is posted sends nothing; the connection goes on.
        Registered memory that was posted stays pinned until the device is done with it.

        Raises:
            ValueError: the message is larger than max_message_size, in too many pieces, or its
                memory is closed or not registered for this connection. The connection goes on.
            PeerClosed, WorkRequestError, DeviceRemoved: the connection has ended.
            LocalClosed: it was closed on this side.
            VerbsError: ENOMEM when no more memory can be registered.
        """
        if imm is None and invalidate is None:
            post_now = self._post_now  # not called at once: Python would look for a method first
            error = post_now(data)
            if not error:
                return
            if error > 0:
                raise self._endpoint.data_path.sender.post_error(error)
            transfer = self._start_transfer(SEND, data, None)
            if transfer is not None:
                await self._finish(transfer)
                return
        number = checked_imm(self._endpoint.device, imm)
        sender = self._endpoint.data_path.sender
        if type(data) is bytes and invalidate is None:
            await sender.send_copy(data, len(data), number)
        elif invalidate is not None or is_registered(data):
            if invalidate is not None and imm is not None:
                raise ValueError("a message carries immediate data or invalidates a key, not both")
            await sender.send_registered(data, number, invalidate)
        else:
            with join_buffers(data) as view:  # held, so that nobody resizes it while it waits
                await sender.send_copy(view, len(view), number)

    # --- receiving ---

    async def recv(self) -> bytes:
        """Wait for the next message and return it; b"" is a message too.

        Messages that came before the peer disconnected are returned first. See ibv_post_recv(3).

        Cancelling loses no message.

        Raises:
            PeerClosed: the peer has disconnected, or its process ended.
            WorkRequestError: the device reported a failure, such as a message that is too large.
            DeviceRemoved: the RDMA device went away.
            LocalClosed: it was closed on this side.
            ReceiveOverrun: the peer sent too much, where it cannot be held back (iWARP).
            BusyError: another task is receiving.
        """
        take = self._take_message  # see send()
        message = take()
        return await self._recv() if message is None else message

    async def recv_into(self, buffer: Buffer | MemorySlice) -> int:
        """Wait for the next message and copy it to the beginning of `buffer`; how long it was.

        Cancelling loses no message. Raises: as recv(), and

            ValueError: the message is longer than the buffer. It is not lost, but comes next.
            BufferError: the buffer is read-only, or not contiguous.
        """
        with buffer.view if isinstance(buffer, MemorySlice) else memoryview(buffer) as view:
            if view.readonly or not view.c_contiguous:
                raise BufferError("a message needs a contiguous buffer that can be written to")
            with byte_view(view) as memory:
                return await self._endpoint.data_path.receiver.recv_into(memory)

    async def recv_message(self) -> Message:
        """Wait for the next message and get it where the device put it, with what came beside it.

        Until it is released, as by the end of a `with` block, one receive buffer less is there for
        messages to come, of `recv_depth`: on InfiniBand and RoCE, who holds them all holds the peer
        back; on iWARP the connection ends if the peer goes on sending. It outlives the connection.

        Cancelling loses no message. Raises: as recv().
        """
        return await self._endpoint.data_path.receiver.recv_message()

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over messages until the peer disconnects; other ends raise, as from recv()."""
        return self

    async def __anext__(self) -> bytes:
        take = self._take_message  # see send()
        message = take()
        if message is not None:
            return message
        try:
            return await self._recv()
        except PeerClosed:
            raise StopAsyncIteration from None

    # --- memory ---

    async def bind(
        self,
        part: MemorySlice | MemoryRegion,
        access: AccessFlags = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE,
    ) -> MemoryWindow:
        """Give the peer a key of its own for registered memory, that can be taken back.

        The region must be registered with MW_BIND, and with LOCAL_WRITE if the peer is to write.
        The key is good on this connection only, until the peer invalidates it (`send(...,
        invalidate=...)`) or the window is closed. Cancelling leaves no window. See ibv_bind_mw(3).

        Raises:
            ValueError: the device has no windows (as iWARP), or the region does not allow it.
            VerbsError: ENOMEM when there are no more windows.
            WorkRequestError: the device refused; this connection has ended then.
            PeerClosed, DeviceRemoved, LocalClosed: the connection has ended.
        """
        self._endpoint.check_open()
        return await self._endpoint.data_path.windows.bind(part[:], access)

    # --- one-sided operations ---

    async def read(self, remote: RemoteBuffer, into: Sink) -> None:
        """Read the whole of `remote`, memory of the peer's, into the beginning of `into`.

        `into` is registered memory, or a list of it to scatter to, of at most `max_sge` pieces. The
        peer takes no part: RDMA READ. Returns when the data is there. More reads and atomics at
        once than `initiator_depth` wait for their turn. See ibv_post_send(3).

        Cancelling stops the waiting only: `into` may still be written to, and stays pinned for
        that, until it has ended. What is sent next reaches the peer after that.

        Raises:
            ValueError: `into` is too small, in too many pieces, closed, or not registered for it
                (LOCAL_WRITE; on iWARP REMOTE_WRITE too) or for this connection, or the connection
                was made with an initiator_depth of 0.
            WorkRequestError: the peer's memory does not allow it (REM_ACCESS_ERR); this connection
                has ended then.
            PeerClosed, DeviceRemoved, LocalClosed: the connection has ended.
        """
        transfer = self._start_transfer(READ, into, remote)
        if transfer is not None:
            await self._finish(transfer)
        else:
            await self._endpoint.data_path.remote.read(remote, into)

    async def write(self, source: Source, remote: RemoteBuffer, *, imm: int | None = None) -> None:
        """Write `source` to the beginning of `remote`, memory of the peer's: RDMA WRITE.

        Registered memory is not copied, any other is; a list is gathered, from at most `max_sge`
        pieces of registered memory. Returns when the peer's device has it all, and the source may
        be reused. With `imm`, a number of 32 bits, the peer learns of the write: it gets an empty
        message. Without, the peer takes no part. See ibv_post_send(3).

        Cancelling stops the waiting only: the source is pinned until it has ended.

        Raises:
            ValueError: `remote` is too small, the source is closed, in too many pieces or not
                registered for this connection, or iWARP was to carry `imm`.
            WorkRequestError, PeerClosed, DeviceRemoved, LocalClosed: as read().
        """
        if imm is None:
            transfer = self._start_transfer(WRITE, source, remote)
            if transfer is not None:
                await self._finish(transfer)
                return
        number = checked_imm(self._endpoint.device, imm)
        await self._endpoint.data_path.remote.write(source, remote, number)

    async def fetch_and_add(self, remote: RemoteBuffer, value: int) -> int:
        """Add `value` to the 8 bytes at `remote`, at one go; what was there before is returned.

        The bytes are a number of 64 bits in the peer's byte order, at an address that 8 divides;
        the sum wraps around. Atomic among the operations of the peer's device.

        Cancelling stops the waiting only: it may still be done.

        Raises:
            ValueError: the device has no atomics (as iWARP), the address or a number is wrong.
            WorkRequestError, PeerClosed, DeviceRemoved, LocalClosed: as read().
        """
        return await self._atomic(WrOpcode.ATOMIC_FETCH_AND_ADD, remote, (value % (1 << 64), 0))

    async def compare_and_swap(self, remote: RemoteBuffer, compare: int, swap: int) -> int:
        """Put `swap` into the 8 bytes at `remote` if they are `compare`, at one go.

        Returns what was there before: it was swapped if that equals `compare`. Otherwise as
        fetch_and_add().
        """
        return await self._atomic(WrOpcode.ATOMIC_CMP_AND_SWP, remote, (compare, swap))

    async def _atomic(
        self, opcode: WrOpcode, remote: RemoteBuffer, operands: tuple[int, int]
    ) -> int:
        return await self._endpoint.data_path.remote.atomic(opcode, remote, operands)

    # --- the end ---

    async def aclose(self) -> None:
        """Close gracefully: posted sends reach the peer, then both sides disconnect.

        Takes at most `close_timeout` seconds until what is left is ended by force. Receivers and
        senders that wait get LocalClosed. Idempotent. See rdma_disconnect(3).

        Cancelling ends it by force: everything is destroyed all the same.
        """
        await self._endpoint.aclose()

    def abort(self) -> None:
        """End it at once, without letting posted sends arrive. Idempotent.

        The peer is told to disconnect; everything is destroyed in the background.
        """
        self._endpoint.abort()

    def __del__(self) -> None:
        endpoint = getattr(self, "_endpoint", None)
        if endpoint is not None and not endpoint.released:
            name = repr(self)
            endpoint.abandon()
            warnings.warn(f"unclosed {name}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        host, port = self._peer_address
        state = "closed" if self.closed else "open"
        return f"<Connection to {host} port {port}, {state}>"
