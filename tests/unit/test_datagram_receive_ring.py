"""DatagramReceiveRing: datagrams without their headers, and their senders."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from fakes.headers import MAPPED, ipv4, ipv6

from aiordma import Datagram
from aiordma.datagrams import datagram_receive_ring
from aiordma.datagrams.datagram_receive_ring import DatagramReceiveRing
from aiordma.enums import WcFlags, WcStatus

SLOT_SIZE = 40 + 256
GROUP = MAPPED + bytes([239, 1, 1, 1])


class Rig:
    """A DatagramReceiveRing with memory and no device."""

    def __init__(self) -> None:
        self.ring = DatagramReceiveRing(4, 256)
        self.memory = bytearray(4 * SLOT_SIZE)
        self.ring._region = SimpleNamespace(view=memoryview(self.memory))  # type: ignore[assignment]
        self.slot = 0

    def wc(self, length: int = 0, **fields: int) -> SimpleNamespace:
        """Return the completion of a receive with a datagram of `length` bytes."""
        defaults = {
            "byte_len": 40 + length,
            "src_qp": 17,
            "slid": 0,
            "sl": 0,
            "dlid_path_bits": 0,
            "wc_flags": WcFlags.GRH,
            "imm_data": 0,
            "status": WcStatus.SUCCESS,
        }
        return SimpleNamespace(**(defaults | fields))

    def fill(self, header: bytes, data: bytes = b"") -> None:
        """Write a datagram into the next slot."""
        start = self.slot * SLOT_SIZE
        self.memory[start : start + 40 + len(data)] = header + data

    def receive(self, header: bytes, data: bytes = b"", **fields: int) -> Datagram:
        """Receive and take one datagram."""
        self.fill(header, data)
        self.ring.append(self.slot, self.wc(len(data), **fields))  # type: ignore[arg-type]
        assert len(self.ring) == 1
        slot, datagram = self.ring.take_datagram()
        assert slot == self.slot
        self.slot = (slot + 1) % 4
        return datagram


def test_a_datagram_is_returned_without_its_header() -> None:
    rig = Rig()
    for data in (b"", b"x", bytes(256)):
        got = rig.receive(ipv4("10.7.1.2", "10.7.1.1"), data)
        assert (got.data, got.imm, got.group) == (data, None, None)
        assert (got.peer.host, got.peer.qp_num) == ("10.7.1.2", 17)


@pytest.mark.parametrize("imm", [0, 1, 0xFEEDBEEF])
def test_immediate_data_is_returned(imm: int) -> None:
    flags = WcFlags.GRH | WcFlags.WITH_IMM
    header = ipv4("10.7.1.2", "10.7.1.1")
    got = Rig().receive(header, wc_flags=flags, imm_data=socket.htonl(imm))
    assert got.imm == imm


def test_a_sender_is_cached_and_differs_from_others() -> None:
    rig = Rig()
    first = rig.receive(ipv4("10.7.1.2", "10.7.1.1", ident=1)).peer
    assert rig.receive(ipv4("10.7.1.2", "10.7.1.1", ident=2)).peer is first
    others = [
        rig.receive(ipv4("10.7.1.2", "10.7.1.1"), src_qp=18),
        rig.receive(ipv4("10.7.1.3", "10.7.1.1")),
        rig.receive(ipv6("fd07::2", "fd07::1")),
        rig.receive(bytes(40), slid=3, wc_flags=0),
    ]
    assert len({first, *(other.peer for other in others)}) == 5
    assert [other.peer.host for other in others] == ["10.7.1.2", "10.7.1.3", "fd07::2", ""]
    other_path = rig.receive(ipv4("10.7.1.2", "10.7.1.9")).peer
    assert other_path == first
    assert other_path.address_key != first.address_key


def test_the_rest_of_an_older_header_does_not_change_the_sender() -> None:
    rig = Rig()
    stale = ipv6("fd07::2", "fd07::1")[:20]
    for ident in (1, 2):
        header = ipv4("10.7.1.2", "10.7.1.1", ident=ident, front=stale)
        assert rig.receive(header).peer.host == "10.7.1.2"
    assert rig.receive(ipv6("fd07::2", "fd07::1")).peer.host == "fd07::2"


def test_without_a_header_the_40_bytes_are_ignored() -> None:
    rig = Rig()
    for rest in (b"\x60", b"\x45"):
        rig.receive(rest * 40, slid=3, wc_flags=0)
    assert len(rig.ring._senders) == 1


def test_the_cache_of_senders_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagram_receive_ring, "MAX_SENDERS", 3)
    rig = Rig()
    for number in range(10):
        got = rig.receive(ipv4(f"10.7.1.{number}", "10.7.1.1"))
        assert got.peer.host == f"10.7.1.{number}"
        assert len(rig.ring._senders) <= 3


def test_the_group_has_the_address_that_was_joined() -> None:
    rig = Rig()
    header = ipv4("10.7.1.2", "239.1.1.1")
    assert rig.receive(header).group == "239.1.1.1"
    rig.ring.group_names[GROUP] = "as joined"
    assert rig.receive(header).group == "as joined"


def test_own_multicast_datagrams_are_recognized() -> None:
    rig = Rig()
    own = MAPPED + bytes([10, 7, 1, 1])
    for source, destination, expected in (
        ("10.7.1.1", "239.1.1.1", True),
        ("10.7.1.2", "239.1.1.1", False),
        ("10.7.1.1", "10.7.1.1", False),
    ):
        rig.fill(ipv4(source, destination))
        assert rig.ring.is_own_multicast(0, rig.wc(), own) is expected  # type: ignore[arg-type]
