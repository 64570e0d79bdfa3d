"""Origin: the source of a datagram, read from its completion and its header.

The device writes 40 bytes before each datagram: the global route header of InfiniBand, which has
the format of an IPv6 header, or on RoCE the IP header from the wire. An IPv4 header is in the last
20 of these bytes; the device does not write the first 20 then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aiordma.verbs import AddressHandleAttributes, Device, LinkHeader
from aiordma.verbs.address_handle import GRH_SIZE, gid_host

# The bytes before the IPv4 address in a gid (an IPv4-mapped IPv6 address).
_MAPPED = bytes(10) + b"\xff\xff"
# The offset of an IPv4 header in the 40 bytes.
_IPV4 = GRH_SIZE - 20


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a datagram and its path, which is enough to answer it.

    `source` and `destination` are gids, all zeros if there was no header. Two origins with the same
    path are equal, even if other fields of their headers differ.
    """

    link: LinkHeader
    source: bytes
    destination: bytes
    traffic_class: int
    header: bytes = field(compare=False, repr=False)

    @classmethod
    def read(cls, link: LinkHeader, header: bytes) -> Origin:
        """Return the origin of a datagram with this link header and these 40 bytes before it."""
        if not link.is_global:
            return cls(link, bytes(16), bytes(16), 0, bytes(GRH_SIZE))
        if _is_ipv4(header):
            source, destination = _MAPPED + header[32:36], _MAPPED + header[36:40]
            return cls(link, source, destination, header[21], header)
        traffic_class = int.from_bytes(header[:2], "big") >> 4 & 0xFF
        return cls(link, header[8:24], header[24:40], traffic_class, header)

    @property
    def host(self) -> str:
        """The sender's IP address; "" if there was no header."""
        return gid_host(self.source) if self.link.is_global else ""

    @property
    def node(self) -> bytes | int:
        """The identity of the sender's port: its gid, or its local identifier without a header."""
        return self.source if self.link.is_global else self.link.slid

    def attributes(self, device: Device, port_num: int, own_gid: bytes) -> AddressHandleAttributes:
        """Return the path back to the sender. Blocks, so it runs in a worker thread.

        An answer to a multicast datagram is sent from `own_gid`, the gid of the port. See
        AddressHandleAttributes.of_sender.

        Raises:
            VerbsError: the port does not have this address any more.
        """
        header = self.header
        if is_multicast(self.destination):
            header = _with_destination(header, own_gid)
        return AddressHandleAttributes.of_sender(device, port_num, self.link, header)


def significant_part(message: bytes) -> bytes:
    """Return the bytes before a message that differ between different origins.

    Lengths, counters and checksums are left out. The exception is an IPv4 header behind the rest of
    an older IPv6 header: telling it from an IPv6 address would cost more.
    """
    if message[0] >> 4 != 6:
        return message[20:22] + message[32:GRH_SIZE]
    return message[:2] + message[8:GRH_SIZE]


def is_multicast(gid: bytes) -> bool:
    """Return True if `gid` is the gid of a multicast group."""
    return gid[0] == 0xFF or (gid.startswith(_MAPPED) and 224 <= gid[12] < 240)


def _is_ipv4(header: bytes) -> bool:
    """Return True if the 40 bytes contain an IPv4 header, as libibverbs finds out.

    See get_grh_header_version() there. The 20 bytes before an IPv4 header can still contain the
    beginning of an older IPv6 header, and an IPv6 address can look like an IPv4 header. In these
    cases only the checksum shows the difference.
    """
    if header[0] >> 4 != 6:
        return True
    return header[_IPV4] == 0x45 and _checksum(header[_IPV4:]) == 0xFFFF


def _checksum(header: bytes) -> int:
    """Return the ones' complement sum of the 16-bit words: 0xFFFF for a valid IPv4 header."""
    total = sum(int.from_bytes(header[at : at + 2], "big") for at in range(0, len(header), 2))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _with_destination(header: bytes, gid: bytes) -> bytes:
    """Return a copy of the header with `gid` as its destination."""
    if _is_ipv4(header):
        # With zeros in front the checksum, which is wrong now, is not needed: see _is_ipv4().
        return bytes(_IPV4) + header[_IPV4:36] + gid[12:16]
    return header[:24] + gid
