"""Soft RDMA devices that go and come back under the tests, and are put back in any case."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import blocking
import loops
from helpers import PATIENCE

from aiordma import RdmaError
from aiordma.rdmacm import DeviceAddress, device_addresses

DRIVERS = {"IB": "rxe", "IWARP": "siw"}


@dataclass
class SoftDevice:
    """A device made by `rdma link add`, which can be removed, and made again."""

    name: str
    driver: str
    netdev: str
    hosts: frozenset[str]
    removal: subprocess.Popen[bytes] | None = field(default=None)

    @classmethod
    def behind(cls, address: DeviceAddress) -> SoftDevice:
        return cls(
            address.device,
            DRIVERS[address.transport.name],
            address.interface,
            hosts_of(address.device),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[SoftDevice]:
        """Have it be there again after the block."""
        try:
            yield self
        finally:
            self.restore()

    def start_removing(self) -> subprocess.Popen[bytes]:
        """`rdma link delete`, which waits until every process has let go of the device."""
        with blocking.excused():
            self.removal = subprocess.Popen(["rdma", "link", "delete", self.name])
        return self.removal

    async def removed(self) -> None:
        """Wait until that is done."""
        await loops.to_thread(self._wait_removed)

    def _wait_removed(self) -> None:
        assert self.removal is not None
        try:
            assert self.removal.wait(PATIENCE) == 0
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} is still held:\n{holders()}") from None

    async def comes_back(self) -> None:
        await loops.to_thread(self.restore)

    def restore(self) -> None:
        """Be there, at the same addresses, whatever has happened. Blocks."""
        if self.removal is not None:
            self._wait_removed()
            self.removal = None
        self.set_link("up")
        if self.name not in links():
            command = ["rdma", "link", "add", self.name, "type", self.driver, "netdev", self.netdev]
            subprocess.run(command, check=True)
        deadline = time.monotonic() + PATIENCE
        while hosts_of(self.name) != self.hosts:
            assert time.monotonic() < deadline, f"{self.name} did not come back"
            time.sleep(0.1)

    def set_link(self, state: str) -> None:
        """Take the interface under the device down, or up again; it keeps its addresses."""
        Path(f"/proc/sys/net/ipv6/conf/{self.netdev}/keep_addr_on_down").write_text("1")
        subprocess.run(["ip", "link", "set", self.netdev, state], check=True)


def holders() -> str:
    """What the kernel knows of the use of devices, and which processes have one open."""
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
    shown = subprocess.run(["rdma", "-j", "link"], capture_output=True, check=True, text=True)
    return {link["ifname"]: link for link in json.loads(shown.stdout)}


def hosts_of(device: str) -> frozenset[str]:
    with contextlib.suppress(RdmaError):
        return frozenset(found.host for found in device_addresses() if found.device == device)
    return frozenset()


def one_per_device() -> list[DeviceAddress]:
    """An IPv4 address of each device that is there now."""
    found = {one.device: one for one in device_addresses() if ":" not in one.host}
    return list(found.values())
