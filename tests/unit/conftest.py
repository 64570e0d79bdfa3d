"""Fixtures: simulated devices, a time limit for tests that could wait for ever, queues.

A test `async def test_...(simulation)` runs in the virtual time of two simulated devices, on
asyncio or trio, on RoCE or iWARP: selection.py chooses. The markers `loops` and `transport` limit
the choice.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator

import pytest
from simulator import Simulation  # before everything that imports aiordma

# isort: split
import loops
from simulator.queues import Queues

TIME_LIMIT = 20.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "simulation" in metafunc.fixturenames and inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_kind")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    simulation = pyfuncitem.funcargs.get("simulation")
    if simulation is None or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    assert isinstance(simulation, Simulation)
    kind = str(pyfuncitem.callspec.params["loop_kind"])
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    simulation.run(lambda: loops.in_nursery(lambda: pyfuncitem.obj(**arguments)), kind)
    return True


@pytest.fixture
def simulation(request: pytest.FixtureRequest, time_limit: None) -> Simulation:
    """Return two simulated devices with an empty network."""
    return Simulation(iwarp=request.param == "iwarp")


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


@pytest.fixture
def verbs() -> Iterator[Queues]:
    """Make the queues of one simulated device."""
    made = Queues()
    yield made
    made.close()
