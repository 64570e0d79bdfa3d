"""QEMU: where it is and what it is told."""

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError
from .frames import PORT_NAME

__all__ = ["Machine", "check_machine", "find"]

# What each parameter spares: most are self-tests and probes that take a tenth of a second or more
# on an emulated processor. `tsc=reliable` keeps the clock in user space (the alternatives trap into
# QEMU at every time.monotonic()); `rcu_expedited` makes creating devices immediate; `panic=-1`
# with QEMU's -no-reboot turns a panic into the end of QEMU.
_PARAMETERS = (
    "console=ttyS0",
    "quiet",
    "panic=-1",
    "nokaslr",
    "mitigations=off",
    "tsc=reliable",
    "no_timer_check",
    "random.trust_cpu=on",
    "cryptomgr.notests",
    "rcupdate.rcu_expedited=1",
    "audit=0",
    "apparmor=0",
    "selinux=0",
    "nowatchdog",
    "8250.nr_uarts=1",
)

# The devices are functions of one slot: the guest's kernel enables an interrupt line for each slot,
# which is a quarter of a second of ACPI byte code on an emulated processor.
_SLOT = "multifunction=on,addr=3"

_ACCELERATORS = {
    "kvm": ("-accel", "kvm", "-cpu", "host"),
    "tcg": ("-accel", "tcg,thread=multi", "-cpu", "max"),
}


def check_machine() -> None:
    """Refuse what the lab cannot run on.

    Raises: LabError.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        here = f"{platform.system()} on {platform.machine()}"
        raise LabError(f"the lab runs on Linux on x86_64, and this is {here}")


def find() -> str:
    """QEMU's path.

    Raises: LabError when it is not installed.
    """
    path = shutil.which("qemu-system-x86_64")
    if path is None:
        raise LabError("QEMU (qemu-system-x86_64) is not installed: run `aiordma lab setup`")
    return path


@dataclass(frozen=True)
class Machine:
    """One QEMU process to be. `cwd` is None for a machine without the host's files."""

    kernel: Path
    initramfs: str
    console: str
    accelerator: str
    cpus: int
    memory: str
    cwd: str | None = None

    def argv(self, qemu: str) -> list[str]:
        """QEMU's command line."""
        return [
            qemu,
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-machine", "pc"),
            *_ACCELERATORS[self.accelerator],
            *("-smp", str(self.cpus), "-m", self.memory),
            *("-kernel", str(self.kernel), "-initrd", self.initramfs),
            *("-append", " ".join(_PARAMETERS)),
            *("-serial", f"file:{_quoted(self.console)}"),
            *self._shares(),
        ]

    def _shares(self) -> list[str]:
        if self.cwd is None:
            return []
        return [*_share(0, "root", "/", ",readonly=on"), *_share(1, "cwd", self.cwd, "")]

    def argv_with_channel(self, qemu: str, fd: int) -> list[str]:
        """QEMU's command line with this socket as the channel to the guest's agent."""
        return [
            *self.argv(qemu),
            *("-device", f"virtio-serial-pci,{_SLOT}.2"),
            *("-chardev", f"socket,id=lab,fd={fd}"),
            *("-device", f"virtserialport,chardev=lab,name={PORT_NAME}"),
        ]


def _share(function: int, tag: str, path: str, options: str) -> list[str]:
    """A directory for the guest. `remap`: inode numbers stay unique across the host's mounts."""
    local = f"local,id={tag},path={_quoted(path)},security_model=none,multidevs=remap{options}"
    device = f"virtio-9p-pci,fsdev={tag},mount_tag={tag},{_SLOT}.{function}"
    return ["-fsdev", local, "-device", device]


def _quoted(value: str) -> str:
    """QEMU's option syntax doubles commas."""
    return value.replace(",", ",,")
