"""Runs tests on simulated devices, in virtual time, on asyncio or trio.

tests/unit uses it for each `async def test_...(simulation)`. As a plugin it runs the tests of the
devices as well: pytest -p simulated tests/device. The devices are those of the lab. Tests that are
marked `real` are left out, and so are functions that are not `async`. So the library is tested in
seconds, and the same tests prove on real devices that the simulator is right.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator

import machine
import pytest
from simulator import Simulation  # before everything that imports aiordma

# isort: split
import loops
from helpers import TIME_LIMIT
from simulator.verbs import Device
from simulator.world import LabSchedule

from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

HOSTS = {
    "roce0": (TransportType.IB, "10.0.0.1", "fd00::1"),
    "iwarp0": (TransportType.IWARP, "10.0.0.2", "fd00::2"),
}


@pytest.fixture(autouse=True)
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
def simulation(request: pytest.FixtureRequest) -> Simulation:
    """Return two simulated devices with an empty network."""
    return Simulation(iwarp=request.param == "iwarp")


def lab() -> Simulation:
    """Return a simulation of the devices of the lab. They are not connected with each other."""
    near, far = (
        Device(name, *hosts, iwarp=kind is TransportType.IWARP)
        for name, (kind, *hosts) in HOSTS.items()
    )
    return Simulation(devices=(near, far), schedule=LabSchedule())


def pytest_configure(config: pytest.Config) -> None:
    machine.simulated = [
        DeviceAddress(host, "eth0", name, transport, 1)
        for name, (transport, *hosts) in HOSTS.items()
        for host in hosts
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_device = [item for item in items if "device" in item.path.parts and not _runs(item)]
    config.hook.pytest_deselected(items=needs_device)
    items[:] = [item for item in items if item not in needs_device]


def _runs(item: pytest.Item) -> bool:
    """Return True if a test of the devices runs on simulated ones."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("real") is not None:
        return False
    return inspect.iscoroutinefunction(item.obj)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in a simulation. `loop_kind` tells it from coroutine tests of other plugins."""
    kind = getattr(pyfuncitem, "callspec", None) and pyfuncitem.callspec.params.get("loop_kind")
    if kind is None:
        return None
    simulation = pyfuncitem.funcargs.get("simulation") or lab()
    assert isinstance(simulation, Simulation)
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    simulation.run(lambda: loops.in_nursery(lambda: pyfuncitem.obj(**arguments)), str(kind))
    return True
