"""MemoryWindow: a part of a region that one peer may use, until either side puts an end to it."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.cm import AsyncCmId
from aiordma.enums import AccessFlags, WcOpcode
from aiordma.loop import ensure_called, make_in_worker
from aiordma.loop.context_managers import ContextManagerMixin
from aiordma.memory import MemorySlice, RemoteBuffer
from aiordma.qp.operation import Operations
from aiordma.verbs import MemoryWindow as RawWindow
from aiordma.verbs import ProtectionDomain, QueuePair


class MemoryWindow(ContextManagerMixin):
    """A key of its own for a part of a region, good on one connection. See ibv_alloc_mw(3).

    From `Connection.bind()`. The peer puts an end to it by a message that invalidates it
    (`send(..., invalidate=window.remote)`), this side by close(), or the end of a `with` block;
    it ends with the connection in any case. The region stays pinned until then, closed or not.
    """

    def __init__(self, part: MemorySlice, rkey: int, end: Callable[[], None]) -> None:
        """For Connection; not to be called by others."""
        self.remote = RemoteBuffer(part.addr, rkey, len(part))
        """What the peer needs to use it."""
        self._end = end

    def close(self) -> None:
        """End the peer's access, in a worker thread: ibv_dealloc_mw(3). Idempotent.

        On the loop's thread. A peer that uses it afterwards loses the connection.
        """
        self._end()


class MemoryWindows:
    """Binds windows by requests on the queue pair, and ends them before it does."""

    def __init__(self, cm: AsyncCmId, operations: Operations) -> None:
        self.pd: ProtectionDomain
        """Where the queue pair was made; set once it is."""
        self._cm = cm
        self._operations = operations

    async def bind(self, part: MemorySlice, access: AccessFlags) -> MemoryWindow:
        """See Connection.bind."""
        self._check(part)
        part.region.acquire(self.pd)
        try:
            raw = await make_in_worker(self._cm.loop, lambda: RawWindow(self.pd), RawWindow.close)
        except BaseException:
            part.region.release()
            raise
        end = self._ending(raw, part)
        bounds, registration = (part.addr, len(part)), part.region.registration
        is_over = is_unwanted = False

        def post(qp: QueuePair, wr_id: int, flags: int) -> None:
            qp.post_bind_mw(wr_id, raw, registration, bounds, access, flags)

        def over() -> None:
            nonlocal is_over
            is_over = True
            if is_unwanted:
                end()

        try:
            await self._operations.perform(WcOpcode.BIND_MW, post, over)
        except BaseException:
            is_unwanted = True  # but not to be freed under a request that names it
            if is_over:
                end()
            raise
        return MemoryWindow(part, raw.rkey, end)

    def _check(self, part: MemorySlice) -> None:
        device = self._cm.device()
        if not device.attributes.has_memory_windows:
            raise ValueError(f"{device.name} has no memory windows that a connection can bind")
        if not part.region.access & AccessFlags.MW_BIND:
            raise ValueError("the region must be registered with AccessFlags.MW_BIND")
        if not len(part):
            raise ValueError("an empty slice cannot be bound")

    def _ending(self, raw: RawWindow, part: MemorySlice) -> Callable[[], None]:
        """What ends the window: now, or before the queue pair is destroyed, if that is earlier."""
        handle = self._cm.handle

        def dispose() -> None:
            try:
                raw.close()
            finally:
                ensure_called(handle.loop, part.region.release)

        def end_now() -> None:
            pending = handle.remove_pre_destroy_hook(raw)
            if pending is not None:
                pending()

        # A queue pair cannot be destroyed under a bound window, nor a region unpinned.
        handle.add_pre_destroy_hook(raw, dispose)
        return lambda: handle.submit(end_now)
