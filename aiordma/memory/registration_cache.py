"""RegistrationCache: the same buffer registered again and again, at the price of once."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from aiordma.enums import AccessFlags
from aiordma.errors import LocalClosed
from aiordma.loop import checkpoint
from aiordma.loop.context_managers import ContextManagerMixin
from aiordma.memory import MemoryRegion, address_and_length, as_exporter
from aiordma.memory.registrar import DEFAULT_ACCESS, Registrar

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The buffer's address and length in bytes, and what was allowed.
_Key = tuple[int, int, AccessFlags]


class _Entry:
    """A registered buffer, and how many regions of it are in use."""

    __slots__ = ("is_cached", "region", "users")

    def __init__(self, region: MemoryRegion) -> None:
        self.region = region
        self.users = 0
        self.is_cached = True


class RegistrationCache(ContextManagerMixin):
    """Registers buffers for the connections of one loop and device, and keeps them registered.

    Closing a region from here leaves its buffer pinned, and exported: it can be neither freed nor
    resized (BufferError), so that no entry ever speaks of memory that is not there any more. It
    goes when it was not used for longest and there are more than `max_bytes`, with discard(), or
    with the cache. Until then peers that were given its key can reach it.

        async with aiordma.connect(host, port) as connection:
            with aiordma.RegistrationCache(connection) as cache:
                for array in work:
                    with await cache.register(array) as region:
                        await connection.write(region, remote)

    For the loop's thread only.
    """

    def __init__(self, connection: Registrar, *, max_bytes: int = 1 << 30) -> None:
        """For `connection`, and every other on the same device, as long as `connection` is open.

        Raises:
            ValueError: `max_bytes` is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}, less than nothing")
        self._connection = connection
        self._max_bytes = max_bytes
        # The one that was used last stands last.
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._closed = False
        self.nbytes = 0
        """Bytes that are registered."""

    def __len__(self) -> int:
        """Buffers that are registered."""
        return len(self._entries)

    async def register(self, buffer: Buffer, access: AccessFlags = DEFAULT_ACCESS) -> MemoryRegion:
        """A region of `buffer`, to be closed as any other. At once if it is registered already.

        Only the same memory with the same access is the same buffer. Cancelling leaves nothing but
        what the cache keeps.

        Raises:
            LocalClosed: the cache is closed.
            Others: as Connection.register().
        """
        if self._closed:
            raise LocalClosed("the registration cache is closed")
        await checkpoint()
        buffer = as_exporter(buffer)
        key = _key(buffer, access)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._added(key, await self._connection.register(buffer, access))
        self._entries.move_to_end(key)
        entry.users += 1
        self._evict()
        return entry.region.alias(lambda: self._ended(entry))

    def _added(self, key: _Key, region: MemoryRegion) -> _Entry:
        if self._closed:
            region.close()
            raise LocalClosed("the registration cache was closed meanwhile")
        entry = self._entries.get(key)
        if entry is not None:  # another task was faster
            region.close()
            return entry
        entry = self._entries[key] = _Entry(region)
        self.nbytes += len(region)
        return entry

    def _ended(self, entry: _Entry) -> None:
        entry.users -= 1
        if not entry.is_cached and not entry.users:
            entry.region.close()
        self._evict()

    def _evict(self) -> None:
        """While there is too much, drop what is not in use, the oldest first."""
        for key in [key for key, entry in self._entries.items() if not entry.users]:
            if self.nbytes <= self._max_bytes:
                break
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key)
        self.nbytes -= len(entry.region)
        entry.is_cached = False
        if not entry.users:
            entry.region.close()

    def discard(self, buffer: Buffer) -> None:
        """Let go of a buffer: it may be resized or freed soon after its last region is closed.

        Not at once, as a worker thread unpins it. One that is not here is no error.
        """
        address, length, _ = _key(as_exporter(buffer), AccessFlags(0))
        for key in [key for key in self._entries if key[:2] == (address, length)]:
            self._drop(key)

    def close(self) -> None:
        """Let go of all buffers, of those in use when their regions are closed. Idempotent."""
        self._closed = True
        for key in [*self._entries]:
            self._drop(key)


def _key(buffer: Buffer, access: AccessFlags) -> _Key:
    return *address_and_length(buffer), access
