"""The send queue and the receive ring of a datagram queue pair."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma.datagrams.handles import Borrowed
from aiordma.datapath import ReceiveRing, SendQueue
from aiordma.enums import WcFlags
from aiordma.memory import PooledBuffer
from aiordma.verbs import AddressHandle, LinkHeader
from aiordma.verbs.address_handle import GRH_SIZE

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

# An address handle, a queue pair number and a queue key.
Destination = tuple[AddressHandle, int, int]


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
        wr_id = self._first_wr_id + self._number
        target = (parcel.borrowed.handle, *destination)
        buffer = parcel.buffer
        if buffer is None:
            self._qp.post_ud_send_inline(wr_id, data, imm, target)
        else:
            self._qp.post_ud_send_copy(wr_id, buffer.address, data, buffer.lkey, imm, target)
        self._enqueue(parcel)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the completion says of a datagram that came."""

    src_qp: int
    link: LinkHeader
    imm: int | None

    @classmethod
    def read(cls, wc: IbvWc) -> Arrival:
        """From a completion that is about to be overwritten."""
        flags = wc.wc_flags
        link = LinkHeader(wc.slid, wc.sl, wc.dlid_path_bits, bool(flags & WcFlags.GRH))
        imm = socket.ntohl(wc.imm_data) if flags & WcFlags.WITH_IMM else None
        return cls(wc.src_qp, link, imm)


class DatagramRing(ReceiveRing):
    """A ReceiveRing in whose slots 40 bytes precede each message."""

    def __init__(self, slots: int, max_message_size: int) -> None:
        super().__init__(slots, GRH_SIZE + max_message_size)
        self._arrivals: deque[Arrival] = deque()

    def arrived_from(self, slot: int, length: int, arrival: Arrival) -> None:
        """The device filled a slot."""
        self.arrived(slot, length)
        self._arrivals.append(arrival)

    def header(self, slot: int) -> bytes:
        """The 40 bytes in a slot that was filled."""
        start = slot * self._slot_size
        return bytes(self._region.view[start : start + GRH_SIZE])

    def take_datagram(self) -> tuple[int, Arrival, bytes, bytes]:
        """The oldest datagram: its slot, to be posted again, what the completion said of it, the
        40 bytes, and the rest."""
        slot, length = self._messages.popleft()
        start = slot * self._slot_size
        body = start + GRH_SIZE
        view = self._region.view
        header, data = bytes(view[start:body]), bytes(view[body : start + length])
        return slot, self._arrivals.popleft(), header, data
