"""Examine everything, in the order in which a connection needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

from aiordma.doctor.finding import Finding
from aiordma.doctor.host import (
    examine_device_files,
    examine_libraries,
    examine_locked_memory,
    examine_modules,
)
from aiordma.doctor.ports import (
    Port,
    device_names,
    examine_devices,
    examine_flow_control,
    examine_ibacm,
    examine_ports,
    examine_providers,
    ports_of,
)
from aiordma.doctor.self_test import self_tests
from aiordma.errors import VerbsError
from aiordma.rdmacm import DeviceAddress, device_addresses
from aiordma.rdmacm.devices import DeviceReference
from aiordma.verbs import Device

ROOT = Path("/")


async def examine(seconds: float, root: Path = ROOT) -> AsyncIterator[Finding]:
    """Yield the result of each check. The last ones, the self-tests, take some seconds.

    `seconds` is the limit for the self-test of each device. `root` is the directory that stands for
    / where files of the kernel are read.
    """
    for finding in _examine_host(root):
        yield finding
    names = device_names(root)
    ports = [port for name in names for port in ports_of(root, name)]
    addresses = _addresses()
    reference = _open_devices()
    try:
        opened = {device.name: device for device in (reference.devices if reference else ())}
        for finding in _examine_devices(root, names, ports, opened, addresses):
            yield finding
    finally:
        if reference is not None:
            reference.close()
    active = {(port.device, port.number) for port in ports if port.is_active}
    usable = [one for one in addresses if (one.device, one.port_num) in active]
    async for finding in self_tests(sorted(opened), usable, seconds):
        yield finding


def _examine_host(root: Path) -> Iterator[Finding]:
    yield examine_libraries()
    yield from examine_modules(root)
    yield from examine_device_files(root)
    yield examine_locked_memory()


def _examine_devices(
    root: Path,
    names: Sequence[str],
    ports: Sequence[Port],
    opened: Mapping[str, Device],
    addresses: Sequence[DeviceAddress],
) -> Iterator[Finding]:
    yield from examine_devices(names, opened)
    if not names:
        yield examine_providers(root)
    yield from examine_ports(ports, opened, addresses)
    for port in ports:
        yield from examine_flow_control(root, port)
    yield from examine_ibacm(root, ports)


def _addresses() -> list[DeviceAddress]:
    """Return the addresses of the devices; none if the libraries have no device."""
    try:
        return device_addresses()
    except VerbsError:
        return []


def _open_devices() -> DeviceReference | None:
    try:
        return DeviceReference()
    except VerbsError:
        return None
