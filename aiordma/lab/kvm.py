"""Test whether KVM works on this machine.

Being able to open /dev/kvm is not enough: under nested virtualization a guest can start its BIOS
and then hang. So the lab boots a kernel with KVM, once after each boot of this machine, and stores
the result in the cache.
"""

import contextlib
import os
import subprocess
from pathlib import Path

from . import initramfs, packages
from .files import MemoryFile, cache_dir
from .kernel import Kernel
from .qemu import Machine

__all__ = ["BOOT_TIMEOUT", "choose", "is_result_known", "works"]

# Seconds until the command must have started.
BOOT_TIMEOUT = {"kvm": 60.0, "tcg": 120.0}

# Seconds until the kernel must have reached user space. With KVM it takes one second.
PROBE_TIMEOUT = 8.0
_TOKEN = "aiordma-lab-probe"


def choose(qemu: str, kernel: Kernel) -> str:
    """Return the accelerator to use on this machine: "kvm" or "tcg"."""
    return "kvm" if works(qemu, kernel) else "tcg"


def works(qemu: str, kernel: Kernel) -> bool:
    """Return True if a virtual machine boots with KVM here. Boots one unless that is known."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    result = _result_file()
    if not result.exists():
        cache_dir().mkdir(parents=True, exist_ok=True)
        for stale in cache_dir().glob("kvm-*"):
            stale.unlink(missing_ok=True)
        result.write_text("yes" if _probe(qemu, kernel) else "no")
    return result.read_text() == "yes"


def is_result_known() -> bool:
    """Return True if `works()` need not boot a virtual machine."""
    return not os.access("/dev/kvm", os.R_OK | os.W_OK) or _result_file().exists()


def _result_file() -> Path:
    """Return the path of the stored result, which is valid until this machine boots again."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return cache_dir() / f"kvm-{boot}"


def _probe(qemu: str, kernel: Kernel) -> bool:
    """Boot a kernel with KVM. Return True if it reaches user space within PROBE_TIMEOUT."""
    with (
        MemoryFile("initramfs", initramfs.probe(_TOKEN, packages.busybox())) as image,
        MemoryFile("console") as console,
    ):
        machine = Machine(
            kernel.image, image.path, console.path, accelerator="kvm", cpus=1, memory="512M"
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                machine.argv(qemu),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[image.fd, console.fd],
                timeout=PROBE_TIMEOUT,
                check=False,
            )
        return _TOKEN in console.text()
