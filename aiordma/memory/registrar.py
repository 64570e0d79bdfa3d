"""Registering the user's memory with a device."""

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

LOCAL_WRITE = AccessFlags.LOCAL_WRITE
WRITE_ACCESS = LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


class DomainReference(Protocol):
    """A reference to a protection domain that several users share."""

    pd: ProtectionDomain
    largest_region: int
    """The length in bytes of the largest region that was ever registered in it."""

    def release(self) -> None:
        """Release the reference. The last one closes the domain."""


class RegistrationScope(Protocol):
    """A connection or a stream, in whose protection domain memory is registered."""

    device: Device

    @property
    def loop(self) -> Loop:
        """The event loop that the connection or stream belongs to."""

    def check_open(self) -> None:
        """Raise the reason if the connection or stream can send no more."""

    def acquire_domain(self) -> DomainReference:
        """Acquire a reference to the protection domain of the connection or stream."""


class Registrar:
    """The base class of connections and streams for the methods that register local memory."""

    def __init__(self, scope: RegistrationScope) -> None:
        self._scope = scope

    async def register(self, buffer: Buffer, access: AccessFlags = LOCAL_WRITE) -> MemoryRegion:
        """Register a buffer, so that the device accesses it without a copy. See ibv_reg_mr(3).

        `buffer` can be any contiguous object with the buffer protocol, and a numpy array of any
        type except objects.

        `access` is what this side and its peers are allowed to do. By default peers have no access.
        REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC give it: to the peers of all connections that
        can use the region, if they know the key. LOCAL_WRITE is needed for memory that this side
        receives or reads into, or that a peer writes; on iWARP, read() also needs REMOTE_WRITE
        (`Connection.read_access`). A read-only buffer can be registered only for sending
        (`AccessFlags(0)`), and for reads by the peer. With ON_DEMAND, on a device with on-demand
        paging, the pages are not pinned.

        Every connection and stream of this event loop on this device can use the region until it is
        closed, except those with `own_protection_domain`, which can only use their own regions. A
        worker thread registers the buffer. A RegistrationCache makes it cheap to register the same
        buffer again. Cancelling leaves nothing pinned.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached), EINVAL (the device does not
                allow this access).
            BufferError: the buffer is not contiguous.
            ValueError: the buffer is empty, is read-only while `access` includes writing, or holds
                Python objects; or the device has no on-demand paging.
            LocalClosed, PeerClosed, ...: the connection has ended.
        """
        self._scope.check_open()
        return await register(self._scope, buffer, access)

    async def register_dmabuf(
        self, fd: int, offset: int, length: int, access: AccessFlags = LOCAL_WRITE
    ) -> MemoryRegion:
        """Register `length` bytes of a dma-buf, from `offset` on. See ibv_reg_dmabuf_mr(3).

        A dma-buf is memory of another device, such as a GPU. `fd` is its file descriptor, which the
        caller can close afterwards. The memory is not mapped in this process: `memoryview()` of the
        region raises BufferError. Otherwise as register().

        Raises:
            VerbsError: EOPNOTSUPP (the device or the kernel does not support it), EINVAL, EBADF.
            ValueError: `offset` is negative, `length` is not positive, or the device has no
                on-demand paging.
            LocalClosed, PeerClosed, ...: the connection has ended.
        """
        self._scope.check_open()
        return await register_dmabuf(self._scope, fd, (offset, length), access)

    async def allocate(self, nbytes: int, access: AccessFlags = LOCAL_WRITE) -> MemoryRegion:
        """Allocate and register `nbytes` bytes of zeroed memory. Otherwise as register().

        Raises:
            ValueError: `nbytes` is not positive.
            MemoryError: the system has not enough memory.
            Others: as register().
        """
        if nbytes <= 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        try:
            pages = mmap.mmap(-1, nbytes)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{nbytes} bytes cannot be allocated: {error}") from error
        return await self.register(pages, access)


async def register(scope: RegistrationScope, buffer: Buffer, access: AccessFlags) -> MemoryRegion:
    """Register `buffer` in the scope's protection domain. See Registrar.register()."""
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
    """Register a part of a dma-buf, `(offset, length)`. See Registrar.register_dmabuf()."""
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
    """Call `make` in a worker thread, with the protection domain of the loop's connections.

    Cancelling leaves nothing pinned. The call and the region hold a reference to the protection
    domain until the memory is unregistered.
    """
    loop, domain = scope.loop, scope.acquire_domain()

    def unregister(registration: Registration, on_unregistered: Callable[[], None]) -> None:
        try:
            registration.close()
        except RdmaError:
            logger.exception("memory could not be unregistered")
        ensure_called(loop, on_unregistered)
        ensure_called(loop, domain.release)

    def dispose(registration: Registration, on_unregistered: Callable[[], None]) -> None:
        worker_pool.submit(lambda: unregister(registration, on_unregistered))

    registration = await make_in_worker(
        loop,
        lambda: make(domain.pd),
        lambda registration: unregister(registration, _do_nothing),
        on_unmade=domain.release,
    )
    domain.largest_region = max(domain.largest_region, registration.length)
    return MemoryRegion(registration, buffer, access, dispose)


def _do_nothing() -> None:
    """Do nothing: no region waits until its memory is unregistered."""
