"""Hooks and fixtures of all tests: the versions in pytest's header, and the RDMA devices.

A test with the argument `address` or `any_address` runs on RDMA devices of this machine: see
selection.py. Without a device it fails: run it in the lab.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
import selection
from machine import found_addresses

if TYPE_CHECKING:
    from aiordma.rdmacm import DeviceAddress

NO_DEVICE = "no RDMA device on this machine: `make test` runs the tests that need one in the lab"


# A shell makes its background jobs, and their children, ignore SIGINT. Some tests send it to
# themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
    devices = ", ".join(f"{found.device} at {found.host}" for found in found_addresses()) or "none"
    return [
        f"kernel: {platform.release()}, rdma-core: {rdma_core or 'unknown'}",
        f"RDMA devices: {devices}",
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="run each test on every loop and every device, not only on some: see selection.py",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    selection.parametrize(metafunc)


@pytest.fixture
def address(request: pytest.FixtureRequest) -> DeviceAddress:
    if request.param is None:
        pytest.fail(NO_DEVICE)
    found: DeviceAddress = request.param
    return found


any_address = address
