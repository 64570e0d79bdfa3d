"""Inbox: the receive ring of a datagram queue pair, and what stands in its slots."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma.datagrams.origin import Origin, is_multicast
from aiordma.datagrams.peer import DatagramPeer
from aiordma.datapath import ReceiveRing
from aiordma.enums import WcFlags
from aiordma.verbs import LinkHeader
from aiordma.verbs.address_handle import GRH_SIZE, gid_host

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


# What is kept of a completion, which is overwritten: the sender's queue pair, link, immediate data.
_Arrival = tuple[int, LinkHeader, int | None]


class Inbox(ReceiveRing):
    """A ReceiveRing in whose slots the 40 bytes of an Origin precede each message."""

    def __init__(self, slots: int, max_message_size: int) -> None:
        super().__init__(slots, GRH_SIZE + max_message_size)
        self.group_names: dict[bytes, str] = {}
        """The IP addresses of groups by their gids: on InfiniBand these are made otherwise."""
        self._arrivals: deque[_Arrival] = deque()

    def arrived_with(self, slot: int, wc: IbvWc) -> None:
        """The device filled a slot, as the completion says."""
        imm = socket.ntohl(wc.imm_data) if wc.wc_flags & WcFlags.WITH_IMM else None
        self._arrivals.append((wc.src_qp, _link(wc), imm))
        self.arrived(slot, wc.byte_len)

    def is_copy(self, slot: int, wc: IbvWc, gid: bytes) -> bool:
        """Whether a slot was filled with what the port of `gid` sent to a group."""
        start = slot * self._slot_size
        origin = Origin.read(_link(wc), bytes(self._region.view[start : start + GRH_SIZE]))
        return is_multicast(origin.destination) and origin.source == gid

    def take_datagram(self) -> tuple[int, Datagram]:
        """The oldest datagram, copied out, and the slot that it leaves, to be posted again."""
        src_qp, link, imm = self._arrivals.popleft()
        slot, message = self.take()
        origin = Origin.read(link, message[:GRH_SIZE])
        peer = DatagramPeer.sending(origin, src_qp)
        group = self._group_of(origin.destination)
        return slot, Datagram(message[GRH_SIZE:], peer, imm, group)

    def _group_of(self, gid: bytes) -> str | None:
        if not is_multicast(gid):
            return None
        return self.group_names.get(gid) or gid_host(gid)


def _link(wc: IbvWc) -> LinkHeader:
    is_global = bool(wc.wc_flags & WcFlags.GRH)
    return LinkHeader(wc.slid, wc.sl, wc.dlid_path_bits, is_global)
