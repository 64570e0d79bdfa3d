"""MemoryRegion: memory of the user's, registered; MemorySlice: a part of it."""

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


Dispose = Callable[[Registration, Callable[[], None]], None]
"""Unpins, without blocking; calls the second on the loop's thread when that is done."""


class MemoryRegion(BufferExporter, ContextManagerMixin, AsyncContextManagerMixin):
    """A buffer whose pages are pinned, so that the device can reach them. See ibv_reg_mr(3).

    From `Connection.register()` or `allocate()`; good for every connection of the same loop on
    the same device. `memoryview(region)` is the memory, `region[a:b]` a MemorySlice of it.

    close() gives it up, as does the end of a `with` block. What the device still works on is pinned
    until that has ended: the buffer can be neither freed nor resized before. aclose(), and the end
    of an `async with` block, wait for that.
    """

    __slots__ = (
        "_close_waiters",
        "_dispose",
        "_is_unregistered",
        "_registration",
        "access",
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
        """For Connection; not to be called by others."""
        if buffer is not None:  # a dma-buf is memory of no process
            self._exported = buffer
        self._registration = registration
        self._dispose = dispose
        self._is_unregistered = False
        self._close_waiters: WaitQueue | None = None
        self.access = access
        self.references = fast_path.ReferenceCount(registration.pd, access)
        """Counts the requests that use it."""
        self.segment: Segment = (
            registration.address,
            registration.length,
            registration.lkey,
        )
        """Address, length and local key, as a request names them."""

    @property
    def addr(self) -> int:
        """The address of the first byte."""
        return self._registration.address

    @property
    def lkey(self) -> int:
        """The key by which this side's requests name it."""
        return self._registration.lkey

    @property
    def rkey(self) -> int:
        """The key by which the peer's requests name it."""
        return self._registration.rkey

    @property
    def registration(self) -> Registration:
        """What it stands on, for `aiordma.verbs`."""
        return self._registration

    @property
    def closed(self) -> bool:
        """Whether it was given up."""
        return self.references.closed

    @property
    def remote(self) -> RemoteBuffer:
        """What the peer needs to reach it, as far as `access` allows."""
        return RemoteBuffer(self.addr, self.rkey, len(self))

    def __len__(self) -> int:
        """Its size in bytes, whatever the items of the buffer are."""
        return self._registration.length

    def __getitem__(self, part: slice) -> MemorySlice:
        """A part of it, in bytes: `region[16:32]`.

        Raises:
            ValueError: the slice has a step.
        """
        return MemorySlice(self, 0, len(self))[part]

    # --- use by the device ---

    def acquire(self, pd: ProtectionDomain | None) -> None:
        """The device begins to use it, in `pd`.

        Raises:
            ValueError: it is closed, or belongs elsewhere.
        """
        self.references.acquire(pd)

    def release(self) -> None:
        """The device has ended one use."""
        self.references.release()

    def alias(self, on_release: Callable[[], None]) -> MemoryRegion:
        """The same memory and keys as another region, which does not unpin them when it is closed.

        `on_end` is called instead, when the device has ended its last use through the lease.
        """
        exported = getattr(self, "_exported", None)

        def end(_: Registration, over: Callable[[], None]) -> None:
            on_release()
            over()

        return MemoryRegion(self._registration, exported, self.access, end)

    def close(self) -> None:
        """Give it up: ibv_dereg_mr(3), in a worker thread, after the device's last use. Idempotent.

        On the loop's thread.
        """
        if not self.references.closed:
            self.references.close(self._end)

    async def aclose(self) -> None:
        """close(), and wait until the buffer may be freed and resized again.

        Cancelling stops the waiting only.
        """
        refuse_forked_child()
        self.close()
        await checkpoint()
        if self._close_waiters is None:
            self._close_waiters = WaitQueue(running_loop())
        while not self._is_unregistered:
            await self._close_waiters.wait()

    def _unregistered(self) -> None:
        self._is_unregistered = True
        if self._close_waiters is not None:
            self._close_waiters.wake_all()

    def _end(self) -> None:
        if hasattr(self, "_exported"):
            del self._exported
        self._dispose(self._registration, self._unregistered)

    def __del__(self) -> None:
        if hasattr(self, "references"):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self)} bytes at {self.addr:#x}"
        return f"<MemoryRegion {state}>"


class MemorySlice:
    """A part of a MemoryRegion, to send from or to read into without a copy."""

    __slots__ = ("length", "references", "region", "segment", "start")

    def __init__(self, region: MemoryRegion, start: int, length: int) -> None:
        """For MemoryRegion; slice one instead."""
        address, _, lkey = region.segment
        self.region = region
        self.start = start
        self.length = length
        self.references = region.references
        """Counts the requests that use the region."""
        self.segment: Segment = (address + start, length, lkey)
        """Address, length and local key, as a request names them."""

    @property
    def addr(self) -> int:
        """The address of the first byte."""
        return self.segment[0]

    @property
    def lkey(self) -> int:
        """The key of its region."""
        return self.region.lkey

    @property
    def view(self) -> memoryview:
        """The bytes themselves.

        Raises:
            BufferError: the region is closed, or a dma-buf.
        """
        return byte_view(self.region)[self.start : self.start + self.length]

    @property
    def remote(self) -> RemoteBuffer:
        """What the peer needs to reach it."""
        return RemoteBuffer(self.addr, self.region.rkey, self.length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> MemorySlice:
        """A part of the part.

        Raises:
            ValueError: the slice has a step.
        """
        start, length = bounds_of(part, self.length)
        return MemorySlice(self.region, self.start + start, length)

    def __repr__(self) -> str:
        return f"<MemorySlice {self.start}:{self.start + self.length} of {self.region!r}>"
