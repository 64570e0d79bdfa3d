"""The 40 bytes in front of a datagram, as a device would write them."""

from __future__ import annotations

import ipaddress
import struct

MAPPED = bytes(10) + b"\xff\xff"


def ipv4(
    source: str, destination: str, *, tos: int = 0, ident: int = 1, front: bytes = bytes(20)
) -> bytes:
    """Return the 40 bytes before a datagram that was sent in IPv4."""
    addresses = ipaddress.ip_address(source).packed + ipaddress.ip_address(destination).packed
    fields = [0x45, tos, 1100, ident, 0x4000, 64, 17, 0]
    words = struct.unpack("!10H", struct.pack("!BBHHHBBH", *fields) + addresses)
    total = sum(words)
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    fields[-1] = 0xFFFF - total
    return front + struct.pack("!BBHHHBBH", *fields) + addresses


def ipv6(source: str, destination: str, *, traffic_class: int = 0, length: int = 100) -> bytes:
    """Return the 40 bytes before a datagram that was sent in IPv6."""
    word = 6 << 28 | traffic_class << 20 | 0x12345
    addresses = ipaddress.ip_address(source).packed + ipaddress.ip_address(destination).packed
    return struct.pack("!IHBB", word, length, 17, 64) + addresses
