"""The program under callgrind: `python -m benchmarks.instructions.program CASE COUNT`.

It does COUNT operations, COUNT again, and twice COUNT. callgrind writes a dump for each of the
three. The first contains what happens only once, and is not used.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading

import aiordma
from benchmarks.instructions.cases import CASES, Case, Setup
from benchmarks.instructions.device import CountedDevice

PEER = ("10.0.0.1", 7471)
THREAD_POLL_SECONDS = 0.25
WARM_UP, ONCE, TWICE = "before", "once", "twice"
"""The names of the three dumps."""


async def measure(case: Case, count: int) -> None:
    """Connect, and run the case three times with callgrind counting."""
    device = CountedDevice()
    async with aiordma.connect(*PEER, options=case.options(2 * count)) as connection:
        setup = Setup(connection, device, PEER, os.eventfd(0, os.EFD_NONBLOCK))
        run = await case.make_run(setup)
        await _wait_for_idle_threads()
        gc.collect()
        gc.disable()  # the time of a collection, and its cost, depend on all objects of the process
        for name, operations in ((WARM_UP, count), (ONCE, count), (TWICE, 2 * count)):
            if case.prepare is not None:
                await case.prepare(setup, operations)
            device.start_counting()
            await run(operations)
            device.stop_counting(name)


async def _wait_for_idle_threads() -> None:
    """Wait until no thread of the library has work.

    They have some when a connection is established, and one thread runs for a second. A thread
    that wakes takes the interpreter's lock from this one, and that would be counted.
    """
    await asyncio.sleep(THREAD_POLL_SECONDS)
    while any(thread.name == "aiordma-watcher" for thread in threading.enumerate()):
        await asyncio.sleep(THREAD_POLL_SECONDS)


if __name__ == "__main__":
    asyncio.run(measure(CASES[sys.argv[1]], int(sys.argv[2])))
