"""Interrupt: ending a thread's wait for a file descriptor."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest
from loops import block_until

from aiordma.errors import VerbsError
from aiordma.loop import Interrupt

LONG = 10.0


@pytest.fixture
def readable() -> Iterator[int]:
    """A file descriptor that becomes readable when it is written to."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def waiting(wait: Callable[[int], bool], fd: int) -> Future[bool]:
    """Return the result of a thread that sleeps while it waits for a descriptor."""
    result, ids = Future[bool](), list[int]()

    def run() -> None:
        ids.append(threading.get_native_id())
        result.set_result(wait(fd))

    threading.Thread(target=run, daemon=True).start()
    block_until(
        lambda: ids and "\nState:\tS" in Path(f"/proc/self/task/{ids[0]}/status").read_text(),
        "the thread to wait",
    )
    return result


def open_fds() -> list[str]:
    gc.collect()  # objects of earlier tests close their descriptors now, not between two calls
    return sorted(os.listdir("/proc/self/fd"))


def test_a_readable_descriptor_is_not_waited_for(readable: int) -> None:
    os.eventfd_write(readable, 1)
    interrupt = Interrupt()
    assert interrupt.wait_readable(readable)
    assert interrupt.wait_readable(readable)
    interrupt.set()  # has priority
    assert not interrupt.wait_readable(readable)
    assert os.eventfd_read(readable) == 1


def test_set_ends_every_wait_at_once(readable: int) -> None:
    interrupt = Interrupt()
    assert not os.get_inheritable(interrupt._fd)
    results = [waiting(interrupt.wait_readable, readable) for _ in range(3)]
    interrupt.set()
    assert [result.result(LONG) for result in results] == [False] * 3
    os.eventfd_write(interrupt._fd, (1 << 64) - 3)  # full: another write would block
    interrupt.set()
    assert not interrupt.wait_readable(readable)


def test_a_dropped_interrupt_stays_open_while_a_thread_waits(readable: int) -> None:
    before = open_fds()
    result = waiting(Interrupt().wait_readable, readable)
    assert len(open_fds()) > len(before)
    os.eventfd_write(readable, 1)
    assert result.result(LONG)
    block_until(lambda: open_fds() == before, "the descriptor to be closed")


def test_one_that_cannot_be_made_raises_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "eventfd", Mock(side_effect=OSError(errno.EMFILE, "too many files")))
    with pytest.raises(VerbsError, match="eventfd") as caught:
        Interrupt()
    assert caught.value.errno == errno.EMFILE
