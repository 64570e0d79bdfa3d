"""Examine everything, in the order in which a connection needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from aiordma.doctor.finding import Finding
from aiordma.doctor.host import (
    examine_device_files,
    examine_libraries,
    examine_locked_memory,
    examine_modules,
)
from aiordma.doctor.ports import (
    device_names,
    examine_devices,
    examine_flow_control,
    examine_ibacm,
    examine_ports,
    ports_of,
)
from aiordma.doctor.self_test import self_tests
from aiordma.errors import VerbsError
from aiordma.rdmacm import DeviceAddress, device_addresses
from aiordma.rdmacm.devices import DeviceReference

ROOT = Path("/")


async def examine(root: Path = ROOT) -> AsyncIterator[Finding]:
    """Yield the result of each check. The last ones, the self-tests, take some seconds.

    `root` is the directory that stands for / where files of the kernel are read.
    """
    addresses = _addresses()
    for finding in _examine_host(root, addresses):
        yield finding
    async for finding in self_tests(addresses):
        yield finding


def _examine_host(root: Path, addresses: list[DeviceAddress]) -> Iterator[Finding]:
    yield examine_libraries()
    yield from examine_modules(root)
    yield from examine_device_files(root)
    yield examine_locked_memory()
    names = device_names(root)
    reference = _open_devices()
    try:
        opened = {device.name: device for device in (reference.devices if reference else ())}
        yield from examine_devices(names, opened)
        ports = [port for name in names for port in ports_of(root, name)]
        yield from examine_ports(ports, opened, addresses)
        for port in ports:
            yield from examine_flow_control(root, port)
        yield from examine_ibacm(root, ports)
    finally:
        if reference is not None:
            reference.close()


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
