"""Turns: two clients time round trips alternately, so that both meet the same speed of the machine.

The process that started both writes a line to the standard input of the one whose turn it is, and
waits for its result. The other one waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

from aiordma.bench.sample import Sample, latency_sample
from aiordma.bench.workers.lines import print_line, read_line

READY = json.dumps({"ready": True})
TURN_LINE = "turn"
END_LINE = "end"


async def take_turns(turn: Callable[[], Awaitable[Sequence[int]]]) -> Sample:
    """Print READY, and await `turn()` for each TURN_LINE, until the END_LINE.

    `turn()` returns the times of round trips in nanoseconds. Their median, in microseconds, is
    printed as {"median": M}. Return the sample of all times. The event loop runs between the turns,
    too.
    """
    times: list[int] = []
    cpu = 0.0
    print_line(READY)
    while await read_line() == TURN_LINE:
        begin = time.process_time()
        found = await turn()
        cpu += time.process_time() - begin
        times.extend(found)
        print_line(json.dumps({"median": median(found) / 1e3}))
    return latency_sample(times, cpu)
