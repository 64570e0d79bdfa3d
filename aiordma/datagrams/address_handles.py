"""AddressBook: the address handles of one endpoint, made when first needed and kept for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from aiordma.cm.handle import IdHandle
from aiordma.datagrams.peer import AddressKey
from aiordma.loop import Interrupt, WaitQueue
from aiordma.verbs import AddressHandle

# A service with more peers than that makes handles again and again, but works.
MAX_HANDLES = 1024


class AddressHandleReference:
    """An address handle that the device may be using, or is about to use."""

    __slots__ = ("_cache", "evicted", "handle", "uses")

    def __init__(self, cache: AddressHandleCache, handle: AddressHandle) -> None:
        self._cache = cache
        self.handle = handle
        self.uses = 0
        self.evicted = False

    def release(self) -> None:
        """One use less."""
        self.uses -= 1
        if self.evicted and not self.uses:
            self._cache.discard(self.handle)


class AddressHandleCache:
    """Where each peer and group is, as address handles; the one not used for longest goes first.

    A handle outlives the sends that name it, and all are destroyed after the queue pair.
    """

    def __init__(self, handle: IdHandle, make: Callable[[AddressKey], AddressHandle]) -> None:
        """`make` is called in a worker thread."""
        self._owner = handle
        self._make = make
        self._cached: OrderedDict[AddressKey, AddressHandleReference] = OrderedDict()
        self._undestroyed: set[AddressHandle] = set()
        self._being_made: set[AddressKey] = set()
        self._made = WaitQueue(handle.loop)
        handle.add_destroyed_callback(self._close)

    def __len__(self) -> int:
        """Handles that are known."""
        return len(self._cached)

    async def acquire(self, key: AddressKey) -> AddressHandleReference:
        """The handle for `key`, to be released when the device is done with it.

        Made in a worker thread, which can take seconds, if it is not known yet. Cancelling borrows
        none.

        Raises:
            VerbsError: there is no such way, or nobody has the address (ENOENT, ETIMEDOUT, ...).
            LocalClosed: the endpoint is closed.
        """
        while (known := self._cached.get(key)) is None:
            if key in self._being_made:
                await self._made.wait()
            else:
                await self._add(key)
        self._cached.move_to_end(key)
        known.uses += 1
        return known

    async def _add(self, key: AddressKey) -> None:
        self._being_made.add(key)
        try:
            # Not in turn: one peer that is slow to be found must not hold up what the others need.
            handle = await self._owner.wait(lambda wait: self._create(key, wait), serialized=False)
        finally:
            self._being_made.discard(key)
            self._made.wake_all()
        self._cached[key] = AddressHandleReference(self, handle)
        if len(self._cached) > MAX_HANDLES:
            _, oldest = self._cached.popitem(last=False)
            oldest.evicted = True
            if not oldest.uses:
                self.discard(oldest.handle)

    def _create(self, key: AddressKey, interrupt: Interrupt) -> AddressHandle:
        """In a thread. Nobody takes the handle if the interrupt is set by then."""
        handle = self._make(key)
        self._undestroyed.add(handle)
        if interrupt.is_set:
            self._destroy(handle)
        return handle

    def discard(self, handle: AddressHandle) -> None:
        """Destroy a handle that nobody uses any more, in a worker thread."""
        self._owner.submit(lambda: self._destroy(handle))

    def _destroy(self, handle: AddressHandle) -> None:
        self._undestroyed.discard(handle)
        handle.close()

    def _close(self) -> None:
        """In a thread, when the queue pair is destroyed."""
        while self._undestroyed:
            self._undestroyed.pop().close()
