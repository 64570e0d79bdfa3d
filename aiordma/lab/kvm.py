"""Whether KVM really works here.

A /dev/kvm that opens proves little: nested virtualization can start the BIOS and then hang for
ever. So a kernel is booted with it, once for each boot of this machine; the cache keeps the answer.
"""

import contextlib
import os
import subprocess
from pathlib import Path

from . import initramfs, packages
from .files import MemoryFile, cache_dir
from .kernel import Kernel
from .qemu import Machine

__all__ = ["BOOT_TIMEOUT", "choose", "is_known", "works"]

# Seconds until the command must have started.
BOOT_TIMEOUT = {"kvm": 60.0, "tcg": 120.0}

# A kernel that has not arrived in user space by then never will: with KVM it takes a second.
PROBE_LIMIT = 8.0
_TOKEN = "aiordma-lab-probe"


def choose(qemu: str, kernel: Kernel) -> str:
    """The accelerator to use here: "kvm" or "tcg"."""
    return "kvm" if works(qemu, kernel) else "tcg"


def works(qemu: str, kernel: Kernel) -> bool:
    """Whether a machine boots with KVM here."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    answer = _answer_file()
    if not answer.exists():
        cache_dir().mkdir(parents=True, exist_ok=True)
        for stale in cache_dir().glob("kvm-*"):
            stale.unlink(missing_ok=True)
        answer.write_text("yes" if _probe(qemu, kernel) else "no")
    return answer.read_text() == "yes"


def is_known() -> bool:
    """Whether the answer needs no probe."""
    return not os.access("/dev/kvm", os.R_OK | os.W_OK) or _answer_file().exists()


def _answer_file() -> Path:
    """The answer holds until this machine boots again."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return cache_dir() / f"kvm-{boot}"


def _probe(qemu: str, kernel: Kernel) -> bool:
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
                timeout=PROBE_LIMIT,
                check=False,
            )
        return _TOKEN in console.text()
