"""DatagramPeer: a destination of datagrams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from aiordma._native import lib
from aiordma.datagrams.origin import Origin
from aiordma.rdmacm import CmEvent
from aiordma.verbs import AddressHandleAttributes

# An address handle is created from one of these.
AddressKey: TypeAlias = AddressHandleAttributes | Origin


@dataclass(frozen=True, slots=True)
class DatagramPeer:
    """A remote datagram queue pair: the result of `resolve()`, or the sender of a datagram.

    Two peers are equal if they are the same queue pair at the same address, no matter how they were
    found. A peer is only a value: it needs no closing, and the queue pair need not exist any more.
    """

    address: tuple[str, int] = field(compare=False)
    """`(host, port)`. The port of a datagram's sender is unknown, and 0 here."""
    qp_num: int
    """The number of the peer's queue pair."""
    qkey: int = field(compare=False)
    """The queue key. The peer's queue pair drops datagrams that have another one."""
    private_data: bytes = field(compare=False, repr=False)
    """The data that the peer passed to accept(), padded with zeros to 136 bytes. b"" for the
    sender of a datagram."""
    node: bytes | int = field(repr=False)
    """The gid of the peer's port, or its local identifier (LID)."""
    address_key: AddressKey = field(compare=False, repr=False)
    """The data from which an address handle for the peer is created."""

    @classmethod
    def from_event(cls, address: tuple[str, int], event: CmEvent) -> DatagramPeer:
        """Return the peer that answered a request, from the ESTABLISHED event of a datagram id."""
        key = event.ah_attr
        assert key is not None
        node = key.dgid if key.is_global else key.dlid
        return cls(address, event.qp_num, event.qkey, event.private_data, node, key)

    @classmethod
    def from_origin(cls, origin: Origin, qp_num: int) -> DatagramPeer:
        """Return the sender of a datagram. Its qkey is that of the port space RDMA_PS_UDP."""
        address = (origin.host, 0)
        return cls(address, qp_num, lib.RDMA_UDP_QKEY, b"", origin.node, origin)

    @property
    def host(self) -> str:
        """The host in `address`."""
        return self.address[0]
