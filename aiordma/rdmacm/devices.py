"""The devices that librdmacm has open, and their addresses."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma._native import ffi, lib
from aiordma.enums import PortSpace, TransportType
from aiordma.errors import VerbsError, last_error
from aiordma.rdmacm.address import SocketAddress, parse_address
from aiordma.rdmacm.channel import EventChannel
from aiordma.rdmacm.cm_id import CmId
from aiordma.rdmacm.contexts import device_contexts
from aiordma.verbs import Device

_IFADDRS_SIZE = 1 << 20


class DeviceReference:
    """A reference to librdmacm's device contexts: rdma_get_devices(3) and rdma_free_devices(3).

    Without one, the context of a removed device is closed together with the last id on it. With
    one, the removal waits. So close it when you are notified of the removal.
    """

    __slots__ = ("devices",)

    def __init__(self) -> None:
        """Open every device not open yet, which takes a while the first time.

        Raises:
            VerbsError: ENODEV (no RDMA device).
        """
        self.devices: list[Device] = device_contexts.open()
        """The devices whose contexts stay open."""

    def close(self) -> None:
        """Release the devices. Idempotent."""
        devices, self.devices = self.devices, []
        device_contexts.release(devices)


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """An IP address of this machine, and the port of the RDMA device that has it."""

    host: str
    interface: str
    device: str
    transport: TransportType
    port_num: int
    """The port of the device, from 1."""


def interface_addresses() -> list[tuple[str, SocketAddress]]:
    """Return each interface that is up with each of its IP addresses: getifaddrs(3).

    Raises:
        VerbsError: the system call failed.
    """
    text = ffi.new("char[]", _IFADDRS_SIZE)
    length = lib.aiordma_ifaddrs(text, _IFADDRS_SIZE)
    if length < 0:
        raise last_error("getifaddrs")
    lines = ffi.string(text, length).decode().splitlines()
    return [(name, parse_address(host)) for name, host in (line.split(" ", 1) for line in lines)]


def device_addresses() -> list[DeviceAddress]:
    """Return each address of this machine that an RDMA device has. Blocks: opens devices.

    Raises:
        VerbsError: ENODEV (no RDMA device).
    """
    reference = DeviceReference()
    try:
        channel = EventChannel()
        try:
            found = [_on_device(channel, *entry) for entry in interface_addresses()]
        finally:
            channel.close()
    finally:
        reference.close()
    return [entry for entry in found if entry is not None]


def _on_device(
    channel: EventChannel, interface: str, address: SocketAddress
) -> DeviceAddress | None:
    """Return the device that rdma_cm binds an address to; None if there is none."""
    cm_id = CmId.create(channel, PortSpace.TCP)
    try:
        cm_id.bind_addr(address)
        if not cm_id.has_device:
            return None
        device = cm_id.device()
        host, port_num = address.pair[0], cm_id.port_num
        return DeviceAddress(host, interface, device.name, device.transport, port_num)
    except VerbsError:
        return None
    finally:
        cm_id.destroy()
