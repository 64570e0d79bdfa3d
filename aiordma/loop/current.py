"""The event loop that the current task runs on."""

from __future__ import annotations

import asyncio
import sys

from aiordma.loop.protocol import Loop


def running_loop() -> Loop:
    """Return the loop of the running task: the asyncio loop itself, or the TrioLoop of a trio run.

    Raises:
        RuntimeError: no event loop is running in this thread.
    """
    # trio first: it can run as a guest, in the callbacks of an asyncio loop.
    if "trio" in sys.modules:
        from aiordma.loop.trio_loop import running_trio_loop

        loop = running_trio_loop()
        if loop is not None:
            return loop
    return asyncio.get_running_loop()
