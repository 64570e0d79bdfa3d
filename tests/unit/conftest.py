"""Fixtures: a time limit for tests that would wait for ever on a bug, and fake verbs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.verbs import FakeVerbs, compile_verbs

TIME_LIMIT = 20.0


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Fail a test that takes longer than TIME_LIMIT."""

    def give_up(*_: object) -> None:
        pytest.fail(f"not done after {TIME_LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the verbs provider without a device: see fakes.verbs."""
    return compile_verbs(tmp_path_factory.mktemp("verbs"))


@pytest.fixture
def verbs(library: Path) -> Iterator[FakeVerbs]:
    """Make one fake device."""
    made = FakeVerbs(library)
    yield made
    made.close()
