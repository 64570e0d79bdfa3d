"""MemoryDomain, a protection domain for connections; OwnDomain, that of one connection."""

from __future__ import annotations

import logging
from typing import Protocol

from aiordma.dispatch.loop_device import LoopDevice
from aiordma.loop import Loop, ensure_called, worker_pool
from aiordma.memory import BufferPool, PartPool
from aiordma.verbs import Device, ProtectionDomain

logger = logging.getLogger(__name__)

SLAB_SIZE = 1 << 16
"""The pool serves one connection only, so that it needs fewer buffers than that of a loop."""


class MemoryDomain(Protocol):
    """A protection domain with a buffer pool: that of a LoopDevice, or a connection's own."""

    pd: ProtectionDomain
    pool: BufferPool
    parts: PartPool
    """Memory for connections, cut from larger regions."""
    largest_region: int
    """The length in bytes of the largest region that was ever registered in it."""

    @property
    def is_open(self) -> bool:
        """True if the C objects are made."""

    def open(self) -> None:
        """Make the C objects, if they are not made yet. Called in a worker thread."""

    def acquire(self) -> MemoryDomain:
        """Add a user, and return self."""

    def release(self) -> None:
        """Remove a user. After the last one, everything is destroyed."""


class OwnDomain:
    """A protection domain that no other connection uses, and its buffer pool.

    The peers of other connections cannot access its memory, even if they know the address and the
    key. It exists as long as it has users: the connection, and the regions registered with it.
    """

    def __init__(self, loop: Loop, device: Device) -> None:
        """Create it without C objects: open() makes them."""
        self.pd: ProtectionDomain
        self.pool: BufferPool
        self.parts: PartPool
        self.largest_region = 0
        self._loop = loop
        self._loop_device = LoopDevice.of(loop, device)
        self._users = 1

    @property
    def is_open(self) -> bool:
        """True if the protection domain is allocated."""
        return hasattr(self, "parts")

    def open(self) -> None:
        """Allocate the protection domain. Idempotent. Call it in a worker thread.

        The context of the device must be open: see LoopDevice.reserve().

        Raises:
            VerbsError: ENOMEM, the device has no more protection domains.
        """
        if not hasattr(self, "pd"):
            self.pd = ProtectionDomain(self._loop_device.device)
            self.pool = BufferPool(self._loop, self.pd, SLAB_SIZE)
            self.parts = PartPool(self.pd)

    def acquire(self) -> MemoryDomain:
        """Add a user, and return self."""
        self._users += 1
        return self

    def release(self) -> None:
        """Remove a user. After the last one, everything is destroyed in a worker thread."""
        self._users -= 1
        if not self._users:
            worker_pool.submit(self._close)

    def _close(self) -> None:
        if hasattr(self, "pd"):
            for close in (self.parts.close, self.pool.close, self.pd.close):
                try:
                    close()
                except Exception:  # the other steps must be done, too
                    logger.exception("a protection domain could not be destroyed")
        ensure_called(self._loop, self._loop_device.release)
