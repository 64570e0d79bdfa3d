"""What a synchronous id does when a thread and its owner meet; the rest is tested on a device."""

from __future__ import annotations

import asyncio

import pytest
from cm_fakes import FakeCmId

from aiordma import BusyError, LocalClosed
from aiordma.cm import CmState, SyncCmId
from aiordma.cm.handle import IdHandle

pytestmark = pytest.mark.asyncio


@pytest.fixture
def raw() -> FakeCmId:
    return FakeCmId(0x1000)


def make(raw: FakeCmId, state: CmState = CmState.IDLE) -> SyncCmId:
    handle = IdHandle(asyncio.get_running_loop(), raw)  # type: ignore[arg-type]
    return SyncCmId(handle, state, None)


async def test_a_thread_that_is_late_does_not_reopen_it(raw: FakeCmId) -> None:
    cm = make(raw, CmState.CONNECTING)
    cm.abort()
    cm.state = CmState.CONNECTED
    assert cm.state is CmState.CLOSED
    await cm.aclose()
    assert raw.calls.count("destroy") == 1


async def test_a_request_that_comes_while_it_is_closed_is_rejected(raw: FakeCmId) -> None:
    cm = make(raw, CmState.LISTENING)
    child = FakeCmId(0x2000)
    raw.during["get_request"] = cm.abort
    raw.get_request = lambda: raw.during["get_request"]() or child  # type: ignore[attr-defined]
    child.has_qp = False  # type: ignore[attr-defined]
    child.take_event = lambda: None  # type: ignore[attr-defined]
    cm._read_request()
    await asyncio.to_thread(child.destroyed.wait, 10)
    assert child.destroyed.is_set()
    await cm.aclose()


async def test_one_call_at_a_time(raw: FakeCmId) -> None:
    cm = make(raw)
    with cm._in_use(), pytest.raises(BusyError), cm._in_use():
        raise AssertionError("two at once")
    cm.abort()
    with pytest.raises(LocalClosed):
        await cm.get_request()
    await cm.aclose()
