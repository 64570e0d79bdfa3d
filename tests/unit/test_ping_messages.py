"""What a ping is made of: numbered messages, greetings, and statistics."""

from __future__ import annotations

import pytest

from aiordma.options import DEFAULT_OPTIONS
from aiordma.ping.client import Messages, difference
from aiordma.ping.handshake import (
    announced_size,
    greeting,
    options_for,
    refusal,
    refusal_reason,
)
from aiordma.ping.options import MAX_SIZE
from aiordma.ping.report import Tally


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 255, 256, 257, 65536, MAX_SIZE])
def test_messages_have_their_size_and_their_number(size: int) -> None:
    messages = Messages(size)
    for number in (1, 2, 255, 256, 70_000):
        message = messages[number]
        assert len(message) == size
        assert message[:8] == number.to_bytes(8, "big")[-size:]
    assert messages[1] == messages[1]
    assert messages[1] != messages[2]


def test_the_pattern_is_another_one_in_each_message() -> None:
    messages = Messages(64)
    assert messages[1][8:11] == bytes([1, 2, 3])
    assert messages[2][8:11] == bytes([2, 3, 4])


def test_what_is_wrong_with_an_answer() -> None:
    messages = Messages(64)
    sent = messages[5]
    assert difference(sent, sent) is None
    assert difference(sent, sent[:-1]) == "63 bytes came back for 64"
    assert difference(sent, messages[4]) == "number 4 came back for number 5"
    broken = sent[:20] + b"\xff" + sent[21:]
    assert difference(sent, broken) == "byte 20 came back as 0xff, and was 0x11"
    assert difference(b"\x01", b"\x02") == "number 2 came back for number 1"


@pytest.mark.parametrize("padding", [b"", bytes(44)])
def test_a_greeting_is_understood(padding: bytes) -> None:
    assert announced_size(greeting(65536) + padding) == 65536


@pytest.mark.parametrize("data", [b"", bytes(56), b"RDMAping", b"hello" * 5])
def test_other_private_data_is_no_greeting(data: bytes) -> None:
    assert announced_size(data) is None


def test_a_refusal_is_understood() -> None:
    assert refusal_reason(refusal("too large") + bytes(120)) == "too large"
    assert refusal_reason(bytes(148)) is None
    assert len(refusal(f"messages of at most {MAX_SIZE} bytes are answered")) <= 148


def test_options_fit_the_messages_and_the_memory() -> None:
    assert options_for(None) == DEFAULT_OPTIONS
    options = options_for(MAX_SIZE, busy_poll=0.001)
    assert (options.max_message_size, options.busy_poll) == (MAX_SIZE, 0.001)
    assert options.recv_depth * options.max_message_size <= 4 * MAX_SIZE
    assert options_for(0).max_message_size == 1


def test_statistics() -> None:
    tally = Tally()
    tally.peer = "10.7.1.1 port 7473"
    for milliseconds in (1, 2, 3, 10):
        tally.add(milliseconds / 1000)
    assert tally.good
    assert tally.lines() == [
        "",
        "--- 10.7.1.1 port 7473 ping statistics ---",
        "4 sent, 4 received, 0 lost",
        "round trip min/avg/median/max/mdev = 1.000/4.000/2.500/10.000/3.536 ms",
    ]


def test_statistics_of_nothing() -> None:
    tally = Tally()
    assert tally.lines() == []
    assert not tally.good


def test_statistics_of_what_went_wrong() -> None:
    tally = Tally()
    tally.lost = 1
    assert tally.lines()[2:] == ["1 sent, 0 received, 1 lost"]
    tally.add(0.001)
    tally.wrong = 1
    assert tally.lines()[2] == "2 sent, 1 received, 1 lost, 1 wrong"
    assert not tally.good


def test_equal_times_do_not_deviate() -> None:
    tally = Tally()
    for _ in range(1000):
        tally.add(0.1)
    assert tally.lines()[-1].endswith("= 100.000/100.000/100.000/100.000/0.000 ms")
