"""SendRing: places in a ring, taken and given back in order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from aiordma.streams.stream_sender import SendRing


def test_places_follow_each_other() -> None:
    ring = SendRing(10)
    assert [ring.reserve(3), ring.reserve(1), ring.reserve(2)] == [(0, 3), (3, 1), (4, 2)]
    assert ring.free == 4


def test_a_place_ends_with_the_ring() -> None:
    ring = SendRing(10)
    ring.reserve(8)
    ring.release(8)
    assert ring.reserve(5) == (8, 2)
    assert ring.reserve(3) == (0, 3)


def test_a_place_is_no_larger_than_what_is_free() -> None:
    ring = SendRing(10)
    ring.reserve(8)
    ring.release(3)
    assert ring.reserve(9) == (8, 2)
    assert ring.reserve(9) == (0, 3)
    assert ring.reserve(9) == (3, 0)


def test_a_full_ring_has_no_place() -> None:
    ring = SendRing(10)
    assert ring.reserve(99) == (0, 10)
    for _ in range(3):
        assert ring.reserve(1)[1] == 0
    assert ring.free == 0
    ring.release(10)
    assert ring.reserve(99) == (0, 10)


def test_nothing_takes_no_place() -> None:
    ring = SendRing(10)
    ring.reserve(4)
    assert ring.reserve(0) == (4, 0)
    assert ring.free == 6


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_small_ring_goes_round_and_round(size: int) -> None:
    ring = SendRing(size)
    for number in range(100):
        assert ring.reserve(1) == (number % size, 1)
        ring.release(1)


@how(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 60),
    st.lists(st.one_of(st.none(), st.integers(0, 80)), max_size=80),
)
def test_no_byte_is_taken_twice(size: int, steps: list[int | None]) -> None:
    """None gives the oldest place back, a number takes one."""
    ring = SendRing(size)
    taken: deque[range] = deque()
    for nbytes in steps:
        if nbytes is not None:
            free = ring.free
            start, length = ring.reserve(nbytes)
            assert (length > 0) == (min(nbytes, free) > 0)
            assert length <= nbytes
            place = range(start, start + length)
            used = {at for other in taken for at in other}
            assert used.isdisjoint(place)
            assert 0 <= start < size
            assert start + length <= size
            taken.append(place)
        elif taken:
            ring.release(len(taken.popleft()))
        assert ring.free == size - sum(map(len, taken))
