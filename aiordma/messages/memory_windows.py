"""MemoryWindow: a part of a region that one peer can use until either side revokes it."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.cm import AsyncCmId
from aiordma.enums import AccessFlags, WcOpcode
from aiordma.loop import ensure_called
from aiordma.loop.context_managers import ContextManagerMixin
from aiordma.memory import MemorySlice, RemoteBuffer
from aiordma.qp.operation import Operations
from aiordma.verbs import MemoryWindow as RawWindow
from aiordma.verbs import ProtectionDomain, QueuePair


class MemoryWindow(ContextManagerMixin):
    """A key for a part of a region, valid on one connection and revocable. See ibv_alloc_mw(3).

    `Connection.bind()` returns one. This side revokes the key with close(), or at the end of a
    `with` block. The peer revokes it with a message that invalidates it
    (`send(..., invalidate=...)` with this window's `remote`). The end of the connection revokes it
    in any case. The memory stays pinned until the window is closed or the connection has ended,
    even if the region is closed before.
    """

    def __init__(self, part: MemorySlice, rkey: int, close: Callable[[], None]) -> None:
        """Called by Connection.bind(); not for users."""
        self.remote = RemoteBuffer(part.addr, rkey, len(part))
        """The address, key and length that the peer needs to access the memory."""
        self._close = close

    def close(self) -> None:
        """Revoke the key in a worker thread: ibv_dealloc_mw(3). Idempotent.

        Call it on the loop's thread. If the peer uses the key afterwards, the connection ends.
        """
        self._close()


class MemoryWindows:
    """Binds windows by work requests, and closes them before the queue pair is destroyed."""

    def __init__(self, cm: AsyncCmId, operations: Operations, pd: ProtectionDomain) -> None:
        """`pd`: the protection domain of the queue pair."""
        self._pd = pd
        self._cm = cm
        self._operations = operations

    async def bind(self, part: MemorySlice, access: AccessFlags) -> MemoryWindow:
        """Bind a window: see Connection.bind()."""
        self._check(part)
        part.region.acquire(self._pd)
        raw, close = await self._cm.handle.make(
            lambda: self._allocate(part), lambda made: made[1](), part.region.release
        )
        bounds, registration = (part.addr, len(part)), part.region.registration
        is_completed = is_abandoned = False

        def post(qp: QueuePair, wr_id: int, flags: int) -> None:
            qp.post_bind_mw(wr_id, raw, registration, bounds, access, flags)

        def on_completed() -> None:
            nonlocal is_completed
            is_completed = True
            if is_abandoned:
                close()

        try:
            await self._operations.perform(WcOpcode.BIND_MW, post, on_completed)
        except BaseException:
            # The window must live until the request that names it has completed.
            is_abandoned = True
            if is_completed:
                close()
            raise
        return MemoryWindow(part, raw.rkey, close)

    def _check(self, part: MemorySlice) -> None:
        device = self._cm.device()
        if not device.attributes.has_memory_windows:
            raise ValueError(f"{device.name} has no memory windows that a connection can bind")
        if not part.region.access & AccessFlags.MW_BIND:
            raise ValueError("the region must be registered with AccessFlags.MW_BIND")
        if not len(part):
            raise ValueError("an empty slice cannot be bound")

    def _allocate(self, part: MemorySlice) -> tuple[RawWindow, Callable[[], None]]:
        """Allocate a window, in a worker thread. Return it, and a function that closes it.

        The function does nothing if a pre-destroy hook has closed the window.
        """
        handle, raw = self._cm.handle, RawWindow(self._pd)

        def dispose() -> None:
            try:
                raw.close()
            finally:
                ensure_called(handle.loop, part.region.release)

        def close_now() -> None:
            pending = handle.remove_pre_destroy_hook(raw)
            if pending is not None:
                pending()

        # While a window is bound, neither can the queue pair be destroyed nor the region unpinned.
        handle.add_pre_destroy_hook(raw, dispose)
        return raw, lambda: handle.submit(close_now)
