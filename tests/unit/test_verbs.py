"""Objects of aiordma.verbs on a simulated device: completions, events, and calls once closed."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.ids import resolved
from simulator.verbs import gid_of
from simulator.world import ffi, lib

from aiordma import VerbsError, verbs
from aiordma.enums import AccessFlags, AsyncEventType, WrOpcode


@dataclass
class Objects:
    pd: verbs.ProtectionDomain
    channel: verbs.CompletionChannel
    cq: verbs.CompletionQueue
    raw: Any
    """The C struct of the simulated completion queue."""


@asynccontextmanager
async def objects(simulation: Simulation) -> AsyncIterator[Objects]:
    """Make objects of the near device. Close them after the block."""
    async with await resolved(simulation) as cm_id:
        device = cm_id.device()
        pd, channel = verbs.ProtectionDomain(device), verbs.CompletionChannel(device)
        cq = verbs.CompletionQueue(channel, 4)
        yield Objects(pd, channel, cq, simulation.world.objects[cq.address].pointer)
        for one in (cq, cq, channel, channel, pd, pd):
            one.close()


def complete(made: Objects, *numbers: int) -> None:
    for number in numbers:
        wc = ffi.new("struct ibv_wc *", {"wr_id": number})
        lib.sim_complete(made.raw, wc, ffi.NULL, 0, False)


async def test_completions_raise_one_event_of_an_armed_queue(simulation: Simulation) -> None:
    async with objects(simulation) as made:
        assert (made.channel.ready_queues(), made.cq.poll()) == ([], [])
        for first in (1, 3):  # ready_queues() has armed it again
            if first == 1:
                made.cq.request_notify()
            complete(made, first, first + 1)
            await loops.sleep(1)
            assert made.channel.ready_queues() == [made.cq.pointer]
            assert made.channel.ready_queues() == []
            assert [wc.wr_id for wc in made.cq.poll()] == [first, first + 1]
        made.raw.poll_failure = -errno.EIO
        with pytest.raises(VerbsError, match="ibv_poll_cq"):
            made.cq.poll()
        made.raw.arm_failure = errno.EIO
        complete(made, 5)
        await loops.sleep(1)
        with pytest.raises(VerbsError, match="Input/output error"):
            made.channel.ready_queues()
    assert (made.channel.ready_queues(), made.cq.poll()) == ([], [])


@pytest.mark.transport("IB")
async def test_closed_objects_refuse_each_call(simulation: Simulation) -> None:
    async with objects(simulation) as made:
        caps = verbs.QueuePairCaps(max_send_wr=2, max_recv_wr=2)
        qp = verbs.QueuePair.create(made.pd, verbs.QueuePairInit(caps, made.cq, made.cq))
        srq = verbs.SharedReceiveQueue.create(made.pd, verbs.SharedReceiveQueueCaps(4, 1))
        window = verbs.MemoryWindow(made.pd)
        srq.post_recv(1, 0, 0, 0)
        with pytest.raises(VerbsError, match="ibv_get_srq_num"):
            srq.number  # noqa: B018
        for close in (window.close, qp.destroy, srq.close):
            close()
            close()
    pd, data, attributes = made.pd, bytearray(1), verbs.AddressHandleAttributes()
    copy = ffi.new("char[]", 1000)
    calls: dict[type[Exception], list[Callable[[], object]]] = {
        ValueError: [
            lambda: verbs.QueuePair.create(pd, verbs.QueuePairInit(caps, made.cq, made.cq)),
            lambda: verbs.SharedReceiveQueue.create(pd, verbs.SharedReceiveQueueCaps(4, 1)),
            lambda: verbs.CompletionQueue(made.channel, 4),
            lambda: verbs.AddressHandle(pd, attributes),
            lambda: attributes.of_sender(pd.device, 1, verbs.LinkHeader(), bytes(39)),
            lambda: verbs.Registration(pd, data, AccessFlags(0)),
            lambda: verbs.MemoryWindow(pd),
            lambda: window.open_pointer,
            lambda: made.cq.open_pointer,
        ],
        VerbsError: [
            lambda: qp.post_recv(1, 0, 0, 0),
            lambda: qp.post_write_inline(1, data, (0, 0)),
            lambda: qp.post_write_copy(1, (int(ffi.cast("intptr_t", copy)), 0), data, (0, 0)),
            lambda: qp.post_atomic(1, WrOpcode.ATOMIC_FETCH_AND_ADD, (0, 0), (0, 0), (0, 0)),
            lambda: qp.set_min_rnr_timer(1),
            lambda: srq.post_recv(1, 0, 0, 0),
        ],
    }
    errors: list[Exception] = []
    for error, refused in calls.items():
        for call in refused:
            with pytest.raises(error) as caught:
                call()
            errors.append(caught.value)
            data.append(0)  # no exception keeps the buffer exported


async def test_the_addresses_and_the_name_of_a_device(simulation: Simulation) -> None:
    async with await resolved(simulation) as cm_id:
        device = cm_id.device()
        assert device.query_gid(1, 0) == gid_of(simulation.near.host)
        assert repr(device) == f"<Device sim0 ({device.transport.name})>"


@pytest.mark.parametrize("kind", ["CQ_ERR", "SRQ_ERR", "WQ_FATAL"])
async def test_an_event_names_its_queue(simulation: Simulation, kind: str) -> None:
    async with objects(simulation) as made:
        made.pd.device.watch_async_events()
        simulation.near.raise_event(AsyncEventType[kind], ffi.addressof(made.raw.cq))
        (event,) = made.pd.device.get_async_events()
        expected = made.cq.element if kind == "CQ_ERR" else 0  # the others are not dispatched
        assert (event.type.name, event.element, event.port_num) == (kind, expected, 0)
