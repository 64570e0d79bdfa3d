"""The programs the lab needs, and the distribution's packages they come from."""

import os
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError
from .steps import command, step

__all__ = ["BUILD_NEEDS", "RUN_NEEDS", "Need", "busybox", "ensure", "has_apt", "missing", "program"]

# Debian keeps administrators' programs off the PATH of ordinary users.
_ADMINISTRATORS_PATH = ("/usr/local/sbin", "/usr/sbin", "/sbin")


@dataclass(frozen=True)
class Need:
    """A program, the Debian package that has it, and how to see that it is there."""

    what: str
    package: str
    found: Callable[[], bool]


def program(name: str) -> str | None:
    """Where this program is."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_ADMINISTRATORS_PATH])
    return shutil.which(name, path=path)


def busybox() -> Path:
    """The statically linked busybox.

    Raises: LabError when there is none.
    """
    path = program("busybox")
    if path is None or not _is_static(Path(path)):
        raise LabError("a statically linked busybox is not installed: run `aiordma lab setup`")
    return Path(path)


def _is_static(path: Path) -> bool:
    """Whether an ELF program names no interpreter: in an initramfs there would be none."""
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return False
    table, size, count = _program_headers(data)
    kinds = (struct.unpack_from("<I", data, table + i * size)[0] for i in range(count))
    return 3 not in kinds  # PT_INTERP


def _program_headers(data: bytes) -> tuple[int, int, int]:
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


RUN_NEEDS = (
    Need("QEMU (qemu-system-x86_64)", "qemu-system-x86", _has("qemu-system-x86_64")),
    Need("a statically linked busybox", "busybox-static", _has_busybox),
    Need("kmod (modprobe, depmod)", "kmod", _has("depmod")),
    Need("iproute2 (ip)", "iproute2", _has("ip")),
    Need("iproute2 (rdma)", "iproute2", _has("rdma")),
)
BUILD_NEEDS = (
    Need("a C compiler (gcc)", "gcc", _has("gcc")),
    Need("make", "make", _has("make")),
    Need("binutils (strip)", "binutils", _has("strip")),
    Need("xz", "xz-utils", _has("xz")),
)


def missing(needs: Sequence[Need]) -> list[Need]:
    """Which of these are not installed."""
    return [need for need in needs if not need.found()]


def has_apt() -> bool:
    """Whether this is a Debian or one of its kin."""
    return program("apt-get") is not None


def ensure(needs: Sequence[Need]) -> None:
    """Install what is missing.

    Raises: LabError naming what is missing when it cannot.
    """
    lacking = missing(needs)
    if not lacking:
        return
    names = ", ".join(need.what for need in lacking)
    if not has_apt():
        raise LabError(f"the lab needs {names}: install it with this system's package manager")
    packages = sorted({need.package for need in lacking})
    with step(f"installing {', '.join(packages)}"):
        _install(packages)
    still = missing(needs)
    if still:
        raise LabError(f"{still[0].what} is missing even after installing {still[0].package}")


def refresh() -> None:
    """Bring apt's lists up to date.

    Raises: LabError when that fails.
    """
    argv = [*_as_root(), "apt-get", "update", "-q"]
    command(argv, "apt could not refresh its package lists")


def _install(packages: Sequence[str]) -> None:
    refresh()
    options = ("install", "-y", "-q", "--no-install-recommends")
    argv = [*_as_root(), "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *options, *packages]
    command(argv, f"apt could not install {' '.join(packages)}")


def _as_root() -> list[str]:
    if os.geteuid() == 0:
        return []
    if program("sudo") is None:
        raise LabError("installing packages needs root or sudo, and there is neither")
    return ["sudo"]
