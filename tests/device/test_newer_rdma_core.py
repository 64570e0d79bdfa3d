"""The functions that are new in rdma-core 60, with the rdma-core and the kernel of this machine.

tests/unit/test_libraries.py tests their arguments and errors with libraries of its own.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator

import loops
import pytest
from machine import kernel_version

from aiordma import AddrInfo, PortSpace, VerbsError
from aiordma.enums import AddrInfoFlags, CmEventType
from aiordma.rdmacm import CmEvent, CmId, DeviceAddress, EventChannel

pytestmark = pytest.mark.real("the functions of the installed libraries")

NEEDED_KERNEL = (6, 18)
HAS_FUNCTIONS = hasattr(ctypes.CDLL("librdmacm.so.1"), "rdma_write_cm_event")


@pytest.fixture
def channel() -> Iterator[EventChannel]:
    channel = EventChannel()
    yield channel
    channel.close()


def is_refused(call: Callable[[], None]) -> bool:
    """Make a call. Return True if it failed as it must with an older rdma-core or kernel."""
    expected = 0
    if not HAS_FUNCTIONS:
        expected = errno.ENOSYS
    elif kernel_version() < NEEDED_KERNEL:
        expected = errno.EINVAL
    if not expected:
        call()
        return False
    with pytest.raises(VerbsError) as refused:
        call()
    assert refused.value.errno == expected
    return True


async def next_event(channel: EventChannel) -> CmEvent:
    found: list[CmEvent] = []

    def read() -> bool:
        found.extend(channel.get_events())
        return bool(found)

    await loops.until(read, "an event of the connection manager")
    (event,) = found
    return event


async def test_an_event_that_a_program_writes(
    address: DeviceAddress, channel: EventChannel
) -> None:
    cm_id = CmId.create(channel, PortSpace.TCP)
    try:
        if not is_refused(lambda: cm_id.write_event(-7, 1 << 40)):
            event = await next_event(channel)
            assert (event.type, event.status, event.arg) == (CmEventType.USER, -7, 1 << 40)
    finally:
        cm_id.destroy()


async def test_an_address_that_librdmacm_resolves(
    address: DeviceAddress, channel: EventChannel
) -> None:
    cm_id = CmId.create(channel, PortSpace.TCP)
    hints = AddrInfo(AddrInfoFlags.DNS, port_space=PortSpace.TCP)
    try:
        if not is_refused(lambda: cm_id.resolve_addrinfo(address.host, "7471", hints)):
            event = await next_event(channel)
            assert event.type is CmEventType.ADDRINFO_RESOLVED
            found = cm_id.query_addrinfo()
            assert address.host in str(found[0].destination)
    finally:
        cm_id.destroy()
