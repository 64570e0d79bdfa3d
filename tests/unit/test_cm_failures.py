"""The exception for each event, and for each errno of an iWARP connect."""

from __future__ import annotations

import errno
import os

import pytest

from aiordma.cm.failures import error_for_event, error_for_iwarp_connect
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
)
from aiordma.rdmacm import CmEvent

PEER = "10.7.1.1:7471"
KINDS = {
    CmEventType.ADDR_ERROR: AddressError,
    CmEventType.ROUTE_ERROR: RouteError,
    CmEventType.REJECTED: Rejected,
    CmEventType.UNREACHABLE: Unreachable,
    CmEventType.CONNECT_ERROR: ConnectError,
    CmEventType.MULTICAST_ERROR: ConnectError,
    CmEventType.DISCONNECTED: PeerClosed,
    CmEventType.DEVICE_REMOVAL: DeviceRemoved,
}


@pytest.mark.parametrize("event", [*CmEventType, CmEventType(99)])
@pytest.mark.parametrize("status", [0, 8, 28, 999, -1, -errno.ETIMEDOUT, -99999])
def test_every_event_becomes_an_exception_of_its_kind(event: CmEventType, status: int) -> None:
    error = error_for_event(CmEvent(event, 0, status=status), PEER)
    is_refused_datagram = event is CmEventType.UNREACHABLE and status > 0
    assert type(error) is (Rejected if is_refused_datagram else KINDS.get(event, RdmaError))


@pytest.mark.parametrize("event", [event for event in KINDS if event != CmEventType.DEVICE_REMOVAL])
def test_the_message_contains_the_peer(event: CmEventType) -> None:
    assert PEER in str(error_for_event(CmEvent(event, 0), PEER))


@pytest.mark.parametrize(
    "event",
    [
        CmEventType.ADDR_ERROR,
        CmEventType.ROUTE_ERROR,
        CmEventType.UNREACHABLE,
        CmEventType.CONNECT_ERROR,
        CmEventType.MULTICAST_ERROR,
        CmEventType.REJECTED,
    ],
)
def test_a_negative_status_is_an_errno(event: CmEventType) -> None:
    error = error_for_event(CmEvent(event, 0, status=-errno.ETIMEDOUT), PEER)
    assert os.strerror(errno.ETIMEDOUT) in str(error)


def test_a_status_without_errno_is_in_the_message() -> None:
    event = CmEvent(CmEventType.CONNECT_ERROR, 0, status=7)
    assert str(error_for_event(event, PEER)).endswith("status 7")


def test_an_address_that_no_device_has_adds_a_hint_to_the_message() -> None:
    event = CmEvent(CmEventType.ADDR_ERROR, 0, status=-errno.ENODEV)
    assert "aiordma devices" in str(error_for_event(event, PEER))


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (8, "no listener at this port (status 8)"),
        (28, "the application refused (status 28)"),
        (999, "unknown reason (status 999)"),
        (-errno.ECONNREFUSED, f"{os.strerror(errno.ECONNREFUSED)} (status -{errno.ECONNREFUSED})"),
    ],
)
def test_the_message_of_a_rejection_contains_the_reason(status: int, reason: str) -> None:
    event = CmEvent(CmEventType.REJECTED, 0, status=status, private_data=b"no\0\0")
    error = error_for_event(event, PEER)
    assert isinstance(error, Rejected)
    assert str(error) == f"{PEER} rejected the connection: {reason}"
    assert (error.status, error.private_data) == (status, b"no\0\0")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (1, "no listener at this port (status 1)"),
        (2, "the application refused (status 2)"),
        (999, "unknown reason (status 999)"),
    ],
)
def test_a_positive_status_for_datagrams_is_a_rejection(status: int, reason: str) -> None:
    event = CmEvent(CmEventType.UNREACHABLE, 0, status=status, private_data=b"no\0")
    error = error_for_event(event, PEER)
    assert isinstance(error, Rejected)
    assert str(error) == f"{PEER} rejected the request: {reason}"
    assert (error.status, error.private_data) == (status, b"no\0")


def test_a_device_removal_without_errno_has_a_short_message() -> None:
    text = str(error_for_event(CmEvent(CmEventType.DEVICE_REMOVAL, 0), PEER))
    assert text == "the RDMA device was removed"


def test_a_device_removal_with_errno_has_it_in_the_message() -> None:
    event = CmEvent(CmEventType.DEVICE_REMOVAL, 0, status=-errno.EIO)
    text = str(error_for_event(event, PEER))
    assert text.startswith("the RDMA device was removed: ")
    assert os.strerror(errno.EIO) in text


def test_an_unexpected_event_is_in_the_message() -> None:
    text = str(error_for_event(CmEvent(CmEventType(99), 0, status=3), PEER))
    assert text == "unexpected UNKNOWN_99 event (status 3)"


@pytest.mark.parametrize("code", [errno.ECONNREFUSED, errno.ECONNRESET])
def test_a_refused_tcp_connect_is_a_rejection(code: int) -> None:
    error = error_for_iwarp_connect(VerbsError(code, "rdma_connect"), PEER)
    assert isinstance(error, Rejected)
    assert error.status == -code
    assert error.private_data == b""
    assert PEER in str(error)


@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_a_tcp_connect_without_answer_is_unreachable(code: int) -> None:
    error = error_for_iwarp_connect(VerbsError(code, "rdma_connect"), PEER)
    assert isinstance(error, Unreachable)
    assert os.strerror(code) in str(error)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM, 0])
def test_other_errors_of_a_connect_are_returned_unchanged(code: int) -> None:
    error = VerbsError(code, "rdma_connect")
    assert error_for_iwarp_connect(error, PEER) is error
