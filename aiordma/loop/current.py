"""Which loop this task runs on."""

from __future__ import annotations

import asyncio
import sys

from aiordma.loop.protocol import Loop


def running_loop() -> Loop:
    """The loop of the running task: asyncio's own, or one that stands for the run of trio.

    Raises:
        RuntimeError: called from outside an event loop.
    """
    # trio first: it may run as a guest, in the callbacks of an asyncio loop.
    if "trio" in sys.modules:
        from aiordma.loop.trio_loop import running_trio_loop

        loop = running_trio_loop()
        if loop is not None:
            return loop
    return asyncio.get_running_loop()
