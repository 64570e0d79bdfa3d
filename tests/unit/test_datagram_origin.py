"""Origin: the sender of a datagram, read from the 40 bytes before it; datagram receive rings."""

from __future__ import annotations

import dataclasses
import ipaddress
from types import SimpleNamespace
from typing import Any

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
MAPPED = bytes(10) + b"\xff\xff"


def between(source: str, destination: str, **more: Any) -> bytes:
    """Return the header of a datagram between two addresses."""
    return header(gid_of(source), gid_of(destination), **more)


def test_a_sender_in_ipv4() -> None:
    origin = Origin.read(ROCE, between("10.7.1.2", "10.7.1.1", traffic_class=0x20))
    assert origin.host == "10.7.1.2"
    assert origin.source == MAPPED + bytes([10, 7, 1, 2])
    assert origin.destination == MAPPED + bytes([10, 7, 1, 1])
    assert origin.traffic_class == 0x20
    assert origin.node == origin.source


def test_a_sender_in_ipv6() -> None:
    origin = Origin.read(ROCE, between("fd07::2", "fd07::1", traffic_class=0xA5))
    assert origin.host == "fd07::2"
    assert origin.source == ipaddress.ip_address("fd07::2").packed
    assert origin.destination == ipaddress.ip_address("fd07::1").packed
    assert origin.traffic_class == 0xA5


def test_an_ipv4_header_is_found_behind_the_rest_of_an_older_ipv6_header() -> None:
    stale = between("fd07::2", "fd07::1")[:20]
    assert Origin.read(ROCE, between("10.7.1.2", "10.7.1.1", front=stale)).host == "10.7.1.2"


def test_an_ipv6_address_that_looks_like_an_ipv4_header_is_read_as_between() -> None:
    source = str(ipaddress.IPv6Address(bytes(12) + b"\x45\x00\x04\x4c"))
    header = between(source, "fd07::1")
    assert header[20] == 0x45
    assert Origin.read(ROCE, header).host == source


def test_a_sender_on_infiniband_without_a_header() -> None:
    link = LinkHeader(slid=7, sl=2, dlid_path_bits=1, is_global=False)
    origin = Origin.read(link, b"\xaa" * 40)
    assert (origin.host, origin.node) == ("", 7)
    assert origin == Origin.read(link, b"\xbb" * 40)


def test_origins_of_one_path_are_equal_even_if_other_header_fields_differ() -> None:
    first = Origin.read(ROCE, between("10.7.1.2", "10.7.1.1", ident=1))
    again = Origin.read(ROCE, between("10.7.1.2", "10.7.1.1", ident=2))
    assert first.header != again.header
    assert first == again
    assert hash(first) == hash(again)
    other_path = Origin.read(ROCE, between("10.7.1.2", "239.1.1.1"))
    assert first != other_path
    assert Origin.read(ROCE, between("fd07::2", "fd07::1", ident=1)) == Origin.read(
        ROCE, between("fd07::2", "fd07::1", ident=2)
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("239.1.2.3", True),
        ("224.0.0.1", True),
        ("223.255.255.255", False),
        ("240.0.0.1", False),
        ("10.7.1.1", False),
        ("ff12::1", True),
        ("fd07::1", False),
    ],
)
def test_is_multicast(host: str, expected: bool) -> None:
    packed = ipaddress.ip_address(host).packed
    assert is_multicast(packed if len(packed) == 16 else MAPPED + packed) is expected


@dataclasses.dataclass
class FakeOfSender:
    """A fake AddressHandleAttributes.of_sender that records the header."""

    header: bytes = b""

    def of_sender(
        self, device: object, port_num: int, link: LinkHeader, header: bytes
    ) -> AddressHandleAttributes:
        self.header = header
        return AddressHandleAttributes()


def header_for_answer(header: bytes, own: str, monkeypatch: pytest.MonkeyPatch) -> Origin:
    """Return the origin from which the path back to the sender of `header` is computed."""
    fake = FakeOfSender()
    monkeypatch.setattr(AddressHandleAttributes, "of_sender", fake.of_sender)
    packed = ipaddress.ip_address(own).packed
    gid = packed if len(packed) == 16 else MAPPED + packed
    Origin.read(ROCE, header).attributes(None, 1, gid)  # type: ignore[arg-type]
    return Origin.read(ROCE, fake.header)


@pytest.mark.parametrize(
    ("header", "own"),
    [
        (between("10.7.1.2", "239.1.1.1", traffic_class=4), "10.7.1.1"),
        (
            between("10.7.1.2", "239.1.1.1", traffic_class=4, front=between("fd07::2", "::")[:20]),
            "10.7.1.1",
        ),
        (between("fd07::2", "ff12::1", traffic_class=4), "fd07::1"),
    ],
)
def test_the_answer_to_a_multicast_datagram_is_sent_from_the_own_address(
    header: bytes, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = header_for_answer(header, own, monkeypatch)
    sent = Origin.read(ROCE, header)
    assert used.source == sent.source
    assert used.traffic_class == 4
    assert used.destination.endswith(ipaddress.ip_address(own).packed)


def test_the_answer_to_a_unicast_datagram_is_sent_from_its_destination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = between("10.7.1.2", "10.7.1.99")
    used = header_for_answer(header, "10.7.1.1", monkeypatch)
    assert used.destination.endswith(bytes([10, 7, 1, 99]))


# --- peers ---


def test_peers_found_in_different_ways_are_equal() -> None:
    sender = DatagramPeer.from_origin(Origin.read(ROCE, between("10.7.1.2", "10.7.1.1")), 17)
    in_group = DatagramPeer.from_origin(Origin.read(ROCE, between("10.7.1.2", "239.1.1.1")), 17)
    key = AddressHandleAttributes(is_global=True, dgid=MAPPED + bytes([10, 7, 1, 2]))
    event = CmEvent(CmEventType.ESTABLISHED, 0, qp_num=17, qkey=5, ah_attr=key, private_data=b"x")
    resolved = DatagramPeer.from_event(("10.7.1.2", 7174), event)
    assert sender == in_group == resolved
    assert len({sender, in_group, resolved}) == 1
    assert (resolved.qkey, resolved.private_data, resolved.host) == (5, b"x", "10.7.1.2")
    assert (sender.address, sender.qkey) == (("10.7.1.2", 0), 0x01234567)
    assert sender != dataclasses.replace(sender, qp_num=18)
    elsewhere = DatagramPeer.from_origin(Origin.read(ROCE, between("10.7.1.3", "10.7.1.1")), 17)
    assert sender != elsewhere


def test_peers_on_infiniband_without_headers_differ_by_their_lids() -> None:
    origins = [Origin.read(LinkHeader(slid=lid, is_global=False), bytes(40)) for lid in (1, 1, 2)]
    first, same, other = [DatagramPeer.from_origin(origin, 17) for origin in origins]
    assert first == same != other
    event = CmEvent(CmEventType.ESTABLISHED, 0, qp_num=17, ah_attr=AddressHandleAttributes(dlid=1))
    assert DatagramPeer.from_event(("10.7.1.2", 7174), event) == first


# --- receive rings ---


def receive(ring: DatagramReceiveRing, header: bytes, **fields: int) -> tuple[DatagramPeer, Any]:
    """Receive a datagram without data. Return its sender and its group."""
    defaults = {"byte_len": 40, "src_qp": 17, "slid": 0, "sl": 0, "dlid_path_bits": 0}
    defaults |= {"status": 0, "imm_data": 0, "wc_flags": WcFlags.GRH}
    wc: Any = SimpleNamespace(**(defaults | fields))
    ring._region = SimpleNamespace(view=memoryview(header))  # type: ignore[assignment]
    ring.append(0, wc)
    _, datagram = ring.take_datagram()
    own = MAPPED + bytes([10, 7, 1, 1])
    assert ring.is_own_multicast(0, wc, own) is (header[32:37] == bytes([10, 7, 1, 1, 239]))
    return datagram.peer, datagram.group


def test_the_rest_of_an_older_header_does_not_change_the_sender() -> None:
    ring, stale = DatagramReceiveRing(1, 0), between("fd07::2", "fd07::1")[:20]
    for ident in (1, 2):
        peer, _ = receive(ring, between("10.7.1.2", "10.7.1.1", ident=ident, front=stale))
        assert peer.host == "10.7.1.2"
    assert receive(ring, between("fd07::2", "fd07::1"))[0].host == "fd07::2"
    other_path, _ = receive(ring, between("10.7.1.2", "10.7.1.9"))
    assert other_path == peer
    assert other_path.address_key != peer.address_key


def test_without_a_header_the_40_bytes_are_ignored() -> None:
    ring = DatagramReceiveRing(1, 0)
    for rest in (b"\x60", b"\x45"):
        assert receive(ring, rest * 40, slid=3, wc_flags=0)[0].host == ""
    assert len(ring._senders) == 1


def test_a_group_has_the_address_that_was_joined() -> None:
    ring = DatagramReceiveRing(1, 0)
    for source in ("10.7.1.1", "10.7.1.2"):
        assert receive(ring, between(source, "239.1.1.1"))[1] == "239.1.1.1"
    ring.group_names[gid_of("239.1.1.1")] = "as joined"
    assert receive(ring, between("10.7.1.2", "239.1.1.1"))[1] == "as joined"
