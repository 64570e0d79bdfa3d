"""DatagramSends: the send queue of a datagram queue pair."""

from __future__ import annotations

from aiordma.datagrams.address_handles import AddressHandleReference
from aiordma.memory import PooledBuffer
from aiordma.qp import SendQueue


class DatagramSend:
    """What the device uses to send one datagram: the address handle, and the buffer if any."""

    __slots__ = ("buffer", "handle_reference")

    def __init__(self, borrowed: AddressHandleReference) -> None:
        self.handle_reference = borrowed
        self.buffer: PooledBuffer | None = None

    def release(self) -> None:
        """The device is done with it."""
        self.handle_reference.release()
        if self.buffer is not None:
            self.buffer.release()


class DatagramSendQueue(SendQueue):
    """A SendQueue whose every message has a destination of its own."""

    def post_to(
        self, datagram_send: DatagramSend, data: bytes, imm: int, destination: tuple[int, int]
    ) -> None:
        """Send a datagram from a reserved place: inline, or copied if the parcel has a buffer.

        `destination` is a queue pair number and a queue key.

        Raises:
            VerbsError: the device refused; place and parcel are still the caller's.
        """
        target = (datagram_send.handle_reference.handle, *destination)
        buffer = datagram_send.buffer
        wr_id = self._enqueue(datagram_send)
        try:
            if buffer is None:
                self._qp.post_ud_send_inline(wr_id, data, imm, target)
            else:
                self._qp.post_ud_send_copy(wr_id, buffer.address, data, buffer.lkey, imm, target)
        except Exception:
            self._roll_back(0)
            raise
