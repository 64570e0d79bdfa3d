"""DatagramReceiveRing: the receive ring of a datagram queue pair. Datagram: a received datagram."""

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
    """A received datagram."""

    data: bytes
    peer: DatagramPeer
    """The sender, which send_to() can answer."""
    imm: int | None
    """The 32-bit number that came beside the data (immediate data), or None."""
    group: str | None
    """The multicast group that it was sent to, or None."""


# The fields of a LinkHeader. A tuple is cheaper, and the LinkHeader is rarely needed.
_Link = tuple[int, int, int, bool]
# A copy of the fields of a completion, which is overwritten: the slot, the length of its contents,
# the sender's queue pair number, the link, the immediate data.
_Received = tuple[int, int, int, _Link, int | None]
# The size of the cache of senders. A datagram of a cached sender costs less.
MAX_SENDERS = 4096


class DatagramReceiveRing(ReceiveRing):
    """A ReceiveRing whose slots have a 40-byte header (see Origin) before each message."""

    def __init__(self, slots: int, max_message_size: int) -> None:
        super().__init__(slots, GRH_SIZE + max_message_size)
        self.group_names: dict[bytes, str] = {}
        """The IP address of each joined group, by gid. An InfiniBand gid does not contain it."""
        self._received: deque[_Received] = deque()
        self._senders: dict[tuple[int, _Link, bytes], tuple[DatagramPeer, bytes]] = {}

    def __len__(self) -> int:
        """Return the number of datagrams that have arrived and are not taken yet."""
        return len(self._received)

    def append(self, slot: int, wc: IbvWc) -> None:
        """Append the datagram that `wc`, the completion of the receive, has put into `slot`."""
        self._received.append((slot, wc.byte_len, wc.src_qp, _link(wc), immediate(wc)))

    def is_own_multicast(self, slot: int, wc: IbvWc, gid: bytes) -> bool:
        """Return True if the port with `gid` sent the datagram in `slot` to a group."""
        header = bytes(self.view(slot, GRH_SIZE))
        origin = Origin.read(LinkHeader(*_link(wc)), header)
        return is_multicast(origin.destination) and origin.source == gid

    def take_datagram(self) -> tuple[int, Datagram]:
        """Return a copy of the oldest datagram, and its slot, which the caller posts again."""
        slot, length, src_qp, link, imm = self._received.popleft()
        message = bytes(self.view(slot, length))
        key = src_qp, link, significant_part(message) if link[3] else b""
        peer, destination = self._senders.get(key) or self._add_sender(key, message[:GRH_SIZE])
        return slot, Datagram(message[GRH_SIZE:], peer, imm, self._group_of(destination))

    def _add_sender(
        self, key: tuple[int, _Link, bytes], header: bytes
    ) -> tuple[DatagramPeer, bytes]:
        """Put a sender into the cache. Return it and the gid that it sent to."""
        src_qp, link, _ = key
        origin = Origin.read(LinkHeader(*link), header)
        sender = DatagramPeer.from_origin(origin, src_qp), origin.destination
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
