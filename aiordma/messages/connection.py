"""Connection: messages, and one-sided operations on the peer's memory."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId, CmState, SyncCmId, close_after
from aiordma.enums import AccessFlags, WrOpcode
from aiordma.errors import RdmaError
from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.memory import MemoryRegion, MemorySlice, RemoteBuffer, byte_view
from aiordma.memory.registrar import Registrar
from aiordma.messages.memory_windows import MemoryWindow
from aiordma.messages.message import Message
from aiordma.messages.message_data_path import MessageDataPath
from aiordma.messages.remote_access import read_access
from aiordma.messages.sender import checked_imm
from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions
from aiordma.qp import ConnectionStats, SharedReceives
from aiordma.qp.endpoint import Endpoint

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma.qp.scatter_gather import Sink, Source

MessageEndpoint = Endpoint[MessageDataPath]


def message_endpoint(
    cm: AsyncCmId, options: ConnectionOptions, receives: SharedReceives | None = None
) -> MessageEndpoint:
    """Return the endpoint of a new Connection. It takes its messages from `receives` if given.

    Raises: as Endpoint.
    """
    return Endpoint(
        cm, options, lambda callbacks: MessageDataPath(cm, callbacks, options, receives)
    )


async def connect_id(cm: AsyncCmId, private_data: bytes, options: ConnectionOptions) -> Connection:
    """Connect an id whose address or route is resolved. It is closed if this fails.

    Raises: as connect().
    """
    try:
        endpoint = message_endpoint(cm, options)
        await endpoint.connect(private_data)
    except BaseException as error:
        await close_after(cm, error)
        raise
    return Connection(endpoint)


class Connection(Registrar, AbortingContextManagerMixin):
    """A reliable connection that carries whole messages, in order (an RC queue pair).

    `connect()`, `Listener.accept()` and `ConnectRequest.accept()` return one. Close it with
    `aclose()`, or use it in an `async with` block, which closes it at its end. A block that is
    cancelled aborts the connection. A connection that is garbage-collected without being closed
    emits a ResourceWarning and is aborted.

    Any number of tasks can send at the same time, but only one can receive. A connection belongs to
    the event loop on which it was made.
    """

    def __init__(self, endpoint: MessageEndpoint) -> None:
        """Called by connect() and accept(); not for users."""
        super().__init__(endpoint)
        self._endpoint = endpoint
        # Looked up once, because most messages and operations need only these.
        sends = endpoint.data_path.sends.core
        self._send, self._read, self._write = sends.send, sends.read, sends.write
        queue = endpoint.data_path.receiver.queue
        self._recv, self._next = queue.recv, queue.next

    @classmethod
    def from_id(
        cls,
        cm: AsyncCmId | SyncCmId,
        *,
        private_data: bytes = b"",
        options: ConnectionOptions = DEFAULT_OPTIONS,
    ) -> AwaitableContextManager[Connection]:
        """Make a connection of an id: `await Connection.from_id(cm)` or `async with`.

        If the route of the id is resolved, it connects; `SyncCmId.create_ep()` returns such ids. If
        the id is a connection request, it is accepted. A SyncCmId is first moved to the running
        loop. If the id has a queue pair, that is replaced by one that uses the loop's completion
        queues.

        The connection owns the id from now on. The id is closed if this fails or is cancelled. Only
        a SyncCmId that was not moved to the loop yet stays as it was.

        Raises:
            RdmaError: the id is in another state. It is left unchanged.
            Others: as connect(), and as ConnectRequest.accept().
        """
        return AwaitableContextManager(cls._from_id(cm, private_data, options))

    @classmethod
    async def _from_id(
        cls, cm: AsyncCmId | SyncCmId, private_data: bytes, options: ConnectionOptions
    ) -> Connection:
        if cm.state not in (CmState.ROUTE_RESOLVED, CmState.REQUESTED):
            raise RdmaError(
                f"an id in state {cm.state.name} cannot become a connection: its route must be "
                "resolved, or it must be a connection request that is not answered yet"
            )
        if options.shared_recv_depth:
            raise ValueError("shared_recv_depth is for listen(), not for a single connection")
        async_cm = await cm.migrate() if isinstance(cm, SyncCmId) else cm
        is_request = async_cm.state is CmState.REQUESTED
        if is_request:
            try:
                endpoint = message_endpoint(async_cm, options)
                await endpoint.accept(private_data)
            except BaseException as error:
                await close_after(async_cm, error)
                raise
            return cls(endpoint)
        return await connect_id(async_cm, private_data, options)

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side."""
        return self._endpoint.local_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer."""
        return self._endpoint.peer_address

    @property
    def device_name(self) -> str:
        """The name of the RDMA device. All connections of a loop on the same device can use the
        same registered memory."""
        return self._endpoint.device.name

    @property
    def private_data(self) -> bytes:
        """The private data that the peer sent when it accepted, or when it requested to connect.

        InfiniBand and RoCE pad it with zeros, to 196 bytes with an accept and to 56 bytes with a
        request. So a protocol that uses private data must encode its length.
        """
        return self._endpoint.peer_private_data

    @property
    def max_message_size(self) -> int:
        """The size in bytes of the largest message that this side can send and receive."""
        return self._endpoint.options.max_message_size

    @property
    def closed(self) -> bool:
        """True if the connection has ended, here or at the peer. Messages that arrived before can
        still be received, unless this side closed the connection."""
        return self._endpoint.closed

    @property
    def stats(self) -> ConnectionStats:
        """A snapshot of the connection's counters and of the fill levels of its queues."""
        return self._endpoint.data_path.snapshot()

    # --- sending ---

    def send(
        self,
        data: Source,
        # Not keyword-only: Python needs much longer for a call that leaves out such arguments.
        imm: int | None = None,
        invalidate: RemoteBuffer | None = None,
    ) -> Coroutine[object, None, None]:
        """Send one message. See ibv_post_send(3).

        `data` without registered memory is copied, and send() returns when the message is posted.
        That is immediate, unless `send_depth` requests are in flight already. If the message fails
        later, the next call raises the error.

        Registered memory is not copied, and send() returns when the request has completed: the
        memory can then be reused.

        While a send waits, a buffer in `data` cannot be resized (BufferError). The message has the
        bytes that the buffer holds when the message is posted.

        Cancelling a send that is not posted yet sends nothing, and the connection goes on. If
        registered memory is posted already, it is sent all the same, and stays pinned until the
        request has completed.

        Args:
            data: A bytes-like object, registered memory, or a list of those. A list is one message,
                with at most `max_sge` pieces of registered memory. A message can be empty.
            imm: Immediate data: a number of 32 bits that arrives with the message (not on iWARP).
            invalidate: Memory of the peer that the peer has bound to a MemoryWindow. Its key
                becomes invalid when the message arrives.

        Raises:
            ValueError: the message is larger than `max_message_size` or has too many pieces, its
                memory is closed or not registered for this connection, or `imm` is not possible.
                The connection goes on.
            PeerClosed, WorkRequestError, DeviceRemoved: the connection has ended.
            LocalClosed: the connection was closed on this side.
            VerbsError: ENOMEM when no more memory can be registered for copies.
        """
        if imm is None and invalidate is None:
            # A local name first: Python would otherwise look for a method.
            send = self._send
            return send(self, data)
        return self._send_with(data, imm, invalidate)

    async def _send_with(
        self, data: Source, imm: int | None, invalidate: RemoteBuffer | None
    ) -> None:
        await self._endpoint.data_path.slow.sender.send_with(data, imm, invalidate)

    # --- receiving ---

    def recv(self) -> Coroutine[object, None, bytes]:
        """Wait for the next message and return its bytes. A message can be empty.

        Messages that arrived before the peer disconnected, or before the connection failed, are
        returned first. See ibv_post_recv(3).

        Cancelling loses no message.

        Raises:
            PeerClosed: the peer has disconnected, or its process has ended.
            WorkRequestError: the device reported a failure, such as a message that was too large.
            DeviceRemoved: the RDMA device was removed.
            LocalClosed: the connection was closed on this side.
            ReceiveOverrun: the peer sent more than was received in time, on iWARP or with a shared
                receive queue.
            BusyError: another task is receiving.
        """
        recv = self._recv  # a local name first: see send()
        return recv(self)

    async def recv_into(self, buffer: Buffer | MemorySlice) -> int:
        """Wait for the next message, copy it to the beginning of `buffer`, and return its length.

        Cancelling loses no message.

        Raises:
            ValueError: the message is longer than the buffer. It is not lost: the next call returns
                it.
            BufferError: the buffer is read-only, or not contiguous.
            Others: as recv().
        """
        with buffer.view if isinstance(buffer, MemorySlice) else memoryview(buffer) as view:
            if view.readonly or not view.c_contiguous:
                raise BufferError("a message needs a contiguous buffer that can be written to")
            with byte_view(view) as memory:
                return await self._endpoint.data_path.receiver.recv_into(memory)

    async def recv_message(self) -> Message:
        """Wait for the next message and return it in its receive buffer, without a copy.

        The Message also has the immediate data and the invalidated key, if any. It occupies one of
        the `recv_depth` receive buffers until it is released, for example by the end of a `with`
        block. When all receive buffers are occupied, InfiniBand and RoCE hold the peer back. On
        iWARP the connection ends if the peer goes on sending. A Message stays valid after the
        connection has ended.

        Cancelling loses no message.

        Raises: as recv().
        """
        return await self._endpoint.data_path.receiver.recv_message()

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over messages until the peer disconnects. Other ends raise, as from recv()."""
        return self

    def __anext__(self) -> Coroutine[object, None, bytes]:
        receive_next = self._next  # a local name first: see send()
        return receive_next(self)

    # --- memory ---

    async def bind(
        self,
        part: MemorySlice | MemoryRegion,
        access: AccessFlags = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE,
    ) -> MemoryWindow:
        """Bind a memory window: give the peer a key for registered memory that can be revoked.

        The key is valid on this connection only, until the window is closed or the peer sends a
        message that invalidates the key (`send(..., invalidate=...)`). See ibv_bind_mw(3).

        Cancelling leaves no window.

        Args:
            part: The memory. Its region must be registered with MW_BIND, and with LOCAL_WRITE if
                `access` includes REMOTE_WRITE.
            access: The operations that the peer can use.

        Raises:
            ValueError: the device has no memory windows (iWARP has none), the region is not
                registered with MW_BIND, or `part` is empty.
            VerbsError: ENOMEM when no more windows can be allocated.
            WorkRequestError: the device refused the request. This connection has ended then.
            PeerClosed, DeviceRemoved, LocalClosed: the connection has ended.
        """
        self._endpoint.check_open()
        return await self._endpoint.data_path.slow.windows.bind(part[:], access)

    # --- one-sided operations ---

    @property
    def read_access(self) -> AccessFlags:
        """The access that memory needs for read() to fill it: for register() and allocate().

        It is LOCAL_WRITE, on iWARP also REMOTE_WRITE: there the peer's device writes the data.
        """
        return read_access(self._endpoint.device)

    def read(self, remote: RemoteBuffer, into: Sink) -> Coroutine[object, None, None]:
        """Read the peer's memory `remote` into the beginning of `into`: RDMA READ.

        The peer's program takes no part. read() returns when all bytes have arrived. At most
        `initiator_depth` reads and atomics are in flight at a time; further ones wait. See
        ibv_post_send(3).

        Cancelling stops only the waiting. The device can still write to `into`, which stays pinned,
        until the read has completed. Messages that are sent after the cancelled read reach the peer
        after the read has completed.

        Args:
            remote: The memory to read, all of it. A slice of it reads a part.
            into: Registered memory, or a list of at most `max_sge` pieces of it to scatter to.

        Raises:
            ValueError: `into` is too small, has too many pieces, is closed, is not registered with
                LOCAL_WRITE (on iWARP also REMOTE_WRITE) or not for this connection, or the
                connection was made with an `initiator_depth` of 0.
            WorkRequestError: the peer's memory does not allow the read (REM_ACCESS_ERR). This
                connection has ended then.
            PeerClosed, DeviceRemoved, LocalClosed: the connection has ended.
        """
        read = self._read  # a local name first: see send()
        return read(self, remote, into)

    def write(
        self, source: Source, remote: RemoteBuffer, *, imm: int | None = None
    ) -> Coroutine[object, None, None]:
        """Write `source` to the beginning of the peer's memory `remote`: RDMA WRITE.

        Registered memory is not copied, other memory is. write() returns when the request has
        completed: `source` can be reused, and the peer's device has all bytes. On iWARP the bytes
        may still be on their way; a read() after the write shows that they have arrived. See
        ibv_post_send(3).

        Cancelling stops only the waiting. A write that is posted still happens, and `source` stays
        pinned until it has completed.

        Args:
            source: A bytes-like object, registered memory, or a list of those to gather, with at
                most `max_sge` pieces of registered memory.
            remote: The memory to write to.
            imm: Immediate data, a number of 32 bits (not on iWARP). With it, the peer receives an
                empty message that has the number. Without it, the peer's program takes no part.

        Raises:
            ValueError: `remote` is too small, `source` is closed, has too many pieces or is not
                registered for this connection, or `imm` is not possible.
            WorkRequestError, PeerClosed, DeviceRemoved, LocalClosed: as read().
        """
        if imm is None:
            write = self._write  # a local name first: see send()
            return write(self, source, remote)
        return self._write_with(source, remote, imm)

    async def _write_with(self, source: Source, remote: RemoteBuffer, imm: int) -> None:
        number = checked_imm(self._endpoint.device, imm)
        await self._endpoint.data_path.slow.remote.write(source, remote, number)

    async def fetch_and_add(self, remote: RemoteBuffer, value: int) -> int:
        """Add `value` atomically to the number at `remote`, and return the number before.

        The number has 64 bits, in the byte order of the peer, at an address that is a multiple of
        8. The sum wraps around. The operation is atomic with respect to the other operations of
        the peer's device. See ibv_post_send(3).

        Cancelling stops only the waiting. The operation can still happen, once.

        Raises:
            ValueError: the device has no atomics (iWARP has none), `remote` has fewer than 8 bytes,
                its address is not a multiple of 8, or the connection was made with an
                `initiator_depth` of 0.
            WorkRequestError, PeerClosed, DeviceRemoved, LocalClosed: as read().
        """
        return await self._atomic(WrOpcode.ATOMIC_FETCH_AND_ADD, remote, (value % (1 << 64), 0))

    async def compare_and_swap(self, remote: RemoteBuffer, compare: int, swap: int) -> int:
        """Set the number at `remote` atomically to `swap` if it equals `compare`.

        Return the number before: if it equals `compare`, it was replaced. Everything else is as
        with fetch_and_add().

        Raises:
            ValueError: as fetch_and_add(), or an operand is not a number of 64 bits.
            WorkRequestError, PeerClosed, DeviceRemoved, LocalClosed: as read().
        """
        return await self._atomic(WrOpcode.ATOMIC_CMP_AND_SWP, remote, (compare, swap))

    async def _atomic(
        self, opcode: WrOpcode, remote: RemoteBuffer, operands: tuple[int, int]
    ) -> int:
        return await self._endpoint.data_path.slow.remote.atomic(opcode, remote, operands)

    # --- the end ---

    async def aclose(self) -> None:
        """Close gracefully: wait until posted sends have reached the peer, then disconnect.

        If that takes longer than `close_timeout` seconds, the connection is ended by force. Tasks
        that wait to send or to receive get LocalClosed. Idempotent. See rdma_disconnect(3).

        Cancelling ends the connection by force: messages that were not sent yet can be lost.
        Everything is destroyed all the same.
        """
        await self._endpoint.aclose()

    def abort(self) -> None:
        """End the connection at once, without waiting for posted sends. Idempotent.

        The peer is disconnected. Everything is destroyed in the background.
        """
        self._endpoint.abort()

    def __del__(self) -> None:
        endpoint = getattr(self, "_endpoint", None)
        if endpoint is None:
            return
        is_unclosed = not endpoint.released
        if is_unclosed:
            name = repr(self)
            endpoint.abandon()
        endpoint.drop(endpoint.data_path.unlink)
        if is_unclosed:  # the warning can be an exception
            warnings.warn(f"unclosed {name}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        host, port = self.peer_address
        state = "closed" if self.closed else "open"
        return f"<Connection to {host} port {port}, {state}>"
