"""RequestChain: requests that go to the device in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import WrOpcode

if TYPE_CHECKING:
    from aiordma.verbs.queue_pair import Segment


class RequestChain:
    """Requests linked by their `next`, for one ibv_post_send(3): see QueuePair.post_chain().

    A card is told of them once; a soft device does the work of the first while it has the others.
    """

    __slots__ = ("_links", "chain")

    def __init__(self, capacity: int) -> None:
        self._links = ffi.new("struct aiordma_link[]", capacity)
        self.chain = ffi.new("struct aiordma_chain *", (0, capacity, self._links))

    @property
    def count(self) -> int:
        """Requests in it."""
        return self.chain.count

    @property
    def address(self) -> int:
        """Where C code finds it, as long as this object lives."""
        return int(ffi.cast("uintptr_t", self.chain))

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another."""
        return self.chain.count == self.chain.capacity

    def add(
        self,
        wr_id: int,
        opcode: WrOpcode,
        segment: Segment,
        remote: tuple[int, int],
        flags: int,
        imm: int,
    ) -> None:
        """Append a request, as QueuePair.post_list() would post it.

        Raises:
            ValueError: it is full.
        """
        if self.is_full:
            raise ValueError(f"a chain of {self.count} requests is full")
        lib.aiordma_add_link(self.chain, wr_id, opcode, *segment, flags, imm, *remote)
