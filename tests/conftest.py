"""What every test sees: the versions it runs with, and the devices it runs on.

Tests that take `address` run once on each RDMA device of this machine, those that take
`any_address` at each address of each device. Without a device they fail: run them in the lab.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile

import pytest

from aiordma import RdmaError
from aiordma.rdmacm import DeviceAddress, device_addresses

NO_DEVICE = "no RDMA device on this machine: `make test` runs the tests that need one in the lab"


def found_addresses() -> list[DeviceAddress]:
    try:
        return device_addresses()
    except RdmaError:
        return []


ADDRESSES = found_addresses()


def one_per_device() -> list[DeviceAddress]:
    """The first address of each device, an IPv4 one if there is one."""
    chosen: dict[str, DeviceAddress] = {}
    for address in sorted(ADDRESSES, key=lambda address: ":" in address.host):
        chosen.setdefault(address.device, address)
    return list(chosen.values())


def pytest_configure(config: pytest.Config) -> None:
    """Where Python is told to keep no bytecode, each process that a test starts would compile
    everything anew: let them share it as long as the tests run."""
    if sys.dont_write_bytecode:
        cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(cache.cleanup)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = cache.name


def pytest_report_header() -> list[str]:
    rdma_core = subprocess.run(
        ["dpkg-query", "--show", "librdmacm1"], capture_output=True, text=True, check=False
    ).stdout.strip()
    devices = ", ".join(f"{found.device} at {found.host}" for found in ADDRESSES) or "none"
    return [
        f"kernel: {platform.release()}, rdma-core: {rdma_core or 'unknown'}",
        f"RDMA devices: {devices}",
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        choices=["IB", "IWARP"],
        help="only devices of this transport: two machines can share the tests, each has both",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = metafunc.config.getoption("--transport")
    for fixture, choices in (("address", one_per_device()), ("any_address", ADDRESSES)):
        if fixture in metafunc.fixturenames:
            wanted = [
                found
                for found in choices
                if _fits(metafunc, found) and asked in (None, found.transport.name)
            ]
            ids = [f"{found.device}-{found.host}" for found in wanted]
            if ADDRESSES:
                metafunc.parametrize(fixture, wanted, ids=ids, indirect=True)
            else:
                metafunc.parametrize(fixture, [None], ids=["no-device"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of the other transport are not skipped: the other machine runs them."""
    asked = config.getoption("--transport")
    markers = {item: item.get_closest_marker("transport") for item in items}
    others = [
        item for item, marker in markers.items() if marker and asked not in (None, marker.args[0])
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def _fits(metafunc: pytest.Metafunc, found: DeviceAddress) -> bool:
    """Whether a test marked `transport("IB")` or `transport("IWARP")` is meant for this device."""
    marker = metafunc.definition.get_closest_marker("transport")
    return marker is None or marker.args[0] == found.transport.name


@pytest.fixture
def address(request: pytest.FixtureRequest) -> DeviceAddress:
    if request.param is None:
        pytest.fail(NO_DEVICE)
    assert isinstance(request.param, DeviceAddress)
    return request.param


any_address = address
