"""Connection: messages between two peers."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiordma.cm import AsyncCmId, CmState, SyncCmId
from aiordma.endpoint import Endpoint
from aiordma.enums import AccessFlags, WrOpcode
from aiordma.errors import PeerClosed, RdmaError
from aiordma.memory import MemoryRegion, MemorySlice, RemoteBuffer
from aiordma.opening import Opening
from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions
from aiordma.verbs.queue_pair import NO_IMMEDIATE, checked_immediate

if TYPE_CHECKING:
    from typing_extensions import Buffer


DEFAULT_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
WRITE_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


class Connection:
    """A reliable connection that carries whole messages, in order (RDMA's RC queue pair).

    From `connect()`, or from accepting a ConnectRequest. It is closed by `aclose()`, or by leaving
    the `async with` block it was opened in; one that is just dropped warns, and is then aborted.

    One task may receive at a time; any number may send. Belongs to the event loop it was made on.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        """For connect() and accept(); not to be called by others."""
        self._endpoint = endpoint
        self._local_address = endpoint.cm.local_address
        self._peer_address = endpoint.cm.peer_address

    @classmethod
    def from_id(
        cls,
        cm: AsyncCmId | SyncCmId,
        *,
        private_data: bytes = b"",
        options: ConnectionOptions = DEFAULT_OPTIONS,
    ) -> Opening[Connection]:
        """Make one from an id: `await Connection.from_id(cm)`, or `async with`.

        An id whose route is resolved, as SyncCmId.create_ep makes it, connects; a request is
        accepted. A synchronous id moves to the running loop first. A queue pair that the id has is
        replaced by one on the loop's completion queues.

        The id is the connection's from now on, and is closed if this fails or is cancelled.

        Raises:
            RdmaError: the id is in another state; it is left as it is.
            Others: as connect(), and as ConnectRequest.accept().
        """
        return Opening(cls._from_id(cm, private_data, options))

    @classmethod
    async def _from_id(
        cls, cm: AsyncCmId | SyncCmId, private_data: bytes, options: ConnectionOptions
    ) -> Connection:
        if cm.state not in (CmState.ROUTE_RESOLVED, CmState.REQUESTED):
            raise RdmaError(
                f"an id in state {cm.state.name} makes no connection: its route must be resolved, "
                "or it must be a request that is not answered"
            )
        own = await cm.migrate() if isinstance(cm, SyncCmId) else cm
        is_request = own.state is CmState.REQUESTED
        async with own.closed_on_failure():
            endpoint = Endpoint(own, options)
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

    async def send(
        self, data: Buffer | list[Buffer] | tuple[Buffer, ...], *, imm: int | None = None
    ) -> None:
        """Send one message: any bytes-like object, or several to be joined; it may be empty.

        Returns when the data is copied and posted, which is at once unless `send_depth` sends are
        on their way already. A later failure of this send raises from the next call. `imm` is a
        number of 32 bits that travels beside the data (not on iWARP). See ibv_post_send(3).

        While it waits, the object cannot be resized (BufferError), and what it holds in the end is
        sent. Cancelling while it waits sends nothing; the connection goes on.

        Raises:
            ValueError: the message is larger than max_message_size. The connection goes on.
            PeerClosed, WorkRequestError, DeviceRemoved: the connection has ended.
            LocalClosed: it was closed on this side.
            VerbsError: ENOMEM when no more memory can be registered.
        """
        number = NO_IMMEDIATE if imm is None else self._checked(imm)
        if isinstance(data, (list, tuple)):
            data = b"".join(data)
        if type(data) is bytes:
            await self._endpoint.send(data, len(data), number)
            return
        with memoryview(data) as view:  # held, so that nobody resizes it while it waits
            contiguous = view if view.c_contiguous else view.tobytes()
            await self._endpoint.send(contiguous, view.nbytes, number)

    def _checked(self, imm: int) -> int:
        number = checked_immediate(imm)
        if self._endpoint.device.is_iwarp:
            raise ValueError("iWARP carries no immediate data")
        return number

    # --- memory ---

    async def register(self, buffer: Buffer, access: AccessFlags = DEFAULT_ACCESS) -> MemoryRegion:
        """Pin memory of yours, so that the device reaches it without a copy: ibv_reg_mr(3).

        Anything contiguous with the buffer protocol will do. `access` says who may do what; it must
        include LOCAL_WRITE for memory that is read into, or that the peer writes. A read-only
        buffer takes neither, and may be sent and read from. In a worker thread.

        The region is good for every connection of this event loop on this device, until it is
        closed. Cancelling leaves nothing pinned.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached), EINVAL (not this access).
            BufferError: the buffer is not contiguous.
            ValueError: it is empty, or read-only and to be written to.
            LocalClosed, PeerClosed, ...: the connection has ended.
        """
        with memoryview(buffer) as view:
            if not view.nbytes:
                raise ValueError("an empty buffer cannot be registered")
            if view.readonly and access & WRITE_ACCESS:
                raise ValueError(f"a read-only buffer cannot be registered with {access!r}")
        return await self._endpoint.register(buffer, access)

    async def allocate(self, nbytes: int, access: AccessFlags = DEFAULT_ACCESS) -> MemoryRegion:
        """Fresh zeroed memory, registered. Otherwise as register().

        Raises:
            ValueError: `nbytes` is not positive.
            MemoryError: there is not so much.
        """
        if nbytes <= 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        return await self._endpoint.register(mmap.mmap(-1, nbytes), access)

    # --- one-sided operations ---

    async def read(self, remote: RemoteBuffer, into: MemorySlice | MemoryRegion) -> None:
        """Read the whole of `remote`, memory of the peer's, into the beginning of `into`.

        The peer takes no part: RDMA READ. Returns when the data is there. See ibv_post_send(3).

        Cancelling stops the waiting only: `into` may still be written to, and stays pinned for
        that, until it has ended.

        Raises:
            ValueError: `into` is too small, closed, or not registered for it (LOCAL_WRITE; on iWARP
                REMOTE_WRITE too), or the connection was made with an initiator_depth of 0.
            WorkRequestError: the peer's memory does not allow it (REM_ACCESS_ERR); this connection
                has ended then.
            PeerClosed, DeviceRemoved, LocalClosed: the connection has ended.
        """
        await self._endpoint.remote.read(remote, into[:])

    async def write(
        self,
        source: MemorySlice | MemoryRegion | Buffer,
        remote: RemoteBuffer,
        *,
        imm: int | None = None,
    ) -> None:
        """Write `source` to the beginning of `remote`, memory of the peer's: RDMA WRITE.

        Registered memory is not copied, any other is. Returns when the peer's device has it all,
        and the source may be reused. With `imm`, a number of 32 bits, the peer learns of the write:
        it gets an empty message. Without, the peer takes no part. See ibv_post_send(3).

        Cancelling stops the waiting only: the source is pinned until it has ended.

        Raises:
            ValueError: `remote` is too small, the source is closed, or iWARP was to carry `imm`.
            WorkRequestError, PeerClosed, DeviceRemoved, LocalClosed: as read().
        """
        number = NO_IMMEDIATE if imm is None else self._checked(imm)
        if isinstance(source, (MemorySlice, MemoryRegion)):
            await self._endpoint.remote.write(source[:], remote, number)
            return
        with memoryview(source) as view:
            data = view if view.c_contiguous else view.tobytes()
            call = self._endpoint.cm.handle.call
            await self._endpoint.remote.write_copy(data, view.nbytes, remote, number, call)

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
        call = self._endpoint.cm.handle.call
        return await self._endpoint.remote.atomic(opcode, remote, operands, call)

    # --- messages ---

    async def recv(self) -> bytes:
        """Wait for the next message and return it; b"" is a message too.

        Messages that came before the peer disconnected are returned first. See ibv_post_recv(3).

        Cancelling loses no message.

        Raises:
            PeerClosed: the peer has disconnected, or its process ended.
            WorkRequestError: the device reported a failure, such as a message that is too large.
            DeviceRemoved: the RDMA device went away.
            LocalClosed: it was closed on this side.
            BusyError: another task is receiving.
        """
        return await self._endpoint.recv()

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over messages until the peer disconnects; other ends raise, as from recv()."""
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self._endpoint.recv()
        except PeerClosed:
            raise StopAsyncIteration from None

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None and not isinstance(exc, Exception):
            self.abort()
        await self.aclose()

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
