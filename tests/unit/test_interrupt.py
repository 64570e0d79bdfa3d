"""Interrupt: ending a thread's wait for a file descriptor."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest

from aiordma.loop import Interrupt

TIME_LIMIT = 10.0


@pytest.fixture
def readable() -> Iterator[int]:
    """A file descriptor that becomes readable when it is written to."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


class WaitingThread:
    """A thread that waits for a file descriptor."""

    def __init__(self, interrupt: Interrupt, fd: int) -> None:
        self.result: bool | None = None
        self.thread = threading.Thread(target=self._run, args=(interrupt, fd), daemon=True)
        self.thread.start()

    def _run(self, interrupt: Interrupt, fd: int) -> None:
        self.result = interrupt.wait_readable(fd)

    def end(self) -> bool | None:
        self.thread.join(TIME_LIMIT)
        assert not self.thread.is_alive()
        return self.result

    def still_waits(self) -> bool:
        self.thread.join(0.05)
        return self.thread.is_alive()


def open_fds() -> list[str]:
    gc.collect()  # objects of earlier tests close their descriptors now, not between two calls
    return sorted(os.listdir("/proc/self/fd"))


def test_a_readable_descriptor_is_not_waited_for(readable: int) -> None:
    os.eventfd_write(readable, 1)
    interrupt = Interrupt()
    assert interrupt.wait_readable(readable)
    assert interrupt.wait_readable(readable)
    assert os.eventfd_read(readable) == 1


def test_set_ends_the_wait_of_every_thread(readable: int) -> None:
    interrupt = Interrupt()
    waiting = [WaitingThread(interrupt, readable) for _ in range(3)]
    assert all(one.still_waits() for one in waiting)
    interrupt.set()
    assert [one.end() for one in waiting] == [False] * 3


def test_a_wait_after_the_interrupt_ends_at_once(readable: int) -> None:
    interrupt = Interrupt()
    assert not interrupt.is_set
    interrupt.set()
    assert is_set(interrupt)
    assert not interrupt.wait_readable(readable)
    assert not interrupt.wait_readable(readable)


def is_set(interrupt: Interrupt) -> bool:
    """Return `interrupt.is_set`, whose value mypy takes for constant."""
    return interrupt.is_set


def test_the_interrupt_has_priority_over_a_readable_descriptor(readable: int) -> None:
    os.eventfd_write(readable, 1)
    interrupt = Interrupt()
    interrupt.set()
    assert not interrupt.wait_readable(readable)


def test_set_on_a_full_eventfd_does_not_block(readable: int) -> None:
    interrupt = Interrupt()
    os.eventfd_write(interrupt._fd, (1 << 64) - 2)  # full: another write would block
    begun = time.monotonic()
    interrupt.set()
    interrupt.set()
    assert time.monotonic() - begun < TIME_LIMIT / 2
    assert not interrupt.wait_readable(readable)


def test_a_dropped_interrupt_closes_its_descriptor() -> None:
    before = open_fds()
    interrupt = Interrupt()
    assert len(open_fds()) == len(before) + 1
    interrupt.set()
    del interrupt
    assert open_fds() == before


def test_a_dropped_interrupt_stays_open_while_a_thread_waits(readable: int) -> None:
    before = open_fds()
    waiting = WaitingThread(Interrupt(), readable)
    assert waiting.still_waits()
    assert len(open_fds()) > len(before)
    os.eventfd_write(readable, 1)
    assert waiting.end() is True
    del waiting
    assert open_fds() == before


def test_child_processes_do_not_inherit_the_descriptor() -> None:
    interrupt = Interrupt()
    assert not os.get_inheritable(interrupt._fd)
