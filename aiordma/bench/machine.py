"""What the numbers were measured on, and with which versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

from aiordma.bench.place import Place

PACKAGES = ("librdmacm1", "libibverbs1", "perftest", "rdmacm-utils", "python3-pyverbs")
MODULES = ("aiordma", "uvloop", "trio")


def machine(place: Place) -> dict[str, object]:
    """This machine, as it stands in the JSON report."""
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "device": place.device,
        "host": place.host,
        "on_server": list(place.on_server),
    }


def versions() -> dict[str, str]:
    """The versions of what takes part, as far as they can be found."""
    found = {name: _of_module(name) for name in MODULES}
    found |= {name: _of_package(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


def _of_module(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _of_package(name: str) -> str:
    """The version of a Debian package; "" elsewhere."""
    try:
        done = subprocess.run(
            ["dpkg-query", "--show", "--showformat=${Version}", name],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()
