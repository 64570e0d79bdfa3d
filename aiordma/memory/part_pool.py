"""PartPool: small pieces of registered memory, many in one region."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from aiordma.enums import AccessFlags
from aiordma.memory.buffer_pool import AllocatedRegion
from aiordma.verbs import ProtectionDomain

LARGEST_SLAB = 1 << 18
LARGEST_PART = LARGEST_SLAB // 4
ALIGNMENT = 64


@dataclass(eq=False, slots=True)
class MemoryPart:
    """A part of a region, which its owner alone uses until it gives it back to the pool.

    No peer can access it. A large part is the whole region.
    """

    view: memoryview
    address: int
    lkey: int
    slab: Slab
    """The region with its parts."""


@dataclass(eq=False, slots=True)
class Slab:
    """A region, and those of its parts that are free. All are of one size."""

    region: AllocatedRegion
    size: int
    count: int
    free: list[MemoryPart] = field(default_factory=list)


class PartPool:
    """Cuts regions into parts, and frees a region when all of its parts are free.

    Registering memory takes as long as making a queue pair, and each region costs the kernel a
    page. The first region of a size has one part, and each further one twice as many, as far as
    LARGEST_SLAB allows. All methods can block, and can be called from any thread.
    """

    def __init__(self, pd: ProtectionDomain) -> None:
        self._pd = pd
        self._lock = threading.Lock()
        self._slabs: dict[int, list[Slab]] = {}
        """All slabs by the size of their parts."""
        self._with_free: dict[int, list[Slab]] = {}
        """The slabs with free parts, by their size. At most one of a size has only free parts."""

    def take(self, nbytes: int) -> MemoryPart:
        """Return memory of `nbytes` bytes. Its contents are undefined.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            with_free = self._with_free.setdefault(size, [])
            if not with_free:
                with_free.append(self._add_slab(size))
            slab = with_free[-1]
            part = slab.free.pop()
            if not slab.free:
                with_free.pop()
        start = part.address - slab.region.address
        part.view = slab.region.view[start : start + nbytes]
        return part

    def _add_slab(self, size: int) -> Slab:
        slabs = self._slabs.setdefault(size, [])
        limit = LARGEST_SLAB // size if size <= LARGEST_PART else 1
        count = min(2 * slabs[-1].count, limit) if slabs else 1
        region = AllocatedRegion(self._pd, count * size, AccessFlags.LOCAL_WRITE)
        slab = Slab(region, size, count)
        for start in range(0, count * size, size):
            part = MemoryPart(region.view[:0], region.address + start, region.lkey, slab)
            slab.free.append(part)
        slabs.append(slab)
        return slab

    def give_back(self, part: MemoryPart) -> None:
        """Take back a part. The device must not use it any more."""
        slab = part.slab
        part.view = part.view[:0]
        with self._lock:
            with_free = self._with_free[slab.size]
            slab.free.append(part)
            if len(slab.free) == 1:
                with_free.append(slab)
            is_unused = len(slab.free) == slab.count
            if is_unused and (len(with_free) > 1 or slab.size > LARGEST_PART):
                with_free.remove(slab)
                self._slabs[slab.size].remove(slab)
                slab.region.free()

    def close(self) -> None:
        """Free all memory. The device must not use any of it any more."""
        with self._lock:
            slabs = [slab for found in self._slabs.values() for slab in found]
            self._slabs.clear()
            self._with_free.clear()
        for slab in slabs:
            slab.region.free()
