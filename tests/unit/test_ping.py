"""`aiordma ping`: its parts, and the command beside a server on the simulated devices."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from simulator import Simulation

import aiordma
from aiordma import (
    ConnectError,
    DeviceRemoved,
    PeerClosed,
    PeerTimeout,
    Rejected,
    Unreachable,
    VerbsError,
)
from aiordma.cli import main, parser
from aiordma.enums import TransportType, WcOpcode, WcStatus
from aiordma.errors import AddressError, RouteError, WorkRequestError
from aiordma.options import DEFAULT_OPTIONS
from aiordma.ping import failures, server
from aiordma.ping.client import Messages, difference, timed_connect
from aiordma.ping.failures import explain, explain_listening
from aiordma.ping.options import DEFAULT_PORT, MAX_SIZE, PingOptions
from aiordma.ping.private_data import (
    announced_size,
    announcement,
    options_for,
    rejection,
    rejection_reason,
)
from aiordma.ping.report import Statistics
from aiordma.rdmacm import DeviceAddress, SocketAddress

HOST = "10.0.0.2"
Answer = Callable[[int, bytes], bytes | None]
"""Return the answer to a message with this number; None: there is none. ConnectionError: close."""
Serve = Callable[[], Coroutine[Any, Any, None]]

# --- the command ---


def answer_with(answer: Answer, accepted: bytes = b"") -> Serve:
    """Return a server that accepts one peer, and answers its messages."""

    async def serve() -> None:
        async with aiordma.listen(HOST, DEFAULT_PORT) as listener:
            request = await listener.get_request()
            async with request.accept(accepted) as connection:
                number = 0
                with contextlib.suppress(ConnectionError):
                    async for message in connection:
                        number += 1
                        if (answered := answer(number, message)) is not None:
                            await connection.send(answered)

    return serve


def echo_wrongly(number: int, message: bytes) -> bytes:
    return message if number != 2 else message[:-1] + b"\xff"


def close_at(last: int) -> Answer:
    def answer(number: int, message: bytes) -> bytes:
        if number == last:
            raise ConnectionError
        return message

    return answer


def interrupt_at(last: int) -> Answer:
    def answer(number: int, message: bytes) -> bytes | None:
        if number == last:
            signal.raise_signal(signal.SIGINT)
        return message if number < last else None

    return answer


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs the command beside a server.

    It returns the exit code, the output and the errors.
    """

    def run(serve: Serve, *arguments: str) -> Any:
        async def beside(command: Coroutine[Any, Any, None]) -> None:
            serving = asyncio.create_task(serve())
            try:
                await command
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

        monkeypatch.setattr(asyncio, "run", lambda command: simulation.run(lambda: beside(command)))
        status = main(["ping", HOST, "-i", "0", *arguments])
        return status, *capsys.readouterr()

    return run


def test_each_answer_is_one_line(run: Run) -> None:
    status, output, errors = run(answer_with(lambda _, message: message), "-c", "2")
    lines = output.splitlines()
    to = rf"10\.0\.0\.1 to 10\.0\.0\.2 port {DEFAULT_PORT}"
    times = r"address [\d.]+ ms, route [\d.]+ ms, connection [\d.]+ ms"
    assert re.fullmatch(rf"sim0 \((IB|IWARP)\) at {to}: {times}", lines[0])
    for number in (1, 2):
        assert lines[number].startswith(f"64 bytes from {HOST} port 7473: seq={number} time=")
    title = f"--- {HOST} port 7473 ping statistics ---"
    assert lines[3:6] == ["", title, "2 sent, 2 received, 0 lost"]
    assert lines[6].startswith("round trip min/avg/median/max/mdev = ")
    assert (len(lines), errors, status) == (7, "", 0)


SILENT = answer_with(lambda *_: None)
NO_ANSWER = "aiordma ping: no answer to seq=1 within"
ENDED = f"aiordma ping: the connection to {HOST} ended: "
OTHER_ERROR = "aiordma ping: (?!the peer does not accept)"
NOT_ACCEPTED = "aiordma ping: the peer does not accept messages of 65536 bytes: "


@pytest.mark.parametrize(
    ("serve", "arguments", "status", "output", "error"),
    [
        (answer_with(echo_wrongly), "-c 3", 1, "3 sent, 3 received, 0 lost, 1 wrong", "$"),
        (answer_with(echo_wrongly), "-c 3", 1, "WRONG: byte 63 is 0xff instead of ", "$"),
        (SILENT, "-w 2", 1, "1 sent, 0 received, 1 lost", NO_ANSWER),
        (answer_with(close_at(3)), "", 1, "3 sent, 2 received, 1 lost", ENDED),
        (
            answer_with(close_at(1), announcement(65536)),
            "-s 65536",
            1,
            "1 lost",
            OTHER_ERROR,
        ),
        (answer_with(close_at(1)), "-s 65536", 1, "1 lost", NOT_ACCEPTED),
        # Ctrl-C: the exit code is 0 if answers came. The message in flight is not counted.
        (answer_with(interrupt_at(3)), "", 0, "2 sent, 2 received, 0 lost", "$"),
        (answer_with(interrupt_at(1)), "", 1, "", "$"),
    ],
)
def test_a_ping_ends(
    run: Run, serve: Serve, arguments: str, status: int, output: str, error: str
) -> None:
    found = run(serve, *arguments.split())
    assert (found[0], output in found[1]) == (status, True)
    assert re.match(error, found[2])


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
        ("-s 0", "0 is not a number from 1 to 1048576"),
        (f"-s {MAX_SIZE + 1}", "is not a number from 1 to 1048576"),
        ("-c 0", "0 is not a number from 1"),
        ("-p 65536", "65536 is not a number from 0 to 65535"),
        ("-w 0", "0 is not from 0.001 to 3600 seconds"),
        ("-i nan", "nan is not from 0 to 1e+06 seconds"),
        ("--busy-poll 11", "11 is not from 0 to 10 seconds"),
        ("--busy-poll x", "x is not from 0 to 10 seconds"),
        ("10.7.1.1 --listen", "not allowed with argument"),
        ("-4 -6", "not allowed with argument"),
        ("--help", "aiordma ping --listen"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ping", *arguments.split()])
    assert caught.value.code == (0 if arguments == "--help" else 2)
    assert message in "".join(capsys.readouterr())


def test_the_command_line_imports_only_the_options() -> None:
    """The rest of aiordma.ping is imported when the command runs."""
    code = "import json, sys, aiordma.cli.ping; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    found = {name for name in modules if name.startswith("aiordma.ping.")}
    assert found == {"aiordma.ping.options"}


def no_devices() -> list[DeviceAddress]:
    raise VerbsError(errno.ENODEV, "rdma_get_devices")


@pytest.mark.parametrize(
    ("arguments", "devices", "error"),
    [
        ([], no_devices, "no RDMA device on this machine"),
        (["--listen"], no_devices, "no RDMA device on this machine"),
        ([], list, "no RDMA device of this machine has an IP address"),
        (["-4"], list, "no RDMA device of this machine has an IPv4 address"),
        (["-6"], list, "no RDMA device of this machine has an IPv6 address"),
    ],
)
def test_without_a_device_or_an_address_the_error_is_one_sentence(
    arguments: list[str],
    devices: Callable[[], list[DeviceAddress]],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "device_addresses", devices)
    assert main(["ping", *arguments]) == 1
    output, errors = capsys.readouterr()
    assert (output, errors[:14], error in errors) == ("", "aiordma ping: ", True)


# --- connecting, and the server: tests/device/test_ping_server.py has more ---


@pytest.mark.loops("asyncio")
async def test_the_addresses_of_a_name_are_tried_in_order_and_failures_explained(
    simulation: Simulation,
) -> None:
    simulation.names = {"both": ["fd00::2", HOST], "here": ["10.0.0.1"]}
    async with server.local_server(HOST) as port:
        for options in (
            PingOptions("both", port),
            PingOptions("both", port, family=socket.AF_INET),
            PingOptions("both", port, source="here"),
        ):
            async with (await timed_connect(options)).connection as connection:
                assert connection.peer_address == (HOST, port)
                assert connection.local_address[0] == "10.0.0.1"
    assert simulation.world.calls.counts["rdma_resolve_addr"] == 4
    with pytest.raises(ConnectError, match="no address of the local address's family"):
        await timed_connect(PingOptions("fd00::2", source="here"))
    with pytest.raises(ConnectError, match=r"10\.7\.1\.2 has no IPv6 address"):
        await timed_connect(PingOptions("10.7.1.2", family=socket.AF_INET6))
    async with aiordma.listen(HOST, 9):
        with pytest.raises(Unreachable, match=r"10\.0\.0\.2 port 9 does not answer"):
            await timed_connect(PingOptions(HOST, 9, wait=0.01))


OWN = DeviceAddress(HOST, "eth0", "rxe0", TransportType.IB, 1)
LINK_LOCAL = DeviceAddress("fe80::1%eth0", "eth0", "rxe0", TransportType.IB, 1)


@pytest.fixture
def own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(function: Callable[[], object]) -> object:
        return function()

    monkeypatch.setattr(asyncio, "to_thread", call)
    monkeypatch.setattr(server, "device_addresses", lambda: [LINK_LOCAL, OWN])


@pytest.mark.loops("asyncio")
@pytest.mark.usefixtures("own_addresses")
@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        (None, "fe80::1%eth0 (rxe0), 10.0.0.2 (rxe0)"),
        (HOST, "10.0.0.2 (rxe0)"),
        ("0.0.0.0", "10.0.0.2 (rxe0)"),
        ("::", "fe80::1%eth0 (rxe0)"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
async def test_the_server_prints_its_addresses(
    simulation: Simulation, host: str | None, addresses: str
) -> None:
    printed: list[str] = []
    listening = asyncio.create_task(server.listen(host, 4711, printed.append))
    await asyncio.sleep(1)
    for device in (simulation.near, simulation.far):
        simulation.cm.remove_device(device)
    if host in (HOST, "10.0.0.1"):
        with pytest.raises(DeviceRemoved):  # not an ExceptionGroup
            await listening
    else:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    assert printed == [f"listening on port 4711 at {addresses}; Ctrl-C ends it"]


@pytest.mark.loops("asyncio")
@pytest.mark.usefixtures("own_addresses")
async def test_the_first_address_is_link_local_only_if_there_is_no_other(
    simulation: Simulation,
) -> None:
    assert await server.first_address(None) == OWN
    assert await server.first_address(socket.AF_INET6) == LINK_LOCAL


@pytest.mark.loops("asyncio")
async def test_a_failing_peer_is_reported_and_does_not_end_the_server(
    simulation: Simulation,
) -> None:
    printed: list[str] = []
    async with aiordma.listen(HOST, 0) as listener:
        serving = asyncio.create_task(server.serve(listener, printed.append))
        simulation.world.calls.fail("rdma_accept", errno.EINVAL)
        with pytest.raises(ConnectError):
            await aiordma.connect(*listener.local_address)
        await (await aiordma.connect(*listener.local_address)).aclose()
        await listener.aclose()
        await serving
    assert "rdma_accept: Invalid argument" in printed[0]
    assert printed[2].endswith(": disconnected after 0 messages")


# --- failures ---


@pytest.fixture(autouse=True)
def _own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [("eth0", SocketAddress("10.7.1.1", 0))]
    monkeypatch.setattr(failures, "interface_addresses", lambda: own)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


PEER = "10.7.1.2"
NO_PROGRAM = "but no program listens on port 7473: run `aiordma ping --listen`"
NO_ROUTE = "no RDMA device of this machine has a route to that address; `aiordma devices`"
REJECTED = "10.7.1.2 rejected the connection"
NO_PATH = "no RDMA path to 127.0.0.1: {}".format(VerbsError(errno.ENODEV, "rdma_resolve_addr"))


EXPLAINED: list[tuple[Exception, str, str]] = [
    (Rejected(REJECTED, 8), PEER, f"{PEER} answers over RDMA, {NO_PROGRAM} on that machine"),
    (Rejected(REJECTED, -errno.ECONNREFUSED, bytes(148)), PEER, f"{PEER} answers over"),
    (Rejected("no", 8), "10.7.1.1", f"10.7.1.1 is this machine and RDMA reaches it, {NO_PROGRAM}"),
    (Rejected(REJECTED, 28, rejection("large") + bytes(99)), PEER, f"{REJECTED}: large"),
    (Rejected(f"{REJECTED}: why", 28, bytes(148)), PEER, f"{PEER} answers over RDMA, but 10"),
    (AddressError("no RDMA path to 8.8.8.8"), "", f"no RDMA path to 8.8.8.8: {NO_ROUTE}"),
    (RouteError("no route to 8.8.8.8"), "", f"no route to 8.8.8.8: {NO_ROUTE}"),
    (AddressError(NO_PATH), "", NO_PATH),  # advice in the error is not repeated
    (caused(AddressError("the name 'x'"), socket.gaierror(-2, "unknown")), "", "the name 'x'"),
    (Unreachable("no reply"), "", "no reply: check that an RDMA device has that address, and that"),
    (PeerClosed("it closed"), PEER, f"the connection to {PEER} ended: it closed"),
    (PeerTimeout("no answer"), PEER, f"{PEER} stopped answering: "),
]  # fmt: skip


@pytest.mark.parametrize(("error", "host", "expected"), EXPLAINED)
def test_a_failure_is_explained_with_the_next_step(
    error: Exception, host: str, expected: str
) -> None:
    explained = explain(error, PingOptions(host))
    assert explained.startswith(expected)
    assert explained.count("aiordma devices") < 2


def test_the_advice_names_the_port() -> None:
    explained = explain(Rejected(REJECTED, 8), PingOptions(PEER, 9))
    assert "run `aiordma ping --listen -p 9` on that machine" in explained
    explained = explain(Unreachable("no reply"), PingOptions(PEER, 9))
    assert explained.endswith("UDP port 4791 (RoCE) or TCP port 9 (iWARP)")


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
    assert expected in explain(error, PingOptions(PEER))
    assert expected in explain_listening(error, None, 7473)


def test_a_failure_to_listen() -> None:
    in_use = VerbsError(errno.EADDRINUSE, "rdma_bind_addr")
    assert explain_listening(in_use, None, 7473).startswith("port 7473 is in use: ")
    foreign = VerbsError(errno.EADDRNOTAVAIL, "rdma_bind_addr")
    explained = explain_listening(foreign, "10.9.9.9", 7473)
    assert explained.startswith("10.9.9.9 is not an address of this machine; `aiordma devices`")


# --- messages, private data and statistics ---


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 255, 256, 257, 65536, MAX_SIZE])
def test_messages_have_the_size_and_the_number(size: int) -> None:
    messages = Messages(size)
    for number in (1, 2, 255, 256, 70_000):
        message = messages[number]
        assert (len(message), message[:8]) == (size, number.to_bytes(8, "big")[-size:])
        assert message[8:11] == bytes((number + at) % 256 for at in range(3))[: max(0, size - 8)]


def test_the_difference_of_a_wrong_answer_is_described() -> None:
    messages = Messages(64)
    sent = messages[5]
    assert difference(sent, sent) is None
    assert difference(sent, sent[:-1]) == "63 bytes instead of 64"
    assert difference(sent, messages[4]) == "number 4 instead of 5"
    broken = sent[:20] + b"\xff" + sent[21:]
    assert difference(sent, broken) == "byte 20 is 0xff instead of 0x11"
    assert difference(b"\x01", b"\x02") == "number 2 instead of 1"


def test_private_data_is_an_announcement_or_a_rejection_with_padding() -> None:
    assert announced_size(announcement(65536)) == 65536
    assert announced_size(announcement(65536) + bytes(44)) == 65536
    for data in (b"", bytes(56), b"RDMAping", b"hello" * 5):
        assert announced_size(data) is None
    assert rejection_reason(rejection("too large") + bytes(120)) == "too large"
    assert rejection_reason(bytes(148)) is None
    escapes = b"aiordma ping: \x1b]0;owned\x07\x1b[2J caf\xc3\xa9 \xe2\x80\xae\xff" + bytes(10)
    assert rejection_reason(escapes) == (r"\x1b]0;owned\x07\x1b[2J caf\xe9 \u202e\ufffd")
    assert len(rejection(f"messages of at most {MAX_SIZE} bytes are answered")) <= 148


def test_options_limit_the_memory_for_large_messages() -> None:
    assert options_for(None) == DEFAULT_OPTIONS
    options = options_for(MAX_SIZE, busy_poll=0.001)
    assert (options.max_message_size, options.busy_poll) == (MAX_SIZE, 0.001)
    assert options.recv_depth * options.max_message_size <= 4 * MAX_SIZE
    assert options_for(0).max_message_size == 1


def test_statistics_count_answers_and_the_deviation_of_equal_times_is_zero() -> None:
    statistics = Statistics()
    assert (statistics.lines(), statistics.all_correct) == ([], False)
    statistics.peer = "10.7.1.1 port 7473"
    for milliseconds in (1, 2, 3, 10):
        statistics.add(milliseconds / 1000)
    assert (statistics.all_correct, statistics.sent) == (True, 4)
    assert statistics.lines() == [
        "",
        "--- 10.7.1.1 port 7473 ping statistics ---",
        "4 sent, 4 received, 0 lost",
        "round trip min/avg/median/max/mdev = 1.000/4.000/2.500/10.000/3.536 ms",
    ]
    statistics.lost = statistics.wrong = 1
    assert statistics.lines()[2] == "5 sent, 4 received, 1 lost, 1 wrong"
    assert not statistics.all_correct
    statistics = Statistics()
    statistics.lost = 1
    assert statistics.lines()[2:] == ["1 sent, 0 received, 1 lost"]
    equal = Statistics()
    for _ in range(1000):
        equal.add(0.1)
    assert equal.lines()[-1].endswith("= 100.000/100.000/100.000/100.000/0.000 ms")
