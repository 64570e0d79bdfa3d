"""The programs that the lab needs, and the distribution's packages that contain them."""

import os
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError
from .steps import command, step

__all__ = [
    "BUILD_REQUIREMENTS",
    "RUN_REQUIREMENTS",
    "ZSTD_REQUIREMENTS",
    "Requirement",
    "busybox",
    "ensure",
    "has_apt",
    "missing",
    "program",
]

# On Debian the PATH of ordinary users does not contain these directories.
_ADMINISTRATORS_PATH = ("/usr/local/sbin", "/usr/sbin", "/sbin")


@dataclass(frozen=True)
class Requirement:
    """A program, the Debian package that contains it, and a check that it is installed."""

    name: str  # for messages
    package: str
    is_installed: Callable[[], bool]


def program(name: str) -> str | None:
    """Return the path of a program; None if it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_ADMINISTRATORS_PATH])
    return shutil.which(name, path=path)


def busybox() -> Path:
    """Return the path of the statically linked busybox.

    Raises: LabError if there is none.
    """
    path = program("busybox")
    if path is None or not _is_static(Path(path)):
        raise LabError("a statically linked busybox is not installed: run `aiordma lab setup`")
    return Path(path)


def _is_static(path: Path) -> bool:
    """Return True if an ELF program needs no dynamic linker: the initramfs contains none."""
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return False
    table, size, count = _program_headers(data)
    kinds = (struct.unpack_from("<I", data, table + i * size)[0] for i in range(count))
    return 3 not in kinds  # PT_INTERP


def _program_headers(data: bytes) -> tuple[int, int, int]:
    """Return the offset, the size of one and the number of an ELF file's program headers."""
    offset = struct.unpack_from("<Q", data, 32)[0]
    size, count = struct.unpack_from("<HH", data, 54)
    return offset, size, count


def _has(name: str) -> Callable[[], bool]:
    return lambda: program(name) is not None


def _has_busybox() -> bool:
    try:
        busybox()
    except LabError:
        return False
    return True


RUN_REQUIREMENTS = (
    Requirement("QEMU (qemu-system-x86_64)", "qemu-system-x86", _has("qemu-system-x86_64")),
    Requirement("a statically linked busybox", "busybox-static", _has_busybox),
    Requirement("kmod (modprobe, depmod)", "kmod", _has("depmod")),
    Requirement("iproute2 (ip)", "iproute2", _has("ip")),
    Requirement("iproute2 (rdma)", "iproute2", _has("rdma")),
)
BUILD_REQUIREMENTS = (
    Requirement("a C compiler (gcc)", "gcc", _has("gcc")),
    Requirement("make", "make", _has("make")),
    Requirement("binutils (strip)", "binutils", _has("strip")),
    Requirement("xz", "xz-utils", _has("xz")),
)
ZSTD_REQUIREMENTS = (Requirement("zstd", "zstd", _has("zstd")),)
"""For a kernel whose modules are compressed with it, as Debian's are not."""


def missing(requirements: Sequence[Requirement]) -> list[Requirement]:
    """Return those of the requirements that are not installed."""
    return [requirement for requirement in requirements if not requirement.is_installed()]


def has_apt() -> bool:
    """Return True if the system has apt, as Debian and its derivatives do."""
    return program("apt-get") is not None


def ensure(requirements: Sequence[Requirement]) -> None:
    """Install the requirements that are missing.

    Raises: LabError that names the missing programs if they cannot be installed.
    """
    needed = missing(requirements)
    if not needed:
        return
    if not has_apt():
        names = ", ".join(requirement.name for requirement in needed)
        raise LabError(f"the lab needs {names}: install it with this system's package manager")
    packages = sorted({requirement.package for requirement in needed})
    with step(f"installing {', '.join(packages)}"):
        _install(packages)
    needed = missing(requirements)
    if needed:
        first = needed[0]
        raise LabError(f"{first.name} is still missing after {first.package} was installed")


def refresh() -> None:
    """Update apt's package lists.

    Raises: LabError if that fails.
    """
    argv = [*_as_root(), "apt-get", "update", "-q"]
    command(argv, "apt could not refresh its package lists")


def _install(packages: Sequence[str]) -> None:
    refresh()
    options = ("install", "-y", "-q", "--no-install-recommends")
    argv = [*_as_root(), "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *options, *packages]
    command(argv, f"apt could not install {' '.join(packages)}")


def _as_root() -> list[str]:
    """Return the words to put before a command so that it runs as root."""
    if os.geteuid() == 0:
        return []
    if program("sudo") is None:
        raise LabError("installing packages needs root or sudo, and neither is available")
    return ["sudo"]
