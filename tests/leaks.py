"""A fixture that fails a test which left anything behind: ids, queue pairs, memory, descriptors."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import loops
import pytest
from helpers import Census, wait_for_census


@functools.cache
def freeze() -> None:
    """What is there before the first test is no garbage: not to be looked at after each."""
    loops.run("uvloop", loops.settle)  # libuv keeps a pipe of its own from its first loop on
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    freeze()
    before = Census.take()
    yield
    after = wait_for_census(before)
    if after != before:
        pytest.fail(f"left behind:\nbefore {before}\nafter  {after}")
