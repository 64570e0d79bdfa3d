"""RegistrationCache: keeps buffers registered, so that registering them again is cheap."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from aiordma.enums import AccessFlags
from aiordma.errors import LocalClosed
from aiordma.loop import checkpoint
from aiordma.loop.context_managers import ContextManagerMixin
from aiordma.memory import MemoryRegion, address_and_length, as_exporter
from aiordma.memory.registrar import LOCAL_WRITE, Registrar

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The buffer's address, its length in bytes, and its access flags.
_Key = tuple[int, int, AccessFlags]


class _Entry:
    """A registered buffer, and the number of its regions in use."""

    __slots__ = ("is_cached", "region", "users")

    def __init__(self, region: MemoryRegion) -> None:
        self.region = region
        self.users = 0
        self.is_cached = True


class RegistrationCache(ContextManagerMixin):
    """A cache of registered buffers, for the connections of one loop and device.

    Closing a region of the cache leaves its buffer registered and exported: the buffer can be
    neither freed nor resized (BufferError). So an entry of the cache never names memory that does
    not exist any more. While the cache has more than `max_bytes` bytes, it unregisters the least
    recently used buffers that are not in use. It also unregisters a buffer on discard(), and all
    buffers on close(). Until then, a peer that has the key of a buffer can access it.

        async with aiordma.connect(host, port) as connection:
            with aiordma.RegistrationCache(connection) as cache:
                for array in work:
                    with await cache.register(array) as region:
                        await connection.write(region, remote)

    Use the cache on the loop's thread only.
    """

    def __init__(self, connection: Registrar, *, max_bytes: int = 1 << 30) -> None:
        """Make a cache that registers through `connection`, while `connection` is open.

        Every connection of the same loop on the same device can use its regions.

        Raises:
            ValueError: `max_bytes` is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}, but must not be negative")
        self._connection = connection
        self._max_bytes = max_bytes
        # The most recently used entry is the last.
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._closed = False
        self.nbytes = 0
        """The number of bytes that the cache keeps registered."""

    def __len__(self) -> int:
        """Return the number of buffers that the cache keeps registered."""
        return len(self._entries)

    async def register(self, buffer: Buffer, access: AccessFlags = LOCAL_WRITE) -> MemoryRegion:
        """Return a region of `buffer`, which the caller closes. Register the buffer if needed.

        A registration is used again only for the same memory with the same access. Cancelling
        leaves the buffer in the cache, or not registered.

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
            entry = self._add(key, await self._connection.register(buffer, access))
        self._entries.move_to_end(key)
        entry.users += 1
        self._evict()
        return entry.region.alias(lambda: self._release(entry))

    def _add(self, key: _Key, region: MemoryRegion) -> _Entry:
        if self._closed:
            region.close()
            raise LocalClosed("the registration cache was closed meanwhile")
        entry = self._entries.get(key)
        if entry is not None:  # another task has registered the same buffer first
            region.close()
            return entry
        entry = self._entries[key] = _Entry(region)
        self.nbytes += len(region)
        return entry

    def _release(self, entry: _Entry) -> None:
        entry.users -= 1
        if not entry.is_cached and not entry.users:
            entry.region.close()
        self._evict()

    def _evict(self) -> None:
        """Drop entries not in use, least recently used first, while there are too many bytes."""
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
        """Remove `buffer` from the cache, and unregister it after its last region is closed.

        A worker thread unregisters it, so the buffer can be resized or freed soon, but not at once.
        It is no error if the cache does not have the buffer.
        """
        address, length, _ = _key(as_exporter(buffer), AccessFlags(0))
        for key in [key for key in self._entries if key[:2] == (address, length)]:
            self._drop(key)

    def close(self) -> None:
        """Remove all buffers from the cache. Idempotent.

        Buffers in use are unregistered after their last region is closed, the others at once.
        """
        self._closed = True
        for key in [*self._entries]:
            self._drop(key)


def _key(buffer: Buffer, access: AccessFlags) -> _Key:
    return *address_and_length(buffer), access
