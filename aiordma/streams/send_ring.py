"""SendRing: registered memory for what was copied and is not at the peer yet."""

from __future__ import annotations


class SendRing:
    """Places in a ring, taken in one order and given back in the same. Numbers only, no memory."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = 0
        self.free = size
        """Bytes that are not taken."""

    def take(self, nbytes: int) -> tuple[int, int]:
        """A place for some of `nbytes`, in one piece: where it begins, and its length, perhaps 0.

        Shorter than that if less is free, or if the ring ends there.
        """
        start = self._next
        length = min(nbytes, self.free, self._size - start)
        self.free -= length
        self._next = (start + length) % self._size
        return start, length

    def give_back(self, nbytes: int) -> None:
        """The oldest bytes that were taken are at the peer."""
        self.free += nbytes
