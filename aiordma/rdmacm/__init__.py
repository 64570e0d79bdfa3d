"""A thin binding of librdmacm: one class for each C struct, one method for each C function.

Each method behaves as its man page describes. Nothing here uses an event loop.
"""

from aiordma.rdmacm.address import IdAddresses, SocketAddress, parse_address
from aiordma.rdmacm.addrinfo import AddrInfo, getaddrinfo
from aiordma.rdmacm.channel import EventChannel, OwnChannel
from aiordma.rdmacm.cm_id import CmId, Segment
from aiordma.rdmacm.contexts import device_contexts
from aiordma.rdmacm.devices import (
    DeviceAddress,
    DeviceReference,
    device_addresses,
    interface_addresses,
)
from aiordma.rdmacm.event import CmEvent
from aiordma.rdmacm.id_calls import EndedCalls, IdCalls
from aiordma.rdmacm.own_objects import OwnObjects, OwnQueue
from aiordma.rdmacm.parameters import ConnectionParameters, Ece
from aiordma.rdmacm.route import PathRecord, Route, pack_path_data

__all__ = [
    "AddrInfo",
    "CmEvent",
    "CmId",
    "ConnectionParameters",
    "DeviceAddress",
    "DeviceReference",
    "Ece",
    "EndedCalls",
    "EventChannel",
    "IdAddresses",
    "IdCalls",
    "OwnChannel",
    "OwnObjects",
    "OwnQueue",
    "PathRecord",
    "Route",
    "Segment",
    "SocketAddress",
    "device_addresses",
    "device_contexts",
    "getaddrinfo",
    "interface_addresses",
    "pack_path_data",
    "parse_address",
]
