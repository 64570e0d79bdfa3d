"""The machine without its devices: libraries, kernel modules, device files, locked memory."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from aiordma.doctor.finding import Finding, ok, problem, warning
from aiordma.errors import RAISE_MEMLOCK, VerbsError, load_failure
from aiordma.memory import SLAB_SIZE
from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions
from aiordma.rdmacm import EventChannel

OLDEST_RDMA_CORE = 44
CONTAINER = "in a container, start it with --device=/dev/infiniband"
CAP_IPC_LOCK = 14
"""The number of the capability that lifts the locked-memory limit: capabilities(7)."""
INITIAL_USER_NAMESPACE = 0xEFFFFFFD
"""The inode number of the kernel's first user namespace: PROC_USER_INIT_INO in Linux."""
MEBIBYTE = 1 << 20


def examine_libraries(maps: Path = Path("/proc/self/maps")) -> Finding:
    """Examine whether librdmacm and libibverbs can be loaded, and their version."""
    subject = "libraries"
    try:
        EventChannel().close()
    except VerbsError as error:  # of another errno if there is no device
        if error.errno == errno.ELIBACC:
            return problem(subject, *load_failure())
    # A library's file name ends with its version, such as libibverbs.so.1.14.44.0.
    found = re.search(r"libibverbs\.so\.1\.\d+\.(\d+)\.(\d+)", maps.read_text())
    if found is None:
        return ok(subject, "librdmacm and libibverbs are installed")
    version = f"rdma-core {found[1]}.{found[2]}"
    if int(found[1]) < OLDEST_RDMA_CORE:
        text = f"{version} is older than the oldest that aiordma is tested with"
        return warning(subject, text, f"use rdma-core {OLDEST_RDMA_CORE} or later")
    return ok(subject, version)


def examine_modules(root: Path) -> Iterator[Finding]:
    """Examine the kernel modules through which programs reach devices.

    Sysfs shows them also if they are built into the kernel.
    """
    for module, shown in (
        ("ib_uverbs", root / "sys/class/infiniband_verbs"),
        ("rdma_ucm", root / "sys/class/misc/rdma_cm"),
    ):
        if shown.exists():
            yield ok("kernel", f"{module} is loaded")
        else:
            mend = f"run `modprobe {module}` as root (on the host, if this is a container)"
            yield problem("kernel", f"{module} is not loaded", mend)


def examine_device_files(root: Path) -> Iterator[Finding]:
    """Examine the files in /dev/infiniband, and the permission to use them."""
    directory = root / "dev/infiniband"
    files = {"rdma_cm": "connections"}
    for entry in sorted((root / "sys/class/infiniband_verbs").glob("uverbs*")):
        with contextlib.suppress(OSError):  # the device was removed meanwhile
            files[entry.name] = (entry / "ibdev").read_text().strip()
    for name, use in files.items():
        yield _examine_device_file(directory / name, use)


def _examine_device_file(path: Path, use: str) -> Finding:
    """Open a device file: access(2) does not see the mount option nodev.

    The device cgroup of a container refuses with EPERM, a mode with EACCES.
    """
    subject = f"/dev/infiniband/{path.name}"
    try:
        os.close(os.open(path, os.O_RDWR))
    except FileNotFoundError:
        mend = f"{CONTAINER}; otherwise udev creates it when its module is loaded"
        return problem(subject, f"does not exist, for {use}", mend)
    except PermissionError as error:
        if error.errno == errno.EPERM or os.access(path, os.R_OK | os.W_OK):
            text = f"cannot be opened, though its mode allows it ({error.strerror})"
            mend = f"{CONTAINER} (a volume is not enough), and mount nothing there with nodev"
            return problem(subject, text, mend)
        mode = f"{path.stat().st_mode & 0o777:o}"
        mend = "rdma-core's udev rules give mode 666; or run as root, or as its group"
        return problem(subject, f"this user cannot read and write it (mode {mode})", mend)
    except OSError as error:
        mend = "load its driver; in a container, start it again, which creates the file anew"
        return problem(subject, f"leads to no device ({error.strerror})", mend)
    return ok(subject, f"can be used, for {use}")


def examine_locked_memory(
    options: ConnectionOptions = DEFAULT_OPTIONS, process: Path = Path("/proc/self")
) -> Finding:
    """Examine the limit of locked memory, against which registered memory counts."""
    subject = "locked memory"
    if _has_ipc_lock(process):
        return ok(subject, "no limit, because this process has CAP_IPC_LOCK")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok(subject, "no limit")
    each = options.recv_depth * options.max_message_size
    count = max(0, limit - SLAB_SIZE) // each
    text = (
        f"{limit / MEBIBYTE:g} MiB; a connection with default options registers "
        f"{each / MEBIBYTE:g} MiB, and an event loop {SLAB_SIZE / MEBIBYTE:g} MiB or more for the "
        f"messages that it sends, so the limit is enough for {count} of them"
    )
    return (warning if count else problem)(subject, text, RAISE_MEMLOCK)


def _has_ipc_lock(process: Path) -> bool:
    """Return True if a process has CAP_IPC_LOCK in the initial user namespace.

    The kernel does not look at the capabilities of another namespace, such as that of a container
    without root.
    """
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", (process / "status").read_text(), re.MULTILINE)
    if found is None or not int(found[1], 16) >> CAP_IPC_LOCK & 1:
        return False
    try:
        return (process / "ns/user").stat().st_ino == INITIAL_USER_NAMESPACE
    except FileNotFoundError:  # a kernel without user namespaces
        return True
