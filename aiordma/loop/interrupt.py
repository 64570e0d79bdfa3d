"""Interrupt: waiting for a file descriptor in a worker thread, until somebody says stop."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class Interrupt:
    """A thread's wait that another thread can end, by an eventfd that is polled beside it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_set = False

    def set(self) -> None:
        """End the wait, and every later one. Callable from any thread."""
        self.is_set = True
        with suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def wait_readable(self, *fds: int) -> bool:
        """Wait until one of them has something to read; False: interrupted. Blocks: in a thread."""
        poller = select.poll()
        for fd in (*fds, self._fd):
            poller.register(fd, select.POLLIN)
        poller.poll()
        return not self.is_set

    def __del__(self) -> None:
        # Whoever comes last, the waiting thread or its owner, leaves nothing behind.
        with suppress(OSError, AttributeError):
            os.close(self._fd)
