"""A fixture that fails a test which left anything behind: ids, queue pairs, memory, descriptors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import Census, wait_for_census


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = Census.take()
    yield
    after = wait_for_census(before, seconds=6)
    if after != before:
        pytest.fail(f"left behind:\nbefore {before}\nafter  {after}")
