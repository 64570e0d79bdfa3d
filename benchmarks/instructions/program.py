"""What is run under callgrind: `python -m benchmarks.instructions.program CASE COUNT`.

It does COUNT operations, COUNT again and twice as many, and has callgrind write down what each of
the three took. The first is for what is done when something happens for the first time.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading

import aiordma
from benchmarks.instructions.cases import CASES, Case, Setting
from benchmarks.instructions.device import CountedDevice

PEER = ("10.0.0.1", 7471)
SETTLING_SECONDS = 0.25
WARM_UP, ONCE, TWICE = "before", "once", "twice"
"""Under these names it is written down."""


async def measure(case: Case, count: int) -> None:
    """Do what is to be counted."""
    device = CountedDevice()
    async with aiordma.connect(*PEER, options=case.options(2 * count)) as connection:
        setting = Setting(connection, device)
        run = await case.make(setting)
        await _threads_sleep()
        gc.collect()
        gc.disable()  # it comes when it likes, and what it costs depends on all that is loaded
        for name, times in ((WARM_UP, count), (ONCE, count), (TWICE, 2 * count)):
            if case.prepare is not None:
                await case.prepare(setting, times)
            device.count()
            await run(times)
            device.stop(name)


async def _threads_sleep() -> None:
    """The library's threads have work once a connection stands, and one stays for a second.

    Whenever one wakes, this thread has to hand the interpreter over, and to get it back.
    """
    await asyncio.sleep(SETTLING_SECONDS)
    while any(thread.name == "aiordma-watcher" for thread in threading.enumerate()):
        await asyncio.sleep(SETTLING_SECONDS)


if __name__ == "__main__":
    asyncio.run(measure(CASES[sys.argv[1]], int(sys.argv[2])))
