"""Outbound: the peer's credits and buffers, which bound the data that may be sent."""

from __future__ import annotations

from aiordma._native import fast_path
from aiordma.errors import ProtocolError
from aiordma.streams.wire import (
    MAPPING_SIZE,
    SEGMENT_SIZE,
    TARGETS,
    ByteOrder,
    Mapping,
    Segment,
    unpack_mapping,
)

MAX_CONTROLS = fast_path.STREAM_CONTROLS
"""The number of control messages that may be posted and not completed at once."""


class Outbound(fast_path.OutboundCore):
    """The peer's buffers and credits. The peer writes the addresses of its buffers to `target_sgl`.

    Targets are copied out of the target SGL as soon as a message reports a change there. Each byte
    that is sent uses up one byte of a target. So data is only written to memory that the peer has
    announced. The numbers are in C, because each message changes them.
    """

    def __init__(self, target_sgl: memoryview, order: ByteOrder, reserve: int) -> None:
        """Use the memory `target_sgl`: TARGETS segments, and the mappings (iomap) behind them.

        `reserve` credits stay unused: on iWARP the peer needs receives for the control messages,
        which use no credits.
        """
        super().__init__(target_sgl, order == "big", reserve, MAX_CONTROLS)
        self._target_sgl = target_sgl
        self._order = order
        self.mappings: dict[int, Mapping] = {}
        """The mappings (iomap) of the peer, by index."""

    def start(self, credits_: int, buffer: Segment) -> None:
        """Take the credits and the first buffer from the peer's connection data.

        The first buffer is the first target.
        """
        self._start(credits_, buffer)

    def update_credits(self, total: int) -> None:
        """Take new credits, and the new targets that the peer has written, if any.

        `total` is the number of messages that may have been sent since the beginning.

        Raises:
            ProtocolError: a target is not a valid segment.
        """
        target = self._update_credits(total)
        if target is not None:
            Segment(*target).check()

    def send(self, nbytes: int) -> Segment:
        """Use up one credit and `nbytes` of a target, at most `room`.

        Return the part of the target that the data is written to.
        """
        return Segment(*self._send(nbytes))

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
