"""Which exception each event, and each errno of an iWARP connect, becomes."""

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
def test_the_text_names_the_peer(event: CmEventType) -> None:
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


def test_a_status_of_minus_one_means_the_errno_that_librdmacm_left() -> None:
    event = CmEvent(CmEventType.CONNECT_ERROR, 0, status=-1, error=errno.ENOMEM)
    assert event.errno == errno.ENOMEM
    assert os.strerror(errno.ENOMEM) in str(error_for_event(event, PEER))


def test_a_status_of_minus_one_alone_is_eperm() -> None:
    assert CmEvent(CmEventType.CONNECT_ERROR, 0, status=-1).errno == errno.EPERM


@pytest.mark.parametrize("status", [0, 8, 28])
def test_the_transports_own_numbers_are_no_errno(status: int) -> None:
    assert CmEvent(CmEventType.REJECTED, 0, status=status, error=5).errno == 0


def test_other_errnos_are_not_mistaken_for_the_one_left_behind() -> None:
    event = CmEvent(CmEventType.CONNECT_ERROR, 0, status=-errno.ECONNRESET, error=errno.ENOMEM)
    assert event.errno == errno.ECONNRESET


def test_a_status_without_errno_is_told_as_it_is() -> None:
    event = CmEvent(CmEventType.CONNECT_ERROR, 0, status=7)
    assert str(error_for_event(event, PEER)).endswith("status 7")


def test_an_address_that_no_device_has_comes_with_advice() -> None:
    event = CmEvent(CmEventType.ADDR_ERROR, 0, status=-errno.ENODEV)
    assert "aiordma devices" in str(error_for_event(event, PEER))


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (8, "no listener at this port (status 8)"),
        (28, "the application refused (status 28)"),
        (999, "unknown reason (status 999)"),
        (-errno.ECONNREFUSED, f"{os.strerror(errno.ECONNREFUSED)} (status -{errno.ECONNREFUSED})"),
    ],
)
def test_a_rejection_says_why(status: int, why: str) -> None:
    event = CmEvent(CmEventType.REJECTED, 0, status=status, private_data=b"no\0\0")
    error = error_for_event(event, PEER)
    assert isinstance(error, Rejected)
    assert str(error) == f"{PEER} rejected the connection: {why}"
    assert (error.status, error.private_data) == (status, b"no\0\0")


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (1, "no listener at this port (status 1)"),
        (2, "the application refused (status 2)"),
        (999, "unknown reason (status 999)"),
    ],
)
def test_an_answer_that_says_no_to_datagrams_is_a_rejection(status: int, why: str) -> None:
    event = CmEvent(CmEventType.UNREACHABLE, 0, status=status, private_data=b"no\0")
    error = error_for_event(event, PEER)
    assert isinstance(error, Rejected)
    assert str(error) == f"{PEER} rejected the request: {why}"
    assert (error.status, error.private_data) == (status, b"no\0")


def test_a_device_that_was_removed_is_all_there_is_to_tell() -> None:
    text = str(error_for_event(CmEvent(CmEventType.DEVICE_REMOVAL, 0), PEER))
    assert text == "the RDMA device was removed"


def test_a_channel_that_failed_is_told_as_the_cause_of_the_removal() -> None:
    event = CmEvent(CmEventType.DEVICE_REMOVAL, 0, status=-errno.EIO)
    text = str(error_for_event(event, PEER))
    assert text.startswith("the RDMA device was removed: ")
    assert os.strerror(errno.EIO) in text


def test_an_unexpected_event_is_named() -> None:
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
def test_a_tcp_connect_that_nobody_answers_is_unreachable(code: int) -> None:
    error = error_for_iwarp_connect(VerbsError(code, "rdma_connect"), PEER)
    assert isinstance(error, Unreachable)
    assert os.strerror(code) in str(error)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM, 0])
def test_other_failures_of_a_connect_stay_what_they_are(code: int) -> None:
    error = VerbsError(code, "rdma_connect")
    assert error_for_iwarp_connect(error, PEER) is error
