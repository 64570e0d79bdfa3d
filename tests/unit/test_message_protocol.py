"""The protocol of message streams without I/O: with itself, and with a peer that breaks it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from broken_messages import BAD, HELLO, random_message
from helpers import ROOT
from state_diagram import check_diagram

from aiordma import ProtocolError
from aiordma.message_streams.protocol import (
    AnnouncedMessage,
    Announcement,
    Done,
    EagerMessage,
    Event,
    Finished,
    MessageProtocol,
    slots_needed,
)
from aiordma.message_streams.states import TRANSITIONS, DirectionEvent, DirectionState
from aiordma.message_streams.wire import (
    HELLO_SIZE,
    MIN_SLOT_SIZE,
    Hello,
    Kind,
    RemoteFrame,
    Result,
    pack_header,
)


def pair(own: Hello = HELLO, peer: Hello = HELLO) -> tuple[MessageProtocol, MessageProtocol]:
    return MessageProtocol(own, peer), MessageProtocol(peer, own)


def eager(protocol: MessageProtocol, *frames: bytes) -> memoryview:
    return memoryview(protocol.eager([len(frame) for frame in frames]) + b"".join(frames))


def announce(protocol: MessageProtocol, *frames: RemoteFrame) -> list[memoryview]:
    announcement, parts = protocol.announce(frames), []
    while not announcement.is_listed:
        parts.append(memoryview(protocol.next_part(announcement)))
    return parts


def texts(event: Event | None) -> list[bytes]:
    assert isinstance(event, EagerMessage)
    return [bytes(frame) for frame in event.frames]


# --- one by one ---


def test_the_hello_is_packed_before_the_private_data_of_the_user() -> None:
    packed = HELLO.pack()
    assert len(packed) == HELLO_SIZE == 28
    assert packed[:8] == b"aiMS\x01\x00\x00\x04"  # big-endian
    assert Hello.unpack(packed + b"mine") == (HELLO, b"mine")
    later = replace(HELLO, features=7)  # of a later version: ignored
    assert Hello.unpack(later.pack())[0].features == 7


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not use the protocol"),
        (HELLO.pack()[:-1], "does not use the protocol"),
        (b"x" + HELLO.pack()[1:], "does not use the protocol"),
        (b"aiMS\x02" + HELLO.pack()[5:], "version 2"),
        (replace(HELLO, window=0).pack(), "takes no messages"),
        (replace(HELLO, announcements=0).pack(), "takes no messages"),
        (replace(HELLO, max_frames=0).pack(), "takes no messages"),
        (replace(HELLO, slot_size=MIN_SLOT_SIZE - 1).pack(), "takes 39 bytes, not 40"),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Hello.unpack(data)


def is_update_due(protocol: MessageProtocol) -> bool:
    return protocol.wire_credits.is_update_due


def test_eager_messages_take_credits_until_they_are_released() -> None:
    near, far = pair()
    frames = [(b"one",), (b"", b"two", b""), (), (b"x" * 100, b"y")]
    arrived = [far.received(eager(near, *message)) for message in frames]
    assert list(map(texts, arrived)) == [list(message) for message in frames]
    assert near.credits == 0
    with pytest.raises(ValueError, match="no credit"):
        near.eager([1])
    far.release()
    assert not is_update_due(far)  # less than half of the window
    far.release()
    assert is_update_due(far)
    update = far.credit_update()
    assert not is_update_due(far)
    assert near.received(memoryview(update)) is None
    assert near.credits == 2
    far.release()
    near.received(eager(far, b"an answer returns credits, too"))
    assert near.credits == 3


def test_an_announced_message_is_listed_in_parts() -> None:
    near, far = pair(peer=replace(HELLO, slot_size=100))
    frames = [RemoteFrame(10**5, 1 << 40 | index, index) for index in range(8)]
    parts = announce(near, *frames)
    assert [len(part) for part in parts] == [88, 80, 56]
    assert near.credits == 1
    events = [far.received(part) for part in parts]
    assert events == [None, None, AnnouncedMessage(0, tuple(frames), 8 * 10**5)]
    last = events[-1]
    assert isinstance(last, AnnouncedMessage)
    assert last.nbytes == 8 * 10**5
    assert near.announcements == 1
    assert near.received(memoryview(far.done(0, Result.READ))) == Done(0, Result.READ)
    assert (near.announcements, near.credits) == (2, 4)  # its parts are free at once


def test_a_message_that_is_not_listed_completely_is_not_done() -> None:
    sender, receiver = pair(replace(HELLO, slot_size=MIN_SLOT_SIZE))
    announcement = sender.announce([RemoteFrame(1, index, 1) for index in range(4)])
    sender.next_part(announcement)
    assert not announcement.is_listed
    receiver._unread.add(announcement.number)
    with pytest.raises(ProtocolError, match="waits for none"):
        sender.received(memoryview(receiver.done(announcement.number, Result.READ)))


def test_messages_end_with_finish() -> None:
    near, far = pair()
    assert not near.has_finished
    assert far.received(memoryview(near.finish())) == Finished()
    assert (near.has_finished, far.peer_has_finished, far.has_finished) == (True, True, False)
    for call in (near.finish, lambda: near.eager([1])):
        with pytest.raises(ProtocolError, match="in the state FINISHED"):
            call()
    assert texts(near.received(eager(far, b"the other direction"))) == [b"the other direction"]


def test_messages_that_the_peer_does_not_take_are_refused_here() -> None:
    near, _ = pair()
    near.check_message([1] * 100)
    near.check_message([1 << 20])
    with pytest.raises(ValueError, match="101 frames; the peer takes 100"):
        near.check_message([1] * 101)
    with pytest.raises(ValueError, match="1048577 bytes; the peer takes 1048576"):
        near.check_message([1 << 20, 1])
    assert near.is_eager([100], 100)
    assert not near.is_eager([101], 100)
    assert near.is_eager([240], 1000)
    assert not near.is_eager([241], 1000)
    with pytest.raises(ValueError, match="at least one frame"):
        near.announce([])
    for _ in range(2):
        announce(near, RemoteFrame(1, 2, 3))
    with pytest.raises(ValueError, match="no message may be announced now"):
        near.announce([RemoteFrame(1, 2, 3)])


def test_another_message_cannot_begin_within_an_announcement() -> None:
    near, _ = pair(peer=replace(HELLO, slot_size=MIN_SLOT_SIZE))
    announcement = near.announce([RemoteFrame(1, 2, 3)] * 2)
    near.next_part(announcement)
    with pytest.raises(ProtocolError, match="EAGER in the state LISTING"):
        near.eager([1])
    near.next_part(announcement)
    near.eager([1])


# --- a peer that breaks the protocol ---


@pytest.mark.parametrize(("messages", "error"), BAD)
def test_a_peer_that_breaks_the_protocol_is_found(messages: list[bytes], error: str) -> None:
    _, far = pair()
    for message in messages[:-1]:
        far.received(memoryview(message))
    with pytest.raises(ProtocolError, match=error):
        far.received(memoryview(messages[-1]))


def test_any_bytes_raise_a_protocol_error_or_are_legal() -> None:
    chance = random.Random(1)
    legal = 0
    for _ in range(5000):
        _, far = pair()
        for _ in range(3):
            try:
                far.received(memoryview(random_message(chance)))
                legal += 1
            except ProtocolError:
                break
    assert legal > 100


# --- two sides that do what a seed says ---


class Side:
    """A side that sends random messages, takes what arrives, and answers late."""

    def __init__(self, chance: random.Random, own: Hello, peer: Hello) -> None:
        self.protocol = MessageProtocol(own, peer)
        self.slots = slots_needed(own)
        self.peer_hello = peer
        self.chance = chance
        self.inbox: deque[memoryview] = deque()
        self.sent: list[tuple[bytes, ...] | tuple[RemoteFrame, ...]] = []
        self.received: list[tuple[bytes, ...] | tuple[RemoteFrame, ...]] = []
        self.listing: Announcement | None = None
        self.held = 0
        self.unread: list[int] = []
        self.to_send = chance.randrange(30)

    def may_send(self) -> bool:
        return self.protocol.credits > 0 and (self.to_send > 0 or self.listing is not None)

    def send(self) -> bytes:
        chance, protocol = self.chance, self.protocol
        if self.listing is None:
            self.to_send -= 1
            frames = [chance.randbytes(chance.randrange(20)) for _ in range(chance.randrange(4))]
            if chance.random() < 0.5 and protocol.is_eager(list(map(len, frames)), 1000):
                self.sent.append(tuple(frames))
                return bytes(eager(protocol, *frames))
            if not protocol.announcements:
                self.to_send += 1
                return b""
            count = chance.randrange(1, 12)
            remote = [RemoteFrame(chance.randrange(100), 5, 6) for _ in range(count)]
            self.sent.append(tuple(remote))
            self.listing = protocol.announce(remote)
        part = protocol.next_part(self.listing)
        if self.listing.is_listed:
            self.listing = None
        return part

    def take(self) -> None:
        event = self.protocol.received(self.inbox.popleft())
        if isinstance(event, EagerMessage):
            self.received.append(tuple(map(bytes, event.frames)))
            self.held += 1
        elif isinstance(event, AnnouncedMessage):
            self.received.append(event.frames)
            self.unread.append(event.number)

    def act(self) -> bytes:
        """Do something, and return a wire message or b""."""
        choices: list[Callable[[], bytes | None]] = []
        if self.may_send():
            choices.append(self.send)
        elif not (self.to_send or self.listing or self.protocol.has_finished):
            choices.append(self.protocol.finish)
        if self.inbox:
            choices.append(self.take)
        if self.held:
            choices.append(self.release)
        if self.unread:
            number = self.chance.choice(self.unread)
            choices.append(lambda: self.done(number))
        message = self.chance.choice(choices)() if choices else None
        if message is None and is_update_due(self.protocol):
            return self.protocol.credit_update()
        return message or b""

    def release(self) -> None:
        self.held -= 1
        self.protocol.release()

    def done(self, number: int) -> bytes:
        self.unread.remove(number)
        return self.protocol.done(number, self.chance.choice(list(Result)))


def random_hello(chance: random.Random) -> Hello:
    return Hello(
        window=chance.randrange(1, 9),
        announcements=chance.randrange(1, 4),
        slot_size=chance.randrange(MIN_SLOT_SIZE, 200),
        max_frames=100,
        max_nbytes=1 << 20,
    )


@pytest.mark.parametrize("seed", range(200))
def test_two_sides_never_exceed_the_slots_and_never_wait_for_each_other(seed: int) -> None:
    chance = random.Random(seed)
    hellos = random_hello(chance), random_hello(chance)
    sides = Side(chance, *hellos), Side(chance, *reversed(hellos))
    idle = 0
    while idle < 300:
        index = chance.randrange(2)
        message = sides[index].act()
        idle = 0 if message or sides[0].inbox or sides[1].inbox else idle + 1
        if message:
            inbox = sides[1 - index].inbox
            inbox.append(memoryview(message))
            assert len(message) <= sides[1 - index].protocol._own.slot_size
            assert len(inbox) + sides[1 - index].held <= sides[1 - index].slots
    for side, other in (sides, reversed(sides)):
        assert (side.to_send, side.listing) == (0, None)
        assert other.received == side.sent
        assert other.protocol.peer_has_finished


# --- the table ---


def test_the_page_shows_the_table() -> None:
    table = {
        state: [(following, event.name) for event, following in row.items()]
        for state, row in TRANSITIONS.items()
    }
    check_diagram("docs/message_wire.md", table)
    page = (ROOT / "docs/message_wire.md").read_text()
    for kind in Kind:
        assert f"| `{kind.name}` | {kind.value} |" in page


def test_the_table_has_all_states_and_events() -> None:
    assert set(TRANSITIONS) == set(DirectionState)
    used = {event for events in TRANSITIONS.values() for event in events}
    assert used == set(DirectionEvent)
    assert pack_header(Kind.CREDIT, 3, 0) == bytes([5, 0, 0, 3, 0, 0, 0, 0])
