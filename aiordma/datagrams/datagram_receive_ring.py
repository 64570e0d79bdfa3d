"""Inbox: the receive ring of a datagram queue pair, and what stands in its slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma._native import lib
from aiordma.datagrams.origin import Origin, is_multicast, significant_part
from aiordma.datagrams.peer import DatagramPeer
from aiordma.qp import ReceiveRing
from aiordma.verbs import LinkHeader
from aiordma.verbs.address_handle import GRH_SIZE, gid_host
from aiordma.verbs.completion import immediate

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc


@dataclass(frozen=True, slots=True)
class Datagram:
    """A datagram that came."""

    data: bytes
    peer: DatagramPeer
    """Who sent it, and can be answered."""
    imm: int | None
    """The number of 32 bits that came beside the data, or None."""
    group: str | None
    """The multicast group that it was sent to, or None."""


# A LinkHeader as long as it is not looked at.
_Link = tuple[int, int, int, bool]
# What is kept of a completion, which is overwritten: the slot, the length of what stands in it, the
# sender's queue pair, link, immediate data.
_Arrival = tuple[int, int, int, _Link, int | None]
# Senders that are remembered, so that their next datagram costs less.
MAX_SENDERS = 4096


class DatagramReceiveRing(ReceiveRing):
    """A ReceiveRing in whose slots the 40 bytes of an Origin precede each message."""

    def __init__(self, slots: int, max_message_size: int) -> None:
        super().__init__(slots, GRH_SIZE + max_message_size)
        self.group_names: dict[bytes, str] = {}
        """The IP addresses of groups by their gids: on InfiniBand these are made otherwise."""
        self._arrivals: deque[_Arrival] = deque()
        self._senders: dict[tuple[int, _Link, bytes], tuple[DatagramPeer, bytes]] = {}

    def __len__(self) -> int:
        """Datagrams that have arrived and are not taken."""
        return len(self._arrivals)

    def arrived(self, slot: int, wc: IbvWc) -> None:
        """The device filled a slot, as the completion says."""
        self._arrivals.append((slot, wc.byte_len, wc.src_qp, _link(wc), immediate(wc)))

    def is_copy(self, slot: int, wc: IbvWc, gid: bytes) -> bool:
        """Whether a slot was filled with what the port of `gid` sent to a group."""
        header = bytes(self.view(slot, GRH_SIZE))
        origin = Origin.read(LinkHeader(*_link(wc)), header)
        return is_multicast(origin.destination) and origin.source == gid

    def take_datagram(self) -> tuple[int, Datagram]:
        """The oldest datagram, copied out, and the slot that it leaves, to be posted again."""
        slot, length, src_qp, link, imm = self._arrivals.popleft()
        message = bytes(self.view(slot, length))
        key = src_qp, link, significant_part(message) if link[3] else b""
        peer, destination = self._senders.get(key) or self._remember(key, message[:GRH_SIZE])
        return slot, Datagram(message[GRH_SIZE:], peer, imm, self._group_of(destination))

    def _remember(self, key: tuple[int, _Link, bytes], header: bytes) -> tuple[DatagramPeer, bytes]:
        src_qp, link, _ = key
        origin = Origin.read(LinkHeader(*link), header)
        sender = DatagramPeer.sending(origin, src_qp), origin.destination
        if len(self._senders) >= MAX_SENDERS:
            self._senders.clear()
        self._senders[key] = sender
        return sender

    def _group_of(self, gid: bytes) -> str | None:
        if not is_multicast(gid):
            return None
        return self.group_names.get(gid) or gid_host(gid)


def _link(wc: IbvWc) -> _Link:
    return wc.slid, wc.sl, wc.dlid_path_bits, bool(wc.wc_flags & lib.IBV_WC_GRH)
