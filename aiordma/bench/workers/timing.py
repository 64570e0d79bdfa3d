"""How the sides time what they do, whatever they do it with."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable

from aiordma.bench.sample import Sample, latency_sample


async def time_round_trips(
    exchange: Callable[[], Awaitable[None]], count: int, warmup: int
) -> Sample:
    """Time so many round trips, one by one, after others that are not timed."""
    for _ in range(warmup):
        await exchange()
    times = array("q", bytes(8 * count))
    cpu = time.process_time()
    for number in range(count):
        begin = time.perf_counter_ns()
        await exchange()
        times[number] = time.perf_counter_ns() - begin
    return latency_sample(times, time.process_time() - cpu)


async def time_all(everything: Callable[[], Awaitable[None]], count: int, unit: float) -> Sample:
    """Time `count` operations as a whole; the value is `unit` for each, per second."""
    cpu, begin = time.process_time(), time.perf_counter()
    await everything()
    seconds = time.perf_counter() - begin
    each = (time.process_time() - cpu) / count * 1e6
    return Sample(count * unit / seconds, client_cpu=each, details={"seconds": seconds})
