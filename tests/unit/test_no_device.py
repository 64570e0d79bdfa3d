"""A machine without an RDMA device: everything can be imported, and errors have a hint.

The simulator is such a machine while no simulation runs.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import EventChannel, VerbsError
from aiordma.rdmacm import DeviceReference, device_addresses, getaddrinfo

IMPORT = """
import json, os, sys, threading
import aiordma, aiordma.rdmacm, aiordma.verbs
paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
print(json.dumps({
    "files": [os.readlink(path) for path in paths if os.path.exists(path)],
    "threads": threading.active_count(),
    "modules": [name for name in sys.modules if name.startswith("aiordma.")],
}))
"""


def test_importing_opens_no_device_and_starts_no_thread() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    assert [path for path in seen["files"] if "infiniband" in path] == []
    assert seen["threads"] == 1
    assert [name for name in seen["modules"] if ".lab" in name or ".cli" in name] == []


def test_the_public_names_are_sorted_and_exist() -> None:
    assert aiordma.__all__ == sorted(aiordma.__all__)
    assert [name for name in aiordma.__all__ if not hasattr(aiordma, name)] == []


CALLS: list[Callable[[], Any]] = [
    EventChannel,
    DeviceReference,
    device_addresses,
    lambda: getaddrinfo("10.7.1.1", 7471),
    lambda: aiordma.connect("192.0.2.1", 7471),
    lambda: aiordma.listen("192.0.2.1", 0),
    lambda: aiordma.listen(None, 0),
]


async def enter(call: Callable[[], Any]) -> None:
    async with call():
        pass


@pytest.mark.asyncio
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_without_a_device_raises_a_hint_and_leaks_no_descriptor(call: Any) -> None:
    counts = []
    for _ in range(3):
        with pytest.raises(VerbsError, match=r"no RDMA device on this machine.*aiordma lab") as one:
            await call()
        with pytest.raises(VerbsError) as two:
            await enter(call)
        assert one.value.errno == two.value.errno == errno.ENODEV
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]  # the first call starts the thread that lists the devices
