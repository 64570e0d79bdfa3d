"""Download Debian's kernel and unpack it into the cache.

The packages are not installed: nothing appears in /boot, the boot loader's configuration stays as
it is, and deleting the cache removes everything.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import packages, vmlinux
from .errors import LabError
from .kernel import IMAGE, kernels_dir
from .steps import command, pipeline, step

__all__ = ["VERSION_FILE", "download", "unpack_kernel"]

VERSION_FILE = "version"

# A machine with soft RDMA devices does not use these modules; they are half of all modules.
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
)


def unpack_kernel() -> str:
    """Download and unpack the distribution's current kernel. Return its release.

    Raises: LabError if apt is missing, or if the kernel cannot be downloaded or unpacked.
    """
    if not packages.has_apt():
        raise LabError(
            "the lab needs a kernel with the modules rdma_rxe and siw: "
            "install a kernel and its modules"
        )
    release, version = current_kernel()
    kernels_dir().mkdir(parents=True, exist_ok=True)
    with (
        step(f"unpacking Debian's kernel {release} into the cache"),
        tempfile.TemporaryDirectory(dir=kernels_dir(), prefix=".partial-") as scratch,
    ):
        _unpack(Path(scratch), release, version)
        os.rename(Path(scratch) / "kernel", kernels_dir() / release)
    return release


def _unpack(scratch: Path, release: str, version: str) -> None:
    top = scratch / "kernel"
    top.mkdir()
    failure = f"the package of the kernel {release} could not be unpacked"
    for archive in download([f"linux-image-{release}={version}"], scratch):
        exclude = [f"--exclude=./lib/modules/{release}/{part}" for part in _EXCLUDED]
        unpack = ["tar", "-x", "-C", str(top), *exclude, "./lib", "./boot"]
        pipeline([["dpkg-deb", "--fsys-tarfile", str(archive)], unpack], failure)
    depmod = packages.program("depmod") or "depmod"
    command([depmod, "-b", str(top), release], failure)
    image = (top / f"boot/vmlinuz-{release}").read_bytes()
    (top / IMAGE).write_bytes(vmlinux.extract(image) or image)
    (top / VERSION_FILE).write_text(version)


def current_kernel() -> tuple[str, str]:
    """Return the release and the package version of the distribution's current kernel.

    Raises: LabError if apt has no package linux-image-amd64.
    """
    found = _kernel_of("linux-image-amd64")
    if found is None:
        packages.refresh()
        found = _kernel_of("linux-image-amd64")
    if found is None:
        raise LabError(
            "apt has no package linux-image-amd64: "
            "install a kernel with the modules rdma_rxe and siw"
        )
    return found


def _kernel_of(package: str) -> tuple[str, str] | None:
    """Return the release and version of the kernel that a meta-package depends on.

    None: apt does not have the package.
    """
    argv = ["apt-cache", "show", "--no-all-versions", package]
    text = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    match = re.search(r"^Depends: linux-image-(\S+) \(= ([^)]+)\)", text, re.MULTILINE)
    return (match[1], match[2]) if match else None


def download(wanted: Sequence[str], into: Path) -> list[Path]:
    """Download packages (`name=version`) into a directory. Return the paths of the files.

    Raises: LabError if a download fails even after the package lists were refreshed.
    """
    before = set(into.glob("*.deb"))
    argv = ["apt-get", "download", "-q", *wanted]
    failure = f"apt could not download {' '.join(wanted)}"
    try:
        command(argv, failure, cwd=into)
    except LabError:
        packages.refresh()
        command(argv, failure, cwd=into)
    return sorted(set(into.glob("*.deb")) - before)
