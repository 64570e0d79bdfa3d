"""Origin: where a datagram came from, as the device tells it.

Forty bytes stand before each datagram: the global route header of InfiniBand, which has the form of
an IPv6 header, or on RoCE the IP header that was on the wire. An IPv4 header is in the last twenty
of them, and the first twenty are then left as they were.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aiordma.verbs import AddressHandleAttributes, Device, LinkHeader
from aiordma.verbs.address_handle import GRH_SIZE, gid_host

# What precedes an IPv4 address in a gid.
_MAPPED = bytes(10) + b"\xff\xff"
_IPV4 = GRH_SIZE - 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a datagram came from, and by which way: enough to find the way back.

    `source` and `destination` are gids, all zeros if no header came along. Those that lead the same
    way are equal, whatever else stood in their headers.
    """

    link: LinkHeader
    source: bytes
    destination: bytes
    traffic_class: int
    header: bytes = field(compare=False, repr=False)

    @classmethod
    def read(cls, link: LinkHeader, header: bytes) -> Origin:
        """From the link's header and the 40 bytes."""
        if not link.is_global:
            return cls(link, bytes(16), bytes(16), 0, bytes(GRH_SIZE))
        if _is_ipv4(header):
            source, destination = _MAPPED + header[32:36], _MAPPED + header[36:40]
            return cls(link, source, destination, header[21], header)
        traffic_class = int.from_bytes(header[:2], "big") >> 4 & 0xFF
        return cls(link, header[8:24], header[24:40], traffic_class, header)

    @property
    def host(self) -> str:
        """The sender's address; "" if no header came along."""
        return gid_host(self.source) if self.link.is_global else ""

    @property
    def node(self) -> bytes | int:
        """What tells the sender's port from others: its gid, or else its local identifier."""
        return self.source if self.link.is_global else self.link.slid

    def attributes(self, device: Device, port_num: int, own: bytes) -> AddressHandleAttributes:
        """The way back: see AddressHandleAttributes.of_sender. Blocks: in a worker thread.

        The answer to what was sent to a group comes from the port's own gid, which is `own`.

        Raises:
            VerbsError: the port has no such address any more.
        """
        header = self.header
        if is_multicast(self.destination):
            header = _readdressed(header, own)
        return AddressHandleAttributes.of_sender(device, port_num, self.link, header)


def significant_part(message: bytes) -> bytes:
    """What of the 40 bytes in front of a message tells one Origin from another.

    Lengths, counters and checksums are not in it, but for an IPv4 header behind the remains of an
    IPv6 one, which cannot be told from an IPv6 address so cheaply.
    """
    if message[0] >> 4 != 6:
        return message[20:22] + message[32:GRH_SIZE]
    return message[:2] + message[8:GRH_SIZE]


def is_multicast(gid: bytes) -> bool:
    """Whether a gid is a multicast group's."""
    return gid[0] == 0xFF or (gid.startswith(_MAPPED) and 224 <= gid[12] < 240)


def _is_ipv4(header: bytes) -> bool:
    """What get_grh_header_version() of libibverbs does.

    The first twenty bytes before an IPv4 header may still hold an IPv6 header of earlier times, and
    anything may stand in an IPv6 address: then only the checksum tells.
    """
    if header[0] >> 4 != 6:
        return True
    return header[_IPV4] == 0x45 and _checksum(header[_IPV4:]) == 0xFFFF


def _checksum(header: bytes) -> int:
    """The ones' complement sum of the 16-bit words: 0xFFFF for an IPv4 header that is right."""
    total = sum(int.from_bytes(header[at : at + 2], "big") for at in range(0, len(header), 2))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _readdressed(header: bytes, gid: bytes) -> bytes:
    """The header as if it had come to another address."""
    if _is_ipv4(header):
        # Zeros in front, so that nobody needs the checksum, which is wrong now.
        return bytes(_IPV4) + header[_IPV4:36] + gid[12:16]
    return header[:24] + gid
