"""Build the siw driver for a kernel that does not include it, as Debian's does not.

Source and headers have exactly the kernel's version. They are downloaded and unpacked like the
kernel.
"""

import os
import re
import tempfile
from pathlib import Path

from . import packages
from .debian import VERSION_FILE, download
from .errors import LabError
from .kernel import kernels_dir
from .steps import command, pipeline, step

__all__ = ["build", "series_and_flavour"]

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
            source, headers = _fetch(scratch, release, (top / VERSION_FILE).read_text())
        with step("building the siw driver"):
            _make(source, headers)
            module = scratch / "siw.ko"
            command(
                ["strip", "-g", "-o", str(module), str(source / "siw.ko")],
                "the siw driver could not be stripped",
            )
            os.rename(module, top / "siw.ko")


def _fetch(scratch: Path, release: str, version: str) -> tuple[Path, Path]:
    """Return the directories of the driver's source and of the kernel's headers."""
    series, flavour = series_and_flavour(release)
    common = release.removesuffix(flavour) + "common"
    wanted = (f"linux-headers-{release}", f"linux-headers-{common}", f"linux-kbuild-{series}")
    failure = f"the headers of the kernel {release} could not be unpacked"
    for archive in download([f"{package}={version}" for package in wanted], scratch):
        command(["dpkg-deb", "-x", str(archive), str(scratch)], failure)
    headers = scratch / "usr/src" / f"linux-headers-{release}"
    _relocate(headers / "Makefile", scratch)
    return _unpack_source(scratch, series, version), headers


def series_and_flavour(release: str) -> tuple[str, str]:
    """Split a kernel's release: "6.1.0-56-amd64" gives ("6.1", "amd64").

    Raises: LabError if it does not have this form.
    """
    match = re.match(r"(\d+\.\d+).*-(\w+)$", release)
    if match is None:
        raise LabError(
            f"cannot tell from the release {release} which source the kernel is built from"
        )
    return match[1], match[2]


def _relocate(makefile: Path, scratch: Path) -> None:
    """Correct the absolute paths by which the headers include each other."""
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{scratch}/usr/src/"))


def _unpack_source(scratch: Path, series: str, version: str) -> Path:
    """Unpack the driver's directory from the archive in the source package. Return its path."""
    name = f"linux-source-{series}"
    for archive in download([f"{name}={version}"], scratch):
        pipeline(
            [
                ["dpkg-deb", "--fsys-tarfile", str(archive)],
                ["tar", "-xO", f"./usr/src/{name}.tar.xz"],
                ["tar", "-xJ", "-C", str(scratch), f"{name}/{_DRIVER}"],
            ],
            "the kernel's source could not be unpacked",
        )
    return scratch / name / _DRIVER


def _make(source: Path, headers: Path) -> None:
    argv = ["make", "-C", str(headers), f"M={source}", "CONFIG_RDMA_SIW=m", "CC=gcc", "modules"]
    command(argv, "the siw driver could not be built")
