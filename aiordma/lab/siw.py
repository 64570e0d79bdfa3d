"""Build the siw driver for a kernel that does not include it, as Debian's does not.

Source and headers have exactly the kernel's version. They are downloaded and unpacked like the
kernel.
"""

import os
import tempfile
from pathlib import Path

from . import packages
from .debian import VERSION_FILE, Package, download, same_source
from .kernel import kernels_dir
from .steps import command, pipeline, step

__all__ = ["build"]

_DRIVER = "drivers/infiniband/sw/siw"


def build(release: str) -> None:
    """Build siw.ko for the unpacked kernel of this release, and put it in the kernel's directory.

    Raises: LabError if it cannot be built.
    """
    packages.ensure(packages.BUILD_REQUIREMENTS)
    top = kernels_dir() / release
    with tempfile.TemporaryDirectory(dir=kernels_dir(), prefix=".partial-") as name:
        scratch = Path(name)
        with step(f"downloading source and headers of the kernel {release}"):
            headers = _fetch_headers(scratch, release)
            source = _fetch_source(scratch, (top / VERSION_FILE).read_text())
        with step("building the siw driver"):
            _make(source, headers)
            module = scratch / "siw.ko"
            command(
                ["strip", "-g", "-o", str(module), str(source / "siw.ko")],
                "the siw driver could not be stripped",
            )
            os.rename(module, top / "siw.ko")


def _fetch_headers(scratch: Path, release: str) -> Path:
    """Download and unpack the kernel's headers. Return their directory."""
    name = f"linux-headers-{release}"
    failure = f"the headers of the kernel {release} could not be unpacked"
    for archive in download(same_source(name), scratch):
        command(["dpkg-deb", "-x", str(archive), str(scratch)], failure)
    headers = scratch / "usr/src" / name
    _relocate(headers / "Makefile", scratch)
    return headers


def _fetch_source(scratch: Path, version: str) -> Path:
    """Download and unpack the driver's source of this version. Return its directory."""
    found = same_source("linux-source")[0]
    wanted = Package(found.name, version)
    for archive in download([wanted], scratch):
        pipeline(
            [
                ["dpkg-deb", "--fsys-tarfile", str(archive)],
                ["tar", "-xO", f"./usr/src/{found.name}.tar.xz"],
                ["tar", "-xJ", "-C", str(scratch), f"{found.name}/{_DRIVER}"],
            ],
            "the kernel's source could not be unpacked",
        )
    return scratch / found.name / _DRIVER


def _relocate(makefile: Path, scratch: Path) -> None:
    """Correct the absolute paths by which the headers include each other."""
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{scratch}/usr/src/"))


def _make(source: Path, headers: Path) -> None:
    """Compile the driver, without type information (BTF), which needs another program."""
    settings = ("CONFIG_RDMA_SIW=m", "CONFIG_DEBUG_INFO_BTF_MODULES=", "CC=gcc")
    argv = ["make", "-C", str(headers), f"M={source}", *settings, "modules"]
    command(argv, "the siw driver could not be built")
