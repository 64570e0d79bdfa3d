"""DeviceContexts: the device contexts librdmacm has open, and letting go of a device that is gone.

librdmacm opens each device once a process and keeps it open. Drivers without "disassociation", the
soft ones among them, cannot be removed while any process has them open: `rdma link delete` then
waits in the kernel. So a process has to notice that a device is gone, and to close it.

Noticing: rdma_get_devices(3) lists the devices that are there; one that was and is not any more is
gone. It is called whenever the kernel tells of a change, and when an id is told of a removal.

Closing: the same call has librdmacm mark what is gone, and close it with its last user. Users are
ids, and lists from rdma_get_devices(3), of which one is always kept here: so the context outlives
what was made from it, which is counted in `holds`.

One thing librdmacm does not do: when no device is left at all, it fails (ENODEV) before it marks
any. The descriptors of such a context are then pointed at /dev/null, which is what the kernel waits
for. librdmacm frees the rest when a device comes back.

Drivers with disassociation are done with a device at once, and what is destroyed afterwards fails
with EIO, though it is no more; unless libibverbs is told to take that for success.
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

# libibverbs reads it once, when it looks for devices for the first time.
ALLOW_DISASSOC_DESTROY = "RDMAV_ALLOW_DISASSOC_DESTROY"


class ContextList:
    """What rdma_get_devices(3) gave: none of its contexts is closed before it is freed."""

    def __init__(self, pointer: DeviceList, count: int) -> None:
        self.contexts = frozenset(pointer[index] for index in range(count))
        self._pointer = pointer

    @classmethod
    def get(cls) -> ContextList:
        """Look for devices, and open those not open yet, which takes a while the first time.

        Raises:
            VerbsError: ENODEV when there is no RDMA device.
        """
        os.environ.setdefault(ALLOW_DISASSOC_DESTROY, "1")
        count = ffi.new("int *")
        pointer = lib.rdma_get_devices(count)
        if pointer == ffi.NULL:
            raise last_error("rdma_get_devices")
        return cls(pointer, count[0])

    def free(self) -> None:
        """rdma_free_devices(3). What is gone and has no other user is closed now."""
        lib.rdma_free_devices(self._pointer)


class DeviceContexts:
    """Every context of this process. What has no leading underscore is callable from any thread."""

    def __init__(self, counts: ContextReferences = context_references) -> None:
        self.on_removed: Callable[[Device], None] = lambda device: None
        """Called with each device that is found gone, in the thread that looks for devices."""
        self._holds = counts
        self._thread = DeviceThread(self._check)
        self._lock = threading.Lock()  # whether a list is freed, or one of its contexts held
        self._lists: list[ContextList] = []
        self._devices: dict[IbvContext, Device] = {}
        self._gone: set[IbvContext] = set()
        self._emptied: set[IbvContext] = set()
        counts.on_free = self._freed

    def open(self) -> list[Device]:
        """Have librdmacm look for devices. Those it has are held, once each, until let_go().

        Raises:
            VerbsError: ENODEV when there is no RDMA device.
        """
        return self._thread.call(self._open)

    def release(self, devices: list[Device]) -> None:
        """Hold those devices no more."""
        for device in devices:
            self._holds.release(device.context)

    def acquire(self, device: Device) -> None:
        """Hold a device that an id is bound to. Blocks if it is not known here yet.

        An id alone does not keep the context of a removed device open for longer than itself, and
        it is destroyed before what was made with its help: so this comes first.

        Raises:
            DeviceRemoved: it is gone.
        """
        if not self._try_acquire(device.context):
            self._thread.call(self._check)
            if not self._try_acquire(device.context):
                raise DeviceRemoved(f"the RDMA device {device.name} was removed")

    def _try_acquire(self, context: IbvContext) -> bool:
        with self._lock:
            if context in self._gone or context not in self._known():
                return False
            self._holds.acquire(context)
            return True

    def device_of(self, context: IbvContext) -> Device:
        """The device that has this context: always the same one, if it is known here.

        So what it was asked for once need not be asked for again.
        """
        return self._devices.get(context) or Device(context)

    def is_gone(self, device: Device) -> bool:
        """Whether the device was removed."""
        return device.context in self._gone

    def check_soon(self) -> None:
        """Look for devices soon: an id was told that one is gone."""
        self._thread.submit(self._check)

    def call(self, function: Callable[[], None]) -> None:
        """Have the thread that looks for devices call `function`, and wait for it."""
        self._thread.call(function)

    def _freed(self) -> None:
        if self._gone:
            self.check_soon()

    # --- in the thread ---

    def _open(self) -> list[Device]:
        error = self._look()
        if error is not None:
            raise error
        devices = [Device(context) for context in self._lists[-1].contexts]
        for device in devices:
            self._holds.acquire(device.context)
        return devices

    def _check(self) -> None:
        error = self._look()
        if error is not None and error.errno != errno.ENODEV:
            logger.error("could not look for RDMA devices: %s", error)

    def _look(self) -> VerbsError | None:
        """Take a new list of devices, and do what is to be done about those that are gone."""
        found, error = None, None
        try:
            found = ContextList.get()
        except VerbsError as failure:
            error = failure
        if found is not None:
            self._note_gone(self._known() - found.contexts)
            self._lists.append(found)
            self._free_lists()
            known = self._devices
            self._devices = {
                context: known.get(context) or Device(context) for context in self._known()
            }
            if not found.contexts:
                error = VerbsError(errno.ENODEV, "rdma_get_devices")
        if error is not None:
            # Whatever goes wrong is ENODEV here: running out of descriptors is, too.
            self._note_gone({context for context in self._known() if not has_node(context)})
            self._empty_unused()
        return error

    def _known(self) -> set[IbvContext]:
        return {context for known in self._lists for context in known.contexts}

    def _note_gone(self, gone: set[IbvContext]) -> None:
        for context in gone - self._gone:
            self._gone.add(context)
            device = Device(context)
            logger.info("%s was removed", device.name)
            self.on_removed(device)

    def _is_in_use(self, context: IbvContext) -> bool:
        return context in self._gone and self._holds.has(context)

    def _free_lists(self) -> None:
        """Free all but the newest list, unless somebody holds what is gone, and was in it."""
        with self._lock:
            *old, newest = self._lists
            kept = [known for known in old if any(map(self._is_in_use, known.contexts))]
            self._lists = [*kept, newest]
            known_still = self._known()
            self._gone &= known_still
            self._emptied &= known_still
        for known in old:
            if known not in kept:
                known.free()

    def _empty_unused(self) -> None:
        """No device is left, and so librdmacm closes nothing: have the kernel do without it."""
        for context in self._gone - self._emptied:  # of which nobody can take hold any more
            if not self._holds.has(context):
                self._emptied.add(context)
                empty(context)


def has_node(context: IbvContext) -> bool:
    """Whether the system still has the character device that a context is open on."""
    number = os.fstat(context.cmd_fd).st_rdev
    return os.path.exists(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}")


def empty(context: IbvContext) -> None:
    """Point the descriptors of a context at /dev/null; librdmacm will close them one day."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in (context.cmd_fd, context.async_fd):
            os.dup2(null, fd, inheritable=False)
    finally:
        os.close(null)


device_contexts = DeviceContexts()
