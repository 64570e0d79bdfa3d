"""A fresh minimal Debian system in a directory, in which commands run under chroot."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.matrix.log import Done, checked, logged

__all__ = ["BUILD", "ROOT", "System", "is_current", "passed_on", "wheel_file"]

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "matrix"
MIRROR = "http://deb.debian.org/debian"
MAX_AGE = 24 * 60 * 60.0
"""Seconds after which a base is made anew, so that its packages are the current ones."""
CA_FILE = "/etc/ca-of-the-host.crt"
"""The file in the system with the certificates of this machine: pip needs those of a proxy."""
PROXIES = {"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"}


def wheel_file() -> Path:
    """Return the wheel in `dist` that is for this processor."""
    (path,) = (ROOT / "dist").glob(f"*_{platform.machine()}.whl")
    return path


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of proxies and of pip that commands in a system need.

    PIP_CERT names the copy of its file. Variables that name other files are left out, because the
    system does not have these files.
    """
    found = {name: value for name, value in environ.items() if name.lower() in PROXIES}
    for name, value in environ.items():
        if name.startswith("PIP_") and not value.startswith(("/", "~", ".", "file:")):
            found[name] = value
    if "PIP_CERT" in environ:
        found["PIP_CERT"] = CA_FILE
    return found


def is_current(base: Path) -> bool:
    """Return True if the base exists and is not too old."""
    return base.exists() and time.time() - base.stat().st_mtime < MAX_AGE


class System:
    """A fresh minimal Debian system, in a directory of its own."""

    def __init__(self, suite: str, log: Path) -> None:
        """Make the system: a copy of a base, which debootstrap makes."""
        self.top = BUILD / suite
        self.log = log
        base = BUILD / f"base-{suite}"
        if not is_current(base):
            self._make_base(suite, base)
        shutil.rmtree(self.top, ignore_errors=True)
        subprocess.run(["cp", "--archive", base, self.top], check=True)
        shutil.copy("/etc/resolv.conf", self.top / "etc/resolv.conf")
        if "PIP_CERT" in os.environ:
            shutil.copy(os.environ["PIP_CERT"], f"{self.top}{CA_FILE}")
        # A mirror of unstable can be older than its Release file allows.
        settings = self.top / "etc/apt/apt.conf.d/99matrix"
        settings.write_text('Acquire::Check-Valid-Until "false";\n')
        checked(self.run("apt-get update --quiet"))

    def _make_base(self, suite: str, base: Path) -> None:
        partial = base.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", suite, str(partial), MIRROR]
        checked(logged(command, self.log))
        shutil.rmtree(base, ignore_errors=True)
        partial.rename(base)
        os.utime(base)

    def run(self, script: str) -> Done:
        """Run a shell script as root in the system."""
        variables = {
            "HOME": "/root",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "DEBIAN_FRONTEND": "noninteractive",
            "CI": "true",
            **passed_on(os.environ),
        }
        words = [f"{name}={value}" for name, value in variables.items()]
        inside = ["env", "-i", *words, "sh", "-ec", script]
        enter = (
            f"cd {shlex.quote(str(self.top))}\n"
            "mount --rbind /dev dev; mount -t proc proc proc; mount -t sysfs sysfs sys\n"
            f"exec chroot . {shlex.join(inside)}"
        )
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", enter]
        return logged(namespaces, self.log, title=script)
