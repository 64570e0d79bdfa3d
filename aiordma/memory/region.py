"""MemoryRegion: memory of the user, registered; MemorySlice: a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma._native import BufferExporter, fast_path
from aiordma.enums import AccessFlags
from aiordma.loop import WaitQueue, checkpoint, refuse_forked_child, running_loop
from aiordma.loop.context_managers import AsyncContextManagerMixin, ContextManagerMixin
from aiordma.memory.byte_views import byte_view
from aiordma.memory.remote import RemoteBuffer, bounds_of
from aiordma.verbs import ProtectionDomain, Registration
from aiordma.verbs.queue_pair import Segment

if TYPE_CHECKING:
    from typing_extensions import Buffer


REMOTE_ACCESS = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC

Dispose = Callable[[Registration, Callable[[], None]], None]
"""Unregisters without blocking, then calls the second argument on the loop's thread."""


class MemoryRegion(BufferExporter, ContextManagerMixin, AsyncContextManagerMixin):
    """A buffer whose pages are pinned, so that the device can access them. See ibv_reg_mr(3).

    `Connection.register()` and `allocate()` return one. Every connection of the same event loop on
    the same device can use it, unless either has a protection domain of its own.
    `memoryview(region)` is the memory, and `region[a:b]` is a MemorySlice of it.

    close(), or the end of a `with` block, closes the region. The memory stays pinned until the
    device has completed the requests that use it. Until then the buffer can be neither freed nor
    resized. aclose(), or the end of an `async with` block, waits for that.
    """

    __slots__ = (
        "_close_waiters",
        "_dispose",
        "_is_unregistered",
        "_registration",
        "access",
        "length",
        "references",
        "segment",
    )

    def __init__(
        self,
        registration: Registration,
        buffer: Buffer | None,
        access: AccessFlags,
        dispose: Dispose,
    ) -> None:
        """Called by register(), register_dmabuf() and alias(); not for users."""
        if buffer is not None:  # the memory of a dma-buf is not mapped in this process
            self._exported = buffer
        self._registration = registration
        self._dispose = dispose
        self._is_unregistered = False
        self._close_waiters: WaitQueue | None = None
        self.access = access
        self.length = registration.length
        """The size in bytes."""
        self.references = fast_path.ReferenceCount(registration.pd, access)
        """The reference count: requests that use the region."""
        self.segment: Segment = (
            registration.address,
            registration.length,
            registration.lkey,
        )
        """The address, the length in bytes and the local key, as in ibv_sge."""

    @property
    def addr(self) -> int:
        """The address of the first byte."""
        return self._registration.address

    @property
    def lkey(self) -> int:
        """The local key, by which this side's requests name the region."""
        return self._registration.lkey

    @property
    def rkey(self) -> int:
        """The remote key, by which the peer's requests name the region."""
        return self._registration.rkey

    @property
    def registration(self) -> Registration:
        """The underlying memory registration, an object of `aiordma.verbs`."""
        return self._registration

    @property
    def closed(self) -> bool:
        """True if the region was closed."""
        return self.references.closed

    @property
    def has_views(self) -> bool:
        """True if a view of the memory exists: a memoryview, a slice of one, a numpy array."""
        return self._views > 0

    @property
    def remote(self) -> RemoteBuffer:
        """The address, key and length that the peer needs to access it, as `access` allows.

        Raises:
            ValueError: `access` allows the peer nothing.
        """
        self.check_remote_access()
        return RemoteBuffer(self.addr, self.rkey, len(self))

    def check_remote_access(self) -> None:
        """Make sure that the peer is allowed to access the region.

        Raises:
            ValueError: `access` allows the peer nothing.
        """
        if not self.access & REMOTE_ACCESS:
            raise ValueError(
                "peers have no access to this region: register it with AccessFlags.REMOTE_READ, "
                "REMOTE_WRITE or REMOTE_ATOMIC"
            )

    def __len__(self) -> int:
        """Return the size in bytes, whatever the items of the buffer are."""
        return self.length

    def __getitem__(self, part: slice) -> MemorySlice:
        """Return a part of the region. The bounds are in bytes: `region[16:32]`.

        Raises:
            ValueError: the slice has a step.
        """
        return MemorySlice(self, *bounds_of(part, self.length))

    # --- use by the device ---

    def acquire(self, pd: ProtectionDomain | None) -> None:
        """Count a request that uses the region, posted to a queue pair in `pd`.

        Raises:
            ValueError: the region is closed, or registered in another protection domain.
        """
        self.references.acquire(pd)

    def release(self) -> None:
        """Count a request that uses the region as completed."""
        self.references.release()

    def alias(self, on_release: Callable[[], None]) -> MemoryRegion:
        """Return an alias: another region of the same memory, with the same keys.

        Closing the alias does not unregister the memory. `on_release` is called instead, after the
        device has completed the last request that uses the alias.
        """
        exported = getattr(self, "_exported", None)

        def dispose(_: Registration, on_disposed: Callable[[], None]) -> None:
            on_release()
            on_disposed()

        return MemoryRegion(self._registration, exported, self.access, dispose)

    def close(self) -> None:
        """Close the region. Idempotent. Call it on the loop's thread.

        A worker thread calls ibv_dereg_mr(3), after the last request that uses the region.
        """
        if not self.references.closed:
            self.references.close(self._start_disposal)

    async def aclose(self) -> None:
        """Close the region, and wait until the buffer can be freed and resized again.

        Cancelling stops only the waiting.
        """
        refuse_forked_child()
        self.close()
        await checkpoint()
        if self._close_waiters is None:
            self._close_waiters = WaitQueue(running_loop())
        while not self._is_unregistered:
            await self._close_waiters.wait()

    def _on_unregistered(self) -> None:
        self._is_unregistered = True
        if self._close_waiters is not None:
            self._close_waiters.wake_all()

    def _start_disposal(self) -> None:
        if hasattr(self, "_exported"):
            del self._exported
        self._dispose(self._registration, self._on_unregistered)

    def __del__(self) -> None:
        if hasattr(self, "references"):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self)} bytes at {self.addr:#x}"
        return f"<MemoryRegion {state}>"


class MemorySlice:
    """A part of a MemoryRegion, to send from or to receive or read into without a copy."""

    __slots__ = ("length", "references", "region", "segment", "start")

    def __init__(self, region: MemoryRegion, start: int, length: int) -> None:
        """Called by MemoryRegion; users slice a region instead."""
        address, _, lkey = region.segment
        self.region = region
        self.start = start
        self.length = length
        self.references = region.references
        """The reference count: requests that use the region."""
        self.segment: Segment = (address + start, length, lkey)
        """The address, the length in bytes and the local key, as in ibv_sge."""

    @property
    def addr(self) -> int:
        """The address of the first byte."""
        return self.segment[0]

    @property
    def lkey(self) -> int:
        """The local key of the region."""
        return self.region.lkey

    @property
    def view(self) -> memoryview:
        """The memory of the slice, as bytes.

        Raises:
            BufferError: the region is closed, or is of a dma-buf.
        """
        return byte_view(self.region)[self.start : self.start + self.length]

    @property
    def remote(self) -> RemoteBuffer:
        """The address, key and length that the peer needs to access the slice.

        Raises:
            ValueError: the region's `access` allows the peer nothing.
        """
        self.region.check_remote_access()
        return RemoteBuffer(self.addr, self.region.rkey, self.length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> MemorySlice:
        """Return a part of the slice. The bounds are in bytes, from the start of the slice.

        Raises:
            ValueError: the slice has a step.
        """
        start, length = bounds_of(part, self.length)
        return MemorySlice(self.region, self.start + start, length)

    def __repr__(self) -> str:
        return f"<MemorySlice {self.start}:{self.start + self.length} of {self.region!r}>"
