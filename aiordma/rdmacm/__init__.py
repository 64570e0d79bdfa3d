"""librdmacm, one class a noun, faithful to its man pages. Nothing here touches an event loop."""

from aiordma.rdmacm.address import SocketAddress, parse_address
from aiordma.rdmacm.channel import EventChannel
from aiordma.rdmacm.cm_id import CmId, ConnectionParameters
from aiordma.rdmacm.devices import (
    DeviceAddress,
    DeviceReference,
    device_addresses,
    interface_addresses,
)
from aiordma.rdmacm.event import CmEvent

__all__ = [
    "CmEvent",
    "CmId",
    "ConnectionParameters",
    "DeviceAddress",
    "DeviceReference",
    "EventChannel",
    "SocketAddress",
    "device_addresses",
    "interface_addresses",
    "parse_address",
]
