"""Interrupt: end a worker thread's wait for a file descriptor from another thread."""

from __future__ import annotations

import os
import select
from contextlib import suppress

from aiordma.errors import VerbsError


class Interrupt:
    """A wait for file descriptors that another thread can end.

    The wait also polls an eventfd, which set() makes readable.
    """

    def __init__(self) -> None:
        """Open the eventfd.

        Raises:
            VerbsError: EMFILE, ENFILE, ENOMEM.
        """
        try:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise VerbsError(error.errno or 0, "eventfd") from None
        self.is_set = False

    def set(self) -> None:
        """End the wait, and every later one. Callable from any thread."""
        self.is_set = True
        with suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def wait_readable(self, *fds: int) -> bool:
        """Wait until one of `fds` is readable, and return True. Return False if interrupted.

        Blocks: call it in a worker thread.
        """
        poller = select.poll()
        for fd in (*fds, self._fd):
            poller.register(fd, select.POLLIN)
        poller.poll()
        return not self.is_set

    def __del__(self) -> None:
        # Both the waiting thread and the owner refer to this object. The last one closes the fd.
        with suppress(OSError, AttributeError):
            os.close(self._fd)
