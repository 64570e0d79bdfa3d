"""Origin: the sender of a datagram, read from the 40 bytes before it; datagram receive rings."""

from __future__ import annotations

import dataclasses
import ipaddress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from simulator.datagrams import header
from simulator.verbs import gid_of

from aiordma import DatagramPeer
from aiordma.datagrams.datagram_receive_ring import DatagramReceiveRing
from aiordma.datagrams.origin import Origin, is_multicast
from aiordma.enums import CmEventType, WcFlags
from aiordma.rdmacm import CmEvent
from aiordma.verbs import AddressHandleAttributes, LinkHeader

ROCE = LinkHeader()
LOOKS_LIKE_IPV4 = str(ipaddress.IPv6Address(bytes(12) + b"\x45\x00\x04\x4c"))


def between(source: str, destination: str, **more: Any) -> bytes:
    """Return the header of a datagram between two addresses."""
    return header(gid_of(source), gid_of(destination), **more)


STALE = between("fd07::2", "fd07::1")[:20]
"""The rest of an older IPv6 header, in front of an IPv4 header."""


@pytest.mark.parametrize(
    ("source", "destination", "more"),
    [
        ("10.7.1.2", "10.7.1.1", {"traffic_class": 0x20}),
        ("10.7.1.2", "10.7.1.1", {"traffic_class": 0x20, "front": STALE}),
        ("fd07::2", "fd07::1", {"traffic_class": 0xA5}),
        (LOOKS_LIKE_IPV4, "fd07::1", {"traffic_class": 0}),
    ],
)
def test_origins_are_read_from_headers(source: str, destination: str, more: dict[str, Any]) -> None:
    origin = Origin.read(ROCE, between(source, destination, ident=1, **more))
    assert (origin.host, origin.traffic_class) == (source, more["traffic_class"])
    assert (origin.source, origin.destination) == (gid_of(source), gid_of(destination))
    assert origin.node == origin.source
    again = Origin.read(ROCE, between(source, destination, ident=2, **more))
    assert origin.header != again.header
    assert len({origin, again}) == 1
    assert origin != Origin.read(ROCE, between(source, "239.1.1.1"))


def test_a_sender_on_infiniband_without_a_header() -> None:
    link = LinkHeader(slid=7, sl=2, dlid_path_bits=1, is_global=False)
    origin = Origin.read(link, b"\xaa" * 40)
    assert (origin.host, origin.node) == ("", 7)
    assert origin == Origin.read(link, b"\xbb" * 40)


def test_is_multicast() -> None:
    groups = ["239.1.2.3", "224.0.0.1", "ff12::1"]
    others = ["223.255.255.255", "240.0.0.1", "10.7.1.1", "fd07::1"]
    assert [host for host in groups + others if is_multicast(gid_of(host))] == groups


@pytest.mark.parametrize(
    ("source", "destination", "own", "more"),
    [
        ("10.7.1.2", "239.1.1.1", "10.7.1.1", {}),
        ("10.7.1.2", "239.1.1.1", "10.7.1.1", {"front": STALE}),
        ("fd07::2", "ff12::1", "fd07::1", {}),
        ("10.7.1.2", "10.7.1.99", "10.7.1.1", {}),
    ],
)
def test_the_answer_to_a_multicast_datagram_is_sent_from_the_own_address(
    source: str, destination: str, own: str, more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer to another datagram is sent from the address that it was sent to."""
    monkeypatch.setattr(AddressHandleAttributes, "of_sender", of_sender := Mock())
    received = Origin.read(ROCE, between(source, destination, traffic_class=4, **more))
    received.attributes(None, 1, gid_of(own))  # type: ignore[arg-type]
    used = Origin.read(ROCE, of_sender.call_args.args[-1])
    assert (used.source, used.traffic_class) == (received.source, 4)
    is_group = is_multicast(received.destination)
    assert used.destination == (gid_of(own) if is_group else received.destination)


def test_peers_found_in_different_ways_are_equal() -> None:
    ends = [("10.7.1.2", "10.7.1.1"), ("10.7.1.2", "239.1.1.1"), ("10.7.1.3", "10.7.1.1")]
    origins = [Origin.read(ROCE, between(source, destination)) for source, destination in ends]
    sender, in_group, elsewhere = (DatagramPeer.from_origin(origin, 17) for origin in origins)
    key = AddressHandleAttributes(is_global=True, dgid=gid_of("10.7.1.2"))
    event = CmEvent(CmEventType.ESTABLISHED, 0, qp_num=17, qkey=5, ah_attr=key, private_data=b"x")
    resolved = DatagramPeer.from_event(("10.7.1.2", 7174), event)
    assert sender == in_group == resolved
    assert len({sender, in_group, resolved}) == 1
    assert (resolved.qkey, resolved.private_data, resolved.host) == (5, b"x", "10.7.1.2")
    assert (sender.address, sender.qkey) == (("10.7.1.2", 0), 0x01234567)
    assert sender not in (dataclasses.replace(sender, qp_num=18), elsewhere)


def test_peers_on_infiniband_without_headers_differ_by_their_lids() -> None:
    origins = [Origin.read(LinkHeader(slid=lid, is_global=False), bytes(40)) for lid in (1, 1, 2)]
    first, same, other = [DatagramPeer.from_origin(origin, 17) for origin in origins]
    assert first == same != other
    event = CmEvent(CmEventType.ESTABLISHED, 0, qp_num=17, ah_attr=AddressHandleAttributes(dlid=1))
    assert DatagramPeer.from_event(("10.7.1.2", 7174), event) == first


def receive(ring: DatagramReceiveRing, header: bytes, **fields: int) -> tuple[DatagramPeer, Any]:
    """Receive a datagram without data. Return its sender and its group."""
    defaults = {"byte_len": 40, "src_qp": 17, "slid": 0, "sl": 0, "dlid_path_bits": 0}
    defaults |= {"status": 0, "imm_data": 0, "wc_flags": WcFlags.GRH}
    wc: Any = SimpleNamespace(**(defaults | fields))
    ring._memory = memoryview(header)
    ring.append(0, wc)
    _, datagram = ring.take_datagram()
    is_own = header[32:37] == bytes([10, 7, 1, 1, 239])
    assert ring.is_own_multicast(0, wc, gid_of("10.7.1.1")) is is_own
    return datagram.peer, datagram.group


def test_the_rest_of_an_older_header_does_not_change_the_sender() -> None:
    ring = DatagramReceiveRing(1, 0)
    for ident in (1, 2):
        peer, _ = receive(ring, between("10.7.1.2", "10.7.1.1", ident=ident, front=STALE))
        assert peer.host == "10.7.1.2"
    assert receive(ring, between("fd07::2", "fd07::1"))[0].host == "fd07::2"
    other_path, _ = receive(ring, between("10.7.1.2", "10.7.1.9"))
    assert other_path == peer
    assert other_path.address_key != peer.address_key
    ring = DatagramReceiveRing(1, 0)
    for rest in (b"\x60", b"\x45"):  # without a header, the 40 bytes are ignored
        assert receive(ring, rest * 40, slid=3, wc_flags=0)[0].host == ""
    assert len(ring._senders) == 1


def test_a_group_has_the_address_that_was_joined() -> None:
    ring = DatagramReceiveRing(1, 0)
    for source in ("10.7.1.1", "10.7.1.2"):
        assert receive(ring, between(source, "239.1.1.1"))[1] == "239.1.1.1"
    ring.group_names[gid_of("239.1.1.1")] = "as joined"
    assert receive(ring, between("10.7.1.2", "239.1.1.1"))[1] == "as joined"
