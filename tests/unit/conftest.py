"""Fixtures: simulated devices, a time limit for each test, queues.

A test `async def test_...(simulation)` runs in the virtual time of two simulated devices, on
asyncio or trio, on RoCE or iWARP: selection.py chooses. The markers `loops` and `transport` limit
the choice.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from simulated import pytest_pyfunc_call, simulation, time_limit  # noqa: F401

# isort: split
from simulator.queues import Queues


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "simulation" in metafunc.fixturenames and inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_kind")


@pytest.fixture
def verbs() -> Iterator[Queues]:
    """Make the queues of one simulated device."""
    made = Queues()
    yield made
    made.close()
