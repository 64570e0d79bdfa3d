"""`aiordma ping` from its arguments to its exit code, with a fake connection."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from aiordma import Connection, ConnectionOptions, ConnectRequest, PeerClosed, VerbsError
from aiordma.cli import main, parser
from aiordma.ping import client, server
from aiordma.ping.client import TimedConnection
from aiordma.ping.handshake import announced_size, announcement, rejection_reason
from aiordma.ping.options import MAX_SIZE, PingOptions

PING = ["ping", "10.7.1.2", "-i", "0"]


@dataclass
class FakeConnection:
    """A connection to an echo server; `answers` replaces the echoes of some messages."""

    answers: dict[int, Callable[[bytes], bytes]] = field(default_factory=dict)
    private_data: bytes = b""
    max_message_size: int = 64
    sent: list[bytes] = field(default_factory=list)
    never_answers: bool = False
    interrupted_at: int = 0
    ended_by: str = ""
    local_address: tuple[str, int] = ("10.7.1.1", 4711)
    peer_address: tuple[str, int] = ("10.7.1.2", 7473)

    async def send(self, data: bytes) -> None:
        self.sent.append(data)

    async def recv(self) -> bytes:
        number = len(self.sent)
        if number == self.interrupted_at:
            signal.raise_signal(signal.SIGINT)
        if self.never_answers or number == self.interrupted_at:
            await asyncio.Event().wait()
        return self.answers.get(number, bytes)(self.sent[-1])

    def abort(self) -> None:
        self.ended_by = self.ended_by or "abort()"

    async def __aenter__(self) -> FakeConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ended_by = self.ended_by or "aclose()"


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> FakeConnection:
    fake = FakeConnection()

    async def fake_connect(_: PingOptions) -> TimedConnection:
        return TimedConnection(cast(Connection, fake), "rxe0 (IB)", 0.001, 0.002, 0.003)

    monkeypatch.setattr(client, "timed_connect", fake_connect)
    return fake


def test_each_answer_is_one_line(
    connection: FakeConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PING, "-c", "2"]) == 0
    output, errors = capsys.readouterr()
    lines = output.splitlines()
    assert lines[0] == (
        "rxe0 (IB) at 10.7.1.1 to 10.7.1.2 port 7473: "
        "address 1.00 ms, route 2.00 ms, connection 3.00 ms"
    )
    for number in (1, 2):
        assert lines[number].startswith(f"64 bytes from 10.7.1.2 port 7473: seq={number} time=")
    assert lines[3:6] == [
        "",
        "--- 10.7.1.2 port 7473 ping statistics ---",
        "2 sent, 2 received, 0 lost",
    ]
    assert lines[6].startswith("round trip min/avg/median/max/mdev = ")
    assert (len(lines), errors, connection.ended_by) == (7, "", "aclose()")


def test_a_wrong_answer_is_reported_and_counted(
    connection: FakeConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    connection.answers[2] = lambda message: message[:-1] + b"\xff"
    assert main([*PING, "-c", "3"]) == 1
    output = capsys.readouterr().out
    assert "seq=2" in output
    assert "WRONG: byte 63 is 0xff instead of " in output
    assert "3 sent, 3 received, 0 lost, 1 wrong" in output


def test_no_answer_in_time_ends_the_ping(
    connection: FakeConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    connection.never_answers = True
    assert main([*PING, "-w", "0.01"]) == 1
    output, errors = capsys.readouterr()
    assert errors == "aiordma ping: no answer to seq=1 within 0.01 s\n"
    assert "1 sent, 0 received, 1 lost" in output
    assert connection.ended_by == "abort()"


def peer_closes(_: bytes) -> bytes:
    raise PeerClosed("10.7.1.2 closed the connection")


def test_a_peer_that_disconnects_ends_the_ping(
    connection: FakeConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    connection.answers[3] = peer_closes
    assert main(PING) == 1
    output, errors = capsys.readouterr()
    assert errors.startswith("aiordma ping: the connection to 10.7.1.2 ended: ")
    assert "3 sent, 2 received, 1 lost" in output


@pytest.mark.parametrize("accepted", [False, True])
def test_messages_of_a_size_that_the_peer_did_not_accept(
    accepted: bool, connection: FakeConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    connection.answers[1] = peer_closes
    connection.private_data = announcement(65536) if accepted else b""
    assert main([*PING, "-s", "65536"]) == 1
    explained = "the peer does not accept messages of 65536 bytes: " in capsys.readouterr().err
    assert explained is not accepted


@pytest.mark.parametrize(("interrupted_at", "status"), [(3, 0), (1, 1)])
def test_ctrl_c_ends_the_ping(
    interrupted_at: int, status: int, connection: FakeConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 0 if answers came. The message in flight is not counted."""
    connection.interrupted_at = interrupted_at
    assert main(PING) == status
    output, errors = capsys.readouterr()
    assert ("2 sent, 2 received, 0 lost" in output) is (status == 0)
    assert errors == ""


def test_arguments_are_parsed() -> None:
    defaults = parser().parse_args(["ping"])
    assert (defaults.host, defaults.listen, defaults.p, defaults.c) == (None, None, 7473, None)
    assert (defaults.i, defaults.s, defaults.w, defaults.busy_poll) == (1.0, 64, 5.0, 0.0)
    args = parser().parse_args(["ping", "-c", "3", "-6", "-s", "1", "fd00::1", "--busy-poll", "1"])
    assert (args.host, args.c, args.s, args.family) == ("fd00::1", 3, 1, socket.AF_INET6)
    assert parser().parse_args(["ping", "--listen"]).listen == ""
    assert parser().parse_args(["ping", "--listen", "10.7.1.1"]).listen == "10.7.1.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-s", "0"], "0 is not a number from 1 to 1048576"),
        (["-s", str(MAX_SIZE + 1)], "is not a number from 1 to 1048576"),
        (["-c", "0"], "0 is not a number from 1"),
        (["-p", "65536"], "65536 is not a number from 0 to 65535"),
        (["-w", "0"], "0 is not from 0.001 to 3600 seconds"),
        (["-i", "nan"], "nan is not from 0 to 1e+06 seconds"),
        (["--busy-poll", "11"], "11 is not from 0 to 10 seconds"),
        (["10.7.1.1", "--listen"], "not allowed with argument"),
        (["-4", "-6"], "not allowed with argument"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ping", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ping", "--help"])
    assert "aiordma ping --listen" in capsys.readouterr().out


def test_the_command_line_imports_only_the_options() -> None:
    """The rest of aiordma.ping is imported when the command runs."""
    code = "import json, sys, aiordma.cli.ping; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    found = {name for name in modules if name.startswith("aiordma.ping.")}
    assert found == {"aiordma.ping.options"}


def no_devices() -> list[object]:
    raise VerbsError(19, "rdma_get_devices")


@pytest.mark.parametrize("arguments", [[], ["--listen"]])
def test_without_a_device_the_error_is_one_sentence(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "device_addresses", no_devices)
    assert main(["ping", *arguments]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("aiordma ping: ")
    assert "no RDMA device on this machine" in errors


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [([], "an IP address"), (["-4"], "an IPv4 address"), (["-6"], "an IPv6 address")],
)
def test_without_an_address_the_error_names_the_family(
    arguments: list[str],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "device_addresses", list)
    assert main(["ping", *arguments]) == 1
    assert f"no RDMA device of this machine has {kind}" in capsys.readouterr().err


@dataclass
class FakeRequest:
    """A connection request, and the reply to it."""

    private_data: bytes
    connection: FakeConnection = field(default_factory=FakeConnection)
    peer_address: tuple[str, int] = ("10.7.1.2", 4711)
    accepted: tuple[bytes, ConnectionOptions] | None = None
    rejected: bytes | None = None

    def accept(self, private_data: bytes, options: ConnectionOptions) -> FakeConnection:
        self.accepted = private_data, options
        return self.connection

    async def reject(self, private_data: bytes) -> None:
        self.rejected = private_data


async def serve_peer(request: FakeRequest) -> list[str]:
    """Serve one peer, and return the lines printed."""
    printed: list[str] = []
    await server._serve_peer(cast(ConnectRequest, request), printed.append)
    return printed


@pytest.mark.asyncio
async def test_the_server_rejects_messages_that_are_too_large() -> None:
    request = FakeRequest(announcement(MAX_SIZE + 1) + bytes(44))
    printed = await serve_peer(request)
    assert len(printed) == 1
    assert "too large" in printed[0]
    assert request.accepted is None
    assert (
        rejection_reason(request.rejected or b"")
        == "messages of at most 1048576 bytes are answered"
    )


class FakePeer(FakeConnection):
    """A peer that sends three messages, and disconnects."""

    def __aiter__(self) -> FakePeer:
        return self

    async def __anext__(self) -> bytes:
        if len(self.sent) == 3:
            raise StopAsyncIteration
        return b"message"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("private_data", "size", "accepted"),
    [(announcement(100) + bytes(44), 100, 100), (bytes(56), 16384, None)],
)
async def test_the_server_accepts_the_announced_size(
    private_data: bytes, size: int, accepted: int | None
) -> None:
    request = FakeRequest(private_data, FakePeer(max_message_size=size))
    assert await serve_peer(request) == [
        f"10.7.1.2 port 4711: connected, with messages of up to {size} bytes",
        "10.7.1.2 port 4711: disconnected after 3 messages",
    ]
    assert request.accepted is not None
    assert announced_size(request.accepted[0]) == accepted
    assert request.accepted[1].max_message_size == size


@pytest.mark.asyncio
async def test_a_failing_peer_is_reported_and_does_not_raise() -> None:
    class Broken(FakePeer):
        async def __anext__(self) -> bytes:
            raise VerbsError(12, "ibv_reg_mr")

    printed = await serve_peer(FakeRequest(announcement(64), Broken()))
    assert printed[1] == "10.7.1.2 port 4711: disconnected after 0 messages"
    assert "ulimit -l" in printed[2]
