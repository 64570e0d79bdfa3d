"""The RDMA devices of this machine, for the tests that run on each of them."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma.rdmacm import DeviceAddress


SYSFS = Path("/sys/class/infiniband")

simulated: list[DeviceAddress] | None = None
"""The addresses of simulated devices that the tests run on instead, or None: see simulated.py."""


@functools.cache
def found_addresses() -> list[DeviceAddress]:
    """Return the addresses of all RDMA devices; none if RDMA does not work here.

    Their order and their kinds are the same in each lab, unlike a link-local address.
    """
    if simulated is not None:
        return simulated
    # Not imported above: tests/unit/conftest.py loads the simulator before aiordma.
    from aiordma import RdmaError
    from aiordma.rdmacm import device_addresses

    try:
        return sorted(device_addresses(), key=lambda found: (found.device, kind_of(found)))
    except RdmaError:
        return []


def is_soft(found: DeviceAddress) -> bool:
    """Return True if a device has no hardware: it was created by `rdma link add`, or is simulated.

    Tests can change such a device and its network interface.
    """
    return simulated is not None or not (SYSFS / found.device / "device").exists()


def kind_of(found: DeviceAddress) -> str:
    """Return the kind of an address: "ipv4", "ipv6" or "link-local"."""
    if ":" not in found.host:
        return "ipv4"
    return "link-local" if "%" in found.host else "ipv6"


def kernel_version() -> tuple[int, int]:
    """Return the version of the kernel that has the devices. Simulated ones are like Linux 6.1."""
    if simulated is not None:
        return (6, 1)
    major, minor = platform.release().split(".")[:2]
    return int(major), int(minor)


def one_per_device() -> list[DeviceAddress]:
    """Return the first address of each device, an IPv4 address if it has one."""
    chosen: dict[str, DeviceAddress] = {}
    for address in found_addresses():
        chosen.setdefault(address.device, address)
    return list(chosen.values())
