"""The siw driver, built for a kernel that comes without it (Debian's does).

Source and headers are of exactly the kernel's version, downloaded and taken apart like the kernel.
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
    """Build siw.ko for the unpacked kernel of this release and put it beside it.

    Raises: LabError when it cannot be built.
    """
    packages.ensure(packages.BUILD_NEEDS)
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
    """The driver's source and the kernel's build directory."""
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
    """("6.1", "amd64") of "6.1.0-56-amd64"."""
    match = re.match(r"(\d+\.\d+).*-(\w+)$", release)
    if match is None:
        raise LabError(f"the kernel's name {release} does not say which source it is built from")
    return match[1], match[2]


def _relocate(makefile: Path, scratch: Path) -> None:
    """The headers include one another by absolute path."""
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{scratch}/usr/src/"))


def _unpack_source(scratch: Path, series: str, version: str) -> Path:
    """Only the driver's directory, out of the archive in the package."""
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
