"""AddressHandleCache: the address handles of one endpoint, created when they are first needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from aiordma.cm.handle import IdHandle
from aiordma.datagrams.peer import AddressKey
from aiordma.loop import Interrupt, WaitQueue
from aiordma.verbs import AddressHandle

# An endpoint with more peers works too, but creates handles again and again.
MAX_HANDLES = 1024


class AddressHandleReference:
    """A cached address handle, and the number of sends that use it or are about to use it."""

    __slots__ = ("_cache", "count", "evicted", "handle")

    def __init__(self, cache: AddressHandleCache, handle: AddressHandle) -> None:
        self._cache = cache
        self.handle = handle
        self.count = 0
        self.evicted = False

    def release(self) -> None:
        """Drop one reference. The last one destroys a handle that is no longer in the cache."""
        self.count -= 1
        if self.evicted and not self.count:
            self._cache.discard(self.handle)


class AddressHandleCache:
    """The address handles of peers and groups, by key. The least recently used one is evicted.

    A handle is destroyed after the sends that use it. All are destroyed after the queue pair.
    """

    def __init__(
        self, id_handle: IdHandle, create_handle: Callable[[AddressKey], AddressHandle]
    ) -> None:
        """Create an empty cache. `create_handle` is called in a worker thread."""
        self._id_handle = id_handle
        self._create_handle = create_handle
        self._cached: OrderedDict[AddressKey, AddressHandleReference] = OrderedDict()
        self._undestroyed: set[AddressHandle] = set()
        self._being_created: set[AddressKey] = set()
        self._created = WaitQueue(id_handle.loop)
        id_handle.add_destroyed_callback(self._close)

    def __len__(self) -> int:
        """Return the number of handles in the cache."""
        return len(self._cached)

    async def acquire(self, key: AddressKey) -> AddressHandleReference:
        """Return a reference to the handle for `key`. The caller releases it after the send.

        A handle that is not in the cache is created in a worker thread. This can take seconds.
        Cancelling acquires no reference.

        Raises:
            VerbsError: no route leads there, or no machine has the address (ENOENT, ETIMEDOUT,
                ...).
            LocalClosed: the endpoint is closed.
        """
        while (reference := self._cached.get(key)) is None:
            if key in self._being_created:
                await self._created.wait()
            else:
                await self._add(key)
        self._cached.move_to_end(key)
        reference.count += 1
        return reference

    async def _add(self, key: AddressKey) -> None:
        """Create the handle for `key` and put it into the cache."""
        self._being_created.add(key)
        made: list[AddressHandle] = []
        try:
            # Not serialized: a peer that is slow to resolve must not delay the other jobs.
            await self._id_handle.wait(
                lambda interrupt: self._create(key, made, interrupt), serialized=False
            )
        finally:
            self._being_created.discard(key)
            self._created.wake_all()
            while made:  # also if this task was cancelled just when it was made
                self._put(key, made.pop())

    def _put(self, key: AddressKey, handle: AddressHandle) -> None:
        """Put a handle into the cache."""
        self._cached[key] = AddressHandleReference(self, handle)
        if len(self._cached) > MAX_HANDLES:
            _, oldest = self._cached.popitem(last=False)
            oldest.evicted = True
            if not oldest.count:
                self.discard(oldest.handle)

    def _create(self, key: AddressKey, made: list[AddressHandle], interrupt: Interrupt) -> None:
        """Add a new handle to `made`, in a worker thread. The loop takes it from there.

        A set interrupt means that no task waits for it any more. Then this thread destroys it,
        unless the loop has taken it.
        """
        handle = self._create_handle(key)
        self._undestroyed.add(handle)
        made.append(handle)
        if interrupt.is_set:
            with suppress(IndexError):
                self._destroy(made.pop())

    def discard(self, handle: AddressHandle) -> None:
        """Destroy a handle that no send uses any more, in a worker thread."""
        self._id_handle.submit(lambda: self._destroy(handle))

    def _destroy(self, handle: AddressHandle) -> None:
        self._undestroyed.discard(handle)
        handle.close()

    def _close(self) -> None:
        """Destroy all handles, in a worker thread, after the queue pair was destroyed."""
        while self._undestroyed:
            self._undestroyed.pop().close()
