"""A machine without an RDMA device: everything can be imported, and errors have a hint.

On a machine that has a device, the same calls must get as far as the device.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import ConnectError, ConnectionOptions, EventChannel, VerbsError
from aiordma.cm import AsyncCmId
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.rdmacm import DeviceReference, device_addresses

# TEST-NET-1 of RFC 5737: no machine has the address, and no route leads there.
UNREACHABLE_HOST = "192.0.2.1"
SHORT_TIMEOUT = ConnectionOptions(resolve_timeout=0.1)


def machine_has_device() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except FileNotFoundError:
        return False


def expect_no_device(error: VerbsError) -> None:
    assert error.errno == errno.ENODEV
    assert isinstance(error, OSError)
    assert "no RDMA device on this machine" in str(error)
    assert "aiordma lab" in str(error)


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


IMPORT = """
import json, sys
import aiordma, aiordma.rdmacm, aiordma.verbs
import os, threading
print(json.dumps({
    "devices": [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")],
    "threads": threading.active_count(),
    "missing": [name for name in aiordma.__all__ if not hasattr(aiordma, name)],
    "modules": sorted(name for name in sys.modules if name.startswith("aiordma.")),
}))
"""


def test_importing_opens_no_device_and_starts_no_thread() -> None:
    seen = json.loads(run_python(IMPORT))
    assert [path for path in seen["devices"] if "infiniband" in path] == []
    assert seen["threads"] == 1
    assert seen["missing"] == []
    assert [name for name in seen["modules"] if ".lab" in name or ".cli" in name] == []


def test_the_public_names_are_sorted_and_exist() -> None:
    assert aiordma.__all__ == sorted(aiordma.__all__)
    assert all(hasattr(aiordma, name) for name in aiordma.__all__)


def test_an_event_channel_without_a_device_raises_a_hint() -> None:
    if machine_has_device():
        channel = EventChannel()
        assert not os.get_blocking(channel.fd)
        assert channel.get_events() == []
        channel.close()
        channel.close()
        assert channel.get_events() == []
    else:
        with pytest.raises(VerbsError) as caught:
            EventChannel()
        expect_no_device(caught.value)
        assert caught.value.function == "rdma_create_event_channel"


@pytest.mark.parametrize("function", [DeviceReference, device_addresses])
def test_listing_devices_without_a_device_raises_a_hint(function: Callable[[], object]) -> None:
    if machine_has_device():
        found = function()
        if isinstance(found, DeviceReference):
            found.close()
    else:
        with pytest.raises(VerbsError) as caught:
            function()
        expect_no_device(caught.value)


# Any: a connection or a listener.
CALLS: dict[str, Callable[[], AwaitableContextManager[Any]]] = {
    "connect": lambda: aiordma.connect(UNREACHABLE_HOST, 7471, options=SHORT_TIMEOUT),
    "listen": lambda: aiordma.listen(UNREACHABLE_HOST, 0),
    "listen on all": lambda: aiordma.listen(None, 0),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("entered", [False, True])
async def test_connect_and_listen_without_a_device_raise_a_hint(name: str, entered: bool) -> None:
    result = CALLS[name]()
    error: Exception | None = None
    try:
        if entered:
            async with result:
                pass
        else:
            await (await result).aclose()
    except (VerbsError, ConnectError) as caught:
        error = caught
    if machine_has_device():
        assert error is None or "aiordma lab" not in str(error)
    else:
        assert isinstance(error, VerbsError)
        expect_no_device(error)


@pytest.mark.asyncio
async def test_a_failed_connect_leaves_no_descriptor_open() -> None:
    if machine_has_device():
        cm = await AsyncCmId.create()
        await cm.aclose()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(5):
        try:
            await aiordma.connect(UNREACHABLE_HOST, 7471, options=SHORT_TIMEOUT)
        except (VerbsError, ConnectError):
            pass
        else:
            pytest.fail("TEST-NET-1 was reachable")
    for _ in range(100):
        if sorted(os.listdir("/proc/self/fd")) == before:
            return
        await asyncio.sleep(0.02)
    assert sorted(os.listdir("/proc/self/fd")) == before
