"""Outbound: the peer's credits and buffers, which bound the data that may be sent."""

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

_SEQUENCE_MASK = 0xFFFF
_EMPTY_ENTRY = bytes(SEGMENT_SIZE)


class Outbound:
    """The peer's buffers and credits. The peer writes the addresses of its buffers to `target_sgl`.

    Targets are copied out of the target SGL as soon as a message reports a change there. Each byte
    that is sent uses up one byte of a target. So data is only written to memory that the peer has
    announced.
    """

    def __init__(self, target_sgl: memoryview, order: ByteOrder, reserve: int) -> None:
        """Use the memory `target_sgl`: TARGETS segments, and the mappings (iomap) behind them.

        `reserve` credits stay unused: on iWARP the peer needs receives for the control messages,
        which use no credits.
        """
        self._target_sgl = target_sgl
        self._order = order
        self._reserve = reserve
        self._next_target = 0
        self._targets: deque[Segment] = deque()
        self._sent = 0
        self._limit = 0
        self.mappings: dict[int, Mapping] = {}
        """The mappings (iomap) of the peer, by index."""

    def start(self, credits_: int, buffer: Segment) -> None:
        """Take the credits and the first buffer from the peer's connection data.

        The first buffer is the first target.
        """
        self._limit = credits_
        self._reserve = min(self._reserve, credits_ // 4)
        self._next_target = 1
        if buffer.length:
            self._targets.append(buffer)

    @property
    def credits(self) -> int:
        """The number of messages that use a credit and may be sent now."""
        return max(0, (self._limit - self._sent & _SEQUENCE_MASK) - self._reserve)

    @property
    def room(self) -> int:
        """Bytes that one write may carry now; 0 if no data can be sent."""
        return self._targets[0].length if self._targets and self.credits else 0

    def update_credits(self, total: int) -> None:
        """Take new credits, and the new targets that the peer has written, if any.

        `total` is the number of messages that may have been sent since the beginning.

        Raises:
            ProtocolError: a target is not a valid segment.
        """
        self._limit = total & _SEQUENCE_MASK
        self._take_targets()

    def _take_targets(self) -> None:
        # The device writes an entry from its first byte to its last. An entry with a length is
        # complete, even if its own message has not been received yet. So the length is read first.
        while True:
            at = self._next_target * SEGMENT_SIZE
            entry = self._target_sgl[at : at + SEGMENT_SIZE]
            length = unpack_segment(entry, self._order).length
            if not length or len(self._targets) >= TARGETS:
                return
            target = unpack_segment(entry, self._order)
            target.check()
            entry[:] = _EMPTY_ENTRY
            self._targets.append(target)
            self._next_target = (self._next_target + 1) % TARGETS

    def send(self, nbytes: int) -> Segment:
        """Use up one credit and `nbytes` of a target, at most `room`.

        Return the part of the target that the data is written to.
        """
        target = self._targets[0]
        if nbytes == target.length:
            self._targets.popleft()
        else:
            self._targets[0] = target.after(nbytes)
        self.spend_credit()
        return target._replace(length=nbytes)

    def spend_credit(self) -> None:
        """Use up one credit."""
        self._sent = self._sent + 1 & _SEQUENCE_MASK

    def mapping_received(self, index: int) -> None:
        """Take the mapping that the peer has written at `index`.

        Raises:
            ProtocolError: there is no such index, or the mapping is not valid.
        """
        start = TARGETS * SEGMENT_SIZE + index * MAPPING_SIZE
        entry = self._target_sgl[start : start + MAPPING_SIZE]
        if len(entry) < MAPPING_SIZE:
            raise ProtocolError(f"the peer reports mapping {index}, which does not exist")
        mapping = unpack_mapping(entry, self._order)
        mapping.segment.check()
        self.mappings[index] = mapping

    def find_mapped(self, offset: int, nbytes: int) -> Segment | None:
        """Return the peer's memory for `nbytes` from `offset`.

        None if no single mapping covers all of them.
        """
        for first, segment in self.mappings.values():
            if first <= offset and offset + nbytes <= first + segment.length:
                return Segment(segment.addr + offset - first, segment.key, nbytes)
        return None
