"""Which exception an rdma_cm event, or the errno of an iWARP connect, stands for."""

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

# The InfiniBand CM's reject reasons that an rdma_cm user can meet.
_REJECT_REASONS = {
    4: "it gave up waiting",
    6: "it does not know this connection",
    8: "nobody listens there",
    10: "it still has an old connection with the same numbers",
    28: "its application refused",
    35: "it does not support the options offered",
}
# How a datagram peer's machine says no to being asked for its numbers (enum ib_cm_sidr_status).
_SIDR_STATUSES = {
    1: "nobody serves that port",
    2: "its application refused",
    3: "it has no queue pair there",
    4: "it says to ask elsewhere",
    5: "it speaks another version",
}
_REFUSED_ERRNOS = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})
_UNREACHABLE_ERRNOS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


def error_for_event(event: CmEvent, peer: str) -> RdmaError:
    """The exception for an event that ends an attempt, or a connection, to `peer`."""
    match event.type:
        case CmEventType.ADDR_ERROR:
            return AddressError(f"no RDMA path to {peer}: {_cause('rdma_resolve_addr', event)}")
        case CmEventType.ROUTE_ERROR:
            return RouteError(f"no route to {peer}: {_cause('rdma_resolve_route', event)}")
        case CmEventType.REJECTED:
            return _rejected(event, peer)
        case CmEventType.UNREACHABLE if event.status > 0:
            return _not_served(event, peer)
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
    """The exception for rdma_connect(3) failing at once, as it does on iWARP: a TCP connect's."""
    code = error.errno or 0
    if code in _REFUSED_ERRNOS:
        return Rejected(f"{peer} rejected the connection: {os.strerror(code)}", -code)
    if code in _UNREACHABLE_ERRNOS:
        return Unreachable(f"{peer} does not answer: {os.strerror(code)}")
    return error


def _rejected(event: CmEvent, peer: str) -> Rejected:
    if event.status < 0:
        why = os.strerror(-event.status)
    else:
        why = _REJECT_REASONS.get(event.status, "reason not known here")
    message = f"{peer} rejected the connection: {why} (status {event.status})"
    return Rejected(message, event.status, event.private_data)


def _not_served(event: CmEvent, peer: str) -> Rejected:
    """To a datagram peer this is an answer: silence, and a connection's, has a negative status."""
    why = _SIDR_STATUSES.get(event.status, "reason not known here")
    message = f"{peer} rejected the request: {why} (status {event.status})"
    return Rejected(message, event.status, event.private_data)


def _cause(function: str, event: CmEvent) -> str:
    return reason(function, event.errno) if event.errno else f"status {event.status}"
