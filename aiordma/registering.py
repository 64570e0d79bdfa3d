"""Registering memory of the user's with the device of a loop."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.datapath import Load
from aiordma.dispatch import LoopDevice
from aiordma.endpoint import Endpoint
from aiordma.enums import AccessFlags
from aiordma.errors import RdmaError
from aiordma.loop import Loop, hand_over, make_in_worker, workers
from aiordma.memory import MemoryRegion, exporting
from aiordma.verbs import Device, ProtectionDomain, Registration

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

WRITE_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


DEFAULT_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE


class Registers:
    """The part of whatever has an endpoint that is about memory of this side's."""

    def __init__(self, endpoint: Endpoint[Load]) -> None:
        self._endpoint = endpoint

    async def register(self, buffer: Buffer, access: AccessFlags = DEFAULT_ACCESS) -> MemoryRegion:
        """Pin memory of yours, so that the device reaches it without a copy: ibv_reg_mr(3).

        Anything contiguous with the buffer protocol will do, and numpy arrays of any type but
        objects. `access` says who may do what; it must include LOCAL_WRITE for memory that is read
        into, or that the peer writes. A read-only buffer takes neither, and may be sent and read
        from. With ON_DEMAND, where the device has on-demand paging, nothing is pinned. In a worker
        thread. A RegistrationCache makes it cheap to register the same buffer again.

        The region is good for every connection and stream of this event loop on this device, until
        it is closed. Cancelling leaves nothing pinned.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached), EINVAL (not this access).
            BufferError: the buffer is not contiguous.
            ValueError: it is empty, read-only and to be written to, or holds Python objects; or the
                device has no on-demand paging.
            LocalClosed, PeerClosed, ...: the connection has ended.
        """
        self._endpoint.check_open()
        return await register(self._endpoint.cm.loop, self._endpoint.device, buffer, access)

    async def register_dmabuf(
        self, fd: int, offset: int, length: int, access: AccessFlags = DEFAULT_ACCESS
    ) -> MemoryRegion:
        """Let the device reach `length` bytes of a dma-buf: ibv_reg_dmabuf_mr(3).

        A dma-buf is memory of another device, such as a GPU, behind a file descriptor, which may be
        closed afterwards. The region has no bytes to look at here, `memoryview()` of it raises
        BufferError; all else is as with register().

        Raises:
            VerbsError: EOPNOTSUPP (this device or kernel cannot), EINVAL, EBADF.
            ValueError: `offset` or `length` is not possible.
            LocalClosed, PeerClosed, ...: the connection has ended.
        """
        self._endpoint.check_open()
        cm, device = self._endpoint.cm, self._endpoint.device
        return await register_dmabuf(cm.loop, device, fd, (offset, length), access)

    async def allocate(self, nbytes: int, access: AccessFlags = DEFAULT_ACCESS) -> MemoryRegion:
        """Fresh zeroed memory, registered. Otherwise as register().

        Raises:
            ValueError: `nbytes` is not positive.
            MemoryError: there is not so much.
        """
        if nbytes <= 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        try:
            pages = mmap.mmap(-1, nbytes)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{nbytes} bytes cannot be allocated: {error}") from error
        return await self.register(pages, access)


async def register(loop: Loop, device: Device, buffer: Buffer, access: AccessFlags) -> MemoryRegion:
    """Register `buffer` with the device of the loop's connections. See Connection.register."""
    _check_access(device, access)
    buffer = exporting(buffer)
    with memoryview(buffer) as view:
        if not view.nbytes:
            raise ValueError("an empty buffer cannot be registered")
        if view.readonly and access & WRITE_ACCESS:
            raise ValueError(f"a read-only buffer cannot be registered with {access!r}")
    return await _register(
        loop, device, buffer, access, lambda pd: Registration(pd, buffer, access)
    )


async def register_dmabuf(
    loop: Loop, device: Device, fd: int, part: tuple[int, int], access: AccessFlags
) -> MemoryRegion:
    """Register a part, offset and length, of a dma-buf. See Connection.register_dmabuf."""
    _check_access(device, access)
    offset, length = part
    if offset < 0 or length <= 0:
        raise ValueError(f"{length} bytes at offset {offset} cannot be registered")
    return await _register(
        loop, device, None, access, lambda pd: Registration.of_dmabuf(pd, fd, part, access)
    )


def _check_access(device: Device, access: AccessFlags) -> None:
    if access & AccessFlags.ON_DEMAND and not device.attributes.has_on_demand_paging:
        raise ValueError(
            f"{device.name} has no on-demand paging: register without AccessFlags.ON_DEMAND"
        )


async def _register(
    loop: Loop,
    device: Device,
    buffer: Buffer | None,
    access: AccessFlags,
    make: Callable[[ProtectionDomain], Registration],
) -> MemoryRegion:
    """Do it in a worker thread, in the protection domain of the loop's connections.

    Cancelling leaves nothing pinned. The region keeps the loop's share of the device until it is
    disposed of.
    """
    shared = LoopDevice.of(loop, device)

    def unpin(registration: Registration, over: Callable[[], None]) -> None:
        try:
            registration.close()
        except RdmaError:
            logger.exception("memory could not be unregistered")
        hand_over(loop, over)
        hand_over(loop, shared.release)

    def dispose(registration: Registration, over: Callable[[], None]) -> None:
        workers.submit(lambda: unpin(registration, over))

    try:
        registration = await make_in_worker(loop, lambda: make(shared.pd), Registration.close)
    except BaseException:
        shared.release()
        raise
    return MemoryRegion(registration, buffer, access, dispose)
