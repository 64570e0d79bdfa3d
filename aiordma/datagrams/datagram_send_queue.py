"""DatagramSendQueue: the send queue of a datagram queue pair."""

from __future__ import annotations

from aiordma.datagrams.address_handles import AddressHandleReference
from aiordma.memory import PooledBuffer
from aiordma.qp import SendQueue


class DatagramSend:
    """The address handle and the buffer, if any, that the device uses to send one datagram."""

    __slots__ = ("buffer", "handle_reference")

    def __init__(self, handle_reference: AddressHandleReference) -> None:
        self.handle_reference = handle_reference
        self.buffer: PooledBuffer | None = None

    def release(self) -> None:
        """Release the address handle and the buffer, when the send has completed."""
        self.handle_reference.release()
        if self.buffer is not None:
            self.buffer.release()


class DatagramSendQueue(SendQueue):
    """A SendQueue in which each message has its own destination."""

    def post_to(
        self, datagram_send: DatagramSend, data: bytes, imm: int, destination: tuple[int, int]
    ) -> None:
        """Post a datagram, with a reserved send credit: inline, or copied into the buffer if any.

        `destination` is a queue pair number and a queue key.

        Raises:
            VerbsError: the device refused. The caller still owns the credit and `datagram_send`.
        """
        target = (datagram_send.handle_reference.handle, *destination)
        buffer = datagram_send.buffer
        wr_id, _ = self._commit(datagram_send)
        try:
            if buffer is None:
                self._qp.post_ud_send_inline(wr_id, data, imm, target)
            else:
                self._qp.post_ud_send_copy(wr_id, buffer.address, data, buffer.lkey, imm, target)
        except Exception:
            self.core.roll_back()
            raise
