"""Soft RDMA devices that tests remove and add again. They are always restored after the test."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blocking
import loops
import machine
import pytest
from helpers import TIME_LIMIT, run_program

from aiordma import RdmaError
from aiordma.rdmacm import DeviceAddress, device_addresses

DRIVERS = {"IB": "rxe", "IWARP": "siw"}


@dataclass
class SoftDevice:
    """A device created by `rdma link add`, which a test can remove and add again."""

    name: str
    driver: str
    netdev: str
    hosts: frozenset[str]
    removal: subprocess.Popen[bytes] | None = field(default=None)

    @classmethod
    def of_address(cls, address: DeviceAddress) -> SoftDevice:
        """Return the device that has this address."""
        made = cls if machine.simulated is None else SimulatedDevice
        return made(
            address.device,
            DRIVERS[address.transport.name],
            address.interface,
            hosts_of(address.device) if machine.simulated is None else frozenset(),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[SoftDevice]:
        """Restore the device after the block."""
        try:
            yield self
        finally:
            self.restore()

    def start_removing(self) -> None:
        """Start `rdma link delete`, which waits until every process has closed the device."""
        with blocking.allowed():
            self.removal = subprocess.Popen(["rdma", "link", "delete", self.name])

    async def wait_removed(self) -> None:
        """Wait until the removal is complete."""
        await loops.to_thread(self._wait_removed)

    def _wait_removed(self) -> None:
        assert self.removal is not None
        try:
            assert self.removal.wait(TIME_LIMIT) == 0
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} is still in use:\n{users_of_devices()}") from None

    async def add_again(self) -> None:
        """Wait for the removal, and add the device again, with the same addresses."""
        await loops.to_thread(self.restore)

    def restore(self) -> None:
        """Make the device exist again with its addresses. Blocks."""
        if self.removal is not None:
            self._wait_removed()
            self.removal = None
        self.set_link("up")
        if self.name not in links():
            command = ["rdma", "link", "add", self.name, "type", self.driver, "netdev", self.netdev]
            run_program(*command)
        deadline = time.monotonic() + TIME_LIMIT
        while hosts_of(self.name) != self.hosts:
            assert time.monotonic() < deadline, f"{self.name} did not get its addresses again"
            time.sleep(0.1)

    def set_link(self, state: str) -> None:
        """Set the device's network interface "up" or "down". It keeps its addresses."""
        Path(f"/proc/sys/net/ipv6/conf/{self.netdev}/keep_addr_on_down").write_text("1")
        run_program("ip", "link", "set", self.netdev, state)


class SimulatedDevice(SoftDevice):
    """The same for a device of the current simulation."""

    @property
    def _cm(self) -> Any:
        from simulator import world

        assert world.current is not None
        return world.current.cm

    @property
    def _device(self) -> Any:
        return next(one for one in reversed(self._cm.devices) if one.name == self.name)

    def start_removing(self) -> None:
        self._cm.remove_device(self._device)

    async def wait_removed(self) -> None:
        await loops.until(lambda: self._device.removed, "the device to be removed")

    async def add_again(self) -> None:
        self._cm.add_again(self._device)

    def restore(self) -> None:
        pass  # each test has a simulation of its own

    def set_link(self, state: str) -> None:
        self._cm.set_link(self._device, is_up=state == "up")


@pytest.fixture
def device(address: DeviceAddress) -> Iterator[SoftDevice]:
    """Yield the device at `address`. It is restored, with its link up, after the test."""
    with SoftDevice.of_address(address).restored() as soft:
        yield soft


def users_of_devices() -> str:
    """Return the kernel's list of RDMA resources, and the processes that have a device open."""
    resources = [
        subprocess.run(["rdma", "resource", "show", *kind], capture_output=True, text=True).stdout
        for kind in ([], ["qp"], ["cm_id"], ["mr"], ["ctx"])
    ]
    files = [(file, os.path.realpath(file)) for file in Path("/proc").glob("[0-9]*/fd/*")]
    opened = [f"{file}: {target}" for file, target in files if "infiniband" in target]
    waiting = Path("/proc/self/task").glob("*/wchan")
    threads = [f"thread {thread.parent.name}: {thread.read_text()}" for thread in waiting]
    return "\n".join([*resources, *opened, *threads])


def links() -> dict[str, object]:
    """Return what `rdma link` prints for each device, by its name."""
    return {link["ifname"]: link for link in json.loads(run_program("rdma", "-j", "link"))}


def hosts_of(device: str) -> frozenset[str]:
    """Return the addresses of a device; none if it does not exist."""
    with contextlib.suppress(RdmaError):
        return frozenset(found.host for found in device_addresses() if found.device == device)
    return frozenset()


def one_per_device() -> list[DeviceAddress]:
    """Return an IPv4 address of each device that exists now."""
    found = {one.device: one for one in device_addresses() if ":" not in one.host}
    return list(found.values())
