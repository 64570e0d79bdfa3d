"""Socket addresses as bytes of a C struct, as Python pairs, and as text."""

from __future__ import annotations

import ctypes
import random
import re
import socket
import struct

import pytest

from aiordma._native import ffi
from aiordma.rdmacm import SocketAddress, interface_addresses, parse_address
from aiordma.rdmacm.address import PackedAddress, format_address, read_sockaddr

LOOPBACK_INDEX = socket.if_nametoindex("lo")


class SockaddrIn(ctypes.Structure):
    _fields_ = (
        ("sin_family", ctypes.c_uint16),
        ("sin_port", ctypes.c_uint8 * 2),
        ("sin_addr", ctypes.c_uint8 * 4),
        ("sin_zero", ctypes.c_uint8 * 8),
    )


class SockaddrIn6(ctypes.Structure):
    _fields_ = (
        ("sin6_family", ctypes.c_uint16),
        ("sin6_port", ctypes.c_uint8 * 2),
        ("sin6_flowinfo", ctypes.c_uint32),
        ("sin6_addr", ctypes.c_uint8 * 16),
        ("sin6_scope_id", ctypes.c_uint32),
    )


def random_addresses(count: int) -> list[SocketAddress]:
    source = random.Random(20240607)
    found = []
    for _ in range(count):
        port = source.randrange(65536)
        host = socket.inet_ntop(socket.AF_INET, source.randbytes(4))
        found.append(SocketAddress(host, port))
        host = socket.inet_ntop(socket.AF_INET6, source.randbytes(16))
        scope = source.choice((0, 1, 7, 2**32 - 1))
        found.append(SocketAddress(host, port, socket.AF_INET6, scope))
    return found


EDGES = [
    SocketAddress("0.0.0.0", 0),
    SocketAddress("255.255.255.255", 65535),
    SocketAddress("::", 0, socket.AF_INET6),
    SocketAddress("::1", 1, socket.AF_INET6),
    SocketAddress("::ffff:10.7.1.1", 7471, socket.AF_INET6),
    SocketAddress("fe80::1", 7471, socket.AF_INET6, 2),
]
ADDRESSES = EDGES + random_addresses(50)


@pytest.mark.parametrize("sample", ADDRESSES, ids=str)
def test_a_packed_address_reads_back_the_same(sample: SocketAddress) -> None:
    assert read_sockaddr(PackedAddress(sample).pointer) == sample


@pytest.mark.parametrize("sample", ADDRESSES, ids=str)
def test_the_bytes_have_the_layout_of_the_c_struct(sample: SocketAddress) -> None:
    packed = sample.pack()
    port = sample.port.to_bytes(2, "big")
    host = socket.inet_pton(sample.family, sample.host)
    if sample.family == socket.AF_INET:
        four = SockaddrIn.from_buffer_copy(packed)
        assert len(packed) == ctypes.sizeof(SockaddrIn)
        assert four.sin_family == socket.AF_INET
        assert (bytes(four.sin_port), bytes(four.sin_addr)) == (port, host)
    else:
        six = SockaddrIn6.from_buffer_copy(packed)
        assert len(packed) == ctypes.sizeof(SockaddrIn6)
        assert six.sin6_family == socket.AF_INET6
        assert (bytes(six.sin6_port), bytes(six.sin6_addr)) == (port, host)
        assert (six.sin6_flowinfo, six.sin6_scope_id) == (0, sample.scope_id)


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_the_kernel_uses_the_same_bytes(family: socket.AddressFamily, host: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(family, socket.SOCK_DGRAM) as bound:
        packed = SocketAddress(host, 0, family).pack()
        assert libc.bind(bound.fileno(), packed, len(packed)) == 0
        buffer = ctypes.create_string_buffer(128)
        size = ctypes.c_uint32(128)
        assert libc.getsockname(bound.fileno(), buffer, ctypes.byref(size)) == 0
        memory = ffi.new("char[]", buffer.raw)
        seen = read_sockaddr(ffi.cast("struct sockaddr *", memory))
        assert seen is not None
        assert seen.pair == bound.getsockname()[:2]
        assert seen.family == family


@pytest.mark.parametrize("family", [socket.AF_UNSPEC, socket.AF_UNIX, 0xFFFF])
def test_an_address_of_another_family_is_none(family: int) -> None:
    memory = ffi.new("char[]", struct.pack("=H", family) + bytes(126))
    assert read_sockaddr(ffi.cast("struct sockaddr *", memory)) is None


def test_no_address_is_a_null_pointer() -> None:
    assert PackedAddress(None).pointer == ffi.NULL


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("10.7.1.1", socket.AF_INET),
        ("::1", socket.AF_INET6),
        ("2001:db8::5", socket.AF_INET6),
    ],
)
def test_numeric_hosts_are_parsed(host: str, family: socket.AddressFamily) -> None:
    assert parse_address(host, 7471) == SocketAddress(host, 7471, family)


@pytest.mark.parametrize(
    ("host", "usual"),
    [
        ("2001:DB8::A", "2001:db8::a"),
        ("2001:0db8:0:0::5", "2001:db8::5"),
        ("0:0:0:0:0:0:0:0", "::"),
        ("0::1", "::1"),
        ("FE80:0::1%lo", "fe80::1%lo"),
    ],
)
def test_an_address_has_one_spelling(host: str, usual: str) -> None:
    address = parse_address(host, 7471)
    assert address == parse_address(usual, 7471)
    assert address.pair == (usual, 7471)
    assert read_sockaddr(PackedAddress(address).pointer) == address


@pytest.mark.parametrize("host", ["::ffff:10.7.1.1", "::ffff:a07:101", "0::FFFF:10.7.1.1"])
def test_an_ipv4_mapped_address_is_an_ipv6_one(host: str) -> None:
    address = parse_address(host, 7471)
    assert address == SocketAddress("::ffff:10.7.1.1", 7471, socket.AF_INET6)
    assert read_sockaddr(PackedAddress(address).pointer) == address
    assert address.pack() == SocketAddress("::ffff:10.7.1.1", 7471, socket.AF_INET6).pack()
    assert address.pack()[8:24] == bytes(10) + b"\xff\xff\x0a\x07\x01\x01"


@pytest.mark.parametrize(
    "host",
    ["", "localhost", "10.7.1", "10.7.1.256", "010.7.1.1", "1::2::3", "[::1]", "::1/128", " ::1"],
)
def test_a_host_that_is_not_numeric_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        parse_address(host, 7471)


@pytest.mark.parametrize("port", [-1, 65536, 10**9])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"port {port} is not between 0 and 65535"):
        parse_address("10.7.1.1", port)


@pytest.mark.parametrize("port", [0, 65535])
def test_the_first_and_the_last_port_are_accepted(port: int) -> None:
    assert parse_address("10.7.1.1", port).port == port


def test_a_scope_is_an_interface_or_its_number() -> None:
    by_name = parse_address("fe80::1%lo", 1)
    assert by_name.scope_id == LOOPBACK_INDEX
    assert by_name == parse_address(f"fe80::1%{LOOPBACK_INDEX}", 1)
    assert by_name.host == "fe80::1"


def test_a_pair_names_the_interface() -> None:
    assert parse_address("fe80::1%lo", 7471).pair == ("fe80::1%lo", 7471)
    assert parse_address("fe80::1", 7471).pair == ("fe80::1", 7471)
    assert parse_address("10.7.1.1", 7471).pair == ("10.7.1.1", 7471)


def test_a_removed_interface_is_shown_by_its_number() -> None:
    assert SocketAddress("fe80::1", 1, socket.AF_INET6, 4_000_000).pair == ("fe80::1%4000000", 1)


def test_a_pair_parses_back() -> None:
    address = parse_address("fe80::1%lo", 7471)
    assert parse_address(*address.pair) == address


def test_an_unknown_interface_is_refused() -> None:
    with pytest.raises(ValueError, match="no interface 'nonesuch0'"):
        parse_address("fe80::1%nonesuch0", 1)


def test_a_scope_on_an_ipv4_address_is_refused() -> None:
    for scope in ("%lo", "%1", "%"):
        with pytest.raises(ValueError, match="only an IPv6 address has a scope"):
            parse_address(f"10.7.1.1{scope}", 1)


@pytest.mark.parametrize("scope", ["", str(2**32), "-1", "+1", " 1", "1.0"])
def test_a_scope_that_no_interface_can_have_is_refused(scope: str) -> None:
    with pytest.raises(ValueError, match=f"no interface {re.escape(repr(scope))}"):
        parse_address(f"fe80::1%{scope}", 1)


def test_the_largest_scope_number_can_be_packed() -> None:
    address = parse_address(f"fe80::1%{2**32 - 1}", 1)
    assert address.scope_id == 2**32 - 1
    assert read_sockaddr(PackedAddress(address).pointer) == address


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (("10.7.1.1", 7471), "10.7.1.1:7471"),
        (("::1", 7471), "[::1]:7471"),
        (("fe80::1%eth0", 7471), "[fe80::1%eth0]:7471"),
        (("storage.example", 7471), "storage.example:7471"),
    ],
)
def test_addresses_are_formatted_for_messages(pair: tuple[str, int], text: str) -> None:
    assert format_address(pair) == text


def test_addresses_are_values() -> None:
    first, second = parse_address("::1", 1), parse_address("::1", 1)
    assert first == second
    assert len({first, second}) == 1


def test_the_interfaces_of_this_machine_have_their_addresses() -> None:
    found = interface_addresses()
    hosts = {address.host for name, address in found if name == "lo"}
    assert "127.0.0.1" in hosts
    assert {name for name, _ in found} <= {name for _, name in socket.if_nameindex()}
    assert {address.port for _, address in found} == {0}
