"""OneSided: registered memory, and operations that the peer takes no part in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma.enums import AccessFlags, WrOpcode
from aiordma.memory import MemoryRegion, MemorySlice, RemoteBuffer
from aiordma.memory.registrar import Registrar
from aiordma.messages.memory_windows import MemoryWindow
from aiordma.messages.message_data_path import Traffic
from aiordma.qp.endpoint import Endpoint
from aiordma.verbs import Device
from aiordma.verbs.queue_pair import NO_IMMEDIATE, checked_immediate

if TYPE_CHECKING:
    from aiordma.qp.scatter_gather import Sink, Source


# Plain numbers, for C.
READ = int(WrOpcode.RDMA_READ)
WRITE = int(WrOpcode.RDMA_WRITE)


def checked_for(device: Device, imm: int | None) -> int:
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


class OneSided(Registrar):
    """The part of a Connection that is about memory, this side's and the peer's."""

    _endpoint: Endpoint[Traffic]

    def __init__(self, endpoint: Endpoint[Traffic]) -> None:
        super().__init__(endpoint)
        # Looked up once: registered memory in one piece needs no more than these.
        self._transfer = endpoint.traffic.transfer
        self._finish = endpoint.traffic.finish

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
        return await self._endpoint.traffic.windows.bind(part[:], access)

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
        transfer = self._transfer(READ, into, remote)
        if transfer is not None:
            await self._finish(transfer)
        else:
            await self._endpoint.traffic.remote.read(remote, into)

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
            transfer = self._transfer(WRITE, source, remote)
            if transfer is not None:
                await self._finish(transfer)
                return
        number = checked_for(self._endpoint.device, imm)
        await self._endpoint.traffic.remote.write(source, remote, number)

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
        return await self._endpoint.traffic.remote.atomic(opcode, remote, operands)
