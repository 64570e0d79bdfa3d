"""SendRing: parts of a ring, reserved and released in order."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from aiordma.streams.stream_sender import SendRing


@how(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 60),
    st.lists(st.one_of(st.none(), st.integers(0, 80)), max_size=80),
)
def test_parts_follow_each_other_to_the_end_of_a_ring(size: int, steps: list[int | None]) -> None:
    """None releases the oldest part, a number reserves one."""
    ring = SendRing(size)
    reserved: deque[int] = deque()
    at = 0
    for nbytes in steps:
        if nbytes is not None:
            expected = min(nbytes, ring.free, size - at)
            assert ring.reserve(nbytes) == (at, expected)
            reserved.append(expected)
            at = (at + expected) % size
        elif reserved:
            ring.release(reserved.popleft())
        assert ring.free == size - sum(reserved)
