"""The lab's wires, monitor and remote commands, over sockets without a machine behind them."""

import json
import marshal
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from aiordma.lab import frames
from aiordma.lab.caller import CallerSocket
from aiordma.lab.errors import LabError
from aiordma.lab.monitor import Monitor
from aiordma.lab.remote import RemoteCommand
from aiordma.lab.wire import Wire

ONE, TWO, THREE = (f"52:54:00:07:01:0{number}" for number in (1, 2, 3))
EVERYONE = "ff:ff:ff:ff:ff:ff"


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as one:
        yield one
        for key in list(one.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


def process(selector: selectors.BaseSelector) -> None:
    """Process all events that are ready."""
    while ready := selector.select(0):
        for key, events in ready:
            key.data(events)


class Cards:
    """Three network cards on one wire."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.wire = Wire(selector)
        self.sockets: dict[str, socket.socket] = {}
        for node, mac in (("node1", ONE), ("node2", TWO), ("node3", THREE)):
            self.sockets[node], theirs = socket.socketpair()
            self.sockets[node].setblocking(False)
            self.wire.connect(node, mac, theirs)

    def send(self, node: str, mac: str, content: bytes) -> None:
        self.sockets[node].sendall(frame(mac, content))
        process(self.selector)

    def received(self, node: str) -> bytes:
        try:
            return self.sockets[node].recv(1_000_000)
        except BlockingIOError:
            return b""


@pytest.fixture
def cards(selector: selectors.BaseSelector) -> Iterator[Cards]:
    cards = Cards(selector)
    yield cards
    for sock in cards.sockets.values():
        sock.close()


def frame(mac: str, content: bytes) -> bytes:
    data = bytes.fromhex(mac.replace(":", "")) + content
    return struct.pack("!I", len(data)) + data


def test_a_wire_sends_a_frame_to_its_address_or_to_all_others(cards: Cards) -> None:
    cards.send("node1", TWO, b"to two")
    cards.send("node1", EVERYONE, b"to all")
    assert cards.received("node2") == frame(TWO, b"to two") + frame(EVERYONE, b"to all")
    assert cards.received("node3") == frame(EVERYONE, b"to all")
    assert cards.received("node1") == b""


def test_a_wire_forwards_a_frame_that_arrives_in_pieces(cards: Cards) -> None:
    for byte in frame(ONE, bytes(range(50))) + frame(THREE, b"x"):
        cards.sockets["node2"].sendall(bytes([byte]))
        process(cards.selector)
    assert cards.received("node1") == frame(ONE, bytes(range(50)))
    assert cards.received("node3") == frame(THREE, b"x")


def test_a_blocked_direction_drops_frames_and_the_other_does_not(cards: Cards) -> None:
    cards.wire.block("node1", "node2")
    cards.send("node1", TWO, b"lost")
    cards.send("node1", EVERYONE, b"for three")
    cards.send("node2", ONE, b"arrives")
    assert cards.received("node2") == b""
    assert cards.received("node3") == frame(EVERYONE, b"for three")
    assert cards.received("node1") == frame(ONE, b"arrives")
    cards.wire.unblock("node1", "node2")
    cards.send("node1", TWO, b"healed")
    assert cards.received("node2") == frame(TWO, b"healed")


def test_a_card_that_takes_nothing_loses_frames_beyond_a_limit(cards: Cards) -> None:
    for _ in range(400):
        cards.send("node1", TWO, bytes(60_000))
    received = bytearray()
    while data := cards.received("node2"):
        received += data
        process(cards.selector)
    assert 4_000_000 < len(received) < 10_000_000
    assert len(received) % len(frame(TWO, bytes(60_000))) == 0


def test_frames_to_a_node_that_has_ended_are_dropped(cards: Cards) -> None:
    cards.sockets["node2"].close()
    process(cards.selector)
    cards.send("node1", TWO, b"lost")
    cards.send("node1", THREE, b"arrives")
    assert cards.received("node3") == frame(THREE, b"arrives")


def test_the_monitor_reports_results_errors_and_its_end(selector: selectors.BaseSelector) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        monitor = Monitor(selector, ours)
        results: list[str | None] = []
        monitor.set_link("rxe-wire", False, results.append)
        monitor.set_link("no-wire", True, results.append)
        sent = [json.loads(line) for line in theirs.recv(10_000).splitlines()]
        assert [one["execute"] for one in sent] == ["qmp_capabilities", "set_link", "set_link"]
        assert sent[1]["arguments"] == {"name": "rxe-wire", "up": False}
        answers: list[dict[str, object]] = [
            {"QMP": {}},
            {"return": {}},
            {"event": "NIC_RX_FILTER_CHANGED"},
            {"return": {}},
            {"error": {"class": "DeviceNotFound", "desc": "no such card"}},
        ]
        theirs.sendall(b"".join(json.dumps(answer).encode() + b"\r\n" for answer in answers))
        process(selector)
        assert results == [None, "no such card"]
        monitor.set_link("rxe-wire", True, results.append)
    process(selector)
    assert results == [None, "no such card", "the machine has ended"]


def remote(serve: Callable[[socket.socket], None], *argv: str) -> RemoteCommand:
    """Return a command of a lab that `serve` imitates. The thread ends with the connection."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            kind, _, data = next(frames.FrameReader().feed(theirs.recv(100_000)))
            assert kind == frames.OPEN
            node, content = marshal.loads(data)
            assert (node, marshal.loads(content)["argv"]) == ("node2", list(argv))
            serve(theirs)

    threading.Thread(target=run, daemon=True).start()
    return RemoteCommand(CallerSocket(ours), "node2", argv)


STARTED = frames.pack(frames.STARTED, frames.COUNT.pack(77))


def test_a_remote_command_has_lines_and_an_exit_code() -> None:
    def serve(lab: socket.socket) -> None:
        lab.sendall(STARTED + frames.pack(frames.OUTPUT, b"\1one\ntw"))
        lab.sendall(frames.pack(frames.OUTPUT, b"\1o\nrest") + frames.pack(frames.EXIT, b"\3"))

    with remote(serve, "program", "x") as command:
        assert command.pid == 77
        assert [command.read_line() for _ in range(3)] == ["one", "two", "rest"]
        assert command.wait() == 3
        with pytest.raises(LabError, match=r"^program on node2 ended with 3$"):
            command.read_line()


def test_a_remote_command_raises_once_its_node_is_off() -> None:
    def serve(lab: socket.socket) -> None:
        lab.sendall(STARTED + frames.pack(frames.OUTPUT, b"\1before\n"))
        lab.sendall(frames.pack(frames.FAILED, b"the power of node2 was cut"))

    with remote(serve, "program") as command:
        assert command.read_line() == "before"
        with pytest.raises(LabError, match=r"^the power of node2 was cut$"):
            command.wait()


def test_a_remote_command_takes_input_only_when_its_node_asks() -> None:
    got = bytearray()

    def serve(lab: socket.socket) -> None:
        reader = frames.FrameReader()
        lab.sendall(STARTED + frames.pack(frames.STDIN_REQUEST))
        while True:
            for kind, _, data in reader.feed(lab.recv(100_000)):
                assert (kind, len(data) <= frames.CHUNK) == (frames.STDIN, True)
                got.extend(data)
                if not data:
                    lab.sendall(frames.pack(frames.EXIT, b"\0"))
                    return
                lab.sendall(frames.pack(frames.STDIN_REQUEST))

    data = bytes(range(256)) * 400
    with remote(serve, "cat") as command:
        command.write(data)
        command.close_stdin()
        assert command.wait() == 0
    assert bytes(got) == data


def test_a_wait_with_a_timeout_ends() -> None:
    release = threading.Event()

    def serve(lab: socket.socket) -> None:
        lab.sendall(STARTED)
        release.wait()

    with remote(serve, "sleep") as command:
        with pytest.raises(TimeoutError, match=r"sleep on node2 took longer than 0\.01 s"):
            command.wait(0.01)
        release.set()
        with pytest.raises(LabError, match="the lab has ended"):
            command.wait()
