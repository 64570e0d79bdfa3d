"""Place: where the benchmark runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from aiordma.bench.errors import BenchError
from aiordma.errors import RdmaError
from aiordma.rdmacm import DeviceAddress, device_addresses

_FIRST_PORT = 18000
_SPREAD = 8000


def _ports() -> Iterator[int]:
    """Ports below those that the kernel gives away, from somewhere in the middle."""
    return count(_FIRST_PORT + os.getpid() * 37 % _SPREAD)


@dataclass(frozen=True)
class Place:
    """The server's address, this machine's device, and how to run a command at the server's."""

    host: str
    device: str
    on_server: Sequence[str] = ()
    limit: float = 600.0
    """Seconds that a client may take."""
    _port: Iterator[int] = field(default_factory=_ports)

    def next_port(self) -> int:
        """A port that no run before had."""
        return next(self._port)

    def at_server(self, command: Sequence[str]) -> list[str]:
        """The command, to be run where the server is."""
        return [*self.on_server, *command]


def find_place(host: str | None, on_server: Sequence[str]) -> Place:
    """Look for this machine's device. `host` is one of its addresses by default.

    Raises:
        BenchError: there is none, or `host` is another machine's and nothing says how to run
            servers there.
    """
    addresses = _addresses()
    if host is None:
        return Place(addresses[0].host, addresses[0].device, on_server)
    names = _resolved(host)
    here = next((found for found in addresses if found.host in names), None)
    if here is None and not on_server:
        raise BenchError(
            f"no RDMA device of this machine has the address {host}: "
            "--on-server says how to run the servers on another"
        )
    return Place(host, (here or addresses[0]).device, on_server)


def _resolved(host: str) -> set[str]:
    """The addresses of a name."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise BenchError(f"{host}: {error.strerror}") from error


def _addresses() -> list[DeviceAddress]:
    """The addresses of this machine's devices, IPv4 first."""
    try:
        found = device_addresses()
    except RdmaError as error:
        raise BenchError(str(error)) from error
    if not found:
        raise BenchError("no RDMA device of this machine has an IP address")
    return sorted(found, key=lambda address: ":" in address.host)


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
