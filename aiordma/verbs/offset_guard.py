"""OffsetGuard: keeps queue pairs of siw away from a memory offset that libsiw cannot use.

libsiw takes the mmap offset 0x90000 for an error, so it fails to create a queue pair whose memory
gets that offset (all versions up to rdma-core 65). The offsets belong to a device's context, which
all threads of the process share. The kernel uses the lowest free offset. So a completion queue that
is created first and covers the offset keeps it occupied.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import check_errno, last_error
from aiordma.verbs.context_references import context_references
from aiordma.verbs.device import Device

if TYPE_CHECKING:
    from aiordma._native._lib import IbvContext, IbvCq

ENTRIES = 1 << 15
"""A completion queue of this length has 1 MiB of memory."""


class OffsetGuards:
    """The completion queues that occupy the offset: one for each device with users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[IbvContext, int] = {}
        self._queues: dict[IbvContext, IbvCq] = {}

    def acquire(self, device: Device) -> None:
        """Add a user, before it creates anything on the device. Blocks.

        Does nothing if the device is not siw.

        Raises:
            VerbsError: ENOMEM, EMFILE.
        """
        if not device.attributes.is_siw:
            return
        with self._lock:
            users = self._users.get(device.context, 0)
            if not users:
                queue = lib.ibv_create_cq(device.context, ENTRIES, ffi.NULL, ffi.NULL, 0)
                if queue == ffi.NULL:
                    raise last_error("ibv_create_cq")
                context_references.acquire(device.context)
                self._queues[device.context] = queue
            self._users[device.context] = users + 1

    def release(self, device: Device) -> None:
        """Remove a user, after it has destroyed everything. Blocks.

        Raises:
            VerbsError: the device was removed.
        """
        if not device.attributes.is_siw:
            return
        with self._lock:
            self._users[device.context] -= 1
            if self._users[device.context]:
                return
            del self._users[device.context]
            try:
                check_errno(lib.ibv_destroy_cq(self._queues.pop(device.context)), "ibv_destroy_cq")
            finally:
                context_references.release(device.context)


offset_guards = OffsetGuards()
