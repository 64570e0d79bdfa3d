"""The exception for each event, and for each errno of an iWARP connect."""

from __future__ import annotations

import errno
import os

import pytest

from aiordma import AddressError, ConnectError, DeviceRemoved, PeerClosed, RdmaError
from aiordma.cm.failures import error_for_event, error_for_iwarp_connect
from aiordma.enums import CmEventType
from aiordma.errors import Rejected, RouteError, Unreachable, VerbsError, reason
from aiordma.rdmacm import CmEvent

E = CmEventType
PEER = "10.7.1.1:7471"
TIMED_OUT, EIO = os.strerror(errno.ETIMEDOUT), os.strerror(errno.EIO)
KINDS = {
    E.ADDR_ERROR: AddressError,
    E.ROUTE_ERROR: RouteError,
    E.REJECTED: Rejected,
    E.UNREACHABLE: Unreachable,
    E.CONNECT_ERROR: ConnectError,
    E.MULTICAST_ERROR: ConnectError,
    E.DISCONNECTED: PeerClosed,
    E.DEVICE_REMOVAL: DeviceRemoved,
}


@pytest.mark.parametrize("event", [*CmEventType, CmEventType(99)])
def test_every_event_becomes_an_exception_of_its_kind(event: CmEventType) -> None:
    for status in (0, 8, 28, 999, -1, -errno.ETIMEDOUT, -99999):
        error = error_for_event(CmEvent(event, 0, status=status, private_data=b"no\0"), PEER)
        is_refused_datagram = event is E.UNREACHABLE and status > 0
        assert type(error) is (Rejected if is_refused_datagram else KINDS.get(event, RdmaError))
        if isinstance(error, Rejected):
            assert (error.status, error.private_data) == (status, b"no\0")
        if event in KINDS.keys() - {E.DISCONNECTED, E.DEVICE_REMOVAL}:
            assert PEER in str(error)
            assert status != -errno.ETIMEDOUT or TIMED_OUT in str(error)


NO_DEVICE = reason("rdma_resolve_addr", errno.ENODEV)  # with the advice to list the devices
REFUSED = f"{os.strerror(errno.ECONNREFUSED)} (status -{errno.ECONNREFUSED})"


@pytest.mark.parametrize(
    ("event", "status", "text"),
    [
        (E.ADDR_ERROR, -errno.ENODEV, f"no RDMA path to {PEER}: {NO_DEVICE}"),
        (E.REJECTED, 8, f"{PEER} rejected the connection: no listener at this port (status 8)"),
        (E.REJECTED, 28, f"{PEER} rejected the connection: the application refused (status 28)"),
        (E.REJECTED, 999, f"{PEER} rejected the connection: unknown reason (status 999)"),
        (E.REJECTED, -errno.ECONNREFUSED, f"{PEER} rejected the connection: {REFUSED}"),
        (E.UNREACHABLE, 1, f"{PEER} rejected the request: no listener at this port (status 1)"),
        (E.UNREACHABLE, 2, f"{PEER} rejected the request: the application refused (status 2)"),
        (E.UNREACHABLE, 999, f"{PEER} rejected the request: unknown reason (status 999)"),
        (E.CONNECT_ERROR, 7, f"could not connect to {PEER}: status 7"),
        (E.DISCONNECTED, 0, f"{PEER} closed the connection"),
        (E.DEVICE_REMOVAL, 0, "the RDMA device was removed"),
        (E.DEVICE_REMOVAL, -errno.EIO, f"the RDMA device was removed: {EIO}"),
        (CmEventType(99), 3, "unexpected UNKNOWN_99 event (status 3)"),
    ],
)
def test_the_message_contains_the_reason(event: CmEventType, status: int, text: str) -> None:
    assert str(error_for_event(CmEvent(event, 0, status=status), PEER)) == text


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        (Rejected, [errno.ECONNREFUSED, errno.ECONNRESET]),
        (Unreachable, [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH]),
        (VerbsError, [errno.EINVAL, errno.ENOMEM, 0]),
    ],
)
def test_an_errno_of_iwarp_becomes_an_exception(kind: type[RdmaError], codes: list[int]) -> None:
    for code in codes:
        failed = VerbsError(code, "rdma_connect")
        error = error_for_iwarp_connect(failed, PEER)
        assert type(error) is kind
        if isinstance(error, Rejected):
            assert (error.status, error.private_data) == (-code, b"")
        assert error is failed if kind is VerbsError else PEER in str(error)
        assert error is failed or os.strerror(code) in str(error)
