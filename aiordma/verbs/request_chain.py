"""RequestChain: a linked list of work requests that are posted in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.enums import WrOpcode

if TYPE_CHECKING:
    from aiordma.verbs.queue_pair import Segment


class RequestChain:
    """A linked list of work requests for one ibv_post_send(3): see QueuePair.post_chain().

    A hardware device is notified once (one doorbell) for all of them. A software device already has
    all of them when it begins with the first.
    """

    __slots__ = ("_links", "chain")

    def __init__(self, capacity: int) -> None:
        self._links = ffi.new("struct aiordma_link[]", capacity)
        self.chain = ffi.new("struct aiordma_chain *", (0, capacity, self._links))

    @property
    def count(self) -> int:
        """The number of requests in the chain."""
        return self.chain.count

    @property
    def address(self) -> int:
        """The address of the C struct, valid while this object lives."""
        return int(ffi.cast("uintptr_t", self.chain))

    @property
    def is_full(self) -> bool:
        """True if no more request fits."""
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
        """Append a request with the arguments of QueuePair.post_list().

        Raises:
            ValueError: the chain is full.
        """
        if self.is_full:
            raise ValueError(f"a chain of {self.count} requests is full")
        lib.aiordma_add_link(self.chain, wr_id, opcode, *segment, flags, imm, *remote)
