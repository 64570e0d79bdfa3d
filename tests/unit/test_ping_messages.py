"""The parts of a ping: numbered messages, private data, and statistics."""

from __future__ import annotations

import pytest

from aiordma.options import DEFAULT_OPTIONS
from aiordma.ping.client import Messages, difference
from aiordma.ping.handshake import (
    announced_size,
    announcement,
    options_for,
    rejection,
    rejection_reason,
)
from aiordma.ping.options import MAX_SIZE
from aiordma.ping.report import Statistics


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 255, 256, 257, 65536, MAX_SIZE])
def test_messages_have_the_size_and_the_number(size: int) -> None:
    messages = Messages(size)
    for number in (1, 2, 255, 256, 70_000):
        message = messages[number]
        assert len(message) == size
        assert message[:8] == number.to_bytes(8, "big")[-size:]
    assert messages[1] == messages[1]
    assert messages[1] != messages[2]


def test_the_pattern_differs_in_each_message() -> None:
    messages = Messages(64)
    assert messages[1][8:11] == bytes([1, 2, 3])
    assert messages[2][8:11] == bytes([2, 3, 4])


def test_the_difference_of_a_wrong_answer_is_described() -> None:
    messages = Messages(64)
    sent = messages[5]
    assert difference(sent, sent) is None
    assert difference(sent, sent[:-1]) == "63 bytes instead of 64"
    assert difference(sent, messages[4]) == "number 4 instead of 5"
    broken = sent[:20] + b"\xff" + sent[21:]
    assert difference(sent, broken) == "byte 20 is 0xff instead of 0x11"
    assert difference(b"\x01", b"\x02") == "number 2 instead of 1"


@pytest.mark.parametrize("padding", [b"", bytes(44)])
def test_an_announcement_can_be_padded(padding: bytes) -> None:
    assert announced_size(announcement(65536) + padding) == 65536


@pytest.mark.parametrize("data", [b"", bytes(56), b"RDMAping", b"hello" * 5])
def test_other_private_data_announces_no_size(data: bytes) -> None:
    assert announced_size(data) is None


def test_a_rejection_can_be_padded() -> None:
    assert rejection_reason(rejection("too large") + bytes(120)) == "too large"
    assert rejection_reason(bytes(148)) is None
    assert len(rejection(f"messages of at most {MAX_SIZE} bytes are answered")) <= 148


def test_options_limit_the_memory_for_large_messages() -> None:
    assert options_for(None) == DEFAULT_OPTIONS
    options = options_for(MAX_SIZE, busy_poll=0.001)
    assert (options.max_message_size, options.busy_poll) == (MAX_SIZE, 0.001)
    assert options.recv_depth * options.max_message_size <= 4 * MAX_SIZE
    assert options_for(0).max_message_size == 1


def test_statistics_of_correct_answers() -> None:
    statistics = Statistics()
    statistics.peer = "10.7.1.1 port 7473"
    for milliseconds in (1, 2, 3, 10):
        statistics.add(milliseconds / 1000)
    assert statistics.all_correct
    assert statistics.lines() == [
        "",
        "--- 10.7.1.1 port 7473 ping statistics ---",
        "4 sent, 4 received, 0 lost",
        "round trip min/avg/median/max/mdev = 1.000/4.000/2.500/10.000/3.536 ms",
    ]


def test_statistics_without_messages_are_empty() -> None:
    statistics = Statistics()
    assert statistics.lines() == []
    assert not statistics.all_correct


def test_statistics_count_lost_and_wrong() -> None:
    statistics = Statistics()
    statistics.lost = 1
    assert statistics.lines()[2:] == ["1 sent, 0 received, 1 lost"]
    statistics.add(0.001)
    statistics.wrong = 1
    assert statistics.lines()[2] == "2 sent, 1 received, 1 lost, 1 wrong"
    assert not statistics.all_correct


def test_equal_times_have_a_deviation_of_zero() -> None:
    statistics = Statistics()
    for _ in range(1000):
        statistics.add(0.1)
    assert statistics.lines()[-1].endswith("= 100.000/100.000/100.000/100.000/0.000 ms")
