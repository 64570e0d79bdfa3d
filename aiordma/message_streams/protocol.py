"""MessageProtocol: the protocol of message streams, without I/O.

It returns the wire messages that are to be posted, and turns those that have arrived into events.

Credits: each wire message EAGER, ANNOUNCE and TABLE takes a credit of the receiver. The receiver
returns the credit of EAGER when the message is taken out of its slot, and of the others at once.
Credits travel in the header of each wire message; CREDIT is sent when half of them are free and
nothing else was sent. An announced message takes an announcement, too, until its DONE.

DONE, CREDIT and FINISH take no credits. Each side has CONTROL_SLOTS slots for them, and one for
each message that it may announce: at most two CREDITs can be under way, since each of them stands
for half of the window, one FINISH, and one DONE for each announced message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiordma._native import fast_path
from aiordma.errors import ProtocolError
from aiordma.message_streams.states import DirectionState, transition
from aiordma.message_streams.wire import (
    EAGER_OVERHEAD,
    FRAME_SIZE,
    HEADER_SIZE,
    SIZE_SIZE,
    Hello,
    Kind,
    RemoteFrame,
    Result,
    pack_done,
    pack_frames,
    pack_header,
    pack_number,
    pack_sizes,
    unpack_announcement,
    unpack_done,
    unpack_frames,
    unpack_header,
    unpack_sizes,
)

CONTROL_SLOTS = 3
_NUMBERS = 1 << 64


def slots_needed(own: Hello) -> int:
    """Return the number of slots in which all wire messages of any peer find room."""
    return own.window + own.announcements + CONTROL_SLOTS


class EagerMessage(NamedTuple):
    """A message that has arrived with its bytes."""

    frames: tuple[memoryview, ...]
    """Parts of the wire message. When they are not used any more, call release()."""


class AnnouncedMessage(NamedTuple):
    """A message whose bytes are to be read from the peer's memory."""

    number: int
    frames: tuple[RemoteFrame, ...]
    nbytes: int
    """The size of all frames together."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the frames in bytes."""
        return tuple([frame.length for frame in self.frames])


class Done(NamedTuple):
    """The peer does not need the memory of an announced message any more."""

    number: int
    result: Result


@dataclass(frozen=True)
class Finished:
    """The peer sends no further message."""


Event = EagerMessage | AnnouncedMessage | Done | Finished


class Announcement:
    """An announced message whose wire messages are posted one by one: see next_part()."""

    def __init__(self, number: int, frames: Sequence[RemoteFrame]) -> None:
        self.number = number
        self.frames = deque(frames)
        """The frames that are not listed yet."""
        self.count = len(frames)
        self.has_begun = False

    @property
    def is_listed(self) -> bool:
        """True if all wire messages were returned."""
        return self.has_begun and not self.frames


class MessageProtocol:
    """One side of a message stream."""

    def __init__(self, own: Hello, peer: Hello) -> None:
        self._own = own
        self._peer = peer
        self._max_wire = min(own.slot_size, peer.slot_size)  # the connection below has one limit
        self.wire_credits = fast_path.MessageCredits(own.window, peer.window)
        """The credits of both directions, which the fast path shares."""
        self._sending = self._receiving = DirectionState.READY
        # Plain attributes, which Exchange reads several times for each message.
        self.has_finished = False
        """True if finish() was called."""
        self.peer_has_finished = False
        """True if the peer sends no further message."""
        self.is_between_messages = True
        """True if the peer's next wire message can begin a message."""
        self._next_number = 0
        self._announced: set[int] = set()
        self.announcements = min(own.announcements, peer.announcements)
        """The number of messages that may be announced now. Both sides limit it."""
        # Receiving.
        self._expected_number = 0
        self._unread: set[int] = set()
        self._listing: list[RemoteFrame] = []
        self._listing_nbytes = 0
        self._listing_number = 0
        self._listing_count = 0

    # --- sending ---

    @property
    def credits(self) -> int:
        """The number of EAGER, ANNOUNCE and TABLE that may be posted."""
        return self.wire_credits.credits

    def check_message(self, sizes: Sequence[int]) -> None:
        """Raise an exception if the peer does not take a message of frames of these sizes.

        Raises:
            ValueError: it has too many frames or bytes.
        """
        peer = self._peer
        if len(sizes) > peer.max_frames:
            raise ValueError(f"a message of {len(sizes)} frames; the peer takes {peer.max_frames}")
        if sum(sizes) > peer.max_nbytes:
            raise ValueError(f"a message of {sum(sizes)} bytes; the peer takes {peer.max_nbytes}")

    def is_eager(self, sizes: Sequence[int], threshold: int) -> bool:
        """Return True if the message fits into EAGER and has at most `threshold` bytes."""
        nbytes = sum(sizes)
        needed = HEADER_SIZE + len(sizes) * SIZE_SIZE + nbytes
        return nbytes <= threshold and needed <= self._max_wire

    def max_eager(self, threshold: int) -> int:
        """Return the size of the largest message of one frame that is_eager()."""
        return min(threshold, self._max_wire - EAGER_OVERHEAD, self._peer.max_nbytes)

    def eager(self, sizes: Sequence[int]) -> bytes:
        """Return the beginning of EAGER. The bytes of the frames follow it. Takes a credit."""
        self._take_credit(Kind.EAGER, is_complete=True)
        return self._header(Kind.EAGER, len(sizes)) + pack_sizes(sizes)

    def announce(self, frames: Sequence[RemoteFrame]) -> Announcement:
        """Begin to announce a message. All its parts are posted before another message begins.

        The memory stays registered until the peer's Done with its number, or the end of the
        connection.
        """
        if self.announcements <= 0:
            raise ValueError("no message may be announced now")
        if not frames:
            raise ValueError("an announced message has at least one frame")
        announcement = Announcement(self._next_number, frames)
        self._next_number = (self._next_number + 1) % _NUMBERS
        self.announcements -= 1
        return announcement

    def next_part(self, announcement: Announcement) -> bytes:
        """Return the next wire message of an announcement. Takes a credit."""
        is_first = not announcement.has_begun
        beginning = pack_number(announcement.number) if is_first else b""
        room = (self._max_wire - HEADER_SIZE - len(beginning)) // FRAME_SIZE
        frames = announcement.frames
        part = [frames.popleft() for _ in range(min(room, len(frames)))]
        kind = Kind.ANNOUNCE if is_first else Kind.TABLE
        self._take_credit(kind, is_complete=not frames)
        if not frames:
            self._announced.add(announcement.number)  # from now on, DONE may come
        announcement.has_begun = True
        count = announcement.count if is_first else len(part)
        return self._header(kind, count) + beginning + pack_frames(part)

    def finish(self) -> bytes:
        """Return FINISH: this side sends no further message."""
        self._sending = transition(self._sending, Kind.FINISH, is_complete=True)
        self.has_finished = True
        return self._header(Kind.FINISH, 0)

    def done(self, number: int, result: Result) -> bytes:
        """Return DONE for an announced message of the peer."""
        self._unread.remove(number)
        return pack_done(self.wire_credits.return_freed(), number, result)

    def credit_update(self) -> bytes:
        """Return CREDIT. It is due if `wire_credits.is_update_due`."""
        return self._header(Kind.CREDIT, 0)

    def _take_credit(self, kind: Kind, *, is_complete: bool) -> None:
        following = transition(self._sending, kind, is_complete=is_complete)
        self.wire_credits.take()
        self._sending = following

    def _header(self, kind: Kind, count: int) -> bytes:
        returned = self.wire_credits.return_freed()  # at most the window: it fits into the header
        return pack_header(kind, returned, count)

    # --- receiving ---

    def received(self, message: memoryview) -> Event | None:
        """Return the event of a wire message, or None: a part of an announcement, or CREDIT.

        The frames of an EagerMessage are parts of `message`.

        Raises:
            ProtocolError: the peer breaks the protocol, or exceeds a limit of this side.
        """
        kind, returned, count = unpack_header(message)
        body = message[HEADER_SIZE:]
        if not self.wire_credits.add(returned):
            total = self.credits + returned
            raise ProtocolError(f"{total} credits; the window is {self._peer.window}")
        if kind in (Kind.CREDIT, Kind.FINISH, Kind.DONE):
            return self._control(kind, count, body)
        if not self.wire_credits.use():
            raise ProtocolError("the peer sends more messages than it has credits for")
        if kind is Kind.EAGER:
            return self._eager(count, body)
        self.wire_credits.free()
        if kind is Kind.ANNOUNCE:
            return self._announcement(count, body)
        return self._list(count, body)

    def _control(self, kind: Kind, count: int, body: memoryview) -> Event | None:
        if count:
            raise ProtocolError(f"{kind.name} with the number {count}")
        if kind is Kind.DONE:
            return self._done(body)
        if len(body):
            raise ProtocolError(f"{kind.name} with a body")
        if kind is Kind.CREDIT:
            return None
        self._advance(Kind.FINISH, is_complete=True)
        return Finished()

    def release(self) -> None:
        """Note that an EagerMessage is not used any more: its slot can be posted again."""
        self.wire_credits.free()

    def _advance(self, kind: Kind, *, is_complete: bool) -> None:
        state = transition(self._receiving, kind, is_complete=is_complete)
        self._receiving = state
        self.peer_has_finished = state is DirectionState.FINISHED
        self.is_between_messages = state is DirectionState.READY

    def _done(self, body: memoryview) -> Done:
        number, result = unpack_done(body)
        if number not in self._announced:
            raise ProtocolError(f"DONE for message {number}, which waits for none")
        self._announced.remove(number)
        self.announcements += 1
        return Done(number, result)

    def _eager(self, count: int, body: memoryview) -> EagerMessage:
        self._check_limits(count, len(body) - count * SIZE_SIZE)
        self._advance(Kind.EAGER, is_complete=True)
        sizes = unpack_sizes(body, count)
        frames, start = [], count * SIZE_SIZE
        for size in sizes:
            frames.append(body[start : start + size])
            start += size
        return EagerMessage(tuple(frames))

    def _announcement(self, count: int, body: memoryview) -> AnnouncedMessage | None:
        number, frames = unpack_announcement(body)
        if number != self._expected_number:
            raise ProtocolError(f"message {number} was announced in place of another one")
        if len(self._unread) >= self._own.announcements:
            raise ProtocolError(f"more than {self._own.announcements} messages are announced")
        if not frames:
            raise ProtocolError("ANNOUNCE lists no frame")
        self._advance(Kind.ANNOUNCE, is_complete=len(frames) >= count)
        self._expected_number = (number + 1) % _NUMBERS
        self._unread.add(number)
        self._listing_number, self._listing_count = number, count
        self._listing, self._listing_nbytes = [], 0
        return self._add(frames)

    def _list(self, count: int, body: memoryview) -> AnnouncedMessage | None:
        frames = unpack_frames(body)
        if count != len(frames) or not frames:
            raise ProtocolError(f"TABLE of {count} frames has {len(frames)}")
        missing = self._listing_count - len(self._listing)
        self._advance(Kind.TABLE, is_complete=len(frames) >= missing)
        return self._add(frames)

    def _add(self, frames: list[RemoteFrame]) -> AnnouncedMessage | None:
        listing = self._listing
        listing += frames
        if len(listing) > self._listing_count:
            raise ProtocolError(f"more frames are listed than {self._listing_count}")
        for frame in frames:
            self._listing_nbytes += frame.length
        self._check_limits(self._listing_count, self._listing_nbytes)
        if len(listing) < self._listing_count:
            return None
        self._listing = []
        return AnnouncedMessage(self._listing_number, tuple(listing), self._listing_nbytes)

    def _check_limits(self, count: int, nbytes: int) -> None:
        own = self._own
        if count > own.max_frames:
            raise ProtocolError(f"a message of {count} frames; the limit is {own.max_frames}")
        if nbytes > own.max_nbytes:
            raise ProtocolError(f"a message of {nbytes} bytes; the limit is {own.max_nbytes}")
