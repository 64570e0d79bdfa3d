"""Outbound: what may be sent, and to where in the peer's memory."""

from __future__ import annotations

from collections import deque

from aiordma.errors import ProtocolError
from aiordma.streams.wire import (
    MAPPING_SIZE,
    SEGMENT_SIZE,
    TARGETS,
    ByteOrder,
    Mapping,
    Segment,
    unpack_mapping,
    unpack_segment,
)

_SEQUENCE = 0xFFFF
_NOTHING = bytes(SEGMENT_SIZE)


class Outbound:
    """The peer's buffers and credits. The peer writes its buffers into `remote_sgl`.

    Targets are taken off the board as soon as a message says that something has changed there,
    and each byte that is sent uses up one of theirs: nothing is ever written but where the peer
    has said that it may be.
    """

    def __init__(self, remote_sgl: memoryview, order: ByteOrder, reserve: int) -> None:
        """`remote_sgl` has room for TARGETS segments, and mappings behind them.

        `reserve` credits stay unused: on iWARP the peer needs receives for messages that no credits
        count.
        """
        self._remote_sgl = remote_sgl
        self._order = order
        self._reserve = reserve
        self._next_target = 0
        self._targets: deque[Segment] = deque()
        self._sent = 0
        self._limit = 0
        self.mappings: dict[int, Mapping] = {}
        """What the peer has mapped, by index."""

    def start(self, credits_: int, buffer: Segment) -> None:
        """What the peer's connection data say. Its first buffer stands for the first target."""
        self._limit = credits_
        self._reserve = min(self._reserve, credits_ // 4)
        self._next_target = 1
        if buffer.length:
            self._targets.append(buffer)

    @property
    def credits(self) -> int:
        """Messages of data that may be sent now."""
        return max(0, (self._limit - self._sent & _SEQUENCE) - self._reserve)

    @property
    def room(self) -> int:
        """Bytes that one message may carry now; 0: none can be sent."""
        return self._targets[0].length if self._targets and self.credits else 0

    def update_credits(self, total: int) -> None:
        """The peer says how many messages may have been sent in all, and perhaps of a target.

        Raises:
            ProtocolError: the target is none.
        """
        self._limit = total & _SEQUENCE
        self._take_targets()

    def _take_targets(self) -> None:
        # A device writes an entry from its beginning to its end: where there is a length, the rest
        # is there, whichever of two updates this message is about. So the length is read first.
        while True:
            at = self._next_target * SEGMENT_SIZE
            entry = self._remote_sgl[at : at + SEGMENT_SIZE]
            length = unpack_segment(entry, self._order).length
            if not length or len(self._targets) >= TARGETS:
                return
            target = unpack_segment(entry, self._order)
            target.check()
            entry[:] = _NOTHING
            self._targets.append(target)
            self._next_target = (self._next_target + 1) % TARGETS

    def send(self, nbytes: int) -> Segment:
        """Use up one credit and so many bytes, at most `room`, of a target: where they go."""
        target = self._targets[0]
        if nbytes == target.length:
            self._targets.popleft()
        else:
            self._targets[0] = target.after(nbytes)
        self.spend_credit()
        return target._replace(length=nbytes)

    def spend_credit(self) -> None:
        """Use up one credit."""
        self._sent = self._sent + 1 & _SEQUENCE

    def mapped(self, index: int) -> None:
        """The peer says that it wrote a mapping.

        Raises:
            ProtocolError: there is no such place, or the mapping is none.
        """
        start = TARGETS * SEGMENT_SIZE + index * MAPPING_SIZE
        entry = self._remote_sgl[start : start + MAPPING_SIZE]
        if len(entry) < MAPPING_SIZE:
            raise ProtocolError(f"the peer says it wrote mapping {index}, which there is not")
        mapping = unpack_mapping(entry, self._order)
        mapping.segment.check()
        self.mappings[index] = mapping

    def find_mapped(self, offset: int, nbytes: int) -> Segment | None:
        """Where in the peer's memory these offsets are mapped, whole; None if they are not."""
        for first, segment in self.mappings.values():
            if first <= offset and offset + nbytes <= first + segment.length:
                return Segment(segment.addr + offset - first, segment.key, nbytes)
        return None
