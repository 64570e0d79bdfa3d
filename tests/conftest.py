"""Hooks and fixtures of all tests: the versions in pytest's header, and the RDMA devices.

A test with the argument `address` runs once on each RDMA device of this machine. A test with the
argument `any_address` runs once for each address of each device. Without a device they fail: run
them in the lab.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile

import pytest

from aiordma import RdmaError
from aiordma.rdmacm import DeviceAddress, device_addresses

NO_DEVICE = "no RDMA device on this machine: `make test` runs the tests that need one in the lab"


def found_addresses() -> list[DeviceAddress]:
    """Return the addresses of all RDMA devices; none if RDMA does not work here."""
    try:
        return device_addresses()
    except RdmaError:
        return []


ADDRESSES = found_addresses()

# A shell makes its background jobs, and their children, ignore SIGINT. Some tests send it to
# themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


def one_per_device() -> list[DeviceAddress]:
    """Return the first address of each device, an IPv4 address if it has one."""
    chosen: dict[str, DeviceAddress] = {}
    for address in sorted(ADDRESSES, key=lambda address: ":" in address.host):
        chosen.setdefault(address.device, address)
    return list(chosen.values())


def pytest_configure(config: pytest.Config) -> None:
    """Store bytecode in a temporary directory if Python writes none (PYTHONDONTWRITEBYTECODE, -B).

    Otherwise each process that a test starts would compile all modules again.
    """
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
        help="test devices of this transport only, so that two machines can share the tests",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    transport = metafunc.config.getoption("--transport")
    for fixture, choices in (("address", one_per_device()), ("any_address", ADDRESSES)):
        if fixture in metafunc.fixturenames:
            wanted = [
                found
                for found in choices
                if _is_for_device(metafunc, found) and transport in (None, found.transport.name)
            ]
            ids = [f"{found.device}-{found.host}" for found in wanted]
            if ADDRESSES:
                metafunc.parametrize(fixture, wanted, ids=ids, indirect=True)
            else:
                metafunc.parametrize(fixture, [None], ids=["no-device"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect redundant tests. They are not reported as skipped."""
    transport = config.getoption("--transport")
    deselected = {
        item for item in items if _is_for_other_machine(item, transport) or _is_redundant(item)
    }
    if deselected:
        config.hook.pytest_deselected(items=list(deselected))
        items[:] = [item for item in items if item not in deselected]


def _is_for_other_machine(item: pytest.Item, transport: str | None) -> bool:
    """Return True if a test is marked for another transport than `--transport`."""
    marker = item.get_closest_marker("transport")
    return marker is not None and transport not in (None, marker.args[0])


def _is_redundant(item: pytest.Item) -> bool:
    """Return True for a combination of loop and address that tests nothing new.

    Every test runs on every loop and on every device, but not in every combination. uvloop is not
    tested on RoCE if there is an iWARP device, too. Loops other than asyncio's are tested at one
    address of each device. A failure there would not depend on the combination.
    """
    params = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
    if not params:
        return False
    kind = params.get("loop_kind", params.get("backend", "asyncio"))
    found = params.get("address") or params.get("any_address")
    if kind == "asyncio" or not isinstance(found, DeviceAddress):
        return False
    if found not in one_per_device():
        return True
    both = {address.transport.name for address in ADDRESSES} == {"IB", "IWARP"}
    is_ib = found.transport.name == "IB"
    return kind == "uvloop" and is_ib and both and not item.get_closest_marker("transport")


def _is_for_device(metafunc: pytest.Metafunc, found: DeviceAddress) -> bool:
    """Return False if a test is marked `transport("IB")` or `transport("IWARP")` for another."""
    marker = metafunc.definition.get_closest_marker("transport")
    return marker is None or marker.args[0] == found.transport.name


@pytest.fixture
def address(request: pytest.FixtureRequest) -> DeviceAddress:
    if request.param is None:
        pytest.fail(NO_DEVICE)
    assert isinstance(request.param, DeviceAddress)
    return request.param


any_address = address
