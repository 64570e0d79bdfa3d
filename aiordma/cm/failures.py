"""The exceptions for rdma_cm events, and for the errno of an iWARP connect."""

from __future__ import annotations

import errno
import os

from aiordma.enums import CmEventType
from aiordma.errors import (
    AddressError,
    ConnectError,
    DeviceRemoved,
    PeerClosed,
    RdmaError,
    Rejected,
    RouteError,
    Unreachable,
    VerbsError,
    reason,
)
from aiordma.rdmacm import CmEvent

# The InfiniBand CM's reject reasons that can occur with rdma_cm.
_REJECT_REASONS = {
    4: "timeout at the peer",
    6: "no such connection at the peer",
    8: "no listener at this port",
    10: "the peer still has an old connection with the same numbers",
    28: "the application refused",
    35: "the peer does not support the offered ECE options",
}
# The reasons for which the machine of a datagram peer rejects the request for its queue pair
# number and Q_Key (enum ib_cm_sidr_status).
_SIDR_STATUSES = {
    1: "no listener at this port",
    2: "the application refused",
    3: "no queue pair at this port",
    4: "redirected to another address",
    5: "other version of the protocol",
}
_REFUSED_ERRNOS = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})
_UNREACHABLE_ERRNOS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
_REMOVED_ERRNOS = frozenset({errno.EIO, errno.ENODEV, errno.ENXIO})


def error_for_event(event: CmEvent, peer: str) -> RdmaError:
    """Return the exception for an event that ends an attempt, or a connection, to `peer`."""
    match event.type:
        case CmEventType.ADDR_ERROR:
            return AddressError(f"no RDMA path to {peer}: {_cause('rdma_resolve_addr', event)}")
        case CmEventType.ROUTE_ERROR:
            return RouteError(f"no route to {peer}: {_cause('rdma_resolve_route', event)}")
        case CmEventType.REJECTED:
            return _rejected(event, peer)
        case CmEventType.UNREACHABLE if event.status > 0:
            return _datagram_rejected(event, peer)
        case CmEventType.UNREACHABLE:
            return Unreachable(f"{peer} does not answer: {_cause('rdma_connect', event)}")
        case CmEventType.MULTICAST_ERROR:
            cause = _cause("rdma_join_multicast", event)
            return ConnectError(f"not in the multicast group {peer}: {cause}")
        case CmEventType.CONNECT_ERROR:
            return ConnectError(f"could not connect to {peer}: {_cause('rdma_connect', event)}")
        case CmEventType.DISCONNECTED:
            return PeerClosed(f"{peer} closed the connection")
        case CmEventType.DEVICE_REMOVAL:
            cause = f": {_cause('rdma_get_cm_event', event)}" if event.errno else ""
            return DeviceRemoved(f"the RDMA device was removed{cause}")
        case _:
            return RdmaError(f"unexpected {event.type.name} event (status {event.status})")


def error_for_iwarp_connect(error: VerbsError, peer: str) -> RdmaError:
    """Return the exception for a failed rdma_connect(3) on iWARP, where it makes a TCP connect."""
    code = error.errno or 0
    if code in _REFUSED_ERRNOS:
        return Rejected(f"{peer} rejected the connection: {os.strerror(code)}", -code)
    if code in _UNREACHABLE_ERRNOS:
        return Unreachable(f"{peer} does not answer: {os.strerror(code)}")
    return error


def translate_removal(error: VerbsError) -> RdmaError:
    """Return DeviceRemoved if a removed device causes this error, else the error itself."""
    if error.errno in _REMOVED_ERRNOS:
        return DeviceRemoved(f"the RDMA device was removed: {error}")
    return error


def _rejected(event: CmEvent, peer: str) -> Rejected:
    if event.status < 0:
        cause = os.strerror(-event.status)
    else:
        cause = _REJECT_REASONS.get(event.status, "unknown reason")
    message = f"{peer} rejected the connection: {cause} (status {event.status})"
    return Rejected(message, event.status, event.private_data)


def _datagram_rejected(event: CmEvent, peer: str) -> Rejected:
    """Return the exception for a positive status, which only the answer of a datagram peer has.

    A missing answer has a negative status, for datagrams and for connections.
    """
    cause = _SIDR_STATUSES.get(event.status, "unknown reason")
    message = f"{peer} rejected the request: {cause} (status {event.status})"
    return Rejected(message, event.status, event.private_data)


def _cause(function: str, event: CmEvent) -> str:
    return reason(function, event.errno) if event.errno else f"status {event.status}"
