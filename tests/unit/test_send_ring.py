"""SendRing: parts of a ring, reserved and released in order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from aiordma.streams.stream_sender import SendRing


def test_parts_follow_each_other() -> None:
    ring = SendRing(10)
    assert [ring.reserve(3), ring.reserve(1), ring.reserve(2)] == [(0, 3), (3, 1), (4, 2)]
    assert ring.free == 4


def test_a_part_ends_at_the_end_of_the_ring() -> None:
    ring = SendRing(10)
    ring.reserve(8)
    ring.release(8)
    assert ring.reserve(5) == (8, 2)
    assert ring.reserve(3) == (0, 3)


def test_a_part_is_no_larger_than_the_free_bytes() -> None:
    ring = SendRing(10)
    ring.reserve(8)
    ring.release(3)
    assert ring.reserve(9) == (8, 2)
    assert ring.reserve(9) == (0, 3)
    assert ring.reserve(9) == (3, 0)


def test_a_full_ring_reserves_nothing() -> None:
    ring = SendRing(10)
    assert ring.reserve(99) == (0, 10)
    for _ in range(3):
        assert ring.reserve(1)[1] == 0
    assert ring.free == 0
    ring.release(10)
    assert ring.reserve(99) == (0, 10)


def test_reserving_no_bytes_takes_none() -> None:
    ring = SendRing(10)
    ring.reserve(4)
    assert ring.reserve(0) == (4, 0)
    assert ring.free == 6


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_small_ring_wraps_around_many_times(size: int) -> None:
    ring = SendRing(size)
    for number in range(100):
        assert ring.reserve(1) == (number % size, 1)
        ring.release(1)


@how(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 60),
    st.lists(st.one_of(st.none(), st.integers(0, 80)), max_size=80),
)
def test_no_byte_is_reserved_twice(size: int, steps: list[int | None]) -> None:
    """None releases the oldest part, a number reserves one."""
    ring = SendRing(size)
    reserved: deque[range] = deque()
    for nbytes in steps:
        if nbytes is not None:
            free = ring.free
            start, length = ring.reserve(nbytes)
            assert (length > 0) == (min(nbytes, free) > 0)
            assert length <= nbytes
            part = range(start, start + length)
            used = {at for other in reserved for at in other}
            assert used.isdisjoint(part)
            assert 0 <= start < size
            assert start + length <= size
            reserved.append(part)
        elif reserved:
            ring.release(len(reserved.popleft()))
        assert ring.free == size - sum(map(len, reserved))
