"""Fixtures: a time limit for tests that might never end, and a verbs provider without a device."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from verbs_fakes import FakeVerbs, compile_verbs

TIME_LIMIT = 20.0


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Fail the test if it takes longer than TIME_LIMIT seconds."""

    def fail(*_: object) -> None:
        pytest.fail(f"not done after {TIME_LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared library of a verbs provider without a device. See verbs_fakes."""
    return compile_verbs(tmp_path_factory.mktemp("verbs"))


@pytest.fixture
def verbs(library: Path) -> Iterator[FakeVerbs]:
    """A fake device of that provider."""
    fake = FakeVerbs(library)
    yield fake
    fake.close()
