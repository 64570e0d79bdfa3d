"""DeviceContexts: librdmacm's open device contexts, and closing those of removed devices.

librdmacm opens each device once in a process and leaves it open. Some drivers, such as the soft
ones, have no "disassociation": their device cannot be removed while any process has it open, and
`rdma link delete` waits in the kernel. So a process must detect a removal, and close the device.

Detecting: rdma_get_devices(3) lists the present devices. A device that was in an earlier list and
is not in the newest one has been removed. The function is called when the kernel reports a change,
and when an id gets a DEVICE_REMOVAL event.

Closing: the same call makes librdmacm mark the removed devices, and close each with its last user.
Users are ids, and lists from rdma_get_devices(3). One list is always stored here, so a context
outlives the objects made from it, which ContextReferences counts.

librdmacm does not handle one case: if no device is left at all, it fails (ENODEV) before it marks
any. The descriptors of such a context are then redirected to /dev/null, which ends the kernel's
wait. librdmacm frees the rest when a device is added again.

Drivers with disassociation free a device at once. A call that destroys an object afterwards fails
with EIO, though the object no longer exists, unless libibverbs is set to report success instead.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import DeviceRemoved, VerbsError, last_error
from aiordma.rdmacm.device_thread import DeviceThread
from aiordma.verbs import Device
from aiordma.verbs.context_references import ContextReferences, context_references

if TYPE_CHECKING:
    from aiordma._native._lib import DeviceList, IbvContext

logger = logging.getLogger(__name__)

# libibverbs reads this variable once, when it lists the devices for the first time.
ALLOW_DISASSOC_DESTROY = "RDMAV_ALLOW_DISASSOC_DESTROY"


class ContextList:
    """A list from rdma_get_devices(3). None of its contexts is closed before the list is freed."""

    def __init__(self, pointer: DeviceList, count: int) -> None:
        self.contexts = frozenset(pointer[index] for index in range(count))
        self._pointer = pointer

    @classmethod
    def get(cls) -> ContextList:
        """List the devices, and open those not open yet, which takes a while the first time.

        Raises:
            VerbsError: ENODEV (no RDMA device).
        """
        os.environ.setdefault(ALLOW_DISASSOC_DESTROY, "1")
        count = ffi.new("int *")
        pointer = lib.rdma_get_devices(count)
        if pointer == ffi.NULL:
            raise last_error("rdma_get_devices")
        return cls(pointer, count[0])

    def free(self) -> None:
        """Free the list: rdma_free_devices(3). This closes removed devices with no other user."""
        lib.rdma_free_devices(self._pointer)


class DeviceContexts:
    """All device contexts of this process. Its public methods are callable from any thread."""

    def __init__(self, counts: ContextReferences = context_references) -> None:
        self.on_removed: Callable[[Device], None] = lambda device: None
        """Called in the device thread with each device that was removed."""
        self._references = counts
        self._thread = DeviceThread(self._check)
        self._lock = threading.Lock()  # held to free a list, or to acquire a context of one
        self._lists: list[ContextList] = []
        self._devices: dict[IbvContext, Device] = {}
        self._removed: set[IbvContext] = set()
        self._detached: set[IbvContext] = set()
        counts.on_free = self._on_free

    def open(self) -> list[Device]:
        """List the devices, acquire a reference to each, and return them. See release().

        Raises:
            VerbsError: ENODEV (no RDMA device).
        """
        return self._thread.call(self._open)

    def release(self, devices: list[Device]) -> None:
        """Release a reference to each of the devices."""
        for device in devices:
            self._references.release(device.context)

    def acquire(self, device: Device) -> None:
        """Acquire a reference to a device that an id is bound to. Blocks if it is not listed yet.

        An id keeps the context of a removed device open only until the id is destroyed, and the
        objects made with its help are destroyed later. So acquire the reference before making them.

        Raises:
            DeviceRemoved: the device was removed.
        """
        if not self._try_acquire(device.context):
            self._thread.call(self._check)
            if not self._try_acquire(device.context):
                raise DeviceRemoved(f"the RDMA device {device.name} was removed")

    def _try_acquire(self, context: IbvContext) -> bool:
        with self._lock:
            if context in self._removed or context not in self._listed():
                return False
            self._references.acquire(context)
            return True

    def device_of(self, context: IbvContext) -> Device:
        """Return the device with this context: the same object each time, if it is listed here.

        So its attributes are queried only once.
        """
        return self._devices.get(context) or Device(context)

    def is_removed(self, device: Device) -> bool:
        """Return True if the device was removed."""
        return device.context in self._removed

    def check_soon(self) -> None:
        """List the devices again soon, because an id was notified of a removal."""
        self._thread.submit(self._check)

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` in the device thread, and wait for it."""
        self._thread.call(function)

    def _on_free(self) -> None:
        if self._removed:
            self.check_soon()

    # --- in the device thread ---

    def _open(self) -> list[Device]:
        error = self._update()
        if error is not None:
            raise error
        devices = [Device(context) for context in self._lists[-1].contexts]
        for device in devices:
            self._references.acquire(device.context)
        return devices

    def _check(self) -> None:
        error = self._update()
        if error is not None and error.errno != errno.ENODEV:
            logger.error("could not list the RDMA devices: %s", error)

    def _update(self) -> VerbsError | None:
        """List the devices, and handle those that were removed. Return the error, if any."""
        found, error = None, None
        try:
            found = ContextList.get()
        except VerbsError as failure:
            error = failure
        if found is not None:
            self._report_removed(self._listed() - found.contexts)
            self._lists.append(found)
            self._free_lists()
            old = self._devices
            self._devices = {
                context: old.get(context) or Device(context) for context in self._listed()
            }
            if not found.contexts:
                error = VerbsError(errno.ENODEV, "rdma_get_devices")
        if error is not None:
            # Every failure is ENODEV here, even a lack of descriptors. So check the device nodes.
            self._report_removed({context for context in self._listed() if not has_node(context)})
            self._detach_unused()
        return error

    def _listed(self) -> set[IbvContext]:
        return {context for listed in self._lists for context in listed.contexts}

    def _report_removed(self, contexts: set[IbvContext]) -> None:
        for context in contexts - self._removed:
            self._removed.add(context)
            device = Device(context)
            logger.info("%s was removed", device.name)
            self.on_removed(device)

    def _is_removed_and_in_use(self, context: IbvContext) -> bool:
        return context in self._removed and self._references.has(context)

    def _free_lists(self) -> None:
        """Free all but the newest list and those with a removed device that is still in use."""
        with self._lock:
            *old, newest = self._lists
            needed = [
                listed for listed in old if any(map(self._is_removed_and_in_use, listed.contexts))
            ]
            self._lists = [*needed, newest]
            still_listed = self._listed()
            self._removed &= still_listed
            self._detached &= still_listed
        for listed in old:
            if listed not in needed:
                listed.free()

    def _detach_unused(self) -> None:
        """Detach the removed contexts without references, which librdmacm does not close now."""
        for context in self._removed - self._detached:  # acquire() refuses these
            if not self._references.has(context):
                try:
                    detach(context)
                except OSError as error:  # no free descriptor: the next check tries it again
                    logger.warning("a removed device stays open: %s", error)
                else:
                    self._detached.add(context)


def has_node(context: IbvContext) -> bool:
    """Return True if the character device that a context is open on still exists."""
    number = os.fstat(context.cmd_fd).st_rdev
    return os.path.exists(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}")


def detach(context: IbvContext) -> None:
    """Redirect the descriptors of a context to /dev/null. librdmacm closes them later."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in (context.cmd_fd, context.async_fd):
            os.dup2(null, fd, inheritable=False)
    finally:
        os.close(null)


device_contexts = DeviceContexts()
