"""QEMU: its path and its command line."""

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError
from .frames import PORT_NAME

__all__ = ["Card", "Machine", "check_machine", "find"]

# Most of these parameters turn off self-tests and probes. On an emulated processor each of those
# takes a tenth of a second or more. With `tsc=reliable`, time.monotonic() reads the clock in user
# space; with other clock sources every call traps into QEMU. `rcu_expedited` makes creating devices
# immediate. With `panic=-1` and QEMU's -no-reboot, QEMU exits when the kernel panics.
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

# The kernel polls for work where it would halt the processor. An emulated processor that was halted
# is slower for a while, and is halted less often the more a program polls.
_AWAKE = "idle=poll"

# All PCI devices are functions of one slot. For each slot in use the guest's kernel enables an
# interrupt line, which takes a quarter of a second of ACPI byte code on an emulated processor.
_SLOT = "multifunction=on,addr=3"

# An emulated processor executes `rep movsb` byte by byte. Without the features ERMS and FSRM,
# programs and the kernel copy memory by instructions that are five times as fast in it.
_EMULATED_CPU = "max,-erms,-fsrm"

_ACCELERATORS = {
    "kvm": ("-accel", "kvm", "-cpu", "host"),
    "tcg": ("-accel", "tcg,thread=multi", "-cpu", _EMULATED_CPU),
}


def check_machine() -> None:
    """Check that the lab can run on this machine.

    Raises: LabError if it cannot.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        here = f"{platform.system()} on {platform.machine()}"
        raise LabError(f"the lab needs Linux on x86_64, but this is {here}")


def find() -> str:
    """Return the path of QEMU.

    Raises: LabError if it is not installed.
    """
    path = shutil.which("qemu-system-x86_64")
    if path is None:
        raise LabError("QEMU (qemu-system-x86_64) is not installed: run `aiordma lab setup`")
    return path


@dataclass(frozen=True)
class Card:
    """A network card: its name for the monitor, its MAC address, and the socket of its wire."""

    name: str
    mac: str
    fd: int


@dataclass(frozen=True)
class Machine:
    """The settings of one virtual machine. If `cwd` is None, it does not get the host's files.

    If `awake` is true, its processors are never halted.
    """

    kernel: Path
    initramfs: str
    console: str
    accelerator: str
    cpus: int
    memory: str
    cwd: str | None = None
    cards: tuple[Card, ...] = ()
    awake: bool = False

    def argv(self, qemu: str) -> list[str]:
        """Return QEMU's command line. `qemu` is the path of QEMU."""
        return [
            qemu,
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-machine", "pc"),
            *_ACCELERATORS[self.accelerator],
            *("-smp", str(self.cpus), "-m", self.memory),
            *("-kernel", str(self.kernel), "-initrd", self.initramfs),
            *("-append", " ".join((*_PARAMETERS, _AWAKE) if self.awake else _PARAMETERS)),
            *("-serial", f"file:{_quoted(self.console)}"),
            *self._shares(),
            *self._cards(),
        ]

    def _shares(self) -> list[str]:
        if self.cwd is None:
            return []
        return [*_share(0, "root", "/", ",readonly=on"), *_share(1, "cwd", self.cwd, "")]

    def _cards(self) -> list[str]:
        """Return the options of the network cards, which are functions 3 and above of the slot."""
        options = []
        for function, card in enumerate(self.cards, 3):
            options += ["-netdev", f"stream,id={card.name},addr.type=fd,addr.str={card.fd}"]
            device = f"virtio-net-pci,netdev={card.name},mac={card.mac},romfile="
            options += ["-device", f"{device},{_SLOT}.{function}"]
        return options

    def argv_with_channels(self, qemu: str, agent: int, monitor: int) -> list[str]:
        """Return QEMU's command line, with the channels to the guest's agent and to the monitor.

        `agent` and `monitor` are descriptors of sockets.
        """
        return [
            *self.argv(qemu),
            *("-device", f"virtio-serial-pci,{_SLOT}.2"),
            *("-chardev", f"socket,id=lab,fd={agent}"),
            *("-device", f"virtserialport,chardev=lab,name={PORT_NAME}"),
            *("-chardev", f"socket,id=monitor,fd={monitor}"),
            *("-mon", "chardev=monitor,mode=control"),
        ]


def _share(function: int, tag: str, path: str, options: str) -> list[str]:
    """Return the options that share a directory of the host with the guest.

    `remap` keeps inode numbers unique across the host's mounts.
    """
    local = f"local,id={tag},path={_quoted(path)},security_model=none,multidevs=remap{options}"
    device = f"virtio-9p-pci,fsdev={tag},mount_tag={tag},{_SLOT}.{function}"
    return ["-fsdev", local, "-device", device]


def _quoted(value: str) -> str:
    """Escape a value for QEMU's option syntax: commas are doubled."""
    return value.replace(",", ",,")
