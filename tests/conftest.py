"""What every test sees: the versions it runs with, and the devices it runs on.

Tests that take `address` run once on each RDMA device of this machine, those that take
`any_address` at each address of each device. Without a device they fail: run them in the lab.
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
    try:
        return device_addresses()
    except RdmaError:
        return []


ADDRESSES = found_addresses()

# A shell has its background jobs ignore Ctrl-C, and their children too: tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
    """Tests that others stand for are not run, and not called skipped either."""
    asked = config.getoption("--transport")
    spared = {item for item in items if _is_others(item, asked) or _is_spared(item)}
    if spared:
        config.hook.pytest_deselected(items=list(spared))
        items[:] = [item for item in items if item not in spared]


def _is_others(item: pytest.Item, asked: str | None) -> bool:
    """Whether it is for the transport that another machine sees to."""
    marker = item.get_closest_marker("transport")
    return marker is not None and asked not in (None, marker.args[0])


def _is_spared(item: pytest.Item) -> bool:
    """Every test runs on every loop, and on every device, but not each on each.

    uvloop is spared RoCE where there is iWARP too, and loops other than asyncio's are spared all
    addresses of a device but one: what they would find there has nothing to do with both.
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
