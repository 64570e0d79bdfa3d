"""The awaitables of the fast path, taken by hand: their first step, without a loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiordma._native import fast_path
from aiordma.enums import WrOpcode
from aiordma.verbs.queue_pair import NO_IMMEDIATE


async def refuse(data: object, error: int = -1) -> Any:
    """Return the errno of the fast path, or -1: the slow path begins here."""
    return error


def send_now(core: fast_path.SendQueueCore, data: object) -> int:
    """Have the fast path post a message. Return 0, an errno, or -1: it leaves it to Python."""
    core.set_slow(refuse)
    try:
        core.send(None, data).send(None)
    except StopIteration as stop:
        return stop.value or 0
    raise AssertionError("it waits")


def reasons_to_wait(core: fast_path.SendQueueCore) -> Iterator[None]:
    """Bring about each reason why the fast path posts nothing, one after the other."""

    def batch() -> None:
        core.start_batching()
        core.batch(None, WrOpcode.RDMA_WRITE, (1, 1, 1), (1, 1), NO_IMMEDIATE)
        core.stop_batching()

    for begin, end in (
        (core.add_waiter, core.remove_waiter),
        (core.start_batching, core.stop_batching),
        (batch, core.flush),
        (core.pause, core.resume),
    ):
        begin()
        yield
        end()
