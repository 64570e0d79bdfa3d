"""Socket addresses as bytes of a C struct, as Python pairs, and as text."""

from __future__ import annotations

import random
import re
import socket
import struct

import pytest

from aiordma._native import ffi
from aiordma.rdmacm import SocketAddress, interface_addresses, parse_address
from aiordma.rdmacm.address import PackedAddress, format_address, read_sockaddr

IPV4, IPV6 = socket.AF_INET, socket.AF_INET6
LOOPBACK = socket.if_nametoindex("lo")


def test_a_packed_address_reads_back_the_same() -> None:
    source = random.Random(20240607)
    hosts = ["0.0.0.0", "255.255.255.255", "::", "::1", "::ffff:10.7.1.1", f"fe80::1%{2**32 - 1}"]
    for _ in range(50):
        hosts.append(socket.inet_ntop(IPV4, source.randbytes(4)))
        hosts.append(f"{socket.inet_ntop(IPV6, source.randbytes(16))}%{source.randrange(2**32)}")
    for host in hosts:
        address = parse_address(host, source.randrange(65536))
        assert read_sockaddr(PackedAddress(address).pointer) == address
    assert PackedAddress(None).pointer == ffi.NULL


def test_the_bytes_have_the_layout_of_the_c_struct() -> None:
    family = struct.pack("=H", IPV4)
    packed = SocketAddress("10.7.1.2", 0x1234).pack()
    assert packed == family + b"\x12\x34" + bytes([10, 7, 1, 2]) + bytes(8)
    family, mapped = struct.pack("=H", IPV6), bytes(10) + b"\xff\xff\x0a\x07\x01\x01"
    packed = SocketAddress("::ffff:10.7.1.1", 0x1234, IPV6, 7).pack()
    assert packed == family + b"\x12\x34" + bytes(4) + mapped + struct.pack("=I", 7)


def test_an_address_of_another_family_is_none() -> None:
    for family in (socket.AF_UNSPEC, socket.AF_UNIX, 0xFFFF):
        memory = ffi.new("char[]", struct.pack("=H", family) + bytes(126))
        assert read_sockaddr(ffi.cast("struct sockaddr *", memory)) is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.7.1.1", SocketAddress("10.7.1.1", 7471)),
        ("2001:DB8::A", SocketAddress("2001:db8::a", 7471, IPV6)),
        ("2001:0db8:0:0::5", SocketAddress("2001:db8::5", 7471, IPV6)),
        ("0:0:0:0:0:0:0:0", SocketAddress("::", 7471, IPV6)),
        ("::ffff:a07:101", SocketAddress("::ffff:10.7.1.1", 7471, IPV6)),
        ("0::FFFF:10.7.1.1", SocketAddress("::ffff:10.7.1.1", 7471, IPV6)),
        ("FE80:0::1%lo", SocketAddress("fe80::1", 7471, IPV6, LOOPBACK)),
        (f"fe80::1%{LOOPBACK}", SocketAddress("fe80::1", 7471, IPV6, LOOPBACK)),
    ],
)
def test_a_numeric_host_is_parsed_to_its_one_spelling(host: str, expected: SocketAddress) -> None:
    assert parse_address(host, 7471) == expected
    assert len({parse_address(host, 7471), expected}) == 1
    assert parse_address(*expected.pair) == expected


def test_a_pair_names_the_interface() -> None:
    assert parse_address("fe80::1%lo", 7471).pair == ("fe80::1%lo", 7471)
    assert parse_address("fe80::1", 7471).pair == ("fe80::1", 7471)
    assert SocketAddress("fe80::1", 1, IPV6, 4_000_000).pair == ("fe80::1%4000000", 1)  # removed


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["", "localhost", "10.7.1", "10.7.1.256", "010.7.1.1"], "does not appear to be"),
        (["1::2::3", "[::1]", "::1/128", " ::1"], "does not appear to be"),
        (["10.7.1.1%lo", "10.7.1.1%1", "10.7.1.1%"], "only an IPv6 address has a scope"),
    ],
)
def test_a_host_that_is_not_numeric_is_refused(hosts: list[str], text: str) -> None:
    for host in hosts:
        with pytest.raises(ValueError, match=text):
            parse_address(host, 7471)


def test_a_scope_that_no_interface_has_is_refused() -> None:
    for scope in ("nonesuch0", "", str(2**32), "-1", "+1", " 1", "1.0"):
        with pytest.raises(ValueError, match=f"no interface {re.escape(repr(scope))}"):
            parse_address(f"fe80::1%{scope}", 1)


def test_a_port_is_between_0_and_65535() -> None:
    for port in (-1, 65536, 10**9):
        with pytest.raises(ValueError, match=f"port {port} is not between 0 and 65535"):
            parse_address("10.7.1.1", port)
    assert [parse_address("10.7.1.1", port).port for port in (0, 65535)] == [0, 65535]


def test_addresses_are_formatted_for_messages() -> None:
    assert format_address(("10.7.1.1", 7471)) == "10.7.1.1:7471"
    assert format_address(("storage.example", 7471)) == "storage.example:7471"
    assert format_address(("fe80::1%eth0", 7471)) == "[fe80::1%eth0]:7471"


def test_the_interfaces_of_this_machine_have_their_addresses() -> None:
    found = interface_addresses()
    assert "127.0.0.1" in {address.host for name, address in found if name == "lo"}
    assert {name for name, _ in found} <= {name for _, name in socket.if_nameindex()}
    assert {address.port for _, address in found} == {0}
