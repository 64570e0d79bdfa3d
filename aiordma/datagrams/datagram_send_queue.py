"""DatagramSends: the send queue of a datagram queue pair."""

from __future__ import annotations

from aiordma.datagrams.address_handles import Borrowed
from aiordma.memory import PooledBuffer
from aiordma.qp import SendQueue


class Parcel:
    """What the device uses to send one datagram: the address handle, and the buffer if any."""

    __slots__ = ("borrowed", "buffer")

    def __init__(self, borrowed: Borrowed) -> None:
        self.borrowed = borrowed
        self.buffer: PooledBuffer | None = None

    def release(self) -> None:
        """The device is done with it."""
        self.borrowed.release()
        if self.buffer is not None:
            self.buffer.release()


class DatagramSends(SendQueue):
    """A SendQueue whose every message has a destination of its own."""

    def post_to(self, parcel: Parcel, data: bytes, imm: int, destination: tuple[int, int]) -> None:
        """Send a datagram from a reserved place: inline, or copied if the parcel has a buffer.

        `destination` is a queue pair number and a queue key.

        Raises:
            VerbsError: the device refused; place and parcel are still the caller's.
        """
        target = (parcel.borrowed.handle, *destination)
        buffer = parcel.buffer
        wr_id = self._enqueue(parcel)
        try:
            if buffer is None:
                self._qp.post_ud_send_inline(wr_id, data, imm, target)
            else:
                self._qp.post_ud_send_copy(wr_id, buffer.address, data, buffer.lkey, imm, target)
        except Exception:
            self._take_back(0)
            raise
