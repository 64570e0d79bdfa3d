"""`aiordma ping` from its arguments to its exit code, over a connection that is no device's."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from aiordma import Connection, ConnectionOptions, ConnectRequest, PeerClosed, VerbsError
from aiordma.cli import main, parser
from aiordma.ping import client, server
from aiordma.ping.client import Reached
from aiordma.ping.handshake import announced_size, greeting, refusal_reason
from aiordma.ping.options import MAX_SIZE, Plan

PING = ["ping", "10.7.1.2", "-i", "0"]


@dataclass
class FakeConnection:
    """An echo, but for the answers that are told."""

    answers: dict[int, Callable[[bytes], bytes]] = field(default_factory=dict)
    private_data: bytes = b""
    max_message_size: int = 64
    sent: list[bytes] = field(default_factory=list)
    is_silent: bool = False
    interrupted: int = 0
    ended: str = ""
    local_address: tuple[str, int] = ("10.7.1.1", 4711)
    peer_address: tuple[str, int] = ("10.7.1.2", 7473)

    async def send(self, data: bytes) -> None:
        self.sent.append(data)

    async def recv(self) -> bytes:
        number = len(self.sent)
        if number == self.interrupted:
            signal.raise_signal(signal.SIGINT)
        if self.is_silent or number == self.interrupted:
            await asyncio.Event().wait()
        return self.answers.get(number, bytes)(self.sent[-1])

    def abort(self) -> None:
        self.ended = self.ended or "aborted"

    async def __aenter__(self) -> FakeConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ended = self.ended or "closed"


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> FakeConnection:
    made = FakeConnection()

    async def fake_reach(_: Plan) -> Reached:
        return Reached(cast(Connection, made), "rxe0 (IB)", 0.001, 0.002, 0.003)

    monkeypatch.setattr(client, "reach", fake_reach)
    return made


def test_answers(connection: FakeConnection, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert (len(lines), errors, connection.ended) == (7, "", "closed")


def test_a_wrong_answer(connection: FakeConnection, capsys: pytest.CaptureFixture[str]) -> None:
    connection.answers[2] = lambda message: message[:-1] + b"\xff"
    assert main([*PING, "-c", "3"]) == 1
    output = capsys.readouterr().out
    assert "seq=2" in output
    assert "WRONG: byte 63 came back as 0xff" in output
    assert "3 sent, 3 received, 0 lost, 1 wrong" in output


def test_no_answer(connection: FakeConnection, capsys: pytest.CaptureFixture[str]) -> None:
    connection.is_silent = True
    assert main([*PING, "-w", "0.01"]) == 1
    output, errors = capsys.readouterr()
    assert errors == "aiordma ping: no answer to seq=1 within 0.01 s\n"
    assert "1 sent, 0 received, 1 lost" in output
    assert connection.ended == "aborted"


def close(_: bytes) -> bytes:
    raise PeerClosed("10.7.1.2 closed the connection")


def test_the_peer_goes_away(connection: FakeConnection, capsys: pytest.CaptureFixture[str]) -> None:
    connection.answers[3] = close
    assert main(PING) == 1
    output, errors = capsys.readouterr()
    assert errors.startswith("aiordma ping: 10.7.1.2 went away: ")
    assert "3 sent, 2 received, 1 lost" in output


@pytest.mark.parametrize("agreed", [False, True])
def test_messages_that_the_peer_does_not_take(
    agreed: bool, connection: FakeConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    connection.answers[1] = close
    connection.private_data = greeting(65536) if agreed else b""
    assert main([*PING, "-s", "65536"]) == 1
    assert ("the peer does not take 65536 bytes: " in capsys.readouterr().err) is not agreed


@pytest.mark.parametrize(("interrupted", "status"), [(3, 0), (1, 1)])
def test_control_c(
    interrupted: int, status: int, connection: FakeConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exits with 0 if answers came; the message under way counts for nothing."""
    connection.interrupted = interrupted
    assert main(PING) == status
    output, errors = capsys.readouterr()
    assert ("2 sent, 2 received, 0 lost" in output) is (status == 0)
    assert errors == ""


def test_the_arguments() -> None:
    defaults = parser().parse_args(["ping"])
    assert (defaults.host, defaults.listen, defaults.p, defaults.c) == (None, None, 7473, None)
    assert (defaults.i, defaults.s, defaults.w, defaults.busy_poll) == (1.0, 64, 5.0, 0.0)
    args = parser().parse_args(["ping", "-c", "3", "-6", "-s", "1", "fd00::1", "--busy-poll", "1"])
    assert (args.host, args.c, args.s, args.family) == ("fd00::1", 3, 1, socket.AF_INET6)
    assert parser().parse_args(["ping", "--listen"]).listen == ""
    assert parser().parse_args(["ping", "--listen", "10.7.1.1"]).listen == "10.7.1.1"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
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
def test_arguments_that_make_no_sense(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ping", *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_help_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ping", "--help"])
    assert "aiordma ping --listen" in capsys.readouterr().out


def no_devices() -> list[object]:
    raise VerbsError(19, "rdma_get_devices")


@pytest.mark.parametrize("arguments", [[], ["--listen"]])
def test_no_device(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "device_addresses", no_devices)
    assert main(["ping", *arguments]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("aiordma ping: ")
    assert "no RDMA device on this machine" in errors


def test_no_address(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(server, "device_addresses", list)
    assert main(["ping", "-6"]) == 1
    assert "no RDMA device of this machine has such an IP address" in capsys.readouterr().err


@dataclass
class FakeRequest:
    """A peer that asks, and what it was told."""

    private_data: bytes
    connection: FakeConnection = field(default_factory=FakeConnection)
    peer_address: tuple[str, int] = ("10.7.1.2", 4711)
    accepted: tuple[bytes, ConnectionOptions] | None = None
    refused: bytes | None = None

    def accept(self, private_data: bytes, options: ConnectionOptions) -> FakeConnection:
        self.accepted = private_data, options
        return self.connection

    async def reject(self, private_data: bytes) -> None:
        self.refused = private_data


async def answered(request: FakeRequest) -> list[str]:
    said: list[str] = []
    await server._answer(cast(ConnectRequest, request), said.append)
    return said


@pytest.mark.asyncio
async def test_the_listener_refuses_what_is_too_large() -> None:
    request = FakeRequest(greeting(MAX_SIZE + 1) + bytes(44))
    said = await answered(request)
    assert len(said) == 1
    assert "too large" in said[0]
    assert request.accepted is None
    assert (
        refusal_reason(request.refused or b"") == "messages of at most 1048576 bytes are answered"
    )


class FakePeer(FakeConnection):
    """Sends three messages, and goes."""

    def __aiter__(self) -> FakePeer:
        return self

    async def __anext__(self) -> bytes:
        if len(self.sent) == 3:
            raise StopAsyncIteration
        return b"message"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("private_data", "size", "agreed"),
    [(greeting(100) + bytes(44), 100, 100), (bytes(56), 16384, None)],
)
async def test_the_listener_fits_its_peers(
    private_data: bytes, size: int, agreed: int | None
) -> None:
    request = FakeRequest(private_data, FakePeer(max_message_size=size))
    assert await answered(request) == [
        f"10.7.1.2 port 4711: connected, with messages of up to {size} bytes",
        "10.7.1.2 port 4711: gone after 3 messages",
    ]
    assert request.accepted is not None
    assert announced_size(request.accepted[0]) == agreed
    assert request.accepted[1].max_message_size == size


@pytest.mark.asyncio
async def test_a_peer_that_fails_is_only_mentioned() -> None:
    class Broken(FakePeer):
        async def __anext__(self) -> bytes:
            raise VerbsError(12, "ibv_reg_mr")

    said = await answered(FakeRequest(greeting(64), Broken()))
    assert said[1] == "10.7.1.2 port 4711: gone after 0 messages"
    assert "ulimit -l" in said[2]
