"""Registering memory of the user's with the device of a loop."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiordma.enums import AccessFlags
from aiordma.errors import RdmaError
from aiordma.loop import Loop, ensure_called, make_in_worker, worker_pool
from aiordma.memory.byte_views import as_exporter
from aiordma.memory.region import MemoryRegion
from aiordma.verbs import Device, ProtectionDomain, Registration

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

WRITE_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
DEFAULT_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE


class DomainReference(Protocol):
    """A reference to a protection domain that several users share."""

    pd: ProtectionDomain

    def release(self) -> None:
        """Drop the reference. The last one closes the domain."""


class RegistrationScope(Protocol):
    """A connection or a stream, in whose protection domain memory is registered."""

    device: Device

    @property
    def loop(self) -> Loop:
        """The event loop that it belongs to."""

    def check_open(self) -> None:
        """Raise the reason if nothing can be sent any more."""

    def acquire_domain(self) -> DomainReference:
        """Take a reference to the protection domain of the loop's connections on the device."""


class Registrar:
    """The part of whatever has an endpoint that is about memory of this side's."""

    def __init__(self, scope: RegistrationScope) -> None:
        self._scope = scope

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
        self._scope.check_open()
        return await register(self._scope, buffer, access)

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
        self._scope.check_open()
        return await register_dmabuf(self._scope, fd, (offset, length), access)

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


async def register(scope: RegistrationScope, buffer: Buffer, access: AccessFlags) -> MemoryRegion:
    """Register `buffer` with the device of the loop's connections. See Connection.register."""
    _check_access(scope.device, access)
    buffer = as_exporter(buffer)
    with memoryview(buffer) as view:
        if not view.nbytes:
            raise ValueError("an empty buffer cannot be registered")
        if view.readonly and access & WRITE_ACCESS:
            raise ValueError(f"a read-only buffer cannot be registered with {access!r}")
    return await _register(scope, buffer, access, lambda pd: Registration(pd, buffer, access))


async def register_dmabuf(
    scope: RegistrationScope, fd: int, part: tuple[int, int], access: AccessFlags
) -> MemoryRegion:
    """Register a part, offset and length, of a dma-buf. See Connection.register_dmabuf."""
    _check_access(scope.device, access)
    offset, length = part
    if offset < 0 or length <= 0:
        raise ValueError(f"{length} bytes at offset {offset} cannot be registered")
    return await _register(
        scope, None, access, lambda pd: Registration.of_dmabuf(pd, fd, part, access)
    )


def _check_access(device: Device, access: AccessFlags) -> None:
    if access & AccessFlags.ON_DEMAND and not device.attributes.has_on_demand_paging:
        raise ValueError(
            f"{device.name} has no on-demand paging: register without AccessFlags.ON_DEMAND"
        )


async def _register(
    scope: RegistrationScope,
    buffer: Buffer | None,
    access: AccessFlags,
    make: Callable[[ProtectionDomain], Registration],
) -> MemoryRegion:
    """Do it in a worker thread, in the protection domain of the loop's connections.

    Cancelling leaves nothing pinned. The region keeps the loop's share of the device until it is
    disposed of.
    """
    loop, domain = scope.loop, scope.acquire_domain()

    def unpin(registration: Registration, over: Callable[[], None]) -> None:
        try:
            registration.close()
        except RdmaError:
            logger.exception("memory could not be unregistered")
        ensure_called(loop, over)
        ensure_called(loop, domain.release)

    def dispose(registration: Registration, over: Callable[[], None]) -> None:
        worker_pool.submit(lambda: unpin(registration, over))

    try:
        registration = await make_in_worker(loop, lambda: make(domain.pd), Registration.close)
    except BaseException:
        domain.release()
        raise
    return MemoryRegion(registration, buffer, access, dispose)
