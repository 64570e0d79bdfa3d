"""Registered memory that aiordma allocates, and a pool of buffers cut from it."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiordma._native import fast_path
from aiordma.enums import AccessFlags
from aiordma.errors import VerbsError
from aiordma.loop import Loop, WaitQueue
from aiordma.verbs import ProtectionDomain, Registration

SLAB_SIZE = 1 << 18
# The pool keeps regions of this number of bytes in all, for the next connections.
KEPT_BYTES = 1 << 21


class AllocatedRegion:
    """Newly allocated zeroed pages, registered with the device until close()."""

    __slots__ = ("_pages", "_registration", "address", "lkey", "rkey", "view")

    def __init__(self, pd: ProtectionDomain, nbytes: int, access: AccessFlags) -> None:
        """Allocate and register `nbytes` bytes (at least one). Blocks: call it in a worker thread.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        try:
            self._pages = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise VerbsError(error.errno or errno.ENOMEM, "mmap") from error
        self._registration = Registration(pd, self._pages, access)
        self.address = self._registration.address
        self.lkey = self._registration.lkey
        self.rkey = self._registration.rkey
        self.view = memoryview(self._pages)

    def close(self) -> None:
        """Unregister the memory. Idempotent. The pages are freed with their last memoryview."""
        self._registration.close()

    def free(self) -> None:
        """Unregister the memory, and free the pages at once. Views read zeros afterwards.

        Otherwise the pages of a connection that was closed would stay in memory until the garbage
        collector frees its objects. So do the pages of a process that has locked them (mlockall).
        """
        self.close()
        with suppress(OSError):  # EINVAL: the pages are locked
            self._pages.madvise(mmap.MADV_REMOVE)


PooledBuffer = fast_path.PooledBuffer
"""A part of a registered slab, acquired from a BufferPool."""


class BufferPool:
    """A pool of registered buffers for payloads that are copied. Their sizes are powers of four.

    Acquire and release buffers on the loop's thread; neither blocks it. Call grow(), which
    registers new pages, in a worker thread. Buffers belong to the pool until it is closed.

    Beside the buffers it keeps some small regions that it was given back: take_region() returns
    them again, because registering memory takes as long as making a queue pair.
    """

    def __init__(self, loop: Loop, pd: ProtectionDomain, slab_size: int = SLAB_SIZE) -> None:
        self._pd = pd
        self._slab_size = slab_size
        self._growing: set[int] = set()
        self._grown = WaitQueue(loop)
        self._slabs: list[AllocatedRegion] = []
        self.free = fast_path.FreeBuffers()
        """The free buffers. Send queues take some from here themselves."""
        self._kept: dict[int, list[AllocatedRegion]] = {}
        self._kept_bytes = 0
        self._kept_lock = threading.Lock()

    def try_acquire(self, nbytes: int) -> PooledBuffer | None:
        """Return a buffer of at least `nbytes` bytes, or None if the pool must grow first."""
        return self.free.take(nbytes)

    async def acquire(
        self, nbytes: int, call: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> PooledBuffer:
        """Return a buffer of at least `nbytes` bytes. Grow the pool if none is free.

        `call` runs a function in a worker thread and awaits it. Tasks that need the same size wait
        for the same call of grow(). If the task is cancelled, the pool keeps the new buffers.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        size = self.free.size_for(nbytes)
        while (buffer := self.try_acquire(nbytes)) is None:
            if size in self._growing:
                await self._grown.wait()
            else:
                await self._grow_once(size, call)
        return buffer

    async def _grow_once(
        self, size: int, call: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> None:
        self._growing.add(size)
        try:
            await call(lambda: self.grow(size))
        finally:
            self._growing.discard(size)
            self._grown.wake_all()

    def grow(self, nbytes: int) -> None:
        """Add buffers of at least `nbytes` bytes. Blocks. Callable from any thread.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        size = self.free.size_for(nbytes)
        slab = AllocatedRegion(self._pd, max(size, self._slab_size), AccessFlags.LOCAL_WRITE)
        self._slabs.append(slab)
        for start in range(0, len(slab.view), size):
            self.free.add(slab.address + start, slab.lkey, slab.view[start : start + size])

    def take_region(self, nbytes: int) -> AllocatedRegion:
        """Return a region of `nbytes` bytes that belongs to the caller. Its contents are undefined.

        Blocks: call it in a worker thread.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        region = self.try_take_region(nbytes)
        if region is not None:
            return region
        try:
            return AllocatedRegion(self._pd, nbytes, AccessFlags.LOCAL_WRITE)
        except VerbsError:
            if not self._free_kept():
                raise
        return AllocatedRegion(self._pd, nbytes, AccessFlags.LOCAL_WRITE)

    def try_take_region(self, nbytes: int) -> AllocatedRegion | None:
        """Return a region that was given back, or None if there is none. Does not block."""
        with self._kept_lock:
            kept = self._kept.get(nbytes)
            if not kept:
                return None
            self._kept_bytes -= nbytes
            return kept.pop()

    def keeps(self, region: AllocatedRegion) -> bool:
        """Return True if give_back() keeps the region, as long as no other is given back first."""
        return self._kept_bytes + len(region.view) <= KEPT_BYTES

    def give_back(self, region: AllocatedRegion) -> None:
        """Take back a region of take_region() that nothing uses any more.

        Blocks if the pool does not keep it. See keeps().
        """
        with self._kept_lock:
            if self.keeps(region):
                self._kept.setdefault(len(region.view), []).append(region)
                self._kept_bytes += len(region.view)
                return
        region.free()

    def _free_kept(self) -> bool:
        """Free the regions that were given back. Return True if there were any. Blocks."""
        with self._kept_lock:
            kept, self._kept, self._kept_bytes = self._kept, {}, 0
        regions = [region for same in kept.values() for region in same]
        for region in regions:
            region.free()
        return bool(regions)

    def close(self) -> None:
        """Unregister all buffers. The device must not use any of them any more."""
        self.free.close()
        self._free_kept()
        while self._slabs:
            self._slabs.pop().free()
