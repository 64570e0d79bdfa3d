"""C functions that can block are never called on the loop's thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import loops
import pytest
from helpers import connected

from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

BLOCKING = {
    "aiordma_destroy_id",
    "ibv_alloc_pd",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_dealloc_pd",
    "ibv_dereg_mr",
    "ibv_destroy_comp_channel",
    "ibv_destroy_cq",
    "ibv_reg_mr",
    "rdma_create_qp",
    "rdma_free_devices",
    "rdma_get_devices",
}
# A worker thread makes these on iWARP only, where rdma_connect() connects a TCP socket.
BLOCKING_ON_IWARP = {"aiordma_destroy_qp", "rdma_connect"}
# Threads of C make these, also for a connection whose queue pair a worker thread has made.
IN_C = {"rdma_accept", "rdma_resolve_route"}
# On iWARP this one, too. Elsewhere it does not block, and the loop's thread makes it.
DISCONNECT = "rdma_disconnect"


class RecordingLibrary:
    """A proxy of the compiled library that records the name and the thread of each call."""

    def __init__(self, lib: object, calls: list[tuple[str, int]]) -> None:
        self._lib = lib
        self._calls = calls

    def __getattr__(self, name: str) -> object:
        member = getattr(self._lib, name)
        return self._recording(name, member) if callable(member) else member

    def _recording(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self._calls.append((name, threading.get_ident()))
            return function(*arguments)

        return call


@pytest.mark.real("the threads of calls are the subject")
async def test_blocking_calls_are_made_by_other_threads(
    address: DeviceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(("aiordma.rdmacm.", "aiordma.verbs.")) and hasattr(module, "lib"):
            monkeypatch.setattr(module, "lib", RecordingLibrary(module.lib, calls))
    monkeypatch.setattr("aiordma.dispatch.cm_events._initialised", False)
    async with connected(address) as pair:
        await pair.client.send(bytes(5000))
        assert await pair.server.recv() == bytes(5000)
        await pair.client.aclose()
        assert [message async for message in pair.server] == []
        await pair.server.aclose()
    # The last objects are destroyed in the background.
    await loops.until(lambda: {name for name, _ in calls} >= BLOCKING, "calls of all functions")
    is_iwarp = address.transport is TransportType.IWARP
    blocking = BLOCKING | BLOCKING_ON_IWARP if is_iwarp else BLOCKING
    on_loop = {name for name, thread in calls if thread == threading.get_ident()}
    assert on_loop & blocking == set()
    in_c = IN_C | {"aiordma_make_id_calls"} | ({DISCONNECT} if is_iwarp else set())
    assert {name for name, _ in calls} & in_c == set()
    assert (DISCONNECT in on_loop) is not is_iwarp
