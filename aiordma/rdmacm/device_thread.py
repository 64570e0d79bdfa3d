"""DeviceThread: the one thread that lists devices, and is notified when they change."""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from aiordma.errors import VerbsError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# <linux/netlink.h> and <linux/kobject.h>: the messages that the kernel sends to udev and others.
NETLINK_KOBJECT_UEVENT = 15
KERNEL_EVENTS = 1
SUBSYSTEM = b"SUBSYSTEM=infiniband_verbs"
UEVENT_SIZE = 8192


class DeviceThread:
    """Runs calls one after the other, and `on_change` when an RDMA device is added or removed.

    One thread makes all these calls. librdmacm before rdma-core 52 sorts its devices by the
    difference of their addresses as an int: it finds them again only if they were allocated near
    each other, and so by one thread. Otherwise the removal of a device can remove another one, too.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._wake_fd = -1

    @property
    def running(self) -> bool:
        """True if the thread was started in this process."""
        return self._thread is not None and self._pid == os.getpid()

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread, and return its result or raise its exception.

        If there can be no thread, as in a forked child, the calling thread calls it.

        Raises:
            VerbsError: EMFILE, ENFILE, ENOMEM: no descriptor for the thread.
            Others: as `function`.
        """
        if threading.current_thread() is self._thread or not self._start():
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.submit(run)
        return future.result()

    def submit(self, job: Callable[[], None]) -> None:
        """Call `job` in the thread soon, if the thread runs. Callable from any thread."""
        if self.running:
            self._jobs.append(job)
            with suppress(BlockingIOError):  # the thread is awake already
                os.eventfd_write(self._wake_fd, 1)

    def _start(self) -> bool:
        with self._lock:
            if self._thread is not None or sys.is_finalizing():
                return self.running
            try:
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            except OSError as error:
                raise VerbsError(error.errno or 0, "eventfd") from None
            thread = threading.Thread(target=self._run, name="aiordma-devices", daemon=True)
            self._pid, self._thread = os.getpid(), thread
            try:
                thread.start()
            except RuntimeError:
                self._thread = None
                os.close(self._wake_fd)
                return False
            return True

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        uevents = open_uevents()
        if uevents is not None:
            poller.register(uevents.fileno(), select.POLLIN)
        while True:
            poller.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            if uevents is not None and has_changes(uevents):
                run_and_log(self._on_change)
            while self._jobs:
                run_and_log(self._jobs.popleft())


def run_and_log(job: Callable[[], None]) -> None:
    """Run a job. An exception is only logged: without the thread, later calls would hang."""
    try:
        job()
    except BaseException:
        logger.exception("a job of the device thread failed")


def open_uevents() -> socket.socket | None:
    """Open a socket for the kernel's device events. Return None if a sandbox does not allow it."""
    try:
        opened = socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT
        )
        opened.bind((0, KERNEL_EVENTS))
    except OSError:
        return None
    return opened


def has_changes(uevents: socket.socket) -> bool:
    """Read all messages. Return True if one is about RDMA devices, or if messages were lost."""
    found = False
    while True:
        try:
            found |= SUBSYSTEM in uevents.recv(UEVENT_SIZE)
        except BlockingIOError:
            return found
        except OSError:  # ENOBUFS: messages were lost
            return True
