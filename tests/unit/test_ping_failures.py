"""Each failure of a ping is one sentence that says what to do."""

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
from aiordma.ping.handshake import refusal
from aiordma.ping.options import Plan
from aiordma.rdmacm import SocketAddress

PLAN = Plan("10.7.1.2")


@pytest.fixture(autouse=True)
def _own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [("eth0", SocketAddress("10.7.1.1", 0))]
    monkeypatch.setattr(failures, "interface_addresses", lambda: own)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("status", [8, -errno.ECONNREFUSED])
def test_nobody_listens(status: int) -> None:
    error = Rejected("10.7.1.2 rejected the connection", status, bytes(148))
    assert explain(error, PLAN) == (
        "10.7.1.2 answers over RDMA, but nobody listens on port 7473: "
        "run `aiordma ping --listen` there"
    )
    assert "run `aiordma ping --listen -p 9` there" in explain(error, Plan("10.7.1.2", 9))


def test_nobody_listens_on_this_machine() -> None:
    said = explain(Rejected("10.7.1.1 rejected the connection", 8), Plan("10.7.1.1"))
    assert said.startswith("10.7.1.1 is this machine, which RDMA reaches, but nobody listens")
    assert "run `aiordma ping --listen` in another terminal" in said


def test_a_refusal() -> None:
    error = Rejected("10.7.1.2 rejected the connection", 28, refusal("too large") + bytes(99))
    assert explain(error, PLAN) == "10.7.1.2 refused: too large"
    error = Rejected("10.7.1.2 rejected the connection: why", 28, bytes(148))
    assert explain(error, PLAN) == (
        "10.7.1.2 answers over RDMA, but refused: 10.7.1.2 rejected the connection: why"
    )


def test_no_device_leads_there() -> None:
    for error in (AddressError("no RDMA path to 8.8.8.8"), RouteError("no route to 8.8.8.8")):
        said = explain(error, PLAN)
        assert said.startswith(f"{error}: no RDMA device here leads there; `aiordma devices`")
        assert "127.0.0.1" in said


def test_advice_is_given_once() -> None:
    cause = VerbsError(errno.ENODEV, "rdma_resolve_addr")
    error = caused(AddressError(f"no RDMA path to 127.0.0.1: {cause}"), cause)
    assert explain(error, PLAN) == str(error)
    assert "aiordma devices" in str(error)


def test_a_name_that_is_not_known() -> None:
    error = caused(AddressError("the name 'x' cannot be resolved"), socket.gaierror(-2, "unknown"))
    assert explain(error, PLAN) == "the name 'x' cannot be resolved"


def test_nobody_answers() -> None:
    said = explain(Unreachable("10.7.1.2 does not answer"), PLAN)
    assert said.startswith("10.7.1.2 does not answer: ")
    assert "UDP port 4791 (RoCE)" in said
    assert "TCP port 7473 (iWARP)" in said


def test_the_peer_goes_away() -> None:
    said = explain(PeerClosed("10.7.1.2 closed the connection"), PLAN)
    assert said == "10.7.1.2 went away: 10.7.1.2 closed the connection"
    error = WorkRequestError(WcStatus.RETRY_EXC_ERR, WcOpcode.SEND)
    assert explain(error, PLAN).startswith("10.7.1.2 stopped answering: ")


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
def test_what_says_enough_is_left_alone(error: Exception, expected: str) -> None:
    assert expected in explain(error, PLAN)
    assert expected in explain_listening(error, None, 7473)


def test_listening_fails() -> None:
    taken = VerbsError(errno.EADDRINUSE, "rdma_bind_addr")
    assert explain_listening(taken, None, 7473).startswith("port 7473 is taken: ")
    foreign = VerbsError(errno.EADDRNOTAVAIL, "rdma_bind_addr")
    said = explain_listening(foreign, "10.9.9.9", 7473)
    assert said.startswith("10.9.9.9 is no address of this machine; `aiordma devices`")
