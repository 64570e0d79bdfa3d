"""DatagramPeer: somebody to send datagrams to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from aiordma._native import lib
from aiordma.datagrams.origin import Origin
from aiordma.rdmacm import CmEvent
from aiordma.verbs import AddressHandleAttributes

# What an address handle is made of.
AddressKey: TypeAlias = AddressHandleAttributes | Origin


@dataclass(frozen=True, slots=True)
class DatagramPeer:
    """A datagram queue pair somewhere: from `resolve()`, or the sender of a datagram.

    Two are equal if they are the same queue pair at the same address, however they were found. It
    is only a value: there is nothing to close, and it says nothing about whether anybody is there.
    """

    address: tuple[str, int] = field(compare=False)
    """`(host, port)`. The port of a datagram's sender is not known, and given as 0."""
    qp_num: int
    """The number of its queue pair."""
    qkey: int = field(compare=False)
    """The key without which its queue pair takes nothing."""
    private_data: bytes = field(compare=False, repr=False)
    """What it sent along when it accepted: padded with zeros to 136 bytes. b"" of a sender."""
    node: bytes | int = field(repr=False)
    """Its port's gid, or local identifier."""
    address_key: AddressKey = field(compare=False, repr=False)
    """How to get there."""

    @classmethod
    def answering(cls, address: tuple[str, int], event: CmEvent) -> DatagramPeer:
        """Who answered a request, in the ESTABLISHED event of a datagram id."""
        key = event.ah_attr
        assert key is not None
        node = key.dgid if key.is_global else key.dlid
        return cls(address, event.qp_num, event.qkey, event.private_data, node, key)

    @classmethod
    def sending(cls, origin: Origin, qp_num: int) -> DatagramPeer:
        """Who sent a datagram; its key is the one that all in port space UDP have."""
        address = (origin.host, 0)
        return cls(address, qp_num, lib.RDMA_UDP_QKEY, b"", origin.node, origin)

    @property
    def host(self) -> str:
        """Its address, without the port."""
        return self.address[0]
