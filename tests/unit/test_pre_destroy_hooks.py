"""The hooks that run before an id is destroyed, such as those that leave its groups."""

from __future__ import annotations

import errno

import pytest
from fakes.cm import fake_cm, raw_of

from aiordma import CmEventType, VerbsError
from aiordma.cm import CmState
from aiordma.loop import running_loop
from aiordma.rdmacm import CmEvent, SocketAddress

pytestmark = pytest.mark.asyncio

GROUP = SocketAddress("239.1.1.1", 0)


async def test_pre_destroy_hooks_run_before_the_destruction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_cm(running_loop(), monkeypatch) as made:
        cm = made.make_id()
        calls = raw_of(cm).calls

        def fail() -> None:
            calls.append("fail")
            raise VerbsError(errno.EINVAL, "ibv_detach_mcast")

        cm.handle.add_pre_destroy_hook("one", lambda: calls.append("one"))
        cm.handle.add_pre_destroy_hook("two", fail)
        cm.handle.add_pre_destroy_hook("three", lambda: calls.append("three"))
        removed = cm.handle.remove_pre_destroy_hook("one")
        assert removed is not None
        assert cm.handle.remove_pre_destroy_hook("one") is None
        await cm.aclose()
        assert calls == ["three", "fail", "destroy"]


async def test_closing_an_id_leaves_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cm(running_loop(), monkeypatch) as made:
        cm = made.make_id(CmState.ADDR_BOUND)
        raw = raw_of(cm)

        def join(group: SocketAddress, token: int, flags: object) -> None:
            raw.calls.append(f"join {group.host}")
            cm.handle_event(CmEvent(CmEventType.MULTICAST_JOIN, 0, context=token))

        monkeypatch.setattr(raw, "join_multicast", join, raising=False)
        await cm.join_multicast(GROUP)
        await cm.join_multicast(SocketAddress("239.1.1.2", 0))
        await cm.leave_multicast(GROUP)
        await cm.aclose()
        left = ["leave_multicast", "leave_multicast"]
        assert raw.calls == ["join 239.1.1.1", "join 239.1.1.2", *left, "destroy"]
