"""Timing: round trips one by one, or many operations together."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable, Sequence

from aiordma.bench.sample import Sample, latency_sample


async def time_round_trips(
    exchange: Callable[[], Awaitable[object]], count: int, warmup: int
) -> Sample:
    """Await `exchange()` `warmup` times without timing, then time each of `count` times."""
    for _ in range(warmup):
        await exchange()
    times = array("q", bytes(8 * count))
    cpu = time.process_time()
    for number in range(count):
        begin = time.perf_counter_ns()
        await exchange()
        times[number] = time.perf_counter_ns() - begin
    return latency_sample(times, time.process_time() - cpu)


async def time_round_trips_for(
    exchange: Callable[[], Awaitable[object]], seconds: float
) -> Sequence[int]:
    """Await `exchange()` again and again for `seconds`; return the nanoseconds of each time."""
    times = array("q")
    begin = time.perf_counter_ns()
    end = begin + round(seconds * 1e9)
    while begin < end:
        await exchange()
        now = time.perf_counter_ns()
        times.append(now - begin)
        begin = now
    return times


async def time_all(everything: Callable[[], Awaitable[None]], count: int, unit: float) -> Sample:
    """Time `everything()`, which does `count` operations.

    The sample's value is the number of operations per second multiplied by `unit`.
    """
    cpu, begin = time.process_time(), time.perf_counter()
    await everything()
    seconds = time.perf_counter() - begin
    each = (time.process_time() - cpu) / count * 1e6
    return Sample(count * unit / seconds, client_cpu=each, details={"seconds": seconds})
