"""Download Debian's kernel and unpack it into the cache.

The packages are not installed: nothing appears in /boot, the boot loader's configuration stays as
it is, and deleting the cache removes everything.

Debian's releases divide the kernel differently into packages. So apt resolves the dependencies: it
simulates an installation on an empty system.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import packages, vmlinux
from .errors import LabError
from .kernel import IMAGE, kernels_dir
from .steps import command, pipeline, step

__all__ = ["VERSION_FILE", "Package", "download", "has_newer", "same_source", "unpack_kernel"]

KERNEL = "linux-image-amd64"
VERSION_FILE = "version"

# The programs that build modules. Those of a later version may build them too, and the later
# version is often there first: Debian signs the kernel after it has built everything.
_KBUILD = "linux-kbuild-"

# A machine with soft RDMA devices does not use these files; they are more than half of the kernel.
_EXCLUDED = (
    "kernel/sound",
    "kernel/drivers/gpu",
    "kernel/drivers/media",
    "kernel/drivers/net/ethernet",
    "kernel/drivers/net/wireless",
    "kernel/drivers/iio",
    "kernel/drivers/staging",
    "kernel/drivers/hwmon",
    "kernel/drivers/scsi",
    "kernel/drivers/usb",
    "./usr/share",
)


@dataclass(frozen=True)
class Package:
    """A package in apt's lists."""

    name: str
    version: str


def unpack_kernel() -> str:
    """Download and unpack the distribution's current kernel. Return its release.

    Raises: LabError if apt is missing, or if the kernel cannot be downloaded or unpacked.
    """
    if not packages.has_apt():
        raise LabError(
            "the lab needs a kernel with the modules rdma_rxe and siw: "
            "install a kernel and its modules"
        )
    wanted = same_source(KERNEL)
    kernels_dir().mkdir(parents=True, exist_ok=True)
    with (
        step(f"unpacking Debian's kernel {wanted[-1].version} into the cache"),
        tempfile.TemporaryDirectory(dir=kernels_dir(), prefix=".partial-") as scratch,
    ):
        release = _unpack(Path(scratch), wanted)
        target = kernels_dir() / release
        if target.exists():  # an older version of the same release
            os.rename(target, Path(scratch) / "replaced")
        os.rename(Path(scratch) / "kernel", target)
    return release


def has_newer(release: str) -> bool:
    """Return True if the distribution's current kernel is not the unpacked one of this release."""
    unpacked = (kernels_dir() / release / VERSION_FILE).read_text()
    current = _with_dependencies(KERNEL)
    return bool(current) and current[-1].version != unpacked


def _unpack(scratch: Path, wanted: Sequence[Package]) -> str:
    """Unpack the packages of a kernel to the directory `kernel` in `scratch`. Return its release.

    The kernel is in /boot or beside its modules. These are in /lib/modules or /usr/lib/modules.
    """
    top = scratch / "kernel"
    top.mkdir()
    failure = "the packages of the kernel could not be unpacked"
    for archive in download(wanted, scratch):
        exclude = [f"--exclude={part}" for part in _EXCLUDED]
        unpack = ["tar", "-x", "-C", str(top), *exclude]
        pipeline([["dpkg-deb", "--fsys-tarfile", str(archive)], unpack], failure)
    if not (top / "lib").exists():
        (top / "lib").symlink_to("usr/lib")  # as in the file system of a current Debian
    found = list(top.glob("lib/modules/*/modules.builtin"))
    if len(found) != 1:
        raise LabError(failure)
    release = found[0].parent.name
    command([packages.program("depmod") or "depmod", "-b", str(top), release], failure)
    places = (top / f"boot/vmlinuz-{release}", found[0].with_name("vmlinuz"))
    image = next((place.read_bytes() for place in places if place.exists()), None)
    if image is None:
        raise LabError(failure)
    (top / IMAGE).write_bytes(vmlinux.extract(image) or image)
    (top / VERSION_FILE).write_text(wanted[-1].version)
    return release


def same_source(package: str) -> list[Package]:
    """Return a package, and the packages that it depends on and that have its version.

    They are built from the same source. The package itself is the last one. The programs that
    build modules belong to the source too, and may have a later version.

    Raises: LabError if apt does not have the package.
    """
    found = _with_dependencies(package)
    if not found:
        packages.refresh()
        found = _with_dependencies(package)
    if not found:
        raise LabError(f"apt has no package {package}")
    version = found[-1].version
    return [one for one in found if one.version == version or one.name.startswith(_KBUILD)]


def _with_dependencies(package: str) -> list[Package]:
    """Return a package and all that it depends on, before it. Empty: apt does not have it."""
    options = ("--simulate", "--no-install-recommends", "--option=Dir::State::status=/dev/null")
    argv = ["apt-get", "install", *options, package]
    simulated = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    return [Package(*words) for words in re.findall(r"^Inst (\S+) \((\S+)", simulated.stdout, re.M)]


def download(wanted: Sequence[Package], into: Path) -> list[Path]:
    """Download packages into a directory. Return the paths of the files.

    Raises: LabError if a download fails even after the package lists were refreshed.
    """
    before = set(into.glob("*.deb"))
    argv = ["apt-get", "download", "-q", *(f"{one.name}={one.version}" for one in wanted)]
    failure = f"apt could not download {' '.join(one.name for one in wanted)}"
    try:
        command(argv, failure, cwd=into)
    except LabError:
        packages.refresh()
        command(argv, failure, cwd=into)
    return sorted(set(into.glob("*.deb")) - before)
