"""Each failure of a ping is explained in one sentence with the next step for the user."""

from __future__ import annotations

import errno
import socket

import pytest

from aiordma.enums import WcOpcode, WcStatus
from aiordma.errors import (
    AddressError,
    PeerClosed,
    Rejected,
    RouteError,
    Unreachable,
    VerbsError,
    WorkRequestError,
)
from aiordma.ping import failures
from aiordma.ping.failures import explain, explain_listening
from aiordma.ping.handshake import rejection
from aiordma.ping.options import PingOptions
from aiordma.rdmacm import SocketAddress

OPTIONS = PingOptions("10.7.1.2")


@pytest.fixture(autouse=True)
def _own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [("eth0", SocketAddress("10.7.1.1", 0))]
    monkeypatch.setattr(failures, "interface_addresses", lambda: own)


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("status", [8, -errno.ECONNREFUSED])
def test_no_listener_on_another_machine(status: int) -> None:
    error = Rejected("10.7.1.2 rejected the connection", status, bytes(148))
    assert explain(error, OPTIONS) == (
        "10.7.1.2 answers over RDMA, but no program listens on port 7473: "
        "run `aiordma ping --listen` on that machine"
    )
    explained = explain(error, PingOptions("10.7.1.2", 9))
    assert "run `aiordma ping --listen -p 9` on that machine" in explained


def test_no_listener_on_this_machine() -> None:
    error = Rejected("10.7.1.1 rejected the connection", 8)
    explained = explain(error, PingOptions("10.7.1.1"))
    start = "10.7.1.1 is this machine and RDMA reaches it, but no program listens on port 7473: "
    assert explained.startswith(start)
    assert "run `aiordma ping --listen` in another terminal" in explained


def test_a_reject_by_the_server_application() -> None:
    error = Rejected("10.7.1.2 rejected the connection", 28, rejection("too large") + bytes(99))
    assert explain(error, OPTIONS) == "10.7.1.2 rejected the connection: too large"
    error = Rejected("10.7.1.2 rejected the connection: why", 28, bytes(148))
    assert explain(error, OPTIONS) == (
        "10.7.1.2 answers over RDMA, but 10.7.1.2 rejected the connection: why"
    )


def test_no_device_has_a_route() -> None:
    for error in (AddressError("no RDMA path to 8.8.8.8"), RouteError("no route to 8.8.8.8")):
        explained = explain(error, OPTIONS)
        start = f"{error}: no RDMA device of this machine has a route to that address; "
        assert explained.startswith(f"{start}`aiordma devices`")
        assert "127.0.0.1" in explained


def test_advice_in_the_error_is_not_repeated() -> None:
    cause = VerbsError(errno.ENODEV, "rdma_resolve_addr")
    error = with_cause(AddressError(f"no RDMA path to 127.0.0.1: {cause}"), cause)
    assert explain(error, OPTIONS) == str(error)
    assert "aiordma devices" in str(error)


def test_a_name_that_cannot_be_resolved() -> None:
    cause = socket.gaierror(-2, "unknown")
    error = with_cause(AddressError("the name 'x' cannot be resolved"), cause)
    assert explain(error, OPTIONS) == "the name 'x' cannot be resolved"


def test_no_answer_names_the_ports_of_the_firewall() -> None:
    explained = explain(Unreachable("10.7.1.2 does not answer"), OPTIONS)
    assert explained.startswith("10.7.1.2 does not answer: ")
    assert "UDP port 4791 (RoCE)" in explained
    assert "TCP port 7473 (iWARP)" in explained


def test_the_peer_closes_or_stops_answering() -> None:
    explained = explain(PeerClosed("10.7.1.2 closed the connection"), OPTIONS)
    assert explained == "the connection to 10.7.1.2 ended: 10.7.1.2 closed the connection"
    error = WorkRequestError(WcStatus.RETRY_EXC_ERR, WcOpcode.SEND)
    assert explain(error, OPTIONS).startswith("10.7.1.2 stopped answering: ")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (VerbsError(errno.ENODEV, "rdma_create_id"), "no RDMA device on this machine"),
        (VerbsError(errno.ENOMEM, "ibv_reg_mr"), "ulimit -l"),
        (WorkRequestError(WcStatus.WR_FLUSH_ERR, WcOpcode.SEND), "WR_FLUSH_ERR"),
        (TimeoutError("no answer to seq=3 within 5 s"), "no answer to seq=3 within 5 s"),
        (ValueError("rxe0 allows a max_sge of 1"), "rxe0 allows a max_sge of 1"),
    ],
)
def test_an_error_that_is_clear_is_not_changed(error: Exception, expected: str) -> None:
    assert expected in explain(error, OPTIONS)
    assert expected in explain_listening(error, None, 7473)


def test_a_failure_to_listen() -> None:
    in_use = VerbsError(errno.EADDRINUSE, "rdma_bind_addr")
    assert explain_listening(in_use, None, 7473).startswith("port 7473 is in use: ")
    foreign = VerbsError(errno.EADDRNOTAVAIL, "rdma_bind_addr")
    explained = explain_listening(foreign, "10.9.9.9", 7473)
    assert explained.startswith("10.9.9.9 is not an address of this machine; `aiordma devices`")
