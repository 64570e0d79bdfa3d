"""A fixture that fails a test that leaks ids, queue pairs, memory or file descriptors."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import loops
import machine
import pytest
from helpers import ResourceSnapshot, wait_for_snapshot


@functools.cache
def freeze() -> None:
    """Exclude all objects that exist before the first test from garbage collection."""
    loops.run("uvloop", loops.settle)  # libuv opens a pipe for its first loop, and never closes it
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Compare the resources after the test with those before it."""
    if machine.simulated is not None:  # the simulation looks for leaks itself
        yield
        return
    freeze()
    before = ResourceSnapshot.take()
    yield
    after = wait_for_snapshot(before)
    if after != before:
        pytest.fail(f"the test leaked resources:\nbefore {before}\nafter  {after}")
