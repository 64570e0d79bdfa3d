"""Which loop this task runs on."""

from __future__ import annotations

import asyncio

from aiordma.loop.protocol import Loop


def running_loop() -> Loop:
    """The loop of the running task.

    Raises:
        RuntimeError: called from outside an event loop.
    """
    return asyncio.get_running_loop()
