"""The environment of a run: the server's host, ports, this machine, its device and its versions."""

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

PACKAGES = ("librdmacm1", "libibverbs1", "perftest", "rdmacm-utils", "python3-pyverbs")
MODULES = ("aiordma", "uvloop", "trio")
_FIRST_PORT = 18000
_PORT_RANGE = 8000


def _ports() -> Iterator[int]:
    """Yield ports, one after another, from below the kernel's ephemeral ports.

    The first depends on the process id: two benchmarks on one machine seldom use the same ports.
    """
    return count(_FIRST_PORT + os.getpid() * 37 % _PORT_RANGE)


@dataclass(frozen=True)
class Environment:
    """The server's address, this machine's device, and the prefix of the servers' commands."""

    host: str
    device: str
    on_server: Sequence[str] = ()
    client_timeout: float = 600.0
    """The seconds for all runs of a client: see run_pair(). Then it is killed."""
    _port: Iterator[int] = field(default_factory=_ports)

    def next_port(self) -> int:
        """Return a port that no earlier run used."""
        return next(self._port)

    def server_command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on the server's machine."""
        return [*self.on_server, *command]


def find_environment(host: str | None, on_server: Sequence[str]) -> Environment:
    """Find the RDMA device of this machine. `host` is by default one of the device's addresses.

    Raises:
        BenchError: this machine has no RDMA device with an address, or `host` is an address of
            another machine and `on_server` is empty.
    """
    addresses = _addresses()
    if host is None:
        return Environment(addresses[0].host, addresses[0].device, on_server)
    names = _resolved(host)
    local = next((found for found in addresses if found.host in names), None)
    if local is None and not on_server:
        raise BenchError(
            f"no RDMA device of this machine has the address {host}: "
            "to run the servers on another machine, use --on-server"
        )
    return Environment(host, (local or addresses[0]).device, on_server)


def _resolved(host: str) -> set[str]:
    """Return the addresses of a host name."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise BenchError(f"{host}: {error.strerror}") from error


def _addresses() -> list[DeviceAddress]:
    """Return the addresses of this machine's devices, IPv4 first."""
    try:
        found = device_addresses()
    except RdmaError as error:
        raise BenchError(str(error)) from error
    if not found:
        raise BenchError("no RDMA device of this machine has an IP address")
    return sorted(found, key=lambda address: ":" in address.host)


# --- for the report ---


def machine(environment: Environment) -> dict[str, object]:
    """Return the description of this machine for the JSON report."""
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "device": environment.device,
        "host": environment.host,
        "on_server": list(environment.on_server),
    }


def versions() -> dict[str, str]:
    """Return the versions of those of MODULES and PACKAGES that are installed."""
    found = {name: _module_version(name) for name in MODULES}
    found |= {name: _package_version(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


def _module_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _package_version(name: str) -> str:
    """Return the version of a Debian package; "" if there is none, or no dpkg."""
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
